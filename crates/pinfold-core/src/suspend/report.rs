//! What a program asks of a suspension, and what it is told.

use super::device::{ConnectionLost, Suspend, Unsupported};
use crate::AddressRange;
use crate::board::Keys;
use crate::error::GetError;
use crate::lease::Lease;
use crate::monitor::Monitor;
use crate::registrar::RegisterError;
use crate::suspended_ranges::Gets;
use std::fmt;
use std::time::Duration;

/// How a suspension is to go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SuspensionTerms {
    /// How long everything together may take, from the beginning to the resumption, on the
    /// device's clock. Connections have timeouts; stay well below them.
    pub deadline: Duration,
    /// What becomes of leases of the region that were not handed over.
    pub leases: Leases,
    /// What becomes of gets of the region meanwhile.
    pub gets: Gets,
    /// What becomes of a [`Suspended`](crate::Suspended) that is dropped.
    pub on_drop: OnDrop,
}

impl Default for SuspensionTerms {
    /// 10 ms; leases are waited for, gets are held back, a dropped suspension kills.
    fn default() -> Self {
        Self {
            deadline: Duration::from_millis(10),
            leases: Leases::Drain,
            gets: Gets::Hold,
            on_drop: OnDrop::Kill,
        }
    }
}

/// What becomes of leases that are alive when a suspension begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Leases {
    /// They are waited for, until the deadline.
    #[default]
    Drain,
    /// The suspension is refused at once, with their number.
    Refuse,
}

/// What becomes of a suspension that is dropped, also by a panic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnDrop {
    /// The connections are failed in the open and what was registered is given back: it is unknown
    /// how far the memory was re-arranged.
    #[default]
    Kill,
    /// It is resumed, on the program's word that its memory is whole at every moment.
    Resume,
}

/// What keeps a region from being suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outstanding {
    /// Leases that were not handed over.
    pub leases: usize,
    /// Registrations that are being made or given back.
    pub registrations: usize,
    /// Connections that another suspension is just restarting.
    pub unstopped: usize,
    /// Transfers under way on the connections named.
    pub transfers: usize,
    /// How long the oldest of those has been under way.
    pub oldest_transfer: Duration,
    /// Whether the device still holds translations that were taken back.
    pub translations: bool,
}

impl Outstanding {
    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        let Self { leases, registrations, unstopped, transfers, translations, .. } = *self;
        leases + registrations + unstopped + transfers == 0 && !translations
    }
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { leases, registrations, unstopped, .. } = self;
        let Self { transfers, oldest_transfer, translations, .. } = self;
        write!(
            f,
            "{leases} leases, {registrations} registrations, {transfers} transfers (oldest \
             {oldest_transfer:?})"
        )?;
        if *unstopped > 0 {
            write!(f, ", {unstopped} connections being restarted")?;
        }
        if *translations { f.write_str(", device translations") } else { Ok(()) }
    }
}

/// A suspension that did not come about in time. Everything goes on as before, but what is named here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused<C> {
    /// What was still in flight.
    pub outstanding: Outstanding,
    /// How long it was waited for.
    pub waited: Duration,
    /// Connections that died meanwhile.
    pub lost: Vec<(C, ConnectionLost)>,
    /// Connections that were failed in the open, as in [`Expired::failed`]: the deadline passed when registrations were
    /// withdrawn, and [`expire_suspensions`](crate::Cache::expire_suspensions) found it so. Not one whose device panicked as it
    /// was to let it go on: that is failed too, and counted
    /// ([`device_panics`](crate::SuspensionStatistics::device_panics)).
    pub failed: Vec<C>,
}

/// Why a region is not suspended.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Why<C> {
    /// The device cannot; nothing was touched.
    Unsupported(Unsupported),
    /// Something was in flight until the deadline, or the program cancelled.
    Refused(Refused<C>),
    /// Part of the range is suspended already.
    AlreadySuspended {
        /// What is suspended.
        range: AddressRange,
    },
    /// A lease was handed over that is of another cache, or does not touch the range.
    ForeignLease {
        /// Which, by its place in the list.
        index: usize,
    },
    /// This process is a forked child of the one that made the cache.
    Forked,
}

