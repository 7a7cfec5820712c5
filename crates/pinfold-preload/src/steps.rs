//! A deregistration in two steps: a thread of ours has the kernel end it, and a thread of the program has
//! libibverbs release what it has of it.
//!
//! libibverbs ends a registration by one `ioctl` and then frees a structure. A thread that frees memory has the
//! C library set 64 MiB of addresses aside for it, so a thread of ours must not. In the first step libibverbs
//! runs on our thread, the hook on `ioctl` makes the call, and when the kernel has ended the registration the hook
//! answers EBUSY: libibverbs keeps its structure, as for a registration that is in use. In the second step
//! libibverbs runs once more on a thread of the program, and the hook answers for the kernel that it is done.
//!
//! Where libibverbs' call does not reach the hook (another library's hook, a kernel that takes requests by
//! `write` only), the first step does all of it.

use libc::EBUSY;
use std::cell::Cell;

/// What becomes of the calling thread's next `ioctl` of verbs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// It is made.
    None,
    /// It is made, and answered with EBUSY if it succeeded.
    InKernel,
    /// It is answered with success, and not made.
    InLibrary,
    /// That has happened: others are made.
    Over,
}

thread_local! {
    /// No destructor and a constant: reading it allocates nothing.
    static STEP: Cell<Step> = const { Cell::new(Step::None) };
}

/// What the first step did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The kernel has ended it, and libibverbs has its structure still: [`in_library`] is to follow.
    InKernel,
    /// Both have.
    Wholly,
    /// The kernel refused.
    Not,
}

/// The first step. `dereg` is libibverbs' deregistration; it says whether it succeeded.
pub(crate) fn in_kernel(dereg: impl FnOnce() -> bool) -> Ended {
    let (succeeded, over) = during(Step::InKernel, dereg);
    match (succeeded, over) {
        (true, _) => Ended::Wholly,
        (false, true) => Ended::InKernel,
        (false, false) => Ended::Not,
    }
}

/// The second step, of what [`in_kernel`] ended in the kernel alone.
pub(crate) fn in_library(dereg: impl FnOnce() -> bool) {
    during(Step::InLibrary, dereg);
}

/// Whether `dereg` succeeded, and whether the step was taken.
fn during(step: Step, dereg: impl FnOnce() -> bool) -> (bool, bool) {
    STEP.set(step);
    let succeeded = dereg();
    (succeeded, STEP.replace(Step::None) == Step::Over)
}

/// The answer to an `ioctl` of verbs, as the kernel gives it; `call` makes it.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) fn answer(call: impl FnOnce() -> isize) -> isize {
    match STEP.get() {
        Step::None | Step::Over => call(),
        Step::InKernel => {
            let answer = call();
            if answer < 0 {
                return answer;
            }
            STEP.set(Step::Over);
            -(EBUSY as isize)
        }
        Step::InLibrary => {
            STEP.set(Step::Over);
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A library that frees its structure when the kernel has ended the registration.
    struct Library {
        /// What the kernel says to each call.
        answers: RefCell<Vec<isize>>,
        is_freed: Cell<bool>,
    }

    impl Library {
        fn new(answers: &[isize]) -> Self {
            Self { answers: RefCell::new(answers.to_vec()), is_freed: Cell::new(false) }
        }

        fn dereg(&self) -> bool {
            let ended = answer(|| self.answers.borrow_mut().pop().expect("a call too many")) >= 0;
            self.is_freed.set(self.is_freed.get() | ended);
            ended
        }
    }

    #[test]
    fn the_kernel_is_asked_once_and_the_structure_freed_by_the_second_step() {
        let library = Library::new(&[0]);
        assert_eq!(in_kernel(|| library.dereg()), Ended::InKernel);
        assert!(!library.is_freed.get());
        in_library(|| library.dereg());
        assert!(library.is_freed.get());
        assert!(Library::new(&[0]).dereg(), "calls are made again");
    }

    #[test]
    fn what_the_kernel_refuses_stays() {
        let library = Library::new(&[-16]);
        assert_eq!(in_kernel(|| library.dereg()), Ended::Not);
        assert!(!library.is_freed.get());
    }

    #[test]
    fn a_library_that_does_not_come_by_here_does_all_in_one() {
        assert_eq!(in_kernel(|| true), Ended::Wholly);
    }

    /// Behind the first call of a step the library's others are made.
    #[test]
    fn one_call_is_answered_for_the_kernel() {
        let library = Library::new(&[-5, 0]);
        in_library(|| library.dereg() && library.dereg() && !library.dereg());
        assert!(library.answers.borrow().is_empty());
    }
}
