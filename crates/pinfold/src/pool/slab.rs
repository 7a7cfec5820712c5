//! One slab: memory, what each device gave for it, and what each of its units is.

use super::classes::{Class, UNIT};
use super::devices::Handles;
use super::map;
use super::memory::{Memory, PageKind};
use super::space::{Place, SlabNumber};
use pinfold_core::AddressRange;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Registered memory that is cut into buffers, of a pool whose state is a `D`.
#[derive(Debug)]
pub(super) struct Slab<D> {
    number: SlabNumber,
    memory: Memory,
    handles: Handles,
    /// The pool's, which lives as long as one of its slabs: buffers that come back when the pool is
    /// gone find it.
    depot: Arc<D>,
    /// For each unit what begins in it: a class's blocks, or a long buffer.
    ///
    /// Written relaxed, before a buffer that begins there is handed out; a thread that has the buffer
    /// got it from there by a stronger means.
    kinds: Box<[AtomicU32]>,
}

/// What a buffer is: how long, and where it goes back to. A class's index, or a number of units with
/// the highest bit set.
///
/// One word, because buffers are moved as soon as they are taken: a load of more than was stored at
/// once waits until all of it has reached the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Kind(u32);

/// What a long buffer's word adds to the number of units.
const LONG: u32 = 1 << 31;

impl Kind {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // there are few classes
    pub(super) const fn block(class: Class) -> Self {
        Self(class.index() as u32)
    }

    /// So many units, fewer than 2^31.
    pub(super) const fn long(units: u32) -> Self {
        Self(LONG | units)
    }

    /// The class of a block; `None` for a long buffer.
    #[inline(always)]
    pub(super) fn class(self) -> Option<Class> {
        Class::of_index(self.0 as usize)
    }

    fn of_word(word: u32) -> Option<Self> {
        let kind = Self(word);
        (word & LONG != 0 || kind.class().is_some()).then_some(kind)
    }

    /// How long the buffer may become, in bytes.
    pub(super) fn bytes(self) -> usize {
        self.class().map_or((self.0 & !LONG) as usize * UNIT, Class::bytes)
    }
}

impl<D> Slab<D> {
    pub(super) fn new(
        number: SlabNumber,
        memory: Memory,
        handles: Handles,
        depot: Arc<D>,
    ) -> Arc<Self> {
        let kinds = (0..memory.bytes().div_ceil(UNIT)).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Self { number, memory, handles, depot, kinds })
    }

    /// Has the slab be found by its addresses; false if the table does not reach them.
    pub(super) fn publish(self: &Arc<Self>) -> bool {
        let slab = NonNull::new(Arc::as_ptr(self).cast_mut().cast());
        map::set(self.start(), self.bytes(), slab)
    }

    /// Has it not be found any more.
    pub(super) fn hide(&self) {
        // Its addresses were in the table's reach when it was published.
        let _ = map::set(self.start(), self.bytes(), None);
    }

    fn start(&self) -> usize {
        self.memory.start().addr().get()
    }

    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(super) fn units(&self) -> usize {
        self.kinds.len()
    }

    /// What was registered.
    pub(super) fn range(&self) -> Option<AddressRange> {
        AddressRange::new(self.start(), self.bytes()).ok()
    }

    pub(super) fn page_kinds(&self) -> [(PageKind, usize); 2] {
        self.memory.kinds()
    }

    pub(super) fn handles(&self) -> &Handles {
        &self.handles
    }

    pub(super) fn depot(&self) -> &Arc<D> {
        &self.depot
    }

    /// The address of a place, which from now on is a buffer of this kind.
    pub(super) fn hand_out(&self, place: Place, kind: Kind) -> Option<NonNull<u8>> {
        // Relaxed: see `kinds`.
        self.kinds.get(place.offset / UNIT)?.store(kind.0, Ordering::Relaxed);
        let start = self.memory.start().as_ptr();
        NonNull::new(start.wrapping_add(place.offset))
    }

    /// Where in this slab an address is.
    pub(super) fn place_of(&self, address: usize) -> Option<Place> {
        let offset = address.checked_sub(self.start()).filter(|&offset| offset < self.bytes())?;
        Some(Place { slab: self.number, offset })
    }

    /// What the buffer is that begins at this place and has been handed out.
    #[inline]
    pub(super) fn kind_at(&self, place: Place) -> Option<Kind> {
        // Relaxed: see `kinds`.
        Kind::of_word(self.kinds.get(place.offset / UNIT)?.load(Ordering::Relaxed))
    }
}
