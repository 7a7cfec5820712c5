//! loom models of the log that any thread writes, of the records of what is under way, and of a
//! monitor and such a log as one.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the monitor and to call a method with an address that
//! nothing dereferences.

#![allow(unsafe_code)]

use crate::exploring::{explore, try_orders};
use crate::monitor::{Lost, Monitor, Position, Replay, Sequence, Watch};
use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::{
    Access, AddressRange, Cache, Change, ChangeLog, ChangeMark, ChangeMarks, Config, Cover,
    MappingKind, PendingChanges, ReplayEnd, combination,
};
use loom::thread;
use std::sync::Arc;

const PAGE: usize = 4096;
const START: usize = 16 * PAGE;

fn page(number: usize) -> AddressRange {
    AddressRange::new(START + number * PAGE, PAGE).unwrap()
}

fn replayed<const N: usize>(log: &ChangeLog<N>, from: u64) -> (Vec<AddressRange>, ReplayEnd) {
    let mut ranges = Vec::new();
    let told = log.replay(from, usize::MAX, &mut |range| ranges.push(range));
    (ranges, told)
}

/// What is counted by the word is told, and what is told was written.
#[test]
fn loom_a_counted_entry_is_told() {
    explore(3, || {
        let log = Arc::new(ChangeLog::<4>::new());
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let log = Arc::clone(&log);
                thread::spawn(move || log.append(page(number)))
            })
            .collect();
        let (mut seen, told) = replayed(&log, 0);
        assert!(told.complete && seen.len() as u64 >= told.word, "{seen:?} {told:?}");
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let (more, told) = replayed(&log, told.up_to);
        assert_eq!((told.word, told.up_to, told.complete), (2, 2, true));
        seen.extend(more);
        assert!((0..2).all(|number| seen.contains(&page(number))), "{seen:?}");
        assert!(seen.iter().all(|it| *it == page(0) || *it == page(1)), "{seen:?}");
    });
}

/// The same in parts of one entry.
#[test]
fn loom_a_counted_entry_is_told_in_parts() {
    explore(3, || {
        let log = Arc::new(ChangeLog::<4>::new());
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let log = Arc::clone(&log);
                thread::spawn(move || log.append(page(number)))
            })
            .collect();
        let mut seen = Vec::new();
        let read_from = |mut from, seen: &mut Vec<_>| loop {
            let told = log.replay(from, 1, &mut |range| seen.push(range));
            assert!(told.complete && told.up_to >= from);
            from = told.up_to;
            if !told.is_cut {
                break told;
            }
        };
        let told = read_from(0, &mut seen);
        assert!(seen.len() as u64 >= told.word, "{seen:?} {told:?}");
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let told = read_from(told.up_to, &mut seen);
        assert_eq!((told.word, told.up_to), (2, 2));
        assert!((0..2).all(|number| seen.contains(&page(number))), "{seen:?}");
    });
}

/// A writer that reads a place while it changes hands marks the range that it has changed, or none.
#[test]
fn loom_no_range_is_marked_by_a_change_of_the_one_before_it() {
    explore(3, || {
        let marks = Arc::new(ChangeMarks::<1>::new());
        let before = marks.begin(page(0)).unwrap();
        let writer = {
            let marks = Arc::clone(&marks);
            thread::spawn(move || marks.set(page(0)))
        };
        drop(before);
        let after = marks.begin(page(1)).unwrap();
        assert!(!after.is_set());
        writer.join().unwrap();
        assert!(!after.is_set());
    });
}

/// Of two threads that want the last place one has it, and its range is that thread's.
#[test]
fn loom_a_place_is_one_range_s() {
    explore(3, || {
        let marks = Arc::new(ChangeMarks::<1>::new());
        let other = {
            let marks = Arc::clone(&marks);
            thread::spawn(move || marks.begin(page(1)).map(std::mem::forget).is_some())
        };
        let own = marks.begin(page(0));
        let others = other.join().unwrap();
        assert!(own.is_some() != others);
        marks.set(page(1));
        assert!(own.is_none_or(|own| !own.is_set()));
    });
}

