//! The guards: where a transfer reads or writes, and what keeps that place.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to copy between the program's memory and a pool's buffer, on the word of
//! the place's caller.

#![allow(unsafe_code)]

use super::tally::Slow;
use super::{Direction, Strategy};
use crate::in_flight::{InUse, Kept};
use crate::pool::{InFlight, Pool, PoolBuffer, WhenExhausted};
use crate::{AddressRange, Lease, Monitor, Registrar};
use std::fmt;
use std::ptr;

/// A place for one transfer: hand its [`parts`](Self::parts) to the device, then
/// [`complete`](Self::complete) it.
///
/// Dropped instead, also by a panic, it leaves what it holds to the device for good: leases are leaked,
/// a pool's buffer is lost. A place that was not used after all is
/// [abandoned](Self::abandon).
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold::{Cache, Monitor, Registrar, strategy::{Costs, TransferPlanner, Reuse}};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>, start: *const u8) {
/// let planner = TransferPlanner::new(&cache, Costs::UNMEASURED);
/// let place = unsafe { planner.send(start, 1, Reuse::Often) }.unwrap();
/// drop(cache);
/// drop(place);
/// # }
/// ```
#[must_use = "the transfer needs the place until it has ended"]
pub struct PlannedPlace<'d, R: Registrar, M: Monitor> {
    guard: InUse<Guard<'d, R, M>>,
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

impl<'d, R: Registrar, M: Monitor> PlannedPlace<'d, R, M> {
    pub(super) fn new(guard: Guard<'d, R, M>, strategy: Strategy, slow: Option<Slow>) -> Self {
        Self { guard: InUse::new(guard), strategy, slow }
    }

    /// What keeps it, which no device uses.
    ///
    /// # Safety
    ///
    /// As for [`InUse::end`].
    pub(super) unsafe fn into_guard(self) -> Guard<'d, R, M> {
        // SAFETY: the caller's promise.
        unsafe { self.guard.end() }
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

    fn part(&self, number: usize) -> Option<Part<R::Handle>> {
        match &*self.guard {
            Guard::Lease(lease) => (number == 0).then(|| part_of(lease)),
            Guard::Leases(leases) => leases.get(number).map(part_of),
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
    /// The transfer has ended. If data arrived, its target is mapped, may be written, and is not
    /// borrowed.
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
        // SAFETY: the caller's promise.
        if let Guard::Copy(copied) = unsafe { self.into_guard() } {
            // SAFETY: the caller's promise.
            unsafe { copied.deliver(arrived) };
        }
    }
}

fn part_of<R: Registrar, M: Monitor>(lease: &Lease<'_, R, M>) -> Part<R::Handle> {
    Part { handle: lease.handle(), range: lease.range() }
}

impl<'d, R: Registrar, M: Monitor> Guard<'d, R, M> {
    /// One request for each part, with what keeps its memory.
    pub(super) fn into_requests(self) -> impl Iterator<Item = (Part<R::Handle>, Self)> {
        let (one, several) = match self {
            Self::Leases(leases) => (None, leases),
            one => (Some(one), Vec::new()),
        };
        let several = several.into_iter().map(Self::Lease);
        one.into_iter().chain(several).filter_map(|kept| Some((kept.only_part()?, kept)))
    }

    fn only_part(&self) -> Option<Part<R::Handle>> {
        match self {
            Self::Lease(lease) => Some(part_of(lease)),
            Self::Leases(_) => None,
            Self::Copy(copied) => copied.part(),
        }
    }
}

impl<R: Registrar, M: Monitor> Kept for Guard<'_, R, M> {
    fn abandon(self) {
        match self {
            Self::Lease(lease) => lease.abandon(),
            Self::Leases(leases) => leases.into_iter().for_each(Kept::abandon),
            // Its flight abandons the buffer.
            Self::Copy(copied) => drop(copied),
        }
    }

    unsafe fn finish(self, moved: bool) {
        if let Self::Copy(copied) = self {
            // SAFETY: the caller's promise.
            unsafe { copied.deliver(if moved { usize::MAX } else { 0 }) };
        }
    }
}

impl<'d, R: Registrar> Copied<'d, R> {
    /// A buffer for `range`, with its bytes if they are to leave.
    ///
    /// # Safety
    ///
    /// If the data is leaving, the range is mapped, may be read, and no thread writes it meanwhile.
    pub(super) unsafe fn new(
        pool: &'d Pool<R>,
        range: AddressRange,
        direction: Direction,
    ) -> Result<Self, crate::pool::AllocateError> {
        // What is not available is not waited for: there are other ways.
        let request = pool.request(range.len()).when_exhausted(WhenExhausted::Grow);
        let mut buffer = request.get()?;
        if direction == Direction::Leaving {
            let from = ptr::with_exposed_provenance::<u8>(range.start());
            // SAFETY: the caller's promise; the buffer is as long, and another mapping.
            unsafe { ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), range.len()) };
        }
        Ok(Self { pool, flight: buffer.in_flight(), target: range, direction })
    }

    /// Puts the buffer back, its first `arrived` bytes copied to their target.
    ///
    /// # Safety
    ///
    /// The device is done with the buffer; if any byte arrived, the target is mapped, may be written,
    /// and is not borrowed.
    unsafe fn deliver(self, arrived: usize) {
        // SAFETY: the caller's promise.
        let buffer = unsafe { self.flight.complete() };
        // A forked child finds zeros in the buffer, or no memory at all.
        if arrived > 0 && self.direction == Direction::Arriving && !self.pool.is_forked() {
            // SAFETY: the caller's promise about the target, and the buffer is another mapping.
            unsafe { copy_out(&buffer, self.target, arrived) };
        }
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
/// `target` may be written, is not borrowed, and is not longer than the buffer.
unsafe fn copy_out<R: Registrar>(buffer: &PoolBuffer<'_, R>, target: AddressRange, arrived: usize) {
    let length = arrived.min(target.len()).min(buffer.len());
    let to = ptr::with_exposed_provenance_mut::<u8>(target.start());
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(buffer.as_ptr(), to, length) };
}

impl<R: Registrar, M: Monitor> fmt::Debug for PlannedPlace<'_, R, M> {
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
