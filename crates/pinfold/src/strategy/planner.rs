//! The planner: asks for advice, acts on it, and reports where it cannot.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for methods that take an address and a length. The contract of every one
//! of them is the cache's own ([`Cache::get`]), and, because the memory may be copied: **the bytes are mapped,
//! and may be read (written, if data arrives) by this thread, until the transfer has ended.**

#![allow(unsafe_code)]

use super::advice::{Advice, Coverage, Decision, Means, Question};
use super::costs::Costs;
use super::place::{Copied, Guard, PlannedPlace};
use super::refused::Refused;
use super::tally::{PlannerStatistics, Slow, Tally};
use super::{Direction, Reuse, Strategy, Uses};
use crate::in_flight::Window;
use crate::pieces::{self, Moved, Mover, Progress, Reason, TransferError, is_about_room};
use crate::pool::{AllocateError, Pool};
use crate::{
    Access, AddressRange, BadAddress, Cache, GetError, GetRequest, Keep, Lease, Monitor, PerUse,
    RangeError, RegisterError, Registrar, Translation, Uncovered, UseCosts, Watch,
};
use std::fmt;

/// What a library calls in front of every transfer: a cache, a pool if there is one, and what each way
/// costs.
///
/// Share it by reference; any thread may use it. For local access only: rights for a peer are the
/// [cache](Cache::get)'s business.
pub struct TransferPlanner<'d, R: Registrar, M: Monitor> {
    cache: &'d Cache<R, M>,
    pool: Option<&'d Pool<R>>,
    /// The longest buffer of the pool.
    copy_bytes: usize,
    costs: Costs,
    /// Found out once: asking how many processors there are takes longer than a short transfer.
    options: pieces::Options,
    /// Memory of which the cache keeps nothing, because its changes are not seen.
    refused: Refused,
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

    /// How often a decision counts with. What is not known counts as one use, until keeping pays.
    fn uses(&self) -> Uses {
        match self.reuse {
            Reuse::Once | Reuse::Unknown => Uses::ONCE,
            Reuse::Times(times) => Uses::Times(times),
            Reuse::Often => Uses::Often,
        }
    }

    fn access(&self) -> Access {
        match self.direction {
            Direction::Leaving => Access::READ,
            Direction::Arriving => Access::WRITE,
        }
    }
}

impl<'d, R: Registrar, M: Monitor> TransferPlanner<'d, R, M> {
    /// A planner over `cache`, deciding by `costs`.
    pub fn new(cache: &'d Cache<R, M>, costs: Costs) -> Self {
        let (refused, tally) = (Refused::new(), Tally::default());
        let options = pieces::Options::for_transfer();
        Self { cache, pool: None, copy_bytes: 0, costs, options, refused, tally }
    }

    /// With `pool` to copy through, up to its longest buffer: bound its
    /// [`max_bytes`](crate::pool::PoolConfig::max_bytes) to what it may cost.
    ///
    /// # Safety
    ///
    /// The pool's registrations mean to the device of each transfer what the cache's do: they share a registrar by
    /// `Arc`, or have two of one protection domain. A slot or a key of another device would name other memory.
    ///
    /// ```compile_fail,E0133
    /// # use pinfold::{Cache, Monitor, Registrar, pool::Pool, strategy::{Costs, TransferPlanner}};
    /// # fn without_a_word<R: Registrar, M: Monitor>(cache: &Cache<R, M>, pool: &Pool<R>) {
    /// let planner = TransferPlanner::new(cache, Costs::UNMEASURED).with_pool(pool);
    /// # }
    /// ```
    #[must_use]
    pub unsafe fn with_pool(self, pool: &'d Pool<R>) -> Self {
        let longest = pool.registrar().limits().max_region_bytes;
        Self { pool: Some(pool), copy_bytes: pool.config().max_bytes.min(longest), ..self }
    }

    /// What it decides by.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// How its transfers went.
    pub fn statistics(&self) -> PlannerStatistics {
        self.tally.statistics()
    }

