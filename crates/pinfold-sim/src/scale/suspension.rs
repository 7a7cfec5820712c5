//! Suspensions in the middle of a stream: how long connections stand still.

use super::device::{TimedDevice, pages, to_nanos};
use super::stream::{Stage, Stream, TimedLease};
use super::{ScalePolicy, Scenario};
use crate::fabric::Nanos;
use crate::monitor::SimMonitor;
use crate::space::Protection;
use pinfold_core::listed;
use pinfold_core::{AddressRange, Gets, Suspend, SuspendProgress, Suspended, SuspensionTerms};
use std::time::Duration;

listed! {
    /// Which connections are stopped.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum SuspensionStopped {
        /// All that the node has: what a layer must do that does not know who can touch a region.
        All => "all connections",
        /// The one whose peer uses the region.
        Touching => "those that touch it",
    }
}

/// How suspensions went.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Suspensions {
    /// How many came about and were resumed.
    pub resumed: u64,
    /// How many did not.
    pub refused: u64,
    /// How many connections each of them stopped.
    pub connections: u64,
    /// How long a connection stood still: the longest.
    pub longest_pause: Nanos,
    /// The same on average.
    pub mean_pause: Nanos,
    /// What all connections together lost to one suspension.
    pub connection_time: Nanos,
    /// What the same region's registration costs, for comparison.
    pub register: Nanos,
}

/// Messages between two suspensions.
const BETWEEN: usize = 2_000;

pub(super) fn run(scenario: &Scenario, stopped: SuspensionStopped, times: usize) -> Suspensions {
    let Some(stage) = Stage::new(scenario, ScalePolicy::CachedInBudget) else {
        return Suspensions::default();
    };
    let mut stream = Stream::new(scenario, ScalePolicy::CachedInBudget, &stage);
    let mut found = Suspensions::default();
    for _ in 0..times {
        stream.go_on(BETWEEN);
        let peer = stream.random.below(scenario.peers);
        let connections = match stopped {
            SuspensionStopped::All => (0..scenario.peers).collect(),
            SuspensionStopped::Touching => vec![peer],
        };
        found.connections = connections.len() as u64;
        let range = stream.buffer_range(peer * scenario.buffers);
        match suspend(&mut stream, &stage, range, connections) {
            Some(()) => found.resumed += 1,
            None => found.refused += 1,
        }
    }
    judge(&mut found, scenario, &stage.device);
    found
}

fn judge(found: &mut Suspensions, scenario: &Scenario, device: &TimedDevice) {
    let costs = scenario.costs;
    let pauses = device.with(|machine| std::mem::take(&mut machine.pauses));
    let sum: u64 = pauses.iter().sum();
    found.longest_pause = to_nanos(pauses.iter().copied().max().unwrap_or(0));
    found.mean_pause = to_nanos(sum.checked_div(pauses.len() as u64).unwrap_or(0));
    found.connection_time = to_nanos(sum.checked_div(found.resumed).unwrap_or(0));
    found.register = to_nanos(costs.register + scenario.pages as u64 * costs.register_page);
}

/// Suspends `range`, moves its memory, and resumes; nothing if that was refused.
fn suspend<'c>(
    stream: &mut Stream<'c, '_>,
    stage: &'c Stage,
    range: AddressRange,
    connections: Vec<usize>,
) -> Option<()> {
    let kept = stream.lease(range)?;
    let held = wait_for(stream, stage, range, connections, kept)?;
    stage.device.with(|machine| {
        machine.work(pages(range) * machine.costs.copy_page);
        machine.space.map(range, Protection::ReadWrite);
    });
    held.resume().ok().map(drop)
}

/// The program takes its completions while it waits: with them leases end.
fn wait_for<'c>(
    stream: &mut Stream<'c, '_>,
    stage: &'c Stage,
    range: AddressRange,
    connections: Vec<usize>,
    kept: TimedLease<'c>,
) -> Option<Suspended<'c, TimedDevice, SimMonitor>> {
    let deadline = Duration::from_secs(3600);
    let terms = SuspensionTerms { deadline, gets: Gets::Refuse, ..SuspensionTerms::default() };
    let mut pending = stage.cache.begin_suspension(range, connections, vec![kept], terms).ok()?;
    loop {
        pending = match pending.poll().ok()? {
            SuspendProgress::Suspended(held) => return Some(held),
            SuspendProgress::Pending(pending, _) => pending,
        };
        if !stream.finish_due() {
            stage.device.wait(deadline);
        }
    }
}
