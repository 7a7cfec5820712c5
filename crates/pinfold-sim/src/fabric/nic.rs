//! The device's translations: keys, pages, rights, and a cache that may hold on to the past.

use super::Nanos;
use super::memory::Memory;
use crate::space::{AddressSpace, PAGE_BYTES, PhysicalPage};
use pinfold_core::{Access, AddressRange, DeregisterError, RegisterError};
use std::sync::Arc;

const EFAULT: i32 = 14;
const EINVAL: i32 = 22;

/// What names a registration, to the program and to its peers. The number of its place in the
/// table, and how often that place has been used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key(pub u32);

const PLACE_BITS: u32 = 12;

impl Key {
    const fn place(self) -> usize {
        (self.0 & ((1 << PLACE_BITS) - 1)) as usize
    }

    const fn generation(self) -> u32 {
        self.0 >> PLACE_BITS
    }
}

/// What a simulated device is like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NicConfig {
    /// How many registrations its table holds, at most 4096.
    pub max_regions: usize,
    /// Pages are not pinned but faulted in when they are touched.
    pub on_demand: bool,
    /// A renewed registration has another key.
    pub changes_keys: bool,
    /// A withdrawn registration has no translation; otherwise it keeps the old one.
    pub withdraws: bool,
}

impl Default for NicConfig {
    /// 512 pinned registrations whose keys stay, and which can be withdrawn.
    fn default() -> Self {
        Self { max_regions: 512, on_demand: false, changes_keys: false, withdraws: true }
    }
}

/// Why an access does not go through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trouble {
    /// The page is not there; asking for it takes time.
    Fault(Key, usize),
    /// The key is dead, of another domain, or does not give this right to these bytes.
    Forbidden,
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    live: Option<Live>,
}

#[derive(Debug)]
struct Live {
    range: AddressRange,
    access: Access,
    domain: u8,
    pages: Vec<Option<PhysicalPage>>,
    withdrawn: bool,
}

/// A line of the translation cache.
#[derive(Clone, Copy, Debug)]
struct Line {
    key: Key,
    page: usize,
    physical: PhysicalPage,
}

const LINES: usize = 64;

#[derive(Debug)]
pub(crate) struct Nic {
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) memory: Memory,
    pub(crate) config: NicConfig,
    entries: Vec<Entry>,
    free: Vec<usize>,
    lines: [Option<Line>; LINES],
    /// Lines of these that were taken back, and until when the cache may hold on to them.
    flushing: Vec<(Key, AddressRange, Nanos)>,
    pub(crate) keeps_old_pages: bool,
}

impl Nic {
    pub(crate) fn new(space: Arc<AddressSpace>, config: NicConfig) -> Self {
        let entry = || Entry { generation: 0, live: None };
        let max_regions = config.max_regions.min(1 << PLACE_BITS);
        Self {
            space,
            memory: Memory::default(),
            config,
            entries: std::iter::repeat_with(entry).take(max_regions).collect(),
            free: (0..max_regions).rev().collect(),
            lines: [None; LINES],
            flushing: Vec::new(),
            keeps_old_pages: false,
        }
    }

