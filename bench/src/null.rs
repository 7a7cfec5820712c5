//! A device that does nothing, a monitor whose check is one load and whose events are made explicitly, and caches over
//! both, so that what is measured is the cache.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the device, and a trait that promises to see every change of what it
//! covers, and to call the cache's method with addresses that nothing dereferences. Nothing real is covered: the
//! device touches no memory.

#![allow(unsafe_code)]

use pinfold::rearrange::{self, Trimmed};
use pinfold::suspend::{Renewed, Suspend, Suspended, Unsupported};
use pinfold::{
    Access, AddressRange, Cache, CacheError, Change, Config, Cover, DeregisterError, GetError,
    Lease, Lost, MappingKind, Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay,
    Sequence, Watch,
};
use pinfold_kernel::trial::TrialArea;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Registers nothing, or takes its time about it.
#[derive(Debug, Default)]
pub(crate) struct NullDevice {
    /// What a registration sleeps, in nanoseconds.
    pause: AtomicU64,
}

impl NullDevice {
    /// Has every registration sleep for so long.
    pub(crate) fn set_pause(&self, nanoseconds: u64) {
        // Relaxed: set before the threads of a measurement start.
        self.pause.store(nanoseconds, Ordering::Relaxed);
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for NullDevice {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 40, max_regions: 1 << 30 }
    }

    fn is_simulated(&self) -> bool {
        true
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
        // Relaxed: as in `set_pause`.
        let pause = self.pause.load(Ordering::Relaxed);
        if pause != 0 {
            std::thread::sleep(Duration::from_nanos(pause));
        }
        Ok(7)
    }

    unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// It uses no memory, so any of it may be moved.
// SAFETY: there is no connection, and no translation that could be used.
unsafe impl Suspend for NullDevice {
    pinfold::no_connections!();

    fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }

    unsafe fn renew(
        &self,
        _: u32,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<u32>, RegisterError> {
        Ok(Renewed::Same)
    }
}

/// Ours, over nothing.
pub(crate) type NullCache = Cache<NullDevice, LoadMonitor>;

/// A cache that keeps all it is given, its reclaimer running.
pub(crate) fn unlimited() -> Result<NullCache, String> {
    limited(1 << 30, usize::MAX >> 1)
}

/// A cache of at most `regions` and `bytes`, its reclaimer running.
pub(crate) fn limited(regions: usize, bytes: usize) -> Result<NullCache, String> {
    let config = Config { max_regions: regions, max_bytes: bytes, ..Config::keeping_all() };
    over(LoadMonitor::default(), config).map_err(|error| error.to_string())
}

/// A cache over `monitor`.
pub(crate) fn over<M: Monitor>(
    monitor: M,
    config: Config,
) -> Result<Cache<NullDevice, M>, CacheError> {
    pinfold::cache(NullDevice::default(), monitor, config)
}

/// A cache that keeps all it is given, without a reclaimer but with the barriers that one with a
/// reclaimer has.
pub(crate) fn by_hand() -> Result<NullCache, String> {
    let config = *unlimited()?.config();
    Cache::new(NullDevice::default(), LoadMonitor::default(), config)
        .map_err(|error| error.to_string())
}

/// A lease of `length` bytes at `address`.
#[inline]
pub(crate) fn get<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    address: u64,
    length: usize,
) -> Result<Lease<'_, NullDevice, M>, GetError> {
    // SAFETY: this device touches no memory.
    unsafe { cache.get(address as *const u8, length, Access::READ_WRITE) }
}

/// Gives up the first page of memory that is suspended.
pub(crate) fn trim<M: Monitor>(
    suspended: &Suspended<'_, NullDevice, M>,
    memory: &TrialArea,
) -> Result<Trimmed, String> {
    let page = memory.pages(0, 1).ok_or("no page")?;
    // SAFETY: no code has references into a trial area, or needs what it holds.
    unsafe { rearrange::trim(suspended, page) }.map_err(|error| error.to_string())
}

/// As [`get`], of a registration that is not kept.
pub(crate) fn get_once<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    address: u64,
    length: usize,
) -> Result<Lease<'_, NullDevice, M>, GetError> {
    // SAFETY: this device touches no memory.
    unsafe { cache.request(address as *const u8, length, Access::READ_WRITE).once().get() }
}

/// The same, of exactly these bytes for a peer.
#[cfg(feature = "holds")]
pub(crate) fn get_exact<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    address: u64,
    length: usize,
) -> Result<Lease<'_, NullDevice, M>, GetError> {
    // SAFETY: this device touches no memory.
    unsafe { cache.get(address as *const u8, length, Access::REMOTE_READ) }
}

/// get, a look at the handle, release, at every address.
pub(crate) fn get_put<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    addresses: &[u64],
    length: usize,
) -> Result<(), String> {
    let failed = addresses.iter().find_map(|&address| use_once(get(cache, address, length)).err());
    failed.map_or(Ok(()), |error| Err(error.to_string()))
}

