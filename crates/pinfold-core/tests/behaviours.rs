//! What a registration cache must show, one test for each behaviour.
//!
//! The list is the sum of what the tests of UCX, libfabric and Open MPI demand of theirs, and of
//! what their users had to report. Whether a lease is right is judged by the device: the pages
//! that it would really move against the pages that the program really has. Threads are put in
//! order by gates in the device's way, not by time. Whatever a test does, the cache's books must
//! agree with the device's at its end, and nothing may be registered after the cache.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)] // only tests use it

mod common;

use common::{BROKEN, MAPPED_PAGES, Rig, Setup, Undecided, bytes, get_panics, pages, until};
use pinfold_core::followed::Followed;
use pinfold_core::{
    Access, AddressRange, Amount, BadAddress, Cache, Config, ConfigError, DeregisterError,
    Exhausted, GetError, Limit, Lost, MappingKind, Monitor, Notice, PerUse, RangeError,
    RegisterError, Uncovered, Watch, WhenFull,
};
use pinfold_sim::{
    DeviceConfig, Fault, FaultGate, Handle, Moment, PAGE_BYTES, Protection, SimDevice, SimRegistrar,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

/// A count of calls that a callback can own.
#[derive(Clone, Default)]
struct Calls(Arc<AtomicU32>);

impl Calls {
    fn callback(&self) -> impl FnOnce() + Send + 'static {
        let calls = self.clone();
        // SeqCst: tests do not tune.
        move || {
            calls.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

fn hits_and_misses(rig: &Rig) -> (u64, u64) {
    let statistics = rig.statistics();
    (statistics.hits, statistics.misses)
}

mod reuse {
    use super::*;

    #[test]
    fn the_same_buffer_twice_is_one_registration() {
        let rig = Rig::new();
        assert_eq!(rig.touch(pages(0, 4)), rig.touch(pages(0, 4)));
        assert_eq!(hits_and_misses(&rig), (1, 1));
    }

    #[test]
    fn a_range_inside_is_served_by_the_same_registration() {
        let rig = Rig::new();
        let whole = rig.touch(pages(0, 4));
        assert_eq!(rig.touch(pages(1, 2)), whole);
        assert_eq!(rig.touch(bytes(5, 1)), whole);
        assert_eq!(rig.touch(bytes(4 * PAGE_BYTES - 1, 1)), whole);
    }

    #[test]
    fn two_buffers_in_one_page_share_its_registration() {
        let rig = Rig::new();
        let first = rig.lease(bytes(0, 100));
        let second = rig.lease(bytes(200, 100));
        assert_eq!(first.handle(), second.handle());
        assert_eq!(first.registered(), pages(0, 1));
        assert_eq!(second.range(), bytes(200, 100));
    }

    #[test]
    fn a_range_around_replaces_what_it_contains_once_that_is_idle() {
        let rig = Rig::new();
        let inner = rig.lease(pages(1, 1));
        let outer = rig.lease(pages(0, 4));
        assert_eq!(rig.touch(pages(1, 1)), outer.handle());
        assert_eq!(rig.cache().reclaim(), 0);
        rig.assert_fresh(&inner);
        let inner_handle = inner.handle();
        drop(inner);
        assert_eq!(rig.cache().reclaim(), 1);
        assert!(!rig.is_registered(inner_handle));
        assert_eq!(rig.statistics().superseded, 1);
    }

    #[test]
    fn disjoint_ranges_have_registrations_of_their_own() {
        let rig = Rig::new();
        let first = rig.touch(pages(0, 2));
        assert_ne!(rig.touch(pages(2, 2)), first);
        assert_eq!(rig.touch(pages(0, 2)), first);
    }

    #[test]
    fn a_range_across_two_registrations_is_one_of_its_own() {
        let rig = Rig::new();
        let halves = [rig.touch(pages(0, 2)), rig.touch(pages(2, 2))];
        let across = rig.touch(pages(1, 2));
        assert!(!halves.contains(&across));
        assert_eq!([rig.touch(pages(0, 2)), rig.touch(pages(2, 2))], halves);
    }
}

/// Overlapping registrations do not block each other.
mod overlaps {
    use super::*;

    #[test]
    fn overlapping_leases_work_whichever_ends_first() {
        for first_ends_first in [true, false] {
            let rig = Rig::new();
            let first = rig.lease(pages(0, 3));
            let second = rig.lease(pages(2, 3));
            assert_ne!(first.handle(), second.handle());
            let (ending, staying) =
                if first_ends_first { (first, second) } else { (second, first) };
            drop(ending);
            rig.cache().reclaim();
            rig.assert_fresh(&staying);
        }
    }

    #[test]
    fn an_event_in_the_intersection_waits_for_no_lease_but_the_regions_own() {
        let rig = Rig::new();
        let leased = rig.lease(pages(0, 3));
        let idle = rig.touch(pages(2, 3));
        rig.space.unmap(pages(2, 1));
        assert_eq!(rig.cache().reclaim(), 1);
        assert!(!rig.is_registered(idle));
        assert!(rig.is_registered(leased.handle()));
        assert!(leased.is_invalidated());
    }

    #[test]
    fn an_event_beside_the_intersection_hits_one_of_them() {
        let rig = Rig::new();
        let first = rig.touch(pages(0, 3));
        let second = rig.touch(pages(2, 3));
        rig.reallocate(pages(0, 1));
        assert_ne!(rig.touch(pages(0, 3)), first);
        assert_eq!(rig.touch(pages(2, 3)), second);
    }

    #[test]
    fn evicting_one_leaves_the_other() {
        let rig = Setup::regions(2).rig();
        let idle = rig.touch(pages(0, 3));
        let leased = rig.lease(pages(2, 3));
        rig.touch(pages(10, 1));
        assert!(!rig.is_registered(idle));
        rig.assert_fresh(&leased);
    }

    #[test]
    fn a_larger_registration_takes_over_while_smaller_leases_go_on() {
        let rig = Rig::new();
        let parts: Vec<_> = (0..4).map(|page| rig.lease(pages(page, 1))).collect();
        let whole = rig.lease(pages(0, 4));
        parts.iter().for_each(|part| rig.assert_fresh(part));
        assert_eq!(rig.cache().reclaim(), 0);
        drop(parts);
        assert_eq!(rig.cache().reclaim(), 4);
        rig.assert_fresh(&whole);
        assert_eq!(rig.statistics().regions, 1);
    }
}

mod changes {
    use super::*;

    /// A change of mappings and its name.
    type Change<'r> = (&'static str, Box<dyn Fn() + 'r>);

    /// Every way in which other pages come to the addresses `pages(4, 4)`.
    fn all(rig: &Rig) -> Vec<Change<'_>> {
        let space = &rig.space;
        let (buffer, elsewhere) = (pages(4, 4), pages(40, 4));
        vec![
            ("unmap, then map", Box::new(move || rig.reallocate(buffer))),
            ("map over", Box::new(move || space.map(buffer, Protection::ReadWrite))),
            ("discard", Box::new(move || space.discard(buffer))),
            ("announced discard", Box::new(move || space.begin_discard(buffer).finish())),
            (
                "remap away, then map",
                Box::new(move || {
                    space.remap(buffer, elsewhere.start()).unwrap();
                    space.map(buffer, Protection::ReadWrite);
                }),
            ),
            (
                "remap over",
                Box::new(move || {
                    space.map(elsewhere, Protection::ReadWrite);
                    space.remap(elsewhere, buffer.start()).unwrap();
                }),
            ),
        ]
    }

    #[test]
    fn memory_with_new_pages_is_never_a_hit() {
        let rig = Rig::new();
        for (name, change) in all(&rig) {
            let old = rig.touch(pages(4, 4));
            change();
            assert_ne!(rig.touch(pages(4, 4)), old, "{name}");
        }
    }

    #[test]
    fn the_registration_of_freed_memory_works_until_its_lease_ends() {
        let rig = Rig::new();
        for (name, change) in all(&rig) {
            let old = rig.lease(pages(4, 4));
            let handle = old.handle();
            let moved = rig.device.translate(handle, pages(4, 4));
            assert!(!old.is_invalidated(), "{name}");
            change();
            assert!(old.is_invalidated(), "{name}");
            let new = rig.lease(pages(4, 4));
            assert_ne!(new.handle(), handle, "{name}");
            rig.cache().reclaim();
            assert_eq!(rig.device.translate(handle, pages(4, 4)), moved, "{name}");
            drop(old);
            assert_eq!(rig.cache().reclaim(), 1, "{name}");
            assert!(!rig.is_registered(handle), "{name}");
            drop(new);
        }
    }

    /// The proof that the tests above can fail: a monitor that breaks its promise.
    #[test]
    fn a_monitor_that_misses_changes_makes_stale_leases() {
        let rig = Rig::new();
        rig.touch(pages(4, 4));
        rig.monitor.blindfold();
        rig.reallocate(pages(4, 4));
        let lease = rig.get(pages(4, 4), Access::READ).unwrap();
        assert!(!rig.device.is_fresh(lease.handle(), lease.range()));
    }

    #[test]
    fn one_byte_over_the_edge_evicts_exactly_what_overlaps() {
        let rig = Rig::new();
        let [left, right] = [rig.touch(pages(0, 2)), rig.touch(pages(2, 2))];
        rig.cache().invalidate(bytes(0, 2 * PAGE_BYTES + 1));
        assert_eq!(rig.cache().reclaim(), 2);
        assert_eq!(rig.statistics().invalidations, 2);
        let again = [rig.touch(pages(0, 2)), rig.touch(pages(2, 2))];
        assert!(!again.contains(&left) && !again.contains(&right));
        rig.cache().invalidate(bytes(0, 2 * PAGE_BYTES));
        assert_eq!(rig.touch(pages(2, 2)), again[1]);
        assert_eq!(rig.statistics().invalidations, 3);
    }

    #[test]
    fn unmapping_a_neighbour_evicts_nothing() {
        let rig = Rig::new();
        let handle = rig.touch(pages(4, 4));
        rig.space.unmap(pages(3, 1));
        rig.space.unmap(pages(8, 1));
        assert_eq!(rig.touch(pages(4, 4)), handle);
        assert_eq!(rig.statistics().invalidations, 0);
    }

    #[test]
    fn a_protection_changes_no_page() {
        let rig = Rig::new();
        let handle = rig.touch(pages(4, 4));
        rig.space.protect(pages(4, 4), Protection::ReadOnly);
        assert_eq!(rig.touch(pages(4, 4)), handle);
    }

    #[test]
    fn the_programs_word_is_as_good_as_the_monitors() {
        let rig = Rig::new();
        let lease = rig.lease(pages(0, 1));
        rig.cache().invalidate(pages(0, 1));
        assert!(lease.is_invalidated());
        assert_ne!(rig.touch(pages(0, 1)), lease.handle());
    }

    #[test]
    fn a_flood_of_events_costs_bounded_memory_and_drops_everything() {
        let rig = Setup { log_capacity: 16, ..Setup::default() }.rig();
        let bystander = rig.touch(pages(20, 1));
        for _ in 0..if cfg!(miri) { 50 } else { 10_000 } {
            assert_eq!(rig.monitor.watch(pages(30, 1)), Watch::Covered);
            rig.reallocate(pages(30, 1));
        }
        assert_ne!(rig.touch(pages(20, 1)), bystander);
        assert_eq!(rig.statistics().overflows, 1);
        assert!(rig.statistics().events <= 16);
        assert_eq!(rig.cache().reclaim(), 1);
        let handle = rig.touch(pages(20, 1));
        assert_eq!(rig.touch(pages(20, 1)), handle);
    }

    /// Whatever reads the log first.
    #[test]
    fn a_flood_of_events_that_a_reclamation_reads_drops_everything() {
        let rig = Setup { log_capacity: 16, ..Setup::default() }.rig();
        let bystander = rig.touch(pages(20, 1));
        for _ in 0..20 {
            assert_eq!(rig.monitor.watch(pages(30, 1)), Watch::Covered);
            rig.reallocate(pages(30, 1));
        }
        assert_eq!(rig.cache().reclaim(), 1);
        assert!(!rig.is_registered(bystander));
        assert_eq!(rig.statistics().overflows, 1);
    }

    #[test]
    fn idle_memory_is_given_back_without_another_get() {
        let rig = Rig::new();
        rig.touch(pages(0, 4));
        rig.space.unmap(pages(0, 4));
        assert_eq!(rig.cache().reclaim(), 1);
        assert_eq!(rig.device.counts().live, 0);
        assert_eq!(rig.statistics().pinned_bytes, 0);
    }

    #[test]
    fn a_check_serves_several_gets_and_a_new_one_knows_what_came_between() {
        let rig = Rig::new();
        let handle = rig.touch(pages(0, 1));
        let checked = rig.cache().check().unwrap();
        rig.reallocate(pages(0, 1));
        assert_eq!(common::get_checked(&checked, pages(0, 1)).unwrap().handle(), handle);
        let checked = rig.cache().check().unwrap();
        let lease = common::get_checked(&checked, pages(0, 1)).unwrap();
        assert_ne!(lease.handle(), handle);
        rig.assert_fresh(&lease);
    }
}

mod rights {
    use super::*;

    fn rights_of(rig: &Rig, handle: Handle) -> Access {
        rig.device.registration(handle).unwrap().access
    }

    #[test]
    fn a_writer_gets_a_registration_that_writes_and_serves_readers_as_well() {
        let rig = Rig::new();
        let reading = rig.touch(pages(0, 1));
        let writing = rig.get(pages(0, 1), Access::READ_WRITE).unwrap().handle();
        assert_ne!(reading, writing);
        assert!(rights_of(&rig, writing).contains(Access::READ_WRITE));
        assert_eq!(rig.touch(pages(0, 1)), writing);
        assert_eq!(rig.cache().reclaim(), 1);
    }

    #[test]
    fn readers_of_read_only_memory_are_left_alone_by_a_failing_writer() {
        let rig = Rig::new();
        rig.space.protect(pages(0, 1), Protection::ReadOnly);
        let reading = rig.touch(pages(0, 1));
        assert_eq!(rights_of(&rig, reading), Access::READ);
        let error = RegisterError::BadAddress {
            range: pages(0, 1),
            reason: BadAddress::NotWritable { at: pages(0, 1).start() },
            errno: 14,
        };
        assert_eq!(rig.refused(pages(0, 1), Access::WRITE), GetError::Register(error));
        assert_eq!(rig.touch(pages(0, 1)), reading);
    }

    #[test]
    fn nothing_is_widened_beyond_what_was_asked() {
        let rig = Rig::new();
        for access in [Access::READ, Access::WRITE, Access::READ_WRITE] {
            let lease = rig.get(pages(0, 1), access).unwrap();
            assert_eq!(rights_of(&rig, lease.handle()), access);
            rig.cache().invalidate(pages(0, 1));
        }
    }

    #[test]
    fn a_device_that_always_writes_serves_writers_from_a_readers_registration() {
        let device = DeviceConfig { always_writes: true, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let reading = rig.touch(pages(0, 1));
        assert_eq!(rig.get(pages(0, 1), Access::WRITE).unwrap().handle(), reading);
    }

    #[test]
    fn remote_rights_are_bounded_to_the_byte_and_not_kept() {
        let rig = Rig::new();
        let access = Access::READ | Access::REMOTE_READ;
        let lease = rig.get(bytes(100, 50), access).unwrap();
        let handle = lease.handle();
        assert_eq!(lease.per_use(), Some(PerUse::Remote(access)));
        assert_eq!(rig.device.registration(handle).unwrap().range, bytes(100, 50));
        drop(lease);
        assert!(!rig.is_registered(handle));
    }

    #[test]
    fn kept_remote_rights_serve_exactly_their_own_bytes_and_rights() {
        let rig = Setup::with(Config { cache_remote: true, ..Config::default() }).rig();
        let access = Access::READ | Access::REMOTE_READ;
        let handle = rig.get(bytes(100, 50), access).unwrap().handle();
        let again = |range, access| rig.get(range, access).unwrap().handle();
        assert_eq!(again(bytes(100, 50), access), handle);
        assert_ne!(again(bytes(100, 49), access), handle);
        assert_ne!(again(bytes(100, 50), access | Access::WRITE), handle);
        let local = rig.touch(pages(0, 1));
        assert_ne!(again(bytes(100, 50), access), local);
    }
}

mod limits {
    use super::*;

    fn per_use_when_full(count: usize) -> Rig {
        let when_full = WhenFull::RegisterPerUse;
        Setup::with(Config { max_regions: count, when_full, ..Config::default() }).rig()
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let rig = Setup::regions(3).rig();
        let handles: Vec<_> = (0..3).map(|page| rig.touch(pages(page, 1))).collect();
        // A new registration lets time pass: hits are ordered to the resolution of one miss.
        rig.touch(pages(0, 1));
        rig.touch(pages(3, 1));
        assert!(!rig.is_registered(handles[1]));
        rig.touch(pages(0, 1));
        rig.touch(pages(4, 1));
        assert!(!rig.is_registered(handles[2]));
        assert_eq!(rig.touch(pages(0, 1)), handles[0]);
        assert_eq!(rig.statistics().evictions, 2);
    }

    #[test]
    fn bytes_are_limited_and_only_as_much_is_given_up_as_is_needed() {
        let rig = Setup::with(Config { max_bytes: 8 * PAGE_BYTES, ..Config::default() }).rig();
        let handles: Vec<_> = (0..4).map(|n| rig.touch(pages(2 * n, 2))).collect();
        rig.touch(pages(20, 3));
        let left: Vec<_> = handles.iter().map(|&handle| rig.is_registered(handle)).collect();
        assert_eq!(left, [false, false, true, true]);
        assert_eq!(rig.device.counts().peak_pinned_bytes, 8 * PAGE_BYTES as u64);
    }

    #[test]
    fn what_is_leased_never_goes() {
        let rig = Setup::regions(3).rig();
        let leased = rig.lease(pages(0, 1));
        for page in 1..20 {
            rig.touch(pages(page, 1));
        }
        rig.assert_fresh(&leased);
        assert_eq!(rig.touch(pages(0, 1)), leased.handle());
        assert_eq!(rig.device.counts().peak_live, 3);
    }

    /// A cache of 256 regions, full, that has given up the first for a new one; three more stand
    /// by.
    fn standing_by() -> (Rig, Vec<Handle>) {
        let rig = Setup::regions(256).rig();
        rig.space.map(pages(0, 512), Protection::ReadWrite);
        let handles: Vec<_> = (0..256).map(|page| rig.touch(pages(page, 1))).collect();
        rig.touch(pages(256, 1));
        assert!(!rig.is_registered(handles[0]) && rig.is_registered(handles[1]));
        (rig, handles)
    }

    #[test]
    #[cfg_attr(
        miri,
        ignore = "takes up to two minutes, and no unsafe code that others do not reach"
    )]
    fn what_is_next_to_go_is_a_hit_and_stays() {
        let (rig, handles) = standing_by();
        let before = rig.statistics();
        assert_eq!(rig.touch(pages(2, 1)), handles[2]);
        assert_eq!(rig.statistics().hits, before.hits + 1);
        (257..280).for_each(|page| drop(rig.lease(pages(page, 1))));
        assert!(!rig.is_registered(handles[1]) && !rig.is_registered(handles[3]));
        assert_eq!(rig.touch(pages(2, 1)), handles[2]);
    }

    #[test]
    #[cfg_attr(
        miri,
        ignore = "takes up to two minutes, and no unsafe code that others do not reach"
    )]
    fn what_is_next_to_go_is_invalidated_like_any_other() {
        let (rig, handles) = standing_by();
        rig.reallocate(pages(1, 1));
        assert_ne!(rig.touch(pages(1, 1)), handles[1]);
        assert_eq!(rig.statistics().invalidations, 1);
        // Room for a larger region comes from one of the two in it; it makes the other needless.
        rig.touch(pages(2, 2));
        assert_eq!((rig.statistics().evictions, rig.statistics().superseded), (2, 1));
        rig.cache().reclaim();
        assert!(handles[..4].iter().all(|&handle| !rig.is_registered(handle)));
    }

    /// Memory that is used once, however much of it, does not drive out what is used again.
    #[test]
    fn a_scan_leaves_what_is_used_again() {
        // The interpreter's slices are short, and an eviction looks at few regions in one.
        let (regions, used_again) = if cfg!(miri) { (8, 4) } else { (64, 32) };
        let rig = Setup::regions(regions).rig();
        rig.space.map(pages(0, 1024), Protection::ReadWrite);
        let working =
            |rig: &Rig| -> Vec<_> { (0..used_again).map(|n| rig.touch(pages(n, 1))).collect() };
        let handles = working(&rig);
        // Time passes, by one registration.
        rig.touch(pages(100, 1));
        assert_eq!(working(&rig), handles);
        let scanned = if cfg!(miri) { 220 } else { 500 };
        (200..scanned).for_each(|page| drop(rig.lease(pages(page, 1))));
        assert_eq!(working(&rig), handles);
    }

    #[test]
    fn a_lease_that_is_never_ended_pins_its_own_region_only() {
        let mut rig = Setup::regions(4).rig();
        let leaked = rig.lease(pages(0, 1));
        let handle = leaked.handle();
        std::mem::forget(leaked);
        for page in 1..40 {
            rig.touch(pages(page, 1));
        }
        rig.reallocate(pages(0, 64));
        assert_eq!(rig.cache().reclaim(), 3);
        assert_eq!(rig.device.counts().live, 1);
        assert_eq!(rig.touch(pages(0, 1)), rig.touch(pages(0, 1)));
        assert!(rig.is_registered(handle));
        rig.drop_cache();
        assert_eq!(rig.device.counts().live, 0);
    }

    /// For other code that needs the room, or before the device is closed.
    #[test]
    fn everything_idle_can_be_given_up_at_once() {
        let rig = Rig::new();
        let leased = rig.lease(pages(0, 1));
        let idle: Vec<_> = (1..20).map(|page| rig.touch(pages(page, 1))).collect();
        assert_eq!(rig.cache().evict_idle(), 19);
        assert!(idle.into_iter().all(|handle| !rig.is_registered(handle)));
        rig.assert_fresh(&leased);
        assert_eq!(rig.touch(pages(0, 1)), leased.handle(), "what is leased is still found");
        assert_eq!(rig.cache().evict_idle(), 0);
        drop(leased);
        assert_eq!(rig.cache().evict_idle(), 1);
        assert_eq!((rig.statistics().regions, rig.statistics().evictions), (0, 20));
    }

    /// For one who is about to move part of the memory.
    #[test]
    fn what_is_idle_in_a_range_can_be_given_up() {
        let rig = Rig::new();
        let leased = rig.lease(pages(4, 2));
        let idle = [pages(3, 1), pages(8, 2)].map(|range| rig.touch(range));
        let elsewhere = [pages(0, 2), pages(10, 1)].map(|range| rig.touch(range));
        assert_eq!(rig.cache().evict_idle_in(pages(2, 7)), 2);
        assert!(idle.into_iter().all(|handle| !rig.is_registered(handle)));
        assert!(elsewhere.into_iter().all(|handle| rig.is_registered(handle)));
        rig.assert_fresh(&leased);
        assert_eq!(rig.touch(pages(4, 2)), leased.handle(), "what is leased is still found");
        drop(leased);
        assert_eq!(rig.cache().evict_idle_in(pages(5, 1)), 1);
        assert_eq!((rig.statistics().regions, rig.statistics().evictions), (2, 3));
        assert_eq!(rig.cache().evict_idle_in(pages(2, 7)), 0);
    }

    /// What stands by for room goes as well, and counts once.
    #[test]
    #[cfg_attr(
        miri,
        ignore = "takes up to two minutes, and no unsafe code that others do not reach"
    )]
    fn what_stands_by_is_idle_in_its_range() {
        let rig = Setup::regions(64).rig();
        for page in 0..64 {
            rig.touch(pages(page, 1));
        }
        // Makes some stand by, and gives one of them up.
        rig.space.map(pages(100, 1), Protection::ReadWrite);
        rig.touch(pages(100, 1));
        assert_eq!(rig.statistics().regions, 64);
        assert_eq!(rig.cache().evict_idle_in(pages(0, 64)), 63);
        assert_eq!((rig.statistics().regions, rig.statistics().evictions), (1, 64));
        for page in 0..64 {
            rig.touch(pages(page, 1));
        }
        assert_eq!(rig.statistics().regions, 64);
    }

    #[test]
    fn at_capacity_a_cached_region_is_a_hit() {
        let rig = Setup::regions(2).rig();
        let leases = [rig.lease(pages(0, 1)), rig.lease(pages(1, 1))];
        assert_eq!(rig.touch(pages(0, 1)), leases[0].handle());
        assert_eq!(rig.statistics().evictions, 0);
    }

    #[test]
    fn full_of_leased_regions_is_refused_with_the_limits_name() {
        let rig = Setup::regions(2).rig();
        let leases = [rig.lease(pages(0, 1)), rig.lease(pages(1, 1))];
        let exhausted = Exhausted { limit: Limit::Regions, allowed: 2, held: 2, wanted: 1 };
        assert_eq!(rig.refused(pages(2, 1), Access::READ), GetError::Exhausted(exhausted));
        assert!(exhausted.to_string().contains("max_regions"));
        drop(leases);
        rig.touch(pages(2, 1));
    }

    #[test]
    fn full_of_leased_bytes_is_refused_with_the_limits_name() {
        let rig = Setup::with(Config { max_bytes: 4 * PAGE_BYTES, ..Config::default() }).rig();
        let _lease = rig.lease(pages(0, 3));
        let wanted = 2 * PAGE_BYTES;
        let (allowed, held) = (4 * PAGE_BYTES, 3 * PAGE_BYTES);
        let exhausted = Exhausted { limit: Limit::Bytes, allowed, held, wanted };
        assert_eq!(rig.refused(pages(10, 2), Access::READ), GetError::Exhausted(exhausted));
        assert!(exhausted.to_string().contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn one_use_is_within_the_budget_and_leaves_nothing() {
        let rig = Setup::with(Config { max_bytes: PAGE_BYTES, ..Config::default() }).rig();
        let once = |range| crate::common::get_once(rig.cache(), range);
        let lease = once(pages(0, 1)).unwrap();
        assert_eq!(lease.per_use(), Some(PerUse::Asked));
        assert!(!lease.is_invalidated());
        assert!(matches!(once(pages(1, 1)).unwrap_err(), GetError::Exhausted(_)));
        drop(lease);
        assert_eq!(rig.cache().statistics().pinned_bytes, 0);
        // What is there serves it, and stays.
        let kept = rig.touch(pages(0, 1));
        assert_eq!(once(pages(0, 1)).unwrap().handle(), kept);
        assert_eq!(rig.touch(pages(0, 1)), kept);
    }

    #[test]
    fn full_of_leased_regions_is_served_per_use_if_configured() {
        let rig = per_use_when_full(1);
        let leased = rig.lease(pages(0, 1));
        let per_use = rig.lease(pages(1, 1));
        assert_eq!(per_use.per_use(), Some(PerUse::Full));
        let handle = per_use.handle();
        drop(per_use);
        assert!(!rig.is_registered(handle));
        drop(leased);
        assert!(rig.lease(pages(1, 1)).is_cached());
    }

    #[test]
    fn a_device_that_is_full_makes_the_cache_give_up_idle_regions() {
        let device = DeviceConfig { max_pinned_bytes: 4 * 4096, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let leased = rig.lease(pages(0, 1));
        let idle = rig.touch(pages(1, 3));
        rig.touch(pages(10, 2));
        assert!(!rig.is_registered(idle));
        rig.assert_fresh(&leased);
        let statistics = rig.statistics();
        assert_eq!((statistics.evictions, statistics.registration_failures), (1, 1));
    }

    #[test]
    fn a_device_that_is_full_of_leased_regions_says_so() {
        let device = DeviceConfig { max_pinned_bytes: 2 * 4096, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let lease = rig.lease(pages(0, 2));
        let error = RegisterError::PinnedMemoryLimit { limit_bytes: Some(2 * 4096), errno: 12 };
        assert_eq!(rig.refused(pages(5, 1), Access::READ), GetError::Register(error));
        rig.assert_fresh(&lease);
    }

    /// Of what the device refused, not of what the settings allow.
    #[test]
    fn a_device_that_is_full_is_a_smaller_budget() {
        let device = DeviceConfig { max_pinned_bytes: 2 * 4096, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let mut notices = rig.cache().notices(4);
        let _lease = rig.lease(pages(0, 2));
        rig.refused(pages(5, 1), Access::READ);
        let &Config { max_bytes, max_regions, .. } = rig.cache().config();
        let from = Amount { bytes: max_bytes, regions: max_regions };
        let to = Amount { bytes: 3 * PAGE_BYTES - 1, ..from };
        assert_eq!(notices.next(), Some(Notice::BudgetShrank { from, to }));
    }

    #[test]
    fn the_devices_table_bounds_the_budget() {
        let device = DeviceConfig { max_regions: 2, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        for page in 0..10 {
            rig.touch(pages(page, 1));
        }
        let counts = rig.device.counts();
        assert_eq!((counts.peak_live, counts.failures), (2, 0));
    }

    #[test]
    fn dead_regions_make_room_before_living_ones() {
        let rig = Setup::regions(2).rig();
        let living = rig.touch(pages(0, 1));
        let dead = rig.touch(pages(1, 1));
        rig.space.unmap(pages(1, 1));
        rig.touch(pages(2, 1));
        assert!(rig.is_registered(living) && !rig.is_registered(dead));
        assert_eq!(rig.statistics().evictions, 0);
    }

    /// A registration that is being given back is neither leased nor lost: it is room to come.
    #[test]
    fn memory_on_its_way_back_is_not_taken_for_memory_in_use() {
        let rig = Setup::regions(1).rig();
        rig.touch(pages(0, 1));
        rig.space.unmap(pages(0, 1));
        let gate = rig.hold_next_deregistration(Moment::Before);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            scope.spawn(|| rig.cache().reclaim());
            gate.wait_for_arrivals(1);
            let getting = scope.spawn(|| rig.get(pages(1, 1), Access::READ).map(drop));
            // Time for the get to make up its mind; a get that waits for the gate is right.
            for _ in 0..1000 {
                thread::yield_now();
            }
            gate.open();
            assert_eq!(getting.join().unwrap(), Ok(()));
        });
    }
}

mod pieces {
    use super::*;

    fn in_pieces_of(page_count: usize) -> Rig {
        let piece_bytes = page_count * PAGE_BYTES;
        Setup::with(Config { piece_bytes, ..Config::default() }).rig()
    }

    #[test]
    fn a_long_range_comes_as_leases_that_cover_it_without_gaps() {
        let rig = in_pieces_of(4);
        let range = bytes(PAGE_BYTES + 100, 10 * PAGE_BYTES);
        let pieces = rig.get_pieces(range).unwrap();
        assert_eq!(pieces.remaining(), 3);
        let leases: Vec<_> = pieces.map(Result::unwrap).collect();
        let mut next = range.start();
        for lease in &leases {
            assert_eq!(lease.range().start(), next);
            next = lease.range().end();
            rig.assert_fresh(lease);
        }
        assert_eq!((leases.len(), next), (3, range.end()));
    }

    #[test]
    fn another_range_of_the_buffer_finds_the_same_pieces() {
        let rig = in_pieces_of(4);
        rig.get_pieces(pages(0, 16)).unwrap().for_each(|piece| drop(piece.unwrap()));
        rig.get_pieces(pages(3, 9)).unwrap().for_each(|piece| drop(piece.unwrap()));
        assert_eq!(hits_and_misses(&rig), (3, 4));
    }

    #[test]
    fn pieces_are_registered_as_they_are_asked_for() {
        let rig = in_pieces_of(1);
        let mut pieces = rig.get_pieces(pages(0, 3)).unwrap();
        for registrations in 1..=3 {
            drop(pieces.next().unwrap().unwrap());
            assert_eq!(rig.device.counts().registrations, registrations);
        }
        assert!(pieces.next().is_none());
    }

    #[test]
    fn a_buffer_larger_than_the_budget_passes_through_it() {
        let config =
            Config { piece_bytes: 4 * PAGE_BYTES, max_bytes: 8 * PAGE_BYTES, ..Config::default() };
        let rig = Setup::with(config).rig();
        let covered: usize = rig
            .get_pieces(pages(0, MAPPED_PAGES))
            .unwrap()
            .map(|piece| piece.unwrap().range().len())
            .sum();
        assert_eq!(covered, MAPPED_PAGES * PAGE_BYTES);
        assert_eq!(rig.device.counts().peak_pinned_bytes, 8 * PAGE_BYTES as u64);
    }

    #[test]
    fn a_bad_piece_fails_alone() {
        let rig = in_pieces_of(1);
        rig.device.fail_in(pages(1, 1), BROKEN);
        let results: Vec<_> =
            rig.get_pieces(pages(0, 3)).unwrap().map(|piece| piece.map(drop)).collect();
        assert_eq!(results, [Ok(()), Err(GetError::Register(BROKEN)), Ok(())]);
    }

    #[test]
    fn a_get_is_one_lease_whatever_a_piece_is() {
        let rig = in_pieces_of(4);
        let lease = rig.lease(bytes(100, 40 * PAGE_BYTES));
        assert!(lease.is_cached());
        assert_eq!(rig.device.counts().registrations, 1);
        // Pieces of it are served by it.
        rig.get_pieces(pages(0, 16)).unwrap().for_each(|piece| drop(piece.unwrap()));
        assert_eq!(rig.device.counts().registrations, 1);
    }

    #[test]
    fn a_get_of_more_than_the_device_registers_says_what_to_call() {
        let max_region_bytes = 4 * PAGE_BYTES;
        let device = DeviceConfig { max_region_bytes, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let error = rig.refused(pages(0, 5), Access::READ);
        assert_eq!(error, GetError::TooLong { range: pages(0, 5), max_region_bytes });
        assert!(error.to_string().contains("pieces"), "{error}");
        let error = rig.refused(bytes(0, usize::MAX >> 1), Access::READ);
        assert!(matches!(error, GetError::TooLong { .. }), "{error}");
    }

    #[test]
    fn pieces_are_never_longer_than_the_device_takes() {
        let device = DeviceConfig { max_region_bytes: 4 * PAGE_BYTES, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        let leases: Vec<_> =
            rig.get_pieces(bytes(10, 20 * PAGE_BYTES)).unwrap().map(Result::unwrap).collect();
        assert_eq!(leases.len(), 6);
        assert_eq!(rig.device.counts().failures, 0);
    }
}

mod failures {
    use super::*;

    #[test]
    fn an_address_that_always_fails_costs_others_nothing() {
        let rig = Rig::new();
        let handles: Vec<_> = (0..8).map(|page| rig.touch(pages(page, 1))).collect();
        rig.device.fail_in(pages(20, 1), BROKEN);
        for _ in 0..50 {
            assert_eq!(rig.refused(pages(20, 1), Access::READ), GetError::Register(BROKEN));
        }
        let again: Vec<_> = (0..8).map(|page| rig.touch(pages(page, 1))).collect();
        assert_eq!(again, handles);
        let statistics = rig.statistics();
        assert_eq!((statistics.registration_failures, statistics.evictions), (50, 0));
        assert_eq!(statistics.pinned_bytes, 8 * PAGE_BYTES as u64);
    }

    #[test]
    fn a_failed_registration_is_tried_once_and_leaves_nothing() {
        let rig = Setup::regions(1).rig();
        rig.device.fail_next(1, BROKEN);
        assert_eq!(rig.refused(pages(0, 1), Access::READ), GetError::Register(BROKEN));
        assert_eq!(rig.device.counts().failures, 1);
        let statistics = rig.statistics();
        assert_eq!((statistics.regions, statistics.pinned_bytes), (0, 0));
        assert_eq!(hits_and_misses(&rig), (0, 1));
        rig.touch(pages(0, 1));
    }

    #[test]
    fn a_registrar_that_panics_leaves_the_cache_sound() {
        let rig = Setup::regions(1).rig();
        rig.device.next_registrations(1, &Fault::Panic);
        let panicked = catch_unwind(AssertUnwindSafe(|| rig.touch(pages(0, 1))));
        assert!(panicked.is_err());
        let statistics = rig.statistics();
        assert_eq!((statistics.regions, statistics.pinned_bytes), (0, 0));
        rig.touch(pages(0, 1));
    }

    #[test]
    fn those_who_wait_for_a_registration_that_panics_make_their_own() {
        let rig = Rig::new();
        let gate = FaultGate::new();
        rig.device.next_registrations(1, &Fault::HoldThenPanic(gate.clone()));
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let first = scope.spawn(|| rig.touch(pages(0, 1)));
            gate.wait_for_arrivals(1);
            let second = scope.spawn(|| rig.touch(pages(0, 1)));
            until(|| rig.statistics().waits == 1);
            gate.open();
            assert!(first.join().is_err());
            second.join().unwrap();
        });
    }

    #[test]
    fn a_registrar_that_panics_while_giving_back_is_not_asked_twice_for_the_same() {
        let rig = Rig::new();
        for page in 0..3 {
            rig.touch(pages(page, 1));
        }
        let open = FaultGate::new();
        open.open();
        rig.device.next_deregistrations(1, &Fault::Hold(open, Moment::Before));
        rig.device.next_deregistrations(1, &Fault::Panic);
        rig.space.unmap(pages(0, 3));
        assert!(catch_unwind(AssertUnwindSafe(|| rig.cache().reclaim())).is_err());
        // What became of the one that panicked is the registrar's secret; none of the others may
        // be given back twice, nor stay.
        rig.device_forgets();
        rig.cache().reclaim();
        assert!(rig.device.counts().live <= 1);
    }

    #[test]
    fn a_registrar_that_panics_when_asked_for_rights_costs_no_room() {
        let (rig, panics) = (Rig::new(), Arc::new(AtomicBool::new(true)));
        let device = Arc::new(SimDevice::new(Arc::clone(&rig.space), DeviceConfig::default()));
        let registrar = Undecided::new(&device, &panics);
        let cache = Cache::new(registrar, rig.monitor.clone(), Config::default()).unwrap();
        assert!(get_panics(&cache, pages(0, 1)));
        let statistics = cache.statistics();
        assert_eq!((statistics.regions, statistics.pinned_bytes), (0, 0));
        panics.store(false, Ordering::SeqCst);
        assert!(!get_panics(&cache, pages(0, 1)));
        assert_eq!(cache.statistics().regions, 1);
    }

    #[test]
    fn a_registrar_that_panics_at_the_end_of_the_cache_is_given_the_others_back() {
        let mut rig = Rig::new();
        let kept: Vec<_> = (0..4).map(|page| rig.touch(pages(page, 1))).collect();
        rig.device.next_deregistrations(2, &Fault::Panic);
        let ended = catch_unwind(AssertUnwindSafe(|| rig.drop_cache()));
        assert!(ended.is_err(), "the panic is the program's to see");
        // What became of those that panicked is the registrar's secret.
        rig.device_forgets();
        let registered = kept.into_iter().filter(|&handle| rig.is_registered(handle));
        assert!(registered.count() <= 2);
    }

    #[test]
    fn a_registrar_that_panics_on_the_reclaimers_thread_does_not_end_reclaiming() {
        let mut rig = Rig::new();
        rig.start_reclaimer();
        rig.touch(pages(0, 1));
        rig.device.next_deregistrations(1, &Fault::Panic);
        rig.device_forgets();
        rig.space.unmap(pages(0, 1));
        until(|| rig.statistics().regions == 0);
        let handle = rig.touch(pages(1, 1));
        rig.space.unmap(pages(1, 1));
        until(|| !rig.is_registered(handle));
        // The books hear of it after the device.
        until(|| rig.statistics().regions == 0);
    }

    #[test]
    fn a_deregistration_that_fails_is_counted_and_forgotten() {
        let rig = Rig::new();
        rig.touch(pages(0, 1));
        let gone = DeregisterError::DeviceGone { errno: 9 };
        rig.device.next_deregistrations(1, &Fault::Fail(gone));
        rig.cache().invalidate(pages(0, 1));
        rig.cache().reclaim();
        let statistics = rig.statistics();
        assert_eq!((statistics.deregistrations, statistics.deregistration_failures), (0, 1));
        assert_eq!((statistics.regions, statistics.pinned_bytes), (0, 0));
        rig.device_forgets();
    }

    #[test]
    fn the_budget_is_exact_after_failures_of_every_kind() {
        let rig = Setup::with(Config { max_bytes: 4 * PAGE_BYTES, ..Config::default() }).rig();
        for round in 0..10 {
            rig.device.fail_next(1, BROKEN);
            assert!(rig.get(pages(0, 4), Access::READ).is_err(), "round {round}");
            assert!(rig.get(pages(MAPPED_PAGES, 4), Access::READ).is_err(), "round {round}");
            rig.touch(pages(0, 4));
            rig.reallocate(pages(0, 4));
        }
        rig.cache().reclaim();
        assert_eq!(rig.statistics().pinned_bytes, 0);
        rig.touch(pages(0, 4));
        assert_eq!(rig.statistics().pinned_bytes, 4 * PAGE_BYTES as u64);
    }
}

/// Nothing is registered under a lock, and two who want the same register once.
mod concurrency {
    use super::*;

    #[test]
    fn two_threads_that_want_the_same_register_once() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::Before);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let first = scope.spawn(|| rig.touch(pages(0, 4)));
            gate.wait_for_arrivals(1);
            let second = scope.spawn(|| rig.touch(pages(1, 1)));
            until(|| rig.statistics().waits == 1);
            gate.open();
            assert_eq!(first.join().unwrap(), second.join().unwrap());
        });
        assert_eq!(rig.device.counts().registrations, 1);
        assert_eq!(hits_and_misses(&rig), (1, 1));
    }

    #[test]
    fn those_who_wait_for_a_registration_that_fails_get_their_own_answer() {
        let rig = Rig::new();
        let gate = FaultGate::new();
        rig.device.next_registrations(1, &Fault::HoldThenFail(gate.clone(), BROKEN));
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let first = scope.spawn(|| rig.get(pages(0, 1), Access::READ).map(drop));
            gate.wait_for_arrivals(1);
            let second = scope.spawn(|| rig.get(pages(0, 1), Access::READ).map(drop));
            until(|| rig.statistics().waits == 1);
            gate.open();
            assert_eq!(first.join().unwrap(), Err(GetError::Register(BROKEN)));
            assert_eq!(second.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn a_registration_under_way_stops_no_other_thread() {
        let rig = Rig::new();
        let cached = rig.touch(pages(10, 1));
        let dying = rig.touch(pages(12, 1));
        let gate = rig.hold_next_registration(Moment::Before);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.touch(pages(0, 4)));
            gate.wait_for_arrivals(1);
            // A hit, a miss, an overlapping miss, an invalidation, a reclamation, an event.
            assert_eq!(rig.touch(pages(10, 1)), cached);
            rig.touch(pages(11, 1));
            rig.touch(pages(3, 4));
            rig.cache().invalidate(pages(12, 1));
            assert_eq!(rig.cache().reclaim(), 1);
            assert!(!rig.is_registered(dying));
            rig.reallocate(pages(10, 1));
            assert_ne!(rig.touch(pages(10, 1)), cached);
            assert_eq!(rig.statistics().registrations, 5);
            gate.open();
            slow.join().unwrap();
        });
    }

    #[test]
    fn a_deregistration_under_way_stops_no_other_thread() {
        let rig = Rig::new();
        let cached = rig.touch(pages(10, 1));
        rig.touch(pages(0, 1));
        rig.space.unmap(pages(0, 1));
        let gate = rig.hold_next_deregistration(Moment::Before);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.cache().reclaim());
            gate.wait_for_arrivals(1);
            assert_eq!(rig.touch(pages(10, 1)), cached);
            rig.touch(pages(11, 1));
            rig.cache().invalidate(pages(11, 1));
            assert_eq!(rig.cache().reclaim(), 1);
            gate.open();
            assert_eq!(slow.join().unwrap(), 1);
        });
    }

    #[test]
    fn memory_that_changes_while_it_is_registered_is_not_handed_out_again() {
        for moment in [Moment::Before, Moment::After] {
            let rig = Rig::new();
            let gate = rig.hold_next_registration(moment);
            thread::scope(|scope| {
                let _guard = gate.open_on_drop();
                let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).unwrap().handle());
                gate.wait_for_arrivals(1);
                rig.reallocate(pages(1, 1));
                gate.open();
                let handle = slow.join().unwrap();
                assert_ne!(rig.touch(pages(0, 4)), handle, "{moment:?}");
            });
        }
    }

    /// As above, but the news is applied before the registration is done.
    #[test]
    fn news_heard_during_a_registration_keep_it_out_of_the_cache() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| {
                let lease = rig.get(pages(0, 4), Access::READ).unwrap();
                (lease.per_use(), lease.is_invalidated())
            });
            gate.wait_for_arrivals(1);
            rig.reallocate(pages(1, 1));
            rig.cache().reclaim();
            gate.open();
            assert_eq!(slow.join().unwrap(), (Some(PerUse::ChangedMeanwhile), true));
        });
        assert_eq!(rig.device.counts().live, 0);
        rig.touch(pages(0, 4));
    }

    #[test]
    fn the_programs_word_during_a_registration_keeps_it_out_of_the_cache() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).unwrap().per_use());
            gate.wait_for_arrivals(1);
            rig.cache().invalidate(bytes(2 * PAGE_BYTES, 1));
            gate.open();
            assert_eq!(slow.join().unwrap(), Some(PerUse::ChangedMeanwhile));
        });
    }

    #[test]
    fn a_lease_may_end_on_another_thread() {
        let rig = Rig::new();
        let lease = rig.lease(pages(0, 1));
        rig.space.unmap(pages(0, 1));
        assert_eq!(rig.cache().reclaim(), 0);
        thread::scope(|scope| scope.spawn(|| drop(lease)).join().unwrap());
        assert_eq!(rig.cache().reclaim(), 1);
    }

    #[test]
    fn the_reclaimer_gives_back_as_soon_as_the_last_lease_ends() {
        let mut rig = Rig::new();
        rig.start_reclaimer();
        let lease = rig.lease(pages(0, 1));
        let idle = rig.touch(pages(1, 1));
        let handle = lease.handle();
        rig.space.unmap(pages(0, 2));
        until(|| !rig.is_registered(idle));
        assert!(rig.is_registered(handle));
        drop(lease);
        until(|| !rig.is_registered(handle));
        until(|| rig.statistics().regions == 0);
    }
}

