//! On-demand paging first, pinned pages where it cannot be had.
//!
//! Registrations that [page on demand](crate::registrar::verbs::OnDemand) pin nothing, need no monitor
//! and follow every change; a device may offer them for some operations, for some memory, or claim
//! them and move the wrong bytes. [`OnDemandOrPinned`] asks each time and falls back to a cache of
//! pinned registrations, and each lease says which it is and why.
//!
//! What it costs: a `get` that ends pinned because of the memory has asked the device twice; the rest
//! is one comparison. What is on demand pays for its first touch of each page, and for that after
//! each change, with a fault in the middle of the transfer: [`prefetch`](OnDemandOrPinned::prefetch)
//! takes it before, when the transfer is foreseen. `pinfold-bench on-demand` measures both against
//! each other. Where buffers stay as they are there is little between them but the pins and the
//! monitor; where they are exchanged between transfers, it is a fault against a registration.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to hand its caller's word about the memory on to a cache.

#![allow(unsafe_code)]

use crate::monitor::NoMonitor;
use crate::registrar::verbs::{
    DeviceError, Domain, MemoryRegion, OnDemand, Operations, PrefetchError, Transport, Verbs,
};
use crate::start::{CacheError, cache, on_demand_cache};
use pinfold_core::{Access, AddressRange, Cache, Config, GetError, Lease, Monitor, RegisterError};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two caches of one protection domain: one on demand, if the device can, and one pinned.
pub struct OnDemandOrPinned<M: Monitor> {
    on_demand: Result<Cache<OnDemand, NoMonitor>, DeviceError>,
    pinned: Cache<Verbs, M>,
    /// False once a prefetch was unsupported: then no `get` asks again.
    prefetches: AtomicBool,
}

impl<M: Monitor> OnDemandOrPinned<M> {
    /// Tries the device (milliseconds, see [`OnDemand::new`]) and makes the caches. That it cannot
    /// page on demand is no error; [`why_never_on_demand`](Self::why_never_on_demand) tells.
    ///
    /// `monitor` watches for the pinned cache alone. `config` holds for each cache; only what is
    /// pinned counts against the kernel's limit.
    ///
    /// # Errors
    ///
    /// [`TierError`].
    pub fn new(
        domain: Arc<Domain>,
        transport: Transport,
        monitor: M,
        config: Config,
    ) -> Result<Self, TierError> {
        let on_demand = OnDemand::new(Arc::clone(&domain), transport, Operations::default());
        let pinned = Verbs::new(domain).map_err(TierError::Open)?;
        Self::of(on_demand, pinned, monitor, config)
    }

    /// As [`new`](Self::new), of registrars of one protection domain that were made with flags, or on the caller's
    /// word.
    ///
    /// # Errors
    ///
    /// [`TierError::Cache`]; [`TierError::Domains`].
    pub fn of(
        on_demand: Result<OnDemand, DeviceError>,
        pinned: Verbs,
        monitor: M,
        config: Config,
    ) -> Result<Self, TierError> {
        let own_domain = |it: &OnDemand| Arc::ptr_eq(it.domain(), pinned.domain());
        if !on_demand.as_ref().map_or(true, own_domain) {
            return Err(TierError::Domains);
        }
        let on_demand = match on_demand {
            Ok(registrar) => Ok(on_demand_cache(registrar, config).map_err(TierError::Cache)?),
            Err(error) => Err(error),
        };
        let pinned = cache(pinned, monitor, config).map_err(TierError::Cache)?;
        Ok(Self { on_demand, pinned, prefetches: AtomicBool::new(true) })
    }

    /// Why the device pages nothing on demand, if so.
    pub fn why_never_on_demand(&self) -> Option<&DeviceError> {
        self.on_demand.as_ref().err()
    }

    /// The cache of what is on demand, if the device can: for statistics and suspensions.
    pub fn on_demand(&self) -> Option<&Cache<OnDemand, NoMonitor>> {
        self.on_demand.as_ref().ok()
    }

    /// The cache of what is pinned.
    pub fn pinned(&self) -> &Cache<Verbs, M> {
        &self.pinned
    }

