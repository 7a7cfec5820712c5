//! Registrars: what turns a range into a registration.
//!
//! | registrar | what a registration is | what it costs, with its end |
//! |---|---|---|
//! | [`IoUring`] | a slot in a ring's table of fixed buffers, its pages pinned | 12 empty system calls for 4 KiB, 120 for 1 MiB |
//! | [`Verbs`](verbs::Verbs) | a memory region of an RDMA device, its pages pinned | the device's: microseconds to milliseconds |
//! | [`OnDemand`](verbs::OnDemand) | the same, the device following the page table | the same, and a fault at each page's first use |
//! | [`Mlock`] | pages that are never swapped out | 25 empty system calls for 4 KiB, 700 for 1 MiB |
//!
//! None of them knows a monitor or a cache, and none calls another.

mod io_uring;
mod mlock;
mod page_counts;
pub mod verbs;

pub use io_uring::{BufferIndex, IoUring, IoUringError, MAX_BUFFER_BYTES, MAX_SLOTS};
pub use mlock::{LockedPages, Mlock};
