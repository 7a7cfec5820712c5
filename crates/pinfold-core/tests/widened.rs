//! What is counted: whole blocks, where the system counts those, whatever is registered of them; and each
//! page as often as it is pinned. A device that counts whole blocks is asked for whole blocks, and for less
//! where it has no more.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

use pinfold_core::{
    Access, AddressRange, BadAddress, Cache, Config, DeregisterError, GetError, Gets, Lease, Limit,
    PerUse, RegisterError, SuspensionTerms, Unsupported, WhenFull,
};
use pinfold_sim::{Calm, Fake, FakeDevice, FakeSuspend, SimulatedRequest, get_simulated};
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;
const BLOCK: usize = 512 * PAGE;
const START: usize = 0x7000_0000;

/// Counts whole blocks, and has as much room as it says.
struct Device {
    /// It pins no more than so much at once.
    room: usize,
    /// Nothing is mapped from here on.
    mapped_to: usize,
    held: Mutex<Vec<AddressRange>>,
    /// Whether pages lie in blocks now.
    in_blocks: AtomicBool,
    /// Whether they are moved into blocks between the question and the registration, of which the system then counts
    /// the whole blocks.
    collapses: AtomicBool,
    /// 1 where the question behind the next registration panics, 2 behind that registration; 3 where the next deregistration
    /// panics, 4 where it fails.
    panics: AtomicUsize,
    pins_per_page: usize,
}

impl Device {
    fn new() -> Self {
        Self {
            room: usize::MAX,
            mapped_to: usize::MAX,
            held: Mutex::default(),
            in_blocks: AtomicBool::new(true),
            collapses: AtomicBool::new(false),
            panics: AtomicUsize::new(0),
            pins_per_page: 1,
        }
    }

    /// One whose pages are moved into blocks while they are registered.
    fn collapsing() -> Self {
        let (in_blocks, collapses) = (AtomicBool::new(false), AtomicBool::new(true));
        Self { in_blocks, collapses, ..Self::new() }
    }
}

impl FakeDevice for Device {
    type Handle = u32;

    fn pins_per_page(&self) -> usize {
        self.pins_per_page
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        assert!(
            self.panics.compare_exchange(2, 0, SeqCst, SeqCst).is_err(),
            "the device fails once"
        );
        if self.in_blocks.load(SeqCst) { range.page_aligned(BLOCK) } else { range }
    }

    fn register(&self, range: AddressRange, _: Access) -> Result<u32, RegisterError> {
        let mut held = self.held.lock().unwrap();
        if range.end() > self.mapped_to {
            let reason = BadAddress::Unmapped { at: self.mapped_to };
            return Err(RegisterError::BadAddress { range, reason, errno: 14 });
        }
        if held.iter().map(AddressRange::len).sum::<usize>() + range.len() > self.room {
            return Err(RegisterError::TableFull { capacity: 1 });
        }
        held.push(range);
        self.in_blocks.fetch_or(self.collapses.load(SeqCst), SeqCst);
        let _ = self.panics.compare_exchange(1, 2, SeqCst, SeqCst);
        Ok(0)
    }

    fn deregister(&self, _: u32, range: AddressRange) -> Result<(), DeregisterError> {
        let mut held = self.held.lock().unwrap();
        let place = held.iter().position(|other| *other == range).unwrap();
        held.swap_remove(place);
        drop(held);
        let fails = self.panics.compare_exchange(4, 0, SeqCst, SeqCst).is_ok();
        assert!(
            self.panics.compare_exchange(3, 0, SeqCst, SeqCst).is_err(),
            "the device fails once"
        );
        if fails { Err(DeregisterError::DeviceGone { errno: 5 }) } else { Ok(()) }
    }
}

impl FakeSuspend for Device {
    type Connection = Infallible;

    fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }
}

type TheCache = Cache<Fake<Device>, Fake<Calm>>;

fn cache_of(device: Device, config: Config) -> TheCache {
    Cache::new(Fake(device), Fake(Calm), config).unwrap()
}

