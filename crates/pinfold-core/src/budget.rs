//! A budget that a cache draws on together with other caches and pools.
//!
//! A cache keeps to the bounds of its own [`Config`](crate::Config) always. One that was made with
//! an [`Account`] asks there as well, before each registration, and gives back after each
//! deregistration. A hit does not ask. The holder of the account's other side (`pinfold::budget`)
//! can have the cache give up what is idle, through [`Lender`].

use crate::error::Exhausted;
use crate::registrar::RegisterError;
use std::ops::{Add, Sub};
use std::sync::Weak;

/// An amount of registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Amount {
    /// Bytes, in whole pages.
    pub bytes: usize,
    /// Registrations.
    pub regions: usize,
}

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self { bytes: 0, regions: 0 };
    /// More than there can be.
    pub const EVERYTHING: Self = Self { bytes: usize::MAX, regions: usize::MAX };

    /// This many bytes in one registration.
    pub const fn one(bytes: usize) -> Self {
        Self { bytes, regions: 1 }
    }

    /// Of each, the less.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self { bytes: self.bytes.min(other.bytes), regions: self.regions.min(other.regions) }
    }

    /// Of each, the more.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { bytes: self.bytes.max(other.bytes), regions: self.regions.max(other.regions) }
    }

    /// Whether this is no more than `other`, in bytes and in registrations.
    pub const fn fits(self, other: Self) -> bool {
        self.bytes <= other.bytes && self.regions <= other.regions
    }
}

/// The sum; never more than [`Amount::EVERYTHING`].
impl Add for Amount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            regions: self.regions.saturating_add(other.regions),
        }
    }
}

/// The difference; never less than nothing.
impl Sub for Amount {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            regions: self.regions.saturating_sub(other.regions),
        }
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

/// Why an account did not grant an amount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// What to tell the program.
    pub exhausted: Exhausted,
    /// How much has to be given back before asking again makes sense.
    pub missing: Amount,
}

impl Refusal {
    /// Whether the whole budget would not do, whatever is evicted for it.
    pub(crate) const fn is_hopeless(&self) -> bool {
        self.exhausted.wanted > self.exhausted.allowed
    }
}

/// One drawer's side of a shared budget.
///
/// What [`take`](Self::take) or [`overdraw`](Self::overdraw) gave comes back by
/// [`give`](Self::give), exactly, whatever fails in between. None of it is called on a hit, nor in
/// a forked child.
pub trait Account: Send + Sync + 'static {
    /// Takes `amount`, all or nothing.
    ///
    /// Called under a lock of the drawer's: it may take a lock of its own for a moment, and calls no
    /// other code.
    ///
    /// # Errors
    ///
    /// [`Refusal`]; nothing was taken.
    fn take(&self, amount: Amount) -> Result<(), Refusal>;

    /// Takes `amount` whether it is there or not. Called as [`take`](Self::take) is.
    fn overdraw(&self, amount: Amount);

    /// Gives `amount` back. Called as [`take`](Self::take) is.
    fn give(&self, amount: Amount);

    /// Has other drawers give back what they hold beyond their due, if this one asked for no more
    /// than its own. True if any of them gave something; asked [so often](Recalls::MOST) at most for one request.
    ///
    /// Called with no lock held; it calls other drawers, which deregister.
    fn recall(&self, missing: Amount) -> bool;

    /// The device had no room for what the account had granted: another process has taken it, or the
    /// limit is lower than it was. The account adapts. True if another drawer gave something back,
    /// so that trying again makes sense. Called as [`recall`](Self::recall) is.
    fn refused(&self, error: RegisterError, missing: Amount) -> bool;

    /// Tells the program what became due in `take`, `overdraw` and `give`. Called with nothing
    /// held, soon after each of them, on the same thread.
    fn settle(&self);

    /// Says who draws here: asked when others recall. Called once, before anything is taken.
    fn attach(&self, lender: Weak<dyn Lender>);
}

/// How often others are asked to give back for one request.
///
/// Each answer says that something was given, and whether it was, and for whom, is not known: others may be
/// quicker, or the answer may be wrong. So it ends.
#[derive(Debug)]
pub struct Recalls(usize);

impl Recalls {
    /// So often.
    pub const MOST: usize = 1000;

    /// For one request.
    #[must_use]
    pub const fn new() -> Self {
        Self(Self::MOST)
    }

    /// Asks, unless that was done so often already; whether to try again.
    pub fn ask(&mut self, others: impl FnOnce() -> bool) -> bool {
        match self.0.checked_sub(1) {
            Some(left) => {
                self.0 = left;
                others()
            }
            None => false,
        }
    }
}

impl Default for Recalls {
    fn default() -> Self {
        Self::new()
    }
}

/// A drawer that can be asked to give something back.
pub trait Lender: Send + Sync {
    /// Gives up idle registrations until `missing` is made up for, or none is left. True if any
    /// was given up, or is about to be gone by another thread's doing and now is.
    ///
    /// Called with no lock held, from a thread of another drawer. What draws inside of it has other lenders asked, and this
    /// one again, once; what draws inside of that is refused where nothing is free.
    fn give_back(&self, missing: Amount) -> bool;

    /// The whole budget, of all drawers, was `from` and is `to`: the limit behind it has changed.
    /// Called as [`give_back`](Self::give_back) is.
    fn budget_changed(&self, from: Amount, to: Amount) {
        let _ = (from, to);
    }

    /// Something was refused that this drawer asked for, and more is to be had since: others have given back, or the
    /// budget is larger. It may ask again; what it does not need it ignores.
    ///
    /// Called with no lock held, from any thread, also one on which this drawer asks. It calls no other code and waits
    /// for none.
    fn room_made(&self) {}
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn amounts_stop_at_both_ends() {
        let (some, more) = (Amount { bytes: 3, regions: 5 }, Amount { bytes: 4, regions: 1 });
        assert_eq!(some - more, Amount { bytes: 0, regions: 4 });
        assert_eq!(some + Amount::EVERYTHING, Amount::EVERYTHING);
        assert_eq!([some, more].into_iter().sum::<Amount>(), Amount { bytes: 7, regions: 6 });
        assert!(!some.fits(more) && !more.fits(some));
        assert!(some.min(more).fits(some) && some.fits(some.max(more)));
    }
}
