//! `pinfold events`: every kind of mapping change against this machine's monitor, judged by what
//! the device really moved.
//!
//! Each row fills memory with old bytes, sends it through the cache so that it is cached if it
//! ever will be, changes the mapping, fills the memory with new bytes and moves it again, once out
//! of the memory and once into it. [`trial`] walks through the catalogue of changes one by one,
//! [`special`] through what takes several threads, a child or a stack, [`direct`] through what happens
//! to pages of a file whose entries are gone. [`picture`] draws the matrix.

mod direct;
mod picture;
mod special;
mod trial;

use crate::change::{Backing, DirectFile, Mutation, Route};
use crate::choice;
use crate::device::Kind;
use crate::output::{self, Failure, Output, Tone, Verdict};
use crate::plot;
use crate::port::{self, MakeMonitor, Port, Strategy, Wiring};
use crate::races::Stop;
use comfy_table::Cell;
use pinfold::{Config, Cover, Monitor};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `pinfold events`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The device that moves the data
    #[arg(long, value_enum, default_value_t)]
    registrar: Kind,
    /// The monitor to judge
    #[arg(long, value_enum, default_value_t)]
    monitor: choice::Wanted,
    /// Judge pages of this file or block device instead, which are paged out and replaced in it; what
    /// it holds is lost
    #[arg(long, value_name = "PATH")]
    direct: Option<PathBuf>,
    /// Draw the matrix into this file
    #[arg(long, value_name = "FILE", conflicts_with = "direct")]
    svg: Option<PathBuf>,
    /// Which cache to judge; `naive` proves that the judgement can fail
    #[arg(long, value_enum, default_value_t, hide = true)]
    cache: Strategy,
}

/// What became of one event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Judgement {
    /// This machine cannot show it; the note says why.
    Skipped,
    /// Right data, and the memory had been cached: the monitor saw the change.
    Fresh,
    /// Right data, and the memory was never cached.
    Uncached,
    /// Wrong data, and the monitor says openly that it cannot see this change.
    Blind,
    /// Wrong data where the monitor claims to see.
    Stale,
}

impl Judgement {
    fn name(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Fresh => "fresh",
            Self::Uncached => "uncached",
            Self::Blind => "blind",
            Self::Stale => "STALE",
        }
    }

    fn tone(self) -> Tone {
        match self {
            Self::Fresh => Tone::Good,
            Self::Uncached => Tone::Plain,
            Self::Skipped | Self::Blind => Tone::Warning,
            Self::Stale => Tone::Bad,
        }
    }

    /// What is told to a feed is told by the C library's functions and by no other route.
    fn of(finding: &Finding, cover: Cover, route: Route) -> Self {
        match (finding.right, finding.cached) {
            (false, _) if cover == Cover::Undetected => Self::Blind,
            (false, _) if cover == Cover::Reported && route == Route::Other => Self::Blind,
            (false, _) => Self::Stale,
            (true, true) => Self::Fresh,
            (true, false) => Self::Uncached,
        }
    }
}

/// What was found out about one event.
#[derive(Debug)]
struct Finding {
    /// Whether what was moved after the change was what the memory held.
    right: bool,
    /// Whether the memory was in the cache before.
    cached: bool,
    /// What else there is to say.
    note: Option<String>,
}

/// One cell of the matrix.
#[derive(Debug, Serialize)]
struct Event {
    event: &'static str,
    mapping: &'static str,
    /// `send`, `receive`, or `both` where one row judges both.
    direction: &'static str,
    verdict: Judgement,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    monitor: &'static str,
    registrar: &'static str,
    cache: &'static str,
    fresh: usize,
    uncached: usize,
    blind: usize,
    stale: usize,
    skipped: usize,
    events: Vec<Event>,
}

impl Report {
    fn new(monitor: &'static str, arguments: &Arguments, events: Vec<Event>) -> Self {
        let count = |verdict| events.iter().filter(|event| event.verdict == verdict).count();
        Self {
            monitor,
            registrar: arguments.registrar.name(),
            cache: arguments.cache.name(),
            fresh: count(Judgement::Fresh),
            uncached: count(Judgement::Uncached),
            blind: count(Judgement::Blind),
            stale: count(Judgement::Stale),
            skipped: count(Judgement::Skipped),
            events,
        }
    }
}

/// How many threads use the device at once.
const LANES: usize = 2;

pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict, Failure> {
    arguments.monitor.prepare()?;
    let report = match arguments.cache {
        Strategy::Naive => judge_all(port::deaf, arguments, output),
        Strategy::Pinfold if arguments.registrar.is_on_demand() => {
            judge_all(port::unneeded, arguments, output)
        }
        Strategy::Pinfold => {
            let monitor = port::monitor(arguments.monitor)?;
            choice::tell_refusals(&monitor, output);
            judge_all(port::same_as(&monitor), arguments, output)
        }
    }?;
    if let Some(file) = &arguments.svg {
        plot::write(file, &picture::picture(&report))?;
    }
    output.report(&report, || human(&report, arguments.direct.is_some()));
    Ok(Verdict::of(report.stale == 0))
}

