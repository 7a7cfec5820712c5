//! What a suspension must show, on the simulated fabric: one test for each behaviour.
//!
//! Whether memory was touched is judged by its content: a peer's write lands in the pages that the
//! device has a translation of, and pages that the program has moved away from belong to another
//! owner.

#![allow(clippy::unwrap_used, clippy::panic)] // tests may fail loudly

mod common;

use common::barriers_of_one_thread;
use pinfold_core::{
    Access, Account, AddressRange, Amount, Cache, Clock, Config, ConnectionLost, DeregisterError,
    GetError, Gets, Keys, Lease, Leases, Lender, Lost, NotSuspended, Notice, Notices, OnDrop,
    Outstanding, Refusal as BudgetRefusal, Refused, RegisterError, RegistrarLimits, Revocation,
    SuspendProgress, Suspended, Suspending, SuspensionTerms, Transfers, Unsupported, UseCosts, Why,
};
use pinfold_sim::fabric::{
    CELL_BYTES, ConnectionId, DeviceCall, DevicePanic, Fabric, FabricRegistrar, Key, NicConfig,
    Work, World, stamp,
};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Fake, FakeDevice, FakeSuspend, Handle, Moment, PAGE_BYTES,
    Protection, SimDevice, SimMonitor, SimRegistrar, SimulatedRequest, get_simulated,
};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

type Held<'c> = Suspended<'c, FabricRegistrar, SimMonitor>;
type Pending<'c> = Suspending<'c, FabricRegistrar, SimMonitor>;
type Refusal<'c> = Box<NotSuspended<'c, FabricRegistrar, SimMonitor>>;
type RigLease<'c> = Lease<'c, FabricRegistrar, SimMonitor>;

const EXPOSED: Access = Access::from_bits(
    Access::READ_WRITE.bits() | Access::REMOTE_READ.bits() | Access::REMOTE_WRITE.bits(),
);

fn pages(first: usize, count: usize) -> AddressRange {
    AddressRange::new((16 + first) * PAGE_BYTES, count * PAGE_BYTES).unwrap()
}

struct Rig {
    fabric: Fabric,
    monitor: SimMonitor,
    cache: Cache<FabricRegistrar, SimMonitor>,
    connections: [ConnectionId; 2],
}

impl Rig {
    fn new() -> Self {
        Self::with(NicConfig::default(), Config::default())
    }

    fn with(nic: NicConfig, config: Config) -> Self {
        let space = Arc::new(AddressSpace::new());
        space.map(pages(0, 32), Protection::ReadWrite);
        let fabric = Fabric::new(&space, 2, nic, 1, None);
        let monitor = SimMonitor::new(&space);
        let cache = Cache::new(FabricRegistrar::new(&fabric), monitor.clone(), config).unwrap();
        let connections = [0, 1].map(|link| {
            fabric.with(|world| {
                let connection = world.connect(link);
                world.peer_receive(connection, 100);
                connection
            })
        });
        Self { fabric, monitor, cache, connections }
    }

    fn get(&self, range: AddressRange, access: Access) -> Result<RigLease<'_>, GetError> {
        get_simulated(&self.cache, range, access)
    }

    fn get_by(&self, range: AddressRange, deadline: Instant) -> Result<RigLease<'_>, GetError> {
        SimulatedRequest::new(&self.cache, range, Access::READ).wait_until(deadline).get()
    }

    fn suspend<'c>(
        &'c self,
        range: AddressRange,
        leases: Vec<RigLease<'c>>,
        terms: SuspensionTerms,
    ) -> Result<Held<'c>, Refusal<'c>> {
        self.cache.suspend(range, vec![self.connections[0]], leases, terms)
    }

    fn begin<'c>(&'c self, range: AddressRange, terms: SuspensionTerms) -> Pending<'c> {
        let connections = vec![self.connections[0]];
        self.cache.begin_suspension(range, connections, Vec::new(), terms).unwrap()
    }

    /// A peer writes one cell, and everything that follows from it happens, within `time`.
    fn peer_writes(&self, id: u64, key: Key, at: usize, time: u64) {
        self.fabric.with(|world| {
            world.peer_write(self.connections[0], id, (key, at), 1).unwrap();
            world.run_until(world.now() + time);
        });
    }

    fn first_cell(&self, range: AddressRange) -> u64 {
        self.fabric.with(|world| world.read(range))[0]
    }

    fn is_stopped(&self, link: usize) -> bool {
        self.fabric.with(|world| world.is_stopped(link))
    }

    /// Sends a cell of `lease` on the first connection.
    fn send(&self, lease: &RigLease<'_>) {
        let at = lease.range().start();
        let work = Work { id: 1, key: lease.handle(), at, cells: 1 };
        let cell = AddressRange::new(at, CELL_BYTES).unwrap();
        self.fabric.with(|world| {
            let meant = world.read(cell);
            world.post_send(self.connections[0], work, &meant).unwrap();
        });
    }
}

fn refused(result: Result<Held<'_>, Refusal<'_>>) -> Refused<ConnectionId> {
    match result.unwrap_err().why {
        Why::Refused(refused) => refused,
        other => panic!("{other:?}"),
    }
}

fn terms() -> SuspensionTerms {
    SuspensionTerms { gets: Gets::Refuse, ..SuspensionTerms::default() }
}

mod course {
    use super::*;

    fn a_write_waits_and_finds_the_new_pages(nic: NicConfig, config: Config) -> Keys {
        let rig = Rig::with(nic, config);
        let lease = rig.get(pages(0, 4), EXPOSED).unwrap();
        let key = lease.handle();
        rig.peer_writes(1, key, pages(0, 1).start(), 100_000);
        assert_eq!(rig.first_cell(pages(0, 1)), stamp(1, 0));
        let suspended = rig.suspend(pages(0, 4), vec![lease], terms()).unwrap();
        rig.peer_writes(2, key, pages(0, 1).start(), 100_000);
        assert_eq!(rig.first_cell(pages(0, 1)), stamp(1, 0), "written while suspended");
        rig.fabric.with(|world| world.migrate(pages(0, 4)));
        let mut resumed = suspended.resume().unwrap();
        let lease = resumed.leases.pop().unwrap().unwrap();
        assert_eq!(lease.handle() == key, resumed.keys == Keys::Same);
        assert!(resumed.lost.is_empty() && resumed.late.is_none() && !lease.is_invalidated());
        if resumed.keys == Keys::Same {
            rig.fabric.with(|world| world.run_until(world.now() + 100_000));
            assert_eq!(rig.first_cell(pages(0, 1)), stamp(2, 0), "lost");
        }
        assert_eq!(rig.cache.suspension_statistics().resumed, 1);
        resumed.keys
    }

