//! Two threads as a multiple of one, and what limits cost a hit.

use crate::Options;
use crate::null::{self, NullCache};
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::{Round, compare, nanoseconds_each, throughput};
use crate::workload::{LENGTH, adjacent, random_order};
use serde_json::json;
use std::time::Duration;

const REGIONS: [usize; 2] = [1, 1_000];
const THREADS: usize = 2;
/// How long each measurement of a round lasts.
const WINDOW: Duration = Duration::from_millis(40);
/// Accesses in an order.
const ACCESSES: usize = 100_000;

/// Scaling for each size, then limits.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    REGIONS.into_iter().try_for_each(|regions| scaling(options, report, regions))?;
    limits(options, report, 1_000)
}

/// How much more two threads together do than one alone.
fn scaling(options: Options, report: &mut Report, regions: usize) -> Result<(), String> {
    let addresses = adjacent(regions);
    let mut random = options.random();
    let orders: Vec<Vec<u64>> =
        (0..THREADS).map(|_| random_order(&addresses, ACCESSES, &mut random)).collect();
    let (ours, theirs) = (null::unlimited()?, peer::unlimited()?);
    fill(&ours, theirs.as_ref(), &addresses)?;
    let comparison = compare(options.rounds, || {
        let ours = multiple(&orders, &|order| null::get_put(&ours, order, LENGTH))?;
        let theirs = theirs.as_ref();
        let peer = theirs.map(|theirs| multiple(&orders, &|order| theirs.get_put(order, LENGTH)));
        Ok(Round { ours, peer: peer.transpose()? })
    })?;
    let params = json!({"threads": THREADS, "regions": regions, "seed": options.seed});
    report.add("scaling", params, "x", comparison);
    Ok(())
}

fn multiple(
    orders: &[Vec<u64>],
    work: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<f64, String> {
    let alone = throughput(&orders[..1], WINDOW, work)?;
    Ok(throughput(orders, WINDOW, work)? / alone)
}

/// A cache that is exactly full beside one that is not bounded: ours, then the peer's.
fn limits(options: Options, report: &mut Report, regions: usize) -> Result<(), String> {
    let addresses = adjacent(regions);
    let order = random_order(&addresses, ACCESSES, &mut options.random());
    let bytes = regions * LENGTH;
    let params = |of: &str| json!({"of": of, "regions": regions, "seed": options.seed});

    let (bounded, unbounded) = (null::limited(regions, bytes)?, null::unlimited()?);
    fill(&bounded, None, &addresses)?;
    fill(&unbounded, None, &addresses)?;
    let comparison = compare(options.rounds, || {
        let ours = nanoseconds_each(ACCESSES, || null::get_put(&bounded, &order, LENGTH))?;
        let peer = nanoseconds_each(ACCESSES, || null::get_put(&unbounded, &order, LENGTH))?;
        Ok(Round { ours, peer: Some(peer) })
    })?;
    report.add_against("limits off", "limits", params("pinfold"), "ns", comparison);

    let peers = (Ucx::open(regions as u64, bytes as u64)?, peer::unlimited()?);
    let (Some(bounded), Some(unbounded)) = peers else { return Ok(()) };
    bounded.get_put(&addresses, LENGTH)?;
    unbounded.get_put(&addresses, LENGTH)?;
    let comparison = compare(options.rounds, || {
        let ours = nanoseconds_each(ACCESSES, || bounded.get_put(&order, LENGTH))?;
        let peer = nanoseconds_each(ACCESSES, || unbounded.get_put(&order, LENGTH))?;
        Ok(Round { ours, peer: Some(peer) })
    })?;
    report.add_against("limits off", "limits", params(peer::NAME), "ns", comparison);
    Ok(())
}

fn fill(ours: &NullCache, theirs: Option<&Ucx>, addresses: &[u64]) -> Result<(), String> {
    null::get_put(ours, addresses, LENGTH)?;
    theirs.map_or(Ok(()), |theirs| theirs.get_put(addresses, LENGTH))
}
