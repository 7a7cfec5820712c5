//! The threads of this process and what each is doing, as `/proc/self/task` tells it.
//!
//! Nothing here allocates: paths and texts live on the stack, the list in room given by the caller.

/// The calling thread's number.
pub(super) use pinfold_kernel::thread::thread_id;

pub(super) use pinfold_kernel::descriptor::Identity;
use pinfold_kernel::{Errno, descriptor};
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The process's threads as the calling thread finds them: its `/proc/self/task`, open.
///
/// Each thread may have a `/proc` of its own (`chroot` or a mount, after `unshare(CLONE_FS)`), or none. What is asked within
/// the open directory is answered by one `/proc`; where that has no such entry, there is no such thread.
#[derive(Debug)]
pub(super) struct ThreadDirectory {
    directory: OwnedFd,
    identity: Identity,
}

impl ThreadDirectory {
    /// # Errors
    ///
    /// The kernel's: no `/proc` (`ENOENT`), nor where an ordinary directory has its name; no descriptor left.
    pub(super) fn open() -> Result<Self, Errno> {
        let directory = descriptor::open_of_proc(c"/proc/self/task", libc::O_DIRECTORY)?;
        let identity = descriptor::identity(directory.as_raw_fd())?;
        Ok(Self { directory, identity })
    }

    /// The same for two that are of the same process and the same `/proc`. The kernel may forget a directory that no
    /// process has open, which makes two of one.
    pub(super) fn identity(&self) -> Identity {
        self.identity
    }

    /// For questions within it.
    pub(super) fn lend(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Lists the threads into `list`, up to its capacity.
    ///
    /// The kernel's listing leaves out living threads when a thread that it has just listed ends
    /// meanwhile. So the list is read twice and believed when both agree: a thread whose end
    /// disturbed the first reading is missing from the second.
    ///
    /// # Errors
    ///
    /// `EAGAIN` when threads come and go too fast, `E2BIG` when there are more than `list` holds, or
    /// the kernel's error (no descriptor left).
    pub(super) fn list(&self, list: &mut Vec<u32>) -> Result<(), Errno> {
        for _ in 0..3 {
            list.clear();
            self.each_thread(&mut |thread| {
                let fits = list.len() < list.capacity();
                if fits {
                    list.push(thread);
                }
                fits
            })?;
            if self.is_same_again(list)? {
                return Ok(());
            }
        }
        Err(Errno(libc::EAGAIN))
    }

    fn is_same_again(&self, list: &[u32]) -> Result<bool, Errno> {
        let mut expected = list.iter();
        let mut same = true;
        self.each_thread(&mut |thread| {
            same &= expected.next() == Some(&thread);
            true
        })?;
        Ok(same && expected.next().is_none())
    }

    /// Calls `visit` for each thread; it returns false when it has no room.
    fn each_thread(&self, visit: &mut dyn FnMut(u32) -> bool) -> Result<(), Errno> {
        // Opened anew: it is read from its beginning.
        let directory = descriptor::open_in(self.lend(), c".", libc::O_DIRECTORY)?;
        let mut fits = true;
        descriptor::each_number(directory.as_fd(), &mut |thread| {
            fits = fits && visit(thread);
        })?;
        if fits { Ok(()) } else { Err(Errno(libc::E2BIG)) }
    }

    /// Whether a thread is at rest: asleep so that a signal would wake it, stopped, or gone. Not one that a tracer has
    /// stopped, which may be in the middle of a `vfork` whose child runs.
    ///
    /// On any doubt this says no.
    pub(super) fn is_at_rest(&self, thread: u32) -> bool {
        match self.state_of(thread) {
            Ok(state) => matches!(state, b'S' | b'T' | b'Z' | b'X' | b'x'),
            // The thread, not `/proc`: its directory of threads is open.
            Err(Errno(libc::ENOENT | libc::ESRCH)) => true,
            Err(_) => false,
        }
    }

    /// The state letter behind the name, which stands in brackets and may contain any.
    fn state_of(&self, thread: u32) -> Result<u8, Errno> {
        let mut path = [0; 32];
        let _ = write!(path.as_mut_slice(), "{thread}/stat");
        let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno(libc::EINVAL))?;
        let stat = descriptor::open_in(self.lend(), path, 0)?;
        let mut text = [0; 512];
        let got = descriptor::read(stat.as_fd(), &mut text)?;
        let text = text.get(..got).unwrap_or_default();
        let name_end = text.iter().rposition(|&byte| byte == b')').ok_or(Errno(libc::EINVAL))?;
        text.get(name_end + 2).copied().ok_or(Errno(libc::EINVAL))
    }