    #[test]
    fn a_peer_waits_and_writes_to_the_new_pages() {
        for withdraws in [false, true] {
            for on_demand in [false, true] {
                for cache_remote in [false, true] {
                    let nic = NicConfig { withdraws, on_demand, ..NicConfig::default() };
                    let config = Config { cache_remote, ..Config::default() };
                    let keys = a_write_waits_and_finds_the_new_pages(nic, config);
                    assert_eq!(keys, Keys::Same);
                }
            }
        }
    }

    #[test]
    fn a_device_that_changes_keys_says_so() {
        let nic = NicConfig { changes_keys: true, ..NicConfig::default() };
        assert_eq!(a_write_waits_and_finds_the_new_pages(nic, Config::default()), Keys::Changed);
    }

    #[test]
    fn what_no_lease_kept_is_registered_anew() {
        let rig = Rig::new();
        drop(rig.get(pages(0, 4), Access::READ).unwrap());
        let suspended = rig.suspend(pages(1, 1), Vec::new(), terms()).unwrap();
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0);
        assert_eq!(suspended.range(), pages(1, 1));
        suspended.resume().unwrap();
        drop(rig.get(pages(0, 4), Access::READ).unwrap());
        assert_eq!(rig.cache.statistics().registrations, 2);
    }

    #[test]
    fn a_kept_registration_serves_hits_again() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 4), Access::READ).unwrap();
        let suspended = rig.suspend(pages(0, 4), vec![lease], terms()).unwrap();
        let resumed = suspended.resume().unwrap();
        drop(rig.get(pages(1, 1), Access::READ).unwrap());
        assert_eq!((rig.cache.statistics().hits, resumed.leases.len()), (1, 1));
    }

    #[test]
    fn leases_come_back_in_their_order() {
        let rig = Rig::new();
        let ranges = [pages(2, 1), pages(0, 1), pages(3, 1), pages(0, 1)];
        let leases = ranges.map(|range| rig.get(range, Access::READ).unwrap()).into();
        let resumed = rig.suspend(pages(0, 4), leases, terms()).unwrap().resume().unwrap();
        let back: Vec<_> = resumed.leases.iter().map(|it| it.as_ref().unwrap().range()).collect();
        assert_eq!(back, ranges);
    }

    #[test]
    fn memory_unmapped_meanwhile_fails_its_own_lease_alone() {
        let rig = Rig::new();
        let leases = [pages(0, 1), pages(2, 1)].map(|range| rig.get(range, Access::READ).unwrap());
        let suspended = rig.suspend(pages(0, 4), leases.into(), terms()).unwrap();
        rig.fabric.with(|world| world.change(pages(0, 1), |space| space.unmap(pages(0, 1))));
        let resumed = suspended.resume().unwrap();
        assert!(resumed.leases[0].is_err() && resumed.leases[1].is_ok());
        assert!(!rig.is_stopped(0));
        drop(resumed);
        rig.cache.evict_idle();
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0);
    }

    /// The registration that the word waits for is gone with its renewal, which comes behind the change.
    #[test]
    fn what_is_renewed_behind_a_change_is_not_waited_for() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        let suspended = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        let is_gone = Arc::new(AtomicBool::new(false));
        let said = Arc::clone(&is_gone);
        rig.cache.invalidate_then(pages(0, 1), move || said.store(true, SeqCst));
        assert!(!is_gone.load(SeqCst), "it comes back");
        let resumed = suspended.resume().unwrap();
        assert!(resumed.leases[0].is_ok() && is_gone.load(SeqCst));
    }

    /// What is found out on the way back runs callbacks, and one of them may want what the renewal is
    /// about to serve.
    #[test]
    fn a_callback_on_the_way_back_may_get_what_is_being_renewed() {
        let rig = Arc::new(Rig::new());
        let lease = rig.get(pages(0, 2), Access::READ).unwrap();
        let mut other = rig.get(pages(8, 1), Access::READ).unwrap();
        let (inner, calls) = (Arc::clone(&rig), Arc::new(Mutex::new(0)));
        let counted = Arc::clone(&calls);
        other.on_invalidate(move || {
            drop(inner.get(pages(1, 1), Access::READ).unwrap());
            *counted.lock().unwrap() += 1;
        });
        let suspended = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        rig.fabric.with(|world| world.change(pages(8, 1), |space| space.unmap(pages(8, 1))));
        let resumed = suspended.resume().unwrap();
        assert!(resumed.leases[0].is_ok());
        assert_eq!(*calls.lock().unwrap(), 1);
    }
}

mod refusals {
    use super::*;

    #[test]
    fn a_device_that_cannot_says_so_and_nothing_is_touched() {
        let space = Arc::new(AddressSpace::new());
        space.map(pages(0, 4), Protection::ReadWrite);
        let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
        let monitor = SimMonitor::new(&space);
        let cache = Cache::new(SimRegistrar::new(&device), monitor, Config::default()).unwrap();
        let lease = get_simulated(&cache, pages(0, 1), Access::READ).unwrap();
        let not = cache.suspend(pages(0, 4), Vec::new(), vec![lease], terms()).unwrap_err();
        assert_eq!(not.why, Why::Unsupported(Unsupported::Device));
        assert_eq!(not.leases.len(), 1);
        assert_eq!(cache.suspension_statistics().begun, 0);
    }

    #[test]
    fn a_connection_that_does_not_exist_is_named() {
        let rig = Rig::new();
        let unknown = ConnectionId { link: 7, incarnation: 1 };
        let connections = vec![rig.connections[0], unknown];
        let not = rig.cache.suspend(pages(0, 1), connections, Vec::new(), terms()).unwrap_err();
        assert_eq!(not.why, Why::Unsupported(Unsupported::Connection { index: 1 }));
    }

    #[test]
    fn leases_are_counted() {
        let rig = Rig::new();
        let leases = [0, 1, 2].map(|page| rig.get(pages(page, 1), Access::READ).unwrap());
        let terms = SuspensionTerms { leases: Leases::Refuse, ..terms() };
        let Refused { outstanding, .. } = refused(rig.suspend(pages(1, 8), Vec::new(), terms));
        assert_eq!(outstanding, Outstanding { leases: 2, ..Outstanding::default() });
        assert!(!rig.is_stopped(0));
        drop(leases);
        rig.suspend(pages(1, 8), Vec::new(), terms).unwrap().resume().unwrap();
    }

    /// A region stands in the index once for each of its blocks, and a suspension looks at them in parts.
    #[test]
    fn a_lease_of_a_long_region_is_one_lease() {
        let rig = Rig::new();
        let gib = pages(0, 1 << 18);
        rig.fabric.with(|world| world.space().map(gib, Protection::ReadWrite));
        let lease = rig.get(gib, Access::READ).unwrap();
        let terms = SuspensionTerms { leases: Leases::Refuse, ..terms() };
        let Refused { outstanding, .. } = refused(rig.suspend(gib, Vec::new(), terms));
        assert_eq!(outstanding, Outstanding { leases: 1, ..Outstanding::default() });
        drop(lease);
    }

