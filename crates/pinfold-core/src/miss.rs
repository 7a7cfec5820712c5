//! The slow path of a `get`: apply news, look again, wait for others, make room, register.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the registrar, on the word of the method's caller that
//! the memory may be given to the device, and to fill a place that it has just taken for itself.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::admission::{Admission, UseCosts, Verdict};
use crate::budget::{Account, Amount, Recalls, Refusal};
use crate::clock::since;
use crate::config::{Keep, WhenFull};
use crate::error::{Exhausted, GetError, Limit, PerUse};
use crate::events::Checkup;
use crate::flight::{Flight, Landing};
use crate::foreign::ForeignPart;
use crate::index::{BlockWalk, can_hold};
use crate::lease::Lease;
use crate::monitor::{Forked, Lost, Monitor, Sequence, Watch};
use crate::order::Order;
use crate::reclaim::Reclaim;
use crate::region::{HitCount, Lists, Region, State, Terms, Want};
use crate::registrar::{RegisterError, Registrar};
use crate::several::Made;
use crate::shared::{Deferred, Pin, SLICE, Shared, Writer, operations};
use crate::suspended_ranges::{Gate, Stop};
use std::sync::Arc;
use std::time::Instant;

/// What a caller says of further uses of the range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Uses {
    /// Nothing, so the cache decides.
    Unknown,
    /// No registration shall outlive the lease.
    One,
    /// There will be many.
    Many,
    /// It was asked already whether keeping it pays, at these costs, and to keep this range does.
    Worth(UseCosts, AddressRange),
}

/// What is decided of a registration before it is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Decision {
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
    const fn per_use(self) -> Option<PerUse> {
        match self {
            Self::ForOneUse(why) => Some(why),
            Self::Rent(_) => Some(PerUse::NotAdmitted),
            Self::Keep | Self::KeepUnasked | Self::Join | Self::Buy(_) => None,
        }
    }

    const fn is_purchase(self) -> bool {
        matches!(self, Self::Buy(_))
    }

    /// Whether it was in vain if it cannot be had: what a caller asked for is kept on no account.
    const fn is_judged(self) -> bool {
        matches!(self, Self::Buy(_) | Self::Join | Self::KeepUnasked)
    }

    /// What was [judged](Self::is_judged) cannot be had.
    #[cold]
    fn abandon(self, admission: &mut Admission, range: AddressRange, terms: Terms) {
        if matches!(self, Self::Join) {
            admission.spend(range, terms);
        }
        admission.refuse(range, terms);
    }
}

/// What the slow path of a get begins with.
#[derive(Clone, Copy)]
pub(crate) struct Begun {
    pub(crate) uses: Uses,
    /// Until when it waits before suspended memory, if that stands no longer.
    pub(crate) until: Option<Instant>,
    pub(crate) answer: Answer,
}

/// What the monitor said since the get began. It is not asked twice: its answer may take as long as a change.
#[derive(Clone, Copy)]
pub(crate) enum Answer {
    /// Nothing: it was not asked.
    None,
    /// All that it knew of is applied.
    Current,
    /// Something that is not.
    News(Result<Sequence, Lost>),
}

/// What to do next, decided under the writer's lock.
#[allow(clippy::large_enum_variant)] // lives for a moment, on the stack
enum Step<'c, R: Registrar, M: Monitor> {
    Done(Lease<'c, R, M>),
    Wait(Arc<Landing>),
    /// The range is suspended, and its gets are held back.
    HoldBack(Arc<Gate>),
    /// Callbacks became due, which must run before this `get` holds anything; or the log was read in part.
    Again,
    MakeRoom(Spent),
    Register(Enlisted<'c, R, M>),
}

/// What there is for a caller that can do without.
pub(crate) enum Worth<'c, R: Registrar, M: Monitor> {
    /// What is registered already.
    There(Lease<'c, R, M>),
    /// Nothing yet, but to register this range and keep it pays. It may be a part of the whole that could not be had.
    Keeping { range: AddressRange, whole: AddressRange },
    /// Nothing: to do without is cheaper still.
    Nothing,
}

/// What became of what was worth keeping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Had,
    /// No more than was asked for.
    PartHad,
    NotHad,
}

/// Which budget is spent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// The bounds of this cache's own settings.
    Own,
    /// The one that others draw on as well.
    Shared,
}

/// A budget that refused, of which there had been so many departures then.
#[derive(Clone, Copy)]
pub(crate) struct Spent {
    refusal: Refusal,
    whose: Whose,
    departures: u64,
}

/// When a registration was measured: how long it took to watch, to register and to look what it counts; and when it became a lease.
#[derive(Clone, Copy)]
struct Flown {
    took: Option<u64>,
    landed: Option<u64>,
}

