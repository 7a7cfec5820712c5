//! A program's address space: which physical page stands behind which virtual one.
//!
//! Pages are numbers. A physical page is never used twice, so two translations are equal exactly
//! if they lead to the same memory: a device that holds an old one cannot look right by chance.

use crate::event_count::SimEventCount;
use crate::log::Log;
use crate::sync::lock;
use pinfold_core::{Access, AddressRange, BadAddress};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The length of a page, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// How many changes the log keeps if nothing else is said.
const DEFAULT_LOG_CAPACITY: usize = 1024;

/// A page of memory, by a number that is never given to another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PhysicalPage(pub u64);

/// What a mapping allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Nothing: `PROT_NONE`.
    None,
    /// Reading.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// Why a remapping was refused; nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RemapError {
    /// Nothing is mapped at an address of the source.
    #[error("nothing is mapped at {at:#x}: map it first")]
    Unmapped {
        /// The first such address.
        at: usize,
    },
    /// Source and destination overlap, or the destination is no range.
    #[error("choose a destination clear of the source")]
    BadDestination,
}

/// The address space of one simulated program, with the log of its changes.
///
/// Every operation takes effect and enters the log at one moment, [`Discard`] excepted. Ranges
/// are widened to whole pages. As with userfaultfd, a page is watched until it is unmapped, and
/// changes of unwatched pages are not logged.
#[derive(Debug)]
pub struct AddressSpace {
    /// Guards the translation together with the log: no thread sees one without the other.
    state: Mutex<State>,
    event_count: SimEventCount,
}

#[derive(Debug)]
struct State {
    /// By virtual page number.
    pages: BTreeMap<usize, Page>,
    next_physical: u64,
    log: Log,
    /// Discards that are in the log and have not taken their pages yet.
    discards: Vec<PendingDiscard>,
    next_flux: u64,
    blindfolded: bool,
}

#[derive(Clone, Copy, Debug)]
struct Page {
    /// `None` until the page is touched.
    physical: Option<PhysicalPage>,
    protection: Protection,
    watched: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingDiscard {
    id: u64,
    range: AddressRange,
}

/// What a reader of the log gets.
#[derive(Debug)]
pub(crate) struct LogView {
    /// The changed ranges; `None` if some were overwritten.
    pub(crate) entries: Option<Vec<AddressRange>>,
    /// The number of the entry that comes next.
    pub(crate) end: u64,
}

fn page_numbers(range: AddressRange) -> Range<usize> {
    range.start() / PAGE_BYTES..(range.end() - 1) / PAGE_BYTES + 1
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self::new()
    }
}

impl AddressSpace {
    /// An empty address space whose log keeps 1024 changes.
    pub const fn new() -> Self {
        Self::with_log_capacity(DEFAULT_LOG_CAPACITY)
    }

    /// An empty address space whose log keeps the last `capacity` changes.
    pub const fn with_log_capacity(capacity: usize) -> Self {
        let state = State {
            pages: BTreeMap::new(),
            next_physical: 0,
            log: Log::new(capacity),
            discards: Vec::new(),
            next_flux: 0,
            blindfolded: false,
        };
        Self { state: Mutex::new(state), event_count: SimEventCount::new() }
    }

    /// Maps fresh pages at `range`, replacing what was there, as `mmap(MAP_FIXED)` does.
    pub fn map(&self, range: AddressRange, protection: Protection) {
        self.change(range, |state| {
            let fresh = Page { physical: None, protection, watched: false };
            state.pages.extend(page_numbers(range).map(|number| (number, fresh)));
        });
    }

    /// Unmaps what is mapped in `range`.
    pub fn unmap(&self, range: AddressRange) {
        self.change(range, |state| drop(state.take(range)));
    }

    /// Takes the pages of `range` away; the next touch finds new ones.
    pub fn discard(&self, range: AddressRange) {
        self.change(range, |state| state.forget_pages(range));
    }

