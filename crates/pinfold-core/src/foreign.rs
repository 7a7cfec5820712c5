//! Calls into code that is not ours: registrars, budgets, callbacks, listeners, movers, destructors of
//! what they left. For this workspace's own crates.
//!
//! Such code may panic. Where a panic would leave something half done, it is called by [`call`], which
//! brings the panic back as a value; what is half done is finished first, then the panic goes on
//! ([`Panicked::resume`]), or it is dropped where it has nowhere to go. What a panic carries may
//! panic again when it is dropped: [`discard`] drops it where that does no harm.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call the destructor of what a value of ours holds for the program, which
//! is not dropped in any other way.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A panic that has been caught and has not gone on yet.
#[must_use = "a panic goes on, or is dropped on purpose"]
pub struct Panicked(Option<Payload>);

type Payload = Box<dyn Any + Send>;

/// Calls code that is not ours. The caller answers for its own state: whatever `call` may leave half
/// done is finished when this returns.
///
/// # Errors
///
/// Its panic.
pub fn call<T>(call: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| Panicked(Some(payload)))
}

/// Calls code that is not ours, whose panic has nowhere to go. False if it panicked.
pub fn runs_through(f: impl FnOnce()) -> bool {
    call(f).is_ok()
}

/// Drops what is the program's: a callback that is not wanted any more, what a panic carries. Its destructor
/// may panic, and what that carries may panic again when it is dropped; then it is leaked.
pub fn discard<T>(theirs: T) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(theirs)))
        && let Err(last) = catch_unwind(AssertUnwindSafe(|| drop(another)))
    {
        std::mem::forget(last);
    }
}

/// [Discards](discard) one after the other: where two destructors panic, a list that is dropped as a whole
/// would end the process.
pub fn discard_all<T>(theirs: impl IntoIterator<Item = T>) {
    theirs.into_iter().for_each(discard);
}

/// What the program has handed over for a call and gets back at its end, with devices that may go on using
/// it. Dropped, it is forgotten: a panic that comes between ends no use.
pub struct HandedOver<T>(Vec<T>);

impl<T> HandedOver<T> {
    /// Until [`into_vec`](Self::into_vec).
    pub const fn new(theirs: Vec<T>) -> Self {
        Self(theirs)
    }

    /// All of it, to be given back.
    pub fn into_vec(mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }
}

impl<T> fmt::Debug for HandedOver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandedOver({})", self.0.len())
    }
}

impl<T> std::ops::Deref for HandedOver<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> std::ops::DerefMut for HandedOver<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T> Drop for HandedOver<T> {
    fn drop(&mut self) {
        self.0.drain(..).for_each(std::mem::forget);
    }
}

/// A value of the program's whose destructor is called by the library: [discarded](discard) when this is dropped,
/// also because of a panic, where a second one would end the process.
pub struct Foreign<T>(Option<T>);

impl<T> Foreign<T> {
    /// It is ours until [`take`](Self::take).
    pub const fn new(theirs: T) -> Self {
        Self(Some(theirs))
    }

    /// The value, unless it was taken.
    pub const fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    /// The value, whose destructor is the caller's to call.
    pub const fn take(&mut self) -> Option<T> {
        self.0.take()
    }
}

impl<T> fmt::Debug for Foreign<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Foreign({})", usize::from(self.0.is_some()))
    }
}

impl<T> Drop for Foreign<T> {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(discard);
    }
}

/// Many [`Foreign`] values.
pub struct ForeignList<T>(Vec<T>);

impl<T> ForeignList<T> {
    /// They are ours until [`into_vec`](Self::into_vec).
    pub const fn new(theirs: Vec<T>) -> Self {
        Self(theirs)
    }

    /// All of them, whose destructors are the caller's to call.
    pub fn into_vec(mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }
}

impl<T: Clone> ForeignList<T> {
    /// Copies of all; those that there are already are discarded where the next cannot be made.
    pub fn copies(&self) -> Self {
        Self::copies_of(&self.0)
    }

    /// The same of values that are the caller's.
    pub fn copies_of(theirs: &[T]) -> Self {
        let mut copies = Self(Vec::with_capacity(theirs.len()));
        theirs.iter().for_each(|theirs| copies.0.push(theirs.clone()));
        copies
    }
}

impl<T> Default for ForeignList<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> std::ops::Deref for ForeignList<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> std::ops::DerefMut for ForeignList<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T> fmt::Debug for ForeignList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignList({})", self.0.len())
    }
}

impl<T> Drop for ForeignList<T> {
    fn drop(&mut self) {
        discard_all(self.0.drain(..));
    }
}

/// A value of the program's that is a part of one of ours: a registrar, a monitor, a budget. Its destructor is called
/// when this is dropped; a panic of it goes on, unless one is on its way already. Where several parts panic, the
/// first panic goes on.
pub struct ForeignPart<T>(ManuallyDrop<T>);

