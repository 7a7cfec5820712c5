//! Monitors: who tells which addresses changed.
//!
//! | monitor | needs | caches |
//! |---|---|---|
//! | [`Userfaultfd`] | Linux 5.15, no privilege | private anonymous memory |
//! | [`Ebpf`] | a privilege, or somebody who has it | everything |
//! | [`NoMonitor`] | nothing | only what the caller vouches for |
//! | [`Unneeded`] | a device that follows the page table | everything |
//!
//! The order of layers, each using only what stands above it: `bell`, `ring`,
//! `log`, `threads`, `flux`, `reader`, then the monitors.

mod bell;
mod ebpf;
mod ebpf_error;
mod ebpf_keeper;
mod ebpf_sys;
mod ebpf_test;
mod flux;
mod log;
mod none;
pub mod notify;
mod reader;
mod ring;
mod self_test;
mod shared;
mod start;
mod still;
mod threads;
mod unneeded;
mod userfaultfd;

pub use ebpf::Ebpf;
pub use ebpf_error::EbpfError;
pub use none::NoMonitor;
pub use start::StartError;
pub use unneeded::Unneeded;
pub use userfaultfd::Userfaultfd;
