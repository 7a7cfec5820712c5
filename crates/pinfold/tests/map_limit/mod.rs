//! A process with as many mappings as it may have (`vm.max_map_count`), for tests that are alone in theirs.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers fail as loudly as tests

use pinfold_kernel::mapping::OwnedMapping;
use pinfold_kernel::process::page_bytes;

/// How many can be given back one by one, at least.
const SINGLE: usize = 32;
/// A process that may have more is not filled: that takes too long.
const MOST: usize = 1 << 18;

/// Until it is dropped, no mapping can be made or split.
pub(crate) struct MapLimit {
    _area: OwnedMapping,
    /// Shared memory, which joins no neighbour: each is one mapping.
    single: Vec<OwnedMapping>,
}

impl MapLimit {
    /// `None`, which is said, where the process may have too many.
    pub(crate) fn reach() -> Option<Self> {
        let page = page_bytes();
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        if limit > MOST {
            eprintln!("skipped: a process may have {limit} mappings here");
            return None;
        }
        let mut single = Vec::with_capacity(4 * SINGLE);
        single.extend((0..SINGLE).map(|_| OwnedMapping::shared(page).unwrap()));
        // Each page that may be read and written is one more between two of those that may not.
        let area = OwnedMapping::inaccessible((limit + 2) * page).unwrap();
        let parts = (1..=limit).step_by(2);
        let is_full = parts.into_iter().any(|at| area.allow(at * page, page).is_err());
        assert!(is_full, "{limit} mappings, and there may be more");
        // The kernel makes one more than it lets a split make.
        single.extend((SINGLE..4 * SINGLE).map_while(|_| OwnedMapping::shared(page).ok()));
        Some(Self { _area: area, single })
    }

    /// There may be one more; false if all have been given back.
    #[allow(dead_code)] // not every test gives some back
    pub(crate) fn give_one_back(&mut self) -> bool {
        self.single.pop().is_some()
    }
}
