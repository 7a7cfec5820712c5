//! A descriptor that the program may take away from us at any time.
//!
//! Daemons close every number they do not know. The number may then stand for another file, which
//! must be neither believed nor closed. So a descriptor is kept together with what identifies its
//! file, and is moved to a high number, which the kernel does not hand out again soon.
//!
//! A child may have a copy of the table, as after `fork`, or the table itself (`clone(CLONE_FILES)`).
//! It closes its copies, so that no file of its parent stays open because of it, but nothing in a
//! table that is its parent's as well.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to close a number, once it stands for what was opened here,
//! and to lend one for a call.

#![allow(unsafe_code)]

use pinfold_kernel::{Descriptor, Errno, descriptor, descriptor::Identity};
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A number and the file it stood for when we got it.
#[derive(Debug)]
pub(crate) struct KnownDescriptor {
    number: Descriptor,
    identity: Identity,
    maker: Maker,
    /// The number is not closed when this goes.
    is_left_open: AtomicBool,
}

/// The number of one that may be closed meanwhile, or stand for another file in the calling thread's table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownNumber {
    number: Descriptor,
    identity: Identity,
}

impl KnownNumber {
    /// For calls that tell when it is not that file any more.
    pub(crate) fn lend(&self) -> BorrowedFd<'_> {
        // SAFETY: it was opened, so it is not -1. Should it have been closed, the kernel looks the number up for
        // each call, and no memory depends on what it finds.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }

    /// Whether the number stands for that file in the calling thread's table. One system call.
    pub(crate) fn is_ours(&self) -> bool {
        descriptor::identity(self.number) == Ok(self.identity)
    }

    /// Whether it may in the table of `thread`, one of `threads` (`/proc/self/task`): not where that has no such number, or
    /// another file there. No `/proc` is no answer: the directory is open.
    pub(crate) fn may_be_open_in(&self, threads: BorrowedFd<'_>, thread: u32) -> bool {
        let mut path = [0; 64];
        let _ = write!(path.as_mut_slice(), "{thread}/fd/{}", self.number);
        match CStr::from_bytes_until_nul(&path).map(|path| descriptor::identity_in(threads, path)) {
            Ok(Ok(found)) => found == self.identity,
            Ok(Err(errno)) => !matches!(errno, Errno(libc::ENOENT | libc::ESRCH)),
            Err(_) => true,
        }
    }
}

/// The process that opened something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker(u32);

impl Maker {
    /// This process.
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Whether this is another process, in whose table of descriptors we stand. Where the kernel
    /// does not tell, it is said to be ours: a monitor whose descriptor is closed is lost and says
    /// so, while one that stays open could keep its owner's memory watched.
    pub(crate) fn is_another_with_our_table(self) -> bool {
        let this = Self::this().0;
        this != self.0 && descriptor::share_descriptors(this, self.0)
    }
}

impl KnownDescriptor {
    /// Takes over a descriptor that the caller has just opened.
    pub(crate) fn new(opened: OwnedFd) -> Result<Self, Errno> {
        let opened = moved_up(opened);
        let identity = descriptor::identity(opened.as_raw_fd())?;
        // The program may close it behind our back, so it is a number from here on.
        let (maker, is_left_open) = (Maker::this(), AtomicBool::new(false));
        Ok(Self { number: opened.into_raw_fd(), identity, maker, is_left_open })
    }

    pub(crate) fn number(&self) -> Descriptor {
        self.number
    }

    pub(crate) fn alias(&self) -> KnownNumber {
        KnownNumber { number: self.number, identity: self.identity }
    }

    /// Has the number stay open when this goes.
    pub(crate) fn leave_open(&self) {
        // Relaxed: read by the thread that drops this.
        self.is_left_open.store(true, Ordering::Relaxed);
    }

    /// For calls that tell when it is not that file any more.
    pub(crate) fn lend(&self) -> BorrowedFd<'_> {
        // SAFETY: it was opened, so it is not -1. Should the program have closed it, the kernel looks the number up for
        // each call, and no memory depends on what it finds.
        unsafe { BorrowedFd::borrow_raw(self.number) }
    }

    /// Whether the number still stands for that file. One system call.
    pub(crate) fn is_ours(&self) -> bool {
        descriptor::identity(self.number) == Ok(self.identity)
    }
}

impl Drop for KnownDescriptor {
    fn drop(&mut self) {
        let is_left_open = self.is_left_open.load(Ordering::Relaxed);
        if !is_left_open && self.is_ours() && !self.maker.is_another_with_our_table() {
            // SAFETY: it stands for what was taken over in `new`, and is this value's.
            unsafe { descriptor::close(self.number) };
        }
    }
}

/// Moves a descriptor where few programs get to: the kernel hands out the lowest free number.
/// Not higher than this, because the kernel's table grows with the highest number.
fn moved_up(low: OwnedFd) -> OwnedFd {
    let up = [1000, 500, 250, 120];
    let above = |lowest| descriptor::duplicate_above(low.as_fd(), lowest).ok();
    up.into_iter().find_map(above).unwrap_or(low)
}

/// Runs `body` with what a thread has made that has a table of descriptors of its own, and lives until then.
#[cfg(test)]
pub(crate) fn in_another_table<A: Send, B>(
    make: impl FnOnce() -> A + Send,
    body: impl FnOnce(A) -> B,
) -> B {
    let (to_body, made) = std::sync::mpsc::channel();
    let (done, end) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // SAFETY: a copy of the table: each number of it stands for what it did.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            to_body.send(make()).unwrap();
            // An error: the body is done.
            assert!(end.recv().is_err());
        });
        let result = body(made.recv().unwrap());
        drop(done);
        result
    })
}

/// Runs `body` on a thread whose root directory has no `/proc`; `None` where it may not have such a root.
#[cfg(test)]
pub(crate) fn without_proc<A: Send>(body: impl FnOnce() -> A + Send) -> Option<A> {
    in_root(std::path::Path::new("/dev"), body)
}

/// Runs `body` on a thread whose root directory is `root`; `None` where it may not have such a root.
#[cfg(test)]
pub(crate) fn in_root<A: Send>(
    root: &std::path::Path,
    body: impl FnOnce() -> A + Send,
) -> Option<A> {
    let run = || {
        // SAFETY: no pointer; from here on the thread's directories are its own.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_FS) }, 0);
        std::os::unix::fs::chroot(root).ok().map(|()| body())
    };
    let result = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    if result.is_none() {
        eprintln!("skipped: only root can have another root directory");
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a table of descriptors of its own: what other tests open meanwhile would get the numbers that are closed here.
    #[test]
    fn a_descriptor_moves_up_and_is_known_until_it_is_closed() {
        in_another_table(
            || {
                let open =
                    || KnownDescriptor::new(descriptor::open(c"/dev/null", 0).unwrap()).unwrap();
                let known = open();
                let number = known.number();
                assert!(number >= 120 && known.is_ours());
                drop(known);
                assert!(descriptor::identity(number).is_err());
                let known = open();
                // SAFETY: as a program does that closes what it does not know; `known` is asked for it, no more.
                unsafe { descriptor::close(known.number()) };
                assert!(!known.is_ours());
            },
            drop,
        );
    }
}
