//! A cache of real buffers and one of real locks over one monitor, and what shows that they work.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to lease memory by address and to have the kernel move it: every
//! request is waited for before its memory goes away.

#![allow(unsafe_code)]

use crate::registrar_support::{memory_file, ring_with_registrar};
use crate::support::*;
use io_uring::{opcode, types};
use pinfold::monitor::{Best, Choice, Userfaultfd, best};
use pinfold::registrar::{IoUring, Mlock};
use pinfold::{Access, Cache, Config, GetError, Lease, Monitor};
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

/// Whatever is asked for in the environment.
pub(crate) type AnyMonitor = Arc<dyn Monitor>;
pub(crate) type Buffers = Cache<IoUring, AnyMonitor>;
pub(crate) type Locks = Cache<Mlock, AnyMonitor>;

/// How much memory the tests lease.
pub(crate) const PAGES: usize = 4;
pub(crate) const BYTES: usize = PAGES * PAGE;

/// The monitor that `PINFOLD_TEST_MONITOR` names, or a note why there is none.
pub(crate) fn monitor() -> Option<AnyMonitor> {
    let name = std::env::var("PINFOLD_TEST_MONITOR").unwrap_or_default();
    let made: Result<AnyMonitor, String> = match name.as_str() {
        "" | "userfaultfd" => {
            Userfaultfd::shared().map(|it| it as AnyMonitor).map_err(|error| error.to_string())
        }
        "best" => best().map(|it| Arc::new(it) as AnyMonitor).map_err(|error| error.to_string()),
        other => {
            let choice = Choice::named(other).expect("a monitor's name");
            Best::only(choice).map(|it| Arc::new(it) as AnyMonitor).map_err(|it| it.to_string())
        }
    };
    made.map_err(|error| eprintln!("skipped: no monitor: {error}")).ok()
}

pub(crate) struct World {
    pub(crate) buffers: Buffers,
    pub(crate) locks: Locks,
    /// Guards the queue and the file's contents; nothing is taken inside.
    ring: Mutex<io_uring::IoUring>,
    file: File,
}

impl World {
    /// `None`, said, where something is missing.
    pub(crate) fn new() -> Option<Self> {
        let (ring, registrar) = ring_with_registrar(8, 64)?;
        let buffers = pinfold::cache(registrar, monitor()?, Config::keeping_all()).unwrap();
        let locks =
            pinfold::cache(Mlock::new().unwrap(), monitor()?, Config::keeping_all()).unwrap();
        Some(Self { buffers, locks, ring: Mutex::new(ring), file: memory_file() })
    }