/// Why a registration did not become a lease.
#[derive(Clone, Copy)]
enum Unlanded {
    Refused(RegisterError),
    /// The system counted so much for it, and the budget has no more than was planned: it was deregistered.
    CountsMore(Amount),
}

impl Unlanded {
    /// Whether the same is tried again, if room is made.
    const fn is_tried_again(&self) -> bool {
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

/// What is to be registered, and what it will count.
#[derive(Clone, Copy)]
struct Plan {
    range: AddressRange,
    terms: Terms,
    amount: Amount,
}

/// What this `get` has been through already.
struct Attempt {
    /// It waited for another's registration once; from now on it makes its own, so that memory
    /// that cannot be cached, or always fails, is not registered by one thread after the other.
    waited: bool,
    /// The budget is full of regions in use and the configuration says to go on.
    past_budget: bool,
    /// No more is registered than was asked for, in whole pages: more could not be registered.
    is_narrow: bool,
    /// What the system counted for the registration before, if that was more than was planned: as much is planned for.
    counted: Amount,
    /// What was to be kept, though no caller asked for it, counts more than there is room for: it is registered for this use.
    is_for_this_use: bool,
    /// Whether it is measured what this round takes.
    is_sampled: bool,
    /// What the rounds took in which more than was asked for was refused, where that was measured. In nanoseconds.
    refused: u64,
    /// What was to be kept, was not had, and is tried again.
    retracted: Option<(AddressRange, Decision)>,
    /// Whom it has asked for room.
    recalls: Recalls,
    begun: Begun,
}

impl Attempt {
    /// One whose registration is not to be kept waits for no other: what others register is kept.
    fn new(begun: Begun) -> Self {
        let waited = begun.uses == Uses::One;
        let counted = Amount::ZERO;
        Self {
            waited,
            past_budget: false,
            is_narrow: false,
            counted,
            is_for_this_use: false,
            is_sampled: false,
            refused: 0,
            retracted: None,
            recalls: Recalls::new(),
            begun,
        }
    }
}

operations! {
    /// The slow path.
    Miss
}

impl<'c, R: Registrar, M: Monitor> Miss<'c, R, M> {
    /// A lease for `want`, whatever it takes.
    ///
    /// # Safety
    ///
    /// As for the method that called: the device may use the bytes of `want` as its terms say.
    #[cold]
    pub(crate) unsafe fn get_slowly(
        self,
        want: &Want,
        begun: Begun,
    ) -> Result<Lease<'c, R, M>, GetError> {
        self.check_length(want)?;
        // Forked inside the check that this began with: the device is the parent's.
        self.refuse_child()?;
        // SAFETY: the caller's promise.
        let result = unsafe { self.find_or_register(want, begun) };
        // A lease counted itself.
        if result.is_err() {
            self.0.locked(|writer| writer.counts.misses += 1)?;
        }
        // Nothing is under way any more that a callback could wait for.
        self.0.settle();
        // What the account told of it, a callback or the monitor may have forked: the lease is the parent's.
        self.refuse_child()?;
        result
    }

    fn refuse_child(self) -> Result<(), Forked> {
        if self.0.is_forked() { Err(Forked) } else { Ok(()) }
    }

    /// What counts is the range in whole pages.
    pub(crate) fn check_length(self, want: &Want) -> Result<(), GetError> {
        let max_region_bytes = self.0.limits.max_region_bytes;
        if self.pages_of(want).len() <= max_region_bytes {
            return Ok(());
        }
        Err(GetError::TooLong { range: want.range, max_region_bytes })
    }

    /// # Safety
    ///
    /// As for [`get_slowly`](Self::get_slowly).
    unsafe fn find_or_register(
        self,
        want: &Want,
        begun: Begun,
    ) -> Result<Lease<'c, R, M>, GetError> {
        let terms = self.granted(want);
        let mut attempt = Attempt::new(begun);
        // The range that was paid for.
        let pages = self.pages_of(want);
        attempt.is_narrow = matches!(attempt.begun.uses, Uses::Worth(_, range) if range == pages);
        loop {
            // Forked inside the device or a callback.
            self.refuse_child()?;
            self.0.index.prepare_places(Region::new);
            let is_sampled = self.0.is_sampled();
            attempt.is_sampled = is_sampled;
            let now = || self.0.now_if(is_sampled);
            // Twice, for what a reading takes.
            let (reading, began) = (now(), now());
            let reading = since(reading, began);
            // In each round: the mapping may have changed meanwhile.
            let plan = self.plan(want, terms, &attempt);
            let asked = self.ask_unless_answered(attempt.begun.answer, is_sampled);
            let mut room = Lists::room_for(self.0.index.next_place());
            // Written where it is used: to hand it on from call to call would take as long as to look up a region.
            let mut step = Ok(Step::Again);
            self.0.locked(|writer| {
                writer.lists.move_links(&mut room);
                step = self.next_step(writer, want, plan, &attempt, asked);
            })?;
            drop(room);
            // What comes next takes its time, and the registrar's or a program's code runs in it.
            attempt.begun.answer = Answer::None;
            match step {
                Err(error) => return Err(error),
                Ok(Step::Done(lease)) => return Ok(lease),
                Ok(Step::Again) => {}
                Ok(Step::Wait(landing)) => {
                    landing.wait();
                    attempt.waited = true;
                }
                Ok(Step::HoldBack(gate)) => {
                    gate.wait(attempt.begun.until)
                        .map_err(|range| GetError::Suspended { range })?;
                }
                Ok(Step::MakeRoom(spent)) => self.make_room_and_note(want, &mut attempt, spent)?,
                Ok(Step::Register(mut enlisted)) => {
                    let (tried, decision) = (enlisted.plan, enlisted.decision);
                    // What is registered may be another range by now.
                    if let Some(other) =
                        attempt.retracted.take_if(|(range, _)| *range != tried.range)
                    {
                        self.note_not_had(want, other)?;
                    }
                    // SAFETY: the caller's promise.
                    let flown = unsafe { enlisted.fly(want) };
                    // Now those go on that wait for it.
                    drop(enlisted);
                    match flown {
                        Ok((lease, flown)) => {
                            let known = [asked.and_then(Checkup::took), flown.took, reading];
                            let took = since(began, flown.landed);
                            self.note_slow_path(tried.range, took, known, attempt.refused);
                            return Ok(lease);
                        }
                        Err(unlanded) => {
                            let took = since(began, now()).unwrap_or(0);
                            let not_had = (tried, decision);
                            self.recover_and_note(want, &mut attempt, not_had, unlanded, took)?;
                        }
                    }
                }
            }
        }
    }