    #[test]
    fn a_lease_of_elsewhere_is_not_taken() {
        let rig = Rig::new();
        let leases = vec![rig.get(pages(9, 1), Access::READ).unwrap()];
        let not = rig.suspend(pages(0, 4), leases, terms()).unwrap_err();
        assert_eq!(not.why, Why::ForeignLease { index: 0 });
        assert!(not.leases[0].is_ok());
    }

    thread_local! {
        static SCANS: Cell<usize> = const { Cell::new(0) };
    }

    fn count_scan() -> bool {
        SCANS.set(SCANS.get() + 1);
        true
    }

    /// A get that finds no room looks at a leased region that is being suspended once, not until its
    /// patience is spent.
    #[test]
    fn are_looked_at_once_by_a_get_without_room() {
        let barriers = barriers_of_one_thread(count_scan);
        let config = Config { max_regions: 1, barriers, ..Config::default() };
        let rig = Rig::with(NicConfig::default(), config);
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        let _pending = rig.begin(pages(0, 1), terms());
        SCANS.set(0);
        let refused = rig.get(pages(5, 1), Access::READ).map(|lease| lease.range()).unwrap_err();
        assert!(matches!(refused, GetError::Exhausted(_)), "{refused}");
        assert!(SCANS.get() <= 4, "{} scans", SCANS.get());
        drop(lease);
    }

    #[test]
    fn leases_are_waited_for() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        let pending = match rig.begin(pages(0, 1), terms()).poll().unwrap() {
            SuspendProgress::Pending(pending, outstanding) => {
                assert_eq!(outstanding.leases, 1);
                pending
            }
            SuspendProgress::Suspended(_) => panic!("a lease is alive"),
        };
        // What is posted under the lease could not end on a stopped connection.
        assert!(!rig.is_stopped(0));
        drop(lease);
        let suspended = pending.poll().unwrap();
        assert!(matches!(suspended, SuspendProgress::Suspended(_)) && rig.is_stopped(0));
    }

    #[test]
    fn what_never_drains_is_refused_at_the_deadline_and_goes_on() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        rig.fabric.with(|world| world.weather.cut = Some(0));
        rig.send(&lease);
        let terms = SuspensionTerms { deadline: Duration::from_micros(100), ..terms() };
        let Refused { outstanding, waited, lost, .. } =
            refused(rig.suspend(pages(0, 1), vec![lease], terms));
        assert_eq!((outstanding.transfers, lost.len()), (1, 0));
        assert!(waited >= terms.deadline && outstanding.oldest_transfer >= terms.deadline);
        assert!(!rig.is_stopped(0));
        rig.fabric.with(|world| {
            world.weather.cut = None;
            world.run_until(world.now() + 1_000_000);
            assert!(world.poll().is_some());
        });
        assert_eq!(rig.cache.suspension_statistics().refused, 1);
    }

    #[test]
    fn a_connection_that_dies_while_it_drains_is_told() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        rig.fabric.with(|world| world.weather.cut = Some(0));
        rig.send(&lease);
        let resumed = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap().resume().unwrap();
        assert_eq!(resumed.lost.len(), 1);
        assert_eq!(rig.fabric.with(World::poll_ended), Some(rig.connections[0]));
        assert_eq!(rig.fabric.with(|world| world.connected(0)), None, "it does not come back");
    }

    #[test]
    fn a_cancelled_suspension_leaves_everything_as_it_was() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        let not = rig.begin(pages(0, 1), terms()).cancel();
        assert!(matches!(not.why, Why::Refused(_)) && !rig.is_stopped(0));
        drop((not, lease));
        drop(rig.get(pages(0, 1), Access::READ).unwrap());
        assert_eq!(rig.cache.statistics().hits, 1);
    }
}

mod gets {
    use super::*;

    #[test]
    fn of_a_suspended_region_are_refused_and_of_others_served() {
        let rig = Rig::new();
        drop(rig.get(pages(0, 8), Access::READ).unwrap());
        let pending = rig.begin(pages(2, 2), terms());
        let refused = |range| rig.get(range, Access::READ).map(drop);
        assert_eq!(refused(pages(3, 4)), Err(GetError::Suspended { range: pages(2, 2) }));
        assert_eq!(refused(pages(4, 4)), Ok(()));
        let SuspendProgress::Suspended(suspended) = pending.poll().unwrap() else {
            panic!("not yet")
        };
        assert_eq!(refused(pages(2, 1)), Err(GetError::Suspended { range: pages(2, 2) }));
        assert_eq!(refused(pages(0, 2)), Ok(()));
        suspended.resume().unwrap();
        assert_eq!(refused(pages(0, 8)), Ok(()));
    }

    #[test]
    fn are_held_back_until_the_end() {
        let rig = Rig::new();
        let hold = SuspensionTerms { deadline: Duration::from_secs(3600), ..Default::default() };
        let suspended = rig.suspend(pages(0, 4), Vec::new(), hold).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| rig.get(pages(0, 1), Access::READ).map(drop));
            rig.fabric.with(|world| world.migrate(pages(0, 4)));
            suspended.resume().unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn held_back_fail_at_the_deadline() {
        let rig = Rig::new();
        let hold = SuspensionTerms { deadline: Duration::from_micros(1), ..Default::default() };
        let suspended = rig.suspend(pages(0, 4), Vec::new(), hold).unwrap();
        let got = rig.get(pages(0, 1), Access::READ).map(drop);
        assert_eq!(got, Err(GetError::Suspended { range: pages(0, 4) }));
        suspended.resume().unwrap();
    }

    /// What is there already is served, whenever the deadline was.
    #[test]
    fn held_back_fail_at_their_own_deadline() {
        let rig = Rig::new();
        drop(rig.get(pages(8, 1), Access::READ).unwrap());
        let hold = SuspensionTerms { deadline: Duration::from_secs(3600), ..Default::default() };
        let suspended = rig.suspend(pages(0, 4), Vec::new(), hold).unwrap();
        let begun = Instant::now();
        for patience in [Duration::ZERO, Duration::from_millis(20)] {
            let got = rig.get_by(pages(0, 1), begun + patience).map(drop);
            assert_eq!(got, Err(GetError::Suspended { range: pages(0, 4) }));
            assert!(begun.elapsed() >= patience);
        }
        assert!(rig.get_by(pages(8, 1), begun).unwrap().is_cached());
        suspended.resume().unwrap();
        assert!(rig.get_by(pages(0, 1), begun).is_ok());
    }

