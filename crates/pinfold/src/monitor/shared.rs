//! One value of a kind for the whole process: the monitor that its caches share, for instance.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to keep an [`Arc`] in an atomic pointer. A lock around it would
//! be simpler, and would stay locked for ever in a child forked while another thread holds it.

#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that is made once and never given back.
#[derive(Debug)]
pub(super) struct Kept<M> {
    /// Null, or from [`Arc::into_raw`] with a count that is never given back.
    pointer: AtomicPtr<M>,
}

impl<M> Kept<M> {
    pub(super) const fn new() -> Self {
        Self { pointer: AtomicPtr::new(ptr::null_mut()) }
    }

    /// What is kept.
    pub(super) fn current(&self) -> Option<&'static M>
    where
        M: 'static,
    {
        // Acquire: the value that the pointer's writer released.
        let current = self.pointer.load(Ordering::Acquire);
        // SAFETY: null, or a live value: its count is never given back.
        unsafe { current.as_ref() }
    }

    /// Another handle to what is kept, if it is `usable` in this process, else to what `make` makes.
    pub(super) fn get<E>(
        &self,
        usable: impl Fn(&M) -> bool,
        make: impl FnOnce() -> Result<M, E>,
    ) -> Result<Arc<M>, E> {
        // Acquire: the value that the pointer's writer released.
        let current = self.pointer.load(Ordering::Acquire);
        if let Some(monitor) = handle(current, &usable) {
            return Ok(monitor);
        }
        let fresh = Arc::new(make()?);
        Ok(self.publish(current, fresh, usable))
    }

    /// Puts `fresh` in the place of `old`, unless another thread was faster with one of its own.
    fn publish(&self, old: *mut M, fresh: Arc<M>, usable: impl Fn(&M) -> bool) -> Arc<M> {
        let kept = Arc::into_raw(Arc::clone(&fresh)).cast_mut();
        // AcqRel: releases the value to a thread that loads the pointer, acquires the winner's.
        match self.pointer.compare_exchange(old, kept, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(winner) => {
                // SAFETY: the pointer came from `into_raw` above and no other thread has seen it.
                drop(unsafe { Arc::from_raw(kept) });
                handle(winner, usable).unwrap_or(fresh)
            }
        }
    }
}

fn handle<M>(kept: *mut M, usable: impl Fn(&M) -> bool) -> Option<Arc<M>> {
    // SAFETY: null, or a live value: its count is never given back (see `Kept`). The thread that stored
    // the pointer released the value, and it was acquired by the load.
    let monitor = unsafe { kept.as_ref() }?;
    if !usable(monitor) {
        return None;
    }
    // SAFETY: the pointer came from `Arc::into_raw`, and the count is raised for the new handle.
    Some(unsafe {
        Arc::increment_strong_count(kept);
        Arc::from_raw(kept)
    })
}
