//! Children of this process: started, waited for, and sent signals.
//!
//! # Safety
//!
//! The unsafe code of this file is there for calls that take numbers, and for what a child does before it executes its
//! program. None touches memory that another thread of this process uses.

use crate::signal::{Disposition, SignalSet, raise, set_disposition};
use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
#[cfg(test)]
use std::panic::{self, AssertUnwindSafe};
use std::process::{Child, Command};
use std::sync::atomic::AtomicPtr;
use std::{io, ptr};

unsafe extern "C" {
    static mut environ: *const *const c_char;
}

/// Each entry of this process's environment, as it is and in its order: those without `=`, and of one name all.
pub fn environment() -> Vec<CString> {
    // SAFETY: a thread that changes variables has promised that no other one reads them meanwhile (`set_var`), so that the
    // array and its strings stay. A null pointer ends it, and stands for it if it is empty.
    let entry = |at: usize| unsafe {
        let array = environ;
        let entry = if array.is_null() { ptr::null() } else { *array.add(at) };
        (!entry.is_null()).then(|| CStr::from_ptr(entry).to_owned())
    };
    (0..).map_while(entry).collect()
}

/// What a child has as it executes its program.
#[derive(Debug)]
pub struct ChildState {
    /// Each entry, in order.
    pub environment: Vec<CString>,
    /// What signals do.
    pub dispositions: Vec<(libc::c_int, Disposition)>,
    /// Which signals are blocked.
    pub blocked: SignalSet,
    /// Which of the standard streams are closed.
    pub closed: [bool; 3],
}

/// Starts a program for which no variable is set. The kernel kills it when the calling thread ends.
///
/// # Errors
///
/// As [`Command::spawn`].
pub fn start(mut program: Command, state: ChildState) -> io::Result<Child> {
    // SAFETY: a call that only asks.
    let parent = unsafe { libc::getpid() };
    let entries = state.environment.iter().map(|entry| entry.as_ptr().cast_mut());
    // Atomic only so that the whole may be sent.
    let entries: Vec<AtomicPtr<c_char>> =
        entries.chain([ptr::null_mut()]).map(AtomicPtr::new).collect();
    let begin = move || {
        // SAFETY: a forked child has one thread, and leaves this closure, which has the environment, only to execute the program
        // or to end. An atomic pointer is in memory as a pointer is.
        unsafe { environ = entries.as_ptr().cast() };
        state.begin(parent);
        Ok(())
    };
    // SAFETY: the closure sets a pointer and makes system calls that handlers may make.
    unsafe { program.pre_exec(begin) };
    program.spawn()
}

impl ChildState {
    /// In the child, behind what Rust's library does there. Its parent can send on every signal but SIGKILL, which therefore
    /// ends both.
    fn begin(&self, parent: libc::pid_t) {
        // SAFETY: calls that change this process only.
        let parent_now = unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::getppid()
        };
        // 0: this process is in a PID namespace of its own, as `unshare --pid` has it, and its parent has no number there.
        if ![parent, 0].contains(&parent_now) {
            raise(libc::SIGKILL);
        }
        self.dispositions.iter().for_each(|(signal, does)| set_disposition(*signal, *does));
        for (descriptor, _) in (0..).zip(self.closed).filter(|(_, is_closed)| *is_closed) {
            // SAFETY: a standard stream of a child that is about to execute a program.
            unsafe { libc::close(descriptor) };
        }
        self.blocked.block_alone();
    }
}

/// What has become of a child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChildChange {
    /// It has ended.
    Ended,
    /// This signal has stopped it.
    Stopped(libc::c_int),
    /// It has made this process its tracer (`PTRACE_TRACEME`), and this signal is about to reach it.
    Traced(libc::c_int),
}

const ANY: libc::c_int = libc::WEXITED | libc::WSTOPPED;

/// Waits for the next change of any child, and leaves it to be asked for again. `None` where there is no child.
pub fn next_change() -> Option<(libc::pid_t, ChildChange)> {
    let how = wait(libc::P_ALL, 0, ANY | libc::WNOWAIT)?;
    // SAFETY: the kernel has filled in which child it is, and what ended or stopped it.
    let (process, signal) = unsafe { (how.si_pid(), how.si_status()) };
    let change = match how.si_code {
        libc::CLD_STOPPED => ChildChange::Stopped(signal),
        libc::CLD_TRAPPED => ChildChange::Traced(signal),
        _ => ChildChange::Ended,
    };
    Some((process, change))
}

/// Takes a change of this child, if there is one: its end, which frees its number, or its stop.
pub fn take_change(process: libc::pid_t) {
    wait(libc::P_PID, process, ANY | libc::WNOHANG);
}

/// Whether this child has stopped and not been continued since; said once for each time it stops.
pub fn is_still_stopped(process: libc::pid_t) -> bool {
    wait(libc::P_PID, process, libc::WSTOPPED | libc::WNOHANG).is_some()
}

