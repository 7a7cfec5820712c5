//! A gate that a thread holds while others may have to wait for it: it runs with their priority meanwhile.
//!
//! A thread without a priority of its own that has a lock may lose its processor to a real-time thread; a thread of higher
//! priority that wants the lock waits for both, for ever where that one never sleeps (priority inversion). The standard
//! library's locks pass no priority on. The gate does (`FUTEX_LOCK_PI`): a thread holds it around the lock, and others
//! [`pass`](PriorityGate::pass) it before they ask for the lock, which costs a load while no thread holds it.
//!
//! It guards nothing: where the kernel refuses (no such futexes, a filter of system calls), or is not to be asked, all go
//! on without it.

use crate::thread::thread_id;
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

/// See the module.
#[derive(Debug)]
pub struct PriorityGate {
    /// The kernel's number of the thread that holds it, with a bit while others wait; 0 if none does.
    holder: AtomicU32,
    /// Whether the kernel may be asked to wait.
    may_wait: fn() -> bool,
}

/// The gate is held until this is dropped, by the thread that has it.
#[derive(Debug)]
#[must_use = "the gate is held until this is dropped"]
pub struct HeldGate<'a> {
    /// The gate and this thread's number, unless the kernel refused.
    held: Option<(&'a PriorityGate, u32)>,
    of_this_thread: PhantomData<*const ()>,
}

impl PriorityGate {
    /// No thread holds it. `may_wait` is asked where a thread finds another there: if it says no, that thread goes on, and no
    /// system call is made that a program's filter may answer with a signal.
    pub const fn new(may_wait: fn() -> bool) -> Self {
        Self { holder: AtomicU32::new(0), may_wait }
    }

    /// Waits until no other thread holds it, and holds it. A thread that holds it already goes on, at the price of a system
    /// call.
    ///
    /// Not in a forked child of a process in which a thread held it.
    pub fn hold(&self) -> HeldGate<'_> {
        let thread = thread_id();
        let held = self.enter(thread).then_some((self, thread));
        HeldGate { held, of_this_thread: PhantomData }
    }

    /// Waits while another thread holds it, which has the caller's priority meanwhile if that is higher. As
    /// [`hold`](Self::hold) otherwise. False if it did not wait although it is held.
    pub fn pass(&self) -> bool {
        !self.is_held() || self.hold().held.is_some()
    }

    /// Whether a thread holds it, this one or another.
    pub fn is_held(&self) -> bool {
        // Relaxed: a thread that enters at this moment may be missed, and is then waited for without this. One that entered
        // before it released a lock that this thread has acquired since is not.
        self.holder.load(Ordering::Relaxed) != 0
    }

    /// False if the kernel refuses, also because this thread holds it, or is not to be asked.
    fn enter(&self, thread: u32) -> bool {
        // Relaxed: no memory is handed over by it, here and at the end.
        let (relaxed, holder) = (Ordering::Relaxed, &self.holder);
        while thread != 0 && holder.compare_exchange(0, thread, relaxed, relaxed).is_err() {
            if !(self.may_wait)() {
                return false;
            }
            match futex::lock_pi(holder, Flags::PRIVATE, None) {
                Ok(()) => return true,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => return false,
            }
        }
        thread != 0
    }
}

impl Drop for HeldGate<'_> {
    fn drop(&mut self) {
        let Some((PriorityGate { holder, .. }, thread)) = self.held else { return };
        let relaxed = Ordering::Relaxed;
        // Others wait if the word is another: the kernel gives it to one of them.
        if holder.compare_exchange(thread, 0, relaxed, relaxed).is_err() {
            let _ = futex::unlock_pi(holder, Flags::PRIVATE);
        }
    }
}

/// What the kernel runs a thread of this process with, lent to it or not; below 0 for real time. `None` if there is no such
/// thread, or no `/proc`.
pub fn priority_of(thread: u32) -> Option<i32> {
    let line = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let behind_name = line.rsplit(')').next()?;
    behind_name.split_whitespace().nth(15)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::{run_before_all, yield_now};
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn a_thread_that_is_waited_for_has_the_priority_of_the_one_that_waits() {
        let (gate, (may_run, answer)) = (PriorityGate::new(|| true), channel());
        let held = gate.hold();
        let own = thread_id();
        let before = priority_of(own).unwrap();
        assert!(before >= 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                may_run.send(run_before_all()).unwrap();
                gate.pass();
            });
            if !answer.recv().unwrap() {
                return eprintln!("skipped: no real-time priority may be had");
            }
            while priority_of(own).unwrap() >= 0 {
                yield_now();
            }
            drop(held);
            assert_eq!(priority_of(own).unwrap(), before);
        });
    }

    #[test]
    fn no_thread_waits_that_must_not_ask_the_kernel() {
        let gate = PriorityGate::new(|| false);
        let held = gate.hold();
        let passed = thread::scope(|scope| scope.spawn(|| gate.pass()).join().unwrap());
        assert!(gate.is_held() && !passed);
        drop(held);
        assert!(!gate.is_held() && gate.pass());
    }

    #[test]
    fn it_is_held_once_at_a_time_and_by_its_holder_again() {
        let (gate, inside) = (PriorityGate::new(|| true), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let _held = gate.hold();
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        gate.pass();
                        inside.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(gate.holder.load(Ordering::Relaxed), 0);
    }
}
