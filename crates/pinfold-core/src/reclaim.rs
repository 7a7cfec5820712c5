//! Giving registrations back: promptly when invalidated, for room when idle, never under a lock.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the handle of a region that has no lease and whose
//! deregistration has been claimed.

#![allow(unsafe_code)]

use crate::hazard::InUse;
use crate::monitor::Monitor;
use crate::order::{Order, Seen};
use crate::queues::Queue;
use crate::region::{Region, Status};
use crate::registrar::Registrar;
use crate::shared::{Held, Shared, Writer};
use std::sync::Arc;
use std::time::Duration;

/// How long the reclaimer lets work gather once there is some.
///
/// Telling whether regions are leased costs a barrier on every thread that runs, ten microseconds
/// where threads run on several virtual processors, and waking the reclaimer costs the waker about
/// one; gathered, both are paid once for all regions of that time. An invalidated region stays
/// pinned so much longer.
const GATHER: Duration = Duration::from_micros(100);
/// At most so many regions stand by at once...
const MOST_STANDBY: usize = 64;
/// ...and at most one in so many.
const STANDBY_SHARE: usize = if cfg!(loom) { 1 } else { 64 };

/// Regions whose deregistration is the holder's duty: no lease is left, nobody can find them,
/// and nobody else holds this duty.
#[must_use]
struct Leaving(Vec<u32>);

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Applies news, then deregisters every region that is neither findable nor leased.
    ///
    /// Says how many there were.
    pub(crate) fn reclaim(&self) -> usize {
        self.give_back(|writer| self.claim_dead(writer))
    }

    /// Applies news, then deregisters what `claim` takes over. Says how many regions that were.
    fn give_back(&self, claim: impl FnOnce(&mut Writer) -> Leaving) -> usize {
        // A forked child's regions are its parent's, and a thread that does not exist here may
        // have held the lock.
        if self.monitor.forked() {
            return 0;
        }
        let (leaving, due) = self.locked_deferring(|writer| match self.catch_up(writer) {
            Ok(()) => claim(writer),
            // Forked in between, by another thread's leave.
            Err(_) => Leaving(Vec::new()),
        });
        // Before the callbacks, which may wait for the room that this makes.
        let count = self.deregister(leaving);
        drop(due);
        count
    }

    /// Applies news and says whether there is something to give back.
    fn finds_dead(&self) -> bool {
        if self.monitor.forked() {
            return false;
        }
        self.locked(|writer| {
            // Forked in between: then nothing is given back either.
            let _forked = self.catch_up(writer);
            writer.queues.len(Queue::Dead) + writer.queues.len(Queue::Superseded) > 0
        })
    }

    /// Takes over the duty for the dead regions without a lease.
    ///
    /// Those that are leased are set aside until their last lease's end says so
    /// ([`say_if_awaited`](Self::say_if_awaited)), so that a lease held long costs this nothing.
    fn claim_dead(&self, writer: &mut Writer) -> Leaving {
        writer.answer_call();
        let mut idle = Vec::new();
        let unlooked = [Queue::Dead, Queue::Superseded];
        let numbers = unlooked.iter().flat_map(|&queue| writer.queues.iter(queue));
        let regions = numbers.filter_map(|number| self.region(number));
        let count = regions.map(Region::await_end).count();
        if count == 0 {
            return Leaving(idle);
        }
        let in_use = self.in_use(writer);
        // Without a barrier everything stays where it is, for another try.
        if in_use.is_known() {
            idle.reserve(count);
            self.part(writer, Queue::Dead, Queue::Leased, &in_use, &mut idle);
            self.part(writer, Queue::Superseded, Queue::SupersededLeased, &in_use, &mut idle);
        }
        Leaving(idle)
    }

    /// Parts the regions of queue `from`: to queue `leased`, or on their way out and into `idle`.
    fn part(
        &self,
        writer: &mut Writer,
        from: Queue,
        leased: Queue,
        in_use: &InUse,
        idle: &mut Vec<u32>,
    ) {
        while let Some(number) = writer.queues.first(from) {
            if self.region(number).is_some_and(|region| in_use.contains(region)) {
                writer.queues.put(leased, number);
            } else {
                writer.queues.put(Queue::Leaving, number);
                idle.push(number);
            }
        }
    }

    /// A lease of `region` ended, and the light barrier has run since: hands the region to the
    /// reclaimer again if that found it leased.
    ///
    /// **Why the last lease's end is not lost.** The lease empties its hazard, runs the light
    /// barrier and looks whether the region's end is awaited. The reclaimer says that it awaits
    /// it, runs the heavy barrier and looks at the hazards. If this look finds nothing awaited,
    /// that look finds the hazard empty, and it is still to come: a dead region that nobody has
    /// looked at has been handed to the reclaimer by whoever took it out of the index. If it was
    /// awaited, the reclaimer may have found it leased and set it aside, which it has done by the
    /// time the lock is had here. The place may hold another region by now; then that one is
    /// looked at once more, or nothing happens.
    #[inline]
    pub(crate) fn say_if_awaited(&self, region: &Region<R::Handle>) {
        if region.is_awaited() {
            self.look_again(region.number);
        }
    }

    #[cold]
    fn look_again(&self, number: u32) {
        // In a forked child all of it is the parent's, and the lock may be held by a thread that
        // does not exist here.
        if self.monitor.forked() {
            return;
        }
        self.locked(|writer| match writer.queues.queue_of(number) {
            Some(Queue::Leased) => writer.bury(Queue::Dead, number),
            Some(Queue::SupersededLeased) => writer.bury(Queue::Superseded, number),
            _ => {}
        });
    }

    /// Gives up idle memory: dead regions first, then as the order of eviction says. False if
    /// nothing could be given up.
    pub(crate) fn free_some(&self, shortage: Held) -> bool {
        let count = self.give_back(|writer| match self.claim_dead(writer) {
            Leaving(idle) if idle.is_empty() => self.evict(writer, shortage),
            dead => dead,
        });
        // What another thread is giving back is room to come.
        count > 0 || self.wait_for_departure()
    }

    /// Takes idle regions out of the index until they make up for `shortage`.
    ///
    /// Whether a region is idle can only be told after it was made unfindable, and each telling
    /// costs a heavy barrier. So several are made to stand by at once, growing numbers of them if
    /// they turn out to be leased, and those that are not needed now are the next to go. A `get`
    /// that wants one meanwhile finds it under the lock, and it is proven.
    fn evict(&self, writer: &mut Writer, shortage: Held) -> Leaving {
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        let mut missing = shortage;
        let mut batch = standby_batch(writer);
        while missing != Held::default() {
            if let Some(number) = writer.queues.first(Queue::Standby) {
                self.give_up(writer, number, &mut missing);
                idle.push(number);
            } else if self.stand_by(writer, batch, &mut busy) {
                batch *= 2;
            } else {
                break;
            }
        }
        let tick = self.tick();
        busy.into_iter().for_each(|number| Order::keep(&mut writer.queues, number, tick));
        writer.counts.evictions += idle.len() as u64;
        Leaving(idle)
    }

    /// Takes a region that stands by out of the index.
    fn give_up(&self, writer: &mut Writer, number: u32, missing: &mut Held) {
        writer.queues.put(Queue::Leaving, number);
        let Some(region) = self.region(number) else { return };
        let Some(range) = region.range() else { return };
        region.set(Status::Retired);
        self.index.remove(&mut writer.recycler, range, number);
        missing.bytes = missing.bytes.saturating_sub(self.footprint(range));
        missing.regions = missing.regions.saturating_sub(1);
    }

    /// Has the next `batch` regions stand by; those that are leased go to `busy` instead. False
    /// if there was none.
    fn stand_by(&self, writer: &mut Writer, batch: usize, busy: &mut Vec<u32>) -> bool {
        let mut next = Vec::with_capacity(batch);
        while next.len() < batch {
            let Writer { order, queues, .. } = &mut *writer;
            let Some(number) = order.pop(queues, |number| self.seen(number)) else { break };
            let Some(region) = self.region(number) else { continue };
            region.set(Status::Standby);
            next.push((number, region));
        }
        if next.is_empty() {
            return false;
        }
        let in_use = self.in_use(writer);
        for (number, region) in next {
            if in_use.contains(region) {
                region.set(Status::Live);
                busy.push(number);
            } else {
                writer.queues.put(Queue::Standby, number);
            }
        }
        true
    }

    /// What the order of eviction wants to know of a region.
    pub(crate) fn seen(&self, number: u32) -> Seen {
        let region = self.region(number);
        let start = region.and_then(Region::range).map_or(0, |range| range.start());
        Seen { used: region.map_or(0, Region::used), page: start / self.limits.page_bytes }
    }

    /// A lease that was alone on its region ended.
    pub(crate) fn end_per_use(&self, number: u32) {
        let (leaving, due) = self.locked_deferring(|writer| {
            writer.per_use.retain(|&(other, _)| other != number);
            writer.queues.put(Queue::Leaving, number);
            Leaving(vec![number])
        });
        self.deregister(leaving);
        drop(due);
    }

    /// A lease without a hazard ended.
    pub(crate) fn uncount(&self, region: &Region<R::Handle>) {
        let place = std::ptr::from_ref(region).addr();
        self.locked(|writer| {
            if let Some(position) = writer.counted.iter().position(|&other| other == place) {
                writer.counted.swap_remove(position);
            }
        });
    }

    /// Gives registrations back to the device, with no lock held, then their places and their
    /// share of the budget to the cache. Says how many there were.
    fn deregister(&self, Leaving(numbers): Leaving) -> usize {
        // What a forked child inherited is its parent's to give back.
        if numbers.is_empty() || self.monitor.forked() {
            return 0;
        }
        let count = numbers.len();
        Departure { shared: self, numbers, gone: 0, failed: 0 }.run();
        count
    }

    /// False if the device could not.
    fn deregister_one(&self, number: u32) -> bool {
        let region = self.region(number).and_then(|region| Some((region, region.range()?)));
        let Some((region, range)) = region else { return false };
        // SAFETY: the caller holds the duty to deregister this region.
        let handle = unsafe { region.handle() };
        self.registrar.deregister(handle, range).is_ok()
    }

    /// The books after a deregistration.
    fn free_place(&self, writer: &mut Writer, number: u32) {
        writer.queues.remove(number);
        let Some(region) = self.region(number) else { return };
        writer.held.bytes -= region.range().map_or(0, |range| self.footprint(range));
        writer.held.regions -= 1;
        writer.watchers.deregistered(number);
        region.set(Status::Free);
        writer.free_places.push(number);
    }

    /// Deregisters everything: the cache is being dropped, so no lease can be used any more.
    ///
    /// What is being given back already is in other hands: a callback may drop the cache.
    pub(crate) fn deregister_all(&self) {
        let (leaving, due) = self.locked_deferring(|writer| {
            let ours = |&number: &u32| {
                self.is_filled(number) && writer.queues.queue_of(number) != Some(Queue::Leaving)
            };
            let numbers: Vec<u32> = (0..writer.made_places).filter(ours).collect();
            for &number in &numbers {
                self.withdraw_from_index(writer, number);
                writer.queues.put(Queue::Leaving, number);
            }
            writer.per_use = Vec::new();
            Leaving(numbers)
        });
        self.deregister(leaving);
        drop(due);
    }

    fn is_filled(&self, number: u32) -> bool {
        self.region(number).is_some_and(|region| region.status() != Status::Free)
    }

    fn withdraw_from_index(&self, writer: &mut Writer, number: u32) {
        let findable = self.region(number).and_then(Region::findable);
        if let Some((range, _)) = findable {
            self.index.remove(&mut writer.recycler, range, number);
        }
    }
}

