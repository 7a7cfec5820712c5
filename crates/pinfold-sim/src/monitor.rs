//! A monitor over the simulated address space.
//!
//! It keeps a monitor's promise by construction: a change, its log entry and its record of being pending are made under the
//! one lock of [`AddressSpace`], which is also taken to read them. [`SpaceMonitor::blindfold`] breaks the promise on purpose.

use crate::fake::{Fake, FakeMonitor};
use crate::space::AddressSpace;
use crate::sync::lock;
use pinfold_core::{
    AddressRange, Change, Cover, Lost, MappingKind, Position, Replay, Sequence, Uncovered, Watch,
};
use std::sync::{Arc, Mutex};

/// Tells of the changes of an [`AddressSpace`]; clones are the same monitor.
#[derive(Clone, Debug)]
pub struct SpaceMonitor {
    space: Arc<AddressSpace>,
    /// Guards what the test said about this monitor. Never held with the lock of the space.
    orders: Arc<Mutex<Orders>>,
}

#[derive(Debug, Default)]
struct Orders {
    lost: Option<Lost>,
    uncovered: Vec<(AddressRange, Uncovered)>,
    watched: u64,
    surcharge: u64,
}

/// The same, as a cache takes it.
pub type SimMonitor = Fake<SpaceMonitor>;

impl SimMonitor {
    /// A monitor of `space` that sees everything.
    pub fn new(space: &Arc<AddressSpace>) -> Self {
        Self(SpaceMonitor { space: Arc::clone(space), orders: Arc::default() })
    }
}

impl SpaceMonitor {
    /// From now on the monitor is lost for the reason given; [`Lost::Forked`] makes it believe
    /// that it runs in a forked child.
    pub fn lose(&self, lost: Lost) {
        lock(&self.orders).lost = Some(lost);
        self.space.event_count().notify();
    }

    /// From now on what overlaps `range` cannot be watched.
    pub fn uncover(&self, range: AddressRange, reason: Uncovered) {
        lock(&self.orders).uncovered.push((range, reason));
    }

    /// From now on nothing enters the log, though the monitor still claims to see: a broken
    /// monitor, to show that a test would notice stale registrations.
    pub fn blindfold(&self) {
        self.space.blindfold();
    }

    /// From now on a change of watched memory is said to cost so many nanoseconds more.
    pub fn set_change_surcharge(&self, nanoseconds: u64) {
        lock(&self.orders).surcharge = nanoseconds;
    }

    /// How often [`watch`](FakeMonitor::watch) was called.
    pub fn watch_calls(&self) -> u64 {
        lock(&self.orders).watched
    }

    fn lost(&self) -> Option<Lost> {
        lock(&self.orders).lost
    }

    /// Why `range` cannot be watched, if a test said so.
    fn told_uncovered(&self, range: AddressRange) -> Option<Uncovered> {
        let mut orders = lock(&self.orders);
        orders.watched += 1;
        let told = orders.uncovered.iter().find(|(uncovered, _)| uncovered.overlaps(&range));
        orders.lost.map(Uncovered::Lost).or(told.map(|(_, reason)| *reason))
    }
}

