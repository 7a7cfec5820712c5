//! Transfers through the real embedded device (io_uring) out of one buffer, over and over: ours
//! beside memory that was registered beforehand. The measure is the command's own
//! (`pinfold bench transfer`).
//!
//! `transfer` is the cache as it comes, one message at a time, and has one entry for each size.
//! Everything else has a name of its own.

use crate::Options;
use crate::report::Report;
use crate::rounds::Comparison;
use pinfold_cli::Failure;
use pinfold_cli::transfer::{self, COPY, ONE_PIECE, PER_USE, PINFOLD, PREREGISTERED, Throughput};
use serde_json::json;

/// Rounds of a transfer are short, so there are more of them.
const MORE: usize = 5;

/// One figure for each strategy and size.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let rounds = u32::try_from(options.rounds * MORE).unwrap_or(u32::MAX);
    match transfer::measure(rounds, &|| {}) {
        Ok(rows) => rows.iter().for_each(|row| enter(report, row)),
        Err(Failure::Unavailable(why)) => report.remark(&format!("skipped: transfer: {why}")),
        Err(failure) => return Err(failure.to_string()),
    }
    Ok(())
}

/// What a strategy's figures are called; `None` for the one that all are compared with.
fn name(row: &Throughput) -> Option<&'static str> {
    Some(match (row.strategy, row.batch) {
        (PREREGISTERED, _) => return None,
        (PINFOLD, 1) => "transfer",
        (PINFOLD, _) => "transfer, a check for several",
        (ONE_PIECE, _) => "transfer, in one piece",
        (COPY, _) => "transfer, copied",
        (PER_USE, _) => "transfer, registered each time",
        (other, _) => other,
    })
}

fn enter(report: &mut Report, row: &Throughput) {
    let Some(name) = name(row) else { return };
    let Throughput { strategy, bytes, batch, .. } = *row;
    let params = json!({"bytes": bytes, "batch": batch, "strategy": strategy});
    let comparison = Comparison {
        value: row.gib_per_s,
        peer_value: Some(row.preregistered_gib_per_s),
        ratio: Some(row.ratio),
    };
    report.add_against(PREREGISTERED, name, params, "GiB/s", comparison);
}
