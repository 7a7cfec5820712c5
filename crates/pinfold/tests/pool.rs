//! Pools over real rings and locked memory: the right bytes, the right owners, and nothing left
//! behind.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to submit requests for buffers, to say that they are complete,
//! and to give bare addresses back. Every helper that submits waits for the completion.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // helpers fail as loudly as tests

mod registrar_support;

use io_uring::{opcode, types};
use pinfold::budget::{Amount, Budget, Terms, Watermark};
use pinfold::pool::{
    self, AllocateError, Allowance, Denied, Pages, Pool, PoolBuffer, PoolConfig, PoolError,
    PoolVec, WhenExhausted,
};
use pinfold::registrar::{BufferIndex, IoUring, Mlock};
use pinfold::{Access, AddressRange, DeregisterError, RegisterError, Registrar, RegistrarLimits};
use registrar_support::{
    PAGE, alone, in_forked_child, live_under_a_limit, memory_file, ring_with_registrar,
    status_bytes,
};
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

// --- a device that counts ------------------------------------------------------------------------

/// Registers nothing, remembers what is registered, and refuses when it is told to.
#[derive(Clone, Debug, Default)]
struct Ledger(Arc<Entries>);

#[derive(Debug, Default)]
struct Entries {
    registered: Mutex<HashSet<(usize, usize)>>,
    /// How many registrations succeed before the others fail, less one; 0: all succeed.
    refuse_behind: AtomicUsize,
    /// The longest that it takes; 0: any.
    longest: AtomicUsize,
}

