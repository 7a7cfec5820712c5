//! Suspensions: each way to end for each of their states, and panics of the device at any call.

use crate::device::{
    Device, Link, PAGE, RAN, Records, Silent, TheCache, cache, cache_of, device_of,
    device_with_loud_connections, in_a_process_of_its_own, lease, panics_at, trim_zeros,
};
use crate::table::{a_cache, memory, row};
use crate::ways::{end, panics};
use pinfold::rearrange::{
    HugePageWay, Node, RearrangeError, Stepped, Stopped, StoppedBy, defragment,
    defragment_in_steps, migrate,
};
use pinfold::suspend::{
    Gets, OfEither, OnDrop, Suspend, SuspendProgress, Suspending, SuspensionTerms, Why,
};
use pinfold::{AddressRange, Config, Lease};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Gets fail at once where a test would wait for itself.
fn terms(on_drop: OnDrop) -> SuspensionTerms {
    let deadline = Duration::from_millis(10);
    SuspensionTerms { deadline, gets: Gets::Refuse, on_drop, ..SuspensionTerms::default() }
}

fn range_of(memory: &[u8]) -> AddressRange {
    AddressRange::new(memory.as_ptr().expose_provenance(), memory.len()).unwrap()
}

fn get<'c>(cache: &'c TheCache, memory: &[u8]) -> Option<Lease<'c, Device, Silent>> {
    lease(cache, memory).ok()
}

/// What waits for a lease.
fn pending(
    cache: &'static TheCache,
    records: &Arc<Records>,
    memory: &[u8],
) -> Suspending<'static, Device, Silent> {
    let begun =
        cache.begin_suspension(range_of(memory), records.links(), Vec::new(), terms(OnDrop::Kill));
    match begun.unwrap().poll().unwrap() {
        SuspendProgress::Pending(pending, _) => pending,
        SuspendProgress::Suspended(_) => panic!("a lease is alive"),
    }
}

/// The one that has not come about stands until its deadline if it leaks, and goes on in every other case.
#[test]
fn suspending() {
    row("suspensions::suspending", |how| {
        let (cache, records) = a_cache();
        let memory = memory(3 * PAGE);
        let lease = get(cache, memory).unwrap();
        end(pending(cache, &records, memory), how);
        assert_eq!(get(cache, memory).is_none(), how.leaks());
        assert_eq!(cache.expire_suspensions(), 0);
        records.pass(Duration::from_millis(20));
        assert_eq!(cache.expire_suspensions(), usize::from(how.leaks()));
        drop((lease, get(cache, memory).unwrap()));
        assert_eq!((records.stopped(), records.failed()), (0, 0), "connections go on");
    });
}

/// The one that has come about ends as its terms say; one that leaks, at its deadline in the open.
#[test]
fn suspended() {
    row("suspensions::suspended", |how| {
        for on_drop in [OnDrop::Kill, OnDrop::Resume] {
            let (cache, records) = a_cache();
            let memory = memory(3 * PAGE);
            let lease = get(cache, memory).unwrap();
            let connections = records.links();
            let suspended =
                cache.suspend(range_of(memory), connections, vec![lease], terms(on_drop));
            end(suspended.unwrap(), how);
            assert_eq!(records.stopped(), if how.leaks() { 2 } else { 0 });
            assert_eq!(get(cache, memory).is_none(), how.leaks());
            records.pass(Duration::from_millis(20));
            assert_eq!(cache.expire_suspensions(), usize::from(how.leaks()));
            drop(get(cache, memory).unwrap());
            let resumed = !how.leaks() && on_drop == OnDrop::Resume;
            assert_eq!((records.stopped(), records.failed()), (0, if resumed { 0 } else { 2 }));
            cache.evict_idle();
            assert_eq!(records.live(), 0);
        }
    });
}

