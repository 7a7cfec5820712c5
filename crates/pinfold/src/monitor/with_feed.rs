//! Any monitor and the explicit feed, as one.
//!
//! What the monitor sees and what the feed tells are both applied, and what is pending for one of the
//! two is pending. So the feed adds what the monitor does not see, where some code claims to report it
//! ([`Cover::Reported`]), and takes nothing away. Memory that no monitor watches stays uncached: the feed cannot
//! promise for it, because other processes that map or truncate a file do not know of any feed.
//!
//! A program whose own allocator tells everything it does with its memory can vouch for that memory:
//! [`GetRequest::vouched`](crate::GetRequest::vouched) keeps the registration, and the allocator's word in
//! the feed invalidates it, which is the promise that it asks for. That works with
//! [`NoMonitor`](super::NoMonitor) too.
//!
//! # The price
//!
//! Two loads and two fences for each check besides the monitor's own: some 3 ns. A miss looks at the
//! records of what is under way: some 0.1 µs.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to promise what [`Monitor`] demands, and to declare what a monitor
//! promises that a feed is added to. It contains no unsafe block.

#![allow(unsafe_code)]

use super::ebpf::Ebpf;
use super::event_count::EventCount;
use super::feed::Feed;
use super::none::NoMonitor;
use super::userfaultfd::Userfaultfd;
use crate::{
    AddressRange, Change, ChangeMark, Cover, Lost, MappingKind, Monitor, Position, Replay,
    Sequence, Watch,
};
use pinfold_core::combination;
use std::sync::Arc;

/// A monitor that a feed can be added to.
///
/// # Safety
///
/// Its [`Sequence`]s never decrease. Its [`Position`]s say all in the first word. Its
/// [`notified`](Monitor::notified), [`notify`](Monitor::notify) and [`wait`](Monitor::wait) are those of
/// [`own_event_count`](Self::own_event_count).
pub unsafe trait Combinable: Monitor {
    /// What it notifies.
    fn own_event_count(&self) -> &EventCount;
}

// SAFETY: its word counts entries, its place is that word.
unsafe impl Combinable for Userfaultfd {
    fn own_event_count(&self) -> &EventCount {
        self.event_count()
    }
}

// SAFETY: its word counts entries, its place is that word, and the bit that ends both is the highest.
unsafe impl Combinable for Ebpf {
    fn own_event_count(&self) -> &EventCount {
        self.event_count()
    }
}

// SAFETY: it has one word and one place.
unsafe impl Combinable for NoMonitor {
    fn own_event_count(&self) -> &EventCount {
        self.event_count()
    }
}

// SAFETY: it is the monitor inside.
unsafe impl<M: Combinable + ?Sized> Combinable for Arc<M> {
    fn own_event_count(&self) -> &EventCount {
        (**self).own_event_count()
    }
}

/// A monitor and a feed.
#[derive(Debug)]
pub struct WithFeed<M> {
    monitor: M,
    feed: &'static Feed,
}

impl<M: Combinable> WithFeed<M> {
    /// Usually with [`Feed::of_process`].
    pub const fn new(monitor: M, feed: &'static Feed) -> Self {
        Self { monitor, feed }
    }

    /// The monitor.
    pub const fn monitor(&self) -> &M {
        &self.monitor
    }

    /// The feed.
    pub const fn feed(&self) -> &'static Feed {
        self.feed
    }

    fn event_counts(&self) -> [&EventCount; 2] {
        [self.monitor.own_event_count(), self.feed.event_count()]
    }
}

// SAFETY: the promises of `Monitor`, one by one. What the monitor sees it sees as before; what follows
// is about what the feed tells, and nothing else is covered by its word.
//
// **Visible.** `begin` returns before the change is made, and by then the feed's word counts its
// entry. A thread that knows that the change took effect comes after it: the maker's return reaches it
// through the program, or the address that it freed was mapped anew, which took a lock of the kernel's that
// the change had before. So a check that begins then reads a word that counts the entry, and the
// sum that it answers is that of the feed's entry and of everything that the monitor saw, or of more
// (`combination`), or it says that it cannot tell.
//
// **Pending.** The record stands before the entry is logged, and until the change is done
// (`pending_changes`). What was told afterwards took effect before its entry.
//
// **Kept.** `change_log`, claims 1 to 3.
//
// **Calm.** Nothing here waits but `wait`.
//
// **Marked.** The monitor's mark is set by what the monitor sees. The feed's is set before the feed's word counts the
// entry, and `begin` and `changed` return after that.
unsafe impl<M: Combinable> Monitor for WithFeed<M> {
    fn name(&self) -> &'static str {
        match (self.monitor.name(), self.feed.is_fed()) {
            ("userfaultfd", true) => "userfaultfd+hooks",
            ("none", true) => "hooks",
            (name, _) => name,
        }
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        combination::check(&self.monitor, &self.feed.log)
    }

    fn watch(&self, range: AddressRange) -> Watch {
        self.monitor.watch(range)
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.feed.is_under_way(range) || self.monitor.change_pending(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.replay_some(from, usize::MAX, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        combination::replay(&self.monitor, &self.feed.log, from, most, visit)
    }

    fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        let (monitors, feeds) = (self.monitor.mark_changes(range)?, self.feed.mark(range)?);
        Some(Box::new([monitors, Box::new(feeds)]))
    }

    fn has_slow_check(&self) -> bool {
        self.monitor.has_slow_check()
    }

    fn is_simulated(&self) -> bool {
        self.monitor.is_simulated()
    }

    fn change_surcharge(&self) -> u64 {
        self.monitor.change_surcharge()
    }

    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover {
        match self.monitor.coverage(mapping, change) {
            Cover::Undetected if self.feed.claims(change) => Cover::Reported,
            cover => cover,
        }
    }

    fn forked(&self) -> bool {
        self.monitor.forked()
    }

    /// The sum: each only grows, so it is the same if neither was notified.
    fn notified(&self) -> u32 {
        let [monitor, feed] = self.event_counts();
        monitor.count().wrapping_add(feed.count())
    }

    fn notify(&self) {
        self.monitor.notify();
    }

    fn wait(&self, seen: u32) {
        EventCount::wait_for_either(self.event_counts(), seen);
    }
}
