//! loom models: every interleaving of the orderings that carry the promise.
//!
//! The cache under test is the real one, with an index of two children a level and two slots a
//! record. Around it stands the smallest world that can go wrong: one page, whose number changes
//! when the program's mapping does; a registrar that remembers which page it pinned; a monitor
//! whose check is one load. Run with `./check loom`.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the monitor and to call the methods with an address
//! that nothing dereferences.

#![allow(unsafe_code)]

use crate::exploring::explore;
use crate::monitor::{Lost, Monitor, Position, Replay, Sequence, Watch};
use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits};
use crate::sync::{AtomicU32, AtomicU64, Condvar, Mutex, Ordering, lock, wait};
use crate::{Access, AddressRange, Cache, Change, Config, Cover, GetError, Lease, MappingKind};
use loom::thread;
use std::sync::Arc;

const PAGE: usize = 4096;
const START: usize = 16 * PAGE;

/// The world: the page that the program's address means now, and what the device has pinned.
struct World {
    page: AtomicU64,
    /// Pinned pages by handle; `None` once deregistered.
    pinned: Mutex<Vec<Option<u64>>>,
    /// The log's length, published after the entry.
    sequence: AtomicU64,
    log: Mutex<Vec<AddressRange>>,
    change_pending: AtomicU32,
    event_count: Mutex<u32>,
    changed: Condvar,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            page: AtomicU64::new(0),
            pinned: Mutex::new(Vec::new()),
            sequence: AtomicU64::new(0),
            log: Mutex::new(Vec::new()),
            change_pending: AtomicU32::new(0),
            event_count: Mutex::new(0),
            changed: Condvar::new(),
        })
    }

    /// A change that is logged before its call returns, as `munmap` is.
    fn change(&self) {
        self.page.fetch_add(1, Ordering::AcqRel);
        self.append();
    }

    /// A change that is logged first and takes effect later, as `MADV_DONTNEED` is.
    fn discard(&self) {
        self.change_pending.fetch_add(1, Ordering::AcqRel);
        self.append();
        self.page.fetch_add(1, Ordering::AcqRel);
        self.change_pending.fetch_sub(1, Ordering::AcqRel);
    }

    fn append(&self) {
        let mut log = lock(&self.log);
        log.push(range());
        // Release: the entry is there before the sequence says so.
        self.sequence.store(log.len() as u64, Ordering::Release);
        drop(log);
        self.notify();
    }

    fn page(&self) -> u64 {
        self.page.load(Ordering::Acquire)
    }

    fn is_pinned(&self, handle: usize) -> bool {
        lock(&self.pinned)[handle].is_some()
    }

    fn notify(&self) {
        *lock(&self.event_count) += 1;
        self.changed.notify_all();
    }
}

fn range() -> AddressRange {
    AddressRange::new(START, PAGE).unwrap()
}

struct Device(Arc<World>);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Device {
    type Handle = usize;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 20, max_regions: 8 }
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<usize, RegisterError> {
        let page = self.0.page();
        let mut pinned = lock(&self.0.pinned);
        pinned.push(Some(page));
        Ok(pinned.len() - 1)
    }

    unsafe fn deregister(&self, handle: usize, _: AddressRange) -> Result<(), DeregisterError> {
        let page = lock(&self.0.pinned)[handle].take();
        assert!(page.is_some(), "deregistered twice");
        Ok(())
    }
}

struct Watcher(Arc<World>);

// SAFETY: `change` and `discard` append before they return, a discard is pending from before its
// entry until after its effect, and the log keeps everything.
unsafe impl Monitor for Watcher {
    fn name(&self) -> &'static str {
        "model"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: a thread that sees the sequence sees the entry.
        Ok(Sequence(self.0.sequence.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        self.0.change_pending.load(Ordering::Acquire) > 0
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let log = lock(&self.0.log);
        let told = usize::try_from(from.0).unwrap();
        log.iter().skip(told).for_each(|&range| visit(range));
        let end = log.len() as u64;
        let complete = from != Position::NOWHERE;
        Replay { up_to: Position(end, 0), sequence: Sequence(end), complete, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        *lock(&self.0.event_count)
    }

    fn notify(&self) {
        self.0.notify();
    }

    fn wait(&self, seen: u32) {
        let mut count = lock(&self.0.event_count);
        while *count == seen {
            count = wait(&self.0.changed, count);
        }
    }
}

type ModelCache = Cache<Device, Watcher>;

fn new_cache(world: &Arc<World>, max_regions: usize) -> ModelCache {
    let (device, watcher) = (Device(Arc::clone(world)), Watcher(Arc::clone(world)));
    let config = Config { max_regions, ..Config::default() };
    Cache::new(device, watcher, config).unwrap()
}

fn cache(world: &Arc<World>) -> Arc<ModelCache> {
    cache_of(world, Config::default().max_regions)
}

/// A cache of at most so many registrations.
fn cache_of(world: &Arc<World>, max_regions: usize) -> Arc<ModelCache> {
    Arc::new(new_cache(world, max_regions))
}

fn get(cache: &ModelCache) -> Result<Lease<'_, Device, Watcher>, GetError> {
    get_page(cache, 0)
}

/// As [`get`], of a page further on.
fn get_page(cache: &ModelCache, page: usize) -> Result<Lease<'_, Device, Watcher>, GetError> {
    // SAFETY: the model's device touches no memory.
    unsafe { cache.get((START + page * PAGE) as *const u8, PAGE, Access::READ) }
}

