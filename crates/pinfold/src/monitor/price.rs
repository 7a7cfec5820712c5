//! What a watched `munmap` costs the thread that makes it beyond an unwatched one, measured here.
//!
//! A cache weighs it against what registering costs. Two pages of our own are unmapped, a watched one and
//! one that is not, when the monitor starts and then once for so many calls of `watch`: the reader
//! has to be woken for one of them, and how long that takes depends on what else the machine does.

use pinfold_core::LearnedCost;
use pinfold_kernel::{Errno, mapping::AtomicPage};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One call of `watch` in so many measures: some 50 microseconds each, one for each call.
const EACH: u32 = 64;
/// How often it is measured when the monitor starts.
const FIRST: usize = 3;

/// What a watched change costs more.
#[derive(Debug, Default)]
pub(super) struct ChangePrice {
    /// In nanoseconds.
    surcharge: AtomicU64,
    watches: AtomicU32,
    /// Guards the average; taken by one that measures, with nothing else held.
    learned: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    watched: LearnedCost,
    unwatched: LearnedCost,
}

impl ChangePrice {
    /// In nanoseconds.
    pub(super) fn surcharge(&self) -> u64 {
        // Relaxed: a hint that stands alone.
        self.surcharge.load(Ordering::Relaxed)
    }

    /// The monitor has started; `watched_page` makes a page that it watches.
    pub(super) fn measure_first<E>(&self, watched_page: impl Fn() -> Result<AtomicPage, E>) {
        (0..FIRST).for_each(|_| self.measure(&watched_page));
    }

    /// Something was watched: measures again now and then.
    pub(super) fn note_watch<E>(&self, watched_page: impl Fn() -> Result<AtomicPage, E>) {
        // Relaxed: a count.
        if self.watches.fetch_add(1, Ordering::Relaxed) % EACH == EACH - 1 {
            self.measure(&watched_page);
        }
    }

    /// Where no page is to be had, what was known stays.
    fn measure<E>(&self, watched_page: &impl Fn() -> Result<AtomicPage, E>) {
        let watched = unmapping(watched_page);
        let unwatched = unmapping(&AtomicPage::new as &dyn Fn() -> Result<AtomicPage, Errno>);
        let mut learned = self.learned.lock().unwrap_or_else(PoisonError::into_inner);
        let Learned { watched: with, unwatched: without } = &mut *learned;
        watched.into_iter().for_each(|took| with.observe(took));
        unwatched.into_iter().for_each(|took| without.observe(took));
        let known = with.nanoseconds().zip(without.nanoseconds());
        let surcharge = known.map_or(0, |(with, without)| with.saturating_sub(without));
        // Relaxed: as in `surcharge`.
        self.surcharge.store(surcharge, Ordering::Relaxed);
    }
}

/// How long it takes to unmap such a page after it was touched.
fn unmapping<E>(page: impl Fn() -> Result<AtomicPage, E>) -> Option<u64> {
    let page = page().ok()?;
    // Relaxed: our own page.
    page.word().store(1, Ordering::Relaxed);
    let began = Instant::now();
    drop(page);
    u64::try_from(began.elapsed().as_nanos()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn one_watch_in_so_many_measures() {
        let (price, made) = (ChangePrice::default(), Cell::new(0));
        let page = || {
            made.set(made.get() + 1);
            AtomicPage::new()
        };
        (0..3 * EACH).for_each(|_| price.note_watch(page));
        assert_eq!(made.get(), 3);
        price.measure_first(|| Err::<AtomicPage, _>(()));
    }
}
