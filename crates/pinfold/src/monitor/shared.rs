//! One userfaultfd monitor for the whole process.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to keep an [`Arc`] in an atomic pointer. A lock around it would
//! be simpler, and would stay locked for ever in a child forked while another thread holds it.

#![allow(unsafe_code)]

use super::start::StartError;
use super::userfaultfd::Userfaultfd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Null, or from [`Arc::into_raw`] with a count that is never given back.
static SHARED: AtomicPtr<Userfaultfd> = AtomicPtr::new(ptr::null_mut());

impl Userfaultfd {
    /// The monitor that all caches of this process share, made by the first call and kept until
    /// the process ends.
    ///
    /// A forked child gets its own, and so does a process whose shared monitor has lost its
    /// descriptor.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new); the next call tries again.
    pub fn shared() -> Result<Arc<Self>, StartError> {
        let current = SHARED.load(Ordering::Acquire);
        if let Some(monitor) = usable(current) {
            return Ok(monitor);
        }
        let fresh = Arc::new(Self::new()?);
        Ok(publish(current, fresh))
    }
}

/// Another handle to what `kept` points to, if that is of any use in this process.
fn usable(kept: *mut Userfaultfd) -> Option<Arc<Userfaultfd>> {
    // SAFETY: null, or a live value: its count is never given back (see `SHARED`). Whoever stored
    // the pointer released the value, and it was acquired by the load.
    let monitor = unsafe { kept.as_ref() }?;
    monitor.usable().ok()?;
    // SAFETY: the pointer came from `Arc::into_raw`, and the count is raised for the new handle.
    Some(unsafe {
        Arc::increment_strong_count(kept);
        Arc::from_raw(kept)
    })
}

/// Puts `fresh` in the place of `old`, unless another thread was faster with one of its own.
fn publish(old: *mut Userfaultfd, fresh: Arc<Userfaultfd>) -> Arc<Userfaultfd> {
    let kept = Arc::into_raw(Arc::clone(&fresh)).cast_mut();
    // AcqRel: releases the value to whoever loads the pointer, acquires the winner's.
    match SHARED.compare_exchange(old, kept, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => fresh,
        Err(winner) => {
            // SAFETY: the pointer came from `into_raw` above and nobody else has seen it.
            drop(unsafe { Arc::from_raw(kept) });
            usable(winner).unwrap_or(fresh)
        }
    }
}
