//! The peers compared with us, where the feature `peers` asks for them: UCX's registration cache and, beside
//! pools, mimalloc; the C library's allocator is always there.

#[cfg(not(feature = "peers"))]
mod absent;
mod allocator;
#[cfg(feature = "peers")]
mod ucx;

#[cfg(not(feature = "peers"))]
pub(crate) use absent::{Ucx, keep_hooks_out};
#[cfg(feature = "peers")]
pub(crate) use ucx::{Ucx, keep_hooks_out};

pub(crate) use allocator::{Allocator, LibC, MiMalloc, one_by_one, turn_over};

/// Whether this build has a peer.
pub(crate) const PRESENT: bool = cfg!(feature = "peers");

/// The variable that says whether UCX's hooks are let in: `yes` or `no`.
pub(crate) const HOOKS: &str = "UCX_MEM_EVENTS";

/// The name in reports.
pub(crate) const NAME: &str = "ucx";

/// A peer's cache without limits, if there is a peer.
pub(crate) fn unlimited() -> Result<Option<Ucx>, String> {
    Ucx::open(u64::MAX, u64::MAX)
}