mod discards {
    use super::*;

    #[test]
    fn nothing_is_cached_while_a_discard_is_pending() {
        let rig = Rig::new();
        rig.touch(pages(0, 4));
        let discard = rig.space.begin_discard(pages(0, 2));
        let lease = rig.lease(pages(0, 4));
        assert_eq!(lease.per_use(), Some(PerUse::ChangePending));
        drop(lease);
        let beside = rig.lease(pages(2, 2));
        assert!(beside.is_cached());
        discard.finish();
        let lease = rig.lease(pages(0, 4));
        assert!(lease.is_cached());
        assert_eq!(rig.touch(pages(0, 4)), lease.handle());
    }

    /// A program discards one half of a buffer while it sends the other half.
    #[test]
    fn a_discard_that_ends_during_a_registration_keeps_it_out_of_the_cache() {
        let rig = Rig::new();
        rig.touch(pages(0, 4));
        let discard = rig.space.begin_discard(pages(0, 2));
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).unwrap().handle());
            gate.wait_for_arrivals(1);
            discard.finish();
            gate.open();
            let handle = slow.join().unwrap();
            assert_ne!(rig.touch(pages(0, 4)), handle);
        });
    }

    #[test]
    fn a_discard_that_begins_during_a_registration_keeps_it_out_of_the_cache() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).unwrap().handle());
            gate.wait_for_arrivals(1);
            let discard = rig.space.begin_discard(pages(0, 2));
            gate.open();
            let handle = slow.join().unwrap();
            assert_ne!(rig.touch(pages(0, 4)), handle);
            discard.finish();
            assert_ne!(rig.touch(pages(0, 4)), handle);
        });
    }

    #[test]
    fn discards_end_in_any_order() {
        let rig = Rig::new();
        let first = rig.space.begin_discard(pages(0, 2));
        let second = rig.space.begin_discard(pages(1, 2));
        first.finish();
        assert_eq!(rig.lease(pages(1, 1)).per_use(), Some(PerUse::ChangePending));
        assert!(rig.lease(pages(0, 1)).is_cached());
        second.finish();
        assert!(rig.lease(pages(1, 1)).is_cached());
    }
}

