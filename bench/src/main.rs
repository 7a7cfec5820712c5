//! What Pinfold's cache costs, compared with UCX's, in one run.
//!
//! `cargo run --release -p pinfold-bench --features peers -- [BENCH] [--json]`. Without the
//! feature `peers` (which needs Debian's `libucx-dev`) ours runs alone.
//!
//! What is measured is the cache: the device does nothing, and a monitor's check is one load
//! except where monitors are compared. Both sides do the same work in turns, in short rounds; a
//! ratio is the median of the rounds' own ratios, ours to the peer's, and less is better except
//! for multiples of one thread's throughput (unit "x"), transfers (GiB/s) and shares of hits.
//!
//! The order of layers, each using only what stands before it: `machine`, `question`, `null`,
//! `workload` (our side's parts), `ring` (a real device),
//! `traces`, `models`, `peer`, `rounds`, `report`, `short_lived`, `neighbour`, then `benches`, a
//! file each. Transfers are measured by the command's library, `pinfold_cli::transfer`.

mod benches;
mod machine;
mod models;
mod neighbour;
mod null;
mod peer;
mod question;
mod report;
mod ring;
mod rounds;
mod short_lived;
mod traces;
mod workload;

use clap::{Parser, ValueEnum};
use pinfold_cli::plot::Plot;
use report::Report;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser, Debug)]
#[command(name = "pinfold-bench", version, about = "What Pinfold costs, compared with its peers")]
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
    #[arg(long, default_value_t = 21, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Do a hundredth of the work, to see that all runs: the figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Measure nothing; print what `--json` wrote into this file as a Markdown table
    #[arg(long, value_name = "FILE")]
    show: Option<PathBuf>,
    /// Be the process in which UCX's hooks are
    #[arg(long = neighbour::OPTION, hide = true)]
    neighbour: bool,
    /// With `hit`, `scale` or `churn`: draw it into this file, on two logarithmic axes; with `--show`, as it was recorded
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
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
    /// Real transfers, compared with memory registered beforehand
    Transfer,
    /// What each monitor's check costs a hit
    Monitors,
    /// How often a cache that is too small hits
    Eviction,
    /// Long ranges in step with their registration, and registered by two threads
    Pieces,
    /// Memory that does not stay, compared with registering it for each use; what watched unmapping takes
    Churn,
    /// A pool's buffers, compared with allocators of unregistered memory
    Pool,
    /// What operations cost next to more and more of what they do not touch; fails where that grows
    Scale,
    /// How long the cache's lock is held at most, whatever there is; fails above 50 us
    #[cfg(feature = "holds")]
    Holds,
    /// All of them
    All,
}

#[cfg(feature = "holds")]
#[global_allocator]
static REQUESTS: pinfold_core::holds::Requests = pinfold_core::holds::Requests;

/// What every bench is told.
#[derive(Clone, Copy, Debug)]
struct Options {
    seed: u64,
    rounds: usize,
    quick: bool,
}

impl Options {
    /// How often to do what is done `count` times.
    fn scaled(self, count: usize) -> usize {
        if self.quick { count / 100 } else { count }
    }

    /// How long to do what is done for `window`.
    fn window(self, window: Duration) -> Duration {
        if self.quick { window / 10 } else { window }
    }

    /// Whether there is time to register so many regions.
    fn can_fill(self, regions: usize) -> bool {
        !self.quick || regions <= 1_000
    }

    /// The numbers that make the order of accesses.
    fn random(self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.show {
        Some(file) => Report::read(file).and_then(|report| show(&report, &arguments)),
        None if arguments.neighbour => neighbour::serve(),
        None => peer::keep_hooks_out().and_then(|()| measure(&arguments)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::remark(&format!("pinfold-bench: {error}"));
            ExitCode::from(2)
        }
    }
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let options = Options { seed, rounds: arguments.rounds.into(), quick: arguments.quick };
    let mut report = Report::new(arguments.json);
    report.remark(&format!("seed {seed}"));
    let plot = arguments.svg.as_ref().map(|_| plot_of(arguments.bench)).transpose()?;
    // What grows is said behind the figures that show it.
    let outcome = run(arguments.bench, options, &mut report);
    let picture = plot.zip(arguments.svg.as_ref());
    let drawn = picture.map_or(Ok(()), |(plot, file)| draw(&plot(&report), file));
    report.print()?;
    outcome.and(drawn)
}

fn show(report: &Report, arguments: &Arguments) -> Result<(), String> {
    match &arguments.svg {
        Some(file) => draw(&plot_of(arguments.bench)?(report), file),
        None => {
            report.print_markdown();
            Ok(())
        }
    }
}

fn draw(plot: &Plot, file: &Path) -> Result<(), String> {
    plot.write(file).map_err(|failure| failure.to_string())
}

/// What draws the figures of a bench.
fn plot_of(bench: Bench) -> Result<fn(&Report) -> Plot, String> {
    match bench {
        Bench::Hit => Ok(benches::hit::plot),
        Bench::Churn => Ok(benches::churn::plot),
        Bench::Scale => Ok(benches::scale::plot),
        _ => Err("--svg: only `hit`, `scale` and `churn` are drawn".into()),
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
        (Bench::Transfer, benches::transfer::run),
        (Bench::Monitors, benches::monitors::run),
        (Bench::Eviction, benches::eviction::run),
        (Bench::Pieces, benches::pieces::run),
        (Bench::Churn, benches::churn::run),
        (Bench::Pool, benches::pool::run),
        (Bench::Scale, benches::scale::run),
        #[cfg(feature = "holds")]
        (Bench::Holds, benches::holds::run),
    ];
    let asked = all.into_iter().filter(|(each, _)| bench == Bench::All || bench == *each);
    asked.into_iter().try_for_each(|(_, run)| run(options, report))
}
