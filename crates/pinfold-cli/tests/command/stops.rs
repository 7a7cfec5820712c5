//! How a program under `pinfold run` stops and continues, as the shell of a terminal has its jobs do.

use crate::endings::{WAITS, ready, state};
use crate::run::Scratch;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, waitpid};
use std::cell::Cell;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// What a shell waits for: the child's end, or its stop.
fn seen(scratch: &Scratch, child: &Child) -> WaitStatus {
    let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
    let status = Cell::new(None);
    scratch.await_that("the shell sees the command stop or end", || {
        status.set(waitpid(Some(Pid::from_child(child)), options).unwrap());
        status.get().is_some()
    });
    status.get().unwrap().1
}

/// As a shell with job control starts it: in a group whose parent is in another one.
fn job(mut command: Command) -> Command {
    command.process_group(0);
    command
}

#[test]
fn the_shell_sees_the_command_stopped_by_what_stopped_the_program() {
    let Some(scratch) = Scratch::new("seen") else { return };
    for signal in [Signal::TSTP, Signal::TTIN, Signal::TTOU] {
        let command = job(scratch.command(&["--quiet", "--", "sh", "-c", WAITS]));
        let (child, program) = ready(command);
        for _ in 0..2 {
            scratch.send(&child, signal.as_raw());
            assert_eq!(seen(&scratch, &child).stopping_signal(), Some(signal.as_raw()));
            assert_eq!(state(program), 'T');
            scratch.send(&child, libc::SIGCONT);
            scratch.await_that("the program continues", || state(program) != 'T');
        }
        scratch.send(&child, libc::SIGTERM);
        assert_eq!(seen(&scratch, &child).exit_status(), Some(5));
    }
}

#[test]
fn the_command_stops_with_a_program_that_stops_itself() {
    let Some(scratch) = Scratch::new("itself") else { return };
    for signal in [libc::SIGSTOP, libc::SIGTSTP] {
        let script = format!("kill -{signal} $$; exit 6");
        let mut command = job(scratch.command(&["--quiet", "--", "sh", "-c", &script]));
        let mut child = command.spawn().unwrap();
        assert_eq!(seen(&scratch, &child).stopping_signal(), Some(signal));
        scratch.send(&child, libc::SIGCONT);
        assert_eq!(child.wait().unwrap().code(), Some(6));
    }
}

#[test]
fn a_program_that_does_not_stop_keeps_the_command_from_stopping() {
    let Some(scratch) = Scratch::new("ignored") else { return };
    let script = format!("trap '' TSTP; {WAITS}");
    let (child, _) = ready(job(scratch.command(&["--quiet", "--", "sh", "-c", &script])));
    scratch.send_all(&child, &[libc::SIGTSTP, libc::SIGTERM]);
    assert_eq!(seen(&scratch, &child).exit_status(), Some(5), "it ends without a stop before");
}

#[test]
fn a_stop_that_is_over_at_once_stops_nothing_for_good() {
    let Some(scratch) = Scratch::new("over") else { return };
    let (mut child, _) = ready(job(scratch.command(&["--quiet", "--", "sh", "-c", WAITS])));
    for _ in 0..20 {
        scratch.send_all(&child, &[libc::SIGTSTP, libc::SIGCONT].repeat(20));
        scratch.await_that("it continues", || state(child.id()) != 'T');
    }
    scratch.send(&child, libc::SIGTERM);
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

/// Without a shell that could continue the command: what continues the program knows its number alone.
#[test]
fn a_stop_that_no_shell_watches_is_the_program_s_alone() {
    let Some(scratch) = Scratch::new("unwatched") else { return };
    let script = "(until grep -q '^State:.T' /proc/$$/status; do sleep 0.01; done; kill -CONT $$) &
        kill -STOP $$; wait; exit 6";
    let mut child = scratch.command(&["--quiet", "--", "sh", "-c", script]).spawn().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(6));
}

/// By a terminal of its own, where `script` makes one.
#[test]
fn what_a_terminal_sends_reaches_a_program_in_a_group_of_its_own() {
    let Some(scratch) = Scratch::new("terminal") else { return };
    let text = format!(
        "exec {} run --quiet -- timeout 100 sh -c \"{}\"",
        env!("CARGO_BIN_EXE_pinfold"),
        WAITS.replace('$', "\\$")
    );
    let program = scratch.program("program", &format!("#!/bin/sh\n{text}\n"));
    let mut command = Command::new("script");
    command.args(["-qec", program.to_str().unwrap(), "/dev/null"]);
    command.env("TMPDIR", scratch.place("tmp")).stdin(Stdio::piped());
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: no `script` here");
        return;
    }
    let (mut child, _) = ready(command);
    child.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    // `timeout` sends it once more: the shell may be about to end by the first.
    let status = seen(&scratch, &child).exit_status();
    assert!(matches!(status, Some(5 | 130)), "{status:?}");
    drop(child.stdin.take());
}