    /// Moves the pages of `from` to as many bytes from `to`, replacing what was there.
    ///
    /// # Errors
    ///
    /// [`RemapError`]; nothing changed.
    pub fn remap(&self, from: AddressRange, to: usize) -> Result<(), RemapError> {
        let from = from.page_aligned(PAGE_BYTES);
        let to = AddressRange::new(to / PAGE_BYTES * PAGE_BYTES, from.len())
            .ok()
            .filter(|to| !to.overlaps(&from))
            .ok_or(RemapError::BadDestination)?;
        let logged = lock(&self.state).remap(from, to)?;
        self.ring_if(logged);
        Ok(())
    }

    /// Sets what the mappings in `range` allow. The pages stay, so nothing is logged.
    pub fn protect(&self, range: AddressRange, protection: Protection) {
        for (_, page) in lock(&self.state).pages.range_mut(page_numbers(range)) {
            page.protection = protection;
        }
    }

    /// Announces a discard: it is in the log now, and the pages go when the answer is finished.
    ///
    /// This is the order in which the kernel tells userfaultfd of `MADV_DONTNEED`. Until the end
    /// the range is pending.
    pub fn begin_discard(self: &Arc<Self>, range: AddressRange) -> Discard {
        let id = lock(&self.state).begin_discard(range);
        self.event_count.notify();
        Discard { space: Arc::clone(self), discard: PendingDiscard { id, range } }
    }

    /// The pages behind `range`, touching those that were not there; `None` if part of the range
    /// is not mapped.
    pub fn translate(&self, range: AddressRange) -> Option<Vec<PhysicalPage>> {
        lock(&self.state).touch(range, |_| None).ok()
    }

    /// What a device gets that pins `range` for `access`.
    pub(crate) fn pin(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Vec<PhysicalPage>, BadAddress> {
        lock(&self.state).touch(range, |(at, protection)| match protection {
            Protection::None => Some(BadAddress::NoAccess { at }),
            Protection::ReadOnly if access.writes() => Some(BadAddress::NotWritable { at }),
            Protection::ReadOnly | Protection::ReadWrite => None,
        })
    }

    /// Watches the pages of `range`; false if part of it is not mapped.
    pub(crate) fn watch(&self, range: AddressRange) -> bool {
        lock(&self.state).watch(range)
    }

    pub(crate) fn change_pending(&self, range: AddressRange) -> bool {
        lock(&self.state).discards.iter().any(|discard| discard.range.overlaps(&range))
    }

    pub(crate) fn log_end(&self) -> u64 {
        lock(&self.state).log.end()
    }

    pub(crate) fn log_since(&self, from: u64) -> LogView {
        let state = lock(&self.state);
        LogView { entries: state.log.since(from), end: state.log.end() }
    }

    /// From now on nothing enters the log.
    pub(crate) fn blindfold(&self) {
        lock(&self.state).blindfolded = true;
    }

    pub(crate) fn event_count(&self) -> &SimEventCount {
        &self.event_count
    }

    /// Logs `range` if it is watched, and applies `change`, as one step.
    fn change(&self, range: AddressRange, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        let logged = state.log_if_watched(range);
        change(&mut state);
        drop(state);
        self.ring_if(logged);
    }

    fn ring_if(&self, logged: bool) {
        if logged {
            self.event_count.notify();
        }
    }
}

impl State {
    fn log_if_watched(&mut self, range: AddressRange) -> bool {
        let watched = self.pages.range(page_numbers(range)).any(|(_, page)| page.watched);
        if watched {
            self.write_log(range);
        }
        watched
    }

    fn write_log(&mut self, range: AddressRange) {
        if !self.blindfolded {
            self.log.push(range.page_aligned(PAGE_BYTES));
        }
    }

    fn take(&mut self, range: AddressRange) -> Vec<Page> {
        page_numbers(range).filter_map(|number| self.pages.remove(&number)).collect()
    }

    fn forget_pages(&mut self, range: AddressRange) {
        for (_, page) in self.pages.range_mut(page_numbers(range)) {
            page.physical = None;
        }
    }

    fn first_unmapped(&self, range: AddressRange) -> Option<usize> {
        page_numbers(range).find(|number| !self.pages.contains_key(number)).map(|n| n * PAGE_BYTES)
    }

