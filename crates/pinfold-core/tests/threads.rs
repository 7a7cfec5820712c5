//! Many threads on one cache, while its memory is unmapped, discarded and invalidated.
//!
//! Which of two threads comes first cannot be said beforehand, but what no order allows can be
//! said exactly. A simulated page's number only grows: with every change of its mapping comes a
//! higher one. So a lease that shows the device a lower number than the program saw before it
//! asked is stale, and one that shows a higher number than the program sees afterwards comes from
//! nowhere. In the end all accounts must balance: gets, registrations, callbacks.
//!
//! What each thread does follows from a seed, which is printed; `PINFOLD_SEED` replays that. In
//! which order the threads do it is the scheduler's business.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // a test speaks

mod common;

use common::{BASE, Rig, Setup, SimLease, bytes, get_if_cached, pages};
use pinfold_core::{
    Access, AddressRange, BadAddress, Config, GetError, Monitor, RegisterError, WhenFull,
};
use pinfold_sim::{PAGE_BYTES, PhysicalPage, Protection, Random};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// The memory that all threads share.
const PAGES: usize = 24;

const WORKERS: usize = 4;
const CHANGERS: usize = 2;
const STEPS: usize = if cfg!(miri) { 25 } else { 3000 };

/// The seed of this run.
fn seed() -> u64 {
    let given = std::env::var("PINFOLD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(clock_seed);
    eprintln!("PINFOLD_SEED={seed}");
    seed
}

/// Another seed for every run, where there is a clock.
fn clock_seed() -> u64 {
    if cfg!(miri) {
        return 1;
    }
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::from(since.subsec_nanos()) ^ since.as_secs()
}

/// What the threads of one test share, and what they did, to be held against the books.
struct Arena {
    rig: Rig,
    gets: AtomicU64,
    /// Completions asked for, and those that came.
    asked: AtomicU64,
    completed: Arc<AtomicU64>,
}

impl Arena {
    fn new(setup: Setup, reclaimer: bool) -> Self {
        let mut rig = setup.rig();
        if reclaimer {
            rig.start_reclaimer();
        }
        let completed = Arc::default();
        Self { rig, gets: AtomicU64::new(0), asked: AtomicU64::new(0), completed }
    }

    /// Runs workers and changers to their end, then balances the accounts.
    fn run(self, seed: u64) {
        let mut random = Random::new(seed);
        let basket = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..WORKERS {
                let (arena, basket, random) = (&self, &basket, random.split());
                scope.spawn(move || Worker { arena, random, basket }.run());
            }
            for _ in 0..CHANGERS {
                let (arena, random) = (&self, random.split());
                scope.spawn(move || arena.change_mappings(random));
            }
        });
        drop(basket);
        self.balance();
    }

    fn balance(mut self) {
        let statistics = self.rig.statistics();
        // SeqCst, here and below: tests do not tune.
        assert_eq!(statistics.gets, self.gets.load(Ordering::SeqCst));
        assert_eq!(statistics.callback_panics, 0);
        let config = *self.rig.cache().config();
        self.rig.drop_cache();
        let counts = self.rig.device.counts();
        assert_eq!((counts.live, counts.pinned_bytes), (0, 0));
        assert_eq!(counts.registrations, counts.deregistrations);
        assert_eq!(self.completed.load(Ordering::SeqCst), self.asked.load(Ordering::SeqCst));
        if config.when_full == WhenFull::Refuse {
            assert!(counts.peak_live <= config.max_regions);
            assert!(counts.peak_pinned_bytes <= config.max_bytes as u64);
        }
        assert_eq!(self.rig.device.shut_down(), []);
    }

    fn change_mappings(&self, mut random: Random) {
        for _ in 0..STEPS / 4 {
            let range = some_pages(&mut random);
            match random.below(8) {
                0..=2 => self.rig.reallocate(range),
                3 => self.rig.space.map(range, Protection::ReadWrite),
                4 => self.rig.space.discard(range),
                5 => self.discard_slowly(range),
                6 => self.rig.cache().invalidate(range),
                _ => self.ask_for_completion(range),
            }
            if random.chance(10) {
                self.rig.cache().reclaim();
            }
            thread::yield_now();
        }
    }

    fn discard_slowly(&self, range: AddressRange) {
        let discard = self.rig.space.begin_discard(range);
        thread::yield_now();
        discard.finish();
    }

    fn ask_for_completion(&self, range: AddressRange) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let completed = Arc::clone(&self.completed);
        self.rig.cache().invalidate_then(range, move || {
            completed.fetch_add(1, Ordering::SeqCst);
        });
    }

    /// What the program sees of each page of `range`, if it is mapped.
    fn seen(&self, range: AddressRange) -> Vec<Option<PhysicalPage>> {
        let whole = range.page_aligned(PAGE_BYTES);
        whole.pieces(PAGE_BYTES).map(|page| Some(self.rig.space.translate(page)?[0])).collect()
    }
}

fn some_pages(random: &mut Random) -> AddressRange {
    let first = random.below(PAGES);
    pages(first, 1 + random.below(4.min(PAGES - first)))
}

