//! What a pool has and where it is.

use super::memory::PageKind;

/// How a pool stands. Exact when no other thread uses the pool meanwhile.
///
/// `registered_bytes` is the sum of `in_use_bytes`, `cached_bytes` and `free_bytes`, and of the
/// bytes by the kind of their pages.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PoolStatistics {
    /// Slabs, each registered once with every registrar.
    pub slabs: usize,
    /// Bytes of slabs: what every registrar of the pool has pinned.
    pub registered_bytes: usize,
    /// Bytes of buffers that are out, at their whole size, those that were [lost](Self::lost_bytes)
    /// included.
    pub in_use_bytes: usize,
    /// Bytes that threads have cached.
    pub cached_bytes: usize,
    /// The same for each thread that has any.
    pub cached_by_thread: Vec<usize>,
    /// Bytes that are free for every thread.
    pub free_bytes: usize,
    /// Threads that wait for a buffer.
    pub waiting: usize,
    /// Bytes in huge pages that were set aside.
    pub set_aside_bytes: usize,
    /// Bytes in transparent huge pages.
    pub transparent_bytes: usize,
    /// Bytes for which transparent huge pages were asked, of a kernel that does not tell.
    pub unknown_bytes: usize,
    /// Bytes in base pages.
    pub base_bytes: usize,
    /// Bytes of buffers that will not come back, because a transfer's end was never told.
    pub lost_bytes: usize,
    /// Slabs that were ever registered.
    pub grown: u64,
    /// Slabs that were given back.
    pub trimmed: u64,
    /// Slabs that could not be had.
    pub refused: u64,
    /// How often a thread went through the pool's lock to take or put a buffer.
    pub visits: u64,
    /// How often the magazines of all threads were emptied.
    pub raids: u64,
    /// Registrations that a device would not take back.
    pub failed_deregistrations: u64,
    /// Pointers that were given back and were no buffer in use.
    pub refused_puts: u64,
    /// Panics of registrars and budgets at the end of a thread, which had nowhere to go.
    pub panics_kept_back: u64,
}

impl PoolStatistics {
    pub(super) fn add_pages(&mut self, kind: PageKind, bytes: usize) {
        let counter = match kind {
            PageKind::SetAside => &mut self.set_aside_bytes,
            PageKind::Transparent => &mut self.transparent_bytes,
            PageKind::Unknown => &mut self.unknown_bytes,
            PageKind::Base => &mut self.base_bytes,
        };
        *counter += bytes;
    }
}
