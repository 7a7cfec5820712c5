//! Storage that only grows: an item keeps its address, and its memory stays an item, for as long
//! as the arena lives.
//!
//! That is what lets a reader without a lock follow an index that has just been given to
//! somebody else: it finds another item, never foreign memory, and the item's own state tells.
//! The price is that memory is kept at the high-water mark until the cache is dropped.

use crate::sync::OnceLock;

/// Chunks double in size, so 27 of them hold all that a `u32` can name.
/// (Few in a model, whose threads have small stacks.)
const CHUNKS: usize = if cfg!(loom) { 3 } else { 27 };

/// A growing array of items that never move.
pub(crate) struct Arena<T> {
    /// Chunk `k` holds `first << k` items.
    chunks: [OnceLock<Box<[T]>>; CHUNKS],
    first_log2: u32,
}

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the cache's index and arena count on 64-bit addresses");

impl<T> Arena<T> {
    /// An empty arena whose first chunk will hold `1 << first_log2` items.
    pub(crate) fn new(first_log2: u32) -> Self {
        Self { chunks: std::array::from_fn(|_| OnceLock::new()), first_log2 }
    }

    /// Where item `index` is: its chunk and its place in there.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // both are below 2^33, and words have 64 bits
    const fn locate(&self, index: u32) -> (usize, usize) {
        let shifted = index as u64 + (1 << self.first_log2);
        let chunk = shifted.ilog2() - self.first_log2;
        let offset = shifted - (1 << (chunk + self.first_log2));
        (chunk as usize, offset as usize)
    }

    /// Item `index`, if it was ever made.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let (chunk, offset) = self.locate(index);
        self.chunks.get(chunk)?.get()?.get(offset)
    }

    /// Makes sure that item `index` exists, filling its whole chunk with what `make` makes of
    /// each index.
    ///
    /// `None` when the arena can hold no more.
    pub(crate) fn ensure(&self, index: u32, make: impl FnMut(u32) -> T) -> Option<&T> {
        let (chunk, offset) = self.locate(index);
        let length = (1_usize << self.first_log2) << chunk;
        let first = index - u32::try_from(offset).ok()?;
        let items = self
            .chunks
            .get(chunk)?
            .get_or_init(|| (first..=u32::MAX).take(length).map(make).collect());
        items.get(offset)
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
        // 4 + 8 + 16 + 32 + 64: the last chunk goes on to 123.
        assert!(arena.get(123).is_some() && arena.get(124).is_none());
    }
}
