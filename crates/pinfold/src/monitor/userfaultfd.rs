//! The monitor without privileges: userfaultfd in write-protect mode, where nothing is ever
//! protected, so the kernel reports changes of mappings and no page fault.
//!
//! # The price
//!
//! Once something was watched, one system call per [`check`](Monitor::check) (two to three times an empty
//! one); a changing thread that waits some microseconds until the reader has its event; and one thread
//! asleep, with the highest real-time priority that the process may ask for.
//! `munmap` of memory that was never watched costs what it did before. A `check` that runs into a
//! change of watched memory waits until that change has returned; after some 10 ms of that it
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
//! range, too, silently. The preload library's hook of `ioctl` reports it.
//!
//! A process that shares this one's memory, and is killed while it changes some of it, takes its event along:
//! `docs/src/catalogue.md` has the argument.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to promise what [`Monitor`] demands, the proof of which stands above that
//! promise, and to end watches that are this monitor's.

#![allow(unsafe_code)]

use super::event_count::EventCount;
use super::log::Log;
use super::price::ChangePrice;
use super::range_set::RangeSet;
use super::reader::{self, Core};
use super::self_test;
use super::start::StartError;
use super::watched_page::{Unread, bounds, range_of, register};
use crate::descriptor::KnownDescriptor;
use crate::mappings::{Mapping, OpenMaps};
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Uncovered,
    Watch,
};
use pinfold_core::PendingChanges;
use pinfold_kernel::{
    Descriptor, Errno, mapping::AtomicPage, process::page_bytes, thread, thread::LeanThread,
    userfaultfd,
};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Watches private anonymous memory, without privileges.
///
/// Two of them cannot watch the same mapping, so caches should share one:
/// [`shared`](Self::shared).
pub struct Userfaultfd {
    core: Arc<Core>,
    uffd: KnownDescriptor,
    maps: OpenMaps,
    /// Watched; a change of it wakes the reader. `None` once dropped.
    doorbell: Option<AtomicPage>,
    reader: Option<LeanThread<ReaderTask>>,
    /// What was ever watched, by whole mappings. The lock guards the writer's place; it is taken by
    /// `watch`, around some ten nanoseconds, and when the monitor ends.
    watched: Mutex<RangeSet>,
    /// Whether anything was ever watched but pages of our own. Set before the kernel is asked to.
    has_watched: AtomicBool,
    price: ChangePrice,
    /// Ranges whose watch is being ended by [`unwatch_range`](Self::unwatch_range).
    unwatching: PendingChanges<4>,
    /// Guards the place for a range that the reader is to log: until it has. Taken with no other lock held.
    naming: Mutex<()>,
}

/// One short line: its log alone has thousands of entries.
impl fmt::Debug for Userfaultfd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Userfaultfd")
            .field("descriptor", &self.uffd.number())
            .finish_non_exhaustive()
    }
}

