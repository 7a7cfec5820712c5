//! Memory of which registrations could not be kept, so that a planner does not ask for it each time.
//!
//! The table has a fixed size, and two ranges that meet in one place forget each other. Nothing here is
//! more than a hint: whatever it says, a transfer moves the right bytes.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many starts are remembered: 8 KiB.
const PLACES: usize = 1024;

/// Starts of ranges whose registrations were not kept.
pub(super) struct Refused {
    /// A start each, or [`FREE`].
    places: Box<[AtomicUsize]>,
}

/// No range starts there.
const FREE: usize = usize::MAX;

impl Refused {
    pub(super) fn new() -> Self {
        Self { places: (0..PLACES).map(|_| AtomicUsize::new(FREE)).collect() }
    }

    /// Whether it was noted last of `start` that nothing was kept.
    pub(super) fn has(&self, start: usize) -> bool {
        // Relaxed, here and in `note`: a word that stands alone, and is a hint.
        self.place(start).load(Ordering::Relaxed) == start
    }

    /// Notes whether a registration was refused to be kept.
    pub(super) fn note(&self, start: usize, refused: bool) {
        // Stored only if it says something new, so that steady use of one buffer by several threads
        // writes no line that they share.
        if self.has(start) != refused {
            self.place(start).store(if refused { start } else { FREE }, Ordering::Relaxed);
        }
    }

    fn place(&self, start: usize) -> &AtomicUsize {
        // Multiplied by 2^64 divided by the golden ratio: neighbours spread over the whole table.
        let spread = (start as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The shift leaves less than the table is long.
        #[allow(clippy::cast_possible_truncation)]
        let place = (spread >> (64 - PLACES.ilog2())) as usize;
        &self.places[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_of_its_own_start_alone() {
        let refused = Refused::new();
        refused.note(0x1000, true);
        assert!(refused.has(0x1000));
        // More addresses than places: none is ever taken for another.
        assert!((0x2000..0x2000 + 4096 * 4096).step_by(4096).all(|start| !refused.has(start)));
        refused.note(0x1000, false);
        assert!(!refused.has(0x1000));
    }

    #[test]
    fn the_last_to_come_has_the_place() {
        let refused = Refused::new();
        let starts: Vec<usize> =
            (1..if cfg!(miri) { 2_000 } else { 10_000 }).map(|n| n * 4096).collect();
        starts.iter().for_each(|&start| refused.note(start, true));
        let kept = starts.iter().filter(|&&start| refused.has(start)).count();
        assert!((1..=PLACES).contains(&kept), "{kept}");
        // Of one that has lost its place nothing is taken back.
        let lost = *starts.iter().find(|&&start| !refused.has(start)).unwrap();
        refused.note(lost, false);
        assert_eq!(starts.iter().filter(|&&start| refused.has(start)).count(), kept);
    }
}
