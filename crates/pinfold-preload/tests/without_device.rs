//! C programs that the library is preloaded into, with a stand-in for libibverbs: no device is needed, and what is
//! kept is watched by userfaultfd.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // only tests use it

mod built;

use built::{compile, directory, library, patiently};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Stand-ins for libibverbs: an old one under its usual name, and a present one under the name that a program or a library
/// brings its own along by.
const USUAL: &str = "libibverbs.so.1";
const BUNDLED: &str = "libbundled.so.1";
/// One that uses numbers again, as the kernel does.
const REUSING: &str = "libreusing.so.1";
/// The stand-in for libfabric by the name of its file, which a program may load it by.
const VERSIONED: &str = "libfabric.so.1.30.0";

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
    for (name, options) in
        [(USUAL, &[][..]), (BUNDLED, &["-DPRESENT"]), (REUSING, &["-DPRESENT", "-DREUSES"])]
    {
        let named = format!("-Wl,-soname,{name}");
        let verbs = [&["-shared", "-fPIC", &named, &versions], options].concat();
        assert!(compile("without_device/verbs.c", &out.join(name), &verbs));
    }
    assert!(
        compile_program(&out, "program", &[]) && compile_program(&out, "counting", &["-DCOUNTS"])
    );
    for (verbs, name) in [(BUNDLED, "bundled"), (REUSING, "reusing")] {
        assert!(compile_with(verbs, "without_device/program.c", &out.join(name), &[]));
    }
    // The compiler knows what the C library has under such a name.
    let own_names = ["-fno-builtin", "-Wno-builtin-declaration-mismatch"];
    assert!(compile_with(USUAL, "without_device/names.c", &out.join("names"), &own_names));
    let library = ["-shared", "-fPIC"];
    assert!(compile_with(BUNDLED, "without_device/local.c", &out.join("local.so"), &library));
    assert!(compile("without_device/interposer.c", &out.join("interposer.so"), &library));
    assert!(compile("without_device/host.c", &out.join("host"), &["-ldl"]));
    let fabric = ["-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", "-lpthread"];
    assert!(compile("without_device/libfabric.c", &out.join("libfabric.so.1"), &fabric));
    assert!(compile_with("libfabric.so.1", "without_device/fabric.c", &out.join("fabric"), &[]));
    std::fs::copy(out.join("libfabric.so.1"), out.join(VERSIONED)).unwrap();
    assert!(compile("without_device/weak.c", &out.join("weak"), &[]));
    let threads = ["-lpthread", "-ldl"];
    assert!(compile("without_device/children.c", &out.join("children"), &threads));
    assert!(compile_with(BUNDLED, "without_device/closing.c", &out.join("closing.so"), &library));
    assert!(compile("without_device/rounds.c", &out.join("rounds"), &["-ldl"]));
    assert!(compile_with(BUNDLED, "without_device/early.c", &out.join("libearly.so"), &library));
    assert!(compile_with("libearly.so", "without_device/late.c", &out.join("late"), &[]));
    assert!(compile("without_device/own.c", &out.join("own"), &["-rdynamic"]));
    let local = ["-shared", "-fPIC", "-Dmain=registers_by_itself"];
    assert!(compile_with(
        "libfabric.so.1",
        "without_device/fabric.c",
        &out.join("fabric.so"),
        &local
    ));
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
    compile_with(USUAL, "without_device/program.c", &out.join(name), options)
}

