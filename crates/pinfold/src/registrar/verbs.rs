//! RDMA devices, through libibverbs.
//!
//! # What it costs
//!
//! A registration is one command to the kernel's driver, and to the device, with every page pinned:
//! microseconds for a page, milliseconds for a gigabyte, more on devices whose translation tables
//! are in their own memory. The pages count against `RLIMIT_MEMLOCK`, per process (`VmPin`).
//!
//! libibverbs is found at run time ([`Library`]); a program that does not use this module loads
//! nothing.
//!
//! # Rights
//!
//! The device may read whatever is registered. [`Access::WRITE`](crate::Access::WRITE) lets it
//! write; remote rights let a peer that knows the key do so, in exactly the bytes asked for: a cache
//! neither rounds them to pages nor shares them between ranges, and keeps them only when
//! [`Config::cache_remote`](crate::Config::cache_remote) says so, because a peer that once learned a
//! key can use it as long as the registration is kept.
//!
//! # Two ways
//!
//! [`Verbs`] pins pages, so a cache over it needs a monitor. [`OnDemand`] leaves them to the
//! device's page faults where the device can, and [`on_demand_cache`](crate::on_demand_cache) needs
//! none; [`tier`](crate::tier) takes the second where it can be had and the first elsewhere. [`Device`] and [`Domain`] are opened here or lent by the program; [`Dmabuf`] is memory
//! without an address; [`Loopback`] shows what a registration really moves.
//!
//! # Suspensions
//!
//! [`Connection`] is a queue pair that can be stopped, so that its regions can be
//! [suspended](pinfold_core::Suspend) and their memory moved. A range that peers may touch needs their
//! agreement: [`handshake`](crate::handshake).
//!
//! # Forks, devices that go away
//!
//! A forked child shares the device's descriptor with its parent. There the registrar refuses to
//! register, and dropping it, its domain or its device touches nothing of the parent's. When a
//! device is taken away, what is asked of it says
//! [`DeviceGone`](crate::RegisterError::DeviceGone). So it does where the device's descriptor was closed; but then its queue
//! pairs and registrations live on, by what the library has mapped of the device, and are not taken for ended.

mod attributes;
mod connection;
mod device;
mod dmabuf;
pub mod ffi;
mod library;
mod loopback;
mod on_demand;
mod registrar;

pub use attributes::{Attributes, OnDemandPaging, Operations, Transport, access_flags, access_of};
pub use connection::Connection;
pub use device::{Device, DeviceError, Domain, device_names};
pub use dmabuf::{Dmabuf, DmabufError, DmabufPart};
pub use library::{Library, LibraryError};
pub use loopback::{Loopback, LoopbackDirection, LoopbackError, Transfer};
pub use on_demand::{OnDemand, PrefetchError};
pub use registrar::{MemoryRegion, Verbs};
