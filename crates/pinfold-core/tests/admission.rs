//! What is kept, and what is registered for each use: with costs that a clock of the test makes.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)] // a test speaks

mod common;

use common::{Rig, Setup, pages};
use pinfold_core::{
    Access, AddressRange, Cache, Clock, Config, GetError, Keep, Lost, Monitor as _, PerUse,
    Position, Replay, Sequence, Uncovered, UseCosts, Watch, WhenFull,
};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Fake, FakeMonitor, Moment, Protection, SimDevice, SimRegistrar,
    SimulatedRequest, get_simulated,
};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Whatever is measured took a microsecond: registering, deregistering, watching, a check; what surrounds a registration took none,
/// beside as many readings. So a use that is not kept costs one microsecond more than a hit, and keeping four and the surcharge.
///
/// Each test, being a thread, has its own.
fn microseconds() -> u64 {
    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(0) };
    }
    NOW.replace(NOW.get() + 1_000)
}

/// What a change is said to cost more.
const SURCHARGE: u64 = 7_000;
/// The first counts for nothing, because nothing was measured before, nor do the next two, because deregistering was not; the
/// range's next uses must come to more than two microseconds and the surcharge (watching was not measured yet).
const USES_UNTIL_KEPT: usize = 12;

fn rig_with(config: Config) -> Rig {
    let rig = Setup::with(config).rig();
    rig.monitor.set_change_surcharge(SURCHARGE);
    rig
}

fn by_default() -> Config {
    Config { clock: Some(Clock::new(microseconds)), ..Config::default() }
}

/// The use, from 1 on, that was kept.
fn uses_until_kept(rig: &Rig, most: usize) -> Option<usize> {
    (1..=most).find(|_| rig.lease(pages(1, 1)).is_cached())
}

#[test]
fn first_uses_are_not_watched_and_end_with_their_leases() {
    let rig = rig_with(by_default());
    let lease = rig.lease(pages(1, 1));
    assert_eq!(lease.per_use(), Some(PerUse::NotAdmitted));
    let handle = lease.handle();
    drop(lease);
    assert!(!rig.is_registered(handle));
    let statistics = rig.statistics();
    assert_eq!((statistics.per_use, statistics.not_admitted), (1, 1));
    assert_eq!((statistics.per_use_reason, rig.monitor.watch_calls()), (None, 0));
}

#[test]
fn what_is_used_often_is_kept() {
    let rig = rig_with(by_default());
    assert_eq!(uses_until_kept(&rig, 100), Some(USES_UNTIL_KEPT));
    let kept = rig.touch(pages(1, 1));
    assert!((0..100).all(|_| rig.touch(pages(1, 1)) == kept));
    assert_eq!(rig.monitor.watch_calls(), 1);
    assert_eq!(rig.statistics().not_admitted, USES_UNTIL_KEPT as u64 - 1);
}

/// Though few uses ask the monitor, the log does not fill up.
#[test]
fn what_is_registered_for_each_use_reads_the_log() {
    let config = Config { keep: Keep::Never, ..by_default() };
    let rig = Setup { log_capacity: 16, ..Setup::with(config) }.rig();
    let kept = rig.get_to_keep(pages(20, 1)).unwrap().handle();
    for _ in 0..200 {
        assert_eq!(rig.monitor.watch(pages(30, 1)), Watch::Covered);
        rig.reallocate(pages(30, 1));
        assert!(!rig.lease(pages(40, 1)).is_cached());
    }
    assert_eq!((rig.touch(pages(20, 1)), rig.statistics().overflows), (kept, 0));
}

/// Nor is a lease made of what changed before it was asked for, whether it is kept or not.
#[test]
fn what_changed_before_a_use_concerns_no_lease_of_it() {
    let rig = rig_with(by_default());
    let mut kept = 0;
    for _ in 0..100 {
        drop(rig.get_to_keep(pages(1, 1)).unwrap());
        rig.reallocate(pages(0, 2));
        // The region there does not begin as early.
        let lease = rig.lease(pages(0, 2));
        kept += u32::from(lease.is_cached());
        assert!(!lease.is_invalidated(), "behind {kept} that were kept");
    }
    assert!(kept > 0);
}

/// Changes that have returned come into the log as it is asked how far it has come: until then a thread has them in hand.
#[derive(Default)]
struct Late {
    in_hand: Mutex<Vec<AddressRange>>,
    log: Mutex<Vec<AddressRange>>,
    is_fast: bool,
    checks: AtomicUsize,
}

