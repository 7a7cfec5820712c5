//! Every way for a transfer to reach memory, at every length, compared with the one that the library chooses.
//!
//! Three situations. *Hot*: one buffer is sent over and over. *Cold*: each buffer is sent once; its pages are
//! there and the process has mapped it, but it was never registered, and releasing the registrations
//! is part of the turn, because they will not be used again, and so is unmapping, in which a monitor
//! has a hand. *Untouched*: as cold, and the pages are not there either, which no advice asks about. Cold
//! buffers of a turn lie next to each other in one new mapping.
//!
//! The device is a ring that writes into a pipe: what it adds to a short transfer is as little as can be, so
//! that what the ways differ in shows.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to say of its mover that what it reports has ended.

#![allow(unsafe_code)]

use super::Bench;
use crate::block::{Block, Origin};
use crate::device::{Device, Handle, Kind, Transfer};
use crate::medians::{median, times_faster};
use crate::output::{self, Failure, Output};
use crate::plot::{Axis, Line, Plot};
use crate::port::{AnyMonitor, PortRegistrar};
use crate::strategy::{Cached, Copying, Message, Uncached, Wire, monitor};
use pinfold::limits::Limits;
use pinfold::listed;
use pinfold::pieces::{self, Completion, Mover, Request};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::strategy::{Advice, Coverage, Excluded, Means};
use pinfold::strategy::{
    Costs, Direction, Question, Reuse, Strategy, TransferPlanner, Uses, measure,
};
use pinfold::{Cache, Config, Monitor, Uncovered};
use serde::Serialize;
use serde_json::json;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// From 4 KiB to 256 MiB.
const LENGTHS: [usize; 9] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];

/// How much a contender sends in one turn, in bytes, unless one message is longer.
const TURN: usize = 8 << 20;

/// How many buffers a cold turn has at most: registrations must not run into the table's end.
const BUFFERS: usize = 512;

/// How much the planner may copy through, in bytes.
const POOL: usize = 64 << 20;

/// Up to which length ways are timed before the planner is made; beyond, lines go on.
const MEASURED: usize = 64 << 20;

/// How many buffers' worth of memory the contenders pin together, at most.
const PINNED: usize = 6;

listed! {
    /// What is known of the buffers that are sent.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(super) enum Situation {
        Hot => "hot",
        Cold => "cold",
        Untouched => "untouched",
    }
}

impl Situation {
    const fn reuse(self) -> Reuse {
        match self {
            Self::Hot => Reuse::Often,
            Self::Cold | Self::Untouched => Reuse::Once,
        }
    }
}

/// The ways that compete and are not chosen among: what the choice is compared with.
const WAYS: [&str; 4] = [CACHED, COPY, PER_USE, "pieces"];
const CACHED: &str = "cached";
const COPY: &str = "copy";
const PER_USE: &str = "per_use";
/// The planner, which knows how often the memory will be used.
const CHOSEN: &str = "chosen";
/// The planner, which knows nothing of that.
const UNTOLD: &str = "chosen_untold";

/// A cache with a device of its own, and a pool on it.
struct Station {
    device: Device,
    cache: Cache<PortRegistrar, AnyMonitor>,
    pool: Pool<PortRegistrar>,
}

impl Station {
    fn new(wire: Wire, budget: usize) -> Result<Self, Failure> {
        let monitor = monitor(Kind::IoUring)?;
        let (device, registrar) = wire.into_parts();
        let config = Config { max_bytes: budget, ..Config::keeping_all() };
        let cache = pinfold::cache(Arc::clone(&registrar), monitor, config)
            .map_err(Failure::unavailable)?;
        let config = PoolConfig { max_bytes: POOL, ..PoolConfig::default() };
        let pool = Pool::new(registrar, config).map_err(Failure::unavailable)?;
        Ok(Self { device, cache, pool })
    }

    fn mover(&self) -> Sender<'_> {
        Sender { device: &self.device, end: 0, done: Vec::new() }
    }
}

/// Moves parts into the channel, one behind the other; each is there when it has begun.
struct Sender<'d> {
    device: &'d Device,
    end: u64,
    done: Vec<usize>,
}

// SAFETY: what `send` moves has been moved when it returns.
unsafe impl Mover<Handle> for Sender<'_> {
    type Error = io::Error;

    unsafe fn begin(&mut self, request: Request<Handle>) -> io::Result<()> {
        // A measurement sends one transfer after the other through one mover.
        let offset = if request.number == 0 { 0 } else { self.end };
        let (address, length) = (request.range.start(), request.range.len());
        self.device.send(&[Transfer { key: request.handle.key(), address, length, offset }])?;
        self.end = offset + length as u64;
        self.done.push(request.number);
        Ok(())
    }

    fn complete(&mut self) -> io::Result<Completion<io::Error>> {
        let number = self.done.pop().ok_or(io::ErrorKind::NotFound)?;
        Ok(Completion { number, outcome: Ok(()) })
    }
}

