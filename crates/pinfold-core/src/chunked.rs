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

/// Entries by numbers of which few may be in use: a chunk is made for the first number that needs it.
pub(crate) struct Sparse<T> {
    chunks: Vec<Option<Box<[T; CHUNK]>>>,
}

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> Sparse<T> {
    /// Entry `number`, made with all of its chunk if it was not.
    pub(crate) fn made(&mut self, number: u32, fresh: impl Fn() -> T) -> &mut T {
        let (chunk, place) = chunk_and_place(number);
        if self.chunks.len() <= chunk {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let made = || Box::new(array::from_fn(|_| fresh()));
        &mut self.chunks[chunk].get_or_insert_with(made)[place]
    }

    /// Entry `number`, if it was made.
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let (chunk, place) = chunk_and_place(number);
        let chunk = self.chunks.get_mut(chunk)?.as_mut()?;
        Some(&mut chunk[place])
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.chunks.iter_mut().flatten().flat_map(|chunk| chunk.iter_mut())
    }
}

const fn chunk_and_place(number: u32) -> (usize, usize) {
    (number as usize / CHUNK, number as usize % CHUNK)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_chunks_that_its_entries_need() {
        let mut table = Chunked::new();
        for number in 0..3 * CHUNK {
            table.make(number, || 0);
            assert_eq!(table.chunks.len(), number / CHUNK + 1);
            *table.at_mut(number) = number;
        }
        assert!((0..3 * CHUNK).all(|number| *table.at(number) == number));
        assert!(table.iter_mut().map(|entry| *entry).eq(0..3 * CHUNK));
    }

    #[test]
    fn numbers_far_apart_have_a_chunk_each() {
        let mut table = Sparse::default();
        let chunk = u32::try_from(CHUNK).unwrap();
        let numbers = [0, 7 * chunk + 3, 7 * chunk - 1];
        numbers.iter().for_each(|&number| *table.made(number, || 0) = number + 1);
        assert_eq!((table.chunks.len(), table.chunks.iter().flatten().count()), (8, 3));
        assert_eq!(
            numbers.map(|number| table.get_mut(number).copied()),
            numbers.map(|it| Some(it + 1))
        );
        assert_eq!([chunk, 8 * chunk].map(|number| table.get_mut(number).copied()), [None; 2]);
        assert_eq!(*table.made(7 * chunk + 2, || 9), 0, "made with its chunk");
        assert!(table.iter_mut().filter(|entry| **entry > 0).map(|entry| *entry).eq([
            1,
            7 * chunk,
            7 * chunk + 4
        ]));
    }
}
