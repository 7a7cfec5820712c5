//! Pages are made before they are registered, by several threads, and never by writing to them.
//!
//! A registration that finds no pages makes them while it holds the device's lock, one at a time.
//! Made beforehand, they cost the same, but every thread makes its own.

use super::{Options, Progress};
use crate::{Access, AddressRange};
use pinfold_kernel::{Errno, memory, pages, process::page_bytes, thread::spawn_scoped};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// What one thread makes between two looks at the others: a page table's worth.
const STEP: usize = 2 << 20;

/// Why pages could not be made. The program's own touch, or a registration, would meet the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrefaultError {
    /// The kernel cannot: it is older than Linux 5.14, or the mapping is of a kind without pages.
    #[error("pages cannot be made in advance here (Linux 5.14): register without prefaulting")]
    Unsupported,
    /// Somewhere in `range` nothing is mapped, or not with the rights that are needed.
    #[error("part of {range} is not mapped with the rights needed (errno {errno})")]
    BadAddress {
        /// The part that was being made.
        range: AddressRange,
        /// The kernel's error number.
        errno: i32,
    },
    /// No memory is left, or something else went wrong.
    #[error(
        "the pages of {range} could not be made: {}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Os {
        /// The part that was being made.
        range: AddressRange,
        /// The kernel's error number.
        errno: i32,
    },
    /// [`Progress::cancel`] was called.
    #[error("prefaulting was cancelled")]
    Cancelled,
}

/// Makes every page of `range` that is not there, on `options.threads` threads.
///
/// With rights to write in `access` they are made ready for writing, as a device that pins them
/// needs (io_uring pins every page so); else for reading, which maps the one page of zeros where
/// nothing was written. No byte that the program reads changes.
///
/// Costs what the program's own touch of them would, some 1.5 µs a page here; nothing for those that
/// are there.
///
/// # Errors
///
/// [`PrefaultError`]: the first that any thread met. Pages made until then stay.
pub fn prefault(
    range: AddressRange,
    access: Access,
    options: &Options,
    progress: &Progress,
) -> Result<(), PrefaultError> {
    let whole = range.page_aligned(page_bytes());
    let next = AtomicUsize::new(whole.start() / STEP);
    let work = || make_steps(whole, access.writes(), &next, progress);
    thread::scope(|scope| {
        let more = 1..options.bounded_threads().min(whole.len().div_ceil(STEP));
        // Threads that cannot be started leave their work to the others.
        let helpers: Vec<_> =
            more.map_while(|_| spawn_scoped(scope, "pinfold-prefault", work).ok()).collect();
        let own = work();
        let joined = helpers.into_iter().filter_map(|helper| helper.join().ok());
        joined.fold(own, Result::and)
    })
}

/// Takes one step after the other that no thread has taken yet.
fn make_steps(
    whole: AddressRange,
    to_write: bool,
    next: &AtomicUsize,
    progress: &Progress,
) -> Result<(), PrefaultError> {
    loop {
        if progress.is_cancelled() {
            return Err(PrefaultError::Cancelled);
        }
        // Relaxed: the number alone matters; what is made is handed over by the kernel.
        let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(STEP);
        let end = start.saturating_add(STEP).min(whole.end());
        let Some(step) = AddressRange::between(start.max(whole.start()), end) else {
            return Ok(());
        };
        make(step, to_write)?;
    }
}

/// Whether some page of `range` is known not to be there.
pub(super) fn lacks_pages(range: AddressRange) -> bool {
    let page = page_bytes();
    pages::is_there(range.page_aligned(page)) == Some(false)
}

/// Makes the pages of `range` that are not there, on this thread.
pub(super) fn make(range: AddressRange, to_write: bool) -> Result<(), PrefaultError> {
    let page = page_bytes();
    let range = range.page_aligned(page);
    // A look costs a fiftieth of what populating costs that finds nothing to do.
    if pages::is_there(range) == Some(true) {
        return Ok(());
    }
    memory::populate(range, to_write).map_err(|Errno(errno)| match errno {
        libc::EINVAL => PrefaultError::Unsupported,
        libc::EFAULT | libc::ENOMEM => PrefaultError::BadAddress { range, errno },
        errno => PrefaultError::Os { range, errno },
    })
}
