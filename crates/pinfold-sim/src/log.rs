//! The log of changed ranges, bounded as a monitor's must be.

use pinfold_core::AddressRange;
use std::collections::VecDeque;

/// The last `capacity` changed ranges, numbered from 0 without gaps.
#[derive(Debug)]
pub(crate) struct Log {
    entries: VecDeque<AddressRange>,
    /// The number of the first entry still kept.
    first: u64,
    capacity: usize,
}

impl Log {
    pub(crate) const fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::new(), first: 0, capacity }
    }

    /// The number that the next entry will have.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Appends `range`; the oldest entry makes room.
    pub(crate) fn push(&mut self, range: AddressRange) {
        self.entries.push_back(range);
        while self.entries.len() > self.capacity {
            self.entries.pop_front();
            self.first += 1;
        }
    }

    /// The entries from number `from` on; `None` if some of them are gone, or that number is not
    /// the next one yet.
    pub(crate) fn since(&self, from: u64) -> Option<Vec<AddressRange>> {
        if from > self.end() {
            return None;
        }
        let skipped = usize::try_from(from.checked_sub(self.first)?).ok()?;
        Some(self.entries.iter().skip(skipped).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overflow_is_admitted() {
        let ranges: Vec<_> =
            (1..=4).map(|n| AddressRange::new(n * 0x1000, 0x1000).unwrap()).collect();
        let mut log = Log::new(2);
        assert_eq!(log.since(0), Some(vec![]));
        for &range in &ranges {
            log.push(range);
        }
        assert_eq!((log.end(), log.since(1)), (4, None));
        assert_eq!(log.since(2), Some(ranges[2..].to_vec()));
        assert_eq!((log.since(4), log.since(5)), (Some(vec![]), None));
    }
}
