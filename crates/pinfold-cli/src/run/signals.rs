//! What signals do in this process: they are noted, or sent on to the program.
//!
//! A signal that a terminal sends reaches the program without us; one that a process sends to us alone is sent on. While
//! there is no program, before it starts and after its end, a signal is only noted, so that the files are removed
//! that this process has made; a second one ends it at once. While the program starts they wait. A signal that stops is only
//! sent on, too: this process stops once the program has (`wait`).
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have a function called before `main`, and to promise that the handler does only what
//! handlers may: it reads and writes atomics and makes system calls.

#![allow(unsafe_code)]

use pinfold_kernel::child::{group_of, send, send_to_group};
use pinfold_kernel::descriptor::is_open;
use pinfold_kernel::signal::{
    Disposition, SignalHandler, SignalSet, handle, is_ignored, raise, set_disposition,
};
use std::iter;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The process that signals are sent on to; 0 for none any more. It is waited for behind that only, so that the number is its
/// own, and its group's.
static CHILD: AtomicI32 = AtomicI32::new(NOT_YET);
const NOT_YET: i32 = -1;
/// The signal that arrived while there was none; 0 for none.
static NOTED: AtomicI32 = AtomicI32::new(0);

/// Signals that end a program which does not handle them.
const ENDING: [libc::c_int; 13] = [
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGXCPU,
    libc::SIGALRM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
];
/// Signals that do nothing to a program which does not handle them.
const HARMLESS: [libc::c_int; 2] = [libc::SIGWINCH, libc::SIGURG];
/// Signals that stop a program which does not handle them.
const STOPPING: [libc::c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
/// Those that a terminal sends to all its processes, the program among them.
const FROM_TERMINAL: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGWINCH];

/// Signals that this process does not leave as they were, and whether they were ignored as it began. Rust's runtime ignores
/// SIGPIPE before `main`; the kernel keeps no status for a process that ignores SIGCHLD, and ends by SIGXFSZ one that writes
/// more than a file may have.
static CHANGED: [(libc::c_int, AtomicBool); 3] = [
    (libc::SIGPIPE, AtomicBool::new(false)),
    (libc::SIGCHLD, AtomicBool::new(false)),
    (libc::SIGXFSZ, AtomicBool::new(false)),
];

/// Which of the standard streams were closed as this process began. Rust's runtime opens them, so that no other file has
/// their numbers; the program has them as they were.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Before Rust's runtime begins.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_START: extern "C" fn() = note_start;

extern "C" fn note_start() {
    for (signal, was_ignored) in &CHANGED {
        was_ignored.store(is_ignored(*signal), Ordering::SeqCst);
    }
    for (descriptor, was_closed) in (0..).zip(&CLOSED) {
        was_closed.store(!is_open(descriptor), Ordering::SeqCst);
    }
}

/// Which of the standard streams the program is to have closed.
pub(super) fn closed_streams() -> [bool; 3] {
    CLOSED.each_ref().map(|was_closed| was_closed.load(Ordering::SeqCst))
}

/// Has the kernel keep the statuses of processes that this one starts, whatever its own starter wanted, and refuse what this
/// one writes and has no room for.
pub(super) fn keep_statuses() {
    set_disposition(libc::SIGCHLD, Disposition::Default);
    set_disposition(libc::SIGXFSZ, Disposition::Ignored);
}

/// Has signals noted from now on, and sent on to the program while it runs.
pub(super) fn catch_signals() {
    ending().chain(STOPPING).chain(HARMLESS).chain([libc::SIGCONT]).for_each(catch);
}

/// Those that end a program which does not handle them: those of real time, too.
fn ending() -> impl Iterator<Item = libc::c_int> {
    ENDING.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX())
}

/// Has signals do from now on what they do to a program without handlers; those that were ignored are.
pub(super) fn leave_signals() {
    ending().chain(STOPPING).for_each(leave);
}

fn leave(signal: libc::c_int) {
    if !is_ignored(signal) {
        set_disposition(signal, Disposition::Default);
    }
}

/// What signals do in a child that is about to execute the program: what they did as this command began. Of those that end
/// a program, the ones that were ignored are. One that stops waits for the program: this process would be waited for in vain
/// until something continues it.
pub(super) fn as_it_began() -> Vec<(libc::c_int, Disposition)> {
    let handled = ending().filter(|signal| !is_ignored(*signal));
    let changed =
        CHANGED.iter().map(|(signal, was_ignored)| match was_ignored.load(Ordering::SeqCst) {
            true => (*signal, Disposition::Ignored),
            false => (*signal, Disposition::Default),
        });
    handled.map(|signal| (signal, Disposition::Default)).chain(changed).collect()
}

/// Blocks what would be lost, or end this process, while the program starts; what was blocked before.
pub(super) fn hold() -> SignalSet {
    SignalSet::of(ending().chain(HARMLESS)).block()
}

