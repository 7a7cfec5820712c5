//! What a monitor claims to see, stated per kind of mapping and kind of change.

use crate::listed::listed;
use std::fmt;

listed! {
    /// A kind of mapping, as far as monitors differ on it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[non_exhaustive]
    pub enum MappingKind {
        /// Private memory without a file: `malloc`, `mmap(MAP_ANONYMOUS)`, the heap, stacks.
        PrivateAnonymous => "private anonymous",
        /// Private memory without a file in huge pages of `hugetlbfs`.
        PrivateHuge => "private hugetlb",
        /// `mmap(MAP_SHARED | MAP_ANONYMOUS)`, which a forked child shares.
        SharedAnonymous => "shared anonymous",
        /// A mapping of a memfd or of a file in tmpfs.
        SharedMemory => "memfd or tmpfs",
        /// A System V shared-memory segment.
        SystemV => "System V segment",
        /// A private mapping of a file.
        PrivateFile => "private file",
        /// A shared mapping of a file on disk.
        SharedFile => "shared file",
        /// Anything else: a device's memory, the vdso.
        Other => "other",
    }
}

listed! {
    /// A kind of change of a mapping, as far as monitors differ on it.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[non_exhaustive]
    pub enum Change {
        /// `munmap`, whole or partial, `shmdt`, the shrinking of `brk`.
        Unmap => "unmap",
        /// `mmap(MAP_FIXED)` over it.
        Replace => "replace",
        /// `mremap` away from it, shrinking, or with `MREMAP_DONTUNMAP`.
        Remap => "remap",
        /// `mremap(MREMAP_FIXED)` on top of it.
        RemapOver => "remap over",
        /// `shmat(SHM_REMAP)` of a System V segment on top of it.
        AttachOver => "attach over",
        /// `MADV_DONTNEED`, `MADV_DONTNEED_LOCKED`, `MADV_FREE`, `process_madvise` on itself.
        Discard => "discard",
        /// `MADV_REMOVE`: pages leave a shared mapping and its file.
        Remove => "remove",
        /// `MADV_GUARD_INSTALL`: pages go, faults are fatal until `MADV_GUARD_REMOVE`.
        Guard => "guard",
        /// A hole punched, or the file truncated, through a descriptor, by whomever.
        FileHole => "file hole",
        /// `mprotect`: the pages stay.
        Protect => "protect",
        /// A forked child using what its parent registered.
        Fork => "fork",
    }
}

/// What a monitor says of one kind of change on one kind of mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Cover {
    /// The change is seen before a `get` that begins after it can return.
    Detected,
    /// As `Detected`, if the code that makes the change reports it to the feed, as hooks on the C library's functions
    /// do. By another route, a raw system call or another process, it is as `Undetected`.
    Reported,
    /// Such a mapping is not cached, so the change cannot make anything stale.
    NotCached,
    /// The mapping is cached and the change is not seen: a `get` after it may be stale.
    Undetected,
    /// The pages stay, so nothing needs to be seen.
    Harmless,
}

impl fmt::Display for Cover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Detected => "detected",
            Self::Reported => "reported",
            Self::NotCached => "not cached",
            Self::Undetected => "undetected",
            Self::Harmless => "harmless",
        })
    }
}

impl Change {
    /// The bit that stands for it in a set of changes; the same in every version of this crate, so that new kinds come last.
    pub const fn bit(self) -> u64 {
        1 << self as u64
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Programs of another version, the helper's clients, read the bits.
    #[test]
    fn a_bit_stands_for_the_same_change_in_every_version() {
        let names = [
            "unmap",
            "replace",
            "remap",
            "remap over",
            "attach over",
            "discard",
            "remove",
            "guard",
            "file hole",
            "protect",
            "fork",
        ];
        assert_eq!(Change::ALL.map(Change::name), names);
        for (place, change) in Change::ALL.into_iter().enumerate() {
            assert_eq!(change.bit(), 1 << place);
        }
    }
}
