//! What a program pays by the cache's decisions, beside registering for each use: with a device and a monitor that take
//! as long as they are told to.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)] // a test speaks

use pinfold_core::{
    Access, AddressRange, Cache, Change, Clock, Config, Cover, DeregisterError, Gets, Keep, Lost,
    MappingKind, OnDrop, Position, RegisterError, RegistrarLimits, Renewed, Replay, Sequence,
    SuspensionTerms, Uncovered, Unsupported, UseCosts, Watch, WhenFull,
};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Fake, FakeDevice, FakeMonitor, FakeSuspend, Handle, PAGE_BYTES,
    Protection, SimDevice, SimMonitor, SimRegistrar, SimulatedRequest,
};
use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

thread_local! {
    /// Whether the device has no room: it takes no time to say so.
    static IS_FULL: Cell<bool> = const { Cell::new(false) };
    /// So many pages are registered at once as soon as one of them is.
    static BLOCK_BEHIND: Cell<usize> = const { Cell::new(0) };
    static IS_REGISTERED: Cell<bool> = const { Cell::new(false) };
    /// Whether that lasts behind the end of the registration.
    static STAYS: Cell<bool> = const { Cell::new(false) };
    /// In nanoseconds. Each test, being a thread, has its own.
    static NOW: Cell<u64> = const { Cell::new(1) };
}

fn now() -> u64 {
    NOW.get()
}

fn spend(nanoseconds: u64) {
    NOW.set(now() + nanoseconds);
}

/// What things take, in nanoseconds.
#[derive(Clone, Copy)]
struct Costs {
    register: fn(AddressRange) -> u64,
    deregister: fn(AddressRange) -> u64,
    watch: fn(AddressRange) -> u64,
    check: u64,
    change: u64,
    /// What the device takes to say what it would count.
    widen: u64,
    /// So many pages it registers at once.
    block: usize,
}

const PLAIN: Costs = Costs {
    register: |_| 1_000,
    deregister: |_| 500,
    watch: |_| 1_000,
    check: 300,
    change: 40_000,
    widen: 0,
    block: 1,
};

struct Slow<T>(T, Costs);

impl FakeDevice for Slow<SimRegistrar> {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        spend(self.1.widen);
        let behind = if IS_REGISTERED.get() { BLOCK_BEHIND.get() } else { 0 };
        let block = self.1.block.max(behind) * PAGE_BYTES;
        let start = range.start() / block * block;
        AddressRange::between(start, range.end().next_multiple_of(block)).unwrap()
    }

    fn register(&self, range: AddressRange, rights: Access) -> Result<Handle, RegisterError> {
        spend((self.1.register)(range));
        let registered = self.0.register(range, rights);
        IS_REGISTERED.set(registered.is_ok());
        registered
    }

    fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        spend((self.1.deregister)(range));
        IS_REGISTERED.set(STAYS.get() && IS_REGISTERED.get());
        self.0.deregister(handle, range)
    }
}

impl FakeSuspend for Slow<SimRegistrar> {
    type Connection = u32;

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn can_suspend(&self, _: AddressRange, _: &[u32]) -> Result<(), Unsupported> {
        Ok(())
    }

    fn renew(
        &self,
        handle: Handle,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<Handle>, RegisterError> {
        Ok(Renewed::Changed(handle))
    }

    fn wait(&self, _: Duration) {}
}

impl FakeMonitor for Slow<SimMonitor> {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        spend(self.1.check);
        self.0.check()
    }

    fn watch(&self, range: AddressRange) -> Watch {
        spend((self.1.watch)(range));
        self.0.watch(range)
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.0.change_pending(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.0.replay(from, visit)
    }

    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover {
        self.0.coverage(mapping, change)
    }

    fn has_slow_check(&self) -> bool {
        true
    }

    fn change_surcharge(&self) -> u64 {
        self.1.change
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        self.0.notified()
    }

    fn notify(&self) {
        self.0.notify();
    }

    fn wait(&self, seen: u32) {
        self.0.wait(seen);
    }
}

struct World {
    cache: Cache<Fake<Slow<SimRegistrar>>, Fake<Slow<SimMonitor>>>,
    monitor: SimMonitor,
    space: Arc<AddressSpace>,
    costs: Costs,
}

fn pages(first: usize, count: usize) -> AddressRange {
    AddressRange::new(0x7000_0000 + first * PAGE_BYTES, count * PAGE_BYTES).unwrap()
}

impl World {
    fn new(costs: Costs, keep: Keep) -> Self {
        Self::with(costs, Config { keep, ..Config::default() }, DeviceConfig::default())
    }

    fn with(costs: Costs, config: Config, device: DeviceConfig) -> Self {
        let space = Arc::new(AddressSpace::new());
        space.map(pages(0, 5_000), Protection::ReadWrite);
        let registrar = SimRegistrar::new(&Arc::new(SimDevice::new(Arc::clone(&space), device)));
        let monitor = SimMonitor::new(&space);
        let clock = config.clock.or(Some(Clock::new(now)));
        let config = Config { clock, ..config };
        let slow = Fake(Slow(monitor.clone(), costs));
        let cache = Cache::new(Fake(Slow(registrar, costs)), slow, config).unwrap();
        Self { cache, monitor, space, costs }
    }

    fn request(
        &self,
        range: AddressRange,
        access: Access,
    ) -> SimulatedRequest<'_, Fake<Slow<SimRegistrar>>, Fake<Slow<SimMonitor>>> {
        SimulatedRequest::new(&self.cache, range, access)
    }

    /// One use. Whether it is kept.
    fn uses(&self, range: AddressRange, access: Access) -> bool {
        self.request(range, access).get().unwrap().is_cached()
    }

    fn reads(&self, range: AddressRange) -> bool {
        self.uses(range, Access::READ)
    }

    /// Reads a page by one who can do without at these costs, and does where nothing is worth having.
    fn does_without_unless_worth(&self, page: usize, costs: UseCosts) {
        let lease = self.request(pages(page, 1), Access::READ).get_if_worth(costs);
        if lease.unwrap().is_none() {
            spend(costs.per_use);
        }
    }

    fn changes(&self, range: AddressRange) {
        self.space.unmap(range);
        self.space.map(range, Protection::ReadWrite);
        self.cache.reclaim();
    }

    /// All that was paid until now.
    fn bill(&self) -> u64 {
        now() + self.cache.statistics().invalidations * self.costs.change
    }
}

/// What a turn of the program costs in this world once costs are learnt.
fn cost_in(world: &World, program: fn(&World)) -> u64 {
    cost_of(2_000, world, program)
}

/// What one turn costs, behind as many before.
fn cost_of(turns: u64, world: &World, program: impl Fn(&World)) -> u64 {
    (0..turns).for_each(|_| program(world));
    let before = world.bill();
    (0..turns).for_each(|_| program(world));
    (world.bill() - before) / turns
}

fn cost(costs: Costs, keep: Keep, program: fn(&World)) -> u64 {
    cost_in(&World::new(costs, keep), program)
}

/// Registering and deregistering are the lesser part of what a use costs that is not kept.
#[test]
fn what_surrounds_a_registration_is_a_part_of_its_price() {
    let costs = Costs { widen: 3_000, ..PLAIN };
    let program = |world: &World| {
        (0..32).for_each(|_| _ = world.reads(pages(0, 1)));
        world.changes(pages(0, 1));
    };
    let [ours, kept, rented] =
        [Keep::WhenItPays, Keep::Always, Keep::Never].map(|keep| cost(costs, keep, program));
    assert!(kept < rented * 3 / 4, "{kept} of {rented}");
    assert!(ours <= kept + kept / 20, "{ours}, {kept} if kept always, {rented} if never");
}

/// Where no region can be mistaken for what is asked for, few ask the monitor.
#[test]
fn what_is_registered_for_each_use_pays_no_check() {
    let [free, dear] = [0, 100_000].map(|check| {
        let program = |world: &World| (0..100).for_each(|at| _ = world.reads(pages(at % 3, 1)));
        let world = |keep| World::new(Costs { check, ..PLAIN }, keep);
        [Keep::Never, Keep::WhenItPays].map(|keep| cost_of(100, &world(keep), program))
    });
    for (dear, free) in dear.into_iter().zip(free) {
        assert!(dear < free + 20 * 100_000, "{dear}, {free} where a check is free");
    }
}

/// What is measured of the one range in turn is not what is measured of the other: the end of the header is dear.
#[test]
fn ranges_that_are_used_in_turn_are_all_measured() {
    fn end(range: AddressRange) -> u64 {
        if range.len() == PAGE_BYTES { 50_000 } else { 500 }
    }
    let costs = Costs { deregister: end, check: 1_200, change: 20_000, ..PLAIN };
    let program = |world: &World| {
        world.reads(pages(16, 16));
        world.reads(pages(0, 1));
        world.changes(pages(16, 16));
    };
    let (ours, rented) =
        (cost(costs, Keep::WhenItPays, program), cost(costs, Keep::Never, program));
    assert!(ours * 5 < rented, "{ours} of {rented}");
}

