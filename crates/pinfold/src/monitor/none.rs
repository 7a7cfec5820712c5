//! No monitor: nothing is watched. Either nothing is cached unless the caller vouches for it, or nothing has to be
//! watched, because the device itself follows the process's page table.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement a trait that promises to see changes of the ranges that it covers, and
//! sees none. Mostly it covers none. Over a registrar whose registrations never stop matching the program's memory
//! the promise holds with nothing to see, so it covers everything there:
//! [`on_demand_cache`](crate::on_demand_cache) makes one, over such a registrar; any other caller vouches for that.
//! The file contains no unsafe block outside of its tests.

#![allow(unsafe_code)]

use super::event_count::EventCount;
use super::start::StartError;
use crate::fork_mark::ForkMark;
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Uncovered,
    Watch,
};

/// The only word there is, and the only place in the log.
const START: Sequence = Sequence(2);
const PLACE: Position = Position(0, 0);

/// Sees one thing only: that this process is a forked child. A check costs a load.
///
/// For machines that refuse every monitor: memory is registered for each use, except what a caller
/// vouches for. And for devices that follow the page table: memory of every kind is cached.
#[derive(Debug)]
pub struct NoMonitor {
    mark: ForkMark,
    event_count: EventCount,
    covers: Covers,
}

/// Of which ranges no change is missed.
#[derive(Clone, Copy, Debug)]
enum Covers {
    Nothing,
    /// Every change is seen: by the device, which is where it matters.
    Everything,
}

impl NoMonitor {
    /// Covers nothing. Takes one page.
    ///
    /// # Errors
    ///
    /// [`StartError::NoMemory`], or a kernel older than 4.14.
    pub fn new() -> Result<Self, StartError> {
        Self::covering(Covers::Nothing)
    }

    /// Covers everything. Takes one page.
    ///
    /// # Errors
    ///
    /// As from [`new`](Self::new).
    ///
    /// # Safety
    ///
    /// A cache that relies on this monitor has registrations that follow the process's page table.
    pub unsafe fn page_table_coherent() -> Result<Self, StartError> {
        Self::covering(Covers::Everything)
    }

    fn covering(covers: Covers) -> Result<Self, StartError> {
        let mark = ForkMark::new(1).map_err(StartError::memory)?;
        Ok(Self { mark, event_count: EventCount::default(), covers })
    }

    pub(super) fn event_count(&self) -> &EventCount {
        &self.event_count
    }
}

// SAFETY: where `watch` answers `Covered`, nothing has to be seen: see the file's header.
unsafe impl Monitor for NoMonitor {
    fn name(&self) -> &'static str {
        match self.covers {
            Covers::Nothing => "none",
            Covers::Everything => "unneeded",
        }
    }

    fn check(&self) -> Result<Sequence, Lost> {
        if self.forked() { Err(Lost::Forked) } else { Ok(START) }
    }

    fn watch(&self, _range: AddressRange) -> Watch {
        match self.covers {
            Covers::Nothing => Watch::Uncovered(Uncovered::NoMonitor),
            Covers::Everything => Watch::Covered,
        }
    }

    fn change_pending(&self, _range: AddressRange) -> bool {
        false
    }

    /// Nothing was ever logged.
    fn replay(&self, from: Position, _visit: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay {
            up_to: PLACE,
            sequence: START,
            complete: from == PLACE && !self.forked(),
            may_repeat: false,
        }
    }

    fn coverage(&self, _mapping: MappingKind, change: Change) -> Cover {
        match (self.covers, change) {
            (_, Change::Fork) => Cover::Detected,
            (Covers::Nothing, _) => Cover::NotCached,
            (Covers::Everything, Change::Protect) => Cover::Harmless,
            (Covers::Everything, _) => Cover::Detected,
        }
    }

    fn forked(&self) -> bool {
        self.mark.forked()
    }

    fn notified(&self) -> u32 {
        self.event_count.count()
    }

    fn notify(&self) {
        self.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.event_count.wait(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn never_changes(monitor: &NoMonitor) {
        let sequence = monitor.check().unwrap();
        let start = monitor.replay(Position::NOWHERE, &mut |_| panic!("nothing was logged"));
        assert_eq!((start.sequence, start.complete), (sequence, false));
        let replay = monitor.replay(start.up_to, &mut |_| panic!("nothing was logged"));
        assert_eq!(replay, Replay { complete: true, ..start });
        assert!(!monitor.forked());
    }

    #[test]
    fn nothing_is_covered_and_nothing_ever_changes() {
        let monitor = NoMonitor::new().unwrap();
        let range = AddressRange::new(0x1000, 0x1000).unwrap();
        assert_eq!(monitor.watch(range), Watch::Uncovered(Uncovered::NoMonitor));
        never_changes(&monitor);
    }

    #[test]
    fn everything_is_covered_where_the_device_sees_the_changes() {
        // SAFETY: nothing is registered on its word.
        let monitor = unsafe { NoMonitor::page_table_coherent() }.unwrap();
        assert_eq!(monitor.watch(AddressRange::EVERYTHING), Watch::Covered);
        never_changes(&monitor);
    }
}
