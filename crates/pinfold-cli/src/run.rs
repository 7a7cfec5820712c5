//! `pinfold run -- PROGRAM`: an unmodified verbs program with cached registrations, and what they did.
//!
//! The program's standard streams are its own; the summary goes to standard error. Its exit status
//! becomes ours, 128 and the signal's number if a signal ended it, 126 or 127 if it could not be
//! started.

mod child;
pub(crate) mod library;
mod middleware;
mod summary;

use crate::output::{Failure, Output};
use middleware::{Launcher, Middleware};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use summary::Summary;

/// Options of `pinfold run`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Write the summary to FILE, as one JSON object, rather than to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Print no summary on standard error
    #[arg(long)]
    quiet: bool,
    /// Switch off the registration caches of what the program uses, and cache what peers may reach
    ///
    /// Sets the variables that MPI, UCX or libfabric know for that, unless they are set already, and has a
    /// launcher such as mpirun send them to every rank. Registrations that a peer may use are cached with
    /// exactly their bytes and rights.
    #[arg(long = "for", value_name = "MIDDLEWARE")]
    middleware: Option<Middleware>,
    /// Gather the reports in DIRECTORY, which all machines of a job have under this path
    ///
    /// Without it, only ranks on this machine are in the summary.
    #[arg(long, value_name = "DIRECTORY")]
    reports: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Runs the program to its end; its exit status.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<u8, Failure> {
    let library = library::find().map_err(Failure::unavailable)?;
    let reports = Reports::new(arguments.reports.as_deref()).map_err(|error| {
        Failure::unavailable(format!("no place for the program's reports: {error}"))
    })?;
    let (name, words) = arguments.program.split_first().ok_or_else(no_program)?;
    let mut variables = vec![
        ("LD_PRELOAD", library::before_others(&library, std::env::var_os("LD_PRELOAD"))),
        ("PINFOLD_SUMMARY", reports.pattern().into()),
    ];
    let mut forwarded = Vec::new();
    if let Some(middleware) = arguments.middleware {
        prepare(middleware, words, &mut variables, output);
        let names = variables.iter().map(|&(name, _)| name);
        forwarded = launcher(name, output).map(|it| it.forwarding(names)).unwrap_or_default();
    } else if Launcher::is_one(name) {
        output.note(HINT);
    }
    let mut program = Command::new(name);
    program.args(forwarded).args(words).envs(variables);
    match child::run(program) {
        Ok(status) => {
            conclude(arguments, output, &reports.summary())?;
            Ok(status)
        }
        Err(error) => {
            output.note(format_args!("{}: {error}", name.to_string_lossy()));
            Ok(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
        }
    }
}

const HINT: &str = "what MPI registers for its peers is not cached unless asked for, and its own caches stay on: \
                    pinfold run --for mpi -- ...";

/// Sets what the middleware needs, and says what stays dangerous.
fn prepare(
    middleware: Middleware,
    words: &[OsString],
    variables: &mut Vec<(&'static str, OsString)>,
    output: &Output,
) {
    let overriding = fs::read_to_string(middleware::OVERRIDE).unwrap_or_default();
    let preparation = middleware.prepare(|name| std::env::var_os(name), words, &overriding);
    variables.extend(preparation.variables.into_iter().map(|(name, value)| (name, value.into())));
    preparation.warnings.iter().for_each(|warning| output.note(warning));
}

/// The launcher that the program is, if it is one.
fn launcher(program: &OsStr, output: &Output) -> Option<Launcher> {
    let launcher = Launcher::of(program);
    if launcher == Some(Launcher::Unknown) {
        output.note(format_args!(
            "{}: not known to send variables along; ranks on other machines need LD_PRELOAD, PINFOLD_* and \
             those of their middleware",
            program.to_string_lossy()
        ));
    }
    launcher
}

fn no_program() -> Failure {
    Failure::usage("name the program to run: pinfold run -- PROGRAM ARGUMENT...")
}

fn conclude(arguments: &Arguments, output: &Output, summary: &Summary) -> Result<(), Failure> {
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(summary).map_err(Failure::unavailable)? + "\n";
        fs::write(path, text)
            .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    } else if !arguments.quiet {
        summary.in_words().iter().for_each(|line| output.note(line));
    }
    Ok(())
}

/// Where the program's processes leave a line each; gone with this.
enum Reports {
    /// All of them in one file of this machine.
    File(PathBuf),
    /// Each in a file of its own, in a directory that machines share: lines that two machines append to one file may
    /// overwrite each other.
    Directory(PathBuf),
}

impl Reports {
    fn new(shared: Option<&Path>) -> io::Result<Self> {
        let name = format!("pinfold-run.{}.{:016x}", std::process::id(), fastrand::u64(..));
        if let Some(shared) = shared {
            let path = std::path::absolute(shared)?.join(name);
            fs::create_dir(&path)?;
            return Ok(Self::Directory(path));
        }
        let path = std::env::temp_dir().join(name);
        // New, so that no other file is followed or truncated.
        fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok(Self::File(path))
    }

    /// For `PINFOLD_SUMMARY`.
    fn pattern(&self) -> PathBuf {
        match self {
            Self::File(path) => path.clone(),
            Self::Directory(path) => path.join("%h.%p"),
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::File(path) => vec![path.clone()],
            Self::Directory(path) => {
                let entries = fs::read_dir(path).into_iter().flatten().flatten();
                entries.map(|entry| entry.path()).collect()
            }
        }
    }

    fn summary(&self) -> Summary {
        // Bytes that are no text spoil their own line alone.
        let read = |file| String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned();
        let texts: Vec<_> = self.files().into_iter().map(read).collect();
        Summary::of(texts.iter().flat_map(|text| text.lines()))
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        // A file that is left does no harm.
        let _ = match self {
            Self::File(path) => fs::remove_file(path),
            Self::Directory(path) => fs::remove_dir_all(path),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_gone_with_their_reader() {
        let reports = Reports::new(None).unwrap();
        let path = reports.pattern();
        fs::write(&path, "{\"gets\":2}\n{\"gets\":1}\n").unwrap();
        assert_eq!(reports.summary().processes, 2);
        drop(reports);
        assert!(!path.exists());
    }

    #[test]
    fn machines_that_share_a_directory_leave_a_file_each() {
        let reports = Reports::new(Some(&std::env::temp_dir())).unwrap();
        let pattern = reports.pattern();
        let [own, others] = ["here.1", "there.1"].map(|name| pattern.with_file_name(name));
        assert!(pattern.ends_with("%h.%p") && pattern.is_absolute());
        fs::write(&own, "{\"gets\":2}\n").unwrap();
        fs::write(&others, "{\"gets\":1}\n").unwrap();
        assert_eq!(reports.summary().processes, 2);
        drop(reports);
        assert!(!pattern.parent().unwrap().exists());
        assert!(Reports::new(Some(&own)).is_err(), "no directory");
    }
}