    /// Their own thread is to end what they would wait for.
    #[test]
    fn of_a_callback_within_a_call_of_the_suspension_are_refused_at_once() {
        for at_poll in [false, true] {
            let rig = Arc::new(Rig::new());
            let lease = rig.get(pages(0, 2), Access::READ).unwrap();
            let mut other = rig.get(pages(8, 1), Access::READ).unwrap();
            let got = Arc::new(Mutex::new(None));
            let (inner, said) = (Arc::clone(&rig), Arc::clone(&got));
            other.on_invalidate(move || {
                let error = inner.get(pages(0, 1), Access::READ).map(drop).unwrap_err();
                *said.lock().unwrap() = Some(error);
            });
            let hold = SuspensionTerms { deadline: Duration::MAX, ..Default::default() };
            let connections = vec![rig.connections[0]];
            let change =
                || rig.fabric.with(|world| world.change(pages(8, 1), |it| it.unmap(pages(8, 1))));
            if at_poll {
                let begun = rig.cache.begin_suspension(pages(0, 1), connections, vec![lease], hold);
                change();
                drop(begun.unwrap().poll().unwrap());
            } else {
                let suspended = rig.suspend(pages(0, 1), vec![lease], hold).unwrap();
                change();
                suspended.resume().unwrap();
            }
            let refused = GetError::Suspended { range: pages(0, 1) };
            assert_eq!(*got.lock().unwrap(), Some(refused));
        }
    }

    #[test]
    fn the_suspensions_deadline_comes_before_a_later_one() {
        let rig = Rig::new();
        let hold = SuspensionTerms { deadline: Duration::from_micros(1), ..Default::default() };
        let suspended = rig.suspend(pages(0, 4), Vec::new(), hold).unwrap();
        let got = rig.get_by(pages(0, 1), Instant::now() + Duration::from_secs(3600)).map(drop);
        assert_eq!(got, Err(GetError::Suspended { range: pages(0, 4) }));
        suspended.resume().unwrap();
    }
}

mod ways_out {
    use super::*;

    fn exposed(on_drop: OnDrop) -> Rig {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        let terms = SuspensionTerms { on_drop, ..terms() };
        drop(rig.suspend(pages(0, 1), vec![lease], terms).unwrap());
        rig
    }

