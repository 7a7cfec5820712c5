//! What a suspension owns, and gives back on every way out.

use super::device::{ConnectionLost, Suspend, Transfers};
use super::ending::{Suspensions, fail_all};
use super::parked::{HandedLease, Parked, Renewal, Returned, lose};
use super::report::{OnDrop, Outstanding, SuspensionTerms, Why};
use crate::AddressRange;
use crate::board::{Keys, Notice, Revocation, SuspensionId};
use crate::events::Walk;
use crate::foreign::{self, Foreign, ForeignList, HandedOver, discard, discard_all, runs_through};
use crate::hazard::{Snapshot, Unpublished};
use crate::lease::Lease;
use crate::monitor::{Forked, Monitor};
use crate::reclaim::Reclaim;
use crate::region::{Lists, Region, State};
use crate::registrar::RegisterError;
use crate::shared::{Shared, Writer};
use crate::suspended_ranges::{Claim, End, Look, OnExpiry};
use std::any::Any;
use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

/// How far a suspension has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The suspended range stands. Connections go on until the leases that are not kept have ended: what was
    /// posted in the queue of a stopped one would never end, and its lease neither.
    Leased,
    /// Connections are stopped; registrations are as they were.
    Draining,
    /// Those that are kept are withdrawn, the others are being given back.
    Settling,
    /// The program may re-arrange the memory.
    Handed,
    /// Registrations are being renewed and connections restarted. Left only if the device
    /// panics.
    Returning,
    /// Everything was given back.
    Over,
}

/// What a suspension owns: the suspended range, the connections that it stopped, the leases handed over and,
/// later, their registrations.
pub(crate) struct SuspensionGuard<'c, R: Suspend, M: Monitor> {
    shared: &'c Shared<R, M>,
    id: u64,
    pub(crate) range: AddressRange,
    pub(crate) terms: SuspensionTerms,
    pub(crate) began: Duration,
    stage: Stage,
    /// Those that are to be stopped as soon as no other thread calls the device about them.
    unstopped: ForeignList<R::Connection>,
    /// Those that are stopped and alive, as far as is known.
    pub(crate) connections: ForeignList<R::Connection>,
    /// Those that go on again, until all do.
    restarted: ForeignList<R::Connection>,
    pub(crate) lost: ForeignList<(R::Connection, ConnectionLost)>,
    kept: HandedOver<Lease<'c, R, M>>,
    /// Each of them, sorted by the number of its region: those of one region stand side by side. No list of its own for
    /// each region, because what is freed in small blocks makes an allocation under the lock a long one
    /// ([`waits`](crate::waits)).
    handed_over: Vec<HandedLease>,
    parked: Vec<Parked<'c, R::Handle>>,
    /// How many leases were handed over.
    leases: usize,
    /// Whether the clock may end it: its value is in the program's hands, which may never call again.
    entrusted: bool,
}

/// What a lease gets that was handed over to a suspension which ended with its registration withdrawn.
const GIVEN_UP_AT_THE_DEADLINE: RegisterError = RegisterError::Os {
    operation: "renewing a registration whose suspension had expired",
    errno: ETIMEDOUT,
};

/// Linux's, on every processor that Pinfold runs on.
const ETIMEDOUT: i32 = 110;

/// Why a suspension does not begin, and the leases that were to be kept.
type NotBarred<'c, R, M> = (Why<<R as Suspend>::Connection>, HandedOver<Lease<'c, R, M>>);

