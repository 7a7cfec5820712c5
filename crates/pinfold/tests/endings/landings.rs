//! Landing zones: what a place leaves behind, and panics of the registrar.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to ask for places for memory of its own, which is not borrowed until they
//! have ended. The device writes nothing behind its word here; where it does, a ring is needed
//! (`tests/landing.rs`).

#![allow(unsafe_code)]

use crate::device::{
    Device, Following, PAGE, RAN, Records, Silent, TheCache, cache, device,
    in_a_process_of_its_own, panics_at,
};
use crate::ways::{child_does, panics};
use pinfold::landing::ZoneError;
use pinfold::landing::{AskError, Crossover, LandError, Method, Options, Pages, Place, Slab, Zone};
use pinfold::{Access, AddressRange, Config, GetError, Registrar, WhenFull};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

type TheZone<'c> = Zone<'c, Device, Silent, Slab>;
type ThePlace<'z, 'c> = Place<'z, 'c, Device, Silent, Slab>;

const BYTES: usize = 6 * PAGE;

fn a_cache() -> (TheCache, Arc<Records>) {
    cache(Config::keeping_all())
}

fn zone(cache: &TheCache) -> TheZone<'_> {
    let options = Options { crossover: Crossover::exchange_from(PAGE), ..Options::default() };
    Zone::new(cache, Slab::new(BYTES, 2, false).unwrap(), options).unwrap()
}

/// Memory of whole pages, so that it can be exchanged, in a huge page's room of its own: what lies in the
/// same as a pool's slab, of another test, cannot.
struct Target(*mut u8);

const HUGE: usize = 2 << 20;

impl Target {
    fn new() -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory where the kernel likes; leaked, for the sake of what is tested.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), 2 * HUGE, rights, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start.cast::<u8>();
        Self(start.wrapping_add(start.align_offset(HUGE)))
    }

    fn ask<'z, 'c>(&self, zone: &'z TheZone<'c>) -> ThePlace<'z, 'c> {
        // SAFETY: see the file's header.
        unsafe { zone.ask(self.0, BYTES) }.unwrap()
    }

    /// Other memory at its address.
    fn replace(&self, sharing: libc::c_int) {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = sharing | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the test's own memory, to which there is no reference.
        let start = unsafe { libc::mmap(self.0.cast(), BYTES, rights, kind, -1, 0) };
        assert_eq!(start, self.0.cast());
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the test's own memory, mapped.
        unsafe { self.0.write_bytes(byte, BYTES) };
    }

    fn is_all(&self, byte: u8) -> bool {
        // SAFETY: as above, and initialised.
        unsafe { std::slice::from_raw_parts(self.0, BYTES) }.iter().all(|&it| it == byte)
    }
}

/// Writes as the device does.
fn receive(range: AddressRange, byte: u8) {
    let at = std::ptr::with_exposed_provenance_mut::<u8>(range.start());
    // SAFETY: the place is held, and its pages are mapped as long as it is.
    unsafe { at.write_bytes(byte, range.len()) };
}

/// Whether the next zone at this address would be given this registration.
fn is_findable(cache: &TheCache, range: AddressRange, handle: u32) -> bool {
    let start = std::ptr::with_exposed_provenance(range.start());
    // SAFETY: no device is given the lease.
    let lease = unsafe { cache.request(start, range.len(), Access::WRITE).vouched().get() };
    lease.unwrap().handle() == handle
}

