//! What a suspension must show, on the simulated fabric: one test for each behaviour.
//!
//! Whether memory was touched is judged by its content: a peer's write lands in the pages that the
//! device has a translation of, and pages that the program has moved away from are somebody
//! else's.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the cache's door. A simulated address has no memory
//! behind it, so there is nothing that a device could spoil.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic)] // tests may fail loudly

use pinfold_core::{
    Access, Account, AddressRange, Amount, Cache, Config, GetError, Gets, InFlight, Keys, Lease,
    Leases, Lender, Lost, NotSuspended, OnDrop, Progress, Refusal as BudgetRefusal, Refused,
    RegisterError, Suspended, Suspending, SuspensionTerms, Unsupported, Why,
};
use pinfold_sim::fabric::{
    CELL_BYTES, ConnectionId, Fabric, FabricRegistrar, Key, NicConfig, Work, World, stamp,
};
use pinfold_sim::{
    AddressSpace, Device, DeviceConfig, PAGE_BYTES, Protection, SimMonitor, SimRegistrar,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

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
        let start = std::ptr::without_provenance(range.start());
        // SAFETY: there is no memory behind a simulated address.
        unsafe { self.cache.get(start, range.len(), access) }
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
    fn what_nobody_kept_is_registered_anew() {
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
}

mod refusals {
    use super::*;

    #[test]
    fn a_device_that_cannot_says_so_and_nothing_is_touched() {
        let space = Arc::new(AddressSpace::new());
        space.map(pages(0, 4), Protection::ReadWrite);
        let device = Arc::new(Device::new(Arc::clone(&space), DeviceConfig::default()));
        let monitor = SimMonitor::new(&space);
        let cache = Cache::new(SimRegistrar::new(&device), monitor, Config::default()).unwrap();
        let start = std::ptr::without_provenance(pages(0, 4).start());
        // SAFETY: there is no memory behind a simulated address.
        let lease = unsafe { cache.get(start, PAGE_BYTES, Access::READ) }.unwrap();
        let not = cache.suspend(pages(0, 4), Vec::new(), vec![lease], terms()).unwrap_err();
        assert_eq!(not.why, Why::Unsupported(Unsupported::Device));
        assert_eq!(not.leases.len(), 1);
        assert_eq!(cache.suspension_statistics().begun, 0);
    }

    #[test]
    fn a_connection_that_does_not_exist_is_named() {
        let rig = Rig::new();
        let nobody = ConnectionId { link: 7, incarnation: 1 };
        let connections = vec![rig.connections[0], nobody];
        let not = rig.cache.suspend(pages(0, 1), connections, Vec::new(), terms()).unwrap_err();
        assert_eq!(not.why, Why::Unsupported(Unsupported::Connection { index: 1 }));
    }

    #[test]
    fn leases_are_counted() {
        let rig = Rig::new();
        let leases = [0, 1, 2].map(|page| rig.get(pages(page, 1), Access::READ).unwrap());
        let terms = SuspensionTerms { leases: Leases::Refuse, ..terms() };
        let Refused { in_flight, .. } = refused(rig.suspend(pages(1, 8), Vec::new(), terms));
        assert_eq!(in_flight, InFlight { leases: 2, ..InFlight::default() });
        assert!(!rig.is_stopped(0));
        drop(leases);
        rig.suspend(pages(1, 8), Vec::new(), terms).unwrap().resume().unwrap();
    }

    #[test]
    fn a_lease_of_elsewhere_is_not_taken() {
        let rig = Rig::new();
        let leases = vec![rig.get(pages(9, 1), Access::READ).unwrap()];
        let not = rig.suspend(pages(0, 4), leases, terms()).unwrap_err();
        assert_eq!(not.why, Why::ForeignLease { index: 0 });
        assert!(not.leases[0].is_ok());
    }

    #[test]
    fn leases_are_waited_for() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        let pending = match rig.begin(pages(0, 1), terms()).poll().unwrap() {
            Progress::Pending(pending, in_flight) => {
                assert_eq!(in_flight.leases, 1);
                pending
            }
            Progress::Suspended(_) => panic!("a lease is alive"),
        };
        // What is posted under the lease could not end on a stopped connection.
        assert!(!rig.is_stopped(0));
        drop(lease);
        let suspended = pending.poll().unwrap();
        assert!(matches!(suspended, Progress::Suspended(_)) && rig.is_stopped(0));
    }

    #[test]
    fn what_never_drains_is_refused_at_the_deadline_and_goes_on() {
        let rig = Rig::new();
        let lease = rig.get(pages(0, 1), Access::READ).unwrap();
        rig.fabric.with(|world| world.weather.cut = Some(0));
        rig.send(&lease);
        let terms = SuspensionTerms { deadline: Duration::from_micros(100), ..terms() };
        let Refused { in_flight, waited, lost } =
            refused(rig.suspend(pages(0, 1), vec![lease], terms));
        assert_eq!((in_flight.transfers, lost.len()), (1, 0));
        assert!(waited >= terms.deadline && in_flight.oldest_transfer >= terms.deadline);
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
        let Progress::Suspended(suspended) = pending.poll().unwrap() else { panic!("not yet") };
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
        let Refused { in_flight, .. } = refused(rig.suspend(pages(4, 1), Vec::new(), terms()));
        assert_eq!(in_flight.registrations, 1);
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
