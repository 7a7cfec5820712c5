//! Hazards: how a thread says "this region is in use" without a lock and without a shared write.
//!
//! Every thread owns a record of slots for each cache that it uses (hazard pointers, Michael
//! 2004). A lease is one slot holding the region's address. Only the owner fills a slot; the thread that
//! ends the lease, whichever it is, empties it. To take a region away, its state is changed
//! first, then a heavy barrier runs, then all slots are read: a lease that is not seen there will
//! see the changed state and give up ([`Barriers`] has the argument).
//!
//! A thread that ends gives its records back with whatever leases are still in them; the next
//! thread goes on in the free slots. So records number about as many as threads lived at once,
//! plus one for every `SLOTS` leases held, and some more where leases end in any order.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` so that a thread finds its record by address, not by number.

#![allow(unsafe_code)]

use crate::abandoned::{Abandoned, Below};
use crate::arena::Arena;
use crate::barrier::Barriers;
use crate::sync::{self, AtomicU64, AtomicUsize, Mutex, Ordering, lock, thread_local};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// Slots in a record. More leases than that on one thread take a further record.
const SLOTS: usize = if sync::EXPLORED { 2 } else { 60 };

/// How many caches a thread can use in turn before it has to look for its record.
const HANDS: usize = 4;

/// A slot that holds no lease.
const EMPTY: usize = 0;

/// One thread's slots, and what that thread alone counts.
///
/// 128 bytes apart, so that neither a cache line nor the pair that the prefetcher fetches is
/// shared between threads.
#[repr(align(128))]
pub(crate) struct Record {
    slots: [AtomicUsize; SLOTS],
    hits: AtomicU64,
    /// While no thread has it.
    below: Below,
}

impl Record {
    fn new() -> Self {
        let slots = std::array::from_fn(|_| AtomicUsize::new(EMPTY));
        Self { slots, hits: AtomicU64::new(0), below: Below::nothing() }
    }

    fn hits(&self) -> u64 {
        // Relaxed: a sum of counters is no more exact than the moment it is taken in.
        self.hits.load(Ordering::Relaxed)
    }

    /// Counts a hit of the owner.
    #[inline]
    fn count_hit(&self) {
        // Relaxed, load and store: the owner alone writes, others only add it up.
        self.hits.store(self.hits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A slot of the calling thread in which a lease may be written.
#[derive(Clone, Copy)]
pub(crate) struct Slot<'d> {
    record: &'d Record,
    slot: &'d AtomicUsize,
}

impl<'d> Slot<'d> {
    /// Says that the region in this place is in use. Followed by [`Barriers::light`] and a look
    /// at the region's state, which decides.
    #[inline]
    pub(crate) fn protect<T>(self, place: &T) -> Hazard<'d> {
        // Release: a thread that reads this use in the slot knows that the one before it is over. (That
        // this store comes before the look at the state is the barrier's business.)
        self.slot.store(std::ptr::from_ref(place).addr(), Ordering::Release);
        Hazard { slot: self.slot }
    }

    /// Counts a hit of this thread.
    #[inline]
    pub(crate) fn count_hit(self) {
        self.record.count_hit();
    }
}

/// A slot that holds a lease. Emptied by [`clear`](Self::clear), on any thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hazard<'d> {
    slot: &'d AtomicUsize,
}

impl Hazard<'_> {
    /// Ends the use.
    #[inline]
    pub(crate) fn clear(self) {
        // Release: all that was done with the region happened before a thread that reads the slot as
        // empty takes the region away.
        self.slot.store(EMPTY, Ordering::Release);
    }
}

/// The name of a domain, by which a thread knows whose record it holds ready; never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DomainId(u64);

impl DomainId {
    const NONE: Self = Self(0);

    /// Where a thread keeps what it holds ready of this domain.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // few hands
    const fn hand(self) -> usize {
        self.0 as usize % HANDS
    }
}

/// One cache's hazards: its domain, and copies of what every hit asks of it.
pub(crate) struct Hazards {
    id: DomainId,
    barriers: Barriers,
    domain: Arc<HazardDomain>,
}

/// All records of one cache.
struct HazardDomain {
    id: DomainId,
    records: Arena<Record>,
    pool: Mutex<RecordPool>,
    /// Records of threads that have ended; the pool's lock is held where one is taken.
    abandoned: Abandoned,
}

/// Which records exist and which have no thread. Rank 2: taken alone or inside the cache's
/// writer lock.
struct RecordPool {
    made: u32,
    free: RecordRing,
}

