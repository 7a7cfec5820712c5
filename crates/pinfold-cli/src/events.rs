//! `pinfold events`.

use crate::output::{Failure, Output, Verdict};

/// Options of `pinfold events`.
#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {}

pub(crate) fn run(_arguments: &Arguments, _output: &Output) -> Result<Verdict, Failure> {
    Err(Failure::unavailable("not in this build"))
}
