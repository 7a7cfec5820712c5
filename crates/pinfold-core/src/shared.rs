//! What the cache's handle, its leases and its reclaimer share; and the path of a hit.
//!
//! The writer's lock is the one gate that a forked child does not pass: [`Shared::locked`] gives
//! [`Forked`] there. What does without the lock asks the monitor: a hit behind a check that was made
//! before, and what calls the device, the account or the program.
//!
//! Ranks of locks, outermost first: the writer's lock (1), the hazard records' pool (2), a
//! flight (3, taken with nothing else held). None is held across a call of the registrar, of a
//! monitor's `watch` or of a program's callback.

use crate::AddressRange;
use crate::admission::{self, Admission, LearnedCosts};
use crate::board::{Board, Notice};
use crate::budget::{Account, Amount};
use crate::callbacks::Callback;
use crate::clock::Clock;
use crate::config::{Config, Keep};
use crate::error::{ConfigError, PerUse};
use crate::flight::Flight;
use crate::followed_ranges::FollowedRanges;
use crate::foreign::{self, ForeignPart, discard, runs_through};
use crate::hazard::{Hazard, Hazards, Scanned, Slot, Unpublished};
use crate::holds::Hold;
use crate::index::{Index, Recycler};
use crate::monitor::{Forked, Monitor, Position, Sequence};
use crate::order::Order;
use crate::region::{Ask, List, Lists, Region, Terms};
use crate::registrar::{Registrar, RegistrarLimits};
use crate::sorted::Sorted;
use crate::statistics::Statistics;
use crate::suspended_ranges::SuspendedRanges;
use crate::sync::{
    AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, OnceLock, Ordering, lock, wait,
};
use crate::unapplied::{ChangeCount, UnappliedChanges};
use crate::waits::Released;
use crate::watchers::{Due, Watchers};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The cache itself.
pub(crate) struct Shared<R: Registrar, M: Monitor> {
    /// The sequence whose events have all been applied to the regions' states.
    applied: AtomicU64,
    /// Advances with every miss; regions note it when they are used.
    tick: AtomicU64,
    /// Whether the end of a dead region's last lease is awaited; see
    /// [`say_if_awaited`](Self::say_if_awaited).
    pub(crate) awaiting: AtomicBool,
    pub(crate) hazards: Hazards,
    pub(crate) monitor: ForeignPart<M>,
    pub(crate) index: Index<Region<R::Handle>>,
    pub(crate) registrar: ForeignPart<R>,
    pub(crate) config: Config,
    /// Whether a check takes long here, so that a get that cannot be a hit spares it.
    pub(crate) spares_checks: bool,
    /// The budget that others draw on as well.
    pub(crate) account: Option<ForeignPart<Arc<dyn Account>>>,
    pub(crate) limits: RegistrarLimits,
    /// How often each page of a registration counts.
    pins_per_page: usize,
    /// Where the program is told what it must react to.
    pub(crate) board: Board<R::Handle>,
    /// Ends every suspension that stands, as if it were overdue. Known from the first suspension on.
    pub(crate) end_suspensions: OnceLock<fn(&Self)>,
    /// Set once, when the cache is dropped: the reclaimer ends.
    closed: AtomicBool,
    /// Guards every change of the index, of regions' states and of the books.
    writer: Mutex<Writer>,
    /// Waited at with the writer's lock for registrations that are given back. Notified, as the next, behind the lock
    /// under which that was said: to wake 256 threads takes longer than it is held.
    departed: Condvar,
    /// As [`departed`](Self::departed), for the end of a scan of the hazards.
    scanned: Condvar,
}

/// Which threads are to be woken as soon as the writer's lock is free.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct WakeUps {
    departed: bool,
    scanned: bool,
    /// Those that wait at the board.
    told: bool,
}

/// No range is longer, whatever a device says, so that no sum of an address and a length wraps.
const LONGEST: usize = 1 << 62;

/// How many regions are given up, looked at or invalidated under one hold of the writer's lock: no
/// thread waits longer for it however many there are.
pub(crate) const SLICE: usize = if cfg!(shuttle) {
    2
} else if cfg!(all(miri, test)) {
    // The unit tests make as many regions as slices take.
    4
} else if cfg!(miri) {
    8
} else {
    64
};

/// How many regions [`Writer::scratch`] keeps room for.
const SCRATCH: usize = 256;

