//! Giving registrations back: promptly when invalidated, for room when idle, never under a lock.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the handle of a region that has no lease and whose
//! deregistration has been claimed.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::budget::{Amount, Lender};
use crate::clock::since;
use crate::foreign::{self, discard, runs_through};
use crate::hazard::{Idle, Scanned, Unpublished};
use crate::index::Rest;
use crate::monitor::Monitor;
use crate::region::{Deregistering, List, Lists, Region, State};
use crate::registrar::Registrar;
use crate::shared::{SLICE, Scanner, Shared, Writer, operations};
use crate::sync::{self, thread_local};
use crate::unapplied::ChangeCount;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// How long the reclaimer lets work gather once there is some.
///
/// Telling whether regions are leased costs a barrier on every thread that runs, ten microseconds
/// where threads run on several virtual processors, and waking the reclaimer costs the waker about
/// one; gathered, both are paid once for all regions of that time. An invalidated region stays
/// pinned so much longer.
const GATHER: Duration = Duration::from_micros(200);
/// At first at most so many regions are examined at once...
const MOST_EXAMINED: usize = HALF;
/// ...and at most one in so many.
const EXAMINED_SHARE: usize = if sync::EXPLORED { 1 } else { 64 };

/// Once so many regions were looked at, under one hold of the lock, for those that were not used of late, no further
/// one is looked for.
const MOST_LOOKS: usize = 4 * SLICE;

/// Regions whose deregistration is the holder's duty.
type Duties<'c, H> = Vec<Deregistering<'c, H>>;

/// Regions with the proof that no lease is left and none can come.
type Proofs<'c, H> = Vec<Idle<'c, Region<H>>>;

/// What was taken over before the writer's lock was given back for good.
struct Slice<'c, H> {
    duties: Duties<'c, H>,
    /// Whether the end of the slice is all that ended it.
    is_cut: bool,
}

/// The lock, and what was taken over.
type Claim<'c, H> = (Scanner<'c>, Slice<'c, H>);

/// The same, in the memory that they stand in: each may be taken.
fn each<H>(duties: Duties<'_, H>) -> Vec<Option<Deregistering<'_, H>>> {
    duties.into_iter().map(Some).collect()
}

impl<H> Slice<'_, H> {
    const fn nothing() -> Self {
        Self { duties: Vec::new(), is_cut: false }
    }
}

operations! {
    /// Giving registrations back.
    Reclaim
}

impl<'c, R: Registrar, M: Monitor> Reclaim<'c, R, M> {
    /// Applies the changes that were reported until now, then deregisters every region that is neither findable
    /// nor leased. Says how many there were.
    pub(crate) fn reclaim(self) -> usize {
        self.0.await_log();
        self.reclaim_logged()
    }

    /// The same with the changes that stand in the log.
    ///
    /// What becomes unfindable meanwhile is left to the next call: this one ends, whatever other threads do.
    fn reclaim_logged(self) -> usize {
        self.give_back(usize::MAX, |scanner| self.claim_unfindable(scanner))
    }

