//! The eBPF monitor on a real kernel: every route of change, other processes, ends of processes,
//! overflow, concurrency. Needs the privilege to load programs and a kernel that attaches them to its
//! functions; elsewhere every test says why it is skipped. Loading takes seconds on an emulated
//! processor, so the tests share what they can and take turns.

#![allow(unsafe_code, missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[path = "ebpf_support/mod.rs"]
mod support;

mod registrar_support;
#[path = "sharer/mod.rs"]
mod sharer;

#[path = "endings/ways.rs"]
mod ways;

use pinfold::monitor::{Ebpf, Feed, WithFeed};
use pinfold::{AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Watch};
use pinfold_ebpf::ViewError;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;
use support::{Memory, Watched, alone, pidfd, programs};
use ways::{ENDS, End, child_does, end};

/// What was logged while `change` ran, and whether that is all.
fn logged(monitor: &Ebpf, change: impl FnOnce()) -> (Vec<AddressRange>, bool) {
    let from = place(monitor);
    change();
    let after = monitor.check().unwrap();
    let mut ranges = vec![];
    let replay = monitor.replay(from, &mut |range| ranges.push(range));
    assert!(replay.sequence.0 >= after.0);
    (ranges, replay.complete)
}

fn place(monitor: &Ebpf) -> Position {
    monitor.replay(Position::NOWHERE, &mut |_| ()).up_to
}

fn watch(monitor: &Ebpf, range: AddressRange) -> AddressRange {
    assert_eq!(monitor.watch(range), Watch::Covered);
    range
}

/// Whether nothing is pending in `range`. While another thread writes a record, for however long it has lost its
/// processor meanwhile, the record is in doubt everything's.
fn is_over(monitor: &Ebpf, range: AddressRange) -> bool {
    let over = || !monitor.change_pending(range);
    over()
        || (0..1000).any(|_| {
            thread::sleep(Duration::from_millis(1));
            over()
        })
}

/// Asserts that `change` logs exactly `range` among what it logs.
fn tells(monitor: &Ebpf, what: &str, range: AddressRange, change: impl FnOnce()) {
    watch(monitor, range);
    let (told, complete) = logged(monitor, change);
    assert!(complete && told.contains(&range), "{what}: {range:?} is not in {told:?}");
    assert!(is_over(monitor, range), "{what} has returned");
}

#[test]
fn each_route_tells_its_exact_range() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = Memory::private(3);
    tells(monitor, "part of a munmap", memory.pages(1, 1), || memory.unmap(1, 1));
    let memory = Memory::private(2);
    tells(monitor, "raw munmap", memory.range(), || memory.raw_unmap());
    let memory = Memory::private(2);
    tells(monitor, "another thread's munmap", memory.range(), || {
        thread::scope(|scope| scope.spawn(|| memory.raw_unmap()).join().unwrap());
    });
    let memory = Memory::private(2);
    tells(monitor, "MAP_FIXED", memory.range(), || memory.map_over());
    tells(monitor, "MADV_DONTNEED", memory.range(), || memory.advise(libc::MADV_DONTNEED));
    // Only of tables that processes share more goes than was asked for.
    let page = Memory::reserved(3 << 18).part(3 << 17, 1);
    tells(monitor, "a page amid 3 GiB", page.range(), || page.advise(libc::MADV_DONTNEED));
    memory.touch();
    tells(monitor, "mremap with MREMAP_DONTUNMAP", memory.range(), || memory.move_away());
    let memory = Memory::private(3);
    tells(monitor, "mremap that shrinks", memory.pages(1, 2), || memory.shrink(1));
    let (from, over) = (Memory::private(2), Memory::private(2));
    watch(monitor, over.range());
    tells(monitor, "mremap, the source", from.range(), || from.move_over(&over));
    let (from, over) = (Memory::private(2), Memory::private(2));
    watch(monitor, from.range());
    tells(monitor, "mremap, the target", over.range(), || from.move_over(&over));
    let (memory, file) = Memory::of_memfd(4);
    tells(monitor, "a hole in a memfd", memory.pages(1, 2), || support::punch(&file, 1, 2));
    memory.touch();
    tells(monitor, "MADV_REMOVE", memory.range(), || memory.advise(libc::MADV_REMOVE));
    memory.touch();
    tells(monitor, "a truncated memfd", memory.pages(3, 1), || support::truncate(&file, 3));
    let memory = Memory::private(1);
    tells(monitor, "shmat with SHM_REMAP", memory.range(), || memory.attach_over());
    tells(monitor, "shmdt", memory.range(), || memory.detach());
    let (memory, file) = Memory::of_file_privately(2);
    tells(monitor, "a private file, truncated", memory.pages(1, 1), || support::truncate(&file, 1));
}

