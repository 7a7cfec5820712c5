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
    /// suspension's deadline or [the request's](crate::GetRequest::wait_until). At once in a callback that runs within a
    /// call of the suspension on this thread, which would wait for itself.
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
/// A region whose last lease another thread is ending at this moment may count as in use.
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
            Limit::Bytes if self.wanted > self.allowed => write!(
                f,
                "{wanted} bytes at once exceed the whole budget of {allowed}: raise Config::max_bytes and \
                 RLIMIT_MEMLOCK (a cache uses half of it at most), or lease shorter parts"
            ),
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
                "the shared budget grants no more than {allowed} bytes: {held} are held and \
                 {wanted} more are needed; end leases, or raise the budget or this drawer's terms"
            ),
            Limit::SharedRegions => write!(
                f,
                "the shared budget grants no more than {allowed} registrations: {held} are held; \
                 end leases, or raise the budget or this drawer's terms"
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
                "{range} is being registered by this thread: have its registrar, monitor or clock not ask for it"
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
    /// The monitor [is simulated](crate::Monitor::is_simulated), and the registrar
    /// [is not](crate::Registrar::is_simulated).
    SimulatedMonitor,
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
                 {max_region_bytes} at most, which cannot be: mend Registrar::limits"
            ),
            Self::Monitor(lost) => lost.fmt(f),
            Self::SimulatedMonitor => f.write_str(
                "a simulated monitor cannot tell which memory changes under this registrar: give the cache a \
                 real monitor, or a simulated registrar",
            ),
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
    /// The address is beyond what the index holds (2^48), or 4,096 regions of the cache touch a block of 2 MiB that this
    /// touches.
    Unindexed,
    /// The caller asked for one use ([`GetRequest::once`](crate::GetRequest::once)).
    Asked,
    /// Keeping it has not paid yet, or [`Config::keep`](crate::Config::keep) says that nothing is kept; or the system counts more for
    /// it than was planned and than there is room for, so that it is registered for this use alone.
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
            Self::Unindexed => {
                f.write_str("the index holds no address so high, or no more regions here")
            }
            Self::Asked => f.write_str("it was asked for one use"),
            Self::NotAdmitted => f.write_str(
                "keeping it has not paid yet, or there is no room for all that it counts",
            ),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::registrar::{BadAddress, DeregisterError};
    use crate::suspend::{ConnectionLost, Ended, Expired, Outstanding, Refused, Unsupported, Why};
    use std::time::Duration;

    const MOST: usize = usize::MAX;
    const ERRNO: i32 = 4095;
    /// [`MOST`] as texts have it.
    const LIMIT: &str = "18446744073709551615";

    fn range() -> AddressRange {
        AddressRange::new(MOST - (1 << 47), 1 << 46).unwrap()
    }

    /// An error's text, what it names and the way out.
    type Text = (String, &'static str, &'static str);

    fn of(error: impl fmt::Display, names: &'static str, way_out: &'static str) -> Text {
        (error.to_string(), names, way_out)
    }

    fn of_addresses() -> [Text; 6] {
        let of = |reason, names, way_out| {
            of(RegisterError::BadAddress { range: range(), reason, errno: ERRNO }, names, way_out)
        };
        [
            of(BadAddress::Unmapped { at: MOST }, "0xffffffffffffffff", "map it first"),
            of(BadAddress::NoAccess { at: MOST }, "0xffffffffffffffff", "mprotect it"),
            of(BadAddress::NotWritable { at: MOST }, "0xffffffffffffffff", "copy the data"),
            of(BadAddress::UnsupportedMapping { at: MOST }, "0xffffffffffffffff", "copy the data"),
            of(BadAddress::Kernel { at: MOST }, "0xffffffffffffffff", "the program's own memory"),
            of(BadAddress::Unknown, "0xffff", "ask again, or copy the data"),
        ]
    }

    fn of_registrars() -> [Text; 8] {
        use RegisterError as E;
        let (every, limit_bytes) = (Access::from_bits(u8::MAX), Some(u64::MAX));
        let gone = DeregisterError::DeviceGone { errno: ERRNO };
        [
            of(E::TooLarge { range: range(), max_bytes: MOST }, LIMIT, "ask for pieces"),
            of(E::PinnedMemoryLimit { limit_bytes, errno: ERRNO }, LIMIT, "raise RLIMIT_MEMLOCK"),
            of(
                E::PinnedMemoryLimit { limit_bytes: None, errno: ERRNO },
                "RLIMIT_MEMLOCK",
                "look at the machine's free memory",
            ),
            of(E::TableFull { capacity: MOST }, LIMIT, "end leases, or make the table larger"),
            of(
                E::RegionLimit { held: MOST, device_max: MOST, errno: ERRNO },
                LIMIT,
                "end leases, lower Config::max_regions, or raise rdma.max",
            ),
            of(E::DeviceGone { errno: ERRNO }, "4095", "open it again"),
            of(E::UnsupportedAccess { access: every }, "remote-atomic", "ask for fewer"),
            of(gone, "4095", "the registration ends when the kernel closes the device"),
        ]
    }

    fn of_gets() -> [Text; 12] {
        use GetError as E;
        let range = range();
        let exhausted = |limit, way_out| {
            let exhausted = Exhausted { limit, allowed: MOST, held: MOST, wanted: MOST };
            of(E::Exhausted(exhausted), LIMIT, way_out)
        };
        [
            of(RangeError::Null, "the address", "pass the address of live memory"),
            of(RangeError::Empty { start: MOST }, "0xffff", "there is nothing to register"),
            of(RangeError::Overflow { start: MOST, length: MOST }, LIMIT, "check the length"),
            of(E::NoAccess, "no access", "say what the device will do"),
            of(E::TooLong { range, max_region_bytes: MOST }, LIMIT, "lease them in pieces"),
            of(E::Suspended { range }, "0xffff", "ask again when it has been resumed"),
            of(E::AwaitsItself { range }, "0xffff", "not ask for it"),
            of(E::Forked, "forked child", "make a new monitor and cache"),
            exhausted(Limit::Bytes, "raise Config::max_bytes"),
            exhausted(Limit::Regions, "raise Config::max_regions"),
            exhausted(Limit::SharedBytes, "raise the budget"),
            exhausted(Limit::SharedRegions, "raise the budget"),
        ]
    }

    fn of_caches() -> [Text; 6] {
        use ConfigError as E;
        let lost = |lost, names, way_out| of(E::Monitor(lost), names, way_out);
        [
            of(E::Piece { piece_bytes: 3, page_bytes: MOST }, LIMIT, "must be a power of two"),
            of(E::Budget { max_bytes: MOST, max_regions: MOST }, LIMIT, "allow at least one page"),
            of(
                E::Registrar { page_bytes: MOST, max_region_bytes: MOST },
                LIMIT,
                "mend Registrar::limits",
            ),
            lost(Lost::Forked, "forked child", "make a new monitor and cache"),
            lost(Lost::Descriptor { errno: ERRNO }, "4095", "make a new monitor"),
            of(E::SimulatedMonitor, "simulated monitor", "give the cache a real monitor"),
        ]
    }

    fn of_suspensions() -> [Text; 13] {
        let outstanding = Outstanding {
            leases: 1_000_000,
            registrations: 1_000_000,
            unstopped: 1_000_000,
            transfers: 1_000_000,
            oldest_transfer: Duration::from_micros(10_001),
            translations: true,
        };
        let waited = Duration::from_micros(10_001);
        let refused = Refused { outstanding, waited, lost: Vec::new(), failed: Vec::new() };
        let late = Refused { failed: vec![MOST; 1_000_000], ..refused.clone() };
        let overdue =
            Expired { reason: Ended::Deadline, failed: vec![MOST; 1_000_000], lost: Vec::new() };
        let why = |why: Why<usize>, names, way_out| of(why, names, way_out);
        let cannot = |cannot, names, way_out| of(Why::<usize>::Unsupported(cannot), names, way_out);
        [
            why(Why::Refused(refused), "1000000 leases", "end them, or allow more time"),
            why(Why::Refused(late), "1000000 connections", "connect again, or allow more time"),
            why(Why::AlreadySuspended { range: range() }, "0xffff", "resume that first"),
            why(Why::ForeignLease { index: MOST }, LIMIT, "leave it out"),
            why(Why::Forked, "forked child", "make a new monitor and cache"),
            of(overdue, "1000000 connections", "connect again, or allow more time"),
            cannot(Unsupported::Device, "the device", "end the leases"),
            cannot(
                Unsupported::PeerMayWrite { range: range() },
                "a peer",
                "have it agree to keep off",
            ),
            cannot(Unsupported::Connection { index: MOST }, LIMIT, "end it first"),
            of(ConnectionLost::Gone, "connection", "connect again"),
            of(ConnectionLost::TimedOut, "retries", "suspend for a shorter time"),
            of(ConnectionLost::ByPeer, "the peer", "connect again"),
            of(ConnectionLost::Broken { errno: ERRNO }, "4095", "connect again"),
        ]
    }

    /// Except for what the kernel alone knows ([`RegisterError::Os`] and the like), whose text is the kernel's.
    #[test]
    #[cfg_attr(miri, ignore = "texts, and nothing unsafe")]
    fn every_text_is_short_and_names_the_limit_and_the_way_out() {
        let texts = [&of_addresses()[..], &of_registrars(), &of_gets(), &of_caches()].concat();
        for (text, names, way_out) in texts.into_iter().chain(of_suspensions()) {
            assert!(text.len() < 200, "{} bytes: {text}", text.len());
            assert!(text.contains(names), "no {names}: {text}");
            assert!(text.contains(way_out), "no {way_out}: {text}");
        }
    }
}
