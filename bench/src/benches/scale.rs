//! What each operation costs next to more and more of what it does not touch.
//!
//! Each row doubles the rest four times. What grows by more than [`MOST_GROWTH`] for a doubling, on
//! average, fails the run: the operation looks at something that is not its own. The table in
//! `docs/src/costs.md` says what each operation touches; the rows here hold it.
//!
//! What is measured is the processor time of the thread that calls: other programs take processors away.

mod library;
mod mappings;

use crate::Options;
use crate::null::LoadMonitor;
use crate::null::{NullCache, NullDevice, get, get_once};
use crate::report::Report;
use crate::rounds::Comparison;
use crate::workload::{LENGTH, addresses, elsewhere, range};
use pinfold::budget::{Amount, Budget, Kind, Terms};
use pinfold::suspend::SuspensionTerms;
use pinfold::{AddressRange, Cache, Config, Lease, RegistrarLimits, WhenFull};
use pinfold_cli::plot::{Axis, Line, Plot};
use pinfold_kernel::thread::processor_time;
use serde_json::json;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// The most that a row may grow by when the rest is twice as much, on average over four doublings.
const MOST_GROWTH: f64 = 1.2;

/// How often the rest is doubled.
const DOUBLINGS: u32 = 4;

/// Nanoseconds of one operation next to so much of what it does not touch.
pub(super) type Measured = Result<f64, String>;

/// One operation.
pub(super) struct Row {
    pub(super) name: &'static str,
    /// What it does not touch.
    pub(super) rest: &'static str,
    /// How much of it at most.
    pub(super) most: usize,
    pub(super) measure: fn(usize, usize) -> Measured,
}

/// The rows of the cache and of budgets.
const ROWS: [Row; 27] = [
    Row { name: "hit", rest: "regions", most: 1_000_000, measure: hit_beside_regions },
    Row { name: "hit", rest: "leases held", most: 100_000, measure: hit_beside_leases },
    Row { name: "hit", rest: "threads with leases", most: 256, measure: hit_beside_threads },
    Row { name: "hit", rest: "caches", most: 10_000, measure: hit_beside_caches },
    Row {
        name: "hit, leases ended in any order",
        rest: "leases held",
        most: 100_000,
        measure: hit_in_any_order,
    },
    Row { name: "get in a full cache", rest: "regions", most: 1_000_000, measure: full },
    Row { name: "check after a change", rest: "regions", most: 1_000_000, measure: check },
    Row { name: "idle eviction of all", rest: "caches", most: 10_000, measure: evict_all },
    Row {
        name: "end of a lease with a callback",
        rest: "callbacks of its region",
        most: 100_000,
        measure: callback,
    },
    Row { name: "miss and eviction of it", rest: "regions", most: 1_000_000, measure: miss },
    Row { name: "refused get", rest: "leased regions", most: 100_000, measure: refused },
    Row {
        name: "first refused get, for each region",
        rest: "leased regions",
        most: 100_000,
        measure: first_refused,
    },
    Row {
        name: "get past the budget",
        rest: "leased regions",
        most: 100_000,
        measure: past_budget,
    },
    Row {
        name: "get after a change",
        rest: "regions changed",
        most: 1_000_000,
        measure: after_change,
    },
    Row { name: "invalidation", rest: "regions", most: 1_000_000, measure: invalidation },
    Row { name: "invalidation", rest: "per-use leases", most: 100_000, measure: beside_per_use },
    Row { name: "invalidation with word", rest: "regions", most: 1_000_000, measure: with_word },
    Row { name: "get for one use", rest: "per-use leases", most: 100_000, measure: one_use },
    Row { name: "idle eviction of a range", rest: "regions", most: 1_000_000, measure: evict_in },
    Row { name: "suspension", rest: "regions", most: 1_000_000, measure: suspend_beside_regions },
    Row { name: "suspension", rest: "suspensions", most: 100_000, measure: suspension },
    Row { name: "miss", rest: "suspensions", most: 100_000, measure: miss_beside_suspensions },
    Row { name: "reclaim of a region", rest: "regions", most: 1_000_000, measure: reclaim },
    Row { name: "draw and give", rest: "drawers of the budget", most: 10_000, measure: draw },
    Row {
        name: "give of what was held",
        rest: "drawers refused at their maximum",
        most: 10_000,
        measure: give,
    },
    Row { name: "discovery of a budget", rest: "regions", most: 1_000_000, measure: discover },
    Row { name: "refresh of a budget", rest: "drawers of it", most: 10_000, measure: refresh },
];

