//! A lease: one use of a region in flight.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the registration of the region that a lease pins.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::error::PerUse;
use crate::foreign::discard;
use crate::monitor::{Forked, Monitor};
use crate::reclaim::Reclaim;
use crate::region::{Ask, Region};
use crate::registrar::Registrar;
use crate::shared::{Hit, Pin, Shared};
use std::fmt;
use std::mem::ManuallyDrop;

/// One use of a registration. While it lives, the registration is not given back.
///
/// A lease may live long, be sent to another thread and end there. Ending it costs a store and a
/// load, unless its region has been invalidated or was registered for this one use.
///
/// A lease holds the registration, not the memory: if the program unmaps the memory meanwhile,
/// the device goes on with the old pages, and [`is_invalidated`](Self::is_invalidated) says so.
/// A lease that is leaked (`mem::forget`) pins its own region until the cache is dropped.
///
/// It does not outlive its cache:
///
/// ```compile_fail,E0505
/// # use pinfold_core::{Access, Cache, Monitor, Registrar};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>, start: *const u8) {
/// let lease = unsafe { cache.get(start, 1, Access::READ) }.unwrap();
/// drop(cache);
/// drop(lease);
/// # }
/// ```
#[must_use = "a registration may be given back as soon as its lease is dropped"]
pub struct Lease<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    region: &'c Region<R::Handle>,
    pin: Pin<'c>,
    range: AddressRange,
    duties: Duties,
}

/// A lease taken apart.
///
/// The slow path hands this over, so that the lease of a hit, which is made in the same function,
/// need not stand where the slow path would write it.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'c, H> {
    region: &'c Region<H>,
    pin: Pin<'c>,
    range: AddressRange,
    duties: Duties,
}

/// What the end of a lease takes besides emptying its slot. For nearly all nothing, which is one
/// question because it is one word.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Duties(u64);

impl Duties {
    const NONE: Self = Self(0);
    /// The lease is the one lease of a region that is not cached.
    const PER_USE: Self = Self(1 << 63);

    const fn is_per_use(self) -> bool {
        self.0 & Self::PER_USE.0 != 0
    }

    /// The callback that the lease asked for; 0 for none.
    const fn callback(self) -> u64 {
        self.0 & !Self::PER_USE.0
    }

    #[must_use]
    const fn with_callback(self, id: u64) -> Self {
        Self(self.0 & Self::PER_USE.0 | id)
    }
}

impl<'c, R: Registrar, M: Monitor> Lease<'c, R, M> {
    /// The lease of a region that was found.
    #[inline(always)]
    pub(crate) fn of_hit(shared: &'c Shared<R, M>, hit: Hit<'c, R::Handle>, ask: Ask) -> Self {
        // The region contains what was asked for.
        let range = AddressRange::within_another(ask.start, ask.end());
        Self::of_cached(shared, hit.region, Some(hit.hazard), range)
    }

    /// A lease of a cached region, which `pin` keeps.
    #[inline(always)]
    pub(crate) fn of_cached(
        shared: &'c Shared<R, M>,
        region: &'c Region<R::Handle>,
        pin: Pin<'c>,
        range: AddressRange,
    ) -> Self {
        Self { shared, region, pin, range, duties: Duties::NONE }
    }

    /// The one lease of a region that is not cached.
    pub(crate) fn of_per_use(
        shared: &'c Shared<R, M>,
        region: &'c Region<R::Handle>,
        pin: Pin<'c>,
        range: AddressRange,
    ) -> Self {
        Self { shared, region, pin, range, duties: Duties::PER_USE }
    }

