//! Every change of a watched mapping is in the log when the changing call has returned, on the
//! real kernel; and what was not touched is not in it.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod alone;
mod support;

use alone::alone;
use pinfold::mappings::mappings_in;
use pinfold::monitor::Userfaultfd;
use pinfold::{AddressRange, Change, Cover, Lost, MappingKind, Monitor, Replay, Uncovered, Watch};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use support::*;

/// A change of pages 8..12 of 24 pages at the address given. `None`: this kernel cannot do it.
type Act = fn(usize) -> Option<()>;

const MIDDLE: usize = 8 * PAGE;
const LENGTH: usize = 4 * PAGE;

fn done(done: bool) -> Option<()> {
    done.then_some(())
}

/// Every way to change a mapping that leaves its neighbours in place.
const CHANGES: &[(&str, Act)] = &[
    ("munmap", |at| done(munmap(at + MIDDLE, LENGTH))),
    ("munmap, raw", |at| done(raw(libc::SYS_munmap, [at + MIDDLE, LENGTH, 0, 0, 0]) == 0)),
    ("mmap over it", |at| {
        map_over(at + MIDDLE, 4);
        Some(())
    }),
    ("mremap elsewhere", |at| {
        let to = map(4);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        done(mremap(at + MIDDLE, LENGTH, LENGTH, fixed, to) == Some(to))
    }),
    ("mremap to grow", |at| {
        mremap(at + MIDDLE, LENGTH, 2 * LENGTH, libc::MREMAP_MAYMOVE, 0).map(drop)
    }),
    ("mremap, raw", |at| {
        let arguments = [at + MIDDLE, LENGTH, 2 * LENGTH, libc::MREMAP_MAYMOVE as usize, 0];
        done(raw(libc::SYS_mremap, arguments) > 0)
    }),
    ("mremap to shrink", |at| {
        // Shrinks pages 8..14 to nothing but page 8; page 12 and 13 go as well.
        mremap(at + MIDDLE - PAGE, LENGTH + PAGE, PAGE, 0, 0).map(drop)
    }),
    ("mremap that leaves it empty", |at| {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        mremap(at + MIDDLE, LENGTH, LENGTH, how, 0).map(drop)
    }),
    ("mremap on top of it", |at| {
        let from = map(4);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        mremap(from, LENGTH, LENGTH, fixed, at + MIDDLE).map(drop)
    }),
    ("MADV_DONTNEED", |at| done(madvise(at + MIDDLE, LENGTH, libc::MADV_DONTNEED))),
    ("MADV_DONTNEED, raw", |at| {
        let advice = libc::MADV_DONTNEED as usize;
        done(raw(libc::SYS_madvise, [at + MIDDLE, LENGTH, advice, 0, 0]) == 0)
    }),
    ("MADV_DONTNEED_LOCKED", |at| done(madvise(at + MIDDLE, LENGTH, 24))),
    ("MADV_FREE", |at| done(madvise(at + MIDDLE, LENGTH, libc::MADV_FREE))),
    ("process_madvise", |at| done(process_madvise(at + MIDDLE, LENGTH, libc::MADV_DONTNEED))),
];

/// Watches 24 fresh pages, changes the middle by `act`, run by `run`, and looks at the log.
fn is_seen(monitor: &Userfaultfd, name: &str, act: impl FnOnce(usize) -> Option<()>) {
    let at = map(24);
    fill(at, 24, 1);
    assert_eq!(monitor.watch(range(at, 24 * PAGE)), Watch::Covered, "{name}");
    let before = mark(monitor);
    if act(at).is_none() {
        eprintln!("skipped: this kernel cannot do: {name}");
        return;
    }
    let changes = changes_since(monitor, before);
    let middle = range(at + MIDDLE, LENGTH);
    assert!(touch(&changes, middle), "{name}: {changes:?}");
    assert!(!touch(&changes, range(at, MIDDLE - PAGE)), "{name}: {changes:?}");
    assert!(!touch(&changes, range(at + MIDDLE + LENGTH, 12 * PAGE)), "{name}: {changes:?}");
}

#[test]
fn each_change_is_seen_when_its_call_returns() {
    let monitor = Userfaultfd::new().unwrap();
    for (name, act) in CHANGES {
        is_seen(&monitor, name, act);
    }
}

