//! Code that is not ours forks at its n-th call, for every n, and the child comes back from it: then it calls neither its
//! parent's device nor its parent's account, and is given no lease.
//!
//! The fork is played: the monitor says from then on that this is a child.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)] // only tests use it

use pinfold_core::{
    Access, Account, AddressRange, Amount, Cache, Config, ConnectionLost, DeregisterError,
    Exhausted, GetError, Keep, Lender, Limit, Lost, OnDrop, Position, Refusal, RegisterError,
    Renewed, Replay, Sequence, SuspensionTerms, Transfers, Unsupported, UseCosts, Watch,
};
use pinfold_sim::{
    Fake, FakeDevice, FakeMonitor, FakeSuspend, SimulatedRequest, get_checked, get_simulated,
};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

#[derive(Default)]
struct Calls {
    made: usize,
    fork_at: usize,
    /// The next such call forks, too.
    fork_in: Option<&'static str>,
    /// The call that forked, and the parent's device and account that were called since.
    forked_in: Option<&'static str>,
    since: Vec<&'static str>,
}

/// Everything that is not the cache's.
#[derive(Default)]
struct World {
    calls: Mutex<Calls>,
    changes: Mutex<Vec<AddressRange>>,
    time: AtomicU64,
    /// How many registrations there are, and how many there can be; 0 for no bound.
    held: AtomicUsize,
    room: AtomicUsize,
    /// Where the next registration says that it has begun, and waits.
    waits: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    /// Whether pages become huge as they are registered...
    collapses: AtomicBool,
    /// ...and have become so.
    collapsed: AtomicBool,
}

impl World {
    fn forking_at(n: usize) -> Arc<Self> {
        let calls = Calls { fork_at: n, ..Calls::default() };
        Arc::new(Self { calls: Mutex::new(calls), ..Self::default() })
    }

    /// What a child may call as well: its monitor, and the destructors of what it has copies of.
    fn asked(&self, what: &'static str) {
        let mut calls = self.calls.lock().unwrap();
        calls.made += 1;
        if calls.made == calls.fork_at || calls.fork_in == Some(what) {
            calls.forked_in = Some(what);
        }
    }

    fn called(&self, what: &'static str) {
        if self.is_child() {
            self.calls.lock().unwrap().since.push(what);
        }
        self.asked(what);
    }

    fn forked_in(&self) -> Option<&'static str> {
        self.calls.lock().unwrap().forked_in
    }

    fn is_child(&self) -> bool {
        self.forked_in().is_some()
    }

    fn change(&self, range: AddressRange) {
        self.changes.lock().unwrap().push(range);
    }

    /// What is registered from now on counts more than was planned.
    fn collapse(&self) {
        self.collapsed.store(false, SeqCst);
        self.collapses.store(true, SeqCst);
    }

    fn registered(&self) {
        self.collapsed.store(self.collapses.load(SeqCst), SeqCst);
    }

    fn pass(&self, time: Duration) {
        self.time.fetch_add(u64::try_from(time.as_millis()).unwrap(), SeqCst);
    }
}

struct Device(Arc<World>);

impl FakeDevice for Device {
    type Handle = u32;

    fn granted(&self, wanted: Access) -> Access {
        self.0.called("granted");
        wanted
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.0.called("widened");
        let more = if self.0.collapsed.load(SeqCst) { 4096 } else { 0 };
        AddressRange::new(range.start(), range.len() + more).unwrap()
    }

    fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
        self.0.called("register");
        let waits = self.0.waits.lock().unwrap().take();
        if let Some((begun, go_on)) = waits {
            begun.send(()).unwrap();
            let _ended = go_on.recv();
        }
        let room = self.0.room.load(SeqCst);
        if room != 0 && self.0.held.load(SeqCst) >= room {
            return Err(RegisterError::TableFull { capacity: room });
        }
        self.0.held.fetch_add(1, SeqCst);
        self.0.registered();
        Ok(0)
    }

    fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        self.0.called("deregister");
        self.0.held.fetch_sub(1, SeqCst);
        Ok(())
    }
}

#[derive(Debug)]
struct Link(u32, Arc<World>);

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl Clone for Link {
    fn clone(&self) -> Self {
        self.1.asked("clone");
        Self(self.0, Arc::clone(&self.1))
    }
}

impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        self.1.asked("eq");
        self.0 == other.0
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.1.asked("drop");
    }
}

impl FakeSuspend for Device {
    type Connection = Link;

    fn now(&self) -> Duration {
        self.0.called("now");
        Duration::from_millis(self.0.time.load(SeqCst))
    }

    fn can_suspend(&self, _: AddressRange, _: &[Link]) -> Result<(), Unsupported> {
        self.0.called("can_suspend");
        Ok(())
    }

    fn stop(&self, _: &Link) -> Result<(), ConnectionLost> {
        self.0.called("stop");
        Ok(())
    }

    fn in_flight(&self, _: &Link, _: AddressRange) -> Result<Transfers, ConnectionLost> {
        self.0.called("in_flight");
        Ok(Transfers::default())
    }

    fn withdraw(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        self.0.called("withdraw");
        Ok(())
    }

    fn quiet(&self, _: AddressRange) -> bool {
        self.0.called("quiet");
        true
    }

    fn renew(&self, handle: u32, _: AddressRange, _: Access) -> Renewal {
        self.0.called("renew");
        self.0.registered();
        Ok(Renewed::Changed(handle))
    }

    fn restart(&self, _: &Link) -> Result<(), ConnectionLost> {
        self.0.called("restart");
        Ok(())
    }

    fn fail(&self, _: &Link) {
        self.0.called("fail");
    }

    fn wait(&self, _: Duration) {
        self.0.called("wait");
        self.0.pass(Duration::from_millis(5));
    }
}

type Renewal = Result<Renewed<u32>, RegisterError>;

struct Watcher(Arc<World>);

impl FakeMonitor for Watcher {
    fn check(&self) -> Result<Sequence, Lost> {
        if self.0.is_child() {
            return Err(Lost::Forked);
        }
        self.0.asked("check");
        Ok(Sequence(self.0.changes.lock().unwrap().len() as u64))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        self.0.asked("watch");
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.0.asked("change_pending");
        false
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.0.asked("replay");
        let changes = self.0.changes.lock().unwrap().clone();
        let end = changes.len() as u64;
        let seen = if from == Position::NOWHERE { end } else { from.0 };
        changes.into_iter().skip(usize::try_from(seen).unwrap()).for_each(visit);
        Replay {
            up_to: Position(end, 0),
            sequence: Sequence(end),
            complete: true,
            may_repeat: false,
        }
    }

    fn has_slow_check(&self) -> bool {
        self.0.asked("has_slow_check");
        true
    }

    fn change_surcharge(&self) -> u64 {
        self.0.asked("change_surcharge");
        0
    }

    fn forked(&self) -> bool {
        self.0.is_child()
    }

    fn notify(&self) {
        self.0.asked("notify");
    }
}

/// With so much to grant.
struct Purse(Arc<World>, Mutex<Amount>);

impl Account for Purse {
    fn take(&self, amount: Amount) -> Result<(), Refusal> {
        self.0.called("take");
        let mut left = self.1.lock().unwrap();
        if !amount.fits(*left) {
            let exhausted = Exhausted { limit: Limit::Regions, allowed: 1, held: 1, wanted: 1 };
            return Err(Refusal { exhausted, missing: amount });
        }
        *left = *left - amount;
        Ok(())
    }

    fn overdraw(&self, _: Amount) {
        self.0.called("overdraw");
    }

    fn give(&self, amount: Amount) {
        self.0.called("give");
        let mut left = self.1.lock().unwrap();
        *left = *left + amount;
    }

    fn recall(&self, _: Amount) -> bool {
        self.0.called("recall");
        false
    }

    fn refused(&self, _: RegisterError, _: Amount) -> bool {
        self.0.called("refused");
        false
    }

    fn settle(&self) {
        self.0.called("settle");
    }

    fn attach(&self, _: Weak<dyn Lender>) {}
}

type TheCache = Cache<Fake<Device>, Fake<Watcher>>;

fn pages(first: usize, count: usize) -> AddressRange {
    AddressRange::new(0x7000_0000 + first * 4096, count * 4096).unwrap()
}

