//! A cache with its device: leases memory, moves it, and tells what really moved.
//!
//! Every thread has a lane of the device's channel, so that transfers of several threads do not
//! mix. Memory longer than one lease goes in pieces.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the cache's `get`. Its contract holds because the memory
//! that passes here is a [`Specimen`](crate::change::Specimen)'s or its neighbour's: it is touched
//! by address only, so the device may read and write it at any time, and an undetected change
//! costs wrong bytes, which are what this program looks for.
//!
//! It implements `Registrar` to hand on another's promise, and `Monitor` to break its promise on purpose ([`Deaf`]): what
//! follows is a device that reads and writes pages which are no longer the program's. These pages stay pinned by the
//! registration, so they belong to no other process either, and the program touches its memory by address only: the harm
//! is wrong bytes, which are counted.

#![allow(unsafe_code)]

mod audit;

pub(crate) use audit::{AuditReport, Ledger, Parted};

use crate::choice::Wanted;
use crate::device::{AnyRegistrar, Device, Handle, Kind, Transfer};
use crate::output::Failure;
use pinfold::budget::Share;
use pinfold::landing::{Slab, Zone, ZoneError, ZoneOptions};
use pinfold::monitor::{Best, Choice, EventCount, NoMonitor, best};
use pinfold::{
    Access, AddressRange, Cache, Change, Config, Cover, DeregisterError, GetError, Lease, Lost,
    MappingKind, Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay, Sequence,
    Statistics, Translation, Watch,
};
use std::io;
use std::sync::Arc;

/// The longest memory that one call moves, in bytes.
pub(crate) const LANE_BYTES: usize = 8 << 20;

/// How long a lease may be, in bytes.
const PIECE_BYTES: usize = 2 << 20;

/// What stands between the program and stale registrations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub(crate) enum Strategy {
    /// The cache with its monitor.
    #[default]
    Pinfold,
    /// The same cache, keyed by address alone: no change ever reaches it.
    Naive,
}

impl Strategy {
    /// Its name in a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Pinfold => "pinfold",
            Self::Naive => "naive",
        }
    }
}

/// Why nothing was moved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// The cache gave no lease.
    #[error("{0}")]
    Get(GetError),
    /// The device failed.
    #[error("the transfer failed: {0}")]
    Device(io::Error),
}

/// What the device sent.
#[derive(Debug)]
pub(crate) struct Sent {
    /// The bytes that arrived at the other end.
    pub(crate) bytes: Vec<u8>,
    /// Whether every registration used was kept in the cache.
    pub(crate) cached: bool,
}

/// Any monitor: a cache of a port is compiled once.
pub(crate) type AnyMonitor = Arc<dyn Monitor>;

/// The monitor that the command was asked for.
pub(crate) fn monitor(wanted: Wanted) -> Result<Best, Failure> {
    match wanted {
        Wanted::Best => best().map_err(Failure::unavailable),
        Wanted::Ebpf => only(Choice::Ebpf),
        Wanted::Userfaultfd | Wanted::UserfaultfdAndHooks => only(Choice::Userfaultfd),
        Wanted::Nothing => only(Choice::NoMonitor),
    }
}

fn only(choice: Choice) -> Result<Best, Failure> {
    Best::only(choice).map_err(Failure::unavailable)
}

/// How to make another monitor like `first`, without asking again what this machine has.
pub(crate) fn same_as(first: &Best) -> MakeMonitor {
    match first.chosen() {
        Choice::Ebpf => || Ok(Arc::new(only(Choice::Ebpf)?)),
        Choice::Userfaultfd => || Ok(Arc::new(only(Choice::Userfaultfd)?)),
        Choice::NoMonitor => || Ok(Arc::new(only(Choice::NoMonitor)?)),
        // One that this program does not know by name yet.
        _ => || Ok(Arc::new(monitor(Wanted::Best)?)),
    }
}

