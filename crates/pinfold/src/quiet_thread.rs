//! Threads of the library's own: with all signals blocked, so that no handler of the program
//! ever runs on them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change the calling thread's signal mask around the start
//! of a thread, which inherits it.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

/// Starts a thread named `name` (15 bytes at most are shown) that no signal interrupts.
///
/// # Errors
///
/// What the system says when it starts no more threads.
pub(crate) fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn(body)
}

/// All signals are blocked on this thread until it is dropped.
struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    fn new() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` fills the set, and `pthread_sigmask` reads it and fills the other;
        // both fail on bad arguments only, which these are not.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self { before: before.assume_init() }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set was filled by the call in `new`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        let mut now = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: with no new set the call only fills the old one.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn the_thread_blocks_signals_and_its_parent_does_not() {
        let inside = spawn("pinfold-test", || is_blocked(libc::SIGUSR1)).unwrap();
        assert!(inside.join().unwrap());
        assert!(!is_blocked(libc::SIGUSR1));
    }
}
