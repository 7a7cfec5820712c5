//! The explicit feed on a real kernel: alone, with a monitor, and what a cache makes of it.
//!
//! # Safety
//!
//! The tests call a cache's method with memory of their own, and take signals.

#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod support;

use pinfold::monitor::{
    Best, ChangeReport, Choice, Feed, Follower, NoMonitor, Userfaultfd, WithFeed, best,
};
use pinfold::registrar::Mlock;
use pinfold::{Access, AddressRange, Cache, Change, Config, Cover, MappingKind, Monitor, Watch};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use support::{PAGE, changes_since, comes_true, fork, map, mark, munmap, range, touch, wait_for};

const LENGTH: usize = 4 * PAGE;
/// Frees pages and makes faults fatal; no userfaultfd tells of it.
const MADV_GUARD_INSTALL: libc::c_int = 102;

fn is_cached<M: Monitor>(cache: &Cache<Mlock, M>, at: usize) -> bool {
    let start = std::ptr::with_exposed_provenance(at);
    // SAFETY: these bytes may be locked.
    unsafe { cache.get(start, LENGTH, Access::READ) }.unwrap().is_cached()
}

fn cache<M: Monitor>(monitor: M) -> Cache<Mlock, M> {
    pinfold::cache(Mlock::new().unwrap(), monitor, Config::keeping_all()).unwrap()
}

/// By this thread, or by the reclaimer's, which may be in the middle of it.
fn gives_everything_back<M: Monitor>(cache: &Cache<Mlock, M>) -> bool {
    comes_true(|| {
        cache.reclaim();
        cache.statistics().regions == 0
    })
}

