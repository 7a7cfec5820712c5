//! What changes of memory that is not cached cost a hit: many at once, and a steady stream.

use crate::Options;
use crate::machine;
use crate::null::{self, NullCache, NullDevice};
use crate::report::Report;
use crate::rounds::{compare, nanoseconds, nanoseconds_each};
use crate::workload::{LENGTH, addresses, random_order, range};
use pinfold::monitor::{Ebpf, Feed, NoMonitor, Userfaultfd, WithFeed};
use pinfold::{AddressRange, Cache, Config, Monitor};
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::trial::{LonePage, TrialArea};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const REGIONS: usize = 1_000;
/// Changes at once.
const BURST: usize = 10_000;
/// Time between two changes of the stream: 100,000 a second.
const PERIOD: Duration = Duration::from_micros(10);
/// Accesses in a round.
const ACCESSES: usize = 200_000;

/// The burst, then the stream.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let cached = addresses(REGIONS, 2 * LENGTH as u64);
    let gaps = gaps(&cached)?;
    let cache = null::unlimited()?;
    null::get_put(&cache, &cached, LENGTH)?;
    burst(options, report, &cache, &cached, &gaps)?;
    streams(options, report, &gaps)?;
    match cache.statistics().invalidations {
        0 => Ok(()),
        count => Err(format!("changes of other memory took {count} regions")),
    }
}

/// The uncached memory between the cached: the nearest that a change can come.
fn gaps(cached: &[u64]) -> Result<Vec<AddressRange>, String> {
    cached.iter().map(|address| range(address + LENGTH as u64)).collect()
}

/// The first hit behind many changes, with no other thread to apply them.
fn burst(
    options: Options,
    report: &mut Report,
    cache: &NullCache,
    cached: &[u64],
    gaps: &[AddressRange],
) -> Result<(), String> {
    let mut first_hit = |_| {
        // What is left of the last burst, which a hit applies in part.
        cache.check().map_err(|error| error.to_string())?;
        cache.monitor().log(gaps.iter().copied().cycle().take(BURST));
        nanoseconds_each(1, || null::get_put(cache, &cached[..1], LENGTH))
    };
    let comparison = compare(options.rounds, &mut first_hit, None)?.in_units_of(1e6);
    let params = json!({"what": "first hit", "events": BURST, "regions": REGIONS});
    report.add("events", params, "ms", comparison);
    Ok(())
}

/// Hits while another thread's changes go by, and without them, by each monitor.
fn streams(options: Options, report: &mut Report, gaps: &[AddressRange]) -> Result<(), String> {
    let cached = addresses(REGIONS, 2 * LENGTH as u64);
    let order = random_order(&cached, options.scaled(ACCESSES), &mut options.random());
    let load = null::unlimited()?;
    null::get_put(&load, &cached, LENGTH)?;
    let change = |turn: usize| {
        load.monitor().log(std::iter::once(gaps[turn % gaps.len()]));
        load.monitor().notify();
    };
    let hits = || null::get_put(&load, &order, LENGTH);
    stream(options, report, &load, &Stream { name: "one load", hits: &hits, change: &change })?;
    feed(options, report, &cached, &order, gaps)?;
    ebpf(options, report)?;
    userfaultfd(options, report)
}

/// Changes that an allocator tells.
fn feed(
    options: Options,
    report: &mut Report,
    cached: &[u64],
    order: &[u64],
    gaps: &[AddressRange],
) -> Result<(), String> {
    static FEED: Feed = Feed::new();
    let none = NoMonitor::new().map_err(|error| error.to_string())?;
    let cache = null::over(WithFeed::new(none, &FEED), Config::keeping_all());
    let cache = cache.map_err(|error| error.to_string())?;
    null::get_put_vouched(&cache, cached, LENGTH)?;
    let change = |turn: usize| drop(FEED.begin(gaps[turn % gaps.len()]));
    let hits = || null::get_put_vouched(&cache, order, LENGTH);
    stream(
        options,
        report,
        &cache,
        &Stream { name: "none, with feed", hits: &hits, change: &change },
    )
}

/// Memory of which every other piece is cached, and an order to hit those in.
struct Alternating {
    cached: Vec<u64>,
    gaps: Vec<AddressRange>,
    order: Vec<u64>,
    memory: TrialArea,
}

impl Alternating {
    fn new(options: Options) -> Result<Self, String> {
        let memory = TrialArea::untouched((2 * REGIONS + 1) * LENGTH / page_bytes());
        let memory = memory.map_err(|errno| machine::failed("mmap", errno))?;
        let range = memory.range().ok_or("no memory")?;
        let first = (range.start() as u64).next_multiple_of(LENGTH as u64);
        let cached: Vec<u64> = (first..).step_by(2 * LENGTH).take(REGIONS).collect();
        let gaps = gaps(&cached)?;
        let order = random_order(&cached, options.scaled(ACCESSES) / 10, &mut options.random());
        Ok(Self { cached, gaps, order, memory })
    }

    /// Takes a page between two cached pieces away.
    fn discard(&self, turn: usize) {
        let gap = self.gaps[turn % self.gaps.len()];
        if let Ok(page) = AddressRange::new(gap.start(), page_bytes()) {
            let _ = self.memory.discard(page);
        }
    }
}

