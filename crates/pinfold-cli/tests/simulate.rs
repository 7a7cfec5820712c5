//! `pinfold simulate`: a bounded run, its seeds, and proof that it can fail.

#![allow(clippy::unwrap_used)] // tests may fail loudly

mod support;

use serde_json::Value;
use std::process::Command;
use support::run;

fn simulated(arguments: &[&str]) -> (bool, Value) {
    let outcome = run(&[&["simulate", "--json"], arguments].concat()).unwrap();
    (outcome.held, outcome.report)
}

const FINDINGS: [&str; 6] =
    ["wrong", "lost_completions", "covert_reconnects", "stuck", "leaked", "untold"];

#[test]
fn nothing_is_found_where_nothing_is_defective() {
    let (held, report) = simulated(&["--steps", "200000"]);
    assert!(held && report["seed"].is_u64() && report["steps"] == 200_000, "{report:#}");
    assert!(FINDINGS.iter().all(|finding| report[finding] == 0), "{report:#}");
    assert!(report["happened"]["suspensions_resumed"].as_u64() > Some(0), "{report:#}");
}

#[test]
fn a_seed_runs_the_same_again() {
    let happened = |seed| simulated(&["--steps", "40000", "--seed", seed]).1["happened"].clone();
    assert_eq!(happened("11"), happened("11"));
    assert_ne!(happened("11"), happened("12"));
}

#[test]
fn faults_can_be_chosen() {
    let calm = simulated(&["--steps", "40000", "--seed", "3", "--no-faults"]).1;
    assert_eq!(calm["happened"]["connections_ended"].as_u64().map(|ended| ended < 20), Some(true));
    let (held, report) = simulated(&["--steps", "40000", "--fault", "network"]);
    assert!(held && report["faults"] == serde_json::json!(["network"]), "{report:#}");
}

#[test]
fn a_defect_is_found_and_what_is_printed_finds_it_again() {
    let defect = ["--mutant", "old-translation", "--steps", "400000", "--seed", "7"];
    let some = ["--fault", "network", "--fault", "slow-registration"];
    for faults in [&[][..], &["--no-faults"], &some] {
        let (held, report) = simulated(&[&defect[..], faults].concat());
        assert!(!held && report["wrong"].as_u64() > Some(0), "{report:#}");
        let first = &report["first"];
        let again: Vec<&str> = first["options"].as_str().unwrap().split(' ').collect();
        assert_eq!(simulated(&again).1["first"], *first, "{faults:?}");
    }
}

#[test]
fn questions_of_scale_are_answered_for_every_policy_and_number_of_peers() {
    let file = |what: &str| {
        std::env::temp_dir().join(format!("pinfold-{what}-{}.svg", std::process::id()))
    };
    let (busy, pause) = (file("busy"), file("pause"));
    let few = ["--scale", "--peers", "4,40", "--transfers", "400", "--seed", "1"];
    let plotted = ["--svg", busy.to_str().unwrap(), "--pause-svg", pause.to_str().unwrap()];
    let (held, report) = simulated(&[&few[..], &plotted].concat());
    for (file, own, other) in
        [(busy, "cached in budget", "all connections"), (pause, "all connections", "cached")]
    {
        let picture = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains(own) && !picture.contains(other));
    }
    let (scale, suspensions) = (&report["scale"], &report["suspensions"]);
    let lengths = [scale, suspensions].map(|rows| rows.as_array().unwrap().len());
    assert!(held && lengths == [2 * 6, 2 * 2], "{report:#}");
    assert_eq!(simulated(&few).1["scale"], *scale);
    let dear = simulated(&[&few[..], &["--cost", "hit=100"]].concat()).1;
    let cached = |report: &Value| report["scale"][3]["cpu_us"].as_f64().unwrap();
    assert!(cached(&dear) > cached(&report) + 50.0, "{dear:#}");
}

#[test]
fn questions_of_scale_that_make_no_sense_are_refused() {
    let status = |arguments: &[&str]| {
        let command = Command::new(env!("CARGO_BIN_EXE_pinfold")).args(arguments).output();
        command.unwrap().status.code()
    };
    for wrong in [
        &["--scale", "--peers", "10001"][..],
        &["--scale", "--cost", "rent=1"],
        &["--scale", "--message-kib", "5"],
        &["--scale", "--steps", "1"],
        &["--peers", "10"],
    ] {
        assert_eq!(status(&[&["simulate", "--json"], wrong].concat()), Some(2), "{wrong:?}");
    }
}
