//! Whether a range has been used often enough to be kept: ski rental, with what things cost here.
//!
//! To register a range for one use and deregister it behind the use is to *rent*; to watch it, keep its
//! registration, and have its next change cost the thread that makes it more, is to *buy*. How often
//! a range will be used before it changes is not known. So it is rented until what was paid for that,
//! beyond what the same uses would have cost as hits, exceeds the price of buying; then it is
//! bought. This is the deterministic algorithm for [ski rental][1], and it is 2-competitive.
//!
//! [1]: https://en.wikipedia.org/wiki/Ski_rental_problem
//!
//! Two things are added, because most programs are no adversaries:
//!
//! - What costs hardly more to keep than to rent once (by an eighth at most) is kept from the first use.
//! - A purchase that spared less than its price, by the use for which it was made and the hits behind it, was made
//!   *in vain*: then rents of twice the price are paid before the same range is bought again, and so on up to
//!   `MOST_PATIENCE` doublings. A purchase that paid ends that.
//!
//! # What it costs at most
//!
//! Let a use cost `r` if it is rented and `h` if it is a hit, and let buying cost `b` besides the hit, with
//! `r > h`; else nothing is ever bought. Changes of memory that was not bought are not seen, so what
//! was paid is remembered across them. Cut a range's uses behind each change that ended what was
//! bought. In one such part, let there be `K` uses, of which the first `n` were rented, and let `p` be the
//! doublings then.
//!
//! - It costs at most `n r + b + (K - n) h = n (r - h) + b + K h`, and the decision sees to
//!   `n (r - h) <= 2^p b`: at most `(2^p + 1) b + K h`.
//! - **Beside renting each time**, which costs `K (r - h) + K h`: the part was bought, so `K > n` and
//!   `(n + 1) (r - h) > 2^p b`. It costs less than twice that, and with `p` doublings at most
//!   `1 + 2^-p` times. What is kept from the first use costs at most 9/8.
//! - **Beside the best decision in hindsight**, which may differ for each of the lives (from one change to
//!   the next) in this part, with `k` uses each: it pays `min(k r, b + k h) = k h + min(k (r - h), b)` for
//!   each life. The sum of minima is at least the minimum of sums: `K h + min(K (r - h), b)`, and that is
//!   `b + K h` at least if the range was bought. So with `p` doublings this costs at most `2^p + 1` times
//!   the best: twice, unless the purchase before was in vain.
//! - If it was not bought in this part, `K (r - h) <= 2^p b`, and the same bound holds.
//!
//! Without doublings a program that changes memory right behind each purchase would pay twice what renting
//! costs for ever, and nothing that is known at the purchase tells it from another. The doublings halve
//! that loss with each purchase in vain; the price is the bound of `2^p + 1` where purchases that would pay follow
//! on such that did not. For lives that are all alike, the sum stays near twice the best: the tests have it.
//!
//! # Bounded memory
//!
//! What was paid is remembered for `SETS` times `WAYS` ranges, by the method of Misra and Gries
//! for frequent elements: a newcomer to a full set takes as much from each of the others as it
//! brings, or as the poorest has. So the bounds above hold for ranges of which no more share a set; of
//! more, each whose part in what is paid for the set's ranges is more than one in `WAYS + 1` is bought
//! in the end, and the others are rented.

use crate::AddressRange;
use crate::chunked::Chunked;

/// Ranges that share a set.
const WAYS: usize = 8;
/// A power of two.
const SETS: usize = 256;
/// So often is the price doubled that is paid in rents before the next purchase.
const MOST_PATIENCE: u8 = 3;
/// What keeping may cost beyond renting for a range to be kept from its first use: one part in so many.
const HARMLESS: u64 = 8;

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

impl UseCosts {
    /// What a rented use costs beyond a hit.
    const fn rent(self) -> u64 {
        self.per_use.saturating_sub(self.hit)
    }

    /// Whether keeping costs hardly more than renting once.
    const fn is_keeping_harmless(self) -> bool {
        let surcharge = self.keeping.saturating_sub(self.rent());
        surcharge <= self.per_use / HARMLESS
    }
}

