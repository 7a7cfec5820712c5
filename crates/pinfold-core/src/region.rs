//! A region: a range, its registration, its rights and its state.
//!
//! Regions live in an arena and their places are used again, so a place that a reader got from
//! the index may hold another region by the time it is looked at. The order is therefore always:
//! protect the place with a hazard, run the light barrier, load the state; only a live one makes
//! the rest of the region readable, and while the hazard stands it stays so.
//!
//! Where to look next: `state` (the one state of a region, and its moves), `lists` (who makes
//! them).
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to share a handle that is written once before a region is
//! published and read only by the threads that the order above lets in.

#![allow(unsafe_code)]

mod lists;
mod state;

pub(crate) use lists::{Deregistering, Lists};
pub(crate) use state::{List, Outside, State};

use crate::error::GetError;
use crate::hazard::Findable;
use crate::sync::{AtomicU64, AtomicUsize, Ordering, UnsafeCell};
use crate::unapplied::ChangeCount;
use crate::{Access, AddressRange};
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicU32;

/// Rights of a region and whether a caller vouches for it, as one byte of its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Terms {
    pub(crate) access: Access,
    /// The caller reports changes; a caller that does not vouch itself must not rely on it.
    pub(crate) vouched: bool,
}

impl Terms {
    const VOUCHED: u8 = 1 << 7;

    const fn bits(self) -> u8 {
        self.access.bits() | if self.vouched { Self::VOUCHED } else { 0 }
    }

    const fn from_bits(bits: u8) -> Self {
        Self { access: Access::from_bits(bits), vouched: bits & Self::VOUCHED != 0 }
    }

    /// Whether a region on these terms serves a use on `wanted` terms.
    #[inline]
    pub(crate) const fn serve(self, wanted: Self) -> bool {
        let enough = if wanted.access.is_remote() {
            self.access.bits() == wanted.access.bits()
        } else {
            self.access.contains(wanted.access)
        };
        enough && (wanted.vouched || !self.vouched)
    }
}

/// What a caller wants: bytes and terms.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Want {
    pub(crate) range: AddressRange,
    pub(crate) terms: Terms,
}

impl Want {
    /// # Errors
    ///
    /// For arguments that name no bytes or no rights.
    pub(crate) fn new(start: usize, length: usize, terms: Terms) -> Result<Self, GetError> {
        let range = AddressRange::new(start, length)?;
        if terms.access == Access::default() {
            return Err(GetError::NoAccess);
        }
        Ok(Self { range, terms })
    }

    /// Whether a region of `range` on `terms` serves this.
    ///
    /// Remote access is served by exactly its own bytes and rights: a key must not open more.
    #[inline]
    pub(crate) fn served_by(&self, range: AddressRange, terms: Terms) -> bool {
        let bytes = if self.terms.access.is_remote() {
            range == self.range
        } else {
            range.contains(&self.range)
        };
        bytes && terms.serve(self.terms)
    }
}

/// What a caller asks for, as it said it: a hit need not know whether it makes sense.
///
/// Start and length as the program gave them. Code that compares them with a region has made sure
/// that the length is neither zero nor above the device's longest registration, at most 2^62; and no
/// index offers a region for a start above 2^48. So the end does not wrap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) start: usize,
    pub(crate) length: usize,
    pub(crate) terms: Terms,
}

impl Ask {
    #[inline(always)]
    pub(crate) const fn new(start: usize, length: usize, terms: Terms) -> Self {
        Self { start, length, terms }
    }

    #[inline(always)]
    pub(crate) const fn end(self) -> usize {
        self.start.wrapping_add(self.length)
    }

    #[inline(always)]
    pub(crate) const fn has_rights(self) -> bool {
        self.terms.access.bits() != 0
    }

    /// The bits of a region's state that matter, and what they must be: the rights that are
    /// asked for, or exactly those; no caller's word, unless this one gives its own.
    #[inline(always)]
    const fn state(self) -> (u64, u64) {
        let Terms { access, vouched } = self.terms;
        let rights = if access.is_remote() { Access::ALL } else { access };
        let word = if vouched { 0 } else { Terms::VOUCHED };
        let mask = ((rights.bits() | word) as u64) << 8 | state::LIVE as u64;
        (mask, (access.bits() as u64) << 8 | state::LIVE as u64)
    }
}