#[test]
fn each_change_by_another_thread_is_seen() {
    let monitor = Userfaultfd::new().unwrap();
    for (name, act) in CHANGES {
        is_seen(&monitor, name, |at| {
            thread::scope(|scope| scope.spawn(|| act(at)).join().unwrap())
        });
    }
}

/// The heap belongs to the C library, so this is done where it is no more needed: in a child.
#[test]
fn the_shrinking_heap_is_seen() {
    let child = fork(|| {
        let monitor = Userfaultfd::new().unwrap();
        let end = brk(0);
        let grown = brk(end + 64 * PAGE);
        assert_eq!(grown, end + 64 * PAGE);
        let part = range(grown - 32 * PAGE, 32 * PAGE);
        assert_eq!(monitor.watch(part), Watch::Covered);
        let before = mark(&monitor);
        assert_eq!(brk(grown - 32 * PAGE), grown - 32 * PAGE);
        let mut seen = false;
        monitor.check().unwrap();
        monitor.replay(before.up_to, &mut |entry| seen |= entry.overlaps(&part));
        assert!(seen);
    });
    assert_eq!(wait_for(child), 0);
}

/// What moved is watched where it went, and what was there before is gone.
#[test]
fn a_moved_mapping_is_still_watched() {
    let monitor = Userfaultfd::new().unwrap();
    let (from, to) = (map(4), map(4));
    let (old, new) = (range(from, LENGTH), range(to, LENGTH));
    assert_eq!(monitor.watch(old), Watch::Covered);
    let before = mark(&monitor);
    let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    assert_eq!(mremap(from, LENGTH, LENGTH, fixed, to), Some(to));
    let changes = changes_since(&monitor, before);
    assert!(touch(&changes, old) && touch(&changes, new), "{changes:?}");
    let before = mark(&monitor);
    assert!(munmap(to, LENGTH));
    assert!(touch(&changes_since(&monitor, before), new));
}

#[test]
fn what_is_not_watched_makes_no_entry() {
    let monitor = Userfaultfd::new().unwrap();
    let (watched, other) = (map(4), map(24));
    assert_eq!(monitor.watch(range(watched, LENGTH)), Watch::Covered);
    let before = mark(&monitor);
    assert!(madvise(other, LENGTH, libc::MADV_DONTNEED));
    assert!(munmap(other, 24 * PAGE));
    assert!(mprotect(watched, LENGTH, libc::PROT_READ));
    assert_eq!(monitor.check(), Ok(before.sequence));
    assert!(munmap(watched, LENGTH));
    assert_ne!(monitor.check(), Ok(before.sequence));
}

/// `munmap` frees the addresses before its event is read, so another thread can map the same
/// address and ask while the event is still on its way. A monitor that answers from what it has
/// read so far may say "nothing new"; the tests of a change under way force what happens by chance here.
#[test]
fn an_address_used_again_during_its_munmap_is_seen() {
    const ROUNDS: u32 = 4000;
    let monitor = Userfaultfd::new().unwrap();
    let (place, barrier, returned) =
        (AtomicUsize::new(map(4)), Barrier::new(2), AtomicBool::new(false));
    let (mut overtaken, mut stale, mut refused) = (0, 0, Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                barrier.wait();
                munmap(place.load(Ordering::SeqCst), LENGTH);
                returned.store(true, Ordering::SeqCst);
                barrier.wait();
            }
        });
        for _ in 0..ROUNDS {
            let at = place.load(Ordering::SeqCst);
            fill(at, 4, 1);
            let answer = watch_among_others(&monitor, range(at, LENGTH));
            if answer != Watch::Covered {
                refused.push((answer, mappings_in(range(at, LENGTH)).unwrap()));
            }
            let before = mark(&monitor);
            returned.store(false, Ordering::SeqCst);
            barrier.wait();
            if map_when_free(at, &returned) {
                // As a cache does: the same sequence is a hit, and the log is not read.
                let now = monitor.check().unwrap();
                overtaken += u32::from(!returned.load(Ordering::SeqCst));
                let seen =
                    now != before.sequence && touch(&changes_since(&monitor, before), range(at, 1));
                stale += u32::from(!seen);
            } else {
                place.store(map(4), Ordering::SeqCst);
            }
            barrier.wait();
        }
    });
    eprintln!("{overtaken} of {ROUNDS} times check had answered before munmap returned");
    assert!(refused.is_empty(), "{refused:x?}");
    assert_eq!(stale, 0);
}