/// The first registration of a length took a hundred times as long as all that follow.
#[test]
fn one_dear_registration_makes_no_range_worth_keeping() {
    fn cold_once(range: AddressRange) -> u64 {
        thread_local! {
            static IS_WARM: Cell<bool> = const { Cell::new(false) };
        }
        let is_data = range.len() != PAGE_BYTES;
        if is_data && !IS_WARM.replace(true) { 400_000 } else { 3_000 }
    }
    let world = World::new(Costs { register: cold_once, ..PLAIN }, Keep::WhenItPays);
    for _ in 0..20_000 {
        for range in [pages(16, 16), pages(0, 1)] {
            world.reads(range);
            world.changes(range);
        }
    }
    let watched = world.monitor.watch_calls();
    // One in 8 times 11 of each, and what was believed before others were measured.
    assert!(watched < 1_500, "{watched}");
}

/// No monitor watches it, which takes no time.
#[test]
fn what_is_vouched_for_teaches_nothing_of_what_watching_costs() {
    let costs = Costs { watch: |_| 50_000, check: 100, change: 0, ..PLAIN };
    let program = |world: &World| {
        for other in 0..8 {
            drop(world.request(pages(32 + other, 1), Access::READ).vouched().get());
        }
        world.cache.invalidate(pages(32, 8));
        world.reads(pages(0, 1));
        world.changes(pages(0, 1));
    };
    let (ours, rented) =
        (cost(costs, Keep::WhenItPays, program), cost(costs, Keep::Never, program));
    assert!(ours * 100 < rented * 105, "{ours} of {rented}");
}

/// A region with more rights takes the place of the first, and the hits of both pay.
#[test]
fn uses_before_more_rights_are_asked_for_count() {
    let program = |world: &World| {
        (0..80).for_each(|_| _ = world.reads(pages(0, 1)));
        world.uses(pages(0, 1), Access::READ_WRITE);
        world.changes(pages(0, 1));
    };
    let (ours, best) = (cost(PLAIN, Keep::WhenItPays, program), cost(PLAIN, Keep::Always, program));
    assert!(ours * 100 < best * 105, "{ours} of {best}");
}

/// What no use was paid for makes nothing pay that comes after it.
#[test]
fn hits_of_what_was_vouched_for_make_no_purchase_pay() {
    let program = |world: &World| {
        for _ in 0..80 {
            drop(world.request(pages(0, 1), Access::READ).vouched().get());
        }
        world.uses(pages(0, 1), Access::READ_WRITE);
        world.changes(pages(0, 1));
        world.cache.invalidate(pages(0, 1));
    };
    let costs = Costs { check: 10, ..PLAIN };
    let (ours, never) = (cost(costs, Keep::WhenItPays, program), cost(costs, Keep::Never, program));
    assert!(ours < never + 2_000, "{ours} of {never}");
}

/// Rights that do not contain those that were bought: neither are its hits theirs, nor is its account.
#[test]
fn hits_of_what_was_vouched_for_judge_no_purchase() {
    let program = |world: &World| {
        world.reads(pages(0, 1));
        for _ in 0..80 {
            drop(world.request(pages(0, 1), Access::WRITE).vouched().get());
        }
        world.cache.invalidate(pages(0, 1));
        world.changes(pages(0, 1));
    };
    let costs = Costs { check: 10, ..PLAIN };
    let (ours, never) = (cost(costs, Keep::WhenItPays, program), cost(costs, Keep::Never, program));
    assert!(ours < never + 2_000, "{ours} of {never}");
}

/// As many gets, of which one asks for more rights and means to keep them.
#[test]
fn what_a_purchase_spared_is_not_lost_to_one_that_is_kept_unasked() {
    let program = |world: &World| {
        (0..150).for_each(|_| _ = world.reads(pages(0, 1)));
        drop(world.request(pages(0, 1), Access::READ_WRITE).to_keep().get().unwrap());
        world.changes(pages(0, 1));
    };
    let (ours, best) = (cost(PLAIN, Keep::WhenItPays, program), cost(PLAIN, Keep::Always, program));
    assert!(ours * 100 < best * 105, "{ours} of {best}");
}

/// Once in each life rights are asked for that the memory has not, vouched for or not.
#[test]
fn a_request_that_fails_ends_no_purchase() {
    fn program(world: &World, fails: impl Fn() -> bool) {
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        world.cache.reclaim();
        (0..150).for_each(|_| _ = world.reads(pages(0, 1)));
        assert!(fails());
        (0..150).for_each(|_| _ = world.reads(pages(0, 1)));
    }
    let programs: [fn(&World); 2] = [
        |world| {
            let write = || world.request(pages(0, 1), Access::READ_WRITE);
            program(world, || write().get().is_err());
        },
        |world| {
            let write = || world.request(pages(0, 1), Access::WRITE).vouched();
            program(world, || write().get().is_err());
        },
    ];
    for program in programs {
        let [ours, best] = [Keep::WhenItPays, Keep::Always].map(|keep| cost(PLAIN, keep, program));
        assert!(ours * 100 < best * 105, "{ours} of {best}");
    }
}

/// While a range is bought, a request of other rights that is watched and refused, again and again.
#[test]
fn other_rights_are_paid_for_too() {
    let costs = Costs { watch: |_| 50_000, change: 10_000, ..PLAIN };
    let program = |world: &World| {
        if world.monitor.watch_calls() == 0 {
            world.space.unmap(pages(0, 1));
            world.space.map(pages(0, 1), Protection::ReadOnly);
        }
        assert!(world.request(pages(0, 1), Access::READ_WRITE).get().is_err());
        (0..4).for_each(|_| _ = world.reads(pages(0, 1)));
    };
    let [ours, never] = [Keep::WhenItPays, Keep::Never].map(|keep| cost(costs, keep, program));
    assert!(ours < never, "{ours} of {never}");
}

/// A caller that can do without, where nothing is kept: the settings leave no room, or a peer is to use it.
#[test]
fn what_is_never_kept_is_given_up_by_those_who_can_do_without() {
    let when_full = WhenFull::RegisterPerUse;
    let config = Config { max_regions: 1, when_full, ..Config::default() };
    let costs = UseCosts { per_use: 40, hit: 10, keeping: 1_000 };
    let cases = [false, true].map(|is_bought| {
        [Access::READ, Access::READ | Access::REMOTE_READ].map(|access| (is_bought, access))
    });
    for (is_bought, access) in cases.into_iter().flatten() {
        let world = World::with(PLAIN, config, DeviceConfig::default());
        let bought = if is_bought { pages(0, 1) } else { pages(9, 1) };
        let held = (0..1_000).find_map(|_| {
            let lease = world.request(bought, Access::WRITE).get().unwrap();
            lease.is_cached().then_some(lease)
        });
        assert!(held.is_some());
        let leased = (0..1_000).filter(|_| {
            let lease = world.request(pages(0, 1), access).get_if_worth(costs).unwrap();
            lease.is_some_and(|lease| !lease.is_cached())
        });
        let leased = leased.count();
        // What is never kept is known beforehand.
        let fewest = usize::from(!access.is_remote());
        assert!((fewest..=30).contains(&leased), "{leased}, {is_bought}, {access:?}");
        drop(held);
    }
}

/// What such a caller cannot have, though it would cost nothing to keep it, takes nothing of what others have paid.
#[test]
fn a_harmless_request_that_fails_ends_no_account() {
    let program = |world: &World| {
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        world.cache.reclaim();
        let costs = UseCosts { per_use: 100_000, hit: 10, keeping: 1_000 };
        let write = || world.request(pages(0, 1), Access::READ_WRITE);
        drop(write().get_if_worth(costs));
        (0..200).for_each(|_| _ = world.reads(pages(0, 1)));
    };
    let [ours, best] = [Keep::WhenItPays, Keep::Always].map(|keep| cost(PLAIN, keep, program));
    assert!(ours * 100 < best * 105, "{ours} of {best}");
}

/// To keep costs hardly more than to register, but for what is asked about what is kept.
#[test]
fn what_is_asked_of_what_is_kept_is_a_part_of_the_price_of_keeping() {
    let costs = Costs { widen: 20_000, watch: |_| 100, check: 100, change: 0, ..PLAIN };
    let program = |world: &World| {
        world.reads(pages(0, 1));
        world.changes(pages(0, 1));
    };
    let [ours, never] = [Keep::WhenItPays, Keep::Never].map(|keep| cost(costs, keep, program));
    assert!(ours * 100 < never * 115, "{ours} of {never}");
}

