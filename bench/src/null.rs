//! A device that does nothing, and caches over it, so that what is measured is the cache.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the device and to call the cache's method with
//! addresses that nothing dereferences.

#![allow(unsafe_code)]

use crate::load_monitor::LoadMonitor;
use pinfold::suspend::{ConnectionLost, Renewed, Suspend, Transfers, Unsupported};
use pinfold::{
    Access, AddressRange, Cache, CacheError, Config, DeregisterError, GetError, Lease, Monitor,
    RegisterError, Registrar, RegistrarLimits,
};
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
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
    type Connection = Infallible;

    fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }

    fn stop(&self, connection: &Infallible) -> Result<(), ConnectionLost> {
        match *connection {}
    }

    fn in_flight(
        &self,
        connection: &Infallible,
        _: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        match *connection {}
    }

    unsafe fn renew(
        &self,
        _: u32,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<u32>, RegisterError> {
        Ok(Renewed::Same)
    }

    unsafe fn restart(&self, connection: &Infallible) -> Result<(), ConnectionLost> {
        match *connection {}
    }

    fn fail(&self, connection: &Infallible) {
        match *connection {}
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

/// The same, of a registration that is not kept.
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
