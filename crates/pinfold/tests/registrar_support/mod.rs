//! What the tests of the registrars share: memory of their own, and processes of their own.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the system calls that make and unmake memory, users and
//! processes. Every mapping here is private to the test that made it.

#![allow(unsafe_code, dead_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use pinfold::suspend::Suspend;
use pinfold::{AddressRange, DeregisterError, Registrar};
use std::fs;
use std::ops::Range;

#[path = "../alone/mod.rs"]
mod own_process;

#[allow(unused_imports)] // not by every test that has the rest
pub(crate) use own_process::alone;

pub(crate) const PAGE: usize = 4096;

/// The end of registrations that a test made itself.
pub(crate) trait Own: Registrar {
    fn deregister_own(
        &self,
        handle: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the tests register what they end, and no cache or pool holds it. What they end twice is
        // in no other use meanwhile.
        unsafe { self.deregister(handle, range) }
    }

    fn withdraw_own(&self, handle: Self::Handle, range: AddressRange) -> Result<(), DeregisterError>
    where
        Self: Suspend,
    {
        // SAFETY: as above.
        unsafe { self.withdraw(handle, range) }
    }
}

impl<R: Registrar> Own for R {}

/// Memory that a test maps, and unmaps at its end.
#[derive(Debug)]
pub(crate) struct Memory {
    start: *mut u8,
    length: usize,
    /// What has been unmapped of it: other code may have mapped it by now.
    hole: Range<usize>,
}

impl Memory {
    /// Zeroed private memory in small pages, so that what it costs can be counted.
    pub(crate) fn new(length: usize) -> Self {
        let memory = Self::map(length, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE, -1);
        // SAFETY: advice on this test's own mapping.
        unsafe { libc::madvise(memory.start.cast(), length, libc::MADV_NOHUGEPAGE) };
        memory
    }

    pub(crate) fn with_protection(length: usize, protection: i32) -> Self {
        Self::map(length, protection, libc::MAP_PRIVATE, -1)
    }

    pub(crate) fn shared_file(fd: i32, length: usize) -> Self {
        Self::map(length, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd)
    }

    fn map(length: usize, protection: i32, sharing: i32, fd: i32) -> Self {
        let anonymous = if fd < 0 { libc::MAP_ANONYMOUS } else { 0 };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, sharing | anonymous, fd, 0)
        };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { start: start.cast(), length, hole: length..length }
    }

    /// Maps fresh zeroed memory over this, as a program that frees and allocates again does.
    pub(crate) fn replace(&mut self) {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the addresses are this test's own, not borrowed (`&mut`).
        let start = unsafe { libc::mmap(self.start.cast(), self.length, protection, flags, -1, 0) };
        assert_eq!(start, self.start.cast());
    }

    /// Unmaps `length` bytes from `offset`, once; they are not touched again. Call it [`alone`] if
    /// the hole has to stay one.
    pub(crate) fn unmap(&mut self, offset: usize, length: usize) {
        assert!(offset + length <= self.length && self.hole.is_empty());
        self.hole = offset..offset + length;
        self.unmap_now(self.hole.clone());
    }

    fn unmap_now(&self, part: Range<usize>) {
        if !part.is_empty() {
            // SAFETY: within this test's own mapping, not unmapped before, not borrowed.
            let done = unsafe { libc::munmap(self.start.add(part.start).cast(), part.len()) };
            assert_eq!(done, 0);
        }
    }

    pub(crate) fn range(&self) -> AddressRange {
        self.part(0, self.length)
    }

    /// `length` bytes from `offset`.
    pub(crate) fn part(&self, offset: usize, length: usize) -> AddressRange {
        AddressRange::new(self.start.addr() + offset, length).unwrap()
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: mapped and readable; copied at once, so no device writes meanwhile.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }.to_vec()
    }

    pub(crate) fn fill(&mut self, byte: u8) {
        // SAFETY: mapped and writable.
        unsafe { self.start.write_bytes(byte, self.length) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.unmap_now(0..self.hole.start);
        self.unmap_now(self.hole.end..self.length);
    }
}

/// Bytes of a line of `/proc/self/status` (`VmLck:`, `VmPin:`).
pub(crate) fn status_bytes(key: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// Seconds after which a forked child is taken for hung, and ended by a signal.
const PATIENCE: u32 = 300;

/// Runs `body` in a forked child and tells whether it answered true there.
pub(crate) fn in_forked_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `body` alone and leaves without unwinding or exit handlers.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: a number in, a number out; whatever the process did with the signal, it ends this child now.
        unsafe {
            libc::signal(libc::SIGALRM, libc::SIG_DFL);
            libc::alarm(PATIENCE);
        }
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends this child.
        unsafe { libc::_exit(if held { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` has room for the answer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Lowers `RLIMIT_MEMLOCK` to `bytes` and gives up root, for which there is no limit.
///
/// False, with the reason on standard error, where that cannot be done. Call it [`alone`].
pub(crate) fn live_under_a_limit(bytes: u64, user: u32) -> bool {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: system calls without effect on memory.
    let done = unsafe {
        libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) == 0
            && (libc::geteuid() != 0
                || (libc::setresgid(user, user, user) == 0
                    && libc::setresuid(user, user, user) == 0))
    };
    if !done {
        eprintln!("skipped: cannot give up root here: {}", std::io::Error::last_os_error());
    }
    done
}
