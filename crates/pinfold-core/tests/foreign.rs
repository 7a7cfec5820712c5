//! Code that is not ours panics, or calls back: a registrar at its n-th call, for every n, in every
//! operation; what a callback captured; what a panic carries.

#![allow(clippy::unwrap_used)] // only tests use it

mod common;

use common::BufferWith;
use pinfold_core::{
    Access, Account, AddressRange, Amount, Cache, Clock, Config, DeregisterError, Exhausted,
    GetError, Keep, Lease, Lender, Limit, Lost, Monitor, Position, Refusal, RegisterError,
    RegistrarLimits, Replay, Sequence, UseCosts, Watch,
};
use pinfold_sim::{
    Calm, Fake, FakeDevice, FakeMonitor, Simulated, SimulatedRequest, get_checked, get_simulated,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::Duration;

/// A device that panics at its n-th call. What it registers lives until it is given back, also if the
/// giving back panics; a registration that panics leaves nothing.
#[derive(Default)]
struct DeviceState {
    live: Mutex<BTreeSet<u64>>,
    /// Given back while it was not live.
    twice: AtomicU64,
    next: AtomicU64,
    calls: AtomicUsize,
    panics_at: AtomicUsize,
    /// Whether what it registers at once is short.
    is_short: bool,
}

type Device = Fake<DeviceState>;

/// Registers 8 pages at once.
fn short_device() -> Arc<Device> {
    Arc::new(Fake(DeviceState { is_short: true, ..DeviceState::default() }))
}

impl DeviceState {
    fn call(&self) {
        let call = self.calls.fetch_add(1, SeqCst) + 1;
        assert!(call != self.panics_at.load(SeqCst), "call {call}");
    }
}

impl FakeDevice for DeviceState {
    type Handle = u64;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, if self.is_short { 8 * 4096 } else { 1 << 30 }, 1 << 20)
    }

    fn granted(&self, wanted: Access) -> Access {
        self.call();
        wanted
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.call();
        range
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<u64, RegisterError> {
        self.call();
        let handle = self.next.fetch_add(1, SeqCst);
        self.live.lock().unwrap().insert(handle);
        Ok(handle)
    }

    fn deregister(&self, handle: u64, _: AddressRange) -> Result<(), DeregisterError> {
        if !self.live.lock().unwrap().remove(&handle) {
            self.twice.fetch_add(1, SeqCst);
        }
        self.call();
        Ok(())
    }
}

/// Reports changes in turn, and panics at its n-th call.
#[derive(Default)]
struct NervousState {
    calls: Device,
    changes: Mutex<Vec<AddressRange>>,
    notified: Mutex<u32>,
    event_count: Condvar,
}

type Nervous = Fake<NervousState>;

impl FakeMonitor for NervousState {
    fn check(&self) -> Result<Sequence, Lost> {
        self.calls.call();
        Ok(Sequence(self.changes.lock().unwrap().len() as u64))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        self.calls.call();
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.calls.call();
        false
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.calls.call();
        let changes = self.changes.lock().unwrap().clone();
        let (end, complete) = (changes.len() as u64, from != Position::NOWHERE);
        let seen = if complete { usize::try_from(from.0).unwrap() } else { changes.len() };
        for range in changes.into_iter().skip(seen) {
            visit(range);
            self.calls.call();
        }
        Replay { up_to: Position(end, 0), sequence: Sequence(end), complete, may_repeat: false }
    }

    fn has_slow_check(&self) -> bool {
        self.calls.call();
        true
    }

    fn change_surcharge(&self) -> u64 {
        self.calls.call();
        1
    }

    fn forked(&self) -> bool {
        self.calls.call();
        false
    }

    fn notified(&self) -> u32 {
        self.calls.call();
        *self.notified.lock().unwrap()
    }

    fn notify(&self) {
        self.calls.call();
        *self.notified.lock().unwrap() += 1;
        self.event_count.notify_all();
    }

    fn wait(&self, seen: u32) {
        self.calls.call();
        let count = self.notified.lock().unwrap();
        drop(self.event_count.wait_while(count, |count| *count == seen).unwrap());
    }
}

fn pages(first: usize, count: usize) -> AddressRange {
    AddressRange::new(0x7000_0000 + first * 4096, count * 4096).unwrap()
}

fn request<R: Simulated, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
) -> SimulatedRequest<'_, R, M> {
    SimulatedRequest::new(cache, range, Access::READ)
}

fn get<R: Simulated, M: Monitor>(cache: &Cache<R, M>, range: AddressRange) -> Lease<'_, R, M> {
    get_simulated(cache, range, Access::READ).unwrap()
}

fn get_once<R: Simulated, M: Monitor>(cache: &Cache<R, M>, range: AddressRange) -> Lease<'_, R, M> {
    request(cache, range).once().get().unwrap()
}

