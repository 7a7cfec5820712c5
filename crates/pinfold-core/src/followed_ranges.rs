//! Ranges of which is asked whether they have changed: marked by each entry of the monitor's log as the cache reads it.
//!
//! So an entry may be overwritten as soon as the cache has read it: a question long afterwards has its answer. Belongs
//! to the holder of the writer's lock.
//!
//! One change may touch a hundred thousand of them. It marks some at once; what is left of it is kept, and each reader of the
//! log [goes on](FollowedRanges::go_on) with a slice. No range is added and no question answered before all is marked, and
//! none is added while the log may [tell again](crate::Replay::may_repeat) what it has told, so no range is marked by a change
//! from before it was added; and a change that is part of one that is kept adds nothing to it.

use crate::AddressRange;
use crate::range_index::{Cursor, RangeIndex};
use crate::slots::Slots;

/// To mark a range takes as long as to look at so many.
const MARK: usize = 8;

/// How many looks a change has at once...
const ROOM_OF_CHANGE: usize = if cfg!(shuttle) { 1 } else { 64 };

/// ...and how many those have together that are kept, each time.
const ROOM_OF_KEPT: usize = if cfg!(shuttle) { 1 } else { 512 };

/// More changes are not kept: then anything may have changed.
const MOST_KEPT: usize = if cfg!(miri) { 16 } else { 64 };

/// Ranges that are followed, by a number each.
pub(crate) struct FollowedRanges {
    entries: Slots<Entry>,
    /// Those of which no change was read.
    unchanged: RangeIndex,
    /// Changes that have more to mark.
    kept: Vec<Marking>,
    /// How often entries of the log were gone before they were read, or said that anything may have changed.
    lapses: u64,
    /// What was read may be read again.
    may_repeat: bool,
}

struct Entry {
    range: AddressRange,
    has_changed: bool,
    /// How many lapses there had been when it was added.
    lapses: u64,
}

/// A change that marks what it touches: all that stands ahead of its cursor was looked at.
struct Marking {
    change: AddressRange,
    cursor: Cursor,
}

impl Default for FollowedRanges {
    fn default() -> Self {
        // Not made later, because the lock is held then.
        let (unchanged, kept) = (RangeIndex::new(), Vec::with_capacity(MOST_KEPT));
        Self { entries: Slots::default(), unchanged, kept, lapses: 0, may_repeat: false }
    }
}

impl FollowedRanges {
    /// What is read from now on may concern `range`. `None` if there are as many as can be. All that was read is
    /// [marked](Self::is_marked), and is [not read again](Self::may_repeat).
    pub(crate) fn insert(&mut self, range: AddressRange) -> Option<u32> {
        let place = self.entries.insert(Entry { range, has_changed: false, lapses: self.lapses });
        let Ok(number) = u32::try_from(place) else {
            self.entries.remove(place);
            return None;
        };
        self.unchanged.insert(range, number);
        Some(number)
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(entry) = self.entries.remove(number as usize) {
            self.unchanged.remove(entry.range, number);
        }
    }

    /// Whether there is any of which no change was read.
    pub(crate) fn has_unchanged(&self) -> bool {
        !self.unchanged.is_empty()
    }

    /// An entry of the log was read. Each range is marked once, so that many changes of one cost no more than
    /// a look. By an entry for everything a monitor says that it cannot tell what has changed: that is no change of any range.
    #[inline]
    pub(crate) fn changed(&mut self, change: AddressRange) {
        if change == AddressRange::EVERYTHING {
            return self.lapsed();
        }
        let mut marking = Marking { change, cursor: Cursor::default() };
        if marking.go_on(&mut self.entries, &mut self.unchanged, ROOM_OF_CHANGE).is_none() {
            self.keep(marking);
        }
    }

    fn keep(&mut self, marking: Marking) {
        if self.kept.iter().any(|kept| kept.change.contains(&marking.change)) {
            return;
        }
        if self.kept.len() == MOST_KEPT {
            return self.lapsed();
        }
        self.kept.push(marking);
    }

    /// Marks a slice of what is left to mark.
    pub(crate) fn go_on(&mut self) {
        let mut room = ROOM_OF_KEPT;
        while let Some(marking) = self.kept.last_mut() {
            let Some(left) = marking.go_on(&mut self.entries, &mut self.unchanged, room) else {
                return;
            };
            room = left;
            self.kept.pop();
        }
    }

    /// The log was read.
    pub(crate) fn was_read(&mut self, may_repeat: bool) {
        self.may_repeat = may_repeat;
    }

