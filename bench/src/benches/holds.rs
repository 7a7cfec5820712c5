//! How long the cache's lock is held at most, whatever stands beside and however much an operation touches.
//!
//! In processor time of the thread that holds it: the machine is shared, and a thread that lost its
//! processor says nothing about the code. A row is run several times, from the filling of the cache to its
//! end. Of each hold, by its place among all, the least time counts, and of these the longest: what interrupts
//! a thread, or faults a page in, does not come at the same place each time.
//! Nothing but `holds` is worth measuring in this build, because every hold asks a clock twice.

use super::scale::{ROWS, Row, apart, cache_of, filled, lease, with_leased};
use crate::Options;
use crate::null::{NullCache, get_once, get_put};
use crate::report::Report;
use crate::rounds::Comparison;
use crate::workload::{LENGTH, elsewhere, range};
use pinfold::suspend::SuspensionTerms;
use pinfold::{AddressRange, WhenFull};
use pinfold_core::holds;
use pinfold_kernel::thread::processor_time;
use serde_json::json;
use std::time::Duration;

/// Nanoseconds that the lock may be held.
const MOST_HELD: u32 = 50_000;

/// How often a row is run.
const TIMES: usize = 3;

/// Something done to `n` of what there is.
struct Whole {
    name: &'static str,
    most: usize,
    run: fn(usize) -> Result<(), String>,
}

const MILLION: usize = 1_000_000;
const LEASES: usize = 100_000;

const WHOLES: [Whole; 15] = [
    Whole { name: "invalidation of regions", most: MILLION, run: invalidate },
    Whole { name: "invalidation of regions, with word", most: MILLION, run: invalidate_then },
    Whole { name: "invalidation of per-use leases", most: LEASES, run: invalidate_per_use },
    Whole { name: "invalidation of callbacks", most: LEASES, run: invalidate_callbacks },
    Whole { name: "reclaim beside leases", most: LEASES, run: reclaim_beside_leases },
    Whole { name: "reclaim of what is leased", most: LEASES, run: reclaim_leased },
    Whole { name: "eviction beside leases", most: LEASES, run: evict_beside_leases },
    Whole { name: "idle eviction of regions", most: MILLION, run: evict_idle },
    Whole { name: "idle eviction of a range of leases", most: LEASES, run: evict_idle_in },
    Whole { name: "suspension of regions", most: MILLION, run: suspend },
    Whole { name: "suspension with leases handed over", most: LEASES, run: suspend_leased },
    Whole { name: "suspension beside leases", most: LEASES, run: suspend_beside_leases },
    Whole { name: "changes of what is not registered", most: 8_192, run: change_nothing },
    Whole { name: "changes older than what is leased", most: LEASES, run: change_before },
    Whole { name: "registration over smaller ones", most: MILLION, run: supersede },
];

pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    holds::measure_by(processor_time);
    let mut too_long = Vec::new();
    for Whole { name, most, run } in WHOLES {
        let n = options.scaled(most).max(1);
        judge(name, "", n, || run(n), report, &mut too_long)?;
    }
    for Row { name, rest, most, measure } in &ROWS {
        let n = options.scaled(*most).max(1);
        judge(name, rest, n, || measure(n, 1).map(drop), report, &mut too_long)?;
    }
    if report.is_empty() {
        return Err("no hold was measured".into());
    }
    // A hundredth of it says nothing.
    if options.quick || too_long.is_empty() { Ok(()) } else { Err(too_long.join("; ")) }
}

fn judge(
    name: &str,
    beside: &str,
    n: usize,
    run: impl Fn() -> Result<(), String>,
    report: &mut Report,
    too_long: &mut Vec<String>,
) -> Result<(), String> {
    report.remark(name);
    let mut least: Vec<u32> = Vec::new();
    for _ in 0..TIMES {
        holds::take();
        run().map_err(|why| format!("{name}: {why}"))?;
        let held = holds::take();
        least.iter_mut().zip(&held).for_each(|(least, &took)| *least = took.min(*least));
        least.extend(held.iter().skip(least.len()));
    }
    // Without a cache there is no lock to hold.
    let Some(&longest) = least.iter().max() else { return Ok(()) };
    if longest > MOST_HELD {
        too_long.push(format!("{name}, {n} {beside}: the lock was held for {longest} ns"));
    }
    let params = json!({ "of": name, "n": n, "beside": beside });
    report.add("longest hold", params, "ns", Comparison::of(f64::from(longest), None));
    Ok(())
}

/// All that `n` regions span.
fn span(n: usize) -> Result<AddressRange, String> {
    let all = apart(n);
    let (first, last) = (range(all[0])?, range(all[n - 1])?);
    AddressRange::between(first.start(), last.end()).ok_or_else(|| "no range".into())
}

fn invalidate(n: usize) -> Result<(), String> {
    let cache = filled(n)?;
    cache.invalidate(span(n)?);
    cache.reclaim();
    Ok(())
}

fn invalidate_then(n: usize) -> Result<(), String> {
    let cache = filled(n)?;
    cache.invalidate_then(span(n)?, || ());
    cache.invalidate_then(span(n)?, || ());
    cache.reclaim();
    Ok(())
}

