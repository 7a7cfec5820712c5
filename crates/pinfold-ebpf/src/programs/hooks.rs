//! Where the programs stand: every function of the kernel that parts pages from their addresses, and what would
//! keep the programs from running.
//!
//! | change | where it passes |
//! |---|---|
//! | `munmap`, `MAP_FIXED`, `brk`, `shmdt`, `SHM_REMAP`, the ends of `mremap`, the end of a process | `unmap_vmas` |
//! | `MADV_DONTNEED`, guard pages, and whatever happens to a file that is mapped (truncation, holes, `MADV_REMOVE`, invalidation), by whomever | `zap_page_range_single` or `.._batched`, in 7.3 `zap_vma_range_batched` |
//! | the same for huge pages of hugetlbfs | `unmap_hugepage_range` |
//! | `mremap` | `move_page_tables`, from and to |
//! | a file's page, by reclaim (`MADV_PAGEOUT`), splitting of a large folio, a memory failure | `try_to_unmap_one`, 7.3 also `try_to_unmap_poisoned_hugetlb_one` |
//! | a file's page, by migration that splits a huge entry | `try_to_migrate_one` |
//! | tables of hugetlbfs entries that processes share (`mprotect`, a split of a mapping, a userfaultfd) | `hugetlb_change_protection`, `hugetlb_split`, `hugetlb_unshare_all_pmds` |
//! | a file's huge page whose one entry is split (`mprotect`, `munmap`, `madvise` of a part) | `__split_huge_pmd` |
//! | a file's huge page whose entries are given up for one (`MADV_COLLAPSE`, khugepaged) | `collapse_pte_mapped_thp`, 7.3 `try_..` |
//! | program text that gets or loses a breakpoint (uprobes) | `uprobe_write_opcode`, 7.3 `uprobe_write` |
//! | the end of the address space | `exit_mmap` |
//! | programs are switched off | `proc_dointvec` (`kernel.ftrace_enabled`) |
//! | programs may be skipped | `sched_dynamic_update` |
//!
//! A page of a file needs the middle rows, though the page stays in the file: without an entry it can be
//! replaced there (by a direct write, for instance) without any call of the others. What takes single
//! anonymous pages away leaves those alone that a device has pinned. `docs/src/catalogue.md` goes through
//! every function of 6.1, 6.12 and 7.3 that clears an entry of a page table, and says why this list is complete.

use super::btf::Parameter::{self, Any, PointerTo, Word};

/// One kind of change.
#[derive(Debug)]
pub(super) struct Hook {
    /// In words.
    pub(super) change: &'static str,
    /// Every one of these that the kernel has is attached to, and must have one of the shapes; one at least must
    /// be there...
    pub(super) functions: &'static [&'static str],
    /// How the names of all functions of this kind begin and end, where they have that in common: a kernel with one
    /// that does not stand above, because it was renamed or split, is refused.
    pub(super) kin: Option<(&'static str, &'static str)>,
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
const FOLIO: Shape =
    Shape { program: "unmap_folio", parameters: &[PointerTo("folio"), MAPPING, Word] };

/// Of these programs the loader makes certain that they run.
pub(super) const SWITCHING_OFF: &str = "switching programs off";

