//! What was spent on memory that is not known to be used again: whether to rent or to buy.
//!
//! A registration that is kept has a price; copying, or registering for one use, is cheaper once and
//! dearer in the long run. A cache that does not know how often the memory will be used rents until the
//! rents come to the price and buys then: at most twice what knowing would have cost. So for each start of
//! a range the excess of what was paid over what a hit would have cost is added up.
//!
//! The table has a fixed size, and two ranges that meet in one place forget each other. Nothing here is
//! more than a hint: whatever it says, a transfer moves the right bytes.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many starts are remembered: 8 KiB.
const PLACES: usize = 1024;

/// What is remembered of the memory at one address.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Account {
    /// What renting has cost so far beyond hits, in nanoseconds.
    pub(super) spent: u32,
    /// Whether a registration was asked for since, and kept.
    pub(super) bought: bool,
    /// Whether one was asked for and not kept, because the memory cannot be watched.
    pub(super) refused: bool,
}

/// Accounts by address.
pub(super) struct Ledger {
    /// The upper half of each says whose it is.
    places: Box<[AtomicU64]>,
}

const SPENT: u64 = (1 << 30) - 1;
const BOUGHT: u64 = 1 << 30;
const REFUSED: u64 = 1 << 31;

impl Ledger {
    pub(super) fn new() -> Self {
        Self { places: (0..PLACES).map(|_| AtomicU64::new(0)).collect() }
    }

    /// What is remembered of `start`.
    pub(super) fn look(&self, start: usize) -> Account {
        let (place, owner) = self.place(start);
        // Relaxed, here and in `set`: a word that stands alone, and is a hint.
        let word = place.load(Ordering::Relaxed);
        if word & !u64::from(u32::MAX) != owner {
            return Account::default();
        }
        Account {
            spent: u32::try_from(word & SPENT).unwrap_or(u32::MAX),
            bought: word & BOUGHT != 0,
            refused: word & REFUSED != 0,
        }
    }

    /// Notes it. Of two threads that do so at once one may be forgotten.
    pub(super) fn set(&self, start: usize, account: Account) {
        let (place, owner) = self.place(start);
        let bought = if account.bought { BOUGHT } else { 0 };
        let refused = if account.refused { REFUSED } else { 0 };
        let word = owner | bought | refused | u64::from(account.spent).min(SPENT);
        // Relaxed: see `look`. Stored only if it says something new, so that steady use of one buffer
        // by several threads writes no line that they share.
        if place.load(Ordering::Relaxed) != word {
            place.store(word, Ordering::Relaxed);
        }
    }

    fn place(&self, start: usize) -> (&AtomicU64, u64) {
        // Multiplied by 2^64 divided by the golden ratio: neighbours spread over the whole table.
        let spread = (start as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The shift leaves less than the table is long.
        #[allow(clippy::cast_possible_truncation)]
        let place = (spread >> (64 - PLACES.ilog2())) as usize;
        (&self.places[place], (spread << PLACES.ilog2()) & !u64::from(u32::MAX))
    }
}

impl Account {
    /// Whether nothing can be added: about a second. Then the price, whatever it is, counts as paid.
    pub(super) fn is_full(self) -> bool {
        u64::from(self.spent) >= SPENT
    }

    /// With `ns` nanoseconds more spent.
    #[must_use]
    pub(super) fn after(self, ns: f64) -> Self {
        // Saturates, at zero for what was cheaper than a hit.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let more = ns as u32;
        Self { spent: self.spent.saturating_add(more), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_its_owners_alone() {
        let ledger = Ledger::new();
        assert_eq!(ledger.look(0x1000), Account::default());
        let account = Account { spent: 7, bought: true, refused: false };
        ledger.set(0x1000, account);
        assert_eq!(ledger.look(0x1000), account);
        // More addresses than places: none is ever taken for another.
        for start in (0x2000..0x2000 + 4096 * 4096).step_by(4096) {
            assert_eq!(ledger.look(start), Account::default(), "{start:#x}");
        }
    }

    #[test]
    fn the_last_to_come_has_the_place() {
        let ledger = Ledger::new();
        let starts: Vec<usize> = (1..10_000).map(|n| n * 4096).collect();
        for &start in &starts {
            ledger.set(start, Account { spent: 3, bought: false, refused: true });
        }
        let kept = starts.iter().filter(|&&start| ledger.look(start).spent == 3).count();
        assert!((1..=PLACES).contains(&kept), "{kept}");
    }

    #[test]
    fn sums_saturate() {
        let ledger = Ledger::new();
        let rich = Account { spent: u32::MAX, bought: false, refused: false }.after(1e30);
        assert_eq!(rich.after(-5.0).spent, u32::MAX);
        ledger.set(1, rich);
        assert_eq!(u64::from(ledger.look(1).spent), SPENT);
        assert!(ledger.look(1).is_full() && !Account::default().is_full());
        assert!(!ledger.look(1).bought && !ledger.look(1).refused);
    }
}
