//! What the eBPF programs cost: an unwatched process, a watched one, one whose changes are
//! logged; and a look at their word.
//!
//! Attaching takes long, so a round takes turns without the programs, then with them, then without them.

use super::Bench;
use crate::block::{Block, Origin};
use crate::medians::{median, times_faster};
use crate::output::Failure;
use pinfold::monitor::{Ebpf, NoMonitor};
use pinfold::{AddressRange, Monitor};
use pinfold_ebpf::Programs;
use serde_json::json;
use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Instant;

/// How many times the programs are loaded at most: that takes the kernel's verifier a while.
const MOST_ROUNDS: u32 = 5;
/// How many turns of each kind there are in a round.
const TURNS: usize = 6;
/// How many changes are timed at once, and how many times in a turn.
const BATCH: usize = 16;
const BATCHES: usize = 12;
const BYTES: usize = 64 << 10;
const CHECKS: u32 = 100_000;

/// To what the changes are reported.
#[derive(Clone, Copy)]
enum Telling {
    /// The programs are not loaded.
    Unloaded,
    /// They are, and this process has no view.
    Unwatched,
    /// It has one, and wishes for nothing there.
    Watched,
    /// It is told.
    Logged,
}

const TELLINGS: [(Telling, &str); 4] = [
    (Telling::Unloaded, "unloaded"),
    (Telling::Unwatched, "unwatched"),
    (Telling::Watched, "watched"),
    (Telling::Logged, "logged"),
];

/// Nanoseconds of a change, by who is told, for two kinds of changes.
#[derive(Default)]
struct Times {
    unmap: [Vec<f64>; 4],
    discard: [Vec<f64>; 4],
    check: [Vec<f64>; 2],
}

/// Nanoseconds; ratios to the row before, so that below 1 is dearer.
pub(super) fn measure(rounds: u32) -> Result<Vec<Bench>, Failure> {
    let mut times = Times::default();
    for _ in 0..rounds.min(MOST_ROUNDS) {
        round(&mut times)?;
    }
    let mut rows = Vec::new();
    for (change, times) in [("munmap", &times.unmap), ("discard", &times.discard)] {
        for (telling, name) in TELLINGS {
            let nanoseconds = &times[telling as usize];
            rows.push(Bench {
                name: "ebpf",
                params: json!({ "change": change, "bytes": BYTES, "process": name }),
                value: median(nanoseconds.clone()),
                unit: "ns",
                ratio: (telling as usize)
                    .checked_sub(1)
                    .map(|before| ratio(nanoseconds, &times[before])),
            });
        }
    }
    let [without, with] = &times.check;
    for (name, nanoseconds) in [("none", without), ("ebpf", with)] {
        rows.push(Bench {
            name: "check",
            params: json!({ "monitor": name }),
            value: median(nanoseconds.clone()),
            unit: "ns",
            ratio: (name == "ebpf").then(|| times_faster(with, without)),
        });
    }
    Ok(rows)
}

/// Of medians, because there are twice as many turns without the programs.
fn ratio(contender: &[f64], base: &[f64]) -> f64 {
    median(base.to_vec()) / median(contender.to_vec())
}

fn round(times: &mut Times) -> Result<(), Failure> {
    let no_wish = |_: &Block| ();
    for _ in 0..TURNS {
        turn(times, Telling::Unloaded, &no_wish)?;
    }
    let programs = Programs::load().map_err(Failure::unavailable)?;
    let this = pinfold_ebpf::this_process().map_err(Failure::unavailable)?;
    let none = NoMonitor::new().map_err(Failure::unavailable)?;
    for _ in 0..TURNS {
        turn(times, Telling::Unwatched, &no_wish)?;
        let view = programs.view(this.as_fd()).map_err(Failure::unavailable)?;
        let id = view.id();
        let monitor = Ebpf::from_view(view).map_err(Failure::unavailable)?;
        turn(times, Telling::Watched, &no_wish)?;
        turn(times, Telling::Logged, &|block| {
            if let Ok(range) = AddressRange::new(block.address(), block.length()) {
                monitor.watch(range);
            }
        })?;
        times.check[0].push(check(&none));
        times.check[1].push(check(&monitor));
        drop(monitor);
        programs.forget(id);
    }
    drop(programs);
    for _ in 0..TURNS {
        turn(times, Telling::Unloaded, &no_wish)?;
    }
    Ok(())
}

/// Nanoseconds of a check.
fn check(monitor: &impl Monitor) -> f64 {
    let start = Instant::now();
    for _ in 0..CHECKS {
        black_box(monitor.check()).ok();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CHECKS)
}

/// The medians of some batches of changes.
fn turn(times: &mut Times, telling: Telling, prepare: &dyn Fn(&Block)) -> Result<(), Failure> {
    let (mut discards, mut unmaps) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        let mut blocks = (0..BATCH).map(|_| mapping()).collect::<Result<Vec<_>, _>>()?;
        blocks.iter().for_each(prepare);
        discards.push(batch(|| blocks.iter_mut().for_each(|block| drop(block.discard()))));
        blocks.iter_mut().for_each(touch);
        unmaps.push(batch(|| drop(blocks)));
    }
    times.discard[telling as usize].push(median(discards));
    times.unmap[telling as usize].push(median(unmaps));
    Ok(())
}

/// Nanoseconds of each of a batch.
fn batch(changes: impl FnOnce()) -> f64 {
    let start = Instant::now();
    changes();
    start.elapsed().as_secs_f64() * 1e9 / BATCH as f64
}

fn mapping() -> Result<Block, Failure> {
    let mut block = Block::new(Origin::Mapping, BYTES).map_err(Failure::unavailable)?;
    touch(&mut block);
    Ok(block)
}

fn touch(block: &mut Block) {
    for page in (0..BYTES).step_by(4096) {
        block.write(page, &[1]);
    }
}
