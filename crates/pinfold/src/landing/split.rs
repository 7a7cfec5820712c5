//! Which bytes of a target are whole pages, and which are the ragged ends around them.

use crate::AddressRange;

/// A range as its whole pages and the bytes before and behind them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    /// The bytes before the first whole page; everything, if there is no whole page.
    pub head: Option<AddressRange>,
    /// The whole pages.
    pub pages: Option<AddressRange>,
    /// The bytes behind the last whole page.
    pub tail: Option<AddressRange>,
}

impl Split {
    /// Splits `range` at the boundaries of pages of `page` bytes, a power of two.
    pub fn new(range: AddressRange, page: usize) -> Self {
        let (start, end) = (range.start(), range.end());
        let last = end & !(page - 1);
        match start.checked_next_multiple_of(page) {
            Some(first) if first < last => Self {
                head: AddressRange::between(start, first),
                pages: AddressRange::between(first, last),
                tail: AddressRange::between(last, end),
            },
            _ => Self { head: Some(range), pages: None, tail: None },
        }
    }
}

/// `part` of `one` at its place in `other`, which is as long.
pub(super) fn same_part(
    part: AddressRange,
    one: AddressRange,
    other: AddressRange,
) -> AddressRange {
    let start = other.start() + (part.start() - one.start());
    AddressRange::between(start, start + part.len()).unwrap_or(other)
}

/// The first place from `within` on that lies within its granule as `target` does.
pub(super) fn aligned_like(
    target: AddressRange,
    within: AddressRange,
    granule: usize,
) -> Option<AddressRange> {
    let (wanted, start) = (target.start() & (granule - 1), within.start());
    let offset = wanted.wrapping_sub(start) & (granule - 1);
    let start = start.checked_add(offset)?;
    let place = AddressRange::new(start, target.len()).ok()?;
    within.contains(&place).then_some(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_parts_are_the_range_and_the_pages_are_whole(
            start in 1_usize..1 << 40,
            length in 1_usize..1 << 24,
            shift in 12_u32..22,
        ) {
            let (range, page) = (AddressRange::new(start, length).unwrap(), 1 << shift);
            let split = Split::new(range, page);
            let parts: Vec<_> = [split.head, split.pages, split.tail].into_iter().flatten().collect();
            prop_assert_eq!(parts[0].start(), range.start());
            prop_assert!(parts.windows(2).all(|pair| pair[0].end() == pair[1].start()));
            prop_assert_eq!(parts[parts.len() - 1].end(), range.end());
            if let Some(pages) = split.pages {
                prop_assert!(pages.start() % page == 0 && pages.end() % page == 0);
            }
            // No whole page is left to the ends, however long they are.
            for end in [split.head, split.tail].into_iter().flatten() {
                let inner = end.start().next_multiple_of(page);
                prop_assert!(inner + page > end.end(), "{:?}", split);
            }
        }

        #[test]
        fn a_place_lies_as_its_target_lies(
            start in 1_usize..1 << 40,
            length in 1_usize..1 << 20,
            slot in 1_usize..1 << 10,
            room in 1_usize..1 << 22,
            shift in 12_u32..22,
        ) {
            let granule = 1 << shift;
            let target = AddressRange::new(start, length).unwrap();
            let within = AddressRange::new(slot << 12, room).unwrap();
            match aligned_like(target, within, granule) {
                Some(place) => {
                    prop_assert_eq!(place.start() % granule, target.start() % granule);
                    prop_assert!(within.contains(&place) && place.len() == length);
                }
                None => prop_assert!(room < length + granule),
            }
        }
    }
}