/// A monitor of another test that is being dropped may hold a mapping for a moment.
fn watch_among_others(monitor: &Userfaultfd, range: AddressRange) -> Watch {
    let busy = Watch::Uncovered(Uncovered::WatchedByAnother);
    let mut answers = std::iter::repeat_with(|| {
        thread::yield_now();
        monitor.watch(range)
    });
    answers.by_ref().take(10_000).find(|answer| *answer != busy).unwrap_or(busy)
}

/// Maps four pages as soon as they are free. False if they are not free after `munmap` returned,
/// because another test was faster.
fn map_when_free(at: usize, returned: &AtomicBool) -> bool {
    loop {
        let free = returned.load(Ordering::SeqCst);
        if map_if_free(at, 4) {
            return true;
        }
        if free {
            return false;
        }
    }
}

/// A discard is announced before it happens. Whenever the announcement can be read and the range
/// is said not to be pending, the pages must be gone.
#[test]
fn a_discard_is_in_flux_until_it_has_happened() {
    const PAGES: usize = 4096;
    let monitor = Userfaultfd::new().unwrap();
    let at = map(PAGES);
    // No huge pages: they would go too fast.
    madvise(at, PAGES * PAGE, libc::MADV_NOHUGEPAGE);
    let (all, last) = (range(at, PAGES * PAGE), at + (PAGES - 1) * PAGE);
    assert_eq!(monitor.watch(all), Watch::Covered);
    let (mut early, mut stale) = (0, 0);
    for _ in 0..30 {
        fill(at, PAGES, 1);
        let before = mark(&monitor);
        thread::scope(|scope| {
            scope.spawn(|| assert!(madvise(at, PAGES * PAGE, libc::MADV_DONTNEED)));
            // Its own entry: on a busy machine there may be one that says everything changed,
            // made while the announcement has not been read.
            while !changes_since(&monitor, before).contains(&all) {}
            early += u32::from(byte(last).load(Ordering::Acquire) == 1);
            until_settled(&monitor, all);
            stale += u32::from(byte(last).load(Ordering::Acquire) == 1);
        });
    }
    eprintln!("{early} of 30 times the discard was read before it had happened");
    assert_eq!(stale, 0);
}

/// Once every changing thread sleeps or is gone, no change stays pending; other ranges never were.
#[test]
fn a_discard_settles() {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(8);
    assert_eq!(monitor.watch(range(at, 8 * PAGE)), Watch::Covered);
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            assert!(madvise(at, PAGE, libc::MADV_DONTNEED));
            barrier.wait();
            barrier.wait();
        });
        barrier.wait();
        monitor.check().unwrap();
        assert!(!monitor.change_pending(range(at + PAGE, PAGE)));
        until_settled(&monitor, range(at, PAGE));
        barrier.wait();
    });
}

/// A thread that never sleeps keeps what was discarded pending, and nothing else, however many
/// discards there were.
#[test]
fn discards_with_a_thread_that_never_sleeps_leave_other_memory_alone() {
    const PAGES: usize = 2000;
    let monitor = Userfaultfd::new().unwrap();
    let (discarded, other) = (map(PAGES), map(16));
    for (at, pages) in [(discarded, PAGES), (other, 16)] {
        assert_eq!(monitor.watch(range(at, pages * PAGE)), Watch::Covered);
    }
    let (spins, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            spins.store(true, Ordering::Release);
            while !over.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
        });
        while !spins.load(Ordering::Acquire) {
            thread::yield_now();
        }
        for page in 0..PAGES {
            assert!(madvise(discarded + page * PAGE, PAGE, libc::MADV_DONTNEED));
            monitor.check().unwrap();
            assert!(!monitor.change_pending(range(other, 16 * PAGE)), "after {page} discards");
        }
        let still = monitor.change_pending(range(discarded, PAGE));
        over.store(true, Ordering::Release);
        assert!(still, "the thread that spins may have made the first discard");
    });
    until_settled(&monitor, range(discarded, PAGES * PAGE));
}

