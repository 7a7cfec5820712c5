//! What becomes of caches when processes and threads fork, end, execute something else, lose their
//! descriptors or their rights: each line of the table in `docs/src/process-life.md`, on the real kernel.
//!
//! `PINFOLD_TEST_MONITOR` names the monitor that all of it runs with: `userfaultfd` (alone, as unless
//! it is set), `best`, `ebpf`. Each test runs in a process of its own.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

#[path = "../registrar_support/mod.rs"]
mod registrar_support;
#[path = "../support/mod.rs"]
mod support;

mod descriptors;
mod ends;
mod forks;
mod processes;
mod rights;
mod stops;
mod threads;
mod world;
