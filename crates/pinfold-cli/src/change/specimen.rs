//! A piece of memory that is made to be changed.
//!
//! It stands between two inaccessible guards, so that it is a mapping of its own and cannot grow
//! in place; what is mapped anew after a change goes to the very same address.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls of [`super::calls`]. Their contract holds because
//! a specimen's range was mapped for it alone, is unmapped only by it, and is never lent out as a
//! reference of Rust's: bytes are copied in and out by address. While part of it is a
//! hole that part has no owner, and no call but the mapping anew names it.

#![allow(unsafe_code)]

use super::calls::{self, Advice, Call, Place};
use super::obstacle::Obstacle;
use super::{Backing, Mutation, Part, difference};
use pinfold::AddressRange;
use std::os::fd::OwnedFd;

type Outcome<T = ()> = Result<T, Obstacle>;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Memory that can do to itself whatever the catalogue holds.
#[derive(Debug)]
pub(crate) struct Specimen {
    backing: Backing,
    body: AddressRange,
    /// The body with both guards.
    ground: AddressRange,
    /// The part of the body that is not mapped at the moment.
    hole: Option<AddressRange>,
    file: Option<OwnedFd>,
    /// A part was mapped anew alone: the body is no longer one mapping of one file.
    patched: bool,
}

impl Specimen {
    /// `grains` pieces of [`Backing::grain`] bytes, mapped and readable as zeros.
    pub(crate) fn new(backing: Backing, grains: usize) -> Outcome<Self> {
        let length = grains.max(1) * backing.grain();
        if backing == Backing::Heap {
            return Self::from_heap(length);
        }
        let ground = reserve(length, backing.alignment())?;
        let start = (ground.start() + 1).next_multiple_of(backing.alignment());
        let body = range(start, length);
        // Until the body is placed its address holds a guard: ours as well, so there is no hole.
        let mut specimen = Self { backing, body, ground, hole: None, file: None, patched: false };
        specimen.place(body, Place::Over)?;
        Ok(specimen)
    }

    fn from_heap(length: usize) -> Outcome<Self> {
        let page = Backing::Heap.grain();
        let slack = calls::program_break().wrapping_neg() % page;
        let grown = isize::try_from(slack + length).unwrap_or(0);
        // SAFETY: the heap grows; nothing goes.
        let start = unsafe { calls::move_break(grown) }? + slack;
        let body = range(start, length);
        let (ground, backing) = (body, Backing::Heap);
        Ok(Self { backing, body, ground, hole: None, file: None, patched: false })
    }

    /// Where it is, always.
    pub(crate) fn body(&self) -> AddressRange {
        self.body
    }

    /// What it is made of.
    pub(crate) fn backing(&self) -> Backing {
        self.backing
    }

