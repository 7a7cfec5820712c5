//! Waiting for the program's end. What stops the program stops this process, so that a shell sees its job stopped.
//!
//! The order keeps a SIGCONT from being lost: the signal by which this process is to stop is blocked and pending before the
//! program is asked whether it still is stopped. A SIGCONT that arrives after that takes the pending one away, by the kernel's
//! own rule; an earlier one has been sent on, so that the program is not stopped any more.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to wait for children, and to change what a signal does in this process and raise it.

#![allow(unsafe_code)]

use super::child::{catch, change_mask, set_of};
use std::{io, mem, ptr};

/// What has become of the program.
enum Change {
    Ended,
    Stopped(libc::c_int),
}

/// Leaves the program to be waited for, so that its number stays its own.
pub(super) fn for_end(program: libc::pid_t) {
    while let Some(Change::Stopped(signal)) = next_change(program) {
        stop_with(program, signal);
    }
}

/// Waits for the next one, and leaves it to be asked for again.
fn next_change(program: libc::pid_t) -> Option<Change> {
    let how = wait(program, libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT)?;
    if how.si_code != libc::CLD_STOPPED {
        return Some(Change::Ended);
    }
    // SAFETY: the kernel has filled in what stopped a child.
    Some(Change::Stopped(unsafe { how.si_status() }))
}

/// `waitid`; `None` where it fails, or where nothing is to be had and `WNOHANG` says not to wait.
fn wait(process: libc::pid_t, options: libc::c_int) -> Option<libc::siginfo_t> {
    loop {
        // SAFETY: the call writes into the structure only, for which zeros are a value; a number is there in all of them.
        let (failed, how, number) = unsafe {
            let mut how: libc::siginfo_t = mem::zeroed();
            let id = process.unsigned_abs();
            let failed = libc::waitid(libc::P_PID, id, &raw mut how, options) != 0;
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
    wait(program, libc::WSTOPPED | libc::WNOHANG).is_some()
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

/// Stops this process by a signal as it does to a program without a handler, if it is due once it is pending. A handler may
/// call this. The kernel stops no group that no shell watches: nothing may continue it.
pub(super) fn stop_by(signal: libc::c_int, is_due: impl FnOnce() -> bool) {
    let set = set_of(&[signal]);
    let before = change_mask(libc::SIG_BLOCK, &set);
    // SAFETY: no handler is called.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
    if is_due() {
        // This process stops here.
        change_mask(libc::SIG_UNBLOCK, &set);
    } else {
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call reads the set and the time.
        unsafe { libc::sigtimedwait(&raw const set, ptr::null_mut(), &raw const at_once) };
    }
    catch(signal);
    change_mask(libc::SIG_SETMASK, &before);
}
