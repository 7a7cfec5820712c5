//! One piece: found as it is, found in parts that lie side by side, or registered.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass the word of the caller, which may let the device use the
//! whole range, on to the cache's method.

#![allow(unsafe_code)]

use super::{Options, prefault};
use crate::{Access, AddressRange, Cache, GetError, Lease, Monitor, Registrar};

/// The leases that cover a piece, in order of address: nearly always one.
pub(super) type Parts<'c, R, M> = Vec<Lease<'c, R, M>>;

/// What serves pieces of a range.
pub(super) struct Server<'c, 'p, R: Registrar, M: Monitor> {
    cache: &'c Cache<R, M>,
    access: Access,
    options: &'p Options,
}

/// More parts than this are not worth the requests that they make.
const MOST_PARTS: usize = 4;

impl<'c, 'p, R: Registrar, M: Monitor> Server<'c, 'p, R, M> {
    /// # Safety
    ///
    /// As [`Cache::get`], for every piece that is going to be served, until its leases end.
    pub(super) unsafe fn new(cache: &'c Cache<R, M>, access: Access, options: &'p Options) -> Self {
        Self { cache, access, options }
    }

    /// Whether this is a forked child, which has no helpers, and whose parent's the requests are.
    pub(super) fn is_forked(&self) -> bool {
        self.cache.is_forked()
    }

    /// Registers what is not there.
    pub(super) fn serve(&self, piece: AddressRange) -> Result<Parts<'c, R, M>, GetError> {
        if let Some(parts) = self.find(piece) {
            return Ok(parts);
        }
        self.make_pages(piece);
        let request = self.cache.request(pointer(piece), piece.len(), self.access);
        let request = if self.options.to_keep { request.to_keep() } else { request };
        // SAFETY: the promise made to `new`.
        Ok(vec![unsafe { request.get() }?])
    }

    /// Only what is cached; registers nothing.
    pub(super) fn find(&self, piece: AddressRange) -> Option<Parts<'c, R, M>> {
        self.find_whole(piece).or_else(|| self.find_parts(piece))
    }

    fn find_whole(&self, piece: AddressRange) -> Option<Parts<'c, R, M>> {
        Some(vec![self.lease_cached(piece)?])
    }

    /// Registrations that lie side by side, from another use of the memory with other cuts.
    fn find_parts(&self, piece: AddressRange) -> Option<Parts<'c, R, M>> {
        let mut parts = Vec::new();
        let mut rest = Some(piece);
        while let Some(range) = rest {
            if parts.len() == MOST_PARTS {
                return None;
            }
            let part = self.find_first_part(range)?;
            rest = AddressRange::between(part.range().end(), piece.end());
            parts.push(part);
        }
        Some(parts)
    }

    /// A lease of as much of the beginning of `range` as one registration holds.
    fn find_first_part(&self, range: AddressRange) -> Option<Lease<'c, R, M>> {
        let first = self.lease_cached(AddressRange::new(range.start(), 1).ok()?)?;
        let held = first.registered().intersection(&range)?;
        // Its own registration serves it, or, if that has changed meanwhile, another or none.
        self.lease_cached(held)
    }

    fn lease_cached(&self, range: AddressRange) -> Option<Lease<'c, R, M>> {
        // SAFETY: the promise made to `new`.
        unsafe { self.cache.request(pointer(range), range.len(), self.access).get_if_cached() }
    }

    /// What cannot be made in advance is left to the registration, which says what is wrong.
    fn make_pages(&self, piece: AddressRange) {
        if self.options.prefault {
            let granted = self.cache.registrar().granted(self.access);
            let _ = prefault::make(piece, granted.writes());
        }
    }
}

fn pointer(range: AddressRange) -> *const u8 {
    std::ptr::with_exposed_provenance(range.start())
}

/// Whether ending leases may help.
pub(crate) fn is_about_room(error: &GetError) -> bool {
    match error {
        GetError::Exhausted(_) => true,
        GetError::Register(error) => error.is_about_room(),
        _ => false,
    }
}
