//! What happens when the monitor's descriptor, or the process, is no longer what it was: the
//! monitor says so, and no thread is left hanging in `munmap`.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod sharer;
mod support;

use pinfold::monitor::{NoMonitor, StartError, Userfaultfd};
use pinfold::{Lost, Monitor, Uncovered, Watch};
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::*;

const LENGTH: usize = 4 * PAGE;

/// One test at a time: a monitor that another test starts may get the number that this one has
/// just closed.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(errno: i32) -> Lost {
    Lost::Descriptor { errno }
}

fn is_lost(monitor: &Userfaultfd, reason: Lost) {
    assert_eq!(monitor.check(), Err(reason));
    let answer = monitor.watch(range(map(4), LENGTH));
    assert_eq!(answer, Watch::Uncovered(Uncovered::Lost(reason)));
    assert!(monitor.change_pending(range(map(4), LENGTH)), "nothing may be cached");
}

fn with_watched_memory() -> (Userfaultfd, usize) {
    let monitor = Userfaultfd::new().unwrap();
    let at = map(4);
    assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
    (monitor, at)
}

#[test]
fn a_closed_descriptor_is_noticed_for_good() {
    let _alone = alone();
    let (monitor, at) = with_watched_memory();
    close(monitor.descriptor());
    assert!(munmap(at, PAGE), "and the reader goes on reading");
    is_lost(&monitor, lost(libc::EBADF));
    replace_by_null(monitor.descriptor());
    is_lost(&monitor, lost(libc::EBADF));
    assert!(munmap(at, LENGTH));
}

#[test]
fn a_replaced_descriptor_is_noticed_and_left_to_its_owner() {
    let _alone = alone();
    let (monitor, at) = with_watched_memory();
    let number = monitor.descriptor();
    replace_by_null(number);
    is_lost(&monitor, lost(libc::ENOTTY));
    drop(monitor);
    assert!(is_open(number), "that was not ours to close");
    close(number);
    assert!(munmap(at, LENGTH));
}

/// The request that `check` makes cannot tell two userfaultfds apart; `watch` can.
#[test]
fn another_userfaultfd_under_our_number_is_noticed_by_watch() {
    let _alone = alone();
    let (monitor, _) = with_watched_memory();
    let other = DeafUserfaultfd::new();
    other.replace(monitor.descriptor());
    let answer = monitor.watch(range(map(4), LENGTH));
    assert_eq!(answer, Watch::Uncovered(Uncovered::Lost(lost(libc::EBADF))));
    is_lost(&monitor, lost(libc::EBADF));
}

/// What a daemon does to itself when it starts.
#[test]
fn a_program_may_close_everything() {
    let _alone = alone();
    let child = fork(|| {
        let (monitor, at) = with_watched_memory();
        close_from(3);
        assert!(munmap(at, PAGE));
        is_lost(&monitor, lost(libc::EBADF));
        drop(monitor);
        assert!(munmap(at, LENGTH));
        let (fresh, _) = with_watched_memory();
        fresh.check().unwrap();
    });
    assert_eq!(wait_for(child), 0);
}

#[test]
fn a_forked_child_finds_out_and_starts_afresh() {
    let _alone = alone();
    let (monitor, at) = with_watched_memory();
    let before = mark(&monitor);
    let child = fork(|| {
        assert!(monitor.forked());
        is_lost(&monitor, Lost::Forked);
        assert!(!monitor.replay(before.up_to, &mut |_| {}).complete);
        assert!(munmap(at, PAGE), "no change waits for a reader that is not here");
        let (own, other) = with_watched_memory();
        let before = mark(&own);
        assert!(munmap(other, LENGTH));
        assert!(touch(&changes_since(&own, before), range(other, LENGTH)));
        drop(monitor);
        own.check().unwrap();
    });
    assert_eq!(wait_for(child), 0);
}

#[test]
fn a_parent_goes_on_after_fork() {
    let _alone = alone();
    let (monitor, at) = with_watched_memory();
    let before = mark(&monitor);
    assert_eq!(wait_for(fork(|| {})), 0);
    assert_eq!(monitor.check(), Ok(before.sequence));
    assert!(munmap(at, LENGTH));
    assert!(touch(&changes_since(&monitor, before), range(at, LENGTH)));
}

