//! A word that a forked child finds to be zero.
//!
//! A child shares nothing with its parent's monitor and registrars but the look of them: no reader
//! runs there, and what the parent registered is not the child's; what a child undid through an
//! inherited descriptor, it would undo in its parent. `pthread_atfork` would miss children made by
//! the raw system call; the kernel itself wipes this page in every child that gets a copy of the
//! memory (`MADV_WIPEONFORK`, Linux 4.14). A `vfork` child runs in the parent's own memory and is
//! not a copy, so it finds the word as it is.

use pinfold_kernel::{Errno, mapping::AtomicPage};
use std::sync::atomic::{AtomicU64, Ordering};

/// A word alone in its page: nonzero where it was made, zero in a forked child. Asking costs a
/// load.
#[derive(Debug)]
pub(crate) struct ForkMark(AtomicPage);

impl ForkMark {
    /// A word with the value `initial`, which is not zero and never becomes zero here.
    pub(crate) fn new(initial: u64) -> Result<Self, Errno> {
        debug_assert_ne!(initial, 0);
        let page = AtomicPage::new()?;
        page.wipe_on_fork()?;
        // Relaxed: another thread that sees this value got the page from us by a stronger means.
        page.word().store(initial, Ordering::Relaxed);
        Ok(Self(page))
    }

    pub(crate) fn word(&self) -> &AtomicU64 {
        self.0.word()
    }

    /// Whether this process is a forked child of the one that made the mark.
    pub(crate) fn forked(&self) -> bool {
        // Relaxed: in a child the page was wiped before its first instruction.
        self.word().load(Ordering::Relaxed) == 0
    }
}

/// The error number of whatever is asked of a registrar in a forked child: the process that it was
/// made in is not this one.
pub(crate) const FORKED: i32 = libc::ESRCH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_holds_where_it_was_made() {
        let mark = ForkMark::new(2).unwrap();
        assert!(!mark.forked());
        assert_eq!(mark.word().load(Ordering::Relaxed), 2);
    }
}