impl Ledger {
    fn bytes(&self) -> usize {
        self.0.registered.lock().unwrap().iter().map(|(_, length)| length).sum()
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Ledger {
    type Handle = usize;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 30, max_regions: 1000 }
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<usize, RegisterError> {
        let longest = self.0.longest.load(SeqCst);
        let left = self.0.refuse_behind.load(SeqCst);
        if left == 1 || (longest > 0 && range.len() > longest) {
            return Err(RegisterError::PinnedMemoryLimit {
                limit_bytes: None,
                errno: libc::ENOMEM,
            });
        }
        self.0.refuse_behind.store(left.saturating_sub(1), SeqCst);
        assert!(self.0.registered.lock().unwrap().insert((range.start(), range.len())));
        Ok(range.start())
    }

    unsafe fn deregister(&self, start: usize, range: AddressRange) -> Result<(), DeregisterError> {
        assert_eq!(start, range.start());
        let known = self.0.registered.lock().unwrap().remove(&(range.start(), range.len()));
        assert!(known, "deregistered twice");
        Ok(())
    }
}

fn config(max_bytes: usize) -> PoolConfig {
    PoolConfig { max_bytes, ..PoolConfig::default() }
}

fn ledger_pool(config: PoolConfig) -> (Ledger, Pool<Ledger>) {
    let ledger = Ledger::default();
    (ledger.clone(), Pool::new(ledger, config).unwrap())
}

/// What must hold whenever no thread uses the pool.
fn consistent<R: Registrar>(pool: &Pool<R>) -> pool::PoolStatistics {
    let statistics = pool.statistics();
    let by_use = statistics.in_use_bytes + statistics.cached_bytes + statistics.free_bytes;
    assert_eq!(statistics.registered_bytes, by_use, "{statistics:?}");
    let by_pages = statistics.set_aside_bytes
        + statistics.transparent_bytes
        + statistics.unknown_bytes
        + statistics.base_bytes;
    assert_eq!(statistics.registered_bytes, by_pages, "{statistics:?}");
    assert_eq!(statistics.cached_bytes, statistics.cached_by_thread.iter().sum());
    assert_eq!(statistics.refused_puts, 0);
    statistics
}

// --- real rings ----------------------------------------------------------------------------------

/// A ring and a registrar of it, or a note why there is none.
fn ring() -> Option<(io_uring::IoUring, IoUring)> {
    ring_with_registrar(8, 64)
}

fn run(ring: &mut io_uring::IoUring, entry: &io_uring::squeue::Entry) -> i32 {
    // SAFETY: see the header.
    unsafe { ring.submission().push(entry).unwrap() };
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

/// Writes the buffer to the beginning of `file`, by its registration.
fn send(ring: &mut io_uring::IoUring, file: &File, bytes: &[u8], index: BufferIndex) -> i32 {
    let length = u32::try_from(bytes.len()).unwrap();
    let fd = types::Fd(file.as_raw_fd());
    run(ring, &opcode::WriteFixed::new(fd, bytes.as_ptr(), length, index.get()).build())
}

fn receive(ring: &mut io_uring::IoUring, file: &File, bytes: &mut [u8], index: BufferIndex) -> i32 {
    let length = u32::try_from(bytes.len()).unwrap();
    let fd = types::Fd(file.as_raw_fd());
    run(ring, &opcode::ReadFixed::new(fd, bytes.as_mut_ptr(), length, index.get()).build())
}

fn ok(length: usize) -> i32 {
    i32::try_from(length).unwrap()
}

#[test]
fn bytes_go_out_of_one_buffer_and_into_another() {
    let Some((mut ring, registrar)) = ring() else { return };
    let pool = Pool::new(registrar, config(64 * MIB)).unwrap();
    for length in [1, 64, 100, PAGE, 64 * KIB + 1, MIB, 4 * MIB, 9 * MIB + 17] {
        let (mut source, mut target) = (pool.get(length).unwrap(), pool.get(length).unwrap());
        fastrand::Rng::with_seed(length as u64).fill(&mut source);
        target.fill(0);
        let file = memory_file();
        let index = source.handle();
        assert_eq!(send(&mut ring, &file, &source, index), ok(length));
        let index = target.handle();
        assert_eq!(receive(&mut ring, &file, &mut target, index), ok(length));
        assert!(*source == *target, "{length} bytes");
    }
    assert_eq!(consistent(&pool).in_use_bytes, 0);
}

/// The kernel checks that a request stays within the registration: a buffer's handle is its own
/// slab's.
#[test]
fn every_buffer_has_the_handle_of_its_slab() {
    let Some((mut ring, registrar)) = ring() else { return };
    let config = PoolConfig { max_slab_bytes: 2 * MIB, ..config(16 * MIB) };
    let pool = Pool::new(registrar, config).unwrap();
    let mut buffers: Vec<_> = (0..12).map(|_| pool.get(MIB).unwrap()).collect();
    let indices: HashSet<BufferIndex> = buffers.iter().map(PoolBuffer::handle).collect();
    assert_eq!(indices.len(), 6, "two buffers in each slab");
    for (byte, buffer) in (1..).zip(&mut buffers) {
        buffer.fill(byte);
        let (file, index) = (memory_file(), buffer.handle());
        assert_eq!(send(&mut ring, &file, buffer, index), ok(MIB));
        let mut sent = [0; 2];
        file.read_exact_at(&mut sent, MIB as u64 - 2).unwrap();
        assert_eq!(sent, [byte; 2]);
        assert!(buffer.registered().unwrap().contains(&buffer.range().unwrap()));
        let offset = buffer.range().unwrap().start() - buffer.registered().unwrap().start();
        assert_eq!(buffer.offset(), offset);
    }
}

#[test]
fn one_pool_serves_two_rings_and_locked_memory() {
    let (Some((mut one, first)), Some((mut other, second))) = (ring(), ring()) else { return };
    let locked_before = status_bytes("VmLck:");
    let devices = ([Arc::new(first), Arc::new(second)], Mlock::new().unwrap());
    let pages = Pages::Base;
    let pool = Pool::new(devices, PoolConfig { pages, ..config(2 * MIB) }).unwrap();
    let mut buffer = pool.get(3 * PAGE).unwrap();
    buffer.fill(0x5a);
    let ([in_one, in_other], _) = buffer.handle();
    for (ring, index) in [(&mut one, in_one), (&mut other, in_other)] {
        let file = memory_file();
        assert_eq!(send(ring, &file, &buffer, index), ok(3 * PAGE));
        let mut sent = vec![0; 3 * PAGE];
        file.read_exact_at(&mut sent, 0).unwrap();
        assert!(sent == *buffer);
    }
    assert!(status_bytes("VmLck:") >= locked_before + 2 * MIB);
    drop(buffer);
    assert_eq!(pool.trim(0), 2 * MIB);
}

#[test]
fn a_buffer_goes_through_the_ring_as_one_word() {
    let Some((mut ring, registrar)) = ring() else { return };
    let pool = Pool::new(registrar, config(4 * MIB)).unwrap();
    let file = memory_file();
    (&file).write_all(b"twelve bytes").unwrap();
    let flight = pool.get(PAGE).unwrap().in_flight();
    let fd = types::Fd(file.as_raw_fd());
    let length = u32::try_from(flight.len()).unwrap();
    let entry = opcode::ReadFixed::new(fd, flight.as_ptr(), length, flight.handle().get()).build();
    // SAFETY: the buffer is in flight until its completion.
    unsafe { ring.submission().push(&entry.user_data(flight.into_user_data())).unwrap() };
    ring.submit_and_wait(1).unwrap();
    let completion = ring.completion().next().unwrap();
    // SAFETY: this is its completion.
    let mut buffer = unsafe { pool.completed(completion.user_data()) }.unwrap();
    buffer.set_len(usize::try_from(completion.result()).unwrap());
    assert_eq!(*buffer, *b"twelve bytes");
    drop(buffer);
    assert_eq!(consistent(&pool).in_use_bytes, 0);
}

#[test]
fn a_buffer_whose_transfer_never_ended_goes_to_no_thread() {
    let (ledger, pool) = ledger_pool(config(64 * KIB));
    let flight = pool.get(16 * KIB).unwrap().in_flight();
    let lost = flight.as_ptr().addr();
    drop(flight);
    let others: Vec<_> = std::iter::from_fn(|| pool.get(16 * KIB).ok()).collect();
    assert_eq!(others.len(), 3);
    assert!(others.iter().all(|buffer| buffer.as_ptr().addr() != lost));
    drop(others);
    let statistics = consistent(&pool);
    assert_eq!((statistics.lost_bytes, statistics.in_use_bytes), (16 * KIB, 16 * KIB));
    assert_eq!(pool.trim(0), 0, "its slab stays");
    drop(pool);
    assert_eq!(ledger.bytes(), 64 * KIB, "even without the pool");
}

// --- sizes and edges -----------------------------------------------------------------------------

#[test]
fn edges_are_told() {
    let (_, pool) = ledger_pool(config(8 * MIB));
    assert_eq!(pool.get(0).unwrap_err(), AllocateError::Empty);
    for bytes in [8 * MIB + 1, 1 << 40, usize::MAX / 2, usize::MAX] {
        let error = pool.get(bytes).unwrap_err();
        assert!(matches!(error, AllocateError::TooLong { max_bytes, .. } if max_bytes == 8 * MIB));
    }
    for align in [0, 3, 4 * MIB, usize::MAX] {
        let error = pool.request(1).align(align).get().unwrap_err();
        assert!(matches!(error, AllocateError::Alignment { .. }), "{error}");
    }
    assert_eq!(pool.get(8 * MIB).unwrap().capacity(), 8 * MIB, "all there is");
    assert_eq!(consistent(&pool).in_use_bytes, 0);
    let refused = Pool::new(Ledger::default(), config(0)).unwrap_err();
    assert!(matches!(refused, PoolError::Budget { .. }));
}

#[test]
fn every_length_and_alignment_is_honoured() {
    let (_, pool) = ledger_pool(config(64 * MIB));
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut held = Vec::new();
    for _ in 0..2000 {
        let align = 1 << random.u32(0..=21);
        let most = 1 << random.u32(0..=23);
        let length = random.usize(1..=most);
        let Ok(buffer) = pool.request(length).align(align).get() else {
            held.clear();
            continue;
        };
        assert_eq!(buffer.as_ptr().addr() % align.max(64), 0, "{length} at {align}");
        assert!(buffer.len() == length && buffer.capacity() >= length);
        held.push(buffer);
        if held.len() > 20 {
            drop(held.swap_remove(random.usize(..held.len())));
        }
    }
    drop(held);
    assert_eq!(consistent(&pool).in_use_bytes, 0);
}

#[test]
fn zeroed_buffers_are_zero_and_others_are_what_was_left() {
    let (_, pool) = ledger_pool(config(2 * MIB));
    let mut buffer = pool.get(1000).unwrap();
    buffer.fill(7);
    let address = buffer.as_ptr();
    drop(buffer);
    let again = pool.get(1000).unwrap();
    assert_eq!((again.as_ptr(), again[999]), (address, 7), "the latest first, as it was");
    drop(again);
    let zeroed = pool.request(1000).zeroed().get().unwrap();
    assert_eq!(zeroed.as_ptr(), address);
    assert!(zeroed.iter().all(|&byte| byte == 0));
}

#[test]
fn a_pool_of_a_few_pages_works() {
    let (ledger, pool) = ledger_pool(config(48 * KIB));
    let buffers: Vec<_> = std::iter::from_fn(|| pool.get(12 * KIB).ok()).collect();
    assert_eq!(buffers.len(), 3, "too small for a span of blocks: a unit each");
    drop(buffers);
    assert!(pool.get(320).is_ok() && pool.get(40 * KIB).is_ok());
    let statistics = consistent(&pool);
    assert_eq!((statistics.registered_bytes, statistics.base_bytes), (48 * KIB, 48 * KIB));
    assert_eq!(ledger.bytes(), 48 * KIB);
}

// --- the fast path -------------------------------------------------------------------------------

#[test]
fn what_is_cached_needs_neither_lock_nor_device() {
    let (_, pool) = ledger_pool(config(64 * MIB));
    for length in [64, 1500, PAGE, 64 * KIB, MIB] {
        drop(pool.get(length).unwrap());
        let before = pool.statistics();
        for _ in 0..1000 {
            drop(pool.get(length).unwrap());
        }
        assert_eq!(pool.statistics(), before, "{length} bytes");
    }
}

#[test]
fn what_a_thread_keeps_is_bounded() {
    let (_, pool) = ledger_pool(PoolConfig { thread_cache_bytes: MIB, ..config(256 * MIB) });
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let length = 1 << random.u32(6..=22);
        let held: Vec<_> = (0..random.usize(1..8)).map(|_| pool.get(length).unwrap()).collect();
        drop(held);
        assert!(consistent(&pool).cached_bytes <= MIB);
    }
}

#[test]
fn more_pools_than_a_thread_caches_take_turns() {
    let pools: Vec<_> = (0..9).map(|_| ledger_pool(config(2 * MIB)).1).collect();
    for _ in 0..10 {
        let buffers: Vec<_> = pools.iter().map(|pool| pool.get(100).unwrap()).collect();
        drop(buffers);
    }
    for pool in &pools {
        let statistics = consistent(pool);
        assert_eq!((statistics.in_use_bytes, statistics.cached_by_thread.len()), (0, 1));
        assert!(statistics.visits <= 3, "{statistics:?}");
    }
}

// --- threads -------------------------------------------------------------------------------------

/// Buffers that are made here and dropped there are not kept there: the producer finds them again.
#[test]
fn buffers_dropped_elsewhere_come_back() {
    let (_, pool) = ledger_pool(config(4 * MIB));
    thread::scope(|scope| {
        let (give, take) = mpsc::sync_channel::<PoolBuffer<'_, Ledger>>(64);
        scope.spawn(move || take.into_iter().for_each(drop));
        for _ in 0..100_000 {
            give.send(pool.get(4 * KIB).unwrap()).unwrap();
        }
    });
    let statistics = consistent(&pool);
    assert_eq!(statistics.in_use_bytes, 0);
    assert!(statistics.grown <= 2, "{statistics:?}");
    assert!(statistics.visits < 30_000, "batches: {statistics:?}");
}

#[test]
fn a_thread_that_ends_gives_everything_back() {
    let (_, pool) = ledger_pool(config(4 * MIB));
    for _ in 0..20 {
        // Joined, because a scope ends before the destructors of its threads' values do.
        thread::scope(|scope| {
            let use_some = || drop((0..40).map(|_| pool.get(4096).unwrap()).collect::<Vec<_>>());
            scope.spawn(use_some).join().unwrap();
        });
        let statistics = consistent(&pool);
        assert_eq!((statistics.in_use_bytes, statistics.cached_bytes), (0, 0));
    }
    assert_eq!(pool.trim(0), pool.statistics().registered_bytes.max(2 * MIB));
    assert_eq!(consistent(&pool).registered_bytes, 0);
}

/// A value of a thread that is destroyed after the pool's own, which it has used before.
#[test]
fn destructors_of_threads_may_still_use_the_pool() {
    struct Last(&'static Pool<Ledger>, Option<PoolBuffer<'static, Ledger>>);
    impl Drop for Last {
        fn drop(&mut self) {
            let other = self.0.get(1000);
            assert!(other.is_ok());
            self.1 = None;
        }
    }
    thread_local! {
        static EARLY: std::cell::RefCell<Option<Last>> = const { std::cell::RefCell::new(None) };
        static LATE: std::cell::RefCell<Option<Last>> = const { std::cell::RefCell::new(None) };
    }
    let pool: &'static Pool<Ledger> = Box::leak(Box::new(ledger_pool(config(4 * MIB)).1));
    let one_thread = move || {
        // Whichever is destroyed first: one is older than what the pool keeps here, one younger.
        EARLY.with_borrow_mut(|early| *early = Some(Last(pool, None)));
        let buffers = (pool.get(1000).unwrap(), pool.get(1000).unwrap());
        EARLY.with_borrow_mut(|early| early.as_mut().unwrap().1 = Some(buffers.0));
        LATE.with_borrow_mut(|late| *late = Some(Last(pool, Some(buffers.1))));
    };
    thread::spawn(one_thread).join().unwrap();
    let statistics = consistent(pool);
    assert_eq!((statistics.in_use_bytes, statistics.cached_bytes), (0, 0));
}

/// Every buffer carries its owner's stamp; two owners of one buffer would find each other's.
#[test]
fn random_threads_never_share_a_buffer() {
    const THREADS: usize = 4;
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let (ledger, pool) = ledger_pool(PoolConfig {
        thread_cache_bytes: 256 * KIB,
        idle_bytes: 2 * MIB,
        ..config(24 * MIB)
    });
    let steps = 20_000;
    let shelf = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (pool, shelf) = (&pool, &shelf);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed ^ number as u64);
                    let mut held: Vec<PoolBuffer<'_, Ledger>> = Vec::new();
                    for _ in 0..steps {
                        step(pool, shelf, &mut held, &mut random);
                    }
                    held.into_iter().for_each(|buffer| assert!(is_whole(&buffer)));
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    for buffer in shelf.into_inner().unwrap() {
        assert!(is_whole(&buffer), "seed {seed}");
    }
    let here: usize = consistent(&pool).cached_by_thread.iter().sum();
    assert!(here <= 256 * KIB, "only this thread has some cached");
    let statistics = consistent(&pool);
    assert_eq!(statistics.in_use_bytes, 0, "seed {seed}");
    assert_eq!(ledger.bytes(), statistics.registered_bytes);
    pool.trim(0);
    assert_eq!((ledger.bytes(), consistent(&pool).registered_bytes), (0, 0));
}

