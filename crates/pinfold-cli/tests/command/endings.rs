//! How a program under `pinfold run` ends, whatever becomes of what is printed and written, and which signals reach it.

use crate::run::Scratch;
use crate::support::status;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};

/// Says that it is ready, and ends with status 5 by one of these signals.
pub(crate) const WAITS: &str =
    "trap 'exit 5' INT QUIT TERM USR1 XCPU ALRM; echo $$; while :; do sleep 0.02; done";

/// The command, and its program's number, once that has said it.
pub(crate) fn ready(mut command: Command) -> (Child, u32) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().parse().unwrap())
}

#[test]
fn a_signal_to_the_command_alone_reaches_the_program() {
    let Some(scratch) = Scratch::new("reaches") else { return };
    for signal in
        [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGXCPU, libc::SIGALRM]
    {
        let mut command = scratch.command(&["--quiet", "--", "sh", "-c", WAITS]);
        command.stderr(Stdio::null());
        let (mut child, _) = ready(command);
        scratch.send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(5), "signal {signal}");
    }
    assert_eq!(scratch.leftovers(), [""; 0]);
}

#[test]
fn what_kills_the_command_kills_the_program() {
    let Some(scratch) = Scratch::new("kills") else { return };
    let (mut child, program) =
        ready(scratch.command(&["--quiet", "--", "sh", "-c", "echo $$; exec sleep 200"]));
    scratch.send(&child, libc::SIGKILL);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    let is_gone = || fs::metadata(format!("/proc/{program}")).is_err() || state(program) == 'Z';
    scratch.await_that("the program ends", is_gone);
}

#[test]
fn signals_while_the_program_starts_leave_neither_it_nor_a_file() {
    let Some(scratch) = Scratch::new("starts") else { return };
    // Found late.
    let path = "/no/such/directory:".repeat(5000) + "/usr/bin:/bin";
    for _ in 0..5 {
        let mut command = scratch.command(&["--quiet", "--", "sleep", "20"]);
        let mut child = command.env("PATH", &path).spawn().unwrap();
        scratch.await_that("the command starts it", || !scratch.leftovers().is_empty());
        scratch.send_all(&child, &[libc::SIGTERM, libc::SIGINT]);
        let ended = child.wait().unwrap();
        assert!(ended.signal().is_some(), "{ended}");
        assert_eq!(scratch.leftovers(), [""; 0]);
    }
}

/// The letter that the kernel has for a process's state.
pub(crate) fn state(process: u32) -> char {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    text.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap()
}

