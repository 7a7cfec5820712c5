//! Landing pages with their registrations, and the exchange.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register landing pages, which are the zone's alone by
//! [`SlabPages`]' promise, and to exchange them for a target's, by the word that came with it.

#![allow(unsafe_code)]

use super::crossover::Crossover;
use super::method::LandError;
use super::slab::SlabPages;
use super::split::{aligned_like, same_part};
use crate::budget::is_reserved;
use crate::mappings::{Mapping, mappings_in};
use crate::pool::is_in_a_slab;
use crate::{
    Access, AddressRange, Cache, GetError, Lease, MappingKind, Monitor, RangeError, Registrar,
    Translation, Uncovered, Watch,
};
use pinfold_core::followed::Followed;
use pinfold_core::foreign::{self, ForeignPart};
use pinfold_kernel::{Errno, memory, process::page_bytes};
use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How a zone behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZoneOptions {
    /// Whether changes of a target are looked for before anything lands in it. Costs a few
    /// microseconds a message, and what the monitor costs the thread that unmaps the target later. On by
    /// default; off, such changes are the caller's to prevent.
    pub watch_targets: bool,
    /// Which way data of which length takes. Copying, unless one has been measured.
    pub crossover: Crossover,
}

impl Default for ZoneOptions {
    fn default() -> Self {
        Self { watch_targets: true, crossover: Crossover::COPY_ALL }
    }
}

/// Landing pages in registered slots, for messages of any target.
///
/// Share it by reference; every method may be called from any thread. Places do not outlive it, nor it its
/// cache:
///
/// ```compile_fail,E0505
/// # use pinfold::{Cache, Monitor, Registrar, landing::{Slab, Zone}};
/// # fn after_its_parent<R: Registrar, M: Monitor>(zone: Zone<'_, R, M, Slab>, target: *mut u8) {
/// let place = unsafe { zone.ask(target, 1) }.unwrap();
/// drop(zone);
/// drop(place);
/// # }
/// ```
///
/// ```compile_fail,E0505
/// # use pinfold::{Cache, Monitor, Registrar, landing::{Slab, Zone, ZoneOptions}};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>, slab: Slab) {
/// let zone = Zone::new(&cache, slab, ZoneOptions::default()).unwrap();
/// drop(cache);
/// drop(zone);
/// # }
/// ```
pub struct Zone<'c, R: Registrar, M: Monitor, P: SlabPages> {
    // Before the pages: the registrations are given up first.
    slots: Mutex<Slots<'c, R, M>>,
    /// Guards the place aside, for one exchange: some system calls. Taken with no other lock held. `None`
    /// if the kernel has unmapped a part of it, which another mapping may have taken since.
    aside: Mutex<Option<AddressRange>>,
    cache: &'c Cache<R, M>,
    options: ZoneOptions,
    granule: usize,
    /// Asked once: the pages are not ours to ask in the midst of an exchange.
    huge: bool,
    /// All slots, whichever place has them.
    ranges: Box<[AddressRange]>,
    /// Leaked, if a place was forgotten: a device may still write to it. So they are if the kernel has
    /// unmapped a part of them.
    pages: ManuallyDrop<P>,
}

/// What the zone's first lock guards, for a push or a pop. No other lock is taken under it.
struct Slots<'c, R: Registrar, M: Monitor> {
    /// Those without a registration in front; the last one was used last.
    free: VecDeque<Slot<'c, R, M>>,
    /// Slots of which the kernel has unmapped a part, which another mapping may have taken since: never
    /// used again.
    torn: Vec<AddressRange>,
}

impl<'c, R: Registrar, M: Monitor> Slots<'c, R, M> {
    fn put(&mut self, slot: Slot<'c, R, M>) {
        match slot.lease {
            Some(_) => self.free.push_back(slot),
            None => self.free.push_front(slot),
        }
    }
}

/// What is known of changes of a target.
pub(super) enum TargetWatch<'c, R: Registrar, M: Monitor> {
    /// They are reported. Where pages were given to it, those of its part that has them are told apart.
    By { target: Followed<'c, R, M>, given: Option<Followed<'c, R, M>> },
    /// The target has changed, but for its part that was given pages, whose changes are reported.
    OfGiven(Followed<'c, R, M>),
    /// They are the caller's to prevent.
    Unwatched,
    /// It has changed: other memory stands there, or none.
    Replaced,
    /// They were to be reported, and are not any more.
    Lost,
}

