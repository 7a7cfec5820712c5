//! The seam of the eBPF monitor: memory that it shares with the programs, and changes of its own
//! memory by which it tests itself.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Shared memory is
//! given out as references to structures of atomics, for which every content is valid, and stays
//! mapped as long as what gives them out. The memory of [`Area`] is never given out.

#![allow(unsafe_code)]

use crate::AddressRange;
use pinfold_ebpf::layout::{Changes, Wishes};
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::{Errno, errno::last_errno};
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// What can be shared with the programs.
///
/// # Safety
///
/// Every content is a valid value, and whoever has a reference may find it changing.
pub(super) unsafe trait Shared {
    /// Whether this process writes it.
    const WRITTEN: bool;
}

// SAFETY: nothing but atomics and words that nobody reads.
unsafe impl Shared for Changes {
    const WRITTEN: bool = false;
}

// SAFETY: as above.
unsafe impl Shared for Wishes {
    const WRITTEN: bool = true;
}

/// The value of a map, in our memory.
#[derive(Debug)]
pub(super) struct Mapped<T: Shared> {
    start: NonNull<T>,
    shared: PhantomData<T>,
}

// SAFETY: it gives out nothing but `&T`, whose words are atomics.
unsafe impl<T: Shared> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for Mapped<T> {}

impl<T: Shared> Mapped<T> {
    /// Maps the value of an array map. Fails if that is shorter, because the kernel says so.
    pub(super) fn new(map: BorrowedFd<'_>) -> Result<Self, Errno> {
        let rights = if T::WRITTEN { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let start = map_shared(map, size_of::<T>(), rights, 0)?;
        Ok(Self { start: start.cast(), shared: PhantomData })
    }

    /// The value. (The kernel does not map more of a map than there is, so that `T` fits.)
    pub(super) fn get(&self) -> &T {
        // SAFETY: mapped as long as `self` lives, aligned to a page, and of a type that bears it.
        unsafe { self.start.as_ref() }
    }
}

impl<T: Shared> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no reference outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), size_of::<T>()) };
    }
}

fn map_shared(
    map: BorrowedFd<'_>,
    bytes: usize,
    rights: libc::c_int,
    offset: usize,
) -> Result<NonNull<u8>, Errno> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
    let none = std::ptr::null_mut();
    // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses.
    let start =
        unsafe { libc::mmap(none, bytes, rights, libc::MAP_SHARED, map.as_raw_fd(), offset) };
    mapped(start)
}

fn mapped(start: *mut libc::c_void) -> Result<NonNull<u8>, Errno> {
    match NonNull::new(start.cast()) {
        Some(found) if start != libc::MAP_FAILED => Ok(found),
        _ => Err(last_errno()),
    }
}

/// The two words of a ring buffer that say how far it was written and read.
#[derive(Debug)]
pub(super) struct Positions {
    /// A page that we write, and one that the kernel does.
    read: NonNull<u8>,
    written: NonNull<u8>,
    page: usize,
}

// SAFETY: as for `Mapped`.
unsafe impl Send for Positions {}

impl Positions {
    pub(super) fn new(ring: BorrowedFd<'_>) -> Result<Self, Errno> {
        let page = page_bytes();
        let read = map_shared(ring, page, libc::PROT_READ | libc::PROT_WRITE, 0)?;
        match map_shared(ring, page, libc::PROT_READ, page) {
            Ok(written) => Ok(Self { read, written, page }),
            Err(errno) => {
                // SAFETY: mapped above, and nobody else has it.
                unsafe { libc::munmap(read.as_ptr().cast(), page) };
                Err(errno)
            }
        }
    }

    /// How far it was read, for us to write.
    pub(super) fn read(&self) -> &AtomicU64 {
        // SAFETY: mapped as long as `self` lives; the first word of a page.
        unsafe { self.read.cast().as_ref() }
    }

    /// How far it was written.
    pub(super) fn written(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { self.written.cast().as_ref() }
    }
}

impl Drop for Positions {
    fn drop(&mut self) {
        for page in [self.read, self.written] {
            // SAFETY: mapped by `new`, and no reference outlives `self`.
            unsafe { libc::munmap(page.as_ptr().cast(), self.page) };
        }
    }
}

// --- changes of our own memory -------------------------------------------------------------------

/// Memory to try changes on. Nobody ever gets a reference into it.
#[derive(Debug)]
pub(super) struct Area {
    start: NonNull<u8>,
    bytes: usize,
}

impl Area {
    /// `pages` pages of private memory.
    pub(super) fn private(pages: usize) -> Result<Self, Errno> {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::map(None, pages * page_bytes(), kind, -1)
    }

    /// One huge page of private memory, if the machine has one to spare.
    pub(super) fn huge() -> Result<Self, Errno> {
        const BYTES: usize = 2 << 20;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
        Self::map(None, BYTES, kind, -1)
    }

