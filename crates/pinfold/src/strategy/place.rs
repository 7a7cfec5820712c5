//! The guards: where a transfer reads or writes, and what keeps that place.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to copy between the program's memory and a pool's buffer, on the word of
//! whoever asked for the place.

#![allow(unsafe_code)]

use super::tally::Slow;
use super::{Direction, Strategy};
use crate::pool::{InFlight, Pool, PoolBuffer, WhenExhausted};
use crate::{AddressRange, Lease, Monitor, Registrar};
use std::fmt;
use std::ptr;

/// A place for one transfer: hand its [`parts`](Self::parts) to the device, then
/// [`complete`](Self::complete) it.
///
/// Dropped instead, it ends its leases as a [`Lease`] does; a pool's buffer is lost, because the device
/// may still use it.
#[must_use = "the transfer needs the place until it has ended"]
pub struct Place<'d, R: Registrar, M: Monitor> {
    guard: Guard<'d, R, M>,
    strategy: Strategy,
    slow: Option<Slow>,
}

/// What keeps a place.
#[non_exhaustive]
pub enum Guard<'d, R: Registrar, M: Monitor> {
    /// One registration of the program's memory, kept by the cache or not.
    Lease(Lease<'d, R, M>),
    /// Several, because the range is longer than one may be.
    Leases(Vec<Lease<'d, R, M>>),
    /// A pool's buffer, in the program's memory's stead.
    Copy(Copied<'d, R>),
}

/// A pool's buffer that stands for memory of the program.
pub struct Copied<'d, R: Registrar> {
    pool: &'d Pool<R>,
    flight: InFlight<'d, R>,
    /// The program's memory.
    target: AddressRange,
    direction: Direction,
}

/// What one request to the device names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part<H> {
    /// The registration.
    pub handle: H,
    /// The bytes, in the order of the transfer.
    pub range: AddressRange,
}

impl<'d, R: Registrar, M: Monitor> Place<'d, R, M> {
    pub(super) fn new(guard: Guard<'d, R, M>, strategy: Strategy, slow: Option<Slow>) -> Self {
        Self { guard, strategy, slow }
    }

    /// How the place was come by.
    pub fn strategy(&self) -> Strategy {
        self.strategy
    }

    /// Why it is not the fastest for such a transfer; `None` if it is, as far as was measured.
    pub fn slow(&self) -> Option<Slow> {
        self.slow
    }

    /// The same, slow for another reason.
    pub(super) fn slowed_by(self, slow: Slow) -> Self {
        Self { slow: Some(slow), ..self }
    }

