//! A lease: one use of a region in flight.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the registration of the region that a lease pins.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::error::PerUse;
use crate::monitor::Monitor;
use crate::region::{Region, Status};
use crate::registrar::Registrar;
use crate::shared::{Hit, Pin, Shared};
use crate::watchers::Callback;
use std::fmt;

/// One use of a registration. While it lives, the registration is not given back.
///
/// A lease may live long, be sent to another thread and end there. Ending it costs a store and a
/// load, unless its region has been invalidated or was registered for this one use.
///
/// A lease holds the registration, not the memory: if the program unmaps the memory meanwhile,
/// the device goes on with the old pages, and [`is_invalidated`](Self::is_invalidated) says so.
/// A lease that is leaked (`mem::forget`) pins its own region until the cache is dropped.
#[must_use = "a registration may be given back as soon as its lease is dropped"]
pub struct Lease<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    region: &'c Region<R::Handle>,
    pin: Pin<'c>,
    range: AddressRange,
    /// The callback that this lease asked for; 0 for none.
    callback: u32,
    /// Whether this is the one lease of a region that is not cached.
    per_use: bool,
}

impl<'c, R: Registrar, M: Monitor> Lease<'c, R, M> {
    /// The lease of a region that was found.
    #[inline(always)]
    pub(crate) fn of_hit(
        shared: &'c Shared<R, M>,
        hit: Hit<'c, R::Handle>,
        range: AddressRange,
    ) -> Self {
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
        Self { shared, region, pin, range, callback: 0, per_use: false }
    }

    /// The one lease of a region that is not cached.
    pub(crate) fn of_per_use(
        shared: &'c Shared<R, M>,
        region: &'c Region<R::Handle>,
        pin: Pin<'c>,
        range: AddressRange,
    ) -> Self {
        Self { shared, region, pin, range, callback: 0, per_use: true }
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
        if !self.per_use || self.shared.monitor.forked() {
            return None;
        }
        let number = self.region.number;
        self.shared.locked(|writer| {
            let mut reasons = writer.per_use.iter();
            reasons.find(|(other, _)| *other == number).map(|&(_, why)| why)
        })
    }

    /// Whether the registration is kept for later uses.
    pub fn is_cached(&self) -> bool {
        !self.per_use
    }

    /// Whether the mapping of the registered bytes changed since they were registered: what the
    /// device then moves is not what the program has at this address.
    ///
    /// Knows of every change that a `get` begun now would know of. Memory that no monitor covers
    /// is never reported; memory registered while a discard of it was in flux
    /// ([`PerUse::InFlux`]) always is, because nobody can tell. Costs a monitor's check.
    pub fn is_invalidated(&self) -> bool {
        if !matches!(self.shared.is_current(), Ok(true)) {
            self.shared.catch_up_for_lease();
        }
        matches!(self.region.status(), Status::Invalidated | Status::PerUseInvalidated)
    }

    /// Has `callback` run once when the region is invalidated while this lease lives; at once if
    /// that has happened already. Replaces an earlier callback of this lease.
    ///
    /// It runs on whatever thread finds out first, the reclaimer or one inside a `get`, with no
    /// lock of the cache held; it may use the cache. A panic in it is caught and counted. Ending
    /// the lease takes the callback back, unless it is being run. In a forked child it is dropped.
    pub fn on_invalidate(&mut self, callback: impl FnOnce() + Send + 'static) {
        if self.shared.monitor.forked() {
            return;
        }
        self.forget_callback();
        match self.shared.watch_region(self.region, Box::new(callback)) {
            Ok(id) => self.callback = id,
            Err(callback) => self.shared.run_now(callback),
        }
    }

    fn forget_callback(&mut self) {
        if self.callback != 0 {
            let id = std::mem::take(&mut self.callback);
            let callback: Option<Callback> =
                self.shared.locked(|writer| writer.watchers.forget(self.region.number, id));
            // Dropped here, outside the lock: what it captured may use the cache.
            drop(callback);
        }
    }

    /// The ways of ending that are not a store and a load.
    #[cold]
    fn end_slowly(&mut self) {
        // In a forked child all of it is the parent's, and the lock may be held by a thread that
        // does not exist here.
        if self.shared.monitor.forked() {
            return;
        }
        self.forget_callback();
        match &self.pin {
            Some(hazard) => hazard.clear(),
            None => self.shared.uncount(self.region),
        }
        if self.per_use {
            self.shared.end_per_use(self.region);
        } else {
            self.wake_if_dead();
        }
    }

    /// Sees to it that the region is given back if it was taken out of the cache while leased;
    /// [`Shared::say_if_awaited`] has the argument.
    #[inline]
    fn wake_if_dead(&self) {
        self.shared.barriers().light();
        self.shared.say_if_awaited(self.region);
    }
}

impl<R: Registrar, M: Monitor> Drop for Lease<'_, R, M> {
    #[inline]
    fn drop(&mut self) {
        match &self.pin {
            Some(hazard) if !self.per_use && self.callback == 0 => {
                hazard.clear();
                self.wake_if_dead();
            }
            _ => self.end_slowly(),
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