/// The monitor of a cache whose device follows the page table.
pub(crate) fn unneeded() -> Result<AnyMonitor, Failure> {
    // SAFETY: used over devices that page on demand only; were one not to, the harm would be wrong
    // bytes, which this program looks for.
    let monitor = unsafe { NoMonitor::page_table_coherent() };
    Ok(Arc::new(monitor.map_err(Failure::unavailable)?))
}

/// The monitor of a cache that is told nothing.
pub(crate) fn deaf() -> Result<AnyMonitor, Failure> {
    Ok(Arc::new(Deaf::default()))
}

/// How a process, or its forked child, makes its monitor.
pub(crate) type MakeMonitor = fn() -> Result<AnyMonitor, Failure>;

/// A lease of this port's cache.
pub(crate) type PortLease<'p> = Lease<'p, PortRegistrar, AnyMonitor>;

/// The registrar of all caches and pools over devices of the command: they are compiled once.
pub(crate) type PortRegistrar = Arc<Audited>;

/// A registrar without a ledger: the pages of its registrations are not compared.
pub(crate) fn unaudited(registrar: AnyRegistrar) -> PortRegistrar {
    Arc::new(Audited::new(registrar, None))
}

/// A landing zone over a port's cache.
pub(crate) type LandingZone<'p> = Zone<'p, PortRegistrar, AnyMonitor, Slab>;

/// A cache with its device.
pub(crate) struct Port {
    cache: Cache<PortRegistrar, AnyMonitor>,
    device: Device,
    ledger: Option<Arc<Ledger>>,
}

/// What a port's device is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wiring {
    pub(crate) kind: Kind,
    /// How many registrations the device has room for.
    pub(crate) slots: u32,
    /// How many threads have a lane of the channel.
    pub(crate) lanes: usize,
    /// Whether the pages of registrations are kept in a [`Ledger`].
    pub(crate) audit: bool,
}

impl Wiring {
    fn wire(self) -> Result<(Device, PortRegistrar, Option<Arc<Ledger>>), Failure> {
        let device = Device::looped(self.kind, (self.lanes * LANE_BYTES) as u64)?;
        let ledger = self.audit.then(Ledger::open).transpose()?.map(Arc::new);
        let registrar = Arc::new(Audited::new(device.registrar(self.slots)?, ledger.clone()));
        Ok((device, registrar, ledger))
    }
}

impl Port {
    /// A cache over a device of its own that believes `monitor`.
    pub(crate) fn open(
        wiring: Wiring,
        monitor: AnyMonitor,
        config: Config,
    ) -> Result<Self, Failure> {
        let (device, registrar, ledger) = wiring.wire()?;
        let config = in_pieces(config, wiring.slots);
        let cache = pinfold::cache(registrar, monitor, config).map_err(Failure::unavailable)?;
        Ok(Self { cache, device, ledger })
    }

    /// As [`open`](Self::open), with a cache that draws on a budget together with others.
    pub(crate) fn open_within(
        share: Arc<Share>,
        wiring: Wiring,
        monitor: AnyMonitor,
        config: Config,
    ) -> Result<Self, Failure> {
        let (device, registrar, ledger) = wiring.wire()?;
        let config = in_pieces(config, wiring.slots);
        let cache = pinfold::cache_within(share, registrar, monitor, config);
        Ok(Self { cache: cache.map_err(Failure::unavailable)?, device, ledger })
    }