mod monitors {
    use super::*;

    #[test]
    fn what_cannot_be_watched_is_registered_for_each_use() {
        let rig = Rig::new();
        let why = Uncovered::Mapping(MappingKind::PrivateFile);
        rig.monitor.uncover(pages(0, 4), why);
        let first = rig.lease(pages(0, 4));
        assert_eq!(first.per_use(), Some(PerUse::Uncovered(why)));
        let handle = first.handle();
        drop(first);
        assert!(!rig.is_registered(handle));
        assert_ne!(rig.touch(pages(0, 4)), handle);
        assert_eq!(rig.statistics().per_use, 2);
    }

    #[test]
    fn leases_per_use_stand_side_by_side() {
        let rig = Rig::new();
        rig.monitor.uncover(pages(0, 4), Uncovered::NoMonitor);
        let leases = [rig.lease(pages(0, 4)), rig.lease(pages(0, 4))];
        assert_ne!(leases[0].handle(), leases[1].handle());
        rig.reallocate(pages(0, 4));
        let fresh = rig.lease(pages(0, 4));
        assert!(!leases.iter().any(|lease| lease.handle() == fresh.handle()));
    }

    #[test]
    fn what_a_caller_vouches_for_is_kept_for_those_that_vouch() {
        let rig = Rig::new();
        rig.monitor.uncover(pages(0, 4), Uncovered::NoMonitor);
        let vouched = rig.get_vouched(pages(0, 4)).unwrap();
        assert!(vouched.is_cached());
        assert_eq!(rig.get_vouched(pages(1, 1)).unwrap().handle(), vouched.handle());
        assert_ne!(rig.touch(pages(1, 1)), vouched.handle());
        rig.cache().invalidate(pages(0, 1));
        rig.reallocate(pages(0, 1));
        let after = rig.get_vouched(pages(0, 4)).unwrap();
        assert_ne!(after.handle(), vouched.handle());
        rig.assert_fresh(&after);
    }

