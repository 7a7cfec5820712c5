//! How much of a budget each drawer holds, and what is due to it. No lock, no clock, no kernel.
//!
//! Each drawer has a **minimum**, which is kept for it: no other drawer gets it, used or not. The rest
//! is **common**: each takes of it as it asks, up to its maximum. What is **due** to a drawer is its
//! minimum and, by its weight, a part of what is common; beyond that it borrows, and gives
//! back when another asks for its own due.

use pinfold_core::{Amount, Exhausted, Limit, Refusal, RegisterError};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

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

/// Why a drawer is not let in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotJoined {
    /// Its terms contradict each other, or grant nothing.
    Terms,
    /// The minimum cannot be kept: this is neither held nor reserved.
    Kept { free: Amount },
}

/// How many borrowers are looked at under one hold of the budget's lock.
pub(super) const SLICE: usize = 64;

/// What a drawer may ask of others, because it is within its due.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    drawer: Drawer,
    missing: Amount,
    total: Amount,
}

/// The place of a drawer in the ledger.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Drawer(usize);

#[derive(Clone, Copy, Debug)]
struct Entry {
    terms: Terms,
    held: Amount,
}

impl Entry {
    /// What no other drawer can have: the minimum, or what is held if that is more.
    fn committed(&self) -> Amount {
        self.held.max(self.terms.minimum)
    }

    /// Whether it holds more than its minimum, so that it may owe something.
    fn borrows(&self) -> bool {
        !self.held.fits(self.terms.minimum)
    }
}

/// A drawer's entry, and where it stands among the borrowers.
#[derive(Clone, Copy, Debug)]
struct Place {
    entry: Entry,
    borrower: Option<usize>,
}

/// A sum of amounts that is exact whatever they are: drawers that overdraw may hold, all together,
/// more than an [`Amount`] can say.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Sum {
    bytes: u128,
    regions: u128,
}

impl Sum {
    fn add(&mut self, amount: Amount) {
        self.bytes += amount.bytes as u128;
        self.regions += amount.regions as u128;
    }

    fn subtract(&mut self, amount: Amount) {
        self.bytes -= amount.bytes as u128;
        self.regions -= amount.regions as u128;
    }

    /// The same as an amount; one that is too large is everything.
    fn amount(self) -> Amount {
        let clamped = |sum: u128| usize::try_from(sum).unwrap_or(usize::MAX);
        Amount { bytes: clamped(self.bytes), regions: clamped(self.regions) }
    }
}

/// What all drawers have together, kept with each change: no question looks at them all.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Sums {
    held: Sum,
    /// The drawers' minimums.
    kept: Sum,
    committed: Sum,
    weights: u64,
}

impl Sums {
    fn add(&mut self, entry: &Entry) {
        self.held.add(entry.held);
        self.kept.add(entry.terms.minimum);
        self.committed.add(entry.committed());
        self.weights += u64::from(entry.terms.weight);
    }

    fn subtract(&mut self, entry: &Entry) {
        self.held.subtract(entry.held);
        self.kept.subtract(entry.terms.minimum);
        self.committed.subtract(entry.committed());
        self.weights -= u64::from(entry.terms.weight);
    }
}

/// One of those that draw by the same drawer: each is refused, and notified, for itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct User {
    pub(super) drawer: Drawer,
    pub(super) number: u64,
}

impl User {
    /// All of all drawers.
    pub(super) fn all() -> RangeInclusive<Self> {
        *Self::all_of(Drawer(0)).start()..=*Self::all_of(Drawer(usize::MAX)).end()
    }

    /// All of a drawer.
    pub(super) fn all_of(drawer: Drawer) -> RangeInclusive<Self> {
        Self { drawer, number: 0 }..=Self { drawer, number: u64::MAX }
    }
}

/// Of bytes, or of registrations: what a drawer holds, and its terms.
#[derive(Clone, Copy)]
struct Part {
    held: usize,
    minimum: usize,
    maximum: usize,
}

impl Entry {
    fn bytes(&self) -> Part {
        let Terms { minimum, maximum, .. } = self.terms;
        Part { held: self.held.bytes, minimum: minimum.bytes, maximum: maximum.bytes }
    }

    fn regions(&self) -> Part {
        let Terms { minimum, maximum, .. } = self.terms;
        Part { held: self.held.regions, minimum: minimum.regions, maximum: maximum.regions }
    }
}

/// How much of the total no drawer can call its own; less than nothing where drawers have overdrawn it.
#[derive(Clone, Copy)]
struct Level {
    bytes: i128,
    regions: i128,
}

/// Of bytes, or of registrations: the users that were refused, in the order in which they get more room.
///
/// **Why the first alone is looked at.** As long as a drawer holds what it holds, the room that it has follows from
/// two things: the [`Level`], which it grows and shrinks with, and whether all minimums can be kept. So each drawer is
/// listed once, with the level above which its first user has more room than when it was refused. A drawer at its maximum
/// is in neither list: only what it gives back itself makes more room, and that lists it anew.
#[derive(Debug, Default)]
struct Waiting {
    /// Each user with how much more its drawer might have taken then: a drawer's first is the first with more room.
    rooms: BTreeSet<(Drawer, usize, u64)>,
    /// The drawers, with that level.
    levels: BTreeSet<(i128, Drawer)>,
    /// Those that have more room, at any level, as soon as all minimums can be kept.
    below_minimum: BTreeSet<Drawer>,
}

impl Waiting {
    /// The user of this drawer that has more room first, and the room that it had.
    fn first_of(&self, drawer: Drawer) -> Option<(usize, User)> {
        let all = (drawer, 0, 0)..=(drawer, usize::MAX, u64::MAX);
        let &(drawer, room, number) = self.rooms.range(all).next()?;
        Some((room, User { drawer, number }))
    }

