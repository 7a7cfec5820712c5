//! What stands between the kernel, the helper and the eBPF monitor.

pub mod protocol;
pub mod socket;
mod view;

pub use view::{IncompleteView, View, ViewId};