impl FakeMonitor for Late {
    fn check(&self) -> Result<Sequence, Lost> {
        self.checks.fetch_add(1, Ordering::SeqCst);
        let mut log = self.log.lock().unwrap();
        log.append(&mut self.in_hand.lock().unwrap());
        Ok(Sequence(log.len() as u64))
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let log = self.log.lock().unwrap();
        log.iter().skip(usize::try_from(from.0).unwrap()).for_each(|&range| visit(range));
        let end = log.len() as u64;
        let (up_to, sequence) = (Position(end, 0), Sequence(end));
        Replay { up_to, sequence, complete: true, may_repeat: false }
    }

    fn has_slow_check(&self) -> bool {
        !self.is_fast
    }

    fn change_surcharge(&self) -> u64 {
        SURCHARGE
    }
}

/// How often the monitor is asked in so many gets of bytes that are in no region, half of which say that they are for one use.
fn checks_in(gets: usize, is_fast: bool) -> usize {
    let space = Arc::new(AddressSpace::new());
    space.map(pages(0, gets), Protection::ReadWrite);
    let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
    let monitor = Fake(Late { is_fast, ..Late::default() });
    let cache = Cache::new(SimRegistrar::new(&device), monitor, by_default()).unwrap();
    for page in 0..gets {
        let request = SimulatedRequest::new(&cache, pages(page, 1), Access::READ);
        let request = if page % 2 == 0 { request } else { request.once() };
        assert!(!request.get().unwrap().is_cached());
    }
    cache.monitor().checks.load(Ordering::SeqCst)
}

#[test]
fn an_answer_is_done_without_only_where_it_takes_long() {
    assert!(checks_in(64, true) >= 64);
    assert!((1..=16).contains(&checks_in(64, false)));
}

/// It would be given up for that.
#[test]
fn what_is_to_be_kept_knows_of_what_changed_before() {
    let space = Arc::new(AddressSpace::new());
    space.map(pages(0, 2), Protection::ReadWrite);
    let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
    let registrar = SimRegistrar::new(&device);
    let cache = Cache::new(registrar, Fake(Late::default()), by_default()).unwrap();
    let mut kept = 0;
    for _ in 0..200 {
        let request = SimulatedRequest::new(&cache, pages(1, 1), Access::READ);
        drop(request.to_keep().get().unwrap());
        cache.monitor().in_hand.lock().unwrap().push(pages(0, 2));
        let lease = get_simulated(&cache, pages(0, 2), Access::READ).unwrap();
        kept += u32::from(lease.is_cached());
        assert!(!lease.is_cached() || !lease.is_invalidated(), "the {kept}th");
    }
    assert!(kept > 0);
}

/// Another page begins at another place in the books.
#[test]
fn every_range_is_counted_for_itself() {
    let rig = rig_with(by_default());
    assert_eq!(uses_until_kept(&rig, 100), Some(USES_UNTIL_KEPT));
    assert!(!rig.lease(pages(2, 1)).is_cached());
    assert!(rig.lease(pages(1, 1)).is_cached());
}

/// A program that maps, uses once and unmaps: of ten thousand uses few are watched.
#[test]
fn what_is_kept_in_vain_is_kept_ever_more_seldom() {
    let rig = rig_with(by_default());
    for _ in 0..1_000 {
        rig.touch(pages(1, 1));
        rig.reallocate(pages(1, 1));
    }
    let bought = rig.monitor.watch_calls();
    // 11, 20, 40 uses, and then one in 80.
    assert!((10..=16).contains(&bought), "{bought}");
}

/// Once bought, and paid by some hundred hits, each life is kept from its first use.
#[test]
fn a_purchase_that_paid_is_repeated_at_the_first_use() {
    let rig = rig_with(by_default());
    assert_eq!(uses_until_kept(&rig, 100), Some(USES_UNTIL_KEPT));
    for _ in 0..3 {
        (0..100).for_each(|_| drop(rig.lease(pages(1, 1))));
        rig.reallocate(pages(1, 1));
        assert_eq!(uses_until_kept(&rig, 100), Some(1));
    }
    // That one was in vain.
    rig.reallocate(pages(1, 1));
    let again = uses_until_kept(&rig, 100).unwrap();
    assert!((USES_UNTIL_KEPT - 1..=USES_UNTIL_KEPT).contains(&again), "{again}");
}

/// A program that maps, uses once and unmaps beside a buffer that it uses all the time: the hits of the one do not make the
/// other worth keeping.
#[test]
fn the_hits_of_another_range_pay_for_nothing() {
    let rig = rig_with(by_default());
    assert!((0..100).any(|_| rig.lease(pages(8, 1)).is_cached()));
    let bought_before = rig.monitor.watch_calls();
    for _ in 0..1_000 {
        rig.touch(pages(1, 1));
        rig.reallocate(pages(1, 1));
        (0..30).for_each(|_| assert!(rig.lease(pages(8, 1)).is_cached()));
    }
    let bought = rig.monitor.watch_calls() - bought_before;
    assert!((10..=16).contains(&bought), "{bought}");
}