/// All rows that this machine can measure.
pub(super) fn rows(report: &Report) -> Vec<&'static Row> {
    let mut rows: Vec<&Row> = ROWS.iter().chain(&library::ROWS).collect();
    match mappings::missing() {
        None => rows.extend(&mappings::ROWS),
        Some(why) => report.remark(&format!("skipped: scale next to mappings: {why}")),
    }
    rows
}

/// A row's name, what it is next to, and its figures.
type Figures = (&'static Row, Vec<(usize, f64)>);

pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    judge(&measure_all(options, report)?, options)
}

fn judge(figures: &[Figures], options: Options) -> Result<(), String> {
    let grown: Vec<String> = figures.iter().filter_map(too_steep).collect();
    // A hundredth of the work says nothing about growth.
    if options.quick || grown.is_empty() { Ok(()) } else { Err(grown.join("; ")) }
}

fn measure_all(options: Options, report: &mut Report) -> Result<Vec<Figures>, String> {
    rows(report).into_iter().map(|row| Ok((row, measure(row, options, report)?))).collect()
}

fn measure(row: &Row, options: Options, report: &mut Report) -> Result<Vec<(usize, f64)>, String> {
    let least = (options.scaled(row.most) >> DOUBLINGS).max(1);
    let sizes = (0..=DOUBLINGS).map(|doubling| least << doubling);
    let figures: Result<Vec<_>, String> = sizes
        .map(|n| {
            let value = (row.measure)(n, options.rounds)
                .map_err(|why| format!("{} beside {n} {}: {why}", row.name, row.rest))?;
            let params = json!({ "n": n, "beside": row.rest });
            report.add(row.name, params, "ns", Comparison::of(value, None));
            Ok((n, value))
        })
        .collect();
    figures
}

/// What is to be said of a row that grows.
fn too_steep((row, figures): &Figures) -> Option<String> {
    let (&(_, first), &(_, last)) = (figures.first()?, figures.last()?);
    let growth = (last / first).powf(1.0 / f64::from(DOUBLINGS));
    (growth > MOST_GROWTH).then(|| {
        format!(
            "{} costs {growth:.2} times as much beside twice as many {}: {first:.0} to {last:.0} ns",
            row.name, row.rest
        )
    })
}

/// Every row a line.
pub(crate) fn plot(report: &Report) -> Plot {
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for it in report.all() {
        let Some(rest) = it.params["beside"].as_str() else { continue };
        let name = format!("{}: {rest}", it.name);
        lines.entry(name).or_default().push((it.number("n"), it.value));
    }
    Plot {
        title: "What an operation costs beside what it does not touch".into(),
        across: Axis {
            title: "how much it does not touch",
            base: 10.0,
            label: |n| format!("{n:.0}"),
        },
        up: Axis { title: "nanoseconds", base: 10.0, label: |value| format!("{value:.0}") },
        lines: lines.into_iter().map(|(name, points)| Line { name, points }).collect(),
    }
}

#[allow(clippy::needless_pass_by_value)] // what `map_err` hands over
fn words(error: impl ToString) -> String {
    error.to_string()
}

/// The least of several runs of `operation`, each of `times` operations, in nanoseconds of one.
fn least(rounds: usize, times: u32, mut operation: impl FnMut() -> Result<(), String>) -> Measured {
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let begin = processor_time();
        for _ in 0..times {
            operation()?;
        }
        least = least.min((processor_time() - begin) as f64 / f64::from(times));
    }
    Ok(least)
}

/// No reclaimer, which would work concurrently with what is measured.
pub(super) fn cache_of(regions: usize, when_full: WhenFull) -> Result<NullCache, String> {
    let config = *crate::null::limited(regions, usize::MAX >> 1)?.config();
    let config = Config { when_full, ..config };
    Cache::new(NullDevice::default(), LoadMonitor::default(), config).map_err(words)
}

/// Every second page-aligned 64 KiB.
pub(super) fn apart(count: usize) -> Vec<u64> {
    addresses(count, 2 * LENGTH as u64)
}

pub(super) fn filled(regions: usize) -> Result<NullCache, String> {
    let cache = cache_of(regions + 1_000, WhenFull::Refuse)?;
    crate::null::get_put(&cache, &apart(regions), LENGTH)?;
    Ok(cache)
}

pub(super) fn lease(
    cache: &NullCache,
    address: u64,
) -> Result<Lease<'_, NullDevice, LoadMonitor>, String> {
    get(cache, address, LENGTH).map_err(words)
}