impl<R: Registrar, M: Monitor> TargetWatch<'_, R, M> {
    /// What was never watched is not said to have been replaced.
    pub(super) fn at_first(self) -> Self {
        if matches!(self, Self::Replaced) { Self::Unwatched } else { self }
    }

    /// Watched anew, as `now` says. What was watched does not become its caller's duty.
    pub(super) fn renewed(self, now: impl FnOnce() -> Self) -> Self {
        match self {
            Self::By { .. } | Self::OfGiven(_) => match now() {
                Self::Unwatched => Self::Lost,
                now => now,
            },
            Self::Unwatched | Self::Replaced | Self::Lost => self,
        }
    }

    pub(super) const fn is_watched(&self) -> bool {
        matches!(self, Self::By { .. } | Self::OfGiven(_) | Self::Replaced)
    }

    pub(super) const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost)
    }

    /// Whether a change of `range`, the target or its part that was given pages, was reported; `None` if that is
    /// unknown.
    pub(super) fn has_changed(&self, range: AddressRange) -> Option<bool> {
        match self {
            Self::By { target, given } => {
                let mut followed = given.iter().chain([target]);
                followed.find(|followed| followed.range() == range)?.has_changed()
            }
            Self::OfGiven(given) if given.range() == range => given.has_changed(),
            Self::Unwatched => Some(false),
            Self::OfGiven(_) | Self::Replaced => Some(true),
            Self::Lost => None,
        }
    }
}

/// A slot, registered or not.
struct Slot<'c, R: Registrar, M: Monitor> {
    range: AddressRange,
    lease: Option<Lease<'c, R, M>>,
}

/// Why a zone could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZoneError {
    /// A slot is longer than what the device registers at once.
    #[error(
        "landing slots of {slot_bytes} bytes exceed the device's longest registration of \
         {max_region_bytes}: let messages land in pieces"
    )]
    SlotTooLong {
        /// The slot's length, in bytes.
        slot_bytes: usize,
        /// The device's longest registration, in bytes.
        max_region_bytes: usize,
    },
    /// The cache's device follows the page table: pages that are exchanged while it writes to them would be
    /// lost to it. Zones are for registrations that hold on to their pages.
    #[error(
        "a device that follows the page table does not hold on to landing pages: make the zone \
         over a cache of pinned registrations"
    )]
    FollowsPageTable,
    /// A slot could not be registered.
    #[error("landing pages were not registered: {0}")]
    Register(GetError),
}

/// Why there is no place for a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The target is no range.
    #[error("{0}")]
    Range(RangeError),
    /// No slot is long enough, or all that were are in use.
    #[error(
        "none of the {free} free slots has room for {length} bytes: wait for places to land or a refill \
         to end, make the zone larger, or register the target"
    )]
    NoSlot {
        /// The message's length, in bytes.
        length: usize,
        /// How many slots are free.
        free: usize,
    },
    /// The slot could not be registered again.
    #[error("landing pages were not registered: {0}")]
    Register(GetError),
}

/// With which rights landing pages are registered.
const ACCESS: Access = Access::WRITE;

impl<'c, R: Registrar, M: Monitor, P: SlabPages> Zone<'c, R, M, P> {
    /// A zone in `pages`, every slot registered through `cache`, within its budget.
    ///
    /// # Errors
    ///
    /// [`ZoneError`].
    pub fn new(cache: &'c Cache<R, M>, pages: P, options: ZoneOptions) -> Result<Self, ZoneError> {
        let pages = ForeignPart::new(pages);
        if cache.registrar().translation() != Translation::Pinned {
            return Err(ZoneError::FollowsPageTable);
        }
        let max_region_bytes = cache.registrar().limits().max_region_bytes;
        let ranges = pages.slots().into_boxed_slice();
        if let Some(slot) = ranges.iter().find(|slot| slot.len() > max_region_bytes) {
            return Err(ZoneError::SlotTooLong { slot_bytes: slot.len(), max_region_bytes });
        }
        let free = ranges.iter().map(|&range| Slot { range, lease: None }).collect();
        let slots = Slots { free, torn: Vec::new() };
        let (granule, huge) = (pages.granule(), pages.huge());
        let aside = Mutex::new(Some(pages.aside()));
        let (slots, pages) = (Mutex::new(slots), ManuallyDrop::new(pages.into_inner()));
        let zone = Self { slots, aside, cache, options, granule, huge, ranges, pages };
        zone.refill().map_err(ZoneError::Register)?;
        Ok(zone)
    }

