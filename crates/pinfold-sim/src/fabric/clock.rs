//! The clock, and what is to happen when.

use super::Nanos;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Events in the order of their moments; those of one moment in the order of their making.
#[derive(Debug)]
pub(crate) struct Agenda<E> {
    now: Nanos,
    made: u64,
    entries: BinaryHeap<Entry<E>>,
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    number: u64,
    event: E,
}

impl<E> Agenda<E> {
    pub(crate) fn new() -> Self {
        Self { now: 0, made: 0, entries: BinaryHeap::new() }
    }

    pub(crate) fn now(&self) -> Nanos {
        self.now
    }

    /// Lets time pass in which nothing of the agenda happens: what is due comes late.
    pub(crate) fn pass(&mut self, time: Nanos) {
        self.now += time;
    }

    pub(crate) fn add(&mut self, delay: Nanos, event: E) {
        self.made += 1;
        self.entries.push(Entry { at: self.now + delay, number: self.made, event });
    }

    /// When the next event is due.
    pub(crate) fn next_at(&self) -> Option<Nanos> {
        self.entries.peek().map(|entry| entry.at)
    }

    /// Goes to the next event.
    pub(crate) fn next(&mut self) -> Option<E> {
        let entry = self.entries.pop()?;
        self.now = self.now.max(entry.at);
        Some(entry.event)
    }
}

impl<E> Ord for Entry<E> {
    /// The earliest is the greatest: the heap gives the greatest first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_time_never_goes_back() {
        let mut agenda = Agenda::new();
        agenda.add(20, 'c');
        agenda.add(10, 'a');
        agenda.add(10, 'b');
        agenda.pass(15);
        assert_eq!((agenda.next(), agenda.now()), (Some('a'), 15));
        assert_eq!((agenda.next(), agenda.now()), (Some('b'), 15));
        assert_eq!((agenda.next(), agenda.now(), agenda.next()), (Some('c'), 20, None));
    }
}