fn if_cached<R: Simulated, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
) -> Option<Lease<'_, R, M>> {
    request(cache, range).get_if_cached()
}

/// By costs of which some uses make up for keeping.
fn if_worth<R: Simulated, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
) -> Option<Lease<'_, R, M>> {
    let costs = UseCosts { per_use: 1000, hit: 10, keeping: 3000 };
    request(cache, range).get_if_worth(costs).unwrap()
}

/// Runs a step that may panic. Says whether it did not.
fn runs_through(step: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(step)).is_ok()
}

/// Every operation that asks the device for anything, each on its own. Says whether all ran through.
fn every_operation<R: Simulated, M: Monitor>(cache: &Cache<R, M>, check: &dyn Fn(&str)) -> bool {
    let mut all = true;
    let mut step = |name: &str, step: &dyn Fn()| {
        all &= runs_through(step);
        check(name);
    };
    step("misses and evictions", &|| (0..12).for_each(|page| drop(get(cache, pages(page, 1)))));
    step("hits and misses", &|| (8..14).for_each(|page| drop(get(cache, pages(page, 1)))));
    step("a larger region", &|| drop(get(cache, pages(8, 4))));
    step("per use", &|| drop(get_once(cache, pages(40, 1))));
    step("an end behind an invalidation", &|| {
        let lease = get(cache, pages(9, 1));
        cache.invalidate(pages(9, 1));
        drop(lease);
    });
    step("reclaiming", &|| {
        cache.reclaim();
    });
    step("a completion", &|| {
        drop(get(cache, pages(20, 2)));
        cache.invalidate_then(pages(20, 2), || ());
        cache.reclaim();
    });
    step("pieces", &|| {
        let pieces = request(cache, pages(64, 16)).pieces().unwrap();
        let _leases: Vec<_> = pieces.map(Result::unwrap).collect();
    });
    step("what is cached and what is not", &|| {
        drop(get(cache, pages(50, 1)));
        assert!(if_cached(cache, pages(51, 1)).is_none());
        drop(if_cached(cache, pages(50, 1)));
    });
    step("what is worth it by now", &|| {
        (0..6).for_each(|_| drop(if_worth(cache, pages(52, 1))));
    });
    step("behind a check", &|| {
        let checked = cache.check().unwrap();
        for page in [53, 54, 53] {
            drop(get_checked(&checked, pages(page, 1), Access::READ).unwrap());
            let start = std::ptr::without_provenance(pages(page, 1).start());
            let request = SimulatedRequest(checked.request(start, 4096, Access::READ));
            drop(request.once().get().unwrap());
        }
    });
    step("a buffer", &|| drop(cache.lease_buffer(vec![0_u8; 3 * 4096]).ok().unwrap()));
    step("a buffer longer than the device takes", &|| {
        let leased = cache.lease_buffer(vec![7_u8; 10 * 4096]).ok().unwrap();
        assert!(leased.into_inner().iter().all(|&byte| byte == 7));
    });
    step("giving up a range", &|| {
        cache.evict_idle_in(pages(0, 16));
    });
    step("giving up all", &|| {
        cache.evict_idle();
    });
    all
}

const KEEPS: [Keep; 3] = [Keep::WhenItPays, Keep::Always, Keep::Never];

/// For every n, until the device is asked less often than that.
fn panics_at_every_call<R: Simulated>(keep: Keep, make: impl Fn(&Arc<Device>) -> R, devices: u64) {
    let make = |device: &Arc<Device>, config| Cache::new(make(device), Fake(Calm), config).unwrap();
    panics_at_every_call_of(keep, make, devices);
}

fn panics_at_every_call_of<R: Simulated>(
    keep: Keep,
    make: impl Fn(&Arc<Device>, Config) -> Cache<R, Fake<Calm>>,
    devices: u64,
) {
    let config = Config { max_regions: 8, piece_bytes: 4 * 4096, keep, ..Config::default() };
    let calls = (1..).find(|&n| !panics_at_call(n, |device| make(device, config), devices));
    assert!(calls.is_some_and(|n| n > 40), "{keep:?}: {calls:?}");
}