    #[test]
    fn what_a_caller_vouches_for_is_not_kept_once_the_monitor_is_lost() {
        let rig = Rig::new();
        rig.monitor.uncover(pages(0, 4), Uncovered::NoMonitor);
        let before = rig.get_vouched(pages(0, 4)).unwrap().handle();
        rig.monitor.lose(Lost::Descriptor { errno: 9 });
        let after = rig.get_vouched(pages(0, 4)).unwrap();
        assert!(!after.is_cached() && after.handle() != before);
    }

    #[test]
    fn a_covered_registration_serves_those_who_vouch() {
        let rig = Rig::new();
        let handle = rig.touch(pages(0, 4));
        assert_eq!(rig.get_vouched(pages(0, 4)).unwrap().handle(), handle);
    }

    #[test]
    fn a_lost_monitor_ends_caching_and_nothing_else() {
        let rig = Rig::new();
        let old = rig.touch(pages(0, 4));
        let lost = Lost::Descriptor { errno: 9 };
        rig.monitor.lose(lost);
        rig.monitor.blindfold();
        rig.reallocate(pages(0, 4));
        for _ in 0..3 {
            let lease = rig.lease(pages(0, 4));
            assert_ne!(lease.handle(), old);
            assert_eq!(lease.per_use(), Some(PerUse::Uncovered(Uncovered::Lost(lost))));
            rig.reallocate(pages(0, 4));
        }
        assert_eq!(rig.cache().reclaim(), 1);
        assert_eq!(rig.device.counts().live, 0);
    }

