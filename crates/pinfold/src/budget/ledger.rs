//! Who holds how much of a budget, and what is due to whom. No lock, no clock, no kernel.
//!
//! Each drawer has a **minimum**, which is kept for it: nobody else gets it, used or not. The rest
//! is **common**: whoever comes takes of it, up to its maximum. What is **due** to a drawer is its
//! minimum and, by its weight, a part of what is common; beyond that it borrows, and gives
//! back when another asks for its own due.

use super::BudgetError;
use pinfold_core::{Amount, Exhausted, Limit, Refusal};

/// What one drawer of a budget may expect of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Kept for this drawer alone, whether it uses it or not.
    pub minimum: Amount,
    /// The most that this drawer ever gets.
    pub maximum: Amount,
    /// Its part of what is left when all minimums are set aside, in proportion to the others'.
    pub weight: u32,
}

impl Default for Terms {
    /// Nothing kept, everything allowed, a weight of 1.
    fn default() -> Self {
        Self { minimum: Amount::ZERO, maximum: Amount::EVERYTHING, weight: 1 }
    }
}

/// The place of a drawer in the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Drawer(usize);

#[derive(Debug)]
struct Entry {
    terms: Terms,
    held: Amount,
}

#[derive(Debug)]
pub(super) struct Ledger {
    total: Amount,
    /// By the drawer's number; `None` for one that has left.
    entries: Vec<Option<Entry>>,
}

impl Ledger {
    pub(super) fn new(total: Amount) -> Self {
        Self { total, entries: Vec::new() }
    }

    pub(super) fn total(&self) -> Amount {
        self.total
    }

    /// From now on there is this much. What is held beyond it stays held; beyond minimums, nothing
    /// more is granted until enough has come back.
    pub(super) fn set_total(&mut self, total: Amount) {
        self.total = total;
    }

    /// What all drawers hold.
    pub(super) fn held(&self) -> Amount {
        self.present().map(|entry| entry.held).sum()
    }

    /// What this drawer holds.
    pub(super) fn held_by(&self, drawer: Drawer) -> Amount {
        self.entry(drawer).map_or(Amount::ZERO, |entry| entry.held)
    }

    /// What is kept for somebody: the drawers' minimums.
    fn kept(&self) -> Amount {
        self.present().map(|entry| entry.terms.minimum).sum()
    }

    /// What a drawer with this minimum gets of it although others hold more than there is, because
    /// they overdrew or the total was lowered: all of it, unless the total is below what is kept.
    fn promised(&self, minimum: Amount) -> Amount {
        if self.kept().fits(self.total) { minimum } else { Amount::ZERO }
    }

    /// What nobody else can have: each drawer's minimum, or what it holds if that is more.
    fn committed(&self) -> Amount {
        self.present().map(|entry| entry.held.max(entry.terms.minimum)).sum()
    }

    pub(super) fn join(&mut self, terms: Terms) -> Result<Drawer, BudgetError> {
        let Terms { minimum, maximum, .. } = terms;
        if !minimum.fits(maximum) || maximum.bytes == 0 || maximum.regions == 0 {
            return Err(BudgetError::Terms { terms });
        }
        let free = self.total - self.committed();
        if !minimum.fits(free) {
            return Err(BudgetError::Kept { minimum, free });
        }
        let entry = Some(Entry { terms, held: Amount::ZERO });
        let vacant = self.entries.iter().position(Option::is_none);
        let number = vacant.unwrap_or(self.entries.len());
        match self.entries.get_mut(number) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        Ok(Drawer(number))
    }

    /// The drawer is gone, and with it what it held.
    pub(super) fn leave(&mut self, drawer: Drawer) {
        if let Some(place) = self.entries.get_mut(drawer.0) {
            *place = None;
        }
    }

    pub(super) fn take(&mut self, drawer: Drawer, amount: Amount) -> Result<(), Refusal> {
        let Some(entry) = self.entry(drawer) else {
            return Err(refusal(amount, Amount::ZERO, Amount::ZERO));
        };
        let (before, Terms { minimum, maximum, .. }) = (entry.held, entry.terms);
        let after = before + amount;
        let others = self.committed() - before.max(minimum);
        let now = maximum.min((self.total - others).max(self.promised(minimum)));
        if !after.fits(now) {
            let ever = maximum.min(self.total - (self.kept() - minimum));
            return Err(refusal(amount, now - before, ever));
        }
        self.set_held(drawer, after);
        Ok(())
    }

