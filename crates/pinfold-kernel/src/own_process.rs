//! The program's open files, for a thread with a table of descriptors of its own.

use crate::descriptor::{Descriptor, named};
use crate::errno::Errno;
use crate::process::pidfd_open;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use std::os::fd::{AsFd, OwnedFd};

/// This process, for a thread with a table of descriptors of its own: what the table of the first thread has.
#[derive(Debug)]
pub struct OwnProcess(OwnedFd);

impl OwnProcess {
    /// Whether the kernel has the calls (Linux 5.6) and no filter of system calls refuses them with an error. Opens nothing.
    pub fn lends() -> bool {
        // Both look at what they are given first, and neither number stands for anything.
        let process = named(Descriptor::MAX).map(|none| {
            rustix::process::pidfd_getfd(none, Descriptor::MAX, PidfdGetfdFlags::empty()).err()
        });
        let opened = rustix::process::pidfd_open(Pid::INIT, PidfdFlags::from_bits_retain(!0)).err();
        process == Ok(Some(rustix::io::Errno::BADF)) && opened == Some(rustix::io::Errno::INVAL)
    }

    /// Takes one number in the calling thread's table.
    ///
    /// # Errors
    ///
    /// The kernel's: no number is free, for instance.
    pub fn open() -> Result<Self, Errno> {
        pidfd_open(std::process::id()).map(Self)
    }

    /// A second descriptor, in the calling thread's table, of what `number` stands for in that of the first thread.
    ///
    /// No right is needed: the kernel asks for none within a process (`__ptrace_may_access`).
    ///
    /// # Errors
    ///
    /// `EBADF` where the number stands for nothing; `EBADF` or `ESRCH` where the first thread has ended; in a forked
    /// child, which is another process, what the kernel says to those.
    ///
    /// # Safety
    ///
    /// As for [`duplicate`](crate::descriptor::duplicate).
    pub unsafe fn borrow(&self, number: Descriptor) -> Result<OwnedFd, Errno> {
        let flags = PidfdGetfdFlags::empty();
        Ok(rustix::process::pidfd_getfd(self.0.as_fd(), number, flags)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::{close, identity, keep_only, open};
    use std::os::fd::{AsRawFd, IntoRawFd};

    #[test]
    fn a_thread_with_an_empty_table_borrows_what_a_number_stands_for() {
        if !OwnProcess::lends() {
            return eprintln!("skipped: pidfd_getfd is refused");
        }
        let file = open(c"/dev/zero", 0).unwrap();
        let number = file.as_raw_fd();
        let borrowed = std::thread::spawn(move || {
            // SAFETY: this thread has no descriptor's value.
            unsafe { keep_only(&[]) }?;
            let process = OwnProcess::open()?;
            // SAFETY: it stands for nothing.
            assert!(unsafe { process.borrow(Descriptor::MAX) }.is_err());
            // SAFETY: the test's own file.
            let borrowed = unsafe { process.borrow(number) }?.into_raw_fd();
            let seen = identity(borrowed);
            // SAFETY: borrowed above.
            unsafe { close(borrowed) };
            seen
        });
        assert_eq!(borrowed.join().unwrap(), identity(number));
    }
}
