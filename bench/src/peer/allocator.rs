//! Allocators of unregistered memory, with which a pool is compared.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the C functions that allocate and free.

#![allow(unsafe_code)]

use std::ptr;

/// Gives memory by its size, and takes it back by its address.
pub(crate) trait Allocator: Sync {
    /// The name in reports.
    const NAME: &'static str;

    /// So many bytes; null if there are none.
    fn allocate(bytes: usize) -> *mut u8;

    /// Takes back what `allocate` gave, once.
    ///
    /// # Safety
    ///
    /// The address came from `allocate` and has not been given back.
    unsafe fn free(address: *mut u8);
}

/// The C library's own.
pub(crate) struct LibC;

impl Allocator for LibC {
    const NAME: &'static str = "libc malloc";

    #[inline(always)]
    fn allocate(bytes: usize) -> *mut u8 {
        // SAFETY: any size will do.
        unsafe { libc::malloc(bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(address: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { libc::free(address.cast()) };
    }
}

/// mimalloc, if the feature `peers` asks for it; else nothing is measured.
pub(crate) struct MiMalloc;

#[cfg(feature = "peers")]
impl Allocator for MiMalloc {
    const NAME: &'static str = "mimalloc";

    #[inline(always)]
    fn allocate(bytes: usize) -> *mut u8 {
        // SAFETY: any size will do.
        unsafe { libmimalloc_sys::mi_malloc(bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(address: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { libmimalloc_sys::mi_free(address.cast()) };
    }
}

#[cfg(not(feature = "peers"))]
impl Allocator for MiMalloc {
    const NAME: &'static str = "mimalloc";

    fn allocate(_: usize) -> *mut u8 {
        ptr::null_mut()
    }

    unsafe fn free(_: *mut u8) {}
}

/// Allocates and frees, `held` at a time being out; the loop is the one that a pool is measured in.
pub(crate) fn turn_over<A: Allocator>(
    count: usize,
    bytes: usize,
    held: usize,
) -> Result<(), String> {
    let mut ring: Vec<*mut u8> = vec![ptr::null_mut(); held];
    let places = (0..held).cycle();
    for place in places.take(count) {
        let old = std::mem::replace(&mut ring[place], ptr::null_mut());
        if !old.is_null() {
            // SAFETY: taken out of the ring, where `allocate` had put it.
            unsafe { A::free(old) };
        }
        ring[place] = std::hint::black_box(taken::<A>(bytes)?);
    }
    for address in ring.into_iter().filter(|address| !address.is_null()) {
        // SAFETY: as above.
        unsafe { A::free(address) };
    }
    Ok(())
}

/// Allocates and frees at once.
pub(crate) fn one_by_one<A: Allocator>(count: usize, bytes: usize) -> Result<(), String> {
    for _ in 0..count {
        let address = std::hint::black_box(taken::<A>(bytes)?);
        // SAFETY: just allocated.
        unsafe { A::free(address) };
    }
    Ok(())
}

#[inline(always)]
fn taken<A: Allocator>(bytes: usize) -> Result<*mut u8, String> {
    let address = A::allocate(bytes);
    if address.is_null() { Err(format!("{} has no {bytes} bytes", A::NAME)) } else { Ok(address) }
}
