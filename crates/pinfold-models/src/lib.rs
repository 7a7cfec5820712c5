//! Models of the lock-free parts outside of `pinfold-core`: every interleaving with loom, in the memory
//! model of the language, or random ones of sequentially consistent accesses with shuttle.
//!
//! The parts are compiled from the source files of their crates: those take their atomics from
//! `crate::sync`, which is the standard library's there and loom's or shuttle's here. What they need around them,
//! a page that the kernel wipes for instance, stands here in a few lines. So a model needs nothing of the
//! crate but its part. Empty without `--cfg loom` or `--cfg shuttle`; run with `./check loom schedules`.
//!
//! loom takes a `SeqCst` access for an `AcqRel` one. The event count's proof needs the single order of `SeqCst`
//! accesses, which is shuttle's only one.

#![cfg(any(loom, shuttle))]
#![allow(dead_code, unreachable_pub)] // a model uses a part of its part

#[cfg(shuttle)]
#[path = "../../pinfold/src/monitor/event_count.rs"]
mod event_count;
#[cfg(shuttle)]
mod futex;

// The parts name the kernel's calls, and the library's types, by their crates.
#[cfg(loom)]
extern crate self as pinfold;
extern crate self as pinfold_kernel;

#[cfg(shuttle)]
mod sync {
    pub(crate) use shuttle::sync::atomic::{AtomicU32, Ordering};
}

#[cfg(loom)]
#[path = "../../pinfold-preload/src/children.rs"]
mod children;
#[cfg(all(test, loom))]
#[path = "../../pinfold-core/src/exploring.rs"]
mod exploring;
#[cfg(loom)]
#[path = "../../pinfold-preload/src/keeper.rs"]
mod keeper;
#[cfg(loom)]
mod keeping;
#[cfg(loom)]
#[path = "../../pinfold/src/monitor/log.rs"]
mod log;
#[cfg(loom)]
#[path = "../../pinfold/src/pool/map.rs"]
mod map;
#[cfg(loom)]
#[path = "../../pinfold-preload/src/mapping_room.rs"]
mod mapping_room;
#[cfg(loom)]
#[path = "../../pinfold/src/monitor/members.rs"]
mod members;
#[cfg(loom)]
#[path = "../../pinfold/src/monitor/pending_discards.rs"]
mod pending_discards;
#[cfg(loom)]
#[path = "../../pinfold/src/monitor/range_set.rs"]
mod range_set;
#[cfg(loom)]
#[path = "../../pinfold-preload/src/reasons.rs"]
mod reasons;
#[cfg(loom)]
#[path = "../../pinfold-preload/src/store.rs"]
mod store;

#[cfg(loom)]
pub(crate) use self::keeping::{
    admission, apart, device, errno, heap, holding, hooks, mapping, monitor, real, registrar,
    report, sandbox, steps,
};
#[cfg(loom)]
pub(crate) use pinfold_core::{
    AddressRange, Lost, Monitor, Position, Replay, Sequence, Uncovered, Watch, listed,
};

#[cfg(loom)]
mod sync {
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// It orders nothing.
    #[derive(Debug)]
    pub(crate) struct PriorityGate;

    #[derive(Debug)]
    pub(crate) struct HeldGate<'a>(std::marker::PhantomData<&'a PriorityGate>);

    impl PriorityGate {
        pub(crate) const fn new(_: fn() -> bool) -> Self {
            Self
        }

        pub(crate) const fn hold(&self) -> HeldGate<'_> {
            HeldGate(std::marker::PhantomData)
        }

        pub(crate) const fn pass(&self) -> bool {
            true
        }

        pub(crate) const fn is_held(&self) -> bool {
            false
        }
    }

    /// What others do meanwhile is another interleaving; a thread that yields would run after all of it.
    pub(crate) const fn sleep(_: std::time::Duration) {}

    /// In the place of `pinfold-core`'s, which keeps its value for good: threads that make one wait for a lock, and a
    /// thread that sees it ready sees its value.
    #[derive(Debug)]
    pub(crate) struct FirstMade<T> {
        value: std::sync::OnceLock<Box<T>>,
        making: Mutex<()>,
        ready: AtomicBool,
    }

    impl<T> FirstMade<T> {
        pub(crate) fn new() -> Self {
            let value = std::sync::OnceLock::new();
            Self { value, making: Mutex::new(()), ready: AtomicBool::new(false) }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            // Acquire: pairs with the store below.
            if self.ready.load(Ordering::Acquire) {
                self.value.get().map(Box::as_ref)
            } else {
                None
            }
        }

        pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Box<T>) -> &T {
            let _making = self.making.lock().expect("no model goes on after a panic");
            let value = self.value.get_or_init(make);
            // Release: the value is there before it is said to be.
            self.ready.store(true, Ordering::Release);
            value
        }
    }
}