/// Records, looked at in a ring from where the last look ended.
///
/// A look goes past a few of them, and past so many more as the slots found so far have paid for, at `LOOKS`
/// for each; where it finds no room, one record more is used. So a slot costs at most `2 * LOOKS` looks over
/// time, however many leases stand in the records. And a record is added only behind a look that spent all
/// that was paid for: the slots of each added one pay for `LOOKS * SLOTS` looks, so by the time that every
/// record has been passed, at most one in `LOOKS * SLOTS` was added.
#[derive(Default)]
struct RecordRing {
    numbers: Vec<u32>,
    next: usize,
    /// How many looks are paid for.
    credit: usize,
}

impl RecordRing {
    /// How many records a look goes past in any case, and how many looks a slot pays for. With more, most of the time goes
    /// into looks at full records.
    const LOOKS: usize = 2;
    /// The same for records without a thread, where nothing is paid.
    const LOOKS_TO_TAKE: usize = 8;

    /// One with room; `room` says how much a record has.
    fn find(&mut self, room: impl Fn(u32) -> usize) -> Option<u32> {
        let most = self.credit + Self::LOOKS;
        let (looks, found) = self.look(most, |number| room(number) > 0);
        let number = found.map(|position| self.numbers[position]);
        self.credit -= looks.saturating_sub(Self::LOOKS);
        match number {
            Some(number) => self.earn(room(number)),
            None => self.credit = 0,
        }
        number
    }

    /// One with room, taken out, if it is among the next few: a lock is held.
    fn take(&mut self, room: impl Fn(u32) -> usize) -> Option<u32> {
        let (_, found) = self.look(Self::LOOKS_TO_TAKE, |number| room(number) > 0);
        found.map(|position| self.numbers.swap_remove(position))
    }

    /// Goes past `most` records at most: how many that were, and where one is that is wanted.
    fn look(&mut self, most: usize, wanted: impl Fn(u32) -> bool) -> (usize, Option<usize>) {
        let most = most.min(self.numbers.len());
        for looks in 1..=most {
            let position = self.next % self.numbers.len();
            if wanted(self.numbers[position]) {
                self.next = position;
                return (looks, Some(position));
            }
            self.next = position + 1;
        }
        (most, None)
    }

    /// Adds one where the next look begins; those behind it are looked at in their turn.
    fn add(&mut self, number: u32) {
        let last = self.numbers.len();
        self.numbers.push(number);
        self.next = self.next.min(last);
        self.numbers.swap(self.next, last);
    }

    /// So many slots were found. No look goes past more than all records.
    fn earn(&mut self, slots: usize) {
        self.credit = (self.credit + Self::LOOKS * slots).min(self.numbers.len());
    }
}

impl Hazards {
    pub(crate) fn new(barriers: Barriers) -> Self {
        /// Not a loom atomic: it only makes names.
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        // Relaxed: uniqueness is all that is asked.
        let id = DomainId(NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let pool = Mutex::new(RecordPool { made: 0, free: RecordRing::default() });
        let (records, abandoned) = (Arena::new(0), Abandoned::none());
        let domain = Arc::new(HazardDomain { id, records, pool, abandoned });
        Self { id, barriers, domain }
    }

    /// The barrier between a hazard's store and the look at its region's state, or between its
    /// clearing and that look.
    #[inline(always)]
    pub(crate) fn light_barrier(&self) {
        self.barriers.light();
    }

    /// An empty slot of the calling thread. `None` while the thread is being torn down, or when
    /// four billion records exist.
    #[inline(always)]
    pub(crate) fn slot(&self) -> Option<Slot<'_>> {
        AT_HAND.try_with(|hands| self.slot_at(&hands[self.id.hand()])).ok().flatten()
    }

