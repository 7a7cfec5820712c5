//! What the program holds, and what it knows of what it was told.

use super::buffers::Buffer;
use super::{FaultKind, LINKS, Outcome};
use crate::fabric::{ConnectionId, Fabric, FabricRegistrar, Key, Mutant, NicConfig, WorkKind};
use crate::monitor::SimMonitor;
use crate::random::Random;
use pinfold_core::{
    AddressRange, Cache, Lease, Notices, OnDrop, Revocation, Suspended, Suspending, SuspensionId,
};
use std::collections::{BTreeMap, HashMap};

pub(super) type SimCache = Cache<FabricRegistrar, SimMonitor>;
pub(super) type SimLease<'c> = Lease<'c, FabricRegistrar, SimMonitor>;

/// A work that has not ended.
pub(super) struct Posted<'c> {
    pub(super) id: u64,
    pub(super) connection: ConnectionId,
    pub(super) kind: WorkKind,
    pub(super) buffer: usize,
    pub(super) range: AddressRange,
    /// Nothing while a suspension has it, or if it could not be renewed.
    pub(super) lease: Option<SimLease<'c>>,
}

/// A buffer that a peer may write.
pub(super) struct Exposure<'c> {
    pub(super) id: u64,
    pub(super) connection: ConnectionId,
    pub(super) buffer: usize,
    pub(super) range: AddressRange,
    pub(super) key: Key,
    /// What each cell contains, and what it may contain by now.
    pub(super) cells: Vec<(u64, Option<u64>)>,
    /// Writes under way: their number, first cell and length.
    pub(super) writes: Vec<(u64, usize, usize)>,
    pub(super) lease: Option<SimLease<'c>>,
}

/// A program with all that it holds.
pub(super) struct Program<'c, 'o> {
    pub(super) cache: &'c SimCache,
    pub(super) fabric: &'c Fabric,
    pub(super) nic: NicConfig,
    pub(super) mutant: Option<Mutant>,
    pub(super) faults: &'o [FaultKind],
    pub(super) random: Random,
    pub(super) seed: u64,
    pub(super) step: u64,
    pub(super) buffers: Vec<Buffer>,
    /// The connections that the program knows of.
    pub(super) connections: [Option<ConnectionId>; LINKS],
    pub(super) works: Vec<Posted<'c>>,
    pub(super) exposures: Vec<Exposure<'c>>,
    pub(super) suspensions: Vec<Suspension<'c>>,
    pub(super) listener: Listener<'c>,
    /// Panics of the device that it was not told by a panic.
    pub(super) hushed_panics: u64,
    pub(super) last_id: u64,
    pub(super) outcome: &'o mut Outcome,
}

/// What gets a lease back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Holder {
    Work(u64),
    Exposure(u64),
}

pub(super) type Pending<'c> = Suspending<'c, FabricRegistrar, SimMonitor>;

pub(super) enum State<'c> {
    Pending(Pending<'c>),
    /// With what the region contained then.
    Held(Suspended<'c, FabricRegistrar, SimMonitor>, Vec<u64>),
}

/// A suspension of the program.
pub(super) struct Suspension<'c> {
    pub(super) range: AddressRange,
    pub(super) buffer: usize,
    pub(super) holders: Vec<Holder>,
    pub(super) connections: Vec<ConnectionId>,
    pub(super) id: SuspensionId,
    /// The keys of the holders' leases when they were handed over.
    pub(super) keys: Vec<Key>,
    pub(super) on_drop: OnDrop,
    /// Nothing while it is in other hands.
    pub(super) state: Option<State<'c>>,
}

/// How a suspension stands, as far as it was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Told {
    /// With whether a key of it has changed since.
    Suspended(bool),
    Resumed,
    Revoked(Revocation),
}

/// What the program knows from notices alone.
pub(super) struct Listener<'c> {
    pub(super) notices: Notices<'c, FabricRegistrar, SimMonitor>,
    pub(super) told: BTreeMap<SuspensionId, Told>,
    /// What became of keys: the next, or none.
    pub(super) keys: HashMap<Key, Option<Key>>,
    /// Notices were missed since the last suspension began that can be judged.
    pub(super) missed: bool,
}
