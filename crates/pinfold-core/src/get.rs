//! What a caller asks of a get, and the life of one: is anything new, is it there, otherwise register. A range of any length
//! is a sequence of leases.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the methods that take an address and a length, whose contract the
//! [cache's module](crate::cache) has, and to pass the caller's word on.

#![allow(unsafe_code)]

use crate::admission::UseCosts;
use crate::error::GetError;
use crate::events::Checkup;
use crate::lease::{Lease, Parts};
use crate::miss::{Answer, Begun, Miss, Outcome, Uses, Worth};
use crate::monitor::{Lost, Monitor};
use crate::region::{Ask, Terms, Want};
use crate::registering::Promised;
use crate::registrar::Registrar;
use crate::shared::{Hit, Shared, operations};
use crate::{Access, AddressRange};
use std::fmt;
use std::time::Instant;

/// A get with something to say about it; made by [`Cache::request`](crate::Cache::request) and
/// [`Checked::request`](crate::Checked::request).
///
/// ```no_run
/// # use pinfold_core::{Access, Cache, GetError, Monitor, Registrar};
/// # unsafe fn f<R: Registrar, M: Monitor>(cache: &Cache<R, M>, at: *const u8) -> Result<(), GetError> {
/// // SAFETY: the caller may let the device read these bytes while the lease lives.
/// let lease = unsafe { cache.request(at, 65536, Access::READ).to_keep().get() }?;
/// # drop(lease);
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is leased before `get`, `get_if_cached`, `get_if_worth` or `pieces`"]
pub struct GetRequest<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    ask: Ask,
    uses: Uses,
    until: Option<Instant>,
    /// Whether the one who asks has checked the monitor.
    checked: bool,
}

impl<'c, R: Registrar, M: Monitor> GetRequest<'c, R, M> {
    #[inline]
    pub(crate) fn new(shared: &'c Shared<R, M>, ask: Ask, checked: bool) -> Self {
        Self { shared, ask, uses: Uses::Unknown, until: None, checked }
    }

    /// For one use: a registration that is there serves it, else one is made within the budget that ends
    /// with the lease.
    ///
    /// Memory that is registered so is not watched, and later changes of its mapping cost what they did.
    #[inline]
    pub fn once(self) -> Self {
        Self { uses: Uses::One, ..self }
    }

    /// For memory that the caller means to use often before it changes: it is kept from this use on,
    /// however seldom it was used before.
    #[inline]
    pub fn to_keep(self) -> Self {
        Self { uses: Uses::Many, ..self }
    }

    /// For memory that the monitor cannot see: the registration is kept, and the caller calls
    /// [`Cache::invalidate`](crate::Cache::invalidate) for every change of the mapping before any caller asks
    /// for it again.
    ///
    /// Only gets that vouch as well are served by such a registration. None is kept that was made while
    /// the monitor had a change [pending](Monitor::change_pending) there, told to a feed for example, nor once
    /// it is lost.
    #[inline]
    pub fn vouched(mut self) -> Self {
        self.ask.terms.vouched = true;
        self
    }

    /// Waits before suspended memory until `deadline` at the most, and then fails with [`GetError::Suspended`]; without
    /// this, until the [suspension's own](crate::SuspensionTerms::deadline). With one that is over nothing is waited for:
    /// a thread that polls asks again later.
    ///
    /// Only that is bounded. A registration takes as long as the device takes, and a get of bytes that another thread is
    /// registering waits for that. A hit waits for nothing.
    #[inline]
    pub fn wait_until(self, deadline: Instant) -> Self {
        Self { until: Some(deadline), ..self }
    }