/// Of two writers that mark one range each finds it marked when it goes on.
#[test]
fn loom_a_mark_is_set_when_the_writer_goes_on() {
    explore(3, || {
        let marks = Arc::new(ChangeMarks::<2>::new());
        let (first, second) = (marks.begin(page(0)).unwrap(), marks.begin(page(1)).unwrap());
        let writers = [0, 1].map(|number| {
            let marks = Arc::clone(&marks);
            thread::spawn(move || {
                marks.set(page(number));
                marks.set(page(0));
            })
        });
        let mut expected = false;
        for writer in writers {
            writer.join().unwrap();
            assert!(first.is_set() && (second.is_set() || !expected));
            expected = true;
        }
        assert!(second.is_set());
    });
}

/// Three entries for one slot: a writer in another's way says so, and no mixture is ever read.
#[test]
fn loom_writers_that_share_a_slot_lose_nothing_unsaid() {
    explore(3, || {
        let log = Arc::new(ChangeLog::<1>::new());
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let log = Arc::clone(&log);
                thread::spawn(move || log.append(page(number)))
            })
            .collect();
        let (mut seen, told) = replayed(&log, 0);
        let mut all_said = !told.complete;
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let (more, told) = replayed(&log, told.up_to);
        all_said |= !told.complete;
        seen.extend(more);
        assert!(all_said || (0..2).all(|number| seen.contains(&page(number))), "{seen:?}");
        assert!(seen.iter().all(|it| *it == page(0) || *it == page(1)), "{seen:?}");
    });
}

/// The world of the feed: changes are announced by the threads that make them.
struct World<const ENTRIES: usize> {
    page: AtomicU64,
    log: ChangeLog<ENTRIES>,
    under_way: PendingChanges<1>,
    pinned: Mutex<Vec<u64>>,
}

impl<const ENTRIES: usize> World<ENTRIES> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            page: AtomicU64::new(0),
            log: ChangeLog::new(),
            under_way: PendingChanges::new(),
            pinned: Mutex::new(Vec::new()),
        })
    }

    fn change(&self) {
        let ticket = self.under_way.begin(page(0));
        self.log.append(page(0));
        // Relaxed: what orders the effect is what the feed promises, nothing else.
        self.page.fetch_add(1, Ordering::Relaxed);
        self.under_way.end(ticket);
    }

    fn now(&self) -> u64 {
        self.page.load(Ordering::Relaxed)
    }
}

struct Device<const ENTRIES: usize>(Arc<World<ENTRIES>>);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl<const ENTRIES: usize> Registrar for Device<ENTRIES> {
    type Handle = usize;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 20, max_regions: 8 }
    }

    unsafe fn register(&self, _: AddressRange, _: Access) -> Result<usize, RegisterError> {
        let mut pinned = lock(&self.0.pinned);
        pinned.push(self.0.now());
        Ok(pinned.len() - 1)
    }

    unsafe fn deregister(&self, _: usize, _: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

struct Fed<const ENTRIES: usize>(Arc<World<ENTRIES>>);

// SAFETY: every change of the model is announced before it takes effect.
unsafe impl<const ENTRIES: usize> Monitor for Fed<ENTRIES> {
    fn name(&self) -> &'static str {
        "fed"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(self.0.log.word()))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.0.under_way.overlaps(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let ReplayEnd { up_to, word, complete, may_repeat, .. } =
            self.0.log.replay(from.0, usize::MAX, visit);
        Replay { up_to: Position(up_to, 0), sequence: Sequence(word), complete, may_repeat }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Reported
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        0
    }

    fn notify(&self) {}

    fn wait(&self, _: u32) {}
}

type FedCache<const ENTRIES: usize> = Cache<Device<ENTRIES>, Fed<ENTRIES>>;

fn cache<const ENTRIES: usize>(world: &Arc<World<ENTRIES>>) -> Arc<FedCache<ENTRIES>> {
    let (device, fed) = (Device(Arc::clone(world)), Fed(Arc::clone(world)));
    Arc::new(Cache::new(device, fed, Config::default()).unwrap())
}

