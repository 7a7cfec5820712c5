//! Changes of mappings that the cache knows of, and has not finished applying.
//!
//! A large unmap may concern a hundred thousand regions. The lock is not held for all of them: the
//! change is kept here, and every holder of the lock that asks for news applies a slice. Until all is
//! applied, hits take the slow path, where a region is not believed that a change here
//! [covers](UnappliedChanges::cover). So one `get` pays for a slice and for what it touches.
//!
//! Changes are numbered. A region knows how many there were when its registration began: it is
//! concerned by those that came later, and by no earlier one, whatever is left of that.
//!
//! **Why no change is lost here.** A change enters in the critical section in which it is numbered, and
//! leaves when nothing is left of its range: each part was taken off it in the critical section that
//! looked at the last region of that part ([`PartOutside`]). Where there are too many, they are replaced by
//! one that has the number of the latest and covers every range, so it concerns whatever any of them did. It
//! also remembers the first that it stands for: those are applied when it is, and no sooner. One that
//! stands for others already, and is the next to be applied, is not replaced again.

use crate::AddressRange;
use crate::range_index::Cursor;
use std::collections::{BTreeMap, VecDeque};

/// More than so many are folded into one: more than two monitors' logs hold, so that a thread that reads a log
/// that is full folds none.
const MOST: usize = if cfg!(miri) { 256 } else { 1 << 15 };

/// How many changes there were.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct ChangeCount(u64);

impl ChangeCount {
    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }
}

/// What is left to apply of one change, or of those that were folded into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unapplied {
    pub(crate) rest: AddressRange,
    /// What was registered before so many changes is concerned.
    number: ChangeCount,
    /// The first change that it stands for.
    first: ChangeCount,
}

/// A part of a change, from the start of its rest on. The regions that the change concerns have left the cache's
/// index there; those that stand outside of it are looked at in an order, slice by slice.
///
/// **Why none is believed between two slices.** The part belongs to the rest until the last of them was looked
/// at, so a lease of one that was not is [covered](UnappliedChanges::cover).
///
/// **Why none is missed.** What the change concerns could come to stand outside behind the cursor in two ways
/// alone: out of the cache's index, which has none left; or when its registration ends, which is covered and
/// invalidated then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PartOutside {
    /// Where the part ends.
    pub(crate) end: usize,
    /// Those ahead of this were looked at.
    pub(crate) cursor: Cursor,
}

impl PartOutside {
    pub(crate) fn up_to(end: usize) -> Self {
        Self { end, cursor: Cursor::default() }
    }
}

impl Unapplied {
    /// Whether it concerns what begins its registration after `born` changes.
    pub(crate) fn concerns(&self, range: AddressRange, born: ChangeCount) -> bool {
        self.is_later(born) && self.rest.overlaps(&range)
    }

    /// Whether it came after the first `born` changes.
    pub(crate) fn is_later(&self, born: ChangeCount) -> bool {
        born < self.number
    }

    /// Whether it stands for others.
    fn is_fold(&self) -> bool {
        self.first < self.number
    }

    /// The same with another rest.
    pub(crate) const fn of(self, rest: AddressRange) -> Self {
        Self { rest, ..self }
    }
}

/// All of them, in the order of their numbers. Belongs to the holder of the writer's lock.
#[derive(Default, Debug)]
pub(crate) struct UnappliedChanges {
    queue: VecDeque<Unapplied>,
    /// The parts that were begun, by the numbers of their changes: few.
    parts: BTreeMap<ChangeCount, PartOutside>,
    made: ChangeCount,
}

impl UnappliedChanges {
    /// How many changes there were so far.
    pub(crate) const fn made(&self) -> ChangeCount {
        self.made
    }

    /// Keeps a change until it is applied. Its number.
    pub(crate) fn push(&mut self, range: AddressRange) -> ChangeCount {
        self.made = ChangeCount(self.made.0 + 1);
        let number = self.made;
        let change = match self.make_room() {
            None => Unapplied { rest: range, number, first: number },
            Some(first) => Unapplied { rest: AddressRange::EVERYTHING, number, first },
        };
        self.queue.push_back(change);
        number
    }

