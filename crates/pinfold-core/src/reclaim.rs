//! Giving registrations back: promptly when invalidated, for room when idle, never under a lock.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the handle of a region that has no lease and whose
//! deregistration has been claimed.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::budget::{Amount, Lender};
use crate::hazard::InUse;
use crate::monitor::Monitor;
use crate::order::{Order, Seen};
use crate::queues::Queue;
use crate::region::{Region, Status};
use crate::registrar::Registrar;
use crate::shared::{Shared, Writer};
use crate::sync::{self, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How long the reclaimer lets work gather once there is some.
///
/// Telling whether regions are leased costs a barrier on every thread that runs, ten microseconds
/// where threads run on several virtual processors, and waking the reclaimer costs the waker about
/// one; gathered, both are paid once for all regions of that time. An invalidated region stays
/// pinned so much longer.
const GATHER: Duration = Duration::from_micros(200);
/// At most so many regions stand by at once...
const MOST_STANDBY: usize = 64;
/// ...and at most one in so many.
const STANDBY_SHARE: usize = if sync::EXPLORED { 1 } else { 64 };

/// Regions whose deregistration is the holder's duty: no lease is left, nobody can find them,
/// and nobody else holds this duty.
#[must_use]
struct Leaving<'c, H>(Vec<&'c Region<H>>);

impl<R: Registrar, M: Monitor> Shared<R, M> {
    /// Applies news, then deregisters every region that is neither findable nor leased.
    ///
    /// Says how many there were.
    pub(crate) fn reclaim(&self) -> usize {
        self.give_back(|writer| self.claim_dead(writer))
    }