    /// Asks the monitor, unless the get has its answer already, and what asking takes is not measured.
    fn ask_unless_answered(self, answer: Answer, is_sampled: bool) -> Option<Checkup> {
        match answer {
            Answer::Current if !is_sampled => None,
            Answer::News(seen) if !is_sampled => Some(Checkup::of(seen)),
            _ => Some(self.0.ask(is_sampled)),
        }
    }

    /// A budget is spent: makes room for the next round, or has that go on without.
    fn make_room_and_note(
        self,
        want: &Want,
        attempt: &mut Attempt,
        spent: Spent,
    ) -> Result<(), GetError> {
        let made = self.make_room(spent, &mut attempt.recalls);
        let has_counted_more = attempt.counted != Amount::ZERO
            && attempt.retracted.is_some_and(|(_, decision)| decision.is_judged());
        self.abandon_unless_same(want, &mut attempt.retracted, &made)?;
        match made {
            // A use that is rented is planned for, and not counted behind.
            Err(GetError::Exhausted(_)) if has_counted_more => {
                (attempt.is_for_this_use, attempt.counted) = (true, Amount::ZERO);
            }
            made => attempt.past_budget = made?,
        }
        Ok(())
    }

    /// A registration did not become a lease: what the next round is to try, if anything. It took so many nanoseconds, if that was
    /// measured.
    fn recover_and_note(
        self,
        want: &Want,
        attempt: &mut Attempt,
        (tried, decision): (Plan, Decision),
        unlanded: Unlanded,
        took: u64,
    ) -> Result<(), GetError> {
        attempt.retracted = unlanded.is_tried_again().then_some((tried.range, decision));
        let error = match unlanded {
            Unlanded::CountsMore(amount) => {
                attempt.counted = amount;
                return Ok(());
            }
            Unlanded::Refused(error) => error,
        };
        let recovered = self.recover(want, tried, error, &mut attempt.recalls);
        self.abandon_unless_same(want, &mut attempt.retracted, &recovered)?;
        if recovered? {
            attempt.is_narrow = true;
            attempt.refused = attempt.refused.saturating_add(took);
        }
        Ok(())
    }

    /// What was to be kept cannot be had, unless the `next` round is to try the same.
    fn abandon_unless_same(
        self,
        want: &Want,
        retracted: &mut Option<(AddressRange, Decision)>,
        next: &Result<bool, GetError>,
    ) -> Result<(), Forked> {
        let abandoned = retracted.take_if(|_| !matches!(next, Ok(false)));
        abandoned.map_or(Ok(()), |not_had| self.note_not_had(want, not_had))
    }

    fn note_not_had(
        self,
        want: &Want,
        (range, decision): (AddressRange, Decision),
    ) -> Result<(), Forked> {
        if !decision.is_judged() {
            return Ok(());
        }
        let terms = self.granted(want);
        self.0.locked(|writer| decision.abandon(&mut writer.admission, range, terms))
    }

    /// On what terms `want` is registered. The registrar is asked, where no lock is held.
    fn granted(self, want: &Want) -> Terms {
        Terms { access: self.0.registrar.granted(want.terms.access), ..want.terms }
    }