pub(super) static HOOKS: [Hook; 13] = [
    Hook {
        change: "unmapping",
        functions: &["unmap_vmas"],
        kin: None,
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
        kin: None,
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
        kin: None,
        if_there_is: Some("__unmap_hugepage_range"),
        shapes: &[Shape { program: "zap_between", parameters: &[MAPPING, Word, Word] }],
        both_ends: true,
    },
    Hook {
        change: "moving",
        functions: &["move_page_tables"],
        kin: None,
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
        change: "unmapping of a file's page",
        functions: &["try_to_unmap_one", "try_to_unmap_poisoned_hugetlb_one"],
        kin: Some(("try_to_unmap_", "_one")),
        if_there_is: None,
        shapes: &[FOLIO],
        both_ends: true,
    },
    Hook {
        change: "migration of a file's page",
        functions: &["try_to_migrate_one"],
        kin: Some(("try_to_migrate_", "_one")),
        if_there_is: Some("try_to_migrate"),
        shapes: &[FOLIO],
        both_ends: true,
    },
    // Each is called from another file than its own, so no compiler has put it into its caller.
    Hook {
        change: "taking shared tables of hugetlbfs away",
        functions: &["hugetlb_change_protection", "hugetlb_split", "hugetlb_unshare_all_pmds"],
        kin: None,
        if_there_is: Some("hugetlb_change_protection"),
        shapes: &[
            Shape { program: "unshare_between", parameters: &[MAPPING, Word, Word] },
            Shape { program: "unshare_at", parameters: &[MAPPING, Word] },
            Shape { program: "unshare_all", parameters: &[MAPPING] },
        ],
        both_ends: true,
    },
    Hook {
        change: "splitting of a huge page's entry",
        functions: &["__split_huge_pmd"],
        kin: None,
        if_there_is: Some("pmdp_huge_clear_flush"),
        shapes: &[Shape { program: "split_huge", parameters: &[MAPPING, Any, Word] }],
        both_ends: true,
    },
    Hook {
        change: "collapsing of a huge page's entries",
        functions: &["collapse_pte_mapped_thp", "try_collapse_pte_mapped_thp"],
        kin: None,
        if_there_is: Some("pmdp_huge_clear_flush"),
        shapes: &[Shape { program: "collapse", parameters: &[PointerTo("mm_struct"), Word] }],
        both_ends: true,
    },
    Hook {
        change: "breakpoints",
        functions: &["uprobe_write_opcode", "uprobe_write"],
        kin: None,
        if_there_is: Some("uprobe_write_opcode"),
        shapes: &[
            Shape { program: "poke", parameters: &[Any, PointerTo("mm_struct"), Word] },
            Shape { program: "poke_mapping", parameters: &[Any, MAPPING, Word] },
        ],
        both_ends: true,
    },
    Hook {
        change: "the end of a process",
        functions: &["exit_mmap"],
        kin: None,
        if_there_is: None,
        shapes: &[Shape { program: "gone", parameters: &[PointerTo("mm_struct")] }],
        both_ends: false,
    },
    Hook {
        change: SWITCHING_OFF,
        functions: &["proc_dointvec"],
        kin: None,
        if_there_is: None,
        shapes: &[Shape { program: "setting", parameters: &[PointerTo("ctl_table")] }],
        both_ends: false,
    },
    Hook {
        change: "a change of preemption",
        functions: &["sched_dynamic_update"],
        kin: None,
        if_there_is: Some("sched_dynamic_update"),
        shapes: &[Shape { program: "preempting", parameters: &[] }],
        both_ends: true,
    },
];

/// A change, and a function that makes it and that no program stands at, of a kernel with the functions that `has` knows.
///
/// From 6.2 on (stable kernels of that time, too) the split of a mapping takes shared tables of hugetlbfs away in
/// `hugetlb_unshare_pmds`, which the compiler may put into its caller. The kernels of June 2025 and later (6.16, and stable ones)
/// have `hugetlb_split` for it.
pub(super) fn unseen(has: impl Fn(&str) -> bool) -> Option<(&'static str, &'static str)> {
    let takes_away = has("hugetlb_unshare_all_pmds");
    (takes_away && !has("hugetlb_split"))
        .then_some(("taking shared tables of hugetlbfs away", "hugetlb_vm_op_split"))
}

/// Where the instrument stands, which checks the list above: what takes a page, or several, out of the reverse mapping.
#[cfg(feature = "instrument")]
pub(super) static PARTINGS: Hook = Hook {
    change: "removal from the reverse mapping",
    functions: &["page_remove_rmap", "folio_remove_rmap_ptes", "folio_remove_rmap_pmd"],
    kin: None,
    if_there_is: None,
    shapes: &[
        Shape { program: "part_page", parameters: &[PointerTo("page"), MAPPING, Any] },
        Shape {
            program: "part_pages",
            parameters: &[PointerTo("folio"), PointerTo("page"), Any, MAPPING],
        },
        Shape {
            program: "part_huge",
            parameters: &[PointerTo("folio"), PointerTo("page"), MAPPING],
        },
    ],
    both_ends: false,
};

/// What the program `whose` is for: the iterator over the threads of a process.
pub(super) const THREADS: &str = "bpf_iter_task";

#[cfg(test)]
mod tests {
    use super::*;

    /// Debian's 6.1.0-56, 6.12.118 and 7.3.4 have both.
    #[test]
    fn a_kernel_that_splits_shared_tables_unseen_is_refused() {
        let judge = |functions: &[&str]| unseen(|function| functions.contains(&function));
        let (all, split) = ("hugetlb_unshare_all_pmds", "hugetlb_split");
        assert_eq!(judge(&[]), None, "no hugetlbfs");
        assert_eq!(judge(&[all, split, "hugetlb_change_protection"]), None);
        let refused = judge(&[all, "hugetlb_change_protection"]);
        assert_eq!(refused.map(|(_, function)| function), Some("hugetlb_vm_op_split"));
        assert!(HOOKS.iter().any(|hook| refused.is_some_and(|(change, _)| change == hook.change)));
    }
}