fn get(
    cache: &TheCache,
    page: usize,
) -> Result<pinfold_core::Lease<'_, Fake<Device>, Fake<Watcher>>, GetError> {
    get_simulated(cache, pages(page, 1), Access::READ)
}

fn request(
    cache: &TheCache,
    page: usize,
    access: Access,
) -> SimulatedRequest<'_, Fake<Device>, Fake<Watcher>> {
    SimulatedRequest::new(cache, pages(page, 1), access)
}

/// `uses` with a cache of four registrations, in which what is not the cache's forks at every call in turn.
fn forks_at_every_call(least: usize, uses: impl Fn(&TheCache, &Arc<World>)) {
    let plenty = Amount { bytes: usize::MAX / 2, regions: usize::MAX / 2 };
    forks_at_every_call_within(plenty, least, uses);
}

/// The same with an account that grants no more than `granted`.
fn forks_at_every_call_within(
    granted: Amount,
    least: usize,
    uses: impl Fn(&TheCache, &Arc<World>),
) {
    let mut found = Vec::new();
    for n in 1.. {
        let world = World::forking_at(n);
        let (device, monitor) =
            (Fake(Device(Arc::clone(&world))), Fake(Watcher(Arc::clone(&world))));
        let (keep, cache_remote) = (Keep::Always, true);
        let config = Config { max_regions: 4, keep, cache_remote, ..Config::default() };
        let account = Arc::new(Purse(Arc::clone(&world), granted.into()));
        let cache = Cache::with_account(device, monitor, config, account).unwrap();
        uses(&cache, &world);
        drop(cache);
        let calls = world.calls.lock().unwrap();
        let Some(forked_in) = calls.forked_in else {
            assert!(n > least, "{n} calls");
            break;
        };
        if !calls.since.is_empty() {
            found.push((n, forked_in, calls.since.clone()));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// A miss that comes back in a child, wherever it forked.
fn miss(cache: &TheCache, world: &World, page: usize) {
    assert_is_refused_if_forked(world, &get(cache, page).map(drop));
}

fn assert_is_refused_if_forked(world: &World, got: &Result<(), GetError>) {
    if let Some(forked_in) = world.forked_in() {
        assert_eq!(*got, Err(GetError::Forked), "forked in {forked_in}");
    }
}

/// Its bytes are in no region, and are to be kept in none: such a get does not ask the monitor, but for one of eight, and reads
/// the monitor's log.
#[test]
fn a_child_forked_inside_a_get_without_an_answer_calls_no_device_and_no_account() {
    forks_at_every_call(60, |cache, world| {
        for page in 0..10 {
            world.change(pages(page, 1));
            let got = request(cache, page, Access::READ).once().get();
            assert_is_refused_if_forked(world, &got.as_ref().map(|_| ()).map_err(|&error| error));
        }
    });
}

#[test]
fn a_child_forked_inside_a_get_is_refused_and_calls_no_device_and_no_account() {
    forks_at_every_call(60, |cache, world| {
        let mut leased = get(cache, 0);
        if let Ok(lease) = &mut leased {
            let forks = Arc::clone(world);
            lease.on_invalidate(move || forks.asked("callback"));
        }
        (1..6).for_each(|page| miss(cache, world, page));
        world.change(pages(0, 9));
        (2..4).for_each(|page| miss(cache, world, page));
        drop(leased);
        cache.invalidate(pages(2, 2));
        (2..4).for_each(|page| miss(cache, world, page));
        cache.reclaim();
        (10..13).for_each(|page| miss(cache, world, page));
        cache.evict_idle();
    });
}

/// One that is refused as the budget is spent, also where nothing idle is left to be given back for it.
#[test]
fn a_child_forked_inside_a_get_that_its_account_refuses_calls_no_device_and_no_account() {
    forks_at_every_call_within(Amount { bytes: 1 << 20, regions: 2 }, 30, |cache, world| {
        (0..4).for_each(|page| miss(cache, world, page));
        let leased = [get(cache, 4), get(cache, 5)];
        if world.forked_in().is_none() {
            let got = get(cache, 6).map(drop);
            let expected = match world.forked_in() {
                Some(_) => matches!(got, Err(GetError::Forked)),
                None => matches!(got, Err(GetError::Exhausted(_))),
            };
            assert!(expected, "{got:?}, forked in {:?}", world.forked_in());
        }
        drop(leased);
    });
}

/// Never drops `value`, and keeps it where the leak sanitizer finds it.
fn leak<T>(value: T) {
    static LEAKED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    LEAKED.lock().unwrap().push(Box::into_raw(Box::new(value)).expose_provenance());
}

/// Six ways to end a suspension with two leases, beside a registration that is given back.
fn suspend(cache: &TheCache, world: &Arc<World>, way: usize) {
    let (Ok(first), Ok(second)) = (get(cache, 0), get(cache, 1)) else { return };
    drop(get(cache, 2));
    let range = pages(0, 3);
    let links = (0..3).map(|number| Link(number, Arc::clone(world))).collect();
    let on_drop = if way == 1 { OnDrop::Resume } else { OnDrop::Kill };
    let terms = SuspensionTerms { on_drop, ..SuspensionTerms::default() };
    let leases = vec![first, second];
    match way {
        0 | 1 => drop(cache.suspend(range, links, leases, terms)),
        2 => drop(cache.suspend(range, links, leases, terms).map(|it| it.resume().is_ok())),
        3 => drop(cache.begin_suspension(range, links, leases, terms).map(|it| it.cancel())),
        _ => {
            match way {
                4 => _ = cache.suspend(range, links, leases, terms).map(leak),
                _ => _ = cache.begin_suspension(range, links, leases, terms).map(leak),
            }
            world.pass(terms.deadline + Duration::from_secs(1));
            cache.expire_suspensions();
        }
    }
}

#[test]
fn a_child_forked_inside_a_suspension_calls_its_parents_device_no_more() {
    for way in 0..6 {
        forks_at_every_call(30, |cache, world| suspend(cache, world, way));
    }
}

/// Its connections are shared with another suspension, which has them compared.
#[test]
fn a_child_forked_inside_one_of_two_suspensions_calls_its_parents_device_no_more() {
    forks_at_every_call(30, |cache, world| {
        let links = || (0..3).map(|number| Link(number, Arc::clone(world))).collect();
        let terms = SuspensionTerms::default();
        let other = cache.suspend(pages(20, 1), links(), Vec::new(), terms);
        suspend(cache, world, 2);
        drop(cache.suspend(pages(30, 1), links(), Vec::new(), terms));
        drop(other.map(|it| it.resume().is_ok()));
    });
}

/// Behind the registration, and behind a renewal, which count more than was planned and than there is.
#[test]
fn a_child_forked_as_its_account_refuses_what_became_more_calls_no_device_and_no_account() {
    let one_page_each = Amount { bytes: 2 * 4096, regions: 9 };
    forks_at_every_call_within(one_page_each, 20, |cache, world| {
        let leased = get(cache, 0);
        for page in 1..4 {
            world.collapse();
            let got = request(cache, page, Access::READ).to_keep().get();
            assert_is_refused_if_forked(world, &got.map(drop));
        }
        drop(leased);
    });
    forks_at_every_call_within(one_page_each, 20, |cache, world| {
        let (Ok(first), Ok(second)) = (get(cache, 0), get(cache, 1)) else { return };
        let (range, terms) = (pages(0, 2), SuspensionTerms::default());
        let Ok(suspended) = cache.suspend(range, Vec::new(), vec![first, second], terms) else {
            return;
        };
        world.collapse();
        let _resumed = suspended.resume().is_ok();
    });
}

/// What a get of page 0 answers in a child that was forked as the reclaimer was told of a change of page 1.
fn get_in_a_child_forked_as_the_reclaimer_is_told(
    world: &Arc<World>,
    cache: &Arc<TheCache>,
) -> Result<(), GetError> {
    drop(get(cache, 1).unwrap());
    world.change(pages(1, 1));
    world.calls.lock().unwrap().fork_in = Some("notify");
    let (answer, answered) = channel();
    let cache = Arc::clone(cache);
    let gets = thread::spawn(move || answer.send(get(&cache, 0).map(drop)));
    let got = answered.recv_timeout(Duration::from_secs(5));
    assert_eq!(world.forked_in(), Some("notify"));
    let got = got.expect("it waits for what its parent does");
    gets.join().unwrap().unwrap();
    got
}

/// For another thread's registration, or for the end of a suspension.
#[test]
fn a_child_forked_inside_a_get_that_is_to_wait_waits_for_nothing() {
    let played = || {
        let world = World::forking_at(0);
        let (device, monitor) =
            (Fake(Device(Arc::clone(&world))), Fake(Watcher(Arc::clone(&world))));
        let config = Config { keep: Keep::Always, ..Config::default() };
        let cache = Arc::new(Cache::new(device, monitor, config).unwrap());
        (world, cache)
    };
    let (world, cache) = played();
    let ((begun, has_begun), (go_on, waits)) = (channel(), channel());
    *world.waits.lock().unwrap() = Some((begun, waits));
    let registers = Arc::clone(&cache);
    let registering = thread::spawn(move || get(&registers, 0).map(drop));
    has_begun.recv().unwrap();
    let got = get_in_a_child_forked_as_the_reclaimer_is_told(&world, &cache);
    assert_eq!(got, Err(GetError::Forked));
    drop(go_on);
    assert_eq!(registering.join().unwrap(), Err(GetError::Forked));

    let (world, cache) = played();
    let terms =
        SuspensionTerms { deadline: Duration::from_secs(600), ..SuspensionTerms::default() };
    let suspended = cache.suspend(pages(0, 1), Vec::new(), Vec::new(), terms);
    assert!(suspended.is_ok());
    let got = get_in_a_child_forked_as_the_reclaimer_is_told(&world, &cache);
    assert_eq!(got, Err(GetError::Forked));
}

/// The device has no room for a third.
#[test]
fn a_child_forked_inside_a_get_that_its_device_refuses_calls_no_device_and_no_account() {
    forks_at_every_call(30, |cache, world| {
        world.room.store(2, SeqCst);
        let _leased = [get(cache, 0), get(cache, 1)];
        (2..4).for_each(|page| miss(cache, world, page));
    });
}

/// A hit asks nothing behind its check, and a monitor says itself that its check forked.
fn assert_is_refused_if_forked_behind_its_check(world: &World, got: &Result<(), GetError>) {
    if world.forked_in() != Some("check") {
        assert_is_refused_if_forked(world, got);
    }
}

/// What is kept from its first use, what is paid for, and what cannot be had.
#[test]
fn a_child_forked_inside_a_get_if_worth_calls_no_device_and_no_account() {
    for access in [Access::READ, Access::REMOTE_READ] {
        forks_at_every_call(20, |cache, world| {
            let get = |page, costs| {
                let got = request(cache, page, access).get_if_worth(costs);
                assert_is_refused_if_forked_behind_its_check(
                    world,
                    &got.as_ref().map(drop).map_err(|&error| error),
                );
                got
            };
            let cheap = UseCosts { per_use: 100, hit: 1, keeping: 90 };
            let dear = UseCosts { keeping: 250, ..cheap };
            let _leased = [get(0, cheap), get(0, cheap), get(1, cheap)];
            world.room.store(2, SeqCst);
            (0..4).for_each(|_| drop(get(2, dear)));
            world.collapse();
            world.room.store(0, SeqCst);
            drop(get(3, cheap));
            drop(get(3, cheap));
        });
    }
}

/// Whose rights the device is asked for, for a hit too.
#[test]
fn a_child_forked_inside_a_get_for_a_peer_calls_no_device_and_no_account() {
    forks_at_every_call(20, |cache, world| {
        let access = Access::REMOTE_READ;
        for page in [0, 1, 0, 1] {
            let got = get_simulated(cache, pages(page, 1), access);
            assert_is_refused_if_forked_behind_its_check(world, &got.map(drop));
            let got = request(cache, page, access).to_keep().get();
            assert_is_refused_if_forked_behind_its_check(world, &got.map(drop));
            drop(request(cache, page, access).get_if_cached());
            let Ok(checked) = cache.check() else { continue };
            let got = get_checked(&checked, pages(page, 1), access);
            assert_is_refused_if_forked_behind_its_check(world, &got.map(drop));
            let start = std::ptr::without_provenance(pages(page, 1).start());
            let got = SimulatedRequest(checked.request(start, 4096, access)).once().get();
            assert_is_refused_if_forked_behind_its_check(world, &got.map(drop));
        }
    });
}
