//! What it costs, and saves, to have the allocator keep memory: a program with irregular demand
//! ([`demand`](crate::demand)), once for each allocator and each policy.

use crate::Options;
use crate::demand::{self, Figures, Policy};
use crate::report::Report;
use crate::ring;
use crate::rounds::Comparison;
use serde_json::json;

/// The allocators, and what has to stand before libc for each.
const ALLOCATORS: [(&str, Option<&str>); 3] = [
    ("glibc", None),
    ("jemalloc", Some("libjemalloc.so.2")),
    ("mimalloc", Some("libmimalloc.so.2")),
];

/// One entry for each figure of each allocator that there is.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if report.is_skipped("allocator", ring::missing()) {
        return Ok(());
    }
    for (name, library) in ALLOCATORS {
        let run = |policy| demand::run(library, policy, options.seed, options.rest);
        let default = run(Policy::Default)?;
        if default.allocator != name {
            report.remark(&format!("skipped: allocator: {name} is not installed here"));
            continue;
        }
        let kept = run(Policy::Kept)?;
        if !kept.settings.is_empty() {
            report.remark(&kept.settings);
        }
        enter(report, name, &kept, &default);
    }
    Ok(())
}

fn enter(report: &mut Report, allocator: &str, kept: &Figures, default: &Figures) {
    for ((figure, value, unit), (_, before, _)) in values(kept).into_iter().zip(values(default)) {
        let params = json!({ "allocator": allocator, "figure": figure });
        let comparison = Comparison::of(value, Some(before));
        report.add_against("default", "allocator", params, unit, comparison);
    }
}

/// Each figure with its name and unit.
fn values(of: &Figures) -> [(&'static str, f64, &'static str); 10] {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    [
        ("demand_peak", mib(of.demand_peak), "MiB"),
        ("resident_peak", mib(of.resident_peak), "MiB"),
        ("resident_end", mib(of.resident_end), "MiB"),
        ("pinned_peak", mib(of.pinned_peak), "MiB"),
        ("pinned_end", mib(of.pinned_end), "MiB"),
        ("budget", mib(of.budget), "MiB"),
        ("registrations", of.registrations as f64, "registrations"),
        ("hits", of.hits as f64, "gets"),
        ("invalidations", of.invalidations as f64, "regions"),
        ("seconds", of.seconds, "s"),
    ]
}
