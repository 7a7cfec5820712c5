//! A real device: an io_uring ring between registered memory and a file in memory, and memory that
//! neither has seen before.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the push of submission entries, for registrars of its rings and for mappings of its own. The
//! kernel refuses every address outside of the registration behind an entry's index; memory is handed
//! out by address only, so nothing borrows from what the device writes.

#![allow(unsafe_code)]

use io_uring::{IoUring, opcode, types};
use pinfold::monitor::Userfaultfd;
use pinfold::pieces::{self, Completion, Mover, Progress, Request};
use pinfold::registrar::{BufferIndex, IoUringError};
use pinfold::{Access, AddressRange, Cache, Config, Lease, Monitor};
use pinfold_kernel::descriptor::{allocate, memory_file as new_file};
use pinfold_kernel::mapping::OwnedMapping;
use pinfold_kernel::process::page_bytes;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

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
    /// How many bytes each transfer under way has, by its number.
    lengths: HashMap<usize, u32>,
}

/// More than are ever under way.
const ENTRIES: u32 = 64;

/// A registrar of a ring of the bench's own.
pub(crate) fn registrar_of(
    ring: &impl AsRawFd,
    slots: u32,
) -> Result<pinfold::registrar::IoUring, IoUringError> {
    // SAFETY: the bench leaves the tables of its rings to their registrars.
    unsafe { pinfold::registrar::IoUring::new(ring, slots) }
}

/// Any monitor: the cache over a ring is compiled once.
pub(crate) type AnyMonitor = Arc<dyn Monitor>;

/// A cache over a ring.
pub(crate) type RingCache = Cache<pinfold::registrar::IoUring, AnyMonitor>;

/// A monitor of its own, through userfaultfd.
pub(crate) fn userfaultfd() -> Result<AnyMonitor, String> {
    let monitor = Userfaultfd::new().map_err(|error| format!("userfaultfd: {error}"))?;
    Ok(Arc::new(monitor))
}

/// What is missing here of what a cache over a ring takes, if something is: whatever fails behind that has failed.
pub(crate) fn missing() -> Option<String> {
    let ring = IoUring::new(8).map(drop).map_err(|error| format!("no io_uring: {error}"));
    ring.and_then(|()| userfaultfd().map(drop)).err()
}

/// A cache over `ring`, whose table has `slots` slots.
pub(crate) fn cache_over(
    ring: &impl AsRawFd,
    slots: u32,
    monitor: AnyMonitor,
    config: Config,
) -> Result<RingCache, String> {
    let registrar = registrar_of(ring, slots).map_err(|error| error.to_string())?;
    pinfold::cache(registrar, monitor, config).map_err(|error| error.to_string())
}