/// What to do for a use of a range that is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Register for this use.
    RegisterPerUse,
    /// Watch the range and keep its registration.
    Keep,
}

/// Remembers what ranges have cost that were registered for each use. 96 KiB, allocated with the first
/// range.
#[derive(Default, Debug)]
pub struct Admission {
    sets: Chunked<[Account; WAYS]>,
}

/// What uses of one range have cost beyond hits.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// `None` if it is free.
    range: Option<AddressRange>,
    paid: u64,
    /// While the range is kept.
    bought: Option<Purchase>,
    /// How many purchases in a row were in vain, at most `MOST_PATIENCE`.
    patience: u8,
}

/// What keeping a range cost, and what each hit spares since.
#[derive(Clone, Copy, Debug)]
struct Purchase {
    price: u64,
    rent: u64,
    /// The hits of all ranges when it was bought.
    hits_before: u64,
}

impl Admission {
    /// Of ranges that were never used.
    pub const fn new() -> Self {
        Self { sets: Chunked::new() }
    }

    /// What to do for a use of `range`, which is not kept now. Some ten nanoseconds, whatever was
    /// used before.
    ///
    /// `hits` is how many uses found their range kept so far, whichever it was: it is asked for with
    /// [`Verdict::Keep`] alone. After that verdict, [`end`](Self::end) is to be called when the range is
    /// not kept any more.
    pub fn decide(
        &mut self,
        range: AddressRange,
        costs: UseCosts,
        hits: impl FnOnce() -> u64,
    ) -> Verdict {
        let rent = costs.rent();
        if rent == 0 {
            return Verdict::RegisterPerUse;
        }
        if costs.is_keeping_harmless() {
            return Verdict::Keep;
        }
        let set = self.sets.made(set_of(range), || [Account::FREE; WAYS]);
        let own = set.iter_mut().find(|account| account.range == Some(range));
        let mut account = own.as_deref().copied().unwrap_or(Account::of(range));
        account.paid = account.paid.saturating_add(rent);
        let keep = account.paid > costs.keeping.saturating_mul(1 << account.patience);
        let price = costs.keeping;
        account.bought = keep.then(|| Purchase { price, rent, hits_before: hits() });
        match own {
            Some(own) => *own = account,
            None => open_account(set, account),
        }
        if keep { Verdict::Keep } else { Verdict::RegisterPerUse }
    }

    /// `range` is not kept any more, after `hits` uses in all found their range kept. What was
    /// paid is forgotten, and it is noted whether keeping it was in vain.
    ///
    /// Hits of other ranges meanwhile count as its own, so what was in vain may not be noticed; then the
    /// price is not doubled. Nothing happens, and `hits` is not asked for, for a range that was kept without a
    /// verdict.
    pub fn end(&mut self, range: AddressRange, hits: impl FnOnce() -> u64) {
        let Some(set) = self.sets.get_mut(set_of(range)) else { return };
        let Some(account) = set.iter_mut().find(|account| account.range == Some(range)) else {
            return;
        };
        let Some(bought) = account.bought.take() else { return };
        // The use for which it was bought would have been rented, too.
        let uses = hits().saturating_sub(bought.hits_before).saturating_add(1);
        let saved = uses.saturating_mul(bought.rent);
        let patience = (account.patience + 1).min(MOST_PATIENCE);
        account.patience = if saved < bought.price { patience } else { 0 };
        account.paid = 0;
    }
}

impl Account {
    const FREE: Self = Self { range: None, paid: 0, bought: None, patience: 0 };

    const fn of(range: AddressRange) -> Self {
        Self { range: Some(range), ..Self::FREE }
    }
}