/// A table of entries that is shared goes whole, and a hole that is punched later is reported for no mapping
/// without entries.
#[test]
fn shared_tables_of_huge_pages_are_told_whole() {
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::Gigantic::new() else { return };
    tells(monitor, "a discarded part", memory.range(), || memory.discard_second());
    tells(monitor, "a hole", memory.range(), || memory.punch_first());
    tells(monitor, "other rights", memory.range(), || memory.protect_all());
    tells(monitor, "a userfaultfd", memory.range(), || memory.report_faults());
    tells(monitor, "a part with other rights", memory.range(), || memory.protect_first());
}

/// Parts of the mapping that share no table lie beside the one that is shared, and other mappings beside them.
#[test]
fn no_more_than_the_mapping_is_told_with_a_shared_table() {
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::Gigantic::amid(2 << 20) else { return };
    tells(monitor, "a discard of all", memory.range(), || memory.discard_all());
}

/// The whole table goes with it where it is shared.
#[test]
fn a_huge_page_whose_memory_fails_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::Gigantic::new() else { return };
    let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "4");
    let mut failed = false;
    watch(monitor, memory.range());
    let (told, complete) = logged(monitor, || failed = memory.poison_second());
    if !failed {
        eprintln!("skipped: no huge page's memory can be made to fail here");
        return;
    }
    let range = memory.range();
    assert!(complete && told.contains(&range), "{range:?} is not in {told:?}");
}

/// userfaultfd does not report it: `monitor_loss` has that.
#[test]
fn a_change_whose_maker_is_killed_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let mut changed = 0;
    for tenths in 0..20 {
        let (at, bytes) = sharer::populated();
        let range = watch(monitor, AddressRange::new(at, bytes).unwrap());
        let after = Duration::from_micros(100 * tenths);
        let mut is_gone = false;
        let (told, complete) =
            logged(monitor, || is_gone = sharer::killed_while_unmapping(at, bytes, after));
        assert!(!is_gone || !complete || told.contains(&range), "{range:?} is not in {told:?}");
        changed += u32::from(is_gone);
    }
    assert!(changed > 0, "none was made");
}

/// What the kernel does not know of, a driver's doing for example, is told to the feed.
#[test]
fn the_feed_is_followed_as_well() {
    static FEED: Feed = Feed::new();
    let Some((_turn, programs)) = programs() else { return };
    let view = programs.view(pidfd(std::process::id()).as_fd()).unwrap();
    let id = view.id();
    let monitor = WithFeed::new(Ebpf::from_view(view).unwrap(), &FEED);
    let memory = Memory::private(2);
    let range = watch(monitor.monitor(), memory.range());
    for _ in 0..2 {
        let before = monitor.replay(Position::NOWHERE, &mut |_| ());
        let changing = FEED.begin(range);
        assert_ne!(monitor.check().unwrap(), before.sequence);
        let mut told = vec![];
        assert!(monitor.replay(before.up_to, &mut |range| told.push(range)).complete);
        assert!(told.contains(&range) && monitor.change_pending(range), "{told:?}");
        drop(changing);
        assert!(!monitor.change_pending(range));
    }
    // A process has two views at a time.
    drop(monitor);
    programs.forget(id);
}