/// A model's atomics are not made of bytes.
#[cfg(loom)]
mod zeroed {
    pub(crate) fn zeros<T: Default>(count: usize) -> Box<[T]> {
        std::iter::repeat_with(T::default).take(count).collect()
    }
}

/// The size of a slab's blocks.
#[cfg(loom)]
mod memory {
    pub(crate) const HUGE: usize = 2 << 20;
}

/// No model fails.
#[cfg(loom)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

/// The kernel's table of threads, of a process with the threads [`DISCARDS`](threads::DISCARDS) and
/// [`ASKS`](threads::ASKS).
#[cfg(loom)]
mod threads {
    use crate::Errno;
    use std::cell::Cell;

    loom::thread_local! {
        static THREAD: Cell<u32> = Cell::new(0);
    }

    /// Names the calling thread of a model.
    pub(crate) fn be_thread(number: u32) {
        THREAD.with(|thread| thread.set(number));
    }

    pub(crate) fn thread_id() -> u32 {
        THREAD.with(Cell::get)
    }

    /// It announces a discard, makes it, and calls the monitor. It is never seen at rest.
    pub(crate) const DISCARDS: u32 = 1;
    pub(crate) const ASKS: u32 = 2;

    /// All threads have the same one.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) struct Identity;

    impl Identity {
        pub(crate) const fn file_system(self) -> u64 {
            1
        }
    }

    #[derive(Debug)]
    pub(crate) struct ThreadDirectory;

    #[allow(clippy::unnecessary_wraps, clippy::unused_self)] // as the part expects it
    impl ThreadDirectory {
        pub(crate) const fn open() -> Result<Self, Errno> {
            Ok(Self)
        }

        pub(crate) const fn identity(&self) -> Identity {
            Identity
        }

        pub(crate) fn list(&self, list: &mut Vec<u32>) -> Result<(), Errno> {
            list.clear();
            list.extend([DISCARDS, ASKS]);
            Ok(())
        }

        pub(crate) const fn is_at_rest(&self, _: u32) -> bool {
            false
        }

        pub(crate) const fn numbers_agree(&self) -> bool {
            true
        }
    }
}

#[cfg(loom)]
mod fork_mark {
    use crate::Errno;
    use crate::sync::{AtomicU64, Ordering};

    /// The word, without the page that a fork wipes: no model forks.
    #[derive(Debug)]
    pub(crate) struct ForkMark(AtomicU64);

    impl ForkMark {
        #[allow(clippy::unnecessary_wraps)] // as the part expects it
        pub(crate) fn new(initial: u64) -> Result<Self, Errno> {
            Ok(Self(AtomicU64::new(initial)))
        }

        pub(crate) fn word(&self) -> &AtomicU64 {
            &self.0
        }

        pub(crate) fn forked(&self) -> bool {
            self.0.load(Ordering::Relaxed) == 0
        }
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::exploring::explore;
    use super::log::{Log, Writer};
    use super::map::{Found as FoundSlab, LEAF, Table};
    use super::members::Members;
    use super::memory::HUGE;
    use super::pending_discards::PendingDiscards;
    use super::threads::{ASKS, DISCARDS, be_thread};
    use super::{AddressRange, Position};
    use loom::sync::Mutex;
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::thread;
    use pinfold_core::{Found, StampedSlot};
    use std::sync::Arc;

    /// Every range says which entry it is, so a mixture of two entries shows.
    fn range(index: u64) -> AddressRange {
        let start = usize::try_from(index + 1).unwrap() * 16;
        AddressRange::new(start, start).unwrap()
    }

    /// Two entries for one slot: what is read is one of them, whole, or nothing.
    ///
    /// The reader is the thread that begins later. Of an atomic's loads loom remembers the last, and the writer loads the stamp
    /// before it exchanges it: so what the reader had loaded before that counts for nothing, and with the reader first loom
    /// tries one order only.
    #[test]
    fn loom_a_slot_never_gives_half_of_an_entry() {
        explore(3, || {
            let slot = Arc::new(StampedSlot::new());
            let reader = {
                let slot = Arc::clone(&slot);
                thread::spawn(move || {
                    for index in 0..2 {
                        match slot.read(index) {
                            Found::Entry(entry) => assert_eq!(entry, range(index)),
                            Found::Hole | Found::Overwritten => {}
                        }
                    }
                })
            };
            (0..2).for_each(|index| assert!(slot.write(index, range(index))));
            reader.join().unwrap();
            assert_eq!(slot.read(0), Found::Overwritten);
            assert_eq!(slot.read(1), Found::Entry(range(1)));
        });
    }

