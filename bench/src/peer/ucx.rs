//! UCX's registration cache, driven by loops in C so that no call pays for a border.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the C functions of `ucx.c`.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

mod c {
    use super::Device;
    use std::ffi::c_void;

    unsafe extern "C" {
        pub(super) fn peer_open(device: *const Device, regions: u64, bytes: u64) -> *mut c_void;
        pub(super) fn peer_close(rcache: *mut c_void);
        pub(super) fn peer_get_put(
            rcache: *mut c_void,
            addresses: *const u64,
            count: u64,
            length: u64,
        ) -> u64;
        pub(super) fn peer_miss_destroy(
            rcache: *mut c_void,
            addresses: *const u64,
            count: u64,
            length: u64,
        ) -> u64;
        pub(super) fn peer_heap_bytes() -> u64;
    }
}

/// What the peer's device does and has done; `struct device` of `ucx.c`.
#[repr(C)]
#[derive(Default)]
struct Device {
    pause: AtomicU64,
    registered: AtomicU64,
    deregistered: AtomicU64,
}

/// A cache of UCX over a registration that does nothing, or sleeps.
pub(crate) struct Ucx {
    cache: NonNull<c_void>,
    device: Box<Device>,
}

// SAFETY: UCX's cache locks itself; the pointer is never changed.
unsafe impl Sync for Ucx {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Ucx {}

impl Ucx {
    /// A cache that holds at most `regions` and `bytes`.
    pub(crate) fn open(regions: u64, bytes: u64) -> Result<Option<Self>, String> {
        let device = Box::<Device>::default();
        // SAFETY: the device's box outlives the cache, which is closed in `drop`.
        let cache = unsafe { c::peer_open(&raw const *device, regions, bytes) };
        let cache = NonNull::new(cache).ok_or("UCX made no cache (ucs_rcache_create failed)")?;
        Ok(Some(Self { cache, device }))
    }

    /// Has every registration sleep for so long.
    pub(crate) fn set_pause(&self, nanoseconds: u64) {
        // Relaxed: set before the threads of a measurement start.
        self.device.pause.store(nanoseconds, Ordering::Relaxed);
    }

    /// get + put at every address.
    pub(crate) fn get_put(&self, addresses: &[u64], length: usize) -> Result<(), String> {
        let (pointer, count) = (addresses.as_ptr(), addresses.len() as u64);
        // SAFETY: the addresses are only looked up, never dereferenced; the cache is open.
        let failed = unsafe { c::peer_get_put(self.cache.as_ptr(), pointer, count, length as u64) };
        none_failed(failed)
    }

    /// A miss and the destruction of its region at every address.
    pub(crate) fn miss_destroy(&self, addresses: &[u64], length: usize) -> Result<(), String> {
        let (pointer, count) = (addresses.as_ptr(), addresses.len() as u64);
        // SAFETY: as in `get_put`.
        let failed =
            unsafe { c::peer_miss_destroy(self.cache.as_ptr(), pointer, count, length as u64) };
        none_failed(failed)
    }

    /// How many registrations there are now. Read while no other thread uses the cache.
    pub(crate) fn registered(&self) -> u64 {
        // Relaxed: the C side counts on the thread that asks.
        let Device { registered, deregistered, .. } = &*self.device;
        registered.load(Ordering::Relaxed) - deregistered.load(Ordering::Relaxed)
    }

    /// The bytes in use on the heap that UCX allocates from.
    pub(crate) fn heap_bytes() -> u64 {
        // SAFETY: it asks the C library and touches nothing.
        unsafe { c::peer_heap_bytes() }
    }
}

fn none_failed(failed: u64) -> Result<(), String> {
    if failed == 0 { Ok(()) } else { Err(format!("{failed} gets of UCX failed")) }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        // SAFETY: open until now, and no other reference is left.
        unsafe { c::peer_close(self.cache.as_ptr()) };
    }
}
