//! What it costs, and saves, to re-arrange registered memory while a stream of transfers goes over
//! it.
//!
//! In each round a region of 16 MiB in fresh small pages is registered and deregistered some times
//! explicitly, then made huge under a steady stream, then registered and deregistered again. All
//! ratios are of the same round; what is reported is their median.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory that no transfer uses, and to give the word
//! that copying and trimming rely on: the region is written to by the stream alone, through the
//! cache that suspends it, and what is trimmed is not needed.

#![allow(unsafe_code)]

mod region;
mod stream;

use super::Bench;
use crate::device::registrar_of;
use crate::medians::median;
use crate::output::{Failure, Output};
use io_uring::IoUring;
use pinfold::monitor::Userfaultfd;
use pinfold::rearrange::{
    Defragmented, HugePageWay, Node, RearrangeError, Trimmed, defragment, defragment_in_steps,
    migrate, trim,
};
use pinfold::suspend::SuspensionTerms;
use pinfold::{Access, AddressRange, Config, Registrar};
use region::Region;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stream::{MESSAGE, Outcome, Rings, Signals, Stream};

const BYTES: usize = 16 << 20;

/// How a region is made huge while the stream goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Course {
    /// One huge page's worth at a time.
    Steps,
    /// The same, during a lease of the whole region that keeps its index.
    StepsBesideLease,
    /// All of it under one suspension.
    AtOnce,
}

impl Course {
    const ALL: [Self; 3] = [Self::Steps, Self::StepsBesideLease, Self::AtOnce];

    const fn name(self) -> &'static str {
        match self {
            Self::Steps => "steps",
            Self::StepsBesideLease => "steps beside a lease",
            Self::AtOnce => "at once",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pages {
    InPlace,
    ByCopy,
}

impl Pages {
    const ALL: [Self; 2] = [Self::InPlace, Self::ByCopy];

    const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "in place",
            Self::ByCopy => "by copy",
        }
    }

    fn way(self) -> HugePageWay {
        match self {
            Self::InPlace => HugePageWay::IN_PLACE,
            // SAFETY: see the file's header.
            Self::ByCopy => unsafe { HugePageWay::by_copy() },
        }
    }
}

/// Microseconds to register and to deregister a region.
#[derive(Clone, Copy, Debug)]
struct Price {
    register: f64,
    deregister: f64,
}

impl Price {
    fn both(self) -> f64 {
        self.register + self.deregister
    }
}

/// One region made huge under a stream.
struct Round {
    before: Price,
    after: Price,
    done: Defragmented,
    /// The longest suspension.
    suspended: Duration,
    outcome: Outcome,
}

/// A region that moved, or was trimmed.
struct Change {
    before: Price,
    after: Price,
    elapsed: f64,
    params: Value,
}

/// Measures; also tells whether every byte was right and no transfer failed.
pub(super) fn measure(rounds: u32, output: &Output) -> Result<(Vec<Bench>, bool), Failure> {
    let cases: Vec<_> = Course::ALL
        .into_iter()
        .flat_map(|course| Pages::ALL.map(|pages| (course, pages)))
        .collect();
    let progress = output.progress(u64::from(rounds) * (cases.len() as u64 + 2), "suspend");
    let mut rows = Vec::new();
    let mut held = true;
    let mut measured: Vec<Vec<Round>> = cases.iter().map(|_| Vec::new()).collect();
    let (mut moved, mut trimmed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (&(course, pages), all) in cases.iter().zip(&mut measured) {
            all.push(under_a_stream(course, pages)?);
            progress.advance(1);
        }
        moved.extend(migrated()?);
        progress.advance(1);
        trimmed.push(trimmed_half()?);
        progress.advance(1);
    }
    for (&(course, pages), all) in cases.iter().zip(&measured) {
        held &= all.iter().all(|round| round.outcome.wrong + round.outcome.failed == 0);
        rows.extend(rows_of(course, pages, all));
    }
    rows.extend(change_rows("migrate", &moved));
    rows.extend(change_rows("trim", &trimmed));
    Ok((rows, held))
}

/// How often a region is registered and deregistered for one price.
const REPEATS: usize = 5;

