//! A program with irregular demand, in a process of its own: what it needs goes up and down between 4 and 256 MiB, in
//! buffers of 64 KiB to 4 MiB of which each is used when it is made and some again. Between the phases it rests, so
//! that allocators that wait before they give memory back get to it.
//!
//! The process is this program, started again with another allocator before the C library's. It answers with a line
//! of JSON.

use crate::report;
use crate::ring::{RingCache, registrar_of, userfaultfd};
use crate::short_lived::{ShortLived, Source};
use io_uring::IoUring as Ring;
use pinfold::allocator::{self, Kept};
use pinfold::budget::{Budget, Kind, Terms};
use pinfold::{Config, Registrar};
use serde::{Deserialize, Serialize};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// The option by which the program has this demand.
pub(crate) const OPTION: &str = "demand";
/// The option that says how long it rests.
pub(crate) const REST_OPTION: &str = "rest-ms";

/// Whether memory is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Policy {
    /// The allocator does as it does.
    Default,
    /// It keeps memory.
    Kept,
}

impl Policy {
    /// For the command line.
    const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Kept => "kept",
        }
    }
}

/// How much memory is in use in each phase, in MiB.
const PHASES: [usize; 8] = [16, 192, 32, 256, 8, 128, 64, 4];
/// How many buffers are made in each phase.
const BUFFERS: usize = 600;
/// How many of those in use are used again for each that is made.
const USED_AGAIN: usize = 2;
/// Buffers have lengths between these, each doubling equally likely, in bytes.
const LENGTHS: (usize, usize) = (64 << 10, 4 << 20);
const SLOTS: u32 = 4096;

/// What a program with this demand came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// What serves `malloc`.
    pub(crate) allocator: String,
    /// What was set, in words.
    pub(crate) settings: String,
    pub(crate) demand_peak: u64,
    pub(crate) resident_peak: u64,
    pub(crate) resident_end: u64,
    pub(crate) pinned_peak: u64,
    pub(crate) pinned_end: u64,
    pub(crate) budget: u64,
    pub(crate) registrations: u64,
    pub(crate) hits: u64,
    pub(crate) invalidations: u64,
    pub(crate) seconds: f64,
}

/// Starts the program again, with `library` before the C library's allocator, and waits for what it came to.
pub(crate) fn run(
    library: Option<&str>,
    policy: Policy,
    seed: u64,
    rest: Duration,
) -> Result<Figures, String> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(format!("--{OPTION}={}", policy.name())).arg(format!("--seed={seed}"));
    command.arg(format!("--{REST_OPTION}={}", rest.as_millis()));
    if let Some(library) = library {
        // The dynamic linker goes on without one that it does not find.
        command.env("LD_PRELOAD", library);
    }
    let output = command.output().map_err(|error| format!("could not start again: {error}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, words.trim_end()));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|_| String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
}

/// Is the program; answers with its figures.
pub(crate) fn serve(policy: Policy, seed: u64, rest: Duration) -> Result<(), String> {
    let kept = match policy {
        Policy::Default => Vec::new(),
        Policy::Kept => allocator::keep_memory(allocator::Policy::default()),
    };
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let registrar = registrar_of(&ring, SLOTS).map_err(|error| error.to_string())?;
    let budget = Budget::discover(Kind::IoUring, registrar.limits());
    let budget = budget.map_err(|error| error.to_string())?;
    let share = budget.share(Terms::default()).map_err(|error| error.to_string())?;
    let config = Config { piece_bytes: LENGTHS.1, ..Config::keeping_all() };
    let cache = pinfold::cache_within(share, registrar, userfaultfd()?, config);
    let cache = cache.map_err(|error| error.to_string())?;
    let mut program = Program::new(&cache, seed);
    for megabytes in PHASES {
        program.phase(megabytes << 20)?;
        std::thread::sleep(rest);
    }
    program.buffers.clear();
    std::thread::sleep(rest);
    report::answer(&program.figures(&kept, budget.total().bytes as u64))
}

struct Program<'c> {
    cache: &'c RingCache,
    random: fastrand::Rng,
    buffers: Vec<ShortLived>,
    in_use: usize,
    demand_peak: usize,
    pinned_peak: u64,
    busy: Duration,
}

impl<'c> Program<'c> {
    fn new(cache: &'c RingCache, seed: u64) -> Self {
        Self {
            cache,
            random: fastrand::Rng::with_seed(seed),
            buffers: Vec::new(),
            in_use: 0,
            demand_peak: 0,
            pinned_peak: 0,
            busy: Duration::ZERO,
        }
    }

    /// Makes buffers, uses them, and frees others as soon as more than `most` bytes are in use.
    fn phase(&mut self, most: usize) -> Result<(), String> {
        let start = Instant::now();
        for _ in 0..BUFFERS {
            let length = self.length();
            while self.in_use + length > most.max(LENGTHS.1) {
                let which = self.random.usize(..self.buffers.len());
                self.in_use -= self.buffers.swap_remove(which).bytes();
            }
            self.buffers.push(ShortLived::new(Source::Malloc, length)?);
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

    /// A lease that ends at once leaves the buffer registered.
    fn use_buffer(&mut self, which: usize) -> Result<(), String> {
        self.buffers[which].lease(self.cache).map(drop).map_err(|error| error.to_string())?;
        self.pinned_peak = self.pinned_peak.max(self.cache.statistics().pinned_bytes);
        Ok(())
    }

    fn figures(&self, kept: &[Kept], budget: u64) -> Figures {
        let statistics = self.cache.statistics();
        let (resident_end, resident_peak) = (resident("VmRSS:"), resident("VmHWM:"));
        let settings: Vec<String> = kept.iter().map(ToString::to_string).collect();
        Figures {
            allocator: allocator::serving_malloc().to_string(),
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

/// A line of `/proc/self/status`, in bytes; 0 if it is not there.
fn resident(key: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}
