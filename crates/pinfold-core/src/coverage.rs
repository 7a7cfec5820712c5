//! What a monitor claims to see, stated per kind of mapping and kind of change.

use std::fmt;

/// A kind of mapping, as far as monitors differ on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MappingKind {
    /// Private memory without a file: `malloc`, `mmap(MAP_ANONYMOUS)`, the heap, stacks.
    PrivateAnonymous,
    /// Private memory without a file in huge pages of `hugetlbfs`.
    PrivateHuge,
    /// `mmap(MAP_SHARED | MAP_ANONYMOUS)`, which a forked child shares.
    SharedAnonymous,
    /// A mapping of a memfd or of a file in tmpfs.
    SharedMemory,
    /// A System V shared-memory segment.
    SystemV,
    /// A private mapping of a file.
    PrivateFile,
    /// A shared mapping of a file on disk.
    SharedFile,
    /// Anything else: a device's memory, the vdso.
    Other,
}

/// A kind of change of a mapping, as far as monitors differ on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Change {
    /// `munmap`, whole or partial, `shmdt`, the shrinking of `brk`.
    Unmap,
    /// `mmap(MAP_FIXED)` over it.
    Replace,
    /// `mremap` away from it, shrinking, or with `MREMAP_DONTUNMAP`.
    Remap,
    /// `mremap(MREMAP_FIXED)` on top of it.
    RemapOver,
    /// `shmat(SHM_REMAP)` of a System V segment on top of it.
    AttachOver,
    /// `MADV_DONTNEED`, `MADV_DONTNEED_LOCKED`, `MADV_FREE`, `process_madvise` on itself.
    Discard,
    /// `MADV_REMOVE`: pages leave a shared mapping and its file.
    Remove,
    /// `MADV_GUARD_INSTALL`: pages go, faults are fatal until `MADV_GUARD_REMOVE`.
    Guard,
    /// A hole punched, or the file truncated, through a descriptor, by whomever.
    FileHole,
    /// `mprotect`: the pages stay.
    Protect,
    /// A forked child using what its parent registered.
    Fork,
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

impl MappingKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::PrivateAnonymous,
        Self::PrivateHuge,
        Self::SharedAnonymous,
        Self::SharedMemory,
        Self::SystemV,
        Self::PrivateFile,
        Self::SharedFile,
        Self::Other,
    ];

    /// The kind in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PrivateAnonymous => "private anonymous",
            Self::PrivateHuge => "private hugetlb",
            Self::SharedAnonymous => "shared anonymous",
            Self::SharedMemory => "memfd or tmpfs",
            Self::SystemV => "System V segment",
            Self::PrivateFile => "private file",
            Self::SharedFile => "shared file",
            Self::Other => "other",
        }
    }
}

impl Change {
    /// All kinds.
    pub const ALL: [Self; 11] = [
        Self::Unmap,
        Self::Replace,
        Self::Remap,
        Self::RemapOver,
        Self::AttachOver,
        Self::Discard,
        Self::Remove,
        Self::Guard,
        Self::FileHole,
        Self::Protect,
        Self::Fork,
    ];

    /// The bit that stands for it in a set of changes; the same in every version of this crate.
    pub const fn bit(self) -> u64 {
        1 << match self {
            Self::Unmap => 0,
            Self::Replace => 1,
            Self::Remap => 2,
            Self::RemapOver => 3,
            Self::AttachOver => 4,
            Self::Discard => 5,
            Self::Remove => 6,
            Self::Guard => 7,
            Self::FileHole => 8,
            Self::Protect => 9,
            Self::Fork => 10,
        }
    }

    /// The kind in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unmap => "unmap",
            Self::Replace => "replace",
            Self::Remap => "remap",
            Self::RemapOver => "remap over",
            Self::AttachOver => "attach over",
            Self::Discard => "discard",
            Self::Remove => "remove",
            Self::Guard => "guard",
            Self::FileHole => "file hole",
            Self::Protect => "protect",
            Self::Fork => "fork",
        }
    }
}
