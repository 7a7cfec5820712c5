//! The monitor that sees everything: eBPF programs in the kernel, at both ends of every function that
//! takes pages away, write into memory that this process can read (`pinfold_ebpf`).
//!
//! # The price
//!
//! A [`check`](Monitor::check) is two loads, a `watch` a look at the table of mappings. A change of this process's mappings costs some hundred
//! nanoseconds more, a change of what was ever watched twice that, and the first one after a pause
//! wakes a thread. What lies in a block of 2 MiB of which nothing was ever watched is not logged,
//! so hits do not notice it.
//!
//! # What it sees
//!
//! Every change of every kind of memory that the kernel manages, by whatever route and whomever: system calls of any
//! thread, io_uring's workers, another process that truncates a file or punches a hole into it.
//! Also what leaves a page of a file where it is and takes its entry away, because such a page can be replaced
//! in the file from then on without another change: reclaim, the splitting of huge entries, breakpoints.
//! `docs/src/catalogue.md` says why that is everything. When the kernel is about to stop calling the programs, they
//! close every view before: [`check`](Monitor::check) says that the monitor is lost.
//!
//! # What it needs
//!
//! A process with the privilege to load the programs: this process itself ([`Ebpf::load`], with the
//! cargo feature `ebpf`), or a helper that sends a [`View`] ([`Ebpf::from_helper`]). The descriptors that keep the programs
//! in the kernel are in a table of their own, that of the keeper's thread, where no `close_range` of the
//! program reaches them; so a view stays true when the process that gave it dies.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to promise what [`Monitor`] demands; the proof stands above that
//! promise. It contains no unsafe block.

#![allow(unsafe_code)]

mod clock;
mod error;
mod keeper;
mod positions;
mod self_test;

pub use error::EbpfError;

use super::event_count::EventCount;
use super::log::from_kernel;
use super::notify::{self, ConnectError, GivesBack};
use super::shared::Kept;
use crate::fork_mark::ForkMark;
use crate::mappings::mappings_in;
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Uncovered,
    Watch,
};
use clock::Clock;
use pinfold_ebpf::View;
use pinfold_ebpf::layout::{
    CLOSED, CROWDED_SECONDS, Changes, ENTRIES, RECORD_SECONDS, Record, WRITING, WatchFilter,
    blocks, done,
};
use pinfold_kernel::mapping::{AtomicPage, SharedValue};
use pinfold_kernel::thread::ENDED;
use positions::Positions;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Sees every change of every kind of memory that the kernel manages.
///
/// A process can have two at most from the same loader, so caches should share one:
/// [`shared`](Self::shared).
pub struct Ebpf {
    core: Arc<Core>,
    /// Dropped last: it takes the log away.
    helper: Option<GivesBack>,
}

/// What the keeper's thread shares with those who ask.
struct Core {
    /// The keeper's number, [`LOST`], or zero in a forked child.
    mark: ForkMark,
    changes: SharedValue<Changes>,
    /// By which the programs' records are dated.
    clock: Clock,
    wishes: SharedValue<WatchFilter>,
    event_count: EventCount,
    stop: AtomicBool,
}

/// Until the keeper runs.
const STARTING: u64 = 1;
/// The keeper says so where it cannot go on, and the kernel where it ended otherwise.
const LOST: u64 = ENDED;
/// How often an entry is looked at that is being written: some microseconds, many times what that
/// takes. Its writer may have lost the processor, and then everything is taken for changed.
const LOOKS: u32 = 1 << 10;

impl fmt::Debug for Ebpf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ebpf")
            .field("check", &self.check())
            .field("helped", &self.helper.is_some())
            .finish_non_exhaustive()
    }
}

impl Ebpf {
    pub(super) fn event_count(&self) -> &EventCount {
        &self.core.event_count
    }

    /// A monitor over a view of this process's changes. Takes a thread and 0.3 MiB, and tests that the
    /// view tells what it should, by changing memory of its own in every way there is: about a
    /// millisecond.
    ///
    /// # Errors
    ///
    /// [`EbpfError`] says what is missing. The view is given up.
    pub fn from_view(view: View) -> Result<Self, EbpfError> {
        Self::start(view, None)
    }

