//! The sender's program: what it does to its buffers and what it sends, the same for every strategy
//! and for every run with one seed.

/// How many buffers the program juggles.
pub(crate) const SLOTS: usize = 8;
/// The smallest message, in bytes.
pub(crate) const SMALLEST: usize = 4096;

/// Sixteen messages are sent from buffers that stay, then four from buffers that have changed.
const CYCLE: u64 = 20;
const STEADY: u64 = 16;

/// What happens to a buffer before it is filled and sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Freed and allocated anew.
    Reallocate,
    /// Grown or shrunk, perhaps elsewhere.
    Resize,
    /// New pages mapped over it.
    MapOver,
    /// Its pages discarded.
    Discard,
}

/// One message: from which buffer, and what happened to that before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    /// Which message of the program this is, from 0.
    pub(crate) number: u64,
    /// The buffer, below [`SLOTS`].
    pub(crate) slot: usize,
    /// What happens to the buffer first.
    pub(crate) change: Option<Change>,
    /// The buffer's length after that, and the message's, in bytes.
    pub(crate) length: usize,
    /// Where in the file the message's data begins.
    pub(crate) position: u64,
}

/// The program, as an endless sequence of steps.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    random: fastrand::Rng,
    classes: u32,
    lengths: [usize; SLOTS],
    number: u64,
}

impl Program {
    /// The program of `seed` with messages of [`SMALLEST`] to about `largest` bytes.
    pub(crate) fn new(seed: u64, largest: usize) -> Self {
        let classes = (largest / SMALLEST).max(1).ilog2() + 1;
        let mut random = fastrand::Rng::with_seed(seed);
        let lengths = std::array::from_fn(|_| length(&mut random, classes));
        Self { random, classes, lengths, number: 0 }
    }

    /// How long each buffer is before the first step.
    pub(crate) fn lengths(&self) -> [usize; SLOTS] {
        self.lengths
    }

    fn change(&mut self, slot: usize) -> Change {
        let change = match self.random.u32(..4) {
            0 => Change::Reallocate,
            1 => Change::Resize,
            2 => Change::MapOver,
            _ => Change::Discard,
        };
        let anew = match change {
            Change::Reallocate => self.random.bool(),
            Change::Resize => true,
            Change::MapOver | Change::Discard => false,
        };
        if anew {
            self.lengths[slot] = length(&mut self.random, self.classes);
        }
        change
    }
}

/// Powers of two, each as likely as any other.
fn length(random: &mut fastrand::Rng, classes: u32) -> usize {
    SMALLEST << random.u32(..classes)
}

impl Iterator for Program {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let slot = self.random.usize(..SLOTS);
        let change = (self.number % CYCLE >= STEADY).then(|| self.change(slot));
        let step = Step {
            number: self.number,
            slot,
            change,
            length: self.lengths[slot],
            position: self.random.u64(..),
        };
        self.number += 1;
        Some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_one_program() {
        let steps = |seed| Program::new(seed, 1 << 20).take(500).collect::<Vec<_>>();
        assert_eq!(steps(7), steps(7));
        assert_ne!(steps(7), steps(8));
    }

    #[test]
    fn lengths_change_only_with_their_buffer() {
        let program = Program::new(3, 1 << 22);
        let mut lengths = program.lengths();
        for step in program.take(2000) {
            if matches!(step.change, Some(Change::Reallocate | Change::Resize)) {
                lengths[step.slot] = step.length;
            }
            assert_eq!(lengths[step.slot], step.length);
            assert!((SMALLEST..=1 << 22).contains(&step.length));
        }
    }

    #[test]
    fn four_of_five_messages_come_from_buffers_that_stay() {
        let steady = Program::new(1, 4096).take(1000).filter(|step| step.change.is_none());
        assert_eq!(steady.count(), 800);
    }
}