/// What registering `range` costs, on a ring of its own that does nothing else.
fn price(range: AddressRange) -> Result<Price, Failure> {
    let ring = IoUring::new(8).map_err(Failure::unavailable)?;
    let registrar = registrar_of(&ring, 16).map_err(Failure::unavailable)?;
    let (mut registering, mut deregistering) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let begun = Instant::now();
        // SAFETY: no transfer uses it.
        let index = unsafe { registrar.register(range, Access::READ_WRITE) };
        let index = index.map_err(Failure::unavailable)?;
        let registered = begun.elapsed();
        // SAFETY: registered above, and in no use.
        unsafe { registrar.deregister(index, range) }.map_err(Failure::unavailable)?;
        registering.push(microseconds(registered));
        deregistering.push(microseconds(begun.elapsed() - registered));
    }
    Ok(Price { register: median(registering), deregister: median(deregistering) })
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A ring and a cache over it that takes the region as one registration.
fn rings() -> Result<(IoUring, Rings), Failure> {
    let ring = IoUring::new(8).map_err(Failure::unavailable)?;
    let registrar = registrar_of(&ring, 1024).map_err(Failure::unavailable)?;
    let monitor = Arc::new(Userfaultfd::new().map_err(Failure::unavailable)?);
    let config = Config { piece_bytes: BYTES, ..Config::keeping_all() };
    let cache = pinfold::cache(registrar, monitor, config).map_err(Failure::unavailable)?;
    Ok((ring, cache))
}

/// Longer than anything here takes, on a machine that others use too.
fn terms() -> SuspensionTerms {
    SuspensionTerms { deadline: Duration::from_secs(10), ..SuspensionTerms::default() }
}

/// How long the stream goes on before and after.
const CALM: Duration = Duration::from_millis(20);

fn under_a_stream(course: Course, pages: Pages) -> Result<Round, Failure> {
    let region = Region::new(BYTES)?;
    let before = price(region.range())?;
    let (ring, cache) = rings()?;
    let signals = Signals::default();
    let mut stream = Stream {
        ring,
        cache: &cache,
        range: region.range(),
        channel: std::io::pipe().map_err(Failure::unavailable)?,
        expected: region.bytes(),
        signals: &signals,
        outcome: Outcome::default(),
        last: None,
    };
    let (done, suspended) = std::thread::scope(|scope| {
        let streaming = scope.spawn(|| stream.run());
        std::thread::sleep(CALM);
        // Relaxed: flags that publish nothing.
        signals.busy.store(true, Ordering::Relaxed);
        let done = make_huge(&cache, region.range(), course, pages);
        signals.busy.store(false, Ordering::Relaxed);
        std::thread::sleep(CALM);
        signals.stop.store(true, Ordering::Relaxed);
        streaming.join().map_err(|_| Failure::unavailable("the stream's thread panicked"))?;
        done
    })?;
    let mut outcome = stream.outcome;
    if stream.expected != region.bytes() {
        outcome.wrong += 1;
    }
    drop(cache);
    Ok(Round { before, after: price(region.range())?, done, suspended, outcome })
}

fn make_huge(
    cache: &Rings,
    range: AddressRange,
    course: Course,
    pages: Pages,
) -> Result<(Defragmented, Duration), Failure> {
    let mut leases = Vec::new();
    if course == Course::StepsBesideLease {
        let start = std::ptr::with_exposed_provenance(range.start());
        // SAFETY: the region outlives the lease.
        let lease = unsafe { cache.get(start, range.len(), Access::READ_WRITE) };
        leases.push(lease.map_err(Failure::unavailable)?);
    }
    if course == Course::AtOnce {
        let suspended = cache.suspend(range, Vec::new(), leases, terms());
        let suspended = suspended.map_err(Failure::unavailable)?;
        let done = defragment(&suspended, pages.way()).map_err(Failure::unavailable)?;
        let resumed = suspended.resume().map_err(Failure::unavailable)?;
        return Ok((done, resumed.paused));
    }
    let done = defragment_in_steps(cache, range, &[], leases, terms(), pages.way());
    done.map(|done| (done.defragmented, done.longest)).map_err(Failure::unavailable)
}

/// Where there is one node, the region is there already; what is measured then is the look.
fn migrated() -> Result<Option<Change>, Failure> {
    let region = Region::new(BYTES)?;
    let before = price(region.range())?;
    let (_ring, cache) = rings()?;
    let suspended = cache.suspend(region.range(), Vec::new(), Vec::new(), terms());
    let suspended = suspended.map_err(Failure::unavailable)?;
    let known = migrate(&suspended, Node(u32::MAX));
    let Err(RearrangeError::NoSuchNode { nodes, .. }) = known else { return Ok(None) };
    // The last, so that the region moves where there is somewhere to go.
    let Some(&node) = nodes.last() else { return Ok(None) };
    let moved = migrate(&suspended, node).map_err(Failure::unavailable)?;
    suspended.resume().map_err(Failure::unavailable)?;
    let there = |it: &pinfold::rearrange::OnNodes| it.pages.get(&node).copied().unwrap_or(0);
    let params = json!({
        "bytes": BYTES,
        "nodes": nodes.len(),
        "pages_there_before": there(&moved.before),
        "pages_there_after": there(&moved.after),
    });
    let elapsed = microseconds(moved.elapsed);
    Ok(Some(Change { before, after: price(region.range())?, elapsed, params }))
}