    /// A slot for a message to `target`, in the hands of one place, its handle, and where in it the message goes.
    pub(super) fn hold(&self, target: AddressRange) -> Result<Taken<'_, 'c, R, M, P>, AskError> {
        loop {
            let (slot, place) = self.take_slot(target)?;
            let mut held = Held::new(self, slot);
            match held.registered() {
                Ok(handle) => return Ok((held, handle, place)),
                // It is not found again, so the next is another.
                Err(Unregistered::Torn) => {}
                Err(Unregistered::Refused(error)) => return Err(AskError::Register(error)),
            }
        }
    }

    /// Registers every free slot that an exchange has left without a registration. Says how many. The one that is being
    /// registered counts as in use meanwhile.
    ///
    /// # Errors
    ///
    /// [`GetError`]: the slots that were not registered are tried again when they are needed.
    pub fn refill(&self) -> Result<usize, GetError> {
        if self.is_forked() {
            return Err(GetError::Forked);
        }
        let mut count = 0;
        while let Some(slot) = self.take_unregistered() {
            match Held::new(self, slot).registered() {
                Ok(_handle) => count += 1,
                Err(Unregistered::Torn) => {}
                Err(Unregistered::Refused(error)) => return Err(error),
            }
        }
        Ok(count)
    }

    /// As [`refill`](Self::refill), with what was exchanged given back before, on this thread: for
    /// measurements.
    pub(super) fn refill_now(&self) -> Result<usize, GetError> {
        self.cache.reclaim();
        self.refill()
    }

    /// How many slots are free; none in a forked child.
    pub fn free_slots(&self) -> usize {
        if self.is_forked() { 0 } else { self.lock().free.len() }
    }

    /// The settings.
    pub fn options(&self) -> &ZoneOptions {
        &self.options
    }

    /// Whether this is a forked child of the process whose zone it is: registrations are the parent's, and a
    /// thread that does not exist here may hold a lock.
    pub(super) fn is_forked(&self) -> bool {
        self.cache.is_forked()
    }

