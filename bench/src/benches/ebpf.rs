//! What the eBPF programs cost: a process that they do not watch, one that they watch, one whose changes are
//! logged; and what the monitor's check takes.
//!
//! Attaching takes long, so a round takes turns without the programs, then with them, then without them.

use crate::Options;
use crate::machine::failed;
use crate::report::Report;
use crate::rounds::{Comparison, median, nanoseconds};
use pinfold::monitor::{Ebpf, NoMonitor};
use pinfold::{Monitor, Watch};
use pinfold_ebpf::Programs;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::trial::TrialArea;
use serde_json::json;
use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Instant;

/// How many times the programs are loaded at most: that takes the kernel's verifier a while.
const MOST_ROUNDS: usize = 5;
/// How many turns of each kind there are in a round.
const TURNS: usize = 6;
/// How many changes are timed at once, and how many times in a turn.
const BATCH: usize = 16;
const BATCHES: usize = 12;
const BYTES: usize = 64 << 10;
const CHECKS: usize = 100_000;

/// To what the changes are reported.
#[derive(Clone, Copy)]
enum Telling {
    /// The programs are not loaded.
    Unloaded,
    /// They are, and this process has no view.
    Unwatched,
    /// It has one, and wants to hear of nothing there.
    Watched,
    /// Its view logs the changes.
    Logged,
}

/// Each, with what it is compared with.
const COMPARED: [(&str, Telling, &str, Telling); 3] = [
    ("unwatched", Telling::Unwatched, "unloaded", Telling::Unloaded),
    ("watched", Telling::Watched, "unwatched", Telling::Unwatched),
    ("logged", Telling::Logged, "watched", Telling::Watched),
];

/// Nanoseconds of two kinds of changes by [`Telling`], and of a check without and with the programs.
#[derive(Default)]
struct Times {
    unmap: [Vec<f64>; 4],
    discard: [Vec<f64>; 4],
    check: [Vec<f64>; 2],
}

/// One entry for each kind of change and each way of being watched, compared with the one before.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    if let Err(why) = Programs::load() {
        report.remark(&format!("skipped: ebpf: {why}"));
        return Ok(());
    }
    let mut times = Times::default();
    for _ in 0..options.rounds.min(MOST_ROUNDS) {
        round(&mut times)?;
    }
    for (change, times) in [("munmap", &times.unmap), ("discard", &times.discard)] {
        for (name, telling, peer, before) in COMPARED {
            let params = json!({ "change": change, "bytes": BYTES, "process": name });
            // Of medians, because there are twice as many turns without the programs.
            let of = |telling: Telling| median(times[telling as usize].iter().copied());
            let value = of(telling).unwrap_or(f64::NAN);
            report.add_against(peer, "ebpf", params, "ns", Comparison::of(value, of(before)));
        }
    }
    let [without, with] = times.check;
    let comparison = Comparison::of_rounds(with, without);
    report.add_against("none", "check", json!({ "monitor": "ebpf" }), "ns", comparison);
    Ok(())
}

fn round(times: &mut Times) -> Result<(), String> {
    let unwatched = |_: &TrialArea| Ok(());
    for _ in 0..TURNS {
        turn(times, Telling::Unloaded, &unwatched)?;
    }
    let programs = Programs::load().map_err(|error| error.to_string())?;
    let this = pinfold_ebpf::this_process().map_err(|error| error.to_string())?;
    let none = NoMonitor::new().map_err(|error| error.to_string())?;
    for _ in 0..TURNS {
        turn(times, Telling::Unwatched, &unwatched)?;
        let view = programs.view(this.as_fd()).map_err(|error| error.to_string())?;
        let id = view.id();
        let monitor = Ebpf::from_view(view).map_err(|error| error.to_string())?;
        turn(times, Telling::Watched, &unwatched)?;
        turn(
            times,
            Telling::Logged,
            &|area| match area.range().map(|range| monitor.watch(range)) {
                Some(Watch::Covered) => Ok(()),
                not_watched => Err(format!("not watched: {not_watched:?}")),
            },
        )?;
        times.check[0].push(check(&none));
        times.check[1].push(check(&monitor));
        drop(monitor);
        programs.forget(id);
    }
    drop(programs);
    for _ in 0..TURNS {
        turn(times, Telling::Unloaded, &unwatched)?;
    }
    Ok(())
}

/// Nanoseconds of a check.
fn check(monitor: &impl Monitor) -> f64 {
    let start = Instant::now();
    for _ in 0..CHECKS {
        black_box(monitor.check()).ok();
    }
    nanoseconds(start.elapsed()) / CHECKS as f64
}

/// What is done with memory before it is changed.
type Preparation<'p> = dyn Fn(&TrialArea) -> Result<(), String> + 'p;

/// The medians of some batches of changes.
fn turn(times: &mut Times, telling: Telling, prepare: &Preparation<'_>) -> Result<(), String> {
    let (mut discards, mut unmaps) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        let mut areas = (0..BATCH).map(|_| area()).collect::<Result<Vec<_>, _>>()?;
        areas.iter().try_for_each(prepare)?;
        let discard = |area: &TrialArea| _ = area.advise(libc::MADV_DONTNEED);
        discards.push(batch(|| areas.iter().for_each(discard)));
        areas.iter_mut().for_each(TrialArea::touch);
        unmaps.push(batch(|| drop(areas)));
    }
    times.discard[telling as usize].extend(median(discards.into_iter()));
    times.unmap[telling as usize].extend(median(unmaps.into_iter()));
    Ok(())
}

/// Nanoseconds of each of a batch.
fn batch(changes: impl FnOnce()) -> f64 {
    let start = Instant::now();
    changes();
    nanoseconds(start.elapsed()) / BATCH as f64
}

fn area() -> Result<TrialArea, String> {
    TrialArea::private(BYTES / page_bytes()).map_err(|errno| failed("mmap", errno))
}
