//! Which parts of the slabs are free: arithmetic on numbers, nothing that touches memory.
//!
//! A slab is a row of units. A span is a run of units of one slab: blocks of one size, or one
//! long buffer. A span all of whose blocks are free goes back to its slab at once, so that a slab
//! of which nothing is used is seen to be empty.
//!
//! Of several slabs the oldest that has room is taken, and of a span's blocks the first: what is
//! used stays together, and younger slabs become empty.

use super::classes::{CLASSES, Class, UNIT};

/// A slab's number. Numbers are used again.
pub(super) type SlabNumber = u32;

/// A place in a slab.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Place {
    pub(super) slab: SlabNumber,
    /// In bytes from the slab's beginning.
    pub(super) offset: usize,
}

/// What became of a place that was put back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Put {
    /// It is free.
    Free,
    /// It is free, and so is all of its slab.
    SlabEmpty,
    /// It was free already, or it is no block's beginning: nothing was done.
    NotInUse,
}

/// The blocks of all slabs.
#[derive(Debug)]
pub(super) struct Space {
    slabs: Vec<Option<Units>>,
    spans: Vec<Span>,
    unused_spans: Vec<u32>,
    /// Spans with free blocks, by class.
    partial: [Vec<u32>; CLASSES],
    /// Free blocks in spans, by class.
    free_blocks: [usize; CLASSES],
    /// Blocks in spans, by class.
    blocks: [usize; CLASSES],
    /// Units of long buffers.
    long_units: usize,
}

/// The units of one slab.
#[derive(Debug)]
struct Units {
    /// The span of each, or [`NO_SPAN`].
    spans: Vec<u32>,
    free: usize,
    /// No unit below this one is free.
    first_free: usize,
}

const NO_SPAN: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Span {
    slab: SlabNumber,
    first: usize,
    units: usize,
    /// `None` for a long buffer.
    class: Option<Class>,
    /// Which blocks are free, a bit each.
    free: [u64; 4],
    free_count: usize,
    /// How many blocks it has.
    blocks: usize,
    /// Where it stands among the partial spans of its class, if it does.
    position: Option<usize>,
}

impl Units {
    fn new(units: usize) -> Self {
        Self { spans: vec![NO_SPAN; units], free: units, first_free: 0 }
    }

    fn are_all_free(&self) -> bool {
        self.free == self.spans.len()
    }

    /// The first run of `count` free units that begins at a multiple of `align` units.
    fn find(&self, count: usize, align: usize) -> Option<usize> {
        if self.free < count {
            return None;
        }
        let mut start = self.first_free.next_multiple_of(align);
        loop {
            let run = self.spans.get(start..start.checked_add(count)?)?;
            match run.iter().rposition(|&span| span != NO_SPAN) {
                None => return Some(start),
                Some(last_used) => start = (start + last_used + 1).next_multiple_of(align),
            }
        }
    }

    fn take(&mut self, first: usize, count: usize, span: u32) {
        self.spans[first..first + count].fill(span);
        self.free -= count;
        let behind = first + count;
        if first == self.first_free {
            let free = self.spans[behind..].iter().position(|&span| span == NO_SPAN);
            self.first_free = free.map_or(self.spans.len(), |offset| behind + offset);
        }
    }

    fn give_back(&mut self, first: usize, count: usize) {
        self.spans[first..first + count].fill(NO_SPAN);
        self.free += count;
        self.first_free = self.first_free.min(first);
    }
}

impl Span {
    fn take_first(&mut self) -> Option<usize> {
        let word = self.free.iter().position(|&word| word != 0)?;
        let bit = self.free[word].trailing_zeros() as usize;
        self.free[word] &= self.free[word] - 1;
        self.free_count -= 1;
        Some(64 * word + bit)
    }

