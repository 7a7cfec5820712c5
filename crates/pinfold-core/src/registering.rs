//! One registration under way: listed among the flights, registered with no lock held, then found by hits or kept for its one use.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the registrar, on the word of the get's caller that the memory may be given to
//! the device ([`Promised`]), and to fill a place that it has just taken for itself.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::admission::Admission;
use crate::budget::Amount;
use crate::clock::since;
use crate::error::PerUse;
use crate::flight::{Flight, Landing};
use crate::foreign;
use crate::index::{BlockWalk, can_hold};
use crate::lease::Lease;
use crate::monitor::{Forked, Monitor, Watch};
use crate::region::{HitCount, Lists, Region, Terms, Want};
use crate::registrar::{RegisterError, Registrar};
use crate::room::{Room, check_sum};
use crate::several::Made;
use crate::shared::{Deferred, Pin, SLICE, Shared, Writer, operations};
use std::sync::Arc;

/// What a get wants, on its caller's word that the device may use the bytes as the terms say.
pub(crate) struct Promised(Want);

impl Promised {
    /// # Safety
    ///
    /// The contract of the cache's module, until the lease ends that a get of this gives.
    pub(crate) const unsafe fn new(want: Want) -> Self {
        Self(want)
    }

    pub(crate) const fn want(&self) -> &Want {
        &self.0
    }
}

/// What is decided of a registration before it is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    ForOneUse(PerUse),
    /// The same, because keeping it has not paid yet: so much is paid for it.
    Rent(u64),
    Keep,
    /// The same, though no caller asked for it: because that seems harmless, or all is kept.
    KeepUnasked,
    /// The same, for other rights than those that were bought.
    Join,
    /// The same, on its own account, which is told of its hits when that is over.
    Buy(HitCount),
}

impl Decision {
    pub(crate) const fn per_use(self) -> Option<PerUse> {
        match self {
            Self::ForOneUse(why) => Some(why),
            Self::Rent(_) => Some(PerUse::NotAdmitted),
            Self::Keep | Self::KeepUnasked | Self::Join | Self::Buy(_) => None,
        }
    }

    pub(crate) const fn is_purchase(self) -> bool {
        matches!(self, Self::Buy(_))
    }

    /// Whether it was in vain if it cannot be had: what a caller asked for is kept on no account.
    pub(crate) const fn is_judged(self) -> bool {
        matches!(self, Self::Buy(_) | Self::Join | Self::KeepUnasked)
    }

    /// What was bought, if it was, is not tried, or not kept.
    pub(crate) fn take_back(self, admission: &mut Admission, range: AddressRange, terms: Terms) {
        if self.is_purchase() {
            admission.retract(range, terms);
        }
    }

    /// What was [judged](Self::is_judged) cannot be had.
    #[cold]
    pub(crate) fn abandon(self, admission: &mut Admission, range: AddressRange, terms: Terms) {
        if matches!(self, Self::Join) {
            admission.spend(range, terms);
        }
        admission.refuse(range, terms);
    }
}

/// What is to be registered, and what it will count.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) range: AddressRange,
    pub(crate) terms: Terms,
    pub(crate) amount: Amount,
}

/// When a registration was measured: how long it took to watch, to register and to look what it counts; and when it became a lease.
#[derive(Clone, Copy)]
pub(crate) struct Flown {
    pub(crate) took: Option<u64>,
    pub(crate) landed: Option<u64>,
}

/// Why a registration did not become a lease.
#[derive(Clone, Copy)]
pub(crate) enum Unlanded {
    Refused(RegisterError),
    /// The system counted so much for it, and the budget has no more than was planned: it was deregistered.
    CountsMore(Amount),
}

impl Unlanded {
    /// Whether the same is tried again, if room is made.
    pub(crate) const fn is_tried_again(&self) -> bool {
        match self {
            Self::Refused(error) => error.is_about_room(),
            Self::CountsMore(_) => true,
        }
    }
}

impl From<RegisterError> for Unlanded {
    fn from(error: RegisterError) -> Self {
        Self::Refused(error)
    }
}

operations! {
    /// What becomes of a registration.
    Registering
}

