//! Giving registrations back: promptly when invalidated, for room when idle, never under a lock.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the handle of a region that has no lease and whose
//! deregistration has been claimed.

#![allow(unsafe_code)]

use crate::hazard::InUse;
use crate::monitor::Monitor;
use crate::order::Candidate;
use crate::region::{Region, Status};
use crate::registrar::Registrar;
use crate::shared::{Held, Shared, Writer};
use std::collections::HashSet;
use std::sync::Arc;

/// Regions whose deregistration is the holder's duty: no lease is left, nobody can find them,
/// and nobody else holds this duty.
#[must_use]
struct Leaving(Vec<u32>);

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Applies news, then deregisters every region that is neither findable nor leased.
    ///
    /// Says how many there were.
    pub(crate) fn reclaim(&self) -> usize {
        // A forked child's regions are its parent's, and a thread that does not exist here may
        // have held the lock.
        if self.monitor.forked() {
            return 0;
        }
        let (leaving, due) = self.locked_deferring(|writer| match self.catch_up(writer) {
            Ok(()) => self.claim_dead(writer),
            // Forked in between, by another thread's leave.
            Err(_) => Leaving(Vec::new()),
        });
        // Before the callbacks, which may wait for the room that this makes.
        let count = self.deregister(leaving);
        drop(due);
        count
    }

    /// Takes over the duty for the dead regions without a lease.
    fn claim_dead(&self, writer: &mut Writer) -> Leaving {
        if writer.dead.is_empty() {
            return Leaving(Vec::new());
        }
        let in_use = self.in_use(writer);
        let is_leased =
            |&number: &u32| self.region(number).is_some_and(|region| in_use.contains(region));
        let (leased, idle) = std::mem::take(&mut writer.dead).into_iter().partition(is_leased);
        writer.dead = leased;
        claim(writer, idle)
    }

    /// Gives up idle memory: dead regions first, then the least recently used. False if nothing
    /// could be given up.
    pub(crate) fn free_some(&self, shortage: Held) -> bool {
        if self.reclaim() > 0 {
            return true;
        }
        let (leaving, due) = self.locked_deferring(|writer| self.evict(writer, shortage));
        let count = self.deregister(leaving);
        drop(due);
        // What another thread is giving back is room to come.
        count > 0 || self.wait_for_departure()
    }

    /// Gives up everything idle, and waits for what others are giving back. Says how many were
    /// given back here.
    pub(crate) fn evict_idle(&self) -> usize {
        let dead = self.reclaim();
        if self.monitor.forked() {
            return dead;
        }
        let everything = Held { bytes: usize::MAX, regions: usize::MAX };
        let (leaving, due) = self.locked_deferring(|writer| self.evict(writer, everything));
        let count = self.deregister(leaving);
        drop(due);
        while self.wait_for_departure() {}
        dead + count
    }

    /// Takes idle regions out of the index until they make up for `shortage`.
    ///
    /// Whether a region is idle can only be told after it was made unfindable, and each telling
    /// costs a heavy barrier; so regions are retired in growing batches, and those that turn out
    /// to be leased are live again before anybody else gets the lock.
    fn evict(&self, writer: &mut Writer, shortage: Held) -> Leaving {
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        let mut missing = shortage;
        let mut batch = 1;
        while missing != Held::default() {
            let retired = self.retire(writer, missing, batch);
            if retired.is_empty() {
                break;
            }
            let in_use = self.in_use(writer);
            for candidate in retired {
                if self.settle(writer, &candidate, &in_use, &mut missing) {
                    idle.push(candidate.number);
                } else {
                    busy.push(candidate);
                }
            }
            batch *= 2;
        }
        busy.into_iter().for_each(|candidate| writer.order.push(candidate));
        writer.counts.evictions += idle.len() as u64;
        claim(writer, idle)
    }

    /// Retires the least recently used regions: as many as make up for `missing`, but at least
    /// `batch`, if there are so many.
    fn retire(&self, writer: &mut Writer, missing: Held, batch: usize) -> Vec<Candidate> {
        let mut retired = Vec::new();
        let mut freed = Held::default();
        while freed.bytes < missing.bytes
            || freed.regions < missing.regions
            || retired.len() < batch
        {
            let Some(candidate) = writer.order.pop(|candidate| self.present(candidate)) else {
                break;
            };
            let Some(region) = self.region(candidate.number) else { continue };
            region.set(Status::Retired);
            freed.bytes += region.range().map_or(0, |range| self.footprint(range));
            freed.regions += 1;
            retired.push(candidate);
        }
        retired
    }

    /// Decides on a retired region: gone for good (true) if it is idle and room is still missing,
    /// else live again.
    fn settle(
        &self,
        writer: &mut Writer,
        candidate: &Candidate,
        in_use: &InUse,
        missing: &mut Held,
    ) -> bool {
        let Some(region) = self.region(candidate.number) else { return false };
        let Some(range) = region.range() else { return false };
        if *missing == Held::default() || in_use.contains(region) {
            region.set(Status::Live);
            return false;
        }
        self.index.remove(&mut writer.recycler, range, candidate.number);
        missing.bytes = missing.bytes.saturating_sub(self.footprint(range));
        missing.regions = missing.regions.saturating_sub(1);
        true
    }

    /// The tick at which a candidate for eviction was last used; `None` if it is not live any
    /// more.
    pub(crate) fn present(&self, candidate: &Candidate) -> Option<u64> {
        let region = self.region(candidate.number)?;
        let same = region.status() == Status::Live && region.fills() == candidate.fills;
        same.then(|| region.used())
    }

    /// A lease that was alone on its region ended.
    pub(crate) fn end_per_use(&self, number: u32) {
        let (leaving, due) = self.locked_deferring(|writer| {
            writer.per_use.retain(|&(other, _)| other != number);
            claim(writer, vec![number])
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
        let mut departure = Departure { shared: self, ahead: numbers, gone: Vec::new(), failed: 0 };
        departure.run();
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
            let numbers = (0..writer.made_places).filter(|&number| self.is_filled(number));
            let leaving: HashSet<u32> = writer.leaving.iter().copied().collect();
            let numbers: Vec<u32> = numbers.filter(|number| !leaving.contains(number)).collect();
            numbers.iter().for_each(|&number| self.withdraw_from_index(writer, number));
            (writer.dead, writer.per_use) = (Vec::new(), Vec::new());
            claim(writer, numbers)
        });
        self.deregister(leaving);
        drop(due);
    }

    fn is_filled(&self, number: u32) -> bool {
        self.region(number).is_some_and(|region| region.status() != Status::Free)
    }

    fn withdraw_from_index(&self, writer: &mut Writer, number: u32) {
        let live = self.region(number).filter(|region| region.status() == Status::Live);
        if let Some(range) = live.and_then(Region::range) {
            self.index.remove(&mut writer.recycler, range, number);
        }
    }
}