    /// Applies news, then deregisters what `claim` takes over. Says how many regions that were.
    fn give_back<'c>(&'c self, claim: impl FnOnce(&mut Writer) -> Leaving<'c, R::Handle>) -> usize {
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
        self.settle();
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
    fn claim_dead(&self, writer: &mut Writer) -> Leaving<'_, R::Handle> {
        writer.answer_call();
        let mut dead = self.unlooked(writer);
        if dead.is_empty() {
            return Leaving(dead);
        }
        // Relaxed: the barriers of `in_use` and of those who look order it.
        self.awaiting.store(true, Ordering::Relaxed);
        let in_use = self.in_use(writer);
        // Without a barrier everything stays where it is, for another try.
        dead.retain(|region| in_use.is_known() && part(writer, region, &in_use));
        let leased = writer.queues.len(Queue::Leased) + writer.queues.len(Queue::SupersededLeased);
        // Relaxed: nobody's end is missed who is not waited for.
        self.awaiting.store(leased > 0, Ordering::Relaxed);
        Leaving(dead)
    }

    /// The dead regions that nobody has looked at.
    fn unlooked(&self, writer: &Writer) -> Vec<&Region<R::Handle>> {
        let queues = [Queue::Dead, Queue::Superseded];
        let count = queues.iter().map(|&queue| writer.queues.len(queue)).sum();
        let mut dead = Vec::with_capacity(count);
        let numbers = queues.iter().flat_map(|&queue| writer.queues.iter(queue));
        dead.extend(numbers.filter_map(|number| self.region(number)));
        dead
    }

    /// A lease of `region` ended, and the light barrier has run since: hands the region to the
    /// reclaimer again if that found it leased.
    ///
    /// **Why the last lease's end is not lost.** The lease empties its hazard, runs the light
    /// barrier and looks whether any end is awaited. The reclaimer says that it awaits one, runs
    /// the heavy barrier and looks at the hazards. If this look finds nothing awaited, that look
    /// finds the hazard empty, and it is still to come: a dead region that nobody has looked at has
    /// been handed to the reclaimer by whoever took it out of the index. If one was awaited, the
    /// reclaimer may have found this region leased and set it aside, which it has done by the time
    /// the lock is had here, and it stays there, dead, until somebody says so. The place may hold
    /// another region if this one was not set aside; then that one is looked at once more, or
    /// nothing happens.
    #[inline]
    pub(crate) fn say_if_awaited(&self, region: &Region<R::Handle>) {
        // Relaxed: the light barrier that ran before orders it.
        if region.status() != Status::Live && self.awaiting.load(Ordering::Relaxed) {
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
    pub(crate) fn free_some(&self, shortage: Amount) -> bool {
        let count = self.give_back(|writer| match self.claim_dead(writer) {
            Leaving(idle) if idle.is_empty() => self.evict(writer, shortage),
            dead => dead,
        });
        // What another thread is giving back is room to come.
        count > 0 || self.wait_for_departure()
    }

    /// Gives up everything idle, and waits for what others are giving back. Says how many were
    /// given back here.
    pub(crate) fn evict_idle(&self) -> usize {
        let count =
            self.reclaim() + self.give_back(|writer| self.evict(writer, Amount::EVERYTHING));
        while self.wait_for_departure() {}
        count
    }

    /// Gives up what is idle and touches `range`. Says how many were given back here.
    pub(crate) fn evict_idle_in(&self, range: AddressRange) -> usize {
        self.give_back(|writer| self.evict_in(writer, range))
    }

    /// Takes those regions out of the index.
    ///
    /// What stands by for room was found idle when it began to stand by, and leaves that queue with
    /// its next lease; so it is idle, and the hazards are not asked again: a lookup that does not
    /// become a lease would look like one. All others are made unfindable before the look.
    fn evict_in(&self, writer: &mut Writer, range: AddressRange) -> Leaving<'_, R::Handle> {
        let mut numbers = Vec::new();
        self.findable_in(range, &mut numbers);
        let regions = numbers.into_iter().filter_map(|number| self.region(number));
        let (mut idle, others): (Vec<_>, Vec<_>) = regions
            .filter(|region| region.findable().is_some())
            .partition(|region| writer.queues.queue_of(region.number) == Some(Queue::Standby));
        others.iter().for_each(|region| region.set(Status::Standby));
        let in_use = self.in_use(writer);
        for region in others {
            if in_use.contains(region) {
                writer.set_findable(region);
            } else {
                idle.push(region);
            }
        }
        let mut made = Amount::EVERYTHING;
        idle.iter().for_each(|region| self.give_up(writer, region, &mut made));
        writer.counts.evictions += idle.len() as u64;
        Leaving(idle)
    }

    /// Takes idle regions out of the index until they make up for `shortage`.
    ///
    /// Whether a region is idle can only be told after it was made unfindable, and each telling
    /// costs a heavy barrier. So several are made to stand by at once, growing numbers of them if
    /// they turn out to be leased, and those that are not needed now are the next to go. A `get`
    /// that wants one meanwhile finds it under the lock, and it is proven.
    fn evict(&self, writer: &mut Writer, shortage: Amount) -> Leaving<'_, R::Handle> {
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        let mut missing = shortage;
        let mut batch = standby_batch(writer);
        while missing != Amount::ZERO {
            let standing_by = writer.queues.first(Queue::Standby);
            if let Some(region) = standing_by.and_then(|number| self.region(number)) {
                self.give_up(writer, region, &mut missing);
                idle.push(region);
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
    fn give_up(&self, writer: &mut Writer, region: &Region<R::Handle>, missing: &mut Amount) {
        writer.queues.put(Queue::Leaving, region.number);
        region.set(Status::Retired);
        let Some(range) = region.range() else { return };
        self.index.remove(&mut writer.recycler, range, region.number);
        *missing = *missing - self.amount(range);
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
                writer.set_findable(region);
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
        Seen::new(region.map_or(0, Region::used), start)
    }

    /// A lease that was alone on its region ended.
    pub(crate) fn end_per_use(&self, region: &Region<R::Handle>) {
        let (leaving, due) = self.locked_deferring(|writer| {
            writer.per_use.retain(|&(other, _)| other != region.number);
            writer.queues.put(Queue::Leaving, region.number);
            Leaving(vec![region])
        });
        self.deregister(leaving);
        drop(due);
        self.settle();
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
    fn deregister(&self, Leaving(regions): Leaving<'_, R::Handle>) -> usize {
        // What a forked child inherited is its parent's to give back.
        if regions.is_empty() || self.monitor.forked() {
            return 0;
        }
        let count = regions.len();
        Departure { shared: self, regions, gone: 0, failed: 0 }.run();
        count
    }

    /// False if the device could not.
    fn deregister_one(&self, region: &Region<R::Handle>) -> bool {
        let Some(range) = region.range() else { return false };
        // SAFETY: the caller holds the duty to deregister this region.
        let handle = unsafe { region.handle() };
        self.registrar.deregister(handle, range).is_ok()
    }

    /// The books after a deregistration.
    pub(crate) fn free_place(&self, writer: &mut Writer, region: &Region<R::Handle>) {
        let number = region.number;
        writer.queues.remove(number);
        let bytes = region.range().map_or(0, |range| self.footprint(range));
        self.give_budget(writer, Amount::one(bytes));
        writer.watchers.deregistered(number);
        region.set(Status::Free);
        writer.free_places.push(number);
    }

    /// Deregisters everything: the cache is being dropped, so no lease can be used any more.
    ///
    /// What is being given back already is in other hands: a callback may drop the cache. A
    /// registrar that panics is not given the same again but all the others; then the panic goes
    /// on, unless there is one already.
    pub(crate) fn deregister_all(&self) {
        let rest = || catch_unwind(AssertUnwindSafe(|| self.deregister_rest()));
        let Err(panic) = rest() else { return };
        // Each of these has given back one more at least.
        while rest().is_err() {}
        if !std::thread::panicking() {
            resume_unwind(panic);
        }
    }

    /// Deregisters what is registered and in nobody's hands.
    fn deregister_rest(&self) {
        let (leaving, due) = self.locked_deferring(|writer| {
            let numbers = 0..writer.made_places;
            let filled = numbers.filter_map(|number| self.region(number)).filter(is_filled);
            let stays = |region: &&Region<R::Handle>| {
                writer.queues.queue_of(region.number) != Some(Queue::Leaving)
            };
            let regions: Vec<_> = filled.filter(stays).collect();
            for region in &regions {
                self.withdraw_from_index(writer, region);
                writer.queues.put(Queue::Leaving, region.number);
            }
            writer.per_use = Vec::new();
            Leaving(regions)
        });
        self.deregister(leaving);
        drop(due);
        self.settle();
    }

    fn withdraw_from_index(&self, writer: &mut Writer, region: &Region<R::Handle>) {
        if let Some((range, _)) = region.findable() {
            self.index.remove(&mut writer.recycler, range, region.number);
        }
    }
}

/// For those who draw on the same budget.
impl<R: Registrar, M: Monitor> Lender for Shared<R, M> {
    fn give_back(&self, missing: Amount) -> bool {
        // In a forked child nothing here is anybody's to give.
        !self.monitor.forked() && self.free_some(missing)
    }

    fn budget_changed(&self, from: Amount, to: Amount) {
        self.note_budget(from, to);
    }
}

/// Moves a dead region on: among those leased (false), or on its way out.
fn part<H: Copy + 'static>(writer: &mut Writer, region: &Region<H>, in_use: &InUse) -> bool {
    let leased = in_use.contains(region);
    let queue = match region.status() {
        _ if !leased => Queue::Leaving,
        Status::Retired => Queue::SupersededLeased,
        _ => Queue::Leased,
    };
    writer.queues.put(queue, region.number);
    !leased
}

fn is_filled<H: Copy>(region: &&Region<H>) -> bool {
    region.status() != Status::Free
}

/// How many regions are made to stand by at once.
fn standby_batch(writer: &Writer) -> usize {
    (writer.held.regions / STANDBY_SHARE).clamp(1, MOST_STANDBY)
}

/// Registrations on their way back to the device. Keeps the books right also when the registrar
/// panics: the one it was given is gone, those behind it are the reclaimer's again.
struct Departure<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    regions: Vec<&'c Region<R::Handle>>,
    /// How many of them the device was given.
    gone: usize,
    /// How many of those it could not give back.
    failed: usize,
}

impl<R: Registrar, M: Monitor> Departure<'_, R, M> {
    fn run(mut self) {
        while let Some(&region) = self.regions.get(self.gone) {
            // Forked inside the registrar: the rest is the parent's to give back.
            if self.shared.monitor.forked() {
                return;
            }
            self.gone += 1;
            self.failed += 1;
            if self.shared.deregister_one(region) {
                self.failed -= 1;
            }
        }
    }

    fn enter_into_books(&self, writer: &mut Writer) {
        writer.counts.deregistration_failures += self.failed as u64;
        writer.counts.deregistrations += (self.gone - self.failed) as u64;
        let (gone, ahead) = self.regions.split_at(self.gone);
        gone.iter().for_each(|region| self.shared.free_place(writer, region));
        ahead.iter().for_each(|region| writer.bury(Queue::Dead, region.number));
        self.shared.note_departure(writer);
    }
}