    /// One that lives as long as the process, and may be freed by [`free`].
    pub(crate) fn leaked() -> Option<&'static Self> {
        Self::new().map(|world| &*Box::leak(Box::new(world)))
    }

    pub(crate) fn buffer(&self, at: usize) -> Result<Lease<'_, IoUring, AnyMonitor>, GetError> {
        // SAFETY: see the file's header.
        unsafe { self.buffers.get(at as *const u8, BYTES, Access::READ) }
    }

    pub(crate) fn lock(&self, at: usize) -> Result<Lease<'_, Mlock, AnyMonitor>, GetError> {
        // SAFETY: nothing moves; locking memory reads none of it.
        unsafe { self.locks.get(at as *const u8, BYTES, Access::READ) }
    }

    /// What the device moves for the `BYTES` from `at`.
    pub(crate) fn moved(&self, at: usize) -> Result<Vec<u8>, GetError> {
        let lease = self.buffer(at)?;
        let (file, length) = (types::Fd(self.file.as_raw_fd()), u32::try_from(BYTES).unwrap());
        let index = lease.handle().get();
        let entry = opcode::WriteFixed::new(file, at as *const u8, length, index).build();
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lease lives until the request has ended.
        unsafe { ring.submission().push(&entry).unwrap() };
        // A wait ends early where the process is stopped.
        let written = loop {
            let waited = ring.submit_and_wait(1).map_err(|error| error.kind());
            assert!(matches!(waited, Ok(_) | Err(ErrorKind::Interrupted)));
            if let Some(completion) = ring.completion().next() {
                break completion.result();
            }
        };
        assert_eq!(usize::try_from(written), Ok(BYTES), "the device writes all");
        let mut bytes = vec![0; BYTES];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        drop(ring);
        Ok(bytes)
    }

    /// Whether the device moves what the program has there.
    pub(crate) fn moves(&self, at: usize, value: u8) -> bool {
        let bytes = self.moved(at).unwrap();
        (0..PAGES).all(|page| bytes.get(page * PAGE) == Some(&value))
    }

    fn registrations(&self) -> u64 {
        self.buffers.statistics().registrations
    }

    /// Memory that comes and goes is registered once each time, and never stale.
    pub(crate) fn works(&self) {
        let at = map(PAGES);
        for value in b'a'..=b'e' {
            map_over(at, PAGES);
            fill(at, PAGES, value);
            let before = self.registrations();
            assert!(self.moves(at, value) && self.moves(at, value), "fresh");
            assert_eq!(self.registrations(), before + 1, "registered once");
            let cached = [self.lock(at), self.lock(at)].map(|lease| lease.unwrap().is_cached());
            assert_eq!(cached, [true; 2]);
        }
        assert!(munmap(at, BYTES));
    }

    /// As [`works`](Self::works), concurrently with others that register: their registrations are not counted.
    pub(crate) fn is_fresh(&self) {
        let at = map(PAGES);
        for value in b'a'..=b'e' {
            map_over(at, PAGES);
            fill(at, PAGES, value);
            assert!(self.moves(at, value) && self.moves(at, value));
            assert!(self.lock(at).is_ok());
        }
        assert!(munmap(at, BYTES));
    }

    /// Freshly mapped memory that is cached by both.
    pub(crate) fn with_memory(&self, value: u8) -> usize {
        let at = map(PAGES);
        fill(at, PAGES, value);
        assert!(self.moves(at, value), "the device moves what is there");
        assert!(self.lock(at).unwrap().is_cached());
        at
    }

    /// Whether memory from [`with_memory`](Self::with_memory) is still cached.
    pub(crate) fn still_has(&self, at: usize, value: u8) -> bool {
        let before = self.registrations();
        self.moves(at, value) && self.registrations() == before
    }
}

/// Frees what [`World::leaked`] gave.
///
/// # Safety
///
/// Nothing of it is used any more in this process.
pub(crate) unsafe fn free(world: &'static World) {
    // SAFETY: it came from a box, and is not used any more.
    drop(unsafe { Box::from_raw(std::ptr::from_ref(world).cast_mut()) });
}

/// Drops the caches, registrars and monitors of a child's copy; what the test itself opened stays.
///
/// # Safety
///
/// Nothing of it is used any more in this process.
pub(crate) unsafe fn free_caches(world: &'static World) {
    // SAFETY: they are not dropped a second time.
    unsafe {
        drop(std::ptr::read(&raw const world.buffers));
        drop(std::ptr::read(&raw const world.locks));
    }
}

/// Everything that a forked child must find: no lock, no registration, no harm to its parent.
pub(crate) fn is_forked(world: &World) {
    let at = map(PAGES);
    assert_eq!(world.buffer(at).map(drop), Err(GetError::Forked));
    assert_eq!(world.lock(at).map(drop), Err(GetError::Forked));
    assert_eq!(world.buffers.check().map(drop), Err(GetError::Forked));
    assert_eq!((world.buffers.reclaim(), world.buffers.evict_idle()), (0, 0));
    assert_eq!(world.buffers.statistics().regions, 0);
    world.buffers.invalidate(range(at, BYTES));
    assert!(munmap(at, BYTES));
}
