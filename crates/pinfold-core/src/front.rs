//! What a thread used last, by page: a look-aside table in front of the index.
//!
//! Programs send from the same buffers again and again. A table of a thousand words, one thread's
//! alone, answers those look-ups with one multiplication and one load, where the index takes a
//! walk of four levels and a search. As with the index, an entry is a hint: the place that it
//! names is proved at the region. So nobody ever has to clean a table up.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to follow the addresses in its entries.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Entries of a table: 8 KiB, a quarter of a first-level cache.
const ENTRIES_LOG2: u32 = if cfg!(miri) { 4 } else { 10 };
/// User addresses have 48 bits, and places have six zeros at their end.
const ADDRESS_BITS: u32 = 48;
const ALIGN_LOG2: u32 = 6;
const PLACE_BITS: u32 = ADDRESS_BITS - ALIGN_LOG2;
/// 2^64 divided by the golden ratio: neighbouring pages spread evenly (Knuth, volume 3, 6.4).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A direct-mapped table from pages to the places of one cache's regions.
///
/// An entry holds a place's address in its low bits and, above, what of the page's hash the
/// position does not say; all zeros is empty.
pub(crate) struct FrontTable {
    /// Written and read by one thread; atomic because a record may change hands, and not loom's
    /// because a model has nothing to find in what one thread has for itself.
    entries: [AtomicU64; 1 << ENTRIES_LOG2],
}

/// Where a page's entry is, and what it must say.
struct Key {
    position: usize,
    tag: u64,
}

impl Key {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // a position has few bits
    const fn new(page: usize) -> Self {
        let hash = (page as u64).wrapping_mul(SPREAD);
        let position = (hash >> (64 - ENTRIES_LOG2)) as usize;
        Self { position, tag: hash << ENTRIES_LOG2 >> PLACE_BITS << PLACE_BITS }
    }
}

impl FrontTable {
    pub(crate) fn new() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// The place that was last found for `page`.
    ///
    /// # Safety
    ///
    /// Every place that was ever remembered here was a `T`, and is one for the life of `'t`.
    #[inline(always)]
    pub(crate) unsafe fn recall<'t, T>(&self, page: usize) -> Option<&'t T> {
        let key = Key::new(page);
        // Relaxed: one thread's own, or handed over under a lock.
        let entry = self.entries[key.position].load(Ordering::Relaxed);
        let place = entry ^ key.tag;
        // Another page's tag leaves bits standing above; an empty entry leaves none, or those.
        if place == 0 || place >> PLACE_BITS != 0 {
            return None;
        }
        let address = usize::try_from(place << ALIGN_LOG2).ok()?;
        // SAFETY: the entry was made by `remember` from a reference, and by the caller's promise
        // its place is one still.
        Some(unsafe { &*std::ptr::with_exposed_provenance(address) })
    }

    /// Keeps `place` for `page`, in the stead of whatever shares its position.
    pub(crate) fn remember<T>(&self, page: usize, place: &T) {
        const { assert!(align_of::<T>() >= 1 << ALIGN_LOG2) };
        let address = std::ptr::from_ref(place).expose_provenance() as u64;
        if address >> ADDRESS_BITS == 0 {
            let key = Key::new(page);
            // Relaxed: as in `recall`.
            self.entries[key.position].store(address >> ALIGN_LOG2 | key.tag, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Place(usize);

    fn recalled(table: &FrontTable, page: usize) -> Option<usize> {
        // SAFETY: the tests remember nothing else, and their places outlive the tables.
        unsafe { table.recall::<Place>(page) }.map(|place| place.0)
    }

    #[test]
    fn what_was_remembered_is_recalled_for_its_page_alone() {
        let place = Place(7);
        let table = FrontTable::new();
        assert_eq!(recalled(&table, 0), None);
        table.remember(0x7_0000_0000, &place);
        assert_eq!(recalled(&table, 0x7_0000_0000), Some(7));
        assert!((1..200).all(|other| recalled(&table, 0x7_0000_0000 + other).is_none()));
    }

    #[test]
    fn the_latest_takes_a_position() {
        let places: Vec<Place> = (0..3000).map(Place).collect();
        let table = FrontTable::new();
        for place in &places {
            table.remember(16 * place.0, place);
            assert_eq!(recalled(&table, 16 * place.0), Some(place.0));
        }
        let kept = places.iter().filter(|place| recalled(&table, 16 * place.0).is_some());
        assert!(kept.count() <= 1 << ENTRIES_LOG2);
    }
}
