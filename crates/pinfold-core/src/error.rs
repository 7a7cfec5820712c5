//! What can go wrong at the cache's entry points, one enum per operation.

use crate::monitor::{Forked, Lost};
use crate::range::RangeError;
use crate::registrar::RegisterError;
use crate::{Access, AddressRange};
use std::fmt;

impl From<Forked> for GetError {
    fn from(Forked: Forked) -> Self {
        Self::Forked
    }
}

/// Why a `get` gave no lease. Nothing is left registered or reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GetError {
    /// The address and length make no range.
    Range(RangeError),
    /// No rights were asked for.
    NoAccess,
    /// The range is longer than what the device registers at once: ask for it
    /// [in pieces](crate::GetRequest::pieces).
    TooLong {
        /// What was asked for.
        range: AddressRange,
        /// The longest registration of the device, in bytes and whole pages.
        max_region_bytes: usize,
    },
    /// The registrar failed.
    Register(RegisterError),
    /// The cache's own budget is spent on regions that are in use.
    Exhausted(Exhausted),
    /// Part of the range is suspended, and its gets are refused, or were held back until the
    /// suspension's deadline or [the request's](crate::GetRequest::wait_until).
    Suspended {
        /// What is suspended.
        range: AddressRange,
    },
    /// The registration that would serve this is being made by this very thread, whose registrar, monitor or
    /// clock asks: it would wait for itself.
    AwaitsItself {
        /// What is being registered.
        range: AddressRange,
    },
    /// This process is a forked child of the one that made the cache.
    Forked,
}

/// Which limit of the budget is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Bytes pinned at once, [`Config::max_bytes`](crate::Config::max_bytes).
    Bytes,
    /// Registrations at once, [`Config::max_regions`](crate::Config::max_regions) or the
    /// registrar's maximum, whichever is less.
    Regions,
    /// Bytes of the [`Account`](crate::Account) that this cache draws on with others.
    SharedBytes,
    /// Registrations of that account.
    SharedRegions,
}

/// The budget is spent, and no idle region is left to be given up.
///
/// A region that another thread looks up at this moment, or whose last lease it is ending, may count as in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exhausted {
    /// The limit that was reached.
    pub limit: Limit,
    /// What the limit allows, in its unit.
    pub allowed: usize,
    /// What is held, in the limit's unit.
    pub held: usize,
    /// What the call needed on top, in the limit's unit.
    pub wanted: usize,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allowed, held, wanted, .. } = self;
        match self.limit {
            Limit::Bytes => write!(
                f,
                "the budget of {allowed} bytes is spent: {held} are in use and {wanted} more are \
                 needed; end leases, or raise Config::max_bytes (and RLIMIT_MEMLOCK with it)"
            ),
            Limit::Regions => write!(
                f,
                "the budget of {allowed} registrations is spent: {held} are in use; end leases, \
                 or raise Config::max_regions (and the size of the device's table with it)"
            ),
            Limit::SharedBytes => write!(
                f,
                "no more than {allowed} bytes of the shared budget can be had: {held} are held and \
                 {wanted} more are needed; end leases, or raise the budget, this drawer's maximum \
                 or its minimum"
            ),
            Limit::SharedRegions => write!(
                f,
                "no more than {allowed} registrations of the shared budget can be had: {held} are \
                 held; end leases, or raise the budget, this drawer's maximum or its minimum"
            ),
        }
    }
}

impl std::error::Error for Exhausted {}

impl fmt::Display for GetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::NoAccess => f.write_str("no access was asked for: say what the device will do"),
            Self::TooLong { range, max_region_bytes } => write!(
                f,
                "{} bytes at {:#x}, in whole pages, exceed the device's longest registration of \
                 {max_region_bytes} bytes: lease them in pieces (Cache::request, pieces)",
                range.len(),
                range.start()
            ),
            Self::Register(error) => error.fmt(f),
            Self::Exhausted(error) => error.fmt(f),
            Self::Suspended { range } => {
                write!(f, "{range} is suspended: ask again when it has been resumed")
            }
            Self::AwaitsItself { range } => write!(
                f,
                "{range} is being registered by this thread: a registrar, monitor or clock must not ask for it"
            ),
            Self::Forked => f.write_str(
                "this is a forked child, whose memory its parent's registrations do not name: \
                 make a new monitor and cache here",
            ),
        }
    }
}

impl std::error::Error for GetError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Range(error) => Some(error),
            Self::Register(error) => Some(error),
            Self::Exhausted(error) => Some(error),
            _ => None,
        }
    }
}

impl From<RangeError> for GetError {
    fn from(error: RangeError) -> Self {
        Self::Range(error)
    }
}

/// Why a cache could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConfigError {
    /// `piece_bytes` is not a power of two of at least one page.
    Piece {
        /// What was given.
        piece_bytes: usize,
        /// The registrar's page, in bytes.
        page_bytes: usize,
    },
    /// A budget of nothing, or less than one page.
    Budget {
        /// The bytes given.
        max_bytes: usize,
        /// The registrations given, or the registrar's maximum.
        max_regions: usize,
    },
    /// The registrar's limits contradict themselves.
    Registrar {
        /// The registrar's page, in bytes.
        page_bytes: usize,
        /// The registrar's longest region, in bytes.
        max_region_bytes: usize,
    },
    /// The monitor sees nothing.
    Monitor(Lost),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Piece { piece_bytes, page_bytes } => write!(
                f,
                "piece_bytes is {piece_bytes}: it must be a power of two of at least {page_bytes}"
            ),
            Self::Budget { max_bytes, max_regions } => write!(
                f,
                "a budget of {max_bytes} bytes and {max_regions} registrations holds nothing: \
                 allow at least one page and one registration"
            ),
            Self::Registrar { page_bytes, max_region_bytes } => write!(
                f,
                "the registrar claims pages of {page_bytes} bytes and regions of \
                 {max_region_bytes} at most, which cannot be"
            ),
            Self::Monitor(lost) => lost.fmt(f),
        }
    }
}

impl std::error::Error for ConfigError {}

/// Why a lease's registration is not kept in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PerUse {
    /// Changes of this memory cannot all be seen.
    Uncovered(crate::monitor::Uncovered),
    /// A discard of overlapping memory has begun and may not have ended.
    ChangePending,
    /// The mapping changed while it was being registered.
    ChangedMeanwhile,
    /// Remote rights, and [`Config::cache_remote`](crate::Config::cache_remote) is off.
    Remote(Access),
    /// The budget is spent and [`WhenFull::RegisterPerUse`](crate::WhenFull) was chosen.
    Full,
    /// The address is beyond what the index holds (2^48), or the index is out of space.
    Unindexed,
    /// The caller asked for one use ([`GetRequest::once`](crate::GetRequest::once)).
    Asked,
    /// Keeping it has not paid yet, or [`Config::keep`](crate::Config::keep) says that nothing is kept.
    NotAdmitted,
}

impl fmt::Display for PerUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uncovered(why) => why.fmt(f),
            Self::ChangePending => {
                f.write_str("a discard of overlapping memory may still be under way")
            }
            Self::ChangedMeanwhile => f.write_str("the mapping changed while it was registered"),
            Self::Remote(access) => write!(f, "the rights {access} are not cached by default"),
            Self::Full => f.write_str("the budget is spent on regions in use"),
            Self::Unindexed => f.write_str("the address is beyond what the index holds"),
            Self::Asked => f.write_str("it was asked for one use"),
            Self::NotAdmitted => f.write_str("it was not used often enough for keeping it to pay"),
        }
    }
}