impl<'c, R: Registrar, M: Monitor> Registering<'c, R, M> {
    /// Takes a place and announces the registration, for which the budget has been taken.
    #[inline]
    pub(crate) fn enlist(
        self,
        writer: &mut Writer,
        plan: Plan,
        decision: Decision,
        is_timed: bool,
    ) -> Option<Enlisted<'c, R, M>> {
        let Plan { range, terms, .. } = plan;
        let number = self.take_place(writer)?;
        let region = self.0.region(number)?;
        let born = writer.unapplied.made();
        writer.flights.push(match decision.per_use() {
            None => Flight::new(range, terms, number, born),
            Some(_) => Flight::for_one_use(range, terms, number, born),
        });
        let listed = Listed::new(self.0, region, Want { range, terms });
        Some(Enlisted {
            listed,
            plan,
            decision,
            is_timed,
            has_landed: false,
            is_tried_again: false,
            is_left: false,
        })
    }

    /// Why a registration of `range`, begun now, must not be kept.
    pub(crate) fn per_use(self, want: &Want, range: AddressRange) -> Option<PerUse> {
        if let Some(why) = self.per_use_by_rights(want) {
            return Some(why);
        }
        if !can_hold(range) {
            return Some(PerUse::Unindexed);
        }
        // A caller that vouches reports every change, and may be about to make one that it has reported.
        let watch = if want.terms.vouched { Watch::Covered } else { self.0.monitor.watch(range) };
        match watch {
            Watch::Uncovered(why) => Some(PerUse::Uncovered(why)),
            Watch::Covered => self.0.monitor.change_pending(range).then_some(PerUse::ChangePending),
        }
    }

    /// What is never kept has no part in what its pages were paid for: local uses of the same range are.
    #[inline]
    pub(crate) fn per_use_by_rights(self, want: &Want) -> Option<PerUse> {
        let access = want.terms.access;
        (access.is_remote() && !self.0.config.cache_remote).then_some(PerUse::Remote(access))
    }

    /// A free place of the region arena. `None` when four billion are in use.
    pub(crate) fn take_place(self, writer: &mut Writer) -> Option<u32> {
        if let Some(number) = writer.lists.take_place() {
            return Some(number);
        }
        let number = writer.made_places;
        writer.made_places = number.checked_add(1)?;
        self.0.index.make_place(number, Region::new)?;
        writer.lists.make(number);
        Some(number)
    }

    /// Enters a filled place into the index and the order of eviction: hits find it from now on,
    /// unless part of it is suspended. A long one is named in the index already.
    pub(crate) fn enter(
        self,
        writer: &mut Writer,
        flight: &Flight,
        region: &Region<R::Handle>,
        is_entered_ahead: bool,
    ) -> Result<(), PerUse> {
        let is_named = match BlockWalk::of_long(flight.range, flight.number) {
            Some(_) => is_entered_ahead,
            None => self.0.index.insert(&mut writer.recycler, flight.range, flight.number),
        };
        if !is_named {
            return Err(PerUse::Unindexed);
        }
        let suspended = writer.is_suspended(region);
        writer.order.join(&mut writer.lists, region, suspended);
        Ok(())
    }

    /// Keeps a registration for its one lease.
    pub(crate) fn keep_per_use(
        self,
        writer: &mut Writer,
        flight: &Flight,
        region: &Region<R::Handle>,
        why: PerUse,
    ) {
        // With a discard pending it is unknown whether the pages are still the right ones.
        let doubtful = flight.tainted || why == PerUse::ChangePending;
        writer.lists.keep_per_use(region, doubtful);
        writer.per_use.insert(flight.number, why);
        writer.counts.per_use += 1;
        match why {
            PerUse::Asked => {}
            PerUse::NotAdmitted => writer.counts.not_admitted += 1,
            why => writer.counts.per_use_reason = Some(why),
        }
    }

    /// Gives up the regions that the new one makes needless: every use that they would serve, it
    /// serves as well. A slice of them, because the lock is held; what is left is right as well, and
    /// goes when room is needed.
    pub(crate) fn supersede(self, writer: &mut Writer, flight: &Flight) {
        let mut needless = Vec::new();
        self.0.index.overlapping_part(flight.range.into(), SLICE, |region| {
            if region.number != flight.number && is_needless(region, flight) {
                needless.push(region.number);
            }
        });
        if needless.is_empty() {
            return;
        }
        // A region in several blocks was named for each of them.
        needless.sort_unstable();
        needless.dedup();
        for &number in &needless {
            // One of the same range and account, with fewer rights, gives its hits over to the new one.
            let gives_over = |old: &Region<R::Handle>, new: &Region<R::Handle>| {
                let is_one_account = old.range() == Some(flight.range)
                    && !writer.admission.is_bought_alone(flight.range, old.terms());
                is_one_account && new.bought_hits().is_none()
            };
            match self.0.region(number).zip(self.0.region(flight.number)) {
                Some((old, new)) if gives_over(old, new) => {
                    old.take_bought().into_iter().for_each(|hits| new.set_bought(hits));
                }
                _ => self.0.note_kept_no_more(writer, number),
            }
            self.0.unpublish(writer, number, Lists::supersede);
        }
        writer.counts.superseded += needless.len() as u64;
    }
}

