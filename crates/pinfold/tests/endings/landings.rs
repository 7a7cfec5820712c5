//! Landing zones: what a place leaves behind, and panics of the registrar.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to ask for places for memory of its own, which is not borrowed until they
//! have ended. The device writes nothing behind its word here; where it does, a ring is needed
//! (`tests/landing.rs`).

#![allow(unsafe_code)]

use crate::device::{
    Device, Following, LoudEnd, PAGE, RAN, Records, Silent, TheCache, Undecided, cache,
    cache_without_a_thread, device, in_a_process_of_its_own, panics_at,
};
use crate::ways::{child_does, panics};
use pinfold::landing::ZoneError;
use pinfold::landing::{
    AskError, Crossover, LandError, Method, Place, RemapRefused, Slab, SlabPages, Zone, ZoneOptions,
};
use pinfold::limits::Limits;
use pinfold::{Access, AddressRange, Config, GetError, Registrar, WhenFull};
use std::cell::RefCell;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

type TheZone<'c> = Zone<'c, Device, Silent, Slab>;
type ThePlace<'z, 'c> = Place<'z, 'c, Device, Silent, Slab>;

const BYTES: usize = 6 * PAGE;

fn a_cache() -> (TheCache, Arc<Records>) {
    cache(Config::keeping_all())
}

fn zone(cache: &TheCache) -> TheZone<'_> {
    let options =
        ZoneOptions { crossover: Crossover::exchange_from(PAGE), ..ZoneOptions::default() };
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

/// Of other memory, more than the monitor's log holds, each read by the cache before it is gone from the log, if `is_read` sees to it.
fn many_other_changes(cache: &TheCache, mut is_read: impl FnMut()) {
    const KEPT: u64 = 4;
    cache.monitor().keeps(KEPT);
    let other = Target::new();
    for _ in 0..3 * KEPT {
        cache.monitor().change(remapped_target(&other));
        is_read();
    }
}

/// A name that ends with how the log is read.
type Reads = (&'static str, fn(&TheCache, &TheZone<'_>));

/// What the program asks of the cache or the zone meanwhile has the log read.
const READS: [Reads; 3] = [
    ("check", |cache, _| drop(cache.check())),
    ("reclaim", |cache, _| _ = cache.reclaim()),
    ("ask", |_, zone| drop(Target::new().ask(zone))),
];

