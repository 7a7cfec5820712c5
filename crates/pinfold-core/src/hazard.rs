//! Hazards: how a thread says "this region is in use" without a lock and without a shared write.
//!
//! Every thread owns a record of slots for each cache that it uses (hazard pointers, Michael
//! 2004). A lease is one slot holding the region's address. Only the owner fills a slot; whoever
//! ends the lease, on whatever thread, empties it. To take a region away, its state is changed
//! first, then a heavy barrier runs, then all slots are read: a lease that is not seen there will
//! see the changed state and give up ([`Barriers`] has the argument).
//!
//! A thread that ends gives its records back with whatever leases are still in them; the next
//! thread goes on in the free slots. So records number at most as many as threads lived at once,
//! plus one for every `SLOTS` leases held.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` so that a thread finds its record by address, not by number.

#![allow(unsafe_code)]

use crate::arena::Arena;
use crate::barrier::Barriers;
use crate::front::FrontTable;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, lock, thread_local};
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

/// Slots in a record. More leases than that on one thread take a further record.
const SLOTS: usize = if cfg!(loom) { 2 } else { 60 };

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
    front: FrontTable,
}

impl Record {
    fn new() -> Self {
        Self {
            slots: std::array::from_fn(|_| AtomicUsize::new(EMPTY)),
            hits: AtomicU64::new(0),
            front: FrontTable::new(),
        }
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
        // Release: whoever reads this use in the slot knows that the one before it is over. (That
        // this store comes before the look at the state is the barrier's business.)
        self.slot.store(std::ptr::from_ref(place).addr(), Ordering::Release);
        Hazard { slot: self.slot }
    }

    /// Counts a hit of this thread.
    #[inline]
    pub(crate) fn count_hit(self) {
        self.record.count_hit();
    }

    /// What this thread, or the record's last one, found last.
    #[inline(always)]
    pub(crate) fn front(self) -> &'d FrontTable {
        &self.record.front
    }
}

/// A slot that holds a lease. Emptied by [`clear`](Self::clear), on any thread.
#[derive(Debug)]
pub(crate) struct Hazard<'d> {
    slot: &'d AtomicUsize,
}

impl Hazard<'_> {
    /// Ends the use.
    #[inline]
    pub(crate) fn clear(&self) {
        // Release: all that was done with the region happened before whoever reads the slot as
        // empty takes the region away.
        self.slot.store(EMPTY, Ordering::Release);
    }
}

/// All records of one cache.
pub(crate) struct HazardDomain {
    /// Tells domains apart for the threads' own tables; never reused.
    id: u64,
    records: Arena<Record>,
    pool: Mutex<RecordPool>,
    pub(crate) barriers: Barriers,
}

/// Which records exist and which have no thread. Rank 2: taken alone or inside the cache's
/// writer lock.
struct RecordPool {
    made: u32,
    free: Vec<u32>,
}

impl HazardDomain {
    pub(crate) fn new(barriers: Barriers) -> Arc<Self> {
        /// Not a loom atomic: it only makes names.
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Arc::new(Self {
            // Relaxed: uniqueness is all that is asked.
            id: NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            records: Arena::new(0),
            pool: Mutex::new(RecordPool { made: 0, free: Vec::new() }),
            barriers,
        })
    }

