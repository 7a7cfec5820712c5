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
//! Some things are added, because most programs are no adversaries:
//!
//! - What costs hardly more to keep than to rent once (by an eighth at most) is kept from the first use, unless that was refused.
//! - A purchase that spared its price at least, by the use for which it was made and the hits behind it, *paid*: what
//!   it spared, up to twice its price, counts as paid then, so the same range is bought again at its next use, as long as
//!   each such purchase pays.
//! - One that spared less was made *in vain*: then rents are paid again, of twice the price if they were paid before that
//!   purchase as well, and so on up to `MOST_PATIENCE` doublings. A purchase that paid ends that.
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
//!   `n (r - h) <= 2^p b`: at most `(2^p + 1) b + K h`. If it was bought at its first use, `b + K h`, and it is
//!   one life.
//! - **Beside renting each time**, which costs `K (r - h) + K h`: a part whose purchase paid costs no more. One that was
//!   bought in vain costs at most `b` more. If rents were paid before, `K > n` and `(n + 1) (r - h) > 2^p b`, so that is
//!   less than twice as much, and with `p` doublings at most `1 + 2^-p` times. If it was bought at its first use, the
//!   part before it paid: to rent that one would have cost `b` and more, so both together cost at most twice as much.
//!   What is kept from the first use because that is harmless costs at most 9/8.
//! - **Beside the best decision in hindsight**, which may differ for each of the lives (from one change to
//!   the next) in this part, with `k` uses each: it pays `min(k r, b + k h) = k h + min(k (r - h), b)` for
//!   each life. The sum of minima is at least the minimum of sums: `K h + min(K (r - h), b)`, and that is
//!   `b + K h` at least if the part was bought and paid, or rents were paid before. So with `p` doublings this costs at
//!   most `2^p + 1` times the best: twice, unless the purchase before was in vain. Bought at its first use, it costs the
//!   best if it pays, and if not at most `b` more, which the part before it can bear: both together at most `2^p + 2`
//!   times.
//! - If it was not bought in this part, `K (r - h) <= 2^p b`, and the same bound holds.
//!
//! What costs less to keep than one use spares is kept from its first use; where it was refused, `b` stands for what a use spares.
//!
//! Nothing that is known at a purchase tells a program that changes memory right behind each from another, so what a
//! range's own lives were worth is asked. Without doublings the former would pay twice what renting costs for ever; they
//! halve that loss with each purchase in vain. Without purchases at the first use a program that uses each buffer often
//! enough, and then maps another there, would pay the rents of each life besides. The price is the bound of `2^p + 2`
//! where the lives of a range change from the one to the other again and again. Lives that are all alike cost what the best
//! costs if keeping pays well, near what renting costs if it does not, and at most some twice the best between; the tests
//! have it.
//!
//! **What a life was worth** is told by the hits of its own region, of which a thousand are counted: where one spares less than a
//! thousandth of the price, each purchase counts as in vain. A hit of fewer bytes than the use for which it was bought is worth as
//! much less, but no less than the cheapest registration is: without it those alone would have been rented.
//!
//! **Where the bounds do not hold.**
//!
//! - Costs are learnt, and change; the bounds are those of costs that stay, and that ranges of about one length have in common:
//!   where fresh memory is registered beside memory that was used, what its first pages cost is shared by both, and so is what a
//!   device takes to refuse the wider range around some of them. Also what is looked
//!   at behind a change of any memory counts as rent, though a hit behind one looks as well: where programs change memory before
//!   each use, keeping spares less than that.
//! - What a hit of a part spares is an estimate, by its bytes and by what the cheapest registration costs; and a hit of a caller
//!   that can do without cheaply (`get_if_worth`), or that only asks what is there (`get_if_cached`), spares less than it counts.
//! - Rights that do not contain each other are registrations of their own, paid for with the rents of the range. The one that was
//!   bought first is judged by its own hits, and no other: twice as much becomes once more for each.
//! - A request that is refused, and would have been kept, was in vain whatever others find there later in the same life. From
//!   then on its rights have an account of their own: they spend what their own uses cost and nothing that others paid, and pay for
//!   no others. The bounds hold for each of these accounts, as long as they have a place. What was paid together until then others
//!   pay once more.
//! - Where a caller that can do without could not have the wider range that the registrar names, and could have the bytes alone,
//!   these are bought alone until such parts have cost `PARTS` prices, and twice as many for each doubling. Then the wider range is
//!   paid for and tried again. If it is still refused, that adds a quarter at most to what the parts cost; if not, it came so much
//!   later.
//! - Where a range that cannot be watched takes many times as long to say so as ranges of its length take to be watched, each of its
//!   purchases costs more than was thought: what is learnt is the length's, and a figure counts as four times the average.
//! - Ranges that overlap are ranges of their own, and each pays its own price: uses of ever other parts of a buffer are rented
//!   longer than uses of the same.
//!
//! # Bounded memory
//!
//! What was paid is remembered for `SETS` times `WAYS` ranges. The bounds above hold for ranges of which no more share a set. In
//! a full set a newcomer challenges one of the others, at random: it takes the place, and what that one has paid, as often as its
//! own rent is a part of both ([RAP][2] does so with the poorest; at random, what is used no more does not stay for being rich).
//! So what is paid in a set buys something there in the end, and each range's uses have their part in it, however many share it:
//! where none changes, all are kept in the end. On average a purchase still follows rents of its price, where those of a set have
//! like prices: dear ranges that were rented, and are used no more, are in the way of cheap ones until these have paid as much.
//! What a range's purchases were worth is forgotten with its place. Rights that were refused need a place of their own, and so do
//! the bytes that were asked for besides the wider range around them. In a full set a refusal takes it without dice: from others that
//! were refused; where there are none, from any, so that many ranges whose refusals take no time, beside dear ones of the same set,
//! may keep these from being bought. The end of a region whose account is forgotten may be told to another account of its range.
//!
//! [2]: https://doi.org/10.1109/INFOCOM.2017.8057075