    #[inline(always)]
    fn slot_at(&self, at_hand: &AtHand) -> Option<Slot<'_>> {
        match at_hand.slot_of(self) {
            Some(slot) => Some(slot),
            None => self.next_slot(at_hand),
        }
    }

    /// The next empty slot of the present record, which is the usual way when a thread holds
    /// several leases; else the slow way.
    #[inline(never)]
    fn next_slot(&self, at_hand: &AtHand) -> Option<Slot<'_>> {
        at_hand.advance(self).or_else(|| self.find_slot(at_hand))
    }

    /// The slow way to a slot: another record of this thread, an abandoned one, a new one.
    #[cold]
    fn find_slot(&self, at_hand: &AtHand) -> Option<Slot<'_>> {
        let room = SEATS.try_with(|seats| {
            let mut seats = seats.try_borrow_mut().ok()?;
            self.domain.record_with_room(seats.of(&self.domain))
        });
        at_hand.take(self.id, room.ok().flatten()?);
        at_hand.advance(self)
    }

    /// Looks which of `items` are in use. `counted` are places in use that have no hazard. No lock is
    /// needed.
    ///
    /// The items were made unfindable before, so one without a lease in this scan gets none as long as it
    /// stays so: a reader that protects it later sees, behind the barriers, that it is not to be found.
    pub(crate) fn scan<'c, T: 'static>(
        &self,
        counted: &[usize],
        items: Vec<Unpublished<'c, T>>,
    ) -> Scan<'c, T> {
        let items: Vec<&'c T> = items.into_iter().map(|Unpublished(item)| item).collect();
        let places = Places::of(&items);
        let mut held = self.held(|place| places.may_contain(place));
        held.iter_mut().for_each(leave_leases);
        let in_use = InUse::of(held, counted);
        Scan(items.into_iter().map(|item| (item, in_use.count(item))).collect())
    }

    /// The slots that hold a `wanted` place, with that place, behind a heavy barrier. `None` without one. Reads
    /// every slot.
    fn held(&self, wanted: impl Fn(usize) -> bool) -> Option<Vec<HeldSlot<'_>>> {
        let is_wanted = |&(_, place): &HeldSlot<'_>| place != EMPTY && wanted(place);
        self.barriers.heavy().then(|| self.domain.slots().filter(is_wanted).collect())
    }

    /// All that is leased, `counted` ones included. No lock is needed.
    pub(crate) fn snapshot(&self, counted: &[usize]) -> Snapshot {
        Snapshot(InUse::of(self.held(|_| true), counted))
    }

    /// The hits of all threads, ended ones included.
    pub(crate) fn hits(&self) -> u64 {
        self.domain.made_records().map(Record::hits).sum()
    }
}

/// A slot and the place that it holds.
type HeldSlot<'d> = (&'d AtomicUsize, usize);

/// How long a scan waits before it looks once more at what it found in use: as long as a lookup takes to move on,
/// many times over.
const PAUSES: usize = if cfg!(loom) { 0 } else { 64 };

/// Leaves what is in use for longer than a lookup looks: one that passes by a region while room is made does not
/// count as a lease of it, unless its thread loses its processor there.
///
/// **Why what left its slot is not in use.** This look comes behind the scan's barrier as the first one did. A use
/// that either of them does not see has ended, or begins behind the barrier, and finds the region's new state.
fn leave_leases(held: &mut Vec<HeldSlot<'_>>) {
    if !held.is_empty() {
        (0..PAUSES).for_each(|_| sync::pause());
        // Acquire: as for the first look.
        held.retain(|&(slot, place)| slot.load(Ordering::Acquire) == place);
    }
}

impl HazardDomain {
    /// Every record that was ever made.
    fn made_records(&self) -> impl Iterator<Item = &Record> {
        let made = lock(&self.pool).made;
        (0..made).filter_map(|number| self.records.get(number))
    }

    /// All slots, with what they hold.
    fn slots(&self) -> impl Iterator<Item = HeldSlot<'_>> {
        let slots = self.made_records().flat_map(|record| &record.slots);
        // Acquire: pairs with `clear`; the use is over before the region is taken away.
        slots.map(|slot| (slot, slot.load(Ordering::Acquire)))
    }

    /// One of the thread's `records` that has room, or one more.
    fn record_with_room(&self, records: &mut RecordRing) -> Option<&Record> {
        let number = match records.find(|number| self.room(number)) {
            Some(number) => number,
            None => {
                let number = self.adopt_record()?;
                records.add(number);
                records.earn(self.room(number));
                number
            }
        };
        self.records.get(number)
    }

    /// A record without a thread that has room, or a new one.
    fn adopt_record(&self) -> Option<u32> {
        let mut pool = lock(&self.pool);
        for _ in 0..RecordRing::LOOKS_TO_TAKE {
            let Some(number) = self.abandoned.pop(|number| self.below(number)) else { break };
            pool.free.add(number);
        }
        if let Some(number) = pool.free.take(|number| self.room(number)) {
            return Some(number);
        }
        let number = pool.made;
        self.records.ensure(number, |_| Record::new())?;
        pool.made = number.checked_add(1)?;
        Some(number)
    }

    /// How many slots of a record are empty.
    fn room(&self, number: u32) -> usize {
        self.records.get(number).map_or(0, |record| {
            // Relaxed: only its thread fills a slot, and of a record without one they can only become empty.
            record.slots.iter().filter(|slot| slot.load(Ordering::Relaxed) == EMPTY).count()
        })
    }

    fn below(&self, number: u32) -> Option<&Below> {
        self.records.get(number).map(|record| &record.below)
    }

    /// Takes back the records of a thread that ends, leases in them included. Waits for no lock.
    fn give_back(&self, records: &[u32]) {
        self.abandoned.push(records, |number| self.below(number));
    }
}

/// What readers find without a lock, and protect by hazards while they use it.
pub(crate) trait Findable {
    /// Whether a reader that protects it now may go on to use it.
    fn is_live(&self) -> bool;

