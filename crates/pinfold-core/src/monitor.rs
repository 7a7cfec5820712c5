//! The kernel's side of the cache: what reports which addresses changed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare a trait on whose promise the whole cache relies; it
//! contains no unsafe block but an impl that hands that promise on.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::coverage::{Change, Cover, MappingKind};
use std::fmt;

/// How far a monitor's log has come; compared for equality, never computed with by a cache.
///
/// It never decreases from one moment to a later one, except for the words that say nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sequence(pub u64);

impl Sequence {
    /// The answer of a check that cannot tell at the moment. No replay gives it, so a cache that
    /// gets it replays.
    pub const UNKNOWN: Self = Self(u64::MAX);
    /// What a replay gives that told everything and cannot say which word that is. No check
    /// answers it, so the next check finds it old.
    pub const STALE: Self = Self(u64::MAX - 1);
    /// What a replay gives that ended before the log did ([`Monitor::replay_some`]). No check answers it either.
    pub const CUT: Self = Self(u64::MAX - 2);
}

/// A place in a monitor's log, where one replay ended and the next begins; handed back, never
/// computed with. Two words, so that a combination of two monitors keeps a place in each log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Position(pub u64, pub u64);

impl Position {
    /// No place in any log. A replay from here tells nothing but where the log ends, and is not
    /// [complete](Replay::complete).
    pub const NOWHERE: Self = Self(u64::MAX, u64::MAX);
}

/// Tells which address ranges of this process changed.
///
/// One monitor may serve several caches: each keeps its own place in the log.
///
/// # Safety
///
/// A cache hands out registrations without asking the kernel because it believes its monitor; a
/// change missed means that a device reads or writes pages which are no longer the program's. An
/// implementation promises, for every range for which [`watch`](Self::watch) answered
/// [`Watch::Covered`] and every change that [`coverage`](Self::coverage) calls [`Cover::Detected`]:
///
/// 1. **Visible.** If the change took effect (its system call returned, or the address was mapped
///    anew by another) before [`check`](Self::check) was called, then the sequence which `check`
///    returns is that of the change's log entry or a later one.
/// 2. **Pending.** If the change may still take effect after its log entry can be read, then
///    [`change_pending`](Self::change_pending) says so from before that entry can be read until after the
///    change has taken effect. Once the monitor is lost, it says so of every range.
/// 3. **Kept.** The log loses no entry unless it says so
///    ([`Replay::complete`] false), and no replay tells an entry again that an earlier one told, unless that one
///    said so ([`Replay::may_repeat`]).
/// 4. **Calm.** Nothing here waits for a lock that is held while memory is mapped, unmapped,
///    allocated or freed, except by `watch` and `mark_changes`.
/// 5. **Marked.** If [`mark_changes`](Self::mark_changes) gave a mark of the range, and the change began after that
///    and its call returned before a call of `check`, then the mark is set when that returns, whatever became of the log.
///    Neither a change of which an earlier `check` knew sets it, nor an entry ([`AddressRange::EVERYTHING`]) by which a
///    monitor says that it cannot tell what has changed.
/// 6. **Its own.** [`forked`](Self::forked) says yes in a forked child only: there neither the parent's threads nor its
///    transfers are awaited, which go on with memory that is freed then.
///
/// Where [`is_simulated`](Self::is_simulated) says yes it promises none of this, and no cache takes it with a registrar that
/// reaches memory of this process.
///
/// # Locks and panics
///
/// `check`, `replay`, `replay_some` and `change_surcharge` are also called under the cache's lock: they must not call the cache. Any
/// call may panic but [`forked`](Self::forked), which destructors ask: what was asked for ends with the panic, or it
/// is counted ([`callback_panics`](crate::Statistics::callback_panics)) where it has nowhere to go, and nothing that
/// was not told is believed. Of a `notify` that panics, the reclaimer may not hear.
pub unsafe trait Monitor: Send + Sync + 'static {
    /// The monitor's name: `userfaultfd`, `none`.
    fn name(&self) -> &'static str;

    /// How far the log has come, everything that took effect before this call included.
    ///
    /// This is on the path of every hit: one load where the monitor's means allow it. In a child that this call itself
    /// forks it answers [`Lost::Forked`]: nothing else is asked on a hit, unless it [takes long](Self::has_slow_check).
    ///
    /// # Errors
    ///
    /// [`Lost`] when this monitor will see nothing more.
    fn check(&self) -> Result<Sequence, Lost>;

    /// Whether a check takes much longer than some loads: a system call, for instance. Then a get that cannot be a hit asks
    /// only if it has to. The cache asks this once, as it is made.
    fn has_slow_check(&self) -> bool {
        false
    }

    /// Whether what this monitor says is not about this process's memory, as that of a test. A monitor around others says so
    /// if any of them does. Always the same answer, which a cache asks for once, as it is made: it takes such a monitor only with a
    /// registrar that [is simulated](crate::Registrar::is_simulated), too.
    fn is_simulated(&self) -> bool {
        false
    }

    /// Sees to it that every change of `range` is seen from now on.
    ///
    /// Called on a miss only; a few microseconds.
    fn watch(&self, range: AddressRange) -> Watch;

    /// Whether a change that is already in the log may still take effect somewhere in `range`.
    fn change_pending(&self, range: AddressRange) -> bool;

    /// Calls `visit` with every range that changed after `from`, where an earlier replay ended.
    ///
    /// `visit` may be called with ranges that were not watched, with more than changed, and, within one replay, more than
    /// once with the same change. It may be called before it is clear that the replay is not
    /// complete.
    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay;

    /// The same of `most` entries, or more, where the log has so many: with [`Sequence::CUT`] it ends behind them, and
    /// the next goes on there. A cache reads so, because it holds its lock meanwhile.
    ///
    /// It need not end before the log does.
    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        let _ = most;
        self.replay(from, visit)
    }

    /// A mark that each change of `range` sets from now on, as it is logged: no thread has to read the log in time.
    ///
    /// `None` where this monitor has none, or all are in use: then what the log has kept must do.
    fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        let _ = range;
        None
    }

    /// What this monitor claims to see.
    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover;

    /// What a change of watched memory costs the thread that makes it, beyond a change of memory
    /// that is not watched, in nanoseconds and as measured here. 0 if nothing to speak of.
    ///
    /// A hint that a cache compares with what registering costs. Asked on a miss only: some ten
    /// nanoseconds.
    fn change_surcharge(&self) -> u64 {
        0
    }

    /// Whether this process is a forked child of the one that made the monitor. Destructors ask it, too: there a panic is taken
    /// for no.
    fn forked(&self) -> bool;

    /// How often the waiters were notified, modulo 2^32; see [`wait`](Self::wait).
    fn notified(&self) -> u32;

    /// Wakes every [`wait`](Self::wait). Allocates nothing, waits for nothing.
    fn notify(&self);

    /// Waits until it was notified since [`notified`](Self::notified) gave `seen`. The monitor notifies after every
    /// entry of the log, the cache when there is something to reclaim.
    fn wait(&self, seen: u32);
}