    /// What a round took that registered `range`, besides the check, the flight and the readings of the clock, and those before in
    /// which more was `refused`: it is a part of what each registration costs. A hit takes as much only behind a change that it
    /// applies.
    fn note_slow_path(
        self,
        range: AddressRange,
        took: Option<u64>,
        [check, flight, reading]: [Option<u64>; 3],
        refused: u64,
    ) {
        let Some(((took, flight), reading)) = took.zip(flight).zip(reading) else { return };
        // Before the check, between that and the flight, and behind that.
        let readings = reading.saturating_mul(3);
        let known = flight.saturating_add(check.unwrap_or(0)).saturating_add(readings);
        let surrounding = took.saturating_sub(known).saturating_add(refused);
        // In a forked child nothing is learnt.
        let _forked = self.0.locked(|writer| writer.costs.went_slowly(range, surrounding));
    }

    /// `plan` is of a registration made for `want`.
    ///
    /// What changed since the monitor was last asked, in this `get`, need not be known: a hit may miss it as
    /// one behind that question may, and a registration that is listed before the change is applied is tainted
    /// by it.
    fn next_step(
        self,
        writer: &mut Writer,
        want: &Want,
        plan: Plan,
        attempt: &Attempt,
        asked: Option<Checkup>,
    ) -> Result<Step<'c, R, M>, GetError> {
        if let Some(checkup) = asked {
            self.0.catch_up(writer, checkup)?;
            // Forked as its log was read: the account is the parent's.
            self.refuse_child()?;
        }
        if writer.watchers.has_due() || writer.is_cut() {
            return Ok(Step::Again);
        }
        // What is suspended next to what was asked for is not in the way.
        let is_barred = writer.suspended.cover(plan.range);
        let range = if is_barred { self.pages_of(want) } else { plan.range };
        let plan = Plan { range, ..plan };
        match writer.suspended.stop(range) {
            Some(Stop::Wait(gate)) => return Ok(Step::HoldBack(gate)),
            Some(Stop::Refuse(range)) => return Err(GetError::Suspended { range }),
            None => {}
        }
        if let Some(lease) = self.hit_locked(writer, want) {
            return Ok(Step::Done(lease));
        }
        if let Some(landing) = landing_for(writer, want, attempt)? {
            writer.counts.waits += 1;
            return Ok(Step::Wait(landing));
        }
        check_sum(writer.held, plan.amount)?;
        match self.take_budget(writer, plan.amount, attempt.past_budget) {
            Err(spent) => Ok(Step::MakeRoom(spent)),
            Ok(()) => {
                let (allowed, held) = (u32::MAX as usize, writer.held.regions);
                let full = Exhausted { limit: Limit::Regions, allowed, held, wanted: 1 };
                let decision = self.decision(writer, want, plan, attempt);
                // What is bought is seldom measured otherwise: what it takes to watch decides whether another is.
                let is_timed =
                    attempt.is_sampled || decision.is_purchase() || !writer.costs.knows(range);
                let enlisted = self.enlist(writer, plan, decision, is_timed);
                enlisted.map(Step::Register).ok_or_else(|| {
                    if decision.is_purchase() {
                        writer.admission.retract(range, plan.terms);
                    }
                    self.0.give_budget(writer, plan.amount);
                    GetError::Exhausted(full)
                })
            }
        }
    }

    /// Takes what a registration will count, from this cache's own bounds and from the shared budget, or
    /// from neither. An account that panics has granted nothing; nothing is half done here.
    fn take_budget(
        self,
        writer: &mut Writer,
        amount: Amount,
        past_budget: bool,
    ) -> Result<(), Spent> {
        if past_budget {
            self.0.account.iter().for_each(|account| account.overdraw(amount));
        } else {
            let departures = writer.departures;
            let spent = |whose| move |refusal| Spent { refusal, whose, departures };
            self.check_own(writer, amount).map_err(spent(Whose::Own))?;
            let shared = self.0.account.as_ref().map_or(Ok(()), |account| account.take(amount));
            shared.map_err(spent(Whose::Shared))?;
        }
        writer.held = writer.held + amount;
        Ok(())
    }

    /// A registered region is about to be registered anew, and the system may count more or less for it
    /// than it did: its memory was moved together into a huge page, or apart. Room is made for what is
    /// more; what cannot be had is taken all the same, because leases come back with the registration.
    pub(crate) fn count_anew(
        self,
        region: &Region<R::Handle>,
        range: AddressRange,
    ) -> Result<(), Forked> {
        let amount = self.counted(range);
        let mut past_budget = false;
        let mut recalls = Recalls::new();
        loop {
            let counted = self
                .0
                .locked(|writer| self.recount(writer, (region, range), amount, past_budget))?;
            let Err(spent) = counted else { return Ok(()) };
            past_budget = self.make_room(spent, &mut recalls).unwrap_or(true);
        }
    }

    /// The same behind a renewal, as [`count_behind`](Enlisted::count_behind) says. What cannot be had at once is taken all
    /// the same, and returned: room is to be made for it where nothing waits for this renewal.
    pub(crate) fn count_renewed(
        self,
        region: &Region<R::Handle>,
        range: AddressRange,
    ) -> Result<Option<Spent>, Forked> {
        self.refuse_child()?;
        let amount = self.counted(range);
        self.0.locked(|writer| {
            let amount = amount.max(self.0.amount_of(writer, region));
            let spent = self.recount(writer, (region, range), amount, false).err()?;
            // Refused by none.
            let _taken = self.recount(writer, (region, range), amount, true);
            Some(spent)
        })
    }

    /// `region` of `range` counts `amount`, whatever it counted before: takes what is more, or gives back
    /// what is less.
    fn recount(
        self,
        writer: &mut Writer,
        (region, range): (&Region<R::Handle>, AddressRange),
        amount: Amount,
        past_budget: bool,
    ) -> Result<(), Spent> {
        let before = self.0.amount_of(writer, region);
        let more = amount - before;
        // What takes no more is refused by no budget, overdrawn or not.
        if more != Amount::ZERO {
            self.take_budget(writer, more, past_budget)?;
        }
        self.0.give_budget(writer, before - amount);
        self.0.note_amount(writer, (region.number, range), amount);
        Ok(())
    }

    /// A lease of a region that is there already, looked up where the index is exact and where
    /// evictable regions count as well.
    fn hit_locked(self, writer: &mut Writer, want: &Want) -> Option<Lease<'c, R, M>> {
        let (start, end) = (want.range.start(), want.range.end());
        let (suspended, unapplied) = (&writer.suspended, &writer.unapplied);
        let mut looks = 0;
        let region = self.0.index.find(start, end, |region| {
            let (range, terms) = region.findable()?;
            let right = want.served_by(range, terms) && !suspended.cover(range);
            (right && !unapplied.may_cover(range, region.born(), &mut looks)).then_some(region)
        })?;
        let tick = self.0.tick();
        // Behind this it is not idle, whatever a scan has said or is about to say.
        if matches!(region.state(), State::Evictable | State::Examined) {
            Order::keep(&mut writer.lists, region, tick);
        }
        region.touch(tick);
        writer.counts.hits += 1;
        region.count_hit(want.range.len());
        let pin = self.0.pin(writer, region);
        Some(Lease::of_cached(self.0, region, pin, want.range))
    }

    /// The bytes to register: whole pages for local uses, exactly what was asked for remote ones.
    fn pages_of(self, want: &Want) -> AddressRange {
        if want.terms.access.is_remote() {
            want.range
        } else {
            want.range.page_aligned(self.0.limits.page_bytes)
        }
    }

    /// The same, or the wider range that the registrar names, which is asked with no lock held. The system
    /// counts that in any case.
    ///
    /// Not the wider one where the caller vouches for what it asked for: of the rest it reports no change,
    /// and another that vouches for that would be served from here.
    fn plan(self, want: &Want, terms: Terms, attempt: &Attempt) -> Plan {
        let pages = self.pages_of(want);
        let widened = self.widest(pages);
        let range = if attempt.is_narrow { pages } else { self.served(want, pages, widened) };
        Plan { range, terms, amount: self.0.amount(widened).max(attempt.counted) }
    }

    /// What a first try registers for `want`.
    fn widest_served(self, want: &Want) -> AddressRange {
        let pages = self.pages_of(want);
        self.served(want, pages, self.widest(pages))
    }

    fn served(self, want: &Want, pages: AddressRange, widened: AddressRange) -> AddressRange {
        let fits = widened.len() <= self.0.limits.max_region_bytes;
        let is_own = want.terms.vouched || want.terms.access.is_remote();
        if is_own || !fits { pages } else { widened }
    }

    /// What a registration of `range` counts. Asked with no lock held.
    fn counted(self, range: AddressRange) -> Amount {
        self.0.amount(self.widest(range))
    }

    /// What the system counts for a registration of `range`. A registrar that names something else is not
    /// believed.
    fn widest(self, range: AddressRange) -> AddressRange {
        let widened = self.0.registrar.widened(range);
        if widened.contains(&range) { widened } else { range }
    }

    /// What is missing for `amount` within this cache's own bounds.
    fn check_own(self, writer: &Writer, amount: Amount) -> Result<(), Refusal> {
        let (held, config) = (writer.held, &self.0.config);
        let allowed = Amount { bytes: config.max_bytes, regions: config.max_regions };
        let missing = held + amount - allowed;
        let exhausted = if missing.bytes > 0 {
            let (allowed, held) = (config.max_bytes, held.bytes);
            Exhausted { limit: Limit::Bytes, allowed, held, wanted: amount.bytes }
        } else if missing.regions > 0 {
            let (allowed, held) = (config.max_regions, held.regions);
            Exhausted { limit: Limit::Regions, allowed, held, wanted: 1 }
        } else {
            return Ok(());
        };
        Err(Refusal { exhausted, missing })
    }

    /// Makes room, or says whether to go on without (true), or why not.
    ///
    /// Of a shared budget, others give back first what is due to this cache.
    pub(crate) fn make_room(
        self,
        Spent { refusal, whose, departures }: Spent,
        recalls: &mut Recalls,
    ) -> Result<bool, GetError> {
        // Forked as the account refused: it is the parent's, and so are its other drawers.
        self.refuse_child()?;
        let Refusal { exhausted, missing } = refusal;
        let others = self.0.account.as_ref().filter(|_| whose == Whose::Shared);
        let mut recalled = || others.is_some_and(|account| recalls.ask(|| account.recall(missing)));
        if !refusal.is_hopeless() && (recalled() || Reclaim(self.0).free_some(missing, departures))
        {
            return Ok(false);
        }
        match self.0.config.when_full {
            WhenFull::Refuse => Err(GetError::Exhausted(exhausted)),
            WhenFull::RegisterPerUse => Ok(true),
        }
    }

    /// Takes a place and announces the registration, for which the budget has been taken.
    fn enlist(
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
        })
    }

    /// Whether what is planned is to be kept, if it may be.
    fn decision(
        self,
        writer: &mut Writer,
        want: &Want,
        Plan { range, terms, .. }: Plan,
        attempt: &Attempt,
    ) -> Decision {
        if attempt.past_budget {
            return Decision::ForOneUse(PerUse::Full);
        }
        if let Some(why) = self.per_use_by_rights(want) {
            return Decision::ForOneUse(why);
        }
        if attempt.is_for_this_use {
            return Decision::Rent(0);
        }
        let is_unasked = attempt.begun.uses == Uses::Unknown && !want.terms.vouched;
        let is_worth = matches!(attempt.begun.uses, Uses::Worth(..));
        let verdict = match attempt.begun.uses {
            Uses::One => return Decision::ForOneUse(PerUse::Asked),
            Uses::Unknown if is_unasked => self.verdict(writer, terms, range),
            Uses::Worth(costs, _) => writer.admission.buy(range, terms, costs),
            _ => Verdict::Keep,
        };
        match verdict {
            Verdict::Rent(rent) => Decision::Rent(rent),
            Verdict::Keep if is_unasked || is_worth => Decision::KeepUnasked,
            Verdict::Keep => Decision::Keep,
            Verdict::Join => Decision::Join,
            Verdict::Buy => {
                // What a caller can do instead, to copy for example, takes as long as there are bytes.
                let halvings = if is_worth { u32::MAX } else { writer.costs.halvings(range) };
                Decision::Buy(HitCount::for_use_of(want.range.len(), halvings))
            }
        }
    }

    /// Whether to keep a range for which the caller does not decide.
    fn verdict(self, writer: &mut Writer, terms: Terms, range: AddressRange) -> Verdict {
        match (self.0.config.keep, self.0.config.clock) {
            (Keep::Never, _) => Verdict::Rent(0),
            (Keep::Always, _) | (_, None) => Verdict::Keep,
            (Keep::WhenItPays, Some(_)) => {
                let surcharge = self.0.change_surcharge(writer);
                let Some(costs) = writer.costs.of(range, surcharge) else {
                    // Nothing was measured; what costs nothing need not be.
                    let is_free = surcharge == 0 && !writer.admission.was_in_vain(range, terms);
                    return if is_free { Verdict::Keep } else { Verdict::Rent(0) };
                };
                writer.admission.decide(range, terms, costs)
            }
        }
    }

    /// What there is for a use of `want` that no hit found, and that the caller can do without at these costs. If there is nothing,
    /// what it costs counts as paid. Where more than was asked for was refused, it is what was asked for that pays, for a while.
    pub(crate) fn worth_keeping(
        self,
        want: &Want,
        costs: UseCosts,
    ) -> Result<Worth<'c, R, M>, GetError> {
        let (widest, pages) = (self.widest_served(want), self.pages_of(want));
        let terms = self.granted(want);
        let is_kept = self.0.config.keep != Keep::Never;
        // What is never kept has no account: it is leased where a use alone costs hardly more than doing without.
        let is_judged = self.per_use_by_rights(want).is_none();
        let worth = self.0.locked(|writer| {
            // What is idle, and about to be evicted, no hit has found. All that changed before this get is applied.
            let found = if writer.is_cut() { None } else { self.hit_locked(writer, want) };
            if let Some(lease) = found {
                return Worth::There(lease);
            }
            // Those who wait for a registration that is refused would each try it again, with nothing left that was paid for it.
            if writer.flights.iter().any(|flight| flight.is_of_others_for(want)) {
                return Worth::Nothing;
            }
            let range = match (is_kept, is_judged) {
                (false, _) => None,
                (true, false) => costs.is_keeping_harmless().then_some(widest),
                (true, true) => pays(writer, terms, costs, [widest, pages]),
            };
            range.map_or(Worth::Nothing, |range| Worth::Keeping { range, whole: widest })
        })?;
        // A callback that became due may have forked: the lease is the parent's.
        self.refuse_child()?;
        Ok(worth)
    }

    /// What was [worth keeping](Self::worth_keeping) was tried. What is never kept has no account.
    pub(crate) fn note_worth(
        self,
        want: &Want,
        (range, whole): (AddressRange, AddressRange),
        costs: UseCosts,
        outcome: Outcome,
    ) -> Result<(), Forked> {
        let is_as_paid_for = range == whole && outcome == Outcome::Had;
        if is_as_paid_for || self.per_use_by_rights(want).is_some() {
            return Ok(());
        }
        let terms = self.granted(want);
        self.0.locked(|writer| {
            if range != whole {
                writer.admission.note_part(whole, terms, costs.part_price());
            }
            match outcome {
                Outcome::Had => {}
                // Where the device has refused the rest, the account was told; other threads may have paid since.
                Outcome::PartHad => writer.admission.part(range, terms, costs),
                Outcome::NotHad => writer.admission.refuse(range, terms),
            }
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
    fn per_use_by_rights(self, want: &Want) -> Option<PerUse> {
        let access = want.terms.access;
        (access.is_remote() && !self.0.config.cache_remote).then_some(PerUse::Remote(access))
    }

    /// A free place of the region arena. `None` when four billion are in use.
    fn take_place(self, writer: &mut Writer) -> Option<u32> {
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
    fn keep_per_use(
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
    fn supersede(self, writer: &mut Writer, flight: &Flight) {
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

    /// After a failed registration of `tried`: Ok if it may be tried again, with whether to try no more
    /// than was asked for.
    fn recover(
        self,
        want: &Want,
        tried: Plan,
        error: RegisterError,
        recalls: &mut Recalls,
    ) -> Result<bool, GetError> {
        // Forked inside the registrar, the account is the parent's as well.
        if self.0.is_forked() {
            return Err(GetError::Forked);
        }
        if error.is_about_room() && self.make_room_on_device(tried.amount, error, recalls) {
            return Ok(false);
        }
        // What was not asked for may be what cannot be registered: it may even be unmapped by now.
        if tried.range != self.pages_of(want) { Ok(true) } else { Err(GetError::Register(error)) }
    }

    /// The account hears of it in any case: it may have to adapt.
    fn make_room_on_device(
        self,
        missing: Amount,
        error: RegisterError,
        recalls: &mut Recalls,
    ) -> bool {
        let departures = self.0.departures();
        let refused = |account: &ForeignPart<Arc<dyn Account>>| {
            recalls.ask(|| account.refused(error, missing))
        };
        let recalled = self.0.account.as_ref().is_some_and(refused);
        if self.0.account.is_none() {
            self.note_refused_by_device(error, missing);
        }
        recalled || Reclaim(self.0).free_some(missing, departures)
    }

    /// The device had no room for `wanted` besides what is held, though the settings allow it: there is
    /// less than both, for now.
    fn note_refused_by_device(self, error: RegisterError, wanted: Amount) {
        let Ok(held) = self.0.locked(|writer| writer.held) else { return };
        let less = held + wanted - Amount::one(1);
        let most = Amount { bytes: self.0.config.max_bytes, regions: self.0.config.max_regions };
        let bound = match error {
            RegisterError::PinnedMemoryLimit { .. } => Amount { bytes: less.bytes, ..most },
            _ => Amount { regions: less.regions, ..most },
        };
        self.0.board.tell_bound(most, bound);
    }
}

/// Which of the two keeping pays for, by now: the wider range, or what was asked for where the wider one could not be had, or some
/// of it is suspended.
fn pays(
    writer: &mut Writer,
    terms: Terms,
    costs: UseCosts,
    [widest, pages]: [AddressRange; 2],
) -> Option<AddressRange> {
    // What is suspended beside the bytes is not registered with them, and so it is not paid for.
    let is_barred = writer.suspended.cover(widest) && !writer.suspended.cover(pages);
    let admission = &mut writer.admission;
    let is_parted = admission.is_parted(widest, terms);
    let range = if is_parted || is_barred { pages } else { widest };
    let pays = admission.pays(range, terms, costs);
    if !pays && is_parted {
        admission.note_part(widest, terms, costs.rent());
    }
    pays.then_some(range)
}

/// That what is held can be told in one word with `amount` as well.
fn check_sum(held: Amount, amount: Amount) -> Result<(), GetError> {
    match held.bytes.checked_add(amount.bytes) {
        Some(_) => Ok(()),
        None => Err(GetError::Exhausted(Exhausted {
            limit: Limit::Bytes,
            allowed: usize::MAX,
            held: held.bytes,
            wanted: amount.bytes,
        })),
    }
}

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

/// Where to wait for a registration under way that would serve `want`.
///
/// # Errors
///
/// This thread makes it.
fn landing_for(
    writer: &mut Writer,
    want: &Want,
    attempt: &Attempt,
) -> Result<Option<Arc<Landing>>, GetError> {
    if attempt.waited {
        return Ok(None);
    }
    let mut flights = writer.flights.iter_mut();
    let found = flights.find(|flight| flight.is_shared && flight.would_serve(want));
    match found {
        Some(flight) if flight.is_of_this_thread() => {
            Err(GetError::AwaitsItself { range: flight.range })
        }
        found => Ok(found.map(Flight::await_landing)),
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
struct Enlisted<'c, R: Registrar, M: Monitor> {
    listed: Listed<'c, R, M>,
    plan: Plan,
    decision: Decision,
    /// Whether it is measured what this takes.
    is_timed: bool,
    has_landed: bool,
    /// The same is tried again, if room is made: what was bought is bought then, or else abandoned.
    is_tried_again: bool,
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
    ///
    /// # Safety
    ///
    /// As for [`Miss::get_slowly`].
    unsafe fn fly(&mut self, want: &Want) -> Result<(Lease<'c, R, M>, Flown), Unlanded> {
        let (shared, Plan { range, terms: Terms { access, .. }, .. }) =
            (self.listed.shared, self.plan);
        let is_timed = self.is_timed;
        let now = || shared.now_if(is_timed);
        let began = now();
        let per_use = self.decision.per_use().or_else(|| Miss(shared).per_use(want, range));
        let watched = now();
        // Forked inside the monitor or the clock: the device is the parent's.
        if shared.is_forked() {
            return Err(FORKED_MEANWHILE.into());
        }
        if per_use.is_none() {
            shared.index.prepare(range);
        }
        // SAFETY: the caller's promise covers the bytes of `want`; the rest of their pages is
        // registered too but no lease names it.
        let handle = unsafe { shared.registrar.register(range, access) };
        self.is_tried_again = handle.as_ref().err().is_some_and(RegisterError::is_about_room);
        let handle = handle?;
        // Ended by whatever panics before it lands.
        let made = Made::new(&*shared.registrar, handle, range);
        let registered = now();
        let counted = self.count_behind();
        if let Ok(Err(amount)) = counted {
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
        let miss = Miss(self.listed.shared);
        miss.refuse_child()?;
        // What is past the budget is counted as it is, for nothing is spared by that.
        if self.decision.per_use().is_some_and(|why| why != PerUse::Full) {
            return Ok(Ok(()));
        }
        let amount = miss.counted(self.plan.range);
        let more = amount - self.plan.amount;
        let taken = more == Amount::ZERO || miss.0.locked(|writer| self.take_more(writer, more))?;
        Ok(if taken { Ok(()) } else { Err(amount) })
    }

    fn take_more(&mut self, writer: &mut Writer, more: Amount) -> bool {
        let past_budget = self.decision == Decision::ForOneUse(PerUse::Full);
        let taken = check_sum(writer.held, more).is_ok()
            && Miss(self.listed.shared).take_budget(writer, more, past_budget).is_ok();
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
            .or_else(|| Miss(shared).enter(writer, &flight, region, entered).err());
        let pin = shared.pin(writer, region);
        if let Some(why) = per_use {
            self.note_not_kept(writer);
            Miss(shared).keep_per_use(writer, &flight, region, why);
        } else {
            match self.decision {
                Decision::Buy(hits) => region.set_bought(hits),
                Decision::Join => writer.admission.spend(self.plan.range, self.plan.terms),
                _ => {}
            }
            Miss(shared).supersede(writer, &flight);
        }
        (pin, per_use.is_none())
    }

    /// What was bought, if it was, is not kept.
    fn note_not_kept(&self, writer: &mut Writer) {
        let Plan { range, terms, .. } = self.plan;
        if self.decision.is_purchase() {
            writer.admission.retract(range, terms);
        }
        if self.decision.is_judged() && !self.is_tried_again {
            self.decision.abandon(&mut writer.admission, range, terms);
        }
    }

    /// Gives everything back: nothing was registered.
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
    }
}

/// What the child gets is decided by [`Miss::get_slowly`].
pub(crate) const FORKED_MEANWHILE: RegisterError = RegisterError::DeviceGone { errno: 0 };

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