/// Whether there was such a call.
fn panics_at_call<R: Simulated>(
    n: usize,
    make: impl Fn(&Arc<Device>) -> Cache<R, Fake<Calm>>,
    devices: u64,
) -> bool {
    let device = short_device();
    device.panics_at.store(n, SeqCst);
    let cache = make(&device);
    let keep = cache.config().keep;
    let check = |name: &str| {
        let statistics = cache.statistics();
        let live = device.live.lock().unwrap().len();
        assert_eq!(live as u64, devices * statistics.regions, "{keep:?}, call {n}: {name}");
        assert!(statistics.regions <= 8, "{keep:?}, call {n}: {name}");
    };
    let ran_through = every_operation(&cache, &check);
    if !ran_through {
        // Whatever it was, the cache works on.
        let lease = get(&cache, pages(0, 1));
        let hit = get(&cache, pages(0, 1));
        assert_eq!(lease.is_cached(), keep != Keep::Never);
        assert!(keep == Keep::Never || hit.registered() == lease.registered());
    }
    let ended = runs_through(|| drop(cache));
    assert!(device.live.lock().unwrap().is_empty(), "{keep:?}, call {n}: left behind");
    assert_eq!(device.twice.load(SeqCst), 0, "{keep:?}, call {n}: given back twice");
    let was_asked = device.calls.load(SeqCst) >= n;
    assert!(was_asked || ran_through && ended, "{keep:?}, call {n} is beyond the last");
    was_asked
}

#[test]
fn a_registrar_may_panic_at_any_call() {
    KEEPS.into_iter().for_each(|keep| panics_at_every_call(keep, Arc::clone, 1));
}

#[test]
fn each_of_two_registrars_may_panic_at_any_call() {
    for keep in KEEPS {
        panics_at_every_call(keep, |device| (Arc::clone(device), Arc::clone(device)), 2);
    }
}

#[test]
fn each_of_three_registrars_may_panic_at_any_call() {
    let three = |device: &Arc<Device>| (device.clone(), (device.clone(), device.clone()));
    panics_at_every_call(Keep::WhenItPays, three, 3);
    let three = |device: &Arc<Device>| [device.clone(), device.clone(), device.clone()];
    panics_at_every_call(Keep::Never, three, 3);
}

/// What changes while it panics is not found afterwards, and nothing is left behind.
#[test]
fn a_monitor_may_panic_at_any_call() {
    for n in 1.. {
        let (device, monitor) = (Arc::new(Device::default()), Arc::new(Nervous::default()));
        let clock = Some(Clock::new(read_clock));
        let config = Config { max_regions: 8, piece_bytes: 4 * 4096, clock, ..Config::default() };
        // A cache that cannot be made leaves nothing.
        let cache = Cache::new(Arc::clone(&device), Arc::clone(&monitor), config).unwrap();
        monitor.calls.calls.store(0, SeqCst);
        monitor.calls.panics_at.store(n, SeqCst);
        let check = |name: &str| {
            let live = device.live.lock().unwrap().len();
            assert_eq!(live as u64, cache.statistics().regions, "call {n}: {name}");
        };
        for _ in 0..3 {
            every_operation(&cache, &check);
            monitor.changes.lock().unwrap().extend([pages(8, 1), pages(64, 16)]);
        }
        let asked = monitor.calls.calls.load(SeqCst);
        monitor.calls.panics_at.store(0, SeqCst);
        let lease = get(&cache, pages(8, 1));
        monitor.changes.lock().unwrap().push(pages(8, 1));
        assert!(lease.is_invalidated(), "call {n}");
        drop(lease);
        cache.evict_idle();
        check("at the end");
        assert_eq!(cache.statistics().regions, 0, "call {n}");
        monitor.calls.calls.store(0, SeqCst);
        monitor.calls.panics_at.store(n, SeqCst);
        runs_through(|| std::mem::forget(get(&cache, pages(0, 1))));
        let _panicked = runs_through(|| drop(cache));
        assert!(device.live.lock().unwrap().is_empty(), "call {n}: left behind");
        assert_eq!(device.twice.load(SeqCst), 0, "call {n}: given back twice");
        if asked < n {
            assert!(n > 60, "call {n} is beyond the last");
            return;
        }
    }
}

/// With a thread that reclaims.
fn reclaiming(device: &Arc<Device>, monitor: &Arc<Nervous>) -> Cache<Arc<Device>, Arc<Nervous>> {
    let config = Config { max_regions: 8, piece_bytes: 4 * 4096, ..Config::keeping_all() };
    let mut cache = Cache::new(Arc::clone(device), Arc::clone(monitor), config).unwrap();
    let started = cache.start_reclaimer(|reclaimer| Ok(thread::spawn(|| reclaimer.run())));
    started.unwrap();
    cache
}

/// On the thread that reclaims a panic has nowhere to go; what it has left is the next round's.
#[test]
fn a_registrar_may_panic_at_any_call_of_the_thread_that_reclaims() {
    for n in 1..=3 {
        let (device, monitor) = (Arc::new(Device::default()), Arc::new(Nervous::default()));
        let cache = reclaiming(&device, &monitor);
        for round in 0..2 {
            let leases: Vec<_> = (0..3).map(|page| get(&cache, pages(page, 1))).collect();
            cache.invalidate(pages(0, 3));
            // Whatever the device is asked from here on it is asked by the thread.
            device.calls.store(0, SeqCst);
            device.panics_at.store(if round == 0 { n } else { 0 }, SeqCst);
            drop(leases);
            while cache.statistics().regions > 0 {
                thread::yield_now();
            }
            assert!(device.live.lock().unwrap().is_empty(), "call {n}");
            assert_eq!(device.calls.load(SeqCst), 3, "call {n}");
        }
        drop(cache);
        assert_eq!(device.twice.load(SeqCst), 0, "call {n}");
    }
}

