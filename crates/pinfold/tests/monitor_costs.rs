//! What the monitor costs here: printed, never judged. The best of many rounds, in nanoseconds.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod support;

use pinfold::monitor::{Feed, NoMonitor, Userfaultfd, WithFeed, best};
use pinfold::{Monitor, Watch};
use std::hint::black_box;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use support::*;

const LENGTH: usize = 16 * PAGE;

/// One test after the other: of two monitors that watch memory side by side, the kernel may merge mappings before they are
/// watched, and then one is refused; and what one test does is in the figures of the others.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn print(name: &str, rounds: u32, per_round: u32, mut work: impl FnMut()) {
    let once = || {
        let begin = Instant::now();
        (0..per_round).for_each(|_| work());
        begin.elapsed().as_nanos() / u128::from(per_round)
    };
    let best = std::iter::repeat_with(once).take(rounds as usize).min();
    println!("{name:40} {:>8} ns", best.unwrap_or_default());
}

/// A cache knows of each monitor whether its check is a system call, whatever stands around it.
#[test]
fn what_checks_by_a_system_call_says_so() {
    static FEED: Feed = Feed::new();
    let _alone = alone();
    assert!(!NoMonitor::new().unwrap().has_slow_check());
    let best = best().unwrap();
    assert_eq!(best.has_slow_check(), best.name().starts_with("userfaultfd"), "{}", best.name());
    drop(best);
    let userfaultfd = Userfaultfd::new().unwrap();
    assert!(userfaultfd.has_slow_check());
    let both: Arc<dyn Monitor> = Arc::new(WithFeed::new(userfaultfd, &FEED));
    assert!(both.has_slow_check());
}

#[test]
fn print_what_it_costs() {
    let _alone = alone();
    print("empty system call", 300, 1000, || {
        black_box(raw(libc::SYS_getppid, [0; 5]));
    });
    print("start and end of a monitor", 100, 1, || drop(Userfaultfd::new().unwrap()));
    let monitor = Userfaultfd::new().unwrap();
    print("check", 300, 1000, || {
        black_box(monitor.check().unwrap());
    });
    let at = map(16);
    let watched = range(at, LENGTH);
    print("watch again", 200, 50, || assert_eq!(monitor.watch(watched), Watch::Covered));
    print("change_pending, nothing discarded", 200, 1000, || {
        assert!(!monitor.change_pending(watched));
    });
    let fresh = || map_flags(16, PRIVATE, -1).unwrap();
    print("mmap + munmap, not watched", 300, 10, || assert!(munmap(fresh(), LENGTH)));
    print("mmap + watch + munmap", 300, 10, || {
        let at = fresh();
        assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
        assert!(munmap(at, LENGTH));
    });
    let other = map(16);
    print("discard, not watched", 300, 10, || assert!(madvise(other, LENGTH, 4)));
    print("discard, watched", 300, 10, || assert!(madvise(at, LENGTH, 4)));
    print("discard, watched + change_pending", 300, 1, || {
        assert!(madvise(at, LENGTH, 4));
        black_box(monitor.change_pending(watched));
    });
    print("mappings_in", 200, 50, || {
        black_box(pinfold::mappings::mappings_in(watched).unwrap());
    });
}

/// A monitor's end visits what it watches; what is mapped between the kernel alone looks at, when the
/// userfaultfd is closed.
#[test]
fn print_what_mappings_cost() {
    let _alone = alone();
    for mappings in [512, 15_000, 60_000] {
        // Low, between and high, in the order of addresses: of the rights each page has others than its
        // neighbours, so each is a mapping.
        let whole = map(mappings + 2);
        let rights =
            |page: usize| if page.is_multiple_of(2) { libc::PROT_READ } else { libc::PROT_WRITE };
        (1..=mappings).for_each(|page| _ = mprotect(whole + page * PAGE, PAGE, rights(page)));
        let ends = [whole, whole + (mappings + 1) * PAGE].map(|at| range(at, PAGE));
        let ending = |watched: &[_]| {
            let monitor = Userfaultfd::new().unwrap();
            watched.iter().for_each(|&watched| assert_eq!(monitor.watch(watched), Watch::Covered));
            let begin = Instant::now();
            drop(monitor);
            begin.elapsed().as_micros()
        };
        let least = |watched: &[_]| (0..5).map(|_| ending(watched)).min().unwrap_or_default();
        println!("end of a monitor, {mappings} mappings between {:>8} us", least(&ends));
        let all = range(whole, (mappings + 2) * PAGE);
        println!("end of a monitor of {mappings} mappings {:>8} us", least(&[all]));
        if mappings == 512 {
            let watch = |monitor: &Userfaultfd| {
                let begin = Instant::now();
                assert_eq!(monitor.watch(all), Watch::Covered);
                begin.elapsed().as_micros()
            };
            let fresh = (0..5).map(|_| watch(&Userfaultfd::new().unwrap())).min();
            println!("watch of {mappings} mappings {:>8} us", fresh.unwrap_or_default());
        }
        assert!(munmap(whole, (mappings + 2) * PAGE));
    }
}

#[test]
fn print_what_the_feed_costs() {
    let _alone = alone();
    static FEED: Feed = Feed::new();
    let changed = range(16 * PAGE, LENGTH);
    print("a change told, begin and end", 300, 1000, || drop(black_box(FEED.begin(changed))));
    print("a change told afterwards", 300, 1000, || FEED.changed(changed));
    print("is anything under way", 300, 1000, || {
        black_box(FEED.is_under_way(changed));
    });
    let none = NoMonitor::new().unwrap();
    print("check, no monitor", 300, 1000, || {
        black_box(none.check().unwrap());
    });
    let both = WithFeed::new(none, &FEED);
    print("check, no monitor with feed", 300, 1000, || {
        black_box(both.check().unwrap());
    });
    let both = WithFeed::new(Userfaultfd::new().unwrap(), &FEED);
    print("check, userfaultfd with feed", 300, 1000, || {
        black_box(both.check().unwrap());
    });
}
