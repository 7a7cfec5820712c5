//! The door: asks for advice, acts on it, and says so where it cannot.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for doors that take an address and a length. The contract of every one
//! of them is the cache's own ([`Cache::get`]), and, because the memory may be copied: **the bytes are mapped,
//! and may be read (written, if data arrives) by this thread, until the transfer has ended.**

#![allow(unsafe_code)]

use super::advice::{Advice, Coverage, Decision, Means, Question};
use super::costs::Costs;
use super::ledger::{Account, Ledger};
use super::place::{Copied, Guard, Place};
use super::tally::{DoorStatistics, Slow, Tally};
use super::{Direction, Reuse, Strategy, Uses};
use crate::in_flight::Window;
use crate::pieces::{self, Moved, Mover, Progress, Reason, TransferError};
use crate::pool::{AllocateError, Pool};
use crate::{
    Access, AddressRange, BadAddress, Cache, GetError, Lease, Monitor, PerUse, RangeError,
    RegisterError, Registrar, Uncovered, Watch,
};
use std::fmt;

/// What a library calls in front of every transfer: a cache, a pool if there is one, and what each way
/// costs.
///
/// Share it by reference; any thread may use it. For local access only: rights for a peer are the
/// [cache](Cache::get)'s business.
pub struct Door<'d, R: Registrar, M: Monitor> {
    cache: &'d Cache<R, M>,
    pool: Option<&'d Pool<R>>,
    /// The longest buffer of the pool.
    copy_bytes: usize,
    costs: Costs,
    /// Found out once: asking how many processors there are takes longer than a short transfer.
    options: pieces::Options,
    ledger: Ledger,
    tally: Tally,
}

/// Why a place could not be had by one way.
enum Failed {
    Pool(AllocateError),
    Get(GetError),
}

/// Which memory, and what for.
#[derive(Clone, Copy)]
struct Wish {
    range: AddressRange,
    direction: Direction,
    reuse: Reuse,
    /// Whether the transfer can begin before everything is registered.
    overlap: bool,
}

impl Wish {
    /// The contract in the file's header has made sure of the pointer.
    fn new(
        start: *const u8,
        length: usize,
        direction: Direction,
        reuse: Reuse,
    ) -> Result<Self, RangeError> {
        // The address is made a pointer again where it is copied.
        let range = AddressRange::new(start.expose_provenance(), length)?;
        Ok(Self { range, direction, reuse, overlap: false })
    }

    fn access(&self) -> Access {
        match self.direction {
            Direction::Leaving => Access::READ,
            Direction::Arriving => Access::WRITE,
        }
    }
}

impl<'d, R: Registrar, M: Monitor> Door<'d, R, M> {
    /// A door over `cache`, deciding by `costs`.
    pub fn new(cache: &'d Cache<R, M>, costs: Costs) -> Self {
        let (ledger, tally) = (Ledger::new(), Tally::default());
        let options = pieces::Options::for_transfer();
        Self { cache, pool: None, copy_bytes: 0, costs, options, ledger, tally }
    }

    /// With `pool` to copy through, whose registrations are with the cache's device. Up to its longest
    /// buffer: bound its [`max_bytes`](crate::pool::PoolConfig::max_bytes) to what it may cost.
    #[must_use]
    pub fn with_pool(self, pool: &'d Pool<R>) -> Self {
        let longest = pool.registrar().limits().max_region_bytes;
        Self { pool: Some(pool), copy_bytes: pool.config().max_bytes.min(longest), ..self }
    }

    /// What it decides by.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// How its transfers went.
    pub fn statistics(&self) -> DoorStatistics {
        self.tally.statistics()
    }