    /// The bytes with which `key` fills `range`: every word of the range and every key another.
    pub(crate) fn pattern(range: AddressRange, key: u64) -> Vec<u8> {
        let mut bytes = vec![0; range.len().next_multiple_of(size_of::<u64>())];
        for (chunk, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(pattern_words(key)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes.truncate(range.len());
        bytes
    }

    /// Writes the pattern of `key` over `part`, which faults its pages in.
    pub(crate) fn fill(&self, part: AddressRange, key: u64) {
        assert!(self.body.contains(&part) && self.hole.is_none());
        // SAFETY: the part is mapped: it lies in the body, and the body has no hole.
        unsafe { calls::store(part, pattern_words(key)) };
    }

    /// Makes missing pages of memory where writing could end the process. A huge page that was set aside for
    /// this memory, and discarded while it was pinned, comes back only if another one is free;
    /// writing without would raise `SIGBUS`.
    pub(crate) fn populate(&self) -> Outcome {
        assert!(self.hole.is_none());
        match self.backing {
            // SAFETY: the body is this specimen's, and pages that are there stay.
            Backing::Hugetlb => unsafe {
                calls::advise(self.body, Advice::POPULATE_WRITE, Call::Library)
            },
            _ => Ok(()),
        }
    }

    /// What `part` holds at the moment.
    pub(crate) fn bytes(&self, part: AddressRange) -> Vec<u8> {
        assert!(self.body.contains(&part) && self.hole.is_none());
        // SAFETY: the part is mapped: it lies in the body, and the body has no hole.
        unsafe { calls::load(part) }
    }

    /// Where `part` holds something else than `wanted`, which is as long.
    pub(crate) fn difference(&self, part: AddressRange, wanted: &[u8]) -> Option<usize> {
        assert!(self.body.contains(&part) && self.hole.is_none());
        // SAFETY: the part is mapped: it lies in the body, and the body has no hole.
        if unsafe { calls::holds(part, wanted) } {
            return None;
        }
        difference(&self.bytes(part), wanted)
    }

    /// The piece of the body that `part` means, in whole grains.
    pub(crate) fn part(&self, part: Part) -> AddressRange {
        let grain = self.backing.grain();
        let grains = self.body.len() / grain;
        let quarter = (grains / 4).max(1);
        let (first, count) = match part {
            Part::Whole => (0, grains),
            Part::Head => (0, quarter),
            Part::Middle if grains >= 3 => (quarter, grains - 2 * quarter),
            Part::Middle | Part::Tail => (grains - quarter, quarter),
        };
        range(self.body.start() + first * grain, count * grain)
    }

    /// Does `mutation` and maps anew what it took away. The bytes are then whatever they are.
    ///
    /// # Errors
    ///
    /// [`Obstacle`] if the kernel refuses the change, or another thread took the address. The
    /// specimen may then have a hole and is good for nothing but being dropped.
    pub(crate) fn apply(&mut self, mutation: Mutation) -> Outcome {
        self.take_away(mutation)?;
        self.mend()
    }

    /// Does `mutation` and leaves the hole, if it makes one.
    pub(crate) fn take_away(&mut self, mutation: Mutation) -> Outcome {
        assert!(self.hole.is_none(), "changed before it was mended");
        if !mutation.fits(self.backing) {
            return Err(Obstacle::unsuitable(mutation.name()));
        }
        match mutation {
            Mutation::Unmap(part, by) => self.unmap(part, by),
            Mutation::MapOver(part) => self.place(self.part(part), Place::Over),
            Mutation::MoveAway => self.move_away(),
            Mutation::GrowAndMove => self.grow_and_move(),
            Mutation::Shrink => self.shrink(),
            Mutation::MoveAndKeep => self.move_and_keep(),
            Mutation::MoveOnTop => self.move_on_top(),
            Mutation::AttachOnTop(by) => {
                // SAFETY: what is replaced is this specimen's alone.
                unsafe { calls::attach(self.body, Place::Over, by) }?;
                self.patched = false;
                Ok(())
            }
            Mutation::RemapFilePages => self.swap_halves(),
            Mutation::Detach => self.detach(),
            Mutation::ShrinkBreak => self.shrink_break(),
            Mutation::PunchHole(part) => self.punch(part, calls::punch),
            Mutation::PunchInChild => self.punch(Part::Middle, calls::punch_in_child),
            Mutation::Truncate => self.truncate(),
            _ => self.change_in_place(mutation),
        }
    }

    /// Changes that leave the mapping where it is.
    fn change_in_place(&self, mutation: Mutation) -> Outcome {
        let body = self.body;
        // SAFETY: the body, or a part of it, is this specimen's alone.
        unsafe {
            match mutation {
                Mutation::Discard(part, by) => {
                    calls::advise(self.part(part), Advice::DONT_NEED, by)
                }
                Mutation::DiscardLocked => {
                    calls::lock(body);
                    let discarded = calls::advise(body, Advice::DONT_NEED_LOCKED, Call::Library);
                    calls::unlock(body);
                    discarded
                }
                Mutation::Free => calls::advise(body, Advice::FREE, Call::Library),
                Mutation::DiscardByDescriptor => {
                    calls::advise_by_descriptor(body, Advice::DONT_NEED)
                }
                Mutation::DiscardFromChild => calls::advise_parent(body, Advice::DONT_NEED),
                Mutation::GuardByDescriptor => {
                    calls::advise_by_descriptor(body, Advice::GUARD_INSTALL)?;
                    calls::advise(body, Advice::GUARD_REMOVE, Call::Library)
                }
                Mutation::PageOut => calls::advise(body, Advice::PAGE_OUT, Call::Library),
                Mutation::Populate => calls::advise(body, Advice::POPULATE_WRITE, Call::Library),
                Mutation::Collapse => calls::advise(body, Advice::COLLAPSE, Call::Library),
                Mutation::Remove => calls::advise(body, Advice::REMOVE, Call::Library),
                Mutation::RemoveInChild => calls::advise_in_child(body, Advice::REMOVE),
                Mutation::Guard(by) => {
                    calls::advise(body, Advice::GUARD_INSTALL, by)?;
                    calls::advise(body, Advice::GUARD_REMOVE, Call::Library)
                }
                Mutation::Protect => {
                    calls::protect(body, libc::PROT_READ)?;
                    calls::protect(body, READ_WRITE)
                }
                _ => {
                    calls::unmap_wrongly(body);
                    Ok(())
                }
            }
        }
    }

    fn unmap(&mut self, part: Part, by: Call) -> Outcome {
        let part = self.part(part);
        // The part is a hole from the moment of the call: any thread may map the address at once.
        self.hole = Some(part);
        // SAFETY: the part is this specimen's alone.
        unsafe { calls::unmap(part, by) }.inspect_err(|_| self.hole = None)
    }

    fn move_away(&mut self) -> Outcome {
        let target = reserve(self.body.len(), self.backing.alignment())?;
        let moved = self.move_each(target.start().next_multiple_of(self.backing.alignment()));
        // SAFETY: the target is this specimen's alone; the moved pages end with it.
        unsafe { calls::unmap(target, Call::Library) }?;
        moved
    }

    /// Moves one mapping after the other. The kernel moves several in one call too, but stops at
    /// one that is watched, and then which of them are gone is unknown.
    fn move_each(&mut self, to: usize) -> Outcome {
        let mappings = pinfold::mappings::mappings_in(self.body)
            .map_err(|error| Obstacle::from_error("/proc/self/maps", &error))?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        for part in mappings.iter().filter_map(|mapping| mapping.range.intersection(&self.body)) {
            let before = self.hole;
            // What has moved is a hole from the moment of the call.
            self.hole = AddressRange::between(self.body.start(), part.end());
            let to = to + (part.start() - self.body.start());
            // SAFETY: both ranges are this specimen's alone.
            unsafe { calls::remap(part, part.len(), flags, to) }
                .inspect_err(|_| self.hole = before)?;
        }
        Ok(())
    }

    fn grow_and_move(&mut self) -> Outcome {
        let length = self.body.len() + self.backing.grain();
        self.hole = Some(self.body);
        // SAFETY: the body is this specimen's alone, and so is what it becomes elsewhere.
        unsafe {
            let moved = calls::remap(self.body, length, libc::MREMAP_MAYMOVE, 0)
                .inspect_err(|_| self.hole = None)?;
            calls::unmap(range(moved, length), Call::Library)
        }
    }

    fn shrink(&mut self) -> Outcome {
        let tail = self.part(Part::Tail);
        if tail == self.body {
            return Err(Obstacle::taken("mremap"));
        }
        self.hole = Some(tail);
        // SAFETY: the tail is this specimen's alone.
        unsafe { calls::remap(self.body, self.body.len() - tail.len(), 0, 0) }
            .inspect_err(|_| self.hole = None)
            .map(drop)
    }

    fn move_and_keep(&self) -> Outcome {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        // SAFETY: the body is this specimen's alone, and so is the new home of its pages.
        unsafe {
            let moved = calls::remap(self.body, self.body.len(), flags, 0)?;
            calls::unmap(range(moved, self.body.len()), Call::Library)
        }
    }

    fn move_on_top(&mut self) -> Outcome {
        let mut other = Self::new(self.backing, self.body.len() / self.backing.grain())?;
        other.fill(other.body, 0);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        other.hole = Some(other.body);
        // SAFETY: both bodies are specimens' of our own; the other one's becomes a hole.
        unsafe { calls::remap(other.body, other.body.len(), flags, self.body.start()) }
            .inspect_err(|_| {
                other.hole = None;
                // What was here may have gone before the kernel found a reason to refuse.
                self.hole = Some(self.body);
            })?;
        self.file = other.file.take();
        self.patched = false;
        Ok(())
    }

    fn detach(&mut self) -> Outcome {
        self.hole = Some(self.body);
        // SAFETY: the segment is this specimen's alone.
        unsafe { calls::detach(self.body) }.inspect_err(|_| self.hole = None)
    }

    /// Only if the break was not moved since: what lies above it is not this specimen's.
    fn shrink_break(&mut self) -> Outcome {
        if calls::program_break() != self.body.end() {
            return Err(Obstacle::taken("brk"));
        }
        self.hole = Some(self.body);
        // SAFETY: the heap ends with the body.
        unsafe { calls::move_break(-signed(self.body.len())) }
            .inspect_err(|_| self.hole = None)
            .map(drop)
    }

    fn punch(&self, part: Part, by: fn(&OwnedFd, usize, usize) -> Outcome) -> Outcome {
        let part = self.part(part);
        match &self.file {
            Some(file) => by(file, part.start() - self.body.start(), part.len()),
            None => Ok(()),
        }
    }

    /// The pages of the first half where those of the second were, and the other way round.
    ///
    /// A part that was mapped anew has a file of its own, which is no longer than that part: in its
    /// place the other half's pages would lie behind the file's end, and touching them raises
    /// `SIGBUS`.
    fn swap_halves(&self) -> Outcome {
        if self.patched {
            return Err(Obstacle::unsuitable("remap_file_pages"));
        }
        let pages = self.body.len() / self.backing.grain() / 2;
        let half = pages * self.backing.grain();
        if half == 0 {
            return Err(Obstacle::unsuitable("remap_file_pages"));
        }
        let first = range(self.body.start(), half);
        let second = range(first.end(), half);
        // SAFETY: both halves are this specimen's alone.
        unsafe {
            calls::remap_pages(first, pages)?;
            calls::remap_pages(second, 0)
        }
    }

    fn truncate(&self) -> Outcome {
        match &self.file {
            Some(file) => {
                calls::resize(file, 0)?;
                calls::resize(file, self.body.len())
            }
            None => Ok(()),
        }
    }

    /// Maps the hole anew, if there is one.
    ///
    /// # Errors
    ///
    /// As [`apply`](Self::apply).
    pub(crate) fn mend(&mut self) -> Outcome {
        match self.hole {
            None => Ok(()),
            Some(hole) => {
                self.place(hole, Place::Free)?;
                self.hole = None;
                Ok(())
            }
        }
    }

    /// Takes the memory that another thread mapped into the hole.
    pub(crate) fn adopt(&mut self, foothold: Foothold) {
        if self.hole == Some(foothold.0) {
            std::mem::forget(foothold);
            self.hole = None;
        }
    }

    /// New memory of the specimen's kind at `part`.
    fn place(&mut self, part: AddressRange, place: Place) -> Outcome {
        self.map_new(part, place)?;
        self.patched = part != self.body;
        Ok(())
    }

    fn map_new(&mut self, part: AddressRange, place: Place) -> Outcome {
        match self.backing {
            Backing::Anonymous => {
                self.map(part, place, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
            }
            Backing::TransparentHuge => {
                self.map(part, place, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)?;
                // SAFETY: the part was just mapped for this specimen.
                unsafe { calls::advise(part, Advice::HUGE_PAGE, Call::Library) }
            }
            Backing::Hugetlb => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
                self.map(part, place, flags | libc::MAP_HUGE_2MB, None)
            }
            Backing::SharedAnonymous => {
                self.map(part, place, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None)
            }
            Backing::MemfdShared => {
                self.place_file(part, place, libc::MAP_SHARED, calls::memory_file)
            }
            Backing::MemfdPrivate => {
                self.place_file(part, place, libc::MAP_PRIVATE, calls::memory_file)
            }
            Backing::FilePrivate => {
                self.place_file(part, place, libc::MAP_PRIVATE, calls::disk_file)
            }
            Backing::SystemV => {
                // SAFETY: what is replaced is this specimen's alone.
                let attached = unsafe { calls::attach(part, place, Call::Library) };
                attached.inspect_err(|_| self.refused(part, place))
            }
            Backing::Heap => regrow(part),
        }
    }

    /// A mapping of a new file; the file of the whole body is kept, to be changed through it.
    fn place_file(
        &mut self,
        part: AddressRange,
        place: Place,
        flags: libc::c_int,
        create: fn(usize) -> Outcome<OwnedFd>,
    ) -> Outcome {
        let file = create(part.len())?;
        self.map(part, place, flags, Some(&file))?;
        if part == self.body {
            self.file = Some(file);
        }
        Ok(())
    }

    fn map(
        &mut self,
        part: AddressRange,
        place: Place,
        flags: libc::c_int,
        file: Option<&OwnedFd>,
    ) -> Outcome {
        map(part, place, flags, file).inspect_err(|_| self.refused(part, place))
    }

    /// A mapping over another that the kernel refuses late (huge pages where there are none)
    /// leaves a gap, which any thread may map. Takes it back, or abandons it for good.
    fn refused(&mut self, part: AddressRange, place: Place) {
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        if place == Place::Over && map(part, Place::Free, private, None).is_err() {
            // Still ours, or another thread's by now: that cannot be told, so it is not ours.
            self.hole = Some(part);
        }
    }

    fn give_back(&self, part: Option<AddressRange>) {
        if let Some(part) = part {
            // SAFETY: the part is this specimen's alone and no hole; nothing can be done about a
            // refusal (the table of mappings is full), and a leak does no harm.
            let _ = unsafe { calls::unmap(part, Call::Library) };
        }
    }

    fn give_back_heap(&self) {
        if self.hole.is_none() && calls::program_break() == self.body.end() {
            // SAFETY: the heap ends with the body.
            let _ = unsafe { calls::move_break(-signed(self.body.len())) };
        }
    }
}

impl Drop for Specimen {
    fn drop(&mut self) {
        if self.backing == Backing::Heap {
            return self.give_back_heap();
        }
        match self.hole {
            None => self.give_back(Some(self.ground)),
            Some(hole) => {
                self.give_back(AddressRange::between(self.ground.start(), hole.start()));
                self.give_back(AddressRange::between(hole.end(), self.ground.end()));
            }
        }
    }
}

/// The words of the pattern of `key`.
fn pattern_words(key: u64) -> impl Iterator<Item = u64> {
    let mut state = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    // A step is an addition, so that making bytes costs no more than moving them.
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x5851_f42d_4c95_7f2d);
        state ^ (state >> 29)
    })
}

