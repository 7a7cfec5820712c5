//! The registration cache of Pinfold, without a system call in it.
//!
//! A device reads and writes physical pages, a program names virtual addresses, and registering
//! memory with a device is slow; so registrations are cached, and the program may change its
//! mappings behind the cache's back. This cache never hands out a registration that no longer
//! matches the program's memory. What that costs first:
//!
//! - a hit asks the monitor whether anything is new: one load, or the system call that the
//!   monitor's means need;
//! - every thread that uses a cache owns 9 KiB in it; a region costs 72 bytes and 8 more
//!   for each 2 MiB block that it touches; both are kept at their high-water mark;
//! - taking a region away runs one barrier on all processors, where the system offers it;
//! - what a monitor cannot see is registered anew for each use.
//!
//! [`Cache::get`] turns a range into a [`Lease`]: a hit takes no lock and writes to no memory that
//! another thread writes, but for a mark in the region now and then (behind a miss, and for the first thousand of its hits). [`Registrar`] is what a device must offer, [`Monitor`] what a source of
//! events must promise. The crate `pinfold` has both for Linux and is what programs use.
//!
//! What blocks what: no thread waits for a registration but those that want the same bytes from it.
//! Overlapping regions stand side by side; ending a lease of one, evicting or invalidating it,
//! leaves the others alone. A region contained in a newer one is given up, because the newer
//! one serves all of its uses; leases of it go on until they end.
//!
//! The order of layers, each using only what stands before it, which a test holds:
//! - words: `foreign` (calls into other code, a panic as a value), `listed` (enums with a list of all), `access`, `range`,
//!   `coverage`, `clock`
//! - interfaces: `monitor`, `registrar` (unsafe traits: what is registered, watched or suspended otherwise than said is a
//!   stale transfer), `several` (devices as one), `error`, `budget` (the seam to shared budgets)
//! - memory and threads: `schedule`, `sync` (the switches to shuttle and loom), `first_made` (values of the whole process,
//!   which no forked child waits for), `arena`, `chunked`, `sorted`, `slots`, `queue`, `barrier`, `abandoned`, `hazard`, `holds` (of the lock,
//!   measured by the bench), `magazines` (a thread's cache of a pool)
//! - parts of monitors: `stamped`, `standing`, `change_log`, `change_marks`, `pending_changes`, `combination`
//! - words of the cache: `config`, `statistics`
//! - parts of the cache: `range_index`, `index`, `unapplied` (changes that are known and not applied), `region` (its state,
//!   the lists), `order` (of eviction), `flight`, `waits`, `callbacks`, `watchers`, `admission`, `suspended_ranges` (what
//!   suspensions hold back), `followed_ranges` (what landing asks about), `board` (notices)
//! - the cache: `shared` (a hit), `events`, `reclaim`, `lease`, `room` (what registrations count), `registering`, `miss`, `get`
//! - entry points: `stable`, `notice` (what a program must react to), `cache`, `followed`
//! - memory that moves: `suspend`
//! - proofs: `exploring` (a model, with loom), `models`, `log_models`

#[cfg(test)]
extern crate self as pinfold_core;

mod abandoned;
pub mod access;
pub mod admission;
mod arena;
pub mod barrier;
mod board;
pub mod budget;
pub mod cache;
mod callbacks;
pub mod change_log;
pub mod change_marks;
mod chunked;
pub mod clock;
pub mod combination;
pub mod config;
pub mod coverage;
pub mod error;
mod events;
#[cfg(test)]
#[cfg(loom)]
mod exploring;
// The unit tests' devices and monitors: those of `pinfold-sim`, which knows this crate by its name.
#[cfg(test)]
#[cfg(not(loom))]
#[allow(dead_code, unreachable_pub, clippy::wrong_self_convention)] // it is public elsewhere, and used there
#[path = "../../pinfold-sim/src/fake.rs"]
mod fake;
#[doc(hidden)]
pub mod first_made;
mod flight;
#[doc(hidden)]
pub mod followed;
mod followed_ranges;
#[doc(hidden)]
pub mod foreign;
mod get;
mod hazard;
#[doc(hidden)]
pub mod holds;
mod index;
pub mod lease;
mod listed;
#[cfg(test)]
#[cfg(loom)]
mod log_models;
pub mod magazines;
mod miss;
#[cfg(test)]
#[cfg(loom)]
mod models;
pub mod monitor;
pub mod notice;
mod order;
pub mod pending_changes;
mod queue;
pub mod range;
mod range_index;
pub mod reclaim;
mod region;
mod registering;
pub mod registrar;
mod room;
#[cfg(shuttle)]
pub mod schedule;
mod several;
mod shared;
mod slots;
mod sorted;
pub mod stable;
pub mod stamped;
mod standing;
pub mod statistics;
pub mod suspend;
mod suspended_ranges;
mod sync;
mod unapplied;
mod waits;
mod watchers;

pub use access::Access;
pub use admission::{LearnedCost, UseCosts};
pub use barrier::Barriers;
pub use budget::{Account, Amount, Lender, Recalls, Refusal};
pub use cache::{Cache, Checked};
pub use change_log::{ChangeLog, ReplayEnd};
pub use change_marks::{ChangeMarks, RangeMark};
pub use clock::Clock;
pub use config::{Config, Keep, WhenFull};
pub use coverage::{Change, Cover, MappingKind};
pub use error::{ConfigError, Exhausted, GetError, Limit, PerUse};
pub use get::{GetRequest, Pieces};
pub use lease::Lease;
pub use monitor::{ChangeMark, Lost, Monitor, Position, Replay, Sequence, Uncovered, Watch};
pub use notice::{Notice, Notices, Revocation, SuspensionId};
pub use pending_changes::{PendingChanges, Ticket};
pub use range::{AddressRange, RangeError};
pub use reclaim::Reclaimer;
pub use registrar::{
    BadAddress, DeregisterError, RegisterError, Registrar, RegistrarLimits, Translation,
};
pub use stable::{BufferError, BufferLease, StableBuffer};
pub use stamped::{Found, StampedSlot};
pub use statistics::Statistics;
pub use suspend::{
    ConnectionLost, Ended, Expired, Gets, Keys, Leases, NotSuspended, OnDrop, Outstanding, Refused,
    Renewed, Resumed, Suspend, SuspendProgress, Suspended, Suspending, SuspensionStatistics,
    SuspensionTerms, Transfers, Unsupported, Why,
};
