//! How long the cache's lock is held at most, whatever stands beside and however much an operation touches.
//!
//! In processor time of the thread that holds it: the machine is shared, and a thread that lost its
//! processor says nothing about the code. A row is run several times, from the filling of the cache to its
//! end. Of each hold, by its place among all, the least time counts, and of these the longest: what interrupts
//! a thread, or faults a page in, does not come at the same place each time.
//! Nothing but `holds` is worth measuring in this build, because every hold asks a clock twice.

use super::scale::{Row, apart, cache_of, filled, lease, rows, with_leased};
use crate::Options;
use crate::null::LoadMonitor;
use crate::null::{NullCache, NullDevice, get_exact, get_once, get_put};
use crate::report::Report;
use crate::rounds::Comparison;
use crate::workload::{LENGTH, elsewhere, range};
use pinfold::suspend::SuspensionTerms;
use pinfold::{AddressRange, Cache, Config, WhenFull};
use pinfold_core::followed::Followed;
use pinfold_core::holds::{self, Requests};
use pinfold_kernel::thread::processor_time;
use serde_json::json;
use std::time::Duration;

/// Nanoseconds that the lock may be held.
const MOST_HELD: u32 = 50_000;

/// Bytes that may be asked of the allocator at once while the lock is held: from 1,008 on glibc's goes through all small
/// blocks that were freed.
const MOST_ASKED: usize = 1_000;

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

const WHOLES: [Whole; 20] = [
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
    Whole { name: "changes of what is followed", most: LEASES, run: change_followed },
    Whole { name: "words for one region", most: LEASES, run: words_for_one },
    Whole { name: "gets beside changes not yet applied", most: 8_192, run: get_beside_changes },
    Whole { name: "registration over smaller ones", most: MILLION, run: supersede },
    Whole { name: "all with regions that begin in one page", most: 4_096, run: one_page },
    Whole {
        name: "all behind small blocks that were freed",
        most: LEASES,
        run: behind_freed_blocks,
    },
];

pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    holds::measure_by(processor_time);
    let mut too_long = Vec::new();
    for Whole { name, most, run } in WHOLES {
        let n = options.scaled(most).max(1);
        judge(name, "", n, || run(n), report, &mut too_long)?;
    }
    for Row { name, rest, most, measure } in rows(report) {
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
    Requests::take_largest();
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
    let largest = Requests::take_largest();
    if largest > MOST_ASKED {
        too_long.push(format!("{name}, {n} {beside}: {largest} bytes were asked for at once"));
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

/// As many as stand one by one: long changes, each of blocks where nothing is, and then short ones.
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

/// One change of all, and of each one by one.
fn change_followed(n: usize) -> Result<(), String> {
    let cache = filled(1_000)?;
    let follow =
        |&at: &u64| Followed::begin(&cache, range(at)?).ok_or_else(|| "not followed".to_string());
    let followed: Result<Vec<_>, String> = apart(n).iter().map(follow).collect();
    let followed = followed?;
    let (first, others) = followed.split_first().ok_or("nothing is followed")?;
    cache.monitor().log(std::iter::once(range(elsewhere(1)[0])?));
    let is_calm = followed.iter().all(|it| it.has_changed() == Some(false));
    cache.monitor().log(others.iter().map(Followed::range));
    let is_known = others.iter().take(1_000).all(|it| it.has_changed() != Some(false));
    cache.monitor().log(std::iter::once(span(n)?));
    let is_told = is_calm && is_known && first.has_changed() != Some(false);
    if is_told { Ok(()) } else { Err("a change was not told".into()) }
}

/// As many calls wait for the end of one region.
fn words_for_one(n: usize) -> Result<(), String> {
    let cache = filled(1_000)?;
    let at = elsewhere(1)[0];
    let held = lease(&cache, at)?;
    (0..n).try_for_each(|_| range(at).map(|range| cache.invalidate_then(range, || ())))?;
    drop(held);
    cache.reclaim();
    Ok(())
}

/// Of long ones, each of blocks where nothing is.
fn get_beside_changes(n: usize) -> Result<(), String> {
    let all = apart(512);
    let cache = filled(all.len())?;
    let behind = range(elsewhere(1)[0])?;
    let long = AddressRange::new(behind.end(), 4 << 30).map_err(|error| error.to_string())?;
    cache.monitor().log(std::iter::repeat_n(long, n));
    get_put(&cache, &all, LENGTH)
}

fn supersede(n: usize) -> Result<(), String> {
    let cache: NullCache = filled(n)?;
    let all = span(n)?;
    let large = crate::null::get(&cache, all.start() as u64, all.len());
    drop(large.map_err(|error| error.to_string())?);
    cache.reclaim();
    Ok(())
}

/// From one byte after another, because a device gives a peer access to exactly what is registered. Invalidated, evicted
/// and suspended; and gets of what none of them serves.
fn one_page(n: usize) -> Result<(), String> {
    let config = *cache_of(n + 1_000, WhenFull::Refuse)?.config();
    let cache = Cache::new(
        NullDevice::default(),
        LoadMonitor::default(),
        Config { cache_remote: true, ..config },
    )
    .map_err(|error| error.to_string())?;
    let page = elsewhere(1)[0];
    let all = AddressRange::between(range(page)?.start(), range(page + n as u64)?.end());
    let all = all.ok_or("no range")?;
    let fill = || {
        let exact = |at| get_exact(&cache, page + at as u64, LENGTH).map(drop);
        (0..n).try_for_each(exact).map_err(|error| error.to_string())
    };
    fill()?;
    drop(lease(&cache, page)?);
    cache.invalidate_then(all, || ());
    cache.reclaim();
    fill()?;
    cache.evict_idle_in(all);
    fill()?;
    let one = cache.suspend(all, vec![], vec![], terms()).map_err(|_| "not suspended")?;
    one.resume().map_err(|_| "not resumed")?;
    fill()?;
    cache.evict_idle();
    Ok(())
}

/// What may make a table longer, each time behind `n` small blocks that were freed: an allocator that goes through them does
/// so once.
fn behind_freed_blocks(n: usize) -> Result<(), String> {
    const AT_ONCE: usize = 100;
    let free = || drop((0..n).map(|at| Vec::<u8>::with_capacity(32 + at % 80)).collect::<Vec<_>>());
    let all = apart(20 * AT_ONCE);
    let cache = cache_of(all.len() / 2, WhenFull::RegisterPerUse)?;
    let mut held = Vec::with_capacity(all.len());
    for part in all.chunks(AT_ONCE) {
        free();
        get_put(&cache, part, LENGTH)?;
        free();
        for &at in part {
            let mut lease = lease(&cache, at)?;
            lease.on_invalidate(|| ());
            held.push(lease);
            cache.invalidate_then(range(all[0])?, || ());
        }
    }
    let two = all.chunks(2).take(AT_ONCE);
    held.truncate(AT_ONCE);
    free();
    cache.invalidate(span(all.len())?);
    drop(held);
    cache.reclaim();
    free();
    let suspended: Result<Vec<_>, String> = two
        .map(|two| {
            cache
                .suspend(range(two[0])?, vec![], vec![], terms())
                .map_err(|_| "not suspended".into())
        })
        .collect();
    free();
    suspended?.into_iter().try_for_each(|one| one.resume().map(drop).map_err(|_| "not resumed"))?;
    cache.evict_idle();
    Ok(())
}
