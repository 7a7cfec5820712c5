//! The rows of what stands on a cache or next to one: pools, reservations, landing, long ranges, the planner, notices,
//! counts, and caches as such.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the methods that take an address, and for a mover. The device does nothing, so no
//! address is read or written through it; what is copied into is the bench's own.

#![allow(unsafe_code)]

use super::{Measured, Row, cache_of, filled, lease, least, words};
use crate::null::{NullCache, NullDevice};
use crate::workload::{LENGTH, elsewhere};
use pinfold::budget::{Amount, Budget, Reserve, Terms};
use pinfold::landing::{Slab, Zone, ZoneOptions};
use pinfold::monitor::{Feed, NoMonitor, WithFeed};
use pinfold::pieces::{self, Completion, Mover, Progress, Request};
use pinfold::pool::{Pool, PoolBuffer, PoolConfig};
use pinfold::strategy::{Costs, Reuse, TransferPlanner};
use pinfold::{Access, AddressRange, Cache, Config, WhenFull};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::{Arc, Barrier};

const REGIONS: usize = 1_000_000;
const BUFFERS: usize = 100_000;
const FEW: usize = 10_000;

pub(super) const ROWS: [Row; 23] = [
    Row { name: "pool's buffer", rest: "buffers out", most: BUFFERS, measure: buffer },
    Row { name: "pool's buffer", rest: "pools", most: FEW, measure: buffer_beside_pools },
    Row {
        name: "pool's buffer",
        rest: "threads with buffers",
        most: 256,
        measure: buffer_by_threads,
    },
    Row { name: "pool's address", rest: "buffers out", most: BUFFERS, measure: pool_address },
    Row { name: "pool's statistics", rest: "buffers out", most: BUFFERS, measure: pool_counts },
    Row { name: "pool's trim", rest: "buffers out", most: BUFFERS, measure: pool_trim },
    Row { name: "pool made and dropped", rest: "pools", most: FEW, measure: pool_made },
    Row { name: "reservation", rest: "reservations", most: FEW, measure: reservation },
    Row { name: "reserved buffer", rest: "reservations", most: FEW, measure: reserved },
    Row {
        name: "share made and dropped",
        rest: "drawers of the budget",
        most: FEW,
        measure: share,
    },
    Row { name: "landing", rest: "regions", most: REGIONS, measure: landing_beside_regions },
    Row { name: "landing", rest: "free slots", most: FEW, measure: landing_beside_slots },
    Row { name: "first piece", rest: "pieces behind it", most: REGIONS, measure: first_piece },
    Row { name: "plan of pieces", rest: "pieces in it", most: REGIONS, measure: plan },
    Row { name: "register_all of a piece", rest: "regions", most: REGIONS, measure: register_all },
    Row { name: "transfer of a piece", rest: "regions", most: REGIONS, measure: transfer },
    Row { name: "planner's advice", rest: "regions", most: REGIONS, measure: advice },
    Row { name: "planner's place", rest: "regions", most: REGIONS, measure: place },
    Row { name: "statistics", rest: "regions", most: REGIONS, measure: statistics },
    Row { name: "queue of notices", rest: "regions", most: REGIONS, measure: notices },
    Row { name: "change told to the feed", rest: "caches that read it", most: FEW, measure: feed },
    Row { name: "cache made and dropped", rest: "caches", most: FEW, measure: cache_made },
    Row { name: "cache made and dropped", rest: "regions", most: REGIONS, measure: cache_beside },
];

type NullPool = Pool<NullDevice>;

/// The length of most buffers here: so many of them take little memory.
const SHORT: usize = 64;

fn pool() -> Result<NullPool, String> {
    let config = PoolConfig { max_bytes: 1 << 30, ..PoolConfig::default() };
    Pool::new(NullDevice::default(), config).map_err(words)
}

/// `measure` with `n` buffers out.
fn with_buffers(n: usize, measure: impl FnOnce(&NullPool) -> Measured) -> Measured {
    let pool = pool()?;
    let out: Result<Vec<_>, String> = (0..n).map(|_| take(&pool)).collect();
    let value = measure(&pool);
    drop(out?);
    value
}

fn take(pool: &NullPool) -> Result<PoolBuffer<'_, NullDevice>, String> {
    pool.get(SHORT).map_err(words)
}

fn take_and_put(pool: &NullPool, rounds: usize) -> Measured {
    least(rounds, 10_000, || take(pool).map(|buffer| drop(black_box(buffer))))
}

fn buffer(n: usize, rounds: usize) -> Measured {
    with_buffers(n, |pool| take_and_put(pool, rounds))
}

fn pools(n: usize) -> Result<Vec<NullPool>, String> {
    (0..n).map(|_| pool()).collect()
}

fn buffer_beside_pools(n: usize, rounds: usize) -> Measured {
    let _others = pools(n)?;
    take_and_put(&pool()?, rounds)
}