    /// A monitor over the view that the helper `pinfold notifyd` gives, which listens at `path`
    /// (usually [`notify::path`]). No privilege is needed. The helper hears when the monitor is dropped;
    /// whether it lives meanwhile makes no difference.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Helper`] if there is no view to be had, or those of [`from_view`](Self::from_view).
    pub fn from_helper(path: &Path) -> Result<Self, EbpfError> {
        let (view, connection) = notify::connect(path).map_err(EbpfError::Helper)?;
        Self::start(view, Some(GivesBack::from(connection)))
    }

    fn start(view: View, helper: Option<GivesBack>) -> Result<Self, EbpfError> {
        let view = view.into_parts();
        let positions = Positions::new(view.wakeups.as_fd()).map_err(EbpfError::map)?;
        let changes = SharedValue::new(view.changes.as_fd(), 0, false).map_err(EbpfError::map)?;
        let core = Arc::new(Core {
            mark: ForkMark::new(STARTING).map_err(EbpfError::memory)?,
            clock: Clock::of(changes.get()).map_err(EbpfError::memory)?,
            changes,
            wishes: SharedValue::new(view.wishes.as_fd(), 0, true).map_err(EbpfError::map)?,
            event_count: EventCount::default(),
            stop: AtomicBool::new(false),
        });
        // From here on, dropping it ends the keeper.
        let monitor = Self { core, helper };
        let mut kept = view.links;
        kept.insert(0, view.wakeups);
        keeper::start(&monitor.core, kept, positions)?;
        self_test::of_every_route(&monitor)?;
        // What lies next to the memory that the test was made on is of no interest.
        monitor.core.wish_for_nothing();
        Ok(monitor)
    }

    /// Where the log ends at this moment.
    fn place(&self) -> Position {
        self.replay(Position::NOWHERE, &mut |_| ()).up_to
    }

    /// Loads the programs, for which this process needs the privilege, and watches itself.
    ///
    /// Takes some 100 milliseconds, most of them the kernel's verifier's.
    ///
    /// # Errors
    ///
    /// [`EbpfError::Load`] says what this machine or this process lacks.
    #[cfg(feature = "ebpf")]
    pub fn load() -> Result<Self, EbpfError> {
        let programs = pinfold_ebpf::Programs::load().map_err(EbpfError::Load)?;
        let this = pinfold_ebpf::this_process().map_err(|error| {
            EbpfError::map(pinfold_kernel::Errno(error.raw_os_error().unwrap_or(libc::EMFILE)))
        })?;
        // The view keeps what it needs of the programs.
        Self::from_view(programs.view(this.as_fd()).map_err(EbpfError::View)?)
    }

    /// The monitor that all caches of this process share, made by the first call and kept until the
    /// process ends. A forked child gets its own.
    ///
    /// # Errors
    ///
    /// [`EbpfError`] with what stands in the way of each way; the next call tries again.
    pub fn shared() -> Result<Arc<Self>, EbpfError> {
        Self::shared_by(Self::obtain)
    }

    /// As [`shared`](Self::shared), but if there is none yet, by the helper that listens at `helper` only.
    ///
    /// # Errors
    ///
    /// Those of [`from_helper`](Self::from_helper).
    pub fn shared_from_helper(helper: &Path) -> Result<Arc<Self>, EbpfError> {
        Self::shared_by(|| Self::from_helper(helper))
    }

    fn shared_by(obtain: impl FnOnce() -> Result<Self, EbpfError>) -> Result<Arc<Self>, EbpfError> {
        static SHARED: Kept<Ebpf> = Kept::new();
        SHARED.get(Self::is_of_use, obtain)
    }

    /// Whether it still sees. One that is lost is kept, for caches that have it, and its view goes: a process has few.
    fn is_of_use(&self) -> bool {
        let seen = self.check();
        // Not in a forked child: the view is its parent's.
        let is_lost = matches!(seen, Err(Lost::Descriptor { .. }));
        self.helper.iter().filter(|_| is_lost).for_each(GivesBack::now);
        seen.is_ok()
    }

    /// The helper comes first: its programs are there, and serve every process.
    fn obtain() -> Result<Self, EbpfError> {
        match Self::from_helper(&notify::path()) {
            Err(EbpfError::Helper(helper)) => Self::without_helper(helper),
            answer => answer,
        }
    }

    #[cfg(feature = "ebpf")]
    fn without_helper(helper: ConnectError) -> Result<Self, EbpfError> {
        Self::load().map_err(|own| EbpfError::NoWay { own: Box::new(own), helper })
    }

