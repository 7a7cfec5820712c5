//! A cache with others on one account: every amount that it takes comes back, whatever fails, and
//! nothing is asked on a hit.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)]

mod common;

use common::{BROKEN, Forks, MAPPED_PAGES, SimCache, get, pages};
use pinfold_core::{
    Access, Account, AddressRange, Amount, Cache, Config, Exhausted, GetError, Lender, Limit,
    Notice, Recalls, Refusal, RegisterError, WhenFull,
};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Fault, PAGE_BYTES, Protection, SimDevice, SimMonitor, SimRegistrar,
    get_simulated,
};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed}; // one thread
use std::sync::{Arc, Mutex, Weak};

/// The plainest account there can be, which also counts how often it was asked.
#[derive(Default)]
struct Books {
    allowed: Amount,
    held: Amount,
    asked: u32,
    settled: u32,
    refusals: Vec<RegisterError>,
    lenders: Vec<Weak<dyn Lender>>,
}

#[derive(Default)]
struct Counter(Mutex<Books>);

impl Counter {
    fn of(pages: usize, regions: usize) -> Arc<Self> {
        let allowed = Amount { bytes: pages * PAGE_BYTES, regions };
        Arc::new(Self(Mutex::new(Books { allowed, ..Books::default() })))
    }

    fn read<T>(&self, read: impl FnOnce(&Books) -> T) -> T {
        read(&self.0.lock().unwrap())
    }

    fn held(&self) -> Amount {
        self.read(|books| books.held)
    }

    /// Asks every drawer: one that has something idle gives it.
    fn ask_all(&self, missing: Amount) -> bool {
        let lenders: Vec<_> =
            self.read(|books| books.lenders.iter().filter_map(Weak::upgrade).collect());
        lenders.into_iter().any(|lender: Arc<dyn Lender>| lender.give_back(missing))
    }
}

impl Account for Counter {
    fn take(&self, amount: Amount) -> Result<(), Refusal> {
        let mut books = self.0.lock().unwrap();
        books.asked += 1;
        let after = books.held + amount;
        if after.fits(books.allowed) {
            books.held = after;
            return Ok(());
        }
        let (allowed, held, wanted) = (books.allowed.bytes, books.held.bytes, amount.bytes);
        let exhausted = Exhausted { limit: Limit::SharedBytes, allowed, held, wanted };
        Err(Refusal { exhausted, missing: after - books.allowed })
    }

    fn overdraw(&self, amount: Amount) {
        let mut books = self.0.lock().unwrap();
        books.held = books.held + amount;
    }

    fn give(&self, amount: Amount) {
        let mut books = self.0.lock().unwrap();
        assert!(amount.fits(books.held), "more comes back than was taken");
        books.held = books.held - amount;
    }

    fn recall(&self, missing: Amount) -> bool {
        self.ask_all(missing)
    }

    fn refused(&self, error: RegisterError, missing: Amount) -> bool {
        self.0.lock().unwrap().refusals.push(error);
        self.ask_all(missing)
    }

    fn settle(&self) {
        self.0.lock().unwrap().settled += 1;
    }

    fn attach(&self, lender: Weak<dyn Lender>) {
        self.0.lock().unwrap().lenders.push(lender);
    }
}

struct Rig {
    account: Arc<Counter>,
    device: Arc<SimDevice>,
    monitor: SimMonitor,
    space: Arc<AddressSpace>,
}

impl Rig {
    fn new(account: Arc<Counter>, device: DeviceConfig) -> Self {
        let space = Arc::new(AddressSpace::with_log_capacity(1024));
        space.map(pages(0, MAPPED_PAGES), Protection::ReadWrite);
        let device = Arc::new(SimDevice::new(Arc::clone(&space), device));
        let monitor = SimMonitor::new(&space);
        Self { account, device, monitor, space }
    }

    fn cache_with(&self, config: Config) -> SimCache {
        let account = Arc::clone(&self.account) as Arc<dyn Account>;
        let registrar = SimRegistrar::new(&self.device);
        Cache::with_account(registrar, self.monitor.clone(), config, account).unwrap()
    }

    fn cache(&self) -> SimCache {
        self.cache_with(Config::default())
    }

    /// What the account counts is what is registered.
    fn assert_exact(&self) {
        let truth = self.device.counts();
        let held = self.account.held();
        assert_eq!((held.bytes as u64, held.regions), (truth.pinned_bytes, truth.live));
    }
}

fn plain(pages: usize) -> Rig {
    Rig::new(Counter::of(pages, 100), DeviceConfig::default())
}

