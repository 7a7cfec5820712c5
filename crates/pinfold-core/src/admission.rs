//! Whether a range has been used often enough to be kept: ski rental, with what things cost here.
//!
//! To register a range for one use and deregister it behind the use is to *rent*; to watch it, keep its
//! registration, and have its next change cost the thread that makes it more, is to *buy*. How often
//! a range will be used before it changes is not known. So it is rented until what was paid for that,
//! beyond what the same uses would have cost as hits, would exceed the price of buying; then it is
//! bought. This is the deterministic algorithm for [ski rental][1], and it is 2-competitive.
//!
//! [1]: https://en.wikipedia.org/wiki/Ski_rental_problem
//!
//! # Why it never costs more than twice the best decision
//!
//! Let a use cost `r` if it is rented and `h` if it is a hit, and let buying cost `b` beside the hit, with
//! `r > h`; else nothing is ever bought. Changes of memory that was not bought are not seen, so what
//! was paid is remembered across them. Cut a range's uses behind each change that ended what was
//! bought. In one such part, let there be `K` uses, of which the first `n` were rented.
//!
//! - It costs at most `n r + b + (K - n) h = n (r - h) + b + K h`, and the decision sees to
//!   `n (r - h) <= b`: at most `2 b + K h`.
//! - The best decision in hindsight may differ for each of the lives (from one change to the next)
//!   in this part, with `k` uses each. It pays `min(k r, b + k h) = k h + min(k (r - h), b)` for each
//!   life. The sum of minima is at least the minimum of sums: `K h + min(K (r - h), b)`. If the range
//!   was bought in this part, `(n + 1) (r - h) > b` and `K > n`, so that is `b + K h` at least: half
//!   of the above, or more.
//! - If it was not bought, `K (r - h) <= b`, and the best decision pays `K r`, too.
//!
//! # Bounded memory
//!
//! What was paid is remembered for `SETS` times `WAYS` ranges, by the method of Misra and Gries
//! for frequent elements: a newcomer to a full set takes as much from each of the others as it
//! brings, or as the poorest has. So the bound above holds for ranges of which no more share a set; of
//! more, each whose part in what is paid for the set's ranges is more than one in `WAYS + 1` is bought
//! in the end, and the others are rented.

use crate::AddressRange;

/// Ranges that share a set.
const WAYS: usize = 8;
/// A power of two.
const SETS: usize = 256;

/// What this machine takes for a range, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UseCosts {
    /// Registering for one use and deregistering behind it.
    pub per_use: u64,
    /// A use of what is kept.
    pub hit: u64,
    /// Watching, registering, deregistering when it changes, and what that change costs more.
    pub keeping: u64,
}

/// What to do for a use of a range that is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Register for this use.
    RegisterPerUse,
    /// Watch the range and keep its registration.
    Keep,
}

/// Remembers what ranges have cost that were registered for each use. 50 KiB, allocated when it is
/// made.
#[derive(Debug)]
pub struct Admission {
    sets: Box<[[Account; WAYS]]>,
}

/// What uses of one range have cost beyond hits.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// `None` if nobody has it.
    range: Option<AddressRange>,
    paid: u64,
}

impl Admission {
    /// Of ranges that were never used.
    pub fn new() -> Self {
        Self { sets: vec![[Account::FREE; WAYS]; SETS].into() }
    }

    /// What to do for a use of `range`, which is not kept now. Some ten nanoseconds, whatever was
    /// used before.
    ///
    /// With [`Verdict::Keep`], what was paid is forgotten: after the next change it begins anew.
    pub fn decide(&mut self, range: AddressRange, costs: UseCosts) -> Verdict {
        let lost = costs.per_use.saturating_sub(costs.hit);
        if lost == 0 {
            return Verdict::RegisterPerUse;
        }
        let Some(set) = self.sets.get_mut(set_of(range)) else { return Verdict::RegisterPerUse };
        let own = set.iter_mut().find(|account| account.range == Some(range));
        let paid = own.as_ref().map_or(0, |account| account.paid).saturating_add(lost);
        if paid > costs.keeping {
            own.into_iter().for_each(|account| *account = Account::FREE);
            return Verdict::Keep;
        }
        match own {
            Some(account) => account.paid = paid,
            None => open_account(set, range, lost),
        }
        Verdict::RegisterPerUse
    }
}

