//! Numbers by the range that each stands for, however the ranges overlap.
//!
//! A table for each highest bit of a length, sorted by the start: what touches a range then begins in one
//! interval of each table, which is little longer than the range and those of that bit. Adding, removing and
//! each step of a look-up cost the logarithm of how many there are. Belongs to the holder of the writer's
//! lock.

use crate::AddressRange;
use crate::sorted::Sorted;
use std::iter;

/// One for each bit of a length.
const CLASSES: usize = usize::BITS as usize;

/// A start and a number, as one word, which is compared at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Key(u128);

impl Key {
    const fn new(start: usize, number: u32) -> Self {
        Self((start as u128) << u32::BITS | number as u128)
    }

    #[allow(clippy::cast_possible_truncation)] // the low bits
    const fn number(self) -> u32 {
        self.0 as u32
    }

    const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// How far a walk has come: in which set, and where in it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Cursor(usize, Key);

/// Ranges with a number each.
pub(crate) struct RangeIndex {
    /// By the highest bit of the length. Not in place: a model's threads have small stacks.
    classes: Box<[Sorted<Key, ()>]>,
    /// Which of them hold anything.
    occupied: u64,
}

impl RangeIndex {
    pub(crate) fn new() -> Self {
        Self { classes: (0..CLASSES).map(|_| Sorted::new()).collect(), occupied: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.occupied == 0
    }

    pub(crate) fn insert(&mut self, range: AddressRange, number: u32) {
        let class = class_of(range);
        self.classes[class].insert(Key::new(range.start(), number), ());
        self.occupied |= 1 << class;
    }

    pub(crate) fn remove(&mut self, range: AddressRange, number: u32) {
        let class = class_of(range);
        self.classes[class].remove(&Key::new(range.start(), number));
        if self.classes[class].is_empty() {
            self.occupied &= !(1 << class);
        }
    }

    /// From `cursor` on, the numbers of what may touch `range`: all that does, and what ends within its own
    /// length before it; each with the cursor from where on the others follow. What is added or removed
    /// meanwhile takes nothing else out of a walk that goes on.
    pub(crate) fn near_from(
        &self,
        range: AddressRange,
        cursor: Cursor,
    ) -> impl Iterator<Item = (Cursor, u32)> {
        let Cursor(first, behind) = cursor;
        self.classes_from(first).flat_map(move |class| {
            let longest = usize::MAX >> (CLASSES - 1 - class);
            let from = Key::new(range.start().saturating_sub(longest), 0);
            let from = if class == first { from.max(behind) } else { from };
            let end = Key::new(range.end(), 0).max(from);
            let touching = self.classes[class].range(from, end);
            touching.map(move |(&key, ())| (Cursor(class, key.next()), key.number()))
        })
    }

    /// Those that hold anything.
    fn classes_from(&self, first: usize) -> impl Iterator<Item = usize> {
        let mut left = self.occupied & u64::MAX << first;
        iter::from_fn(move || {
            let class = left.trailing_zeros() as usize;
            left &= left.wrapping_sub(1);
            (class < CLASSES).then_some(class)
        })
    }
}

/// The highest bit of the length, which is not zero.
const fn class_of(range: AddressRange) -> usize {
    (CLASSES - 1) - range.len().leading_zeros() as usize
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn near(index: &RangeIndex, range: AddressRange) -> impl Iterator<Item = u32> {
        index.near_from(range, Cursor::default()).map(|(_, number)| number)
    }

    /// Beside a plain list, with lengths of all sizes and ranges that overlap.
    #[test]
    fn agrees_with_a_plain_list() {
        let (mut index, mut model) = (RangeIndex::new(), Vec::<(AddressRange, u32)>::new());
        let mut state = 0x9e37_79b9_u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % bound
        };
        for number in 0..if cfg!(miri) { 100 } else { 4000 } {
            let (class, other) = (next(20), next(20));
            let length = 1 + next(1 << class);
            let range = AddressRange::new(1 + next(1 << 20), length).unwrap();
            index.insert(range, number);
            model.push((range, number));
            if next(3) == 0 || model.len() > 200 {
                let (range, number) = model.swap_remove(next(model.len()));
                index.remove(range, number);
            }
            assert_eq!(index.is_empty(), model.is_empty());
            let asked = AddressRange::new(1 + next(1 << 20), 1 + next(1 << other)).unwrap();
            let mut found: Vec<u32> = near(&index, asked).collect();
            if number % 16 == 0 {
                assert_eq!(step_by_step(&index, asked, model.len()), found);
            }
            found.retain(|number| {
                model.iter().any(|(range, it)| it == number && range.overlaps(&asked))
            });
            found.sort_unstable();
            let touching = model.iter().filter(|(range, _)| range.overlaps(&asked));
            let mut expected: Vec<u32> = touching.map(|(_, number)| *number).collect();
            expected.sort_unstable();
            assert_eq!(found, expected);
        }
        model.drain(..).for_each(|(range, number)| index.remove(range, number));
        assert!(near(&index, AddressRange::EVERYTHING).next().is_none());
        assert!(index.is_empty(), "an empty set is not looked at");
    }

    /// What a walk meets that begins again behind each, `most` at most.
    fn step_by_step(index: &RangeIndex, range: AddressRange, most: usize) -> Vec<u32> {
        let mut cursor = Cursor::default();
        let next = || {
            let (behind, number) = index.near_from(range, cursor).next()?;
            cursor = behind;
            Some(number)
        };
        iter::from_fn(next).take(most + 1).collect()
    }

    #[test]
    fn the_longest_range_is_met_everywhere() {
        let mut index = RangeIndex::new();
        index.insert(AddressRange::EVERYTHING, 7);
        let asked = AddressRange::new(4096, 1).unwrap();
        assert!(near(&index, asked).eq([7]));
    }

    /// Of equal ranges side by side, a look-up meets those it touches and three more at most.
    #[test]
    fn a_look_up_meets_what_it_touches() {
        let mut index = RangeIndex::new();
        for number in 0..1000 {
            let start = 4096 * (1 + number as usize);
            index.insert(AddressRange::new(start, 4096).unwrap(), number);
        }
        let asked = AddressRange::new(4096 * 500, 4096 * 10).unwrap();
        assert!(near(&index, asked).count() <= 13);
    }
}
