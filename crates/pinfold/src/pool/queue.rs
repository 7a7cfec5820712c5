//! The threads that wait for a buffer, in the order in which they came.
//!
//! Only the first takes what comes back, and no thread passes it by: neither those behind it nor those
//! that come and would not wait. So a long buffer is got in the end although short ones come and go
//! all the time, at the price that a thread that waits for one delays all behind it until it is there
//! or the patience is spent. A thread that no slab could serve, not even with a run if it makes none, does
//! not join: it waits apart (see `depot`).
//! One thread is woken for what came back, not all of them.
//!
//! A thread that has a listener called leaves the queue for that time, because the listener may wait for a thread
//! that would come behind it. Its number says where it belongs when it comes back.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar};

/// Where a thread that waits is woken, and when it came.
#[derive(Debug)]
pub(super) struct Place {
    number: u64,
    /// Goes with the pool's one lock, as those of all do.
    pub(super) woken: Condvar,
}

/// A thread's own place.
pub(super) type Seat = Arc<Place>;

/// The first stands in front.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// In the order of their numbers.
    seats: VecDeque<Seat>,
    /// How many have joined.
    joined: u64,
}

impl Queue {
    pub(super) const fn new() -> Self {
        Self { seats: VecDeque::new(), joined: 0 }
    }

    /// A place at the end.
    pub(super) fn join(&mut self) -> Seat {
        self.joined += 1;
        let seat = Arc::new(Place { number: self.joined, woken: Condvar::new() });
        self.seats.push_back(Arc::clone(&seat));
        seat
    }

    /// Takes a place again that was left, ahead of all that came later.
    pub(super) fn rejoin(&mut self, seat: &Seat) {
        let position = self.seats.partition_point(|other| other.number < seat.number);
        self.seats.insert(position, Arc::clone(seat));
    }

    /// Gives a place up, wherever it is by now.
    pub(super) fn leave(&mut self, seat: &Seat) {
        self.seats.retain(|other| !Arc::ptr_eq(other, seat));
    }

    pub(super) fn is_first(&self, seat: &Seat) -> bool {
        self.seats.front().is_some_and(|first| Arc::ptr_eq(first, seat))
    }

    /// Has the first look again. The lock is held, so it is either asleep or still to look.
    pub(super) fn wake_first(&self) {
        if let Some(first) = self.seats.front() {
            first.woken.notify_one();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.seats.len()
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
        fn the_first_is_the_earliest_of_those_left(steps in prop::collection::vec(0_usize..18, 1..200)) {
            let (mut queue, mut seats, mut oracle, mut next) = (Queue::new(), Vec::new(), Vec::new(), 0);
            let mut aside: Vec<(usize, Seat)> = Vec::new();
            for step in steps {
                if step >= 15 && !aside.is_empty() {
                    let (number, seat) = aside.remove(step % aside.len());
                    queue.rejoin(&seat);
                    oracle.push(number);
                    seats.push((number, seat));
                } else if step >= 12 && !oracle.is_empty() {
                    let leaving = oracle.remove(step % oracle.len());
                    let at = seats.iter().position(|(number, _)| *number == leaving).unwrap();
                    queue.leave(&seats[at].1);
                    aside.push(seats.remove(at));
                } else if step < 6 || oracle.is_empty() {
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