use crate::AddressRange;
use crate::chunked::Chunked;
use crate::region::{Terms, USE};

/// Ranges that share a set.
const WAYS: usize = 8;
/// A power of two.
const SETS: usize = 256;
/// So often is the price doubled that is paid in rents before the next purchase.
const MOST_PATIENCE: u8 = 3;
/// Parts of a range that could not be had as a whole may cost so many prices before that is tried again, and twice as many for
/// each doubling.
const PARTS: u64 = 8;
/// 2^64 by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// What keeping may cost beyond renting for a range to be kept from its first use: one part in so many.
const HARMLESS: u64 = 8;

/// What this machine takes for a range, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UseCosts {
    /// Registering for one use and deregistering behind it, with all that is done for that.
    pub per_use: u64,
    /// A use of what is kept.
    pub hit: u64,
    /// Watching, registering, deregistering when it changes, and what that change costs more.
    pub keeping: u64,
}

impl UseCosts {
    /// What a rented use costs beyond a hit.
    pub(crate) const fn rent(self) -> u64 {
        self.per_use.saturating_sub(self.hit)
    }

    /// What is paid before it is kept. That is a use at least: what costs less is kept from the first one, unless it was in vain, and
    /// then the doublings are to be of something.
    pub(crate) fn price(self) -> u64 {
        self.keeping.max(self.rent())
    }

    /// What a part of a range costs that is bought in its place: the same for every caller, and not nothing, or there would be no
    /// end.
    pub(crate) fn part_price(self) -> u64 {
        self.keeping.max(1)
    }

    /// Whether keeping costs hardly more than renting once, and a hit spares something.
    pub(crate) const fn is_keeping_harmless(self) -> bool {
        let surcharge = self.keeping.saturating_sub(self.rent());
        self.rent() > 0 && surcharge <= self.per_use / HARMLESS
    }
}

/// What to do for a use of a range that is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Register for this use, which counts as so much paid.
    Rent(u64),
    /// Watch the range and keep its registration, which costs hardly more than to register it for this use, or is a part of what
    /// was paid for and could not be had. Its end is not to be reported.
    Keep,
    /// The same, because it is bought already and what was paid for it since pays for other rights, too. That is to be
    /// [spent](Admission::spend) when it is had.
    Join,
    /// The same, paid for by what was rented. [`Admission::end`] is to be called when the range is not kept any more.
    Buy,
}

/// Remembers what ranges have cost that were registered for each use. 128 KiB at most, made as they are needed.
#[derive(Default, Debug)]
pub(crate) struct Admission {
    sets: Chunked<[Account; WAYS]>,
    /// How many newcomers found their set full: what their dice are made of.
    newcomers: u64,
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
    /// The purchase before paid: what it spared is what is paid.
    has_paid: bool,
    /// The rights whose own account this is, because they could not be had once; `None` if it is of all that have none.
    own_of: Option<Terms>,
    /// Uses and purchases of parts of the range may cost so much before it is tried as a whole again.
    parts: u64,
}

/// What keeping a range cost, and what each use spares since.
#[derive(Clone, Copy, Debug)]
struct Purchase {
    price: u64,
    rent: u64,
}

impl Admission {
    /// Of ranges that were never used.
    pub(crate) const fn new() -> Self {
        Self { sets: Chunked::new(), newcomers: 0 }
    }

    /// What to do for a use of `range`, which is not kept now. Some ten nanoseconds, whatever was
    /// used before.
    ///
    /// After [`Verdict::Buy`], [`end`](Self::end) is to be called when the range is not kept any more.
    pub(crate) fn decide(&mut self, range: AddressRange, terms: Terms, costs: UseCosts) -> Verdict {
        if self.pays(range, terms, costs) {
            self.buy(range, terms, costs)
        } else {
            Verdict::Rent(costs.rent())
        }
    }

    /// Whether keeping `range` pays by now, for one use more. If not, that one is rented.
    pub(crate) fn pays(&mut self, range: AddressRange, terms: Terms, costs: UseCosts) -> bool {
        let (rent, price) = (costs.rent(), costs.price());
        if rent == 0 {
            return false;
        }
        if self.is_harmless(range, terms, costs) {
            return true;
        }
        let set = self.sets.made(set_of(range), || [Account::FREE; WAYS]);
        let place = place_of(set, range, terms);
        let mut account = place.map_or(Account::of(range), |place| set[place]);
        account.paid = account.paid.saturating_add(rent);
        match place {
            Some(place) => set[place] = account,
            None => open_account(set, account, price, &mut self.newcomers),
        }
        account.has_paid_for(price)
    }