impl<T> ForeignPart<T> {
    /// It is dropped with this.
    pub const fn new(theirs: T) -> Self {
        Self(ManuallyDrop::new(theirs))
    }

    /// The value, whose destructor is the caller's to call.
    pub fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl<T> std::ops::Deref for ForeignPart<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> std::ops::DerefMut for ForeignPart<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: fmt::Debug> fmt::Debug for ForeignPart<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T> Drop for ForeignPart<T> {
    fn drop(&mut self) {
        // SAFETY: dropped once, in the destructor.
        if let Err(panicked) = call(|| unsafe { ManuallyDrop::drop(&mut self.0) }) {
            panicked.resume_unless_unwinding();
        }
    }
}

impl Panicked {
    /// The panic goes on. Not while this thread is unwinding already, which would end the process.
    pub fn resume(mut self) -> ! {
        resume_unwind(self.0.take().unwrap_or_else(|| Box::new("a panic without payload")))
    }

    /// The panic goes on, unless this thread is unwinding already: for destructors.
    pub fn resume_unless_unwinding(self) {
        if !std::thread::panicking() {
            self.resume();
        }
    }
}

impl Drop for Panicked {
    fn drop(&mut self) {
        if let Some(payload) = self.0.take() {
            discard(payload);
        }
    }
}

impl fmt::Debug for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Panicked")
    }
}

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;

    thread_local! {
        /// How many destructors of payloads are still to panic on this thread.
        pub(crate) static FUSE: Cell<u32> = const { Cell::new(0) };
    }

    /// Nothing in memory: what is leaked on purpose is no leak to a sanitizer.
    pub(crate) struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            if let Some(left) = FUSE.get().checked_sub(1) {
                FUSE.set(left);
                std::panic::panic_any(Bomb);
            }
        }
    }

    /// Counts its destructions, and holds nothing of the heap: one that is forgotten is no leak.
    struct Theirs<'a>(&'a Cell<u32>);

    impl Drop for Theirs<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn what_was_handed_over_outlives_a_panic() {
        let dropped = Cell::new(0);
        let lost = call(|| {
            let _theirs = HandedOver::new(vec![Theirs(&dropped)]);
            panic!("in between");
        });
        assert!(lost.is_err());
        assert_eq!(dropped.get(), 0);
        drop(HandedOver::new(vec![Theirs(&dropped)]).into_vec());
        assert_eq!(dropped.get(), 1);
    }

    /// Panics when it is dropped, if it is told to.
    struct Loud<'a>(&'a Cell<u32>, bool);

    impl Drop for Loud<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
            assert!(!self.1, "dropped");
        }
    }

    #[test]
    fn what_is_ours_to_drop_is_dropped_once_although_all_of_it_panics() {
        for unwinding in [false, true] {
            let dropped = Cell::new(0);
            let ended = call(|| {
                let _one = Foreign::new(Loud(&dropped, true));
                let _many = ForeignList::new((0..3).map(|_| Loud(&dropped, true)).collect());
                assert!(!unwinding, "on its way");
            });
            assert_eq!((ended.is_err(), dropped.get()), (unwinding, 4));
        }
    }

    #[test]
    fn the_first_of_several_parts_that_panic_goes_on() {
        for unwinding in [false, true] {
            let dropped = Cell::new(0);
            let ended = call(|| {
                let part = || ForeignPart::new(Loud(&dropped, true));
                let _parts = (part(), part(), part());
                assert!(!unwinding, "on its way");
            });
            assert!(ended.is_err());
            assert_eq!(dropped.get(), 3);
        }
        let dropped = Cell::new(0);
        let taken = ForeignPart::new(Loud(&dropped, false)).into_inner();
        assert_eq!(dropped.get(), 0);
        drop(taken);
        assert_eq!(dropped.get(), 1);
    }

    #[test]
    fn what_is_taken_out_is_the_callers_to_drop() {
        let dropped = Cell::new(0);
        let mut one = Foreign::new(Loud(&dropped, false));
        let many = ForeignList::new(vec![Loud(&dropped, false)]).into_vec();
        let taken = one.take();
        drop(one);
        assert_eq!((dropped.get(), many.len(), taken.is_some()), (0, 1, true));
    }

    #[test]
    fn what_a_panic_carries_may_panic() {
        for fuse in 0..4 {
            FUSE.set(fuse);
            discard(Bomb);
            FUSE.set(fuse);
            drop(call(|| std::panic::panic_any(Bomb)).err().unwrap());
        }
        FUSE.set(0);
        let again = call(|| call(|| panic!("told")).map_err(|panicked| panicked.resume()));
        assert!(again.is_err());
        assert_eq!(call(|| 7).ok(), Some(7));
    }
}
