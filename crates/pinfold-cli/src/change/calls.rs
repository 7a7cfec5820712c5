//! The system calls that change memory, as typed functions.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because every call in it changes or touches memory by address.
//! Each function that does so is unsafe with the same contract: **the range belongs to the caller
//! alone, and no reference of Rust's points into it.** The caller is [`super::Specimen`], whose
//! memory is only ever touched by address.

#![allow(unsafe_code)]

use super::child::{self, ChildEnd, in_child};
use super::obstacle::{Obstacle, Outcome};
use io_uring::{IoUring, opcode};
use libc::{c_int, c_long, c_void};
use pinfold::AddressRange;
use pinfold_kernel::descriptor;
use pinfold_kernel::process::{pidfd_open, process_id};
use pinfold_kernel::raw::system_call;
use rustix::fs::{self, FallocateFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// By which route a program reaches the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Call {
    /// The libc function of that name, which hooks can replace.
    Library,
    /// `syscall(2)`.
    Raw,
    /// An instruction of the program's own, as in a second libc or the dynamic loader.
    Own,
    /// A request in a ring of io_uring, which a thread of the kernel's carries out.
    Ring,
}

fn pointer(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

fn done(call: &'static str, result: c_long) -> Outcome {
    if result < 0 { Err(Obstacle::last(call)) } else { Ok(()) }
}

fn address(call: &'static str, result: *mut c_void) -> Outcome<usize> {
    if result == libc::MAP_FAILED {
        Err(Obstacle::last(call))
    } else {
        Ok(result.expose_provenance())
    }
}

/// By an instruction that no library can intercept.
///
/// # Safety
///
/// Whatever the call demands.
unsafe fn own_call(call: &'static str, number: c_long, [a, b, c]: [usize; 3]) -> Outcome {
    // SAFETY: the caller's promise.
    let answer = unsafe { system_call(number, [a, b, c, 0, 0]) };
    answer.errno().map_or(Ok(()), |errno| Err(Obstacle { call, errno }))
}

/// `munmap`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn unmap(range: AddressRange, by: Call) -> Outcome {
    let (start, length) = (range.start(), range.len());
    // SAFETY: the range is the caller's alone.
    unsafe {
        match by {
            Call::Library => done("munmap", libc::munmap(pointer(start), length).into()),
            Call::Raw => done("munmap", libc::syscall(libc::SYS_munmap, start, length)),
            Call::Own | Call::Ring => own_call("munmap", libc::SYS_munmap, [start, length, 0]),
        }
    }
}

/// A `munmap` of an unaligned address, which the kernel refuses.
pub(super) fn unmap_wrongly(range: AddressRange) {
    // SAFETY: the kernel refuses an unaligned address before it does anything.
    let result = unsafe { libc::munmap(pointer(range.start() + 1), range.len()) };
    debug_assert_eq!(result, -1);
}

/// `madvise`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise(range: AddressRange, advice: Advice, by: Call) -> Outcome {
    let (start, length, number) = (range.start(), range.len(), advice.number);
    // SAFETY: the range is the caller's alone.
    unsafe {
        match by {
            Call::Library => {
                done(advice.name, libc::madvise(pointer(start), length, number).into())
            }
            Call::Raw => done(advice.name, libc::syscall(libc::SYS_madvise, start, length, number)),
            Call::Own => {
                let number = usize::try_from(number).unwrap_or(0);
                own_call(advice.name, libc::SYS_madvise, [start, length, number])
            }
            Call::Ring => advise_by_ring(range, advice),
        }
    }
}

/// `IORING_OP_MADVISE`.
///
/// # Safety
///
/// See the file's header.
unsafe fn advise_by_ring(range: AddressRange, advice: Advice) -> Outcome {
    const NAME: &str = "IORING_OP_MADVISE";
    let failed = |error: io::Error| Obstacle::from_error(NAME, &error);
    let mut ring = IoUring::new(2).map_err(failed)?;
    let length = libc::off_t::try_from(range.len()).unwrap_or(0);
    let request = opcode::Madvise::new(pointer(range.start()), length, advice.number).build();
    // SAFETY: the range is the caller's alone, and there is room for one request.
    unsafe { ring.submission().push(&request) }
        .map_err(|_| Obstacle { call: NAME, errno: libc::EBUSY })?;
    ring.submit_and_wait(1).map_err(failed)?;
    match ring.completion().next().map(|done| done.result()) {
        Some(0..) => Ok(()),
        Some(errno) => Err(Obstacle { call: NAME, errno: -errno }),
        None => Err(Obstacle { call: NAME, errno: libc::EIO }),
    }
}

