//! Each way to end for each thing that ends: a row of the table in `docs/src/endings.md` is a test, a cell
//! is an [`End`].
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to lease memory of its own, which no device is told of, to ask for
//! landing places in it, and to use a ring.

#![allow(unsafe_code)]

use crate::device::{
    Device, PAGE, RAN, Records, Silent, TheCache, cache, device, in_a_process_of_its_own,
};
use crate::registrar_support::memory_file;
use crate::ways::{ENDS, End, child_does, end};
use io_uring::{opcode, types};
use pinfold::budget::{Budget, Reserve, Terms, Watermark};
use pinfold::handshake::{Answer, Heard, Idle, Owner};
use pinfold::landing::{Crossover, Slab, Zone, ZoneOptions};
use pinfold::limits::Limits;
use pinfold::monitor::{Feed, Userfaultfd};
use pinfold::pieces::{self, Progress, register_all};
use pinfold::pool::{Pool, PoolConfig, PoolVec};
use pinfold::registrar::{BufferIndex, IoUring, Mlock};
use pinfold::strategy::{Costs, Reuse, TransferPlanner};
use pinfold::{Access, AddressRange, Cache, Config, Monitor, Registrar, Watch};
use pinfold_core::monitor::ChangeMark;
use pinfold_core::pending_changes::PendingChanges;
use pinfold_core::{Amount, ChangeMarks};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// One row, in a process of its own, because it forks. Miri has no other process: there it is all but the forked child.
pub(crate) fn row(name: &str, cell: impl Fn(End)) {
    if cfg!(miri) {
        return ENDS.into_iter().filter(|&how| how != End::InAForkedChild).for_each(cell);
    }
    let status = in_a_process_of_its_own(
        &format!("{}{name}", if name.contains("::") { "" } else { "table::" }),
        || {
            for how in ENDS {
                eprintln!("{name}: {how:?}");
                cell(how);
            }
        },
    );
    assert_eq!(
        status.code(),
        Some(RAN),
        "{name}: {status}; run this test alone with PINFOLD_ENDINGS_CHILD=1"
    );
}

pub(crate) fn a_cache() -> (&'static TheCache, Arc<Records>) {
    let (cache, records) = cache(Config::keeping_all());
    (Box::leak(Box::new(cache)), records)
}

fn a_pool() -> (&'static Pool<Device>, Arc<Records>) {
    let (device, records) = device();
    let config = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
    (Box::leak(Box::new(Pool::new(device, config).unwrap())), records)
}

/// Memory for good.
pub(crate) fn memory(bytes: usize) -> &'static mut [u8] {
    Box::leak(vec![0_u8; bytes].into_boxed_slice())
}

/// A lease that ends lets its region go; one that leaks keeps it until the cache is dropped.
#[test]
fn lease() {
    row("lease", |how| {
        for once in [false, true] {
            let (cache, records) = a_cache();
            let memory = memory(3 * PAGE);
            // SAFETY: see the file's header.
            let lease = unsafe {
                match once {
                    false => cache.get(memory.as_ptr(), memory.len(), Access::READ),
                    true => cache.request(memory.as_ptr(), memory.len(), Access::READ).once().get(),
                }
            };
            end(lease.unwrap(), how);
            cache.evict_idle();
            assert_eq!(records.live(), usize::from(how.leaks()), "once: {once}");
        }
    });
}

/// The buffer lives as long as its lease.
#[test]
fn buffer_lease() {
    row("buffer_lease", |how| {
        let (cache, records) = a_cache();
        let buffer: Arc<[u8]> = vec![7_u8; 3 * PAGE].into();
        end(cache.lease_buffer(Arc::clone(&buffer)).unwrap(), how);
        cache.evict_idle();
        // A buffer across the border of a piece has two.
        assert_eq!(records.live() > 0, how.leaks());
        assert_eq!(Arc::strong_count(&buffer), 1 + usize::from(how.leaks()));
    });
}

/// The leases of all pieces of a long range end with it.
#[test]
fn registered() {
    row("registered", |how| {
        let (cache, records) = cache(Config { piece_bytes: PAGE, ..Config::keeping_all() });
        let cache: &'static TheCache = Box::leak(Box::new(cache));
        let (memory, options) = (memory(3 * PAGE), pieces::Options::for_register_all());
        let (start, length) = (memory.as_ptr(), memory.len());
        // SAFETY: see the file's header.
        let all =
            unsafe { register_all(cache, start, length, Access::READ, &options, &Progress::new()) };
        let all = all.ok().unwrap();
        assert!(all.leases().len() > 2);
        let pieces = all.leases().len();
        end(all, how);
        cache.evict_idle();
        assert_eq!(records.live(), if how.leaks() { pieces } else { 0 });
    });
}