/// Takes a lease and tells which page the device has.
fn pinned_by_get<const ENTRIES: usize>(cache: &FedCache<ENTRIES>, world: &World<ENTRIES>) -> u64 {
    // SAFETY: the model's device touches no memory.
    let lease = unsafe { cache.get(START as *const u8, PAGE, Access::READ) }.unwrap();
    let pinned = lock(&world.pinned);
    pinned[lease.handle()]
}

/// A get during a change, and one after it: the first may have either page, the second has the new
/// one. `ENTRIES` of one make the two changes of the log lose each other.
fn a_get_beside_changes<const ENTRIES: usize>() {
    let world = World::<ENTRIES>::new();
    let cache = cache(&world);
    let other = {
        let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
        thread::spawn(move || pinned_by_get(&cache, &world))
    };
    world.change();
    other.join().unwrap();
    assert_eq!(pinned_by_get(&cache, &world), world.now());
}

#[test]
fn loom_a_told_change_is_seen_and_nothing_is_published_during_it() {
    explore(3, a_get_beside_changes::<2>);
}

/// As [`explore`], with two involuntary switches, of a model of three threads, whose third takes minutes: where
/// `LOOM_MAX_PREEMPTIONS` is more than the 3 of `./check`, with those.
fn explore_large(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 4_000;
    builder.preemption_bound = builder.preemption_bound.filter(|&asked| asked > 3).or(Some(2));
    try_orders(&builder, model);
}

/// Two threads change, a third gets, all at once.
#[test]
fn loom_two_told_changes_are_seen() {
    explore_large(|| {
        let world = World::<1>::new();
        let cache = cache(&world);
        pinned_by_get(&cache, &world);
        let changing = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.change())
        };
        let getting = {
            let (cache, world) = (Arc::clone(&cache), Arc::clone(&world));
            thread::spawn(move || pinned_by_get(&cache, &world))
        };
        world.change();
        getting.join().unwrap();
        changing.join().unwrap();
        assert_eq!(pinned_by_get(&cache, &world), world.now());
    });
}

/// A monitor that is a word, together with a log.
struct Word(AtomicU64);

// SAFETY: nothing is registered on its word.
unsafe impl Monitor for Word {
    fn name(&self) -> &'static str {
        "word"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(self.0.load(Ordering::Acquire)))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let word = self.0.load(Ordering::Acquire);
        (0..word).for_each(|_| visit(page(8)));
        Replay {
            up_to: Position(word, 0),
            sequence: Sequence(word),
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

    fn notify(&self) {}

    fn wait(&self, _: u32) {}
}

/// One thread moves the first word, one the second; a check and a replay that give the same sum know
/// the same of both. Two readers on two threads, so that each may see the two in another order.
#[test]
fn loom_equal_sums_are_equal_pairs() {
    explore(3, || {
        let both = Arc::new((Word(AtomicU64::new(0)), ChangeLog::<2>::new()));
        let movers = [
            {
                let both = Arc::clone(&both);
                thread::spawn(move || {
                    both.0.0.fetch_add(1, Ordering::Release);
                })
            },
            {
                let both = Arc::clone(&both);
                thread::spawn(move || both.1.append(page(9)))
            },
        ];
        let replaying = {
            let both = Arc::clone(&both);
            thread::spawn(move || {
                let mut told = Vec::new();
                let from = Position(0, 0);
                let replay =
                    combination::replay(&both.0, &both.1, from, usize::MAX, &mut |range| {
                        told.push(range)
                    });
                (replay, told)
            })
        };
        let checked = combination::check(&both.0, &both.1).unwrap();
        // What this thread knows has happened: what a change that returned would be.
        let (first, second) = (both.0.0.load(Ordering::Acquire), both.1.word());
        let again = combination::check(&both.0, &both.1).unwrap();
        let (replay, told) = replaying.join().unwrap();
        movers.into_iter().for_each(|mover| mover.join().unwrap());
        if again == replay.sequence {
            assert!(first == 0 || told.contains(&page(8)), "{checked:?} {replay:?} {told:?}");
            assert!(second == 0 || told.contains(&page(9)), "{checked:?} {replay:?} {told:?}");
        }
    });
}
