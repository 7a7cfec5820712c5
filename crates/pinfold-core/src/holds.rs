//! How long the cache's lock is held: measured by the bench alone, in a build with the feature `holds`.
//!
//! Counted for all caches of the process together. Without a clock, and in any other build, nothing is
//! measured.

#[cfg(feature = "holds")]
pub use measured::{Holds, measure_by, take};

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
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static CLOCK: OnceLock<fn() -> u64> = OnceLock::new();
    static LONGEST: AtomicU64 = AtomicU64::new(0);
    static COUNT: AtomicU64 = AtomicU64::new(0);

    /// The holds of the lock since they were last asked for.
    #[derive(Clone, Copy, Debug)]
    pub struct Holds {
        /// The longest, in the clock's unit.
        pub longest: u64,
        /// How many there were.
        pub count: u64,
    }

    /// Measures all holds by `clock` from now on: one that counts what the calling thread does, because
    /// a thread that loses its processor holds the lock on. The first clock stays.
    pub fn measure_by(clock: fn() -> u64) {
        CLOCK.get_or_init(|| clock);
    }

    /// The holds that ended since this was last called.
    pub fn take() -> Holds {
        // Relaxed: the caller has waited for the threads whose holds these are.
        let longest = LONGEST.swap(0, Ordering::Relaxed);
        Holds { longest, count: COUNT.swap(0, Ordering::Relaxed) }
    }

    pub(super) fn now() -> Option<u64> {
        CLOCK.get().map(|clock| clock())
    }

    pub(super) fn note(began: u64) {
        let took = now().map_or(0, |now| now.saturating_sub(began));
        // Relaxed: as in `take`.
        LONGEST.fetch_max(took, Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}
