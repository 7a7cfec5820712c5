//! Where the programs stand: every function of the kernel that takes pages away from a range.
//!
//! | change | where it passes |
//! |---|---|
//! | `munmap`, `MAP_FIXED`, `brk`, `shmdt`, `SHM_REMAP`, the ends of `mremap`, the end of a process | `unmap_vmas` |
//! | `MADV_DONTNEED`, guard pages, and whatever happens to a file that is mapped (truncation, holes, `MADV_REMOVE`, invalidation), by whomever | `zap_page_range_single` or `.._batched`, in 7.2 `zap_vma_range_batched` |
//! | the same for huge pages of hugetlbfs | `unmap_hugepage_range` |
//! | `mremap` | `move_page_tables`, from and to |
//! | the end of the address space | `exit_mmap` |
//!
//! That list is complete for 6.1, 6.12 and 7.2 as Debian builds them: whoever calls the functions that
//! clear entries of page tables for a range (`unmap_single_vma`, `unmap_page_range`, `__zap_vma_range`,
//! `__unmap_hugepage_range`) is one of these, or the reaper that frees the memory of a process that
//! is being killed for want of memory, in which no thread runs any more.
//!
//! What takes single pages away leaves those alone that a device has pinned: reclaim, `MADV_FREE` (a page
//! stays mapped until reclaim, which discards it only if nobody but its mappings refers to it and puts
//! it back otherwise; locked memory is refused, so mlock's registrations are safe, too), `MADV_PAGEOUT`, migration, merging of
//! equal pages, collapsing into huge ones, `UFFDIO_MOVE`, copying for a forked child. A debugger that sets a
//! breakpoint (uprobes) replaces a page of program text, pinned or not, and nobody is told.

use super::btf::Parameter::{self, Any, PointerTo, Word};

/// One kind of change.
#[derive(Debug)]
pub(super) struct Hook {
    /// In words.
    pub(super) change: &'static str,
    /// Every one of these that the kernel has is attached to; one at least must be there...
    pub(super) functions: &'static [&'static str],
    /// ... if the kernel has this function at all.
    pub(super) if_there_is: Option<&'static str>,
    /// What parameters they may have, and the program for these.
    pub(super) shapes: &'static [Shape],
    /// Whether there is a program for the end, too.
    pub(super) both_ends: bool,
}

/// A program, and the first parameters of the functions that it understands.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) program: &'static str,
    pub(super) parameters: &'static [Parameter],
}

const GATHER: Parameter = PointerTo("mmu_gather");
const MAPPING: Parameter = PointerTo("vm_area_struct");

pub(super) static HOOKS: [Hook; 5] = [
    Hook {
        change: "unmapping",
        functions: &["unmap_vmas"],
        if_there_is: None,
        shapes: &[
            Shape { program: "unmap_range", parameters: &[GATHER, Any, MAPPING, Word, Word] },
            Shape { program: "unmap_described", parameters: &[GATHER, PointerTo("unmap_desc")] },
        ],
        both_ends: true,
    },
    // All of them, though some call each other: a compiler may have put the one into the other.
    Hook {
        change: "discarding",
        functions: &[
            "zap_page_range_single",
            "zap_page_range_single_batched",
            "zap_page_range",
            "zap_vma_range",
            "zap_vma_range_batched",
        ],
        if_there_is: None,
        shapes: &[
            Shape { program: "zap", parameters: &[MAPPING, Word, Word] },
            Shape { program: "zap_gathered", parameters: &[GATHER, MAPPING, Word, Word] },
        ],
        both_ends: true,
    },
    Hook {
        change: "discarding huge pages of hugetlbfs",
        functions: &["unmap_hugepage_range"],
        if_there_is: Some("__unmap_hugepage_range"),
        shapes: &[Shape { program: "zap_between", parameters: &[MAPPING, Word, Word] }],
        both_ends: true,
    },
    Hook {
        change: "moving",
        functions: &["move_page_tables"],
        if_there_is: None,
        shapes: &[
            Shape { program: "move", parameters: &[MAPPING, Word, MAPPING, Word, Word] },
            Shape {
                program: "move_controlled",
                parameters: &[PointerTo("pagetable_move_control")],
            },
        ],
        both_ends: true,
    },
    Hook {
        change: "the end of a process",
        functions: &["exit_mmap"],
        if_there_is: None,
        shapes: &[Shape { program: "gone", parameters: &[PointerTo("mm_struct")] }],
        both_ends: false,
    },
];

/// What the program `whose` is for: the iterator over the threads of a process.
pub(super) const THREADS: &str = "bpf_iter_task";
