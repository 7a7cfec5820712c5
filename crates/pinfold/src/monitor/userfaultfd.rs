//! The monitor without privileges: userfaultfd in write-protect mode, where nothing is ever
//! protected, so the kernel reports changes of mappings and no page fault.
//!
//! # The price
//!
//! Once something was watched, one system call per [`check`](Monitor::check) (two to three times an empty
//! one); a changing thread that waits some microseconds until the reader has its event; and one thread
//! asleep, with the highest real-time priority that the process may ask for.
//! `munmap` of memory that was never watched costs what it did before. A `check` that runs into a
//! change of watched memory waits until that change has returned; after some 20 ms of that it
//! gives up and declares everything changed.
//!
//! # What it sees
//!
//! Every change of private anonymous memory by any route, except two that the kernel does not
//! report: `MADV_GUARD_INSTALL`, and `shmat` with `SHM_REMAP` on top of watched memory. Private
//! file mappings cannot be watched, and shared memory can lose its pages through another
//! mapping or descriptor; both are refused, so they are registered for each use. So is memory that can be
//! neither read nor written: a GPU's driver may have its own memory behind such addresses.
//!
//! # What remains open
//!
//! A program may close our descriptor, by `close_range` for instance. That is noticed by the next
//! `check` (`EBADF`), and by the next `watch` or `check` if another file has got the number by
//! then, unless that file is a userfaultfd too (or one of the few devices that answer `EINVAL` to
//! a request they do not know) and nothing is ever registered again. The number is high, so that
//! about a thousand descriptors must be open before the kernel hands it out again.
//!
//! Before Linux 6.18, `UFFDIO_UNREGISTER` on another userfaultfd of the process ends our watch of the
//! range, too, silently. The preload library's hook of `ioctl` reports it. So may this monitor's own, to another one of
//! Pinfold's, if the range is mapped anew and watched by that one just then.
//!
//! A process that shares this one's memory, and is killed while it changes some of it, takes its event along:
//! `docs/src/catalogue.md` has the argument.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to promise what [`Monitor`] demands, the proof of which stands above that
//! promise, and to end watches that are this monitor's.

#![allow(unsafe_code)]

use super::discard_sources::{DiscardSource, others_may_discard};
use super::event_count::EventCount;
use super::log::Log;
use super::patience::Patience;
use super::price::ChangePrice;
use super::range_set::RangeSet;
use super::reader::{self, Core};
use super::self_test;
use super::shared::Kept;
use super::start::StartError;
use super::watched_page::{Unread, bounds, range_of, register};
use crate::descriptor::KnownDescriptor;
use crate::mappings::{Mapping, OpenMaps};
use crate::{
    AddressRange, Change, ChangeMark, Cover, Lost, MappingKind, Monitor, Position, Replay,
    Sequence, Uncovered, Watch,
};
use pinfold_core::PendingChanges;
use pinfold_kernel::{
    Descriptor, Errno,
    mapping::AtomicPage,
    process::{kernel_release, page_bytes},
    thread,
    thread::LeanThread,
    userfaultfd,
};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

/// Watches private anonymous memory, without privileges.
///
/// Two of them cannot watch the same mapping, so caches should share one:
/// [`shared`](Self::shared).
pub struct Userfaultfd {
    core: Arc<Core>,
    /// This monitor, to the others of the process.
    source: Arc<DiscardSource>,
    uffd: KnownDescriptor,
    maps: OpenMaps,
    /// Watched; a change of it wakes the reader. Walled: memory of the program's that is watched beside it would become one
    /// mapping with it, which the kernel does not split where the process may have no more. `None` once dropped.
    doorbell: Option<AtomicPage>,
    reader: Option<LeanThread<ReaderTask>>,
    /// What was ever watched, by whole mappings. The lock guards the writer's place; it is taken by
    /// `watch`, around some ten nanoseconds, and when the monitor ends.
    watched: Mutex<RangeSet>,
    /// Where watches were ended by [`end_watch`](Self::end_watch), with a byte on each side. As `watched`.
    left: Mutex<RangeSet>,
    /// Whether anything was ever watched but pages of our own. Set before the kernel is asked to.
    has_watched: AtomicBool,
    price: ChangePrice,
    /// Ranges whose watch is being ended by [`unwatch_paused`](Self::unwatch_paused).
    unwatching: PendingChanges<4>,
    /// Guards the place for a range that the reader is to log: until it has. Taken with no other lock held but
    /// `watching`.
    naming: Mutex<()>,
    /// Shared by calls that have mappings watched; held alone while none may ([`pause`](Self::pause)). Taken before all
    /// other locks but `pausing`.
    watching: RwLock<()>,
    /// Held by the thread that pauses them.
    pausing: Mutex<()>,
}

/// One short line: its log alone has thousands of entries.
impl fmt::Debug for Userfaultfd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Userfaultfd")
            .field("descriptor", &self.uffd.number())
            .finish_non_exhaustive()
    }
}

/// No call has a mapping watched until this is dropped.
#[derive(Debug)]
pub(super) struct Pause<'m> {
    _watching: RwLockWriteGuard<'m, ()>,
    _alone: MutexGuard<'m, ()>,
}

/// How many ranges of watched mappings are told apart; with more, the mappings between some of them
/// are looked at as well when the monitor ends.
const WATCHED_RANGES: usize = 4096;

/// As many of those whose watch was ended.
const LEFT_RANGES: usize = 512;

/// How often `watch` begins anew because a mapping changed under it.
const WATCH_TRIES: u32 = 8;

/// What `watch` is about to do. Tests change the memory then.
#[derive(Clone, Copy, Debug)]
enum Step {
    Register,
    Ask,
    RegisterAgain,
    Look,
}

