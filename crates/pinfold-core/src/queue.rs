//! A queue that grows in chunks: what is in it is never copied to a larger place, because the cache's lock is
//! held meanwhile.

use std::collections::VecDeque;

/// How many items a chunk has room for.
const CHUNK: usize = if cfg!(any(loom, shuttle, miri)) { 4 } else { 256 };

/// First in, first out.
pub(crate) struct Queue<T> {
    /// None of them grows, and none but the only one is empty.
    chunks: VecDeque<VecDeque<T>>,
}

impl<T> Queue<T> {
    pub(crate) const fn new() -> Self {
        Self { chunks: VecDeque::new() }
    }

    /// Adds an item behind all others. Where it stays until it is taken.
    pub(crate) fn push(&mut self, item: T) -> &T {
        let chunk = match self.chunks.pop_back() {
            Some(chunk) if chunk.len() < CHUNK => chunk,
            full => {
                self.chunks.extend(full);
                VecDeque::with_capacity(CHUNK)
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
            self.chunks.pop_front();
        }
        item
    }

    /// All items, first come first.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
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
        assert!(queue.iter().eq(&model));
        while let Some(expected) = model.pop_front() {
            assert_eq!(queue.pop(), Some(expected));
        }
        assert_eq!(queue.pop(), None);
    }

    #[test]
    fn items_stay_where_they_are() {
        let mut queue = Queue::new();
        let first = std::ptr::from_ref(queue.push(0));
        (1..=4 * CHUNK).for_each(|item| _ = queue.push(item));
        assert_eq!(queue.iter().next().map(std::ptr::from_ref), Some(first));
    }
}