    #[test]
    fn whether_a_range_has_changed_is_unknown_once_the_monitor_is_lost() {
        let rig = Rig::new();
        let followed = Followed::begin(rig.cache(), pages(0, 4)).unwrap();
        assert_eq!(followed.has_changed(), Some(false));
        rig.monitor.lose(Lost::Descriptor { errno: 9 });
        assert_eq!(followed.has_changed(), None);
    }

    #[test]
    fn the_reclaimer_gives_everything_back_once_the_monitor_is_lost() {
        let mut rig = Rig::new();
        rig.start_reclaimer();
        rig.touch(pages(0, 4));
        rig.monitor.lose(Lost::Descriptor { errno: 9 });
        until(|| rig.statistics().regions == 0);
    }

    #[test]
    fn a_monitor_lost_during_a_registration_keeps_it_out_of_the_cache() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).unwrap().handle());
            gate.wait_for_arrivals(1);
            rig.monitor.lose(Lost::Descriptor { errno: 9 });
            rig.monitor.blindfold();
            rig.reallocate(pages(0, 4));
            gate.open();
            let handle = slow.join().unwrap();
            assert_ne!(rig.touch(pages(0, 4)), handle);
        });
    }

    #[test]
    fn a_monitor_that_is_lost_already_makes_no_cache() {
        let rig = Rig::new();
        let lost = Lost::Descriptor { errno: 9 };
        rig.monitor.lose(lost);
        let registrar = SimRegistrar::new(&rig.device);
        let error = Cache::new(registrar, rig.monitor.clone(), Config::default()).unwrap_err();
        assert_eq!(error, ConfigError::Monitor(lost));
    }

    /// The child finds out at its first call; what is registered is its parent's, and stays.
    #[test]
    fn a_forked_child_gets_nothing_and_gives_nothing_back() {
        let mut rig = Rig::new();
        let handle = rig.touch(pages(0, 4));
        rig.monitor.lose(Lost::Forked);
        assert_eq!(rig.refused(pages(0, 4), Access::READ), GetError::Forked);
        assert_eq!(rig.cache().check().map(drop), Err(GetError::Forked));
        let first = rig.get_pieces(pages(0, 4)).unwrap().next().unwrap();
        assert_eq!(first.map(drop), Err(GetError::Forked));
        rig.cache().invalidate(pages(0, 4));
        assert_eq!(rig.cache().reclaim(), 0);
        rig.drop_cache();
        assert!(rig.is_registered(handle));
        rig.device_forgets();
    }

    /// The one check for several gets does not outlive the process that made it.
    #[test]
    fn a_check_that_crosses_a_fork_finds_nothing() {
        let rig = Rig::new();
        rig.touch(pages(0, 4));
        let checked = rig.cache().check().unwrap();
        let get = || common::get_checked(&checked, pages(0, 4)).map(drop);
        assert_eq!(get(), Ok(()));
        rig.monitor.lose(Lost::Forked);
        assert_eq!(get(), Err(GetError::Forked));
        rig.device_forgets();
    }

    #[test]
    fn a_lease_that_crosses_a_fork_ends_in_peace() {
        let mut rig = Rig::new();
        rig.monitor.uncover(pages(8, 1), Uncovered::NoMonitor);
        let leases = [rig.lease(pages(0, 1)), rig.lease(pages(8, 1))];
        let handles = leases.each_ref().map(|lease| lease.handle());
        rig.monitor.lose(Lost::Forked);
        drop(leases);
        rig.drop_cache();
        assert!(handles.iter().all(|&handle| rig.is_registered(handle)));
        rig.device_forgets();
    }
}

