//! Where registrations were kept, and what releases a range that the program wants for itself.
//!
//! Hooks run in any process, long before anything is kept and mostly where nothing ever is: then each
//! costs a load here.

use pinfold::AddressRange;
use pinfold_kernel::FirstMade;
use std::sync::atomic::{AtomicUsize, Ordering};

/// All addresses of which something was ever kept lie between these two; none at first.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

pub(crate) type StepAside = fn(AddressRange);

static STEP_ASIDE: FirstMade<StepAside> = FirstMade::new();

/// A registration of `range` is about to be kept.
pub(crate) fn note_kept(range: AddressRange) {
    // Read first: most are in between, and a write takes the line from every other thread. Relaxed: a thread that
    // takes rights away from memory that another thread registers at this moment may come first.
    if range.start() < LOWEST.load(Ordering::Relaxed) {
        LOWEST.fetch_min(range.start(), Ordering::Relaxed);
    }
    if range.end() > HIGHEST.load(Ordering::Relaxed) {
        HIGHEST.fetch_max(range.end(), Ordering::Relaxed);
    }
}

/// What of `range` may be kept.
pub(super) fn kept(range: AddressRange) -> Option<AddressRange> {
    // Relaxed: as above.
    let (low, high) = (LOWEST.load(Ordering::Relaxed), HIGHEST.load(Ordering::Relaxed));
    AddressRange::between(low, high)?.intersection(&range)
}

/// Has `step_aside` called, on the program's threads, with each range that its own userfaultfd was
/// refused. The first call counts.
pub(crate) fn step_aside_by(step_aside: &'static StepAside) {
    STEP_ASIDE.get_or_set(step_aside);
}

/// Has the monitor release `range`; false if there is nothing that would.
pub(super) fn step_aside(range: AddressRange) -> bool {
    let asked = kept(range).and(STEP_ASIDE.get());
    asked.iter().for_each(|step_aside| step_aside(range));
    asked.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_before_something_is() {
        let range = |start| AddressRange::new(start, 0x1000).unwrap();
        assert_eq!(kept(range(0x10_0000)), None);
        note_kept(range(0x10_0000));
        note_kept(range(0x20_0000));
        assert_eq!(kept(range(0x18_0000)), Some(range(0x18_0000)), "in between");
        assert_eq!(kept(range(0x30_0000)), None);
    }
}
