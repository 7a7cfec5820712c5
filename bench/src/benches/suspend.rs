//! What it costs, and saves, to re-arrange registered memory while a stream of transfers goes over
//! it.
//!
//! In each round a region of 16 MiB in fresh small pages is registered and deregistered some times
//! explicitly, then made huge under a steady stream, then registered and deregistered again. Further regions
//! are moved to another node, and trimmed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register memory that no transfer uses, and to give the word
//! that copying and trimming rely on: the region is written to by the stream alone, through the
//! cache that suspends it, and what is trimmed is not needed.

#![allow(unsafe_code)]

mod stream;

use crate::Options;
use crate::report::Report;
use crate::ring::{self, Memory, Pages, RingCache, cache_over, registrar_of, userfaultfd};
use crate::rounds::{Comparison, median};
use io_uring::IoUring;
use pinfold::listed;
use pinfold::rearrange::{
    Defragmented, HugePageWay, Node, OnNodes, RearrangeError, ResidentPages, Trimmed, defragment,
    defragment_in_steps, migrate, trim,
};
use pinfold::suspend::SuspensionTerms;
use pinfold::{Access, AddressRange, Config, Registrar};
use serde_json::{Value, json};
use std::fmt::Display;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stream::{MESSAGE, Outcome, Signals, Stream};

const BYTES: usize = 16 << 20;

listed! {
    /// How a region is made huge while the stream goes on.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Course {
        /// One huge page's worth at a time.
        Steps => "steps",
        /// The same, during a lease of the whole region that keeps its index.
        StepsBesideLease => "steps beside a lease",
        /// All of it under one suspension.
        AtOnce => "at once",
    }
}

listed! {
    /// How huge pages are made.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Making {
        /// Of the pages that are there.
        InPlace => "in place",
        /// Elsewhere, from a copy.
        ByCopy => "by copy",
    }
}

impl Making {
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
    fn both(&self) -> f64 {
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

/// All rounds of one way to make a region huge.
struct Case {
    course: Course,
    making: Making,
    rounds: Vec<Round>,
}

impl Case {
    fn all() -> Vec<Self> {
        let case = |course| Making::ALL.map(|making| Self { course, making, rounds: Vec::new() });
        Course::ALL.into_iter().flat_map(case).collect()
    }

    fn sum(&self, of: fn(&Outcome) -> u64) -> u64 {
        self.rounds.iter().map(|round| of(&round.outcome)).sum()
    }
}

/// Fails if a byte was wrong, or a transfer failed.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if report.is_skipped("suspend", ring::missing()) {
        return Ok(());
    }
    let (mut cases, mut moved, mut trimmed) = (Case::all(), Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        for case in &mut cases {
            case.rounds.push(under_a_stream(case.course, case.making)?);
        }
        moved.extend(migrated()?);
        trimmed.push(trimmed_half()?);
    }
    cases.iter().for_each(|case| enter(report, case));
    enter_changes(report, "migrate", &moved);
    enter_changes(report, "trim", &trimmed);
    let sum = |of: fn(&Outcome) -> u64| cases.iter().map(|case| case.sum(of)).sum::<u64>();
    match (sum(|outcome| outcome.wrong), sum(|outcome| outcome.failed)) {
        (0, 0) => Ok(()),
        (wrong, failed) => {
            Err(format!("suspend: {wrong} messages wrong, {failed} transfers failed"))
        }
    }
}

/// How often a region is registered and deregistered for one price.
const REPEATS: usize = 5;

/// What registering `range` costs, on a ring of its own that does nothing else.
fn price(range: AddressRange) -> Result<Price, String> {
    let ring = new_ring()?;
    let registrar = registrar_of(&ring, 16).map_err(text)?;
    let (mut registering, mut deregistering) = (Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        let begun = Instant::now();
        // SAFETY: no transfer uses it.
        let index = unsafe { registrar.register(range, Access::READ_WRITE) };
        let index = index.map_err(text)?;
        let registered = begun.elapsed();
        // SAFETY: registered above, and in no use.
        unsafe { registrar.deregister(index, range) }.map_err(text)?;
        registering.push(microseconds(registered));
        deregistering.push(microseconds(begun.elapsed() - registered));
    }
    let middle = |times: Vec<f64>| median(times.into_iter()).unwrap_or(f64::NAN);
    Ok(Price { register: middle(registering), deregister: middle(deregistering) })
}

