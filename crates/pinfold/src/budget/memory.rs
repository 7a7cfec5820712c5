//! Memory of a reservation: pages of our own.

use pinfold_core::AddressRange;
use pinfold_kernel::{Errno, mapping::OwnedMapping};

/// Zeroed pages, in equal parts.
#[derive(Debug)]
pub(super) struct Memory {
    pages: OwnedMapping,
    part_bytes: usize,
    parts: usize,
}

impl Memory {
    /// `parts` parts of `part_bytes`, a multiple of the page's size.
    ///
    /// In small pages: of a larger one, the kernel counts all against the limit, however small the
    /// part that is registered.
    pub(super) fn new(parts: usize, part_bytes: usize) -> Result<Self, Errno> {
        let length = parts.checked_mul(part_bytes).ok_or(Errno(libc::ENOMEM))?;
        let pages = OwnedMapping::new(length)?;
        // A kernel without huge pages refuses, rightly.
        let _ = pages.want_huge_pages(false);
        Ok(Self { pages, part_bytes, parts })
    }

    /// The addresses of part `number`.
    pub(super) fn range(&self, number: usize) -> Option<AddressRange> {
        let offset = number.checked_mul(self.part_bytes)?;
        AddressRange::new(self.pages.start().addr().get() + offset, self.part_bytes).ok()
    }

    /// The bytes of part `number`, which is below the number of parts: initialised by the kernel, and mapped as
    /// long as this lives.
    pub(super) fn part(&self, number: usize) -> *mut [u8] {
        debug_assert!(number < self.parts);
        let start = self.pages.start().as_ptr().wrapping_add(number * self.part_bytes);
        std::ptr::slice_from_raw_parts_mut(start, self.part_bytes)
    }
}