/// How many regions are made to stand by at once.
fn standby_batch(writer: &Writer) -> usize {
    (writer.held.regions / STANDBY_SHARE).clamp(1, MOST_STANDBY)
}

/// Registrations on their way back to the device. Keeps the books right also when the registrar
/// panics: the one it was given is gone, those behind it are the reclaimer's again.
struct Departure<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    numbers: Vec<u32>,
    /// How many of them the device was given.
    gone: usize,
    /// How many of those it could not give back.
    failed: usize,
}

impl<R: Registrar, M: Monitor> Departure<'_, R, M> {
    fn run(mut self) {
        while let Some(&number) = self.numbers.get(self.gone) {
            self.gone += 1;
            self.failed += 1;
            if self.shared.deregister_one(number) {
                self.failed -= 1;
            }
        }
    }

    fn enter_into_books(&self, writer: &mut Writer) {
        writer.counts.deregistration_failures += self.failed as u64;
        writer.counts.deregistrations += (self.gone - self.failed) as u64;
        let (gone, ahead) = self.numbers.split_at(self.gone);
        gone.iter().for_each(|&number| self.shared.free_place(writer, number));
        ahead.iter().for_each(|&number| writer.bury(Queue::Dead, number));
        self.shared.note_departure(writer);
    }
}

