//! A queue that grows in chunks: nothing in it is ever copied to a larger place, and what is asked of the allocator at
//! once is a [block](crate::chunked::BLOCK_BYTES), because the cache's lock is held meanwhile.

use crate::chunked::in_block;
use std::collections::{LinkedList, VecDeque};
use std::{iter, mem};

/// Items that stand in one block of memory: it does not grow.
type Chunk<T> = VecDeque<T>;

/// Chunks, whose places stand in blocks of memory in turn: so one is found among many in few steps.
type Chunks<T> = LinkedList<VecDeque<Chunk<T>>>;

/// First in, first out.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    /// All are full, but that of the first some may have been taken, and not all.
    full: Chunks<T>,
    /// Behind those. It has no room before the first item comes.
    last: Chunk<T>,
    /// To be used again: no chunk is freed.
    spare: Chunks<T>,
    /// Without a chunk.
    spare_blocks: Chunks<T>,
    length: usize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Queue<T> {
    /// How many items a chunk has room for.
    const CHUNK: usize = in_block::<T>();

    pub(crate) const fn new() -> Self {
        Self {
            full: LinkedList::new(),
            last: VecDeque::new(),
            spare: LinkedList::new(),
            spare_blocks: LinkedList::new(),
            length: 0,
        }
    }

    /// Adds an item behind all others. Where it stays until it is taken.
    pub(crate) fn push(&mut self, item: T) -> &T {
        if self.last.len() == self.last.capacity().min(Self::CHUNK) {
            self.begin_chunk();
        }
        self.length += 1;
        self.last.push_back(item);
        &self.last[self.last.len() - 1]
    }

    #[cold]
    fn begin_chunk(&mut self) {
        let next = take_first(&mut self.spare, &mut self.spare_blocks);
        let next = next.unwrap_or_else(|| VecDeque::with_capacity(Self::CHUNK));
        let full = mem::replace(&mut self.last, next);
        if !full.is_empty() {
            append(&mut self.full, &mut self.spare_blocks, full);
        }
    }

    /// Takes the item that has been here longest.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let first = self.full.front_mut().and_then(VecDeque::front_mut);
        let chunk = first.unwrap_or(&mut self.last);
        let item = chunk.pop_front()?;
        self.length -= 1;
        if chunk.is_empty()
            && let Some(chunk) = take_first(&mut self.full, &mut self.spare_blocks)
        {
            append(&mut self.spare, &mut self.spare_blocks, chunk);
        }
        Some(item)
    }

    /// The item that has been here longest.
    pub(crate) fn first(&self) -> Option<&T> {
        let first = self.full.front().and_then(VecDeque::front);
        first.unwrap_or(&self.last).front()
    }

    /// Takes all items.
    pub(crate) fn clear(&mut self) {
        self.full.iter_mut().flatten().for_each(VecDeque::clear);
        self.spare.append(&mut self.full);
        self.last.clear();
        self.length = 0;
    }

    /// All items, first come first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.full.iter().flatten().flatten().chain(&self.last)
    }

    /// All items, which are taken.
    pub(crate) fn into_items(mut self) -> impl Iterator<Item = T> {
        iter::from_fn(move || self.pop())
    }

    /// The items behind the first `skipped`.
    pub(crate) fn iter_from(&self, skipped: usize) -> impl Iterator<Item = &T> {
        let first = self.full.front().and_then(VecDeque::front).map_or(0, VecDeque::len);
        let (chunks, items) = match skipped.checked_sub(first) {
            Some(behind) => (1 + behind / Self::CHUNK, behind % Self::CHUNK),
            None => (0, skipped),
        };
        let skipped_of_last = skipped.saturating_sub(self.length - self.last.len());
        let full = self.full.iter().flatten().skip(chunks).flatten().skip(items);
        full.chain(self.last.iter().skip(skipped_of_last))
    }

    pub(crate) const fn len(&self) -> usize {
        self.length
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The first item that is not before what is looked for, as none behind it is.
    pub(crate) fn find_mut(&mut self, is_before: impl Fn(&T) -> bool) -> Option<&mut T> {
        let is_behind = |chunk: &Chunk<T>| chunk.back().is_some_and(&is_before);
        // What is looked for is one of the latest most often.
        let is_in_last = self.last.front().is_some_and(&is_before);
        let mut blocks = self.full.iter_mut().filter(|_| !is_in_last);
        let block = blocks.find(|block| !block.back().is_some_and(is_behind));
        let chunk = block.and_then(|block| {
            let position = block.partition_point(is_behind);
            block.get_mut(position)
        });
        let chunk = chunk.unwrap_or(&mut self.last);
        let position = chunk.partition_point(&is_before);
        chunk.get_mut(position)
    }
}

/// Adds a chunk behind others.
fn append<T>(chunks: &mut Chunks<T>, spare_blocks: &mut Chunks<T>, chunk: Chunk<T>) {
    match chunks.back_mut() {
        Some(block) if block.len() < in_block::<Chunk<T>>() => block.push_back(chunk),
        _ => {
            let spare = spare_blocks.pop_front();
            let room = || VecDeque::with_capacity(in_block::<Chunk<T>>());
            let mut block = spare.unwrap_or_else(room);
            block.push_back(chunk);
            chunks.push_back(block);
        }
    }
}

/// Takes out the first chunk.
fn take_first<T>(chunks: &mut Chunks<T>, spare_blocks: &mut Chunks<T>) -> Option<Chunk<T>> {
    let block = chunks.front_mut()?;
    let chunk = block.pop_front();
    if block.is_empty() {
        spare_blocks.extend(chunks.pop_front());
    }
    chunk
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
        assert_eq!(queue.first(), model.front());
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