    /// Puts the drawer into the lists that it belongs to.
    fn list(&mut self, drawer: Drawer, part: Part) {
        let Some((room, _)) = self.first_of(drawer) else { return };
        if room < part.maximum.saturating_sub(part.held) {
            self.levels.insert((level_for(room, part), drawer));
        }
        if room < part.minimum.saturating_sub(part.held) {
            self.below_minimum.insert(drawer);
        }
    }

    /// Takes it out of them, before its part or its users change.
    fn unlist(&mut self, drawer: Drawer, part: Part) {
        let Some((room, _)) = self.first_of(drawer) else { return };
        self.levels.remove(&(level_for(room, part), drawer));
        self.below_minimum.remove(&drawer);
    }

    /// A user that has more room at this level.
    fn first(&self, level: i128, minimums_are_kept: bool) -> Option<User> {
        let by_level = self.levels.first().filter(|&&(needed, _)| needed < level);
        let by_minimum = || self.below_minimum.first().filter(|_| minimums_are_kept);
        let drawer = by_level.map(|(_, drawer)| drawer).or_else(by_minimum)?;
        self.first_of(*drawer).map(|(_, user)| user)
    }
}

/// Above which level a drawer has more room than `room`: its minimum is set aside whether it holds it or not.
fn level_for(room: usize, part: Part) -> i128 {
    room as i128 - part.minimum.saturating_sub(part.held) as i128
}

/// What has refused a user.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Refuser {
    /// The budget.
    Budget,
    /// A device, whose bytes or registrations are all taken: what it has is all there is, whatever the budget allows.
    Device { lacks_bytes: bool },
}

impl Refuser {
    const ALL: [Self; 3] =
        [Self::Budget, Self::Device { lacks_bytes: true }, Self::Device { lacks_bytes: false }];

    pub(super) fn of(error: RegisterError) -> Self {
        Self::Device { lacks_bytes: matches!(error, RegisterError::PinnedMemoryLimit { .. }) }
    }
}

/// What a user has asked for since it was last notified.
#[derive(Debug)]
struct Wanted {
    /// The least of it.
    amount: Amount,
    /// What was due to it when it asked last.
    due: Amount,
    /// What did since then; if nothing, because it waits without having tried again, any may.
    refused_by: BTreeSet<Refuser>,
}

impl Wanted {
    fn may_be_refused_by(&self, refuser: &Refuser) -> bool {
        self.refused_by.is_empty() || self.refused_by.contains(refuser)
    }
}

/// The users that are to be notified when they may take more than when they were refused.
#[derive(Debug, Default)]
struct Refused {
    /// How much more the drawer of each might have taken then.
    rooms: BTreeMap<User, Amount>,
    wanted: BTreeMap<User, Wanted>,
    /// Those to which more is due than when they were refused, because a drawer has left or the total grew.
    due_more: BTreeSet<User>,
    bytes: Waiting,
    regions: Waiting,
}

impl Refused {
    /// Changes the rooms of one drawer's users.
    fn set(&mut self, user: User, entry: &Entry, room: Option<Amount>) {
        let User { drawer, number } = user;
        self.unlist(drawer, entry);
        let before = match room {
            Some(room) => self.rooms.insert(user, room),
            None => {
                self.wanted.remove(&user);
                self.due_more.remove(&user);
                self.rooms.remove(&user)
            }
        };
        if let Some(Amount { bytes, regions }) = before {
            self.bytes.rooms.remove(&(drawer, bytes, number));
            self.regions.rooms.remove(&(drawer, regions, number));
        }
        if let Some(Amount { bytes, regions }) = room {
            self.bytes.rooms.insert((drawer, bytes, number));
            self.regions.rooms.insert((drawer, regions, number));
        }
        self.list(drawer, entry);
    }

    fn want(&mut self, user: User, amount: Amount, due: Amount) {
        let nothing = || Wanted { amount, due, refused_by: BTreeSet::new() };
        let wanted = self.wanted.entry(user).or_insert_with(nothing);
        (wanted.amount, wanted.due) = (wanted.amount.min(amount), due);
    }

    fn note_refuser(&mut self, user: User, refuser: Refuser) {
        if let Some(wanted) = self.wanted.get_mut(&user) {
            wanted.refused_by.insert(refuser);
        }
    }

    fn list(&mut self, drawer: Drawer, entry: &Entry) {
        self.bytes.list(drawer, entry.bytes());
        self.regions.list(drawer, entry.regions());
    }

    fn unlist(&mut self, drawer: Drawer, entry: &Entry) {
        self.bytes.unlist(drawer, entry.bytes());
        self.regions.unlist(drawer, entry.regions());
    }
}

#[derive(Debug)]
pub(super) struct Ledger {
    total: Amount,
    /// By the drawer's number; `None` for one that has left.
    places: Vec<Option<Place>>,
    /// The numbers of those that have left.
    vacant: Vec<usize>,
    sums: Sums,
    /// The drawers that hold more than their minimum. It has room for all drawers.
    borrowers: Vec<Drawer>,
    refused: Refused,
    /// How often something that was in use came back, or the total grew.
    released: u64,
}

impl Ledger {
    pub(super) fn new(total: Amount) -> Self {
        let sums = Sums::default();
        let (places, vacant) = (Vec::new(), Vec::new());
        let refused = Refused::default();
        Self { total, places, vacant, sums, borrowers: Vec::new(), refused, released: 0 }
    }

    pub(super) fn total(&self) -> Amount {
        self.total
    }