/// `waitid`; `None` where it fails, or where nothing is to be had and `WNOHANG` says not to wait.
fn wait(
    which: libc::idtype_t,
    process: libc::pid_t,
    options: libc::c_int,
) -> Option<libc::siginfo_t> {
    loop {
        let mut how = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: the call writes into the structure only, for which zeros are a value; a number is there in all of them.
        let (failed, how, number) = unsafe {
            let failed =
                libc::waitid(which, process.unsigned_abs(), how.as_mut_ptr(), options) != 0;
            let how = how.assume_init();
            (failed, how, how.si_pid())
        };
        if !failed {
            return (number != 0).then_some(how);
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Traces a child that has stopped for that no more: it goes on, with the signal if that is not 0. One that has been killed
/// meanwhile is left to be waited for.
pub fn stop_tracing(process: libc::pid_t, signal: libc::c_int) {
    // SAFETY: the call takes numbers alone.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, process, 0_usize, libc::c_long::from(signal)) };
}

/// Sends a signal to a process. A handler may call this.
pub fn send(process: libc::pid_t, signal: libc::c_int) {
    // SAFETY: the call takes numbers alone.
    unsafe { libc::kill(process, signal) };
}

/// Sends a signal to all of a process group. A handler may call this.
pub fn send_to_group(group: libc::pid_t, signal: libc::c_int) {
    send(-group, signal);
}

/// This process's parent; 0 for one outside of its PID namespace.
pub fn parent() -> libc::pid_t {
    // SAFETY: a call that only asks.
    unsafe { libc::getppid() }
}

/// The group of a process, and for 0 of this one; 0 for one outside of its PID namespace. A handler may call this.
pub fn group_of(process: libc::pid_t) -> Option<libc::pid_t> {
    // SAFETY: a call that only asks.
    Some(unsafe { libc::getpgid(process) }).filter(|&group| group != -1)
}

/// The session of a process, and for 0 of this one; 0 for one outside of its PID namespace.
pub fn session_of(process: libc::pid_t) -> Option<libc::pid_t> {
    // SAFETY: a call that only asks.
    Some(unsafe { libc::getsid(process) }).filter(|&session| session != -1)
}

/// How the forked child ends that `body` runs in: with 101 where it panics, as a program does. A timer ends it where it waits.
#[cfg(test)]
pub(crate) fn status_of_child(body: impl FnOnce() -> libc::c_int) -> libc::c_int {
    // SAFETY: the child ends; what it starts and allocates is its own.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the child's own timer.
        unsafe { libc::alarm(300) };
        // A panic that reached the test harness, which the parent's thread runs under, might end the child with 0.
        let status = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(101);
        // SAFETY: the child's own end.
        unsafe { libc::_exit(status) };
    }
    let mut status = -1;
    // SAFETY: the child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    fn state(environment: &[&CStr]) -> ChildState {
        ChildState {
            environment: environment.iter().map(|&entry| entry.into()).collect(),
            dispositions: vec![(libc::SIGTERM, Disposition::Ignored)],
            blocked: SignalSet::of([]),
            closed: [true, false, true],
        }
    }

    #[test]
    fn a_child_that_panics_has_not_succeeded() {
        // Without the hook, which takes locks that another thread of the parent may have held.
        let status = status_of_child(|| panic::resume_unwind(Box::new(())));
        assert_ne!(status, 0);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 101));
    }

    #[test]
    fn a_program_has_the_environment_entry_by_entry() {
        let mut program = Command::new("/usr/bin/env");
        program.stdout(Stdio::piped());
        let child = start(program, state(&[c"A=1", c"no sign", c"A=2"])).unwrap();
        assert_eq!(child.wait_with_output().unwrap().stdout, b"A=1\nno sign\nA=2\n");
        let own = environment();
        assert!(own.iter().any(|entry| entry.to_bytes().starts_with(b"PATH=")), "{own:?}");
    }

    #[test]
    fn a_traced_child_goes_on_or_is_left_to_be_waited_for() {
        let end_if = |killed: bool| {
            // SAFETY: the child makes calls that handlers may make, and ends.
            let child = unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::ptrace(libc::PTRACE_TRACEME, 0, 0_usize, 0_usize);
                    libc::raise(libc::SIGURG);
                    libc::_exit(7);
                }
                child
            };
            assert!(wait(libc::P_PID, child, ANY | libc::WNOWAIT).is_some());
            if killed {
                send(child, libc::SIGKILL);
                assert!(wait(libc::P_PID, child, libc::WEXITED | libc::WNOWAIT).is_some());
            }
            stop_tracing(child, libc::SIGURG);
            let end = wait(libc::P_PID, child, libc::WEXITED).unwrap();
            // SAFETY: the kernel has filled in how it ended.
            (end.si_code, unsafe { end.si_status() })
        };
        assert_eq!(end_if(true), (libc::CLD_KILLED, libc::SIGKILL));
        assert_eq!(end_if(false), (libc::CLD_EXITED, 7), "the signal is ignored");
    }

    #[test]
    fn a_child_begins_in_its_state_and_its_stop_is_said_once() {
        let mut program = Command::new("/bin/sh");
        let script = "cd /proc/$$/fd; [ ! -e 0 ] && [ -e 1 ] && [ ! -e 2 ] || exit 1; kill -TERM $$; kill -STOP $$; exit 7";
        program.args(["-c", script]);
        let mut child = start(program, state(&[])).unwrap();
        let process = child.id().cast_signed();
        assert_eq!((group_of(process), session_of(process)), (group_of(0), session_of(0)));
        while !is_still_stopped(process) {
            assert_eq!(child.try_wait().unwrap(), None, "it has not stopped");
            crate::thread::yield_now();
        }
        assert!(!is_still_stopped(process));
        take_change(process);
        send(process, libc::SIGCONT);
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert_eq!(group_of(process), None);
    }
}
