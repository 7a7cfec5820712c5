//! The program's memory: a few buffers at fixed addresses.

use crate::fabric::CELL_BYTES;
use crate::random::Random;
use crate::space::{Discard, PAGE_BYTES};
use pinfold_core::AddressRange;

/// How many buffers there are.
pub(super) const BUFFERS: usize = 12;
/// How many pages each has.
pub(super) const PAGES: usize = 6;
/// Where the first begins, and how far apart they are.
const BASE: usize = 0x10_0000;
const STRIDE: usize = 0x1_0000;
/// Where buffers are moved to on their way.
pub(super) const ELSEWHERE: usize = 0x100_0000;

/// One buffer.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) range: AddressRange,
    /// Works and exposures that use it.
    pub(super) users: usize,
    /// Part of it is not mapped; nothing new is done with it.
    pub(super) broken: bool,
    /// A discard of it that has been announced and not happened.
    pub(super) discard: Option<(AddressRange, Discard)>,
}

/// `pages` pages from page `first` of a buffer on, as a range.
fn part(buffer: AddressRange, first: usize, pages: usize) -> AddressRange {
    let start = buffer.start() + first * PAGE_BYTES;
    AddressRange::between(start, start + pages * PAGE_BYTES).unwrap_or(buffer)
}

impl Buffer {
    pub(super) fn new(number: usize) -> Self {
        let start = BASE + number * STRIDE;
        let range = AddressRange::between(start, start + PAGES * PAGE_BYTES);
        let range = range.unwrap_or(AddressRange::EVERYTHING);
        Self { range, users: 0, broken: false, discard: None }
    }

    /// Whole pages of it.
    pub(super) fn some_pages(&self, random: &mut Random) -> AddressRange {
        let first = random.below(PAGES);
        part(self.range, first, 1 + random.below(PAGES - first))
    }

    /// `cells` cells of it.
    pub(super) fn some_cells(&self, cells: usize, random: &mut Random) -> AddressRange {
        let first = random.below(self.range.len() / CELL_BYTES - cells + 1);
        let start = self.range.start() + first * CELL_BYTES;
        AddressRange::between(start, start + cells * CELL_BYTES).unwrap_or(self.range)
    }

    /// Whether something new may be done with `range`.
    pub(super) fn is_usable(&self, range: AddressRange) -> bool {
        let going = self.discard.as_ref().is_some_and(|(gone, _)| gone.overlaps(&range));
        !self.broken && !going
    }
}
