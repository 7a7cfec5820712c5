//! A queue that grows in chunks: what is in it is never copied to a larger place, because the cache's lock is
//! held meanwhile.

use std::collections::VecDeque;

/// How many items a chunk has room for.
const CHUNK: usize = if cfg!(any(loom, shuttle, miri)) { 4 } else { 256 };

/// First in, first out.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    /// None of them grows, and none but the only one is empty.
    chunks: VecDeque<VecDeque<T>>,
    /// To be used again: nothing is freed.
    spare: Vec<VecDeque<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Queue<T> {
    pub(crate) const fn new() -> Self {
        Self { chunks: VecDeque::new(), spare: Vec::new() }
    }

    /// Adds an item behind all others. Where it stays until it is taken.
    pub(crate) fn push(&mut self, item: T) -> &T {
        let chunk = match self.chunks.pop_back() {
            Some(chunk) if chunk.len() < CHUNK => chunk,
            full => {
                self.chunks.extend(full);
                self.spare.pop().unwrap_or_else(|| VecDeque::with_capacity(CHUNK))
            }
        };
        self.chunks.push_back(chunk);
        let last = self.chunks.len() - 1;
        let chunk = &mut self.chunks[last];
        chunk.push_back(item);
        &chunk[chunk.len() - 1]
    }

    /// Takes the item that has been here longest.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let chunk = self.chunks.front_mut()?;
        let item = chunk.pop_front();
        if chunk.is_empty() && self.chunks.len() > 1 {
            self.spare.extend(self.chunks.pop_front());
        }
        item
    }

    /// Takes all items.
    pub(crate) fn clear(&mut self) {
        for mut chunk in self.chunks.drain(..) {
            chunk.clear();
            self.spare.push(chunk);
        }
    }

    /// All items, first come first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    /// The items behind the first `skipped`.
    pub(crate) fn iter_from(&self, skipped: usize) -> impl Iterator<Item = &T> {
        // Of the first chunk some may have been taken; all others but the last are full.
        let first = self.chunks.front().map_or(0, VecDeque::len);
        let (chunk, place) = match skipped.checked_sub(first) {
            None => (0, skipped),
            Some(more) => (1 + more / CHUNK, more % CHUNK),
        };
        self.chunks.iter().skip(chunk).flatten().skip(place)
    }

    pub(crate) fn len(&self) -> usize {
        // Those between the first and the last are full.
        let full = self.chunks.len().saturating_sub(2) * CHUNK;
        let last = self.chunks.iter().skip(1).next_back();
        full + self.chunks.front().into_iter().chain(last).map(VecDeque::len).sum::<usize>()
    }

    /// The first item that is not before what is looked for, as none behind it is.
    pub(crate) fn find_mut(&mut self, is_before: impl Fn(&T) -> bool) -> Option<&mut T> {
        let all_before = |chunk: &VecDeque<T>| chunk.back().is_some_and(&is_before);
        let chunk = self.chunks.partition_point(all_before);
        let chunk = self.chunks.get_mut(chunk)?;
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
        (0..3 * CHUNK).for_each(|item| _ = queue.push(item));
        queue.clear();
        assert_eq!((queue.len(), *queue.push(7), queue.pop()), (0, 7, Some(7)));
    }

    #[test]
    fn items_stay_where_they_are() {
        let mut queue = Queue::new();
        let first = std::ptr::from_ref(queue.push(0));
        (1..=4 * CHUNK).for_each(|item| _ = queue.push(item));
        assert_eq!(queue.iter().next().map(std::ptr::from_ref), Some(first));
    }
}