/// A cache takes every registration along, that of a forgotten lease too, and its registrar.
#[test]
fn a_cache_itself() {
    row("a_cache_itself", |how| {
        let (cache, records) = cache(Config::keeping_all());
        let memory = memory(3 * PAGE);
        for _ in 0..2 {
            // SAFETY: see the file's header.
            let lease = unsafe { cache.get(memory.as_ptr(), memory.len(), Access::READ) };
            std::mem::forget(lease.unwrap());
        }
        end(cache, how);
        assert_eq!((records.is_gone(), records.live()), (!how.leaks(), usize::from(how.leaks())));
    });
}

/// A buffer that ends goes back; one that leaks stays out.
#[test]
fn pool_buffer() {
    row("pool_buffer", |how| {
        let (pool, records) = a_pool();
        end(pool.get(1500).unwrap(), how);
        assert_eq!(pool.statistics().in_use_bytes > 0, how.leaks());
        pool.trim(0);
        assert_eq!(records.live(), usize::from(how.leaks()));
    });
}

/// The buffer that its bytes are in goes back.
#[test]
fn pool_vector() {
    row("pool_vector", |how| {
        let (pool, records) = a_pool();
        let mut vector = PoolVec::new(pool);
        // Through two buffers.
        vector.extend_from_slice(&[7; 1500]).unwrap();
        vector.extend_from_slice(&[7; 100_000]).unwrap();
        end(vector, how);
        assert_eq!(pool.statistics().in_use_bytes > 0, how.leaks());
        pool.trim(0);
        assert_eq!(records.live(), usize::from(how.leaks()));
    });
}

/// A buffer in flight is lost whatever ends it: nothing said that the device is done.
#[test]
fn buffer_in_flight() {
    row("buffer_in_flight", |how| {
        let (pool, records) = a_pool();
        let flight = pool.get(1500).unwrap().in_flight();
        let at = flight.as_ptr().addr();
        end(flight, how);
        let others: Vec<_> = std::iter::from_fn(|| pool.get(1500).ok()).take(4096).collect();
        assert!(others.iter().all(|other| other.as_ptr().addr() != at));
        drop(others);
        pool.trim(0);
        assert_eq!(records.live(), 1);
    });
}

/// A pool takes its registrations and its registrar along; one that leaks keeps them.
#[test]
fn a_pool_itself() {
    row("a_pool_itself", |how| {
        let (device, records) = device();
        let pool = Pool::new(device, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() });
        let pool = pool.unwrap();
        drop(pool.get(1500).unwrap());
        end(pool, how);
        assert_eq!((records.is_gone(), records.live()), (!how.leaks(), usize::from(how.leaks())));
    });
}

/// A cache needs no reclaimer; one that leaks keeps what the cache is made of, without the registrations.
#[test]
fn reclaimer() {
    row("reclaimer", |how| {
        let (device, records) = device();
        let mut cache = Cache::new(device, Silent::new(), Config::keeping_all()).unwrap();
        let started = cache.start_reclaimer(|reclaimer| {
            end(reclaimer, how);
            Ok(thread::spawn(|| {}))
        });
        started.unwrap();
        let memory = memory(PAGE);
        // SAFETY: see the file's header.
        drop(unsafe { cache.get(memory.as_ptr(), PAGE, Access::READ) }.unwrap());
        assert_eq!(records.live(), 1);
        drop(cache);
        assert_eq!((records.live(), records.is_gone()), (0, !how.leaks()));
    });
}

/// A cache that ends waits for the thread that `start_reclaimer` was given, whatever that does.
#[test]
fn a_cache_waits_for_its_reclaimers_thread() {
    let mut cache = Cache::new(device().0, Silent::new(), Config::keeping_all()).unwrap();
    let (leave, left) = mpsc::channel();
    let ended = Arc::new(AtomicBool::new(false));
    let sets = Arc::clone(&ended);
    let started = cache.start_reclaimer(|reclaimer| {
        Ok(thread::spawn(move || {
            reclaimer.run();
            left.recv().unwrap();
            sets.store(true, SeqCst);
        }))
    });
    started.unwrap();
    leave.send(()).unwrap();
    drop(cache);
    assert!(ended.load(SeqCst));
}

