//! PLACEHOLDER until the feed itself is merged: the names that the hooks need, and a count.

use crate::{AddressRange, Change};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What somebody tells of changes.
#[repr(C)]
#[derive(Debug)]
pub struct Feed {
    magic: u64,
    claims: AtomicU32,
    told: AtomicU64,
}

impl Feed {
    /// An empty feed.
    pub const fn new() -> Self {
        Self { magic: 1, claims: AtomicU32::new(0), told: AtomicU64::new(0) }
    }

    /// A change is under way until the guard is dropped.
    pub fn begin(&self, range: AddressRange) -> Changing<'_> {
        let _ = range;
        self.told.fetch_add(1, Ordering::SeqCst);
        Changing(self)
    }

    /// Says that changes of this kind are told.
    pub fn claim(&self, change: Change) {
        self.claims.fetch_or(1 << change as u32, Ordering::SeqCst);
    }

    /// Ends [`claim`](Self::claim).
    pub fn withdraw(&self, change: Change) {
        self.claims.fetch_and(!(1 << change as u32), Ordering::SeqCst);
    }

    /// Whether changes of this kind are told.
    pub fn claims(&self, change: Change) -> bool {
        self.claims.load(Ordering::SeqCst) & 1 << change as u32 != 0
    }
}

impl Default for Feed {
    fn default() -> Self {
        Self::new()
    }
}

/// A change under way.
#[derive(Debug)]
pub struct Changing<'f>(&'f Feed);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.told.fetch_add(1, Ordering::SeqCst);
    }
}