/// A registration under way, a new one or a renewed one: among the flights, so that a change meanwhile is noticed,
/// until it [leaves](Self::leave). When this ends, those go on that wait for it, and then the callbacks run that became
/// due as it landed: they may wait for those.
pub(crate) struct Listed<'c, R: Registrar, M: Monitor> {
    pub(crate) shared: &'c Shared<R, M>,
    pub(crate) region: &'c Region<R::Handle>,
    /// What the region is to be.
    filling: Want,
    /// Where gets wait for the end of this, if any do.
    awaited: Option<Arc<Landing>>,
    pub(crate) due: Option<Deferred<'c, R, M>>,
}

impl<'c, R: Registrar, M: Monitor> Listed<'c, R, M> {
    /// The one whose flight is listed, or about to be.
    pub(crate) fn new(
        shared: &'c Shared<R, M>,
        region: &'c Region<R::Handle>,
        filling: Want,
    ) -> Self {
        Self { shared, region, filling, awaited: None, due: None }
    }

    /// Takes the flight out of the list.
    pub(crate) fn leave(&mut self, writer: &mut Writer) -> Flight {
        let number = self.region.number;
        // Listed until now, unless making room for it panicked: then no event was noted.
        let mut flight = match take_flight(writer, number) {
            Some(flight) => flight,
            None => {
                let (Want { range, terms }, born) = (self.filling, writer.unapplied.made());
                let mut unlisted = Flight::new(range, terms, number, born);
                unlisted.tainted = true;
                unlisted
            }
        };
        flight.tainted |= writer.unapplied.cover(flight.range, flight.born);
        self.awaited = flight.landing.take();
        flight
    }

    /// The same behind the device, which gave the handle.
    ///
    /// # Safety
    ///
    /// No reader looks at the region: it is not findable and has no lease.
    pub(crate) unsafe fn fill(&mut self, writer: &mut Writer, handle: R::Handle) -> Flight {
        let flight = self.leave(writer);
        let (filling, born) = flight.filling();
        // SAFETY: the caller's promise, and the writer's lock is held.
        unsafe { self.region.fill(filling, born, self.shared.advance_tick(), handle) };
        flight
    }
}

impl<R: Registrar, M: Monitor> Drop for Listed<'_, R, M> {
    fn drop(&mut self) {
        // In a forked child a landing's lock may be held by a thread that does not exist.
        let landing = self.awaited.take().filter(|_| !self.shared.is_forked());
        landing.iter().for_each(|landing| landing.land());
    }
}

/// A registration under way with its share of the budget and its place: given back when the
/// registration fails or the registrar panics.
pub(crate) struct Enlisted<'c, R: Registrar, M: Monitor> {
    listed: Listed<'c, R, M>,
    pub(crate) plan: Plan,
    pub(crate) decision: Decision,
    /// Whether it is measured what this takes.
    is_timed: bool,
    has_landed: bool,
    /// The same is tried again, if room is made: what was bought is bought then, or else abandoned.
    is_tried_again: bool,
    /// It was registered, and the registrar could not give it back.
    is_left: bool,
}