/// What `madvise` is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Advice {
    /// Its name in a report.
    pub(crate) name: &'static str,
    number: c_int,
}

macro_rules! advices {
    ($($name:ident = $called:literal, $number:expr;)*) => {
        #[allow(missing_docs)] // the kernel's names
        impl Advice {
            $(pub(crate) const $name: Self = Self { name: $called, number: $number };)*
        }
    };
}

advices! {
    DONT_NEED = "MADV_DONTNEED", libc::MADV_DONTNEED;
    DONT_NEED_LOCKED = "MADV_DONTNEED_LOCKED", 24;
    FREE = "MADV_FREE", libc::MADV_FREE;
    REMOVE = "MADV_REMOVE", libc::MADV_REMOVE;
    GUARD_INSTALL = "MADV_GUARD_INSTALL", 102;
    GUARD_REMOVE = "MADV_GUARD_REMOVE", 103;
    HUGE_PAGE = "MADV_HUGEPAGE", libc::MADV_HUGEPAGE;
    POPULATE_WRITE = "MADV_POPULATE_WRITE", libc::MADV_POPULATE_WRITE;
    COLD = "MADV_COLD", libc::MADV_COLD;
    PAGE_OUT = "MADV_PAGEOUT", libc::MADV_PAGEOUT;
    MERGEABLE = "MADV_MERGEABLE", libc::MADV_MERGEABLE;
    UNMERGEABLE = "MADV_UNMERGEABLE", libc::MADV_UNMERGEABLE;
    COLLAPSE = "MADV_COLLAPSE", 25;
    SOFT_OFFLINE = "MADV_SOFT_OFFLINE", libc::MADV_SOFT_OFFLINE;
}

/// `process_madvise` through a descriptor of this very process.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_by_descriptor(range: AddressRange, advice: Advice) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe { advise_process(process_id(), range, advice) }
}

/// The same by a forked child, on its parent.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_parent(range: AddressRange, advice: Advice) -> Outcome {
    let parent = process_id();
    // SAFETY: the caller's promise; the child allocates nothing.
    let answer = in_child(|| match unsafe { advise_process(parent, range, advice) } {
        Ok(()) => 0,
        Err(obstacle) => u8::try_from(obstacle.errno).unwrap_or(u8::MAX),
    })?;
    match answer {
        Some(0) => Ok(()),
        other => Err(Obstacle { call: "process_madvise", errno: other.map_or(0, i32::from) }),
    }
}

/// # Safety
///
/// See the file's header.
unsafe fn advise_process(process: u32, range: AddressRange, advice: Advice) -> Outcome {
    let pieces = [libc::iovec { iov_base: pointer(range.start()), iov_len: range.len() }];
    let failed = |errno| Obstacle::of_call("pidfd_open", errno);
    let descriptor = pidfd_open(process).map_err(failed)?;
    // SAFETY: the range is the caller's alone; the vector lives across the call.
    let result = unsafe {
        let number = libc::c_long::from(advice.number);
        let fd = descriptor.as_raw_fd();
        libc::syscall(libc::SYS_process_madvise, fd, pieces.as_ptr(), 1_usize, number, 0_usize)
    };
    done("process_madvise", result)
}

/// `madvise` by a forked child, which ends at once.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_in_child(range: AddressRange, advice: Advice) -> Outcome {
    let (start, length, number) = (pointer(range.start()), range.len(), advice.number);
    // SAFETY: the child makes two system calls, both allowed after a fork, and ends.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(c_int::from(libc::madvise(start, length, number) != 0));
        }
        child
    };
    done("fork", child.into())?;
    match child::end_of(child) {
        ChildEnd::Answered(0) => Ok(()),
        _ => Err(Obstacle { call: advice.name, errno: libc::EINVAL }),
    }
}

