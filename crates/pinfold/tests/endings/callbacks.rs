//! Callbacks and registrars of the program's that panic unexpectedly.

use crate::device::{
    Device, LoudEnd, PAGE, RAN, Records, Silent, TheCache, Undecided, cache, device,
    in_a_process_of_its_own, lease, lease_once, panics_at,
};
use crate::pools::{Forking, ForkingDevice};
use crate::ways::{child_does, panics};
use pinfold::budget::{Amount, Budget, Reserve, Watermark};
use pinfold::monitor::Follower;
use pinfold::{AddressRange, Cache, Config};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::{io, mem, thread};

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("captured");
    }
}

#[test]
fn a_callback_whose_captures_panic_keeps_no_lease() {
    let (cache, records) = cache(Config::keeping_all());
    let buffer = vec![1_u8; 65536];
    for once in [false, true] {
        let lease = if once { lease_once(&cache, &buffer) } else { lease(&cache, &buffer) };
        let (mut lease, bomb) = (lease.unwrap(), Bomb);
        lease.on_invalidate(move || std::mem::forget(bomb));
        drop(lease);
        cache.evict_idle();
        assert_eq!(records.live(), 0, "once: {once}");
    }
}

#[test]
fn of_several_devices_none_keeps_what_another_panicked_over() {
    for n in 1..5 {
        let ((first, one), (second, two), (third, three)) = (device(), device(), device());
        panics_at(&two, n);
        let devices = (first, (second, third));
        let cache = pinfold::cache(devices, Silent::new(), Config::keeping_all()).unwrap();
        for _ in 0..3 {
            let _panicked = panics(|| drop(cache.lease_buffer(vec![0_u8; 9000])));
            let _panicked = panics(|| assert!(cache.evict_idle() < usize::MAX));
        }
        let _panicked = panics(|| drop(cache));
        assert_eq!([one.leaked(), two.leaked(), three.leaked()], [0; 3], "call {n}");
    }
}

