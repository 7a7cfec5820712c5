//! What a registered buffer of a pool costs, compared with an allocator's memory,
//! which is not registered: on one thread, on two, and from one thread to another.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give back, on one thread, addresses that were taken on another.

#![allow(unsafe_code)]

use super::scaling::multiple;
use crate::Options;
use crate::machine;
use crate::null::NullDevice;
use crate::peer::{self, Allocator, LibC, MiMalloc, one_by_one, turn_over};
use crate::report::Report;
use crate::rounds::{Comparison, Turn, compare, nanoseconds_each};
use pinfold::pool::{AllocateError, Pool, PoolBuffer, PoolConfig};
use serde_json::json;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// The lengths of the buffers.
const LENGTHS: [usize; 4] = [64, 4 << 10, 64 << 10, 1 << 20];
/// Buffers in a round.
const BUFFERS: usize = 200_000;
/// Buffers that go from one thread to the other in a round.
const HANDED: usize = 20_000;
/// How many are out at a time where several are.
const HELD: usize = 16;
/// How long each measurement of two threads lasts.
const WINDOW: Duration = Duration::from_millis(3);
/// How many buffers are on their way from one thread to the other at most.
const QUEUE: usize = 256;

type NullPool = Pool<NullDevice>;

/// Every length compared with either allocator.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    for length in LENGTHS {
        let pool = pool()?;
        one_thread::<LibC>(options, report, &pool, length)?;
        if peer::PRESENT {
            one_thread::<MiMalloc>(options, report, &pool, length)?;
        }
    }
    match *machine::processors()? {
        [first, second, ..] => two_threads(options, report, [first, second]),
        _ => {
            report.remark("skipped: pools on two threads: one processor only");
            Ok(())
        }
    }
}

fn pool() -> Result<NullPool, String> {
    let config = PoolConfig { max_bytes: 1 << 30, ..PoolConfig::default() };
    Pool::new(NullDevice::default(), config).map_err(|error| error.to_string())
}

#[allow(clippy::needless_pass_by_value)] // what `map_err` hands over
fn words(error: AllocateError) -> String {
    error.to_string()
}

fn one_thread<A: Allocator>(
    options: Options,
    report: &mut Report,
    pool: &NullPool,
    length: usize,
) -> Result<(), String> {
    let count = options.scaled(BUFFERS);
    let comparison = compare(
        options.rounds,
        &mut |_| nanoseconds_each(count, || take_and_put(pool, count, length)),
        Some(&mut |_| nanoseconds_each(count, || one_by_one::<A>(count, length))),
    )?;
    report.add_against(A::NAME, "pool", json!({"bytes": length}), "ns", comparison);
    let comparison = compare(
        options.rounds,
        &mut |_| nanoseconds_each(count, || hold(pool, count, length)),
        Some(&mut |_| nanoseconds_each(count, || turn_over::<A>(count, length, HELD))),
    )?;
    let params = json!({"bytes": length, "held": HELD});
    report.add_against(A::NAME, "pool holding", params, "ns", comparison);
    Ok(())
}

/// get, a look at the handle, put.
fn take_and_put(pool: &NullPool, count: usize, length: usize) -> Result<(), String> {
    for _ in 0..count {
        use_once(&pool.get(length).map_err(words)?);
    }
    Ok(())
}

#[inline(always)]
fn use_once(buffer: &PoolBuffer<'_, NullDevice>) {
    black_box((buffer.as_ptr(), buffer.handle()));
}

/// The same, [`HELD`] buffers being out at a time.
fn hold(pool: &NullPool, count: usize, length: usize) -> Result<(), String> {
    let mut ring: Vec<Option<PoolBuffer<'_, NullDevice>>> = (0..HELD).map(|_| None).collect();
    for place in (0..HELD).cycle().take(count) {
        ring[place] = None;
        let buffer = pool.get(length).map_err(words)?;
        use_once(&buffer);
        ring[place] = Some(buffer);
    }
    Ok(())
}

fn two_threads(
    options: Options,
    report: &mut Report,
    processors: [usize; 2],
) -> Result<(), String> {
    for length in LENGTHS {
        scaling(options, report, processors, length)?;
        handed_over::<LibC>(options, report, processors, length)?;
        if peer::PRESENT {
            handed_over::<MiMalloc>(options, report, processors, length)?;
        }
    }
    Ok(())
}

