//! Which registrations are worth keeping: decided by what the same bytes were registered for before.
//!
//! Keeping a registration has a price: the kernel reports every later change of its mapping, which
//! the changing call waits for, and the first one starts the monitor. It pays when the program
//! registers the same bytes again. So the first registrations of some bytes pass through, and the one
//! with the number `keep_from` is kept (ski-rental). A kept registration that was given up before it
//! was found again doubles the number for these bytes: of `n` registrations at most about `log2(n)`
//! are kept in vain, so a program that maps, registers and unmaps in turns pays next to nothing.
//!
//! The table is small and forgets: two ranges with the same slot replace each other. That costs
//! time, never correctness.

use crate::store::Key;
use pinfold_kernel::zeroed::zeros;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 4096;

/// The number doubles at most so often.
const MOST_DOUBLINGS: u64 = 12;

/// What is remembered of ranges: one word for each slot of a table.
#[derive(Debug)]
pub(crate) struct Admission {
    slots: Box<[AtomicU64]>,
}

/// A slot's word: which bytes it is about (40 bits), how often keeping them was in vain (8 bits),
/// how often they were registered since (16 bits).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Slot {
    tag: u64,
    in_vain: u64,
    seen: u64,
}

impl Slot {
    const fn from_word(word: u64) -> Self {
        Self { tag: word >> 24, in_vain: word >> 16 & 0xff, seen: word & 0xffff }
    }

    const fn word(self) -> u64 {
        self.tag << 24 | self.in_vain << 16 | self.seen
    }
}

impl Admission {
    pub(crate) fn new() -> Self {
        Self { slots: zeros(SLOTS) }
    }

    /// Counts a registration; whether it is to be kept. `keep_from` 1 keeps each.
    pub(crate) fn admits(&self, key: &Key, keep_from: u16) -> bool {
        if keep_from <= 1 {
            return true;
        }
        let (word, tag) = self.slot(key);
        // Relaxed, here and below: a lost count costs time only.
        let mut slot = Slot::from_word(word.load(Ordering::Relaxed));
        if slot.tag != tag {
            slot = Slot { tag, in_vain: 0, seen: 0 };
        }
        slot.seen = (slot.seen + 1).min(0xffff);
        word.store(slot.word(), Ordering::Relaxed);
        slot.seen >= (u64::from(keep_from) << slot.in_vain).min(0xffff)
    }

    /// A kept registration was given up and had never been found again, or one could not be kept after a wait.
    pub(crate) fn note_vain(&self, key: &Key) {
        let (word, tag) = self.slot(key);
        let slot = Slot::from_word(word.load(Ordering::Relaxed));
        if slot.tag == tag {
            let in_vain = (slot.in_vain + 1).min(MOST_DOUBLINGS);
            word.store(Slot { tag, in_vain, seen: 0 }.word(), Ordering::Relaxed);
        }
    }

    /// A kept registration was found for the first time.
    pub(crate) fn note_found(&self, key: &Key) {
        let (word, tag) = self.slot(key);
        let slot = Slot::from_word(word.load(Ordering::Relaxed));
        if slot.tag == tag && slot.in_vain > 0 {
            word.store(Slot { in_vain: 0, ..slot }.word(), Ordering::Relaxed);
        }
    }

    /// The slot of these bytes, and what marks them in it. No tag is 0, which is an empty slot's.
    fn slot(&self, key: &Key) -> (&AtomicU64, u64) {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(key);
        let place = usize::try_from(hash % SLOTS as u64).unwrap_or(0);
        (&self.slots[place], hash >> 24 | 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::key;

    #[test]
    fn the_second_registration_of_the_same_bytes_is_kept() {
        let admission = Admission::new();
        assert!(!admission.admits(&key(1, 0x1000, 4096), 2));
        assert!(admission.admits(&key(1, 0x1000, 4096), 2));
        assert!(!admission.admits(&key(2, 0x1000, 4096), 2), "of another domain");
        assert!(admission.admits(&key(3, 0x1000, 4096), 1), "each one");
    }

    /// Fresh memory at the same address for each transfer: nothing is ever found.
    #[test]
    fn what_is_kept_in_vain_is_kept_ever_more_rarely() {
        let admission = Admission::new();
        let bytes = key(1, 0x1000, 4096);
        let registrations = 10_000;
        let mut kept = 0;
        for _ in 0..registrations {
            if admission.admits(&bytes, 2) {
                kept += 1;
                admission.note_vain(&bytes);
            }
        }
        assert!((5..=14).contains(&kept), "{kept} of {registrations}");
    }

    #[test]
    fn what_was_found_is_kept_at_once_the_next_time() {
        let admission = Admission::new();
        let bytes = key(1, 0x1000, 4096);
        (0..4).for_each(|_| admission.note_vain(&bytes));
        while !admission.admits(&bytes, 2) {}
        (0..4).for_each(|_| admission.note_vain(&bytes));
        let mut asked = 0;
        while !admission.admits(&bytes, 2) {
            asked += 1;
        }
        assert!(asked > 16, "{asked}");
        admission.note_found(&bytes);
        admission.note_vain(&bytes);
        let again = (0..4).filter(|_| admission.admits(&bytes, 2)).count();
        assert_eq!(again, 1, "the fourth");
    }
}