fn step<'p>(
    pool: &'p Pool<Ledger>,
    shelf: &Mutex<Vec<PoolBuffer<'p, Ledger>>>,
    held: &mut Vec<PoolBuffer<'p, Ledger>>,
    random: &mut fastrand::Rng,
) {
    match random.u32(..100) {
        0..50 => {
            let most = 1 << random.u32(4..=19);
            let length = 16 + random.usize(..most);
            let wait = WhenExhausted::GrowOrWait(Duration::from_micros(50));
            let request = pool.request(length).when_exhausted(wait);
            if let Ok(mut buffer) = request.get() {
                stamp(&mut buffer, random.u64(..));
                held.push(buffer);
            } else {
                held.clear();
            }
        }
        50..85 if !held.is_empty() => {
            let buffer = held.swap_remove(random.usize(..held.len()));
            assert!(is_whole(&buffer));
        }
        85..95 => {
            let mut shelf = shelf.lock().unwrap();
            std::mem::swap(&mut *shelf, held);
        }
        95 => drop(pool.trim(4 * MIB)),
        _ => {}
    }
    if held.len() > 60 {
        held.truncate(20);
    }
}

/// Its first and its last eight bytes and some in between.
fn stamp(buffer: &mut [u8], stamp: u64) {
    let last = buffer.len() - 8;
    for start in (0..last).step_by(4096).chain([last]) {
        buffer[start..start + 8].copy_from_slice(&stamp.to_ne_bytes());
    }
}

