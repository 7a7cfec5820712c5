//! Which region is evicted first, at no cost to a hit.
//!
//! A hit only notes the cache's tick in its region, and the tick advances with every miss. All
//! else is done by threads that need room, which look whether a region's tick is still the one that
//! was noted when it was last looked at.
//!
//! Regions come into a short list, the small one, at most a tenth of all. A region that has been
//! used again by the time it reaches the end of that list goes on to the main list; one that has
//! not is evicted, and the place where it began is remembered for as long as a cacheful of others
//! takes to follow. A region registered again in that time goes to the main list at once. The main
//! list is evicted in the order in which regions came to it, except that one used since goes to its
//! end. So a scan passes through the small list and leaves the main list alone; and when a program
//! turns to other memory, that memory is in the main list by its second round, and what was there
//! before ages out.
//!
//! This is S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO queues are all you need for cache
//! eviction, SOSP 2023), whose small queue and ghosts go back to 2Q (Johnson and Shasha,
//! VLDB 1994), with ticks where it counts uses. Two differences: the search for an unused region is
//! bounded, and ends with the least recently used of those it met; and every evicted region leaves
//! a ghost, whichever list it was in.

use crate::chunked::Chunked;
use crate::hazard::Unpublished;
use crate::region::{List, Lists, Region};

/// Regions that begin in one page of 4 KiB leave the same ghost.
const PAGE_LOG2: u32 = 12;

/// The small list holds at least one in so many, when the cache is full.
const SMALL_SHARE: usize = 10;
/// How many regions are looked at for one that was not used since.
const LOOKS: usize = 64;

/// The order of eviction, over the small and the main list.
pub(crate) struct Order {
    ghosts: Ghosts,
    /// How many may be small, beyond their least share.
    more_small: usize,
}

impl Order {
    pub(crate) fn new() -> Self {
        Self { ghosts: Ghosts::default(), more_small: 0 }
    }

    /// A region joins, just registered: hits find it from now on, unless it is to be `closed`.
    pub(crate) fn join<H: Copy>(&mut self, lists: &mut Lists, region: &Region<H>, closed: bool) {
        let ghost = self.ghosts.find(page_of(region));
        match ghost {
            Some(Ghost::Small) => self.more_small += self.ghosts.weight(Ghost::Small),
            Some(Ghost::Main) => {
                let less = self.ghosts.weight(Ghost::Main);
                self.more_small = self.more_small.saturating_sub(less);
            }
            None => {}
        }
        region.set_mark(region.used());
        lists.publish(region, ghost.is_some(), closed);
    }

    /// A region turned out to be in use at `tick`.
    pub(crate) fn keep<H: Copy>(lists: &mut Lists, region: &Region<H>, tick: u64) {
        region.set_mark(tick);
        lists.promote(region);
    }

    /// Takes out the region to be given up next, for a scan; `place` finds a region by its number. Adds to
    /// `looks` how many it looks at.
    pub(crate) fn pop<'c, H: Copy>(
        &mut self,
        lists: &mut Lists,
        looks: &mut usize,
        place: impl Fn(u32) -> Option<&'c Region<H>>,
    ) -> Option<Unpublished<'c, Region<H>>> {
        let mut oldest: Option<(&'c Region<H>, u64)> = None;
        for _ in 0..LOOKS {
            *looks += 1;
            let Some(region) = self.next(lists).and_then(&place) else { break };
            let used = region.used();
            if region.mark() == used {
                return self.take(lists, region);
            }
            Self::keep(lists, region, used);
            if oldest.is_none_or(|(_, other)| used < other) {
                oldest = Some((region, used));
            }
        }
        let (region, _) = oldest?;
        self.take(lists, region)
    }

    /// Takes out a region, and leaves its ghost.
    fn take<'c, H: Copy>(
        &mut self,
        lists: &mut Lists,
        region: &'c Region<H>,
    ) -> Option<Unpublished<'c, Region<H>>> {
        let small = region.state().list() == Some(List::Small);
        let ghost = if small { Ghost::Small } else { Ghost::Main };
        self.ghosts.add(page_of(region), ghost, in_order(lists));
        lists.examine(region)
    }

    /// The region that is looked at next.
    fn next(&mut self, lists: &Lists) -> Option<u32> {
        let (small, all) = (lists.len(List::Small), in_order(lists));
        let least = (all / SMALL_SHARE).max(1);
        self.more_small = self.more_small.min(all.saturating_sub(2 * least));
        let list =
            if small > least + self.more_small || small == all { List::Small } else { List::Main };
        lists.first(list)
    }
}

/// The page where a region begins.
fn page_of<H: Copy>(region: &Region<H>) -> usize {
    region.range().map_or(0, |range| range.start() >> PAGE_LOG2)
}

