//! Planning a transfer: which way a transfer should take, with the reasons, and taking it.
//!
//! Memory gets to a device in several ways: leased from a cache, copied through a pool's registered
//! buffer, registered for one use, registered in pieces while other pieces move; data that arrives can
//! also land in pages that change places with its target's. Which is fastest depends on the length, on how
//! often the memory is used before it changes, on whether the monitor sees changes of it, and on the
//! machine. So each way is timed here ([`measure`]), kept in a file and compared ([`Costs::advise`]);
//! nothing is decided by a number that was right on another machine.
//!
//! ```
//! use pinfold::monitor::best;
//! use pinfold::pool::{Pool, PoolConfig};
//! use pinfold::registrar::IoUring;
//! use pinfold::strategy::{Costs, Direction, TransferPlanner, Reuse};
//! use pinfold::{Config, Monitor};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! // SAFETY: the ring's table of buffers is left to the registrar.
//! let registrar = Arc::new(unsafe { IoUring::new(&ring, 64) }?);
//! let cache = pinfold::cache(Arc::clone(&registrar), best()?, Config::default())?;
//! let pool = Pool::new(registrar, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() })?;
//! let costs = Costs::stored(&Costs::name("io_uring", cache.monitor().name()));
//! // SAFETY: both are over one registrar.
//! let planner = unsafe { TransferPlanner::new(&cache, costs).with_pool(&pool) };
//!
//! let message = vec![7_u8; 65536];
//! // SAFETY: the message outlives the place, and no thread writes it meanwhile.
//! let place = unsafe { planner.send(message.as_ptr(), message.len(), Reuse::Unknown) }?;
//! for part in place.parts() {
//!     let (buf_index, address, length) = (part.handle.get(), part.range.start(), part.range.len());
//!     // ... WRITE_FIXED, SEND_ZC
//! #   let _ = (buf_index, address, length);
//! }
//! // SAFETY: the transfer has ended.
//! unsafe { place.complete() };
//! println!("{}", planner.advise(Direction::Leaving, message.as_ptr(), message.len(), Reuse::Once)?);
//! # Ok(())
//! # }
//! ```
//!
//! # The price
//!
//! A decision costs tens of nanoseconds and no system call. If the caller does not know how often memory
//! will be used ([`Reuse::Unknown`]), the planner rents until it has spent what a kept registration costs,
//! and buys then: at most twice the price of knowing. Measuring takes about a second, once for each machine,
//! device and monitor.
//!
//! # Never silently slow
//!
//! Whatever keeps a transfer from its fastest way is said by the place ([`PlannedPlace::slow`]) and counted
//! ([`PlannerStatistics`]): memory that no monitor sees, a pool that is missing, too short or exhausted, a
//! budget that is spent, a registration that was refused, nothing measured.
//!
//! # Layers
//!
//! `curve`, `costs` (arithmetic, a file), `advice` (the decision), `refused` (memory that cannot be kept), `tally` (what is
//! counted), `place` (the guards), `planner`, `measure`.

mod advice;
mod costs;
mod curve;
mod measure;
mod place;
mod planner;
mod refused;
mod tally;

pub use advice::{Advice, Considered, Coverage, Excluded, Handicap, Means, Question};
pub use costs::{Costs, CostsError, Way};
pub use curve::Curve;
pub use measure::{MeasureError, Unmoved, measure};
pub use place::{Copied, Guard, Part, PlannedPlace};
pub use planner::TransferPlanner;
pub use tally::{PlannerStatistics, Slow};

use crate::landing::Method;
use std::fmt;
use std::num::NonZeroU32;

/// A way for a transfer to reach the program's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Strategy {
    /// A lease from the cache: registered once, found again.
    Cached,
    /// The same with a device that follows the page table: nothing is pinned, and no monitor is needed.
    OnDemand,
    /// Data that leaves is copied into a buffer of a pool.
    Copy,
    /// Registered for this one use.
    PerUse,
    /// Registered piece by piece while other pieces move, and cached: see [`pieces`](crate::pieces).
    Pieces,
    /// Data that arrives does so elsewhere, and is copied into place, or its pages are: see
    /// [`landing`](crate::landing).
    Landing(Method),
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cached => "cached",
            Self::OnDemand => "on demand",
            Self::Copy => "copy",
            Self::PerUse => "per use",
            Self::Pieces => "pieces",
            Self::Landing(Method::Copy) => "landing by copy",
            Self::Landing(Method::Exchange) => "landing by exchange",
            Self::Landing(Method::Replace) => "landing by replacement",
        })
    }
}

/// Which way data goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Out of the program's memory.
    Leaving,
    /// Into it.
    Arriving,
}

impl Direction {
    /// The way by a copy.
    const fn copying(self) -> Strategy {
        match self {
            Self::Leaving => Strategy::Copy,
            Self::Arriving => Strategy::Landing(Method::Copy),
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leaving => "leaving",
            Self::Arriving => "arriving",
        })
    }
}

/// How often some memory is used before its mapping changes, as a decision counts it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Uses {
    /// So often, the present one included.
    Times(NonZeroU32),
    /// So often that the first time does not matter.
    Often,
}

impl Uses {
    /// This one alone.
    pub const ONCE: Self = Self::Times(NonZeroU32::MIN);
}

impl fmt::Display for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Times(NonZeroU32::MIN) => f.write_str("once"),
            Self::Times(times) => write!(f, "{times} times"),
            Self::Often => f.write_str("often"),
        }
    }
}

/// What the caller knows of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Reuse {
    /// This is the only use.
    Once,
    /// So many, this one included.
    Times(NonZeroU32),
    /// Many.
    Often,
    /// Nothing: the planner finds out by the address, and pays at most twice what knowing would cost.
    #[default]
    Unknown,
}
