//! What all caches of a process may keep registered together.

use pinfold::budget::{Amount, Budget, BudgetError, Share, Terms};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The room that the caches of all protection domains share: what one leaves idle another may have.
#[derive(Debug)]
pub(crate) struct Room {
    budget: Budget,
    /// Whether it was found spent on what the program holds, since when it has given nothing back.
    /// Finding that out costs a look at everything that it holds.
    full: AtomicBool,
}

impl Room {
    /// # Errors
    ///
    /// [`BudgetError`], for no room at all for one.
    pub(crate) fn new(amount: Amount) -> Result<Self, BudgetError> {
        Ok(Self { budget: Budget::new(amount)?, full: AtomicBool::new(false) })
    }

    /// A share for one more cache.
    ///
    /// # Errors
    ///
    /// As from [`Budget::share`].
    pub(crate) fn share(&self) -> Result<Arc<Share>, BudgetError> {
        self.budget.share(Terms::default())
    }

    /// Whether there is no use in asking a cache for more.
    pub(crate) fn is_full(&self) -> bool {
        // Relaxed, here and below: a wrong guess costs time, or one registration past the caches.
        self.full.load(Ordering::Relaxed)
    }

    /// A cache was refused what it will be refused again, until a lease ends.
    pub(crate) fn note_full(&self) {
        self.full.store(true, Ordering::Relaxed);
    }

    /// A lease has ended, and what it held may be given up for another.
    pub(crate) fn note_end(&self) {
        if self.is_full() {
            self.full.store(false, Ordering::Relaxed);
        }
    }
}
