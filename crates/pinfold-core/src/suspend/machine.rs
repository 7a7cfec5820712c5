//! The states of a suspension, as types; the parent module draws them.

use super::device::Suspend;
use super::ending::Suspensions;
use super::guard::SuspensionGuard;
use super::report::{
    Ended, Expired, Leases, NotSuspended, Outstanding, Refused, Resumed, SuspensionTerms, Why,
};
use crate::AddressRange;
use crate::board::{Keys, SuspensionId};
use crate::cache::Cache;
use crate::foreign::{ForeignList, HandedOver};
use crate::lease::Lease;
use crate::monitor::Monitor;
use crate::registrar::Registrar;
use crate::shared::Shared;
use crate::suspended_ranges::SuspensionStatistics;
use std::fmt;
use std::time::Duration;

/// What a suspension ends in that does not come about.
type Refusal<'c, R, M> = Box<NotSuspended<'c, R, M>>;

impl<R: Registrar, M: Monitor> Cache<R, M> {
    /// What became of the suspensions of this cache; zeros in a forked child.
    pub fn suspension_statistics(&self) -> SuspensionStatistics {
        self.shared.locked(|writer| writer.suspended.counts).unwrap_or_default()
    }
}

impl<R: Suspend, M: Monitor> Cache<R, M> {
    /// Stops every connection that can touch `range`, widened to whole pages, and waits until
    /// nothing touches it; see [`suspend`](crate::suspend) for the whole course and its price.
    ///
    /// `connections` are all that can touch the range, which only the program knows. One that is not named
    /// goes on: what it still moves by a lease that was handed over it moves to or from the pages that were
    /// registered, or it fails, and no other memory is touched; but the program may find the bytes of before
    /// where it replaced these pages. So what replaces pages is unsafe, and asks for the whole list.
    /// `leases` are those that come back when it resumes, with their registrations renewed; each touches the
    /// range. Their callbacks for invalidation are dropped.
    ///
    /// # Errors
    ///
    /// [`NotSuspended`], which says why and holds the leases. Everything goes on.
    pub fn suspend<'c>(
        &'c self,
        range: AddressRange,
        connections: Vec<R::Connection>,
        leases: Vec<Lease<'c, R, M>>,
        terms: SuspensionTerms,
    ) -> Result<Suspended<'c, R, M>, Box<NotSuspended<'c, R, M>>> {
        let mut guard = self.begin(range, connections, leases, terms)?;
        loop {
            match go_on(guard)? {
                Step::Suspended(suspended) => return Ok(suspended),
                Step::Pending(pending, _) => {
                    pending.wait();
                    guard = pending;
                }
            }
        }
    }

    /// As [`suspend`](Self::suspend), for a program that does other things while it waits, such
    /// as taking the completions that end its leases.
    ///
    /// # Errors
    ///
    /// [`NotSuspended`], which says why and holds the leases. Everything goes on.
    pub fn begin_suspension<'c>(
        &'c self,
        range: AddressRange,
        connections: Vec<R::Connection>,
        leases: Vec<Lease<'c, R, M>>,
        terms: SuspensionTerms,
    ) -> Result<Suspending<'c, R, M>, Box<NotSuspended<'c, R, M>>> {
        self.begin(range, connections, leases, terms).map(Suspending::new)
    }

    fn begin<'c>(
        &'c self,
        range: AddressRange,
        connections: Vec<R::Connection>,
        leases: Vec<Lease<'c, R, M>>,
        terms: SuspensionTerms,
    ) -> Result<SuspensionGuard<'c, R, M>, Refusal<'c, R, M>> {
        let (leases, connections) = (HandedOver::new(leases), ForeignList::new(connections));
        let range = range.page_aligned(self.shared.limits.page_bytes);
        if let Err(why) = check(&self.shared, range, &connections, &leases) {
            return Err(not_suspended(why, leases.into_vec()));
        }
        let guard = SuspensionGuard::new(&self.shared, range, terms, leases);
        let mut guard = guard.map_err(|(why, leases)| not_suspended(why, leases.into_vec()))?;
        if terms.leases == Leases::Refuse {
            let outstanding = guard.leases_in_flight();
            if !outstanding.is_empty() {
                return Err(refuse(guard, outstanding));
            }
        }
        guard.stop(connections);
        Ok(guard)
    }

    /// Ends every suspension whose deadline has passed, whatever became of its value: gets go on. Says
    /// how many there were.
    ///
    /// The connections of a [`Suspended`] are failed in the open and the registrations that it kept are
    /// deregistered; so it is with a [`Suspending`] that has withdrawn registrations. Before that, its
    /// connections go on. One that is in a call of its own ends there.
    ///
    /// For a program's event loop or watchdog, which cannot be sure that the thread that suspended
    /// comes back. The memory is left as it is: what is half re-arranged is the program's affair.
    pub fn expire_suspensions(&self) -> usize {
        Suspensions(&self.shared).expire_suspensions()
    }
}