impl Userfaultfd {
    /// Opens a monitor of its own and tests that it sees what it claims to see.
    ///
    /// Takes some 0.7 ms, a descriptor, a thread, two pages and 0.2 MiB. It starts threads: in a
    /// forked child of a program with several threads, where the fork may have caught one of them
    /// inside a lock of the C or Rust library, that is no safer than any other use of threads.
    ///
    /// # Errors
    ///
    /// [`StartError`] says what is missing and what to do about it. Nothing is left behind.
    pub fn new() -> Result<Self, StartError> {
        let uffd = open_uffd()?;
        let maps = OpenMaps::new().map_err(StartError::open)?;
        let doorbell = AtomicPage::walled().map_err(StartError::memory)?;
        let unread = Unread::watch(uffd.lend(), &doorbell)?;
        self_test::of_the_question(uffd.lend())?;
        let page = range_of(&doorbell).ok_or(StartError::NoMemory { errno: libc::ENOMEM })?;
        let core = Arc::new(Core::new(page).map_err(StartError::memory)?);
        let source = DiscardSource::enter(&core, uffd.alias()).map_err(StartError::memory)?;
        // Nothing was watched for it yet.
        let reader = spawn_reader(&core, uffd.number()).inspect_err(|_| source.end())?;
        unread.stay();
        let (doorbell, reader) = (Some(doorbell), Some(reader));
        let watched = Mutex::new(RangeSet::new(WATCHED_RANGES));
        let left = Mutex::new(RangeSet::new(LEFT_RANGES));
        let price = ChangePrice::default();
        let has_watched = AtomicBool::new(false);
        let (unwatching, naming) = (PendingChanges::new(), Mutex::new(()));
        let monitor = Self {
            core,
            source,
            uffd,
            maps,
            doorbell,
            reader,
            watched,
            left,
            has_watched,
            price,
            unwatching,
            naming,
            watching: RwLock::new(()),
            pausing: Mutex::new(()),
        };
        self_test::of_the_events(&monitor, || monitor.watched_page())?;
        // The test's: no other memory was watched, and the addresses of its pages will be those of other memory.
        monitor.core.discards.settle_own();
        monitor.price.measure_first(|| monitor.watched_page());
        Ok(monitor)
    }

    /// The monitor that all caches of this process share, made by the first call and kept until
    /// the process ends.
    ///
    /// A forked child gets its own, and so does a process whose shared monitor has lost its
    /// descriptor. What the lost one watched the new one cannot watch
    /// ([`WatchedByAnother`](Uncovered::WatchedByAnother)): new mappings it can.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new); the next call tries again.
    pub fn shared() -> Result<Arc<Self>, StartError> {
        static SHARED: Kept<Userfaultfd> = Kept::new();
        SHARED.get(|monitor| monitor.usable().is_ok(), Self::new)
    }

    /// The descriptor's number, for those who test what happens when it goes away.
    #[doc(hidden)]
    pub fn descriptor(&self) -> i32 {
        self.uffd.number()
    }

    /// What its calls need.
    pub(super) fn descriptors(&self) -> [Descriptor; 2] {
        [self.uffd.number(), self.maps.descriptor()]
    }

    pub(super) fn event_count(&self) -> &EventCount {
        &self.core.event_count
    }

    /// A fresh page that is watched; see [`watch`](Monitor::watch) for other memory.
    pub(super) fn watched_page(&self) -> Result<AtomicPage, StartError> {
        let page = AtomicPage::new().map_err(StartError::memory)?;
        register(self.uffd.lend(), &page)?;
        Ok(page)
    }

    /// Whether this process may believe anything that is said here.
    pub(super) fn usable(&self) -> Result<(), Lost> {
        if self.core.log.forked() {
            return Err(Lost::Forked);
        }
        self.core.lost().map_or(Ok(()), |Errno(errno)| Err(Lost::Descriptor { errno }))
    }

    fn lose(&self, reason: Errno) -> Lost {
        Lost::Descriptor { errno: self.core.lose(reason).0 }
    }

    /// Waits until no change that took effect before this call has an unread event.
    ///
    /// False if there was no such moment for too long, because one change takes very long or one
    /// follows the other.
    fn wait_until_read(&self) -> Result<bool, Lost> {
        let mut patience = Patience::new();
        loop {
            match userfaultfd::changing(self.uffd.lend()) {
                Ok(false) => return Ok(true),
                Ok(true) if patience.is_over() => return Ok(false),
                Ok(true) => patience.pause(),
                Err(errno) => return Err(self.lose(errno)),
            }
            self.usable()?;
        }
    }

    /// Waits until everything that the reader holds at this moment is in the log.
    fn wait_until_logged(&self) -> Result<Sequence, Lost> {
        let first = self.core.log.word();
        let mut now = first;
        let mut patience = Patience::new();
        loop {
            if let Some(sequence) = Log::includes(first, now) {
                return Ok(sequence);
            }
            patience.pause();
            self.usable()?;
            now = self.core.log.word();
        }
    }

    /// Has the log say that everything changed, which is true of whatever has changed so far.
    fn flood(&self) -> Result<(), Lost> {
        let number = self.core.want_flood();
        self.wait_for_reader(|| self.core.flooded(number))
    }

    /// Has the log say that `range` changed.
    fn log_change(&self, range: AddressRange) -> Result<(), Lost> {
        let _naming = self.naming.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.core.want_named(range);
        self.wait_for_reader(|| self.core.is_named(number))
    }

    /// Waits until the reader has done what it was asked for. If it can be woken by nothing, because the change that
    /// would is refused (a filter of system calls) and no event is under way, nothing is believed any more.
    fn wait_for_reader(&self, is_done: impl Fn() -> bool) -> Result<(), Lost> {
        let mut woken = self.wake_reader();
        let mut patience = Patience::new();
        while !is_done() {
            if woken.is_err() && patience.is_over() {
                woken = self.wake_reader();
                woken.map_err(|errno| self.lose(errno))?;
            }
            patience.pause();
            self.usable()?;
        }
        Ok(())
    }

    fn wake_reader(&self) -> Result<(), Errno> {
        self.doorbell.as_ref().map_or(Ok(()), AtomicPage::discard)
    }

    /// Watches the mappings that `range` lies in.
    fn watch_mappings(&self, range: AddressRange) -> Result<(), Uncovered> {
        self.watch_stepwise(range, |_| ())
    }

    /// As [`watch_mappings`](Self::watch_mappings); calls `before` each step. Why the steps are these, and in this
    /// order, stands above the promise of `Monitor` below.
    fn watch_stepwise(
        &self,
        range: AddressRange,
        mut before: impl FnMut(Step),
    ) -> Result<(), Uncovered> {
        // For changes under way, beside which the kernel does not answer: some 20 ms at most.
        let mut patience = Patience::new();
        for _ in 0..WATCH_TRIES {
            let mappings = coverable(&self.maps, range)?;
            let whole = extent(range, &mappings);
            note(&self.watched, whole);
            // Release, as a matter of course: the kernel's lock of all mappings orders it; see `check`.
            self.has_watched.store(true, Ordering::Release);
            before(Step::Register);
            self.register(whole).map_err(refusal)?;
            before(Step::Ask);
            if self.are_watched(&mappings, range, &mut patience).map_err(refusal)? {
                before(Step::RegisterAgain);
                self.register(whole).map_err(refusal)?;
                before(Step::Look);
                return coverable(&self.maps, range).map(drop);
            }
        }
        Err(Uncovered::Refused { errno: libc::EAGAIN })
    }