/// A child that lives on holds a copy of the descriptor, so the kernel goes on waiting for
/// a reader of what happens to memory that is still watched.
#[test]
fn a_dropped_monitor_leaves_no_memory_watched() {
    let _alone = alone();
    let (monitor, at) = with_watched_memory();
    let moved_to = map(4);
    let moving = map(4);
    assert_eq!(monitor.watch(range(moving, LENGTH)), Watch::Covered);
    let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    assert_eq!(mremap(moving, LENGTH, LENGTH, fixed, moved_to), Some(moved_to));
    let [read, write] = pipe();
    let child = fork(|| {
        close(write);
        wait_for_end(read);
    });
    drop(monitor);
    assert!(munmap(at, LENGTH) && munmap(moved_to, LENGTH), "no thread reads, no thread waits");
    close(write);
    assert_eq!(wait_for(child), 0);
}

#[test]
fn without_a_monitor_a_fork_is_noticed_all_the_same() {
    let _alone = alone();
    let none = NoMonitor::new().unwrap();
    assert!(none.check().is_ok());
    let child = fork(|| assert_eq!(none.check(), Err(Lost::Forked)));
    assert_eq!(wait_for(child), 0);
}

/// The program's signal handlers must not run in the reader: they may do anything.
#[test]
fn the_reader_blocks_every_signal() {
    let _alone = alone();
    let _monitor = Userfaultfd::new().unwrap();
    let readers = fs::read_dir("/proc/self/task").unwrap().filter_map(|thread| {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).ok()?;
        status.starts_with("Name:\tpinfold-events").then_some(status)
    });
    let masks: Vec<_> = readers
        .filter_map(|status| {
            let line = status.lines().find(|line| line.starts_with("SigBlk:"))?;
            u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok()
        })
        .collect();
    // SIGKILL and SIGSTOP cannot be blocked, and the C library keeps 32 and 33 for itself.
    let unblockable = 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32;
    assert!(!masks.is_empty());
    assert!(masks.iter().all(|mask| mask | unblockable == u64::MAX), "{masks:x?}");
}

/// A monitor that cannot start its reader has watched a page by then, and no thread reads the event
/// of that page's end.
#[test]
fn a_monitor_that_gets_no_thread_is_an_error_and_hangs_no_change() {
    let _alone = alone();
    let child = fork(|| {
        alarm(300);
        forbid_threads();
        let error = Userfaultfd::new().unwrap_err();
        assert_eq!(error, StartError::Thread { errno: libc::EAGAIN });
    });
    assert_eq!(wait_for(child), 0);
}

/// The reader may be busy with another event when it is asked to stop; it must still read the one
/// that the stopping thread waits for.
#[test]
fn a_monitor_ends_while_its_memory_is_being_unmapped() {
    let _alone = alone();
    for _ in 0..200 {
        let (monitor, at) = with_watched_memory();
        let unmapping =
            std::thread::spawn(move || (0..4).all(|page| munmap(at + page * PAGE, PAGE)));
        drop(monitor);
        assert!(unmapping.join().unwrap());
    }
}

/// `userfaultfd_event_wait_completion` takes the event of a killed task off its queue. The book names this as a
/// limit ("Two undetected changes"); where a kernel mends it, the book is to say so.
#[test]
fn a_change_whose_maker_is_killed_and_leaves_the_memory_behind_is_not_reported() {
    let monitor = Userfaultfd::new().unwrap();
    let is_unreported = |tenths: u64| {
        let (at, bytes) = sharer::populated();
        let range = range(at, bytes);
        assert_eq!(monitor.watch(range), Watch::Covered);
        monitor.check().unwrap();
        let from = mark(&monitor);
        let after = Duration::from_micros(100 * (tenths % 20));
        let is_gone = sharer::killed_while_unmapping(at, bytes, after);
        is_gone && !touch(&changes_since(&monitor, from), range)
    };
    assert!((0..400).any(is_unreported), "each was reported, or none was made");
}
