//! The explicit feed: code that changes mappings reports it, for monitors that cannot see it.
//!
//! For hooks on the C library's functions, for allocators that give memory back by system calls of
//! their own, for drivers that move what the kernel's tables do not show. A change is told *before* it
//! is made, and is *under way* until it is done:
//!
//! ```
//! use pinfold::AddressRange;
//! use pinfold::monitor::Feed;
//!
//! # let memory = vec![0_u8; 65536];
//! # let (start, length) = (memory.as_ptr() as usize, memory.len());
//! let range = AddressRange::new(start, length)?;
//! let changing = Feed::of_process().begin(range);
//! // munmap, madvise, cuMemUnmap, ... by whatever means
//! drop(changing);
//! # Ok::<(), pinfold::RangeError>(())
//! ```
//!
//! # Why at the beginning
//!
//! An address that `munmap` frees may be another thread's before `munmap` returns, so what was
//! registered there must be unfindable before it begins. What is registered from then on, until the
//! end, may still get the old pages: so it is not kept
//! ([`Monitor::change_pending`](crate::Monitor::change_pending)). The end needs no entry of its own, because nothing
//! was kept that it could concern. The proofs stand in `pinfold_core`'s `change_log` and `pending_changes`.
//!
//! # What it costs, and where it may be called
//!
//! Some 15 ns, no lock, no allocation, no system call unless a thread waits for news (then one, to
//! wake it). In signal handlers, also one that interrupts a call of this on the same thread;
//! before `main`; inside of `malloc`. It never waits for another thread. 64 changes can be under way at a
//! time; with more, nothing is cached until the surplus ends. A cache that lets 4,096 changes pass
//! without looking drops everything. A thread that dies in the middle of a change leaves its range
//! uncached for good (everything, if it was one too many).
//!
//! # Two copies of this library
//!
//! A preloaded library with hooks and a program may each contain a copy of this code. They share one
//! feed: the data symbol `pinfold_process_feed` of whichever library exports one. So its layout is
//! fixed, and [`VERSION`](Feed::VERSION) changes with it.

use super::event_count::EventCount;
use crate::{AddressRange, Change};
use pinfold_core::{ChangeLog, ChangeMarks, PendingChanges, RangeMark, Ticket};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many changes back a cache may be before it has to drop everything.
const ENTRIES: usize = 4096;
/// How many changes can be under way and told apart.
const RECORDS: usize = 64;
/// How many ranges can be marked when they change.
const MARKS: usize = 128;

/// What is told by those who change mappings; see the [module](self)'s text.
#[repr(C)]
pub struct Feed {
    header: Header,
    /// [`Change::bit`]s.
    claims: AtomicU64,
    event_count: EventCount,
    under_way: PendingChanges<RECORDS>,
    pub(super) log: ChangeLog<ENTRIES>,
    marks: ChangeMarks<MARKS>,
}

/// One short line: its log alone has thousands of entries.
impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").field("fed", &self.is_fed()).finish_non_exhaustive()
    }
}

/// What a feed of any version begins with. All of it may be read before anything else is believed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    /// `PINFFEED`.
    pub(super) magic: u64,
    pub(super) version: u32,
    pub(super) bytes: u32,
}

/// A change that is under way until this is dropped.
///
/// It does not outlive its feed:
///
/// ```compile_fail,E0505
/// # use pinfold::{AddressRange, monitor::Feed};
/// # fn after_its_parent(feed: Feed, range: AddressRange) {
/// let changing = feed.begin(range);
/// drop(feed);
/// drop(changing);
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the change is over as soon as this is dropped"]
pub struct Changing<'f> {
    feed: &'f Feed,
    ticket: Option<Ticket<'f>>,
}

impl Feed {
    /// Of the layout, and of who may write what in which order.
    pub const VERSION: u32 = 2;
    /// What a copy of another make would differ in.
    #[allow(clippy::cast_possible_truncation)] // some 100 KiB
    const BYTES: u32 = size_of::<Self>() as u32;

    /// Nothing told and nothing claimed; 100 KiB, best kept in a `static`.
    pub const fn new() -> Self {
        Self {
            header: Self::OURS,
            claims: AtomicU64::new(0),
            event_count: EventCount::new(),
            under_way: PendingChanges::new(),
            log: ChangeLog::new(),
            marks: ChangeMarks::new(),
        }
    }

    /// What a feed begins with that this copy of the library knows.
    pub(super) const OURS: Header = Header {
        magic: u64::from_be_bytes(*b"PINFFEED"),
        version: Self::VERSION,
        bytes: Self::BYTES,
    };