    /// From now on there is this much. What is held beyond it stays held; beyond minimums, nothing
    /// more is granted until enough has come back.
    pub(super) fn set_total(&mut self, total: Amount) {
        let grows = !total.fits(self.total);
        self.total = total;
        self.released += 1;
        if grows {
            self.note_due_more();
        }
    }

    /// How often there may have been more room for good. What was taken, not used and given back is left out.
    pub(super) fn released(&self) -> u64 {
        self.released
    }

    /// What all drawers hold.
    pub(super) fn held(&self) -> Amount {
        self.sums.held.amount()
    }

    /// What this drawer holds.
    pub(super) fn held_by(&self, drawer: Drawer) -> Amount {
        self.entry(drawer).map_or(Amount::ZERO, |entry| entry.held)
    }

    /// What is kept for single drawers: their minimums.
    pub(super) fn kept(&self) -> Amount {
        self.sums.kept.amount()
    }

    /// What a drawer with this minimum gets of it although others hold more than there is, because
    /// they overdrew or the total was lowered: all of it, unless the total is below what is kept.
    fn promised(&self, minimum: Amount) -> Amount {
        if self.kept().fits(self.total) { minimum } else { Amount::ZERO }
    }

    /// What no other drawer can have: each drawer's minimum, or what it holds if that is more.
    fn committed(&self) -> Amount {
        self.sums.committed.amount()
    }

    /// The same of all drawers but this one.
    fn committed_by_others(&self, entry: &Entry) -> Amount {
        let mut others = self.sums.committed;
        others.subtract(entry.committed());
        others.amount()
    }

    pub(super) fn join(&mut self, terms: Terms) -> Result<Drawer, NotJoined> {
        let Terms { minimum, maximum, .. } = terms;
        if !minimum.fits(maximum) || maximum.bytes == 0 || maximum.regions == 0 {
            return Err(NotJoined::Terms);
        }
        let free = self.total - self.committed();
        if !minimum.fits(free) {
            return Err(NotJoined::Kept { free });
        }
        let entry = Entry { terms, held: Amount::ZERO };
        self.sums.add(&entry);
        let place = Some(Place { entry, borrower: None });
        let number = self.vacant.pop().unwrap_or(self.places.len());
        match self.places.get_mut(number) {
            Some(vacant) => *vacant = place,
            None => self.places.push(place),
        }
        // So that nothing is allocated when a drawer begins to borrow.
        self.borrowers.reserve(self.places.len() - self.borrowers.len());
        Ok(Drawer(number))
    }

    /// The drawer is gone, and with it what it held.
    pub(super) fn leave(&mut self, drawer: Drawer) {
        self.released += 1;
        self.set_held(drawer, Amount::ZERO);
        while let Some((&user, _)) = self.refused.rooms.range(User::all_of(drawer)).next() {
            self.forget(user);
        }
        if let Some(Place { entry, .. }) = self.places.get_mut(drawer.0).and_then(Option::take) {
            self.sums.subtract(&entry);
            self.vacant.push(drawer.0);
            self.note_due_more();
        }
    }

    /// Others may owe by now what those that were refused want.
    fn note_due_more(&mut self) {
        // Of what a device has, its due is another, which may have grown where this one has not.
        let is_due_more = |(user, wanted): &(&User, &Wanted)| {
            Refuser::ALL[1..].iter().any(|refuser| wanted.may_be_refused_by(refuser))
                || !self.due(user.drawer, self.total).fits(wanted.due)
        };
        let due_more = self.refused.wanted.iter().filter(is_due_more);
        let due_more: Vec<User> = due_more.map(|(&user, _)| user).collect();
        self.refused.due_more.extend(due_more);
    }

    /// The user is gone; what it held it has given back.
    pub(super) fn forget(&mut self, user: User) {
        if let Some(&entry) = self.entry(user.drawer) {
            self.refused.set(user, &entry, None);
        }
    }

    /// Whether a drawer may take `amount` now.
    pub(super) fn has_room(&self, drawer: Drawer, amount: Amount) -> bool {
        self.entry(drawer).is_some_and(|entry| amount.fits(self.room(entry)))
    }

    pub(super) fn take(&mut self, drawer: Drawer, amount: Amount) -> Result<(), Refusal> {
        let Some(entry) = self.entry(drawer) else {
            return Err(refusal(amount, amount, Amount::ZERO));
        };
        let Terms { minimum, maximum, .. } = entry.terms;
        let (after, now) = (entry.held + amount, self.limit(entry));
        // A sum that cannot be told is none that may be held.
        if !after.fits(now) || after - entry.held != amount {
            let ever = maximum.min(self.total - (self.kept() - minimum));
            return Err(refusal(amount, after - now, ever));
        }
        self.set_held(drawer, after);
        Ok(())
    }

    /// As [`take`](Self::take), for a user that is to be notified when it was refused and may take more later.
    pub(super) fn take_or_await(&mut self, user: User, amount: Amount) -> Result<(), Refusal> {
        let taken = self.take(user.drawer, amount);
        if taken.is_err() {
            self.await_room(user, amount);
            self.refused.note_refuser(user, Refuser::Budget);
        }
        taken
    }

    /// A device has refused what the user waits for, if it waits.
    pub(super) fn note_device(&mut self, user: User, error: RegisterError) {
        self.refused.note_refuser(user, Refuser::of(error));
    }