    /// What a transfer of this memory would be advised now, by [`transfer`](Self::transfer), with the
    /// reasons. Asks the monitor to watch the memory, to know whether it can: some microseconds.
    ///
    /// # Errors
    ///
    /// [`RangeError`] if start and length make no range.
    pub fn advise(
        &self,
        direction: Direction,
        start: *const u8,
        length: usize,
        reuse: Reuse,
    ) -> Result<Advice, RangeError> {
        let range = AddressRange::new(start.addr(), length)?;
        let wish = Wish { range, direction, reuse, overlap: true };
        let account = self.ledger.look(range.start());
        let coverage = match self.cache.monitor().watch(range) {
            Watch::Uncovered(why) => Coverage::Uncovered(Some(why)),
            Watch::Covered if self.follows_page_table() => Coverage::OnDemand,
            Watch::Covered => Coverage::Covered,
        };
        Ok(self.costs.advise(self.question(&wish, account, coverage)))
    }

    /// A place to send `length` bytes from `start` from.
    ///
    /// # Errors
    ///
    /// [`GetError`], where no way is open; nothing is left behind.
    ///
    /// # Safety
    ///
    /// The caller may let the device read these bytes as in [`Cache::get`]; they are mapped and readable,
    /// and no thread writes them, until the place is [completed](Place::complete).
    pub unsafe fn send(
        &self,
        start: *const u8,
        length: usize,
        reuse: Reuse,
    ) -> Result<Place<'d, R, M>, GetError> {
        let wish = Wish::new(start, length, Direction::Leaving, reuse)?;
        // SAFETY: the caller's promise.
        unsafe { self.place(&wish) }
    }

    /// A place for `length` bytes that arrive and belong at `start`. They are there when the place has been
    /// [completed](Place::complete); if fewer arrived than there is room for, with
    /// [how many](Place::complete_with). A place that is completed in a forked child delivers nothing.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    ///
    /// # Safety
    ///
    /// The caller may let the device write these bytes as in [`Cache::get`]; they are mapped and writable,
    /// and no code relies on them, until the place is completed.
    pub unsafe fn receive(
        &self,
        start: *mut u8,
        length: usize,
        reuse: Reuse,
    ) -> Result<Place<'d, R, M>, GetError> {
        let wish = Wish::new(start, length, Direction::Arriving, reuse)?;
        // SAFETY: the caller's promise.
        unsafe { self.place(&wish) }
    }

    /// Moves `length` bytes at `start`, by whichever way, pieces included, and waits for the end. Says
    /// which way it was.
    ///
    /// # Errors
    ///
    /// [`TransferError`], when every request under way has ended.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send) or [`receive`](Self::receive), until the call returns. If data arrives,
    /// `start` comes from a pointer that may be written through.
    pub unsafe fn transfer<V: Mover<R::Handle>>(
        &self,
        direction: Direction,
        start: *const u8,
        length: usize,
        reuse: Reuse,
        mover: &mut V,
    ) -> Result<Strategy, TransferError<V::Error>> {
        let whole = Wish::new(start, length, direction, reuse)
            .map_err(|error| TransferError { reason: Reason::Range(error), moved_bytes: 0 })?;
        let wish = Wish { overlap: true, ..whole };
        let decision = self.decide(&wish);
        // SAFETY: the caller's promise.
        unsafe { self.transfer_by(&wish, &decision, mover) }
    }

    /// By one way and no other, for those who measure.
    ///
    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    pub(super) unsafe fn transfer_only<V: Mover<R::Handle>>(
        &self,
        strategy: Strategy,
        range: AddressRange,
        mover: &mut V,
    ) -> Result<(), TransferError<V::Error>> {
        let (direction, reuse) = (Direction::Leaving, Reuse::Often);
        let wish = Wish { range, direction, reuse, overlap: true };
        if strategy == Strategy::Pieces {
            // SAFETY: the caller's promise.
            return unsafe { self.in_pieces(&wish, mover) }.map(drop);
        }
        // SAFETY: the caller's promise.
        let guard = unsafe { self.guard(strategy, &wish) }.map_err(|failed| match failed {
            Failed::Get(error) => not_registered(range, error),
            Failed::Pool(AllocateError::Register(error)) => {
                not_registered(range, GetError::Register(error))
            }
            Failed::Pool(_) => not_registered(
                range,
                GetError::TooLong { range, max_region_bytes: self.copy_bytes },
            ),
        })?;
        // SAFETY: the caller's promise.
        unsafe { move_all(Place::new(guard, strategy, None), self.options.in_flight, mover) }
    }

    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    unsafe fn transfer_by<V: Mover<R::Handle>>(
        &self,
        wish: &Wish,
        decision: &Decision,
        mover: &mut V,
    ) -> Result<Strategy, TransferError<V::Error>> {
        let rented;
        let gone = decision.strategy == Strategy::Pieces
            && self.is_bought(wish)
            && self.piece_if_cached(first_byte(wish.range), wish.access()).is_none();
        let decision = if gone {
            self.begin_again(wish);
            rented = self.decide(wish);
            &rented
        } else {
            decision
        };
        if decision.strategy == Strategy::Pieces {
            // SAFETY: the caller's promise.
            let moved = unsafe { self.in_pieces(wish, mover) };
            let slow = match &moved {
                Ok(moved) => self.settle_pieces(wish, decision, moved),
                Err(_) => decision.handicap.map(Slow::from),
            };
            self.tally.count(Strategy::Pieces, slow);
            return moved.map(|_| Strategy::Pieces);
        }
        // SAFETY: the caller's promise.
        let place = unsafe { self.place_by(wish, decision) }
            .map_err(|error| not_registered(wish.range, error))?;
        let strategy = place.strategy();
        // SAFETY: the caller's promise.
        unsafe { move_all(place, self.options.in_flight, mover) }?;
        Ok(strategy)
    }

    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    unsafe fn in_pieces<V: Mover<R::Handle>>(
        &self,
        wish: &Wish,
        mover: &mut V,
    ) -> Result<Moved, TransferError<V::Error>> {
        let (options, progress) = (&self.options, Progress::new());
        let start = std::ptr::with_exposed_provenance(wish.range.start());
        let (length, access) = (wish.range.len(), wish.access());
        // SAFETY: the caller's promise.
        unsafe { pieces::transfer(self.cache, start, length, access, options, &progress, mover) }
    }

    /// Notes what pieces have cost; says so if they were to be found, and cannot be kept.
    fn settle_pieces(&self, wish: &Wish, decision: &Decision, moved: &Moved) -> Option<Slow> {
        let Question { uses, coverage, .. } = decision.question;
        let to_be_kept = uses != Uses::ONCE && !matches!(coverage, Coverage::Uncovered(_));
        if to_be_kept
            && moved.found_at_once == 0
            && let Some(why) = self.uncovered(wish.range)
        {
            let account = Account { refused: true, ..Account::default() };
            self.ledger.set(wish.range.start(), account);
            return Some(Slow::Uncovered(Some(why)));
        }
        self.settle(wish, decision);
        decision.handicap.map(Slow::from)
    }

    /// Why registrations of the range cannot be kept. Some microseconds.
    fn uncovered(&self, range: AddressRange) -> Option<Uncovered> {
        match self.cache.monitor().watch(range) {
            Watch::Uncovered(why) => Some(why),
            Watch::Covered => None,
        }
    }

    /// # Safety
    ///
    /// As [`send`](Self::send) or [`receive`](Self::receive).
    unsafe fn place(&self, wish: &Wish) -> Result<Place<'d, R, M>, GetError> {
        let decision = self.decide(wish);
        // SAFETY: the caller's promise.
        unsafe { self.place_by(wish, &decision) }
    }

    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn place_by(
        &self,
        wish: &Wish,
        decision: &Decision,
    ) -> Result<Place<'d, R, M>, GetError> {
        let rented;
        let kept = matches!(decision.strategy, Strategy::Cached | Strategy::OnDemand);
        let decision = if kept && self.is_bought(wish) {
            if let Some(place) = self.hit(wish, decision.strategy) {
                return Ok(place);
            }
            self.begin_again(wish);
            rented = self.decide(wish);
            &rented
        } else {
            decision
        };
        // SAFETY: the caller's promise.
        let place = match unsafe { self.guard(decision.strategy, wish) } {
            Ok(guard) => self.placed(wish, decision, guard),
            // SAFETY: the caller's promise.
            Err(Failed::Pool(error)) => unsafe { self.without_pool(wish, decision, error) }?,
            // SAFETY: the caller's promise.
            Err(Failed::Get(error)) => unsafe { self.without_registration(wish, error) }?,
        };
        self.tally.count(place.strategy(), place.slow());
        Ok(place)
    }

    /// Whether a registration was kept before, for a caller who knows nothing of reuse.
    fn is_bought(&self, wish: &Wish) -> bool {
        wish.reuse == Reuse::Unknown && self.ledger.look(wish.range.start()).bought
    }

    /// That memory has changed, or was given up for room, or could never be kept: what was bought is gone.
    fn begin_again(&self, wish: &Wish) {
        let refused = self.uncovered(wish.range).is_some();
        self.ledger.set(wish.range.start(), Account { refused, ..Account::default() });
    }

    /// That registration, or those of every piece, if they are still there.
    fn hit(&self, wish: &Wish, strategy: Strategy) -> Option<Place<'d, R, M>> {
        let (range, access) = (wish.range, wish.access());
        let piece_bytes = self.cache.config().piece_bytes;
        let guard = if range.len() <= piece_bytes {
            Guard::Lease(self.piece_if_cached(range, access)?)
        } else {
            let pieces = range.pieces(piece_bytes);
            let leases = pieces.map(|piece| self.piece_if_cached(piece, access));
            Guard::Leases(leases.collect::<Option<_>>()?)
        };
        Some(Place::new(guard, strategy, None))
    }

    fn piece_if_cached(&self, range: AddressRange, access: Access) -> Option<Lease<'d, R, M>> {
        let (cache, start) = (self.cache, std::ptr::with_exposed_provenance(range.start()));
        // SAFETY: the contract of the transfer's caller.
        unsafe { cache.request(start, range.len(), access).get_if_cached() }
    }

    /// The place, said to be slow where it is.
    fn placed(&self, wish: &Wish, decision: &Decision, guard: Guard<'d, R, M>) -> Place<'d, R, M> {
        let kept = matches!(decision.strategy, Strategy::Cached | Strategy::OnDemand);
        let not_kept = if kept { why_not_kept(&guard) } else { None };
        let Some(why) = not_kept else {
            self.settle(wish, decision);
            return Place::new(guard, decision.strategy, decision.handicap.map(Slow::from));
        };
        if matches!(why, PerUse::Uncovered(_)) {
            let account = Account { refused: true, ..Account::default() };
            self.ledger.set(wish.range.start(), account);
        }
        Place::new(guard, Strategy::PerUse, Some(Slow::NotKept(why)))
    }

    /// The next best way without the pool.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn without_pool(
        &self,
        wish: &Wish,
        decision: &Decision,
        error: AllocateError,
    ) -> Result<Place<'d, R, M>, GetError> {
        let means = Means { copy_bytes: 0, overlap: false, exchange: false };
        let decision = self.costs.decide(Question { means, ..decision.question });
        // SAFETY: the caller's promise.
        match unsafe { self.guard(decision.strategy, wish) } {
            Ok(guard) => Ok(self.placed(wish, &decision, guard).slowed_by(Slow::Pool(error))),
            Err(Failed::Get(error)) => Err(error),
            // No decision without a pool is to copy.
            Err(Failed::Pool(_)) => Err(GetError::NoAccess),
        }
    }

    /// A copy of memory that could not be registered, if a copy has what was missing.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn without_registration(
        &self,
        wish: &Wish,
        error: GetError,
    ) -> Result<Place<'d, R, M>, GetError> {
        if wish.range.len() > self.copy_bytes || !copying_helps(&error, wish.direction) {
            return Err(error);
        }
        // SAFETY: the caller's promise.
        let guard = unsafe { self.guard(wish.direction.copying(), wish) }.map_err(|_| error)?;
        Ok(Place::new(guard, wish.direction.copying(), Some(Slow::Refused(error))))
    }

    /// A place by one way.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn guard(&self, strategy: Strategy, wish: &Wish) -> Result<Guard<'d, R, M>, Failed> {
        match strategy {
            Strategy::Copy | Strategy::Landing(_) => {
                let none = Failed::Pool(AllocateError::TooLong {
                    bytes: wish.range.len(),
                    max_bytes: self.copy_bytes,
                });
                let pool = self.pool.ok_or(none)?;
                // SAFETY: the caller's promise.
                unsafe { Copied::new(pool, wish.range, wish.direction) }
                    .map(Guard::Copy)
                    .map_err(Failed::Pool)
            }
            // SAFETY: the caller's promise.
            Strategy::PerUse => unsafe { self.lease(wish, false) }.map_err(Failed::Get),
            // SAFETY: the caller's promise.
            _ => unsafe { self.lease(wish, true) }.map_err(Failed::Get),
        }
    }

    /// Registered memory, cut where it is too long for one lease.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn lease(&self, wish: &Wish, keep: bool) -> Result<Guard<'d, R, M>, GetError> {
        let piece_bytes = self.cache.config().piece_bytes;
        if wish.range.len() <= piece_bytes {
            // SAFETY: the caller's promise.
            return unsafe { self.lease_piece(wish.range, wish.access(), keep) }.map(Guard::Lease);
        }
        let pieces = wish.range.pieces(piece_bytes);
        // SAFETY: the caller's promise.
        let leases = pieces.map(|piece| unsafe { self.lease_piece(piece, wish.access(), keep) });
        leases.collect::<Result<_, _>>().map(Guard::Leases)
    }

    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn lease_piece(
        &self,
        range: AddressRange,
        access: Access,
        keep: bool,
    ) -> Result<Lease<'d, R, M>, GetError> {
        let (cache, start) = (self.cache, std::ptr::with_exposed_provenance(range.start()));
        let request = cache.request(start, range.len(), access);
        let request = if keep { request.to_keep() } else { request.once() };
        // SAFETY: the caller's promise.
        unsafe { request.get() }
    }

    /// What to do with memory of which the door knows what the ledger has. Not looked up where it changes
    /// nothing: for one who knows the reuse, and is better off without keeping a registration anyway.
    fn decide(&self, wish: &Wish) -> Decision {
        let coverage = match self.follows_page_table() {
            true => Coverage::OnDemand,
            false => Coverage::Covered,
        };
        let with = |account, coverage| self.costs.decide(self.question(wish, account, coverage));
        if wish.reuse == Reuse::Unknown {
            let account = self.ledger.look(wish.range.start());
            return with(account, self.coverage_by(account, wish).unwrap_or(coverage));
        }
        let decision = with(Account::default(), coverage);
        if matches!(decision.strategy, Strategy::Cached | Strategy::Pieces) {
            let account = self.ledger.look(wish.range.start());
            if let Some(coverage) = self.coverage_by(account, wish) {
                return with(account, coverage);
            }
        }
        decision
    }

    /// Whether registrations need no monitor, because the device looks pages up when it moves them.
    fn follows_page_table(&self) -> bool {
        !self.cache.registrar().holds_pages()
    }

    /// What the door remembers of the memory, if that says that nothing can be kept.
    fn coverage_by(&self, account: Account, wish: &Wish) -> Option<Coverage> {
        let refused = account.refused && !self.is_spent(account, wish.range.len());
        (refused && !self.follows_page_table()).then_some(Coverage::Uncovered(None))
    }

    fn question(&self, wish: &Wish, account: Account, coverage: Coverage) -> Question {
        let bytes = wish.range.len();
        let uses = match wish.reuse {
            Reuse::Once => Uses::ONCE,
            Reuse::Times(times) => Uses::Times(times),
            Reuse::Often => Uses::Often,
            Reuse::Unknown if account.bought || self.is_spent(account, bytes) => Uses::Often,
            Reuse::Unknown => Uses::ONCE,
        };
        // One piece alone has nothing that could move meanwhile.
        let overlap = wish.overlap && bytes > self.cache.config().piece_bytes;
        let means = Means { copy_bytes: self.copy_bytes, overlap, exchange: false };
        Question { bytes, direction: wish.direction, uses, coverage, means }
    }

    /// Whether renting has cost as much by now as buying.
    fn is_spent(&self, account: Account, bytes: usize) -> bool {
        let Some(cached) = &self.costs.cached else { return false };
        account.is_full() || f64::from(account.spent) >= cached.first.at(bytes)
    }

    /// Notes what this transfer has rented, or bought.
    fn settle(&self, wish: &Wish, decision: &Decision) {
        let refused = matches!(decision.question.coverage, Coverage::Uncovered(_));
        if wish.reuse != Reuse::Unknown && !refused {
            return;
        }
        let start = wish.range.start();
        let rented = match decision.strategy {
            Strategy::Cached | Strategy::OnDemand => None,
            // Pieces that cannot be kept are rented like anything else.
            Strategy::Pieces if !refused => None,
            _ => decision.expected_ns.zip(self.costs.cached.as_ref()),
        };
        if let Some((ns, cached)) = rented {
            let more = ns - cached.again.at(wish.range.len());
            self.ledger.set(start, self.ledger.look(start).after(more));
        } else if wish.reuse == Reuse::Unknown {
            self.ledger.set(start, Account { bought: true, ..Account::default() });
        }
    }
}

