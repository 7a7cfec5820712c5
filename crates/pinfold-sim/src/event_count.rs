//! The event count of a monitor: a notification wakes every thread that waits.

use crate::sync::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// A counter of rings that can be waited on, as [`pinfold_core::Monitor::wait`] describes it.
///
/// A ring between the reading of the counter and the wait is not lost: `wait` returns at once.
#[derive(Debug, Default)]
pub struct SimEventCount {
    /// Guards the number of rings so far; it wraps.
    rings: Mutex<u32>,
    changed: Condvar,
}

impl SimEventCount {
    /// One that was never notified.
    pub const fn new() -> Self {
        Self { rings: Mutex::new(0), changed: Condvar::new() }
    }

    /// How often it was notified, modulo 2^32.
    pub fn count(&self) -> u32 {
        *lock(&self.rings)
    }

    /// Rings: every wait for this ring ends.
    pub fn notify(&self) {
        let mut rings = lock(&self.rings);
        *rings = rings.wrapping_add(1);
        self.changed.notify_all();
    }

    /// Waits until [`count`](Self::count) is no longer `seen`.
    pub fn wait(&self, seen: u32) {
        let unrung = |rings: &mut u32| *rings == seen;
        drop(
            self.changed
                .wait_while(lock(&self.rings), unrung)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let events = SimEventCount::new();
        let seen = events.count();
        events.notify();
        events.wait(seen);
        assert_eq!(events.count(), seen + 1);
    }

    #[test]
    fn every_waiter_wakes() {
        let events = SimEventCount::new();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| events.wait(0));
            }
            events.notify();
        });
    }
}
