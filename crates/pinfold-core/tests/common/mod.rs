//! What every test of the cache needs: a simulated program with its device, its monitor and a
//! cache, and the accounts that must balance whatever the test did.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to say of barriers, and of a buffer around a vector, what the cache cannot check, and to ask
//! the cache for addresses behind which no device stands.

#![allow(unsafe_code)]
#![allow(dead_code)] // every test binary uses its own part of this
#![allow(clippy::unwrap_used)] // only tests use it

use pinfold_core::{
    Access, AddressRange, Barriers, Cache, Checked, Config, DeregisterError, GetError, Lease, Lost,
    Monitor as _, Pieces, Reclaimer, RegisterError, RegistrarLimits, StableBuffer, Statistics,
    UseCosts,
};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Fake, FakeDevice, Fault, FaultGate, Handle, Moment, PAGE_BYTES,
    Protection, SimDevice, SimMonitor, SimRegistrar, SimulatedRequest, get_simulated,
};
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) type SimCache = Cache<SimRegistrar, SimMonitor>;
pub(crate) type SimLease<'c> = Lease<'c, SimRegistrar, SimMonitor>;

/// Where the simulated program's memory begins: a multiple of every piece size in the tests.
pub(crate) const BASE: usize = 0x7000_0000;

/// How many pages are mapped at first.
pub(crate) const MAPPED_PAGES: usize = 64;

/// An error that is about neither room nor memory.
pub(crate) const BROKEN: RegisterError = RegisterError::Os { operation: "register", errno: 5 };

/// `count` pages from the program's page `first` on.
pub(crate) fn pages(first: usize, count: usize) -> AddressRange {
    bytes(first * PAGE_BYTES, count * PAGE_BYTES)
}

/// `length` bytes from byte `offset` of the program's memory.
pub(crate) fn bytes(offset: usize, length: usize) -> AddressRange {
    AddressRange::new(BASE + offset, length).unwrap()
}

/// A `get` of a simulated range.
pub(crate) fn get(
    cache: &SimCache,
    range: AddressRange,
    access: Access,
) -> Result<SimLease<'_>, GetError> {
    get_simulated(cache, range, access)
}

type SimRequest<'c> = SimulatedRequest<'c, SimRegistrar, SimMonitor>;

/// A request of a simulated range for reading.
fn request(cache: &SimCache, range: AddressRange) -> SimRequest<'_> {
    SimulatedRequest::new(cache, range, Access::READ)
}

/// A lease for reading whose registration is not to be kept.
pub(crate) fn get_once(cache: &SimCache, range: AddressRange) -> Result<SimLease<'_>, GetError> {
    request(cache, range).once().get()
}

/// A lease for reading, if a registration that serves it is there.
pub(crate) fn get_if_cached(cache: &SimCache, range: AddressRange) -> Option<SimLease<'_>> {
    request(cache, range).get_if_cached()
}

/// A `get` of anything at all.
pub(crate) fn get_raw(
    cache: &SimCache,
    start: usize,
    length: usize,
    access: Access,
) -> Result<SimLease<'_>, GetError> {
    // SAFETY: no device stands behind the simulated one.
    unsafe { cache.get(std::ptr::without_provenance(start), length, access) }
}

/// A `get` for reading behind a check made earlier.
pub(crate) fn get_checked<'c>(
    checked: &Checked<'c, SimRegistrar, SimMonitor>,
    range: AddressRange,
) -> Result<SimLease<'c>, GetError> {
    pinfold_sim::get_checked(checked, range, Access::READ)
}

/// Barriers of a system that refuses them; `heavy` is called with the cache's lock held.
pub(crate) fn no_barrier(heavy: fn() -> bool) -> Barriers {
    // SAFETY: `heavy` never claims to have been a barrier.
    unsafe { Barriers::asymmetric(heavy) }
}

/// Barriers of a cache that one thread alone uses; `heavy` is called in place of each.
pub(crate) fn barriers_of_one_thread(heavy: fn() -> bool) -> Barriers {
    // SAFETY: a thread is in order with itself.
    unsafe { Barriers::asymmetric(heavy) }
}

/// A buffer with something whose destructor runs as the buffer ends.
pub(crate) struct BufferWith<T> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) _companion: T,
}

// SAFETY: as for the vector.
unsafe impl<T: Send + Sync + 'static> StableBuffer for BufferWith<T> {
    const ACCESS: Access = Access::READ;

    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Waits, without a clock, until `condition` holds.
pub(crate) fn until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::yield_now();
    }
}

