//! How far it is, and the way to stop it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How far a registration or a transfer has come: counters that any thread may read, and a flag that
/// any thread may raise.
///
/// One serves for one range after the other; then it counts them together. All orderings are
/// relaxed: the counters publish nothing but themselves, and a thread that sees the flag late does one
/// piece more.
#[derive(Debug, Default)]
pub struct Progress {
    registered: AtomicUsize,
    moved: AtomicUsize,
    cancelled: AtomicBool,
}

impl Progress {
    /// Nothing done yet.
    pub const fn new() -> Self {
        Self {
            registered: AtomicUsize::new(0),
            moved: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Bytes whose registration is there, found or made. Of a transfer, those that have been given to the device.
    pub fn registered_bytes(&self) -> usize {
        self.registered.load(Ordering::Relaxed)
    }

    /// Bytes that have been moved; stays 0 where nothing is to be.
    pub fn moved_bytes(&self) -> usize {
        self.moved.load(Ordering::Relaxed)
    }

    /// Asks to stop behind the pieces that are being registered now.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(super) fn add_registered(&self, bytes: usize) {
        self.registered.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add_moved(&self, bytes: usize) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }
}
