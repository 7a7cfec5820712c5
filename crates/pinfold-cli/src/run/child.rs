//! A program run to its end as if in our place: signals reach it, and its end is ours.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for what a child does before it executes the program, and to end this process by a signal.

#![allow(unsafe_code)]

use super::environment::Environment;
use super::signals::{self, change_mask, set_of};
use super::wait;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};

/// Ends this process as another one ended: by the same signal, or with the exit status that is returned. The first process of
/// a PID namespace is not ended by its own signals.
pub(super) fn end_as(status: ExitStatus) -> u8 {
    if let Some(signal) = status.signal() {
        // SAFETY: calls that change this process only, which has nothing left to do. The program's core dump is enough.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::signal(signal, libc::SIG_DFL);
            change_mask(libc::SIG_UNBLOCK, &set_of([signal]));
            libc::raise(signal);
        }
    }
    as_exit_status(status)
}

/// Runs the program that is prepared; how it ended.
///
/// # Errors
///
/// It could not be started.
pub(super) fn run(
    prepare: impl FnOnce() -> io::Result<(Command, Environment)>,
) -> io::Result<ExitStatus> {
    // Until it is known where to send them: a second one would end this process alone.
    let before = signals::hold();
    let mut missed = Vec::new();
    let started = prepare().and_then(|(program, environment)| {
        missed = signals::take_held();
        start(program, environment, before)
    });
    if let Ok(child) = &started {
        signals::send_to_program(child.id().cast_signed());
        missed.into_iter().for_each(|signal| signals::send_to(child.id().cast_signed(), signal));
    }
    change_mask(libc::SIG_SETMASK, &before);
    let mut child = started?;
    let program = child.id().cast_signed();
    signals::send_what_was_noted(program);
    wait::for_end(program);
    signals::send_to_none();
    child.wait()
}

fn start(
    mut program: Command,
    environment: Environment,
    mask: libc::sigset_t,
) -> io::Result<Child> {
    // SAFETY: a call that only asks.
    let parent = unsafe { libc::getpid() };
    let begin = move || {
        // SAFETY: a forked child has one thread, and leaves this closure, which has the environment, only to execute the program
        // or to end.
        unsafe { environment.install() };
        begin(&mask, parent);
        Ok(())
    };
    // SAFETY: the closure sets a pointer, reads atomics and makes system calls that handlers may make.
    unsafe { program.pre_exec(begin) };
    program.spawn()
}

/// In the child, behind what Rust's library does there: signals and streams are as they were for this command, and the one that no
/// process can send on ends both.
fn begin(mask: &libc::sigset_t, parent: libc::pid_t) {
    // SAFETY: calls that change this process only.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // 0: this process is in a PID namespace of its own, as `unshare --pid` has it, and its parent has no number there.
        if ![parent, 0].contains(&libc::getppid()) {
            libc::raise(libc::SIGKILL);
        }
    }
    signals::restore();
    signals::close_what_was_closed();
    change_mask(libc::SIG_SETMASK, mask);
}

/// As shells have it.
fn as_exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_s_number_is_added_to_128() {
        assert_eq!(as_exit_status(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(as_exit_status(ExitStatus::from_raw(libc::SIGKILL)), 137);
    }
}