/// It may end the thread: then what is invalidated goes with the next call, and the cache waits for no thread as it goes.
#[test]
fn a_monitor_may_panic_at_any_call_of_the_thread_that_reclaims() {
    for n in 1.. {
        let (device, monitor) = (Arc::new(Device::default()), Arc::new(Nervous::default()));
        let cache = reclaiming(&device, &monitor);
        monitor.calls.calls.store(0, SeqCst);
        monitor.calls.panics_at.store(n, SeqCst);
        for _ in 0..2 {
            every_operation(&cache, &|_| ());
            monitor.changes.lock().unwrap().push(pages(8, 1));
        }
        let asked = monitor.calls.calls.load(SeqCst);
        monitor.calls.panics_at.store(0, SeqCst);
        drop(get(&cache, pages(8, 1)));
        cache.evict_idle();
        assert_eq!(cache.statistics().regions, 0, "call {n}");
        assert!(device.live.lock().unwrap().is_empty(), "call {n}");
        drop(cache);
        assert_eq!(device.twice.load(SeqCst), 0, "call {n}: given back twice");
        if asked < n {
            assert!(n > 60, "call {n} is beyond the last");
            return;
        }
    }
}

/// Callbacks and completions that panic at any of their calls, and drop what panics when it is dropped.
#[test]
fn any_callback_may_panic() {
    for n in 1.. {
        let (cache, calls) = (cache(), Arc::new(Device::default()));
        calls.panics_at.store(n, SeqCst);
        let callback = || {
            let calls = Arc::clone(&calls);
            move || calls.call()
        };
        for round in 0..3 {
            let mut leases: Vec<_> = (0..3).map(|page| get(&cache, pages(page, 1))).collect();
            leases.push(get_once(&cache, pages(7, 1)));
            leases.iter_mut().for_each(|lease| lease.on_invalidate(callback()));
            cache.invalidate_then(pages(0, 2), callback());
            if round == 1 {
                leases[0].on_invalidate(callback());
            }
            drop(leases);
            cache.invalidate_then(pages(0, 9), callback());
            cache.reclaim();
            assert_eq!(cache.statistics().regions, 0, "callback {n}");
        }
        assert_eq!(cache.statistics().callback_panics, u64::from(calls.calls.load(SeqCst) >= n));
        if calls.calls.load(SeqCst) < n {
            assert!(n > 12, "callback {n} is beyond the last");
            return;
        }
    }
}

/// An account that panics at its device's n-th call, and has room for six registrations.
struct Purse {
    calls: Arc<Device>,
    taken: Mutex<Amount>,
}

impl Purse {
    fn change(&self, by: impl FnOnce(Amount) -> Amount) {
        let mut taken = self.taken.lock().unwrap();
        *taken = by(*taken);
    }
}

impl Account for Purse {
    fn take(&self, amount: Amount) -> Result<(), Refusal> {
        self.calls.call();
        if self.taken.lock().unwrap().regions == 6 {
            let (limit, wanted) = (Limit::SharedRegions, 1);
            let exhausted = Exhausted { limit, allowed: 6, held: 6, wanted };
            return Err(Refusal { exhausted, missing: amount });
        }
        self.change(|taken| taken + amount);
        Ok(())
    }

    fn overdraw(&self, amount: Amount) {
        self.calls.call();
        self.change(|taken| taken + amount);
    }

    fn give(&self, amount: Amount) {
        self.change(|taken| {
            assert!(amount.fits(taken), "given back twice");
            taken - amount
        });
        self.calls.call();
    }

    fn recall(&self, _: Amount) -> bool {
        self.calls.call();
        false
    }

    fn refused(&self, _: RegisterError, _: Amount) -> bool {
        self.calls.call();
        false
    }

    fn settle(&self) {
        self.calls.call();
    }

    fn attach(&self, _: Weak<dyn Lender>) {}
}

impl Drop for Purse {
    fn drop(&mut self) {
        assert_eq!(*self.taken.lock().unwrap(), Amount::ZERO, "not all was given back");
    }
}

#[test]
fn an_account_may_panic_at_any_call() {
    let make = |device: &Arc<Device>, config| {
        let purse = Purse { calls: Arc::clone(device), taken: Mutex::default() };
        Cache::with_account(Arc::clone(device), Fake(Calm), config, Arc::new(purse)).unwrap()
    };
    KEEPS.into_iter().for_each(|keep| panics_at_every_call_of(keep, make, 1));
}

