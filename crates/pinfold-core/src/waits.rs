//! What waits for regions to be deregistered: for each region a ring of entries in one table, the first asked first.
//!
//! Nothing is allocated or freed with an entry but now and then a chunk: an allocator may go through all that was freed when
//! the next block is (glibc consolidates its fast bins, and gives back what is on top), and that was a millisecond
//! under the writer's lock after 10^5 entries.

use crate::chunked::{CHUNK, Chunked};
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
    /// By the region's number, the entry that was asked for last. Chunks of regions that nothing waited for are not made:
    /// the first to be waited for may be the millionth.
    last: Vec<Option<Box<[usize; CHUNK]>>>,
    free: usize,
    made: usize,
    /// How many wait.
    standing: usize,
}

impl<T> Default for Waits<T> {
    fn default() -> Self {
        Self { entries: Chunked::new(), last: Vec::new(), free: NONE, made: 0, standing: 0 }
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

    /// All that waits, in no order.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.standing = 0;
        self.entries.iter_mut().filter_map(|entry| entry.what.take())
    }

    /// Behind all others of its region.
    fn append(&mut self, number: u32, entry: usize) {
        let last = std::mem::replace(self.made_last(number), entry);
        let before = if last == NONE { entry } else { last };
        // Of a ring of one, its own.
        let first = if last == NONE { entry } else { self.entries.at(last).next };
        self.entries.at_mut(entry).next = first;
        self.entries.at_mut(before).next = entry;
    }

    fn made_last(&mut self, number: u32) -> &mut usize {
        let (chunk, place) = (number as usize / CHUNK, number as usize % CHUNK);
        if self.last.len() <= chunk {
            self.last.resize_with(chunk + 1, || None);
        }
        &mut self.last[chunk].get_or_insert_with(|| Box::new([NONE; CHUNK]))[place]
    }

    /// The region has no ring behind this.
    fn take_last(&mut self, number: u32) -> Option<usize> {
        let chunk = self.last.get_mut(number as usize / CHUNK)?.as_mut()?;
        let last = std::mem::replace(&mut chunk[number as usize % CHUNK], NONE);
        (last != NONE).then_some(last)
    }

    fn take_free(&mut self) -> usize {
        if self.free == NONE {
            let fresh = || Wait { change: ChangeCount::default(), what: None, next: NONE };
            self.entries.make(self.made, fresh);
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

    /// What is free is used again, so the table is as long as the most that ever waited.
    #[test]
    fn the_table_grows_with_what_waits_at_once() {
        let mut waits = Waits::default();
        for what in 0..1_000 {
            waits.insert(what % 10, ChangeCount::default(), what);
            assert_eq!(completed(&mut waits, what % 10, 0), [what]);
        }
        assert_eq!(waits.made, 1);
        assert_eq!(
            completed(&mut waits, 1 << 20, u64::MAX),
            [],
            "a region that nothing waited for"
        );
    }
}