    /// False if it was free already.
    ///
    /// What is compared is branched on and nothing else. A comparison with a constant that is also
    /// counted (`count += usize::from(was_used)`) is one that rustc up to 1.97 may take away when it
    /// optimises and inlines: `SimplifyComparisonIntegral`, rust-lang/rust#158206.
    fn put(&mut self, block: usize) -> bool {
        let mask = 1 << (block % 64);
        let word = &mut self.free[block / 64];
        if *word & mask != 0 {
            return false;
        }
        *word |= mask;
        self.free_count += 1;
        true
    }

    fn start(&self) -> usize {
        self.first * UNIT
    }
}

impl Space {
    pub(super) fn new() -> Self {
        Self {
            slabs: Vec::new(),
            spans: Vec::new(),
            unused_spans: Vec::new(),
            partial: std::array::from_fn(|_| Vec::new()),
            free_blocks: [0; CLASSES],
            blocks: [0; CLASSES],
            long_units: 0,
        }
    }

    /// Adds a slab of whole units, all free.
    pub(super) fn add(&mut self, number: SlabNumber, units: usize) {
        let index = number as usize;
        if self.slabs.len() <= index {
            self.slabs.resize_with(index + 1, || None);
        }
        self.slabs[index] = Some(Units::new(units));
    }

    /// Takes away a slab all of whose units are free; false if one is not.
    pub(super) fn remove(&mut self, number: SlabNumber) -> bool {
        match self.slabs.get_mut(number as usize) {
            Some(slab) if slab.as_ref().is_some_and(Units::are_all_free) => {
                *slab = None;
                true
            }
            _ => false,
        }
    }

    /// The slabs that are empty, the youngest first.
    pub(super) fn empty_slabs(&self) -> impl Iterator<Item = SlabNumber> {
        let empty = |slab: &Option<Units>| slab.as_ref().is_some_and(Units::are_all_free);
        let numbered = self.slabs.iter().enumerate().rev();
        numbered
            .filter(move |(_, slab)| empty(slab))
            .filter_map(|(index, _)| SlabNumber::try_from(index).ok())
    }

    /// A free block of this size.
    pub(super) fn take(&mut self, class: Class) -> Option<Place> {
        let span = match self.partial[class.index()].last() {
            Some(&span) => span,
            None => self.new_blocks(class)?,
        };
        let block = self.spans[span as usize].take_first()?;
        self.free_blocks[class.index()] -= 1;
        self.list(span);
        let span = &self.spans[span as usize];
        Some(Place { slab: span.slab, offset: span.start() + block * class.bytes() })
    }

    /// A free run of `units`, beginning at a multiple of `align` units.
    pub(super) fn take_long(&mut self, units: usize, align: usize) -> Option<Place> {
        let span = self.new_span(units, align, None)?;
        self.long_units += units;
        let span = &self.spans[span as usize];
        Some(Place { slab: span.slab, offset: span.start() })
    }

    /// Takes back what [`take`](Self::take) or [`take_long`](Self::take_long) gave.
    pub(super) fn put(&mut self, place: Place) -> Put {
        let Some(number) = self.span_at(place) else { return Put::NotInUse };
        let span = &mut self.spans[number as usize];
        match span.class {
            None if place.offset == span.start() => {
                self.long_units -= span.units;
                self.end_span(number)
            }
            None => Put::NotInUse,
            Some(class) => self.put_block(number, class, place.offset),
        }
    }

    fn put_block(&mut self, number: u32, class: Class, offset: usize) -> Put {
        let span = &mut self.spans[number as usize];
        let from_start = offset - span.start();
        if !from_start.is_multiple_of(class.bytes()) || !span.put(from_start / class.bytes()) {
            return Put::NotInUse;
        }
        self.free_blocks[class.index()] += 1;
        self.list(number);
        let span = &self.spans[number as usize];
        let is_empty = span.free_count == span.blocks;
        if is_empty { self.end_span(number) } else { Put::Free }
    }

    fn span_at(&self, place: Place) -> Option<u32> {
        let units = self.slabs.get(place.slab as usize)?.as_ref()?;
        units.spans.get(place.offset / UNIT).copied().filter(|&span| span != NO_SPAN)
    }