    /// Keeps `range`, where keeping it [pays](Self::pays): it is bought, if its account has paid for that. If it is bought
    /// already, what was paid for it and since pays for other rights once: [`spend`](Self::spend) it when they have it.
    pub(crate) fn buy(&mut self, range: AddressRange, terms: Terms, costs: UseCosts) -> Verdict {
        let (rent, price) = (costs.rent(), costs.price());
        if rent == 0 || self.is_harmless(range, terms, costs) {
            return Verdict::Keep;
        }
        match self.account(range, terms).filter(|account| account.has_paid_for(price)) {
            // For other rights, which is paid for, too.
            Some(account) if account.is_bought_in_common() => Verdict::Join,
            Some(account) => {
                // Of what these rights bought before, the end was not told: another region serves them, or did.
                if account.bought.replace(Purchase { price, rent }).is_some() {
                    account.paid = 0;
                }
                account.parts = 0;
                Verdict::Buy
            }
            None => Verdict::Keep,
        }
    }

    /// Whether keeping `range` costs hardly more than renting it once, and was not in vain.
    fn is_harmless(&self, range: AddressRange, terms: Terms, costs: UseCosts) -> bool {
        costs.is_keeping_harmless() && !self.was_in_vain(range, terms)
    }

    /// Whether doublings stand for these rights of `range`: what was to be kept was refused, or in vain behind rents, and none has
    /// paid since.
    pub(crate) fn was_in_vain(&self, range: AddressRange, terms: Terms) -> bool {
        let set = self.sets.get(set_of(range));
        set.is_some_and(|set| place_of(set, range, terms).is_some_and(|it| set[it].patience > 0))
    }

    /// Whether these rights were bought with an account of their own, which is told of their hits alone.
    pub(crate) fn is_bought_alone(&self, range: AddressRange, terms: Terms) -> bool {
        self.own(range, terms).is_some_and(|account| account.bought.is_some())
    }

    fn own(&self, range: AddressRange, terms: Terms) -> Option<&Account> {
        let set = self.sets.get(set_of(range))?;
        set.iter().find(|account| account.range == Some(range) && account.own_of == Some(terms))
    }

    /// What was kept for other rights than those that were bought is had, or cannot be had: what was paid for it is spent.
    pub(crate) fn spend(&mut self, range: AddressRange, terms: Terms) {
        let account = self.account(range, terms).filter(|account| account.is_bought_in_common());
        account.into_iter().for_each(|it| it.paid = 0);
    }

    /// `range` was paid for, and a part of it is had. Where the rest was [refused](Self::refuse) meanwhile, parts are bought from now
    /// on, for a while that is longer the more often that was in vain. Where it was not tried, what was paid bought the part.
    pub(crate) fn part(&mut self, range: AddressRange, terms: Terms, costs: UseCosts) {
        let Some(account) = self.account(range, terms).filter(|it| it.bought.is_none()) else {
            return;
        };
        if account.has_paid_for(costs.price()) {
            account.paid = 0;
        } else if account.was_refused() {
            account.parts = costs.part_price().saturating_mul(PARTS << account.patience);
        }
    }

    /// Whether parts of `range` are bought, and not the whole.
    pub(crate) fn is_parted(&self, range: AddressRange, terms: Terms) -> bool {
        self.own(range, terms).is_some_and(|account| account.parts > 0)
    }

    /// A part of it cost so much: its use, or its [price](UseCosts::part_price).
    pub(crate) fn note_part(&mut self, range: AddressRange, terms: Terms, cost: u64) {
        let account = self.account(range, terms);
        account.into_iter().for_each(|it| it.parts = it.parts.saturating_sub(cost));
    }

    /// What was to be rented for so much could not be had: nothing was paid.
    pub(crate) fn refund(&mut self, range: AddressRange, terms: Terms, rent: u64) {
        let account = self.account(range, terms).filter(|account| account.bought.is_none());
        account.into_iter().for_each(|it| it.paid = it.paid.saturating_sub(rent));
    }

    /// What was bought was not had, and is tried again: it is bought again then.
    pub(crate) fn retract(&mut self, range: AddressRange, terms: Terms) {
        self.bought(range, terms).into_iter().for_each(|account| account.bought = None);
    }

