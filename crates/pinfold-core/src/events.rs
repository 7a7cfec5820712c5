//! What a change of mappings does to the cache.

use crate::AddressRange;
use crate::callbacks::Callback;
use crate::clock::since;
use crate::error::GetError;
use crate::foreign::discard;
use crate::index::{BlockWalk, Part, Rest};
use crate::monitor::{Forked, Lost, Monitor, Sequence};
use crate::range_index::Cursor;
use crate::region::{List, Lists, Outside, Region};
use crate::registrar::Registrar;
use crate::shared::{SLICE, Shared, Writer};
use crate::unapplied::{ChangeCount, PartOutside, Unapplied};
use crate::watchers::Completion;
use std::sync::Arc;

/// What the monitor answered, and how long it took, if that was measured.
#[derive(Clone, Copy)]
pub(crate) struct Checkup {
    seen: Result<Sequence, Lost>,
    took: Option<u64>,
}

impl Checkup {
    pub(crate) const fn of(seen: Result<Sequence, Lost>) -> Self {
        Self { seen, took: None }
    }

    pub(crate) const fn took(self) -> Option<u64> {
        self.took
    }

    /// Whether the monitor reports every change still.
    pub(crate) const fn sees_all(&self) -> bool {
        self.seen.is_ok()
    }
}

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Reads what the monitor logged and the cache has not read, and applies a slice of it.
    ///
    /// Every entry is applied exactly once, under the writer's lock, and then finds each region
    /// it concerns in one of two places: in the index, or in the list of flights. A flight is
    /// enlisted before its registration begins and leaves the list in the same critical section
    /// in which its region enters the index. So no registration slips between.
    ///
    /// What is left for later covers the regions and flights that it concerns
    /// ([`UnappliedChanges::cover`](crate::unapplied::UnappliedChanges::cover)): gets that find one
    /// under the lock do not believe it, hits that go without the lock find none before all of it is
    /// applied, and a flight that it concerns is not cached when it lands.
    ///
    /// A log is read in parts, so that the lock is not held for as long as a full one takes; a thread that goes on to
    /// believe a region, or to list a flight, comes back until it [is read](Writer::is_cut). In between no check answers what is
    /// published, so there are no hits.
    ///
    /// The monitor answered before the lock was taken: it may wait for its own thread. What was read since is
    /// read no second time, because the log is read from where it was left.
    pub(crate) fn catch_up(&self, writer: &mut Writer, checkup: Checkup) -> Result<(), GetError> {
        match checkup.seen {
            Ok(seen) if seen == writer.replayed => {
                checkup.took.into_iter().for_each(|took| writer.costs.checked(took));
            }
            Ok(_) if self.replay(writer) => {}
            Ok(_) => note_overflow(writer),
            Err(Lost::Forked) => return Err(GetError::Forked),
            Err(Lost::Descriptor { .. }) => self.lose_monitor(writer),
        }
        self.apply_slice(writer);
        Ok(())
    }

    /// The same with what stands in the log already. Whether that is more than when it was last read.
    ///
    /// For those that believe no region, and need not know what is on its way into the log: to ask the monitor
    /// for that takes the longer the more changes.
    pub(crate) fn read_log(&self, writer: &mut Writer) -> bool {
        let before = (writer.position, writer.replayed);
        // Of a monitor that sees nothing any more, everything changed once.
        let is_complete = writer.lost || self.replay(writer);
        let is_news = (writer.position, writer.replayed) != before;
        // Where it stands as before, nothing that is missing was published: what is asked next says why.
        if is_news && !is_complete {
            note_overflow(writer);
        }
        self.apply_slice(writer);
        is_news
    }

    /// The same for those that [follow](crate::followed) ranges, also of a monitor that is lost: what it reported before
    /// stands in its log. Runs `f` behind all of it, or, where changes follow one another so fast that what they touch is never
    /// all marked, behind a [lapse](crate::followed_ranges::FollowedRanges::lapsed).
    pub(crate) fn behind_log<T>(&self, f: impl Fn(&mut Writer) -> T) -> Result<T, Forked> {
        let mut rounds = 0;
        let mut read = |writer: &mut Writer| {
            if writer.lost {
                self.replay(writer);
            }
            self.read_log(writer);
            rounds += 1;
            let is_read = writer.replayed != Sequence::CUT;
            if is_read && !writer.followed.is_marked() && rounds > writer.followed.enough() {
                writer.followed.lapsed();
            }
            (is_read && writer.followed.is_marked()).then(|| f(writer))
        };
        loop {
            if let Some(result) = self.locked(&mut read)? {
                return Ok(result);
            }
        }
    }

    /// Asks the monitor, and measures what that takes. No lock is held: the monitor may wait, and the clock is
    /// the program's.
    pub(crate) fn ask(&self, is_timed: bool) -> Checkup {
        let began = self.now_if(is_timed);
        let seen = self.monitor.check();
        Checkup { seen, took: since(began, self.now_if(is_timed)) }
    }

    /// Waits until what changed before this call stands in the log. Of a monitor that is lost, everything
    /// changed.
    pub(crate) fn await_log(&self) {
        if matches!(self.ask(false).seen, Err(Lost::Descriptor { .. })) {
            // In a forked child nothing is to be read.
            let _forked = self.locked(|writer| self.lose_monitor(writer));
        }
    }

    /// Applies all that was new when the monitor answered, slice by slice.
    pub(crate) fn catch_up_with_all(&self, checkup: Checkup) -> Result<(), GetError> {
        let mut target = None;
        loop {
            let done: Result<bool, GetError> = self.locked(|writer| {
                self.catch_up(writer, checkup)?;
                Ok(writer.are_applied(&mut target))
            })?;
            if done? {
                return Ok(());
            }
        }
    }

    /// Applies all that stands in the log, slice by slice. Whether there was something.
    pub(crate) fn apply_log(&self) -> Result<bool, Forked> {
        let (mut target, mut is_news) = (None, false);
        let mut go_on = |writer: &mut Writer| {
            is_news |= self.read_log(writer);
            writer.are_applied(&mut target)
        };
        while !self.locked(&mut go_on)? {}
        Ok(is_news)
    }

    /// Reads a part of the log. Whether all that came since it was last read stands in it still.
    fn replay(&self, writer: &mut Writer) -> bool {
        writer.followed.go_on();
        let most = if writer.followed.has_unchanged() { READ_FOLLOWED } else { READ_AT_ONCE };
        let replay = self.monitor.replay_some(writer.position, most, &mut |range| {
            writer.counts.events += 1;
            writer.followed.changed(range);
            writer.unapplied.push(range);
        });
        if !replay.complete {
            writer.followed.lapsed();
        }
        writer.followed.was_read(replay.may_repeat);
        (writer.position, writer.replayed) = (replay.up_to, replay.sequence);
        replay.complete
    }

    /// Once: nothing that is registered can be believed any more.
    fn lose_monitor(&self, writer: &mut Writer) {
        if !writer.lost {
            writer.lost = true;
            writer.unapplied.push(AddressRange::EVERYTHING);
        }
    }

    /// Applies what was read, oldest first, until a slice is full; the reclaimer goes on.
    fn apply_slice(&self, writer: &mut Writer) {
        let mut room = SLICE;
        while let Some(change) = writer.unapplied.oldest().filter(|_| room > 0) {
            room = room.saturating_sub(self.apply_some(writer, change, room));
        }
        self.publish_applied(writer);
    }

    /// Applies a slice of one change, whatever came before it. Whether nothing is left of it.
    fn apply_slice_of(&self, writer: &mut Writer, number: ChangeCount) -> bool {
        let Some(change) = writer.unapplied.rest_of(number) else { return true };
        self.apply_some(writer, change, SLICE);
        self.publish_applied(writer);
        writer.unapplied.rest_of(number).is_none()
    }

    /// Applies what `most` allows of a change that is kept. How much of that it took.
    fn apply_some(&self, writer: &mut Writer, change: Unapplied, most: usize) -> usize {
        let begun = writer.unapplied.part_of(change);
        match self.apply_part(writer, change, begun, most) {
            Applied::All(took) => {
                writer.unapplied.set_rest(change, None);
                return took;
            }
            Applied::UpTo(rest) => writer.unapplied.set_rest(change, Some(rest)),
            Applied::Begun(part) => writer.unapplied.set_part(change, part),
        }
        most
    }

    /// Applies a change that is not kept, if it is not too large; else keeps it. Its number, if something is left.
    fn apply_at_once(&self, writer: &mut Writer, range: AddressRange) -> Option<ChangeCount> {
        let change = writer.unapplied.number(range);
        let applied = self.apply_part(writer, change, None, SLICE);
        let is_left = !matches!(applied, Applied::All(_));
        if is_left {
            writer.unapplied.keep(change);
        }
        self.publish_applied(writer);
        is_left.then_some(change.number)
    }

    /// Applies what `most` allows of `change`, which goes on with the part that was `begun`, if one was.
    fn apply_part(
        &self,
        writer: &mut Writer,
        change: Unapplied,
        begun: Option<PartOutside>,
        most: usize,
    ) -> Applied {
        let (part, in_index) = match begun {
            Some(part) => (part, 0),
            None => self.apply_in_index(writer, change, most),
        };
        let room = most.saturating_sub(in_index).max(1);
        match (self.apply_outside(writer, change, part, room), part.rest) {
            ((Some(part), _), _) => Applied::Begun(part),
            (_, Some(rest)) => Applied::UpTo(rest),
            ((None, outside), None) => Applied::All(1 + in_index + outside),
        }
    }

    /// Makes the regions in the index unfindable that a part of `change` concerns, about `most` of them.
    /// The part, and how much that took.
    fn apply_in_index(
        &self,
        writer: &mut Writer,
        change: Unapplied,
        most: usize,
    ) -> (PartOutside, usize) {
        let mut numbers = std::mem::take(&mut writer.scratch);
        let is_older = |born| change.is_later(born);
        let each = if writer.watchers.has_callbacks() { WITH_CALLBACKS } else { 1 };
        let part = self.findable_part(change.rest, most.div_ceil(each), &mut numbers, is_older);
        let Part { rest, blocks, named, weight } = part;
        for &number in &numbers {
            self.note_kept_no_more(writer, number);
            self.unpublish(writer, number, Lists::invalidate);
            writer.watchers.invalidated(number);
        }
        writer.counts.invalidations += numbers.len() as u64;
        // To look at blocks where no region is takes time as well, and at regions that are not to be found.
        let gone = numbers.len() * each.max(weight);
        let took = gone.max(named / NAMED_FOR_ONE) + blocks / BLOCKS_FOR_ONE;
        writer.give_scratch(numbers);
        (PartOutside::before(rest), took)
    }

    /// Tells the leases of regions that are not in the index but may be in use, as many of `part` as `room`
    /// has looks; one that `change` concerns takes as long as several. What is left of the part, and how much
    /// of the room that took.
    fn apply_outside(
        &self,
        writer: &mut Writer,
        change: Unapplied,
        mut part: PartOutside,
        room: usize,
    ) -> (Option<PartOutside>, usize) {
        let Rest { range, .. } = change.rest;
        let end = part.rest.map_or(range.end(), |rest| rest.range.start());
        let Some(range) = AddressRange::between(range.start(), end) else { return (None, 0) };
        let done = change.of(range);
        if !writer.lists.has_any(Outside::Valid) {
            writer.flights.iter_mut().for_each(|flight| flight.taint_if_hit(&done));
            return (None, 0);
        }
        let (mut took, mut concerned) = (0, Vec::new());
        let near = writer.lists.near_from(Outside::Valid, range, part.cursor);
        for (cursor, number) in near {
            part.cursor = cursor;
            let region = self.region(number).filter(|region| concerns(&done, region));
            took += if region.is_some() { OUTSIDE } else { 1 };
            concerned.extend(region);
            if took >= room {
                break;
            }
        }
        for region in concerned {
            writer.lists.invalidate(region);
            writer.watchers.invalidated(region.number);
        }
        if took >= room {
            return (Some(part), took);
        }
        writer.flights.iter_mut().for_each(|flight| flight.taint_if_hit(&done));
        (None, took)
    }

    /// Adds to `numbers` the regions in the index that share a byte with a part of `rest`, from its
    /// start on, that has `most` regions at most, each once, and only those whose registration began after
    /// as many changes as `wanted` says. The writer's lock is held.
    pub(crate) fn findable_part(
        &self,
        rest: Rest,
        most: usize,
        numbers: &mut Vec<u32>,
        wanted: impl Fn(ChangeCount) -> bool,
    ) -> Part {
        let part = self.index.overlapping_part(rest, most, |region| {
            // A long region is named there before it can be found, and after.
            if is_findable_in(region, rest.range) && wanted(region.born()) {
                numbers.push(region.number);
            }
        });
        if numbers.len() > 1 {
            numbers.sort_unstable();
            numbers.dedup();
        }
        part
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
            self.withdraw(writer, range, number);
        }
        writer.call_reclaimer();
    }

    /// Takes a region out of the index that is not to be found any more. A long one stays named there until
    /// it is [erased](Self::erase), because the lock is held.
    pub(crate) fn withdraw(&self, writer: &mut Writer, range: AddressRange, number: u32) {
        if BlockWalk::of_long(range, number).is_none() {
            self.index.remove(&mut writer.recycler, range, number);
        }
    }

    /// Takes a long region out of the index that cannot be found, part by part, before its place may be filled
    /// again. It is named in its first blocks, all of them where it was to be found once.
    pub(crate) fn erase(&self, range: AddressRange, number: u32) -> Result<(), Forked> {
        let Some(mut walk) = BlockWalk::of_long(range, number) else { return Ok(()) };
        self.locked_in_parts(|writer| {
            let was_named = self.index.remove_next(&mut writer.recycler, &mut walk);
            !was_named || walk.is_over()
        })
    }

    /// Enters a long region into the index that cannot be found yet, part by part. False if the index has no
    /// room for it.
    pub(crate) fn enter_ahead(&self, range: AddressRange, number: u32) -> Result<bool, Forked> {
        let Some(mut walk) = BlockWalk::of_long(range, number) else { return Ok(true) };
        let mut has_room = true;
        while has_room && !walk.is_over() {
            if self.is_forked() {
                return Err(Forked);
            }
            self.index.prepare_next(&walk);
            self.locked_in_parts(|writer| {
                has_room = self.index.insert_next(&mut writer.recycler, &mut walk);
                true
            })?;
        }
        Ok(has_room)
    }

    /// The program's own word that `range` changed or is about to; `completion` runs when the
    /// last registration of it is gone.
    pub(crate) fn invalidate_now(&self, range: AddressRange, completion: Option<Callback>) {
        let completion = completion.map(Completion::new);
        let entered = self.locked(|writer| match &completion {
            Some(completion) => {
                let number = writer.unapplied.push(range);
                self.await_flights(writer, (number, range), completion);
                self.publish_applied(writer);
                Some(number)
            }
            None => self.apply_at_once(writer, range),
        });
        // In a forked child it is the parent's.
        let Ok(left) = entered else { return discard(completion) };
        if let (Some(number), Some(completion)) = (left, &completion) {
            self.await_older_than(number, range, completion);
        }
        left.into_iter().for_each(|number| self.apply_all_of(number));
        if let Some(completion) = completion {
            // The last holder runs it; without any region that is this call.
            let _forked = self.locked(|writer| writer.watchers.complete(completion));
        }
    }

    /// Lets `completion` wait for what is being registered in `range`.
    fn await_flights(
        &self,
        writer: &mut Writer,
        (change, range): (ChangeCount, AddressRange),
        completion: &Arc<Completion>,
    ) {
        let Writer { flights, watchers, .. } = writer;
        let flying = flights.iter().filter(|flight| flight.range.overlaps(&range));
        flying.for_each(|flight| watchers.await_deregistration(flight.number, change, completion));
    }

    /// Lets `completion` wait for the regions of `range` that were registered before change `number`,
    /// slice by slice.
    ///
    /// **Why none is missed.** A region moves in the order in which a [`Walk`] goes: from the cache's
    /// index to those outside whose pages are right, to the others, and to those that are being deregistered;
    /// behind a registrar that panicked the walk begins again. A suspension renews some and puts
    /// them back: what begins its registration behind the change does not count, also where it was waited for
    /// before it did ([`renewed`](crate::watchers::Watchers::renewed)), and what began it before
    /// is a flight that was noted with the change.
    fn await_older_than(
        &self,
        number: ChangeCount,
        range: AddressRange,
        completion: &Arc<Completion>,
    ) {
        let mut walk = Walk::of(range);
        // In a forked child it is the parent's.
        let mut go_on = |writer: &mut Writer| {
            let regions = self.walk_on(writer, &mut walk).into_iter();
            let older = regions.filter(|region| region.born() < number);
            older
                .for_each(|it| writer.watchers.await_deregistration(it.number, number, completion));
            walk.is_over()
        };
        while self.locked(&mut go_on) == Ok(false) {}
    }

    /// The caller pays for its own change, and for no other.
    ///
    /// **Why nothing is found meanwhile.** The change is among those that are not applied from the
    /// first critical section on, as one that a monitor reported. So as long as a part of it is left,
    /// hits take the slow path ([`publish_applied`](Self::publish_applied)), and there a region that
    /// it concerns is not believed: not by the callbacks that run between two slices, and not by
    /// the code that they call. When it is gone from the queue, all of its regions are unfindable.
    fn apply_all_of(&self, number: ChangeCount) {
        // In a child that a callback forked the rest is the parent's.
        while self.locked(|writer| self.apply_slice_of(writer, number)) == Ok(false) {}
    }

    /// Goes on with a walk through the regions of a range, findable or not: a slice of them. One that
    /// moves on meanwhile may be met twice.
    pub(crate) fn walk_on(&self, writer: &Writer, walk: &mut Walk) -> Vec<&Region<R::Handle>> {
        let mut numbers = Vec::new();
        let handed_back = writer.lists.handed_back();
        walk.step = match walk.step {
            Step::Begin => {
                walk.handed_back = handed_back;
                Step::Index(walk.range.into())
            }
            Step::Index(here) => {
                let Part { rest, .. } = self.findable_part(here, STEP, &mut numbers, |_| true);
                if here.range != walk.range {
                    // A long one that begins before this part was met with an earlier one.
                    let start = here.range.start();
                    let begins_here =
                        |it: &Region<_>| it.range().is_some_and(|it| it.start() >= start);
                    numbers.retain(|&number| self.region(number).is_some_and(begins_here));
                }
                match rest {
                    Some(rest) => Step::Index(rest),
                    None => Step::Outside(Outside::Valid, Cursor::default()),
                }
            }
            Step::Outside(outside, cursor) => {
                let mut near = writer.lists.near_from(outside, walk.range, cursor).take(STEP);
                let behind = near.by_ref().inspect(|(_, number)| numbers.push(*number)).last();
                match (behind, outside) {
                    (Some((cursor, _)), _) => Step::Outside(outside, cursor),
                    (None, Outside::Valid) => Step::Outside(Outside::Other, Cursor::default()),
                    (None, Outside::Other) => {
                        // A slice for each thread that gives registrations back.
                        numbers.extend(writer.lists.iter(List::Deregistering));
                        // What a registrar that panicked was not given stands behind the walk again.
                        if walk.handed_back == handed_back { Step::Over } else { Step::Begin }
                    }
                }
            }
            Step::Over => Step::Over,
        };
        let regions = numbers.into_iter().filter_map(|number| self.region(number));
        regions.filter(|region| touches(region, walk.range)).collect()
    }

    /// Applies news on behalf of a lease that wants to know. In a forked child nothing changes:
    /// its lease is the parent's.
    pub(crate) fn catch_up_for_lease(&self, region: &Region<R::Handle>) {
        let seen = self.monitor.check();
        if matches!(seen, Ok(seen) if self.has_applied(seen)) {
            return;
        }
        // A lease has no way to tell.
        let read = |writer: &mut Writer| {
            let is_left = self.catch_up(writer, Checkup::of(seen)).is_ok() && writer.is_cut();
            if !is_left {
                self.invalidate_if_covered(writer, region);
            }
            is_left
        };
        while self.locked(read) == Ok(true) {}
    }

    /// Applies to one leased region what is not applied to all.
    fn invalidate_if_covered(&self, writer: &mut Writer, region: &Region<R::Handle>) {
        let born = region.born();
        let covered = region.range().is_some_and(|range| writer.unapplied.cover(range, born));
        let state = region.state();
        if covered && state.is_indexed() {
            self.note_kept_no_more(writer, region.number);
            self.unpublish(writer, region.number, Lists::invalidate);
            writer.counts.invalidations += 1;
        } else if covered && state.is_outside_and_valid() {
            writer.lists.invalidate(region);
        } else {
            return;
        }
        writer.watchers.invalidated(region.number);
    }

    /// Keeps `callback` for the invalidation of `region`; gives it back if that happened.
    pub(crate) fn watch_region(
        &self,
        region: &Region<R::Handle>,
        callback: Callback,
    ) -> Result<Result<u64, Callback>, Forked> {
        self.locked(|writer| {
            if region.state().is_invalidated() {
                return Err(callback);
            }
            Ok(writer.watchers.watch(region.number, callback))
        })
    }
}