/// The same, each released only when `held` more have been taken.
pub(crate) fn get_put_held<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    addresses: &[u64],
    length: usize,
    held: usize,
) -> Result<(), String> {
    let mut ring: Vec<Option<Lease<'_, NullDevice, M>>> = (0..held).map(|_| None).collect();
    for (place, &address) in (0..held).cycle().zip(addresses) {
        ring[place] = None;
        let lease = get(cache, address, length).map_err(|error| error.to_string())?;
        black_box(lease.handle());
        ring[place] = Some(lease);
    }
    Ok(())
}

/// The same loop around nothing.
// A Result because the loop around something has one.
#[allow(clippy::unnecessary_wraps)]
pub(crate) fn walk(addresses: &[u64]) -> Result<(), String> {
    for address in addresses {
        black_box(address);
    }
    Ok(())
}

/// get, a look at the handle, release, a monitor's check for every `several` gets.
pub(crate) fn get_put_checked<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    addresses: &[u64],
    length: usize,
    several: usize,
) -> Result<(), String> {
    for addresses in addresses.chunks(several) {
        let checked = cache.check().map_err(|error| error.to_string())?;
        for &address in addresses {
            // SAFETY: this device touches no memory.
            let lease = unsafe { checked.get(address as *const u8, length, Access::READ_WRITE) };
            use_once(lease).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// The same, of memory for which the caller vouches.
pub(crate) fn get_put_vouched<M: Monitor>(
    cache: &Cache<NullDevice, M>,
    addresses: &[u64],
    length: usize,
) -> Result<(), String> {
    let failed = addresses.iter().find_map(|&address| {
        // SAFETY: this device touches no memory, and nothing here changes.
        let lease = unsafe {
            cache.request(address as *const u8, length, Access::READ_WRITE).vouched().get()
        };
        use_once(lease).err()
    });
    failed.map_or(Ok(()), |error| Err(error.to_string()))
}

/// Does what a transfer does with a lease, and ends it.
#[inline]
fn use_once<M: Monitor>(lease: Result<Lease<'_, NullDevice, M>, GetError>) -> Result<(), GetError> {
    black_box(lease?.handle());
    Ok(())
}

/// How many entries the log keeps.
const CAPACITY: usize = 1 << 16;

/// One load a check; a log that [`log`](Self::log) writes. It does not say that it is simulated, so that landing looks at its
/// targets as it does with a monitor that is not.
#[derive(Debug, Default)]
pub(crate) struct LoadMonitor {
    /// How many entries were ever logged.
    sequence: AtomicU64,
    /// The last of them.
    log: Mutex<VecDeque<AddressRange>>,
    event_count: EventCount,
}

impl LoadMonitor {
    /// Logs changes of `ranges`. Notifies of none, so that the next hit pays for all of them.
    pub(crate) fn log(&self, ranges: impl Iterator<Item = AddressRange>) {
        let mut log = lock(&self.log);
        let mut sequence = self.sequence.load(Ordering::Relaxed);
        for range in ranges {
            if log.len() == CAPACITY {
                log.pop_front();
            }
            log.push_back(range);
            sequence += 1;
        }
        // Release: a thread that sees this sequence finds the entries, behind the lock.
        self.sequence.store(sequence, Ordering::Release);
    }
}

// SAFETY: `log` appends before it returns, `replay` says what it lost, and nothing real changes.
unsafe impl Monitor for LoadMonitor {
    fn name(&self) -> &'static str {
        "one load"
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        // Acquire: pairs with the store in `log`.
        Ok(Sequence(self.sequence.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.replay_some(from, usize::MAX, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        let log = lock(&self.log);
        // Relaxed: stored under the lock that is held here.
        let sequence = self.sequence.load(Ordering::Relaxed);
        let fresh = sequence.checked_sub(from.0).and_then(|fresh| usize::try_from(fresh).ok());
        let complete = fresh.is_some_and(|fresh| fresh <= log.len());
        let told = fresh.map_or(log.len(), |fresh| log.len().saturating_sub(fresh));
        log.iter().skip(told).take(most).for_each(|&range| visit(range));
        let left = (log.len() - told).saturating_sub(most) as u64;
        let told = if left > 0 { Sequence::CUT } else { Sequence(sequence) };
        Replay { up_to: Position(sequence - left, 0), sequence: told, complete, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        self.event_count.count.load(Ordering::Acquire)
    }

    fn notify(&self) {
        self.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.event_count.wait(seen);
    }
}

/// As cheap for the ringer as the real monitors' event_count: it costs something only if a thread waits.
#[derive(Debug, Default)]
struct EventCount {
    count: AtomicU32,
    waiters: AtomicU32,
    /// Guards nothing but the moment between a waiter's look and its sleep.
    changed: Mutex<()>,
    wake: Condvar,
}

impl EventCount {
    fn notify(&self) {
        // SeqCst here and in `wait`: each side writes its word, then reads the other's; the later
        // of the two writers sees the earlier.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) != 0 {
            drop(lock(&self.changed));
            self.wake.notify_all();
        }
    }

    fn wait(&self, seen: u32) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut changed = lock(&self.changed);
        while self.count.load(Ordering::SeqCst) == seen {
            changed = self.wake.wait(changed).unwrap_or_else(PoisonError::into_inner);
        }
        // Relaxed: a stale count costs a needless wake, nothing more.
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
