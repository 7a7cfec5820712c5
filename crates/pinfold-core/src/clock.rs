//! The time, from a function that the cache is given: this crate makes no system call.

use crate::foreign;

/// A clock that never goes back.
///
/// Only compared with itself, to learn what things take: one that stands still, or jumps, costs time and
/// nothing else. It is read with no lock of the cache held, also while a registration is under way: as for a registrar, a
/// `get` of the same bytes from inside would wait for itself. A reading that panics is counted
/// ([`Statistics::callback_panics`](crate::Statistics::callback_panics)), and nothing is learnt from it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    nanoseconds: fn() -> u64,
}

impl Clock {
    /// A clock that `nanoseconds` reads, from whatever moment on. It is read some twelve times for
    /// one miss in eight.
    pub const fn new(nanoseconds: fn() -> u64) -> Self {
        Self { nanoseconds }
    }

    /// `None` if it panicked.
    pub(crate) fn now(self) -> Option<u64> {
        foreign::call(self.nanoseconds).ok()
    }
}

/// What passed between two readings, if both were made.
pub(crate) fn since(began: Option<u64>, now: Option<u64>) -> Option<u64> {
    Some(now?.saturating_sub(began?))
}
