//! The `pinfold` command: see the classic bug of registration caches on real data, and see it gone.
//!
//! One file per subcommand; `output` is the only place that writes to a standard stream and
//! `device` the only one that moves data through a device. Every subcommand answers with a
//! `Verdict`, which becomes the exit status: 0 it held, 1 it did not hold or could not be reported, 2 wrong usage, 75
//! something that is in the way for now, 77 something that this machine lacks.
//!
//! It is a library so that what compares the library with its peers (`pinfold-bench`) can use the
//! real device and the strategies that stand here: [`transfer`] is all that it needs of them.
//!
//! The order of layers, each using only what stands before it: `output`, `medians`, `plot`, `block`,
//! `change`, `device`, `run`, `choice`, `port`, `strategy`, `transfer`, then the other subcommands `demo`, `races`, `events`,
//! `torture`, `simulate`, `notifyd`, `bench`, `probe`.

mod bench;
mod block;
mod change;
mod choice;
mod demo;
mod device;
mod events;
mod medians;
mod notifyd;
mod output;
pub mod plot;
mod port;
mod probe;
mod races;
mod run;
mod simulate;
mod strategy;
mod torture;
pub mod transfer;

use clap::{Parser, Subcommand};
pub use output::Failure;
use output::{Output, Verdict};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "pinfold", version, about = "Registered memory that is never stale, shown")]
struct Arguments {
    /// As behind the command
    #[arg(long, hide = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A message-passing program on real data, once with each way to register its memory
    Demo(Reported<demo::Arguments>),
    /// Every kind of mapping change, judged by what the device really moved
    Events(Reported<events::Arguments>),
    /// What this machine offers, what it lacks, and what to do about it
    Probe(Reported<probe::Arguments>),
    /// Random programs on many threads, every byte checked
    Torture(Reported<torture::Arguments>),
    /// Random programs on a simulated device and its peers, from a seed
    Simulate(Reported<simulate::Arguments>),
    /// What transfers cost here, and from which length on each way to carry them out pays
    Bench(Reported<bench::Arguments>),
    /// Run an unmodified RDMA program with cached registrations
    Run(run::Arguments),
    /// The helper that gives unprivileged programs their own mapping changes; a service for root
    Notifyd(notifyd::Arguments),
}

/// A command whose standard output is its report. (`run` leaves it to the program.)
#[derive(clap::Args)]
struct Reported<A: clap::Args> {
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    arguments: A,
}

/// Runs the command with this process's arguments.
pub fn main() -> ExitCode {
    let Arguments { json, command } = Arguments::parse();
    ExitCode::from(match &command {
        Command::Demo(command) => command.show(json, demo::run),
        Command::Events(command) => command.show(json, events::run),
        Command::Probe(command) => command.show(json, probe::run),
        Command::Torture(Reported { json: report_json, arguments }) => {
            let output = Output::new(json || *report_json);
            concluded(&output, torture::run(arguments, &output))
        }
        Command::Simulate(command) => command.show(json, simulate::run),
        Command::Bench(command) => command.show(json, bench::run),
        Command::Run(arguments) => {
            let output = Output::new(json);
            concluded(&output, run::run(arguments, &output))
        }
        Command::Notifyd(arguments) => {
            let output = Output::new(json);
            concluded(&output, notifyd::run(arguments, &output).map(Verdict::exit_status))
        }
    })
}

impl<A: clap::Args> Reported<A> {
    /// Runs the command; its exit status.
    fn show(&self, json: bool, run: fn(&A, &Output) -> Result<Verdict, Failure>) -> u8 {
        let output = Output::new(json || self.json);
        concluded(&output, run(&self.arguments, &output).map(Verdict::exit_status))
    }
}

/// A report that could not be written shows nothing, whatever it says.
fn concluded(output: &Output, status: Result<u8, Failure>) -> u8 {
    let status = status.unwrap_or_else(|failure| {
        output.complain(&failure);
        failure.exit_status()
    });
    if output.is_written() { status } else { Verdict::Broken.exit_status().max(status) }
}
