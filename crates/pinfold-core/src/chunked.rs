//! Tables that grow in chunks: growing neither copies what there is nor makes twice as many, and nothing is freed before the
//! table is. What belongs to the holder of the writer's lock stands in such ones, because it is made and ended under that
//! lock.

use std::array;

/// Entries made at once.
pub(crate) const CHUNK: usize = if cfg!(any(loom, shuttle, miri)) { 8 } else { 256 };

/// Entries by their number, from 0 on.
pub(crate) struct Chunked<T> {
    #[allow(clippy::vec_box)] // which is what the boxes are for
    chunks: Vec<Box<[T; CHUNK]>>,
}

impl<T> Chunked<T> {
    pub(crate) const fn new() -> Self {
        Self { chunks: Vec::new() }
    }

    /// Makes sure that there is an entry `number`, and one of each lower number.
    pub(crate) fn make(&mut self, number: usize, fresh: impl Fn() -> T) {
        while self.chunks.len() <= number / CHUNK {
            self.chunks.push(Box::new(array::from_fn(|_| fresh())));
        }
    }

    /// Entry `number`, which was made.
    #[inline]
    pub(crate) fn at(&self, number: usize) -> &T {
        &self.chunks[number / CHUNK][number % CHUNK]
    }

    /// As [`at`](Self::at).
    #[inline]
    pub(crate) fn at_mut(&mut self, number: usize) -> &mut T {
        &mut self.chunks[number / CHUNK][number % CHUNK]
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.chunks.iter_mut().flat_map(|chunk| chunk.iter_mut())
    }
}
