//! Memory that does not stay: mapped (or allocated), used some times, unmapped (or freed), over and over, by
//! one thread and by two, compared with registering
//! for each use by two calls of the registrar. And what a watched `munmap` takes compared with one of memory
//! that is not watched.
//!
//! A cache that is on by default must be harmless for a program that never uses a buffer again.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for mappings of its own and for the methods that take an address. No
//! device is given a request, so nothing is read or written but by the first touch here.

#![allow(unsafe_code)]

use crate::Options;
use crate::peer::{Allocator, LibC};
use crate::report::Report;
use crate::ring::registrar_of;
use crate::rounds::{compare, nanoseconds, nanoseconds_each};
use io_uring::IoUring as Ring;
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::{Access, AddressRange, Cache, Config, Lease, Monitor, Registrar, Watch};
use serde_json::json;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
const USES: [usize; 6] = [1, 2, 8, 32, 128, 1024];
/// What one turn of a round maps and what it uses, in bytes, and how many uses it makes, at most:
/// but one life at least.
const TURN_BYTES: usize = 64 << 20;
const TURN_USED_BYTES: usize = 4 << 30;
const TURN_USES: usize = 20_000;
const MOST_LIVES: usize = 200;
const SLOTS: u32 = 1024;
/// Watched mappings that are unmapped in a turn.
const UNMAPPINGS: usize = 300;

/// What is done with memory before it is unmapped.
type Preparation<'p> = dyn Fn(&Memory) -> Result<(), String> + 'p;

type TheCache = Cache<IoUring, Arc<Userfaultfd>>;

/// What a program may do for each use.
#[derive(Clone, Copy)]
enum Way<'c> {
    /// Two calls of the registrar.
    PerUse,
    /// A get.
    Get(&'c TheCache),
}

/// The caches, and how each is called.
type Caches = [(&'static str, TheCache); 2];

/// One figure for each way, size and number of uses; then the price of unmapping.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let ring = match Ring::new(8) {
        Ok(ring) => ring,
        Err(error) => {
            report.remark(&format!("skipped: churn: no io_uring: {error}"));
            return Ok(());
        }
    };
    let monitor = match Userfaultfd::new() {
        Ok(monitor) => monitor,
        Err(error) => {
            report.remark(&format!("skipped: churn: userfaultfd: {error}"));
            return Ok(());
        }
    };
    let by_hand = registrar_of(&ring, 2).map_err(|error| error.to_string())?;
    let monitor = Arc::new(monitor);
    let caches: Caches = [
        ("userfaultfd, kept from the first use", cache(&monitor, Config::keeping_all())?),
        ("userfaultfd", cache(&monitor, Config::default())?),
    ];
    let sizes = SIZES.into_iter().filter(|&bytes| !options.quick || bytes <= 64 << 10);
    for bytes in sizes {
        for (source, threads) in [(Source::Map, 1), (Source::Malloc, 1), (Source::Map, 2)] {
            let rig = Rig { caches: &caches, by_hand: &by_hand, bytes, source, threads };
            for uses in USES {
                rig.measure(options, report, uses)?;
            }
        }
    }
    let [(_, keeping), _] = &caches;
    [4 << 10, 64 << 10].into_iter().try_for_each(|bytes| unmapping(options, report, keeping, bytes))
}

/// A cache with a ring of its own, in which the longest range is one registration.
fn cache(monitor: &Arc<Userfaultfd>, config: Config) -> Result<TheCache, String> {
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let registrar = registrar_of(&ring, SLOTS).map_err(|error| error.to_string())?;
    let piece_bytes = SIZES.into_iter().max().unwrap_or_default();
    pinfold::cache(registrar, Arc::clone(monitor), Config { piece_bytes, ..config })
        .map_err(|error| error.to_string())
}