/// Discards of which none can be proved to be over, because a thread of the process never sleeps, leave the
/// memory alone that they do not touch.
#[test]
fn with_a_thread_that_never_sleeps_other_memory_is_cached() {
    const DISCARDS: usize = 2000;
    const GETS: usize = 1000;
    const RANGES: usize = 100;
    let cache = cache(Userfaultfd::new().unwrap());
    let (discarded, other) = (map(DISCARDS), map(RANGES * LENGTH / PAGE));
    assert_eq!(cache.monitor().watch(range(discarded, DISCARDS * PAGE)), Watch::Covered);
    let (spins, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (made, cached, unproved) = thread::scope(|scope| {
        scope.spawn(|| {
            spins.store(true, Ordering::Release);
            while !over.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
        });
        while !spins.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let discard =
            |page: &usize| support::madvise(discarded + page * PAGE, PAGE, libc::MADV_DONTNEED);
        let made = (0..DISCARDS).filter(discard).count();
        let get = |number: &usize| is_cached(&cache, other + number % RANGES * LENGTH);
        let cached = (0..GETS).filter(get).count();
        let unproved = cache.monitor().change_pending(range(discarded, PAGE));
        over.store(true, Ordering::Release);
        (made, cached, unproved)
    });
    eprintln!("{cached} of {GETS} gets of other memory were cached, after {made} discards");
    assert!(unproved, "the thread that spins may have made the first discard");
    assert_eq!(made, DISCARDS);
    assert!(cached * 100 >= GETS * 99, "{cached} of {GETS}");
}

/// What userfaultfd is blind to ends the registration if it is told, and nothing is kept meanwhile.
#[test]
fn a_reported_change_is_applied_with_a_monitor_that_cannot_see_it() {
    static FEED: Feed = Feed::new();
    let cache = cache(WithFeed::new(Userfaultfd::new().unwrap(), &FEED));
    let at = map(4);
    assert!(is_cached(&cache, at));
    assert_eq!(cache.statistics().registrations, 1);
    let changing = FEED.begin(range(at, PAGE));
    assert!(!is_cached(&cache, at), "registered in the middle of a change");
    support::madvise(at, PAGE, MADV_GUARD_INSTALL);
    support::madvise(at, PAGE, MADV_GUARD_INSTALL + 1);
    drop(changing);
    assert!(is_cached(&cache, at) && is_cached(&cache, at));
    let counts = cache.statistics();
    assert_eq!((counts.registrations, counts.invalidations), (3, 1));
    assert!(munmap(at, LENGTH));
    assert!(gives_everything_back(&cache), "the monitor's own news count as before");
}

/// An allocator that tells everything makes good what a vouched request asks for.
#[test]
fn vouched_memory_is_kept_until_its_owner_tells() {
    static FEED: Feed = Feed::new();
    let cache = cache(WithFeed::new(NoMonitor::new().unwrap(), &FEED));
    let at = map(4);
    let vouched = || {
        let start = std::ptr::with_exposed_provenance(at);
        // SAFETY: every change below is told.
        unsafe { cache.request(start, LENGTH, Access::READ).vouched().get() }.unwrap().is_cached()
    };
    assert!(vouched() && vouched());
    assert!(!is_cached(&cache, at), "not vouched this time");
    assert_eq!(cache.statistics().registrations, 2);
    FEED.changed(range(at + PAGE, PAGE));
    assert!(vouched());
    assert_eq!(cache.statistics().registrations, 3);
    let changing = FEED.begin(range(at + PAGE, PAGE));
    assert!(!vouched(), "the pages that it got may be gone when the change is made");
    drop(changing);
    assert!(vouched() && vouched());
    assert_eq!(cache.statistics().registrations, 5);
    assert!(munmap(at, LENGTH));
}

#[test]
fn a_claim_turns_blind_into_told_and_nothing_else() {
    static FEED: Feed = Feed::new();
    let monitor = WithFeed::new(Userfaultfd::new().unwrap(), &FEED);
    let before = |mapping, change| monitor.monitor().coverage(mapping, change);
    assert_eq!(monitor.name(), "userfaultfd");
    Change::ALL.into_iter().for_each(|change| FEED.claim(change));
    assert_eq!(monitor.name(), "userfaultfd+hooks");
    for mapping in MappingKind::ALL {
        for change in Change::ALL {
            let expected = match before(mapping, change) {
                Cover::Undetected => Cover::Reported,
                other => other,
            };
            assert_eq!(monitor.coverage(mapping, change), expected, "{mapping:?} {change:?}");
        }
    }
    FEED.withdraw(Change::Guard);
    assert_eq!(monitor.coverage(MappingKind::PrivateAnonymous, Change::Guard), Cover::Undetected);
}

#[test]
fn a_change_told_by_another_thread_is_known_when_its_begin_returned() {
    static FEED: Feed = Feed::new();
    let monitor = WithFeed::new(Userfaultfd::new().unwrap(), &FEED);
    let at = map(4);
    assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
    for round in 0..1000 {
        let before = mark(&monitor);
        let told = range(at + round % 4 * PAGE, PAGE);
        let seen = thread::scope(|scope| {
            let teller = scope.spawn(|| drop(FEED.begin(told)));
            teller.join().unwrap();
            monitor.check().unwrap() != before.sequence
        });
        assert!(seen && touch(&changes_since(&monitor, before), told));
    }
}

/// Many threads tell, one follows: what has been told before a look is known after it, however the
/// two words move meanwhile.
#[test]
fn a_storm_of_news_hides_nothing() {
    static FEED: Feed = Feed::new();
    const EACH: u64 = 20_000;
    let monitor = Arc::new(WithFeed::new(NoMonitor::new().unwrap(), &FEED));
    let mut follower = Follower::new(Arc::clone(&monitor)).unwrap();
    let done = [const { AtomicU64::new(0) }; 2];
    let (mut known, mut looks) = ([0; 2], 0);
    thread::scope(|scope| {
        for (teller, done) in done.iter().enumerate() {
            scope.spawn(move || {
                for turn in 1..=EACH {
                    FEED.changed(page_of(teller, turn));
                    done.store(turn, Ordering::Release);
                }
            });
        }
        while known.iter().any(|&known| known < EACH) {
            let before = done.each_ref().map(|done| done.load(Ordering::Acquire));
            follower
                .news(|news| match news {
                    ChangeReport::Changed(range) => {
                        let (teller, turn) = of_page(range);
                        known[teller] = known[teller].max(turn);
                    }
                    // What each is about to tell included: it may have its place in the log.
                    ChangeReport::Everything => {
                        known = done.each_ref().map(|done| done.load(Ordering::Acquire) + 1);
                    }
                })
                .unwrap();
            looks += 1;
            assert!(known[0] >= before[0] && known[1] >= before[1], "{known:?} {before:?}");
        }
    });
    eprintln!("{looks} looks at {} changes", 2 * EACH);
}

/// A range that says who told it and when.
fn page_of(teller: usize, turn: u64) -> AddressRange {
    range((2 * usize::try_from(turn).unwrap() + teller) * PAGE, PAGE)
}

fn of_page(range: AddressRange) -> (usize, u64) {
    let number = range.start() / PAGE;
    (number % 2, number as u64 / 2)
}

/// Told by the handler of a signal that interrupts the telling.
static INTERRUPTED: Feed = Feed::new();
static BY_HANDLER: AtomicU64 = AtomicU64::new(0);

extern "C" fn tell_from_handler(_: libc::c_int) {
    let turn = BY_HANDLER.fetch_add(1, Ordering::Relaxed) + 1;
    drop(INTERRUPTED.begin(page_of(1, turn)));
}

#[test]
fn a_signal_handler_may_tell_in_the_middle_of_telling() {
    const SIGNALS: u64 = 2_000;
    let monitor = WithFeed::new(NoMonitor::new().unwrap(), &INTERRUPTED);
    let mut follower = Follower::new(monitor).unwrap();
    // SAFETY: the handler does what handlers may, which is what this test is about.
    unsafe { libc::signal(libc::SIGUSR1, tell_from_handler as extern "C" fn(_) as usize) };
    let (over, teller) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut last = Last::default();
    thread::scope(|scope| {
        let telling = scope.spawn(|| tell_until(&over, &teller));
        while BY_HANDLER.load(Ordering::Relaxed) < SIGNALS {
            let thread = teller.load(Ordering::Acquire);
            // SAFETY: a thread that says who it is has not ended before it is told to.
            assert!(thread == 0 || unsafe { libc::pthread_kill(thread, libc::SIGUSR1) } == 0);
            follower.news(|news| last.note(news)).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        let turns = telling.join().unwrap();
        follower.news(|news| last.note(news)).unwrap();
        let told = [turns, BY_HANDLER.load(Ordering::Relaxed)];
        for (teller, told) in told.into_iter().enumerate() {
            assert!(last.passed[teller] || last.known[teller] == told, "{last:?} of {told:?}");
        }
    });
    assert!(!INTERRUPTED.is_under_way(range(PAGE, usize::MAX / 2)));
}

/// How often it has told.
fn tell_until(over: &AtomicBool, me: &AtomicU64) -> u64 {
    // SAFETY: the call has no preconditions.
    me.store(unsafe { libc::pthread_self() }, Ordering::Release);
    let mut turn = 0;
    while !over.load(Ordering::Relaxed) {
        turn += 1;
        drop(INTERRUPTED.begin(page_of(0, turn)));
    }
    turn
}

/// The last that each teller told.
#[derive(Default, Debug)]
struct Last {
    known: [u64; 2],
    /// Its last may have been told as a part of everything; it has told nothing since.
    passed: [bool; 2],
}

impl Last {
    fn note(&mut self, news: ChangeReport) {
        match news {
            ChangeReport::Everything => self.passed = [true; 2],
            ChangeReport::Changed(range) => {
                let (teller, turn) = of_page(range);
                self.known[teller] = self.known[teller].max(turn);
                self.passed[teller] = false;
            }
        }
    }
}

/// A thread that waits is woken by the monitor's news, by the feed's, and by a ring.
#[test]
fn a_waiter_is_woken_by_either_source() {
    static FEED: Feed = Feed::new();
    let monitor = WithFeed::new(Userfaultfd::new().unwrap(), &FEED);
    let at = map(4);
    assert_eq!(monitor.watch(range(at, LENGTH)), Watch::Covered);
    let sources: [&(dyn Fn() + Sync); 3] =
        [&|| assert!(munmap(at, LENGTH)), &|| FEED.changed(range(at, PAGE)), &|| monitor.notify()];
    for source in sources {
        let seen = monitor.notified();
        thread::scope(|scope| {
            scope.spawn(|| monitor.wait(seen));
            source();
        });
        assert_ne!(monitor.notified(), seen);
    }
}

/// A thread that a fork leaves behind in the middle of a change keeps its range uncached in the child,
/// until the child says that there is no such thread.
#[test]
fn a_forked_child_can_forget_what_its_parents_threads_were_doing() {
    static FEED: Feed = Feed::new();
    let at = map(4);
    let under_way = range(at, LENGTH);
    let changing = FEED.begin(under_way);
    let child = fork(|| {
        assert!(FEED.is_under_way(under_way));
        // SAFETY: a forked child with one thread, which is not told to change anything itself.
        unsafe { FEED.forget_parents_changes() };
        assert!(!FEED.is_under_way(under_way));
        let cache = cache(WithFeed::new(Userfaultfd::new().unwrap(), &FEED));
        assert!(is_cached(&cache, at));
    });
    assert_eq!(wait_for(child), 0);
    assert!(FEED.is_under_way(under_way), "the parent's is the parent's");
    drop(changing);
}

/// The best of this machine, and each that it has, carries a cache.
#[test]
fn each_choice_carries_a_cache() {
    for choice in Choice::ALL {
        match Best::only(choice) {
            Ok(monitor) => carries_a_cache(monitor),
            Err(refused) => eprintln!("skipped: {refused}"),
        }
    }
    carries_a_cache(best().unwrap());
}

fn carries_a_cache(monitor: Best) {
    let caches = monitor.chosen() != Choice::NoMonitor;
    let (name, at) = (monitor.name(), map(4));
    let cache = cache(monitor);
    // Another test may have unmapped what it had here, and be about to say that this is over.
    assert!(comes_true(|| is_cached(&cache, at) == caches), "{name}");
    let before = cache.statistics().registrations;
    let told = Feed::of_process().begin(range(at, PAGE));
    assert!(!is_cached(&cache, at), "{name}: under way");
    drop(told);
    assert_eq!(is_cached(&cache, at), caches, "{name}");
    assert_eq!(cache.statistics().registrations, before + 2, "{name}: what is told counts");
    assert!(munmap(at, LENGTH));
    assert!(gives_everything_back(&cache), "{name}: what is unmapped is given back");
}

/// A monitor's own news reach a follower, too.
#[test]
fn a_follower_hears_of_what_the_monitor_sees() {
    let mut follower = Follower::new(Userfaultfd::new().unwrap()).unwrap();
    let at = map(4);
    assert_eq!(follower.watch(range(at, LENGTH)), Watch::Covered);
    follower.news(|news| panic!("{news:?}")).unwrap();
    assert!(munmap(at, PAGE));
    let mut told = Vec::new();
    follower.news(|news| told.push(news)).unwrap();
    assert_eq!(told, [ChangeReport::Changed(range(at, PAGE))]);
    follower.news(|news| panic!("told twice: {news:?}")).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert!(munmap(at + PAGE, PAGE)));
        follower.wait();
    });
}