    /// Moves whole pages between ranges that do not overlap; whether it was logged.
    fn remap(&mut self, from: AddressRange, to: AddressRange) -> Result<bool, RemapError> {
        if let Some(at) = self.first_unmapped(from) {
            return Err(RemapError::Unmapped { at });
        }
        let logged = self.log_if_watched(from) | self.log_if_watched(to);
        let moved = self.take(from).into_iter().map(|page| Page { watched: false, ..page });
        self.pages.extend(page_numbers(to).zip(moved));
        Ok(logged)
    }

    fn watch(&mut self, range: AddressRange) -> bool {
        if self.first_unmapped(range).is_some() {
            return false;
        }
        for (_, page) in self.pages.range_mut(page_numbers(range)) {
            page.watched = true;
        }
        true
    }

    /// Logs also what is not watched yet: it may be watched before the pages go.
    fn begin_discard(&mut self, range: AddressRange) -> u64 {
        let id = self.next_flux;
        self.next_flux += 1;
        self.discards.push(PendingDiscard { id, range: range.page_aligned(PAGE_BYTES) });
        self.write_log(range);
        id
    }

    fn end_discard(&mut self, discard: PendingDiscard) {
        self.forget_pages(discard.range);
        self.discards.retain(|other| other.id != discard.id);
    }

