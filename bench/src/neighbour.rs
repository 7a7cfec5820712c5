//! UCX's cache with its hooks, in a process of its own: its hooks act on every memory call of the process that they
//! are in, ours too.
//!
//! The process is this program, started again. It is told what to do on standard input, a line of JSON each, and
//! answers with a line: nanoseconds, or what went wrong.

use crate::peer::{self, HOOKS, Ucx};
use crate::report;
use crate::ring::registrar_of;
use crate::short_lived::Lives;
use io_uring::IoUring as Ring;
use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The option by which the program is the neighbour.
pub(crate) const OPTION: &str = "neighbour";

const SLOTS: u32 = 1024;

/// A line that is one answer.
type Answer = Result<f64, String>;

/// The other process, until this value is dropped.
pub(crate) struct Neighbour {
    child: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Neighbour {
    /// `None` in a build without peers.
    pub(crate) fn start() -> Result<Option<Self>, String> {
        if !peer::PRESENT {
            return Ok(None);
        }
        let mut child = Command::new("/proc/self/exe")
            .arg(format!("--{OPTION}"))
            .env(HOOKS, "yes")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("could not start again with UCX's hooks: {error}"))?;
        let (questions, answers) = (child.stdin.take(), child.stdout.take());
        let questions = questions.ok_or("a child without standard input")?;
        let answers = BufReader::new(answers.ok_or("a child without standard output")?);
        Ok(Some(Self { child, questions, answers }))
    }

    /// The nanoseconds that a life takes there.
    pub(crate) fn run(&mut self, lives: Lives) -> Answer {
        let question = serde_json::to_string(&lives).map_err(|error| error.to_string())?;
        writeln!(self.questions, "{question}").map_err(|error| error.to_string())?;
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| error.to_string())?;
        serde_json::from_str::<Answer>(&line)
            .map_err(|error| format!("UCX's process said `{}`: {error}", line.trim()))?
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // Of a process that ended by itself nothing is left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answers until there are no more questions.
pub(crate) fn serve() -> Result<(), String> {
    let ring = Ring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
    let registrar = registrar_of(&ring, SLOTS).map_err(|error| error.to_string())?;
    let cache = Ucx::hooked(registrar, SLOTS)?;
    for line in stdin().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let lives: Lives = serde_json::from_str(&line).map_err(|error| error.to_string())?;
        let answer: Answer = lives.run(|memory| {
            let addresses = vec![memory.start().addr() as u64; lives.uses];
            cache.get_put(&addresses, memory.bytes())
        });
        report::answer(&answer)?;
    }
    Ok(())
}