#[test]
fn the_command_stops_with_the_program_and_continues_with_it() {
    let Some(scratch) = Scratch::new("stops") else { return };
    let mut command = scratch.command(&["--quiet", "--", "sh", "-c", WAITS]);
    // In a group whose parent is in another one: the kernel stops no others by this signal.
    let (mut child, program) = ready({
        command.process_group(0);
        command
    });
    for (signal, stopped) in [
        (libc::SIGTSTP, true),
        (libc::SIGCONT, false),
        (libc::SIGTSTP, true),
        (libc::SIGCONT, false),
    ] {
        scratch.send(&child, signal);
        for process in [child.id(), program] {
            scratch.await_that("it stops or continues", || (state(process) == 'T') == stopped);
        }
    }
    scratch.send(&child, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn a_signal_after_the_program_s_end_ends_the_command() {
    let Some(scratch) = Scratch::new("after") else { return };
    // Full, so that the summary cannot be written there for now.
    let (_reader, mut full) = UnixStream::pair().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.write(&[b'.'; 4096]).is_ok() {}
    full.set_nonblocking(false).unwrap();
    let mut command = scratch.command(&["--", "sh", "-c", "echo 1"]);
    command.stderr(OwnedFd::from(full));
    let (mut child, _) = ready(command);
    scratch.await_that("the reports are read and gone", || scratch.leftovers().is_empty());
    scratch.await_that("the command writes", || state(child.id()) == 'S');
    scratch.send(&child, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
}

#[test]
fn what_cannot_be_printed_changes_nothing() {
    let Some(scratch) = Scratch::new("full") else { return };
    let dangerous = |command: &mut Command| {
        command.env("UCX_RCACHE_ENABLE", "y").stdout(Stdio::null()).status().unwrap().code()
    };
    let words = ["--for", "mpi", "--", "sh", "-c", "exit 7"];
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(dangerous(scratch.command(&words).stderr(full)), Some(7));
    let mut closed = Command::new("sh");
    closed
        .args(["-c", "exec \"$0\" \"$@\" 2>&-", env!("CARGO_BIN_EXE_pinfold"), "run"])
        .args(words);
    assert_eq!(dangerous(&mut closed), Some(7));
}

#[test]
fn a_summary_that_cannot_be_written_is_refused_before_the_program_starts() {
    let Some(scratch) = Scratch::new("json") else { return };
    let started = scratch.place("started");
    let start = |json: &str| {
        let words = ["--json", json, "--", "touch", started.to_str().unwrap()];
        scratch.command(&words).output().unwrap()
    };
    let refused = start("/no/such/directory/file");
    assert_eq!((status(&refused), started.exists()), (2, false), "{refused:?}");
    let full = start("/dev/full");
    let errors = String::from_utf8_lossy(&full.stderr);
    assert_eq!((status(&full), started.exists()), (0, true), "the program's status stays");
    assert!(errors.contains("the summary could not be written"), "{errors}");
    let longer = scratch.place("longer");
    File::create(&longer).unwrap().write_all(&[b' '; 100_000]).unwrap();
    assert_eq!(status(&start(longer.to_str().unwrap())), 0);
    assert!(fs::read(&longer).unwrap().len() < 10_000, "what was there is gone");
}

#[test]
fn a_summary_that_no_file_may_have_changes_nothing() {
    let Some(scratch) = Scratch::new("limit") else { return };
    let json = scratch.place("json");
    let words = ["run", "--json", json.to_str().unwrap(), "--", "sh", "-c", "exit 7"];
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -f 0; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_pinfold")])
        .args(words);
    let output = command.env("TMPDIR", scratch.place("tmp")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("could not be written: File too large"), "{errors}");
    assert_eq!((output.status.code(), scratch.leftovers()), (Some(7), vec![]));
}

/// Where an ordinary user may have namespaces.
#[test]
fn a_program_in_a_pid_namespace_of_its_own_starts() {
    let Some(scratch) = Scratch::new("namespace") else { return };
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        // The first process of the namespace, which its own signals do not end, is another one.
        let script = "exec 3<&0; cat <&3 >/dev/null 2>&1 & exec \"$@\"";
        command.args(["--user", "--map-root-user", "--pid", "sh", "-c", script, "sh"]).args(words);
        command.env("TMPDIR", scratch.place("tmp")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let _until_its_end = child.stdin.take();
        child.wait_with_output().ok()
    };
    let program = ["sh", "-c", "echo started"];
    let alone = unshare(&program);
    if !alone.is_some_and(|output| output.status.success()) {
        eprintln!("skipped: no namespaces here");
        return;
    }
    let run = [env!("CARGO_BIN_EXE_pinfold"), "run", "--quiet", "--"];
    let output = unshare(&[&run[..], &program].concat()).unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "started\n", "{output:?}");
}

/// As in a container: what its other processes leave behind becomes the first process's.
#[test]
fn the_first_process_of_a_namespace_reaps_what_others_leave_and_keeps_its_program_s_status() {
    let Some(scratch) = Scratch::new("orphans") else { return };
    let start = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork"]).args(words);
        command.env("TMPDIR", scratch.place("tmp")).output().ok()
    };
    if !start(&["true"]).is_some_and(|output| output.status.success()) {
        eprintln!("skipped: no namespaces here");
        return;
    }
    let script = "orphan() { sh -c 'true >/dev/null & echo $!'; }
        for it in 1 2 3; do
            orphan=$(orphan) tries=0
            while kill -0 $orphan; do
                [ $tries -lt 500 ] || exit 9
                tries=$((tries + 1)); sleep 0.01
            done
        done 2>/dev/null
        orphan; orphan; exit 3";
    let run = [env!("CARGO_BIN_EXE_pinfold"), "run", "--quiet", "--", "sh", "-c", script];
    assert_eq!(status(&start(&run).unwrap()), 3);
}

#[test]
fn only_regular_files_are_read() {
    let Some(scratch) = Scratch::new("fifo") else { return };
    let place = scratch.place("reports");
    fs::create_dir(&place).unwrap();
    let shared = [
        "--reports",
        place.to_str().unwrap(),
        "--",
        "sh",
        "-c",
        "mkfifo \"$(dirname \"$PINFOLD_SUMMARY\")/a.1\"",
    ];
    assert_eq!(status(&scratch.command(&shared).output().unwrap()), 0);
    let own = ["--", "sh", "-c", "rm \"$PINFOLD_SUMMARY\" && mkfifo \"$PINFOLD_SUMMARY\""];
    assert_eq!(status(&scratch.command(&own).output().unwrap()), 0);
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
    assert_eq!(scratch.leftovers(), [""; 0]);
}

#[test]
fn reports_are_found_wherever_the_program_goes_or_their_place_is_refused() {
    let Some(scratch) = Scratch::new("tmpdir") else { return };
    let report =
        "cd / && [ -f \"$PINFOLD_SUMMARY\" ] && echo '{\"gets\":3}' >> \"$PINFOLD_SUMMARY\"";
    let mut relative = scratch.command(&["--", "sh", "-c", report]);
    let output = relative.current_dir(scratch.place("")).env("TMPDIR", ".").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("3 registrations asked for"), "{errors}");
    let mut marked = scratch.command(&["--", "true"]);
    let output = marked.env("TMPDIR", scratch.place("%h")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(status(&output) == 77 && errors.contains("use another directory"), "{errors}");
    let mut missing = scratch.command(&["--", "true"]);
    let output = missing.env("TMPDIR", scratch.place("missing")).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(status(&output) == 77 && errors.contains("/missing: No such file"), "{errors}");
    let mut empty = scratch.command(&["--quiet", "--", "true"]);
    assert_eq!(status(&empty.env("TMPDIR", "").output().unwrap()), 0);
    assert_eq!(status(&scratch.command(&["--", "/no/such/program"]).output().unwrap()), 127);
    assert_eq!(scratch.leftovers(), [""; 0]);
}

#[test]
fn what_the_starter_ignores_the_program_ignores_and_its_status_is_kept() {
    let Some(scratch) = Scratch::new("ignores") else { return };
    let program = ["sh", "-c", "sed -n '/^SigIgn/p' /proc/$$/status; exit 3"];
    for ignored in ["", "trap '' PIPE CHLD XFSZ;"] {
        let start = |words: &[&str]| {
            let script = format!("{ignored} exec \"$@\"");
            let mut command = Command::new("sh");
            command.args(["-c", &script, "sh"]).args(words).args(program);
            command.env("TMPDIR", scratch.place("tmp")).output().unwrap()
        };
        let [alone, run] =
            [&[][..], &[env!("CARGO_BIN_EXE_pinfold"), "run", "--quiet", "--"]].map(start);
        assert!(status(&alone) == 3 && alone.stdout.starts_with(b"SigIgn"), "{alone:?}");
        assert_eq!((&run.stdout, status(&run)), (&alone.stdout, 3), "{ignored} {run:?}");
    }
    assert_eq!(scratch.leftovers(), [""; 0]);
}

/// A descriptor that is closed is not one that leads nowhere: what is written there fails.
#[test]
fn standard_streams_that_are_closed_are_closed_for_the_program() {
    let Some(scratch) = Scratch::new("closed") else { return };
    let open =
        "open=1; for it in 0 1 2; do [ ! -e /proc/$$/fd/$it ] || open=${open}$it; done; exit $open";
    for closing in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        let start = |words: &[&str]| {
            let script = format!("exec \"$@\" {closing}");
            let mut command = Command::new("sh");
            command.args(["-c", &script, "sh"]).args(words).args(["sh", "-c", open]);
            command.env("TMPDIR", scratch.place("tmp")).output().unwrap()
        };
        let [alone, run] =
            [&[][..], &[env!("CARGO_BIN_EXE_pinfold"), "run", "--quiet", "--"]].map(start);
        assert_eq!(status(&run), status(&alone), "{closing}");
    }
    assert_eq!(scratch.leftovers(), [""; 0]);
}