    /// An empty slot of the calling thread. `None` while the thread is being torn down, or when
    /// four billion records exist.
    #[inline(always)]
    pub(crate) fn slot<'d>(self: &'d Arc<Self>) -> Option<Slot<'d>> {
        SEATS.try_with(|seats| self.slot_of(seats)).ok().flatten()
    }

    #[inline(always)]
    fn slot_of<'d>(self: &'d Arc<Self>, seats: &Seats) -> Option<Slot<'d>> {
        if seats.domain.get() == self.id {
            // SAFETY: the record belongs to the domain of this id, which is this one; records
            // live as long as their domain, and never move.
            let record: &'d Record = unsafe { &*seats.record.get() };
            let slot = record.slots.get(seats.cursor.get())?;
            // Acquire: the use that ended here, perhaps on another thread, is over before the next
            // one is entered. Only this thread fills its slots, so empty stays empty.
            if slot.load(Ordering::Acquire) == EMPTY {
                return Some(Slot { record, slot });
            }
        }
        self.find_slot(seats)
    }

    /// The slow way to a slot: another place in this record, another record, a new one.
    #[cold]
    fn find_slot<'d>(self: &'d Arc<Self>, seats: &Seats) -> Option<Slot<'d>> {
        let mut all = seats.all.try_borrow_mut().ok()?;
        let position = all.iter().position(|seat| seat.id == self.id).unwrap_or_else(|| {
            all.retain(|seat| seat.domain.strong_count() > 0);
            all.push(Seat { id: self.id, domain: Arc::downgrade(self), records: Vec::new() });
            all.len() - 1
        });
        let seat = &mut all[position];
        let (number, place) = match self.empty_place(&seat.records, seats) {
            Some(found) => found,
            None => {
                let number = self.adopt_record()?;
                seat.records.push(number);
                self.empty_place(&[number], seats)?
            }
        };
        let record = self.records.get(number)?;
        seats.domain.set(self.id);
        seats.record.set(record);
        seats.cursor.set(place);
        Some(Slot { record, slot: &record.slots[place] })
    }

    /// An empty slot in `records`, the one behind the cursor first, the latest record first: a thread
    /// that holds thousands of leases has filled the earlier ones.
    fn empty_place(&self, records: &[u32], seats: &Seats) -> Option<(u32, usize)> {
        let first = seats.cursor.get();
        records.iter().rev().find_map(|&number| {
            let record = self.records.get(number)?;
            (0..SLOTS)
                .map(|step| (first + step) % SLOTS)
                // Acquire: as in `slot_of`.
                .find(|&place| record.slots[place].load(Ordering::Acquire) == EMPTY)
                .map(|place| (number, place))
        })
    }

    /// A record without a thread that has room, or a new one.
    fn adopt_record(&self) -> Option<u32> {
        let mut pool = lock(&self.pool);
        let with_room = pool.free.iter().position(|&number| self.has_room(number));
        if let Some(position) = with_room {
            return Some(pool.free.swap_remove(position));
        }
        let number = pool.made;
        self.records.ensure(number, |_| Record::new())?;
        pool.made = number.checked_add(1)?;
        Some(number)
    }

    fn has_room(&self, number: u32) -> bool {
        self.records.get(number).is_some_and(|record| {
            // Relaxed: a slot of a record without a thread can only become empty.
            record.slots.iter().any(|slot| slot.load(Ordering::Relaxed) == EMPTY)
        })
    }

    /// Takes back the records of a thread that ends, leases in them included.
    fn give_back(&self, records: &[u32]) {
        lock(&self.pool).free.extend_from_slice(records);
    }

    /// The places of all regions in use.
    ///
    /// A region whose state was changed before this call and that is not in the answer has no
    /// lease and will get none.
    ///
    /// `counted` are further places in use, which have no hazard.
    pub(crate) fn in_use(&self, counted: &[usize]) -> InUse {
        if !self.barriers.heavy() {
            return InUse(None);
        }
        let made = lock(&self.pool).made;
        let mut places: Vec<usize> = (0..made)
            .filter_map(|number| self.records.get(number))
            .flat_map(|record| &record.slots)
            // Acquire: pairs with `clear`; the use is over before the region is taken away.
            .map(|slot| slot.load(Ordering::Acquire))
            .filter(|&place| place != EMPTY)
            .chain(counted.iter().copied())
            .collect();
        places.sort_unstable();
        InUse(Some(places))
    }

    /// The hits of all threads, ended ones included.
    pub(crate) fn hits(&self) -> u64 {
        let made = lock(&self.pool).made;
        (0..made)
            .filter_map(|number| self.records.get(number))
            // Relaxed: a sum of counters is no more exact than the moment it is taken in.
            .map(|record| record.hits.load(Ordering::Relaxed))
            .sum()
    }
}

/// A snapshot of the places in use, sorted; all of them if it could not be taken.
pub(crate) struct InUse(Option<Vec<usize>>);

impl InUse {
    pub(crate) fn contains<T>(&self, place: &T) -> bool {
        let place = std::ptr::from_ref(place).addr();
        self.0.as_ref().is_none_or(|places| places.binary_search(&place).is_ok())
    }
}

/// A thread's own table: the slot that the next lease will use, and all its records.
struct Seats {
    /// The domain that `record` and `cursor` belong to; 0 for none.
    domain: Cell<u64>,
    record: Cell<*const Record>,
    cursor: Cell<usize>,
    all: RefCell<Vec<Seat>>,
}

