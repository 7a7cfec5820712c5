#![allow(unsafe_code, clippy::all)]
use pinfold_ebpf::{Programs, layout::*};
use std::os::fd::*;
use std::sync::atomic::Ordering::*;
#[test]
fn smoke() {
    let t = std::time::Instant::now();
    let programs = match Programs::load() {
        Ok(p) => p,
        Err(e) => {
            eprintln!("skipped: {e}");
            return;
        }
    };
    println!("loaded in {:?}", t.elapsed());
    let me = pinfold_ebpf::this_process().unwrap();
    let t = std::time::Instant::now();
    let view = programs.view(me.as_fd()).unwrap();
    println!("view in {:?} {view:?}", t.elapsed());
    unsafe {
        let c = libc::mmap(
            std::ptr::null_mut(),
            size_of::<Changes>(),
            1,
            1,
            view.changes.as_raw_fd(),
            0,
        );
        assert!(c != libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        assert!(
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Changes>(),
                3,
                1,
                view.changes.as_raw_fd(),
                0
            ) == libc::MAP_FAILED
        );
        assert!(libc::mprotect(c, size_of::<Changes>(), 3) != 0);
        let w =
            libc::mmap(std::ptr::null_mut(), size_of::<Wishes>(), 3, 1, view.wishes.as_raw_fd(), 0);
        let c = &*(c as *const Changes);
        let w = &*(w as *const Wishes);
        for x in &w.blocks {
            x.store(!0, SeqCst);
        }
        let p = libc::mmap(std::ptr::null_mut(), 8192, 3, 0x22, -1, 0);
        println!("page {p:?}");
        let q = libc::mmap(std::ptr::null_mut(), 8192, 3, 0x22, -1, 0);
        let mut from = c.sequence.load(SeqCst);
        let mut show = |what: &str| {
            let to = c.sequence.load(SeqCst);
            let e: Vec<_> = (from..to)
                .map(|i| {
                    let e = &c.entries[i as usize % ENTRIES];
                    (
                        e.stamp.load(SeqCst) == done(i),
                        format!("{:x}..{:x}", e.start.load(SeqCst), e.end.load(SeqCst)),
                    )
                })
                .collect();
            from = to;
            println!(
                "{what}: {e:?} flux {}",
                c.records.iter().filter(|r| r.owner.load(SeqCst) != 0).count()
            );
        };
        *(p as *mut u8) = 1;
        *(q as *mut u8) = 1;
        libc::madvise(p, 4096, libc::MADV_DONTNEED);
        show("dontneed");
        println!("{}", libc::madvise(p, 4096, 102));
        show("guard install");
        libc::madvise(p, 4096, 103);
        show("guard remove");
        libc::mmap(p, 4096, 3, 0x32, -1, 0);
        show("fixed");
        *(p as *mut u8) = 1;
        let r = libc::mremap(
            p,
            4096,
            4096,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            (q as usize + 4096) as *mut libc::c_void,
        );
        show(&format!("mremap {p:?} {r:?}"));
        libc::munmap(q, 8192);
        show("munmap");
        let fd = libc::memfd_create(c"x".as_ptr(), 0);
        libc::ftruncate(fd, 8192);
        let f = libc::mmap(std::ptr::null_mut(), 8192, 3, 1, fd, 0);
        *(f as *mut u8) = 1;
        libc::fallocate(fd, 3, 4096, 4096);
        show("punch");
        libc::ftruncate(fd, 0);
        show("truncate");
        println!("misses {}", programs.misses());
        let n = 20000;
        let t = std::time::Instant::now();
        for _ in 0..n {
            let p = libc::mmap(std::ptr::null_mut(), 4096, 3, 0x22, -1, 0);
            *(p as *mut u8) = 1;
            libc::munmap(p, 4096);
        }
        println!("watched, wished {:?}", t.elapsed() / n);
        for x in &w.blocks {
            x.store(0, SeqCst);
        }
        let t = std::time::Instant::now();
        for _ in 0..n {
            let p = libc::mmap(std::ptr::null_mut(), 4096, 3, 0x22, -1, 0);
            *(p as *mut u8) = 1;
            libc::munmap(p, 4096);
        }
        println!("watched, not wished {:?}", t.elapsed() / n);
        programs.forget(view.id());
        let t = std::time::Instant::now();
        for _ in 0..n {
            let p = libc::mmap(std::ptr::null_mut(), 4096, 3, 0x22, -1, 0);
            *(p as *mut u8) = 1;
            libc::munmap(p, 4096);
        }
        println!("not watched {:?}", t.elapsed() / n);
        drop(view);
        drop(programs);
        std::thread::sleep(std::time::Duration::from_millis(300));
        let t = std::time::Instant::now();
        for _ in 0..n {
            let p = libc::mmap(std::ptr::null_mut(), 4096, 3, 0x22, -1, 0);
            *(p as *mut u8) = 1;
            libc::munmap(p, 4096);
        }
        println!("no programs {:?}", t.elapsed() / n);
    }
}
