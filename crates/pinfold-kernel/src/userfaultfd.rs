//! userfaultfd: being told which mappings change. A descriptor is borrowed, not a number: what a monitor has opened
//! for itself no other code can read from or have watch less.
//!
//! Linux 4.11 for the events, 5.7 for watching without handling faults (write protection), 5.11 for doing so
//! without privilege.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a request to the kernel is a foreign function. Nothing is ever
//! write-protected, so memory that is watched behaves as before; the kernel writes into what it is passed and
//! nothing else.

use crate::descriptor::Descriptor;
use crate::errno::{Errno, checked, done, last_errno};
use crate::process::page_bytes;
use crate::request::request;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The features of `linux/userfaultfd.h` that the monitor asks for.
pub mod feature {
    /// Write protection of single pages.
    pub const WRITE_PROTECT: u64 = 1 << 0;
    /// `mremap` is reported.
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// `madvise` that drops pages is reported.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// `munmap` is reported.
    pub const EVENT_UNMAP: u64 = 1 << 6;
}

/// `struct uffd_msg`: what one read of a userfaultfd gives.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Message {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// A [`Message`] of a kind that the monitor asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// These addresses are unmapped.
    Unmap {
        /// The first of them.
        start: usize,
        /// Behind the last.
        end: usize,
    },
    /// Pages have another address now.
    Remap {
        /// Where they were.
        from: usize,
        /// Where they are.
        to: usize,
        /// How many bytes.
        length: usize,
    },
    /// The content of these addresses is dropped.
    Remove {
        /// The first of them.
        start: usize,
        /// Behind the last.
        end: usize,
    },
    /// Of a kind that was not asked for.
    Other,
}

impl Message {
    /// What it reports.
    pub fn event(&self) -> Event {
        let [first, second, third] =
            self.arguments.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
        match self.event {
            0x14 => Event::Remap { from: first, to: second, length: third },
            0x15 => Event::Remove { start: first, end: second },
            0x16 => Event::Unmap { start: first, end: second },
            _ => Event::Other,
        }
    }
}

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

const UFFDIO_API: libc::c_ulong = request(0xaa, 0x3f, size_of::<UffdioApi>());
const UFFDIO_REGISTER: libc::c_ulong = request(0xaa, 0x00, size_of::<UffdioRegister>());
/// `_IOR`, unlike the others.
const UFFDIO_UNREGISTER: libc::c_ulong = request(0xaa, 0x01, size_of::<UffdioRange>()) & !(1 << 30);
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(0xaa, 0x06, size_of::<UffdioWriteprotect>());

/// Opens a userfaultfd that handles no fault of the kernel, which needs no privilege.
pub fn open() -> Result<OwnedFd, Errno> {
    const USER_MODE_ONLY: libc::c_int = 1;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call takes flags and gives a descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    match Descriptor::try_from(opened) {
        // SAFETY: a new descriptor that nothing else knows of.
        Ok(opened) if opened >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(opened) }),
        _ => Err(last_errno()),
    }
}

/// Agrees on `features` and gives those that the kernel has. Can be done once per descriptor.
pub fn api(uffd: BorrowedFd<'_>, features: u64) -> Result<u64, Errno> {
    let mut api = UffdioApi { api: 0xaa, features, ioctls: 0 };
    // SAFETY: the kernel reads and writes `api`, whose size is in the request's number.
    let answer = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API as _, &raw mut api) };
    checked(answer.into()).map(|_| api.features)
}

/// Has the changes of every mapping between `start` and `end` (whole pages) reported.
pub fn register(uffd: BorrowedFd<'_>, start: usize, end: usize) -> Result<(), Errno> {
    const WRITE_PROTECT: u64 = 1 << 1;
    let len = end.saturating_sub(start) as u64;
    let mut register = UffdioRegister { start: start as u64, len, mode: WRITE_PROTECT, ioctls: 0 };
    // SAFETY: the kernel reads and writes `register`. Nothing is ever write-protected, so the
    // registered memory itself behaves as before.
    let answer = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER as _, &raw mut register) };
    done(answer)
}

/// Ends [`register`].
///
/// # Safety
///
/// No other userfaultfd of this process has the changes there reported: before Linux 6.18 its watch ends as well,
/// silently, and what rests on that is told of no change any more.
pub unsafe fn unregister(uffd: BorrowedFd<'_>, start: usize, end: usize) -> Result<(), Errno> {
    let range = UffdioRange { start: start as u64, len: end.saturating_sub(start) as u64 };
    // SAFETY: the kernel reads `range`.
    let answer = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_UNREGISTER as _, &raw const range) };
    done(answer)
}

/// Whether some change that `uffd` reports is under way: its event not yet read, or its system
/// call not yet on its way back from the wait for that.
///
/// The write-protect request begins with this question in every kernel that has it, before it
/// looks at its argument; an empty range then ends it with `EINVAL` before any lock is taken. An
/// argument at a bad address would do as well, but a fault costs a microsecond; a real range
/// takes the lock of all mappings.
///
/// # Errors
///
/// The kernel's error when `uffd` is not a userfaultfd (any more).
pub fn changing(uffd: BorrowedFd<'_>) -> Result<bool, Errno> {
    static NOTHING: UffdioWriteprotect = UffdioWriteprotect { start: 0, len: 0, mode: 0 };
    // SAFETY: the kernel reads `NOTHING`.
    let answer =
        unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &raw const NOTHING) };
    match last_errno() {
        Errno(libc::EINVAL) if answer < 0 => Ok(false),
        Errno(libc::EAGAIN) if answer < 0 => Ok(true),
        errno if answer < 0 => Err(errno),
        _ => Err(Errno(libc::EBADF)),
    }
}

/// Whether the page at `start` belongs to a mapping that some userfaultfd watches for
/// write-protection. `EAGAIN` while a change that `uffd` reports is under way.
///
/// Takes write-protection from a page that never had any.
pub fn watches(uffd: BorrowedFd<'_>, start: usize) -> Result<bool, Errno> {
    let request = UffdioWriteprotect { start: start as u64, len: page_bytes() as u64, mode: 0 };
    // SAFETY: the kernel reads `request`. Nothing is ever write-protected, so nothing changes.
    let answer =
        unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &raw const request) };
    match checked(answer.into()) {
        Ok(_) => Ok(true),
        Err(Errno(libc::ENOENT)) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Reads as many events as there are and fit; the threads that caused them go on.
pub fn read(uffd: BorrowedFd<'_>, messages: &mut [Message]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes whole messages, at most the slice's length in bytes, and every
    // bit pattern is a `Message`.
    let got = unsafe {
        libc::read(uffd.as_raw_fd(), messages.as_mut_ptr().cast(), std::mem::size_of_val(messages))
    };
    checked(got as libc::c_long).map(|bytes| bytes / size_of::<Message>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn requests_have_the_sizes_and_numbers_that_the_kernel_knows() {
        assert_eq!(UFFDIO_API, 0xc018_aa3f);
        assert_eq!(UFFDIO_REGISTER, 0xc020_aa00);
        assert_eq!(UFFDIO_UNREGISTER, 0x8010_aa01);
        assert_eq!(UFFDIO_WRITEPROTECT, 0xc018_aa06);
        assert_eq!(size_of::<Message>(), 32);
    }

    #[test]
    fn what_is_no_userfaultfd_is_an_error() {
        let null = crate::descriptor::open(c"/dev/null", 0).unwrap();
        assert_eq!(changing(null.as_fd()), Err(Errno(libc::ENOTTY)));
        assert_eq!(read(null.as_fd(), &mut [Message::default()]), Ok(0));
    }
}