    /// Whether it is as the one scan that may be under way has found it: not leased since in any way, and
    /// no lease of it has ended since whose end could be awaited. The writer's lock is held.
    fn awaits_scan(&self) -> bool;
}

/// A region that readers do not find, while the writer's lock is held.
pub(crate) struct Unpublished<'c, T>(&'c T);

impl<'c, T: Findable> Unpublished<'c, T> {
    /// `None` if readers find it.
    pub(crate) fn of(item: &'c T) -> Option<Self> {
        (!item.is_live()).then_some(Self(item))
    }
}

/// The proof that deregistering a region takes: no lease of it is left, and none can come.
///
/// Made by a [`Scan`] of regions that were unpublished before, by the end of the only lease that a
/// region can have, or by the end of the cache; and kept by the states
/// [`Evictable`](crate::region::State::Evictable) and [`Parked`](crate::region::State::Parked),
/// which are entered with one and left by the first lease.
#[must_use]
pub(crate) struct Idle<'c, T>(&'c T);

impl<'c, T> Idle<'c, T> {
    pub(crate) const fn item(&self) -> &'c T {
        self.0
    }

    /// Uses the proof up.
    pub(crate) const fn into_item(self) -> &'c T {
        self.0
    }

    /// A proof that went into the item's state, which nothing has left since. For
    /// [`Lists`](crate::region::Lists).
    pub(crate) const fn kept_by_state(item: &'c T) -> Self {
        Self(item)
    }

    /// The one lease that the item can have has ended, and emptied its slot. For the end of a
    /// lease.
    pub(crate) const fn behind_its_only_lease(item: &'c T) -> Self {
        Self(item)
    }

    /// The cache is being dropped: no lease of it can be used any more. For its destructor.
    pub(crate) const fn of_a_dropped_cache(item: &'c T) -> Self {
        Self(item)
    }
}

/// A look at all hazards, made after its items were unpublished: how often each is in use, if that is known.
pub(crate) struct Scan<'c, T>(VecDeque<(&'c T, Option<usize>)>);

/// What a scan found of an item.
pub(crate) enum Scanned<'c, T> {
    Idle(Idle<'c, T>),
    InUse(&'c T),
    /// No barrier could be had: it may be in use.
    Unknown(&'c T),
}

impl<'c, T: Findable> Scan<'c, T> {
    /// The next `most` items, and the others, if there are any. No lock is needed.
    pub(crate) fn split(mut self, most: usize) -> (ScannedSlice<'c, T>, Option<Self>) {
        let slice = self.0.drain(..most.min(self.0.len())).collect();
        (ScannedSlice(slice), (!self.0.is_empty()).then_some(self))
    }
}

/// Some items of a scan.
pub(crate) struct ScannedSlice<'c, T>(Vec<(&'c T, Option<usize>)>);

impl<'c, T: Findable> ScannedSlice<'c, T> {
    /// Says what was found of each item. The writer's lock is held, again, and no other scan has begun since.
    ///
    /// Not of what something happened to since the scan began: it is where that took it. So of an item that was given to
    /// the scan twice it is said once, if `settle` takes it elsewhere.
    pub(crate) fn settle(self, mut settle: impl FnMut(Scanned<'c, T>)) {
        for (item, uses) in self.0 {
            if item.awaits_scan() {
                settle(match uses {
                    Some(0) => Scanned::Idle(Idle(item)),
                    Some(_) => Scanned::InUse(item),
                    None => Scanned::Unknown(item),
                });
            }
        }
    }
}

/// What was leased when it was taken. Readers may have ended leases since; and they may have begun some,
/// but of what they could not find.
pub(crate) struct Snapshot(InUse);

impl Snapshot {
    /// The leases that `item` has at most beyond the `owned` ones, a transient hazard included: of an item
    /// that has not been found, nor leased in any other way, since before this was taken.
    pub(crate) fn leases<T: 'static>(&self, item: &Unpublished<'_, T>, owned: usize) -> usize {
        self.0.count(item.0).map_or(1, |all| all.saturating_sub(owned))
    }

    /// The proof that there are none, of such an item; the caller ends those that it owns before it does
    /// anything with it.
    pub(crate) fn idle<'c, T: 'static>(
        &self,
        item: &Unpublished<'c, T>,
        owned: usize,
    ) -> Option<Idle<'c, T>> {
        (self.leases(item, owned) == 0).then_some(Idle(item.0))
    }
}

/// The places of a few items, to tell them from the many that are leased: one bit for each place, of
/// eight times as many. One of the others may be taken for one of these.
struct Places(Vec<u64>);

impl Places {
    /// The distance of two places at least, as a power of two: [`Region`](crate::region::Region).
    const APART_LOG2: u32 = 6;

