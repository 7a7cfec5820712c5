//! Every way in which a process changes its own memory, as data: the catalogue that `pinfold
//! events` walks through and from which `pinfold torture` draws.
//!
//! A [`Mutation`] is one kind of change, a [`Backing`] one kind of memory, and
//! [`Mutation::fits`] says which belong together. A [`Specimen`] is a piece of such memory that
//! knows how to do each of them to itself and to be valid memory again at the same address, so
//! that the bytes show if the old translation is still used.

mod calls;
mod child;
mod direct;
mod obstacle;
mod specimen;

pub(crate) use calls::{
    Advice, Call, NoDescriptors, advise_harmlessly, keep_freed_memory, lag_behind, migrate, touch,
};
pub(crate) use child::{ChildEnd, end_with_parent, in_child, in_child_guarded, tasks};
pub(crate) use direct::DirectFile;
pub(crate) use obstacle::Obstacle;
pub(crate) use specimen::{Foothold, MappingFlood, Specimen};

use pinfold::listed;
use pinfold::{Change, MappingKind};
use std::fmt;

/// The first wrong byte: how far into what was moved.
pub(crate) type FirstWrong = usize;

/// Where `got` differs from `wanted`, which is as long.
pub(crate) fn difference(got: &[u8], wanted: &[u8]) -> Option<FirstWrong> {
    // Whole blocks first: they are compared many bytes at a time.
    const BLOCK: usize = 4096;
    let blocks = got.chunks(BLOCK).zip(wanted.chunks(BLOCK));
    let (number, (got, wanted)) = blocks.enumerate().find(|(_, (got, wanted))| got != wanted)?;
    let within = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
    Some(number * BLOCK + within.unwrap_or_else(|| got.len().min(wanted.len())))
}

listed! {
    /// A kind of memory, finer than [`MappingKind`]: what behaves differently under change.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub(crate) enum Backing {
        /// Private memory in small pages.
        Anonymous => "anonymous",
        /// Private memory in transparent huge pages.
        TransparentHuge => "transparent huge",
        /// Private memory in reserved huge pages.
        Hugetlb => "hugetlb",
        /// Shared memory without a file.
        SharedAnonymous => "shared anonymous",
        /// A shared mapping of a memfd.
        MemfdShared => "memfd shared",
        /// A private mapping of a memfd.
        MemfdPrivate => "memfd private",
        /// A private mapping of a file on disk.
        FilePrivate => "file private",
        /// A System V segment.
        SystemV => "System V",
        /// The heap behind `brk`.
        Heap => "heap",
    }
}

impl Backing {
    /// Its name at the head of a narrow column.
    pub(crate) const fn short_name(self) -> &'static str {
        match self {
            Self::Anonymous => "anon",
            Self::TransparentHuge => "THP",
            Self::Hugetlb => "hugetlb",
            Self::SharedAnonymous => "shared",
            Self::MemfdShared => "memfd",
            Self::MemfdPrivate => "memfd p.",
            Self::FilePrivate => "file p.",
            Self::SystemV => "SysV",
            Self::Heap => "heap",
        }
    }

    /// What a monitor calls it.
    pub(crate) const fn kind(self) -> MappingKind {
        match self {
            Self::Anonymous | Self::TransparentHuge | Self::Heap => MappingKind::PrivateAnonymous,
            Self::Hugetlb => MappingKind::PrivateHuge,
            Self::SharedAnonymous => MappingKind::SharedAnonymous,
            Self::MemfdShared => MappingKind::SharedMemory,
            Self::MemfdPrivate | Self::FilePrivate => MappingKind::PrivateFile,
            Self::SystemV => MappingKind::SystemV,
        }
    }

    /// The bytes by which such memory can be cut.
    pub(crate) const fn grain(self) -> usize {
        match self {
            Self::Hugetlb => 2 << 20,
            _ => 4096,
        }
    }

    /// The bytes to whose multiple such memory begins.
    pub(crate) const fn alignment(self) -> usize {
        match self {
            Self::Hugetlb | Self::TransparentHuge => 2 << 20,
            _ => 4096,
        }
    }

    const fn is_shared(self) -> bool {
        matches!(self, Self::SharedAnonymous | Self::MemfdShared | Self::SystemV)
    }

    const fn has_file(self) -> bool {
        matches!(self, Self::MemfdShared | Self::MemfdPrivate | Self::FilePrivate)
    }

    const fn is_private_anonymous(self) -> bool {
        matches!(self, Self::Anonymous | Self::TransparentHuge)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which part of the memory a change touches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// The first quarter.
    Head,
    /// The two quarters in the middle.
    Middle,
    /// The last quarter.
    Tail,
}