/// One that sends messages, and gives back what it has registered.
trait Contender {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure>;

    fn give_back(&mut self);

    /// Which way the last message went, where there is a choice.
    fn way(&self) -> Option<Strategy> {
        None
    }
}

impl Contender for Cached {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure> {
        crate::strategy::Strategy::send(self, &[message])
    }

    fn give_back(&mut self) {
        self.evict();
    }
}

impl Contender for Copying {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure> {
        crate::strategy::Strategy::send(self, &[message])
    }

    fn give_back(&mut self) {}
}

impl Contender for Uncached {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure> {
        crate::strategy::Strategy::send(self, &[message])
    }

    fn give_back(&mut self) {}
}

/// Pieces that move while others are registered.
struct InPieces {
    station: Station,
    options: pieces::Options,
}

impl Contender for InPieces {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure> {
        let Self { station, options } = self;
        let sent = message.in_pieces(&station.cache, options, &mut station.mover());
        sent.map_err(Failure::unavailable)
    }

    fn give_back(&mut self) {
        self.station.cache.evict_idle();
    }
}

/// The library's choice.
struct Chosen<'s> {
    station: &'s Station,
    planner: TransferPlanner<'s, PortRegistrar, AnyMonitor>,
    mover: Sender<'s>,
    reuse: Reuse,
    way: Option<Strategy>,
}

impl<'s> Chosen<'s> {
    fn new(station: &'s Station, costs: Costs, reuse: Reuse) -> Self {
        // SAFETY: both are over one registrar.
        let planner =
            unsafe { TransferPlanner::new(&station.cache, costs).with_pool(&station.pool) };
        Self { station, planner, mover: station.mover(), reuse, way: None }
    }
}

impl Contender for Chosen<'_> {
    fn send(&mut self, message: Message<'_>) -> Result<(), Failure> {
        let way = message.through(&self.planner, self.reuse, &mut self.mover);
        self.way = Some(way.map_err(Failure::unavailable)?);
        Ok(())
    }

    fn give_back(&mut self) {
        self.station.cache.evict_idle();
    }

    fn way(&self) -> Option<Strategy> {
        self.way
    }
}

/// How fast one contender was.
#[derive(Debug)]
struct Speed {
    name: &'static str,
    gib_per_s: f64,
    /// The median of the rounds' ratios to the best of [`WAYS`]: above 1 is faster than that.
    over_best: f64,
    way: Option<Strategy>,
}

/// All contenders at one length.
#[derive(Debug)]
pub(super) struct Outcome {
    situation: Situation,
    bytes: usize,
    best: &'static str,
    speeds: Vec<Speed>,
}

/// The lengths to measure, up to `longest` and to what this process may pin; says which were left out.
pub(super) fn lengths(longest: usize, output: &Output) -> Vec<usize> {
    let room = Limits::read().enforced().bytes().unwrap_or(u64::MAX);
    let wanted = LENGTHS.into_iter().filter(|&bytes| bytes <= longest);
    let (fit, left_out): (Vec<_>, Vec<_>) = wanted.partition(|&bytes| fits(bytes, room));
    for bytes in left_out {
        output.note(format_args!(
            "messages of {} are left out: {PINNED} contenders pin one each, and {room} bytes may be \
             pinned (RLIMIT_MEMLOCK)",
            size(bytes)
        ));
    }
    fit
}

const fn fits(bytes: usize, room: u64) -> bool {
    (bytes * PINNED) as u64 <= room
}

/// How often [`measure_all`] calls `advance`.
pub(super) fn steps(rounds: u32, lengths: &[usize]) -> u64 {
    let each = lengths.iter().map(|&bytes| u64::from(rounds_of(bytes, rounds)));
    each.sum::<u64>() * Situation::ALL.len() as u64
}

/// Long messages take long, and vary little.
fn rounds_of(bytes: usize, rounds: u32) -> u32 {
    if bytes < 16 << 20 { rounds } else { rounds.min(11) }
}

