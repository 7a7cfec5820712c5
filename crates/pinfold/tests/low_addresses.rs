//! A program that unmaps from address 0 on. In a process of its own, because whatever lies that low goes.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stderr)]

mod support;

use pinfold::monitor::Userfaultfd;
use pinfold::{Monitor, Watch};
use support::*;

/// Above what `vm.mmap_min_addr` keeps programs from.
const LOW: usize = 0x20_0000;
const PAGES: usize = 16;

#[test]
fn what_is_unmapped_from_address_zero_on_is_reported() {
    let monitor = Userfaultfd::new().unwrap();
    let buffer = range(LOW, PAGES * PAGE);
    for from in [LOW, 0] {
        if !map_if_free(LOW, PAGES) {
            return eprintln!("skipped: something is mapped at {LOW:#x}");
        }
        assert_eq!(monitor.watch(buffer), Watch::Covered);
        let before = monitor.check().unwrap();
        let mark = mark(&monitor);
        assert!(munmap(from, buffer.end() - from), "the kernel unmaps what there is");
        assert_ne!(monitor.check().unwrap(), before, "munmap({from:#x}, ..) is news");
        assert!(touch(&changes_since(&monitor, mark), buffer), "munmap({from:#x}, ..)");
    }
}
