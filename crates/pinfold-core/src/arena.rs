//! Storage that only grows: an item keeps its address, and its memory stays an item, for as long
//! as the arena lives.
//!
//! That is what lets a reader without a lock follow an index that has just been given to
//! another owner: it finds another item, never foreign memory, and the item's own state tells.
//! The price is that memory is kept at the high-water mark until the cache is dropped; beyond
//! that mark it is a chunk at most.

use crate::sync::{self, OnceLock};

/// Shelves hold 1, 2, 4, ... chunks, so 33 of them hold all that a `u32` can name.
/// (Few in a model, whose threads have small stacks.)
const SHELVES: usize = if cfg!(loom) { 3 } else { 33 };

/// A part of a shelf has so many chunks at most: 6 KiB for them.
const PART_LOG2: u32 = if cfg!(any(loom, shuttle, miri, test)) { 2 } else { 8 };

/// What is made when it is first needed.
type Later<T> = OnceLock<Box<[T]>>;

/// Items made at once.
type Chunk<T> = Later<T>;

/// Chunks made at once, as places for them.
type Part<T> = Later<Chunk<T>>;

/// A growing array of items that never move.
///
/// Chunks are all of one size, so that little is made in advance. What doubles is the shelf of
/// chunks, 24 bytes for each; a long one is made in parts, because the cache's lock is held.
pub(crate) struct Arena<T> {
    shelves: [Later<Part<T>>; SHELVES],
    chunk_log2: u32,
}

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the cache's index and arena count on 64-bit addresses");

/// Where an item is.
struct Location {
    shelf: usize,
    part: usize,
    chunk: usize,
    offset: usize,
}

impl<T> Arena<T> {
    /// An empty arena that makes `1 << chunk_log2` items at a time.
    pub(crate) fn new(chunk_log2: u32) -> Self {
        Self { shelves: sync::unmade(), chunk_log2 }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // all are below 2^33, and words have 64 bits
    const fn locate(&self, index: u32) -> Location {
        let chunk = (index as u64 >> self.chunk_log2) + 1;
        let shelf = chunk.ilog2();
        let offset = index & ((1 << self.chunk_log2) - 1);
        let chunk = chunk - (1 << shelf);
        let (part, chunk) = (chunk >> PART_LOG2, chunk & ((1 << PART_LOG2) - 1));
        Location {
            shelf: shelf as usize,
            part: part as usize,
            chunk: chunk as usize,
            offset: offset as usize,
        }
    }

    /// Item `index`, if it was ever made.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let Location { shelf, part, chunk, offset } = self.locate(index);
        self.shelves.get(shelf)?.get()?.get(part)?.get()?.get(chunk)?.get()?.get(offset)
    }

    /// Makes sure that item `index` exists, filling its whole chunk with what `make` makes of
    /// each index.
    ///
    /// `None` when the arena can hold no more.
    #[inline]
    pub(crate) fn ensure(&self, index: u32, make: impl FnMut(u32) -> T) -> Option<&T> {
        self.get(index).or_else(|| self.make(index, make))
    }

    #[cold]
    fn make(&self, index: u32, make: impl FnMut(u32) -> T) -> Option<&T> {
        let Location { shelf, part, chunk, offset } = self.locate(index);
        let part_log2 = shelf.min(PART_LOG2 as usize);
        let parts = self.shelves.get(shelf)?.get_or_init(|| places(shelf - part_log2));
        let chunks = parts.get(part)?.get_or_init(|| places(part_log2));
        let first = index - u32::try_from(offset).ok()?;
        let length = 1_usize << self.chunk_log2;
        let items =
            chunks.get(chunk)?.get_or_init(|| (first..=u32::MAX).take(length).map(make).collect());
        items.get(offset)
    }
}

/// So many places for what is made later.
fn places<T>(log2: usize) -> Box<[Later<T>]> {
    (0..1_usize << log2).map(|_| OnceLock::new()).collect()
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
        let arena: Arena<u8> = Arena::new(31);
        let Location { shelf, part, chunk, offset } = arena.locate(u32::MAX);
        assert_eq!((shelf, part, chunk, offset), (1, 0, 0, (1 << 31) - 1));
        let Location { shelf, part, chunk, offset } = Arena::<u8>::new(0).locate(u32::MAX);
        assert_eq!((shelf, part, chunk, offset), (32, 0, 0, 0));
    }

    /// The lock is held when one is made.
    #[test]
    fn no_more_places_than_a_part_has_are_made_at_once() {
        let arena: Arena<u32> = Arena::new(0);
        (0..1000).for_each(|index| assert_eq!(arena.ensure(index, |index| index), Some(&index)));
        assert!((0..1000).all(|index| arena.get(index) == Some(&index)));
        let shelves = arena.shelves.iter().filter_map(OnceLock::get);
        let parts = shelves.flat_map(|shelf| shelf.iter().filter_map(OnceLock::get));
        assert_eq!(parts.map(|part| part.len()).max(), Some(1 << PART_LOG2));
    }
}
