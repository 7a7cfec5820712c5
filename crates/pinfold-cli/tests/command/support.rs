//! Runs the real command.

use serde_json::Value;
use std::process::{Command, Output};

/// What the command says and how it ends.
pub(crate) fn pinfold(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(arguments)
        .output()
        .expect("the command starts")
}

/// The exit status.
pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().expect("the command is not killed by a signal")
}

/// Standard output as JSON: one object and nothing else, or a panic that shows it.
pub(crate) fn object(output: &Output) -> Value {
    let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error} in {output:?}");
    });
    assert!(value.is_object(), "{value}");
    value
}

/// Whether the command could not run here; says so where it could not.
pub(crate) fn unavailable(output: &Output) -> bool {
    let unavailable = status(output) == 77;
    if unavailable {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    unavailable
}
