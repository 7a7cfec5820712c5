//! A slot that holds one range of a growing list at a time: written and read without a lock, a mixture of
//! two ranges never read.
//!
//! Entry `number` of a list lies in slot `number % slots`, with a stamp. The writer spoils the stamp, writes
//! the range and stamps it anew; a reader that finds the right stamp before and after reading the range
//! read that very entry. The two logs of changes are made of these: [`ChangeLog`](crate::ChangeLog), which
//! any thread may write, and the one that a userfaultfd's reader writes alone.
//!
//! The layout is `#[repr(C)]`, because two copies of this code may share one log.

use crate::AddressRange;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};

/// The room of one entry in each round.
#[repr(C)]
#[derive(Debug)]
pub struct StampedSlot {
    /// `2 * number + 1` while the entry is being written, one more when it is whole.
    stamp: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
}

/// What stands in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// The entry that was asked for.
    Entry(AddressRange),
    /// Its writer has not begun or not finished.
    Hole,
    /// A later entry, or its beginning.
    Overwritten,
}

impl StampedSlot {
    /// An empty slot, also in a `static`.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        let [start, end] = [const { AtomicUsize::new(0) }; 2];
        Self { stamp: AtomicU64::new(0), start, end }
    }

    /// The atomics of a model cannot be made at compile time.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        let [start, end] = std::array::from_fn(|_| AtomicUsize::new(0));
        Self { stamp: AtomicU64::new(0), start, end }
    }

    /// Writes entry `number`. Allocates nothing, waits for nothing; safe in signal handlers.
    ///
    /// False if the slot is in the hands of a writer that began a round ago and has not finished,
    /// or if this writer was so slow that a later one was here: waiting could be for ever. Never if one
    /// thread writes all entries in turn.
    pub fn write(&self, number: u64, range: AddressRange) -> bool {
        let (writing, whole) = (2 * number + 1, 2 * number + 2);
        // Relaxed: the exchange decides.
        let before = self.stamp.load(Ordering::Relaxed);
        if before % 2 == 1 || before > writing {
            return false;
        }
        // Acquire: the words of the entry before, which its stamp released, are overwritten by
        // ours and not the other way round.
        let mine =
            self.stamp.compare_exchange(before, writing, Ordering::Acquire, Ordering::Relaxed);
        if mine.is_err() {
            return false;
        }
        // Release fence: a reader that reads one of the two new words, and then passes the acquire
        // fence in `read`, sees that the old stamp is gone.
        fence(Ordering::Release);
        self.start.store(range.start(), Ordering::Relaxed);
        self.end.store(range.end(), Ordering::Relaxed);
        // Release: a reader of this stamp reads both words.
        self.stamp.store(whole, Ordering::Release);
        true
    }

    /// Entry `number`, if that is what stands here.
    pub fn read(&self, number: u64) -> Found {
        let whole = 2 * number + 2;
        // Acquire: the words below are those of this stamp or newer ones.
        let before = self.stamp.load(Ordering::Acquire);
        if before < whole {
            return Found::Hole;
        }
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        // Acquire fence: if either word was newer, the stamp below is too.
        fence(Ordering::Acquire);
        let after = self.stamp.load(Ordering::Relaxed);
        match AddressRange::between(start, end) {
            Some(range) if before == whole && after == whole => Found::Entry(range),
            _ => Found::Overwritten,
        }
    }

    /// A writer that stops after it has spoilt the stamp of the first entry.
    #[cfg(test)]
    #[cfg(not(loom))]
    pub(crate) fn begin_for_ever(&self) {
        self.stamp.store(1, Ordering::Relaxed);
    }
}

impl Default for StampedSlot {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use std::thread;

    fn range(number: u64) -> AddressRange {
        let start = usize::try_from(number + 1).unwrap();
        AddressRange::new(start, start).unwrap()
    }

    #[test]
    fn an_entry_is_there_between_its_writing_and_the_next() {
        let slot = StampedSlot::new();
        assert_eq!(slot.read(0), Found::Hole);
        assert!(slot.write(2, range(2)));
        assert_eq!(slot.read(4), Found::Hole);
        assert_eq!(slot.read(2), Found::Entry(range(2)));
        assert_eq!(slot.read(0), Found::Overwritten);
        assert!(!slot.write(0, range(0)), "a later one was here");
    }

    /// Every range says which entry it is, so a mixture of two entries cannot go unnoticed.
    #[test]
    fn a_reader_never_sees_half_of_an_entry() {
        const ENTRIES: u64 = if cfg!(miri) { 300 } else { 200_000 };
        let slot = StampedSlot::new();
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..ENTRIES).for_each(|number| assert!(slot.write(number, range(number))));
            });
            // The last one is overwritten by none.
            let mut number = 0;
            loop {
                match slot.read(number) {
                    Found::Entry(entry) => {
                        assert_eq!(entry, range(number));
                        if number + 1 == ENTRIES {
                            break;
                        }
                    }
                    Found::Hole if !writer.is_finished() => thread::yield_now(),
                    Found::Hole => {
                        // Acquire: pairs with the thread's end, which was asked for by a relaxed load.
                        fence(Ordering::Acquire);
                        assert_ne!(slot.read(number), Found::Hole, "{number}");
                    }
                    Found::Overwritten => number += 1,
                }
            }
        });
    }
}
