//! Marks that a log's writers set: whether a range has changed, known however long afterwards it is asked, and
//! however many entries of the log were overwritten since.
//!
//! Any number of writers and of threads that ask; no lock, no allocation, also in signal handlers. A *place* stands for one
//! range from [`begin`](ChangeMarks::begin) until its [`RangeMark`] is dropped. A writer that logs a change
//! [sets](ChangeMarks::set) the mark of every range that it touches: one load as long as no range has a mark.
//!
//! # What may be believed
//!
//! 1. **A mark is set when a change was logged after `begin` had returned.** The thread that logs it comes after the store of
//!    the place's state, so it finds that state, or the set mark: only the mark's owner ends it.
//! 2. **A mark is set by no change that was logged completely before `begin`.** A writer that read a place's words
//!    while the place belonged to another range fails in its exchange: the state counts the ranges that had the place, and
//!    is exchanged only as it was before the words were read.
//!
//! The layout is `#[repr(C)]`, because two copies of this code may share one table.

use crate::AddressRange;
use crate::monitor::ChangeMark;
use crate::standing::{SET, STANDS, StandingRange, freed};
use crate::sync::{AtomicU64, Ordering};

/// Room for `MARKS` ranges at a time.
#[repr(C)]
#[derive(Debug)]
pub struct ChangeMarks<const MARKS: usize> {
    /// How many places from the first one on were ever in use: the others are not looked at.
    used: AtomicU64,
    places: [StandingRange; MARKS],
}

/// Whether a range has changed since [`ChangeMarks::begin`] gave this.
#[derive(Debug)]
pub struct RangeMark<'t> {
    place: &'t StandingRange,
    /// As long as nothing was set.
    stands: u64,
}

impl<const MARKS: usize> ChangeMarks<MARKS> {
    /// No range has a mark; also in a `static`.
    #[cfg(not(any(loom, shuttle)))]
    pub const fn new() -> Self {
        Self { used: AtomicU64::new(0), places: [const { StandingRange::new() }; MARKS] }
    }

    /// The atomics of a model cannot be made at compile time.
    #[cfg(any(loom, shuttle))]
    pub fn new() -> Self {
        let places = std::array::from_fn(|_| StandingRange::new());
        Self { used: AtomicU64::new(0), places }
    }

    /// From now on changes of `range` are marked. `None` if no place is free.
    pub fn begin(&self, range: AddressRange) -> Option<RangeMark<'_>> {
        self.places.iter().zip(1..).find_map(|(place, count)| {
            // Release: it comes before the state, so a writer that comes after `begin` finds both. A place that is in use
            // was counted before.
            self.used.fetch_max(count, Ordering::Release);
            place.stand(range).map(|stands| RangeMark { place, stands })
        })
    }

    /// `change` is logged. To be called before a reader of the log can know of the entry.
    #[inline]
    pub fn set(&self, change: AddressRange) {
        // Acquire: pairs with `begin`.
        let used = usize::try_from(self.used.load(Ordering::Acquire)).unwrap_or(MARKS);
        self.places.iter().take(used).for_each(|place| mark(place, change));
    }

    /// No range has a mark any more; what is asked of one says that its range has changed.
    ///
    /// For a forked child, where the threads do not exist whose marks these are.
    pub fn forget_all(&self) {
        self.places.iter().for_each(StandingRange::forget);
    }
}

impl<const MARKS: usize> Default for ChangeMarks<MARKS> {
    fn default() -> Self {
        Self::new()
    }
}

fn mark(place: &StandingRange, change: AddressRange) {
    let Some((before, Some(range))) = place.look() else { return };
    if range.overlaps(&change) {
        // Release: a thread that finds it set finds what came before the change. Where it fails, another writer
        // has set it, or the range has its mark no more.
        let set = before - STANDS + SET;
        let _done = place.state.compare_exchange(before, set, Ordering::Release, Ordering::Relaxed);
    }
}

impl ChangeMark for RangeMark<'_> {
    fn is_set(&self) -> bool {
        // Acquire: pairs with `mark`. Any other state than its own: it was set, or a forked child has forgotten it.
        self.place.state.load(Ordering::Acquire) != self.stands
    }
}

impl Drop for RangeMark<'_> {
    fn drop(&mut self) {
        // A forked child may have forgotten it, and the place may be another range's since. Release, both: the next range's
        // words come after what was read here. Relaxed: what is found says only whose it is.
        let (state, free) = (&self.place.state, freed(self.stands));
        let was = state.compare_exchange(self.stands, free, Ordering::Release, Ordering::Relaxed);
        if was == Err(self.stands - STANDS + SET) {
            // No writer changes what is set.
            state.store(free, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn page(number: usize) -> AddressRange {
        AddressRange::new((number + 1) << 12, 4096).unwrap()
    }

    #[test]
    fn a_range_is_marked_by_what_touches_it_since_it_began() {
        let marks = ChangeMarks::<4>::new();
        marks.set(page(1));
        let [first, second] = [1, 2].map(|number| marks.begin(page(number)).unwrap());
        marks.set(page(0));
        assert_eq!([first.is_set(), second.is_set()], [false; 2]);
        marks.set(page(2));
        assert_eq!([first.is_set(), second.is_set()], [false, true]);
        marks.set(AddressRange::EVERYTHING);
        assert_eq!([first.is_set(), second.is_set()], [true; 2]);
    }

    #[test]
    fn a_place_that_is_used_again_knows_nothing_of_its_last_range() {
        let marks = ChangeMarks::<1>::new();
        let unset = marks.begin(page(1)).unwrap();
        assert!(marks.begin(page(2)).is_none(), "all are in use");
        drop(unset);
        let set = marks.begin(page(1)).unwrap();
        marks.set(page(1));
        assert!(set.is_set());
        drop(set);
        let last = marks.begin(page(2)).unwrap();
        assert!(!last.is_set());
        marks.set(page(1));
        assert!(!last.is_set());
    }

    #[test]
    fn a_mark_that_was_forgotten_ends_no_other() {
        let marks = ChangeMarks::<1>::new();
        let parents = marks.begin(page(1)).unwrap();
        marks.forget_all();
        let childs = marks.begin(page(2)).unwrap();
        assert!(parents.is_set() && !childs.is_set());
        drop(parents);
        assert!(marks.begin(page(3)).is_none() && !childs.is_set());
        marks.set(page(2));
        assert!(childs.is_set());
    }

    /// A thread that waits for it goes on when this is dropped, also by a panic.
    struct Over<'t>(&'t AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A writer goes on with one page while the place changes between that page and another: a mark of the other is set
    /// by nothing, one of the page by every change that was made while it stood.
    #[test]
    fn a_writer_marks_no_range_that_it_did_not_change() {
        const TURNS: usize = if cfg!(miri) { 200 } else { 100_000 };
        let marks = ChangeMarks::<1>::new();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    marks.set(page(1));
                    thread::yield_now();
                }
            });
            let _over = Over(&over);
            for _ in 0..TURNS {
                drop(marks.begin(page(1)).unwrap());
                let other = marks.begin(page(5)).unwrap();
                assert!(!other.is_set());
                drop(other);
                let own = marks.begin(page(1)).unwrap();
                marks.set(page(1));
                assert!(own.is_set());
            }
        });
    }
}