/// The loop of `Reclaimer::run`, ended by success instead of by closing. A lost wake-up leaves it
/// waiting, which loom reports as a deadlock.
fn reclaim_until_unpinned(cache: &ModelCache, world: &World, handle: usize) {
    loop {
        let seen = cache.monitor().notified();
        cache.reclaim();
        if !world.is_pinned(handle) {
            return;
        }
        cache.monitor().wait(seen);
    }
}

/// Another thread that takes a lease and ends it.
fn get_beside(cache: &Arc<ModelCache>) -> thread::JoinHandle<()> {
    let cache = Arc::clone(cache);
    thread::spawn(move || drop(get(&cache).unwrap()))
}

/// Promise 1, first ordering: a change that returned is known to every later `get`, whatever
/// another thread does with the cache meanwhile.
#[test]
fn loom_a_change_is_seen_by_the_next_get() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        drop(get(&cache).unwrap());
        let other = get_beside(&cache);
        world.change();
        let lease = get(&cache).unwrap();
        assert_eq!(lock(&world.pinned)[lease.handle()], Some(world.page()));
        drop(lease);
        other.join().unwrap();
    });
}

/// The same when it is another thread that applies the change, under a lock that this one never
/// takes.
#[test]
fn loom_a_change_applied_by_another_is_seen() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        drop(get(&cache).unwrap());
        let other = {
            let cache = Arc::clone(&cache);
            thread::spawn(move || cache.reclaim())
        };
        world.change();
        let lease = get(&cache).unwrap();
        assert_eq!(lock(&world.pinned)[lease.handle()], Some(world.page()));
        drop(lease);
        other.join().unwrap();
    });
}

/// Promise 1, second ordering: what is registered while a change is under way is never found
/// after it.
#[test]
fn loom_a_registration_during_a_change_is_not_published() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        let other = get_beside(&cache);
        world.change();
        cache.reclaim();
        other.join().unwrap();
        let lease = get(&cache).unwrap();
        assert_eq!(lock(&world.pinned)[lease.handle()], Some(world.page()));
    });
}

/// The same for a change that is logged before it takes effect.
#[test]
fn loom_a_registration_during_a_discard_is_not_published() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        let other = get_beside(&cache);
        world.discard();
        other.join().unwrap();
        let lease = get(&cache).unwrap();
        assert_eq!(lock(&world.pinned)[lease.handle()], Some(world.page()));
    });
}

/// A lease against invalidation and reclamation: what is leased stays pinned, what is not is
/// given back once.
#[test]
fn loom_a_lease_outlives_the_reclaimer() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        drop(get(&cache).unwrap());
        let other = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                let lease = get(&cache).unwrap();
                let handle = lease.handle();
                assert!(world.is_pinned(handle));
                assert_eq!(lease.handle(), handle);
                drop(lease);
            })
        };
        world.change();
        cache.reclaim();
        // Fills the place again if the reclaimer freed it.
        drop(get(&cache).unwrap());
        other.join().unwrap();
        cache.reclaim();
        assert!(!world.is_pinned(0));
    });
}

/// The same on three threads: one leases, one invalidates by the program's word, one reclaims and
/// fills the place again.
#[test]
fn loom_a_lease_holds_against_two() {
    explore(2, || {
        let world = World::new();
        let cache = cache(&world);
        drop(get(&cache).unwrap());
        let leasing = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                let lease = get(&cache).unwrap();
                assert!(world.is_pinned(lease.handle()));
            })
        };
        let invalidating = {
            let cache = Arc::clone(&cache);
            thread::spawn(move || cache.invalidate(range()))
        };
        cache.reclaim();
        drop(get(&cache).unwrap());
        leasing.join().unwrap();
        invalidating.join().unwrap();
        cache.invalidate(range());
        cache.reclaim();
        assert!(lock(&world.pinned).iter().all(Option::is_none));
    });
}

/// A lease that ends on another thread than it began on, while the first takes the next one from
/// the same record.
#[test]
fn loom_a_lease_ends_elsewhere() {
    explore(3, || {
        let world = World::new();
        let cache: &'static ModelCache =
            Box::leak(Box::new(new_cache(&world, Config::default().max_regions)));
        let lease = get(cache).unwrap();
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                assert!(world.is_pinned(lease.handle()));
                drop(lease);
            })
        };
        world.change();
        cache.reclaim();
        let next = get(cache).unwrap();
        assert!(world.is_pinned(next.handle()));
        drop(next);
        other.join().unwrap();
        cache.reclaim();
        assert!(!world.is_pinned(0));
        // SAFETY: made by `leak` above, and every lease of it has ended.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(cache).cast_mut()) });
    });
}

