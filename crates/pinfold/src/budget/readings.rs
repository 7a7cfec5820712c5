//! What was found of the limits that change, where several threads read them at the same time.

use super::discovery::CurrentLimits;
use std::time::{Duration, Instant};

/// When a reading of the limits reads the list of mappings as well, for the rings in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rings {
    Always,
    /// If [`RINGS_STAY`] has passed since they were last read: its cost grows with the process's mappings.
    WhenOld,
}

/// How long a registration that is refused takes the rings to be what they were.
pub(super) const RINGS_STAY: Duration = Duration::from_secs(1);

/// The limits are read with no lock held, so a reading is numbered as it begins, and counts if none that began later has
/// been noted. One that begins when a limit has changed is not overwritten by what was found before the change.
#[derive(Debug, Default)]
pub(super) struct Readings {
    begun: u64,
    memlock: Reading<u64>,
    is_waived: Reading<bool>,
    rings: Reading<u64>,
    /// When the last reading of the rings began.
    rings_begun: Option<Instant>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Reading<T> {
    number: u64,
    value: Option<T>,
}

impl<T> Reading<T> {
    /// What could not be read stays as it was.
    fn note(&mut self, number: u64, value: Option<T>) {
        if value.is_some() && number > self.number {
            *self = Self { number, value };
        }
    }
}

impl Readings {
    /// The number of a reading that begins, and whether it is to read the rings.
    pub(super) fn begin(&mut self, rings: Rings) -> (u64, bool) {
        self.begun += 1;
        let are_old = self.rings_begun.is_none_or(|begun| begun.elapsed() >= RINGS_STAY);
        let reads_rings = rings == Rings::Always || are_old;
        if reads_rings {
            self.rings_begun = Some(Instant::now());
        }
        (self.begun, reads_rings)
    }

    /// Notes what reading `number` found.
    pub(super) fn note(&mut self, number: u64, found: CurrentLimits) {
        self.memlock.note(number, found.memlock);
        self.is_waived.note(number, found.is_waived);
        self.rings.note(number, found.rings);
    }

    /// What the kernel lets the process pin, in bytes. `None` if it cannot be known.
    pub(super) fn memlock(&self) -> Option<u64> {
        if self.is_waived.value == Some(true) { Some(u64::MAX) } else { self.memlock.value }
    }

    /// What the rings take of it, in bytes.
    pub(super) fn rings(&self) -> u64 {
        self.rings.value.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(memlock: u64, rings: Option<u64>) -> CurrentLimits {
        CurrentLimits { memlock: Some(memlock), is_waived: Some(false), rings }
    }

    const UNREAD: CurrentLimits = CurrentLimits { memlock: None, is_waived: None, rings: None };

    #[test]
    fn what_was_found_before_a_change_does_not_overwrite_what_was_found_behind_it() {
        let mut readings = Readings::default();
        let (before, _) = readings.begin(Rings::Always);
        let (behind, _) = readings.begin(Rings::Always);
        readings.note(behind, found(2, Some(20)));
        readings.note(before, found(1, Some(10)));
        assert_eq!((readings.memlock(), readings.rings()), (Some(2), 20));
        let (last, _) = readings.begin(Rings::WhenOld);
        readings.note(last, UNREAD);
        assert_eq!((readings.memlock(), readings.rings()), (Some(2), 20), "not read");
    }

    #[test]
    fn a_waiver_stays_where_only_the_limit_can_be_read() {
        let mut readings = Readings::default();
        let mut note = |found| {
            let (number, _) = readings.begin(Rings::Always);
            readings.note(number, found);
            readings.memlock()
        };
        assert_eq!(note(CurrentLimits { is_waived: Some(true), ..UNREAD }), Some(u64::MAX));
        assert_eq!(note(CurrentLimits { memlock: Some(1), ..UNREAD }), Some(u64::MAX));
        assert_eq!(note(CurrentLimits { is_waived: Some(false), ..UNREAD }), Some(1));
        assert_eq!(note(CurrentLimits { memlock: Some(2), ..UNREAD }), Some(2));
    }

    /// What is slow may come in behind what is quick.
    #[test]
    fn rings_count_although_a_later_reading_without_them_has_been_noted() {
        let mut readings = Readings::default();
        let (slow, _) = readings.begin(Rings::Always);
        let (quick, _) = readings.begin(Rings::WhenOld);
        readings.note(quick, found(2, None));
        readings.note(slow, found(1, Some(10)));
        assert_eq!((readings.memlock(), readings.rings()), (Some(2), 10));
    }

    #[test]
    fn refused_registrations_read_the_rings_now_and_then() {
        let mut readings = Readings::default();
        assert!(readings.begin(Rings::WhenOld).1, "never read");
        let begun = Instant::now() + Duration::from_secs(3600);
        readings.rings_begun = Some(begun);
        assert!(!readings.begin(Rings::WhenOld).1);
        assert!(readings.begin(Rings::Always).1);
        readings.rings_begun = Instant::now().checked_sub(RINGS_STAY);
        assert!(readings.begin(Rings::WhenOld).1);
    }
}