    /// Whether each page of `range`, which lies in `mappings`, is found watched by some userfaultfd.
    fn are_watched(
        &self,
        mappings: &[Mapping],
        range: AddressRange,
        patience: &mut Patience,
    ) -> Result<bool, Errno> {
        let pages = range.page_aligned(page_bytes());
        for part in mappings.iter().filter_map(|mapping| mapping.range.intersection(&pages)) {
            if !self.is_watched(part, patience)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits while changes are under way, which the kernel does not answer beside.
    fn is_watched(&self, part: AddressRange, patience: &mut Patience) -> Result<bool, Errno> {
        loop {
            match userfaultfd::watches(self.uffd.lend(), part.start(), part.end()) {
                Err(Errno(libc::EAGAIN)) if !patience.is_over() => patience.pause(),
                answer => return answer,
            }
        }
    }

    /// Another monitor of this process that is being dropped holds every mapping for a moment
    /// (see [`unwatch`](Self::unwatch)), so a refusal is tried again.
    fn register(&self, whole: AddressRange) -> Result<(), Errno> {
        let try_once = || userfaultfd::register(self.uffd.lend(), whole.start(), whole.end());
        for _ in 0..8 {
            match try_once() {
                Err(Errno(libc::EBUSY)) => thread::yield_now(),
                answer => return answer,
            }
        }
        try_once()
    }

    /// Ends every watch. False if that cannot be done for certain, as where the process may have no more mappings and one
    /// would have to be split.
    ///
    /// Closing the descriptor would do, were there not forked children with copies of it: as long
    /// as one lives, the kernel goes on waiting for a reader of the events.
    ///
    /// **Why no watched mapping is missed.** Claim: a way through touching watched mappings leads from
    /// each watched mapping to an address that is noted, in `watched` or in `left`. It holds when `watch` has noted whole
    /// mappings and registered them. A mapping that grows where it is, is split or merged touches what it
    /// touched. One that moves is noted where it arrives. One that is unmapped in part or in whole, or
    /// moved away, may break a way, and the first mapping behind the gap is noted, because it
    /// touches what is gone. [`unwatch_around`](Self::unwatch_around) goes those ways. What happens
    /// while it does is counted by the reader, and then everything is done once more; what is
    /// unwatched already has no events, so that comes to an end.
    fn unwatch_all(&self) -> bool {
        let ended = (0..16).any(|_| {
            // By the time of the answer, everything that happened before is noted.
            let moves = self.is_settled().then(|| self.core.moves());
            let done = moves.is_some() && self.uffd.is_ours() && self.unwatch_once().is_ok();
            done && self.is_settled() && moves == Some(self.core.moves())
        });
        // Behind that, because no further one is announced here.
        self.await_discards();
        ended
    }

    /// Whether every change that took effect before this call is in the log. Not where one takes so long that `check`
    /// takes everything for changed: its thread may wait for the reader still, or be about to.
    fn is_settled(&self) -> bool {
        self.usable().is_ok()
            && self.wait_until_read() == Ok(true)
            && self.wait_until_logged().is_ok()
    }

    /// Waits until no discard that was announced to this monitor is under way, because a foreign userfaultfd that watches
    /// its pages next has no record of it; the other monitors of the process ask for this one's. No longer than
    /// [`Patience`] lasts: a thread that computes and makes no system call leaves it unknown for ever.
    fn await_discards(&self) {
        let mut patience = Patience::new();
        let all = AddressRange::EVERYTHING;
        while !patience.is_over() && self.source.has_unsettled(all) {
            patience.pause();
        }
    }

    /// The mappings that share bytes with `range`.
    pub(super) fn mappings_in(&self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        self.maps.overlapping(range)
    }

    /// How many mappings the process has.
    pub(super) fn count_mappings(&self) -> Result<usize, Errno> {
        let mut count = 0;
        self.maps.visit(AddressRange::EVERYTHING, |_| count += 1)?;
        Ok(count)
    }

    /// Held by a call that has mappings watched, for a moment at least. `None` if a [`pause`](Self::pause) outlasts
    /// [`Patience`]: the program's call that is made in it may itself wait for this thread, as `mremap` does for the thread that
    /// reads the program's own userfaultfd.
    fn share_watching(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let mut patience = Patience::new();
        loop {
            match self.watching.try_read() {
                Ok(shared) => return Some(shared),
                Err(TryLockError::Poisoned(error)) => return Some(error.into_inner()),
                Err(TryLockError::WouldBlock) if patience.is_over() => return None,
                Err(TryLockError::WouldBlock) => patience.pause(),
            }
        }
    }

    /// Until it is dropped no call has a mapping watched. Waits for those that do. `None` where none is: in a forked child,
    /// which may have the lock of a thread of its parent, and where the monitor is lost. Nor beside another pause that
    /// outlasts [`Patience`], for the reason of [`share_watching`](Self::share_watching): that one may be over at any moment.
    pub(super) fn pause(&self) -> Option<Pause<'_>> {
        let mut patience = Patience::new();
        while self.usable().is_ok() {
            match self.pausing.try_lock() {
                Err(TryLockError::WouldBlock) if patience.is_over() => return None,
                Err(TryLockError::WouldBlock) => patience.pause(),
                Ok(alone) => return Some(self.pause_alone(alone)),
                Err(TryLockError::Poisoned(error)) => {
                    return Some(self.pause_alone(error.into_inner()));
                }
            }
        }
        None
    }

    /// Calls that have mappings watched come to an end, and no other thread pauses them.
    fn pause_alone<'m>(&'m self, alone: MutexGuard<'m, ()>) -> Pause<'m> {
        let watching = self.watching.write().unwrap_or_else(PoisonError::into_inner);
        Pause { _watching: watching, _alone: alone }
    }

    /// As [`unwatch_paused`](Self::unwatch_paused), while other threads have mappings watched, as this does for a moment: see
    /// [`unwatch`](Self::unwatch). Beside a pause that lasts the watch stays, which is no error.
    pub(super) fn unwatch_range(&self, range: AddressRange) {
        if self.usable().is_ok() {
            let shared = self.share_watching();
            shared.iter().for_each(|_| self.unwatch_paused(range));
        }
    }

    /// Ends the watch of the pages of `range`, so that their changes cost nothing and another
    /// userfaultfd may have them. Nothing is lost where nothing is watched.
    ///
    /// From here on their changes are not seen, so a registration of them must not be believed. Every cache that
    /// follows this monitor learns so from its log, which says that the pages change: before their watch
    /// ends, for what is registered; by [`change_pending`](Monitor::change_pending) meanwhile; and once more when it has
    /// ended, for what was watched before that and is being registered still.
    ///
    /// Behind a [`pause`](Self::pause) or [`share_watching`](Self::share_watching), or beside a pause that lasts.
    pub(super) fn unwatch_paused(&self, range: AddressRange) {
        let range = range.page_aligned(page_bytes());
        if self.usable().is_err() || !self.uffd.is_ours() {
            return;
        }
        let unwatching = self.unwatching.begin(range);
        if self.log_change(range).is_ok() {
            self.end_watch(range);
            // An error means that the monitor is lost, and then nothing is believed.
            let _ = self.log_change(range);
        }
        self.unwatching.end(unwatching);
    }

    /// First of what was noted to be watched, then of what else there is. To ask the kernel whether a mapping is watched gives
    /// one that was never used pages' bookkeeping of its own, and then it joins no neighbour. Asked second, it has joined
    /// those that it would be one with if they had never been watched.
    fn end_watch(&self, range: AddressRange) {
        let noted = self.noted_in(range);
        // What touches the range may have been reached through it only.
        let (below, above) = (range.start().saturating_sub(1), range.end().saturating_add(1));
        note(&self.left, AddressRange::between(below, above).unwrap_or(range));
        noted.into_iter().chain([range]).for_each(|range| self.unwatch_mappings(range));
    }

    /// Whether a page of `range`, or next to it, may be watched, by what was noted: whole mappings as they were watched, where
    /// they came to, and what a watch that ended left beside it. Part of a mapping that has grown since, and was split, goes
    /// unnoticed. The kernel is not asked.
    pub(super) fn may_watch(&self, range: AddressRange) -> bool {
        let (below, above) = (range.start().saturating_sub(1), range.end().saturating_add(1));
        let near = AddressRange::between(below.max(1), above).unwrap_or(range);
        let is_near = |noted: Option<Vec<AddressRange>>| {
            noted.is_none_or(|noted| noted.iter().any(|noted| noted.overlaps(&near)))
        };
        let ranges =
            |noted: &Mutex<RangeSet>| noted.lock().unwrap_or_else(PoisonError::into_inner).ranges();
        is_near(ranges(&self.watched)) || is_near(ranges(&self.left)) || is_near(self.core.moved())
    }

    fn noted_in(&self, range: AddressRange) -> Vec<AddressRange> {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let noted = watched.ranges().unwrap_or_default();
        noted.iter().filter_map(|noted| noted.intersection(&range)).collect()
    }

    fn unwatch_mappings(&self, range: AddressRange) {
        // One after the other: where a program is about to move something to, memory for a list of them would come to lie.
        // Without the table of mappings the watch stays, which is no error.
        let _ = self.maps.visit(range, |mapping| {
            if let Some(part) = mapping.range.intersection(&range) {
                // Nor is it one that the process may have no more mappings, where a part is to be split off.
                let _ = self.unwatch(&Mapping { range: part, ..mapping });
            }
        });
    }

    /// `range` without the page by which the reader is woken, whose watch stays.
    fn but_for_doorbell(&self, range: AddressRange) -> impl Iterator<Item = AddressRange> {
        let (start, end) = self.doorbell.as_ref().map_or((range.end(), range.end()), bounds);
        let below = AddressRange::between(range.start(), range.end().min(start));
        let above = AddressRange::between(range.start().max(end), range.end());
        [below, above].into_iter().flatten()
    }

    fn unwatch_once(&self) -> Result<(), Errno> {
        for range in self.places_to_look_at().ok_or(Errno(libc::EAGAIN))? {
            self.unwatch_around(range)?;
        }
        Ok(())
    }

    /// The ranges from which every watched mapping can be reached. Everything, where the kernel
    /// gives the whole table of mappings only.
    fn places_to_look_at(&self) -> Option<Vec<AddressRange>> {
        if !self.maps.has_requests() {
            return Some(vec![AddressRange::EVERYTHING]);
        }
        let mut all = self.core.moved()?;
        for noted in [&self.watched, &self.left] {
            all.extend(noted.lock().unwrap_or_else(PoisonError::into_inner).ranges()?);
        }
        Some(all)
    }

    /// Ends the watch of the mappings in `range` and of watched ones that touch them, and so on.
    fn unwatch_around(&self, range: AddressRange) -> Result<(), Errno> {
        let mappings = self.maps.overlapping(range)?;
        for mapping in &mappings {
            self.unwatch(mapping)?;
        }
        let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else { return Ok(()) };
        if range == AddressRange::EVERYTHING {
            return Ok(());
        }
        let mut below = first.range.start();
        while let Some(mapping) = self.mapping_at(below.saturating_sub(1))? {
            if !self.unwatch(&mapping)? {
                break;
            }
            below = mapping.range.start();
        }
        let mut above = last.range.end();
        while let Some(mapping) = self.mapping_at(above)? {
            if !self.unwatch(&mapping)? {
                break;
            }
            above = mapping.range.end();
        }
        Ok(())
    }

    fn mapping_at(&self, address: usize) -> Result<Option<Mapping>, Errno> {
        let Ok(byte) = AddressRange::new(address, 1) else { return Ok(None) };
        Ok(self.maps.overlapping(byte)?.pop())
    }

    /// Ends the watch of one mapping, if there is one; false if there is none for certain. The doorbell's stays, because
    /// nothing else wakes the reader.
    ///
    /// # Errors
    ///
    /// `ENOMEM`: some of it may be watched still. To end the watch of a part splits the mapping, and the process may have as
    /// many mappings as it may have.
    fn unwatch(&self, mapping: &Mapping) -> Result<bool, Errno> {
        let start = mapping.range.start();
        let watched = kind_is_covered(mapping.kind)
            && userfaultfd::watches(self.uffd.lend(), start, start + page_bytes()) != Ok(false);
        for part in self.but_for_doorbell(mapping.range).filter(|_| watched) {
            // Any other error means that it is another's, or gone, and then its change is in the log.
            if let Err(errno @ Errno(libc::ENOMEM)) = self.unregister(part) {
                return Err(errno);
            }
        }
        Ok(watched)
    }

    /// Registering first tells our mappings from those of another userfaultfd (`EBUSY`), which
    /// kernels before 6.18 would let us unregister as well.
    fn unregister(&self, part: AddressRange) -> Result<(), Errno> {
        let (start, end) = (part.start(), part.end());
        userfaultfd::register(self.uffd.lend(), start, end)?;
        // SAFETY: registered for this userfaultfd just now, which is refused where another one watches. Before Linux
        // 6.18 one that takes the pages between the two calls, after they were mapped anew, loses its watch: among the
        // undetected changes of `docs/src/monitors.md`.
        unsafe { userfaultfd::unregister(self.uffd.lend(), start, end) }
    }

    /// Ends the reader when no thread waits for it any more.
    fn end_reader(&mut self) {
        let Some(doorbell) = self.doorbell.take() else { return };
        let (start, end) = bounds(&doorbell);
        // The page may have been unwatched together with its neighbours.
        let rings = userfaultfd::register(self.uffd.lend(), start, end).is_ok();
        if rings && let Some(reader) = self.reader.take() {
            self.core.stop();
            drop(doorbell);
            reader.join();
        }
    }
}

impl Drop for Userfaultfd {
    /// In a forked child nothing but the child's own copies is given up. If the descriptor was
    /// taken away from us, the reader goes on for ever: a sleeping thread is better than one that
    /// hangs in `munmap`. What is known of discards stays for the process's other monitors, until they are over.
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and is not joined.
        if self.core.log.forked() {
            return;
        }
        if self.unwatch_all() {
            self.end_reader();
            self.source.end();
        } else if self.core.lost().is_none() {
            // Some memory may be watched still, and the other monitors ask this descriptor for its changes.
            self.uffd.leave_open();
        }
    }
}