    #[test]
    fn dropped_is_killed_in_the_open() {
        let rig = exposed(OnDrop::Kill);
        assert_eq!(rig.fabric.with(World::poll_ended), Some(rig.connections[0]));
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0);
        assert_eq!(rig.cache.suspension_statistics().killed, 1);
        drop(rig.get(pages(0, 1), Access::READ).unwrap());
    }

    #[test]
    fn dropped_is_resumed_on_the_programs_word() {
        let rig = exposed(OnDrop::Resume);
        assert_eq!(rig.fabric.with(World::poll_ended), None);
        assert!(!rig.is_stopped(0));
        assert_eq!(rig.cache.suspension_statistics().resumed, 1);
    }

    #[test]
    fn a_panic_is_a_drop() {
        let rig = Rig::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _suspended = rig.suspend(pages(0, 1), Vec::new(), terms()).unwrap();
            panic!("in the middle of it");
        }));
        assert!(panicked.is_err());
        assert_eq!(rig.fabric.with(World::poll_ended), Some(rig.connections[0]));
        assert_eq!(rig.cache.suspension_statistics().killed, 1);
    }

    #[test]
    fn an_overdue_one_expires_in_the_open() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        let suspended = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        assert_eq!(rig.cache.expire_suspensions(), 0);
        rig.fabric.with(|world| world.pass(20_000_000));
        assert!(suspended.remaining().is_zero() && !suspended.has_expired());
        assert_eq!(rig.cache.expire_suspensions(), 1);
        assert!(suspended.has_expired());
        drop(rig.get(pages(0, 1), Access::READ).unwrap());
        assert_eq!(suspended.resume().unwrap_err().failed, vec![rig.connections[0]]);
        assert_eq!(rig.fabric.with(World::poll_ended), Some(rig.connections[0]));
    }

    /// Stopped, with nothing withdrawn.
    #[test]
    fn one_that_expires_as_it_drains_names_no_connection_as_failed() {
        let rig = Rig::new();
        let begun = rig.begin(pages(0, 1), terms());
        assert!(rig.is_stopped(0));
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        let not = begun.poll().unwrap_err();
        assert!(matches!(&not.why, Why::Refused(why) if why.failed.is_empty()));
        assert!(!rig.is_stopped(0));
    }

    #[test]
    fn an_overdue_one_names_what_had_died_before() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        rig.fabric.with(|world| world.weather.cut = Some(0));
        rig.send(&lease);
        let suspended = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        let ended = suspended.resume().unwrap_err();
        let lost: Vec<_> = ended.lost.iter().map(|&(connection, _)| connection).collect();
        assert_eq!((lost, ended.failed), (vec![rig.connections[0]], vec![]));
    }

    /// Its registrations were withdrawn: they come back under other names.
    #[test]
    fn one_that_is_given_up_says_that_keys_have_changed() {
        for changes_keys in [false, true] {
            let nic = NicConfig { changes_keys, ..NicConfig::default() };
            let rig = Rig::with(nic, Config::default());
            rig.fabric.with(|world| world.weather.flush = 1_000_000);
            let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
            let key = lease.handle();
            let connections = vec![rig.connections[0]];
            let begun = rig.cache.begin_suspension(pages(0, 1), connections, vec![lease], terms());
            let SuspendProgress::Pending(pending, _) = begun.unwrap().poll().unwrap() else {
                panic!("flushed")
            };
            let not = pending.cancel();
            let lease = not.leases[0].as_ref().unwrap();
            let keys = if changes_keys { Keys::Changed } else { Keys::Same };
            assert_eq!((not.keys, lease.handle() != key), (keys, changes_keys));
        }
    }

    /// Never drops `value`, and keeps it where the leak sanitizer finds it.
    fn leak<T>(value: T) {
        static LEAKED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
        LEAKED.lock().unwrap().push(Box::into_raw(Box::new(value)).expose_provenance());
    }

    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_expires_too() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        leak(rig.suspend(pages(0, 1), vec![lease], terms()).unwrap());
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0);
        drop(rig.get(pages(0, 1), Access::READ).unwrap());
    }

    /// Brings a suspension as far as it comes, forgets it and lets its time pass.
    fn forget_until_overdue<'c>(rig: &'c Rig, leases: Vec<RigLease<'c>>) -> Outstanding {
        let connections = vec![rig.connections[0]];
        let begun = rig.cache.begin_suspension(pages(0, 1), connections, leases, terms());
        let SuspendProgress::Pending(pending, outstanding) = begun.unwrap().poll().unwrap() else {
            panic!("nothing was in the way");
        };
        leak(pending);
        assert!(rig.get(pages(0, 1), Access::READ).is_err());
        assert_eq!(rig.cache.expire_suspensions(), 0, "it has time");
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        assert_eq!(
            (rig.cache.expire_suspensions(), rig.cache.suspension_statistics().expired),
            (0, 1)
        );
        drop(rig.get(pages(0, 1), Access::READ).unwrap());
        outstanding
    }

    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_that_waits_for_leases_expires_too() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        assert_eq!(forget_until_overdue(&rig, Vec::new()).leases, 1);
        assert_eq!(rig.fabric.with(World::poll_ended), None, "its connections go on");
        assert!(!lease.is_invalidated());
    }

    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_that_waits_for_transfers_expires_and_its_connections_go_on() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        rig.fabric.with(|world| world.weather.cut = Some(0));
        rig.send(&lease);
        // The cut link would end the connection while time passes.
        let outstanding = forget_until_overdue(&rig, vec![lease]);
        assert_eq!(outstanding.transfers, 1);
        assert!(!rig.is_stopped(0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_that_has_withdrawn_something_expires_in_the_open() {
        let rig = Rig::new();
        rig.fabric.with(|world| world.weather.flush = 1_000_000);
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        assert!(forget_until_overdue(&rig, vec![lease]).translations);
        assert_eq!(rig.fabric.with(World::poll_ended), Some(rig.connections[0]));
        assert_eq!(rig.fabric.with(|world| world.registrations()), 1, "the one got since");
    }

    /// The connection outlives the cache: it must not stand still for ever, whatever the clock says.
    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_ends_with_its_cache() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        let forever = SuspensionTerms { deadline: Duration::MAX, ..terms() };
        leak(rig.suspend(pages(0, 1), vec![lease], forever).unwrap());
        let Rig { fabric, cache, connections, .. } = rig;
        drop(cache);
        assert_eq!(fabric.with(World::poll_ended), Some(connections[0]), "failed in the open");
        assert_eq!(fabric.with(|world| world.registrations()), 0);
    }

    /// Nothing was withdrawn, so nothing is failed.
    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_that_withdrew_nothing_lets_its_connections_go_on_as_its_cache_ends() {
        let rig = Rig::new();
        leak(rig.begin(pages(0, 1), terms()));
        assert!(rig.is_stopped(0));
        let Rig { fabric, cache, .. } = rig;
        drop(cache);
        assert!(!fabric.with(|world| world.is_stopped(0)));
        assert_eq!(fabric.with(World::poll_ended), None);
    }

    #[test]
    fn one_that_expired_before_it_came_about_says_so_and_gives_its_leases_back() {
        let rig = Rig::new();
        let kept = rig.get(pages(0, 1), EXPOSED).unwrap();
        let other = rig.get(pages(0, 1), EXPOSED).unwrap();
        let connections = vec![rig.connections[0]];
        let begun = rig.cache.begin_suspension(pages(0, 1), connections, vec![kept], terms());
        let begun = begun.unwrap();
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        let not = begun.poll().unwrap_err();
        assert!(matches!(&not.why, Why::Refused(why) if why.failed.is_empty()));
        assert!(not.leases[0].is_ok());
        drop((not, other));
        let counts = rig.cache.suspension_statistics();
        assert_eq!((counts.begun, counts.expired, counts.refused), (1, 1, 0));
        assert!(!rig.is_stopped(0));
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0, "both leases have ended");
    }

    #[test]
    fn one_that_expired_with_its_registrations_withdrawn_has_lost_them() {
        let rig = Rig::new();
        rig.fabric.with(|world| world.weather.flush = 1_000_000);
        let kept = rig.get(pages(0, 1), EXPOSED).unwrap();
        let connections = vec![rig.connections[0]];
        let begun = rig.cache.begin_suspension(pages(0, 1), connections, vec![kept], terms());
        let SuspendProgress::Pending(pending, _) = begun.unwrap().poll().unwrap() else {
            panic!("flushed")
        };
        rig.fabric.with(|world| world.pass(20_000_000));
        assert_eq!(rig.cache.expire_suspensions(), 1);
        let not = pending.cancel();
        assert!(not.leases[0].is_err());
        let Why::Refused(Refused { failed, .. }) = not.why else { panic!("{:?}", not.why) };
        assert_eq!(failed, [rig.connections[0]]);
        assert_eq!(rig.fabric.with(|world| world.registrations()), 0);
        let counts = rig.cache.suspension_statistics();
        assert_eq!((counts.begun, counts.expired, counts.refused), (1, 1, 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "leaks on purpose, which Miri reports")]
    fn a_leaked_one_does_not_outlive_the_cache() {
        let Rig { fabric, cache, connections, .. } = Rig::new();
        let suspended = cache.suspend(pages(0, 1), connections.into(), Vec::new(), terms());
        leak(suspended.unwrap());
        drop(cache);
        assert_eq!(fabric.with(|world| world.registrations()), 0);
    }

    #[test]
    fn late_is_told() {
        let rig = Rig::new();
        let suspended = rig.suspend(pages(0, 1), Vec::new(), terms()).unwrap();
        rig.fabric.with(|world| world.pass(15_000_000));
        let late = suspended.resume().unwrap().late.unwrap();
        assert!(late >= Duration::from_millis(5), "{late:?}");
    }

    #[test]
    fn a_forked_child_leaves_its_parents_suspension_alone() {
        let rig = Rig::new();
        let suspended = rig.suspend(pages(0, 1), Vec::new(), terms()).unwrap();
        rig.monitor.lose(Lost::Forked);
        drop(suspended);
        assert_eq!(rig.fabric.with(World::poll_ended), None);
        let not = rig.suspend(pages(0, 1), Vec::new(), terms()).unwrap_err();
        assert_eq!(not.why, Why::Forked);
    }

    #[test]
    fn a_forked_child_resumes_nothing_and_says_so() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        let key = lease.handle();
        let mut notices = rig.cache.notices(9);
        let suspended = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        rig.monitor.lose(Lost::Forked);
        assert!(suspended.resume().is_err());
        assert_eq!((notices.next(), notices.wait(Duration::MAX)), (None, None));
        assert!(rig.is_stopped(0) && rig.fabric.with(|world| world.is_registered(key)));
        assert_eq!(rig.cache.notices(1).next(), None);
    }
}

mod several {
    use super::*;

    #[test]
    fn the_same_bytes_twice_are_refused() {
        let rig = Rig::new();
        let first = rig.suspend(pages(0, 4), Vec::new(), terms()).unwrap();
        let not = rig.suspend(pages(3, 4), Vec::new(), terms()).unwrap_err();
        assert_eq!(not.why, Why::AlreadySuspended { range: pages(0, 4) });
        first.resume().unwrap();
        rig.suspend(pages(3, 4), Vec::new(), terms()).unwrap().resume().unwrap();
    }

