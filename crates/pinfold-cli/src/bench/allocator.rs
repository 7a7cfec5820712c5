//! What it costs, and saves, to have the allocator keep memory.
//!
//! A program of its own, for each allocator and each policy: its demand goes up and down between 4
//! and 256 MiB, in buffers of 64 KiB to 4 MiB of which each is used when it is made and some again,
//! and between the phases it rests, so that allocators that wait before they give memory back
//! get to it. The program is this command, started again with the allocator before libc.

use super::Bench;
use crate::block::register_ahead;
use crate::device::{Ring, registrar_of};
use crate::output::{Failure, Output};
use pinfold::allocator::{self, Kept};
use pinfold::budget::{Budget, Kind, Terms};
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::IoUring;
use pinfold::{AddressRange, Cache, Config, Registrar};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether memory is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(super) enum Policy {
    /// The allocator does as it does.
    Default,
    /// It keeps memory.
    Kept,
}

impl Policy {
    const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Kept => "kept",
        }
    }
}

/// The allocators, and what has to stand before libc for each.
const ALLOCATORS: [(&str, Option<&str>); 3] = [
    ("glibc", None),
    ("jemalloc", Some("libjemalloc.so.2")),
    ("mimalloc", Some("libmimalloc.so.2")),
];

/// How much memory is in use in each phase, in MiB.
const PHASES: [usize; 8] = [16, 192, 32, 256, 8, 128, 64, 4];
/// How many buffers are made in each phase.
const BUFFERS: usize = 600;
/// How many of those in use are used again for each that is made.
const USED_AGAIN: usize = 2;
/// Buffers have lengths between these, each doubling equally likely, in bytes.
const LENGTHS: (usize, usize) = (64 << 10, 4 << 20);
const SEED: u64 = 7;

/// What a program with this demand came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Figures {
    /// What serves `malloc`.
    allocator: String,
    /// What was set, in words.
    settings: String,
    demand_peak: u64,
    resident_peak: u64,
    resident_end: u64,
    pinned_peak: u64,
    pinned_end: u64,
    budget: u64,
    registrations: u64,
    hits: u64,
    invalidations: u64,
    seconds: f64,
}

/// Measures every allocator that there is, both ways.
pub(super) fn measure(rest_ms: u64, output: &Output) -> Result<Vec<Bench>, Failure> {
    let progress = output.progress(2 * ALLOCATORS.len() as u64, "allocator");
    let mut benches = Vec::new();
    for (name, library) in ALLOCATORS {
        let both = [Policy::Default, Policy::Kept].map(|policy| {
            let figures = run(library, policy, rest_ms);
            progress.advance(1);
            figures
        });
        let [default, kept] = both;
        let (default, kept) = (default?, kept?);
        if default.allocator != name {
            output.note(format!("skipped: {name} is not installed here"));
            continue;
        }
        if !kept.settings.is_empty() {
            output.note(&kept.settings);
        }
        benches.extend(rows(name, Policy::Default, &default, &default));
        benches.extend(rows(name, Policy::Kept, &kept, &default));
    }
    Ok(benches)
}

fn run(library: Option<&str>, policy: Policy, rest_ms: u64) -> Result<Figures, Failure> {
    let program = std::env::current_exe().map_err(Failure::unavailable)?;
    let mut command = Command::new(program);
    command.args(["bench", "allocator", "--demand", policy.name()]);
    command.args(["--rest-ms", &rest_ms.to_string()]);
    if let Some(library) = library {
        // The dynamic linker goes on without one that it does not find.
        command.env("LD_PRELOAD", library);
    }
    let output = command.output().map_err(Failure::unavailable)?;
    serde_json::from_slice(&output.stdout)
        .map_err(|_| Failure::unavailable(String::from_utf8_lossy(&output.stderr).trim_end()))
}

/// One row for each figure; the ratio is that to the program whose allocator does as it does.
fn rows(
    allocator: &'static str,
    policy: Policy,
    figures: &Figures,
    default: &Figures,
) -> Vec<Bench> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let values = |of: &Figures| {
        [
            ("demand_peak", mib(of.demand_peak), "MiB"),
            ("resident_peak", mib(of.resident_peak), "MiB"),
            ("resident_end", mib(of.resident_end), "MiB"),
            ("pinned_peak", mib(of.pinned_peak), "MiB"),
            ("pinned_end", mib(of.pinned_end), "MiB"),
            ("budget", mib(of.budget), "MiB"),
            ("registrations", of.registrations as f64, "registrations"),
            ("hits", of.hits as f64, "gets"),
            ("invalidations", of.invalidations as f64, "regions"),
            ("seconds", of.seconds, "s"),
        ]
    };
    let both = values(figures).into_iter().zip(values(default));
    both.map(|((figure, value, unit), (_, before, _))| Bench {
        name: "allocator",
        params: json!({ "allocator": allocator, "policy": policy.name(), "figure": figure }),
        value,
        unit,
        ratio: (policy == Policy::Kept && before > 0.0).then(|| value / before),
    })
    .collect()
}

