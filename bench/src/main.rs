//! What Pinfold costs, compared with its peers, in one run.
//!
//! `cargo run --release -p pinfold-bench --features peers -- [BENCH] [--json]`. Without the
//! feature `peers` (which needs Debian's `libucx-dev`) ours runs alone.
//!
//! What is measured is the cache, mostly: the device does nothing, and a monitor's check is one load
//! except where monitors, real devices or the library as a whole are measured. Both sides do the same work
//! in turns, in short rounds; a ratio is the median of the rounds' own ratios, ours to the peer's, and less is better except
//! for multiples of one thread's throughput (unit "x"), transfers (GiB/s) and shares of hits.
//!
//! The order of layers, each using only what stands before it: `machine`, `question`, `null`,
//! `workload` (our side's parts), `ring` (a real device),
//! `traces`, `models`, `peer`, `rounds`, `report`, `short_lived`, `neighbour`, `demand`, then `benches`, a
//! file each. Transfers are measured by the command's library, `pinfold_cli::transfer`.

mod benches;
mod demand;
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
    /// What to measure; `all` leaves out what is measured only when named
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
    /// Be the program whose demand is measured by `allocator`, and print what it came to
    #[arg(long = demand::OPTION, hide = true)]
    demand: Option<demand::Policy>,
    /// With `allocator`: how long the program rests after each phase, in milliseconds
    #[arg(long = demand::REST_OPTION, default_value_t = 1000)]
    rest_ms: u64,
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
    /// Memory that does not stay, compared with registering it for each use
    Churn,
    /// A pool's buffers, compared with allocators of unregistered memory
    Pool,
    /// What operations cost next to more and more of what they do not touch; fails where that grows
    Scale,
    /// Making a monitor, a registrar and a cache
    Startup,
    /// `munmap` without the library, with it and of watched memory
    Munmap,
    /// Registered memory made huge, moved and trimmed under a stream of transfers; fails where a byte is wrong
    Suspend,
    /// What it costs, and saves, to have the allocator keep memory; only when named: it takes minutes
    Allocator,
    /// What the eBPF programs cost those they watch and those they do not; only when named
    Ebpf,
    /// RDMA transfers from pinned pages and from pages on demand; only when named
    OnDemand,
    /// How long the cache's lock is held at most, whatever there is; fails above 50 us
    #[cfg(feature = "holds")]
    Holds,
    /// All of them, but what is measured only when named
    All,
}

impl Bench {
    /// Whether it is measured only when named: it takes minutes, or a privilege with which it burdens every process
    /// meanwhile, or a device that few machines have.
    const fn is_only_named(self) -> bool {
        matches!(self, Self::Allocator | Self::Ebpf | Self::OnDemand)
    }
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
    /// How long a program with irregular demand rests after each phase.
    rest: Duration,
}

impl Options {
    fn of(arguments: &Arguments) -> Self {
        let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
        let rest = Duration::from_millis(arguments.rest_ms);
        Self { seed, rounds: arguments.rounds.into(), quick: arguments.quick, rest }
    }

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
    let options = Options::of(&arguments);
    let outcome = match (&arguments.show, arguments.demand) {
        (Some(file), _) => Report::read(file).and_then(|report| show(&report, &arguments)),
        (None, Some(policy)) => demand::serve(policy, options.seed, options.rest),
        (None, None) if arguments.neighbour => neighbour::serve(),
        (None, None) => peer::keep_hooks_out().and_then(|()| measure(&arguments, options)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::remark(&format!("pinfold-bench: {error}"));
            ExitCode::from(2)
        }
    }
}

fn measure(arguments: &Arguments, options: Options) -> Result<(), String> {
    let mut report = Report::new(arguments.json);
    report.remark(&format!("seed {}", options.seed));
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
        // Before others leave monitors of the process's own: one row is of a process without the library.
        (Bench::Munmap, benches::munmap::run as fn(Options, &mut Report) -> Result<(), String>),
        (Bench::Startup, benches::startup::run),
        (Bench::Hit, benches::hit::run),
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
        (Bench::Suspend, benches::suspend::run),
        (Bench::Allocator, benches::allocator::run),
        (Bench::Ebpf, benches::ebpf::run),
        (Bench::OnDemand, benches::on_demand::run),
        #[cfg(feature = "holds")]
        (Bench::Holds, benches::holds::run),
    ];
    let is_asked = |each: Bench| bench == each || bench == Bench::All && !each.is_only_named();
    let asked = all.into_iter().filter(|(each, _)| is_asked(*each));
    asked.into_iter().try_for_each(|(_, run)| run(options, report))
}
