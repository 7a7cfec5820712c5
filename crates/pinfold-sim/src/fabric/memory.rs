//! What physical pages contain: a number for each cell.

use crate::space::{PAGE_BYTES, PhysicalPage};

/// How many bytes of a page are told apart by one number.
pub const CELL_BYTES: usize = 1024;

/// How many cells a page has.
pub const CELLS_PER_PAGE: usize = PAGE_BYTES / CELL_BYTES;

/// The content of cell `cell` of the message or buffer `id`: never that of another.
pub const fn stamp(id: u64, cell: usize) -> u64 {
    let mut mixed = (id << 8 | cell as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Pages are numbered from 0, so this is a list.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pages: Vec<[u64; CELLS_PER_PAGE]>,
}

impl Memory {
    fn page(&mut self, PhysicalPage(number): PhysicalPage) -> &mut [u64; CELLS_PER_PAGE] {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        if number >= self.pages.len() {
            self.pages.resize(number + 1, [0; CELLS_PER_PAGE]);
        }
        &mut self.pages[number]
    }

    /// The cell of `page` in which the address `at` lies.
    pub(crate) fn cell(&mut self, page: PhysicalPage, at: usize) -> &mut u64 {
        &mut self.page(page)[at % PAGE_BYTES / CELL_BYTES]
    }

    /// The page is another owner's now, which writes to it at once.
    pub(crate) fn give_away(&mut self, page: PhysicalPage) {
        for cell in self.page(page) {
            *cell = stamp(!*cell, CELLS_PER_PAGE);
        }
    }
}
