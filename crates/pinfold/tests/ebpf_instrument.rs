//! The instrument that checks the list of hooks sees what a hook would have told, and nothing else. Needs the privilege
//! to load programs, a kernel that attaches them to its functions, and io_uring; elsewhere it says what is missing.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[allow(dead_code)]
#[path = "ebpf_support/mod.rs"]
mod support;

use io_uring::IoUring;
use pinfold::AddressRange;
use pinfold_ebpf::{Instrument, Partings, Programs, ProgramsError};
use std::os::fd::AsFd;
use support::{Memory, Watched, as_process, page, pidfd, thread_number};

fn skipped<T>(what: &str, result: Result<T, impl std::fmt::Display>) -> Option<T> {
    result.inspect_err(|error| eprintln!("skipped: {what}: {error}")).ok()
}

/// What the instrument sees of `change`, in this process.
fn seen(
    programs: Result<Programs, ProgramsError>,
    change: impl FnOnce(&Instrument),
) -> Option<Partings> {
    let programs = skipped("the programs", programs)?;
    let instrument = programs.instrument().unwrap();
    let _watched = Watched::of(&programs, pidfd(std::process::id()).as_fd());
    change(&instrument);
    Some(instrument.partings().unwrap())
}

/// Pins pages as long as the ring lives.
fn pin(range: AddressRange) -> Option<IoUring> {
    let ring = skipped("io_uring", IoUring::new(8))?;
    support::pin(&ring, range);
    Some(ring)
}

/// A pinned page of a file, whose entry reclaim takes, at its address.
fn reclaimed() -> Option<usize> {
    let (memory, _file) = Memory::of_memfd(1);
    let _ring = pin(memory.range())?;
    memory.page_out();
    Some(memory.range().start())
}

/// A page of anonymous memory that is not pinned, which reclaim takes: not one that the instrument counts.
fn reclaimed_unpinned() {
    Memory::private(1).reclaim();
}

/// Pinned pages of anonymous memory, unmapped, one of them of a private mapping of a file.
fn unmapped() -> Option<()> {
    let (of_file, _file) = Memory::of_file_privately(1);
    for memory in [Memory::private(1), of_file] {
        let _ring = pin(memory.range())?;
        memory.raw_unmap();
    }
    Some(())
}

/// A pinned huge page of anonymous memory, whose one entry is split before it is unmapped; `None` if there is none.
fn split() -> Option<()> {
    const HUGE: usize = 2 << 20;
    let memory = Memory::reserved(2 * HUGE / page());
    memory.advise(libc::MADV_HUGEPAGE);
    memory.touch();
    let first = (memory.range().start().next_multiple_of(HUGE) - memory.range().start()) / page();
    let _ring = pin(memory.pages(first, 1))?;
    let before = huge_bytes();
    memory.protect_page(first + 5);
    let was_split = huge_bytes() < before;
    // The later pages first: their addresses are not in the change of the first ones.
    memory.unmap(first + 6, HUGE / page() - 6);
    memory.raw_unmap();
    was_split.then_some(())
}

fn huge_bytes() -> u64 {
    let table = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = table.lines().find(|line| line.starts_with("AnonHugePages:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn what_the_hooks_tell_is_no_hole() {
    let programs = Programs::load();
    let Some(seen) = seen(programs, |instrument| {
        let told = || instrument.partings().unwrap().told;
        let seen = |what: &str, changed: fn() -> Option<()>| {
            let before = told();
            match changed() {
                Some(()) => assert!(told() > before, "{what}"),
                None => eprintln!("skipped: {what}"),
            }
        };
        seen("reclaim", || reclaimed().map(drop));
        seen("munmap", unmapped);
        seen("munmap of a huge page that was split", split);
        reclaimed_unpinned();
    }) else {
        return;
    };
    assert_eq!(seen.holes().map(ToString::to_string).collect::<Vec<_>>(), Vec::<String>::new());
    assert!(seen.is_complete(), "{seen:?}");
}

/// The first page's entry of a file's huge page goes in a call within the discard of all, and what is parted after that
/// is still in the discard.
#[test]
fn a_change_within_another_leaves_its_record() {
    const HUGE: usize = 2 << 20;
    let Some(memory) = support::of_huge_tmpfs(2) else { return };
    let count = HUGE / page();
    let [first, second] = [0, 1].map(|nth| memory.pages(nth * count, 1));
    let Some(_rings) = pin(first).zip(pin(second)) else { return };
    let Some(seen) = seen(Programs::load(), |_| {
        memory.part(count / 2, count + count / 2).advise(libc::MADV_DONTNEED);
    }) else {
        return;
    };
    assert!(seen.told >= 2 && seen.untold == 0, "{seen:?}");
}

/// Neither do records tell of it that are another range's or another thread's: those of changes whose ends are skipped.
#[test]
fn what_a_hook_that_is_left_out_would_tell_is_a_hole() {
    let (below, of_file, above, file) = {
        let around = Memory::private(3);
        let (of_file, file) = Memory::of_memfd(1);
        of_file.move_over(&around.part(1, 1));
        (around.part(0, 1), around.part(1, 1), around.part(2, 1), file)
    };
    let reclaim = || {
        of_file.touch();
        let _ring = pin(of_file.range())?;
        of_file.page_out();
        Some(())
    };
    let mut reclaimed = None;
    let programs = Programs::load_beginnings_without("unmapping of a file's page");
    let Some(seen) = seen(programs, |_| {
        reclaimed = (|| {
            below.advise(libc::MADV_DONTNEED);
            reclaim()?;
            above.advise(libc::MADV_DONTNEED);
            reclaim()?;
            let number = thread_number() % 128 + 100 * 128;
            as_process(number, || support::punch(&file, 0, 1))?;
            reclaim()
        })();
    }) else {
        return;
    };
    let Some(()) = reclaimed else { return };
    let by_reclaim = |function: &String| function == "try_to_unmap_one";
    let place = of_file.range().start();
    let found: Vec<_> = seen.holes().filter(|way| way.stack.iter().any(by_reclaim)).collect();
    assert!(found.iter().all(|way| way.address == place && !way.command.is_empty()), "{seen:?}");
    assert_eq!(found.iter().map(|way| way.count).sum::<u64>(), 3, "{seen:?}");
    assert!(seen.crowded == 0 && seen.is_complete(), "{seen:?}");
}
