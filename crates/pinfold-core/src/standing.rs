//! A record that one range stands in at a time, read while it changes hands: what [`PendingChanges`](crate::PendingChanges)
//! and [`ChangeMarks`](crate::ChangeMarks) are tables of.
//!
//! The state counts the ranges that had the record, so no two of them ever have the same one. A reader reads the words
//! between two looks at the state: if the second one finds the first one's, the words were that range's.
//!
//! The layout is `#[repr(C)]`, because two copies of this code may share one table.

use crate::AddressRange;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

#[repr(C)]
#[derive(Debug)]
pub(crate) struct StandingRange {
    /// Four times the number of ranges that had it, plus [`FREE`], [`TAKEN`], [`STANDS`] or [`SET`].
    pub(crate) state: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
}

pub(crate) const FREE: u64 = 0;
pub(crate) const TAKEN: u64 = 1;
pub(crate) const STANDS: u64 = 2;
/// It stands, and a change of it was marked.
pub(crate) const SET: u64 = 3;
const STATES: u64 = 4;

/// The state in which the record of one that stands in state `stands` is free for the next.
pub(crate) const fn freed(stands: u64) -> u64 {
    stands - STANDS + STATES
}

impl StandingRange {
    #[cfg(not(any(loom, shuttle)))]
    pub(crate) const fn new() -> Self {
        let [start, end] = [const { AtomicUsize::new(0) }; 2];
        Self { state: AtomicU64::new(0), start, end }
    }

    /// The atomics of a model cannot be made at compile time.
    #[cfg(any(loom, shuttle))]
    pub(crate) fn new() -> Self {
        let [start, end] = std::array::from_fn(|_| AtomicUsize::new(0));
        Self { state: AtomicU64::new(0), start, end }
    }

    /// Takes the record, if it is free, for `range`. Gives the state in which it stands.
    pub(crate) fn stand(&self, range: AddressRange) -> Option<u64> {
        // Relaxed: the exchange decides.
        let state = self.state.load(Ordering::Relaxed);
        if state % STATES != FREE {
            return None;
        }
        let (taken, stands) = (state + TAKEN, state + STANDS);
        // Acquire: our words come after those of the range that had it before.
        let mine = self.state.compare_exchange(state, taken, Ordering::Acquire, Ordering::Relaxed);
        mine.ok()?;
        // Release fence: a thread that reads one of the new words, and then passes the acquire fence in
        // `look`, sees that the record changed hands.
        fence(Ordering::Release);
        self.start.store(range.start(), Ordering::Relaxed);
        self.end.store(range.end(), Ordering::Relaxed);
        // Release: a thread that sees it stand reads its words.
        self.state.store(stands, Ordering::Release);
        Some(stands)
    }

    /// The state of the range that stands here, and the range; `None` where its words make none, as only those of two
    /// ranges do. They are that range's if the state is the same behind this.
    pub(crate) fn look(&self) -> Option<(u64, Option<AddressRange>)> {
        // Acquire: the words below are those of this state or newer ones; and what came before the state is known.
        let before = self.state.load(Ordering::Acquire);
        if before % STATES != STANDS {
            return None;
        }
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        // Acquire fence: if either word was newer, the state is, too, behind this.
        fence(Ordering::Acquire);
        Some((before, AddressRange::between(start, end)))
    }

    /// Nothing stands here any more. For a forked child.
    pub(crate) fn forget(&self) {
        // Relaxed: the child has one thread.
        let state = self.state.load(Ordering::Relaxed);
        self.state.store(state - state % STATES + STATES, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;

    /// Or a reader that began to read one range's words would believe another's.
    #[test]
    fn no_two_ranges_that_had_a_record_have_the_same_state() {
        let record = StandingRange::new();
        let range = AddressRange::new(1 << 12, 4096).unwrap();
        let states = [0; 3].map(|_| {
            let stands = record.stand(range).unwrap();
            assert_eq!(record.look(), Some((stands, Some(range))));
            assert_eq!(record.stand(range), None, "it is in use");
            record.state.store(freed(stands), Ordering::Relaxed);
            assert_eq!(record.look(), None);
            stands
        });
        assert!(states[0] < states[1] && states[1] < states[2], "{states:?}");
        let forgotten = record.stand(range).unwrap();
        record.forget();
        assert_eq!(record.look(), None);
        assert!(states[2] < forgotten && forgotten < record.stand(range).unwrap());
    }
}
