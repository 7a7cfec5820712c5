//! Where registrations were kept, and what releases a range that the program wants for itself.
//!
//! Hooks run in any process, long before anything is kept and mostly where nothing ever is: then each
//! costs a load here.

use pinfold::AddressRange;
use pinfold_kernel::FirstMade;
use pinfold_kernel::errno::{last_errno, set_errno};
use std::sync::atomic::{AtomicUsize, Ordering};

/// All addresses of which something was ever kept lie between these two; none at first.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// When a range is to be released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum When {
    /// The kernel has refused the program's call.
    Refused,
    /// Before the program's call, which would be refused half done: where the monitor has noted a watch. The kernel is not
    /// asked: a mapping that was never used is another one after that question.
    Ahead,
}

/// Runs what it is given last while nothing in the range is watched; not at all where there is no monitor, or no memory.
pub(crate) type StepAside = fn(AddressRange, When, &mut dyn FnMut());

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

/// Has `step_aside` called, on the program's threads, with each range that the program's call was refused for, or
/// will be. The first call counts.
pub(crate) fn step_aside_by(step_aside: &'static StepAside) {
    STEP_ASIDE.get_or_set(step_aside);
}

/// Whether anything was ever kept, wherever. What is watched is whole mappings, which reach beyond.
pub(super) fn is_anything_kept() -> bool {
    kept(AddressRange::EVERYTHING).is_some()
}

/// Has the monitor release `range` and makes `call`, before another thread's registration has it watched again; `None`,
/// and no call, if there is nothing that would. Leaves the error number as it was.
pub(super) fn step_aside_for<T>(
    range: AddressRange,
    when: When,
    call: impl Fn() -> T,
) -> Option<T> {
    let step_aside = STEP_ASIDE.get().filter(|_| is_anything_kept())?;
    let errno = last_errno();
    let mut answer = None;
    step_aside(range, when, &mut || answer = Some(call()));
    set_errno(errno);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_before_something_is() {
        let range = |start| AddressRange::new(start, 0x1000).unwrap();
        assert_eq!(kept(range(0x10_0000)), None);
        assert!(!is_anything_kept());
        note_kept(range(0x10_0000));
        note_kept(range(0x20_0000));
        assert_eq!(kept(range(0x18_0000)), Some(range(0x18_0000)), "in between");
        assert_eq!(kept(range(0x30_0000)), None);
        assert!(is_anything_kept());
    }
}
