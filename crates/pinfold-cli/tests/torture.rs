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

/// Discards stay unproved as long as a thread spins: right data all the same, and from a cache that is used.
#[test]
fn no_byte_is_wrong_with_a_thread_that_never_sleeps() {
    let arguments = ["torture", "--seconds", "3", "--threads", "2", "--spin", "--json"];
    let Some(outcome) = run(&arguments) else { return };
    let report = &outcome.report;
    assert!(outcome.held && report["wrong"] == 0, "{report:#}");
    if report["monitor"] == "none" {
        return skipped("no monitor here, so nothing is cached");
    }
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

/// Bytes that happen to be right hide nothing from who looks at the pages.
#[test]
fn an_audit_finds_pages_that_left_and_none_where_none_did() {
    let arguments = ["torture", "--operations", "400", "--audit", "--seed", "5", "--json"];
    let Some(outcome) = run(&arguments) else { return };
    let report = &outcome.report;
    assert!(outcome.held && report["wrong"] == 0, "{report:#}");
    assert!(report["audit"]["pages"].as_u64() > Some(0), "{report:#}");
    assert_eq!(report["audit"]["swept_parted"], 0, "{report:#}");
    if report["monitor"] != "none" {
        assert!(report["audit"]["swept_registrations"].as_u64() > Some(0), "{report:#}");
    }
    let Some(outcome) = run(&[&arguments[..], &["--cache", "naive"]].concat()) else { return };
    let wrong = outcome.report["wrong_transfers"].as_array().unwrap();
    let parted = |wrong: &Value| wrong["note"].as_str().unwrap().contains("another page");
    assert!(!outcome.held && wrong.iter().any(parted), "{:#}", outcome.report);
    // Also those that no transfer has used again.
    assert!(outcome.report["audit"]["swept_parted"].as_u64() > Some(0), "{:#}", outcome.report);
}

#[test]
fn a_trial_that_dies_is_reported() {
    use std::process::{Command, Stdio};
    let children_of = |id: u32| std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
    if children_of(std::process::id()).is_err() {
        return skipped("the kernel does not list children");
    }
    let command = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["torture", "--seconds", "600", "--threads", "3", "--seed", "7", "--json"])
        .stdout(Stdio::piped())
        .spawn();
    let supervisor = command.unwrap();
    let trial = loop {
        match children_of(supervisor.id()).unwrap().split_whitespace().next() {
            Some(trial) => break trial.to_owned(),
            None => std::thread::yield_now(),
        }
    };
    assert!(Command::new("kill").args(["-ABRT", &trial]).status().unwrap().success());
    let output = supervisor.wait_with_output().unwrap();
    if output.status.code() == Some(77) {
        return skipped("no torture here");
    }
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{report:#}");
    assert_eq!(report["seed"], 7);
    assert_eq!(report["lost"]["how"], "SIGABRT", "{report:#}");
    assert_eq!(report["lost"]["threads"].as_array().unwrap().len(), 3);
    for key in ["operations", "transfers", "wrong"] {
        assert!(report[key].is_u64(), "{key}: {report:#}");
    }
}
