//! Memory that does not stay: mapped, used some times, unmapped, over and over, beside registering
//! for each use by two calls of the registrar. And what a watched `munmap` takes beside one of memory
//! that nobody watches.
//!
//! A cache that everybody switches on must be harmless for a program that never uses a buffer again.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for mappings of its own and for the doors that take an address. No
//! device is given a request, so nothing is read or written but by the first touch here.

#![allow(unsafe_code)]

use crate::Options;
use crate::report::Report;
use crate::rounds::{Comparison, compare, nanoseconds, nanoseconds_each};
use io_uring::IoUring as Ring;
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::{
    Access, AddressRange, Admission, Cache, Config, LearnedCost, Lease, Monitor, Registrar,
    UseCosts, Verdict, Watch,
};
use serde_json::json;
use std::hint::black_box;
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
type Preparation<'p> = dyn Fn(&Mapped) -> Result<(), String> + 'p;

type TheCache = Cache<IoUring, Userfaultfd>;

/// What a program may do for each use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Two calls of the registrar.
    PerUse,
    /// A get; the range is watched and kept from the first on.
    Kept,
    /// A get once the decision says so, until then one whose registration ends with its lease.
    Admitted,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::PerUse => "per_use",
            Self::Kept => "userfaultfd, kept from the first use",
            Self::Admitted => "userfaultfd, kept once it pays",
        }
    }
}

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
    let by_hand = IoUring::new(&ring, 1).map_err(|error| error.to_string())?;
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let registrar = IoUring::new(&ring, SLOTS).map_err(|error| error.to_string())?;
    // A registration each, also of the longest.
    let longest = SIZES.into_iter().max().unwrap_or_default();
    let config = Config { piece_bytes: longest, ..Config::default() };
    let cache = pinfold::cache(registrar, monitor, config).map_err(|error| error.to_string())?;
    let sizes = SIZES.into_iter().filter(|&bytes| !options.quick || bytes <= 64 << 10);
    for bytes in sizes {
        // What things cost depends on the size, so each is learnt anew.
        let mut rig = Rig::new(&cache, &by_hand, bytes);
        for uses in USES {
            rig.measure(options, report, uses)?;
        }
    }
    [4 << 10, 64 << 10].into_iter().try_for_each(|bytes| unmapping(options, report, &cache, bytes))
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
            let memory = Mapped::new(bytes)?;
            prepare(&memory)?;
            let began = Instant::now();
            drop(memory);
            took += began.elapsed();
        }
        Ok(nanoseconds(took) / count as f64)
    };
    let watch = |memory: &Mapped| match cache.monitor().watch(memory.range()?) {
        Watch::Covered => Ok(()),
        Watch::Uncovered(why) => Err(why.to_string()),
    };
    let get = |memory: &Mapped| get(cache, memory).map(drop);
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

/// One size, and what is known of it.
struct Rig<'c> {
    cache: &'c TheCache,
    by_hand: &'c IoUring,
    bytes: usize,
    admission: Admission,
    learned: Learned,
}

/// What things took here.
#[derive(Default)]
struct Learned {
    per_use: LearnedCost,
    hit: LearnedCost,
    purchase: LearnedCost,
    unmapping: LearnedCost,
    watched_unmapping: LearnedCost,
}

impl Learned {
    /// `None` until a range was unmapped that was kept, and one that was not. Hits are taken for free
    /// until there was one.
    fn costs(&self) -> Option<UseCosts> {
        let change = self.watched_unmapping.nanoseconds()?;
        let surcharge = change.saturating_sub(self.unmapping.nanoseconds()?);
        Some(UseCosts {
            per_use: self.per_use.nanoseconds()?,
            hit: self.hit.nanoseconds().unwrap_or(0),
            keeping: self.purchase.nanoseconds()? + surcharge,
        })
    }
}

impl<'c> Rig<'c> {
    fn new(cache: &'c TheCache, by_hand: &'c IoUring, bytes: usize) -> Self {
        let (admission, learned) = (Admission::new(), Learned::default());
        Self { cache, by_hand, bytes, admission, learned }
    }

