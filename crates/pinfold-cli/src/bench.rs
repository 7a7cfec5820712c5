//! `pinfold bench`: what transfers cost here, and what the library writes down about this machine: from which length
//! on pages are exchanged, and what each way to send memory costs. All else is measured by `pinfold-bench`.
//!
//! Whatever is compared is measured in one run, in turns: in each round every contender has a turn
//! of some milliseconds, each round begins with another one, and what is reported of two contenders
//! is the median of their ratios within a round. A machine that slows down for a while slows all of
//! them.

pub(crate) mod landing;
pub(crate) mod strategies;

use crate::output::{self, Failure, Output, Verdict};
use crate::transfer::{self, Scope, Throughput};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The longest message of `strategies` unless another is asked for, in bytes.
const LONGEST: usize = 256 << 20;

/// Options of `pinfold bench`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// What to measure; everything but `strategies`, which takes minutes, unless named
    what: Option<What>,
    /// How many rounds to take medians of
    #[arg(long, default_value_t = 41, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Draw what `strategies` finds out into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How long the longest message of `strategies` is, in bytes, 4096 at least; what is measured with
    /// less than 64 MiB is not written down [default: 268435456]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(4096..))]
    longest: Option<u64>,
}

/// A group of measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum What {
    /// Sending from one buffer over and over, by strategy and size
    Transfer,
    /// From landing pages into the target, by copying and by exchanging pages; named alone, it writes
    /// down from which length on pages are exchanged
    Landing,
    /// Every way to send memory at every length, compared with the one that the library chooses; only when
    /// named, and it writes down what each way costs here
    Strategies,
}

/// The bench's JSON object.
#[derive(Debug, Serialize)]
struct Report {
    benches: Vec<Bench>,
}

/// One measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Bench {
    pub(crate) name: &'static str,
    pub(crate) params: Value,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// The median of the rounds' ratios to the contender that `params` or the name implies, where
    /// there is one: above 1 is better than that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
}

/// Measures.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    if arguments.what == Some(What::Strategies) {
        return compare_strategies(arguments, output);
    }
    if arguments.svg.is_some() {
        return Err(Failure::usage("--svg draws `strategies` only"));
    }
    if arguments.longest.is_some() {
        return Err(Failure::usage("--longest is for `strategies` only"));
    }
    let wanted = |what| arguments.what.is_none_or(|only| only == what);
    let rounds = arguments.rounds;
    let mut benches = Vec::new();
    if wanted(What::Transfer) {
        let scope = Scope::Everything;
        let progress = output.progress(scope.steps(rounds), "transfer");
        let rows = transfer::measure(scope, rounds, &|| progress.advance(1))?;
        benches.extend(rows.iter().map(transfer_row));
    }
    if wanted(What::Landing) {
        let cases = landing::measure()?;
        benches.extend(landing::rows(&cases));
        if arguments.what == Some(What::Landing) {
            landing::store(&cases, output);
        }
    }
    let report = Report { benches };
    output.report(&report, || for_people(&report));
    Ok(Verdict::Held)
}

fn compare_strategies(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    let Arguments { rounds, longest, .. } = *arguments;
    let longest = longest.map_or(LONGEST, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let lengths = strategies::lengths(longest, output);
    let progress = output.progress(strategies::steps(rounds, &lengths), "strategies");
    let advance = || progress.advance(1);
    let outcomes = strategies::measure_all(rounds, longest, &lengths, output, &advance)?;
    drop(progress);
    if let Some(file) = &arguments.svg {
        strategies::plot(&outcomes).write(file)?;
    }
    let benches = outcomes.iter().flat_map(strategies::Outcome::rows).collect();
    output.report(&Report { benches }, || strategies::table(&outcomes));
    Ok(Verdict::Held)
}

fn transfer_row(row: &Throughput) -> Bench {
    let Throughput { strategy, bytes, batch, gib_per_s, ratio, .. } = *row;
    Bench {
        name: "transfer",
        params: json!({ "bytes": bytes, "batch": batch, "strategy": strategy }),
        value: gib_per_s,
        unit: "GiB/s",
        ratio: Some(ratio),
    }
}

fn for_people(report: &Report) -> String {
    let mut table = output::table(&["bench", "of", "value", "unit", "times as fast"]);
    for bench in &report.benches {
        let ratio = bench.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}"));
        table.add_row(vec![
            bench.name.into(),
            params(&bench.params),
            format!("{:.3}", bench.value),
            bench.unit.into(),
            ratio,
        ]);
    }
    format!("{table}\n{}", output::wrapped(ABOUT_RATIOS, 0))
}

/// So that no reader divides one column by another and finds another number.
const ABOUT_RATIOS: &str = "values are medians of their own rounds; times as fast: the median of the \
    rounds' ratios to what the row is compared with, above 1 is better, whatever the unit";

fn params(params: &Value) -> String {
    let Some(params) = params.as_object() else { return String::new() };
    let words: Vec<String> =
        params.iter().map(|(key, value)| format!("{key}={}", plain(value))).collect();
    words.join(" ")
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