type Library = Cache<IoUring, Arc<Userfaultfd>>;

/// Is the program with irregular demand; prints its figures.
pub(super) fn demand(policy: Policy, rest_ms: u64) -> Result<(), Failure> {
    let kept = match policy {
        Policy::Default => Vec::new(),
        Policy::Kept => allocator::keep_memory(allocator::Policy::default()),
    };
    let device = Ring::open(4096)?;
    let registrar = registrar_of(&device, 4096).map_err(Failure::unavailable)?;
    let budget =
        Budget::discover(Kind::IoUring, registrar.limits()).map_err(Failure::unavailable)?;
    let share = budget.share(Terms::default()).map_err(Failure::unavailable)?;
    let monitor = Arc::new(Userfaultfd::new().map_err(Failure::unavailable)?);
    let config = Config { piece_bytes: LENGTHS.1, ..Config::keeping_all() };
    let library = pinfold::cache_within(share, registrar, monitor, config);
    let library = Arc::new(library.map_err(Failure::unavailable)?);
    let mut program = Program::new(&library);
    for megabytes in PHASES {
        program.phase(megabytes << 20)?;
        std::thread::sleep(Duration::from_millis(rest_ms));
    }
    program.buffers.clear();
    std::thread::sleep(Duration::from_millis(rest_ms));
    let figures = program.figures(&kept, budget.total().bytes as u64);
    let text = serde_json::to_string(&figures).map_err(Failure::unavailable)?;
    writeln!(std::io::stdout(), "{text}").map_err(Failure::unavailable)
}

struct Program<'l> {
    library: &'l Library,
    random: fastrand::Rng,
    buffers: Vec<Vec<u8>>,
    in_use: usize,
    demand_peak: usize,
    pinned_peak: u64,
    busy: Duration,
}

impl<'l> Program<'l> {
    fn new(library: &'l Library) -> Self {
        Self {
            library,
            random: fastrand::Rng::with_seed(SEED),
            buffers: Vec::new(),
            in_use: 0,
            demand_peak: 0,
            pinned_peak: 0,
            busy: Duration::ZERO,
        }
    }

    /// Makes buffers, uses them, and frees others as soon as more than `most` bytes are in use.
    fn phase(&mut self, most: usize) -> Result<(), Failure> {
        let start = Instant::now();
        for _ in 0..BUFFERS {
            let length = self.length();
            while self.in_use + length > most.max(LENGTHS.1) {
                let which = self.random.usize(..self.buffers.len());
                self.in_use -= self.buffers.swap_remove(which).len();
            }
            self.buffers.push(vec![1; length]);
            self.in_use += length;
            self.demand_peak = self.demand_peak.max(self.in_use);
            self.use_buffer(self.buffers.len() - 1)?;
            for _ in 0..USED_AGAIN {
                let which = self.random.usize(..self.buffers.len());
                self.use_buffer(which)?;
            }
        }
        self.busy += start.elapsed();
        Ok(())
    }

    /// Any length, down to bytes: what a program asks for is not round.
    fn length(&mut self) -> usize {
        let doublings = (LENGTHS.1 / LENGTHS.0).ilog2();
        let least = LENGTHS.0 << self.random.u32(..doublings);
        least + self.random.usize(..least)
    }

    fn use_buffer(&mut self, which: usize) -> Result<(), Failure> {
        let buffer = &self.buffers[which];
        let range = AddressRange::new(buffer.as_ptr().expose_provenance(), buffer.len());
        let range = range.map_err(Failure::unavailable)?;
        register_ahead(self.library, range).map_err(Failure::unavailable)?;
        self.pinned_peak = self.pinned_peak.max(self.library.statistics().pinned_bytes);
        Ok(())
    }

    fn figures(&self, kept: &[Kept], budget: u64) -> Figures {
        let statistics = self.library.statistics();
        let (resident_end, resident_peak) = (resident("VmRSS:"), resident("VmHWM:"));
        let settings: Vec<String> = kept.iter().map(ToString::to_string).collect();
        Figures {
            allocator: serving(),
            settings: settings.join("; "),
            demand_peak: self.demand_peak as u64,
            resident_peak,
            resident_end,
            pinned_peak: self.pinned_peak,
            pinned_end: statistics.pinned_bytes,
            budget,
            registrations: statistics.registrations,
            hits: statistics.hits,
            invalidations: statistics.invalidations,
            seconds: self.busy.as_secs_f64(),
        }
    }
}

fn serving() -> String {
    allocator::serving_malloc().to_string()
}

/// A line of `/proc/self/status`, in bytes; 0 if it is not there.
fn resident(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}