    /// Says that `range` is about to change, and changes until the answer is dropped.
    ///
    /// To be called for everything that takes pages from the range or gives it other ones, before it
    /// happens, whether or not it will succeed.
    pub fn begin(&self, range: AddressRange) -> Changing<'_> {
        // The record comes first: a thread that reads the log's entry must find the range under way.
        let ticket = self.under_way.begin(range);
        self.changed(range);
        Changing { feed: self, ticket: Some(ticket) }
    }

    /// Says that `range` has changed.
    ///
    /// Enough where no thread can use the addresses between the change and this call; otherwise a
    /// registration of the old pages may be found until then: [`begin`](Self::begin) is for that.
    pub fn changed(&self, range: AddressRange) {
        // The marks come first: a thread that reads the log's word must find them set.
        self.marks.set(range);
        self.log.append(range);
        self.event_count.notify();
    }

    /// Claims that from now on every change of this kind that this process makes by its libraries'
    /// functions (not by raw system calls) is told here. Monitors' coverage says
    /// [`Cover::Reported`](crate::Cover::Reported) then.
    pub fn claim(&self, change: Change) {
        // Release: what prepares the telling comes before the claim.
        self.claims.fetch_or(change.bit(), Ordering::Release);
    }

    /// Takes the claim back.
    pub fn withdraw(&self, change: Change) {
        // AcqRel: as a matter of course.
        self.claims.fetch_and(!change.bit(), Ordering::AcqRel);
    }

    /// Whether any code claims to report every change of this kind.
    pub fn claims(&self, change: Change) -> bool {
        self.claimed() & change.bit() != 0
    }

    /// Whether any code claims anything: hooks are active, or an allocator that reports.
    pub fn is_fed(&self) -> bool {
        self.claimed() != 0
    }

    fn claimed(&self) -> u64 {
        // Acquire: pairs with `claim`.
        self.claims.load(Ordering::Acquire)
    }

    /// A mark that each change of `range` sets that is told from now on; `None` if all are in use.
    pub(super) fn mark(&self, range: AddressRange) -> Option<RangeMark<'_>> {
        self.marks.begin(range)
    }

    /// Whether a change of `range` was told that may not be done.
    pub fn is_under_way(&self, range: AddressRange) -> bool {
        self.under_way.overlaps(range)
    }

    /// Rung with every entry.
    pub(super) fn event_count(&self) -> &EventCount {
        &self.event_count
    }

    /// See [`forget_parents_changes`](Self::forget_parents_changes).
    pub(super) fn forget_under_way(&self) {
        self.under_way.forget_all();
        self.marks.forget_all();
    }
}

impl Default for Feed {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.feed.under_way.end(ticket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Position;
    use std::mem::offset_of;

    fn page(number: usize) -> AddressRange {
        AddressRange::new(number << 12, 4096).unwrap()
    }

    fn told(feed: &Feed, from: u64) -> Vec<AddressRange> {
        let mut ranges = Vec::new();
        assert!(feed.log.replay(from, usize::MAX, &mut |range| ranges.push(range)).complete);
        ranges
    }

    #[test]
    fn a_change_is_told_when_it_begins_and_under_way_until_it_ends() {
        let feed = Box::new(Feed::new());
        let changing = feed.begin(page(1));
        assert_eq!(told(&feed, 0), [page(1)]);
        assert!(feed.is_under_way(page(1)) && !feed.is_under_way(page(2)));
        drop(changing);
        assert!(!feed.is_under_way(page(1)));
        feed.changed(page(2));
        assert_eq!(told(&feed, 1), [page(2)]);
        assert!(!feed.is_under_way(page(2)));
    }

    #[test]
    fn more_changes_than_records_put_everything_under_way() {
        let feed = Box::new(Feed::new());
        let changing: Vec<_> = (1..=RECORDS + 1).map(|number| feed.begin(page(number))).collect();
        assert!(feed.is_under_way(page(0x1000)));
        drop(changing);
        assert!(!feed.is_under_way(page(1)) && !feed.is_under_way(page(0x1000)));
    }

    #[test]
    fn claims_are_a_set() {
        let feed = Box::new(Feed::new());
        assert!(!feed.is_fed());
        feed.claim(Change::Guard);
        feed.claim(Change::AttachOver);
        feed.withdraw(Change::Guard);
        assert!(feed.claims(Change::AttachOver) && !feed.claims(Change::Guard) && feed.is_fed());
    }

    /// What another copy of this library may have been compiled with. A change of this test
    /// is a new version.
    #[test]
    fn the_layout_is_that_of_version_2() {
        assert_eq!(Feed::VERSION, 2);
        assert_eq!((offset_of!(Header, version), offset_of!(Feed, claims)), (8, 16));
        assert_eq!((offset_of!(Feed, event_count), offset_of!(Feed, under_way)), (24, 32));
        assert_eq!(offset_of!(Feed, log), 32 + 8 + RECORDS * 24);
        assert_eq!(offset_of!(Feed, marks), 32 + 8 + RECORDS * 24 + 24 + ENTRIES * 24);
        assert_eq!(size_of::<Feed>(), offset_of!(Feed, marks) + 8 + MARKS * 24);
        assert_eq!(Position::NOWHERE.1, u64::MAX, "no log gives such a place");
    }
}
