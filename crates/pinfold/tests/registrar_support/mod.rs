//! What the tests of the registrars share: memory of their own, and processes of their own.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the system calls that make and unmake memory, users and
//! processes. Every mapping here is private to the test that made it.

#![allow(unsafe_code, dead_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use io_uring::{opcode, types};
use pinfold::registrar::verbs::Verbs;
use pinfold::registrar::{BufferIndex, IoUring, LockedPages, Mlock};
use pinfold::suspend::Suspend;
use pinfold::{
    Access, AddressRange, Cache, DeregisterError, GetError, Lease, Monitor, RegisterError,
    Registrar,
};
use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

#[path = "../alone/mod.rs"]
mod own_process;

#[allow(unused_imports)] // not by every test that has the rest
pub(crate) use own_process::alone;

pub(crate) const PAGE: usize = 4096;

/// A file whose pages the kernel keeps from itself.
pub(crate) fn secret_file() -> std::io::Result<std::fs::File> {
    // SAFETY: a call that takes numbers.
    let made = unsafe { libc::syscall(libc::SYS_memfd_secret, 0) };
    match i32::try_from(made) {
        // SAFETY: just made, and not known otherwise.
        Ok(number @ 0..) => Ok(unsafe { std::fs::File::from_raw_fd(number) }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

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

/// A registrar of a device that uses local memory at the request of unsafe code only, which answers for the memory.
///
/// # Safety
///
/// That is so.
pub(crate) unsafe trait UsedByUnsafeCode: Registrar {}

// SAFETY: `SubmissionQueue::push` is unsafe.
unsafe impl UsedByUnsafeCode for IoUring {}
// SAFETY: work is posted by foreign functions.
unsafe impl UsedByUnsafeCode for Verbs {}
// SAFETY: as the device itself.
unsafe impl<R: UsedByUnsafeCode> UsedByUnsafeCode for Arc<R> {}

/// A ring on which nothing is submitted, and whose table no other code gets at.
pub(crate) struct QuietRing(#[expect(dead_code, reason = "it is kept open")] io_uring::IoUring);

/// A registrar with a ring of its own; `None`, said, where there is no io_uring.
pub(crate) fn registrar_of_a_ring(slots: u32) -> Option<(QuietRing, IoUring)> {
    let (ring, registrar) = ring_with_registrar(8, slots)?;
    Some((QuietRing(ring), registrar))
}

/// A ring of so many entries, and a registrar to which the tests leave its table; `None`, said, where there is no io_uring.
pub(crate) fn ring_with_registrar(
    entries: u32,
    slots: u32,
) -> Option<(io_uring::IoUring, IoUring)> {
    let ring = io_uring::IoUring::new(entries);
    let ring = ring.map_err(|why| eprintln!("skipped: no io_uring: {why}")).ok()?;
    // SAFETY: as declared.
    let registrar = unsafe { IoUring::new(&ring, slots) }.unwrap();
    Some((ring, registrar))
}

/// A file in memory.
pub(crate) fn memory_file() -> File {
    File::from(pinfold_kernel::descriptor::memory_file(c"pinfold-test").unwrap())
}

/// Sends `length` registered bytes to the beginning of a file, and waits for it: how many, or the kernel's error, negative.
pub(crate) fn send(
    ring: &mut io_uring::IoUring,
    file: &File,
    start: *const u8,
    length: usize,
    index: BufferIndex,
) -> i32 {
    let (file, length) = (types::Fd(file.as_raw_fd()), u32::try_from(length).unwrap());
    let entry = opcode::WriteFixed::new(file, start, length, index.get()).build();
    // SAFETY: the kernel only reads, and only what is registered; it has done so when this returns.
    unsafe { ring.submission().push(&entry).unwrap() };
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

/// Locks memory, or what is none.
pub(crate) fn lock(
    registrar: &Mlock,
    range: AddressRange,
    access: Access,
) -> Result<LockedPages, RegisterError> {
    // SAFETY: no device uses what is locked.
    unsafe { registrar.register(range, access) }
}

/// What may be locked from now on, by this process.
pub(crate) fn limit_locked_memory(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a system call without effect on memory.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
}

/// Moves this process, which has one thread, to a user namespace of its own.
pub(crate) fn enter_user_namespace() -> std::io::Result<()> {
    // SAFETY: a system call without effect on memory.
    match unsafe { libc::unshare(libc::CLONE_NEWUSER) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A process that gave up root may not look into its own tables otherwise.
pub(crate) fn be_dumpable() {
    // SAFETY: a system call without effect on memory.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
}

/// Memory that a test maps, and unmaps at its end.
#[derive(Debug)]
pub(crate) struct Memory {
    start: *mut u8,
    length: usize,
    /// What has been unmapped of it: other code may have mapped it by now.
    hole: Range<usize>,
}

// SAFETY: the mapping is its own, as a vector's bytes are.
unsafe impl Send for Memory {}
// SAFETY: as above; a test reads the bytes where it has nothing else at work on them.
unsafe impl Sync for Memory {}

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

    /// Registers a part for local use.
    pub(crate) fn register<R: UsedByUnsafeCode>(
        &self,
        registrar: &R,
        part: Range<usize>,
        access: Access,
    ) -> Result<R::Handle, RegisterError> {
        assert!(Access::READ_WRITE.contains(access));
        // SAFETY: the memory is this test's own; who has the device use it answers for that.
        unsafe { registrar.register(self.inside(part), access) }
    }

    /// Leases a part for local use.
    pub(crate) fn lease<'c, R: UsedByUnsafeCode, M: Monitor>(
        &self,
        cache: &'c Cache<R, M>,
        part: Range<usize>,
        access: Access,
    ) -> Result<Lease<'c, R, M>, GetError> {
        assert!(Access::READ_WRITE.contains(access));
        let start = self.start.wrapping_add(part.start);
        // SAFETY: as for `register`.
        unsafe { cache.get(start, self.inside(part).len(), access) }
    }

    /// `madvise` on a part. Whether the kernel takes the advice.
    pub(crate) fn advise(&self, part: Range<usize>, advice: libc::c_int) -> bool {
        let start = self.start.wrapping_add(part.start);
        // SAFETY: this test's own memory, into which there are no references.
        unsafe { libc::madvise(start.cast(), self.inside(part).len(), advice) == 0 }
    }

    /// Takes the right to write to a part away and gives it back, so that mappings are split and joined.
    pub(crate) fn protect_and_allow(&self, part: Range<usize>) {
        let (start, length) = (self.start.wrapping_add(part.start).cast(), self.inside(part).len());
        for rights in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: as for `advise`.
            unsafe { libc::mprotect(start, length, rights) };
        }
    }

    fn inside(&self, part: Range<usize>) -> AddressRange {
        assert!(part.end <= self.length && self.hole.is_empty());
        self.part(part.start, part.len())
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

// `linux/userfaultfd.h`, as every architecture encodes it but MIPS, PowerPC and SPARC.
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const MOVE: u64 = 0xc028_aa05;
const FEATURE_MOVE: u64 = 1 << 16;
const MODE_MISSING: u64 = 1 << 0;

/// A userfaultfd that moves pages.
pub(crate) struct PageMover(OwnedFd);

impl PageMover {
    /// `None` where the kernel has no `UFFDIO_MOVE` (before Linux 6.8) or refuses userfaultfd.
    pub(crate) fn open() -> Option<Self> {
        let mover = Self(pinfold_kernel::userfaultfd::open().ok()?);
        mover.request(API, &mut [0xaa, FEATURE_MOVE, 0, 0, 0]).then_some(mover)
    }

    /// Has it told of pages that are missing.
    pub(crate) fn watch(&self, memory: &Memory) -> bool {
        let (start, bytes) = (memory.start.addr() as u64, memory.length as u64);
        self.request(REGISTER, &mut [start, bytes, MODE_MISSING, 0, 0])
    }

    /// Moves the first `bytes` bytes; the kernel's error number if it will not.
    pub(crate) fn move_pages(&self, from: &Memory, to: &Memory, bytes: usize) -> Result<(), i32> {
        let [from, to] = [from, to].map(|memory| memory.inside(0..bytes).start() as u64);
        if self.request(MOVE, &mut [to, from, bytes as u64, 0, 0]) {
            return Ok(());
        }
        Err(std::io::Error::last_os_error().raw_os_error().unwrap())
    }

    fn request(&self, number: u64, argument: &mut [u64; 5]) -> bool {
        // SAFETY: every request made here has an argument of at most five words, and changes memory of the test's own.
        unsafe { libc::ioctl(self.0.as_raw_fd(), number as _, argument.as_mut_ptr()) == 0 }
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
        let held = catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends this child.
        unsafe { libc::_exit(if held { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` has room for the answer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Runs `body` on another thread than the first of a process, which has ended by then. Whether it returned.
pub(crate) fn behind_the_first_thread(body: impl FnOnce() + Send + 'static) -> bool {
    in_forked_child(|| {
        let rest = move || {
            while !fs::read_to_string("/proc/self/stat").is_ok_and(|stat| stat.contains(") Z ")) {
                thread::yield_now();
            }
            let held = catch_unwind(AssertUnwindSafe(body)).is_ok();
            // SAFETY: ends this child.
            unsafe { libc::_exit(if held { 0 } else { 1 }) };
        };
        let _ends_the_process = thread::spawn(rest);
        // SAFETY: ends this thread alone, which holds no lock; its stack and what is on it stay.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        false
    })
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
