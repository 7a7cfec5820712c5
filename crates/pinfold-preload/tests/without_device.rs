//! C programs that the library is preloaded into, with a stand-in for libibverbs: no device is needed, and what is
//! kept is watched by userfaultfd.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // only tests use it

mod built;

use built::{compile, directory, library, patiently};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Libraries with variables of threads that a program loads.
const LOADED: usize = 64;

/// The directory of the compiled programs; `None`, said once, where there is no C compiler.
fn programs() -> Option<&'static Path> {
    static COMPILED: OnceLock<Option<PathBuf>> = OnceLock::new();
    COMPILED.get_or_init(compile_all).as_deref()
}

fn compile_all() -> Option<PathBuf> {
    let out = directory()?;
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/without_device");
    let versions = format!("-Wl,--version-script={}", here.join("verbs.map").display());
    let named = "-Wl,-soname,libibverbs.so.1";
    let verbs = ["-shared", "-fPIC", named, &versions];
    assert!(compile("without_device/verbs.c", &out.join("libibverbs.so.1"), &verbs));
    assert!(
        compile_program(&out, "program", &[]) && compile_program(&out, "counting", &["-DCOUNTS"])
    );
    let plugin = ["-shared", "-fPIC", "-lpthread"];
    assert!(compile("without_device/plugin.c", &out.join("plugin.so"), &plugin));
    let first = out.join("tls0.so");
    assert!(compile("without_device/tls.c", &first, &["-shared", "-fPIC"]));
    for number in 1..LOADED {
        std::fs::copy(&first, out.join(format!("tls{number}.so"))).unwrap();
    }
    Some(out)
}

fn compile_program(out: &Path, name: &str, options: &[&str]) -> bool {
    let (found, there) = (format!("-L{}", out.display()), format!("-Wl,-rpath,{}", out.display()));
    let libraries = [&found, "-l:libibverbs.so.1", &there, "-lpthread", "-ldl", "-lrt"];
    compile("without_device/program.c", &out.join(name), &[options, &libraries].concat())
}

/// What a case says and how it ends, with the library and a file for the statistics.
fn run(case: &[&str]) -> Option<(Output, PathBuf)> {
    run_with(case, &[])
}

fn run_with(case: &[&str], variables: &[(&str, &str)]) -> Option<(Output, PathBuf)> {
    let programs = programs()?;
    let statistics = programs.join(format!("{}.json", case.join("-").replace('/', "_")));
    let _ = std::fs::remove_file(&statistics);
    let mut command = patiently(&programs.join("program"));
    command.env("PINFOLD_STATISTICS", &statistics).envs(variables.iter().copied());
    Some((built::output(command, &[&library()], case), statistics))
}

fn said(output: &Output) -> (Option<i32>, Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let status = output.status;
    (status.code(), status.signal(), text(&output.stdout), text(&output.stderr))
}

fn done() -> (Option<i32>, Option<i32>, String, String) {
    (Some(0), None, "done\n".into(), String::new())
}

/// As in a container: a filter that the program adds is not told from the first one by the kernel.
#[test]
fn a_program_in_a_container_may_forbid_itself_to_open_anything() {
    for case in ["sandboxed_in_a_container", "sandboxed_after_the_first_kept"] {
        for call in ["seccomp", "prctl"] {
            let Some((output, _)) = run(&[case, call]) else { return };
            assert_eq!(said(&output), done(), "{case} by {call}");
        }
    }
}

#[test]
fn a_program_that_asks_whether_there_are_filters_has_set_none() {
    let Some((output, statistics)) = run(&["asks_for_filters"]) else { return };
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
}

#[test]
fn a_report_is_not_written_where_the_program_may_do_nothing_but_exit() {
    for call in ["seccomp", "prctl"] {
        let Some((output, _)) = run(&["exits_in_a_sandbox", call]) else { return };
        assert_eq!(said(&output), done(), "{call}");
    }
}

#[test]
fn a_report_beyond_the_limit_of_a_file_ends_no_process() {
    let Some((output, _)) = run(&["exits_under_a_limit"]) else { return };
    let (code, signal, out, errors) = said(&output);
    assert_eq!((code, signal, out.as_str()), (Some(0), None, "done\n"));
    assert!(errors.contains("no statistics") || errors.is_empty(), "{errors}");
}

#[test]
fn a_report_is_where_it_was_asked_for_whatever_root_the_program_has_by_then() {
    let is_root = std::fs::metadata("/proc/self")
        .is_ok_and(|it| std::os::unix::fs::MetadataExt::uid(&it) == 0);
    if !is_root {
        return eprintln!("skipped: only root can change it");
    }
    let Some((output, statistics)) = run(&["exits_elsewhere"]) else { return };
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
}

#[test]
fn threads_that_begin_at_once_open_one_file() {
    for _ in 0..10 {
        let Some((output, _)) = run(&["threads_begin_at_once"]) else { return };
        assert_eq!(said(&output), (Some(0), None, "1\n".into(), String::new()));
    }
}

/// With the device's descriptor the monitor's goes, or it stays.
#[test]
fn registrations_of_a_device_that_was_closed_behind_us_end_no_other_ones() {
    for case in [&["closes_everything"][..], &["closes_everything", "low"]] {
        let Some((output, _)) = run(case) else { return };
        assert_eq!(said(&output), (Some(0), None, "8\n".into(), String::new()), "{case:?}");
    }
}

#[test]
fn a_registration_that_a_child_changes_is_not_found_by_its_parent() {
    let Some((output, _)) = run(&["child_changes"]) else { return };
    assert_eq!(said(&output), (Some(0), None, "anew\n".into(), String::new()));
}

