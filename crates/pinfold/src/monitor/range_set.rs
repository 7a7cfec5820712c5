//! A bounded set of numbered ranges: one writer at a time, any number of readers, no lock, no allocation
//! after its making.
//!
//! Ranges that touch or overlap become one, which has the highest of their numbers. A full set
//! closes its smallest gap. So the set covers every range that was put in, in bounded memory, and
//! what it covers too much is as little as can be at each step: it lies in the smallest gaps, and
//! never outside of the ranges that were put in.
//!
//! # What a reader may believe
//!
//! *If [`insert`](RangeSet::insert) of a range happened before a look, and no insertion that happened
//! before the look declared the range's number over, the look finds the range covered.* An insertion
//! replaces places only by places that cover them and have no lower number, or drops places whose
//! numbers are over. The places are one text behind a sequence lock: a look that was disturbed is
//! repeated, and after some tries answers yes, so it never believes a mixture of two states.

use crate::AddressRange;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};
use pinfold_kernel::zeroed::zeros;
use std::ops::Range;

#[derive(Debug)]
pub(super) struct RangeSet {
    /// Odd while the places change.
    version: AtomicU64,
    /// How many places are filled.
    filled: AtomicUsize,
    /// In order of address; no two overlap or touch.
    places: Box<[Place]>,
}

/// Start, end and number.
type Place = [AtomicU64; 3];

/// What a place holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    start: usize,
    end: usize,
    /// The highest of the numbers that were put in here.
    number: u64,
}

/// How often a disturbed look is repeated. An insertion takes the writer a microsecond at most.
const TRIES: usize = if cfg!(loom) { 2 } else { 16 };

impl Entry {
    fn hull(self, other: Self) -> Self {
        Self {
            start: self.start.min(other.start),
            end: self.end.max(other.end),
            number: self.number.max(other.number),
        }
    }

    fn overlaps(self, range: AddressRange) -> bool {
        self.start < range.end() && range.start() < self.end
    }
}

