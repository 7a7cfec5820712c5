//! Threads: those of the library's own, with all signals blocked from their first instruction, so that no
//! handler of the program ever runs on them; and what a thread asks for itself.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change the calling thread's signal mask around the start of
//! a thread, which inherits it, to start and join threads that are not the standard library's, and for calls
//! that take numbers.

#![allow(unsafe_code)]

use crate::process::Resource;
use std::ffi::CStr;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

/// Starts a thread named `name` (15 bytes at most are shown) that no signal interrupts.
///
/// # Errors
///
/// What the system says when it starts no more threads.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn(body)
}

/// As [`spawn`], for a thread that ends before `scope` does.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).spawn_scoped(scope, body)
}

/// A thread for which nothing is allocated once it runs, with one stack of 256 KiB.
///
/// The standard library's threads allocate, and the C library sets 64 MiB of addresses aside for each
/// thread that does, which a program with a limit on its address space notices.
#[derive(Debug)]
pub struct LeanThread<T: Sync + 'static> {
    thread: libc::pthread_t,
    /// What the thread works on; it has it until it is joined.
    shared: ManuallyDrop<Arc<Work<T>>>,
}

#[derive(Debug)]
struct Work<T> {
    body: fn(&T),
    on: T,
}

impl<T: Send + Sync + 'static> LeanThread<T> {
    const STACK: usize = 256 << 10;

    /// Runs `body` on `on`; `body` does not panic. As [`spawn`] otherwise.
    ///
    /// # Errors
    ///
    /// As [`spawn`].
    pub fn spawn(name: &CStr, on: T, body: fn(&T)) -> io::Result<Self> {
        extern "C" fn start<T>(work: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: `spawn` passes this, and it lives until the thread is joined, or for ever.
            let work = unsafe { &*work.cast_const().cast::<Work<T>>() };
            (work.body)(&work.on);
            std::ptr::null_mut()
        }
        let shared = Arc::new(Work { body, on });
        let argument = Arc::as_ptr(&shared).cast_mut().cast();
        let _blocked = SignalsBlocked::new();
        let mut attributes = MaybeUninit::uninit();
        let mut thread = MaybeUninit::uninit();
        // SAFETY: the attributes are made before they are used, and ended once; the thread gets what
        // `start` expects, which stays as long as it runs.
        let made = unsafe {
            let attributes = attributes.as_mut_ptr();
            succeeded(libc::pthread_attr_init(attributes))?;
            let made = succeeded(libc::pthread_attr_setstacksize(attributes, Self::STACK))
                .and_then(|()| {
                    let thread = thread.as_mut_ptr();
                    succeeded(libc::pthread_create(thread, attributes, start::<T>, argument))
                });
            libc::pthread_attr_destroy(attributes);
            made
        };
        made?;
        // SAFETY: the call above has filled it.
        let thread = unsafe { thread.assume_init() };
        // SAFETY: it was not joined; a name too long is refused, and the thread has none.
        unsafe { libc::pthread_setname_np(thread, name.as_ptr()) };
        Ok(Self { thread, shared: ManuallyDrop::new(shared) })
    }

    /// What it works on.
    pub fn on(&self) -> &T {
        &self.shared.on
    }

    /// Waits for its end.
    pub fn join(mut self) {
        // SAFETY: joined once; behind it the thread uses nothing any more. A value that is dropped
        // without this goes on for ever, and what it works on with it.
        unsafe {
            if libc::pthread_join(self.thread, std::ptr::null_mut()) == 0 {
                ManuallyDrop::drop(&mut self.shared);
            }
        }
    }
}

/// What functions of threads return.
fn succeeded(errno: libc::c_int) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
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

/// The calling thread's number.
pub fn thread_id() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).unwrap_or(0)
}

/// Has the calling thread run before all threads that the process may start: in real time, with the
/// highest priority that it may ask for. False if it may ask for none.
///
/// Threads and processes that this one starts do not inherit it.
pub fn run_before_all() -> bool {
    // SAFETY: the call takes and gives numbers.
    let highest = unsafe { libc::sched_get_priority_max(libc::SCHED_FIFO) };
    run_in_real_time(highest) || most_real_time_priority().is_some_and(run_in_real_time)
}

fn run_in_real_time(priority: libc::c_int) -> bool {
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the parameters.
    priority > 0 && unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// What `RLIMIT_RTPRIO` leaves to a process without privilege.
fn most_real_time_priority() -> Option<libc::c_int> {
    Resource::RealTimePriority.limit().soft.and_then(|most| most.try_into().ok())
}

/// Lets another thread run.
pub fn yield_now() {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::sched_yield() };
}

/// Sleeps without touching anything but the clock.
pub fn sleep(duration: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    };
    // SAFETY: the kernel reads `time`.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
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
    fn a_lean_thread_works_on_what_it_got_with_signals_blocked() {
        let (answer, inside) = mpsc::channel();
        let body = |answer: &mpsc::Sender<bool>| answer.send(is_blocked(libc::SIGUSR1)).unwrap();
        let thread = LeanThread::spawn(c"pinfold-test", answer, body).unwrap();
        thread.join();
        assert_eq!(inside.try_recv(), Ok(true));
        assert_eq!(inside.try_recv(), Err(mpsc::TryRecvError::Disconnected), "dropped by `join`");
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
