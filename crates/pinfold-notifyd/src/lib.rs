//! The helper's server: it hands each process the view of its own mapping changes.
//!
//! eBPF programs see every change of every mapping, but only a privileged process may load them. The
//! helper does that once for the machine, and gives any process that connects to its socket the
//! descriptors through which that process, without a privilege, follows its own changes: never
//! those of another. From then on the helper is not needed: clients keep the programs alive by the
//! descriptors that they hold.
//!
//! # What a process gets
//!
//! A process gets the view of itself, because there is nothing else that it could ask for. Its
//! identity is the kernel's word, not its own (`peer`): the process that connected, proved to be the one
//! that asks, and to be still there. A connection that was passed on, or inherited by a forked
//! child, is refused: the process that connected is not the one that asks. A process whose addresses its own user may
//! not look at (it is not dumpable) gets no view; otherwise a program that executes a
//! set-user-ID program could be left holding that one's view.
//!
//! # What a hostile client can do
//!
//! Nothing that others notice but that their turn comes a little later: one thread, in which nothing waits
//! for a client; a fixed number of fixed-size packets in each conversation; limits for each user and for all
//! ([`ClientLimits`]), root being counted apart; users take turns in what waits for the kernel, which is
//! making a view and forgetting one (some tens of milliseconds each); unexpected descriptors are refused
//! by the kernel, or closed where that delays no client (`parting`). What it cannot be kept
//! from: users with many user numbers (subordinate ones) have as many allowances; a process that passes
//! a view's descriptors on keeps the kernel's memory behind them for as long as any process holds them,
//! until the helper's control group is near its limit, where no user gets a view any more (`memory`); and before Linux 6.16 a user beyond its limits may
//! connect again and again with descriptors whose closing never ends (files of a FUSE server of its own), until the
//! descriptors are taken that no client within the limits needs: then no client is accepted until some are closed.
//!
//! # What it costs
//!
//! Two descriptors and some hundred bytes for each client, besides what the view costs.
//!
//! The order of layers: `sys`, `parting`, `limits`, `accounts`, `memory`, `turns`, `peer`, `table`, `log`,
//! `views`, `listen`, `ready`, `server`.

mod accounts;
mod limits;
mod listen;
mod log;
mod memory;
mod parting;
mod peer;
mod ready;
mod server;
mod table;
mod turns;
mod views;

pub use limits::{ClientLimits, MOST_VIEWS, make_room};
pub use listen::{ListenError, Listener};
pub use pinfold_kernel::signal::StopSignals;
pub use ready::tell_service_manager;
pub use server::{Server, ServerError};
pub use views::{NoView, Views};
