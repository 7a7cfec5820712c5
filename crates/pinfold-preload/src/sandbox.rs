//! The filters of system calls (seccomp) that the program puts itself under.
//!
//! A filter may end the process at any system call, and cannot be asked at which. So once the program has set one of
//! its own, nothing begins here that it did not expect: nothing more is kept, no report is written, no line is said.
//! The kernel tells whether a thread is under filters, not whether one has come besides those that it was started
//! with (a container's), except in `/proc`, which the filter may forbid. So the calls that set one are noted as they
//! are made, by the hooks on `prctl` and `syscall`. One that bypasses the hooks is found where the process was
//! started without filters.
//!
//! A child of `vfork` has its parent's memory, and may restrict itself before it executes another program: that
//! restricts no thread of the parent's. So the process's number is noted, and a call by another process is not counted. A
//! forked child, which has a memory of its own, does not know its number before it registers something: it asks the kernel
//! nothing as it begins, because a filter of its parent's may end it there.

use pinfold_kernel::process::{process_id, sandbox_mode};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Filled once, as the library is loaded; a child only reads it, which waits for no thread.
static MODE_AT_START: OnceLock<i32> = OnceLock::new();

/// How many restrictions the hooks have seen, those included that are being set.
static SET: AtomicU32 = AtomicU32::new(0);

/// The number of the process that has this memory; 0 if it is not known.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Remembers what the process was started under, and its number. Two system calls.
pub(crate) fn note_start() {
    MODE_AT_START.get_or_init(sandbox_mode);
    note_process();
}

/// The calling process has this memory. One system call.
pub(crate) fn note_process() {
    // Relaxed, here and below: a number that no other memory goes with.
    PROCESS.store(process_id(), Ordering::Relaxed);
}

/// In a forked child, whose number is not its parent's. No system call.
pub(crate) fn forget_process() {
    PROCESS.store(0, Ordering::Relaxed);
}

/// Whether the calling process is one of `vfork`, which has another's memory. False where that is not known.
///
/// One system call, and none once a restriction was seen, which may forbid it.
fn is_in_another_s_memory() -> bool {
    let process = PROCESS.load(Ordering::Relaxed);
    process != 0 && !is_seen() && process_id() != process
}

/// Whether the hooks have seen a restriction. No system call.
pub(crate) fn is_seen() -> bool {
    // Acquire: pairs with the increment, for a thread that a filter for all threads takes in.
    SET.load(Ordering::Acquire) != 0
}

/// Whether the program has restricted its system calls since. Where no hook has seen that it did, this is one
/// system call.
pub(crate) fn is_the_program_s() -> bool {
    is_seen() || MODE_AT_START.get().is_some_and(|&at_start| sandbox_mode() != at_start)
}

/// Makes a call that restricts the calling process from the moment on at which it succeeds. `has_failed` looks at its answer.
pub(crate) fn restricts<T>(call: impl FnOnce() -> T, has_failed: impl FnOnce(&T) -> bool) -> T {
    if is_in_another_s_memory() {
        return call();
    }
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
        // Not the process: other tests have children without the handler of a fork.
        MODE_AT_START.get_or_init(sandbox_mode);
        assert!(!is_the_program_s());
        assert_eq!(restricts(|| i32::from(is_the_program_s()), |_| true), 1);
        assert!(!is_the_program_s());
    }
}