    /// What stands behind the lease, which goes on in [`of_parts`](Self::of_parts).
    pub(crate) fn into_parts(self) -> Parts<'c, R::Handle> {
        let lease = ManuallyDrop::new(self);
        Parts { region: lease.region, pin: lease.pin, range: lease.range, duties: lease.duties }
    }

    /// The place of the region.
    pub(crate) fn number(&self) -> u32 {
        self.region.number
    }

    /// Whether this is a lease of the cache behind `shared`.
    pub(crate) fn is_of(&self, shared: &Shared<R, M>) -> bool {
        std::ptr::eq(self.shared, shared)
    }

    /// Ends the lease of a region that is in the hands of a suspension, and nothing but the lease.
    pub(crate) fn surrender(self) {
        let lease = ManuallyDrop::new(self);
        forget_callback(lease.shared, lease.region, lease.duties);
        match lease.pin {
            Some(hazard) => hazard.clear(),
            None => Reclaim(lease.shared).uncount(lease.region),
        }
    }

    /// The lease that was taken apart.
    #[inline(always)]
    pub(crate) fn of_parts(shared: &'c Shared<R, M>, parts: Parts<'c, R::Handle>) -> Self {
        let Parts { region, pin, range, duties } = parts;
        Self { shared, region, pin, range, duties }
    }

    /// What the device gave: a buffer's index, keys. Good until the lease ends.
    #[inline]
    pub fn handle(&self) -> R::Handle {
        // SAFETY: the pin has kept the region from being freed since it was seen live, or
        // since it was filled for this lease.
        unsafe { self.region.handle() }
    }

    /// The bytes asked for.
    #[inline]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// The bytes registered, which contain those asked for.
    pub fn registered(&self) -> AddressRange {
        self.region.range().unwrap_or(self.range)
    }

    /// `None` if the registration is kept for later uses, else why it is not.
    ///
    /// A region that was given up since, or invalidated, counts as it was when leased. Takes the
    /// cache's lock for a registration that is not kept. In a forked child always `None`.
    pub fn per_use(&self) -> Option<PerUse> {
        if !self.duties.is_per_use() {
            return None;
        }
        let number = self.region.number;
        self.shared.locked(|writer| writer.per_use.get(&number).copied()).ok().flatten()
    }

    /// Whether the registration is kept for later uses.
    pub fn is_cached(&self) -> bool {
        !self.duties.is_per_use()
    }

    /// Whether the mapping of the registered bytes changed since they were registered: what the
    /// device then moves is not what the program has at this address.
    ///
    /// Knows of every change that a `get` begun now would know of. Memory that no monitor covers
    /// is never reported, nor what was registered for one use without being watched
    /// ([`PerUse::Asked`], [`PerUse::NotAdmitted`], [`PerUse::Remote`], [`PerUse::Full`]) unless a cached region shares it, and
    /// then a change that ended just before the get may count, which may not have waited for what the monitor had not logged
    /// yet; memory registered while a discard of it was pending ([`PerUse::ChangePending`]) always is, because it is unknown.
    /// Costs a monitor's check.
    pub fn is_invalidated(&self) -> bool {
        self.shared.catch_up_for_lease(self.region);
        self.region.state().is_invalidated()
    }

    /// Has `callback` run once when the region is [invalidated](Self::is_invalidated) while this lease lives; at once if
    /// that has happened already. Replaces an earlier callback of this lease.
    ///
    /// It runs on whatever thread finds out first, the reclaimer or one inside a `get`, with no
    /// lock of the cache held; it may use the cache. Where the cache shares a budget with a pool it may
    /// be a thread that makes the pool grow: the callback must not wait for one that asks that pool.
    /// Callbacks that use the cache nest: each such call runs those that it finds due, on top of the one that it
    /// is made in. That is one level for 64 leases: 100,000 leases of one changed range whose callbacks all use the cache
    /// can exhaust the thread's stack. Where there may be so many, they use it from another thread.
    /// A panic in it is caught and counted. Ending
    /// the lease takes the callback back, unless it is being run. In a forked child it is dropped.
    pub fn on_invalidate(&mut self, callback: impl FnOnce() + Send + 'static) {
        forget_callback(self.shared, self.region, self.duties);
        self.duties = self.duties.with_callback(0);
        match self.shared.watch_region(self.region, Box::new(callback)) {
            Ok(Ok(id)) => self.duties = self.duties.with_callback(id),
            Ok(Err(callback)) => self.shared.run_now(callback),
            Err(Forked) => {}
        }
    }
}

/// Takes back the callback of a lease of `region`.
fn forget_callback<R: Registrar, M: Monitor>(
    shared: &Shared<R, M>,
    region: &Region<R::Handle>,
    duties: Duties,
) {
    if duties.callback() != 0 {
        let forgotten =
            shared.locked(|writer| writer.watchers.forget(region.number, duties.callback()));
        // Dropped here, outside the lock: what it captured may use the cache.
        discard(forgotten);
    }
}

/// The ways of ending a lease that are not a store and a load.
///
/// By values, not by the lease: one whose address is taken has to stand in memory, and every
/// hit would write it.
#[cold]
fn end_slowly<R: Registrar, M: Monitor>(
    shared: &Shared<R, M>,
    region: &Region<R::Handle>,
    pin: Pin<'_>,
    duties: Duties,
) {
    // In a forked child all of it is the parent's.
    if shared.is_forked() {
        return;
    }
    forget_callback(shared, region, duties);
    match pin {
        Some(hazard) => hazard.clear(),
        None => Reclaim(shared).uncount(region),
    }
    if duties.is_per_use() {
        Reclaim(shared).end_per_use(region);
    } else {
        wake_if_dead(shared, region);
    }
}

/// Sees to it that the region is given back if it was taken out of the cache while leased;
/// [`say_if_awaited`](Shared::say_if_awaited) has the argument.
#[inline(always)]
fn wake_if_dead<R: Registrar, M: Monitor>(shared: &Shared<R, M>, region: &Region<R::Handle>) {
    shared.hazards.light_barrier();
    shared.say_if_awaited(region);
}

impl<R: Registrar, M: Monitor> Drop for Lease<'_, R, M> {
    #[inline]
    fn drop(&mut self) {
        let Self { shared, region, pin, duties, .. } = *self;
        match pin {
            Some(hazard) if duties == Duties::NONE => {
                hazard.clear();
                wake_if_dead(shared, region);
            }
            _ => end_slowly(shared, region, pin, duties),
        }
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Lease<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("range", &self.range)
            .field("registered", &self.registered())
            .field("handle", &self.handle())
            .field("cached", &self.is_cached())
            .finish()
    }
}