impl Default for Admission {
    fn default() -> Self {
        Self::new()
    }
}

impl Account {
    const FREE: Self = Self { range: None, paid: 0 };
}

/// Remembers what was paid for a newcomer, as far as there is room.
fn open_account(set: &mut [Account; WAYS], range: AddressRange, mut paid: u64) {
    if set.iter().all(|account| account.range.is_some()) {
        let poorest = set.iter().map(|account| account.paid).min().unwrap_or(0);
        let taken = poorest.min(paid);
        for account in set.iter_mut() {
            account.paid -= taken;
            if account.paid == 0 {
                *account = Account::FREE;
            }
        }
        paid -= taken;
    }
    let free = set.iter_mut().find(|account| account.range.is_none());
    if let Some(account) = free.filter(|_| paid > 0) {
        *account = Account { range: Some(range), paid };
    }
}

/// Spreads pages and lengths over the sets, by the golden ratio.
fn set_of(range: AddressRange) -> usize {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let words = (range.start() >> 12) as u64 ^ (range.len() as u64).rotate_left(32);
    let mixed = words.wrapping_mul(GOLDEN) >> (u64::BITS - SETS.trailing_zeros());
    usize::try_from(mixed).unwrap_or(0)
}

/// A cost that is learnt while running: a moving average that no single outlier moves far, such as a
/// registration in the middle of which the thread lost its processor.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct LearnedCost {
    /// In sixteenths of a nanosecond; 0 if nothing was measured.
    average: u64,
}

impl LearnedCost {
    /// The part of a new figure in the average: one in so many.
    const INERTIA: u64 = 8;
    /// A figure counts for at most so many times the average.
    const MOST: u64 = 4;
    const FRACTIONS: u64 = 16;

    /// Something took `nanoseconds`.
    pub fn observe(&mut self, nanoseconds: u64) {
        let figure = nanoseconds.saturating_mul(Self::FRACTIONS).max(1);
        self.average = match self.average {
            0 => figure,
            average => {
                let figure = figure.min(average.saturating_mul(Self::MOST));
                average - average / Self::INERTIA + figure / Self::INERTIA
            }
        };
    }

    /// What it takes; `None` if it was never measured.
    pub const fn nanoseconds(&self) -> Option<u64> {
        match self.average {
            0 => None,
            average => Some(average.div_ceil(Self::FRACTIONS)),
        }
    }
}

