//! Where the device registered more than was asked for, of late: what it would register is asked before the next
//! registration there, and elsewhere behind it alone.
//!
//! The question ([`Registrar::widened`](crate::Registrar::widened)) takes io_uring a microsecond, as long as it takes to
//! register a page. What is counted is asked behind each registration, so what is remembered here decides what a get takes,
//! and nothing else.

use crate::AddressRange;
use crate::sync::{AtomicUsize, EXPLORED, Ordering};

/// A block is as long as an x86 processor's huge page: 2 MiB.
const BLOCK: u32 = 21;
/// How many blocks are remembered, each in the place of the last one with its low bits. A choice, not a measurement.
const PLACES: usize = if EXPLORED { 2 } else { 64 };
/// Longer ranges are asked about in any case: to register one takes longer than the question, and would be done twice.
const SHORT: usize = 64 << 10;

/// Blocks, by their numbers. 512 bytes.
pub(crate) struct WideBlocks {
    /// One more than the block's number; 0 where none is remembered.
    places: [AtomicUsize; PLACES],
}

impl WideBlocks {
    pub(crate) fn new() -> Self {
        Self { places: std::array::from_fn(|_| AtomicUsize::new(0)) }
    }

    /// Whether the question before the registration of `range` is worth it.
    pub(crate) fn may_cover(&self, range: AddressRange) -> bool {
        // Relaxed: a hint.
        let is_wide = |block| self.place(block).load(Ordering::Relaxed) == block + 1;
        range.len() > SHORT || ends(range).into_iter().any(is_wide)
    }

    /// More than `range` would be registered for it, or (not `is_wide`) no more.
    pub(crate) fn note(&self, range: AddressRange, is_wide: bool) {
        for block in ends(range) {
            let (place, noted) = (self.place(block), block + 1);
            // Relaxed: a hint. Stored only where it says something else, so that no line is written without need.
            if (place.load(Ordering::Relaxed) == noted) != is_wide {
                place.store(if is_wide { noted } else { 0 }, Ordering::Relaxed);
            }
        }
    }

    fn place(&self, block: usize) -> &AtomicUsize {
        &self.places[block % PLACES]
    }
}

/// The blocks in which `range` begins and ends: more is registered at its ends, if at all.
fn ends(range: AddressRange) -> [usize; 2] {
    [range.start() >> BLOCK, (range.end() - 1) >> BLOCK]
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;

    fn range(block: usize, bytes: usize) -> AddressRange {
        AddressRange::new(block << BLOCK, bytes).unwrap()
    }

    #[test]
    fn a_block_is_remembered_until_it_is_not_wide_any_more() {
        let (blocks, page) = (WideBlocks::new(), range(5, 4096));
        assert!(!blocks.may_cover(page));
        blocks.note(page, true);
        assert!(blocks.may_cover(page) && !blocks.may_cover(range(6, 4096)));
        blocks.note(page, false);
        assert!(!blocks.may_cover(page));
    }

    #[test]
    fn either_end_may_be_in_a_wide_block() {
        let blocks = WideBlocks::new();
        blocks.note(range(6, 4096), true);
        let across = AddressRange::new((6 << BLOCK) - 4096, 8192).unwrap();
        assert!(blocks.may_cover(across));
    }

    #[test]
    fn another_block_in_the_same_place_is_another() {
        let (blocks, first, other) = (WideBlocks::new(), range(1, 4096), range(1 + PLACES, 4096));
        blocks.note(first, true);
        blocks.note(other, false);
        assert!(blocks.may_cover(first) && !blocks.may_cover(other));
        blocks.note(other, true);
        assert!(!blocks.may_cover(first) && blocks.may_cover(other));
    }

    #[test]
    fn long_ranges_are_asked_about() {
        assert!(WideBlocks::new().may_cover(range(1, SHORT + 4096)));
        assert!(!WideBlocks::new().may_cover(range(1, SHORT)));
    }
}
