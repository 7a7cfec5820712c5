//! What a cache has done, counted exactly.

use crate::error::PerUse;
use std::fmt;

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
    /// Registrations that the registrar refused, and those that were ended at once because the system counted more for them
    /// than there was room for.
    pub registration_failures: u64,
    /// Registrations given back.
    pub deregistrations: u64,
    /// Registrations that the registrar could not give back (the device was gone); not counted
    /// in `deregistrations`.
    pub deregistration_failures: u64,
    /// Registrations made for one use only.
    pub per_use: u64,
    /// Of these, those of ranges that keeping does not pay for yet, or for which there is no room as long as they count more than
    /// was planned ([`PerUse::NotAdmitted`]).
    pub not_admitted: u64,
    /// Why the latest of the others was not cached, of those that did not ask for one use.
    pub per_use_reason: Option<PerUse>,
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
    /// Callbacks of the program that panicked, readings of its clock that did, accounts that did when
    /// they were given something back, and monitors that did where it had nowhere to go.
    pub callback_panics: u64,
    /// Regions registered now, those per use and those waiting for their last lease included.
    pub regions: u64,
    /// What the registrations of now count against the budget, in bytes: whole pages, once for each device that
    /// [pins](crate::Registrar::pins_per_page) them; whole huge pages where the system counts those as a
    /// whole and says which they are.
    pub pinned_bytes: u64,
}

impl Statistics {
    /// The share of gets that found a registration, from 0 to 1; 0 before the first get.
    #[allow(clippy::cast_precision_loss)] // a share of at most 2^53 gets is exact enough
    pub fn hit_rate(&self) -> f64 {
        if self.gets == 0 { 0.0 } else { self.hits as f64 / self.gets as f64 }
    }
}

/// One line; what has not happened is left out.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gets, hits, registrations, regions, pinned_bytes, .. } = self;
        let rate = self.hit_rate() * 100.0;
        write!(
            f,
            "{gets} gets, {hits} hits ({rate:.1} %), {registrations} registrations, {regions} \
             registered now ({pinned_bytes} bytes)"
        )?;
        let seldom = [
            (self.per_use, "registered for one use"),
            (self.not_admitted, "of those not worth keeping yet"),
            (self.registration_failures, "registrations failed"),
            (self.evictions, "evicted"),
            (self.invalidations, "invalidated"),
            (self.overflows, "log overflows"),
            (self.deregistration_failures, "deregistrations failed"),
        ];
        for (count, what) in seldom.into_iter().filter(|&(count, _)| count > 0) {
            write!(f, ", {count} {what}")?;
        }
        match self.per_use_reason {
            Some(why) => write!(f, "; not cached, the latest: {why}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_hit_rate_and_leaves_out_what_has_not_happened() {
        assert_eq!(Statistics::default().hit_rate(), 0.0);
        let some = Statistics { gets: 4, hits: 3, registrations: 1, ..Statistics::default() };
        assert_eq!(
            some.to_string(),
            "4 gets, 3 hits (75.0 %), 1 registrations, 0 registered now (0 bytes)"
        );
        let evicted = Statistics { evictions: 2, per_use: 1, ..some };
        assert!(evicted.to_string().ends_with(", 1 registered for one use, 2 evicted"));
    }
}
