//! How long the cache's lock is held, and what is asked of the allocator meanwhile: measured by the bench, in a build with
//! the feature `holds`, and by this crate's own tests.
//!
//! Counted for all caches of the process together. Without a clock, and in any other build, no time is measured.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for an allocator that is the system's, and notes what it is asked for.

#![cfg_attr(any(test, feature = "holds"), allow(unsafe_code))]

#[cfg(any(test, feature = "holds"))]
pub use measured::{Requests, measure_by, take};

/// One hold of the lock, from its beginning on.
pub(crate) struct Hold(#[cfg(any(test, feature = "holds"))] Option<u64>);

#[cfg(not(any(test, feature = "holds")))]
impl Hold {
    #[inline(always)]
    pub(crate) const fn begin() -> Self {
        Self()
    }

    #[inline(always)]
    #[allow(clippy::unused_self)] // as in the build that measures
    pub(crate) const fn end(self) {}
}

#[cfg(any(test, feature = "holds"))]
impl Hold {
    pub(crate) fn begin() -> Self {
        measured::IS_HELD.set(true);
        Self(measured::now())
    }

    pub(crate) fn end(self) {
        measured::IS_HELD.set(false);
        self.0.into_iter().for_each(measured::note);
    }
}

#[cfg(any(test, feature = "holds"))]
mod measured {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;
    use std::sync::{Mutex, OnceLock, PoisonError};

    thread_local! {
        /// Whether this thread holds the lock of a cache.
        pub(super) static IS_HELD: Cell<bool> = const { Cell::new(false) };
        static LARGEST: Cell<usize> = const { Cell::new(0) };
    }

    /// The system's allocator. It notes the most that a thread asks for, or gives back, at once while it holds the lock.
    #[derive(Debug)]
    pub struct Requests;

    impl Requests {
        /// The most bytes of the calling thread since this was last called. What is given back counts a 64th: from 64 KiB
        /// on, glibc's allocator goes through what was freed.
        pub fn take_largest() -> usize {
            LARGEST.replace(0)
        }
    }

    fn note_request(bytes: usize) {
        if IS_HELD.get() && LARGEST.get() < bytes {
            LARGEST.set(bytes);
        }
    }

    // SAFETY: the system's, unchanged.
    unsafe impl GlobalAlloc for Requests {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            note_request(layout.size());
            // SAFETY: the caller's promise.
            unsafe { System.alloc(layout) }
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            note_request(layout.size());
            // SAFETY: the caller's promise.
            unsafe { System.alloc_zeroed(layout) }
        }

        unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
            note_request(layout.size() / 64);
            // SAFETY: the caller's promise.
            unsafe { System.dealloc(place, layout) }
        }

        unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
            note_request(bytes);
            // SAFETY: the caller's promise.
            unsafe { System.realloc(place, layout, bytes) }
        }
    }

    // Filled once, by a bench that forks no child.
    static CLOCK: OnceLock<fn() -> u64> = OnceLock::new();
    static HELD: Mutex<Vec<u32>> = Mutex::new(Vec::new());

    /// Measures all holds by `clock` from now on: one that counts what the calling thread does, because
    /// a thread that loses its processor holds the lock on. The first clock stays.
    pub fn measure_by(clock: fn() -> u64) {
        CLOCK.get_or_init(|| clock);
    }

    /// How long the holds took that ended since this was last called, in their order and in the clock's
    /// unit.
    pub fn take() -> Vec<u32> {
        std::mem::take(&mut HELD.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn now() -> Option<u64> {
        CLOCK.get().map(|clock| clock())
    }

    pub(super) fn note(began: u64) {
        let took = now().map_or(0, |now| now.saturating_sub(began));
        let took = u32::try_from(took).unwrap_or(u32::MAX);
        HELD.lock().unwrap_or_else(PoisonError::into_inner).push(took);
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle, miri)))]
mod tests {
    use super::Requests;
    use crate::chunked::BLOCK_BYTES;
    use crate::fake::{Calm, Fake, FakeDevice, FakeSuspend, SimulatedRequest, get_simulated};
    use crate::followed::Followed;
    use crate::registrar::{DeregisterError, RegisterError, RegistrarLimits};
    use crate::suspend::{Renewed, Unsupported};
    use crate::{Access, AddressRange, Cache, Config, GetError, Lease, SuspensionTerms};
    use std::time::Duration;

    #[global_allocator]
    static REQUESTS: Requests = Requests;

    struct Device;