mod callbacks {
    use super::*;

    #[test]
    fn an_invalidation_is_told_exactly_once() {
        let rig = Rig::new();
        let calls = Calls::default();
        let mut lease = rig.lease(pages(0, 4));
        lease.on_invalidate(calls.callback());
        rig.reallocate(pages(8, 1));
        rig.cache().reclaim();
        assert_eq!(calls.count(), 0);
        rig.reallocate(pages(1, 1));
        rig.cache().reclaim();
        rig.cache().invalidate(pages(0, 4));
        rig.cache().reclaim();
        assert_eq!(calls.count(), 1);
        drop(lease);
        assert_eq!(calls.count(), 1);
    }

    #[test]
    fn an_invalidation_that_has_happened_is_told_at_once() {
        let rig = Rig::new();
        let calls = Calls::default();
        let mut lease = rig.lease(pages(0, 4));
        rig.cache().invalidate(pages(0, 1));
        lease.on_invalidate(calls.callback());
        assert_eq!(calls.count(), 1);
    }

    #[test]
    fn the_end_of_the_lease_takes_its_callback_back() {
        let rig = Rig::new();
        let calls = Calls::default();
        let staying = rig.lease(pages(0, 4));
        let mut leaving = rig.lease(pages(0, 4));
        leaving.on_invalidate(calls.callback());
        drop(leaving);
        rig.cache().invalidate(pages(0, 4));
        assert_eq!(calls.count(), 0);
        assert!(staying.is_invalidated());
    }

    #[test]
    fn every_lease_of_a_region_is_told() {
        let rig = Rig::new();
        let calls = Calls::default();
        let mut leases = [rig.lease(pages(0, 4)), rig.lease(pages(1, 1))];
        leases.iter_mut().for_each(|lease| lease.on_invalidate(calls.callback()));
        rig.cache().invalidate(pages(3, 1));
        assert_eq!(calls.count(), 2);
    }

