//! How often a cache that is too small hits, compared with exact least recent use and with one that knows
//! the future.

use crate::Options;
use crate::models;
use crate::null;
use crate::report::Report;
use crate::rounds::Comparison;
use crate::traces::{Region, Trace};
use crate::workload::{LENGTH, elsewhere};
use serde_json::json;

/// How many regions fit.
const CAPACITY: Region = 1_000;
/// Accesses in a trace.
const ACCESSES: usize = 400_000;

/// Two figures for each trace.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    Trace::ALL.into_iter().try_for_each(|trace| measure(options, report, trace))
}

fn measure(options: Options, report: &mut Report, kind: Trace) -> Result<(), String> {
    // Long enough for every kind to show its nature.
    let capacity = if options.quick { CAPACITY / 50 } else { CAPACITY };
    let accesses = if options.quick { ACCESSES / 50 } else { ACCESSES };
    let trace = kind.make(capacity, accesses, &mut options.random());
    let share = |hits: usize| hits as f64 / trace.len() as f64;
    let ours = share(hits(&trace, capacity as usize)?);
    let params = json!({
        "trace": kind.name(), "capacity": capacity, "accesses": accesses, "seed": options.seed,
    });
    let mut enter = |peer, model: fn(&[Region], usize) -> usize| {
        let comparison = Comparison::of(ours, Some(share(model(&trace, capacity as usize))));
        report.add_against(peer, "eviction", params.clone(), "hits per get", comparison);
    };
    enter("lru", models::least_recent);
    enter("optimum", models::optimum);
    Ok(())
}

/// The hits of the real cache.
fn hits(trace: &[Region], capacity: usize) -> Result<usize, String> {
    let cache = null::limited(capacity, usize::MAX >> 1)?;
    let regions = trace.iter().max().map_or(0, |&last| last as usize + 1);
    let addresses = elsewhere(regions);
    trace.iter().try_for_each(|&region| {
        null::get_put(&cache, &addresses[region as usize..][..1], LENGTH)
    })?;
    let statistics = cache.statistics();
    match statistics.gets {
        gets if gets == trace.len() as u64 => {
            usize::try_from(statistics.hits).map_err(|error| error.to_string())
        }
        gets => Err(format!("{gets} gets for {} accesses", trace.len())),
    }
}
