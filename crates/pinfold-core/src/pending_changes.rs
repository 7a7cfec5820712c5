//! Changes that have begun and may not have taken effect yet, noted by the threads that make them: any
//! number of writers and readers, no lock, no allocation, also in signal handlers.
//!
//! A *record* is a range that stands from [`begin`](PendingChanges::begin) to [`end`](PendingChanges::end). If
//! all records are taken, the change is counted instead, and everything is under way until the count is
//! zero again. A count that has reached its end, of tickets that were forgotten, stays there.
//!
//! # What a reader may believe
//!
//! *If a reader knows that a change has begun (it has read what the writer wrote after `begin`), and
//! [`overlaps`](PendingChanges::overlaps) says no of a range that it changes, then the change has
//! ended, and what it did is done.* The writer's `begin` happened before the reader's look, so the
//! look finds the record standing, or a later state of it. A later state was written by the writer's
//! `end`, or after it; `end` released the effect, and the look acquires it. The same holds for the
//! count: it is only ever added to and subtracted from, so a zero read after the addition comes after
//! the subtraction; at its end it is neither.
//!
//! The layout is `#[repr(C)]`, because two copies of this code may share one table.

use crate::AddressRange;
use crate::standing::{StandingRange, freed};
use crate::sync::{AtomicU64, Ordering};
use std::marker::PhantomData;

/// Room for `RECORDS` changes at a time that can be told apart.
///
/// It can be neither moved nor replaced while a change is under way, whose end would be that of another's:
///
/// ```compile_fail,E0506
/// # use pinfold_core::{AddressRange, PendingChanges};
/// let range = AddressRange::new(4096, 4096).unwrap();
/// let mut table = PendingChanges::<1>::new();
/// let before = table.begin(range);
/// table = PendingChanges::new();
/// table.end(before);
/// ```
#[repr(C)]
#[derive(Debug)]
pub struct PendingChanges<const RECORDS: usize> {
    /// Changes under way for which no record was free (bits 0-31), and how often everything was
    /// forgotten (bits 32-63).
    unrecorded: AtomicU64,
    records: [StandingRange; RECORDS],
}

/// Which record a change has: what [`PendingChanges::begin`] gives and [`PendingChanges::end`] takes.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "without `end` the range is under way for ever"]
pub struct Ticket<'t> {
    /// The address of the table.
    table: usize,
    place: Place,
    /// Which stays as it is.
    of: PhantomData<&'t ()>,
}

/// Where a change stands.
#[derive(PartialEq, Eq, Debug)]
enum Place {
    /// In this record, while it has this state.
    Record(usize, u64),
    /// In the count, since everything was forgotten so often.
    Counted(u64),
}

/// One more forgetting of everything, in the word of those that have no record.
const FORGOTTEN: u64 = 1 << 32;

/// So many changes without a record are not counted any more: everything is under way from then on.
const UNCOUNTABLE: u64 = FORGOTTEN - 1;

