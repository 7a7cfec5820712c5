//! Runs the real command on the real kernel and reads what it says.

// Helpers of tests may fail loudly, as tests may.
#![allow(clippy::panic, clippy::print_stderr)]

mod bench;
mod demo;
mod probe;
mod run;
mod support;