#[test]
fn a_forgotten_place_is_not_findable_when_its_zone_is_gone_and_its_pages_stay() {
    for remapped in [false, true] {
        let (cache, records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        let place = target.ask(&zone);
        let (range, handle) = (place.range(), place.handle());
        if remapped {
            std::mem::forget(place.remap().unwrap());
        } else {
            std::mem::forget(place);
        }
        assert!(is_findable(&cache, range, handle));
        drop(zone);
        assert!(!is_findable(&cache, range, handle));
        // The device may go on: its registration and the pages are there.
        assert!(records.has(handle, range));
        receive(range, 3);
        drop(cache);
        assert_eq!(records.live(), 0);
    }
}

/// A request that the device has not looked at yet names the registration still: it is given to no other
/// use, and its end is not asked for while such a request may stand in a queue.
#[test]
fn what_a_dropped_place_was_registered_as_stays_until_the_cache_goes() {
    let little = Config { max_bytes: PAGE, ..Config::keeping_all() };
    let per_use = Config { when_full: WhenFull::RegisterPerUse, ..little };
    for (config, remapped) in
        [(Config::keeping_all(), false), (Config::keeping_all(), true), (per_use, false)]
    {
        let (cache, records) = cache(config);
        let (zone, target, other) = (zone(&cache), Target::new(), Target::new());
        let (place, _other_slot) = (target.ask(&zone), other.ask(&zone));
        let (range, handle) = (place.range(), place.handle());
        receive(range, 3);
        if remapped {
            drop(place.remap().unwrap());
        } else {
            drop(place);
        }
        cache.reclaim();
        cache.evict_idle();
        assert!(records.has(handle, range), "a queued request names it");
        let again = target.ask(&zone);
        assert_eq!(again.range(), range, "the slot is used again");
        assert_ne!(again.handle(), handle);
        // SAFETY: the place is held, and its pages are mapped as long as it is.
        let bytes = unsafe {
            let at = std::ptr::with_exposed_provenance::<u8>(range.start());
            std::slice::from_raw_parts(at, range.len())
        };
        assert!(bytes.iter().all(|&byte| byte == 0), "a device may still write to those of before");
        drop((again, _other_slot));
        drop(zone);
        assert!(records.has(handle, range));
        drop(cache);
        assert_eq!(records.live(), 0);
    }
}

#[test]
fn a_place_that_is_dropped_gives_its_slot_back_empty_and_its_target_whole() {
    let (cache, _records) = a_cache();
    let (zone, target) = (zone(&cache), Target::new());
    target.fill(7);
    let place = target.ask(&zone);
    let (range, handle) = (place.range(), place.handle());
    receive(range, 3);
    assert_eq!(zone.free_slots(), 1);
    drop(place);
    assert!(!is_findable(&cache, range, handle), "the device may go on with it");
    assert_eq!(zone.free_slots(), 2);
    assert!(target.is_all(7));
    // Remapped, the target has had the pages: it is its owner's again, without them.
    let place = target.ask(&zone);
    receive(place.range(), 3);
    let remapped = place.remap().unwrap();
    assert!(target.is_all(3));
    drop(remapped);
    assert!(target.is_all(0));
    assert_eq!(zone.free_slots(), 2);
    // Arrived, it is thrown away, and its registration stays.
    let place = target.ask(&zone);
    let (range, handle) = (place.range(), place.handle());
    // SAFETY: nothing was begun.
    drop(unsafe { place.arrived() });
    assert!(is_findable(&cache, range, handle));
}

/// Other memory stands there: the pages are not the target's any more.
#[test]
fn a_remapped_place_takes_nothing_out_of_a_target_that_has_been_replaced() {
    let (cache, _records) = a_cache();
    let (zone, target) = (zone(&cache), Target::new());
    let place = target.ask(&zone);
    let remapped = place.remap().unwrap();
    target.replace(libc::MAP_SHARED);
    cache.monitor().change(remapped_target(&target));
    target.fill(5);
    drop(remapped);
    assert!(target.is_all(5), "not the target's memory any more");
}

/// The monitor sees nothing any more from the exchange on, and the program has mapped other memory there.
#[test]
fn a_remapped_place_whose_monitor_is_lost_as_it_is_remapped_ends_the_process() {
    let name =
        "landings::a_remapped_place_whose_monitor_is_lost_as_it_is_remapped_ends_the_process";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        let place = target.ask(&zone);
        assert!(place.is_watched());
        cache.monitor().is_lost_when_asked("watch");
        let remapped = place.remap().unwrap();
        target.replace(libc::MAP_PRIVATE);
        target.fill(5);
        drop(remapped);
        assert!(target.is_all(5), "taken out of the target");
    });
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

/// No device writes to it, so whatever stands there may stay.
#[test]
fn a_remapped_place_that_arrived_leaves_a_target_that_is_said_to_have_changed_alone() {
    let (cache, _records) = a_cache();
    let (zone, target) = (zone(&cache), Target::new());
    let place = target.ask(&zone);
    receive(place.range(), 3);
    let remapped = place.remap().unwrap();
    cache.monitor().change(remapped_target(&target));
    // SAFETY: the data is there.
    let refused = unsafe { remapped.arrived() }.unwrap_err();
    assert_eq!(refused.error, LandError::TargetChanged);
    drop(refused);
    assert!(target.is_all(3));
}

fn remapped_target(target: &Target) -> AddressRange {
    AddressRange::new(target.0.addr(), BYTES).unwrap()
}

