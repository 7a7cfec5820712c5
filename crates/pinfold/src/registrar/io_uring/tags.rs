//! Which registrations the ring has yet to say the end of.

use pinfold_core::AddressRange;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many values there must be, so that there is always one that is not out: a ring has 2^14 slots, and each end
/// waits for a request in flight.
const FEWEST: u64 = 1 << 32;

/// The numbers by which registrations are known when they end.
pub(super) struct Tags {
    values: Range<u64>,
    /// Guards the numbers for one look-up; never held across a system call. Taken with nothing
    /// else held, and nothing is taken under it.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Where the next is looked for.
    drawn: u64,
    /// Those that were drawn and have not ended.
    out: HashSet<u64>,
    /// What the slots hold.
    slots: HashMap<u16, u64>,
    /// What was taken out of its slot and may still be in use.
    ending: Vec<(u64, AddressRange)>,
}

impl Tags {
    pub(super) fn new(values: Range<u64>) -> Option<Self> {
        let enough = values.end.saturating_sub(values.start) >= FEWEST;
        (enough && values.start > 0).then(|| Self { values, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a new registration, which no other has that may be in use: one may stay while all values
    /// come round.
    pub(super) fn draw(&self) -> u64 {
        let mut state = self.state();
        loop {
            let tag = self.values.start + state.drawn;
            state.drawn = (state.drawn + 1) % (self.values.end - self.values.start);
            if state.out.insert(tag) {
                return tag;
            }
        }
    }

    /// The registration for which the number was drawn did not come about.
    pub(super) fn put_back(&self, tag: u64) {
        self.state().out.remove(&tag);
    }

    /// The slot holds the registration with this number now.
    pub(super) fn put(&self, slot: u16, tag: u64) {
        let mut state = self.state();
        state.out.insert(tag);
        state.slots.insert(slot, tag);
    }

    /// The slot's registration, of `range`, is about to be taken out: from now on its end is
    /// waited for.
    pub(super) fn begin_end(&self, slot: u16, range: AddressRange) -> Option<u64> {
        let mut state = self.state();
        let tag = state.slots.remove(&slot)?;
        state.ending.push((tag, range));
        Some(tag)
    }

    /// Whether the number is one of these; if so its registration has ended.
    pub(super) fn ended(&self, tag: u64) -> bool {
        let ours = self.values.contains(&tag);
        if ours {
            let mut state = self.state();
            state.ending.retain(|&(other, _)| other != tag);
            state.out.remove(&tag);
        }
        ours
    }

    /// Whether nothing that was taken out may still be in use in `range`.
    pub(super) fn quiet(&self, range: AddressRange) -> bool {
        !self.state().ending.iter().any(|(_, other)| other.overlaps(&range))
    }
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ending, of {:?}", self.state().ending.len(), self.values)
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
    }

    /// A registration that stays keeps its number to itself, however many come and go.
    #[test]
    fn a_number_that_is_out_is_not_drawn_again() {
        let tags = Tags::new(1..(1 << 32) + 1).unwrap();
        let stays = tags.draw();
        tags.put(3, stays);
        tags.state().drawn = (1 << 32) - 1;
        let (last, next) = (tags.draw(), tags.draw());
        assert_eq!((stays, last, next), (1, 1 << 32, 2));
        tags.put(4, next);
        assert_eq!((tags.begin_end(3, range(1)), tags.begin_end(4, range(2))), (Some(1), Some(2)));
        assert!(tags.ended(next) && tags.quiet(range(2)) && !tags.quiet(range(1)));
        tags.put_back(last);
        tags.state().drawn = (1 << 32) - 1;
        assert_eq!(tags.draw(), last);
    }

    #[test]
    fn too_few_values_are_refused() {
        assert!(Tags::new(0..u64::MAX).is_none());
        assert!(Tags::new(1..1 << 32).is_none());
        assert!(Tags::new(1..(1 << 32) + 1).is_some());
    }
}