    /// How many registrations live.
    pub(crate) fn live(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn is_live(&self, key: Key) -> bool {
        let entry = self.entries.get(key.place());
        entry.is_some_and(|it| it.generation == key.generation() && it.live.is_some())
    }

    pub(crate) fn register(
        &mut self,
        range: AddressRange,
        access: Access,
        domain: u8,
    ) -> Result<Key, RegisterError> {
        let pages = self.pages_for(range, access)?;
        let full = RegisterError::TableFull { capacity: self.entries.len() };
        let place = self.free.pop().ok_or(full)?;
        let entry = &mut self.entries[place];
        entry.live = Some(Live { range, access, domain, pages, withdrawn: false });
        #[expect(clippy::cast_possible_truncation)] // the table has at most 2^12 places
        Ok(Key(entry.generation << PLACE_BITS | place as u32))
    }

    fn pages_for(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Vec<Option<PhysicalPage>>, RegisterError> {
        let bad = |reason| RegisterError::BadAddress { range, reason, errno: EFAULT };
        let pages = self.space.pin(range, access).map_err(bad)?;
        let there = |page| (!self.config.on_demand).then_some(page);
        Ok(pages.into_iter().map(there).collect())
    }

    pub(crate) fn deregister(&mut self, key: Key) -> Result<AddressRange, DeregisterError> {
        let gone = DeregisterError::Os { operation: "deregister", errno: EINVAL };
        let range = self.live_mut(key).ok_or(gone)?.range;
        let entry = &mut self.entries[key.place()];
        entry.live = None;
        entry.generation += 1;
        self.free.push(key.place());
        Ok(range)
    }

    /// Takes the pages from under a key.
    pub(crate) fn withdraw(&mut self, key: Key) -> Result<(), DeregisterError> {
        let withdraws = self.config.withdraws;
        let gone = DeregisterError::Os { operation: "withdraw", errno: EINVAL };
        let live = self.live_mut(key).ok_or(gone)?;
        if withdraws {
            live.withdrawn = true;
            live.pages.fill(None);
        }
        Ok(())
    }

    /// Puts the pages of this moment under a key.
    pub(crate) fn renew(&mut self, key: Key) -> Result<(), RegisterError> {
        let gone = RegisterError::DeviceGone { errno: EINVAL };
        let live = self.live_mut(key).ok_or(gone)?;
        let (range, access) = (live.range, live.access);
        let pages = self.pages_for(range, access)?;
        let keeps = self.keeps_old_pages && !self.config.withdraws;
        if let Some(live) = self.live_mut(key) {
            live.withdrawn = false;
            if !keeps {
                live.pages = pages;
            }
        }
        Ok(())
    }

    fn live_mut(&mut self, key: Key) -> Option<&mut Live> {
        let entry = self.entries.get_mut(key.place())?;
        if entry.generation == key.generation() { entry.live.as_mut() } else { None }
    }

    /// The cache is to drop `key`: at once, or by `until` if that is later than now.
    pub(crate) fn flush(&mut self, key: Key, range: AddressRange, now: Nanos, until: Nanos) {
        if until > now {
            self.flushing.push((key, range, until));
        } else {
            self.clear_lines(key);
        }
    }

    /// Has the cache drop a renewed key before the renewal is done. A device that withdraws
    /// relies on the drop since then.
    pub(crate) fn flush_renewed(&mut self, key: Key) {
        if !self.config.withdraws {
            self.clear_lines(key);
        }
    }

    /// Drops what should be gone by `now`.
    pub(crate) fn finish_flushes(&mut self, now: Nanos) {
        while let Some(position) = self.flushing.iter().position(|&(_, _, until)| until <= now) {
            let (key, ..) = self.flushing.swap_remove(position);
            self.clear_lines(key);
        }
    }

    fn clear_lines(&mut self, key: Key) {
        for line in &mut self.lines {
            if line.is_some_and(|line| line.key == key) {
                *line = None;
            }
        }
    }

    /// Whether the cache holds nothing of `range` that was taken back.
    pub(crate) fn is_quiet(&self, range: AddressRange) -> bool {
        !self.flushing.iter().any(|(_, other, _)| other.overlaps(&range))
    }

    /// The kernel's word that the pages of `range` change: a device that pages on demand lets
    /// go of them before that happens.
    pub(crate) fn invalidate(&mut self, range: AddressRange) {
        if !self.config.on_demand {
            return;
        }
        for place in 0..self.entries.len() {
            let generation = self.entries[place].generation;
            let Some(live) = &mut self.entries[place].live else { continue };
            if live.range.overlaps(&range) {
                live.pages.fill(None);
                #[expect(clippy::cast_possible_truncation)] // the table has at most 2^12 places
                self.clear_lines(Key(generation << PLACE_BITS | place as u32));
            }
        }
    }

    /// The page of a faulted address, if it is mapped; a registration that is gone wants none.
    pub(crate) fn resolve(&mut self, key: Key, page: usize) {
        let space = Arc::clone(&self.space);
        let Some(live) = self.live_mut(key).filter(|live| !live.withdrawn) else { return };
        let base = live.range.start() / PAGE_BYTES;
        let Ok(bytes) = AddressRange::new((base + page) * PAGE_BYTES, PAGE_BYTES) else { return };
        let found = space.pin(bytes, live.access).ok();
        live.pages[page] = found.and_then(|pages| pages.first().copied());
    }

    /// The page behind address `at` of `key`, from the cache if it has it.
    pub(crate) fn translate(
        &mut self,
        key: Key,
        at: usize,
        needs: Access,
        domain: u8,
    ) -> Result<PhysicalPage, Trouble> {
        let live = self.live_mut(key).ok_or(Trouble::Forbidden)?;
        let allowed = live.access.contains(needs) && live.domain == domain;
        let covered = live.range.start() <= at && at < live.range.end();
        if !allowed || !covered {
            return Err(Trouble::Forbidden);
        }
        let page = at / PAGE_BYTES - live.range.start() / PAGE_BYTES;
        let physical = live.pages[page];
        let line = (key.place() * 7 + page) % LINES;
        if let Some(cached) = self.lines[line].filter(|it| it.key == key && it.page == page) {
            return Ok(cached.physical);
        }
        let physical = physical.ok_or(Trouble::Fault(key, page))?;
        self.lines[line] = Some(Line { key, page, physical });
        Ok(physical)
    }
}