fn in_order(lists: &Lists) -> usize {
    lists.len(List::Small) + lists.len(List::Main)
}

/// Where an evicted region stood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ghost {
    Small,
    Main,
}

/// Where evicted regions began: as many as the cache holds regions, the oldest forgotten first.
///
/// A table of words in sets of four, each word a part of a hash and the time, in eighths of the
/// table's length, at which it was put there. It may take one region for another, once in a
/// million, or forget one too early; either costs a registration at most.
///
/// Made where something is put there, and longer when there are more regions: the lock is held. What was there before
/// stays, in sets that are its own still or where it is taken for nothing else, and counts as old.
#[derive(Default)]
struct Ghosts {
    sets: Chunked<[u32; WAYS]>,
    /// How many words it has, or would have.
    length: usize,
    /// How many were ever added.
    added: usize,
    /// How many of late were small and main, by [`Ghost`].
    of_late: [usize; 2],
}

/// Words in a set.
const WAYS: usize = 4;
/// Parts of a table's length in which time is told.
const EPOCHS: usize = 8;
/// 2^64 divided by the golden ratio: neighbouring pages spread evenly (Knuth, volume 3, 6.4).
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The bits of a word: a hash, whether there is one, where the region stood, and the epoch.
const HASH: u32 = !0x3ff;
const OCCUPIED: u32 = 1 << 9;
const MAIN: u32 = 1 << 8;

impl Ghosts {
    fn add(&mut self, page: usize, ghost: Ghost, regions: usize) {
        if self.length < regions.max(WAYS) {
            self.length = regions.max(WAYS).next_power_of_two();
        }
        self.added += 1;
        self.of_late[ghost as usize] += 1;
        if self.of_late[0] + self.of_late[1] > self.length {
            self.of_late = self.of_late.map(|count| count / 2);
        }
        let epoch = self.epoch();
        let main = if ghost == Ghost::Main { MAIN } else { 0 };
        let word = Self::hash_of(page) | main | epoch;
        let set = self.sets.made(self.set_of(page), || [0; WAYS]);
        let oldest = set.iter_mut().max_by_key(|word| age(epoch, **word));
        if let Some(oldest) = oldest {
            *oldest = word;
        }
    }

    fn find(&self, page: usize) -> Option<Ghost> {
        let (hash, epoch) = (Self::hash_of(page), self.epoch());
        let mut words = self.sets.get(self.set_of(page))?.iter();
        let word = words.find(|&&word| {
            word & (HASH | OCCUPIED) == hash && usize::from(age(epoch, word)) <= EPOCHS
        })?;
        Some(if word & MAIN == 0 { Ghost::Small } else { Ghost::Main })
    }

    /// What finding one of these tells, next to one of the others: the more the rarer they are.
    fn weight(&self, ghost: Ghost) -> usize {
        let these = self.of_late[ghost as usize];
        let all = self.of_late[0] + self.of_late[1];
        ((all - these) / these.max(1)).max(1)
    }

    /// The time, from 0 to 255 and round again.
    #[allow(clippy::cast_possible_truncation)] // that is the point
    fn epoch(&self) -> u32 {
        let length = (self.length / EPOCHS).max(1);
        u32::from((self.added / length) as u8)
    }

    /// 22 bits of a page's hash, in the high bits of a word, and a bit that makes it no empty one.
    ///
    /// None of them is one of the bits that chose the set, which are the same for all its pages.
    #[allow(clippy::cast_possible_truncation)] // that is the point
    fn hash_of(page: usize) -> u32 {
        let hash = (page as u64).wrapping_mul(SPREAD);
        hash as u32 & HASH | OCCUPIED
    }

    /// A page's set.
    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    fn set_of(&self, page: usize) -> usize {
        let hash = (page as u64).wrapping_mul(SPREAD);
        (hash >> 32) as usize % (self.length / WAYS).max(1)
    }
}

/// How many epochs ago `word` was written; an empty one, forever.
#[allow(clippy::cast_possible_truncation)] // the low byte is the epoch
const fn age(epoch: u32, word: u32) -> u8 {
    if word == 0 { u8::MAX } else { (epoch as u8).wrapping_sub(word as u8) }
}

#[cfg(test)]
#[cfg(not(loom))]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // traces round as they like
mod tests {
    use super::*;
    use crate::AddressRange;
    use crate::barrier::Barriers;
    use crate::hazard::{Hazards, Scanned};
    use std::collections::HashMap;

    /// Pages are asked for one by one; a cache says whether it had them.
    trait Simulated {
        fn get(&mut self, page: usize) -> bool;
    }