/// Dropped, remapped or not, or landed: only changes of its own target matter to a place.
#[test]
fn a_place_outlives_more_changes_of_other_memory_than_the_monitors_log_holds() {
    let name = "landings::\
        a_place_outlives_more_changes_of_other_memory_than_the_monitors_log_holds";
    let status = in_a_process_of_its_own(name, || {
        for (how, read) in READS {
            let (cache, _records) = cache_without_a_thread(Config::keeping_all());
            let (zone, target) = (zone(&cache), Target::new());
            let place = target.ask(&zone);
            receive(place.range(), 3);
            let remapped = place.remap().unwrap();
            many_other_changes(&cache, || read(&cache, &zone));
            drop(remapped);
            assert!(target.is_all(0), "{how}: the device writes to what the target has");
            let place = target.ask(&zone);
            receive(place.range(), 4);
            let remapped = place.remap().unwrap();
            many_other_changes(&cache, || read(&cache, &zone));
            // SAFETY: the data is there.
            assert!(unsafe { remapped.arrived() }.is_ok(), "{how}");
            assert!(target.is_all(4));
            let place = target.ask(&zone);
            receive(place.range(), 5);
            many_other_changes(&cache, || read(&cache, &zone));
            // SAFETY: as above.
            assert!(unsafe { place.arrived() }.land().is_ok(), "{how}");
            assert!(target.is_all(5));
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// And so does the cache's own thread, if the program asks nothing.
#[test]
#[cfg(not(miri))] // has no such thread
fn the_caches_thread_reads_what_is_reported_while_a_place_flies() {
    let name = "landings::the_caches_thread_reads_what_is_reported_while_a_place_flies";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        let remapped = target.ask(&zone).remap().unwrap();
        let mut reported = cache.statistics().events;
        many_other_changes(&cache, || {
            reported += 1;
            while cache.statistics().events < reported {
                std::thread::yield_now();
            }
        });
        drop(remapped);
        assert!(target.is_all(0));
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A change of the target itself is known however long ago it was read; one before it was asked for is none.
#[test]
fn a_change_of_a_remapped_target_is_not_forgotten_with_the_log() {
    let name = "landings::a_change_of_a_remapped_target_is_not_forgotten_with_the_log";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let (zone, target) = (zone(&cache), Target::new());
        cache.monitor().change(remapped_target(&target));
        let remapped = target.ask(&zone).remap().unwrap();
        target.replace(libc::MAP_PRIVATE);
        cache.monitor().change(remapped_target(&target));
        target.fill(5);
        many_other_changes(&cache, || drop(cache.check()));
        drop(remapped);
        assert!(target.is_all(5), "not the target's memory any more");
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// What the cache has not read before it was overwritten may have been a change of the target.
#[test]
fn a_remapped_place_that_was_lapped_ends_the_process() {
    let name = "landings::a_remapped_place_that_was_lapped_ends_the_process";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let (zone, target) = (zone(&cache), Target::new());
        let remapped = target.ask(&zone).remap().unwrap();
        many_other_changes(&cache, || {});
        drop(remapped);
    });
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

/// That everything has changed a monitor says when it cannot tell what has. It was taken for a change of the target, whose
/// owner then had pages to which the device wrote.
#[test]
fn a_remapped_place_ends_the_process_where_everything_is_said_to_have_changed() {
    let name =
        "landings::a_remapped_place_ends_the_process_where_everything_is_said_to_have_changed";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let (zone, target) = (zone(&cache), Target::new());
        let remapped = target.ask(&zone).remap().unwrap();
        cache.monitor().change(AddressRange::EVERYTHING);
        drop(remapped);
    });
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

/// The monitor sees nothing any more from the exchange on, and the program maps other memory there. Dropping what was remapped
/// ended the process.
#[test]
fn a_place_whose_monitor_is_lost_as_it_is_remapped_has_its_pages_again() {
    let name = "landings::a_place_whose_monitor_is_lost_as_it_is_remapped_has_its_pages_again";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        let place = target.ask(&zone);
        assert!(place.is_watched());
        receive(place.range(), 3);
        cache.monitor().is_lost_when_asked("watch");
        let RemapRefused { state: place, error } = place.remap().unwrap_err();
        assert_eq!(error, LandError::TargetUnwatched);
        assert!(!place.is_watched() && target.is_all(0));
        target.replace(libc::MAP_PRIVATE);
        target.fill(5);
        // SAFETY: the data is there.
        let arrived = unsafe { place.arrived() };
        assert!(arrived.bytes().iter().all(|&byte| byte == 3));
        let refused = arrived.land().unwrap_err();
        assert_eq!(refused.error, LandError::TargetChanged);
        drop(refused);
        assert!(target.is_all(5));
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Changes of other memory leave the monitor no moment to watch the target, for a while: it was left unwatched as it was asked
/// for, and dropping what was remapped ended the process.
#[test]
fn a_target_is_watched_when_other_changes_leave_a_moment_for_it() {
    let name = "landings::a_target_is_watched_when_other_changes_leave_a_moment_for_it";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        cache.monitor().is_busy(3);
        let place = target.ask(&zone);
        assert!(place.is_watched());
        cache.monitor().is_busy(3);
        let remapped = place.remap().unwrap();
        assert!(remapped.is_watched());
        target.fill(5);
        drop(remapped);
        assert!(target.is_all(0));
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The same, without an end: the place has its pages again, and what the device has written and goes on to write.
#[test]
fn a_place_whose_target_cannot_be_watched_again_has_its_pages_again() {
    let name = "landings::a_place_whose_target_cannot_be_watched_again_has_its_pages_again";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        let place = target.ask(&zone);
        target.fill(7);
        receive(place.range(), 3);
        cache.monitor().is_busy(usize::MAX);
        let RemapRefused { state: place, error } = place.remap().unwrap_err();
        assert_eq!(error, LandError::TargetUnwatched);
        assert!(!place.is_watched() && target.is_all(0));
        receive(AddressRange::new(place.range().start(), PAGE).unwrap(), 4);
        assert!(target.is_all(0), "the device writes to what the target has");
        // SAFETY: the data is there.
        let arrived = unsafe { place.arrived() };
        let written = arrived.bytes().chunks(PAGE).map(|page| (page[0], page[PAGE - 1]));
        assert!(written.eq([(4, 4), (3, 3), (3, 3), (3, 3), (3, 3), (3, 3)]));
        let RemapRefused { state: arrived, error } = arrived.land().unwrap_err();
        assert_eq!(error, LandError::TargetChanged);
        // SAFETY: nothing has changed.
        unsafe { arrived.vouch() }.land_by(Method::Exchange).unwrap();
        cache.monitor().is_busy(0);
        // Its slot serves again, and a place that is dropped instead leaves the target alone.
        for _ in 0..2 {
            let place = target.ask(&zone);
            cache.monitor().is_busy(usize::MAX);
            target.fill(7);
            let refused = place.remap().unwrap_err();
            assert!(target.is_all(0));
            target.fill(8);
            drop(refused);
            assert!(target.is_all(8));
            cache.monitor().is_busy(0);
        }
        assert_eq!(zone.free_slots(), 2);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A monitor that reports the exchange itself, as the kernel does, and panics as the target is watched anew: the
/// change of which it knows is the zone's own, and the device writes to the pages still.
#[test]
fn a_monitor_that_panics_behind_an_exchange_leaves_no_page_of_the_device_in_the_target() {
    for question in ["watch", "check", "replay"] {
        let (cache, records) = a_cache();
        let (zone, target) = (zone(&cache), Target::new());
        target.fill(7);
        let place = target.ask(&zone);
        assert!(place.is_watched());
        let (range, handle) = (place.range(), place.handle());
        receive(range, 3);
        cache.monitor().sees_and_panics_when_it_watches(question, remapped_target(&target));
        assert!(panics(|| drop(place.remap())));
        assert!(target.is_all(0), "{question}: the device writes to what the target has");
        assert!(records.has(handle, range), "{question}: the device may go on");
        assert!(!is_findable(&cache, range, handle), "{question}");
        assert_eq!(zone.free_slots(), 2);
    }
}

/// No device writes to it, so whatever stands there may stay.
#[test]
fn a_remapped_place_that_arrived_leaves_a_target_that_is_said_to_have_changed_alone() {
    let (cache, records) = a_cache();
    let (zone, target) = (zone(&cache), Target::new());
    let slots = zone.free_slots();
    let place = target.ask(&zone);
    let (handle, range) = (place.handle(), place.range());
    receive(range, 3);
    let remapped = place.remap().unwrap();
    cache.monitor().change(remapped_target(&target));
    // SAFETY: the data is there.
    let refused = unsafe { remapped.arrived() }.unwrap_err();
    assert_eq!(refused.error, LandError::TargetChanged);
    drop(refused);
    assert!(target.is_all(3));
    // Nor does the slot stay registered for a device.
    cache.reclaim();
    assert!(!records.has(handle, range));
    assert_eq!(zone.free_slots(), slots);
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

/// Places of a zone, each with the handle that a device has that was not said to be done.
struct Flights<'z, 'c> {
    zone: &'z TheZone<'c>,
    records: &'z Records,
    given_up: RefCell<Vec<(AddressRange, u32)>>,
}

impl<'z, 'c> Flights<'z, 'c> {
    /// Nothing that a device may still use is given to another message.
    fn ask(&self, target: &Target) -> ThePlace<'z, 'c> {
        let place = target.ask(self.zone);
        let its = (place.range(), place.handle());
        assert!(self.records.has(its.1, its.0));
        self.given_up.borrow_mut().push(its);
        let same = |other: &&(AddressRange, u32)| other.1 == its.1;
        assert_eq!(self.given_up.borrow().iter().filter(same).count(), 1, "{its:?}");
        receive(its.0, 3);
        place
    }

    /// The device is done with the last one.
    fn is_done(&self) {
        self.given_up.borrow_mut().pop();
    }
}

/// Also as it marks changes, as a mark is looked at and dropped, and as it is asked whether this is a forked child.
#[test]
fn a_monitor_that_panics_at_any_question_spoils_no_message() {
    let name = "landings::a_monitor_that_panics_at_any_question_spoils_no_message";
    let status = in_a_process_of_its_own(name, || {
        for marked in [false, true] {
            let last = (1..).find(|&n| !panics_at_question(n, marked));
            assert!(last.is_some_and(|n| n > 60), "{last:?}");
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Whether there was such a question.
fn panics_at_question(n: usize, marked: bool) -> bool {
    let (cache, records) = cache_without_a_thread(Config::keeping_all());
    let zone = zone(&cache);
    let asked = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&asked);
    // From its own number on it is not counted any more.
    let question = move |question: &str| {
        let number = counts.load(SeqCst) + 1;
        if number <= n {
            counts.store(number, SeqCst);
            assert!(number != n, "{question}");
        }
    };
    let forked = question.clone();
    cache.monitor().besides(question);
    cache.monitor().besides_forked(move || forked("forked"));
    if marked {
        cache.monitor().marks_changes();
    }
    let flights = Flights { zone: &zone, records: &records, given_up: RefCell::default() };
    let target = Target::new();
    let mut panicked = panics(|| drop(flights.ask(&target)));
    for method in [Method::Exchange, Method::Copy, Method::Replace] {
        target.fill(7);
        panicked |= panics(|| {
            let place = flights.ask(&target);
            flights.is_done();
            // SAFETY: the data is there.
            unsafe { place.arrived() }.land_by(method).unwrap();
            assert!(target.is_all(3));
        });
    }
    target.fill(7);
    panicked |= panics(|| {
        let place = flights.ask(&target);
        let remapped = place.remap().unwrap();
        assert!(target.is_all(3));
        flights.is_done();
        // SAFETY: as above.
        unsafe { remapped.arrived() }.unwrap();
    });
    panicked |= panics(|| {
        target.fill(7);
        let remapped = panics(|| drop(flights.ask(&target).remap().map(std::mem::forget)));
        assert!(!remapped || !target.is_all(3), "question {n}: a device writes to the target");
        assert!(!remapped, "question {n}");
    });
    let was_asked = asked.load(SeqCst) == n;
    assert!(was_asked || !panicked, "question {n}");
    // It has asked its last: each slot that is left is given out.
    let others: Vec<_> = (0..zone.free_slots()).map(|_| flights.ask(&Target::new())).collect();
    assert!(was_asked || others.len() == 1, "one was forgotten");
    drop(others);
    let kept = flights.given_up.borrow();
    assert!(kept.iter().all(|&(range, handle)| records.has(handle, range)), "question {n}");
    drop(kept);
    drop(zone);
    drop(cache);
    assert_eq!(records.leaked(), 0, "question {n}");
    was_asked
}

/// Landing pages that say when they are gone.
struct Watched(Slab, Arc<AtomicBool>);

// SAFETY: the slab's promise.
unsafe impl SlabPages for Watched {
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

/// The same, but they panic as they end.
struct LoudPages(Watched, #[expect(dead_code)] LoudEnd);

// SAFETY: the slab's promise.
unsafe impl SlabPages for LoudPages {
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

/// A registrar that panics as it is asked what it is like, and pages that panic as they go because of that.
#[test]
fn a_zone_that_is_not_made_drops_its_pages_although_all_of_it_panics() {
    let name = "landings::a_zone_that_is_not_made_drops_its_pages_although_all_of_it_panics";
    let status = in_a_process_of_its_own(name, || {
        let (armed, gone) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let ended = Arc::new(AtomicUsize::new(0));
        let end = || LoudEnd(Arc::clone(&ended));
        let registrar = Undecided(device().0, Arc::clone(&armed), end());
        let cache = pinfold::cache(registrar, Silent::new(), Config::keeping_all()).unwrap();
        armed.store(true, SeqCst);
        let pages = Watched(Slab::new(BYTES, 2, false).unwrap(), Arc::clone(&gone));
        let pages = LoudPages(pages, end());
        assert!(panics(|| drop(Zone::new(&cache, pages, ZoneOptions::default()))));
        assert!(gone.load(SeqCst) && ended.load(SeqCst) == 1);
        std::mem::forget(cache);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The leases of the slots are for one use each, so that their ends call the registrar.
#[test]
fn a_zone_whose_registrar_panics_as_it_goes_is_gone_with_its_pages() {
    for n in 1..4 {
        let little = Config { max_bytes: PAGE, ..Config::keeping_all() };
        let (cache, records) = cache(Config { when_full: WhenFull::RegisterPerUse, ..little });
        let gone = Arc::new(AtomicBool::new(false));
        let pages = Watched(Slab::new(BYTES, 2, false).unwrap(), Arc::clone(&gone));
        let zone = Zone::new(&cache, pages, ZoneOptions::default()).unwrap();
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
        let zone = Zone::new(&cache, Slab::new(BYTES, 2, false).unwrap(), ZoneOptions::default());
        matches!(zone, Err(ZoneError::FollowsPageTable))
    }
    let (pinned, following) = (|| device().0, || Following(device().0));
    assert!(!refused(pinned()) && !refused((pinned(), pinned())));
    assert!(refused(following()) && refused(Arc::new(following())));
    assert!(refused((pinned(), following())) && refused((following(), pinned())));
    assert!(refused((pinned(), (pinned(), following()))));
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
        let options =
            ZoneOptions { crossover: Crossover::exchange_from(PAGE), ..ZoneOptions::default() };
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

/// The process has as many mappings as it may, and one more.
struct NoMoreMappings {
    many: *mut libc::c_void,
    others: Vec<*mut libc::c_void>,
}

impl NoMoreMappings {
    /// A table longer than this is not filled.
    const MOST: usize = 1 << 20;
    const BYTES: usize = 2 * Self::MOST * PAGE;

    /// Why it cannot be.
    fn is_out_of_reach() -> Option<String> {
        let most = Limits::read().max_map_count;
        let is_too_long = most.is_none_or(|most| most > Self::MOST as u64);
        is_too_long.then(|| format!("a table of mappings too long to fill: {most:?}"))
    }

    fn new() -> Self {
        // Before the table is full.
        let mut others = Vec::with_capacity(64);
        let many = Self::map(Self::BYTES, libc::PROT_NONE);
        assert_ne!(many, libc::MAP_FAILED);
        // No two neighbours have the same rights, so each page is a mapping of its own.
        let pages = (PAGE..Self::BYTES).step_by(2 * PAGE);
        let split = pages.take_while(|&offset| {
            // SAFETY: the test's own page, which nothing uses.
            unsafe { libc::mprotect(many.wrapping_byte_add(offset), PAGE, libc::PROT_READ) == 0 }
        });
        assert!(split.count() > 1000);
        // The kernel splits none when there are as many as there may be; it maps one more.
        for rights in [libc::PROT_NONE, libc::PROT_READ].into_iter().cycle() {
            let other = Self::map(PAGE, rights);
            if other == libc::MAP_FAILED {
                return Self { many, others };
            }
            others.push(other);
            assert!(others.len() < others.capacity(), "the table is full");
        }
        unreachable!("a cycle has no end");
    }

    fn map(bytes: usize, rights: libc::c_int) -> *mut libc::c_void {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new memory where the kernel likes.
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) }
    }
}

impl Drop for NoMoreMappings {
    fn drop(&mut self) {
        // SAFETY: this value's own mappings, which nothing uses.
        unsafe {
            libc::munmap(self.many, Self::BYTES);
            self.others.iter().for_each(|&other| _ = libc::munmap(other, PAGE));
        }
    }
}

/// Where the kernel maps nothing more it does not say what is mapped either: data lands by copying, in a target that is
/// there, and nothing of the zone is taken for lost.
#[test]
fn a_process_with_as_many_mappings_as_it_may_have_lands_data_by_copying() {
    if let Some(why) = NoMoreMappings::is_out_of_reach() {
        return eprintln!("skipped: {why}");
    }
    let name = "landings::a_process_with_as_many_mappings_as_it_may_have_lands_data_by_copying";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let gone = Arc::new(AtomicBool::new(false));
        let pages = Watched(Slab::new(BYTES, 2, false).unwrap(), Arc::clone(&gone));
        let options =
            ZoneOptions { crossover: Crossover::exchange_from(PAGE), ..ZoneOptions::default() };
        let zone = Zone::new(&cache, pages, options).unwrap();
        let target = Target::new();
        target.fill(7);
        let land = |byte| {
            // SAFETY: see the file's header.
            let place = unsafe { zone.ask(target.0, BYTES) }.unwrap();
            receive(place.range(), byte);
            // SAFETY: the data is there.
            let landed = unsafe { place.arrived() }.land().unwrap();
            assert!(target.is_all(byte));
            landed
        };
        assert_eq!(land(1).moved_bytes, BYTES);
        let full = NoMoreMappings::new();
        for byte in [2, 3] {
            let landed = land(byte);
            assert_eq!(landed.copied_bytes, BYTES);
            let because = Some(LandError::Exchange { errno: libc::ENOMEM });
            assert_eq!(landed.copied_because, because);
            assert_eq!(zone.free_slots(), 2);
        }
        drop(full);
        assert_eq!(land(4).moved_bytes, BYTES);
        drop(zone);
        assert!(gone.load(SeqCst), "the zone gives its pages back");
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
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
                let (cache, _records) = cache_without_a_thread(Config::keeping_all());
                let slab = Slab::new(BYTES, 2, false).unwrap();
                let aside = slab.aside();
                let zone = Zone::new(&cache, slab, ZoneOptions::default()).unwrap();
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
                    assert!(
                        refused.state.left().all(|(_, data)| data.iter().all(|&byte| byte == 3))
                    );
                    let left = refused.state.left().map(|(part, _)| part.len()).sum::<usize>();
                    assert_eq!(left, BYTES);
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

/// A kernel that runs out of memory behind so many moves of pages, as the thread that asked for it finds it: what was to
/// be moved over is unmapped, and nothing is mapped there any more.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod exhausted {
    use std::mem::offset_of;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

    static MOVES_LEFT: AtomicUsize = AtomicUsize::new(0);
    /// Whether only the next move fails, and another thread maps its own where it went to, before the one behind that.
    static ONCE: AtomicBool = AtomicBool::new(false);
    static HOLE: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    static THEIRS: AtomicUsize = AtomicUsize::new(0);

    /// By which the handler's own call is known: an argument that the kernel does not look at.
    const OURS: u32 = 0x5059;

    fn step(code: u32, k: u32, [jt, jf]: [u8; 2]) -> libc::sock_filter {
        libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k }
    }

    fn load(offset: usize) -> libc::sock_filter {
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, u32::try_from(offset).unwrap(), [0; 2])
    }

    fn jump(how: u32, k: u32, ways: [u8; 2]) -> libc::sock_filter {
        step(libc::BPF_JMP | how | libc::BPF_K, k, ways)
    }

    /// So many moves more, where [`behind`] was called.
    pub(super) fn has_left(moves: usize) {
        MOVES_LEFT.store(moves, SeqCst);
    }

    /// At the next move alone: what another thread maps there then is filled with 9.
    pub(super) fn once() {
        ONCE.store(true, SeqCst);
        behind(usize::MAX);
    }

    /// Where that is.
    pub(super) fn theirs() -> *const u8 {
        std::ptr::with_exposed_provenance(THEIRS.load(SeqCst))
    }

    /// From now on, on this thread and for good.
    pub(super) fn behind(moves: usize) {
        has_left(moves);
        let args = offset_of!(libc::seccomp_data, args);
        let number = |call: libc::c_long| u32::try_from(call).unwrap();
        let noreplace = u32::try_from(libc::MAP_FIXED_NOREPLACE).unwrap();
        let end = |action| step(libc::BPF_RET | libc::BPF_K, action, [0; 2]);
        let mut steps = [
            load(offset_of!(libc::seccomp_data, nr)),
            jump(libc::BPF_JEQ, number(libc::SYS_mremap), [0, 2]),
            load(args + 5 * 8),
            jump(libc::BPF_JEQ, OURS, [3, 4]),
            jump(libc::BPF_JEQ, number(libc::SYS_mmap), [0, 2]),
            load(args + 3 * 8),
            jump(libc::BPF_JSET, noreplace, [1, 0]),
            end(libc::SECCOMP_RET_ALLOW),
            end(libc::SECCOMP_RET_TRAP),
        ];
        let program = libc::sock_fprog { len: 9, filter: steps.as_mut_ptr() };
        // SAFETY: the handler calls the kernel only; the filter is as long as it says.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::ucontext_t) = answer;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()), 0);
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let filter = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program), 0);
        }
    }

    /// As another thread, to which the kernel gives what is not mapped.
    fn fill_hole() {
        let (hole, bytes) = (HOLE[0].swap(0, SeqCst), HOLE[1].load(SeqCst));
        if hole != 0 {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: nothing is mapped there.
            unsafe {
                let to = std::ptr::with_exposed_provenance_mut(hole);
                libc::mmap(to, bytes, rights, kind, -1, 0);
                to.cast::<u8>().write_bytes(9, bytes);
            }
            THEIRS.store(hole, SeqCst);
        }
    }

    extern "C" fn answer(_: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
        // SAFETY: the kernel gives both, and the registers hold the arguments of the call that was stopped.
        unsafe {
            let _ = info;
            let registers = &mut (*context).uc_mcontext;
            #[cfg(target_arch = "x86_64")]
            let (number, arguments) = {
                let of = |which: i32| registers.gregs[which as usize];
                let arguments =
                    [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8];
                (of(libc::REG_RAX), arguments.map(of))
            };
            #[cfg(target_arch = "aarch64")]
            let (number, arguments) = {
                let of = |which: usize| registers.regs[which] as i64;
                (of(8), [0, 1, 2, 3, 4].map(of))
            };
            let [from, bytes, goal_bytes, how, goal] = arguments;
            let result = if number != libc::SYS_mremap {
                -i64::from(libc::ENOMEM)
            } else if ONCE.swap(false, SeqCst) {
                libc::syscall(libc::SYS_munmap, goal, goal_bytes);
                HOLE[0].store(usize::try_from(goal).unwrap(), SeqCst);
                HOLE[1].store(usize::try_from(goal_bytes).unwrap(), SeqCst);
                -i64::from(libc::ENOMEM)
            } else if MOVES_LEFT.load(SeqCst) == 0 {
                libc::syscall(libc::SYS_munmap, goal, goal_bytes);
                -i64::from(libc::ENOMEM)
            } else {
                MOVES_LEFT.fetch_sub(1, SeqCst);
                fill_hole();
                libc::syscall(libc::SYS_mremap, from, bytes, goal_bytes, how, goal, OURS)
            };
            #[cfg(target_arch = "x86_64")]
            {
                registers.gregs[libc::REG_RAX as usize] = result;
            }
            #[cfg(target_arch = "aarch64")]
            {
                registers.regs[0] = result as u64;
            }
        }
    }
}

/// Data of which a part has come into the target when the kernel runs out of memory, and unmaps the place that the part has
/// left as well: what can be read is what has not landed.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn data_whose_place_the_kernel_has_torn_is_read_where_it_is() {
    let name = "landings::data_whose_place_the_kernel_has_torn_is_read_where_it_is";
    // Without a part of a page before the whole ones, and with one.
    let status = in_a_process_of_its_own(name, || [0, 100].into_iter().for_each(torn));
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The slot consists of two mappings, the first of which goes.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn torn(ragged: usize) {
    let (cache, _records) = cache_without_a_thread(Config::keeping_all());
    let zone = zone(&cache);
    let target = Target::new();
    target.fill(5);
    let (start, length) = (target.0.wrapping_add(PAGE - ragged), 4 * PAGE + ragged);
    // SAFETY: see the file's header.
    let place = unsafe { zone.ask(start, length) }.unwrap();
    let range = place.range();
    receive(range, 3);
    split(range);
    // What the target has goes aside, and the first part comes.
    exhausted::behind(2);
    // SAFETY: the data is there.
    let refused = unsafe { place.arrived() }.land_by(Method::Exchange).unwrap_err();
    let (arrived, error) = (refused.state, refused.error);
    assert_eq!(error, LandError::TargetUnmapped { errno: libc::ENOMEM });
    assert_eq!(arrived.bytes(), [3; 2 * PAGE]);
    assert_eq!(arrived.target().start(), start.addr() + ragged + 2 * PAGE);
    // SAFETY: the part of the target that is mapped.
    let landed = unsafe { std::slice::from_raw_parts(start, ragged + 2 * PAGE) };
    assert!(landed.iter().all(|&byte| byte == 3));
    let theirs = map_over(range.start() + ragged);
    let again = arrived.land().unwrap_err();
    assert_eq!(again.error, error);
    drop(again);
    assert_eq!(zone.free_slots(), 1);
    // SAFETY: a page of this test.
    assert_eq!(unsafe { theirs.read() }, 9);
}

/// The same where the pages are exchanged before the data comes: what has not got to the target can be read.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn what_a_torn_remapped_target_lacks_can_be_read() {
    let status =
        in_a_process_of_its_own("landings::what_a_torn_remapped_target_lacks_can_be_read", || {
            let (cache, _records) = cache_without_a_thread(Config::keeping_all());
            let zone = zone(&cache);
            let target = Target::new();
            target.fill(5);
            let (start, length) = (target.0.wrapping_add(PAGE - 100), 4 * PAGE + 100);
            // SAFETY: see the file's header.
            let place = unsafe { zone.ask(start, length) }.unwrap();
            receive(place.range(), 3);
            split(place.range());
            // What the target has goes aside, and the first part comes.
            exhausted::behind(2);
            let remapped = place.remap().unwrap();
            assert_eq!(remapped.left().count(), 0, "a device may write");
            // SAFETY: the data is there.
            let refused = unsafe { remapped.arrived() }.unwrap_err();
            assert_eq!(refused.error, LandError::TargetUnmapped { errno: libc::ENOMEM });
            let left: Vec<_> = refused.state.left().collect();
            assert_eq!(left.len(), 2);
            assert_eq!((left[0].0.start(), left[0].1), (start.addr(), &[3; 100][..]));
            assert_eq!(
                (left[1].0.start(), left[1].1),
                (start.addr() + 100 + 2 * PAGE, &[3; 2 * PAGE][..])
            );
        });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A page that another thread maps where nothing is mapped, filled with 9.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn map_over(hole: usize) -> *mut u8 {
    let hole = std::ptr::with_exposed_provenance_mut::<libc::c_void>(hole);
    assert!(!pinfold_kernel::memory::is_mapped(AddressRange::new(hole.addr(), PAGE).unwrap()));
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: nothing is mapped there.
    let page = unsafe { libc::mmap(hole, PAGE, rights, kind, -1, 0) };
    assert_eq!(page, hole);
    // SAFETY: the page is the test's.
    unsafe { page.cast::<u8>().write_bytes(9, PAGE) };
    page.cast()
}

/// What the target had goes aside no more, and where it was to go another thread has its own: that does not come into the slot.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn what_others_map_in_a_place_aside_that_the_kernel_has_torn_stays_theirs() {
    let name = "landings::what_others_map_in_a_place_aside_that_the_kernel_has_torn_stays_theirs";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let (zone, target) = (zone(&cache), Target::new());
        target.fill(5);
        let place = target.ask(&zone);
        receive(place.range(), 3);
        exhausted::once();
        // SAFETY: the data is there.
        let landed = unsafe { place.arrived() }.land_by(Method::Exchange).unwrap();
        assert_eq!(landed.moved_bytes, BYTES);
        assert!(target.is_all(3));
        // SAFETY: a page that the handler has mapped.
        assert_eq!(unsafe { exhausted::theirs().read() }, 9);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A device may go on with the pages of a slot that was torn; what another thread has mapped there is not discarded.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn a_remapped_place_whose_slot_the_kernel_has_torn_discards_nothing_of_others() {
    let name =
        "landings::a_remapped_place_whose_slot_the_kernel_has_torn_discards_nothing_of_others";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let zone = zone(&cache);
        let target = Target::new();
        let place = target.ask(&zone);
        let range = place.range();
        split(range);
        exhausted::behind(2);
        let remapped = place.remap().unwrap();
        let theirs = map_over(range.start());
        drop(remapped);
        assert_eq!(zone.free_slots(), 1);
        // SAFETY: a page of this test.
        assert_eq!(unsafe { theirs.read() }, 9);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The kernel unmaps the second part of the target when the first has the slot's pages, which the device writes. They had
/// stayed there, because a target with a hole was taken for one that has changed.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn what_the_target_has_of_an_exchange_that_the_kernel_could_not_end_is_taken_out_of_it() {
    let name = "landings::\
        what_the_target_has_of_an_exchange_that_the_kernel_could_not_end_is_taken_out_of_it";
    let status = in_a_process_of_its_own(name, || {
        for is_changed in [false, true] {
            let (cache, _records) = cache_without_a_thread(Config::keeping_all());
            cache.monitor().sees_holes();
            let zone = zone(&cache);
            let target = Target::new();
            let place = target.ask(&zone);
            receive(place.range(), 3);
            split(place.range());
            // What the target has goes aside, and the first part comes.
            if is_changed {
                exhausted::has_left(2);
            } else {
                exhausted::behind(2);
            }
            let remapped = place.remap().unwrap();
            // SAFETY: the part of the target that is mapped.
            let first = unsafe { std::slice::from_raw_parts(target.0, BYTES - 2 * PAGE) };
            assert!(first.iter().all(|&byte| byte == 3));
            if is_changed {
                cache.monitor().change(AddressRange::new(target.0.addr(), PAGE).unwrap());
            }
            drop(remapped);
            let expected = if is_changed { 3 } else { 0 };
            assert!(first.iter().all(|&byte| byte == expected), "changed: {is_changed}");
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Where pages cannot go back to a place whose target cannot be watched again, they are taken out at once, and nothing lands.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[test]
fn a_target_that_cannot_be_watched_again_keeps_no_pages_that_cannot_go_back() {
    let name = "landings::a_target_that_cannot_be_watched_again_keeps_no_pages_that_cannot_go_back";
    let status = in_a_process_of_its_own(name, || {
        let (cache, _records) = cache_without_a_thread(Config::keeping_all());
        let zone = zone(&cache);
        let target = Target::new();
        let place = target.ask(&zone);
        receive(place.range(), 3);
        cache.monitor().is_busy(usize::MAX);
        // What the target has goes aside, the slot's pages come, and the others go to the slot.
        exhausted::behind(3);
        let remapped = place.remap().unwrap();
        assert!(!remapped.is_watched() && target.is_all(0));
        let theirs = map_over(remapped.range().start());
        // SAFETY: nothing has changed, and the data is there.
        let refused = unsafe { remapped.vouch().arrived() }.unwrap_err();
        assert_eq!(refused.error, LandError::TargetUnwatched);
        target.fill(5);
        drop(refused);
        assert!(target.is_all(5));
        assert_eq!(zone.free_slots(), 1);
        // SAFETY: a page of this test.
        assert_eq!(unsafe { theirs.read() }, 9);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The last two pages become a mapping of their own.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn split(place: AddressRange) {
    let second = std::ptr::with_exposed_provenance_mut(place.end() - 2 * PAGE);
    // SAFETY: memory of a slot; what is advised splits it, and says nothing of its content.
    assert_eq!(unsafe { libc::madvise(second, 2 * PAGE, libc::MADV_DONTFORK) }, 0);
}

/// A slot whose memory the kernel has unmapped, and cannot map again, is no place for data, registered or not.
#[test]
fn a_slot_that_cannot_be_mapped_again_is_not_registered() {
    let name = "landings::a_slot_that_cannot_be_mapped_again_is_not_registered";
    let status = in_a_process_of_its_own(name, || {
        for by_asking in [false, true] {
            let (cache, _records) = cache_without_a_thread(Config::keeping_all());
            let slab = Slab::new(BYTES, 2, false).unwrap();
            let slots = slab.slots();
            let zone = Zone::new(&cache, slab, ZoneOptions::default()).unwrap();
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
