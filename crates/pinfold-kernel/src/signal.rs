//! Signals: blocked, taken, raised, handled, counted, or read from a descriptor.
//!
//! # Safety
//!
//! The unsafe code of this file is there to change a thread's signal mask and what a signal does. Blocking, ignoring and
//! raising signals break no invariant of memory; the one handler of this file's own does nothing but count and wake. Another
//! one is for its maker to answer for ([`handle`]).

use crate::errno::{Errno, done, last_errno, set_errno};
use crate::futex::{futex_wait, futex_wake};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Some signals.
#[derive(Clone, Copy, Debug)]
pub struct SignalSet(libc::sigset_t);

impl SignalSet {
    /// Those with these numbers; what is no signal, or the C library's own, is left out.
    pub fn of(signals: impl IntoIterator<Item = libc::c_int>) -> Self {
        let mut set = Self::none();
        for signal in signals {
            // SAFETY: the call writes into the set only.
            unsafe { libc::sigaddset(&raw mut set.0, signal) };
        }
        set
    }

    fn none() -> Self {
        // SAFETY: all zeros are an empty set.
        Self(unsafe { MaybeUninit::zeroed().assume_init() })
    }

    fn all() -> Self {
        let mut set = Self::none();
        // SAFETY: the call writes into the set only.
        unsafe { libc::sigfillset(&raw mut set.0) };
        set
    }

    /// Those that have arrived and that the thread blocks.
    pub(crate) fn pending() -> Self {
        let mut set = Self::none();
        // SAFETY: the call writes into the set only.
        unsafe { libc::sigpending(&raw mut set.0) };
        set
    }

    pub(crate) fn has(&self, signal: libc::c_int) -> bool {
        // SAFETY: the call reads the set.
        unsafe { libc::sigismember(&raw const self.0, signal) == 1 }
    }

    /// Has the calling thread block these, too; those that it had blocked. A handler may call this.
    pub fn block(&self) -> Self {
        self.change_mask(libc::SIG_BLOCK).unwrap_or_else(Self::none)
    }

    /// Has the calling thread block these no more. A handler may call this.
    pub fn unblock(&self) {
        self.change_mask(libc::SIG_UNBLOCK);
    }

    /// Has the calling thread block these and no others. A handler may call this.
    pub fn block_alone(&self) {
        self.change_mask(libc::SIG_SETMASK);
    }

    /// Those that were blocked; `None` if nothing could be changed.
    fn change_mask(&self, how: libc::c_int) -> Option<Self> {
        let mut before = Self::none();
        // SAFETY: the call reads one set and writes the other.
        let result = unsafe { libc::pthread_sigmask(how, &raw const self.0, &raw mut before.0) };
        (result == 0).then_some(before)
    }

    /// Takes one of them, all of which the calling thread blocks, that is pending: it does nothing then.
    pub fn take_pending(&self) -> Option<libc::c_int> {
        let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call reads the set and the time.
        let signal =
            unsafe { libc::sigtimedwait(&raw const self.0, ptr::null_mut(), &raw const no_time) };
        (signal > 0).then_some(signal)
    }
}

/// All signals are blocked on this thread until it is dropped. Allocates nothing.
#[derive(Debug)]
pub struct SignalsBlocked {
    /// The mask to go back to; `None` if it could not be changed.
    before: Option<SignalSet>,
}

impl SignalsBlocked {
    /// Two system calls with its end.
    #[allow(clippy::new_without_default)] // it does something
    pub fn new() -> Self {
        // Miri knows no signals.
        let is_known = !cfg!(miri);
        let block = || SignalSet::all().change_mask(libc::SIG_SETMASK);
        Self { before: is_known.then(block).flatten() }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            before.block_alone();
        }
    }
}

/// Runs `write`, whose signal, if it causes one, is not delivered: SIGPIPE without a reader, SIGXFSZ beyond the limit of
/// a file's size. A signal that was pending before stays so, and the error number is as it was.
pub fn without_write_signals<T>(write: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Before the signals are blocked: it reads the mask, too, and the error number is the caller's.
    let errno = last_errno();
    let blocked = SignalsBlocked::new();
    let before = SignalSet::pending();
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

/// Takes `signal`, which is blocked, if it is pending now and was not `before`.
fn take_unless(before: &SignalSet, signal: libc::c_int) {
    if !before.has(signal) {
        SignalSet::of([signal]).take_pending();
    }
}

/// What a signal does where no handler is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// What the kernel has it do.
    Default,
    /// Nothing.
    Ignored,
}

