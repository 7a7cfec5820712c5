//! Monitors: what reports which addresses changed.
//!
//! | monitor | needs | caches |
//! |---|---|---|
//! | [`Userfaultfd`] | Linux 5.19, no privilege | private anonymous memory |
//! | [`Ebpf`] | a privilege, or a helper that has it | everything |
//! | [`NoMonitor`] | nothing | only what the caller vouches for; everything, if the device follows the page table |
//! | [`WithFeed`] | a monitor, and code that reports to a [`Feed`] | what that monitor does |
//! | [`Best`] | nothing | what the best of them does that this machine has |
//!
//! [`best`] picks one. [`Feed`] is how allocators and hooks tell what they change, [`Follower`] how
//! other caches than Pinfold's follow any of these, [`libfabric`] has libfabric's ask one.
//!
//! # Forks, ends, stops, lost rights
//!
//! - A forked child finds its parent's monitors and caches
//!   [`Forked`](crate::Lost::Forked): they give nothing and take nothing from the parent. New ones
//!   work at once. A child that shares the memory (`vfork`, `clone(CLONE_VM)`) is watched like a
//!   thread, and must not use a cache.
//! - Processes and threads may end in any way, with leases alive and changes under way; destructors
//!   of thread-locals and functions at exit may use caches.
//! - A program that closes all descriptors, or has them or system calls taken away, finds
//!   [`Lost`](crate::Lost) (userfaultfd) and may make a new monitor, which watches mappings that the lost one did not.
//! - While the process is stopped, or a debugger holds the thread `pinfold-events`, changes of memory
//!   that userfaultfd watches wait, and a process that is being stopped in the middle of one is
//!   reported as stopped only when it has been continued.
//! - Checkpoints (CRIU, DMTCP), and unloading a library that contains Pinfold, are not supported.
//!
//! `docs/src/process-life.md` has the whole table.
//!
//! The order of layers, each using only what stands before it: `event_count`, `start` (errors), `watched_page`, `self_test`, `patience`,
//! `price`, `notify`, `shared`, `range_set`, `log`, `threads`, `pending_discards`, `reader`, `members`, `discard_sources`, then the
//! monitors `userfaultfd`, `ebpf`, `none`, then `feed`, `hooks`, `with_feed`, `best`, `follower`,
//! `subscriptions`, `libfabric`.

mod best;
mod discard_sources;
mod ebpf;
mod event_count;
pub mod feed;
pub mod follower;
pub mod hooks;
pub mod libfabric;
mod log;
mod members;
mod none;
pub mod notify;
mod patience;
mod pending_discards;
mod price;
mod range_set;
mod reader;
mod self_test;
mod shared;
mod start;
mod subscriptions;
mod threads;
mod userfaultfd;
mod watched_page;
mod with_feed;

pub use best::{Best, Choice, MonitorRefused, WatchPause, best, best_without_loading};
pub use ebpf::{Ebpf, EbpfError};
pub use event_count::EventCount;
pub use feed::{Changing, Feed};
pub use follower::{ChangeReport, Follower};
pub use none::NoMonitor;
pub use start::StartError;
pub use userfaultfd::Userfaultfd;
pub use with_feed::{Combinable, WithFeed};