#[test]
fn a_guard_page_is_told_where_the_kernel_has_it() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = Memory::private(2);
    if !memory.can_guard() {
        eprintln!("skipped: this kernel has no MADV_GUARD_INSTALL");
        return;
    }
    let memory = Memory::private(2);
    tells(monitor, "MADV_GUARD_INSTALL", memory.range(), || assert!(memory.can_guard()));
}

#[test]
fn the_heap_that_shrinks_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let page = support::page();
    // SAFETY: what is added is taken away at once, and malloc of another thread in between is
    // kept out: tests take turns. Should it come all the same, the last call fails or harms this
    // test's process only.
    let end = unsafe { libc::sbrk(0) }.addr();
    let top = end.next_multiple_of(page);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::brk(std::ptr::without_provenance_mut(top + 2 * page)) }, 0);
    let range = AddressRange::new(top + page, page).unwrap();
    tells(monitor, "brk", range, || {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::brk(std::ptr::without_provenance_mut(top + page)) }, 0);
    });
}

#[test]
fn huge_pages_are_told_where_there_are_any() {
    let Some((_turn, monitor)) = alone() else { return };
    let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "4");
    let Some((memory, file)) = Memory::huge() else {
        eprintln!("skipped: this machine has no huge page to spare");
        return;
    };
    tells(monitor, "MADV_DONTNEED", memory.range(), || memory.advise(libc::MADV_DONTNEED));
    memory.touch();
    tells(monitor, "a truncated hugetlb file", memory.range(), || support::truncate(&file, 0));
    tells(monitor, "munmap", memory.range(), || memory.raw_unmap());
}

#[test]
fn another_process_that_truncates_our_file_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let (memory, path) = Memory::of_named_file(4);
    tells(monitor, "truncate(1)", memory.pages(2, 2), || {
        let size = (2 * support::page()).to_string();
        let done = Command::new("truncate").args(["-s", &size]).arg(&path).status().unwrap();
        assert!(done.success());
    });
    std::fs::remove_file(path).unwrap();
}

/// The page stays in the file, and can be replaced there without a call that any other hook sees.
#[test]
fn the_reclaim_of_a_files_page_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let Some((memory, _device)) = support::of_block_device(2) else { return };
    tells(monitor, "MADV_PAGEOUT", memory.pages(0, 1), || memory.page_out());
}

/// Reclaim parts the pages of a folio from their addresses in one call, at its first page. How long the folio is, is not
/// told, and what lies behind the mapping has not changed.
#[test]
fn the_reclaim_of_a_files_large_folio_is_told() {
    const PAGES: usize = 16;
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::of_xfs(PAGES) else { return };
    watch(monitor, memory.range());
    let (told, complete) = logged(monitor, || memory.page_out());
    for page in (0..PAGES).map(|index| memory.pages(index, 1)) {
        let is_told = told.iter().any(|told| told.contains(&page));
        assert!(complete && is_told, "{page:?} is not in {told:?}");
    }
    let mut of_folios = told.iter().filter(|told| told.overlaps(&memory.range()));
    assert!(of_folios.all(|told| memory.range().contains(told)), "{told:?} is more than the file");
}

/// One entry for 2 MiB is given up, and a file's pages are left to the next faults.
#[test]
fn the_splitting_of_a_files_huge_page_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::of_huge_tmpfs(1) else { return };
    tells(monitor, "mprotect of a part", memory.range(), || memory.protect_page(5));
    let anonymous = Memory::private(1);
    watch(monitor, anonymous.range());
}

/// The entries of a file's huge page are given up for one, once they are several.
#[test]
fn the_collapsing_of_a_files_huge_page_is_told() {
    /// Since Linux 6.1.
    const COLLAPSE: i32 = 25;
    let Some((_turn, monitor)) = alone() else { return };
    let Some(memory) = support::of_huge_tmpfs(1) else { return };
    memory.protect_page(5);
    memory.protect();
    memory.read();
    tells(monitor, "MADV_COLLAPSE", memory.range(), || memory.advise(COLLAPSE));
}