    pub(super) fn overdraw(&mut self, drawer: Drawer, amount: Amount) {
        self.set_held(drawer, self.held_by(drawer) + amount);
    }

    /// Takes back what the drawer holds, `amount` of it at most: whoever gives back what it never took
    /// harms its own account, not the others'.
    pub(super) fn give(&mut self, drawer: Drawer, amount: Amount) {
        self.set_held(drawer, self.held_by(drawer) - amount);
    }

    /// What is due to this drawer if there is `total` in all: its minimum and its part of the rest.
    fn due(&self, drawer: Drawer, total: Amount) -> Amount {
        let Some(entry) = self.entry(drawer) else { return Amount::ZERO };
        let weights: u64 = self.present().map(|entry| u64::from(entry.terms.weight)).sum();
        let Terms { minimum, maximum, weight } = entry.terms;
        let common = total - self.kept();
        let part = |of: usize| part_of(of, weight, weights);
        let part = Amount { bytes: part(common.bytes), regions: part(common.regions) };
        (minimum + part).min(maximum)
    }

    /// Who has to give how much back, so that `drawer`, asking for `missing`, gets its due of
    /// `total`: those who hold most beyond their own due first. Nobody, if it asks for more than
    /// that.
    pub(super) fn debtors(
        &self,
        drawer: Drawer,
        missing: Amount,
        total: Amount,
    ) -> Vec<(Drawer, Amount)> {
        let mine = self.held_by(drawer) + missing;
        if !mine.fits(self.due(drawer, total)) {
            return Vec::new();
        }
        let mut debts: Vec<(Drawer, Amount)> = (0..self.entries.len())
            .map(Drawer)
            .filter(|&other| other != drawer)
            .map(|other| (other, (self.held_by(other) - self.due(other, total)).min(missing)))
            .filter(|&(_, debt)| debt != Amount::ZERO)
            .collect();
        debts.sort_by_key(|&(_, debt)| std::cmp::Reverse((debt.bytes, debt.regions)));
        debts
    }

    fn present(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().flatten()
    }

    fn entry(&self, drawer: Drawer) -> Option<&Entry> {
        self.entries.get(drawer.0)?.as_ref()
    }

    fn set_held(&mut self, drawer: Drawer, held: Amount) {
        if let Some(Some(entry)) = self.entries.get_mut(drawer.0) {
            entry.held = held;
        }
    }
}

/// `weight` of `weights` parts of `whole`, rounded down; nothing where nothing weighs.
fn part_of(whole: usize, weight: u32, weights: u64) -> usize {
    let parts = whole as u128 * u128::from(weight);
    // Lossless: no more than `whole`.
    usize::try_from(parts.checked_div(u128::from(weights)).unwrap_or(0)).unwrap_or(whole)
}

