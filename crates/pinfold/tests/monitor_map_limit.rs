//! A monitor begins and ends in a process that has as many mappings as it may have: no thread waits for a reader that there
//! is not, and no memory stays watched.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

mod alone;
mod map_limit;
mod support;

use alone::alone;
use map_limit::MapLimit;
use pinfold::monitor::{StartError, Userfaultfd};
use pinfold::{Monitor, Watch};
use std::fs;
use support::*;

/// A thread that waits for a reader that there is not is ended with its process.
const LONGEST: u32 = 300;

/// How many mappings of this process some userfaultfd watches.
fn watched() -> usize {
    let table = fs::read_to_string("/proc/self/smaps").unwrap();
    let flags = table.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.filter(|flags| flags.split_whitespace().any(|flag| flag == "uw")).count()
}

/// The address of one page that nothing is mapped at, between two of the test's: the next page that is mapped comes there.
fn freed_between_two() -> usize {
    const RUN: usize = 8;
    let page = || map_flags(1, PRIVATE, -1).unwrap();
    let mut last = page();
    // Behind the holes that there were, pages lie side by side, downwards or upwards.
    let (mut down, mut up) = (0, 0);
    for _ in 0..100_000 {
        let now = page();
        down = if now + PAGE == last { down + 1 } else { 0 };
        up = if now == last + PAGE { up + 1 } else { 0 };
        last = now;
        if down.max(up) == RUN {
            break;
        }
    }
    assert_eq!(down.max(up), RUN, "no pages side by side");
    let freed = if down == RUN { last + 2 * PAGE } else { last - 2 * PAGE };
    assert!(munmap(freed, PAGE));
    freed
}

/// The pages of a monitor's own tests are watched with no reader yet, and a thread that it starts is refused.
#[test]
fn a_monitor_starts_near_the_limit_of_mappings_or_says_why_not() {
    alone("a_monitor_starts_near_the_limit_of_mappings_or_says_why_not", || {
        alarm(LONGEST);
        let Some(mut limit) = MapLimit::reach() else { return };
        let mut refusals = Vec::with_capacity(64);
        let mut started = Userfaultfd::new();
        while let Err(refusal) = started {
            refusals.push(refusal);
            assert!(limit.give_one_back(), "{refusals:?}");
            started = Userfaultfd::new();
        }
        drop((started, limit));
        assert!(matches!(refusals[0], StartError::NoMemory { errno: libc::ENOMEM }));
        assert_eq!(watched(), 0, "{refusals:?}");
        let blames_the_kernel =
            |refusal: &StartError| matches!(refusal, StartError::SelfTest { .. });
        assert!(!refusals.iter().any(blames_the_kernel), "{refusals:?}");
    });
}

/// The refusal is not waited for as if the change had not taken effect yet.
#[test]
fn a_monitor_says_why_no_page_was_mapped_over_another() {
    alone("a_monitor_says_why_no_page_was_mapped_over_another", || {
        let refused = std::thread::spawn(|| {
            forbid_mapping_over();
            Userfaultfd::new().map(drop)
        });
        assert_eq!(refused.join().unwrap(), Err(StartError::NoMemory { errno: libc::ENOMEM }));
    });
}

#[test]
fn a_monitor_between_watched_pages_ends_at_the_limit_of_mappings() {
    alone("a_monitor_between_watched_pages_ends_at_the_limit_of_mappings", || {
        alarm(LONGEST);
        let freed = freed_between_two();
        let monitor = Userfaultfd::new().unwrap();
        for neighbour in [freed - PAGE, freed + PAGE] {
            assert_eq!(monitor.watch(range(neighbour, PAGE)), Watch::Covered);
        }
        let Some(limit) = MapLimit::reach() else { return };
        drop(monitor);
        drop(limit);
        assert_eq!(watched(), 0);
    });
}

/// As long as the child has a copy of the descriptor, the kernel would wait for a reader of what happens to memory that is
/// watched still.
#[test]
fn a_monitor_that_ends_at_the_limit_of_mappings_leaves_nothing_watched_beside_a_child() {
    let name = "a_monitor_that_ends_at_the_limit_of_mappings_leaves_nothing_watched_beside_a_child";
    alone(name, || {
        alarm(LONGEST);
        let neighbour = freed_between_two() - PAGE;
        let monitor = Userfaultfd::new().unwrap();
        assert_eq!(monitor.watch(range(neighbour, PAGE)), Watch::Covered);
        let [read, write] = pipe();
        let child = fork(|| {
            close(write);
            wait_for_end(read);
        });
        let limit = MapLimit::reach();
        drop(monitor);
        drop(limit);
        assert_eq!(watched(), 0);
        assert!(munmap(neighbour, PAGE), "no thread reads, no thread waits");
        close(write);
        assert_eq!(wait_for(child), 0);
    });
}
