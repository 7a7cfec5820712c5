//! Which monitor a command uses, and how the hooks get into the process that wants them.

use crate::output::{Failure, Output};
use crate::run::library;
use pinfold::monitor::{Best, Feed};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, io};

/// The monitor that a command was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub(crate) enum Wanted {
    /// The best that this machine has
    #[default]
    Best,
    /// Programs inside of the kernel
    Ebpf,
    /// What the kernel tells without a privilege
    Userfaultfd,
    /// The same, and hooks on the C library's functions for what it does not tell
    #[value(name = "userfaultfd+hooks")]
    UserfaultfdAndHooks,
    /// None: nothing is cached
    #[value(name = "none")]
    Nothing,
}

/// Set in a process that was begun anew with the hooks.
const BEGUN_ANEW: &str = "PINFOLD_BEGUN_WITH_HOOKS";

impl Wanted {
    /// Sees to it that the hooks are in this process, if they are asked for: begins it anew with the
    /// library that has them.
    ///
    /// # Errors
    ///
    /// They cannot be had; the text says why.
    pub(crate) fn prepare(self) -> Result<(), Failure> {
        if self != Self::UserfaultfdAndHooks || Feed::of_process().is_fed() {
            return Ok(());
        }
        if env::var_os(BEGUN_ANEW).is_some() {
            return Err(Failure::unavailable(
                "the library with the hooks is in this process, but they are not active: another \
                 library stands before them",
            ));
        }
        let error = begin_anew()?;
        Err(Failure::unavailable(format!("this program could not be begun with hooks: {error}")))
    }
}

/// Only returns if it fails.
fn begin_anew() -> Result<io::Error, Failure> {
    let library = library::find().map_err(Failure::unavailable)?;
    let preload = library::before_others(&library, env::var_os("LD_PRELOAD"));
    Ok(Command::new("/proc/self/exe")
        .args(env::args_os().skip(1))
        .env("LD_PRELOAD", preload)
        .env(BEGUN_ANEW, "1")
        .exec())
}

/// Says which better monitors are not to be had.
pub(crate) fn tell_refusals(monitor: &Best, output: &Output) {
    for refused in monitor.refused() {
        output.note(refused);
    }
}
