//! What all caches of a process may keep registered together.

use pinfold::budget::{Amount, Budget, BudgetError, Share, Terms};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The room that the caches of all protection domains share: what one leaves idle another may have.
#[derive(Debug)]
pub(crate) struct Room {
    budget: Budget,
    /// How many more requests are spared asking, since it was found spent on what the program holds:
    /// finding that out costs a look at everything that it holds. A number and not a flag, because
    /// the last lease may end between the refusal and its note, and then nobody would take it back.
    spared: AtomicU32,
}

/// How many requests a refusal speaks for: a few are a look too many, and so many past the caches
/// cost no more than one such look.
const SPARED: u32 = 1024;

impl Room {
    /// # Errors
    ///
    /// [`BudgetError`], for no room at all for one.
    pub(crate) fn new(amount: Amount) -> Result<Self, BudgetError> {
        Ok(Self { budget: Budget::new(amount)?, spared: AtomicU32::new(0) })
    }

    /// A share for one more cache.
    ///
    /// # Errors
    ///
    /// As from [`Budget::share`].
    pub(crate) fn share(&self) -> Result<Arc<Share>, BudgetError> {
        self.budget.share(Terms::default())
    }

    /// Whether there is no use in asking a cache for more. Each yes is counted.
    pub(crate) fn is_full(&self) -> bool {
        let one_less = |spared: u32| spared.checked_sub(1);
        // Relaxed, here and below: a wrong guess costs time, or one registration past the caches.
        self.spared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    /// A cache was refused what it will be refused again, until a lease ends.
    pub(crate) fn note_full(&self) {
        self.spared.store(SPARED, Ordering::Relaxed);
    }

    /// A lease has ended, and what it held may be given up for another.
    pub(crate) fn note_end(&self) {
        // Read first: ends are many, and a write takes the line from every other thread.
        if self.spared.load(Ordering::Relaxed) > 0 {
            self.spared.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room() -> Room {
        Room::new(Amount { regions: 4, bytes: 1 << 20 }).unwrap()
    }

    #[test]
    fn an_end_makes_room() {
        let room = room();
        assert!(!room.is_full());
        room.note_full();
        assert!(room.is_full() && room.is_full());
        room.note_end();
        assert!(!room.is_full());
    }

    #[test]
    fn a_refusal_noted_after_the_last_end_is_forgotten() {
        let room = room();
        room.note_end();
        room.note_full();
        let spared = std::iter::repeat_with(|| room.is_full()).take_while(|&full| full);
        assert_eq!(spared.take(1 << 20).count(), SPARED as usize);
        assert!(!room.is_full());
    }
}
