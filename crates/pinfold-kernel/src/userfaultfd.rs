//! userfaultfd: being told which mappings change. A descriptor is borrowed, not a number: what a monitor has opened
//! for itself no other code can read from or have watch less.
//!
//! Linux 4.11 for the events, 5.7 for watching without handling faults (write protection), 5.11 for doing so
//! without privilege.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a request to the kernel is a foreign function. Nothing is
//! write-protected here, so memory that is watched behaves as before, and what others protected is
//! [let go](unprotect) when it is written; the kernel writes into what it is passed and nothing else.

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
    /// A thread waits to write to the page that begins here: it is write-protected. Nothing here does that. The kernel may have
    /// left it so behind a userfaultfd of the program's that was closed (Linux 6.0 to 6.8), or behind memory that was moved
    /// (5.7 to 6.12), and takes it for ours once it is watched. Only the program's own instructions are reported: a system call
    /// that is to write there, or a device that is to be given the page, still gets `EFAULT`.
    Protected {
        /// Its address.
        page: usize,
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
            0x12 => Event::Protected { page: second },
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
struct UffdioContinue {
    start: u64,
    len: u64,
    mode: u64,
    mapped: i64,
}

/// No thread waits for a page of what is watched for write protection.
const CONTINUE_DONTWAKE: u64 = 1 << 0;

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
const UFFDIO_WAKE: libc::c_ulong = request(0xaa, 0x02, size_of::<UffdioRange>()) & !(1 << 30);
const UFFDIO_CONTINUE: libc::c_ulong = request(0xaa, 0x07, size_of::<UffdioContinue>());

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

/// Ends the write protection of the page at `start`, of whatever size it is, and has the threads go on that wait to write to it.
/// Where that cannot be done now, because a change is under way, they go on, too, and say so again.
pub fn unprotect(uffd: BorrowedFd<'_>, start: usize) {
    let end_protection = |len: usize| {
        let page = UffdioWriteprotect { start: start as u64, len: len as u64, mode: 0 };
        // SAFETY: the kernel reads `page`, and forbids nothing that it allowed.
        done(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &raw const page) })
    };
    if with_page_length(start, end_protection).is_err() {
        let page = UffdioRange { start: start as u64, len: page_bytes() as u64 };
        // SAFETY: the kernel reads `page`.
        unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE as _, &raw const page) };
    }
}

/// Calls `ask` with the length of the page at `start`: the kernel refuses a part of a huge page with `EINVAL`, and nothing else. A
/// longer one than that is never asked for: there may be memory behind it that is not to be changed.
fn with_page_length(start: usize, ask: impl Fn(usize) -> Result<(), Errno>) -> Result<(), Errno> {
    const LONGEST: usize = 16 << 30;
    let mut length = page_bytes();
    loop {
        match ask(length) {
            Err(Errno(libc::EINVAL)) if length < LONGEST && start.is_multiple_of(2 * length) => {
                length *= 2;
            }
            answer => return answer,
        }
    }
}

/// Whether every page between `start` and `end` belongs to a mapping that some userfaultfd watches: at a moment
/// during the call, all of them but the last in one mapping. They are addresses that the kernel took for a userfaultfd
/// before. `EAGAIN` while a change that `uffd` reports is under way.
///
/// Changes nothing, whosever the mapping is: it asks to have pages of a file's cache mapped (`UFFDIO_CONTINUE`, Linux
/// 5.13). The kernel (`mcopy_atomic`, `mfill_atomic`) first looks, under the lock of all mappings or of this one, for one that
/// has the whole range and a watch (`ENOENT`); then it refuses one without a file (`EINVAL`). So it does a range that
/// is not whole huge pages in a mapping of those. In a mapping of a file that has none, a page that is in its cache may be
/// mapped, as by touching it.
pub fn watches(uffd: BorrowedFd<'_>, start: usize, end: usize) -> Result<bool, Errno> {
    /// No kernel has smaller huge pages. What is no multiple of this is not whole huge pages.
    const FEWEST: usize = 8;
    let page = page_bytes();
    if (start | end).is_multiple_of(FEWEST * page) {
        return Ok(continues(uffd, start, end - page)? && continues(uffd, end - page, end)?);
    }
    continues(uffd, start, end)
}

