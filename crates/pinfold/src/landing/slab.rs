//! Where landing pages come from.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare what landing pages are, and to keep that promise for memory
//! of its own.

#![allow(unsafe_code)]

use crate::AddressRange;
use pinfold_kernel::{Errno, mapping::OwnedMapping, process::page_bytes};

/// Memory for a landing zone: equal slots of whole pages, and a place aside as long as one of them,
/// through which pages pass in an exchange.
///
/// A [pool](crate::pool)'s memory is none: one registration holds all buffers of a slab, so no part of it
/// can change its pages, and its mappings are wiped in forked children, as would be those of a target that
/// had got them.
///
/// # Safety
///
/// Slots and the place aside are private anonymous memory, readable and writable, that share no
/// page with each other or with anything else, and stay mapped for as long as the value lives. While a
/// zone has it, no other code touches them. Afterwards their content, and the pages themselves, may be
/// others than before.
pub unsafe trait SlabPages {
    /// The slots.
    fn slots(&self) -> Vec<AddressRange>;

    /// The place aside.
    fn aside(&self) -> AddressRange;

    /// How alike a landing place and its target should lie, in bytes: a power of two. With that of a
    /// huge page (2 MiB) the kernel moves page tables instead of pages.
    fn granule(&self) -> usize;

    /// Whether pages are to be huge where the kernel has any.
    fn huge(&self) -> bool;
}

/// Landing pages in one mapping of its own.
#[derive(Debug)]
pub struct Slab {
    /// The pages; what a device has pinned of them stays with the device when they go.
    _mapped: OwnedMapping,
    all: AddressRange,
    first: usize,
    slot_bytes: usize,
    slots: usize,
    granule: usize,
    huge: bool,
}

/// What one page table maps, and one huge page holds.
const TABLE: usize = 2 << 20;

/// Why there are no landing pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SlabError {
    /// No slots, or more bytes than there are addresses.
    #[error("{slots} slots for messages of {message_bytes} bytes make no slab")]
    Size {
        /// Bytes of the longest message.
        message_bytes: usize,
        /// How many slots there were to be.
        slots: usize,
    },
    /// The kernel gave no memory.
    #[error("no memory for landing pages: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The kernel's error number.
        errno: i32,
    },
}

impl Slab {
    /// `slots` slots, each for messages of up to `message_bytes`, however they lie in their pages; in
    /// huge pages if `huge` and the kernel has any.
    ///
    /// From 2 MiB on a slot takes up to 4 MiB more than its message, so that places may lie as their
    /// targets do within 2 MiB; below, up to two pages more. Pages are made when they are registered.
    ///
    /// # Errors
    ///
    /// [`SlabError`].
    pub fn new(message_bytes: usize, slots: usize, huge: bool) -> Result<Self, SlabError> {
        let size = SlabError::Size { message_bytes, slots };
        let granule = if message_bytes < TABLE { page_bytes() } else { TABLE };
        let slot_bytes = message_bytes
            .checked_next_multiple_of(granule)
            .and_then(|bytes| bytes.checked_add(granule))
            .filter(|_| message_bytes > 0 && slots > 0)
            .ok_or(size)?;
        let all = slots.checked_add(1).and_then(|all| all.checked_mul(slot_bytes)).ok_or(size)?;
        let bytes = all.checked_add(TABLE).ok_or(size)?;
        let mapped = OwnedMapping::new(bytes).map_err(|Errno(errno)| SlabError::Os { errno })?;
        // Advice: without huge pages they are small.
        let _ = mapped.want_huge_pages(huge);
        let first = mapped.start().addr().get().next_multiple_of(TABLE);
        let all = mapped.range().ok_or(size)?;
        Ok(Self { _mapped: mapped, all, first, slot_bytes, slots, granule, huge })
    }

    fn slot(&self, number: usize) -> AddressRange {
        let start = self.first + number * self.slot_bytes;
        AddressRange::between(start, start + self.slot_bytes).unwrap_or(self.all)
    }
}

// SAFETY: the slots and the place aside are disjoint parts of one private anonymous mapping that is
// this slab's alone and is unmapped when the slab is dropped.
unsafe impl SlabPages for Slab {
    fn slots(&self) -> Vec<AddressRange> {
        (0..self.slots).map(|number| self.slot(number)).collect()
    }

    fn aside(&self) -> AddressRange {
        self.slot(self.slots)
    }

    fn granule(&self) -> usize {
        self.granule
    }

    fn huge(&self) -> bool {
        self.huge
    }
}