/// A second cache on the rig's device and memory, with a reclaimer; the receiver hears of the
/// reclaimer's end.
pub(crate) fn reclaimed_cache(rig: &Rig) -> (Arc<SimCache>, mpsc::Receiver<()>) {
    let registrar = SimRegistrar::new(&rig.device);
    let mut cache = Cache::new(registrar, rig.monitor.clone(), Config::default()).unwrap();
    let (ended, end) = mpsc::channel();
    cache.start_reclaimer(|reclaimer| spawn_reclaimer(reclaimer, Some(ended))).unwrap();
    (Arc::new(cache), end)
}

fn spawn_reclaimer(
    reclaimer: Reclaimer<SimRegistrar, SimMonitor>,
    ended: Option<mpsc::Sender<()>>,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().spawn(move || {
        reclaimer.run();
        // The receiver may have lost interest.
        let _sent = ended.map(|ended| ended.send(()));
    })
}

/// A registrar that panics when it is asked what rights it would give while it is told to.
pub(crate) struct Undecided {
    inner: SimRegistrar,
    panics: Arc<AtomicBool>,
}

impl Undecided {
    pub(crate) fn new(device: &Arc<SimDevice>, panics: &Arc<AtomicBool>) -> Fake<Self> {
        Fake(Self { inner: SimRegistrar::new(device), panics: Arc::clone(panics) })
    }
}

impl FakeDevice for Undecided {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.inner.limits()
    }

    fn granted(&self, wanted: Access) -> Access {
        // SeqCst: tests do not tune.
        assert!(!self.panics.load(Ordering::SeqCst), "ordered");
        self.inner.granted(wanted)
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
        self.inner.register(range, access)
    }

    fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        self.inner.deregister(handle, range)
    }
}

/// Its process forks inside of it, and the child comes back from it.
pub(crate) struct Forks {
    inner: SimRegistrar,
    monitor: SimMonitor,
}

impl Forks {
    pub(crate) fn new(device: &Arc<SimDevice>, monitor: &SimMonitor) -> Fake<Self> {
        Fake(Self { inner: SimRegistrar::new(device), monitor: monitor.clone() })
    }
}

impl FakeDevice for Forks {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.inner.limits()
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<Handle, RegisterError> {
        if range.len() == PAGE_BYTES {
            return self.inner.register(range, access);
        }
        self.monitor.lose(Lost::Forked);
        Err(RegisterError::PinnedMemoryLimit { limit_bytes: None, errno: 12 })
    }

    fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), DeregisterError> {
        self.monitor.lose(Lost::Forked);
        self.inner.deregister(handle, range)
    }
}

/// Whether a get of `range` for reading panics.
pub(crate) fn get_panics(cache: &Cache<Fake<Undecided>, SimMonitor>, range: AddressRange) -> bool {
    let get = || get_simulated(cache, range, Access::READ).map(drop);
    panic::catch_unwind(AssertUnwindSafe(get)).is_err()
}

pub(crate) fn address(range: AddressRange) -> *const u8 {
    std::ptr::without_provenance(range.start())
}

/// What a test may choose.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) config: Config,
    pub(crate) device: DeviceConfig,
    pub(crate) log_capacity: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self { config: Config::default(), device: DeviceConfig::default(), log_capacity: 1024 }
    }
}

impl Setup {
    pub(crate) fn with(config: Config) -> Self {
        Self { config, ..Self::default() }
    }

    /// A budget of `count` registrations.
    pub(crate) fn regions(count: usize) -> Self {
        Self::with(Config { max_regions: count, ..Config::default() })
    }

    pub(crate) fn rig(self) -> Rig {
        let space = Arc::new(AddressSpace::with_log_capacity(self.log_capacity));
        space.map(pages(0, MAPPED_PAGES), Protection::ReadWrite);
        let device = Arc::new(SimDevice::new(Arc::clone(&space), self.device));
        let monitor = SimMonitor::new(&space);
        let cache = Cache::new(SimRegistrar::new(&device), monitor.clone(), self.config).unwrap();
        Rig { space, device, monitor, cache: Some(cache), device_forgets: AtomicBool::new(false) }
    }
}

