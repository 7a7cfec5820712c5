//! The addresses of memory that is left out of forked children, which no child maps anything at.
//!
//! The kernel gives a child nothing where its parent has `MADV_DONTFORK`, and what the child maps next may come there: a
//! pointer that the child has inherited reaches memory of its own. A handler of `pthread_atfork` maps these addresses
//! in the child, with no rights. A child that the C library did not fork (`_Fork`, `clone` or `fork` by their numbers) has
//! holes.
//!
//! No lock, which a thread that the child does not have might hold. An entry is one word, and a child has all of it or
//! nothing. It is there before the memory is left out, for which the kernel waits until a fork under way has ended: a
//! child without the memory has the entry.
//!
//! # Safety
//!
//! The unsafe code of this file registers the handler, which makes system calls only.

use crate::errno::Errno;
use crate::memory;
use pinfold_core::AddressRange;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What ranges begin at a multiple of, and are multiples of: a huge page.
const UNIT: usize = 2 << 20;
/// How many ranges there may be: 256 GiB where each is of 64 MiB.
const MOST: usize = 4096;

/// Zero, or the start of a range, with its number of units in the bits that the start has not.
///
/// Relaxed, all of them: a word that nothing else goes with. System calls of the thread that writes it, and the fork,
/// bring it into the order of the calls.
static ENTRIES: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];

/// Whether there ever was an entry. Relaxed, as they are.
static ANY: AtomicBool = AtomicBool::new(false);

/// Has children that are forked from now on map nothing at `range`, if it is left out of them. Not the child of a fork that
/// began before the [handler](register_handler) was there.
///
/// # Errors
///
/// `EINVAL` for what is not huge pages of 2 MiB, or 4 TiB of them; `ENOSPC` for too many ranges; `ENOMEM`.
pub(crate) fn add(range: AddressRange) -> Result<(), Errno> {
    let entry = entry_of(range).ok_or(Errno(libc::EINVAL))?;
    register_handler()?;
    ANY.store(true, Ordering::Relaxed);
    if change_one(0, entry) { Ok(()) } else { Err(Errno(libc::ENOSPC)) }
}

/// The range is about to be unmapped; nothing if it was not added.
pub(crate) fn remove(range: AddressRange) {
    if let Some(entry) = entry_of(range) {
        change_one(entry, 0);
    }
}

fn entry_of(range: AddressRange) -> Option<usize> {
    let units = range.len() / UNIT;
    let fits = (range.start() | range.len()).is_multiple_of(UNIT) && units < UNIT;
    fits.then_some(range.start() | units)
}

fn change_one(from: usize, to: usize) -> bool {
    let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
    ENTRIES.iter().any(|entry| entry.compare_exchange(from, to, success, failure).is_ok())
}

/// The C library does not call it for a fork under way: a handler of that fork, or another thread meanwhile, may have
/// called this.
///
/// Threads that race, and a child that is forked meanwhile, register it twice: the second call finds nothing to do.
///
/// # Errors
///
/// `ENOMEM`.
pub(crate) fn register_handler() -> Result<(), Errno> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // Acquire and release: a thread that sees it set and forks finds the handler in the C library's list.
    if REGISTERED.load(Ordering::Acquire) {
        return Ok(());
    }
    // SAFETY: the function makes system calls only, and is as long there as this library: the C library forgets
    // the handlers of one that it unloads.
    match unsafe { libc::pthread_atfork(None, None, Some(child_begins)) } {
        0 => REGISTERED.store(true, Ordering::Release),
        errno => return Err(Errno(errno)),
    }
    Ok(())
}

/// In a forked child. No memory, no lock: threads that do not exist here may have been anywhere.
unsafe extern "C" fn child_begins() {
    // Most programs have none: the words are not brought in for them.
    let any = if ANY.load(Ordering::Relaxed) { &ENTRIES[..] } else { &[] };
    for entry in any {
        let range = entry.load(Ordering::Relaxed);
        if range > 0 {
            // The child's own children inherit the mapping.
            entry.store(0, Ordering::Relaxed);
            // Where something is mapped the memory was not left out yet, and no pointer to it was given out; or a
            // handler that was registered earlier has mapped it. There is no more room needed than the parent had.
            let _ = memory::forbid_if_free(range / UNIT * UNIT, range % UNIT * UNIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::status_of_child;

    fn range(unit: usize, units: usize) -> AddressRange {
        AddressRange::new(unit * UNIT, units * UNIT).unwrap()
    }

    #[test]
    fn a_range_is_one_word() {
        assert_eq!(entry_of(range(3, 5)), Some(3 * UNIT + 5));
        assert_eq!(entry_of(range(1, UNIT - 1)), Some(UNIT + UNIT - 1));
        assert_eq!(entry_of(range(1, UNIT)), None);
        assert_eq!(entry_of(AddressRange::new(UNIT, UNIT - 4096).unwrap()), None);
        assert_eq!(entry_of(AddressRange::new(UNIT + 4096, UNIT).unwrap()), None);
    }

    /// In a child: others of this process add ranges.
    #[test]
    fn a_full_table_refuses_until_a_range_goes() {
        let status = status_of_child(|| {
            let all_added = (1..=MOST).all(|unit| add(range(unit, 1)).is_ok());
            let refused = add(range(MOST + 1, 1)) == Err(Errno(libc::ENOSPC));
            remove(range(7, 2));
            let is_full = add(range(MOST + 1, 1)).is_err();
            remove(range(7, 1));
            let has_room = add(range(MOST + 1, 1)).is_ok();
            i32::from(!(all_added && refused && is_full && has_room))
        });
        assert_eq!(status, 0);
    }
}
