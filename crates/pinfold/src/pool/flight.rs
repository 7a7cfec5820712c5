//! Buffers outside of Rust's hands: those that a device works on, and bare addresses, which C and allocators ask for. A pointer
//! alone finds its slab.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare how a transfer's end is told, which only the caller can know; and because an
//! address that comes back is believed to be a buffer that is out. One that lies in no slab at all is noticed.

#![allow(unsafe_code)]

use super::buffer::{Pool, PoolBuffer, give_back_slowly, keep_at_hand};
use super::depot::{Slab, slab_at};
use super::slab::Kind;
use crate::in_flight::{InUse, Kept};
use pinfold_core::Registrar;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;

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

// --- bare addresses ----------------------------------------------------------------------------

/// An address that lies in no pool's slab, or not where a buffer begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{address:#x} is not the address of a pool's buffer: pass what allocate gave")]
pub struct NotABuffer {
    /// The address.
    pub address: usize,
}

impl<R: Registrar> Pool<R> {
    /// At least `size` bytes at a multiple of `align`, a power of two up to 2 MiB; their contents
    /// are whatever they are, initialised.
    ///
    /// Belongs to the caller until [`deallocate`], and stays mapped even if the pool is dropped.
    ///
    /// # Errors
    ///
    /// [`AllocateError`](super::AllocateError), as of [`Pool::get`].
    pub fn allocate(&self, size: usize, align: usize) -> Result<NonNull<u8>, super::AllocateError> {
        self.request(size).align(align).take().map(|(block, _)| block)
    }

    /// What the registrar gave for the slab that `block` lies in; `None` if that is no slab of
    /// this pool. `block` may point anywhere into a buffer.
    ///
    /// # Safety
    ///
    /// `block` points into a buffer of some pool that is out, or to memory that is no pool's.
    pub unsafe fn handle_of(&self, block: NonNull<u8>) -> Option<R::Handle> {
        // SAFETY: the caller's promise.
        let slab = unsafe { slab_of(block) }?;
        let ours = std::ptr::eq(Arc::as_ptr(slab.depot()), self.depot());
        // SAFETY: the slab belongs to this pool, whose registrar is an `R`.
        ours.then(|| unsafe { *slab.handles().get::<R::Handle>() })
    }

    /// The buffer that begins at `block`, as long as it can be; `None` if that is no buffer of this
    /// pool.
    ///
    /// # Safety
    ///
    /// `block` came from [`PoolBuffer::into_raw`] or [`allocate`](Self::allocate), has not been
    /// given back, and is not used as a bare address after this.
    pub unsafe fn from_raw(&self, block: NonNull<u8>) -> Option<PoolBuffer<'_, R>> {
        // SAFETY: the caller's promise.
        let (slab, kind) = unsafe { buffer_at(block) }?;
        let ours = std::ptr::eq(Arc::as_ptr(slab.depot()), self.depot());
        ours.then(|| PoolBuffer::new(self.depot(), block, kind.bytes(), kind))
    }

    /// The buffer whose transfer is over, by the word that
    /// [`into_user_data`](super::InFlight::into_user_data) gave. As long as it can be: cut it to what the
    /// completion says.
    ///
    /// # Safety
    ///
    /// `user_data` came from a buffer of this pool and is used once; and as for
    /// [`InFlight::complete`](super::InFlight::complete).
    #[allow(clippy::cast_possible_truncation)] // it was an address
    pub unsafe fn completed(&self, user_data: u64) -> Option<PoolBuffer<'_, R>> {
        let block = NonNull::new(ptr::with_exposed_provenance_mut(user_data as usize))?;
        // SAFETY: the caller's promise.
        unsafe { self.from_raw(block) }
    }
}

/// Gives back what [`Pool::allocate`] or [`PoolBuffer::into_raw`] gave, of whatever pool, on
/// whatever thread, also after the pool was dropped.
///
/// # Errors
///
/// [`NotABuffer`] if the address lies in no slab. An address in a slab that is no buffer's is
/// noticed later, if at all ([`refused_puts`](super::PoolStatistics::refused_puts)).
///
/// # Safety
///
/// `block` is such an address, was not deallocated before, and no code uses the bytes any more, no
/// device either.
pub unsafe fn deallocate(block: NonNull<u8>) -> Result<(), NotABuffer> {
    // SAFETY: the caller's promise.
    let found = unsafe { buffer_at(block) };
    let (slab, kind) = found.ok_or(NotABuffer { address: block.addr().get() })?;
    // The slab, and with it the depot, lives as long as the block is out: until it stands in a magazine of
    // this thread's, which is the last thing that `keep_at_hand` touches, or until the slow way, which
    // needs the depot for longer, has put it back.
    if !keep_at_hand(slab.depot(), block, kind) {
        let depot = Arc::clone(slab.depot());
        give_back_slowly(&depot, block, kind);
    }
    Ok(())
}

/// How many bytes may be used at `block`; `None` if no buffer begins there.
///
/// # Safety
///
/// As for [`Pool::handle_of`].
pub unsafe fn capacity_of(block: NonNull<u8>) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe { buffer_at(block) }.map(|(_, kind)| kind.bytes())
}

/// The slab around an address.
///
/// # Safety
///
/// The address is in a buffer that is out, or in no slab.
#[inline]
unsafe fn slab_of<'a>(block: NonNull<u8>) -> Option<&'a Slab> {
    // SAFETY: a slab lives as long as one of its buffers is out.
    let slab = unsafe { slab_at(block.addr().get())?.as_ref() };
    slab.place_of(block.addr().get()).map(|_| slab)
}

/// The slab and the kind of the buffer that begins at an address.
///
/// # Safety
///
/// As for [`slab_of`].
#[inline]
unsafe fn buffer_at<'a>(block: NonNull<u8>) -> Option<(&'a Slab, Kind)> {
    // SAFETY: the caller's promise.
    let slab = unsafe { slab_of(block) }?;
    let kind = slab.kind_at(slab.place_of(block.addr().get())?)?;
    Some((slab, kind))
}