#[test]
fn idle_registrations_make_room_for_one_that_is_changed() {
    let Some((output, _)) = run(&["changes_without_room"]) else { return };
    assert_eq!(said(&output), done());
}

/// The C library may allocate at the first use of a variable of threads after libraries with such were loaded.
#[test]
fn threads_of_the_library_ask_the_program_s_allocator_for_nothing() {
    let Some(programs) = programs() else { return };
    let command = patiently(&programs.join("counting"));
    let output = built::output(command, &[&library()], &["loads_many", programs.to_str().unwrap()]);
    assert_eq!(said(&output), (Some(0), None, "asked by others 0\n".into(), String::new()));
}

/// The dynamic linker's lock is held by the thread that waits for the one that registers.
#[test]
fn a_thread_of_a_constructor_registers_and_keeps_what_it_registered() {
    let Some(programs) = programs() else { return };
    let Some((output, statistics)) = run(&["loads_a_plugin", programs.to_str().unwrap()]) else {
        return;
    };
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
}

#[test]
fn a_notification_of_a_message_queue_outlives_the_start_of_the_monitor() {
    let Some((output, statistics)) = run(&["awaits_a_message"]) else { return };
    if output.stdout == b"no message queues\n" {
        return eprintln!("skipped: no message queues");
    }
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
}

/// It would wait for ever for the monitor's thread, which it has stopped, and take what is idle for leaks.
#[test]
fn beside_a_leak_sanitizer_nothing_is_kept() {
    let Some(programs) = programs() else { return };
    for (name, runtime) in [("leak", None), ("address", Some("libasan.so"))] {
        if !compile_program(programs, name, &[&format!("-fsanitize={name}")]) {
            eprintln!("skipped: the C compiler has no sanitizer ({name})");
            continue;
        }
        let find = |runtime| Command::new("cc").arg(format!("-print-file-name={runtime}")).output();
        let first = runtime.map(|runtime| find(runtime).unwrap().stdout);
        let first = first.map(|path| PathBuf::from(String::from_utf8(path).unwrap().trim()));
        let (ours, statistics) = (library(), programs.join("sanitized.json"));
        let preloaded: Vec<&Path> = first.iter().map(|path| &**path).chain([&*ours]).collect();
        let mut command = patiently(&programs.join(name));
        command.env("PINFOLD_STATISTICS", &statistics);
        let output = built::output(command, &preloaded, &["holds_until_the_end"]);
        assert_eq!(said(&output), done(), "{name}");
        let line = std::fs::read_to_string(&statistics).unwrap();
        assert!(line.contains("\"gets\":0,") && !line.contains("\"passed\":0,"), "{line}");
        std::fs::remove_file(statistics).unwrap();
    }
}

/// What stands in the statistics for one reason.
fn not_kept(why: &str, change: &str, registrations: u64) -> String {
    format!("{{\"why\":\"{why}\",\"change\":{change},\"registrations\":{registrations}}}")
}

#[test]
fn what_is_not_kept_is_counted_for_its_reason_with_what_changes_it() {
    let Some((output, statistics)) = run_with(&["not_kept"], &[("PINFOLD_MAX_BYTES", "64K")])
    else {
        return;
    };
    assert_eq!(said(&output), done());
    let line = std::fs::read_to_string(statistics).unwrap();
    let reasons = [
        not_kept("too few uses of the same bytes so far", "\"PINFOLD_KEEP_FROM=1\"", 3),
        not_kept("rights for peers", "\"PINFOLD_CACHE_REMOTE=on\"", 2),
        not_kept("on-demand paging, which pins nothing", "null", 3),
        not_kept("memory windows, huge-page hints or unknown flags", "null", 4),
        not_kept("no bytes, or no memory", "null", 5),
        not_kept("more bytes than may be kept", "\"PINFOLD_MAX_BYTES=BYTES\"", 7),
        not_kept("a kind of memory that the monitor does not watch", "\"pinfold-notifyd\"", 6),
    ];
    assert!(reasons.iter().all(|reason| line.contains(reason)), "{line}");
    let sums = ["\"per_use\":6,", "\"passed\":24,", "\"monitor\":\"userfaultfd\","];
    assert!(sums.iter().all(|sum| line.contains(sum)), "{line}");
}

/// The lines of a summary, from a run with these variables besides.
fn summary(case: &str, variables: &[(&str, &str)]) -> Option<String> {
    let file = programs()?.join(format!("{case}-{}.summary", variables.len()));
    let mut all = vec![("PINFOLD_SUMMARY", file.to_str().unwrap())];
    all.extend(variables);
    let (output, _) = run_with(&[case], &all)?;
    assert_eq!(said(&output), done());
    let lines = std::fs::read_to_string(&file).unwrap_or_default();
    let _ = std::fs::remove_file(file);
    Some(lines)
}

#[test]
fn a_rank_is_in_the_summary_whether_or_not_it_registered_memory() {
    let rank = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
    for case in ["registers_once", "registers_nothing"] {
        let Some(lines) = summary(case, &rank) else { return };
        // `timeout`, which the launcher would have started, and the program; not the program's child.
        assert_eq!(lines.lines().count(), 2, "{case}: {lines}");
        let parts = ["\"rank\":1,\"ranks\":4,", "\"bypassed\":0,"];
        assert!(lines.lines().all(|line| parts.iter().all(|part| line.contains(part))), "{lines}");
        assert_eq!(lines.contains("\"passed\":1,"), case == "registers_once", "{lines}");
    }
    assert_eq!(summary("registers_nothing", &[]).as_deref(), Some(""), "no rank");
    let Some(lines) = summary("registers_once", &[]) else { return };
    assert!(lines.lines().count() == 1 && !lines.contains("rank"), "{lines}");
}
