//! What was measured, as a table or as JSON; the only file that writes to a standard stream.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use crate::peer;
use crate::rounds::Comparison;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::Serialize;
use serde_json::Value;

/// A line under the heads and nothing else.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// One measured figure.
#[derive(Debug, Serialize)]
pub(crate) struct Measurement {
    name: &'static str,
    /// What it depends on, as an object.
    params: Value,
    value: f64,
    unit: &'static str,
    /// Who or what `peer_value` belongs to.
    peer: Option<&'static str>,
    peer_value: Option<f64>,
    /// `value` to `peer_value`, by rounds.
    ratio: Option<f64>,
}

/// All figures of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    benches: Vec<Measurement>,
    #[serde(skip)]
    json: bool,
}

impl Report {
    /// An empty report, to be printed as one JSON object or as a table.
    pub(crate) fn new(json: bool) -> Self {
        Self { benches: Vec::new(), json }
    }

    /// Says something that is no result, where it does not mix with results.
    pub(crate) fn remark(&self, remark: &str) {
        eprintln!("{remark}");
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
        let peer = peer_value.map(|_| peer);
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

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header(["bench", "of", "pinfold", "unit", "beside", "peer", "ratio"]);
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
    fn cells(&self) -> [String; 7] {
        [
            self.name.to_string(),
            words(&self.params),
            number(Some(self.value)),
            self.unit.to_string(),
            self.peer.unwrap_or_default().to_string(),
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
