//! Which physical pages a registration has, and whether they still stand behind its addresses.
//!
//! A registrar of its own ([`Audited`](super::Audited)) reads the page table (`/proc/self/pagemap`) when a range was registered; a
//! lease that the cache gives is compared with that, and in a sweep every registration that the cache would
//! serve. So a stale registration is found whether or not the bytes of the old pages happen to be right, and
//! whether or not the program uses it again.
//!
//! What is compared must be memory that no other thread changes meanwhile: only then has every change
//! returned that the comparison can see, and the cache must know of it. What a change between a
//! registration and the look at its pages takes away is recorded wrong and not found here; bytes still
//! tell. A page that the table does not hold at the moment is faulted in before it is compared, because
//! reclaim takes the entries of pinned pages of files and leaves the pages.

use crate::change::touch;
use crate::device::Key;
use crate::output::Failure;
use pinfold::{Access, AddressRange};
use serde::Serialize;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Bytes of one entry of the page map, and of the page that it is about.
const ENTRY: usize = 8;
const PAGE: usize = 4096;

/// The number of a physical page; `None` where the table holds none.
type Frame = Option<u64>;

/// The pages of every live registration of one registrar.
#[derive(Debug)]
pub(crate) struct Ledger {
    pagemap: File,
    /// Guards the entries; no other lock is taken under it.
    entries: Mutex<HashMap<u32, Arc<Entry>>>,
    /// Guards what was found; no other lock is taken under it.
    parted: Mutex<Vec<Parted>>,
    registrations: AtomicU64,
    leases: AtomicU64,
    pages: AtomicU64,
    unknown: AtomicU64,
    sweeps: AtomicU64,
    swept: AtomicU64,
    swept_parted: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    range: AddressRange,
    access: Access,
    frames: Vec<Frame>,
}

/// A page that stands behind its address no more, while the cache leases its registration or would.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parted {
    /// Which thread's lease it was, or which thread swept.
    pub(crate) lane: usize,
    /// What was leased, or registered.
    pub(crate) range: AddressRange,
    /// How far into the range the first such page is.
    pub(crate) offset: usize,
    /// How it was found.
    pub(crate) note: &'static str,
}

/// What an audit looked at.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct AuditReport {
    registrations: u64,
    leases: u64,
    pages: u64,
    /// Pages that were not there when they were looked up after their registration.
    unknown_pages: u64,
    /// How often everything that was live was looked at.
    sweeps: u64,
    /// Registrations that the cache would serve, in all sweeps together.
    swept_registrations: u64,
    /// Those among them that had other pages than stood behind their addresses.
    swept_parted: u64,
}

impl AuditReport {
    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            registrations: self.registrations + other.registrations,
            leases: self.leases + other.leases,
            pages: self.pages + other.pages,
            unknown_pages: self.unknown_pages + other.unknown_pages,
            sweeps: self.sweeps + other.sweeps,
            swept_registrations: self.swept_registrations + other.swept_registrations,
            swept_parted: self.swept_parted + other.swept_parted,
        }
    }
}

impl Ledger {
    /// An empty ledger of this process.
    ///
    /// # Errors
    ///
    /// The page map shows no numbers of pages: that takes `CAP_SYS_ADMIN`.
    pub(crate) fn open() -> Result<Self, Failure> {
        let unreadable =
            |error| Failure::unavailable(format_args!("--audit reads /proc/self/pagemap: {error}"));
        let ledger = Self {
            pagemap: File::open("/proc/self/pagemap").map_err(unreadable)?,
            entries: Mutex::default(),
            parted: Mutex::default(),
            registrations: AtomicU64::new(0),
            leases: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            sweeps: AtomicU64::new(0),
            swept: AtomicU64::new(0),
            swept_parted: AtomicU64::new(0),
        };
        let own = [0_u8; 1];
        let here = AddressRange::new(own.as_ptr().expose_provenance(), 1);
        let frames = here.map(|here| ledger.frames(here)).map_err(Failure::unavailable)?;
        match frames.map_err(unreadable)?.first() {
            Some(Some(1..)) => Ok(ledger),
            _ => Err(Failure::unavailable(
                "--audit needs the numbers of physical pages, which root alone may read",
            )),
        }
    }

    pub(crate) fn report(&self) -> AuditReport {
        // Relaxed: counts that order nothing.
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AuditReport {
            registrations: count(&self.registrations),
            leases: count(&self.leases),
            pages: count(&self.pages),
            unknown_pages: count(&self.unknown),
            sweeps: count(&self.sweeps),
            swept_registrations: count(&self.swept),
            swept_parted: count(&self.swept_parted),
        }
    }

