//! The safe methods: buffers that cannot move or be freed while they are leased.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare what a stable buffer is, to say so of the standard
//! library's own, and to pass them through the method that takes an address.

#![allow(unsafe_code)]

use crate::error::GetError;
use crate::foreign::ForeignPart;
use crate::get::{GetRequest, Lookup};
use crate::lease::Lease;
use crate::monitor::Monitor;
use crate::registrar::Registrar;
use crate::shared::Shared;
use crate::{Access, AddressRange};
use std::fmt;
use std::sync::Arc;

/// A buffer whose bytes stay at one address for as long as the value lives, wherever the value
/// itself is moved.
///
/// # Safety
///
/// `bytes` gives the same live, initialised memory on every call until the value is dropped, and
/// [`ACCESS`](Self::ACCESS) names only rights that no other use of that memory forbids:
/// `WRITE` only where the value is the memory's one owner.
pub unsafe trait StableBuffer {
    /// The rights that a device may be given.
    const ACCESS: Access;

    /// The buffer's bytes.
    fn bytes(&self) -> &[u8];
}

// SAFETY: an Arc's content neither moves nor changes while the Arc lives.
unsafe impl StableBuffer for Arc<[u8]> {
    const ACCESS: Access = Access::READ;

    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: no code can change a vector behind an Arc, so its buffer stays.
unsafe impl StableBuffer for Arc<Vec<u8>> {
    const ACCESS: Access = Access::READ;

    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: static memory stays.
unsafe impl StableBuffer for &'static [u8] {
    const ACCESS: Access = Access::READ;

    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: a box's content stays where it is when the box is moved, and has one owner.
unsafe impl StableBuffer for Box<[u8]> {
    const ACCESS: Access = Access::READ_WRITE;

    fn bytes(&self) -> &[u8] {
        self
    }
}

// SAFETY: a vector's buffer stays where it is when the vector is moved, has one owner, and moves
// only when the vector is changed, which a lease does not let happen.
unsafe impl StableBuffer for Vec<u8> {
    const ACCESS: Access = Access::READ_WRITE;

    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A buffer and the leases of its bytes. Gives the buffer back when the use is over.
///
/// While it is leased, the buffer can be neither changed nor freed by safe code.
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold_core::{Cache, Monitor, Registrar};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>) {
/// let lease = cache.lease_buffer(vec![0_u8; 1]).ok().unwrap();
/// drop(cache);
/// drop(lease);
/// # }
/// ```
#[must_use = "the buffer is deregistered as soon as this is dropped"]
pub struct BufferLease<'c, B: StableBuffer, R: Registrar, M: Monitor> {
    // Before the buffer, so that the leases end first.
    leases: Vec<Lease<'c, R, M>>,
    buffer: ForeignPart<B>,
}

/// Why a buffer could not be leased, and the buffer.
pub struct BufferError<B> {
    /// What went wrong.
    pub error: GetError,
    /// The buffer, unharmed.
    pub buffer: B,
}

impl<'c, B: StableBuffer, R: Registrar, M: Monitor> BufferLease<'c, B, R, M> {
    pub(crate) fn of(shared: &'c Shared<R, M>, buffer: B) -> Result<Self, BufferError<B>> {
        let buffer = ForeignPart::new(buffer);
        let bytes = buffer.bytes();
        let request = || {
            let ask = Lookup(shared).wish(bytes.as_ptr(), bytes.len(), B::ACCESS);
            GetRequest::new(shared, ask, false)
        };
        // SAFETY: the bytes stay and may be used with these rights as long as the buffer lives
        // (StableBuffer's promise), and the leases end before it.
        let whole = unsafe { request().get() }.map(|lease| vec![lease]);
        // SAFETY: as above.
        let in_pieces = || unsafe { request().pieces() }.and_then(Iterator::collect);
        let leases = match whole {
            Err(GetError::TooLong { .. }) => in_pieces(),
            whole => whole,
        };
        match leases {
            Ok(leases) => Ok(Self { leases, buffer }),
            Err(error) => Err(BufferError { error, buffer: buffer.into_inner() }),
        }
    }

    /// The leases, in the order of their addresses.
    pub fn leases(&self) -> &[Lease<'c, R, M>] {
        &self.leases
    }

    /// The buffer's bytes.
    pub fn range(&self) -> Option<AddressRange> {
        let (first, last) = (self.leases.first()?.range(), self.leases.last()?.range());
        AddressRange::between(first.start(), last.end())
    }

    /// Ends the leases and gives the buffer back.
    pub fn into_inner(self) -> B {
        drop(self.leases);
        self.buffer.into_inner()
    }
}

impl<B: StableBuffer, R: Registrar, M: Monitor> fmt::Debug for BufferLease<'_, B, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferLease").field("leases", &self.leases).finish_non_exhaustive()
    }
}

impl<B> fmt::Debug for BufferError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for BufferError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for BufferError<B> {}
