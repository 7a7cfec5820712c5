//! Memory of a reservation: pages of our own.

use pinfold_core::AddressRange;
use pinfold_kernel::{Errno, mapping::OwnedMapping};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many reservations' memory is told apart from other memory.
const PLACES: usize = 4096;

/// The memory of all reservations of the process. No lock: one that a thread holds as the process forks is held
/// in the child for ever, and a child may make reservations of its own.
static RESERVED: Table<PLACES> = Table::new();

/// Whether a reservation may have some of the range, whose registrations name the pages that are there.
pub(crate) fn is_reserved(range: AddressRange) -> bool {
    RESERVED.overlaps(range)
}

/// Ranges, as many as there are places; of more it says that they may be anywhere.
struct Table<const PLACES: usize> {
    places: [Place; PLACES],
    /// How many ranges found no place.
    unplaced: AtomicUsize,
}

/// A range, while `bytes` is neither 0 (free) nor `TAKEN`.
struct Place {
    start: AtomicUsize,
    bytes: AtomicUsize,
}

impl Place {
    #[expect(clippy::declare_interior_mutable_const, reason = "each place is a copy of its own")]
    const FREE: Self = Self { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0) };
}

/// Of a place whose range is being written.
const TAKEN: usize = usize::MAX;

/// Where a range stands in the table, until it is taken out.
#[derive(Clone, Copy, Debug)]
struct Placed(Option<usize>);

impl<const PLACES: usize> Table<PLACES> {
    const fn new() -> Self {
        Self { places: [const { Place::FREE }; PLACES], unplaced: AtomicUsize::new(0) }
    }

    fn put(&self, range: AddressRange) -> Placed {
        for (number, place) in self.places.iter().enumerate() {
            // Relaxed: one that is being freed is left to the next. To exchange in vain takes ten times as long.
            if place.bytes.load(Ordering::Relaxed) != 0 {
                continue;
            }
            // Acquire: the start is written behind what the last owner wrote.
            let taken =
                place.bytes.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed);
            if taken.is_ok() {
                // Relaxed: ordered by the next store.
                place.start.store(range.start(), Ordering::Relaxed);
                // Release: a thread that reads the length reads this start.
                place.bytes.store(range.len(), Ordering::Release);
                return Placed(Some(number));
            }
        }
        // Relaxed, here and below: a thread that asks about a range learnt of it from the thread that put it.
        self.unplaced.fetch_add(1, Ordering::Relaxed);
        Placed(None)
    }

    fn take_out(&self, Placed(number): Placed) {
        match number.and_then(|number| self.places.get(number)) {
            // Release: the next owner writes behind this.
            Some(place) => place.bytes.store(0, Ordering::Release),
            None => _ = self.unplaced.fetch_sub(1, Ordering::Relaxed),
        }
    }

    /// Also true, for a moment, of a range whose place is being given to another.
    fn overlaps(&self, range: AddressRange) -> bool {
        let overlaps = |place: &Place| {
            // Acquire: pairs with the store in `put`.
            let bytes = place.bytes.load(Ordering::Acquire);
            // Relaxed: of the range that had the length, or of a later one.
            let start = place.start.load(Ordering::Relaxed);
            bytes != 0
                && bytes != TAKEN
                && start < range.end()
                && range.start() < start.saturating_add(bytes)
        };
        self.unplaced.load(Ordering::Relaxed) > 0 || self.places.iter().any(overlaps)
    }
}

/// Zeroed pages, in equal parts.
#[derive(Debug)]
pub(super) struct Memory {
    pages: OwnedMapping,
    part_bytes: usize,
    parts: usize,
    placed: Placed,
}

impl Drop for Memory {
    fn drop(&mut self) {
        RESERVED.take_out(self.placed);
    }
}

impl Memory {
    /// `parts` parts of `part_bytes`, a multiple of the page's size.
    ///
    /// In small pages: of a larger one, the kernel counts all against the limit, however small the
    /// part that is registered.
    pub(super) fn new(parts: usize, part_bytes: usize) -> Result<Self, Errno> {
        let length = parts.checked_mul(part_bytes).ok_or(Errno(libc::ENOMEM))?;
        let pages = OwnedMapping::new(length)?;
        // A kernel without huge pages refuses, rightly.
        let _ = pages.want_huge_pages(false);
        let placed = pages.range().map_or(Placed(None), |range| RESERVED.put(range));
        Ok(Self { pages, part_bytes, parts, placed })
    }

    /// The addresses of part `number`.
    pub(super) fn range(&self, number: usize) -> Option<AddressRange> {
        let offset = number.checked_mul(self.part_bytes)?;
        AddressRange::new(self.pages.start().addr().get() + offset, self.part_bytes).ok()
    }

    /// The bytes of part `number`, which is below the number of parts: initialised by the kernel, and mapped as
    /// long as this lives.
    pub(super) fn part(&self, number: usize) -> *mut [u8] {
        debug_assert!(number < self.parts);
        let start = self.pages.start().as_ptr().wrapping_add(number * self.part_bytes);
        std::ptr::slice_from_raw_parts_mut(start, self.part_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, bytes: usize) -> AddressRange {
        AddressRange::new(start, bytes).unwrap()
    }

    #[test]
    fn what_is_in_the_table_is_found_and_what_is_not_is_not() {
        let table = Table::<2>::new();
        assert!(!table.overlaps(range(0x1000, 0x1000)));
        let first = table.put(range(0x1000, 0x1000));
        let _second = table.put(range(0x4000, 0x2000));
        assert!(table.overlaps(range(0x1fff, 1)) && table.overlaps(range(0x5000, 0x9000)));
        assert!(!table.overlaps(range(0x2000, 0x2000)) && !table.overlaps(range(0x6000, 1)));
        table.take_out(first);
        assert!(!table.overlaps(range(0x1000, 0x1000)));
    }

    #[test]
    fn where_one_found_no_place_all_may_be_reserved() {
        let table = Table::<1>::new();
        let _first = table.put(range(0x1000, 0x1000));
        let second = table.put(range(0x4000, 0x1000));
        assert!(table.overlaps(range(0x9000, 1)));
        table.take_out(second);
        assert!(!table.overlaps(range(0x9000, 1)) && table.overlaps(range(0x1000, 1)));
    }
}
