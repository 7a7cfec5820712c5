//! Pools: what is out when a pool goes, and panics of its registrar and its budget.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give buffers back by their addresses and to say that no device uses
//! them: none does.

#![allow(unsafe_code)]

use crate::device::{Device, RAN, Records, device, in_a_process_of_its_own, panics_at};
use crate::ways::{child_does, panics};
use pinfold::budget::{Budget, Terms};
use pinfold::pool::{
    AllocateError, Allowance, Denied, Pool, PoolBuffer, PoolConfig, PoolStatistics, WhenExhausted,
    deallocate,
};
use pinfold_core::Amount;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::thread;

const MIB: usize = 1 << 20;
/// Longer than what threads cache.
const UNCACHED: usize = 5 * MIB;

fn config() -> PoolConfig {
    PoolConfig { max_bytes: 8 * MIB, ..PoolConfig::default() }
}

fn pool() -> (Pool<Device>, Arc<Records>) {
    let (device, records) = device();
    (Pool::new(device, config()).unwrap(), records)
}

/// An address, to be handed to another thread.
fn address(block: NonNull<u8>) -> usize {
    block.as_ptr().expose_provenance()
}

fn block(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap()
}

/// The ways for a buffer to be out when its pool goes, for good or not.
type Way = fn(PoolBuffer<'_, Device>) -> Option<NonNull<u8>>;
const WAYS: [(&str, Way); 4] = [
    ("by its address", |buffer| Some(buffer.into_raw())),
    ("in flight, forgotten as a word", |buffer| {
        let _word = buffer.in_flight().into_user_data();
        None
    }),
    ("in flight, dropped", |buffer| {
        drop(buffer.in_flight());
        None
    }),
    ("forgotten", |buffer| {
        std::mem::forget(buffer);
        None
    }),
];

#[test]
fn what_is_out_keeps_its_slab_and_the_last_one_back_takes_the_registrar_along() {
    for (how, way) in WAYS {
        for length in [1500, 2 * MIB] {
            let budget = Budget::new(Amount { bytes: 64 * MIB, regions: 64 }).unwrap();
            let share = budget.share(Terms::default()).unwrap();
            let (device, records) = device();
            let pool = Pool::with_allowance(device, config(), share).unwrap();
            drop(pool.get(5 * MIB).unwrap());
            let mut buffer = pool.get(length).unwrap();
            let start = address(NonNull::from(&mut buffer[0]));
            let out = way(buffer);
            drop(pool);
            // What the device may still use is leaked, and nothing else.
            assert_eq!((records.is_gone(), records.live()), (false, 1), "{how}");
            assert_eq!(budget.held().regions, 1, "{how}");
            // SAFETY: the memory is out, and this test's alone.
            unsafe { block(start).as_ptr().write_bytes(7, length) };
            let Some(raw) = out else { continue };
            // SAFETY: given back once.
            unsafe { deallocate(raw) }.unwrap();
            assert_eq!((records.is_gone(), records.live()), (true, 0), "{how}");
            assert_eq!(budget.held(), Amount::ZERO, "{how}");
            // SAFETY: its slab is gone.
            assert!(unsafe { deallocate(raw) }.is_err(), "{how}");
        }
    }
}

/// Says that it is being settled, and is not done before it is told to.
#[derive(Debug)]
struct Slow {
    inside: Arc<AtomicBool>,
    go_on: Arc<AtomicBool>,
    value: Vec<u64>,
}

impl Allowance for Slow {
    fn grant(&self, _: usize) -> Result<(), Denied> {
        Ok(())
    }

    fn give_back(&self, _: usize) {}

    fn settle(&self) {
        self.inside.store(true, SeqCst);
        while !self.go_on.load(SeqCst) {
            thread::yield_now();
        }
        assert_eq!(self.value, [0x600d; 64], "used after it was dropped");
    }
}

#[test]
fn what_a_late_buffer_calls_outlives_the_pool() {
    let (inside, go_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let slow = Slow { inside: inside.clone(), go_on: go_on.clone(), value: vec![0x600d; 64] };
    let (device, _records) = device();
    let config = PoolConfig { idle_bytes: 0, thread_cache_bytes: 0, ..config() };
    let pool = Pool::with_allowance(device, config, Arc::new(slow)).unwrap();
    let out = address(pool.allocate(65536, 64).unwrap());
    // SAFETY: given back once.
    let late = thread::spawn(move || unsafe { deallocate(block(out)) }.unwrap());
    while !inside.load(SeqCst) {
        thread::yield_now();
    }
    drop(pool);
    go_on.store(true, SeqCst);
    late.join().unwrap();
}

#[test]
fn buffers_come_back_on_other_threads_while_their_pool_goes() {
    const THREADS: usize = 3;
    for round in 0..200 {
        let (pool, records) = pool();
        let (pool, begin) = (Arc::new(pool), Arc::new(Barrier::new(THREADS + 1)));
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (pool, begin) = (Arc::clone(&pool), Arc::clone(&begin));
                thread::spawn(move || {
                    let take = |length| address(pool.allocate(length, 64).unwrap());
                    let mine = [64, 1500, 64, 65536].map(take);
                    // In half of the rounds it takes the slow way first.
                    if round % 2 == 0 {
                        drop([64, 1500].map(|length| pool.get(length).unwrap()));
                    }
                    drop(pool);
                    begin.wait();
                    for each in mine {
                        // SAFETY: given back once, by this thread.
                        unsafe { deallocate(block(each)) }.unwrap();
                    }
                })
            })
            .collect();
        begin.wait();
        drop(pool);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(records.is_gone() && records.live() == 0);
    }
}

