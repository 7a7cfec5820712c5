//! Calls into code that is not ours: registrars, allowances, listeners, movers, destructors of what
//! they left.
//!
//! Such code may panic. Where a panic would leave something half done, it is called by [`call`], which
//! brings the panic back as a value; what is half done is finished first, then the panic goes on
//! ([`Panicked::resume`]), or it is dropped where it has nowhere to go. What a panic carries may
//! panic again when it is dropped: [`Panicked`] drops it where that does no harm.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A panic that has been caught and has not gone on yet.
#[must_use = "a panic goes on, or is dropped on purpose"]
pub(crate) struct Panicked(Option<Payload>);

type Payload = Box<dyn Any + Send>;

/// Calls code that is not ours. The caller answers for its own state: whatever `call` may leave half
/// done is finished when this returns.
pub(crate) fn call<T>(call: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| Panicked(Some(payload)))
}

impl Panicked {
    /// The panic goes on. Not while this thread is unwinding already, which would end the process.
    pub(crate) fn resume(mut self) -> ! {
        resume_unwind(self.0.take().unwrap_or_else(|| Box::new("a panic without payload")))
    }

    /// The panic goes on, unless this thread is unwinding already: for destructors.
    pub(crate) fn resume_unless_unwinding(self) {
        if !std::thread::panicking() {
            self.resume();
        }
    }
}

impl Drop for Panicked {
    fn drop(&mut self) {
        let Some(payload) = self.0.take() else { return };
        // A payload whose destructor panics leaves another one; that of the second is leaked.
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            let _leaked = ManuallyDrop::new(another);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb(u32);

    impl Drop for Bomb {
        fn drop(&mut self) {
            if let Some(left) = self.0.checked_sub(1) {
                std::panic::panic_any(Bomb(left));
            }
        }
    }

    #[test]
    fn what_a_panic_carries_may_panic() {
        for fuse in 0..3 {
            drop(call(|| std::panic::panic_any(Bomb(fuse))).err().unwrap());
        }
        let again = call(|| call(|| panic!("told")).map_err(|panicked| panicked.resume()));
        assert!(again.is_err());
        assert_eq!(call(|| 7).ok(), Some(7));
    }
}
