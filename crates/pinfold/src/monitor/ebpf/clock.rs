//! The clock by which the programs date what they write.
//!
//! Theirs is the machine's `CLOCK_MONOTONIC`. A process in a namespace of times (`CLONE_NEWTIME`) reads
//! another, which may be days ahead; by that one, no record would ever be recent, or every one. So we
//! have a change dated and look what the programs wrote.

use pinfold_ebpf::layout::Changes;
use pinfold_kernel::Errno;
use pinfold_kernel::thread::monotonic_time;
use pinfold_kernel::trial::TrialArea;
use std::sync::atomic::Ordering;

/// The programs' clock, perhaps a little behind, never ahead: its reader takes a record for younger
/// than it is, and believes it longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Clock {
    /// Added to ours, wrapping.
    ahead: u64,
}

impl Clock {
    /// By a change of our own memory.
    pub(super) fn of(changes: &Changes) -> Result<Self, Errno> {
        TrialArea::private(1)?.unmap();
        // Relaxed: our own thread's change is seen, and any other date will do that is not of the future.
        let dates = changes.records.iter().map(|record| record.since.load(Ordering::Relaxed));
        let newest = dates.max().unwrap_or(0).max(changes.crowded.load(Ordering::Relaxed));
        Ok(Self::from_date(newest, monotonic_time()))
    }

    /// `past` is a date that the programs wrote before our clock said `now`.
    fn from_date(past: u64, now: u64) -> Self {
        Self { ahead: past.wrapping_sub(now) }
    }

    /// Nanoseconds.
    pub(super) fn now(self) -> u64 {
        monotonic_time().wrapping_add(self.ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400_000_000_000;

    #[test]
    fn ours_may_be_ahead_or_behind() {
        for (theirs, ours) in [(5 * DAY, 5 * DAY + 7), (5 * DAY, 9 * DAY), (5 * DAY, DAY)] {
            let clock = Clock::from_date(theirs, ours);
            let now = clock.now();
            // Both go on from what they were.
            let passed = monotonic_time().wrapping_sub(ours);
            assert!(now.wrapping_sub(theirs) <= passed);
            assert!(passed - now.wrapping_sub(theirs) < DAY);
        }
    }

    #[test]
    fn where_nothing_was_dated_everything_is_recent() {
        let clock = Clock::from_date(0, monotonic_time());
        assert!(clock.now() < DAY);
    }
}
