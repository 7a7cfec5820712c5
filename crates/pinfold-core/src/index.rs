//! Which regions may contain an address: an index in the shape of a page table.
//!
//! Three levels of 512 lead from an address to its 2 MiB block, a shortcut past the upper two; a
//! block's list names every region that touches the block, 4096 at most, sorted by where it begins. A look-up is
//! three loads if the guess is right (see [`Index::guess`]), takes no lock and is wait-free. Writers
//! hold the cache's lock.
//!
//! **Entries are hints.** A list that shrank, moved or went to another block while it was being
//! read yields wrong regions or misses some. So a reader proves every region at the region itself
//! (see [`crate::region`]), and takes nothing found for "ask again under the lock", where the
//! index is exact for those that may be found. That is all the synchronisation there is: no epoch, no counted reference, no
//! retry loop. What it costs is memory that is recycled but not freed: a list's memory keeps its
//! size class, and places of regions stay places, until the cache is dropped.
//!
//! A region costs its place of 64 bytes, and 8 bytes for each 2 MiB block that it touches, up to
//! twice that in slack, and up to four times that where others have gone.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to follow the addresses in its words: of lists, which the
//! index owns and frees only when it is dropped, and of regions, which live in its own arena.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::arena::Arena;
use crate::chunked::{OTHERS, in_block};
use crate::queue::Queue;
use crate::sync::{self, AtomicU64, Mutex, OnceLock, Ordering, lock};
use std::marker::PhantomData;

/// Children of a directory: 512, as in a page table; fewer in a model or an interpreter, where each costs
/// time. The index's own tests use high addresses.
const FANOUT: usize = if sync::EXPLORED {
    2
} else if cfg!(all(miri, not(test))) {
    64
} else {
    512
};
/// An entry's granule.
const PAGE_LOG2: u32 = 12;
/// The granule of lists: 2 MiB.
const BLOCK_LOG2: u32 = PAGE_LOG2 + 9;
const BLOCK_BYTES: usize = 1 << BLOCK_LOG2;
const BLOCK_PAGES: usize = BLOCK_BYTES >> PAGE_LOG2;
/// How many blocks there are: up to the address 2^48, the end of four-level page tables.
const BLOCKS: usize = FANOUT * FANOUT * FANOUT;
/// The first address that the index does not know.
const END: usize = BLOCK_BYTES * BLOCKS;
/// List sizes: 4, 8, 16, ... 4096 entries.
const CLASSES: usize = 11;
/// A list with one entry in so many slots moves to half the memory, half of which is free then: an
/// insertion and a removal in turns do not move it each time.
const SPARSE: usize = 4;
/// Lists up to this class have room in what may be made while the lock is held.
const MADE_LATE: usize = in_block::<Quad>().ilog2() as usize;
/// How many blocks a part of a range has at most, whatever is in them.
const BLOCKS_AT_ONCE: usize = 1024;
/// How many blocks a region is entered into, or taken out of, under one hold of the writer's lock.
const BLOCKS_ENTERED: usize = if sync::EXPLORED || cfg!(miri) { 1 } else { 32 };
/// To move so many entries of a list takes as long as to take a region out of a short one.
const WEIGHS_ONE: usize = 1024;
/// How many entries around its likely position are looked at first.
const NEIGHBOURS: usize = 8;
/// User addresses have 48 bits at most where the program does not ask for more.
const ADDRESS_BITS: u32 = 48;

/// One entry of a list: a region's extent within the block and where its place is.
///
/// Bits: first page 0-9; page behind the last 10-20, past 512 where the region goes on; the
/// place's address without its six low bits, which are zero, 21-62.
pub(crate) struct Entry<T> {
    word: u64,
    place: PhantomData<*const T>,
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Entry<T> {}

impl<T> Entry<T> {
    const BEYOND: usize = BLOCK_PAGES + 1;
    const ALIGN_LOG2: u32 = 6;

    /// `None` for a place at an address that does not fit.
    fn new(range: AddressRange, place: &T, block: usize) -> Option<Self> {
        const { assert!(align_of::<T>() >= 1 << Self::ALIGN_LOG2) };
        let address = std::ptr::from_ref(place).expose_provenance() as u64;
        if address >> ADDRESS_BITS != 0 {
            return None;
        }
        let (first, end) = pages_in(range, block);
        let extent = first as u64 | (end as u64) << 10;
        Some(Self::from_word(extent | address >> Self::ALIGN_LOG2 << 21))
    }

    const fn from_word(word: u64) -> Self {
        Self { word, place: PhantomData }
    }

    /// The entry in a slot. Relaxed: writers hold the lock; readers take hints, and reach a place through the entry's own
    /// address, so what was stored before the entry was is there.
    fn load(slot: &AtomicU64) -> Self {
        Self::from_word(slot.load(Ordering::Relaxed))
    }

    const fn first(self) -> usize {
        (self.word & 0x3ff) as usize
    }

    /// Where it stands among the entries of its list.
    const fn key(self) -> Key {
        Key(self.word.rotate_right(10))
    }

    const fn end(self) -> usize {
        (self.word >> 10 & 0x7ff) as usize
    }

    /// Whether the region may contain the pages from `first` to `end`.
    #[inline(always)]
    const fn covers(self, first: usize, end: usize) -> bool {
        (self.first() <= first) & (end <= self.end())
    }

    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    const fn address(self) -> usize {
        (self.word >> 21 << Self::ALIGN_LOG2) as usize
    }
}

/// An entry's first page, then its place: the order of a list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Key(u64);

/// The pages of `range` within `block`: the first, and the one behind the last, which is
/// [`Entry::BEYOND`] where the range goes on in the next block.
fn pages_in(range: AddressRange, block: usize) -> (usize, usize) {
    let base = block << BLOCK_LOG2;
    let first = range.start().saturating_sub(base) >> PAGE_LOG2;
    (first, end_page_in(range.end(), block))
}

const fn page_in_block(address: usize) -> usize {
    (address >> PAGE_LOG2) % BLOCK_PAGES
}

/// The page behind the one that holds the last byte before `end`.
#[inline(always)]
fn end_page_in(end: usize, block: usize) -> usize {
    let last = end.wrapping_sub(1);
    if last >> BLOCK_LOG2 == block { page_in_block(last) + 1 } else { Entry::<Aligned>::BEYOND }
}

/// What stands for a region where only the entry's constants matter.
#[repr(align(64))]
struct Aligned;

/// The memory of lists: four entries, aligned so that a list's word has room for its length.
#[repr(align(32))]
struct Quad {
    /// Reached by the list's address alone.
    _slots: [AtomicU64; 4],
}

impl Quad {
    fn new() -> Self {
        Self { _slots: sync::zeros() }
    }
}

/// A block's list, as one word: length in bits 0-15, class in 16-19, whether two of its regions share a page in 20, the
/// address of its memory without the five low bits, which are zero, 21-63. Zero is empty.
#[derive(Clone, Copy, PartialEq, Eq)]
struct List(u64);

impl List {
    const EMPTY: Self = Self(0);
    /// The lock is held while a list is gone through, or moved to a larger place: no block has more regions.
    const MAX_LEN: usize = 4 << (CLASSES - 1);
    const SHARED: u64 = 1 << 20;

