//! A program run to its end as if in our place: signals reach it, and its end is ours.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change what signals do in this process, and to send them on.
//! The handler reads an atomic and makes one system call.

#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};

/// The process that signals are sent on to; 0 for none.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Signals that people and job managers send to one process; the program has them sent on.
const SENT_ON: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2];
/// Signals that a terminal sends to all its processes, the program among them.
const FROM_TERMINAL: [libc::c_int; 2] = [libc::SIGINT, libc::SIGQUIT];

/// Runs the program; the exit status to end with.
///
/// # Errors
///
/// It could not be started.
pub(super) fn run(mut program: Command) -> io::Result<u8> {
    let mut child = program.spawn()?;
    // SeqCst: once in a program's life.
    CHILD.store(i32::try_from(child.id()).unwrap_or(0), Ordering::SeqCst);
    SENT_ON.into_iter().for_each(|signal| handle(signal, send_on as extern "C" fn(_) as usize));
    // Not before the program was started: it would inherit that they are ignored.
    FROM_TERMINAL.into_iter().for_each(|signal| handle(signal, libc::SIG_IGN));
    let status = child.wait();
    CHILD.store(0, Ordering::SeqCst);
    status.map(as_exit_status)
}

fn handle(signal: libc::c_int, handler: libc::sighandler_t) {
    // SAFETY: the handler does only what handlers may, and system calls are begun again.
    unsafe { libc::signal(signal, handler) };
}

extern "C" fn send_on(signal: libc::c_int) {
    // SeqCst: as above.
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0 {
        // SAFETY: the child has not been waited for, so the number is its own.
        unsafe { libc::kill(child, signal) };
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