/// A simulated program. When it is dropped, the cache goes first and the accounts are checked.
pub(crate) struct Rig {
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) device: Arc<SimDevice>,
    pub(crate) monitor: SimMonitor,
    cache: Option<SimCache>,
    device_forgets: AtomicBool,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Setup::default().rig()
    }

    pub(crate) fn cache(&self) -> &SimCache {
        self.cache.as_ref().unwrap()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        self.cache().statistics()
    }

    pub(crate) fn get(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<SimLease<'_>, GetError> {
        get(self.cache(), range, access)
    }

    /// The error of a `get` that must fail.
    pub(crate) fn refused(&self, range: AddressRange, access: Access) -> GetError {
        self.get(range, access).map(|lease| lease.range()).unwrap_err()
    }

    pub(crate) fn get_vouched(&self, range: AddressRange) -> Result<SimLease<'_>, GetError> {
        request(self.cache(), range).vouched().get()
    }

    pub(crate) fn get_to_keep(&self, range: AddressRange) -> Result<SimLease<'_>, GetError> {
        request(self.cache(), range).to_keep().get()
    }

    pub(crate) fn get_if_worth(
        &self,
        range: AddressRange,
        costs: UseCosts,
    ) -> Result<Option<SimLease<'_>>, GetError> {
        request(self.cache(), range).get_if_worth(costs)
    }

    pub(crate) fn get_pieces(
        &self,
        range: AddressRange,
    ) -> Result<Pieces<'_, SimRegistrar, SimMonitor>, GetError> {
        request(self.cache(), range).pieces()
    }

    /// A lease for reading that moves the program's own pages.
    pub(crate) fn lease(&self, range: AddressRange) -> SimLease<'_> {
        let lease = self.get(range, Access::READ).unwrap();
        self.assert_fresh(&lease);
        lease
    }

    /// One use: which registration served it.
    pub(crate) fn touch(&self, range: AddressRange) -> Handle {
        self.lease(range).handle()
    }

    pub(crate) fn assert_fresh(&self, lease: &SimLease<'_>) {
        assert!(self.device.is_fresh(lease.handle(), lease.range()), "stale: {lease:?}");
    }

    /// New pages at the same addresses, as `munmap` and `mmap` leave them.
    pub(crate) fn reallocate(&self, range: AddressRange) {
        self.space.unmap(range);
        self.space.map(range, Protection::ReadWrite);
    }

    /// Whether the device still holds the registration.
    pub(crate) fn is_registered(&self, handle: Handle) -> bool {
        self.device.registration(handle).is_some()
    }

    /// Stops the next registration at a gate.
    pub(crate) fn hold_next_registration(&self, moment: Moment) -> FaultGate {
        let gate = FaultGate::new();
        self.device.next_registrations(1, &Fault::Hold(gate.clone(), moment));
        gate
    }

    /// Stops the next deregistration at a gate.
    pub(crate) fn hold_next_deregistration(&self, moment: Moment) -> FaultGate {
        let gate = FaultGate::new();
        self.device.next_deregistrations(1, &Fault::Hold(gate.clone(), moment));
        gate
    }

    /// Has a thread of its own give registrations back.
    pub(crate) fn start_reclaimer(&mut self) {
        let cache = self.cache.as_mut().unwrap();
        cache.start_reclaimer(|reclaimer| spawn_reclaimer(reclaimer, None)).unwrap();
    }

    /// Drops the cache now.
    pub(crate) fn drop_cache(&mut self) {
        self.cache = None;
    }

    /// The test made deregistrations fail: what the device still holds is no fault of the cache.
    pub(crate) fn device_forgets(&self) {
        self.device_forgets.store(true, Ordering::SeqCst);
    }

    fn assert_books_agree(&self) {
        let Some(cache) = &self.cache else { return };
        // A forked child is told nothing, and has nothing.
        if cache.monitor().forked() {
            assert_eq!(cache.statistics(), Statistics::default());
            return;
        }
        // A reclaimer's thread may have deregistered something that it is about to book.
        let deadline = Instant::now() + Duration::from_secs(20);
        let look = || (cache.statistics(), self.device.counts());
        let (mut books, mut truth) = look();
        while books.deregistrations != truth.deregistrations && Instant::now() < deadline {
            thread::yield_now();
            (books, truth) = look();
        }
        assert_eq!(books.gets, books.hits + books.misses);
        assert_eq!(books.registrations, truth.registrations);
        assert_eq!(books.registration_failures, truth.failures);
        assert_eq!(books.deregistrations, truth.deregistrations);
        if !self.device_forgets.load(Ordering::SeqCst) {
            assert_eq!(books.regions, truth.live as u64);
            assert_eq!(books.pinned_bytes, truth.pinned_bytes);
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.assert_books_agree();
        self.cache = None;
        if self.device_forgets.load(Ordering::SeqCst) {
            assert_eq!(self.device.violations(), []);
        } else {
            assert_eq!(self.device.shut_down(), []);
        }
    }
}
