//! What this kernel does with pages that a device has pinned when they are moved: the facts that
//! landing is built on.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for system calls on memory of the test's own.

#![allow(unsafe_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod registrar_support;

use io_uring::IoUring;
use pinfold::registrar;
use pinfold::{Access, Registrar};
use registrar_support::{Memory, Own, PAGE};

// `linux/userfaultfd.h`, as every architecture encodes it but MIPS, PowerPC and SPARC.
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const MOVE: u64 = 0xc028_aa05;
const FEATURE_MOVE: u64 = 1 << 16;
const MODE_MISSING: u64 = 1 << 0;

struct Uffd(libc::c_int);

impl Uffd {
    /// `None` where the kernel has no `UFFDIO_MOVE` (before Linux 6.8) or refuses userfaultfd.
    fn open() -> Option<Self> {
        // SAFETY: takes flags, gives a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
        let uffd = Self(libc::c_int::try_from(fd).unwrap());
        (uffd.0 >= 0 && uffd.request(API, &mut [0xaa, FEATURE_MOVE, 0, 0, 0])).then_some(uffd)
    }

    fn request(&self, number: u64, argument: &mut [u64; 5]) -> bool {
        // SAFETY: every request made here has an argument of at most five words.
        unsafe { libc::ioctl(self.0, number as _, argument.as_mut_ptr()) == 0 }
    }

    /// Moves `bytes` bytes; the kernel's error number if it will not.
    fn move_pages(&self, from: &Memory, to: &Memory, bytes: usize) -> Result<(), i32> {
        let (from, to, bytes) = (from.pointer().addr(), to.pointer().addr(), bytes as u64);
        if self.request(MOVE, &mut [to as u64, from as u64, bytes, 0, 0]) {
            return Ok(());
        }
        Err(std::io::Error::last_os_error().raw_os_error().unwrap())
    }
}

impl Drop for Uffd {
    fn drop(&mut self) {
        // SAFETY: its own descriptor.
        unsafe { libc::close(self.0) };
    }
}

/// `UFFDIO_MOVE` keeps mappings whole, but wants an empty target that no other userfaultfd watches,
/// and pages that are not pinned: landing pages would have to be deregistered before each move.
#[test]
fn userfaultfd_moves_no_pinned_page() {
    let Some(uffd) = Uffd::open() else {
        eprintln!("skipped: no UFFDIO_MOVE");
        return;
    };
    let Ok(ring) = IoUring::new(8) else {
        eprintln!("skipped: no io_uring");
        return;
    };
    // SAFETY: the ring's table of buffers is left to the registrar.
    let registrar = unsafe { registrar::IoUring::new(&ring, 1) }.unwrap();
    let bytes = 4 * PAGE;
    let (mut from, to) = (Memory::new(bytes), Memory::new(bytes));
    from.fill(7);
    let start = to.pointer().addr() as u64;
    assert!(uffd.request(REGISTER, &mut [start, bytes as u64, MODE_MISSING, 0, 0]));
    // SAFETY: the test's own memory.
    let index = unsafe { registrar.register(from.range(), Access::WRITE) }.unwrap();
    assert_eq!(uffd.move_pages(&from, &to, bytes), Err(libc::EBUSY));
    registrar.deregister_own(index, from.range()).unwrap();
    assert_eq!(uffd.move_pages(&from, &to, bytes), Ok(()));
    assert!(to.bytes().iter().all(|&byte| byte == 7));
}