/// As long as it takes to look at it.
#[test]
fn what_the_clock_takes_is_no_part_of_any_price() {
    fn slow() -> u64 {
        spend(1_000);
        now()
    }
    let program = |world: &World| {
        (0..10).for_each(|_| _ = world.reads(pages(0, 1)));
        world.changes(pages(0, 1));
    };
    let turns = |clock: fn() -> u64| {
        let config = Config { clock: Some(Clock::new(clock)), ..Config::default() };
        let world = World::with(PLAIN, config, DeviceConfig::default());
        (0..4_000).for_each(|_| program(&world));
        world.monitor.watch_calls()
    };
    let [quick, slow] = [now as fn() -> u64, slow].map(turns);
    assert!(slow < 2 * quick + 100, "{slow}, {quick} by a quick clock");
}

/// The device is full where the settings are not. What is tried again when there is room was not kept in vain, also where
/// it is more than was asked for.
#[test]
fn what_a_full_device_refuses_first_is_kept_from_its_first_use() {
    for block in [1, 4] {
        let max_pinned_bytes = (8 * block * PAGE_BYTES) as u64;
        let room = DeviceConfig { max_pinned_bytes, ..DeviceConfig::default() };
        let costs = Costs { change: 20_000, block, ..PLAIN };
        let world = World::with(costs, Config::default(), room);
        let run = |number: usize| {
            let before = world.cache.statistics().not_admitted;
            (0..60).for_each(|_| _ = world.reads(pages(number % 9 * block, 1)));
            world.cache.statistics().not_admitted - before
        };
        (0..100).for_each(|number| _ = run(number));
        assert_eq!((100..200).map(run).sum::<u64>(), 0, "{block}");
        assert!(world.cache.statistics().evictions > 100, "{}", world.cache.statistics());
    }
}

/// The device is full of what is leased, and refuses each try.
#[test]
fn what_a_full_device_refuses_for_good_is_tried_ever_more_seldom() {
    let room = DeviceConfig { max_pinned_bytes: PAGE_BYTES as u64, ..DeviceConfig::default() };
    let world = World::with(PLAIN, Config::default(), room);
    (0..100).for_each(|_| _ = world.reads(pages(0, 1)));
    let held = world.request(pages(9, 1), Access::READ).once().get().unwrap();
    let before = world.monitor.watch_calls();
    for _ in 0..4_000 {
        assert!(world.request(pages(0, 1), Access::READ).get().is_err());
    }
    let watched = world.monitor.watch_calls() - before;
    // Of 36 uses one, of 72, of 144, and so on.
    assert!(watched < 25, "{watched}");
    drop(held);
}

/// The device has no room for the first try, in each of many lives of one use: the second try is the same purchase.
#[test]
fn what_is_tried_again_takes_no_hits_of_what_was_vouched_for() {
    let room = DeviceConfig { max_pinned_bytes: 2 * PAGE_BYTES as u64, ..DeviceConfig::default() };
    let world = World::with(Costs { check: 10, ..PLAIN }, Config::default(), room);
    let vouched = |range| {
        drop(world.request(range, Access::READ).vouched().get().unwrap());
    };
    let life = || {
        vouched(pages(9, 1));
        (0..200).for_each(|_| vouched(pages(0, 1)));
        let is_kept = world.uses(pages(0, 1), Access::READ_WRITE);
        world.cache.invalidate(pages(9, 1));
        world.cache.invalidate(pages(0, 1));
        world.changes(pages(0, 1));
        is_kept
    };
    (0..500).for_each(|_| _ = life());
    let kept = (0..1_000).filter(|_| life()).count();
    assert!(kept < 50, "{kept}");
}

/// A long range once in each life, and a page of it again and again: what those spare is what a page costs.
#[test]
fn hits_of_a_part_pay_for_a_part() {
    fn by_length(range: AddressRange) -> u64 {
        range.len() as u64 / 4
    }
    let costs = Costs { register: by_length, deregister: |_| 100, change: 50_000, ..PLAIN };
    fn program<const PARTS: usize>(world: &World) {
        world.reads(pages(0, 64));
        (0..PARTS).for_each(|_| _ = world.reads(pages(3, 1)));
        world.changes(pages(0, 64));
    }
    let bill = |program| [Keep::WhenItPays, Keep::Never].map(|keep| cost(costs, keep, program));
    let [few, rented] = bill(program::<12>);
    assert!(few * 100 < rented * 115, "{few} of {rented}");
    let [many, rented] = bill(program::<100>);
    assert!(many * 6 < rented * 5, "{many} of {rented}");
}

/// Dear ranges whose keeping paid are unmapped for good, and their accounts are in no other's way.
#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn what_was_dear_and_is_gone_is_not_in_the_way() {
    fn by_length(range: AddressRange) -> u64 {
        if range.len() > PAGE_BYTES { 250_000 } else { 1_000 }
    }
    let costs = Costs { register: by_length, ..PLAIN };
    let config = Config { max_regions: 8_000, max_bytes: 1 << 40, ..Config::default() };
    let world = World::with(costs, config, DeviceConfig::default());
    world.space.map(pages(5_000, 60_000), Protection::ReadWrite);
    for dear in 0..3_000 {
        (0..300).for_each(|_| _ = world.reads(pages(5_000 + 16 * dear, 16)));
    }
    world.changes(pages(5_000, 48_000));
    let before = world.cache.statistics().not_admitted;
    for _ in 0..300 {
        (0..64).for_each(|cheap| _ = world.reads(pages(cheap, 1)));
    }
    let rented = world.cache.statistics().not_admitted - before;
    // 35 of each if nothing were there before.
    assert!(rented < 2 * 64 * 35, "{rented}");
}

/// Many more than accounts can be kept of, in turn: each is kept in the end.
#[test]
#[cfg_attr(miri, ignore = "takes hours")]
fn however_many_buffers_are_used_on_and_on_they_are_kept() {
    const BUFFERS: usize = 4_000;
    let config = Config { max_regions: 8_000, max_bytes: 1 << 30, ..Config::default() };
    let costs = Costs { change: 20_000, ..PLAIN };
    let world = World::with(costs, config, DeviceConfig::default());
    for _ in 0..200 {
        (0..BUFFERS).for_each(|number| _ = world.reads(pages(number, 1)));
    }
    assert!((0..BUFFERS).all(|number| world.reads(pages(number, 1))));
}

/// What `program` costs a turn once costs are learnt, in a world that was prepared: by these decisions, and if nothing is kept.
fn beside_renting(
    costs: Costs,
    config: Config,
    prepare: fn(&World),
    program: fn(&World),
) -> [u64; 2] {
    [Keep::WhenItPays, Keep::Never].map(|keep| {
        let world = World::with(costs, Config { keep, ..config }, DeviceConfig::default());
        prepare(&world);
        cost_in(&world, program)
    })
}

/// The monitor takes its time to say that it cannot watch something, whatever it takes to watch other memory.
#[test]
fn what_cannot_be_watched_is_asked_about_ever_more_seldom() {
    fn watch(range: AddressRange) -> u64 {
        if range == pages(0, 1) { 50_000 } else { 100 }
    }
    let prepare = |world: &World| world.monitor.uncover(pages(0, 1), Uncovered::Unmapped);
    let program = |world: &World| _ = world.reads(pages(0, 1));
    let beside_others = |world: &World| {
        world.reads(pages(0, 1));
        world.reads(pages(9, 1));
        world.changes(pages(9, 1));
    };
    for program in [program, beside_others] {
        for change in [0, 100] {
            let costs = Costs { watch, change, check: 10, ..PLAIN };
            let [ours, never] = beside_renting(costs, Config::default(), prepare, program);
            assert!(ours < never * 5 / 4, "{ours} of {never}, {change}");
        }
    }
}

/// Short ranges are watched at once, a long one is not.
#[test]
fn what_watching_takes_is_learnt_by_length() {
    fn by_length(range: AddressRange) -> u64 {
        if range.len() == PAGE_BYTES { 100 } else { 200_000 }
    }
    let program = |world: &World| {
        for page in 0..16 {
            world.reads(pages(page, 1));
            world.changes(pages(page, 1));
        }
        world.reads(pages(100, 16));
        world.changes(pages(100, 16));
    };
    for change in [0, 3_000] {
        let costs = Costs { watch: by_length, change, check: 10, ..PLAIN };
        let [ours, never] = beside_renting(costs, Config::default(), |_| (), program);
        assert!(ours < never * 5 / 4, "{ours} of {never}, {change}");
    }
}

/// One that can do without asks for rights that are never kept, and others use the bytes on and on.
#[test]
fn what_is_never_kept_keeps_nothing_else_from_being_kept() {
    for keeping in (30_000..60_000).step_by(5_000) {
        let remote = UseCosts { per_use: 8_000, hit: 10, keeping };
        let world = World::new(Costs { check: 10, ..PLAIN }, Keep::WhenItPays);
        let access = Access::READ | Access::REMOTE_READ;
        let kept = (0..1_000).filter(|_| {
            drop(world.request(pages(0, 1), access).get_if_worth(remote));
            world.reads(pages(0, 1))
        });
        let kept = kept.count();
        assert!(kept > 900, "{kept}, {keeping}");
    }
}

