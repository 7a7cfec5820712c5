//! How suspensions end that their programs did not end: what is overdue, and what a device's panic left.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to let connections go on that no suspension holds any longer.

#![allow(unsafe_code)]

use super::device::{ConnectionLost, Suspend};
use super::parked::lose;
use crate::AddressRange;
use crate::board::{Notice, Revocation, SuspensionId};
use crate::foreign::{ForeignList, discard, runs_through};
use crate::index::Rest;
use crate::monitor::{Forked, Monitor};
use crate::reclaim::Reclaim;
use crate::region::Region;
use crate::shared::{SLICE, Shared, Writer, operations};
use crate::suspended_ranges::{End, Overdue};
use std::time::Duration;

/// Fails every connection; one that makes the device panic does not save the others. Says how many
/// did. In a forked child they are the parent's: asked before each, because the device may fork.
pub(super) fn fail_all<R: Suspend, M: Monitor>(
    shared: &Shared<R, M>,
    connections: &mut ForeignList<R::Connection>,
) -> u64 {
    let mut panics = 0;
    while !shared.is_forked()
        && let Some(connection) = connections.pop()
    {
        let ran = runs_through(|| shared.registrar.fail(&connection));
        // Its destructor, too, is the device's.
        let ended = runs_through(move || drop(connection));
        panics += u64::from(!(ran && ended));
    }
    panics
}

operations! {
    /// What suspensions do with the regions of a range, and what ends those that are overdue.
    Suspensions
}

impl<'c, R: Suspend, M: Monitor> Suspensions<'c, R, M> {
    /// Ends what is overdue on the device's clock. Says how many suspensions that were.
    pub(crate) fn expire_suspensions(self) -> usize {
        // In a forked child the device, whose clock it is, is the parent's.
        if self.0.is_forked() {
            return 0;
        }
        let now = self.0.registrar.now();
        let count = self.expire(|deadline| deadline < now);
        if count > 0 {
            Reclaim(self.0).reclaim();
        }
        count
    }

    /// Ends those whose deadlines are over. Says how many those were.
    pub(super) fn expire(self, is_over: impl Fn(Duration) -> bool) -> usize {
        let mut count = 0;
        while let Ok(Some(overdue)) =
            self.0.locked(|writer| writer.suspended.take_overdue(&is_over))
        {
            // In a child that the device forked all of it is the parent's.
            let Ok(()) = self.end_overdue(overdue) else { return count };
            count += 1;
        }
        count
    }

    fn end_overdue(self, Overdue { id, range, on_expiry }: Overdue) -> Result<(), Forked> {
        let connections = on_expiry.connections.and_then(|all| all.downcast().ok());
        let mut connections: ForeignList<R::Connection> =
            connections.map_or_else(ForeignList::default, |all| *all);
        let device_panics = match on_expiry.end {
            End::GoOn => self.let_all_go_on(id, &mut connections),
            End::Fail { .. } => fail_all(self.0, &mut connections),
        };
        let suspension = SuspensionId(id);
        let parked = match on_expiry.end {
            End::GoOn => None,
            End::Fail { parked } => Some(parked),
        };
        parked.iter().try_for_each(|numbers| lose(self.0, suspension, range, numbers))?;
        self.end(id, range, |writer, shared| {
            writer.suspended.counts.expired += 1;
            writer.suspended.counts.device_panics += device_panics;
            if parked.is_some() {
                let by = Revocation::Expired;
                shared.tell(writer, Notice::Revoked { suspension, range, by });
            }
        })
    }

    /// Takes a suspended range down.
    pub(super) fn end(
        self,
        id: u64,
        range: AddressRange,
        say: impl FnOnce(&mut Writer, &Shared<R, M>),
    ) -> Result<(), Forked> {
        let taken_down = self.0.locked(|writer| {
            let taken_down = writer.suspended.take_down(id);
            say(writer, self.0);
            taken_down
        })?;
        self.open_regions(range);
        // Forked as the reclaimer was told: those who wait are the parent's.
        if self.0.is_forked() {
            taken_down.leave_shut();
            return Err(Forked);
        }
        drop(taken_down);
        Ok(())
    }

