//! Pages of a file or a block device, mapped shared and written past the page cache.
//!
//! Reclaim may take the entry of such a page though a device has pinned it, because a fault finds the page
//! in the file again. A direct write then replaces the page in the file, and nothing that parts a page
//! from an address is called for that.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls of [`super::calls`]. Their contract holds because
//! the mapping is made, unmapped and read by its [`DirectFile`] alone, and never lent out as a reference
//! of Rust's.

#![allow(unsafe_code)]

use super::calls::{self, Advice, Call, Obstacle, Place};
use super::{Specimen, difference};
use pinfold::AddressRange;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
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
    mapping: AddressRange,
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
        let (cached, rights) = (OwnedFd::from(cached), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: new memory anywhere replaces nothing.
        let start = unsafe {
            calls::map(0, LENGTH, Place::Anywhere, rights, libc::MAP_SHARED, Some(&cached))
        }?;
        let mapping = AddressRange::new(start, LENGTH).map_err(|_| Obstacle::unsuitable("mmap"))?;
        Ok(Self { direct, mapping })
    }

    /// Where it is.
    pub(crate) fn mapping(&self) -> AddressRange {
        self.mapping
    }

    /// Writes the pattern of `key` into the file, past its pages in memory.
    pub(crate) fn write(&self, key: u64) -> Result<(), Obstacle> {
        let pattern = Specimen::pattern(self.mapping, key);
        let mut room = vec![0; LENGTH + PAGE];
        let aligned = room.as_ptr().align_offset(PAGE);
        let bytes = &mut room[aligned..aligned + LENGTH];
        bytes.copy_from_slice(&pattern);
        let written = self.direct.write_all_at(bytes, 0);
        written.map_err(|error| Obstacle::from_error("write(O_DIRECT)", &error))
    }

    /// Has the kernel reclaim the mapped pages, pinned or not.
    pub(crate) fn page_out(&self) -> Result<(), Obstacle> {
        // SAFETY: the bytes stay what they are.
        unsafe { calls::advise(self.mapping, Advice::PageOut, Call::Library) }
    }

    /// Has the file's blocks filled with zeros by the kernel, which drops their pages before.
    pub(crate) fn zero(&self) -> Result<(), Obstacle> {
        let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let length = libc::off_t::try_from(LENGTH).unwrap_or(0);
        // SAFETY: touches no memory of the program's but the mapping, which is this object's.
        let result = unsafe { libc::fallocate(self.direct.as_raw_fd(), mode, 0, length) };
        if result < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Obstacle::from_error("fallocate(ZERO_RANGE)", &error));
        }
        Ok(())
    }

    /// Where the mapping holds something else than `wanted`.
    pub(crate) fn difference(&self, wanted: &[u8]) -> Option<usize> {
        // SAFETY: the mapping is readable as long as the file is as long, which only this object changes.
        difference(&unsafe { calls::load(self.mapping) }, wanted)
    }
}

impl Drop for DirectFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's alone; a refusal leaks it, which is harmless.
        let _ = unsafe { calls::unmap(self.mapping, Call::Library) };
    }
}
