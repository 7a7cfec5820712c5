//! How many hits a thread had, and which of them are samples: in one addition.
//!
//! Admission asks how often a region was hit. Were each hit counted in its region, all threads that use one would write one
//! line; so a hit in 7.6 is, and that one is chosen by the counter of its thread, which advances by a step whose
//! multiples are spread over 2^64 as evenly as can be (Knuth, volume 3, 6.4): where it passes 2^64 is a sample. So of each
//! so many hits in a row about one is, and of every other one, or of every eighth, as well: a program that uses its buffers
//! in turn has samples of each.

use crate::sync::{AtomicU64, Ordering};

/// 2^64 divided by 7 and the golden ratio's fraction: of all numbers near, the one whose multiples are spread best. Odd, so that
/// multiples of it count.
const STEP: u64 = 2_421_457_307_876_441_737;
/// What [`STEP`] becomes 1 with: Newton's method, which doubles the bits that are right from the three of an odd number's own.
const INVERSE: u64 = {
    let mut inverse = STEP;
    let mut bits = 3;
    while bits < u64::BITS {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(STEP.wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse
};
const _: () = assert!(STEP.wrapping_mul(INVERSE) == 1);

/// The hits of one thread, which alone counts here; others read.
pub(crate) struct HitCount {
    /// As many steps, modulo 2^64.
    steps: AtomicU64,
}

impl HitCount {
    pub(crate) fn new() -> Self {
        Self { steps: AtomicU64::new(0) }
    }

    /// Counts a hit; whether it is a sample.
    #[inline(always)]
    pub(crate) fn count(&self) -> bool {
        // Relaxed, load and store: the owner alone writes, others only add it up.
        let (steps, is_sample) = self.steps.load(Ordering::Relaxed).overflowing_add(STEP);
        self.steps.store(steps, Ordering::Relaxed);
        is_sample
    }

    pub(crate) fn hits(&self) -> u64 {
        // Relaxed: a sum of counters is no more exact than the moment it is taken in.
        self.steps.load(Ordering::Relaxed).wrapping_mul(INVERSE)
    }
}

/// Whether the `nth` hit is a sample, where they are counted one by one.
pub(crate) const fn is_sample(nth: u64) -> bool {
    nth.wrapping_mul(STEP) < STEP
}

/// About how many hits there were for so many samples.
pub(crate) const fn hits_for(samples: u32) -> u64 {
    samples as u64 * 61 / 8
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn hits_are_counted_exactly() {
        let count = HitCount::new();
        for nth in 1..=1_000 {
            assert_eq!(count.count(), is_sample(nth));
            assert_eq!(count.hits(), nth);
        }
    }

    /// Of hits in a row, and of a few regions in turn, each has its part of the samples: to a third of 200 hits.
    #[test]
    fn samples_are_spread_whatever_the_order() {
        for turns in 1..=20 {
            for first in 0..turns {
                let samples = (0..200).filter(|turn| is_sample(first + turn * turns)).count();
                let hits = hits_for(u32::try_from(samples).unwrap());
                assert!((134..=266).contains(&hits), "{turns} in turn, {first}: {hits}");
            }
        }
    }
}
