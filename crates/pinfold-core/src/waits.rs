//! What waits for regions to be deregistered: for each region a ring of entries in one table, the first asked first.
//!
//! Nothing is allocated or freed with an entry but now and then a chunk: an allocator may go through all that was freed when
//! the next block is (glibc consolidates its fast bins, and gives back what is on top), and that was a millisecond
//! under the writer's lock after 10^5 entries.

use crate::chunked::Chunked;
use crate::unapplied::ChangeCount;

/// No entry.
const NONE: usize = usize::MAX;

/// One that waits for a region that was registered before a change.
struct Wait<T> {
    change: ChangeCount,
    what: Option<T>,
    /// In its region's ring; of a free entry, the next free one.
    next: usize,
}

/// Values of `T` by the number of the region that they wait for.
pub(crate) struct Waits<T> {
    entries: Chunked<Wait<T>>,
    /// By the region's number, the entry that was asked for last: the first region to be waited for may be the millionth.
    last: Chunked<usize>,
    free: usize,
    made: usize,
    /// How many wait.
    standing: usize,
}

/// What waits no longer, and is to be [handed out](Waits::hand_out): a ring of entries that no region has any more, by the
/// last of them. Where this is dropped they stay in the table.
#[derive(Debug)]
pub(crate) struct Released(usize);

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Self { entries: Chunked::new(), last: Chunked::new(), free: NONE, made: 0, standing: 0 }
    }
}

