//! Numbers that look random and follow from a seed.

/// A splitmix64 generator: the same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The generator of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is at least 1 (0 counts as 1).
    #[expect(clippy::cast_possible_truncation)] // the remainder is below a usize
    pub const fn below(&mut self, bound: usize) -> usize {
        let bound = if bound == 0 { 1 } else { bound };
        (self.next() % bound as u64) as usize
    }

    /// True in `percent` of 100 draws.
    pub const fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A generator of its own for another thread, drawn from this one.
    #[must_use]
    pub const fn split(&mut self) -> Self {
        Self::new(self.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix64() {
        // The first numbers of the published reference implementation for seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn draws_stay_below_their_bound() {
        let mut random = Random::new(1);
        let mut seen = [false; 7];
        for _ in 0..200 {
            seen[random.below(7)] = true;
        }
        assert_eq!(seen, [true; 7]);
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn chances_are_kept_at_both_ends() {
        let mut random = Random::new(2);
        assert!((0..100).all(|_| random.chance(100) && !random.chance(0)));
    }
}