    /// Not in a forked child.
    fn lock(&self) -> MutexGuard<'_, Slots<'c, R, M>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot with room, one that is registered if there is one, and the place in it.
    fn take_slot(&self, target: AddressRange) -> Result<(Slot<'c, R, M>, AddressRange), AskError> {
        let mut slots = self.lock();
        let place_in = |slot: &Slot<'c, R, M>| {
            aligned_like(target, slot.range, self.granule)
                .or_else(|| aligned_like(target, slot.range, page_bytes()))
        };
        // The last one was used last: its pages are warm. With slots of one length it is the one.
        let mut free = slots.free.iter().enumerate().rev();
        let found = free.find_map(|(number, slot)| Some((number, place_in(slot)?)));
        let none = AskError::NoSlot { length: target.len(), free: slots.free.len() };
        let (number, place) = found.ok_or(none)?;
        Ok((slots.free.remove(number).ok_or(none)?, place))
    }

    fn take_unregistered(&self) -> Option<Slot<'c, R, M>> {
        let mut slots = self.lock();
        let is_there = slots.free.front().is_some_and(|slot| slot.lease.is_none());
        is_there.then(|| slots.free.pop_front()).flatten()
    }

    /// From now on changes of `target` are looked for, and of its part that was `given` pages; `Replaced` where it is
    /// no memory that can be watched, and `OfGiven` where that part is.
    pub(super) fn watch(
        &self,
        target: AddressRange,
        given: Option<AddressRange>,
    ) -> TargetWatch<'c, R, M> {
        // A target is this process's memory, of which a simulated monitor says nothing.
        if !self.options.watch_targets || self.cache.monitor().is_simulated() {
            return TargetWatch::Unwatched;
        }
        let patience = if given.is_some() { TO_WATCH_AGAIN } else { TO_WATCH };
        let is_whole = match self.covers(target, patience) {
            Covers::All => true,
            Covers::Replaced => false,
            Covers::Unknown => return TargetWatch::Unwatched,
        };
        if !is_whole {
            match given.map(|given| self.covers(given, patience)) {
                Some(Covers::All) => {}
                None | Some(Covers::Replaced) => return TargetWatch::Replaced,
                Some(Covers::Unknown) => return TargetWatch::Unwatched,
            }
        }
        // The process ends where it is unknown whether pages that a device writes are the target's still; data that cannot
        // land for that reason is there all the same.
        let follow = |range| match given {
            Some(_) => Followed::begin_marked(self.cache, range),
            None => Followed::begin(self.cache, range),
        };
        if let Some(given) = given.filter(|_| !is_whole) {
            return follow(given).map_or(TargetWatch::Unwatched, TargetWatch::OfGiven);
        }
        // One mark does for both where they are the same.
        match (follow(target), given.filter(|&given| given != target).map(follow)) {
            (Some(target), None) => TargetWatch::By { target, given: None },
            (Some(target), Some(Some(given))) => TargetWatch::By { target, given: Some(given) },
            (None, _) | (_, Some(None)) => TargetWatch::Unwatched,
        }
    }

    /// Whether the monitor sees changes of `range` from now on. It is asked again as long as changes of other memory leave it
    /// no moment, and no longer than `patience`.
    fn covers(&self, range: AddressRange, patience: Duration) -> Covers {
        let (monitor, pages) = (self.cache.monitor(), range.page_aligned(page_bytes()));
        let began = Instant::now();
        loop {
            match monitor.watch(pages) {
                Watch::Covered if monitor.check().is_ok() => return Covers::All,
                Watch::Uncovered(Uncovered::Unmapped | Uncovered::Mapping(_)) => {
                    return Covers::Replaced;
                }
                Watch::Uncovered(Uncovered::Refused { errno: libc::EAGAIN })
                    if began.elapsed() < patience =>
                {
                    thread::yield_now();
                }
                Watch::Covered | Watch::Uncovered(_) => return Covers::Unknown,
            }
        }
    }

    /// What an exchange of the pages of `from`, which is in a slot, for those of `to` would move. Nothing has
    /// changed yet.
    ///
    /// # Errors
    ///
    /// Where an exchange cannot be.
    pub(super) fn exchange(
        &self,
        from: AddressRange,
        to: AddressRange,
    ) -> Result<Exchange, LandError> {
        if is_in_a_slab(to) || is_reserved(to) {
            return Err(LandError::PoolMemory);
        }
        let (parts, old) = (parts_of(from)?, parts_of(to)?);
        Ok(Exchange { from, to, parts, old })
    }

    /// Gives the pages of a part of a slot to a target, and those of the target, if they are to be `kept`,
    /// to the slot. Where the kernel stops half-way, the rest stays in the slot. The content of the target
    /// is lost either way.
    ///
    /// # Safety
    ///
    /// The exchange is of a slot that the caller holds, and of a target, as long and of whole pages, that
    /// came with [`Zone::ask`]'s promise.
    pub(super) unsafe fn give_pages(&self, exchange: &Exchange, kept: bool) -> Given {
        let Exchange { from, to, ref parts, ref old } = *exchange;
        let mut aside = self.aside.lock().unwrap_or_else(PoisonError::into_inner);
        let in_aside = |aside| {
            aligned_like(to, aside, self.granule).or_else(|| aligned_like(to, aside, page_bytes()))
        };
        let spare = aside.and_then(in_aside).filter(|_| kept);
        // SAFETY: the caller's word; the place aside is the zone's, and its lock is held.
        let (given, slot_is_whole) = unsafe {
            let spare_is_whole = spare.is_none_or(|spare| move_parts(old, to, spare));
            let given = give_parts(parts, from, to);
            let room = AddressRange::between(from.start(), from.start() + given.bytes);
            // Where a part of the place aside is unmapped, another thread may have mapped its own there since.
            let room = room.filter(|_| spare_is_whole);
            let slot_is_whole = spare.is_none_or(|spare| take_back(spare, room));
            if !spare.is_none_or(|spare| spare_is_whole && self.renew(spare)) {
                *aside = None;
            }
            (given, slot_is_whole)
        };
        drop(aside);
        if !slot_is_whole {
            self.tear(from);
        }
        self.cache.invalidate(to);
        given
    }

    /// Moves back to its slot what was `given` to a target, which has mappings without pages there from then on. False if a
    /// part of it is there still; what of the slot is unmapped then is never used again.
    ///
    /// # Safety
    ///
    /// An exchange by [`give_pages`](Self::give_pages) has just moved as much, no change of the target or the slot has been made
    /// since, and what the slot has instead has no use.
    pub(super) unsafe fn move_back(&self, exchange: &Exchange, given: AddressRange) -> bool {
        let room = same_part(given, exchange.to, exchange.from);
        if self.lock().torn.iter().any(|slot| slot.contains(&room)) {
            // Another mapping may stand there.
            return false;
        }
        let Ok(parts) = parts_of(given) else { return false };
        // SAFETY: the caller's word.
        let back = unsafe { give_parts(&parts, given, room) };
        if matches!(back.error, Some(LandError::TargetUnmapped { .. })) {
            self.tear(room);
        }
        self.cache.invalidate(given);
        back.error.is_none()
    }

    /// The slot of `part` is never used again.
    fn tear(&self, part: AddressRange) {
        let slot = self.ranges.iter().find(|slot| slot.contains(&part));
        self.lock().torn.extend(slot);
    }

    /// Takes the pages out of `given`, a part of a target, which reads as zeros from then on: a device may
    /// go on writing to them.
    ///
    /// # Safety
    ///
    /// The range is whole pages of private anonymous memory that came with [`Zone::ask`]'s promise, and
    /// its content is lost.
    pub(super) unsafe fn take_pages_out(&self, given: AddressRange) -> Result<(), Errno> {
        // SAFETY: the caller's word. Locked memory is not discarded, but can be replaced.
        let taken = unsafe { memory::discard(given).or_else(|_| memory::renew(given)) };
        self.cache.invalidate(given);
        taken
    }

    /// Makes `range`, which is the zone's, one mapping without pages. False if it is unmapped now.
    ///
    /// # Safety
    ///
    /// No code relies on what it holds.
    unsafe fn renew(&self, range: AddressRange) -> bool {
        // SAFETY: the caller's word. Where it cannot be, it stays as it is, in several mappings.
        if unsafe { memory::renew(range) }.is_err() {
            return is_mapped_again(range);
        }
        // Advice: without huge pages they are small.
        let _ = memory::advise_huge(range, self.huge);
        true
    }
}