    /// The order under test, around a cache that does nothing but count.
    struct Ours {
        order: Order,
        lists: Lists,
        places: HashMap<usize, u32>,
        regions: Vec<Region<()>>,
        free: Vec<u32>,
        tick: u64,
    }

    impl Ours {
        fn new(capacity: usize) -> Self {
            let mut lists = Lists::new();
            (0..u32::try_from(capacity).unwrap()).for_each(|number| lists.make(number));
            Self {
                order: Order::new(),
                lists,
                places: HashMap::new(),
                regions: (0..u32::try_from(capacity).unwrap()).map(Region::new).collect(),
                free: (0..u32::try_from(capacity).unwrap()).collect(),
                tick: 0,
            }
        }

        fn make_room(&mut self) {
            let regions = &self.regions;
            let place = |number: u32| regions.get(number as usize);
            let examined = self.order.pop(&mut self.lists, &mut 0, place).unwrap();
            let mut victim = None;
            let scan = Hazards::new(Barriers::SYMMETRIC).scan(&[], vec![examined]);
            scan.split(1).0.settle(|found| {
                let Scanned::Idle(idle) = found else { panic!("it has no lease") };
                victim = Some(idle.item());
                self.lists.make_evictable(idle);
            });
            let victim = victim.unwrap();
            let gone = self.lists.deregister(Lists::evictable(victim).unwrap());
            self.lists.free(gone);
            self.places.remove(&page_of(victim));
            self.free.push(victim.number);
        }
    }

    impl Simulated for Ours {
        fn get(&mut self, page: usize) -> bool {
            // Nothing is mapped at address 0.
            let page = page + 1;
            if let Some(&place) = self.places.get(&page) {
                self.regions[place as usize].touch(self.tick);
                return true;
            }
            if self.free.is_empty() {
                self.make_room();
            }
            self.tick += 1;
            let place = self.free.pop().unwrap();
            self.places.insert(page, place);
            let region = &self.regions[place as usize];
            region.put_for_test(AddressRange::new(page << PAGE_LOG2, 4096).unwrap(), self.tick);
            self.order.join(&mut self.lists, region, false);
            false
        }
    }

    /// The naive model: a list in order of use.
    struct LeastRecentlyUsed {
        capacity: usize,
        when: HashMap<usize, u64>,
        order: std::collections::BTreeMap<u64, usize>,
        now: u64,
    }

    impl LeastRecentlyUsed {
        fn new(capacity: usize) -> Self {
            Self { capacity, when: HashMap::new(), order: Default::default(), now: 0 }
        }
    }

    impl Simulated for LeastRecentlyUsed {
        fn get(&mut self, page: usize) -> bool {
            self.now += 1;
            let before = self.when.insert(page, self.now);
            if let Some(before) = before {
                self.order.remove(&before);
            } else if self.when.len() > self.capacity {
                let (_, oldest) = self.order.pop_first().unwrap();
                self.when.remove(&oldest);
            }
            self.order.insert(self.now, page);
            before.is_some()
        }
    }

