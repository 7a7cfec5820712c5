//! The filters of system calls (seccomp) that the program puts itself under.
//!
//! A filter may end the process at any system call, and cannot be asked at which. So once the program has set one of
//! its own, nothing begins here that it did not expect: nothing more is kept, no report is written, no line is said.
//! The kernel tells whether a thread is under filters, not whether one has come besides those that it was started
//! with (a container's), except in `/proc`, which the filter may forbid. So the calls that set one are noted as they
//! are made, by the hooks on `prctl` and `syscall`. One that bypasses the hooks is found where the process was
//! started without filters.

use pinfold_kernel::process::sandbox_mode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Filled once, as the library is loaded; a child only reads it, which waits for no thread.
static MODE_AT_START: OnceLock<i32> = OnceLock::new();

/// How many restrictions the hooks have seen, those included that are being set.
static SET: AtomicU32 = AtomicU32::new(0);

/// Remembers what the process was started under. One system call.
pub(crate) fn note_start() {
    MODE_AT_START.get_or_init(sandbox_mode);
}

/// Whether the program has restricted its system calls since. Where no hook has seen that it did, this is one
/// system call.
pub(crate) fn is_the_program_s() -> bool {
    // Acquire: pairs with the increment, for a thread that a filter for all threads takes in.
    SET.load(Ordering::Acquire) != 0
        || MODE_AT_START.get().is_some_and(|&at_start| sandbox_mode() != at_start)
}

/// Makes a call that restricts the process from the moment on at which it succeeds. `has_failed` looks at its answer.
pub(crate) fn restricts<T>(call: impl FnOnce() -> T, has_failed: impl FnOnce(&T) -> bool) -> T {
    // Release, both: no other thread finds the filter and not the count.
    SET.fetch_add(1, Ordering::Release);
    let answer = call();
    if has_failed(&answer) {
        SET.fetch_sub(1, Ordering::Release);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_the_program_s_from_before_the_call_on_unless_it_fails() {
        note_start();
        assert!(!is_the_program_s());
        assert_eq!(restricts(|| i32::from(is_the_program_s()), |_| true), 1);
        assert!(!is_the_program_s());
    }
}
