//! The bell of a monitor: a ring wakes every thread that waits.

use crate::sync::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// A counter of rings that can be waited on, as [`pinfold_core::Monitor::wait`] describes it.
///
/// A ring between the reading of the counter and the wait is not lost: `wait` returns at once.
#[derive(Debug, Default)]
pub struct Bell {
    /// Guards the number of rings so far; it wraps.
    rings: Mutex<u32>,
    rung: Condvar,
}

impl Bell {
    /// A bell that was never rung.
    pub const fn new() -> Self {
        Self { rings: Mutex::new(0), rung: Condvar::new() }
    }

    /// How often it was rung, modulo 2^32.
    pub fn count(&self) -> u32 {
        *lock(&self.rings)
    }

    /// Rings: every wait for this ring ends.
    pub fn ring(&self) {
        let mut rings = lock(&self.rings);
        *rings = rings.wrapping_add(1);
        self.rung.notify_all();
    }

    /// Waits until [`count`](Self::count) is no longer `seen`.
    pub fn wait(&self, seen: u32) {
        let unrung = |rings: &mut u32| *rings == seen;
        drop(
            self.rung.wait_while(lock(&self.rings), unrung).unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = Bell::new();
        let seen = bell.count();
        bell.ring();
        bell.wait(seen);
        assert_eq!(bell.count(), seen + 1);
    }

    #[test]
    fn every_waiter_wakes() {
        let bell = Bell::new();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| bell.wait(0));
            }
            bell.ring();
        });
    }
}
