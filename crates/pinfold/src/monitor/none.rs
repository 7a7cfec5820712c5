//! No monitor: nothing is watched, so nothing is cached unless the caller vouches for it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement a trait that promises something of every range it
//! covers, which is none. It contains no unsafe block.

#![allow(unsafe_code)]

use super::event_count::EventCount;
use super::inert::InertMonitor;
use super::start::StartError;
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Uncovered,
    Watch,
};

/// Sees one thing only: that this process is a forked child.
///
/// For machines that refuse every monitor. Memory is registered for each use, except what a caller
/// vouches for.
#[derive(Debug)]
pub struct NoMonitor(InertMonitor);

impl NoMonitor {
    /// Takes one page.
    ///
    /// # Errors
    ///
    /// [`StartError::NoMemory`], or a kernel older than 4.14.
    pub fn new() -> Result<Self, StartError> {
        InertMonitor::new().map(Self)
    }

    pub(super) fn event_count(&self) -> &EventCount {
        &self.0.event_count
    }
}

// SAFETY: `watch` never answers `Covered`, so nothing is promised of any range.
unsafe impl Monitor for NoMonitor {
    fn name(&self) -> &'static str {
        "none"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        self.0.check()
    }

    fn watch(&self, _range: AddressRange) -> Watch {
        Watch::Uncovered(Uncovered::NoMonitor)
    }

    fn change_pending(&self, _range: AddressRange) -> bool {
        false
    }

    fn replay(&self, from: Position, _visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.0.replay(from)
    }

    fn coverage(&self, _mapping: MappingKind, change: Change) -> Cover {
        match change {
            Change::Fork => Cover::Detected,
            _ => Cover::NotCached,
        }
    }

    fn forked(&self) -> bool {
        self.0.forked()
    }

    fn notified(&self) -> u32 {
        self.0.event_count.count()
    }

    fn notify(&self) {
        self.0.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.0.event_count.wait(seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_covered_and_nothing_ever_changes() {
        let monitor = NoMonitor::new().unwrap();
        let range = AddressRange::new(0x1000, 0x1000).unwrap();
        assert_eq!(monitor.watch(range), Watch::Uncovered(Uncovered::NoMonitor));
        let sequence = monitor.check().unwrap();
        let start = monitor.replay(Position::NOWHERE, &mut |_| panic!("nothing was logged"));
        assert_eq!((start.sequence, start.complete), (sequence, false));
        let replay = monitor.replay(start.up_to, &mut |_| panic!("nothing was logged"));
        assert_eq!(replay, Replay { complete: true, ..start });
        assert!(!monitor.forked());
    }
}
