//! Pages of a file or a block device, mapped shared and written past the page cache.
//!
//! Reclaim may take the entry of such a page though a device has pinned it, because a fault finds the page
//! in the file again. A direct write then replaces the page in the file, and nothing that parts a page
//! from an address is called for that.

use super::obstacle::Obstacle;
use super::{Specimen, difference};
use pinfold::AddressRange;
use pinfold_kernel::descriptor;
use pinfold_kernel::mapping::OwnedMapping;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// How many bytes of the file are mapped.
const LENGTH: usize = 16 * PAGE;

/// To what a direct write's memory is aligned: the largest block of a usual device.
const PAGE: usize = 4096;

/// The beginning of a file, mapped shared. Writable, because Linux 6.1 pins nothing else for a device.
#[derive(Debug)]
pub(crate) struct DirectFile {
    direct: File,
    mapping: OwnedMapping,
    range: AddressRange,
}

impl DirectFile {
    /// Maps the beginning of the file at `path`, whose bytes are lost.
    pub(crate) fn open(path: &Path) -> Result<Self, Obstacle> {
        let failed = |error: std::io::Error| Obstacle::from_error("open(O_DIRECT)", &error);
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let direct = options.open(path).map_err(failed)?;
        // A descriptor that goes through the page cache.
        let cached = File::options().read(true).write(true).open(path).map_err(failed)?;
        let mapping = OwnedMapping::of_file(cached.as_fd(), LENGTH, true, 0);
        let mapping = mapping.map_err(|errno| Obstacle::of_call("mmap", errno))?;
        let range = mapping.range().ok_or(Obstacle::unsuitable("mmap"))?;
        Ok(Self { direct, mapping, range })
    }

    /// Where it is.
    pub(crate) fn mapping(&self) -> AddressRange {
        self.range
    }

    /// Writes the pattern of `key` into the file, past its pages in memory.
    pub(crate) fn write(&self, key: u64) -> Result<(), Obstacle> {
        let pattern = Specimen::pattern(self.range, key);
        let mut room = vec![0; LENGTH + PAGE];
        let aligned = room.as_ptr().align_offset(PAGE);
        let bytes = &mut room[aligned..aligned + LENGTH];
        bytes.copy_from_slice(&pattern);
        let written = self.direct.write_all_at(bytes, 0);
        written.map_err(|error| Obstacle::from_error("write(O_DIRECT)", &error))
    }

    /// Has the kernel reclaim the mapped pages, pinned or not.
    pub(crate) fn page_out(&self) -> Result<(), Obstacle> {
        self.mapping.page_out().map_err(|errno| Obstacle::of_call("MADV_PAGEOUT", errno))
    }

    /// Has the file's blocks filled with zeros by the kernel, which drops their pages before.
    pub(crate) fn zero(&self) -> Result<(), Obstacle> {
        let zeroed = descriptor::zero(self.direct.as_fd(), LENGTH);
        zeroed.map_err(|errno| Obstacle::of_call("fallocate(ZERO_RANGE)", errno))
    }

    /// Where the mapping holds something else than `wanted`.
    pub(crate) fn difference(&self, wanted: &[u8]) -> Option<usize> {
        difference(&self.mapping.contents(), wanted)
    }
}
