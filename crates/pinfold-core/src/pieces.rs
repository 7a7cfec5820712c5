//! A range of any length as a sequence of leases.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass the word of the caller of
//! [`Cache::get_pieces`](crate::Cache::get_pieces) on to the door of each piece.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::error::GetError;
use crate::lease::Lease;
use crate::monitor::Monitor;
use crate::region::{Ask, Terms, Want};
use crate::registrar::Registrar;
use crate::shared::Shared;

/// The leases of a long range, registered one after the other as they are asked for: the
/// transfer of one piece can fly while the next is registered.
///
/// Pieces are cut at addresses that are multiples of
/// [`Config::piece_bytes`](crate::Config::piece_bytes), so another range of the same buffer finds
/// the same pieces again. Each piece makes its own monitor check, because the memory may change
/// between two of them, unless they come from [`Checked::get_pieces`](crate::Checked::get_pieces).
/// After an error the iterator goes on with the next piece.
#[must_use = "pieces are registered as they are asked for"]
#[derive(Debug)]
pub struct Pieces<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    rest: Option<AddressRange>,
    terms: Terms,
    /// Whether the one who asked has checked the monitor for all pieces.
    checked: bool,
}

impl<'c, R: Registrar, M: Monitor> Pieces<'c, R, M> {
    /// # Safety
    ///
    /// As for [`Cache::get`](crate::Cache::get), until the last piece's lease ends.
    pub(crate) unsafe fn new(shared: &'c Shared<R, M>, want: Want, checked: bool) -> Self {
        Self { shared, rest: Some(want.range), terms: want.terms, checked }
    }

    /// How many leases are still to come.
    pub fn remaining(&self) -> usize {
        let piece = self.shared.config.piece_bytes;
        self.rest.map_or(0, |rest| (rest.end() - 1) / piece - rest.start() / piece + 1)
    }
}

impl<'c, R: Registrar, M: Monitor> Iterator for Pieces<'c, R, M> {
    type Item = Result<Lease<'c, R, M>, GetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest?;
        let range = rest.pieces(self.shared.config.piece_bytes).next()?;
        self.rest = AddressRange::between(range.end(), rest.end());
        let want = Want { range, terms: self.terms };
        // SAFETY: the promise made to `new` covers every piece.
        Some(unsafe {
            let ask = Ask::from(&want);
            if self.checked { self.shared.get_checked(ask) } else { self.shared.get(ask) }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining(), Some(self.remaining()))
    }
}

impl<R: Registrar, M: Monitor> ExactSizeIterator for Pieces<'_, R, M> {}