impl<'c, R: Suspend, M: Monitor> SuspensionGuard<'c, R, M> {
    /// Stands in the way of gets; nothing else is touched yet. `kept` are leases of this cache.
    ///
    /// # Errors
    ///
    /// What is in the way, and the leases.
    #[allow(clippy::result_large_err)] // its one caller takes it apart
    pub(crate) fn new(
        shared: &'c Shared<R, M>,
        range: AddressRange,
        terms: SuspensionTerms,
        kept: HandedOver<Lease<'c, R, M>>,
    ) -> Result<Self, NotBarred<'c, R, M>> {
        // Forked inside the device, which was asked whether it can.
        if shared.is_forked() {
            return Err((Why::Forked, kept));
        }
        // What is forgotten ends with the cache, which knows of its device only that it registers.
        let _known = shared
            .end_suspensions
            .get_or_init(|| |shared| _ = Suspensions(shared).expire(|_| true));
        let began = shared.registrar.now();
        let deadline = began.saturating_add(terms.deadline);
        let put_up = shared.locked(|writer| match writer.suspended.overlapping(range) {
            Some(range) => Err(Why::AlreadySuspended { range }),
            None => Ok(writer.suspended.put_up(range, terms.gets, deadline, terms.deadline)),
        });
        let id = match put_up {
            Ok(Ok(id)) => id,
            Ok(Err(why)) => return Err((why, kept)),
            // The device's clock forked.
            Err(Forked) => return Err((Why::Forked, kept)),
        };
        // Behind the suspended range, which closes what is registered from now on.
        Suspensions(shared).close_regions(range);
        let (connections, lost, parked) = Default::default();
        let (unstopped, restarted) = Default::default();
        let (stage, leases) = (Stage::Leased, kept.len());
        let handed = |(place, lease): (usize, &Lease<'c, R, M>)| HandedLease {
            number: lease.number(),
            place,
            range: lease.range(),
        };
        let mut handed_over: Vec<_> = kept.iter().enumerate().map(handed).collect();
        handed_over.sort_unstable_by_key(|lease| (lease.number, lease.place));
        Ok(Self {
            shared,
            id,
            range,
            terms,
            began,
            stage,
            unstopped,
            connections,
            restarted,
            lost,
            kept,
            handed_over,
            parked,
            leases,
            entrusted: false,
        })
    }

    /// Has the device begin nothing new on `connections`: now if no lease is left that has to end
    /// first, else when the last one has ended.
    pub(crate) fn stop(&mut self, connections: ForeignList<R::Connection>) {
        self.unstopped = connections;
        let _leased = self.stop_unless_leased();
    }

    /// What has to end first, if anything.
    fn stop_unless_leased(&mut self) -> Option<Outstanding> {
        if self.stage == Stage::Leased {
            let outstanding = self.leases_in_flight();
            if !outstanding.is_empty() {
                return Some(outstanding);
            }
            self.stage = Stage::Draining;
            // Not under the lock, behind one connection after the other.
            let room = Vec::with_capacity(self.unstopped.len());
            self.locked(|writer| writer.suspended.prepare_holds(self.id, room));
            self.stop_more();
        }
        None
    }

    fn stop_more(&mut self) {
        let mut rest = std::mem::take(&mut self.unstopped);
        rest.reverse();
        // Taken off the list behind the calls: whichever panics, a list drops what is the device's.
        while let Some(connection) = rest.last() {
            match self.claim(connection) {
                Some(Claim::Stop) => {
                    self.connections.extend(rest.pop());
                    self.stop_last();
                }
                Some(Claim::Shared) => self.connections.extend(rest.pop()),
                Some(Claim::Later) => self.unstopped.extend(rest.pop()),
                None => rest.pop().into_iter().for_each(discard),
            }
        }
    }

    /// What to do about it; nothing if it is stopped already, and in a forked child.
    fn claim(&self, connection: &R::Connection) -> Option<Claim> {
        if self.connections.contains(connection) {
            return None;
        }
        // Copied, and dropped if it is not needed, outside the lock: it is the device's.
        let mut copy = Foreign::new(connection.clone());
        let claimed = self.locked(|writer| writer.suspended.claim(self.id, &mut copy));
        // It compares connections, which may fork.
        claimed.filter(|_| !self.is_forked())
    }

    /// It is in the list before the call: one that panics half-way is given back too.
    fn stop_last(&mut self) {
        let Some(connection) = self.connections.last() else { return };
        match self.shared.registrar.stop(connection) {
            Ok(()) => _ = self.locked(|writer| writer.suspended.stopped(self.id, connection)),
            Err(why) => {
                drop(self.locked(|writer| writer.suspended.lost(self.id, connection)));
                self.lost.extend(self.connections.pop().map(|connection| (connection, why)));
            }
        }
    }

    pub(crate) fn is_overdue(&self) -> bool {
        self.waited() >= self.terms.deadline
    }

    /// Nothing in a forked child.
    pub(crate) fn waited(&self) -> Duration {
        let now = if self.is_forked() { self.began } else { self.shared.registrar.now() };
        now.saturating_sub(self.began)
    }

    /// How long there is left.
    pub(crate) fn remaining(&self) -> Duration {
        self.terms.deadline.saturating_sub(self.waited())
    }

    /// Has the device wait for progress; not in a forked child.
    pub(crate) fn wait(&self) {
        if !self.is_forked() {
            self.shared.registrar.wait(self.began.saturating_add(self.terms.deadline));
        }
    }

    pub(crate) fn id(&self) -> SuspensionId {
        SuspensionId(self.id)
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.shared.is_forked()
    }

    /// Nothing in a forked child.
    fn locked<T>(&self, f: impl FnOnce(&mut Writer) -> T) -> Option<T> {
        self.shared.locked(f).ok()
    }

    /// Goes on as far as it can, and says what is in the way. Nothing: the memory may be moved.
    pub(crate) fn advance(&mut self) -> Outstanding {
        if let Some(outstanding) = self.stop_unless_leased() {
            return outstanding;
        }
        if self.stage == Stage::Draining {
            self.stop_more();
            let (transfers, unstopped) = (self.transfers(), self.unstopped.len());
            let still = transfers.count + unstopped == 0;
            let mut outstanding = if still { self.park() } else { self.leases_in_flight() };
            outstanding.unstopped = unstopped;
            (outstanding.transfers, outstanding.oldest_transfer) =
                (transfers.count, transfers.oldest);
            if self.stage == Stage::Draining {
                return outstanding;
            }
            self.withdraw();
        }
        self.settle()
    }

    /// What the connections have under way; those that died are lost. Nothing in a forked child, which is
    /// asked each time, because the device may fork.
    fn transfers(&mut self) -> Transfers {
        let mut sum = Transfers::default();
        let (id, range, shared) = (self.id, self.range, self.shared);
        let lost = &mut self.lost;
        self.connections.retain(|connection| {
            if shared.is_forked() {
                return true;
            }
            match shared.registrar.in_flight(connection, range) {
                Ok(transfers) => {
                    sum.count += transfers.count;
                    sum.oldest = sum.oldest.max(transfers.oldest);
                    true
                }
                Err(why) => {
                    lost.push((connection.clone(), why));
                    drop(shared.locked(|writer| writer.suspended.lost(id, connection)));
                    false
                }
            }
        });
        sum
    }

    /// What is in the way now; nothing goes on.
    pub(crate) fn in_the_way(&mut self) -> Outstanding {
        let unstopped = if self.stage == Stage::Draining { self.unstopped.len() } else { 0 };
        let Transfers { count: transfers, oldest: oldest_transfer } = self.transfers();
        Outstanding { unstopped, transfers, oldest_transfer, ..self.leases_in_flight() }
    }

    /// Whether connections went on because of leases until the deadline: too late to stop them.
    pub(crate) fn is_too_late_to_stop(&self) -> bool {
        self.stage == Stage::Leased && self.is_overdue()
    }

    pub(crate) fn leases_in_flight(&self) -> Outstanding {
        self.leased().map(|(outstanding, _)| outstanding).unwrap_or_default()
    }

    /// The leases of the range other than those that were handed over, its registrations under way,
    /// and the snapshot that says so. Nothing in a forked child.
    ///
    /// **Why the lock may be free between the slices.** Behind the suspended range hits find no region of the range,
    /// and gets that hold the lock lease none and begin no registration. So once nothing is under way
    /// that will become a region of the range, a region can come to it in one way alone: another suspension,
    /// which had it in its hands, renews it. A [`Walk`] meets a region unless it moves back, which this is,
    /// and what comes back is noted while a look is under way: where none of it reaches into the range, the walk met every
    /// region, those in other suspensions' hands included. If none of them is leased but by those handed
    /// over, none is left that another suspension can take and renew later; so what is true then stays true.
    /// The snapshot is taken with no lock held, before the walk; what is not leased there is not leased any
    /// more.
    fn leased(&self) -> Option<(Outstanding, Snapshot)> {
        let ours: HashSet<u32> = self.parked.iter().map(|parked| parked.region.number).collect();
        let (under_way, counted, look) = self.locked(|writer| {
            let flights = writer.flights.iter();
            let under_way = flights.filter(|flight| flight.range.overlaps(&self.range)).count();
            (under_way, writer.counted.clone(), writer.suspended.begin_look())
        })?;
        let snapshot = self.shared.hazards.snapshot(&counted);
        let (mut leases, mut elsewhere) = (0, 0);
        self.each_registered(|_, region| {
            // A long one may reach into both, and comes back when the other resumes.
            if region.state() == State::Parked && !ours.contains(&region.number) {
                elsewhere += 1;
                return;
            }
            leases += match Unpublished::of(region) {
                Some(it) => snapshot.leases(&it, self.kept_leases(region.number)),
                // The suspended range closed them all, and what came since is closed or was never found by hits.
                None => 1,
            };
        })?;
        let came_back = self.end_look(look)?;
        // One that is being renewed is under way, and in the other's hands until it lands.
        let registrations = elsewhere.max(under_way).max(usize::from(came_back));
        Some((Outstanding { leases, registrations, ..Outstanding::default() }, snapshot))
    }

    /// Whether a region came back to the range since the look began. Nothing in a forked child.
    fn end_look(&self, mut look: Look) -> Option<bool> {
        let mut came_back = None;
        while came_back.is_none() {
            came_back = self.locked(|writer| writer.suspended.came_back(&mut look, self.range))?;
        }
        self.locked(|writer| writer.suspended.end_look(look))?;
        came_back
    }

    /// Every region of the range, findable or not, slice by slice. One that moves on meanwhile may come
    /// twice. Nothing in a forked child.
    fn each_registered(
        &self,
        mut visit: impl FnMut(&mut Writer, &'c Region<R::Handle>),
    ) -> Option<()> {
        let (shared, mut walk) = (self.shared, Walk::of(self.range));
        while !walk.is_over() {
            self.locked(|writer| {
                let regions = shared.walk_on(writer, &mut walk);
                regions.into_iter().for_each(|region| visit(writer, region));
            })?;
        }
        Some(())
    }

    /// How many leases of a region were handed over, and have not ended.
    fn kept_leases(&self, number: u32) -> usize {
        if self.kept.is_empty() { 0 } else { self.handed_over_of(number).len() }
    }

    /// Where the leases of a region stand among those handed over.
    fn handed_over_of(&self, number: u32) -> Range<usize> {
        let first = self.handed_over.partition_point(|lease| lease.number < number);
        let behind = &self.handed_over[first..];
        first..first + behind.partition_point(|lease| lease.number == number)
    }

    /// The registrations that come back.
    pub(crate) fn parked_ranges(&self) -> impl Iterator<Item = AddressRange> {
        self.parked.iter().map(|parked| parked.range)
    }

    /// If no lease is left but those handed over, puts their registrations out of reach and gives
    /// up all others.
    fn park(&mut self) -> Outstanding {
        let Some((outstanding, snapshot)) = self.leased() else { return Outstanding::default() };
        if !outstanding.is_empty() || self.take_regions(&snapshot).is_none() {
            return outstanding;
        }
        // Outside the lock: what they captured for their invalidation is dropped.
        self.kept.drain(..).for_each(Lease::surrender);
        outstanding
    }

    /// Parks the regions whose leases were handed over, and has the others given back. Nothing in a
    /// forked child.
    fn take_regions(&mut self, snapshot: &Snapshot) -> Option<()> {
        let own_board = self.shared.own_board().ok()?;
        own_board.tell(Notice::Suspended { suspension: self.id(), range: self.range });
        self.stage = Stage::Settling;
        let mut parked = Vec::with_capacity(self.handed_over.len());
        let taken = self.each_registered(|writer, region| {
            parked.extend(self.take_region(writer, region, snapshot));
        });
        self.parked = parked;
        taken
    }

    fn take_region(
        &self,
        writer: &mut Writer,
        region: &'c Region<R::Handle>,
        snapshot: &Snapshot,
    ) -> Option<Parked<'c, R::Handle>> {
        // It was met before, or is in other hands.
        if matches!(region.state(), State::Parked | State::Deregistering) {
            return None;
        }
        // The leases handed over end before anything is done to what is parked.
        let owned = self.kept_leases(region.number);
        let proof = snapshot.idle(&Unpublished::of(region)?, owned)?;
        let parking = self.parking_of(writer, region);
        if parking.is_some() {
            Suspensions(self.shared).withdraw_from_index(writer, region);
            writer.per_use.remove(&region.number);
            writer.lists.park(proof);
        } else if region.findable().is_some() {
            self.shared.note_kept_no_more(writer, region.number);
            self.shared.unpublish(writer, region.number, Lists::supersede);
        }
        parking
    }

    /// What comes back to `region` with the leases that were handed over; `None` if none is its.
    fn parking_of(
        &self,
        writer: &Writer,
        region: &'c Region<R::Handle>,
    ) -> Option<Parked<'c, R::Handle>> {
        let number = region.number;
        let leases = self.handed_over_of(number);
        if leases.is_empty() {
            return None;
        }
        let (range, terms) = (region.range()?, region.terms());
        let per_use = writer.per_use.get(&number).copied();
        Some(Parked { suspension: self.id(), region, range, terms, per_use, leases })
    }

    fn withdraw(&self) {
        // Asked each time, because the device may fork.
        for parked in self.parked.iter().take_while(|_| !self.is_forked()) {
            parked.withdraw(&*self.shared.registrar);
        }
    }

    /// Gives the other registrations back, and says what is left of them.
    fn settle(&self) -> Outstanding {
        Reclaim(self.shared).reclaim();
        let ours: HashSet<u32> = self.parked.iter().map(|parked| parked.region.number).collect();
        let mut registrations = 0;
        self.each_registered(|_, region| {
            registrations += usize::from(!ours.contains(&region.number));
        });
        // Forked inside the device meanwhile, it is not asked.
        let translations = !self.is_forked() && !self.shared.registrar.quiet(self.range);
        Outstanding { registrations, translations, ..Outstanding::default() }
    }

    /// The region is the program's from now on; the suspension may expire.
    pub(crate) fn hand_over(&mut self) {
        self.entrust();
        // Last: a connection whose clone panics must not pass for an expired one's.
        self.stage = Stage::Handed;
    }

    /// The suspension's value is the program's from now on: it may be forgotten, so the clock may end
    /// it until [`take_back`](Self::take_back).
    pub(crate) fn entrust(&mut self) {
        let end = match self.stage {
            Stage::Leased | Stage::Draining => End::GoOn,
            // The handles of what is withdrawn are free for other uses behind this, and what stands in
            // the queues of the connections may name them.
            Stage::Settling | Stage::Handed | Stage::Returning | Stage::Over => End::Fail {
                parked: self.parked.iter().map(|parked| parked.region.number).collect(),
            },
        };
        let connections = self.connections.copies();
        let connections: Option<Box<dyn Any + Send>> =
            if connections.is_empty() { None } else { Some(Box::new(connections)) };
        let on_expiry = OnExpiry { connections, end };
        self.locked(|writer| writer.suspended.hand_over(self.id, on_expiry));
        self.entrusted = true;
    }

    pub(crate) fn has_expired(&self) -> bool {
        self.locked(|writer| writer.suspended.has_expired(self.id)).unwrap_or_default()
    }

    /// Ends the program's time with it. False if the suspension has expired: then it owns nothing any
    /// more but leases that were not withdrawn, and names the connections that were failed.
    pub(crate) fn take_back(&mut self) -> bool {
        if !std::mem::replace(&mut self.entrusted, false) {
            return true;
        }
        let ours = self.locked(|writer| writer.suspended.take_back(self.id)).flatten().is_some();
        if !ours {
            let before = std::mem::replace(&mut self.stage, Stage::Over);
            self.parked.clear();
            // Those go on.
            if matches!(before, Stage::Leased | Stage::Draining) {
                drop(std::mem::take(&mut self.connections));
            }
        }
        ours
    }

    /// What is left of the leases handed over to a suspension that has expired, in their order.
    pub(crate) fn leases_after_expiry(&mut self) -> Vec<Returned<'c, R, M>> {
        let mut leases: Vec<_> = self.kept.drain(..).map(Ok).collect();
        leases.resize_with(self.leases, || Err(GIVEN_UP_AT_THE_DEADLINE));
        leases
    }

    /// Renews what was parked and lets everything go on. The leases come back in the order in
    /// which they were handed over.
    pub(crate) fn resume(&mut self) -> (HandedOver<Returned<'c, R, M>>, Keys) {
        let before = std::mem::replace(&mut self.stage, Stage::Returning);
        let (returned, keys) = self.renew();
        self.restart();
        let (suspension, range) = (self.id(), self.range);
        self.end(|writer, shared| {
            let counts = &mut writer.suspended.counts;
            if before == Stage::Handed {
                counts.resumed += 1;
            } else {
                counts.refused += 1;
            }
            // Before anything was withdrawn there was nothing to tell.
            if matches!(before, Stage::Settling | Stage::Handed) {
                shared.tell(writer, Notice::Resumed { suspension, range, keys });
            }
        });
        (returned, keys)
    }

    fn renew(&mut self) -> (HandedOver<Returned<'c, R, M>>, Keys) {
        let mut keys = Keys::Same;
        // Those that were not parked yet are as they were.
        let kept = self.kept.drain(..).map(|lease| Some(Ok(lease)));
        let mut returned = HandedOver::new(kept.collect());
        returned.resize_with(self.leases, || None);
        while let Some(parked) = self.parked.pop() {
            let handed_over = &self.handed_over[parked.leases.clone()];
            let renewal = Renewal::begin(self.shared, parked);
            match renewal.and_then(|it| it.run(handed_over, &mut returned)) {
                Ok(renewed) => keys = if renewed == Keys::Changed { renewed } else { keys },
                Err(error) => {
                    handed_over.iter().for_each(|it| returned[it.place] = Some(Err(error)));
                }
            }
        }
        (HandedOver::new(returned.into_vec().into_iter().flatten().collect()), keys)
    }

    fn restart(&mut self) {
        // Taken off the list behind the call: one that panics half-way is failed with the rest.
        while let Some(connection) = self.connections.last() {
            // Unless another suspension holds it: then it goes on when that one releases it.
            let Some(restarted) = Suspensions(self.shared).let_go_on(self.id, connection) else {
                self.connections.pop().into_iter().for_each(discard);
                continue;
            };
            drop(self.locked(|writer| writer.suspended.restarted(self.id, connection)));
            if let Err(why) = restarted {
                self.lost.push((connection.clone(), why));
            }
            self.restarted.extend(self.connections.pop());
        }
    }

    /// Fails the connections in the open, those that go on again too, and gives up what was parked.
    fn kill(&mut self, by: Revocation) {
        self.connections.append(&mut self.restarted);
        let device_panics = fail_all(self.shared, &mut self.connections);
        let parked = std::mem::take(&mut self.parked);
        let numbers: Vec<u32> = parked.iter().map(|parked| parked.region.number).collect();
        let (suspension, range) = (self.id(), self.range);
        // In a forked child they are the parent's.
        let _forked = lose(self.shared, suspension, range, &numbers);
        self.end(|writer, shared| {
            shared.tell(writer, Notice::Revoked { suspension, range, by });
            writer.suspended.counts.killed += 1;
            writer.suspended.counts.device_panics += device_panics;
        });
        // Last: a device that panics here holds nothing up any more.
        Reclaim(self.shared).reclaim();
    }

    /// Takes the suspended range down.
    fn end(&mut self, say: impl FnOnce(&mut Writer, &Shared<R, M>)) {
        self.stage = Stage::Over;
        if let Ok(()) = Suspensions(self.shared).end(self.id, self.range, say) {
            // What could not be renewed was given back to a shared budget.
            self.shared.settle();
        }
    }

    /// The way out of those who took none.
    fn abandon(&mut self) {
        match self.stage {
            Stage::Over => {}
            Stage::Handed => self.abandon_handed(),
            Stage::Returning => self.kill(Revocation::DevicePanicked),
            // No thread has touched the memory.
            Stage::Leased | Stage::Draining | Stage::Settling => {
                let theirs = self.entrusted;
                if self.take_back() {
                    let (leases, _) = self.resume();
                    // The program has dropped them; else a panic has, on its way through the library.
                    if theirs {
                        drop(leases.into_vec());
                    }
                }
            }
        }
    }

    fn abandon_handed(&mut self) {
        if !self.take_back() {
            return;
        }
        match self.terms.on_drop {
            OnDrop::Kill => self.kill(Revocation::Dropped),
            // On the program's word.
            OnDrop::Resume => drop(self.resume().0.into_vec()),
        }
    }
}

impl<R: Suspend, M: Monitor> Drop for SuspensionGuard<'_, R, M> {
    fn drop(&mut self) {
        let theirs = self.entrusted;
        // In a forked child connections and registrations are the parent's.
        let ends = self.stage != Stage::Over && !self.is_forked();
        let ended = if ends { foreign::call(|| self.abandon()) } else { Ok(()) };
        if ended.is_err() {
            // The device panicked: whatever is left is ended, and then the panic goes on, unless there
            // is one already.
            let mut kept_back = u64::from(std::thread::panicking());
            if self.stage != Stage::Over {
                kept_back += u64::from(!runs_through(|| self.kill(Revocation::DevicePanicked)));
            }
            self.locked(|writer| writer.suspended.counts.device_panics += kept_back);
        }
        // What is left of a suspension that has expired. Behind a panic of the device's, whose connections
        // may go on, they are forgotten.
        if theirs && ended.is_ok() {
            discard_all(self.kept.drain(..));
        }
        if let Err(panicked) = ended {
            panicked.resume_unless_unwinding();
        }
    }
}
