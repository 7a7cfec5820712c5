//! Entries by sorted keys: as many as one block holds side by side, more of them in a map.
//!
//! Most of these tables hold a few entries, which come and go with every get that hits nothing. A map makes
//! a node for the first of them and frees it behind the last; the block stays.

use crate::chunked::{fits_in_map, in_block};
use std::collections::BTreeMap;

/// Belongs to the holder of the writer's lock. No insertion moves more than a block has.
#[derive(Debug)]
pub(crate) struct Sorted<K, V> {
    /// All entries, unless there are some in `many`.
    few: Vec<(K, V)>,
    /// All entries since there were more than a block holds, until none is left.
    many: BTreeMap<K, V>,
}

impl<K, V> Sorted<K, V> {
    /// How many entries stand side by side at most.
    const FEW: usize = in_block::<(K, V)>();

    pub(crate) const fn new() -> Self {
        // It grows while the lock is held.
        assert!(fits_in_map::<K, V>());
        Self { few: Vec::new(), many: BTreeMap::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.few.is_empty() && self.many.is_empty()
    }
}

impl<K: Ord + Copy, V> Sorted<K, V> {
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        match self.place(key) {
            Ok(place) => Some(&self.few[place].1),
            Err(_) => self.many.get(key),
        }
    }

    /// Puts `value` there, in the place of what was there.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if !self.many.is_empty() {
            self.many.insert(key, value);
            return;
        }
        match self.place(&key) {
            Ok(place) => self.few[place].1 = value,
            Err(place) if self.few.len() < Self::FEW => {
                // Once: nothing takes the block away.
                self.few.reserve_exact(Self::FEW - self.few.len());
                self.few.insert(place, (key, value));
            }
            Err(_) => {
                // Sorted as they are they are built into nodes, and not looked up one by one.
                self.many = self.few.drain(..).collect();
                self.many.insert(key, value);
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        match self.place(key) {
            Ok(place) => Some(self.few.remove(place).1),
            Err(_) => self.many.remove(key),
        }
    }

    /// Those from `from` on, and before `end`, which is no smaller.
    pub(crate) fn range(&self, from: K, end: K) -> impl Iterator<Item = (&K, &V)> {
        let before = |key: K| self.few.partition_point(|(it, _)| *it < key);
        let few = self.few[before(from)..before(end)].iter().map(|(key, value)| (key, value));
        few.chain(self.many.range(from..end))
    }

    /// Where the key stands side by side with others, or would.
    fn place(&self, key: &K) -> Result<usize, usize> {
        self.few.binary_search_by(|(it, _)| it.cmp(key))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Beside a map, with as many keys as stand side by side and twice as many.
    #[test]
    fn agrees_with_a_map() {
        let (mut sorted, mut model) = (Sorted::<u128, u32>::new(), BTreeMap::new());
        let keys = 2 * Sorted::<u128, u32>::FEW;
        let mut state = 0x5eed_u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % bound
        };
        let (mut was_many, mut was_few_again) = (false, false);
        for value in 0..if cfg!(miri) { 600_u32 } else { 40_000 } {
            // More come than go, and then all go.
            let are_coming = (value as usize / (8 * keys)).is_multiple_of(2);
            let (is_put, key) = (are_coming && next(4) != 0, next(keys) as u128);
            (was_many, was_few_again) = (
                was_many | !sorted.many.is_empty(),
                was_few_again | (was_many && sorted.is_empty()),
            );
            if is_put {
                sorted.insert(key, value);
                model.insert(key, value);
            } else {
                assert_eq!(sorted.remove(&key), model.remove(&key));
            }
            assert_eq!(sorted.get(&key), model.get(&key));
            assert_eq!(sorted.is_empty(), model.is_empty());
            let (from, end) = (key / 2, key);
            assert!(sorted.range(from, end).eq(model.range(from..end)));
        }
        assert!(was_many && was_few_again);
    }

    #[test]
    fn what_stood_in_a_map_stands_side_by_side_behind_its_last_entry() {
        let mut sorted = Sorted::<u32, ()>::new();
        let keys = 0..u32::try_from(Sorted::<u32, ()>::FEW).unwrap() + 1;
        for _ in 0..2 {
            keys.clone().for_each(|key| sorted.insert(key, ()));
            assert!(sorted.few.is_empty() && sorted.many.len() == keys.len());
            keys.clone().for_each(|key| assert_eq!(sorted.remove(&key), Some(())));
            sorted.insert(7, ());
            assert!(sorted.many.is_empty() && sorted.few.capacity() == Sorted::<u32, ()>::FEW);
            assert_eq!(sorted.remove(&7), Some(()));
        }
    }
}
