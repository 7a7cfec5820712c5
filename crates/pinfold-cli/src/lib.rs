//! The `pinfold` command: see the classic bug of registration caches on real data, and see it gone.
//!
//! One file per subcommand; `output` is the only place that writes to a standard stream and
//! `device` the only one that moves data through a device. Every subcommand answers with a
//! `Verdict`, which becomes the exit status: 0 it held, 1 it did not hold, 2 wrong usage, 77
//! something that this machine lacks.
//!
//! It is a library so that what measures the library beside its peers (`pinfold-bench`) can use the
//! real device and the strategies that stand here: [`transfer`] is all that it needs of them.

mod bench;
mod block;
mod change;
mod demo;
mod device;
mod events;
mod medians;
mod output;
mod page;
mod port;
mod probe;
mod races;
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
    /// Print one JSON object on standard output and nothing else
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A message-passing program on real data, once with each way to register its memory
    Demo(demo::Arguments),
    /// Every kind of mapping change, judged by what the device really moved
    Events(events::Arguments),
    /// What this machine offers, what it lacks, and what to do about it
    Probe(probe::Arguments),
    /// Random programs on many threads, every byte checked
    Torture(torture::Arguments),
    /// What transfers, start-up and unmapping cost here
    Bench(bench::Arguments),
}

/// Runs the command with this process's arguments.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json);
    match run(&arguments.command, &output) {
        Ok(Verdict::Held) => ExitCode::SUCCESS,
        Ok(Verdict::Broken) => ExitCode::from(1),
        Err(failure) => {
            output.complain(&failure);
            ExitCode::from(failure.exit_status())
        }
    }
}

fn run(command: &Command, output: &Output) -> Result<Verdict, Failure> {
    match command {
        Command::Demo(arguments) => demo::run(arguments, output),
        Command::Events(arguments) => events::run(arguments, output),
        Command::Probe(arguments) => probe::run(arguments, output),
        Command::Torture(arguments) => torture::run(arguments, output),
        Command::Bench(arguments) => bench::run(arguments, output),
    }
}