    /// `pages` pages of a file.
    pub(super) fn of_file(file: &OwnedFd, pages: usize) -> Result<Self, Errno> {
        let bytes = pages * page_bytes();
        Self::map(None, bytes, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(
        over: Option<NonNull<u8>>,
        bytes: usize,
        kind: libc::c_int,
        file: libc::c_int,
    ) -> Result<Self, Errno> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let at = over.map_or(std::ptr::null_mut(), |start| start.as_ptr().cast());
        // SAFETY: the kernel picks addresses that nothing else uses, or, with MAP_FIXED, they are
        // those of an area of ours, into which nobody has references.
        let start = unsafe { libc::mmap(at, bytes, rights, kind, file, 0) };
        let start = mapped(start)?;
        let area = Self { start, bytes };
        area.touch();
        Ok(area)
    }

    /// Has a page under every address.
    pub(super) fn touch(&self) {
        for page in (0..self.bytes).step_by(page_bytes()) {
            // SAFETY: inside the area, which is mapped for writing; nobody else looks at it.
            unsafe { self.start.add(page).write_volatile(1) };
        }
    }

    pub(super) fn range(&self) -> Option<AddressRange> {
        AddressRange::new(self.start.as_ptr().addr(), self.bytes).ok()
    }

    /// The range of `count` of its pages from `first` on.
    pub(super) fn pages(&self, first: usize, count: usize) -> Option<AddressRange> {
        let page = page_bytes();
        AddressRange::new(self.start.as_ptr().addr() + first * page, count * page).ok()
    }

    /// Unmaps it.
    pub(super) fn unmap(self) {
        drop(self);
    }

    /// Maps fresh private memory over it.
    pub(super) fn replace(self) -> Result<Self, Errno> {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let fresh = Self::map(Some(self.start), self.bytes, kind, -1)?;
        std::mem::forget(self);
        Ok(fresh)
    }

    /// Moves its pages to `over`, in whose place they are then.
    pub(super) fn move_over(self, over: Self) -> Result<Self, Errno> {
        let (bytes, how) = (self.bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        let (from, to) = (self.start.as_ptr(), over.start.as_ptr());
        // SAFETY: both areas are ours, and nobody has references into them.
        let moved = unsafe { libc::syscall(libc::SYS_mremap, from, bytes, bytes, how, to) };
        if moved < 0 {
            return Err(last_errno());
        }
        std::mem::forget(self);
        Ok(over)
    }

    /// `madvise`.
    pub(super) fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the area is ours, and nobody has references into it.
        done(unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, advice) })
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody has references into it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A file without a name, of `pages` pages.
pub(super) fn nameless_file(pages: usize) -> Result<OwnedFd, Errno> {
    // SAFETY: the name ends with a zero byte.
    let opened = unsafe { libc::memfd_create(c"pinfold".as_ptr(), libc::MFD_CLOEXEC) };
    if opened < 0 {
        return Err(last_errno());
    }
    // SAFETY: the kernel has just opened it for us.
    let file = unsafe { OwnedFd::from_raw_fd(opened) };
    truncate(&file, pages)?;
    Ok(file)
}

/// Gives a file a length in pages.
pub(super) fn truncate(file: &OwnedFd, pages: usize) -> Result<(), Errno> {
    let length = libc::off_t::try_from(pages * page_bytes());
    let length = length.map_err(|_| Errno(libc::EFBIG))?;
    // SAFETY: plain numbers; who has mapped the file here never looks at its pages.
    done(unsafe { libc::ftruncate(file.as_raw_fd(), length) })
}

/// Punches a hole of one page into a file.
pub(super) fn punch(file: &OwnedFd, page: usize) -> Result<(), Errno> {
    let bytes = page_bytes();
    let at = |value: usize| libc::off_t::try_from(value).map_err(|_| Errno(libc::EFBIG));
    let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: plain numbers.
    done(unsafe { libc::fallocate(file.as_raw_fd(), how, at(page * bytes)?, at(bytes)?) })
}

/// A System V segment of one page: attaches it, tells where, and detaches it.
pub(super) fn attach_and_detach(between: impl FnOnce(AddressRange)) -> Result<(), Errno> {
    let bytes = page_bytes();
    // SAFETY: plain numbers. The segment is removed below, before anybody else can know of it.
    let segment = unsafe { libc::shmget(libc::IPC_PRIVATE, bytes, 0o600) };
    if segment < 0 {
        return Err(last_errno());
    }
    // SAFETY: the kernel picks addresses that nothing else uses.
    let start = unsafe { libc::shmat(segment, std::ptr::null(), 0) };
    let attached = mapped(start);
    // SAFETY: ours, from above; it goes when it is detached.
    unsafe { libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut()) };
    let attached = attached?;
    // SAFETY: mapped for writing, and nobody else looks at it.
    unsafe { attached.as_ptr().write_volatile(1) };
    if let Ok(range) = AddressRange::new(attached.as_ptr().addr(), bytes) {
        between(range);
    }
    // SAFETY: attached above, and nobody has references into it.
    done(unsafe { libc::shmdt(start) })
}

fn done(result: libc::c_int) -> Result<(), Errno> {
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// `CLOCK_MONOTONIC` in nanoseconds, as the programs read it.
pub(super) fn monotonic_time() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let (seconds, rest) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds * 1_000_000_000 + rest
}