/// Asked before there is a cache or a follower that they are a part of, a registrar and a monitor panic, and as they end.
#[test]
fn what_a_cache_or_a_follower_is_made_of_may_panic_before_it_is_made() {
    let name = "callbacks::what_a_cache_or_a_follower_is_made_of_may_panic_before_it_is_made";
    let status = in_a_process_of_its_own(name, || {
        let ended = Arc::new(AtomicUsize::new(0));
        let end = || LoudEnd(Arc::clone(&ended));
        let registrar = Undecided(device().0, Arc::new(AtomicBool::new(true)), end());
        let monitor = Silent::that_ends(end());
        assert!(panics(|| drop(pinfold::cache(registrar, monitor, Config::keeping_all()))));
        assert_eq!(ended.load(SeqCst), 2);
        let monitor = Silent::that_ends(end());
        monitor.besides(|question| panic!("{question}"));
        assert!(panics(|| drop(Follower::new(monitor))));
        assert_eq!(ended.load(SeqCst), 3);
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

fn cache_without_a_reclaimer(device: Device) -> TheCache {
    Cache::new(device, Silent::new(), Config::keeping_all()).unwrap()
}

/// Another cache's reclaimer runs to its end.
fn run_another_reclaimer() {
    let mut other = cache_without_a_reclaimer(device().0);
    let mut reclaimer = None;
    let refused = other.start_reclaimer(|made| {
        reclaimer = Some(made);
        Err(io::Error::other("no thread"))
    });
    assert!(refused.is_err());
    drop(other);
    reclaimer.unwrap().run();
}

/// On the thread of its cache's reclaimer, which runs another one's in between.
#[test]
fn a_callback_that_runs_another_reclaimer_may_drop_the_last_handle_of_its_cache() {
    let (device, records) = device();
    let mut cache = cache_without_a_reclaimer(device);
    let (over, is_over) = mpsc::channel();
    let started = cache.start_reclaimer(|reclaimer| {
        Ok(thread::spawn(move || {
            reclaimer.run();
            over.send(()).unwrap();
        }))
    });
    started.unwrap();
    let (cache, buffer) = (Arc::new(cache), vec![1_u8; PAGE]);
    let mut lease = lease(&cache, &buffer).unwrap();
    let (hand_over, last) = mpsc::channel::<Arc<TheCache>>();
    lease.on_invalidate(move || {
        run_another_reclaimer();
        drop(last.recv().unwrap());
    });
    let range = lease.range();
    mem::forget(lease);
    cache.monitor().change(range);
    hand_over.send(cache).unwrap();
    is_over.recv().unwrap();
    assert_eq!((records.live(), records.is_gone()), (0, true));
}

/// The thread that a cache was told runs its reclaimer drops it, and does not wait for itself.
#[test]
fn a_cache_ends_on_the_thread_that_it_would_wait_for() {
    let (device, records) = device();
    let mut cache = cache_without_a_reclaimer(device);
    let ((hand_over, last), (over, is_over)) = (mpsc::channel::<TheCache>(), mpsc::channel());
    let mut reclaimer = None;
    let started = cache.start_reclaimer(|made| {
        reclaimer = Some(made);
        Ok(thread::spawn(move || {
            let cache = last.recv().unwrap();
            over.send(panics(|| drop(cache))).unwrap();
        }))
    });
    started.unwrap();
    drop(cache.lease_buffer(vec![1_u8; PAGE]));
    hand_over.send(cache).unwrap();
    assert!(!is_over.recv().unwrap(), "it panicked");
    assert_eq!(records.live(), 0);
    drop(reclaimer);
    assert!(records.is_gone());
}

/// A forked child has its copy of what listens to a budget, and ends it.
#[test]
#[cfg_attr(miri, ignore = "forks")]
fn listeners_whose_captures_panic_end_in_a_forked_child() {
    let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
    let ended = Arc::new(AtomicUsize::new(0));
    let watch = || {
        let end = LoudEnd(Arc::clone(&ended));
        budget.watch(Watermark::Regions(1), move |_| _ = &end)
    };
    let watches = [watch(), watch()];
    drop(child_does((budget, watches), |(budget, watches)| {
        drop((budget, watches));
        assert_eq!(ended.load(SeqCst), 2);
    }));
    assert_eq!(ended.load(SeqCst), 2);
}

/// Whatever was called as it forked: the device is the parent's, and not called again.
#[test]
fn a_child_forked_inside_a_monitor_or_a_callback_calls_no_device() {
    for n in 1.. {
        let (forks, (device, records)) = (Forking::at(n), device());
        let panicked = panics(|| use_beside(&forks, device, &records));
        let has_forked = forks.is_left_alone(records.has_panicked());
        assert!(!panicked);
        if !has_forked {
            assert!(n > 15, "{n} calls");
            break;
        }
    }
}

/// The same of what is registered and deregistered one after the other.
#[test]
fn a_child_forked_inside_a_reservations_device_calls_it_no_more() {
    for n in 1.. {
        let (forks, (device, records)) = (Forking::at(n), device());
        let device = Arc::new(ForkingDevice(device, Arc::clone(&forks)));
        let budget = Budget::new(Amount { bytes: 1 << 20, regions: 16 }).unwrap();
        drop(budget.reserve(&device, Reserve::pages(4)));
        if !forks.is_left_alone(forks.is_called_since()) {
            assert_eq!((n, records.live()), (9, 0));
            break;
        }
    }
}

/// Misses, a hit, a change and an eviction, with calls that may fork; a child's device panics as it is called.
fn use_beside(forks: &Arc<Forking>, device: Device, records: &Arc<Records>) {
    let (forks, records) = (Arc::clone(forks), Arc::clone(records));
    let call = Arc::new(move || {
        forks.count();
        if forks.child.load(SeqCst) == 0 && !forks.is_called_since() {
            panics_at(&records, 1);
        }
    });
    let (monitor, asks) = (Silent::new(), Arc::clone(&call));
    monitor.besides(move |_| asks());
    let cache = Cache::new(device, monitor, Config::keeping_all()).unwrap();
    let buffer = vec![1_u8; 3 * PAGE];
    let get = |at: usize| lease(&cache, &buffer[at..at + PAGE / 2]);
    if let Ok(mut lease) = get(0) {
        lease.on_invalidate(move || call());
        cache.monitor().change(AddressRange::new(buffer.as_ptr().addr(), PAGE).unwrap());
        drop((get(2 * PAGE), get(0), get(2 * PAGE)));
    }
    cache.reclaim();
    cache.evict_idle();
}