/// Times each way as the library does at start-up, writes that down, then lets the planner decide by it, next to
/// all others.
pub(super) fn measure_all(
    rounds: u32,
    longest: usize,
    lengths: &[usize],
    output: &Output,
    advance: &dyn Fn(),
) -> Result<Vec<Outcome>, Failure> {
    let costs = measure_costs(longest.min(MEASURED), output)?;
    let mut outcomes = Vec::new();
    for &bytes in lengths {
        for situation in Situation::ALL {
            let rounds = rounds_of(bytes, rounds);
            outcomes.push(Case { situation, bytes }.measure(&costs, rounds, advance)?);
        }
    }
    Ok(outcomes)
}

fn measure_costs(longest: usize, output: &Output) -> Result<Costs, Failure> {
    let station = Station::new(Wire::discarding()?, 2 * MEASURED)?;
    let (pool, mut mover) = (Some(&station.pool), station.mover());
    // SAFETY: both are over one registrar.
    let costs = unsafe { measure(&station.cache, pool, &mut mover, longest) };
    let costs = costs.map_err(Failure::unavailable)?;
    let file = Costs::default_file(&stored_name(station.cache.monitor().name()));
    // A short look must not take the place of a long one.
    if let Some(file) = file.filter(|_| longest >= MEASURED) {
        match costs.store(&file) {
            Ok(()) => output.note(format_args!(
                "{}: what each way costs here, by a few rounds; other programs make them noisy, so \
                 repeat it on a quiet machine",
                file.display()
            )),
            Err(error) => output.note(error),
        }
    }
    Ok(costs)
}

fn stored_name(monitor: &str) -> String {
    Costs::name(Kind::IoUring.name(), monitor)
}

struct Case {
    situation: Situation,
    bytes: usize,
}

/// A contender with its seconds for each round.
struct Runner<'c> {
    name: &'static str,
    contender: Box<dyn Contender + 'c>,
    seconds: Vec<f64>,
}

impl<'c> Runner<'c> {
    fn new(name: &'static str, contender: impl Contender + 'c) -> Self {
        Self { name, contender: Box::new(contender), seconds: Vec::new() }
    }
}

impl Case {
    /// How many messages a turn has.
    fn messages(&self) -> usize {
        let count = (TURN / self.bytes).max(1);
        if self.situation == Situation::Hot { count } else { count.min(BUFFERS) }
    }

    fn measure(&self, costs: &Costs, rounds: u32, advance: &dyn Fn()) -> Result<Outcome, Failure> {
        // One message at a time, and what is cold needs room until it is given back.
        let budget = 2 * self.bytes.max(TURN) + (8 << 20);
        let wire = Wire::discarding;
        let stations = [Station::new(wire()?, budget)?, Station::new(wire()?, budget)?];
        let (bounce, options) = (block(self.bytes, true)?, pieces::Options::for_transfer());
        let mut runners = vec![
            Runner::new(WAYS[0], Cached::new(wire()?, budget)?),
            Runner::new(WAYS[1], Copying::new(wire()?, bounce)?),
            Runner::new(WAYS[2], Uncached::new(wire()?)),
            Runner::new(WAYS[3], InPieces { station: Station::new(wire()?, budget)?, options }),
            Runner::new(CHOSEN, Chosen::new(&stations[0], *costs, self.situation.reuse())),
            Runner::new(UNTOLD, Chosen::new(&stations[1], *costs, Reuse::Unknown)),
        ];
        let (hot, count) = (self.warm(&mut runners)?, runners.len());
        for round in 0..rounds as usize {
            let (late, early) = runners.split_at_mut(round % count);
            for runner in early.iter_mut().chain(late) {
                let seconds = self.turn(hot.as_ref(), &mut *runner.contender)?;
                runner.seconds.push(seconds);
            }
            advance();
        }
        Ok(self.outcome(&runners))
    }

