//! A bell: a ring wakes the threads that wait, and costs a system call only if one does.

use crate::sync::{AtomicU32, Ordering};
use pinfold_kernel::futex;

/// What [`Monitor::wait`](crate::Monitor::wait) waits for.
///
/// Its layout is part of a [`Feed`](super::Feed)'s, which two copies of this library may share.
#[repr(C)]
#[derive(Default, Debug)]
pub struct Bell {
    rung: AtomicU32,
    waiters: AtomicU32,
}

impl Bell {
    /// Never rung.
    pub const fn new() -> Self {
        Self { rung: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// How often it was rung, wrapping.
    pub fn rung(&self) -> u32 {
        // Acquire: with the ring's release order, what was done before a ring that is counted
        // here is seen after this load.
        self.rung.load(Ordering::Acquire)
    }

    /// Wakes every waiter. No lock, no allocation; safe in signal handlers.
    pub fn ring(&self) {
        // SeqCst here and in `wait`: each side writes its word and then reads the other's, so in
        // the single order of the four accesses the later writer sees the earlier one: either
        // this load finds the waiter, or the waiter's kernel-side comparison finds the ring.
        self.rung.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            futex::futex_wake(&self.rung);
        }
    }

    /// Waits until the bell has been rung since [`rung`](Self::rung) gave `seen`.
    pub fn wait(&self, seen: u32) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        while self.rung() == seen {
            // The kernel compares once more, with full barriers, before it puts us to sleep.
            futex::futex_wait(&self.rung, seen);
        }
        // Relaxed: a stale count costs a needless wake, nothing more.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// Waits until one of the two was rung since the sum of what they said was `seen`.
    pub(super) fn wait_for_either(bells: [&Self; 2], seen: u32) {
        // SeqCst: as in `wait`, for each of them.
        bells.iter().for_each(|bell| _ = bell.waiters.fetch_add(1, Ordering::SeqCst));
        loop {
            let rung = bells.map(Self::rung);
            // Each only grows, so the sum is the same (for four billion rings) if neither was
            // rung.
            if rung[0].wrapping_add(rung[1]) != seen {
                break;
            }
            futex::futex_wait_either(bells.map(|bell| &bell.rung), rung);
        }
        // Relaxed: as in `wait`.
        bells.iter().for_each(|bell| _ = bell.waiters.fetch_sub(1, Ordering::Relaxed));
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

    /// A waiter for two is woken by either; a lost wake-up hangs this test.
    #[test]
    fn no_ring_of_either_is_lost() {
        let (bells, answer) = ([Bell::new(), Bell::new()], Bell::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..10_000 {
                    Bell::wait_for_either(bells.each_ref(), turn);
                    answer.ring();
                }
            });
            for turn in 0..10_000 {
                bells[turn as usize % 2].ring();
                answer.wait(turn);
            }
        });
        assert_eq!(bells.map(|bell| bell.rung()), [5_000, 5_000]);
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
