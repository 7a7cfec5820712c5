//! How much memory a region costs.
//!
//! Ours is what the allocator was asked for and still holds. UCX's is what the C library's heap
//! grew by, the heap's own bytes included, and what UCX mapped beside it.

use crate::Options;
use crate::allocator::bytes_kept_by;
use crate::null;
use crate::peer::{self, Ucx};
use crate::report::Report;
use crate::rounds::Comparison;
use crate::workload::{LENGTH, addresses};
use serde_json::json;

const REGIONS: usize = 100_000;

/// Regions that begin on a page, side by side; then ones that do not, with gaps, so that whole
/// pages of one do not touch the next.
pub(crate) fn run(_: Options, report: &mut Report) -> Result<(), String> {
    measure(report, 0, LENGTH as u64)?;
    measure(report, 100, 2 * LENGTH as u64)
}

fn measure(report: &mut Report, offset: u64, stride: u64) -> Result<(), String> {
    let addresses: Vec<u64> =
        addresses(REGIONS, stride).iter().map(|address| address + offset).collect();
    let value = ours(&addresses)?;
    let peer_value = theirs(&addresses)?;
    let ratio = peer_value.map(|peer| value / peer);
    let params = json!({"regions": REGIONS, "offset": offset, "stride": stride});
    report.add("memory", params, "bytes", Comparison { value, peer_value, ratio });
    Ok(())
}

/// Bytes for each region of ours.
fn ours(addresses: &[u64]) -> Result<f64, String> {
    let (bytes, cache) = bytes_kept_by(|| {
        let cache = null::unlimited()?;
        null::get_put(&cache, addresses, LENGTH)?;
        Ok::<_, String>(cache)
    });
    drop(cache?);
    Ok(bytes as f64 / REGIONS as f64)
}

/// Bytes for each region of the peer's.
fn theirs(addresses: &[u64]) -> Result<Option<f64>, String> {
    let before = Ucx::memory()?;
    let Some(cache) = peer::unlimited()? else { return Ok(None) };
    cache.get_put(addresses, LENGTH)?;
    let bytes = Ucx::memory()? - before;
    Ok(Some(bytes as f64 / REGIONS as f64))
}
