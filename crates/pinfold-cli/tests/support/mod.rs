//! Runs the command itself.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // tests may fail loudly

use serde_json::Value;
use std::process::Command;

/// What the command answered.
pub(crate) struct Outcome {
    /// Its exit status was 0.
    pub(crate) held: bool,
    /// Its one JSON object.
    pub(crate) report: Value,
}

/// Runs `pinfold` with `arguments`; `None`, and a word on standard error, where the machine lacks
/// what it needs.
pub(crate) fn run(arguments: &[&str]) -> Option<Outcome> {
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold")).args(arguments).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(status @ (0 | 1)) => {
            let report = serde_json::from_slice(&output.stdout).expect(&complaint);
            Some(Outcome { held: status == 0, report })
        }
        Some(77) => {
            skipped(&complaint);
            None
        }
        _ => panic!("{arguments:?} ended with {}: {complaint}", output.status),
    }
}

/// Says why a test tells nothing here.
pub(crate) fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}
