//! Transfers of the caller's memory: however the call ends, nothing is under way behind it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have memory of its own transferred, which is freed as soon as the
//! call has ended, by a panic too: under the address sanitizer a late write is found.

#![allow(unsafe_code)]

use crate::device::{
    Dma, PAGE, RAN, Records, Silent, TheCache, WRITTEN, cache, device, in_a_process_of_its_own,
    panics_at,
};
use crate::pools::{Forking, ForkingDevice, numbers_begin_anew};
use crate::ways::{child_does, panics};
use pinfold::pieces::{
    Completion, Mover, Options, Progress, Reason, Request, register_all, transfer,
};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::strategy::{Costs, Curve, Direction, Reuse, TransferPlanner, Way, measure};
use pinfold::{Access, Config, Keep};
use pinfold_core::foreign;
use std::num::NonZeroUsize;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

/// Few in an interpreter, which takes its time.
const PIECES: usize = if cfg!(miri) { 2 } else { 12 };
const BYTES: usize = PIECES * PAGE;

fn in_pieces() -> (TheCache, Arc<Records>) {
    in_pieces_by(Keep::Always)
}

fn in_pieces_by(keep: Keep) -> (TheCache, Arc<Records>) {
    cache(Config { piece_bytes: PAGE, keep, ..Config::default() })
}

const KEEPS: [Keep; 2] = [Keep::Always, Keep::Never];

fn options(threads: usize) -> Options {
    let threads = NonZeroUsize::new(threads).unwrap();
    Options { threads, ahead: 3, in_flight: 4, prefault: false, to_keep: false }
}

/// `BYTES` that do not begin with a page, and so lie in one piece more than whole pages.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new() -> Self {
        Self(vec![0; BYTES + 2 * PAGE])
    }

    fn bytes(&mut self) -> &mut [u8] {
        let first = self.0.as_ptr().addr();
        let start = first.next_multiple_of(PAGE) + PAGE / 2 - first;
        &mut self.0[start..start + BYTES]
    }
}

/// Receives into a buffer that is freed when this ends, however it does; how many requests it took.
fn receive(cache: &TheCache, options: &Options, mover: &mut Dma) -> Result<usize, String> {
    let mut buffer = Buffer::new();
    let buffer = buffer.bytes();
    let (start, progress) = (buffer.as_mut_ptr(), Progress::new());
    // SAFETY: the buffer is this function's own until the call has ended.
    let moved = unsafe { transfer(cache, start, BYTES, Access::WRITE, options, &progress, mover) };
    let moved = moved.map_err(|error| error.to_string())?;
    assert!(buffer.iter().all(|&byte| byte == WRITTEN));
    Ok(moved.requests)
}

#[test]
fn a_registrar_that_panics_at_any_call_leaves_no_request_under_way() {
    for (threads, keep) in [1, 3].into_iter().flat_map(|it| KEEPS.map(|keep| (it, keep))) {
        for n in 1.. {
            let (cache, records) = in_pieces_by(keep);
            panics_at(&records, n);
            let mut mover = Dma::new(&records);
            let panicked = panics(|| drop(receive(&cache, &options(threads), &mut mover)));
            assert!(mover.under_way.is_empty(), "panicked at call {n}");
            let has_panicked = records.has_panicked();
            panics_at(&records, 0);
            if !has_panicked {
                assert!(!panicked && n > PIECES);
                break;
            }
            // The cache goes on.
            assert!(receive(&cache, &options(threads), &mut mover).is_ok(), "after call {n}");
            drop(cache);
            assert!(records.is_gone());
            assert_eq!(records.leaked(), 0, "panicked at call {n}");
        }
    }
}

/// What a registrar's panic carries panics once more where it is dropped, on whichever thread that is.
#[test]
fn what_a_registrar_panics_with_may_panic_on_any_helper() {
    for n in 1.. {
        let (cache, records) = in_pieces();
        records.panics_with_bombs();
        let mut mover = Dma::new(&records);
        let mut buffer = Buffer::new();
        panics_at(&records, n);
        let transferred = foreign::call(|| drop(receive(&cache, &options(3), &mut mover))).is_err();
        assert!(mover.under_way.is_empty(), "panicked at call {n}");
        panics_at(&records, 0);
        cache.evict_idle();
        panics_at(&records, n);
        let (start, progress) = (buffer.bytes().as_mut_ptr(), Progress::new());
        let (rights, options) = (Access::WRITE, options(3));
        let registered = foreign::call(|| {
            // SAFETY: the buffer is not used meanwhile, and no device writes to it.
            let all = unsafe { register_all(&cache, start, BYTES, rights, &options, &progress) };
            drop(all.map_err(drop));
        });
        let has_panicked = records.has_panicked();
        assert_eq!(registered.is_err(), has_panicked, "the panic goes on, of call {n}");
        panics_at(&records, 0);
        cache.evict_idle();
        assert_eq!(records.leaked(), 0, "panicked at call {n}");
        if !has_panicked {
            assert!(!transferred && n > PIECES);
            break;
        }
    }
}