impl From<&Want> for Ask {
    fn from(want: &Want) -> Self {
        Self::new(want.range.start(), want.range.len(), want.terms)
    }
}

/// What a use counts of as many bytes as the one for which a range was bought.
pub(crate) const USE: u32 = 1 << 10;

/// What the hits of a bought region were worth, in uses of as many bytes as the one for which it was bought. A hit of fewer bytes is
/// worth a part of one, for without the region those alone would have been registered; one of more is worth no more.
///
/// In bits 0-5 the logarithm of those bytes, in bits 6-9 how often what they are worth is halved at most; above, the sum, in parts of
/// [`USE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HitCount(u32);

impl HitCount {
    const HALVINGS: u32 = 6;
    const SUM: u32 = 10;
    /// So much is counted: as many hits as keeping it must spare to have paid, but where each spares next to nothing.
    const MOST: u32 = (1_024 * USE) << Self::SUM;
    /// Of a region that was not bought, none are counted.
    const NONE: u32 = u32::MAX;

    /// No hits, of a region that was bought for a use of so many bytes. A use of the fewest bytes costs as much as this one
    /// halved so often.
    pub(crate) fn for_use_of(bytes: usize, halvings: u32) -> Self {
        let halvings = halvings.min(USE.ilog2());
        Self((bytes | 1).ilog2() | halvings << Self::HALVINGS)
    }

    #[inline]
    fn with_hit_of(self, bytes: usize) -> Self {
        let (bought, most) = (self.0 & 0x3f, self.0 >> Self::HALVINGS & 0xf);
        let shorter = bought.saturating_sub((bytes | 1).ilog2());
        let part = USE >> shorter.min(most);
        Self(self.0 + (part << Self::SUM))
    }

    /// In parts of [`USE`].
    pub(crate) const fn sum(self) -> u64 {
        (self.0 >> Self::SUM) as u64
    }
}

/// One place for a region.
///
/// A cache line of its own, which also frees the low bits of its address for the index.
#[repr(align(64))]
pub(crate) struct Region<H> {
    /// [`State`] in bits 0-7, terms in bits 8-15; above, how many changes there were when the
    /// registration began. Where that does not fit, more changes than need be are taken for later.
    state: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
    /// The cache's tick when a lease was last taken.
    used: AtomicU64,
    /// What `used` was when the order of eviction last looked; of a region that is being deregistered, which
    /// deregistration that is. Belongs to the holder of the writer's lock.
    mark: AtomicU64,
    /// The place's number in the arena.
    pub(crate) number: u32,
    /// The [`HitCount`], if it was bought, so that it tells whether that paid. The standard library's: nothing is proved with it,
    /// and a model of the others need not try what each thread reads here.
    hits: AtomicU32,
    handle: UnsafeCell<MaybeUninit<H>>,
}

// SAFETY: everything but `handle` is atomic. `handle` is written by `fill` alone, which the
// writer calls on a free place, and read by `handle` alone, whose caller holds a hazard or the
// only lease; the module's header says why those never coincide.
unsafe impl<H: Send + Sync> Sync for Region<H> {}

impl<H: Copy> Findable for Region<H> {
    fn is_live(&self) -> bool {
        Region::is_live(self)
    }

    fn awaits_scan(&self) -> bool {
        self.state().awaits_scan()
    }
}