    /// What a transfer of this memory would be advised now, by [`transfer`](Self::transfer), with the
    /// reasons. Where the reuse is not known that is the way for a single use, which is taken until keeping
    /// the registration pays. Asks the monitor to watch the memory, to know whether it can: some microseconds.
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
        let coverage = match self.cache.monitor().watch(range) {
            Watch::Uncovered(why) => Coverage::Uncovered(Some(why)),
            Watch::Covered if self.follows_page_table() => Coverage::OnDemand,
            Watch::Covered => Coverage::Covered,
        };
        Ok(self.costs.advise(self.question(&wish, wish.uses(), coverage)))
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
    /// and no thread writes them, until the place is [completed](PlannedPlace::complete).
    pub unsafe fn send(
        &self,
        start: *const u8,
        length: usize,
        reuse: Reuse,
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
        let wish = Wish::new(start, length, Direction::Leaving, reuse)?;
        // SAFETY: the caller's promise.
        unsafe { self.place(&wish) }
    }

    /// A place for `length` bytes that arrive and belong at `start`. They are there when the place has been
    /// [completed](PlannedPlace::complete); if fewer arrived than there is room for, with
    /// [how many](PlannedPlace::complete_with). A place that is completed in a forked child delivers nothing.
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
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
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
            return unsafe { self.in_pieces(&wish, true, mover) }.map(drop);
        }
        let keep = if strategy == Strategy::PerUse { Keep::Never } else { Keep::Always };
        // SAFETY: the caller's promise.
        let guard =
            unsafe { self.guard_by(strategy, keep, &wish) }.map_err(|failed| match failed {
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
        unsafe { self.move_all(PlannedPlace::new(guard, strategy, None), mover) }
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
        // SAFETY: the caller's promise.
        let bought = unsafe { self.bought(wish, decision) };
        let often = bought.is_some().then(|| self.decide_for(wish, Uses::Often));
        let in_pieces = often.as_ref().unwrap_or(decision);
        if in_pieces.strategy == Strategy::Pieces {
            let to_keep = bought.is_some();
            // Found again where it is kept; held, it would take room from the pieces behind it.
            drop(bought);
            // SAFETY: the caller's promise.
            return unsafe { self.transfer_in_pieces(wish, in_pieces, to_keep, None, mover) };
        }
        let place = match bought {
            // SAFETY: the caller's promise.
            Some(bought) => unsafe { self.placed_bought(wish, bought) },
            // SAFETY: the caller's promise.
            None => unsafe { self.rented(wish, decision) },
        };
        let place = match place {
            // Piece by piece it needs less at a time.
            Err(error) if self.is_longer_than_a_piece(wish) && is_about_room(&error) => {
                // SAFETY: the caller's promise.
                return unsafe {
                    self.transfer_in_pieces(wish, decision, false, Some(error), mover)
                };
            }
            place => place.map_err(|error| not_registered(wish.range, error))?,
        };
        let strategy = place.strategy();
        // SAFETY: the caller's promise.
        unsafe { self.move_all(place, mover) }?;
        Ok(strategy)
    }

    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    unsafe fn transfer_in_pieces<V: Mover<R::Handle>>(
        &self,
        wish: &Wish,
        decision: &Decision,
        bought: bool,
        refused: Option<GetError>,
        mover: &mut V,
    ) -> Result<Strategy, TransferError<V::Error>> {
        // Of memory whose reuse is not known the cache decides, piece by piece.
        let to_keep = bought || wish.reuse != Reuse::Unknown;
        // SAFETY: the caller's promise.
        let moved = unsafe { self.in_pieces(wish, to_keep, mover) };
        let slow = match (refused, &moved) {
            (Some(error), _) => Some(Slow::Refused(error)),
            (None, Ok(moved)) => self.slow_pieces(wish, decision, to_keep, moved),
            (None, Err(_)) => decision.handicap.map(Slow::from),
        };
        self.tally.count(Strategy::Pieces, slow);
        moved.map(|_| Strategy::Pieces)
    }

    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    unsafe fn in_pieces<V: Mover<R::Handle>>(
        &self,
        wish: &Wish,
        to_keep: bool,
        mover: &mut V,
    ) -> Result<Moved, TransferError<V::Error>> {
        let options = pieces::Options { to_keep, ..self.options };
        let progress = Progress::new();
        let start = std::ptr::with_exposed_provenance(wish.range.start());
        let (length, access) = (wish.range.len(), wish.access());
        // SAFETY: the caller's promise.
        unsafe { pieces::transfer(self.cache, start, length, access, &options, &progress, mover) }
    }

    /// Why pieces were slow: they were to be kept, and cannot be.
    fn slow_pieces(
        &self,
        wish: &Wish,
        decision: &Decision,
        to_keep: bool,
        moved: &Moved,
    ) -> Option<Slow> {
        let covered = !matches!(decision.question.coverage, Coverage::Uncovered(_));
        let uncovered = (to_keep && covered && moved.found_at_once == 0)
            .then(|| self.uncovered(wish.range))
            .flatten();
        let Some(why) = uncovered else { return decision.handicap.map(Slow::from) };
        self.refused.note(wish.range.start(), true);
        Some(Slow::Uncovered(Some(why)))
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
    unsafe fn place(&self, wish: &Wish) -> Result<PlannedPlace<'d, R, M>, GetError> {
        let decision = self.decide(wish);
        // SAFETY: the caller's promise.
        match unsafe { self.bought(wish, &decision) } {
            // SAFETY: the caller's promise.
            Some(bought) => unsafe { self.placed_bought(wish, bought) },
            // SAFETY: the caller's promise.
            None => unsafe { self.rented(wish, &decision) },
        }
    }

    /// A place by what was decided.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn rented(
        &self,
        wish: &Wish,
        decision: &Decision,
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
        // SAFETY: the caller's promise.
        let place = match unsafe { self.guard(decision, wish) } {
            Ok(guard) => {
                self.placed(wish, decision.strategy, decision.handicap.map(Slow::from), guard)
            }
            // SAFETY: the caller's promise.
            Err(Failed::Pool(error)) => unsafe { self.without_pool(wish, decision, error) }?,
            // SAFETY: the caller's promise.
            Err(Failed::Get(error)) => unsafe { self.without_registration(wish, error) }?,
        };
        self.tally.count(place.strategy(), place.slow());
        Ok(place)
    }

    /// Leases of what is kept, or is worth being kept by now though this transfer alone is not: of the whole
    /// range, or of its pieces up to the first that was missing. For a caller who does not know the reuse, and for
    /// memory of which nothing was kept; the cache notes what the transfer costs otherwise.
    ///
    /// An error of the registrar or the budget is none here: the transfer goes another way.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn bought(&self, wish: &Wish, decision: &Decision) -> Option<Guard<'d, R, M>> {
        let costs = self.prices(wish, decision)?;
        // SAFETY: the caller's promise.
        unsafe { self.buy(wish, costs) }
    }

    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn buy(&self, wish: &Wish, costs: UseCosts) -> Option<Guard<'d, R, M>> {
        let piece_bytes = self.cache.config().piece_bytes;
        if wish.range.len() <= piece_bytes {
            // SAFETY: the caller's promise.
            let lease = unsafe { self.request(wish.range, wish.access()).get_if_worth(costs) };
            return lease.ok()?.map(Guard::Lease);
        }
        let mut leases = Vec::new();
        for piece in wish.range.pieces(piece_bytes) {
            // SAFETY: the caller's promise.
            if let Some(lease) = unsafe { self.request(piece, wish.access()).get_if_cached() } {
                leases.push(lease);
                continue;
            }
            // SAFETY: the caller's promise.
            let lease = unsafe { self.request(piece, wish.access()).get_if_worth(costs) };
            leases.push(lease.ok()??);
            break;
        }
        Some(Guard::Leases(leases))
    }

    /// What the cache decides by whether to keep; `None` where nothing is to be decided, or nothing better
    /// than what was decided.
    fn prices(&self, wish: &Wish, decision: &Decision) -> Option<UseCosts> {
        let refused = matches!(decision.question.coverage, Coverage::Uncovered(_));
        let asks = wish.reuse == Reuse::Unknown || refused && wish.reuse != Reuse::Once;
        let rents = match decision.strategy {
            Strategy::Cached | Strategy::OnDemand => false,
            // The cache decides itself whether to keep them.
            Strategy::Pieces => refused,
            _ => true,
        };
        let (rent, cached) = (decision.expected_ns?, self.costs.cached.as_ref()?);
        let (first, again) = (cached.first.at(wish.range.len()), cached.again.at(wish.range.len()));
        // Saturates, at zero for what costs nothing.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let whole = |ns: f64| ns as u64;
        let (per_use, hit, keeping) = (whole(rent), whole(again), whole(first - again));
        (asks && rents && rent > again).then_some(UseCosts { per_use, hit, keeping })
    }

    /// A place of what was bought, and of the rest of the range; a copy if the rest is not to be had.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn placed_bought(
        &self,
        wish: &Wish,
        bought: Guard<'d, R, M>,
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
        let kept = if self.follows_page_table() { Strategy::OnDemand } else { Strategy::Cached };
        let whole = match bought {
            // SAFETY: the caller's promise.
            Guard::Leases(leases) => unsafe { self.complete(wish, leases) }.map(Guard::Leases),
            whole => Ok(whole),
        };
        let place = match whole {
            Ok(guard) => self.placed(wish, kept, None, guard),
            // SAFETY: the caller's promise.
            Err(error) => unsafe { self.without_registration(wish, error) }?,
        };
        self.tally.count(place.strategy(), place.slow());
        Ok(place)
    }

    /// `leases` of the first pieces, and those of the rest.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn complete(
        &self,
        wish: &Wish,
        mut leases: Vec<Lease<'d, R, M>>,
    ) -> Result<Vec<Lease<'d, R, M>>, GetError> {
        for piece in wish.range.pieces(self.cache.config().piece_bytes).skip(leases.len()) {
            // SAFETY: the caller's promise.
            leases.push(unsafe { self.request(piece, wish.access()).to_keep().get() }?);
        }
        Ok(leases)
    }

    /// The place, said to be slow where it is.
    fn placed(
        &self,
        wish: &Wish,
        strategy: Strategy,
        slow: Option<Slow>,
        guard: Guard<'d, R, M>,
    ) -> PlannedPlace<'d, R, M> {
        let is_to_keep = matches!(strategy, Strategy::Cached | Strategy::OnDemand);
        if !is_to_keep && strategy != Strategy::PerUse {
            return PlannedPlace::new(guard, strategy, slow);
        }
        let not_kept = why_not_kept(&guard);
        if !is_to_keep {
            if not_kept.is_none() {
                self.refused.note(wish.range.start(), false);
            }
            return PlannedPlace::new(guard, strategy, slow);
        }
        let uncovered = matches!(not_kept, Some(PerUse::Uncovered(_)));
        self.refused.note(wish.range.start(), uncovered);
        match not_kept {
            None => PlannedPlace::new(guard, strategy, slow),
            // The cache's own decision, where nothing was measured to decide by.
            Some(PerUse::NotAdmitted) => PlannedPlace::new(guard, Strategy::PerUse, slow),
            Some(why) => PlannedPlace::new(guard, Strategy::PerUse, Some(Slow::NotKept(why))),
        }
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
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
        let means = Means { copy_bytes: 0, overlap: false, exchange: false };
        let instead = self.costs.decide(Question { means, ..decision.question });
        // What the copy would have cost was noted.
        let noted = self.prices(wish, decision).map_or(0, |costs| costs.per_use - costs.hit);
        let costs = self.prices(wish, &instead).map(|costs| {
            let per_use = costs.per_use.saturating_sub(noted);
            UseCosts { per_use, ..costs }
        });
        // SAFETY: the caller's promise.
        if let Some(bought) = costs.and_then(|costs| unsafe { self.buy(wish, costs) }) {
            // SAFETY: the caller's promise.
            return unsafe { self.placed_bought(wish, bought) };
        }
        // SAFETY: the caller's promise.
        match unsafe { self.guard(&instead, wish) } {
            Ok(guard) => {
                let slow = instead.handicap.map(Slow::from);
                Ok(self.placed(wish, instead.strategy, slow, guard).slowed_by(Slow::Pool(error)))
            }
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
    ) -> Result<PlannedPlace<'d, R, M>, GetError> {
        if wish.range.len() > self.copy_bytes || !copying_helps(&error, wish.direction) {
            return Err(error);
        }
        // SAFETY: the caller's promise.
        let copied = unsafe { self.guard_by(wish.direction.copying(), Keep::Never, wish) };
        let guard = copied.map_err(|_| error)?;
        Ok(PlannedPlace::new(guard, wish.direction.copying(), Some(Slow::Refused(error))))
    }

    /// A place by what was decided, pieces apart.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn guard(&self, decision: &Decision, wish: &Wish) -> Result<Guard<'d, R, M>, Failed> {
        let unmeasured = decision.expected_ns.is_none();
        let keep = match (decision.strategy, wish.reuse) {
            // Nothing was measured. What could not be watched may be by now: the cache decides when to try.
            (Strategy::PerUse, Reuse::Times(_) | Reuse::Often | Reuse::Unknown) if unmeasured => {
                Keep::WhenItPays
            }
            (Strategy::PerUse, _) => Keep::Never,
            // Nor is anything known.
            (_, Reuse::Unknown) if unmeasured => Keep::WhenItPays,
            _ => Keep::Always,
        };
        // SAFETY: the caller's promise.
        unsafe { self.guard_by(decision.strategy, keep, wish) }
    }

    /// A place by one way.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn guard_by(
        &self,
        strategy: Strategy,
        keep: Keep,
        wish: &Wish,
    ) -> Result<Guard<'d, R, M>, Failed> {
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
            _ => unsafe { self.lease(wish, keep) }.map_err(Failed::Get),
        }
    }

    /// Registered memory, cut where it is too long for one lease.
    ///
    /// # Safety
    ///
    /// As [`place`](Self::place).
    unsafe fn lease(&self, wish: &Wish, keep: Keep) -> Result<Guard<'d, R, M>, GetError> {
        let piece_bytes = self.cache.config().piece_bytes;
        let lease = |piece| {
            let request = self.request(piece, wish.access());
            let request = match keep {
                Keep::Never => request.once(),
                Keep::WhenItPays => request,
                Keep::Always => request.to_keep(),
            };
            // SAFETY: the caller's promise.
            unsafe { request.get() }
        };
        if wish.range.len() <= piece_bytes {
            return lease(wish.range).map(Guard::Lease);
        }
        let leases = wish.range.pieces(piece_bytes).map(lease);
        leases.collect::<Result<_, _>>().map(Guard::Leases)
    }

    fn request(&self, range: AddressRange, access: Access) -> GetRequest<'d, R, M> {
        let start = std::ptr::with_exposed_provenance(range.start());
        self.cache.request(start, range.len(), access)
    }

    /// What to do with memory of which the planner knows what its caller says, and whether it was refused.
    fn decide(&self, wish: &Wish) -> Decision {
        self.decide_for(wish, wish.uses())
    }

    fn decide_for(&self, wish: &Wish, uses: Uses) -> Decision {
        let coverage = if self.follows_page_table() {
            Coverage::OnDemand
        } else if self.refused.has(wish.range.start()) {
            Coverage::Uncovered(None)
        } else {
            Coverage::Covered
        };
        self.costs.decide(self.question(wish, uses, coverage))
    }

    /// Whether registrations need no monitor, because every device looks pages up when it moves them.
    fn follows_page_table(&self) -> bool {
        self.cache.registrar().translation() == Translation::OnDemand
    }

    /// One piece alone has nothing that could move meanwhile.
    fn is_longer_than_a_piece(&self, wish: &Wish) -> bool {
        wish.range.len() > self.cache.config().piece_bytes
    }

    fn question(&self, wish: &Wish, uses: Uses, coverage: Coverage) -> Question {
        let bytes = wish.range.len();
        let overlap = wish.overlap && self.is_longer_than_a_piece(wish);
        let means = Means { copy_bytes: self.copy_bytes, overlap, exchange: false };
        Question { bytes, direction: wish.direction, uses, coverage, means }
    }

    /// Moves a place's parts, some at a time, and ends the use of each when it has been moved. When it
    /// returns or unwinds, nothing is under way.
    ///
    /// # Safety
    ///
    /// As [`transfer`](Self::transfer).
    unsafe fn move_all<V: Mover<R::Handle>>(
        &self,
        place: PlannedPlace<'_, R, M>,
        mover: &mut V,
    ) -> Result<(), TransferError<V::Error>> {
        let is_forked = || self.cache.is_forked();
        // SAFETY: the place has not been handed to anything yet.
        let guard = unsafe { place.into_guard() };
        // SAFETY: the caller's promise about the target.
        let mut window = unsafe { Window::new(mover, self.options.in_flight, &is_forked) };
        let mut first = None;
        let begun = guard.into_requests().try_for_each(|(part, kept)| {
            first.get_or_insert(part.range.start());
            while window.is_full() {
                window.complete()?;
            }
            // SAFETY: a part is of what is registered for it, a lease's or a pool's buffer, and comes with that; its
            // memory is the mover's to move until this returns, by the caller's promise.
            unsafe { window.begin(part.handle, part.range, kept) }
        });
        // Whatever has stopped it, the window tells.
        drop(begun);
        let outcome = window.conclude(|_| ());
        let moved_bytes = first.map_or(0, |start| window.moved_to().saturating_sub(start));
        outcome.map_err(|reason| TransferError { reason, moved_bytes })
    }
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

impl<R: Registrar, M: Monitor> fmt::Debug for TransferPlanner<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferPlanner")
            .field("cache", &self.cache)
            .field("copy_bytes", &self.copy_bytes)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}