fn buffer_by_threads(n: usize, rounds: usize) -> Measured {
    let pool = pool()?;
    let (begun, over) = (Barrier::new(n + 1), Barrier::new(n + 1));
    std::thread::scope(|scope| {
        for _ in 0..n {
            scope.spawn(|| {
                let buffer = take(&pool);
                begun.wait();
                over.wait();
                drop(buffer);
            });
        }
        begun.wait();
        let value = take_and_put(&pool, rounds);
        over.wait();
        value
    })
}

/// What a C caller has: taken, its registration found, and put back, by address alone.
fn pool_address(n: usize, rounds: usize) -> Measured {
    with_buffers(n, |pool| {
        least(rounds, 10_000, || {
            let block = pool.allocate(SHORT, SHORT).map_err(words)?;
            // SAFETY: taken above and given back once.
            let buffer = unsafe {
                black_box(pool.handle_of(block));
                pool.from_raw(block)
            };
            buffer.map(drop).ok_or_else(|| "no buffer of this pool".into())
        })
    })
}

fn pool_counts(n: usize, rounds: usize) -> Measured {
    with_buffers(n, |pool| {
        least(rounds, 1_000, || {
            black_box(pool.statistics());
            Ok(())
        })
    })
}

fn pool_trim(n: usize, rounds: usize) -> Measured {
    with_buffers(n, |pool| {
        least(rounds, 1_000, || {
            drop(take(pool)?);
            pool.trim(0);
            Ok(())
        })
    })
}

fn pool_made(n: usize, rounds: usize) -> Measured {
    let _others = pools(n)?;
    least(rounds, 100, || pool().map(drop))
}

fn budget() -> Result<Budget, String> {
    Budget::new(Amount { bytes: 1 << 40, regions: 1 << 30 }).map_err(words)
}

/// `operation` next to `n` reservations of a page each, of the same budget.
fn with_reservations(
    n: usize,
    rounds: usize,
    mut operation: impl FnMut(&Budget, &Arc<NullDevice>) -> Result<(), String>,
) -> Measured {
    let (budget, device) = (budget()?, Arc::new(NullDevice::default()));
    let all: Result<Vec<_>, _> =
        (0..n).map(|_| budget.reserve(&device, Reserve::pages(1))).collect();
    let _all = all.map_err(words)?;
    least(rounds, 100, || operation(&budget, &device))
}

fn reservation(n: usize, rounds: usize) -> Measured {
    with_reservations(n, rounds, |budget, device| {
        budget.reserve(device, Reserve::pages(1)).map(drop).map_err(words)
    })
}

fn reserved(n: usize, rounds: usize) -> Measured {
    let mut own = None;
    with_reservations(n, rounds, |budget, device| {
        if own.is_none() {
            own = Some(budget.reserve(device, Reserve::pages(1)).map_err(words)?);
        }
        let taken = own.as_ref().and_then(|own| own.take());
        taken.map(|buffer| drop(black_box(buffer))).ok_or_else(|| "no buffer is free".into())
    })
}

fn share(n: usize, rounds: usize) -> Measured {
    let budget = budget()?;
    let shares: Result<Vec<Arc<_>>, _> = (0..n).map(|_| budget.share(Terms::default())).collect();
    let _shares = shares.map_err(words)?;
    least(rounds, 1_000, || budget.share(Terms::default()).map(drop).map_err(words))
}

/// A message of a page, asked for, arrived and copied to its target.
fn land(cache: &NullCache, slots: usize, rounds: usize) -> Measured {
    const MESSAGE: usize = 4096;
    let slab = Slab::new(MESSAGE, slots, false).map_err(words)?;
    let zone = Zone::new(cache, slab, ZoneOptions::default()).map_err(words)?;
    let mut target = vec![0_u8; MESSAGE];
    least(rounds, 100, || {
        // SAFETY: the target is this function's alone, and no device writes anything.
        let arrived = unsafe { zone.ask(target.as_mut_ptr(), MESSAGE).map_err(words)?.arrived() };
        arrived.land().map(drop).map_err(|_| "it did not land".into())
    })
}

fn landing_beside_regions(n: usize, rounds: usize) -> Measured {
    land(&filled(n)?, 4, rounds)
}

fn landing_beside_slots(n: usize, rounds: usize) -> Measured {
    land(&cache_of(n + 1_000, WhenFull::Refuse)?, n, rounds)
}

/// A range of `n` pieces, where nothing is mapped.
fn long_range(cache: &NullCache, n: usize) -> (*const u8, usize) {
    let start = elsewhere(1)[0].next_multiple_of(1 << 30) as *const u8;
    (start, n * cache.config().piece_bytes)
}