/// So many bytes from the page on.
fn bytes(page: usize, length: usize) -> AddressRange {
    AddressRange::new(START + page * PAGE, length).unwrap()
}

fn get(cache: &TheCache, page: usize) -> Result<Lease<'_, Fake<Device>, Fake<Calm>>, GetError> {
    get_simulated(cache, bytes(page, 100), Access::READ)
}

/// How long the registration is that a get is served from.
fn registered(cache: &TheCache, page: usize) -> usize {
    get(cache, page).unwrap().registered().len()
}

#[test]
fn a_block_is_registered_once_for_all_of_it() {
    let cache = cache_of(Device::new(), Config::default());
    assert_eq!((registered(&cache, 3), registered(&cache, 500)), (BLOCK, BLOCK));
    assert_eq!(
        (cache.statistics().registrations, cache.statistics().pinned_bytes),
        (1, BLOCK as u64)
    );
}

/// The rest of the block may have been unmapped since the registrar was asked.
#[test]
fn what_was_not_asked_for_fails_no_get() {
    let device = Device { mapped_to: START + 4 * PAGE, ..Device::new() };
    let cache = cache_of(device, Config::default());
    assert_eq!(registered(&cache, 3), PAGE);
    let error = get(&cache, 4).map(|lease| lease.range()).unwrap_err();
    assert!(matches!(error, GetError::Register(RegisterError::BadAddress { .. })), "{error}");
}

#[test]
fn a_device_without_room_for_a_block_is_asked_for_less() {
    let cache = cache_of(Device { room: BLOCK / 2, ..Device::new() }, Config::default());
    assert_eq!((registered(&cache, 3), registered(&cache, 5)), (PAGE, PAGE));
}

/// Of a block in which something is suspended no more is registered than was asked for.
#[test]
fn what_is_suspended_in_the_rest_of_a_block_is_not_registered() {
    let cache = cache_of(Device::new(), Config::default());
    let page = AddressRange::new(START + 3 * PAGE, PAGE).unwrap();
    let terms = SuspensionTerms::default();
    let suspended = cache.suspend(page, Vec::new(), Vec::new(), terms).unwrap();
    assert_eq!(registered(&cache, 4), PAGE);
    drop(suspended.resume().unwrap());
    assert_eq!(registered(&cache, 5), BLOCK);
}