#[test]
fn a_cache_left_behind_is_told_to_drop_everything() {
    const PAGES: usize = 5000;
    let monitor = Userfaultfd::new().unwrap();
    let at = map(PAGES);
    assert_eq!(monitor.watch(range(at, PAGES * PAGE)), Watch::Covered);
    let before = mark(&monitor);
    (0..PAGES).for_each(|page| assert!(munmap(at + page * PAGE, PAGE)));
    monitor.check().unwrap();
    let replay = monitor.replay(before.up_to, &mut |_| {});
    assert!(!replay.complete);
    assert_eq!(monitor.replay(replay.up_to, &mut |_| panic!("old news")), {
        Replay { complete: true, ..replay }
    });
}

/// A `munmap` that has taken effect and does not go on: the event of its lower half belongs to a
/// userfaultfd without a reader, and the kernel announces one after the other. The upper half is
/// free, another thread may have mapped it by now, and the monitor's event for it is not even on its way.
///
/// Runs `meanwhile` in that state with the sequence from before; `meanwhile` has the deaf one read.
fn during_a_change(
    monitor: &Userfaultfd,
    meanwhile: impl FnOnce(Replay, AddressRange, &DeafUserfaultfd),
) {
    let (deaf, at) = (DeafUserfaultfd::new(), map(8));
    deaf.watch(at, LENGTH);
    let upper = range(at + LENGTH, LENGTH);
    assert_eq!(monitor.watch(upper), Watch::Covered);
    let (before, mapped) = (mark(monitor), mappings_in(upper).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| assert!(munmap(at, 2 * LENGTH)));
        while mappings_in(upper).unwrap() == mapped {}
        meanwhile(before, upper, &deaf);
    });
}

/// `check` must neither wait for ever nor say that nothing changed.
#[test]
fn a_change_that_does_not_end_counts_as_a_change_of_everything() {
    // Another test's mapping would fill the hole.
    alone("a_change_that_does_not_end_counts_as_a_change_of_everything", change_that_does_not_end);
}

fn change_that_does_not_end() {
    let monitor = Userfaultfd::new().unwrap();
    let mut seen = Vec::new();
    during_a_change(&monitor, |before, upper, deaf| {
        for _ in 0..2 {
            let now = monitor.check().unwrap();
            seen.push(now != before.sequence && touch(&changes_since(&monitor, before), upper));
        }
        deaf.read_all();
    });
    assert_eq!(seen, [true, true]);
    let before = mark(&monitor);
    assert_eq!(monitor.check(), Ok(before.sequence), "and it is over when it ends");
}

/// The change ends while `check` waits for it. A `check` that looked at the word before it asked
/// the kernel would answer from before the change.
#[test]
fn a_check_that_meets_a_change_answers_after_it() {
    // Another test's mapping would fill the hole.
    alone("a_check_that_meets_a_change_answers_after_it", check_that_meets_a_change);
}

fn check_that_meets_a_change() {
    let monitor = Userfaultfd::new().unwrap();
    let mut stale = 0;
    for _ in 0..50 {
        during_a_change(&monitor, |before, _, deaf| {
            let asking = AtomicBool::new(false);
            thread::scope(|scope| {
                let checker = scope.spawn(|| {
                    asking.store(true, Ordering::Release);
                    monitor.check().unwrap()
                });
                while !asking.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                thread::yield_now();
                deaf.read_all();
                stale += u32::from(checker.join().unwrap() == before.sequence);
            });
        });
    }
    assert_eq!(stale, 0);
}

#[test]
fn memory_that_cannot_be_watched_is_refused_with_the_reason() {
    // Another test's mapping would fill the hole.
    alone("memory_that_cannot_be_watched_is_refused_with_the_reason", refusals_with_reasons);
}

fn refusals_with_reasons() {
    let monitor = Userfaultfd::new().unwrap();
    let refused = |at, reason| {
        let answer = monitor.watch(range(at, 4 * PAGE));
        assert_eq!(answer, Watch::Uncovered(reason), "{reason}");
    };
    let kind = Uncovered::Mapping;
    let memfd = memfd();
    refused(map_flags(4, libc::MAP_SHARED, memfd).unwrap(), kind(MappingKind::SharedMemory));
    refused(map_flags(4, libc::MAP_PRIVATE, memfd).unwrap(), kind(MappingKind::PrivateFile));
    let shared = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    refused(map_flags(4, shared, -1).unwrap(), kind(MappingKind::SharedAnonymous));
    refused(system_v(4), kind(MappingKind::SystemV));
    let file = file_with_a_long_path();
    let shared = map_flags(4, libc::MAP_SHARED, file.as_raw_fd()).unwrap();
    refused(shared, kind(MappingKind::SharedFile));
    let at = map(6);
    assert!(munmap(at, PAGE) && munmap(at + 5 * PAGE, PAGE));
    refused(at, Uncovered::Unmapped);
    refused(at + 2 * PAGE, Uncovered::Unmapped);
    assert!(munmap(at + 2 * PAGE, PAGE));
    refused(at + PAGE, Uncovered::Unmapped);
    close(memfd);
    for mapping in MappingKind::ALL {
        let claimed = monitor.coverage(mapping, Change::Unmap);
        let watched = matches!(mapping, MappingKind::PrivateAnonymous | MappingKind::PrivateHuge);
        assert_eq!(claimed, if watched { Cover::Detected } else { Cover::NotCached });
    }
}