#[test]
fn a_registration_is_taken_and_a_hit_is_not() {
    let rig = plain(8);
    let cache = rig.cache();
    drop(get(&cache, pages(0, 3), Access::READ).unwrap());
    assert_eq!(rig.account.held(), Amount::one(3 * PAGE_BYTES));
    let asked = rig.account.read(|books| books.asked);
    for _ in 0..10 {
        drop(get(&cache, pages(0, 3), Access::READ).unwrap());
    }
    assert_eq!(rig.account.read(|books| books.asked), asked);
    assert_eq!(cache.evict_idle(), 1);
    assert_eq!(rig.account.held(), Amount::ZERO);
}

#[test]
fn a_failed_registration_gives_back() {
    let rig = plain(8);
    let cache = rig.cache();
    rig.device.next_registrations(1, &Fault::Fail(BROKEN));
    assert!(get(&cache, pages(0, 3), Access::READ).is_err());
    assert_eq!(rig.account.held(), Amount::ZERO);
    assert!(rig.account.read(|books| books.refusals.is_empty()), "not about room");
}

#[test]
fn what_exceeds_the_account_is_refused_with_its_name() {
    let rig = plain(4);
    let cache = rig.cache();
    let _lease = get(&cache, pages(0, 3), Access::READ).unwrap();
    let refused = get(&cache, pages(10, 2), Access::READ).map(drop).unwrap_err();
    let GetError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!(exhausted.limit, Limit::SharedBytes);
    assert!(exhausted.to_string().contains("shared budget"));
    rig.assert_exact();
}

#[test]
fn another_cache_gives_up_what_is_idle() {
    let rig = plain(4);
    let (one, other) = (rig.cache(), rig.cache());
    drop(get(&one, pages(0, 3), Access::READ).unwrap());
    let leased = get(&one, pages(20, 1), Access::READ).unwrap();
    let lease = get(&other, pages(10, 3), Access::READ).unwrap();
    assert_eq!(one.statistics().evictions, 1);
    assert!(get(&other, pages(15, 1), Access::READ).is_err(), "what is leased stays");
    rig.assert_exact();
    drop((lease, leased));
}

/// Says that it has given something, and has nothing.
#[derive(Default)]
struct Boaster(AtomicUsize);

impl Lender for Boaster {
    fn give_back(&self, _: Amount) -> bool {
        // An end, for code that would believe it for ever.
        self.0.fetch_add(1, Relaxed) < 10 * Recalls::MOST
    }
}

/// Of a full account, and of a device without room.
#[test]
fn a_lender_that_says_yes_and_gives_nothing_is_not_asked_for_ever() {
    let device = DeviceConfig { max_pinned_bytes: 4096, ..DeviceConfig::default() };
    for rig in [plain(1), Rig::new(Counter::of(100, 100), device)] {
        let boaster = Arc::new(Boaster::default());
        let lender: Weak<dyn Lender> = Arc::<Boaster>::downgrade(&boaster);
        rig.account.attach(lender);
        let config = Config { when_full: WhenFull::Refuse, ..Config::default() };
        let cache = rig.cache_with(config);
        let lease = get(&cache, pages(0, 1), Access::READ).unwrap();
        assert!(get(&cache, pages(10, 1), Access::READ).is_err());
        assert_eq!(boaster.0.load(Relaxed), Recalls::MOST);
        drop(lease);
        rig.assert_exact();
    }
}

#[test]
fn a_device_without_room_is_told_to_the_account() {
    let device = DeviceConfig { max_pinned_bytes: 4 * 4096, ..DeviceConfig::default() };
    let rig = Rig::new(Counter::of(100, 100), device);
    let (one, other) = (rig.cache(), rig.cache());
    drop(get(&one, pages(0, 3), Access::READ).unwrap());
    drop(get(&other, pages(10, 3), Access::READ).unwrap());
    assert_eq!(rig.account.read(|books| books.refusals.len()), 1);
    assert_eq!((one.statistics().evictions, other.statistics().registration_failures), (1, 1));
    rig.assert_exact();
}

#[test]
fn past_the_budget_is_counted_and_comes_back() {
    let rig = plain(1);
    let config = Config { when_full: WhenFull::RegisterPerUse, ..Config::default() };
    let cache = rig.cache_with(config);
    let first = get(&cache, pages(0, 1), Access::READ).unwrap();
    let past = get(&cache, pages(1, 1), Access::READ).unwrap();
    assert_eq!(rig.account.held(), Amount { bytes: 2 * PAGE_BYTES, regions: 2 });
    drop(past);
    rig.assert_exact();
    drop(first);
}

