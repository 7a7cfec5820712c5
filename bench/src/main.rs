//! What Pinfold's cache costs, beside UCX's, in one run.
//!
//! `cargo run --release -p pinfold-bench --features peers -- [BENCH] [--json]`. Without the
//! feature `peers` (which needs Debian's `libucx-dev`) ours runs alone.
//!
//! What is measured is the cache: the device does nothing, and a monitor's check is one load
//! except where monitors are compared. Both sides do the same work in turns, in short rounds; a
//! ratio is the median of the rounds' own ratios, ours to the peer's, and less is better except
//! for multiples of one thread's throughput (unit "x").
//!
//! The order of layers, each using only what stands above it: `allocator`, `load_monitor`,
//! `null`, `workload` (our side's parts), `peer`, `rounds`, `report`, then `benches`, a file each.

mod allocator;
mod benches;
mod load_monitor;
mod null;
mod peer;
mod report;
mod rounds;
mod workload;

use clap::{Parser, ValueEnum};
use report::Report;
use std::process::ExitCode;

#[derive(Parser, Debug)]
#[command(name = "pinfold-bench", version, about = "What Pinfold costs, beside its peers")]
struct Arguments {
    /// What to measure
    #[arg(value_enum, default_value_t = Bench::All)]
    bench: Bench,
    /// Print one JSON object on standard output and nothing else there
    #[arg(long)]
    json: bool,
    /// Makes the order of accesses the same again
    #[arg(long)]
    seed: Option<u64>,
    /// How many rounds each median is of
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Bench {
    /// get + release of what is cached
    Hit,
    /// get of what is not, until its registration is given back
    Miss,
    /// Two threads, as a multiple of one; and what limits cost
    Scaling,
    /// Bytes for each region
    Memory,
    /// What changes of other memory cost a hit
    Events,
    /// Whether hits wait for another thread's registrations
    Blocked,
    /// What each monitor's check costs a hit
    Monitors,
    /// All of them
    All,
}

/// What every bench is told.
#[derive(Clone, Copy, Debug)]
struct Options {
    seed: u64,
    rounds: usize,
}

impl Options {
    /// The numbers that make the order of accesses.
    fn random(self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = peer::keep_hooks_out() {
        Report::new(arguments.json).remark(&format!("pinfold-bench: {error}"));
        return ExitCode::from(2);
    }
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let options = Options { seed, rounds: arguments.rounds.into() };
    let mut report = Report::new(arguments.json);
    report.remark(&format!("seed {seed}"));
    match run(arguments.bench, options, &mut report).and_then(|()| report.print()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report.remark(&format!("pinfold-bench: {error}"));
            ExitCode::from(2)
        }
    }
}

fn run(bench: Bench, options: Options, report: &mut Report) -> Result<(), String> {
    let all = [
        (Bench::Hit, benches::hit::run as fn(Options, &mut Report) -> Result<(), String>),
        (Bench::Miss, benches::miss::run),
        (Bench::Scaling, benches::scaling::run),
        (Bench::Memory, benches::memory::run),
        (Bench::Events, benches::events::run),
        (Bench::Blocked, benches::blocked::run),
        (Bench::Monitors, benches::monitors::run),
    ];
    let asked = all.into_iter().filter(|(each, _)| bench == Bench::All || bench == *each);
    asked.into_iter().try_for_each(|(_, run)| run(options, report))
}
