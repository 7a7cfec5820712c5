//! A queue that grows in chunks: nothing in it is ever copied to a larger place, and what is asked of the allocator at
//! once is small, because the cache's lock is held meanwhile.

use std::collections::{LinkedList, VecDeque};
use std::mem;

/// Bytes of a chunk at most. From 1,008 on glibc's allocator first goes through all small blocks that were freed, which
/// takes a millisecond after 10^5 of them.
const CHUNK_BYTES: usize = 960;

/// First in, first out.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    /// All are full, but that of the first some may have been taken, and not all.
    full: LinkedList<VecDeque<T>>,
    /// Behind those. It does not grow, but has no room before the first item comes.
    last: VecDeque<T>,
    /// To be used again: no chunk is freed.
    spare: LinkedList<VecDeque<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Queue<T> {
    /// How many items a chunk has room for.
    const CHUNK: usize = {
        assert!(size_of::<T>() <= CHUNK_BYTES, "a chunk has room for no item");
        if cfg!(any(loom, shuttle, miri)) { 4 } else { CHUNK_BYTES / size_of::<T>() }
    };

    pub(crate) const fn new() -> Self {
        Self { full: LinkedList::new(), last: VecDeque::new(), spare: LinkedList::new() }
    }

    /// Adds an item behind all others. Where it stays until it is taken.
    pub(crate) fn push(&mut self, item: T) -> &T {
        if self.last.len() == self.last.capacity().min(Self::CHUNK) {
            self.begin_chunk();
        }
        self.last.push_back(item);
        &self.last[self.last.len() - 1]
    }

    #[cold]
    fn begin_chunk(&mut self) {
        let next = self.spare.pop_front();
        let next = next.unwrap_or_else(|| VecDeque::with_capacity(Self::CHUNK));
        let full = mem::replace(&mut self.last, next);
        self.full.extend(Some(full).filter(|chunk| !chunk.is_empty()));
    }

    /// Takes the item that has been here longest.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let Some(chunk) = self.full.front_mut() else { return self.last.pop_front() };
        let item = chunk.pop_front();
        if chunk.is_empty() {
            self.spare.extend(self.full.pop_front());
        }
        item
    }

    /// Takes all items.
    pub(crate) fn clear(&mut self) {
        self.full.iter_mut().for_each(VecDeque::clear);
        self.spare.append(&mut self.full);
        self.last.clear();
    }

    /// All items, first come first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.full.iter().flatten().chain(&self.last)
    }

    /// The items behind the first `skipped`.
    pub(crate) fn iter_from(&self, skipped: usize) -> impl Iterator<Item = &T> {
        let first = self.full.front().map_or(0, VecDeque::len);
        let behind = (skipped.checked_sub(first), self.full.len().checked_sub(1));
        let (chunks, items) = if let (Some(items), Some(full)) = behind {
            let full = full.min(items / Self::CHUNK);
            (1 + full, items - full * Self::CHUNK)
        } else {
            (0, skipped)
        };
        self.full.iter().skip(chunks).flatten().chain(&self.last).skip(items)
    }

    pub(crate) fn len(&self) -> usize {
        let first = self.full.front().map_or(0, VecDeque::len);
        first + self.full.len().saturating_sub(1) * Self::CHUNK + self.last.len()
    }

    /// The first item that is not before what is looked for, as none behind it is.
    pub(crate) fn find_mut(&mut self, is_before: impl Fn(&T) -> bool) -> Option<&mut T> {
        let is_in = |chunk: &&mut VecDeque<T>| !chunk.back().is_some_and(&is_before);
        let chunk = self.full.iter_mut().find(is_in).unwrap_or(&mut self.last);
        let position = chunk.partition_point(is_before);
        chunk.get_mut(position)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Next to the standard library's.
    #[test]
    fn agrees_with_a_plain_queue() {
        let (mut queue, mut model) = (Queue::new(), VecDeque::new());
        for turn in 0..if cfg!(miri) { 300 } else { 10_000 } {
            // Runs of seven pushes and of four or five takes: through every length of a chunk.
            if turn % 11 < 7 || turn % 97 == 0 {
                assert_eq!(*queue.push(turn), turn);
                model.push_back(turn);
            } else {
                assert_eq!(queue.pop(), model.pop_front());
            }
        }
        assert!(queue.iter().eq(&model) && queue.iter().rev().eq(model.iter().rev()));
        assert_eq!(queue.len(), model.len());
        for skipped in 0..model.len() + 2 {
            assert!(queue.iter_from(skipped).eq(model.iter().skip(skipped)));
        }
        for sought in 0..model.back().unwrap() + 2 {
            let found = queue.find_mut(|&item| item < sought).copied();
            assert_eq!(found, model.iter().copied().find(|&item| item >= sought));
        }
        while let Some(expected) = model.pop_front() {
            assert_eq!(queue.pop(), Some(expected));
        }
        assert_eq!(queue.pop(), None);
        (0..3 * Queue::<usize>::CHUNK).for_each(|item| _ = queue.push(item));
        queue.clear();
        assert_eq!((queue.len(), *queue.push(7), queue.pop()), (0, 7, Some(7)));
    }

    #[test]
    fn items_stay_where_they_are() {
        let mut queue = Queue::new();
        let first = std::ptr::from_ref(queue.push(0));
        (1..=4 * Queue::<usize>::CHUNK).for_each(|item| _ = queue.push(item));
        assert_eq!(queue.iter().next().map(std::ptr::from_ref), Some(first));
    }
}