impl<const RECORDS: usize> PendingChanges<RECORDS> {
    /// Nothing is under way; also in a `static`.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self { unrecorded: AtomicU64::new(0), records: [const { StandingRange::new() }; RECORDS] }
    }

    /// The atomics of a model cannot be made at compile time.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        let records = std::array::from_fn(|_| StandingRange::new());
        Self { unrecorded: AtomicU64::new(0), records }
    }

    /// A change of `range` begins. A few nanoseconds.
    pub fn begin(&self, range: AddressRange) -> Ticket<'_> {
        // Neighbours change together, and then begin at different records.
        let first = (range.start() >> 12) % RECORDS.max(1);
        let stand =
            |place: usize| Some(Place::Record(place, self.records.get(place)?.stand(range)?));
        let taken = (first..RECORDS).chain(0..first).find_map(stand);
        let place = taken.unwrap_or_else(|| {
            // AcqRel: released by what the writer writes next, for any reader that counts on it. A count at its end
            // stays as it was read, for those readers too.
            let more = |word: u64| (word % FORGOTTEN < UNCOUNTABLE).then(|| word + 1);
            Place::Counted(self.count(Ordering::AcqRel, more) / FORGOTTEN)
        });
        Ticket { table: self.address(), place, of: PhantomData }
    }

    /// The change has taken effect, or will not.
    ///
    /// A ticket of another table ends nothing: its change stays under way where it began. Neither does one
    /// from before everything was forgotten.
    #[allow(clippy::needless_pass_by_value)] // used up: a record is given back once
    pub fn end(&self, ticket: Ticket<'_>) {
        if ticket.table != self.address() {
            return;
        }
        match ticket.place {
            Place::Record(place, state) => {
                self.records.get(place).iter().for_each(|record| free(record, state));
            }
            Place::Counted(forgotten) => {
                let is_ours = |word: u64| word / FORGOTTEN == forgotten;
                let is_counted = |word: u64| word % FORGOTTEN < UNCOUNTABLE;
                // Release: a thread that finds it gone finds the change done.
                self.count(Ordering::Release, |word| {
                    (is_ours(word) && is_counted(word)).then(|| word - 1)
                });
            }
        }
    }

    /// Changes the word of those that have no record to what `next` says, if anything. What it was.
    fn count(&self, order: Ordering, next: impl Fn(u64) -> Option<u64>) -> u64 {
        // Relaxed: the exchange decides.
        let mut word = self.unrecorded.load(Ordering::Relaxed);
        while let Some(new) = next(word) {
            match self.unrecorded.compare_exchange(word, new, order, Ordering::Relaxed) {
                Ok(_) => break,
                Err(newer) => word = newer,
            }
        }
        word
    }

    /// By which a ticket knows its table.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Nothing is under way any more.
    ///
    /// For a forked child, where the threads do not exist that were changing something. Anywhere
    /// else this forgets what is true.
    pub fn forget_all(&self) {
        self.records.iter().for_each(StandingRange::forget);
        // Relaxed: the child has one thread.
        let word = self.unrecorded.load(Ordering::Relaxed);
        let none = word & !(FORGOTTEN - 1);
        self.unrecorded.store(none.wrapping_add(FORGOTTEN), Ordering::Relaxed);
    }

    /// Whether a change may be under way in `range`. Two nanoseconds for each record.
    pub fn overlaps(&self, range: AddressRange) -> bool {
        // Acquire: see the file's claim.
        let counted = self.unrecorded.load(Ordering::Acquire) & (FORGOTTEN - 1);
        counted > 0 || self.records.iter().any(|record| may_change(record, range))
    }
}

impl<const RECORDS: usize> Default for PendingChanges<RECORDS> {
    fn default() -> Self {
        Self::new()
    }
}

/// Only the change that stands there in state `stands` ends this.
fn free(record: &StandingRange, stands: u64) {
    // Relaxed: nothing else writes it while it stands. A forked child may have forgotten it, and given it to another
    // change since.
    if record.state.load(Ordering::Relaxed) == stands {
        // Release: a thread that finds it gone finds the change done.
        record.state.store(freed(stands), Ordering::Release);
    }
}