/// Private memory that a thread maps at an address which another one has just released.
#[derive(Debug)]
pub(crate) struct Foothold(AddressRange);

impl Foothold {
    /// Private memory at `place`, if that is free by now.
    pub(crate) fn take(place: AddressRange) -> Outcome<Self> {
        map(place, Place::Free, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)?;
        Ok(Self(place))
    }

    /// Writes the pattern of `key` over it.
    pub(crate) fn fill(&self, key: u64) {
        // SAFETY: it was mapped for this foothold alone.
        unsafe { calls::store(self.0, pattern_words(key)) };
    }
}

impl Drop for Foothold {
    fn drop(&mut self) {
        // SAFETY: it was mapped for this foothold alone; as for a specimen, a leak does no harm.
        let _ = unsafe { calls::unmap(self.0, Call::Library) };
    }
}

/// Mappings without access, made until the kernel allows no more.
#[derive(Debug)]
pub(crate) struct MappingFlood(AddressRange);

impl MappingFlood {
    /// Splits one mapping into as many as there may be, and leaves room for `spare` more.
    ///
    /// From then on the process allocates from its heaps alone, however large the block.
    pub(crate) fn new(spare: usize) -> Outcome<Self> {
        calls::allocate_without_mapping();
        /// Twice the default `vm.max_map_count`, in pages.
        const PAGES: usize = 1 << 17;
        let page = Backing::Anonymous.grain();
        let ground = reserve(PAGES * page, page)?;
        let split = |number: usize, protection| {
            // SAFETY: the page lies in the ground, which was just mapped.
            unsafe { calls::protect(range(ground.start() + number * page, page), protection) }
        };
        let made = (1..PAGES).step_by(2).take_while(|&n| split(n, libc::PROT_READ).is_ok()).count();
        // Joining a page with its neighbours again frees two places in the table.
        for number in 0..made.min(spare.div_ceil(2)) {
            split(2 * number + 1, libc::PROT_NONE)?;
        }
        Ok(Self(ground))
    }
}

