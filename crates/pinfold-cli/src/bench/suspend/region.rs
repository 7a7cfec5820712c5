//! Memory in small pages, for a region that is to be made huge.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to look at memory. A [`Region`] owns its bytes; they are read by
//! address, as a device does.

#![allow(unsafe_code)]

use crate::output::Failure;
use pinfold::AddressRange;
use pinfold_kernel::mapping::OwnedMapping;
use pinfold_kernel::{Errno, memory};

/// What a huge page is at most, on the machines that this runs on.
const ALIGNMENT: usize = 2 << 20;

/// Mapped memory, each page of it there and small.
pub(super) struct Region {
    _mapping: OwnedMapping,
    range: AddressRange,
}

impl Region {
    pub(super) fn new(bytes: usize) -> Result<Self, Failure> {
        let mut mapping = OwnedMapping::aligned(bytes, ALIGNMENT).map_err(failure)?;
        let range = mapping.range().ok_or(Errno(libc::EINVAL)).map_err(failure)?;
        // Where the machine makes every page huge, these are to be small at first, and allowed to
        // become huge later. A kernel without huge pages refuses both, and then pages are small.
        let _ = mapping.want_huge_pages(false);
        mapping.fill(0x5a);
        let _ = mapping.want_huge_pages(true);
        Ok(Self { _mapping: mapping, range })
    }

    pub(super) fn range(&self) -> AddressRange {
        self.range
    }

    /// What it holds.
    pub(super) fn bytes(&self) -> Vec<u8> {
        // SAFETY: mapped and readable, and no device writes to it any more.
        unsafe { memory::bytes(self.range) }.to_vec()
    }
}

fn failure(errno: Errno) -> Failure {
    Failure::unavailable(std::io::Error::from(errno))
}