fn may_change(record: &StandingRange, range: AddressRange) -> bool {
    // Acquire, here and in `look`: the state that tells that the change has ended also brings its effect. Another state now:
    // the change that stood here has ended, and whichever stands here now began after this look.
    record.look().is_some_and(|(before, standing)| {
        record.state.load(Ordering::Acquire) == before
            && standing.is_none_or(|it| it.overlaps(&range))
    })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::standing::TAKEN;

    fn page(number: usize) -> AddressRange {
        AddressRange::new(number << 12, 4096).unwrap()
    }

    #[test]
    fn what_is_under_way_is_so_until_it_ends() {
        let table = PendingChanges::<4>::new();
        let (first, second) = (table.begin(page(1)), table.begin(page(1)));
        table.end(first);
        assert!(table.overlaps(page(1)) && !table.overlaps(page(2)));
        table.end(second);
        assert!(!table.overlaps(page(1)));
    }

    #[test]
    fn without_a_free_record_everything_is_under_way() {
        let table = PendingChanges::<2>::new();
        let mut tickets: Vec<_> = (1..=3).map(|number| table.begin(page(number))).collect();
        assert!(table.overlaps(page(9)));
        table.end(tickets.remove(0));
        assert!(table.overlaps(page(9)), "the unrecorded one goes on");
        table.end(tickets.remove(1));
        assert!(table.overlaps(page(2)) && !table.overlaps(page(9)));
        table.end(tickets.remove(0));
        assert!(!table.overlaps(page(2)));
    }

    #[test]
    fn a_forked_child_starts_with_nothing_under_way() {
        let table = PendingChanges::<2>::new();
        let tickets = [1, 2, 3].map(|number| table.begin(page(number)));
        table.forget_all();
        assert!(!table.overlaps(page(1)) && !table.overlaps(page(9)));
        let [first, second, _] = tickets;
        table.end(first);
        table.end(second);
        let again = table.begin(page(2));
        assert!(table.overlaps(page(2)) && !table.overlaps(page(1)));
        table.end(again);
    }

    /// Another thread was writing a range into a record when the process forked.
    #[test]
    fn a_record_taken_by_a_thread_that_does_not_exist_is_free() {
        let table = PendingChanges::<1>::new();
        table.records[0].state.store(TAKEN, Ordering::Relaxed);
        table.forget_all();
        assert!(!table.overlaps(page(1)));
        let ticket = table.begin(page(1));
        assert!(table.overlaps(page(1)) && !table.overlaps(page(9)), "a record, not the count");
        table.end(ticket);
        assert!(!table.overlaps(page(1)));
    }

    /// What began before everything was forgotten ends nothing that began since.
    #[test]
    fn a_forgotten_ticket_ends_nothing() {
        let table = PendingChanges::<2>::new();
        let before = [1, 2, 3].map(|number| table.begin(page(number)));
        table.forget_all();
        let since = [1, 2, 3].map(|number| table.begin(page(number)));
        before.into_iter().for_each(|ticket| table.end(ticket));
        assert!(table.overlaps(page(9)), "the unrecorded one goes on");
        let [first, second, unrecorded] = since;
        table.end(unrecorded);
        assert!(table.overlaps(page(1)) && table.overlaps(page(2)) && !table.overlaps(page(9)));
        table.end(first);
        table.end(second);
        assert!(!table.overlaps(page(1)) && !table.overlaps(page(2)));
    }

    /// Forgotten tickets fill the count up, and those that end then do not empty it.
    #[test]
    fn a_count_at_its_end_stays_there() {
        let table = PendingChanges::<0>::new();
        table.unrecorded.store(FORGOTTEN + UNCOUNTABLE - 1, Ordering::Relaxed);
        let [last, beyond] = [1, 2].map(|number| table.begin(page(number)));
        assert!(table.overlaps(page(9)));
        table.end(last);
        table.end(beyond);
        assert!(table.overlaps(page(9)));
        assert_eq!(table.unrecorded.load(Ordering::Relaxed), FORGOTTEN + UNCOUNTABLE);
        table.forget_all();
        assert!(!table.overlaps(page(9)));
        let again = table.begin(page(1));
        assert!(table.overlaps(page(9)));
        table.end(again);
        assert!(!table.overlaps(page(9)));
    }

    /// Another table's ticket ends neither a record of this one nor its count.
    #[test]
    fn another_tables_ticket_ends_nothing() {
        let (one, other) = (PendingChanges::<1>::new(), PendingChanges::<1>::new());
        let ours = [one.begin(page(1)), one.begin(page(2))];
        let theirs = [other.begin(page(1)), other.begin(page(2))];
        theirs.into_iter().for_each(|ticket| one.end(ticket));
        assert!(one.overlaps(page(1)) && one.overlaps(page(9)));
        ours.into_iter().for_each(|ticket| one.end(ticket));
        assert!(!one.overlaps(page(1)) && !one.overlaps(page(9)));
    }
}
