//! Programs under `pinfold run`. What caching does to verbs programs is tested in the virtual machine;
//! here is what it does to any program.

use crate::support::status;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The preload library where cargo has built it; it is another package's.
fn library() -> Option<PathBuf> {
    let directory = PathBuf::from(env!("CARGO_BIN_EXE_pinfold"));
    let directory = directory.parent()?;
    let name = "libpinfold_preload.so";
    let places = [directory.join(name), directory.join("deps").join(name)];
    let found = places.into_iter().find(|place| place.is_file());
    if found.is_none() {
        eprintln!("skipped: {name} is not built: cargo build -p pinfold-preload");
    }
    found
}

/// A directory of one test's own, with one for temporary files in it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// `None` where the library is not built.
    pub(crate) fn new(name: &str) -> Option<Self> {
        library()?;
        let path = std::env::temp_dir().join(format!("pinfold-{name}.{}", std::process::id()));
        fs::create_dir_all(path.join("tmp")).unwrap();
        Some(Self(path))
    }

    pub(crate) fn place(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file that can be started.
    pub(crate) fn program(&self, name: &str, text: &str) -> PathBuf {
        let path = self.place(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// `pinfold run` with these arguments, and with the environment of no job.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        let jobs = ["PINFOLD_", "UCX_", "FI_", "OMPI_", "MV2_", "PMI_", "SLURM_"];
        for (name, _) in std::env::vars_os() {
            if jobs.iter().any(|job| name.to_string_lossy().starts_with(job)) {
                command.env_remove(name);
            }
        }
        command.arg("run").args(arguments).env("TMPDIR", self.place("tmp"));
        command
    }

    /// The names of the temporary files.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let entries = fs::read_dir(self.place("tmp")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    pub(crate) fn send(&self, child: &Child, signal: i32) {
        self.send_all(child, &[signal]);
    }

    pub(crate) fn send_all(&self, child: &Child, signals: &[i32]) {
        let kill = |signal: &i32| format!("kill -{signal} {}", child.id());
        let kill = signals.iter().map(kill).collect::<Vec<_>>().join(" && ");
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    pub(crate) fn await_file(&self, name: &str) {
        self.await_that("the file is there", || self.place(name).exists());
    }

    pub(crate) fn await_that(&self, what: &str, is: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.arg("run").args(arguments).output().expect("the command starts")
}

#[test]
fn the_program_s_end_and_output_are_its_own() {
    if library().is_none() {
        return;
    }
    let output = run(&["--", "sh", "-c", "cat; echo out; echo err >&2; exit 7"]);
    assert_eq!((status(&output), output.stdout.as_slice()), (7, &b"out\n"[..]));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.starts_with("err\n")
            && errors.contains("no process reported that it registered memory"),
        "{errors}"
    );
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL, libc::SIGSEGV] {
        let killed = run(&["--quiet", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!((killed.status.signal(), killed.stderr.len()), (Some(signal), 0));
    }
    assert_eq!(status(&run(&["--", "/no/such/program"])), 127);
    assert_eq!(status(&run(&["--", "/"])), 126);
}

/// With the environment of no job in it.
fn run_for(middleware: &str, script: &str, set: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(["run", "--quiet", "--for", middleware, "--", "sh", "-c", script]);
    command.env_remove("UCX_RCACHE_ENABLE").env_remove("FI_MR_CACHE_MAX_COUNT");
    command.envs(set.iter().copied()).output().expect("the command starts")
}

#[test]
fn a_middleware_s_variables_reach_the_program_and_a_user_s_own_is_named() {
    if library().is_none() {
        return;
    }
    let script = "echo $PINFOLD_CACHE_REMOTE $UCX_RCACHE_ENABLE $FI_MR_CACHE_MAX_COUNT";
    let said = |output: &Output| String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let ucx = run_for("ucx", script, &[]);
    assert_eq!((said(&ucx), ucx.stderr.len()), ("on n".into(), 0));
    assert_eq!(said(&run_for("mpi", script, &[])), "on n 0");
    let own = run_for("libfabric", script, &[("FI_MR_CACHE_MAX_COUNT", "7")]);
    let errors = String::from_utf8_lossy(&own.stderr);
    assert_eq!(said(&own), "on 7");
    assert!(errors.contains("FI_MR_CACHE_MAX_COUNT is set to \"7\""), "{errors}");
    assert_eq!(status(&run_for("none", script, &[])), 2);
}

#[test]
fn the_library_comes_first_and_others_stay() {
    let Some(library) = library() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["run", "--quiet", "--", "sh", "-c", "echo $LD_PRELOAD"])
        .env("LD_PRELOAD", library.as_os_str())
        .output()
        .unwrap();
    let preloaded = String::from_utf8_lossy(&output.stdout);
    assert_eq!(preloaded.trim().split(':').count(), 2, "{preloaded}");
}

#[test]
fn the_summary_is_one_object_in_a_file() {
    if library().is_none() {
        return;
    }
    let file = std::env::temp_dir().join(format!("pinfold-summary.{}", std::process::id()));
    let output = run(&["--json", file.to_str().unwrap(), "--", "true", "--json"]);
    let text = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!((status(&output), output.stderr.len()), (0, 0));
    let summary: Value = serde_json::from_str(&text).unwrap();
    for key in ["gets", "hits", "misses", "regs", "deregs", "invalidations"] {
        assert_eq!(summary[key], 0, "{key} in {summary}");
    }
}

/// As a process with the library does it: a line into the file that the environment names.
fn reports(lines: &[&str]) -> String {
    let says = |line: &&str| format!("printf '%s\\n' '{line}' >> \"$PINFOLD_SUMMARY\"");
    lines.iter().map(says).collect::<Vec<_>>().join(" && ")
}

#[test]
fn the_summary_says_why_registrations_passed_through_and_what_changes_that() {
    if library().is_none() {
        return;
    }
    let not_kept =
        r#"[{"why":"rights for peers","change":"PINFOLD_CACHE_REMOTE=on","registrations":9}]"#;
    let line = format!(r#"{{"pid":1,"passed":9,"not_kept":{not_kept},"monitor":"not started"}}"#);
    let output = run(&["--", "sh", "-c", &reports(&[&line, r#"{"pid":2,"gets":3,"hits":2}"#])]);
    let errors = String::from_utf8_lossy(&output.stderr);
    for part in [
        "pinfold: 3 registrations asked for, 2 found",
        "9 passed through",
        "\npinfold: not kept: 9 for rights for peers (changed by PINFOLD_CACHE_REMOTE=on)\n",
        "\npinfold: monitor of the processes: not started in 1\n",
    ] {
        assert!(errors.contains(part), "{part} in {errors}");
    }
}

#[test]
fn a_shared_directory_has_a_file_of_each_machine_and_process() {
    if library().is_none() {
        return;
    }
    let directory = std::env::temp_dir().join(format!("pinfold-reports.{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    let lines = |rank| {
        let of = format!(r#""pid":1,"rank":{rank},"ranks":3"#);
        format!("{{{of},\"began\":1}}\\n{{{of},\"gets\":3,\"monitor\":\"userfaultfd\"}}\\n")
    };
    let script = format!(
        "cd \"$(dirname \"$PINFOLD_SUMMARY\")\" && printf '{}' > a.1 && printf '{}' > b.1",
        lines(0),
        lines(1)
    );
    let output = run(&["--reports", directory.to_str().unwrap(), "--", "sh", "-c", &script]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("userfaultfd in 2 (ranks 0-1)"), "{errors}");
    assert!(errors.contains("2 of 3 ranks reported; "), "{errors}");
    let is_empty = fs::read_dir(&directory).unwrap().next().is_none();
    fs::remove_dir_all(&directory).unwrap();
    assert!(is_empty, "the reports are gone with the summary");
}

/// Two ranks of a job, as a launcher starts them; what `pinfold run` says. Shells may leave no report.
fn job(arguments: &[&str], rank: &str) -> String {
    let script = "for rank in 0 1; do PMI_RANK=$rank PMI_SIZE=2 env sh -c \"$1\" & done; wait";
    let output = run(&[arguments, &["--", "sh", "-c", script, "launcher", rank]].concat());
    assert_eq!(status(&output), 0);
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_rank_has_reported_when_the_process_that_the_launcher_started_has() {
    if library().is_none() {
        return;
    }
    let directory = std::env::temp_dir().join(format!("pinfold-ranks.{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let shared = ["--reports", directory.to_str().unwrap()];
    for arguments in [&[][..], &shared] {
        let all = job(arguments, "exec cat /dev/null");
        assert!(all.ends_with("pinfold: all 2 ranks reported\n"), "{all}");
        // A child of each reports, with the rank's variables.
        let killed = job(arguments, "cat /dev/null; kill -9 $$");
        let said = "pinfold: 0 of 2 ranks reported; 2 began and did not: killed, ";
        assert!(killed.starts_with(said), "{killed}");
        let one = job(arguments, "[ $PMI_RANK = 0 ] || kill -9 $$; exec cat /dev/null");
        assert!(one.contains("pinfold: 1 of 2 ranks reported; 1 began and did not: "), "{one}");
        let child = job(arguments, "exec find /dev/null -exec sh -c 'kill -9 $$' \\;");
        let said = "all 2 ranks reported; 2 processes of theirs did not: killed, ";
        assert!(child.contains(said), "{child}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_cache_that_is_off_is_not_taken_for_ranks_that_are_missing() {
    if library().is_none() {
        return;
    }
    let said = job(&[], "exec env PINFOLD_CACHE=off cat /dev/null");
    assert!(said.contains("nothing is cached in 2 processes: PINFOLD_CACHE=off\n"), "{said}");
    assert!(said.ends_with("all 2 ranks reported\n"), "{said}");
}

#[test]
fn a_missing_library_is_a_machine_that_lacks_something() {
    let output = Command::new(env!("CARGO_BIN_EXE_pinfold"))
        .args(["run", "--", "true"])
        .env("PINFOLD_PRELOAD", "/no/such/library.so")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(status(&output), 77);
    assert!(errors.contains("PINFOLD_PRELOAD") && errors.contains("/no/such/library.so"));
}
