//! Memory and files to try changes on: how a monitor tests itself. Each change is one that the kernel makes
//! by a route of its own.
//!
//! # Safety
//!
//! What is changed here is memory of this module's own, into which no code gets a reference.

use crate::descriptor::memory_file;
use crate::errno::{Errno, done, last_errno};
use crate::mapping::{OwnedMapping, WalledMapping};
use crate::memory;
use crate::process::page_bytes;
use pinfold_core::AddressRange;
use rustix::fs::FallocateFlags;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Memory to try changes on. No reference into it ever exists.
#[derive(Debug)]
pub struct TrialArea(OwnedMapping);

impl TrialArea {
    /// `pages` pages of private memory.
    pub fn private(pages: usize) -> Result<Self, Errno> {
        OwnedMapping::new(pages * page_bytes()).map(Self::touched)
    }

    /// `pages` pages of private memory, none of which is there yet.
    pub fn untouched(pages: usize) -> Result<Self, Errno> {
        OwnedMapping::new(pages * page_bytes()).map(Self)
    }

    /// `bytes` bytes of private memory at a multiple of `align`, a power of two of at least a page.
    pub fn aligned(bytes: usize, align: usize) -> Result<Self, Errno> {
        OwnedMapping::aligned(bytes, align).map(Self::touched)
    }

    /// One huge page of private memory, if the machine has one to spare.
    pub fn huge() -> Result<Self, Errno> {
        const BYTES: usize = 2 << 20;
        OwnedMapping::set_aside(BYTES).map(Self::touched)
    }

    /// `pages` pages of a file, which is as long.
    pub fn of_file(file: &OwnedFd, pages: usize) -> Result<Self, Errno> {
        OwnedMapping::of_file(file.as_fd(), pages * page_bytes(), true, 0).map(Self::touched)
    }

    fn touched(mapping: OwnedMapping) -> Self {
        let mut area = Self(mapping);
        area.touch();
        area
    }

    /// Has a page under every address.
    pub fn touch(&mut self) {
        for page in (0..self.0.bytes()).step_by(page_bytes()) {
            // SAFETY: inside the area, which is mapped for writing; no other code looks at it.
            unsafe { self.0.start().add(page).write_volatile(1) };
        }
    }

    /// Where it is.
    pub fn range(&self) -> Option<AddressRange> {
        self.0.range()
    }

    /// The range of `count` of its pages from `first` on.
    pub fn pages(&self, first: usize, count: usize) -> Option<AddressRange> {
        let start = self.0.start().addr().get() + first * page_bytes();
        AddressRange::new(start, count * page_bytes()).ok()
    }

    fn whole(&self) -> Result<AddressRange, Errno> {
        self.range().ok_or(Errno(libc::EINVAL))
    }

    /// Unmaps it.
    pub fn unmap(self) {
        drop(self);
    }

    /// Maps fresh private memory over it.
    pub fn replace(mut self) -> Result<Self, Errno> {
        // SAFETY: the area is ours, and no code has references into it.
        unsafe { memory::renew(self.whole()?)? };
        self.touch();
        Ok(self)
    }

    /// Moves its pages to `over`, in whose place they are then.
    pub fn move_over(self, over: Self) -> Result<Self, Errno> {
        // SAFETY: both areas are ours, and no code has references into them.
        unsafe { memory::move_over(self.whole()?, over.whole()?)? };
        // What it was is unmapped.
        std::mem::forget(self);
        Ok(over)
    }

    /// `madvise`.
    pub fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        let start = self.0.start().as_ptr().cast();
        // SAFETY: the area is ours, and no code has references into it.
        done(unsafe { libc::madvise(start, self.0.bytes(), advice) })
    }

    /// Takes the pages of a part away.
    ///
    /// # Errors
    ///
    /// `EINVAL` for what is not inside.
    pub fn discard(&self, part: AddressRange) -> Result<(), Errno> {
        if !self.whole()?.contains(&part) {
            return Err(Errno(libc::EINVAL));
        }
        // SAFETY: inside the area, which is ours, and no code has references into it.
        unsafe { memory::discard(part) }
    }
}