/// The upper half is given up; what is registered before and after is what is needed.
fn trimmed_half() -> Result<Change, Failure> {
    let region = Region::new(BYTES)?;
    let before = price(region.range())?;
    let (_ring, cache) = rings()?;
    let suspended = cache.suspend(region.range(), Vec::new(), Vec::new(), terms());
    let suspended = suspended.map_err(Failure::unavailable)?;
    let half = BYTES / 2;
    let part = |offset| AddressRange::new(region.range().start() + offset, half);
    let (lower, upper) = (part(0), part(half).map_err(Failure::unavailable)?);
    // SAFETY: see the file's header.
    let trimmed = unsafe { trim(&suspended, upper) }.map_err(Failure::unavailable)?;
    suspended.resume().map_err(Failure::unavailable)?;
    let Trimmed { given_up, elapsed, .. } = trimmed;
    let resident =
        |pages: Option<pinfold::rearrange::ResidentPages>| pages.map(|pages| pages.resident);
    let params = json!({
        "bytes": BYTES,
        "given_up": given_up,
        "resident_before": resident(trimmed.before),
        "resident_after": resident(trimmed.after),
    });
    let after = price(lower.map_err(Failure::unavailable)?)?;
    Ok(Change { before, after, elapsed: microseconds(elapsed), params })
}

fn rows_of(course: Course, pages: Pages, rounds: &[Round]) -> Vec<Bench> {
    let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
    let worst = |of: fn(&Round) -> f64| rounds.iter().map(of).fold(0.0, f64::max);
    let sum = |of: fn(&Outcome) -> u64| rounds.iter().map(|round| of(&round.outcome)).sum::<u64>();
    let params = json!({
        "bytes": BYTES,
        "pages": pages.name(),
        "course": course.name(),
        "message_bytes": MESSAGE,
        "transfers": sum(|outcome| outcome.transfers),
        "failed": sum(|outcome| outcome.failed),
        "wrong": sum(|outcome| outcome.wrong),
        "left_small": rounds.iter().map(|round| round.done.left.len()).sum::<usize>(),
    });
    let row = |name, value, unit| Bench { name, params: params.clone(), value, unit, ratio: None };
    vec![
        row(
            "register_after_defragment_speedup",
            middle(|round| round.before.both() / round.after.both()),
            "times",
        ),
        row("stream_pause_over_register", middle(pause_over_register), "times"),
        row("stream_pause_over_register, worst", worst(pause_over_register), "times"),
        row("stream_pause_over_register, calm", middle(calm_over_register), "times"),
        row("suspension, longest", middle(|round| microseconds(round.suspended)), "us"),
        row("stream_pause", middle(|round| microseconds(round.outcome.pause)), "us"),
        row("defragment", middle(|round| microseconds(round.done.elapsed)), "us"),
        row("register, small pages", middle(|round| round.before.register), "us"),
        row("deregister, small pages", middle(|round| round.before.deregister), "us"),
        row("register, defragmented", middle(|round| round.after.register), "us"),
        row("deregister, defragmented", middle(|round| round.after.deregister), "us"),
    ]
}

fn pause_over_register(round: &Round) -> f64 {
    microseconds(round.outcome.pause) / round.before.register
}

/// The same stream's longest pause while nothing happened: what the machine itself does to it.
fn calm_over_register(round: &Round) -> f64 {
    microseconds(round.outcome.calm) / round.before.register
}

fn change_rows(name: &'static str, changes: &[Change]) -> Vec<Bench> {
    let Some(first) = changes.first() else { return Vec::new() };
    let middle = |of: fn(&Change) -> f64| median(changes.iter().map(of).collect());
    vec![Bench {
        name,
        params: first.params.clone(),
        value: middle(|change| change.elapsed),
        unit: "us",
        // Registering and deregistering what is needed, before over after.
        ratio: Some(middle(|change| change.before.both() / change.after.both())),
    }]
}