/// Remembers what was paid for a newcomer, as far as there is room.
fn open_account(set: &mut [Account; WAYS], mut newcomer: Account) {
    if set.iter().all(|account| account.range.is_some()) {
        let poorest = set.iter().map(|account| account.paid).min().unwrap_or(0);
        let taken = poorest.min(newcomer.paid);
        for account in set.iter_mut() {
            account.paid -= taken;
            if account.paid == 0 {
                *account = Account::FREE;
            }
        }
        newcomer.paid -= taken;
    }
    let free = set.iter_mut().find(|account| account.range.is_none());
    if let Some(account) = free.filter(|_| newcomer.paid > 0) {
        *account = newcomer;
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

/// What registering, watching and asking take here, learnt while running.
#[derive(Default, Debug)]
pub(crate) struct LearnedCosts {
    /// By the logarithm of the length.
    register: [LearnedCost; LENGTHS],
    deregister: [LearnedCost; LENGTHS],
    watch: LearnedCost,
    check: LearnedCost,
}

/// Lengths of 2^8 to 2^39 bytes are told apart.
const LENGTHS: usize = 32;

impl LearnedCosts {
    pub(crate) fn registered(&mut self, range: AddressRange, nanoseconds: u64) {
        self.register[length_class(range)].observe(nanoseconds);
    }

    pub(crate) fn deregistered(&mut self, range: AddressRange, nanoseconds: u64) {
        self.deregister[length_class(range)].observe(nanoseconds);
    }

    pub(crate) fn watched(&mut self, nanoseconds: u64) {
        self.watch.observe(nanoseconds);
    }

    /// A monitor's check, which is most of what a hit takes.
    pub(crate) fn checked(&mut self, nanoseconds: u64) {
        self.check.observe(nanoseconds);
    }

    /// Whether something of that length was registered.
    pub(crate) fn knows(&self, range: AddressRange) -> bool {
        self.register[length_class(range)].nanoseconds().is_some()
    }

    /// What uses of `range` take, where a change of it takes `change` nanoseconds more if it is watched.
    /// `None` if nothing of such a length was registered yet.
    pub(crate) fn of(&self, range: AddressRange, change: u64) -> Option<UseCosts> {
        let class = length_class(range);
        let deregister = self.deregister[class].nanoseconds().unwrap_or(0);
        let per_use = self.register[class].nanoseconds()?.saturating_add(deregister);
        let hit = self.check.nanoseconds().unwrap_or(0);
        let surcharge = self.watch.nanoseconds().unwrap_or(0).saturating_add(change);
        Some(UseCosts { per_use, hit, keeping: per_use.saturating_add(surcharge) })
    }
}

fn length_class(range: AddressRange) -> usize {
    (range.len().ilog2().saturating_sub(8) as usize).min(LENGTHS - 1)
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
        /// By renting each time.
        rented: u64,
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
        // Of each range for itself, which only one range at a time can know of in a cache.
        let mut hits = vec![0; ranges];
        for &step in steps {
            match step {
                Step::Use(number) => {
                    let bill = &mut bills[number];
                    bill.uses_in_this_life += 1;
                    bill.rented += costs.per_use;
                    if bill.kept {
                        bill.ours += costs.hit;
                        hits[number] += 1;
                        continue;
                    }
                    let verdict = admission.decide(page(number), costs, || hits[number]);
                    bill.kept = verdict == Verdict::Keep;
                    bill.ours += if bill.kept { costs.keeping + costs.hit } else { costs.per_use };
                }
                Step::Change(number) => {
                    let bill = &mut bills[number];
                    if bill.kept {
                        admission.end(page(number), || hits[number]);
                    }
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

        /// One use more than fits the rents is the purchase itself.
        #[test]
        fn never_more_than_twice_what_renting_costs(steps in any_steps(), costs in any_costs()) {
            for bill in follow(&steps, RANGES, costs) {
                prop_assert!(bill.ours <= 2 * bill.rented, "{} {costs:?}", bill.ours);
            }
        }

        #[test]
        fn never_more_than_the_bound_beside_the_best_decision(
            steps in any_steps(),
            costs in any_costs(),
        ) {
            let bound = (1 << MOST_PATIENCE) + 1;
            for bill in follow(&steps, RANGES, costs) {
                let best = bill.best_with_this_life(costs);
                // Where a hit costs more than renting, nothing is bought, and that is best.
                prop_assert!(bill.ours <= bound * best, "{} of {best} with {costs:?}", bill.ours);
            }
        }

        #[test]
        fn the_first_purchase_costs_no_more_than_twice_the_best_decision(
            uses in 1..10_000_usize,
            costs in any_costs(),
        ) {
            let bill = &follow(&vec![Step::Use(0); uses], 1, costs)[0];
            prop_assert!(ratio(bill, costs) <= 2.0, "{}", ratio(bill, costs));
        }

        /// All lives have as many uses: at most twice the best, and the purchases from which that is learnt.
        #[test]
        fn lives_that_are_alike_cost_little_more_than_twice_the_best_decision(
            uses in 1..200_usize,
            costs in any_costs(),
        ) {
            let life = std::iter::repeat_n(Step::Use(0), uses).chain([Step::Change(0)]);
            let steps: Vec<_> = std::iter::repeat_n(life, 4_000 / uses).flatten().collect();
            let bill = &follow(&steps, 1, costs)[0];
            prop_assert!(ratio(bill, costs) <= 2.25, "{}", ratio(bill, costs));
        }

        /// Used so seldom in each life that keeping never pays.
        #[test]
        fn what_is_never_worth_keeping_costs_an_eighth_more_than_renting(
            uses in 1..8_usize,
            rent in 1_000..5_000_u64,
        ) {
            let costs = UseCosts { per_use: rent + 300, hit: 300, keeping: 10 * rent };
            let life = std::iter::repeat_n(Step::Use(0), uses).chain([Step::Change(0)]);
            let steps: Vec<_> = std::iter::repeat_n(life, 1_000).flatten().collect();
            let bill = &follow(&steps, 1, costs)[0];
            let more = bill.ours as f64 / bill.rented as f64;
            prop_assert!(more < 1.14, "{more}");
        }
    }

    /// Bought by the 54th use, which with the hits behind it spares more than it costs; without that use, less by one.
    #[test]
    fn the_use_for_which_it_is_bought_pays_for_it() {
        let costs = UseCosts { per_use: 6_981, hit: 1, keeping: 369_941 };
        let life = std::iter::repeat_n(Step::Use(0), 107).chain([Step::Change(0)]);
        let steps: Vec<_> = std::iter::repeat_n(life, 37).flatten().collect();
        let bill = &follow(&steps, 1, costs)[0];
        assert!(ratio(bill, costs) <= 2.0, "{}", ratio(bill, costs));
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
    fn the_price_is_doubled_for_what_was_bought_in_vain_until_a_purchase_pays() {
        let costs = UseCosts { per_use: 1_100, hit: 100, keeping: 10_000 };
        let mut admission = Admission::new();
        let mut bought_after = |hits| {
            let keeps =
                |admission: &mut Admission| admission.decide(page(0), costs, || 0) == Verdict::Keep;
            let uses = (1..).find(|_| keeps(&mut admission));
            admission.end(page(0), || hits);
            uses
        };
        assert_eq!([8, 8, 8, 8, 9, 0].map(&mut bought_after), [11, 21, 41, 81, 81, 11].map(Some));
    }

    #[test]
    fn what_costs_hardly_more_to_keep_is_kept_from_the_first_use() {
        let costs = UseCosts { per_use: 80_000, hit: 300, keeping: 88_000 };
        assert_eq!(Admission::new().decide(page(0), costs, || 0), Verdict::Keep);
        let dearer = UseCosts { keeping: 92_000, ..costs };
        assert_eq!(Admission::new().decide(page(0), dearer, || 0), Verdict::RegisterPerUse);
    }

    #[test]
    fn costs_are_known_of_the_lengths_that_were_registered() {
        let mut learned = LearnedCosts::default();
        assert_eq!(learned.of(page(0), 7), None);
        learned.registered(page(0), 2_000);
        learned.deregistered(page(0), 1_000);
        learned.watched(500);
        learned.checked(250);
        let expected = UseCosts { per_use: 3_000, hit: 250, keeping: 3_507 };
        assert_eq!(learned.of(page(1), 7), Some(expected));
        assert_eq!(learned.of(AddressRange::new(4096, 8192).unwrap(), 7), None);
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
            let mut keeps = |range| admission.decide(range, costs, || 0) == Verdict::Keep;
            assert!(!used_once.is_some_and(&mut keeps), "used once");
            number % (3 * SETS) == 0 && keeps(often)
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
