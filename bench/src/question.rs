//! The ways to ask the kernel whether a change of mappings is under way, tried out explicitly: what
//! each costs, and whether it is true.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls on a userfaultfd of its own and on mappings of its
//! own, from which no reference is borrowed: they are named by address only.

#![allow(unsafe_code)]

use crate::machine;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;

/// A way to ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Question {
    /// `UFFDIO_WRITEPROTECT` of an empty range: what the monitor asks.
    WriteProtect,
    /// `UFFDIO_ZEROPAGE` of an empty range.
    ZeroPage,
    /// `UFFDIO_WRITEPROTECT` with no argument to read.
    NoArgument,
    /// A request that userfaultfd does not know: what a request costs that looks at nothing.
    Unknown,
    /// Whether there is something to read.
    Poll,
}

impl Question {
    /// All but the first, which they are compared with.
    pub(crate) const OTHERS: [Self; 4] =
        [Self::ZeroPage, Self::NoArgument, Self::Unknown, Self::Poll];

    /// Its name in a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::WriteProtect => "write-protect nothing",
            Self::ZeroPage => "zero nothing",
            Self::NoArgument => "write-protect, null pointer",
            Self::Unknown => "an unknown request",
            Self::Poll => "poll",
        }
    }
}

// `linux/userfaultfd.h`, as every architecture encodes it but MIPS, PowerPC and SPARC.
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const ZEROPAGE: u64 = 0xc020_aa04;
const WRITEPROTECT: u64 = 0xc018_aa06;
const UNKNOWN: u64 = 0xaa77;
/// Write-protection, and events of unmapping.
const FEATURES: u64 = 1 << 0 | 1 << 6;
const MODE_WRITE_PROTECT: u64 = 1 << 1;

/// What a watched mapping takes.
const BYTES: usize = 64 << 10;

/// A userfaultfd whose events are read here.
pub(crate) struct Uffd(OwnedFd);

impl Uffd {
    /// Opens one that needs no privilege.
    pub(crate) fn open() -> Result<Self, String> {
        const USER_MODE_ONLY: libc::c_int = 1;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the call takes flags and gives a descriptor.
        let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let number = i32::try_from(opened).ok().filter(|&number| number >= 0);
        let number = number.ok_or_else(|| failed("userfaultfd"))?;
        // SAFETY: the descriptor is new and has no other owner.
        let uffd = Self(unsafe { OwnedFd::from_raw_fd(number) });
        match uffd.request(API, &mut [0xaa, FEATURES, 0, 0]) {
            0 => Ok(uffd),
            _ => Err(failed("UFFDIO_API")),
        }
    }

    /// The answer to a request, whose argument the kernel may read and write.
    fn request(&self, number: u64, argument: &mut [u64; 4]) -> libc::c_int {
        // SAFETY: every request made here has an argument of at most four words.
        unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, argument.as_mut_ptr()) }
    }

    /// Whether the kernel answers that a change is under way.
    #[inline]
    pub(crate) fn ask(&self, question: Question) -> bool {
        match question {
            Question::WriteProtect => self.is_told_to_try_again(WRITEPROTECT),
            Question::ZeroPage => self.is_told_to_try_again(ZEROPAGE),
            Question::Unknown => self.is_told_to_try_again(UNKNOWN),
            Question::NoArgument => {
                let none = std::ptr::null_mut::<u64>();
                // SAFETY: the kernel finds no argument, and says so.
                let done = unsafe { libc::ioctl(self.0.as_raw_fd(), WRITEPROTECT as _, none) };
                done < 0 && again()
            }
            Question::Poll => self.has_something_to_read(),
        }
    }

    fn is_told_to_try_again(&self, number: u64) -> bool {
        self.request(number, &mut [0; 4]) < 0 && again()
    }

    fn has_something_to_read(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel reads and writes one `pollfd`.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    /// Of how many of `count` unmappings `question` knew nothing when it was asked as soon as the
    /// addresses were free, with the event unread: when another thread could have got them.
    pub(crate) fn missed(&self, question: Question, count: usize) -> Result<usize, String> {
        let processors = machine::processors()?;
        let (here, there) = (processors.first().copied(), processors.last().copied());
        let asker = || {
            here.map_or(Ok(()), machine::stay_on)?;
            let known: Result<Vec<bool>, String> =
                (0..count).map(|_| self.knows_of_an_unmapping(question, there)).collect();
            known.map(|known| known.into_iter().filter(|known| !known).count())
        };
        thread::scope(|scope| scope.spawn(asker).join())
            .map_err(|_| "the asking thread panicked".to_string())?
    }

    fn knows_of_an_unmapping(
        &self,
        question: Question,
        there: Option<usize>,
    ) -> Result<bool, String> {
        let address = map()?;
        if self.request(REGISTER, &mut [address as u64, BYTES as u64, MODE_WRITE_PROTECT, 0]) < 0 {
            let error = failed("UFFDIO_REGISTER");
            unmap(address);
            return Err(error);
        }
        thread::scope(|scope| {
            let unmapper = scope.spawn(|| {
                // Nowhere in particular is as well.
                let _ = there.map(machine::stay_on);
                unmap(address);
            });
            while is_mapped(address) {}
            let known = self.ask(question);
            self.read_event();
            unmapper.join().map_err(|_| "the unmapping thread panicked".to_string())?;
            Ok(known)
        })
    }

    /// Lets the thread go on that unmaps.
    fn read_event(&self) {
        let mut message = [0_u64; 4];
        // SAFETY: the kernel writes one message of 32 bytes.
        while unsafe { libc::read(self.0.as_raw_fd(), message.as_mut_ptr().cast(), 32) } < 0
            && again()
        {
            std::hint::spin_loop();
        }
    }
}

/// New memory whose pages are there.
fn map() -> Result<usize, String> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: new memory, which replaces no mapping.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(failed("mmap")) } else { Ok(start.expose_provenance()) }
}

fn unmap(address: usize) {
    // SAFETY: the mapping is this file's own, and no reference borrows from it.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(address), BYTES) };
}

fn is_mapped(address: usize) -> bool {
    let mut resident = [0_u8; 1];
    let page = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the kernel looks at one page's entry and writes one byte.
    unsafe { libc::mincore(page, 1, resident.as_mut_ptr()) == 0 }
}

fn again() -> bool {
    io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}

fn failed(call: &str) -> String {
    format!("{call}: {}", io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two that the kernel answers from its count; `poll` overlooks some, but which depends on
    /// who runs when.
    #[test]
    fn a_request_that_looks_at_the_count_misses_no_unmapping() {
        let uffd = match Uffd::open() {
            Ok(uffd) => uffd,
            Err(why) => {
                eprintln!("skipped: {why}");
                return;
            }
        };
        for question in [Question::WriteProtect, Question::ZeroPage, Question::NoArgument] {
            assert!(!uffd.ask(question), "{question:?} with nothing under way");
            assert_eq!(uffd.missed(question, 50), Ok(0), "{question:?}");
        }
        assert_eq!(uffd.missed(Question::Unknown, 5), Ok(5));
    }
}