impl Advice {
    /// Those that change no byte and no address, for whatever memory they are given.
    pub(crate) const HARMLESS: [Self; 6] = [
        Self::COLD,
        Self::PAGE_OUT,
        Self::MERGEABLE,
        Self::UNMERGEABLE,
        Self::COLLAPSE,
        Self::SOFT_OFFLINE,
    ];

    /// The most bytes that it makes sense for, of one call.
    pub(crate) fn longest(self) -> usize {
        // Each page is taken out of use for good.
        if self == Self::SOFT_OFFLINE { 4096 } else { 4 << 20 }
    }
}

/// Gives one of [`Advice::HARMLESS`] for `range`, which need not be mapped; whether the kernel took it.
pub(crate) fn advise_harmlessly(range: AddressRange, advice: Advice) -> bool {
    // SAFETY: such advice changes no byte and no address.
    Advice::HARMLESS.contains(&advice)
        && unsafe { libc::madvise(pointer(range.start()), range.len(), advice.number) == 0 }
}

/// Moves this process's pages from one node of the machine's memory to another; whether the kernel
/// did.
pub(crate) fn migrate(from: usize, to: usize) -> bool {
    let (from, to) = (1_u64 << from, 1_u64 << to);
    let bits = u64::from(u64::BITS);
    // SAFETY: both sets live across the call; where a page lies changes no byte and no address.
    unsafe { libc::syscall(libc::SYS_migrate_pages, 0, bits, &raw const from, &raw const to) >= 0 }
}

/// Reads a byte of every page of `range`, which faults in what is missing; memory that is not there
/// is no harm.
pub(crate) fn touch(range: AddressRange) {
    const PAGE: usize = 4096;
    let mut byte = 0_u8;
    let first = range.start() - range.start() % PAGE;
    for page in (first..range.end()).step_by(PAGE) {
        let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: pointer(page), iov_len: 1 };
        // SAFETY: one byte is written, into `byte`; what is read need not be mapped.
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    }
}

/// From now on this thread, when it is woken, waits until others have had their time.
pub(crate) fn lag_behind() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters live across the call, which concerns this thread only.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
}

/// Has the allocator keep what is freed for what is allocated next, large blocks too: the kernel does
/// not clear the same pages over and over.
pub(crate) fn keep_freed_memory() {
    allocate_without_mapping();
    #[cfg(target_env = "gnu")]
    {
        const KEPT: c_int = 64 << 20;
        // SAFETY: a setting of the allocator, which locks itself.
        let _ = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT) };
    }
}

/// Has the allocator take large blocks from its heaps too, which grow without new mappings: a
/// process that can map nothing any more still allocates.
pub(super) fn allocate_without_mapping() {
    #[cfg(target_env = "gnu")]
    {
        const LARGEST: c_int = 32 << 20;
        // SAFETY: a setting of the allocator, which locks itself.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST) };
    }
}

/// Lowers the limit on descriptors so that no more can be opened, until it is dropped.
#[derive(Debug)]
pub(crate) struct NoDescriptors(libc::rlimit);

impl NoDescriptors {
    /// Concerns every thread; what is open stays open.
    pub(crate) fn new() -> Outcome<Self> {
        let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `old` is writable; a soft limit can be lowered and raised again freely.
        unsafe {
            done("getrlimit", libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old).into())?;
            let none = libc::rlimit { rlim_cur: 0, ..old };
            done("setrlimit", libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none).into())?;
        }
        Ok(Self(old))
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        // SAFETY: these limits were in force before.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) };
    }
}

/// Where a new mapping goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Anywhere.
    Anywhere,
    /// At the range, over what is there.
    Over,
    /// At the range, which must be free.
    Free,
}

impl Place {
    const fn flags(self) -> c_int {
        match self {
            Self::Anywhere => 0,
            Self::Over => libc::MAP_FIXED,
            Self::Free => libc::MAP_FIXED_NOREPLACE,
        }
    }
}