#[test]
fn a_breakpoint_in_mapped_text_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let (memory, path) = support::Memory::of_text();
    let event = format!("p:pinfold/text{} {}:0x1010", std::process::id(), path.display());
    let tracing = std::path::Path::new("/sys/kernel/tracing");
    let name = event.split(' ').next().unwrap().trim_start_matches("p:").to_owned();
    let switch = tracing.join("events").join(&name).join("enable");
    // Truncating the list would remove whatever stands in it.
    let list = |line: &str| {
        let list = std::fs::OpenOptions::new().append(true).open(tracing.join("uprobe_events"));
        list.and_then(|mut list| list.write_all(line.as_bytes()))
    };
    let set = list(&event)
        .and_then(|()| std::fs::write(&switch, "1"))
        .and_then(|()| std::fs::write(&switch, "0"));
    if let Err(error) = set {
        std::fs::remove_file(path).unwrap();
        return eprintln!("skipped: no breakpoint can be set and removed here: {error}");
    }
    tells(monitor, "a uprobe", memory.pages(1, 1), || std::fs::write(&switch, "1").unwrap());
    tells(monitor, "its removal", memory.pages(1, 1), || std::fs::write(&switch, "0").unwrap());
    list(&format!("-:{name}")).unwrap();
    std::fs::remove_file(path).unwrap();
}

/// Whether there is time for changes that are so long that some ends are skipped: minutes on an emulated machine,
/// because to replace a trampoline waits for the threads that are inside.
fn takes_its_time() -> bool {
    std::env::var_os("PINFOLD_LONG_CHANGES").is_some()
}

/// Memory whose discard takes the kernel long, because it has tables for more than it has pages: a thread that
/// discards it again and again is nearly always inside. 64 GiB where there is time, else one.
fn long_to_discard() -> Memory {
    let memory = Memory::reserved(if takes_its_time() { 16 << 20 } else { 256 << 10 });
    memory.touch_each(512);
    memory
}

/// Attaches programs to the functions and detaches them, each time replacing the functions' trampolines, until some ends
/// were skipped, or often enough that some should have been.
fn replace_trampolines(skipped: &AtomicU32, stop: &AtomicBool) {
    for _ in 0..if takes_its_time() { 4 } else { 2 } {
        drop(pinfold_ebpf::Programs::load().unwrap());
        if skipped.load(Ordering::Relaxed) > 2 {
            break;
        }
    }
    stop.store(true, Ordering::Relaxed);
}

/// Programs that are attached during a change have the kernel skip its end. The change stays pending, and the record
/// does not outlast the thread's next change, or a program that changes much would cache less and less.
#[test]
fn what_a_skipped_end_leaves_goes_with_the_next_change() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = long_to_discard();
    let range = watch(monitor, memory.range());
    let (mut changes, skipped, stop) = (0, AtomicU32::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| replace_trampolines(&skipped, &stop));
        while !stop.load(Ordering::Relaxed) {
            let mut pending = false;
            let (told, complete) = logged(monitor, || {
                memory.advise(libc::MADV_DONTNEED);
                pending = monitor.change_pending(range);
            });
            changes += 1;
            skipped.fetch_add(u32::from(pending), Ordering::Relaxed);
            if complete {
                let told = told.iter().filter(|told| **told == range).count();
                assert!(told == 2 || told == 1 && pending, "{told} of two entries; {pending}");
            }
            Memory::private(1).raw_unmap();
            assert!(is_over(monitor, range), "after {skipped:?} skipped ends");
        }
    });
    let skipped = skipped.into_inner();
    eprintln!("of {changes} changes {skipped} were told by their beginning alone");
}