    #[cfg(not(feature = "ebpf"))]
    fn without_helper(helper: ConnectError) -> Result<Self, EbpfError> {
        Err(EbpfError::Helper(helper))
    }
}

impl Drop for Ebpf {
    /// Ends the keeper: by a change of a page that is there for that alone, which wakes it.
    fn drop(&mut self) {
        if self.core.mark.forked() {
            return;
        }
        // SeqCst: pairs with the keeper's fence. Either it finds this, or it had said that it
        // sleeps, and then what follows wakes it.
        self.core.stop.store(true, Ordering::SeqCst);
        if let Ok(page) = AtomicPage::new() {
            self.core.wish(super::watched_page::range_of(&page));
        }
    }
}

impl Core {
    /// The word that a hit compares.
    fn word(&self) -> u64 {
        // Acquire: what the programs did before they changed it is seen.
        self.changes.get().sequence.load(Ordering::Acquire)
    }

    /// Whether this process may believe anything that is said here.
    fn usable(&self) -> Result<(), Lost> {
        // Relaxed: in a child the page was wiped before its first instruction. Where the keeper says that it is lost,
        // the programs are still there; where the kernel does, it takes them away after that, by a change of its own
        // code, which every processor has seen before another change of memory passes them by.
        match self.mark.word().load(Ordering::Relaxed) {
            0 => Err(Lost::Forked),
            keeper if keeper < LOST => Ok(()),
            _ => Err(Lost::Descriptor { errno: libc::EBADF }),
        }
    }

    fn check(&self) -> Result<Sequence, Lost> {
        self.usable()?;
        match self.word() {
            word if word & CLOSED != 0 => Err(Lost::Descriptor { errno: libc::ESTALE }),
            word => Ok(Sequence(word)),
        }
    }

    /// The keeper's thread cannot go on, and with it the programs may go.
    fn lose(&self) {
        // Relaxed: see `usable`.
        self.mark.word().store(LOST, Ordering::Relaxed);
    }

    fn sequence(&self) -> u64 {
        self.word()
    }

    fn closed(&self) -> bool {
        self.word() & CLOSED != 0
    }

    fn stopped(&self) -> bool {
        // SeqCst: see `Ebpf::drop`.
        self.stop.load(Ordering::SeqCst)
    }