/// What is never kept, because a peer may use it, says nothing of whether local uses pay.
#[test]
fn uses_by_a_peer_end_nothing_that_is_kept() {
    let rig = rig_with(by_default());
    let access = Access::READ | Access::REMOTE_READ;
    for uses in [Some(USES_UNTIL_KEPT), Some(1), Some(1)] {
        assert_eq!(uses_until_kept(&rig, 100), uses);
        for _ in 0..50 {
            assert_eq!(
                rig.get(pages(1, 1), access).unwrap().per_use(),
                Some(PerUse::Remote(access))
            );
            assert!(rig.lease(pages(1, 1)).is_cached());
        }
        rig.reallocate(pages(1, 1));
    }
}

/// A registration with more rights takes the place of one of the same range, with its account.
#[test]
fn more_rights_are_judged_by_their_own_hits() {
    let rig = rig_with(by_default());
    assert_eq!(uses_until_kept(&rig, 100), Some(USES_UNTIL_KEPT));
    let writes = || rig.get(pages(1, 1), Access::READ_WRITE).unwrap().is_cached();
    assert!((0..100).filter(|_| writes()).count() > 97);
    rig.reallocate(pages(1, 1));
    assert!(writes(), "kept from the first use");
}

#[test]
fn what_was_evicted_is_not_kept_either() {
    let rig = rig_with(by_default());
    uses_until_kept(&rig, 100).unwrap();
    assert_eq!(rig.cache().evict_idle(), 1);
    // In vain, so it takes twice as many now.
    let again = uses_until_kept(&rig, 100).unwrap();
    assert!(again > USES_UNTIL_KEPT + 5, "{again}");
}

#[test]
fn the_callers_word_skips_the_decision() {
    let rig = rig_with(Config { keep: Keep::Never, ..by_default() });
    let range = pages(1, 1);
    assert!(rig.get_to_keep(range).unwrap().is_cached());
    assert!(rig.lease(range).is_cached(), "found by every caller");
    assert!(rig.get_vouched(pages(2, 1)).unwrap().is_cached());
}

#[test]
fn never_and_always_are_obeyed() {
    let never = rig_with(Config { keep: Keep::Never, ..by_default() });
    assert_eq!(uses_until_kept(&never, 100), None);
    assert_eq!(never.monitor.watch_calls(), 0);
    let always = rig_with(Config { keep: Keep::Always, ..by_default() });
    assert_eq!(uses_until_kept(&always, 100), Some(1));
}

#[test]
fn what_costs_nothing_to_watch_is_kept_from_the_first_use() {
    let rig = Setup::with(by_default()).rig();
    assert_eq!(uses_until_kept(&rig, 1), Some(1));
}

/// Of a caller that copies instead: ten nanoseconds more than a hit each time, against a price of fifty.
const COPIES: UseCosts = UseCosts { per_use: 12, hit: 2, keeping: 50 };

/// The use, from 1 on, for which the first pages were leased to one that can do without.
fn uses_until_worth(rig: &Rig, costs: UseCosts) -> Option<usize> {
    (1..=100).find(|_| rig.get_if_worth(pages(1, 2), costs).unwrap().is_some())
}

#[test]
fn a_caller_that_can_do_without_is_leased_what_is_worth_keeping() {
    let rig = rig_with(by_default());
    assert_eq!(uses_until_worth(&rig, COPIES), Some(6));
    assert_eq!((rig.statistics().registrations, rig.monitor.watch_calls()), (1, 1));
    let lease = rig.get_if_worth(pages(1, 1), COPIES).unwrap().unwrap();
    assert!(lease.is_cached(), "what is there serves every caller");
    drop(lease);
    // The hits since then paid for it.
    (0..20).for_each(|_| drop(rig.lease(pages(1, 1))));
    rig.reallocate(pages(1, 2));
    assert_eq!(uses_until_worth(&rig, COPIES), Some(1));
    // That was in vain, and so is what follows it.
    rig.reallocate(pages(1, 2));
    assert_eq!(uses_until_worth(&rig, COPIES), Some(6));
    rig.reallocate(pages(1, 2));
    assert_eq!(uses_until_worth(&rig, COPIES), Some(11));
}

/// Gets and those that can do without pay into one account.
#[test]
fn there_is_one_account_of_what_was_paid() {
    let rig = rig_with(by_default());
    (1..USES_UNTIL_KEPT - 1).for_each(|_| drop(rig.lease(pages(1, 1))));
    assert_eq!(rig.statistics().not_admitted, USES_UNTIL_KEPT as u64 - 2);
    let worth = rig.get_if_worth(pages(1, 1), UseCosts { per_use: 1_500, hit: 0, keeping: 8_000 });
    assert!(worth.unwrap().is_some());
}

