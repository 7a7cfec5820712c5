//! Which regions may contain an address: an index in the shape of a page table.
//!
//! Three levels of 512 lead from an address to its 2 MiB block; a block's list names every region
//! that touches the block, sorted by where it begins. A look-up is four loads and a binary
//! search, takes no lock and is wait-free. Writers hold the cache's lock.
//!
//! **Entries are hints.** A list that shrank, moved or went to another block while it was being
//! read yields wrong numbers or misses some. So a reader proves every number at the region itself
//! (see [`crate::region`]), and takes nothing found for "ask again under the lock", where the
//! index is exact. That is all the synchronisation there is: no epoch, no counted reference, no
//! retry loop. What it costs is memory that is recycled but not freed: lists keep their size
//! class for life.
//!
//! A region costs 8 bytes for each 2 MiB block that it touches, up to twice that in slack.

use crate::AddressRange;
use crate::arena::Arena;
use crate::region::{Terms, Want};
use crate::sync::{AtomicU64, OnceLock, Ordering};
use std::collections::VecDeque;

/// Children of a directory: 512, as in a page table; few in a model, where each costs time.
const FANOUT: usize = if cfg!(loom) { 2 } else { 512 };
/// An entry's granule.
const PAGE_LOG2: u32 = 12;
/// The granule of lists: 2 MiB.
const BLOCK_LOG2: u32 = PAGE_LOG2 + 9;
const BLOCK_BYTES: usize = 1 << BLOCK_LOG2;
const BLOCK_PAGES: usize = BLOCK_BYTES >> PAGE_LOG2;
/// The first address that the index does not know: 2^48, the end of four-level page tables.
const END: usize = BLOCK_BYTES * FANOUT * FANOUT * FANOUT;
/// List sizes: 4, 8, 16, ... entries.
/// (Few in a model, whose threads have small stacks.)
const CLASSES: usize = if cfg!(loom) { 2 } else { 24 };

/// One entry of a list: a region's extent within the block, its terms and its number.
///
/// Bits: first page 0-9, page behind the last 10-20 (past 512 where the region goes on), terms
/// 21-28, number 32-63.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry(u64);

impl Entry {
    const BEYOND: usize = BLOCK_PAGES + 1;

    fn new(range: AddressRange, terms: Terms, number: u32, block: usize) -> Self {
        let (first, end) = pages_in(range, block);
        Self(
            first as u64
                | (end as u64) << 10
                | u64::from(terms.bits()) << 21
                | u64::from(number) << 32,
        )
    }

    const fn first(self) -> usize {
        (self.0 & 0x3ff) as usize
    }

    const fn end(self) -> usize {
        (self.0 >> 10 & 0x7ff) as usize
    }

    const fn terms(self) -> Terms {
        Terms::from_bits((self.0 >> 21 & 0xff) as u8)
    }