fn hit(cache: &NullCache, rounds: usize) -> Measured {
    let address = elsewhere(1)[0];
    drop(lease(cache, address)?);
    least(rounds, 10_000, || lease(cache, address).map(|lease| drop(black_box(lease))))
}

fn hit_beside_regions(n: usize, rounds: usize) -> Measured {
    hit(&filled(n)?, rounds)
}

fn hit_beside_leases(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let held: Result<Vec<_>, String> = apart(n).iter().map(|&at| lease(&cache, at)).collect();
    let value = hit(&cache, rounds);
    drop(held?);
    value
}

/// An event loop's: of so many leases that come and go one ends, whichever, and another is taken. Those that are held
/// beside them are not touched; with more of them to choose from the processor's caches would be measured.
fn hit_in_any_order(n: usize, rounds: usize) -> Measured {
    const COMING: usize = 1_000;
    with_leased(n, COMING, WhenFull::Refuse, |cache, _| {
        let (address, mut random) = (elsewhere(1)[0], fastrand::Rng::with_seed(1));
        let coming: Result<Vec<_>, String> = (0..COMING).map(|_| lease(cache, address)).collect();
        let mut coming = coming?;
        least(rounds, 1_000, || {
            drop(coming.swap_remove(random.usize(..coming.len())));
            coming.push(lease(cache, address)?);
            Ok(())
        })
    })
}

/// Each takes the place of one that was there.
fn full(n: usize, rounds: usize) -> Measured {
    let cache = cache_of(n, WhenFull::Refuse)?;
    crate::null::get_put(&cache, &apart(n), LENGTH)?;
    let others = elsewhere(1_000 * rounds);
    let mut next = others.iter();
    least(rounds, 1_000, || lease(&cache, *next.next().unwrap_or(&others[0])).map(drop))
}

fn check(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    let bytes = range(address)?;
    least(rounds, 100, || {
        drop(lease(&cache, address)?);
        cache.monitor().log(std::iter::once(bytes));
        cache.check().map_err(words)?;
        cache.reclaim();
        Ok(())
    })
}

fn evict_all(n: usize, rounds: usize) -> Measured {
    let config = *crate::null::unlimited()?.config();
    let others: Result<Vec<NullCache>, String> = (0..n)
        .map(|_| Cache::new(NullDevice::default(), LoadMonitor::default(), config))
        .map(|cache| cache.map_err(words))
        .collect();
    let cache = filled(1)?;
    let value = least(rounds, 100, || {
        drop(lease(&cache, apart(1)[0])?);
        cache.evict_idle();
        Ok(())
    });
    drop(others?);
    value
}

fn callback(n: usize, rounds: usize) -> Measured {
    let cache = filled(1)?;
    let with_callback = || {
        let mut lease = lease(&cache, apart(1)[0])?;
        lease.on_invalidate(|| ());
        Ok::<_, String>(lease)
    };
    let mut held = std::collections::VecDeque::new();
    for _ in 0..n {
        held.push_back(with_callback()?);
    }
    // The oldest ends, whose callback stands at the front.
    least(rounds, 1_000, || {
        held.pop_front();
        held.push_back(with_callback()?);
        Ok(())
    })
}

fn hit_beside_threads(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let (begun, over) = (Barrier::new(n + 1), Barrier::new(n + 1));
    std::thread::scope(|scope| {
        for address in apart(n) {
            let (cache, begun, over) = (&cache, &begun, &over);
            scope.spawn(move || {
                let lease = lease(cache, address);
                begun.wait();
                over.wait();
                drop(lease);
            });
        }
        begun.wait();
        let value = hit(&cache, rounds);
        over.wait();
        value
    })
}

fn hit_beside_caches(n: usize, rounds: usize) -> Measured {
    let config = *crate::null::unlimited()?.config();
    let others: Result<Vec<NullCache>, String> = (0..n)
        .map(|_| Cache::new(NullDevice::default(), LoadMonitor::default(), config))
        .map(|cache| cache.map_err(words))
        .collect();
    let value = hit(&filled(1)?, rounds);
    drop(others?);
    value
}

fn miss(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    let bytes = range(address)?;
    least(rounds, 100, || {
        drop(lease(&cache, address)?);
        cache.evict_idle_in(bytes);
        Ok(())
    })
}

/// Leases of a cache.
pub(super) type Leases<'c> = Vec<Lease<'c, NullDevice, LoadMonitor>>;