impl<'c, R: Registrar, M: Monitor> Enlisted<'c, R, M> {
    /// Registers with no lock held, then publishes, or keeps the registration for this one use.
    ///
    /// **Why nothing registered during a change is cached.** Let a change of the range take
    /// effect after the registration began. If its entry is applied after the flight was
    /// enlisted, it taints the flight or, when the region is published already, invalidates
    /// the region ([`Shared::catch_up`] says why there is no third case). If its entry was
    /// read before the flight was enlisted, the change is one that takes effect later than
    /// its entry is logged; the monitor's promise makes `change_pending` say so from before the entry
    /// could be read, until after it took effect; and `change_pending` is asked here, after the
    /// enlisting and before the registration begins. So either the change is still pending then,
    /// and the region is not cached, or it took effect before the registration began.
    #[inline]
    pub(crate) fn fly(
        &mut self,
        promised: &Promised,
    ) -> Result<(Lease<'c, R, M>, Flown), Unlanded> {
        let want = promised.want();
        let (shared, Plan { range, terms: Terms { access, .. }, .. }) =
            (self.listed.shared, self.plan);
        let is_timed = self.is_timed;
        let now = || shared.now_if(is_timed);
        let began = now();
        let per_use = self.decision.per_use().or_else(|| Registering(shared).per_use(want, range));
        let watched = now();
        // Forked inside the monitor or the clock: the device is the parent's.
        if shared.is_forked() {
            return Err(FORKED_MEANWHILE.into());
        }
        if per_use.is_none() {
            shared.index.prepare(range);
        }
        // SAFETY: this was planned for `want`, whose bytes the promise covers; the rest of their pages is
        // registered too but no lease names it.
        let handle = unsafe { shared.registrar.register(range, access) };
        self.is_tried_again = handle.as_ref().err().is_some_and(RegisterError::is_about_room);
        let handle = handle?;
        // Ended by whatever panics before it lands.
        let made = Made::new(&*shared.registrar, handle, range);
        let registered = now();
        let counted = self.count_behind();
        if let Ok(Err(amount)) = counted {
            // By hand, because its panic goes on, and what it could not give back is counted.
            let handle = made.keep();
            // SAFETY: it was made above, and neither the cache nor a lease has it.
            let deregister = || unsafe { shared.registrar.deregister(handle, range) };
            let ended = foreign::call(deregister);
            self.is_left = !matches!(ended, Ok(Ok(())));
            if let Err(panicked) = ended {
                panicked.resume();
            }
            self.is_tried_again = true;
            return Err(Unlanded::CountsMore(amount));
        }
        let looked = now();
        // Forked inside the registrar: the registration is the parent's, which lands it itself.
        made.keep();
        let _ = counted.map_err(|Forked| FORKED_MEANWHILE)?;
        let entered = per_use.is_none()
            && shared
                .enter_ahead(range, self.listed.region.number)
                .map_err(|Forked| FORKED_MEANWHILE)?;
        let landed = shared.locked_deferring(|writer| {
            if let Some(took) = since(watched, registered) {
                writer.costs.registered(range, took);
            }
            // What is vouched for is not watched. That the monitor could not takes its time as well.
            let is_asked = self.decision.per_use().is_none() && can_hold(range);
            let is_watched = is_asked && !want.terms.vouched;
            // What is asked only because it is kept.
            if let Some((before, behind)) =
                since(began, watched).zip(since(registered, looked)).filter(|_| is_watched)
            {
                let took = before.saturating_add(behind);
                writer.costs.watched(range, took);
            }
            self.land(writer, handle, (per_use, entered))
        });
        // Forked inside the registrar: the registration is the parent's, which lands it itself.
        let ((pin, is_cached), due) = landed.map_err(|Forked| FORKED_MEANWHILE)?;
        self.listed.due = due;
        let region = self.listed.region;
        let lease = match is_cached {
            true => Lease::of_cached(shared, region, pin, want.range),
            false => Lease::of_per_use(shared, region, pin, want.range),
        };
        Ok((lease, Flown { took: since(began, looked), landed: now() }))
    }

    /// Takes what the registration that was just made counts more than was planned, or says what it counts in all.
    ///
    /// **Why this answer lasts.** The program may have the kernel move small pages together into a huge one
    /// (`MADV_COLLAPSE`) between the plan and the registration, and the kernel counts that as a whole. Once a page is
    /// pinned, those around it are moved no more; and a huge page that is taken apart counts what it counted.
    /// So between the kernel's counting and this, and no longer, the budget may count less than the kernel. What is registered for
    /// one use counts what was planned, though it may be more for so long: to ask would cost as much as to register a page.
    fn count_behind(&mut self) -> Result<Result<(), Amount>, Forked> {
        let room = Room(self.listed.shared);
        room.0.refuse_child()?;
        // What is past the budget is counted as it is, for nothing is spared by that.
        if self.decision.per_use().is_some_and(|why| why != PerUse::Full) {
            return Ok(Ok(()));
        }
        let amount = room.counted(self.plan.range);
        let more = amount - self.plan.amount;
        if more == Amount::ZERO || room.0.locked(|writer| self.take_more(writer, more))? {
            return Ok(Ok(()));
        }
        // Forked inside the account that refused: the registration is the parent's to end.
        room.0.refuse_child()?;
        Ok(Err(amount))
    }