    /// Applies the log, then deregisters what `claim` takes over, slice by slice until `enough` regions
    /// were given back, or all that there were when this began were looked at. Says how many were
    /// given back.
    fn give_back(
        self,
        enough: usize,
        mut claim: impl FnMut(Scanner<'c>) -> Claim<'c, R::Handle>,
    ) -> usize {
        let (mut count, mut goal) = (0, Goal::default());
        loop {
            let slice = self.give_slice_back(|scanner| {
                goal = goal.next(&scanner);
                claim(scanner)
            });
            count += slice.count;
            if count >= enough || !slice.is_cut || goal.is_reached() {
                return count;
            }
        }
    }

    fn give_slice_back(self, claim: impl FnOnce(Scanner<'c>) -> Claim<'c, R::Handle>) -> GivenBack {
        // A forked child's regions are its parent's.
        let Ok(mut scanner) = self.0.lock_to_scan() else { return GivenBack::default() };
        self.0.read_log(&mut scanner);
        let (scanner, Slice { duties, is_cut }) = claim(scanner);
        let due = self.0.release(scanner);
        // Before the callbacks, which may wait for the room that this makes.
        let count = self.deregister(&mut each(duties));
        drop(due);
        self.0.settle();
        GivenBack { count, is_cut }
    }

    /// Whether there is something to give back. In a forked child nothing is.
    fn finds_work(self) -> bool {
        let is_left = self.0.locked(|writer| {
            let is_left = writer.has_unscanned() || !writer.has_applied_all();
            // Called for changes that concerned nothing: the next call must notify again.
            if !is_left {
                writer.answer_call();
            }
            is_left
        });
        is_left == Ok(true)
    }

    /// Takes over the duty for the regions that are not in the index and have no lease.
    ///
    /// Those that are leased are set aside until their last lease's end says so
    /// ([`say_if_awaited`](Shared::say_if_awaited)), so that a lease held long costs this nothing.
    fn claim_unfindable(self, mut scanner: Scanner<'c>) -> Claim<'c, R::Handle> {
        scanner.answer_call();
        let unfindable = self.await_unscanned(&mut scanner);
        let (mut scanner, duties, known) = if unfindable.is_empty() {
            (scanner, Vec::new(), true)
        } else {
            self.claim_scanned(scanner, unfindable)
        };
        let is_cut = known && scanner.has_unscanned() || !scanner.has_applied_all();
        // What is left is for another thread to do, and this call may be on one that stops here.
        if is_cut {
            scanner.call_reclaimer();
        }
        (scanner, Slice { duties, is_cut })
    }

    /// Those of a slice that have no lease, and whether anything is known of it: without a barrier
    /// everything goes back to where it was, for another try.
    fn claim_scanned(
        self,
        scanner: Scanner<'c>,
        unfindable: Vec<Unpublished<'c, Region<R::Handle>>>,
    ) -> (Scanner<'c>, Duties<'c, R::Handle>, bool) {
        let (mut duties, mut known) = (Vec::new(), true);
        let scanner = self.0.scan(
            scanner,
            unfindable,
            0,
            |_, _| Vec::new(),
            |writer, found| match found {
                Scanned::Idle(idle) => duties.push(writer.lists.deregister(idle)),
                Scanned::InUse(_) => {}
                Scanned::Unknown(region) => {
                    known = false;
                    writer.lists.look_again(region, false);
                }
            },
        );
        (scanner, duties, known)
    }

    /// Awaits the ends of leases of a slice of the regions that are not in the index and have not been
    /// scanned since, half of it of each list at most, so that neither keeps the other waiting.
    fn await_unscanned(self, writer: &mut Writer) -> Vec<Unpublished<'c, Region<R::Handle>>> {
        let numbers = UNSCANNED.iter().flat_map(|&list| writer.lists.iter(list).take(HALF));
        let numbers: Vec<u32> = numbers.collect();
        let regions = numbers.into_iter().filter_map(|number| self.0.region(number));
        regions.filter_map(|region| writer.lists.await_end(region)).collect()
    }

    /// Gives up idle memory: dead regions first, then as the order of eviction says. False if
    /// nothing could be given up, and nothing went since there had been so many `departures`: when it was
    /// found that there is no room.
    pub(crate) fn free_some(self, shortage: Amount, departures: u64) -> bool {
        let mut batch = 0;
        let count = self.give_back(1, |scanner| {
            let (scanner, unfindable) = self.claim_unfindable(scanner);
            if !unfindable.duties.is_empty() {
                return (scanner, unfindable);
            }
            let (scanner, Slice { duties, is_cut }) = self.evict(scanner, shortage, &mut batch);
            // Behind those that are leased may be one that is not, and what was examined may have changed meanwhile.
            let is_cut = is_cut || unfindable.is_cut || scanner.has_unscanned();
            (scanner, Slice { duties, is_cut })
        });
        // What another thread is giving back is room to come.
        count > 0 || self.wait_for_another(departures)
    }

    /// Gives up everything idle, and waits for what others are giving back. Says how many were
    /// given back here.
    pub(crate) fn evict_idle(self) -> usize {
        let mut batch = 0;
        let evict = |scanner| self.evict(scanner, Amount::EVERYTHING, &mut batch);
        let count = self.reclaim() + self.give_back(usize::MAX, evict);
        if !InsideDeparture::is_any() {
            self.0.wait_for_all_departures();
        }
        count
    }

    /// Waits for what other threads are giving back. False if there is nothing to wait for, and for
    /// a registrar or a clock that calls back into a cache while registrations are given back: what it
    /// waited for might be what this thread is giving back, or wait for that.
    fn wait_for_another(self, departures: u64) -> bool {
        !InsideDeparture::is_any() && self.0.wait_for_departure(departures)
    }

    /// Gives up what is idle and touches `range`. Says how many were given back here.
    pub(crate) fn evict_idle_in(self, range: AddressRange) -> usize {
        let (mut count, mut rest) = (0, Some(Rest::from(range)));
        while let Some(range) = rest.take() {
            let evict = |scanner| {
                let (scanner, duties, left) = self.evict_in(scanner, range);
                rest = left;
                (scanner, Slice { duties, is_cut: false })
            };
            count += self.give_slice_back(evict).count;
        }
        count
    }

    /// Takes those regions out of the index that a part of `range` has. The rest of it.
    ///
    /// What is evictable already needs no scan. All others are examined, as if room was needed.
    fn evict_in(
        self,
        mut scanner: Scanner<'c>,
        range: Rest,
    ) -> (Scanner<'c>, Duties<'c, R::Handle>, Option<Rest>) {
        let mut numbers = Vec::new();
        let rest = self.0.findable_part(range, SLICE, &mut numbers, |_| true).rest;
        let regions = || numbers.iter().filter_map(|&number| self.0.region(number));
        let others = regions().filter(|region| Lists::evictable(region).is_none());
        let others: Vec<_> = others.filter_map(|region| scanner.lists.examine(region)).collect();
        if !others.is_empty() {
            (scanner, _) = self.scan_examined(scanner, others, 0);
        }
        let idle = regions().filter_map(Lists::evictable).collect();
        let mut missing = Amount::EVERYTHING;
        let duties = self.give_up_all(&mut scanner, idle, &mut missing);
        (scanner, duties, rest)
    }

    /// Takes idle regions out of the index until they make up for `shortage`.
    ///
    /// Whether a region is idle can only be told after it was made unfindable, and each scan
    /// costs a heavy barrier and a look at all leases. So several are examined at once, in twice as large a `batch` each
    /// time if they turn out to be leased, and those that are not needed now are the next to go. A `get`
    /// that wants one meanwhile finds it under the lock, and it goes to the main list.
    ///
    /// What is found leased is not examined again before a lease of it has ended: to find that all
    /// is in use costs what was registered or released since that was found.
    fn evict(
        self,
        mut scanner: Scanner<'c>,
        shortage: Amount,
        batch: &mut usize,
    ) -> Claim<'c, R::Handle> {
        let mut slice = Slice::nothing();
        let mut missing = shortage;
        *batch = (*batch).max(examined_at_once(&scanner));
        let (mut room, mut is_new_hold) = (SLICE, true);
        // What is suspended and leased is examined and stays in the order: each is looked at once.
        let mut left: usize =
            [List::Small, List::Main].map(|list| scanner.lists.len(list)).iter().sum();
        while missing != Amount::ZERO {
            slice.is_cut = slice.duties.len() >= SLICE || room == 0;
            let next =
                scanner.lists.first(List::Evictable).and_then(|number| self.0.region(number));
            if slice.is_cut {
                break;
            } else if let Some(idle) = next.and_then(Lists::evictable) {
                let duties = self.give_up_all(&mut scanner, vec![idle], &mut missing);
                slice.duties.extend(duties);
            } else if !is_new_hold {
                // To look at more takes as long again, and nothing is at hand that others could take.
                (scanner, is_new_hold) = (self.0.pause(scanner), true);
            } else {
                let most = left.min(*batch);
                let first = self.examine(&mut scanner, most);
                if first.is_empty() {
                    break;
                }
                *batch = batch.saturating_mul(2);
                let found;
                (scanner, found) = self.scan_examined(scanner, first, most);
                room = room.saturating_sub(found.examined);
                // What came back meanwhile, because a lookup passed by or a lease ended, is looked at again.
                left = left.saturating_sub(found.idle + found.leased);
                if found.unknown > 0 {
                    break;
                }
                is_new_hold = false;
            }
        }
        (scanner, slice)
    }

    /// Takes the next regions out of the order of eviction, for a scan: `most` or what one hold of the lock has time for, or
    /// fewer where it takes many looks to find them.
    fn examine(self, writer: &mut Writer, most: usize) -> Vec<Unpublished<'c, Region<R::Handle>>> {
        let Writer { order, lists, .. } = writer;
        let most = most.min(HALF);
        let (mut examined, mut looks) = (Vec::with_capacity(most), 0);
        while examined.len() < most && looks < MOST_LOOKS {
            match order.pop(lists, &mut looks, |number| self.0.region(number)) {
                Some(next) => examined.push(next),
                None => break,
            }
        }
        examined
    }

    /// Scans what is examined, and what is examined besides until it is `most`. The idle are the next to be evicted. Those
    /// in use leave the order until a lease of them ends.
    fn scan_examined(
        self,
        scanner: Scanner<'c>,
        first: Vec<Unpublished<'c, Region<R::Handle>>>,
        most: usize,
    ) -> (Scanner<'c>, Examined) {
        let (mut examined, mut found) = (first.len(), Examined::default());
        let next = |writer: &mut Writer, most| {
            let next = self.examine(writer, most);
            examined += next.len();
            next
        };
        let scanner = self.0.scan(scanner, first, most, next, |writer, scanned| {
            let (region, keep, count): (_, fn(&mut Lists, &Region<_>, bool), _) = match scanned {
                Scanned::Idle(idle) => {
                    found.idle += 1;
                    return writer.lists.make_evictable(idle);
                }
                Scanned::InUse(region) => (region, Lists::await_room, &mut found.leased),
                Scanned::Unknown(region) => (region, Lists::keep_examined, &mut found.unknown),
            };
            *count += 1;
            region.set_mark(self.0.tick());
            let suspended = writer.is_suspended(region);
            keep(&mut writer.lists, region, suspended);
        });
        (scanner, Examined { examined, ..found })
    }

