//! Words on a descriptor that the program may have given another meaning since.

use crate::descriptor::{self, Descriptor, Identity, named};
use crate::errno::Errno;
use crate::signal::without_write_signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ReadWriteFlags;
use std::io::IoSlice;
use std::os::fd::{BorrowedFd, IntoRawFd};

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

    /// What the number stands for now.
    pub fn of(number: Descriptor) -> Self {
        Self { number, identity: descriptor::identity(number).ok() }
    }

    /// Keeps the file of `opened` for as long as the process lives, under a high number, closed on `exec`.
    ///
    /// # Errors
    ///
    /// There is no high number left.
    pub fn keep(opened: BorrowedFd<'_>) -> Result<Self, Errno> {
        const HIGH: [Descriptor; 4] = [1000, 500, 250, 120];
        let above = |&lowest: &Descriptor| descriptor::duplicate_above(opened, lowest).ok();
        let kept = HIGH.iter().find_map(above).ok_or(Errno(libc::EMFILE))?;
        Ok(Self::of(kept.into_raw_fd()))
    }

    /// Whether the number still stands for that file.
    pub fn is_still(&self) -> bool {
        self.identity.is_some() && descriptor::identity(self.number).ok() == self.identity
    }

    /// Writes `line` with one call, and leaves no signal behind. It may wait, as writes to that file do.
    ///
    /// # Errors
    ///
    /// Why nothing was written; `ENOSPC` if not all of it was.
    pub fn write_whole(&self, line: &str) -> Result<(), Errno> {
        let file = named(self.number)?;
        let written = without_write_signals(|| Ok(rustix::io::write(file, line.as_bytes())?))?;
        if written == line.len() { Ok(()) } else { Err(Errno(libc::ENOSPC)) }
    }

    /// Writes `line` with one call, without waiting and without a signal. Nothing where the number stands for
    /// another file by now, because that is the program's; nor where the file does not take it at once.
    ///
    /// # Errors
    ///
    /// Why nothing was written, or not all of it.
    pub fn write(&self, line: &str) -> Result<(), Errno> {
        if !self.is_still() {
            return Err(Errno(libc::EBADF));
        }
        write_at_once(named(self.number)?, line)
    }
}

/// What a pipe takes in one piece or not at all (`PIPE_BUF`).
const ONE_PIECE: usize = 4096;

fn write_at_once(file: BorrowedFd<'_>, line: &str) -> Result<(), Errno> {
    let written = without_write_signals(|| match without_waiting(file, line) {
        // Files that know no such writes: those on most disks, terminals, pipes before Linux 6.4.
        Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM)) => {
            if_ready(file, line)
        }
        answer => answer,
    })?;
    if written == line.len() { Ok(()) } else { Err(Errno(libc::EAGAIN)) }
}

fn without_waiting(file: BorrowedFd<'_>, line: &str) -> Result<usize, Errno> {
    const WHERE_IT_STANDS: u64 = u64::MAX;
    let parts = [IoSlice::new(line.as_bytes())];
    Ok(rustix::io::pwritev2(file, &parts, WHERE_IT_STANDS, ReadWriteFlags::NOWAIT)?)
}

/// Asks first. Another writer may come in between and have a pipe wait; what is longer than a pipe takes in one piece
/// is not written there, because the pipe may be ready for less.
fn if_ready(file: BorrowedFd<'_>, line: &str) -> Result<usize, Errno> {
    let mut asked = [PollFd::from_borrowed_fd(file, PollFlags::OUT)];
    poll(&mut asked, Some(&Timespec::default()))?;
    if !asked[0].revents().contains(PollFlags::OUT) || line.len() > ONE_PIECE {
        return Err(Errno(libc::EAGAIN));
    }
    Ok(rustix::io::write(file, line.as_bytes())?)
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

    /// The signal ends programs that do not ignore it.
    #[test]
    fn a_file_at_its_limit_costs_an_error_and_no_signal() {
        use std::os::unix::process::ExitStatusExt;
        use std::process::Command;
        const CHILD: &str = "PINFOLD_TEST_FILE_LIMIT";
        const NAME: &str = "words::tests::a_file_at_its_limit_costs_an_error_and_no_signal";
        let Some(path) = std::env::var_os(CHILD) else {
            let path = std::env::temp_dir().join(format!("pinfold-words-{}", std::process::id()));
            let mut again = Command::new(std::env::current_exe().unwrap());
            let status = again.args([NAME, "--exact"]).env(CHILD, &path).output().unwrap().status;
            std::fs::remove_file(&path).unwrap();
            assert_eq!((status.signal(), status.code()), (None, Some(0)));
            return;
        };
        let file = File::create(path).unwrap();
        let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a process of this test's own.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        crate::errno::set_errno(Errno(libc::EXDEV));
        let noted = NotedDescriptor::of(file.as_raw_fd());
        assert_eq!(noted.write("too much\n"), Err(Errno(libc::EFBIG)));
        assert_eq!(crate::errno::last_errno(), Errno(libc::EXDEV));
        // The test's own line may not be written either: nothing behind this needs one.
        std::process::exit(0);
    }

    /// A signal of another cause stays pending: the write did not raise it.
    #[test]
    fn a_pipe_s_signal_of_another_cause_is_left() {
        use crate::signal::{SignalSet, SignalsBlocked, raise, without_write_signals};
        let _blocked = SignalsBlocked::new();
        let raise = || {
            raise(libc::SIGPIPE);
            Err::<(), _>(Errno(libc::EAGAIN))
        };
        let is_pending = || SignalSet::pending().has(libc::SIGPIPE);
        assert!(without_write_signals(raise).is_err() && is_pending());
        let broken = || Err::<(), _>(Errno(libc::EPIPE));
        assert!(without_write_signals(broken).is_err() && is_pending(), "it was before");
        assert_eq!(SignalSet::of([libc::SIGPIPE]).take_pending(), Some(libc::SIGPIPE));
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