/// What the reader works on.
#[derive(Debug)]
struct ReaderTask {
    core: Arc<Core>,
    uffd: Descriptor,
}

/// Makes the reader, with all signals blocked from its first instruction.
fn spawn_reader(core: &Arc<Core>, uffd: Descriptor) -> Result<LeanThread<ReaderTask>, StartError> {
    let task = ReaderTask { core: Arc::clone(core), uffd };
    LeanThread::spawn(c"pinfold-events", task, |task| reader::run(&task.core, task.uffd))
        .map_err(|error| StartError::thread(&error))
}

const fn kind_is_covered(kind: MappingKind) -> bool {
    matches!(kind, MappingKind::PrivateAnonymous | MappingKind::PrivateHuge)
}

fn note(noted: &Mutex<RangeSet>, range: AddressRange) {
    let noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
    if !noted.covers(range) {
        noted.insert(range, 0, 0);
    }
}

/// The mappings that `range` lies in, if they leave no hole and each can be watched.
fn coverable(maps: &OpenMaps, range: AddressRange) -> Result<Vec<Mapping>, Uncovered> {
    let mappings = maps.overlapping(range).map_err(refusal)?;
    let mut next = range.start();
    for mapping in &mappings {
        if mapping.range.start() > next {
            return Err(Uncovered::Unmapped);
        }
        if !kind_is_covered(mapping.kind) {
            return Err(Uncovered::Mapping(mapping.kind));
        }
        if !mapping.has_access() {
            return Err(Uncovered::NoAccess);
        }
        next = mapping.range.end();
    }
    if next < range.end() { Err(Uncovered::Unmapped) } else { Ok(mappings) }
}