    /// Takes idle regions out of the index, and over the duty for them: so much less is `missing`.
    fn give_up_all(
        self,
        writer: &mut Writer,
        idle: Proofs<'c, R::Handle>,
        missing: &mut Amount,
    ) -> Duties<'c, R::Handle> {
        writer.counts.evictions += idle.len() as u64;
        let mut give_up = |proof: Idle<'c, Region<R::Handle>>| {
            self.0.note_kept_no_more(writer, proof.item().number);
            if let Some(range) = proof.item().range() {
                self.0.withdraw(writer, range, proof.item().number);
                *missing = *missing - self.0.amount_of(writer, proof.item());
            }
            writer.lists.deregister(proof)
        };
        idle.into_iter().map(&mut give_up).collect()
    }

    /// A lease that was alone on its region ended, and has emptied its slot. Called by a destructor, which
    /// may run because of a panic.
    pub(crate) fn end_per_use(self, region: &'c Region<R::Handle>) {
        if let Err(panicked) = foreign::call(|| self.deregister_per_use(region)) {
            panicked.resume_unless_unwinding();
        }
    }

    fn deregister_per_use(self, region: &'c Region<R::Handle>) {
        let claimed = self.0.locked_deferring(|writer| {
            writer.per_use.remove(&region.number);
            writer.lists.deregister(Idle::behind_its_only_lease(region))
        });
        let Ok((duty, due)) = claimed else { return };
        self.deregister(&mut [Some(duty)]);
        drop(due);
        self.0.settle();
    }

    /// A lease without a hazard ended.
    pub(crate) fn uncount(self, region: &Region<R::Handle>) {
        let place = std::ptr::from_ref(region).addr();
        let _forked = self.0.locked(|writer| {
            if let Some(position) = writer.counted.iter().position(|&other| other == place) {
                writer.counted.swap_remove(position);
            }
        });
    }

    /// Gives registrations back to the device, with no lock held, then their places and their
    /// share of the budget to the cache. Says how many there were.
    ///
    /// What a registrar that panics was not given is the reclaimer's again; behind the end of the cache, which
    /// has passed what was in this thread's hands, it is this thread's.
    fn deregister(self, duties: &mut [Option<Deregistering<'c, R::Handle>>]) -> usize {
        let count = duties.len();
        if let Err(panicked) = foreign::call(|| self.depart(duties)) {
            if self.0.is_closed() {
                // The first panic is the one that goes on.
                let _others = foreign::call(|| self.deregister_all());
            }
            panicked.resume();
        }
        count
    }

    fn depart(self, duties: &mut [Option<Deregistering<'c, R::Handle>>]) {
        if !duties.is_empty() {
            Departure { shared: self.0, duties, gone: 0, failed: 0, took: None }.run();
        }
    }

    /// False if the device could not.
    fn deregister_one(self, duty: &Deregistering<'_, R::Handle>) -> bool {
        let Some(range) = duty.region().range() else { return false };
        // SAFETY: the caller holds the duty to deregister this region.
        let handle = unsafe { duty.region().handle() };
        // SAFETY: registered for this region, and the duty to deregister it exists once: a proof that no
        // lease is left made it.
        unsafe { self.0.registrar.deregister(handle, range) }.is_ok()
    }

    /// The books after a deregistration.
    pub(crate) fn free_place(self, writer: &mut Writer, gone: Deregistering<'_, R::Handle>) {
        let region = gone.region();
        let amount = self.0.forget_amount(writer, region);
        self.0.give_budget(writer, amount);
        writer.watchers.deregistered(region.number);
        writer.lists.free(gone);
    }

    /// Deregisters everything: the cache is being dropped, so no lease can be used any more.
    ///
    /// What is being given back already is in other hands: a callback may drop the cache. A
    /// registrar that panics is not given the same again but all the others; then the first panic goes
    /// on, unless there is one already.
    pub(crate) fn deregister_all(self) {
        let mut first = None;
        // Each round but the last has ended one deregistration more by a panic.
        while self.deregister_rest(&mut first) {}
        if let Some(panicked) = first {
            panicked.resume_unless_unwinding();
        }
    }

    /// Deregisters what is registered and has no holder, slice by slice: a cache that draws on the same
    /// budget may wait for the lock. Whether a registrar panicked before it had all of its slice; `first` is
    /// the first panic of all.
    fn deregister_rest(self, first: &mut Option<foreign::Panicked>) -> bool {
        let (mut next, mut again) = (Some(0), false);
        while let Some(place) = next {
            // Here, because an allocator may go through all that was freed.
            let mut duties = Vec::with_capacity(HALF);
            let claimed =
                self.0.locked_deferring(|writer| self.take_over_slice(writer, place, &mut duties));
            let Ok((rest, due)) = claimed else { return false };
            let deregistered = foreign::call(|| self.depart(&mut each(duties)));
            again |= deregistered.is_err();
            let told = foreign::call(|| drop(due));
            let settled = foreign::call(|| self.0.settle());
            let panics = [deregistered, told, settled].into_iter().filter_map(Result::err);
            panics.for_each(|panicked| _ = first.get_or_insert(panicked));
            next = rest;
        }
        again
    }

    /// Takes over the duty for the regions in a slice of the places from `first` on, of `HALF` at most. Where the next
    /// slice begins.
    #[allow(clippy::cast_possible_truncation)] // a slice is short
    fn take_over_slice(
        self,
        writer: &mut Writer,
        first: u32,
        duties: &mut Duties<'c, R::Handle>,
    ) -> Option<u32> {
        let end = writer.made_places.min(first.saturating_add(HALF as u32));
        let regions = (first..end).filter_map(|number| self.0.region(number));
        duties.extend(regions.filter_map(|region| self.take_over(writer, region)));
        (end < writer.made_places).then_some(end)
    }

    /// Takes over the duty for a region of a cache that is being dropped, unless it is in other
    /// hands.
    fn take_over(
        self,
        writer: &mut Writer,
        region: &'c Region<R::Handle>,
    ) -> Option<Deregistering<'c, R::Handle>> {
        match region.state() {
            State::Free | State::Deregistering => return None,
            state if state.is_indexed() => {
                let range = region.range()?;
                self.0.withdraw(writer, range, region.number);
                writer.lists.supersede(region);
            }
            _ => _ = writer.per_use.remove(&region.number),
        }
        Some(writer.lists.deregister(Idle::of_a_dropped_cache(region)))
    }
}

/// For those who draw on the same budget.
impl<R: Registrar, M: Monitor> Lender for Shared<R, M> {
    fn give_back(&self, missing: Amount) -> bool {
        Reclaim(self).free_some(missing, self.departures())
    }

    fn budget_changed(&self, from: Amount, to: Amount) {
        self.note_budget(from, to);
    }
}

/// How many regions were taken out of the order of eviction for a scan, and how many of them it found so. To the others
/// something happened meanwhile.
#[derive(Default)]
struct Examined {
    examined: usize,
    idle: usize,
    leased: usize,
    unknown: usize,
}

/// What came of one hold of the lock.
#[derive(Default)]
struct GivenBack {
    count: usize,
    is_cut: bool,
}

