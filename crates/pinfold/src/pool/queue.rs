//! The threads that wait for a buffer, in the order in which they came.
//!
//! Only the first takes what comes back, and no thread passes it by: neither those behind it nor those
//! that come and would not wait. So a long buffer is got in the end although short ones come and go
//! all the time, at the price that a thread that waits for one delays all behind it until it is there
//! or the patience is spent. A thread that no slab could serve does not join: it waits apart (see `depot`).
//! One thread is woken for what came back, not all of them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar};

/// Where a thread that waits is woken. All go with the pool's one lock.
pub(super) type Seat = Arc<Condvar>;

/// The first stands in front.
#[derive(Debug, Default)]
pub(super) struct Queue(VecDeque<Seat>);

impl Queue {
    pub(super) const fn new() -> Self {
        Self(VecDeque::new())
    }

    /// A place at the end.
    pub(super) fn join(&mut self) -> Seat {
        let seat = Seat::default();
        self.0.push_back(Arc::clone(&seat));
        seat
    }

    /// Gives a place up, wherever it is by now.
    pub(super) fn leave(&mut self, seat: &Seat) {
        self.0.retain(|other| !Arc::ptr_eq(other, seat));
    }

    pub(super) fn is_first(&self, seat: &Seat) -> bool {
        self.0.front().is_some_and(|first| Arc::ptr_eq(first, seat))
    }

    /// Has the first look again. The lock is held, so it is either asleep or still to look.
    pub(super) fn wake_first(&self) {
        if let Some(first) = self.0.front() {
            first.notify_one();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a list of numbers, of which the first is always the one that came before all
        /// others that are left.
        #[test]
        fn the_first_is_the_earliest_of_those_left(steps in prop::collection::vec(0_usize..12, 1..200)) {
            let (mut queue, mut seats, mut oracle, mut next) = (Queue::new(), Vec::new(), Vec::new(), 0);
            for step in steps {
                if step < 6 || oracle.is_empty() {
                    seats.push((next, queue.join()));
                    oracle.push(next);
                    next += 1;
                } else {
                    let leaving = oracle.remove(step % oracle.len());
                    let at = seats.iter().position(|(number, _)| *number == leaving).unwrap();
                    queue.leave(&seats.remove(at).1);
                }
                prop_assert_eq!((queue.len(), queue.is_empty()), (oracle.len(), oracle.is_empty()));
                for (number, seat) in &seats {
                    prop_assert_eq!(queue.is_first(seat), oracle.iter().min() == Some(number));
                }
            }
        }
    }
}
