//! A registration that a suspension has withdrawn: renewed with the leases that were handed over, or lost.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read and write the handle of a region that the suspension has
//! taken out of every other thread's reach, and to have its registration withdrawn and renewed on the word that came
//! with its leases.

#![allow(unsafe_code)]

use super::device::{Renewed, Suspend};
use crate::AddressRange;
use crate::board::{Keys, Notice, SuspensionId};
use crate::budget::Recalls;
use crate::error::PerUse;
use crate::events::Checkup;
use crate::flight::Flight;
use crate::foreign::{self, Panicked};
use crate::lease::Lease;
use crate::monitor::{Forked, Monitor};
use crate::reclaim::Reclaim;
use crate::region::{Lists, Region, Terms, Want};
use crate::registering::{FORKED_MEANWHILE, Listed, Registering};
use crate::registrar::RegisterError;
use crate::room::Room;
use crate::several::Made;
use crate::shared::{SLICE, Shared, Writer};
use std::ops::Range;

/// A registration out of other threads' reach, and the leases to come back with it.
pub(super) struct Parked<'c, H> {
    pub(super) suspension: SuspensionId,
    pub(super) region: &'c Region<H>,
    pub(super) range: AddressRange,
    pub(super) terms: Terms,
    /// Why it is not cached, if it was not.
    pub(super) per_use: Option<PerUse>,
    /// Where its leases stand among those handed over.
    pub(super) leases: Range<usize>,
}

/// A lease that was handed over.
#[derive(Clone, Copy)]
pub(super) struct HandedLease {
    /// Of its region.
    pub(super) number: u32,
    /// In the order in which they were handed over.
    pub(super) place: usize,
    pub(super) range: AddressRange,
}

pub(super) type Returned<'c, R, M> = Result<Lease<'c, R, M>, RegisterError>;

impl<H: Copy> Parked<'_, H> {
    /// Has the device withdraw it. What it cannot withdraw has what it had: its suspension does not complete, and it is
    /// renewed.
    pub(super) fn withdraw<R: Suspend<Handle = H>>(&self, registrar: &R) {
        // SAFETY: filled, and within reach of this suspension alone.
        let handle = unsafe { self.region.handle() };
        // SAFETY: registered for this region, which only this suspension can reach.
        let _gone = unsafe { registrar.withdraw(handle, self.range) };
    }
}

/// Gives up what was parked, slice by slice, and says so.
pub(super) fn lose<R: Suspend, M: Monitor>(
    shared: &Shared<R, M>,
    suspension: SuspensionId,
    range: AddressRange,
    parked: &[u32],
) -> Result<(), Forked> {
    parked.chunks(SLICE).try_for_each(|numbers| {
        shared.locked(|writer| {
            for region in numbers.iter().filter_map(|&number| shared.region(number)) {
                // SAFETY: filled, and within reach of this suspension alone.
                let handle = unsafe { region.handle() };
                let range = region.range().unwrap_or(range);
                shared.tell(writer, Notice::Lost { suspension, range, handle });
                shared.note_kept_no_more(writer, region.number);
                writer.lists.invalidate(region);
                writer.call_reclaimer();
            }
        })
    })
}

/// How far a renewal came, and so who has the registration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RenewalStage {
    /// It is withdrawn from the device, and to be given back.
    Parked,
    /// The device was asked to renew it: where that fails, it is gone.
    Asked,
    /// The cache, as before.
    Landed,
}

/// A parked registration being renewed: as a flight, so that a change meanwhile is noticed. Given
/// up if the device fails or panics.
pub(super) struct Renewal<'c, R: Suspend, M: Monitor> {
    /// Gets may wait for it: what is registered may reach beyond what is suspended, and serve them.
    listed: Listed<'c, R, M>,
    parked: Parked<'c, R::Handle>,
    stage: RenewalStage,
}

