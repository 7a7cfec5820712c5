//! The seam to the kernel: waiting, processes, limits.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Every function is
//! safe to call with any argument: pointers come from references, lengths from slices, and a
//! descriptor of the wrong kind gives an error.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Takes over a number that a system call has just given.
fn owned(number: libc::c_long) -> io::Result<OwnedFd> {
    let number = libc::c_int::try_from(checked(number)?).unwrap_or(-1);
    // SAFETY: the kernel has just given us this number; it is no error, so it is not -1.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

// --- waiting --------------------------------------------------------------------------------------

/// Descriptors that are waited for, each under a number of the caller's choice.
#[derive(Debug)]
pub(crate) struct Poll(OwnedFd);

/// That something can be done with a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ready {
    /// The descriptor's number for the caller.
    pub(crate) key: u64,
    /// The other side has closed.
    pub(crate) hung_up: bool,
}

/// What is waited for besides the other side's closing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Interest {
    /// That there is something to read.
    Reading,
    /// Nothing.
    Closing,
}

/// As many events as are taken at once.
pub(crate) const BATCH: usize = 64;

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the call takes and gives numbers.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }.into()).map(Self)
    }

    /// Begins to wait for `descriptor`; ends when all of its copies are closed.
    pub(crate) fn add(&self, descriptor: BorrowedFd<'_>, key: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, descriptor, key, Interest::Reading)
    }

    pub(crate) fn change(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, descriptor, key, interest)
    }

    /// Ends waiting for `descriptor`; nothing if nobody waits for it.
    pub(crate) fn remove(&self, descriptor: BorrowedFd<'_>) {
        let _ = self.control(libc::EPOLL_CTL_DEL, descriptor, 0, Interest::Closing);
    }

    fn control(
        &self,
        operation: libc::c_int,
        descriptor: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> io::Result<()> {
        let events = if interest == Interest::Reading { libc::EPOLLIN } else { 0 };
        let mut event = libc::epoll_event { events: events.cast_unsigned(), u64: key };
        let (poll, number) = (self.0.as_raw_fd(), descriptor.as_raw_fd());
        // SAFETY: the kernel reads `event`.
        let done = unsafe { libc::epoll_ctl(poll, operation, number, &raw mut event) };
        checked(done.into()).map(drop)
    }

    /// Waits until something is ready, for `patience` at most, or for ever. A signal ends it early.
    pub(crate) fn wait(&self, patience: Option<Duration>) -> io::Result<Vec<Ready>> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let patience = patience.map_or(-1, |patience| {
            // Rounded up, so that nobody looks again and again in the last millisecond.
            i32::try_from(patience.as_millis().saturating_add(1)).unwrap_or(i32::MAX)
        });
        let room = libc::c_int::try_from(BATCH).unwrap_or(1);
        // SAFETY: the kernel writes at most `room` events.
        let got =
            unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), room, patience) };
        let got = match checked(got.into()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            got => usize::try_from(got?).unwrap_or(0),
        };
        let gone = (libc::EPOLLHUP | libc::EPOLLERR).cast_unsigned();
        let ready = |event: &libc::epoll_event| {
            let (key, events) = (event.u64, event.events);
            Ready { key, hung_up: events & gone != 0 }
        };
        Ok(events.iter().take(got).map(ready).collect())
    }
}

/// Whether there is something to read, right now; of a pidfd: whether the process has ended.
pub(crate) fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: the kernel reads and writes one `pollfd`.
        let answered = unsafe { libc::poll(&raw mut poll, 1, 0) };
        let error = io::Error::last_os_error();
        if answered >= 0 || error.kind() != io::ErrorKind::Interrupted {
            // What cannot even be asked is not there any more.
            return answered != 0;
        }
    }
}

/// The signals that ask a service to end, and one that nobody minds: blocked for this thread and
/// those that it starts, readable here instead.
#[derive(Debug)]
pub struct StopSignals(OwnedFd);

impl StopSignals {
    /// To be called before other threads start.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` fills the set before the others read it. Blocking signals breaks no
        // invariant of memory.
        let number = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        owned(number.into()).map(Self)
    }
}

impl AsFd for StopSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// --- processes ------------------------------------------------------------------------------------

/// A descriptor of the process that has this number now.
pub(crate) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes and gives numbers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// A number that nobody can guess.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    // SAFETY: the kernel writes at most the array's length. So few bytes come at once or not at all.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    checked(got as libc::c_long)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Gives the calling thread a table of descriptors of its own, with a copy of `kept` as its only one,
/// which closes when the thread ends.
pub(crate) fn keep_only_for_this_thread(kept: RawFd) -> io::Result<()> {
    let kept = kept.unsigned_abs();
    // SAFETY: this thread's table is its own from the first call on, so the second closes nothing
    // that another thread has. The caller's thread ends without using any other descriptor.
    unsafe {
        let unshare = libc::CLOSE_RANGE_UNSHARE;
        checked(libc::syscall(libc::SYS_close_range, kept.saturating_add(1), u32::MAX, unshare))?;
        if kept > 0 {
            checked(libc::syscall(libc::SYS_close_range, 0, kept - 1, 0))?;
        }
    }
    Ok(())
}

/// The calling thread's number.
pub(crate) fn this_thread() -> i32 {
    // SAFETY: no precondition.
    unsafe { libc::gettid() }
}

/// Whether this process has a thread of that number, be it one that is ending.
pub(crate) fn thread_exists(thread: i32) -> bool {
    // SAFETY: signal 0 is none.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) == 0 }
}

#[cfg(test)]
pub(crate) fn is_open_for_test(number: RawFd) -> bool {
    // SAFETY: asks about a number.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// Locks an open file for this process, unless another one has.
pub(crate) fn lock(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call takes numbers.
    let done = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    checked(done.into()).map(drop)
}

/// A descriptor of our own for the first one that a service manager passes. That one stays open:
/// nothing in this process has its number for anything else.
pub(crate) fn duplicate_passed() -> io::Result<OwnedFd> {
    const FIRST: libc::c_int = 3;
    // SAFETY: the call takes and gives numbers.
    owned(unsafe { libc::fcntl(FIRST, libc::F_DUPFD_CLOEXEC, FIRST) }.into())
}

/// The calling process's user.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// Raises the soft limit on descriptors to the hard one; what it is now.
pub(crate) fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one structure.
    checked(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }.into())?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one structure.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }.into())?;
    Ok(limit.rlim_cur)
}

/// Has the last close of a TCP socket wait for its reader.
#[cfg(test)]
pub(crate) fn linger_for_test(socket: BorrowedFd<'_>, seconds: libc::c_int) {
    let value = libc::linger { l_onoff: 1, l_linger: seconds };
    let length = libc::socklen_t::try_from(size_of_val(&value)).unwrap();
    let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
    // SAFETY: the kernel reads `value`.
    let done = unsafe {
        let value = (&raw const value).cast();
        libc::setsockopt(socket.as_raw_fd(), level, name, value, length)
    };
    checked(done.into()).unwrap();
}

/// Waits until there is something to read.
#[cfg(test)]
pub(crate) fn await_for_test(descriptor: BorrowedFd<'_>) {
    let poll = Poll::new().unwrap();
    poll.add(descriptor, 0).unwrap();
    while poll.wait(None).unwrap().is_empty() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_process_is_readable() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = pidfd_open(child.id()).unwrap();
        assert!(!is_readable(process.as_fd()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(is_readable(process.as_fd()));
        assert!(pidfd_open(0).is_err());
    }

    #[test]
    fn numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
