//! A slab's memory: in huge pages where they can be had, all of it there before it is used.
//!
//! Three kinds are tried in turn, and which one it became is told:
//!
//! 1. pages of 2 MiB that the administrator has set aside (`vm.nr_hugepages`);
//! 2. transparent huge pages, which the kernel makes if it has the memory and may
//!    (`/sys/kernel/mm/transparent_hugepage/enabled`);
//! 3. base pages.
//!
//! What huge pages save: a registration has fewer pages to pin and the device fewer translations,
//! and a large pool takes fewer places in the processor's own.

use super::classes::MAX_ALIGN;
use pinfold_kernel::{Errno, mapping::OwnedMapping};
use std::fmt;
use std::ptr::NonNull;

/// The size of a huge page here: what all of the field's 64-bit machines have besides base pages of
/// 4 KiB. Slabs begin at its multiples whatever their pages are.
pub(super) const HUGE: usize = MAX_ALIGN;

/// Which pages a pool's memory is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pages {
    /// The best that can be had: pages set aside (for 4,096 slabs of a process at most), else transparent huge
    /// pages, else base pages.
    #[default]
    Best,
    /// Transparent huge pages, else base pages: leaves the pages that were set aside to others.
    Transparent,
    /// Base pages.
    Base,
}

/// Which pages memory has got.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PageKind {
    /// Huge pages of 2 MiB that were set aside (hugetlbfs).
    SetAside,
    /// Transparent huge pages.
    Transparent,
    /// Transparent huge pages were asked for, and this kernel cannot say whether they came (before
    /// Linux 6.7).
    Unknown,
    /// Base pages.
    Base,
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SetAside => "huge pages set aside",
            Self::Transparent => "transparent huge pages",
            Self::Unknown => "pages of unknown size",
            Self::Base => "base pages",
        })
    }
}

/// A slab's memory, and what became of its pages.
#[derive(Debug)]
pub(super) struct Memory {
    mapping: OwnedMapping,
    /// The rest of its last block of [`HUGE`] bytes: a look-up by address knows blocks, so what is in one is no
    /// other code's.
    _behind: Option<OwnedMapping>,
    bytes: usize,
    /// Of what kind the bytes counted below are; the rest is in base pages.
    kind: PageKind,
    huge_bytes: usize,
}

/// What the kernel refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MapError {
    pub(super) operation: &'static str,
    pub(super) errno: i32,
}

fn failed(operation: &'static str) -> impl Fn(Errno) -> MapError {
    move |Errno(errno)| MapError { operation, errno }
}

/// Prepares what leaves pages set aside out of forked children: a slab may be made while the process forks.
pub(super) fn prepare_for_forks(pages: Pages) {
    if pages == Pages::Best {
        // Where memory lacks the first slab in such pages tries again, or takes others.
        let _ = OwnedMapping::prepare_to_leave_out();
    }
}

impl Memory {
    /// Maps `bytes` of zeros, whole base pages, at a multiple of [`HUGE`].
    pub(super) fn new(bytes: usize, pages: Pages) -> Result<Self, MapError> {
        let whole = bytes.is_multiple_of(HUGE);
        if whole && pages == Pages::Best {
            // Why it cannot be had does not matter: none set aside, all taken, not allowed, too many slabs.
            if let Ok(memory) = Self::set_aside(bytes) {
                return Ok(memory);
            }
        }
        Self::mapped(bytes, whole && pages != Pages::Base)
    }

    fn set_aside(bytes: usize) -> Result<Self, Errno> {
        let mut mapping = OwnedMapping::set_aside(bytes)?;
        // A copy for a child would take as many of these pages again, and where they lack, the
        // fork itself fails; so a child gets none of it, and can map nothing there. Where too much is left out
        // of children already, other pages are taken.
        mapping.leave_out_of_forks()?;
        mapping.populate()?;
        Ok(Self { mapping, _behind: None, bytes, kind: PageKind::SetAside, huge_bytes: bytes })
    }

    fn mapped(bytes: usize, huge: bool) -> Result<Self, MapError> {
        let (mut mapping, behind) = OwnedMapping::blocks(bytes, HUGE).map_err(failed("mmap"))?;
        // A kernel without transparent huge pages refuses either; that is seen below.
        let _ = mapping.want_huge_pages(huge);
        // The kernel copies pinned pages for a child at the fork; a child has no use for them.
        mapping.wipe_on_fork().map_err(failed("madvise(MADV_WIPEONFORK)"))?;
        match mapping.populate() {
            Err(Errno(libc::EINVAL)) => mapping.fill(0),
            done => done.map_err(failed("madvise(MADV_POPULATE_WRITE)"))?,
        }
        let (kind, huge_bytes) = what_came(&mapping, bytes, huge);
        Ok(Self { mapping, _behind: Some(behind), bytes, kind, huge_bytes })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many bytes there are of each kind.
    pub(super) fn kinds(&self) -> [(PageKind, usize); 2] {
        [(self.kind, self.huge_bytes), (PageKind::Base, self.bytes - self.huge_bytes)]
    }
}

fn what_came(mapping: &OwnedMapping, bytes: usize, huge: bool) -> (PageKind, usize) {
    match mapping.huge_bytes() {
        _ if !huge => (PageKind::Base, 0),
        Ok(huge_bytes) => (PageKind::Transparent, huge_bytes.min(bytes)),
        Err(_) => (PageKind::Unknown, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_of_some_kind() {
        for (bytes, pages) in [
            (HUGE, Pages::Best),
            (2 * HUGE, Pages::Transparent),
            (HUGE, Pages::Base),
            (65536, Pages::Best),
        ] {
            let memory = Memory::new(bytes, pages).unwrap();
            assert_eq!(memory.start().addr().get() % HUGE, 0);
            assert_eq!(memory.kinds().iter().map(|(_, bytes)| bytes).sum::<usize>(), bytes);
            let set_aside = memory.kinds()[0].0 == PageKind::SetAside;
            assert!(!set_aside || pages == Pages::Best && bytes >= HUGE);
            assert!(pages != Pages::Base || memory.kinds()[0].1 == 0);
        }
    }

    #[test]
    fn too_much_is_an_error() {
        let error = Memory::new(1 << 62, Pages::Base).unwrap_err();
        assert_eq!(error.errno, libc::ENOMEM);
    }
}