/// Less would be counted as much.
#[test]
fn a_budget_without_room_for_a_block_holds_none_of_it() {
    let config = Config { max_bytes: 2 * PAGE, ..Config::default() };
    let cache = cache_of(Device::new(), config);
    let refused = get(&cache, 3).map(|lease| lease.range()).unwrap_err();
    let GetError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!((exhausted.limit, exhausted.wanted), (Limit::Bytes, BLOCK));
    let when_full = WhenFull::RegisterPerUse;
    let cache = cache_of(Device::new(), Config { when_full, ..config });
    assert_eq!(get(&cache, 3).unwrap().per_use(), Some(PerUse::Full));
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// Of what is vouched for no more is registered, and as much is counted.
#[test]
fn a_part_of_a_block_counts_as_the_block() {
    let cache = cache_of(Device::new(), Config::default());
    let lease =
        SimulatedRequest::new(&cache, bytes(0, PAGE), Access::READ).vouched().get().unwrap();
    assert_eq!(lease.registered().len(), PAGE);
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
    drop(lease);
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// As by a device that could not register all of it: what was counted is given back, not what was registered.
#[test]
fn what_is_counted_is_given_back() {
    let device = Device { mapped_to: START + 4 * PAGE, ..Device::new() };
    let cache = cache_of(device, Config::default());
    assert_eq!(registered(&cache, 3), PAGE);
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
    assert!(get(&cache, 4).is_err());
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// Pages that are moved into a block behind the question are counted as the system counts them.
#[test]
fn what_becomes_a_block_as_it_is_registered_counts_as_one() {
    let cache = cache_of(Device::collapsing(), Config::default());
    assert_eq!(registered(&cache, 3), PAGE);
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// What the budget has no room for is not kept registered.
#[test]
fn what_becomes_a_block_for_which_there_is_no_room_is_refused() {
    let config = Config { max_bytes: BLOCK / 2, ..Config::default() };
    let cache = cache_of(Device::collapsing(), config);
    let refused = get(&cache, 3).map(|lease| lease.range()).unwrap_err();
    let GetError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!((exhausted.limit, exhausted.wanted), (Limit::Bytes, BLOCK));
    assert_eq!(*cache.registrar().held.lock().unwrap(), []);
    assert_eq!(cache.statistics().pinned_bytes, 0);
    let when_full = WhenFull::RegisterPerUse;
    let cache = cache_of(Device::collapsing(), Config { when_full, ..config });
    let lease = get(&cache, 3).unwrap();
    assert_eq!(lease.per_use(), Some(PerUse::Full));
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
    drop(lease);
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// Past the budget the rest is taken from it as the beginning was.
#[test]
fn what_becomes_a_block_past_the_budget_counts_as_one() {
    let config =
        Config { max_bytes: PAGE, when_full: WhenFull::RegisterPerUse, ..Config::default() };
    let device = Device { in_blocks: AtomicBool::new(false), ..Device::new() };
    let cache = cache_of(device, config);
    let first = get(&cache, 512).unwrap();
    cache.registrar().collapses.store(true, SeqCst);
    let second = get(&cache, 3).unwrap();
    assert_eq!(second.per_use(), Some(PerUse::Full));
    assert_eq!(cache.statistics().pinned_bytes, (PAGE + BLOCK) as u64);
    drop((first, second));
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// It takes the place of what is idle, as what was a block before does.
#[test]
fn room_is_made_for_what_becomes_a_block() {
    let device = Device { in_blocks: AtomicBool::new(false), ..Device::new() };
    let config = Config { max_bytes: BLOCK, ..Config::keeping_all() };
    let cache = cache_of(device, config);
    drop(get(&cache, 512).unwrap());
    cache.registrar().collapses.store(true, SeqCst);
    assert_eq!(registered(&cache, 3), BLOCK);
    assert_eq!(cache.registrar().held.lock().unwrap().len(), 1);
    assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
}

/// What a device that panics was asked about is not left with it.
#[test]
fn a_panic_behind_the_registration_leaves_nothing() {
    let device = Device { panics: AtomicUsize::new(1), ..Device::collapsing() };
    let cache = cache_of(device, Config::default());
    let got = catch_unwind(AssertUnwindSafe(|| drop(get(&cache, 3))));
    assert!(got.is_err(), "it was not asked again");
    assert_eq!(*cache.registrar().held.lock().unwrap(), []);
    assert_eq!(cache.statistics().pinned_bytes, 0);
    drop(get(&cache, 3).unwrap());
}

/// What a device cannot give back that counts more than there is room for is counted, and its panic goes on.
#[test]
fn what_becomes_a_block_for_which_there_is_no_room_may_fail_to_end() {
    for panics in [3, 4] {
        let config = Config { max_bytes: BLOCK / 2, ..Config::default() };
        let device = Device { panics: AtomicUsize::new(panics), ..Device::collapsing() };
        let cache = cache_of(device, config);
        let got = catch_unwind(AssertUnwindSafe(|| get(&cache, 3).map(drop)));
        assert_eq!(got.is_err(), panics == 3);
        let books = cache.statistics();
        assert_eq!((books.regions, books.pinned_bytes), (0, 0));
        assert_eq!((books.registration_failures, books.deregistration_failures), (1, 1));
        assert!(matches!(get(&cache, 3).map(drop), Err(GetError::Exhausted(_))));
        assert_eq!(*cache.registrar().held.lock().unwrap(), []);
    }
}

/// Two pages of two blocks are registered, suspended, and come back when their pages lie in blocks, or as
/// they were. What counts then, and what was allowed.
fn renewed(in_blocks: (bool, bool), max_bytes: usize) -> (u64, u64) {
    let config = Config { max_bytes, ..Config::default() };
    let cache = cache_of(Device::new(), config);
    cache.registrar().in_blocks.store(in_blocks.0, SeqCst);
    let leases = vec![get(&cache, 3).unwrap(), get(&cache, 512).unwrap()];
    let before = cache.statistics().pinned_bytes;
    let range = AddressRange::new(START, 2 * BLOCK).unwrap();
    let terms = SuspensionTerms::default();
    let suspended = cache.suspend(range, Vec::new(), leases, terms).unwrap();
    cache.registrar().in_blocks.store(in_blocks.1, SeqCst);
    let resumed = suspended.resume().unwrap();
    assert!(resumed.leases.iter().all(Result::is_ok));
    let after = cache.statistics().pinned_bytes;
    drop(resumed);
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
    (before, after)
}

/// What becomes a block while a renewal registers it counts as one, and what is idle makes room for it.
#[test]
fn a_renewal_counts_what_the_memory_becomes() {
    for max_bytes in [1 << 30, BLOCK + PAGE] {
        let config = Config { max_bytes, ..Config::keeping_all() };
        let device = Device { in_blocks: AtomicBool::new(false), ..Device::new() };
        let cache = cache_of(device, config);
        let (lease, other) = (get(&cache, 3).unwrap(), get(&cache, 512).unwrap());
        drop(get(&cache, 1024).unwrap());
        let range = AddressRange::new(START, BLOCK).unwrap();
        let terms = SuspensionTerms::default();
        let suspended = cache.suspend(range, Vec::new(), vec![lease], terms).unwrap();
        cache.registrar().collapses.store(true, SeqCst);
        assert!(suspended.resume().unwrap().leases.iter().all(Result::is_ok));
        let idle = if max_bytes == 1 << 30 { 2 } else { 1 };
        assert_eq!(cache.statistics().pinned_bytes, (BLOCK + idle * PAGE) as u64);
        drop(other);
        cache.evict_idle();
        assert_eq!(cache.statistics().pinned_bytes, 0);
    }
}

/// What a device that panics was to say of a renewal is not left with it.
#[test]
fn a_panic_behind_a_renewal_leaves_nothing() {
    let cache = cache_of(Device::new(), Config::default());
    let lease = get(&cache, 3).unwrap();
    let range = AddressRange::new(START, BLOCK).unwrap();
    let terms = SuspensionTerms::default();
    let suspended = cache.suspend(range, Vec::new(), vec![lease], terms).unwrap();
    cache.registrar().panics.store(1, SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(suspended.resume()))).is_err());
    assert_eq!(*cache.registrar().held.lock().unwrap(), []);
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

#[test]
fn a_renewal_counts_what_the_memory_has_become() {
    let (page, block) = (PAGE as u64, BLOCK as u64);
    assert_eq!(renewed((false, true), 1 << 30), (2 * page, 2 * block));
    assert_eq!(renewed((false, false), 1 << 30), (2 * page, 2 * page));
    assert_eq!(renewed((true, true), 1 << 30), (2 * block, 2 * block));
    // What cannot be had is told all the same: the leases come back.
    assert_eq!(renewed((false, true), BLOCK), (2 * page, 2 * block));
}

/// Also past the budget, which refuses nothing that takes no more.
#[test]
fn a_renewal_that_counts_less_gives_the_rest_back() {
    let config = Config { max_bytes: BLOCK, ..Config::default() };
    let cache = cache_of(Device::new(), config);
    let range = AddressRange::new(START, 2 * BLOCK).unwrap();
    cache.registrar().in_blocks.store(false, SeqCst);
    let mut leases = vec![get(&cache, 3).unwrap(), get(&cache, 512).unwrap()];
    for (in_blocks, counted) in [(true, 2 * BLOCK), (true, 2 * BLOCK), (false, 2 * PAGE)] {
        let terms = SuspensionTerms::default();
        let suspended = cache.suspend(range, Vec::new(), leases, terms).unwrap();
        cache.registrar().in_blocks.store(in_blocks, SeqCst);
        let resumed = suspended.resume().unwrap();
        leases = resumed.leases.into_iter().map(Result::unwrap).collect();
        assert_eq!(cache.statistics().pinned_bytes, counted as u64);
    }
    drop(leases);
    cache.evict_idle();
    assert_eq!(cache.statistics().pinned_bytes, 0);
}

/// The room that a renewal makes may be what a callback was waiting for. It asks for bytes that are not suspended, and that
/// the renewal would serve.
#[test]
fn a_callback_that_a_renewal_brings_about_gets_what_is_not_suspended() {
    let config = Config { max_bytes: BLOCK, ..Config::keeping_all() };
    let cache = Arc::new(cache_of(Device::new(), config));
    cache.registrar().in_blocks.store(false, SeqCst);
    let lease = get_simulated(&cache, bytes(3, 2 * PAGE), Access::READ).unwrap();
    drop(get(&cache, 512).unwrap());
    let terms = SuspensionTerms { gets: Gets::Refuse, ..SuspensionTerms::default() };
    let page = |number| AddressRange::new(START + number * PAGE, PAGE).unwrap();
    let suspended = cache.suspend(page(3), Vec::new(), vec![lease], terms).unwrap();
    let (got, caching) = (Arc::new(Mutex::new(None)), Arc::clone(&cache));
    let result = Arc::clone(&got);
    cache.invalidate_then(page(512), move || {
        caching.registrar().in_blocks.store(false, SeqCst);
        *result.lock().unwrap() = Some(get(&caching, 4).map(drop));
        caching.registrar().in_blocks.store(true, SeqCst);
    });
    cache.registrar().in_blocks.store(true, SeqCst);
    assert!(suspended.resume().unwrap().leases.iter().all(Result::is_ok));
    assert_eq!(*got.lock().unwrap(), Some(Ok(())));
}

#[test]
fn each_device_of_several_counts() {
    let small = || Fake(Device { in_blocks: AtomicBool::new(false), ..Device::new() });
    let config = Config { max_bytes: 3 * PAGE, ..Config::default() };
    let two = Cache::new((small(), small()), Fake(Calm), config).unwrap();
    let lease = get_simulated(&two, bytes(0, PAGE), Access::READ).unwrap();
    assert_eq!(two.statistics().pinned_bytes, 2 * PAGE as u64);
    let refused = get_simulated(&two, bytes(1, PAGE), Access::READ);
    assert!(matches!(refused, Err(GetError::Exhausted(_))), "{refused:?}");
    drop((refused, lease));
    let nested =
        Cache::new([(small(), small()), (small(), small())], Fake(Calm), Config::default());
    let nested = nested.unwrap();
    drop(get_simulated(&nested, bytes(0, PAGE), Access::READ).unwrap());
    assert_eq!(nested.statistics().pinned_bytes, 4 * PAGE as u64);
    nested.evict_idle();
    assert_eq!(nested.statistics().pinned_bytes, 0);
}

/// Room is made for a block before less is made do with.
#[test]
fn a_block_takes_the_place_of_what_is_idle() {
    let config = Config { max_bytes: BLOCK, ..Config::default() };
    let cache = cache_of(Device::new(), config);
    assert_eq!((registered(&cache, 3), registered(&cache, 512)), (BLOCK, BLOCK));
    let lease = get(&cache, 512).unwrap();
    let refused = get(&cache, 3).map(|lease| lease.range()).unwrap_err();
    assert!(matches!(refused, GetError::Exhausted(_)), "{refused}");
    drop(lease);
}

/// A sum that no word holds.
#[test]
fn what_cannot_be_counted_is_refused() {
    let device = Device {
        in_blocks: AtomicBool::new(false),
        pins_per_page: usize::MAX / PAGE,
        ..Device::new()
    };
    let config = Config { when_full: WhenFull::RegisterPerUse, ..Config::default() };
    let cache = cache_of(device, config);
    let lease = get(&cache, 3).unwrap();
    let refused = get(&cache, 4).map(|lease| lease.range()).unwrap_err();
    let GetError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!((exhausted.limit, exhausted.allowed), (Limit::Bytes, usize::MAX));
    drop(lease);
    assert_eq!(cache.statistics().pinned_bytes, 0);
}