    fn new(class: usize, length: usize, address: usize) -> Self {
        Self(length as u64 | (class as u64) << 16 | (address as u64) >> 5 << 21)
    }

    const fn with_len(self, length: usize) -> Self {
        Self(self.0 & !0xffff | length as u64)
    }

    /// The same, whose regions share no page with each other, or may.
    const fn with_apart(self, is_apart: bool) -> Self {
        Self(self.0 & !Self::SHARED | if is_apart { 0 } else { Self::SHARED })
    }

    /// How many of those that begin before a page, or at it, need no look for one that holds it.
    const fn passed_over(self, begun: usize) -> usize {
        if self.is_apart() { begun.saturating_sub(1) } else { 0 }
    }

    /// Whether no two of its regions share a page: then only the one that begins last before a page can hold it.
    const fn is_apart(self) -> bool {
        self.0 & Self::SHARED == 0
    }

    const fn class(self) -> usize {
        (self.0 >> 16 & 0xf) as usize
    }

    const fn len(self) -> usize {
        (self.0 & 0xffff) as usize
    }

    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    const fn address(self) -> usize {
        (self.0 >> 21 << 5) as usize
    }

    const fn capacity(self) -> usize {
        if self.0 == 0 { 0 } else { 4 << self.class() }
    }
}

/// A directory of children, made when first needed.
type Directory<T> = Box<[OnceLock<T>; FANOUT]>;

/// The lowest level: the lists of 512 blocks, one GiB of addresses.
///
/// A page of its own, which frees the low bits of its address for the [`Shortcut`].
#[repr(align(4096))]
struct Leaf([AtomicU64; FANOUT]);

impl Leaf {
    fn new() -> Box<Self> {
        Box::new(Self(sync::zeros()))
    }

    /// The word of `block`'s list.
    #[inline(always)]
    fn list_of(&self, block: usize) -> &AtomicU64 {
        &self.0[block % FANOUT]
    }
}

/// A leaf and which it is, as one word: the leaf's address without the twelve low bits, which are
/// zero, in bits 0-35; above, the number of the leaf plus one. Zero is none.
///
/// Leaves that are 512 GiB apart share a shortcut; the one made first keeps it.
#[derive(Clone, Copy)]
struct Shortcut(u64);

impl Shortcut {
    const LEAF_BITS: u32 = ADDRESS_BITS - 12;

    /// `None` for a leaf at an address that does not fit.
    fn new(number: usize, leaf: &Leaf) -> Option<Self> {
        let address = std::ptr::from_ref(leaf).expose_provenance() as u64;
        let fits = address >> ADDRESS_BITS == 0;
        fits.then_some(Self((number as u64 + 1) << Self::LEAF_BITS | address >> 12))
    }

    /// Whether this leads to leaf `number`.
    #[inline(always)]
    const fn leads_to(self, number: usize) -> bool {
        self.0 >> Self::LEAF_BITS == number as u64 + 1
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    const fn address(self) -> usize {
        (self.0 << (64 - Self::LEAF_BITS) >> (64 - ADDRESS_BITS)) as usize
    }
}

fn new_directory<T>() -> Directory<T> {
    Box::new(sync::unmade())
}

/// The places of all regions, and how to find them by address.
pub(crate) struct Index<T> {
    /// The places. Entries point into it.
    pub(crate) places: Arena<T>,
    /// The next that is taken for the first time: a hint.
    next_place: AtomicU64,
    root: Directory<Directory<Box<Leaf>>>,
    /// The way past the two upper levels, by the leaf's number.
    shortcuts: Box<[AtomicU64; FANOUT]>,
    /// Rank 2: taken inside the cache's writer lock.
    memory: Mutex<ListMemory>,
}

#[derive(Default)]
struct ListMemory {
    /// The memory of all lists, in use or not.
    all: Queue<Box<[Quad]>>,
    /// Room for longest lists, which the holder of the writer's lock takes and cuts.
    prepared: Queue<usize>,
}

/// The part that only the holder of the writer's lock uses: lists to be used again.
pub(crate) struct Recycler {
    /// Oldest first, so that a late reader of a list rarely meets its next content.
    free: [Queue<usize>; CLASSES],
}

impl Recycler {
    pub(crate) fn new() -> Self {
        Self { free: std::array::from_fn(|_| Queue::new()) }
    }

    /// Room for a list of this class, if there is any. That of a longer one is cut, unless a short one can be made.
    fn take(&mut self, class: usize) -> Option<usize> {
        let longest = if class > MADE_LATE { CLASSES } else { class + 1 };
        let mut cut = (class..longest).find(|&it| !self.free[it].is_empty())?;
        let address = self.free[cut].pop()?;
        while cut > class {
            cut -= 1;
            self.free[cut].push(address + (size_of::<Quad>() << cut));
        }
        Some(address)
    }