    /// The lease: of a registration that is there, or of a new one. Costs what
    /// [`Cache::get`](crate::Cache::get) costs.
    ///
    /// # Errors
    ///
    /// As [`Cache::get`](crate::Cache::get).
    ///
    /// # Safety
    ///
    /// As [`Cache::get`](crate::Cache::get); and of a [vouched](Self::vouched) request, the word is kept.
    #[inline]
    pub unsafe fn get(self) -> Result<Lease<'c, R, M>, GetError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.checked {
                true => Lookup(self.shared).get_checked(self.ask, self.uses, self.until),
                false => Lookup(self.shared).get(self.ask, self.uses, self.until),
            }
        }
    }

    /// The lease, only if a registration that serves it is there: nothing is registered.
    ///
    /// `None` also where [`get`](Self::get) would say that the arguments make no sense. Costs what a hit
    /// costs, found or not; behind a change of any memory, what applying it costs as well.
    ///
    /// # Safety
    ///
    /// As [`get`](Self::get).
    pub unsafe fn get_if_cached(self) -> Option<Lease<'c, R, M>> {
        if !self.checked {
            Lookup(self.shared).bring_up_to_date().ok()?;
        } else if self.shared.monitor.forked() {
            // A fork since the check makes every registration the parent's.
            return None;
        }
        Lookup(self.shared).hit_asked(self.ask).map(|hit| Lease::of_hit(self.shared, hit, self.ask))
    }

    /// For a caller that can do without: copy the bytes, say. The lease where a registration that serves it is
    /// there, or where keeping one pays by now; `None` where doing without is cheaper still, and as long as another thread
    /// registers the bytes to keep them. What this use then costs counts as paid, if no other thread registers them, for the range
    /// that would be registered for these bytes, in the [account](crate::admission) into which gets of that range with these rights
    /// pay, too. All rights have that in common until they are refused; those that were have one of their own.
    ///
    /// `costs` are the caller's: `per_use` is what it does without the lease. Where they say that nothing is
    /// cheaper than that, nothing is asked. The lease's registration may yet not be
    /// [kept](Lease::is_cached), for example where the monitor cannot see the memory; then the next such
    /// try is paid for anew, and dearer, as all that is kept in vain. For rights that are
    /// [never kept](crate::Config::cache_remote) nothing is paid: there is a lease where doing without is about as dear as
    /// keeping, or dearer, by `costs`.
    ///
    /// [`Keep::Never`](crate::Keep::Never) keeps nothing; otherwise what [`Config::keep`](crate::Config::keep) says
    /// decides nothing here. Costs what a hit costs where there is one, otherwise the writer's lock, a second look there and some
    /// ten nanoseconds more.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get): of a registration that was to be kept.
    ///
    /// # Safety
    ///
    /// As [`get`](Self::get).
    pub unsafe fn get_if_worth(self, costs: UseCosts) -> Result<Option<Lease<'c, R, M>>, GetError> {
        // SAFETY: the caller's promise.
        if let Some(lease) = unsafe { self.same().get_if_cached() } {
            return Ok(Some(lease));
        }
        let Ask { start, length, terms } = self.ask;
        let want = Want::new(start, length, terms)?;
        Miss(self.shared).check_length(&want)?;
        let (range, whole) = match Miss(self.shared).worth_keeping(&want, costs)? {
            Worth::There(lease) => return Ok(Some(lease)),
            Worth::Keeping { range, whole } => (range, whole),
            Worth::Nothing => return Ok(None),
        };
        let shared = self.shared;
        // SAFETY: the caller's promise.
        let lease = unsafe { Self { uses: Uses::Worth(costs, range), ..self }.get() };
        let outcome = match &lease {
            // Nothing was tried: what was paid is there when it goes on.
            Err(GetError::Suspended { .. } | GetError::AwaitsItself { .. }) => {
                return lease.map(Some);
            }
            // Another thread may have registered more meanwhile.
            Ok(lease) if lease.is_cached() && lease.registered().contains(&range) => Outcome::Had,
            Ok(lease) if lease.is_cached() => Outcome::PartHad,
            _ => Outcome::NotHad,
        };
        Miss(shared).note_worth(&want, (range, whole), costs, outcome)?;
        lease.map(Some)
    }

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

    fn same(&self) -> Self {
        Self { ..*self }
    }

    /// The same of another range, which lies in this one.
    fn part(&self, range: AddressRange) -> Self {
        let ask = Ask::new(range.start(), range.len(), self.ask.terms);
        Self { ask, ..*self }
    }

    /// Its range.
    ///
    /// # Errors
    ///
    /// For arguments that name no bytes or no rights.
    fn range(&self) -> Result<AddressRange, GetError> {
        let Ask { start, length, terms } = self.ask;
        Want::new(start, length, terms).map(|want| want.range)
    }

    /// What a piece is at most, in bytes.
    fn piece_bytes(&self) -> usize {
        self.shared.config.piece_bytes
    }
}