/// A cache of which `n` regions are leased, with room for `more`.
pub(super) fn with_leased<T>(
    n: usize,
    more: usize,
    when_full: WhenFull,
    measure: impl for<'c> FnOnce(&'c NullCache, &mut Leases<'c>) -> Result<T, String>,
) -> Result<T, String> {
    let cache = cache_of(n + more, when_full)?;
    let held: Result<Vec<_>, String> = apart(n).iter().map(|&at| lease(&cache, at)).collect();
    let mut held = held?;
    let value = measure(&cache, &mut held);
    drop(held);
    value
}

/// A cache all of whose regions are leased.
fn with_all_leased(
    n: usize,
    when_full: WhenFull,
    measure: impl FnOnce(&NullCache) -> Measured,
) -> Measured {
    with_leased(n, 0, when_full, |cache, _| {
        // The first looks at all, once for what was registered.
        drop(lease(cache, elsewhere(1)[0]));
        measure(cache)
    })
}

fn refused(n: usize, rounds: usize) -> Measured {
    with_all_leased(n, WhenFull::Refuse, |cache| {
        least(rounds, 100, || match lease(cache, elsewhere(1)[0]) {
            Ok(_) => Err("was not refused".into()),
            Err(_) => Ok(()),
        })
    })
}

/// What the first get that is refused costs for each of the regions, all of which it looks at.
fn first_refused(n: usize, rounds: usize) -> Measured {
    let mut least = f64::INFINITY;
    // To fill it again takes long.
    for _ in 0..rounds.min(3) {
        let took = with_leased(n, 0, WhenFull::Refuse, |cache, _| {
            let begin = processor_time();
            match lease(cache, elsewhere(1)[0]) {
                Ok(_) => Err("was not refused".into()),
                Err(_) => Ok(processor_time() - begin),
            }
        });
        least = least.min(took? as f64 / n as f64);
    }
    Ok(least)
}

fn past_budget(n: usize, rounds: usize) -> Measured {
    with_all_leased(n, WhenFull::RegisterPerUse, |cache| {
        least(rounds, 100, || lease(cache, elsewhere(1)[0]).map(drop))
    })
}

/// The most that one of the gets costs that follow a change of all but what they touch.
fn after_change(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let (all, other) = (apart(n), elsewhere(1)[0]);
    let (first, last) = (range(all[0])?, range(all[n - 1])?);
    let everything = AddressRange::new(first.start(), last.end() - first.start()).map_err(words)?;
    let mut least = f64::INFINITY;
    // To fill it again takes long.
    for _ in 0..rounds.min(3) {
        crate::null::get_put(&cache, &all, LENGTH)?;
        drop(lease(&cache, other)?);
        cache.monitor().log(std::iter::once(everything));
        let begin = processor_time();
        drop(lease(&cache, other)?);
        least = least.min((processor_time() - begin) as f64);
        cache.reclaim();
    }
    Ok(least)
}

fn invalidation(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    let bytes = range(address)?;
    least(rounds, 100, || {
        drop(lease(&cache, address)?);
        cache.invalidate(bytes);
        cache.reclaim();
        Ok(())
    })
}

fn beside_per_use(n: usize, rounds: usize) -> Measured {
    let cache = cache_of(n + 1_000, WhenFull::Refuse)?;
    let once = |&address: &u64| get_once(&cache, address, LENGTH).map_err(words);
    let held: Result<Vec<_>, String> = apart(n).iter().map(once).collect();
    let bytes = range(elsewhere(1)[0])?;
    let value = least(rounds, 1_000, || {
        cache.invalidate(bytes);
        Ok(())
    });
    drop(held?);
    value
}

fn with_word(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    let bytes = range(address)?;
    least(rounds, 100, || {
        drop(lease(&cache, address)?);
        cache.invalidate_then(bytes, || ());
        cache.reclaim();
        Ok(())
    })
}

fn one_use(n: usize, rounds: usize) -> Measured {
    let cache = cache_of(n + 1_000, WhenFull::Refuse)?;
    let once = |address: u64| get_once(&cache, address, LENGTH).map_err(words);
    let held: Result<Vec<_>, String> = apart(n).into_iter().map(once).collect();
    let address = elsewhere(1)[0];
    let value = least(rounds, 1_000, || once(address).map(drop));
    drop(held?);
    value
}

fn evict_in(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let bytes = range(elsewhere(1)[0])?;
    least(rounds, 1_000, || {
        cache.evict_idle_in(bytes);
        Ok(())
    })
}

fn suspend_beside_regions(n: usize, rounds: usize) -> Measured {
    suspend_and_resume(&filled(n)?, rounds)
}