/// A path too long to be asked for with the mapping.
fn file_with_a_long_path() -> File {
    let root = std::env::temp_dir().join(format!("pinfold-long-{}", std::process::id()));
    let folder = (0..3).fold(root.clone(), |folder, _| folder.join("x".repeat(200)));
    std::fs::create_dir_all(&folder).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(folder.join("file"));
    let file = file.unwrap();
    file.set_len(4 * PAGE as u64).unwrap();
    std::fs::remove_dir_all(root).unwrap();
    file
}

#[test]
fn one_right_is_enough() {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(8);
    assert!(mprotect(at, PAGE, libc::PROT_WRITE) && mprotect(at + PAGE, PAGE, libc::PROT_READ));
    assert_eq!(monitor.watch(range(at, 8 * PAGE)), Watch::Covered);
    let before = mark(&monitor);
    assert!(munmap(at, PAGE) && munmap(at + 4 * PAGE, PAGE));
    let changes = changes_since(&monitor, before);
    assert!(touch(&changes, range(at, 1)) && touch(&changes, range(at + 4 * PAGE, 1)));
    assert!(!touch(&changes, range(at + PAGE, PAGE)));
}

/// A reservation of a GPU's addresses looks like that, and what the GPU's driver maps there and takes away raises no
/// event.
#[test]
fn memory_without_access_is_not_covered() {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(8);
    assert!(mprotect(at + 4 * PAGE, PAGE, libc::PROT_NONE));
    for (first, pages) in [(4, 1), (0, 8), (3, 2), (4, 4)] {
        let answer = monitor.watch(range(at + first * PAGE, pages * PAGE));
        assert_eq!(answer, Watch::Uncovered(Uncovered::NoAccess), "{pages} pages from {first}");
    }
    assert_eq!(monitor.watch(range(at, 4 * PAGE)), Watch::Covered);
    assert!(mprotect(at + 4 * PAGE, PAGE, libc::PROT_READ));
    assert_eq!(monitor.watch(range(at, 8 * PAGE)), Watch::Covered);
}

#[test]
fn huge_pages_are_watched_where_there_are_any() {
    const HUGE: usize = 2 << 20;
    let Some(at) = map_flags(HUGE / PAGE, PRIVATE | libc::MAP_HUGETLB, -1) else {
        eprintln!("skipped: no huge pages are reserved (vm.nr_hugepages)");
        return;
    };
    let monitor = Userfaultfd::new().unwrap();
    let huge = range(at, HUGE);
    assert_eq!(monitor.watch(huge), Watch::Covered);
    fill(at, 1, 1);
    let before = mark(&monitor);
    assert!(madvise(at, HUGE, libc::MADV_DONTNEED));
    assert!(touch(&changes_since(&monitor, before), huge));
    let before = mark(&monitor);
    assert!(munmap(at, HUGE));
    assert!(touch(&changes_since(&monitor, before), huge));
}

/// Watching parts would split mappings, of which a process may have 65,530.
#[test]
fn watching_parts_does_not_split_a_mapping() {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(64);
    let whole = range(at, 64 * PAGE);
    (0..64).step_by(2).for_each(|page| {
        assert_eq!(monitor.watch(range(at + page * PAGE, PAGE)), Watch::Covered);
    });
    assert_eq!(mappings_in(whole).unwrap().len(), 1);
}

