//! A simulated fabric: a device with protection domains, keys, a translation cache and reliable
//! connections to peers, on a clock of its own.
//!
//! Everything that happens is an event on one agenda, and everything that chance decides comes
//! from one seed, so a run is the same on every machine and takes no real time. A packet carries
//! one [`CELL_BYTES`] cell, and a cell's content is one number: enough to tell the right bytes from
//! all others, and a thousand times cheaper than bytes.
//!
//! What is like hardware: keys with generations, rights and domains; a translation cache that may
//! hold on to what was taken back; sequence numbers, cumulative acknowledgements, go-back-N,
//! receiver-not-ready, timeouts that run out, completions and flushes; page faults of registrations
//! that are not pinned; a send queue that drains (verbs' SQD) while a peer is told to wait. What is
//! not: congestion, atomics, reads by peers, shared receive queues.
//!
//! Faults come on command ([`Weather`], [`World::fail_next_registrations`],
//! [`World::panic_next`]), defects on purpose
//! ([`Mutant`]): a test with this shows first that its check can fail.

mod capability;
mod clock;
mod connection;
mod memory;
mod mutant;
mod nic;
mod traffic;
mod world;

pub use capability::FabricRegistrar;
pub use connection::{
    Completed, ConnectionId, PeerDone, PostError, Work, WorkCompletion, WorkKind,
};
pub use memory::{CELL_BYTES, CELLS_PER_PAGE, stamp};
pub use mutant::Mutant;
pub use nic::{Key, NicConfig};
pub use world::{DeviceCall, DevicePanic, Fabric, Rekeyed, Weather, World};

/// A moment or a time, in nanoseconds of the simulated clock.
pub type Nanos = u64;