/// A page that is a mapping of its own, to be taken away over and over. No reference into it ever exists.
#[derive(Debug)]
pub struct LonePage(WalledMapping);

impl LonePage {
    /// Maps one.
    pub fn new() -> Result<Self, Errno> {
        WalledMapping::new(page_bytes()).map(Self)
    }

    /// Takes it away; there is a new one when it is touched.
    pub fn discard(&self) -> Result<(), Errno> {
        let page = AddressRange::new(self.0.start().addr().get(), self.0.bytes());
        // SAFETY: the page is ours, and no code has references into it.
        unsafe { memory::discard(page.map_err(|_| Errno(libc::EINVAL))?) }
    }
}

/// A file without a name, of `pages` pages.
pub fn nameless_file(pages: usize) -> Result<OwnedFd, Errno> {
    let file = memory_file(c"pinfold")?;
    truncate(&file, pages)?;
    Ok(file)
}

/// Gives a file a length in pages.
pub fn truncate(file: &OwnedFd, pages: usize) -> Result<(), Errno> {
    Ok(rustix::fs::ftruncate(file, (pages * page_bytes()) as u64)?)
}

/// Punches a hole of one page into a file.
pub fn punch(file: &OwnedFd, page: usize) -> Result<(), Errno> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (at, bytes) = (page * page_bytes(), page_bytes());
    Ok(rustix::fs::fallocate(file, how, at as u64, bytes as u64)?)
}

/// A System V segment of one page: attaches it, tells where, and detaches it.
pub fn attach_and_detach(between: impl FnOnce(AddressRange)) -> Result<(), Errno> {
    let bytes = page_bytes();
    // SAFETY: plain numbers. The segment is removed below, before any other code can know of it.
    let segment = unsafe { libc::shmget(libc::IPC_PRIVATE, bytes, 0o600) };
    if segment < 0 {
        return Err(last_errno());
    }
    // SAFETY: the kernel picks addresses that nothing else uses.
    let start = unsafe { libc::shmat(segment, std::ptr::null(), 0) };
    let attached = (start.addr() != usize::MAX).then_some(start).and_then(NonNull::new);
    let attached = attached.map(NonNull::cast::<u8>).ok_or_else(last_errno);
    // SAFETY: ours, from above; it goes when it is detached.
    unsafe { libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut()) };
    let attached = attached?;
    // SAFETY: mapped for writing, and no other code looks at it.
    unsafe { attached.as_ptr().write_volatile(1) };
    if let Ok(range) = AddressRange::new(attached.as_ptr().addr(), bytes) {
        between(range);
    }
    // SAFETY: attached above, and no code has references into it.
    done(unsafe { libc::shmdt(start) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_leaves_memory_that_can_be_used() {
        let (one, two) = (TrialArea::private(2).unwrap(), TrialArea::private(2).unwrap());
        let place = two.range();
        let mut moved = one.move_over(two).unwrap();
        assert_eq!(moved.range(), place);
        moved.advise(libc::MADV_DONTNEED).unwrap();
        moved.touch();
        assert_eq!(moved.discard(moved.pages(1, 1).unwrap()), Ok(()));
        assert_eq!(moved.discard(moved.pages(1, 2).unwrap()), Err(Errno(libc::EINVAL)));
        assert_eq!(LonePage::new().unwrap().discard(), Ok(()));
        assert_eq!(moved.replace().unwrap().range(), place);
        let file = nameless_file(2).unwrap();
        let mut mapped = TrialArea::of_file(&file, 2).unwrap();
        punch(&file, 1).unwrap();
        mapped.touch();
        truncate(&file, 1).unwrap();
        assert!(mapped.pages(1, 1).is_some());
    }

    #[test]
    fn a_segment_is_attached_where_it_says() {
        let mut seen = None;
        match attach_and_detach(|range| seen = Some(range)) {
            Ok(()) => assert_eq!(seen.map(|range| range.len()), Some(page_bytes())),
            Err(Errno(errno)) => eprintln!("skipped: no System V segments here ({errno})"),
        }
    }
}