type Besides = Box<dyn Fn(u64)>;

thread_local! {
    /// What a reading of this thread's clock does besides, by its number.
    static CLOCK: RefCell<Option<Besides>> = const { RefCell::new(None) };
    static READINGS: Cell<u64> = const { Cell::new(0) };
}

/// A clock that is the program's.
fn read_clock() -> u64 {
    let reading = READINGS.get() + 1;
    READINGS.set(reading);
    // Taken out, so that a reading from inside is none of the program's.
    if let Some(besides) = CLOCK.take() {
        let ended = catch_unwind(AssertUnwindSafe(|| besides(reading)));
        CLOCK.set(Some(besides));
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    1000 * reading
}

/// Its readings have nowhere to panic to: each is counted, and the operation goes on.
#[test]
fn a_clock_may_panic_at_any_reading() {
    let mut n = 0;
    loop {
        n += 1;
        READINGS.set(0);
        CLOCK.set(Some(Box::new(move |reading| assert!(reading != n, "reading {n}"))));
        let device = Arc::new(Device::default());
        let clock = Some(Clock::new(read_clock));
        let config = Config { max_regions: 8, piece_bytes: 4 * 4096, clock, ..Config::default() };
        let cache = Cache::new(Arc::clone(&device), Fake(Calm), config).unwrap();
        let check = |name: &str| {
            let live = device.live.lock().unwrap().len();
            assert_eq!(live as u64, cache.statistics().regions, "reading {n}: {name}");
        };
        assert!(every_operation(&cache, &check), "reading {n}");
        let panics = cache.statistics().callback_panics;
        drop(cache);
        assert!(device.live.lock().unwrap().is_empty(), "reading {n}: left behind");
        if READINGS.get() < n {
            assert!(n > 20 && panics == 0, "reading {n} is beyond the last");
            break;
        }
        assert!(panics == 1 || READINGS.get() == n, "reading {n}");
    }
    CLOCK.set(None);
}

static TIMED: OnceLock<Cache<Arc<Device>, Fake<Calm>>> = OnceLock::new();

/// It is read with no lock held.
#[test]
fn a_clock_may_use_the_cache() {
    let clock = Some(Clock::new(read_clock));
    let config = Config { max_regions: 8, clock, ..Config::default() };
    TIMED.set(Cache::new(Arc::default(), Fake(Calm), config).unwrap()).ok().unwrap();
    let cache = TIMED.get().unwrap();
    CLOCK.set(Some(Box::new(|_| {
        drop(get(TIMED.get().unwrap(), pages(90, 1)));
        TIMED.get().unwrap().evict_idle();
    })));
    assert!(every_operation(cache, &|_| ()) && READINGS.get() > 20);
    CLOCK.set(None);
}

/// What panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "dropped");
    }
}

fn cache() -> Cache<Arc<Device>, Fake<Calm>> {
    Cache::new(Arc::default(), Fake(Calm), Config::default()).unwrap()
}

/// A callback whose captures panic when they are dropped ends with its lease, and the lease ends.
#[test]
fn what_a_callback_captured_may_panic_when_its_lease_ends() {
    let cache = cache();
    for per_use in [false, true] {
        let take = if per_use { get_once } else { get };
        let mut lease = take(&cache, pages(0, 1));
        let bomb = Bomb;
        lease.on_invalidate(move || std::mem::forget(bomb));
        drop(lease);
        cache.invalidate(pages(0, 1));
        cache.reclaim();
        assert_eq!(cache.statistics().regions, 0);
    }
    let mut lease = get(&cache, pages(0, 1));
    let bomb = Bomb;
    lease.on_invalidate(move || std::mem::forget(bomb));
    lease.on_invalidate(|| ());
    drop(lease);
    assert_eq!(cache.evict_idle(), 1);
}

/// Callbacks of leases that were forgotten go with the cache, each by itself; so does a completion that is never
/// due.
#[test]
fn what_callbacks_of_forgotten_leases_captured_may_panic_when_the_cache_goes() {
    let cache = cache();
    for _ in 0..3 {
        let mut lease = get(&cache, pages(0, 1));
        let (bomb, other) = (Bomb, Bomb);
        lease.on_invalidate(move || std::mem::forget(bomb));
        std::mem::forget(lease);
        std::mem::forget(get(&cache, pages(4, 1)));
        cache.invalidate_then(pages(4, 1), move || std::mem::forget(other));
    }
    drop(cache);
}