/// How many of 2,000 gets of a page are refused.
fn gets_refused(world: &World) -> usize {
    let gets = (0..2_000).filter(|_| {
        let refused = world.request(pages(0, 1), Access::READ).get().is_err();
        world.cache.reclaim();
        refused
    });
    gets.count()
}

/// The kernel counts more than was planned as soon as it is registered, and there is no room for that.
#[test]
fn what_counts_more_than_there_is_room_for_is_bought_ever_more_seldom() {
    BLOCK_BEHIND.set(16);
    for when_full in [WhenFull::RegisterPerUse, WhenFull::Refuse] {
        let costs = Costs { watch: |_| 50_000, change: 5_000, check: 10, ..PLAIN };
        let config = Config { when_full, max_bytes: 8 * PAGE_BYTES, ..Config::default() };
        let world = World::with(costs, config, DeviceConfig::default());
        let refused = gets_refused(&world);
        let watched = world.monitor.watch_calls();
        assert!((1..80).contains(&watched), "{watched}, {when_full:?}");
        assert_eq!(refused, 0, "{when_full:?}");
    }
}

/// A full device refuses at once, and is asked until there is room.
#[test]
fn what_was_refused_was_not_paid_for() {
    fn register(_: AddressRange) -> u64 {
        if IS_FULL.get() { 20 } else { 1_000 }
    }
    let bill = |keep| {
        const LIVES: u64 = 200;
        let room = DeviceConfig { max_pinned_bytes: PAGE_BYTES as u64, ..DeviceConfig::default() };
        let costs = Costs { register, check: 10, ..PLAIN };
        let world = World::with(costs, Config { keep, ..Config::default() }, room);
        let life = || {
            let held = world.request(pages(9, 1), Access::READ).once().get().unwrap();
            IS_FULL.set(true);
            for _ in 0..228 {
                assert!(world.request(pages(0, 1), Access::READ).get().is_err());
            }
            IS_FULL.set(false);
            drop(held);
            world.reads(pages(0, 1));
            world.changes(pages(0, 1));
        };
        (0..LIVES).for_each(|_| life());
        let before = world.bill();
        (0..LIVES).for_each(|_| life());
        (world.bill() - before) / LIVES
    };
    let [ours, never] = [Keep::WhenItPays, Keep::Never].map(bill);
    assert!(ours < never * 5 / 4, "{ours} of {never}");
}

/// Each use is refused once for want of room, which is made, and then had.
#[test]
fn a_use_that_is_tried_again_is_paid_for_once() {
    let uses = [false, true].map(|is_refused| {
        let room = DeviceConfig { max_pinned_bytes: PAGE_BYTES as u64, ..DeviceConfig::default() };
        let world = World::with(Costs { check: 10, ..PLAIN }, Config::default(), room);
        (0..300).for_each(|_| _ = world.reads(pages(20, 1)));
        world.changes(pages(20, 1));
        let is_kept = |_: &usize| {
            if is_refused {
                drop(world.request(pages(9, 1), Access::READ).to_keep().get().unwrap());
            }
            world.reads(pages(0, 1))
        };
        (1..100_usize).find(is_kept)
    });
    let [once, again] = uses.map(Option::unwrap);
    assert!(again + 2 >= once, "kept from use {again} on, {once} if none is refused");
}

/// Nothing of its length was ever registered, so that nothing is known of what that takes.
#[test]
fn what_is_refused_for_good_is_not_watched_for_ever() {
    let prepare = |world: &World| {
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
    };
    let program = |world: &World| {
        assert!(world.request(pages(0, 1), Access::READ_WRITE).get().is_err());
    };
    for change in [0, 100] {
        let costs = Costs { watch: |_| 50_000, change, check: 10, ..PLAIN };
        let [ours, never] = beside_renting(costs, Config::default(), prepare, program);
        assert!(ours < never * 5 / 4, "{ours} of {never}, {change}");
    }
}

/// Requests to write, which are refused each time, take turns with reads, whatever keeping costs.
#[test]
fn what_is_refused_each_time_keeps_nothing_else_from_being_kept() {
    for change in (30_000..33_200).step_by(400).chain((32_600..32_800).step_by(40)) {
        let world = World::new(Costs { check: 10, change, ..PLAIN }, Keep::WhenItPays);
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        let kept = (0..1_000).filter(|_| {
            assert!(world.request(pages(0, 1), Access::WRITE).get().is_err());
            world.reads(pages(0, 1))
        });
        let kept = kept.count();
        assert!(kept > 800, "{kept}, {change}");
    }
}

/// One answer of the monitor's took four milliseconds, of a range that it cannot watch.
#[test]
fn one_slow_answer_makes_no_other_range_dear() {
    thread_local! {
        static IS_SLOW: Cell<bool> = const { Cell::new(false) };
    }
    fn watch(_: AddressRange) -> u64 {
        if IS_SLOW.replace(false) { 4_000_000 } else { 100 }
    }
    let bill = |keep| {
        const TURNS: u64 = 300;
        let world = World::new(Costs { watch, change: 5_000, check: 10, ..PLAIN }, keep);
        let turn = || {
            (0..500).for_each(|_| _ = world.reads(pages(16, 1)));
            world.changes(pages(16, 1));
        };
        (0..20).for_each(|_| turn());
        world.monitor.uncover(pages(0, 1), Uncovered::Unmapped);
        IS_SLOW.set(true);
        (0..100).for_each(|_| _ = world.reads(pages(0, 1)));
        IS_SLOW.set(false);
        (0..TURNS).for_each(|_| turn());
        let before = world.bill();
        (0..TURNS).for_each(|_| turn());
        (world.bill() - before) / TURNS
    };
    let [ours, always] = [Keep::WhenItPays, Keep::Always].map(bill);
    assert!(ours * 4 < always * 5, "{ours}, {always} if kept always");
}

/// To keep them seems harmless, whatever is known of their length.
#[test]
fn what_seems_harmless_and_is_refused_is_remembered() {
    fn quick(range: AddressRange) -> u64 {
        if range == pages(0, 1) { 100 } else { 100_000 }
    }
    let prepare = |world: &World| {
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        for page in 9..73 {
            drop(world.request(pages(page, 1), Access::READ).once().get().unwrap());
        }
    };
    let program = |world: &World| {
        assert!(world.request(pages(0, 1), Access::READ_WRITE).get().is_err());
    };
    let slow_watch = Costs { watch: |_| 50_000, change: 0, check: 10, ..PLAIN };
    let quick_refusal = Costs { register: quick, watch: |_| 10_000, ..slow_watch };
    for costs in [slow_watch, quick_refusal] {
        let [ours, never] = beside_renting(costs, Config::default(), prepare, program);
        assert!(ours < never * 5 / 4, "{ours} of {never}");
    }
}

/// As above, where to keep it would cost nothing: neither are gets refused that could be had for one use.
#[test]
fn what_seems_harmless_and_counts_more_is_remembered() {
    BLOCK_BEHIND.set(16);
    let costs = Costs { watch: |_| 10, change: 0, check: 10, ..PLAIN };
    for when_full in [WhenFull::RegisterPerUse, WhenFull::Refuse] {
        let config = Config { when_full, max_bytes: 8 * PAGE_BYTES, ..Config::default() };
        let world = World::with(costs, config, DeviceConfig::default());
        assert_eq!(gets_refused(&world), 0, "{when_full:?}");
        let watched = world.monitor.watch_calls();
        assert!((1..300).contains(&watched), "{watched}, {when_full:?}");
    }
}

/// What was refused for want of room, of which there is some then, and what others were refused, is kept from its first use where
/// that is free.
#[test]
fn what_others_were_refused_is_kept_from_its_first_use_where_that_is_free() {
    let costs = Costs { change: 0, watch: |_| 5_000, check: 10, ..PLAIN };
    let room = DeviceConfig { max_pinned_bytes: 4 * PAGE_BYTES as u64, ..DeviceConfig::default() };
    let world = World::with(costs, Config::default(), room);
    for page in 0..4 {
        drop(world.request(pages(page, 1), Access::READ).to_keep().get().unwrap());
    }
    assert!(world.reads(pages(100, 2)));
    let world = World::new(costs, Keep::WhenItPays);
    world.space.unmap(pages(0, 2));
    assert!(world.request(pages(0, 2), Access::READ).get().is_err());
    assert!(world.reads(pages(100, 2)));
}

/// Doing without is dearer than registering for this use alone, which is all that is to be had.
#[test]
fn what_is_never_kept_is_leased_where_doing_without_is_dearer() {
    let world = World::new(PLAIN, Keep::WhenItPays);
    let costs = UseCosts { per_use: 10_000_000, hit: 10, keeping: 1_000 };
    let access = Access::READ | Access::REMOTE_READ;
    for _ in 0..100 {
        let lease = world.request(pages(0, 1), access).get_if_worth(costs).unwrap();
        assert!(lease.is_some_and(|lease| !lease.is_cached()));
    }
}