/// What the writer's lock guards besides the index and the regions' states.
pub(crate) struct Writer {
    pub(crate) recycler: Recycler,
    /// How many places of the region arena were made.
    pub(crate) made_places: u32,
    pub(crate) order: Order,
    /// The list of each region's state: in the order of eviction, invalidated, deregistering.
    pub(crate) lists: Lists,
    /// Registrations under way.
    pub(crate) flights: Vec<Flight>,
    /// The reclaimer was called, and has not begun to look since.
    called: bool,
    /// The reclaimer is to be notified as soon as the lock is free.
    must_notify: bool,
    wake_ups: WakeUps,
    /// How often regions on their way out were gone.
    pub(crate) departures: u64,
    /// How many wait for that.
    pub(crate) awaiting_departure: usize,
    /// A thread scans the hazards, and has given the lock back meanwhile.
    is_scanning: bool,
    /// How many wait for the end of that.
    awaiting_scan: usize,
    /// Memory for a list of regions, kept from one use to the next.
    pub(crate) scratch: Vec<u32>,
    /// Which ranges were used, and what uses take: that in a box, because a writer is moved as it is made, and a model's threads
    /// have short stacks.
    pub(crate) admission: Admission,
    pub(crate) costs: Box<LearnedCosts>,
    /// Why regions are registered for one lease, by their numbers.
    pub(crate) per_use: Sorted<u32, PerUse>,
    /// Places of regions leased by threads without a hazard record (while a thread is torn down).
    pub(crate) counted: Vec<usize>,
    /// What counts against the budget, registrations under way included.
    pub(crate) held: Amount,
    /// What regions count for which it is not what their own pages count, in bytes, by their numbers: few.
    counted_otherwise: Sorted<u32, usize>,
    pub(crate) counts: Statistics,
    pub(crate) watchers: Watchers,
    /// What is suspended.
    pub(crate) suspended: SuspendedRanges,
    /// The log has been read up to here...
    pub(crate) position: Position,
    /// ...which is the sequence that is published when what was read is applied.
    pub(crate) replayed: Sequence,
    /// What was read and is not applied.
    pub(crate) unapplied: UnappliedChanges,
    /// Ranges that the cache may not hold, of which is asked whether they have changed.
    pub(crate) followed: FollowedRanges,
    /// The monitor sees nothing any more; all was invalidated then.
    pub(crate) lost: bool,
}

/// Callbacks that are due, run when this is dropped: also when the registrar panics before.
pub(crate) struct Deferred<'c, R: Registrar, M: Monitor> {
    shared: &'c Shared<R, M>,
    due: Due,
}

impl<R: Registrar, M: Monitor> Drop for Deferred<'_, R, M> {
    fn drop(&mut self) {
        self.shared.run(std::mem::take(&mut self.due));
    }
}

/// The writer's lock in the hands of a thread that may scan the hazards: no other scan is under way.
pub(crate) struct Scanner<'c> {
    writer: MutexGuard<'c, Writer>,
    hold: Hold,
}

impl Deref for Scanner<'_> {
    type Target = Writer;

    fn deref(&self) -> &Writer {
        &self.writer
    }
}

impl DerefMut for Scanner<'_> {
    fn deref_mut(&mut self) -> &mut Writer {
        &mut self.writer
    }
}

/// What one layer does with the cache, in a file of its own: as a method of [`Shared`] it would be there for every layer.
macro_rules! operations {
    ($(#[$of:meta])* $name:ident) => {
        $(#[$of])*
        pub(crate) struct $name<'c, R: crate::Registrar, M: crate::Monitor>(
            pub(crate) &'c crate::shared::Shared<R, M>,
        );

        impl<R: crate::Registrar, M: crate::Monitor> Clone for $name<'_, R, M> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<R: crate::Registrar, M: crate::Monitor> Copy for $name<'_, R, M> {}
    };
}
pub(crate) use operations;

/// A region that was live when it was looked at, behind its hazard.
#[derive(Clone, Copy)]
pub(crate) struct Hit<'c, H> {
    pub(crate) region: &'c Region<H>,
    pub(crate) hazard: Hazard<'c>,
}

/// How a lease keeps its region: by a slot of a thread's record, else by an entry of
/// [`Writer::counted`].
pub(crate) type Pin<'c> = Option<Hazard<'c>>;

impl<R: Registrar, M: Monitor> Shared<R, M> {
    pub(crate) fn new(
        registrar: R,
        monitor: M,
        config: Config,
        account: Option<Arc<dyn Account>>,
    ) -> Result<Self, ConfigError> {
        let (registrar, monitor) = (ForeignPart::new(registrar), ForeignPart::new(monitor));
        let account = account.map(ForeignPart::new);
        // A fake monitor is written in safe code, and would be believed of memory that a device reaches.
        if monitor.is_simulated() && !registrar.is_simulated() {
            return Err(ConfigError::SimulatedMonitor);
        }
        let mut limits = registrar.limits();
        let pins_per_page = registrar.pins_per_page();
        let config = config.within(limits)?;
        limits.max_region_bytes = limits.max_region_bytes.min(LONGEST);
        monitor.check().map_err(ConfigError::Monitor)?;
        // Nothing is registered yet, so what happened before this look concerns no region.
        let start = monitor.replay(Position::NOWHERE, &mut |_| {});
        Ok(Self {
            applied: AtomicU64::new(start.sequence.0),
            tick: AtomicU64::new(1),
            awaiting: AtomicBool::new(false),
            hazards: Hazards::new(config.barriers),
            spares_checks: monitor.has_slow_check(),
            monitor,
            index: Index::new(),
            registrar,
            config,
            account,
            limits,
            pins_per_page,
            board: Board::new(),
            end_suspensions: OnceLock::new(),
            closed: AtomicBool::new(false),
            writer: Mutex::new(Writer::new(start.up_to, start.sequence)),
            departed: Condvar::new(),
            scanned: Condvar::new(),
        })
    }

