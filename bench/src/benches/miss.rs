//! What a miss costs, to the end: get of what is not cached, invalidate, release, and the
//! registration given back.
//!
//! UCX gives it back inside the release. Ours leaves it to the reclaimer, so both ways of having
//! that done are counted in full: by a call of `reclaim` behind every [`BATCH`] misses, without a
//! reclaimer; and by the reclaimer's thread, until the last registration is gone.

use crate::Options;
use crate::null::{self, NullCache};
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::{Turn, compare, nanoseconds_each};
use crate::workload::{LENGTH, adjacent, elsewhere, range};
use serde_json::json;

/// How many other regions are cached meanwhile.
const CACHED: [usize; 2] = [0, 100_000];
/// Misses in a round.
const MISSES: usize = 20_000;
/// Misses between two calls of `reclaim`.
const BATCH: usize = 64;

/// What deregisters.
#[derive(Clone, Copy)]
enum Reclaim {
    ByHand,
    Thread,
}

impl Reclaim {
    const fn name(self) -> &'static str {
        match self {
            Self::ByHand => "by hand, every 64",
            Self::Thread => "by the reclaimer",
        }
    }

    fn cache(self) -> Result<NullCache, String> {
        match self {
            Self::ByHand => null::by_hand(),
            Self::Thread => null::unlimited(),
        }
    }

    /// Misses at every address, and the end of their registrations.
    fn miss_all(self, cache: &NullCache, addresses: &[u64]) -> Result<(), String> {
        match self {
            Self::ByHand => addresses.chunks(BATCH).try_for_each(|batch| {
                miss_each(cache, batch)?;
                cache.reclaim();
                Ok(())
            }),
            Self::Thread => {
                miss_each(cache, addresses)?;
                wait_for_reclaimer(cache);
                Ok(())
            }
        }
    }
}

/// One figure for each way and each number of other regions.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let sizes = CACHED.into_iter().filter(|&cached| options.can_fill(cached));
    sizes.into_iter().try_for_each(|cached| {
        measure(options, report, Reclaim::ByHand, cached)?;
        measure(options, report, Reclaim::Thread, cached)
    })
}

fn measure(
    options: Options,
    report: &mut Report,
    way: Reclaim,
    cached: usize,
) -> Result<(), String> {
    let misses = options.scaled(MISSES);
    let (others, addresses) = (adjacent(cached), elsewhere(misses));
    let ours = way.cache()?;
    null::get_put(&ours, &others, LENGTH)?;
    let theirs = peer::unlimited()?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&others, LENGTH))?;

    let mut our_turn = |_| nanoseconds_each(misses, || way.miss_all(&ours, &addresses));
    let mut their_turn = theirs.as_ref().map(|theirs| {
        let addresses = &addresses;
        move |_| nanoseconds_each(misses, || theirs.miss_destroy(addresses, LENGTH))
    });
    let peer = their_turn.as_mut().map(|turn| turn as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut our_turn, peer)?;
    all_gone(&ours, theirs.as_ref(), cached as u64)?;
    report.add("miss", json!({"cached": cached, "reclaim": way.name()}), "ns", comparison);
    Ok(())
}

fn miss_each(cache: &NullCache, addresses: &[u64]) -> Result<(), String> {
    for &address in addresses {
        let lease = null::get(cache, address, LENGTH).map_err(|error| error.to_string())?;
        std::hint::black_box(lease.handle());
        cache.invalidate(range(address)?);
        drop(lease);
    }
    Ok(())
}

fn wait_for_reclaimer(cache: &NullCache) {
    while {
        let statistics = cache.statistics();
        statistics.deregistrations < statistics.invalidations
    } {
        std::thread::yield_now();
    }
}

/// A side that left registrations behind was not measured to the end.
fn all_gone(ours: &NullCache, theirs: Option<&Ucx>, cached: u64) -> Result<(), String> {
    let left = ours.statistics().regions;
    if left != cached {
        return Err(format!("we hold {left} regions behind a miss bench, not {cached}"));
    }
    match theirs.map(Ucx::registered) {
        Some(left) if left != cached => {
            Err(format!("UCX holds {left} regions behind a miss bench, not {cached}"))
        }
        _ => Ok(()),
    }
}