#[test]
fn one_mapping_has_one_monitor_at_a_time() {
    let (first, second) = (Userfaultfd::new().unwrap(), Userfaultfd::new().unwrap());
    let mine = range(map(4), LENGTH);
    assert_eq!(first.watch(mine), Watch::Covered);
    assert_eq!(second.watch(mine), Watch::Uncovered(Uncovered::WatchedByAnother));
    drop(first);
    assert_eq!(second.watch(mine), Watch::Covered);
    let before = mark(&second);
    assert!(munmap(mine.start(), mine.len()));
    assert!(touch(&changes_since(&second, before), mine));
}

/// What grew out of a watched mapping is watched, though no `watch` named it. When the monitor is
/// gone no thread reads its events, and one that unmapped what is still watched would wait for ever.
#[test]
fn what_grew_out_of_watched_memory_is_free_when_the_monitor_is_gone() {
    // Another test's mapping would stand where it grows.
    alone("what_grew_out_of_watched_memory_is_free_when_the_monitor_is_gone", grown_and_cut_off);
}

fn grown_and_cut_off() {
    let how_it_is_cut_off: [fn(usize); 4] = [
        |at| assert!(munmap(at, LENGTH)),
        |at| {
            assert!(mprotect(at + LENGTH + PAGE, PAGE, libc::PROT_READ));
            assert!(munmap(at, LENGTH) && munmap(at + LENGTH, PAGE));
        },
        |at| {
            let to = map(4);
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            assert_eq!(mremap(at, LENGTH, LENGTH, fixed, to), Some(to));
        },
        |at| {
            let to = map(16);
            let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            assert_eq!(mremap(at + PAGE, LENGTH, 2 * LENGTH, fixed, to), Some(to));
            assert!(munmap(to, LENGTH + PAGE));
        },
    ];
    for cut_off in how_it_is_cut_off {
        let monitor = Userfaultfd::new().unwrap();
        let at = map(16);
        assert!(munmap(at + LENGTH, 12 * PAGE));
        assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
        assert_eq!(mremap(at, LENGTH, 2 * LENGTH, 0, 0), Some(at), "it grows where it is");
        cut_off(at);
        // As long as a forked child has the descriptor, closing it here ends no watch.
        let childs = duplicate(monitor.descriptor());
        drop(monitor);
        // Everything that may be left, wherever it went.
        let again = Userfaultfd::new().unwrap();
        for mapping in mappings_in(range(at, 2 * LENGTH)).unwrap() {
            let watch = again.watch(mapping.range);
            assert_ne!(watch, Watch::Uncovered(Uncovered::WatchedByAnother), "{mapping:?}");
        }
        close(childs);
    }
}

/// A thread in real time that unmaps something waits for the reader, which must not wait for one
/// with a lower priority.
#[test]
fn the_reader_has_the_highest_priority_that_the_process_may_have() {
    let _monitor = Userfaultfd::new().unwrap();
    let highest = highest_real_time_priority();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let numbers = tasks.filter_map(|task| task.file_name().to_str()?.parse::<i32>().ok());
    let readers = numbers.filter(|number| {
        let name = std::fs::read_to_string(format!("/proc/self/task/{number}/comm"));
        name.is_ok_and(|name| name.trim_end() == "pinfold-events")
    });
    let priorities: Vec<i32> = readers.map(real_time_priority).collect();
    if highest == 0 {
        eprintln!("skipped: this process may have no real-time priority");
        return;
    }
    assert!(priorities.contains(&highest), "{priorities:?}, and {highest} is allowed");
}

#[test]
fn a_waiter_is_woken_by_a_change_and_by_a_ring() {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(4);
    assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
    let seen = monitor.notified();
    thread::scope(|scope| {
        scope.spawn(|| monitor.wait(seen));
        assert!(munmap(at, PAGE));
    });
    let seen = monitor.notified();
    thread::scope(|scope| {
        scope.spawn(|| monitor.wait(seen));
        monitor.notify();
    });
}

#[test]
fn all_of_a_process_shares_one_monitor() {
    let first = Userfaultfd::shared().unwrap();
    let others: Vec<_> = thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| Userfaultfd::shared().unwrap()));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(others.iter().all(|other| std::sync::Arc::ptr_eq(&first, other)));
    let child = fork(|| {
        assert_eq!(first.check(), Err(Lost::Forked));
        let own = Userfaultfd::shared().unwrap();
        assert!(!std::sync::Arc::ptr_eq(&first, &own));
        own.check().unwrap();
    });
    assert_eq!(wait_for(child), 0);
}