    /// Whether the regions' states are as new as what the monitor answered: before every hit.
    ///
    /// **Why a hit behind this is never stale.** Let a change take effect before the monitor's `check`. The
    /// monitor's promise makes `check` return its entry's sequence or a later one, so `applied`
    /// can only be equal if the entry has been applied. The thread that applied it set the region's
    /// status to invalidated, under the writer's lock, before it stored `applied`; the Acquire
    /// load below therefore makes that status visible to every load behind it, and the lease's
    /// own look at the status comes behind it. So either the sequences differ, and the slow path
    /// applies the entry first, or the region is seen as not live.
    ///
    /// **The slow path** looks up regions under the lock, where the entry has been read and may not
    /// have been applied to all regions: then it is among the unapplied changes, and
    /// [`UnappliedChanges::cover`] is asked before a region is believed. What else believes a region:
    /// a suspension, which takes the leases for what they are; and a lease, which asks the same
    /// question ([`catch_up_for_lease`](Self::catch_up_for_lease)).
    #[inline(always)]
    pub(crate) fn has_applied(&self, seen: Sequence) -> bool {
        // Acquire: pairs with the Release store in `publish_applied`; see the argument above.
        self.applied.load(Ordering::Acquire) == seen.0
    }

    /// Publishes how far the log is applied, when all that was read of it is; as long as something is
    /// left, a word that no check answers, so that no `get` is a hit. The writer's lock is held.
    pub(crate) fn publish_applied(&self, writer: &mut Writer) {
        let applied = if writer.has_applied_all() {
            writer.replayed
        } else {
            writer.call_reclaimer();
            Sequence::STALE
        };
        // Relaxed: only holders of the writer's lock store here. Not stored again, because all hits
        // read this line.
        if self.applied.load(Ordering::Relaxed) != applied.0 {
            // Release: the statuses set while applying come first; see `has_applied`.
            self.applied.store(applied.0, Ordering::Release);
        }
    }

    /// Whether the index names a region, right or not, that contains the bytes.
    pub(crate) fn is_named(&self, ask: Ask) -> bool {
        let is_guessed = self.index.guess(ask.start).is_some();
        is_guessed || self.index.find(ask.start, ask.end(), |_| Some(())).is_some()
    }