/// A callback that panics with something that panics when it is dropped does not take the callbacks
/// behind it along.
#[test]
fn what_a_panic_carries_may_panic() {
    let cache = cache();
    let (mut first, mut second) = (get(&cache, pages(0, 1)), get(&cache, pages(0, 1)));
    let ran = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&ran);
    first.on_invalidate(|| std::panic::panic_any(Bomb));
    second.on_invalidate(move || {
        count.fetch_add(1, SeqCst);
    });
    cache.invalidate(pages(0, 1));
    assert_eq!((ran.load(SeqCst), cache.statistics().callback_panics), (1, 1));
}

/// A registrar whose `deregister` asks the cache for room.
struct Reentering(Device);

static REENTERED: OnceLock<Cache<Fake<Reentering>, Fake<Calm>>> = OnceLock::new();

impl FakeDevice for Reentering {
    type Handle = u64;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<u64, RegisterError> {
        self.0.register(range, access)
    }

    fn deregister(&self, handle: u64, range: AddressRange) -> Result<(), DeregisterError> {
        let cache = REENTERED.get().unwrap();
        cache.evict_idle();
        cache.evict_idle_in(range);
        cache.reclaim();
        self.0.deregister(handle, range)
    }
}

/// It does not wait for what its own thread is giving back, nor for another that waits for it.
#[test]
fn a_deregistration_may_ask_for_evictions() {
    let config = Config { max_regions: 4, ..Config::default() };
    REENTERED
        .set(Cache::new(Fake(Reentering(Device::default())), Fake(Calm), config).unwrap())
        .ok()
        .unwrap();
    let cache = REENTERED.get().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                for page in 0..40 {
                    drop(get_simulated(cache, pages(100 * thread + page, 1), Access::READ));
                    cache.evict_idle();
                }
            });
        }
    });
    cache.evict_idle();
    assert_eq!(cache.statistics().regions, 0);
    assert!(cache.registrar().0.0.live.lock().unwrap().is_empty());
}

/// A registrar whose `register` asks for the bytes that it registers.
struct AsksForItself(Device);

static ASKS: OnceLock<Cache<Fake<AsksForItself>, Fake<Calm>>> = OnceLock::new();
static ANSWERS: Mutex<Vec<Option<GetError>>> = Mutex::new(Vec::new());

impl FakeDevice for AsksForItself {
    type Handle = u64;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<u64, RegisterError> {
        let asked = get_simulated(ASKS.get().unwrap(), range, access);
        ANSWERS.lock().unwrap().push(asked.err());
        self.0.register(range, access)
    }

    fn deregister(&self, handle: u64, range: AddressRange) -> Result<(), DeregisterError> {
        self.0.deregister(handle, range)
    }
}

/// It would wait for its own end.
#[test]
fn a_registrar_that_asks_for_what_it_registers_is_refused() {
    let asks = Fake(AsksForItself(Device::default()));
    ASKS.set(Cache::new(asks, Fake(Calm), Config::keeping_all()).unwrap()).ok().unwrap();
    let cache = ASKS.get().unwrap();
    drop(get(cache, pages(3, 2)));
    let refused = GetError::AwaitsItself { range: pages(3, 2) };
    assert_eq!(*ANSWERS.lock().unwrap(), [Some(refused)]);
    drop(get(cache, pages(3, 2)));
    assert_eq!(cache.statistics().hits, 1, "what was registered is kept");
}

/// Which of the program's values panic as a cache goes.
#[derive(Clone, Copy, Debug)]
struct Panics(u32);

impl Panics {
    const DEREGISTRATION: u32 = 1;
    const REGISTRAR: u32 = 2;
    const MONITOR: u32 = 4;
    const ACCOUNT: u32 = 8;
    const ALL: u32 = 15;
    const SETTLING: u32 = 64;

    fn at(self, place: u32) {
        assert!(self.0 & place == 0, "{place}");
    }
}

/// A part of a cache that counts its end, and then may panic.
struct Part {
    ended: Arc<AtomicUsize>,
    panics: Panics,
    place: u32,
}

impl Drop for Part {
    fn drop(&mut self) {
        self.ended.fetch_add(1, SeqCst);
        self.panics.at(self.place);
    }
}

struct LoudDevice(Device, Part);

impl FakeDevice for LoudDevice {
    type Handle = u64;

    fn limits(&self) -> RegistrarLimits {
        self.0.call();
        self.0.limits()
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<u64, RegisterError> {
        self.0.register(range, access)
    }

    fn deregister(&self, handle: u64, range: AddressRange) -> Result<(), DeregisterError> {
        self.1.panics.at(Panics::DEREGISTRATION);
        self.0.deregister(handle, range)
    }
}

struct LoudMonitor {
    _part: Part,
}

impl FakeMonitor for LoudMonitor {}

struct LoudAccount(Part);

impl Account for LoudAccount {
    fn take(&self, _: Amount) -> Result<(), Refusal> {
        Ok(())
    }

