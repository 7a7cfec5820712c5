//! The peer beside us: UCX's registration cache, where the feature `peers` asks for it.

#[cfg(not(feature = "peers"))]
mod absent;
#[cfg(feature = "peers")]
mod ucx;

#[cfg(not(feature = "peers"))]
pub(crate) use absent::{Ucx, keep_hooks_out};
#[cfg(feature = "peers")]
pub(crate) use ucx::{Ucx, keep_hooks_out};

/// Whether this build has a peer.
pub(crate) const PRESENT: bool = cfg!(feature = "peers");

/// The name in reports.
pub(crate) const NAME: &str = "ucx";

/// A peer's cache without limits, if there is a peer.
pub(crate) fn unlimited() -> Result<Option<Ucx>, String> {
    Ucx::open(u64::MAX, u64::MAX)
}