    /// A live region that serves `ask`, protected, if one is found without a lock.
    ///
    /// Two words, returned in registers: the lease itself is written once, by the method, and not
    /// copied on its way out.
    #[inline(always)]
    pub(crate) fn hit(&self, ask: Ask) -> Option<Hit<'_, R::Handle>> {
        let slot = self.hazards.slot()?;
        let entry = self.index.guess(ask.start).or_else(|| self.index.latest(ask.start));
        // A long one that is not to be found any more may still be named: to protect it would take the lock.
        if let Some(region) = entry.map(|entry| self.index.place(entry)).filter(|it| it.is_live())
            && let Some(hit) = self.try_protect(slot, region, ask)
        {
            slot.count_hit();
            region.count_hit(ask.length);
            return Some(hit);
        }
        self.search(ask.start, ask.length, ask.terms)
    }

    /// The same where the likeliest region was not the right one.
    ///
    /// The arguments come one by one: an [`Ask`] would be handed over in memory, and every hit
    /// would have to put it there.
    #[cold]
    fn search(&self, start: usize, length: usize, terms: Terms) -> Option<Hit<'_, R::Handle>> {
        let ask = Ask::new(start, length, terms);
        // Looked at before it is protected: a hazard on a region whose lease's end is awaited takes
        // the lock when it comes to nothing.
        self.index.find(ask.start, ask.end(), |region| {
            region.serves(ask).then(|| self.try_protect_anew(region, ask)).flatten()
        })
    }

    /// As [`try_protect`](Self::try_protect), and counted as a hit, in a slot that is free still: what ends a try that came to
    /// nothing may call the monitor, and that may have taken a lease.
    fn try_protect_anew<'c>(
        &'c self,
        region: &'c Region<R::Handle>,
        ask: Ask,
    ) -> Option<Hit<'c, R::Handle>> {
        let slot = self.hazards.slot()?;
        let hit = self.try_protect(slot, region, ask)?;
        slot.count_hit();
        region.count_hit(ask.length);
        Some(hit)
    }

    /// Protects the region in this place if it is live and serves `ask`.
    ///
    /// Hazard first, then the barrier, then the look: a thread that takes the region away changes its
    /// status first, then runs the other barrier, then reads the hazards. If this look finds it
    /// live, that reader finds this hazard (see [`Barriers`](crate::Barriers)).
    #[inline(always)]
    fn try_protect<'c>(
        &'c self,
        slot: Slot<'c>,
        region: &'c Region<R::Handle>,
        ask: Ask,
    ) -> Option<Hit<'c, R::Handle>> {
        let hazard = slot.protect(region);
        self.hazards.light_barrier();
        if region.serves(ask) {
            region.touch(self.tick());
            return Some(Hit { region, hazard });
        }
        self.withdraw_hazard(region, hazard);
        None
    }

    /// Takes a hazard back that came to nothing. A thread that looked for leases meanwhile took it for
    /// one, so this ends like one.
    #[cold]
    fn withdraw_hazard(&self, region: &Region<R::Handle>, hazard: Hazard<'_>) {
        hazard.clear();
        self.hazards.light_barrier();
        self.say_if_awaited(region);
    }

    /// Whether this is one of those misses that are measured, if anything is, and that ask the monitor in any case: it may learn
    /// from it that the calling thread is not in the middle of a change.
    pub(crate) fn is_sampled(&self) -> bool {
        admission::is_sampled(self.tick())
    }

    /// Whether some of what a caller says nothing of is registered for its use alone.
    pub(crate) fn rents(&self) -> bool {
        self.config.keep == Keep::Never || self.measures()
    }

    /// Whether what things take is measured here, because anything is compared.
    pub(crate) fn measures(&self) -> bool {
        self.clock().is_some()
    }

    /// What things are measured by, if anything is compared.
    fn clock(&self) -> Option<Clock> {
        self.config.clock.filter(|_| self.config.keep == Keep::WhenItPays)
    }

    /// The time, to learn what things take, if that is measured here and anything is compared. No lock is
    /// held: the clock is the program's.
    pub(crate) fn now_if(&self, is_timed: bool) -> Option<u64> {
        let clock = self.clock().filter(|_| is_timed)?;
        let now = clock.now();
        if now.is_none() {
            self.count_panics(1);
        }
        now
    }

    /// The present tick.
    #[inline]
    pub(crate) fn tick(&self) -> u64 {
        // Relaxed: an approximate clock.
        self.tick.load(Ordering::Relaxed)
    }

    /// Advances the tick. The writer's lock is held, so no advance is lost.
    pub(crate) fn advance_tick(&self) -> u64 {
        let next = self.tick() + 1;
        // Relaxed: as for the load.
        self.tick.store(next, Ordering::Relaxed);
        next
    }

    /// The board, for those who do not hold the writer's lock: it has a lock of its own, which is as much
    /// in the way of a forked child.
    pub(crate) fn own_board(&self) -> Result<&Board<R::Handle>, Forked> {
        if self.is_forked() { Err(Forked) } else { Ok(&self.board) }
    }

    /// The writer's lock. Not in a forked child, where a thread that does not exist may hold it: asked
    /// here each time, because the device, the account and the program's callbacks may fork in between.
    #[inline]
    fn lock(&self) -> Result<MutexGuard<'_, Writer>, Forked> {
        if self.is_forked() { Err(Forked) } else { Ok(lock(&self.writer)) }
    }

    /// Whether this is a forked child. It is asked by destructors, and with registrations in hand that are in no book: a
    /// monitor that panics over it has said no.
    pub(crate) fn is_forked(&self) -> bool {
        foreign::call(|| self.monitor.forked()).unwrap_or(false)
    }

    /// # Errors
    ///
    /// In a forked child, whose device and account are the parent's.
    pub(crate) fn refuse_child(&self) -> Result<(), Forked> {
        if self.is_forked() { Err(Forked) } else { Ok(()) }
    }

    /// Runs `f` under the writer's lock, then, with no lock held, the callbacks that became due.
    ///
    /// # Errors
    ///
    /// In a forked child, where `f` is dropped.
    #[inline]
    pub(crate) fn locked<T>(&self, f: impl FnOnce(&mut Writer) -> T) -> Result<T, Forked> {
        let mut writer = match self.lock() {
            Ok(writer) => writer,
            Err(forked) => return refuse(f, forked),
        };
        let hold = Hold::begin();
        let result = f(&mut writer);
        drop(self.unlock(writer, hold));
        Ok(result)
    }

    /// Runs `f` under the writer's lock; the callbacks that became due run when the second half
    /// of the result, if there is one, is dropped, which the caller does once it holds nothing that
    /// they may want.
    ///
    /// # Errors
    ///
    /// In a forked child, where `f` is dropped.
    #[inline]
    pub(crate) fn locked_deferring<T>(
        &self,
        f: impl FnOnce(&mut Writer) -> T,
    ) -> Result<(T, Option<Deferred<'_, R, M>>), Forked> {
        let mut writer = match self.lock() {
            Ok(writer) => writer,
            Err(forked) => return refuse(f, forked),
        };
        let hold = Hold::begin();
        let result = f(&mut writer);
        Ok((result, self.unlock(writer, hold)))
    }

    /// Runs `part` under the writer's lock until it says that it is done; others may have it in between. It
    /// makes no callback due, and calls no reclaimer.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub(crate) fn locked_in_parts(
        &self,
        mut part: impl FnMut(&mut Writer) -> bool,
    ) -> Result<(), Forked> {
        loop {
            let mut writer = self.lock()?;
            let hold = Hold::begin();
            let is_done = part(&mut writer);
            self.free_lock(writer, hold);
            if is_done {
                return Ok(());
            }
        }
    }

    /// Gives the writer's lock back, and notifies if the reclaimer was called under it.
    #[inline]
    fn unlock(&self, mut writer: MutexGuard<'_, Writer>, hold: Hold) -> Option<Deferred<'_, R, M>> {
        let due = writer.watchers.take_due();
        let must_notify = std::mem::take(&mut writer.must_notify);
        self.free_lock(writer, hold);
        let deferred = due.map(|due| Deferred { shared: self, due });
        if must_notify {
            self.notify();
        }
        deferred
    }

    /// Gives the writer's lock back and wakes those that were told something under it. They look again what they waited for,
    /// so one that comes in between and is woken as well does no harm.
    #[inline]
    fn free_lock(&self, mut writer: MutexGuard<'_, Writer>, hold: Hold) {
        let wake_ups = std::mem::take(&mut writer.wake_ups);
        drop(writer);
        hold.end();
        if wake_ups != WakeUps::default() {
            self.wake(wake_ups);
        }
    }

    #[cold]
    fn wake(&self, WakeUps { departed, scanned, told }: WakeUps) {
        if departed {
            self.departed.notify_all();
        }
        if scanned {
            self.scanned.notify_all();
        }
        if told {
            self.board.wake();
        }
    }

    /// False if the monitor panicked, which is counted: what the caller has in hand must not be lost.
    fn notify(&self) -> bool {
        let ran = runs_through(|| self.monitor.notify());
        if !ran {
            self.count_panics(1);
        }
        ran
    }

    /// What a change of watched memory costs more: a hint, so that a monitor that panics over it, in the middle
    /// of the books, is counted and nothing else.
    pub(crate) fn change_surcharge(&self, writer: &mut Writer) -> u64 {
        let surcharge = foreign::call(|| self.monitor.change_surcharge());
        writer.counts.callback_panics += u64::from(surcharge.is_err());
        surcharge.unwrap_or(0)
    }

    /// How often registrations were gone that were being given back; 0 in a forked child.
    pub(crate) fn departures(&self) -> u64 {
        self.lock().map_or(0, |writer| writer.departures)
    }

    /// Waits until a registration is gone that was being given back since there had been so many `departures`,
    /// which may be over. False if there was none.
    ///
    /// The caller has no such registration in hand.
    pub(crate) fn wait_for_departure(&self, departures: u64) -> bool {
        // In a forked child no registration departs.
        let Ok(mut writer) = self.lock() else { return false };
        if writer.departures == departures && writer.lists.len(List::Deregistering) == 0 {
            return false;
        }
        writer.awaiting_departure += 1;
        while writer.departures == departures {
            writer = wait(&self.departed, writer);
        }
        writer.awaiting_departure -= 1;
        true
    }

    /// Waits until every registration is gone that is being given back now, whatever comes meanwhile.
    ///
    /// As for [`wait_for_departure`](Self::wait_for_departure).
    pub(crate) fn wait_for_all_departures(&self) {
        let Ok(mut writer) = self.lock() else { return };
        let begun = writer.lists.departures();
        writer.awaiting_departure += 1;
        while writer.lists.are_departing(begun, |number| self.region(number)) {
            writer = wait(&self.departed, writer);
        }
        writer.awaiting_departure -= 1;
    }

    /// Puts a notice on the board. The writer's lock is held.
    pub(crate) fn tell(&self, writer: &mut Writer, notice: Notice<R::Handle>) {
        self.board.put(notice);
        writer.wake_ups.told = true;
    }

    /// Runs a callback that was due before it was asked for.
    pub(crate) fn run_now(&self, callback: Callback) {
        self.run(Due::one(callback));
    }

    /// Runs callbacks; one that panics is counted and does no harm.
    #[cold]
    fn run(&self, mut due: Due) {
        let released = due.take_released();
        self.run_once(due);
        released.for_each(|released| self.run_released(released));
    }

    fn run_once(&self, due: Due) {
        // Forked inside the registrar since they became due, or by one of them: they are the parent's to run.
        let panics = due.run(|| self.is_forked());
        if panics > 0 {
            self.count_panics(panics);
        }
    }

    /// Runs what was released, slice by slice: the lock is not held for all of it. In a child that one of them has forked
    /// the rest is the parent's.
    fn run_released(&self, released: Released) {
        let mut rest = Some(released);
        while let Some(released) = rest.take() {
            // They become due, and so run behind this.
            let handed_out = self.locked(|writer| writer.watchers.hand_out(released));
            rest = handed_out.ok().flatten();
        }
    }

    /// Panics of the program's that went nowhere.
    #[cold]
    pub(crate) fn count_panics(&self, panics: u64) {
        // Not in a child that was forked by what panicked.
        if let Ok(mut writer) = self.lock() {
            writer.counts.callback_panics += panics;
        }
    }

    /// What a registration of `range` counts against the budget: its pages, for each device that pins them.
    pub(crate) fn amount(&self, range: AddressRange) -> Amount {
        let pages = range.page_aligned(self.limits.page_bytes).len();
        Amount::one(pages.saturating_mul(self.pins_per_page))
    }

    /// What `region`, which is registered, counts.
    pub(crate) fn amount_of(&self, writer: &Writer, region: &Region<R::Handle>) -> Amount {
        match writer.counted_otherwise.get(&region.number) {
            Some(&bytes) => Amount::one(bytes),
            None => region.range().map_or(Amount::one(0), |range| self.amount(range)),
        }
    }

    /// `region` of `range` counts this from now on.
    pub(crate) fn note_amount(
        &self,
        writer: &mut Writer,
        (number, range): (u32, AddressRange),
        amount: Amount,
    ) {
        if amount == self.amount(range) {
            writer.counted_otherwise.remove(&number);
        } else {
            writer.counted_otherwise.insert(number, amount.bytes);
        }
    }

    /// `region` counts nothing any more. What it counted.
    pub(crate) fn forget_amount(&self, writer: &mut Writer, region: &Region<R::Handle>) -> Amount {
        let amount = self.amount_of(writer, region);
        writer.counted_otherwise.remove(&region.number);
        amount
    }

    /// The region in place `number`.
    pub(crate) fn region(&self, number: u32) -> Option<&Region<R::Handle>> {
        self.index.places.get(number)
    }

    /// Pins a region for a lease. The writer's lock is held, so no thread takes it away before the
    /// pin stands.
    pub(crate) fn pin(&self, writer: &mut Writer, region: &Region<R::Handle>) -> Pin<'_> {
        let hazard = self.hazards.slot().map(|slot| slot.protect(region));
        if hazard.is_none() {
            writer.counted.push(std::ptr::from_ref(region).addr());
        }
        hazard
    }

    /// The writer's lock, for one that may scan the hazards under it. Waits for the end of a scan that is
    /// under way.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub(crate) fn lock_to_scan(&self) -> Result<Scanner<'_>, Forked> {
        Ok(self.await_scan(self.lock()?))
    }

    /// Waits for the end of a scan that is under way.
    fn await_scan<'c>(&'c self, mut writer: MutexGuard<'c, Writer>) -> Scanner<'c> {
        while writer.is_scanning {
            writer.awaiting_scan += 1;
            writer = wait(&self.scanned, writer);
            writer.awaiting_scan -= 1;
        }
        Scanner { writer, hold: Hold::begin() }
    }

    /// Gives the lock back to those that wait for it, and takes it again: what is read under it is read
    /// again behind this.
    pub(crate) fn pause<'c>(&'c self, Scanner { mut writer, hold }: Scanner<'c>) -> Scanner<'c> {
        // As in `scan`.
        let due = writer.watchers.take_due();
        self.free_lock(writer, hold);
        // No code of the program's ran, which might have forked.
        let mut scanner = self.await_scan(lock(&self.writer));
        scanner.watchers.make_due_again(due);
        scanner
    }

    /// Looks which regions are leased, and says so to `settle` of each that is as the scan left it. They were put where
    /// the ends of their leases are awaited: `first`, and slice by slice what `next` adds, which is asked for as many as
    /// are missing to `most` until there are so many or it adds none.
    ///
    /// The lock is given back between the slices, and for the scan, because that takes as long as there are leases: what is
    /// read under it is read again behind this.
    ///
    /// **Why what is idle is idle when the lock is had again.** Nothing but a thread that may scan puts a
    /// region into a state that [awaits a scan](crate::region::State::awaits_scan), and no other can until this one has
    /// settled all. So a region that is in such a state behind the scan has been in one since before it. It was
    /// not found by hits meanwhile, and gets that find it under the lock take it out of there. What the
    /// scan did not see in use has not been used since.
    ///
    /// **Why the end of no lease is lost.** [`awaiting`](Self::awaiting) was set, and the region was there, before the
    /// barrier. A lease that the scan saw ends behind that barrier, looks there,
    /// and takes the region out if it finds it.
    pub(crate) fn scan<'c>(
        &'c self,
        scanner: Scanner<'c>,
        first: Vec<Unpublished<'c, Region<R::Handle>>>,
        most: usize,
        mut next: impl FnMut(&mut Writer, usize) -> Vec<Unpublished<'c, Region<R::Handle>>>,
        mut settle: impl FnMut(&mut Writer, Scanned<'c, Region<R::Handle>>),
    ) -> Scanner<'c> {
        let Scanner { mut writer, mut hold } = scanner;
        writer.is_scanning = true;
        // Relaxed: the barriers of the scan and of those who look order it.
        self.awaiting.store(true, Ordering::Relaxed);
        // Callbacks that became due are left to `release`: no code of the program's may run while other threads wait
        // for the end of this scan, and none here on a thread that takes the lock meanwhile, which may hold
        // what they wait for. Nothing panics between here and the end.
        let due = writer.watchers.take_due();
        let (mut regions, mut slice) = (Vec::new(), first);
        let counted = loop {
            let counted = writer.counted.clone();
            self.free_lock(writer, hold);
            let is_last = slice.is_empty();
            regions.append(&mut slice);
            if is_last || regions.len() >= most {
                break counted;
            }
            // No code of the program's ran, which might have forked.
            (writer, hold) = (lock(&self.writer), Hold::begin());
            slice = next(&mut writer, most - regions.len());
        };
        let mut scan = self.hazards.scan(&counted, regions);
        loop {
            let (slice, rest) = scan.split(SLICE / 2);
            (writer, hold) = (lock(&self.writer), Hold::begin());
            slice.settle(|found| settle(&mut writer, found));
            let Some(rest) = rest else { break };
            self.free_lock(writer, hold);
            scan = rest;
        }
        writer.watchers.make_due_again(due);
        writer.is_scanning = false;
        // A system call, even if no thread waits.
        writer.wake_ups.scanned = writer.awaiting_scan > 0;
        Scanner { writer, hold }
    }

    /// Gives the lock back; the callbacks that became due run when the result, if there is one, is dropped.
    pub(crate) fn release(&self, scanner: Scanner<'_>) -> Option<Deferred<'_, R, M>> {
        let is_any_awaited = scanner.lists.awaited() > 0;
        // Relaxed: only holders of the writer's lock store here, and an end that is not waited for is not
        // missed. Not stored again, because hits read this line.
        if self.awaiting.load(Ordering::Relaxed) != is_any_awaited {
            self.awaiting.store(is_any_awaited, Ordering::Relaxed);
        }
        self.unlock(scanner.writer, scanner.hold)
    }

    /// The exact counters; zeros in a forked child.
    pub(crate) fn statistics(&self) -> Statistics {
        let Ok((mut counts, held)) = self.locked(|writer| (writer.counts, writer.held)) else {
            return Statistics::default();
        };
        counts.hits += self.hazards.hits();
        counts.gets = counts.hits + counts.misses;
        counts.regions = held.regions as u64;
        counts.pinned_bytes = held.bytes as u64;
        counts
    }

    /// Tells the reclaimer to end. False if it may not have heard, because the monitor panicked.
    pub(crate) fn close(&self) -> bool {
        // SeqCst: once in a cache's life; the event count's own order makes it visible.
        self.closed.store(true, Ordering::SeqCst);
        self.notify()
    }

    pub(crate) fn is_closed(&self) -> bool {
        // SeqCst: as in `close`.
        self.closed.load(Ordering::SeqCst)
    }

    /// A lease of `region` ended, and the light barrier has run since: hands the region to the
    /// reclaimer again if that found it leased.
    ///
    /// **Why the last lease's end is not lost.** The lease empties its hazard, runs the light
    /// barrier and looks whether any end is awaited. The reclaimer sets the region aside and says that
    /// it awaits an end, runs the heavy barrier and looks at the hazards. If this look finds nothing
    /// awaited, that look finds the hazard empty, and it is still to come: a dead region that was not
    /// looked at has been handed to the reclaimer by the thread that took it out of the index. If one was
    /// awaited, this region may be one that was set aside, and is handed to the reclaimer again, which
    /// believes then what a scan says that is under way of those alone that are still where it put them.
    /// The place may hold another region if this one was not set aside; then that one is looked at once
    /// more, or nothing happens.
    ///
    /// The same holds for a thread that needs room, with the order of eviction in the place of the
    /// reclaimer's list: a region that it looks at leaves the order, and comes back here or when no lease
    /// was found.
    #[inline]
    pub(crate) fn say_if_awaited(&self, region: &Region<R::Handle>) {
        // Relaxed: the light barrier that ran before orders it.
        if region.may_be_awaited() && self.awaiting.load(Ordering::Relaxed) {
            self.look_again(region);
        }
    }

    #[cold]
    fn look_again(&self, region: &Region<R::Handle>) {
        // In a forked child all of it is the parent's.
        let _forked = self.locked(|writer| {
            let suspended = writer.is_suspended(region);
            if writer.lists.look_again(region, suspended) {
                writer.call_reclaimer();
            }
        });
    }

    /// The region is about to be given up or was changed: whether it was bought in vain, if it was bought.
    pub(crate) fn note_kept_no_more(&self, writer: &mut Writer, number: u32) {
        let Some(region) = self.region(number) else { return };
        if let Some((range, hits)) = region.range().zip(region.take_bought()) {
            writer.admission.end(range, region.terms(), hits.sum());
        }
    }

    /// Gives back what was taken. An account that panics here, under the lock and in the middle of the
    /// books, is counted, and nothing else. In a child that it forked, as it was given something before, it is not asked.
    pub(crate) fn give_budget(&self, writer: &mut Writer, amount: Amount) {
        writer.held.bytes -= amount.bytes;
        writer.held.regions -= amount.regions;
        let gives = |account: &ForeignPart<Arc<dyn Account>>| runs_through(|| account.give(amount));
        let mut account = self.account.iter().filter(|_| !self.is_forked());
        if !account.all(gives) {
            writer.counts.callback_panics += 1;
        }
    }

    /// Has the account tell the program what became due. Nothing is held, not even a flight. In a
    /// child that was forked inside the registrar or a callback it is not asked.
    pub(crate) fn settle(&self) {
        let account = self.account.iter().filter(|_| !self.is_forked());
        account.for_each(|account| account.settle());
    }

    /// Others say that the whole budget is another now.
    pub(crate) fn note_budget(&self, from: Amount, to: Amount) {
        if let Ok(board) = self.own_board() {
            board.tell_change_of_budget(from, to);
        }
    }
}