fn is_whole(buffer: &[u8]) -> bool {
    let last = buffer.len() - 8;
    // The last one may lie across the one before it, and was written later.
    let mut starts = (0..last).step_by(4096).filter(|start| start + 8 <= last);
    starts.all(|start| buffer[start..start + 8] == buffer[last..])
}

// --- exhausted -----------------------------------------------------------------------------------

#[test]
fn an_exhausted_pool_fails_or_grows_as_asked() {
    let (ledger, pool) = ledger_pool(config(4 * MIB));
    let fail = || pool.request(MIB).when_exhausted(WhenExhausted::Fail).get();
    assert!(matches!(fail(), Err(AllocateError::Exhausted(_))), "nothing is registered yet");
    assert_eq!(ledger.bytes(), 0);
    let all: Vec<_> = (0..4).map(|_| pool.get(MIB).unwrap()).collect();
    for error in [fail().unwrap_err(), pool.get(MIB).unwrap_err()] {
        let AllocateError::Exhausted(pool) = error else { panic!("{error}") };
        assert_eq!((pool.wanted, pool.registered, pool.max_bytes), (MIB, 4 * MIB, 4 * MIB));
        assert!(error.to_string().contains("PoolConfig::max_bytes"));
    }
    drop(all);
    assert!(fail().is_ok());
}

#[test]
fn waiting_ends_when_a_buffer_comes_back_or_time_is_up() {
    let (_, pool) = ledger_pool(config(2 * MIB));
    let mut all: Vec<_> = (0..2).map(|_| pool.get(MIB).unwrap()).collect();
    let wait = |time| pool.request(MIB).when_exhausted(WhenExhausted::Wait(time)).get();
    let patience = Duration::from_millis(5);
    let error = wait(patience).unwrap_err();
    assert!(matches!(error, AllocateError::TimedOut { waited, .. } if waited >= patience));
    assert!(matches!(wait(Duration::ZERO), Err(AllocateError::TimedOut { .. })));
    let buffer = all.pop();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(Duration::from_secs(60)).map(drop));
        scope.spawn(|| drop(buffer));
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
    drop(all);
    assert_eq!(consistent(&pool).in_use_bytes, 0);
    // No thread waits any more: threads cache buffers again.
    drop(pool.get(100).unwrap());
    let before = pool.statistics().visits;
    drop(pool.get(100).unwrap());
    assert_eq!(pool.statistics().visits, before);
}

/// A pool is exhausted when everything is in use, not when other threads have the rest cached.
#[test]
fn what_other_threads_have_cached_is_not_lost_to_the_pool() {
    let (_, pool) = ledger_pool(config(2 * MIB));
    let (kept, done) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            drop((0..8).map(|_| pool.get(256 * KIB).unwrap()).collect::<Vec<_>>());
            assert!(pool.statistics().cached_bytes > 0);
            kept.wait();
            done.wait();
        });
        kept.wait();
        let request = || pool.request(256 * KIB).when_exhausted(WhenExhausted::Fail).get();
        let all: Vec<_> = (0..8).map(|_| request().unwrap()).collect();
        assert!(request().is_err());
        assert_eq!(consistent(&pool).cached_bytes, 0);
        drop(all);
        done.wait();
    });
}

