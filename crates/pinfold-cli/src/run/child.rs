//! A program run to its end as if in our place: signals reach it, and its end is ours.
//!
//! A signal that a terminal sends reaches the program without us; one that a process sends to us alone is sent on. While
//! there is no program, before it starts and after its end, a signal is only noted, so that the files are removed
//! that this process has made; a second one ends it at once.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change what signals do in this process, and to send them on.
//! The handler reads and writes atomics and makes system calls that handlers may make.

#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::{io, mem, ptr};

/// The process that signals are sent on to; 0 for none any more.
static CHILD: AtomicI32 = AtomicI32::new(NOT_YET);
const NOT_YET: i32 = -1;
/// The signal that arrived while there was none; 0 for none.
static NOTED: AtomicI32 = AtomicI32::new(0);

/// Signals that end a program which does not handle them.
const ENDING: [libc::c_int; 8] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGXCPU,
    libc::SIGALRM,
    libc::SIGINT,
    libc::SIGQUIT,
];
/// Those that a terminal sends to all its processes, the program among them.
const FROM_TERMINAL: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP];

/// Has signals noted from now on, and sent on to the program while it runs.
pub(super) fn catch_signals() {
    ENDING.into_iter().chain([libc::SIGTSTP, libc::SIGCONT]).for_each(catch);
}

/// Has signals do from now on what they do to a program without handlers; those that were ignored are.
pub(super) fn leave_signals() {
    for signal in ENDING {
        // SAFETY: no handler is set.
        let before = unsafe { libc::signal(signal, libc::SIG_DFL) };
        if before == libc::SIG_IGN {
            // SAFETY: as above.
            unsafe { libc::signal(signal, before) };
        }
    }
}

/// The exit status that a noted signal asks for.
pub(super) fn asked_to_end() -> Option<u8> {
    // SeqCst, as all here: a few times in a program's life.
    let signal = NOTED.load(Ordering::SeqCst);
    (signal != 0).then(|| as_exit_status(ExitStatus::from_raw(signal)))
}

/// Runs the program; the exit status to end with.
///
/// # Errors
///
/// It could not be started.
pub(super) fn run(mut program: Command) -> io::Result<u8> {
    let mut child = program.spawn()?;
    CHILD.store(i32::try_from(child.id()).unwrap_or(0), Ordering::SeqCst);
    // What arrived before was for the program.
    let earlier = NOTED.swap(0, Ordering::SeqCst);
    if earlier != 0 {
        send_to(CHILD.load(Ordering::SeqCst), earlier);
    }
    if earlier == libc::SIGTSTP {
        stop();
    }
    wait_for_end(child.id());
    CHILD.store(0, Ordering::SeqCst);
    child.wait().map(as_exit_status)
}

/// Leaves the child to be waited for, so that its number stays its own.
fn wait_for_end(child: u32) {
    loop {
        // SAFETY: the call writes into the structure only, for which zeros are a value.
        let ended = unsafe {
            let mut how: libc::siginfo_t = mem::zeroed();
            libc::waitid(libc::P_PID, child, &raw mut how, libc::WEXITED | libc::WNOWAIT)
        };
        if ended == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// One that is ignored stays so, for the program as well.
fn catch(signal: libc::c_int) {
    // SAFETY: the handler does only what handlers may, and system calls are begun again.
    unsafe {
        let mut before: libc::sigaction = mem::zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut before);
        if before.sa_sigaction == libc::SIG_IGN {
            return;
        }
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, ptr::null_mut());
    }
}

extern "C" fn on_signal(
    signal: libc::c_int,
    how: *const libc::siginfo_t,
    _context: *const libc::c_void,
) {
    // SAFETY: the kernel hands the handler a structure; errno is this thread's own, and what was interrupted reads it.
    let (errno, by_process) = unsafe { (*libc::__errno_location(), (*how).si_code <= 0) };
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0 && (by_process || !FROM_TERMINAL.contains(&signal)) {
        send_to(child, signal);
    }
    match signal {
        libc::SIGTSTP if child != NOT_YET => stop(),
        libc::SIGCONT => {
            let (ours, none) = (libc::SIGTSTP, 0);
            let _ = NOTED.compare_exchange(ours, none, Ordering::SeqCst, Ordering::SeqCst);
        }
        _ if child > 0 => {}
        _ if matches!(NOTED.swap(signal, Ordering::SeqCst), 0 | libc::SIGTSTP) => {}
        _ => as_by_default(signal),
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn send_to(child: libc::pid_t, signal: libc::c_int) {
    // SAFETY: the child has not been waited for, so the number is its own.
    unsafe { libc::kill(child, signal) };
}

/// Stops this process as the signal does to a program without a handler, which is that of the signal: a second one waits
/// for its end. A group that no shell watches is not stopped: nothing may continue it.
fn stop() {
    // SAFETY: handlers may make these calls.
    unsafe {
        let shell = libc::getppid();
        let is_watched =
            libc::getsid(shell) == libc::getsid(0) && libc::getpgid(shell) != libc::getpgrp();
        if is_watched {
            libc::raise(libc::SIGSTOP);
        }
    }
}

/// Ends this process by the signal, behind its handler.
fn as_by_default(signal: libc::c_int) {
    // SAFETY: handlers may make these calls.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
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
