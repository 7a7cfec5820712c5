//! What changes of memory that nobody cached cost a hit: many at once, and a steady stream.

use crate::Options;
use crate::null::{self, NullCache};
use crate::report::Report;
use crate::rounds::{compare, nanoseconds_each};
use crate::workload::{LENGTH, addresses, random_order, range};
use pinfold::{AddressRange, Monitor};
use serde_json::json;
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
    let order = random_order(&cached, options.scaled(ACCESSES), &mut options.random());
    stream(options, report, &cache, &order, &gaps)?;
    match cache.statistics().invalidations {
        0 => Ok(()),
        count => Err(format!("changes of other memory took {count} regions")),
    }
}

/// The uncached memory between the cached: the nearest that a change can come.
fn gaps(cached: &[u64]) -> Result<Vec<AddressRange>, String> {
    cached.iter().map(|address| range(address + LENGTH as u64)).collect()
}

/// The first hit behind many changes, with nobody else to apply them.
fn burst(
    options: Options,
    report: &mut Report,
    cache: &NullCache,
    cached: &[u64],
    gaps: &[AddressRange],
) -> Result<(), String> {
    let mut first_hit = |_| {
        cache.monitor().log(gaps.iter().copied().cycle().take(BURST));
        nanoseconds_each(1, || null::get_put(cache, &cached[..1], LENGTH))
    };
    let comparison = compare(options.rounds, &mut first_hit, None)?.in_units_of(1e6);
    let params = json!({"what": "first hit", "events": BURST, "regions": REGIONS});
    report.add("events", params, "ms", comparison);
    Ok(())
}

/// Hits while another thread's changes go by, and without them.
fn stream(
    options: Options,
    report: &mut Report,
    cache: &NullCache,
    order: &[u64],
    gaps: &[AddressRange],
) -> Result<(), String> {
    let before = cache.statistics().events;
    let mut busy = Duration::ZERO;
    let steadily = || nanoseconds_each(order.len(), || null::get_put(cache, order, LENGTH));
    let mut changing = |_| {
        let began = Instant::now();
        let ours = while_changing(cache, gaps, steadily);
        busy += began.elapsed();
        ours
    };
    let comparison = compare(options.rounds, &mut changing, Some(&mut |_| steadily()))?;
    let events = (cache.statistics().events - before) as f64 / busy.as_secs_f64();
    let params = json!({
        "what": "steady hits", "events_per_s": events.round(), "regions": REGIONS,
        "seed": options.seed,
    });
    report.add_against("no events", "events", params, "ns", comparison);
    Ok(())
}

/// Runs `work` while another thread logs changes and rings, as monitors do.
fn while_changing<T>(cache: &NullCache, gaps: &[AddressRange], work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| change_until(cache, gaps, &over));
        let result = work();
        // Relaxed: the thread is joined at the end of the scope.
        over.store(true, Ordering::Relaxed);
        result
    })
}

/// A change every [`PERIOD`]. Those that came late are made up for, one after the other.
fn change_until(cache: &NullCache, gaps: &[AddressRange], over: &AtomicBool) {
    let mut due = Instant::now();
    for gap in gaps.iter().cycle() {
        // Relaxed: a change more or less.
        if over.load(Ordering::Relaxed) {
            return;
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        due += PERIOD;
        cache.monitor().log(std::iter::once(*gap));
        cache.monitor().ring();
    }
}