#[test]
fn a_registrar_that_panics_at_any_call_spoils_no_message() {
    for n in 1.. {
        let (cache, records) = a_cache();
        panics_at(&records, n);
        let (target, next) = (Target::new(), Target::new());
        let mut panicked = panics(|| {
            let zone = zone(&cache);
            for (round, method) in
                [Method::Exchange, Method::Copy, Method::Replace].into_iter().enumerate()
            {
                let byte = u8::try_from(round + 1).unwrap();
                let place = target.ask(&zone);
                assert!(records.has(place.handle(), place.range()));
                receive(place.range(), byte);
                // SAFETY: the data is there.
                unsafe { place.arrived() }.land_by(method).unwrap();
                assert!(target.is_all(byte));
            }
            drop(target.ask(&zone));
            let remapped = target.ask(&zone).remap().unwrap();
            // SAFETY: as above.
            unsafe { remapped.arrived() }.unwrap();
            zone.refill().unwrap();
        });
        panicked |= panics(|| assert!(cache.reclaim() < usize::MAX));
        let has_panicked = records.has_panicked();
        panics_at(&records, 0);
        // Another zone of the same cache works.
        {
            let zone = zone(&cache);
            let place = next.ask(&zone);
            assert!(records.has(place.handle(), place.range()), "after call {n}");
            receive(place.range(), 9);
            // SAFETY: the data is there.
            unsafe { place.arrived() }.land().unwrap();
            assert!(next.is_all(9), "after call {n}");
        }
        drop(cache);
        assert_eq!(records.leaked(), 0, "after call {n}");
        if !has_panicked {
            assert!(!panicked && n > 3);
            break;
        }
    }
}

/// Landing pages that say when they are gone.
struct Watched(Slab, Arc<AtomicBool>);

// SAFETY: the slab's promise.
unsafe impl Pages for Watched {
    fn slots(&self) -> Vec<AddressRange> {
        self.0.slots()
    }

    fn aside(&self) -> AddressRange {
        self.0.aside()
    }

    fn granule(&self) -> usize {
        self.0.granule()
    }

    fn huge(&self) -> bool {
        self.0.huge()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, SeqCst);
    }
}

/// The leases of the slots are for one use each, so that their ends call the registrar.
#[test]
fn a_zone_whose_registrar_panics_as_it_goes_is_gone_with_its_pages() {
    for n in 1..4 {
        let little = Config { max_bytes: PAGE, ..Config::keeping_all() };
        let (cache, records) = cache(Config { when_full: WhenFull::RegisterPerUse, ..little });
        let gone = Arc::new(AtomicBool::new(false));
        let pages = Watched(Slab::new(BYTES, 2, false).unwrap(), Arc::clone(&gone));
        let zone = Zone::new(&cache, pages, Options::default()).unwrap();
        panics_at(&records, n);
        assert_eq!(panics(|| drop(zone)), n < 3, "two slots are deregistered");
        assert!(gone.load(SeqCst), "panicked at call {n}");
        assert_eq!(records.leaked(), 0);
    }
}

/// Whatever watches for its cache, and however many devices there are with it.
#[test]
fn a_device_that_follows_the_page_table_gets_no_zone() {
    fn refused(registrar: impl Registrar) -> bool {
        let cache = pinfold::cache(registrar, Silent::new(), Config::keeping_all()).unwrap();
        let zone = Zone::new(&cache, Slab::new(BYTES, 2, false).unwrap(), Options::default());
        matches!(zone, Err(ZoneError::FollowsPageTable))
    }
    let (pinned, following) = (|| device().0, || Following(device().0));
    assert!(!refused(pinned()) && !refused((pinned(), pinned())));
    assert!(refused(following()) && refused(Arc::new(following())));
    assert!(refused((pinned(), following())) && refused((following(), pinned())));
    assert!(refused((pinned(), pinned(), following())));
    assert!(refused([following(), following()]));
}

