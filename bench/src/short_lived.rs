//! Memory that does not stay: mapped or allocated, used, unmapped or freed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for mappings and blocks of its own.

#![allow(unsafe_code)]

use crate::peer::{Allocator, LibC};
use crate::rounds::nanoseconds_each;
use pinfold::registrar::IoUring;
use pinfold::{Access, AddressRange, Cache, GetError, Lease, Monitor, Registrar};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::thread;

/// What a turn does, over and over.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Lives {
    /// Where each memory comes from.
    pub(crate) source: Source,
    /// How long each is.
    pub(crate) bytes: usize,
    /// How often each is used before it goes.
    pub(crate) uses: usize,
    /// How many follow each other on each thread.
    pub(crate) count: usize,
    /// How many threads do so.
    pub(crate) threads: usize,
}

impl Lives {
    /// The nanoseconds that each life took, of which `use_all` is what is done with its memory.
    pub(crate) fn run(
        &self,
        use_all: impl Fn(&ShortLived) -> Result<(), String> + Sync,
    ) -> Result<f64, String> {
        let live = || use_all(&ShortLived::new(self.source, self.bytes)?);
        let live_all = || (0..self.count).try_for_each(|_| live());
        nanoseconds_each(self.count, || {
            if self.threads == 1 {
                return live_all();
            }
            thread::scope(|scope| {
                let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(live_all)).collect();
                let mut ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
                ended.try_for_each(|end| end.unwrap_or_else(|_| Err("a thread panicked".into())))
            })
        })
    }
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Source {
    Map,
    Malloc,
}

impl Source {
    /// For a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Map => "mmap",
            Self::Malloc => "malloc",
        }
    }
}

/// New memory whose pages are there.
pub(crate) struct ShortLived {
    start: *mut u8,
    bytes: usize,
    source: Source,
}

impl ShortLived {
    /// `bytes` bytes.
    pub(crate) fn new(source: Source, bytes: usize) -> Result<Self, String> {
        let start = match source {
            Source::Map => Self::map(bytes)?,
            Source::Malloc => LibC::allocate(bytes),
        };
        if start.is_null() {
            return Err(format!("malloc has no {bytes} bytes"));
        }
        if source == Source::Malloc {
            // SAFETY: the bytes are our own.
            (0..bytes).step_by(4096).for_each(|at| unsafe { start.add(at).write_volatile(1) });
        }
        start.expose_provenance();
        Ok(Self { start, bytes, source })
    }

    fn map(bytes: usize) -> Result<*mut u8, String> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: new memory, which takes no other's place.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(format!("mmap: {}", std::io::Error::last_os_error()));
        }
        Ok(start.cast())
    }

    pub(crate) const fn start(&self) -> *const u8 {
        self.start
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Leases it for reading.
    #[inline]
    pub(crate) fn lease<'c, M: Monitor>(
        &self,
        cache: &'c Cache<IoUring, M>,
    ) -> Result<Lease<'c, IoUring, M>, GetError> {
        // SAFETY: only a request touches the memory, which its maker answers for (`SubmissionQueue::push`).
        unsafe { cache.get(self.start, self.bytes, Access::READ) }
    }

    /// Registers it for reading, and ends that.
    pub(crate) fn register_once(&self, registrar: &IoUring) -> Result<(), String> {
        let range = self.range()?;
        // SAFETY: no request is made for it.
        let handle = unsafe { registrar.register(range, Access::READ) };
        let handle = black_box(handle.map_err(|error| error.to_string())?);
        // SAFETY: registered above, and in no use.
        unsafe { registrar.deregister(handle, range) }.map_err(|error| error.to_string())
    }

    pub(crate) fn range(&self) -> Result<AddressRange, String> {
        AddressRange::new(self.start.addr(), self.bytes).map_err(|error| error.to_string())
    }
}

impl Drop for ShortLived {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: our own mapping, from which nothing borrows.
            Source::Map => _ = unsafe { libc::munmap(self.start.cast(), self.bytes) },
            // SAFETY: allocated in `new`, and freed once.
            Source::Malloc => unsafe { LibC::free(self.start) },
        }
    }
}
