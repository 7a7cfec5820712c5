//! `pinfold simulate --scale`: what each policy costs a node with many peers, as a table, a plot
//! and JSON.
//!
//! What is modelled, and what is not, stands in [`pinfold_sim::scale`]; `--cost NAME=MICROSECONDS`
//! changes a cost, and the report names them all with their sources.

use crate::output::{self, Failure, Output, Verdict};
use crate::plot::{Axis, Line, Plot};
use comfy_table::{Cell, CellAlignment, Table};
use pinfold_sim::PAGE_BYTES;
use pinfold_sim::scale::{
    COSTS, CallCosts, Row, ScalePolicy, Scenario, SuspensionStopped, Suspensions, run, suspend,
};
use serde::Serialize;
use std::path::PathBuf;

/// The most peers.
const MOST_PEERS: i64 = 10_000;
/// The most messages of one run.
const MOST_TRANSFERS: i64 = 10_000_000;
/// The most pages of all buffers together: a page is simulated by some hundred bytes.
const MOST_PAGES: usize = 1 << 22;
/// How many suspensions each row is made of.
const SUSPENSIONS: usize = 5;

/// Options of `pinfold simulate --scale`.
#[derive(clap::Args, Debug)]
pub(crate) struct ScaleArguments {
    /// What each policy costs a node with many peers, instead of random programs
    #[arg(long, conflicts_with_all = ["steps", "faults", "no_faults", "mutant"])]
    pub(crate) scale: bool,
    /// How many peers
    #[arg(
        long, requires = "scale", value_delimiter = ',', default_values_t = [10, 100, 1000, 10_000],
        value_parser = clap::value_parser!(i64).range(1..=MOST_PEERS)
    )]
    peers: Vec<i64>,
    /// How many messages each policy sends to all peers together
    #[arg(long, requires = "scale", default_value_t = 300_000,
        value_parser = clap::value_parser!(i64).range(1..=MOST_TRANSFERS))]
    transfers: i64,
    /// KiB of a message: 4 to 2048, in whole pages
    #[arg(long, requires = "scale", default_value_t = 64,
        value_parser = clap::value_parser!(i64).range(4..=2048))]
    message_kib: i64,
    /// Buffers for each peer
    #[arg(long, requires = "scale", default_value_t = 2,
        value_parser = clap::value_parser!(i64).range(1..=16))]
    buffers: i64,
    /// MiB that may be pinned
    #[arg(long, requires = "scale", default_value_t = 256,
        value_parser = clap::value_parser!(i64).range(1..=1 << 20))]
    budget_mib: i64,
    /// Messages in flight at once
    #[arg(long, requires = "scale", default_value_t = 64,
        value_parser = clap::value_parser!(i64).range(1..=4096))]
    window: i64,
    /// Of 100 peers, how many are hot
    #[arg(long, requires = "scale", default_value_t = 10,
        value_parser = clap::value_parser!(i64).range(1..=100))]
    hot: i64,
    /// Of 100 messages, how many go to hot peers
    #[arg(long, requires = "scale", default_value_t = 90,
        value_parser = clap::value_parser!(i64).range(0..=100))]
    hot_share: i64,
    /// Of 1000 uses of a buffer, before how many it is freed and allocated anew
    #[arg(long, requires = "scale", default_value_t = 10,
        value_parser = clap::value_parser!(i64).range(0..=1000))]
    churn: i64,
    /// A cost in microseconds, such as register=1.5; may be given several times
    #[arg(long = "cost", requires = "scale", value_name = "NAME=US", value_parser = parse_cost)]
    costs: Vec<(usize, u64)>,
    /// Writes a plot of the processor's time for each message to this file
    #[arg(long, requires = "scale", value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Writes a plot of how long a suspension stops a connection to this file
    #[arg(long, requires = "scale", value_name = "FILE")]
    pause_svg: Option<PathBuf>,
}

