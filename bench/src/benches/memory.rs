//! How much memory a region costs: what this process uses more for it, the same way for both sides,
//! a cache with its first region being there already.

use crate::Options;
use crate::machine;
use crate::null;
use crate::peer;
use crate::report::Report;
use crate::rounds::Comparison;
use crate::workload::{LENGTH, addresses};
use serde_json::json;

const REGIONS: usize = 100_000;

/// Regions that begin on a page, side by side; then ones that do not, with gaps, so that whole
/// pages of one do not touch the next.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if let Err(why) = machine::memory_used() {
        report.remark(&format!("skipped: memory: {why}"));
        return Ok(());
    }
    measure(options, report, 0, LENGTH as u64)?;
    measure(options, report, 100, 2 * LENGTH as u64)
}

fn measure(options: Options, report: &mut Report, offset: u64, stride: u64) -> Result<(), String> {
    let regions = options.scaled(REGIONS);
    let addresses: Vec<u64> =
        addresses(regions, stride).iter().map(|address| address + offset).collect();
    let ours = null::unlimited()?;
    let value = bytes_each(&addresses, |some| null::get_put(&ours, some, LENGTH))?;
    let theirs = peer::unlimited()?
        .map(|theirs| bytes_each(&addresses, |some| theirs.get_put(some, LENGTH)))
        .transpose()?;
    let params = json!({
        "regions": regions, "aligned": offset == 0, "offset": offset, "stride": stride,
    });
    report.add("memory", params, "bytes", Comparison::of(value, theirs));
    Ok(())
}

/// What each region costs of those that `get_put` makes behind the first.
fn bytes_each(
    addresses: &[u64],
    get_put: impl Fn(&[u64]) -> Result<(), String>,
) -> Result<f64, String> {
    let (first, rest) = addresses.split_at(1);
    get_put(first)?;
    let before = machine::memory_used()?;
    get_put(rest)?;
    Ok((machine::memory_used()? - before) / rest.len() as f64)
}
