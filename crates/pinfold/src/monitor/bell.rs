//! A bell: whoever waits is woken, whoever rings pays a system call only if somebody waits.

use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Default, Debug)]
pub(super) struct Bell {
    rung: AtomicU32,
    waiters: AtomicU32,
}

impl Bell {
    /// How often it was rung, wrapping.
    pub(super) fn rung(&self) -> u32 {
        // Acquire: with the ring's release order, what was done before a ring that is counted
        // here is seen after this load.
        self.rung.load(Ordering::Acquire)
    }

    /// Wakes every waiter. No lock, no allocation.
    pub(super) fn ring(&self) {
        // SeqCst here and in `wait`: each side writes its word and then reads the other's, so in
        // the single order of the four accesses the later writer sees the earlier one: either
        // this load finds the waiter, or the waiter's kernel-side comparison finds the ring.
        self.rung.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            sys::futex_wake(&self.rung);
        }
    }

    /// Waits until the bell has been rung since [`rung`](Self::rung) gave `seen`.
    pub(super) fn wait(&self, seen: u32) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        while self.rung() == seen {
            // The kernel compares once more, with full barriers, before it puts us to sleep.
            sys::futex_wait(&self.rung, seen);
        }
        // Relaxed: a stale count costs a needless wake, nothing more.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_ring_before_the_wait_is_not_slept_through() {
        let bell = Bell::default();
        let seen = bell.rung();
        bell.ring();
        bell.wait(seen);
        assert_eq!(bell.rung(), seen + 1);
    }

    /// Two threads take turns by nothing but the bell; a lost wake-up hangs this test.
    #[test]
    fn no_ring_is_lost() {
        let (ping, pong) = (Bell::default(), Bell::default());
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..10_000 {
                    ping.wait(turn);
                    pong.ring();
                }
            });
            for turn in 0..10_000 {
                ping.ring();
                pong.wait(turn);
            }
        });
        assert_eq!((ping.rung(), pong.rung()), (10_000, 10_000));
    }
}