fn continues(uffd: BorrowedFd<'_>, start: usize, end: usize) -> Result<bool, Errno> {
    let len = end.saturating_sub(start) as u64;
    let mut request =
        UffdioContinue { start: start as u64, len, mode: CONTINUE_DONTWAKE, mapped: 0 };
    // SAFETY: the kernel reads and writes `request`; what it may do to the memory, touching it does, too.
    let answer = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_CONTINUE as _, &raw mut request) };
    match checked(answer.into()) {
        // Of a watched mapping: of memory without a file, or of one, with the page there, or not in its cache.
        Ok(_) | Err(Errno(libc::EINVAL | libc::EEXIST | libc::EFAULT)) => Ok(true),
        Err(Errno(libc::ENOENT)) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Reads as many events as there are and fit; the threads that caused them go on.
pub fn read(uffd: BorrowedFd<'_>, messages: &mut [Message]) -> Result<usize, Errno> {
    let bytes = std::mem::size_of_val(messages);
    // SAFETY: the slice's bytes, of which the kernel writes whole messages; every bit pattern is a `Message`.
    let buffer =
        unsafe { std::slice::from_raw_parts_mut(messages.as_mut_ptr().cast::<u8>(), bytes) };
    Ok(rustix::io::read(uffd, buffer)? / size_of::<Message>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::OwnedMapping;
    use std::cell::Cell;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn requests_have_the_sizes_and_numbers_that_the_kernel_knows() {
        assert_eq!(UFFDIO_API, 0xc018_aa3f);
        assert_eq!(UFFDIO_REGISTER, 0xc020_aa00);
        assert_eq!(UFFDIO_UNREGISTER, 0x8010_aa01);
        assert_eq!(UFFDIO_WRITEPROTECT, 0xc018_aa06);
        assert_eq!(UFFDIO_WAKE, 0x8010_aa02);
        assert_eq!(UFFDIO_CONTINUE, 0xc020_aa07);
        assert_eq!(size_of::<Message>(), 32);
    }

    /// Whether a userfaultfd has write-protected the page: bit 57 of its entry.
    fn is_protected(page: &OwnedMapping) -> bool {
        let mut entry = [0; 8];
        let place = (page.start().addr().get() / page_bytes() * 8) as u64;
        std::fs::File::open("/proc/self/pagemap")
            .unwrap()
            .read_exact_at(&mut entry, place)
            .unwrap();
        u64::from_ne_bytes(entry) & 1 << 57 != 0
    }

    /// Of another library's monitor, say: what that has protected stays protected, and what is not there stays away.
    #[test]
    fn to_ask_who_watches_changes_nothing() {
        let open = || {
            let uffd = open().ok()?;
            let has = api(uffd.as_fd(), feature::WRITE_PROTECT).ok()?;
            (has & feature::WRITE_PROTECT != 0).then_some(uffd)
        };
        let (Some(ours), Some(theirs)) = (open(), open()) else {
            return eprintln!("skipped: no userfaultfd with write protection");
        };
        let bytes = page_bytes();
        for there in [true, false] {
            let mut page = OwnedMapping::new(bytes).unwrap();
            let start = page.start().addr().get();
            if there {
                page.fill(7);
            }
            assert_eq!(watches(ours.as_fd(), start, start + bytes), Ok(false));
            register(theirs.as_fd(), start, start + bytes).unwrap();
            let protect = UffdioWriteprotect { start: start as u64, len: bytes as u64, mode: 1 };
            // SAFETY: the kernel reads `protect`; the page is this test's, and is not written to from here on.
            let answer = unsafe {
                libc::ioctl(theirs.as_raw_fd(), UFFDIO_WRITEPROTECT as _, &raw const protect)
            };
            assert_eq!(answer, 0);
            let before = (is_protected(&page), crate::pages::is_there(page.range().unwrap()));
            assert_eq!(
                before.0, there,
                "what is not there has no protection, as this was asked for"
            );
            assert_eq!(watches(ours.as_fd(), start, start + bytes), Ok(true));
            assert_eq!(watches(theirs.as_fd(), start, start + bytes), Ok(true));
            let after = (is_protected(&page), crate::pages::is_there(page.range().unwrap()));
            assert_eq!(after, before);
        }
    }

    /// What lies behind it may be another's.
    #[test]
    fn only_the_page_that_is_waited_for_is_let_go() {
        let asked = |start: usize, size: usize| {
            let last = Cell::new(0);
            let answer = with_page_length(start, |length| {
                last.set(length);
                if length < size { Err(Errno(libc::EINVAL)) } else { Ok(()) }
            });
            (answer.is_ok(), last.get())
        };
        let page = page_bytes();
        assert_eq!(asked(1 << 40, page), (true, page));
        assert_eq!(asked(1 << 40, 2 << 20), (true, 2 << 20));
        assert_eq!(asked(3 << 20, 2 << 20), (false, 1 << 20), "no page of that size begins there");
        assert_eq!(asked(1 << 40, usize::MAX), (false, 16 << 30));
        for errno in [libc::EAGAIN, libc::ENOENT] {
            let once = Cell::new(0);
            let answer = with_page_length(1 << 40, |_| {
                once.set(once.get() + 1);
                Err(Errno(errno))
            });
            assert_eq!((answer, once.get()), (Err(Errno(errno)), 1));
        }
    }

    /// A part of a watched mapping counts, a range with an end that is not watched, or with a gap, does not.
    #[test]
    fn every_page_of_a_range_must_be_watched() {
        let Ok(uffd) = open() else { return eprintln!("skipped: no userfaultfd") };
        if api(uffd.as_fd(), feature::WRITE_PROTECT).is_err() {
            return eprintln!("skipped: no write protection");
        }
        let bytes = page_bytes();
        let pages = OwnedMapping::new(32 * bytes).unwrap();
        let start = pages.start().addr().get().next_multiple_of(8 * bytes);
        let page = |number: usize| start + number * bytes;
        register(uffd.as_fd(), page(1), page(16)).unwrap();
        let asked = |first, last| watches(uffd.as_fd(), page(first), page(last)).unwrap();
        for (first, last) in [(1, 16), (1, 2), (15, 16), (3, 9), (8, 16)] {
            assert!(asked(first, last), "{first}..{last}");
        }
        for (first, last) in [(0, 1), (0, 8), (0, 16), (1, 17), (16, 17), (16, 24), (8, 24)] {
            assert!(!asked(first, last), "{first}..{last}");
        }
    }

    #[test]
    fn what_is_no_userfaultfd_is_an_error() {
        let null = crate::descriptor::open(c"/dev/null", 0).unwrap();
        assert_eq!(changing(null.as_fd()), Err(Errno(libc::ENOTTY)));
        assert_eq!(read(null.as_fd(), &mut [Message::default()]), Ok(0));
    }
}
