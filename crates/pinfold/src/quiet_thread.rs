//! Threads of the library's own: with all signals blocked from their first instruction, so that no
//! handler of the program ever runs on them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change the calling thread's signal mask around the start of
//! a thread, which inherits it.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// Starts a thread named `name` (15 bytes at most are shown) that no signal interrupts.
///
/// # Errors
///
/// What the system says when it starts no more threads.
pub(crate) fn spawn(
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn(body)
}

/// As [`spawn`], for a thread that ends before `scope` does.
///
/// # Errors
///
/// As [`spawn`].
pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn_scoped(scope, body)
}

/// All signals are blocked on this thread until it is dropped.
struct SignalsBlocked {
    /// The mask to go back to; `None` if it could not be changed.
    before: Option<libc::sigset_t>,
}

impl SignalsBlocked {
    fn new() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` fills the set; `pthread_sigmask` writes the old one when it returns
        // 0, and only then is it used. Blocking signals breaks no invariant of memory.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            let blocked =
                libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0;
            blocked.then(|| before.assume_init())
        };
        Self { before }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: the set was filled by the call in `new`.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

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
        let (answer, inside) = mpsc::channel();
        let body = move || answer.send(is_blocked(libc::SIGUSR1)).unwrap();
        spawn("pinfold-test", body).unwrap().join().unwrap();
        assert!(inside.recv().unwrap());
        assert!(!is_blocked(libc::SIGUSR1));
    }
}