// --- in pieces ----------------------------------------------------------------------------------

/// The leases of a long range, registered one after the other as they are asked for: the
/// transfer of one piece can fly while the next is registered.
///
/// Pieces are cut at addresses that are multiples of
/// [`Config::piece_bytes`](crate::Config::piece_bytes), so another range of the same buffer finds
/// the same pieces again. Each piece makes its own monitor check, as a get does, because the memory may change
/// between two of them, unless they come from [`Checked::request`](crate::Checked::request).
/// After an error the iterator goes on with the next piece.
#[must_use = "pieces are registered as they are asked for"]
#[derive(Debug)]
pub struct Pieces<'c, R: Registrar, M: Monitor> {
    /// What was asked for, as a whole.
    whole: GetRequest<'c, R, M>,
    rest: Option<AddressRange>,
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

impl<R: Registrar, M: Monitor> fmt::Debug for GetRequest<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ask, uses, until, checked, .. } = self;
        f.debug_struct("GetRequest")
            .field("ask", ask)
            .field("uses", uses)
            .field("until", until)
            .field("checked", checked)
            .finish_non_exhaustive()
    }
}

operations! {
    /// The life of a get up to the slow path.
    Lookup
}

impl<'c, R: Registrar, M: Monitor> Lookup<'c, R, M> {
    /// What a get asks for, whether or not it makes sense.
    ///
    /// Remote uses are served by exactly their own rights, so the registrar's word on what those
    /// are comes first. Not in a forked child, where it is the parent's: the get that follows says so.
    #[inline(always)]
    pub(crate) fn wish(self, start: *const u8, length: usize, access: Access) -> Ask {
        let asks = access.is_remote() && !self.0.is_forked();
        let access = if asks { self.0.registrar.granted(access) } else { access };
        Ask::new(start as usize, length, Terms { access, vouched: false })
    }

    /// Everything that changed before this call is applied.
    ///
    /// # Errors
    ///
    /// [`GetError::Forked`] in a forked child.
    pub(crate) fn bring_up_to_date(self) -> Result<(), GetError> {
        let seen = self.0.monitor.check();
        match seen {
            Ok(seen) if self.0.has_applied(seen) => return Ok(()),
            Err(Lost::Forked) => return Err(GetError::Forked),
            _ => self.0.catch_up_with_all(Checkup::of(seen))?,
        }
        // Again, because a callback that became due with the last of it may have forked.
        if self.0.monitor.forked() { Err(GetError::Forked) } else { Ok(()) }
    }

