//! What a command shows: one JSON object for programs, tables for people, never both.
//!
//! Standard output carries the report and nothing else; progress and complaints go to standard
//! error. Colours appear only where the stream is a terminal.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use comfy_table::{Cell, Color, ContentArrangement, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Whether what a command shows held; the exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It held: exit status 0.
    Held,
    /// It did not hold: exit status 1.
    Broken,
}

impl Verdict {
    pub(crate) fn of(held: bool) -> Self {
        if held { Self::Held } else { Self::Broken }
    }

    pub(crate) fn exit_status(self) -> u8 {
        match self {
            Self::Held => 0,
            Self::Broken => 1,
        }
    }
}

/// Why a command could not even begin.
#[derive(Debug)]
pub enum Failure {
    /// The arguments make no sense together, or name a file that cannot be used: exit status 2,
    /// as for arguments that make no sense by themselves.
    Usage(String),
    /// This machine lacks something; the text says what, and what to do. Exit status 77, by which
    /// test harnesses know a test that was skipped.
    Unavailable(String),
}

impl Failure {
    pub(crate) fn usage(what: impl fmt::Display) -> Self {
        Self::Usage(what.to_string())
    }

    pub(crate) fn unavailable(what: impl fmt::Display) -> Self {
        Self::Unavailable(what.to_string())
    }
}

impl Failure {
    /// The exit status that tells it.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Unavailable(_) => 77,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(what) | Self::Unavailable(what)) = self;
        f.write_str(what)
    }
}

/// How a verdict looks to people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tone {
    /// As it should be: green.
    Good,
    /// Worth a look: yellow.
    Warning,
    /// Wrong: red.
    Bad,
}

impl Tone {
    fn color(self) -> Color {
        match self {
            Self::Good => Color::Green,
            Self::Warning => Color::Yellow,
            Self::Bad => Color::Red,
        }
    }
}

/// Where a command's report goes.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints `report` as JSON, or what `human` makes for people. Called once per command.
    pub(crate) fn report<T: Serialize>(&self, report: &T, human: impl FnOnce() -> String) {
        let text = if self.json { json(report) } else { human() };
        // A reader that went away (`| head`) is no failure of the command.
        let _ = writeln!(io::stdout().lock(), "{}", text.trim_end());
    }

    /// Says on standard error what is good to know even if the command does not come to its end.
    pub(crate) fn note(&self, what: impl fmt::Display) {
        eprintln!("pinfold: {what}");
    }

    /// Says on standard error why the command could not begin.
    pub(crate) fn complain(&self, failure: &Failure) {
        eprintln!("pinfold: {failure}");
    }

    /// A progress bar of `steps` steps that appears on standard error after two seconds.
    pub(crate) fn progress(&self, steps: u64, what: &'static str) -> Progress {
        Progress::new(steps, what)
    }
}

fn json<T: Serialize>(report: &T) -> String {
    serde_json::to_string_pretty(report)
        .unwrap_or_else(|error| format!("{{\"error\": \"report not serialisable: {error}\"}}"))
}

/// One line under the heads, no others.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// An empty table with these column heads; plain where standard output is no terminal.
pub(crate) fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(heads.to_vec());
    // A terminal that is narrow, or does not tell, would squeeze columns to single letters.
    if table.width().is_some_and(|width| width >= 80) {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    if !io::stdout().is_terminal() {
        table.force_no_tty();
    }
    table
}

/// A cell in the colour of `tone`.
pub(crate) fn cell(text: impl fmt::Display, tone: Tone) -> Cell {
    Cell::new(text).fg(tone.color())
}

/// How long a command may run before it shows a bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// A progress bar that stays hidden for the first two seconds. Any thread may advance it.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    since: Instant,
    shown: AtomicBool,
}

impl Progress {
    fn new(steps: u64, what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{msg:12} {wide_bar} {percent:>3}% {eta}") {
            bar.set_style(style);
        }
        bar.set_message(what);
        Self { bar, since: Instant::now(), shown: AtomicBool::new(false) }
    }

    /// Advances by `steps`.
    pub(crate) fn advance(&self, steps: u64) {
        // Relaxed: the flag guards no data; at worst two threads set the same draw target.
        if !self.shown.load(Ordering::Relaxed) && self.since.elapsed() > PATIENCE {
            self.shown.store(true, Ordering::Relaxed);
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
        self.bar.inc(steps);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
