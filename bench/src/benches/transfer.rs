//! Transfers through the real embedded device (io_uring) out of one buffer, over and over: the cache
//! as it comes, one message at a time, compared with memory that was registered beforehand.
//!
//! The measure is the command's own; `pinfold bench transfer` has the other strategies, several
//! messages behind one check, and long messages in one piece.

use crate::Options;
use crate::report::Report;
use crate::rounds::Comparison;
use pinfold_cli::Failure;
use pinfold_cli::transfer::{self, PINFOLD, PREREGISTERED, Scope, Throughput};
use serde_json::json;

/// Rounds of a transfer are short, so there are more of them.
const MORE: usize = 2;

/// One figure for each size.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let rounds = if options.quick { options.rounds } else { options.rounds * MORE };
    let rounds = u32::try_from(rounds).unwrap_or(u32::MAX);
    match transfer::measure(Scope::EachSizeOnce, rounds, &|| {}) {
        Ok(rows) => rows.iter().for_each(|row| enter(report, row)),
        Err(Failure::Unavailable(why)) => report.remark(&format!("skipped: transfer: {why}")),
        Err(failure) => return Err(failure.to_string()),
    }
    Ok(())
}

fn enter(report: &mut Report, row: &Throughput) {
    if row.strategy == PINFOLD {
        let comparison = Comparison {
            value: row.gib_per_s,
            peer_value: Some(row.preregistered_gib_per_s),
            ratio: Some(row.ratio),
        };
        let params = json!({"bytes": row.bytes});
        report.add_against(PREREGISTERED, "transfer", params, "GiB/s", comparison);
    }
}