impl<'c, R: Suspend, M: Monitor> Renewal<'c, R, M> {
    /// # Errors
    ///
    /// In a forked child, where the registration is the parent's to renew.
    pub(super) fn begin(
        shared: &'c Shared<R, M>,
        parked: Parked<'c, R::Handle>,
    ) -> Result<Self, RegisterError> {
        let Parked { region, range, terms, .. } = parked;
        let listed = Listed::new(shared, region, Want { range, terms });
        let this = Self { listed, parked, stage: RenewalStage::Parked };
        // Forked inside the one before: the device is the parent's.
        if shared.is_forked() {
            return Err(FORKED_MEANWHILE);
        }
        // Before this is enlisted: it may make room, which runs callbacks and listeners.
        Room(shared).count_anew(region, range).map_err(|Forked| FORKED_MEANWHILE)?;
        // False if callbacks became due: they run before this is enlisted, because they may ask
        // for what it would serve, and would wait for themselves.
        let enlist = |writer: &mut Writer, asked: Result<Checkup, Panicked>| {
            // Forked in between: then nothing of it is used again. What a monitor that panics did not tell it
            // tells later, and the registration is not cached.
            let read = asked.and_then(|checkup| foreign::call(|| shared.catch_up(writer, checkup)));
            writer.counts.callback_panics += u64::from(read.is_err());
            // What else stands in the log is of before, too. A monitor that panics is not asked for it again.
            let is_read = read.is_err() || !writer.is_cut();
            // What a panic carries ends when the lock is free.
            let panicked = read.err();
            let free = is_read && !writer.watchers.has_due();
            if free {
                let born = writer.unapplied.made();
                writer.flights.push(Flight::new(range, terms, region.number, born));
            }
            (free, panicked)
        };
        loop {
            // What the program did to the memory until now concerns what it had before.
            let asked = foreign::call(|| shared.ask(false));
            let enlisted = shared.locked(|writer| enlist(writer, asked));
            let (is_enlisted, _panicked) = enlisted.map_err(|Forked| FORKED_MEANWHILE)?;
            if is_enlisted {
                return Ok(this);
            }
        }
    }