/// A place that ends gives its pages up and its slot back; one that leaks keeps its slot, and the zone's
/// pages stay.
#[test]
fn landing_place() {
    row("landing_place", |how| {
        let (zone, target) = zone_and_target();
        // SAFETY: see the file's header.
        end(unsafe { zone.ask(target, LANDING) }.unwrap(), how);
        assert_eq!(zone.free_slots(), 2 - usize::from(how.leaks()));
    });
}

/// The same, and its target is its owner's again unless it leaks.
#[test]
fn remapped_place() {
    row("remapped_place", |how| {
        let (zone, target) = zone_and_target();
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(target, LANDING) }.unwrap();
        let at = std::ptr::with_exposed_provenance_mut::<u8>(place.range().start());
        // SAFETY: as the device writes: the place is held.
        unsafe { at.write_bytes(3, LANDING) };
        let Ok(remapped) = place.remap() else { panic!("the target is memory of its own") };
        end(remapped, how);
        assert_eq!(zone.free_slots(), 2 - usize::from(how.leaks()));
        // SAFETY: mapped, and nothing writes it.
        assert_eq!(unsafe { target.read_volatile() }, if how.leaks() { 3 } else { 0 });
    });
}

/// What has arrived and is not landed is discarded, and the slot is free with its registration.
#[test]
fn arrived_place() {
    row("arrived_place", |how| {
        let (zone, target) = zone_and_target();
        // SAFETY: see the file's header; nothing was begun.
        end(unsafe { zone.ask(target, LANDING).unwrap().arrived() }, how);
        assert_eq!(zone.free_slots(), 2 - usize::from(how.leaks()));
    });
}

const LANDING: usize = 8 * PAGE;

/// A zone of two slots, and memory of whole pages that it can exchange, in a huge page's room of its own.
fn zone_and_target() -> (&'static Zone<'static, Device, Silent, Slab>, *mut u8) {
    const HUGE: usize = 2 << 20;
    let (cache, _records) = a_cache();
    let slab = Slab::new(LANDING, 2, false).unwrap();
    let options =
        ZoneOptions { crossover: Crossover::exchange_from(PAGE), ..ZoneOptions::default() };
    let zone = Box::leak(Box::new(Zone::new(cache, slab, options).unwrap()));
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory where the kernel likes; leaked.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), 2 * HUGE, rights, kind, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let start = start.cast::<u8>();
    (zone, start.wrapping_add(start.align_offset(HUGE)))
}

/// No registration of a zone that has ended is found or kept.
#[test]
fn landing_zone() {
    row("landing_zone", |how| {
        let (cache, records) = a_cache();
        let slab = Slab::new(8 * PAGE, 2, false).unwrap();
        end(Zone::new(cache, slab, ZoneOptions::default()).unwrap(), how);
        cache.reclaim();
        cache.evict_idle();
        let live = || records.live() == if how.leaks() { 2 } else { 0 };
        while !live() {
            // The reclaimer's thread may be about it.
            thread::yield_now();
        }
    });
}

/// What a place of the planner holds is left to the device unless it is completed or abandoned.
#[test]
fn planned_place() {
    row("planned_place", |how| {
        let (cache, records) = a_cache();
        let planner: &'static _ =
            Box::leak(Box::new(TransferPlanner::new(cache, Costs::UNMEASURED)));
        let memory = memory(3 * PAGE);
        let send = || {
            // SAFETY: see the file's header.
            unsafe { planner.send(memory.as_ptr(), memory.len(), Reuse::Often) }.unwrap()
        };
        // SAFETY: no device knows of it.
        unsafe { send().abandon() };
        cache.evict_idle();
        assert_eq!(records.live(), 0);
        end(send(), how);
        cache.evict_idle();
        assert_eq!(records.live(), 1);
    });
}

/// A share that ends is no drawer any more; what it drew is free.
#[test]
fn budget_share_and_what_was_drawn() {
    row("budget_share_and_what_was_drawn", |how| {
        let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
        let all = Terms { minimum: budget.total(), ..Terms::default() };
        let share = budget.share(Terms::default()).unwrap();
        end(share.draw(Amount::one(PAGE)).unwrap(), how);
        assert_eq!(budget.held() != Amount::ZERO, how.leaks());
        end(share, how);
        assert_eq!(budget.share(all).is_err(), how.leaks());
    });
}

