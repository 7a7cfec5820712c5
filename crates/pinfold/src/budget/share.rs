//! One budget for several caches, pools and reservations of a process.

use super::discovery::{Beyond, Bound, CurrentLimits, Discovery, Kind};
use super::figure::SharedWith;
use super::ledger::{Drawer, Ledger, NotJoined, Refuser, SLICE, Terms, User};
use super::readings::{Readings, Rings};
use super::watermark::{Listener, ListenerId, Marks, Watermark, WatermarkEvent};
use crate::fork_mark::ForkMark;
use pinfold_core::foreign::{ForeignList, discard, runs_through};
use pinfold_core::{
    Account, Amount, Exhausted, Lender, Limit, Recalls, Refusal, RegisterError, RegistrarLimits,
};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// How many bytes and registrations there are, for all that draw on them.
///
/// Clones are the same budget. In a forked child it grants nothing: what is pinned is the
/// parent's.
#[derive(Clone, Debug)]
pub struct Budget {
    inner: Arc<Inner>,
}

/// Why there is no such budget, or no such share of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// A budget of no bytes or no registrations: nothing was asked for, or nothing is left.
    #[error(fmt = nothing_left)]
    Nothing {
        /// What there would have been.
        amount: Amount,
        /// What leaves nothing, if that is not the caller.
        bound: Option<Bound>,
    },
    /// The limits could not be read, so what there is would be a guess.
    #[error(
        "/proc/self/limits, /proc/self/status and /proc/meminfo do not say what this process may \
         pin: mount /proc, or say what the budget is"
    )]
    Unread,
    /// More than the machine can ever give.
    #[error(
        "a budget of {bytes} bytes can never be had: {} is {} bytes, for {} ({} beyond); ask for \
         less, or raise it{}",
        .bound.source,
        .bound.bytes,
        .bound.shared_with,
        .bound.beyond,
        how_to_raise(.bound)
    )]
    Impossible {
        /// The bytes asked for.
        bytes: usize,
        /// What is in the way.
        bound: Bound,
    },
    /// More registrations than the device has.
    #[error(
        "a budget of {regions} registrations can never be had: the device, or its table, has \
         {max_regions}; ask for less, or make the table larger"
    )]
    Registrations {
        /// The registrations asked for.
        regions: usize,
        /// The device's.
        max_regions: usize,
    },
    /// A minimum above the maximum, or a maximum of nothing.
    #[error(
        "a minimum of {:?} and a maximum of {:?} contradict each other, or grant nothing",
        .terms.minimum,
        .terms.maximum
    )]
    Terms {
        /// What was asked for.
        terms: Terms,
    },
    /// The minimum cannot be kept: others hold it, or have been promised it.
    #[error(
        "{} bytes and {} registrations cannot be kept for one drawer: {} and {} are neither held \
         nor promised; ask for less, end leases, or raise the budget",
        .minimum.bytes,
        .minimum.regions,
        .free.bytes,
        .free.regions
    )]
    Kept {
        /// What was asked for.
        minimum: Amount,
        /// What is neither held nor reserved.
        free: Amount,
    },
    /// The page that tells a forked child could not be made.
    #[error(
        "the page that tells a forked child could not be made: {}",
        io::Error::from_raw_os_error(*.errno)
    )]
    ForkMark {
        /// The kernel's error number.
        errno: i32,
    },
    /// This is a forked child of the process whose budget it is.
    #[error("this is a forked child, whose parent's the budget is: make a new one here")]
    Forked,
}

/// Where a budget's figures come from, so that they can be looked up again.
#[derive(Debug)]
struct Source {
    root: PathBuf,
    kind: Kind,
    max_regions: usize,
    /// What the caller asked for, if not for all there is.
    asked: Option<Amount>,
    /// What counted against the limit before anything was drawn, in bytes, but for rings of io_uring,
    /// which may grow.
    elsewhere: u64,
    /// What bounds the budget besides `RLIMIT_MEMLOCK`, in bytes.
    beside: u64,
}

struct Inner {
    /// Guards the books, for some arithmetic. Rank: inside every cache's writer lock; nothing is
    /// taken and no other code called under it. What a cache asks under its own lock allocates a node of a sorted list at most.
    state: Mutex<State>,
    /// Whether a listener may have to be called.
    due: AtomicBool,
    /// Whether a user that was refused may take more, and is to be notified.
    room_made: AtomicBool,
    /// Whether any user was refused and has not been notified since.
    has_refused: AtomicBool,
    fork_mark: ForkMark,
    source: Option<Source>,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    /// What the total follows from, if the budget was discovered.
    readings: Readings,
    marks: Marks,
    /// What gives back what a user holds. In order, so that they are gone through with the lock released in between.
    lenders: BTreeMap<User, Vec<Weak<dyn Lender>>>,
}

/// Lenders that are about to be called: the last reference to one may be among them, and one of them may panic.
type Lenders = ForeignList<Arc<dyn Lender>>;

thread_local! {
    /// A listener is running on this thread.
    static TELLING: Cell<bool> = const { Cell::new(false) };
    /// How many calls on this thread, each inside the one before, have listeners called later.
    static QUIET: Cell<u32> = const { Cell::new(0) };
    /// How many lenders are asked on this thread, each inside the one before.
    static ASKING: Cell<u32> = const { Cell::new(0) };
}