    fn measure(
        &mut self,
        options: Options,
        report: &mut Report,
        uses: usize,
    ) -> Result<(), String> {
        let by_use = (TURN_USED_BYTES / self.bytes).min(TURN_USES) / uses;
        let lives = (TURN_BYTES / self.bytes).min(by_use).clamp(1, MOST_LIVES);
        let lives = options.scaled(lives).max(1);
        for way in [Way::Kept, Way::Admitted] {
            let (mut ours, mut peers) = (Vec::new(), Vec::new());
            // Both need the rig, so the two closures of `compare` cannot have it.
            for round in 0..=options.rounds {
                let turns = if round % 2 == 0 { [way, Way::PerUse] } else { [Way::PerUse, way] };
                for turn in turns {
                    let figure = nanoseconds_each(lives, || {
                        (0..lives).try_for_each(|_| self.live(turn, uses))
                    })?;
                    // The first round warms up.
                    let figures = if turn == way { &mut ours } else { &mut peers };
                    figures.extend((round > 0).then_some(figure));
                }
            }
            let comparison = Comparison::of_rounds(ours, peers);
            let params = json!({"way": way.name(), "bytes": self.bytes, "uses": uses});
            report.add_against(Way::PerUse.name(), "churn", params, "ns", comparison);
        }
        Ok(())
    }

    /// A mapping's life.
    fn live(&mut self, way: Way, uses: usize) -> Result<(), String> {
        let memory = Mapped::new(self.bytes)?;
        let mut kept = false;
        for _ in 0..uses {
            match way {
                Way::PerUse => self.register(&memory)?,
                Way::Kept => drop(black_box(get(self.cache, &memory)?)),
                Way::Admitted => kept |= self.admit(&memory)?,
            }
        }
        if way == Way::Admitted {
            let unmapping = if kept {
                &mut self.learned.watched_unmapping
            } else {
                &mut self.learned.unmapping
            };
            timed(unmapping, || drop(memory));
        }
        Ok(())
    }

    fn register(&self, memory: &Mapped) -> Result<(), String> {
        let range = memory.range()?;
        // SAFETY: the memory is mapped, and no request is ever made.
        let handle = unsafe { self.by_hand.register(range, Access::READ) };
        let handle = black_box(handle.map_err(|error| error.to_string())?);
        // SAFETY: registered above, and in no use.
        unsafe { self.by_hand.deregister(handle, range) }.map_err(|error| error.to_string())
    }

    /// One use; whether the range is kept now.
    fn admit(&mut self, memory: &Mapped) -> Result<bool, String> {
        let (start, bytes) = (memory.start, memory.bytes);
        let began = Instant::now();
        // SAFETY: as in `get`.
        let hit = unsafe { self.cache.get_if_cached(start, bytes, Access::READ) };
        if let Some(lease) = hit {
            drop(black_box(lease));
            self.learned.hit.observe(since(began));
            return Ok(true);
        }
        let verdict = match self.learned.costs() {
            Some(costs) => self.admission.decide(memory.range()?, costs),
            // Each is tried until it has been measured.
            None if self.learned.unmapping.nanoseconds().is_none() => Verdict::RegisterPerUse,
            None => Verdict::Keep,
        };
        match verdict {
            Verdict::Keep => {
                drop(black_box(get(self.cache, memory)?));
                self.learned.purchase.observe(since(began));
            }
            Verdict::RegisterPerUse => {
                // SAFETY: as in `get`.
                let lease = unsafe { self.cache.get_once(start, bytes, Access::READ) };
                drop(black_box(lease.map_err(|error| error.to_string())?));
                self.learned.per_use.observe(since(began));
            }
        }
        Ok(verdict == Verdict::Keep)
    }
}

fn get<'c>(
    cache: &'c TheCache,
    memory: &Mapped,
) -> Result<Lease<'c, IoUring, Userfaultfd>, String> {
    // SAFETY: the memory is mapped while the lease lives, and no request is ever made.
    let lease = unsafe { cache.get(memory.start, memory.bytes, Access::READ) };
    lease.map_err(|error| error.to_string())
}

fn timed(cost: &mut LearnedCost, work: impl FnOnce()) {
    let began = Instant::now();
    work();
    cost.observe(since(began));
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// New memory whose pages are there.
struct Mapped {
    start: *const u8,
    bytes: usize,
}

impl Mapped {
    fn new(bytes: usize) -> Result<Self, String> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: new memory, which takes nobody's place.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(format!("mmap: {}", std::io::Error::last_os_error()));
        }
        start.expose_provenance();
        Ok(Self { start: start.cast::<u8>().cast_const(), bytes })
    }

    fn range(&self) -> Result<AddressRange, String> {
        AddressRange::new(self.start.addr(), self.bytes).map_err(|error| error.to_string())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping, from which nobody borrows.
        unsafe { libc::munmap(self.start.cast_mut().cast(), self.bytes) };
    }
}