/// Whether the signal does nothing.
pub fn is_ignored(signal: libc::c_int) -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call writes into the structure only; all zero is a valid action.
    unsafe {
        libc::sigaction(signal, ptr::null(), now.as_mut_ptr());
        now.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Has the signal do this in the whole process. A handler may call this.
pub fn set_disposition(signal: libc::c_int, disposition: Disposition) {
    let action = match disposition {
        Disposition::Default => libc::SIG_DFL,
        Disposition::Ignored => libc::SIG_IGN,
    };
    // SAFETY: no handler is set.
    unsafe { libc::signal(signal, action) };
}

/// What is done when a signal arrives.
pub trait SignalHandler {
    /// `by_process`: a process has sent it, and not the kernel, as it does for a terminal.
    fn on_signal(signal: libc::c_int, by_process: bool);
}

/// Has `H` called when the signal arrives. The thread's error number stays, other signals wait for the handler's end, and
/// system calls are begun again. A handler may call this.
///
/// # Safety
///
/// `H` does only what handlers may (signal-safety(7)): it may interrupt any code.
pub unsafe fn handle<H: SignalHandler>(signal: libc::c_int) {
    extern "C" fn call<H: SignalHandler>(
        signal: libc::c_int,
        how: *const libc::siginfo_t,
        _context: *const libc::c_void,
    ) {
        let errno = last_errno();
        // SAFETY: the kernel hands the handler a structure.
        H::on_signal(signal, unsafe { (*how).si_code } <= 0);
        set_errno(errno);
    }
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zero is a valid action; the handler has the type that SA_SIGINFO asks for, and does what handlers may.
    unsafe {
        let action = action.assume_init_mut();
        action.sa_sigaction = call::<H> as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        action.sa_mask = SignalSet::all().0;
        libc::sigaction(signal, action, ptr::null_mut());
    }
}

/// Sends the signal to the calling thread. A handler may call this.
pub fn raise(signal: libc::c_int) {
    // SAFETY: takes a number. A handler was set with a promise of its own.
    unsafe { libc::raise(signal) };
}

/// Ends this process by the signal, without a core dump. Comes back where the signal ends no process, or not this one: the
/// first one of a PID namespace is not ended by its own signals.
pub fn end_by(signal: libc::c_int) {
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    set_disposition(signal, Disposition::Default);
    SignalSet::of([signal]).unblock();
    raise(signal);
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
        let set = SignalSet::of([libc::SIGTERM, libc::SIGINT, libc::SIGHUP]);
        set.block();
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the call reads the set.
        let number = unsafe { libc::signalfd(-1, &raw const set.0, flags) };
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
            raise(libc::SIGUSR2);
        }
        counted.wait();
        counted.wait();
        // No test raises it.
        set_disposition(libc::SIGUSR1, Disposition::Ignored);
        assert!(is_ignored(libc::SIGUSR1) && !is_ignored(libc::SIGUSR2));
        assert_eq!(CountedSignal::new(libc::SIGUSR1).err(), Some(Errno(libc::EBUSY)));
    }

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    struct Note;

    impl SignalHandler for Note {
        fn on_signal(signal: libc::c_int, by_process: bool) {
            set_errno(Errno(libc::EPERM));
            let noted = signal.cast_unsigned() | u32::from(by_process) << 16;
            HANDLED.store(noted, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_handler_is_told_the_signal_and_costs_no_error_number() {
        // SAFETY: the handler sets the thread's error number and a word.
        unsafe { handle::<Note>(libc::SIGURG) };
        set_errno(Errno(libc::EXDEV));
        raise(libc::SIGURG);
        assert_eq!(last_errno(), Errno(libc::EXDEV));
        assert_eq!(HANDLED.load(Ordering::Relaxed), libc::SIGURG.cast_unsigned() | 1 << 16);
        set_disposition(libc::SIGURG, Disposition::Default);
    }

    #[test]
    fn a_blocked_signal_is_taken_and_the_mask_is_as_it_was() {
        let winch = SignalSet::of([libc::SIGWINCH]);
        let before = winch.block();
        assert!(!before.has(libc::SIGWINCH));
        assert_eq!(winch.take_pending(), None);
        raise(libc::SIGWINCH);
        assert!(SignalSet::pending().has(libc::SIGWINCH));
        assert_eq!(winch.take_pending(), Some(libc::SIGWINCH));
        before.block_alone();
        assert!(!SignalSet::none().block().has(libc::SIGWINCH));
    }
}
