//! Children that are forked while another thread makes values that the whole process has.

#![allow(clippy::unwrap_used, clippy::panic)] // tests may fail loudly

mod registrar_support;

use pinfold_core::first_made::FirstMade;
use registrar_support::in_forked_child;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Values that are made one after another, as fast as a thread can.
const VALUES: usize = 1 << 20;
/// As many as the other thread may make around a fork.
const NEAR: usize = 1 << 12;
const CHILDREN: usize = 400;
/// Values that are made for each child.
const EACH: usize = VALUES / CHILDREN - 1;

static CELLS: [FirstMade<u64>; VALUES] = [const { FirstMade::new() }; VALUES];
/// The value that is being made. The last one: no more.
static AT: AtomicUsize = AtomicUsize::new(0);
/// Where the thread stops until the next child is forked.
static UP_TO: AtomicUsize = AtomicUsize::new(0);

fn value(at: usize) -> u64 {
    *CELLS[at].get_or_make(|| Box::new(at as u64))
}

/// What the child does: it needs the value that its parent's thread was at, and those around it.
fn needs_values() -> bool {
    // Relaxed: it is a copy of the parent's memory in one thread.
    let at = AT.load(Ordering::Relaxed);
    let mut near = at.saturating_sub(NEAR)..(at + NEAR).min(VALUES);
    near.all(|at| value(at) == at as u64)
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
            !in_forked_child(needs_values)
        });
        // Relaxed: as above.
        let made = AT.swap(VALUES, Ordering::Relaxed);
        assert_eq!(waited, None, "this child was ended: it waited for a value");
        println!("{CHILDREN} children beside {made} values");
    });
}