impl RangeSet {
    /// An empty set that tells at least two and at most `capacity` ranges apart.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            version: AtomicU64::new(0),
            filled: AtomicUsize::new(0),
            places: zeros(capacity.max(2)),
        }
    }

    /// Puts `range` in, with a `number` that no earlier insertion exceeded. Numbers below `over` are
    /// over: what has none but those may be dropped.
    ///
    /// One thread at a time does this. Some ten nanoseconds, and one for each place behind it.
    pub(super) fn insert(&self, range: AddressRange, number: u64, over: u64) {
        // Relaxed, here and for all that the writer reads: no other thread writes it.
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Release fence: a thread that reads one of the words below, and then passes the acquire fence
        // in `look`, sees the odd version.
        fence(Ordering::Release);
        let mut entry = Entry { start: range.start(), end: range.end(), number };
        let crowded = |entry| self.touching(entry).is_empty() && self.is_full();
        if crowded(entry) {
            self.drop_what_is_over(over);
        }
        if crowded(entry) {
            entry = self.close_smallest_gap(entry);
        }
        let touching = self.touching(entry);
        let alive =
            touching.clone().map(|place| self.entry(place)).filter(|each| each.number >= over);
        // No two places touch, so what touches the hull touches the entry.
        self.replace(touching, alive.fold(entry, Entry::hull));
        // Release: a thread that reads this version reads the places as they are now.
        self.version.store(version + 2, Ordering::Release);
    }

    fn is_full(&self) -> bool {
        self.filled.load(Ordering::Relaxed) == self.places.len()
    }

    /// The places that overlap or touch `entry`.
    fn touching(&self, entry: Entry) -> Range<usize> {
        self.partition(|each| each.end < entry.start)
            ..self.partition(|each| each.start <= entry.end)
    }

    /// Puts `entry` in the place of `gone`.
    fn replace(&self, gone: Range<usize>, entry: Entry) {
        let filled = self.filled.load(Ordering::Relaxed);
        if gone.is_empty() {
            (gone.start..filled).rev().for_each(|place| self.set(place + 1, self.entry(place)));
        } else {
            let closed = gone.len() - 1;
            (gone.end..filled).for_each(|place| self.set(place - closed, self.entry(place)));
        }
        self.set(gone.start, entry);
        self.filled.store(filled + 1 - gone.len(), Ordering::Relaxed);
    }

    fn drop_what_is_over(&self, over: u64) {
        let mut kept = 0;
        for place in 0..self.filled.load(Ordering::Relaxed) {
            let entry = self.entry(place);
            if entry.number >= over {
                self.set(kept, entry);
                kept += 1;
            }
        }
        self.filled.store(kept, Ordering::Relaxed);
    }

    /// Makes room for `entry`: of two neighbours, `entry` included, the nearest become one. Gives
    /// what is to be put in then.
    fn close_smallest_gap(&self, entry: Entry) -> Entry {
        let filled = self.filled.load(Ordering::Relaxed);
        let place = self.first_behind(entry.start);
        let gap = |index: usize| self.entry(index + 1).start - self.entry(index).end;
        let own_gaps = [
            place.checked_sub(1).map(|below| (entry.start - self.entry(below).end, below)),
            (place < filled).then(|| (self.entry(place).start - entry.end, place)),
        ];
        let own = own_gaps.into_iter().flatten().min();
        let others = (0..filled - 1).filter(|&index| index + 1 != place);
        let other = others.map(|index| (gap(index), index)).min();
        match (own, other) {
            (Some((own, neighbour)), other) if other.is_none_or(|(gap, _)| own <= gap) => {
                let merged = entry.hull(self.entry(neighbour));
                self.remove(neighbour);
                merged
            }
            (_, Some((_, index))) => {
                self.set(index, self.entry(index).hull(self.entry(index + 1)));
                self.remove(index + 1);
                entry
            }
            // A full set has a place, so one of the two is there.
            _ => entry,
        }
    }

    fn remove(&self, place: usize) {
        let filled = self.filled.load(Ordering::Relaxed);
        (place + 1..filled).for_each(|index| self.set(index - 1, self.entry(index)));
        self.filled.store(filled - 1, Ordering::Relaxed);
    }

    /// Whether something of `range` is covered by a range whose number is not below `over`.
    ///
    /// Yes, too, if the writer was in the way all the time. Some ten nanoseconds.
    pub(super) fn overlaps(&self, range: AddressRange, over: u64) -> bool {
        let look = || {
            // A reader that is disturbed may find places out of order: the walk ends anyway, and
            // its result is thrown away.
            let first = self.first_ending_behind(range.start());
            let filled = self.filled.load(Ordering::Relaxed).min(self.places.len());
            (first..filled)
                .map(|index| self.entry(index))
                .take_while(|entry| entry.start < range.end())
                .any(|entry| entry.number >= over && entry.overlaps(range))
        };
        self.undisturbed(look).unwrap_or(true)
    }

    /// Whether one place covers all of `range`; for the writer.
    pub(super) fn covers(&self, range: AddressRange) -> bool {
        let entry = self.entry(self.first_ending_behind(range.start()));
        entry.start <= range.start() && range.end() <= entry.end
    }

    /// The ranges, in order of address; `None` if the writer was in the way all the time.
    pub(super) fn ranges(&self) -> Option<Vec<AddressRange>> {
        self.undisturbed(|| {
            let filled = self.filled.load(Ordering::Relaxed).min(self.places.len());
            let entries = (0..filled).map(|index| self.entry(index));
            entries.filter_map(|entry| AddressRange::between(entry.start, entry.end)).collect()
        })
    }

    /// What `look` finds at a moment at which nothing changes.
    fn undisturbed<T>(&self, look: impl Fn() -> T) -> Option<T> {
        (0..TRIES).find_map(|_| {
            // Acquire: the places read below are those of this version or newer ones.
            let before = self.version.load(Ordering::Acquire);
            if before % 2 == 1 {
                std::hint::spin_loop();
                return None;
            }
            let found = look();
            // Acquire fence: if any word was newer, the version below is too.
            fence(Ordering::Acquire);
            (self.version.load(Ordering::Relaxed) == before).then_some(found)
        })
    }

    /// The first place that begins behind `start`, or the number of those that are filled.
    fn first_behind(&self, start: usize) -> usize {
        self.partition(|entry| entry.start <= start)
    }

    /// The first place that ends behind `start`, or the number of those that are filled.
    fn first_ending_behind(&self, start: usize) -> usize {
        self.partition(|entry| entry.end <= start)
    }

    /// How many places, from the first on, are `before`: a binary search.
    fn partition(&self, before: impl Fn(Entry) -> bool) -> usize {
        let mut low = 0;
        // A reader that is disturbed may read any number.
        let mut high = self.filled.load(Ordering::Relaxed).min(self.places.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if before(self.entry(middle)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    fn entry(&self, index: usize) -> Entry {
        // Relaxed: ordered by the fences of `insert` and `undisturbed`.
        let [start, end, number] = self
            .places
            .get(index)
            .map_or([0; 3], |place| [0, 1, 2].map(|word| place[word].load(Ordering::Relaxed)));
        let [start, end] = [start, end].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        Entry { start, end, number }
    }

    fn set(&self, index: usize, entry: Entry) {
        let Some(place) = self.places.get(index) else { return };
        // Relaxed: as in `entry`.
        place[0].store(entry.start as u64, Ordering::Relaxed);
        place[1].store(entry.end as u64, Ordering::Relaxed);
        place[2].store(entry.number, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    const PAGE: usize = 4096;

    fn pages(first: usize, count: usize) -> AddressRange {
        AddressRange::new((first + 1) * PAGE, count * PAGE).unwrap()
    }

    /// All that was ever put in.
    #[derive(Default)]
    struct Naive(Vec<(AddressRange, u64)>);

    impl Naive {
        fn overlaps(&self, range: AddressRange, over: u64) -> bool {
            self.0.iter().any(|(each, number)| *number >= over && each.overlaps(&range))
        }

        /// From the first address that was put in to the last.
        fn hull(&self) -> Option<AddressRange> {
            let start = self.0.iter().map(|(range, _)| range.start()).min()?;
            let end = self.0.iter().map(|(range, _)| range.end()).max()?;
            AddressRange::between(start, end)
        }
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 >> 33).unwrap() % bound
        }
    }

    fn seed() -> u64 {
        let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        std::env::var("PINFOLD_SEED").map_or_else(
            |_| u64::from(time.subsec_nanos()) | 1,
            |text| text.parse().expect("PINFOLD_SEED is a number"),
        )
    }

    /// Inserts ranges and declares numbers over, at random, and compares every answer; there are
    /// `most` ranges at most.
    fn follow(most: usize, capacity: usize, spread: usize, random: &mut Random) {
        let (set, mut naive) = (RangeSet::new(capacity), Naive::default());
        let mut over = 0;
        for number in 0..if cfg!(miri) { 25 } else { 200_u64 } {
            let fresh = pages(random.below(spread), 1 + random.below(4));
            naive.0.push((fresh, number));
            set.insert(fresh, number, over);
            if random.below(8) == 0 {
                over = random.below(usize::try_from(number).unwrap() + 2) as u64;
                over = over.max(naive.0.first().map_or(0, |(_, number)| *number));
                naive.0.retain(|(_, number)| *number >= over);
            }
            check_order(&set);
            for _ in 0..32 {
                let asked = pages(random.below(spread + 16), 1 + random.below(8));
                let (ours, truth) = (set.overlaps(asked, over), naive.overlaps(asked, over));
                assert!(ours || !truth, "{asked:?} is covered by {set:?}");
                let inside = naive.hull().is_some_and(|hull| hull.overlaps(&asked));
                // What was declared over since the last insertion may stand in one place with
                // what was not.
                assert!(!ours || inside || over > 0, "{asked:?} lies outside of all");
                if most <= capacity && over == 0 {
                    assert_eq!(ours, truth, "nothing had to be merged, {asked:?}");
                }
            }
        }
    }

    fn check_order(set: &RangeSet) {
        let ranges = set.ranges().unwrap();
        assert!(ranges.is_sorted_by(|one, next| one.end() < next.start()), "{ranges:?}");
    }

    #[test]
    fn everything_that_was_put_in_is_covered() {
        let seed = seed();
        println!("seed {seed}");
        let random = &mut Random(seed);
        for _ in 0..if cfg!(miri) { 1 } else { 8 } {
            // Never more than 200 ranges at a time.
            follow(200, 256, 4_000, random);
            follow(200, 8, 4_000, random);
            follow(200, 2, 64, random);
        }
    }

    #[test]
    fn neighbours_are_one() {
        let set = RangeSet::new(4);
        for (number, first) in [1, 3, 2, 5, 0, 7, 6].into_iter().enumerate() {
            set.insert(pages(first, 1), number as u64, 0);
        }
        assert_eq!(set.ranges().unwrap(), [pages(0, 4), pages(5, 3)]);
        assert!(set.overlaps(pages(5, 1), 6) && !set.overlaps(pages(3, 2), 6));
    }

    #[test]
    fn a_full_set_closes_its_smallest_gap() {
        let set = RangeSet::new(3);
        for (number, first) in [0, 10, 30].into_iter().enumerate() {
            set.insert(pages(first, 1), number as u64, 0);
        }
        // Between the first two; then the new one and the last.
        set.insert(pages(100, 1), 3, 0);
        assert_eq!(set.ranges().unwrap(), [pages(0, 11), pages(30, 1), pages(100, 1)]);
        set.insert(pages(90, 1), 4, 0);
        assert_eq!(set.ranges().unwrap(), [pages(0, 11), pages(30, 1), pages(90, 11)]);
        set.insert(pages(20, 1), 5, 0);
        assert_eq!(set.ranges().unwrap(), [pages(0, 21), pages(30, 1), pages(90, 11)]);
    }

    #[test]
    fn what_is_over_makes_room() {
        let set = RangeSet::new(2);
        set.insert(pages(0, 1), 0, 0);
        set.insert(pages(10, 1), 1, 0);
        assert!(!set.overlaps(pages(0, 1), 1), "over for the caller that says so");
        assert!(set.covers(pages(0, 1)) && !set.covers(pages(0, 2)) && !set.covers(pages(30, 1)));
        set.insert(pages(20, 1), 2, 1);
        assert_eq!(set.ranges().unwrap(), [pages(10, 1), pages(20, 1)]);
        set.insert(pages(21, 1), 3, 3);
        assert_eq!(set.ranges().unwrap(), [pages(10, 1), pages(21, 1)], "the neighbour was over");
    }

    /// The reader asks for a range whose insertion it knows of.
    #[test]
    fn a_look_during_a_write_misses_nothing() {
        const SPREAD: u64 = 3_001;
        // How many, and how many of the last are not over.
        const COUNTS: (u64, u64) = if cfg!(miri) { (80, 20) } else { (50_000, 1_000) };
        let page = |number: u64| pages(usize::try_from(number * 7 % SPREAD).unwrap() * 2, 1);
        let (set, known, done) = (RangeSet::new(64), AtomicU64::new(0), AtomicBool::new(false));
        set.insert(page(0), 0, 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..COUNTS.0 {
                    set.insert(page(number), number, number.saturating_sub(COUNTS.1));
                    known.store(number, Ordering::Release);
                }
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                let number = known.load(Ordering::Acquire);
                assert!(set.overlaps(page(number), number), "number {number}");
            }
        });
        assert!(!set.overlaps(pages(1 << 20, 1), 0), "nothing is there");
    }
}
