//! Numbers by the range that each stands for, however the ranges overlap.
//!
//! A set sorted by the highest bit of the length, then by the start: what touches a range then begins
//! in one interval for each highest bit, which is little longer than the range and those of that bit.
//! Adding, removing and each step of a look-up cost the logarithm of how many there are. Belongs to the
//! holder of the writer's lock.

use crate::AddressRange;
use std::collections::BTreeSet;

/// One for each bit of a length.
const CLASSES: usize = usize::BITS as usize;

/// How far a walk has come.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cursor((usize, usize, u32));

/// Ranges with a number each.
pub(crate) struct RangeIndex {
    /// The highest bit of the length, the start and the number.
    entries: BTreeSet<(usize, usize, u32)>,
    /// Which highest bits there are.
    occupied: u64,
}

impl RangeIndex {
    pub(crate) fn new() -> Self {
        Self { entries: BTreeSet::new(), occupied: 0 }
    }

    pub(crate) fn insert(&mut self, range: AddressRange, number: u32) {
        let class = class_of(range);
        self.entries.insert((class, range.start(), number));
        self.occupied |= 1 << class;
    }

    pub(crate) fn remove(&mut self, range: AddressRange, number: u32) {
        let class = class_of(range);
        self.entries.remove(&(class, range.start(), number));
        if self.entries.range((class, 0, 0)..(class + 1, 0, 0)).next().is_none() {
            self.occupied &= !(1 << class);
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.occupied == 0
    }

    /// The numbers of what may touch `range`: all that does, and what ends within its own length
    /// before it.
    pub(crate) fn near(&self, range: AddressRange) -> impl Iterator<Item = u32> {
        self.near_from(range, Cursor::default()).map(|(_, number)| number)
    }

    /// The same from `cursor` on, each with the cursor from where on the others follow. What is added
    /// or removed meanwhile takes nothing else out of a walk that goes on.
    pub(crate) fn near_from(
        &self,
        range: AddressRange,
        cursor: Cursor,
    ) -> impl Iterator<Item = (Cursor, u32)> {
        let Cursor(first) = cursor;
        let classes = (first.0..CLASSES).filter(|class| self.occupied >> class & 1 == 1);
        classes.flat_map(move |class| {
            let longest = usize::MAX >> (CLASSES - 1 - class);
            let from = (class, range.start().saturating_sub(longest), 0).max(first);
            let end = (class, range.end(), 0).max(from);
            let touching = self.entries.range(from..end);
            touching.map(|&(class, start, number)| {
                (Cursor((class, start, number.saturating_add(1))), number)
            })
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

    /// Beside a plain list, with lengths of all sizes and ranges that overlap.
    #[test]
    fn agrees_with_a_list() {
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
            let asked = AddressRange::new(1 + next(1 << 20), 1 + next(1 << other)).unwrap();
            let mut found: Vec<u32> = index.near(asked).collect();
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
        assert!(index.is_empty() && index.near(AddressRange::EVERYTHING).next().is_none());
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
        assert!(index.near(asked).count() <= 13);
    }
}
