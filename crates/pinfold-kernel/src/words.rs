//! Words on a descriptor that the program may have given another meaning since.

use crate::descriptor::{self, Descriptor, Identity, named};
use crate::errno::Errno;
use crate::signal::without_pipe_signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;

/// A number, and the file that it stood for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotedDescriptor {
    number: Descriptor,
    /// `None` if it stood for none.
    identity: Option<Identity>,
}

impl NotedDescriptor {
    /// Standard error as it is now.
    pub fn standard_error() -> Self {
        Self::of(libc::STDERR_FILENO)
    }

    fn of(number: Descriptor) -> Self {
        Self { number, identity: descriptor::identity(number).ok() }
    }

    /// Writes `line` with one call, without waiting and without a signal. Nothing where the number stands for
    /// another file by now, because that is the program's; nor where the file does not take it at once.
    ///
    /// # Errors
    ///
    /// Why nothing was written, or not all of it.
    pub fn write(&self, line: &str) -> Result<(), Errno> {
        if self.identity.is_none() || descriptor::identity(self.number).ok() != self.identity {
            return Err(Errno(libc::EBADF));
        }
        write_at_once(named(self.number)?, line)
    }
}

fn write_at_once(file: BorrowedFd<'_>, line: &str) -> Result<(), Errno> {
    let mut asked = [PollFd::from_borrowed_fd(file, PollFlags::OUT)];
    poll(&mut asked, Some(&Timespec::default()))?;
    if !asked[0].revents().contains(PollFlags::OUT) {
        return Err(Errno(libc::EAGAIN));
    }
    let written = without_pipe_signal(|| rustix::io::write(file, line.as_bytes()))?;
    if written == line.len() { Ok(()) } else { Err(Errno(libc::EAGAIN)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_line_reaches_the_file_that_was_noted_and_no_other() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let noted = NotedDescriptor::of(writer.as_raw_fd());
        noted.write("one\n").unwrap();
        let file = File::open("/dev/null").unwrap();
        let another = NotedDescriptor { number: file.as_raw_fd(), ..noted };
        assert_eq!(another.write("two\n"), Err(Errno(libc::EBADF)));
        let closed = NotedDescriptor { number: 1 << 20, identity: None };
        assert_eq!(closed.write("three\n"), Err(Errno(libc::EBADF)));
        drop(writer);
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert_eq!(said, "one\n");
    }

    /// The standard library ignores SIGPIPE in Rust's programs, and C's have it end them.
    #[test]
    fn a_reader_that_has_gone_costs_an_error_and_no_signal() {
        // SAFETY: the disposition is put back below; no other test of this crate writes to a broken pipe.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let (reader, writer) = std::io::pipe().unwrap();
        let noted = NotedDescriptor::of(writer.as_raw_fd());
        drop(reader);
        assert!(noted.write("lost\n").is_err());
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGPIPE, before) };
    }

    #[test]
    fn a_full_pipe_is_not_waited_for() {
        let (_reader, mut writer) = std::io::pipe().unwrap();
        let noted = NotedDescriptor::of(writer.as_raw_fd());
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while writer.write(&[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        assert_eq!(noted.write("more\n"), Err(Errno(libc::EAGAIN)));
    }
}