fn some_bytes(random: &mut Random) -> AddressRange {
    let range = some_pages(random);
    if random.chance(50) {
        return range;
    }
    let offset = range.start() - BASE + random.below(PAGE_BYTES);
    bytes(offset, 1 + random.below(range.end() - BASE - offset))
}

/// Whether `device` lies between what the program saw before and after.
fn is_fresh(
    before: &[Option<PhysicalPage>],
    device: &[PhysicalPage],
    after: &[Option<PhysicalPage>],
) -> bool {
    let not_older =
        before.iter().zip(device).all(|(before, page)| before.is_none_or(|b| b <= *page));
    let not_newer = after.iter().zip(device).all(|(after, page)| after.is_none_or(|a| a >= *page));
    not_older && not_newer && before.len() == device.len()
}

/// A thread that gets, uses and ends leases, its own and those of others.
struct Worker<'w, 'r> {
    arena: &'r Arena,
    random: Random,
    /// Leases that any thread may end.
    basket: &'w Mutex<Vec<SimLease<'r>>>,
}

impl<'r> Worker<'_, 'r> {
    fn run(&mut self) {
        for _ in 0..STEPS {
            let range = some_bytes(&mut self.random);
            let access = if self.random.chance(80) { Access::READ } else { Access::READ_WRITE };
            self.get(range, access);
            if self.random.chance(20) {
                self.end_anothers();
            }
        }
    }

    fn get(&mut self, range: AddressRange, access: Access) {
        let arena = self.arena;
        let before = arena.seen(range);
        arena.gets.fetch_add(1, Ordering::SeqCst);
        match arena.rig.get(range, access) {
            Ok(lease) => {
                let device = arena.rig.device.translate(lease.handle(), range).unwrap();
                let after = arena.seen(range);
                assert!(is_fresh(&before, &device, &after), "{lease:?}: {before:?} {device:?}");
                self.keep_or_end(lease);
            }
            Err(GetError::Exhausted(_)) => self.end_anothers(),
            Err(GetError::Register(RegisterError::BadAddress { reason, .. })) => {
                assert!(matches!(reason, BadAddress::Unmapped { .. }), "{reason}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn keep_or_end(&mut self, mut lease: SimLease<'r>) {
        if self.random.chance(10) {
            self.ask_for_news(&mut lease);
        }
        if self.random.chance(25) {
            self.basket.lock().unwrap().push(lease);
        }
    }

    /// A callback that runs if news come, or is taken back if the lease ends first.
    fn ask_for_news(&self, lease: &mut SimLease<'r>) {
        self.arena.asked.fetch_add(1, Ordering::SeqCst);
        let completed = Arc::clone(&self.arena.completed);
        let news = OnDrop(Some(move || {
            completed.fetch_add(1, Ordering::SeqCst);
        }));
        // Run or taken back, the callback's captures are dropped exactly once.
        lease.on_invalidate(move || drop(news));
    }

    fn end_anothers(&mut self) {
        let mut basket = self.basket.lock().unwrap();
        let which = self.random.below(basket.len());
        let lease = if basket.is_empty() { None } else { Some(basket.swap_remove(which)) };
        drop(basket);
        drop(lease);
    }
}

/// Calls its function when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(function) = self.0.take() {
            function();
        }
    }
}

#[test]
fn a_roomy_cache_stays_right() {
    Arena::new(Setup::default(), false).run(seed());
}

#[test]
fn a_cache_with_a_reclaimer_stays_right() {
    Arena::new(Setup::default(), true).run(seed());
}

#[test]
fn a_cache_of_few_regions_stays_right_and_within_its_budget() {
    Arena::new(Setup::regions(6), true).run(seed());
}

#[test]
fn a_cache_of_few_bytes_stays_right_and_within_its_budget() {
    let max_bytes = 10 * PAGE_BYTES;
    Arena::new(Setup::with(Config { max_bytes, ..Config::default() }), false).run(seed());
}

#[test]
fn a_cache_that_goes_past_its_budget_stays_right() {
    let when_full = WhenFull::RegisterPerUse;
    let config = Config { max_regions: 2, when_full, ..Config::default() };
    Arena::new(Setup::with(config), true).run(seed());
}

/// A log of two entries overflows all the time.
#[test]
fn a_log_that_overflows_loses_nothing() {
    Arena::new(Setup { log_capacity: 2, ..Setup::default() }, false).run(seed());
}

/// Registrations that take their time are overtaken by changes.
#[test]
fn slow_registrations_stay_right() {
    let arena = Arena::new(Setup::default(), true);
    arena.rig.device.slow_down(if cfg!(miri) { 5 } else { 2000 });
    arena.run(seed());
}

/// One page and every thread: the shortest way into every race between a hit and an end.
#[test]
fn one_page_that_comes_and_goes() {
    let rig = Setup::regions(1).rig();
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                for _ in 0..STEPS {
                    let before = rig.space.translate(pages(0, 1)).unwrap();
                    if let Ok(lease) = rig.get(pages(0, 1), Access::READ) {
                        let device = rig.device.translate(lease.handle(), pages(0, 1)).unwrap();
                        assert!(before <= device);
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..STEPS {
                rig.space.map(pages(0, 1), Protection::ReadWrite);
                rig.cache().reclaim();
            }
        });
    });
}

