//! Tables that grow in blocks: growing copies nothing, and nothing is freed before the table is. What belongs to the holder
//! of the writer's lock stands in such ones, because it is made and ended under that lock.

use std::mem;

/// What is asked of the allocator at once under the writer's lock has so many bytes at most. From 1,008 on glibc's first
/// goes through all small blocks that were freed, which takes a millisecond after 10^5 of them.
pub(crate) const BLOCK_BYTES: usize = 960;

/// What is larger is made before the lock is taken, and enough for so many other threads that come first.
pub(crate) const OTHERS: usize = 16;

/// How many of `T` a block has room for.
pub(crate) const fn in_block<T>() -> usize {
    assert!(size_of::<T>() <= BLOCK_BYTES, "a block has room for none");
    if cfg!(any(loom, shuttle, miri)) { 4 } else { BLOCK_BYTES / size_of::<T>() }
}

/// Whether a node of a sorted map fits into a block: eleven entries, their number, and in an inner one the ways to twelve
/// others and to the parent.
pub(crate) const fn fits_in_map<K, V>() -> bool {
    11 * (size_of::<K>() + size_of::<V>()) + 14 * size_of::<usize>() <= BLOCK_BYTES
}

const FANOUT_LOG2: u32 = if cfg!(any(loom, shuttle, miri)) { 2 } else { 5 };
const FANOUT: usize = 1 << FANOUT_LOG2;

/// Entries by their numbers: a tree whose blocks are made for the first number that needs them.
#[derive(Debug)]
pub(crate) struct Chunked<T> {
    root: Node<T>,
    /// How many levels of nodes there are.
    height: u32,
}

#[derive(Debug)]
enum Node<T> {
    Absent,
    Nodes(Box<[Node<T>; FANOUT]>),
    Entries(Box<[T]>),
}

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Chunked<T> {
    /// How many entries are made at once: a power of two, because each look-up divides by it.
    pub(crate) const CHUNK: usize = 1 << in_block::<T>().ilog2();

    pub(crate) const fn new() -> Self {
        Self { root: Node::Absent, height: 0 }
    }

    /// Entry `number`, made with all of its block if it was not.
    pub(crate) fn made(&mut self, number: usize, fresh: impl Fn() -> T) -> &mut T {
        let (chunk, place) = (number / Self::CHUNK, number % Self::CHUNK);
        while chunk >> (FANOUT_LOG2 * self.height) != 0 {
            let lower = mem::replace(&mut self.root, Node::Absent);
            self.root = Node::of(lower);
            self.height += 1;
        }
        let mut node = &mut self.root;
        for level in (0..self.height).rev() {
            if matches!(node, Node::Absent) {
                *node = Node::of(Node::Absent);
            }
            let Node::Nodes(nodes) = node else { unreachable!("made above") };
            node = &mut nodes[digit(chunk, level)];
        }
        if matches!(node, Node::Absent) {
            *node = Node::Entries((0..Self::CHUNK).map(|_| fresh()).collect());
        }
        &mut node.entries_mut()[place]
    }

    /// Entry `number`, if it was made.
    #[inline]
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        let (chunk, place) = (number / Self::CHUNK, number % Self::CHUNK);
        if chunk >> (FANOUT_LOG2 * self.height) != 0 {
            return None;
        }
        let mut node = &self.root;
        for level in (0..self.height).rev() {
            let Node::Nodes(nodes) = node else { return None };
            node = &nodes[digit(chunk, level)];
        }
        if let Node::Entries(entries) = node { entries.get(place) } else { None }
    }

    /// As [`get`](Self::get).
    #[inline]
    pub(crate) fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        let (chunk, place) = (number / Self::CHUNK, number % Self::CHUNK);
        if chunk >> (FANOUT_LOG2 * self.height) != 0 {
            return None;
        }
        let mut node = &mut self.root;
        for level in (0..self.height).rev() {
            node = &mut node.nodes_mut()?[digit(chunk, level)];
        }
        node.entries_mut().get_mut(place)
    }

    /// Entry `number`, which was made.
    #[inline]
    #[allow(clippy::expect_used)] // as an index out of range
    pub(crate) fn at(&self, number: usize) -> &T {
        self.get(number).expect("it was made")
    }

    /// As [`at`](Self::at).
    #[inline]
    #[allow(clippy::expect_used)] // as an index out of range
    pub(crate) fn at_mut(&mut self, number: usize) -> &mut T {
        self.get_mut(number).expect("it was made")
    }

    /// All that were made.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.root.iter_mut()
    }
}

const fn digit(chunk: usize, level: u32) -> usize {
    chunk >> (FANOUT_LOG2 * level) & (FANOUT - 1)
}

impl<T> Node<T> {
    /// One whose first is `lower`.
    fn of(lower: Self) -> Self {
        let mut nodes = Box::new([const { Self::Absent }; FANOUT]);
        nodes[0] = lower;
        Self::Nodes(nodes)
    }

    #[inline]
    fn nodes_mut(&mut self) -> Option<&mut [Self; FANOUT]> {
        if let Self::Nodes(nodes) = self { Some(nodes) } else { None }
    }

    #[inline]
    fn entries_mut(&mut self) -> &mut [T] {
        if let Self::Entries(entries) = self { entries } else { &mut [] }
    }

    fn iter_mut(&mut self) -> Box<dyn Iterator<Item = &mut T> + '_> {
        match self {
            Self::Absent => Box::new(std::iter::empty()),
            Self::Nodes(nodes) => Box::new(nodes.iter_mut().flat_map(Self::iter_mut)),
            Self::Entries(entries) => Box::new(entries.iter_mut()),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// How many blocks of entries there are.
    fn blocks<T>(node: &Node<T>) -> usize {
        match node {
            Node::Absent => 0,
            Node::Nodes(nodes) => nodes.iter().map(blocks).sum(),
            Node::Entries(_) => 1,
        }
    }

    #[test]
    fn a_table_has_the_blocks_that_its_entries_need() {
        let mut table = Chunked::new();
        const CHUNK: usize = Chunked::<usize>::CHUNK;
        let most = 2 * FANOUT * CHUNK;
        for number in 0..most {
            assert!(table.get(number).is_none() || number % CHUNK != 0);
            *table.made(number, || 0) = number;
            assert_eq!(blocks(&table.root), number / CHUNK + 1);
        }
        assert!((0..most).all(|number| *table.at(number) == number));
        assert!(table.iter_mut().map(|entry| *entry).eq(0..most));
    }

    #[test]
    fn numbers_far_apart_have_a_block_each() {
        let mut table = Chunked::new();
        const CHUNK: usize = Chunked::<u64>::CHUNK;
        let numbers = [7 * CHUNK + 3, 0, u32::MAX as usize, 7 * CHUNK - 1];
        numbers.iter().for_each(|&number| *table.made(number, || 0) = number as u64 + 1);
        assert_eq!(blocks(&table.root), 4);
        let found = numbers.map(|number| table.get_mut(number).copied());
        assert_eq!(found, numbers.map(|number| Some(number as u64 + 1)));
        assert_eq!([CHUNK, 8 * CHUNK, usize::MAX].map(|number| table.get(number)), [None; 3]);
        assert_eq!(*table.made(7 * CHUNK + 2, || 9), 0, "made with its block");
        let mut sorted = numbers.map(|number| number as u64 + 1);
        sorted.sort_unstable();
        assert!(table.iter_mut().filter(|entry| **entry > 0).map(|entry| *entry).eq(sorted));
    }
}
