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
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

/// A number and the file it stood for when we got it.
#[derive(Debug)]
pub(crate) struct KnownDescriptor {
    number: Descriptor,
    identity: Identity,
    maker: Maker,
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
        Ok(Self { number: opened.into_raw_fd(), identity, maker: Maker::this() })
    }

    pub(crate) fn number(&self) -> Descriptor {
        self.number
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
        if self.is_ours() && !self.maker.is_another_with_our_table() {
            // SAFETY: it stands for what was taken over in `new`, and is this value's.
            unsafe { descriptor::close(self.number) };
        }
    }
}

/// Moves a descriptor where few programs get to: the kernel hands out the lowest free number.
/// Not higher than this, because the kernel's table grows with the highest number.
fn moved_up(low: OwnedFd) -> OwnedFd {
    let up = [1000, 500, 250, 120];
    let above = |lowest| descriptor::duplicate_above(low.as_raw_fd(), lowest).ok();
    up.into_iter().find_map(above).unwrap_or(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because two at once would hand the same number to each other.
    #[test]
    fn a_descriptor_moves_up_and_is_known_until_it_is_closed() {
        let open = || KnownDescriptor::new(descriptor::open(c"/dev/null", 0).unwrap()).unwrap();
        let known = open();
        let number = known.number();
        assert!(number >= 120 && known.is_ours());
        drop(known);
        assert!(descriptor::identity(number).is_err());
        let known = open();
        // SAFETY: as a program does that closes what it does not know; `known` is asked for it, no more.
        unsafe { descriptor::close(known.number()) };
        assert!(!known.is_ours());
    }
}
