//! Memory registration for DMA devices: `get` any buffer, never a stale one.
//!
//! Network cards, io_uring and GPUs read and write physical pages; programs name virtual addresses.
//! Registering memory with a device pins the pages, costs half a microsecond to tens of
//! milliseconds, and is therefore cached by everybody; and every cache that does not know what the
//! program does to its mappings has moved the wrong bytes. This one knows.
//!
//! ```
//! use pinfold::{Access, Config, monitor::Userfaultfd, registrar::IoUring};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! # if Userfaultfd::shared().is_err() { return Ok(()) }
//! let registrar = IoUring::new(&ring, 1024)?;
//! let cache = pinfold::cache(registrar, Userfaultfd::shared()?, Config::default())?;
//!
//! let buffer = vec![7_u8; 65536];
//! // SAFETY: the buffer outlives the lease, and nobody writes it meanwhile.
//! let lease = unsafe { cache.get(buffer.as_ptr(), buffer.len(), Access::READ) }?;
//! let buf_index = lease.handle().get(); // for WRITE_FIXED, SEND_ZC, ...
//! # let _ = buf_index;
//! drop(lease); // the registration stays; the next get finds it, unless the memory has changed
//!
//! // The safe door, for buffers that cannot move or be freed while they are leased.
//! let lease = cache.lease_buffer(buffer).map_err(|refused| refused.error)?;
//! assert_eq!(cache.statistics().registrations, 1);
//! # drop(lease);
//! # Ok(())
//! # }
//! ```
//!
//! # The price
//!
//! With [`monitor::Userfaultfd`] a hit costs one system call, some hundred nanoseconds;
//! [`Cache::check`] lets several gets share it. `munmap` of memory that was registered once waits a
//! few microseconds for the reader's thread; of other memory it costs what it did. What no monitor
//! covers (files, shared memory) is registered for each use, unless the caller vouches for it
//! ([`Cache::get_vouched`]).
//!
//! # Where to look next
//!
//! [`cache`] puts a cache together; [`pool`] has memory that is registered before it is needed. [`registrar`] and [`monitor`] say what they need and cost;
//! [`limits`] what this process may pin; [`mappings`] what it has mapped. The words, the promise and
//! the cache itself are in `pinfold_core`, whose types this crate shows as its own.

#[cfg(not(target_os = "linux"))]
compile_error!("Pinfold watches Linux mappings and registers with Linux devices");

mod descriptor;
mod fork_mark;
pub mod limits;
pub mod mappings;
mod membarrier;
pub mod monitor;
pub mod pool;
mod quiet_thread;
pub mod registrar;
mod start;
mod sys;

pub use pinfold_core::{
    Access, AddressRange, BadAddress, Barriers, BufferError, BufferLease, Cache, Change, Checked,
    Config, ConfigError, Cover, DeregisterError, Exhausted, GetError, Lease, Limit, Lost,
    MappingKind, Monitor, PerUse, Pieces, RangeError, Reclaimer, RegisterError, Registrar,
    RegistrarLimits, Replay, Sequence, StableBuffer, Statistics, Uncovered, Watch, WhenFull,
};
pub use start::{CacheError, cache, on_demand_cache};