#[test]
fn what_leaves_the_pages_is_not_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = Memory::private(2);
    watch(monitor, memory.range());
    let (told, complete) = logged(monitor, || {
        memory.protect();
        memory.reclaim();
    });
    assert!(complete && !told.iter().any(|range| range.overlaps(&memory.range())), "{told:?}");
    assert_eq!(monitor.coverage(MappingKind::PrivateAnonymous, Change::Protect), Cover::Harmless);
}

/// The test harness's own threads come and go, so one quiet time of many has to do; the other process's
/// changes would show every time.
#[test]
#[allow(clippy::zombie_processes, reason = "it is waited for by number")]
fn other_processes_do_not_appear() {
    let Some((_turn, monitor)) = alone() else { return };
    // Noted, although not all of it is covered.
    assert_ne!(monitor.watch(AddressRange::EVERYTHING), Watch::Covered);
    let quiet = |_| {
        let mut child = spawn("read line; for i in 1 2 3 4; do /bin/true; done");
        let from = monitor.check().unwrap();
        drop(child.stdin.take());
        // SAFETY: waits for a child of ours by number; nothing is allocated or freed meanwhile.
        let ended = unsafe {
            let mut status = 0;
            libc::waitpid(i32::try_from(child.id()).unwrap(), &raw mut status, 0) > 0
        };
        assert!(ended);
        monitor.check().unwrap() == from
    };
    assert!((0..20).any(quiet));
}

#[test]
fn memory_far_from_what_is_watched_is_not_logged() {
    let Some((_turn, programs)) = programs() else { return };
    let watched = Watched::of(programs, pidfd(std::process::id()).as_fd());
    let memory = Memory::private(8);
    let before = watched.sequence();
    for _ in 0..100 {
        memory.advise(libc::MADV_DONTNEED);
        memory.touch();
    }
    assert_eq!(watched.sequence(), before);
    watched.wish(memory.range());
    memory.advise(libc::MADV_DONTNEED);
    assert_eq!(watched.sequence(), before + 2, "at its beginning and at its end");
}

/// Of a change of up to eight blocks each is looked at, and one of more is logged whatever is watched.
#[test]
fn a_change_that_begins_far_from_what_is_watched_is_logged() {
    const BLOCK: usize = 512;
    let Some((_turn, programs)) = programs() else { return };
    for blocks in [3, 8, 9, 32] {
        let around = Memory::reserved((blocks + 1) * BLOCK);
        let start = around.range().start();
        let first = (start.next_multiple_of(2 << 20) - start) / support::page();
        let memory = around.part(first, blocks * BLOCK);
        let watched = Watched::of(programs, pidfd(std::process::id()).as_fd());
        watched.wish(memory.pages(blocks * BLOCK - 1, 1));
        let before = watched.sequence();
        memory.advise(libc::MADV_DONTNEED);
        assert_eq!(watched.sequence(), before + 2, "{blocks} blocks");
    }
}

#[test]
fn a_reader_left_behind_is_told() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = Memory::private(1);
    watch(monitor, memory.range());
    let change = |times: usize| {
        for _ in 0..times {
            memory.advise(libc::MADV_DONTNEED);
        }
    };
    let (told, complete) = logged(monitor, || change(1000));
    assert!(complete && told.len() >= 1000, "{}", told.len());
    let (_, complete) = logged(monitor, || change(5000));
    assert!(!complete);
}