    /// What keeps it.
    pub fn guard(&self) -> &Guard<'d, R, M> {
        &self.guard
    }

    /// What to hand to the device: together as long as the transfer, in its order.
    pub fn parts(&self) -> impl Iterator<Item = Part<R::Handle>> + '_ {
        (0..).map_while(|number| self.part(number))
    }

    /// The part of this number; all of them if there is none.
    pub(super) fn range_of(&self, number: usize) -> Option<AddressRange> {
        let whole = || {
            let mut ranges = self.parts().map(|part| part.range);
            let first = ranges.next()?;
            AddressRange::between(first.start(), ranges.last().unwrap_or(first).end())
        };
        self.part(number).map(|part| part.range).or_else(whole)
    }

    fn part(&self, number: usize) -> Option<Part<R::Handle>> {
        let of = |lease: &Lease<'_, R, M>| Part { handle: lease.handle(), range: lease.range() };
        match &self.guard {
            Guard::Lease(lease) => (number == 0).then(|| of(lease)),
            Guard::Leases(leases) => leases.get(number).map(of),
            Guard::Copy(copied) => (number == 0).then(|| copied.part()).flatten(),
        }
    }

    /// Ends the use: data that arrived in a pool's buffer is copied to its target, the buffer goes
    /// back, leases end.
    ///
    /// All of the place was filled: if less arrived, say how much to
    /// [`complete_with`](Self::complete_with). In a forked child nothing is copied: the buffer is its
    /// parent's, and so is what arrived there.
    ///
    /// # Safety
    ///
    /// The transfer has ended. If data arrived, its target is mapped, may be written, and nobody borrows
    /// it.
    pub unsafe fn complete(self) {
        // SAFETY: the caller's promise.
        unsafe { self.end(usize::MAX) }
    }

    /// As [`complete`](Self::complete) for a transfer that brought the first `arrived` bytes alone: a
    /// pool's buffer holds behind them whatever its last user left there, and none of that is copied.
    ///
    /// # Safety
    ///
    /// As for [`complete`](Self::complete).
    pub unsafe fn complete_with(self, arrived: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.end(arrived) }
    }

    /// As [`complete`](Self::complete) for a transfer that failed: nothing is copied to the target.
    ///
    /// # Safety
    ///
    /// The transfer has ended.
    pub unsafe fn abandon(self) {
        // SAFETY: the caller's promise.
        unsafe { self.end(0) }
    }

    /// # Safety
    ///
    /// As for [`complete`](Self::complete); the target matters if any byte is to be delivered.
    unsafe fn end(self, arrived: usize) {
        if let Guard::Copy(Copied { pool, flight, target, direction }) = self.guard {
            // SAFETY: the caller's promise.
            let buffer = unsafe { flight.complete() };
            // A forked child finds zeros in the buffer, or no memory at all.
            if arrived > 0 && direction == Direction::Arriving && !pool.is_forked() {
                // SAFETY: the caller's promise about the target, and the buffer is another mapping.
                unsafe { copy_out(&buffer, target, arrived) };
            }
        }
    }
}

impl<'d, R: Registrar> Copied<'d, R> {
    /// A buffer for `range`, with its bytes if they are to leave.
    ///
    /// # Safety
    ///
    /// If the data is leaving, the range is mapped, may be read, and nobody writes it meanwhile.
    pub(super) unsafe fn new(
        pool: &'d Pool<R>,
        range: AddressRange,
        direction: Direction,
    ) -> Result<Self, crate::pool::AllocateError> {
        // What is not at hand is not waited for: there are other ways.
        let request = pool.request(range.len()).when_exhausted(WhenExhausted::Grow);
        let mut buffer = request.get()?;
        if direction == Direction::Leaving {
            let from = ptr::with_exposed_provenance::<u8>(range.start());
            // SAFETY: the caller's promise; the buffer is as long, and another mapping.
            unsafe { ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), range.len()) };
        }
        Ok(Self { pool, flight: buffer.in_flight(), target: range, direction })
    }

    fn part(&self) -> Option<Part<R::Handle>> {
        let range = AddressRange::new(self.flight.as_ptr().addr(), self.flight.len()).ok()?;
        Some(Part { handle: self.flight.handle(), range })
    }

    /// The program's memory that the buffer stands for.
    pub fn target(&self) -> AddressRange {
        self.target
    }
}

/// # Safety
///
/// `target` may be written, nobody borrows it, and it is not longer than the buffer.
unsafe fn copy_out<R: Registrar>(buffer: &PoolBuffer<'_, R>, target: AddressRange, arrived: usize) {
    let length = arrived.min(target.len()).min(buffer.len());
    let to = ptr::with_exposed_provenance_mut::<u8>(target.start());
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(buffer.as_ptr(), to, length) };
}

impl<R: Registrar, M: Monitor> fmt::Debug for Place<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("strategy", &self.strategy)
            .field("slow", &self.slow)
            .finish_non_exhaustive()
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Guard<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lease(lease) => lease.fmt(f),
            Self::Leases(leases) => leases.fmt(f),
            Self::Copy(copied) => copied.fmt(f),
        }
    }
}

impl<R: Registrar> fmt::Debug for Copied<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copied")
            .field("target", &self.target)
            .field("direction", &self.direction)
            .finish_non_exhaustive()
    }
}
