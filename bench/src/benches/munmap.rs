//! What a `munmap` takes: of memory that is not watched, compared with a process without the library; of watched
//! memory, by the monitor alone and with a registration that has to be deregistered, compared with memory that is
//! not watched.

use crate::Options;
use crate::report::Report;
use crate::ring::{self, RingCache, cache_over};
use crate::rounds::{Comparison, nanoseconds};
use crate::short_lived::{ShortLived, Source};
use io_uring::IoUring as Ring;
use pinfold::{Config, Watch};
use serde_json::json;
use std::time::{Duration, Instant};

const SIZES: [usize; 2] = [4 << 10, 64 << 10];
/// Mappings that are unmapped in a turn.
const UNMAPPINGS: usize = 200;
const SLOTS: u32 = 1024;

/// What is done with memory before it is unmapped.
type Preparation<'p> = dyn Fn(&ShortLived) -> Result<(), String> + 'p;

/// Nanoseconds for each round.
#[derive(Default)]
struct Times {
    without: Vec<f64>,
    unwatched: Vec<f64>,
    watched: Vec<f64>,
    registered: Vec<f64>,
}

/// Three figures for each length.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if report.is_skipped("munmap", ring::missing()) {
        return Ok(());
    }
    SIZES.into_iter().try_for_each(|bytes| measure(options, report, bytes))
}

fn measure(options: Options, report: &mut Report, bytes: usize) -> Result<(), String> {
    let mut times = Times::default();
    let turn = |prepare: &Preparation<'_>| unmap(options.scaled(UNMAPPINGS).max(3), bytes, prepare);
    // Rings are taken down in the background, so they stay until all is measured.
    let mut rings = Vec::new();
    for _ in 0..options.rounds {
        times.without.push(turn(&|_| Ok(()))?);
        let (ring, cache) = library()?;
        rings.push(ring);
        // What the library watches meanwhile is something else.
        let kept = ShortLived::new(Source::Map, bytes)?;
        register(&cache, &kept)?;
        times.unwatched.push(turn(&|_| Ok(()))?);
        times.watched.push(turn(&|memory| watch(&cache, memory))?);
        times.registered.push(turn(&|memory| register(&cache, memory))?);
    }
    let Times { without, unwatched, watched, registered } = times;
    let mut add = |what, peer, values, peers| {
        let params = json!({ "what": what, "bytes": bytes });
        report.add_against(peer, "munmap", params, "ns", Comparison::of_rounds(values, peers));
    };
    add("not watched", "no library", unwatched.clone(), without);
    add("watched", "not watched", watched, unwatched.clone());
    add("watched and registered", "not watched", registered, unwatched);
    Ok(())
}

/// A ring with a cache that keeps all.
fn library() -> Result<(Ring, RingCache), String> {
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let cache = cache_over(&ring, SLOTS, ring::userfaultfd()?, Config::keeping_all())?;
    Ok((ring, cache))
}

/// The nanoseconds that unmapping takes, behind `prepare`.
fn unmap(count: usize, bytes: usize, prepare: &Preparation<'_>) -> Result<f64, String> {
    let mut took = Duration::ZERO;
    for _ in 0..count {
        let memory = ShortLived::new(Source::Map, bytes)?;
        prepare(&memory)?;
        let began = Instant::now();
        drop(memory);
        took += began.elapsed();
    }
    Ok(nanoseconds(took) / count as f64)
}

fn watch(cache: &RingCache, memory: &ShortLived) -> Result<(), String> {
    match cache.monitor().watch(memory.range()?) {
        Watch::Covered => Ok(()),
        Watch::Uncovered(why) => Err(why.to_string()),
    }
}

/// A lease that ends at once leaves the memory registered and watched.
fn register(cache: &RingCache, memory: &ShortLived) -> Result<(), String> {
    memory.lease(cache).map(drop).map_err(|error| error.to_string())
}