    /// The user is notified when it may take more than now, be it that another drawer holds less or that another user
    /// of its own does. It was refused because that was too little, so nothing less is enough.
    ///
    /// What was taken and came back in between makes no difference, so two that try in turn do not notify each other
    /// for ever. It waits until there is more, also if it gets something meanwhile: several threads may ask for it.
    ///
    /// It is notified, too, when another drawer leaves as much idle as it has `wanted`.
    pub(super) fn await_room(&mut self, user: User, wanted: Amount) {
        let Some(&entry) = self.entry(user.drawer) else { return };
        self.refused.want(user, wanted, self.due(user.drawer, self.total));
        let (room, before) = (self.room(&entry), self.refused.rooms.get(&user).copied());
        // Of an earlier refusal for which there is more room now, it is still to be notified.
        let least = before.map_or(room, |before| before.min(room));
        if before != Some(least) {
            self.refused.set(user, &entry, Some(least));
        }
    }

    fn level(&self) -> Level {
        let Sum { bytes, regions } = self.sums.committed;
        let left =
            |total: usize, committed: u128| (total as u128).cast_signed() - committed.cast_signed();
        Level { bytes: left(self.total.bytes, bytes), regions: left(self.total.regions, regions) }
    }

    /// How much a drawer may hold in all, as others hold now.
    fn limit(&self, entry: &Entry) -> Amount {
        let Terms { minimum, maximum, .. } = entry.terms;
        let others = self.committed_by_others(entry);
        maximum.min((self.total - others).max(self.promised(minimum)))
    }

    /// How much more a drawer may take, as it and others hold now.
    fn room(&self, entry: &Entry) -> Amount {
        self.limit(entry) - entry.held
    }

    /// Whether any user that was refused may take more since.
    pub(super) fn has_room_for_refused(&self) -> bool {
        self.refused_with_room().is_some()
    }

    /// How many users were refused and have not been notified since.
    pub(super) fn refused(&self) -> usize {
        self.refused.rooms.len()
    }

    /// One of those users; each is notified once for a refusal.
    pub(super) fn take_refused_with_room(&mut self) -> Option<User> {
        let user = self.refused_with_room()?;
        self.forget(user);
        Some(user)
    }

    /// One of those users that gets what it wants if it asks `lender` for what is `idle` there; each is notified once for a
    /// refusal.
    pub(super) fn take_refused_served_by(&mut self, lender: Drawer, idle: Amount) -> Option<User> {
        let (&user, _) = self.refused.wanted.iter().find(|&(&user, wanted)| {
            let mut all = Refuser::ALL.iter().filter(|refuser| wanted.may_be_refused_by(refuser));
            all.any(|&refuser| self.serves(lender, idle, user, wanted.amount, refuser))
        })?;
        self.forget(user);
        self.released += 1;
        Some(user)
    }

    /// Whether the user gets what it wants by what is `idle`, as far as this one refuses it.
    fn serves(
        &self,
        lender: Drawer,
        idle: Amount,
        user: User,
        wanted: Amount,
        refuser: Refuser,
    ) -> bool {
        let total = self.total_for(refuser);
        let (missing, lacking) = match refuser {
            Refuser::Budget => {
                let entry = self.entry(user.drawer);
                let missing = entry.map_or(wanted, |entry| wanted - self.room(entry));
                (missing, missing)
            }
            Refuser::Device { lacks_bytes: true } => (wanted, Amount { regions: 0, ..wanted }),
            Refuser::Device { lacks_bytes: false } => (wanted, Amount { bytes: 0, ..wanted }),
        };
        let claim = self.claim(user.drawer, missing, total);
        claim.is_some_and(|claim| self.would_do(lender, idle, claim, lacking))
    }

    /// Whether `lender` owes for the claim what is `lacking`, and has it `idle`.
    fn would_do(&self, lender: Drawer, idle: Amount, claim: Claim, lacking: Amount) -> bool {
        lacking != Amount::ZERO && lacking.fits(self.debt(claim, lender).min(idle))
    }

    /// What there is in all, as this one sees it.
    pub(super) fn total_for(&self, refuser: Refuser) -> Amount {
        let held = self.held();
        match refuser {
            Refuser::Budget => self.total,
            Refuser::Device { lacks_bytes: true } => {
                self.total.min(Amount { bytes: held.bytes, regions: usize::MAX })
            }
            Refuser::Device { lacks_bytes: false } => {
                self.total.min(Amount { regions: held.regions, bytes: usize::MAX })
            }
        }
    }

    fn refused_with_room(&self) -> Option<User> {
        let Refused { bytes, regions, due_more, .. } = &self.refused;
        let (level, minimums_are_kept) = (self.level(), self.kept().fits(self.total));
        let by_bytes = bytes.first(level.bytes, minimums_are_kept);
        let by_regions = || regions.first(level.regions, minimums_are_kept);
        by_bytes.or_else(by_regions).or_else(|| due_more.first().copied())
    }

    pub(super) fn overdraw(&mut self, drawer: Drawer, amount: Amount) {
        self.set_held(drawer, self.held_by(drawer) + amount);
    }

    /// Takes back what the drawer holds, `amount` of it at most. What it gives back and holds still, others draw:
    /// only what has taken it gives it (`ShareAccount`).
    pub(super) fn give(&mut self, drawer: Drawer, amount: Amount) {
        self.released += 1;
        self.give_unused(drawer, amount);
    }

    /// The same of what the drawer has taken and not used: there is as much room as before it did.
    pub(super) fn give_unused(&mut self, drawer: Drawer, amount: Amount) {
        self.set_held(drawer, self.held_by(drawer) - amount);
    }

    /// What is due to this drawer if there is `total` in all: its minimum and its part of the rest.
    fn due(&self, drawer: Drawer, total: Amount) -> Amount {
        let Some(entry) = self.entry(drawer) else { return Amount::ZERO };
        let weights = self.sums.weights;
        let Terms { minimum, maximum, weight } = entry.terms;
        let common = total - self.kept();
        let part = |of: usize| part_of(of, weight, weights);
        let part = Amount { bytes: part(common.bytes), regions: part(common.regions) };
        (minimum + part).min(maximum)
    }

