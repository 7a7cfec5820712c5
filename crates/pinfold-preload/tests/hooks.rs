//! The hooks on the C library's memory functions, in C programs that the library is preloaded into.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // only tests use it

mod built;

use built::{directory, library, patiently};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The directory of the compiled programs; `None`, said once, where there is no C compiler.
fn programs() -> Option<&'static Path> {
    static COMPILED: OnceLock<Option<PathBuf>> = OnceLock::new();
    COMPILED.get_or_init(compile_all).as_deref()
}

fn compile_all() -> Option<PathBuf> {
    let out = directory()?;
    let loaded = ["-shared", "-fPIC"];
    for (source, name, options) in [
        ("program.c", "program", &["-lpthread", "-ldl"][..]),
        ("library.c", "plain.so", &loaded),
        ("library.c", "first.so", &[&loaded[..], &["-DFIRST"]].concat()),
        ("library.c", "forwards.so", &[&loaded[..], &["-DFORWARDS", "-ldl"]].concat()),
    ] {
        assert!(compile(source, &out.join(name), options), "{name}");
    }
    Some(out)
}

fn compile(source: &str, to: &Path, options: &[&str]) -> bool {
    built::compile(&format!("hooks/{source}"), to, options)
}

/// Runs the program with `preloaded`, in that order, and gives what it says.
fn run(program: &Path, preloaded: &[&Path], arguments: &[&str]) -> String {
    let output = output(program, preloaded, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {} {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn output(program: &Path, preloaded: &[&Path], arguments: &[&str]) -> Output {
    built::output(patiently(program), preloaded, arguments)
}

fn with_library(arguments: &[&str]) -> Option<String> {
    Some(run(&programs()?.join("program"), &[&library()], arguments))
}

/// What a signal handler on a small stack of its own must have. Without optimisation it is some times as much.
#[test]
fn a_call_takes_little_stack() {
    let Some(said) = with_library(&["stack"]) else { return };
    let most = if cfg!(debug_assertions) { 8 << 10 } else { 1 << 10 };
    let depths = said.lines().map(|line| line.split(' ').next().unwrap().parse::<usize>().unwrap());
    let depths: Vec<_> = depths.collect();
    assert_eq!(depths.len(), 10, "{said}");
    assert!(depths.iter().all(|&depth| depth <= most), "{said}");
    assert!(depths.iter().any(|&depth| depth > 256), "it measures nothing: {said}");
}

#[test]
fn every_way_through_the_c_library_is_told_and_nothing_else() {
    let Some(programs) = programs() else { return };
    let plain = programs.join("plain.so");
    let said = with_library(&["reach", plain.to_str().unwrap()]).unwrap();
    let told: Vec<_> = said.lines().collect();
    let expected = [
        "madvise 1",
        "process_madvise 1",
        "shmat 1",
        "syscall madvise 1",
        "syscall process_madvise 1",
        "syscall shmat 1",
        "ioctl UNREGISTER 1",
        "syscall ioctl UNREGISTER 1",
        "dlsym 1",
        "a loaded library 1",
        // As documented: these do not pass the hooks.
        "a library with a second C library 0",
        "what others tell 0",
        "the C library's own 0",
    ];
    assert_eq!(told, expected);
}

#[test]
fn results_and_error_numbers_are_the_c_library_s() {
    let Some(programs) = programs() else { return };
    let program = programs.join("program");
    for seed in ["1", "2", "3"] {
        let alone = run(&program, &[], &["answers", seed]);
        let hooked = run(&program, &[&library()], &["answers", seed]);
        assert!(alone.lines().count() > 10_000);
        let differ = alone.lines().zip(hooked.lines()).position(|(a, b)| a != b);
        assert_eq!(differ, None, "the line that differs, seed {seed}");
    }
}

#[test]
fn no_call_is_lost_among_threads_and_signal_handlers() {
    let Some(said) = with_library(&["storm"]) else { return };
    assert_eq!(said, "made 90000 told 90000\n");
}

#[test]
fn children_forked_in_the_middle_go_on_and_those_of_vfork_are_told() {
    let Some(said) = with_library(&["fork"]) else { return };
    assert_eq!(said, "children, vfork told 1\n");
}

#[test]
fn an_initialiser_s_calls_are_told() {
    let Some(programs) = programs() else { return };
    let program = programs.join("program");
    for order in [[library(), programs.join("plain.so")], [programs.join("plain.so"), library()]] {
        let said = run(&program, &[&order[0], &order[1]], &["early"]);
        assert_eq!(said, "before main 1\n");
    }
}

#[test]
fn no_call_is_a_point_of_cancellation() {
    let Some(said) = with_library(&["cancel"]) else { return };
    assert_eq!(said, "all made 1 cancelled 1\n");
}

#[test]
fn unwinders_get_through_syscall() {
    let Some(said) = with_library(&["unwind"]) else { return };
    assert_eq!(said, "cancelled 1\ndeep enough 1\n");
}

#[test]
fn a_library_that_stands_first_has_the_hooks_withdraw_unless_it_hands_on() {
    let Some(programs) = programs() else { return };
    let program = programs.join("program");
    let (first, forwards) = (programs.join("first.so"), programs.join("forwards.so"));
    let said = run(&program, &[&first, &library()], &["standing"]);
    assert_eq!(said, format!("withdrawn 0 {}\n", first.display()));
    assert_eq!(run(&program, &[&library(), &first], &["standing"]), "active\n");
    assert_eq!(run(&program, &[&forwards, &library()], &["standing"]), "active\n");
    assert_eq!(run(&program, &[], &["standing"]), "absent\n");
}

#[test]
fn other_allocators_are_served() {
    let Some(programs) = programs() else { return };
    let program = programs.join("program");
    for name in ["libjemalloc.so.2", "libmimalloc.so.2"] {
        let allocator =
            Path::new("/usr/lib").join(std::env::consts::ARCH.to_owned() + "-linux-gnu");
        let allocator = allocator.join(name);
        if !allocator.is_file() {
            eprintln!("skipped: no {}", allocator.display());
            continue;
        }
        for order in [[&allocator, &library()], [&library(), &allocator]] {
            for what in ["standing", "storm", "fork", "unwind"] {
                let said = run(&program, &[order[0], order[1]], &[what]);
                assert!(what != "standing" || said == "active\n", "{said}");
            }
        }
    }
}

/// ASan's runtime demands to be the first library; behind it the hooks are reached, because it has
/// none of these functions.
#[test]
fn the_address_sanitizer_is_served() {
    let Some(programs) = programs() else { return };
    let program = programs.join("sanitized");
    let found = Command::new("cc").arg("-print-file-name=libasan.so").output().unwrap();
    let runtime = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    let options = ["-fsanitize=address", "-lpthread", "-ldl"];
    if !runtime.is_absolute() || !compile("program.c", &program, &options) {
        eprintln!("skipped: the C compiler has no address sanitizer");
        return;
    }
    for what in ["standing", "storm", "fork"] {
        let said = run(&program, &[&runtime, &library()], &[what]);
        assert!(what != "standing" || said == "active\n", "{said}");
    }
    let refused = output(&program, &[&library()], &["standing"]);
    assert!(!refused.status.success(), "documented: the sanitizer itself refuses this order");
}
