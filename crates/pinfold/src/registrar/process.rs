//! Which process this is, asked at the price of one load.
//!
//! A forked child inherits a registrar's descriptor and counts, but not its registrations: what it
//! undid through them, it would undo in its parent. So a registrar remembers the process that made
//! it, and does nothing elsewhere. `getpid` would cost a system call each time; a page which the
//! kernel wipes in a child costs a load.

use super::sys::{self, Errno};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The page's word: zero in a process that has not asked since it was forked.
static MARK: OnceLock<&'static AtomicU32> = OnceLock::new();

/// How many processes of this line have asked. Unlike the page it is inherited, so that a child's
/// number differs from all of its ancestors'.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that called [`Process::current`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Process {
    generation: u32,
}

impl Process {
    /// This process.
    ///
    /// # Errors
    ///
    /// No memory for the page, or a kernel older than 4.14.
    pub(super) fn current() -> Result<Self, Errno> {
        let mark = mark()?;
        // Relaxed, here and below: the word publishes nothing but itself, and a fork orders what
        // came before it by copying the whole memory.
        let known = mark.load(Ordering::Relaxed);
        if known != 0 {
            return Ok(Self { generation: known });
        }
        let fresh = GENERATION.fetch_add(1, Ordering::Relaxed) + 1;
        let generation = match mark.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed)
        {
            Ok(_) => fresh,
            Err(of_another_thread) => of_another_thread,
        };
        Ok(Self { generation })
    }

    /// Whether the caller runs in this process, not in a child forked from it.
    pub(super) fn is_current(self) -> bool {
        // Relaxed: see `current`.
        MARK.get().is_some_and(|mark| mark.load(Ordering::Relaxed) == self.generation)
    }
}

fn mark() -> Result<&'static AtomicU32, Errno> {
    if let Some(mark) = MARK.get() {
        return Ok(mark);
    }
    let made = sys::word_zeroed_by_fork()?;
    // Two threads may both come here once; the loser's page stays mapped and unused.
    Ok(MARK.get_or_init(|| made))
}

/// The error number of whatever is asked in a forked child: the process it was made in is not this
/// one.
pub(super) const FORKED: i32 = libc::ESRCH;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_is_one() {
        let first = Process::current().unwrap();
        let second = std::thread::spawn(|| Process::current().unwrap()).join().unwrap();
        assert_eq!(first, second);
        assert!(first.is_current());
    }
}
