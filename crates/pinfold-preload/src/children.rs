//! What forked children did to registrations that they inherited.
//!
//! A child has its parent's descriptors of devices, so a registration that it ends is its parent's
//! too, and the kernel may give its number to the next one. The parent must not end, or hand out, what
//! has such a number. So a child counts what it does in memory that it shares with its parent. The
//! parent counts there what it hands out and gets back, so that a child knows whether what it found
//! idle when it was forked still is.

use pinfold_kernel::mapping::AtomicPage;
use std::sync::atomic::{AtomicU64, Ordering};

/// See the module. In memory that children share.
#[derive(Debug)]
pub(crate) struct Children(&'static [AtomicU64; 4]);

/// How much children have done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Seen {
    /// Handles that the program had.
    pub(crate) ended: u64,
    /// Times that idle registrations were deregistered.
    pub(crate) emptied: u64,
}

impl Children {
    /// `None` without memory. Never given back: a page.
    pub(crate) fn new() -> Option<Self> {
        AtomicPage::shared().ok().map(|page| Self(page.leak()))
    }

    pub(crate) fn seen(&self) -> Seen {
        // Acquire: what a child did is done before it is counted.
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        Seen { ended: load(self.ended()), emptied: load(self.emptied()) }
    }

    /// Before a child ends a handle that it inherited.
    pub(crate) fn note_ended(&self) {
        // AcqRel: pairs with the load above.
        self.ended().fetch_add(1, Ordering::AcqRel);
    }

    /// Before a child ends what its parent keeps idle.
    pub(crate) fn note_emptied(&self) {
        // AcqRel: as above.
        self.emptied().fetch_add(1, Ordering::AcqRel);
    }

    /// The parent hands out or gets back what it keeps.
    pub(crate) fn note_move(&self, count: u64) {
        // Release: pairs with `moves`.
        self.0[2].store(count, Ordering::Release);
    }

    /// How often the parent did so, now.
    pub(crate) fn moves(&self) -> u64 {
        // Acquire: pairs with `note_move`.
        self.0[2].load(Ordering::Acquire)
    }

    fn ended(&self) -> &AtomicU64 {
        &self.0[0]
    }

    fn emptied(&self) -> &AtomicU64 {
        &self.0[1]
    }
}