/// A span of blocks is many times as long as one buffer: where none is free in what is registered, a run that holds the
/// buffer is.
#[test]
fn what_is_free_in_a_row_serves_a_buffer_for_which_no_span_is_free() {
    use WhenExhausted::{Fail, Grow, GrowOrWait, Wait};
    let (ledger, pool) = ledger_pool(config(512 * KIB));
    let block = pool.get(10_000).unwrap();
    assert_eq!(pool.statistics().registered_bytes, 512 * KIB);
    let mut buffers = Vec::new();
    for when in [Fail, Grow, Wait(Duration::ZERO), GrowOrWait(Duration::ZERO)] {
        buffers.push(pool.request(20_000).when_exhausted(when).get().unwrap());
    }
    let error = loop {
        match pool.get(20_000) {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, AllocateError::Exhausted(_)), "{error}");
    assert!(pool.request(20_000).when_exhausted(Fail).get().is_err());
    // The first block has a span of its own, and what it caches is in that.
    let span = 512 * KIB - buffers.len() * 32 * KIB;
    assert!((320 * KIB..=384 * KIB).contains(&span), "{} buffers", buffers.len());
    buffers.iter_mut().for_each(|buffer| buffer.fill(1));
    drop((block, buffers));
    assert_eq!(consistent(&pool).in_use_bytes, 0);
    assert_eq!(ledger.bytes(), 512 * KIB);
}

/// A thread that waits has at once what is free in a row, and not when its patience ends.
#[test]
fn a_thread_does_not_wait_beside_what_is_free_in_a_row() {
    use WhenExhausted::{GrowOrWait, Wait};
    let (_, pool) = ledger_pool(config(512 * KIB));
    let mut buffers = vec![pool.get(10_000).unwrap()];
    let (began, patience) = (Instant::now(), Duration::from_secs(600));
    for when in [Wait(patience), GrowOrWait(patience)] {
        let mut buffer = pool.request(20_000).when_exhausted(when).get().unwrap();
        buffer.fill(1);
        buffers.push(buffer);
    }
    assert!(began.elapsed() < patience / 2, "{:?}", began.elapsed());
    drop(buffers);
    assert_eq!(consistent(&pool).in_use_bytes, 0);
}

/// Also where no slab is long enough for a span.
#[test]
fn a_thread_that_makes_no_slab_has_what_is_free_in_a_row() {
    let purse = Arc::new(Purse(AtomicUsize::new(48 * KIB)));
    let pool = Pool::with_allowance(Ledger::default(), config(MIB), purse).unwrap();
    drop(pool.get(20_000).unwrap());
    assert_eq!(pool.statistics().registered_bytes, 32 * KIB, "less than a span of blocks");
    let (began, patience) = (Instant::now(), Duration::from_secs(600));
    let get = || pool.request(20_000).when_exhausted(WhenExhausted::Wait(patience)).get().unwrap();
    let only = get();
    // And what comes back in a row.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| drop(get()));
        while pool.statistics().waiting == 0 {
            thread::yield_now();
        }
        drop(only);
        waiting.join().unwrap();
    });
    assert!(began.elapsed() < patience / 2, "{:?}", began.elapsed());
    let statistics = consistent(&pool);
    assert_eq!((statistics.in_use_bytes, statistics.grown), (0, 1), "{statistics:?}");
}

/// And what comes back while it waits.
#[test]
fn a_thread_that_waits_has_what_comes_back_in_a_row() {
    use WhenExhausted::{Fail, GrowOrWait, Wait};
    for waits in [Wait, GrowOrWait] {
        let (_, pool) = ledger_pool(config(512 * KIB));
        let block = pool.get(10_000).unwrap();
        let get = || pool.request(20_000).when_exhausted(Fail).get().ok();
        let mut all: Vec<_> = std::iter::from_fn(get).collect();
        let (began, patience) = (Instant::now(), Duration::from_secs(600));
        thread::scope(|scope| {
            let waiting = || pool.request(20_000).when_exhausted(waits(patience)).get().map(drop);
            let waiting = scope.spawn(waiting);
            while pool.statistics().waiting == 0 {
                thread::yield_now();
            }
            all.pop();
            waiting.join().unwrap().unwrap();
        });
        assert!(began.elapsed() < patience / 2, "{:?}", began.elapsed());
        drop((all, block));
        assert_eq!(consistent(&pool).in_use_bytes, 0);
    }
}

/// Threads that wait for each other's buffers all get theirs.
#[test]
fn many_waiters_on_few_buffers_all_get_one() {
    let (_, pool) = ledger_pool(config(64 * KIB));
    let patience = WhenExhausted::GrowOrWait(Duration::from_secs(60));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let request = pool.request(16 * KIB).when_exhausted(patience);
                    let held = request.get().unwrap();
                    thread::yield_now();
                    drop(held);
                }
            });
        }
    });
    // As a rule one slab. A thread that is about to grow gives an empty one back first, where all four buffers have just
    // come back to it.
    let statistics = consistent(&pool);
    let grown = statistics.grown - statistics.trimmed;
    assert_eq!((statistics.in_use_bytes, grown), (0, 1), "{statistics:?}");
}

// --- growing and trimming ------------------------------------------------------------------------

/// A shared budget of so many bytes.
#[derive(Debug)]
struct Purse(AtomicUsize);

impl Allowance for Purse {
    fn grant(&self, bytes: usize) -> Result<(), Denied> {
        let left = self.0.load(SeqCst);
        let rest = left.checked_sub(bytes).ok_or(Denied { available: left })?;
        self.0.store(rest, SeqCst); // one thread
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.0.fetch_add(bytes, SeqCst);
    }
}

#[test]
fn a_shared_budget_bounds_the_pool_and_gets_everything_back() {
    let (ledger, purse) = (Ledger::default(), Arc::new(Purse(AtomicUsize::new(7 * MIB))));
    let pool = Pool::with_allowance(ledger.clone(), config(64 * MIB), purse.clone()).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.get(MIB).ok()).collect();
    assert_eq!((held.len(), ledger.bytes()), (7, 7 * MIB), "down to what is left");
    let error = pool.get(MIB).unwrap_err();
    assert_eq!(error, AllocateError::Denied { bytes: MIB, available: 0 });
    drop(held);
    assert_eq!(pool.trim(0), 7 * MIB);
    assert_eq!((ledger.bytes(), purse.0.load(SeqCst)), (0, 7 * MIB));
    let _buffer = pool.get(5 * MIB).unwrap();
    drop(_buffer);
    drop(pool);
    assert_eq!((ledger.bytes(), purse.0.load(SeqCst)), (0, 7 * MIB));
}

