//! Signals: blocked, counted, or read from a descriptor.
//!
//! # Safety
//!
//! The unsafe code of this file is there to change a thread's signal mask and what a signal does. Blocking signals
//! breaks no invariant of memory; the one handler here does nothing but count and wake.

use crate::errno::{Errno, done, last_errno, set_errno};
use crate::futex::{futex_wait, futex_wake};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// All signals are blocked on this thread until it is dropped. Allocates nothing.
pub struct SignalsBlocked {
    /// The mask to go back to; `None` if it could not be changed.
    before: Option<libc::sigset_t>,
}

impl SignalsBlocked {
    /// Two system calls with its end.
    #[allow(clippy::new_without_default)] // it does something
    pub fn new() -> Self {
        // Miri knows no signals.
        if cfg!(miri) {
            return Self { before: None };
        }
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` fills the set; `pthread_sigmask` writes the old one when it returns
        // 0, and only then is it used.
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
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
        }
    }
}

impl std::fmt::Debug for SignalsBlocked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignalsBlocked").finish_non_exhaustive()
    }
}

/// Runs `write`, whose signal, if it causes one, is not delivered: SIGPIPE without a reader, SIGXFSZ beyond the limit of
/// a file's size. A signal that was pending before stays so, and the error number is as it was.
pub fn without_write_signals<T>(write: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Before the signals are blocked: it reads the mask, too, and the error number is the caller's.
    let errno = last_errno();
    let blocked = SignalsBlocked::new();
    let before = pending();
    let result = write();
    match result {
        Err(Errno(libc::EPIPE)) => take_unless(&before, libc::SIGPIPE),
        Err(Errno(libc::EFBIG)) => take_unless(&before, libc::SIGXFSZ),
        _ => {}
    }
    drop(blocked);
    set_errno(errno);
    result
}

fn pending() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the call fills the set; all zeros are an empty one.
    unsafe {
        libc::sigpending(set.as_mut_ptr());
        set.assume_init()
    }
}

/// Takes `signal`, which is blocked, if it is pending now and was not `before`.
fn take_unless(before: &libc::sigset_t, signal: libc::c_int) {
    let mut only = MaybeUninit::<libc::sigset_t>::zeroed();
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the sets are filled before they are read; a wait of no time takes the signal if it is pending.
    unsafe {
        if libc::sigismember(before, signal) != 1 {
            libc::sigemptyset(only.as_mut_ptr());
            libc::sigaddset(only.as_mut_ptr(), signal);
            libc::sigtimedwait(only.as_ptr(), ptr::null_mut(), &raw const no_time);
        }
    }
}

/// The signals that ask a service to end, and one that does no harm: blocked for this thread and
/// those that it starts, readable here instead.
#[derive(Debug)]
pub struct StopSignals(OwnedFd);

impl StopSignals {
    /// To be called before other threads start.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new() -> std::io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` fills the set before the others read it.
        let number = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        done(number)?;
        // SAFETY: the kernel has just given us this number.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(number) }))
    }
}

impl AsFd for StopSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How often the signal came that was not yet waited for.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A signal of this process that is counted instead of doing what it did.
#[derive(Debug)]
pub struct CountedSignal(());

impl CountedSignal {
    /// Has `signal` counted from now on, as long as the process lives. For one signal in a process; a forked child is
    /// another process, which inherits what the signal does and begins to count anew.
    ///
    /// # Errors
    ///
    /// The program handles the signal itself (`EBUSY`), or the system refuses.
    pub fn new(signal: libc::c_int) -> Result<Self, Errno> {
        count(signal).map(|()| Self(()))
    }

    /// Waits until it has come once more.
    pub fn wait(&self) {
        // Relaxed: a count that no other memory goes with.
        let take = || {
            COUNT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1))
        };
        while take().is_err() {
            futex_wait(&COUNT, 0);
        }
    }
}

/// Called once in a process.
fn count(signal: libc::c_int) -> Result<(), Errno> {
    let ours = post as extern "C" fn(libc::c_int) as usize;
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zero is a valid action; adding to a word and waking a thread is what a handler may do.
    unsafe {
        done(libc::sigaction(signal, ptr::null(), before.as_mut_ptr()))?;
        if ![libc::SIG_DFL, ours].contains(&before.assume_init().sa_sigaction) {
            return Err(Errno(libc::EBUSY));
        }
        // Relaxed: a count. What it says in a forked child is its parent's.
        COUNT.store(0, Ordering::Relaxed);
        let action = action.assume_init_mut();
        action.sa_sigaction = ours;
        action.sa_flags = libc::SA_RESTART;
        done(libc::sigaction(signal, action, ptr::null_mut()))
    }
}

extern "C" fn post(_: libc::c_int) {
    let before = last_errno();
    // Relaxed: as above.
    COUNT.fetch_add(1, Ordering::Relaxed);
    futex_wake(&COUNT);
    set_errno(before);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_counted_unless_the_program_has_it() {
        let counted = CountedSignal::new(libc::SIGUSR2).unwrap();
        for _ in 0..2 {
            // SAFETY: raises a signal that is handled above.
            unsafe { libc::raise(libc::SIGUSR2) };
        }
        counted.wait();
        counted.wait();
        // SAFETY: the signal is raised by no test.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
        assert_eq!(CountedSignal::new(libc::SIGUSR1).err(), Some(Errno(libc::EBUSY)));
    }
}
