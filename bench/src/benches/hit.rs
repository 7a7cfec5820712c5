//! What a hit costs: get, a look at the handle, release, in random order; and what the loop around
//! it costs on either side.

use crate::Options;
use crate::null;
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::{Turn, compare, nanoseconds_each};
use crate::workload::{LENGTH, adjacent, random_order};
use serde_json::json;

/// The sizes of the cache.
const REGIONS: [usize; 4] = [1, 1_000, 100_000, 1_000_000];
/// Accesses in a round.
const ACCESSES: usize = 200_000;
/// How many orders there are: rounds that follow each other go different ways.
const ORDERS: usize = 3;

/// One figure for each size.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let sizes = REGIONS.into_iter().filter(|&regions| options.can_fill(regions));
    sizes.into_iter().try_for_each(|regions| measure(options, report, regions))?;
    the_loop(options, report)
}

fn measure(options: Options, report: &mut Report, regions: usize) -> Result<(), String> {
    let addresses = adjacent(regions);
    let accesses = options.scaled(ACCESSES);
    // Every region is asked for now and then, in an order that no cache of the processor knows.
    let mut random = options.random();
    let orders: Vec<Vec<u64>> =
        (0..ORDERS).map(|_| random_order(&addresses, accesses, &mut random)).collect();
    let order = |round: usize| &orders[round % ORDERS][..];

    let cache = null::unlimited()?;
    null::get_put(&cache, &addresses, LENGTH)?;
    let theirs = peer::unlimited()?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&addresses, LENGTH))?;

    let mut ours =
        |round| nanoseconds_each(accesses, || null::get_put(&cache, order(round), LENGTH));
    let mut theirs = theirs.as_ref().map(|theirs| {
        move |round| nanoseconds_each(accesses, || theirs.get_put(order(round), LENGTH))
    });
    let peer = theirs.as_mut().map(|theirs| theirs as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut ours, peer)?;
    all_hits(cache.statistics().registrations, regions)?;
    let params = json!({"regions": regions, "region_bytes": LENGTH, "seed": options.seed});
    report.add("hit", params, "ns", comparison);
    Ok(())
}

/// More registrations than regions mean that something else was measured.
pub(crate) fn all_hits(registrations: u64, regions: usize) -> Result<(), String> {
    match registrations {
        count if count == regions as u64 => Ok(()),
        count => Err(format!("{count} registrations of {regions} regions: not all were hits")),
    }
}

/// The measuring loops with no cache in them: what of the figures above is theirs.
fn the_loop(options: Options, report: &mut Report) -> Result<(), String> {
    let accesses = options.scaled(ACCESSES);
    let order = random_order(&adjacent(1_000), accesses, &mut options.random());
    let mut ours = |_| nanoseconds_each(accesses, || null::walk(&order));
    let mut theirs = |_| nanoseconds_each(accesses, || Ucx::walk(&order));
    let peer = peer::PRESENT.then_some(&mut theirs as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut ours, peer)?;
    report.add(
        "measuring loop",
        json!({"accesses": accesses, "seed": options.seed}),
        "ns",
        comparison,
    );
    Ok(())
}
