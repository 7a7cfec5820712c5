//! What a command shows: one JSON object for programs, tables for people, never both.
//!
//! Standard output carries the report and nothing else; progress and complaints go to standard
//! error. Colours appear only where the stream is a terminal that has them and `NO_COLOR` is not set.
//! A report that cannot be written is a failure of the command, unless its reader has gone away.

use comfy_table::{Cell, Color, ContentArrangement, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::env;
use std::ffi::OsStr;
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
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The arguments make no sense together, or name a file that cannot be used: exit status 2,
    /// as for arguments that make no sense by themselves.
    #[error("{0}")]
    Usage(String),
    /// This machine lacks something; the text says what, and what to do. Exit status 77, by which
    /// test harnesses know a test that was skipped.
    #[error("{0}")]
    Unavailable(String),
    /// What stands in the way passes with time; the text says how: exit status 75, as `sysexits.h` has it.
    #[error("{0}")]
    ForNow(String),
}

impl Failure {
    pub(crate) fn usage(what: impl fmt::Display) -> Self {
        Self::Usage(what.to_string())
    }

    pub(crate) fn unavailable(what: impl fmt::Display) -> Self {
        Self::Unavailable(what.to_string())
    }

    pub(crate) fn for_now(what: impl fmt::Display) -> Self {
        Self::ForNow(what.to_string())
    }
}

impl Failure {
    /// The exit status that tells it.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Unavailable(_) => 77,
            Self::ForNow(_) => 75,
        }
    }
}

/// How a verdict looks to people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tone {
    /// As it should be: green.
    Good,
    /// Neither good nor bad: without a colour.
    Plain,
    /// Worth a look: yellow.
    Warning,
    /// Wrong: red.
    Bad,
}

impl Tone {
    fn color(self) -> Option<Color> {
        match self {
            Self::Good => Some(Color::Green),
            Self::Plain => None,
            Self::Warning => Some(Color::Yellow),
            Self::Bad => Some(Color::Red),
        }
    }
}

/// Where a command's report goes.
#[derive(Debug)]
pub(crate) struct Output {
    json: bool,
    /// Whether the report could not be written.
    unwritten: AtomicBool,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, unwritten: AtomicBool::new(false) }
    }

    /// Whether the report was written, or it had no reader left; said on standard error if not.
    pub(crate) fn is_written(&self) -> bool {
        // Relaxed: set by this thread, or by one that it has waited for.
        !self.unwritten.load(Ordering::Relaxed)
    }

    /// Prints `report` as JSON, or what `human` makes for people. Called once per command.
    pub(crate) fn report<T: Serialize>(&self, report: &T, human: impl FnOnce() -> String) {
        let text = if self.json { json(report) } else { human() };
        if let Err(error) = write_out(text.trim_end()) {
            self.unwritten.store(true, Ordering::Relaxed);
            self.note(format_args!("the report could not be written: {error}"));
        }
    }

    /// Says on standard error what is good to know even if the command does not come to its end.
    pub(crate) fn note(&self, what: impl fmt::Display) {
        say(what);
    }

    /// Says on standard error why the command could not begin.
    pub(crate) fn complain(&self, failure: &Failure) {
        say(failure);
    }

    /// A progress bar of `steps` steps that appears on standard error after two seconds.
    pub(crate) fn progress(&self, steps: u64, what: &'static str) -> Progress {
        Progress::new(steps, what)
    }
}

/// A line on standard error; one that cannot be written there can be written nowhere.
fn say(what: impl fmt::Display) {
    let _ = io::stderr().write_all(line(&what.to_string()).as_bytes());
}

/// What variables, names of files and reports have in them does nothing to a terminal.
fn line(what: &str) -> String {
    let is_shown = |it: &char| !it.is_control() || "\n\t".contains(*it);
    let shown = |it: char| if is_shown(&it) { it.into() } else { it.escape_default().to_string() };
    format!("pinfold: {}\n", what.chars().map(shown).collect::<String>())
}

/// A reader that went away (`| head`) is no failure of the command.
fn write_out(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    written.or_else(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Ok(()),
        _ => Err(error),
    })
}

fn json<T: Serialize>(report: &T) -> String {
    serde_json::to_string_pretty(report)
        .unwrap_or_else(|error| format!("{{\"error\": \"report not serialisable: {error}\"}}"))
}

/// One line under the heads, no others.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// How wide text is made where standard output has no width of its own, or a terminal does not say one.
const PIPE_WIDTH: u16 = 100;

/// Narrower terminals are written to as if they had this.
const LEAST_WIDTH: u16 = 60;

/// How wide text on standard output may be, in columns.
pub(crate) fn width() -> u16 {
    usable(Table::new().width())
}

/// A terminal over a serial line, or in a harness, has zero columns: it does not know.
fn usable(said: Option<u16>) -> u16 {
    match said {
        None | Some(0) => PIPE_WIDTH,
        Some(width) => width.max(LEAST_WIDTH),
    }
}

/// Whether a stream shows no colours, by the two variables that programs agree on.
fn is_plain(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_some_and(|value| !value.is_empty()) || term.is_some_and(|term| term == "dumb")
}

