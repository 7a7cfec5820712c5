//! A simulated address space, device and monitor, for tests of the cache that need neither a
//! kernel nor luck.
//!
//! What it costs: nothing here is memory. A page is a number, so a transfer cannot be made, only
//! asked about: *which physical pages would the device touch?* That question is the whole point
//! of a registration cache, and asked this way it has an exact answer. The rest is deterministic:
//! a test that needs an order between threads closes a [`FaultGate`] in the device's way and opens it.
//!
//! - [`AddressSpace`] maps virtual pages to [`PhysicalPage`]s that are never used twice.
//! - [`SimDevice`] pins what it registers as real devices do: it keeps the pages of that moment,
//!   whatever the program does to the addresses afterwards. It fails, waits and panics on command
//!   and notes every misuse as a [`Violation`].
//! - [`SimMonitor`] tells of changes as the userfaultfd monitor does: watched pages only, a log
//!   that can overflow, discards that are announced before the pages go.
//! - [`Fake`] makes a device or a monitor of what a test writes in safe code.
//! - [`Random`] draws programs from a seed.
//!
//! ```
//! use pinfold_core::{Access, AddressRange};
//! use pinfold_sim::{AddressSpace, SimDevice, DeviceConfig, Protection};
//! use std::sync::Arc;
//!
//! let space = Arc::new(AddressSpace::new());
//! let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
//! let buffer = AddressRange::new(0x10000, 0x2000).unwrap();
//!
//! space.map(buffer, Protection::ReadWrite);
//! let handle = device.register(buffer, Access::READ).unwrap();
//! assert!(device.is_fresh(handle, buffer));
//!
//! space.unmap(buffer);
//! space.map(buffer, Protection::ReadWrite);
//! assert!(!device.is_fresh(handle, buffer)); // the bug that the cache is there to prevent
//! ```
//!
//! The order of layers, each using only what stands before it: `sync`, `fake`, `random`, `log`, `event_count`, `space`,
//! `fault`, `device`, `monitor`, `registrar`, `fabric`, `scale`, `simulation`.

pub mod device;
pub mod event_count;
pub mod fabric;
pub mod fake;
pub mod fault;
mod log;
pub mod monitor;
pub mod random;
pub mod registrar;
pub mod scale;
pub mod simulation;
pub mod space;
mod sync;

pub use device::{Counts, DeviceConfig, Handle, Registration, SimDevice, Violation};
pub use event_count::SimEventCount;
pub use fake::{
    Calm, Fake, FakeDevice, FakeMonitor, FakeSuspend, Simulated, SimulatedRequest, Willing,
    get_checked, get_simulated,
};
pub use fault::{Fault, FaultGate, Moment};
pub use monitor::{SimMonitor, SpaceMonitor};
pub use random::Random;
pub use registrar::SimRegistrar;
pub use space::{AddressSpace, Discard, PAGE_BYTES, PhysicalPage, Protection, RemapError};