    fn take_more(&mut self, writer: &mut Writer, more: Amount) -> bool {
        let past_budget = self.decision == Decision::ForOneUse(PerUse::Full);
        let taken = check_sum(writer.held, more).is_ok()
            && Room(self.listed.shared).take_budget(writer, more, past_budget).is_ok();
        if taken {
            self.plan.amount = self.plan.amount + more;
        }
        taken
    }

    /// Takes the registration into the books: what pins it for the caller's lease, and whether it is kept behind that.
    fn land(
        &mut self,
        writer: &mut Writer,
        handle: R::Handle,
        (per_use, entered): (Option<PerUse>, bool),
    ) -> (Pin<'c>, bool) {
        let (shared, region) = (self.listed.shared, self.listed.region);
        self.has_landed = true;
        // SAFETY: the place was taken from the free ones when this was enlisted.
        let flight = unsafe { self.listed.fill(writer, handle) };
        shared.note_amount(writer, (region.number, self.plan.range), self.plan.amount);
        writer.counts.registrations += 1;
        writer.counts.misses += 1;
        let per_use = per_use
            .or_else(|| flight.tainted.then_some(PerUse::ChangedMeanwhile))
            .or_else(|| Registering(shared).enter(writer, &flight, region, entered).err());
        let pin = shared.pin(writer, region);
        if let Some(why) = per_use {
            self.note_not_kept(writer);
            Registering(shared).keep_per_use(writer, &flight, region, why);
        } else {
            match self.decision {
                Decision::Buy(hits) => region.set_bought(hits),
                Decision::Join => writer.admission.spend(self.plan.range, self.plan.terms),
                _ => {}
            }
            Registering(shared).supersede(writer, &flight);
        }
        (pin, per_use.is_none())
    }

    /// What was bought, if it was, is not kept.
    fn note_not_kept(&self, writer: &mut Writer) {
        let Plan { range, terms, .. } = self.plan;
        self.decision.take_back(&mut writer.admission, range, terms);
        if self.decision.is_judged() && !self.is_tried_again {
            self.decision.abandon(&mut writer.admission, range, terms);
        }
    }

    /// Gives everything back: nothing was registered, or what was is ended.
    fn withdraw(&mut self, writer: &mut Writer) {
        let flight = self.listed.leave(writer);
        self.note_not_kept(writer);
        if let Decision::Rent(rent) = self.decision {
            writer.admission.refund(self.plan.range, self.plan.terms, rent);
        }
        self.listed.shared.give_budget(writer, self.plan.amount);
        writer.lists.give_place(flight.number);
        writer.watchers.deregistered(flight.number);
        writer.counts.registration_failures += 1;
        writer.counts.deregistration_failures += u64::from(self.is_left);
    }
}

impl<R: Registrar, M: Monitor> Drop for Enlisted<'_, R, M> {
    fn drop(&mut self) {
        // The registrar failed or panicked. In a forked child the flight is the parent's.
        if !self.has_landed {
            let shared = self.listed.shared;
            let withdrawn = shared.locked_deferring(|writer| self.withdraw(writer));
            self.listed.due = withdrawn.ok().and_then(|((), due)| due);
        }
    }
}

/// What the child gets is decided by the get that waits for it.
pub(crate) const FORKED_MEANWHILE: RegisterError = RegisterError::DeviceGone { errno: 0 };

/// Whether the one being registered serves every use of `region`.
fn is_needless<H: Copy>(region: &Region<H>, flight: &Flight) -> bool {
    let findable = region.findable();
    findable.is_some_and(|(range, terms)| flight.would_serve(&Want { range, terms }))
}

/// Takes out the flight to this place.
fn take_flight(writer: &mut Writer, number: u32) -> Option<Flight> {
    let position = writer.flights.iter().position(|flight| flight.number == number)?;
    Some(writer.flights.swap_remove(position))
}
