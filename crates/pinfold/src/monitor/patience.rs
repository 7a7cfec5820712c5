//! How to wait for something that is short as a rule.

use pinfold_kernel::thread;
use std::time::{Duration, Instant};

/// Spins, then lets other threads run, then sleeps: some 20 ms in all. Where the processors are busy each step takes longer,
/// and it is over after [`LONGEST`](Self::LONGEST) of them.
pub(super) struct Patience {
    steps: u32,
    /// When the spinning ended.
    began: Option<Instant>,
}

impl Patience {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 448;
    /// Together about 20 ms: the kernel adds half as much to each.
    const SLEEPS: u32 = 128;
    const SLEEP: Duration = Duration::from_micros(100);
    /// A thread whose change is seen by the kernel as under way may itself wait for a processor as long.
    const LONGEST: Duration = Duration::from_millis(250);

    pub(super) fn new() -> Self {
        Self { steps: 0, began: None }
    }

    pub(super) fn is_over(&self) -> bool {
        self.steps >= Self::SPINS + Self::YIELDS + Self::SLEEPS
            || self.began.is_some_and(|began| began.elapsed() >= Self::LONGEST)
    }

    pub(super) fn pause(&mut self) {
        const YIELDS_FROM: u32 = Patience::SPINS;
        const SLEEPS_FROM: u32 = Patience::SPINS + Patience::YIELDS;
        match self.steps {
            0..YIELDS_FROM => std::hint::spin_loop(),
            YIELDS_FROM..SLEEPS_FROM => thread::yield_now(),
            _ => thread::sleep(Self::SLEEP),
        }
        self.steps = self.steps.saturating_add(1);
        if self.steps == YIELDS_FROM {
            self.began = Some(Instant::now());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn it_is_over_by_steps_or_by_the_clock() {
        let mut patience = Patience::new();
        (0..Patience::SPINS).for_each(|_| patience.pause());
        assert!(patience.began.is_some() && patience.steps == Patience::SPINS);
        let began = Instant::now().checked_sub(Patience::LONGEST);
        assert!(Patience { steps: patience.steps, began }.is_over());
        assert!(!Patience { steps: patience.steps, began: Some(Instant::now()) }.is_over());
        while !patience.is_over() {
            patience.pause();
        }
        assert!(patience.steps <= Patience::SPINS + Patience::YIELDS + Patience::SLEEPS);
    }
}