    /// What was found on `lane` and its neighbour since the last call.
    pub(crate) fn take_parted(&self, lanes: std::ops::Range<usize>) -> Vec<Parted> {
        let mut all = self.parted.lock().unwrap_or_else(PoisonError::into_inner);
        all.extract_if(.., |parted| lanes.contains(&parted.lane)).collect()
    }

    /// Compares the pages behind `range`, for which the cache has just leased the registration `key`
    /// and which no other thread changes.
    pub(super) fn compare(&self, key: Key, range: AddressRange, lane: usize) {
        count(&self.leases, 1);
        if let Some(offset) = self.parted_at(key, range) {
            let note = "leased with another page than is behind the address";
            self.note(Parted { lane, range, offset, note });
        }
    }

    /// Compares every live registration that `served` gives a lease for; no thread of the program changes memory
    /// meanwhile.
    pub(super) fn sweep<L>(
        &self,
        lane: usize,
        served: impl Fn(AddressRange, Access) -> Option<(Key, L)>,
    ) {
        count(&self.sweeps, 1);
        for (range, access) in self.live() {
            // As long as the lease lives, the number is this registration's.
            let look = || served(range, access).map(|(key, _lease)| self.parted_at(key, range));
            let Some(first) = look() else { continue };
            count(&self.swept, 1);
            if let Some(offset) = first.filter(|_| stays_parted(look)) {
                count(&self.swept_parted, 1);
                let note = "live with another page than is behind the address";
                self.note(Parted { lane, range, offset, note });
            }
        }
    }

    fn live(&self) -> Vec<(AddressRange, Access)> {
        self.entries().values().map(|entry| (entry.range, entry.access)).collect()
    }

    fn note(&self, found: Parted) {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner).push(found);
    }

    /// How far into `range` the first page of the registration `key` is that stands behind its address no more.
    fn parted_at(&self, key: Key, range: AddressRange) -> Option<usize> {
        let entry = self.entries().get(&key.number()).cloned()?;
        // A descriptor that cannot be read is a fault of the machine's that has its own report.
        self.first_parted(&entry, range).ok().flatten()
    }

    fn first_parted(&self, entry: &Entry, range: AddressRange) -> io::Result<Option<usize>> {
        let mut now = self.frames(range)?;
        let missing = |frame: &Frame| frame.is_none();
        if now.iter().any(missing) {
            // What cannot be touched stays missing.
            touch(range);
            now = self.frames(range)?;
        }
        let first = page_of(range.start()).wrapping_sub(page_of(entry.range.start()));
        let then = entry.frames.get(first..).unwrap_or_default();
        count(&self.pages, now.len().min(then.len()) as u64);
        let both = now.iter().zip(then);
        let parted = both.enumerate().find(|(_, (now, then))| then.is_some() && now != then);
        Ok(parted.map(|(page, _)| (page * PAGE).saturating_sub(range.start() % PAGE)))
    }

    pub(super) fn enter(&self, key: Key, range: AddressRange, access: Access) {
        let frames = self.frames(range).unwrap_or_default();
        count(&self.registrations, 1);
        count(&self.unknown, frames.iter().filter(|frame| frame.is_none()).count() as u64);
        self.entries().insert(key.number(), Arc::new(Entry { range, access, frames }));
    }

    pub(super) fn strike(&self, key: Key) {
        self.entries().remove(&key.number());
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<u32, Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the table holds for each page that `range` touches.
    fn frames(&self, range: AddressRange) -> io::Result<Vec<Frame>> {
        const PRESENT: u64 = 1 << 63;
        const NUMBER: u64 = (1 << 55) - 1;
        let pages = page_of(range.end() - 1) - page_of(range.start()) + 1;
        let mut bytes = vec![0; pages * ENTRY];
        self.pagemap.read_exact_at(&mut bytes, (page_of(range.start()) * ENTRY) as u64)?;
        let (words, _) = bytes.as_chunks::<ENTRY>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word));
        Ok(words.map(|word| (word & PRESENT != 0).then_some(word & NUMBER)).collect())
    }
}

/// A thread of the library's own may be in the midst of a change, such as a pool's that gives memory back: that comes
/// to its end. A stale registration stays.
fn stays_parted(look: impl Fn() -> Option<Option<usize>>) -> bool {
    const LOOKS: u32 = 1000;
    (0..LOOKS).all(|_| {
        thread::yield_now();
        look().flatten().is_some()
    })
}

const fn page_of(address: usize) -> usize {
    address / PAGE
}

fn count(counter: &AtomicU64, more: u64) {
    // Relaxed: a count that orders nothing.
    counter.fetch_add(more, Ordering::Relaxed);
}
