//! What a change of mappings does to the cache.

use crate::AddressRange;
use crate::error::GetError;
use crate::monitor::{Lost, Monitor};
use crate::region::{Region, Status};
use crate::registrar::Registrar;
use crate::shared::{Shared, Writer};
use crate::watchers::{Callback, Completion};

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Applies what the monitor logged and the cache has not applied.
    ///
    /// Every entry is applied exactly once, under the writer's lock, and then finds each region
    /// it concerns in one of two places: in the index, or in the list of flights. A flight is
    /// enlisted before its registration begins and leaves the list in the same critical section
    /// in which its region enters the index. So no registration slips between.
    pub(crate) fn catch_up(&self, writer: &mut Writer) -> Result<(), GetError> {
        match self.monitor.check() {
            Ok(seen) if seen == writer.applied => Ok(()),
            Ok(_) => {
                self.replay(writer);
                Ok(())
            }
            Err(Lost::Forked) => Err(GetError::Forked),
            Err(Lost::Descriptor { .. }) => {
                self.lose_monitor(writer);
                Ok(())
            }
        }
    }

    fn replay(&self, writer: &mut Writer) {
        let from = writer.applied;
        let replay = self.monitor.replay(from, &mut |range| {
            writer.counts.events += 1;
            self.invalidate(writer, range);
        });
        if !replay.complete {
            writer.counts.overflows += 1;
            self.invalidate(writer, AddressRange::EVERYTHING);
        }
        self.set_applied(writer, replay.up_to);
    }

    /// Once: nothing that is registered can be believed any more.
    fn lose_monitor(&self, writer: &mut Writer) {
        if !writer.lost {
            writer.lost = true;
            self.invalidate(writer, AddressRange::EVERYTHING);
        }
    }

    /// Makes every region that shares a byte with `range` unfindable.
    pub(crate) fn invalidate(&self, writer: &mut Writer, range: AddressRange) {
        for number in self.live_in(range) {
            self.unpublish(writer, number, Status::Invalidated);
            writer.counts.invalidations += 1;
            writer.watchers.invalidated(number);
        }
        self.invalidate_unfindable(writer, range);
        writer.flights.iter().for_each(|flight| flight.taint_if_hit(range));
    }

    /// Tells the leases of regions that are not in the index: given up but in use, or per use.
    fn invalidate_unfindable(&self, writer: &mut Writer, range: AddressRange) {
        let per_use = writer.per_use.iter().map(|(number, _)| number);
        for &number in writer.dead.iter().chain(per_use) {
            let Some(region) = self.region(number) else { continue };
            let status = match region.status() {
                Status::Retired => Status::Invalidated,
                Status::PerUse => Status::PerUseInvalidated,
                _ => continue,
            };
            if region.range().is_some_and(|bytes| bytes.overlaps(&range)) {
                region.set(status);
                writer.watchers.invalidated(number);
            }
        }
    }

    /// The live regions that share a byte with `range`, each once. The writer's lock is held.
    pub(crate) fn live_in(&self, range: AddressRange) -> Vec<u32> {
        let mut numbers = Vec::new();
        self.index.overlapping(range, |region| {
            if region.range().is_some_and(|bytes| bytes.overlaps(&range)) {
                numbers.push(region.number);
            }
        });
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Takes a live region out of the index and hands it to the reclaimer.
    pub(crate) fn unpublish(&self, writer: &mut Writer, number: u32, status: Status) {
        let Some(region) = self.region(number) else { return };
        region.set(status);
        if let Some(range) = region.range() {
            self.index.remove(&mut writer.recycler, range, number);
        }
        writer.dead.push(number);
    }

    /// The program's own word that `range` changed or is about to; `completion` runs when the
    /// last registration of it is gone.
    pub(crate) fn invalidate_now(&self, range: AddressRange, completion: Option<Callback>) {
        if self.monitor.forked() {
            return;
        }
        let completion = completion.map(Completion::new);
        self.locked(|writer| {
            if let Some(completion) = &completion {
                let waiting = self.unfinished_in(writer, range);
                for number in waiting {
                    writer.watchers.await_deregistration(number, completion);
                }
            }
            self.invalidate(writer, range);
            // The last holder runs it; without any region that is this call.
            if let Some(completion) = completion {
                writer.watchers.complete(completion);
            }
        });
        self.monitor.ring();
    }

    /// The regions in `range` that are registered, findable or not, or are being registered.
    fn unfinished_in(&self, writer: &Writer, range: AddressRange) -> Vec<u32> {
        let mut numbers = self.live_in(range);
        let per_use = writer.per_use.iter().map(|(number, _)| number);
        let others = writer.dead.iter().chain(&writer.leaving).chain(per_use);
        numbers.extend(others.filter(|&&number| {
            let bytes = self.region(number).and_then(Region::range);
            bytes.is_some_and(|bytes| bytes.overlaps(&range))
        }));
        let flying = writer.flights.iter().filter(|flight| flight.range.overlaps(&range));
        numbers.extend(flying.map(|flight| flight.number));
        numbers
    }

    /// Applies news on behalf of a lease that wants to know. In a forked child nothing changes:
    /// its lease is the parent's.
    pub(crate) fn catch_up_for_lease(&self) {
        if self.monitor.forked() {
            return;
        }
        // Forked since: a lease has no way to tell.
        let _forked = self.locked(|writer| self.catch_up(writer));
    }

    /// Keeps `callback` for the invalidation of `region`; gives it back if that happened.
    pub(crate) fn watch_region(
        &self,
        region: &Region<R::Handle>,
        callback: Callback,
    ) -> Result<u32, Callback> {
        self.locked(|writer| match region.status() {
            Status::Invalidated | Status::PerUseInvalidated => Err(callback),
            _ => Ok(writer.watchers.watch(region.number, callback)),
        })
    }
}