fn amount(bytes: usize, regions: usize) -> Amount {
    Amount { bytes, regions }
}

fn sharing(budget: &Budget, ledger: &Ledger) -> Pool<Ledger> {
    let share = budget.share(Terms::default()).unwrap();
    Pool::within(share, ledger.clone(), config(64 * MIB)).unwrap()
}

#[test]
fn two_pools_share_a_budget() {
    let (ledger, budget) = (Ledger::default(), Budget::new(amount(8 * MIB, 100)).unwrap());
    let (first, second) = (sharing(&budget, &ledger), sharing(&budget, &ledger));
    let held: Vec<_> = std::iter::from_fn(|| first.get(MIB).ok()).collect();
    assert_eq!((held.len(), budget.held().bytes, ledger.bytes()), (8, 8 * MIB, 8 * MIB));
    let error = second.get(MIB).unwrap_err();
    assert!(matches!(error, AllocateError::Denied { available: 0, .. }), "{error}");
    drop(held);
    assert_eq!(first.trim(0), 8 * MIB);
    assert_eq!(budget.held(), Amount::ZERO);
    let buffer = second.get(MIB).unwrap();
    assert!(budget.held().bytes >= MIB && budget.held().bytes == ledger.bytes());
    drop(buffer);
    drop((first, second));
    assert_eq!((budget.held(), ledger.bytes()), (Amount::ZERO, 0));
}

#[test]
fn a_budget_without_registrations_left_says_no_bytes() {
    let (ledger, budget) = (Ledger::default(), Budget::new(amount(64 * MIB, 1)).unwrap());
    let pool = sharing(&budget, &ledger);
    let _first = pool.get(5 * MIB).unwrap();
    let error = std::iter::repeat_with(|| pool.get(5 * MIB).map(std::mem::forget))
        .find_map(Result::err)
        .unwrap();
    assert!(matches!(error, AllocateError::Denied { available: 0, .. }), "{error}");
}

/// The listener runs on the thread that made the pool grow, when no thread waits for that any more.
#[test]
fn a_budgets_listener_may_use_the_pool_that_grew() {
    let (ledger, budget) = (Ledger::default(), Budget::new(amount(64 * MIB, 100)).unwrap());
    let pool = Arc::new(sharing(&budget, &ledger));
    let (told, heard) = mpsc::channel();
    let weak = Arc::downgrade(&pool);
    let _watch = budget.watch(Watermark::Bytes(1), move |_| {
        let got =
            weak.upgrade().map(|pool| pool.get(MIB).map(drop).map_err(|error| error.to_string()));
        let _ = told.send(got);
    });
    let buffer = pool.get(MIB).unwrap();
    let inside = heard.try_recv().unwrap().unwrap();
    assert!(inside.is_ok(), "of the slab that was made: {inside:?}");
    drop(buffer);
    drop(pool);
    assert_eq!(budget.held(), Amount::ZERO);
}

#[test]
fn a_refused_registration_leaves_nothing_behind() {
    alone("a_refused_registration_leaves_nothing_behind", || {
        let (ledger, purse) = (Ledger::default(), Arc::new(Purse(AtomicUsize::new(64 * MIB))));
        let pool = Pool::with_allowance(ledger.clone(), config(64 * MIB), purse.clone()).unwrap();
        drop(pool.get(MIB).unwrap());
        let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let (before, resident) = (mapped(), status_bytes("VmRSS:"));
        ledger.0.refuse_behind.store(1, SeqCst);
        for _ in 0..20 {
            let error = pool.get(8 * MIB).unwrap_err();
            assert!(matches!(error, AllocateError::Register(_)), "{error}");
        }
        assert!(mapped() <= before + 1 && status_bytes("VmRSS:") < resident + 8 * MIB);
        let statistics = consistent(&pool);
        // The slab that was empty went before the first of them gave up.
        assert_eq!((statistics.registered_bytes, statistics.refused), (0, 21));
        assert_eq!((ledger.bytes(), purse.0.load(SeqCst)), (0, 64 * MIB));
        ledger.0.refuse_behind.store(0, SeqCst);
        assert!(pool.get(8 * MIB).is_ok(), "and the pool works on");
    });
}

#[test]
fn a_slab_that_is_refused_is_tried_shorter() {
    let (ledger, pool) = ledger_pool(PoolConfig { first_slab_bytes: 16 * MIB, ..config(64 * MIB) });
    ledger.0.longest.store(5 * MIB, SeqCst);
    drop(pool.get(100).unwrap());
    let statistics = consistent(&pool);
    assert_eq!((statistics.registered_bytes, statistics.refused), (4 * MIB, 2));
}

#[test]
fn empty_slabs_go_when_they_are_too_many() {
    let (ledger, pool) = ledger_pool(PoolConfig {
        idle_bytes: 8 * MIB,
        max_slab_bytes: 8 * MIB,
        ..config(128 * MIB)
    });
    let mut held: Vec<_> = (0..64).map(|_| pool.get(2 * MIB).unwrap()).collect();
    assert_eq!(consistent(&pool).registered_bytes, 128 * MIB);
    let first = held.remove(0);
    drop(held);
    let statistics = consistent(&pool);
    assert!(statistics.registered_bytes <= 20 * MIB, "{statistics:?}");
    assert_eq!(ledger.bytes(), statistics.registered_bytes);
    assert!(pool.trim(usize::MAX) == 0 && pool.trim(0) > 0);
    let left = consistent(&pool);
    assert!(left.slabs == 1 && left.in_use_bytes == 2 * MIB, "{left:?}");
    drop(first);
}