impl<H: Copy> Region<H> {
    pub(crate) fn new(number: u32) -> Self {
        Self {
            state: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            used: AtomicU64::new(0),
            mark: AtomicU64::new(0),
            number,
            hits: AtomicU32::new(HitCount::NONE),
            handle: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Puts a registration into this place, whose state stays as it is.
    ///
    /// # Safety
    ///
    /// The place is free or parked, so that no reader looks at it, and the caller is the only
    /// writer.
    pub(crate) unsafe fn fill(
        &self,
        Want { range, terms }: Want,
        born: ChangeCount,
        tick: u64,
        handle: H,
    ) {
        // SAFETY: no reader looks at the handle of such a place, and there is no other writer.
        self.handle.with_mut(|cell| unsafe { (*cell).write(handle) });
        // Relaxed: the Release store of a live state publishes all of it.
        self.start.store(range.start(), Ordering::Relaxed);
        self.end.store(range.end(), Ordering::Relaxed);
        self.used.store(tick, Ordering::Relaxed);
        self.hits.store(HitCount::NONE, Ordering::Relaxed);
        let state = self.state.load(Ordering::Relaxed) & 0xff;
        let terms = u64::from(terms.bits());
        self.state.store(born.bits() << 16 | terms << 8 | state, Ordering::Relaxed);
    }

    /// As [`fill`](Self::fill) without a handle.
    #[cfg(test)]
    #[cfg(not(loom))]
    pub(crate) fn put_for_test(&self, range: AddressRange, tick: u64) {
        // Relaxed: one thread.
        self.start.store(range.start(), Ordering::Relaxed);
        self.end.store(range.end(), Ordering::Relaxed);
        self.used.store(tick, Ordering::Relaxed);
    }

    /// Changes the state. The writer's lock is held; [`Lists`] alone calls this.
    fn set_state(&self, state: State) {
        // Relaxed: only holders of the writer's lock store here.
        let word = self.state.load(Ordering::Relaxed);
        // Release: a reader that finds the region live sees the range and the handle written before.
        self.state.store(word & !0xff | u64::from(state as u8), Ordering::Release);
    }

    /// The range and the terms if the region may be leased by a holder of the writer's lock, which
    /// the caller is.
    pub(crate) fn findable(&self) -> Option<(AddressRange, Terms)> {
        // Relaxed: only holders of the writer's lock store here.
        let state = self.state.load(Ordering::Relaxed);
        if !State::from_bits(state).is_indexed() {
            return None;
        }
        Some((self.range()?, Terms::from_bits((state >> 8 & 0xff) as u8)))
    }

    /// How many changes there were when the registration began. The writer's lock is held.
    pub(crate) fn born(&self) -> ChangeCount {
        // Relaxed: only holders of the writer's lock store here.
        ChangeCount::from_bits(self.state.load(Ordering::Relaxed) >> 16)
    }

    /// The terms last put here. The writer's lock is held.
    pub(crate) fn terms(&self) -> Terms {
        // Relaxed: only holders of the writer's lock store here.
        Terms::from_bits((self.state.load(Ordering::Relaxed) >> 8 & 0xff) as u8)
    }

    #[inline]
    pub(crate) fn state(&self) -> State {
        // Acquire: pairs with `set_state`.
        State::from_bits(self.state.load(Ordering::Acquire))
    }

    /// Whether hits find the region.
    #[inline(always)]
    pub(crate) fn is_live(&self) -> bool {
        // Acquire: pairs with `set_state`.
        self.state.load(Ordering::Acquire) & u64::from(state::LIVE) != 0
    }

    /// Whether something may wait for the end of a lease of this region.
    #[inline(always)]
    pub(crate) fn may_be_awaited(&self) -> bool {
        // Acquire: pairs with `set_state`.
        self.state.load(Ordering::Acquire) & u64::from(state::QUIET) == 0
    }

    /// Whether the region is live and serves `ask`: [`Want::served_by`] in three compares.
    ///
    /// Behind a hazard and the light barrier, the answer holds until the hazard is cleared.
    #[inline(always)]
    pub(crate) fn serves(&self, ask: Ask) -> bool {
        // Acquire: pairs with `set_state`.
        let state = self.state.load(Ordering::Acquire);
        // Relaxed: the state was loaded with Acquire before.
        let start = self.start.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        let (mask, wanted) = ask.state();
        let bytes = if ask.terms.access.is_remote() {
            (start == ask.start) & (end == ask.end())
        } else {
            (start <= ask.start) & (ask.end() <= end)
        };
        (state & mask == wanted) & bytes
    }

    /// The range last put here; stable for a leaseholder and under the writer's lock.
    #[inline]
    pub(crate) fn range(&self) -> Option<AddressRange> {
        // Relaxed: the state was loaded with Acquire before, or the writer's lock is held.
        AddressRange::between(self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed))
    }

    /// Notes that a lease was taken at `tick`.
    #[inline]
    pub(crate) fn touch(&self, tick: u64) {
        // Relaxed: an approximate clock. Stored only when it advanced, which a miss alone makes
        // it do, so that steady hits on one region write no line that others read.
        if self.used.load(Ordering::Relaxed) != tick {
            self.used.store(tick, Ordering::Relaxed);
        }
    }

    /// Counts a hit of so many bytes. Not for ever, so that steady hits on one region write no line that others read.
    #[inline(always)]
    pub(crate) fn count_hit(&self, bytes: usize) {
        // Relaxed, load and store: an estimate, to which a hit that another thread counts at once may be lost.
        let hits = self.hits.load(Ordering::Relaxed);
        if hits < HitCount::MOST {
            self.hits.store(HitCount(hits).with_hit_of(bytes).0, Ordering::Relaxed);
        }
    }

    /// The region was bought, or takes over what was. The writer's lock is held, as for the next two.
    pub(crate) fn set_bought(&self, hits: HitCount) {
        // Relaxed: an estimate, as in `count_hit`.
        self.hits.store(hits.0, Ordering::Relaxed);
    }

    /// What its hits were worth since it was bought, as far as they were counted; `None` if it was not bought.
    pub(crate) fn bought_hits(&self) -> Option<HitCount> {
        // Relaxed: an estimate, as in `count_hit`.
        let hits = self.hits.load(Ordering::Relaxed);
        (hits != HitCount::NONE).then_some(HitCount(hits))
    }

    /// The same, once: what comes behind is not counted for that purchase any more.
    pub(crate) fn take_bought(&self) -> Option<HitCount> {
        let hits = self.bought_hits()?;
        // Relaxed, load and store: a hit that another thread counts at this moment may have it counted once more, of a region
        // that hits find; then a purchase is judged twice, which costs time and nothing else.
        self.hits.store(HitCount::NONE, Ordering::Relaxed);
        Some(hits)
    }

    /// The tick of the last lease.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Notes what the region is to be compared with. The writer's lock is held.
    pub(crate) fn set_mark(&self, mark: u64) {
        // Relaxed: only holders of the writer's lock load and store here.
        self.mark.store(mark, Ordering::Relaxed);
    }

    /// What was noted last. The writer's lock is held.
    pub(crate) fn mark(&self) -> u64 {
        // Relaxed: as for the store.
        self.mark.load(Ordering::Relaxed)
    }

    /// The registration.
    ///
    /// # Safety
    ///
    /// The region was filled, and cannot be freed meanwhile: the caller holds a hazard behind
    /// which it saw the region live, the only lease of a region per use, or the duty to
    /// deregister it.
    #[inline]
    pub(crate) unsafe fn handle(&self) -> H {
        // SAFETY: filled, and not being filled again, by the caller's promise.
        self.handle.with(|cell| unsafe { (*cell).assume_init() })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::hazard::Unpublished;

    fn want(start: usize, end: usize, access: Access) -> Want {
        let range = AddressRange::between(start, end).unwrap();
        Want { range, terms: Terms { access, vouched: false } }
    }

    #[test]
    fn only_a_live_region_can_be_read() {
        let region = Region::new(0);
        let wanted = want(0x1000, 0x2000, Access::READ);
        // SAFETY: a free place, and no other thread.
        unsafe { region.fill(wanted, ChangeCount::default(), 1, 42_u32) };
        assert!(!region.serves(Ask::from(&wanted)));
        region.set_state(State::Small);
        assert!(region.serves(Ask::from(&wanted)));
        // SAFETY: filled above, and no other thread.
        assert_eq!(unsafe { region.handle() }, 42);
        region.set_state(State::SmallClosed);
        assert!(!region.serves(Ask::from(&wanted)));
    }

    #[test]
    fn hits_are_those_since_the_purchase_and_no_more_are_written_than_tell() {
        let region = Region::new(0);
        let sum = || region.bought_hits().map(HitCount::sum);
        (0..10).for_each(|_| region.count_hit(4096));
        assert_eq!(sum(), None, "not bought");
        region.set_bought(HitCount::for_use_of(4096, 0));
        (0..10).for_each(|_| region.count_hit(4096));
        assert_eq!(sum(), Some(10 * u64::from(USE)));
        (0..2_000).for_each(|_| region.count_hit(4096));
        assert_eq!(sum(), Some(1_024 * u64::from(USE)));
        assert!(region.take_bought().is_some() && region.take_bought().is_none());
        let wanted = want(0x1000, 0x2000, Access::READ);
        // SAFETY: a free place, and no other thread.
        unsafe { region.fill(wanted, ChangeCount::default(), 1, 42_u32) };
        assert_eq!(sum(), None);
    }

    #[test]
    fn a_hit_of_a_part_is_worth_a_part() {
        let worth = |bought, halvings, bytes| {
            HitCount::for_use_of(bought, halvings).with_hit_of(bytes).sum()
        };
        let whole = u64::from(USE);
        assert_eq!([4096, 4097, 1 << 40].map(|bytes| worth(4096, 10, bytes)), [whole; 3]);
        let parts = [1 << 15, 1 << 14, 4096, 1].map(|bytes| worth(1 << 16, 10, bytes));
        assert_eq!(parts, [2, 4, 16, 1024].map(|part| whole / part));
        assert_eq!([1 << 15, 1 << 14, 4096].map(|bytes| worth(1 << 16, 1, bytes)), [whole / 2; 3]);
        assert_eq!(
            [(1 << 30, 10), (1 << 47, u32::MAX)].map(|(it, most)| worth(it, most, 1)),
            [1; 2]
        );
    }

    /// What hits find can be leased at any moment, so no scan says that it is idle.
    #[test]
    fn what_hits_find_is_not_scanned() {
        let region = Region::<u32>::new(0);
        for state in State::ALL {
            region.set_state(state);
            assert_eq!(Unpublished::of(&region).is_none(), region.is_live(), "{state:?}");
        }
        region.set_state(State::Main);
        assert!(Unpublished::of(&region).is_none());
    }

    /// What a hit compares in one word is what the slow path says in many.
    #[test]
    fn a_hit_and_the_slow_path_agree_on_what_serves() {
        let range = |start, end| AddressRange::between(start, end).unwrap();
        let rights = || (1..32_u8).map(Access::from_bits).step_by(if cfg!(miri) { 7 } else { 1 });
        let region = Region::new(0);
        for (access, vouched) in rights().flat_map(|access| [(access, false), (access, true)]) {
            let (bytes, terms) = (range(0x1000, 0x3000), Terms { access, vouched });
            // SAFETY: not findable, and no other thread.
            unsafe { region.fill(Want { range: bytes, terms }, ChangeCount::default(), 1, 0_u32) };
            region.set_state(State::Main);
            for access in rights() {
                for vouched in [false, true] {
                    for asked in [
                        range(0x1000, 0x3000),
                        range(0x1001, 0x3000),
                        range(0x1000, 0x3001),
                        range(0xfff, 0x2fff),
                        range(0x3000, 0x3001),
                    ] {
                        let want = Want { range: asked, terms: Terms { access, vouched } };
                        let expected = want.served_by(bytes, terms);
                        assert_eq!(region.serves(Ask::from(&want)), expected, "{want:?} {terms:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn local_uses_need_no_more_than_containment() {
        let wanted = want(0x1100, 0x1200, Access::READ);
        let around = AddressRange::between(0x1000, 0x2000).unwrap();
        let terms = |access, vouched| Terms { access, vouched };
        assert!(wanted.served_by(around, terms(Access::READ_WRITE, false)));
        assert!(!wanted.served_by(around, terms(Access::WRITE, false)));
        assert!(!wanted.served_by(around, terms(Access::READ, true)));
    }

    #[test]
    fn remote_uses_are_served_by_their_own_bytes_and_rights_alone() {
        let access = Access::READ | Access::REMOTE_READ;
        let wanted = want(0x1100, 0x1200, access);
        let around = AddressRange::between(0x1000, 0x2000).unwrap();
        let terms = |access| Terms { access, vouched: false };
        assert!(!wanted.served_by(around, terms(access)));
        assert!(wanted.served_by(wanted.range, terms(access)));
        assert!(!wanted.served_by(wanted.range, terms(access | Access::WRITE)));
    }
}
