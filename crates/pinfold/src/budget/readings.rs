//! What was found of the limits that change, where several threads read them at the same time.

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
    memlock: Reading,
    rings: Reading,
    /// When the last reading of the rings began.
    rings_begun: Option<Instant>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Reading {
    number: u64,
    bytes: Option<u64>,
}

impl Reading {
    /// What could not be read stays as it was.
    fn note(&mut self, number: u64, bytes: Option<u64>) {
        if bytes.is_some() && number > self.number {
            *self = Self { number, bytes };
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

    /// Notes what reading `number` found, in bytes.
    pub(super) fn note(&mut self, number: u64, memlock: Option<u64>, rings: Option<u64>) {
        self.memlock.note(number, memlock);
        self.rings.note(number, rings);
    }

    /// What the kernel lets the process pin, in bytes. `None` if it cannot be known.
    pub(super) fn memlock(&self) -> Option<u64> {
        self.memlock.bytes
    }

    /// What the rings take of it, in bytes.
    pub(super) fn rings(&self) -> u64 {
        self.rings.bytes.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_before_a_change_does_not_overwrite_what_was_found_behind_it() {
        let mut readings = Readings::default();
        let (before, _) = readings.begin(Rings::Always);
        let (behind, _) = readings.begin(Rings::Always);
        readings.note(behind, Some(2), Some(20));
        readings.note(before, Some(1), Some(10));
        assert_eq!((readings.memlock(), readings.rings()), (Some(2), 20));
        let (last, _) = readings.begin(Rings::WhenOld);
        readings.note(last, None, None);
        assert_eq!((readings.memlock(), readings.rings()), (Some(2), 20), "not read");
    }

    /// What is slow may come in behind what is quick.
    #[test]
    fn rings_count_although_a_later_reading_without_them_has_been_noted() {
        let mut readings = Readings::default();
        let (slow, _) = readings.begin(Rings::Always);
        let (quick, _) = readings.begin(Rings::WhenOld);
        readings.note(quick, Some(2), None);
        readings.note(slow, Some(1), Some(10));
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
