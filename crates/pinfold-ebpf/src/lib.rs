//! eBPF programs that tell a process which of its mappings change, and what it shares with them.
//!
//! The programs (`bpf/changes.c`) stand at both ends of every function of the kernel that takes
//! pages away from a range of addresses. The process that loads them ([`Programs`], feature `load`, needs a
//! privilege) gives each process a [`View`] of its own changes: descriptors, which may be sent to
//! a process that has no privilege at all. What these hold is in [`layout`].
//!
//! # The price
//!
//! An unwatched process pays two short programs for each change of its mappings, tens of
//! nanoseconds together. A watched one pays some hundred more, and a process that waits for changes
//! is woken. Each view takes about 130 KiB of kernel memory.
//!
//! The order of layers, each using only what stands before it: `layout`, `protocol`, `view`, `programs`.

#[cfg(not(target_os = "linux"))]
compile_error!("these programs run in a Linux kernel");

pub mod layout;
#[cfg(feature = "load")]
mod programs;
pub mod protocol;
mod view;

#[cfg(feature = "instrument")]
pub use programs::{Instrument, Parting, Partings};
#[cfg(feature = "load")]
pub use programs::{Programs, ProgramsError, ViewError};
pub use view::{IncompleteView, View, ViewId, ViewParts};

use std::io;
use std::os::fd::OwnedFd;

/// A descriptor of the calling process, for [`Programs::view`].
///
/// # Errors
///
/// What `pidfd_open` says.
pub fn this_process() -> io::Result<OwnedFd> {
    Ok(pinfold_kernel::process::pidfd_open(std::process::id())?)
}