struct Seat {
    id: u64,
    /// Weak, so that a cache that is gone takes its records along, however many threads used it.
    domain: Weak<HazardDomain>,
    records: Vec<u32>,
}

impl Seats {
    const fn new() -> Self {
        Self {
            domain: Cell::new(0),
            record: Cell::new(std::ptr::null()),
            cursor: Cell::new(0),
            all: RefCell::new(Vec::new()),
        }
    }
}

impl Drop for Seats {
    fn drop(&mut self) {
        for seat in self.all.get_mut() {
            if let Some(domain) = seat.domain.upgrade() {
                domain.give_back(&seat.records);
            }
        }
    }
}

#[cfg(not(loom))]
thread_local! {
    static SEATS: Seats = const { Seats::new() };
}
#[cfg(loom)]
thread_local! {
    static SEATS: Seats = Seats::new();
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_once_it_is_empty() {
        let domain = HazardDomain::new(Barriers::SYMMETRIC);
        let place = 7;
        let first = domain.slot().unwrap().protect(&place);
        assert!(domain.in_use(&[]).contains(&place));
        first.clear();
        assert!(!domain.in_use(&[]).contains(&place));
        let again = domain.slot().unwrap().protect(&place);
        assert!(std::ptr::eq(first.slot, again.slot));
        again.clear();
    }

    #[test]
    fn more_leases_than_slots_take_further_records() {
        let domain = HazardDomain::new(Barriers::SYMMETRIC);
        let places = [0_u64; 3 * SLOTS];
        let hazards: Vec<_> =
            places.iter().map(|place| domain.slot().unwrap().protect(place)).collect();
        let in_use = domain.in_use(&[]);
        assert!(places.iter().all(|place| in_use.contains(place)));
        hazards.iter().for_each(Hazard::clear);
        assert_eq!(domain.in_use(&[]).0, Some(Vec::new()));
        assert_eq!(lock(&domain.pool).made, 3);
    }

    #[test]
    fn a_thread_that_ends_leaves_its_leases_and_its_record() {
        let domain = HazardDomain::new(Barriers::SYMMETRIC);
        const LEASES: usize = if cfg!(miri) { 70 } else { 200 };
        for _ in 0..LEASES {
            std::thread::scope(|scope| {
                scope.spawn(|| domain.slot().unwrap().protect(&domain)).join().unwrap();
            });
        }
        // They outlived their threads, and fill as many records as they need and no more.
        assert_eq!(domain.in_use(&[]).0.unwrap().len(), LEASES);
        assert_eq!(lock(&domain.pool).made as usize, LEASES.div_ceil(SLOTS));
    }

    #[test]
    fn a_lease_may_end_on_another_thread() {
        let domain = HazardDomain::new(Barriers::SYMMETRIC);
        let hazard = domain.slot().unwrap().protect(&0);
        std::thread::scope(|scope| {
            scope.spawn(|| hazard.clear());
        });
        assert_eq!(domain.in_use(&[]).0, Some(Vec::new()));
    }

    #[test]
    fn without_a_barrier_everything_is_in_use() {
        // SAFETY: it never claims to have been a barrier.
        let barriers = unsafe { Barriers::asymmetric(|| false) };
        assert!(HazardDomain::new(barriers).in_use(&[]).contains(&0));
    }

    /// Threads that live on keep nothing of a cache that is gone, however many used it.
    #[test]
    fn a_domain_goes_with_its_cache() {
        let domain = HazardDomain::new(Barriers::SYMMETRIC);
        let (gone, barrier) = (Arc::downgrade(&domain), std::sync::Barrier::new(2));
        let (here, there) = (Arc::clone(&domain), domain);
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
    fn caches_on_one_thread_do_not_mix() {
        let places = [1, 2];
        let (one, two) =
            (HazardDomain::new(Barriers::SYMMETRIC), HazardDomain::new(Barriers::SYMMETRIC));
        let hazards =
            [one.slot().unwrap().protect(&places[0]), two.slot().unwrap().protect(&places[1])];
        assert!(one.in_use(&[]).contains(&places[0]) && !one.in_use(&[]).contains(&places[1]));
        assert!(two.in_use(&[]).contains(&places[1]) && !two.in_use(&[]).contains(&places[0]));
        hazards.iter().for_each(Hazard::clear);
    }
}