    /// What `drawer` may ask of others so that it gets `missing`, if there is `total` in all. `None`, if it asks for more
    /// than its due.
    pub(super) fn claim(&self, drawer: Drawer, missing: Amount, total: Amount) -> Option<Claim> {
        let mine = self.held_by(drawer) + missing;
        mine.fits(self.due(drawer, total)).then_some(Claim { drawer, missing, total })
    }

    /// How much `other` has to give back for it: what it holds beyond its own due.
    pub(super) fn debt(&self, claim: Claim, other: Drawer) -> Amount {
        let Claim { drawer, missing, total } = claim;
        if other == drawer {
            return Amount::ZERO;
        }
        (self.held_by(other) - self.due(other, total)).min(missing)
    }

    /// Some of those that hold more than is kept for them, of the places below `end` in their list, and where the next
    /// are below: no other drawer can owe anything. A drawer that borrows all the while is not missed: where one is
    /// removed the last takes its place, which has been looked at.
    pub(super) fn borrowers_below(&self, end: usize) -> (usize, &[Drawer]) {
        let end = end.min(self.borrowers.len());
        let next = end.saturating_sub(SLICE);
        (next, &self.borrowers[next..end])
    }

    fn entry(&self, drawer: Drawer) -> Option<&Entry> {
        self.places.get(drawer.0)?.as_ref().map(|place| &place.entry)
    }

    /// The one place where what a drawer holds changes, and with it all that follows from it.
    fn set_held(&mut self, drawer: Drawer, held: Amount) {
        let Some(Some(place)) = self.places.get_mut(drawer.0) else { return };
        self.refused.unlist(drawer, &place.entry);
        self.sums.subtract(&place.entry);
        place.entry.held = held;
        self.sums.add(&place.entry);
        self.refused.list(drawer, &place.entry);
        match (place.entry.borrows(), place.borrower) {
            (true, None) => {
                place.borrower = Some(self.borrowers.len());
                self.borrowers.push(drawer);
            }
            (false, Some(position)) => {
                place.borrower = None;
                self.no_borrower(position);
            }
            _ => {}
        }
    }

    /// The borrower at `position` is none any more; the last takes its position.
    fn no_borrower(&mut self, position: usize) {
        self.borrowers.swap_remove(position);
        let moved = self.borrowers.get(position).map(|moved| moved.0);
        if let Some(Some(moved)) = moved.and_then(|number| self.places.get_mut(number)) {
            moved.borrower = Some(position);
        }
    }
}

/// `weight` of `weights` parts of `whole`, rounded down; nothing where nothing weighs.
fn part_of(whole: usize, weight: u32, weights: u64) -> usize {
    let parts = whole as u128 * u128::from(weight);
    // Lossless: no more than `whole`.
    usize::try_from(parts.checked_div(u128::from(weights)).unwrap_or(0)).unwrap_or(whole)
}

