//! The slow path of a `get`: apply news, look again, wait for others, make room, register.

use crate::AddressRange;
use crate::admission::{UseCosts, Verdict};
use crate::budget::{Amount, Recalls};
use crate::clock::since;
use crate::config::Keep;
use crate::error::{Exhausted, GetError, Limit, PerUse};
use crate::events::Checkup;
use crate::flight::{Flight, Landing};
use crate::lease::Lease;
use crate::monitor::{Forked, Lost, Monitor, Sequence};
use crate::order::Order;
use crate::region::{HitCount, Lists, Region, State, Terms, Want};
use crate::registering::{Decision, Enlisted, Plan, Promised, Registering, Unlanded};
use crate::registrar::{RegisterError, Registrar};
use crate::room::{Room, Spent, check_sum};
use crate::shared::{Writer, operations};
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

/// What the slow path of a get begins with.
#[derive(Clone, Copy)]
pub(crate) struct Begun {
    pub(crate) uses: Uses,
    /// Until when it waits before suspended memory, if that stands no longer.
    pub(crate) until: Option<Instant>,
    pub(crate) answer: Answer,
}

/// What the monitor said since the get began. It is not asked twice: its answer may take as long as a change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Nothing: it was not asked.
    None,
    /// The same, and it need not be, as long as the index names no region of the bytes and none is to be kept.
    Needless,
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
    /// Callbacks became due, which must run before this `get` holds anything; or the log was read in part; or the monitor
    /// was not asked, and its answer is needed after all.
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
    /// A lease for what is wanted, whatever it takes.
    #[cold]
    pub(crate) fn get_slowly(
        self,
        promised: &Promised,
        begun: Begun,
    ) -> Result<Lease<'c, R, M>, GetError> {
        self.check_length(promised.want())?;
        // Forked inside the check that this began with: the device is the parent's.
        self.0.refuse_child()?;
        let result = self.find_or_register(promised, begun);
        // A lease counted itself.
        if result.is_err() {
            self.0.locked(|writer| writer.counts.misses += 1)?;
        }
        // Nothing is under way any more that a callback could wait for.
        self.0.settle();
        // What the account told of it, a callback or the monitor may have forked: the lease is the parent's.
        self.0.refuse_child()?;
        result
    }

    /// What counts is the range in whole pages.
    pub(crate) fn check_length(self, want: &Want) -> Result<(), GetError> {
        let max_region_bytes = self.0.limits.max_region_bytes;
        if self.pages_of(want).len() <= max_region_bytes {
            return Ok(());
        }
        Err(GetError::TooLong { range: want.range, max_region_bytes })
    }

    fn find_or_register(
        self,
        promised: &Promised,
        begun: Begun,
    ) -> Result<Lease<'c, R, M>, GetError> {
        let want = promised.want();
        let terms = self.granted(want);
        let mut attempt = Attempt::new(begun);
        // The range that was paid for.
        let pages = self.pages_of(want);
        attempt.is_narrow = matches!(attempt.begun.uses, Uses::Worth(_, range) if range == pages);
        loop {
            // Forked inside the device or a callback.
            self.0.refuse_child()?;
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
                // Forked as the reclaimer was told: no thread of this process ends what is waited for.
                Ok(Step::Wait(landing)) => {
                    self.0.refuse_child()?;
                    landing.wait();
                    attempt.waited = true;
                }
                // As above.
                Ok(Step::HoldBack(gate)) => {
                    self.0.refuse_child()?;
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
                    let flown = enlisted.fly(promised);
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
        let is_measured = is_sampled && self.0.measures();
        match answer {
            Answer::Needless if !is_sampled => None,
            Answer::Current if !is_measured => None,
            Answer::News(seen) if !is_measured => Some(Checkup::of(seen)),
            _ => Some(self.0.ask(is_measured)),
        }
    }

    /// A budget is spent: makes room for the next round, or has that go on without.
    fn make_room_and_note(
        self,
        want: &Want,
        attempt: &mut Attempt,
        spent: Spent,
    ) -> Result<(), GetError> {
        let made = Room(self.0).make_room(spent, &mut attempt.recalls);
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
        // Forked inside the device that refused, or the account: both are the parent's.
        self.0.refuse_child()?;
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
        let is_unasked = attempt.begun.answer == Answer::Needless && asked.is_none();
        match asked {
            Some(checkup) => self.0.catch_up(writer, checkup)?,
            // What it tells again is applied again: an answer says first whether there is more.
            None if is_unasked && writer.followed.may_repeat() => return Ok(Step::Again),
            // What stands in the log already came before this get, and it is not to fill up.
            None if is_unasked => _ = self.0.read_log(writer),
            None => {}
        }
        // Forked as its log was read: the account is the parent's.
        self.0.refuse_child()?;
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
        if is_unasked {
            // Entered since the get looked: none is believed without an answer.
            if self.0.is_named(want.into()) {
                return Ok(Step::Again);
            }
        } else if let Some(lease) = self.hit_locked(writer, want) {
            return Ok(Step::Done(lease));
        }
        if let Some(landing) = landing_for(writer, want, attempt)? {
            writer.counts.waits += 1;
            return Ok(Step::Wait(landing));
        }
        check_sum(writer.held, plan.amount)?;
        match Room(self.0).take_budget(writer, plan.amount, attempt.past_budget) {
            Err(spent) => Ok(Step::MakeRoom(spent)),
            Ok(()) => {
                let (allowed, held) = (u32::MAX as usize, writer.held.regions);
                let full = Exhausted { limit: Limit::Regions, allowed, held, wanted: 1 };
                let decision = self.decision(writer, want, plan, attempt);
                // It would be given up for a change that came before this get and is on its way into the log.
                if is_unasked && decision.per_use().is_none() {
                    self.forgo(writer, plan, decision);
                    return Ok(Step::Again);
                }
                // What is bought is seldom measured otherwise: what it takes to watch decides whether another is.
                let is_timed =
                    attempt.is_sampled || decision.is_purchase() || !writer.costs.knows(range);
                let enlisted = Registering(self.0).enlist(writer, plan, decision, is_timed);
                enlisted.map(Step::Register).ok_or_else(|| {
                    self.forgo(writer, plan, decision);
                    GetError::Exhausted(full)
                })
            }
        }
    }

    /// What was decided and has its part of the budget is not tried.
    #[cold]
    fn forgo(self, writer: &mut Writer, plan: Plan, decision: Decision) {
        decision.take_back(&mut writer.admission, plan.range, plan.terms);
        self.0.give_budget(writer, plan.amount);
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
        let widened = Room(self.0).widest(pages);
        let range = if attempt.is_narrow { pages } else { self.served(want, pages, widened) };
        Plan { range, terms, amount: self.0.amount(widened).max(attempt.counted) }
    }

    /// What a first try registers for `want`.
    fn widest_served(self, want: &Want) -> AddressRange {
        let pages = self.pages_of(want);
        self.served(want, pages, Room(self.0).widest(pages))
    }

    fn served(self, want: &Want, pages: AddressRange, widened: AddressRange) -> AddressRange {
        let fits = widened.len() <= self.0.limits.max_region_bytes;
        let is_own = want.terms.vouched || want.terms.access.is_remote();
        if is_own || !fits { pages } else { widened }
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
        if let Some(why) = Registering(self.0).per_use_by_rights(want) {
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
        if !self.0.rents() {
            return Verdict::Keep;
        }
        if !self.0.measures() {
            return Verdict::Rent(0);
        }
        let surcharge = self.0.change_surcharge(writer);
        let Some(costs) = writer.costs.of(range, surcharge) else {
            // Nothing was measured; what costs nothing need not be.
            let is_free = surcharge == 0 && !writer.admission.was_in_vain(range, terms);
            return if is_free { Verdict::Keep } else { Verdict::Rent(0) };
        };
        writer.admission.decide(range, terms, costs)
    }

    /// What there is for a use of `want` that no hit found, and that the caller can do without at these costs. If there is nothing,
    /// what it costs counts as paid. Where more than was asked for was refused, it is what was asked for that pays, for a while.
    pub(crate) fn worth_keeping(
        self,
        want: &Want,
        costs: UseCosts,
    ) -> Result<Worth<'c, R, M>, GetError> {
        // In a forked child the device is the parent's.
        self.0.refuse_child()?;
        let (widest, pages) = (self.widest_served(want), self.pages_of(want));
        // Forked inside the device.
        self.0.refuse_child()?;
        let terms = self.granted(want);
        let is_kept = self.0.config.keep != Keep::Never;
        // What is never kept has no account: it is leased where a use alone costs hardly more than doing without.
        let is_judged = Registering(self.0).per_use_by_rights(want).is_none();
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
        self.0.refuse_child()?;
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
        if is_as_paid_for || Registering(self.0).per_use_by_rights(want).is_some() {
            return Ok(());
        }
        // Forked inside the get that tried it: the device is the parent's.
        self.0.refuse_child()?;
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
        if error.is_about_room() && Room(self.0).make_room_on_device(tried.amount, error, recalls) {
            return Ok(false);
        }
        // What was not asked for may be what cannot be registered: it may even be unmapped by now.
        if tried.range != self.pages_of(want) { Ok(true) } else { Err(GetError::Register(error)) }
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
