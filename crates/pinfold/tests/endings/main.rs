//! How everything that stands for something ends: the table of `docs/src/endings.md`, and what panics
//! of others leave behind.
//!
//! No test here but that of a ring needs io_uring, and none RDMA or a privilege: the device is [`device::Device`], which counts its
//! registrations and moves bytes by copying them.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod callbacks;
mod device;
mod landings;
mod pools;
#[path = "../registrar_support/mod.rs"]
mod registrar_support;
mod suspensions;
mod table;
mod transfers;
mod ways;