#[test]
fn a_dropped_cache_gives_all_back_and_lends_no_more() {
    let rig = plain(8);
    let cache = rig.cache();
    drop(get(&cache, pages(0, 2), Access::READ).unwrap());
    drop(get(&cache, pages(4, 2), Access::READ).unwrap());
    drop(cache);
    assert_eq!(rig.account.held(), Amount::ZERO);
    assert!(!rig.account.ask_all(Amount::EVERYTHING));
}

#[test]
fn a_registrar_that_panics_leaves_the_account_whole() {
    let rig = plain(8);
    let cache = rig.cache();
    rig.device.next_registrations(1, &Fault::Panic);
    let get = || get(&cache, pages(0, 1), Access::READ).map(drop);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(get)).is_err());
    assert_eq!(rig.account.held(), Amount::ZERO);
}

/// A lock of the account's may be held in the child by a thread that does not exist there.
#[test]
fn a_child_forked_inside_the_registrar_asks_the_account_nothing() {
    for by_deregistration in [false, true] {
        let rig = plain(8);
        let account = Arc::clone(&rig.account) as Arc<dyn Account>;
        let registrar = Forks::new(&rig.device, &rig.monitor);
        let cache = Cache::with_account(registrar, rig.monitor.clone(), Config::default(), account)
            .unwrap();
        let get = |range: AddressRange| get_simulated(&cache, range, Access::READ).map(drop);
        get(pages(0, 1)).unwrap();
        let settled = rig.account.read(|books| books.settled);
        if by_deregistration {
            rig.account.ask_all(Amount::one(PAGE_BYTES));
        } else {
            assert_eq!(get(pages(2, 2)), Err(GetError::Forked));
        }
        let asked = rig.account.read(|books| (books.refusals.len(), books.settled));
        assert_eq!(asked, (0, settled), "by deregistration: {by_deregistration}");
    }
}

#[test]
fn invalidated_memory_comes_back_with_its_deregistration() {
    let rig = plain(8);
    let cache = rig.cache();
    let lease = get(&cache, pages(0, 2), Access::READ).unwrap();
    rig.space.unmap(pages(0, 2));
    assert_eq!(cache.reclaim(), 0);
    assert_eq!(rig.account.held(), Amount::one(2 * PAGE_BYTES), "pinned as long as leased");
    drop(lease);
    assert_eq!(cache.reclaim(), 1);
    assert_eq!(rig.account.held(), Amount::ZERO);
    assert!(rig.account.read(|books| books.settled) > 0);
}

/// Random programs on two caches: the account always says what the device holds.
#[test]
fn the_account_is_exact_in_random_programs() {
    for seed in 0..if cfg!(miri) { 3 } else { 200_u64 } {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random >> 33).unwrap() % below
        };
        let device = DeviceConfig { max_pinned_bytes: 12 * 4096, ..DeviceConfig::default() };
        let rig = Rig::new(Counter::of(10, 6), device);
        let caches = [rig.cache(), rig.cache()];
        let mut leases = Vec::new();
        for _ in 0..60 {
            let (first, count) = (next(40), 1 + next(4));
            match next(6) {
                0 => leases.clear(),
                1 => rig.device.next_registrations(1, &Fault::Fail(BROKEN)),
                2 => {
                    rig.space.unmap(pages(first, count));
                    rig.space.map(pages(first, count), Protection::ReadWrite);
                    caches[next(2)].reclaim();
                }
                _ => leases.extend(get(&caches[next(2)], pages(first, count), Access::READ)),
            }
            let (held, truth) = (rig.account.held(), rig.device.counts());
            assert_eq!(held.bytes as u64, truth.pinned_bytes, "seed {seed}");
            assert!(held.fits(Amount { bytes: 10 * PAGE_BYTES, regions: 6 }), "seed {seed}");
        }
        drop(leases);
    }
}

#[test]
fn a_budget_that_shrinks_is_told_to_every_cache_that_draws_on_it() {
    let account = Arc::new(Counter::default());
    let rig = Rig::new(Arc::clone(&account), DeviceConfig::default());
    let (first, second) = (rig.cache(), rig.cache());
    let mut notices = [first.notices(4), second.notices(4)];
    let (more, less) = (Amount { bytes: 9, regions: 9 }, Amount { bytes: 9, regions: 8 });
    let lenders: Vec<_> = account.read(|books| books.lenders.iter().map(Weak::upgrade).collect());
    for lender in lenders.into_iter().flatten() {
        lender.budget_changed(less, more);
        lender.budget_changed(more, less);
    }
    for heard in &mut notices {
        let shrank = Notice::BudgetShrank { from: more, to: less };
        assert_eq!([heard.next(), heard.next()], [Some(shrank), None]);
    }
}