/// A watch of a budget ends its listener with it, or stays.
#[test]
fn budget_watch() {
    row("budget_watch", |how| {
        let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
        let share = budget.share(Terms::default()).unwrap();
        let heard = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&heard);
        let watermark = Watermark::Regions(1);
        end(
            budget.watch(watermark, move |_| {
                counts.fetch_add(1, SeqCst);
            }),
            how,
        );
        drop(share.draw(Amount::one(PAGE)).unwrap());
        assert_eq!(heard.load(SeqCst) > 0, how.leaks());
        assert_eq!(Arc::strong_count(&heard), 1 + usize::from(how.leaks()));
    });
}

/// Nothing ends with the budget's own handle.
#[test]
fn what_draws_on_a_budget_and_what_watches_it_outlive_its_handle() {
    row("what_draws_on_a_budget_and_what_watches_it_outlive_its_handle", |how| {
        let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
        let share = budget.share(Terms::default()).unwrap();
        let heard = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&heard);
        let watch = budget.watch(Watermark::Regions(1), move |_| {
            counts.fetch_add(1, SeqCst);
        });
        end(budget, how);
        drop(share.draw(Amount::one(PAGE)).unwrap());
        let before = heard.swap(0, SeqCst);
        assert!(before > 0);
        end(watch, how);
        end(share.draw(Amount::one(PAGE)).unwrap(), how);
        assert_eq!(heard.load(SeqCst) > 0, how.leaks());
        assert_eq!(share.held() != Amount::ZERO, how.leaks());
    });
}

/// A change that a program reports stands until its value ends: then its range is not cached.
#[test]
fn change_of_a_feed() {
    row("change_of_a_feed", |how| {
        let feed: &'static Feed = Box::leak(Box::new(Feed::new()));
        let range = AddressRange::new(PAGE, PAGE).unwrap();
        let changing = feed.begin(range);
        assert!(feed.is_under_way(range));
        end(changing, how);
        assert_eq!(feed.is_under_way(range), how.leaks());
    });
}

/// A consent that ends is withdrawn from the connections that rely on it; one that leaks stands until its time is over.
#[test]
fn consent_of_a_peer() {
    row("consent_of_a_peer", |how| {
        let (now, later) = (Duration::ZERO, Duration::from_secs(1));
        let range = AddressRange::new(PAGE, PAGE).unwrap();
        let (asking, request) = Owner::default().ask(range, later, now);
        let Ok(Heard::Asked(asked)) = Idle::default().hear(&request, now) else { panic!("asked") };
        let (_stopped, agreed) = asked.agree();
        let Ok(Answer::Agreed(consent)) = asking.hear(&agreed) else { panic!("agreed") };
        let agreement = consent.agreement();
        assert!(agreement.covers(range, now));
        end(consent, how);
        assert_eq!(agreement.covers(range, now), how.leaks());
        assert!(!agreement.covers(range, later));
    });
}

/// A change that was announced stands until it is said to have ended, or until all are forgotten: then its
/// range is not cached, which is slow and never stale.
#[test]
fn ticket_of_a_change() {
    row("ticket_of_a_change", |how| {
        let changes: &'static _ = Box::leak(Box::new(PendingChanges::<2>::new()));
        let range = AddressRange::new(PAGE, PAGE).unwrap();
        for _ in 0..3 {
            end(changes.begin(range), how);
            assert!(changes.overlaps(range));
        }
        changes.forget_all();
        assert!(!changes.overlaps(range));
        changes.end(changes.begin(range));
        assert!(!changes.overlaps(range));
    });
}

/// The place of a mark is another range's when it ends, and stays its own when it leaks.
#[test]
fn mark_of_a_range() {
    row("mark_of_a_range", |how| {
        let marks: &'static _ = Box::leak(Box::new(ChangeMarks::<1>::new()));
        let (range, other) = (page_at(PAGE), page_at(4 * PAGE));
        end(marks.begin(range).unwrap(), how);
        let next = marks.begin(other);
        assert_eq!(next.is_none(), how.leaks());
        marks.set(range);
        assert!(next.is_none_or(|mark| !mark.is_set()), "it was another's");
    });
}

fn page_at(start: usize) -> AddressRange {
    AddressRange::new(start, PAGE).unwrap()
}

/// A ring's slots are emptied when its registrar ends, and stay when it leaks. In a child they are the
/// parent's.
#[test]
fn ring() {
    row("ring", |how| {
        let Ok(ring) = io_uring::IoUring::new(8) else {
            return eprintln!("skipped: no io_uring");
        };
        // SAFETY: the ring's table of buffers is left to the registrar.
        let (registrar, memory) = (unsafe { IoUring::new(&ring, 4) }.unwrap(), memory(PAGE));
        let range = AddressRange::new(memory.as_ptr().expose_provenance(), PAGE).unwrap();
        // SAFETY: no request writes it.
        let index = unsafe { registrar.register(range, Access::READ) }.unwrap();
        assert_eq!(sends(&ring, index, memory), 64);
        end(registrar, how);
        assert_eq!(sends(&ring, index, memory), if how.leaks() { 64 } else { -libc::EFAULT });
    });
}

