//! The sizes that a pool hands out.
//!
//! 64, 128, 192, 256 bytes, then four sizes for each doubling up to 4 MiB: 320, 384, 448, 512,
//! 640, ... So a buffer of more than 256 bytes wastes less than a fifth of its memory, a smaller one
//! less than 64 bytes. Eight sizes for each doubling would halve that, at twice the magazines for
//! every thread and twice the spans of which a part lies idle.
//!
//! Every size is a multiple of 64 bytes, and every buffer begins at one: no two buffers share a
//! cache line, neither between threads nor between the program and a device.
//!
//! Longer ones are cut from slabs by whole [`UNIT`]s.

/// What slabs are divided into: a span of blocks of one size, or one long buffer, is a number of
/// whole units.
pub(super) const UNIT: usize = 16 << 10;

/// How many sizes there are.
pub(super) const CLASSES: usize = 60;

/// The longest size.
pub(super) const LONGEST: usize = 4 << 20;

/// The least alignment of every buffer, in bytes: a cache line.
pub(super) const LINE: usize = 64;

/// The strictest alignment that a buffer can have, in bytes: that of a slab.
pub(super) const MAX_ALIGN: usize = 2 << 20;

/// One of the sizes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Class(u8);

/// Up to this length, sizes are multiples of a cache line.
const FINE: usize = 4 * LINE;

impl Class {
    /// The smallest size of at least `length` bytes, which is not zero.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // below 60
    pub(super) const fn holding(length: usize) -> Option<Self> {
        let last = length.wrapping_sub(1);
        if last < FINE {
            return Some(Self((last / LINE) as u8));
        }
        if last >= LONGEST {
            return None;
        }
        // 2^doubling <= last < 2^(doubling + 1), which four sizes divide.
        let doubling = last.ilog2();
        let quarter = (last >> (doubling - 2)) & 3;
        Some(Self((4 + 4 * (doubling as usize - 8) + quarter) as u8))
    }

    /// The smallest size of at least `length` bytes whose buffers all begin at multiples of
    /// `align`, a power of two.
    pub(super) fn aligned(length: usize, align: usize) -> Option<Self> {
        let fits = |class: &Self| class.align() >= align;
        (Self::holding(length)?.0..CLASSES_U8).map(Self).find(fits)
    }

    #[inline(always)]
    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The class of this index.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // below 60
    pub(super) fn of_index(index: usize) -> Option<Self> {
        (index < CLASSES).then_some(Self(index as u8))
    }

    /// How long a buffer is, in bytes.
    #[inline(always)]
    pub(super) const fn bytes(self) -> usize {
        let index = self.0 as usize;
        match index.checked_sub(4) {
            None => LINE * (index + 1),
            Some(index) => (5 + index % 4) << (6 + index / 4),
        }
    }

    /// Where every buffer of this size begins: at a multiple of this power of two.
    pub(super) const fn align(self) -> usize {
        let natural = 1 << self.bytes().trailing_zeros();
        if natural < MAX_ALIGN { natural } else { MAX_ALIGN }
    }

    /// How many units a span has: the fewest that blocks fill without a rest, for sizes from 2 KiB
    /// up at least four, so that a span is worth its making.
    pub(super) const fn span_units(self) -> usize {
        let bytes = self.bytes();
        let odd = bytes >> bytes.trailing_zeros();
        if bytes < 2048 {
            odd
        } else if odd * 4 * UNIT >= bytes {
            odd * 4
        } else {
            bytes / UNIT
        }
    }

    /// How many blocks a span has, at most 256.
    pub(super) const fn span_blocks(self) -> usize {
        self.span_units() * UNIT / self.bytes()
    }

    /// At how many units' multiples a span begins.
    pub(super) const fn span_align_units(self) -> usize {
        let units = self.align() / UNIT;
        if units == 0 { 1 } else { units }
    }
}

#[allow(clippy::cast_possible_truncation)] // 60
const CLASSES_U8: u8 = CLASSES as u8;

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Class> {
        (0..CLASSES).filter_map(Class::of_index)
    }

    #[test]
    fn every_length_has_the_smallest_size_that_holds_it() {
        let mut sizes: Vec<usize> = all().map(Class::bytes).collect();
        assert!(sizes.is_sorted() && sizes.len() == CLASSES);
        assert_eq!((sizes[0], sizes[CLASSES - 1]), (LINE, LONGEST));
        sizes.insert(0, 0);
        for (index, edges) in sizes.windows(2).enumerate() {
            let class = Class::of_index(index);
            assert_eq!(Class::holding(edges[0] + 1), class);
            assert_eq!(Class::holding(edges[1]), class);
        }
        assert_eq!(Class::holding(LONGEST + 1), None);
        assert_eq!(Class::of_index(CLASSES), None);
    }

    /// What the module's documentation says.
    #[test]
    fn waste_is_bounded() {
        for length in (1..=LONGEST).step_by(61).chain([257, 4097, 65537, LONGEST]) {
            let bytes = Class::holding(length).unwrap().bytes();
            let waste = bytes - length;
            assert!(waste < LINE || 5 * waste < bytes, "{length} in {bytes}");
        }
    }

    #[test]
    fn blocks_fill_spans_and_lie_as_they_should() {
        for class in all() {
            let span = class.span_units() * UNIT;
            assert_eq!(span % class.bytes(), 0, "{class:?} leaves a rest");
            assert!((1..=256).contains(&class.span_blocks()), "{class:?}");
            assert!(class.bytes() % class.align() == 0 && class.align() >= LINE);
            assert_eq!(class.span_align_units() * UNIT % class.align(), 0);
        }
    }

    #[test]
    fn an_alignment_takes_the_next_size_that_has_it() {
        let bytes = |length, align| Class::aligned(length, align).map(Class::bytes);
        assert_eq!(bytes(1, 1), Some(64));
        assert_eq!(bytes(65, 128), Some(128));
        assert_eq!(bytes(300, 4096), Some(4096));
        assert_eq!(bytes(5000, 4096), Some(8192));
        assert_eq!(bytes(64, MAX_ALIGN), Some(MAX_ALIGN));
        assert_eq!(bytes(3 << 20, MAX_ALIGN), Some(4 << 20));
        assert_eq!(bytes(LONGEST + 1, 1), None);
    }
}