/// `mmap` of `length` bytes at `start`; the address it got.
///
/// # Safety
///
/// See the file's header; with [`Place::Over`] the range is what must be the caller's.
pub(super) unsafe fn map(
    start: usize,
    length: usize,
    place: Place,
    protection: c_int,
    flags: c_int,
    file: Option<&OwnedFd>,
) -> Outcome<usize> {
    let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
    let flags = flags | place.flags();
    // SAFETY: what is replaced is the caller's alone.
    let result = unsafe { libc::mmap(pointer(start), length, protection, flags, descriptor, 0) };
    let got = address("mmap", result)?;
    if place == Place::Free && got != start {
        // A kernel before 4.17 takes the address as a hint.
        // SAFETY: the mapping was just made and nothing refers to it.
        unsafe { libc::munmap(pointer(got), length) };
        return Err(Obstacle::taken("mmap"));
    }
    Ok(got)
}

/// `mremap` of `range` to `length` bytes; the address it got.
///
/// # Safety
///
/// See the file's header; `to`, where the flags use it, is the caller's too.
pub(super) unsafe fn remap(
    range: AddressRange,
    length: usize,
    flags: c_int,
    to: usize,
) -> Outcome<usize> {
    // SAFETY: both ranges are the caller's alone.
    let result =
        unsafe { libc::mremap(pointer(range.start()), range.len(), length, flags, pointer(to)) };
    address("mremap", result)
}

/// `mprotect`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn protect(range: AddressRange, protection: c_int) -> Outcome {
    // SAFETY: the range is the caller's alone.
    done("mprotect", unsafe {
        libc::mprotect(pointer(range.start()), range.len(), protection).into()
    })
}

/// `mlock`, as far as the limit allows.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn lock(range: AddressRange) {
    // SAFETY: locking changes no byte. Where it is refused, the advice still has something to do.
    let _ = unsafe { libc::mlock(pointer(range.start()), range.len()) };
}

/// `munlock`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn unlock(range: AddressRange) {
    // SAFETY: unlocking changes no byte, and of memory that is not locked changes nothing.
    let _ = unsafe { libc::munlock(pointer(range.start()), range.len()) };
}

/// A new System V segment attached at `range`.
///
/// # Safety
///
/// See the file's header; with [`Place::Over`] the range is what must be the caller's.
pub(super) unsafe fn attach(range: AddressRange, place: Place, by: Call) -> Outcome {
    let flags = if place == Place::Over { libc::SHM_REMAP } else { 0 };
    // SAFETY: the segment is new, and marked to go with its last attachment; what is replaced at
    // the address is the caller's alone.
    unsafe {
        let segment = libc::shmget(libc::IPC_PRIVATE, range.len(), libc::IPC_CREAT | 0o600);
        done("shmget", segment.into())?;
        let result = attach_by(segment, range.start(), flags, by);
        libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut());
        match result {
            Err(Obstacle { errno: libc::EINVAL, .. }) if place == Place::Free => {
                Err(Obstacle::taken("shmat"))
            }
            other => other,
        }
    }
}

/// # Safety
///
/// See [`attach`].
unsafe fn attach_by(segment: c_int, start: usize, flags: c_int, by: Call) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        match by {
            Call::Library => {
                address("shmat", libc::shmat(segment, pointer(start), flags)).map(drop)
            }
            Call::Raw => done("shmat", libc::syscall(libc::SYS_shmat, segment, start, flags)),
            Call::Own | Call::Ring => {
                let word = |number: c_int| usize::try_from(number).unwrap_or(0);
                own_call("shmat", libc::SYS_shmat, [word(segment), start, word(flags)])
            }
        }
    }
}

/// `remap_file_pages`: from now on `range`, a part of one shared mapping, shows the file's pages from
/// `page` on.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn remap_pages(range: AddressRange, page: usize) -> Outcome {
    // SAFETY: the range is the caller's alone.
    done("remap_file_pages", unsafe {
        libc::syscall(libc::SYS_remap_file_pages, range.start(), range.len(), 0, page, 0)
    })
}

/// `shmdt`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn detach(range: AddressRange) -> Outcome {
    // SAFETY: the segment is the caller's alone.
    done("shmdt", unsafe { libc::shmdt(pointer(range.start())).into() })
}