/// Panics at its `n`th call, of whatever kind.
#[derive(Debug, Default)]
struct Panicking {
    calls: AtomicUsize,
    panic_at: AtomicUsize,
    granted: AtomicUsize,
}

impl Panicking {
    fn count(&self, what: &str) {
        assert!(self.calls.fetch_add(1, SeqCst) + 1 != self.panic_at.load(SeqCst), "{what}");
    }
}

impl Allowance for Panicking {
    fn grant(&self, bytes: usize) -> Result<(), Denied> {
        self.count("grant");
        self.granted.fetch_add(bytes, SeqCst);
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.granted.fetch_sub(bytes, SeqCst);
        self.count("give_back");
    }

    fn settle(&self) {
        self.count("settle");
    }
}

/// Everything that a pool does, each step although the one before may have panicked.
fn use_all(pool: &Pool<Device>) -> usize {
    let steps: [&dyn Fn(); 5] = [
        &|| drop(pool.get(1500)),
        &|| drop([pool.get(2 * MIB), pool.get(3 * MIB), pool.get(1500)]),
        &|| drop(pool.request(9 * MIB).when_exhausted(WhenExhausted::Grow).get()),
        &|| assert!(pool.trim(0) <= 8 * MIB),
        &|| {
            let raw = pool.allocate(100, 64).map(address).ok();
            // SAFETY: given back once.
            raw.into_iter().for_each(|raw| unsafe { deallocate(block(raw)) }.unwrap());
        },
    ];
    steps.into_iter().filter(|step| panics(step)).count()
}

#[test]
fn a_registrar_or_a_budget_that_panics_at_any_call_leaves_the_pool_whole() {
    let (mut registrars, mut budgets) = (true, true);
    for n in 1.. {
        for of_registrar in [true, false] {
            if !(if of_registrar { registrars } else { budgets }) {
                continue;
            }
            let (device, records) = device();
            let allowance = Arc::new(Panicking::default());
            let theirs = Arc::clone(&allowance);
            let pool = Pool::with_allowance(device, config(), theirs).unwrap();
            if of_registrar {
                panics_at(&records, n);
            } else {
                allowance.panic_at.store(n, SeqCst);
            }
            let panicked = use_all(&pool);
            // It goes on as one whose registrar and budget never panicked.
            panics_at(&records, 0);
            allowance.panic_at.store(0, SeqCst);
            assert_eq!(use_all(&pool), 0, "call {n}");
            assert_eq!(pool.statistics().in_use_bytes, 0, "call {n}");
            drop(pool);
            assert_eq!(allowance.granted.load(SeqCst), 0, "call {n}");
            assert_eq!(records.leaked(), 0, "call {n}");
            if panicked == 0 {
                *(if of_registrar { &mut registrars } else { &mut budgets }) = false;
            }
        }
        if !registrars && !budgets {
            break;
        }
    }
}