    fn of<T>(items: &[&T]) -> Self {
        let words = (8 * items.len()).div_ceil(64).next_power_of_two();
        let mut places = Self(vec![0; words]);
        for &item in items {
            let (word, bit) = places.bit_of(std::ptr::from_ref(item).addr());
            places.0[word] |= bit;
        }
        places
    }

    fn may_contain(&self, place: usize) -> bool {
        let (word, bit) = self.bit_of(place);
        self.0[word] & bit != 0
    }

    /// The word of a place's bit, and the bit.
    const fn bit_of(&self, place: usize) -> (usize, u64) {
        let number = place >> Self::APART_LOG2;
        ((number / 64) & (self.0.len() - 1), 1 << (number % 64))
    }
}

/// A snapshot of the places in use that a scan asked for, sorted; `None` if it could not be taken.
struct InUse(Option<Vec<usize>>);

impl InUse {
    fn of(held: Option<Vec<HeldSlot<'_>>>, counted: &[usize]) -> Self {
        Self(held.map(|held| {
            let held = held.into_iter().map(|(_, place)| place);
            let mut places: Vec<usize> = held.chain(counted.iter().copied()).collect();
            places.sort_unstable();
            places
        }))
    }

    /// How often `place` is leased, if that is known. `'static`, so that a reference to it is not
    /// taken for it.
    fn count<T: 'static>(&self, place: &T) -> Option<usize> {
        let place = std::ptr::from_ref(place).addr();
        let places = self.0.as_ref()?;
        let first = places.partition_point(|&other| other < place);
        Some(places[first..].iter().take_while(|&&other| other == place).count())
    }

    #[cfg(all(test, not(loom)))]
    fn contains<T: 'static>(&self, place: &T) -> bool {
        self.count(place).is_none_or(|count| count > 0)
    }
}

/// The record of one cache that the calling thread used last, and where in it the next lease
/// goes.
///
/// Apart from [`Seats`], because what has no destructor is reached without asking whether that
/// has run.
struct AtHand {
    domain: Cell<DomainId>,
    record: Cell<NonNull<Record>>,
    slot: Cell<NonNull<AtomicUsize>>,
}

impl AtHand {
    const fn nothing() -> Self {
        Self {
            domain: Cell::new(DomainId::NONE),
            record: Cell::new(NonNull::dangling()),
            slot: Cell::new(NonNull::dangling()),
        }
    }

    /// The next slot, if it belongs to this domain and is empty.
    #[inline(always)]
    fn slot_of<'d>(&self, hazards: &'d Hazards) -> Option<Slot<'d>> {
        if self.domain.get() != hazards.id {
            return None;
        }
        // SAFETY: `take` got both from the domain of this name, which `hazards` keeps for 'd:
        // records live as long as their domain, and never move.
        let (record, slot) = unsafe { (self.record.get().as_ref(), self.slot.get().as_ref()) };
        // Acquire: the use that ended here, perhaps on another thread, is over before the next
        // one is entered. Only this thread fills its slots, so empty stays empty.
        (slot.load(Ordering::Acquire) == EMPTY).then_some(Slot { record, slot })
    }

    /// Goes on to the next empty slot of the present record, if it belongs to this domain.
    fn advance<'d>(&self, hazards: &'d Hazards) -> Option<Slot<'d>> {
        if self.domain.get() != hazards.id {
            return None;
        }
        // SAFETY: as in `slot_of`.
        let record: &'d Record = unsafe { self.record.get().as_ref() };
        let bytes = self.slot.get().addr().get() - record.slots.as_ptr().addr();
        let (before, behind) =
            record.slots.split_at_checked(bytes / size_of::<AtomicUsize>() + 1)?;
        let mut slots = behind.iter().chain(before);
        // Acquire: as in `slot_of`.
        let slot = slots.find(|slot| slot.load(Ordering::Acquire) == EMPTY)?;
        self.slot.set(NonNull::from(slot));
        Some(Slot { record, slot })
    }

    /// From now on this thread's leases of `domain` go into `record`.
    fn take(&self, domain: DomainId, record: &Record) {
        self.domain.set(domain);
        self.record.set(NonNull::from(record));
        self.slot.set(NonNull::from(&record.slots[SLOTS - 1]));
    }
}

/// All records that the calling thread owns, by domain.
struct Seats(Vec<Seat>);

struct Seat {
    id: DomainId,
    /// Weak, so that a cache that is gone takes its records along, however many threads used it.
    domain: Weak<HazardDomain>,
    records: RecordRing,
}