    fn new_blocks(&mut self, class: Class) -> Option<u32> {
        let span = self.new_span(class.span_units(), class.span_align_units(), Some(class))?;
        self.blocks[class.index()] += class.span_blocks();
        self.free_blocks[class.index()] += class.span_blocks();
        self.list(span);
        Some(span)
    }

    fn new_span(&mut self, units: usize, align: usize, class: Option<Class>) -> Option<u32> {
        let places = (0..).zip(&self.slabs);
        let (slab, first) = places
            .filter_map(|(number, slab)| Some((number, slab.as_ref()?.find(units, align)?)))
            .next()?;
        let (free, free_count) = class.map_or(([0; 4], 0), all_free);
        let span = Span {
            slab,
            first,
            units,
            class,
            free,
            free_count,
            blocks: free_count,
            position: None,
        };
        let number = self.span_number(span)?;
        if let Some(Some(slab)) = self.slabs.get_mut(slab as usize) {
            slab.take(first, units, number);
        }
        Some(number)
    }

    fn span_number(&mut self, span: Span) -> Option<u32> {
        if let Some(number) = self.unused_spans.pop() {
            self.spans[number as usize] = span;
            return Some(number);
        }
        let number = u32::try_from(self.spans.len()).ok().filter(|&number| number != NO_SPAN)?;
        self.spans.push(span);
        Some(number)
    }

    /// Gives the units of a span back to its slab.
    fn end_span(&mut self, number: u32) -> Put {
        let Span { slab, first, units, class, .. } = self.spans[number as usize];
        if let Some(class) = class {
            self.blocks[class.index()] -= class.span_blocks();
            self.free_blocks[class.index()] -= class.span_blocks();
            self.spans[number as usize].free_count = 0;
            self.list(number);
        }
        self.unused_spans.push(number);
        match self.slabs.get_mut(slab as usize) {
            Some(Some(slab)) => {
                slab.give_back(first, units);
                if slab.are_all_free() { Put::SlabEmpty } else { Put::Free }
            }
            _ => Put::NotInUse,
        }
    }

    /// Has a span stand among the partial ones of its class exactly if it has free blocks.
    fn list(&mut self, number: u32) {
        let span = &mut self.spans[number as usize];
        let Some(class) = span.class else { return };
        let partial = &mut self.partial[class.index()];
        match span.position {
            None if span.free_count > 0 => {
                span.position = Some(partial.len());
                partial.push(number);
            }
            Some(position) if span.free_count == 0 => {
                span.position = None;
                partial.swap_remove(position);
                if let Some(&moved) = partial.get(position) {
                    self.spans[moved as usize].position = Some(position);
                }
            }
            _ => {}
        }
    }

    /// Blocks of this size that are not free here.
    pub(super) fn blocks_out(&self, class: Class) -> usize {
        self.blocks[class.index()] - self.free_blocks[class.index()]
    }

    /// Bytes of long buffers.
    pub(super) fn long_bytes(&self) -> usize {
        self.long_units * UNIT
    }
}