/// Mapped memory, each page of it there and small.
fn region() -> Result<Memory, String> {
    let region = Memory::new(BYTES, Pages::Written)?;
    region.allow_huge_pages();
    Ok(region)
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn new_ring() -> Result<IoUring, String> {
    IoUring::new(8).map_err(|error| format!("no io_uring: {error}"))
}

/// A ring and a cache over it that takes the region as one registration.
fn rings() -> Result<(IoUring, RingCache), String> {
    let ring = new_ring()?;
    let config = Config { piece_bytes: BYTES, ..Config::keeping_all() };
    let cache = cache_over(&ring, 1024, userfaultfd()?, config)?;
    Ok((ring, cache))
}

/// Longer than anything here takes, on a machine that others use too.
fn terms() -> SuspensionTerms {
    SuspensionTerms { deadline: Duration::from_secs(10), ..SuspensionTerms::default() }
}

/// How long the stream goes on before and after.
const CALM: Duration = Duration::from_millis(20);

fn under_a_stream(course: Course, making: Making) -> Result<Round, String> {
    let region = region()?;
    let before = price(region.range())?;
    let (ring, cache) = rings()?;
    let signals = Signals::default();
    let mut stream = Stream {
        ring,
        cache: &cache,
        range: region.range(),
        channel: std::io::pipe().map_err(text)?,
        expected: region.contents(),
        signals: &signals,
        outcome: Outcome::default(),
        last: None,
    };
    let (done, suspended) = std::thread::scope(|scope| {
        let streaming = scope.spawn(|| stream.run());
        std::thread::sleep(CALM);
        // Relaxed: flags that publish nothing.
        signals.turns.fetch_add(1, Ordering::Relaxed);
        let done = make_huge(&cache, &region, course, making);
        signals.turns.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(CALM);
        signals.stop.store(true, Ordering::Relaxed);
        streaming.join().map_err(|_| "the stream's thread panicked".to_owned())?;
        done
    })?;
    let mut outcome = stream.outcome;
    if stream.expected != region.contents() {
        outcome.wrong += 1;
    }
    drop(cache);
    Ok(Round { before, after: price(region.range())?, done, suspended, outcome })
}

fn make_huge(
    cache: &RingCache,
    region: &Memory,
    course: Course,
    making: Making,
) -> Result<(Defragmented, Duration), String> {
    let range = region.range();
    let leases = match course {
        Course::StepsBesideLease => region.leases(cache, Access::READ_WRITE)?,
        Course::Steps | Course::AtOnce => Vec::new(),
    };
    if course == Course::AtOnce {
        let suspended = cache.suspend(range, Vec::new(), leases, terms());
        let suspended = suspended.map_err(text)?;
        let done = defragment(&suspended, making.way()).map_err(text)?;
        let resumed = suspended.resume().map_err(text)?;
        return Ok((done, resumed.paused));
    }
    let done = defragment_in_steps(cache, range, &[], leases, terms(), making.way());
    done.map(|done| (done.defragmented, done.longest)).map_err(text)
}

/// Where there is one node, the region is there already; what is measured then is the look.
fn migrated() -> Result<Option<Change>, String> {
    let region = region()?;
    let before = price(region.range())?;
    let (_ring, cache) = rings()?;
    let suspended = cache.suspend(region.range(), Vec::new(), Vec::new(), terms());
    let suspended = suspended.map_err(text)?;
    let known = migrate(&suspended, Node(u32::MAX));
    let Err(RearrangeError::NoSuchNode { nodes, .. }) = known else { return Ok(None) };
    // The last, so that the region moves where there is somewhere to go.
    let Some(&node) = nodes.last() else { return Ok(None) };
    let moved = migrate(&suspended, node).map_err(text)?;
    suspended.resume().map_err(text)?;
    let there = |it: &OnNodes| it.pages.get(&node).copied().unwrap_or(0);
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
fn trimmed_half() -> Result<Change, String> {
    let region = region()?;
    let before = price(region.range())?;
    let (_ring, cache) = rings()?;
    let suspended = cache.suspend(region.range(), Vec::new(), Vec::new(), terms());
    let suspended = suspended.map_err(text)?;
    let half = BYTES / 2;
    let part = |offset| AddressRange::new(region.range().start() + offset, half);
    let (lower, upper) = (part(0), part(half).map_err(text)?);
    // SAFETY: see the file's header.
    let trimmed = unsafe { trim(&suspended, upper) }.map_err(text)?;
    suspended.resume().map_err(text)?;
    let Trimmed { given_up, elapsed, .. } = trimmed;
    let resident = |pages: Option<ResidentPages>| pages.map(|pages| pages.resident);
    let params = json!({
        "bytes": BYTES,
        "given_up": given_up,
        "resident_before": resident(trimmed.before),
        "resident_after": resident(trimmed.after),
    });
    let after = price(lower.map_err(text)?)?;
    Ok(Change { before, after, elapsed: microseconds(elapsed), params })
}

/// What the regions of a case cost, before and behind, and how long the stream paused.
fn enter(report: &mut Report, case: &Case) {
    let each = |of: fn(&Round) -> f64| case.rounds.iter().map(of).collect::<Vec<f64>>();
    let mut add = |peer, of, comparison| {
        report.add_against(peer, "suspend", params_of(case, of), "us", comparison);
    };
    let mut add_prices = |of, price: fn(&Price) -> f64| {
        let prices = |side: fn(&Round) -> &Price| {
            case.rounds.iter().map(|round| price(side(round))).collect::<Vec<f64>>()
        };
        let comparison = Comparison::of_rounds(prices(|it| &it.after), prices(|it| &it.before));
        add("small pages", of, comparison);
    };
    add_prices("register", |price| price.register);
    add_prices("deregister", |price| price.deregister);
    add_prices("register and deregister", Price::both);
    let register = || each(|round| round.before.register);
    let pause = |round: &Round| microseconds(round.outcome.pause);
    add("register", "stream's pause", Comparison::of_rounds(each(pause), register()));
    add("register", "stream's pause, worst", worst(&case.rounds, pause));
    let calm = each(|round| microseconds(round.outcome.calm));
    add("register", "stream's pause, calm", Comparison::of_rounds(calm, register()));
    let suspended = each(|round| microseconds(round.suspended));
    add("", "longest suspension", Comparison::of_rounds(suspended, Vec::new()));
    let elapsed = each(|round| microseconds(round.done.elapsed));
    add("", "all of it", Comparison::of_rounds(elapsed, Vec::new()));
}

/// The round with the longest pause, in registrations of the same round.
fn worst(rounds: &[Round], pause: fn(&Round) -> f64) -> Comparison {
    let all = rounds.iter().map(|round| (pause(round), round.before.register));
    let worst = all.max_by(|(one, by), (other, than)| (one / by).total_cmp(&(other / than)));
    let (pause, register) = worst.unwrap_or((f64::NAN, f64::NAN));
    Comparison::of(pause, Some(register))
}

fn params_of(case: &Case, of: &str) -> Value {
    json!({
        "of": of,
        "bytes": BYTES,
        "pages": case.making.name(),
        "course": case.course.name(),
        "message_bytes": MESSAGE,
        "transfers": case.sum(|outcome| outcome.transfers),
        "failed": case.sum(|outcome| outcome.failed),
        "wrong": case.sum(|outcome| outcome.wrong),
        "left_small": case.rounds.iter().map(|round| round.done.left.len()).sum::<usize>(),
    })
}

/// How long changes took, and what registering and deregistering what is needed costs then.
fn enter_changes(report: &mut Report, name: &'static str, changes: &[Change]) {
    let Some(first) = changes.first() else { return };
    let each = |of: fn(&Change) -> f64| changes.iter().map(of).collect::<Vec<f64>>();
    let params = |of: &str| {
        let mut params = first.params.clone();
        params["of"] = of.into();
        params
    };
    let elapsed = Comparison::of_rounds(each(|change| change.elapsed), Vec::new());
    report.add_against("", name, params("all of it"), "us", elapsed);
    let (after, before) = (each(|it| it.after.both()), each(|it| it.before.both()));
    let prices = Comparison::of_rounds(after, before);
    report.add_against("before", name, params("register and deregister"), "us", prices);
}
