//! A registration under way: others who want the same memory wait for it instead of repeating it.

use crate::AddressRange;
use crate::region::{Terms, Want};
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, lock, wait};

/// One registration under way.
pub(crate) struct Flight {
    pub(crate) range: AddressRange,
    pub(crate) terms: Terms,
    /// The place that the registration will fill.
    pub(crate) number: u32,
    /// Set when an event hit `range` since the flight was enlisted.
    tainted: AtomicBool,
    /// Whether the registration ended. Rank 3: taken with nothing else held.
    landed: Mutex<bool>,
    landing: Condvar,
}

impl Flight {
    pub(crate) fn new(range: AddressRange, terms: Terms, number: u32) -> Self {
        Self {
            range,
            terms,
            number,
            tainted: AtomicBool::new(false),
            landed: Mutex::new(false),
            landing: Condvar::new(),
        }
    }

    /// Whether what is being registered would serve `want`.
    pub(crate) fn would_serve(&self, want: &Want) -> bool {
        want.served_by(self.range, self.terms)
    }

    /// Notes an event. The writer's lock is held.
    pub(crate) fn taint_if_hit(&self, event: AddressRange) {
        if self.range.overlaps(&event) {
            // Relaxed: read and written under the writer's lock.
            self.tainted.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an event hit. The writer's lock is held.
    pub(crate) fn is_tainted(&self) -> bool {
        // Relaxed: as in `taint_if_hit`.
        self.tainted.load(Ordering::Relaxed)
    }

    /// Lets the waiting go on.
    pub(crate) fn land(&self) {
        *lock(&self.landed) = true;
        self.landing.notify_all();
    }

    /// Waits for the end of the registration, whichever it is.
    pub(crate) fn wait(&self) {
        let mut landed = lock(&self.landed);
        while !*landed {
            landed = wait(&self.landing, landed);
        }
    }
}