/// Each thread finds its own change as soon as its call has returned, whatever the others do.
#[test]
fn no_change_of_many_threads_is_missed() {
    let Some((_turn, monitor)) = alone() else { return };
    let missed = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                for _ in 0..400 {
                    let memory = Memory::private(1);
                    let range = watch(monitor, memory.range());
                    let (told, complete) = logged(monitor, || memory.raw_unmap());
                    if complete && !told.contains(&range) {
                        missed.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(!missed.load(Ordering::Relaxed));
}

/// Changes a large mapping again and again until another thread has seen it pending.
#[test]
fn a_change_under_way_is_in_flux() {
    let Some((_turn, monitor)) = alone() else { return };
    let memory = Memory::private(16 << 10);
    let range = watch(monitor, memory.range());
    let elsewhere = Memory::private(1).range();
    let (seen, done) = (AtomicBool::new(false), AtomicBool::new(false));
    // What is pending elsewhere, too, is a record that is being written (`is_over`).
    let in_flux = || monitor.change_pending(range) && !monitor.change_pending(elsewhere);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) && !seen.load(Ordering::Acquire) {
                // Once may be a record that was finished between the two questions.
                seen.fetch_or((0..4).all(|_| in_flux()), Ordering::Release);
            }
        });
        for _ in 0..200 {
            memory.touch();
            memory.advise(libc::MADV_DONTNEED);
            if seen.load(Ordering::Acquire) {
                break;
            }
        }
        done.store(true, Ordering::Release);
    });
    assert!(seen.load(Ordering::Acquire));
    assert!(is_over(monitor, range));
}

/// A move is one call and has two records.
#[test]
fn a_move_under_way_is_in_flux_at_both_places() {
    const PAGES: usize = 8 << 10;
    let Some((_turn, monitor)) = alone() else { return };
    let (memory, place) = (Memory::reserved(PAGES), Memory::reserved(PAGES + 1));
    // Of two places that are alike within their tables the kernel moves whole tables, in no time.
    let distance = place.range().start().abs_diff(memory.range().start());
    let place = place.part(usize::from(distance.is_multiple_of(2 << 20)), PAGES);
    let elsewhere = Memory::private(1).range();
    let in_flux = || {
        // The second place's record comes later.
        monitor.change_pending(place.range())
            && monitor.change_pending(memory.range())
            && !monitor.change_pending(elsewhere)
    };
    let (seen, done) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) && !seen.load(Ordering::Acquire) {
                // Once may be the ends of two moves.
                seen.fetch_or((0..4).all(|_| in_flux()), Ordering::Release);
            }
        });
        for _ in 0..50 {
            memory.touch();
            memory.move_pages_over(&place);
            if seen.load(Ordering::Acquire) {
                break;
            }
        }
        done.store(true, Ordering::Release);
    });
    assert!(seen.load(Ordering::Acquire));
    assert!(is_over(monitor, memory.range()) && is_over(monitor, place.range()));
}

