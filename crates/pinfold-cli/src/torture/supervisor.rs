//! The parent of a trial: it judges a trial that died or hangs, which cannot report itself.
//!
//! The trial is this program once more, with the seed in its environment and the [`Journal`] as its
//! standard input. A trial that comes to its end prints its own report; of one that does not, the
//! supervisor reports the seed, how it ended, and at which step each thread was.

use super::Arguments;
use super::journal::{Journal, Row, Stage, Who};
use super::program::{Operation, Program};
use super::worker::is_for_a_child;
use crate::change::tasks;
use crate::output::{Failure, Output};
use serde::Serialize;
use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{env, thread};

/// The environment of a trial names its seed.
const TRIAL: &str = "PINFOLD_TORTURE_TRIAL";

/// A trial in which nothing happens for so long hangs: the longest step is a forked child that is
/// killed after two minutes.
const PATIENCE: Duration = Duration::from_secs(180);

/// How often the supervisor looks.
const INTERVAL: Duration = Duration::from_millis(20);

/// The seed of the trial that this process is; `None` if it is none.
pub(super) fn trial_seed() -> Option<u64> {
    env::var(TRIAL).ok()?.parse().ok()
}

/// What is known of a trial that did not come to its end.
#[derive(Debug, Serialize)]
struct LostReport {
    seed: u64,
    threads: u16,
    seconds: f64,
    operations: u64,
    transfers: u64,
    wrong: u64,
    lost: Lost,
}

#[derive(Debug, Serialize)]
struct Lost {
    how: String,
    threads: Vec<ThreadPlace>,
    /// Of a trial that hung: where the kernel has its threads.
    tasks: Vec<String>,
}

/// Where a thread was.
#[derive(Debug, Serialize)]
struct ThreadPlace {
    thread: usize,
    step: u64,
    operation: String,
    /// The forked child's program and place, if there was one.
    child: Option<ChildPlace>,
}

#[derive(Debug, Serialize)]
struct ChildPlace {
    seed: u64,
    step: u64,
    operation: String,
}

/// How a trial ended.
enum End {
    Status(ExitStatus),
    /// Where its threads stood.
    Hung(String),
}

/// Runs a trial in a process of its own; the exit status that tells how it went.
pub(super) fn supervise(arguments: &Arguments, output: &Output) -> Result<u8, Failure> {
    let begun = Instant::now();
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..));
    let journal = Journal::new().map_err(Failure::unavailable)?;
    let trial = Command::new("/proc/self/exe")
        .args(env::args_os().skip(1))
        .env(TRIAL, seed.to_string())
        .stdin(journal.to_inherit().map_err(Failure::unavailable)?)
        .spawn();
    let end = await_end(trial.map_err(Failure::unavailable)?, &journal)?;
    let how = match &end {
        End::Status(status) => match (status.code(), journal.read(Who::Trial).stage) {
            // It has said itself how it went, or why it could not begin.
            (Some(code @ (0 | 1)), Stage::Over) => return Ok(u8::try_from(code).unwrap_or(1)),
            (Some(code @ (2 | 77)), Stage::NotBegun) => return Ok(u8::try_from(code).unwrap_or(1)),
            _ => ended_by(*status),
        },
        End::Hung(_) => format!("no step for {} s", PATIENCE.as_secs()),
    };
    if journal.read(Who::Trial).stage == Stage::Reporting {
        output.note(format_args!("the trial with seed {seed} was lost after its report: {how}"));
        return Ok(1);
    }
    let report = LostReport::new(arguments, seed, begun.elapsed(), &journal, how, end);
    output.report(&report, || report.human());
    Ok(1)
}

fn await_end(mut trial: Child, journal: &Journal) -> Result<End, Failure> {
    let (mut contents, mut since) = (journal.contents(), Instant::now());
    loop {
        if let Some(status) = trial.try_wait().map_err(Failure::unavailable)? {
            return Ok(End::Status(status));
        }
        let now = journal.contents();
        if now != contents {
            (contents, since) = (now, Instant::now());
        }
        if since.elapsed() > PATIENCE {
            let stood = tasks(libc::pid_t::try_from(trial.id()).unwrap_or(0));
            trial.kill().and_then(|()| trial.wait()).map_err(Failure::unavailable)?;
            return Ok(End::Hung(stood));
        }
        thread::sleep(INTERVAL);
    }
}

fn ended_by(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGBUS) => "SIGBUS".into(),
        Some(libc::SIGSEGV) => "SIGSEGV".into(),
        Some(libc::SIGABRT) => "SIGABRT".into(),
        Some(libc::SIGKILL) => "SIGKILL: by the out-of-memory killer, or from outside".into(),
        Some(other) => format!("signal {other}"),
        None => format!("{status}, without a report"),
    }
}

impl LostReport {
    fn new(
        arguments: &Arguments,
        seed: u64,
        time: Duration,
        journal: &Journal,
        how: String,
        end: End,
    ) -> Self {
        let threads = usize::from(arguments.threads);
        let rows: Vec<_> = (0..threads).map(|thread| journal.read(Who::Thread(thread))).collect();
        let sum = |count: fn(&Row) -> u64| rows.iter().map(count).sum();
        let tasks = match end {
            End::Hung(stood) => stood.lines().map(Into::into).collect(),
            End::Status(_) => Vec::new(),
        };
        let place = |(thread, row): (usize, &Row)| ThreadPlace::new(journal, seed, thread, *row);
        Self {
            seed,
            threads: arguments.threads,
            seconds: time.as_secs_f64(),
            operations: sum(|row| row.step),
            transfers: sum(|row| row.transfers),
            wrong: sum(|row| row.wrong),
            lost: Lost { how, threads: rows.iter().enumerate().map(place).collect(), tasks },
        }
    }

    fn human(&self) -> String {
        let Self { seed, threads, .. } = self;
        let mut text = format!(
            "lost after {:.1} s and {} operations: {}\nseed {seed}, {threads} threads\n",
            self.seconds, self.operations, self.lost.how
        );
        for place in &self.lost.threads {
            let ThreadPlace { thread, step, operation, child } = place;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "thread {thread}, step {step}: {operation}");
            if let Some(ChildPlace { seed, step, operation }) = child {
                let _ = writeln!(text, "  its child, seed {seed}, step {step}: {operation}");
            }
        }
        for task in &self.lost.tasks {
            let _ = writeln!(text, "{task}");
        }
        text
    }
}

impl ThreadPlace {
    fn new(journal: &Journal, seed: u64, thread: usize, row: Row) -> Self {
        let child = journal.read(Who::Child(thread));
        let is_there = row.stage == Stage::Running && child.stage == Stage::Running;
        let operation = match row.stage {
            Stage::Running => nth(Program::new(seed, thread), row.step),
            _ => format!("{:?}", row.stage),
        };
        Self { thread, step: row.step, operation, child: is_there.then(|| ChildPlace::new(child)) }
    }
}

impl ChildPlace {
    fn new(row: Row) -> Self {
        let Row { seed, step, flood, .. } = row;
        let program = Program::new(seed, 0).filter(|operation| is_for_a_child(operation, flood));
        Self { seed, step, operation: nth(program, step) }
    }
}

fn nth(mut program: impl Iterator<Item = Operation>, step: u64) -> String {
    let step = usize::try_from(step).unwrap_or(usize::MAX);
    program.nth(step).map(|operation| format!("{operation:?}")).unwrap_or_default()
}