#[test]
fn what_is_cheaper_than_a_hit_and_what_may_never_be_kept_is_not_leased() {
    let never = rig_with(Config { keep: Keep::Never, ..by_default() });
    assert_eq!(uses_until_worth(&never, COPIES), None);
    let rig = rig_with(by_default());
    assert_eq!(uses_until_worth(&rig, UseCosts { per_use: 2, ..COPIES }), None);
    assert_eq!((never.statistics().registrations, rig.statistics().registrations), (0, 0));
}

/// A registration that was to be kept and is not was paid for in vain.
#[test]
fn what_cannot_be_watched_is_tried_ever_more_seldom() {
    let rig = rig_with(by_default());
    rig.monitor.uncover(pages(1, 2), Uncovered::NoMonitor);
    assert_eq!(uses_until_worth(&rig, COPIES), Some(6));
    assert_eq!(rig.statistics().per_use, 1);
    assert_eq!([0; 3].map(|_| uses_until_worth(&rig, COPIES)), [Some(11), Some(21), Some(41)]);
}

/// The same of a plain get: as many watches as of what changes right behind each purchase.
#[test]
fn what_cannot_be_watched_is_kept_ever_more_seldom() {
    let rig = rig_with(by_default());
    rig.monitor.uncover(pages(1, 1), Uncovered::NoMonitor);
    (0..1_000).for_each(|_| drop(rig.lease(pages(1, 1))));
    let bought = rig.monitor.watch_calls();
    assert!((10..=16).contains(&bought), "{bought}");
    assert_eq!(rig.statistics().per_use, 1_000);
}

/// The error is the registration's, and nothing is held of it.
#[test]
fn what_makes_no_sense_or_does_not_fit_is_an_error_of_the_lease_alone() {
    let rig = rig_with(Config { max_bytes: 4096, when_full: WhenFull::Refuse, ..by_default() });
    let none = rig.get_if_worth(pages(1, 2), COPIES);
    assert!(none.unwrap().is_none(), "nothing was asked for yet");
    let refused = (0..100).find_map(|_| rig.get_if_worth(pages(1, 2), COPIES).err());
    assert!(matches!(refused, Some(GetError::Exhausted(_))), "{refused:?}");
    assert_eq!((rig.statistics().pinned_bytes, rig.statistics().regions), (0, 0));
    let longer = pages(1, 1 << 20);
    assert!(matches!(rig.get_if_worth(longer, COPIES), Err(GetError::TooLong { .. })));
}

/// What was to be kept and was refused was paid for in vain, too.
#[test]
fn what_does_not_fit_is_tried_ever_more_seldom() {
    let rig = rig_with(Config { max_bytes: 4096, when_full: WhenFull::Refuse, ..by_default() });
    let uses_until_refused = |_| (1..=100).find(|_| rig.get_if_worth(pages(1, 2), COPIES).is_err());
    assert_eq!([0; 3].map(uses_until_refused), [Some(6), Some(11), Some(21)]);
}

/// What is registered for one use serves no other, so no thread waits for it.
#[test]
fn no_thread_waits_for_a_registration_that_is_not_kept() {
    let rig = rig_with(by_default());
    let gate = rig.hold_next_registration(Moment::After);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| rig.touch(pages(1, 1)));
        gate.wait_for_arrivals(1);
        let other = rig.touch(pages(1, 1));
        gate.open();
        assert_ne!(slow.join().unwrap(), other);
    });
    assert_eq!(rig.statistics().waits, 0);
}

/// A clock by which things take now long, now no time.
fn moods() -> u64 {
    static NOW: AtomicU64 = AtomicU64::new(0);
    static MOOD: AtomicU64 = AtomicU64::new(1);
    let step = |mood: u64| mood.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    let mood = MOOD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |mood| Some(step(mood)));
    NOW.fetch_add(mood.unwrap() >> 44, Ordering::Relaxed)
}

/// The decision is about what is kept, not about what is believed: whatever it is, each lease has the
/// program's own pages (`Rig::lease` looks), and the books agree (`Rig` looks when it ends).
#[test]
fn a_decision_that_changes_its_mind_is_never_stale() {
    let mut rig = rig_with(Config { clock: Some(Clock::new(moods)), ..Config::default() });
    rig.start_reclaimer();
    std::thread::scope(|scope| {
        for first in 0..2_usize {
            let rig = &rig;
            scope.spawn(move || {
                for turn in 0..if cfg!(miri) { 50 } else { 4_000_usize } {
                    // Each thread changes its own memory, so it knows what is fresh.
                    let own = pages(8 * first + turn % 3, 1 + turn % 2);
                    rig.touch(own);
                    if turn % 5 == 0 {
                        rig.reallocate(own);
                    }
                    rig.touch(own);
                }
            });
        }
    });
    let statistics = rig.statistics();
    assert!(statistics.hits > 0 && statistics.not_admitted > 0, "{statistics}");
}