/// All of a [`Monitor`] but `watch`, as `$to` answers it: for one around another, `self` and what is inside.
///
/// Also of what has methods of the same names, and then with an answer for `is_simulated` where that has none.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_monitor {
    ($self:ident, $to:expr) => {
        $crate::forward_monitor!($self, $to, is_simulated: $to.is_simulated());
    };
    ($self:ident, $to:expr, is_simulated: $is_simulated:expr) => {
        fn name(&$self) -> &'static str {
            $to.name()
        }

        #[inline]
        fn check(&$self) -> ::core::result::Result<$crate::Sequence, $crate::Lost> {
            $to.check()
        }

        fn has_slow_check(&$self) -> bool {
            $to.has_slow_check()
        }

        fn is_simulated(&$self) -> bool {
            $is_simulated
        }

        fn change_pending(&$self, range: $crate::AddressRange) -> bool {
            $to.change_pending(range)
        }

        fn replay(
            &$self,
            from: $crate::Position,
            visit: &mut dyn FnMut($crate::AddressRange),
        ) -> $crate::Replay {
            $to.replay(from, visit)
        }

        fn replay_some(
            &$self,
            from: $crate::Position,
            most: usize,
            visit: &mut dyn FnMut($crate::AddressRange),
        ) -> $crate::Replay {
            $to.replay_some(from, most, visit)
        }

        fn mark_changes(
            &$self,
            range: $crate::AddressRange,
        ) -> ::core::option::Option<::std::boxed::Box<dyn $crate::ChangeMark + '_>> {
            $to.mark_changes(range)
        }

        fn coverage(
            &$self,
            mapping: $crate::MappingKind,
            change: $crate::Change,
        ) -> $crate::Cover {
            $to.coverage(mapping, change)
        }

        fn change_surcharge(&$self) -> u64 {
            $to.change_surcharge()
        }

        fn forked(&$self) -> bool {
            $to.forked()
        }

        fn notified(&$self) -> u32 {
            $to.notified()
        }

        fn notify(&$self) {
            $to.notify();
        }

        fn wait(&$self, seen: u32) {
            $to.wait(seen);
        }
    };
}