    #[test]
    fn a_shared_connection_goes_on_with_the_last() {
        let rig = Rig::new();
        let first = rig.suspend(pages(0, 1), Vec::new(), terms()).unwrap();
        let second = rig.suspend(pages(4, 1), Vec::new(), terms()).unwrap();
        first.resume().unwrap();
        assert!(rig.is_stopped(0), "the second still relies on it");
        second.resume().unwrap();
        assert!(!rig.is_stopped(0));
    }

    #[test]
    fn a_registration_that_reaches_into_both_keeps_the_second_waiting() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 8), EXPOSED).unwrap();
        let first = rig.suspend(pages(0, 1), vec![lease], terms()).unwrap();
        let Refused { outstanding, .. } = refused(rig.suspend(pages(4, 1), Vec::new(), terms()));
        assert_eq!(outstanding.registrations, 1);
        let mut resumed = first.resume().unwrap();
        let leases = resumed.leases.drain(..).map(Result::unwrap).collect();
        rig.suspend(pages(4, 1), leases, terms()).unwrap().resume().unwrap();
    }
}

mod shared_budget {
    use super::*;

    /// What is held, and what was held when the program was last told.
    #[derive(Default)]
    struct Books(Mutex<[Amount; 2]>);

    impl Account for Books {
        fn take(&self, amount: Amount) -> Result<(), BudgetRefusal> {
            self.overdraw(amount);
            Ok(())
        }

        fn overdraw(&self, amount: Amount) {
            let [held, _] = &mut *self.0.lock().unwrap();
            *held = *held + amount;
        }

        fn give(&self, amount: Amount) {
            let [held, _] = &mut *self.0.lock().unwrap();
            *held = *held - amount;
        }

        fn recall(&self, _missing: Amount) -> bool {
            false
        }

        fn refused(&self, _error: RegisterError, _missing: Amount) -> bool {
            false
        }

        fn settle(&self) {
            let [held, told] = &mut *self.0.lock().unwrap();
            *told = *held;
        }

        fn attach(&self, _lender: Weak<dyn Lender>) {}
    }

    fn drawing_on(account: Arc<Books>) -> Rig {
        let Rig { fabric, monitor, connections, .. } = Rig::new();
        let (registrar, config) = (FabricRegistrar::new(&fabric), Config::default());
        let cache = Cache::with_account(registrar, monitor.clone(), config, account).unwrap();
        Rig { fabric, monitor, cache, connections }
    }

    #[test]
    fn gets_back_what_could_not_be_renewed_and_is_told() {
        let books = Arc::<Books>::default();
        let rig = drawing_on(Arc::clone(&books));
        let lease = rig.get(pages(0, 2), EXPOSED).unwrap();
        let suspended = rig.suspend(pages(0, 2), vec![lease], terms()).unwrap();
        let kept = Amount::one(2 * PAGE_BYTES);
        assert_eq!(*books.0.lock().unwrap(), [kept, kept], "a suspended registration counts");
        rig.fabric.with(|world| world.fail_next_registrations(1));
        assert!(suspended.resume().unwrap().leases.pop().unwrap().is_err());
        assert_eq!(*books.0.lock().unwrap(), [Amount::ZERO; 2]);
    }
}

/// A device that panics: everything ends in the open, and nothing is left behind.
mod panics {
    use super::*;

    const ALL: [Moment; 2] = [Moment::Before, Moment::After];

    impl Rig {
        fn panic_next(&self, call: DeviceCall, moment: Moment) {
            self.fabric.with(|world| world.panic_next(Some((call, moment))));
        }

        /// Runs `f`, in which the device panics as it was told.
        fn catch<T>(&self, call: DeviceCall, f: impl FnOnce() -> T) {
            let panic = catch_unwind(AssertUnwindSafe(|| drop(f()))).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&DevicePanic(call)));
        }

        /// Nothing is suspended or stopped any more, and all works as on the first day. `kept` leases that
        /// the panic has kept from the program hold their registrations until the cache goes.
        fn assert_whole(&self, call: DeviceCall, kept: usize) {
            assert!(!self.is_stopped(0) && !self.is_stopped(1), "{call:?}: stopped for good");
            self.cache.evict_idle();
            assert_eq!(self.fabric.with(|world| world.registrations()), kept, "{call:?}");
            let counts = self.cache.suspension_statistics();
            let ended = counts.refused + counts.resumed + counts.killed + counts.expired;
            assert_eq!(counts.begun, ended, "{call:?}: {counts:?}");
            let lease = self.get(pages(4, 4), EXPOSED).unwrap();
            let both = self.connections.into();
            let again = self.cache.suspend(pages(4, 4), both, vec![lease], terms()).unwrap();
            let Ok(resumed) = again.resume() else { panic!("expired") };
            assert!(resumed.leases[0].is_ok(), "{call:?}");
        }
    }

    fn exposed(rig: &Rig) -> (Vec<RigLease<'_>>, Vec<ConnectionId>) {
        (vec![rig.get(pages(0, 4), EXPOSED).unwrap()], rig.connections.into())
    }

    #[test]
    fn on_the_way_to_a_suspension_let_everything_go_on() {
        for call in
            [DeviceCall::Stop, DeviceCall::InFlight, DeviceCall::Withdraw, DeviceCall::Quiet]
        {
            for moment in ALL {
                let rig = Rig::new();
                let (leases, connections) = exposed(&rig);
                rig.panic_next(call, moment);
                rig.catch(call, || rig.cache.suspend(pages(0, 4), connections, leases, terms()));
                assert_eq!(rig.fabric.with(World::poll_ended), None, "{call:?}");
                assert_eq!(rig.cache.suspension_statistics().refused, 1);
                rig.assert_whole(call, 1);
            }
        }
    }

    #[test]
    fn on_the_way_back_end_in_a_revocation() {
        for call in [DeviceCall::Widen, DeviceCall::Renew, DeviceCall::Restart] {
            for moment in ALL {
                let rig = Rig::new();
                let mut notices = rig.cache.notices(9);
                let (leases, connections) = exposed(&rig);
                let suspended =
                    rig.cache.suspend(pages(0, 4), connections, leases, terms()).unwrap();
                rig.panic_next(call, moment);
                rig.catch(call, || suspended.resume());
                let ended = rig.fabric.with(|world| [world.poll_ended(), world.poll_ended()]);
                assert!(ended.iter().all(Option::is_some), "{call:?}: {ended:?}");
                let last = std::iter::from_fn(|| notices.next()).last();
                let by = Revocation::DevicePanicked;
                assert!(matches!(last, Some(Notice::Revoked { by: it, .. }) if it == by));
                assert_eq!(rig.cache.suspension_statistics().killed, 1);
                // What could not be renewed is lost.
                rig.assert_whole(call, usize::from(call == DeviceCall::Restart));
            }
        }
    }

    #[test]
    fn while_failing_save_no_other_connection_and_are_counted() {
        for moment in ALL {
            for expire in [false, true] {
                let rig = Rig::new();
                let (leases, connections) = exposed(&rig);
                let suspended =
                    rig.cache.suspend(pages(0, 4), connections, leases, terms()).unwrap();
                rig.panic_next(DeviceCall::Fail, moment);
                if expire {
                    rig.fabric.with(|world| world.pass(20_000_000));
                    assert_eq!(rig.cache.expire_suspensions(), 1);
                }
                drop(suspended);
                assert_eq!(rig.cache.suspension_statistics().device_panics, 1);
                let ended = rig.fabric.with(|world| [world.poll_ended(), world.poll_ended()]);
                let failed = ended.into_iter().flatten().count();
                assert_eq!(failed, if moment == Moment::Before { 1 } else { 2 });
            }
        }
    }

    #[test]
    fn beside_the_programs_own_do_not_abort() {
        let rig = Rig::new();
        let (leases, connections) = exposed(&rig);
        let terms = SuspensionTerms { on_drop: OnDrop::Resume, ..terms() };
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _held = rig.cache.suspend(pages(0, 4), connections, leases, terms).unwrap();
            rig.panic_next(DeviceCall::Restart, Moment::Before);
            std::panic::resume_unwind(Box::new("the program's own"));
        }));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"the program's own"));
        let counts = rig.cache.suspension_statistics();
        assert_eq!((counts.killed, counts.device_panics), (1, 1));
        rig.assert_whole(DeviceCall::Restart, 1);
    }
}

