//! What a change leaves whose end the kernel skips, and what becomes of it: programs that stand at the beginnings alone
//! leave a record for each change, so that what goes wrong within some instructions stays to be looked at. Needs the
//! privilege to load programs and to choose a process's number; elsewhere it says what is missing. One test, because
//! threads that end would leave records, too.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[allow(dead_code)]
#[path = "ebpf_support/mod.rs"]
mod support;

use pinfold::AddressRange;
use pinfold_ebpf::Programs;
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use support::{Memory, Watched, as_process, pidfd, punch, thread_number};

/// As `TRIES` and `RECORDS` of `bpf/changes.h`.
const PLACES: usize = 4;
const RECORDS: i32 = 128;

#[test]
fn what_stays_where_no_end_runs() {
    let programs = match Programs::load_beginnings_without("") {
        Ok(programs) => programs,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let view = || Watched::of(&programs, pidfd(std::process::id()).as_fd());
    let watched = view();
    an_owner_shows_nothing_of_the_kernel(&watched);
    a_call_at_that_depth_frees_it(&watched);
    a_call_that_unmaps_frees_it(&watched);
    a_call_that_moves_frees_it(&watched);
    a_move_leaves_both_places(&watched);
    another_thread_frees_nothing(&watched);
    drop(watched);
    a_change_that_finds_no_record_says_so(&view());
    a_record_is_freed_wherever_it_is(&view());
}

/// Neither the thread's number nor how deep it was on its stack, and not as a difference either.
fn an_owner_shows_nothing_of_the_kernel(watched: &Watched<'_>) {
    let memory = Memory::private(1);
    let (mut callers, mut owners) = (HashSet::new(), HashSet::new());
    for _ in 0..CALLS {
        memory.advise(libc::MADV_DONTNEED);
        callers.extend(watched.owners(memory.range()));
        owners.extend(watched.veiled_owners());
        // It frees all of this thread's.
        Memory::private(1).raw_unmap();
    }
    let number = u64::from(thread_number().cast_unsigned());
    assert!(callers.iter().all(|caller| caller & 0xffff_ffff == number), "{callers:x?}");
    let halves = |owner: &u64| [owner & 0x7fff_ffff, owner >> 31 & 0x7fff_ffff];
    let depths: HashSet<_> = callers.iter().map(|caller| caller >> 32).collect();
    let shown = |owner: &u64| halves(owner)[0] == number || depths.contains(&halves(owner)[1]);
    assert!(!owners.is_empty() && !owners.iter().any(shown), "{owners:x?} for {callers:x?}");
    // Depths differ in bits 4 to 15; what is veiled, in all.
    let lefts: Vec<_> = owners.iter().map(|owner| halves(owner)[1] >> 16).collect();
    assert!(callers.len() < 2 || lefts.iter().any(|left| left != &lefts[0]), "{owners:x?}");
}

/// Asserts that a later call freed, of an earlier one's records, those at its depth and below. An owner is a thread's
/// number, and above it how deep the call was: smaller is deeper.
fn freed_by(watched: &Watched<'_>, earlier: AddressRange, before: &[u64], later: AddressRange) {
    let caller = watched.owners(later).into_iter().max().expect("the later call has a record");
    let stay: Vec<_> = before.iter().copied().filter(|&owner| owner > caller).collect();
    assert_eq!(watched.owners(earlier), stay, "of {before:x?}, by {caller:x}");
}

/// How often two calls are made so that one is as deep as another: kernels add some of 64 lengths to the stack at random.
const CALLS: usize = 200;
/// How often a call is made so that one is surely no deeper than the first.
const MANY: usize = 1000;

/// By two routes, one of which is deeper than the other.
fn a_call_at_that_depth_frees_it(watched: &Watched<'_>) {
    let (one, other) = (Memory::private(1), Memory::private(1));
    let (of_file, file) = Memory::of_memfd(1);
    let discard = |memory: &Memory| memory.advise(libc::MADV_DONTNEED);
    let mut callers = HashSet::new();
    let mut in_turn = |first: (&Memory, &dyn Fn()), second: (&Memory, &dyn Fn())| {
        first.1();
        let before = watched.owners(first.0.range());
        second.1();
        callers.extend(watched.owners(second.0.range()));
        freed_by(watched, first.0.range(), &before, second.0.range());
        // It frees all of this thread's.
        Memory::private(1).raw_unmap();
    };
    for _ in 0..CALLS {
        in_turn((&one, &|| discard(&one)), (&other, &|| discard(&other)));
        in_turn((&one, &|| discard(&one)), (&of_file, &|| punch(&file, 0, 1)));
        in_turn((&of_file, &|| punch(&file, 0, 1)), (&one, &|| discard(&one)));
    }
    assert!(callers.len() > 1, "calls by two routes are not equally deep");
}

/// However deep it is.
fn a_call_that_unmaps_frees_it(watched: &Watched<'_>) {
    let discarded = Memory::private(1);
    let (of_file, file) = Memory::of_memfd(1);
    let unmap: [fn(&Memory); 2] = [Memory::raw_unmap, Memory::map_over];
    for unmap in unmap {
        let unmapped = Memory::private(1);
        discarded.advise(libc::MADV_DONTNEED);
        assert_ne!(watched.owners(discarded.range()), []);
        unmap(&unmapped);
        assert_eq!(watched.owners(discarded.range()), []);
        assert_eq!(watched.owners(unmapped.range()).len(), 1);
        punch(&file, 0, 1);
        unmap(&Memory::private(1));
        assert_eq!(watched.owners(of_file.range()), []);
    }
}

/// However deep it is, also where the call unmaps nothing: so often that the one or the other is the deeper by chance.
fn a_call_that_moves_frees_it(watched: &Watched<'_>) {
    let (moved, discarded) = (Memory::private(1), Memory::private(1));
    for _ in 0..CALLS {
        discarded.advise(libc::MADV_DONTNEED);
        assert_ne!(watched.owners(discarded.range()), []);
        moved.move_away();
        assert_eq!(watched.owners(discarded.range()), []);
    }
}

fn a_move_leaves_both_places(watched: &Watched<'_>) {
    let (from, to) = (Memory::private(1), Memory::private(1));
    let discarded = Memory::private(1);
    discarded.advise(libc::MADV_DONTNEED);
    assert_ne!(watched.owners(discarded.range()), []);
    from.move_pages_over(&to);
    assert_eq!(watched.owners(discarded.range()), []);
    let owners = watched.owners(from.range());
    assert_eq!(owners.len(), 1);
    assert_eq!(watched.owners(to.range()), owners);
}

/// Also not of a thread that looks in the same places.
fn another_thread_frees_nothing(watched: &Watched<'_>) {
    let (of_file, file) = Memory::of_memfd(1);
    let number = thread_number() % RECORDS + 100 * RECORDS;
    if as_process(number, || punch(&file, 0, 1)).is_none() {
        return;
    }
    let its = watched.owners(of_file.range());
    let is_its = |owner: &u64| owner & 0xffff_ffff == u64::from(number.cast_unsigned());
    assert!(!its.is_empty() && its.iter().all(is_its), "{its:x?}");
    let unmapped = Memory::private(1);
    unmapped.raw_unmap();
    assert_eq!(watched.owners(unmapped.range()).len(), 1);
    assert_eq!(watched.owners(of_file.range()), its);
}

/// A change, of a page of a file, by a process that looks in the same four places as the others, which are none of this
/// thread's.
fn punched_by(nth: usize, file: &OwnedFd, pages: impl Iterator<Item = usize>) -> Option<()> {
    let nth = i32::try_from(nth).unwrap();
    let number = (thread_number() + 1) % RECORDS + (101 + nth) * RECORDS;
    as_process(number, || pages.for_each(|page| punch(file, page, 1)))
}

fn a_change_that_finds_no_record_says_so(watched: &Watched<'_>) {
    let (memory, file) = Memory::of_memfd(PLACES + 1);
    let of = |page: usize| watched.owners(memory.pages(page, 1)).len();
    if punched_by(0, &file, std::iter::once(0)).is_none() {
        return;
    }
    // One for each function of the kernel that the call passes by.
    let records = of(0);
    assert!((1..=2).contains(&records), "{records}");
    let most = PLACES / records;
    for nth in 1..most {
        punched_by(nth, &file, std::iter::once(nth)).unwrap();
    }
    assert!((0..most).all(|page| of(page) == records) && !watched.is_crowded(), "a place for each");
    punched_by(most, &file, std::iter::once(most)).unwrap();
    assert!(of(most) == 0 && watched.is_crowded(), "no place");
    assert!((0..most).all(|page| of(page) == records), "each is as before");
}

/// In the last of the places that it looks in, too, a thread finds its own record, and takes it again.
fn a_record_is_freed_wherever_it_is(watched: &Watched<'_>) {
    let (memory, file) = Memory::of_memfd(PLACES + 1);
    let of = |page: usize| watched.owners(memory.pages(page, 1)).len();
    if punched_by(0, &file, std::iter::once(0)).is_none() {
        return;
    }
    let last = PLACES / of(0) - 1;
    for nth in 1..last {
        punched_by(nth, &file, std::iter::once(nth)).unwrap();
    }
    let pages = std::iter::once(last).chain(std::iter::repeat_n(last + 1, MANY));
    punched_by(last, &file, pages).unwrap();
    assert_eq!((of(last), of(last + 1)), (0, of(0)));
}
