//! A event_count: a ring wakes the threads that wait, and costs a system call only if one does.

use crate::sync::{AtomicU32, Ordering};
use pinfold_kernel::futex;

/// What [`Monitor::wait`](crate::Monitor::wait) waits for.
///
/// Its layout is part of a [`Feed`](super::Feed)'s, which two copies of this library may share.
#[repr(C)]
#[derive(Default, Debug)]
pub struct EventCount {
    count: AtomicU32,
    waiters: AtomicU32,
}

impl EventCount {
    /// Never notified.
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// How often it was notified, wrapping.
    pub fn count(&self) -> u32 {
        // Acquire: with the ring's release order, what was done before a ring that is counted
        // here is seen after this load.
        self.count.load(Ordering::Acquire)
    }

    /// Wakes every waiter. No lock, no allocation; safe in signal handlers.
    pub fn notify(&self) {
        // SeqCst here and in `wait`: each side writes its word and then reads the other's, so in
        // the single order of the four accesses the later writer sees the earlier one: either
        // this load finds the waiter, or the waiter's kernel-side comparison finds the ring.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            futex::futex_wake(&self.count);
        }
    }

    /// Waits until it was notified since [`count`](Self::count) gave `seen`.
    pub fn wait(&self, seen: u32) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        while self.count() == seen {
            // The kernel compares once more, with full barriers, before it puts us to sleep.
            futex::futex_wait(&self.count, seen);
        }
        // Relaxed: a stale count costs a needless wake, nothing more.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// Waits until one of the two was notified since the sum of their counts was `seen`.
    pub(super) fn wait_for_either(event_counts: [&Self; 2], seen: u32) {
        // SeqCst: as in `wait`, for each of them.
        event_counts.iter().for_each(|each| _ = each.waiters.fetch_add(1, Ordering::SeqCst));
        loop {
            let counts = event_counts.map(Self::count);
            // Each only grows, so the sum is the same (for four billion notifications) if neither was
            // notified.
            if counts[0].wrapping_add(counts[1]) != seen {
                break;
            }
            futex::futex_wait_either(event_counts.map(|each| &each.count), counts);
        }
        // Relaxed: as in `wait`.
        event_counts.iter().for_each(|each| _ = each.waiters.fetch_sub(1, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const TURNS: u32 = if cfg!(miri) { 50 } else { 10_000 };

    #[test]
    fn a_ring_before_the_wait_is_not_slept_through() {
        let events = EventCount::default();
        let seen = events.count();
        events.notify();
        events.wait(seen);
        assert_eq!(events.count(), seen + 1);
    }

    /// A waiter for two is woken by either; a lost wake-up hangs this test.
    #[test]
    fn no_ring_of_either_is_lost() {
        let (event_counts, answer) = ([EventCount::new(), EventCount::new()], EventCount::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..TURNS {
                    EventCount::wait_for_either(event_counts.each_ref(), turn);
                    answer.notify();
                }
            });
            for turn in 0..TURNS {
                event_counts[turn as usize % 2].notify();
                answer.wait(turn);
            }
        });
        assert_eq!(event_counts.map(|each| each.count()), [TURNS / 2; 2]);
    }

    /// Two threads take turns by nothing but event counts; a lost wake-up hangs this test.
    #[test]
    fn no_ring_is_lost() {
        let (ping, pong) = (EventCount::default(), EventCount::default());
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..TURNS {
                    ping.wait(turn);
                    pong.notify();
                }
            });
            for turn in 0..TURNS {
                ping.notify();
                pong.wait(turn);
            }
        });
        assert_eq!((ping.count(), pong.count()), (TURNS, TURNS));
    }
}
