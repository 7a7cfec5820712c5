//! Locks that a panicking test thread does not take away from the others.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` also after a holder panicked: every critical section here leaves its data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