/// Two threads on one pool as a multiple of one, compared with two threads on the C library's or
/// mimalloc's heaps.
fn scaling(
    options: Options,
    report: &mut Report,
    processors: [usize; 2],
    length: usize,
) -> Result<(), String> {
    let pool = pool()?;
    let order = vec![0; 10_000];
    let stations = processors.map(|processor| (processor, &order[..]));
    let window = options.window(WINDOW);
    let ours = |some: &[u64]| take_and_put(&pool, some.len(), length);
    let theirs = |some: &[u64]| one_by_one::<MiMalloc>(some.len(), length);
    let mut our_turn = |_| multiple(&stations, window, &ours);
    let mut their_turn = |_| multiple(&stations, window, &theirs);
    let peer = peer::PRESENT.then_some(&mut their_turn as &mut Turn<'_>);
    let comparison = compare(options.rounds, &mut our_turn, peer)?;
    let params = json!({
        "threads": 2, "bytes": length, "one_core": machine::share_a_core(processors[0], processors[1]),
    });
    report.add_against(MiMalloc::NAME, "pool scaling", params, "x", comparison);
    Ok(())
}

/// One thread takes, the other puts back.
fn handed_over<A: Allocator>(
    options: Options,
    report: &mut Report,
    processors: [usize; 2],
    length: usize,
) -> Result<(), String> {
    let pool = pool()?;
    let count = options.scaled(HANDED);
    let take = || pool.allocate(length, 1).map(|block| block.as_ptr()).map_err(words);
    let ours = |_| relay(processors, count, &take, &put_back);
    let theirs = |_| relay(processors, count, &|| some::<A>(length), &free::<A>);
    let comparison: Comparison = compare(options.rounds, &mut { ours }, Some(&mut { theirs }))?;
    report.add_against(A::NAME, "pool handed over", json!({"bytes": length}), "ns", comparison);
    Ok(())
}

fn some<A: Allocator>(length: usize) -> Result<*mut u8, String> {
    let address = A::allocate(length);
    if address.is_null() { Err(format!("{} has no memory", A::NAME)) } else { Ok(address) }
}

fn free<A: Allocator>(address: *mut u8) {
    // SAFETY: the relay hands on what `some` gave, once.
    unsafe { A::free(address) };
}

fn put_back(address: *mut u8) {
    if let Some(block) = std::ptr::NonNull::new(address) {
        // SAFETY: the relay hands on what the pool gave, once. What is no pool's is left alone.
        let _ = unsafe { pinfold::pool::deallocate(block) };
    }
}

/// The time for each of `count` addresses that go from one processor to the other through a queue
/// of words, the same for each allocator.
fn relay(
    [first, second]: [usize; 2],
    count: usize,
    take: &(impl Fn() -> Result<*mut u8, String> + Sync),
    put: &(impl Fn(*mut u8) + Sync),
) -> Result<f64, String> {
    let queue: Vec<AtomicUsize> = (0..QUEUE).map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        let putting = scope.spawn(|| {
            let settled = machine::stay_on(second);
            let addresses = queue.iter().cycle().take(count).map_while(received);
            addresses.for_each(put);
            settled
        });
        let taking = scope.spawn(|| {
            let settled = machine::stay_on(first);
            let elapsed = nanoseconds_each(count, || {
                queue.iter().cycle().take(count).try_for_each(|slot| send(slot, take()))
            });
            settled.and(elapsed)
        });
        let elapsed = taking.join().map_err(|_| "the taking thread panicked".to_string())?;
        putting.join().map_err(|_| "the putting thread panicked".to_string())??;
        elapsed
    })
}

/// What stands in for an address that could not be had.
const NOTHING: usize = 1;

/// Puts an address into an empty slot, or word that there is none.
fn send(slot: &AtomicUsize, address: Result<*mut u8, String>) -> Result<(), String> {
    // Acquire: the one who emptied it is done with it.
    while slot.load(Ordering::Acquire) != 0 {
        // Not for ever on a processor that the other thread, or another program, may want.
        thread::yield_now();
    }
    let word = address.as_ref().map_or(NOTHING, |address| address.expose_provenance());
    // Release: what the address leads to is there before the address is.
    slot.store(word, Ordering::Release);
    address.map(drop)
}

/// Takes an address out of a full slot; `None` if there will be no more.
fn received(slot: &AtomicUsize) -> Option<*mut u8> {
    loop {
        // Acquire: pairs with `send`.
        match slot.load(Ordering::Acquire) {
            0 => thread::yield_now(),
            word => {
                // Release: pairs with `send`'s look for an empty slot.
                slot.store(0, Ordering::Release);
                let address = std::ptr::with_exposed_provenance_mut(word);
                return (word != NOTHING).then_some(address);
            }
        }
    }
}