    /// Numbers from a seed.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            (self.unit() * bound as f64) as usize
        }

        fn unit(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// A rank by Zipf's law, by inversion of the continuous one.
        fn zipf(&mut self, count: usize, exponent: f64) -> usize {
            let power = 1.0 - exponent;
            let most = (count as f64).powf(power);
            let rank = (1.0 + self.unit() * (most - 1.0)).powf(1.0 / power);
            (rank as usize).min(count) - 1
        }
    }

    const CAPACITY: usize = 1000;

    /// The share of hits on `trace`, ours and the model's.
    fn shares(trace: &[usize]) -> (f64, f64) {
        let share = |cache: &mut dyn Simulated| {
            trace.iter().filter(|&&page| cache.get(page)).count() as f64 / trace.len() as f64
        };
        let shares =
            (share(&mut Ours::new(CAPACITY)), share(&mut LeastRecentlyUsed::new(CAPACITY)));
        println!("ours {:.4}, least recently used {:.4}", shares.0, shares.1);
        shares
    }

    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn popular_pages_stay() {
        let mut random = Random(1);
        for exponent in [0.6, 0.8, 0.99, 1.2] {
            let trace: Vec<usize> =
                (0..200 * CAPACITY).map(|_| random.zipf(10 * CAPACITY, exponent)).collect();
            let (ours, theirs) = shares(&trace);
            assert!(ours >= theirs, "exponent {exponent}");
        }
    }

    /// Every next page is one used a short while ago, in terms of other pages: what least recent
    /// use is best at, because nothing else tells one page from another.
    fn by_recency(random: &mut Random, mean_depth: f64, length: usize) -> Vec<usize> {
        let (mut stack, mut fresh) = (std::collections::VecDeque::new(), 0);
        let mut trace = Vec::with_capacity(length);
        for _ in 0..length {
            let depth = (-mean_depth * (1.0 - random.unit()).ln()) as usize;
            let page = stack.remove(depth).unwrap_or_else(|| {
                fresh += 1;
                fresh
            });
            stack.push_front(page);
            trace.push(page);
        }
        trace
    }

    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn what_was_used_recently_stays() {
        let mut random = Random(2);
        for share in [0.2, 0.5, 1.0, 2.0] {
            let trace = by_recency(&mut random, share * CAPACITY as f64, 50 * CAPACITY);
            let (ours, theirs) = shares(&trace);
            assert!(ours >= theirs - 0.03, "mean depth {share} of the capacity");
        }
    }

    /// A working set that slides slowly: each page is used a number of times while the window is
    /// on it and never again.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn a_sliding_working_set_stays() {
        let mut random = Random(3);
        for share in [0.3, 0.6, 0.9] {
            let window = (share * CAPACITY as f64) as usize;
            let trace: Vec<usize> =
                (0..50 * CAPACITY).map(|step| step / 8 + random.below(window)).collect();
            let (ours, theirs) = shares(&trace);
            assert!(ours >= theirs - 0.03, "a window of {share} of the capacity");
        }
    }

    /// A working set of half the capacity, interrupted by scans of three times the capacity.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn a_scan_does_not_wipe_the_working_set() {
        let mut random = Random(4);
        let mut ours = Ours::new(CAPACITY);
        let working = CAPACITY / 2;
        for _ in 0..10 * CAPACITY {
            ours.get(random.below(working));
        }
        // The scan of never-again pages, and the working set is not used meanwhile.
        for page in 0..3 * CAPACITY {
            assert!(!ours.get(1_000_000 + page));
        }
        let kept = (0..working).filter(|page| ours.places.contains_key(page)).count();
        println!("{kept} of {working} kept");
        assert!(kept >= working * 9 / 10, "{kept} of {working}");
    }

    /// Another working set takes over: by its third round all of it is there.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn a_change_of_phase_is_followed() {
        let mut ours = Ours::new(CAPACITY);
        let working = CAPACITY * 8 / 10;
        for phase in 0..4 {
            let mut rounds: Vec<usize> = Vec::new();
            for _ in 0..5 {
                let pages = phase * CAPACITY..phase * CAPACITY + working;
                rounds.push(pages.filter(|&page| ours.get(page)).count());
            }
            println!("{rounds:?} of {working}");
            assert!(rounds[3] >= working * 95 / 100, "phase {phase}: {rounds:?} of {working}");
        }
    }

    /// A mark keeps 28 bits of a tick: going past them changes nothing.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn marks_go_round() {
        let mut random = Random(5);
        let trace: Vec<usize> =
            (0..20 * CAPACITY).map(|_| random.zipf(4 * CAPACITY, 0.9)).collect();
        let hits = |first_tick: u64| {
            let mut ours = Ours { tick: first_tick, ..Ours::new(CAPACITY) };
            trace.iter().filter(|&&page| ours.get(page)).count()
        };
        assert_eq!(hits(0), hits((1 << 28) - 5 * CAPACITY as u64));
    }

    /// A loop slightly larger than the cache, on which least recent use never hits.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn a_loop_larger_than_the_cache_is_kept_in_part() {
        let trace: Vec<usize> =
            (0..50 * CAPACITY).map(|step| step % (CAPACITY * 12 / 10)).collect();
        let (ours, theirs) = shares(&trace);
        assert!(ours >= theirs);
    }

    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn ghosts_are_as_many_as_the_cache_holds_and_no_more() {
        let mut ghosts = Ghosts::default();
        // Often enough that the epochs' byte goes round.
        (0..100_000).for_each(|page| ghosts.add(page, Ghost::Small, 1000));
        assert_eq!(ghosts.length, 1024);
        let known = (99_500..100_000).filter(|&page| ghosts.find(page).is_some()).count();
        assert!(known > 400, "{known} of the last 500");
        assert!((0..98_000).all(|page| ghosts.find(page).is_none()));
    }

    /// As seldom as the table says, also where there are many sets.
    #[test]
    #[cfg_attr(miri, ignore = "long traces, and nothing unsafe")]
    fn one_region_is_rarely_taken_for_another() {
        const REGIONS: usize = 1 << 14;
        let (mut random, mut ghosts) = (Random(6), Ghosts::default());
        let mut page = |half: usize| 2 * random.below(1 << 35) + half;
        (0..REGIONS).for_each(|_| ghosts.add(page(0), Ghost::Small, REGIONS));
        let mistaken = (0..1_000_000).filter(|_| ghosts.find(page(1)).is_some()).count();
        assert!(mistaken < 20, "{mistaken} of a million");
    }
}