fn userfaultfd(options: Options, report: &mut Report) -> Result<(), String> {
    let monitor = match Userfaultfd::new() {
        Ok(monitor) => Arc::new(monitor),
        Err(error) => {
            report.remark(&format!("skipped: userfaultfd: {error}"));
            return Ok(());
        }
    };
    let memory = Alternating::new(options)?;
    let feed = WithFeed::new(Arc::clone(&monitor), Feed::of_process());
    told_by_kernel(
        options,
        report,
        monitor,
        &memory,
        ["userfaultfd", "userfaultfd, changes of unwatched memory"],
    )?;
    let cache = null::over(feed, Config::keeping_all()).map_err(|error| error.to_string())?;
    null::get_put(&cache, &memory.cached, LENGTH)?;
    let hits = || null::get_put(&cache, &memory.order, LENGTH);
    let change =
        |turn: usize| drop(Feed::of_process().begin(memory.gaps[turn % memory.gaps.len()]));
    let name = "userfaultfd with feed, changes told";
    stream(options, report, &cache, &Stream { name, hits: &hits, change: &change })
}

fn ebpf(options: Options, report: &mut Report) -> Result<(), String> {
    match Ebpf::shared() {
        Ok(monitor) => told_by_kernel(
            options,
            report,
            monitor,
            &Alternating::new(options)?,
            ["ebpf", "ebpf, changes of unwatched memory"],
        ),
        Err(error) => {
            report.remark(&format!("skipped: ebpf: {error}"));
            Ok(())
        }
    }
}

/// Changes that the kernel reports: discards of watched memory next to the cached. And of memory that
/// is not watched, which it does not report.
fn told_by_kernel<M: Monitor>(
    options: Options,
    report: &mut Report,
    monitor: M,
    memory: &Alternating,
    [beside, unwatched]: [&'static str; 2],
) -> Result<(), String> {
    let cache = null::over(monitor, Config::keeping_all()).map_err(|error| error.to_string())?;
    null::get_put(&cache, &memory.cached, LENGTH)?;
    let hits = || null::get_put(&cache, &memory.order, LENGTH);
    let change = |turn: usize| memory.discard(turn);
    stream(options, report, &cache, &Stream { name: beside, hits: &hits, change: &change })?;
    // A mapping of its own, which no monitor was told to watch.
    let elsewhere = LonePage::new().map_err(|errno| machine::failed("mmap", errno))?;
    let change = |_: usize| _ = elsewhere.discard();
    stream(options, report, &cache, &Stream { name: unwatched, hits: &hits, change: &change })
}

/// One monitor's hits and changes.
struct Stream<'s> {
    name: &'static str,
    /// A round of hits.
    hits: &'s dyn Fn() -> Result<(), String>,
    /// Makes the change of this number.
    change: &'s (dyn Fn(usize) + Sync),
}

/// How long hits go on in one round, at least: long enough for a thousand changes.
const ROUND: Duration = Duration::from_millis(10);

fn stream<M: Monitor>(
    options: Options,
    report: &mut Report,
    cache: &Cache<NullDevice, M>,
    of: &Stream<'_>,
) -> Result<(), String> {
    let steadily = || round_of_hits(cache, options.window(ROUND), of.hits);
    // Once before memory is looked at: the C library keeps an ended thread's stack for the next.
    while_changing(of.change, steadily).0?;
    let memory = machine::memory_used();
    let before = cache.statistics();
    let (mut made, mut busy) = (0, Duration::ZERO);
    let mut changing = |_| {
        let began = Instant::now();
        let (ours, changes) = while_changing(of.change, steadily);
        made += changes;
        busy += began.elapsed();
        ours
    };
    let comparison = compare(options.rounds, &mut changing, Some(&mut |_| steadily()))?;
    let grown = memory.and_then(|before| Ok(machine::memory_used()? - before)).unwrap_or_default();
    let params = json!({
        "what": "steady hits", "monitor": of.name, "regions": REGIONS, "seed": options.seed,
        "changes_per_s": (made as f64 / busy.as_secs_f64()).round(), "grown_bytes": grown,
        // A change of other memory takes a region only if the monitor could not tell which.
        "regions_taken": cache.statistics().invalidations - before.invalidations,
    });
    report.add_against("no events", "events", params, "ns", comparison);
    Ok(())
}

/// The nanoseconds of a hit, over rounds for as long as `window`.
fn round_of_hits<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    window: Duration,
    hits: &dyn Fn() -> Result<(), String>,
) -> Result<f64, String> {
    let (began, before) = (Instant::now(), cache.statistics().gets);
    loop {
        hits()?;
        let took = began.elapsed();
        if took >= window {
            return Ok(nanoseconds(took) / (cache.statistics().gets - before) as f64);
        }
    }
}

/// Runs `work` while another thread makes changes; how many.
fn while_changing<T>(change: &(dyn Fn(usize) + Sync), work: impl FnOnce() -> T) -> (T, usize) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let changer = scope.spawn(|| change_until(change, &over));
        let result = work();
        // Relaxed: the thread is joined below.
        over.store(true, Ordering::Relaxed);
        (result, changer.join().unwrap_or_default())
    })
}

/// A change every [`PERIOD`]. Those that came late are made up for, one after the other.
fn change_until(change: &(dyn Fn(usize) + Sync), over: &AtomicBool) -> usize {
    let mut due = Instant::now();
    for turn in 0.. {
        // Relaxed: a change more or less.
        if over.load(Ordering::Relaxed) {
            return turn;
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        due += PERIOD;
        change(turn);
    }
    0
}
