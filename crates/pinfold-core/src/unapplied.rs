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
//! **Why no change is lost here.** A change enters in the critical section in which it is numbered, unless all of it
//! is applied there, and leaves when nothing is left of its range: each part was taken off it in the critical section that
//! looked at the last region of that part ([`PartOutside`]). Where there are too many, they are replaced by
//! one that has the number of the latest and covers every range, so it concerns whatever any of them did. It
//! also remembers the first that it stands for: those are applied when it is, and no sooner. One that
//! stands for others already, and is the next to be applied, is not replaced again.

use crate::AddressRange;
use crate::chunked::fits_in_map;
use crate::index::Rest;
use crate::queue::Queue;
use crate::range_index::Cursor;
use std::collections::BTreeMap;

/// More than so many are folded into one: as many as two monitors' logs hold, so that a thread that reads logs
/// that are full folds none. All of them are looked at under the lock, for each region that a get would have: 4 ns each.
const MOST: usize = if cfg!(miri) { 256 } else { 1 << 13 };

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
    pub(crate) rest: Rest,
    /// What was registered before so many changes is concerned.
    pub(crate) number: ChangeCount,
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
    /// What is left of the change behind the part.
    pub(crate) rest: Option<Rest>,
    /// Those ahead of this were looked at.
    pub(crate) cursor: Cursor,
}

impl PartOutside {
    pub(crate) fn before(rest: Option<Rest>) -> Self {
        Self { rest, cursor: Cursor::default() }
    }
}

impl Unapplied {
    /// Whether it concerns what begins its registration after `born` changes.
    pub(crate) fn concerns(&self, range: AddressRange, born: ChangeCount) -> bool {
        self.is_later(born) && self.rest.range.overlaps(&range)
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
    pub(crate) fn of(self, rest: AddressRange) -> Self {
        Self { rest: rest.into(), ..self }
    }
}

/// All of them, in the order of their numbers. Belongs to the holder of the writer's lock.
#[derive(Default, Debug)]
pub(crate) struct UnappliedChanges {
    /// With what is left of them: of the first there is something.
    queue: Queue<(Unapplied, bool)>,
    /// The parts that were begun, by the numbers of their changes: few.
    parts: BTreeMap<ChangeCount, PartOutside>,
    made: ChangeCount,
}

// It grows while the lock is held.
const _: () = assert!(fits_in_map::<ChangeCount, PartOutside>());

impl UnappliedChanges {
    /// How many changes there were so far.
    pub(crate) const fn made(&self) -> ChangeCount {
        self.made
    }

    /// Keeps a change until it is applied. Its number.
    pub(crate) fn push(&mut self, range: AddressRange) -> ChangeCount {
        let change = self.number(range);
        self.keep(change);
        change.number
    }

    /// A change that is applied, or [kept](Self::keep), under this hold of the lock, before there is another.
    pub(crate) fn number(&mut self, range: AddressRange) -> Unapplied {
        self.made = ChangeCount(self.made.0 + 1);
        Unapplied { rest: range.into(), number: self.made, first: self.made }
    }

    /// Keeps the latest change until it is applied.
    pub(crate) fn keep(&mut self, latest: Unapplied) {
        let change = match self.make_room() {
            None => latest,
            Some(first) => Unapplied { rest: AddressRange::EVERYTHING.into(), first, ..latest },
        };
        self.queue.push((change, true));
    }

    /// Where there is no room for one more, takes out what is to be folded. The first change of that.
    ///
    /// A fold that is being applied stays, or a thread that waits for it would wait for as long as others
    /// report changes: behind it, the others become one.
    fn make_room(&mut self) -> Option<ChangeCount> {
        if self.queue.len() < MOST {
            return None;
        }
        let stays = self.oldest().filter(Unapplied::is_fold);
        let (Unapplied { first, number, .. }, _) =
            *self.queue.iter().nth(usize::from(stays.is_some()))?;
        self.queue.clear();
        stays.into_iter().for_each(|fold| _ = self.queue.push((fold, true)));
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
        self.queue.first().map(|&(change, _)| change)
    }

    /// What is left of change `number`, or of the one that stands for it.
    pub(crate) fn rest_of(&mut self, number: ChangeCount) -> Option<Unapplied> {
        let &mut (change, is_left) = self.find(number)?;
        (is_left && change.first <= number).then_some(change)
    }