fn invalidate_per_use(n: usize) -> Result<(), String> {
    let cache = cache_of(n + 1_000, WhenFull::Refuse)?;
    let once = |&at: &u64| get_once(&cache, at, LENGTH).map_err(|error| error.to_string());
    let held: Result<Vec<_>, String> = apart(n).iter().map(once).collect();
    let held = held?;
    cache.invalidate_then(span(n)?, || ());
    drop(held);
    Ok(())
}

fn invalidate_callbacks(n: usize) -> Result<(), String> {
    with_leased(n, 1_000, WhenFull::Refuse, |cache, held| {
        held.iter_mut().for_each(|lease| lease.on_invalidate(|| ()));
        cache.invalidate(span(n)?);
        Ok(())
    })
}

fn reclaim_beside_leases(n: usize) -> Result<(), String> {
    with_leased(n, 1_000, WhenFull::Refuse, |cache, _| {
        let others = elsewhere(500);
        get_put(cache, &others, LENGTH)?;
        others.iter().try_for_each(|&at| range(at).map(|range| cache.invalidate(range)))?;
        cache.reclaim();
        Ok(())
    })
}

fn reclaim_leased(n: usize) -> Result<(), String> {
    with_leased(n, 1_000, WhenFull::Refuse, |cache, _| {
        cache.invalidate(span(n)?);
        cache.reclaim();
        cache.reclaim();
        Ok(())
    })
}

/// One region is left for all the others.
fn evict_beside_leases(n: usize) -> Result<(), String> {
    with_leased(n, 1, WhenFull::Refuse, |cache, _| get_put(cache, &elsewhere(100), LENGTH))
}

fn evict_idle(n: usize) -> Result<(), String> {
    filled(n)?.evict_idle();
    Ok(())
}

fn evict_idle_in(n: usize) -> Result<(), String> {
    with_leased(n, 1_000, WhenFull::Refuse, |cache, _| {
        cache.evict_idle_in(span(n)?);
        Ok(())
    })
}

fn terms() -> SuspensionTerms {
    SuspensionTerms { deadline: Duration::from_secs(600), ..Default::default() }
}

fn suspend(n: usize) -> Result<(), String> {
    let cache = filled(n)?;
    let one = cache.suspend(span(n)?, vec![], vec![], terms()).map_err(|_| "not suspended")?;
    one.resume().map_err(|_| "not resumed")?;
    Ok(())
}

fn suspend_leased(n: usize) -> Result<(), String> {
    let cache = cache_of(n + 1_000, WhenFull::Refuse)?;
    let held: Result<Vec<_>, String> = apart(n).iter().map(|&at| lease(&cache, at)).collect();
    let one = cache.suspend(span(n)?, vec![], held?, terms()).map_err(|_| "not suspended")?;
    let resumed = one.resume().map_err(|_| "not resumed")?;
    let back = resumed.leases.into_iter().filter(Result::is_ok).count();
    if back == n { Ok(()) } else { Err(format!("{back} leases came back of {n}")) }
}

fn suspend_beside_leases(n: usize) -> Result<(), String> {
    with_leased(n, 1_000, WhenFull::Refuse, |cache, _| {
        let others = elsewhere(500);
        get_put(cache, &others, LENGTH)?;
        let bytes = range(others[0])?;
        let one = cache.suspend(bytes, vec![], vec![], terms()).map_err(|_| "not suspended")?;
        one.resume().map_err(|_| "not resumed")?;
        Ok(())
    })
}

/// As many as two monitors' logs hold: long changes, each of blocks where nothing is, and then short ones.
fn change_nothing(n: usize) -> Result<(), String> {
    let cache = filled(1_000)?;
    let other = elsewhere(1)[0];
    let long =
        AddressRange::new(range(other)?.end(), 4 << 30).map_err(|error| error.to_string())?;
    for changed in [long, range(elsewhere(2)[1])?] {
        drop(lease(&cache, other)?);
        cache.monitor().log(std::iter::repeat_n(changed, n));
        drop(lease(&cache, other)?);
        cache.check().map_err(|error| error.to_string())?;
        cache.reclaim();
    }
    Ok(())
}

/// Every lease is younger than the changes that are left to apply.
fn change_before(n: usize) -> Result<(), String> {
    let cache = cache_of(n + 2_000, WhenFull::Refuse)?;
    let old = elsewhere(1_000);
    get_put(&cache, &old, LENGTH)?;
    cache.monitor().log(std::iter::repeat_n(AddressRange::EVERYTHING, 5));
    let once = |&at: &u64| get_once(&cache, at, LENGTH).map_err(|error| error.to_string());
    let held: Result<Vec<_>, String> = apart(n).iter().map(once).collect();
    let held = held?;
    cache.monitor().log(std::iter::repeat_n(range(old[0])?, 5));
    cache.check().map_err(|error| error.to_string())?;
    drop(held);
    Ok(())
}

fn supersede(n: usize) -> Result<(), String> {
    let cache: NullCache = filled(n)?;
    let all = span(n)?;
    let large = crate::null::get(&cache, all.start() as u64, all.len());
    drop(large.map_err(|error| error.to_string())?);
    cache.reclaim();
    Ok(())
}
