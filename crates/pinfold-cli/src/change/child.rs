//! Work in forked children, and how they end.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to fork, and for the child's end; a child is a copy of one thread, and its work calls
//! nothing that waits for another.

#![allow(unsafe_code)]

use super::obstacle::{Obstacle, Outcome};
use pinfold_kernel::child::send;
use pinfold_kernel::process::pidfd_open;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};
use std::time::{Duration, Instant};

/// What a panicking child answers.
const PANICKED: i32 = 255;

/// How a forked child ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ChildEnd {
    /// By itself, with this answer.
    Answered(u8),
    /// By a signal.
    Killed(i32),
    /// Not at all: it was killed for its time. Where its threads stood then.
    Hung(String),
}

/// How long a process may take before it is taken for hung. One that computes takes longer beside other load, and
/// still works; one that waits for what does not come uses no processor.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// With less of a processor's time than a thirtieth of this: a monitor's thread may look around meanwhile.
    resting: Duration,
    /// In all.
    working: Duration,
}

/// How long a child may take: to load the eBPF programs takes an emulated processor beside others half a minute.
const CHILD_PATIENCE: Patience =
    Patience { resting: Duration::from_secs(30), working: Duration::from_secs(120) };

/// Runs `work` in a forked child and returns its answer; `None` if the child did not end by itself
/// within the patience for children.
///
/// The child is a copy of the calling thread alone. It may allocate (libc mends its allocator
/// after a fork), and must not wait for a lock that another thread may have held.
pub(crate) fn in_child(work: impl FnOnce() -> u8) -> Outcome<Option<u8>> {
    match in_child_guarded((), work)? {
        ChildEnd::Answered(answer) => Ok(Some(answer)),
        ChildEnd::Killed(_) | ChildEnd::Hung(_) => Ok(None),
    }
}

/// The same; `guard` is held until the fork has been made, and released on both sides.
pub(crate) fn in_child_guarded<T>(guard: T, work: impl FnOnce() -> u8) -> Outcome<ChildEnd> {
    // SAFETY: see above; the child ends without running anything of the parent's.
    let child = unsafe {
        let child = libc::fork();
        drop(guard);
        if child == 0 {
            // In case no process is left to end it.
            libc::alarm(2 * u32::try_from(CHILD_PATIENCE.working.as_secs()).unwrap_or(0));
            let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(answer.map_or(PANICKED, i32::from));
        }
        child
    };
    if child < 0 {
        return Err(Obstacle::last("fork"));
    }
    Ok(end_of(child))
}

/// Waits for the end of a child of ours, in its time.
pub(super) fn end_of(child: libc::pid_t) -> ChildEnd {
    end_within(child, CHILD_PATIENCE)
}

fn end_within(child: libc::pid_t, patience: Patience) -> ChildEnd {
    let hung = (!comes_to_its_end(child, patience)).then(|| {
        let where_it_stood = tasks(child);
        // A child of ours that was not waited for: the number is no other process's.
        send(child, libc::SIGKILL);
        where_it_stood
    });
    match (hung, status_of(child)) {
        (Some(tasks), _) => ChildEnd::Hung(tasks),
        (None, None) => ChildEnd::Hung("it is no child of this process".into()),
        (None, Some(status)) => match status.exit_status() {
            Some(answer) => ChildEnd::Answered(u8::try_from(answer).unwrap_or(u8::MAX)),
            None => ChildEnd::Killed(status.terminating_signal().unwrap_or(0)),
        },
    }
}

/// `None` for what is no child of this process.
fn status_of(child: libc::pid_t) -> Option<WaitStatus> {
    let wait = || waitpid(Pid::from_raw(child), WaitOptions::empty());
    retry_on_intr(wait).ok().flatten().map(|(_, status)| status)
}

/// Waits until the process ends; false if it hangs.
fn comes_to_its_end(child: libc::pid_t, patience: Patience) -> bool {
    let begun = Instant::now();
    let mut worked = processor_time(child);
    while !ends_within(child, patience.resting) {
        let before = std::mem::replace(&mut worked, processor_time(child));
        let rests = worked.saturating_sub(before) < patience.resting / 30;
        if rests || begun.elapsed() >= patience.working {
            return false;
        }
    }
    true
}

/// What all threads of a child that was not waited for have had of the processors.
fn processor_time(child: libc::pid_t) -> Duration {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both calls write the value that they are given, and touch no other memory.
    let known = unsafe {
        libc::clock_getcpuclockid(child, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    if known { Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0)) } else { Duration::ZERO }
}

/// Waits until the process ends; false if it did not for so long. True where no descriptor can be
/// opened to find out: the alarm of the child ends it then.
fn ends_within(child: libc::pid_t, patience: Duration) -> bool {
    let Ok(descriptor) = pidfd_open(child.unsigned_abs()) else { return true };
    let patience = Timespec::try_from(patience).ok();
    let ended = || poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], patience.as_ref());
    retry_on_intr(ended) != Ok(0)
}

/// Where each thread of a process stands: its name, what it waits for, its system call and, for
/// root, the kernel's stack.
pub(crate) fn tasks(process: libc::pid_t) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return String::new();
    };
    let told = tasks.flatten().map(|task| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let words = ["comm", "wchan", "syscall", "stack"].map(read);
        words.map(|text| text.lines().collect::<Vec<_>>().join(" < ")).join(" | ")
    });
    told.collect::<Vec<_>>().join("\n")
}

/// From now on this process ends when its parent does.
pub(crate) fn end_with_parent() {
    // SAFETY: concerns this process only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn end_of_a(program: &str, patience: Patience) -> ChildEnd {
        let mut child = Command::new("sh").args(["-c", program]).spawn().unwrap();
        let end = end_within(libc::pid_t::try_from(child.id()).unwrap(), patience);
        assert!(child.wait().is_err(), "there is a child left to wait for");
        end
    }

    #[test]
    fn a_child_hangs_that_rests_or_does_not_come_to_its_end() {
        let (soon, never) = (Duration::from_secs(1), Duration::from_secs(3600));
        assert_eq!(
            end_of_a("exit 3", Patience { resting: never, working: never }),
            ChildEnd::Answered(3)
        );
        let resting = Patience { resting: soon, working: never };
        assert!(matches!(end_of_a("exec sleep 3600", resting), ChildEnd::Hung(_)));
        let begun = Instant::now();
        let working = Patience { resting: soon, working: 3 * soon };
        assert!(matches!(end_of_a("while :; do :; done", working), ChildEnd::Hung(_)));
        assert!(begun.elapsed() >= 3 * soon, "it worked, and was killed before its time");
    }
}