    fn recycle(&mut self, list: List) {
        if list != List::EMPTY {
            self.free[list.class()].push(list.address());
        }
    }
}

/// What is left to visit of a range. However many regions begin in one page, a part of them is named at a time.
///
/// **Why none is missed.** Those of a block are named in the order of their keys, which stay as long as they are in
/// the index. One that is entered behind that is registered after the visit began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rest {
    pub(crate) range: AddressRange,
    /// Of the block in which that begins, the regions up to this one were named.
    named: Key,
}

impl From<AddressRange> for Rest {
    fn from(range: AddressRange) -> Self {
        Self { range, named: Key::default() }
    }
}

/// What was visited of a range.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// What was not.
    pub(crate) rest: Option<Rest>,
    /// In how many blocks regions were looked for.
    pub(crate) blocks: usize,
    /// How many regions were named; each counts for as many as it [weighs](Self::weight).
    pub(crate) named: usize,
    /// To take one of these regions out takes as long as so many take out of short lists.
    pub(crate) weight: usize,
}

impl Part {
    const NOTHING: Self = Self { rest: None, blocks: 0, named: 0, weight: 1 };
}

/// Whether the index can hold `range` at all.
pub(crate) fn can_hold(range: AddressRange) -> bool {
    range.end() <= END
}

/// A region that is entered into its blocks, or taken out of them, part by part. In between it may be named or
/// not in those that are left: so it is none that may be found.
pub(crate) struct BlockWalk {
    range: AddressRange,
    number: u32,
    /// The blocks that are left.
    blocks: std::ops::Range<usize>,
}

impl BlockWalk {
    /// `None` if all of the blocks of `range` are entered at once.
    #[inline]
    pub(crate) fn of_long(range: AddressRange, number: u32) -> Option<Self> {
        let blocks = if can_hold(range) { blocks_of(range) } else { 0..0 };
        (blocks.len() > BLOCKS_ENTERED).then_some(Self { range, number, blocks })
    }

    pub(crate) const fn is_over(&self) -> bool {
        self.blocks.start >= self.blocks.end
    }

    /// The next blocks, which are left no more.
    fn next_blocks(&mut self) -> std::ops::Range<usize> {
        let first = self.blocks.start;
        self.blocks.start = self.blocks.end.min(first.saturating_add(BLOCKS_ENTERED));
        first..self.blocks.start
    }
}

impl<T> Index<T> {
    pub(crate) fn new() -> Self {
        let places = Arena::new(if sync::EXPLORED {
            1
        } else if cfg!(miri) {
            3
        } else {
            6
        });
        Self {
            places,
            next_place: AtomicU64::new(0),
            root: new_directory(),
            shortcuts: Box::new(sync::zeros()),
            memory: Mutex::new(ListMemory::default()),
        }
    }

    /// The word of `block`'s list, by the shortcut.
    #[inline(always)]
    fn nearby_list_of(&self, block: usize) -> Option<&AtomicU64> {
        let number = block / FANOUT;
        // Acquire: pairs with the store in `make_list_of`; the leaf was made before.
        let shortcut = Shortcut(self.shortcuts[number % FANOUT].load(Ordering::Acquire));
        if !shortcut.leads_to(number) {
            return None;
        }
        // SAFETY: a shortcut that leads anywhere was made from a leaf of `root`, which neither
        // moves nor frees it before the index is dropped.
        let leaf: &Leaf = unsafe { &*std::ptr::with_exposed_provenance(shortcut.address()) };
        Some(leaf.list_of(block))
    }

    /// The word of `block`'s list.
    #[inline]
    fn list_of(&self, block: usize) -> Option<&AtomicU64> {
        self.nearby_list_of(block).or_else(|| self.distant_list_of(block))
    }

    /// The same by all levels.
    fn distant_list_of(&self, block: usize) -> Option<&AtomicU64> {
        if block >= BLOCKS {
            return None;
        }
        let middle = self.root[block / (FANOUT * FANOUT)].get()?;
        let leaf = middle[block / FANOUT % FANOUT].get()?;
        Some(leaf.list_of(block))
    }

    fn make_list_of(&self, block: usize) -> Option<&AtomicU64> {
        if let Some(made) = self.nearby_list_of(block) {
            return Some(made);
        }
        let leaf = self.make_leaf_of(block)?;
        self.keep_nearby(block / FANOUT, leaf);
        Some(leaf.list_of(block))
    }

    fn make_leaf_of(&self, block: usize) -> Option<&Leaf> {
        if block >= BLOCKS {
            return None;
        }
        let middle = self.root[block / (FANOUT * FANOUT)].get_or_init(new_directory);
        Some(middle[block / FANOUT % FANOUT].get_or_init(Leaf::new))
    }

    /// Place `number`, which was never taken: the next. `None` when there can be no more.
    pub(crate) fn make_place(&self, number: u32, make: impl FnMut(u32) -> T) -> Option<&T> {
        // Relaxed: a hint.
        self.next_place.store(u64::from(number) + 1, Ordering::Relaxed);
        self.places.ensure(number, make)
    }

    /// Makes the places that are taken next, because many are made at once, which is too much while the writer's lock is
    /// held. Not in a forked child.
    pub(crate) fn prepare_places(&self, make: impl FnMut(u32) -> T) {
        if let (false, Ok(ahead)) = (sync::EXPLORED, u32::try_from(self.next_place() + OTHERS)) {
            self.places.ensure(ahead, make);
        }
    }

    /// The place that is taken next, unless one is free: a hint.
    #[allow(clippy::cast_possible_truncation)] // words have 64 bits
    pub(crate) fn next_place(&self) -> usize {
        // Relaxed: a hint.
        self.next_place.load(Ordering::Relaxed) as usize
    }

    /// Makes what it takes to enter a region of `range`, as far as it is [too large](crate::chunked::BLOCK_BYTES) to be made
    /// while the writer's lock is held. Not in a forked child.
    ///
    /// It is not reserved: where others take it first, more is made under the lock.
    pub(crate) fn prepare(&self, range: AddressRange) {
        self.prepare_blocks(blocks_of(range));
    }

    /// The same for the next blocks of `walk`.
    pub(crate) fn prepare_next(&self, walk: &BlockWalk) {
        self.prepare_blocks(walk.blocks.clone());
    }

    fn prepare_blocks(&self, blocks: std::ops::Range<usize>) {
        let slots = |block| {
            let nearby = self.nearby_list_of(block);
            let word = nearby.or_else(|| Some(self.make_leaf_of(block)?.list_of(block)))?;
            // Relaxed: a hint.
            let list = List(word.load(Ordering::Relaxed));
            // To enter a region among others moves them, too.
            let room = (list.len() + OTHERS).next_power_of_two();
            (room > 4 << MADE_LATE).then_some(room)
        };
        let slots: usize = blocks.take(BLOCKS_ENTERED).filter_map(slots).sum();
        for missing in 0..slots.div_ceil(List::MAX_LEN) {
            if lock(&self.memory).prepared.len() > missing {
                continue;
            }
            let quads = quads(CLASSES - 1);
            let mut memory = lock(&self.memory);
            let address = memory.keep(quads);
            address.into_iter().for_each(|address| _ = memory.prepared.push(address));
        }
    }