    #[test]
    fn a_later_callback_replaces_an_earlier_one() {
        let rig = Rig::new();
        let (earlier, later) = (Calls::default(), Calls::default());
        let mut lease = rig.lease(pages(0, 4));
        lease.on_invalidate(earlier.callback());
        lease.on_invalidate(later.callback());
        rig.cache().invalidate(pages(0, 4));
        assert_eq!((earlier.count(), later.count()), (0, 1));
    }

    #[test]
    fn a_lease_that_is_not_cached_is_told_too() {
        let rig = Rig::new();
        let calls = Calls::default();
        let mut replaced = rig.lease(pages(0, 1));
        replaced.on_invalidate(calls.callback());
        let around = rig.lease(pages(0, 4));
        rig.monitor.uncover(pages(8, 1), Uncovered::NoMonitor);
        let mut per_use = rig.lease(pages(8, 1));
        per_use.on_invalidate(calls.callback());
        rig.cache().invalidate(pages(0, 9));
        assert_eq!(calls.count(), 2);
        assert!(around.is_invalidated() && replaced.is_invalidated() && per_use.is_invalidated());
    }

    #[test]
    fn completion_comes_after_the_last_use_exactly_once() {
        let rig = Rig::new();
        let calls = Calls::default();
        let leases = [rig.lease(pages(0, 3)), rig.lease(pages(2, 3))];
        rig.touch(pages(10, 1));
        rig.cache().invalidate_then(pages(2, 1), calls.callback());
        for lease in leases {
            rig.cache().reclaim();
            assert_eq!(calls.count(), 0);
            drop(lease);
        }
        rig.cache().reclaim();
        assert_eq!(calls.count(), 1);
        assert_eq!(rig.device.counts().live, 1);
        rig.cache().reclaim();
        assert_eq!(calls.count(), 1);
    }

    #[test]
    fn completion_comes_at_once_if_nothing_is_registered() {
        let rig = Rig::new();
        let calls = Calls::default();
        rig.touch(pages(10, 1));
        rig.cache().invalidate_then(pages(0, 4), calls.callback());
        assert_eq!(calls.count(), 1);
    }

    #[test]
    fn completion_comes_with_the_end_of_the_cache() {
        let mut rig = Rig::new();
        let calls = Calls::default();
        rig.touch(pages(0, 4));
        rig.cache().invalidate_then(pages(0, 4), calls.callback());
        assert_eq!(calls.count(), 0);
        rig.drop_cache();
        assert_eq!(calls.count(), 1);
    }

    /// A registration under way cannot be given back before it is there.
    #[test]
    fn completion_waits_for_a_registration_under_way() {
        let rig = Rig::new();
        let calls = Calls::default();
        let gate = rig.hold_next_registration(Moment::After);
        thread::scope(|scope| {
            let _guard = gate.open_on_drop();
            let slow = scope.spawn(|| rig.get(pages(0, 4), Access::READ).map(drop));
            gate.wait_for_arrivals(1);
            rig.cache().invalidate_then(pages(0, 4), calls.callback());
            assert_eq!(rig.device.counts().live, 1);
            assert_eq!(calls.count(), 0);
            gate.open();
            slow.join().unwrap().unwrap();
        });
        rig.cache().reclaim();
        assert_eq!((rig.device.counts().live, calls.count()), (0, 1));
    }

    #[test]
    fn a_callback_that_panics_does_no_harm() {
        let rig = Rig::new();
        let calls = Calls::default();
        let mut leases = [rig.lease(pages(0, 4)), rig.lease(pages(0, 4))];
        leases[0].on_invalidate(|| panic!("a callback panics, as told"));
        leases[1].on_invalidate(calls.callback());
        rig.cache().invalidate_then(pages(0, 4), || panic!("another"));
        assert_eq!(calls.count(), 1);
        drop(leases);
        rig.cache().reclaim();
        assert_eq!(rig.statistics().callback_panics, 2);
        rig.touch(pages(0, 4));
    }

    /// A program that answers an invalidation by asking for the same memory again, while another
    /// get of that memory, on the same thread, is what found the invalidation out.
    #[test]
    fn a_callback_may_get_the_very_memory_that_is_being_got() {
        let rig = Arc::new(Rig::new());
        let program = Arc::clone(&rig);
        // A thread of its own, which is left behind if it waits for itself.
        let getting = thread::spawn(move || {
            let mut lease = program.lease(pages(0, 4));
            let inner = Arc::clone(&program);
            lease.on_invalidate(move || drop(inner.get(pages(0, 4), Access::READ).unwrap()));
            program.reallocate(pages(0, 4));
            program.touch(pages(0, 4));
        });
        until(|| getting.is_finished() || rig.statistics().waits > 0);
        assert_eq!(rig.statistics().waits, 0, "the get waits for itself");
        getting.join().unwrap();
    }

    /// The callback's own reference may be the last: then the cache ends on the reclaimer's
    /// thread, in the middle of a reclamation.
    #[test]
    fn a_callback_may_drop_the_last_reference_to_the_cache() {
        let mut rig = Rig::new();
        // The device's counts are another cache's here.
        rig.drop_cache();
        let (cache, reclaimer) = common::reclaimed_cache(&rig);
        let mut lease = common::get(&cache, pages(0, 1), Access::READ).unwrap();
        drop(common::get(&cache, pages(1, 1), Access::READ).unwrap());
        let gate = FaultGate::new();
        let _guard = gate.open_on_drop();
        let (entered, last) = (gate.clone(), Arc::clone(&cache));
        lease.on_invalidate(move || {
            entered.pass();
            drop(last);
        });
        rig.space.unmap(pages(0, 2));
        gate.wait_for_arrivals(1);
        drop(lease);
        drop(cache);
        gate.open();
        reclaimer.recv().unwrap();
        assert_eq!(rig.device.shut_down(), []);
    }

    /// Two reclaimers that wait for each other would both wait for ever.
    #[test]
    fn callbacks_of_two_caches_may_each_drop_the_last_reference_to_the_other() {
        let mut rig = Rig::new();
        // The device's counts are other caches' here.
        rig.drop_cache();
        let caches = [common::reclaimed_cache(&rig), common::reclaimed_cache(&rig)];
        let [(first, first_ends), (second, second_ends)] = caches;
        let both = Arc::new(Barrier::new(3));
        std::thread::scope(|scope| {
            for (cache, other, number) in [(&first, &second, 0), (&second, &first, 1)] {
                drop(common::get(cache, pages(number, 1), Access::READ).unwrap());
                let (cache, other) = (Arc::clone(cache), Arc::clone(other));
                let both = Arc::clone(&both);
                // On a thread of its own: where the reclaimer was faster, the callback runs at once.
                scope.spawn(move || {
                    cache.invalidate_then(pages(number, 1), move || {
                        both.wait();
                        // Another reference to each is gone only now.
                        both.wait();
                        drop(other);
                    });
                });
            }
            both.wait();
            drop((first, second));
            both.wait();
        });
        let ends = [first_ends, second_ends];
        let minute = Duration::from_secs(60);
        assert!(ends.iter().all(|end| end.recv_timeout(minute).is_ok()), "they wait");
        assert_eq!(rig.device.shut_down(), []);
    }

    #[test]
    fn a_callback_that_panics_at_once_is_counted_as_well() {
        let rig = Rig::new();
        let mut lease = rig.lease(pages(0, 4));
        rig.cache().invalidate(pages(0, 4));
        lease.on_invalidate(|| panic!("a callback panics, as told"));
        assert_eq!(rig.statistics().callback_panics, 1);
    }
}

mod counters {
    use super::*;

    #[test]
    fn every_counter_is_exact() {
        let rig = Setup::regions(3).rig();
        rig.touch(pages(0, 1)); // miss
        rig.touch(pages(0, 1)); // hit
        rig.touch(pages(0, 2)); // miss, supersedes
        rig.touch(pages(4, 1)); // miss
        rig.touch(pages(5, 1)); // miss, reclaims the superseded
        rig.touch(pages(6, 1)); // miss, evicts
        rig.reallocate(pages(6, 1)); // an event
        rig.monitor.uncover(pages(9, 1), Uncovered::NoMonitor);
        rig.touch(pages(9, 1)); // miss, reclaims the invalidated; per use
        rig.device.fail_next(1, BROKEN);
        assert!(rig.get(pages(10, 1), Access::READ).is_err()); // miss, fails
        assert!(rig.get(pages(0, 1), Access::default()).is_err()); // no get at all
        let statistics = rig.statistics();
        assert_eq!((statistics.gets, statistics.hits, statistics.misses), (8, 1, 7));
        assert_eq!((statistics.registrations, statistics.registration_failures), (6, 1));
        assert_eq!((statistics.superseded, statistics.evictions), (1, 1));
        assert_eq!((statistics.events, statistics.invalidations), (1, 1));
        assert_eq!((statistics.per_use, statistics.deregistrations), (1, 4));
        assert_eq!((statistics.regions, statistics.pinned_bytes), (2, 2 * PAGE_BYTES as u64));
        assert_eq!((statistics.waits, statistics.overflows), (0, 0));
    }

    #[test]
    fn hits_are_added_up_over_threads_that_have_ended() {
        let rig = Rig::new();
        rig.touch(pages(0, 1));
        for _ in 0..3 {
            thread::scope(|scope| scope.spawn(|| rig.touch(pages(0, 1))).join().unwrap());
        }
        assert_eq!(hits_and_misses(&rig), (3, 1));
    }
}

mod bad_input {
    use super::*;

    fn refused(rig: &Rig, start: usize, length: usize) -> GetError {
        common::get_raw(rig.cache(), start, length, Access::READ).map(drop).unwrap_err()
    }