/// Asks lenders in turn until one has given something. One that draws itself has others asked, which may draw in their
/// turn: not without end, because each stands on the thread's stack.
fn ask_in_turn(mut lenders: impl Iterator<Item = (Lenders, Amount)>) -> bool {
    const DEEPEST: u32 = 2;
    /// Also behind a lender that panics.
    struct Asking;
    impl Drop for Asking {
        fn drop(&mut self) {
            ASKING.set(ASKING.get() - 1);
        }
    }
    let depth = ASKING.get();
    if depth == DEEPEST {
        return false;
    }
    ASKING.set(depth + 1);
    let _asking = Asking;
    lenders.any(|(lenders, missing)| lenders.iter().any(|lender| lender.give_back(missing)))
}

/// As long as this lives, no listener is called on this thread.
struct Quiet;

impl Quiet {
    fn begin() -> Self {
        QUIET.set(QUIET.get() + 1);
        Self
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.set(QUIET.get() - 1);
    }
}

/// A moderate part of what cannot be exceeded without harm to others: half.
const fn half(bytes: u64) -> u64 {
    bytes / 2
}

/// Bounds that refuse count in full; of those that kill or throttle, half is left to everything
/// that is not pinned.
fn beside_memlock(discovery: &Discovery, kind: Kind) -> u64 {
    let bounds = discovery.bounds(kind).into_iter();
    let harmful = bounds.filter(|bound| bound.beyond != Beyond::Refused);
    harmful.map(|bound| half(bound.bytes)).min().unwrap_or(u64::MAX)
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Source {
    fn new(
        root: &Path,
        kind: Kind,
        limits: RegistrarLimits,
        asked: Option<Amount>,
    ) -> (Self, Readings, Discovery) {
        let mut readings = Readings::default();
        let (number, _) = readings.begin(Rings::Always);
        let discovery = Discovery::below(root);
        readings.note(number, CurrentLimits::of(&discovery, kind));
        let source = Self {
            root: root.to_owned(),
            kind,
            max_regions: most_regions(kind, limits, &discovery),
            asked,
            elsewhere: discovery.counted_in_process(kind),
            beside: beside_memlock(&discovery, kind),
        };
        (source, readings, discovery)
    }

    /// What there is by `readings`, within what was asked for. `None` if it cannot be known.
    fn total(&self, readings: &Readings) -> Option<Amount> {
        let memlock = readings.memlock()?;
        let elsewhere = self.elsewhere.saturating_add(readings.rings());
        let bytes = memlock.saturating_sub(elsewhere).min(self.beside);
        let found = Amount { bytes: to_usize(bytes), regions: self.max_regions };
        match self.asked {
            None => Some(found).filter(|_| bytes < u64::MAX),
            // A program that asked for more than is prudent got it, up to what is possible.
            Some(asked) => Some(Amount { bytes: to_usize(memlock).min(asked.bytes), ..asked }),
        }
    }
}

/// How many registrations the device has, or the process has mappings for.
fn most_regions(kind: Kind, limits: RegistrarLimits, discovery: &Discovery) -> usize {
    let mappings = discovery.free_mappings().filter(|_| kind == Kind::Mlock);
    // Locking a part of a mapping makes two more of it.
    let by_mappings = mappings.map_or(usize::MAX, |free| to_usize(free / 2));
    limits.max_regions.min(by_mappings)
}

impl Budget {
    /// A budget of exactly this much. The kernel is not asked whether it is there.
    ///
    /// # Errors
    ///
    /// [`BudgetError::Nothing`] for no bytes or no registrations.
    pub fn new(amount: Amount) -> Result<Self, BudgetError> {
        Self::with(amount, None, None, Readings::default())
    }

    /// All that this process may prudently pin with a registrar of this kind and these limits.
    ///
    /// That is the least of: `RLIMIT_MEMLOCK` where it holds, less what this process has pinned already,
    /// rings of io_uring included, so make those first;
    /// half of what the control groups and the machine have, because beyond those no process is
    /// refused but some are slowed down or killed. What the user's other processes have pinned by
    /// io_uring, and their rings, count against the same limit and are not subtracted, because they come and go: give each
    /// of several processes its part ([`Budget::new`]). Memory is not looked for twice: what is pinned is
    /// memory that the program has anyway.
    ///
    /// # Errors
    ///
    /// [`BudgetError::Nothing`], with what leaves nothing; [`BudgetError::Unread`].
    pub fn discover(kind: Kind, limits: RegistrarLimits) -> Result<Self, BudgetError> {
        Self::discover_below(Path::new("/"), kind, limits)
    }

    /// As [`discover`](Self::discover), with `/proc` and `/sys` below `root`.
    ///
    /// # Errors
    ///
    /// As [`discover`](Self::discover).
    pub fn discover_below(
        root: &Path,
        kind: Kind,
        limits: RegistrarLimits,
    ) -> Result<Self, BudgetError> {
        let (source, readings, discovery) = Source::new(root, kind, limits, None);
        let bound = discovery.bounds(kind).into_iter().next();
        let mut total = source.total(&readings).ok_or(BudgetError::Unread)?;
        if total.bytes < limits.page_bytes {
            total.bytes = 0;
        }
        Self::with(total, bound, Some(source), readings)
    }

    /// A budget of `amount`, if that can be.
    ///
    /// # Errors
    ///
    /// [`BudgetError::Impossible`] and [`BudgetError::Registrations`] for more than the limits, the
    /// machine or the device could give if no other process took any.
    pub fn within(
        amount: Amount,
        kind: Kind,
        limits: RegistrarLimits,
    ) -> Result<Self, BudgetError> {
        Self::within_below(Path::new("/"), amount, kind, limits)
    }

    /// As [`within`](Self::within), with `/proc` and `/sys` below `root`.
    ///
    /// # Errors
    ///
    /// As [`within`](Self::within).
    pub fn within_below(
        root: &Path,
        amount: Amount,
        kind: Kind,
        limits: RegistrarLimits,
    ) -> Result<Self, BudgetError> {
        let (source, readings, discovery) = Source::new(root, kind, limits, Some(amount));
        let bound = discovery.bounds(kind).into_iter().next();
        if let Some(bound) = bound.filter(|bound| amount.bytes as u64 > bound.bytes) {
            return Err(BudgetError::Impossible { bytes: amount.bytes, bound });
        }
        if amount.regions > source.max_regions {
            let (regions, max_regions) = (amount.regions, source.max_regions);
            return Err(BudgetError::Registrations { regions, max_regions });
        }
        Self::with(amount, None, Some(source), readings)
    }

    fn with(
        total: Amount,
        bound: Option<Bound>,
        source: Option<Source>,
        readings: Readings,
    ) -> Result<Self, BudgetError> {
        if total.bytes == 0 || total.regions == 0 {
            return Err(BudgetError::Nothing { amount: total, bound });
        }
        let fork_mark = ForkMark::new(1).map_err(|why| BudgetError::ForkMark { errno: why.0 })?;
        let state = Mutex::new(State {
            ledger: Ledger::new(total),
            readings,
            marks: Marks::default(),
            lenders: BTreeMap::new(),
        });
        let (due, room_made, has_refused) = Default::default();
        let inner = Inner { state, due, room_made, has_refused, fork_mark, source };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A share of this budget, for one cache or one pool.
    ///
    /// # Errors
    ///
    /// [`BudgetError::Terms`], and [`BudgetError::Kept`] for a minimum that is not free.
    pub fn share(&self, terms: Terms) -> Result<Arc<Share>, BudgetError> {
        let drawer = self.inner.changed(|state| state.ledger.join(terms));
        let drawer = drawer.ok_or(BudgetError::Forked)?.map_err(|why| match why {
            NotJoined::Terms => BudgetError::Terms { terms },
            NotJoined::Kept { free } => BudgetError::Kept { minimum: terms.minimum, free },
        })?;
        Ok(Arc::new(Share { budget: self.clone(), drawer }))
    }

    /// As [`share`](Self::share); others give up idle registrations if that makes the minimum free. None are asked for what
    /// the minimums of others leave no room for.
    pub(super) fn share_recalled(&self, terms: Terms) -> Result<Arc<Share>, BudgetError> {
        let mut recalls = Recalls::new();
        loop {
            let refused = match self.share(terms) {
                Err(BudgetError::Kept { minimum, free }) => BudgetError::Kept { minimum, free },
                other => return other,
            };
            let BudgetError::Kept { minimum, free } = refused else { return Err(refused) };
            let could_be = |state: &State| minimum.fits(state.ledger.total() - state.ledger.kept());
            if !self.inner.read(could_be).unwrap_or(false) {
                return Err(refused);
            }
            let gave = || {
                let borrowers = self.inner.of_borrowers(|_, drawer| drawer).into_iter();
                let lenders = borrowers.flat_map(|drawer| self.inner.lenders_of(drawer));
                ask_in_turn(lenders.map(|lenders| (lenders, minimum - free)))
            };
            if !recalls.ask(gave) {
                return Err(refused);
            }
        }
    }

    /// Whether this is a forked child of the process whose budget it is.
    pub(super) fn forked(&self) -> bool {
        self.inner.fork_mark.forked()
    }

    /// The whole of it, as it is now.
    pub fn total(&self) -> Amount {
        self.inner.read(|state| state.ledger.total()).unwrap_or_default()
    }

    /// What all drawers hold now.
    pub fn held(&self) -> Amount {
        self.inner.read(|state| state.ledger.held()).unwrap_or_default()
    }

    /// Calls `listener` whenever the watermark is reached or left, and whenever the budget changes
    /// or is refused by the device, until the result is dropped.
    ///
    /// It runs with no lock held, on the thread whose get, release or
    /// [`refresh`](Self::refresh) made the difference, and may use every cache and pool. Telling
    /// allocates nothing. Several changes between two calls are told as one. A panic in it is
    /// caught. What it does itself is told when it has returned (of another budget, with the next
    /// get or release there), except refusals that it meets: they are not told. Listeners that reach and leave
    /// marks without end are told so of some turns, and of the rest with the next get or release.
    #[must_use = "dropping it ends the watch"]
    pub fn watch(
        &self,
        watermark: Watermark,
        listener: impl Fn(&WatermarkEvent) + Send + Sync + 'static,
    ) -> BudgetWatch {
        let listener: Listener = Arc::new(listener);
        let id = self.inner.changed(|state| state.marks.add(watermark, listener));
        self.inner.settle();
        BudgetWatch { inner: Arc::clone(&self.inner), id }
    }

    /// Looks the limits up again, also upwards, for a budget that was discovered. Bounds other than
    /// `RLIMIT_MEMLOCK` stay as they were found first. Costs the reading of two files; for io_uring, also
    /// of the process's list of mappings, for rings that came or grew.
    ///
    /// Whether `CAP_IPC_LOCK` waives the limit is read of the calling thread, as the kernel checks it: in a program whose
    /// threads differ in it, the thread that looked last decides for all.
    ///
    /// No call is needed for a limit that was lowered: the next registration that is refused looks it up. For rings it
    /// does so once a second at most.
    pub fn refresh(&self) -> Amount {
        self.inner.recheck(Rings::Always);
        self.inner.settle();
        self.total()
    }
}

impl State {
    /// Notes the present height; true if a listener is to be called.
    fn note(&mut self) -> bool {
        self.marks.note(self.ledger.held(), self.ledger.total())
    }
}

impl Inner {
    /// `None` in a forked child, where a thread that does not exist may hold the lock.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        if self.fork_mark.forked() {
            return None;
        }
        // A panic under the lock is one of arithmetic, before anything is changed.
        Some(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> Option<T> {
        self.lock().map(|state| read(&state))
    }

    /// What `of` says of each drawer that holds more than its minimum. The lock is held for some of them at a time.
    fn of_borrowers<T>(&self, of: impl Fn(&Ledger, Drawer) -> T) -> Vec<T> {
        let (mut all, mut end) = (Vec::new(), usize::MAX);
        while end > 0 {
            // Grows while the lock is free.
            all.reserve(SLICE);
            let next = self.read(|state| {
                let (next, borrowers) = state.ledger.borrowers_below(end);
                all.extend(borrowers.iter().map(|&drawer| of(&state.ledger, drawer)));
                next
            });
            end = next.unwrap_or(0);
        }
        all
    }

    fn lenders_of(&self, drawer: Drawer) -> impl Iterator<Item = Lenders> {
        self.lenders_in(User::all_of(drawer))
    }

    /// The lenders of these users, one user's after the other's: the lock is held to look up one.
    fn lenders_in(&self, users: RangeInclusive<User>) -> impl Iterator<Item = Lenders> {
        let mut next = Some(*users.start());
        std::iter::from_fn(move || {
            let first = next?;
            let found = self.read(|state| {
                let mut left = state.lenders.range(first..=*users.end());
                let (_, lenders) = left.next()?;
                let lenders = lenders.iter().filter_map(Weak::upgrade).collect();
                Some((ForeignList::new(lenders), left.next().map(|(&user, _)| user)))
            });
            let (lenders, following) = found.flatten()?;
            next = following;
            Some(lenders)
        })
    }

    /// Runs `change` under the lock, then notes whether a listener or a drawer is to be called.
    fn changed<T>(&self, change: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut state = self.lock()?;
        let result = change(&mut state);
        if state.note() {
            // Relaxed: the thread that changed something settles itself; others need not see
            // it.
            self.due.store(true, Ordering::Relaxed);
        }
        if state.ledger.has_room_for_refused() {
            // Relaxed: as above.
            self.room_made.store(true, Ordering::Relaxed);
        }
        // Relaxed: see `ShareAccount::is_awaited`; stored under the lock, as every store is.
        self.has_refused.store(state.ledger.refused() > 0, Ordering::Relaxed);
        Some(result)
    }

    /// Not from within a listener, which would call itself without end: its caller goes on
    /// to report what it did.
    ///
    /// What listeners themselves make due is theirs to end: of that so much is told here, and the rest with the
    /// next change.
    fn settle(&self) {
        self.notify_refused();
        // Relaxed: as for the store.
        if self.due.load(Ordering::Relaxed) && !TELLING.get() && QUIET.get() == 0 {
            for _ in 0..self.read(|state| state.marks.most_at_once()).unwrap_or_default() {
                let Some((listener, told)) = self.next_due() else { return };
                TELLING.set(true);
                // One that panics harms no other. It goes behind that: its watch may have ended meanwhile, and what
                // it captured may panic too.
                let _ran = runs_through(|| listener(&told));
                discard(listener);
                TELLING.set(false);
            }
        }
    }

    /// Notifies users that were refused and may take more now. Also from within a listener, and while others have
    /// listeners called later: the thread that waits for the room may be one that the listener waits for.
    ///
    /// As many as were refused when this begins. What makes more room meanwhile settles behind it, so no user is forgotten, and
    /// this thread does not go on for as long as others do so.
    fn notify_refused(&self) {
        // Relaxed: as for the store.
        if !self.room_made.load(Ordering::Relaxed) {
            return;
        }
        // One more finds that none is left.
        for _ in 0..=self.read(|state| state.ledger.refused()).unwrap_or_default() {
            let Some(user) = self.take_refused_with_room() else { return };
            self.notify(user);
        }
    }

    /// Notifies users that were refused and get what they want if they ask `lender` for what is `idle` there: as many as
    /// were refused when this begins.
    fn notify_of_idle(&self, lender: Drawer, idle: Amount) {
        for _ in 0..self.read(|state| state.ledger.refused()).unwrap_or_default() {
            let served = self.changed(|state| state.ledger.take_refused_served_by(lender, idle));
            let Some(user) = served.flatten() else { return };
            self.notify(user);
        }
    }

    fn notify(&self, user: User) {
        for lender in self.lenders_in(user..=user).flat_map(ForeignList::into_vec) {
            // One that panics keeps no other from being notified.
            let _ran = runs_through(|| lender.room_made());
            discard(lender);
        }
    }

    fn take_refused_with_room(&self) -> Option<User> {
        let mut state = self.lock()?;
        let user = state.ledger.take_refused_with_room();
        // Relaxed: stored under the lock, as every store is.
        self.room_made.store(user.is_some(), Ordering::Relaxed);
        user
    }

    fn next_due(&self) -> Option<(Listener, WatermarkEvent)> {
        let mut state = self.lock()?;
        let Some((listener, notice)) = state.marks.next_due() else {
            // Relaxed: stored under the lock, as every store is, so that none is overwritten that
            // was made since.
            self.due.store(false, Ordering::Relaxed);
            return None;
        };
        let told =
            WatermarkEvent { notice, held: state.ledger.held(), total: state.ledger.total() };
        Some((listener, told))
    }

    /// Adapts the total to the limits as they are. True if it is another one now.
    fn recheck(&self, rings: Rings) -> bool {
        let Some(source) = &self.source else { return false };
        let begun = self.lock().map(|mut state| state.readings.begin(rings));
        let Some((number, reads_rings)) = begun else { return false };
        let found = CurrentLimits::below(&source.root, source.kind, reads_rings);
        let changed = self.changed(|state| {
            state.readings.note(number, found);
            let (from, to) = (state.ledger.total(), source.total(&state.readings)?);
            if from == to {
                return None;
            }
            state.ledger.set_total(to);
            state.marks.note_change(from);
            Some((from, to))
        });
        let Some((from, to)) = changed.flatten() else { return false };
        for lenders in self.lenders_in(User::all()) {
            // One that panics keeps no other from being told.
            lenders.iter().for_each(|it| _ = runs_through(|| it.budget_changed(from, to)));
        }
        true
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let books = self.read(|state| (state.ledger.total(), state.ledger.held()));
        f.debug_struct("Inner").field("total_and_held", &books).finish_non_exhaustive()
    }
}

/// A watch over a budget; dropping it ends it. A listener that runs meanwhile ends by itself.
pub struct BudgetWatch {
    inner: Arc<Inner>,
    id: Option<ListenerId>,
}

impl Drop for BudgetWatch {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Dropped outside of the lock: the listener may hold anything.
        discard(self.inner.changed(|state| state.marks.remove(id)));
    }
}

impl fmt::Debug for BudgetWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// One drawer's share of a budget: what a cache or a pool is made with.
///
/// One for each, so that it can be told who holds what. What it holds is given back when it is
/// dropped.
#[derive(Debug)]
pub struct Share {
    budget: Budget,
    drawer: Drawer,
}

impl Share {
    /// The budget.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What this drawer holds now.
    pub fn held(&self) -> Amount {
        self.inner().read(|state| state.ledger.held_by(self.drawer)).unwrap_or_default()
    }

    /// Takes `amount` until the result is dropped; others give back what is due to this drawer, if it is
    /// not there.
    ///
    /// For drawers that are no cache and no pool. No lock may be held that a release of others needs, or a
    /// listener of this budget.
    ///
    /// What was drawn is given back by the value that says so, once. No call of a program gives back what a
    /// drawer holds still:
    ///
    /// ```compile_fail,E0599
    /// # use pinfold::budget::{Account, Amount, Budget, Terms};
    /// # let share = Budget::new(Amount::one(4096)).unwrap().share(Terms::default()).unwrap();
    /// share.give(Amount::one(4096)); // was never taken
    /// ```
    ///
    /// ```compile_fail,E0277
    /// # use pinfold::{budget::{Amount, Budget, Terms}, pool::Allowance};
    /// # let share = Budget::new(Amount::one(4096)).unwrap().share(Terms::default()).unwrap();
    /// Allowance::give_back(&*share, 4096); // was never granted
    /// ```
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if it is not to be had: `allowed - held` is.
    pub fn draw(self: &Arc<Self>, amount: Amount) -> Result<Drawn, Exhausted> {
        let account = ShareAccount { share: Arc::clone(self), number: PROGRAM };
        let grown = account.grow(amount);
        account.settle();
        grown.map(|()| Drawn { account, amount })
    }

    /// Says who can be asked to give back what this drawer does not use, when others recall.
    pub fn attach(&self, lender: Weak<dyn Lender>) {
        self.attach_as(PROGRAM, lender);
    }

    fn attach_as(&self, number: u64, lender: Weak<dyn Lender>) {
        self.inner().changed(|state| {
            let lenders = state.lenders.entry(User { drawer: self.drawer, number }).or_default();
            lenders.retain(|it| it.strong_count() > 0);
            lenders.push(lender);
        });
    }

    fn inner(&self) -> &Inner {
        &self.budget.inner
    }

    /// Has others give back what they owe if there is `total` in all. True if one did.
    fn recall_of(&self, missing: Amount, total: impl FnOnce(&Ledger) -> Amount) -> bool {
        let inner = self.inner();
        let claim = inner
            .read(|state| state.ledger.claim(self.drawer, missing, total(&state.ledger)))
            .flatten();
        let Some(claim) = claim else { return false };
        let mut debts = inner.of_borrowers(|ledger, other| (ledger.debt(claim, other), other));
        debts.retain(|&(debt, _)| debt != Amount::ZERO);
        debts.sort_unstable_by_key(|&(debt, other)| (Reverse((debt.bytes, debt.regions)), other));
        let owes = |(_, other)| {
            // By now its place may be another drawer's.
            let debt = inner.read(|state| state.ledger.debt(claim, other))?;
            (debt != Amount::ZERO).then_some((other, debt))
        };
        let lenders_of =
            |(other, debt)| inner.lenders_of(other).map(move |lenders| (lenders, debt));
        ask_in_turn(debts.into_iter().filter_map(owes).flat_map(lenders_of))
    }
}

/// The books of a share, for the cache, the pool or the [`Drawn`] that draws on it. A program has none: it could give
/// back what is still held, and others would draw it.
#[derive(Debug)]
pub(crate) struct ShareAccount {
    share: Arc<Share>,
    /// Which user of the share this is.
    number: u64,
}

/// What a device has refused to register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRequest {
    /// All of it that one device would pin at the same time: one slab, or all buffers of a reservation.
    pub(crate) whole: Amount,
    /// What is missing of it, as the budget counts.
    pub(crate) missing: Amount,
}