/// Everything that can be refused before anything is touched.
fn check<R: Suspend, M: Monitor>(
    shared: &Shared<R, M>,
    range: AddressRange,
    connections: &[R::Connection],
    leases: &[Lease<'_, R, M>],
) -> Result<(), Why<R::Connection>> {
    if shared.is_forked() {
        return Err(Why::Forked);
    }
    let foreign =
        |lease: &Lease<'_, R, M>| !lease.is_of(shared) || !lease.registered().overlaps(&range);
    if let Some(index) = leases.iter().position(foreign) {
        return Err(Why::ForeignLease { index });
    }
    shared.registrar.can_suspend(range, connections).map_err(Why::Unsupported)
}

fn not_suspended<'c, R: Suspend, M: Monitor>(
    why: Why<R::Connection>,
    leases: Vec<Lease<'c, R, M>>,
) -> Refusal<'c, R, M> {
    Box::new(NotSuspended { why, leases: leases.into_iter().map(Ok).collect(), keys: Keys::Same })
}

/// Lets everything go on as before.
fn refuse<'c, R: Suspend, M: Monitor>(
    mut guard: SuspensionGuard<'c, R, M>,
    outstanding: Outstanding,
) -> Refusal<'c, R, M> {
    let waited = guard.waited();
    let (leases, keys) = guard.resume();
    if guard.is_forked() {
        return not_suspended(Why::Forked, Vec::new());
    }
    let lost = std::mem::take(&mut guard.lost).into_vec();
    let why = Why::Refused(Refused { outstanding, waited, lost, failed: Vec::new() });
    Box::new(NotSuspended { why, leases: leases.into_vec(), keys })
}

/// What a suspension meets that [`Cache::expire_suspensions`] has ended.
fn expired<'c, R: Suspend, M: Monitor>(mut guard: SuspensionGuard<'c, R, M>) -> Refusal<'c, R, M> {
    if guard.is_forked() {
        return not_suspended(Why::Forked, Vec::new());
    }
    let (waited, lost) = (guard.waited(), std::mem::take(&mut guard.lost).into_vec());
    let failed = std::mem::take(&mut guard.connections).into_vec();
    let why = Why::Refused(Refused { outstanding: Outstanding::default(), waited, lost, failed });
    Box::new(NotSuspended { why, leases: guard.leases_after_expiry(), keys: Keys::Same })
}

