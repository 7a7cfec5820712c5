//! How everything that stands for something ends: the table of `docs/src/endings.md`, and what panics
//! of others leave behind.
//!
//! No test here needs io_uring, RDMA or a privilege: the device is [`device::Device`], which counts its
//! registrations and moves bytes by copying them.

#![allow(missing_docs)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod callbacks;
mod device;
mod landings;
mod pools;
mod table;
mod transfers;
