//! What a hit costs: get, a look at the handle, release, in random order.

use crate::Options;
use crate::report::Report;
use crate::rounds::{Round, compare, nanoseconds_each};
use crate::workload::{LENGTH, adjacent, random_order};
use crate::{null, peer};
use serde_json::json;

/// The sizes of the cache.
const REGIONS: [usize; 4] = [1, 1_000, 100_000, 1_000_000];
/// Accesses in a round.
const ACCESSES: usize = 200_000;

/// One figure for each size.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    REGIONS.into_iter().try_for_each(|regions| measure(options, report, regions))
}

fn measure(options: Options, report: &mut Report, regions: usize) -> Result<(), String> {
    let addresses = adjacent(regions);
    // Every region is asked for now and then, in an order that no cache of the processor knows.
    let mut random = options.random();
    let orders: Vec<Vec<u64>> =
        (0..3).map(|_| random_order(&addresses, ACCESSES, &mut random)).collect();
    let mut orders = orders.iter().cycle();

    let ours = null::unlimited()?;
    null::get_put(&ours, &addresses, LENGTH)?;
    let theirs = peer::unlimited()?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&addresses, LENGTH))?;

    let comparison = compare(options.rounds, || {
        let order = orders.next().ok_or("no order")?;
        let ours = nanoseconds_each(ACCESSES, || null::get_put(&ours, order, LENGTH))?;
        let peer = theirs
            .as_ref()
            .map(|theirs| nanoseconds_each(ACCESSES, || theirs.get_put(order, LENGTH)));
        Ok(Round { ours, peer: peer.transpose()? })
    })?;
    let params = json!({"regions": regions, "region_bytes": LENGTH, "seed": options.seed});
    report.add("hit", params, "ns", comparison);
    Ok(())
}