/// `wanted` is more than is `free` now, of what can be had `ever`, others giving back all they may.
fn refusal(wanted: Amount, free: Amount, ever: Amount) -> Refusal {
    let (missing, held) = (wanted - free, ever - free);
    let exhausted = if missing.bytes > 0 {
        let (wanted, held, allowed) = (wanted.bytes, held.bytes, ever.bytes);
        Exhausted { limit: Limit::SharedBytes, allowed, held, wanted }
    } else {
        let (wanted, held, allowed) = (wanted.regions, held.regions, ever.regions);
        Exhausted { limit: Limit::SharedRegions, allowed, held, wanted }
    };
    Refusal { exhausted, missing }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOTAL: Amount = Amount { bytes: 100, regions: 100 };

    fn amount(bytes: usize) -> Amount {
        Amount { bytes, regions: bytes }
    }

    fn terms(minimum: usize, maximum: usize, weight: u32) -> Terms {
        Terms { minimum: amount(minimum), maximum: amount(maximum), weight }
    }

    #[test]
    fn a_minimum_is_there_whatever_others_take() {
        let mut ledger = Ledger::new(TOTAL);
        let quiet = ledger.join(terms(30, 100, 1)).unwrap();
        let greedy = ledger.join(Terms::default()).unwrap();
        ledger.take(greedy, amount(70)).unwrap();
        let refused = ledger.take(greedy, amount(1)).unwrap_err();
        assert_eq!(refused.missing, amount(1));
        assert_eq!((refused.exhausted.allowed, refused.exhausted.held), (70, 70));
        ledger.take(quiet, amount(30)).unwrap();
        assert!(ledger.take(quiet, amount(1)).is_err());
    }

    #[test]
    fn what_is_borrowed_is_owed_to_those_below_their_due() {
        let mut ledger = Ledger::new(TOTAL);
        let heavy = ledger.join(terms(0, 100, 3)).unwrap();
        let light = ledger.join(terms(0, 100, 1)).unwrap();
        ledger.take(light, amount(100)).unwrap();
        let missing = ledger.take(heavy, amount(10)).unwrap_err().missing;
        assert_eq!(ledger.debtors(heavy, missing, TOTAL), [(light, amount(10))]);
        // 25 of 100 are due to the lighter one: nobody can make it go below.
        assert_eq!(ledger.debtors(heavy, amount(75), TOTAL), [(light, amount(75))]);
        assert_eq!(ledger.debtors(heavy, amount(76), TOTAL), []);
        ledger.give(light, amount(75));
        ledger.take(heavy, amount(75)).unwrap();
        assert_eq!(ledger.debtors(heavy, amount(1), TOTAL), []);
    }

    #[test]
    fn terms_that_cannot_be_kept_are_refused() {
        let mut ledger = Ledger::new(TOTAL);
        for impossible in [terms(2, 1, 1), terms(0, 0, 1), terms(101, 200, 1)] {
            assert!(ledger.join(impossible).is_err(), "{impossible:?}");
        }
        let first = ledger.join(terms(60, 100, 1)).unwrap();
        assert!(matches!(ledger.join(terms(41, 100, 1)), Err(BudgetError::Kept { .. })));
        ledger.take(first, amount(90)).unwrap();
        assert!(ledger.join(terms(11, 100, 1)).is_err(), "a minimum that others hold already");
        ledger.leave(first);
        assert_eq!(ledger.join(terms(100, 100, 1)), Ok(first), "places are used again");
    }

    #[test]
    fn a_lowered_total_grants_nothing_until_it_is_met() {
        let mut ledger = Ledger::new(TOTAL);
        let only = ledger.join(Terms::default()).unwrap();
        ledger.take(only, amount(80)).unwrap();
        ledger.set_total(amount(50));
        let refused = ledger.take(only, amount(10)).unwrap_err();
        assert_eq!((refused.missing, refused.exhausted.allowed), (amount(10), 50));
        ledger.give(only, amount(40));
        ledger.take(only, amount(10)).unwrap();
        assert_eq!(ledger.held(), amount(50));
    }

    #[test]
    fn an_overdraft_is_counted_and_comes_back() {
        let mut ledger = Ledger::new(TOTAL);
        let only = ledger.join(Terms::default()).unwrap();
        ledger.overdraw(only, amount(120));
        assert!(ledger.take(only, amount(1)).is_err());
        ledger.give(only, amount(120));
        assert_eq!(ledger.held(), Amount::ZERO);
    }

    #[test]
    fn an_overdraft_takes_nothing_from_anothers_minimum() {
        let mut ledger = Ledger::new(TOTAL);
        let quiet = ledger.join(terms(30, 100, 1)).unwrap();
        let greedy = ledger.join(Terms::default()).unwrap();
        ledger.take(greedy, amount(70)).unwrap();
        ledger.overdraw(greedy, amount(50));
        ledger.take(quiet, amount(30)).unwrap();
        assert!(ledger.take(quiet, amount(1)).is_err());
        ledger.give(quiet, amount(30));
        ledger.set_total(amount(29));
        assert!(ledger.take(quiet, amount(1)).is_err(), "what is kept is not there any more");
    }

    #[test]
    fn absurd_figures_do_no_harm() {
        let mut ledger = Ledger::new(Amount::EVERYTHING);
        let most = Terms { minimum: Amount::ZERO, maximum: Amount::EVERYTHING, weight: u32::MAX };
        let (one, other) = (ledger.join(most).unwrap(), ledger.join(most).unwrap());
        ledger.take(one, Amount::EVERYTHING).unwrap();
        assert!(ledger.take(other, amount(1)).is_err());
        assert_eq!(ledger.due(one, Amount::EVERYTHING).bytes, usize::MAX / 2);
        let weightless = ledger.join(terms(0, 5, 0)).unwrap();
        assert_eq!(ledger.due(weightless, TOTAL), Amount::ZERO);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(usize, usize, usize),
        Give(usize, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..4_usize, 0..60_usize, 0..9_usize).prop_map(|(d, b, r)| Step::Take(d, b, r)),
            (0..4_usize, any::<usize>()).prop_map(|(d, which)| Step::Give(d, which)),
        ]
    }

    proptest! {
        /// Beside a ledger that keeps every grant by itself and asks the definition of each.
        #[test]
        fn grants_exactly_what_the_definition_says(
            minimums in prop::collection::vec((0..20_usize, 0..40_usize), 4),
            steps in prop::collection::vec(step(), 1..80),
        ) {
            let mut ledger = Ledger::new(TOTAL);
            let terms: Vec<Terms> =
                minimums.iter().map(|&(least, more)| terms(least, least + more + 1, 1)).collect();
            let drawers: Vec<Drawer> = terms.iter().map(|&t| ledger.join(t).unwrap()).collect();
            let mut grants: Vec<Vec<Amount>> = vec![Vec::new(); 4];
            let held = |grants: &Vec<Vec<Amount>>, of: usize| grants[of].iter().copied().sum::<Amount>();
            for step in steps {
                match step {
                    Step::Take(of, bytes, regions) => {
                        let wanted = Amount { bytes, regions };
                        let after = held(&grants, of) + wanted;
                        let others: Amount = (0..4).filter(|&other| other != of)
                            .map(|other| held(&grants, other).max(terms[other].minimum)).sum();
                        let right = after.fits(terms[of].maximum) && (others + after).fits(TOTAL);
                        let granted = ledger.take(drawers[of], wanted);
                        prop_assert_eq!(granted.is_ok(), right);
                        match granted {
                            Ok(()) => grants[of].push(wanted),
                            Err(refusal) => prop_assert_ne!(refusal.missing, Amount::ZERO),
                        }
                    }
                    Step::Give(of, which) => {
                        if !grants[of].is_empty() {
                            let which = which % grants[of].len();
                            ledger.give(drawers[of], grants[of].swap_remove(which));
                        }
                    }
                }
                for (of, &drawer) in drawers.iter().enumerate() {
                    prop_assert_eq!(ledger.held_by(drawer), held(&grants, of));
                }
                prop_assert!(ledger.committed().fits(TOTAL));
            }
        }

        /// Whoever asks within its due finds debtors that owe all of it, unless it is free.
        #[test]
        fn whoever_is_within_its_due_can_have_it(
            weights in prop::collection::vec(1..9_u32, 3),
            takes in prop::collection::vec((0..3_usize, 1..40_usize), 0..20),
            asks in 0..3_usize,
        ) {
            let mut ledger = Ledger::new(TOTAL);
            let drawers: Vec<Drawer> =
                weights.iter().map(|&weight| ledger.join(terms(5, 100, weight)).unwrap()).collect();
            for (of, bytes) in takes {
                let _refused = ledger.take(drawers[of], amount(bytes));
            }
            let asker = drawers[asks];
            let wanted = ledger.due(asker, TOTAL) - ledger.held_by(asker);
            if let Err(Refusal { missing, .. }) = ledger.take(asker, wanted) {
                for (debtor, debt) in ledger.debtors(asker, missing, TOTAL) {
                    ledger.give(debtor, debt);
                }
                prop_assert!(ledger.take(asker, wanted).is_ok());
            }
        }
    }
}
