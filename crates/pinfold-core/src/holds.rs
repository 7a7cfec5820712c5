//! How long the cache's lock is held: measured by the bench alone, in a build with the feature `holds`.
//!
//! Counted for all caches of the process together. Without a clock, and in any other build, nothing is
//! measured.

#[cfg(feature = "holds")]
pub use measured::{measure_by, take};

/// One hold of the lock, from its beginning on.
pub(crate) struct Hold(#[cfg(feature = "holds")] Option<u64>);

#[cfg(not(feature = "holds"))]
impl Hold {
    #[inline(always)]
    pub(crate) const fn begin() -> Self {
        Self()
    }

    #[inline(always)]
    #[allow(clippy::unused_self)] // as in the build that measures
    pub(crate) const fn end(self) {}
}

#[cfg(feature = "holds")]
impl Hold {
    pub(crate) fn begin() -> Self {
        Self(measured::now())
    }

    pub(crate) fn end(self) {
        self.0.into_iter().for_each(measured::note);
    }
}

#[cfg(feature = "holds")]
mod measured {
    use std::sync::{Mutex, OnceLock, PoisonError};

    // Filled once, by a bench that forks no child.
    static CLOCK: OnceLock<fn() -> u64> = OnceLock::new();
    static HELD: Mutex<Vec<u32>> = Mutex::new(Vec::new());

    /// Measures all holds by `clock` from now on: one that counts what the calling thread does, because
    /// a thread that loses its processor holds the lock on. The first clock stays.
    pub fn measure_by(clock: fn() -> u64) {
        CLOCK.get_or_init(|| clock);
    }

    /// How long the holds took that ended since this was last called, in their order and in the clock's
    /// unit.
    pub fn take() -> Vec<u32> {
        std::mem::take(&mut HELD.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn now() -> Option<u64> {
        CLOCK.get().map(|clock| clock())
    }

    pub(super) fn note(began: u64) {
        let took = now().map_or(0, |now| now.saturating_sub(began));
        let took = u32::try_from(took).unwrap_or(u32::MAX);
        HELD.lock().unwrap_or_else(PoisonError::into_inner).push(took);
    }
}