#[test]
fn a_mover_that_panics_at_any_call_is_waited_for() {
    for n in 1.. {
        let (cache, records) = in_pieces();
        let mut mover = Dma { panic_at: n, ..Dma::new(&records) };
        let panicked = panics(|| drop(receive(&cache, &options(1), &mut mover)));
        assert!(mover.under_way.is_empty(), "panicked at call {n}");
        cache.evict_idle();
        assert_eq!(records.leaked(), 0, "panicked at call {n}: no lease is left");
        if !panicked {
            break;
        }
    }
}

#[test]
fn a_device_that_is_gone_is_not_waited_for() {
    for n in 2..20 {
        let (cache, records) = in_pieces();
        let mut mover = Dma { gone_at: n, ..Dma::new(&records) };
        let _outcome = receive(&cache, &options(1), &mut mover);
        assert!(mover.under_way.is_empty());
        cache.evict_idle();
        assert_eq!(records.leaked(), 0, "gone at call {n}");
    }
}

/// The leases are for one use each, so that their ends call the registrar.
#[test]
fn a_device_that_is_gone_is_not_asked_again_whichever_registration_panics_at_its_end() {
    for n in 1.. {
        let (cache, records) =
            cache(Config { piece_bytes: PAGE, keep: Keep::Never, ..Config::default() });
        panics_at(&records, n);
        let mut mover = Dma { gone_at: 6, ..Dma::new(&records) };
        let _panicked = panics(|| drop(receive(&cache, &options(1), &mut mover)));
        assert!(mover.under_way.is_empty());
        assert_eq!(records.leaked(), 0, "panicked at call {n}");
        if !records.has_panicked() {
            assert!(n > 8, "it registers and deregisters at least four times");
            break;
        }
    }
}

/// What cannot be waited for is memory of the caller's that the device writes: the process ends.
#[test]
fn a_mover_that_panics_again_when_it_is_waited_for_ends_the_process() {
    let status = in_a_process_of_its_own(
        "transfers::a_mover_that_panics_again_when_it_is_waited_for_ends_the_process",
        || {
            let (cache, records) = in_pieces();
            let mut mover = Dma { panic_at: 4, for_good: true, ..Dma::new(&records) };
            let _panicked = panics(|| drop(receive(&cache, &options(1), &mut mover)));
        },
    );
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}");
}

#[test]
fn bounds_that_bound_nothing_are_bounds() {
    for most in [usize::MAX, 1 << 48] {
        let (cache, records) = in_pieces();
        let all = Options { ahead: most, in_flight: most, ..options(1) };
        assert!(receive(&cache, &all, &mut Dma::new(&records)).unwrap() >= PIECES);
    }
    let (cache, records) = in_pieces();
    let threads = Options { ahead: usize::MAX, prefault: true, ..options(usize::MAX) };
    assert!(receive(&cache, &threads, &mut Dma::new(&records)).unwrap() >= PIECES);
}

#[test]
fn a_foreign_completion_ends_no_request_of_pieces() {
    let (cache, records) = in_pieces();
    let mut mover = Dma { foreign: true, ..Dma::new(&records) };
    assert!(receive(&cache, &options(1), &mut mover).unwrap() >= PIECES);
    assert!(mover.under_way.is_empty());
}

fn way() -> Option<Way> {
    Some(Way { first: Curve::through(&[1.0])?, again: Curve::through(&[1.0])? })
}

/// Each way of the planner alone: kept, copied, for one use.
fn only() -> [Costs; 3] {
    let none = Costs::UNMEASURED;
    [
        Costs { cached: way(), ..none },
        Costs { copy: way(), ..none },
        Costs { per_use: way(), ..none },
    ]
}

