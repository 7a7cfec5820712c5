//! The library as cargo has built it, and C programs to preload it into.

#![allow(dead_code)] // each test uses a part

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) const NAME: &str = "libpinfold_preload.so";

/// Where cargo leaves it, next to this test: the newer one, because a build for tests leaves that of another build.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().and_then(|deps| deps.parent()).unwrap();
    let places = [directory.join(NAME), directory.join("deps").join(NAME)];
    let made = |place: &PathBuf| place.metadata().and_then(|file| file.modified()).ok();
    let newest = places.into_iter().filter(|place| place.is_file()).max_by_key(made);
    newest.expect("cargo builds it for its tests")
}

/// A directory of this test's own for compiled programs; `None`, said, where there is no C compiler.
pub(crate) fn directory() -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler");
        return None;
    }
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(std::process::id().to_string());
    std::fs::create_dir_all(&out).unwrap();
    Some(out)
}

/// Compiles `source`, below `tests`; whether that went well.
pub(crate) fn compile(source: &str, to: &Path, options: &[&str]) -> bool {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]);
    compiler.arg(to).arg(source).args(options).status().is_ok_and(|status| status.success())
}

/// Runs `command` with `preloaded`, in that order, and gives up on it after two minutes.
pub(crate) fn output(mut command: Command, preloaded: &[&Path], arguments: &[&str]) -> Output {
    let paths: Vec<_> = preloaded.iter().map(|path| path.to_str().unwrap()).collect();
    if !paths.is_empty() {
        command.env("LD_PRELOAD", paths.join(":"));
    }
    command.args(arguments).output().unwrap()
}

/// `program`, which is ended after two minutes.
pub(crate) fn patiently(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    // Killed in the end: a process whose threads block all signals is ended by no other.
    command.args(["--kill-after=5", "120"]).arg(program);
    command
}