/// Drops `f`, with what it captured, which may be the program's.
#[cold]
fn refuse<F, T>(f: F, forked: Forked) -> Result<T, Forked> {
    discard(f);
    Err(forked)
}

impl Writer {
    /// Whether all changes are applied that there were when this was asked for the first time: `target`.
    /// Not before all of the log has been read.
    ///
    /// To read it to its end ends: either the reader is faster than those who report changes, or entries are
    /// overwritten before they are read, and then it stands at the end.
    pub(crate) fn are_applied(&self, target: &mut Option<ChangeCount>) -> bool {
        !self.is_cut() && self.unapplied.are_applied(*target.get_or_insert(self.unapplied.made()))
    }

    /// Whether the log was read in part: what a check knew of may stand in the rest, so no region is believed, and
    /// nothing that is registered now would be cached. Of a monitor that is lost nothing is awaited.
    pub(crate) fn is_cut(&self) -> bool {
        self.replayed == Sequence::CUT && !self.lost
    }

    /// Whether nothing is left to read, as far as is known, or to apply.
    pub(crate) fn has_applied_all(&self) -> bool {
        !self.is_cut() && self.unapplied.is_empty()
    }

    fn new(position: Position, replayed: Sequence) -> Self {
        Self {
            recycler: Recycler::new(),
            made_places: 0,
            order: Order::new(),
            lists: Lists::new(),
            // So many threads register at once before it grows under the lock.
            flights: Vec::with_capacity(16),
            called: false,
            must_notify: false,
            wake_ups: WakeUps::default(),
            departures: 0,
            awaiting_departure: 0,
            is_scanning: false,
            awaiting_scan: 0,
            scratch: Vec::new(),
            admission: Admission::new(),
            costs: Box::default(),
            per_use: Sorted::new(),
            counted: Vec::new(),
            held: Amount::ZERO,
            counted_otherwise: Sorted::new(),
            counts: Statistics::default(),
            watchers: Watchers::default(),
            suspended: SuspendedRanges::default(),
            position,
            replayed,
            unapplied: UnappliedChanges::default(),
            followed: FollowedRanges::default(),
            lost: false,
        }
    }