/// Receives by the planner into a buffer that is freed when this ends, however it does.
fn receive_by(
    planner: &TransferPlanner<'_, crate::device::Device, crate::device::Silent>,
    mover: &mut Dma,
) {
    let mut buffer = vec![0_u8; BYTES];
    let start = buffer.as_mut_ptr();
    // SAFETY: the buffer is this function's own until the call has ended.
    let moved = unsafe { planner.transfer(Direction::Arriving, start, BYTES, Reuse::Often, mover) };
    match moved {
        Ok(_) => assert!(buffer.iter().all(|&byte| byte == WRITTEN)),
        Err(error) => assert!(!matches!(error.reason, Reason::Range(_))),
    }
}

#[test]
fn the_planner_leaves_no_request_under_way_whichever_part_panics() {
    for (costs, n) in only().into_iter().flat_map(|costs| (0..40).map(move |n| (costs, n))) {
        let (cache, records) = in_pieces();
        let (device, pinned) = crate::device::device();
        let pool = Pool::new(device, PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() });
        let pool = pool.unwrap();
        // SAFETY: both are of one device.
        let planner = unsafe { TransferPlanner::new(&cache, costs).with_pool(&pool) };
        // By either registrar, or by the mover.
        for (first, second, third) in [(n, 0, 0), (0, n, 0), (0, 0, n)] {
            panics_at(&records, first);
            panics_at(&pinned, second);
            let mover = Dma::new(&records).and(&pinned);
            let mut mover = Dma { panic_at: third, foreign: true, ..mover };
            let _panicked = panics(|| receive_by(&planner, &mut mover));
            assert!(mover.under_way.is_empty(), "{first} {second} {third}");
        }
        panics_at(&records, 0);
        panics_at(&pinned, 0);
        assert_eq!(pool.statistics().in_use_bytes, 0, "no buffer is lost");
        cache.evict_idle();
        assert_eq!(records.leaked(), 0, "no lease is lost");
    }
}

/// Of the many calls the first ones, and then a part.
#[test]
fn measuring_leaves_no_request_under_way_whichever_call_panics() {
    let mut n = 1;
    loop {
        let mut was_asked = false;
        for (first, second, third) in [(n, 0, 0), (0, n, 0), (0, 0, n)] {
            let (cache, records) = in_pieces();
            let (device, pinned) = crate::device::device();
            let config = PoolConfig { max_bytes: 4 << 20, ..PoolConfig::default() };
            let pool = Pool::new(device, config).unwrap();
            panics_at(&records, first);
            panics_at(&pinned, second);
            let mut mover = Dma { panic_at: third, ..Dma::new(&records).and(&pinned) };
            let panicked = panics(|| {
                // SAFETY: both are of one device.
                unsafe { measure(&cache, Some(&pool), &mut mover, 256) }.unwrap();
            });
            was_asked |= panicked;
            panics_at(&records, 0);
            panics_at(&pinned, 0);
            assert!(mover.under_way.is_empty(), "{first} {second} {third}");
            assert_eq!(pool.statistics().in_use_bytes, 0, "{first} {second} {third}");
            cache.evict_idle();
            assert_eq!(records.leaked(), 0, "{first} {second} {third}");
        }
        if !was_asked {
            assert!(n > 1000, "{n} calls");
            break;
        }
        n += 1 + n / 4;
    }
}

/// Panics as it is dropped.
struct LoudError;

impl Drop for LoudError {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

/// Each of its requests fails, as soon as it is begun or later, and one call panics.
#[derive(Clone, Default, Debug)]
struct Failing {
    under_way: Vec<usize>,
    calls: usize,
    panic_at: usize,
    /// From this call on nothing can be begun.
    refuses_at: usize,
    gone_at: usize,
    /// So many completions are another's, which failed, too.
    foreign: usize,
}

impl Failing {
    fn is_at(&mut self) -> usize {
        self.calls += 1;
        assert_ne!(self.calls, self.panic_at, "a call");
        self.calls
    }
}

// SAFETY: nothing is moved; a request is reported once.
unsafe impl Mover<u32> for Failing {
    type Error = LoudError;

    unsafe fn begin(&mut self, request: Request<u32>) -> Result<(), LoudError> {
        let call = self.is_at();
        if self.refuses_at > 0 && call >= self.refuses_at {
            return Err(LoudError);
        }
        self.under_way.push(request.number);
        Ok(())
    }