/// As a cache registers: what was applied, then watched, then asked whether a change is under way, is
/// believed until the log says otherwise. The end of a watch right behind the second step must say so, also to
/// those who follow the monitor without the process's feed.
#[test]
fn memory_that_was_watched_while_its_watch_ended_is_not_believed() {
    let best = Best::only(Choice::Userfaultfd).unwrap();
    ends_of_watches_are_told(&best, &best);
    ends_of_watches_are_told(&best, &*Userfaultfd::shared().unwrap());
}

fn ends_of_watches_are_told(best: &Best, monitor: &impl Monitor) {
    let at = map(1);
    let page = range(at, PAGE);
    let touched_since = |from| {
        let mut is_touched = false;
        let replay = monitor
            .replay(from, &mut |changed: AddressRange| is_touched |= changed.overlaps(&page));
        (is_touched || !replay.complete, replay.up_to)
    };
    let (mut believed, mut applied) = (0, mark(monitor).up_to);
    for _ in 0..2_000 {
        // All of the round before.
        monitor.check().unwrap();
        applied = touched_since(applied).1;
        thread::scope(|scope| {
            scope.spawn(|| best.unwatch(page));
            while let (false, up_to) = touched_since(applied) {
                applied = up_to;
                std::hint::spin_loop();
            }
            monitor.check().unwrap();
            applied = touched_since(applied).1;
            if monitor.watch(page) != Watch::Covered || monitor.change_pending(page) {
                return;
            }
            believed += 1;
            support::madvise(at, PAGE, libc::MADV_DONTNEED);
            monitor.check().unwrap();
            assert!(touched_since(applied).0, "a change of believed memory is in no log");
        });
    }
    eprintln!("{believed} of 2000 times the watch counted");
    assert!(munmap(at, PAGE));
}

/// The watch of every page ends but for the monitor's own, by which it wakes its reader: the second call comes back, and
/// what is watched from then on is seen.
#[test]
fn all_that_is_mapped_may_be_unwatched() {
    let Ok(best) = Best::only(Choice::Userfaultfd) else {
        return eprintln!("skipped: no userfaultfd");
    };
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mapped = AddressRange::between(1 << 12, 1 << 47).unwrap();
        best.unwatch(mapped);
        best.unwatch(mapped);
        let memory = vec![7_u8; 1 << 20];
        let range = AddressRange::new(memory.as_ptr().addr(), memory.len()).unwrap();
        let before = (best.watch(range), best.check().unwrap());
        drop(memory);
        let seen = best.check().unwrap();
        done.send((before, seen)).unwrap();
    });
    // Much longer than it takes: without a bound a failure would be no result.
    let ((watched, before), seen) = ended.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(watched, Watch::Covered);
    assert_ne!(before, seen, "unmapped under the watch");
}
