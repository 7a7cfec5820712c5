//! The process at the other end of a connection.
//!
//! # Why the view goes to the process that it shows
//!
//! Let N be the number of the process that connected (`SO_PEERCRED`; the kernel noted the process
//! then), P the process that our pidfd stands for, and S the process that sent the request
//! (`SCM_CREDENTIALS`; the kernel writes the number of the sending process into the packet's control data).
//!
//! - P had the number N at some time after the connection was accepted: Linux 6.5 gives the pidfd of
//!   the connecting process itself; before, we open the pidfd by N.
//! - The challenge is sent after that, and the request repeats it. So the request was sent later than
//!   the pidfd was opened, by a process that had the number N then (we compare S's number with N).
//! - P is alive after the request was received. A number belongs to a process from its birth until it
//!   is reaped, and P had N before the request was sent and has it afterwards: S is P.
//!
//! So the process that asked is the one whose view it gets. If N's first owner ended and P got the
//! number anew (possible before 6.5), P holds the connection, by inheritance or otherwise, and asked
//! by itself for what concerns itself; it gains nothing that it could not have by connecting.
//! A connection that was passed on is refused, because there S is not N.
//!
//! (A process with `CAP_SYS_ADMIN` over its pid namespace may write another process of that namespace
//! with its packets. It may look into that process anyway.)
//!
//! # Why the process must be dumpable
//!
//! A hostile program could connect, execute a set-user-ID program with the connection as its standard
//! output, and have it print the request; a second process that shares the connection would then
//! receive a view of the privileged program. The kernel keeps such programs' addresses from their
//! callers by marking them as not dumpable, which shows in who owns their files in `/proc`. So do we,
//! before the view is made and again afterwards.
//!
//! A thread that has ended, and is still there, has no address space, and its files show as root's, whatever the
//! process is. So where the first thread's are not the user's, the other threads are looked at. One whose files are the
//! user's suffices: all threads of a process are in one address space, and the mark is the address space's.

use pinfold_ebpf::protocol::ViewRefusal;
use pinfold_kernel::poll::is_readable;
use pinfold_kernel::process::pidfd_open;
use pinfold_kernel::socket::{self, Process};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How many threads of a process are looked at: threads that have ended stay only where a debugger keeps them, or
/// first; a process that keeps thousands is not to delay others.
const MOST_THREADS: usize = 64;

/// The process that connected.
#[derive(Debug)]
pub(crate) struct Peer {
    /// Its numbers when it connected.
    credentials: Process,
    /// Becomes readable when it ends.
    process: OwnedFd,
}

impl Peer {
    /// The process at the other end of `connection`, whose numbers the caller has asked for.
    pub(crate) fn new(
        connection: BorrowedFd<'_>,
        credentials: Process,
    ) -> Result<Self, ViewRefusal> {
        if credentials.pid == 0 {
            return Err(ViewRefusal::NotVisible);
        }
        let process = match socket::peer_process(connection) {
            Err(error) if is_unknown_option(&error) => {
                pidfd_open(credentials.pid).map_err(io::Error::from)
            }
            process => process,
        };
        let process = process.map_err(|error| not_opened(&error))?;
        Ok(Self { credentials, process })
    }

    pub(crate) fn user(&self) -> u32 {
        self.credentials.uid
    }

    pub(crate) fn pid(&self) -> u32 {
        self.credentials.pid
    }

    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    pub(crate) fn has_ended(&self) -> bool {
        is_readable(self.process())
    }

    /// Whether a packet is from this process.
    pub(crate) fn sent(&self, sender: Process) -> bool {
        sender.pid == self.credentials.pid
    }

    /// Whether the process's own user may look at its addresses, and it is alive.
    pub(crate) fn check_open_to_its_user(&self) -> Result<(), ViewRefusal> {
        let open = self.is_open_to_its_user();
        // Asked after the files: so the files were this process's.
        match open {
            _ if self.has_ended() => Err(ViewRefusal::Gone),
            Ok(true) => Ok(()),
            Ok(false) => Err(ViewRefusal::NotDumpable),
            Err(_) => Err(ViewRefusal::NotVisible),
        }
    }

    fn is_open_to_its_user(&self) -> io::Result<bool> {
        let Process { pid, uid } = self.credentials;
        let process = PathBuf::from(format!("/proc/{pid}"));
        Ok(owner_of_files(&process)? == uid
            || any_thread(&process, |thread| {
                owner_of_files(thread).is_ok_and(|owner| owner == uid)
            })?)
    }
}

/// The owner of a process's or thread's files in `/proc`: its effective user, or root if it is not dumpable or has ended.
/// (The directory itself would always say the former.)
fn owner_of_files(directory: &Path) -> io::Result<u32> {
    fs::metadata(directory.join("stat")).map(|status| status.uid())
}

/// Whether one of the process's threads is as `is_so` says, of the oldest [`MOST_THREADS`].
fn any_thread(process: &Path, is_so: impl Fn(&Path) -> bool) -> io::Result<bool> {
    let threads = fs::read_dir(process.join("task"))?.take(MOST_THREADS);
    Ok(threads.flatten().any(|thread| is_so(&thread.path())))
}

fn is_unknown_option(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOPROTOOPT)
}

fn not_opened(error: &io::Error) -> ViewRefusal {
    match error.raw_os_error() {
        // Three kernels, three ways to say it.
        Some(libc::ESRCH | libc::ENODATA | libc::EINVAL) => ViewRefusal::Gone,
        errno => ViewRefusal::Kernel { errno: errno.unwrap_or(0) },
    }
}

/// Whether `/proc` shows processes by the numbers that sockets tell.
pub(crate) fn proc_is_ours() -> bool {
    fs::read_link("/proc/self").is_ok_and(|link| {
        link.to_str().and_then(|link| link.parse().ok()) == Some(std::process::id())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_know_ourselves() {
        let (here, _there) = socket::pair().unwrap();
        let credentials = socket::peer(here.as_fd()).unwrap();
        let peer = Peer::new(here.as_fd(), credentials).unwrap();
        assert_eq!((peer.pid(), peer.has_ended()), (std::process::id(), false));
        assert!(peer.sent(credentials));
        assert!(!peer.sent(Process { pid: 1, ..credentials }));
        assert!(proc_is_ours());
    }

    #[test]
    fn a_process_that_we_cannot_see_is_refused() {
        let (here, _there) = socket::pair().unwrap();
        let unseen = Process { pid: 0, uid: 1000 };
        assert_eq!(Peer::new(here.as_fd(), unseen).unwrap_err(), ViewRefusal::NotVisible);
    }
}