fn note_overflow(writer: &mut Writer) {
    writer.counts.overflows += 1;
    writer.unapplied.push(AddressRange::EVERYTHING);
}

/// How far a change was applied.
enum Applied {
    /// Nothing is left of it; so much of a slice that took.
    All(usize),
    /// This is left.
    UpTo(Rest),
    /// It goes on with this part.
    Begun(PartOutside),
}

/// How many entries of the log are read under one hold of the lock.
const READ_AT_ONCE: usize = if cfg!(shuttle) {
    2
} else if cfg!(miri) {
    16
} else {
    256
};

/// The same where ranges are followed: each entry may mark some.
const READ_FOLLOWED: usize = if READ_AT_ONCE > 16 { 16 } else { READ_AT_ONCE };

/// To look into so many blocks of the index takes as long as to invalidate a region.
const BLOCKS_FOR_ONE: usize = 32;

/// And so does to pass by so many regions.
const NAMED_FOR_ONE: usize = 8;

/// Where there are callbacks a region takes as long as so many without: its own are looked for.
const WITH_CALLBACKS: usize = 2;

/// A region that stands outside of the cache's index takes as long as so many that stand in it, and as
/// long to be noted for a callback: it is searched for in sorted sets.
const OUTSIDE: usize = 4;

/// How many regions one step of a [`Walk`] meets.
const STEP: usize = if SLICE > OUTSIDE { SLICE / OUTSIDE } else { 1 };