/// With the stand-in of this name, which is in the directory of what is compiled.
fn compile_with(verbs: &str, source: &str, to: &Path, options: &[&str]) -> bool {
    let out = to.parent().unwrap().display();
    let (found, there) = (format!("-L{out}"), format!("-Wl,-rpath,{out}"));
    let verbs = format!("-l:{verbs}");
    let libraries = [&found, &verbs, &there, "-lpthread", "-ldl", "-lrt"];
    compile(source, to, &[options, &libraries].concat())
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

/// What `program` says with these preloaded, with `cache` as `PINFOLD_CACHE`.
fn said_by(program: &str, preloaded: &[&Path], cache: &str, arguments: &[&str]) -> Option<String> {
    said_with(program, preloaded, &[("PINFOLD_CACHE", cache)], arguments)
}

/// The same with these variables.
fn said_with(
    program: &str,
    preloaded: &[&Path],
    variables: &[(&str, &str)],
    arguments: &[&str],
) -> Option<String> {
    let mut command = patiently(&programs()?.join(program));
    command.envs(variables.iter().copied());
    let (code, signal, out, errors) = said(&built::output(command, preloaded, arguments));
    assert_eq!((code, signal, errors.as_str()), (Some(0), None, ""), "{program}, {variables:?}");
    Some(out)
}

/// It gets all that is not found: nothing of it is passed over, whatever libibverbs is called.
#[test]
fn a_library_between_this_one_and_libibverbs_gets_its_calls() {
    let Some(programs) = programs() else { return };
    let (ours, interposer) = (library(), programs.join("interposer.so"));
    for program in ["program", "bundled"] {
        let says = |preloaded: &[&Path], cache| said_by(program, preloaded, cache, &["interposed"]);
        let all = Some("4 registered, 4 deregistered\n");
        assert_eq!(says(&[&interposer], "off").as_deref(), all, "{program} without it");
        assert_eq!(says(&[&ours, &interposer], "off").as_deref(), all, "{program}");
        // The first passes through, the second is kept and found twice.
        let kept = Some("2 registered, 1 deregistered\n");
        assert_eq!(says(&[&ours, &interposer], "on").as_deref(), kept, "{program}");
    }
}

/// Calls that libibverbs makes of its own functions are none of the program's.
#[test]
fn a_registration_that_another_library_hands_on_is_counted_once() {
    let Some(programs) = programs() else { return };
    let statistics = programs.join("handed_on.json");
    let mut command = patiently(&programs.join("bundled"));
    command.env("PINFOLD_STATISTICS", &statistics);
    let preloaded = [&*library(), &*programs.join("interposer.so")];
    assert!(built::output(command, &preloaded, &["interposed"]).status.success());
    let line = std::fs::read_to_string(statistics).unwrap();
    assert!(line.contains("\"hits\":2,") && line.contains("\"passed\":1,"), "{line}");
}

/// `RTLD_LOCAL`: such a libibverbs is in no order that this library is in.
#[test]
fn a_libibverbs_that_a_library_brings_along_for_itself_is_the_one_that_is_called() {
    let Some(programs) = programs() else { return };
    let (ours, local) = (library(), programs.join("local.so"));
    for cache in ["off", "on"] {
        let out = said_by("host", &[&ours], cache, &[local.to_str().unwrap()]);
        assert_eq!(out.as_deref(), Some("0 failures\nunloaded\n"), "{cache}");
        let bundled = programs.join(BUNDLED);
        let out = said_by("host", &[&ours], cache, &[bundled.to_str().unwrap()]);
        assert_eq!(out.as_deref(), Some("0 failures\nstays\n"), "{cache}");
    }
}

/// The constructor of a library that the program was started with runs before this library's own.
#[test]
fn what_is_set_counts_for_a_constructor_that_registers_first() {
    let Some(programs) = programs() else { return };
    let statistics = programs.join("early.json");
    let says = |cache| {
        let mut command = patiently(&programs.join("late"));
        command.env("PINFOLD_STATISTICS", &statistics).env("PINFOLD_CACHE", cache);
        let (code, signal, out, errors) = said(&built::output(command, &[&library()], &[]));
        assert_eq!((code, signal), (Some(0), None), "{cache}");
        (out, errors)
    };
    assert_eq!(says("off"), ("no thread more\n".into(), String::new()));
    assert!(!statistics.exists());
    let (out, errors) = says("perhaps");
    assert!(out == "no thread more\n" && errors.contains("PINFOLD_CACHE"), "{out}{errors}");
    assert_eq!(says("on"), ("threads\n".into(), String::new()));
    let line = std::fs::read_to_string(statistics).unwrap();
    assert!(line.contains("\"hits\":2,"), "{line}");
}

/// The first call is one of a destructor, of a library that the dynamic linker unmaps behind it with its libibverbs.
#[test]
fn a_libibverbs_that_goes_with_the_library_whose_destructor_calls_it_is_not_called_again() {
    let Some(programs) = programs() else { return };
    let path = programs.join("closing.so");
    for preloaded in [&[][..], &[&*library()]] {
        for cache in ["off", "on"] {
            let out = said_by("rounds", preloaded, cache, &[path.to_str().unwrap()]);
            assert_eq!(out.as_deref(), Some("done\n"), "{cache}, {preloaded:?}");
        }
    }
}

/// Linked into it, and exported: no other one is loaded for it.
#[test]
fn a_program_that_is_libibverbs_itself_gets_no_other() {
    let Some(programs) = programs() else { return };
    let path = programs.to_str().unwrap();
    for cache in ["off", "on"] {
        let variables = [("LD_LIBRARY_PATH", path), ("PINFOLD_CACHE", cache)];
        let says = |preloaded: &[&Path]| said_with("own", preloaded, &variables, &[]);
        assert_eq!(
            (says(&[]).as_deref(), says(&[&library()]).as_deref()),
            (Some("none\n"), Some("none\n"))
        );
    }
}

/// The first call has the dynamic linker asked, for which there is no stack, or none may be mapped. Of libfabric, which the
/// program was started with, also without a byte.
#[test]
fn a_library_s_functions_are_found_without_memory_and_under_a_filter() {
    let Some(programs) = programs() else { return };
    let (ours, fabric) = (library(), programs.join("libfabric.so.1"));
    let cases = [
        ("local.so", None, &["1000000"][..]),
        ("local.so", None, &["restricted"]),
        // What comes first is the end of a domain.
        ("local.so", None, &["1000000", "0"]),
        ("local.so", None, &["restricted", "0"]),
        // The program itself calls what it has looked up there.
        (BUNDLED, None, &["1000000"]),
        (BUNDLED, None, &["restricted"]),
        ("libfabric.so.1", None, &["1000000"]),
        ("libfabric.so.1", None, &["restricted"]),
        (VERSIONED, None, &["1000000"]),
        (VERSIONED, None, &["restricted"]),
        ("libfabric.so.1", Some(&*fabric), &["0"]),
        ("libfabric.so.1", Some(&*fabric), &["restricted"]),
    ];
    for (name, started_with, how) in cases {
        let path = programs.join(name);
        let case = [&[path.to_str().unwrap()], how].concat();
        for preloaded in [&[][..], &[&*ours]] {
            for settings in
                [&[][..], &[("PINFOLD_LIBFABRIC", "off")], &[("PINFOLD_LIBFABRIC", "on")]]
            {
                let preloaded: Vec<&Path> = preloaded.iter().copied().chain(started_with).collect();
                // Another libibverbs that could be opened.
                let path = programs.to_str().unwrap();
                let variables = [settings, &[("LD_LIBRARY_PATH", path)]].concat();
                let out = said_with("host", &preloaded, &variables, &case);
                let is_well = out.as_deref().is_some_and(|out| out.starts_with("0 failures\n"));
                assert!(is_well, "{preloaded:?}, {case:?}, {variables:?}: {out:?}");
            }
        }
    }
}

/// Where none is loaded the dynamic linker would look for a file of that name.
#[test]
fn a_libfabric_that_is_not_there_is_missed_without_opening_a_file() {
    let Some(programs) = programs() else { return };
    let path = [("LD_LIBRARY_PATH", programs.to_str().unwrap())];
    let says = |preloaded: &[&Path]| said_with("weak", preloaded, &path, &[]);
    assert_eq!(says(&[]).as_deref(), Some("none\n"));
    let absent = -libc::ENOSYS;
    assert_eq!(says(&[&library()]), Some(format!("{absent}\n{absent}\n")));
}

/// The dynamic linker's locks are as they were in the parent, where another thread may have held them.
#[test]
fn children_forked_beside_a_thread_that_loads_libraries_miss_libfabric() {
    all_end(&[]);
}

/// What their parent has found is asked for once, also by calls that only release.
#[test]
fn children_forked_beside_a_thread_that_loads_libraries_release_what_they_opened() {
    all_end(&["local.so"]);
}

fn all_end(library_s: &[&str]) {
    let Some(programs) = programs() else { return };
    let paths: Vec<_> =
        ["tls0.so"].iter().chain(library_s).map(|name| programs.join(name)).collect();
    let case: Vec<_> = paths.iter().map(|path| path.to_str().unwrap()).collect();
    for preloaded in [&[][..], &[&*library()]] {
        assert_eq!(said_by("children", preloaded, "on", &case).as_deref(), Some("all ended\n"));
    }
}

/// Behind this library there may be one that has `fi_fabric` alone: the other functions are libfabric's.
#[test]
fn a_libfabric_behind_one_that_stands_between_stays() {
    let Some(programs) = programs() else { return };
    let (ours, between) = (library(), programs.join("interposer.so"));
    let path = programs.join("libfabric.so.1");
    for (preloaded, says) in
        [(&[&*between][..], "0 failures\nunloaded\n"), (&[&*ours, &between], "0 failures\nstays\n")]
    {
        let out = said_by("host", preloaded, "on", &[path.to_str().unwrap(), "global"]);
        assert_eq!(out.as_deref(), Some(says), "{preloaded:?}");
    }
}

const STALE: &str = "some stale, hits\nchild: hits\n";
const TRUTHFUL: &str = "none stale, hits\nchild: no hits\n";

/// Which is off unless asked for, and leaves a cache off that is off.
#[test]
fn libfabric_s_cache_is_stale_and_truthful_with_the_monitor_imported() {
    let ours = library();
    let says = |preloaded: &[&Path], variables: &[(&str, &str)]| {
        said_with("fabric", preloaded, variables, &[])
    };
    let Some(stock) = says(&[], &[]) else { return };
    assert_eq!(stock, STALE);
    let on = ("PINFOLD_LIBFABRIC", "on");
    assert_eq!(says(&[&ours], &[]).as_deref(), Some(STALE));
    assert_eq!(says(&[&ours], &[on]).as_deref(), Some(TRUTHFUL));
    for without in [
        ("FI_MR_CACHE_MONITOR", "disabled"),
        ("FI_MR_CACHE_MAX_COUNT", "0"),
        ("PINFOLD_CACHE", "off"),
    ] {
        assert_eq!(says(&[&ours], &[on, without]).as_deref(), Some(STALE), "{without:?}");
    }
}

#[test]
fn libfabric_s_cache_is_told_what_changed() {
    let out = said_with("fabric", &[&library()], &[("PINFOLD_LIBFABRIC", "on")], &["told"]);
    assert!(out.is_none_or(|out| out == format!("{TRUTHFUL}dropped\n")));
}

/// `RTLD_LOCAL`, as MPI libraries load what needs libfabric; the library that brought it goes, and it stays.
#[test]
fn a_libfabric_that_a_library_brings_along_for_itself_gets_the_monitor() {
    let Some(programs) = programs() else { return };
    let (ours, local) = (library(), programs.join("fabric.so"));
    let on = [("PINFOLD_LIBFABRIC", "on")];
    let out = said_with("host", &[&ours], &on, &[local.to_str().unwrap()]);
    let expected = format!("{TRUTHFUL}dropped\n0 failures\nunloaded\n");
    assert_eq!(out.as_deref(), Some(&*expected));
}

/// A weak reference to what this library takes over is bound to it, whether or not libibverbs has the function.
#[test]
fn functions_that_an_old_libibverbs_lacks_do_what_it_can_do() {
    let ours = library();
    for preloaded in [&[][..], &[&*ours]] {
        for cache in ["off", "on"] {
            let case = ["asks_for_later_functions"];
            let Some(out) = said_by("program", preloaded, cache, &case) else { return };
            assert_eq!(out, "done\n", "{cache}, {preloaded:?}");
        }
    }
}

/// The C library ends the process with its last thread, and counts those of the library, too.
#[test]
fn a_process_ends_with_the_last_thread_of_the_program() {
    let ours = library();
    for case in [
        &["leaves_alone"][..],
        &["leaves_first"],
        &["leaves_first", "late"],
        &["child_leaves"],
        &["child_leaves", "late"],
    ] {
        let without = said_by("program", &[], "on", case);
        let with = said_by("program", &[&ours], "on", case);
        let ends = without.as_ref().is_none_or(|out| out.contains("at exit, USR1 1, TERM 0, 1\n"));
        assert!(ends && with == without, "{case:?}: {without:?}, with it {with:?}");
    }
}

/// Of each generation the library's threads are counted, those of its ancestors in none.
#[test]
fn a_process_after_many_forks_ends_with_the_last_thread_of_the_program() {
    let out = said_by("program", &[&library()], "on", &["generations_leave"]);
    assert!(out.as_deref().is_none_or(|out| out == "done\n"), "{out:?}");
}

/// The C library gives them the stacks of threads that the parent had.
#[test]
fn a_child_s_threads_are_the_program_s() {
    let Some((output, _)) = run(&["child_has_threads"]) else { return };
    assert_eq!(said(&output), done());
}

/// The thread that looks for the last one's end cannot be started: no addresses for its stack, or no thread more.
#[test]
fn a_process_that_may_start_no_thread_ends_with_the_last_one_of_the_program() {
    for case in [&["leaves_under_a_limit"][..], &["leaves_under_a_limit", "1"]] {
        let Some(out) = said_by("program", &[&library()], "on", case) else { return };
        assert_eq!(out, "last\nat exit\n", "{case:?}");
    }
}

/// The kernel says EINVAL, which no higher limit changes.
#[test]
fn a_process_whose_children_get_another_pid_namespace_learns_why_nothing_is_kept() {
    let Some((output, _)) = run(&["keeps_after_unshare"]) else { return };
    let (code, signal, out, errors) = said(&output);
    if out == "refused\n" {
        return eprintln!("skipped: no namespace may be made");
    }
    assert_eq!((code, signal, out.as_str()), (Some(0), None, "done\n"));
    let names = errors.contains("unshare(CLONE_NEWPID)") && !errors.contains("RLIMIT_NPROC");
    assert!(names && errors.contains("errno 22"), "{errors}");
}

/// As often as `PTHREAD_DESTRUCTOR_ITERATIONS` of glibc says.
#[test]
fn the_first_thread_destroys_the_program_s_keys_as_often_as_without_the_library() {
    let without = said_by("program", &[], "on", &["destroys_a_key"]);
    let with = said_by("program", &[&library()], "on", &["destroys_a_key", "threads"]);
    assert!(without.is_none() || without.as_deref() == Some("4 rounds\n"), "{without:?}");
    assert_eq!(with, without);
}

/// A thread of the library that kept the table that the program leaves would hold open what the program closes.
#[test]
fn a_program_with_a_new_table_of_descriptors_is_the_only_one_that_has_its_files() {
    for by in ["unshare", "close_range"] {
        let case = ["unshares_files", by];
        let without = said_by("program", &[], "on", &case);
        let with = said_by("program", &[&library()], "on", &case);
        assert_eq!(with, without, "{by}");
    }
    let out = said_by("program", &[&library()], "on", &["closes_at_once"]);
    assert!(out.is_none_or(|out| out == "end of file\n"));
}

/// Of a mount namespace the kernel asks that no other thread has the directories of the one that enters it.
#[test]
fn threads_of_the_library_share_neither_directories_nor_semaphores_with_the_program() {
    for case in ["leaves_its_directory", "undoes_semaphores"] {
        let without = said_by("program", &[], "on", &[case]);
        // With the third thread, and without.
        for variables in [&[][..], &[("PINFOLD_STATISTICS_SIGNAL", "USR1")]] {
            let with = said_with("program", &[&library()], variables, &[case]);
            assert_eq!(with, without, "{case}, {variables:?}");
        }
    }
}

/// A case that asks for reports at a signal, in a directory of its own.
fn asks_for_reports(case: &str) -> Option<Output> {
    let programs = programs()?;
    let (directory, name) = (programs.join(case), "reports-%p.json");
    std::fs::create_dir_all(&directory).unwrap();
    let mut command = patiently(&programs.join("program"));
    command
        .current_dir(&directory)
        .envs([("PINFOLD_STATISTICS", name), ("PINFOLD_STATISTICS_SIGNAL", "USR1")]);
    Some(built::output(command, &[&library()], &[case, name]))
}

/// The program has gone elsewhere, and closed all that it does not know.
#[test]
fn reports_at_a_signal_stand_where_the_program_was_when_it_first_registered() {
    let Some(output) = asks_for_reports("asks_for_reports") else { return };
    assert_eq!(said(&output), done());
}

/// A child inherits what the signal does, and no thread that waits for it.
#[test]
fn a_forked_child_reports_at_the_signal_as_its_parent_does() {
    let Some(output) = asks_for_reports("children_ask_for_reports") else { return };
    assert_eq!(said(&output), done());
}

#[test]
fn what_the_library_looks_for_in_vain_is_no_error_of_the_program_s() {
    let out = said_by("program", &[&library()], "on", &["asks_for_linker_errors"]);
    assert!(out.as_deref().is_none_or(|out| out == "none, none\n"), "{out:?}");
}

/// What counts is what it was started with.
#[test]
fn a_program_s_environment_is_its_own_to_change() {
    for how in ["strings", "cleared", "changed"] {
        let Some((output, statistics)) = run(&["replaces_its_environment", how]) else { return };
        assert_eq!(said(&output), done(), "{how}");
        assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"), "{how}");
    }
}

/// The marks that tell open files of one number from each other are few.
#[test]
fn a_device_that_was_opened_often_is_kept_in_as_at_first() {
    let case = ["closes_everything_again_and_again"];
    let out = said_by("program", &[&library()], "on", &case);
    assert!(out.as_deref().is_none_or(|out| out == "200 found\n"), "{out:?}");
}

/// The dynamic linker finds the program's function before the C library's.
#[test]
fn functions_that_a_program_has_under_names_of_posix_are_not_called() {
    let Some(programs) = programs() else { return };
    for leaves in [&[][..], &["leaves"]] {
        let statistics = programs.join("names.json");
        let mut command = patiently(&programs.join("names"));
        command.env("PINFOLD_STATISTICS", &statistics);
        let output = built::output(command, &[&library()], leaves);
        assert_eq!(said(&output), (Some(0), None, "0 calls\n".into(), String::new()), "{leaves:?}");
        assert!(std::fs::read_to_string(&statistics).unwrap().contains("\"hits\":2,"));
        std::fs::remove_file(statistics).unwrap();
    }
}

/// The kernel refuses to move several mappings at once where one is watched, and mappings are several because one is.
/// The upper half of the cases moves them by the number of the call.
#[test]
fn mappings_are_moved_as_without_the_library() {
    for which in 0..32 {
        let which = which.to_string();
        let case = ["moves_mappings", &which];
        let without = said_by("program", &[], "on", &case);
        let with = said_by("program", &[&library()], "on", &case);
        assert_eq!(with, without, "{which}");
    }
}

/// Nothing of the library's comes there while the call is made.
#[test]
fn memory_may_be_moved_to_where_nothing_is() {
    let Some((output, _)) = run(&["moves_to_a_hole"]) else { return };
    assert_eq!(said(&output), done());
}

/// More registrations than these have the thread that deregisters need memory of its own.
#[test]
fn many_mappings_may_be_moved_to_where_nothing_is() {
    for others in (0..=600).step_by(100) {
        let others = others.to_string();
        let case = ["moves_many_to_a_hole", &others];
        let without = said_by("program", &[], "on", &case);
        assert_eq!(said_by("program", &[&library()], "on", &case), without, "{others}");
    }
}

/// The kernel ends a process whose handler it cannot call.
#[test]
fn a_filter_of_the_program_s_may_have_moves_answered_by_a_handler() {
    let Some((output, _)) = run(&["moves_by_a_handler"]) else { return };
    assert_eq!(said(&output), done());
}

/// The other thread's registration may have the mapping watched again at any moment. Of 2,000 moves some ten were refused
/// half done where nothing but the watch was ended before the call: one run in ten thousand would have found none.
#[test]
fn mappings_are_moved_beside_a_thread_that_registers_as_without_the_library() {
    let case = ["moves_beside_registrations", "2000"];
    let without = said_by("program", &[], "on", &case);
    let with = said_with("program", &[&library()], &[("PINFOLD_KEEP_FROM", "1")], &case);
    assert_eq!(with, without);
}

/// The allocator's lock is taken: whatever the hook asks it for would wait for that.
#[test]
fn an_allocator_may_move_pages_under_its_lock() {
    let Some(programs) = programs() else { return };
    for way in ["fixed", "grows"] {
        let case = ["moves_in_its_allocator", programs.to_str().unwrap(), way];
        let out = said_by("counting", &[&library()], "on", &case);
        assert_eq!(out.as_deref(), Some("done\n"), "{way}");
    }
}

/// Whatever way the program takes its own rights away by.
#[test]
fn memory_that_the_program_may_not_use_is_not_found() {
    for way in ["mprotect", "pkey_mprotect", "by_number", "pkey_by_number"] {
        for cache in ["off", "on"] {
            let out = said_by("program", &[&library()], cache, &["protects", way]);
            assert!(out.is_none_or(|out| out == "registered\n"), "{way}, {cache}");
        }
    }
}

#[test]
fn memory_that_was_never_used_joins_its_neighbour_as_without_the_library() {
    let case = ["joins_what_was_never_used"];
    let without = said_by("program", &[], "on", &case);
    assert_eq!(said_by("program", &[&library()], "on", &case), without);
}

/// The lock may be held in a child by a thread that is not there. `patiently` ends what hangs.
#[test]
fn a_child_registers_without_the_dynamic_linker_s_lock() {
    for cache in ["on", "off"] {
        for case in [&["forks_beside_the_linker"][..], &["forks_beside_the_linker", "kept"]] {
            let out = said_by("program", &[&library()], cache, case);
            assert!(out.is_none_or(|out| out == "done\n"), "{cache} {case:?}");
        }
    }
}

/// More than the libraries' variables of threads may be set aside for them.
#[test]
fn room_for_variables_of_threads_is_counted_as_the_c_library_does() {
    for bytes in ["200000", "318500", "320000", "321500", "500000"] {
        let tunable = format!("glibc.rtld.optional_static_tls={bytes}");
        let variables = [("GLIBC_TUNABLES", tunable.as_str())];
        let out = said_with("program", &[&library()], &variables, &["leaves_first"]);
        let without = said_with("program", &[], &variables, &["leaves_first"]);
        assert_eq!(out, without, "{bytes}");
    }
}

/// What is watched is whole mappings, of which a part is kept.
#[test]
fn the_rest_of_a_mapping_of_which_a_part_is_kept_is_the_program_s() {
    for which in ["0", "1", "2"] {
        let case = ["uses_the_rest", which];
        let without = said_by("program", &[], "on", &case);
        let with = said_by("program", &[&library()], "on", &case);
        assert_eq!(with, without, "{which}");
    }
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
fn a_container_may_refuse_what_the_library_s_threads_begin_with() {
    let Some((output, statistics)) = run(&["in_a_strict_container"]) else { return };
    assert_eq!(said(&output), done());
    let line = std::fs::read_to_string(statistics).unwrap();
    assert!(
        line.contains("\"monitor\":\"userfaultfd\"") && !line.contains("\"hits\":0,"),
        "{line}"
    );
}

#[test]
fn a_program_that_asks_whether_there_are_filters_has_set_none() {
    let Some((output, statistics)) = run(&["asks_for_filters"]) else { return };
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
}

/// Each call that the library makes of its own may end it.
#[test]
fn a_program_that_registers_nothing_may_allow_itself_its_own_calls_alone() {
    let Some(programs) = programs() else { return };
    let summary = programs.join("restricted.summary");
    let summary = ("PINFOLD_SUMMARY", summary.to_str().unwrap());
    for way in ["watches", "leaves"] {
        let case = ["registers_nothing_in_a_sandbox", way];
        for cache in ["on", "off"] {
            let variables = [("PINFOLD_CACHE", cache), summary];
            let out = said_with("program", &[&library()], &variables, &case);
            assert_eq!(out.as_deref(), Some("done\n"), "{way}, {cache}");
        }
    }
}

/// Their mapping is watched anew between the end of the library's watch and the program's second attempt.
#[test]
fn the_program_s_userfaultfd_goes_first_also_beside_registrations() {
    let variables = [("PINFOLD_KEEP_FROM", "1")];
    let out = said_with("program", &[&library()], &variables, &["watches_beside_registrations"]);
    assert!(out.as_deref().is_none_or(|out| out == "0 refused\n"), "{out:?}");
}

/// Which the one waits for that has the range, and the other before it reads.
#[test]
fn a_move_may_wait_for_a_thread_whose_userfaultfd_takes_what_is_kept() {
    let Some((output, _)) = run(&["watches_beside_a_move"]) else { return };
    assert_eq!(said(&output), done());
}

/// It has its parent's memory, and the restriction is its own.
#[test]
fn a_restriction_that_a_child_of_vfork_takes_with_it_is_not_its_parent_s() {
    for (case, lines) in
        [(&["restricts_another_program"][..], 1), (&["restricts_another_program", "forked"], 2)]
    {
        let Some((output, statistics)) = run(case) else { return };
        assert_eq!(said(&output), done(), "{case:?}");
        let reports = std::fs::read_to_string(statistics).unwrap();
        let kept = reports.matches("\"hits\":3,").count() + reports.matches("\"hits\":2,").count();
        assert_eq!((reports.lines().count(), kept), (lines, lines), "{case:?}: {reports}");
    }
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

/// The handler interrupts a thread that has what the functions at the exit ask for, and does not return there.
#[test]
fn a_process_that_a_handler_ends_by_exit_ends() {
    let Some((output, _)) = run(&["exits_in_a_handler"]) else { return };
    assert_eq!(said(&output), done());
}

/// The handler may interrupt a thread that has the lock of this library's memory, too: one run in some 500 hung, so that all
/// of 2,000 would have ended by chance once in 50 times. What it hung by has a test of its own in `heap.rs`.
#[test]
fn a_process_that_a_handler_ends_while_it_evicts_ends() {
    let variables = [("PINFOLD_KEEP_FROM", "1"), ("PINFOLD_MAX_REGIONS", "1")];
    let Some((output, _)) = run_with(&["exits_while_it_evicts", "2000"], &variables) else {
        return;
    };
    assert_eq!(said(&output), done());
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

/// The program's end of it passes the library by, and what comes next has its address and its numbers.
#[test]
fn what_was_ended_by_another_route_gives_no_program_the_registration_of_something_else() {
    for successor in ["bytes", "rights"] {
        let case = ["ends_by_a_handle", successor];
        let out = said_by("reusing", &[&library()], "on", &case);
        assert!(out.is_none_or(|out| out == "its own\n"), "{successor}");
    }
}

#[test]
fn a_domain_is_deallocated_whatever_is_idle_in_another_structure_of_it() {
    let out = said_by("reusing", &[&library()], "on", &["imports_its_domain"]);
    assert!(out.is_none_or(|out| out == "deallocated\n"));
}

/// The device's open file is the parent's, too, so nothing in it ends with the child.
#[test]
fn a_child_that_exits_leaves_nothing_idle_in_its_parent_s_domain() {
    for how in ["idle", "unmapped", "late"] {
        let out = said_by("reusing", &[&library()], "on", &["child_uses_its_domain", how]);
        assert!(out.is_none_or(|out| out == "deallocated\n"), "{how}");
    }
}

/// It ends nothing that is idle, because it cannot end all.
#[test]
fn a_child_that_closes_a_device_leaves_what_is_idle_to_its_parent() {
    let out = said_by("reusing", &[&library()], "on", &["child_closes_a_device"]);
    assert!(out.is_none_or(|out| out == "deallocated\n"));
}

/// What the library keeps takes memory of its own, which it may not get.
#[test]
fn a_program_without_addresses_registers_as_without_the_library() {
    for addresses in ["0", "1500000"] {
        for keep_from in ["1", "2"] {
            let (case, variables) =
                (["has_no_more_addresses", addresses], [("PINFOLD_KEEP_FROM", keep_from)]);
            let out = said_with("reusing", &[&library()], &variables, &case);
            assert!(out.is_none_or(|out| out == "done\n"), "{addresses}, {keep_from}");
        }
    }
}

#[test]
fn idle_registrations_make_room_for_one_that_is_changed() {
    let Some((output, _)) = run(&["changes_without_room"]) else { return };
    assert_eq!(said(&output), done());
}

#[test]
fn idle_registrations_make_room_for_one_that_no_cache_keeps() {
    let case = ["registers_otherwise_without_room"];
    for cache in ["off", "on"] {
        let Some(out) = said_by("bundled", &[&library()], cache, &case) else { return };
        assert_eq!(out, "done\n", "{cache}");
    }
}

/// The C library may allocate at the first use of a variable of threads after libraries with such were loaded.
#[test]
fn threads_of_the_library_ask_the_program_s_allocator_for_nothing() {
    let Some(programs) = programs() else { return };
    let command = patiently(&programs.join("counting"));
    let output = built::output(command, &[&library()], &["loads_many", programs.to_str().unwrap()]);
    assert_eq!(said(&output), (Some(0), None, "asked by others 0\n".into(), String::new()));
}

/// The C library takes the room for them from each thread's stack.
#[test]
fn variables_of_threads_leave_the_library_s_threads_their_stacks() {
    let Some(programs) = programs() else { return };
    // Some pages less than 256 KiB, that and more.
    for bytes in ["200000", "240000", "250000", "254000", "300000", "1500000"] {
        let (name, option) = (format!("static-{bytes}"), format!("-DSTATIC_TLS={bytes}"));
        assert!(compile_program(programs, &name, &[&option]));
        let ours = library();
        let statistics = programs.join(format!("{name}.json"));
        let variables = [("PINFOLD_STATISTICS", statistics.to_str().unwrap())];
        let out = said_with(&name, &[&ours], &variables, &["has_variables_of_threads"]);
        assert_eq!(out.as_deref(), Some("done\n"), "{bytes}");
        let line = std::fs::read_to_string(statistics).unwrap();
        assert!(line.contains("\"monitor\":\"userfaultfd\""), "{bytes}: {line}");
        let without = said_by(&name, &[], "on", &["leaves_variables_of_threads"]);
        let with = said_by(&name, &[&ours], "on", &["leaves_variables_of_threads"]);
        assert_eq!(with, without, "{bytes}");
    }
}

/// On a machine whose processors are all busy each wake-up takes one from a thread of the program.
#[test]
fn changes_that_concern_nothing_idle_wake_the_thread_that_deregisters_once_in_a_while() {
    let Some((output, statistics)) = run(&["changes_often"]) else { return };
    assert_eq!(said(&output), done());
    assert!(std::fs::read_to_string(statistics).unwrap().contains("\"hits\":2,"));
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

/// Its own `malloc` would fail once it has as many mappings as it may have.
#[test]
fn an_arena_that_is_registered_as_it_grows_does_not_use_up_the_process_s_mappings() {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    if (numbers.next(), numbers.next()) < (Some(6), Some(11)) {
        // Each watch reads the whole table, of so many mappings.
        return eprintln!("skipped: the kernel does not tell of single mappings");
    }
    let Some((output, statistics)) = run(&["grows_an_arena"]) else { return };
    assert_eq!(said(&output), done());
    let line = std::fs::read_to_string(statistics).unwrap();
    let why = "half as many mappings as the process may have (vm.max_map_count)";
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    // More may be allowed than the program makes.
    let is_refused = allowed.trim().parse::<usize>().unwrap() / 2 < 69_000;
    assert_eq!(line.contains(why), is_refused, "{line}");
}

#[test]
fn huge_pages_of_a_pool_are_not_kept() {
    let Some((output, statistics)) = run(&["uses_huge_pages"]) else { return };
    if output.stdout == b"no huge pages\n" {
        return eprintln!("skipped: no huge page is set aside (vm.nr_hugepages)");
    }
    assert_eq!(said(&output), done());
    let line = std::fs::read_to_string(statistics).unwrap();
    let why = "huge pages of a pool (hugetlbfs), which would lack them";
    assert!(line.contains(&not_kept(why, "null", 7)) && line.contains("\"per_use\":7,"), "{line}");
}

#[test]
fn memory_that_libibverbs_keeps_from_children_has_a_reason_of_its_own() {
    let case = run_with(&["holds_until_the_end"], &[("IBV_FORK_SAFE", "1")]);
    let Some((output, statistics)) = case else { return };
    let (code, _, out, errors) = said(&output);
    assert_eq!((code, out.as_str()), (Some(0), "done\n"));
    assert!(errors.contains("UCX_IB_FORK_INIT=n") && errors.lines().count() == 1, "{errors}");
    let line = std::fs::read_to_string(statistics).unwrap();
    let why = "memory that libibverbs keeps from forked children (ibv_fork_init)";
    let change = "\"UCX_IB_FORK_INIT=n, RDMAV_FORK_SAFE and IBV_FORK_SAFE unset\"";
    assert!(line.contains(&not_kept(why, change, 131)), "{line}");
    assert!(line.contains("\"monitor\":\"refused\","), "{line}");
}

const RANK: [(&str, &str); 2] = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];

/// A case with a file for the summary. `timeout` is what the launcher would have started: it is the rank, too.
fn reports_to(file: &Path, case: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = patiently(&file.with_file_name("program"));
    command.env("PINFOLD_SUMMARY", file).envs(variables.iter().copied());
    built::output(command, &[&library()], &[case])
}

/// The lines of a summary, from a run with these variables besides: those of processes that began, and the others.
fn summary(case: &str, variables: &[(&str, &str)]) -> Option<[Vec<String>; 2]> {
    let file = programs()?.join(format!("{case}-{}.summary", variables.len()));
    std::fs::write(&file, "").unwrap();
    let output = reports_to(&file, case, variables);
    assert_eq!(said(&output), done(), "{case}");
    let lines = lines_of(&file);
    std::fs::remove_file(file).unwrap();
    Some(lines)
}

fn lines_of(file: &Path) -> [Vec<String>; 2] {
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty()).map(str::to_owned);
    let (began, others) = lines.partition(|line| line.contains("\"began\":"));
    [began, others]
}

#[test]
fn a_rank_is_in_the_summary_whether_or_not_it_registered_memory() {
    for case in ["registers_once", "registers_nothing"] {
        let Some([began, ended]) = summary(case, &RANK) else { return };
        // `timeout`, and the program; not the program's child.
        assert_eq!((began.len(), ended.len()), (2, 2), "{case}: {began:?}, {ended:?}");
        let is_rank = |line: &String| line.contains("\"rank\":1,\"ranks\":4,");
        assert!(began.iter().chain(&ended).all(is_rank), "{began:?}, {ended:?}");
        assert!(ended.iter().all(|line| line.contains("\"bypassed\":0,")), "{ended:?}");
        let passed = ended.iter().any(|line| line.contains("\"passed\":1,"));
        assert_eq!(passed, case == "registers_once", "{ended:?}");
    }
    let nothing = [vec![], vec![]];
    assert_eq!(summary("registers_nothing", &[]), Some(nothing), "no rank");
    let Some([began, ended]) = summary("registers_once", &[]) else { return };
    assert_eq!((began.len(), ended.len()), (0, 1), "{began:?}, {ended:?}");
    assert!(!ended[0].contains("rank"), "{ended:?}");
}

/// Under a limit on its memory, whichever that is: what the library takes as a process begins and ends it may not get. At
/// some the linker leaves the library out, or starts no program.
#[test]
fn a_process_begins_and_ends_however_little_memory_it_may_have() {
    let Some(programs) = programs() else { return };
    let file = programs.join("little.summary");
    std::fs::write(&file, "").unwrap();
    for limit in (100..2400).step_by(50).flat_map(|kib| [("-d", kib), ("-v", 1500 + 4 * kib)]) {
        for variables in [&[][..], &RANK] {
            let mut command = Command::new("sh");
            let script = format!("ulimit {} {} && exec \"$0\" registers_nothing", limit.0, limit.1);
            command.args(["-c", &script]).arg(programs.join("program"));
            command.env("PINFOLD_SUMMARY", &file).envs(variables.iter().copied());
            let (_, signal, _, errors) = said(&built::output(command, &[&library()], &[]));
            // So do the standard library's collections.
            assert_ne!(signal, Some(libc::SIGABRT), "{limit:?}, {variables:?}: {errors}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_has_begun() {
    let Some(programs) = programs() else { return };
    let file = programs.join("killed.summary");
    std::fs::write(&file, "").unwrap();
    reports_to(&file, "is_killed", &RANK);
    let [began, ended] = lines_of(&file);
    // `timeout` ends as its program does.
    assert_eq!((began.len(), ended.len()), (2, 0), "{began:?}, {ended:?}");
}

#[test]
fn a_process_with_the_cache_off_says_so_in_the_summary() {
    let off = ("PINFOLD_CACHE", "off");
    for variables in [&[off][..], &[off, RANK[0], RANK[1]]] {
        let Some([began, ended]) = summary("registers_once", variables) else { return };
        assert_eq!((began.len(), ended.len()), (2, 0), "{began:?}, {ended:?}");
        let says_so = |line: &String| line.contains("\"off\":\"PINFOLD_CACHE=off\",");
        assert!(began.iter().all(says_so), "{began:?}");
    }
    let variables = [("PINFOLD_KEEP_FROM", "never"), RANK[0], RANK[1]];
    let Some([began, _]) = summary("registers_nothing", &variables) else { return };
    assert!(began[0].contains("\"off\":\"PINFOLD_KEEP_FROM has a value that"), "{began:?}");
}

/// The file is made by the starter, on its machine alone.
#[test]
fn a_summary_s_file_is_made_where_each_process_has_its_own_alone() {
    let Some(programs) = programs() else { return };
    let directory = programs.join("summaries");
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir(&directory).unwrap();
    std::fs::copy(programs.join("program"), directory.join("program")).unwrap();
    let names = || {
        let entries = std::fs::read_dir(&directory).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != "program").collect::<Vec<_>>()
    };
    let run = |name: &str| {
        let output = reports_to(&directory.join(name), "registers_once", &RANK);
        assert_eq!(said(&output), done(), "{name}");
    };
    run("of-the-starter");
    assert!(names().is_empty(), "{:?}", names());
    run("of-%p");
    assert_eq!(names().len(), 2, "{:?}", names());
}

/// In `/tmp` of another machine anything can have the name of the starter's file.
#[test]
fn what_is_not_the_starter_s_file_is_left_as_it_is() {
    let Some(programs) = programs() else { return };
    let [target, name] = ["target.summary", "name.summary"].map(|name| programs.join(name));
    let clear = || [&target, &name].map(|path| _ = std::fs::remove_file(path));
    clear();
    let untouched = |what: &str| {
        let output = reports_to(&name, "registers_once", &RANK);
        assert_eq!(said(&output), done(), "{what}");
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "", "{what}");
        clear();
    };
    let make_target = || std::fs::write(&target, "").unwrap();
    make_target();
    std::os::unix::fs::symlink(&target, &name).unwrap();
    untouched("a link");
    make_target();
    std::fs::hard_link(&target, &name).unwrap();
    untouched("another name of a file");
    make_target();
    let make_pipe = || assert!(Command::new("mkfifo").arg(&name).status().unwrap().success());
    make_pipe();
    untouched("a pipe that no process reads");
    make_target();
    make_pipe();
    let mut reader = std::fs::OpenOptions::new();
    let mut reader = reader.read(true).custom_flags(libc::O_NONBLOCK).open(&name).unwrap();
    untouched("a pipe");
    assert_eq!(std::io::read_to_string(&mut reader).unwrap(), "");
    make_target();
    std::fs::copy(&target, &name).unwrap();
    if std::os::unix::fs::chown(&name, Some(65534), None).is_err() {
        clear();
        return eprintln!("skipped: only root can give a file away");
    }
    let output = reports_to(&name, "registers_once", &RANK);
    assert_eq!(said(&output), done());
    assert_eq!(std::fs::read_to_string(&name).unwrap(), "", "another user's");
    clear();
}

#[test]
fn a_report_that_is_torn_by_a_limit_ends_no_process_and_tears_no_other() {
    let Some(programs) = programs() else { return };
    let file = programs.join("torn.summary");
    std::fs::write(&file, "").unwrap();
    let (code, signal, out, errors) = said(&reports_to(&file, "reports_under_a_limit", &RANK));
    assert_eq!((code, signal, out.as_str()), (Some(0), None, "done\n"));
    assert!(errors.starts_with("pinfold: this process is missing in the summary: "), "{errors}");
    let [began, others] = lines_of(&file);
    let is_whole = |line: &&String| line.ends_with('}');
    assert_eq!((began.len(), others.len()), (2, 2), "{began:?}, {others:?}");
    assert_eq!(others.iter().filter(is_whole).count(), 1, "{others:?}");
}