impl FakeMonitor for SpaceMonitor {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        self.lost().map_or_else(|| Ok(Sequence(self.space.log_end())), Err)
    }

    fn watch(&self, range: AddressRange) -> Watch {
        match self.told_uncovered(range) {
            Some(reason) => Watch::Uncovered(reason),
            None if self.space.watch(range) => Watch::Covered,
            None => Watch::Uncovered(Uncovered::Unmapped),
        }
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.lost().is_some() || self.space.change_pending(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        // The entries are copied first: `visit` takes the cache's locks, and the lock of the
        // space may be wanted by someone who holds them.
        let view = self.space.log_since(from.0);
        let complete = view.entries.is_some();
        view.entries.unwrap_or_default().into_iter().for_each(visit);
        Replay {
            up_to: Position(view.end, 0),
            sequence: Sequence(view.end),
            complete,
            may_repeat: false,
        }
    }

    /// So that gets spare it, as those do that have a system call for it.
    fn has_slow_check(&self) -> bool {
        true
    }

    fn change_surcharge(&self) -> u64 {
        lock(&self.orders).surcharge
    }

    fn coverage(&self, _mapping: MappingKind, change: Change) -> Cover {
        match change {
            Change::Unmap
            | Change::Replace
            | Change::Remap
            | Change::RemapOver
            | Change::Discard => Cover::Detected,
            Change::Protect => Cover::Harmless,
            _ => Cover::NotCached, // a simulated program cannot make such a change
        }
    }

    fn forked(&self) -> bool {
        self.lost() == Some(Lost::Forked)
    }

    fn notified(&self) -> u32 {
        self.space.event_count().count()
    }

    fn notify(&self) {
        self.space.event_count().notify();
    }

    fn wait(&self, seen: u32) {
        self.space.event_count().wait(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::{PAGE_BYTES, Protection};

    fn page(number: usize) -> AddressRange {
        AddressRange::new(number * PAGE_BYTES, PAGE_BYTES).unwrap()
    }

    fn monitored(log_capacity: usize) -> (Arc<AddressSpace>, SimMonitor) {
        let space = Arc::new(AddressSpace::with_log_capacity(log_capacity));
        space.map(AddressRange::new(PAGE_BYTES, 8 * PAGE_BYTES).unwrap(), Protection::ReadWrite);
        let monitor = SimMonitor::new(&space);
        (space, monitor)
    }

    fn replayed(monitor: &SimMonitor, from: Position) -> (Vec<AddressRange>, Replay) {
        let mut ranges = Vec::new();
        let replay = monitor.replay(from, &mut |range| ranges.push(range));
        (ranges, replay)
    }

    #[test]
    fn changes_of_watched_pages_are_replayed_in_order() {
        let (space, monitor) = monitored(8);
        let start = monitor.replay(Position::NOWHERE, &mut |_| {}).up_to;
        assert_eq!(monitor.watch(page(1)), Watch::Covered);
        assert_eq!(monitor.watch(page(3)), Watch::Covered);
        space.unmap(page(3));
        space.unmap(page(2));
        space.discard(page(1));
        let (ranges, replay) = replayed(&monitor, start);
        assert_eq!(ranges, [page(3), page(1)]);
        assert!(replay.complete);
        assert_eq!(Ok(replay.sequence), monitor.check());
        assert_eq!(replayed(&monitor, replay.up_to).0, []);
    }

    #[test]
    fn an_overflow_visits_nothing_and_says_so() {
        let (space, monitor) = monitored(1);
        let start = monitor.replay(Position::NOWHERE, &mut |_| {}).up_to;
        for number in 1..3 {
            assert_eq!(monitor.watch(page(number)), Watch::Covered);
            space.unmap(page(number));
        }
        let (ranges, replay) = replayed(&monitor, start);
        assert_eq!((ranges, replay.complete), (vec![], false));
        assert!(replayed(&monitor, replay.up_to).1.complete);
    }

    #[test]
    fn what_cannot_be_watched_is_told() {
        let (_, monitor) = monitored(8);
        let reason = Uncovered::Mapping(MappingKind::PrivateFile);
        monitor.uncover(page(2), reason);
        assert_eq!(monitor.watch(page(2)), Watch::Uncovered(reason));
        assert_eq!(monitor.watch(page(99)), Watch::Uncovered(Uncovered::Unmapped));
        assert_eq!(monitor.watch(page(1)), Watch::Covered);
        assert_eq!(monitor.watch_calls(), 3);
    }

    #[test]
    fn a_lost_monitor_says_why() {
        let (_, monitor) = monitored(8);
        let lost = Lost::Descriptor { errno: 9 };
        monitor.lose(lost);
        assert_eq!(monitor.check(), Err(lost));
        assert_eq!(monitor.watch(page(1)), Watch::Uncovered(Uncovered::Lost(lost)));
        assert!(monitor.change_pending(page(1)) && !monitor.forked());
        monitor.lose(Lost::Forked);
        assert!(monitor.forked());
    }

    #[test]
    fn a_discard_is_in_flux_before_it_can_be_read_and_until_it_is_done() {
        let (space, monitor) = monitored(8);
        assert_eq!(monitor.watch(page(1)), Watch::Covered);
        let discard = space.begin_discard(page(1));
        assert_eq!(replayed(&monitor, Position(0, 0)).0, [page(1)]);
        assert!(monitor.change_pending(page(1)));
        discard.finish();
        assert!(!monitor.change_pending(page(1)));
    }

    #[test]
    fn a_blindfolded_monitor_misses_everything() {
        let (space, monitor) = monitored(8);
        assert_eq!(monitor.watch(page(1)), Watch::Covered);
        monitor.blindfold();
        space.unmap(page(1));
        assert_eq!(monitor.check(), Ok(Sequence(0)));
    }
}