/// How far a walk through all regions of a range has come, slice by slice.
pub(crate) struct Walk {
    range: AddressRange,
    step: Step,
    /// How many deregistrations were not made when it began.
    handed_back: u64,
}

/// Where a walk goes on, in the order in which regions move.
enum Step {
    Begin,
    /// Through the rest of the index.
    Index(Rest),
    Outside(Outside, Cursor),
    Over,
}

impl Walk {
    pub(crate) const fn of(range: AddressRange) -> Self {
        Self { range, step: Step::Begin, handed_back: 0 }
    }

    pub(crate) const fn is_over(&self) -> bool {
        matches!(self.step, Step::Over)
    }
}

fn concerns<H: Copy>(change: &Unapplied, region: &Region<H>) -> bool {
    region.range().is_some_and(|range| change.concerns(range, region.born()))
}

fn is_findable_in<H: Copy>(region: &Region<H>, range: AddressRange) -> bool {
    region.findable().is_some_and(|(bytes, _)| bytes.overlaps(&range))
}

fn touches<H: Copy>(region: &Region<H>, range: AddressRange) -> bool {
    region.range().is_some_and(|bytes| bytes.overlaps(&range))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::{OUTSIDE, READ_AT_ONCE, Walk};
    use crate::barrier::Barriers;
    use crate::fake::{Fake, FakeDevice, FakeMonitor, SimulatedRequest, get_simulated};
    use crate::followed::Followed;
    use crate::hazard::Idle;
    use crate::monitor::{Lost, Position, Replay, Sequence};
    use crate::region::Region;
    use crate::registrar::{DeregisterError, RegisterError};
    use crate::shared::{SLICE, Writer};
    use crate::unapplied::PartOutside;
    use crate::watchers::Completion;
    use crate::{Access, AddressRange, Cache, Config, Lease, Statistics};
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};
    use std::thread;
    use std::time::Duration;

    /// A device that numbers its registrations.
    #[derive(Default)]
    struct Numbering {
        next: AtomicU32,
        /// It counts whole blocks of so many bytes.
        block_bytes: Option<usize>,
    }

    type Device = Fake<Numbering>;

    impl FakeDevice for Numbering {
        type Handle = u32;

        fn widened(&self, range: AddressRange) -> AddressRange {
            self.block_bytes.map_or(range, |bytes| range.page_aligned(bytes))
        }

        fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
            Ok(self.next.fetch_add(1, SeqCst))
        }

        fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> {
            Ok(())
        }
    }

    /// What a test says changed, how much of it was read at once at most, how many more checks find a hole that stands ahead of
    /// the last entry, how many holes are filled, and whether it is lost, with a hole behind the last entry.
    #[derive(Default)]
    struct Changes(Mutex<Vec<AddressRange>>, AtomicUsize, AtomicUsize, AtomicUsize, AtomicBool);

    type Log = Fake<Changes>;

    impl FakeMonitor for Changes {
        fn has_slow_check(&self) -> bool {
            true
        }

        fn check(&self) -> Result<Sequence, Lost> {
            if self.4.load(SeqCst) {
                return Err(Lost::Descriptor { errno: 9 });
            }
            let log = self.0.lock().unwrap();
            if self.2.fetch_update(SeqCst, SeqCst, |checks| checks.checked_sub(1)) == Ok(1) {
                self.3.fetch_add(1, SeqCst);
            }
            Ok(Sequence((log.len() + self.3.load(SeqCst)) as u64))
        }

        fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
            self.replay_some(from, usize::MAX, visit)
        }

        fn replay_some(
            &self,
            from: Position,
            most: usize,
            visit: &mut dyn FnMut(AddressRange),
        ) -> Replay {
            let log = self.0.lock().unwrap();
            let from = if from == Position::NOWHERE { 0 } else { from.0 };
            let from = usize::try_from(from).unwrap();
            let up_to = log.len().min(from.saturating_add(most));
            log[from..up_to].iter().for_each(|&range| visit(range));
            self.1.fetch_max(up_to - from, SeqCst);
            let is_cut = up_to < log.len();
            let may_repeat = self.2.load(SeqCst) > 0 && up_to > from && !is_cut;
            let told = Sequence((up_to + self.3.load(SeqCst)) as u64);
            let sequence = if is_cut { Sequence::CUT } else { told };
            let up_to = Position((up_to - usize::from(may_repeat)) as u64, 0);
            let may_repeat = may_repeat || self.4.load(SeqCst);
            Replay { up_to, sequence, complete: true, may_repeat }
        }
    }

    const MANY: usize = 5 * SLICE;

    /// Regions apart from each other, in several of the index's blocks.
    fn page(number: usize) -> AddressRange {
        AddressRange::new(0x7000_0000 + number * 3 * 4096, 4096).unwrap()
    }

    fn all() -> AddressRange {
        AddressRange::between(page(0).start(), page(MANY).start()).unwrap()
    }

    fn get(cache: &Cache<Device, Log>, number: usize) -> Lease<'_, Device, Log> {
        get_simulated(cache, page(number), Access::READ).unwrap()
    }

    fn filled() -> Cache<Device, Log> {
        let config =
            Config { max_regions: 10 * MANY, barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Log::default(), config).unwrap();
        (0..=MANY).for_each(|number| drop(get(&cache, number)));
        cache
    }

    fn change(cache: &Cache<Device, Log>, range: AddressRange) {
        cache.monitor().0.0.lock().unwrap().push(range);
    }

    /// Under one hold of the lock a slice of the small ones goes for a large one; the others serve on.
    #[test]
    fn a_large_region_supersedes_a_slice_of_the_small_ones() {
        let cache = filled();
        let large = get_simulated(&cache, all(), Access::READ).unwrap();
        let superseded = usize::try_from(cache.statistics().superseded).unwrap();
        assert!((1..=SLICE).contains(&superseded), "{superseded}");
        assert_eq!(get(&cache, 0).handle(), large.handle());
        drop(get(&cache, MANY - 1));
        assert_eq!(cache.statistics().registrations, MANY as u64 + 2);
    }

    /// What the device counts as a whole is registered once, and serves the rest; but not what a caller
    /// vouches for, which reports no change of the rest.
    #[test]
    fn what_the_device_counts_is_what_is_registered() {
        const BLOCK: usize = 64 * 4096;
        let device = Fake(Numbering { block_bytes: Some(BLOCK), ..Numbering::default() });
        let config = Config { barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(device, Log::default(), config).unwrap();
        let at = |offset| AddressRange::new(0x7000_0000 + offset, 100).unwrap();
        let get = |offset| get_simulated(&cache, at(offset), Access::READ).unwrap();
        let lease = get(5 * 4096);
        assert_eq!(lease.registered(), AddressRange::new(0x7000_0000, BLOCK).unwrap());
        assert_eq!(get(60 * 4096).handle(), lease.handle());
        assert_eq!(cache.statistics().pinned_bytes, BLOCK as u64);
        // A change anywhere in it is one of it.
        change(&cache, AddressRange::new(0x7000_0000, 4096).unwrap());
        assert!(lease.is_invalidated());
        let vouched = SimulatedRequest::new(&cache, at(BLOCK), Access::READ).vouched().get();
        let vouched = vouched.unwrap();
        assert_eq!(vouched.registered().len(), 4096);
    }

    #[test]
    fn a_get_after_a_large_change_pays_for_a_slice() {
        let cache = filled();
        change(&cache, all());
        // Beside it: served as it is.
        assert_eq!(get(&cache, MANY).handle(), u32::try_from(MANY).unwrap());
        let applied = usize::try_from(cache.statistics().invalidations).unwrap();
        assert!((1..=2 * SLICE).contains(&applied), "{applied}");
        // All the others pay for the rest.
        (0..MANY).for_each(|_| drop(get(&cache, MANY)));
        assert_eq!(cache.statistics().invalidations, MANY as u64);
    }

    #[test]
    fn what_is_not_applied_yet_is_not_believed_and_what_came_later_stays() {
        let cache = filled();
        change(&cache, all());
        let fresh = get(&cache, MANY - 1).handle();
        assert!(fresh > u32::try_from(MANY).unwrap(), "what was there before the change");
        assert!(cache.statistics().invalidations < MANY as u64, "all was applied at once");
        assert_eq!(cache.reclaim(), MANY);
        assert_eq!(get(&cache, MANY - 1).handle(), fresh, "an older change took it away");
    }

    #[test]
    fn a_lease_knows_of_a_change_that_is_not_applied_to_all() {
        let cache = filled();
        let lease = get(&cache, MANY - 1);
        let once = once(&cache, MANY - 2);
        let elsewhere = self::once(&cache, MANY);
        change(&cache, all());
        assert!(lease.is_invalidated());
        assert!(cache.statistics().invalidations < MANY as u64, "all was applied at once");
        assert!(once.is_invalidated() && !elsewhere.is_invalidated());
        assert!(!get(&cache, MANY).is_invalidated());
        cache.check().unwrap();
        assert_eq!(cache.statistics().invalidations, MANY as u64, "each once");
    }

    /// What is asked for by a callback, between two slices of the program's own word.
    #[test]
    fn nothing_that_an_invalidation_covers_is_found_while_it_is_under_way() {
        let cache = Arc::new(filled());
        let found = Arc::new(AtomicU32::new(0));
        let mut lease = get(&cache, 0);
        let (inner, result) = (Arc::clone(&cache), Arc::clone(&found));
        lease.on_invalidate(move || {
            assert!(inner.statistics().invalidations < MANY as u64, "not between two slices");
            result.store(get(&inner, MANY - 1).handle(), SeqCst);
        });
        cache.invalidate(all());
        assert!(found.load(SeqCst) > u32::try_from(MANY).unwrap(), "what was there before");
        let Statistics { invalidations, superseded, .. } = cache.statistics();
        assert_eq!((invalidations, superseded), (MANY as u64 - 1, 1));
        assert_eq!(get(&cache, MANY - 1).handle(), found.load(SeqCst), "what came later went too");
    }

    /// What stands in its last part is known to the first get, to a lease, and to those who follow a range.
    #[test]
    fn a_long_log_is_read_in_parts_and_to_its_end() {
        let cache = filled();
        let (lease, followed) = (get(&cache, 7), Followed::begin(&cache, page(9)).unwrap());
        let change_last = |number: usize| {
            (0..3 * READ_AT_ONCE).for_each(|number| change(&cache, page(2 * MANY + number)));
            change(&cache, page(number));
        };
        change_last(MANY - 1);
        assert!(get(&cache, MANY - 1).handle() > u32::try_from(MANY).unwrap(), "a stale one");
        change_last(7);
        assert!(lease.is_invalidated());
        change_last(9);
        assert_eq!(followed.has_changed(), Some(true));
        change_last(11);
        let later = Followed::begin(&cache, page(11)).unwrap();
        assert_eq!(later.has_changed(), Some(false), "that was before");
        change_last(12);
        cache.check().unwrap();
        assert!(cache.shared.locked(|writer| writer.has_applied_all()).unwrap());
        change_last(13);
        assert_eq!(cache.reclaim(), 5, "and what the last part concerns");
        assert_eq!(cache.monitor().0.1.load(SeqCst), READ_AT_ONCE, "under one hold");
    }

    /// A thread that stands still as it notes a change leaves a hole, and what stands behind it is read again: a range that
    /// is followed from now on would be marked by a change from before.
    #[test]
    fn a_range_is_followed_once_nothing_is_read_again() {
        let cache = filled();
        let leave_a_hole = |checks| cache.monitor().0.2.store(checks, SeqCst);
        leave_a_hole(5);
        change(&cache, page(9));
        let followed = Followed::begin(&cache, page(9)).unwrap();
        assert_eq!(followed.has_changed(), Some(false));
        leave_a_hole(usize::MAX);
        change(&cache, page(10));
        let before = cache.statistics().events;
        assert!(
            Followed::begin(&cache, page(9)).is_none(),
            "a change that is read may be read again"
        );
        assert_eq!(cache.statistics().events, before + 1, "and is not while the log stands still");
        assert_eq!(followed.has_changed(), Some(false));
        change(&cache, page(9));
        assert_eq!(followed.has_changed(), Some(true));
    }

    /// A get that asks for no answer reads the log, and what it has told stands behind a hole: told again, it would end what
    /// was kept since.
    #[test]
    fn a_get_without_an_answer_applies_nothing_again() {
        let cache = filled();
        cache.monitor().0.2.store(usize::MAX, SeqCst);
        change(&cache, page(9));
        let kept = get(&cache, 9);
        let before = cache.statistics();
        for number in MANY + 1..MANY + 20 {
            drop(SimulatedRequest::new(&cache, page(number), Access::READ).once().get().unwrap());
        }
        let after = cache.statistics();
        assert_eq!(after.events, before.events);
        assert_eq!(after.invalidations, before.invalidations);
        assert!(!kept.is_invalidated(), "by a change from before it was made");
    }

    /// Whose log no thread writes any longer: the hole stays.
    #[test]
    fn no_range_is_followed_where_the_monitor_is_lost_with_a_hole_in_its_log() {
        let cache = filled();
        cache.monitor().0.4.store(true, SeqCst);
        let (answer, answered) = channel();
        let follows =
            thread::spawn(move || answer.send(Followed::begin(&cache, page(9)).is_none()));
        assert_eq!(answered.recv_timeout(Duration::from_secs(20)), Ok(true), "it goes on looking");
        follows.join().unwrap().unwrap();
    }

    /// More changes than are kept one by one: the first of them is not forgotten.
    #[test]
    #[cfg_attr(miri, ignore = "takes half a minute, and no unsafe code that others do not reach")]
    fn too_many_changes_are_all_applied() {
        const BEFORE: usize = 30_000;
        let cache = filled();
        (0..BEFORE).for_each(|number| change(&cache, page(2 * MANY + number)));
        change(&cache, page(MANY - 1));
        (0..BEFORE).for_each(|number| change(&cache, page(2 * MANY + number)));
        assert!(get(&cache, MANY - 1).handle() > u32::try_from(MANY).unwrap());
        cache.check().unwrap();
        assert!(get(&cache, 3).handle() > u32::try_from(MANY).unwrap(), "folded, and not applied");
    }

    /// Whatever its state, and no more than two slices under one hold of the lock.
    #[test]
    fn a_walk_meets_every_region_in_slices() {
        let cache = filled();
        let _leased: Vec<_> = (0..MANY / 2).map(|number| get(&cache, number)).collect();
        let _once: Vec<_> = (0..MANY).map(|number| once(&cache, number)).collect();
        // Leased ones of which the end is awaited, and some that were not looked at.
        let invalidate = |from: usize, to: usize| {
            let range = AddressRange::between(page(from).start(), page(to).start());
            cache.invalidate(range.unwrap());
        };
        invalidate(0, MANY / 4);
        assert_eq!(cache.reclaim(), 0);
        invalidate(MANY / 4, MANY * 3 / 4);
        let (mut walk, mut met) = (Walk::of(all()), BTreeSet::new());
        while !walk.is_over() {
            let numbers = cache.shared.locked(|writer| {
                let regions = cache.shared.walk_on(writer, &mut walk);
                regions.iter().map(|region| region.number).collect::<Vec<_>>()
            });
            assert!(numbers.as_ref().unwrap().len() <= 2 * SLICE, "{numbers:?}");
            met.extend(numbers.unwrap());
        }
        assert_eq!(met.len(), 2 * MANY);
    }

    /// What a registrar that panicked was not given is back where the walk has been.
    #[test]
    fn a_walk_meets_what_is_handed_back_behind_it() {
        let cache = filled();
        let (undone, behind) = (cache.shared.region(0).unwrap(), cache.shared.region(1).unwrap());
        let duty = cache.shared.locked(|writer| {
            writer.lists.invalidate(undone);
            writer.lists.invalidate(behind);
            writer.lists.deregister(Idle::of_a_dropped_cache(undone))
        });
        let (mut walk, mut met, mut duty) = (Walk::of(all()), BTreeSet::new(), duty.ok());
        while !walk.is_over() {
            let walked = cache.shared.locked(|writer| {
                let regions = cache.shared.walk_on(writer, &mut walk);
                met.extend(regions.iter().map(|region| region.number));
                if met.contains(&behind.number) {
                    duty.take().into_iter().for_each(|duty| writer.lists.hand_back(duty));
                }
            });
            walked.unwrap();
        }
        assert!(met.contains(&undone.number));
    }

    /// The last of them in the last slice.
    #[test]
    fn a_word_waits_for_all_that_was_there() {
        let cache = filled();
        let (calls, last) = (Arc::new(AtomicU32::new(0)), get(&cache, MANY - 1));
        let counted = Arc::clone(&calls);
        cache.invalidate_then(all(), move || _ = counted.fetch_add(1, SeqCst));
        cache.reclaim();
        // Younger than the change: not waited for.
        let _younger = get(&cache, 3);
        assert_eq!(calls.load(SeqCst), 0);
        drop(last);
        cache.reclaim();
        assert_eq!(calls.load(SeqCst), 1);
    }

    /// Though it is met where the others are looked for.
    #[test]
    fn a_word_waits_for_nothing_younger() {
        let (cache, calls) = (filled(), Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&calls);
        let completion = Completion::new(Box::new(move || _ = counted.fetch_add(1, SeqCst)));
        let number = cache.shared.locked(|writer| writer.unapplied.push(page(3))).unwrap();
        assert_eq!(cache.reclaim(), 1);
        let _younger = get(&cache, 3);
        cache.shared.await_older_than(number, page(3), &completion);
        cache.shared.locked(|writer| writer.watchers.complete(completion)).unwrap();
        assert_eq!(calls.load(SeqCst), 1);
    }

    /// Though it stays named in the index as long as it is leased.
    #[test]
    fn a_long_region_is_invalidated_once() {
        let config = Config { barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Log::default(), config).unwrap();
        let long = AddressRange::new(page(0).start(), 1 << 30).unwrap();
        let long = get_simulated(&cache, long, Access::READ).unwrap();
        for _ in 0..2 {
            change(&cache, page(5));
            cache.check().unwrap();
        }
        assert!(long.is_invalidated());
        assert_eq!(cache.statistics().invalidations, 1);
    }

    /// Where its place is filled again, another region would be looked at there.
    #[test]
    fn what_is_gone_is_named_nowhere_in_the_index() {
        let config = Config { barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Log::default(), config).unwrap();
        let named = || {
            let mut count = 0;
            let visit = |_: &Region<u32>| count += 1;
            cache.shared.index.overlapping_part(AddressRange::EVERYTHING.into(), 1 << 20, visit);
            count
        };
        // Of so many blocks of the index.
        const BLOCKS: usize = if cfg!(miri) { 32 } else { 512 };
        let long = AddressRange::new(page(0).start(), BLOCKS << 21).unwrap();
        let long = get_simulated(&cache, long, Access::READ).unwrap();
        assert!(long.is_cached() && named() >= BLOCKS);
        assert_eq!(get(&cache, MANY).handle(), long.handle());
        drop(long);
        assert_eq!((cache.evict_idle(), named()), (1, 0));
        drop(get(&cache, 0));
        assert_eq!(named(), 1);
        assert_eq!((cache.evict_idle(), named()), (1, 0));
    }

    fn once(cache: &Cache<Device, Log>, number: usize) -> Lease<'_, Device, Log> {
        let next = AddressRange::new(page(number).start() + 4096, 4096).unwrap();
        SimulatedRequest::new(cache, next, Access::READ).once().get().unwrap()
    }

    /// Leases that a change does not concern are looked at in slices too, and one that it does concern is found
    /// behind them.
    #[test]
    fn a_change_goes_past_younger_leases_in_slices() {
        let cache = filled();
        let mut held: Vec<_> = (0..MANY).map(|number| once(&cache, number)).collect();
        let read = |writer: &mut Writer| {
            let number = writer.unapplied.push(all());
            cache.shared.publish_applied(writer);
            number
        };
        let number = cache.shared.locked(read).unwrap();
        let change = cache.shared.locked(|writer| writer.unapplied.rest_of(number)).unwrap();
        // All but the last are younger than the change, of which each get applies a slice.
        (0..MANY - 1).for_each(|number| held[number] = once(&cache, number));
        (MANY..MANY + OUTSIDE).for_each(|number| drop(once(&cache, number)));
        assert!(cache.shared.locked(|writer| writer.unapplied.is_empty()).unwrap());
        assert!(held[MANY - 1].is_invalidated() && !held[0].is_invalidated());
        let (change, mut left) = (change.unwrap(), Some(PartOutside::before(None)));
        let mut holds = 0;
        while let Some(part) = left {
            let applied =
                |writer: &mut Writer| cache.shared.apply_outside(writer, change, part, SLICE);
            let (rest, took) = cache.shared.locked(applied).unwrap();
            assert!(took < SLICE + OUTSIDE, "{took} looks under one hold");
            (left, holds) = (rest, holds + 1);
        }
        assert!(holds >= (MANY - 1) / SLICE, "{holds} holds");
    }

    /// To look for regions where none are takes time as well.
    #[test]
    #[cfg_attr(miri, ignore = "takes half a minute, and no unsafe code that others do not reach")]
    fn changes_of_much_empty_memory_are_not_one_slice() {
        const GIB: usize = 1 << 30;
        const FEW: usize = SLICE / 4;
        let config = Config { barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Log::default(), config).unwrap();
        let touch = |gib: usize| {
            let range = AddressRange::new(gib * GIB, 4096).unwrap();
            drop(get_simulated(&cache, range, Access::READ).unwrap());
        };
        (16..24).for_each(touch);
        let large = AddressRange::new(16 * GIB + 4096, 8 * GIB - 4096).unwrap();
        (0..FEW).for_each(|_| change(&cache, large));
        touch(32);
        let is_left = cache.shared.locked(|writer| !writer.unapplied.is_empty());
        assert!(is_left.unwrap(), "{FEW} changes of 1024 blocks under one hold");
        cache.check().unwrap();
        assert!(cache.shared.locked(|writer| writer.unapplied.is_empty()).unwrap());
    }

    /// Kept, it would send the hits of all threads the slow way until one of them applies it again.
    #[test]
    fn the_programs_own_word_that_one_slice_applies_is_not_kept() {
        let cache = filled();
        cache.invalidate(page(3));
        cache.invalidate(page(2 * MANY));
        assert_eq!(cache.statistics().invalidations, 1);
        assert!(cache.shared.locked(|writer| writer.unapplied.is_empty()).unwrap());
        assert!(cache.shared.has_applied(cache.monitor().check().unwrap()));
    }

    /// What no slice has room for is kept, also where no region of it is in the index.
    #[test]
    fn the_programs_own_word_reaches_all_leases_that_stand_outside() {
        let cache = filled();
        assert_eq!(cache.evict_idle(), MANY + 1);
        let held: Vec<_> = (0..MANY).map(|number| once(&cache, number)).collect();
        cache.invalidate(all());
        assert!(held.iter().all(Lease::is_invalidated));
        assert!(cache.shared.locked(|writer| writer.unapplied.is_empty()).unwrap());
    }

    #[test]
    fn a_check_and_the_programs_own_word_leave_nothing_for_later() {
        let cache = filled();
        change(&cache, all());
        cache.check().unwrap();
        assert_eq!(cache.statistics().invalidations, MANY as u64);
        (0..MANY).for_each(|number| drop(get(&cache, number)));
        cache.invalidate(all());
        assert_eq!(cache.statistics().invalidations, 2 * MANY as u64);
        assert_eq!(cache.evict_idle_in(page(MANY)), 1);
    }
}