/// What the program is told.
mod notices {
    use super::*;

    fn heard<'c>(notices: &mut Notices<'c, FabricRegistrar, SimMonitor>) -> Vec<Notice<Key>> {
        std::iter::from_fn(|| notices.next()).collect()
    }

    #[test]
    fn a_key_that_changes_is_named_between_the_two_ends() {
        for changes_keys in [false, true] {
            let nic = NicConfig { changes_keys, ..NicConfig::default() };
            let rig = Rig::with(nic, Config::default());
            let mut notices = rig.cache.notices(9);
            let lease = rig.get(pages(0, 4), EXPOSED).unwrap();
            let (from, range) = (lease.handle(), pages(1, 1));
            let suspended = rig.suspend(range, vec![lease], terms()).unwrap();
            let suspension = suspended.id();
            assert_eq!(heard(&mut notices), [Notice::Suspended { suspension, range }]);
            let resumed = suspended.resume().unwrap();
            let to = resumed.leases[0].as_ref().unwrap().handle();
            let rekeyed = Notice::Rekeyed { suspension, range: pages(0, 4), from, to };
            let end = Notice::Resumed { suspension, range, keys: resumed.keys };
            let expected = if changes_keys { vec![rekeyed, end] } else { vec![end] };
            assert_eq!(heard(&mut notices), expected);
        }
    }

    #[test]
    fn a_registration_that_does_not_come_back_is_lost() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 4), EXPOSED).unwrap();
        let handle = lease.handle();
        let mut notices = rig.cache.notices(9);
        let suspended = rig.suspend(pages(0, 4), vec![lease], terms()).unwrap();
        let (suspension, range) = (suspended.id(), pages(0, 4));
        rig.fabric.with(|world| world.fail_next_registrations(1));
        let keys = suspended.resume().unwrap().keys;
        let lost = Notice::Lost { suspension, range, handle };
        let end = Notice::Resumed { suspension, range, keys };
        assert_eq!(heard(&mut notices)[1..], [lost, end]);
    }

    #[test]
    fn a_revocation_says_by_what_and_names_the_keys() {
        for by in [Revocation::Dropped, Revocation::Expired] {
            let rig = Rig::new();
            let lease = rig.get(pages(0, 4), EXPOSED).unwrap();
            let handle = lease.handle();
            let mut notices = rig.cache.notices(9);
            let suspended = rig.suspend(pages(0, 4), vec![lease], terms()).unwrap();
            let (suspension, range) = (suspended.id(), pages(0, 4));
            if by == Revocation::Expired {
                rig.fabric.with(|world| world.pass(20_000_000));
                rig.cache.expire_suspensions();
            }
            drop(suspended);
            let lost = Notice::Lost { suspension, range, handle };
            let end = Notice::Revoked { suspension, range, by };
            assert_eq!(heard(&mut notices)[1..], [lost, end]);
        }
    }

    #[test]
    fn what_was_refused_before_anything_was_withdrawn_tells_nothing() {
        let rig = Rig::new();
        let mut notices = rig.cache.notices(9);
        let lease = rig.get(pages(0, 1), EXPOSED).unwrap();
        drop(rig.begin(pages(0, 1), terms()).cancel());
        assert!(rig.suspend(pages(0, 1), Vec::new(), terms()).is_err());
        assert_eq!(heard(&mut notices), []);
        // Nor does what is cancelled when it could go on.
        let pending = rig.begin(pages(0, 1), terms());
        drop(lease);
        drop(pending.cancel());
        assert_eq!(heard(&mut notices), []);
        assert!(!rig.is_stopped(0));
    }

    #[test]
    fn a_device_with_less_room_than_the_settings_is_told_once() {
        let rig =
            Rig::with(NicConfig { max_regions: 4, ..NicConfig::default() }, Config::default());
        let mut notices = rig.cache.notices(9);
        // Another program has taken two of the four places.
        let registrar = FabricRegistrar::new(&rig.fabric);
        let other = Cache::new(registrar, rig.monitor.clone(), Config::default()).unwrap();
        for page in [0, 1] {
            drop(get_simulated(&other, pages(page, 1), Access::READ).unwrap());
        }
        for round in 0..3 {
            for page in 0..4 {
                drop(rig.get(pages(page, 1), Access::READ).unwrap());
            }
            let told = heard(&mut notices);
            let shrank = |notice: &Notice<Key>| match *notice {
                Notice::BudgetShrank { from, to } => (from.regions, to.regions) == (4, 2),
                _ => false,
            };
            let expected = if round == 0 { 1 } else { 0 };
            assert_eq!(told.len(), expected, "{told:?}");
            assert!(told.iter().all(shrank), "{told:?}");
        }
    }
}

/// A connection that its program makes ready again after it broke, as a queue pair that is connected anew: to the
/// cache it is the same one.
mod reconnected {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum QueuePair {
        Running,
        Stopped,
        Broken,
    }

    const BROKEN: ConnectionLost = ConnectionLost::Broken { errno: 107 };

    /// Has one queue pair.
    struct Device {
        inner: SimRegistrar,
        queue_pair: Arc<Mutex<QueuePair>>,
    }

