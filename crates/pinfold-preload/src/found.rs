//! What is found once: in memory that is there, and without a lock that a forked child may find taken for ever.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A value that is there for good once one thread has noted it.
#[derive(Debug)]
pub(crate) struct Found<T> {
    is_taken: AtomicBool,
    /// Set by one thread in the life of a process and its forked children, so that none ever waits for another.
    value: OnceLock<T>,
}

impl<T> Found<T> {
    pub(crate) const fn new() -> Self {
        Self { is_taken: AtomicBool::new(false), value: OnceLock::new() }
    }

    /// `None` before it was noted, and for ever in a child that was forked while another thread noted it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The first value stays. Whether this is it.
    pub(crate) fn note(&self, value: T) -> bool {
        // Relaxed: says only which thread sets it; who gets the value acquires it from `value`.
        let is_first = !self.is_taken.swap(true, Ordering::Relaxed);
        if is_first {
            _ = self.value.set(value);
        }
        is_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn the_first_value_stays_for_all() {
        let found = Found::new();
        assert_eq!(found.get(), None);
        let note = |number: usize| {
            found.note([number; 100]);
            found.get().copied()
        };
        let seen: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|number| scope.spawn(move || note(number))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        let first = *found.get().unwrap();
        assert!(first == [first[0]; 100] && seen.iter().all(|value| *value == first));
    }

    /// As a child finds it that was forked in the middle of `note`.
    #[test]
    fn no_thread_waits_for_one_that_is_gone() {
        let found = Found { is_taken: AtomicBool::new(true), value: OnceLock::new() };
        assert!(!found.note(1));
        assert_eq!(found.get(), None);
    }
}
