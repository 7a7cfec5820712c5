//! What it costs to get data out of landing pages into its target, by method and length; and the
//! lengths from which pages are exchanged, written down for this machine.

use super::Bench;
use crate::device::{Device, Kind};
use crate::output::{Failure, Output};
use crate::port::{AnyMonitor, unaudited};
use pinfold::Config;
use pinfold::landing::{Crossover, Measured};
use pinfold::listed;
use pinfold::monitor::Userfaultfd;
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

listed! {
    /// The pages that targets and landing places are made of.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Pages {
        Small => "small",
        Huge => "huge",
    }
}

impl Pages {
    /// What crossovers of io_uring with such pages are kept under.
    const fn file(self) -> &'static str {
        match self {
            Self::Small => "io_uring-small",
            Self::Huge => "io_uring-huge",
        }
    }
}

/// Room for 64 MiB that lie as their targets do.
const PIECE: usize = 128 << 20;

/// Lands messages of all lengths, with the target watched for changes and not.
pub(super) fn measure() -> Result<Vec<(Pages, bool, Vec<Measured>)>, Failure> {
    let device = Device::open(Kind::IoUring, 4096)?;
    let registrar = unaudited(device.registrar(16)?);
    let monitor: AnyMonitor = Userfaultfd::shared().map_err(Failure::unavailable)?;
    let config = Config { piece_bytes: PIECE, ..Config::keeping_all() };
    let cache = pinfold::cache(registrar, monitor, config).map_err(Failure::unavailable)?;
    let cases = Pages::ALL.into_iter().flat_map(|pages| [(pages, true), (pages, false)]);
    cases
        .map(|(pages, watched)| {
            let measured = Crossover::measure(&cache, pages == Pages::Huge, watched)
                .map_err(Failure::unavailable)?;
            Ok((pages, watched, measured))
        })
        .collect()
}

/// The rows of a report: each way compared with a copy, everything counted, and what of it is left to wait
/// for when the data is there.
pub(super) fn rows(cases: &[(Pages, bool, Vec<Measured>)]) -> Vec<Bench> {
    let of = |&(pages, watched, ref measured): &(Pages, bool, Vec<Measured>)| {
        measured.iter().flat_map(|each| rows_of(pages, watched, each)).collect::<Vec<_>>()
    };
    cases.iter().flat_map(of).collect()
}

fn rows_of(pages: Pages, watched: bool, each: &Measured) -> Vec<Bench> {
    let copy = each.copy.as_secs_f64();
    let row = |name, method, time: Duration| Bench {
        name,
        params: json!({
            "bytes": each.bytes, "pages": pages.name(), "watched": watched, "method": method,
        }),
        value: time.as_secs_f64() * 1e6,
        unit: "us",
        ratio: Some(copy / time.as_secs_f64()),
    };
    vec![
        row("landing", "copy", each.copy),
        row("landing", "exchange", each.exchange + each.exchange_refill),
        row("landing", "replace", each.replace + each.replace_refill),
        row("landing, registering left out", "exchange", each.exchange),
        row("landing, registering left out", "replace", each.replace),
    ]
}

/// Writes down what was measured with targets watched, as they are by default, and says where.
pub(super) fn store(cases: &[(Pages, bool, Vec<Measured>)], output: &Output) {
    for (pages, _, measured) in cases.iter().filter(|(_, watched, _)| *watched) {
        let Some(file) = Crossover::default_file(pages.file()) else { continue };
        let crossover = Crossover::of(measured);
        match crossover.store(&file) {
            Ok(()) => output.note(format_args!("{}: {crossover}", file.display())),
            Err(error) => output.note(error),
        }
    }
}

/// What is known of this machine, for `pinfold probe`.
#[derive(Debug, Serialize)]
pub(crate) struct Known {
    pages: &'static str,
    /// From which length on pages are exchanged; `null` if everything is copied.
    exchange_from_bytes: Option<usize>,
    /// Whether that was measured here.
    measured: bool,
    detail: String,
}

/// What was written down on this machine.
pub(crate) fn known() -> Vec<Known> {
    Pages::ALL.map(known_of).into()
}

fn known_of(pages: Pages) -> Known {
    let file = Crossover::default_file(pages.file());
    let loaded = file.map(|file| Crossover::load(&file));
    let crossover = Crossover::stored(pages.file());
    let measured = matches!(loaded, Some(Ok(_)));
    let detail = match loaded {
        Some(Ok(_)) => crossover.to_string(),
        _ => "not measured on this machine, so everything is copied: run `pinfold bench landing`"
            .into(),
    };
    Known { pages: pages.name(), exchange_from_bytes: crossover.bytes(), measured, detail }
}

impl Known {
    /// One line for people.
    pub(crate) fn line(&self) -> String {
        format!("landing, {} pages: {}", self.pages, self.detail)
    }
}