    fn complete(&mut self) -> Result<Completion<LoudError>, LoudError> {
        let call = self.is_at();
        if self.gone_at > 0 && call >= self.gone_at {
            self.under_way.clear();
            return Err(LoudError);
        }
        if let Some(left) = self.foreign.checked_sub(1) {
            self.foreign = left;
            return Ok(Completion { number: 7777, outcome: Err(LoudError) });
        }
        let number = self.under_way.pop().expect("called only when something is under way");
        Ok(Completion { number, outcome: Err(LoudError) })
    }
}

/// Each way to fail, with a panic at each of the first calls and without.
fn failing() -> impl Iterator<Item = Failing> {
    let ways = |panic_at| {
        let plain = Failing { panic_at, ..Failing::default() };
        let refuses = |refuses_at| Failing { refuses_at, ..plain.clone() };
        let is_gone = |gone_at| Failing { gone_at, ..plain.clone() };
        let foreign = Failing { foreign: 3, ..plain.clone() };
        let ways = [1, 2, 4].map(refuses).into_iter().chain([2, 3, 5].map(is_gone));
        ways.chain([plain.clone(), foreign]).collect::<Vec<_>>()
    };
    (0..5).flat_map(ways)
}

/// A transfer by `mover`, whose error is the test's own to drop; whether it panicked.
fn panics_in_transfer(
    cache: &TheCache,
    buffer: &mut [u8],
    threads: usize,
    mover: &mut Failing,
) -> bool {
    panics(|| {
        let (start, rights) = (buffer.as_mut_ptr(), Access::WRITE);
        let (options, progress) = (options(threads), Progress::new());
        // SAFETY: nothing is moved.
        let failed = unsafe { transfer(cache, start, BYTES, rights, &options, &progress, mover) };
        std::mem::forget(failed);
    })
}

/// Whatever else panics meanwhile: the mover, the registrar on this thread or on a helper's.
#[test]
fn errors_of_a_mover_may_all_panic_as_they_are_dropped() {
    let name = "transfers::errors_of_a_mover_may_all_panic_as_they_are_dropped";
    let status = in_a_process_of_its_own(name, || {
        for threads in [1, 3] {
            for (keep, mover) in [Keep::Always, Keep::Never]
                .into_iter()
                .flat_map(|keep| failing().map(move |mover| (keep, mover)))
            {
                for n in 1.. {
                    let (cache, records) =
                        cache(Config { piece_bytes: PAGE, keep, ..Config::default() });
                    let mut buffer = Buffer::new();
                    let buffer = buffer.bytes();
                    for page in buffer.chunks(PAGE / 2).take(PIECES) {
                        // SAFETY: no device is given the lease.
                        let lease = unsafe { cache.get(page.as_ptr(), page.len(), Access::WRITE) };
                        drop(lease.unwrap());
                    }
                    panics_at(&records, n);
                    let mut mover = mover.clone();
                    let panicked = panics_in_transfer(&cache, buffer, threads, &mut mover);
                    let was_asked = records.has_panicked();
                    panics_at(&records, 0);
                    assert!(mover.under_way.is_empty(), "{keep:?} {mover:?} call {n}");
                    cache.evict_idle();
                    assert_eq!(records.leaked(), 0, "{keep:?} {mover:?} call {n}");
                    if !was_asked {
                        let called = mover.panic_at > 0 && mover.calls >= mover.panic_at;
                        assert_eq!(panicked, called, "{keep:?} {mover:?}");
                        break;
                    }
                }
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// The same by way of the planner: of leases for one use, and of a pool's buffer.
#[test]
fn errors_of_a_planners_mover_may_all_panic_as_they_are_dropped() {
    let name = "transfers::errors_of_a_planners_mover_may_all_panic_as_they_are_dropped";
    let status = in_a_process_of_its_own(name, || {
        for (costs, mover) in
            only().into_iter().flat_map(|costs| failing().map(move |mover| (costs, mover)))
        {
            for n in 1.. {
                let (cache, records) = in_pieces();
                let (device, pinned) = crate::device::device();
                let config = PoolConfig {
                    max_bytes: 4 << 20,
                    idle_bytes: 0,
                    thread_cache_bytes: 0,
                    ..PoolConfig::default()
                };
                let pool = Pool::new(device, config).unwrap();
                // SAFETY: both are of one device.
                let planner = unsafe { TransferPlanner::new(&cache, costs).with_pool(&pool) };
                let mut buffer = vec![0_u8; BYTES];
                panics_at(&records, n);
                panics_at(&pinned, n);
                let mut mover = mover.clone();
                let _panicked = panics(|| {
                    let (start, way) = (buffer.as_mut_ptr(), Direction::Arriving);
                    // SAFETY: nothing is moved.
                    let failed =
                        unsafe { planner.transfer(way, start, BYTES, Reuse::Often, &mut mover) };
                    std::mem::forget(failed);
                });
                let was_asked = records.has_panicked() || pinned.has_panicked();
                panics_at(&records, 0);
                panics_at(&pinned, 0);
                assert!(mover.under_way.is_empty(), "{mover:?} call {n}");
                assert_eq!(pool.statistics().in_use_bytes, 0, "{mover:?} call {n}");
                cache.evict_idle();
                assert_eq!(records.leaked(), 0, "{mover:?} call {n}");
                if !was_asked {
                    break;
                }
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// Forks at its call as the device does.
struct ForkingDma(Dma, Arc<Forking>);

// SAFETY: as the mover in it.
unsafe impl Mover<u32> for ForkingDma {
    type Error = &'static str;

    unsafe fn begin(&mut self, request: Request<u32>) -> Result<(), &'static str> {
        // SAFETY: the caller's promise, passed on.
        let begun = unsafe { self.0.begin(request) };
        self.1.count();
        begun
    }

    fn complete(&mut self) -> Result<Completion<&'static str>, &'static str> {
        let completed = self.0.complete();
        self.1.count();
        completed
    }
}

/// Whichever call of the device or the mover has forked: the child waits for no helper and no request, which are its
/// parent's, and calls neither of them again. One that a helper has forked ends with it.
#[test]
fn a_child_forked_inside_a_transfer_comes_back_from_it() {
    let name = "transfers::a_child_forked_inside_a_transfer_comes_back_from_it";
    let status = in_a_process_of_its_own(name, || {
        for moves in [false, true] {
            // As often as it takes for each call to be met in the midst of others.
            for n in 1.. {
                if (0..10).any(|_| forks_in(&Forking::at(n), moves) < 0) {
                    assert!(n > PIECES, "{n} calls");
                    break;
                }
            }
        }
    });
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// As a container's first process that makes a container.
#[test]
fn a_child_that_has_its_parents_number_comes_back_from_a_transfer() {
    let name = "transfers::a_child_that_has_its_parents_number_comes_back_from_a_transfer";
    let status = in_a_process_of_its_own(name, || {
        let first = |n, moves| {
            if !numbers_begin_anew() {
                std::process::exit(NO_NAMESPACE);
            }
            child_does((), |()| {
                assert_eq!(std::process::id(), 1);
                forks_in(&Forking::first_at(n), moves);
            });
        };
        for (n, moves) in (1..2 * PIECES).flat_map(|n| [(n, false), (n, true)]) {
            // Only once in a thread.
            thread::scope(|scope| scope.spawn(|| first(n, moves)).join().unwrap());
        }
    });
    if status.code() == Some(NO_NAMESPACE) {
        return eprintln!("skipped: no namespace of process numbers may be made");
    }
    assert_eq!(status.code(), Some(RAN), "{status}");
}

/// What a test's process ends with where it cannot run.
const NO_NAMESPACE: i32 = RAN + 1;

/// Says which child was forked, if any.
fn forks_in(forks: &Arc<Forking>, moves: bool) -> i32 {
    let (device, records) = device();
    let config = Config { piece_bytes: PAGE, keep: Keep::Always, ..Config::default() };
    let device = ForkingDevice(device, Arc::clone(forks));
    let cache = pinfold::cache(device, Silent::new(), config).unwrap();
    let mut buffer = Buffer::new();
    let bytes = buffer.bytes();
    let (start, length) = (bytes.as_mut_ptr().cast_const(), bytes.len());
    let (options, progress) = (options(3), Progress::default());
    let mut mover = ForkingDma(Dma::new(&records), Arc::clone(forks));
    // SAFETY: the buffer is nothing else's until the call has ended, and no device writes it behind that.
    let is_done = unsafe {
        match moves {
            true => {
                transfer(&cache, start, length, Access::READ_WRITE, &options, &progress, &mut mover)
                    .is_ok()
            }
            false => {
                register_all(&cache, start, length, Access::READ_WRITE, &options, &progress).is_ok()
            }
        }
    };
    let child = forks.child.load(SeqCst);
    if child == 0 {
        // SAFETY: the child's own end.
        unsafe { libc::_exit(i32::from(forks.is_called_since())) };
    }
    assert!(is_done, "{forks:?}");
    let mut status = 0;
    // SAFETY: the child of this process, if there is one.
    let waited = child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } == child;
    assert!(waited && status == 0, "{forks:?}: the child ended with {status:#x}");
    child
}
