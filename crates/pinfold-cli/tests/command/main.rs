//! Runs the real command on the real kernel and reads what it says.

// Helpers of tests may fail loudly, as tests may.
#![allow(clippy::panic, clippy::print_stderr, clippy::unwrap_used)]

mod bench;
mod demo;
mod endings;
mod environment;
mod jobs;
mod probe;
mod run;
mod stops;
mod support;