    /// Gives leaf `number` the shortcut, unless another has it.
    fn keep_nearby(&self, number: usize, leaf: &Leaf) {
        let shortcut = &self.shortcuts[number % FANOUT];
        // Relaxed: only holders of the writer's lock store here.
        if shortcut.load(Ordering::Relaxed) == 0
            && let Some(made) = Shortcut::new(number, leaf)
        {
            // Release: a thread that loads it finds the leaf made.
            shortcut.store(made.0, Ordering::Release);
        }
    }

    #[inline]
    fn entries(&self, list: List) -> &[AtomicU64] {
        if list == List::EMPTY {
            return &[];
        }
        // SAFETY: a word that is not empty holds the address of a list's memory, made by
        // `allocate` with room for its length; `memory` keeps it until the index is dropped.
        unsafe {
            let first = std::ptr::with_exposed_provenance::<AtomicU64>(list.address());
            std::slice::from_raw_parts(first, list.len())
        }
    }

    /// The place that an entry of this index names.
    #[inline(always)]
    pub(crate) fn place(&self, entry: Entry<T>) -> &T {
        // SAFETY: every entry ever stored was made by `insert` from a reference into `places`,
        // which never moves or frees an item; a reader sees slots below a published length
        // only, and those have been stored.
        unsafe { &*std::ptr::with_exposed_provenance(entry.address()) }
    }

    /// The entry that most likely contains the address `start`: where it would be if the block's
    /// regions were of one size and lay side by side.
    #[inline(always)]
    pub(crate) fn guess(&self, start: usize) -> Option<Entry<T>> {
        // Acquire: pairs with `publish`; the entries were written before.
        let list = self.nearby_list_of(start >> BLOCK_LOG2)?.load(Ordering::Acquire);
        let entries = self.entries(List(list));
        let page = page_in_block(start);
        let entry = Entry::load(entries.get(likely_position(entries, page))?);
        entry.covers(page, page + 1).then_some(entry)
    }

    /// The entry that begins last before or at `start`, if it contains that address: for when the
    /// guess was wrong.
    #[inline(never)]
    pub(crate) fn latest(&self, start: usize) -> Option<Entry<T>> {
        // Acquire: as in `guess`.
        let entries =
            self.entries(List(self.list_of(start >> BLOCK_LOG2)?.load(Ordering::Acquire)));
        let page = page_in_block(start);
        let entry = Entry::load(entries.get(behind(entries, page).checked_sub(1)?)?);
        entry.covers(page, page + 1).then_some(entry)
    }

    /// Offers `accept` the regions that may contain the bytes from `start` to `end`, the one that
    /// begins last first, until it takes one.
    pub(crate) fn find<'i, A>(
        &'i self,
        start: usize,
        end: usize,
        mut accept: impl FnMut(&'i T) -> Option<A>,
    ) -> Option<A> {
        let block = start >> BLOCK_LOG2;
        // Acquire: as in `guess`.
        let list = List(self.list_of(block)?.load(Ordering::Acquire));
        let entries = self.entries(list);
        let (first, end) = (page_in_block(start), end_page_in(end, block));
        let (candidates, _) = entries.split_at(behind(entries, first));
        let candidates = &candidates[list.passed_over(candidates.len())..];
        let mut covering =
            candidates.iter().rev().map(Entry::load).filter(|entry| entry.covers(first, end));
        covering.find_map(|entry| accept(self.place(entry)))
    }

    /// Adds the region in place `number`. False if the index has no room for it; then nothing
    /// was added.
    pub(crate) fn insert(&self, recycler: &mut Recycler, range: AddressRange, number: u32) -> bool {
        let added = self.insert_in(recycler, blocks_of(range), range, number);
        if !added {
            self.remove(recycler, range, number);
        }
        added
    }

    /// Adds a region to the next blocks of `walk`. False if the index has no room for it; then some
    /// blocks may name it.
    pub(crate) fn insert_next(&self, recycler: &mut Recycler, walk: &mut BlockWalk) -> bool {
        self.insert_in(recycler, walk.next_blocks(), walk.range, walk.number)
    }

    fn insert_in(
        &self,
        recycler: &mut Recycler,
        mut blocks: std::ops::Range<usize>,
        range: AddressRange,
        number: u32,
    ) -> bool {
        let Some(place) = self.places.get(number) else { return false };
        blocks.all(|block| {
            let entry = Entry::new(range, place, block);
            entry.and_then(|entry| self.insert_entry(recycler, block, entry)).is_some()
        })
    }

    fn insert_entry(&self, recycler: &mut Recycler, block: usize, entry: Entry<T>) -> Option<()> {
        let word = self.make_list_of(block)?;
        // Relaxed: only holders of the writer's lock store here.
        let list = List(word.load(Ordering::Relaxed));
        let old = self.entries(list);
        let position = up_to::<T>(old, entry.key());
        let is_apart = list.is_apart() && is_apart_at(old, position, entry);
        if list.len() < list.capacity().min(List::MAX_LEN) {
            let longer = list.with_len(list.len() + 1).with_apart(is_apart);
            // In place: a reader in between sees an entry twice or misses the last, both of which it is prepared for.
            let moved = &self.entries(longer)[position..];
            for pair in moved.windows(2).rev() {
                store(&pair[1], Entry::<T>::load(&pair[0]));
            }
            store(&moved[0], entry);
            publish(word, longer);
            return Some(());
        }
        let new = self.allocate(recycler, list.len() + 1)?.with_apart(is_apart);
        let (before, after) = old.split_at(position);
        let moved = before.iter().map(Entry::load).chain([entry]);
        let moved = moved.chain(after.iter().map(Entry::load));
        self.entries(new).iter().zip(moved).for_each(|(slot, entry)| store(slot, entry));
        publish(word, new);
        recycler.recycle(list);
        Some(())
    }