    #[test]
    fn arguments_that_make_no_range_are_told_apart() {
        let rig = Rig::new();
        rig.touch(pages(0, 1));
        assert_eq!(refused(&rig, 0, 8), GetError::Range(RangeError::Null));
        assert_eq!(refused(&rig, 8, 0), GetError::Range(RangeError::Empty { start: 8 }));
        let (start, length) = (usize::MAX - 8, 4096);
        assert_eq!(
            refused(&rig, start, length),
            GetError::Range(RangeError::Overflow { start, length })
        );
        assert_eq!(rig.refused(pages(0, 1), Access::default()), GetError::NoAccess);
        assert_eq!(hits_and_misses(&rig), (0, 1));
    }

    #[test]
    fn memory_that_cannot_be_used_is_told_apart_and_leaves_nothing() {
        let rig = Rig::new();
        rig.space.protect(pages(1, 1), Protection::ReadOnly);
        rig.space.protect(pages(2, 1), Protection::None);
        rig.space.unmap(pages(3, 1));
        let reason = |range: AddressRange, access| match rig.refused(range, access) {
            GetError::Register(RegisterError::BadAddress { reason, .. }) => reason,
            other => panic!("{other}"),
        };
        let at = |page| pages(page, 1).start();
        assert_eq!(reason(pages(0, 2), Access::WRITE), BadAddress::NotWritable { at: at(1) });
        assert_eq!(reason(pages(1, 2), Access::READ), BadAddress::NoAccess { at: at(2) });
        assert_eq!(reason(pages(3, 2), Access::READ), BadAddress::Unmapped { at: at(3) });
        let end = pages(MAPPED_PAGES - 1, 2);
        assert_eq!(reason(end, Access::READ), BadAddress::Unmapped { at: at(MAPPED_PAGES) });
        assert_eq!(rig.statistics().regions, 0);
    }

    #[test]
    fn the_ends_of_the_address_space_are_no_special_case() {
        let rig = Rig::new();
        for (start, length) in [
            (usize::MAX - 1, 1),
            (1, 1),
            (4095, 2),
            (1 << 47, 4096),
            ((1 << 48) - 1, 2),
            (1 << 48, 4096),
            (usize::MAX - 4096, 4096),
        ] {
            assert!(matches!(refused(&rig, start, length), GetError::Register(_)), "{start:#x}");
        }
        rig.cache().invalidate(AddressRange::EVERYTHING);
        assert_eq!(rig.statistics().regions, 0);
    }

    /// The index ends at 2^48; memory beyond works all the same.
    #[test]
    fn memory_beyond_the_index_is_registered_for_each_use() {
        let rig = Rig::new();
        let beyond = AddressRange::new(1 << 50, PAGE_BYTES).unwrap();
        rig.space.map(beyond, Protection::ReadWrite);
        let lease = rig.lease(beyond);
        assert_eq!(lease.per_use(), Some(PerUse::Unindexed));
        rig.space.unmap(beyond);
        rig.cache().reclaim();
    }

    #[test]
    fn a_full_piece_that_begins_within_a_page_is_served_or_sent_to_pieces() {
        let device = DeviceConfig { max_region_bytes: 4 * PAGE_BYTES, ..DeviceConfig::default() };
        let rig = Setup { device, ..Setup::default() }.rig();
        match rig.get(bytes(100, 4 * PAGE_BYTES), Access::READ) {
            Ok(lease) => rig.assert_fresh(&lease),
            Err(error) => assert!(matches!(error, GetError::TooLong { .. }), "{error}"),
        }
    }
}

/// Corners where books, order and locks once disagreed.
mod corners {
    use super::*;
    use std::sync::mpsc;

    /// The order of eviction is pruned now and then; the region entered at that moment must stay
    /// in it.
    #[test]
    fn a_region_stays_evictable_however_many_came_and_went_before() {
        // Natively every count around the one at which pruning sets in; an interpreter takes one.
        for gone in if cfg!(miri) { 66..67 } else { 60..75 } {
            let rig = Setup::regions(1).rig();
            for _ in 0..gone {
                rig.touch(pages(0, 1));
                rig.cache().invalidate(pages(0, 1));
                rig.cache().reclaim();
            }
            rig.touch(pages(0, 1));
            rig.touch(pages(1, 1));
        }
    }

    /// What can never fit is refused without giving up what others need.
    #[test]
    fn a_get_longer_than_the_whole_budget_evicts_nothing() {
        let config = Config { max_bytes: 2 * PAGE_BYTES, ..Config::default() };
        let rig = Setup::with(config).rig();
        let kept = rig.touch(pages(0, 1));
        let error = rig.refused(pages(4, 4), Access::READ);
        assert!(matches!(error, GetError::Exhausted(Exhausted { limit: Limit::Bytes, .. })));
        assert_eq!((rig.touch(pages(0, 1)), rig.statistics().evictions), (kept, 0));
    }

    /// The callback of a failed registration runs after the threads that waited for it have been released,
    /// so it may wait for them.
    #[test]
    fn a_callback_may_wait_for_those_who_wait_for_the_failed_registration() {
        let rig = Rig::new();
        let gate = rig.hold_next_registration(Moment::Before);
        let (done, is_done) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| rig.get(pages(0, 1), Access::READ).map(drop).unwrap_err());
            gate.wait_for_arrivals(1);
            rig.space.unmap(pages(0, 1));
            rig.cache().invalidate_then(pages(0, 1), move || is_done.recv().unwrap());
            let waiter = scope.spawn(|| rig.get(pages(0, 1), Access::READ).map(drop).unwrap_err());
            until(|| rig.statistics().waits == 1);
            gate.open();
            waiter.join().unwrap();
            done.send(()).unwrap();
        });
    }

    /// What became due before a fork inside the registrar is run by the parent alone.
    #[test]
    fn a_child_forked_inside_a_deregistration_runs_no_callback() {
        let rig = Rig::new();
        let (called, gate) = (Calls::default(), FaultGate::default());
        rig.touch(pages(0, 1));
        let mut watched = rig.lease(pages(8, 1));
        watched.on_invalidate(called.callback());
        rig.space.unmap(pages(0, 1));
        rig.space.unmap(pages(8, 1));
        rig.device.next_deregistrations(1, &Fault::Hold(gate.clone(), Moment::After));
        thread::scope(|scope| {
            let reclaimer = scope.spawn(|| rig.cache().reclaim());
            gate.wait_for_arrivals(1);
            rig.monitor.lose(Lost::Forked);
            gate.open();
            reclaimer.join().unwrap();
        });
        drop(watched);
        assert_eq!(called.count(), 0);
        rig.device_forgets();
    }

    /// A callback that runs on the way of a get may fork: what is cached is the parent's then.
    #[test]
    fn a_child_forked_by_a_callback_finds_nothing_cached() {
        let rig = Rig::new();
        rig.touch(pages(0, 1));
        let mut watched = rig.lease(pages(8, 1));
        assert!(common::get_if_cached(rig.cache(), pages(0, 1)).is_some());
        let monitor = rig.monitor.clone();
        watched.on_invalidate(move || monitor.lose(Lost::Forked));
        rig.space.unmap(pages(8, 1));
        assert!(common::get_if_cached(rig.cache(), pages(0, 1)).is_none());
        assert!(rig.monitor.forked());
        drop(watched);
        rig.device_forgets();
    }

    /// The other callbacks that became due with it are the parent's to run.
    #[test]
    fn a_child_forked_by_a_callback_runs_no_other() {
        let rig = Rig::new();
        let called = Calls::default();
        let mut leases = [rig.lease(pages(8, 1)), rig.lease(pages(12, 1))];
        for lease in &mut leases {
            let (monitor, count) = (rig.monitor.clone(), called.callback());
            lease.on_invalidate(move || {
                count();
                monitor.lose(Lost::Forked);
            });
        }
        rig.space.unmap(pages(8, 8));
        assert_eq!(rig.cache().reclaim(), 0);
        assert_eq!(called.count(), 1);
        drop(leases);
        rig.device_forgets();
    }

    /// A thread that is not there in a forked child may hold the cache's lock for ever.
    #[test]
    fn a_forked_child_waits_for_no_lock() {
        static HELD: (std::sync::Mutex<u32>, std::sync::Condvar) =
            (std::sync::Mutex::new(0), std::sync::Condvar::new());
        fn move_on(from: u32) {
            let mut at = HELD.0.lock().unwrap();
            assert_eq!(*at, from);
            *at += 1;
            HELD.1.notify_all();
        }
        fn wait_for(at: u32) {
            let _at = HELD.1.wait_while(HELD.0.lock().unwrap(), |now| *now != at).unwrap();
        }
        let barriers = common::no_barrier(|| {
            move_on(0);
            wait_for(2);
            false
        });
        let rig = Setup::with(Config { barriers, ..Config::default() }).rig();
        rig.touch(pages(0, 1));
        let called = Calls::default();
        let mut watched = rig.lease(pages(8, 1));
        watched.on_invalidate(called.callback());
        thread::scope(|scope| {
            let reclaimer = scope.spawn(|| {
                rig.cache().invalidate(pages(0, 1));
                rig.cache().reclaim()
            });
            wait_for(1);
            // The reclaimer holds the lock now.
            rig.monitor.lose(Lost::Forked);
            assert!(matches!(rig.cache().check(), Err(GetError::Forked)));
            assert!(!watched.is_invalidated());
            drop(watched);
            rig.cache().invalidate(pages(8, 1));
            assert_eq!(rig.cache().reclaim(), 0);
            move_on(1);
            assert_eq!(reclaimer.join().unwrap(), 0, "without a barrier nothing is given back");
        });
        assert_eq!(called.count(), 0);
        rig.device_forgets();
    }
}
