//! What a monitor without events has: the mark of a fork, an event count, and a log with one place.

use super::event_count::EventCount;
use super::start::StartError;
use crate::fork_mark::ForkMark;
use crate::{Lost, Position, Replay, Sequence};

/// The only word there is, and the only place in the log.
const START: Sequence = Sequence(2);
const PLACE: Position = Position(0, 0);

/// Sees one thing only: that this process is a forked child.
#[derive(Debug)]
pub(super) struct InertMonitor {
    mark: ForkMark,
    pub(super) event_count: EventCount,
}

impl InertMonitor {
    /// Takes one page.
    pub(super) fn new() -> Result<Self, StartError> {
        let mark = ForkMark::new(1).map_err(StartError::memory)?;
        Ok(Self { mark, event_count: EventCount::default() })
    }

    /// Costs a load.
    pub(super) fn check(&self) -> Result<Sequence, Lost> {
        if self.forked() { Err(Lost::Forked) } else { Ok(START) }
    }

    /// Nothing was ever logged.
    pub(super) fn replay(&self, from: Position) -> Replay {
        Replay { up_to: PLACE, sequence: START, complete: from == PLACE && !self.forked() }
    }

    pub(super) fn forked(&self) -> bool {
        self.mark.forked()
    }
}
