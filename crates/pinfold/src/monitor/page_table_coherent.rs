//! No monitor where none is needed: the device itself follows the process's page table.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement a trait that promises to see changes, and sees
//! none. The promise exists so that no registration is used that no longer matches the program's
//! memory; over a registrar whose registrations never stop matching it, it holds with nothing to
//! see. [`on_demand_cache`](crate::on_demand_cache) makes one, over such a registrar; any other
//! caller vouches for that.

#![allow(unsafe_code)]

use super::inert::InertMonitor;
use super::start::StartError;
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Watch,
};

/// Sees one thing only: that this process is a forked child. A check costs a load.
#[derive(Debug)]
pub struct PageTableCoherent(InertMonitor);

impl PageTableCoherent {
    /// Takes one page.
    ///
    /// # Errors
    ///
    /// [`StartError::NoMemory`], or a kernel older than 4.14.
    ///
    /// # Safety
    ///
    /// A cache that relies on this monitor has registrations that follow the process's page table.
    pub unsafe fn new() -> Result<Self, StartError> {
        InertMonitor::new().map(Self)
    }
}

// SAFETY: see the file's header.
unsafe impl Monitor for PageTableCoherent {
    fn name(&self) -> &'static str {
        "unneeded"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        self.0.check()
    }

    fn watch(&self, _range: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _range: AddressRange) -> bool {
        false
    }

    fn replay(&self, from: Position, _visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.0.replay(from)
    }

    /// Every change is seen: by the device, which is where it matters.
    fn coverage(&self, _mapping: MappingKind, change: Change) -> Cover {
        match change {
            Change::Protect => Cover::Harmless,
            _ => Cover::Detected,
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
    fn everything_is_covered_and_nothing_ever_changes() {
        // SAFETY: nothing is registered on its word.
        let monitor = unsafe { PageTableCoherent::new() }.unwrap();
        assert_eq!(monitor.watch(AddressRange::EVERYTHING), Watch::Covered);
        let sequence = monitor.check().unwrap();
        let start = monitor.replay(Position::NOWHERE, &mut |_| panic!("nothing was logged"));
        assert_eq!((start.sequence, start.complete), (sequence, false));
        let replay = monitor.replay(start.up_to, &mut |_| panic!("nothing was logged"));
        assert_eq!(replay, Replay { complete: true, ..start });
        assert!(!monitor.forked());
    }
}