/// How long a monitor is asked to watch the target of a place.
const TO_WATCH: Duration = Duration::from_millis(250);
/// The same for one that is being remapped: refused for that, its data lands by its caller's word only.
const TO_WATCH_AGAIN: Duration = Duration::from_secs(1);

/// What a monitor sees of a range.
enum Covers {
    /// Each change from now on.
    All,
    /// It is no memory that can be watched.
    Replaced,
    /// Nothing, for another reason.
    Unknown,
}

/// Pages that are about to change hands.
pub(super) struct Exchange {
    from: AddressRange,
    pub(super) to: AddressRange,
    /// Of `from`, each in one mapping.
    parts: Vec<AddressRange>,
    /// Of `to`.
    old: Vec<AddressRange>,
}

/// Whether `range` is mapped, behind a call of the kernel's that has failed: one that ran out of memory may have
/// unmapped all of it, and then it is mapped anew here, unless that fails, too.
///
/// Between the two calls another thread may have mapped something there; that takes a kernel without memory and
/// cannot be told from a range that was left alone.
///
/// A process with as many mappings as it may have is answered as if memory had run out, whatever stands there.
fn is_mapped_again(range: AddressRange) -> bool {
    match memory::map_if_free(range) {
        Ok(()) | Err(Errno(libc::EEXIST)) => true,
        Err(_) => memory::is_mapped(range),
    }
}

/// Whether a part of `range` is unmapped or shared memory. False if the kernel does not say.
pub(super) fn is_replaced(range: AddressRange) -> bool {
    mappings_in(range).is_ok_and(|mappings| {
        let private = mappings.iter().filter(|mapping| !mapping.shared);
        let parts = private.filter_map(|mapping| mapping.range.intersection(&range));
        parts.map(|part| part.len()).sum::<usize>() < range.len()
    })
}

/// How much of a range has changed hands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Given {
    /// From the beginning.
    pub(super) bytes: usize,
    /// Why it is not all.
    pub(super) error: Option<LandError>,
}