/// What a program hears by is its own: the cache goes on whatever becomes of it.
#[test]
fn notices() {
    row("suspensions::notices", |how| {
        let (cache, records) = a_cache();
        end(cache.notices(1), how);
        let memory = memory(3 * PAGE);
        for _ in 0..3 {
            let lease = get(cache, memory).unwrap();
            let suspended =
                cache.suspend(range_of(memory), Vec::new(), vec![lease], terms(OnDrop::Kill));
            drop(suspended.unwrap().resume().unwrap());
        }
        cache.evict_idle();
        assert_eq!(records.live(), 0);
    });
}

/// Three leases of two registrations are suspended and resumed; another registration of the range goes.
fn suspend_and_resume(cache: &TheCache, records: &Arc<Records>, memory: &[u8]) {
    let parts = || [get(cache, &memory[..PAGE]), get(cache, &memory[4 * PAGE..5 * PAGE])];
    drop(get(cache, &memory[8 * PAGE..9 * PAGE]));
    let leases = parts().into_iter().chain([get(cache, &memory[..PAGE])]).flatten().collect();
    let connections = records.links();
    let suspended =
        cache.suspend(range_of(memory), connections, leases, terms(OnDrop::Kill)).unwrap();
    drop(suspended.resume().unwrap());
}

/// Nothing is stopped or suspended, whatever the device did, and the books balance. Leases that a panic has
/// kept from the program hold their registrations until the cache goes.
fn assert_whole(cache: TheCache, records: &Arc<Records>, memory: &[u8], n: usize) {
    assert_eq!(records.stopped(), 0, "call {n}: a connection is stopped for good");
    assert!(get(&cache, memory).is_some(), "call {n}");
    let counts = cache.suspension_statistics();
    let ended = counts.refused + counts.resumed + counts.killed + counts.expired;
    assert_eq!(counts.begun, ended, "call {n}: {counts:?}");
    suspend_and_resume(&cache, records, &vec![0_u8; 12 * PAGE]);
    drop(cache);
    assert_eq!(records.leaked(), 0, "call {n}");
}

#[test]
fn a_device_that_panics_at_any_call_holds_nothing_up() {
    let memory = vec![0_u8; 12 * PAGE];
    for n in 1.. {
        let (cache, records) = cache(Config::keeping_all());
        panics_at(&records, n);
        let panicked = panics(|| suspend_and_resume(&cache, &records, &memory));
        let was_asked = records.has_panicked();
        panics_at(&records, 0);
        assert!(was_asked || !panicked);
        assert_whole(cache, &records, &memory, n);
        if !was_asked {
            assert!(n > 15, "only {n} calls");
            break;
        }
    }
}

/// A device that panics gives no leases back, and its connections may go on with them.
#[test]
fn leases_that_were_handed_over_outlive_a_panic_or_their_connections_are_failed() {
    let memory = vec![0_u8; 12 * PAGE];
    let parts = [&memory[..PAGE], &memory[4 * PAGE..5 * PAGE]];
    for poll in [false, true] {
        for n in 1.. {
            let (cache, records) = cache(Config::keeping_all());
            let leases = parts.map(|part| get(&cache, part).unwrap()).into_iter().collect();
            let links = records.links();
            panics_at(&records, n);
            let panicked = panics(|| {
                let (range, terms) = (range_of(&memory), terms(OnDrop::Kill));
                let suspended = if poll {
                    let begun = cache.begin_suspension(range, links, leases, terms).unwrap();
                    match begun.poll().unwrap() {
                        SuspendProgress::Suspended(suspended) => suspended,
                        SuspendProgress::Pending(..) => panic!("nothing is in flight"),
                    }
                } else {
                    cache.suspend(range, links, leases, terms).unwrap()
                };
                suspended.resume().unwrap().leases.into_iter().for_each(std::mem::forget);
            });
            let was_asked = records.has_panicked();
            panics_at(&records, 0);
            cache.evict_idle();
            let kept = parts.iter().all(|&part| records.covers(range_of(part)));
            assert!(kept || records.failed() == 2, "call {n}");
            assert_eq!(records.stopped(), 0, "call {n}");
            drop(cache);
            assert_eq!(records.leaked(), 0, "call {n}");
            if !was_asked {
                assert!(!panicked && n > 20, "only {n} calls");
                break;
            }
        }
    }
}