    /// Whether the calling thread's number is here what the kernel says to us.
    ///
    /// `/proc` may have been mounted for an outer name space of processes. Then its numbers are not
    /// those of `gettid`, and a thread could be taken for another.
    pub(super) fn numbers_agree(&self) -> bool {
        let mut buffer = [0; 64];
        let link = descriptor::read_link_in(self.lend(), c"../../thread-self", &mut buffer);
        let last = link.unwrap_or_default().rsplit(|&byte| byte == b'/').next();
        std::str::from_utf8(last.unwrap_or_default())
            .is_ok_and(|last| last.parse() == Ok(thread_id()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::{in_root, without_proc};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;

    /// A busy thread is found running, and at rest once it waits at a barrier.
    #[test]
    fn a_thread_is_at_rest_when_it_sleeps() {
        let (busy, number, barrier) = (AtomicBool::new(true), AtomicU32::new(0), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                number.store(thread_id(), Ordering::Release);
                while busy.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                barrier.wait();
            });
            while number.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            let thread = number.load(Ordering::Acquire);
            let directory = ThreadDirectory::open().unwrap();
            assert!(!directory.is_at_rest(thread));
            let mut list = Vec::with_capacity(1024);
            while directory.list(&mut list) == Err(Errno(libc::EAGAIN)) {}
            assert!(list.contains(&thread) && list.contains(&thread_id()));
            busy.store(false, Ordering::Release);
            while !directory.is_at_rest(thread) {
                thread::yield_now();
            }
            barrier.wait();
        });
    }

    #[test]
    fn the_caller_is_running_and_no_such_thread_is_gone() {
        let directory = ThreadDirectory::open().unwrap();
        assert!(!directory.is_at_rest(thread_id()));
        assert!(directory.is_at_rest(u32::MAX));
        assert!(directory.numbers_agree());
    }

    #[test]
    fn a_list_too_long_is_an_error() {
        let directory = ThreadDirectory::open().unwrap();
        let mut list = Vec::new();
        assert_eq!(directory.list(&mut list), Err(Errno(libc::E2BIG)));
    }

    /// Not to be confused with a thread that is gone.
    #[test]
    fn without_proc_there_is_no_directory() {
        let opened = without_proc(ThreadDirectory::open);
        assert!(matches!(opened, None | Some(Err(Errno(libc::ENOENT)))), "{opened:?}");
    }

    /// In a root that was copied, with the names in `/proc`: the list would be of no threads, or of another process's.
    #[test]
    fn an_ordinary_directory_is_no_list_of_threads() {
        let root = std::env::temp_dir().join(format!("pinfold-root-{}", std::process::id()));
        let task = root.join("proc/self/task");
        for threads in [0, 2] {
            (0..threads).for_each(|thread| {
                std::fs::create_dir_all(task.join(thread.to_string())).unwrap();
            });
            std::fs::create_dir_all(&task).unwrap();
            let opened = in_root(&root, ThreadDirectory::open);
            assert!(matches!(opened, None | Some(Err(Errno(libc::ENOENT)))), "{opened:?}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_directory_is_known_again() {
        let open = || ThreadDirectory::open().unwrap();
        let (directory, again) = (open(), std::thread::spawn(open).join().unwrap());
        assert_eq!(directory.identity(), again.identity());
        let other = descriptor::open(c"/proc/self/fd", libc::O_DIRECTORY).unwrap();
        let other = descriptor::identity(other.as_raw_fd()).unwrap();
        assert_ne!(directory.identity(), other);
        assert_eq!(directory.identity().file_system(), other.file_system());
    }
}