/// Moves each of `parts` of `from` to its place in `to`, as far as the kernel will: what stays
/// behind is lost, which is no loss. False if a part of `to` is unmapped now.
///
/// # Safety
///
/// As for [`memory::move_out`].
unsafe fn move_parts(parts: &[AddressRange], from: AddressRange, to: AddressRange) -> bool {
    parts.iter().fold(true, |is_whole, &part| {
        let goal = same_part(part, from, to);
        // SAFETY: the caller's word.
        let moved = unsafe { memory::move_out(part, goal) };
        (moved.is_ok() || is_mapped_again(goal)) && is_whole
    })
}

/// Moves one part after the other, and stops at the first that does not go.
///
/// # Safety
///
/// As for [`memory::move_out`].
unsafe fn give_parts(parts: &[AddressRange], from: AddressRange, to: AddressRange) -> Given {
    for part in parts {
        let goal = same_part(*part, from, to);
        // SAFETY: the caller's word.
        if let Err(Errno(errno)) = unsafe { memory::move_out(*part, goal) } {
            let error = match is_mapped_again(goal) {
                true => LandError::Exchange { errno },
                false => LandError::TargetUnmapped { errno },
            };
            return Given { bytes: part.start() - from.start(), error: Some(error) };
        }
    }
    Given { bytes: from.len(), error: None }
}

/// Moves the pages that stand aside in `spare` to `room`, as far as it reaches. False if a part of `room` is
/// unmapped now.
///
/// # Safety
///
/// As for [`memory::move_out`], both being the zone's.
unsafe fn take_back(spare: AddressRange, room: Option<AddressRange>) -> bool {
    let wanted = room.and_then(|room| spare.intersection(&same_length(spare, room)));
    if let (Some(room), Some(wanted)) = (room, wanted)
        && let Ok(parts) = parts_of(wanted)
    {
        // SAFETY: the caller's word.
        return unsafe { move_parts(&parts, wanted, room) };
    }
    true
}

/// As much of the beginning of `range` as `other` is long.
fn same_length(range: AddressRange, other: AddressRange) -> AddressRange {
    AddressRange::new(range.start(), other.len()).unwrap_or(range)
}

/// More mappings than this in one message are not worth the calls; a copy is.
const MOST_PARTS: usize = 16;