/// As above, by way of what makes memory huge block by block; it gives up what is idle there first.
#[test]
fn leases_that_were_handed_over_in_steps_outlive_a_panic_or_their_connections_are_failed() {
    for n in 1.. {
        let memory = blocks(1);
        let part = &memory[..PAGE];
        let (cache, records) = cache(Config::keeping_all());
        let leases = vec![get(&cache, part).unwrap()];
        drop(get(&cache, &memory[8 * PAGE..9 * PAGE]));
        let links = records.links();
        panics_at(&records, n);
        let panicked = panics(|| {
            let (range, terms) = (range_of(memory), terms(OnDrop::Kill));
            let way = pinfold::rearrange::HugePageWay::IN_PLACE;
            let done =
                pinfold::rearrange::defragment_in_steps(&cache, range, &links, leases, terms, way);
            done.unwrap().leases.into_iter().for_each(std::mem::forget);
        });
        let was_asked = records.has_panicked();
        panics_at(&records, 0);
        cache.evict_idle();
        assert!(records.covers(range_of(part)) || records.failed() == 2, "call {n}");
        drop(cache);
        assert_eq!(records.leaked(), 0, "call {n}");
        if !was_asked {
            assert!(!panicked && n > 1, "only {n} calls");
            break;
        }
    }
}

/// Moved, trimmed and made huge while it is suspended; whatever of that the kernel cannot do is left.
fn suspend_and_rearrange(cache: &TheCache, records: &Arc<Records>, memory: &[u8]) {
    let lease = get(cache, &memory[..PAGE]).unwrap();
    drop(get(cache, &memory[4 * PAGE..5 * PAGE]));
    let (range, links) = (range_of(memory), records.links());
    let suspended = cache.suspend(range, links, vec![lease], terms(OnDrop::Kill)).unwrap();
    let trimmed = trim_zeros(&suspended, memory).unwrap();
    assert!(trimmed.given_up > 0 && trimmed.held.len() == 1);
    let _moved = migrate(&suspended, Node(0)).map(drop);
    let _made = defragment(&suspended, HugePageWay::IN_PLACE).map(drop);
    drop(suspended.resume().unwrap());
}

#[test]
fn a_device_that_panics_at_any_call_holds_up_nothing_that_is_rearranged() {
    let memory = vec![0_u8; 12 * PAGE];
    for n in 1.. {
        let (cache, records) = cache(Config::keeping_all());
        panics_at(&records, n);
        let panicked = panics(|| suspend_and_rearrange(&cache, &records, &memory));
        let was_asked = records.has_panicked();
        panics_at(&records, 0);
        assert!(was_asked || !panicked);
        assert_whole(cache, &records, &memory, n);
        if !was_asked {
            assert!(n > 15, "only {n} calls");
            break;
        }
    }
}

/// Every way in which suspensions release their connections.
fn every_way(cache: &TheCache, records: &Arc<Records>, memory: &[u8]) {
    suspend_and_resume(cache, records, memory);
    let suspend = |first: usize| {
        let range = range_of(&memory[first * PAGE..][..PAGE]);
        cache.suspend(range, records.links(), Vec::new(), terms(OnDrop::Kill)).unwrap()
    };
    // With connections that another suspension holds.
    let held = suspend(1);
    drop(suspend(3).resume());
    drop(suspend(5));
    std::mem::forget(held);
    let lease = get(cache, &memory[8 * PAGE..9 * PAGE]);
    let range = range_of(&memory[8 * PAGE..9 * PAGE]);
    let pending =
        cache.begin_suspension(range, records.links(), Vec::new(), terms(OnDrop::Kill)).unwrap();
    std::mem::forget(pending);
    records.pass(Duration::from_millis(20));
    cache.expire_suspensions();
    drop(lease);
}