    /// There is work for the reclaimer: a region that is not in the index any more.
    ///
    /// One call serves for all that is handed over until the reclaimer begins to look.
    #[inline]
    pub(crate) fn call_reclaimer(&mut self) {
        if !self.called {
            self.called = true;
            self.must_notify = true;
        }
    }

    /// Has a region of the index be leased again: by hits, or, as long as part of it is suspended,
    /// not at all.
    #[inline]
    pub(crate) fn open<H: Copy>(&mut self, region: &Region<H>) {
        if !self.is_suspended(region) {
            self.lists.open(region);
        }
    }

    /// Whether part of `region` is suspended.
    #[inline]
    pub(crate) fn is_suspended<H: Copy>(&self, region: &Region<H>) -> bool {
        region.range().is_some_and(|range| self.suspended.cover(range))
    }

    /// Takes back the memory that [`scratch`](Self::scratch) lent, unless it has grown too large
    /// to keep.
    #[inline]
    pub(crate) fn give_scratch(&mut self, mut scratch: Vec<u32>) {
        scratch.clear();
        if scratch.capacity() > SCRATCH {
            scratch.shrink_to(SCRATCH);
        }
        self.scratch = scratch;
    }

    /// Tells those who wait for room, as soon as the lock is free.
    pub(crate) fn note_departure(&mut self) {
        self.departures += 1;
        // A system call, even if no thread waits.
        self.wake_ups.departed = self.awaiting_departure > 0;
    }

    /// The reclaimer begins to look at what was handed over.
    #[inline]
    pub(crate) fn answer_call(&mut self) {
        self.called = false;
        self.must_notify = false;
    }
}