/// The kernel has moved its pages together as it was registered: there is room for that, and what is registered then is another
/// range.
#[test]
fn what_is_another_range_when_it_is_tried_again_is_not_bought_for_ever() {
    BLOCK_BEHIND.set(16);
    let costs = Costs { watch: |_| 50_000, change: 5_000, check: 10, ..PLAIN };
    let config = Config { max_bytes: 24 * PAGE_BYTES, ..Config::default() };
    let program = |world: &World| {
        drop(world.request(pages(64, 16), Access::READ).vouched().get().unwrap());
        IS_REGISTERED.set(false);
        STAYS.set(true);
        world.reads(pages(0, 1));
        STAYS.set(false);
        IS_REGISTERED.set(false);
        world.changes(pages(0, 16));
    };
    let [ours, never] = beside_renting(costs, config, |_| (), program);
    assert!(ours < never * 5 / 4, "{ours} of {never}");
}

/// How many reads of a thousand found their page kept, which can be read and no more; others are `refused` before each.
fn reads_kept_beside(costs: Costs, refused: impl Fn(&World)) -> usize {
    let world = World::new(costs, Keep::WhenItPays);
    world.space.unmap(pages(0, 1));
    world.space.map(pages(0, 1), Protection::ReadOnly);
    let turns = (0..1_000).filter(|_| {
        refused(&world);
        world.reads(pages(0, 1))
    });
    turns.count()
}

fn refuses(world: &World, access: Access) {
    assert!(world.request(pages(0, 1), access).get().is_err());
}

/// Two rights that are refused in turn, beside a third that could be kept.
#[test]
fn different_rights_that_are_refused_keep_nothing_else_from_being_kept() {
    for change in (28_000..36_000).step_by(200) {
        let costs = Costs { check: 10, change, ..PLAIN };
        let kept = reads_kept_beside(costs, |world| {
            refuses(world, Access::WRITE);
            refuses(world, Access::READ_WRITE);
        });
        assert!(kept > 800, "{kept}, {change}");
    }
}

/// Those that are refused ask by prices of their own, which are lower, so that what others pay would always be enough for them.
#[test]
fn what_is_refused_at_a_lower_price_keeps_nothing_else_from_being_kept() {
    for keeping in [5_000, 10_000, 20_000] {
        let own = UseCosts { per_use: 1_500, hit: 10, keeping };
        let costs = Costs { check: 10, ..PLAIN };
        let kept = reads_kept_beside(costs, |world| {
            _ = world.request(pages(0, 1), Access::WRITE).get_if_worth(own);
        });
        assert!(kept > 800, "{kept}, {keeping}");
    }
}

/// Lives of reads that pay, and then requests to write, each of which is refused, before the first read of each life.
#[test]
fn what_is_refused_behind_purchases_that_paid_costs_no_purchase() {
    let world = World::new(Costs { check: 10, ..PLAIN }, Keep::WhenItPays);
    world.space.unmap(pages(0, 1));
    world.space.map(pages(0, 1), Protection::ReadOnly);
    let life = |is_first: bool| {
        if !is_first {
            refuses(&world, Access::WRITE);
        }
        let kept = (0..200).filter(|_| world.reads(pages(0, 1))).count();
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        world.cache.reclaim();
        kept
    };
    life(true);
    life(true);
    let watched = world.monitor.watch_calls();
    let kept: usize = (0..100).map(|_| life(false)).sum();
    let tried = world.monitor.watch_calls() - watched;
    assert!(kept > 100 * 190, "{kept}");
    assert!(tried < 100 + 20, "{tried}");
}

/// The price counts as paid by another who can do without, or the account has no place of its own: what counts more than there is
/// room for is tried seldom all the same.
#[test]
fn what_counts_more_than_there_is_room_for_is_tried_seldom_whatever_others_paid() {
    BLOCK_BEHIND.set(16);
    let costs = Costs { watch: |_| 10, change: 0, check: 10, ..PLAIN };
    let config = Config { max_bytes: 8 * PAGE_BYTES, ..Config::default() };
    for others in [1, 3_000] {
        let world = World::with(costs, config, DeviceConfig::default());
        let dear = UseCosts { per_use: 1_000, hit: 10, keeping: 1_000_000 };
        for page in 0..others {
            let lease = world.request(pages(page, 1), Access::READ).get_if_worth(dear);
            assert!(lease.unwrap().is_none());
        }
        assert_eq!(gets_refused(&world), 0, "{others}");
        let watched = world.monitor.watch_calls();
        assert!((1..300).contains(&watched), "{watched}, {others}");
    }
}

/// One who can do without, where a lease would be hardly dearer, is told that there is none, and not of an error each time.
#[test]
fn what_is_refused_is_given_up_by_those_who_can_do_without() {
    let world = World::new(PLAIN, Keep::WhenItPays);
    world.space.unmap(pages(0, 1));
    world.space.map(pages(0, 1), Protection::ReadOnly);
    let costs = UseCosts { per_use: 100_000, hit: 10, keeping: 105_000 };
    let failed = (0..1_000)
        .filter(|_| world.request(pages(0, 1), Access::READ_WRITE).get_if_worth(costs).is_err());
    let failed = failed.count();
    assert!((1..=130).contains(&failed), "{failed}");
}

/// More than was asked for is registered where that can be, which it takes its time to refuse: each use pays for that, and no hit.
#[test]
fn what_is_refused_before_it_is_narrowed_is_a_part_of_the_price() {
    fn by_length(range: AddressRange) -> u64 {
        if range.len() == PAGE_BYTES { 1_000 } else { 50_000 }
    }
    let costs = Costs { register: by_length, block: 4, check: 10, ..PLAIN };
    let bill = |keep| {
        let world = World::new(costs, keep);
        world.space.unmap(pages(3, 1));
        cost_in(&world, |world| {
            (0..20).for_each(|_| _ = world.reads(pages(0, 1)));
            world.changes(pages(0, 1));
        })
    };
    let [ours, always] = [Keep::WhenItPays, Keep::Always].map(bill);
    assert!(ours * 4 < always * 5, "{ours}, {always} if kept always");
}

/// Long ranges, which writes may not be registered for, and between their uses a stream of pages that are used once: what is known
/// of the writes is not forgotten so often that they spend what the reads pay.
#[test]
fn buffers_that_are_used_once_hide_nothing_that_was_refused() {
    fn by_length(range: AddressRange) -> u64 {
        match range.len() {
            _ if IS_FULL.get() => 20,
            PAGE_BYTES => 100,
            _ => 500_000,
        }
    }
    let [alone, beside] = [false, true].map(|writes| {
        let costs = Costs {
            register: by_length,
            deregister: |_| 50,
            check: 10,
            change: 17_000_000,
            ..PLAIN
        };
        let world = World::new(costs, Keep::WhenItPays);
        world.space.unmap(pages(0, 64));
        world.space.map(pages(0, 64), Protection::ReadOnly);
        let mut once = (100..4_900).cycle();
        let mut turn = || {
            for long in (0..4).map(|long| pages(16 * long, 16)) {
                IS_FULL.set(true);
                if writes {
                    assert!(world.request(long, Access::WRITE).get().is_err());
                }
                IS_FULL.set(false);
                world.reads(long);
            }
            once.by_ref().take(1_000).for_each(|page| _ = world.reads(pages(page, 1)));
        };
        (0..300).for_each(|_| turn());
        let before = world.bill();
        (0..300).for_each(|_| turn());
        (world.bill() - before) / 300
    });
    assert!(beside * 4 < alone * 5, "{beside}, {alone} without writes");
}

/// Reads were refused for a while, and are judged by their own hits since. A region with more rights takes their place.
#[test]
fn what_was_bought_alone_is_judged_when_more_rights_take_its_place() {
    let bill = |(keep, was_refused)| {
        IS_REGISTERED.set(false);
        let config = Config { keep, max_bytes: 8 * PAGE_BYTES, ..Config::default() };
        let world = World::with(Costs { check: 10, ..PLAIN }, config, DeviceConfig::default());
        BLOCK_BEHIND.set(if was_refused { 16 } else { 0 });
        for _ in 0..1_000 {
            IS_REGISTERED.set(false);
            world.reads(pages(0, 1));
        }
        BLOCK_BEHIND.set(0);
        world.changes(pages(0, 1));
        cost_in(&world, |world| {
            (0..300).for_each(|_| _ = world.reads(pages(0, 1)));
            let more = world.request(pages(0, 1), Access::READ_WRITE);
            drop(more.to_keep().get().unwrap());
            world.changes(pages(0, 1));
        })
    };
    let [ours, always] = [(Keep::WhenItPays, true), (Keep::Always, false)].map(bill);
    assert!(ours * 4 < always * 5, "{ours}, {always} if kept always");
}

