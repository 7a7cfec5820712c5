//! The probe on the real kernel: whatever the machine, it says what there is and what to do.

use crate::support::{object, pinfold, status};
use serde_json::Value;

fn names(parts: &Value) -> Vec<&str> {
    let parts = parts.as_array().expect("an array");
    parts.iter().map(|part| part["name"].as_str().expect("a name")).collect()
}

#[test]
fn the_probe_tells_what_there_is() {
    let output = pinfold(&["probe", "--json"]);
    let report = object(&output);
    assert_eq!(names(&report["monitors"]), ["ebpf", "userfaultfd", "hooks", "none"]);
    assert_eq!(names(&report["registrars"]), ["io_uring", "verbs", "verbs-on-demand", "mlock"]);
    assert!(report["limits"]["page_bytes"].as_u64().is_some_and(u64::is_power_of_two));
    assert!(report["advice"].is_array());
    let devices = report["rdma_devices"].as_array().expect("an array");
    let usable = devices.iter().filter(|device| device["max_regions"].is_u64()).count();
    let verbs = &report["registrars"][1];
    assert!(verbs["available"] == false || usable > 0, "{report:#}");
}

#[test]
fn what_is_missing_comes_with_advice() {
    let output = pinfold(&["probe", "--json"]);
    let report = object(&output);
    let advice = report["advice"].to_string();
    let kinds = ["monitors", "registrars"];
    let parts = kinds.iter().flat_map(|kind| report[kind].as_array().expect("an array"));
    for part in parts.filter(|part| part["available"] == false) {
        assert!(advice.contains(part["name"].as_str().expect("a name")), "{part}");
    }
    let all =
        report["monitors"][1]["available"] == true && report["registrars"][0]["available"] == true;
    assert!(!all || status(&output) == 0);
}

#[test]
fn an_available_monitor_says_what_it_covers() {
    let report = object(&pinfold(&["probe", "--json"]));
    if report["active"] == "none" {
        eprintln!("skipped: no monitor here: {}", report["monitors"]);
        return;
    }
    let coverage = report["coverage"].as_array().expect("an array");
    assert_eq!(coverage[0]["mapping"], "private anonymous");
    let claims = coverage[0]["changes"].as_array().expect("an array");
    let unmap = claims.iter().find(|claim| claim["change"] == "unmap").expect("a row for unmap");
    assert_eq!(unmap["cover"], "detected");
}

#[test]
fn every_bound_has_its_source() {
    let report = object(&pinfold(&["probe", "--json"]));
    let limits = &report["limits"];
    let bounds = limits["bounds"].as_array().expect("an array");
    for kind in ["io_uring", "verbs", "mlock"] {
        assert!(bounds.iter().any(|bound| bound["registrar"] == kind), "{limits:#}");
    }
    for bound in bounds {
        assert!(bound["bytes"].is_u64() && bound["source"].is_string(), "{bound}");
        assert!(bound["beyond"].is_string() && bound["shared_with"].is_string(), "{bound}");
    }
    for figure in limits["figures"].as_array().expect("an array") {
        assert!(figure["source"].is_string() && figure["shared_with"].is_string(), "{figure}");
    }
    assert!(limits["allocator"].is_string() && limits["mappings"].is_u64(), "{limits:#}");
}

#[test]
fn every_length_has_its_strategy_with_reasons() {
    let report = object(&pinfold(&["probe", "--json"]));
    let strategies = report["strategies"].as_array().expect("an array");
    for (bytes, reuse) in [(4096, "hot"), (4096, "cold"), (256 << 20, "hot"), (256 << 20, "cold")] {
        let mut known = strategies.iter();
        let known = known.find(|each| each["bytes"] == bytes && each["reuse"] == reuse);
        let known = known.expect("a row");
        let strategy = known["strategy"].as_str().expect("a strategy");
        let reasons = known["reasons"].as_array().expect("reasons");
        let about = reasons.iter().filter_map(Value::as_str);
        assert_eq!(about.filter(|each| each.starts_with(strategy)).count(), 1, "{known:#}");
    }
}
