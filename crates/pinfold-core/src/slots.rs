//! Items by numbers that are used again. None is freed before all are: an allocator may go through all small blocks that
//! were freed when the next one is, and the lock is held then.

use crate::chunked::Chunked;
use std::mem;

#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Chunked<Slot<T>>,
    made: usize,
    /// The slot that became free last, if any is free.
    free: Option<usize>,
}

#[derive(Debug)]
enum Slot<T> {
    Taken(T),
    Free {
        /// The one that became free before.
        next: Option<usize>,
    },
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Chunked::new(), made: 0, free: None }
    }
}

impl<T> Slots<T> {
    /// The number of the item from now on.
    pub(crate) fn insert(&mut self, item: T) -> usize {
        let number = self.free.unwrap_or(self.made);
        let slot = self.slots.made(number, || Slot::Free { next: None });
        match mem::replace(slot, Slot::Taken(item)) {
            Slot::Free { next } if self.free.is_some() => self.free = next,
            _ => self.made += 1,
        }
        number
    }

    /// How many there ever were at once.
    pub(crate) const fn made(&self) -> usize {
        self.made
    }

    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        self.slots.get(number).and_then(Slot::taken)
    }

    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        match self.slots.get_mut(number)? {
            Slot::Taken(item) => Some(item),
            Slot::Free { .. } => None,
        }
    }

    pub(crate) fn remove(&mut self, number: usize) -> Option<T> {
        let slot = self.slots.get_mut(number).filter(|slot| slot.taken().is_some())?;
        let next = self.free.replace(number);
        match mem::replace(slot, Slot::Free { next }) {
            Slot::Taken(item) => Some(item),
            Slot::Free { .. } => None,
        }
    }
}

impl<T> Slot<T> {
    const fn taken(&self) -> Option<&T> {
        if let Self::Taken(item) = self { Some(item) } else { None }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Next to a list of what is there.
    #[test]
    fn items_keep_their_numbers_and_free_ones_are_taken_again() {
        let (mut slots, mut there, mut most) = (Slots::default(), Vec::new(), 0);
        for item in 0..100 {
            there.push((slots.insert(item), item));
            most = most.max(there.len());
            if item % 3 != 0 {
                let (number, item) = there.swap_remove(item * 7 % there.len());
                assert_eq!(slots.remove(number), Some(item));
                assert!(slots.remove(number).is_none() && slots.get_mut(number).is_none());
            }
            for (number, item) in &there {
                assert_eq!(slots.get(*number), Some(item));
            }
        }
        assert_eq!(slots.made, most, "as many as ever were at once");
    }
}