fn all_free(class: Class) -> ([u64; 4], usize) {
    let blocks = class.span_blocks();
    let word = |index: usize| match blocks.saturating_sub(64 * index).min(64) {
        0 => 0,
        bits => u64::MAX >> (64 - bits),
    };
    (std::array::from_fn(word), blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn class(bytes: usize) -> Class {
        Class::holding(bytes).unwrap()
    }

    /// Every block that went out and came back is counted, with and without optimisation.
    #[test]
    fn what_is_counted_is_what_is_free() {
        for class in (0..CLASSES).filter_map(Class::of_index) {
            let mut space = space(&[class.span_units().max(class.span_align_units())]);
            let places: Vec<Place> = std::iter::from_fn(|| space.take(class)).collect();
            assert!(!places.is_empty());
            for (back, &place) in places.iter().enumerate() {
                assert_eq!(space.blocks_out(class), places.len() - back);
                let span = &space.spans[space.span_at(place).unwrap() as usize];
                let bits: u32 = span.free.iter().map(|word| word.count_ones()).sum();
                assert_eq!((span.free_count, space.free_blocks[class.index()]), (back, back));
                assert_eq!(bits as usize, back);
                assert_ne!(space.put(place), Put::NotInUse);
            }
            assert!(space.empty_slabs().eq([0]), "{class:?}");
        }
    }

    fn space(units: &[usize]) -> Space {
        let mut space = Space::new();
        (0..).zip(units).for_each(|(number, &units)| space.add(number, units));
        space
    }

    #[test]
    fn a_slab_gives_all_its_blocks_and_is_empty_again() {
        let mut space = space(&[1]);
        let places: Vec<Place> = std::iter::from_fn(|| space.take(class(64))).collect();
        assert_eq!(places.len(), UNIT / 64);
        assert!(!space.remove(0) && space.empty_slabs().next().is_none());
        assert_eq!(space.blocks_out(class(64)), places.len());
        let (last, others) = places.split_last().unwrap();
        assert!(others.iter().all(|&place| space.put(place) == Put::Free));
        assert_eq!(space.put(*last), Put::SlabEmpty);
        assert_eq!(space.put(*last), Put::NotInUse);
        assert!(space.empty_slabs().eq([0]) && space.remove(0) && !space.remove(0));
        assert_eq!(space.take(class(64)), None);
    }

    #[test]
    fn what_is_not_a_block_in_use_is_refused() {
        let mut space = space(&[8]);
        let place = space.take(class(4096)).unwrap();
        assert_eq!(space.put(Place { offset: place.offset + 64, ..place }), Put::NotInUse);
        assert_eq!(space.put(Place { offset: place.offset + 4096, ..place }), Put::NotInUse);
        assert_eq!(space.put(Place { slab: 9, offset: 0 }), Put::NotInUse);
        let long = space.take_long(2, 1).unwrap();
        assert_eq!(space.put(Place { offset: long.offset + UNIT, ..long }), Put::NotInUse);
        assert_eq!(space.put(long), Put::Free);
        assert_eq!(space.put(place), Put::SlabEmpty);
    }

    #[test]
    fn runs_begin_where_they_are_asked_to() {
        let mut space = space(&[256]);
        let small = space.take_long(1, 1).unwrap();
        let aligned = space.take_long(3, 128).unwrap();
        assert_eq!((small.offset, aligned.offset), (0, 128 * UNIT));
        assert_eq!(space.take_long(128, 128), None, "the second half has begun");
        assert_eq!(space.take_long(127, 1).unwrap().offset, UNIT);
        assert_eq!(space.long_bytes(), 131 * UNIT);
    }

    #[test]
    fn the_oldest_slab_goes_first() {
        let mut space = space(&[4, 4]);
        let places: Vec<Place> = (0..8).map(|_| space.take_long(1, 1).unwrap()).collect();
        assert!(places.is_sorted());
        space.put(places[5]);
        space.put(places[2]);
        assert_eq!(space.take_long(1, 1), Some(places[2]));
    }

    /// First in, first out, as between two threads: every unit is found again.
    #[test]
    fn what_is_put_is_found_again() {
        for bytes in [65536, 80 << 10, 1 << 20] {
            let mut space = space(&[256, 256, 512]);
            let mut queue = std::collections::VecDeque::new();
            let capacity = std::iter::from_fn(|| space.take(class(bytes)))
                .map(|place| queue.push_back(place))
                .count();
            for _ in 0..20 {
                for _ in 0..capacity / 3 {
                    space.put(queue.pop_front().unwrap());
                }
                for _ in 0..capacity / 3 {
                    queue.push_back(space.take(class(bytes)).unwrap());
                }
            }
        }
    }

    /// The same while slabs are added, as by a pool that grows: none is added in vain.
    #[test]
    fn slabs_are_not_added_in_vain() {
        let (mut space, mut queue, mut units) =
            (Space::new(), std::collections::VecDeque::new(), 0);
        for round in 0..if cfg!(miri) { 20 } else { 2000_u32 } {
            for _ in 0..31 {
                let place = space.take(class(65536)).unwrap_or_else(|| {
                    space.add(round, 128);
                    units += 128;
                    space.take(class(65536)).unwrap()
                });
                queue.push_back(place);
            }
            while queue.len() > 256 {
                assert_ne!(space.put(queue.pop_front().unwrap()), Put::NotInUse);
            }
            assert!(units <= 300 * 4 + 128, "{units} units for {}", queue.len());
        }
    }

    /// What a random program does.
    #[derive(Clone, Debug)]
    enum Step {
        Take(usize),
        TakeLong(usize, usize),
        Put(usize),
        Add(usize),
        RemoveEmpty,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..CLASSES).prop_map(Step::Take),
            3 => (0..20_usize).prop_map(Step::Take),
            2 => (1..20_usize, 0..5_u32).prop_map(|(units, align)| Step::TakeLong(units, 1 << align)),
            8 => any::<usize>().prop_map(Step::Put),
            1 => (1..600_usize).prop_map(Step::Add),
            1 => Just(Step::RemoveEmpty),
        ];
        proptest::collection::vec(step, 1..if cfg!(miri) { 20 } else { 300 })
    }

    /// The oracle: every byte range that is out, by place.
    #[derive(Default)]
    struct Naive {
        slabs: BTreeMap<SlabNumber, usize>,
        out: BTreeMap<Place, usize>,
    }

    impl Naive {
        fn overlaps(&self, place: Place, bytes: usize) -> bool {
            let before = self.out.range(..Place { offset: place.offset + bytes, ..place }).last();
            before.is_some_and(|(other, length)| {
                other.slab == place.slab && other.offset + length > place.offset
            })
        }

        fn take(&mut self, place: Place, bytes: usize, align: usize) {
            assert!(!self.overlaps(place, bytes), "{place:?} overlaps");
            assert!(place.offset + bytes <= self.slabs[&place.slab] * UNIT);
            assert_eq!(place.offset % align, 0);
            self.out.insert(place, bytes);
        }

        fn is_empty(&self, slab: SlabNumber) -> bool {
            self.out.keys().all(|place| place.slab != slab)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]
        #[test]
        fn random_programs_get_what_the_naive_model_allows(steps in steps()) {
            let (mut space, mut naive) = (Space::new(), Naive::default());
            for step in steps {
                match step {
                    Step::Take(index) => {
                        let class = Class::of_index(index).unwrap();
                        if let Some(place) = space.take(class) {
                            naive.take(place, class.bytes(), class.align());
                        }
                    }
                    Step::TakeLong(units, align) => {
                        if let Some(place) = space.take_long(units, align) {
                            naive.take(place, units * UNIT, align * UNIT);
                        }
                    }
                    Step::Put(choice) => {
                        let Some((&place, _)) = naive.out.iter().nth(choice % naive.out.len().max(1))
                        else { continue };
                        naive.out.remove(&place);
                        let empty = naive.is_empty(place.slab);
                        prop_assert_eq!(space.put(place) == Put::SlabEmpty, empty);
                        prop_assert_eq!(space.put(place), Put::NotInUse);
                    }
                    Step::Add(units) => {
                        let number = (0..).find(|number| !naive.slabs.contains_key(number)).unwrap();
                        naive.slabs.insert(number, units);
                        space.add(number, units);
                    }
                    Step::RemoveEmpty => {
                        let empty: Vec<SlabNumber> = space.empty_slabs().collect();
                        prop_assert!(empty.iter().all(|&slab| naive.is_empty(slab)));
                        let all = naive.slabs.keys().filter(|&&slab| naive.is_empty(slab)).count();
                        prop_assert_eq!(empty.len(), all);
                        for slab in empty {
                            prop_assert!(space.remove(slab));
                            naive.slabs.remove(&slab);
                        }
                    }
                }
                let out: usize = naive.out.values().sum();
                let classes = (0..CLASSES).filter_map(Class::of_index);
                let blocks: usize = classes.map(|class| space.blocks_out(class) * class.bytes()).sum();
                prop_assert_eq!(out, blocks + space.long_bytes());
            }
        }
    }
}