    /// What was to be kept, and is [retracted](Self::retract) if it was bought, cannot be had: that was in vain. From now on these
    /// rights have an account of their own, so that they spend nothing that others paid. It takes the place of one of which
    /// nothing is bought; else one that is free, that of other refused rights, of whom nothing is kept, or of all others one at
    /// random.
    ///
    /// To say so twice does nothing.
    pub(crate) fn refuse(&mut self, range: AddressRange, terms: Terms) {
        let set = self.sets.made(set_of(range), || [Account::FREE; WAYS]);
        let found = place_of(set, range, terms);
        let is_theirs = |account: &Account| account.own_of.is_some() || account.bought.is_none();
        let place = found.filter(|&place| is_theirs(&set[place])).or_else(|| free_place(set));
        let place = place.or_else(|| {
            let chosen = chosen(&mut self.newcomers).1;
            let mut from_there = (chosen..chosen + WAYS).map(|place| place % WAYS);
            let is_refused =
                |&place: &usize| set[place].own_of.is_some() && set[place].bought.is_none();
            from_there.clone().find(is_refused).or_else(|| from_there.find(|&it| found != Some(it)))
        });
        let Some(place) = place else { return };
        let account = &mut set[place];
        let had = if found == Some(place) { *account } else { Account::of(range) };
        if !had.is_refused() {
            let bought = None;
            *account = Account { own_of: Some(terms), has_paid: false, bought, ..had };
            account.conclude(None);
        }
    }

    /// `range`, which was bought, is not kept any more for these rights; its hits were worth so many parts of [`USE`]. That tells
    /// whether it was bought in vain. What was paid is forgotten, and what the uses spared is paid instead, if it is what keeping cost
    /// at least. Nothing happens where the range is not bought.
    pub(crate) fn end(&mut self, range: AddressRange, terms: Terms, hits: u64) {
        let Some(account) = self.bought(range, terms) else { return };
        let Some(Purchase { price, rent }) = account.bought.take() else { return };
        // The use for which it was bought would have been rented, too.
        let by_hits = rent.saturating_mul(hits) / u64::from(USE);
        let spared = rent.saturating_add(by_hits);
        // Twice the price, for what is to be bought may have become dearer; not more, so that the poor of a set are seen.
        account.conclude((spared >= price).then(|| spared.min(price.saturating_mul(2))));
    }

    fn account(&mut self, range: AddressRange, terms: Terms) -> Option<&mut Account> {
        let set = self.sets.get_mut(set_of(range))?;
        place_of(set, range, terms).map(|place| &mut set[place])
    }

    /// The account with which these rights were bought: their own may be younger.
    fn bought(&mut self, range: AddressRange, terms: Terms) -> Option<&mut Account> {
        let set = self.sets.get_mut(set_of(range))?;
        let accounts = set.iter_mut().filter(|it| it.range == Some(range) && it.serves(terms));
        accounts.filter(|account| account.bought.is_some()).max_by_key(|it| it.own_of.is_some())
    }
}

impl Account {
    const FREE: Self = Self {
        range: None,
        paid: 0,
        bought: None,
        patience: 0,
        has_paid: false,
        own_of: None,
        parts: 0,
    };

    const fn of(range: AddressRange) -> Self {
        Self { range: Some(range), ..Self::FREE }
    }

    fn has_paid_for(&self, price: u64) -> bool {
        self.paid >> self.patience > price
    }

    /// Whether these rights were refused, or bought in vain since, and nothing has paid behind that.
    fn was_refused(&self) -> bool {
        self.own_of.is_some() && self.patience > 0
    }

    /// The same, and nothing was paid since.
    fn is_refused(&self) -> bool {
        self.was_refused() && self.paid == 0 && self.bought.is_none()
    }

    /// Whether what was bought is kept for some of the rights that share it.
    fn is_bought_in_common(&self) -> bool {
        self.bought.is_some() && self.own_of.is_none()
    }

    /// Whether it may be the account of these rights.
    fn serves(&self, terms: Terms) -> bool {
        self.own_of.is_none_or(|own| own == terms)
    }

    /// A purchase is over that spared so much, or was in vain.
    fn conclude(&mut self, spared: Option<u64>) {
        let was_rented = !self.has_paid;
        self.patience = match spared {
            None if was_rented => (self.patience + 1).min(MOST_PATIENCE),
            _ => 0,
        };
        self.has_paid = spared.is_some();
        self.paid = spared.unwrap_or(0);
    }
}

/// The account of these rights: their own, or that of all that have none.
fn place_of(set: &[Account; WAYS], range: AddressRange, terms: Terms) -> Option<usize> {
    let mut common = None;
    for (place, account) in set.iter().enumerate() {
        if account.range == Some(range) && account.serves(terms) {
            if account.own_of.is_some() {
                return Some(place);
            }
            common = Some(place);
        }
    }
    common
}

fn free_place(set: &[Account; WAYS]) -> Option<usize> {
    set.iter().position(|account| account.range.is_none())
}

/// One of a full set, as if at random, and dice that it does not depend on.
fn chosen(newcomers: &mut u64) -> (u64, usize) {
    *newcomers = newcomers.wrapping_add(1);
    let dice = mixed(*newcomers);
    let ways = WAYS as u64;
    (dice / ways, usize::try_from(dice % ways).unwrap_or(0))
}