/// From the start of the first mapping to the end of the last. Whole mappings are watched, because
/// watching a part splits them, and the kernel allows 65,530.
fn extent(range: AddressRange, mappings: &[Mapping]) -> AddressRange {
    let start = mappings.first().map_or(range.start(), |first| first.range.start());
    let end = mappings.last().map_or(range.end(), |last| last.range.end());
    AddressRange::between(start, end).unwrap_or(range)
}

fn refusal(Errno(errno): Errno) -> Uncovered {
    match errno {
        libc::EBUSY => Uncovered::WatchedByAnother,
        errno => Uncovered::Refused { errno },
    }
}

fn open_uffd() -> Result<KnownDescriptor, StartError> {
    let os = |Errno(errno)| StartError::Os { operation: "uname", errno };
    StartError::of_kernel(&kernel_release().map_err(os)?)?;
    let opened = userfaultfd::open().map_err(StartError::open)?;
    let uffd = KnownDescriptor::new(opened).map_err(StartError::open)?;
    userfaultfd::api(uffd.lend(), StartError::FEATURES).map_err(StartError::features)?;
    Ok(uffd)
}

// SAFETY: the promises of `Monitor`, one by one.
//
// **Visible.** Let a change have taken effect before `check` was called. Before its effect, and
// under the lock of all mappings, its thread has raised the kernel's count of changes under way;
// after its event has been read, it lowers the count. (So it is for unmapping and moving. A
// discard raises the count, waits, lowers it, and takes effect then.) "Took effect" means here
// that `check`'s caller knows of it: the changing call returned, or an address that it freed was
// mapped anew, which needed the same lock after it. In both cases the raised count is visible to
// the question that `check` asks.
//
// 1. The question says *yes, something is under way*: `check` asks again.
// 2. It says *no*. Then the change has lowered the count, so its event has been read, so the
//    reader had raised the pending mark before that read. The word is loaded after the question:
//    - the word is odd: the event may still be in the reader's hands. `check` waits until the
//      word has been even since, and by then the event is in the log and counted.
//    - the word is even: it was stored after that pending mark, hence after the event was
//      logged, and it counts the event.
//
//    The order *question, then word* is what makes this work. The other way round, the word may
//    be even before the event is read, and the question be answered *no* after it: a stale hit.
// 3. *Yes* for too long: the log gets an entry that overlaps everything. It is made after it was
//    asked for, thus after the change took effect, and `check` returns a word that counts it.
//
// As long as nothing was watched, there is no such change, and the question is not asked. Let one have
// taken effect of memory that `watch` had answered for. The mark that something is watched was set before
// the kernel was asked to watch, which takes the lock of all mappings; the change took that lock
// later, and `check`'s caller knows of the change. So the mark is visible to `check`.
//
// On the ordering: the reader's mark comes before its read, the read releases the event queue's
// lock, the changing thread acquires it before it lowers the count, and the acquire fence keeps
// the load of the word behind the question.
//
// **Pending.** Only discards take effect after their event; see `pending_discards.rs`. The record is
// made before the log entry is counted. A discard that was announced to another monitor of this process, which watched the pages
// before, has no entry in this log; `change_pending` asks that one's records (`discard_sources.rs` has the argument).
//
// **Kept.** See `ring.rs` and `log.rs`.
//
// **Calm.** `check` and `replay` take no lock. `change_pending` tries one that only another `change_pending`
// holds, or a monitor that starts or ends and asks the same. Where the process has another monitor, it takes one that is held
// while a pointer to a monitor is copied or exchanged: no memory is mapped, allocated or freed then, and no other lock is
// waited for. The reader takes neither. It may free what a dropped monitor has left, and holds no lock then. `notified`, `notify` and `wait` take none.
//
// **Marked.** The reader sets marks as it logs an event, before the word is even again. A changing call returns after its event
// was read, for which the pending mark was raised before: a `check` that begins then waits until the word was even since, and
// so for the marks, whether or not it gave up the wait for changes under way. The entry that it then asks for sets none: it
// says of no range that it has changed.
//
// **Watch.** A change that a registration must not miss is one after `watch` began: what was before, its caller
// reads from the log or by `check`. Claim: if `watch` answers `Covered`, then for each page of the range there was a moment
// during the call at which the page belonged to a mapping of ours (one with our watch) that is of a covered
// kind; or its change is in the log, which the cache finds that compares with a `check` made before `watch`, not with one made
// after it. From its moment on, each page's replacement is an event, as above, and so in the log.
//
// Registering alone does not do it: `userfaultfd_register` sets the watch of what is mapped, under the lock of all
// mappings, and passes over holes without an error. What fills one later has no watch, however the table of mappings
// looks then. So the steps are:
//
// 1. *Register* the mappings that the table shows. At that moment every page in them that is mapped is ours, because the
//    kernel refuses the whole (`EBUSY`) if another userfaultfd has one.
// 2. *Ask*, for each part of the range that lay in one mapping, whether it lies in one watched mapping
//    (`userfaultfd::watches`). The kernel answers for the whole part under that mapping's lock, so the answer does not depend on
//    how mappings were merged or split meanwhile: mappings merge only if they have the same watch or both have none
//    (`is_mergeable_vm_userfaultfd_ctx`), and parts of one that is split keep it. A split that falls between makes the
//    answer no, and it is all done anew. This is each page's moment, if the watch is ours.
// 3. *Register again*, which is refused if the watch was another's and still is.
// 4. *Look* at the table. If a page is mapped as it was at its moment, this tells its kind. If not, its change is an
//    event, and logged before a cache can keep it.
//
// Other calls of `watch` at the same time, and `unwatch_range`, do no harm: what they register is ours, and what
// `unwatch_range` ends is logged after it. `mremap` that brings a watched mapping into the range is an event.
//
// What is left: a page that was a hole in 1 has come back, and another userfaultfd has begun to watch it before 2; it has ended
// that, and the page is a hole again in 3, and has come back before 4. That takes two replacements and the begin and the end of
// a foreign watch of the same page, all between these steps. Another one that ends its watch of a page which stays is harmless:
// that page is registered in 3, which is its moment then. But for one discard: that which the kernel announced to the other
// one before its watch ended, and which goes on after ours began. No record of ours says that it is under way; if the other
// one is a monitor of this process, its record does (Pending).
unsafe impl Monitor for Userfaultfd {
    fn name(&self) -> &'static str {
        "userfaultfd"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        self.usable()?;
        self.core.discards.mark_caller();
        // Acquire: pairs with the store in `watch_mappings`.
        if self.has_watched.load(Ordering::Acquire) && !self.wait_until_read()? {
            self.flood()?;
        }
        // Acquire fence: the word is loaded after the kernel's answer.
        fence(Ordering::Acquire);
        self.wait_until_logged()
    }

    fn watch(&self, range: AddressRange) -> Watch {
        if let Err(lost) = self.usable() {
            return Watch::Uncovered(Uncovered::Lost(lost));
        }
        if !self.uffd.is_ours() {
            return Watch::Uncovered(Uncovered::Lost(self.lose(Errno(libc::EBADF))));
        }
        // Held to the end: what is watched to learn the price is watched, too.
        let Some(_shared) = self.share_watching() else {
            return Watch::Uncovered(Uncovered::Refused { errno: libc::EAGAIN });
        };
        if let Err(why) = self.watch_mappings(range) {
            return Watch::Uncovered(why);
        }
        self.price.note_watch(|| self.watched_page());
        Watch::Covered
    }

    fn has_slow_check(&self) -> bool {
        true
    }

    fn change_surcharge(&self) -> u64 {
        self.price.surcharge()
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.usable().is_err()
            || self.unwatching.overlaps(range)
            || self.source.has_unsettled(range)
            || others_may_discard(&self.source, range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.replay_some(from, usize::MAX, visit)
    }

    fn replay_some(
        &self,
        from: Position,
        most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        self.core.log.replay(from, most, visit)
    }

    fn mark_changes(&self, range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        Some(Box::new(self.core.marks.begin(range)?))
    }

    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover {
        match change {
            _ if !kind_is_covered(mapping) => Cover::NotCached,
            Change::Guard | Change::AttachOver => Cover::Undetected,
            Change::Protect => Cover::Harmless,
            _ => Cover::Detected,
        }
    }

    fn forked(&self) -> bool {
        self.core.log.forked()
    }

    fn notified(&self) -> u32 {
        self.core.event_count.count()
    }

    fn notify(&self) {
        self.core.event_count.notify();
    }

    fn wait(&self, seen: u32) {
        self.core.event_count.wait(seen);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::discard_sources::while_a_place_is_locked;
    use super::*;
    use crate::Position;
    use crate::descriptor::in_another_table;
    use crate::map_limit::MapLimit;
    use crate::own_process::alone;
    use pinfold_kernel::mapping::OwnedMapping;
    use std::os::fd::AsRawFd as _;
    use std::time::Duration;

    const PAGES: usize = 4;

    /// Runs this file's test `name` where no other thread maps memory: what is unmapped here comes back where it was.
    fn without_other_tests(name: &str, body: impl FnOnce()) {
        alone(&format!("{}::{name}", module_path!().split_once("::").unwrap().1), body);
    }

    /// Without it a change that is under way as a monitor is dropped had the drop wait for a reader that nothing woke.
    #[test]
    fn the_page_that_wakes_the_reader_stays_watched_as_long_as_there_is_a_reader() {
        let monitor = Userfaultfd::new().unwrap();
        let (start, end) = bounds(monitor.doorbell.as_ref().unwrap());
        let doorbell = AddressRange::between(start, end).unwrap();
        let is_watched = || userfaultfd::watches(monitor.uffd.lend(), start, end);
        monitor.unwatch_around(doorbell).unwrap();
        assert_eq!(is_watched(), Ok(true));
        monitor.end_watch(doorbell);
        assert_eq!(is_watched(), Ok(true));
        assert!(monitor.unwatch_all());
        assert_eq!(is_watched(), Ok(true));
        assert_eq!(monitor.flood(), Ok(()));
    }

    /// As some kernels leave pages behind a userfaultfd that the program has closed.
    #[test]
    fn what_is_write_protected_where_it_is_watched_can_be_written() {
        /// `UFFDIO_WRITEPROTECT`: start, length, and 1 to protect.
        const PROTECT: libc::c_ulong = 0xc018_aa06;
        let monitor = Userfaultfd::new().unwrap();
        let mut pages = OwnedMapping::new(PAGES * page_bytes()).unwrap();
        pages.fill(1);
        let range = pages.range().unwrap();
        assert_eq!(monitor.watch(range), Watch::Covered);
        let protect = [range.start() as u64, range.len() as u64, 1];
        // SAFETY: the kernel reads `protect`; the pages are this test's.
        let answer =
            unsafe { libc::ioctl(monitor.uffd.lend().as_raw_fd(), PROTECT as _, protect.as_ptr()) };
        assert_eq!(answer, 0);
        let before = monitor.check().unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            pages.fill(2);
            done.send(pages).unwrap();
        });
        let _pages = is_done.recv_timeout(Duration::from_secs(60)).expect("the writer waits");
        assert_eq!(monitor.check().unwrap(), before, "what was written is where it was");
    }

    /// A drop then leaves the reader at work: as long as a forked child has a copy of the descriptor, the kernel waits for one.
    #[test]
    fn a_watch_that_cannot_end_because_of_the_limit_of_mappings_is_told() {
        let name = "a_watch_that_cannot_end_because_of_the_limit_of_mappings_is_told";
        without_other_tests(name, || {
            let monitor = Userfaultfd::new().unwrap();
            let room = Room::new();
            assert_eq!(monitor.watch(room.pages(0, PAGES)), Watch::Covered);
            let mut mapping = monitor.mapping_at(room.pages(0, 1).start()).unwrap().unwrap();
            mapping.range = room.pages(1, 1);
            let Some(limit) = MapLimit::reach() else { return };
            let answer = monitor.unwatch(&mapping);
            drop(limit);
            assert_eq!(answer, Err(Errno(libc::ENOMEM)));
            assert_eq!(monitor.unwatch(&mapping), Ok(true));
        });
    }

    /// The kernel says that it is an old one to a thread that asks for that.
    #[test]
    fn on_a_kernel_before_5_19_there_is_no_monitor() {
        const UNAME26: libc::c_ulong = 0x0002_0000;
        let old = std::thread::scope(|scope| {
            let start = || {
                // SAFETY: no pointer; of this thread alone.
                assert_ne!(unsafe { libc::personality(UNAME26) }, -1);
                Userfaultfd::new().map(drop)
            };
            scope.spawn(start).join().unwrap()
        });
        assert!(matches!(old, Err(StartError::OldKernel { major: 2, minor: 6 })), "{old:?}");
    }

    /// Pages that come and go between two without rights: nothing merges with them.
    struct Room(OwnedMapping);

    impl Room {
        fn new() -> Self {
            let room = Self(OwnedMapping::inaccessible((PAGES + 2) * page_bytes()).unwrap());
            room.map(room.pages(0, PAGES));
            room
        }

        fn pages(&self, first: usize, count: usize) -> AddressRange {
            let start = self.0.start().addr().get() + (1 + first) * page_bytes();
            AddressRange::new(start, count * page_bytes()).unwrap()
        }

        fn map(&self, part: AddressRange) {
            assert!(self.0.range().unwrap().contains(&part));
            let (at, rights) = (part.start() as *mut _, libc::PROT_READ | libc::PROT_WRITE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: a part of pages that nothing refers to.
            let mapped = unsafe { libc::mmap(at, part.len(), rights, flags, -1, 0) };
            assert_eq!(mapped, at);
        }

        fn discard(&self, part: AddressRange) {
            assert!(self.0.range().unwrap().contains(&part));
            let at = part.start() as *mut _;
            // SAFETY: as above.
            assert_eq!(unsafe { libc::madvise(at, part.len(), libc::MADV_DONTNEED) }, 0);
        }

        fn unmap(&self, part: AddressRange) {
            assert!(self.0.range().unwrap().contains(&part));
            // SAFETY: as above.
            assert_eq!(unsafe { libc::munmap(part.start() as *mut _, part.len()) }, 0);
        }
    }

    /// Whether a cache that asked `check` at `since` drops what lies in `range`.
    fn reports(monitor: &Userfaultfd, since: Position, range: AddressRange) -> bool {
        monitor.check().unwrap();
        let mut found = false;
        let replay = monitor.replay(since, &mut |changed| found |= changed.overlaps(&range));
        found || !replay.complete
    }

    fn place(monitor: &Userfaultfd) -> Position {
        monitor.check().unwrap();
        monitor.replay(Position::NOWHERE, &mut |_| ()).up_to
    }

    /// A part is unmapped before one step and mapped anew before a later one, by a thread that was not seen yet. What
    /// is kept after that must be dropped when the part is replaced once more.
    #[test]
    fn what_changes_while_it_is_being_watched_is_watched_or_not_kept() {
        let name = "what_changes_while_it_is_being_watched_is_watched_or_not_kept";
        without_other_tests(name, || {
            let monitor = Userfaultfd::new().unwrap();
            let (mut covered, mut refused) = (0, 0);
            let holes = [(0, 1), (1, 2), (3, 1), (0, 4), (1, 3)];
            for (first, count) in holes {
                for (gone, back) in
                    (0..8).flat_map(|gone| (gone + 1..9).map(move |back| (gone, back)))
                {
                    let room = Room::new();
                    let (all, hole) = (room.pages(0, PAGES), room.pages(first, count));
                    let since = place(&monitor);
                    let mut steps = 0;
                    let answer = monitor.watch_stepwise(all, |_| {
                        let here = |step| step == steps;
                        here(gone).then(|| room.unmap(hole));
                        here(back).then(|| room.map(hole));
                        steps += 1;
                    });
                    let is_kept = answer.is_ok() && !reports(&monitor, since, all);
                    // Where nothing was left to be done the part is gone, or was there all the time.
                    if !is_kept || (gone < steps && back >= steps) {
                        refused += 1;
                        continue;
                    }
                    covered += 1;
                    let since = place(&monitor);
                    room.map(hole);
                    assert!(
                        reports(&monitor, since, hole),
                        "pages {first}..{} gone before step {gone}, back before {back}",
                        first + count
                    );
                }
            }
            assert!(covered != 0 && refused != 0, "{covered} {refused}");
        });
    }

    /// Another userfaultfd takes what came back: its watch is not ours.
    #[test]
    fn what_another_one_watches_meanwhile_is_refused() {
        without_other_tests("what_another_one_watches_meanwhile_is_refused", || {
            let (monitor, other) = (Userfaultfd::new().unwrap(), Userfaultfd::new().unwrap());
            for taken in 1..4 {
                let room = Room::new();
                let (all, hole) = (room.pages(0, PAGES), room.pages(1, 2));
                let mut steps = 0;
                let answer = monitor.watch_stepwise(all, |_| {
                    if steps == 0 {
                        room.unmap(hole);
                    }
                    if steps == taken {
                        room.map(hole);
                        other.register(hole).unwrap();
                    }
                    steps += 1;
                });
                if steps > taken {
                    assert!(answer.is_err(), "taken before step {taken}: {answer:?}");
                }
            }
        });
    }

    /// An entry for everything stands for changes under way, and is none of a range that has not changed.
    #[test]
    fn a_mark_is_set_by_each_change_of_its_range_and_by_no_entry_for_everything() {
        let monitor = Userfaultfd::new().unwrap();
        let room = Room::new();
        let all = room.pages(0, PAGES);
        assert_eq!(monitor.watch(all), Watch::Covered);
        let since = place(&monitor);
        let marks = [0, 1].map(|page| monitor.mark_changes(room.pages(page, 1)).unwrap());
        let are_set = || [0, 1].map(|page| marks[page].is_set());
        monitor.flood().unwrap();
        assert!(reports(&monitor, since, all));
        assert_eq!(are_set(), [false; 2]);
        room.discard(room.pages(1, 1));
        monitor.flood().unwrap();
        monitor.check().unwrap();
        assert_eq!(are_set(), [false, true]);
    }

    /// A thread that never rests and never calls a monitor: what was discarded after its start may be its doing.
    struct Busy {
        stop: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<()>>,
    }

    impl Busy {
        fn new() -> Self {
            let (stop, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
            let (to_stop, running) = (Arc::clone(&stop), Arc::clone(&runs));
            let thread = std::thread::spawn(move || {
                running.store(true, Ordering::Release);
                while !to_stop.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
            });
            until(|| runs.load(Ordering::Acquire));
            Self { stop, thread: Some(thread) }
        }
    }

    impl Drop for Busy {
        fn drop(&mut self) {
            self.stop.store(true, Ordering::Release);
            self.thread.take().unwrap().join().unwrap();
        }
    }

    /// Other tests' threads may be busy for a while, and their monitors' readers.
    fn until(is_so: impl Fn() -> bool) {
        while !is_so() {
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Memory whose first page was discarded while `monitor` watched it. As long as the thread lives, it cannot be told whether
    /// that is over.
    fn with_unsettled_discard(monitor: &Userfaultfd) -> (Room, Busy) {
        let room = Room::new();
        let all = room.pages(0, PAGES);
        assert_eq!(monitor.watch(all), Watch::Covered);
        // Discards of what had these addresses before.
        until(|| !monitor.change_pending(all));
        let busy = Busy::new();
        room.discard(room.pages(0, 1));
        monitor.check().unwrap();
        (room, busy)
    }

    /// Nor does the call wait for ever: what the pause is for may wait for this thread.
    #[test]
    fn no_memory_becomes_watched_during_a_pause() {
        let monitor = Userfaultfd::new().unwrap();
        let room = Room::new();
        let pause = monitor.pause();
        assert!(pause.is_some());
        let refused = Uncovered::Refused { errno: libc::EAGAIN };
        assert_eq!(monitor.watch(room.pages(0, PAGES)), Watch::Uncovered(refused));
        drop(pause);
        assert_eq!(monitor.watch(room.pages(0, PAGES)), Watch::Covered);
    }

    /// The kernel announced it to the first monitor only.
    #[test]
    fn a_discard_that_was_announced_to_another_monitor_is_pending() {
        let [first, second] = [(); 2].map(|()| Userfaultfd::new().unwrap());
        let (room, busy) = with_unsettled_discard(&first);
        let (all, discarded, other) = (room.pages(0, PAGES), room.pages(0, 1), room.pages(2, 1));
        first.unwatch_range(all);
        assert_eq!(second.watch(all), Watch::Covered);
        for _ in 0..20 {
            assert!(first.change_pending(discarded), "its record stays");
            assert!(second.change_pending(discarded) && second.change_pending(all));
        }
        until(|| !second.change_pending(other));
        drop(busy);
        until(|| !second.change_pending(all));
    }

    /// The same, where the first watch did not end: the memory is mapped anew.
    #[test]
    fn a_discard_that_was_announced_to_another_monitor_outlives_the_mapping() {
        let [first, second] = [(); 2].map(|()| Userfaultfd::new().unwrap());
        let (room, busy) = with_unsettled_discard(&first);
        let all = room.pages(0, PAGES);
        room.map(all);
        assert_eq!(second.watch(all), Watch::Covered);
        assert!(second.change_pending(room.pages(0, 1)));
        until(|| !second.change_pending(room.pages(2, 1)));
        drop(busy);
        until(|| !second.change_pending(all));
    }

    /// Each was made by a thread with a table of its own, and another one's miss asks them.
    #[test]
    fn monitors_in_other_tables_of_descriptors_are_not_lost() {
        let name = "monitors_in_other_tables_of_descriptors_are_not_lost";
        without_other_tests(name, || {
            in_another_table(
                || Userfaultfd::new().unwrap(),
                |first| {
                    let second = Userfaultfd::new().unwrap();
                    let room = Room::new();
                    let all = room.pages(0, PAGES);
                    assert_eq!(second.watch(all), Watch::Covered);
                    assert!(second.change_pending(all), "the first one cannot be asked");
                    assert_eq!([&first, &second].map(|it| it.usable()), [Ok(()); 2]);
                },
            );
        });
    }

    #[test]
    fn a_dropped_monitor_leaves_its_discards_until_they_are_settled() {
        let [first, second] = [(); 2].map(|()| Userfaultfd::new().unwrap());
        let (room, busy) = with_unsettled_discard(&first);
        let (all, discarded, other) = (room.pages(0, PAGES), room.pages(0, 1), room.pages(2, 1));
        let core = Arc::downgrade(&first.core);
        drop(first);
        assert_eq!(second.watch(all), Watch::Covered);
        for _ in 0..20 {
            assert!(second.change_pending(discarded) && second.change_pending(all));
        }
        until(|| !second.change_pending(other));
        drop(busy);
        until(|| !second.change_pending(all));
        until(|| core.strong_count() == 0);
    }

    /// Nothing of the parent's is under way in a child, and no lock that is held as it is forked is waited for.
    #[test]
    fn a_forked_child_asks_its_own_monitors_only() {
        let first = Userfaultfd::new().unwrap();
        let (room, busy) = with_unsettled_discard(&first);
        let all = room.pages(0, PAGES);
        let child_finds = || {
            let [own, second] = [(); 2].map(|()| Userfaultfd::new().ok());
            let (own, second) = (own?, second?);
            let is_covered = own.watch(all) == Watch::Covered;
            let is_calm = !own.change_pending(all) && first.change_pending(all);
            // Nor does what another monitor of the child knows stay behind.
            room.discard(room.pages(0, 1));
            own.unwatch_range(all);
            let is_taken = second.watch(all) == Watch::Covered && !second.change_pending(all);
            drop(own);
            Some(is_covered && is_calm && is_taken && !second.change_pending(all))
        };
        // SAFETY: the child makes monitors, as one may whose parent has several threads, and ends.
        let child = while_a_place_is_locked(|| match unsafe { libc::fork() } {
            0 => {
                // SAFETY: as above.
                unsafe { libc::alarm(300) };
                let code = if child_finds() == Some(true) { 0 } else { 1 };
                // SAFETY: as above.
                unsafe { libc::_exit(code) }
            }
            child => child,
        });
        let mut status = 0;
        // SAFETY: the child was made above, and is waited for once.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(busy);
    }
}