    /// What an audit keeps of the registrations, if there is one.
    pub(crate) fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_deref()
    }

    /// Compares the pages behind `range`, which no other thread changes, with those that `lease` had
    /// when it was registered, where there is an audit.
    pub(crate) fn audit(&self, lease: &PortLease<'_>, range: AddressRange, lane: usize) {
        if let Some(ledger) = &self.ledger {
            ledger.compare(lease.handle().key(), range, lane);
        }
    }

    /// Compares the pages behind every registration that the cache would serve with those that it had when it was
    /// made, where there is an audit. No thread of the program changes memory meanwhile.
    pub(crate) fn sweep(&self, lane: usize) {
        if let Some(ledger) = &self.ledger {
            ledger.sweep(lane, |range, access| {
                let lease = self.lease_if_cached(range, access)?;
                Some((lease.handle().key(), lease))
            });
        }
    }

    fn lease_if_cached(&self, range: AddressRange, access: Access) -> Option<PortLease<'_>> {
        let start = std::ptr::with_exposed_provenance(range.start());
        // SAFETY: no device is given the lease.
        unsafe { self.cache.request(start, range.len(), access).get_if_cached() }
    }

    /// A landing zone whose slots are this cache's registrations.
    pub(crate) fn landing_zone(
        &self,
        slab: Slab,
        options: ZoneOptions,
    ) -> Result<LandingZone<'_>, ZoneError> {
        Zone::new(&self.cache, slab, options)
    }

    /// Which device it is.
    pub(crate) fn kind(&self) -> Kind {
        self.device.kind()
    }

    /// Makes what follows independent of what happened at `range` before.
    pub(crate) fn forget(&self, range: AddressRange) {
        self.cache.invalidate(range);
    }

    /// A lease of `range`, which is no longer than a piece.
    pub(crate) fn lease(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<PortLease<'_>, Refusal> {
        let start = std::ptr::with_exposed_provenance(range.start());
        // SAFETY: the device may use this memory at any time, see the file's header.
        unsafe { self.cache.get(start, range.len(), access) }.map_err(Refusal::Get)
    }

    /// As [`lease`](Self::lease), for memory that no monitor covers: the caller invalidates it
    /// before it changes.
    pub(crate) fn lease_vouched(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<PortLease<'_>, Refusal> {
        let start = std::ptr::with_exposed_provenance(range.start());
        // SAFETY: as in `lease`; a monitor that breaks the promise gets wrong bytes, and they are counted.
        unsafe { self.cache.request(start, range.len(), access).vouched().get() }
            .map_err(Refusal::Get)
    }

    /// Sends `range` and tells what arrived.
    pub(crate) fn send(&self, range: AddressRange, lane: usize) -> Result<Sent, Refusal> {
        self.send_with(range, lane, Access::READ)
    }

    /// As [`send`](Self::send), from registrations that give the device these rights.
    pub(crate) fn send_with(
        &self,
        range: AddressRange,
        lane: usize,
        access: Access,
    ) -> Result<Sent, Refusal> {
        let (mut cached, mut bytes) = (true, vec![0; range.len()]);
        for piece in range.pieces(PIECE_BYTES) {
            let lease = self.lease(piece, access)?;
            self.audit(&lease, piece, lane);
            cached &= lease.is_cached();
            let begin = piece.start() - range.start();
            self.deliver(&lease, piece, lane, &mut bytes[begin..begin + piece.len()])?;
        }
        Ok(Sent { bytes, cached })
    }

    /// The most bytes of one lease.
    pub(crate) const fn piece_bytes() -> usize {
        PIECE_BYTES
    }

    /// What the cache has done so far.
    pub(crate) fn statistics(&self) -> Statistics {
        self.cache.statistics()
    }

    /// Gives back what no lease and no mapping needs any more.
    pub(crate) fn reclaim(&self) {
        self.cache.reclaim();
    }

    /// Gives back what no lease needs any more.
    pub(crate) fn evict_idle(&self) {
        self.cache.evict_idle();
    }

    /// Sends `part`, which `lease` contains, and tells what arrived.
    pub(crate) fn send_leased(
        &self,
        lease: &PortLease<'_>,
        part: AddressRange,
        lane: usize,
    ) -> Result<Vec<u8>, Refusal> {
        self.audit(lease, part, lane);
        let mut bytes = vec![0; part.len()];
        self.deliver(lease, part, lane, &mut bytes)?;
        Ok(bytes)
    }

    fn deliver(
        &self,
        lease: &PortLease<'_>,
        part: AddressRange,
        lane: usize,
        into: &mut [u8],
    ) -> Result<(), Refusal> {
        self.device.deliver(&transfer(lease, part, at(lane, 0)), into).map_err(Refusal::Device)
    }

    /// Has the device write `bytes` into `range`, which is as long and in the registration of `handle`.
    pub(crate) fn receive_registered(
        &self,
        handle: Handle,
        range: AddressRange,
        lane: usize,
        bytes: &[u8],
    ) -> Result<(), Refusal> {
        let (address, length) = (range.start(), range.len());
        let transfer = Transfer { key: handle.key(), address, length, offset: at(lane, 0) };
        self.device.accept(&transfer, bytes).map_err(Refusal::Device)
    }

    /// Has the device write `bytes` into `range`, which is as long.
    pub(crate) fn receive(
        &self,
        range: AddressRange,
        lane: usize,
        bytes: &[u8],
    ) -> Result<(), Refusal> {
        for piece in range.pieces(PIECE_BYTES) {
            let lease = self.lease(piece, Access::WRITE)?;
            self.audit(&lease, piece, lane);
            let begin = piece.start() - range.start();
            let (transfer, part) =
                (transfer(&lease, piece, at(lane, 0)), begin..begin + piece.len());
            self.device.accept(&transfer, &bytes[part]).map_err(Refusal::Device)?;
        }
        Ok(())
    }
}