    /// The life of a get.
    ///
    /// # Safety
    ///
    /// The contract of the cache's module.
    #[inline(always)]
    pub(crate) unsafe fn get(
        self,
        ask: Ask,
        uses: Uses,
        until: Option<Instant>,
    ) -> Result<Lease<'c, R, M>, GetError> {
        let answer = if self.needs_no_answer(ask, uses) {
            Answer::Needless
        } else {
            let seen = self.0.monitor.check();
            let is_current = matches!(seen, Ok(seen) if self.0.has_applied(seen));
            if is_current && let Some(hit) = self.hit_asked(ask) {
                return Ok(Lease::of_hit(self.0, hit, ask));
            }
            if is_current { Answer::Current } else { Answer::News(seen) }
        };
        let begun = Begun { uses, until, answer };
        // SAFETY: the caller's promise.
        unsafe { self.get_asked_slowly(ask.start, ask.length, ask.terms, begun) }
            .map(|parts| Lease::of_parts(self.0, parts))
    }

    /// The same behind a check that the caller made.
    ///
    /// # Safety
    ///
    /// The contract of the cache's module.
    #[inline(always)]
    pub(crate) unsafe fn get_checked(
        self,
        ask: Ask,
        uses: Uses,
        until: Option<Instant>,
    ) -> Result<Lease<'c, R, M>, GetError> {
        // A fork since the check makes every registration the parent's.
        if !self.0.monitor.forked()
            && let Some(hit) = self.hit_asked(ask)
        {
            return Ok(Lease::of_hit(self.0, hit, ask));
        }
        let answer = if self.needs_no_answer(ask, uses) { Answer::Needless } else { Answer::None };
        let begun = Begun { uses, until, answer };
        // SAFETY: the caller's promise.
        unsafe { self.get_asked_slowly(ask.start, ask.length, ask.terms, begun) }
            .map(|parts| Lease::of_parts(self.0, parts))
    }

    /// Whether a get does without the monitor's answer. Asked only where an answer takes long.
    ///
    /// **Why it may.** The answer says whether the regions are to be believed that the index names. It names none of these
    /// bytes; should it name one under the lock, or should what is registered be kept, the monitor is asked behind all
    /// ([`Miss`]). What is registered for this use is as new as its pages.
    ///
    /// What is bound to be kept asks at once, and of the others one in eight ([`is_sampled`](Shared::is_sampled)).
    #[inline(always)]
    fn needs_no_answer(self, ask: Ask, uses: Uses) -> bool {
        self.0.spares_checks && self.is_surely_a_miss(ask.start, ask.length, ask.terms, uses)
    }

    /// Whether nothing that is cached can serve the bytes, and they may be registered for this use. Not in a forked child:
    /// another thread may have been at work on the index, and the pages of its copy are not all of one moment.
    ///
    /// The arguments come one by one, as of [`hit`](Shared::hit).
    #[inline(never)]
    fn is_surely_a_miss(self, start: usize, length: usize, terms: Terms, uses: Uses) -> bool {
        let ask = Ask::new(start, length, terms);
        let may_be_rented = match uses {
            Uses::One => true,
            Uses::Unknown => self.0.rents(),
            Uses::Many | Uses::Worth(..) => false,
        };
        may_be_rented
            && !terms.vouched
            && !self.0.monitor.forked()
            && self.makes_sense(ask)
            && !self.0.is_named(ask)
    }

    /// A hit, if the arguments make sense; if not, the slow path says why.
    #[inline(always)]
    fn hit_asked(self, ask: Ask) -> Option<Hit<'c, R::Handle>> {
        if self.makes_sense(ask) { self.0.hit(ask) } else { None }
    }

    /// Whether it names bytes and rights that the device can be asked for.
    #[inline(always)]
    fn makes_sense(self, ask: Ask) -> bool {
        // One compare for "not zero and not above".
        let is_length = ask.length.wrapping_sub(1) < self.0.limits.max_region_bytes;
        is_length && ask.has_rights()
    }

    /// The parts of an [`Ask`], one by one: see [`hit`](Shared::hit).
    ///
    /// # Safety
    ///
    /// The contract of the cache's module.
    #[cold]
    unsafe fn get_asked_slowly(
        self,
        start: usize,
        length: usize,
        terms: Terms,
        begun: Begun,
    ) -> Result<Parts<'c, R::Handle>, GetError> {
        let want = Want::new(start, length, terms)?;
        // SAFETY: the caller's promise.
        let promised = unsafe { Promised::new(want) };
        Miss(self.0).get_slowly(&promised, begun).map(Lease::into_parts)
    }
}
