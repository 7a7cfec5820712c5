//! How a range will be cut, told before anything is registered.

use crate::{AddressRange, Cache, Limit, Monitor, RangeError, Registrar};
use std::fmt;

/// The pieces of a range, and what they need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    range: AddressRange,
    piece_bytes: usize,
    page_bytes: usize,
    device_max_bytes: usize,
    max_bytes: usize,
    max_regions: usize,
}

impl Plan {
    /// How `cache` cuts `length` bytes from `start`.
    ///
    /// # Errors
    ///
    /// [`RangeError`] if they make no range.
    pub fn new<R: Registrar, M: Monitor>(
        cache: &Cache<R, M>,
        start: *const u8,
        length: usize,
    ) -> Result<Self, RangeError> {
        let (config, limits) = (cache.config(), cache.registrar().limits());
        Ok(Self {
            range: AddressRange::new(start.addr(), length)?,
            piece_bytes: config.piece_bytes,
            page_bytes: limits.page_bytes,
            device_max_bytes: limits.max_region_bytes,
            max_bytes: config.max_bytes,
            max_regions: config.max_regions,
        })
    }

    /// What is cut.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// The length of a piece in bytes, a power of two; the first and the last may be shorter.
    pub fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// The longest registration that the device takes, in bytes. Pieces are never longer: a cache
    /// makes its [`piece_bytes`](crate::Config::piece_bytes) fit when it is made.
    pub fn device_max_bytes(&self) -> usize {
        self.device_max_bytes
    }

    /// How many pieces there are, at least 1.
    pub fn pieces(&self) -> usize {
        (self.range.end() - 1) / self.piece_bytes - self.range.start() / self.piece_bytes + 1
    }

    /// Piece `number`, counted from 0.
    pub fn piece(&self, number: usize) -> Option<AddressRange> {
        let first = self.range.start() / self.piece_bytes;
        let start = first.checked_add(number)?.checked_mul(self.piece_bytes)?;
        let end = start.saturating_add(self.piece_bytes);
        AddressRange::between(start.max(self.range.start()), end.min(self.range.end()))
    }

    /// What all pieces pin together, in bytes: whole pages.
    pub fn pinned_bytes(&self) -> usize {
        self.range.page_aligned(self.page_bytes).len()
    }

    /// Whether the cache's budget can hold all pieces at once, if nothing else is in use. What
    /// is moved piece by piece needs no more than a few of them.
    ///
    /// # Errors
    ///
    /// [`DoesNotFit`].
    pub fn fits(&self) -> Result<(), DoesNotFit> {
        let (bytes, regions) = (self.pinned_bytes(), self.pieces());
        let check = |limit, wanted, allowed| match wanted <= allowed {
            true => Ok(()),
            false => Err(DoesNotFit { limit, wanted, allowed, piece_bytes: self.piece_bytes }),
        };
        check(Limit::Bytes, bytes, self.max_bytes)?;
        check(Limit::Regions, regions, self.max_regions)
    }
}

/// The budget can never hold all pieces of a range at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub struct DoesNotFit {
    /// The limit that is too low.
    pub limit: Limit,
    /// What the range needs, in the limit's unit.
    pub wanted: usize,
    /// What the limit allows, in its unit.
    pub allowed: usize,
    /// The length of a piece, in bytes.
    pub piece_bytes: usize,
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, allowed, piece_bytes, .. } = self;
        match self.limit {
            Limit::Bytes | Limit::SharedBytes => write!(
                f,
                "{wanted} bytes cannot be pinned at once within a budget of {allowed}: move them \
                 piece by piece, or raise Config::max_bytes (and RLIMIT_MEMLOCK with it)"
            ),
            Limit::Regions | Limit::SharedRegions => write!(
                f,
                "{wanted} pieces of {piece_bytes} bytes need as many registrations, and \
                 there are {allowed}: raise Config::piece_bytes, or the size of the device's table"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(start: usize, length: usize, piece_bytes: usize) -> Plan {
        Plan {
            range: AddressRange::new(start, length).unwrap(),
            piece_bytes,
            page_bytes: 4096,
            device_max_bytes: 1 << 30,
            max_bytes: 1 << 20,
            max_regions: 8,
        }
    }

    #[test]
    fn what_cannot_fit_is_told_by_its_limit() {
        assert_eq!(plan(0x1000, 1 << 20, 1 << 18).fits(), Ok(()));
        let bytes = plan(0x1000, (1 << 20) + 1, 1 << 18).fits().unwrap_err();
        assert_eq!((bytes.limit, bytes.wanted), (Limit::Bytes, (1 << 20) + 4096));
        let regions = plan(0x1000, 9 * 4096, 4096).fits().unwrap_err();
        assert_eq!((regions.limit, regions.wanted), (Limit::Regions, 9));
    }

    proptest! {
        /// The plan tells what the cache's own iterator does.
        #[test]
        fn pieces_by_number_are_those_of_the_range(
            start in 1_usize..1 << 40,
            length in 1_usize..1 << 16,
            shift in 12_u32..16,
        ) {
            let plan = plan(start, length, 1 << shift);
            let cut: Vec<AddressRange> = plan.range().pieces(1 << shift).collect();
            let told: Vec<AddressRange> = (0..).map_while(|n| plan.piece(n)).collect();
            prop_assert_eq!(plan.pieces(), cut.len());
            prop_assert_eq!(told, cut);
        }
    }
}
