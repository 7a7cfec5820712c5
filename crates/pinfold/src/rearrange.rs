//! Registered memory made huge, moved to another memory node, trimmed: what a suspension is for.
//!
//! # What it costs
//!
//! Pages that a device has pinned cannot be made huge nor moved. So the region is
//! [suspended](crate::suspend) first: a `get` of it waits, and what is registered of it is
//! registered anew. Of 16 MiB in small pages, on a virtual machine of two processors, in times of
//! registering it (0.3-0.4 ms), medians of 41 rounds:
//!
//! | | the longest pause of a stream over it |
//! |---|---|
//! | [`defragment`] under one suspension | 23 in place, 33 by copying |
//! | [`defragment_in_steps`] in place | 2.7: collapsing 2 MiB alone takes two |
//! | the same by copying elsewhere ([`HugePageWay::by_copy`]) | 1.1 |
//! | the same two, during a lease of the whole that was handed over | 3.7, 2.7: each step registers all of it |
//! | nothing happens | 0.4 |
//!
//! In the worst of the rounds it was ten times as much: another program had the processor, or the lock of the
//! process's mappings.
//!
//! Afterwards registering and deregistering it takes a twenty-fifth. `pinfold-bench suspend` measures all
//! of it where it runs.
//!
//! # Which one
//!
//! [`HugePageWay::IN_PLACE`] is the kernel's `MADV_COLLAPSE` (Linux 6.1): the program may read and write
//! the memory meanwhile, a page that is pinned elsewhere is left alone and reported, and nothing
//! can be lost. [`HugePageWay::by_copy`] has a shorter pause and works on older kernels, but no thread may
//! write to the memory meanwhile, and only plain private memory can be replaced; so it is unsafe.
//!
//! [`defragment_in_steps`] suspends one huge page's worth at a time and lets everything go on in
//! between, so a stream of transfers over the region is held up for a short time only, at one
//! place. Use [`defragment`] within a suspension that serves other ends as well.
//!
//! ```
//! use pinfold::rearrange::{HugePageWay, defragment_in_steps};
//! use pinfold::suspend::SuspensionTerms;
//! # use pinfold::{Access, AddressRange, Config, monitor::best, registrar::IoUring};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let Ok(ring) = io_uring::IoUring::new(8) else { return Ok(()) };
//! # // SAFETY: the ring's table of buffers is left to the registrar.
//! # let registrar = unsafe { IoUring::new(&ring, 1024) }?;
//! # let cache = pinfold::cache(registrar, best()?, Config::default())?;
//! let buffer = vec![7_u8; 16 << 20];
//! let range = AddressRange::new(buffer.as_ptr().addr(), buffer.len())?;
//! let terms = SuspensionTerms::default();
//! match defragment_in_steps(&cache, range, &[], Vec::new(), terms, HugePageWay::IN_PLACE) {
//!     Ok(done) => println!("{:?}", done.defragmented), // before, after, what is left and why
//!     Err(stopped) => println!("{stopped}"), // what was done until then stays
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Honestly
//!
//! - A suspension stops one cache's registrations. Memory that another cache, a pool, a device of
//!   the program's own has pinned stays as it is, and [`Obstacle::Pinned`] says so. By copying, such a
//!   device would go on with the old pages: that is part of the promise.
//! - What does not fill a huge page (2 MiB on x86-64), at the beginning and the end, stays small.
//! - The kernel may split huge pages again: at a partial `munmap`, `mprotect` or trim.
//! - [`migrate`] moves pages, not policies: pages that are made later go where the process's memory
//!   policy says (`mbind`, `set_mempolicy`).
//! - [`trim`] does not shrink what a lease that was handed over has registered, because others know
//!   it by its handle: resuming would bring the pages back.

mod beside;
mod collapse;
mod huge;
mod nodes;
mod pages;
mod steps;
mod trim;

pub use beside::HugePageWay;
pub use collapse::Obstacle;
pub use huge::{Defragmented, defragment};
pub use nodes::{Migrated, Node, OnNodes, migrate};
pub use pages::ResidentPages;
pub use steps::{LeaseEnded, Stepped, Stopped, StoppedBy, defragment_in_steps};
pub use trim::{Trimmed, trim};

use crate::{AddressRange, mappings};
use pinfold_core::{Monitor, Suspend, Suspended};

/// Why memory was not re-arranged at all.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RearrangeError {
    /// The suspension was overdue and was ended: the region is in use. What was done until then stays.
    #[error("the suspension was overdue and has ended: suspend again, and allow more time")]
    Expired,
    /// This process is a forked child of the one that suspended.
    #[error(
        "this process is a forked child of the one that suspended: the memory is a copy, and its \
         own suspension is what it needs"
    )]
    Forked,
    /// The kernel cannot.
    #[error("this kernel lacks {what} ({errno})")]
    Unsupported {
        /// What it lacks.
        what: &'static str,
        /// The kernel's error number; 0 if it was not asked.
        errno: i32,
    },
    /// There is no such memory node, or no memory on it.
    #[error("there is no memory node {}: this machine has {}", .node.0, numbers(.nodes))]
    NoSuchNode {
        /// Which was asked for.
        node: Node,
        /// Those that have memory.
        nodes: Vec<Node>,
    },
    /// Part of the range is not suspended.
    #[error("{range} is not all suspended, only {suspended} is: suspend all of it")]
    Outside {
        /// What was asked for.
        range: AddressRange,
        /// What is suspended.
        suspended: AddressRange,
    },
    /// The kernel has no room, or something else went wrong.
    #[error("{operation} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

fn numbers(nodes: &[Node]) -> String {
    let numbers: Vec<String> = nodes.iter().map(|node| node.0.to_string()).collect();
    numbers.join(", ")
}

/// Whether the region is the caller's to re-arrange.
fn check<R: Suspend, M: Monitor>(suspended: &Suspended<'_, R, M>) -> Result<(), RearrangeError> {
    if suspended.is_forked() {
        return Err(RearrangeError::Forked);
    }
    if suspended.has_expired() {
        return Err(RearrangeError::Expired);
    }
    Ok(())
}

/// The parts of `range` that are mapped and that the program may read or write, in order. What is reserved without
/// access may be as long as the address space, with no page in it.
fn accessible_parts(range: AddressRange) -> Result<Vec<AddressRange>, RearrangeError> {
    let failed = |error: std::io::Error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        RearrangeError::Os { operation: "reading /proc/self/maps", errno }
    };
    let mappings = mappings::mappings_in(range).map_err(failed)?;
    let accessible = mappings.iter().filter(|mapping| mapping.has_access());
    Ok(accessible.filter_map(|mapping| mapping.range.intersection(&range)).collect())
}