// SAFETY: every call goes to the one monitor inside, whose promise it is.
unsafe impl<M: Monitor + ?Sized> Monitor for std::sync::Arc<M> {
    crate::forward_monitor!(self, (**self));

    fn watch(&self, range: AddressRange) -> Watch {
        (**self).watch(range)
    }
}

/// Whether a range has changed since [`Monitor::mark_changes`] gave this. It ends when it is dropped.
pub trait ChangeMark: Send + Sync {
    /// Whether it has. Takes no lock.
    fn is_set(&self) -> bool;
}

/// Either of two: set when one of them is.
impl<'m> ChangeMark for [Box<dyn ChangeMark + 'm>; 2] {
    fn is_set(&self) -> bool {
        self.iter().any(|mark| mark.is_set())
    }
}

/// The answer of [`Monitor::watch`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// Every change that the coverage calls seen will be seen.
    Covered,
    /// The range cannot be watched, so it is registered for each use.
    Uncovered(Uncovered),
}

/// Why a range is not watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Uncovered {
    /// Part of the range is not mapped.
    Unmapped,
    /// Mappings of this kind change in ways that the monitor cannot see.
    Mapping(MappingKind),
    /// Part of the range can be neither read nor written. A reservation of a device's addresses (a GPU's) looks like
    /// that, and what the device has there changes without a change of the mapping.
    NoAccess,
    /// Another process or monitor watches the mapping by the same means (`EBUSY`).
    WatchedByAnother,
    /// The kernel refused to watch it.
    Refused {
        /// The kernel's error number.
        errno: i32,
    },
    /// There is no monitor.
    NoMonitor,
    /// The monitor sees nothing any more.
    Lost(Lost),
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmapped => f.write_str("part of the range is not mapped"),
            Self::Mapping(kind) => {
                write!(f, "changes of a {} mapping cannot all be seen", kind.name())
            }
            Self::NoAccess => f.write_str(
                "part of the range can be neither read nor written, as where a GPU's addresses are \
                 reserved: what a device has there changes unseen",
            ),
            Self::WatchedByAnother => {
                f.write_str("the mapping belongs to another user of userfaultfd")
            }
            Self::Refused { errno } => {
                write!(f, "the kernel refuses to watch the mapping (errno {errno})")
            }
            Self::NoMonitor => f.write_str("there is no monitor"),
            Self::Lost(lost) => lost.fmt(f),
        }
    }
}

/// Why a monitor sees nothing any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// This process is a forked child; what its parent registered is not its own.
    Forked,
    /// The descriptor was closed, or its number belongs to another file by now.
    Descriptor {
        /// The kernel's error number.
        errno: i32,
    },
}

/// This process is a forked child, in which a cache's lock may be held by a thread that does not exist,
/// and all that is registered is the parent's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Forked;

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forked => f.write_str("this is a forked child: make a new monitor and cache"),
            Self::Descriptor { errno } => write!(
                f,
                "the monitor's descriptor was closed or replaced (errno {errno}): keep \
                 close_range away from it, or make a new monitor"
            ),
        }
    }
}

impl std::error::Error for Lost {}

/// The answer of [`Monitor::replay`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replay {
    /// Where the next replay begins.
    pub up_to: Position,
    /// The word that [`Monitor::check`] answers as long as nothing is in the log that this replay
    /// did not tell. Everything was told of which a check knew that returned before it began, or this is
    /// [`Sequence::CUT`].
    pub sequence: Sequence,
    /// False if entries were overwritten before they were read: then anything may have changed.
    pub complete: bool,
    /// Whether a later replay may tell again what this one told, as where one of the entries is not finished yet and those
    /// behind it are.
    pub may_repeat: bool,
}
