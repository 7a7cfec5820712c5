//! A process that shares this one's memory (`CLONE_VM`, as `vfork` makes one), and is killed while it
//! unmaps some of it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to make such a process, which is waited for before what it uses goes away.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// So many take the kernel long enough to be killed in the middle.
pub(crate) const PAGES: usize = 8192;
const STACK: usize = 64 << 10;

struct Work {
    at: usize,
    bytes: usize,
    has_begun: AtomicBool,
}

/// Runs in the memory and with the thread-local variables of the parent's thread: no call that uses any.
extern "C" fn unmap(work: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the caller's, which waits for the end of this process.
    let work = unsafe { &*work.cast_const().cast::<Work>() };
    work.has_begun.store(true, Ordering::Release);
    // SAFETY: the caller's memory, given up.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(work.at), work.bytes) };
    loop {
        std::hint::spin_loop();
    }
}

/// Private memory of small pages, all of them there.
pub(crate) fn populated() -> (usize, usize) {
    // SAFETY: a fresh mapping.
    unsafe {
        let bytes = PAGES * usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        libc::madvise(at, bytes, libc::MADV_NOHUGEPAGE);
        std::ptr::write_bytes(at.cast::<u8>(), 1, bytes);
        (at.expose_provenance(), bytes)
    }
}

/// Has a process that shares this memory unmap it, and kills it `after` it began to. Whether the memory is
/// gone; if not, it is unmapped here.
pub(crate) fn killed_while_unmapping(at: usize, bytes: usize, after: Duration) -> bool {
    let work = Work { at, bytes, has_begun: AtomicBool::new(false) };
    let mut stack = vec![0_u8; STACK];
    // SAFETY: the stack, which grows downwards, and the work outlive the process.
    let is_gone = unsafe {
        let top = stack.as_mut_ptr().add(STACK / 16 * 16).cast();
        let flags = libc::CLONE_VM | libc::SIGCHLD;
        let child = libc::clone(unmap, top, flags, (&raw const work).cast_mut().cast());
        assert!(child > 0, "{}", std::io::Error::last_os_error());
        while !work.has_begun.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        while begun.elapsed() < after {
            std::hint::spin_loop();
        }
        libc::kill(child, libc::SIGKILL);
        assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        let mut is_there = 0_u8;
        libc::mincore(std::ptr::with_exposed_provenance_mut(at), 1, &raw mut is_there) != 0
    };
    if !is_gone {
        // SAFETY: the caller's memory, given up.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(at), bytes) };
    }
    is_gone
}