    /// Removes the region in place `number`, whose range is `range`.
    pub(crate) fn remove(&self, recycler: &mut Recycler, range: AddressRange, number: u32) {
        _ = self.remove_from(recycler, blocks_of(range), range, number);
    }

    /// Removes a region from the next blocks of `walk`, as far as one after the other names it. False if one did
    /// not.
    pub(crate) fn remove_next(&self, recycler: &mut Recycler, walk: &mut BlockWalk) -> bool {
        self.remove_from(recycler, walk.next_blocks(), walk.range, walk.number)
    }

    /// It is entered from its first block on, so where one does not name it, none behind it does.
    fn remove_from(
        &self,
        recycler: &mut Recycler,
        mut blocks: std::ops::Range<usize>,
        range: AddressRange,
        number: u32,
    ) -> bool {
        let Some(place) = self.places.get(number) else { return false };
        blocks.all(|block| {
            let entry = Entry::new(range, place, block);
            entry.is_some_and(|entry| self.remove_entry(recycler, block, entry))
        })
    }

    /// False if it was not there.
    fn remove_entry(&self, recycler: &mut Recycler, block: usize, entry: Entry<T>) -> bool {
        let Some(word) = self.list_of(block) else { return false };
        // Relaxed: only holders of the writer's lock store here.
        let list = List(word.load(Ordering::Relaxed));
        let old = self.entries(list);
        let behind = up_to::<T>(old, entry.key());
        let Some(position) = behind.checked_sub(1) else { return false };
        if Entry::<T>::load(&old[position]).key() != entry.key() {
            return false;
        }
        if list.len() == 1 {
            publish(word, List::EMPTY);
            recycler.recycle(list);
            return true;
        }
        if list.len() - 1 <= list.capacity() / SPARSE && self.move_down(recycler, word, position) {
            return true;
        }
        // In place: a reader in between sees an entry twice or misses one, both of which it
        // is prepared for.
        for pair in old[position..].windows(2) {
            store(&pair[0], Entry::<T>::load(&pair[1]));
        }
        let left = list.with_len(list.len() - 1);
        publish(word, left.with_apart(left.is_apart() || are_apart::<T>(self.entries(left))));
        true
    }

    /// Moves a sparse list, less the entry at `position`, to half the memory, and leaves its own to
    /// others. False if there is none for it.
    fn move_down(&self, recycler: &mut Recycler, word: &AtomicU64, position: usize) -> bool {
        // Relaxed: only holders of the writer's lock store here.
        let list = List(word.load(Ordering::Relaxed));
        if list.class() == 0 {
            return false;
        }
        let class = list.class() - 1;
        let address = match recycler.take(class) {
            None if class <= MADE_LATE => self.make_list(class),
            taken => taken,
        };
        let Some(address) = address else { return false };
        let roomy = List::new(class, list.capacity() / 2, address);
        let new = roomy.with_len(list.len() - 1);
        let (before, behind) = self.entries(list).split_at(position);
        let kept = before.iter().chain(&behind[1..]).map(Entry::<T>::load);
        self.entries(new).iter().zip(kept).for_each(|(slot, entry)| store(slot, entry));
        publish(word, new.with_apart(list.is_apart() || are_apart::<T>(self.entries(new))));
        recycler.recycle(list);
        true
    }

    /// Calls `visit` with every region that shares a page with a part of `rest`, from its start on, about `most`
    /// of them; a region in several blocks is named in each. What that was, and what is left.
    pub(crate) fn overlapping_part<'i>(
        &'i self,
        Rest { range, named }: Rest,
        most: usize,
        mut visit: impl FnMut(&'i T),
    ) -> Part {
        let mut part = Part::NOTHING;
        let end = range.end();
        let rest =
            |from, named| AddressRange::between(from, end).map(|range| Rest { range, named });
        let within = AddressRange::between(range.start(), end.min(END));
        let Some(range) = within else { return part };
        let (mut block, mut named) = (range.start() >> BLOCK_LOG2, named);
        while block <= (range.end() - 1) >> BLOCK_LOG2 {
            if part.named >= most || part.blocks >= BLOCKS_AT_ONCE.max(most) {
                part.rest = rest((block << BLOCK_LOG2).max(range.start()), named);
                return part;
            }
            part.blocks += 1;
            let left = match self.list_of(block) {
                Some(word) => {
                    self.visit_block(word, range, (block, named), most, &mut part, &mut visit)
                }
                None => {
                    block = self.next_present(block);
                    named = Key::default();
                    continue;
                }
            };
            if let Some((page, named)) = left {
                let from = (block << BLOCK_LOG2) + (page << PAGE_LOG2);
                part.rest = rest(from.max(range.start()), named);
                return part;
            }
            (block, named) = (block + 1, Key::default());
        }
        part
    }

    /// The first block behind an absent directory or leaf.
    fn next_present(&self, block: usize) -> usize {
        let step = match self.root[block / (FANOUT * FANOUT)].get() {
            Some(_) => FANOUT,
            None => FANOUT * FANOUT,
        };
        (block / step + 1) * step
    }

    /// Names a block's regions behind the one that was named last. The page from where on some are left, and
    /// which was the last, if `most` were named before the end.
    fn visit_block<'i>(
        &'i self,
        word: &AtomicU64,
        range: AddressRange,
        (block, mut named): (usize, Key),
        most: usize,
        part: &mut Part,
        visit: &mut impl FnMut(&'i T),
    ) -> Option<(usize, Key)> {
        let (first, end) = pages_in(range, block);
        // Relaxed: the writer's lock is held.
        let list = List(word.load(Ordering::Relaxed));
        let entries = self.entries(list);
        let weight = 1 + entries.len() / WEIGHS_ONE;
        part.weight = part.weight.max(weight);
        // A short list is gone through as fast as a place in it is found.
        let is_short = entries.len() <= NEIGHBOURS;
        let begun = if is_short { 0 } else { behind(entries, first) };
        let from = list.passed_over(begun).max(up_to::<T>(entries, named));
        for entry in entries[from..].iter().map(Entry::<T>::load) {
            if entry.first() >= end {
                break;
            }
            if part.named >= most {
                return Some((entry.first().max(first), named));
            }
            named = entry.key();
            if first < entry.end() {
                part.named += weight;
                visit(self.place(entry));
            }
        }
        None
    }

