//! `pinfold simulate`: random programs on the simulated fabric, from a seed.
//!
//! Nothing here touches the machine: the device, its peers and the clock are simulated, the cache is
//! the real one. What is checked, and how a failure is run again, stands in
//! [`pinfold_sim::simulation`]. With `--scale` it answers another question, in [`scale`].

mod scale;

use crate::output::{self, Failure, Output, Tone, Verdict};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use comfy_table::Cell;
use pinfold_sim::fabric::Mutant;
use pinfold_sim::simulation::{FaultKind, Outcome, SimulationPlan, simulate};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// Options of `pinfold simulate`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The seed of programs to run again
    #[arg(long)]
    seed: Option<u64>,
    /// How many steps
    #[arg(long, default_value_t = 5_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// What may go wrong; may be given several times [default: everything]
    #[arg(long = "fault", value_name = "FAULT", value_parser = fault_parser())]
    faults: Vec<FaultKind>,
    /// Nothing may go wrong
    #[arg(long, conflicts_with = "faults")]
    no_faults: bool,
    /// A defect on purpose, which proves that the check can fail
    #[arg(long, hide = true, value_parser = mutant_parser())]
    mutant: Option<Mutant>,
    #[command(flatten)]
    scale: scale::ScaleArguments,
}

fn fault_parser() -> impl TypedValueParser<Value = FaultKind> {
    named(FaultKind::ALL, FaultKind::name)
}

fn mutant_parser() -> impl TypedValueParser<Value = Mutant> {
    named(Mutant::ALL, Mutant::name)
}

/// One of `all`, by its name.
fn named<T: Copy + Send + Sync + 'static, const N: usize>(
    all: [T; N],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all.map(name)).try_map(move |given| {
        let found = all.into_iter().find(|&it| name(it) == given);
        found.ok_or(std::fmt::Error)
    })
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    steps: u64,
    wrong: u64,
    lost_completions: u64,
    covert_reconnects: u64,
    stuck: u64,
    leaked: u64,
    untold: u64,
    seconds: f64,
    faults: Vec<&'static str>,
    happened: BTreeMap<&'static str, u64>,
    /// The first thing that went wrong.
    first: Option<First>,
}

#[derive(Debug, Serialize)]
struct First {
    seed: u64,
    steps: u64,
    step: u64,
    note: String,
    /// What runs it again.
    options: String,
}

pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    if arguments.scale.scale {
        let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
        return scale::report(&arguments.scale, seed, output);
    }
    let plan = plan(arguments);
    output.note(format_args!("seed {}: {} runs the same again", plan.seed, options(&plan)));
    let begun = Instant::now();
    let progress = output.progress(plan.steps, "simulate");
    let mut shown = 0;
    let outcome = simulate(&plan, |so_far| {
        progress.advance(so_far.steps - shown);
        shown = so_far.steps;
        true
    });
    drop(progress);
    let report = report(&plan, &outcome, begun.elapsed().as_secs_f64());
    output.report(&report, || human(&report));
    Ok(Verdict::of(outcome.held()))
}

fn plan(arguments: &Arguments) -> SimulationPlan {
    let all = arguments.faults.is_empty() && !arguments.no_faults;
    SimulationPlan {
        seed: arguments.seed.unwrap_or_else(|| fastrand::u64(..)),
        steps: arguments.steps,
        faults: if all { FaultKind::ALL.to_vec() } else { arguments.faults.clone() },
        mutant: arguments.mutant,
    }
}

/// Those with which the command runs `plan`.
fn options(plan: &SimulationPlan) -> String {
    let SimulationPlan { seed, steps, faults, mutant } = plan;
    let faults = match &faults[..] {
        [] => " --no-faults".to_owned(),
        all if *all == FaultKind::ALL => String::new(),
        some => some.iter().map(|fault| format!(" --fault {}", fault.name())).collect(),
    };
    let mutant = mutant.map(|mutant| format!(" --mutant {}", mutant.name()));
    format!("--seed {seed} --steps {steps}{faults}{}", mutant.unwrap_or_default())
}

fn report(plan: &SimulationPlan, outcome: &Outcome, seconds: f64) -> Report {
    let first = outcome.first.as_ref().map(|first| First {
        seed: first.seed,
        steps: first.steps,
        step: first.step,
        note: first.note.clone(),
        options: options(&first.again(plan)),
    });
    Report {
        seed: plan.seed,
        steps: outcome.steps,
        wrong: outcome.wrong,
        lost_completions: outcome.lost_completions,
        covert_reconnects: outcome.covert_reconnects,
        stuck: outcome.stuck,
        leaked: outcome.leaked,
        untold: outcome.untold,
        seconds,
        faults: plan.faults.iter().map(|fault| fault.name()).collect(),
        happened: outcome.happened.counts().into_iter().collect(),
        first,
    }
}

fn human(report: &Report) -> String {
    let first = report.first.as_ref().map_or_else(String::new, |first| {
        let First { step, note, options, .. } = first;
        format!("first: {options}, step {step}: {note}\n\n")
    });
    format!(
        "{}\n{}\n\n{first}seed {}: {} steps in {:.1} s\n",
        findings(report),
        happened(report),
        report.seed,
        report.steps,
        report.seconds
    )
}

fn findings(report: &Report) -> comfy_table::Table {
    let mut table = output::table(&["finding", "times"]);
    for (name, count) in [
        ("wrong bytes", report.wrong),
        ("lost completions", report.lost_completions),
        ("covert reconnects", report.covert_reconnects),
        ("stuck", report.stuck),
        ("leaked registrations", report.leaked),
        ("changes not told", report.untold),
    ] {
        let tone = if count == 0 { Tone::Good } else { Tone::Bad };
        table.add_row([Cell::new(name), output::cell(count, tone)]);
    }
    table
}

fn happened(report: &Report) -> comfy_table::Table {
    let mut table = output::table(&["what happened", "times"]);
    for (name, count) in &report.happened {
        table.add_row([Cell::new(name.replace('_', " ")), Cell::new(count)]);
    }
    table
}