impl Ring {
    /// A ring with a file of `bytes` bytes that are there.
    pub(crate) fn open(bytes: usize) -> Result<Self, String> {
        let ring = IoUring::new(ENTRIES).map_err(|error| format!("no io_uring: {error}"))?;
        let file = memory_file(bytes).map_err(|error| format!("memfd_create: {error}"))?;
        Ok(Self { ring, file, direction: Direction::Send, base: 0, lengths: HashMap::new() })
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

    unsafe fn begin(&mut self, request: Request<BufferIndex>) -> io::Result<()> {
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
        // SAFETY: the file lives as long as the ring; the registration and the memory stay until the completion, by the
        // caller's promise.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        self.lengths.insert(number, length);
        self.ring.submit().map(drop)
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        loop {
            if let Some(entry) = self.ring.completion().next() {
                let number = usize::try_from(entry.user_data()).map_err(io::Error::other)?;
                let length = self.lengths.remove(&number);
                let outcome = match u32::try_from(entry.result()) {
                    Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                    Ok(moved) if Some(moved) == length => Ok(()),
                    Ok(moved) => {
                        Err(io::Error::other(format!("{moved} bytes moved of {length:?}")))
                    }
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
    let file = File::from(new_file(c"pinfold-bench")?);
    // Its pages are there from now on.
    allocate(file.as_fd(), bytes)?;
    Ok(file)
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
    mapping: OwnedMapping,
    range: AddressRange,
}

const HUGE: usize = 2 << 20;

impl Memory {
    /// `bytes` bytes that no cache has seen.
    pub(crate) fn new(bytes: usize, pages: Pages) -> Result<Self, String> {
        let mut mapping = OwnedMapping::aligned(bytes.next_multiple_of(page_bytes()), HUGE)
            .map_err(|errno| format!("mmap: {}", io::Error::from(errno)))?;
        let range = AddressRange::new(mapping.start().addr().get(), bytes)
            .map_err(|error| error.to_string())?;
        // Advice: a kernel without huge pages has small ones.
        let _ = mapping.want_huge_pages(pages == Pages::UntouchedHuge);
        if pages == Pages::Written {
            mapping.fill(0x5a);
        }
        Ok(Self { mapping, range })
    }

    /// From now on its pages may become huge ones; a kernel without huge pages leaves them small.
    pub(crate) fn allow_huge_pages(&self) {
        let _ = self.mapping.want_huge_pages(true);
    }

    /// Writes `byte` over all of it.
    pub(crate) fn fill(&mut self, byte: u8) {
        self.mapping.fill(byte);
    }

    /// What it holds.
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.mapping.contents()
    }

    pub(crate) fn start(&self) -> *const u8 {
        std::ptr::with_exposed_provenance(self.range.start())
    }

    pub(crate) fn range(&self) -> AddressRange {
        self.range
    }

    /// Moves all of it by `ring`, in pieces that `cache` registers.
    pub(crate) fn transfer<M: Monitor>(
        &self,
        cache: &Cache<pinfold::registrar::IoUring, M>,
        access: Access,
        ring: &mut Ring,
    ) -> Result<(), String> {
        let (how, progress) = (pieces::Options::for_transfer(), Progress::new());
        // SAFETY: our own mapping, from which no code borrows; what is begun has ended when the call returns.
        let moved = unsafe {
            pieces::transfer(cache, self.start(), self.range.len(), access, &how, &progress, ring)
        };
        moved.map(drop).map_err(|error| error.to_string())
    }

    /// Leases all of it, one piece after the other.
    pub(crate) fn leases<'c, M: Monitor>(
        &self,
        cache: &'c Cache<pinfold::registrar::IoUring, M>,
        access: Access,
    ) -> Result<Vec<Lease<'c, pinfold::registrar::IoUring, M>>, String> {
        // SAFETY: as above; only a request touches the memory, which its maker answers for.
        let pieces = unsafe { cache.request(self.start(), self.range.len(), access).pieces() };
        pieces.and_then(Iterator::collect).map_err(|error| error.to_string())
    }

    /// Registers `length` bytes from `offset`, for a device to write.
    pub(crate) fn register<M: Monitor>(
        &self,
        cache: &Cache<pinfold::registrar::IoUring, M>,
        offset: usize,
        length: usize,
        how: &pieces::Options,
    ) -> Result<(), String> {
        assert!(offset + length <= self.range.len(), "inside of the memory");
        let start = self.start().wrapping_add(offset);
        // SAFETY: as above; no request is made.
        let all = unsafe {
            pieces::register_all(cache, start, length, Access::WRITE, how, &Progress::new())
        };
        all.map(drop).map_err(|error| error.to_string())
    }

    /// Writes `length` bytes from `offset`.
    pub(crate) fn write(&self, offset: usize, length: usize) {
        assert!(offset + length <= self.range.len(), "inside of the memory");
        let start = std::ptr::with_exposed_provenance_mut::<u8>(self.range.start() + offset);
        // SAFETY: inside of our own mapping, from which no code borrows.
        unsafe { start.write_bytes(0x5a, length) };
    }
}
