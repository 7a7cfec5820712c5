//! Which registrations the ring has yet to say the end of.

use pinfold_core::AddressRange;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many values there must be: so many registrations, of all registrars, a process does not live to see.
const FEWEST: u64 = 1 << 48;

/// The registrations of the process that have got a number, or asked for one. One count for all registrars: several
/// may have one ring, at once or one after another, and take each other's completions for their own.
static DRAWN: AtomicU64 = AtomicU64::new(0);

/// The number of the registration that is the `count`th of the process: which that is, is in its lower 48 bits.
const fn numbered(values: &Range<u64>, count: u64) -> u64 {
    values.start + (count.wrapping_sub(values.start) & (FEWEST - 1))
}

/// The numbers by which registrations are known when they end.
pub(super) struct Tags {
    values: Range<u64>,
    /// Guards the numbers for one look-up; never held across a system call. Taken with nothing
    /// else held, and nothing is taken under it.
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// What the slots hold.
    slots: HashMap<u16, u64>,
    /// What was taken out of its slot and may still be in use.
    ending: HashMap<u64, AddressRange>,
}

impl Tags {
    pub(super) fn new(values: Range<u64>) -> Option<Self> {
        let enough = values.end.saturating_sub(values.start) >= FEWEST;
        (enough && values.start > 0).then(|| Self { values, state: Mutex::default() })
    }

    /// Not in a forked child, where a thread that is not there may hold the lock.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new registration, which no other of this process ever has, whatever registrar it is of.
    pub(super) fn draw(&self) -> u64 {
        // Relaxed: that each is drawn once is all that is asked.
        numbered(&self.values, DRAWN.fetch_add(1, Ordering::Relaxed))
    }

    /// The slot holds the registration with this number now.
    pub(super) fn put(&self, slot: u16, tag: u64) {
        self.state().slots.insert(slot, tag);
    }

    /// The slot's registration, of `range`, is about to be taken out or replaced: from now on its end is
    /// waited for. The kernel reports no end before this.
    pub(super) fn begin_end(&self, slot: u16, range: AddressRange) -> Option<u64> {
        let mut state = self.state();
        let tag = state.slots.remove(&slot)?;
        state.ending.insert(tag, range);
        Some(tag)
    }

    /// Whether the number is one of these.
    pub(super) fn is_one(&self, tag: u64) -> bool {
        self.values.contains(&tag)
    }

    /// Whether the number is that of a registration whose end was waited for: it has ended. Those of other registrars may have
    /// the same values.
    pub(super) fn ended(&self, tag: u64) -> bool {
        self.is_one(tag) && self.state().ending.remove(&tag).is_some()
    }

    /// Whether nothing that was taken out may still be in use in `range`.
    pub(super) fn quiet(&self, range: AddressRange) -> bool {
        !self.state().ending.values().any(|other| other.overlaps(&range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(page: usize) -> AddressRange {
        AddressRange::new(page * 4096, 4096).unwrap()
    }

    #[test]
    fn a_range_is_quiet_when_its_last_number_came_back() {
        let tags = Tags::new(1 << 63..u64::MAX).unwrap();
        let (first, second) = (tags.draw(), tags.draw());
        assert_ne!(first, second);
        tags.put(3, first);
        tags.put(4, second);
        assert!(tags.quiet(range(1)), "nothing was taken out");
        assert_eq!(tags.begin_end(3, range(1)), Some(first));
        assert_eq!(tags.begin_end(3, range(1)), None, "empty by now");
        assert_eq!(tags.begin_end(4, range(1)), Some(second));
        assert!(tags.ended(first) && !tags.quiet(range(1)) && tags.quiet(range(2)));
        assert!(!tags.ended(7), "the program's own");
        assert!(tags.ended(second) && tags.quiet(range(1)));
        assert!(!tags.ended(second), "once");
    }

    /// Two registrars of one ring take each other's completions: an end of one says nothing of the other's.
    #[test]
    fn a_completion_of_another_registrar_ends_nothing() {
        for (ours, theirs) in [
            (1 << 63..u64::MAX, 1 << 63..u64::MAX),
            (1..(1 << 48) + 1, 2..(1 << 48) + 2),
            (1 << 63..u64::MAX, (1 << 62) + 7..u64::MAX),
        ] {
            let one = Tags::new(ours).unwrap();
            let other = Tags::new(theirs).unwrap();
            for slot in 0..20 {
                let (tag, foreign) = (one.draw(), other.draw());
                one.put(slot, tag);
                other.put(slot, foreign);
                one.begin_end(slot, range(1));
                other.begin_end(slot, range(1));
                assert!(!one.ended(foreign), "{foreign:#x} is to be told to the other");
                assert!(!one.quiet(range(1)), "{tag:#x} has not ended, {foreign:#x} has");
                assert!(one.ended(tag) && one.quiet(range(1)));
                assert!(other.ended(foreign) && other.quiet(range(1)));
            }
        }
    }

    #[test]
    fn every_number_is_one_of_the_values() {
        for values in [1..(1 << 48) + 1, u64::MAX - (1 << 48)..u64::MAX, 1 << 63..u64::MAX] {
            for count in [0, 1, values.start - 1, values.start, values.end, u64::MAX] {
                let tag = numbered(&values, count);
                assert!(values.contains(&tag), "{tag:#x} of {values:#x?}");
                assert_eq!((tag ^ count) << 16, 0);
            }
        }
    }

    #[test]
    fn too_few_values_are_refused() {
        assert!(Tags::new(0..u64::MAX).is_none());
        assert!(Tags::new(1..1 << 48).is_none());
        assert!(Tags::new(1..(1 << 48) + 1).is_some());
    }
}