fn judge_all(
    make_monitor: MakeMonitor,
    arguments: &Arguments,
    output: &Output,
) -> Result<Report, Failure> {
    let monitor = make_monitor()?;
    let wiring = Wiring { kind: arguments.registrar, slots: 1024, lanes: LANES, audit: false };
    let port = Port::open(wiring, monitor.clone(), Config::keeping_all())?;
    if let Some(path) = &arguments.direct {
        DirectFile::open(path).map_err(|error| Failure::usage(format!("--direct: {error}")))?;
        let events = direct::ALL.iter().map(|row| row.judge(&port, &monitor, path)).collect();
        return Ok(Report::new(monitor.name(), arguments, events));
    }
    let trials = trial::all();
    let progress = output.progress((trials.len() + special::COUNT) as u64, "events");
    let mut events = Vec::new();
    for trial in trials {
        events.push(trial.judge(&port, &monitor));
        progress.advance(1);
    }
    for special in special::all() {
        events.push(special.judge(&port, &monitor, make_monitor));
        progress.advance(1);
    }
    Ok(Report::new(monitor.name(), arguments, events))
}

/// An event out of what was found, or of why nothing was.
fn event(
    event: &'static str,
    mapping: &'static str,
    direction: &'static str,
    (cover, route): (Cover, Route),
    found: Result<Finding, Stop>,
) -> Event {
    match found {
        Ok(finding) => {
            let verdict = Judgement::of(&finding, cover, route);
            Event { event, mapping, direction, verdict, note: finding.note }
        }
        Err(stop) => {
            let note = Some(stop.to_string());
            Event { event, mapping, direction, verdict: Judgement::Skipped, note }
        }
    }
}

/// Tries again while other threads are faster with the address.
fn persistently(mut attempt: impl FnMut() -> Result<Finding, Stop>) -> Result<Finding, Stop> {
    const TRIES: usize = 20;
    let mut found = attempt();
    for _ in 1..TRIES {
        match &found {
            Err(stop) if stop.is_passing() => found = attempt(),
            _ => break,
        }
    }
    found
}

fn human(report: &Report, is_direct: bool) -> String {
    let mut text = match is_direct {
        true => format!("{}\n\n", list("pages of a file", &report.events)),
        false => format!("{}\n{}\n\n", matrix(report), specials(report)),
    };
    for note in notes(report) {
        text.push_str(&format!("  {note}\n"));
    }
    text.push_str(&format!(
        "registrar: {}, monitor: {}, cache: {}\n{} fresh (cached, and the change was seen), {} uncached (never \
         cached, so never wrong),\n{} blind (wrong data, and the monitor says that it cannot see \
         this), {} stale (wrong data), {} skipped\n",
        report.registrar,
        report.monitor,
        report.cache,
        report.fresh,
        report.uncached,
        report.blind,
        report.stale,
        report.skipped
    ));
    text
}

/// One row per change, one column per kind of memory; a cell is the worse of both directions.
fn matrix(report: &Report) -> String {
    let row = |mutation: &Mutation| {
        let verdict = |backing: Backing| {
            let worst = worst(report, mutation.name(), backing.name())?;
            Some((worst.name().to_owned(), worst.tone()))
        };
        (mutation.to_string(), Backing::ALL.map(verdict).to_vec())
    };
    let rows: Vec<output::Row> = Mutation::ALL.iter().map(row).collect();
    output::matrix("change", &Backing::ALL.map(Backing::short_name), &rows)
}

fn specials(report: &Report) -> comfy_table::Table {
    let is_special = |event: &&Event| event.direction == special::DIRECTION;
    list("several threads, a child, a stack", report.events.iter().filter(is_special))
}

/// One row per event.
fn list<'e>(heading: &str, events: impl IntoIterator<Item = &'e Event>) -> comfy_table::Table {
    let mut table = output::table(&[heading, "verdict", "note"]);
    for event in events {
        let note = event.note.as_deref().unwrap_or_default();
        let verdict = output::cell(event.verdict.name(), event.verdict.tone());
        table.add_row([Cell::new(event.event), verdict, Cell::new(note)]);
    }
    table
}

fn worst(report: &Report, name: &str, mapping: &str) -> Option<Judgement> {
    let same = |event: &&Event| event.event == name && event.mapping == mapping;
    report.events.iter().filter(same).map(|event| event.verdict).max()
}

/// Why rows were skipped, each reason once.
fn notes(report: &Report) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    for event in report.events.iter().filter(|event| event.verdict == Judgement::Skipped) {
        let why = event.note.as_deref().unwrap_or_default();
        let note = format!("skipped on {}: {why}", event.mapping);
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_data_is_excused_only_where_the_monitor_owns_up() {
        let of = |right, cached, cover, route| {
            Judgement::of(&Finding { right, cached, note: None }, cover, route)
        };
        for route in [Route::Library, Route::Other] {
            assert_eq!(of(false, true, Cover::Undetected, route), Judgement::Blind);
            for cover in [Cover::Detected, Cover::NotCached, Cover::Harmless] {
                assert_eq!(of(false, true, cover, route), Judgement::Stale);
                assert_eq!(of(false, false, cover, route), Judgement::Stale);
            }
            assert_eq!(of(true, true, Cover::Detected, route), Judgement::Fresh);
            assert_eq!(of(true, false, Cover::NotCached, route), Judgement::Uncached);
        }
        assert_eq!(of(false, true, Cover::Reported, Route::Library), Judgement::Stale);
        assert_eq!(of(false, true, Cover::Reported, Route::Other), Judgement::Blind);
    }
}
