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

#[test]
fn every_row_is_a_measurement() {
    let Some(rows) = rows(&["bench", "--json", "--rounds", "1"]) else { return };
    for name in ["startup", "munmap", "transfer", "landing"] {
        assert!(rows.iter().any(|row| row["name"] == name), "{name}");
    }
    for row in rows {
        assert!(row["value"].as_f64().is_some_and(|value| value > 0.0), "{row}");
        assert!(row["params"].is_object() && row["unit"].is_string(), "{row}");
    }
}

#[test]
fn one_group_can_be_asked_for() {
    let Some(rows) = rows(&["bench", "startup", "--json", "--rounds", "2"]) else { return };
    assert!(!rows.is_empty() && rows.iter().all(|row| row["name"] == "startup"));
}