impl<R: Registrar, M: Monitor> Drop for Departure<'_, R, M> {
    fn drop(&mut self) {
        if !self.shared.monitor.forked() {
            self.shared.locked(|writer| self.enter_into_books(writer));
        }
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
    /// once, and what is to be given back is left to gather for a fifth of a millisecond.
    ///
    /// The bell is read before the work, so whatever happens during the work wakes the next
    /// round: also what a registrar that panicked left to be done.
    pub fn run(self) {
        loop {
            let seen = self.shared.monitor.bell();
            if self.shared.is_closed() {
                return;
            }
            // A registrar that panics costs its own registration, which is not given to it again;
            // the others must not stay pinned because of it.
            let _panicked = catch_unwind(AssertUnwindSafe(|| self.work()));
            // A child that was forked by a callback on this thread, and came back from it, has no
            // other thread; nobody would ever ring.
            if self.shared.monitor.forked() {
                return;
            }
            self.shared.monitor.wait(seen);
        }
    }

    fn work(&self) {
        if self.shared.finds_dead() {
            sync::thread::sleep(GATHER);
            self.shared.reclaim();
        }
    }
}

impl<R: Registrar, M: Monitor> std::fmt::Debug for Reclaimer<R, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use crate::barrier::Barriers;
    use crate::coverage::{Change, Cover, MappingKind};
    use crate::monitor::{Lost, Monitor, Position, Replay, Sequence, Watch};
    use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits};
    use crate::{Access, AddressRange, Cache, Config, Lease};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

    /// A device that numbers its registrations and remembers which it gave back.
    #[derive(Default)]
    struct Device {
        next: AtomicU32,
        gone: Mutex<Vec<u32>>,
    }

    impl Registrar for Device {
        type Handle = u32;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 30, max_regions: 1 << 20 }
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
            Ok(self.next.fetch_add(1, SeqCst))
        }

        fn deregister(&self, handle: u32, _: AddressRange) -> Result<(), DeregisterError> {
            self.gone.lock().unwrap().push(handle);
            Ok(())
        }
    }

    /// Nothing ever changes.
    struct Calm;

    // SAFETY: the simulated memory does not change.
    unsafe impl Monitor for Calm {
        fn name(&self) -> &'static str {
            "calm"
        }

        fn check(&self) -> Result<Sequence, Lost> {
            Ok(Sequence(2))
        }

        fn watch(&self, _: AddressRange) -> Watch {
            Watch::Covered
        }

        fn in_flux(&self, _: AddressRange) -> bool {
            false
        }

        fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
            Replay { up_to: Position(0, 0), sequence: Sequence(2), complete: true }
        }

        fn coverage(&self, _: MappingKind, _: Change) -> Cover {
            Cover::Seen
        }

        fn forked(&self) -> bool {
            false
        }

        fn bell(&self) -> u32 {
            0
        }

        fn ring(&self) {}

        fn wait(&self, _: u32) {}
    }

    fn page(number: usize) -> AddressRange {
        AddressRange::new(0x7000_0000 + number * 4096, 4096).unwrap()
    }

    fn get(cache: &Cache<Device, Calm>, number: usize) -> Lease<'_, Device, Calm> {
        let start = std::ptr::without_provenance(page(number).start());
        // SAFETY: the device touches no memory.
        unsafe { cache.get(start, 4096, Access::READ) }.unwrap()
    }

    /// A full cache in which page 0 was evicted and page 1 is the next to go.
    fn full_cache(barriers: Barriers) -> Cache<Device, Calm> {
        let config = Config { max_regions: 128, barriers, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..129).for_each(|number| drop(get(&cache, number)));
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [0]);
        cache
    }

    /// Page 1 is leased, then room is needed: its registration must not go.
    fn assert_a_lease_keeps(cache: &Cache<Device, Calm>) {
        let lease = get(cache, 1);
        let before = lease.handle();
        (500..600).for_each(|number| drop(get(cache, number)));
        assert_eq!(lease.handle(), before, "the place holds another region");
        assert!(!cache.registrar().gone.lock().unwrap().contains(&before), "given back");
    }

    /// A lookup that passes by, at the moment at which what is idle in a range is given up, keeps
    /// nothing in the eviction list that can be leased.
    #[test]
    fn a_transient_hazard_does_not_make_an_idle_region_leasable_in_the_eviction_list() {
        let cache = full_cache(Barriers::SYMMETRIC);
        let mut numbers = Vec::new();
        cache.shared.findable_in(page(1), &mut numbers);
        let region = cache.shared.region(numbers[0]).unwrap();
        let hazard = cache.shared.hazards.slot().unwrap().protect(region);
        cache.evict_idle_in(page(1));
        hazard.clear();
        assert_a_lease_keeps(&cache);
    }

    /// The same where the system refuses the barrier from some moment on.
    #[test]
    fn a_refused_barrier_does_not_make_an_idle_region_leasable_in_the_eviction_list() {
        static OFFERED: AtomicBool = AtomicBool::new(true);
        // SAFETY: one thread alone uses this cache, which is in order with itself.
        let barriers = unsafe { Barriers::asymmetric(|| OFFERED.load(SeqCst)) };
        let cache = full_cache(barriers);
        OFFERED.store(false, SeqCst);
        cache.evict_idle_in(page(1));
        OFFERED.store(true, SeqCst);
        assert_a_lease_keeps(&cache);
    }
}
