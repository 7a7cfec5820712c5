//! UCX's registration cache, driven by loops in C so that no call pays for a border.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the C functions of `ucx.c`.

#![allow(unsafe_code)]

use super::HOOKS;
use pinfold::registrar::{BufferIndex, IoUring};
use pinfold::{Access, AddressRange, Registrar};
use std::ffi::{c_int, c_void};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::OnceLock;
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
        pub(super) fn peer_get_put_held(
            rcache: *mut c_void,
            addresses: *const u64,
            count: u64,
            length: u64,
            held: u64,
        ) -> u64;
        pub(super) fn peer_miss_destroy(
            rcache: *mut c_void,
            addresses: *const u64,
            count: u64,
            length: u64,
        ) -> u64;
        pub(super) fn peer_walk(addresses: *const u64, count: u64);
    }
}

/// Starts this program anew if UCX, when it was loaded, patched the C library's memory calls.
///
/// The caches compared here hear of no events through those hooks, but the hooks act on every
/// call: UCX 1.13's `mremap` drops an argument. Nothing but the environment of a new
/// program keeps them out, and what UCX has to say off standard output.
pub(crate) fn keep_hooks_out() -> Result<(), String> {
    if std::env::var_os(HOOKS).is_some_and(|value| value == "no") {
        return Ok(());
    }
    let mut again = Command::new("/proc/self/exe");
    again.args(std::env::args_os().skip(1)).env(HOOKS, "no").env("UCX_LOG_FILE", "stderr");
    // Comes back only if it fails.
    let error = again.exec();
    Err(format!("could not start again without UCX's hooks: {error}"))
}

/// What the peer's device does and has done; `struct device` of `ucx.c`.
#[repr(C)]
#[derive(Default)]
struct Device {
    pause: AtomicU64,
    registered: AtomicU64,
    deregistered: AtomicU64,
    add: Option<unsafe extern "C" fn(*const c_void, u64, u64, *mut u32) -> c_int>,
    end: Option<unsafe extern "C" fn(*const c_void, u64, u64, u32)>,
    owner: Option<NonNull<c_void>>,
}

/// A ring's table of buffers, which UCX names by numbers.
struct Slots {
    registrar: IoUring,
    /// The slot of each number that was ever given.
    slots: Box<[OnceLock<BufferIndex>]>,
}

impl Slots {
    fn add(&self, start: u64, bytes: u64) -> Option<u32> {
        let range = range(start, bytes)?;
        // SAFETY: the memory is mapped while UCX registers it, and no request is ever made.
        let slot = unsafe { self.registrar.register(range, Access::READ) }.ok()?;
        self.slots.get(usize::from(slot.get()))?.get_or_init(|| slot);
        Some(slot.get().into())
    }

    fn end(&self, start: u64, bytes: u64, handle: u32) {
        let slot = usize::try_from(handle).ok().and_then(|handle| self.slots.get(handle)?.get());
        let (Some(&slot), Some(range)) = (slot, range(start, bytes)) else { return };
        // SAFETY: UCX gives back what `add` gave it, once. What the ring refuses is seen by the next `add`.
        let _ = unsafe { self.registrar.deregister(slot, range) };
    }
}

fn range(start: u64, bytes: u64) -> Option<AddressRange> {
    AddressRange::new(usize::try_from(start).ok()?, usize::try_from(bytes).ok()?).ok()
}

/// # Safety
///
/// `owner` is a device's, and `handle` may be written.
unsafe extern "C" fn add(owner: *const c_void, start: u64, bytes: u64, handle: *mut u32) -> c_int {
    // SAFETY: the caller's promise.
    let Some(given) = (unsafe { &*owner.cast::<Slots>() }).add(start, bytes) else { return -1 };
    // SAFETY: the caller's promise.
    unsafe { *handle = given };
    0
}

/// # Safety
///
/// `owner` is a device's.
unsafe extern "C" fn end(owner: *const c_void, start: u64, bytes: u64, handle: u32) {
    // SAFETY: the caller's promise.
    unsafe { &*owner.cast::<Slots>() }.end(start, bytes, handle);
}

/// A cache of UCX over a registration that does nothing, or sleeps, or over a ring.
pub(crate) struct Ucx {
    cache: NonNull<c_void>,
    device: Box<Device>,
    /// The device's owner, for as long as the cache registers with it.
    slots: Option<Box<Slots>>,
}

// SAFETY: UCX's cache locks itself; the pointer is never changed.
unsafe impl Sync for Ucx {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Ucx {}

impl Ucx {
    /// A cache that holds at most `regions` and `bytes`.
    pub(crate) fn open(regions: u64, bytes: u64) -> Result<Option<Self>, String> {
        Self::over(Box::default(), regions, bytes).map(Some)
    }

    /// A cache without limits that registers with a ring of `slots` buffers, and follows the memory by UCX's
    /// hooks, which this process must have let in.
    pub(crate) fn hooked(registrar: IoUring, slots: u32) -> Result<Self, String> {
        let slots = (0..slots).map(|_| OnceLock::new()).collect();
        let slots = Box::new(Slots { registrar, slots });
        let owner = Some(NonNull::from(&*slots).cast());
        let device = Device { add: Some(add), end: Some(end), owner, ..Device::default() };
        let mut cache = Self::over(Box::new(device), u64::MAX, u64::MAX)?;
        cache.slots = Some(slots);
        Ok(cache)
    }

    fn over(device: Box<Device>, regions: u64, bytes: u64) -> Result<Self, String> {
        // SAFETY: the device's box outlives the cache, which is closed in `drop`.
        let cache = unsafe { c::peer_open(&raw const *device, regions, bytes) };
        let cache = NonNull::new(cache).ok_or("UCX made no cache (ucs_rcache_create failed)")?;
        Ok(Self { cache, device, slots: None })
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

    /// The same, each put back only when `held` more have been taken.
    pub(crate) fn get_put_held(
        &self,
        addresses: &[u64],
        length: usize,
        held: usize,
    ) -> Result<(), String> {
        let (pointer, count) = (addresses.as_ptr(), addresses.len() as u64);
        let (length, held) = (length as u64, held.max(1) as u64);
        // SAFETY: as in `get_put`.
        none_failed(unsafe {
            c::peer_get_put_held(self.cache.as_ptr(), pointer, count, length, held)
        })
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

    /// The loop around all this, with no cache in it.
    // A Result because the other loops can fail.
    #[allow(clippy::unnecessary_wraps)]
    pub(crate) fn walk(addresses: &[u64]) -> Result<(), String> {
        // SAFETY: the loop reads the slice.
        unsafe { c::peer_walk(addresses.as_ptr(), addresses.len() as u64) };
        Ok(())
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