fn first_piece(n: usize, rounds: usize) -> Measured {
    let cache = cache_of(1_000, WhenFull::Refuse)?;
    let (start, length) = long_range(&cache, n);
    least(rounds, 1_000, || {
        // SAFETY: this device touches no memory.
        let pieces = unsafe { cache.request(start, length, Access::READ_WRITE).pieces() };
        let first = pieces.map_err(words)?.next().ok_or("no piece")?;
        first.map(drop).map_err(words)
    })
}

fn plan(n: usize, rounds: usize) -> Measured {
    let cache = cache_of(1_000, WhenFull::Refuse)?;
    let (start, length) = long_range(&cache, n);
    least(rounds, 1_000, || {
        let plan = pieces::Plan::new(&cache, start, length).map_err(words)?;
        black_box(plan.piece(n / 2));
        Ok(())
    })
}

/// Nothing is asked of processors, and no page is made.
fn alone() -> pieces::Options {
    let options = pieces::Options::for_transfer();
    pieces::Options { threads: NonZeroUsize::MIN, prefault: false, ..options }
}

fn register_all(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let (start, options) = (elsewhere(1)[0] as *const u8, alone());
    least(rounds, 1_000, || {
        let (access, progress) = (Access::READ_WRITE, Progress::new());
        // SAFETY: this device touches no memory.
        let all =
            unsafe { pieces::register_all(&cache, start, LENGTH, access, &options, &progress) };
        all.map(drop).map_err(words)
    })
}

/// Done as soon as begun.
#[derive(Default)]
struct NullMover(VecDeque<usize>);

// SAFETY: no memory is touched.
unsafe impl Mover<u32> for NullMover {
    type Error = Infallible;

    unsafe fn begin(&mut self, request: Request<u32>) -> Result<(), Infallible> {
        self.0.push_back(request.number);
        Ok(())
    }

    fn complete(&mut self) -> Result<Completion<Infallible>, Infallible> {
        Ok(Completion { number: self.0.pop_front().unwrap_or_default(), outcome: Ok(()) })
    }
}

fn transfer(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let address = elsewhere(1)[0];
    drop(lease(&cache, address)?);
    let (start, options) = (address as *const u8, alone());
    least(rounds, 1_000, || {
        let (access, progress) = (Access::READ_WRITE, Progress::new());
        let mut mover = NullMover::default();
        // SAFETY: neither this device nor this mover touches any memory.
        let moved = unsafe {
            pieces::transfer(&cache, start, LENGTH, access, &options, &progress, &mut mover)
        };
        moved.map(drop).map_err(words)
    })
}

fn advice(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let planner = TransferPlanner::new(&cache, Costs::UNMEASURED);
    let start = elsewhere(1)[0] as *const u8;
    least(rounds, 1_000, || {
        let direction = pinfold::strategy::Direction::Leaving;
        planner.advise(direction, start, LENGTH, Reuse::Often).map(drop).map_err(words)
    })
}

fn place(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    let planner = TransferPlanner::new(&cache, Costs::UNMEASURED);
    let start = elsewhere(1)[0] as *const u8;
    least(rounds, 1_000, || {
        // SAFETY: this device touches no memory, and nothing is transferred.
        unsafe { planner.send(start, LENGTH, Reuse::Often).map_err(words)?.abandon() };
        Ok(())
    })
}

fn statistics(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    least(rounds, 1_000, || {
        black_box((cache.statistics(), cache.suspension_statistics()));
        Ok(())
    })
}

fn notices(n: usize, rounds: usize) -> Measured {
    let cache = filled(n)?;
    least(rounds, 1_000, || match cache.notices(8).next() {
        None => Ok(()),
        Some(notice) => Err(format!("{notice:?} was noted")),
    })
}

fn feed(n: usize, rounds: usize) -> Measured {
    static FEED: Feed = Feed::new();
    let cache = || {
        let monitor = WithFeed::new(NoMonitor::new().map_err(words)?, &FEED);
        Cache::new(NullDevice::default(), monitor, Config::default()).map_err(words)
    };
    let _caches: Vec<_> = (0..n).map(|_| cache()).collect::<Result<_, String>>()?;
    let changed = AddressRange::new(1 << 40, LENGTH).map_err(words)?;
    least(rounds, 1_000, || {
        drop(FEED.begin(changed));
        Ok(())
    })
}

fn make_and_drop(rounds: usize) -> Measured {
    least(rounds, 100, || cache_of(1_000, WhenFull::Refuse).map(drop))
}

fn cache_made(n: usize, rounds: usize) -> Measured {
    let _others: Vec<NullCache> =
        (0..n).map(|_| cache_of(1_000, WhenFull::Refuse)).collect::<Result<_, String>>()?;
    make_and_drop(rounds)
}

fn cache_beside(n: usize, rounds: usize) -> Measured {
    let _other = filled(n)?;
    make_and_drop(rounds)
}