    /// Has changes of `range` logged from now on.
    fn wish(&self, range: Option<AddressRange>) {
        let words = &self.wishes.get().blocks;
        let (start, end) = range.map_or((0, 0), |range| (range.start() as u64, range.end() as u64));
        for (word, bit) in blocks(start, end) {
            // Relaxed, and written only where it changes something: the fence below orders it.
            if let Some(word) = words.get(word)
                && word.load(Ordering::Relaxed) & bit == 0
            {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
        // SeqCst: pairs with the programs' full barrier between what they do (taking pages away,
        // making a record) and their look at these bits. See `changes.c`, 3.
        fence(Ordering::SeqCst);
    }

    /// Takes back every wish. Only before a cache relies on one.
    fn wish_for_nothing(&self) {
        // Relaxed: a wish that is seen too long costs an entry in the log.
        self.wishes.get().blocks.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        let changes = self.changes.get();
        let now = self.clock.now();
        // Relaxed: after `wish`'s fence; see there.
        let crowded = changes.crowded.load(Ordering::Relaxed);
        is_recent(crowded, now, CROWDED_SECONDS)
            || changes.records.iter().any(|record| touches(record, range, now))
    }

    fn replay(&self, from: Position, most: usize, visit: &mut dyn FnMut(AddressRange)) -> Replay {
        let all = self.word();
        let readable = self.usable().is_ok()
            && all & CLOSED == 0
            && from.0 <= all
            && all - from.0 <= ENTRIES as u64;
        let cut = all.min(from.0.saturating_add(most as u64));
        let mut tell = |index| self.entry(index).map(&mut *visit).is_some();
        if !(readable && (from.0..cut).all(&mut tell)) {
            return Replay {
                up_to: Position(all, 0),
                sequence: Sequence(all),
                complete: false,
                may_repeat: false,
            };
        }
        let sequence = if cut < all { Sequence::CUT } else { Sequence(all) };
        Replay { up_to: Position(cut, 0), sequence, complete: true, may_repeat: false }
    }

    /// Entry `index`, or `None` if it was overwritten or is being written for too long.
    fn entry(&self, index: u64) -> Option<AddressRange> {
        let place = usize::try_from(index % ENTRIES as u64).ok()?;
        let entry = self.changes.get().entries.get(place)?;
        for _ in 0..LOOKS {
            // Acquire: the range read below is that of this stamp or a newer one.
            let stamp = entry.stamp.load(Ordering::Acquire);
            if stamp > done(index) {
                return None;
            }
            if stamp == done(index) {
                // Relaxed: between two looks at the stamp.
                let (start, end) =
                    (entry.start.load(Ordering::Relaxed), entry.end.load(Ordering::Relaxed));
                // Acquire fence: if either was newer, the stamp below is too.
                fence(Ordering::Acquire);
                let intact = entry.stamp.load(Ordering::Relaxed) == stamp;
                return intact.then(|| between(start, end));
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Whether the kernel manages all that is mapped in `range`, so that an address shows other memory only after an entry
/// of the page table was cleared. A driver manages what it maps itself, and a GPU's may have memory where the program
/// has reserved addresses without access: with its help a network device reaches that, past the page table.
fn is_the_kernel_s(range: AddressRange) -> Result<(), Uncovered> {
    let refused =
        |error: io::Error| Uncovered::Refused { errno: error.raw_os_error().unwrap_or(0) };
    let mut next = range.start();
    for mapping in mappings_in(range).map_err(refused)? {
        if mapping.range.start() > next {
            return Err(Uncovered::Unmapped);
        }
        if !mapping.has_access() {
            return Err(Uncovered::NoAccess);
        }
        if mapping.is_driver_s() {
            return Err(Uncovered::Mapping(mapping.kind));
        }
        next = mapping.range.end();
    }
    if next < range.end() { Err(Uncovered::Unmapped) } else { Ok(()) }
}

/// A range that the programs wrote down.
fn between(start: u64, end: u64) -> AddressRange {
    let [start, end] = [start, end].map(|bound| usize::try_from(bound).unwrap_or(usize::MAX));
    from_kernel(start, end)
}

fn is_recent(since: u64, now: u64, seconds: u64) -> bool {
    // A program may read the clock after us.
    since != 0 && now.saturating_sub(since) < seconds * 1_000_000_000
}

/// Whether a record speaks of a change under way that overlaps `range`. In doubt it does.
fn touches(record: &Record, range: AddressRange, now: u64) -> bool {
    // Acquire: the words read below are those of this owner or newer ones.
    let owner = record.owner.load(Ordering::Acquire);
    if owner == 0 {
        return false;
    }
    // Relaxed: between two looks at the owner.
    let start = record.start.load(Ordering::Relaxed);
    let end = record.end.load(Ordering::Relaxed);
    let since = record.since.load(Ordering::Relaxed);
    // Acquire fence: if one of them was newer, the owner below is another, or is writing.
    fence(Ordering::Acquire);
    let changing = owner & WRITING != 0 || record.owner.load(Ordering::Relaxed) != owner;
    changing || (is_recent(since, now, RECORD_SECONDS) && between(start, end).overlaps(&range))
}

// SAFETY: the promises of `Monitor`, one by one. What the programs do, and why that is enough, stands
// in `bpf/changes.c` of `pinfold_ebpf`; here is what it comes to.
//
// **Visible.** A change that took effect (its system call returned, or its addresses were mapped
// anew) has had its program at the end run before, which added one to the sequence if any of its
// blocks was wished for by then. A thread that knows that it took effect finds the new word: it is one
// word, written before the effect could be known. If the block was wished for only later, then so was
// the range, and what is registered after `watch` returned is what is there after the change.
//
// **Pending.** A change has a record from before its first entry until after its last. `watch`
// ends with a full barrier, and the programs have one between making the record and looking at the
// wishes: so a change that is not logged at its beginning because the wish came too late is found
// here. A record that could not be made makes everything be pending for `CROWDED_SECONDS`. One that is older than
// `RECORD_SECONDS` is not believed: then the change's last entry tells of it.
//
// **Kept.** An entry that has been overwritten, or cannot be read, is not passed over: the replay is
// incomplete.
//
// **Calm.** Nothing takes a lock, `watch` included.
unsafe impl Monitor for Ebpf {
    fn name(&self) -> &'static str {
        "ebpf"
    }

    #[inline]
    fn check(&self) -> Result<Sequence, Lost> {
        self.core.check()
    }

    /// What is mapped is asked after the wish, so what takes its place is logged. A gap is refused: what fills it may be a
    /// driver's, which is not asked for again.
    fn watch(&self, range: AddressRange) -> Watch {
        self.core.wish(Some(range));
        let checked = self.check().map_err(Uncovered::Lost);
        match checked.and_then(|_| is_the_kernel_s(range)) {
            Ok(()) => Watch::Covered,
            Err(why) => Watch::Uncovered(why),
        }
    }

    fn change_pending(&self, range: AddressRange) -> bool {
        self.check().is_err() || self.core.change_pending(range)
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
        self.core.replay(from, most, visit)
    }

    /// Everything is seen, of every kind of memory that the kernel manages: what is logged depends on the entry
    /// that is cleared. What a driver may manage is not watched. `MADV_FREE` alone is not told, and need not be: the
    /// pages stay until memory is short, and pages that a device has pinned stay even then.
    fn coverage(&self, mapping: MappingKind, change: Change) -> Cover {
        match change {
            _ if mapping == MappingKind::Other => Cover::NotCached,
            Change::Protect => Cover::Harmless,
            _ => Cover::Detected,
        }
    }

    fn forked(&self) -> bool {
        self.core.mark.forked()
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
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn what_a_driver_may_have_there_is_not_the_kernel_s() {
        use pinfold_kernel::{mapping::OwnedMapping, process::page_bytes};
        let memory = OwnedMapping::inaccessible(4 * page_bytes()).unwrap();
        let start = memory.start().addr().get();
        let pages = |first, count| {
            AddressRange::new(start + first * page_bytes(), count * page_bytes()).unwrap()
        };
        assert_eq!(is_the_kernel_s(pages(0, 4)), Err(Uncovered::NoAccess));
        memory.allow(0, 2 * page_bytes()).unwrap();
        assert_eq!(is_the_kernel_s(pages(0, 2)), Ok(()));
        assert_eq!(is_the_kernel_s(pages(1, 2)), Err(Uncovered::NoAccess));
        let memory = OwnedMapping::new(2 * page_bytes()).unwrap();
        let range = memory.range().unwrap();
        assert_eq!(is_the_kernel_s(range), Ok(()));
        // Above what a program can map.
        let nowhere = AddressRange::new(1 << (usize::BITS - 2), page_bytes()).unwrap();
        assert_eq!(is_the_kernel_s(nowhere), Err(Uncovered::Unmapped));
        let all = mappings_in(AddressRange::EVERYTHING).unwrap();
        let other = all.iter().find(|mapping| mapping.kind == MappingKind::Other);
        let refused = Err(Uncovered::Mapping(MappingKind::Other));
        assert_eq!(is_the_kernel_s(other.expect("the vdso").range), refused);
    }

    const NOW: u64 = 10 * RECORD_SECONDS * 1_000_000_000;

    fn record(owner: u64, start: u64, end: u64, since: u64) -> Record {
        let word = AtomicU64::new;
        Record { owner: word(owner), start: word(start), end: word(end), since: word(since) }
    }

    fn is_under_way(record: &Record) -> bool {
        touches(record, AddressRange::new(0x2000, 0x1000).unwrap(), NOW)
    }

    #[test]
    fn a_record_speaks_of_its_range_while_it_is_believed() {
        assert!(is_under_way(&record(7, 0x2fff, 0x4000, NOW)));
        assert!(!is_under_way(&record(7, 0x3000, 0x4000, NOW)));
        assert!(!is_under_way(&record(0, 0x2000, 0x3000, NOW)), "given back");
        assert!(is_under_way(&record(7, 0x2000, 0x3000, NOW + 5)), "made after we read the clock");
        let old = NOW - RECORD_SECONDS * 1_000_000_000;
        assert!(!is_under_way(&record(7, 0x2000, 0x3000, old)), "its end was never noted");
        assert!(is_under_way(&record(7, 0x2000, 0x3000, old + 1)));
    }

    #[test]
    fn a_record_that_is_being_written_may_speak_of_anything() {
        assert!(is_under_way(&record(7 | WRITING, 0x8000, 0x9000, 0)));
    }

    #[test]
    fn a_range_that_makes_no_sense_is_everything() {
        assert_eq!(between(0x1000, 0x2000), AddressRange::new(0x1000, 0x1000).unwrap());
        assert_eq!(between(0, 0x1000), AddressRange::between(1, 0x1000).unwrap());
        assert_eq!(between(0x2000, 0x1000), AddressRange::EVERYTHING);
    }
}