    /// Lets every connection of a suspension that ends go on that no other holds. One that makes the
    /// device panic is failed, and does not save the others. Says how many did.
    fn let_all_go_on(self, id: u64, connections: &mut ForeignList<R::Connection>) -> u64 {
        let mut panics = 0;
        while let Some(connection) = connections.pop() {
            // What died meanwhile its program hears of from its device.
            if runs_through(|| _ = self.let_go_on(id, &connection)) {
                discard(connection);
            } else {
                panics += 1 + fail_all(self.0, &mut ForeignList::new(vec![connection]));
            }
        }
        panics
    }

    /// Lets `connection` go on if suspension `id` is the last to hold it, and says how it does. Nothing
    /// in a forked child, where it is the parent's.
    pub(super) fn let_go_on(
        self,
        id: u64,
        connection: &R::Connection,
    ) -> Option<Result<(), ConnectionLost>> {
        let released = self.0.locked(|writer| writer.suspended.release(id, connection));
        // Their comparison may have forked.
        if !matches!(released, Ok(Ok(()))) || self.0.is_forked() {
            return None;
        }
        // SAFETY: the last suspension to hold it lets it go on.
        Some(unsafe { self.0.registrar.restart(connection) })
    }

    /// Closes the regions of `range`: no thread leases them without the writer's lock.
    pub(super) fn close_regions(self, range: AddressRange) {
        self.each_findable(range, |writer, region| writer.lists.close(region));
    }

    /// Takes that back, except where another suspension wants it: until then gets find them under
    /// the lock.
    fn open_regions(self, range: AddressRange) {
        self.each_findable(range, Writer::open);
    }

    /// Slice by slice, so that no thread waits for all of them.
    fn each_findable(self, range: AddressRange, f: impl Fn(&mut Writer, &Region<R::Handle>)) {
        let mut rest = Some(Rest::from(range));
        while let Some(range) = rest {
            let left = self.0.locked(|writer| {
                let mut numbers = Vec::new();
                let rest = self.0.findable_part(range, SLICE, &mut numbers, |_| true).rest;
                for region in numbers.into_iter().filter_map(|number| self.0.region(number)) {
                    f(writer, region);
                }
                rest
            });
            rest = left.unwrap_or_default();
        }
    }

    pub(super) fn withdraw_from_index(self, writer: &mut Writer, region: &Region<R::Handle>) {
        if let Some((range, _)) = region.findable() {
            self.0.withdraw(writer, range, region.number);
        }
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeMonitor, FakeSuspend, Willing};
    use crate::monitor::{Lost, Position, Replay, Sequence};
    use crate::suspend::Unsupported;
    use crate::suspended_ranges::{Gets, OnExpiry, Stop};
    use crate::{Cache, Config};
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Instant;

    impl FakeSuspend for Willing {
        type Connection = Infallible;

        fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
            Ok(())
        }
    }

    /// Forks as it is notified, and comes back in the child.
    #[derive(Default)]
    struct Forking(AtomicBool);

    impl FakeMonitor for Forking {
        fn check(&self) -> Result<Sequence, Lost> {
            if self.forked() { Err(Lost::Forked) } else { Ok(Sequence(0)) }
        }

        fn replay(&self, from: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
            Replay { up_to: from, sequence: Sequence(0), complete: true, may_repeat: false }
        }

        fn forked(&self) -> bool {
            self.0.load(SeqCst)
        }

        fn notify(&self) {
            self.0.store(true, SeqCst);
        }
    }

    /// A thread that does not exist may hold its lock.
    #[test]
    fn a_child_forked_as_the_reclaimer_is_told_leaves_the_gate_alone() {
        let cache = Cache::new(Fake(Willing), Fake(Forking::default()), Config::default()).unwrap();
        let (shared, range) = (&*cache.shared, AddressRange::new(0x7000_0000, 4096).unwrap());
        let put_up = shared.locked(|writer| {
            let (deadline, patience) = (Duration::ZERO, Duration::from_secs(600));
            let id = writer.suspended.put_up(range, Gets::Hold, deadline, patience);
            // Inside no call of its own.
            writer.suspended.hand_over(id, OnExpiry { connections: None, end: End::GoOn });
            (id, writer.suspended.stop(range))
        });
        let Ok((id, Some(Stop::Wait(gate)))) = put_up else { panic!("nothing stands") };
        let ended = Suspensions(shared).end(id, range, |writer, _| writer.call_reclaimer());
        assert!(matches!(ended, Err(Forked)));
        assert_eq!(gate.wait(Some(Instant::now())), Err(range), "it was opened");
    }
}