/// `config` for leases of a piece and a table of `slots` registrations.
fn in_pieces(config: Config, slots: u32) -> Config {
    let max_regions = config.max_regions.min(slots as usize);
    Config { piece_bytes: PIECE_BYTES, max_regions, ..config }
}

fn transfer(lease: &PortLease<'_>, part: AddressRange, offset: u64) -> Transfer {
    let key = lease.handle().key();
    Transfer { key, address: part.start(), length: part.len(), offset }
}

/// Where a lane begins, and what is behind its beginning.
pub(crate) fn at(lane: usize, offset: usize) -> u64 {
    (lane * LANE_BYTES + offset) as u64
}

// --- a registrar that is audited --------------------------------------------------------------------

/// A registrar that enters each registration into a [`Ledger`], if there is one.
#[derive(Debug)]
pub(crate) struct Audited {
    inner: AnyRegistrar,
    ledger: Option<Arc<Ledger>>,
}

impl Audited {
    pub(super) fn new(inner: AnyRegistrar, ledger: Option<Arc<Ledger>>) -> Self {
        Self { inner, ledger }
    }
}

// SAFETY: `inner`'s promise is handed on.
unsafe impl Registrar for Audited {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        self.inner.limits()
    }

    fn granted(&self, wanted: Access) -> Access {
        self.inner.granted(wanted)
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.inner.widened(range)
    }

    fn pins_per_page(&self) -> usize {
        self.inner.pins_per_page()
    }

    fn translation(&self) -> Translation {
        self.inner.translation()
    }

    fn is_simulated(&self) -> bool {
        self.inner.is_simulated()
    }

    fn pinned_limit(&self) -> Option<usize> {
        self.inner.pinned_limit()
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Handle, RegisterError> {
        // SAFETY: the caller's promise.
        let handle = unsafe { self.inner.register(range, access) }?;
        if let Some(ledger) = &self.ledger {
            ledger.enter(handle.key(), range, access);
        }
        Ok(handle)
    }

    unsafe fn deregister(
        &self,
        handle: Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // Before: the device may give the same key to the next registration at once.
        if let Some(ledger) = &self.ledger {
            ledger.strike(handle.key());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.deregister(handle, range) }
    }
}

// --- a monitor that hears nothing -------------------------------------------------------------------

/// A monitor that claims to see everything and sees nothing: the cache of old, keyed by address. It proves that the checks of
/// this program can fail.
#[derive(Debug, Default)]
pub(crate) struct Deaf {
    event_count: EventCount,
}

// SAFETY: the promise is broken on purpose, see the file's header.
unsafe impl Monitor for Deaf {
    fn name(&self) -> &'static str {
        "deaf"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(1))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(1), complete: true, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        self.event_count.count()
    }

    fn notify(&self) {
        self.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.event_count.wait(seen);
    }
}