impl Drop for MappingFlood {
    fn drop(&mut self) {
        // SAFETY: it was mapped for this flood alone.
        let _ = unsafe { calls::unmap(self.0, Call::Library) };
    }
}

fn map(part: AddressRange, place: Place, flags: libc::c_int, file: Option<&OwnedFd>) -> Outcome {
    // SAFETY: private to this file, and called for a specimen's own range or for a free one.
    unsafe { calls::map(part.start(), part.len(), place, READ_WRITE, flags, file) }.map(drop)
}

fn regrow(part: AddressRange) -> Outcome {
    if calls::program_break() != part.start() {
        return Err(Obstacle::taken("brk"));
    }
    // SAFETY: the heap grows; nothing goes.
    unsafe { calls::move_break(signed(part.len())) }.map(drop)
}

/// Address space for `length` bytes at a multiple of `alignment`, with guards around them.
fn reserve(length: usize, alignment: usize) -> Outcome<AddressRange> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let bytes = length + 3 * alignment;
    // SAFETY: new memory anywhere replaces nothing.
    let start = unsafe { calls::map(0, bytes, Place::Anywhere, libc::PROT_NONE, flags, None) }?;
    Ok(range(start, bytes))
}

fn signed(length: usize) -> isize {
    isize::try_from(length).unwrap_or(0)
}