/// Remembers what was paid for a newcomer, of this price. In a full set it takes the place of another, and what that has paid,
/// as often as its own rent is a part of both. What is bought, or was and paid, has had what it paid: of that no more counts than
/// the newcomer's price. That rights were refused is worth the newcomer's price at least: who has forgotten it tries again, with what
/// others paid.
fn open_account(set: &mut [Account; WAYS], newcomer: Account, price: u64, newcomers: &mut u64) {
    if let Some(free) = free_place(set) {
        set[free] = newcomer;
        return;
    }
    let (dice, place) = chosen(newcomers);
    let other = &mut set[place];
    let stake = match other.bought {
        Some(purchase) => purchase.price.min(price),
        None if other.has_paid => other.paid.min(price),
        None if other.own_of.is_some() => other.paid.max(price),
        None => other.paid,
    };
    let paid = stake.saturating_add(newcomer.paid);
    if dice % paid < newcomer.paid {
        *other = Account { paid, ..newcomer };
    }
}

/// Numbers in turn become numbers as if at random: the last step of [SplitMix64](https://doi.org/10.1145/2660193.2660195).
const fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(GOLDEN);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Spreads pages and lengths over the sets, by the golden ratio.
fn set_of(range: AddressRange) -> usize {
    let words = (range.start() >> 12) as u64 ^ (range.len() as u64).rotate_left(32);
    let mixed = words.wrapping_mul(GOLDEN) >> (u64::BITS - SETS.trailing_zeros());
    usize::try_from(mixed).unwrap_or(0)
}

/// A cost that is learnt while running: a moving average that no single outlier moves far, such as a
/// registration in the middle of which the thread lost its processor. The first figures may be outliers, too: of them the least
/// counts.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct LearnedCost {
    /// In sixteenths of a nanosecond; 0 if nothing was measured.
    average: u64,
    /// How many there were, up to [`FIRST`](Self::FIRST).
    figures: u8,
}

impl LearnedCost {
    /// The part of a new figure in the average: one in so many.
    const INERTIA: u64 = 8;
    /// A figure counts for at most so many times the average.
    const MOST: u64 = 4;
    const FRACTIONS: u64 = 16;
    /// So many figures are the first.
    const FIRST: u8 = 4;

    /// Something took `nanoseconds`.
    pub fn observe(&mut self, nanoseconds: u64) {
        let figure = nanoseconds.saturating_mul(Self::FRACTIONS).max(1);
        let is_first = self.figures < Self::FIRST;
        self.figures += u8::from(is_first);
        self.average = match self.average {
            0 => figure,
            average if is_first => average.min(figure),
            average => {
                let figure = figure.min(average.saturating_mul(Self::MOST));
                // Up, so that what was nothing at first does not stay nothing.
                let more = figure.div_ceil(Self::INERTIA);
                (average - average / Self::INERTIA).saturating_add(more)
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

/// Whether what the miss at `tick` takes is measured: one in eight, because clocks are slow. Not each eighth: of a program that
/// uses ranges in turn, one would always be measured and another never. The first miss of a cache, at tick 1, is measured.
pub(crate) const fn is_sampled(tick: u64) -> bool {
    const EACH: u64 = 8;
    mixed(tick.wrapping_sub(1)) < u64::MAX / EACH
}

/// What registering, what surrounds it, watching and asking take here, learnt while running.
#[derive(Default, Debug)]
pub(crate) struct LearnedCosts {
    /// By the logarithm of the length.
    register: [LearnedCost; LENGTHS],
    deregister: [LearnedCost; LENGTHS],
    watch: [LearnedCost; LENGTHS],
    check: LearnedCost,
    slow_path: [LearnedCost; LENGTHS],
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

    /// What it takes to have `range` watched, or to hear that it cannot be.
    pub(crate) fn watched(&mut self, range: AddressRange, nanoseconds: u64) {
        self.watch[length_class(range)].observe(nanoseconds);
    }

    /// A monitor's check, which is most of what a hit takes.
    pub(crate) fn checked(&mut self, nanoseconds: u64) {
        self.check.observe(nanoseconds);
    }

    /// What surrounds a registration: what is asked for it, the locks, the books.
    pub(crate) fn went_slowly(&mut self, range: AddressRange, nanoseconds: u64) {
        self.slow_path[length_class(range)].observe(nanoseconds);
    }

    /// Whether something of that length was registered.
    pub(crate) fn knows(&self, range: AddressRange) -> bool {
        self.register[length_class(range)].nanoseconds().is_some()
    }

    /// What uses of `range` take, where a change of it takes `change` nanoseconds more if it is watched.
    /// `None` if nothing of such a length was registered yet.
    pub(crate) fn of(&self, range: AddressRange, change: u64) -> Option<UseCosts> {
        let per_use = self.per_use(length_class(range))?;
        let hit = self.check.nanoseconds().unwrap_or(0);
        let surcharge = known(&self.watch, length_class(range)).saturating_add(change);
        Some(UseCosts { per_use, hit, keeping: per_use.saturating_add(surcharge) })
    }

    /// How often what a use of `range` costs is to be halved for what a use costs at least, however few its bytes.
    pub(crate) fn halvings(&self, range: AddressRange) -> u32 {
        let least = (0..LENGTHS).filter_map(|class| self.per_use(class)).min().unwrap_or(0);
        let this = self.per_use(length_class(range)).unwrap_or(least);
        (this / least.max(1)).checked_ilog2().unwrap_or(0)
    }

    /// What a use takes that is not kept, of a range of this class. `None` if none was registered yet.
    fn per_use(&self, class: usize) -> Option<u64> {
        let register = self.register[class].nanoseconds()?;
        let registering = register.saturating_add(known(&self.deregister, class));
        Some(registering.saturating_add(known(&self.slow_path, class)))
    }
}

/// What was not measured of this class takes what it takes of the one that takes least.
fn known(costs: &[LearnedCost; LENGTHS], class: usize) -> u64 {
    let least = || costs.iter().filter_map(LearnedCost::nanoseconds).min();
    costs[class].nanoseconds().or_else(least).unwrap_or(0)
}

fn length_class(range: AddressRange) -> usize {
    (range.len().ilog2().saturating_sub(8) as usize).min(LENGTHS - 1)
}

/// Not in the interpreter: arithmetic alone, which it takes hours for.
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod tests {
    use super::*;
    use crate::Access;
    use proptest::prelude::*;

    const WHOLE: u64 = USE as u64;

    const LOCAL: Terms = Terms { access: Access::READ, vouched: false };

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
                    let verdict = admission.decide(page(number), LOCAL, costs);
                    bill.kept = !matches!(verdict, Verdict::Rent(_));
                    hits[number] = 0;
                    bill.ours += if bill.kept { costs.keeping + costs.hit } else { costs.per_use };
                }
                Step::Change(number) => {
                    let bill = &mut bills[number];
                    if bill.kept {
                        admission.end(page(number), LOCAL, hits[number] * WHOLE);
                    }
                    bill.best = bill.best_with_this_life(costs);
                    (bill.kept, bill.uses_in_this_life) = (false, 0);
                }
            }
        }
        bills
    }