    /// A list with room for `length` entries. All its slots hold entries, or zeros that its
    /// length must not reach before they are stored.
    fn allocate(&self, recycler: &mut Recycler, length: usize) -> Option<List> {
        if length > List::MAX_LEN {
            return None;
        }
        let class = length.div_ceil(4).next_power_of_two().trailing_zeros() as usize;
        let mut taken = recycler.take(class);
        if taken.is_none() && class > MADE_LATE {
            let prepared = lock(&self.memory).prepared.pop();
            prepared.into_iter().for_each(|address| _ = recycler.free[CLASSES - 1].push(address));
            taken = recycler.take(class);
        }
        Some(List::new(class, length, taken.or_else(|| self.make_list(class))?))
    }

    fn make_list(&self, class: usize) -> Option<usize> {
        let quads = quads(class);
        lock(&self.memory).keep(quads)
    }
}

impl ListMemory {
    /// Where it stands.
    fn keep(&mut self, quads: Box<[Quad]>) -> Option<usize> {
        // Taken where it stays: a box that moves takes its provenance along.
        let address = self.all.push(quads).as_ptr().expose_provenance();
        (address >> ADDRESS_BITS == 0).then_some(address)
    }
}

fn quads(class: usize) -> Box<[Quad]> {
    std::iter::repeat_with(Quad::new).take(1 << class).collect()
}

/// How many of the sorted `entries` stand at `key` or before.
fn up_to<T>(entries: &[AtomicU64], key: Key) -> usize {
    if key == Key::default() {
        return 0;
    }
    entries.partition_point(|slot| Entry::<T>::load(slot).key() <= key)
}

/// Whether `entry`, put at `position`, shares no page with its neighbours.
fn is_apart_at<T>(entries: &[AtomicU64], position: usize, entry: Entry<T>) -> bool {
    let (before, behind) = entries.split_at(position);
    let ends_before = |slot: &AtomicU64| Entry::<T>::load(slot).end() <= entry.first();
    let begins_behind = |slot: &AtomicU64| entry.end() <= Entry::<T>::load(slot).first();
    before.last().is_none_or(ends_before) && behind.first().is_none_or(begins_behind)
}

/// Whether no two of the sorted `entries` share a page.
fn are_apart<T>(entries: &[AtomicU64]) -> bool {
    let in_turn =
        |pair: &[AtomicU64]| Entry::<T>::load(&pair[0]).end() <= Entry::<T>::load(&pair[1]).first();
    entries.windows(2).all(in_turn)
}

/// Where the entry of `page` is if the block's regions are of one size and lie side by side.
#[inline(always)]
const fn likely_position(entries: &[AtomicU64], page: usize) -> usize {
    page * entries.len() / BLOCK_PAGES
}

/// How many of the sorted `entries` begin at `page` or before.
///
/// The likely position is rarely far off, and a look at eight neighbours at once is faster than
/// the steps of a binary search, each of which waits for the one before.
fn behind(entries: &[AtomicU64], page: usize) -> usize {
    let in_time = |slot: &AtomicU64| Entry::<Aligned>::load(slot).first() <= page;
    let last = entries.len().saturating_sub(NEIGHBOURS);
    let from = likely_position(entries, page).saturating_sub(NEIGHBOURS / 2).min(last);
    // An array, for the compiler to unroll.
    let Some(near) = entries[from..].first_chunk::<NEIGHBOURS>() else {
        return entries.iter().filter(|slot| in_time(slot)).count();
    };
    let count = near.iter().filter(|slot| in_time(slot)).count();
    let inside = (count > 0 || from == 0) && (count < NEIGHBOURS || from == last);
    if inside { from + count } else { entries.partition_point(in_time) }
}

fn store<T>(slot: &AtomicU64, entry: Entry<T>) {
    // Release: a reader of a list that was published before may find it, and looks at the place that it names. (Of a new
    // list `publish` releases all.)
    slot.store(entry.word, Ordering::Release);
}

fn publish(word: &AtomicU64, list: List) {
    // Release: a thread that loads the word sees the entries stored before.
    word.store(list.0, Ordering::Release);
}