/// A cost's place in the list, and picoseconds.
fn parse_cost(text: &str) -> Result<(usize, u64), String> {
    let names = || COSTS.map(|cost| cost.name).join(", ");
    let (name, value) = text.split_once('=').ok_or_else(|| format!("NAME=US, of {}", names()))?;
    let place = COSTS.iter().position(|cost| cost.name == name);
    let place =
        place.ok_or_else(|| format!("no cost is called {name:?}: there are {}", names()))?;
    let microseconds: f64 = value.parse().map_err(|_| format!("{value:?} is no number"))?;
    if !(0.0..=1e6).contains(&microseconds) {
        return Err(format!("{value} is not between 0 and a second"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // in range, just above
    Ok((place, (microseconds * 1e6).round() as u64))
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    transfers: usize,
    message_bytes: usize,
    buffers: usize,
    budget_bytes: usize,
    window: usize,
    costs: Vec<CostEntry>,
    scale: Vec<Entry>,
    suspensions: Vec<SuspensionEntry>,
}

#[derive(Debug, Serialize)]
struct CostEntry {
    name: &'static str,
    microseconds: f64,
    /// Where it is from; nothing if it was given.
    source: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Entry {
    peers: usize,
    policy: &'static str,
    pinned_bytes: usize,
    within_budget: bool,
    registrations: u64,
    registrations_per_s: f64,
    hits: u64,
    evictions: u64,
    faults: u64,
    /// The processor's, for each message.
    cpu_us: f64,
    /// From wanting to send until it is known to be sent: on average, and the slowest of 100.
    latency_us: f64,
    latency_p99_us: f64,
    gib_per_s: f64,
    stale: u64,
    refused: u64,
}

#[derive(Debug, Serialize)]
struct SuspensionEntry {
    peers: usize,
    stopped: &'static str,
    connections: u64,
    resumed: u64,
    refused: u64,
    longest_pause_us: f64,
    mean_pause_us: f64,
    /// What all connections together lost to one suspension.
    connection_time_us: f64,
    pause_over_register: f64,
}

/// Runs every policy with each number of peers.
pub(super) fn report(
    arguments: &ScaleArguments,
    seed: u64,
    output: &Output,
) -> Result<Verdict, Failure> {
    let scenario = scenario(arguments, seed)?;
    output.note(format_args!("seed {seed}: --seed {seed} gives the same answers again"));
    let report = answer(arguments, scenario, output);
    if let Some(file) = &arguments.svg {
        busy_plot(&report).write(file)?;
    }
    if let Some(file) = &arguments.pause_svg {
        pause_plot(&report).write(file)?;
    }
    output.report(&report, || human(&report));
    let wrong = report.scale.iter().any(|entry| entry.stale + entry.refused > 0);
    let refused = report.suspensions.iter().any(|entry| entry.refused > 0);
    Ok(Verdict::of(!wrong && !refused))
}

/// The settings, which are small numbers by their ranges.
fn scenario(arguments: &ScaleArguments, seed: u64) -> Result<Scenario, Failure> {
    let small = |number: i64| usize::try_from(number).unwrap_or(0);
    let mut costs = CallCosts::default();
    for &(which, cost) in &arguments.costs {
        *(COSTS[which].place)(&mut costs) = cost;
    }
    let bytes = small(arguments.message_kib) << 10;
    let (budget, window) = (small(arguments.budget_mib) << 20, small(arguments.window));
    if !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(Failure::usage("--message-kib: a message is of whole pages of 4 KiB"));
    }
    if budget < bytes {
        return Err(Failure::usage("--budget-mib: it holds no message"));
    }
    let (pages, buffers) = (bytes / PAGE_BYTES, small(arguments.buffers));
    let peers = arguments.peers.iter().copied().map(small).max().unwrap_or(0);
    if peers * buffers * pages > MOST_PAGES {
        return Err(Failure::usage(format_args!(
            "{peers} peers with {buffers} buffers of {pages} pages are {} pages, and at most \
             {MOST_PAGES} are simulated: fewer --peers or --buffers, or a smaller --message-kib",
            peers * buffers * pages
        )));
    }
    Ok(Scenario {
        peers: 0,
        pages,
        buffers,
        budget,
        window,
        hot: small(arguments.hot),
        hot_share: small(arguments.hot_share),
        churn: small(arguments.churn),
        transfers: small(arguments.transfers),
        costs,
        seed,
    })
}

fn answer(arguments: &ScaleArguments, scenario: Scenario, output: &Output) -> Report {
    let peers = arguments.peers.iter().filter_map(|&peers| usize::try_from(peers).ok());
    let scenarios: Vec<_> = peers.map(|peers| Scenario { peers, ..scenario }).collect();
    let steps = scenarios.len() * (ScalePolicy::ALL.len() + SuspensionStopped::ALL.len());
    let progress = output.progress(steps as u64, "simulate --scale");
    let (mut scale, mut suspensions) = (Vec::new(), Vec::new());
    for scenario in &scenarios {
        for policy in ScalePolicy::ALL {
            scale.push(entry(scenario, policy, run(scenario, policy)));
            progress.advance(1);
        }
        for stopped in SuspensionStopped::ALL {
            let found = suspend(scenario, stopped, SUSPENSIONS);
            suspensions.push(suspension_entry(scenario, stopped, found));
            progress.advance(1);
        }
    }
    Report {
        seed: scenario.seed,
        transfers: scenario.transfers,
        message_bytes: scenario.pages * PAGE_BYTES,
        buffers: scenario.buffers,
        budget_bytes: scenario.budget,
        window: scenario.window,
        costs: cost_entries(scenario.costs),
        scale,
        suspensions,
    }
}

fn cost_entries(costs: CallCosts) -> Vec<CostEntry> {
    let value = |mut costs: CallCosts, cost: &pinfold_sim::scale::Cost| *(cost.place)(&mut costs);
    let entry = |cost: &pinfold_sim::scale::Cost| {
        let (now, default) = (value(costs, cost), value(CallCosts::default(), cost));
        let source = (now == default).then_some(cost.source);
        CostEntry { name: cost.name, microseconds: micros(now) / 1000.0, source }
    };
    COSTS.iter().map(entry).collect()
}

/// Microseconds.
#[expect(clippy::cast_precision_loss)] // for people
fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}

#[expect(clippy::cast_precision_loss)] // for people
fn entry(scenario: &Scenario, policy: ScalePolicy, row: Row) -> Entry {
    let transfers = scenario.transfers as f64;
    // Where every cost is 0 nothing takes any time, and a rate has to be a number all the same.
    let seconds = micros(row.total.max(1)) / 1e6;
    let bytes = transfers * (scenario.pages * PAGE_BYTES) as f64;
    Entry {
        peers: scenario.peers,
        policy: policy.name(),
        pinned_bytes: row.pinned_bytes,
        within_budget: row.pinned_bytes <= scenario.budget,
        registrations: row.registrations,
        registrations_per_s: row.registrations as f64 / seconds,
        hits: row.hits,
        evictions: row.evictions,
        faults: row.faults,
        cpu_us: micros(row.busy) / transfers,
        latency_us: micros(row.mean),
        latency_p99_us: micros(row.slowest_of_hundred),
        gib_per_s: bytes / seconds / f64::from(1 << 30),
        stale: row.stale,
        refused: row.refused,
    }
}

fn suspension_entry(
    scenario: &Scenario,
    stopped: SuspensionStopped,
    found: Suspensions,
) -> SuspensionEntry {
    SuspensionEntry {
        peers: scenario.peers,
        stopped: stopped.name(),
        connections: found.connections,
        resumed: found.resumed,
        refused: found.refused,
        longest_pause_us: micros(found.longest_pause),
        mean_pause_us: micros(found.mean_pause),
        connection_time_us: micros(found.connection_time),
        pause_over_register: micros(found.longest_pause) / micros(found.register.max(1)),
    }
}

fn human(report: &Report) -> String {
    format!(
        "{} messages of {} KiB to each number of peers, {} in flight, budget {} MiB\n\n{}\n\n\
         one region suspended, moved and resumed in the middle of it\n\n{}\n\n{}\nseed {}\n",
        report.transfers,
        report.message_bytes >> 10,
        report.window,
        report.budget_bytes >> 20,
        policies(report),
        suspensions(report),
        costs(report),
        report.seed
    )
}

fn right(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

#[expect(clippy::cast_precision_loss)] // for people
fn policies(report: &Report) -> Table {
    let mut table = output::table(&[
        "peers",
        "policy",
        "pinned MiB",
        "registrations/s",
        "faults",
        "evictions",
        "CPU us",
        "latency us",
        "p99 us",
        "GiB/s",
    ]);
    for entry in &report.scale {
        let mark = if entry.within_budget { "" } else { " over" };
        table.add_row([
            right(entry.peers),
            Cell::new(entry.policy),
            right(format!("{:.1}{mark}", entry.pinned_bytes as f64 / f64::from(1 << 20))),
            right(format!("{:.0}", entry.registrations_per_s)),
            right(entry.faults),
            right(entry.evictions),
            right(format!("{:.2}", entry.cpu_us)),
            right(format!("{:.1}", entry.latency_us)),
            right(format!("{:.1}", entry.latency_p99_us)),
            right(format!("{:.2}", entry.gib_per_s)),
        ]);
    }
    table
}

fn suspensions(report: &Report) -> Table {
    let mut table = output::table(&[
        "peers",
        "stopped",
        "connections",
        "longest pause us",
        "mean pause us",
        "of registering",
    ]);
    for entry in &report.suspensions {
        table.add_row([
            right(entry.peers),
            Cell::new(entry.stopped),
            right(entry.connections),
            right(format!("{:.1}", entry.longest_pause_us)),
            right(format!("{:.1}", entry.mean_pause_us)),
            right(format!("{:.0} x", entry.pause_over_register)),
        ]);
    }
    table
}

fn costs(report: &Report) -> Table {
    let mut table = output::table(&["cost", "us", "from"]);
    for cost in &report.costs {
        let source = cost.source.unwrap_or("given");
        table.add_row([Cell::new(cost.name), right(cost.microseconds), Cell::new(source)]);
    }
    table
}

const PEERS: Axis = Axis { title: "peers", base: 10.0, label: |value| format!("{value:.0}") };
const MICROSECONDS: Axis =
    Axis { title: "microseconds", base: 10.0, label: |value| format!("{value}") };

/// The processor's time for each message.
#[expect(clippy::cast_precision_loss)] // for people
fn busy_plot(report: &Report) -> Plot {
    let line = |policy: ScalePolicy| {
        let own = report.scale.iter().filter(|entry| entry.policy == policy.name());
        let points = own.map(|entry| (entry.peers as f64, entry.cpu_us)).collect();
        Line { name: policy.name().into(), points }
    };
    Plot {
        title: "Processor time for each message (simulated)".into(),
        across: PEERS,
        up: MICROSECONDS,
        lines: ScalePolicy::ALL.map(line).into(),
    }
}

/// How long a suspension stops a connection at most.
#[expect(clippy::cast_precision_loss)] // for people
fn pause_plot(report: &Report) -> Plot {
    let line = |stopped: SuspensionStopped| {
        let own = report.suspensions.iter().filter(|entry| entry.stopped == stopped.name());
        let points = own.map(|entry| (entry.peers as f64, entry.longest_pause_us)).collect();
        Line { name: stopped.name().into(), points }
    };
    Plot {
        title: "Longest pause of a connection by a suspension (simulated)".into(),
        across: PEERS,
        up: MICROSECONDS,
        lines: SuspensionStopped::ALL.map(line).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_read_in_microseconds() {
        let place = COSTS.iter().position(|cost| cost.name == "register").unwrap();
        assert_eq!(parse_cost("register=1.5"), Ok((place, 1_500_000)));
        for wrong in ["register", "register=", "register=-1", "register=nan", "rent=1"] {
            assert!(parse_cost(wrong).is_err(), "{wrong}");
        }
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        simulate: super::super::Arguments,
    }

    fn read(words: &[&str]) -> Result<Scenario, Failure> {
        let line = ["simulate", "--scale"].iter().chain(words);
        let line = <Line as clap::Parser>::try_parse_from(line).unwrap();
        scenario(&line.simulate.scale, 1)
    }

    #[test]
    fn what_has_no_room_is_not_begun() {
        assert!(read(&[]).is_ok());
        assert!(read(&["--message-kib", "2048", "--peers", "10"]).is_ok());
        let large = read(&["--message-kib", "2048", "--buffers", "16"]);
        assert!(matches!(large, Err(Failure::Usage(_))));
    }

    #[test]
    fn what_costs_nothing_has_rates_that_are_numbers() {
        let scenario = Scenario { peers: 2, ..read(&[]).unwrap() };
        let entry = entry(&scenario, ScalePolicy::ALL[0], Row::default());
        assert!(entry.gib_per_s.is_finite() && entry.registrations_per_s.is_finite());
    }
}