/// What a watched `munmap` takes, once by the monitor alone and once with a registration to be
/// given back.
fn unmapping(
    options: Options,
    report: &mut Report,
    cache: &TheCache,
    bytes: usize,
) -> Result<(), String> {
    let count = options.scaled(UNMAPPINGS).max(3);
    let each = |prepare: &Preparation<'_>| {
        let mut took = Duration::ZERO;
        for _ in 0..count {
            let memory = Memory::new(Source::Map, bytes)?;
            prepare(&memory)?;
            let began = Instant::now();
            drop(memory);
            took += began.elapsed();
        }
        Ok(nanoseconds(took) / count as f64)
    };
    let watch = |memory: &Memory| match cache.monitor().watch(memory.range()?) {
        Watch::Covered => Ok(()),
        Watch::Uncovered(why) => Err(why.to_string()),
    };
    let get = |memory: &Memory| get(cache, memory).map(drop);
    let cases: [(&str, &Preparation<'_>); 2] =
        [("watched", &watch), ("watched and registered", &get)];
    for (what, prepare) in cases {
        let comparison =
            compare(options.rounds, &mut |_| each(prepare), Some(&mut |_| each(&|_| Ok(()))))?;
        let params = json!({"what": what, "bytes": bytes});
        report.add_against("not watched", "munmap", params, "ns", comparison);
    }
    Ok(())
}

/// One size.
struct Rig<'c> {
    caches: &'c Caches,
    by_hand: &'c IoUring,
    bytes: usize,
    source: Source,
    threads: usize,
}

impl Rig<'_> {
    fn measure(&self, options: Options, report: &mut Report, uses: usize) -> Result<(), String> {
        let by_use = (TURN_USED_BYTES / self.bytes).min(TURN_USES) / uses;
        let lives = (TURN_BYTES / self.bytes).min(by_use).clamp(1, MOST_LIVES);
        let lives = options.scaled(lives).max(1);
        let each = |way: Way<'_>| nanoseconds_each(lives, || self.lives(way, lives, uses));
        for (name, cache) in self.caches {
            let comparison = compare(
                options.rounds,
                &mut |_| each(Way::Get(cache)),
                Some(&mut |_| each(Way::PerUse)),
            )?;
            let (source, threads) = (self.source.name(), self.threads);
            let params = json!({
                "way": name, "bytes": self.bytes, "uses": uses, "memory": source, "threads": threads,
            });
            report.add_against("per_use", "churn", params, "ns", comparison);
        }
        Ok(())
    }

    /// So many on each thread.
    fn lives(&self, way: Way<'_>, lives: usize, uses: usize) -> Result<(), String> {
        let run = || (0..lives).try_for_each(|_| self.live(way, uses));
        if self.threads == 1 {
            return run();
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(run)).collect();
            let mut ended = threads.into_iter().map(|thread| thread.join());
            ended.try_for_each(|end| end.unwrap_or_else(|_| Err("a thread panicked".into())))
        })
    }

    /// A mapping's life.
    fn live(&self, way: Way<'_>, uses: usize) -> Result<(), String> {
        let memory = Memory::new(self.source, self.bytes)?;
        (0..uses).try_for_each(|_| match way {
            Way::PerUse => self.register(&memory),
            Way::Get(cache) => get(cache, &memory).map(|lease| drop(black_box(lease))),
        })
    }

    fn register(&self, memory: &Memory) -> Result<(), String> {
        let range = memory.range()?;
        // SAFETY: the memory is mapped, and no request is ever made.
        let handle = unsafe { self.by_hand.register(range, Access::READ) };
        let handle = black_box(handle.map_err(|error| error.to_string())?);
        // SAFETY: registered above, and in no use.
        unsafe { self.by_hand.deregister(handle, range) }.map_err(|error| error.to_string())
    }
}

fn get<'c>(
    cache: &'c TheCache,
    memory: &Memory,
) -> Result<Lease<'c, IoUring, Arc<Userfaultfd>>, String> {
    // SAFETY: the memory is mapped while the lease lives, and no request is ever made.
    let lease = unsafe { cache.get(memory.start, memory.bytes, Access::READ) };
    lease.map_err(|error| error.to_string())
}

/// Where memory comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Map,
    Malloc,
}

impl Source {
    const fn name(self) -> &'static str {
        match self {
            Self::Map => "mmap",
            Self::Malloc => "malloc",
        }
    }
}

/// New memory whose pages are there.
struct Memory {
    start: *mut u8,
    bytes: usize,
    source: Source,
}

impl Memory {
    fn new(source: Source, bytes: usize) -> Result<Self, String> {
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

    fn range(&self) -> Result<AddressRange, String> {
        AddressRange::new(self.start.addr(), self.bytes).map_err(|error| error.to_string())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: our own mapping, from which nothing borrows.
            Source::Map => _ = unsafe { libc::munmap(self.start.cast(), self.bytes) },
            // SAFETY: allocated in `new`, and freed once.
            Source::Malloc => unsafe { LibC::free(self.start) },
        }
    }
}
