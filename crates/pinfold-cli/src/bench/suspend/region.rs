//! Memory in small pages, for a region that is to be made huge.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to map memory and to look at it. A [`Region`] owns its bytes;
//! they are read and written by address, as a device does.

#![allow(unsafe_code)]

use crate::output::Failure;
use pinfold::AddressRange;

/// What a huge page is at most, on the machines that this runs on.
const ALIGNMENT: usize = 2 << 20;

/// Mapped memory, each page of it there and small.
pub(super) struct Region {
    mapping: AddressRange,
    range: AddressRange,
}

impl Region {
    pub(super) fn new(bytes: usize) -> Result<Self, Failure> {
        let mapping = map(bytes + ALIGNMENT).ok_or_else(last_failure)?;
        let start = mapping.start().next_multiple_of(ALIGNMENT);
        let range = AddressRange::new(start, bytes).map_err(Failure::unavailable)?;
        let region = Self { mapping, range };
        // Where the machine makes every page huge, these are to be small at first, and allowed to
        // become huge later.
        region.advise(libc::MADV_NOHUGEPAGE);
        region.write(0, &vec![0x5a; bytes]);
        region.advise(libc::MADV_HUGEPAGE);
        Ok(region)
    }

    pub(super) fn range(&self) -> AddressRange {
        self.range
    }

    /// Only for advices that keep what the memory holds. A kernel without huge pages refuses them,
    /// and then pages are small.
    fn advise(&self, advice: i32) {
        // SAFETY: this region's own memory.
        unsafe { libc::madvise(pointer(self.range.start()).cast(), self.range.len(), advice) };
    }

    /// Writes `bytes` to `offset`.
    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.range.len(), "a write inside of the region");
        let to = pointer(self.range.start() + offset);
        // SAFETY: mapped and writable, and nobody borrows from it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// What it holds.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.range.len()];
        let from = pointer(self.range.start());
        // SAFETY: mapped and readable, and no device writes to it any more.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this region's own memory, whose registrations hold pages and no addresses.
        unsafe { libc::munmap(pointer(self.mapping.start()).cast(), self.mapping.len()) };
    }
}

fn pointer(address: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address)
}

fn map(bytes: usize) -> Option<AddressRange> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) };
    let start = (start != libc::MAP_FAILED).then(|| start.expose_provenance())?;
    AddressRange::new(start, bytes).ok()
}

fn last_failure() -> Failure {
    Failure::unavailable(std::io::Error::last_os_error())
}