    impl Device {
        fn is_alive(&self) -> Result<(), ConnectionLost> {
            if *self.queue_pair.lock().unwrap() == QueuePair::Broken { Err(BROKEN) } else { Ok(()) }
        }

        fn set(&self, queue_pair: QueuePair) {
            *self.queue_pair.lock().unwrap() = queue_pair;
        }
    }

    impl FakeDevice for Device {
        type Handle = Handle;

        fn limits(&self) -> RegistrarLimits {
            self.inner.limits()
        }

        fn register(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
            self.inner.register(range, access)
        }

        fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
            self.inner.deregister(handle, range)
        }
    }

    impl FakeSuspend for Device {
        type Connection = ();

        fn can_suspend(&self, _: AddressRange, _: &[()]) -> Result<(), Unsupported> {
            Ok(())
        }

        fn stop(&self, (): &()) -> Result<(), ConnectionLost> {
            self.is_alive()?;
            self.set(QueuePair::Stopped);
            Ok(())
        }

        fn in_flight(&self, (): &(), _: AddressRange) -> Result<Transfers, ConnectionLost> {
            self.is_alive().map(|()| Transfers::default())
        }

        fn restart(&self, (): &()) -> Result<(), ConnectionLost> {
            self.is_alive()?;
            self.set(QueuePair::Running);
            Ok(())
        }

        fn fail(&self, (): &()) {
            self.set(QueuePair::Broken);
        }
    }

    /// The suspension that lost it stands on it no more, so the next one stops it anew.
    #[test]
    fn one_that_was_lost_is_stopped_for_the_next_suspension() {
        for breaks_before_its_stop in [false, true] {
            let space = Arc::new(AddressSpace::new());
            space.map(pages(0, 8), Protection::ReadWrite);
            let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
            let queue_pair = Arc::new(Mutex::new(QueuePair::Running));
            let set = |state| *queue_pair.lock().unwrap() = state;
            let inner = SimRegistrar::new(&device);
            let registrar = Fake(Device { inner, queue_pair: Arc::clone(&queue_pair) });
            let cache = Cache::new(registrar, SimMonitor::new(&space), Config::default()).unwrap();
            if breaks_before_its_stop {
                set(QueuePair::Broken);
            }
            let first = cache.begin_suspension(pages(0, 1), vec![()], Vec::new(), terms()).unwrap();
            set(QueuePair::Broken);
            let SuspendProgress::Suspended(first) = first.poll().unwrap() else {
                panic!("nothing is under way");
            };
            assert_eq!(first.connections(), []);
            set(QueuePair::Running);
            let second = cache.suspend(pages(4, 1), vec![()], Vec::new(), terms()).unwrap();
            assert_eq!(*queue_pair.lock().unwrap(), QueuePair::Stopped);
            assert_eq!(second.connections(), [()]);
            // It is the second's alone.
            assert_eq!(first.resume().unwrap().lost, [((), BROKEN)]);
            assert_eq!(*queue_pair.lock().unwrap(), QueuePair::Stopped);
            assert_eq!(second.resume().unwrap().lost, []);
            assert_eq!(*queue_pair.lock().unwrap(), QueuePair::Running);
        }
    }
}

/// With the costs of a clock by which each thing takes a microsecond.
fn admitting() -> Rig {
    fn microseconds() -> u64 {
        thread_local! {
            static NOW: Cell<u64> = const { Cell::new(0) };
        }
        NOW.replace(NOW.get() + 1_000)
    }
    let config = Config { clock: Some(Clock::new(microseconds)), ..Config::default() };
    let rig = Rig::with(NicConfig::default(), config);
    rig.monitor.set_change_surcharge(7_000);
    rig
}

/// A region whose suspension ends it was kept in vain, as one that was evicted; one that was used a hundred times paid.
#[test]
fn what_a_suspension_ends_is_judged_by_its_hits() {
    let kept = |rig: &Rig| rig.get(pages(0, 1), Access::READ).unwrap().is_cached();
    for (hits, bought) in [(0, [12, 22, 44]), (100, [12, 1, 1])] {
        let rig = admitting();
        let uses_until_kept = || {
            let uses = (1..=100).find(|_| kept(&rig)).unwrap();
            (0..hits).for_each(|_| assert!(kept(&rig)));
            let lease = rig.get(pages(0, 1), Access::READ).unwrap();
            let terms = SuspensionTerms { on_drop: OnDrop::Kill, ..SuspensionTerms::default() };
            drop(rig.cache.suspend(pages(0, 1), Vec::new(), vec![lease], terms).unwrap());
            uses
        };
        assert_eq!([0; 3].map(|_| uses_until_kept()), bought, "{hits} hits");
    }
}

/// Hits behind the suspension count as those before it.
#[test]
fn what_goes_on_behind_a_suspension_is_judged_by_all_its_hits() {
    let kept = |rig: &Rig| rig.get(pages(0, 1), Access::READ).unwrap().is_cached();
    for [before, behind] in [[0, 100], [100, 0]] {
        let rig = admitting();
        let uses_until_kept = || {
            let uses = (1..=100).find(|_| kept(&rig)).unwrap();
            (0..before).for_each(|_| assert!(kept(&rig)));
            let lease = rig.get(pages(0, 1), Access::READ).unwrap();
            let terms = SuspensionTerms::default();
            let held = rig.cache.suspend(pages(0, 1), Vec::new(), vec![lease], terms).unwrap();
            drop(held.resume());
            (0..behind).for_each(|_| assert!(kept(&rig)));
            rig.cache.invalidate(pages(0, 1));
            rig.cache.reclaim();
            uses
        };
        assert_eq!([0; 3].map(|_| uses_until_kept()), [12, 1, 1], "{before}, {behind}");
    }
}

/// Nothing is bought meanwhile, and nothing in vain.
#[test]
fn to_ask_while_memory_is_suspended_costs_its_account_nothing() {
    let costs = UseCosts { per_use: 1_300, hit: 300, keeping: 20_000 };
    let rig = admitting();
    let worth = || {
        let request = SimulatedRequest::new(&rig.cache, pages(0, 1), Access::READ);
        request.get_if_worth(costs).map(|lease| lease.is_some())
    };
    assert!((0..100).any(|_| worth().unwrap()));
    assert!((0..100).all(|_| worth().unwrap()));
    let terms = SuspensionTerms { gets: Gets::Refuse, ..SuspensionTerms::default() };
    let held = rig.cache.suspend(pages(0, 1), Vec::new(), Vec::new(), terms).unwrap();
    assert!((0..100).all(|_| matches!(worth(), Err(GetError::Suspended { .. }))));
    drop(held.resume());
    assert!(worth().unwrap(), "kept from its first use");
}
