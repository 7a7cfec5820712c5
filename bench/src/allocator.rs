//! An allocator that counts what is in use, while it is asked to.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to wrap the system's allocator: every call is handed on as it
//! came.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// The system's allocator, counted.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Whether to count. Off outside of the memory bench: counting would cost every miss.
static COUNTS: AtomicBool = AtomicBool::new(false);
/// Bytes allocated less bytes freed while counting.
static IN_USE: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator with the caller's own arguments; counting
// touches two atomics and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[inline]
fn count(more: usize, less: usize) {
    // Relaxed: switched on and off by the one thread that measures.
    if COUNTS.load(Ordering::Relaxed) {
        // An allocation has at most isize::MAX bytes.
        let change = more.cast_signed() as i64 - less.cast_signed() as i64;
        IN_USE.fetch_add(change, Ordering::Relaxed);
    }
}

/// The bytes that `make` allocated and that what it made still uses; and what it made.
///
/// Counts all threads. What the system's allocator adds to each allocation is not counted.
pub(crate) fn bytes_kept_by<T>(make: impl FnOnce() -> T) -> (i64, T) {
    // Relaxed: as in `count`.
    IN_USE.store(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let made = make();
    COUNTS.store(false, Ordering::Relaxed);
    (IN_USE.load(Ordering::Relaxed), made)
}