/// More rights, which were refused once and have paid for themselves since, take the place of what was bought for fewer.
#[test]
fn what_was_bought_is_judged_when_rights_with_their_own_account_take_its_place() {
    let [plain, replaced] = [false, true].map(|is_replaced| {
        let world = World::new(Costs { check: 10, ..PLAIN }, Keep::WhenItPays);
        let remap = |protection| {
            world.space.unmap(pages(0, 1));
            world.space.map(pages(0, 1), protection);
            world.cache.reclaim();
        };
        let write = || world.request(pages(0, 1), Access::READ_WRITE).get();
        remap(Protection::ReadOnly);
        (0..100).for_each(|_| _ = world.reads(pages(0, 1)));
        (0..100).for_each(|_| assert!(write().is_err()));
        remap(Protection::ReadWrite);
        for _ in 0..6 {
            while !world.reads(pages(0, 1)) {}
            remap(Protection::ReadWrite);
        }
        while !world.reads(pages(0, 1)) {}
        if is_replaced {
            assert!((0..5_000).any(|_| write().unwrap().is_cached()));
        }
        remap(Protection::ReadWrite);
        cost_in(&world, |world| {
            (0..300).for_each(|_| _ = world.reads(pages(0, 1)));
            world.changes(pages(0, 1));
        })
    });
    assert!(replaced * 4 < plain * 5, "{replaced}, {plain} if none took its place");
}