impl<C: fmt::Debug> fmt::Display for Why<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported(reason) => reason.fmt(f),
            Self::Refused(Refused { waited, failed, .. }) if !failed.is_empty() => write!(
                f,
                "after {waited:?} it was overdue, and {} connections were failed: connect again, or allow \
                 more time",
                failed.len()
            ),
            Self::Refused(Refused { outstanding, waited, .. }) => write!(
                f,
                "after {waited:?} there were still {outstanding}: end them, or allow more time"
            ),
            Self::AlreadySuspended { range } => {
                write!(f, "{range} is suspended already: resume that first")
            }
            Self::ForeignLease { index } => {
                write!(f, "lease {index} of the list is not of this range and cache: leave it out")
            }
            Self::Forked => GetError::Forked.fmt(f),
        }
    }
}

/// A suspension that did not come about, with the leases that were handed over.
///
/// If the device had withdrawn their registrations already, they were renewed, or given up with the connections that
/// [`Refused::failed`] names.
pub struct NotSuspended<'c, R: Suspend, M: Monitor> {
    /// Why not.
    pub why: Why<R::Connection>,
    /// The leases, in the order in which they were handed over; errors where a registration that
    /// was taken back could not be made again.
    pub leases: Vec<Result<Lease<'c, R, M>, RegisterError>>,
    /// Whether their handles are the same.
    pub keys: Keys,
}

impl<R: Suspend, M: Monitor> fmt::Debug for NotSuspended<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotSuspended").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<R: Suspend, M: Monitor> fmt::Display for NotSuspended<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl<R: Suspend, M: Monitor> std::error::Error for NotSuspended<'_, R, M> {}

/// What a resumption brought back.
pub struct Resumed<'c, R: Suspend, M: Monitor> {
    /// The leases, in the order in which they were handed over. An error where the memory cannot
    /// be registered any more (it was unmapped meanwhile); [`Lease::is_invalidated`] where it
    /// changed again while it was being registered.
    pub leases: Vec<Result<Lease<'c, R, M>, RegisterError>>,
    /// Whether their handles are the same.
    pub keys: Keys,
    /// Connections that died meanwhile. They do not come back by themselves.
    pub lost: Vec<(R::Connection, ConnectionLost)>,
    /// From the beginning to the resumption: how long gets were held, and at most how long the
    /// connections stood still.
    pub paused: Duration,
    /// By how much the deadline was missed, if it was.
    pub late: Option<Duration>,
}

impl<R: Suspend, M: Monitor> fmt::Debug for Resumed<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resumed")
            .field("leases", &self.leases)
            .field("keys", &self.keys)
            .field("lost", &self.lost)
            .field("paused", &self.paused)
            .field("late", &self.late)
            .finish()
    }
}

/// There is nothing to resume any more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expired<C> {
    /// Why not.
    pub reason: Ended,
    /// The connections that were failed, or are just being failed by a thread that found the deadline passed:
    /// [`Notice::Revoked`](crate::Notice::Revoked) says when it is done.
    pub failed: Vec<C>,
    /// Connections that died before that.
    pub lost: Vec<(C, ConnectionLost)>,
}

/// Why a suspension cannot be resumed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Ended {
    /// It was overdue and was ended by
    /// [`expire_suspensions`](crate::Cache::expire_suspensions): its connections were failed, the
    /// leases handed over have ended.
    Deadline,
    /// This process is a forked child of the one that suspended: nothing of it was touched, and
    /// the parent resumes, or does not.
    Forked,
}

impl<C: fmt::Debug> fmt::Display for Expired<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            Ended::Deadline => write!(
                f,
                "the deadline passed and {} connections were failed: connect again, or allow more time",
                self.failed.len()
            ),
            Ended::Forked => GetError::Forked.fmt(f),
        }
    }
}

impl<C: fmt::Debug> std::error::Error for Expired<C> {}
