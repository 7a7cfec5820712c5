//! A range of any length as a sequence of leases.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to take the word of the caller of
//! [`GetRequest::pieces`](crate::GetRequest::pieces) and pass it on to the get of each piece.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::error::GetError;
use crate::get::GetRequest;
use crate::lease::Lease;
use crate::monitor::Monitor;
use crate::registrar::Registrar;

/// The leases of a long range, registered one after the other as they are asked for: the
/// transfer of one piece can fly while the next is registered.
///
/// Pieces are cut at addresses that are multiples of
/// [`Config::piece_bytes`](crate::Config::piece_bytes), so another range of the same buffer finds
/// the same pieces again. Each piece makes its own monitor check, because the memory may change
/// between two of them, unless they come from [`Checked::request`](crate::Checked::request).
/// After an error the iterator goes on with the next piece.
#[must_use = "pieces are registered as they are asked for"]
#[derive(Debug)]
pub struct Pieces<'c, R: Registrar, M: Monitor> {
    /// What was asked for, as a whole.
    whole: GetRequest<'c, R, M>,
    rest: Option<AddressRange>,
}

impl<'c, R: Registrar, M: Monitor> GetRequest<'c, R, M> {
    /// The leases of a range of any length, piece by piece.
    ///
    /// # Errors
    ///
    /// [`GetError`] for arguments that make no range; what each piece meets comes with it.
    ///
    /// # Safety
    ///
    /// As [`get`](Self::get), until the last piece's lease ends.
    pub unsafe fn pieces(self) -> Result<Pieces<'c, R, M>, GetError> {
        let range = self.range()?;
        Ok(Pieces { whole: self, rest: Some(range) })
    }
}

impl<R: Registrar, M: Monitor> Pieces<'_, R, M> {
    /// How many leases are still to come.
    pub fn remaining(&self) -> usize {
        let piece = self.whole.piece_bytes();
        self.rest.map_or(0, |rest| (rest.end() - 1) / piece - rest.start() / piece + 1)
    }
}

impl<'c, R: Registrar, M: Monitor> Iterator for Pieces<'c, R, M> {
    type Item = Result<Lease<'c, R, M>, GetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest?;
        let range = rest.pieces(self.whole.piece_bytes()).next()?;
        self.rest = AddressRange::between(range.end(), rest.end());
        // SAFETY: the promise made to `GetRequest::pieces` covers every piece.
        Some(unsafe { self.whole.part(range).get() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining(), Some(self.remaining()))
    }
}

impl<R: Registrar, M: Monitor> ExactSizeIterator for Pieces<'_, R, M> {}
