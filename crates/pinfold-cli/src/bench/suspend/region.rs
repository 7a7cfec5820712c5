//! Memory in small pages, for a region that is to be made huge.

use crate::output::Failure;
use pinfold::AddressRange;
use pinfold_kernel::Errno;
use pinfold_kernel::mapping::OwnedMapping;

/// What a huge page is at most, on the machines that this runs on.
const ALIGNMENT: usize = 2 << 20;

/// Mapped memory, each page of it there and small.
pub(super) struct Region {
    mapping: OwnedMapping,
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
        Ok(Self { mapping, range })
    }

    pub(super) fn range(&self) -> AddressRange {
        self.range
    }

    /// What it holds.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.mapping.contents()
    }
}

fn failure(errno: Errno) -> Failure {
    Failure::unavailable(std::io::Error::from(errno))
}