/// One kind of change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Mutation {
    /// `munmap`.
    Unmap(Part, Call),
    /// `mmap(MAP_FIXED)` over it.
    MapOver(Part),
    /// `mremap(MREMAP_FIXED)` to another address.
    MoveAway,
    /// `mremap(MREMAP_MAYMOVE)` to a greater length, with no room behind.
    GrowAndMove,
    /// `mremap` to a smaller length.
    Shrink,
    /// `mremap(MREMAP_DONTUNMAP)`: the pages leave, the mapping stays.
    MoveAndKeep,
    /// `mremap(MREMAP_FIXED)` of other memory on top of it.
    MoveOnTop,
    /// `shmat(SHM_REMAP)` of a new segment on top of it.
    AttachOnTop(Call),
    /// `remap_file_pages`: the same pages of the same file, mapped in another order.
    RemapFilePages,
    /// `madvise(MADV_DONTNEED)`.
    Discard(Part, Call),
    /// `madvise(MADV_DONTNEED_LOCKED)` of locked memory.
    DiscardLocked,
    /// `madvise(MADV_FREE)`.
    Free,
    /// `process_madvise(MADV_DONTNEED)` through a descriptor of the process itself.
    DiscardByDescriptor,
    /// `process_madvise(MADV_DONTNEED)` by another process.
    DiscardFromChild,
    /// `madvise(MADV_REMOVE)`.
    Remove,
    /// `madvise(MADV_REMOVE)` by a forked child that shares the memory.
    RemoveInChild,
    /// `MADV_GUARD_INSTALL`, then `MADV_GUARD_REMOVE`.
    Guard(Call),
    /// `process_madvise(MADV_GUARD_INSTALL)` through a descriptor of the process itself.
    GuardByDescriptor,
    /// A hole punched into the file behind it.
    PunchHole(Part),
    /// The same by a forked child, through its copy of the descriptor.
    PunchInChild,
    /// The file behind it cut to nothing and made long again.
    Truncate,
    /// `shmdt`.
    Detach,
    /// `brk` to a lower address.
    ShrinkBreak,
    /// `mprotect` to read-only and back: the pages stay.
    Protect,
    /// `MADV_PAGEOUT`: pinned pages stay.
    PageOut,
    /// `MADV_POPULATE_WRITE`: the pages stay.
    Populate,
    /// `MADV_COLLAPSE` into huge pages: pinned pages stay.
    Collapse,
    /// A `munmap` that fails: the pages stay.
    FailedUnmap,
}

/// Whether hooks on the C library can know of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Route {
    /// The program calls a function of the C library that bears the call's name.
    Library,
    /// A raw system call, a ring, another process.
    Other,
}

impl Mutation {
    /// All of them.
    pub(crate) const ALL: [Self; 42] = [
        Self::Unmap(Part::Whole, Call::Library),
        Self::Unmap(Part::Head, Call::Library),
        Self::Unmap(Part::Middle, Call::Library),
        Self::Unmap(Part::Tail, Call::Library),
        Self::Unmap(Part::Whole, Call::Raw),
        Self::Unmap(Part::Whole, Call::Own),
        Self::MapOver(Part::Whole),
        Self::MapOver(Part::Middle),
        Self::MoveAway,
        Self::GrowAndMove,
        Self::Shrink,
        Self::MoveAndKeep,
        Self::MoveOnTop,
        Self::AttachOnTop(Call::Library),
        Self::AttachOnTop(Call::Raw),
        Self::AttachOnTop(Call::Own),
        Self::RemapFilePages,
        Self::Discard(Part::Whole, Call::Library),
        Self::Discard(Part::Middle, Call::Library),
        Self::Discard(Part::Whole, Call::Raw),
        Self::Discard(Part::Whole, Call::Ring),
        Self::DiscardLocked,
        Self::Free,
        Self::DiscardByDescriptor,
        Self::DiscardFromChild,
        Self::Remove,
        Self::RemoveInChild,
        Self::Guard(Call::Library),
        Self::Guard(Call::Raw),
        Self::Guard(Call::Own),
        Self::Guard(Call::Ring),
        Self::GuardByDescriptor,
        Self::PunchHole(Part::Middle),
        Self::PunchInChild,
        Self::Truncate,
        Self::Detach,
        Self::ShrinkBreak,
        Self::Protect,
        Self::PageOut,
        Self::Populate,
        Self::Collapse,
        Self::FailedUnmap,
    ];

