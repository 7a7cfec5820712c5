//! Waiting for the program's end. What stops the program stops this process, so that a shell sees its job stopped.
//!
//! The order keeps a SIGCONT from being lost: the signal by which this process is to stop is blocked and pending before the
//! program is asked whether it still is stopped. A SIGCONT that arrives after that takes the pending one away, by the kernel's
//! own rule; an earlier one has been sent on, so that the program is not stopped any more.
//!
//! Other children are those that this process had before, or that were left to it: as the first process of a container, or
//! as a subreaper. Each is reaped as it ends; the program alone is left for its starter to reap, with its status.

use super::signals::stop_by;
use pinfold_kernel::child::{
    ChildChange, group_of, is_still_stopped, next_change, parent, session_of, stop_tracing,
    take_change,
};
use pinfold_kernel::signal::raise;

/// Leaves the program to be waited for, so that its number stays its own.
pub(super) fn for_end(program: libc::pid_t) {
    while let Some((process, change)) = next_change() {
        match change {
            ChildChange::Stopped(signal) if process == program => stop_with(program, signal),
            ChildChange::Ended if process == program => return,
            ChildChange::Traced(signal) => let_go(process, signal),
            _ => take_change(process),
        }
    }
}

/// Traces a child no more. A trap is of the execution of a program, and no signal of its own. The stop is not taken: a child
/// that is killed meanwhile may be the program, whose end is not this thread's to take.
fn let_go(process: libc::pid_t, signal: libc::c_int) {
    stop_tracing(process, if signal == libc::SIGTRAP { 0 } else { signal });
}

/// Stops this process as the program has stopped. The kernel asks whether a shell watches, but not for SIGSTOP: what
/// continues a program that has stopped itself unwatched may know the program's number alone.
fn stop_with(program: libc::pid_t, signal: libc::c_int) {
    if signal != libc::SIGSTOP {
        return stop_by(signal, || is_still_stopped(program));
    }
    if is_still_stopped(program) && is_watched() {
        raise(signal);
    }
}

/// Whether this process was started as a shell starts a job: in a group of its own.
fn is_watched() -> bool {
    let shell = parent();
    session_of(shell) == session_of(0) && group_of(shell) != group_of(0)
}
