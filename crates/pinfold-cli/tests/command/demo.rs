//! The demo on the real kernel: the naive cache sends wrong data, and no other does.

use crate::support::{object, pinfold, status, unavailable};
use serde_json::Value;
use std::io::Write;

const NAMES: [&str; 5] = ["uncached", "naive", "copy", "preregistered", "pinfold"];

/// Real RDMA: the same verdicts.
#[test]
fn only_the_naive_cache_sends_wrong_data_by_rdma() {
    let output = pinfold(&[
        "demo",
        "--json",
        "--registrar",
        "verbs",
        "--messages",
        "100",
        "--size",
        "65536",
    ]);
    if unavailable(&output) {
        return;
    }
    let report = object(&output);
    assert_eq!(report["registrar"], "verbs");
    for name in NAMES {
        let row = strategy(&report, name);
        assert_eq!(row["wrong"].as_u64().expect("a count") > 0, name == "naive", "{row}");
    }
    assert_eq!(status(&output), 0);
}

fn strategy<'a>(report: &'a Value, name: &str) -> &'a Value {
    let rows = report["strategies"].as_array().expect("an array of strategies");
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name} in {report}"))
}

#[test]
fn only_the_naive_cache_sends_wrong_data() {
    let output = pinfold(&["demo", "--json", "--messages", "200", "--size", "262144"]);
    if unavailable(&output) {
        return;
    }
    let report = object(&output);
    assert_eq!(report["messages"], 200);
    for name in NAMES {
        let row = strategy(&report, name);
        let wrong = row["wrong"].as_u64().expect("a count");
        assert_eq!(wrong > 0, name == "naive", "{row}");
        let measured = report["simulated"] == false;
        let above_zero = |key: &str| row[key].as_f64().is_some_and(|value| value > 0.0);
        assert_eq!(above_zero("seconds"), measured, "{row}");
        assert_eq!(above_zero("gib_per_s"), measured, "{row}");
    }
    assert_eq!(status(&output), 0);
}

/// What containers show, whose runtimes refuse io_uring or userfaultfd.
#[test]
fn the_simulated_device_shows_the_bug_and_the_cure_on_every_machine() {
    let output = pinfold(&["demo", "--simulated", "--json", "--messages", "400"]);
    assert_eq!(status(&output), 0, "{output:?}");
    let report = object(&output);
    assert_eq!((&report["registrar"], &report["simulated"]), (&"simulated".into(), &true.into()));
    for name in NAMES {
        let wrong = strategy(&report, name)["wrong"].as_u64().expect("a count");
        assert_eq!(wrong > 0, name == "naive", "{name} in {report}");
    }
    let counts = |name, key: &str| strategy(&report, name)[key].as_u64().expect("a count");
    assert_eq!(counts("uncached", "registrations"), 400);
    assert_eq!(counts("preregistered", "registrations"), 1);
    assert!(counts("pinfold", "hits") > counts("pinfold", "registrations"), "{report}");
    let people = pinfold(&["demo", "--simulated", "--messages", "400"]);
    assert!(String::from_utf8_lossy(&people.stdout).contains("simulated device"), "{people:?}");
}

/// As for every command: what cannot be written was not shown.
#[test]
fn a_report_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
    let outcome = std::process::Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["demo", "--simulated", "--messages", "100"])
        .stdout(full)
        .output()
        .expect("the command starts");
    assert_eq!(status(&outcome), 1, "{outcome:?}");
    let complaint = String::from_utf8_lossy(&outcome.stderr);
    assert!(complaint.contains("could not be written"), "{complaint}");
}

#[test]
fn strategies_register_as_often_as_they_say() {
    let output =
        pinfold(&["demo", "--json", "--messages", "200", "--size", "65536", "--seed", "5"]);
    if unavailable(&output) {
        return;
    }
    let report = object(&output);
    let counts = |name| {
        let row = strategy(&report, name);
        (row["registrations"].as_u64().expect("a count"), row["hits"].as_u64().expect("a count"))
    };
    assert_eq!(counts("uncached"), (200, 0));
    assert_eq!(counts("copy"), (1, 0));
    assert_eq!(counts("preregistered"), (1, 0));
    // Which messages find a registration depends on what keeping one costs on this machine.
    let (registrations, hits) = counts("pinfold");
    assert!(registrations > 0 && registrations + hits >= 200, "{registrations} and {hits} hits");
    let (registrations, hits) = counts("naive");
    assert_eq!(registrations + hits, 200);
}

#[test]
fn a_file_of_one_byte_will_do() {
    let path = std::env::temp_dir().join(format!("pinfold-demo-{}", std::process::id()));
    let written = std::fs::File::create(&path).and_then(|mut file| file.write_all(b"x"));
    let file = path.to_str().expect("a name in UTF-8");
    let output = pinfold(&["demo", file, "--json", "--messages", "100", "--size", "65536"]);
    let _ = std::fs::remove_file(&path);
    written.expect("the file is written");
    if unavailable(&output) {
        return;
    }
    assert_eq!(object(&output)["file"], file);
    assert_eq!(status(&output), 0);
}

#[test]
fn a_file_without_data_is_refused_in_words() {
    for (file, words) in [
        ("/nonexistent/file", "No such file"),
        ("/dev/null", "is empty"),
        ("/proc", "Is a directory"),
    ] {
        let output = pinfold(&["demo", file, "--json"]);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert_eq!(status(&output), 2, "{file}");
        assert!(complaint.contains(file) && complaint.contains(words), "{complaint}");
        assert!(output.stdout.is_empty(), "{file}");
    }
}

#[test]
fn wrong_usage_is_refused() {
    let all: [&[&str]; 7] = [
        &["demo", "--size", "5"],
        &["demo", "--messages", "0"],
        &["demo", "--seed", "x"],
        &["torture", "--operations", "0"],
        &["torture", "--seconds", "0"],
        &["events", "--direct", "/nonexistent"],
        &["run", "--unknown", "--", "true"],
    ];
    for arguments in all {
        let output = pinfold(arguments);
        // A machine without io_uring is found out before the file is looked at.
        if arguments.contains(&"--direct") && unavailable(&output) {
            continue;
        }
        assert_eq!(status(&output), 2, "{arguments:?}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn people_get_a_table_without_escapes_where_there_is_no_terminal() {
    let output = pinfold(&["demo", "--messages", "100", "--size", "65536"]);
    if unavailable(&output) {
        return;
    }
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    for name in NAMES {
        assert!(text.contains(name), "{name} in {text}");
    }
    assert!(!text.contains('\u{1b}'), "{text}");
}