    const fn number(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The pages of `range` within `block`: the first, and the one behind the last, which is
/// [`Entry::BEYOND`] where the range goes on in the next block.
#[inline]
fn pages_in(range: AddressRange, block: usize) -> (usize, usize) {
    let base = block << BLOCK_LOG2;
    let first = range.start().saturating_sub(base) >> PAGE_LOG2;
    let end = if range.end() > base + BLOCK_BYTES {
        Entry::BEYOND
    } else {
        (range.end() - base).div_ceil(1 << PAGE_LOG2)
    };
    (first, end)
}

/// A block's list, as one word: class in bits 0-7, length in 8-31, place in 32-63. Zero is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct List(u64);

impl List {
    const EMPTY: Self = Self(0);

    fn new(class: usize, length: usize, place: u32) -> Self {
        Self(class as u64 | (length as u64) << 8 | u64::from(place) << 32)
    }

    const fn class(self) -> usize {
        (self.0 & 0xff) as usize
    }

    const fn len(self) -> usize {
        (self.0 >> 8 & 0xff_ffff) as usize
    }

    const fn place(self) -> u32 {
        (self.0 >> 32) as u32
    }

    const fn capacity(self) -> usize {
        4 << self.class()
    }
}

/// A directory of 512 children, made when first needed.
struct Directory<T>(Box<[OnceLock<T>]>);

impl<T> Directory<T> {
    fn new() -> Self {
        Self(std::iter::repeat_with(OnceLock::new).take(FANOUT).collect())
    }
}

/// The lowest level: the lists of 512 blocks, one GiB of addresses.
struct Leaf(Box<[AtomicU64]>);

impl Leaf {
    fn new() -> Self {
        Self(std::iter::repeat_with(|| AtomicU64::new(0)).take(FANOUT).collect())
    }
}

/// The part of the index that readers use.
pub(crate) struct Index {
    root: Directory<Directory<Leaf>>,
    /// One arena for each class of lists.
    lists: [Arena<AtomicU64>; CLASSES],
}

/// The part that only the holder of the writer's lock uses: lists to be used again.
pub(crate) struct Recycler {
    /// Oldest first, so that a late reader of a list rarely meets its next content.
    free: [VecDeque<u32>; CLASSES],
    made: [u32; CLASSES],
}

impl Recycler {
    pub(crate) fn new() -> Self {
        Self { free: std::array::from_fn(|_| VecDeque::new()), made: [0; CLASSES] }
    }
}

impl Index {
    pub(crate) fn new() -> Self {
        // A chunk is a whole number of lists: its first size is at least one list.
        let lists_log2 = if cfg!(loom) { 0 } else { 4 };
        let mut first_log2 = 1 + lists_log2;
        Self {
            root: Directory::new(),
            lists: std::array::from_fn(|_| {
                first_log2 += 1;
                Arena::new(first_log2)
            }),
        }
    }

    /// Whether the index can hold `range` at all.
    pub(crate) fn can_hold(range: AddressRange) -> bool {
        range.end() <= END
    }

    #[inline]
    fn list_of(&self, block: usize) -> Option<&AtomicU64> {
        let middle = self.root.0.get(block / (FANOUT * FANOUT))?.get()?;
        let leaf = middle.0.get(block / FANOUT % FANOUT)?.get()?;
        leaf.0.get(block % FANOUT)
    }

    fn make_list_of(&self, block: usize) -> Option<&AtomicU64> {
        let middle = self.root.0.get(block / (FANOUT * FANOUT))?.get_or_init(Directory::new);
        let leaf = middle.0.get(block / FANOUT % FANOUT)?.get_or_init(Leaf::new);
        leaf.0.get(block % FANOUT)
    }

    #[inline]
    fn entries(&self, list: List) -> &[AtomicU64] {
        // A torn view cannot arise: the word that names the list is one atomic.
        let first = list.place() << (2 + list.class());
        self.lists.get(list.class()).and_then(|lists| lists.slice(first, list.len())).unwrap_or(&[])
    }

    /// Offers `accept` the numbers of regions that may serve `want`, the one that begins last
    /// first, until it takes one.
    #[inline]
    pub(crate) fn find<T>(
        &self,
        want: &Want,
        mut accept: impl FnMut(u32) -> Option<T>,
    ) -> Option<T> {
        let block = want.range.start() >> BLOCK_LOG2;
        // Acquire: pairs with `publish`; the entries were written before.
        let list = List(self.list_of(block)?.load(Ordering::Acquire));
        let entries = self.entries(list);
        let (first, end) = pages_in(want.range, block);
        // Relaxed, here and below: hints, see the module's header.
        let behind =
            entries.partition_point(|entry| Entry(entry.load(Ordering::Relaxed)).first() <= first);
        entries[..behind].iter().rev().find_map(|entry| {
            let entry = Entry(entry.load(Ordering::Relaxed));
            let fits = entry.end() >= end && entry.terms().serve(want.terms);
            if fits { accept(entry.number()) } else { None }
        })
    }

    /// Adds region `number`. False if the index is out of space; then nothing was added.
    pub(crate) fn insert(
        &self,
        recycler: &mut Recycler,
        range: AddressRange,
        terms: Terms,
        number: u32,
    ) -> bool {
        for block in blocks_of(range) {
            let entry = Entry::new(range, terms, number, block);
            if self.insert_entry(recycler, block, entry).is_none() {
                self.remove(recycler, range, number);
                return false;
            }
        }
        true
    }

    fn insert_entry(&self, recycler: &mut Recycler, block: usize, entry: Entry) -> Option<()> {
        let word = self.make_list_of(block)?;
        // Relaxed: only holders of the writer's lock store here.
        let list = List(word.load(Ordering::Relaxed));
        let old = self.entries(list);
        let position =
            old.partition_point(|old| Entry(old.load(Ordering::Relaxed)).first() <= entry.first());
        if list != List::EMPTY && position == list.len() && list.len() < list.capacity() {
            self.store_entry(list, position, entry);
            publish(word, List::new(list.class(), list.len() + 1, list.place()));
            return Some(());
        }
        let new = self.allocate(recycler, list.len() + 1)?;
        let (before, after) = old.split_at(position);
        let moved = before.iter().map(load).chain([entry]).chain(after.iter().map(load));
        moved.enumerate().for_each(|(at, entry)| self.store_entry(new, at, entry));
        publish(word, new);
        recycle(recycler, list);
        Some(())
    }

    /// Removes region `number`, whose range is `range`.
    pub(crate) fn remove(&self, recycler: &mut Recycler, range: AddressRange, number: u32) {
        for block in blocks_of(range) {
            self.remove_entry(recycler, block, number);
        }
    }

    fn remove_entry(&self, recycler: &mut Recycler, block: usize, number: u32) {
        let Some(word) = self.list_of(block) else { return };
        // Relaxed: only holders of the writer's lock store here.
        let list = List(word.load(Ordering::Relaxed));
        let old = self.entries(list);
        let Some(position) = old.iter().position(|entry| load(entry).number() == number) else {
            return;
        };
        let left = list.len() - 1;
        if left == 0 {
            publish(word, List::EMPTY);
            recycle(recycler, list);
            return;
        }
        // In place: a reader in between sees an entry twice or misses one, both of which it
        // is prepared for.
        for at in position..left {
            self.store_entry(list, at, load(&old[at + 1]));
        }
        publish(word, List::new(list.class(), left, list.place()));
    }

    /// Calls `visit` with the number of every region that shares a page with `range`; a region in
    /// several blocks is named several times.
    pub(crate) fn overlapping(&self, range: AddressRange, mut visit: impl FnMut(u32)) {
        let Some(range) = AddressRange::between(range.start(), range.end().min(END)) else {
            return;
        };
        let mut block = range.start() >> BLOCK_LOG2;
        let last = (range.end() - 1) >> BLOCK_LOG2;
        while block <= last {
            match self.list_of(block) {
                Some(word) => {
                    self.visit_block(word, range, block, &mut visit);
                    block += 1;
                }
                None => block = self.next_present(block),
            }
        }
    }

    /// The first block behind an absent directory or leaf.
    fn next_present(&self, block: usize) -> usize {
        let root = block / (FANOUT * FANOUT);
        let step = match self.root.0.get(root).and_then(OnceLock::get) {
            Some(_) => FANOUT,
            None => FANOUT * FANOUT,
        };
        (block / step + 1) * step
    }

    fn visit_block(
        &self,
        word: &AtomicU64,
        range: AddressRange,
        block: usize,
        visit: &mut impl FnMut(u32),
    ) {
        let (first, end) = pages_in(range, block);
        // Relaxed: the writer's lock is held.
        self.entries(List(word.load(Ordering::Relaxed)))
            .iter()
            .map(load)
            .filter(|entry| entry.first() < end && first < entry.end())
            .for_each(|entry| visit(entry.number()));
    }

    fn store_entry(&self, list: List, at: usize, entry: Entry) {
        let first = list.place() << (2 + list.class());
        let lists = &self.lists[list.class()];
        if let Some(slot) = lists.slice(first, list.capacity()).and_then(|slots| slots.get(at)) {
            // Relaxed: `publish` releases it.
            slot.store(entry.0, Ordering::Relaxed);
        }
    }

    /// A list with room for `length` entries.
    fn allocate(&self, recycler: &mut Recycler, length: usize) -> Option<List> {
        let class = length.div_ceil(4).next_power_of_two().trailing_zeros() as usize;
        let place = match recycler.free.get_mut(class)?.pop_front() {
            Some(place) => place,
            None => {
                let place = recycler.made[class];
                let first = place.checked_mul(4 << class)?;
                self.lists[class].ensure(first, || AtomicU64::new(0))?;
                recycler.made[class] = place + 1;
                place
            }
        };
        Some(List::new(class, length, place))
    }
}

fn publish(word: &AtomicU64, list: List) {
    // Release: whoever loads the word sees the entries stored before.
    word.store(list.0, Ordering::Release);
}

fn recycle(recycler: &mut Recycler, list: List) {
    if list != List::EMPTY {
        recycler.free[list.class()].push_back(list.place());
    }
}

fn load(entry: &AtomicU64) -> Entry {
    // Relaxed: writers hold the lock, readers take hints.
    Entry(entry.load(Ordering::Relaxed))
}

fn blocks_of(range: AddressRange) -> impl Iterator<Item = usize> {
    range.start() >> BLOCK_LOG2..=(range.end() - 1) >> BLOCK_LOG2
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::Access;

    const TERMS: Terms = Terms { access: Access::READ, vouched: false };

    fn range(start: usize, end: usize) -> AddressRange {
        AddressRange::between(start, end).unwrap()
    }

    fn found(index: &Index, start: usize, end: usize) -> Vec<u32> {
        let want = Want { range: range(start, end), terms: TERMS };
        let mut numbers = Vec::new();
        index.find(&want, |number| -> Option<()> {
            numbers.push(number);
            None
        });
        numbers
    }

    fn touched(index: &Index, start: usize, end: usize) -> Vec<u32> {
        let mut numbers = Vec::new();
        index.overlapping(range(start, end), |number| numbers.push(number));
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
            assert!(index.insert(&mut recycler, region, TERMS, number));
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
        assert!(index.insert(&mut recycler, region, TERMS, 5));
        for start in [base - 4096, base, base + BLOCK_BYTES, base + 2 * BLOCK_BYTES] {
            assert_eq!(found(&index, start, start + 64), [5]);
        }
        assert_eq!(found(&index, base - 4096, base + 2 * BLOCK_BYTES + 4096), [5]);
        index.remove(&mut recycler, region, 5);
        assert_eq!(touched(&index, 1, END), []);
    }

    #[test]
    fn the_whole_address_space_is_searched_quickly() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        for (number, start) in (0_u32..).zip([0x1000, END - 0x1000]) {
            assert!(index.insert(&mut recycler, range(start, start + 0x1000), TERMS, number));
        }
        assert_eq!(touched(&index, 1, usize::MAX), [0, 1]);
        assert!(!Index::can_hold(range(END, END + 1)));
        assert_eq!(found(&index, END, END + 1), []);
    }

    /// Random insertions and removals beside a plain list.
    #[test]
    fn agrees_with_a_list() {
        let (index, mut recycler) = (Index::new(), Recycler::new());
        let base = 0x5555_0000_0000;
        let mut model: Vec<(u32, AddressRange)> = Vec::new();
        let mut state = 0x9e37_79b9_u64;
        let mut next = |bound: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % bound
        };
        for number in 0..if cfg!(miri) { 200 } else { 3000 } {
            let start = base + next(2000) * 4096;
            let region = range(start, start + (1 + next(700)) * 4096);
            assert!(index.insert(&mut recycler, region, TERMS, number));
            model.push((number, region));
            if model.len() > 300 || next(3) == 0 {
                let (number, region) = model.swap_remove(next(model.len()));
                index.remove(&mut recycler, region, number);
            }
            let start = base + next(2000) * 4096 + next(4096);
            let probe = range(start, start + 1 + next(1 << 21));
            let mut expected: Vec<u32> = model
                .iter()
                .filter(|(_, region)| region.overlaps(&probe.page_aligned(4096)))
                .map(|(number, _)| *number)
                .collect();
            expected.sort_unstable();
            assert_eq!(touched(&index, probe.start(), probe.end()), expected);
            let mut containing = found(&index, probe.start(), probe.end());
            containing.retain(|number| {
                model.iter().any(|(other, region)| other == number && region.contains(&probe))
            });
            containing.sort_unstable();
            expected.retain(|number| {
                model.iter().any(|(other, region)| other == number && region.contains(&probe))
            });
            assert_eq!(containing, expected);
        }
    }
}