/// How far a suspension has come that is in no program's hands yet, or again.
#[allow(clippy::large_enum_variant)] // lives for a moment, on the stack
enum Step<'c, R: Suspend, M: Monitor> {
    Pending(SuspensionGuard<'c, R, M>, Outstanding),
    Suspended(Suspended<'c, R, M>),
}

/// Goes as far as it can without waiting.
fn go_on<'c, R: Suspend, M: Monitor>(
    mut guard: SuspensionGuard<'c, R, M>,
) -> Result<Step<'c, R, M>, Refusal<'c, R, M>> {
    if guard.is_forked() {
        return Err(not_suspended(Why::Forked, Vec::new()));
    }
    if guard.is_too_late_to_stop() {
        let outstanding = guard.in_the_way();
        return Err(refuse(guard, outstanding));
    }
    let outstanding = guard.advance();
    // Again, because the device may have forked.
    if guard.is_forked() {
        return Err(not_suspended(Why::Forked, Vec::new()));
    }
    if outstanding.is_empty() {
        guard.hand_over();
        return Ok(Step::Suspended(Suspended { guard }));
    }
    if guard.is_overdue() {
        return Err(refuse(guard, outstanding));
    }
    Ok(Step::Pending(guard, outstanding))
}

/// A suspension under way: gets are barred and connections stopped, and something is in flight.
///
/// Dropping it cancels it: everything goes on, and the leases handed over end. Forgotten, it stands until
/// [`Cache::expire_suspensions`] finds it overdue.
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold_core::{AddressRange, Cache, Monitor, Suspend, SuspensionTerms};
/// # fn after_its_parent<R: Suspend, M: Monitor>(cache: Cache<R, M>, range: AddressRange) {
/// let terms = SuspensionTerms::default();
/// let it = cache.begin_suspension(range, Vec::new(), Vec::new(), terms).ok().unwrap();
/// drop(cache);
/// drop(it);
/// # }
/// ```
#[must_use = "what is dropped here goes on as before"]
pub struct Suspending<'c, R: Suspend, M: Monitor> {
    guard: SuspensionGuard<'c, R, M>,
}

/// How far a suspension has come.
#[allow(clippy::large_enum_variant)] // lives for a moment, on the stack
pub enum SuspendProgress<'c, R: Suspend, M: Monitor> {
    /// Something is in flight still: ask again later.
    Pending(Suspending<'c, R, M>, Outstanding),
    /// Nothing touches the region any more.
    Suspended(Suspended<'c, R, M>),
}

impl<'c, R: Suspend, M: Monitor> Suspending<'c, R, M> {
    fn new(mut guard: SuspensionGuard<'c, R, M>) -> Self {
        guard.entrust();
        Self { guard }
    }

    /// What notices call this suspension.
    pub fn id(&self) -> SuspensionId {
        self.guard.id()
    }

    /// Goes as far as it can without waiting.
    ///
    /// # Errors
    ///
    /// [`NotSuspended`] at the deadline. Everything goes on, but what it names.
    pub fn poll(mut self) -> Result<SuspendProgress<'c, R, M>, Box<NotSuspended<'c, R, M>>> {
        if !self.guard.take_back() {
            return Err(expired(self.guard));
        }
        Ok(match go_on(self.guard)? {
            Step::Pending(guard, outstanding) => {
                SuspendProgress::Pending(Self::new(guard), outstanding)
            }
            Step::Suspended(suspended) => SuspendProgress::Suspended(suspended),
        })
    }

    /// Lets everything go on as before, with the leases back, but what the answer names.
    pub fn cancel(mut self) -> Box<NotSuspended<'c, R, M>> {
        if self.guard.is_forked() {
            return not_suspended(Why::Forked, Vec::new());
        }
        if !self.guard.take_back() {
            return expired(self.guard);
        }
        let outstanding = self.guard.in_the_way();
        refuse(self.guard, outstanding)
    }
}

/// A region that nothing touches: its memory may be moved, made huge, trimmed.
///
/// Ends in [`resume`](Self::resume). Dropped instead, by a panic for one, it ends as
/// [`OnDrop`](crate::OnDrop) says, and is counted.
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold_core::{AddressRange, Cache, Monitor, Suspend, SuspensionTerms};
/// # fn after_its_parent<R: Suspend, M: Monitor>(cache: Cache<R, M>, range: AddressRange) {
/// let terms = SuspensionTerms::default();
/// let it = cache.suspend(range, Vec::new(), Vec::new(), terms).ok().unwrap();
/// drop(cache);
/// drop(it);
/// # }
/// ```
#[must_use = "a suspension that is dropped is killed, unless its terms say otherwise"]
pub struct Suspended<'c, R: Suspend, M: Monitor> {
    guard: SuspensionGuard<'c, R, M>,
}

