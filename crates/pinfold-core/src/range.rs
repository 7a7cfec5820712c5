//! Ranges of virtual addresses: never empty, never wrapping.

use std::fmt;

/// A half-open range of virtual addresses, in bytes: `start` included, `end` not.
///
/// A value of this type is never empty, never starts at address zero and never
/// wraps, so no code behind it has to ask.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    start: usize,
    end: usize,
}

/// Why an address and a length do not make an [`AddressRange`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeError {
    /// The address is null.
    Null,
    /// The length is zero.
    Empty {
        /// The address given.
        start: usize,
    },
    /// `start + length` exceeds the address space.
    Overflow {
        /// The address given.
        start: usize,
        /// The length given, in bytes.
        length: usize,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => write!(f, "the address is null: pass the address of live memory"),
            Self::Empty { start } => {
                write!(f, "the range at {start:#x} is empty: there is nothing to register")
            }
            Self::Overflow { start, length } => write!(
                f,
                "{length} bytes from {start:#x} exceed the address space: check the length"
            ),
        }
    }
}

impl std::error::Error for RangeError {}

impl AddressRange {
    /// The range of `length` bytes from `start`.
    ///
    /// # Errors
    ///
    /// [`RangeError`] if `start` or `length` is zero or their sum overflows.
    pub const fn new(start: usize, length: usize) -> Result<Self, RangeError> {
        if start == 0 {
            return Err(RangeError::Null);
        }
        if length == 0 {
            return Err(RangeError::Empty { start });
        }
        match start.checked_add(length) {
            Some(end) => Ok(Self { start, end }),
            None => Err(RangeError::Overflow { start, length }),
        }
    }

    /// The range from `start` up to, not including, `end`; `None` if that is empty or starts at 0.
    pub const fn between(start: usize, end: usize) -> Option<Self> {
        if start != 0 && start < end { Some(Self { start, end }) } else { None }
    }

    /// `start` up to `end`, of which the caller knows that they are a range: they lie in one.
    pub(crate) const fn within_another(start: usize, end: usize) -> Self {
        debug_assert!(start != 0 && start < end);
        Self { start, end }
    }

    /// Every address there is: what an event of unknown extent touches.
    pub const EVERYTHING: Self = Self { start: 1, end: usize::MAX };

    /// The first address.
    pub const fn start(&self) -> usize {
        self.start
    }

    /// The first address behind the range.
    pub const fn end(&self) -> usize {
        self.end
    }

    /// The length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)] // never empty by construction
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether every byte of `other` lies in `self`.
    pub const fn contains(&self, other: &Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the two share at least one byte.
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The bytes that both contain.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        Self::between(self.start.max(other.start), self.end.min(other.end))
    }

    /// The smallest range of whole `page`-byte pages around `self`.
    ///
    /// `page` is a power of two. The end saturates at the last page of the address space.
    /// The first page of the address space keeps its address zero out of the range.
    #[must_use]
    pub const fn page_aligned(&self, page: usize) -> Self {
        debug_assert!(page.is_power_of_two());
        let mask = page - 1;
        let start = self.start & !mask;
        let end = match self.end.checked_add(mask) {
            Some(sum) => sum & !mask,
            None => usize::MAX & !mask,
        };
        let end = if end < self.end { self.end } else { end };
        Self { start: if start == 0 { self.start } else { start }, end }
    }

    /// `self` cut at every multiple of `piece` bytes of the address space.
    ///
    /// The cuts depend on addresses alone, so the pieces of one buffer are the same on its next
    /// use, also when that use starts elsewhere in it. `piece` is a power of two.
    pub fn pieces(self, piece: usize) -> impl Iterator<Item = Self> {
        debug_assert!(piece.is_power_of_two());
        let mut next = self.start;
        std::iter::from_fn(move || {
            let start = next;
            let boundary = (start | (piece - 1)).saturating_add(1);
            let end = boundary.min(self.end);
            next = end;
            Self::between(start, end)
        })
    }
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> AddressRange {
        AddressRange::between(start, end).unwrap()
    }

    #[test]
    fn bad_arguments_are_told_apart() {
        assert_eq!(AddressRange::new(0, 1), Err(RangeError::Null));
        assert_eq!(AddressRange::new(8, 0), Err(RangeError::Empty { start: 8 }));
        let last = usize::MAX;
        assert_eq!(
            AddressRange::new(last, 2),
            Err(RangeError::Overflow { start: last, length: 2 })
        );
        assert!(AddressRange::new(last - 1, 1).is_ok());
    }

    #[test]
    fn neighbours_do_not_overlap() {
        assert!(!range(0x1000, 0x2000).overlaps(&range(0x2000, 0x3000)));
        assert!(range(0x1000, 0x2001).overlaps(&range(0x2000, 0x3000)));
        assert_eq!(range(1, 5).intersection(&range(3, 9)), Some(range(3, 5)));
    }

    #[test]
    fn alignment_takes_whole_pages_and_saturates() {
        assert_eq!(range(0x1001, 0x1002).page_aligned(0x1000), range(0x1000, 0x2000));
        assert_eq!(range(0x1000, 0x2000).page_aligned(0x1000), range(0x1000, 0x2000));
        let top = range(usize::MAX - 1, usize::MAX);
        assert!(top.page_aligned(0x1000).contains(&top));
    }

    #[test]
    fn pieces_are_cut_at_addresses_not_at_offsets() {
        let cut: Vec<_> = range(0x1800, 0x4800).pieces(0x1000).collect();
        assert_eq!(
            cut,
            [
                range(0x1800, 0x2000),
                range(0x2000, 0x3000),
                range(0x3000, 0x4000),
                range(0x4000, 0x4800)
            ]
        );
        let top: Vec<_> = range(usize::MAX - 3, usize::MAX).pieces(0x1000).collect();
        assert_eq!(top, [range(usize::MAX - 3, usize::MAX)]);
    }
}
