//! Memory registration for DMA devices: `get` any buffer, never a stale one.
//!
//! Network cards, io_uring and GPUs read and write physical pages; programs name virtual addresses.
//! Registering memory with a device pins the pages and costs half a microsecond to tens of
//! milliseconds, so programs cache registrations; and a cache that does not know what the program
//! does to its mappings moves wrong bytes. This one follows the mappings.
//!
//! ```
//! use pinfold::{Access, Config, monitor::best, registrar::IoUring};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! # if best()?.chosen() == pinfold::monitor::Choice::NoMonitor { return Ok(()) }
//! // SAFETY: the ring's table of buffers is left to the registrar.
//! let registrar = unsafe { IoUring::new(&ring, 1024) }?;
//! let cache = pinfold::cache(registrar, best()?, Config::default())?;
//!
//! let buffer = vec![7_u8; 65536];
//! // SAFETY: the buffer outlives the lease, and no thread writes it meanwhile.
//! let lease = unsafe { cache.get(buffer.as_ptr(), buffer.len(), Access::READ) }?;
//! let buf_index = lease.handle().get(); // for WRITE_FIXED, SEND_ZC, ...
//! # let _ = buf_index;
//! drop(lease); // once it pays, the registration stays until the memory changes
//!
//! // Without unsafe: for buffers that cannot move or be freed while they are leased.
//! let lease = cache.lease_buffer(buffer).map_err(|refused| refused.error)?;
//! # drop(lease);
//! # Ok(())
//! # }
//! ```
//!
//! # The price
//!
//! [`monitor::best`] picks the best monitor that this machine has, and says what the better ones lack.
//! With [`monitor::Userfaultfd`], which needs no privilege, a hit costs one system call, some
//! hundred nanoseconds; [`Cache::check`] lets several gets share it. `munmap` of memory that was
//! registered once waits for the reader's thread, tens of microseconds and more (`bench/results` has
//! the figures); of other memory it costs what it did. What the monitor does not cover (with
//! userfaultfd files and shared memory) is registered for each use, unless the caller vouches for it
//! ([`GetRequest::vouched`]). A change that it does not detect can be reported by the code that makes
//! it ([`monitor::Feed`]).
//!
//! # Where to look next
//!
//! [`cache`] puts a cache together; [`pool`] has memory that is registered before it is needed.
//! [`registrar`] and [`monitor`] say what they need and cost;
//! [`pieces`] takes ranges of any length, [`landing`] lets data arrive in pages that are registered
//! beforehand; [`strategy`] says which of these a transfer should take, and takes it; [`suspend`] and
//! [`rearrange`] make registered memory huge, move it or trim it; [`limits`] says what the kernel's limits
//! are, [`budget`] what may really be pinned, what gets it and what is promised; [`mappings`] what this
//! process has mapped. The words, the promise and the cache itself are in `pinfold_core`, whose types this
//! crate shows as its own.
//!
//! The order of layers, each using only what stands before it: `sync`, `descriptor`, `fork_mark`, `machine`, `limits`, `mappings`,
//! `huge_pages`, `own_process`, `allocator`, `stored`, `handshake`, `in_flight`, `monitor`, `registrar`, `budget`, `start`, `pieces`,
//! `rearrange`, `pool`, `landing`, `strategy`, `tier`.

#[cfg(not(target_os = "linux"))]
compile_error!("Pinfold watches Linux mappings and registers with Linux devices");

pub mod allocator;
pub mod budget;
mod descriptor;
mod fork_mark;
pub mod handshake;
mod huge_pages;
mod in_flight;
pub mod landing;
pub mod limits;
mod machine;
#[cfg(all(test, not(loom)))]
#[path = "../tests/map_limit/mod.rs"]
mod map_limit;
pub mod mappings;
pub mod monitor;
#[cfg(all(test, not(loom)))]
#[path = "../tests/alone/mod.rs"]
mod own_process;
pub mod pieces;
pub mod pool;
pub mod rearrange;
pub mod registrar;
mod start;
mod stored;
pub mod strategy;
mod sync;
pub mod tier;

pub use pinfold_core::admission::{self, UseCosts};
pub use pinfold_core::clock::{self, Clock};
pub use pinfold_core::notice::{self, Notice, Notices, Revocation, SuspensionId};
#[doc(inline)]
pub use pinfold_core::suspend;
pub use pinfold_core::{
    Access, AddressRange, BadAddress, Barriers, BufferError, BufferLease, Cache, Change,
    ChangeMark, Checked, Config, ConfigError, Cover, DeregisterError, Exhausted, GetError,
    GetRequest, Keep, Lease, Limit, Lost, MappingKind, Monitor, PerUse, Pieces, Position,
    RangeError, Reclaimer, RegisterError, Registrar, RegistrarLimits, Replay, Sequence,
    StableBuffer, Statistics, Translation, Uncovered, Watch, WhenFull, no_connections,
};
#[doc(hidden)]
pub use pinfold_core::{forward_monitor, listed};
pub use start::{CacheError, cache, cache_within, on_demand_cache};
