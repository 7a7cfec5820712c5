//! Waiting for several descriptors at once.

use crate::errno::Errno;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Descriptors that are waited for, each under a number of the caller's choice (`epoll`).
#[derive(Debug)]
pub struct Poll(OwnedFd);

/// That something can be done with a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The descriptor's number for the caller.
    pub key: u64,
    /// The other side has closed.
    pub hung_up: bool,
}

/// What is waited for besides the other side's closing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// That there is something to read.
    Reading,
    /// Nothing.
    Closing,
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Self::Reading => EventFlags::IN,
            Self::Closing => EventFlags::empty(),
        }
    }
}

/// As many events as are taken at once.
pub const BATCH: usize = 64;

impl Poll {
    /// Waits for nothing yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Begins to wait for `descriptor`; ends when all of its copies are closed.
    pub fn add(&self, descriptor: BorrowedFd<'_>, key: u64) -> Result<(), Errno> {
        let flags = Interest::Reading.flags();
        Ok(epoll::add(&self.0, descriptor, EventData::new_u64(key), flags)?)
    }

    /// Waits for something else of it.
    pub fn change(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> Result<(), Errno> {
        Ok(epoll::modify(&self.0, descriptor, EventData::new_u64(key), interest.flags())?)
    }

    /// Ends waiting for `descriptor`; nothing if it is not waited for.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.0, descriptor);
    }

    /// Waits until something is ready, for `patience` at most, or for ever. A signal ends it early.
    pub fn wait(&self, patience: Option<Duration>) -> Result<Vec<Ready>, Errno> {
        let mut events = [MaybeUninit::uninit(); BATCH];
        // Rounded up, so that no caller looks again and again in the last millisecond.
        let most = Duration::from_millis(i32::MAX.unsigned_abs().into());
        let patience = patience.map(|it| it.saturating_add(Duration::from_millis(1)).min(most));
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        let gone = EventFlags::HUP | EventFlags::ERR;
        let ready = |event: &epoll::Event| {
            let (key, flags) = (event.data.u64(), event.flags);
            Ready { key, hung_up: flags.intersects(gone) }
        };
        match epoll::wait(&self.0, &mut events, patience.as_ref()) {
            Ok((got, _)) => Ok(got.iter().map(ready).collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether there is something to read, right now; of a pidfd: whether the process has ended. What cannot even
/// be asked counts as readable: reading says why.
pub fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let asked = PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN);
        match rustix::event::poll(&mut [asked], Some(&now)) {
            Err(rustix::io::Errno::INTR) => {}
            answer => return answer != Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::pidfd_open;

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
    fn what_is_ready_has_the_number_that_it_was_added_under() {
        let (reader, writer) = std::io::pipe().unwrap();
        let poll = Poll::new().unwrap();
        poll.add(reader.as_fd(), 7).unwrap();
        assert_eq!(poll.wait(Some(Duration::ZERO)).unwrap(), []);
        poll.change(reader.as_fd(), 8, Interest::Closing).unwrap();
        drop(writer);
        assert_eq!(poll.wait(None).unwrap(), [Ready { key: 8, hung_up: true }]);
        poll.remove(reader.as_fd());
        assert_eq!(poll.wait(Some(Duration::ZERO)).unwrap(), []);
    }
}