    fn overdraw(&self, _: Amount) {}

    fn give(&self, _: Amount) {}

    fn recall(&self, _: Amount) -> bool {
        false
    }

    fn refused(&self, _: RegisterError, _: Amount) -> bool {
        false
    }

    fn settle(&self) {
        self.0.panics.at(Panics::SETTLING);
    }

    fn attach(&self, _: Weak<dyn Lender>) {
        self.0.panics.at(16);
    }
}

/// The end of a cache goes on behind each slice that it gives back.
#[test]
fn a_cache_whose_budget_always_panics_ends_and_gives_all_back() {
    let device = Arc::new(Device::default());
    let panics = Panics(Panics::SETTLING);
    let budget =
        Arc::new(LoudAccount(Part { ended: Arc::default(), panics, place: Panics::ACCOUNT }));
    let config = Config::keeping_all();
    let cache = Cache::with_account(Arc::clone(&device), Fake(Calm), config, budget).unwrap();
    for page in 1..=400_usize {
        let range = AddressRange::new(page << 12, 4096).unwrap();
        let leased = catch_unwind(AssertUnwindSafe(|| {
            drop(get_simulated(&cache, range, Access::READ));
        }));
        assert!(leased.is_err(), "the budget was not asked");
    }
    assert_eq!(device.live.lock().unwrap().len(), 400);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(cache))).is_err());
    assert!(device.live.lock().unwrap().is_empty());
    assert_eq!(device.twice.load(SeqCst), 0);
}

/// Every part of a cache and its end.
fn loud_cache(
    panics: Panics,
    ended: &Arc<AtomicUsize>,
    config: Config,
) -> Result<Cache<Fake<LoudDevice>, Fake<LoudMonitor>>, String> {
    let part = |place| Part { ended: Arc::clone(ended), panics, place };
    let device = LoudDevice(Device::default(), part(Panics::REGISTRAR));
    device.0.panics_at.store(usize::from(panics.0 & 32 != 0), SeqCst);
    let (monitor, account) =
        (LoudMonitor { _part: part(Panics::MONITOR) }, LoudAccount(part(Panics::ACCOUNT)));
    Cache::with_account(Fake(device), Fake(monitor), config, Arc::new(account))
        .map_err(|e| e.to_string())
}

/// Whatever panics as a cache goes, every part of it ends, once, and one panic goes on; also where a panic is on its
/// way already.
#[test]
fn all_of_a_cache_may_panic_as_it_goes() {
    for panics in (0..=Panics::ALL).map(Panics) {
        for unwinding in [false, true] {
            let ended = Arc::new(AtomicUsize::new(0));
            let ran_through = runs_through(|| {
                let cache = loud_cache(panics, &ended, Config::keeping_all()).unwrap();
                drop(get(&cache, pages(0, 1)));
                drop(get(&cache, pages(2, 1)));
                assert!(!unwinding, "on its way");
            });
            assert_eq!(ran_through, panics.0 == 0 && !unwinding, "{panics:?}");
            assert_eq!(ended.load(SeqCst), 3, "{panics:?}");
        }
    }
}

/// The same where it never comes about: by a registrar's or an account's panic, or by an error.
#[test]
fn all_of_a_cache_may_panic_where_none_comes_about() {
    for panics in [Panics(Panics::ALL | 16), Panics(Panics::ALL | 32), Panics(Panics::ALL)] {
        let config =
            Config { max_regions: usize::from(panics.0 > Panics::ALL), ..Config::default() };
        let ended = Arc::new(AtomicUsize::new(0));
        assert!(!runs_through(|| drop(loud_cache(panics, &ended, config))), "{panics:?}");
        assert_eq!(ended.load(SeqCst), 3, "{panics:?}");
    }
}

/// A leased buffer and its registrar both panic as the lease ends; the buffer is freed.
#[test]
fn a_leased_buffer_may_panic_as_its_registrar_does() {
    let ended = Arc::new(AtomicUsize::new(0));
    let panics = Panics(Panics::ALL);
    let config = Config { keep: Keep::Never, ..Config::default() };
    let cache = loud_cache(panics, &ended, config).unwrap();
    let buffer = || {
        let part = Part { ended: Arc::clone(&ended), panics, place: Panics::REGISTRAR };
        BufferWith { bytes: vec![7; 3 * 4096], _companion: part }
    };
    assert!(!runs_through(|| drop(cache.lease_buffer(buffer()).ok().unwrap())));
    assert!(!runs_through(|| drop(cache.lease_buffer(buffer()).ok().unwrap().into_inner())));
    assert_eq!(ended.load(SeqCst), 2);
    assert!(!runs_through(|| drop(cache)));
}