/// Its tracer is then the process that has started it, as it would be a shell.
#[test]
fn a_program_that_asks_to_be_traced_goes_on_to_its_own_end() {
    let Some(scratch) = Scratch::new("traced") else { return };
    let script = "import ctypes, os, signal, sys
def end(*_):
    sys.exit(7)
signal.signal(signal.SIGUSR1, end)
if ctypes.CDLL(None).ptrace(0, 0, None, None) != 0:
    sys.exit(9)
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(8)";
    let python = Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: no python3 here");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(["run", "--quiet", "--", "python3", "-c", script]);
    let output = command.env("TMPDIR", scratch.place("tmp")).output().unwrap();
    if status(&output) == 9 {
        return eprintln!("skipped: no program may be traced here");
    }
    assert_eq!(status(&output), 7, "{output:?}");
}

#[test]
fn every_signal_that_ends_a_program_reaches_it() {
    let Some(scratch) = Scratch::new("every") else { return };
    let timers = [libc::SIGVTALRM, libc::SIGPROF];
    let others =
        [libc::SIGIO, libc::SIGPWR, libc::SIGSTKFLT, libc::SIGRTMIN() + 3, libc::SIGRTMAX()];
    for signal in timers.into_iter().chain(others) {
        let script = "echo $$; exec sleep 200";
        let (mut child, _) = ready(scratch.command(&["--quiet", "--", "sh", "-c", script]));
        scratch.send(&child, signal);
        assert_eq!(child.wait().unwrap().signal(), Some(signal));
    }
    for signal in timers.into_iter().chain(others).chain([libc::SIGWINCH, libc::SIGURG]) {
        let script = format!("trap 'exit 5' {signal}; {WAITS}");
        let (mut child, _) = ready(scratch.command(&["--quiet", "--", "sh", "-c", &script]));
        scratch.send_all(&child, &[signal]);
        assert_eq!(child.wait().unwrap().code(), Some(5), "signal {signal}");
    }
    assert_eq!(scratch.leftovers(), [""; 0]);
}