    impl FakeDevice for Device {
        type Handle = u32;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 40, max_regions: 1 << 20 }
        }

        fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
            Ok(0)
        }

        fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
            Ok(())
        }
    }

    impl FakeSuspend for Device {
        type Connection = usize;

        fn can_suspend(&self, _: AddressRange, _: &[usize]) -> Result<(), Unsupported> {
            Ok(())
        }

        fn renew(
            &self,
            handle: u32,
            _: AddressRange,
            _: Access,
        ) -> Result<Renewed<u32>, RegisterError> {
            Ok(Renewed::Changed(handle + 1))
        }
    }

    type Tested = Cache<Fake<Device>, Fake<Calm>>;
    type TestedLease<'c> = Lease<'c, Fake<Device>, Fake<Calm>>;

    /// More than the tables of a cache begin with.
    const MANY: usize = 6_000;
    const BASE: usize = 0x7000_0000_0000;

    fn cache(max_regions: usize) -> Tested {
        let config =
            Config { max_regions, max_bytes: 1 << 50, cache_remote: true, ..Config::default() };
        Cache::new(Fake(Device), Fake(Calm), config).unwrap()
    }

    /// Every page of theirs, so that a block has many of them; and every so many a block of its own.
    fn page(number: usize) -> AddressRange {
        AddressRange::new(BASE + number * 4096, 4096).unwrap()
    }

    fn all() -> AddressRange {
        AddressRange::new(BASE, 1 << 40).unwrap()
    }

    fn get(cache: &Tested, range: AddressRange) -> Result<TestedLease<'_>, GetError> {
        get_simulated(cache, range, Access::READ_WRITE)
    }

    fn fill(cache: &Tested) -> Vec<TestedLease<'_>> {
        (0..MANY).map(|number| get(cache, page(number)).unwrap()).collect()
    }

    fn terms() -> SuspensionTerms {
        SuspensionTerms { deadline: Duration::from_secs(600), ..Default::default() }
    }

    /// What may have tables grow, and what gives back most of what stands in them.
    const OPERATIONS: [(&str, fn()); 10] = [
        ("misses, and invalidation", || {
            let cache = cache(2 * MANY);
            drop(fill(&cache));
            cache.invalidate(all());
            cache.reclaim();
        }),
        ("misses of memory far apart", || {
            let cache = cache(2 * MANY);
            let apart = |number: usize| AddressRange::new(BASE + (number << 30), 4096).unwrap();
            (0..2_000).for_each(|number| drop(get(&cache, apart(number)).unwrap()));
            drop(get(&cache, AddressRange::new(BASE - (1 << 36), 1 << 36).unwrap()).unwrap());
            cache.evict_idle();
        }),
        ("regions that begin in one page", || {
            let cache = cache(2 * MANY);
            for at in 0..3_000 {
                let bytes = AddressRange::new(BASE + at, 4096).unwrap();
                drop(get_simulated(&cache, bytes, Access::REMOTE_READ).unwrap());
            }
            cache.evict_idle_in(all());
        }),
        ("eviction", || {
            let cache = cache(MANY / 2);
            (0..MANY).for_each(|number| drop(get(&cache, page(number)).unwrap()));
            cache.evict_idle();
        }),
        ("callbacks of many regions", || {
            let cache = cache(2 * MANY);
            let mut leases = fill(&cache);
            leases.iter_mut().for_each(|lease| lease.on_invalidate(|| ()));
            leases.truncate(MANY / 2);
            cache.invalidate(all());
        }),
        ("callbacks of one region", || {
            let cache = cache(2 * MANY);
            let mut leases: Vec<_> = (0..MANY).map(|_| get(&cache, page(1)).unwrap()).collect();
            leases.iter_mut().for_each(|lease| lease.on_invalidate(|| ()));
            leases.truncate(MANY / 2);
            cache.invalidate(all());
        }),
        ("completions", || {
            let cache = cache(2 * MANY);
            let leases = fill(&cache);
            (0..MANY).for_each(|_| cache.invalidate_then(page(1), || ()));
            cache.invalidate_then(all(), || ());
            drop(leases);
            cache.reclaim();
        }),
        ("registrations for one use", || {
            let cache = cache(2 * MANY);
            let once = |number| {
                let request = SimulatedRequest::new(&cache, page(number), Access::READ_WRITE);
                request.once().get().unwrap()
            };
            let leases: Vec<_> = (0..MANY).map(once).collect();
            cache.invalidate_then(all(), || ());
            drop(leases);
        }),
        ("suspensions", || {
            let cache = cache(2 * MANY);
            let mut many = Vec::new();
            for number in 0..1_000 {
                let range = page(2 * number);
                let lease = get(&cache, range).unwrap();
                let connections = vec![number, number + 1, MANY];
                let one = cache.suspend(range, connections, vec![lease], terms());
                many.push(one.ok().unwrap());
            }
            many.into_iter().for_each(|one| _ = one.resume().unwrap());
            let (leases, connections) = (fill(&cache), (0..300).collect());
            let one = cache.suspend(all(), connections, leases, terms()).ok().unwrap();
            assert_eq!(one.resume().unwrap().leases.len(), MANY);
        }),
        ("ranges that are followed", || {
            let cache = cache(2 * MANY);
            let followed: Vec<_> =
                (0..MANY).map(|number| Followed::begin(&cache, page(number)).unwrap()).collect();
            assert!(followed.iter().all(|it| it.has_changed() == Some(false)));
        }),
    ];

    /// Behind many small blocks that were freed, glibc's allocator takes a millisecond for one that is larger.
    #[test]
    fn nothing_large_is_asked_of_the_allocator_while_the_lock_is_held() {
        let mut too_large = Vec::new();
        for (name, run) in OPERATIONS {
            Requests::take_largest();
            run();
            let largest = Requests::take_largest();
            assert!(largest > 0, "{name}: nothing was measured");
            if largest > BLOCK_BYTES {
                too_large.push((name, largest));
            }
        }
        assert!(too_large.is_empty(), "{too_large:?}");
    }
}