/// `measure` during `n` suspensions.
fn with_suspensions(n: usize, measure: impl FnOnce(&NullCache) -> Measured) -> Measured {
    let cache = cache_of(1 << 20, WhenFull::Refuse)?;
    let terms = SuspensionTerms { deadline: Duration::from_secs(600), ..Default::default() };
    let mut suspended = Vec::new();
    for address in apart(n) {
        let one = cache.suspend(range(address)?, vec![], vec![], terms);
        suspended.push(one.map_err(|_| "not suspended")?);
    }
    let value = measure(&cache);
    for one in suspended {
        one.resume().map_err(|_| "not resumed")?;
    }
    value
}

fn suspension(n: usize, rounds: usize) -> Measured {
    with_suspensions(n, |cache| suspend_and_resume(cache, rounds))
}

fn suspend_and_resume(cache: &NullCache, rounds: usize) -> Measured {
    let bytes = range(elsewhere(1)[0])?;
    let terms = SuspensionTerms { deadline: Duration::from_secs(600), ..Default::default() };
    least(rounds, 100, || {
        let one = cache.suspend(bytes, vec![], vec![], terms).map_err(|_| "not suspended")?;
        one.resume().map_err(|_| "not resumed")?;
        Ok(())
    })
}

fn miss_beside_suspensions(n: usize, rounds: usize) -> Measured {
    with_suspensions(n, |cache| {
        let address = elsewhere(1)[0];
        let bytes = range(address)?;
        least(rounds, 100, || {
            drop(lease(cache, address)?);
            cache.evict_idle_in(bytes);
            Ok(())
        })
    })
}

fn reclaim(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    let bytes = range(address)?;
    least(rounds, 100, || {
        drop(lease(&cache, address)?);
        cache.invalidate(bytes);
        match cache.reclaim() {
            1 => Ok(()),
            other => Err(format!("{other} regions were reclaimed")),
        }
    })
}

fn discovered() -> Result<Budget, String> {
    let limits =
        RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 40, max_regions: 1 << 30 };
    Budget::discover(Kind::Mlock, limits).map_err(words)
}

fn discover(n: usize, rounds: usize) -> Measured {
    let _cache = filled(n)?;
    least(rounds, 10, || discovered().map(drop))
}

fn refresh(n: usize, rounds: usize) -> Measured {
    let budget = discovered()?;
    let shares: Result<Vec<Arc<_>>, _> = (0..n).map(|_| budget.share(Terms::default())).collect();
    let _shares = shares.map_err(words)?;
    least(rounds, 100, || {
        black_box(budget.refresh());
        Ok(())
    })
}

fn draw(n: usize, rounds: usize) -> Measured {
    let all = Amount { bytes: 1 << 40, regions: 1 << 30 };
    let budget = Budget::new(all).map_err(words)?;
    let shares: Result<Vec<Arc<_>>, _> = (0..n).map(|_| budget.share(Terms::default())).collect();
    let shares = shares.map_err(words)?;
    least(rounds, 1_000, || shares[0].draw(Amount::one(4096)).map(drop).map_err(words))
}

/// Each time there is more in the budget than ever since the others were refused.
fn give(n: usize, rounds: usize) -> Measured {
    const TIMES: u16 = 1_000;
    let one = Amount::one(4096);
    let budget = Budget::new(Amount { bytes: 1 << 40, regions: 1 << 30 }).map_err(words)?;
    let share = budget.share(Terms::default()).map_err(words)?;
    let held: Result<Vec<_>, _> =
        (0..rounds * usize::from(TIMES)).map(|_| share.draw(one)).collect();
    let mut held = held.map_err(words)?;
    let refused = |_| {
        let share = budget.share(Terms { maximum: one, ..Terms::default() }).map_err(words)?;
        let all = share.draw(one).map_err(words)?;
        if share.draw(one).is_ok() { Err("more than the maximum".into()) } else { Ok(all) }
    };
    let _others = (0..n).map(refused).collect::<Result<Vec<_>, String>>()?;
    least(rounds, TIMES.into(), || held.pop().map(drop).ok_or_else(|| "nothing is held".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the book says is held, is.
    #[test]
    fn every_row_stands_in_the_book() {
        let page = std::fs::read_to_string("../docs/src/costs.md").unwrap();
        let rows = ROWS.iter().chain(&library::ROWS).chain(&mappings::ROWS);
        let missing: Vec<_> =
            rows.filter(|row| !page.contains(&format!("`{}`", row.name))).collect();
        assert!(missing.is_empty(), "{:?}", missing.iter().map(|row| row.name).collect::<Vec<_>>());
    }
}