impl<T> Waits<T> {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.standing == 0
    }

    /// Lets `what` wait for region `number`, registered before `change`.
    pub(crate) fn insert(&mut self, number: u32, change: ChangeCount, what: T) {
        let entry = self.take_free();
        *self.entries.at_mut(entry) = Wait { change, what: Some(what), next: NONE };
        self.append(number, entry);
        self.standing += 1;
    }

    /// Hands out what was to wait for region `number` and a change up to `latest`.
    pub(crate) fn complete(&mut self, number: u32, latest: ChangeCount, mut due: impl FnMut(T)) {
        let Some(last) = self.take_last(number) else { return };
        let mut entry = self.entries.at(last).next;
        loop {
            let Wait { change, next, .. } = *self.entries.at(entry);
            if change <= latest {
                self.give_free(entry).into_iter().for_each(&mut due);
            } else {
                self.append(number, entry);
            }
            if entry == last {
                return;
            }
            entry = next;
        }
    }

    /// Lets nothing wait for region `number` any more, however much there is.
    pub(crate) fn release(&mut self, number: u32) -> Option<Released> {
        self.take_last(number).map(Released)
    }

    /// Hands out `most` of what was released, the first asked first. The rest.
    pub(crate) fn hand_out(
        &mut self,
        Released(last): Released,
        most: usize,
        mut due: impl FnMut(T),
    ) -> Option<Released> {
        for _ in 0..most {
            let entry = self.entries.at(last).next;
            self.entries.at_mut(last).next = self.entries.at(entry).next;
            self.give_free(entry).into_iter().for_each(&mut due);
            if entry == last {
                return None;
            }
        }
        Some(Released(last))
    }

    /// All that waits, and what was released and not handed out, in no order.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.standing = 0;
        self.entries.iter_mut().filter_map(|entry| entry.what.take())
    }

    /// Behind all others of its region.
    fn append(&mut self, number: u32, entry: usize) {
        let last = std::mem::replace(self.last.made(number as usize, || NONE), entry);
        let before = if last == NONE { entry } else { last };
        // Of a ring of one, its own.
        let first = if last == NONE { entry } else { self.entries.at(last).next };
        self.entries.at_mut(entry).next = first;
        self.entries.at_mut(before).next = entry;
    }

    /// The region has no ring behind this.
    fn take_last(&mut self, number: u32) -> Option<usize> {
        let last = std::mem::replace(self.last.get_mut(number as usize)?, NONE);
        (last != NONE).then_some(last)
    }

    fn take_free(&mut self) -> usize {
        if self.free == NONE {
            let fresh = || Wait { change: ChangeCount::default(), what: None, next: NONE };
            self.entries.made(self.made, fresh);
            self.made += 1;
            return self.made - 1;
        }
        let next = self.entries.at(self.free).next;
        std::mem::replace(&mut self.free, next)
    }

    fn give_free(&mut self, entry: usize) -> Option<T> {
        let freed = self.entries.at_mut(entry);
        freed.next = std::mem::replace(&mut self.free, entry);
        self.standing -= 1;
        freed.what.take()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn completed(waits: &mut Waits<u32>, number: u32, latest: u64) -> Vec<u32> {
        let mut due = Vec::new();
        waits.complete(number, ChangeCount::from_bits(latest), |what| due.push(what));
        due
    }

    /// Beside plain lists, with few regions and changes, so that all meet.
    #[test]
    fn agrees_with_lists() {
        const REGIONS: u32 = 7;
        let (mut waits, mut model) = (Waits::default(), vec![Vec::new(); REGIONS as usize]);
        let mut state = 0x9e37_79b9_u64;
        let mut next = |bound: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            u32::try_from(state >> 33).unwrap() % bound
        };
        for what in 0..if cfg!(miri) { 200 } else { 20_000 } {
            let (number, change) = (next(REGIONS), next(5));
            let of_region = &mut model[number as usize];
            if next(3) > 0 {
                waits.insert(number, ChangeCount::from_bits(change.into()), what);
                of_region.push((change, what));
            } else {
                let over = of_region.extract_if(.., |(asked, _)| *asked <= change);
                let expected: Vec<u32> = over.map(|(_, what)| what).collect();
                assert_eq!(completed(&mut waits, number, change.into()), expected);
            }
            assert_eq!(waits.is_empty(), model.iter().all(Vec::is_empty));
        }
        let mut left: Vec<u32> = waits.drain().collect();
        left.sort_unstable();
        let mut expected: Vec<u32> = model.into_iter().flatten().map(|(_, what)| what).collect();
        expected.sort_unstable();
        assert_eq!(left, expected);
    }

    /// What comes to wait meanwhile for the same region waits for what is there by then.
    #[test]
    fn what_is_released_is_handed_out_in_parts_and_in_order() {
        let mut waits = Waits::default();
        (0..10).for_each(|what| waits.insert(3, ChangeCount::default(), what));
        let mut released = waits.release(3);
        assert!(waits.release(3).is_none());
        waits.insert(3, ChangeCount::default(), 10);
        let mut parts = Vec::new();
        while let Some(rest) = released {
            let mut part = Vec::new();
            released = waits.hand_out(rest, 4, |what| part.push(what));
            parts.push(part);
        }
        assert_eq!(parts, [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        assert_eq!((completed(&mut waits, 3, 0), waits.is_empty()), (vec![10], true));
        (0..3).for_each(|what| waits.insert(7, ChangeCount::default(), what));
        let rest = waits.release(7).and_then(|released| waits.hand_out(released, 1, drop));
        assert!(rest.is_some() && !waits.is_empty());
        assert_eq!(waits.drain().count(), 2, "what is not handed out ends with the table");
    }

    /// What is free is used again, so the table is as long as the most that ever waited.
    #[test]
    fn the_table_grows_with_what_waits_at_once() {
        let mut waits = Waits::default();
        for what in 0..1_000 {
            waits.insert(what % 10, ChangeCount::default(), what);
            assert!(!waits.is_empty());
            assert_eq!(completed(&mut waits, what % 10, 0), [what]);
            assert!(waits.is_empty());
        }
        assert_eq!(waits.made, 1);
        let most = 2 * u32::try_from(Chunked::<Wait<u32>>::CHUNK).unwrap();
        (0..most).for_each(|what| waits.insert(3, ChangeCount::default(), what));
        assert!(completed(&mut waits, 3, 0).into_iter().eq(0..most));
        assert_eq!((waits.made, waits.is_empty()), (most as usize, true));
        assert_eq!(
            completed(&mut waits, 1 << 20, u64::MAX),
            [],
            "a region that nothing waited for"
        );
    }
}