/// Moves a place's parts, some at a time, and ends the use of each when it has been moved. When it
/// returns or unwinds, nothing is under way.
///
/// # Safety
///
/// As [`Door::transfer`].
unsafe fn move_all<R: Registrar, M: Monitor, V: Mover<R::Handle>>(
    place: Place<'_, R, M>,
    in_flight: usize,
    mover: &mut V,
) -> Result<(), TransferError<V::Error>> {
    // SAFETY: the place has not been handed to anything yet.
    let guard = unsafe { place.into_guard() };
    // SAFETY: the caller's promise about the target.
    let mut window = unsafe { Window::new(mover, in_flight) };
    let begun = guard.into_requests().try_for_each(|(part, kept)| {
        while window.is_full() {
            window.complete()?;
        }
        window.begin(part.handle, part.range, kept)
    });
    let completed = window.complete_all(|_| ());
    begun.and(completed).map_err(|reason| TransferError { reason, moved_bytes: 0 })
}

fn not_registered<E>(range: AddressRange, error: GetError) -> TransferError<E> {
    TransferError { reason: Reason::Register { range, error }, moved_bytes: 0 }
}

/// The reason of the first registration that was to be kept and was not.
fn why_not_kept<R: Registrar, M: Monitor>(guard: &Guard<'_, R, M>) -> Option<PerUse> {
    let of = |lease: &Lease<'_, R, M>| if lease.is_cached() { None } else { lease.per_use() };
    match guard {
        Guard::Lease(lease) => of(lease),
        Guard::Leases(leases) => leases.iter().find_map(of),
        Guard::Copy(_) => None,
    }
}

/// Whether a copy has what the registration lacked: room, or a mapping that the device takes.
fn copying_helps(error: &GetError, direction: Direction) -> bool {
    match error {
        GetError::Exhausted(_) => true,
        GetError::Register(RegisterError::BadAddress { reason, .. }) => match reason {
            BadAddress::UnsupportedMapping { .. } => true,
            BadAddress::NotWritable { .. } => direction == Direction::Leaving,
            _ => false,
        },
        GetError::Register(error) => error.is_about_room(),
        _ => false,
    }
}

/// Enough to see whether anything of a range is registered.
fn first_byte(range: AddressRange) -> AddressRange {
    AddressRange::new(range.start(), 1).unwrap_or(range)
}

impl<R: Registrar, M: Monitor> fmt::Debug for Door<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("cache", &self.cache)
            .field("copy_bytes", &self.copy_bytes)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}
