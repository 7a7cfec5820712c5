//! Registered pages of files, on a real device under the eBPF monitor: what a lease names is what the program has
//! mapped, whatever reclaim, direct writes, truncation and splitting do in between. Needs an RDMA device, the
//! privilege to load programs, and the module `brd`; elsewhere it says what is missing.

#![allow(unsafe_code, missing_docs, clippy::unwrap_used, clippy::print_stderr)]

use pinfold::monitor::Ebpf;
use pinfold::registrar::verbs::{Device, Domain, Verbs};
use pinfold::{Access, Cache, Config};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

type VerbsCache = Cache<Verbs, Ebpf>;

#[repr(align(4096))]
struct Page([u8; 4096]);

const DEVICE: &str = "/dev/ram1";

fn skipped<T>(what: &str, result: Result<T, impl std::fmt::Display>) -> Option<T> {
    result.inspect_err(|error| eprintln!("skipped: {what}: {error}")).ok()
}

fn cache() -> Option<VerbsCache> {
    let domain = Domain::new(skipped("an RDMA device", Device::open(None))?).unwrap();
    let monitor = skipped("the eBPF monitor", Ebpf::load())?;
    Some(pinfold::cache(Verbs::new(domain).unwrap(), monitor, Config::keeping_all()).unwrap())
}

fn block_device(flags: i32) -> Option<File> {
    let _ = std::process::Command::new("modprobe").args(["brd", "rd_nr=2"]).status();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(DEVICE);
    skipped(DEVICE, opened)
}

fn map(file: &File, pages: usize) -> *mut u8 {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let none = std::ptr::null_mut();
    // SAFETY: the kernel picks the address.
    let start =
        unsafe { libc::mmap(none, pages * 4096, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

fn read(start: *mut u8) -> u8 {
    // SAFETY: mapped, and never unmapped.
    unsafe { start.read_volatile() }
}

/// Reclaim takes the entry of a page that the device has pinned and leaves the page in the file; a direct write
/// then replaces it there.
#[test]
fn a_reclaimed_page_that_a_direct_write_replaces_is_registered_anew() {
    let (Some(direct), Some(file)) = (block_device(libc::O_DIRECT), block_device(0)) else {
        return;
    };
    let Some(cache) = cache() else { return };
    let start = map(&file, 1);
    // SAFETY: mapped as long as the cache lives.
    let get = || unsafe { cache.get(start.cast_const(), 4096, Access::READ) }.unwrap();
    for pageout in [false, true] {
        direct.write_all_at(&Page([b'A'; 4096]).0, 0).unwrap();
        let (before, first) = (read(start), get().handle());
        assert_eq!(get().handle(), first, "cached");
        if pageout {
            // SAFETY: the mapping stays.
            assert_eq!(unsafe { libc::madvise(start.cast(), 4096, libc::MADV_PAGEOUT) }, 0);
        }
        direct.write_all_at(&Page([b'B'; 4096]).0, 0).unwrap();
        let after = read(start);
        assert!(before == after || get().handle() != first, "stale; reclaimed: {pageout}");
    }
}