    /// A registration for `operations` on `length` bytes from `start`.
    ///
    /// # Errors
    ///
    /// As [`Cache::get`]; where both ways fail, the pinned one's.
    ///
    /// # Safety
    ///
    /// As for [`Cache::get`].
    pub unsafe fn get(
        &self,
        start: *const u8,
        length: usize,
        access: Access,
        operations: Operations,
    ) -> Result<TierLease<'_, M>, GetError> {
        // SAFETY: the caller's promise.
        let why = match unsafe { self.get_on_demand(start, length, access, operations) } {
            Ok(lease) => return Ok(TierLease::OnDemand(lease)),
            Err(Otherwise::Pin(why)) => why,
            Err(Otherwise::Fail(error)) => return Err(error),
        };
        // SAFETY: the caller's promise.
        let lease = unsafe { self.pinned.get(start, length, access) }?;
        Ok(TierLease::Pinned { lease, why })
    }

    /// # Safety
    ///
    /// As for [`Cache::get`].
    unsafe fn get_on_demand(
        &self,
        start: *const u8,
        length: usize,
        access: Access,
        operations: Operations,
    ) -> Result<Lease<'_, OnDemand, NoMonitor>, Otherwise<'_>> {
        let cache =
            self.on_demand.as_ref().map_err(|why| Otherwise::Pin(WhyPinned::Device(why)))?;
        let missing = operations.without(cache.registrar().operations());
        if !missing.is_empty() {
            return Err(Otherwise::Pin(WhyPinned::Operations { missing }));
        }
        // SAFETY: the caller's promise.
        unsafe { cache.get(start, length, access) }.map_err(|error| match error {
            GetError::Register(why) if pinning_may_help(&why) => {
                Otherwise::Pin(WhyPinned::Memory(why))
            }
            error => Otherwise::Fail(error),
        })
    }

    /// Has the device take its page faults on the bytes of `lease` now, where there are any to take:
    /// call it when the transfer is foreseen, before it is posted. Waits until it has.
    ///
    /// # Errors
    ///
    /// [`PrefetchError`]; the transfer works all the same, but slower. What is unsupported is not
    /// asked for again, and costs a load from then on.
    pub fn prefetch(&self, lease: &TierLease<'_, M>, access: Access) -> Result<(), PrefetchError> {
        let (Ok(cache), TierLease::OnDemand(lease)) = (&self.on_demand, lease) else {
            return Ok(());
        };
        // Relaxed, here and below: a hint that guards nothing.
        if !self.prefetches.load(Ordering::Relaxed) {
            return Err(PrefetchError::Unsupported { errno: libc::EOPNOTSUPP });
        }
        let done = cache.registrar().prefetch(lease.handle(), lease.range(), access);
        if matches!(done, Err(PrefetchError::Unsupported { .. })) {
            self.prefetches.store(false, Ordering::Relaxed);
        }
        done
    }
}

/// What becomes of a `get` that is not served on demand.
enum Otherwise<'c> {
    Pin(WhyPinned<'c>),
    Fail(GetError),
}

/// Whether an error is about on-demand paging, or might be. What else is wrong with the memory the
/// pinning registrar says again.
const fn pinning_may_help(error: &RegisterError) -> bool {
    matches!(
        error,
        RegisterError::UnsupportedAccess { .. }
            | RegisterError::BadAddress { .. }
            | RegisterError::Os { .. }
    )
}

impl<M: Monitor> fmt::Debug for OnDemandOrPinned<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_demand = self.on_demand.as_ref().map(|cache| cache.registrar());
        f.debug_struct("OnDemandOrPinned").field("on_demand", &on_demand).finish_non_exhaustive()
    }
}

/// A lease of one tier or the other.
///
/// It does not outlive them:
///
/// ```compile_fail,E0505
/// # use pinfold::{Access, Monitor, registrar::verbs::Operations, tier::OnDemandOrPinned};
/// # fn after_its_parent<M: Monitor>(tiers: OnDemandOrPinned<M>, start: *const u8) {
/// let lease = unsafe { tiers.get(start, 1, Access::READ, Operations::default()) }.unwrap();
/// drop(tiers);
/// drop(lease);
/// # }
/// ```
pub enum TierLease<'c, M: Monitor> {
    /// The device follows the page table.
    OnDemand(Lease<'c, OnDemand, NoMonitor>),
    /// The pages are pinned.
    Pinned {
        /// The lease.
        lease: Lease<'c, Verbs, M>,
        /// Why it is not on demand.
        why: WhyPinned<'c>,
    },
}

impl<M: Monitor> TierLease<'_, M> {
    /// The registration.
    pub fn handle(&self) -> MemoryRegion {
        match self {
            Self::OnDemand(lease) => lease.handle(),
            Self::Pinned { lease, .. } => lease.handle(),
        }
    }

    /// The bytes that were asked for.
    pub fn range(&self) -> AddressRange {
        match self {
            Self::OnDemand(lease) => lease.range(),
            Self::Pinned { lease, .. } => lease.range(),
        }
    }

    /// Why its pages are pinned; `None` if they are not.
    pub const fn why_pinned(&self) -> Option<&WhyPinned<'_>> {
        match self {
            Self::OnDemand(_) => None,
            Self::Pinned { why, .. } => Some(why),
        }
    }
}

impl<M: Monitor> fmt::Debug for TierLease<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TierLease")
            .field("handle", &self.handle())
            .field("range", &self.range())
            .field("why_pinned", &self.why_pinned())
            .finish()
    }
}

/// Why a registration pins its pages.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WhyPinned<'c> {
    /// The device cannot page on demand, or failed the test, or could not be tested.
    Device(&'c DeviceError),
    /// It can, but not for these operations.
    Operations {
        /// Those that it lacks.
        missing: Operations,
    },
    /// It can, but not with this memory, or with these rights.
    Memory(RegisterError),
}

impl fmt::Display for WhyPinned<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(error) => error.fmt(f),
            Self::Operations { missing } => {
                write!(f, "the device does not page on demand for: {missing}")
            }
            Self::Memory(error) => write!(f, "not on demand: {error}"),
        }
    }
}

/// Why there are no two tiers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// The registrars are of two protection domains: a key of the one means nothing in the other, or other memory.
    #[error("the registrars are of two protection domains: make both of one")]
    Domains,
    /// Not even pinned pages can be registered with the domain.
    #[error("{0}")]
    Open(#[source] DeviceError),
    /// A cache could not be started.
    #[error("{0}")]
    Cache(#[source] CacheError),
}
