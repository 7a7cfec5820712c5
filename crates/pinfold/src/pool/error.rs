//! What can go wrong when a pool is asked, one enum per operation.

use pinfold_core::RegisterError;
use std::fmt;
use std::time::Duration;

/// Why a pool could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The budget holds no slab.
    #[error(
        "a pool of {max_bytes} bytes in registrations of {max_region_bytes} bytes at most holds \
         nothing: allow {least} bytes and one registration"
    )]
    Budget {
        /// The bytes given.
        max_bytes: usize,
        /// The registrars' longest registration, in bytes.
        max_region_bytes: usize,
        /// The least that is needed, in bytes.
        least: usize,
    },
    /// The registrars' limits contradict themselves, or their pages are too large.
    #[error(
        "the registrar claims pages of {page_bytes} bytes and registrations of {max_region_bytes} \
         at most, which a pool cannot be made of"
    )]
    Registrar {
        /// The registrars' page, in bytes.
        page_bytes: usize,
        /// The registrars' longest registration, in bytes.
        max_region_bytes: usize,
    },
    /// The mark that a forked child finds could not be made.
    #[error(
        "the page that a forked child finds wiped could not be made: {} (Linux 4.14 or later is \
         needed)",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    ForkMark {
        /// The kernel's error number.
        errno: i32,
    },
}

/// Why there was no buffer. Nothing is left mapped or registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// No bytes were asked for.
    #[error("a buffer of no bytes: ask for at least one")]
    Empty,
    /// No slab of this pool can hold it.
    #[error(
        "{bytes} bytes exceed the longest buffer of this pool, {max_bytes}: ask for pieces, or \
         raise PoolConfig::max_bytes as far as the registrars take it"
    )]
    TooLong {
        /// The length asked for, in bytes.
        bytes: usize,
        /// The longest that the pool's budget and its registrars allow.
        max_bytes: usize,
    },
    /// No buffer has such an alignment.
    #[error("no buffer is aligned to {align} bytes: ask for a power of two up to {max_align}")]
    Alignment {
        /// What was asked for, in bytes.
        align: usize,
        /// The strictest there is, a power of two.
        max_align: usize,
    },
    /// Nothing is free, and the request was not to grow or wait.
    #[error("{0}")]
    Exhausted(PoolExhausted),
    /// Nothing was put back in time.
    #[error("nothing was put back within {waited:?}: {pool}")]
    TimedOut {
        /// How long was waited.
        waited: Duration,
        /// What the pool had meanwhile.
        pool: PoolExhausted,
    },
    /// The budget that this pool shares with others has no more.
    #[error(
        "the shared budget has {available} bytes left and {bytes} are needed: trim other pools and \
         caches, or raise it"
    )]
    Denied {
        /// What was asked for, in bytes.
        bytes: usize,
        /// What is left, in bytes, as far as is known.
        available: usize,
    },
    /// The kernel gave no memory.
    #[error(
        "no memory for a slab of {bytes} bytes ({operation}: {}): look at the machine's free \
         memory, `ulimit -v` and the control group's memory.max",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Memory {
        /// The call that failed.
        operation: &'static str,
        /// How much was asked for, in bytes.
        bytes: usize,
        /// The kernel's error number.
        errno: i32,
    },
    /// A registrar refused the memory.
    #[error("{0}")]
    Register(#[source] RegisterError),
    /// This process is a forked child of the one that made the pool.
    #[error(
        "this is a forked child, and the pool's memory is registered for its parent: make a new \
         pool here"
    )]
    Forked,
}

/// How a pool stands that has nothing free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolExhausted {
    /// What was asked for, in bytes.
    pub wanted: usize,
    /// What is registered, in bytes.
    pub registered: usize,
    /// What may be registered, in bytes.
    pub max_bytes: usize,
}

impl AllocateError {
    /// Whether there is no room, so that it may help to give something back, or to ask for less.
    pub(super) const fn is_about_room(&self) -> bool {
        match self {
            Self::Register(error) => error.is_about_room(),
            Self::Denied { .. } | Self::Memory { .. } => true,
            _ => false,
        }
    }

    /// Whether less might be had where this could not: a shorter slab is one registration as well.
    pub(super) const fn is_about_bytes(&self) -> bool {
        use RegisterError as E;
        let is_about_regions =
            matches!(self, Self::Register(E::TableFull { .. } | E::RegionLimit { .. }));
        self.is_about_room() && !is_about_regions
    }
}

impl fmt::Display for PoolExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, registered, max_bytes } = self;
        write!(
            f,
            "no {wanted} bytes in a row are free in the {registered} registered of {max_bytes}: put \
             buffers back, raise PoolConfig::max_bytes (and RLIMIT_MEMLOCK with it), or let the \
             request grow or wait"
        )
    }
}