const fn blocks_of(range: AddressRange) -> std::ops::Range<usize> {
    range.start() >> BLOCK_LOG2..((range.end() - 1) >> BLOCK_LOG2) + 1
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[repr(align(64))]
    struct Place(u32);

    fn insert(index: &Index<Place>, recycler: &mut Recycler, range: AddressRange, number: u32) {
        index.places.ensure(number, Place).unwrap();
        assert!(index.insert(recycler, range, number));
    }

    fn range(start: usize, end: usize) -> AddressRange {
        AddressRange::between(start, end).unwrap()
    }

    fn found(index: &Index<Place>, start: usize, end: usize) -> Vec<u32> {
        let mut numbers = Vec::new();
        index.find(start, end, |place| -> Option<()> {
            numbers.push(place.0);
            None
        });
        numbers
    }

    fn touched(index: &Index<Place>, start: usize, end: usize) -> Vec<u32> {
        let mut numbers = Vec::new();
        index.overlapping_part(range(start, end).into(), usize::MAX, |place| numbers.push(place.0));
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    #[test]
    fn containing_regions_are_offered_latest_start_first() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x7000_0000_0000;
        for (number, (start, end)) in [(0, 9), (2, 6), (4, 20)].into_iter().enumerate() {
            let number = u32::try_from(number).unwrap();
            let region = range(base + start * 4096, base + end * 4096);
            insert(&index, &mut recycler, region, number);
        }
        assert_eq!(found(&index, base + 4 * 4096, base + 5 * 4096), [2, 1, 0]);
        assert_eq!(found(&index, base + 3 * 4096, base + 8 * 4096), [0]);
        assert_eq!(found(&index, base + 3 * 4096, base + 10 * 4096), []);
        assert_eq!(touched(&index, base + 6 * 4096, base + 6 * 4096 + 1), [0, 2]);
    }

    #[test]
    fn a_region_across_blocks_is_found_from_each() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x1234 * BLOCK_BYTES;
        let region = range(base - 4096, base + 2 * BLOCK_BYTES + 4096);
        insert(&index, &mut recycler, region, 5);
        for start in [base - 4096, base, base + BLOCK_BYTES, base + 2 * BLOCK_BYTES] {
            assert_eq!(found(&index, start, start + 64), [5]);
        }
        assert_eq!(found(&index, base - 4096, base + 2 * BLOCK_BYTES + 4096), [5]);
        index.remove(&mut recycler, region, 5);
        assert_eq!(touched(&index, 1, END), []);
    }

    fn guessed(index: &Index<Place>, start: usize) -> Option<u32> {
        index.guess(start).map(|entry| index.place(entry).0)
    }

    #[test]
    fn the_guess_is_right_for_regions_of_one_size_side_by_side() {
        let base = 0x7000_0000_0000;
        for pages in [1_usize, 16, 512].into_iter().skip(usize::from(cfg!(miri))) {
            let (index, mut recycler) = (Index::new(), Recycler::new());
            let bytes = pages << PAGE_LOG2;
            let starts: Vec<usize> = (base..base + BLOCK_BYTES).step_by(bytes).collect();
            for (number, &start) in (0_u32..).zip(&starts) {
                insert(&index, &mut recycler, range(start, start + bytes), number);
            }
            for (number, start) in (0_u32..).zip(starts) {
                assert_eq!(guessed(&index, start), Some(number));
                assert_eq!(guessed(&index, start + bytes - 1), Some(number));
            }
        }
    }

    #[test]
    fn the_near_look_counts_as_a_plain_search_does() {
        // Even, bunched at either end, bunched in the middle, all alike.
        let even: fn(usize) -> usize = |at| at * 8;
        for begins in [even, |at| at / 2, |at| 448 + at, |at| at * at / 8, |_| 77] {
            for length in 0..if cfg!(miri) { 12 } else { 64 } {
                let slots: Vec<AtomicU64> =
                    (0..length).map(|at| AtomicU64::new(begins(at) as u64)).collect();
                for page in (0..BLOCK_PAGES).step_by(if cfg!(miri) { 37 } else { 1 }) {
                    let expected = (0..length).filter(|&at| begins(at) <= page).count();
                    assert_eq!(behind(&slots, page), expected);
                }
            }
        }
    }

    #[test]
    fn a_guess_holds_the_address_or_is_none() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x7000_0000_0000;
        // Sizes of 1, 2, 4 ... 64 pages, with a page between them.
        let mut start = base;
        let regions: Vec<AddressRange> = (0..7)
            .map(|size| {
                let region = range(start, start + (1 << (PAGE_LOG2 + size)));
                start = region.end() + (1 << PAGE_LOG2);
                region
            })
            .collect();
        for (number, &region) in (0_u32..).zip(&regions) {
            insert(&index, &mut recycler, region, number);
        }
        for page in 0..(start - base) >> PAGE_LOG2 {
            let address = base + (page << PAGE_LOG2);
            if let Some(number) = guessed(&index, address) {
                let region = regions[number as usize];
                assert!(region.start() <= address && address < region.end());
            }
        }
        assert_eq!(guessed(&index, base + BLOCK_BYTES), None);
    }

    #[test]
    fn leaves_that_share_a_shortcut_are_both_found() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x1000;
        let far = base + FANOUT * FANOUT * BLOCK_BYTES;
        for (number, start) in (0_u32..).zip([base, far]) {
            insert(&index, &mut recycler, range(start, start + 0x1000), number);
        }
        assert_eq!((guessed(&index, base), guessed(&index, far)), (Some(0), None));
        assert_eq!(found(&index, base, base + 1), [0]);
        assert_eq!(found(&index, far, far + 1), [1]);
    }

    #[test]
    fn the_whole_address_space_is_searched_quickly() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        for (number, start) in (0_u32..).zip([0x1000, END - 0x1000]) {
            insert(&index, &mut recycler, range(start, start + 0x1000), number);
        }
        assert_eq!(touched(&index, 1, usize::MAX), [0, 1]);
        assert!(!can_hold(range(END, END + 1)));
        assert_eq!(found(&index, END, END + 1), []);
    }

    /// Memory follows the most regions there were at once, not the fullest that each block ever was.
    #[test]
    fn a_list_that_emptied_leaves_its_memory_to_others() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let (blocks, pages) = if cfg!(miri) { (4, 40) } else { (100, BLOCK_PAGES) };
        for block in 0..blocks {
            let page = |at: usize| {
                let start = 0x7000_0000_0000 + block * BLOCK_BYTES + (at << PAGE_LOG2);
                range(start, start + (1 << PAGE_LOG2))
            };
            // One of them stays.
            let first = u32::try_from(block).unwrap();
            let number =
                |at: usize| if at == 0 { first } else { 1000 + u32::try_from(at).unwrap() };
            (0..pages).for_each(|at| insert(&index, &mut recycler, page(at), number(at)));
            (1..pages).for_each(|at| index.remove(&mut recycler, page(at), number(at)));
            assert_eq!(touched(&index, page(0).start(), page(0).start() + BLOCK_BYTES), [first]);
        }
        let quads: usize = lock(&index.memory).all.iter().map(|quads| quads.len()).sum();
        assert!(4 * quads <= 8 * (blocks + pages), "{quads} for {blocks} + {pages} regions");
    }

    /// A part at a time, and in any order with what is entered at once.
    #[test]
    fn a_long_region_is_entered_and_taken_out_in_parts() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let (base, blocks) = (0x5555_0020_0000, 3 * BLOCKS_ENTERED + 1);
        let long = range(base, base + blocks * BLOCK_BYTES - 4096);
        let page = range(base + BLOCK_BYTES, base + BLOCK_BYTES + 4096);
        assert!(BlockWalk::of_long(page, 1).is_none());
        insert(&index, &mut recycler, page, 1);
        index.places.ensure(2, Place).unwrap();
        let mut walk = BlockWalk::of_long(long, 2).unwrap();
        for parts in 1.. {
            assert!(index.insert_next(&mut recycler, &mut walk));
            let entered = (parts * BLOCKS_ENTERED).min(blocks);
            // Beside the page.
            let last = base + (entered - 1) * BLOCK_BYTES + 8192;
            assert_eq!(found(&index, last, last + 1), [2]);
            assert_eq!(found(&index, last + BLOCK_BYTES, last + BLOCK_BYTES + 1), []);
            assert_eq!(walk.is_over(), entered == blocks);
            if walk.is_over() {
                break;
            }
        }
        assert_eq!(touched(&index, page.start(), page.end()), [1, 2]);
        let mut walk = BlockWalk::of_long(long, 2).unwrap();
        assert!(index.remove_next(&mut recycler, &mut walk));
        assert!(!walk.is_over());
        assert_eq!(found(&index, base, base + 1), []);
        while !walk.is_over() {
            assert!(index.remove_next(&mut recycler, &mut walk));
        }
        assert_eq!(touched(&index, base, long.end()), [1]);
        let mut walk = BlockWalk::of_long(long, 2).unwrap();
        assert!(!index.remove_next(&mut recycler, &mut walk), "it was never entered");
    }

    /// What a walk names that takes a few at a time; what it names last of all, `change` may enter or take out.
    fn walked(
        index: &Index<Place>,
        range: AddressRange,
        most: usize,
        mut change: impl FnMut(usize),
    ) -> Vec<u32> {
        let (mut rest, mut numbers) = (Some(Rest::from(range)), Vec::new());
        for parts in 0.. {
            let Some(left) = rest else { break };
            let before = numbers.len();
            rest = index.overlapping_part(left, most, |place| numbers.push(place.0)).rest;
            assert!(numbers.len() - before <= most, "in one part");
            change(parts);
        }
        numbers
    }

    /// One page of them, and others before and behind it: none is missed and none named twice, also where some that were
    /// named are taken out, and others entered, meanwhile.
    #[test]
    fn regions_that_begin_in_one_page_are_named_a_few_at_a_time() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let (base, count) = (0x5555_0020_0000, if cfg!(miri) { 30 } else { 1000 });
        let byte = |number: u32| range(base + 4096 + number as usize, base + 8192);
        (0..count).for_each(|number| insert(&index, &mut recycler, byte(number), number));
        insert(&index, &mut recycler, range(base, base + 4096 * 9), count);
        insert(&index, &mut recycler, range(base + 4096 * 7, base + 4096 * 8), count + 1);
        let asked = range(base + 4096 + 5, base + 4096 * 8);
        for most in [1, 3, 7, 64] {
            let mut named = walked(&index, asked, most, |_| ());
            named.sort_unstable();
            assert!(named.iter().copied().eq(0..count + 2), "{most} at a time: {named:?}");
        }
        let mut changes = 0;
        let mut named = walked(&index, asked, 7, |parts| {
            let number = u32::try_from(parts).unwrap();
            if 2 * number < count {
                index.remove(&mut recycler, byte(number), number);
                insert(&index, &mut recycler, byte(number), 2 * count + number);
                changes += 1;
            }
        });
        assert!(changes > 2, "{changes} parts");
        named.retain(|&number| (changes..count + 2).contains(&number));
        named.sort_unstable();
        assert!(named.iter().copied().eq(changes..count + 2), "{named:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "4,096 entries; shorter lists are interpreted")]
    fn a_block_has_room_for_so_many() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let most = u32::try_from(List::MAX_LEN).unwrap();
        let page = range(0x5555_0020_0000, 0x5555_0020_1000);
        (0..most).for_each(|number| insert(&index, &mut recycler, page, number));
        index.places.ensure(most, Place).unwrap();
        assert!(!index.insert(&mut recycler, page, most), "the lock would be held for all of them");
        index.remove(&mut recycler, page, 7);
        assert!(index.insert(&mut recycler, page, most));
        assert_eq!(walked(&index, page, 100, |_| ()).len(), List::MAX_LEN);
    }

    /// Long regions, which share pages in every block, and short ones, which do in some for a while.
    #[test]
    fn agrees_with_a_list() {
        let long_ones = agrees_with_a_list_of(300, 700, 1 << 21);
        assert!(cfg!(miri) || long_ones.1 > 0, "{long_ones:?}");
        let short_ones = agrees_with_a_list_of(100, 3, 8192);
        assert!(cfg!(miri) || short_ones.0 > 10 && short_ones.1 > 10, "{short_ones:?}");
    }

    /// Random insertions and removals, of up to so many pages, up to so many at once, compared with a plain list; asked for ranges
    /// of up to so many bytes. How often the regions of a block shared no page, and how often they did.
    fn agrees_with_a_list_of(most: usize, pages: usize, bytes: usize) -> (usize, usize) {
        let mut seen = (0, 0);
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x5555_0000_0000;
        let mut model: Vec<(u32, AddressRange)> = Vec::new();
        let mut state = 0x9e37_79b9_u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % bound
        };
        for number in 0..if cfg!(miri) { 60 } else { 3000 } {
            let start = base + next(2000) * 4096;
            let region = range(start, start + (1 + next(pages)) * 4096);
            insert(&index, &mut recycler, region, number);
            model.push((number, region));
            if model.len() > most || next(3) == 0 {
                let (number, region) = model.swap_remove(next(model.len()));
                index.remove(&mut recycler, region, number);
            }
            let start = base + next(2000) * 4096 + next(4096);
            let probe = range(start, start + 1 + next(bytes));
            let mut expected: Vec<u32> = model
                .iter()
                .filter(|(_, region)| region.overlaps(&probe.page_aligned(4096)))
                .map(|(number, _)| *number)
                .collect();
            expected.sort_unstable();
            assert_eq!(touched(&index, probe.start(), probe.end()), expected);
            let mut in_parts = walked(&index, probe, 1 + next(20), |_| ());
            in_parts.sort_unstable();
            in_parts.dedup();
            assert_eq!(in_parts, expected);
            let mut containing = found(&index, probe.start(), probe.end());
            containing.retain(|number| {
                model.iter().any(|(other, region)| other == number && region.contains(&probe))
            });
            containing.sort_unstable();
            expected.retain(|number| {
                model.iter().any(|(other, region)| other == number && region.contains(&probe))
            });
            assert_eq!(containing, expected);
            let list =
                index.list_of(start >> BLOCK_LOG2).map(|word| List(word.load(Ordering::Relaxed)));
            if let Some(list) = list {
                let is_apart = are_apart::<Place>(index.entries(list));
                assert_eq!(list.is_apart(), is_apart);
                *(if is_apart { &mut seen.0 } else { &mut seen.1 }) += 1;
            }
        }
        seen
    }
}