    /// The pages behind `range`, unless one is not mapped or `refuse` objects to one.
    fn touch(
        &mut self,
        range: AddressRange,
        refuse: impl Fn((usize, Protection)) -> Option<BadAddress>,
    ) -> Result<Vec<PhysicalPage>, BadAddress> {
        page_numbers(range)
            .map(|number| {
                let at = (number * PAGE_BYTES).max(range.start());
                let page = self.pages.get_mut(&number).ok_or(BadAddress::Unmapped { at })?;
                refuse((at, page.protection)).map_or(Ok(()), Err)?;
                Ok(*page.physical.get_or_insert_with(|| fresh_page(&mut self.next_physical)))
            })
            .collect()
    }
}

const fn fresh_page(next: &mut u64) -> PhysicalPage {
    let page = PhysicalPage(*next);
    *next += 1;
    page
}

/// A discard that was announced and has not happened yet; it happens when this is finished or
/// dropped.
#[must_use = "the discard ends where this is dropped"]
#[derive(Debug)]
pub struct Discard {
    space: Arc<AddressSpace>,
    discard: PendingDiscard,
}

impl Discard {
    /// Takes the pages; the range is pending no longer.
    pub fn finish(self) {
        drop(self);
    }
}

impl Drop for Discard {
    fn drop(&mut self) {
        lock(&self.space.state).end_discard(self.discard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUFFER: AddressRange = pages(16, 4);

    const fn pages(first: usize, count: usize) -> AddressRange {
        match AddressRange::new(first * PAGE_BYTES, count * PAGE_BYTES) {
            Ok(range) => range,
            Err(_) => panic!("no range"),
        }
    }

    fn mapped() -> Arc<AddressSpace> {
        let space = Arc::new(AddressSpace::new());
        space.map(BUFFER, Protection::ReadWrite);
        space
    }

    #[test]
    fn a_translation_stays_until_something_changes() {
        let space = mapped();
        let before = space.translate(BUFFER).unwrap();
        assert_eq!(before.len(), 4);
        assert_eq!(space.translate(BUFFER).unwrap(), before);
        space.protect(BUFFER, Protection::ReadOnly);
        assert_eq!(space.translate(BUFFER).unwrap(), before);
    }

    #[test]
    fn no_physical_page_is_used_twice() {
        let space = mapped();
        let mut seen = space.translate(BUFFER).unwrap();
        space.discard(BUFFER);
        seen.extend(space.translate(BUFFER).unwrap());
        space.map(BUFFER, Protection::ReadWrite);
        seen.extend(space.translate(BUFFER).unwrap());
        space.unmap(BUFFER);
        space.map(BUFFER, Protection::ReadWrite);
        seen.extend(space.translate(BUFFER).unwrap());
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 16);
    }

    #[test]
    fn a_hole_has_no_translation_and_is_named() {
        let space = mapped();
        space.unmap(pages(18, 1));
        assert_eq!(space.translate(BUFFER), None);
        assert_eq!(
            space.pin(BUFFER, Access::READ),
            Err(BadAddress::Unmapped { at: 18 * PAGE_BYTES })
        );
        assert!(space.translate(pages(16, 2)).is_some());
    }

    #[test]
    fn protection_binds_the_device() {
        let space = mapped();
        space.protect(pages(17, 1), Protection::ReadOnly);
        let at = 17 * PAGE_BYTES;
        assert!(space.pin(BUFFER, Access::READ).is_ok());
        assert_eq!(space.pin(BUFFER, Access::WRITE), Err(BadAddress::NotWritable { at }));
        space.protect(pages(17, 1), Protection::None);
        assert_eq!(space.pin(BUFFER, Access::READ), Err(BadAddress::NoAccess { at }));
    }

    #[test]
    fn remapping_moves_pages_and_leaves_a_hole() {
        let space = mapped();
        let before = space.translate(BUFFER).unwrap();
        assert_eq!(space.remap(BUFFER, 32 * PAGE_BYTES), Ok(()));
        assert_eq!(space.translate(pages(32, 4)).unwrap(), before);
        assert_eq!(space.translate(BUFFER), None);
    }

    #[test]
    fn a_refused_remapping_changes_nothing() {
        let space = mapped();
        let before = space.translate(BUFFER).unwrap();
        assert_eq!(space.remap(BUFFER, 18 * PAGE_BYTES), Err(RemapError::BadDestination));
        assert_eq!(
            space.remap(pages(18, 4), 64 * PAGE_BYTES),
            Err(RemapError::Unmapped { at: 20 * PAGE_BYTES })
        );
        assert_eq!(space.translate(BUFFER).unwrap(), before);
    }

    #[test]
    fn only_watched_pages_are_logged_and_a_new_mapping_is_not_watched() {
        let space = mapped();
        space.discard(BUFFER);
        assert_eq!(space.log_end(), 0);
        assert!(space.watch(pages(16, 1)));
        space.discard(pages(17, 1));
        assert_eq!(space.log_end(), 0);
        space.map(pages(16, 2), Protection::ReadWrite);
        assert_eq!(space.log_since(0).entries.unwrap(), [pages(16, 2)]);
        space.unmap(pages(16, 2));
        assert_eq!(space.log_end(), 1);
    }

    #[test]
    fn remapping_logs_both_ends_if_watched() {
        let space = mapped();
        space.map(pages(32, 4), Protection::ReadWrite);
        assert!(space.watch(BUFFER) && space.watch(pages(32, 4)));
        space.remap(BUFFER, 32 * PAGE_BYTES).unwrap();
        assert_eq!(space.log_since(0).entries.unwrap(), [BUFFER, pages(32, 4)]);
        assert!(!space.watch(BUFFER));
    }

    #[test]
    fn an_announced_discard_is_logged_first_and_takes_its_pages_last() {
        let space = mapped();
        let before = space.translate(BUFFER).unwrap();
        let discard = space.begin_discard(pages(16, 2));
        assert_eq!(space.log_end(), 1);
        assert!(space.change_pending(pages(17, 1)) && !space.change_pending(pages(18, 1)));
        assert_eq!(space.translate(BUFFER).unwrap(), before);
        discard.finish();
        assert!(!space.change_pending(BUFFER));
        let after = space.translate(BUFFER).unwrap();
        assert_eq!((after[0] == before[0], after[2] == before[2]), (false, true));
    }

    #[test]
    fn every_logged_change_rings_the_bell() {
        let space = mapped();
        assert!(space.watch(BUFFER));
        let seen = space.event_count().count();
        space.unmap(BUFFER);
        space.event_count().wait(seen);
        assert_eq!(space.event_count().count(), seen + 1);
    }
}