/// An empty table with these column heads, as wide as its content; plain where no colours are shown.
fn wide_table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(heads.to_vec());
    let plain = is_plain(env::var_os("NO_COLOR").as_deref(), env::var_os("TERM").as_deref());
    if plain || !io::stdout().is_terminal() {
        table.force_no_tty();
    }
    table
}

/// An empty table with these column heads, whose cells are text that may go on in the next line.
pub(crate) fn table(heads: &[&str]) -> Table {
    let mut table = wide_table(heads);
    table.set_width(width()).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// What one cell of a matrix says, and how it looks.
pub(crate) type Entry = Option<(String, Tone)>;

/// A row of a matrix: what it is about, and an entry for each column.
pub(crate) type Row = (String, Vec<Entry>);

/// A matrix of words. Where its columns would not fit, a paragraph for each row instead, which names the
/// columns of each word: words in narrow columns would be cut.
pub(crate) fn matrix(corner: &str, heads: &[&str], rows: &[Row]) -> String {
    let all: Vec<&str> = std::iter::once(corner).chain(heads.iter().copied()).collect();
    let mut table = wide_table(&all);
    for (name, entries) in rows {
        let cells = entries.iter().map(|entry| match entry {
            Some((text, tone)) => cell(text, *tone),
            None => Cell::new(""),
        });
        table.add_row(std::iter::once(Cell::new(name)).chain(cells).collect::<Vec<_>>());
    }
    let drawn = table.lines().next().map_or(0, |line| line.chars().count());
    let room = if io::stdout().is_terminal() { width() } else { MATRIX_WIDTH };
    if drawn <= room.into() { table.to_string() } else { paragraphs(heads, rows) }
}

/// How wide a matrix may be where standard output is no terminal, and so is looked at by programs.
const MATRIX_WIDTH: u16 = 160;

fn paragraphs(heads: &[&str], rows: &[Row]) -> String {
    let paragraph = |(name, entries): &Row| {
        let mut said: Vec<(&str, Vec<&str>)> = Vec::new();
        for (head, entry) in heads.iter().zip(entries) {
            let Some((text, _)) = entry else { continue };
            match said.iter_mut().find(|(word, _)| word == text) {
                Some((_, columns)) => columns.push(head),
                None => said.push((text, vec![head])),
            }
        }
        let parts: Vec<String> =
            said.iter().map(|(word, columns)| format!("{word}: {}", columns.join(", "))).collect();
        wrapped(&format!("{name}: {}", parts.join("; ")), 4)
    };
    rows.iter().map(paragraph).collect::<Vec<_>>().join("\n")
}

/// `text` in lines that fit, all but the first indented.
pub(crate) fn wrapped(text: &str, indent: usize) -> String {
    wrapped_at(text, indent, width().into())
}

fn wrapped_at(text: &str, indent: usize, width: usize) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split(' ') {
        let longer = line.chars().count() + 1 + word.chars().count();
        if !line.trim().is_empty() && longer > width {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n")
}

/// A cell in the colour of `tone`.
pub(crate) fn cell(text: impl fmt::Display, tone: Tone) -> Cell {
    let cell = Cell::new(text);
    match tone.color() {
        Some(color) => cell.fg(color),
        None => cell,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_that_does_not_know_its_width_is_written_to_as_a_pipe() {
        assert_eq!([None, Some(0)].map(usable), [PIPE_WIDTH; 2]);
        assert_eq!([Some(20), Some(132)].map(usable), [LEAST_WIDTH, 132]);
    }

    #[test]
    fn a_variable_or_a_dumb_terminal_takes_the_colours_away() {
        let some = |text| Some(OsStr::new(text));
        assert!(is_plain(some("1"), some("xterm")) && is_plain(None, some("dumb")));
        assert!(!is_plain(None, some("xterm")) && !is_plain(some(""), None));
    }

    #[test]
    fn what_is_said_does_nothing_to_a_terminal() {
        assert_eq!(line("a\u{1b}[2J\u{9b}é\r"), "pinfold: a\\u{1b}[2J\\u{9b}é\\r\n");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrapped_at("one two three four", 2, 9), "one two\n  three\n  four");
        assert_eq!(wrapped_at("unbreakable is long", 0, 4), "unbreakable\nis\nlong");
        assert_eq!(wrapped_at("short", 2, 9), "short");
    }

    #[test]
    fn a_matrix_that_does_not_fit_keeps_its_words() {
        let entry = |word: &str| Some((word.to_owned(), Tone::Plain));
        let heads: Vec<String> = (0..40).map(|column| format!("column{column}")).collect();
        let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
        let row = ("munmap".to_owned(), heads.iter().map(|_| entry("uncached")).collect());
        let text = matrix("change", &heads, &[row]);
        assert!(text.starts_with("munmap: uncached: column0, column1"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= width().into()), "{text}");
        let small = matrix("change", &["a"], &[("munmap".into(), vec![entry("fresh")])]);
        assert!(small.contains("change") && small.contains('─'), "{small}");
    }
}