/// What a forked child finds of a zone and its places, while a thread that it has not was in the midst of the
/// zone.
#[test]
fn a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent() {
    let name = "landings::a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent";
    let status = in_a_process_of_its_own(name, || {
        let (cache, records) = a_cache();
        let (inside, go_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let options = Options { crossover: Crossover::exchange_from(PAGE), ..Options::default() };
        let zone = Zone::new(&cache, Slab::new(BYTES, 3, false).unwrap(), options).unwrap();
        let (first, second, third) = (Target::new(), Target::new(), Target::new());
        let at = third.0.expose_provenance();
        let (place, other) = (first.ask(&zone), second.ask(&zone));
        receive(place.range(), 3);
        receive(other.range(), 4);
        let remapped = other.remap().unwrap();
        // SAFETY: the data is there.
        let arrived = unsafe { place.arrived() };
        let (there, leave) = (Arc::clone(&inside), Arc::clone(&go_on));
        cache.monitor().besides(move |question| {
            if question == "replay" {
                there.store(true, SeqCst);
                while !leave.load(SeqCst) {
                    std::thread::yield_now();
                }
            }
        });
        std::thread::scope(|scope| {
            // The zone asks the monitor with its lock held.
            let asks = scope.spawn(|| {
                let target = std::ptr::with_exposed_provenance_mut(at);
                // SAFETY: see the file's header.
                drop(unsafe { zone.ask(target, BYTES) }.unwrap());
            });
            while !inside.load(SeqCst) {
                std::thread::yield_now();
            }
            let (_, arrived, remapped) =
                child_does((&zone, arrived, remapped), |(zone, arrived, remapped)| {
                    assert_eq!(zone.free_slots(), 0);
                    assert_eq!(zone.refill(), Err(GetError::Forked));
                    // SAFETY: see the file's header.
                    let asked = unsafe { zone.ask(third.0, BYTES) };
                    assert_eq!(asked.err(), Some(AskError::Register(GetError::Forked)));
                    let refused = arrived.land().unwrap_err();
                    assert_eq!(refused.error, LandError::Forked);
                    // SAFETY: the data is there.
                    let other = unsafe { remapped.arrived() }.unwrap_err();
                    assert_eq!(other.error, LandError::Forked);
                    drop((refused.state, other.state));
                });
            go_on.store(true, SeqCst);
            asks.join().unwrap();
            // The parent's are untouched.
            assert!(records.has(remapped.handle(), remapped.range()));
            arrived.land().unwrap();
            // SAFETY: the data is there.
            unsafe { remapped.arrived() }.unwrap();
            assert!(first.is_all(3) && second.is_all(4));
        });
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Where what stands in a remapped target is unknown, neither the device nor its owner may go on with it.
#[test]
fn a_remapped_place_with_unknown_contents_ends_the_process() {
    let name = "landings::a_remapped_place_with_unknown_contents_ends_the_process";
    let mut went_on = false;
    let status = in_a_process_of_its_own(name, || {
        for vouched in [true, false] {
            let (cache, _records) = a_cache();
            let (zone, target) = (zone(&cache), Target::new());
            let place = target.ask(&zone);
            receive(place.range(), 3);
            let mut remapped = place.remap().unwrap();
            cache.monitor().besides(|question| panic!("{question}"));
            if vouched {
                // SAFETY: nothing has changed.
                remapped = unsafe { remapped.vouch() };
            }
            assert_eq!(went_on, !vouched);
            drop(remapped);
            assert!(vouched && target.is_all(0));
            went_on = true;
        }
    });
    // Not by the second round's assertions, which would end it with a status.
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

/// Until something is exchanged, the target's pages are its own, whatever its mapping is.
#[test]
fn a_monitor_that_panics_before_an_exchange_leaves_the_target_as_it_is() {
    let name = "landings::a_monitor_that_panics_before_an_exchange_leaves_the_target_as_it_is";
    let status = in_a_process_of_its_own(name, || {
        for for_good in [false, true] {
            let (cache, _records) = a_cache();
            let (zone, target) = (zone(&cache), Target::new());
            let place = target.ask(&zone);
            target.fill(5);
            let asked = AtomicBool::new(false);
            cache.monitor().besides(move |question| {
                assert!(!for_good && asked.swap(true, SeqCst), "{question}");
            });
            assert!(panics(|| drop(place.remap())));
            assert!(target.is_all(5), "for good: {for_good}");
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The kernel maps nothing any more.
struct NoMoreMemory(libc::rlimit);

impl NoMoreMemory {
    fn new() -> Self {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes the limit, and reads another.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut before), 0);
            let none = libc::rlimit { rlim_cur: PAGE as u64, ..before };
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const none), 0);
        }
        Self(before)
    }
}

impl Drop for NoMoreMemory {
    fn drop(&mut self) {
        // SAFETY: the limit that was there.
        unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const self.0) };
    }
}

/// What another thread maps where nothing is mapped: the addresses of the pages that it got, filled with `byte`.
fn map_holes(range: AddressRange, byte: u8) -> Vec<*mut u8> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let pages = (range.start()..range.end()).step_by(PAGE);
    let holes = pages.filter_map(|at| {
        let at = std::ptr::with_exposed_provenance_mut(at);
        // SAFETY: the kernel refuses addresses in use.
        let mapped = unsafe { libc::mmap(at, PAGE, rights, kind, -1, 0) };
        (mapped == at).then_some(at.cast::<u8>())
    });
    // SAFETY: the pages are this test's.
    holes.inspect(|&page| unsafe { page.write_bytes(byte, PAGE) }).collect()
}

/// A kernel that runs out of memory in the midst of an exchange leaves holes, in the target and in the zone: what
/// another thread maps there is neither written nor unmapped.
#[test]
fn holes_that_the_kernel_leaves_in_the_midst_of_an_exchange_belong_to_others() {
    let name =
        "landings::holes_that_the_kernel_leaves_in_the_midst_of_an_exchange_belong_to_others";
    let status = in_a_process_of_its_own(name, || {
        for remapped in [false, true] {
            for method in [Method::Exchange, Method::Replace] {
                let (cache, _records) = a_cache();
                let slab = Slab::new(BYTES, 2, false).unwrap();
                let aside = slab.aside();
                let zone = Zone::new(&cache, slab, Options::default()).unwrap();
                let target = Target::new();
                target.fill(5);
                let place = target.ask(&zone);
                receive(place.range(), 3);
                let limit = NoMoreMemory::new();
                let error = if remapped {
                    let remapped = place.remap().unwrap();
                    drop(limit);
                    // SAFETY: the data is there.
                    let refused = unsafe { remapped.arrived() }.unwrap_err();
                    assert!(!map_holes(remapped_target(&target), 9).is_empty());
                    drop(refused.state);
                    refused.error
                } else {
                    // SAFETY: the data is there.
                    let refused = unsafe { place.arrived() }.land_by(method).unwrap_err();
                    drop(limit);
                    assert!(!map_holes(remapped_target(&target), 9).is_empty());
                    assert!(refused.state.bytes().iter().all(|&byte| byte == 3));
                    let again = refused.state.land().unwrap_err();
                    assert_eq!(again.error, refused.error);
                    drop(again.state.land_by(Method::Copy).unwrap_err());
                    refused.error
                };
                assert_eq!(error, LandError::TargetUnmapped { errno: libc::ENOMEM });
                let theirs = map_holes(aside, 7);
                assert_eq!(theirs.is_empty(), !remapped && method == Method::Replace);
                // The zone goes on, with copies.
                let next = Target::new();
                let place = next.ask(&zone);
                receive(place.range(), 4);
                // SAFETY: the data is there.
                let landed = unsafe { place.arrived() }.land_by(Method::Exchange).unwrap();
                assert_eq!(landed.copied_because, None);
                assert!(next.is_all(4));
                drop(zone);
                assert!(target.is_all(9));
                // SAFETY: pages of this test.
                assert!(theirs.iter().all(|&page| unsafe { page.read() } == 7));
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A slot whose memory the kernel has unmapped, and cannot map again, is no place for data, registered or not.
#[test]
fn a_slot_that_cannot_be_mapped_again_is_not_registered() {
    let name = "landings::a_slot_that_cannot_be_mapped_again_is_not_registered";
    let status = in_a_process_of_its_own(name, || {
        for by_asking in [false, true] {
            let (cache, _records) = a_cache();
            let slab = Slab::new(BYTES, 2, false).unwrap();
            let slots = slab.slots();
            let zone = Zone::new(&cache, slab, Options::default()).unwrap();
            let (target, other) = (Target::new(), Target::new());
            let place = target.ask(&zone);
            let torn = *slots.iter().find(|slot| slot.contains(&place.range())).unwrap();
            receive(place.range(), 3);
            // SAFETY: the data is there.
            let landed = unsafe { place.arrived() }.land_by(Method::Exchange).unwrap();
            assert_eq!(landed.copied_because, None);
            let kept = other.ask(&zone);
            assert!(!torn.contains(&kept.range()), "one that is registered comes first");
            // SAFETY: memory of a slot that no code uses; and it is not mapped again below.
            unsafe { pinfold_kernel::memory::unmap(torn) };
            let limit = NoMoreMemory::new();
            let registered = if by_asking {
                // SAFETY: see the file's header.
                unsafe { zone.ask(target.0, BYTES) }.is_ok()
            } else {
                zone.refill() != Ok(0)
            };
            drop(limit);
            assert!(!registered, "by asking: {by_asking}");
            drop(kept);
            assert_eq!(zone.free_slots(), 1);
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}