/// Not in the interpreter: arithmetic alone, which it takes hours for.
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(number: usize) -> AddressRange {
        AddressRange::new((number + 1) << 12, 4096).unwrap()
    }

    /// One step of a program.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Use(usize),
        Change(usize),
    }

    /// What a range has cost so far.
    #[derive(Clone, Default)]
    struct Bill {
        kept: bool,
        /// By the decisions that were made.
        ours: u64,
        /// By the best decision for each life that is over.
        best: u64,
        uses_in_this_life: u64,
    }

    impl Bill {
        fn best_with_this_life(&self, costs: UseCosts) -> u64 {
            let uses = self.uses_in_this_life;
            let bought = if uses == 0 { 0 } else { costs.keeping + uses * costs.hit };
            self.best + bought.min(uses * costs.per_use)
        }
    }

    /// Follows a program and gives the bill of each range.
    fn follow(steps: &[Step], ranges: usize, costs: UseCosts) -> Vec<Bill> {
        let (mut admission, mut bills) = (Admission::new(), vec![Bill::default(); ranges]);
        for &step in steps {
            match step {
                Step::Use(number) => {
                    let bill = &mut bills[number];
                    bill.uses_in_this_life += 1;
                    if bill.kept {
                        bill.ours += costs.hit;
                        continue;
                    }
                    bill.kept = admission.decide(page(number), costs) == Verdict::Keep;
                    bill.ours += if bill.kept { costs.keeping + costs.hit } else { costs.per_use };
                }
                Step::Change(number) => {
                    let bill = &mut bills[number];
                    bill.best = bill.best_with_this_life(costs);
                    (bill.kept, bill.uses_in_this_life) = (false, 0);
                }
            }
        }
        bills
    }

    fn ratio(bill: &Bill, costs: UseCosts) -> f64 {
        bill.ours as f64 / bill.best_with_this_life(costs) as f64
    }

    /// Few enough that no nine of them share a set; asserted below.
    const RANGES: usize = 64;

    fn any_costs() -> impl Strategy<Value = UseCosts> {
        (1..100_000_u64, 1..2_000_u64, 0..1_000_000_u64)
            .prop_map(|(per_use, hit, keeping)| UseCosts { per_use, hit, keeping })
    }

    fn any_steps() -> impl Strategy<Value = Vec<Step>> {
        // Few ranges are used often, the others now and then; some changes are frequent.
        let number = prop_oneof![3 => 0..4_usize, 1 => 0..RANGES];
        let step = (number, 0..100_u32, 0..3_u32).prop_map(|(number, dice, calm)| {
            let changes = [30, 5, 1][calm as usize];
            if dice < changes { Step::Change(number) } else { Step::Use(number) }
        });
        prop::collection::vec(step, 0..2_000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn never_more_than_twice_the_best_decision(steps in any_steps(), costs in any_costs()) {
            for bill in follow(&steps, RANGES, costs) {
                let best = bill.best_with_this_life(costs);
                // Where a hit costs more than renting, nothing is bought, and that is best.
                prop_assert!(bill.ours <= 2 * best, "{} of {best} with {costs:?}", bill.ours);
            }
        }

        #[test]
        fn what_is_used_once_in_each_life_costs_what_renting_costs_or_twice(
            lives in 1..500_usize,
            costs in any_costs(),
        ) {
            let steps: Vec<_> =
                (0..lives).flat_map(|_| [Step::Use(0), Step::Change(0)]).collect();
            let bill = &follow(&steps, 1, costs)[0];
            prop_assert!(ratio(bill, costs) <= 2.0);
        }
    }

    #[test]
    fn the_ranges_of_these_tests_fit() {
        let mut in_set = [0; SETS];
        (0..RANGES).for_each(|number| in_set[set_of(page(number))] += 1);
        assert!(in_set.iter().all(|&count| count <= WAYS));
    }

    /// The bound is reached, so a test against it can fail.
    #[test]
    fn a_change_right_behind_the_purchase_costs_twice_the_best() {
        let costs = UseCosts { per_use: 1_100, hit: 100, keeping: 50_000 };
        let mut steps = vec![Step::Use(0); 51];
        steps.push(Step::Change(0));
        let ratio = ratio(&follow(&steps, 1, costs)[0], costs);
        assert!((1.8..=2.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_range_that_is_used_on_and_on_is_kept() {
        let costs = UseCosts { per_use: 2_000, hit: 300, keeping: 30_000 };
        let bill = &follow(&[Step::Use(0); 10_000], 1, costs)[0];
        assert!(bill.kept && ratio(bill, costs) < 1.02, "{}", ratio(bill, costs));
    }

    #[test]
    fn what_is_cheaper_than_a_hit_is_never_kept() {
        let costs = UseCosts { per_use: 200, hit: 300, keeping: 0 };
        assert!(!follow(&[Step::Use(0); 1_000], 1, costs)[0].kept);
    }

    /// More ranges than there is room for, each used once, and one that is used each third time.
    #[test]
    fn a_flood_of_ranges_used_once_does_not_hide_one_that_is_used_often() {
        let costs = UseCosts { per_use: 2_000, hit: 300, keeping: 30_000 };
        let mut admission = Admission::new();
        let often = page(0);
        let kept = (1..100_000_usize).any(|number| {
            let used_once = (set_of(page(number)) == set_of(often)).then(|| page(number));
            let others =
                used_once.is_some_and(|range| admission.decide(range, costs) == Verdict::Keep);
            assert!(!others, "used once");
            number % (3 * SETS) == 0 && admission.decide(often, costs) == Verdict::Keep
        });
        assert!(kept);
    }

    #[test]
    fn an_outlier_moves_what_was_learnt_a_little() {
        let mut cost = LearnedCost::default();
        assert_eq!(cost.nanoseconds(), None);
        (0..100).for_each(|_| cost.observe(1_000));
        assert_eq!(cost.nanoseconds(), Some(1_000));
        cost.observe(1_000_000_000);
        assert!(cost.nanoseconds().is_some_and(|cost| cost <= 1_400), "{cost:?}");
        (0..100).for_each(|_| cost.observe(5_000));
        assert!(cost.nanoseconds().is_some_and(|cost| (4_900..=5_000).contains(&cost)), "{cost:?}");
    }
}