/// Where the heap ends.
pub(super) fn program_break() -> usize {
    // SAFETY: an increment of zero changes nothing.
    unsafe { libc::sbrk(0) }.expose_provenance()
}

/// `sbrk(increment)`; the old end of the heap.
///
/// # Safety
///
/// With a negative increment: the end of the heap is the caller's alone.
pub(super) unsafe fn move_break(increment: isize) -> Outcome<usize> {
    // SAFETY: what goes is the caller's.
    address("sbrk", unsafe { libc::sbrk(increment) })
}

/// A new memfd of `length` bytes.
pub(super) fn memory_file(length: usize) -> Outcome<OwnedFd> {
    let failed = |errno| Obstacle::of_call("memfd_create", errno);
    let file = descriptor::memory_file(c"pinfold-specimen").map_err(failed)?;
    resize(&file, length)?;
    Ok(file)
}

/// A new file without a name in the directory for temporary files.
pub(super) fn disk_file(length: usize) -> Outcome<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE);
    let file: OwnedFd = options
        .open(std::env::temp_dir())
        .map_err(|error| Obstacle::from_error("open(O_TMPFILE)", &error))?
        .into();
    resize(&file, length)?;
    Ok(file)
}

/// `ftruncate`. Mapped memory behind the new end faults when it is touched, as the file's owner knows.
pub(super) fn resize(file: &OwnedFd, length: usize) -> Outcome {
    fs::ftruncate(file, length as u64).map_err(|errno| Obstacle::of_call("ftruncate", errno.into()))
}

/// `fallocate(FALLOC_FL_PUNCH_HOLE)`. Mapped memory in the hole reads as zero, as the file's owner knows.
pub(super) fn punch(file: &OwnedFd, at: usize, length: usize) -> Outcome {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fs::fallocate(file, mode, at as u64, length as u64)
        .map_err(|errno| Obstacle::of_call("fallocate", errno.into()))
}

/// The same by a forked child.
pub(super) fn punch_in_child(file: &OwnedFd, at: usize, length: usize) -> Outcome {
    match in_child(|| u8::from(punch(file, at, length).is_err()))? {
        Some(0) => Ok(()),
        _ => Err(Obstacle { call: "fallocate", errno: libc::EINVAL }),
    }
}

/// Writes `words` over `range`, of the last one as many bytes as there is room for.
///
/// # Safety
///
/// See the file's header; the memory is mapped and writable.
pub(super) unsafe fn store(range: AddressRange, mut words: impl Iterator<Item = u64>) {
    const WORD: usize = size_of::<u64>();
    let start = pointer(range.start()).cast::<u8>();
    let whole = range.len() / WORD * WORD;
    for (offset, word) in (0..whole).step_by(WORD).zip(words.by_ref()) {
        // SAFETY: the target is mapped and the caller's alone, and a word of it begins at `offset`.
        unsafe { start.add(offset).cast::<u64>().write_unaligned(word.to_le()) };
    }
    let last = words.next().unwrap_or(0).to_le_bytes();
    // SAFETY: so many bytes, fewer than a word, are left.
    unsafe { std::ptr::copy_nonoverlapping(last.as_ptr(), start.add(whole), range.len() - whole) };
}

/// Whether the memory at `range` holds `bytes`, which are as many.
///
/// # Safety
///
/// See the file's header; the memory is mapped and readable.
pub(super) unsafe fn holds(range: AddressRange, bytes: &[u8]) -> bool {
    let length = range.len().min(bytes.len());
    // SAFETY: both are readable for so many bytes; nothing but this call reads the mapped memory.
    let compared = unsafe { libc::memcmp(pointer(range.start()), bytes.as_ptr().cast(), length) };
    compared == 0 && range.len() == bytes.len()
}

/// The bytes at `range`.
///
/// # Safety
///
/// See the file's header; the memory is mapped and readable.
pub(super) unsafe fn load(range: AddressRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    // SAFETY: the source is mapped, and `bytes` was just allocated elsewhere.
    unsafe {
        let source = pointer(range.start()).cast();
        std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), range.len());
    }
    bytes
}