    /// What the word counts is replayed, or said to be gone.
    fn replay_beside_appends(capacity: usize) {
        let log = Arc::new(Log::new(capacity).unwrap());
        let from = Position(log.word(), 0);
        let writing = {
            let log = Arc::clone(&log);
            thread::spawn(move || {
                let mut writer = Writer::new(&log);
                for index in 0..2 {
                    writer.raise_pending();
                    writer.append(range(index));
                    writer.publish();
                }
            })
        };
        let mut seen = Vec::new();
        let replay = log.replay(from, usize::MAX, &mut |entry| seen.push(entry));
        let counted = (replay.up_to.0 - from.0) / 2;
        assert!(seen.iter().zip(0..).all(|(entry, index)| *entry == range(index)), "{seen:?}");
        assert!(!replay.complete || seen.len() as u64 == counted, "{seen:?} {replay:?}");
        assert!(replay.complete || capacity < 2, "{replay:?}");
        writing.join().unwrap();
    }

    #[test]
    fn loom_what_a_log_counts_is_replayed() {
        explore(3, || replay_beside_appends(2));
    }

    #[test]
    fn loom_what_a_short_log_lost_is_said() {
        explore(3, || replay_beside_appends(1));
    }

    /// A change whose event the reader has taken is included in what the next question is told, though
    /// it may not be in the log yet.
    #[test]
    fn loom_what_the_reader_holds_is_waited_for() {
        explore(3, || {
            let log = Arc::new(Log::new(2).unwrap());
            let events = Arc::new(Mutex::new(vec![range(0)]));
            let from = Position(log.word(), 0);
            let reading = {
                let (log, events) = (Arc::clone(&log), Arc::clone(&events));
                thread::spawn(move || {
                    let mut writer = Writer::new(&log);
                    writer.raise_pending();
                    let taken = std::mem::take(&mut *events.lock().unwrap());
                    taken.into_iter().for_each(|entry| writer.append(entry));
                    writer.publish();
                })
            };
            // The kernel lets the changing thread go on once its event was taken.
            let taken = events.lock().unwrap().is_empty();
            if taken {
                let first = log.word();
                let known = loop {
                    match Log::includes(first, log.word()) {
                        Some(known) => break known,
                        None => thread::yield_now(),
                    }
                };
                let mut seen = Vec::new();
                let replay = log.replay(from, usize::MAX, &mut |entry| seen.push(entry));
                assert!(replay.sequence.0 >= known.0 && seen == [range(0)], "{seen:?} {replay:?}");
            }
            reading.join().unwrap();
        });
    }

    /// Whether another thread has set the word, by now or when it has had its turn.
    fn is_set(word: &AtomicU64) -> bool {
        let is_set = || word.load(Ordering::Acquire) == 1;
        is_set() || {
            thread::yield_now();
            is_set()
        }
    }