/// Registrations on their way back to the device. Keeps the books right also when the registrar
/// panics: the one it was given is gone, those ahead are the reclaimer's again.
struct Departure<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    ahead: Vec<u32>,
    gone: Vec<u32>,
    failed: usize,
}

impl<R: Registrar, M: Monitor> Departure<'_, R, M> {
    fn run(&mut self) {
        while let Some(number) = self.ahead.pop() {
            self.gone.push(number);
            self.failed += 1;
            if self.shared.deregister_one(number) {
                self.failed -= 1;
            }
        }
    }

    fn enter_into_books(&mut self, writer: &mut Writer) {
        writer.counts.deregistration_failures += self.failed as u64;
        writer.counts.deregistrations += (self.gone.len() - self.failed) as u64;
        let left: HashSet<u32> = self.gone.iter().chain(&self.ahead).copied().collect();
        writer.leaving.retain(|number| !left.contains(number));
        self.gone.iter().for_each(|&number| self.shared.free_place(writer, number));
        writer.dead.append(&mut self.ahead);
        self.shared.note_departure(writer);
    }
}

impl<R: Registrar, M: Monitor> Drop for Departure<'_, R, M> {
    fn drop(&mut self) {
        let shared = self.shared;
        shared.locked(|writer| self.enter_into_books(writer));
    }
}

/// Notes who is leaving, for those who want to know when they are gone.
fn claim(writer: &mut Writer, numbers: Vec<u32>) -> Leaving {
    writer.leaving.extend_from_slice(&numbers);
    Leaving(numbers)
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

    /// Works until the cache is dropped. Sleeps while there is nothing to do.
    ///
    /// The bell is read before the work, so whatever happens during the work wakes the next
    /// round.
    pub fn run(self) {
        loop {
            let seen = self.shared.monitor.bell();
            if self.shared.is_closed() {
                return;
            }
            self.shared.reclaim();
            self.shared.monitor.wait(seen);
        }
    }
}

impl<R: Registrar, M: Monitor> std::fmt::Debug for Reclaimer<R, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").finish_non_exhaustive()
    }
}