/// Those that a terminal has sent since signals are [held](hold): it sends them to the processes that there are, and the program
/// is not there yet.
pub(super) fn take_held() -> Vec<libc::c_int> {
    let held = SignalSet::of(FROM_TERMINAL.into_iter().filter(|signal| !STOPPING.contains(signal)));
    iter::from_fn(|| held.take_pending()).collect()
}

/// Has signals sent on to this process from now on.
pub(super) fn send_to_program(program: libc::pid_t) {
    CHILD.store(program, Ordering::SeqCst);
}

/// There is no program any more.
pub(super) fn send_to_none() {
    CHILD.store(0, Ordering::SeqCst);
}

/// What arrived before was for the program.
pub(super) fn send_what_was_noted(program: libc::pid_t) {
    let earlier = NOTED.swap(0, Ordering::SeqCst);
    if earlier != 0 {
        send(program, earlier);
    }
}

/// The end that a noted signal asks for.
pub(super) fn asked_to_end() -> Option<ExitStatus> {
    // SeqCst, as all here: a few times in a program's life.
    let signal = NOTED.load(Ordering::SeqCst);
    (signal != 0).then(|| ExitStatus::from_raw(signal))
}

/// One that is ignored stays so, for the program as well. Others wait for the handler's end, so that signals are sent on in the order in which they arrive.
fn catch(signal: libc::c_int) {
    if !is_ignored(signal) {
        // SAFETY: the handler reads and writes atomics and makes system calls that handlers may make.
        unsafe { handle::<Relay>(signal) };
    }
}

/// The handler.
struct Relay;

impl SignalHandler for Relay {
    fn on_signal(signal: libc::c_int, by_process: bool) {
        let child = CHILD.load(Ordering::SeqCst);
        if signal == libc::SIGCONT {
            continued();
        }
        if child > 0 {
            send_on(child, signal, by_process);
        } else {
            without_program(signal, child == NOT_YET);
        }
    }
}

/// A terminal signals this process's group, and a shell continues it. Where the program has left that for one of its own, as
/// `timeout` does, those signals go to all of its group.
fn send_on(child: libc::pid_t, signal: libc::c_int, by_process: bool) {
    let has_own = group_of(child) == Some(child) && group_of(0) != Some(child);
    let by_terminal = !by_process && FROM_TERMINAL.contains(&signal);
    if has_own && (by_terminal || signal == libc::SIGCONT) {
        send_to_group(child, signal);
    } else if !by_terminal {
        send(child, signal);
    }
}

/// Before the program is continued: another signal that stops reaches it from now on, and one that was noted is over.
fn continued() {
    STOPPING.into_iter().for_each(catch);
    let _ = note(|noted| STOPPING.contains(&noted).then_some(0));
}

/// What a signal does while there is no program. One that stops is for a program that is about to start, if a terminal has
/// sent it to both: this process would wait for one that has stopped too early to say that it started.
fn without_program(signal: libc::c_int, is_to_start: bool) {
    let stops = STOPPING.contains(&signal);
    if stops && is_to_start {
        let _ = note(|noted| (noted == 0).then_some(signal));
    } else if stops {
        stop_by(signal, || true);
    } else if signal != libc::SIGCONT && !HARMLESS.contains(&signal) {
        note(|noted| (noted == 0 || STOPPING.contains(&noted)).then_some(signal))
            .unwrap_or_else(|_| as_by_default(signal));
    }
}

/// Changes what is noted, if there is something to change.
fn note(change: impl Fn(libc::c_int) -> Option<libc::c_int>) -> Result<(), libc::c_int> {
    NOTED.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).map(drop)
}

/// Has the signal do what it does to a program without a handler: end this process, or stop it, behind its handler.
fn as_by_default(signal: libc::c_int) {
    set_disposition(signal, Disposition::Default);
    raise(signal);
}

/// Stops this process by a signal as it does to a program without a handler, if it is due once it is pending. A handler may
/// call this. The kernel stops no group that no shell watches: nothing may continue it.
pub(super) fn stop_by(signal: libc::c_int, is_due: impl FnOnce() -> bool) {
    let set = SignalSet::of([signal]);
    let before = set.block();
    as_by_default(signal);
    if is_due() {
        // This process stops here.
        set.unblock();
    } else {
        let _ = set.take_pending();
    }
    catch(signal);
    before.block_alone();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_sent_while_signals_were_held_is_taken() {
        let before = hold();
        for signal in [libc::SIGINT, libc::SIGWINCH, libc::SIGTERM] {
            raise(signal);
        }
        let mut taken = take_held();
        taken.sort_unstable();
        assert_eq!(taken, [libc::SIGINT, libc::SIGWINCH]);
        assert!(take_held().is_empty());
        assert_eq!(SignalSet::of([libc::SIGTERM]).take_pending(), Some(libc::SIGTERM));
        before.block_alone();
    }
}