/// Is asked a long time after each change, and sees whether the cache's lock is free meanwhile.
#[derive(Default)]
struct Patient {
    cache: OnceLock<Weak<Cache<Device, Fake<Patient>>>>,
    asked: AtomicU64,
    locked_out: AtomicU64,
}

impl Patient {
    /// Another thread takes the lock while this one is being asked.
    fn look(&self) {
        let Some(cache) = self.cache.get().and_then(Weak::upgrade) else { return };
        if self.locked_out.load(SeqCst) > 0 {
            return;
        }
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            cache.statistics();
            let _gone = done.send(());
        });
        let is_free = is_done.recv_timeout(Duration::from_secs(20)).is_ok();
        self.locked_out.fetch_add(u64::from(!is_free), SeqCst);
    }
}

impl FakeMonitor for Patient {
    /// Each time something else has changed.
    fn check(&self) -> Result<Sequence, Lost> {
        self.look();
        Ok(Sequence(1 + self.asked.fetch_add(1, SeqCst)))
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        let sequence = self.asked.load(SeqCst);
        Replay {
            up_to: Position(sequence, 0),
            sequence: Sequence(sequence),
            complete: true,
            may_repeat: false,
        }
    }
}

/// A monitor may wait for its own thread, as long as changes follow each other.
#[test]
fn no_lock_is_held_while_the_monitor_is_asked() {
    let cache =
        Cache::new(Device::default(), Fake(Patient::default()), Config::keeping_all()).unwrap();
    let cache = Arc::new(cache);
    cache.monitor().cache.set(Arc::downgrade(&cache)).unwrap();
    let steps: [(&str, &dyn Fn()); 7] = [
        ("a get", &|| drop(get(&cache, pages(0, 2)))),
        ("a lease that asks", &|| assert!(!get(&cache, pages(0, 2)).is_invalidated())),
        ("a check", &|| cache.check().map(drop).unwrap()),
        ("an invalidation", &|| cache.invalidate(pages(0, 1))),
        ("reclaiming", &|| _ = cache.reclaim()),
        ("eviction of a range", &|| _ = cache.evict_idle_in(pages(0, 2))),
        ("eviction", &|| _ = cache.evict_idle()),
    ];
    for (name, step) in steps {
        step();
        assert_eq!(cache.monitor().locked_out.load(SeqCst), 0, "{name}");
    }
    assert!(cache.monitor().asked.load(SeqCst) > 3);
}

/// Counts how often it is to notify, and sees nothing any more once it is lost: then its log is never complete, and
/// stands where it stood.
#[derive(Default)]
struct Counting {
    notified: AtomicU64,
    is_lost: AtomicBool,
}

impl FakeMonitor for Counting {
    fn check(&self) -> Result<Sequence, Lost> {
        if self.is_lost.load(SeqCst) { Err(Lost::Descriptor { errno: 9 }) } else { Calm.check() }
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { complete: !self.is_lost.load(SeqCst), ..Calm.replay(from, visit) }
    }

    fn notify(&self) {
        self.notified.fetch_add(1, SeqCst);
    }
}

fn counting() -> Cache<Device, Fake<Counting>> {
    Cache::new(Device::default(), Fake(Counting::default()), Config::keeping_all()).unwrap()
}

/// Its log says so for ever, and that is no news.
#[test]
fn the_loss_of_a_monitor_takes_all_regions_once() {
    let cache = counting();
    (0..10).for_each(|page| drop(get(&cache, pages(page, 1))));
    cache.monitor().is_lost.store(true, SeqCst);
    (0..5).for_each(|_| _ = cache.reclaim());
    (0..5).for_each(|_| _ = cache.evict_idle());
    let counts = cache.statistics();
    assert_eq!((counts.invalidations, counts.regions, counts.overflows), (10, 0, 0));
}

/// A long region stays named in the index as long as it is leased.
#[test]
fn hits_beside_a_leased_long_region_that_is_not_to_be_found_call_no_reclaimer() {
    const BLOCK: usize = 512;
    let cache = counting();
    let old = get(&cache, pages(BLOCK, 80 * BLOCK));
    drop(get(&cache, pages(0, 90 * BLOCK)));
    cache.reclaim();
    assert_eq!((cache.statistics().superseded, cache.statistics().regions), (1, 2));
    let before = cache.monitor().notified.load(SeqCst);
    // Each page of a block in the middle of both.
    (40 * BLOCK..41 * BLOCK).for_each(|page| drop(get(&cache, pages(page, 1))));
    assert_eq!(cache.monitor().notified.load(SeqCst), before);
    assert_eq!(cache.statistics().misses, 2);
    drop(old);
    assert!(cache.monitor().notified.load(SeqCst) > before);
    assert_eq!(cache.reclaim(), 1);
    assert_eq!(cache.statistics().regions, 1);
}
