//! Buffers that a device works on.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare how a transfer's end is told, which only the caller
//! can know.

#![allow(unsafe_code)]

use super::buffer::PoolBuffer;
use crate::in_flight::{InUse, Kept};
use pinfold_core::Registrar;
use std::fmt;
use std::mem::ManuallyDrop;

/// A buffer that a device may be reading or writing: no other code can, and it does not go back to
/// the pool by itself.
///
/// If this is dropped, the buffer is lost: it stays registered, counts as
/// [lost](super::PoolStatistics::lost_bytes), and is handed out no more.
///
/// It does not outlive its pool:
///
/// ```compile_fail,E0505
/// # use pinfold::{Registrar, pool::Pool};
/// # fn after_its_parent<R: Registrar>(pool: Pool<R>) {
/// let flight = pool.get(1500).unwrap().in_flight();
/// drop(pool);
/// drop(flight);
/// # }
/// ```
#[must_use = "a buffer in flight that is dropped is lost"]
pub struct InFlight<'p, R: Registrar> {
    buffer: InUse<PoolBuffer<'p, R>>,
}

/// A lost buffer is counted, and never put back.
impl<R: Registrar> Kept for PoolBuffer<'_, R> {
    fn abandon(self) {
        let buffer = ManuallyDrop::new(self);
        buffer.depot().lose(buffer.kind());
    }
}

impl<'p, R: Registrar> PoolBuffer<'p, R> {
    /// Hands the buffer to a device: call it before the request is submitted.
    pub fn in_flight(self) -> InFlight<'p, R> {
        InFlight { buffer: InUse::new(self) }
    }
}

impl<'p, R: Registrar> InFlight<'p, R> {
    /// Where the device finds the bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        // Not by way of its bytes, which are borrowed to be read.
        self.buffer.block().as_ptr()
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// What the devices know the bytes by.
    pub fn handle(&self) -> R::Handle {
        self.buffer.handle()
    }

    /// The buffer, now that the transfer is over.
    ///
    /// # Safety
    ///
    /// No device touches the buffer any more for the sake of what was submitted with it: the
    /// request has completed or was never submitted.
    pub unsafe fn complete(self) -> PoolBuffer<'p, R> {
        // SAFETY: the caller's promise.
        unsafe { self.buffer.end() }
    }

    /// As one word, for the device to give back with the completion (`user_data`, `wr_id`);
    /// [`Pool::completed`](super::Pool::completed) makes it a buffer again. A word that never comes back is a lost buffer,
    /// though it counts as in use.
    pub fn into_user_data(self) -> u64 {
        let flight = ManuallyDrop::new(self);
        flight.as_ptr().expose_provenance() as u64
    }
}

impl<R: Registrar> fmt::Debug for InFlight<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InFlight").field(&*self.buffer).finish()
    }
}
