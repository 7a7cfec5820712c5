//! `pinfold events` on this machine's kernel.

#![allow(clippy::unwrap_used)] // tests may fail loudly

mod support;

use serde_json::Value;
use support::{run, skipped};

/// The pairs of change and mapping that got `verdict`.
fn rows<'r>(report: &'r Value, verdict: &str) -> Vec<(&'r str, &'r str)> {
    let text = |event: &'r Value, key: &str| event[key].as_str().unwrap();
    let events = report["events"].as_array().unwrap().iter();
    let those = events.filter(|event| event["verdict"] == verdict);
    those.map(|event| (text(event, "event"), text(event, "mapping"))).collect()
}

/// What the kernel does not report to a userfaultfd: docs/src/monitors.md lists it.
fn is_unreported(event: &str) -> bool {
    event.contains("MADV_GUARD_INSTALL") || event.contains("shmat(SHM_REMAP)")
}

#[test]
fn nothing_is_stale_and_only_the_unreported_is_blind() {
    judge(&["events", "--json"]);
}

/// Real RDMA: the same verdicts.
#[test]
fn nothing_is_stale_by_rdma() {
    judge(&["events", "--json", "--registrar", "verbs"]);
}

fn judge(arguments: &[&str]) {
    let Some(outcome) = run(arguments) else { return };
    let report = &outcome.report;
    assert_eq!(rows(report, "stale"), [], "{report:#}");
    for (event, mapping) in rows(report, "blind") {
        assert!(is_unreported(event), "{event} on {mapping}");
    }
    assert!(outcome.held);
    if report["monitor"] == "none" {
        return skipped("no monitor here, so nothing is cached");
    }
    let fresh = rows(report, "fresh");
    for event in ["munmap", "mmap(MAP_FIXED) over", "MADV_DONTNEED", "mremap, moved away"] {
        assert!(fresh.contains(&(event, "anonymous")), "{event} was not seen: {report:#}");
    }
}

/// With hooks nothing is wrong that comes through the C library.
#[test]
fn hooks_tell_what_comes_through_the_c_library() {
    let Some(outcome) = run(&["events", "--json", "--monitor", "userfaultfd+hooks"]) else {
        return;
    };
    let report = &outcome.report;
    assert_eq!(report["monitor"], "userfaultfd+hooks");
    assert_eq!(rows(report, "stale"), [], "{report:#}");
    for (event, mapping) in rows(report, "blind") {
        let by_library = event == "MADV_GUARD_INSTALL and _REMOVE" || event.ends_with(") on top");
        assert!(is_unreported(event) && !by_library, "{event} on {mapping}");
    }
}

/// Without a monitor nothing is cached, so nothing is wrong.
#[test]
fn nothing_is_cached_without_a_monitor() {
    let Some(outcome) = run(&["events", "--json", "--monitor", "none"]) else { return };
    for verdict in ["fresh", "blind", "stale"] {
        assert_eq!(rows(&outcome.report, verdict), [], "{:#}", outcome.report);
    }
    assert!(outcome.held);
}

/// Those with two threads meet the moment in nearly every run, on a machine that does nothing else: three
/// runs are enough anywhere.
#[test]
fn a_naive_cache_is_found_out() {
    let mut unnoticed = vec![
        "munmap",
        "munmap, raw system call",
        "mremap(MREMAP_FIXED) on top",
        "MADV_DONTNEED",
        "address reused by another thread while munmap is under way",
        "discarded while being registered",
        "half discarded while the other half is in use",
        "used in a forked child",
    ];
    for _ in 0..3 {
        let Some(outcome) = run(&["events", "--json", "--cache", "naive"]) else { return };
        let stale = rows(&outcome.report, "stale");
        unnoticed.retain(|event| !stale.contains(&(event, "anonymous")));
        assert!(!stale.contains(&("mprotect", "anonymous")), "mprotect takes no page away");
        assert!(!outcome.held);
        if unnoticed.is_empty() {
            return;
        }
    }
    panic!("{unnoticed:?} went unnoticed");
}
