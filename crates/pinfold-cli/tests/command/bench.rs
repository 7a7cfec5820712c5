//! The bench: rows that can be compared, and no claim about their size.

use crate::support::{object, pinfold, status, unavailable};
use serde_json::Value;

fn rows(arguments: &[&str]) -> Option<Vec<Value>> {
    let output = pinfold(arguments);
    if unavailable(&output) {
        return None;
    }
    assert_eq!(status(&output), 0);
    Some(object(&output)["benches"].as_array().expect("an array").clone())
}

fn is_measurement(row: &Value) -> bool {
    let is_positive = row["value"].as_f64().is_some_and(|value| value > 0.0);
    is_positive && row["params"].is_object() && row["unit"].is_string()
}

#[test]
fn every_row_is_a_measurement() {
    let Some(rows) = rows(&["bench", "--json", "--rounds", "1"]) else { return };
    for name in ["transfer", "landing", "landing, registering left out"] {
        assert!(rows.iter().any(|row| row["name"] == name), "{name}");
    }
    rows.iter().for_each(|row| assert!(is_measurement(row), "{row}"));
}

#[test]
fn one_group_can_be_asked_for() {
    let Some(rows) = rows(&["bench", "transfer", "--json", "--rounds", "2"]) else { return };
    assert!(!rows.is_empty() && rows.iter().all(|row| row["name"] == "transfer"));
}

#[test]
fn every_strategy_is_compared_with_the_chosen_one() {
    let arguments = ["bench", "strategies", "--json", "--rounds", "1", "--longest", "16384"];
    let Some(rows) = rows(&arguments) else { return };
    for (bytes, reuse) in [(4096, "hot"), (16384, "cold"), (4096, "untouched")] {
        let of = |name: &str| {
            let is = |row: &&Value| {
                row["params"]["bytes"] == bytes
                    && row["params"]["reuse"] == reuse
                    && (row["name"] == name || row["params"]["strategy"] == name)
            };
            let found: Vec<f64> =
                rows.iter().filter(is).map(|row| row["value"].as_f64().expect("a value")).collect();
            assert!(found.len() == 1 && found[0] > 0.0, "{name} of {bytes}, {reuse}: {found:?}");
        };
        let names = ["cached", "copy", "per_use", "pieces", "chosen", "chosen_over_best"];
        names.into_iter().for_each(of);
    }
}

#[test]
fn a_picture_is_drawn_of_strategies_only() {
    let file = std::env::temp_dir().join(format!("pinfold-strategies-{}.svg", std::process::id()));
    let svg = file.to_str().expect("a name in UTF-8");
    assert_eq!(status(&pinfold(&["bench", "transfer", "--rounds", "1", "--svg", svg])), 2);
    let arguments = ["bench", "strategies", "--rounds", "1", "--longest", "4096", "--svg", svg];
    let output = pinfold(&arguments);
    if unavailable(&output) {
        return;
    }
    assert_eq!(status(&output), 0);
    let picture = std::fs::read_to_string(&file).expect("a picture");
    std::fs::remove_file(&file).expect("a file");
    assert!(picture.starts_with("<svg") && picture.contains("chosen, cold"), "{picture}");
}