/// What there was to do when several slices began: what comes while they go on is not theirs.
#[derive(Clone, Copy, Default)]
struct Goal {
    /// How many changes there were.
    made: Option<ChangeCount>,
    /// How many slices are left of what there was when those were applied.
    left: Option<usize>,
}

impl Goal {
    /// The goal behind one more slice. News have been applied, some of them.
    fn next(self, writer: &Writer) -> Self {
        let mut made = self.made;
        let left = match self.left {
            Some(left) => Some(left.saturating_sub(1)),
            None => writer.are_applied(&mut made).then(|| writer.slices()),
        };
        Self { made, left }
    }

    fn is_reached(self) -> bool {
        self.left == Some(0)
    }
}

/// The lists of the regions that are not in the index and have not been scanned since.
const UNSCANNED: [List; 2] = [List::Invalidated, List::Superseded];

/// What a slice has of each of them at most.
const HALF: usize = SLICE / UNSCANNED.len();

impl Writer {
    fn has_unscanned(&self) -> bool {
        UNSCANNED.iter().any(|&list| self.lists.len(list) > 0)
    }

    /// How many slices it takes at most to give up every region that is idle, as far as is known: a slice
    /// that is cut has examined or given up `HALF` of each at least, and each is examined once and given
    /// up once.
    fn slices(&self) -> usize {
        let in_order = [List::Small, List::Main, List::Evictable].into_iter();
        let in_order: usize = in_order.map(|list| self.lists.len(list)).sum();
        let longest = UNSCANNED.iter().map(|&list| self.lists.len(list)).max();
        1 + longest.unwrap_or(0).div_ceil(HALF) + in_order.div_ceil(HALF)
    }
}

/// How many regions are examined at once.
fn examined_at_once(writer: &Writer) -> usize {
    (writer.held.regions / EXAMINED_SHARE).clamp(1, MOST_EXAMINED)
}

// How many times this thread is giving registrations back, of whatever cache.
#[cfg(not(any(loom, shuttle)))]
thread_local! {
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}
#[cfg(any(loom, shuttle))]
thread_local! {
    static INSIDE: Cell<usize> = Cell::new(0);
}

/// This thread is giving registrations back: registrars and clocks are called from here.
struct InsideDeparture;

impl InsideDeparture {
    fn enter() -> Self {
        // Not while the thread is being torn down: then a call from inside waits.
        let _gone = INSIDE.try_with(|inside| inside.set(inside.get() + 1));
        Self
    }

    /// Whether this thread holds what it would wait for.
    fn is_any() -> bool {
        INSIDE.try_with(|inside| inside.get() > 0).unwrap_or(false)
    }
}

impl Drop for InsideDeparture {
    fn drop(&mut self) {
        let _gone = INSIDE.try_with(|inside| inside.set(inside.get().saturating_sub(1)));
    }
}

/// Registrations on their way back to the device. Keeps the books right also when the registrar
/// panics: the one it was given is gone, those behind it are the reclaimer's again.
struct Departure<'d, 'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    /// Each is taken out as it is entered into the books.
    duties: &'d mut [Option<Deregistering<'c, R::Handle>>],
    /// How many of them the device has been given: the first.
    gone: usize,
    /// How many of those it could not give back.
    failed: usize,
    /// How long the latest of those took, if it was measured.
    took: Option<u64>,
}

impl<R: Registrar, M: Monitor> Departure<'_, '_, R, M> {
    fn run(mut self) {
        let _inside = InsideDeparture::enter();
        while let Some(duty) = self.duties.get(self.gone).and_then(Option::as_ref) {
            if let Some(range) = duty.region().range() {
                // In a forked child it is the parent's, as below.
                let _forked = self.shared.erase(range, duty.region().number);
            }
            let is_timed = self.shared.is_sampled();
            let began = self.shared.now_if(is_timed);
            // Forked inside the registrar or the clock: the rest is the parent's to give back.
            if self.shared.is_forked() {
                return;
            }
            // Before the call: what a registrar is given that panics is gone.
            (self.gone, self.failed, self.took) = (self.gone + 1, self.failed + 1, None);
            if Reclaim(self.shared).deregister_one(duty) {
                self.failed -= 1;
            }
            self.took = since(began, self.shared.now_if(is_timed));
        }
    }

    fn enter_into_books(&mut self, writer: &mut Writer) {
        writer.counts.deregistration_failures += self.failed as u64;
        writer.counts.deregistrations += (self.gone - self.failed) as u64;
        let (gone, ahead) = self.duties.split_at_mut(self.gone);
        let latest = gone.last().and_then(Option::as_ref).and_then(|duty| duty.region().range());
        let measured = latest.zip(self.took);
        measured.into_iter().for_each(|(range, took)| writer.costs.deregistered(range, took));
        let gone = gone.iter_mut().filter_map(Option::take);
        gone.for_each(|gone| Reclaim(self.shared).free_place(writer, gone));
        for undone in ahead.iter_mut().filter_map(Option::take) {
            writer.lists.hand_back(undone);
            writer.call_reclaimer();
        }
        writer.note_departure();
    }
}

impl<R: Registrar, M: Monitor> Drop for Departure<'_, '_, R, M> {
    fn drop(&mut self) {
        // In a forked child they are the parent's.
        let _forked = self.shared.locked(|writer| self.enter_into_books(writer));
    }
}

/// Deregisters invalidated memory as soon as its last lease ends, on a thread of its own.
///
/// Made by [`Cache::start_reclaimer`](crate::Cache::start_reclaimer).
pub struct Reclaimer<R: Registrar, M: Monitor> {
    shared: Arc<Shared<R, M>>,
}

#[cfg(not(any(loom, shuttle)))]
thread_local! {
    static RECLAIMS: Cell<bool> = const { Cell::new(false) };
}
#[cfg(any(loom, shuttle))]
thread_local! {
    static RECLAIMS: Cell<bool> = Cell::new(false);
}

/// This thread is a reclaimer's, of whichever cache: callbacks that drop caches run here. It has what was before, because
/// a callback may run another cache's reclaimer.
pub(crate) struct ReclaimingThread(bool);

impl ReclaimingThread {
    fn enter() -> Self {
        Self(RECLAIMS.with(|reclaims| reclaims.replace(true)))
    }

    /// Whether the calling thread is one.
    pub(crate) fn is_this() -> bool {
        RECLAIMS.try_with(Cell::get).unwrap_or_default()
    }
}

impl Drop for ReclaimingThread {
    fn drop(&mut self) {
        RECLAIMS.with(|reclaims| reclaims.set(self.0));
    }
}

impl<R: Registrar, M: Monitor> Reclaimer<R, M> {
    pub(crate) fn new(shared: Arc<Shared<R, M>>) -> Self {
        Self { shared }
    }

    /// Works until the cache is dropped. Sleeps while there is nothing to do; news are applied at
    /// once, and what is to be given back is left to gather for a fifth of a millisecond.
    ///
    /// The count is read before the work, so whatever happens during the work wakes the next
    /// round: also what a registrar that panicked left to be done.
    ///
    /// No panic leaves this thread, where none could go on: not one of the monitor, which ends the work, nor those of
    /// what the cache leaves to it.
    pub fn run(self) {
        let _here = ReclaimingThread::enter();
        let _ran_through = runs_through(|| self.work_until_closed());
        discard(self);
    }