/// What comes of sending the first bytes of `memory` by a slot.
fn sends(ring: &io_uring::IoUring, index: BufferIndex, memory: &[u8]) -> i32 {
    let file = memory_file();
    let to = types::Fd(file.as_raw_fd());
    let entry = opcode::WriteFixed::new(to, memory.as_ptr(), 64, index.get()).build();
    // SAFETY: one thread uses the ring, and memory and file are there until the completion is.
    unsafe {
        ring.submission_shared().push(&entry).unwrap();
        ring.submit_and_wait(1).unwrap();
        ring.completion_shared().next().unwrap().result()
    }
}

/// A reservation goes with the last of its buffers.
#[test]
fn reservation_and_reserved_buffer() {
    row("reservation_and_reserved_buffer", |how| {
        let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
        let (device, records) = device();
        let device = Arc::new(device);
        let reservation = budget.reserve(&device, Reserve::pages(4)).unwrap();
        let buffer = reservation.take().unwrap();
        end(buffer, how);
        assert_eq!(reservation.remaining(), 4 - usize::from(how.leaks()));
        let last = reservation.take().unwrap();
        end(reservation, how);
        assert_eq!(records.live(), 4, "a buffer is out");
        end(last, how);
        assert_eq!(records.live(), if how.leaks() { 4 } else { 0 });
        assert_eq!(budget.held() != Amount::ZERO, how.leaks());
    });
}

/// A monitor and a registrar are ended by their last owner: the cache, here.
#[test]
fn monitor_and_registrar() {
    row("monitor_and_registrar", |how| {
        let ((device, records), monitor) = (device(), Arc::new(Silent::new()));
        let registrar = Arc::new(device);
        let cache =
            pinfold::cache(Arc::clone(&registrar), Arc::clone(&monitor), Config::keeping_all());
        end(cache.unwrap(), how);
        assert!(!records.is_gone());
        assert_eq!(Arc::strong_count(&registrar), 1 + usize::from(how.leaks()));
        drop(registrar);
        assert_eq!(records.is_gone(), !how.leaks());
    });
}

/// A page of its own, at whatever address.
fn page() -> AddressRange {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: new memory where the kernel likes.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, rights, kind, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    AddressRange::new(start.expose_provenance(), PAGE).unwrap()
}

/// What it has locked is unlocked with it, or stays until it is unmapped. A child has none of it.
#[test]
fn locked_memory_of_mlock() {
    row("locked_memory_of_mlock", |how| {
        let locked = || Limits::read().locked_bytes.unwrap();
        let (before, range, mut registrar) = (locked(), page(), Mlock::new().unwrap());
        // SAFETY: no device is told of it.
        if let Err(error) = unsafe { registrar.register(range, Access::READ) } {
            return eprintln!("skipped: no page can be locked: {error}");
        }
        if how == End::InAForkedChild {
            registrar = child_does(registrar, drop);
        }
        assert_eq!(locked(), before + PAGE as u64);
        end(registrar, how);
        assert_eq!(locked() > before, how.leaks());
        // SAFETY: the test's own page.
        unsafe { pinfold_kernel::memory::unmap(range) };
        assert_eq!(locked(), before);
    });
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A monitor takes its descriptors and its thread along, or they stay. A child's copy ends nothing of its parent's.
#[test]
fn userfaultfd() {
    row("userfaultfd", |how| {
        // What is opened once for all.
        if let Err(error) = Userfaultfd::new() {
            return eprintln!("skipped: no userfaultfd: {error}");
        }
        let (before, range) = (descriptors(), page());
        let mut monitor = Userfaultfd::new().unwrap();
        assert_eq!(monitor.watch(range), Watch::Covered);
        if how == End::InAForkedChild {
            monitor = child_does(monitor, drop);
        }
        let seen = monitor.check().unwrap();
        // SAFETY: the test's own page.
        unsafe { pinfold_kernel::memory::discard(range) }.unwrap();
        assert_ne!(monitor.check().unwrap(), seen);
        end(monitor, how);
        assert_eq!(descriptors() > before, how.leaks());
        // The change returns, whether the page is watched or not.
        // SAFETY: as above.
        unsafe { pinfold_kernel::memory::discard(range) }.unwrap();
    });
}