/// What belongs to the device is copied and dropped with no lock held: it may use the cache.
#[test]
fn connections_that_use_the_cache_are_called_outside_its_lock() {
    let memory = vec![0_u8; 12 * PAGE];
    let (cache, records) = a_cache();
    let asked = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&asked);
    records.besides(move || {
        assert_eq!(cache.statistics().overflows, 0);
        counts.fetch_add(1, SeqCst);
    });
    every_way(cache, &records, &memory);
    assert!(asked.load(SeqCst) > 20);
    assert_eq!(records.stopped(), 0);
}

#[test]
fn a_connection_that_panics_at_any_copy_or_drop_holds_nothing_up() {
    let memory = vec![0_u8; 12 * PAGE];
    for n in 1.. {
        let (cache, records) = cache(Config::keeping_all());
        panics_at(&records, n);
        let _panicked = panics(|| every_way(&cache, &records, &memory));
        let was_asked = records.has_panicked();
        panics_at(&records, 0);
        records.pass(Duration::from_millis(20));
        cache.expire_suspensions();
        assert_whole(cache, &records, &memory, n);
        if !was_asked {
            assert!(n > 60, "only {n} calls");
            break;
        }
    }
}

/// As above, and every connection that is dropped from then on panics, be it because of a panic.
#[test]
fn connections_that_all_panic_as_they_are_dropped_hold_nothing_up() {
    let name = "suspensions::connections_that_all_panic_as_they_are_dropped_hold_nothing_up";
    let status = in_a_process_of_its_own(name, || {
        let memory = vec![0_u8; 12 * PAGE];
        for n in 1.. {
            let (device, records) = device_with_loud_connections();
            let cache = cache_of(device, Config::keeping_all());
            panics_at(&records, n);
            let _panicked = panics(|| every_way(&cache, &records, &memory));
            records.pass(Duration::from_millis(20));
            let _panicked = panics(|| {
                cache.expire_suspensions();
            });
            let was_asked = records.has_panicked();
            panics_at(&records, 0);
            cache.expire_suspensions();
            assert_whole(cache, &records, &memory, n);
            if !was_asked {
                assert!(n > 40, "only {n} calls");
                break;
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// As above, by way of what makes memory huge block by block; each connection is lost with the first of two blocks.
#[test]
fn connections_that_all_panic_as_they_are_dropped_hold_up_no_steps() {
    let name = "suspensions::connections_that_all_panic_as_they_are_dropped_hold_up_no_steps";
    let status = in_a_process_of_its_own(name, || {
        for n in 1.. {
            let memory = blocks(2);
            let (device, records) = device_with_loud_connections();
            let cache = cache_of(device, Config::keeping_all());
            let links = records.links();
            records.loses_connections();
            panics_at(&records, n);
            let panicked = panics(|| {
                let done = in_steps(&cache, memory, &links);
                done.unwrap().lost.into_iter().for_each(std::mem::forget);
            });
            let was_asked = records.has_panicked();
            panics_at(&records, 0);
            assert_eq!(records.stopped(), 0, "call {n}");
            drop(cache);
            assert_eq!(records.leaked(), 0, "call {n}");
            if !was_asked {
                assert!(!panicked && n > 1, "only {n} calls");
                break;
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Those that are failed while a block is made huge, at any moment, are named; they are the program's to drop.
#[test]
fn connections_of_a_step_that_is_overdue_may_all_panic_as_they_are_dropped() {
    let name =
        "suspensions::connections_of_a_step_that_is_overdue_may_all_panic_as_they_are_dropped";
    let status = in_a_process_of_its_own(name, || {
        let mut expired = 0;
        for n in 1.. {
            let memory = blocks(1);
            let (device, records) = device_with_loud_connections();
            let cache: &TheCache = Box::leak(Box::new(cache_of(device, Config::keeping_all())));
            let (asked, theirs) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&records));
            let counts = Arc::clone(&asked);
            cache.monitor().besides_forked(move || {
                if theirs.stopped() == 2 && counts.fetch_add(1, SeqCst) + 1 == n {
                    theirs.pass(Duration::from_millis(20));
                    if cache.expire_suspensions() == 1 {
                        panics_at(&theirs, 1);
                    }
                }
            });
            let links = records.links();
            let _panicked = panics(|| {
                let Err(stopped) = in_steps(cache, memory, &links) else { return };
                let Stopped { why, done } = *stopped;
                let is_expired = why == StoppedBy::Rearrange(RearrangeError::Expired);
                let mut failed = done.failed;
                if let StoppedBy::NotSuspended { why: Why::Refused(refused), .. } = why {
                    failed.extend(refused.failed);
                }
                let named = failed.len();
                failed.into_iter().for_each(std::mem::forget);
                assert!(!is_expired || named == 2, "{named} were named");
                expired += usize::from(is_expired);
            });
            panics_at(&records, 0);
            assert_eq!(records.stopped(), 0, "question {n}");
            if asked.load(SeqCst) < n {
                break;
            }
        }
        assert!(expired > 2, "only {expired}");
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Several devices copy what is each one's own for it.
#[test]
fn connections_of_several_devices_may_all_panic_as_they_are_dropped() {
    let name = "suspensions::connections_of_several_devices_may_all_panic_as_they_are_dropped";
    let status = in_a_process_of_its_own(name, || {
        let memory = memory(PAGE);
        for n in 1.. {
            let (device, records) = device_with_loud_connections();
            let seconds = records.links().into_iter().map(OfEither::Second);
            let pair: Vec<_> =
                records.links().into_iter().map(OfEither::First).chain(seconds).collect();
            let devices = (device, device_of(&records));
            panics_at(&records, n);
            let _panicked = panics(|| devices.can_suspend(range_of(memory), &pair).unwrap());
            let was_asked = records.has_panicked();
            panics_at(&records, 0);
            if !was_asked {
                assert!(n > 8, "only {n} calls");
                break;
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

const HUGE: usize = 2 << 20;

/// So many blocks of small pages: each is a huge page when a test has been through it, so none has it again.
fn blocks(count: usize) -> &'static [u8] {
    let memory = memory((count + 1) * HUGE);
    let first = memory.as_ptr().align_offset(HUGE);
    &memory[first..first + count * HUGE]
}

fn in_steps<'c>(
    cache: &'c TheCache,
    memory: &[u8],
    links: &[Link],
) -> Result<Stepped<'c, Device, Silent>, Box<Stopped<'c, Device, Silent>>> {
    let (range, terms) = (range_of(memory), terms(OnDrop::Kill));
    defragment_in_steps(cache, range, links, Vec::new(), terms, HugePageWay::IN_PLACE)
}

#[test]
fn a_monitor_that_panics_at_any_question_holds_nothing_up() {
    panics_at_any_question(every_way);
    panics_at_any_question(suspend_and_rearrange);
}

fn panics_at_any_question(work: impl Fn(&TheCache, &Arc<Records>, &[u8])) {
    let memory = vec![0_u8; 12 * PAGE];
    for n in 1.. {
        let (cache, records) = cache(Config::keeping_all());
        let (asked, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counts, over) = (Arc::clone(&asked), Arc::clone(&ended));
        cache.monitor().besides(move |question| {
            let is_on = over.load(SeqCst) == 0 && !std::thread::panicking();
            let number = if is_on { counts.fetch_add(1, SeqCst) + 1 } else { 0 };
            assert!(number != n, "{question}");
        });
        let _panicked = panics(|| work(&cache, &records, &memory));
        ended.store(1, SeqCst);
        records.pass(Duration::from_millis(20));
        cache.expire_suspensions();
        assert_whole(cache, &records, &memory, n);
        if asked.load(SeqCst) < n {
            assert!(n > 10, "only {n} questions");
            break;
        }
    }
}
