//! `pinfold run -- PROGRAM`: an unmodified verbs program with cached registrations, and what they did.
//!
//! The program's standard streams are its own; the summary goes to standard error. Its exit status
//! becomes ours, and the signal if one ended it; 126 or 127 if it could not be
//! started. Nothing that this command prints or writes changes that.

mod child;
mod environment;
mod launcher;
pub(crate) mod library;
mod parameters;
mod reports;
mod settings;
mod signals;
mod summary;
mod wait;
mod warnings;

use crate::output::{Failure, Output};
use launcher::Launcher;
use parameters::Files;
use reports::Reports;
use settings::Middleware;
use std::env::var_os;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
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
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Runs the program to its end; its exit status.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<u8, Failure> {
    signals::keep_statuses();
    let library = library::find().map_err(Failure::unavailable)?;
    let (name, words) = arguments.program.split_first().ok_or_else(no_program)?;
    let json = arguments.json.as_deref().map(opened).transpose()?;
    // Before there is anything to remove: a launcher may be asked for its version.
    let mut job = Job::new(name, words);
    job.set("LD_PRELOAD", library::before_others(&library, var_os("LD_PRELOAD")));
    match arguments.middleware {
        Some(middleware) => job.prepare(middleware, output),
        None if Launcher::is_one(name) => output.note(HINT),
        None => {}
    }
    signals::catch_signals();
    let reports = Reports::new(arguments.reports.as_deref()).map_err(|error| {
        signals::leave_signals();
        match arguments.reports {
            Some(_) => Failure::usage(format!("--reports: {error}")),
            None => Failure::unavailable(format!("no place for the program's reports: {error}")),
        }
    })?;
    job.set(SUMMARY, reports.pattern().into());
    match child::run(|| job.prepared()) {
        Ok(status) => {
            let mut summary = reports.summary();
            if rank().is_some() && !Launcher::is_one(name) {
                summary.is_of_one_rank();
            }
            // Nothing is left to remove, so that a signal may end this process at once.
            drop(reports);
            signals::leave_signals();
            if let Some(status) = signals::asked_to_end() {
                return Ok(child::end_as(status));
            }
            conclude(arguments, output, json, &summary);
            Ok(child::end_as(status))
        }
        Err(error) => {
            drop(reports);
            signals::leave_signals();
            output.note(format_args!("{}: {error}", name.to_string_lossy()));
            Ok(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
        }
    }
}

const HINT: &str = "what MPI registers for its peers is not cached unless asked for, and its own caches stay on: \
                    pinfold run --for mpi -- ...";

const BY_LIST: &str =
    "the variables are sent by your mca_base_env_list, because Open MPI 4 refuses -x next to it";

/// What names the place of the reports.
const SUMMARY: &str = "PINFOLD_SUMMARY";

/// What is started, and with which variables.
struct Job<'a> {
    program: &'a OsStr,
    words: Vec<OsString>,
    variables: Vec<(&'static str, OsString)>,
}

impl<'a> Job<'a> {
    fn new(program: &'a OsStr, words: &[OsString]) -> Self {
        Self { program, words: words.to_vec(), variables: Vec::new() }
    }

    fn set(&mut self, name: &'static str, value: OsString) {
        self.variables.push((name, value));
    }

    /// What is started, with its environment.
    fn prepared(self) -> io::Result<(Command, Vec<CString>)> {
        let mut command = Command::new(self.program);
        command.args(self.words);
        Ok((command, environment::with(&self.variables)?))
    }

    /// Sets what the middleware needs, has it sent to the ranks, and says what stays dangerous.
    fn prepare(&mut self, middleware: Middleware, output: &Output) {
        let preparation = middleware.prepare(|name| var_os(name));
        preparation.variables.into_iter().for_each(|(name, value)| self.set(name, value.into()));
        let has = |device: &str| Path::new(device).exists();
        let of_providers = [
            middleware.omni_path(|name| var_os(name), has("/dev/hfi1_0")),
            middleware.slingshot(|name| var_os(name), has("/dev/cxi0")),
        ];
        preparation.warnings.iter().for_each(|warning| output.note(warning));
        of_providers.iter().flatten().for_each(|warning| output.note(warning));
        match Launcher::of(self.program) {
            Some(launcher) => self.send(middleware, launcher, output),
            None if middleware == Middleware::Mpi => self.say_of_no_launcher(output),
            None => {}
        }
    }

    /// Has the launcher send the variables along.
    fn send(&mut self, middleware: Middleware, launcher: Launcher, output: &Output) {
        let (names, files) = (names(middleware), Files::of(self.program));
        let list = || var_os(launcher::LIST_VARIABLE).or_else(|| files.list());
        let elsewhere = (launcher == Launcher::OpenMpi).then(list).flatten();
        let mut warnings = warnings::of_arguments(middleware, &self.words, &names);
        let of_environment = || warnings::of_environment(self.program, |name| var_os(name));
        warnings.extend((launcher == Launcher::SendsAll).then(of_environment).flatten());
        warnings.extend(elsewhere.iter().flat_map(|list| warnings::of_list(middleware, list)));
        warnings.extend(files.warnings(middleware));
        warnings.iter().for_each(|warning| output.note(warning));
        match launcher {
            Launcher::OpenMpi => {
                let (words, list) = launcher::forwarding(&names, &self.words, elsewhere);
                if words.len() == self.words.len() {
                    output.note(BY_LIST);
                }
                self.words = words;
                list.into_iter().for_each(|list| self.set(launcher::LIST_VARIABLE, list));
            }
            Launcher::SendsAll => {}
            Launcher::Unknown => output.note(format_args!(
                "{}: not known to send variables along; ranks on other machines need LD_PRELOAD, PINFOLD_* and \
                 those of their middleware",
                self.program.to_string_lossy()
            )),
        }
    }

    /// Says what this job is where no launcher was named.
    fn say_of_no_launcher(&self, output: &Output) {
        match rank() {
            Some(0) => output.note(
                "started by a launcher: each rank has a summary of its own; one of the whole job has pinfold run --for \
                 mpi -- mpirun ...",
            ),
            Some(_) => {}
            None if launcher::is_wrapper(self.program) => output.note(format_args!(
                "{}: what it starts has the variables, but a launcher among that may not send them to other \
                 machines; say {0} ... pinfold run --for mpi -- mpirun ...",
                self.program.to_string_lossy()
            )),
            None => {}
        }
    }
}

/// The variables that ranks need: those of the middleware, and Pinfold's own, whether this command or the user has
/// set them.
fn names(middleware: Middleware) -> Vec<OsString> {
    let settings = middleware.settings().map(|setting| setting.name);
    let mut names: Vec<OsString> =
        ["LD_PRELOAD", SUMMARY].into_iter().chain(settings).map(OsString::from).collect();
    let own = std::env::vars_os().map(|(name, _)| name);
    let own: Vec<_> = own
        .filter(|name| name.as_bytes().starts_with(b"PINFOLD_") && !names.contains(name))
        .collect();
    names.extend(own);
    names
}

/// The number of the rank that this process is, as its launcher says, if there are others. A shell on a machine that
/// Slurm has allocated may be a step of one.
fn rank() -> Option<u64> {
    // As the library has them (`pinfold-preload`, `rank.rs`).
    let launchers = [
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        ["PMI_RANK", "PMI_SIZE"],
        ["MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"],
        ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
    ];
    let number = |name: &str| var_os(name)?.to_str()?.trim().parse::<u64>().ok();
    let rank = |[its, of]: [&str; 2]| number(of).filter(|&of| of > 1).and(number(its));
    launchers.into_iter().find_map(rank)
}

fn no_program() -> Failure {
    Failure::usage("name the program to run: pinfold run -- PROGRAM ARGUMENT...")
}

/// The file for the summary, which is emptied only when that is written.
fn opened(path: &Path) -> Result<File, Failure> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    file.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

fn conclude(arguments: &Arguments, output: &Output, json: Option<File>, summary: &Summary) {
    if let Some(file) = json {
        if let Err(error) = write(file, summary) {
            output.note(format_args!("the summary could not be written: {error}"));
        }
    } else if !arguments.quiet {
        summary.in_words().iter().for_each(|line| output.note(line));
    }
}

fn write(mut file: File, summary: &Summary) -> io::Result<()> {
    let text = serde_json::to_string_pretty(summary)? + "\n";
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(text.as_bytes())
}