    /// Keeps so much of `change`, which was taken from here under the same hold of the lock: its next part
    /// begins.
    pub(crate) fn set_rest(&mut self, change: Unapplied, rest: Option<Rest>) {
        self.parts.remove(&change.number);
        if let Some((kept, is_left)) = self.find(change.number) {
            (kept.rest, *is_left) = (rest.unwrap_or(kept.rest), rest.is_some());
        }
        while self.queue.first().is_some_and(|&(_, is_left)| !is_left) {
            self.queue.pop();
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

    /// The first that does not come before change `number`.
    fn find(&mut self, number: ChangeCount) -> Option<&mut (Unapplied, bool)> {
        self.queue.find_mut(|(change, _)| change.number < number)
    }

    /// Whether a change that is not applied concerns what began its registration after `born`.
    pub(crate) fn cover(&self, range: AddressRange, born: ChangeCount) -> bool {
        self.cover_counting(range, born, &mut 0)
    }

    /// The same for one of several regions that would do under one hold of the lock, with how many changes were looked
    /// at for those before it. Of one that comes behind so many looks it is not asked: it is not believed.
    pub(crate) fn may_cover(
        &self,
        range: AddressRange,
        born: ChangeCount,
        looks: &mut usize,
    ) -> bool {
        *looks >= MOST || self.cover_counting(range, born, looks)
    }

    fn cover_counting(&self, range: AddressRange, born: ChangeCount, looks: &mut usize) -> bool {
        if self.queue.is_empty() {
            return false;
        }
        let mut later = self.queue.iter().rev().take_while(|(change, _)| change.is_later(born));
        later.any(|&(change, is_left)| {
            *looks += 1;
            is_left && change.rest.range.overlaps(&range)
        })
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
    fn a_change_with_another_rest_concerns_that() {
        let mut changes = UnappliedChanges::default();
        let before = changes.made();
        changes.push(page(3));
        let moved = changes.oldest().unwrap().of(page(5));
        assert!(moved.concerns(page(5), before) && !moved.concerns(page(3), before));
    }

    #[test]
    fn concerns_what_came_before_and_nothing_later() {
        let mut changes = UnappliedChanges::default();
        let before = changes.made();
        assert!(changes.is_empty());
        let number = changes.push(page(3));
        assert!(changes.cover(page(3), before) && !changes.cover(page(4), before));
        assert!(!changes.is_empty());
        assert!(!changes.cover(page(3), number) && !changes.are_applied(number));
        assert!(changes.are_applied(before));
        changes.set_rest(changes.oldest().unwrap(), None);
        assert!(changes.is_empty() && changes.are_applied(number));
    }

    #[test]
    fn one_in_the_middle_is_applied_by_itself() {
        let mut changes = UnappliedChanges::default();
        let [first, second, third] = [0, 1, 2].map(|number| changes.push(page(number)));
        assert_eq!([first, second, third].map(ChangeCount::bits), [1, 2, 3]);
        let change = changes.rest_of(second).unwrap();
        changes.set_rest(change, None);
        assert!(changes.rest_of(second).is_none() && changes.rest_of(third).is_some());
        assert!(!changes.cover(page(1), first) && changes.cover(page(0), ChangeCount::default()));
        let change = changes.rest_of(first).unwrap();
        changes.set_rest(change, None);
        assert!(changes.are_applied(second) && !changes.are_applied(third));
    }

    /// It ends with its part, and with its change where that is folded.
    #[test]
    fn a_part_that_was_begun_goes_on_until_it_is_through() {
        let mut changes = UnappliedChanges::default();
        changes.push(page(3));
        let before = ChangeCount::default();
        let (change, part) = (changes.oldest().unwrap(), PartOutside::before(None));
        changes.set_part(change, part);
        assert!(changes.part_of(change) == Some(part) && changes.cover(page(3), before));
        changes.set_rest(change, Some(page(3).into()));
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
        changes.set_rest(fold, Some(page(9).into()));
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
        changes.set_rest(changes.oldest().unwrap(), Some(page(9).into()));
        push(&mut changes, 5 * MOST);
        assert_eq!(changes.oldest().unwrap().rest.range, page(9));
        assert!(!changes.are_applied(target) && changes.cover(page(0), target));
        changes.set_rest(changes.oldest().unwrap(), None);
        assert!(changes.are_applied(target) && !changes.are_applied(changes.made()));
        assert!(changes.cover(page(0), target), "what came later concerns everything");
    }

    /// The lock is not held for all changes times all regions.
    #[test]
    fn behind_many_looks_nothing_is_believed() {
        let mut changes = full();
        let (before, latest) = (ChangeCount::default(), changes.made());
        let elsewhere = page(MOST + 9);
        let mut looks = 0;
        assert!(!changes.may_cover(elsewhere, latest, &mut looks) && looks == 0);
        assert!(!changes.may_cover(elsewhere, before, &mut looks) && looks == MOST);
        assert!(changes.may_cover(elsewhere, latest, &mut looks) && looks == MOST);
        changes.set_rest(changes.oldest().unwrap(), None);
        assert!(!changes.cover(page(0), before) && changes.cover(page(1), before));
    }
}
