//! Reports for others: what a monitor sees, for caches that are not Pinfold's.
//!
//! libfabric's `import` monitor, UCX's external events or a table of one's own want to be told which
//! ranges changed. A [`Follower`] keeps a place in a monitor's log and tells what is new since:
//!
//! ```
//! use pinfold::monitor::{Follower, ChangeReport, best};
//! use pinfold::{AddressRange, Monitor, Watch};
//! use std::collections::HashMap;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut follower = Follower::new(best()?)?;
//! let mut table: HashMap<AddressRange, u32> = HashMap::new();
//!
//! // Before a registration: watch first...
//! # let memory = vec![0_u8; 65536];
//! let range = AddressRange::new(memory.as_ptr() as usize, memory.len())?;
//! # let gone = vec![0_u8; 1 << 24];
//! # let gone_range = AddressRange::new(gone.as_ptr() as usize, gone.len())?;
//! # let was_watched = follower.watch(gone_range) == Watch::Covered;
//! # table.insert(gone_range, 6);
//! # drop(gone);
//! let watched = follower.watch(range) == Watch::Covered && !follower.change_pending(range);
//! // ... register, and keep it only if nothing changed meanwhile. Each change is reported once: apply it to the whole
//! // table as well.
//! let key = 7;
//! let mut changed = false;
//! follower.news(|news| {
//!     changed |= news.touches(range);
//!     table.retain(|range, _| !news.touches(*range));
//! })?;
//! if watched && !changed {
//!     table.insert(range, key);
//! }
//! # assert!(!was_watched || !table.contains_key(&gone_range));
//!
//! // Before every look into the table:
//! follower.news(|news| table.retain(|range, _| !news.touches(*range)))?;
//! # Ok(())
//! # }
//! ```
//!
//! A thread that deregisters what is gone sleeps in [`wait`](Follower::wait).

use crate::{AddressRange, Lost, Monitor, Position, Sequence, Watch};
use pinfold_core::foreign::ForeignPart;

/// Follows a monitor from one call to the next.
#[derive(Debug)]
pub struct Follower<M> {
    monitor: M,
    position: Position,
    /// The word at that place.
    sequence: Sequence,
    /// How often it was notified before the last look.
    notified: u32,
}

/// What has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChangeReport {
    /// Pages of this range may be gone or others.
    Changed(AddressRange),
    /// The log has lost entries: anything may have changed.
    Everything,
}

impl ChangeReport {
    /// Whether `range` is concerned.
    pub fn touches(self, range: AddressRange) -> bool {
        match self {
            Self::Changed(changed) => changed.overlaps(&range),
            Self::Everything => true,
        }
    }
}

impl<M: Monitor> Follower<M> {
    /// From now on.
    ///
    /// # Errors
    ///
    /// [`Lost`] if the monitor sees nothing any more.
    pub fn new(monitor: M) -> Result<Self, Lost> {
        // Its destructor may panic because a question has.
        let monitor = ForeignPart::new(monitor);
        let notified = monitor.notified();
        monitor.check()?;
        let start = monitor.replay(Position::NOWHERE, &mut |_| {});
        let (position, sequence) = (start.up_to, start.sequence);
        Ok(Self { monitor: monitor.into_inner(), position, sequence, notified })
    }

    /// Tells everything that took effect before this call and was not told before. Costs the
    /// monitor's check if there is nothing.
    ///
    /// `tell` applies each report to all that the caller keeps: the next call does not repeat it, whatever this one was made
    /// for. A change is told at its beginning, and may be told more than once. What is registered while one
    /// is under way may have the old pages: see [`change_pending`](Self::change_pending).
    ///
    /// # Errors
    ///
    /// [`Lost`] if the monitor sees nothing any more: then anything may change untold.
    pub fn news(&mut self, mut tell: impl FnMut(ChangeReport)) -> Result<(), Lost> {
        // Before the look: a ring behind it is not slept through.
        self.notified = self.monitor.notified();
        if self.monitor.check()? == self.sequence {
            return Ok(());
        }
        let replay =
            self.monitor.replay(self.position, &mut |range| tell(ChangeReport::Changed(range)));
        if !replay.complete {
            tell(ChangeReport::Everything);
        }
        (self.position, self.sequence) = (replay.up_to, replay.sequence);
        Ok(())
    }

    /// Waits until there may be news since the last call of [`news`](Self::news), or a thread calls
    /// [`Monitor::notify`].
    pub fn wait(&self) {
        self.monitor.wait(self.notified);
    }

    /// Has every change of `range` told from now on.
    pub fn watch(&self, range: AddressRange) -> Watch {
        self.monitor.watch(range)
    }

    /// Whether a change that was told may not be done: what is registered now may be gone at
    /// once, untold.
    pub fn change_pending(&self, range: AddressRange) -> bool {
        self.monitor.change_pending(range)
    }

    /// The monitor.
    pub const fn monitor(&self) -> &M {
        &self.monitor
    }
}
