//! Registered memory that is re-arranged on the real kernel: every byte right, every refusal told.
//!
//! # Safety
//!
//! This file and its modules reopen `unsafe_code` to register memory, to submit requests for it
//! and to fork. Memory that a request uses outlives the request.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)] // tests may fail loudly

#[path = "../registrar_support/mod.rs"]
mod registrar_support;

mod huge;
mod refusals;
mod rig;
mod stream;
mod turns;