    /// Where there is no room for one more, takes out what is to be folded. The first change of that.
    ///
    /// A fold that is being applied stays, or a thread that waits for it would wait for as long as others
    /// report changes: behind it, the others become one.
    fn make_room(&mut self) -> Option<ChangeCount> {
        if self.queue.len() < MOST {
            return None;
        }
        let stays = usize::from(self.queue.front()?.is_fold());
        let Unapplied { first, number, .. } = *self.queue.get(stays)?;
        self.queue.truncate(stays);
        // Of the one that is made of them no part was begun.
        drop(self.parts.split_off(&number));
        Some(first)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether all of the first `count` changes are applied.
    pub(crate) fn are_applied(&self, count: ChangeCount) -> bool {
        self.oldest().is_none_or(|oldest| oldest.first > count)
    }

    pub(crate) fn oldest(&self) -> Option<Unapplied> {
        self.queue.front().copied()
    }

    /// What is left of change `number`, or of the one that stands for it.
    pub(crate) fn rest_of(&self, number: ChangeCount) -> Option<Unapplied> {
        let change = self.queue.get(self.place_of(number)).copied();
        change.filter(|change| change.first <= number)
    }

    /// Keeps so much of `change`, which was taken from here under the same hold of the lock: its next part
    /// begins.
    pub(crate) fn set_rest(&mut self, change: Unapplied, rest: Option<AddressRange>) {
        self.parts.remove(&change.number);
        let place = self.place_of(change.number);
        match (rest, self.queue.get_mut(place)) {
            (Some(rest), Some(kept)) => kept.rest = rest,
            _ => drop(self.queue.remove(place)),
        }
    }

    /// Keeps all of `change`, which goes on with this part.
    pub(crate) fn set_part(&mut self, change: Unapplied, part: PartOutside) {
        self.parts.insert(change.number, part);
    }

    /// The part that `change` goes on with, if one was begun.
    pub(crate) fn part_of(&self, change: Unapplied) -> Option<PartOutside> {
        self.parts.get(&change.number).copied()
    }

    /// Of the first that does not come before change `number`.
    fn place_of(&self, number: ChangeCount) -> usize {
        self.queue.partition_point(|change| change.number < number)
    }

    /// Whether a change that is not applied concerns what began its registration after `born`.
    pub(crate) fn cover(&self, range: AddressRange, born: ChangeCount) -> bool {
        self.queue
            .iter()
            .rev()
            .take_while(|change| change.is_later(born))
            .any(|change| change.rest.overlaps(&range))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn page(number: usize) -> AddressRange {
        AddressRange::new((1 + number) * 4096, 4096).unwrap()
    }

    fn push(changes: &mut UnappliedChanges, count: usize) {
        for number in 0..count {
            changes.push(page(number));
        }
    }

    fn full() -> UnappliedChanges {
        let mut changes = UnappliedChanges::default();
        push(&mut changes, MOST);
        changes
    }

    #[test]
    fn concerns_what_came_before_and_nothing_later() {
        let mut changes = UnappliedChanges::default();
        let before = changes.made();
        let number = changes.push(page(3));
        assert!(changes.cover(page(3), before) && !changes.cover(page(4), before));
        assert!(!changes.cover(page(3), number) && !changes.are_applied(number));
        assert!(changes.are_applied(before));
        changes.set_rest(changes.oldest().unwrap(), None);
        assert!(changes.is_empty() && changes.are_applied(number));
    }

    #[test]
    fn one_in_the_middle_is_applied_by_itself() {
        let mut changes = UnappliedChanges::default();
        let [first, second, third] = [0, 1, 2].map(|number| changes.push(page(number)));
        changes.set_rest(changes.rest_of(second).unwrap(), None);
        assert!(changes.rest_of(second).is_none() && changes.rest_of(third).is_some());
        assert!(!changes.cover(page(1), first) && changes.cover(page(0), ChangeCount::default()));
        changes.set_rest(changes.rest_of(first).unwrap(), None);
        assert!(changes.are_applied(second) && !changes.are_applied(third));
    }

    /// It ends with its part, and with its change where that is folded.
    #[test]
    fn a_part_that_was_begun_goes_on_until_it_is_through() {
        let mut changes = UnappliedChanges::default();
        changes.push(page(3));
        let before = ChangeCount::default();
        let (change, part) = (changes.oldest().unwrap(), PartOutside::up_to(page(3).end()));
        changes.set_part(change, part);
        assert!(changes.part_of(change) == Some(part) && changes.cover(page(3), before));
        changes.set_rest(change, Some(page(3)));
        assert!(changes.part_of(change).is_none(), "what is left begins anew");
        changes.set_part(change, part);
        push(&mut changes, MOST);
        assert!(changes.parts.is_empty() && changes.cover(page(9), before));
    }

    /// A fold concerns all that its changes did, and none of them is applied before it is.
    #[test]
    fn too_many_are_one_that_stands_for_all() {
        let mut changes = full();
        let early = ChangeCount(7);
        let before = changes.made();
        let latest = changes.push(page(5000));
        assert_eq!(changes.queue.len(), 1);
        assert!(changes.cover(page(12_345), before) && !changes.cover(page(12_345), latest));
        assert!(!changes.are_applied(early) && changes.rest_of(early).is_some());
        let fold = changes.oldest().unwrap();
        changes.set_rest(fold, Some(page(9)));
        assert!(!changes.are_applied(early) && changes.cover(page(9), early));
        changes.set_rest(fold, None);
        assert!(changes.are_applied(latest) && changes.rest_of(early).is_none());
    }

    /// The bound holds however many come.
    #[test]
    fn a_fold_is_folded_again() {
        let mut changes = full();
        push(&mut changes, 5 * MOST);
        assert!(changes.queue.len() <= MOST);
        assert!(!changes.are_applied(ChangeCount(1)) && changes.cover(page(0), ChangeCount(1)));
    }

    /// What is applied of the oldest stays applied, however many come: so it comes to an end.
    #[test]
    fn a_fold_that_is_being_applied_does_not_begin_again() {
        let mut changes = full();
        let target = changes.push(page(1));
        changes.set_rest(changes.oldest().unwrap(), Some(page(9)));
        push(&mut changes, 5 * MOST);
        assert_eq!(changes.oldest().unwrap().rest, page(9));
        assert!(!changes.are_applied(target) && changes.cover(page(0), target));
        changes.set_rest(changes.oldest().unwrap(), None);
        assert!(changes.are_applied(target) && !changes.are_applied(changes.made()));
        assert!(changes.cover(page(0), target), "what came later concerns everything");
    }
}