/// The parts of `range` that are one mapping each; an exchange leaves several behind.
///
/// Their pages can be moved to another address and back without a notice to any code: private
/// memory without a file, to be read and written.
fn parts_of(range: AddressRange) -> Result<Vec<AddressRange>, LandError> {
    let mappings = mappings_in(range).map_err(|error| LandError::Exchange {
        errno: error.raw_os_error().unwrap_or(libc::EIO),
    })?;
    let fits = |mapping: &Mapping| {
        mapping.kind == MappingKind::PrivateAnonymous
            && mapping.readable
            && mapping.writable
            && !mapping.shared
    };
    if !mappings.iter().all(fits) {
        return Err(LandError::UnsuitableMapping);
    }
    let parts: Vec<_> =
        mappings.iter().filter_map(|mapping| mapping.range.intersection(&range)).collect();
    let mapped: usize = parts.iter().map(AddressRange::len).sum();
    match (mapped == range.len(), parts.len() <= MOST_PARTS) {
        (true, true) => Ok(parts),
        (true, false) => Err(LandError::TooManyMappings),
        (false, _) => Err(LandError::UnsuitableMapping),
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Drop for Zone<'_, R, M, P> {
    /// The caller vouched for this memory, which is about to go: no registration of it may be found any
    /// more, that of a forgotten place included.
    fn drop(&mut self) {
        let is_forked = self.is_forked();
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        let free = std::mem::take(&mut slots.free);
        if is_forked {
            // Another thread of the parent may have been in the midst of it: it is left as it is.
            return std::mem::forget(free);
        }
        self.ranges.iter().for_each(|&range| self.cache.invalidate(range));
        let aside = self.aside.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all_are_back = free.len() == self.ranges.len() && aside.is_some();
        // The end of a registration for one use calls the registrar.
        let ended = foreign::call(|| drop(free));
        let unmapped = foreign::call(|| {
            if all_are_back {
                // SAFETY: dropped once, in the destructor, when every slot is back: no device uses any.
                unsafe { ManuallyDrop::drop(&mut self.pages) };
            }
        });
        if let Err(panicked) = ended.and(unmapped) {
            panicked.resume_unless_unwinding();
        }
    }
}

/// A slot, its handle, and the place in it.
type Taken<'z, 'c, R, M, P> = (Held<'z, 'c, R, M, P>, <R as Registrar>::Handle, AddressRange);

/// Why a slot has no registration.
enum Unregistered {
    /// Its memory is not mapped, or another mapping's by now: it is never used again.
    Torn,
    /// The cache gave none.
    Refused(GetError),
}

/// A slot that has a holder and to which no device writes; free again when it is dropped, but in a forked child.
pub(super) struct Held<'z, 'c, R: Registrar, M: Monitor, P: SlabPages> {
    pub(super) zone: &'z Zone<'c, R, M, P>,
    slot: AddressRange,
    lease: Option<Lease<'c, R, M>>,
}

impl<'z, 'c, R: Registrar, M: Monitor, P: SlabPages> Held<'z, 'c, R, M, P> {
    fn new(zone: &'z Zone<'c, R, M, P>, slot: Slot<'c, R, M>) -> Self {
        Self { zone, slot: slot.range, lease: slot.lease }
    }

    /// The slot's handle; registers it if it has none.
    fn registered(&mut self) -> Result<R::Handle, Unregistered> {
        if let Some(lease) = &self.lease {
            return Ok(lease.handle());
        }
        self.tidy()?;
        let start = std::ptr::with_exposed_provenance(self.slot.start());
        // SAFETY: the slot is the zone's alone, and the holder of the place writes it by the device
        // alone. Its pages change in exchanges, each of which ends in `unregister`.
        let lease =
            unsafe { self.zone.cache.request(start, self.slot.len(), ACCESS).vouched().get() }
                .map_err(Unregistered::Refused)?;
        let handle = lease.handle();
        self.lease = Some(lease);
        Ok(handle)
    }

    /// Begins with new pages if the slot has come to consist of more mappings than an exchange
    /// takes.
    fn tidy(&self) -> Result<(), Unregistered> {
        // SAFETY: a slot without a registration, held here, has nothing in it.
        if parts_of(self.slot).is_err() && !unsafe { self.zone.renew(self.slot) } {
            self.zone.tear(self.slot);
            return Err(Unregistered::Torn);
        }
        Ok(())
    }

    /// Has the cache forget the slot, whose pages have changed. Should that panic, the slot is never used again.
    pub(super) fn unregister(&mut self) {
        if let Err(panicked) = foreign::call(|| self.zone.cache.invalidate(self.slot)) {
            self.zone.tear(self.slot);
            panicked.resume_unless_unwinding();
        }
        drop(self.lease.take());
    }

    /// Abandons the slot, to which a device may still be writing: what is under way goes on into the pages
    /// that were pinned, and which have no other use. Where the kernel leaves them in the slot, that is
    /// never used again, and the zone's pages are leaked.
    ///
    /// The registration stays until the cache goes, because a request that the device has not looked at yet
    /// (linked, drained, not submitted) names it: under the same handle another use would get its bytes.
    ///
    /// In a forked child nothing happens: the pages are the parent's. A slot of which a part is unmapped is left as it is: the
    /// part may be another mapping's. One that the cache has not forgotten, because a monitor panicked, has no other use.
    pub(super) fn abandon(self) {
        let mut this = ManuallyDrop::new(self);
        if this.zone.is_forked() {
            return;
        }
        std::mem::forget(this.lease.take());
        let forgotten = foreign::call(|| this.zone.cache.invalidate(this.slot));
        let is_torn = this.zone.lock().torn.contains(&this.slot);
        // SAFETY: all of it is the zone's still, and no code relies on what a slot holds.
        let discard =
            || unsafe { memory::discard(this.slot).or_else(|_| memory::renew(this.slot)) };
        if forgotten.is_ok() && !is_torn && discard().is_ok() {
            drop(ManuallyDrop::into_inner(this));
        }
        if let Err(panicked) = forgotten {
            panicked.resume_unless_unwinding();
        }
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Drop for Held<'_, '_, R, M, P> {
    fn drop(&mut self) {
        let slot = Slot { range: self.slot, lease: self.lease.take() };
        if self.zone.is_forked() {
            return;
        }
        let mut slots = self.zone.lock();
        if !slots.torn.contains(&slot.range) {
            slots.put(slot);
        }
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> fmt::Debug for Zone<'_, R, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zone")
            .field("free_slots", &self.free_slots())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