impl<R: Registrar, M: Monitor> Drop for Departure<'_, R, M> {
    fn drop(&mut self) {
        self.shared.locked(|writer| self.enter_into_books(writer));
    }
}

/// Deregisters invalidated memory as soon as its last lease ends, on a thread of its own.
///
/// Made by [`Cache::start_reclaimer`](crate::Cache::start_reclaimer).
pub struct Reclaimer<R: Registrar, M: Monitor> {
    shared: Arc<Shared<R, M>>,
}

impl<R: Registrar, M: Monitor> Reclaimer<R, M> {
    pub(crate) fn new(shared: Arc<Shared<R, M>>) -> Self {
        Self { shared }
    }

    /// Works until the cache is dropped. Sleeps while there is nothing to do; news are applied at
    /// once, and what is to be given back is left to gather for a tenth of a millisecond.
    ///
    /// The bell is read before the work, so whatever happens during the work wakes the next
    /// round.
    pub fn run(self) {
        loop {
            let seen = self.shared.monitor.bell();
            if self.shared.is_closed() {
                return;
            }
            if self.shared.finds_dead() {
                std::thread::sleep(GATHER);
                self.shared.reclaim();
            }
            self.shared.monitor.wait(seen);
        }
    }
}

impl<R: Registrar, M: Monitor> std::fmt::Debug for Reclaimer<R, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").finish_non_exhaustive()
    }
}
