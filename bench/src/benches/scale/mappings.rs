//! The rows next to mappings of the process, with the monitor that asks the kernel for them.

use super::{Measured, Row, least, words};
use crate::machine;
use crate::null::{self, NullDevice, get};
use crate::workload::LENGTH;
use pinfold::monitor::{Best, Choice, Userfaultfd};
use pinfold::rearrange::{self, HugePageWay, Node};
use pinfold::suspend::{Suspended, SuspensionTerms};
use pinfold::{AddressRange, Cache, Config, Monitor, Watch, mappings};
use pinfold_kernel::mapping::OwnedMapping;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::thread::processor_time;
use pinfold_kernel::trial::TrialArea;
use pinfold_kernel::{Errno, memory};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

/// As many as a process may have by default, nearly.
const MOST: usize = 60_000;

const REST: &str = "mappings";
const WATCHED: &str = "watched mappings";

pub(super) const ROWS: [Row; 10] = [
    Row { name: "hit, userfaultfd", rest: WATCHED, most: MOST, measure: hit },
    Row { name: "fresh memory, used and unmapped", rest: REST, most: MOST, measure: fresh },
    Row {
        name: "fresh memory, used and unmapped",
        rest: WATCHED,
        most: MOST,
        measure: fresh_watched,
    },
    Row { name: "watch of 512 mappings", rest: REST, most: MOST, measure: watch_many },
    Row { name: "watch and unwatch", rest: REST, most: MOST, measure: unwatch },
    Row { name: "watch and unwatch", rest: WATCHED, most: MOST, measure: unwatch_watched },
    Row { name: "mappings_in", rest: REST, most: MOST, measure: look },
    Row { name: "trim of a page", rest: REST, most: MOST, measure: trim },
    Row { name: "defragmentation of a huge page", rest: REST, most: MOST, measure: defragment },
    Row { name: "migration of a page", rest: REST, most: MOST, measure: migrate },
];

/// Why this machine has no such rows.
pub(super) fn missing() -> Option<String> {
    Userfaultfd::new().err().map(|error| format!("userfaultfd: {error}"))
}

fn refused(Errno(errno): Errno) -> String {
    std::io::Error::from_raw_os_error(errno).to_string()
}

type TheCache = Cache<NullDevice, Arc<Userfaultfd>>;

fn map(bytes: usize) -> Result<OwnedMapping, String> {
    OwnedMapping::new(bytes).map_err(refused)
}

/// `n` mappings side by side: every second page is never to be part of a huge one.
fn split(n: usize) -> Result<OwnedMapping, String> {
    let (page, whole) = (page_bytes(), map(n * page_bytes())?);
    let start = range_of(&whole)?.start();
    (0..n).step_by(2).try_for_each(|number| {
        let one = AddressRange::new(start + number * page, page).map_err(words)?;
        memory::advise_huge(one, false).map_err(refused)
    })?;
    Ok(whole)
}

fn range_of(memory: &OwnedMapping) -> Result<AddressRange, String> {
    memory.range().ok_or_else(|| "no range".into())
}

fn cover(monitor: &impl Monitor, range: AddressRange) -> Result<(), String> {
    match monitor.watch(range) {
        Watch::Covered => Ok(()),
        Watch::Uncovered(why) => Err(why.to_string()),
    }
}

fn cache() -> Result<TheCache, String> {
    let monitor = Arc::new(Userfaultfd::new().map_err(words)?);
    Cache::new(NullDevice::default(), monitor, Config::keeping_all()).map_err(words)
}

fn used(cache: &TheCache, memory: &OwnedMapping) -> Result<(), String> {
    get(cache, memory.start().addr().get() as u64, memory.bytes()).map(drop).map_err(words)
}

fn hit(n: usize, rounds: usize) -> Measured {
    let (cache, others, memory) = (cache()?, split(n)?, map(LENGTH)?);
    cover(cache.monitor(), range_of(&others)?)?;
    least(rounds, 1_000, || used(&cache, &memory))
}

fn used_fresh(cache: &TheCache, rounds: usize) -> Measured {
    least(rounds, 20, || {
        used(cache, &map(LENGTH)?)?;
        cache.reclaim();
        Ok(())
    })
}

