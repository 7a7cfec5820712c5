//! The last few of a growing list of ranges: one writer, any number of readers, no lock.
//!
//! Entry `i` lives in slot `i % capacity` with a stamp `i + 1`. The writer spoils the stamp, writes
//! the range and stamps it anew; a reader that finds the right stamp before and after reading the
//! range read that very entry.

use crate::AddressRange;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

#[derive(Debug)]
pub(super) struct Ring {
    slots: Box<[Slot]>,
}

#[derive(Default, Debug)]
struct Slot {
    /// The entry's index plus one; 0 while it is being written.
    stamp: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Self {
        Self { slots: (0..capacity.max(1)).map(|_| Slot::default()).collect() }
    }

    /// How many entries back a reader can go.
    pub(super) fn capacity(&self) -> u64 {
        self.slots.len() as u64
    }

    fn slot(&self, index: u64) -> Option<&Slot> {
        let place = index % self.capacity();
        self.slots.get(usize::try_from(place).ok()?)
    }

    /// Writes entry `index`. One thread does this, for 0, 1, 2, ... in turn.
    pub(super) fn write(&self, index: u64, range: AddressRange) {
        let Some(slot) = self.slot(index) else { return };
        slot.stamp.store(0, Ordering::Relaxed);
        // Release fence: whoever reads one of the two new words below, and then passes the
        // acquire fence in `read`, sees the spoilt stamp.
        fence(Ordering::Release);
        slot.start.store(range.start(), Ordering::Relaxed);
        slot.end.store(range.end(), Ordering::Relaxed);
        // Release: whoever reads this stamp sees both words.
        slot.stamp.store(index + 1, Ordering::Release);
    }

    /// Entry `index`, or `None` if it has been overwritten or was never written.
    pub(super) fn read(&self, index: u64) -> Option<AddressRange> {
        let slot = self.slot(index)?;
        // Acquire: the words read below are those of this stamp or newer ones.
        let before = slot.stamp.load(Ordering::Acquire);
        let (start, end) = (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
        // Acquire fence: if either word was newer, the stamp below is too.
        fence(Ordering::Acquire);
        let after = slot.stamp.load(Ordering::Relaxed);
        let intact = before == index + 1 && after == before;
        if intact { AddressRange::between(start, end) } else { None }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn range(index: u64) -> AddressRange {
        let start = usize::try_from(index + 1).unwrap();
        AddressRange::new(start, start).unwrap()
    }

    #[test]
    fn the_last_entries_are_kept_and_the_others_said_to_be_gone() {
        let ring = Ring::new(4);
        for index in 0..6 {
            ring.write(index, range(index));
        }
        assert_eq!((ring.read(0), ring.read(1)), (None, None));
        for index in 2..6 {
            assert_eq!(ring.read(index), Some(range(index)));
        }
        assert_eq!(ring.read(6), None);
    }

    /// An interpreter takes its time.
    const ENTRIES: u64 = if cfg!(miri) { 300 } else { 200_000 };

    /// Every range says which entry it is, so a mixture of two entries cannot go unnoticed.
    #[test]
    fn a_reader_never_sees_half_of_an_entry() {
        let (ring, done) = (Ring::new(2), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                for index in 0..ENTRIES {
                    ring.write(index, range(index));
                }
                done.store(true, Ordering::Release);
            });
            let mut index = 0;
            while !done.load(Ordering::Acquire) {
                match ring.read(index) {
                    Some(entry) => assert_eq!(entry, range(index)),
                    None => index = (index + 1) % ENTRIES,
                }
            }
        });
        assert_eq!(ring.read(ENTRIES - 1), Some(range(ENTRIES - 1)));
    }
}