/// A range that the kernel gave or that lies inside of one, so neither empty nor wrapping.
fn range(start: usize, length: usize) -> AddressRange {
    AddressRange::new(start, length).expect("a mapping is neither empty nor wraps")
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::monitor::Userfaultfd;
    use pinfold::{Monitor, Watch};

    /// Whether another mapping could have been made at `place`.
    fn is_free(place: AddressRange) -> bool {
        Foothold::take(place).is_ok()
    }

    /// The kernel finds out that it has no huge pages after it has unmapped what was there.
    #[test]
    fn a_refused_placement_leaves_no_gap_that_is_taken_for_ours() {
        // As many huge pages as no machine for tests has.
        let mut specimen = Specimen::new(Backing::Anonymous, 1).unwrap();
        let length = 1 << 40;
        specimen.ground = reserve(length, 2 << 20).unwrap();
        specimen.body = range(specimen.ground.start().next_multiple_of(2 << 20), length);
        specimen.backing = Backing::Hugetlb;
        let body = specimen.body();
        if specimen.apply(Mutation::MapOver(Part::Whole)).is_ok() {
            return eprintln!("skipped: this machine has a tebibyte of huge pages");
        }
        assert!(specimen.hole.is_some() || !is_free(body));
    }

    /// Every page can be touched after any two changes, whatever they did to the file behind it.
    #[test]
    fn two_changes_leave_no_page_behind_the_end_of_its_file() {
        for backing in Backing::ALL.into_iter().filter(|&backing| backing != Backing::Heap) {
            for first in Mutation::ALL.into_iter().filter(|first| first.fits(backing)) {
                // In a process of its own, because a page that cannot be touched ends it.
                let ended = crate::change::in_child(|| touched_after(backing, first)).unwrap();
                assert_eq!(ended, Some(0), "{first} and another change of {backing}");
            }
        }
    }

    /// Two pages: their halves are the smallest parts there are.
    fn touched_after(backing: Backing, first: Mutation) -> u8 {
        for second in Mutation::ALL.into_iter().filter(|second| second.fits(backing)) {
            let Ok(mut specimen) = Specimen::new(backing, 2) else { return 0 };
            specimen.fill(specimen.body(), 1);
            // Refused changes leave the memory as it is, or a hole.
            let changed = [first, second].into_iter().all(|change| specimen.apply(change).is_ok());
            if changed && specimen.populate().is_ok() {
                specimen.fill(specimen.body(), 2);
            }
        }
        0
    }

    #[test]
    fn partly_watched_memory_moves_away_as_a_whole() {
        let monitor = match Userfaultfd::new() {
            Ok(monitor) => monitor,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let mut specimen = Specimen::new(Backing::Anonymous, 16).unwrap();
        let body = specimen.body();
        specimen.fill(body, 1);
        assert_eq!(monitor.watch(body), Watch::Covered);
        specimen.apply(Mutation::Unmap(Part::Head, Call::Library)).unwrap();
        specimen.apply(Mutation::MoveAway).unwrap();
        specimen.fill(body, 2);
        assert_eq!(specimen.bytes(body), Specimen::pattern(body, 2));
    }
}