    /// The claim of `pending_discards.rs`: a thread that knows of a discard, and finds it settled, sees what it did.
    #[test]
    fn loom_a_settled_discard_has_taken_effect() {
        /// Not loom's: it counts over all interleavings.
        static BELIEVED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        explore(2, || {
            let discards = Arc::new(PendingDiscards::new());
            let [queued, announced, pages] = [0, 0, 1].map(|word| Arc::new(AtomicU64::new(word)));
            let page = AddressRange::new(1 << 12, 4096).unwrap();
            let reading = {
                let (discards, queued) = (Arc::clone(&discards), Arc::clone(&queued));
                let announced = Arc::clone(&announced);
                thread::spawn(move || {
                    if is_set(&queued) {
                        discards.record(page);
                        announced.store(1, Ordering::Release);
                    }
                })
            };
            let discarding = {
                let (discards, announced) = (Arc::clone(&discards), Arc::clone(&announced));
                let pages = Arc::clone(&pages);
                thread::spawn(move || {
                    be_thread(DISCARDS);
                    // An earlier call, which is no evidence.
                    discards.mark_caller();
                    // From here on it is in its system call.
                    queued.store(1, Ordering::Release);
                    // The kernel keeps it in there until the reader has its event.
                    if is_set(&announced) {
                        pages.store(0, Ordering::Relaxed);
                        discards.mark_caller();
                    }
                })
            };
            // A thread of its own: loom lets none read a second time, after it yielded, what it has seen.
            let asking = thread::spawn(move || {
                be_thread(ASKS);
                for _ in 0..2 {
                    if is_set(&announced) && !discards.overlaps_unsettled(page, &|_| false) {
                        assert_eq!(pages.load(Ordering::Relaxed), 0, "believed too early");
                        BELIEVED.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    thread::yield_now();
                }
            });
            asking.join().unwrap();
            reading.join().unwrap();
            discarding.join().unwrap();
        });
        assert_ne!(BELIEVED.load(Ordering::Relaxed), 0);
    }

    /// The claim of `members.rs`, as `discard_sources.rs` needs it: a thread that knows by the kernel's lock of a discard that was
    /// announced to a member, and does not find the member, sees what the discard did. A third one enters meanwhile.
    fn a_member_is_found_until_it_is_over(counts: bool) {
        /// Not loom's: it counts over all interleavings.
        static GONE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        static FOUND: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let gone_before = GONE.load(Ordering::Relaxed);
        explore(3, move || {
            let members = Arc::new(Members::new());
            let (own, other) = (Arc::new(1), Arc::new(2));
            members.enter(&own);
            let kernel = Arc::new(Mutex::new(false));
            let pages = Arc::new(AtomicU64::new(1));
            let discarding = {
                let (members, kernel) = (Arc::clone(&members), Arc::clone(&kernel));
                let pages = Arc::clone(&pages);
                thread::spawn(move || {
                    members.enter(&other);
                    *kernel.lock().unwrap() = true;
                    pages.store(0, Ordering::Relaxed);
                    assert!(members.remove(&other));
                })
            };
            let entering = (!counts).then(|| {
                let members = Arc::clone(&members);
                thread::spawn(move || members.enter(&Arc::new(3)))
            });
            let is_announced = *kernel.lock().unwrap();
            if is_announced {
                let is_found =
                    if counts { members.count() > 1 } else { members.any(|member| **member == 2) };
                if is_found {
                    FOUND.fetch_add(1, Ordering::Relaxed);
                } else {
                    GONE.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(pages.load(Ordering::Relaxed), 0, "believed too early");
                }
            }
            discarding.join().unwrap();
            entering.into_iter().for_each(|entering| entering.join().unwrap());
            assert!(members.any(|member| **member == 1) && members.remove(&own));
            assert_eq!(members.count(), usize::from(!counts));
        });
        assert_ne!(GONE.load(Ordering::Relaxed), gone_before);
        assert_ne!(FOUND.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn loom_a_monitor_is_asked_until_its_discards_are_over() {
        a_member_is_found_until_it_is_over(false);
    }

    #[test]
    fn loom_a_monitor_is_counted_until_its_discards_are_over() {
        a_member_is_found_until_it_is_over(true);
    }

    /// A slab without what is in it: a thread that finds it reads a number of it.
    struct Slab(AtomicU64);

    /// Two pools make their first slabs, which lie in one leaf of the table; a thread that finds
    /// one finds it whole.
    #[test]
    fn loom_a_slab_is_found_whole() {
        explore(3, || {
            let table = Arc::new(Table::<1>::new());
            let slabs = Arc::new([0, 0].map(|number| Slab(AtomicU64::new(number))));
            let publish = |place: usize, table: &Table<1>, slabs: &[Slab; 2]| {
                // What a slab consists of, written by the thread that makes it.
                slabs[place].0.store(10 + place as u64, Ordering::Relaxed);
                let slab = std::ptr::NonNull::from(&slabs[place]).cast::<FoundSlab>();
                assert!(table.set(place * HUGE, HUGE, Some(slab)));
            };
            let other = {
                let (table, slabs) = (Arc::clone(&table), Arc::clone(&slabs));
                thread::spawn(move || publish(0, &table, &slabs))
            };
            let finding = {
                let (table, slabs) = (Arc::clone(&table), Arc::clone(&slabs));
                thread::spawn(move || {
                    for place in 0..LEAF {
                        if let Some(found) = table.find(place * HUGE + 1) {
                            assert_eq!(found, std::ptr::NonNull::from(&slabs[place]).cast());
                            assert_eq!(slabs[place].0.load(Ordering::Relaxed), 10 + place as u64);
                        }
                    }
                })
            };
            publish(1, &table, &slabs);
            assert!(table.find(HUGE).is_some(), "its own");
            other.join().unwrap();
            finding.join().unwrap();
            assert!((0..LEAF).all(|place| table.find(place * HUGE).is_some()));
        });
    }
}