/// One who can do without is leased what was asked for, where the wider range around it cannot be had.
#[test]
fn what_is_narrowed_for_those_who_can_do_without_is_kept_in_each_life_that_pays() {
    let [whole, narrow] = [false, true].map(|is_narrowed| {
        let costs = Costs { block: 4, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        if is_narrowed {
            world.space.unmap(pages(3, 1));
        }
        cost_in(&world, |world| {
            let costs = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
            for _ in 0..300 {
                let request = world.request(pages(0, 1), Access::READ);
                if request.get_if_worth(costs).unwrap().is_none() {
                    spend(costs.per_use);
                }
            }
            world.changes(pages(0, 1));
        })
    });
    assert!(narrow * 4 < whole * 5, "{narrow}, {whole} of the whole");
}

/// More ranges than there are accounts, each of which counts more than there is room for as soon as it is registered.
#[test]
fn what_can_be_had_for_one_use_is_not_refused_because_it_cannot_be_kept() {
    BLOCK_BEHIND.set(16);
    for watch in [|_| 10, |_| 50_000] {
        let costs = Costs { watch, change: 0, check: 10, ..PLAIN };
        let config = Config { max_bytes: 8 * PAGE_BYTES, ..Config::default() };
        assert_eq!(config.when_full, WhenFull::Refuse);
        let world = World::with(costs, config, DeviceConfig::default());
        for page in (0..4_900).cycle().take(20_000) {
            IS_REGISTERED.set(false);
            world.reads(pages(page, 1));
            world.cache.reclaim();
        }
    }
}

/// One who can do without, once for each life. The wider range around the bytes could not be had once, and can since.
#[test]
fn what_could_not_be_had_once_is_judged_by_the_range_that_was_paid_for() {
    let costs = Costs { block: 4, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
    let uses = |world: &World| {
        let lease = world.request(pages(0, 1), Access::READ).get_if_worth(own).unwrap();
        if lease.is_none() {
            spend(own.per_use);
        }
        lease.is_some_and(|lease| lease.is_cached())
    };
    world.space.unmap(pages(3, 1));
    assert!((0..100).any(|_| uses(&world)));
    world.space.map(pages(3, 1), Protection::ReadWrite);
    world.changes(pages(0, 1));
    let kept = (0..1_000).filter(|_| {
        let is_kept = uses(&world);
        world.changes(pages(0, 1));
        is_kept
    });
    let kept = kept.count();
    assert!(kept < 30, "{kept}");
}

/// The same where a lease is hardly dearer than to do without, and the device takes its time to refuse the wider range.
#[test]
fn what_cannot_be_had_around_the_bytes_is_tried_ever_more_seldom() {
    fn by_length(range: AddressRange) -> u64 {
        if range.len() == PAGE_BYTES { 1_000 } else { 50_000 }
    }
    let costs = Costs { register: by_length, block: 4, change: 0, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    world.space.unmap(pages(3, 1));
    let bill = cost_in(&world, |world| {
        let own = UseCosts { per_use: 2_500, hit: 10, keeping: 2_600 };
        let request = world.request(pages(0, 1), Access::READ);
        if request.get_if_worth(own).unwrap().is_none() {
            spend(own.per_use);
        }
        world.changes(pages(0, 1));
    });
    assert!(bill < 4_000, "{bill}");
}

/// One who can do without uses parts of ranges that are kept and idle: the scan for room has said so, and no hit finds them.
#[test]
fn what_is_kept_and_about_to_be_evicted_costs_no_copy() {
    let config = Config { max_bytes: 256 * PAGE_BYTES, ..Config::default() };
    let costs = Costs { check: 10, ..PLAIN };
    let world = World::with(costs, config, DeviceConfig::default());
    let keep = |range| {
        drop(world.request(range, Access::READ).to_keep().get().unwrap());
    };
    let dear = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
    let mut paid = 0;
    for cycle in 0..100 {
        (0..64).for_each(|target| keep(pages(4 * target, 4)));
        keep(pages(1_000 + 100 * (cycle % 30), 80));
        for target in 0..64 {
            let request = || world.request(pages(4 * target, 1), Access::READ);
            let lease = request().get_if_worth(dear).unwrap();
            let before = world.cache.statistics().registrations;
            drop(request().once().get().unwrap());
            let is_there = world.cache.statistics().registrations == before;
            paid += usize::from(is_there && lease.is_none());
        }
        world.changes(pages(1_000, 3_500));
    }
    assert_eq!(paid, 0);
}

/// The device is full at some uses, and makes room: what other rights paid is there when the purchase is tried again.
#[test]
fn what_other_rights_paid_is_not_lost_when_the_device_makes_room() {
    let kept_from = |is_filled: bool| {
        let room = DeviceConfig { max_pinned_bytes: 2 * PAGE_BYTES as u64, ..Default::default() };
        let costs = Costs { check: 10, ..PLAIN };
        let world = World::with(costs, Config::default(), room);
        let held = (0..1_000).find_map(|_| {
            let lease = world.request(pages(0, 1), Access::READ).get().unwrap();
            lease.is_cached().then_some(lease)
        });
        assert!(held.is_some());
        (0..2_000).position(|number| {
            if is_filled && number % 28 == 0 {
                let other = world.request(pages(9, 1), Access::READ).to_keep();
                drop(other.get().unwrap());
            }
            world.uses(pages(0, 1), Access::WRITE)
        })
    };
    let [never_full, full_at_times] = [false, true].map(kept_from);
    assert!(never_full.is_some_and(|uses| uses < 100), "{never_full:?}");
    assert!(full_at_times.is_some_and(|uses| uses < 100), "{full_at_times:?}");
}

/// All is leased for a while, so that what was worth keeping is refused once.
#[test]
fn what_could_not_be_had_once_is_had_as_a_whole_again() {
    const BLOCKS: usize = 4;
    let bill = |is_refused: bool| {
        let costs = Costs { block: 16, check: 10, ..PLAIN };
        let config = Config { max_bytes: 16 * BLOCKS * PAGE_BYTES, ..Config::default() };
        let world = World::with(costs, config, DeviceConfig::default());
        let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
        let uses = |page| {
            let lease = world.request(pages(page, 1), Access::READ).get_if_worth(own);
            if !matches!(lease, Ok(Some(_))) {
                spend(own.per_use);
            }
            lease.is_ok()
        };
        if is_refused {
            let all = (0..BLOCKS).map(|block| {
                let request = world.request(pages(1_600 + 16 * block, 16), Access::READ);
                request.once().get().unwrap()
            });
            let held: Vec<_> = all.collect();
            assert!((0..100).any(|_| !uses(0)));
            drop(held);
            world.cache.reclaim();
        }
        let life = || {
            (0..20).for_each(|_| (0..16).for_each(|page| _ = uses(page)));
            world.changes(pages(0, 16));
        };
        (0..100).for_each(|_| life());
        let before = world.bill();
        (0..100).for_each(|_| life());
        world.bill() - before
    };
    let [whole, refused] = [false, true].map(bill);
    assert!(refused < 2 * whole, "{refused}, {whole} if nothing was refused");
}

/// The same where a part of the range that is registered at once was unmapped for a while: the parts are tried meanwhile.
#[test]
fn what_was_had_in_parts_is_had_as_a_whole_again() {
    let costs = Costs { block: 16, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
    let life = || {
        for page in (0..15).cycle().take(15 * 20) {
            world.does_without_unless_worth(page, own);
        }
        world.changes(pages(0, 15));
    };
    let lives = |count| {
        let before = world.bill();
        (0..count).for_each(|_| life());
        (world.bill() - before) / count
    };
    let whole = lives(200);
    world.space.unmap(pages(15, 1));
    lives(200);
    world.space.map(pages(15, 1), Protection::ReadWrite);
    lives(200);
    let again = lives(200);
    assert!(again < 2 * whole, "{again}, {whole} before");
}

/// Rights that were refused once were bought and paid, then bought in vain, and are refused at each use from then on.
#[test]
fn what_is_refused_at_each_use_is_tried_ever_more_seldom_whatever_was_before() {
    fn register(_: AddressRange) -> u64 {
        if IS_FULL.get() { 100 } else { 100_000 }
    }
    let bill = |keep| {
        let costs = Costs { register, watch: |_| 10_000, change: 0, check: 10, ..PLAIN };
        let world = World::new(costs, keep);
        for page in 9..73 {
            drop(world.request(pages(page, 1), Access::READ).once().get().unwrap());
        }
        let remap = |protection| {
            world.space.unmap(pages(0, 1));
            world.space.map(pages(0, 1), protection);
            world.cache.reclaim();
        };
        let write = || world.request(pages(0, 1), Access::READ_WRITE);
        remap(Protection::ReadOnly);
        assert!(write().get().is_err());
        remap(Protection::ReadWrite);
        (0..300).for_each(|_| drop(write().get().unwrap()));
        remap(Protection::ReadWrite);
        let dear = UseCosts { per_use: 10_000, hit: 10, keeping: 40_000 };
        drop(write().get_if_worth(dear).unwrap());
        remap(Protection::ReadOnly);
        IS_FULL.set(true);
        let before = world.bill();
        for _ in 0..10_000 {
            assert!(write().get().is_err());
        }
        IS_FULL.set(false);
        world.bill() - before
    };
    let [ours, never] = [Keep::WhenItPays, Keep::Never].map(bill);
    assert!(ours < never * 5 / 4, "{ours} of {never}");
}

#[test]
fn nothing_is_had_where_to_do_without_is_cheaper_than_a_hit() {
    let world = World::new(PLAIN, Keep::WhenItPays);
    let costs = UseCosts { per_use: 40, hit: 1_000_000, keeping: 5 };
    for access in [Access::READ, Access::READ | Access::REMOTE_READ] {
        for _ in 0..100 {
            let lease = world.request(pages(0, 1), access).get_if_worth(costs);
            assert!(lease.unwrap().is_none(), "{access:?}");
        }
    }
}

/// Those that pay by rents, those for whom it is harmless, and those that bought have three kinds of rights of the same bytes.
#[test]
fn what_is_kept_because_that_is_harmless_spends_nothing() {
    let rented = |is_harmless: bool| {
        let config = Config { max_regions: 4, ..Config::default() };
        let world = World::with(Costs { check: 10, ..PLAIN }, config, DeviceConfig::default());
        while !world.reads(pages(0, 1)) {}
        let turn = |number: usize| {
            if is_harmless {
                let own = UseCosts { per_use: 100_000, hit: 10, keeping: 1_000 };
                let request = world.request(pages(0, 1), Access::WRITE);
                drop(request.get_if_worth(own).unwrap());
            }
            // What is read stays, and the others are evicted.
            for other in 0..6 {
                world.reads(pages(0, 1));
                let other = pages(9 + (number * 6 + other) % 1_000, 1);
                drop(world.request(other, Access::READ).to_keep().get().unwrap());
                assert!(world.reads(pages(0, 1)));
            }
            (0..20).filter(|_| !world.uses(pages(0, 1), Access::READ_WRITE)).count()
        };
        (0..1_000).map(turn).sum::<usize>()
    };
    let [alone, beside] = [false, true].map(rented);
    assert!(beside < 2 * alone + 100, "{beside} uses of 20000, {alone} without harmless ones");
}

/// What is read stays, and what is written is evicted.
#[test]
fn what_was_paid_is_spent_by_other_rights_once() {
    let config = Config { max_regions: 4, ..Config::default() };
    let world = World::with(Costs { check: 10, ..PLAIN }, config, DeviceConfig::default());
    while !world.reads(pages(0, 1)) {}
    let uses_until_kept = |turn: usize| {
        let uses = (0..1_000).position(|_| world.uses(pages(0, 1), Access::WRITE));
        for other in 0..6 {
            assert!(world.reads(pages(0, 1)));
            let other = pages(9 + turn * 6 + other, 1);
            drop(world.request(other, Access::READ).to_keep().get().unwrap());
        }
        uses.unwrap()
    };
    let uses: Vec<_> = (0..20).map(uses_until_kept).collect();
    // The first are paid for by the rents of what is read.
    assert!(uses[1..].iter().all(|&uses| (20..60).contains(&uses)), "{uses:?}");
}

/// One who can do without uses all parts of a block in turn. It could not be had as a whole once.
#[test]
fn one_refusal_costs_no_more_the_more_parts_there_are() {
    const PRICE: u64 = 42_500;
    fn prices_more(block: usize) -> u64 {
        let [whole, refused] = [false, true].map(|is_refused| {
            let config = Config { max_bytes: block * PAGE_BYTES * 4, ..Config::default() };
            let costs = Costs { block, check: 10, ..PLAIN };
            let world = World::with(costs, config, DeviceConfig::default());
            let first = pages(0, 1).start() / PAGE_BYTES;
            let first = first.next_multiple_of(block) - first;
            let own = UseCosts { per_use: 1_500, hit: 10, keeping: PRICE };
            let uses = |page| world.does_without_unless_worth(first + page, own);
            if is_refused {
                world.space.unmap(pages(first + block - 1, 1));
                (0..30).for_each(|_| uses(0));
                world.space.map(pages(first + block - 1, 1), Protection::ReadWrite);
                world.changes(pages(first, block));
            }
            let before = world.bill();
            for _ in 0..20 {
                (0..10).for_each(|_| (0..block).for_each(uses));
                world.changes(pages(first, block));
            }
            world.bill() - before
        });
        refused.saturating_sub(whole) / PRICE
    }
    let more = [16, 64, 256].map(prices_more);
    assert!(more.iter().all(|&more| more < 24), "{more:?} prices");
}

/// By plain gets, while one who can do without bought parts.
#[test]
fn what_was_had_as_a_whole_since_is_not_bought_in_parts() {
    let costs = Costs { block: 16, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
    let uses = |page| {
        let lease = world.request(pages(page, 1), Access::READ).get_if_worth(own);
        lease.unwrap().map(|lease| lease.registered().len() / PAGE_BYTES)
    };
    world.space.unmap(pages(15, 1));
    assert!((0..40).any(|_| uses(0) == Some(1)));
    world.space.map(pages(15, 1), Protection::ReadWrite);
    world.changes(pages(0, 16));
    for _ in 0..3 {
        (0..400).for_each(|_| _ = world.reads(pages(2, 1)));
        assert_eq!(uses(1), Some(16));
        world.changes(pages(0, 16));
    }
    let had: Vec<_> = (0..16).flat_map(|page| (0..40).filter_map(move |_| uses(page))).collect();
    assert!(!had.is_empty() && had.iter().all(|&pages| pages == 16), "{had:?}");
}

/// The wider range can never be had. Each life begins with a suspension, and the program asks meanwhile.
#[test]
fn what_is_suspended_buys_no_parts() {
    let bill = |asked: usize| {
        let costs = Costs { block: 4, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        world.space.unmap(pages(3, 1));
        let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
        let uses = || {
            let lease = world.request(pages(0, 1), Access::READ).get_if_worth(own);
            if matches!(lease, Ok(None)) {
                spend(own.per_use);
            }
            lease.is_ok()
        };
        let terms = SuspensionTerms {
            gets: Gets::Refuse,
            on_drop: OnDrop::Resume,
            ..SuspensionTerms::default()
        };
        cost_of(100, &world, |world| {
            let held = world.cache.suspend(pages(0, 3), vec![], Vec::new(), terms).unwrap();
            (0..asked).for_each(|_| _ = uses());
            held.resume().unwrap();
            (0..200).for_each(|_| assert!(uses()));
            world.changes(pages(0, 1));
        })
    };
    let bills = [0, 1, 8, 16].map(bill);
    assert!(bills.iter().all(|&it| it < 2 * bills[0]), "{bills:?} for each life");
}

/// What a life costs of bytes that one uses who can do without, where a page beside them is suspended for one use at the beginning
/// of `every` so many lives; and where the whole of their block was refused once, long before.
fn bill_beside_what_is_suspended(was_refused: bool, every: u64) -> u64 {
    let costs = Costs { block: 16, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
    if was_refused {
        world.space.unmap(pages(15, 1));
        (0..30).for_each(|_| world.does_without_unless_worth(0, own));
        world.space.map(pages(15, 1), Protection::ReadWrite);
        world.changes(pages(0, 16));
    }
    let terms = SuspensionTerms { on_drop: OnDrop::Resume, ..SuspensionTerms::default() };
    let lives = Cell::new(0_u64);
    cost_of(100, &world, |world| {
        if lives.replace(lives.get() + 1).is_multiple_of(every) {
            let held = world.cache.suspend(pages(15, 1), vec![], Vec::new(), terms).unwrap();
            world.does_without_unless_worth(0, own);
            held.resume().unwrap();
        }
        (0..300).for_each(|number| world.does_without_unless_worth(number % 15, own));
        world.changes(pages(0, 16));
    })
}

#[test]
fn what_is_suspended_beside_the_bytes_refuses_nothing() {
    let bills = [u64::MAX, 1, 10, 50].map(|every| bill_beside_what_is_suspended(false, every));
    assert!(bills.iter().all(|&it| it < 2 * bills[0]), "{bills:?} for each life");
}

#[test]
fn what_was_refused_once_is_not_refused_by_what_is_suspended() {
    let bills = [u64::MAX, 1, 10].map(|every| bill_beside_what_is_suspended(true, every));
    assert!(bills.iter().all(|&it| it < 2 * bills[0]), "{bills:?} for each life");
}

/// One who can do without, once for each life of a page, while another of its block is suspended.
#[test]
fn what_is_paid_once_buys_once_beside_what_is_suspended() {
    let bill = |is_suspended: bool| {
        let costs = Costs { block: 16, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        let own = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };
        let terms = SuspensionTerms { on_drop: OnDrop::Resume, ..SuspensionTerms::default() };
        let suspend = || world.cache.suspend(pages(15, 1), vec![], Vec::new(), terms).unwrap();
        let _held = is_suspended.then(suspend);
        cost_of(500, &world, |world| {
            world.does_without_unless_worth(0, own);
            world.changes(pages(0, 1));
        })
    };
    let [free, suspended] = [false, true].map(bill);
    assert!(suspended < 2 * free, "{suspended} for each use, {free} if nothing is suspended");
}

/// By callers for whom keeping costs next to nothing.
#[test]
fn what_cannot_be_had_around_the_bytes_is_tried_seldom_at_any_price() {
    fn by_length(range: AddressRange) -> u64 {
        if range.len() == PAGE_BYTES { 1_000 } else { 50_000 }
    }
    let bills = [0, 1, 100, 1_000].map(|keeping| {
        let costs = Costs { register: by_length, block: 4, change: 0, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        world.space.unmap(pages(3, 1));
        cost_of(2_000, &world, |world| {
            world.does_without_unless_worth(0, UseCosts { per_use: 2_500, hit: 10, keeping });
            world.changes(pages(0, 1));
        })
    });
    assert!(bills.iter().all(|&it| it < 4_000), "{bills:?}");
}

/// What a page costs those who can do without it, and what it costs to keep one.
const OWN: UseCosts = UseCosts { per_use: 1_500, hit: 10, keeping: 42_500 };

/// Another thread pays for the whole while the part of it is registered that can be had.
#[test]
fn what_others_pay_meanwhile_hides_no_refusal() {
    static BESIDE: Mutex<Option<Arc<World>>> = Mutex::new(None);
    fn set_beside(world: Option<Arc<World>>) -> Option<Arc<World>> {
        std::mem::replace(&mut BESIDE.lock().unwrap_or_else(PoisonError::into_inner), world)
    }
    fn register(range: AddressRange) -> u64 {
        // Once for each registration of the part: what is asked in here registers nothing.
        if range == pages(0, 1)
            && let Some(world) = set_beside(None)
        {
            std::thread::scope(|scope| {
                scope.spawn(|| world.does_without_unless_worth(1, OWN));
            });
            spend(OWN.per_use);
            set_beside(Some(world));
        }
        1_000
    }
    let [alone, beside] = [false, true].map(|is_beside| {
        let costs = Costs { register, block: 4, check: 10, ..PLAIN };
        let world = Arc::new(World::new(costs, Keep::WhenItPays));
        world.space.unmap(pages(3, 1));
        set_beside(is_beside.then(|| Arc::clone(&world)));
        let bill = cost_of(300, &world, |world| {
            (0..250).for_each(|_| world.does_without_unless_worth(0, OWN));
            world.changes(pages(0, 1));
        });
        set_beside(None);
        bill
    });
    assert!(
        beside < 2 * alone,
        "{beside} for each life, {alone} if no other thread asks meanwhile"
    );
}

/// One use by a caller whom it costs much more to do without, where the whole is refused.
#[test]
fn who_pays_more_to_do_without_buys_parts_no_longer_than_others() {
    let bills = [1_500, 1_000_000, 1_000_000_000, u64::MAX].map(|dear| {
        let costs = Costs { block: 16, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        world.space.unmap(pages(15, 1));
        let first = UseCosts { per_use: dear, ..OWN };
        let use_once = || {
            let lease = world.request(pages(0, 1), Access::READ).get_if_worth(first);
            lease.unwrap().is_some()
        };
        assert!((0..40).any(|_| use_once()));
        world.space.map(pages(15, 1), Protection::ReadWrite);
        world.changes(pages(0, 16));
        cost_of(300, &world, |world| {
            (0..480).for_each(|number| world.does_without_unless_worth(number % 16, OWN));
            world.changes(pages(0, 16));
        })
    });
    assert!(bills.iter().all(|&it| it < 2 * bills[0]), "{bills:?} for each life");
}

/// Its bytes are suspended as it is decided, and then those beside them alone.
#[test]
fn what_is_bought_behind_a_suspension_is_paid_for() {
    let costs = Costs { block: 16, check: 10, ..PLAIN };
    let world = World::new(costs, Keep::WhenItPays);
    let deadline = Duration::from_secs(600);
    let terms = SuspensionTerms { deadline, on_drop: OnDrop::Resume, ..SuspensionTerms::default() };
    let suspend = |page| world.cache.suspend(pages(page, 1), vec![], Vec::new(), terms).unwrap();
    let mut kept = 0;
    for _ in 0..200 {
        let [first, _beside] = [0, 15].map(suspend);
        let uses = || {
            let lease = world.request(pages(0, 1), Access::READ).get_if_worth(OWN);
            lease.unwrap().is_some_and(|lease| lease.is_cached())
        };
        let is_kept = std::thread::scope(|scope| {
            let used = scope.spawn(uses);
            std::thread::sleep(Duration::from_millis(5));
            first.resume().unwrap();
            used.join().unwrap()
        });
        kept += u32::from(is_kept);
        world.changes(pages(0, 1));
    }
    assert!(kept < 30, "{kept} of 200 uses were kept for {} each", OWN.keeping);
}

/// Also what would cost less to keep than to do without it once.
#[test]
fn what_is_refused_is_told_seldom_at_any_price() {
    let failed = [0, 1, 100, 1_000, 2_600].map(|keeping| {
        let world = World::new(PLAIN, Keep::WhenItPays);
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        let costs = UseCosts { per_use: 2_500, hit: 10, keeping };
        let request = || world.request(pages(0, 1), Access::READ_WRITE);
        (0..1_000).filter(|_| request().get_if_worth(costs).is_err()).count()
    });
    assert!(failed.iter().all(|&it| it <= 130), "{failed:?} of 1000 fail");
}

#[test]
fn what_cannot_be_watched_is_asked_seldom_at_any_price() {
    let bills = [0, 1, 100, 1_000, 2_600].map(|keeping| {
        let costs = Costs { watch: |_| 50_000, change: 0, check: 10, ..PLAIN };
        let world = World::new(costs, Keep::WhenItPays);
        world.monitor.uncover(pages(0, 1), Uncovered::Unmapped);
        let costs = UseCosts { per_use: 2_500, hit: 10, keeping };
        cost_of(1_000, &world, |world| world.does_without_unless_worth(0, costs))
    });
    assert!(bills.iter().all(|&it| it < 10_000), "{bills:?} for each use, 2500 without");
}

/// Those who ask while a registration is under way that is refused do not try it one after the other.
#[test]
fn what_is_refused_is_not_tried_by_each_thread_that_asks_meanwhile() {
    fn register(_: AddressRange) -> u64 {
        std::thread::sleep(Duration::from_millis(2));
        1_000
    }
    const USES: u64 = 16_000;
    let tries = [1, 16].map(|threads: u64| {
        let world = World::new(Costs { register, ..PLAIN }, Keep::WhenItPays);
        world.space.unmap(pages(0, 1));
        world.space.map(pages(0, 1), Protection::ReadOnly);
        let uses = || {
            for _ in 0..USES / threads {
                let request = world.request(pages(0, 1), Access::READ_WRITE);
                drop(request.get_if_worth(OWN));
                std::thread::sleep(Duration::from_micros(20));
            }
        };
        std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(uses)));
        world.cache.statistics().registration_failures
    });
    assert!(
        tries.iter().all(|&it| it * OWN.keeping < USES * OWN.per_use),
        "{tries:?} tries of {USES} uses were refused"
    );
}