    /// The hot buffer, which every runner has sent so often that nothing is new about it any more.
    fn warm(&self, runners: &mut [Runner<'_>]) -> Result<Option<Block>, Failure> {
        let often = if self.bytes > 1 << 20 { 3 } else { 100 };
        let hot =
            (self.situation == Situation::Hot).then(|| block(self.bytes, true)).transpose()?;
        for runner in runners {
            match &hot {
                Some(block) => (0..often).try_for_each(|_| {
                    runner.contender.send(Message { block, offset: 0, length: self.bytes })
                })?,
                None => {
                    self.turn(None, &mut *runner.contender)?;
                }
            }
        }
        Ok(hot)
    }

    /// Seconds for one turn.
    fn turn(&self, hot: Option<&Block>, contender: &mut dyn Contender) -> Result<f64, Failure> {
        let (length, count) = (self.bytes, self.messages());
        if let Some(block) = hot {
            let began = Instant::now();
            for _ in 0..count {
                contender.send(Message { block, offset: 0, length })?;
            }
            return Ok(began.elapsed().as_secs_f64());
        }
        let block = block(length * count, self.situation == Situation::Cold)?;
        let began = Instant::now();
        for number in 0..count {
            contender.send(Message { block: &block, offset: number * length, length })?;
        }
        contender.give_back();
        drop(block);
        Ok(began.elapsed().as_secs_f64())
    }

    fn outcome(&self, runners: &[Runner<'_>]) -> Outcome {
        let middle = |runner: &Runner<'_>| median(runner.seconds.clone());
        let fastest = |best: usize, at: usize| {
            if middle(&runners[at]) < middle(&runners[best]) { at } else { best }
        };
        let best = &runners[(0..WAYS.len()).fold(0, fastest)];
        let sent = gib(self.bytes * self.messages());
        let speed = |runner: &Runner<'_>| Speed {
            name: runner.name,
            gib_per_s: sent / middle(runner),
            over_best: times_faster(&runner.seconds, &best.seconds),
            way: runner.contender.way(),
        };
        Outcome {
            situation: self.situation,
            bytes: self.bytes,
            best: best.name,
            speeds: runners.iter().map(speed).collect(),
        }
    }
}

/// New memory, with pages that hold something or without any.
fn block(bytes: usize, filled: bool) -> Result<Block, Failure> {
    let mut block = Block::new(Origin::Mapping, bytes).map_err(Failure::unavailable)?;
    if filled {
        for page in (0..bytes).step_by(4096) {
            block.write(page, &[0x5a; 4096]);
        }
    }
    Ok(block)
}

#[allow(clippy::cast_precision_loss)] // a throughput of three digits
fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

impl Outcome {
    fn speed(&self, name: &str) -> Option<&Speed> {
        self.speeds.iter().find(|speed| speed.name == name)
    }

    /// The rows of a report.
    pub(super) fn rows(&self) -> Vec<Bench> {
        let (bytes, reuse, best) = (self.bytes, self.situation.name(), self.best);
        let way = |speed: &Speed| speed.way.map(|way| way.to_string());
        let figures = self.speeds.iter().map(|speed| Bench {
            name: "strategies",
            params: json!({ "bytes": bytes, "reuse": reuse, "strategy": speed.name }),
            value: speed.gib_per_s,
            unit: "GiB/s",
            ratio: Some(speed.over_best),
        });
        let chosen = [(CHOSEN, "chosen_over_best"), (UNTOLD, "chosen_untold_over_best")];
        let ratios = chosen.into_iter().filter_map(|(contender, name)| {
            let speed = self.speed(contender)?;
            Some(Bench {
                name,
                params: json!({
                    "bytes": bytes, "reuse": reuse, "chosen": way(speed), "best": best,
                }),
                value: speed.over_best,
                unit: "ratio",
                ratio: None,
            })
        });
        figures.chain(ratios).collect()
    }
}

/// The table for people: throughputs, and how the choice compares with the best.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let heads = [
        "bytes",
        "reuse",
        "cached",
        "copy",
        "per use",
        "pieces",
        "chosen",
        "by",
        "of best",
        "told nothing",
    ];
    let mut table = output::table(&heads);
    for outcome in outcomes {
        let figure = |name| outcome.speed(name).map_or(String::new(), Speed::figure);
        let ratio = |name| outcome.speed(name).map_or(String::new(), Speed::ratio);
        let by = outcome.speed(CHOSEN).and_then(|speed| speed.way);
        let mut row = vec![size(outcome.bytes), outcome.situation.name().into()];
        row.extend(WAYS.map(figure));
        row.extend([
            figure(CHOSEN),
            by.map_or(String::new(), |way| way.to_string()),
            ratio(CHOSEN),
            ratio(UNTOLD),
        ]);
        table.add_row(row);
    }
    format!("GiB/s; 1 in the last columns is as good as the best way\n{table}")
}

impl Speed {
    fn figure(&self) -> String {
        format!("{:.2}", self.gib_per_s)
    }