    /// Its name in a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unmap(part, Call::Library) => match part {
                Part::Whole => "munmap",
                Part::Head => "munmap, head",
                Part::Middle => "munmap, middle",
                Part::Tail => "munmap, tail",
            },
            Self::Unmap(_, Call::Raw) => "munmap, raw system call",
            Self::Unmap(_, Call::Own | Call::Ring) => "munmap, own instruction",
            Self::MapOver(Part::Whole) => "mmap(MAP_FIXED) over",
            Self::MapOver(_) => "mmap(MAP_FIXED) over, part",
            Self::MoveAway => "mremap, moved away",
            Self::GrowAndMove => "mremap, grown and moved",
            Self::Shrink => "mremap, shrunk",
            Self::MoveAndKeep => "mremap(MREMAP_DONTUNMAP)",
            Self::MoveOnTop => "mremap(MREMAP_FIXED) on top",
            Self::AttachOnTop(Call::Library) => "shmat(SHM_REMAP) on top",
            Self::AttachOnTop(Call::Raw) => "shmat(SHM_REMAP) on top, raw system call",
            Self::AttachOnTop(_) => "shmat(SHM_REMAP) on top, own instruction",
            Self::RemapFilePages => "remap_file_pages",
            Self::Discard(Part::Whole, Call::Library) => "MADV_DONTNEED",
            Self::Discard(_, Call::Library) => "MADV_DONTNEED, part",
            Self::Discard(_, Call::Ring) => "IORING_OP_MADVISE(MADV_DONTNEED)",
            Self::Discard(_, Call::Raw | Call::Own) => "MADV_DONTNEED, raw system call",
            Self::DiscardLocked => "MADV_DONTNEED_LOCKED",
            Self::Free => "MADV_FREE",
            Self::DiscardByDescriptor => "process_madvise on itself",
            Self::DiscardFromChild => "process_madvise by another process",
            Self::Remove => "MADV_REMOVE",
            Self::RemoveInChild => "MADV_REMOVE by a forked child",
            Self::Guard(Call::Library) => "MADV_GUARD_INSTALL and _REMOVE",
            Self::Guard(Call::Raw) => "MADV_GUARD_INSTALL, raw system call",
            Self::Guard(Call::Own) => "MADV_GUARD_INSTALL, own instruction",
            Self::Guard(Call::Ring) => "IORING_OP_MADVISE(MADV_GUARD_INSTALL)",
            Self::GuardByDescriptor => "process_madvise(MADV_GUARD_INSTALL) on itself",
            Self::PunchHole(_) => "hole punched through the file",
            Self::PunchInChild => "hole punched by another process",
            Self::Truncate => "truncated through the file",
            Self::Detach => "shmdt",
            Self::ShrinkBreak => "brk shrink",
            Self::Protect => "mprotect",
            Self::PageOut => "MADV_PAGEOUT",
            Self::Populate => "MADV_POPULATE_WRITE",
            Self::Collapse => "MADV_COLLAPSE",
            Self::FailedUnmap => "munmap that fails",
        }
    }

    /// What a monitor calls it; `None` where nothing changes.
    pub(crate) const fn change(self) -> Option<Change> {
        Some(match self {
            Self::Unmap(..) | Self::Detach | Self::ShrinkBreak => Change::Unmap,
            Self::MapOver(_) | Self::RemapFilePages => Change::Replace,
            Self::MoveAway | Self::GrowAndMove | Self::Shrink | Self::MoveAndKeep => Change::Remap,
            Self::MoveOnTop => Change::RemapOver,
            Self::AttachOnTop(_) => Change::AttachOver,
            Self::Discard(..)
            | Self::DiscardLocked
            | Self::Free
            | Self::DiscardByDescriptor
            | Self::DiscardFromChild => Change::Discard,
            Self::Remove => Change::Remove,
            Self::RemoveInChild | Self::PunchHole(_) | Self::PunchInChild | Self::Truncate => {
                Change::FileHole
            }
            Self::Guard(_) | Self::GuardByDescriptor => Change::Guard,
            Self::Protect => Change::Protect,
            Self::PageOut | Self::Populate | Self::Collapse | Self::FailedUnmap => return None,
        })
    }

    /// By which route it comes.
    pub(crate) const fn route(self) -> Route {
        match self {
            Self::Unmap(_, by) | Self::Discard(_, by) | Self::Guard(by) | Self::AttachOnTop(by) => {
                match by {
                    Call::Library => Route::Library,
                    Call::Raw | Call::Own | Call::Ring => Route::Other,
                }
            }
            Self::RemoveInChild
            | Self::DiscardFromChild
            | Self::PunchInChild
            | Self::RemapFilePages => Route::Other,
            _ => Route::Library,
        }
    }

    /// Whether another process makes it, which is forked for that.
    pub(crate) const fn forks(self) -> bool {
        matches!(self, Self::DiscardFromChild | Self::RemoveInChild | Self::PunchInChild)
    }

    /// Whether `backing` can suffer this change at all.
    pub(crate) const fn fits(self, backing: Backing) -> bool {
        if matches!(backing, Backing::Heap) {
            return matches!(self, Self::ShrinkBreak);
        }
        match self {
            Self::ShrinkBreak => false,
            Self::Detach => matches!(backing, Backing::SystemV),
            Self::GrowAndMove => !matches!(backing, Backing::SystemV | Backing::Hugetlb),
            Self::MoveAndKeep => {
                backing.is_private_anonymous() || matches!(backing, Backing::SharedAnonymous)
            }
            Self::Guard(_) | Self::GuardByDescriptor | Self::AttachOnTop(_) => {
                !matches!(backing, Backing::Hugetlb)
            }
            Self::DiscardLocked | Self::DiscardByDescriptor => !matches!(backing, Backing::Hugetlb),
            Self::DiscardFromChild => backing.is_private_anonymous(),
            Self::Collapse => matches!(backing, Backing::TransparentHuge),
            Self::RemapFilePages => backing.is_shared(),
            Self::PageOut | Self::Populate => !matches!(backing, Backing::Hugetlb),
            Self::Free => backing.is_private_anonymous(),
            Self::Remove | Self::RemoveInChild => backing.is_shared(),
            Self::PunchHole(_) | Self::PunchInChild | Self::Truncate => backing.has_file(),
            _ => true,
        }
    }
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_backing_suffers_some_change_and_every_change_some_backing() {
        for backing in Backing::ALL {
            assert!(Mutation::ALL.iter().any(|mutation| mutation.fits(backing)), "{backing}");
        }
        for mutation in Mutation::ALL {
            assert!(Backing::ALL.iter().any(|&backing| mutation.fits(backing)), "{mutation}");
        }
    }

    #[test]
    fn names_tell_the_changes_apart() {
        let names: std::collections::HashSet<_> = Mutation::ALL.map(Mutation::name).into();
        assert_eq!(names.len(), Mutation::ALL.len());
    }

    #[test]
    fn a_specimen_outlives_every_change_with_its_address_and_size() {
        for backing in Backing::ALL {
            for mutation in Mutation::ALL.into_iter().filter(|mutation| mutation.fits(backing)) {
                survives(backing, mutation);
            }
        }
    }

    fn survives(backing: Backing, mutation: Mutation) {
        let mut specimen = match Specimen::new(backing, 16) {
            Ok(specimen) => specimen,
            Err(obstacle) => return eprintln!("skipped: {backing}: {obstacle}"),
        };
        specimen.fill(specimen.body(), 1);
        let body = specimen.body();
        match specimen.apply(mutation) {
            Err(obstacle) if obstacle.is_taken() => eprintln!("skipped: {mutation}: {obstacle}"),
            Err(obstacle) => eprintln!("skipped: {mutation} on {backing}: {obstacle}"),
            Ok(()) => {
                specimen.fill(body, 2);
                assert_eq!(specimen.body(), body, "{mutation} on {backing}");
                assert_eq!(specimen.bytes(body), Specimen::pattern(body, 2));
            }
        }
    }
}