    fn work_until_closed(&self) {
        loop {
            let seen = self.shared.monitor.notified();
            if self.shared.is_closed() {
                return;
            }
            // A registrar that panics costs its own registration, which is not given to it again;
            // the others must not stay pinned because of it.
            let mut is_news = false;
            let _ran_through = runs_through(|| is_news = self.work());
            // A child that was forked by a callback on this thread, and came back from it, has no
            // other thread; no thread would ever ring.
            if self.shared.is_forked() {
                return;
            }
            // A monitor is asked whether it sees anything still when it has said nothing new.
            if !is_news {
                self.shared.monitor.wait(seen);
            }
        }
    }

    /// A round. Whether there were changes in the log.
    fn work(&self) -> bool {
        let is_news = self.shared.apply_log() == Ok(true);
        if !is_news {
            self.shared.await_log();
        }
        if Reclaim(&self.shared).finds_work() {
            sync::thread::sleep(GATHER);
            Reclaim(&self.shared).reclaim_logged();
        }
        is_news
    }
}

impl<R: Registrar, M: Monitor> std::fmt::Debug for Reclaimer<R, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reclaimer").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests {
    use super::{InsideDeparture, Reclaim, Reclaimer, ReclaimingThread, State, each};
    use crate::barrier::Barriers;
    use crate::budget::Amount;
    use crate::coverage::{Change, Cover, MappingKind};
    use crate::foreign;
    use crate::monitor::{Lost, Monitor, Position, Replay, Sequence, Watch};
    use crate::region::List;
    use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits};
    use crate::suspended_ranges::Gets;
    use crate::watchers::Completion;
    use crate::{Access, AddressRange, Cache, Config, Lease};
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    /// A device that numbers its registrations and remembers which it gave back.
    #[derive(Default)]
    struct Device {
        next: AtomicU32,
        gone: Mutex<Vec<u32>>,
        /// Before it gives one of these back it waits for a word, or for the end of the sender.
        slow: Mutex<HashMap<u32, Receiver<()>>>,
    }

    // SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
    unsafe impl Registrar for Device {
        type Handle = u32;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 30, max_regions: 1 << 20 }
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> {
            Ok(self.next.fetch_add(1, SeqCst))
        }

        unsafe fn deregister(&self, handle: u32, _: AddressRange) -> Result<(), DeregisterError> {
            let meanwhile = ON_DEREGISTER.take();
            if let Some(mut meanwhile) = meanwhile {
                meanwhile();
                ON_DEREGISTER.set(Some(meanwhile));
            }
            let slow = self.slow.lock().unwrap().remove(&handle);
            let _over = slow.map(|word| word.recv());
            self.gone.lock().unwrap().push(handle);
            assert!(!PANICS.replace(false), "the device fails once");
            Ok(())
        }
    }

    /// Nothing ever changes.
    pub(crate) struct Calm;

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

        fn change_pending(&self, _: AddressRange) -> bool {
            false
        }

        fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
            Replay {
                up_to: Position(0, 0),
                sequence: Sequence(2),
                complete: true,
                may_repeat: false,
            }
        }

        fn coverage(&self, _: MappingKind, _: Change) -> Cover {
            Cover::Detected
        }

        fn forked(&self) -> bool {
            false
        }

        fn notified(&self) -> u32 {
            0
        }

        fn notify(&self) {
            NOTIFIED.set(NOTIFIED.get() + 1);
        }

        fn wait(&self, _: u32) {
            ON_WAIT.take().into_iter().for_each(|f| f());
        }
    }

    thread_local! {
        /// How often this thread notified the reclaimer.
        static NOTIFIED: Cell<usize> = const { Cell::new(0) };
        /// What is done where this thread, as a reclaimer, would sleep.
        static ON_WAIT: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
        /// What is done before this thread gives a registration back.
        static ON_DEREGISTER: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
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
        const ROOM: usize = if cfg!(miri) { 16 } else { 128 };
        let config = Config { max_regions: ROOM, barriers, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..=ROOM).for_each(|number| drop(get(&cache, number)));
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [0]);
        cache
    }

    thread_local! {
        static BARRIER_IS_REFUSED: Cell<bool> = const { Cell::new(false) };
    }

    /// A system that refuses barriers for a while: what was unpublished meanwhile is idle all the same.
    #[test]
    fn what_a_refused_barrier_left_is_deregistered_behind_the_next() {
        // SAFETY: one thread alone uses this cache, which is in order with itself.
        let barriers = unsafe { Barriers::asymmetric(|| !BARRIER_IS_REFUSED.get()) };
        let cache = full_cache(barriers);
        BARRIER_IS_REFUSED.set(true);
        cache.invalidate(page(5));
        let notified = NOTIFIED.get();
        cache.reclaim();
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [0], "nothing is known");
        assert_eq!(NOTIFIED.get(), notified, "the reclaimer would try without end");
        BARRIER_IS_REFUSED.set(false);
        cache.reclaim();
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [0, 5]);
    }

    /// The same where room is needed: what was examined in vain is examined again.
    #[test]
    fn what_a_refused_barrier_left_is_evicted_behind_the_next() {
        // SAFETY: as above.
        let barriers = unsafe { Barriers::asymmetric(|| !BARRIER_IS_REFUSED.get()) };
        let config = Config { max_regions: 4, barriers, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..4).for_each(|number| drop(get(&cache, number)));
        BARRIER_IS_REFUSED.set(true);
        assert!((4..8).all(|number| is_refused(&cache, number)), "nothing is known");
        BARRIER_IS_REFUSED.set(false);
        assert!((8..12).all(|number| !is_refused(&cache, number)));
        assert_eq!(cache.registrar().gone.lock().unwrap().len(), 4);
    }

    thread_local! {
        /// Who is told that the hazards are being scanned, and says when to go on.
        static DURING_SCAN: RefCell<Option<(Sender<()>, Receiver<()>)>> = const { RefCell::new(None) };
    }

    fn scan_and_wait() -> bool {
        let waits = DURING_SCAN.take();
        // Not for ever: where the lock is held meanwhile, nothing is ever said.
        waits.is_none_or(|(began, over)| {
            began.send(()).is_ok() && over.recv_timeout(Duration::from_secs(10)).is_ok()
        })
    }

    fn room_for_four() -> Cache<Device, Calm> {
        // SAFETY: threads that use this cache take turns, which orders all that they store.
        let barriers = unsafe { Barriers::asymmetric(scan_and_wait) };
        let config = Config { max_regions: 4, barriers, ..Config::default() };
        Cache::new(Device::default(), Calm, config).unwrap()
    }

    /// Room for four regions, all of which are there.
    fn four(cache: impl FnOnce(&Cache<Device, Calm>)) {
        let four = room_for_four();
        (0..4).for_each(|number| drop(get(&four, number)));
        cache(&four);
    }

    /// Has `meanwhile` run on another thread while the first scan of `operation` goes on.
    fn during_scan<T: Send>(operation: impl FnOnce(), meanwhile: impl FnOnce() -> T + Send) -> T {
        let ((began, begin), (over, end)) = (channel(), channel());
        DURING_SCAN.set(Some((began, end)));
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                begin.recv().unwrap();
                let result = meanwhile();
                over.send(()).expect("the lock was held meanwhile");
                result
            });
            operation();
            other.join().unwrap()
        })
    }

    /// However many leases there are to look at, other threads go on: also with what is being looked at.
    #[test]
    fn a_region_that_is_leased_while_the_hazards_are_scanned_stays() {
        four(|cache| {
            let lease = during_scan(|| drop(get(cache, 4)), || get(cache, 0));
            assert!(lease.is_cached() && lease.handle() == 0, "it is there still");
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [1]);
            assert_eq!(cache.evict_idle(), 3);
            drop(lease);
            assert_eq!((cache.evict_idle(), cache.statistics().regions), (1, 0));
        });
    }

    /// It may be all that is idle.
    #[test]
    fn a_region_that_came_back_while_the_hazards_were_scanned_is_looked_at_again() {
        let cache = room_for_four();
        drop(get(&cache, 0));
        let _leases = [1, 2, 3].map(|number| get(&cache, number));
        during_scan(|| drop(get(&cache, 4)), || drop(get(&cache, 0)));
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [0]);
    }

    /// The end of a lease, which the scan may have seen, leaves it to be looked at another time.
    #[test]
    fn a_region_of_which_a_lease_ends_while_the_hazards_are_scanned_stays() {
        four(|cache| {
            let lease = get(cache, 0);
            during_scan(|| drop(get(cache, 4)), || drop(lease));
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [1]);
            assert_eq!((cache.evict_idle(), cache.statistics().regions), (4, 0));
        });
    }

    /// It belongs to the reclaimer then, and is deregistered once.
    #[test]
    fn a_region_that_changes_while_the_hazards_are_scanned_is_deregistered_once() {
        four(|cache| {
            during_scan(|| drop(get(cache, 4)), || cache.invalidate(page(0)));
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [1]);
            assert_eq!(cache.reclaim(), 1);
            assert_eq!((cache.evict_idle(), cache.statistics().regions), (3, 0));
            assert_eq!(cache.registrar().gone.lock().unwrap().len(), 5);
        });
    }

    /// A range is evicted, and a part of it is leased, or changes, while that goes on.
    #[test]
    fn a_range_that_is_used_while_the_hazards_are_scanned_is_evicted_in_part() {
        four(|cache| {
            let all = AddressRange::new(page(0).start(), 4 * 4096).unwrap();
            let meanwhile = || {
                cache.invalidate(page(3));
                get(cache, 2)
            };
            let lease = during_scan(|| assert_eq!(cache.evict_idle_in(all), 2), meanwhile);
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [0, 1]);
            assert_eq!((lease.handle(), cache.reclaim()), (2, 1));
        });
    }

    /// What is not to be found any more, and of which the last lease ends while the hazards are scanned.
    #[test]
    fn the_end_of_a_lease_while_the_hazards_are_scanned_is_not_lost() {
        four(|cache| {
            let lease = get(cache, 0);
            cache.invalidate(page(0));
            let count = Cell::new(0);
            during_scan(|| count.set(cache.reclaim()), || drop(lease));
            assert_eq!(count.get() + cache.reclaim(), 1);
        });
    }

    /// Neither runs on another thread, which may hold what the callback waits for.
    #[test]
    fn a_callback_that_is_due_waits_for_the_end_of_the_scan() {
        four(|cache| {
            let lease = get(cache, 0);
            cache.invalidate(page(0));
            let called = Arc::new(AtomicU32::new(0));
            let calls = Arc::clone(&called);
            let completion = Completion::new(Box::new(move || _ = calls.fetch_add(1, SeqCst)));
            let scan = || {
                let mut scanner = cache.shared.lock_to_scan().unwrap();
                scanner.watchers.complete(completion);
                let regions = Reclaim(&cache.shared).await_unscanned(&mut scanner);
                assert_eq!(regions.len(), 1);
                let scanner = cache.shared.scan(scanner, regions, 0, |_, _| Vec::new(), |_, _| {});
                drop(cache.shared.release(scanner));
            };
            let takes_the_lock = || {
                cache.statistics();
                called.load(SeqCst)
            };
            assert_eq!(during_scan(scan, takes_the_lock), 0);
            assert_eq!(called.load(SeqCst), 1);
            drop(lease);
        });
    }

    /// What the log says as an eviction begins makes callbacks due, and that gives the lock back in between.
    #[test]
    fn a_callback_that_is_due_waits_for_the_end_of_a_pause() {
        let cache = Cache::new(Device::default(), Calm, Config::default()).unwrap();
        let called = Arc::new(AtomicU32::new(0));
        let calls = Arc::clone(&called);
        let completion = Completion::new(Box::new(move || _ = calls.fetch_add(1, SeqCst)));
        let mut scanner = cache.shared.lock_to_scan().unwrap();
        scanner.watchers.complete(completion);
        let scanner = cache.shared.pause(scanner);
        assert_eq!(called.load(SeqCst), 0);
        drop(cache.shared.release(scanner));
        assert_eq!(called.load(SeqCst), 1);
    }

    /// However many are examined at once, what was used of late is passed over for what was not.
    #[test]
    #[cfg_attr(miri, ignore = "takes half a minute, and no unsafe code that others do not reach")]
    fn what_was_used_of_late_is_not_examined_with_what_was_not() {
        const MANY: usize = 2048;
        // One search meets several of them.
        const APART: usize = super::MOST_LOOKS / 8;
        let config =
            Config { max_regions: MANY + 1, barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..=MANY).for_each(|number| drop(get(&cache, number)));
        let is_unused = |number: &usize| number.is_multiple_of(APART);
        (0..MANY).filter(|number| !is_unused(number)).for_each(|number| drop(get(&cache, number)));
        drop(get(&cache, MANY + 1));
        let is_given_up = |number: &usize| {
            let place = cache.shared.region(u32::try_from(*number).unwrap()).unwrap();
            !matches!(place.state(), State::Small | State::Main)
        };
        let given_up: Vec<_> = (0..MANY).filter(is_given_up).collect();
        // Besides the one whose place was taken again.
        assert!(!given_up.is_empty() && given_up.iter().all(is_unused), "{given_up:?}");
    }

    thread_local! {
        static PANICS: Cell<bool> = const { Cell::new(false) };
    }

    /// The cache ends while another thread, which draws on the same budget, gives back what it had: what that
    /// does not come to is no reclaimer's any more.
    #[test]
    fn what_is_handed_back_behind_the_end_of_the_cache_is_deregistered() {
        let cache = Cache::new(Device::default(), Calm, Config::default()).unwrap();
        (0..3).for_each(|number| drop(get(&cache, number)));
        let ((go, word), shared) = (channel(), Arc::clone(&cache.shared));
        shared.registrar.slow.lock().unwrap().insert(0, word);
        std::thread::scope(|scope| {
            let go = go;
            let other = scope.spawn(|| {
                PANICS.set(true);
                foreign::call(|| Reclaim(&shared).evict_idle()).is_err()
            });
            eventually(|| !shared.registrar.slow.lock().unwrap().contains_key(&0));
            drop(cache);
            assert_eq!(*shared.registrar.gone.lock().unwrap(), [0; 0], "in other hands");
            go.send(()).unwrap();
            assert!(other.join().unwrap(), "the panic was lost");
        });
        assert_eq!(*shared.registrar.gone.lock().unwrap(), [0, 1, 2]);
    }

    /// As many regions as there is room for.
    const FULL: usize = 3 * super::SLICE;

    thread_local! {
        /// How often a heavy barrier ran for a scan of this thread's.
        static SCANS: Cell<usize> = const { Cell::new(0) };
    }

    fn count_scan() -> bool {
        SCANS.set(SCANS.get() + 1);
        true
    }

    fn cache_that_counts_scans() -> Cache<Device, Calm> {
        // SAFETY: one thread alone uses this cache, which is in order with itself.
        let barriers = unsafe { Barriers::asymmetric(count_scan) };
        let config = Config { max_regions: FULL, barriers, ..Config::default() };
        Cache::new(Device::default(), Calm, config).unwrap()
    }

    fn is_refused(cache: &Cache<Device, Calm>, number: usize) -> bool {
        let start = std::ptr::without_provenance(page(number).start());
        // SAFETY: the device touches no memory.
        unsafe { cache.get(start, 4096, Access::READ) }.is_err()
    }

    /// What was found leased is looked at again when a lease of it ends, and not before: neither by
    /// the next refused get, nor by the tenth.
    #[test]
    fn a_refused_get_does_not_look_again_at_what_is_leased() {
        let cache = cache_that_counts_scans();
        let mut leases: Vec<_> = (0..FULL).map(|number| get(&cache, number)).collect();
        assert!(is_refused(&cache, FULL));
        let scans = SCANS.get();
        assert!(scans > 0);
        (0..10).for_each(|_| assert!(is_refused(&cache, FULL)));
        assert_eq!(SCANS.get(), scans, "looked at what is leased");
        // Found by hits as before, whose ends are not the end of the first lease.
        assert!(cache.shared.region(5).unwrap().is_live());
        drop(get(&cache, 5));
        assert!(is_refused(&cache, FULL));
        drop(leases.swap_remove(7));
        drop(get(&cache, FULL));
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [7]);
        assert!(SCANS.get() <= scans + 2, "looked at more than the two that were released");
    }

    fn evict_all(cache: &Cache<Device, Calm>) -> bool {
        let scanner = cache.shared.lock_to_scan().unwrap();
        let (scanner, slice) = Reclaim(&cache.shared).evict(scanner, Amount::EVERYTHING, &mut 0);
        drop(cache.shared.release(scanner));
        Reclaim(&cache.shared).deregister(&mut each(slice.duties));
        slice.is_cut
    }

    /// Of growing numbers at once; behind a slice others have their turn.
    #[test]
    fn an_eviction_looks_at_a_slice_of_what_is_leased() {
        let cache = cache_that_counts_scans();
        let _leases: Vec<_> = (0..FULL).map(|number| get(&cache, number)).collect();
        SCANS.set(0);
        assert!(evict_all(&cache), "there is more");
        let looked_at = cache.shared.locked(|writer| writer.lists.len(List::MainLeased));
        assert!((super::SLICE..2 * super::SLICE).contains(&looked_at.unwrap()), "{looked_at:?}");
        assert!(SCANS.get() <= 5, "{} scans", SCANS.get());
    }

    /// Each scan looks at all leases: to find that all is in use takes few of them.
    #[test]
    fn an_eviction_of_what_is_leased_scans_a_number_of_times_that_grows_as_a_logarithm() {
        const COUNT: usize = if cfg!(miri) { 40 } else { 10_000 };
        // SAFETY: one thread alone uses this cache, which is in order with itself.
        let barriers = unsafe { Barriers::asymmetric(count_scan) };
        let config = Config { max_regions: COUNT, barriers, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        let leases: Vec<_> = (0..COUNT).map(|number| get(&cache, number)).collect();
        SCANS.set(0);
        assert!(is_refused(&cache, COUNT));
        // One region first, then twice as many each time.
        assert!(SCANS.get() <= 1 + COUNT.ilog2() as usize, "{} scans", SCANS.get());
        let leased = cache.shared.locked(|writer| writer.lists.len(List::MainLeased));
        assert_eq!(leased, Ok(COUNT));
        drop(leases);
        assert_eq!(cache.evict_idle(), COUNT);
    }

    /// Leases of threads without a hazard record count in each slice of a scan.
    #[test]
    fn an_eviction_spares_what_is_leased_without_a_hazard() {
        const COUNT: usize = if cfg!(miri) { 40 } else { 500 };
        let config =
            Config { max_regions: COUNT, barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..COUNT).for_each(|number| drop(get(&cache, number)));
        let regions =
            || (0..=u32::MAX).take(COUNT).filter_map(|number| cache.shared.region(number));
        let places = regions().map(|region| std::ptr::from_ref(region).addr());
        cache.shared.locked(|writer| writer.counted.extend(places)).unwrap();
        assert_eq!(cache.evict_idle(), 0);
        regions().for_each(|region| {
            Reclaim(&cache.shared).uncount(region);
            cache.shared.say_if_awaited(region);
        });
        assert_eq!(cache.evict_idle(), COUNT);
    }

    /// What is suspended and leased stays in the order of eviction, and is no reason to look at it again.
    #[test]
    fn an_eviction_looks_once_at_what_is_suspended() {
        let cache = cache_that_counts_scans();
        drop(get(&cache, 0));
        let lease = get(&cache, 1);
        let suspend = |writer: &mut crate::shared::Writer| {
            writer.suspended.put_up(page(1), Gets::Refuse, Duration::MAX, Duration::ZERO);
            writer.lists.close(cache.shared.region(1).unwrap());
        };
        cache.shared.locked(suspend).unwrap();
        SCANS.set(0);
        assert!(!evict_all(&cache));
        assert_eq!((cache.statistics().evictions, SCANS.get()), (1, 2));
        drop(lease);
    }

    /// One idle region is found among any number of leased ones, wherever it stands.
    #[test]
    #[cfg_attr(miri, ignore = "takes half a minute, and no unsafe code that others do not reach")]
    fn an_idle_region_is_found_behind_any_number_of_leased_ones() {
        for idle in [0, super::SLICE, FULL - 1] {
            let cache = cache_that_counts_scans();
            let mut leases: Vec<_> = (0..FULL).map(|number| get(&cache, number)).collect();
            drop(leases.swap_remove(idle));
            drop(get(&cache, FULL));
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [u32::try_from(idle).unwrap()]);
        }
    }

    /// What is invalidated and idle makes room, although more than a slice that is leased stands
    /// before it.
    #[test]
    fn an_idle_region_is_found_behind_many_invalidated_ones_that_are_leased() {
        let cache = cache_that_counts_scans();
        let mut leases: Vec<_> = (0..FULL).map(|number| get(&cache, number)).collect();
        cache.invalidate(AddressRange::new(page(0).start(), FULL * 4096).unwrap());
        drop(leases.pop());
        drop(get(&cache, FULL));
        assert_eq!(*cache.registrar().gone.lock().unwrap(), [u32::try_from(FULL - 1).unwrap()]);
    }

    /// What is invalidated is given back slice by slice, all of it.
    #[test]
    fn more_than_a_slice_is_given_back() {
        let cache = cache_that_counts_scans();
        let lease = get(&cache, 0);
        (1..FULL).for_each(|number| drop(get(&cache, number)));
        cache.invalidate(AddressRange::new(page(0).start(), FULL * 4096).unwrap());
        assert_eq!(cache.reclaim(), FULL - 1);
        drop(lease);
        assert_eq!(cache.reclaim(), 1);
        (0..FULL).for_each(|number| drop(get(&cache, number)));
        assert_eq!((cache.evict_idle(), cache.statistics().regions), (FULL, 0));
        let made = cache.shared.locked(|writer| writer.made_places).unwrap();
        assert_eq!(usize::try_from(made), Ok(FULL), "what became free is filled again");
    }

    /// However fast more becomes unfindable meanwhile.
    #[test]
    fn a_reclamation_ends() {
        const FEW: usize = 2 * super::SLICE;
        let cache = Arc::new(cache_that_counts_scans());
        (0..FEW).for_each(|number| drop(get(&cache, number)));
        cache.invalidate(AddressRange::new(page(0).start(), FEW * 4096).unwrap());
        let (again, next) = (Arc::clone(&cache), Cell::new(FEW));
        ON_DEREGISTER.set(Some(Box::new(move || {
            let number = next.replace(next.get() + 1);
            // An end, for code that would go on for ever.
            if number < 20 * FEW {
                drop(get(&again, number));
                again.invalidate(page(number));
            }
        })));
        let count = cache.reclaim();
        drop(ON_DEREGISTER.take());
        assert!((FEW..2 * FEW).contains(&count), "{count}");
    }

    /// A call of the reclaimer for what another thread has done since: the next one is heard as well.
    #[test]
    fn a_call_for_nothing_is_answered() {
        let cache = cache_that_counts_scans();
        let calls = || {
            let before = NOTIFIED.get();
            cache.shared.locked(crate::shared::Writer::call_reclaimer).unwrap();
            NOTIFIED.get() - before
        };
        assert_eq!([calls(), calls()], [1, 0]);
        assert!(!Reclaim(&cache.shared).finds_work());
        assert_eq!([calls(), calls()], [1, 0]);
        drop(get(&cache, 0));
        cache.invalidate(page(0));
        assert!(Reclaim(&cache.shared).finds_work());
        assert_eq!(calls(), 0, "that is to be done yet");
    }

    /// It applies what is new, and sleeps where nothing is.
    #[test]
    fn a_reclaimer_without_work_sleeps() {
        let cache = cache_that_counts_scans();
        let shared = Arc::clone(&cache.shared);
        ON_WAIT.set(Some(Box::new(move || _ = shared.close())));
        Reclaimer::new(Arc::clone(&cache.shared)).run();
        assert!(!ReclaimingThread::is_this(), "its thread is the program's again");
    }

    /// A callback on a reclaimer's thread may be another cache's reclaimer.
    #[test]
    fn a_thread_reclaims_until_its_first_reclaimer_has_ended() {
        assert!(!ReclaimingThread::is_this());
        let here = ReclaimingThread::enter();
        drop(ReclaimingThread::enter());
        assert!(ReclaimingThread::is_this());
        drop(here);
        assert!(!ReclaimingThread::is_this());
    }

    /// A registrar may use a cache as it is given a registration back: what is made room there counts, though nothing
    /// may be waited for.
    #[test]
    fn room_is_made_from_within_a_deregistration() {
        four(|cache| {
            let inside = InsideDeparture::enter();
            drop(get(cache, 4));
            assert!(InsideDeparture::is_any(), "the inner one is not the last");
            drop(inside);
            assert!(!InsideDeparture::is_any());
        });
    }

    /// Examining takes of a slice as giving up does, and all the same nothing idle stays.
    #[test]
    fn all_that_is_idle_is_given_up_however_much_it_is() {
        const COUNT: usize = if cfg!(miri) { 40 } else { 10_000 };
        let config =
            Config { max_regions: COUNT, barriers: Barriers::SYMMETRIC, ..Config::default() };
        let cache = Cache::new(Device::default(), Calm, config).unwrap();
        (0..COUNT).for_each(|number| drop(get(&cache, number)));
        assert_eq!((cache.evict_idle(), cache.statistics().regions), (COUNT, 0));
    }

    /// Waits for what other threads bring about; they have nothing to wait for.
    fn eventually(what: impl Fn() -> bool) {
        let begun = Instant::now();
        while !what() {
            assert!(begun.elapsed().as_secs() < 60, "it does not come about");
            std::thread::yield_now();
        }
    }

    /// What other threads begin to give back later is not waited for.
    #[test]
    fn to_give_up_all_that_is_idle_ends_though_others_go_on_giving_back() {
        let cache = Cache::new(Device::default(), Calm, Config::default()).unwrap();
        let once = |number: usize| {
            let start = std::ptr::without_provenance((1 + number) * 4096);
            // SAFETY: the device touches no memory.
            unsafe { cache.request(start, 4096, Access::READ).once().get() }.unwrap()
        };
        let ((go, word), (go_later, later)) = (channel(), channel());
        cache.registrar().slow.lock().unwrap().extend([(0, word), (1, later)]);
        let (first, second) = (once(0), once(1));
        let is_slow = |handle: u32| !cache.registrar().slow.lock().unwrap().contains_key(&handle);
        std::thread::scope(|scope| {
            // Dropped when an assertion fails, so that all threads end.
            let (go, go_later) = (go, go_later);
            scope.spawn(|| drop(first));
            eventually(|| is_slow(0));
            let evicting = scope.spawn(|| cache.evict_idle());
            let waits = |writer: &mut crate::shared::Writer| writer.awaiting_departure == 1;
            eventually(|| cache.shared.locked(waits) == Ok(true));
            scope.spawn(|| drop(second));
            eventually(|| is_slow(1));
            go.send(()).unwrap();
            eventually(|| evicting.is_finished());
            assert_eq!(*cache.registrar().gone.lock().unwrap(), [0]);
            go_later.send(()).unwrap();
        });
    }

    /// Page 1 is leased, then room is needed: its registration must not go.
    fn assert_a_lease_keeps(cache: &Cache<Device, Calm>) {
        let lease = get(cache, 1);
        let before = lease.handle();
        let others = if cfg!(miri) { 500..530 } else { 500..600 };
        others.for_each(|number| drop(get(cache, number)));
        assert_eq!(lease.handle(), before, "the place holds another region");
        assert!(!cache.registrar().gone.lock().unwrap().contains(&before), "given back");
    }

    /// A lookup that passes by, at the moment at which what is idle in a range is given up, keeps
    /// nothing in the eviction list that can be leased.
    #[test]
    fn a_transient_hazard_does_not_make_an_idle_region_leasable_in_the_eviction_list() {
        let cache = full_cache(Barriers::SYMMETRIC);
        let mut numbers = Vec::new();
        cache.shared.findable_part(page(1).into(), 1, &mut numbers, |_| true);
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