    fn ratio(&self) -> String {
        format!("{:.3}", self.over_best)
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        ..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// A line for each way and the choice, hot and cold.
#[allow(clippy::cast_precision_loss)] // drawn
pub(super) fn plot(outcomes: &[Outcome]) -> Plot {
    let line = |situation: Situation, name: &'static str| Line {
        name: format!("{name}, {}", situation.name()),
        points: outcomes
            .iter()
            .filter(|outcome| outcome.situation == situation)
            .filter_map(|each| Some((each.bytes as f64, each.speed(name)?.gib_per_s)))
            .collect(),
    };
    // Of each situation the ways that may be the best there.
    let hot = [CACHED, COPY, CHOSEN].map(|name| line(Situation::Hot, name));
    let cold = [COPY, PER_USE, CHOSEN].map(|name| line(Situation::Cold, name));
    Plot {
        title: "Ways to send memory, and the one chosen".into(),
        across: Axis { title: "bytes of a message", base: 4.0, label: |value| label(value) },
        up: Axis { title: "GiB/s", base: 2.0, label: |value| format!("{value:.2}") },
        lines: hot.into_iter().chain(cold).collect(),
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an axis in bytes
fn label(bytes: f64) -> String {
    if bytes < 1024.0 { format!("{bytes:.0}") } else { size(bytes as usize) }
}

/// What would be chosen on this machine, for `pinfold probe`.
#[derive(Debug, Serialize)]
pub(crate) struct Known {
    bytes: usize,
    reuse: &'static str,
    strategy: String,
    /// What each use is expected to cost, in microseconds; `null` if nothing was measured here.
    expected_us: Option<f64>,
    /// Every way, and the reasons against those that are not open.
    reasons: Vec<String>,
}

/// The advice for io_uring with `monitor`, by what was written down here, for data that leaves memory which
/// the monitor covers; without a monitor there is none.
pub(crate) fn known(monitor: &str) -> Vec<Known> {
    let costs = Costs::stored(&stored_name(monitor));
    let uses = [(Situation::Hot, Uses::Often), (Situation::Cold, Uses::ONCE)];
    let cases = LENGTHS.into_iter().flat_map(|bytes| uses.map(|uses| (bytes, uses)));
    cases
        .map(|(bytes, (situation, uses))| {
            let overlap = bytes > Config::keeping_all().piece_bytes;
            let means = Means { copy_bytes: POOL, overlap, exchange: false };
            let (direction, coverage) = (Direction::Leaving, coverage_by(monitor));
            let advice = costs.advise(Question { bytes, direction, uses, coverage, means });
            Known {
                bytes,
                reuse: situation.name(),
                strategy: advice.strategy.to_string(),
                expected_us: advice.expected_ns().map(|ns| ns / 1e3),
                reasons: reasons(&advice),
            }
        })
        .collect()
}

fn coverage_by(monitor: &str) -> Coverage {
    match monitor {
        "none" => Coverage::Uncovered(Some(Uncovered::NoMonitor)),
        _ => Coverage::Covered,
    }
}

/// Every way that data which leaves can take.
fn reasons(advice: &Advice) -> Vec<String> {
    let considered = advice.considered.iter();
    let ways = considered.filter(|each| each.excluded != Some(Excluded::Leaving));
    ways.map(ToString::to_string).collect()
}

/// For people: one line for each length, or what to do.
pub(crate) fn known_for_people(known: &[Known]) -> String {
    if known.iter().all(|each| each.expected_us.is_none()) {
        let unmeasured = "strategies: not measured on this machine, so everything is cached that can be: run \
                          `pinfold bench strategies`";
        return output::wrapped(unmeasured, 4) + "\n";
    }
    let mut table = output::table(&["transfer", "used", "by", "us", "because"]);
    for each in known {
        let us = each.expected_us.map_or(String::new(), |us| format!("{us:.2}"));
        let used = if each.reuse == Situation::Hot.name() { "often" } else { "once" };
        let why = each.reasons.join("; ");
        table.add_row(vec![size(each.bytes), used.into(), each.strategy.clone(), us, why]);
    }
    format!("strategies for data that leaves by io_uring:\n{table}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_watched_is_not_said_to_be_kept() {
        let strategies = |monitor| known(monitor).into_iter().map(|each| each.strategy);
        assert!(strategies("none").all(|strategy| strategy != Strategy::Cached.to_string()));
        let reasons: Vec<_> = known("none").into_iter().flat_map(|each| each.reasons).collect();
        assert!(reasons.iter().any(|why| why.contains(&Uncovered::NoMonitor.to_string())));
        assert_eq!(coverage_by("userfaultfd"), Coverage::Covered);
    }

    #[test]
    fn each_round_of_each_length_is_a_step() {
        assert_eq!(steps(41, &[4096, 16 << 20]), 3 * (41 + 11));
        assert_eq!(steps(41, &[]), 0);
        assert!(fits(4096, 6 * 4096) && !fits(4096, 6 * 4096 - 1));
    }
}