impl<'c, R: Suspend, M: Monitor> Suspended<'c, R, M> {
    /// What notices call this suspension.
    pub fn id(&self) -> SuspensionId {
        self.guard.id()
    }

    /// What is suspended, in whole pages.
    pub fn range(&self) -> AddressRange {
        self.guard.range
    }

    /// The connections that are stopped.
    pub fn connections(&self) -> &[R::Connection] {
        &self.guard.connections
    }

    /// How long there is left before the deadline.
    pub fn remaining(&self) -> Duration {
        self.guard.remaining()
    }

    /// What is registered still, and will be renewed when it resumes: the whole registrations of
    /// the leases that were handed over, which may reach beyond the range.
    pub fn registered(&self) -> impl Iterator<Item = AddressRange> {
        self.guard.parked_ranges()
    }

    /// Whether this process is a forked child of the one that suspended: then nothing here is its
    /// own, and the memory is a copy.
    pub fn is_forked(&self) -> bool {
        self.guard.is_forked()
    }

    /// Whether [`expire_suspensions`](Cache::expire_suspensions) has ended it. From then on the
    /// region is like any other: gets go on, and the thread that moves its memory sees to it that no
    /// transfer uses it.
    pub fn has_expired(&self) -> bool {
        self.guard.has_expired()
    }

    /// Renews the registrations that were kept and lets everything go on.
    ///
    /// Whatever was done to the memory, no translation from before survives: what is kept is
    /// registered anew, all else was given back before this value existed.
    ///
    /// # Errors
    ///
    /// [`Expired`] if the deadline passed and
    /// [`expire_suspensions`](Cache::expire_suspensions) found it so, and in a forked child. Being
    /// late alone is none: [`Resumed::late`] tells.
    pub fn resume(mut self) -> Result<Resumed<'c, R, M>, Expired<R::Connection>> {
        if self.guard.is_forked() {
            return Err(forked());
        }
        if !self.guard.take_back() {
            let failed = std::mem::take(&mut self.guard.connections).into_vec();
            let lost = std::mem::take(&mut self.guard.lost).into_vec();
            return Err(Expired { reason: Ended::Deadline, failed, lost });
        }
        let (leases, keys) = self.guard.resume();
        // Again, because the device may have forked; nothing of the parent's was restarted here.
        if self.guard.is_forked() {
            return Err(forked());
        }
        let paused = self.guard.waited();
        let late = paused.checked_sub(self.guard.terms.deadline).filter(|late| !late.is_zero());
        let lost = std::mem::take(&mut self.guard.lost).into_vec();
        Ok(Resumed { leases: leases.into_vec(), keys, lost, paused, late })
    }
}

/// What resuming meets in a forked child.
fn forked<C>() -> Expired<C> {
    Expired { reason: Ended::Forked, failed: Vec::new(), lost: Vec::new() }
}

impl<R: Suspend, M: Monitor> fmt::Debug for Suspending<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suspending").field("range", &self.guard.range).finish_non_exhaustive()
    }
}

impl<R: Suspend, M: Monitor> fmt::Debug for Suspended<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suspended").field("range", &self.guard.range).finish_non_exhaustive()
    }
}

impl<R: Suspend, M: Monitor> fmt::Debug for SuspendProgress<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending(suspending, outstanding) => {
                f.debug_tuple("Pending").field(suspending).field(outstanding).finish()
            }
            Self::Suspended(suspended) => f.debug_tuple("Suspended").field(suspended).finish(),
        }
    }
}