    /// Watches, renews, and makes the leases anew, each to its place in `returned`. The argument above `Enlisted::fly`
    /// holds here word by word: enlisted first, then watched and asked for discards pending, then registered.
    pub(super) fn run(
        mut self,
        handed_over: &[HandedLease],
        returned: &mut [Option<Returned<'c, R, M>>],
    ) -> Result<Keys, RegisterError> {
        let Parked { region, range, terms, .. } = self.parked;
        let shared = self.listed.shared;
        // With a monitor that panics it is unknown; what was withdrawn is renewed all the same.
        let asked = foreign::call(|| Registering(shared).per_use(&Want { range, terms }, range));
        let per_use = asked.unwrap_or_else(|_panicked| {
            shared.count_panics(1);
            Some(PerUse::ChangePending)
        });
        // Forked inside the monitor: the device is the parent's.
        if shared.is_forked() {
            return Err(FORKED_MEANWHILE);
        }
        if per_use.is_none() && self.parked.per_use.is_none() {
            shared.index.prepare(range);
        }
        // SAFETY: filled, and within reach of this renewal alone.
        let handle = unsafe { region.handle() };
        self.stage = RenewalStage::Asked;
        // SAFETY: a lease of this region was handed over and is given back, or ends, behind this;
        // its caller's word covers the bytes until then.
        let renewed = unsafe { shared.registrar.renew(handle, range, terms.access) }?;
        let (now, keys) = match renewed {
            Renewed::Same => (handle, Keys::Same),
            Renewed::Changed(fresh) => (fresh, Keys::Changed),
        };
        // Ended where the registrar or the account panics. Forked inside the device, it is the parent's.
        let made = Made::new(&*shared.registrar, now, range);
        let spent = Room(shared).count_renewed(region, range);
        made.keep();
        let spent = spent.map_err(|Forked| FORKED_MEANWHILE)?;
        let landed = shared.locked_deferring(|writer| {
            if keys == Keys::Changed {
                writer.counts.registrations += 1;
                writer.counts.deregistrations += 1;
                let (suspension, from, to) = (self.parked.suspension, handle, now);
                shared.tell(writer, Notice::Rekeyed { suspension, range, from, to });
            }
            self.land(writer, now, per_use);
            handed_over.iter().for_each(|it| returned[it.place] = Some(Ok(self.lease(writer, it))));
        });
        // Forked inside the device: the parent lands it.
        let ((), due) = landed.map_err(|Forked| FORKED_MEANWHILE)?;
        self.listed.due = due;
        drop(self);
        // Behind the landing, because it runs callbacks. What is not idle stays, with the budget overdrawn.
        spent.into_iter().for_each(|spent| _ = Room(shared).make_room(spent, &mut Recalls::new()));
        Ok(keys)
    }

    fn land(&mut self, writer: &mut Writer, handle: R::Handle, per_use: Option<PerUse>) {
        self.stage = RenewalStage::Landed;
        let (shared, region) = (self.listed.shared, self.parked.region);
        let bought = region.bought_hits();
        // SAFETY: the place is not findable and has no lease.
        let flight = unsafe { self.listed.fill(writer, handle) };
        bought.into_iter().for_each(|hits| region.set_bought(hits));
        writer.suspended.note_landing(flight.range);
        writer.watchers.renewed(region.number, flight.born);
        match self.parked.per_use {
            Some(why) => self.land_per_use(writer, &flight, why, per_use),
            None if per_use.is_none()
                && !flight.tainted
                // Of those that were cached, the long ones are named in the index all the time.
                && Registering(shared).enter(writer, &flight, region, true).is_ok() => {}
            // It can serve its old leases, and no others.
            None => {
                shared.note_kept_no_more(writer, region.number);
                writer.lists.invalidate(region);
                writer.call_reclaimer();
            }
        }
    }

    fn land_per_use(
        &self,
        writer: &mut Writer,
        flight: &Flight,
        why: PerUse,
        today: Option<PerUse>,
    ) {
        let doubtful = flight.tainted || today == Some(PerUse::ChangePending);
        let region = self.parked.region;
        writer.lists.keep_per_use(region, doubtful);
        writer.per_use.insert(region.number, why);
    }

    /// One that was handed over, again.
    fn lease(
        &self,
        writer: &mut Writer,
        &HandedLease { range, .. }: &HandedLease,
    ) -> Lease<'c, R, M> {
        let (shared, region) = (self.listed.shared, self.parked.region);
        let pin = shared.pin(writer, region);
        match self.parked.per_use {
            Some(_) => Lease::of_per_use(shared, region, pin, range),
            None => Lease::of_cached(shared, region, pin, range),
        }
    }

    /// Its leases are lost, whether the device or the reclaimer has the registration.
    fn give_up(&mut self, writer: &mut Writer) {
        let shared = self.listed.shared;
        let Parked { suspension, region, range, .. } = self.parked;
        // SAFETY: filled, and within reach of this renewal alone.
        let handle = unsafe { region.handle() };
        shared.tell(writer, Notice::Lost { suspension, range, handle });
        shared.note_kept_no_more(writer, region.number);
        self.listed.leave(writer);
        writer.counts.registration_failures += 1;
        if self.stage == RenewalStage::Parked {
            writer.lists.invalidate(region);
            writer.call_reclaimer();
        } else if let Some(idle) = Lists::parked(region) {
            writer.counts.deregistrations += 1;
            let gone = writer.lists.deregister(idle);
            Reclaim(shared).free_place(writer, gone);
            writer.note_departure();
        }
    }
}

impl<R: Suspend, M: Monitor> Drop for Renewal<'_, R, M> {
    fn drop(&mut self) {
        let shared = self.listed.shared;
        if self.stage == RenewalStage::Landed || shared.is_forked() {
            return;
        }
        let Parked { region, range, .. } = self.parked;
        let Ok(()) = shared.erase(range, region.number) else { return };
        let given_up = shared.locked_deferring(|writer| self.give_up(writer));
        self.listed.due = given_up.ok().and_then(|((), due)| due);
    }
}