/// For `wanted`, `missing` has to be given back first: more than is wanted where a limit was lowered below
/// what is held. `ever` can be had if others give back all they may.
fn refusal(wanted: Amount, missing: Amount, ever: Amount) -> Refusal {
    let held = ever - (wanted - missing);
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

    /// All that others owe `drawer`, which misses `missing`.
    fn debts(ledger: &Ledger, drawer: Drawer, missing: Amount) -> Vec<(Drawer, Amount)> {
        let Some(claim) = ledger.claim(drawer, missing, TOTAL) else { return Vec::new() };
        let (_, all) = ledger.borrowers_below(usize::MAX);
        let debts = all.iter().map(|&other| (other, ledger.debt(claim, other)));
        debts.filter(|&(_, debt)| debt != Amount::ZERO).collect()
    }

    /// All that were refused and have more room now.
    fn with_room(ledger: &mut Ledger) -> Vec<User> {
        let mut users: Vec<User> = std::iter::from_fn(|| ledger.take_refused_with_room()).collect();
        users.sort_unstable();
        users
    }

    /// One that was refused is notified of what another leaves idle if that is due to it, and once.
    #[test]
    fn what_a_drawer_leaves_idle_is_for_those_that_may_claim_it() {
        let mut ledger = Ledger::new(TOTAL);
        let [keeps, other, wants, greedy] =
            [(); 4].map(|()| ledger.join(Terms::default()).unwrap());
        ledger.take(keeps, amount(50)).unwrap();
        ledger.take(other, amount(20)).unwrap();
        ledger.take(greedy, amount(30)).unwrap();
        let user = User { drawer: wants, number: 1 };
        for drawer in [wants, greedy] {
            assert!(ledger.take_or_await(User { drawer, number: 1 }, amount(10)).is_err());
        }
        let (little, enough) = (amount(9), amount(10));
        assert_eq!(ledger.take_refused_served_by(other, enough), None, "less than its due");
        assert_eq!(ledger.take_refused_served_by(keeps, little), None, "it would not do");
        assert_eq!(ledger.take_refused_served_by(keeps, enough), Some(user), "not too much");
        assert_eq!(ledger.take_refused_served_by(keeps, enough), None, "once");
    }

    /// Only what the device lacks serves one that a device has refused, whatever the budget has at the moment.
    #[test]
    fn what_is_idle_serves_one_by_what_has_refused_it() {
        let mut ledger = Ledger::new(Amount { bytes: 1000, regions: 100 });
        let [keeps, waits, third] = [(); 3].map(|()| ledger.join(Terms::default()).unwrap());
        let user = User { drawer: waits, number: 1 };
        let idle = Amount { bytes: 10, regions: 1 };
        ledger.take(keeps, Amount { bytes: 80, regions: 8 }).unwrap();
        ledger.await_room(user, Amount { bytes: 300, regions: 1 });
        ledger.note_device(user, RegisterError::TableFull { capacity: 8 });
        ledger.take(third, Amount { bytes: 800, regions: 0 }).unwrap();
        assert_eq!(ledger.take_refused_served_by(keeps, idle), Some(user));
        ledger.await_room(user, Amount { bytes: 300, regions: 1 });
        let error = RegisterError::PinnedMemoryLimit { limit_bytes: None, errno: 12 };
        ledger.note_device(user, error);
        assert_eq!(ledger.take_refused_served_by(keeps, idle), None, "a registration is no room");
    }

    #[test]
    fn those_to_whom_more_is_due_since_a_drawer_left_are_notified() {
        let mut ledger = Ledger::new(TOTAL);
        let [waits, keeps, goes] = [(); 3].map(|()| ledger.join(Terms::default()).unwrap());
        let user = User { drawer: waits, number: 1 };
        ledger.take(waits, amount(25)).unwrap();
        ledger.take(keeps, amount(75)).unwrap();
        assert!(ledger.take_or_await(user, amount(20)).is_err());
        assert_eq!(ledger.claim(waits, amount(20), TOTAL).map(|_| ()), None);
        ledger.leave(goes);
        assert!(ledger.claim(waits, amount(20), TOTAL).is_some());
        assert_eq!(with_room(&mut ledger), [user]);
        assert!(ledger.take_or_await(user, amount(20)).is_err());
        assert!(!ledger.has_room_for_refused(), "once");
        let comes = ledger.join(Terms::default()).unwrap();
        ledger.leave(comes);
        assert!(!ledger.has_room_for_refused(), "as much as before");
    }

    /// What was not used makes a user notified that it was kept from, and is no release.
    #[test]
    fn what_comes_back_unused_is_not_released() {
        let mut ledger = Ledger::new(TOTAL);
        let [drawer, tries] = [(); 2].map(|()| ledger.join(Terms::default()).unwrap());
        let waits = User { drawer, number: 1 };
        ledger.take(tries, amount(100)).unwrap();
        assert!(ledger.take_or_await(waits, amount(20)).is_err());
        let before = ledger.released();
        ledger.give_unused(tries, amount(60));
        assert_eq!(with_room(&mut ledger), [waits]);
        ledger.await_room(waits, amount(1));
        assert!(!ledger.has_room_for_refused(), "no more than now");
        assert_eq!(ledger.released(), before);
        ledger.give(tries, amount(1));
        assert_eq!(with_room(&mut ledger), [waits]);
        assert_ne!(ledger.released(), before);
    }

    #[test]
    fn a_drawer_that_was_refused_is_notified_when_there_is_more() {
        let mut ledger = Ledger::new(TOTAL);
        let [drawer, holds, other] = [(); 3].map(|()| ledger.join(Terms::default()).unwrap());
        let asks = User { drawer, number: 1 };
        ledger.take(holds, amount(90)).unwrap();
        assert!(ledger.take_or_await(asks, amount(20)).is_err());
        assert!(!ledger.has_room_for_refused());
        // What is taken and comes back makes no difference, nor what the drawer gets itself.
        ledger.take(other, amount(5)).unwrap();
        ledger.give(other, amount(5));
        ledger.take_or_await(asks, amount(5)).unwrap();
        ledger.give(drawer, amount(5));
        assert!(!ledger.has_room_for_refused());
        ledger.give(holds, amount(1));
        assert!(ledger.has_room_for_refused());
        // Also if it is refused again before it is notified.
        assert!(ledger.take_or_await(asks, amount(20)).is_err());
        assert_eq!(with_room(&mut ledger), [asks]);
        assert!(!ledger.has_room_for_refused());
        // A refusal that another's brief use has caused counts as well.
        ledger.take(other, amount(5)).unwrap();
        assert!(ledger.take_or_await(asks, amount(8)).is_err());
        ledger.give(other, amount(5));
        assert_eq!(with_room(&mut ledger), [asks]);
        // A larger budget, and a minimum that is kept no longer.
        assert!(ledger.take_or_await(asks, amount(20)).is_err());
        ledger.set_total(amount(101));
        assert_eq!(with_room(&mut ledger), [asks]);
        let keeps = ledger.join(terms(5, 5, 1)).unwrap();
        assert!(ledger.take_or_await(asks, amount(20)).is_err());
        ledger.leave(keeps);
        assert_eq!(with_room(&mut ledger), [asks]);
        // One that is gone is not.
        assert!(ledger.take_or_await(asks, amount(20)).is_err());
        ledger.leave(drawer);
        ledger.give(holds, amount(50));
        assert_eq!(with_room(&mut ledger), []);
    }

    /// The one that was refused, when another has given back, and not the one that gave.
    #[test]
    fn of_two_that_draw_together_each_is_notified_of_what_the_other_gives_back() {
        let mut ledger = Ledger::new(TOTAL);
        let drawer = ledger.join(Terms::default()).unwrap();
        let [first, second] = [1, 2].map(|number| User { drawer, number });
        ledger.take_or_await(first, amount(90)).unwrap();
        assert!(ledger.take_or_await(second, amount(20)).is_err());
        assert!(!ledger.has_room_for_refused());
        ledger.give(drawer, amount(1));
        assert_eq!(with_room(&mut ledger), [second]);
        // What it tries in vain is no room for itself, nor for one that was refused the same.
        for user in [first, second] {
            assert!(ledger.take_or_await(user, amount(20)).is_err());
        }
        ledger.take_or_await(second, amount(5)).unwrap();
        ledger.give(drawer, amount(5));
        assert!(!ledger.has_room_for_refused());
        ledger.give(drawer, amount(89));
        assert_eq!(with_room(&mut ledger), [first, second]);
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
        assert_eq!(debts(&ledger, heavy, missing), [(light, amount(10))]);
        // 25 of 100 are due to the lighter one: no other drawer can make it go below.
        assert_eq!(debts(&ledger, heavy, amount(75)), [(light, amount(75))]);
        assert_eq!(debts(&ledger, heavy, amount(76)), []);
        ledger.give(light, amount(75));
        ledger.take(heavy, amount(75)).unwrap();
        assert_eq!(debts(&ledger, heavy, amount(1)), []);
    }

    /// Also where one in a slice that is not reached yet stops borrowing meanwhile, and another takes its place.
    #[test]
    fn borrowers_are_looked_at_in_slices_and_none_is_missed() {
        let mut ledger = Ledger::new(Amount::EVERYTHING);
        let drawers: Vec<Drawer> =
            (0..10 * SLICE).map(|_| ledger.join(Terms::default()).unwrap()).collect();
        drawers.iter().for_each(|&drawer| ledger.take(drawer, amount(1)).unwrap());
        let (mut found, mut end) = (Vec::new(), usize::MAX);
        while end > 0 {
            let (next, slice) = ledger.borrowers_below(end);
            assert!(slice.len() <= SLICE);
            found.extend_from_slice(slice);
            end = next;
            ledger.give(drawers[end / 2], amount(1));
        }
        assert!(drawers.iter().all(|it| ledger.held_by(*it) == Amount::ZERO || found.contains(it)));
    }

    #[test]
    fn terms_that_cannot_be_kept_are_refused() {
        let mut ledger = Ledger::new(TOTAL);
        for impossible in [terms(2, 1, 1), terms(0, 0, 1), terms(101, 200, 1)] {
            assert!(ledger.join(impossible).is_err(), "{impossible:?}");
        }
        let first = ledger.join(terms(60, 100, 1)).unwrap();
        assert!(matches!(ledger.join(terms(41, 100, 1)), Err(NotJoined::Kept { .. })));
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
        // What is held beyond the limit has to go as well.
        assert_eq!((refused.missing, refused.exhausted.allowed), (amount(40), 50));
        ledger.give(only, amount(40));
        ledger.take(only, amount(10)).unwrap();
        assert_eq!(ledger.held(), amount(50));
    }

    /// Where more is held than the total, no room comes of one that grows; but what others owe has grown.
    #[test]
    fn one_to_which_more_is_due_by_a_total_that_grows_is_notified() {
        let mut ledger = Ledger::new(TOTAL);
        let [holds, waits] = [(); 2].map(|()| ledger.join(Terms::default()).unwrap());
        ledger.take(holds, TOTAL).unwrap();
        ledger.set_total(amount(50));
        let user = User { drawer: waits, number: 1 };
        ledger.take_or_await(user, amount(30)).unwrap_err();
        assert!(!ledger.has_room_for_refused());
        assert!(ledger.claim(waits, amount(30), ledger.total()).is_none());
        ledger.set_total(amount(80));
        assert!(ledger.claim(waits, amount(30), ledger.total()).is_some());
        assert_eq!(with_room(&mut ledger), [user]);
        ledger.take_or_await(user, amount(30)).unwrap_err();
        ledger.set_total(amount(60));
        assert!(!ledger.has_room_for_refused(), "less is due");
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
        assert!(ledger.take(one, amount(1)).is_err());
        assert_eq!(ledger.due(one, Amount::EVERYTHING).bytes, usize::MAX / 2);
        let weightless = ledger.join(terms(0, 5, 0)).unwrap();
        assert_eq!(ledger.due(weightless, TOTAL), Amount::ZERO);
    }

    /// What the ledger keeps besides its entries follows from them.
    fn agree_with_a_count(ledger: &Ledger) -> Result<(), TestCaseError> {
        let mut sums = Sums::default();
        let mut borrowers = Vec::new();
        for (number, place) in ledger.places.iter().enumerate() {
            let Some(Place { entry, borrower }) = place else { continue };
            sums.add(entry);
            borrowers.extend(entry.borrows().then_some(Drawer(number)));
            let listed = borrower.map(|position| ledger.borrowers[position]);
            prop_assert_eq!(listed, entry.borrows().then_some(Drawer(number)));
        }
        prop_assert_eq!(ledger.sums, sums);
        prop_assert_eq!(ledger.borrowers.len(), borrowers.len());
        Ok(())
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
        /// Compared with a ledger that keeps every grant by itself and asks the definition of each.
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
                agree_with_a_count(&ledger)?;
            }
        }

        /// The sums and the list of borrowers, compared with a count of all drawers, while drawers come
        /// and go, overdraw without bounds and give back what they never took.
        #[test]
        fn sums_agree_with_a_count_of_all_drawers(
            steps in prop::collection::vec((0..5_u8, any::<usize>(), any::<u8>()), 1..200),
        ) {
            let mut ledger = Ledger::new(TOTAL);
            let mut drawers: Vec<Drawer> = Vec::new();
            for (what, which, much) in steps {
                let of = drawers.get(which % drawers.len().max(1)).copied();
                let some = if much == 0 { Amount::EVERYTHING } else { amount(much.into()) };
                match (what, of) {
                    (0, _) => drawers.extend(ledger.join(terms(which % 4, 90, u32::from(much) % 5))),
                    (1, Some(drawer)) => ledger.overdraw(drawer, some),
                    (2, Some(drawer)) => ledger.give(drawer, some),
                    (3, Some(drawer)) => drop(ledger.take(drawer, some)),
                    (4, Some(drawer)) if much > 200 => {
                        ledger.leave(drawer);
                        drawers.retain(|&other| other != drawer);
                    }
                    _ => {}
                }
                agree_with_a_count(&ledger)?;
            }
        }

        /// A drawer that asks within its due finds debtors that owe all of it, unless it is free.
        #[test]
        fn a_drawer_can_have_what_is_within_its_due(
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
                for (debtor, debt) in debts(&ledger, asker, missing) {
                    ledger.give(debtor, debt);
                }
                prop_assert!(ledger.take(asker, wanted).is_ok());
            }
        }
    }

    /// One that holds less than its minimum has more room once it holds less, although others hold what they held.
    #[test]
    fn one_that_gave_back_is_asked_again_at_the_level_of_its_refusal() {
        let amount = |bytes| Amount { bytes, regions: 0 };
        for gives_late in [false, true] {
            let mut ledger = Ledger::new(Amount { bytes: 100, regions: 100 });
            let waits = ledger.join(Terms { minimum: amount(50), ..Terms::default() }).unwrap();
            let other = ledger.join(Terms::default()).unwrap();
            ledger.take(waits, amount(30)).unwrap();
            ledger.take(other, amount(40)).unwrap();
            ledger.await_room(User { drawer: waits, number: 1 }, amount(1));
            let mut steps: [&dyn Fn(&mut Ledger); 2] =
                [&|it| it.give(waits, amount(1)), &|it| it.take(other, amount(5)).unwrap()];
            if gives_late {
                steps.reverse();
            }
            steps.iter().for_each(|step| step(&mut ledger));
            assert!(!ledger.has_room_for_refused());
            ledger.give(other, amount(5));
            assert!(ledger.has_room_for_refused());
        }
    }

    /// With drawers that hold less and more than their minimums, a total that changes, and drawers that come and go.
    #[test]
    fn the_refused_are_asked_whenever_one_has_more_room() {
        let mut state = 0x9e37_79b9_u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % bound
        };
        let (mut notified, mut refused) = (0, 0);
        for _ in 0..if cfg!(miri) { 3 } else { 300 } {
            let mut ledger = Ledger::new(Amount { bytes: 100, regions: 40 });
            let mut drawers: Vec<Drawer> = Vec::new();
            // Of those that wait: to which more is due since a drawer left or the total grew, what was due to each, and what
            // has refused it since it was notified.
            let (mut due_more, mut dues) = (BTreeSet::new(), BTreeMap::new());
            let (mut by_budget, mut by_device) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..100 {
                let amount = Amount { bytes: next(30), regions: next(10) };
                let place = next(5);
                let user =
                    drawers.get(place).map(|&drawer| User { drawer, number: next(2) as u64 });
                let (total, step) = (ledger.total, next(14));
                match (step, user) {
                    (0, _) | (_, None) => {
                        let minimum =
                            Amount { bytes: amount.bytes / 3, regions: amount.regions / 3 };
                        let maximum =
                            minimum + Amount { bytes: 30 + next(40), regions: 5 + next(90) };
                        let joined = ledger.join(Terms { minimum, maximum, ..Terms::default() });
                        drawers.extend(joined.ok());
                    }
                    (1, Some(_)) => {
                        ledger.leave(drawers.swap_remove(place));
                    }
                    (2, Some(user)) => ledger.forget(user),
                    (3, Some(_)) => {
                        ledger.set_total(Amount { bytes: next(150), regions: next(60) });
                    }
                    (4, Some(user)) => ledger.overdraw(user.drawer, amount),
                    (5 | 6, Some(user)) => {
                        ledger.await_room(user, amount);
                        dues.insert(user, ledger.due(user.drawer, ledger.total));
                    }
                    (7 | 8, Some(user)) => ledger.give(user.drawer, amount),
                    (9, Some(user)) => {
                        let error = RegisterError::TableFull { capacity: 1 };
                        ledger.note_device(user, error);
                        by_device.insert(user);
                    }
                    (_, Some(user)) => {
                        if ledger.take_or_await(user, amount).is_err() {
                            refused += 1;
                            by_budget.insert(user);
                            dues.insert(user, ledger.due(user.drawer, ledger.total));
                        }
                    }
                }
                if step == 1 && user.is_some() || !ledger.total.fits(total) {
                    let has_more = |user: &&User| {
                        // One that has not tried since it was notified a device may have refused.
                        by_device.contains(*user)
                            || !by_budget.contains(*user)
                            || !ledger.due(user.drawer, ledger.total).fits(dues[*user])
                    };
                    due_more.extend(ledger.refused.rooms.keys().filter(has_more).copied());
                }
                let has_more_room = |(user, room): &(&User, &Amount)| {
                    ledger.entry(user.drawer).is_some_and(|entry| !ledger.room(entry).fits(**room))
                };
                let rooms = &ledger.refused.rooms;
                for those_that_wait in [&mut due_more, &mut by_budget, &mut by_device] {
                    those_that_wait.retain(|user| rooms.contains_key(user));
                }
                let is_expected =
                    |it: &(&User, &Amount)| has_more_room(it) || due_more.contains(it.0);
                let expected: Vec<User> =
                    rooms.iter().filter(is_expected).map(|it| *it.0).collect();
                assert_eq!(ledger.has_room_for_refused(), !expected.is_empty());
                if next(5) == 0 {
                    notified += expected.len();
                    assert_eq!(with_room(&mut ledger), expected);
                    let rooms = &ledger.refused.rooms;
                    for those_that_wait in [&mut due_more, &mut by_budget, &mut by_device] {
                        those_that_wait.retain(|user| rooms.contains_key(user));
                    }
                }
            }
        }
        assert!(notified > 1 && refused > 10, "{notified} notified, {refused} refused");
    }
}
