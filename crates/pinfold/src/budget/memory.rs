//! Memory of a reservation: pages of our own.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to map and unmap anonymous memory, and to give parts of it out
//! as slices. A part is given out by index to whoever holds that index alone, which is the
//! contract of [`Memory::part`].

#![allow(unsafe_code)]

use crate::sys::{Errno, last_errno};
use pinfold_core::AddressRange;
use std::ptr::NonNull;

/// Zeroed pages, in equal parts.
#[derive(Debug)]
pub(super) struct Memory {
    start: NonNull<u8>,
    part_bytes: usize,
    parts: usize,
}

// SAFETY: the pages belong to this value, which hands parts out under the contract of `part`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `parts` parts of `part_bytes`, a multiple of the page's size.
    ///
    /// In small pages: of a larger one, the kernel counts all against the limit, however small the
    /// part that is registered.
    pub(super) fn new(parts: usize, part_bytes: usize) -> Result<Self, Errno> {
        let length = parts.checked_mul(part_bytes).ok_or(Errno(libc::ENOMEM))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(last_errno());
        }
        // SAFETY: advice on the mapping just made. A kernel without huge pages refuses it, rightly.
        unsafe { libc::madvise(start, length, libc::MADV_NOHUGEPAGE) };
        let start = NonNull::new(start.cast()).ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { start, part_bytes, parts })
    }

    /// The addresses of part `number`.
    pub(super) fn range(&self, number: usize) -> Option<AddressRange> {
        let offset = number.checked_mul(self.part_bytes)?;
        AddressRange::new(self.start.as_ptr().addr() + offset, self.part_bytes).ok()
    }

    /// The bytes of part `number`, which is below the number of parts.
    ///
    /// # Safety
    ///
    /// The caller alone uses this part, for as long as the slice lives.
    #[allow(clippy::mut_from_ref)] // that nobody else has the part is the contract
    pub(super) unsafe fn part(&self, number: usize) -> &mut [u8] {
        debug_assert!(number < self.parts);
        // SAFETY: within the mapping, initialised by the kernel, and the caller's alone.
        unsafe {
            let start = self.start.as_ptr().add(number * self.part_bytes);
            std::slice::from_raw_parts_mut(start, self.part_bytes)
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no slice outlives it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.parts * self.part_bytes) };
    }
}