/// How many ranges of watched mappings are told apart; with more, the mappings between some of them
/// are looked at as well when the monitor ends.
const WATCHED_RANGES: usize = 4096;

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
        let doorbell = AtomicPage::new().map_err(StartError::memory)?;
        let unread = Unread::watch(uffd.lend(), &doorbell)?;
        self_test::of_the_question(uffd.lend())?;
        let page = range_of(&doorbell).ok_or(StartError::NoMemory { errno: libc::ENOMEM })?;
        let core = Arc::new(Core::new(page).map_err(StartError::memory)?);
        let reader = spawn_reader(&core, uffd.number())?;
        unread.stay();
        let (doorbell, reader) = (Some(doorbell), Some(reader));
        let watched = Mutex::new(RangeSet::new(WATCHED_RANGES));
        let price = ChangePrice::default();
        let has_watched = AtomicBool::new(false);
        let (unwatching, naming) = (PendingChanges::new(), Mutex::new(()));
        let monitor = Self {
            core,
            uffd,
            maps,
            doorbell,
            reader,
            watched,
            has_watched,
            price,
            unwatching,
            naming,
        };
        self_test::of_the_events(&monitor, || monitor.watched_page())?;
        monitor.price.measure_first(|| monitor.watched_page());
        Ok(monitor)
    }

    /// The descriptor's number, for those who test what happens when it goes away.
    #[doc(hidden)]
    pub fn descriptor(&self) -> i32 {
        self.uffd.number()
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
        let whole = extent(range, &coverable(&self.maps, range)?);
        self.note_watched(whole);
        // Release, as a matter of course: the kernel's lock of all mappings orders it; see `check`.
        self.has_watched.store(true, Ordering::Release);
        self.register(whole).map_err(refusal)?;
        // What was asked above may have been replaced before it was registered, even by memory
        // of another kind, without an event. From here on every replacement is an event.
        coverable(&self.maps, range).map(drop)
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

    fn note_watched(&self, whole: AddressRange) {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if !watched.covers(whole) {
            watched.insert(whole, 0, 0);
        }
    }

    /// Ends every watch. False if that cannot be done for certain.
    ///
    /// Closing the descriptor would do, were there not forked children with copies of it: as long
    /// as one lives, the kernel goes on waiting for a reader of the events.
    ///
    /// **Why no watched mapping is missed.** Claim: a way through touching watched mappings leads from
    /// each watched mapping to an address that is noted. It holds when `watch` has noted whole mappings
    /// and registered them. A mapping that grows where it is, is split or merged touches what it
    /// touched. One that moves is noted where it arrives. One that is unmapped in part or in whole, or
    /// moved away, may break a way, and the first mapping behind the gap is noted, because it
    /// touches what is gone. [`unwatch_around`](Self::unwatch_around) goes those ways. What happens
    /// while it does is counted by the reader, and then everything is done once more; what is
    /// unwatched already has no events, so that comes to an end.
    fn unwatch_all(&self) -> bool {
        (0..16).any(|_| {
            // By the time of the answer, everything that happened before is noted.
            let settled = self.check().is_ok();
            let moves = self.core.moves();
            let done = self.uffd.is_ours() && self.unwatch_once().is_ok();
            done && settled && self.check().is_ok() && self.core.moves() == moves
        })
    }

    /// The mappings that share bytes with `range`.
    pub(super) fn mappings_in(&self, range: AddressRange) -> Result<Vec<Mapping>, Errno> {
        self.maps.overlapping(range)
    }

    /// Ends the watch of the pages of `range`, so that their changes cost nothing and another
    /// userfaultfd may have them. Nothing is lost where nothing is watched.
    ///
    /// From here on their changes are not seen, so a registration of them must not be believed. Every cache that
    /// follows this monitor learns so from its log, which says that the pages change: before their watch
    /// ends, for what is registered; by [`change_pending`](Monitor::change_pending) meanwhile; and once more when it has
    /// ended, for what was watched before that and is being registered still.
    pub(super) fn unwatch_range(&self, range: AddressRange) {
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

    fn end_watch(&self, range: AddressRange) {
        // Without the table of mappings the watch stays, which is no error.
        let mappings = self.maps.overlapping(range).unwrap_or_default();
        // What touches the range may have been reached through it only.
        let (below, above) = (range.start().saturating_sub(1), range.end().saturating_add(1));
        self.note_watched(AddressRange::between(below, above).unwrap_or(range));
        for mapping in mappings {
            for part in self.but_for_doorbell(range) {
                if let Some(part) = mapping.range.intersection(&part) {
                    self.unwatch(&Mapping { range: part, ..mapping });
                }
            }
        }
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
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranges = watched.ranges()?;
        ranges.extend(self.core.moved()?);
        Some(ranges)
    }

    /// Ends the watch of the mappings in `range` and of watched ones that touch them, and so on.
    fn unwatch_around(&self, range: AddressRange) -> Result<(), Errno> {
        let mappings = self.maps.overlapping(range)?;
        mappings.iter().for_each(|mapping| _ = self.unwatch(mapping));
        let (Some(first), Some(last)) = (mappings.first(), mappings.last()) else { return Ok(()) };
        if range == AddressRange::EVERYTHING {
            return Ok(());
        }
        let mut below = first.range.start();
        while let Some(mapping) = self.mapping_at(below.saturating_sub(1))? {
            if !self.unwatch(&mapping) {
                break;
            }
            below = mapping.range.start();
        }
        let mut above = last.range.end();
        while let Some(mapping) = self.mapping_at(above)? {
            if !self.unwatch(&mapping) {
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

    /// Ends the watch of one mapping, if there is one; false if there is none for certain.
    ///
    /// Registering first tells our mappings from those of another userfaultfd (`EBUSY`), which
    /// kernels before 6.18 would let us unregister as well.
    fn unwatch(&self, mapping: &Mapping) -> bool {
        let (start, end) = (mapping.range.start(), mapping.range.end());
        let watched = kind_is_covered(mapping.kind)
            && userfaultfd::watches(self.uffd.lend(), start) != Ok(false);
        if watched && userfaultfd::register(self.uffd.lend(), start, end).is_ok() {
            // An error means that it is gone, and then its change is in the log.
            // SAFETY: registered for this userfaultfd just now, which is refused where another one watches.
            let _ = unsafe { userfaultfd::unregister(self.uffd.lend(), start, end) };
        }
        watched
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
    /// hangs in `munmap`.
    fn drop(&mut self) {
        // In a forked child the thread does not exist, and is not joined.
        if !self.core.log.forked() && self.unwatch_all() {
            self.end_reader();
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
        .map_err(|error| StartError::Thread { errno: error.raw_os_error().unwrap_or(libc::EAGAIN) })
}

const fn kind_is_covered(kind: MappingKind) -> bool {
    matches!(kind, MappingKind::PrivateAnonymous | MappingKind::PrivateHuge)
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
    let opened = userfaultfd::open().map_err(StartError::open)?;
    let uffd = KnownDescriptor::new(opened).map_err(StartError::open)?;
    userfaultfd::api(uffd.lend(), StartError::FEATURES).map_err(StartError::features)?;
    Ok(uffd)
}

/// How to wait for something that is short as a rule: spin, then let others run, then sleep.
struct Patience(u32);

impl Patience {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 512;
    /// Together about 10 ms.
    const SLEEPS: u32 = 64;
    const SLEEP: Duration = Duration::from_micros(100);

    fn new() -> Self {
        Self(0)
    }

    fn is_over(&self) -> bool {
        self.0 >= Self::SPINS + Self::YIELDS + Self::SLEEPS
    }

    fn pause(&mut self) {
        match self.0 {
            0..Self::SPINS => std::hint::spin_loop(),
            Self::SPINS..Self::YIELDS => thread::yield_now(),
            _ => thread::sleep(Self::SLEEP),
        }
        self.0 = self.0.saturating_add(1);
    }
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
// made before the log entry is counted.
//
// **Kept.** See `ring.rs` and `log.rs`.
//
// **Calm.** `check` and `replay` take no lock. `change_pending` tries one that only another `change_pending`
// holds. `notified`, `notify` and `wait` take none.
//
// `watch` answers `Covered` if at some moment between its two looks at the table every mapping
// in the range was reported on. If the range changed since a `check` made before `watch`, the log
// tells so; a caller must compare with that `check`, not with one made after `watch`.
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
        if let Err(why) = self.watch_mappings(range) {
            return Watch::Uncovered(why);
        }
        self.price.note_watch(|| self.watched_page());
        Watch::Covered
    }

    fn change_surcharge(&self) -> u64 {
        self.price.surcharge()
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.usable().is_err()
            || self.unwatching.overlaps(range)
            || self.core.discards.overlaps_unsettled(range)
    }

    fn replay(&self, from: Position, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        self.core.log.replay(from, visit)
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
