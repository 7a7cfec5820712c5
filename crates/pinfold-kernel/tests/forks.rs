//! Children that are forked while another thread makes values that the whole process has.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to fork.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // tests may fail loudly

use pinfold_core::first_made::FirstMade;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Values that are made one after another, as fast as a thread can.
const VALUES: usize = 1 << 20;
/// As many as the other thread may make around a fork.
const NEAR: usize = 1 << 12;
const CHILDREN: usize = 400;
/// Values that are made for each child.
const EACH: usize = VALUES / CHILDREN - 1;
/// A child that takes so long waits for ever.
const PATIENCE_SECONDS: u32 = 300;

static CELLS: [FirstMade<u64>; VALUES] = [const { FirstMade::new() }; VALUES];
/// The value that is being made. The last one: no more.
static AT: AtomicUsize = AtomicUsize::new(0);
/// Where the thread stops until the next child is forked.
static UP_TO: AtomicUsize = AtomicUsize::new(0);

fn value(at: usize) -> u64 {
    *CELLS[at].get_or_make(|| Box::new(at as u64))
}

/// What the child does: it needs the value that its parent's thread was at, and those around it.
fn need_values() {
    // Relaxed: it is a copy of the parent's memory in one thread.
    let at = AT.load(Ordering::Relaxed);
    let near = at.saturating_sub(NEAR)..(at + NEAR).min(VALUES);
    assert!(near.clone().all(|at| value(at) == at as u64));
}

/// The status of a child that was forked now.
fn forked() -> libc::c_int {
    // SAFETY: the child allocates, which the C library allows it, and calls the kernel.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the signal ends the child.
        unsafe { libc::alarm(PATIENCE_SECONDS) };
        need_values();
        // SAFETY: the child's end.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: the child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[test]
fn no_child_waits_for_a_value_that_its_parent_was_making() {
    thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: only where the children look.
            let mut at = 0;
            while at < VALUES {
                at = AT.load(Ordering::Relaxed);
                let is_next = at < UP_TO.load(Ordering::Relaxed);
                // Refused where the test has said that there are no more.
                let (next, order) = (at + 1, Ordering::Relaxed);
                if is_next && AT.compare_exchange(at, next, order, order).is_ok() {
                    value(at);
                }
            }
        });
        let waited = (0..CHILDREN).find(|_| {
            // Relaxed: as above.
            UP_TO.fetch_add(EACH, Ordering::Relaxed);
            forked() != 0
        });
        // Relaxed: as above.
        let made = AT.swap(VALUES, Ordering::Relaxed);
        assert_eq!(waited, None, "this child was ended: it waited for a value");
        println!("{CHILDREN} children beside {made} values");
    });
}
