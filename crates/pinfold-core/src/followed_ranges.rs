//! Ranges of which is asked whether they have changed: marked by each entry of the monitor's log as the cache reads it.
//!
//! So an entry may be overwritten as soon as the cache has read it: a question long afterwards has its answer. Belongs
//! to the holder of the writer's lock.

use crate::AddressRange;
use crate::range_index::{Cursor, RangeIndex};

/// Ranges that are followed, by a number each.
#[derive(Default)]
pub(crate) struct FollowedRanges {
    entries: Vec<Entry>,
    unused: Vec<u32>,
    /// Those of which no change was read. Made with the first range: most caches follow none.
    unchanged: Option<RangeIndex>,
    /// How often entries of the log were gone before they were read, or said that anything may have changed.
    lapses: u64,
}

struct Entry {
    range: AddressRange,
    has_changed: bool,
    /// How many lapses there had been when it was added.
    lapses: u64,
}

impl FollowedRanges {
    /// What is read from now on may concern `range`. `None` if there are as many as can be.
    pub(crate) fn insert(&mut self, range: AddressRange) -> Option<u32> {
        let entry = Entry { range, has_changed: false, lapses: self.lapses };
        let number = match self.unused.pop() {
            Some(number) => {
                self.entries[number as usize] = entry;
                number
            }
            None => {
                let number = u32::try_from(self.entries.len()).ok()?;
                self.entries.push(entry);
                number
            }
        };
        self.unchanged.get_or_insert_with(RangeIndex::new).insert(range, number);
        Some(number)
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(unchanged) = &mut self.unchanged {
            unchanged.remove(self.entries[number as usize].range, number);
        }
        self.unused.push(number);
    }

    /// An entry of the log was read. Each range is marked once, so that many changes of one cost no more than
    /// a look. By an entry for everything a monitor says that it cannot tell what has changed: that is no change of any range.
    #[inline]
    pub(crate) fn changed(&mut self, change: AddressRange) {
        if change == AddressRange::EVERYTHING {
            return self.lapsed();
        }
        if let Some(unchanged) = &mut self.unchanged {
            mark(&mut self.entries, unchanged, change);
        }
    }

    /// Anything may have changed: entries of the log are gone that were not read.
    pub(crate) fn lapsed(&mut self) {
        self.lapses += 1;
    }

    /// Whether a change of the range was read; `None` if one may have been missed.
    pub(crate) fn has_changed(&self, number: u32) -> Option<bool> {
        let entry = &self.entries[number as usize];
        (entry.has_changed || entry.lapses == self.lapses).then_some(entry.has_changed)
    }
}

fn mark(entries: &mut [Entry], unchanged: &mut RangeIndex, change: AddressRange) {
    let mut cursor = Cursor::default();
    loop {
        let touches = |number: u32| entries[number as usize].range.overlaps(&change);
        let mut near = unchanged.near_from(change, cursor);
        let Some((next, number)) = near.find(|&(_, number)| touches(number)) else { return };
        drop(near);
        cursor = next;
        let entry = &mut entries[number as usize];
        entry.has_changed = true;
        unchanged.remove(entry.range, number);
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
}