    /// What `lives` of one range cost that have `uses` each.
    fn follow_alike(uses: usize, lives: usize, costs: UseCosts) -> Bill {
        let life = std::iter::repeat_n(Step::Use(0), uses).chain([Step::Change(0)]);
        let steps: Vec<_> = std::iter::repeat_n(life, lives).flatten().collect();
        follow(&steps, 1, costs).remove(0)
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
            let bound = (1 << MOST_PATIENCE) + 2;
            for bill in follow(&steps, RANGES, costs) {
                let best = bill.best_with_this_life(costs);
                // Where a hit costs more than renting, nothing is bought, and that is best.
                prop_assert!(bill.ours <= bound * best, "{} of {best} with {costs:?}", bill.ours);
            }
        }

        /// Of three rights one can be kept. Each pays its own price, and once more what all had paid when others were refused.
        #[test]
        fn rights_that_are_refused_cost_others_no_more_than_once(
            uses in prop::collection::vec((0..3_usize, 0..100_u32), 0..2_000),
            costs in any_costs(),
        ) {
            let rights = [Access::READ, Access::WRITE, Access::READ_WRITE]
                .map(|access| Terms { access, vouched: false });
            let (mut admission, mut bills) = (Admission::new(), vec![Bill::default(); 3]);
            let mut hits = 0;
            for (right, dice) in uses {
                if dice == 0 {
                    if bills[0].kept {
                        admission.end(page(0), rights[0], hits * WHOLE);
                    }
                    bills[0].best = bills[0].best_with_this_life(costs);
                    (bills[0].kept, bills[0].uses_in_this_life) = (false, 0);
                }
                let bill = &mut bills[right];
                bill.uses_in_this_life += 1;
                bill.rented += costs.per_use;
                if bill.kept {
                    (bill.ours, hits) = (bill.ours + costs.hit, hits + 1);
                } else if matches!(admission.decide(page(0), rights[right], costs), Verdict::Rent(_)) {
                    bill.ours += costs.per_use;
                } else if right == 0 {
                    bill.ours += costs.keeping + costs.hit;
                    (bill.kept, hits) = (true, 0);
                } else {
                    bill.ours += costs.keeping + costs.per_use;
                    admission.refuse(page(0), rights[right]);
                }
            }
            let once = 3 * (costs.keeping + costs.per_use);
            let bound = (1 << MOST_PATIENCE) + 2;
            let best = bills[0].best_with_this_life(costs);
            prop_assert!(bills[0].ours <= bound * best + once, "{} of {best}", bills[0].ours);
            for bill in bills {
                prop_assert!(bill.ours <= 2 * bill.rented + once, "{} of {}", bill.ours, bill.rented);
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
            let bill = &follow_alike(uses, 4_000 / uses, costs);
            prop_assert!(ratio(bill, costs) <= 2.25, "{}", ratio(bill, costs));
        }

        /// What their rents cost beyond the best is paid once, not in each life.
        #[test]
        fn lives_that_all_pay_cost_what_the_best_decision_costs(
            uses in 20..200_usize,
            rent in 1_000..5_000_u64,
        ) {
            let costs = UseCosts { per_use: rent + 300, hit: 300, keeping: 9 * rent };
            let bill = &follow_alike(uses, 100, costs);
            prop_assert!(ratio(bill, costs) < 1.02, "{}", ratio(bill, costs));
        }

        /// Used so seldom in each life that keeping never pays.
        #[test]
        fn what_is_never_worth_keeping_costs_an_eighth_more_than_renting(
            uses in 1..8_usize,
            rent in 1_000..5_000_u64,
        ) {
            let costs = UseCosts { per_use: rent + 300, hit: 300, keeping: 10 * rent };
            let bill = &follow_alike(uses, 1_000, costs);
            let more = bill.ours as f64 / bill.rented as f64;
            prop_assert!(more < 1.14, "{more}");
        }
    }

