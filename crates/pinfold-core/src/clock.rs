//! The time, from a function that the cache is given: this crate makes no system call.

/// A clock that never goes back.
///
/// Only compared with itself, to learn what things take: one that stands still, or jumps, costs time and
/// nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    nanoseconds: fn() -> u64,
}

impl Clock {
    /// A clock that `nanoseconds` reads, from whatever moment on. It is read some three times for each
    /// miss.
    pub const fn new(nanoseconds: fn() -> u64) -> Self {
        Self { nanoseconds }
    }

    pub(crate) fn now(self) -> u64 {
        (self.nanoseconds)()
    }
}

/// What passed between two readings.
pub(crate) const fn since(began: u64, now: u64) -> u64 {
    now.saturating_sub(began)
}