impl Seats {
    /// The records of `domain`, which move to the front: those of the caches that a thread uses in turn
    /// stand there, however many it has used.
    fn of(&mut self, domain: &Arc<HazardDomain>) -> &mut RecordRing {
        let position = self.0.iter().position(|seat| seat.id == domain.id).unwrap_or_else(|| {
            self.0.retain(|seat| seat.domain.strong_count() > 0);
            let weak = Arc::downgrade(domain);
            self.0.push(Seat { id: domain.id, domain: weak, records: RecordRing::default() });
            self.0.len() - 1
        });
        self.0[..=position].rotate_right(1);
        &mut self.0[0].records
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        // Another thread may have the records next; a lease that begins after this, in the
        // destructor of another of this thread's values, is counted instead.
        // (Where `AT_HAND` is gone already, nothing begins any more.)
        let _gone = AT_HAND.try_with(|hands| {
            hands.iter().for_each(|at_hand| at_hand.domain.set(DomainId::NONE));
        });
        for seat in &self.0 {
            if let Some(domain) = seat.domain.upgrade() {
                domain.give_back(&seat.records.numbers);
            }
        }
    }
}

#[cfg(not(loom))]
thread_local! {
    static AT_HAND: [AtHand; HANDS] = const { [const { AtHand::nothing() }; HANDS] };
    static SEATS: RefCell<Seats> = const { RefCell::new(Seats(Vec::new())) };
}
#[cfg(loom)]
thread_local! {
    static AT_HAND: [AtHand; HANDS] = std::array::from_fn(|_| AtHand::nothing());
    static SEATS: RefCell<Seats> = RefCell::new(Seats(Vec::new()));
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_once_it_is_empty() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let place = 7;
        let first = hazards.slot().unwrap().protect(&place);
        assert!(hazards.snapshot(&[]).0.contains(&place));
        first.clear();
        assert!(!hazards.snapshot(&[]).0.contains(&place));
        let again = hazards.slot().unwrap().protect(&place);
        assert!(std::ptr::eq(first.slot, again.slot));
        again.clear();
    }

    #[test]
    fn more_leases_than_slots_take_further_records() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let places = [0_u64; 3 * SLOTS];
        let leases: Vec<_> =
            places.iter().map(|place| hazards.slot().unwrap().protect(place)).collect();
        let in_use = hazards.snapshot(&[]).0;
        assert!(places.iter().all(|place| in_use.contains(place)));
        leases.into_iter().for_each(Hazard::clear);
        assert_eq!(hazards.snapshot(&[]).0.0, Some(Vec::new()));
        assert_eq!(lock(&hazards.domain.pool).made, 3);
    }

    /// Beyond those that every look goes past; and each slot found pays for two.
    #[test]
    fn looks_past_full_records_are_paid_for_by_slots() {
        let mut ring = RecordRing { numbers: (0..40).collect(), next: 0, credit: 8 };
        assert_eq!(ring.find(|number| if number == 5 { 3 } else { 0 }), Some(5));
        assert_eq!(ring.credit, 8 - (6 - RecordRing::LOOKS) + 2 * 3);
    }

    /// A lookup that moves on while the scan waits is no lease.
    #[test]
    fn a_slot_that_was_left_is_not_in_use() {
        let (left, kept) = (AtomicUsize::new(EMPTY), AtomicUsize::new(128));
        let mut held = vec![(&left, 64), (&kept, 128)];
        leave_leases(&mut held);
        assert_eq!(held.iter().map(|&(_, place)| place).collect::<Vec<_>>(), [128]);
    }

    /// Those of every thread.
    #[test]
    fn the_hits_are_those_of_all_records() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        hazards.slot().unwrap().count_hit();
        let held = hazards.slot().unwrap().protect(&0_u64);
        std::thread::scope(|scope| {
            scope
                .spawn(|| (0..2).for_each(|_| hazards.slot().unwrap().count_hit()))
                .join()
                .unwrap();
        });
        held.clear();
        assert_eq!(hazards.hits(), 3);
    }

    /// However many records are full, a look goes past few, and none with room stays unused for good.
    #[test]
    fn leases_that_end_in_any_order_cost_few_looks() {
        let mut ring = RecordRing::default();
        (0..1000).for_each(|number| ring.add(number));
        let looks = Cell::new(0);
        let mut find = |free: u32| {
            looks.set(0);
            ring.find(|number| {
                looks.set(looks.get() + 1);
                usize::from(number == free)
            })
        };
        let found = (0..1000).position(|_| find(500).is_some());
        assert!(found.is_some() && looks.get() <= 16, "{found:?} {}", looks.get());
        // Once to find it, once for how much room it has.
        assert_eq!((find(500), looks.get()), (Some(500), 2));
    }

    /// Leases that last fill some records, and behind them others come and go in order: the first to begin
    /// is the first to end. No more records are made than there are leases for, and one.
    #[test]
    fn leases_that_last_do_not_hide_the_room_behind_them() {
        let lasting = if cfg!(miri) { 2 } else { 7 } * SLOTS;
        let turns = if cfg!(miri) { 2 } else { 2000 } * SLOTS;
        for queued in [SLOTS + 4, 2 * SLOTS + 8] {
            let hazards = Hazards::new(Barriers::SYMMETRIC);
            let place = 7;
            let get = || hazards.slot().unwrap().protect(&place);
            let _lasting: Vec<_> = (0..lasting).map(|_| get()).collect();
            let mut queue: std::collections::VecDeque<_> = (0..queued).map(|_| get()).collect();
            for _ in 0..turns {
                queue.pop_front().unwrap().clear();
                queue.push_back(get());
            }
            let made = lock(&hazards.domain.pool).made as usize;
            let needed = (lasting + queued).div_ceil(SLOTS);
            assert!(made <= needed + 1, "{made} records for {needed}");
        }
    }

    #[test]
    fn leases_that_end_in_any_order_take_few_records_more() {
        const HELD: usize = if cfg!(miri) { 2 } else { 40 } * SLOTS;
        // The interpreter takes a tenth of a second for each.
        const TURNS: usize = if cfg!(miri) { HELD / 2 } else { 10 * HELD };
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let place = 7;
        let get = || hazards.slot().unwrap().protect(&place);
        let mut held: Vec<_> = (0..HELD).map(|_| get()).collect();
        let mut state = 0x9e37_79b9_u64;
        for _ in 0..TURNS {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let lease = held.swap_remove(usize::try_from(state >> 33).unwrap() % HELD);
            lease.clear();
            held.push(get());
        }
        assert_eq!(hazards.snapshot(&[]).0.0.unwrap().len(), HELD);
        let made = lock(&hazards.domain.pool).made as usize;
        assert!(made <= HELD / SLOTS * 5 / 4 + 1, "{made} records for {HELD} leases");
    }

    /// The caches that a thread uses in turn are found at once, however many it has used.
    #[test]
    fn the_records_of_the_caches_in_use_stand_in_front() {
        let caches: Vec<_> = (0..20).map(|_| Hazards::new(Barriers::SYMMETRIC)).collect();
        caches.iter().for_each(|hazards| hazards.slot().unwrap().protect(&0).clear());
        for hazards in [&caches[1], &caches[1 + HANDS], &caches[1], &caches[1 + HANDS]] {
            hazards.slot().unwrap().protect(&0).clear();
        }
        let ids: Vec<_> = SEATS.with(|seats| seats.borrow().0.iter().map(|seat| seat.id).collect());
        assert_eq!(ids[..2], [caches[1 + HANDS].id, caches[1].id]);
    }

    #[test]
    fn leases_held_in_a_row_go_round_one_record() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let place = 7;
        let mut held = std::collections::VecDeque::new();
        for _ in 0..4 * SLOTS {
            held.push_back(hazards.slot().unwrap().protect(&place));
            if held.len() == SLOTS / 2 {
                held.pop_front().unwrap().clear();
            }
        }
        assert_eq!(hazards.snapshot(&[]).0.0.unwrap().len(), held.len());
        assert_eq!(lock(&hazards.domain.pool).made, 1);
    }

    #[test]
    fn more_caches_than_hands_take_turns_on_their_own_records() {
        let caches: [Hazards; 2 * HANDS + 1] =
            std::array::from_fn(|_| Hazards::new(Barriers::SYMMETRIC));
        let places: [u64; 2 * HANDS + 1] = [0; 2 * HANDS + 1];
        for _ in 0..3 {
            for (hazards, place) in caches.iter().zip(&places) {
                let lease = hazards.slot().unwrap().protect(place);
                assert_eq!(hazards.snapshot(&[]).0.0.unwrap(), [std::ptr::from_ref(place).addr()]);
                lease.clear();
            }
        }
        assert!(caches.iter().all(|hazards| lock(&hazards.domain.pool).made == 1));
    }

    #[test]
    fn a_thread_that_ends_leaves_its_leases_and_its_record() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        const LEASES: usize = if cfg!(miri) { 70 } else { 200 };
        for _ in 0..LEASES {
            std::thread::scope(|scope| {
                scope.spawn(|| hazards.slot().unwrap().protect(&hazards)).join().unwrap();
            });
        }
        // They outlived their threads, and fill as many records as they need and no more.
        assert_eq!(hazards.snapshot(&[]).0.0.unwrap().len(), LEASES);
        assert_eq!(lock(&hazards.domain.pool).made as usize, LEASES.div_ceil(SLOTS));
    }

    #[test]
    fn threads_that_come_and_go_make_no_records_but_the_first() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        for _ in 0..if cfg!(miri) { 20 } else { 5000 } {
            std::thread::scope(|scope| {
                scope.spawn(|| hazards.slot().unwrap().protect(&hazards).clear()).join().unwrap();
            });
        }
        let pool = lock(&hazards.domain.pool);
        assert_eq!((pool.made, pool.free.numbers.len()), (1, 0));
        let domain = &hazards.domain;
        assert_eq!(domain.abandoned.pop(|number| domain.below(number)), Some(0));
    }

    /// As in a forked child, where a thread that does not exist holds the pool's lock.
    #[test]
    fn a_thread_that_ends_in_a_child_waits_for_no_lock_of_its_parents() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let domain = Arc::clone(&hazards.domain);
        let (taken, wait_for_taken) = std::sync::mpsc::channel();
        let (go, wait_for_go) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            hazards.slot().unwrap().protect(&0).clear();
            taken.send(()).unwrap();
            wait_for_go.recv().unwrap();
        });
        wait_for_taken.recv().unwrap();
        let pool = lock(&domain.pool);
        go.send(()).unwrap();
        // `is_finished` says so before the thread's own values are dropped, which is where it would wait.
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || ended.send(thread.join().is_ok()));
        let end = end.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(end, Ok(true), "it waits for the lock");
        assert!(pool.free.numbers.is_empty());
    }

    /// Without that, a scan would sort all leases of the cache for the few regions that it asks for.
    #[test]
    fn places_tell_the_few_from_the_many() {
        #[repr(align(64))]
        struct Apart(#[allow(dead_code)] u8);
        let cells: Vec<_> = (0..512).map(|_| Apart(0)).collect();
        let (asked, others) = cells.split_at(64);
        let places = Places::of(&asked.iter().collect::<Vec<_>>());
        let may_contain = |cell: &Apart| places.may_contain(std::ptr::from_ref(cell).addr());
        assert!(asked.iter().all(may_contain), "none may be missed");
        assert_eq!(others.iter().filter(|cell| may_contain(cell)).count(), 0);
        let same_bit = [&cells[0], &cells[64]];
        let places = Places::of(&same_bit);
        let may_contain = |cell: &Apart| places.may_contain(std::ptr::from_ref(cell).addr());
        assert!(same_bit.into_iter().all(may_contain), "nor one for another");
        assert!(!may_contain(&cells[1]));
    }

    #[test]
    fn a_lease_may_end_on_another_thread() {
        let hazards = Hazards::new(Barriers::SYMMETRIC);
        let lease = hazards.slot().unwrap().protect(&0);
        std::thread::scope(|scope| {
            scope.spawn(|| lease.clear());
        });
        assert_eq!(hazards.snapshot(&[]).0.0, Some(Vec::new()));
    }

    #[test]
    fn without_a_barrier_everything_is_in_use() {
        // SAFETY: it never claims to have been a barrier.
        let barriers = unsafe { Barriers::asymmetric(|| false) };
        assert!(Hazards::new(barriers).snapshot(&[]).0.contains(&0));
    }

    /// Threads that live on keep nothing of a cache that is gone, however many used it.
    #[test]
    fn a_domain_goes_with_its_cache() {
        let hazards = Arc::new(Hazards::new(Barriers::SYMMETRIC));
        let (gone, barrier) = (Arc::downgrade(&hazards.domain), std::sync::Barrier::new(2));
        let (here, there) = (Arc::clone(&hazards), hazards);
        std::thread::scope(|scope| {
            let barrier = &barrier;
            scope.spawn(move || {
                there.slot().unwrap().protect(&0).clear();
                drop(there);
                barrier.wait();
                barrier.wait();
            });
            here.slot().unwrap().protect(&0).clear();
            drop(here);
            barrier.wait();
            let is_gone = gone.upgrade().is_none();
            barrier.wait();
            assert!(is_gone);
        });
    }

    #[test]
    fn a_thread_remembers_no_cache_that_is_gone() {
        let known = || SEATS.with(|seats| seats.borrow().0.len());
        for _ in 0..10 {
            let hazards = Hazards::new(Barriers::SYMMETRIC);
            hazards.slot().unwrap().protect(&0).clear();
            assert_eq!(known(), 1, "this one alone");
        }
    }

    #[test]
    fn caches_on_one_thread_do_not_mix() {
        let places = [1, 2];
        let (one, two) = (Hazards::new(Barriers::SYMMETRIC), Hazards::new(Barriers::SYMMETRIC));
        let leases =
            [one.slot().unwrap().protect(&places[0]), two.slot().unwrap().protect(&places[1])];
        assert!(
            one.snapshot(&[]).0.contains(&places[0]) && !one.snapshot(&[]).0.contains(&places[1])
        );
        assert!(
            two.snapshot(&[]).0.contains(&places[1]) && !two.snapshot(&[]).0.contains(&places[0])
        );
        leases.into_iter().for_each(Hazard::clear);
    }
}
