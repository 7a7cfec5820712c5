//! What a change of mappings does to the cache.

use crate::AddressRange;
use crate::clock::since;
use crate::error::GetError;
use crate::monitor::{Lost, Monitor, Sequence};
use crate::region::{List, Lists, Region};
use crate::registrar::Registrar;
use crate::shared::{Shared, Writer};
use crate::watchers::{Callback, Completion};

/// What the monitor answered, and how long it took, if that was measured.
#[derive(Clone, Copy)]
pub(crate) struct Checkup {
    seen: Result<Sequence, Lost>,
    took: Option<u64>,
}

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Applies what the monitor logged and the cache has not applied.
    ///
    /// Every entry is applied exactly once, under the writer's lock, and then finds each region
    /// it concerns in one of two places: in the index, or in the list of flights. A flight is
    /// enlisted before its registration begins and leaves the list in the same critical section
    /// in which its region enters the index. So no registration slips between.
    pub(crate) fn catch_up(&self, writer: &mut Writer) -> Result<(), GetError> {
        self.catch_up_with(writer, Checkup { seen: self.monitor.check(), took: None })
    }

    /// Asks the monitor, and measures what that takes. No lock is held: the clock is the program's.
    pub(crate) fn ask(&self, is_timed: bool) -> Checkup {
        let began = self.now_if(is_timed);
        let seen = self.monitor.check();
        Checkup { seen, took: since(began, self.now_if(is_timed)) }
    }

    /// The same as [`catch_up`](Self::catch_up), with what the monitor answered before the lock was taken.
    /// What was applied since is applied no second time: the log is read from where it was left.
    pub(crate) fn catch_up_with(
        &self,
        writer: &mut Writer,
        checkup: Checkup,
    ) -> Result<(), GetError> {
        match checkup.seen {
            Ok(seen) if seen == self.applied(writer) => {
                checkup.took.into_iter().for_each(|took| writer.costs.checked(took));
                Ok(())
            }
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
        let replay = self.monitor.replay(writer.position, &mut |range| {
            writer.counts.events += 1;
            self.invalidate(writer, range);
        });
        if !replay.complete {
            writer.counts.overflows += 1;
            self.invalidate(writer, AddressRange::EVERYTHING);
        }
        self.set_applied(writer, replay);
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
        let mut numbers = std::mem::take(&mut writer.scratch);
        self.findable_in(range, &mut numbers);
        for &number in &numbers {
            self.note_kept_no_more(writer, number);
            self.unpublish(writer, number, Lists::invalidate);
            writer.watchers.invalidated(number);
        }
        writer.counts.invalidations += numbers.len() as u64;
        writer.give_scratch(numbers);
        for list in [List::Superseded, List::SupersededLeased, List::PerUse] {
            if writer.lists.len(list) > 0 {
                self.invalidate_unfindable(writer, range, list);
            }
        }
        writer.flights.iter_mut().for_each(|flight| flight.taint_if_hit(range));
    }

    /// Tells the leases of regions of `list`, which are not in the index but may be in use.
    fn invalidate_unfindable(&self, writer: &mut Writer, range: AddressRange, list: List) {
        let mut next = writer.lists.first(list);
        while let Some(number) = next {
            next = writer.lists.after(number);
            let Some(region) = self.region(number).filter(|region| touches(region, range)) else {
                continue;
            };
            // A registration for one use may have been wrong before.
            if !region.state().is_invalidated() {
                writer.lists.invalidate(region);
                writer.watchers.invalidated(number);
            }
        }
    }

    /// Adds to `numbers` the regions in the index that share a byte with `range`, each once. The
    /// writer's lock is held.
    pub(crate) fn findable_in(&self, range: AddressRange, numbers: &mut Vec<u32>) {
        self.index.overlapping(range, |region| {
            if touches(region, range) {
                numbers.push(region.number);
            }
        });
        if numbers.len() > 1 {
            numbers.sort_unstable();
            numbers.dedup();
        }
    }

    /// Takes a region out of the index and hands it to the reclaimer, in the state that `to` gives it.
    pub(crate) fn unpublish(
        &self,
        writer: &mut Writer,
        number: u32,
        to: fn(&mut Lists, &Region<R::Handle>),
    ) {
        let Some(region) = self.region(number) else { return };
        to(&mut writer.lists, region);
        if let Some(range) = region.range() {
            self.index.remove(&mut writer.recycler, range, number);
        }
        writer.call_reclaimer();
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
    }

    /// The regions in `range` that are registered, findable or not, or are being registered.
    pub(crate) fn unfinished_in(&self, writer: &Writer, range: AddressRange) -> Vec<u32> {
        let mut numbers = Vec::new();
        self.findable_in(range, &mut numbers);
        let others = OUT_OF_INDEX.iter().flat_map(|&list| writer.lists.iter(list));
        let in_range = |&number: &u32| self.region(number).is_some_and(|it| touches(it, range));
        numbers.extend(others.filter(in_range));
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
    ) -> Result<u64, Callback> {
        self.locked(|writer| {
            if region.state().is_invalidated() {
                return Err(callback);
            }
            Ok(writer.watchers.watch(region.number, callback))
        })
    }
}

/// Where regions stand that are registered but not in the index.
const OUT_OF_INDEX: [List; 7] = [
    List::Invalidated,
    List::InvalidatedLeased,
    List::Superseded,
    List::SupersededLeased,
    List::PerUse,
    List::Deregistering,
    List::Parked,
];

fn touches<H: Copy>(region: &Region<H>, range: AddressRange) -> bool {
    region.range().is_some_and(|bytes| bytes.overlaps(&range))
}