    /// Bought by the 54th use, which with the hits behind it spares more than it costs; without that use, less by one.
    #[test]
    fn the_use_for_which_it_is_bought_pays_for_it() {
        let costs = UseCosts { per_use: 6_981, hit: 1, keeping: 369_941 };
        let bill = &follow_alike(107, 37, costs);
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
                |admission: &mut Admission| admission.decide(page(0), LOCAL, costs) == Verdict::Buy;
            let uses = (1..).find(|_| keeps(&mut admission));
            admission.end(page(0), LOCAL, hits * WHOLE);
            uses
        };
        // The ninth hit pays, so the next is bought at once; in vain, which begins anew.
        let bought = [8, 8, 8, 8, 9, 0, 8, 9, 9, 9].map(&mut bought_after);
        assert_eq!(bought, [11, 21, 41, 81, 81, 1, 11, 21, 1, 1].map(Some));
    }

    #[test]
    fn what_costs_hardly_more_to_keep_is_kept_from_the_first_use() {
        let costs = UseCosts { per_use: 80_000, hit: 300, keeping: 88_000 };
        assert_eq!(Admission::new().decide(page(0), LOCAL, costs), Verdict::Keep);
        let dearer = UseCosts { keeping: 92_000, ..costs };
        assert!(matches!(Admission::new().decide(page(0), LOCAL, dearer), Verdict::Rent(_)));
    }

    #[test]
    fn costs_are_known_of_the_lengths_that_were_registered() {
        let mut learned = LearnedCosts::default();
        assert_eq!(learned.of(page(0), 7), None);
        learned.registered(page(0), 2_000);
        learned.deregistered(page(0), 1_000);
        learned.watched(page(0), 500);
        learned.checked(250);
        learned.went_slowly(page(0), 100);
        let expected = UseCosts { per_use: 3_100, hit: 250, keeping: 3_607 };
        assert_eq!(learned.of(page(1), 7), Some(expected));
        let long = AddressRange::new(4096, 1 << 20).unwrap();
        assert_eq!([page(1), long].map(|range| learned.halvings(range)), [0; 2], "not known");
        learned.registered(long, 50_000);
        assert_eq!([page(1), long].map(|range| learned.halvings(range)), [0, 4], "16 times");
        learned.registered(AddressRange::new(4096, 300).unwrap(), 1_900);
        assert_eq!(
            [page(1), long].map(|range| learned.halvings(range)),
            [0, 4],
            "with a slow path"
        );
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
            let mut keeps = |range| admission.decide(range, LOCAL, costs) == Verdict::Buy;
            assert!(!used_once.is_some_and(&mut keeps), "used once");
            number % (3 * SETS) == 0 && keeps(often)
        });
        assert!(kept);
    }

    fn pages_of_one_set() -> impl Iterator<Item = AddressRange> {
        (0..).map(page).filter(|&range| set_of(range) == set_of(page(0)))
    }

    /// As many ranges as share a set, whose lives all pay, and others that are used once between them: each costs as much as if it
    /// had taken its own rent from each of the ranges.
    #[test]
    fn ranges_that_are_used_once_take_little_of_what_others_have_paid() {
        const ONCE: usize = 2_000;
        let costs = UseCosts { per_use: 1_001, hit: 1, keeping: 9_000 };
        let mut pages = pages_of_one_set();
        let often: Vec<_> = pages.by_ref().take(WAYS).collect();
        let mut admission = Admission::new();
        let life = |admission: &mut Admission, range| {
            let uses = (1..).find(|_| admission.decide(range, LOCAL, costs) == Verdict::Buy);
            admission.end(range, LOCAL, 100 * WHOLE);
            uses.unwrap()
        };
        assert!(often.iter().all(|&range| life(&mut admission, range) == 10));
        let mut rented = 0;
        for once in pages.take(ONCE) {
            assert!(matches!(admission.decide(once, LOCAL, costs), Verdict::Rent(_)));
            rented += often.iter().map(|&range| life(&mut admission, range) - 1).sum::<usize>();
        }
        assert!(rented < WAYS * ONCE, "{rented}");
    }

    /// More than share a set, used in turn: all are kept in the end, though none is seen more often than the others.
    #[test]
    fn ranges_that_are_used_on_and_on_are_kept_however_many_there_are() {
        let costs = UseCosts { per_use: 2_000, hit: 300, keeping: 30_000 };
        for count in [WAYS + 1, 2 * WAYS, 8 * WAYS] {
            let mut admission = Admission::new();
            let mut rented: Vec<_> = pages_of_one_set().take(count).collect();
            let mut uses = 0;
            while !rented.is_empty() {
                uses += rented.len();
                rented.retain(|&range| admission.decide(range, LOCAL, costs) != Verdict::Buy);
            }
            // Each pays rents of the price, on average.
            assert!(uses < 3 * count * 18, "{uses} of {count}");
        }
    }

    /// What was refused and paid nothing, beside one that pays.
    #[test]
    fn refusals_of_others_take_nothing_of_what_was_paid() {
        let costs = UseCosts { per_use: 2_000, hit: 300, keeping: 300_000 };
        let mut admission = Admission::new();
        let mut pages = pages_of_one_set();
        let dear = pages.next().unwrap();
        let others: Vec<_> = pages.take(2 * WAYS).collect();
        let uses = others.iter().cycle().take(1_000).position(|&other| {
            admission.refuse(other, LOCAL);
            admission.decide(dear, LOCAL, costs) == Verdict::Buy
        });
        assert_eq!(uses, Some(176));
    }

    /// Which spent what they paid when they were bought.
    #[test]
    fn dear_ranges_that_are_kept_are_in_no_other_s_way() {
        let dear = UseCosts { per_use: 100_000, hit: 300, keeping: 10_000_000 };
        let cheap = UseCosts { per_use: 2_000, hit: 300, keeping: 30_000 };
        let mut admission = Admission::new();
        let mut pages = pages_of_one_set();
        for range in pages.by_ref().take(WAYS) {
            assert!((0..1_000).any(|_| admission.decide(range, LOCAL, dear) == Verdict::Buy));
        }
        let uses_until_kept = |range| {
            (1..10_000).find(|_| admission.decide(range, LOCAL, cheap) == Verdict::Buy).unwrap()
        };
        let uses: usize = pages.take(50).map(uses_until_kept).sum();
        assert!(uses < 50 * 3 * 18, "{uses}");
    }

    #[test]
    fn a_cost_is_learnt_also_where_the_first_took_no_time() {
        let mut cost = LearnedCost::default();
        cost.observe(0);
        (0..200).for_each(|_| cost.observe(1_000_000));
        assert!(cost.nanoseconds().is_some_and(|cost| cost > 900_000), "{cost:?}");
    }

    /// Each of so many ranges that are used in turn.
    #[test]
    fn one_miss_in_eight_is_measured_of_each_of_ranges_in_turn() {
        for ranges in 1..=64 {
            for first in 0..ranges {
                let ticks = (0..800).map(|turn| first + turn * ranges);
                let measured = ticks.filter(|&tick| is_sampled(tick)).count();
                assert!((60..=140).contains(&measured), "{measured} with {ranges}");
            }
        }
    }

    #[test]
    fn prices_near_the_end_of_the_number_are_paid() {
        let costs = UseCosts { per_use: 1 << 60, hit: 0, keeping: 3 << 61 };
        let mut admission = Admission::new();
        let mut uses_until_kept = || {
            let uses = (1..100).find(|_| admission.decide(page(0), LOCAL, costs) == Verdict::Buy);
            admission.end(page(0), LOCAL, 0);
            uses
        };
        assert_eq!([0; 2].map(|_| uses_until_kept()), [Some(7), Some(13)]);
    }

    #[test]
    fn what_a_cheap_purchase_spared_pays_for_no_dear_one() {
        let copied = UseCosts { per_use: 12, hit: 2, keeping: 50 };
        let registered = UseCosts { per_use: 8_000, hit: 300, keeping: 370_000 };
        let mut admission = Admission::new();
        assert!((0..10).any(|_| admission.decide(page(0), LOCAL, copied) == Verdict::Buy));
        admission.end(page(0), LOCAL, 12 * WHOLE);
        assert!(matches!(admission.decide(page(0), LOCAL, registered), Verdict::Rent(_)));
    }

    /// As rights that the one kept has not are asked for, when that has become dearer.
    #[test]
    fn what_was_bought_is_judged_whatever_is_asked_for_meanwhile() {
        let costs = UseCosts { per_use: 1_100, hit: 100, keeping: 10_000 };
        let mut admission = Admission::new();
        let mut uses_until_kept = || {
            let uses = (1..).find(|_| admission.decide(page(0), LOCAL, costs) == Verdict::Buy);
            let dearer = UseCosts { keeping: 1_000_000, ..costs };
            assert!(matches!(admission.decide(page(0), LOCAL, dearer), Verdict::Rent(_)));
            admission.end(page(0), LOCAL, 0);
            uses
        };
        assert_eq!([0; 3].map(|_| uses_until_kept()), [Some(11), Some(21), Some(41)]);
    }

    #[test]
    fn an_outlier_moves_what_was_learnt_a_little() {
        let mut cost = LearnedCost::default();
        assert_eq!(cost.nanoseconds(), None);
        cost.observe(10_000_000);
        cost.observe(1_000);
        assert_eq!(cost.nanoseconds(), Some(1_000), "the first was one");
        (0..100).for_each(|_| cost.observe(1_000));
        assert_eq!(cost.nanoseconds(), Some(1_000));
        cost.observe(1_000_000_000);
        assert!(cost.nanoseconds().is_some_and(|cost| cost <= 1_400), "{cost:?}");
        (0..100).for_each(|_| cost.observe(5_000));
        assert!(cost.nanoseconds().is_some_and(|cost| (4_900..=5_000).contains(&cost)), "{cost:?}");
    }
}
