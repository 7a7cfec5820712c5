//! Pools: registered memory that the library owns, handed out as buffers.
//!
//! The best registration is the one that never happens on the path of a message. A pool maps
//! memory in slabs, in huge pages where they can be had, registers each slab once with every one
//! of its registrars, and cuts buffers from it.
//!
//! ```
//! use pinfold::pool::{Pool, PoolConfig};
//! use pinfold::registrar::IoUring;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! # // SAFETY: the ring's table of buffers is left to the registrar.
//! # let Ok(registrar) = (unsafe { IoUring::new(&ring, 64) }) else { return Ok(()) };
//! let pool = Pool::new(registrar, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() })?;
//!
//! let mut buffer = pool.get(1500)?; // no system call once the thread's cache has some
//! buffer.fill(7);
//! let buf_index = buffer.handle().get(); // for WRITE_FIXED, with the address buffer.as_ptr()
//! # let _ = buf_index;
//! drop(buffer); // on whatever thread
//!
//! let statistics = pool.statistics();
//! assert_eq!(statistics.in_use_bytes, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # The price
//!
//! - Memory: buffers come in sizes, four for each doubling, so up to a fifth of one is not used
//!   (below 256 bytes: up to 63 bytes); slabs are kept until they are empty. A thread that has used
//!   a pool owns 30 KiB of bookkeeping there, and has up to
//!   [`thread_cache_bytes`](PoolConfig::thread_cache_bytes) of buffers in its cache, which serve others
//!   only when the pool would otherwise be exhausted.
//! - Time: taking and putting back a size that the thread's cache holds, some nanoseconds: no lock,
//!   no system call, no store to memory that another thread writes, whatever thread took the
//!   buffer. Otherwise the pool's lock, for a batch of buffers. Otherwise a slab is mapped, brought
//!   in and registered: milliseconds for megabytes. Buffers above 4 MiB always go through the lock.
//! - `fork`: the pool's memory is not copied for children, which find zeros (in base and transparent
//!   huge pages) or may neither read nor write there (in pages set aside) and are refused buffers. For the latter the
//!   C library calls a function of the pool's in the child (`pthread_atfork`). A child that is made without it (`_Fork`,
//!   or `fork` and `clone` by their numbers) has nothing there, and what it maps itself may come there: it must not touch
//!   a buffer that it has inherited, nor give one back.
//!
//! # Contents
//!
//! A buffer holds zeros or what an earlier user of the pool left in it; ask for
//! [`zeroed`](BufferRequest::zeroed) ones where that matters, at the price of writing them. That is a
//! choice for speed: wiping 64 KiB takes longer than everything else about a message. Nothing that
//! the pool itself relies on stands in the memory: a device that writes where it should not, or a
//! peer with a key, spoils data, not the pool.
//!
//! # Transfers in flight
//!
//! A buffer must not be put back while a device works on it: another thread would be given it.
//! [`PoolBuffer::in_flight`] turns a buffer into an [`InFlight`], which cannot be read, written or
//! put back until the caller says that the transfer has ended; if it is dropped instead, the buffer
//! is lost rather than given to others. [`InFlight::into_user_data`] makes it the one word that goes
//! through the device's queues, and [`Pool::completed`] makes it a buffer again.
//!
//! # Several devices, containers, C
//!
//! A pair or an array of registrars is a registrar (`(ring, verbs)`, `[ring_a, ring_b]`), whose
//! handle holds each device's own; an [`Arc`](std::sync::Arc) of one can be a cache's as well.
//! [`PoolVec`] grows from size to size. The standard library's containers take no allocator on
//! stable Rust, and a crate's trait for one would be a dependency of all users for the sake of a
//! few: a program that wants it writes `allocate` and `deallocate` in terms of [`Pool::allocate`] and
//! [`deallocate`], which take and give bare addresses, as C does.
//!
//! # Exhausted
//!
//! [`WhenExhausted`] says for each request whether to fail, to grow or to wait. A pool is exhausted
//! when all of its buffers are in use: what other threads' caches hold is taken from them first. Those
//! who wait are served in the order of coming.
//!
//! A pool whose [`Allowance`] is a [`budget::Share`](crate::budget::Share) gives empty slabs back when
//! another drawer of the budget asks for its due.
//!
//! # Layers
//!
//! `classes`, `space` (arithmetic), `sys`, `memory`, `map`, `devices`, `slab` (memory), `config`,
//! `error`, `allowance`, `statistics` (words), `queue` (who waits), `depot` (what is shared), `taking` (what is not at
//! hand), `threads` (what is not shared), `buffer`, `flight`, `vector` (the entry points).

mod allowance;
mod buffer;
mod classes;
mod config;
mod depot;
mod devices;
mod error;
mod flight;
mod map;
mod memory;
mod queue;
mod slab;
mod space;
mod statistics;
mod taking;
mod threads;
mod vector;

pub(crate) use map::is_in_a_slab;

pub use allowance::{Allowance, Denied, Unshared};
pub use buffer::{BufferRequest, Pool, PoolBuffer};
pub use config::{PoolConfig, WhenExhausted};
pub use error::{AllocateError, PoolError, PoolExhausted};
pub use flight::{InFlight, NotABuffer, capacity_of, deallocate};
pub use memory::{PageKind, Pages};
pub use statistics::PoolStatistics;
pub use vector::PoolVec;