    /// Whether what was read last may be read again.
    pub(crate) fn may_repeat(&self) -> bool {
        self.may_repeat
    }

    /// Whether all is marked that was read.
    pub(crate) fn is_marked(&self) -> bool {
        self.kept.is_empty()
    }

    /// How many slices are enough to mark as many changes as are kept, each of which touches every range. Of changes that
    /// follow one another without end the last would never be marked.
    pub(crate) fn enough(&self) -> usize {
        MOST_KEPT * (1 + self.entries.made() * (1 + MARK) / ROOM_OF_KEPT)
    }

    /// Anything may have changed: entries of the log are gone that were not read, or there is too much to mark.
    pub(crate) fn lapsed(&mut self) {
        self.lapses += 1;
        self.kept.clear();
    }

    /// Whether a change of the range was read; `None` if one may have been missed. All that was read is
    /// [marked](Self::is_marked).
    pub(crate) fn has_changed(&self, number: u32) -> Option<bool> {
        let entry = self.entries.get(number as usize)?;
        (entry.has_changed || entry.lapses == self.lapses).then_some(entry.has_changed)
    }
}

impl Marking {
    /// Marks what `room` has looks for. How many are left; `None` if there is more to look at.
    fn go_on(
        &mut self,
        entries: &mut Slots<Entry>,
        unchanged: &mut RangeIndex,
        mut room: usize,
    ) -> Option<usize> {
        loop {
            let near = unchanged.near_from(self.change, self.cursor).next();
            let Some((next, number)) = near else { return Some(room) };
            room = room.checked_sub(1)?;
            self.cursor = next;
            let entry = entries.get_mut(number as usize);
            if let Some(entry) = entry.filter(|entry| entry.range.overlaps(&self.change)) {
                entry.has_changed = true;
                unchanged.remove(entry.range, number);
                room = room.saturating_sub(MARK);
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn range(start: usize, bytes: usize) -> AddressRange {
        AddressRange::new(start, bytes).unwrap()
    }

    #[test]
    fn a_range_is_marked_by_what_touches_it_from_when_it_was_added() {
        let mut followed = FollowedRanges::default();
        followed.changed(range(1, 100));
        let first = followed.insert(range(10, 10)).unwrap();
        let second = followed.insert(range(20, 10)).unwrap();
        let around = followed.insert(range(1, 1000)).unwrap();
        let answers = |followed: &FollowedRanges| {
            [first, second, around].map(|number| followed.has_changed(number))
        };
        followed.changed(range(1001, 5));
        assert_eq!(answers(&followed), [Some(false); 3]);
        followed.changed(range(29, 1));
        assert_eq!(answers(&followed), [Some(false), Some(true), Some(true)]);
        followed.changed(range(29, 1));
        followed.lapsed();
        assert_eq!(answers(&followed), [None, Some(true), Some(true)], "what is known stays known");
        followed.changed(range(10, 1));
        assert_eq!(answers(&followed), [Some(true); 3]);
    }

    /// A device went on writing to a range that was taken for changed because a monitor had lost count.
    #[test]
    fn an_entry_for_everything_leaves_it_unknown_whether_a_range_has_changed() {
        let mut followed = FollowedRanges::default();
        let [first, second] = [10, 20].map(|start| followed.insert(range(start, 10)).unwrap());
        followed.changed(range(10, 1));
        followed.changed(AddressRange::EVERYTHING);
        let later = followed.insert(range(30, 10)).unwrap();
        let answers = |followed: &FollowedRanges| {
            [first, second, later].map(|number| followed.has_changed(number))
        };
        assert_eq!(answers(&followed), [Some(true), None, Some(false)]);
        followed.changed(range(20, 1));
        assert_eq!(answers(&followed), [Some(true), Some(true), Some(false)]);
    }

    #[test]
    fn a_number_that_is_used_again_knows_nothing_of_its_last_range() {
        let mut followed = FollowedRanges::default();
        let gone = followed.insert(range(10, 10)).unwrap();
        followed.changed(range(10, 1));
        followed.lapsed();
        followed.remove(gone);
        let number = followed.insert(range(10, 10)).unwrap();
        assert_eq!((number, followed.has_changed(number)), (gone, Some(false)));
        followed.remove(number);
        followed.changed(range(10, 1));
        let number = followed.insert(range(100, 10)).unwrap();
        assert_eq!(followed.has_changed(number), Some(false));
    }

    /// One change, and a part of it, of more ranges than are marked at once.
    #[test]
    fn a_change_of_many_ranges_marks_all_of_them_slice_by_slice() {
        let many = 3 * ROOM_OF_KEPT / MARK;
        let mut followed = FollowedRanges::default();
        let numbers: Vec<u32> = (0..many + 2)
            .map(|place| followed.insert(range(100 * (1 + place), 10)).unwrap())
            .collect();
        let marked = |followed: &FollowedRanges| {
            numbers.iter().filter(|&&number| followed.has_changed(number) == Some(true)).count()
        };
        followed.changed(range(100, 100 * many));
        assert!(marked(&followed) <= ROOM_OF_CHANGE && !followed.is_marked());
        followed.changed(range(100, 1000));
        assert_eq!(followed.kept.len(), 1, "a part of what is left to mark");
        followed.changed(range(100 * (many + 2), 1));
        assert_eq!(followed.has_changed(numbers[many + 1]), Some(true));
        let mut slices = 0;
        while !followed.is_marked() {
            let before = marked(&followed);
            followed.go_on();
            assert!(marked(&followed) - before <= ROOM_OF_KEPT / MARK);
            slices += 1;
        }
        assert!(slices > 2);
        assert_eq!(
            (marked(&followed), followed.has_changed(numbers[many])),
            (many + 1, Some(false))
        );
        assert!(followed.has_unchanged(), "the last two");
        numbers.iter().for_each(|&number| followed.remove(number));
        assert!(!followed.has_unchanged());
    }

    #[test]
    fn enough_slices_mark_as_many_changes_as_are_kept() {
        for many in [20, 2 * ROOM_OF_KEPT] {
            let mut followed = FollowedRanges::default();
            (0..many).for_each(|_| _ = followed.insert(range(1 << 20, 4096)).unwrap());
            followed.changed(range(1 << 20, 1));
            let mut slices = 0;
            while !followed.is_marked() {
                followed.go_on();
                slices += 1;
            }
            let (most, enough) = (MOST_KEPT * slices, followed.enough());
            assert!((most..2 * most).contains(&enough), "{enough} for {most}");
        }
    }

    #[test]
    fn what_was_read_may_be_read_again_until_it_is_read_to_its_end() {
        let mut followed = FollowedRanges::default();
        let answers = [false, true, false].map(|may_repeat| {
            followed.was_read(may_repeat);
            followed.may_repeat()
        });
        assert_eq!(answers, [false, true, false]);
    }

    /// A change that is near all of them and touches none takes as long each time, and has come again when it is through.
    #[test]
    #[cfg_attr(miri, ignore = "half a million looks, and nothing unsafe")]
    fn changes_without_end_are_a_lapse_when_enough_was_marked() {
        let mut followed = FollowedRanges::default();
        let many = 2 * ROOM_OF_KEPT;
        let numbers: Vec<u32> =
            (0..many).map(|more| followed.insert(range(1 << 20, 4096 + more)).unwrap()).collect();
        let near_miss = range((1 << 20) + 4096 + many, 8);
        followed.changed(near_miss);
        for _ in 0..followed.enough() {
            followed.go_on();
            followed.changed(near_miss);
            assert!(!followed.is_marked());
        }
        followed.lapsed();
        assert!(followed.is_marked());
        assert!(numbers.iter().all(|&number| followed.has_changed(number).is_none()));
        let later = followed.insert(range(1 << 20, 4096)).unwrap();
        assert_eq!(followed.has_changed(later), Some(false));
    }

    /// What was not marked is unknown then.
    #[test]
    fn more_changes_than_are_kept_are_a_lapse() {
        let mut followed = FollowedRanges::default();
        let many = 2 * ROOM_OF_CHANGE * MOST_KEPT / MARK;
        let numbers: Vec<u32> =
            (0..many).map(|more| followed.insert(range(1 << 20, 4096 + more)).unwrap()).collect();
        // Each is longer than the one before it, so a part of none.
        let mut change = |before| followed.changed(range((1 << 20) - before, 8192));
        (0..MOST_KEPT).for_each(&mut change);
        let known = |followed: &FollowedRanges| {
            numbers.iter().filter(|&&number| followed.has_changed(number).is_some()).count()
        };
        assert_eq!((followed.kept.len(), known(&followed)), (MOST_KEPT, many));
        followed.changed(range((1 << 20) - MOST_KEPT, 8192));
        assert!(followed.is_marked() && known(&followed) < many);
        assert!(numbers.iter().all(|&number| followed.has_changed(number) != Some(false)));
    }
}
