//! Storage that only grows: an item keeps its address, and its memory stays an item, for as long
//! as the arena lives.
//!
//! That is what lets a reader without a lock follow an index that has just been given to
//! another owner: it finds another item, never foreign memory, and the item's own state tells.
//! The price is that memory is kept at the high-water mark until the cache is dropped; beyond
//! that mark it is a chunk at most.

use crate::sync::{EXPLORED, OnceLock};

/// A block has places for so many others.
const FANOUT_LOG2: u32 = if EXPLORED { 1 } else { 4 };

/// Trees of each height, so that all are had that a `u32` can name.
/// (Few in a model, whose threads have small stacks.)
const HEIGHTS: usize = if EXPLORED { 6 } else { 1 + u32::BITS.div_ceil(FANOUT_LOG2) as usize };

/// A growing array of items that never move.
///
/// A tree for the first chunk of items, one for as many as a block has places for, one for as many blocks, and so on. All
/// that is made at once is a block or a chunk, because the cache's lock is held.
pub(crate) struct Arena<T> {
    trees: [Node<T>; HEIGHTS],
    chunk_log2: u32,
}

/// A place for what is made when it is first needed.
type Node<T> = OnceLock<Made<T>>;

enum Made<T> {
    Nodes(Box<[Node<T>]>),
    Items(Box<[T]>),
}

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the cache's index and arena count on 64-bit addresses");

impl<T> Arena<T> {
    /// An empty arena that makes `1 << chunk_log2` items at a time.
    pub(crate) fn new(chunk_log2: u32) -> Self {
        Self { trees: std::array::from_fn(|_| OnceLock::new()), chunk_log2 }
    }

    /// The chunk of an item, and the height of its tree.
    fn locate(&self, index: u32) -> (u64, u32) {
        let chunk = u64::from(index) >> self.chunk_log2;
        (chunk, (u64::BITS - chunk.leading_zeros()).div_ceil(FANOUT_LOG2))
    }

    /// Where an item is in its chunk.
    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    const fn offset(&self, index: u32) -> usize {
        (index as u64 & ((1 << self.chunk_log2) - 1)) as usize
    }

    /// Item `index`, if it was ever made.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let (chunk, height) = self.locate(index);
        let mut node = self.trees.get(height as usize)?;
        for level in (0..height).rev() {
            node = node.get()?.nodes().get(digit(chunk, level))?;
        }
        node.get()?.items().get(self.offset(index))
    }

    /// Makes sure that item `index` exists, filling its whole chunk with what `make` makes of
    /// each index.
    ///
    /// `None` when the arena can hold no more.
    pub(crate) fn ensure(&self, index: u32, make: impl FnMut(u32) -> T) -> Option<&T> {
        let (chunk, height) = self.locate(index);
        let mut node = self.trees.get(height as usize)?;
        for level in (0..height).rev() {
            node = node.get_or_init(Made::places).nodes().get(digit(chunk, level))?;
        }
        let offset = self.offset(index);
        let (first, length) = (index - u32::try_from(offset).ok()?, 1 << self.chunk_log2);
        let items = || Made::Items((first..=u32::MAX).take(length).map(make).collect());
        node.get_or_init(items).items().get(offset)
    }
}

#[allow(clippy::cast_possible_truncation)] // words have 64 bits
const fn digit(chunk: u64, level: u32) -> usize {
    (chunk >> (FANOUT_LOG2 * level)) as usize & ((1 << FANOUT_LOG2) - 1)
}

impl<T> Made<T> {
    fn places() -> Self {
        Self::Nodes((0..1 << FANOUT_LOG2).map(|_| OnceLock::new()).collect())
    }

    #[inline]
    fn nodes(&self) -> &[Node<T>] {
        if let Self::Nodes(nodes) = self { nodes } else { &[] }
    }

    #[inline]
    fn items(&self) -> &[T] {
        if let Self::Items(items) = self { items } else { &[] }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn items_keep_their_place_while_the_arena_grows() {
        let arena: Arena<Cell<u32>> = Arena::new(2);
        assert!(arena.get(0).is_none());
        for index in 0..100 {
            assert_eq!(arena.ensure(index, Cell::new).unwrap().get(), index);
        }
        assert!((0..100).all(|index| arena.get(index).unwrap().get() == index));
        // Four at a time: nothing is made ahead of the last one's chunk.
        assert!(arena.get(99).is_some() && arena.get(100).is_none());
    }

    #[test]
    fn chunks_of_one_item_waste_none() {
        let arena: Arena<u32> = Arena::new(0);
        assert_eq!(arena.ensure(6, |index| index), Some(&6));
        assert!((0..6).all(|index| arena.get(index).is_none()));
        assert!(arena.get(7).is_none());
    }

    #[test]
    fn the_last_number_has_a_place() {
        for chunk_log2 in [0, 3] {
            let arena: Arena<u32> = Arena::new(chunk_log2);
            assert_eq!(arena.ensure(u32::MAX, |index| index), Some(&u32::MAX));
            assert_eq!(arena.get(u32::MAX), Some(&u32::MAX));
            assert!(arena.get(u32::MAX >> 1).is_none() && arena.get(0).is_none());
        }
    }
}