/// So many regions that several are next to be evicted at once, and threads that want them back
/// at just that moment.
#[test]
fn what_is_next_to_be_evicted_is_leased_again() {
    let (seed, capacity) = (seed(), if cfg!(miri) { 130 } else { 256 });
    let rig = Setup::regions(capacity).rig();
    rig.space.map(pages(0, 2 * capacity), Protection::ReadWrite);
    let mut random = Random::new(seed);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            let (rig, mut random) = (&rig, random.split());
            scope.spawn(move || {
                for step in 0..4 * STEPS {
                    let page = pages((step + random.below(capacity)) % (2 * capacity), 1);
                    let before = rig.space.translate(page).unwrap();
                    let lease = rig.get(page, Access::READ).unwrap();
                    let device = rig.device.translate(lease.handle(), page).unwrap();
                    assert!(before <= device);
                }
            });
        }
        let (rig, mut random) = (&rig, random.split());
        scope.spawn(move || {
            for _ in 0..STEPS {
                rig.space.map(pages(random.below(2 * capacity), 1), Protection::ReadWrite);
                thread::yield_now();
            }
        });
    });
    assert!(rig.device.counts().peak_live <= capacity);
    assert!(rig.statistics().evictions > 0);
}

/// The same with lookups that register nothing, while what is idle in a range is given up: a lookup
/// that does not become a lease is not taken for one.
#[test]
fn what_is_looked_up_while_its_range_is_given_up_stays_right() {
    let (seed, capacity) = (seed(), 128);
    let rig = Setup::regions(capacity).rig();
    rig.space.map(pages(0, 2 * capacity), Protection::ReadWrite);
    let mut random = Random::new(seed);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            let (rig, mut random) = (&rig, random.split());
            scope.spawn(move || {
                for step in 0..4 * STEPS {
                    let page = pages(random.below(2 * capacity), 1);
                    let lease = if step % 4 == 0 {
                        Some(rig.get(page, Access::READ).unwrap())
                    } else {
                        get_if_cached(rig.cache(), page)
                    };
                    let Some(lease) = lease else { continue };
                    let handle = lease.handle();
                    assert!(rig.device.translate(handle, page).is_some());
                    thread::yield_now();
                    assert_eq!(lease.handle(), handle);
                    assert!(rig.device.translate(handle, page).is_some());
                }
            });
        }
        let (rig, mut random) = (&rig, random.split());
        scope.spawn(move || {
            for _ in 0..4 * STEPS {
                rig.cache().evict_idle_in(pages(random.below(2 * capacity), 8));
            }
        });
    });
    assert!(rig.device.counts().peak_live <= capacity);
}

/// Threads come and go, each leaving leases behind that others end.
#[test]
fn leases_outlive_their_threads() {
    let rig = Rig::new();
    let basket = Mutex::new(Vec::new());
    for round in 0..if cfg!(miri) { 4 } else { 40 } {
        thread::scope(|scope| {
            for worker in 0..WORKERS {
                let (rig, basket) = (&rig, &basket);
                scope.spawn(move || {
                    for page in 0..30 {
                        let lease = rig.lease(pages((round + worker + page) % PAGES, 1));
                        basket.lock().unwrap().push(lease);
                    }
                });
            }
        });
        rig.space.map(pages(round % PAGES, 1), Protection::ReadWrite);
        let kept = basket.lock().unwrap().split_off(10);
        drop(kept);
        rig.cache().reclaim();
    }
    drop(basket);
    rig.cache().reclaim();
    assert!(rig.device.counts().live <= PAGES);
}

/// A destructor of a thread's own data may still use the cache, though the thread has lost its
/// place in it by then.
#[test]
fn a_thread_that_is_torn_down_still_gets() {
    struct LastWish(Arc<Rig>);

    impl Drop for LastWish {
        fn drop(&mut self) {
            let kept = self.0.lease(pages(0, 1));
            let hit = self.0.lease(pages(0, 1));
            assert_eq!(hit.handle(), kept.handle());
            self.0.space.map(pages(0, 1), Protection::ReadWrite);
            let fresh = self.0.lease(pages(0, 1));
            assert_ne!(fresh.handle(), kept.handle());
            drop(hit);
            assert_eq!(self.0.cache().reclaim(), 0);
            drop(kept);
            assert_eq!(self.0.cache().reclaim(), 1);
        }
    }

    thread_local! {
        static WISH: RefCell<Option<LastWish>> = const { RefCell::new(None) };
    }

    let rig = Arc::new(Rig::new());
    let own = Arc::clone(&rig);
    thread::spawn(move || {
        // Registered for destruction before the cache's own data of this thread, so destroyed
        // after it.
        WISH.with(|wish| *wish.borrow_mut() = Some(LastWish(Arc::clone(&own))));
        own.touch(pages(1, 1));
    })
    .join()
    .unwrap();
    assert_eq!(rig.statistics().registrations, 3);
    assert_eq!(rig.statistics().hits, 1);
    assert!(rig.monitor.check().is_ok());
}
