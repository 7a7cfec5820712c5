//! Waiting for the program's end. What stops the program stops this process, so that a shell sees its job stopped.
//!
//! The order keeps a SIGCONT from being lost: the signal by which this process is to stop is blocked and pending before the
//! program is asked whether it still is stopped. A SIGCONT that arrives after that takes the pending one away, by the kernel's
//! own rule; an earlier one has been sent on, so that the program is not stopped any more.
//!
//! Other children are those that this process had before, or that were left to it: as the first process of a container, or
//! as a subreaper. Each is reaped as it ends; the program alone is left for its starter to reap, with its status.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to wait for children, and to change what a signal does in this process and raise it.

#![allow(unsafe_code)]

use super::signals::stop_by;
use std::{io, mem};

/// What has become of a child.
enum Change {
    Ended,
    Stopped(libc::c_int),
    /// It has made this process its tracer (`PTRACE_TRACEME`), and a signal is about to reach it.
    Traced(libc::c_int),
}

/// Leaves the program to be waited for, so that its number stays its own.
pub(super) fn for_end(program: libc::pid_t) {
    while let Some((process, change)) = next_change() {
        match change {
            Change::Stopped(signal) if process == program => stop_with(program, signal),
            Change::Ended if process == program => return,
            Change::Traced(signal) => let_go(process, signal),
            _ => reap(process),
        }
    }
}

/// Takes what is to be had of another child: its end, or its stop.
fn reap(process: libc::pid_t) {
    wait(libc::P_PID, process, ANY | libc::WNOHANG);
}

const ANY: libc::c_int = libc::WEXITED | libc::WSTOPPED;

/// Waits for the next one of any child, and leaves it to be asked for again.
fn next_change() -> Option<(libc::pid_t, Change)> {
    let how = wait(libc::P_ALL, 0, ANY | libc::WNOWAIT)?;
    // SAFETY: the kernel has filled in which child it is, and what ended or stopped it.
    let (process, signal) = unsafe { (how.si_pid(), how.si_status()) };
    let change = match how.si_code {
        libc::CLD_STOPPED => Change::Stopped(signal),
        libc::CLD_TRAPPED => Change::Traced(signal),
        _ => Change::Ended,
    };
    Some((process, change))
}

/// Traces a child no more: it goes on, with the signal. A trap is of the execution of a program, and none of its own.
fn let_go(process: libc::pid_t, signal: libc::c_int) {
    reap(process);
    let signal = if signal == libc::SIGTRAP { 0 } else { signal };
    // SAFETY: the call takes numbers alone; the child has stopped for this process.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, process, 0_usize, libc::c_long::from(signal)) };
}

/// `waitid`; `None` where it fails, or where nothing is to be had and `WNOHANG` says not to wait.
fn wait(
    which: libc::idtype_t,
    process: libc::pid_t,
    options: libc::c_int,
) -> Option<libc::siginfo_t> {
    loop {
        // SAFETY: the call writes into the structure only, for which zeros are a value; a number is there in all of them.
        let (failed, how, number) = unsafe {
            let mut how: libc::siginfo_t = mem::zeroed();
            let failed = libc::waitid(which, process.unsigned_abs(), &raw mut how, options) != 0;
            (failed, how, how.si_pid())
        };
        if !failed {
            return (number != 0).then_some(how);
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Whether the program has stopped and not been continued since; said once for each time it stops.
fn is_still_stopped(program: libc::pid_t) -> bool {
    wait(libc::P_PID, program, libc::WSTOPPED | libc::WNOHANG).is_some()
}

/// Stops this process as the program has stopped. The kernel asks whether a shell watches, but not for SIGSTOP: what
/// continues a program that has stopped itself unwatched may know the program's number alone.
fn stop_with(program: libc::pid_t, signal: libc::c_int) {
    if signal != libc::SIGSTOP {
        return stop_by(signal, || is_still_stopped(program));
    }
    if is_still_stopped(program) && is_watched() {
        // SAFETY: no handler is called.
        unsafe { libc::raise(signal) };
    }
}

/// Whether this process was started as a shell starts a job: in a group of its own.
fn is_watched() -> bool {
    // SAFETY: calls that only ask.
    unsafe {
        let shell = libc::getppid();
        libc::getsid(shell) == libc::getsid(0) && libc::getpgid(shell) != libc::getpgrp()
    }
}