/// A lease that ends while its region is invalidated: the reclaimer hears of it, whatever the
/// order, and does not sleep on.
#[test]
fn loom_the_last_lease_wakes_the_reclaimer() {
    explore(2, || {
        let world = World::new();
        let cache = cache(&world);
        let lease = get(&cache).unwrap();
        let reclaimer = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || reclaim_until_unpinned(&cache, &world, 0))
        };
        world.change();
        drop(lease);
        reclaimer.join().unwrap();
    });
}

/// Two threads ask for one range: one registration serves both, and both hold it.
#[test]
fn loom_two_gets_register_once() {
    explore(2, || {
        let world = World::new();
        let cache = cache(&world);
        let other = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                let lease = get(&cache).unwrap();
                assert!(world.is_pinned(lease.handle()));
            })
        };
        let lease = get(&cache).unwrap();
        assert!(world.is_pinned(lease.handle()));
        drop(lease);
        other.join().unwrap();
        assert_eq!(lock(&world.pinned).len(), 1);
    });
}

/// The same when it is the program's word that ends the region: the waiters are notified of the first
/// that is handed over and, as long as that call stands, for no other.
#[test]
fn loom_one_call_serves_for_all_that_is_handed_over() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        let lease = get(&cache).unwrap();
        drop(get_page(&cache, 1).unwrap());
        let reclaimer = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                reclaim_until_unpinned(&cache, &world, 1);
                reclaim_until_unpinned(&cache, &world, 0);
            })
        };
        cache.invalidate(range());
        cache.invalidate(AddressRange::new(START + PAGE, PAGE).unwrap());
        drop(lease);
        reclaimer.join().unwrap();
    });
}

/// A lease that ends on a thread which did not see the region die: it was found leased and set
/// aside, so its end must be reported, by the thread that has it.
#[test]
fn loom_a_lease_that_ends_elsewhere_wakes_the_reclaimer() {
    explore(3, || {
        let world = World::new();
        let cache = cache(&world);
        drop(get(&cache).unwrap());
        let other = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                let lease = get(&cache).unwrap();
                assert!(world.is_pinned(lease.handle()));
            })
        };
        cache.invalidate(range());
        // A hazard that the other thread took back at once counts for a lease, too.
        reclaim_until_unpinned(&cache, &world, 0);
        other.join().unwrap();
    });
}

/// A lease against eviction: what is leased stays, whether it is the first to go...
#[test]
fn loom_a_lease_outlives_eviction() {
    explore(3, || lease_beside_eviction(0));
}

/// ...or one that is made evictable along with it, and is leased before, meanwhile or while it
/// is.
#[test]
fn loom_a_lease_of_an_evictable_region() {
    explore(3, || lease_beside_eviction(1));
}

/// Another thread leases `page` of two while this one needs room for a third.
fn lease_beside_eviction(page: usize) {
    let world = World::new();
    let cache = cache_of(&world, 2);
    drop(get_page(&cache, 0).unwrap());
    drop(get_page(&cache, 1).unwrap());
    let other = {
        let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
        thread::spawn(move || {
            let lease = get_page(&cache, page).unwrap();
            let handle = lease.handle();
            assert!(world.is_pinned(handle));
            assert_eq!(lease.handle(), handle);
            thread::yield_now();
            assert!(world.is_pinned(handle));
            drop(lease);
        })
    };
    let lease = get_page(&cache, 2).unwrap();
    assert!(world.is_pinned(lease.handle()));
    drop(lease);
    other.join().unwrap();
    let pinned = lock(&world.pinned).iter().flatten().count();
    assert!(pinned <= 2, "{pinned} pinned of 2");
}

/// An evictable region, looked up without a lock while what is idle in its range is
/// given up: a lookup that does not become a lease is none, and a lease keeps its registration.
#[test]
fn loom_a_transient_hazard_makes_nothing_leasable_that_is_evictable() {
    explore(2, || {
        let world = World::new();
        let cache = cache_of(&world, 2);
        // Both become evictable when room is needed for the third; the first goes.
        (0..3).for_each(|page| drop(get_page(&cache, page).unwrap()));
        let other = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || {
                // SAFETY: the model's device touches no memory.
                let lease = unsafe {
                    cache.request((START + PAGE) as *const u8, PAGE, Access::READ).get_if_cached()
                };
                if let Some(lease) = lease {
                    let handle = lease.handle();
                    assert!(world.is_pinned(handle));
                    thread::yield_now();
                    assert_eq!(lease.handle(), handle);
                    assert!(world.is_pinned(handle));
                }
            })
        };
        cache.evict_idle_in(AddressRange::new(START + PAGE, PAGE).unwrap());
        drop(get_page(&cache, 3).unwrap());
        other.join().unwrap();
    });
}
