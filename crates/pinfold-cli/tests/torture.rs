//! `pinfold torture` on this machine's kernel.

#![allow(clippy::unwrap_used)] // tests may fail loudly

mod support;

use serde_json::Value;
use support::{run, skipped};

fn sum(report: &Value, counter: &str) -> u64 {
    let caches = report["caches"].as_array().unwrap().iter();
    caches.map(|cache| cache[counter].as_u64().unwrap()).sum()
}

#[test]
fn no_byte_is_wrong() {
    let Some(outcome) = run(&["torture", "--seconds", "3", "--threads", "4", "--json"]) else {
        return;
    };
    let report = &outcome.report;
    assert_eq!(report["wrong"], 0, "{report:#}");
    assert_eq!(report["panics"], 0, "{report:#}");
    assert!(outcome.held && report["transfers"].as_u64() > Some(0), "{report:#}");
    if report["monitor"] == "none" {
        return skipped("no monitor here, so nothing is cached");
    }
    // Right data from a cache that was really used, and whose memory really changed.
    assert!(sum(report, "hits") > 0 && sum(report, "invalidations") > 0, "{report:#}");
}

/// Enough operations for each of them to have come up.
#[test]
fn pools_and_landing_take_part() {
    let arguments = ["torture", "--operations", "1200", "--seed", "3", "--json"];
    let Some(outcome) = run(&arguments) else { return };
    let report = &outcome.report;
    assert!(outcome.held && report["wrong"] == 0, "{report:#}");
    let pool = &report["pool"];
    assert!(pool["slabs_made"].as_u64() > Some(0), "{report:#}");
    for left in ["left_in_use_bytes", "left_registered_bytes", "lost_bytes", "refused_puts"] {
        assert_eq!(pool[left], 0, "{left}: {report:#}");
    }
    let landing = &report["landing"];
    assert!(landing["copied_bytes"].as_u64() > Some(0), "{report:#}");
    assert!(landing["exchanged_bytes"].as_u64() > Some(0), "{report:#}");
    if report["monitor"] != "none" {
        assert!(landing["target_changed"].as_u64() > Some(0), "{report:#}");
    }
}

#[test]
fn a_seed_replays_its_program() {
    let arguments =
        |seed| ["torture", "--operations", "40", "--threads", "2", "--json", "--seed", seed];
    let program = |seed| run(&arguments(seed)).map(|outcome| outcome.report["program"].clone());
    let Some(first) = program("11") else { return };
    assert_eq!(program("11"), Some(first.clone()));
    assert_ne!(program("12"), Some(first));
}

#[test]
fn as_many_operations_as_asked_for() {
    let Some(outcome) = run(&["torture", "--operations", "100", "--threads", "4", "--json"]) else {
        return;
    };
    assert_eq!(outcome.report["operations"], 100);
}

#[test]
fn a_naive_cache_is_found_out() {
    let arguments = ["torture", "--operations", "400", "--cache", "naive", "--seed", "5", "--json"];
    let Some(outcome) = run(&arguments) else { return };
    let report = &outcome.report;
    assert!(report["wrong"].as_u64() > Some(0) && !outcome.held, "{report:#}");
    // Also what lands in memory that has changed, and what is sent from pages that were exchanged.
    assert!(report["kinds"]["arrival, target changed"]["wrong"].as_u64() > Some(0), "{report:#}");
    let first = &report["wrong_transfers"][0];
    for key in ["thread", "step", "operation", "range", "first_wrong"] {
        assert!(!first[key].is_null(), "{key} is needed to run it again: {first:#}");
    }
}