/// Empty slabs that are too short make way for one that is long enough.
#[test]
fn empty_slabs_make_way() {
    let (ledger, pool) = ledger_pool(PoolConfig { max_slab_bytes: 2 * MIB, ..config(12 * MIB) });
    drop((0..6).map(|_| pool.get(2 * MIB).unwrap()).collect::<Vec<_>>());
    let statistics = consistent(&pool);
    assert!(statistics.slabs == 6 && statistics.cached_bytes > 0, "{statistics:?}");
    let long = pool.get(10 * MIB).unwrap();
    assert_eq!((long.capacity(), ledger.bytes()), (10 * MIB, 10 * MIB));
}

#[test]
fn pages_are_what_is_told() {
    for pages in [Pages::Best, Pages::Transparent, Pages::Base] {
        let (_, pool) = ledger_pool(PoolConfig { pages, ..config(4 * MIB) });
        drop(pool.get(4 * MIB).unwrap());
        let told = consistent(&pool);
        eprintln!(
            "{pages:?}: {} set aside, {} transparent, {} unknown, {} base",
            told.set_aside_bytes, told.transparent_bytes, told.unknown_bytes, told.base_bytes
        );
        assert!(pages == Pages::Best || told.set_aside_bytes == 0);
        assert!(pages != Pages::Base || told.base_bytes == 4 * MIB);
    }
}

#[test]
fn a_pool_goes_with_all_it_had() {
    let (ledger, pool) = ledger_pool(config(16 * MIB));
    thread::scope(|scope| {
        scope.spawn(|| drop(pool.get(MIB).unwrap()));
    });
    drop((0..10).map(|_| pool.get(MIB).unwrap()).collect::<Vec<_>>());
    assert!(ledger.bytes() >= 10 * MIB);
    drop(pool);
    assert_eq!(ledger.bytes(), 0);
}

// --- bare addresses ------------------------------------------------------------------------------

#[test]
fn an_address_alone_finds_its_way_back() {
    let (ledger, pool) = ledger_pool(config(64 * MIB));
    let (_, other) = ledger_pool(config(2 * MIB));
    for (size, align) in [(1, 1), (64, 64), (5000, 4096), (MIB, 2 * MIB), (9 * MIB, 65536)] {
        let block = pool.allocate(size, align).unwrap();
        assert_eq!(block.addr().get() % align, 0);
        // SAFETY: the block is ours until it is given back, once.
        unsafe {
            assert!(pool::capacity_of(block).unwrap() >= size);
            block.write_bytes(7, size);
            let inside = block.add(size - 1);
            let slab = pool.handle_of(inside).unwrap();
            assert!(ledger.0.registered.lock().unwrap().iter().any(|(start, _)| *start == slab));
            assert_eq!(other.handle_of(block), None);
            assert!(other.from_raw(block).is_none());
            let buffer = pool.from_raw(block).unwrap();
            assert!(buffer.len() >= size && buffer[size - 1] == 7);
            assert_eq!(pool::deallocate(buffer.into_raw()), Ok(()));
        }
    }
    assert_eq!(consistent(&pool).in_use_bytes, 0);
    let mut stranger = 0_u64;
    let stranger = std::ptr::NonNull::from(&mut stranger).cast();
    // SAFETY: no pool's memory.
    unsafe {
        assert!(pool::deallocate(stranger).is_err() && pool.handle_of(stranger).is_none());
        assert!(pool::capacity_of(stranger).is_none() && pool.from_raw(stranger).is_none());
    }
}

#[test]
fn an_address_comes_back_after_its_pool_has_gone() {
    let (ledger, pool) = ledger_pool(config(16 * MIB));
    let (one, two) = (pool.allocate(100, 8).unwrap(), pool.allocate(5 * MIB, 8).unwrap());
    drop(pool);
    let left = ledger.bytes();
    assert!(left > 0, "what may be in use stays");
    // SAFETY: both are ours, still mapped, and given back once.
    unsafe {
        one.write_bytes(1, 100);
        two.write_bytes(1, 5 * MIB);
        thread::spawn({
            let one = one.as_ptr().expose_provenance();
            move || {
                let one = std::ptr::with_exposed_provenance_mut(one);
                pool::deallocate(std::ptr::NonNull::new(one).unwrap()).unwrap();
            }
        })
        .join()
        .unwrap();
        pool::deallocate(two).unwrap();
    }
    assert_eq!(ledger.bytes(), 0, "the last one takes its slab along");
}

// --- containers ----------------------------------------------------------------------------------

#[test]
fn a_vector_grows_from_size_to_size() {
    let (_, pool) = ledger_pool(config(8 * MIB));
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut ours, mut model) = (PoolVec::new(&pool), Vec::new());
    for _ in 0..2000 {
        match random.u32(..6) {
            0 => {
                let bytes: Vec<u8> = (0..random.usize(..2000)).map(|_| random.u8(..)).collect();
                ours.extend_from_slice(&bytes).unwrap();
                model.extend_from_slice(&bytes);
            }
            1 => assert_eq!(ours.pop(), model.pop()),
            2 => {
                let length = random.usize(..20_000);
                ours.truncate(length);
                model.truncate(length);
            }
            3 => {
                let length = random.usize(..20_000);
                ours.resize(length, 9).unwrap();
                model.resize(length, 9);
            }
            _ => {
                ours.push(3).unwrap();
                model.push(3);
            }
        }
        assert!(*ours == *model && ours.capacity() >= ours.len());
    }
    ours.clear();
    write!(ours, "{}-{}", 4, 2).unwrap();
    assert_eq!(*ours, *b"4-2");
    let before = ours.to_vec();
    assert!(ours.extend_from_slice(&vec![0; 16 * MIB]).is_err());
    assert!(*ours == *before, "as it was");
    assert_eq!(*ours.into_buffer().unwrap(), *b"4-2");
    assert!(PoolVec::with_capacity(&pool, 100).unwrap().capacity() >= 100);
}

// --- forks and limits ----------------------------------------------------------------------------

