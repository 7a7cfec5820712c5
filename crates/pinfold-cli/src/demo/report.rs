//! What the demo found: rows for programs, a table and three sentences for people.

use super::{Arguments, Tally};
use crate::output::{self, Tone};
use crate::strategy::Counts;
use serde::Serialize;
use std::time::Duration;

/// The demo's JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    messages: u64,
    seed: u64,
    registrar: &'static str,
    file: String,
    largest_bytes: usize,
    strategies: Vec<Row>,
    held: bool,
    /// Whether the device was simulated: then no bytes moved, and there are no times.
    simulated: bool,
    /// What this machine refused, where that is why.
    #[serde(skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

/// One strategy.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    name: &'static str,
    /// Messages of which at least one byte differed from the file.
    wrong: u64,
    /// Time spent in sends.
    seconds: f64,
    gib_per_s: f64,
    /// The same for messages from buffers that had not changed since their last use.
    steady_gib_per_s: f64,
    /// How many times as fast as from memory registered beforehand such messages are: the median
    /// over turns, in which both do the same within milliseconds.
    steady_ratio: f64,
    registrations: u64,
    hits: u64,
}

impl Row {
    pub(super) fn new(
        name: &'static str,
        tally: &Tally,
        counts: Counts,
        steady_ratio: f64,
    ) -> Self {
        Self {
            name,
            wrong: tally.wrong,
            seconds: tally.time.as_secs_f64(),
            gib_per_s: gib_per_s(tally.bytes, tally.time),
            steady_gib_per_s: gib_per_s(tally.steady_bytes, tally.steady_time),
            steady_ratio,
            registrations: counts.registrations,
            hits: counts.hits,
        }
    }

    /// Only the naive cache is here to go wrong.
    fn as_expected(&self) -> bool {
        (self.name == "naive") == (self.wrong > 0)
    }

    fn cells(&self) -> Vec<comfy_table::Cell> {
        let tone = if self.wrong == 0 { Tone::Good } else { Tone::Bad };
        vec![
            comfy_table::Cell::new(self.name),
            output::cell(self.wrong, tone),
            number(format!("{:.3}", self.seconds)),
            number(format!("{:.2}", self.gib_per_s)),
            number(format!("{:.2}", self.steady_gib_per_s)),
            number(self.registrations),
            number(self.hits),
        ]
    }
}

#[allow(clippy::cast_precision_loss)] // a throughput of three digits
fn gib_per_s(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / f64::from(1 << 30) / time.as_secs_f64() }
}

fn number(value: impl std::fmt::Display) -> comfy_table::Cell {
    comfy_table::Cell::new(value).set_alignment(comfy_table::CellAlignment::Right)
}

impl Report {
    pub(super) fn new(arguments: &Arguments, largest_bytes: usize, strategies: Vec<Row>) -> Self {
        Self {
            messages: arguments.messages(),
            seed: arguments.seed,
            registrar: arguments.registrar.name(),
            file: arguments.file.display().to_string(),
            largest_bytes,
            held: strategies.iter().all(Row::as_expected),
            strategies,
            simulated: false,
            because: None,
        }
    }

    /// The same, of the simulated device, and why.
    pub(super) fn simulated(self, because: Option<String>) -> Self {
        let (registrar, file) = ("simulated", String::new());
        Self { registrar, file, simulated: true, because, ..self }
    }

    /// Whether the naive cache, and only that, sent wrong data.
    pub(super) fn held(&self) -> bool {
        self.held
    }

    pub(super) fn for_people(&self) -> String {
        if self.simulated {
            return self.simulated_for_people();
        }
        let heads =
            ["strategy", "wrong", "seconds", "GiB/s", "steady GiB/s", "registrations", "hits"];
        let mut table = output::table(&heads);
        for row in &self.strategies {
            table.add_row(row.cells());
        }
        format!(
            "{} messages of 4 KiB to {} KiB from {} through {}, seed {}\n{table}\n{}\n{}\n{}",
            self.messages,
            self.largest_bytes / 1024,
            self.file,
            self.registrar,
            self.seed,
            self.about_naive(),
            self.about_pinfold(),
            self.about_speed(),
        )
    }

    fn simulated_for_people(&self) -> String {
        let because = self.because.iter().map(|why| {
            format!("{why}\n\nSo this is the SIMULATED device: the same program and the real cache, but no bytes move.\n")
        });
        let mut table = output::table(&["strategy", "wrong", "registrations", "hits"]);
        for row in &self.strategies {
            table.add_row([0, 1, 5, 6].map(|column| row.cells()[column].clone()));
        }
        format!(
            "{}{} messages of 4 KiB to {} KiB through the simulated device, seed {}\n{table}\n{}\n{}",
            because.collect::<String>(),
            self.messages,
            self.largest_bytes / 1024,
            self.seed,
            output::wrapped(&self.about_naive(), 0),
            output::wrapped(&self.about_pinfold(), 0),
        )
    }

    fn row(&self, name: &str) -> Option<&Row> {
        self.strategies.iter().find(|row| row.name == name)
    }

    fn about_naive(&self) -> String {
        match self.row("naive").map_or(0, |row| row.wrong) {
            0 => "naive: nothing wrong, so too few buffers changed to show the bug: send more \
                  messages."
                .into(),
            wrong => format!(
                "naive: {wrong} messages carried old bytes, without any error: the address was \
                 known, the pages behind it were new."
            ),
        }
    }

    fn about_pinfold(&self) -> String {
        let Some(row) = self.row("pinfold") else { return String::new() };
        match row.wrong {
            0 => format!(
                "pinfold: every byte right; the {} reported what had changed, so it registered {} \
                 times and reused {} times.",
                if self.simulated { "monitor" } else { "kernel" },
                row.registrations,
                row.hits
            ),
            wrong => {
                format!("pinfold: {wrong} messages WRONG. This is a defect: please report it.")
            }
        }
    }

    /// The speed of reuse, compared with memory that was registered beforehand.
    fn about_speed(&self) -> String {
        let percent = |name| self.row(name).map_or(0.0, |row| 100.0 * row.steady_ratio);
        format!(
            "speed from unchanged buffers, memory registered beforehand being 100 %: pinfold {:.0} \
             %, copying {:.0} %, registering each time {:.0} %.",
            percent("pinfold"),
            percent("copy"),
            percent("uncached")
        )
    }
}
