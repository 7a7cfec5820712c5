//! Two threads on two processors as a multiple of one, and what limits cost a hit.

use super::hit::all_hits;
use crate::Options;
use crate::machine;
use crate::null::{self, NullCache};
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::{Station, Turn, compare, nanoseconds_each, throughput};
use crate::workload::{LENGTH, adjacent, random_order};
use serde_json::json;
use std::time::Duration;

const REGIONS: [usize; 2] = [1, 1_000];
/// How long each measurement of a round lasts: short, so that on a machine where others run too
/// most rounds are left alone.
const WINDOW: Duration = Duration::from_millis(3);
/// Accesses in an order.
const ACCESSES: usize = 100_000;

/// Scaling for each size, then with limits, then what limits cost one thread.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    match *machine::processors()? {
        [first, second, ..] => two_threads(options, report, [first, second])?,
        _ => report.remark("skipped: scaling: one processor only"),
    }
    limits(options, report, 1_000)
}

fn two_threads(
    options: Options,
    report: &mut Report,
    processors: [usize; 2],
) -> Result<(), String> {
    let [first, second] = processors;
    report.remark(&match machine::share_a_core(first, second) {
        Some(true) => format!("processors {first} and {second} are threads of one core"),
        Some(false) => format!("processors {first} and {second} are cores, says the kernel"),
        None => format!("processors {first} and {second}: the kernel does not say of which cores"),
    });
    for regions in REGIONS {
        let pair = (null::unlimited()?, peer::unlimited()?);
        scaling(options, report, "scaling", processors, regions, &pair)?;
    }
    // As many as are there, so that both sides do whatever they do at their limit.
    let (regions, bytes) = (1_000, 1_000 * LENGTH);
    let pair = (null::limited(regions, bytes)?, Ucx::open(regions as u64, bytes as u64)?);
    scaling(options, report, "scaling at the limits", processors, regions, &pair)
}

/// How much more two threads together do than one alone.
fn scaling(
    options: Options,
    report: &mut Report,
    name: &'static str,
    processors: [usize; 2],
    regions: usize,
    (ours, theirs): &(NullCache, Option<Ucx>),
) -> Result<(), String> {
    let addresses = adjacent(regions);
    let mut random = options.random();
    let orders = [(); 2].map(|()| random_order(&addresses, ACCESSES, &mut random));
    let stations = [(processors[0], &orders[0][..]), (processors[1], &orders[1][..])];
    null::get_put(ours, &addresses, LENGTH)?;
    theirs.as_ref().map_or(Ok(()), |theirs| theirs.get_put(&addresses, LENGTH))?;

    let window = options.window(WINDOW);
    let mut our_turn = |_| multiple(&stations, window, &|some| null::get_put(ours, some, LENGTH));
    let mut their_turn = theirs
        .as_ref()
        .map(|theirs| move |_| multiple(&stations, window, &|some| theirs.get_put(some, LENGTH)));
    let peer = their_turn.as_mut().map(|turn| turn as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut our_turn, peer)?;
    all_hits(ours.statistics().registrations, regions)?;
    let [first, second] = processors;
    let params = json!({
        "threads": stations.len(), "regions": regions, "processors": processors,
        "one_core": machine::share_a_core(first, second), "seed": options.seed,
    });
    report.add(name, params, "x", comparison);
    Ok(())
}

/// Two threads together, between one alone on the first processor and one alone on the second: so
/// neither a slower processor nor one that slows down looks like scaling.
pub(super) fn multiple(
    stations: &[Station<'_>; 2],
    window: Duration,
    work: &(impl Fn(&[u64]) -> Result<(), String> + Sync),
) -> Result<f64, String> {
    let first = throughput(&stations[..1], window, work)?;
    let together = throughput(stations, window, work)?;
    let second = throughput(&stations[1..], window, work)?;
    Ok(together / ((first + second) / 2.0))
}

/// A cache that is exactly full compared with one that is not bounded: ours, then the peer's.
fn limits(options: Options, report: &mut Report, regions: usize) -> Result<(), String> {
    let addresses = adjacent(regions);
    let accesses = options.scaled(ACCESSES);
    let order = random_order(&addresses, accesses, &mut options.random());
    let bytes = regions * LENGTH;
    let params = |of: &str| json!({"of": of, "regions": regions, "seed": options.seed});

    let (bounded, unbounded) = (null::limited(regions, bytes)?, null::unlimited()?);
    null::get_put(&bounded, &addresses, LENGTH)?;
    null::get_put(&unbounded, &addresses, LENGTH)?;
    let comparison = compare(
        options.rounds,
        &mut |_| nanoseconds_each(accesses, || null::get_put(&bounded, &order, LENGTH)),
        Some(&mut |_| nanoseconds_each(accesses, || null::get_put(&unbounded, &order, LENGTH))),
    )?;
    report.add_against("limits off", "limits", params("pinfold"), "ns", comparison);

    let peers = (Ucx::open(regions as u64, bytes as u64)?, peer::unlimited()?);
    let (Some(bounded), Some(unbounded)) = peers else { return Ok(()) };
    bounded.get_put(&addresses, LENGTH)?;
    unbounded.get_put(&addresses, LENGTH)?;
    let comparison = compare(
        options.rounds,
        &mut |_| nanoseconds_each(accesses, || bounded.get_put(&order, LENGTH)),
        Some(&mut |_| nanoseconds_each(accesses, || unbounded.get_put(&order, LENGTH))),
    )?;
    report.add_against("limits off", "limits", params(peer::NAME), "ns", comparison);
    Ok(())
}
