//! Transfers of the caller's memory: however the call ends, nothing is under way behind it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have memory of its own transferred, which is freed as soon as the
//! call has ended, by a panic too: under the address sanitizer a late write is found.

#![allow(unsafe_code)]

use crate::device::{
    Dma, PAGE, Records, TheCache, WRITTEN, cache, in_a_process_of_its_own, panics_at,
};
use crate::ways::panics;
use pinfold::pieces::{Options, Progress, Reason, register_all, transfer};
use pinfold::pool::{Pool, PoolConfig};
use pinfold::strategy::{Costs, Curve, Direction, Reuse, TransferPlanner, Way};
use pinfold::{Access, Config, Keep};
use pinfold_core::foreign;
use std::num::NonZeroUsize;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

/// Few in an interpreter, which takes its time.
const PIECES: usize = if cfg!(miri) { 2 } else { 12 };
const BYTES: usize = PIECES * PAGE;

fn in_pieces() -> (TheCache, Arc<Records>) {
    cache(Config { piece_bytes: PAGE, ..Config::keeping_all() })
}

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
    for threads in [1, 3] {
        for n in 1.. {
            let (cache, records) = in_pieces();
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
        panics_at(&records, 0);
        cache.evict_idle();
        assert_eq!(records.leaked(), 0, "panicked at call {n}");
        if !has_panicked {
            assert!(!transferred && registered.is_ok() && n > PIECES);
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
