//! Tests that need a process of their own.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers fail as loudly as tests

use std::process::Command;

/// Runs the test `name` in a process of its own: what it changes or counts is the process's.
pub(crate) fn alone(name: &str, body: impl FnOnce()) {
    const MARK: &str = "PINFOLD_TEST_ALONE";
    if std::env::var_os(MARK).is_some_and(|alone| alone == name) {
        return body();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1", "--include-ignored"])
        .env(MARK, name)
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    eprint!("{err}");
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}", output.status);
}
