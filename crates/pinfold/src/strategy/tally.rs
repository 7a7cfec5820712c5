//! What a planner counts: above all, how often a transfer did not get its fastest way.

use super::Strategy;
use super::advice::Handicap;
use crate::landing::Method;
use crate::pool::AllocateError;
use crate::{GetError, PerUse, Uncovered};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a transfer did not get the fastest way for its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Slow {
    /// Changes of this memory cannot be seen; `None` if the planner remembers that it was so, not why.
    Uncovered(Option<Uncovered>),
    /// Copying would be faster, but there is no pool, or no buffer of it is that long.
    TooLongToCopy {
        /// The longest, in bytes.
        longest: usize,
    },
    /// The registration was to be kept, and was not.
    NotKept(PerUse),
    /// The pool had no buffer.
    Pool(AllocateError),
    /// The memory was not registered as a whole: it was copied instead, or moved in pieces.
    Refused(GetError),
    /// Nothing was measured, so nothing was compared.
    Unmeasured,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncovered(why) => Handicap::Uncovered(*why).fmt(f),
            Self::TooLongToCopy { longest } => Handicap::TooLongToCopy { longest: *longest }.fmt(f),
            Self::NotKept(why) => write!(f, "registered for this use alone: {why}"),
            Self::Pool(error) => write!(f, "not copied: {error}"),
            Self::Refused(error) => {
                write!(f, "copied or in pieces, because it was not registered as a whole: {error}")
            }
            Self::Unmeasured => Handicap::Unmeasured.fmt(f),
        }
    }
}

impl From<Handicap> for Slow {
    fn from(handicap: Handicap) -> Self {
        match handicap {
            Handicap::Uncovered(why) => Self::Uncovered(why),
            Handicap::TooLongToCopy { longest } => Self::TooLongToCopy { longest },
            Handicap::Unmeasured => Self::Unmeasured,
        }
    }
}

/// How a planner's transfers went. Leases that the cache kept are counted by
/// [the cache](crate::Cache::statistics) alone, so that a hit writes nothing that threads share.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PlannerStatistics {
    /// Copied through the pool, whichever way.
    pub copied: u64,
    /// Registered for one use because that was the fastest, or the only way.
    pub per_use: u64,
    /// Registered in step with the transfer.
    pub in_pieces: u64,
    /// Slow because changes of the memory cannot be seen ([`Slow::Uncovered`], [`Slow::NotKept`]).
    pub slow_uncovered: u64,
    /// Slow because the pool had no buffer ([`Slow::Pool`]).
    pub slow_pool: u64,
    /// Slow because there is no pool, or none with buffers that long ([`Slow::TooLongToCopy`]).
    pub slow_too_long: u64,
    /// Slow because the memory could not be registered, or not as a whole ([`Slow::Refused`]).
    pub slow_refused: u64,
    /// Perhaps slow, because nothing was measured ([`Slow::Unmeasured`]).
    pub slow_unmeasured: u64,
}

impl PlannerStatistics {
    /// Transfers that did not get their fastest way, or may not have.
    pub fn slow(&self) -> u64 {
        let of_pools = self.slow_pool + self.slow_too_long;
        self.slow_uncovered + of_pools + self.slow_refused + self.slow_unmeasured
    }
}

/// The counters.
#[derive(Default)]
pub(super) struct Tally {
    copied: AtomicU64,
    per_use: AtomicU64,
    in_pieces: AtomicU64,
    slow_uncovered: AtomicU64,
    slow_pool: AtomicU64,
    slow_too_long: AtomicU64,
    slow_refused: AtomicU64,
    slow_unmeasured: AtomicU64,
}

impl Tally {
    /// Counts a transfer.
    pub(super) fn count(&self, strategy: Strategy, slow: Option<Slow>) {
        let way = match strategy {
            Strategy::Cached | Strategy::OnDemand => None,
            Strategy::Copy | Strategy::Landing(Method::Copy) => Some(&self.copied),
            Strategy::PerUse => Some(&self.per_use),
            Strategy::Pieces => Some(&self.in_pieces),
            Strategy::Landing(_) => None,
        };
        let slow = slow.map(|slow| match slow {
            Slow::Uncovered(_) | Slow::NotKept(_) => &self.slow_uncovered,
            Slow::Pool(_) => &self.slow_pool,
            Slow::TooLongToCopy { .. } => &self.slow_too_long,
            Slow::Refused(_) => &self.slow_refused,
            Slow::Unmeasured => &self.slow_unmeasured,
        });
        // Relaxed: counters that nothing else depends on.
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        way.map(count);
        slow.map(count);
    }

    pub(super) fn statistics(&self) -> PlannerStatistics {
        // Relaxed: as above.
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PlannerStatistics {
            copied: read(&self.copied),
            per_use: read(&self.per_use),
            in_pieces: read(&self.in_pieces),
            slow_uncovered: read(&self.slow_uncovered),
            slow_pool: read(&self.slow_pool),
            slow_too_long: read(&self.slow_too_long),
            slow_refused: read(&self.slow_refused),
            slow_unmeasured: read(&self.slow_unmeasured),
        }
    }
}