fn fresh(n: usize, rounds: usize) -> Measured {
    let _others = split(n)?;
    used_fresh(&cache()?, rounds)
}

fn fresh_watched(n: usize, rounds: usize) -> Measured {
    let (cache, others) = (cache()?, split(n)?);
    cover(cache.monitor(), range_of(&others)?)?;
    used_fresh(&cache, rounds)
}

/// By a monitor each time that knows none of them.
fn watch_many(n: usize, rounds: usize) -> Measured {
    let (_others, many) = (split(n)?, split(512)?);
    let many = range_of(&many)?;
    let mut least = f64::INFINITY;
    for _ in 0..rounds.min(7) {
        let monitor = Userfaultfd::new().map_err(words)?;
        let begin = processor_time();
        cover(&monitor, many)?;
        least = least.min((processor_time() - begin) as f64);
    }
    Ok(least)
}

fn best() -> Result<Best, String> {
    Best::only(Choice::Userfaultfd).map_err(words)
}

fn watched_and_not(monitor: &Best, rounds: usize) -> Measured {
    let memory = map(LENGTH)?;
    let range = range_of(&memory)?;
    least(rounds, 20, || {
        cover(monitor, range)?;
        monitor.unwatch(range);
        Ok(())
    })
}

/// `measure` with all its threads on one processor: to wake one on another costs the waker three times as much.
fn on_one_processor(measure: impl FnOnce() -> Measured + Send) -> Measured {
    let pinned = || {
        let processor = machine::processors()?.into_iter().next().ok_or("no processor")?;
        machine::stay_on(processor)?;
        measure()
    };
    let joined = std::thread::scope(|scope| scope.spawn(pinned).join());
    joined.map_err(|_| "a measuring thread panicked".to_string())?
}

fn unwatch(n: usize, rounds: usize) -> Measured {
    on_one_processor(|| {
        let _others = split(n)?;
        watched_and_not(&best()?, rounds)
    })
}

fn unwatch_watched(n: usize, rounds: usize) -> Measured {
    on_one_processor(|| {
        let (monitor, others) = (best()?, split(n)?);
        let range = range_of(&others)?;
        cover(&monitor, range)?;
        let value = watched_and_not(&monitor, rounds);
        // The monitor is the process's, and the next row begins without them.
        monitor.unwatch(range);
        value
    })
}

fn look(n: usize, rounds: usize) -> Measured {
    let (_others, memory) = (split(n)?, map(page_bytes())?);
    let range = range_of(&memory)?;
    least(rounds, 100, || {
        mappings::mappings_in(range).map(|found| drop(black_box(found))).map_err(words)
    })
}

const HUGE: usize = 2 << 20;

/// `operation` on a suspended huge page's length of memory next to `n` mappings.
fn rearranged<T, E: std::fmt::Display>(
    n: usize,
    rounds: usize,
    operation: impl Fn(&Suspended<'_, NullDevice, Arc<Userfaultfd>>, &TrialArea) -> Result<T, E>,
) -> Measured {
    let _others = split(n)?;
    let memory = TrialArea::aligned(HUGE, HUGE).map_err(refused)?;
    let range = memory.range().ok_or("no memory")?;
    let terms = SuspensionTerms { deadline: Duration::from_secs(600), ..Default::default() };
    let cache = cache()?;
    let suspended = cache.suspend(range, vec![], vec![], terms).map_err(words)?;
    let value = least(rounds, 20, || operation(&suspended, &memory).map(drop).map_err(words));
    suspended.resume().map_err(|_| "not resumed")?;
    value
}

fn trim(n: usize, rounds: usize) -> Measured {
    rearranged(n, rounds, null::trim)
}

fn defragment(n: usize, rounds: usize) -> Measured {
    rearranged(n, rounds, |suspended, _| rearrange::defragment(suspended, HugePageWay::IN_PLACE))
}

fn migrate(n: usize, rounds: usize) -> Measured {
    rearranged(n, rounds, |suspended, _| rearrange::migrate(suspended, Node(0)))
}