#[test]
fn a_pool_whose_registrar_panics_as_it_goes_is_gone() {
    for n in 1..4 {
        for unwinding in [false, true] {
            let (device, records) = device();
            let pool = Pool::new(device, config()).unwrap();
            drop([pool.get(3 * MIB).unwrap(), pool.get(2 * MIB).unwrap(), pool.get(1500).unwrap()]);
            panics_at(&records, n);
            let panicked = panics(|| {
                let _dropped = pool;
                assert!(!unwinding, "unwinds");
            });
            assert_eq!(panicked, unwinding || records.has_panicked());
            assert!(records.is_gone());
            assert_eq!(records.leaked(), 0);
        }
    }
}

/// What a thread has cached goes back in a destructor that no panic may leave.
#[test]
fn a_thread_ends_although_what_it_gives_back_makes_others_panic() {
    let name = "pools::a_thread_ends_although_what_it_gives_back_makes_others_panic";
    let status = in_a_process_of_its_own(name, || {
        for of_registrar in [true, false] {
            let (device, records) = device();
            let allowance = Arc::new(Panicking::default());
            let config = PoolConfig { idle_bytes: 0, ..config() };
            let theirs = Arc::clone(&allowance);
            let pool = Pool::with_allowance(device, config, theirs).unwrap();
            let ended = thread::scope(|scope| {
                scope
                    .spawn(|| {
                        drop(pool.get(1500).unwrap());
                        // The first call from now on is that of the thread's end.
                        if of_registrar {
                            panics_at(&records, 1);
                        } else {
                            allowance.calls.store(0, SeqCst);
                            allowance.panic_at.store(1, SeqCst);
                        }
                    })
                    .join()
            });
            assert!(ended.is_ok());
            allowance.panic_at.store(0, SeqCst);
            panics_at(&records, 0);
            assert_eq!(pool.statistics().panics_kept_back, 1);
            assert_eq!(pool.statistics().registered_bytes, 0);
            drop(pool.get(1500).unwrap());
            drop(pool);
            assert_eq!(allowance.granted.load(SeqCst), 0);
            assert_eq!(records.leaked(), 0);
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// A child that was forked while another thread had the pool's lock is refused, and what it drops is its
/// parent's.
#[test]
fn a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent() {
    let name = "pools::a_forked_child_is_refused_and_waits_for_no_thread_of_its_parent";
    let status = in_a_process_of_its_own(name, || {
        let ended = Arc::new(AtomicBool::new(false));
        let (pool, records) = pool();
        thread::scope(|scope| {
            for _ in 0..2 {
                // Through the pool's lock each time.
                scope.spawn(|| {
                    while !ended.load(SeqCst) {
                        drop(pool.request(UNCACHED).get());
                    }
                });
            }
            for _ in 0..100 {
                let (buffer, flight) = (pool.get(1500).unwrap(), pool.get(1500).unwrap());
                let raw = address(pool.allocate(100, 64).unwrap());
                let (buffer, flight, _) =
                    child_does((buffer, flight, &pool), |(buffer, flight, pool)| {
                        let refused = |error| matches!(error, Err(AllocateError::Forked));
                        assert!(refused(pool.get(1500).map(drop)));
                        assert!(refused(pool.request(UNCACHED).get().map(drop)));
                        assert!(refused(pool.allocate(100, 64).map(|_| ())));
                        drop((buffer, flight.in_flight()));
                        // SAFETY: given back once in this process.
                        unsafe { deallocate(block(raw)) }.unwrap();
                        assert_eq!(
                            (pool.trim(0), pool.statistics()),
                            (0, PoolStatistics::default())
                        );
                    });
                // SAFETY: given back once.
                unsafe { deallocate(block(raw)) }.unwrap();
                // SAFETY: no device knows of it.
                drop((buffer, unsafe { flight.in_flight().complete() }));
            }
            ended.store(true, SeqCst);
        });
        assert_eq!(pool.statistics().in_use_bytes, 0);
        let _pool = child_does(pool, drop);
        assert!(records.live() > 0, "the child ended nothing");
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}
