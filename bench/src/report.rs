//! What was measured, as a table or as JSON; the only file that writes to a standard stream.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use crate::machine;
use crate::peer;
use crate::rounds::Comparison;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// The columns of a table.
const HEADS: [&str; 7] = ["bench", "of", "pinfold", "unit", "beside", "peer", "ratio"];

/// A line under the heads and nothing else.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// One measured figure.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) name: String,
    /// What it depends on, as an object.
    pub(crate) params: Value,
    pub(crate) value: f64,
    unit: String,
    /// What `peer_value` belongs to.
    pub(crate) peer: Option<String>,
    pub(crate) peer_value: Option<f64>,
    /// `value` to `peer_value`, by rounds.
    pub(crate) ratio: Option<f64>,
}

/// Says something that is no result, on standard error.
pub(crate) fn remark(remark: &str) {
    eprintln!("{remark}");
}

/// Answers another process, by a line of JSON.
pub(crate) fn answer(answer: &impl Serialize) -> Result<(), String> {
    println!("{}", serde_json::to_string(answer).map_err(|error| error.to_string())?);
    Ok(())
}

/// All figures of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Where it was measured.
    machine: String,
    benches: Vec<Measurement>,
    #[serde(skip)]
    json: bool,
}

impl Report {
    /// An empty report, to be printed as one JSON object or as a table.
    pub(crate) fn new(json: bool) -> Self {
        Self { machine: machine::machine(), benches: Vec::new(), json }
    }

    /// A report that was printed as JSON, to be shown as Markdown.
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| error.to_string());
        let report = text.and_then(|text| serde_json::from_str(&text).map_err(|e| e.to_string()));
        report.map_err(|error| format!("{}: {error}", file.display()))
    }

    /// Whether nothing was measured.
    #[cfg(feature = "holds")]
    pub(crate) fn is_empty(&self) -> bool {
        self.benches.is_empty()
    }

    /// Every figure of this name, in the order of measuring.
    pub(crate) fn named(&self, name: &str) -> impl Iterator<Item = &Measurement> {
        self.benches.iter().filter(move |measurement| measurement.name == name)
    }

    /// Every figure.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Measurement> {
        self.benches.iter()
    }

    /// Says something that is no result.
    pub(crate) fn remark(&self, remark: &str) {
        self::remark(remark);
    }

    /// Whether `bench` is skipped, which is said, because something is `missing` on this machine.
    pub(crate) fn is_skipped(&self, bench: &str, missing: Option<String>) -> bool {
        let is_skipped = missing.is_some();
        missing.into_iter().for_each(|why| self.remark(&format!("skipped: {bench}: {why}")));
        is_skipped
    }

    /// Adds a comparison with UCX.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        params: Value,
        unit: &'static str,
        comparison: Comparison,
    ) {
        self.add_against(peer::NAME, name, params, unit, comparison);
    }

    /// Adds a comparison with `peer`.
    pub(crate) fn add_against(
        &mut self,
        peer: &'static str,
        name: &'static str,
        params: Value,
        unit: &'static str,
        Comparison { value, peer_value, ratio }: Comparison,
    ) {
        let (name, unit) = (name.to_string(), unit.to_string());
        let peer = peer_value.map(|_| peer.to_string());
        self.benches.push(Measurement { name, params, value, unit, peer, peer_value, ratio });
    }

    /// Prints everything.
    pub(crate) fn print(&self) -> Result<(), String> {
        if self.json {
            let text = serde_json::to_string(self).map_err(|error| error.to_string())?;
            println!("{text}");
        } else {
            println!("{}", self.table());
        }
        Ok(())
    }

    /// Prints everything as a Markdown table.
    pub(crate) fn print_markdown(&self) {
        let row = |cells: [String; 7]| format!("| {} |\n", cells.join(" | "));
        let mut text = format!("{}\n\n", self.machine);
        text += &row(HEADS.map(String::from));
        text += "|---|---|--:|---|---|--:|--:|\n";
        self.benches.iter().for_each(|measurement| text += &row(measurement.cells()));
        print!("{text}");
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header(HEADS);
        for measurement in &self.benches {
            table.add_row(measurement.cells());
        }
        for column in [2, 5, 6] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

impl Measurement {
    /// A number that it depends on; no number where it does not.
    pub(crate) fn number(&self, param: &str) -> f64 {
        self.params[param].as_f64().unwrap_or(f64::NAN)
    }

    fn cells(&self) -> [String; 7] {
        [
            self.name.to_string(),
            words(&self.params),
            number(Some(self.value)),
            self.unit.to_string(),
            self.peer.clone().unwrap_or_default(),
            number(self.peer_value),
            number(self.ratio),
        ]
    }
}

/// `{"regions":1000,"threads":2}` as `regions 1000, threads 2`; the seed stands above the table.
fn words(params: &Value) -> String {
    let pairs = params.as_object().into_iter().flatten().filter(|(key, _)| *key != "seed");
    let words: Vec<String> = pairs
        .map(|(key, value)| match value {
            Value::String(text) => format!("{key} {text}"),
            other => format!("{key} {other}"),
        })
        .collect();
    words.join(", ")
}

/// Three or so digits that matter.
fn number(value: Option<f64>) -> String {
    match value {
        None => String::new(),
        Some(0.0) => "0".into(),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 10.0 => format!("{value:.1}"),
        Some(value) if value.abs() >= 0.01 => format!("{value:.2}"),
        Some(value) => format!("{value:.1e}"),
    }
}
