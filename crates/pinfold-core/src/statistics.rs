//! What a cache has done, counted exactly.

/// Counters since the cache was made, and what it holds now.
///
/// Every counter is exact: one that concerns a `get` is final when that `get` returns. Counters
/// have 64 bits: at a billion a second they wrap after 584 years.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Statistics {
    /// Calls that asked for a registration with valid arguments: `hits + misses`.
    pub gets: u64,
    /// Gets served by a region that was registered already.
    pub hits: u64,
    /// Gets that had to register, failed ones included.
    pub misses: u64,
    /// Times a get waited for another thread's registration of the same memory.
    pub waits: u64,
    /// Registrations made.
    pub registrations: u64,
    /// Registrations that the registrar refused.
    pub registration_failures: u64,
    /// Registrations given back.
    pub deregistrations: u64,
    /// Registrations that the registrar could not give back (the device was gone); not counted
    /// in `deregistrations`.
    pub deregistration_failures: u64,
    /// Registrations made for one use only, because caching them would not have been right.
    pub per_use: u64,
    /// Idle regions given up for room.
    pub evictions: u64,
    /// Regions given up because a larger one covers them.
    pub superseded: u64,
    /// Cached regions that a change of mappings, or a call of `invalidate`, hit.
    pub invalidations: u64,
    /// Changes of mappings heard of, on whatever memory.
    pub events: u64,
    /// Times the monitor's log had been overwritten before it was read, so that everything was
    /// invalidated.
    pub overflows: u64,
    /// Callbacks of the program that panicked.
    pub callback_panics: u64,
    /// Regions registered now, those per use and those waiting for their last lease included.
    pub regions: u64,
    /// Bytes registered now, in whole pages.
    pub pinned_bytes: u64,
}
