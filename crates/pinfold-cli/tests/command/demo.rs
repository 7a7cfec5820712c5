//! The demo on the real kernel: the naive cache sends wrong data, and nobody else does.

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
        assert!(row["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{row}");
        assert!(row["gib_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
    }
    assert_eq!(status(&output), 0);
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
    let (registrations, hits) = counts("pinfold");
    assert!(registrations > 0 && hits > registrations, "{registrations} against {hits} hits");
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
    for arguments in [["demo", "--size", "5"], ["demo", "--messages", "0"], ["demo", "--seed", "x"]]
    {
        let output = pinfold(&arguments);
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