impl DeviceRequest {
    /// Whether the limit that was met is one that the whole keeps, if nothing else were registered.
    fn can_be_taken(self, met: RegisterError) -> bool {
        let Amount { bytes, regions } = self.whole;
        match met {
            RegisterError::PinnedMemoryLimit { limit_bytes: Some(limit), .. } => {
                bytes as u64 <= limit
            }
            RegisterError::TableFull { capacity } => regions <= capacity,
            RegisterError::RegionLimit { device_max, .. } => regions <= device_max,
            _ => true,
        }
    }
}

/// What draws by [`Share::draw`], and what was attached by [`Share::attach`].
const PROGRAM: u64 = 0;

impl ShareAccount {
    pub(crate) fn new(share: Arc<Share>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(PROGRAM + 1);
        // Relaxed: uniqueness is all that is asked.
        Self { share, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn budget(&self) -> &Budget {
        self.share.budget()
    }

    /// Takes `amount` until it is [given](Account::give) back. Others give back what is due to this drawer, if it
    /// is not there. No listener is called: the caller settles.
    pub(crate) fn grow(&self, amount: Amount) -> Result<(), Exhausted> {
        let mut recalls = Recalls::new();
        loop {
            let Refusal { exhausted, missing } = match self.take_or_await(amount) {
                Ok(()) => return Ok(()),
                Err(refusal) => refusal,
            };
            let recalls_quietly = || {
                let _quiet = Quiet::begin();
                // What others owed they may have given back since the refusal, by themselves.
                self.recall(missing) || self.has_room(amount)
            };
            if exhausted.wanted > exhausted.allowed || !recalls.ask(recalls_quietly) {
                return Err(exhausted);
            }
        }
    }

    fn has_room(&self, amount: Amount) -> bool {
        let has_room = |state: &State| state.ledger.has_room(self.share.drawer, amount);
        self.share.inner().read(has_room).unwrap_or_default()
    }

    /// Takes `amount`, all or nothing; where it is refused, its lender is notified when there is more.
    fn take_or_await(&self, amount: Amount) -> Result<(), Refusal> {
        let number = self.number;
        self.answered(amount, |ledger, drawer, amount| {
            ledger.take_or_await(User { drawer, number }, amount)
        })
    }

    /// As [`refused`](Account::refused), which a cache calls, for a slab or a reservation. True if another drawer gave
    /// something back for what is missing, which this one does not hold meanwhile. None is asked for what the device
    /// can never take. No listener is called: the caller settles, and listeners hear of it then if it `tells`.
    pub(crate) fn make_room_on_device(
        &self,
        error: RegisterError,
        request: DeviceRequest,
        tells: bool,
    ) -> bool {
        let _quiet = Quiet::begin();
        let number = self.number;
        self.changed(|ledger, drawer| ledger.note_device(User { drawer, number }, error));
        self.note_refused(tells);
        request.can_be_taken(error) && self.recall_on_device(error, request.missing)
    }

    /// The limits are looked up again; where they are as they were, listeners are due to be notified if it `tells`.
    fn note_refused(&self, tells: bool) {
        if !self.share.inner().recheck(Rings::WhenOld) && tells && !TELLING.get() {
            self.share.inner().changed(|state| state.marks.note_refusal());
        }
    }

    /// What the device took is all there is, for now.
    fn recall_on_device(&self, error: RegisterError, missing: Amount) -> bool {
        self.share.recall_of(missing, |ledger| ledger.total_for(Refuser::of(error)))
    }

    /// Gives back what was taken and not used.
    pub(crate) fn give_unused(&self, amount: Amount) {
        self.changed(|ledger, drawer| ledger.give_unused(drawer, amount));
    }

    /// Whether a user was refused, so that it makes sense to say what is idle. To be asked under the lock under which this
    /// drawer's lender looks for what is idle.
    pub(crate) fn is_awaited(&self) -> bool {
        // Relaxed: one that is refused asks the lender behind that. Where the lender has looked before, its lock orders
        // the two; else it will find what is idle.
        self.share.inner().has_refused.load(Ordering::Relaxed)
    }

    /// Of what this drawer holds so much is `idle` now: it may be due to another one, which was refused. Called with no lock held.
    pub(crate) fn note_idle(&self, idle: Amount) {
        self.share.inner().notify_of_idle(self.share.drawer, idle);
    }

    /// Its lender is notified when there is more than now, or another drawer leaves as much idle as it has `wanted`.
    pub(crate) fn await_room(&self, wanted: Amount) {
        let number = self.number;
        self.changed(|ledger, drawer| ledger.await_room(User { drawer, number }, wanted));
    }

    /// How often there may have been more room for good. The same for ever in a forked child.
    pub(crate) fn released(&self) -> u64 {
        self.share.inner().read(|state| state.ledger.released()).unwrap_or_default()
    }

    /// What the ledger says; in a forked child, that there is nothing.
    fn answered(
        &self,
        amount: Amount,
        take: impl FnOnce(&mut Ledger, Drawer, Amount) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let taken = self.changed(|ledger, drawer| take(ledger, drawer, amount));
        let wanted = amount.bytes;
        let forked = Exhausted { limit: Limit::SharedBytes, allowed: 0, held: 0, wanted };
        taken.unwrap_or(Err(Refusal { exhausted: forked, missing: amount }))
    }

    fn changed<T>(&self, change: impl FnOnce(&mut Ledger, Drawer) -> T) -> Option<T> {
        self.share.inner().changed(|state| change(&mut state.ledger, self.share.drawer))
    }
}

impl Drop for ShareAccount {
    /// A share outlives many pools. What the program draws is one user, which goes with the share.
    fn drop(&mut self) {
        let number = self.number;
        if number != PROGRAM {
            let user = User { drawer: self.share.drawer, number };
            // Dropped while the lock is free.
            let _lenders = self.share.inner().changed(|state| {
                state.ledger.forget(user);
                state.lenders.remove(&user)
            });
        }
    }
}

impl Account for ShareAccount {
    fn take(&self, amount: Amount) -> Result<(), Refusal> {
        self.answered(amount, Ledger::take)
    }

    fn overdraw(&self, amount: Amount) {
        self.changed(|ledger, drawer| ledger.overdraw(drawer, amount));
    }

    fn give(&self, amount: Amount) {
        self.changed(|ledger, drawer| ledger.give(drawer, amount));
    }

    fn recall(&self, missing: Amount) -> bool {
        self.share.recall_of(missing, Ledger::total)
    }

    fn refused(&self, error: RegisterError, missing: Amount) -> bool {
        self.note_refused(true);
        self.recall_on_device(error, missing)
    }

    fn settle(&self) {
        self.share.inner().settle();
    }

    fn attach(&self, lender: Weak<dyn Lender>) {
        self.share.attach_as(self.number, lender);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // What else drew on it is gone. Dropped while the lock is free.
        let _lenders = self.inner().changed(|state| {
            state.ledger.leave(self.drawer);
            state.lenders.remove(&User { drawer: self.drawer, number: PROGRAM })
        });
        self.inner().settle();
    }
}

/// An amount taken from a share, given back when it is dropped.
#[derive(Debug)]
pub struct Drawn {
    account: ShareAccount,
    amount: Amount,
}

impl Drawn {
    /// How much it is.
    pub fn amount(&self) -> Amount {
        self.amount
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        self.account.give(self.amount);
        self.account.settle();
    }
}

fn nothing_left(amount: &Amount, bound: &Option<Bound>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Amount { bytes, regions } = amount;
    match bound {
        Some(Bound { bytes: limit, source, beyond, shared_with }) => write!(
            f,
            "{bytes} bytes and {regions} registrations are left to this process: {source} \
             ({beyond}) is {limit} bytes, for {shared_with}; raise it, or end what uses it up"
        ),
        None => write!(
            f,
            "a budget of {bytes} bytes and {regions} registrations holds nothing: allow at least \
             one page and one registration"
        ),
    }
}

fn how_to_raise(bound: &Bound) -> &'static str {
    match bound.shared_with {
        SharedWith::User | SharedWith::Process => {
            " (`ulimit -l`, limits.conf, LimitMEMLOCK= of the unit, `--ulimit memlock=-1` of the \
             container runtime)"
        }
        SharedWith::Group => " (MemoryMax= of the unit, the memory limit of the container)",
        SharedWith::Machine => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::readings::RINGS_STAY;
    use super::*;
    use std::fs;
    use std::time::Instant;

    const PAGE: usize = 4096;

    fn share_of(budget: &Budget) -> ShareAccount {
        ShareAccount::new(budget.share(Terms::default()).unwrap())
    }

    #[test]
    fn a_refused_registration_reads_the_limit_and_not_the_rings_each_time() {
        let root = std::env::temp_dir().join(format!("pinfold-refused-{}", std::process::id()));
        fs::create_dir_all(root.join("proc/self")).unwrap();
        let write = |name, text: &str| fs::write(root.join("proc/self").join(name), text).unwrap();
        write("limits", "Max locked memory 65536 65536 bytes\n");
        write("maps", "1000-2000 rw-s 00000000 00:10 1 anon_inode:[io_uring]\n");
        let began = Instant::now();
        let limits =
            RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 20, max_regions: 8 };
        let budget = Budget::discover_below(&root, Kind::IoUring, limits).unwrap();
        assert_eq!(budget.total().bytes, 15 * PAGE);
        write("limits", "Max locked memory 32768 65536 bytes\n");
        write("maps", "1000-4000 rw-s 00000000 00:10 1 anon_inode:[io_uring]\n");
        let error = RegisterError::PinnedMemoryLimit { limit_bytes: None, errno: libc::ENOMEM };
        assert!(!share_of(&budget).refused(error, Amount::one(PAGE)));
        let found = budget.total().bytes;
        assert!(found == 7 * PAGE || began.elapsed() >= RINGS_STAY, "{found}");
        assert_eq!(budget.refresh().bytes, 5 * PAGE);
        fs::remove_dir_all(root).unwrap();
    }

    /// Makes more room as it is notified, and waits for more again: as others do on their threads.
    struct MakesRoom {
        waits: ShareAccount,
        holds: ShareAccount,
        notified: AtomicU64,
    }

    impl Lender for MakesRoom {
        fn give_back(&self, _: Amount) -> bool {
            false
        }

        fn room_made(&self) {
            self.notified.fetch_add(1, Ordering::Relaxed);
            self.waits.await_room(Amount::one(1));
            self.holds.give(Amount::one(PAGE));
        }
    }

    /// A thread that has given something back returns, however fast others make room: they notify of it themselves.
    #[test]
    fn to_notify_the_refused_ends_though_more_room_is_made_meanwhile() {
        const ALL: usize = 1000;
        let budget = Budget::new(Amount { bytes: ALL * PAGE, regions: ALL }).unwrap();
        let (waits, holds) = (share_of(&budget), share_of(&budget));
        holds.take(Amount { bytes: ALL * PAGE, regions: ALL }).unwrap();
        let lender = Arc::new(MakesRoom { waits, holds, notified: AtomicU64::new(0) });
        let weak: Weak<MakesRoom> = Arc::downgrade(&lender);
        lender.waits.attach(weak);
        lender.waits.await_room(Amount::one(1));
        for turn in 1..4 {
            lender.holds.give(Amount::one(PAGE));
            lender.holds.settle();
            let notified = lender.notified.load(Ordering::Relaxed);
            assert!((turn..=2 * turn).contains(&notified), "{notified} times in {turn} turns");
        }
    }

    /// Says that it gave something, and the second time that it has nothing, behind a release of its own.
    struct GivesByItself(Mutex<Option<Drawn>>, AtomicU64);

    impl Lender for GivesByItself {
        fn give_back(&self, _: Amount) -> bool {
            let is_first = self.1.fetch_add(1, Ordering::Relaxed) == 0;
            if !is_first {
                drop(self.0.lock().unwrap().take());
            }
            is_first
        }
    }

    #[test]
    fn what_comes_back_by_itself_between_two_refusals_is_taken() {
        let budget = Budget::new(Amount { bytes: 4 * PAGE, regions: 64 }).unwrap();
        let (holds, wants) = [(); 2].map(|()| budget.share(Terms::default()).unwrap()).into();
        let drawn = holds.draw(Amount::one(4 * PAGE)).unwrap();
        let lender = Arc::new(GivesByItself(Mutex::new(Some(drawn)), AtomicU64::new(0)));
        let weak: Weak<GivesByItself> = Arc::downgrade(&lender);
        holds.attach(weak);
        assert!(wants.draw(Amount::one(2 * PAGE)).is_ok());
    }

    /// Remembers which of all gave back.
    struct Gives(Arc<Mutex<Vec<usize>>>, usize);

    impl Lender for Gives {
        fn give_back(&self, _: Amount) -> bool {
            self.0.lock().unwrap().push(self.1);
            true
        }
    }

    /// The lenders of that drawer, and no other's, which need not be in the slice that is looked at first.
    #[test]
    fn of_many_borrowers_the_one_that_owes_most_is_asked() {
        let many = 5 * SLICE;
        let all = Amount { bytes: (many + 9) * PAGE, regions: 1 << 20 };
        let budget = Budget::new(all).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let borrow = |number| {
            let (account, lender) =
                (share_of(&budget), Arc::new(Gives(Arc::clone(&asked), number)));
            let weak: Weak<Gives> = Arc::downgrade(&lender);
            account.attach(weak);
            let pages = if number == SLICE + 3 { 10 } else { 1 };
            account.take(Amount::one(pages * PAGE)).unwrap();
            (account, lender)
        };
        let _borrowers: Vec<_> = (0..many).map(borrow).collect();
        let asks = share_of(&budget);
        let missing = asks.take(Amount::one(PAGE)).unwrap_err().missing;
        assert!(asks.recall(missing));
        assert_eq!(*asked.lock().unwrap(), [SLICE + 3]);
    }
}
