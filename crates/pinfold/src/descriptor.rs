//! A descriptor that the program may take away from us at any time.
//!
//! Daemons close every number they do not know. The number may then stand for another file, which
//! must be neither believed nor closed. So a descriptor is kept together with what identifies its
//! file, and is moved to a high number, which the kernel does not hand out again soon.
//!
//! A child may have a copy of the table, as after `fork`, or the table itself (`clone(CLONE_FILES)`).
//! It closes its copies, so that no file of its parent stays open because of it, but nothing in a
//! table that is its parent's as well.

use pinfold_kernel::{Descriptor, Errno, descriptor, descriptor::Identity};

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
    pub(crate) fn new(opened: Descriptor) -> Result<Self, Errno> {
        let number = moved_up(opened);
        match descriptor::identity(number) {
            Ok(identity) => Ok(Self { number, identity, maker: Maker::this() }),
            Err(errno) => {
                descriptor::close(number);
                Err(errno)
            }
        }
    }

    pub(crate) fn number(&self) -> Descriptor {
        self.number
    }

    /// Whether the number still stands for that file. One system call.
    pub(crate) fn is_ours(&self) -> bool {
        descriptor::identity(self.number) == Ok(self.identity)
    }
}

impl Drop for KnownDescriptor {
    fn drop(&mut self) {
        if self.is_ours() && !self.maker.is_another_with_our_table() {
            descriptor::close(self.number);
        }
    }
}

/// Moves a descriptor where few programs get to: the kernel hands out the lowest free number.
/// Not higher than this, because the kernel's table grows with the highest number.
fn moved_up(low: Descriptor) -> Descriptor {
    let up = [1000, 500, 250, 120];
    let moved = up.into_iter().find_map(|lowest| descriptor::duplicate_above(low, lowest).ok());
    if moved.is_some() {
        descriptor::close(low);
    }
    moved.unwrap_or(low)
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
        descriptor::close(known.number());
        assert!(!known.is_ours());
    }
}
