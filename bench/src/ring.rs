//! A real device: an io_uring ring between registered memory and a file in memory, and memory that
//! nobody has seen before.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the push of submission entries and for mappings of its own. The
//! kernel refuses every address outside of the registration behind an entry's index; memory is handed
//! out by address only, so nothing borrows from what the device writes.

#![allow(unsafe_code)]

use io_uring::{IoUring, opcode, types};
use pinfold::AddressRange;
use pinfold::pieces::{Completion, Mover, Request};
use pinfold::registrar::BufferIndex;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// Which way a ring moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// From registered memory into the file.
    Send,
    /// From the file into registered memory.
    Receive,
}

/// Moves parts of a range to or from the same place in a file.
pub(crate) struct Ring {
    ring: IoUring,
    file: File,
    direction: Direction,
    /// The address that the file's first byte stands for.
    base: usize,
}

/// More than are ever under way.
const ENTRIES: u32 = 64;

impl Ring {
    /// A ring with a file of `bytes` bytes that are there.
    pub(crate) fn open(bytes: usize) -> Result<Self, String> {
        let ring = IoUring::new(ENTRIES).map_err(|error| format!("no io_uring: {error}"))?;
        let file = memory_file(bytes).map_err(|error| format!("memfd_create: {error}"))?;
        Ok(Self { ring, file, direction: Direction::Send, base: 0 })
    }

    /// From now on `direction`, and the file begins at `base`.
    pub(crate) fn aim(&mut self, direction: Direction, base: usize) {
        (self.direction, self.base) = (direction, base);
    }
}

impl AsRawFd for Ring {
    /// For the registrar.
    fn as_raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

// SAFETY: a request has ended when its completion is in the ring.
unsafe impl Mover<BufferIndex> for Ring {
    type Error = io::Error;

    fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
        let Request { number, handle, range } = request;
        let offset = (range.start() - self.base) as u64;
        let length = u32::try_from(range.len()).map_err(io::Error::other)?;
        let file = types::Fd(self.file.as_raw_fd());
        let at = std::ptr::with_exposed_provenance_mut(range.start());
        let entry = match self.direction {
            Direction::Send => {
                opcode::WriteFixed::new(file, at, length, handle.get()).offset(offset).build()
            }
            Direction::Receive => {
                opcode::ReadFixed::new(file, at, length, handle.get()).offset(offset).build()
            }
        };
        let entry = entry.user_data(number as u64);
        // SAFETY: the file lives as long as the ring; the memory is leased until the completion.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        self.ring.submit().map(drop)
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        loop {
            if let Some(entry) = self.ring.completion().next() {
                let number = usize::try_from(entry.user_data()).map_err(io::Error::other)?;
                let outcome = match entry.result() {
                    error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                    _ => Ok(()),
                };
                return Ok(Completion { number, outcome });
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }
}

fn memory_file(bytes: usize) -> io::Result<File> {
    // SAFETY: the name is constant; the descriptor is new and nobody else's.
    let file = unsafe {
        let number = libc::memfd_create(c"pinfold-bench".as_ptr(), libc::MFD_CLOEXEC);
        if number < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(number)
    };
    file.set_len(bytes as u64)?;
    let bytes = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: pages are allocated to a file.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What memory looks like before it is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pages {
    /// Small pages, written.
    Written,
    /// Small pages that are not there.
    Untouched,
    /// Huge pages that are not there.
    UntouchedHuge,
}

impl Pages {
    /// For a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Untouched => "untouched",
            Self::UntouchedHuge => "untouched, huge pages",
        }
    }
}

/// New private memory, on a boundary of huge pages.
pub(crate) struct Memory {
    mapped: *mut libc::c_void,
    mapped_bytes: usize,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the pointers name memory of its own, which is touched through `write` and by the device.
unsafe impl Sync for Memory {}

const HUGE: usize = 2 << 20;

impl Memory {
    /// `bytes` bytes that no cache has seen.
    pub(crate) fn new(bytes: usize, pages: Pages) -> Result<Self, String> {
        let mapped_bytes = bytes + HUGE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, which takes nobody's place.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, rights, kind, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(format!("mmap: {}", io::Error::last_os_error()));
        }
        let start = mapped.cast::<u8>().map_addr(|address| address.next_multiple_of(HUGE));
        let memory = Self { mapped, mapped_bytes, start, bytes };
        let huge = pages == Pages::UntouchedHuge;
        let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // SAFETY: advice on memory of our own.
        unsafe { libc::madvise(mapped, mapped_bytes, advice) };
        if pages == Pages::Written {
            memory.write(0, bytes);
        }
        Ok(memory)
    }

    pub(crate) fn start(&self) -> *const u8 {
        self.start.expose_provenance();
        self.start
    }

    pub(crate) fn range(&self) -> Result<AddressRange, String> {
        AddressRange::new(self.start.expose_provenance(), self.bytes)
            .map_err(|error| error.to_string())
    }

    /// Writes `length` bytes from `offset`.
    pub(crate) fn write(&self, offset: usize, length: usize) {
        assert!(offset + length <= self.bytes, "inside of the memory");
        // SAFETY: inside of our own mapping, from which nobody borrows.
        unsafe { self.start.add(offset).write_bytes(0x5a, length) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, from which nobody borrows.
        unsafe { libc::munmap(self.mapped, self.mapped_bytes) };
    }
}