/// The programs' clock is the machine's; a namespace of times has its own, days ahead.
#[test]
fn in_a_namespace_of_times_a_change_under_way_is_in_flux_too() {
    let Some((_turn, _)) = alone() else { return };
    let role = Command::new("unshare")
        .args(["--fork", "--time", "--monotonic", "100000"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_change_under_way_is_in_flux", "--nocapture"])
        .output();
    let Ok(role) = role else { return eprintln!("skipped: there is no unshare(1)") };
    let said = String::from_utf8_lossy(&role.stderr);
    if said.contains("unshare") {
        return eprintln!("skipped: {said}");
    }
    assert!(role.status.success(), "{said}{}", String::from_utf8_lossy(&role.stdout));
}

/// A lost wake-up hangs this test.
#[test]
fn a_sleeper_is_woken_by_a_change() {
    let Some((_turn, monitor)) = alone() else { return };
    for _ in 0..50 {
        let memory = Memory::private(1);
        watch(monitor, memory.range());
        let seen = monitor.notified();
        memory.raw_unmap();
        monitor.wait(seen);
    }
}

#[test]
fn a_forked_child_believes_nothing() {
    let Some((_turn, monitor)) = alone() else { return };
    // SAFETY: the child asks two words and leaves, without a destructor.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let right = monitor.forked() && monitor.check() == Err(Lost::Forked);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = -1;
    // SAFETY: a child of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(!monitor.forked() && monitor.check().is_ok());
}

/// Runs a script, and returns when it runs: a process that is just being made has its parent's
/// address space for a moment.
fn spawn(script: &str) -> Child {
    let mut child = Command::new("bash");
    child.args(["-c", &format!("echo; {script}")]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut said = [0];
    child.stdout.take().unwrap().read_exact(&mut said).unwrap();
    child
}

#[test]
fn a_view_ends_with_its_process() {
    let Some((_turn, programs)) = programs() else { return };
    let mut child = spawn("read line");
    let process = pidfd(child.id());
    let [watched, second] = [(); 2].map(|()| Watched::of(programs, process.as_fd()));
    assert!(!watched.is_closed() && !second.is_closed());
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(watched.is_closed() && second.is_closed());
    assert_eq!(programs.view(process.as_fd()).unwrap_err(), ViewError::Gone);
}

#[test]
fn a_view_ends_when_its_process_runs_another_program() {
    let Some((_turn, programs)) = programs() else { return };
    let mut child = spawn("read line; exec bash -c 'read line'");
    let process = pidfd(child.id());
    let watched = Watched::of(programs, process.as_fd());
    watched.wish(AddressRange::EVERYTHING);
    assert!(!watched.is_closed());
    support::write_line(&mut child);
    while !watched.is_closed() {
        thread::yield_now();
    }
    // The new program can be watched, and is another's.
    let again = Watched::of(programs, process.as_fd());
    let end = watched.sequence();
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(again.is_closed());
    assert_eq!(watched.sequence(), end);
}

/// Address spaces are taken from a pool: with as many children one after the other, numbers and addresses
/// come again.
#[test]
fn one_process_after_the_other_sees_its_own_changes() {
    let Some((_turn, programs)) = programs() else { return };
    for _ in 0..30 {
        let mut child = spawn("read line");
        let watched = Watched::of(programs, pidfd(child.id()).as_fd());
        assert_eq!(watched.sequence(), 0, "another process's change");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(watched.is_closed());
    }
}

/// Their addresses come again, too, while what a process that ended had is still there for the loader to free: two
/// views of one address space that were left would leave no place for the third.
#[test]
fn addresses_of_processes_that_ended_are_free() {
    let Some((_turn, programs)) = programs() else { return };
    let views = (0..24).map(|_| {
        let mut child = spawn("read line");
        let view = programs.view(pidfd(child.id()).as_fd()).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        view.id()
    });
    let views: Vec<_> = views.collect();
    views.into_iter().for_each(|view| programs.forget(view));
}

/// A lost wake-up hangs this test.
#[test]
fn a_sleeper_is_woken_when_its_view_closes() {
    let Some((_turn, programs)) = programs() else { return };
    let others = support::keeper_names();
    let view = programs.view(pidfd(std::process::id()).as_fd()).unwrap();
    let id = view.id();
    let monitor = Ebpf::from_view(view).unwrap();
    let its: Vec<_> = support::keeper_names().difference(&others).cloned().collect();
    let [thread] = its.as_slice() else { panic!("{its:?} is not one thread") };
    while !support::polls(thread) {
        thread::yield_now();
    }
    let seen = monitor.notified();
    programs.forget(id);
    monitor.wait(seen);
    assert_eq!(monitor.check(), Err(Lost::Descriptor { errno: libc::ESTALE }));
}

#[test]
fn a_view_that_is_taken_back_says_so() {
    let Some((_turn, programs)) = programs() else { return };
    let child = spawn("read line");
    let process = pidfd(child.id());
    let (first, id) = Watched::with_id(programs, process.as_fd());
    let _second = Watched::of(programs, process.as_fd());
    assert!(matches!(programs.view(process.as_fd()), Err(ViewError::ManyViews { .. })));
    programs.forget(id);
    assert!(first.is_closed());
    let _third = Watched::of(programs, process.as_fd());
    support::end(child);
}

#[test]
fn only_the_programs_write_the_log() {
    let Some((_turn, programs)) = programs() else { return };
    let view = programs.view(pidfd(std::process::id()).as_fd()).unwrap();
    let (id, view) = (view.id(), view.into_parts());
    assert!(support::maps(&view.changes, libc::PROT_READ));
    assert!(!support::maps(&view.changes, libc::PROT_READ | libc::PROT_WRITE));
    assert!(!support::becomes_writable(&view.changes));
    assert!(support::maps(&view.wishes, libc::PROT_READ | libc::PROT_WRITE));
    programs.forget(id);
}

/// In a process of its own, because it closes everything: see `role_close_range`.
#[test]
fn closing_every_descriptor_does_not_blind_it() {
    let Some((_turn, _)) = alone() else { return };
    let role = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role_close_range", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    assert!(role.status.success(), "{}", String::from_utf8_lossy(&role.stdout));
}

#[test]
#[ignore = "a part of another test"]
fn role_close_range() {
    let monitor = Ebpf::load().unwrap();
    // SAFETY: closes what this process will not use again.
    assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
    let memory = Memory::private(2);
    tells(&monitor, "munmap", memory.range(), || memory.raw_unmap());
    let seen = monitor.notified();
    let memory = Memory::private(2);
    watch(&monitor, memory.range());
    memory.raw_unmap();
    monitor.wait(seen);
    assert!(monitor.check().is_ok());
}

/// In a process of its own, whose keeper dies: see `role_killed_keeper`.
#[test]
fn a_killed_keeper_is_a_loss() {
    let Some((_turn, _)) = alone() else { return };
    let role = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "role_killed_keeper", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    assert!(role.status.success(), "{}", String::from_utf8_lossy(&role.stdout));
}

#[test]
#[ignore = "a part of another test"]
fn role_killed_keeper() {
    let monitor = Ebpf::load().unwrap();
    // The changes of its self-test have woken it, and it sleeps by the clock after each: until it waits for the next one.
    while !support::keeper_names().iter().all(|keeper| support::polls(keeper)) {
        thread::yield_now();
    }
    support::kill_threads_that_sleep();
    let memory = Memory::private(2);
    watch(&monitor, memory.range());
    assert!(monitor.check().is_ok());
    memory.raw_unmap();
    while support::keepers() > 0 {
        thread::yield_now();
    }
    assert_eq!(monitor.check(), Err(Lost::Descriptor { errno: libc::EBADF }));
}

/// Its thread, which has its descriptors, and its view go with it, or stay; a child's copy ends nothing of its parent's.
#[test]
fn however_a_monitor_ends_its_thread_and_its_view_go_or_stay() {
    let Some((_turn, programs)) = programs() else { return };
    for how in ENDS {
        let (others, descriptors) = (support::keeper_names(), support::descriptors());
        let view = programs.view(pidfd(std::process::id()).as_fd()).unwrap();
        let id = view.id();
        let mut monitor = Ebpf::from_view(view).unwrap();
        assert_eq!(support::descriptors(), descriptors, "they are in the keeper's table");
        let its: Vec<_> = support::keeper_names().difference(&others).cloned().collect();
        let [thread] = its.as_slice() else { panic!("{its:?} is not one thread") };
        if how == End::InAForkedChild {
            monitor = child_does(monitor, drop);
            assert!(monitor.check().is_ok(), "it is the parent's");
        }
        end(monitor, how);
        while !how.leaks() && support::keeper_names().contains(thread) {
            thread::yield_now();
        }
        assert_eq!(support::keeper_names().contains(thread), how.leaks(), "{how:?}");
        // A process has two views at a time.
        programs.forget(id);
    }
}

#[test]
fn the_programs_outlive_their_loader() {
    let Some((_turn, _)) = alone() else { return };
    let fresh = pinfold_ebpf::Programs::load().unwrap();
    let monitor = Ebpf::from_view(fresh.view(pidfd(std::process::id()).as_fd()).unwrap()).unwrap();
    drop(fresh);
    let memory = Memory::private(2);
    tells(&monitor, "munmap", memory.range(), || memory.raw_unmap());
    eprintln!("the kernel skipped programs {} times", support::misses());
}