#[test]
fn a_forked_child_is_refused_and_does_no_harm() {
    alone("a_forked_child_is_refused_and_does_no_harm", || {
        let (ledger, pool) = ledger_pool(config(4 * MIB));
        let (mut buffer, other) = (pool.get(PAGE).unwrap(), pool.get(PAGE).unwrap());
        buffer.fill(1);
        drop(other);
        let before = pool.statistics();
        let bytes = ledger.bytes();
        let word = buffer.in_flight().into_user_data();
        let mut inherited = Some((pool, word, ledger));
        let held = in_forked_child(|| {
            let (pool, word, ledger) = inherited.take().unwrap();
            let refused = [pool.get(PAGE).err(), pool.get(8 * MIB).err(), pool.get(MIB).err()];
            // SAFETY: the buffer is in flight no more; here it is the parent's anyway.
            drop(unsafe { pool.completed(word) });
            let trimmed = pool.trim(0);
            drop(pool);
            let own = ledger_pool(config(2 * MIB)).1;
            refused[0] == Some(AllocateError::Forked)
                && refused[2] == Some(AllocateError::Forked)
                && trimmed == 0
                && ledger.bytes() == bytes
                && own.get(PAGE).is_ok()
        });
        assert!(held);
        let (pool, word, _) = inherited.take().unwrap();
        assert_eq!(pool.statistics(), before, "the parent goes on as it was");
        // SAFETY: no transfer was submitted.
        let buffer = unsafe { pool.completed(word) }.unwrap();
        assert!(buffer.iter().all(|&byte| byte == 1));
    });
}

/// A real ring under a real limit.
#[test]
fn the_limit_on_pinned_memory_is_told_and_worked_with() {
    alone("the_limit_on_pinned_memory_is_told_and_worked_with", || {
        const LIMIT: usize = 3 * MIB;
        if !live_under_a_limit(LIMIT as u64, 65_531) {
            return;
        }
        let Some((mut ring, registrar)) = ring() else { return };
        let pages = Pages::Base;
        let config = PoolConfig { first_slab_bytes: 8 * MIB, pages, ..config(64 * MIB) };
        let pool = Pool::new(registrar, config).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.get(64 * KIB).ok()).collect();
        let error = pool.get(64 * KIB).unwrap_err();
        let AllocateError::Register(RegisterError::PinnedMemoryLimit { limit_bytes, .. }) = error
        else {
            panic!("{error}")
        };
        assert_eq!(limit_bytes, Some(LIMIT as u64));
        assert!(error.to_string().contains("RLIMIT_MEMLOCK"));
        let statistics = consistent(&pool);
        assert!(statistics.registered_bytes >= LIMIT / 2, "{statistics:?}");
        let buffer = held.last_mut().unwrap();
        buffer.fill(3);
        let (file, index) = (memory_file(), buffer.handle());
        assert_eq!(send(&mut ring, &file, buffer, index), ok(64 * KIB));
    });
}

/// A process that ends with buffers alive, in the hands of a thread that still runs, just ends.
#[test]
fn a_process_may_end_with_buffers_alive() {
    let ended_well = in_forked_child(|| {
        let pool: &'static Pool<Ledger> = Box::leak(Box::new(ledger_pool(config(4 * MIB)).1));
        let _held = pool.get(MIB).unwrap();
        thread::spawn(move || {
            let _mine = pool.get(MIB).unwrap();
            loop {
                thread::park();
            }
        });
        // SAFETY: runs exit handlers and ends this child.
        unsafe { libc::exit(0) }
    });
    assert!(ended_well);
}

/// The same by bare addresses, of every kind of buffer.
#[test]
fn addresses_given_back_elsewhere_come_back() {
    for size in [64, 4 * KIB, 64 * KIB, MIB, 5 * MIB] {
        let (_, pool) = ledger_pool(config(64 * MIB));
        thread::scope(|scope| {
            let (give, take) = mpsc::sync_channel::<usize>(if size < MIB { 256 } else { 4 });
            let putting = scope.spawn(move || {
                take.into_iter().for_each(|address| {
                    let block =
                        std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(address));
                    // SAFETY: the other thread took it and uses it no more.
                    unsafe { pool::deallocate(block.unwrap()) }.unwrap();
                });
            });
            for _ in 0..5000 {
                let block = pool.allocate(size, 1).unwrap_or_else(|error| {
                    panic!("{size}: {error}: {:?}", pool.statistics());
                });
                give.send(block.as_ptr().expose_provenance()).unwrap();
            }
            drop(give);
            putting.join().unwrap();
        });
        let statistics = consistent(&pool);
        assert_eq!(statistics.in_use_bytes, 0, "{size} bytes");
        // What 256 of them and two threads' magazines take, and the next slab.
        assert!(statistics.registered_bytes <= 64 * MIB, "{size}: {statistics:?}");
        if size <= 64 * KIB {
            assert!(statistics.grown <= 5, "{size}: {statistics:?}");
        }
    }
}

// --- look-ups by address -------------------------------------------------------------------------

/// A look-up by address follows what the address finds, which another thread may release: so memory of other code
/// never lies in a block of 2 MiB that finds a slab.
#[test]
fn no_other_memory_lies_in_a_slabs_last_block() {
    let (_, pool) = ledger_pool(PoolConfig { idle_bytes: 0, ..config(96 * KIB) });
    let buffer = pool.get(4096).unwrap();
    let slab = buffer.registered().unwrap();
    assert!(slab.len() < 2 * MIB, "a short one");
    for place in [slab.end(), slab.start() + MIB, slab.start() + 2 * MIB - PAGE] {
        let behind = AddressRange::new(place, PAGE).unwrap();
        let mapped = pinfold_kernel::memory::map_if_free(behind);
        assert!(mapped.is_err(), "{place:#x} behind {slab} is free for other memory");
    }
    drop(buffer);
    drop(pool);
    let behind = AddressRange::new(slab.start() + MIB, PAGE).unwrap();
    pinfold_kernel::memory::map_if_free(behind).unwrap();
    let page = NonNull::new(std::ptr::with_exposed_provenance_mut(behind.start())).unwrap();
    // SAFETY: memory that is no pool's.
    assert_eq!(unsafe { pool::capacity_of(page) }, None);
    // SAFETY: mapped above, and not used any more.
    unsafe { pinfold_kernel::memory::unmap(behind) };
}
