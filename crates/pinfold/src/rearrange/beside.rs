//! Huge pages made elsewhere, which then take the place of a region's own.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to let a caller promise what copying relies on ([`HugePageWay::by_copy`]), to copy and
//! replace the pages of a region on that promise, and to unmap what is left of its own mapping.

#![allow(unsafe_code)]

use super::RearrangeError;
use super::collapse::{Obstacle, collapse, is_mapped};
use super::pages::{self, Entry, ResidentPages};
use crate::{AddressRange, MappingKind, mappings};
use pinfold_kernel::{Errno, memory, numa};

/// How memory gets into huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HugePageWay(pub(super) Kind);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    InPlace,
    ByCopy(CopyWord),
}

/// The word of [`HugePageWay::by_copy`]'s caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CopyWord(());

impl HugePageWay {
    /// By the kernel (`MADV_COLLAPSE`, Linux 6.1), while the program uses the memory.
    pub const IN_PLACE: Self = Self(Kind::InPlace);

    /// By copying into huge pages that were made elsewhere, which then take the old ones' place in one
    /// step. Needs room for a huge page (in steps) or for the whole region.
    ///
    /// Only plain private memory, readable and writable, is replaced; what is locked by the
    /// program, kept from children, shared, a file's or has guard pages (`MADV_GUARD_INSTALL`) is left and told.
    /// Advice that was given for the old pages is forgotten; the new ones are advised to be huge.
    ///
    /// # Safety
    ///
    /// For as long as this value is in use for a region: no thread writes to it, maps or unmaps
    /// anything in it, nor protects it or puts guard pages into it; no device writes to it but through
    /// the suspended cache, by connections that were named when it was suspended; no request is in flight on a lease that was handed over, unless the device sees to that itself
    /// (as [`IoUring::with_tags`](crate::registrar::IoUring::with_tags) does); no thread calls
    /// [`expire_suspensions`](pinfold_core::Cache::expire_suspensions) meanwhile; and no registration
    /// of it by others (another library's cache, which does not hear of the exchange; a device of the
    /// program's own) is used again.
    pub const unsafe fn by_copy() -> Self {
        Self(Kind::ByCopy(CopyWord(())))
    }
}

/// Room for a region's blocks, each at the same distance from its place: so what takes the place
/// of neighbours becomes one mapping again.
pub(super) struct Beside {
    /// What is still ours of the room: the rest has taken its place, and any other mapping
    /// may get those addresses.
    ours: Vec<AddressRange>,
    /// What is to be added to an address of the region to get into the room.
    distance: usize,
    /// How long a block is.
    bytes: usize,
    /// The region for which the word was given.
    region: AddressRange,
    /// The mappings of the region whose pages can be replaced without a change of kind.
    plain: Vec<AddressRange>,
    /// The blocks that can be switched, each once.
    prepared: Vec<AddressRange>,
}

/// The flags of memory that is what `mmap` gives, but for advice about huge pages and the
/// monitor's own mark: readable, writable, may be either or executable, accounted, soft-dirty, watched.
const PLAIN: [&str; 9] = ["rd", "wr", "mr", "mw", "me", "ac", "sd", "hg", "uw"];

/// Neither flags nor a protection key nor a memory policy of its own: new memory has none of them.
fn is_plain(entry: &Entry) -> bool {
    let has = |wanted: &str| entry.flags.iter().any(|flag| flag == wanted);
    let flags = entry.flags.iter().all(|flag| PLAIN.contains(&flag.as_str()));
    let plain = has("rd") && has("wr") && flags && entry.key == 0;
    plain && !numa::has_policy(entry.mapping.start())
}

impl Beside {
    /// Of a region for which the word was given.
    pub(super) fn new(
        range: AddressRange,
        bytes: usize,
        _: CopyWord,
    ) -> Result<Self, RearrangeError> {
        let failed = |operation| move |Errno(errno)| RearrangeError::Os { operation, errno };
        let plain = plain_parts(range).map_err(failed("reading /proc/self/smaps"))?;
        let no_room = || RearrangeError::Os { operation: "mmap", errno: libc::ENOMEM };
        // Whole blocks, and one to align by.
        let whole = range.len().checked_next_multiple_of(bytes);
        let length = whole.and_then(|whole| whole.checked_add(2 * bytes)).ok_or_else(no_room)?;
        let room = memory::map(length).map_err(failed("mmap"))?;
        let first = range.start() / bytes * bytes;
        let distance = room.start().next_multiple_of(bytes).wrapping_sub(first);
        let (ours, prepared) = (vec![room], Vec::new());
        Ok(Self { ours, distance, bytes, region: range, plain, prepared })
    }

    /// Where the copy of the region's block is, which is ours still.
    fn copy_of(&self, block: AddressRange) -> Option<AddressRange> {
        let start = block.start().wrapping_add(self.distance);
        let copy = AddressRange::between(start, start.checked_add(self.bytes)?)?;
        let is_whole = block.len() == self.bytes && self.region.contains(&block);
        (is_whole && self.ours.iter().any(|ours| ours.contains(&copy))).then_some(copy)
    }

    /// Makes a huge page for `block`. No `get` waits for it.
    pub(super) fn prepare(&mut self, block: AddressRange) -> Result<(), Obstacle> {
        if !is_mapped(block) {
            return Err(Obstacle::Unmapped);
        }
        if !self.plain.iter().any(|plain| plain.contains(&block)) {
            return Err(Obstacle::OtherKind);
        }
        look_at(block)?;
        let copy = self.copy_of(block).ok_or(Obstacle::Partial)?;
        Self::make(copy).inspect_err(|_| {
            // It waits for nothing, and over many blocks it would be as much again as the region.
            // SAFETY: ours, and nothing is in it yet.
            let _ = unsafe { memory::discard(copy) };
        })?;
        // Devices may write to the block still, so this copy counts for nothing; but it brings
        // both into the processor's caches, which makes the one that counts three times as fast.
        // SAFETY: the copy is ours, each page of the block can be read, and the program does not write to it: that word was
        // given to `new`.
        unsafe { memory::copy(block, copy) };
        self.prepared.push(block);
        Ok(())
    }

    fn make(copy: AddressRange) -> Result<(), Obstacle> {
        // Where huge pages are not made at a fault, they are made of small ones.
        let _ = memory::advise_huge(copy, true);
        memory::populate(copy, true).map_err(|Errno(errno)| Obstacle::NoHugePage { errno })?;
        let is_huge = ResidentPages::of(copy).is_some_and(|it| it.huge == copy.len());
        if is_huge { Ok(()) } else { collapse(copy, true) }
    }

    /// Copies the content of a block that was prepared and puts the huge page in its place.
    pub(super) fn switch(&mut self, block: AddressRange) -> Result<(), Obstacle> {
        let at = self.prepared.iter().position(|prepared| *prepared == block);
        self.prepared.swap_remove(at.ok_or(Obstacle::Partial)?);
        let copy = self.copy_of(block).ok_or(Obstacle::Partial)?;
        // SAFETY: the copy is ours, each page of the block could be read when it was prepared, and no thread writes to
        // it, unmaps it or guards it since: that word was given to `new`.
        unsafe { memory::copy(block, copy) };
        // SAFETY: as above; the old pages' content is in the new ones.
        let exchanged = unsafe { memory::move_over(copy, block) };
        match exchanged {
            Ok(()) => {
                self.give_away(copy);
                Ok(())
            }
            Err(Errno(errno)) => {
                // SAFETY: as above.
                if unsafe { mend(block, copy) } {
                    // SAFETY: ours, and the block holds its content itself.
                    let _ = unsafe { memory::discard(copy) };
                    return Err(Obstacle::Os { operation: "mremap", errno });
                }
                // The only copy there is: the program's from now on.
                self.give_away(copy);
                Err(Obstacle::Displaced { to: copy, errno })
            }
        }
    }

    fn give_away(&mut self, copy: AddressRange) {
        let without = |part: AddressRange| {
            let before = AddressRange::between(part.start(), part.end().min(copy.start()));
            let behind = AddressRange::between(part.start().max(copy.end()), part.end());
            before.into_iter().chain(behind)
        };
        self.ours = self.ours.drain(..).flat_map(without).collect();
    }
}

/// Touches every page of `block`. To copy one that raises a signal would end the process: a guard page, which the
/// kernel does not list in the flags of its mapping everywhere, or one whose memory has failed.
fn look_at(block: AddressRange) -> Result<(), Obstacle> {
    match memory::populate(block, false) {
        // Before Linux 5.14, where there are no guard pages either.
        Ok(()) | Err(Errno(libc::EINVAL)) => Ok(()),
        Err(Errno(libc::EFAULT)) => Err(Obstacle::OtherKind),
        Err(Errno(errno)) => Err(Obstacle::Os { operation: "madvise(MADV_POPULATE_READ)", errno }),
    }
}

/// The kernel unmaps the old pages before it moves the new ones, and may run out of memory in
/// between: then the content comes back in pages of any size. False if the block does not surely
/// hold its content.
///
/// # Safety
///
/// The block's content is in `copy`, what stood in the block was the caller's, and no thread changes
/// mappings there.
unsafe fn mend(block: AddressRange, copy: AddressRange) -> bool {
    // Mapping asks the kernel alone whether there is a hole.
    match memory::map_if_free(block) {
        Ok(()) => {
            // SAFETY: `copy` is mapped because nothing was moved, and the block was just made.
            unsafe { memory::copy(copy, block) };
            true
        }
        // It was not unmapped, or something else has got the addresses.
        Err(Errno(libc::EEXIST)) if is_surely_readable(block) => {
            // SAFETY: both are mapped and readable, on the caller's word for as long as it takes.
            unsafe { memory::is_same(block, copy) }
        }
        Err(_) => false,
    }
}

fn is_surely_readable(block: AddressRange) -> bool {
    mappings::mappings_in(block).is_ok_and(|mappings| {
        let readable = mappings.iter().filter(|mapping| mapping.readable);
        let parts = readable.filter_map(|mapping| mapping.range.intersection(&block));
        parts.map(|part| part.len()).sum::<usize>() == block.len()
    })
}

/// The parts of `range` that are plain memory; neighbours are one.
fn plain_parts(range: AddressRange) -> Result<Vec<AddressRange>, Errno> {
    // The flags do not tell a file's private mapping.
    let mut private = mappings::mappings_in(range)
        .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    private.retain(|mapping| mapping.kind == MappingKind::PrivateAnonymous);
    let is_private =
        |part: &AddressRange| private.iter().any(|mapping| mapping.range.contains(part));
    let mut parts: Vec<AddressRange> = Vec::new();
    for Entry { mapping, .. } in pages::entries(range)?.into_iter().filter(is_plain) {
        if !is_private(&mapping) {
            continue;
        }
        let last = parts.pop_if(|last| last.end() == mapping.start());
        let start = last.map_or(mapping.start(), |last| last.start());
        parts.extend(AddressRange::between(start, mapping.end()));
    }
    Ok(parts)
}

impl Drop for Beside {
    fn drop(&mut self) {
        for &part in &self.ours {
            // SAFETY: ours, and no other code knows of it.
            unsafe { memory::unmap(part) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `MADV_GUARD_INSTALL` (Linux 6.13).
    const GUARD_INSTALL: libc::c_int = 102;

    /// Two pages, which hold what is told; the second is what was copied.
    fn pair(bytes: [u8; 2]) -> (AddressRange, AddressRange) {
        let start = memory::map(2 << 12).unwrap().start();
        let page = |number: usize| AddressRange::new(start + (number << 12), 1 << 12).unwrap();
        for (number, byte) in bytes.into_iter().enumerate() {
            // SAFETY: this test's own memory.
            unsafe { pointer(page(number)).write(byte) };
        }
        (page(0), page(1))
    }

    fn pointer(range: AddressRange) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(range.start())
    }

    #[test]
    fn a_hole_is_mended_from_the_copy() {
        let (block, copy) = pair([1, 7]);
        // SAFETY: this test's own memory; the hole is one for a moment, and if another test's
        // mapping should fall into it, that is left alone and has other bytes.
        unsafe {
            memory::unmap(block);
            if mend(block, copy) {
                assert_eq!(pointer(block).read(), 7);
            }
        }
    }

    #[test]
    fn what_stands_there_is_whole_only_if_it_has_the_same_bytes() {
        let (block, copy) = pair([7, 7]);
        let (other, its_copy) = pair([1, 7]);
        // SAFETY: this test's own memory.
        unsafe {
            assert!(mend(block, copy));
            assert!(!mend(other, its_copy));
            assert_eq!(pointer(other).read(), 1, "not the tool's to write to");
        }
    }

    #[test]
    fn memory_with_a_policy_of_its_own_is_not_plain() {
        // Other tests map and unmap memory beside it, which would become one mapping with it and another one again.
        let whole = memory::map(3 << 12).unwrap();
        let range = AddressRange::new(whole.start() + (1 << 12), 1 << 12).unwrap();
        for wall in [whole.start(), range.end()] {
            let wall = AddressRange::new(wall, 1 << 12).unwrap();
            // SAFETY: this test's own memory.
            let done = unsafe { libc::mprotect(pointer(wall).cast(), 1 << 12, libc::PROT_NONE) };
            assert_eq!(done, 0);
        }
        assert_eq!(plain_parts(range).unwrap().len(), 1);
        if let Err(Errno(errno)) = numa::prefer_local(range) {
            eprintln!("skipped: no memory policies ({errno})");
            return;
        }
        assert_eq!(plain_parts(range).unwrap(), []);
    }

    /// Where the kernel does not list the guard among the mapping's flags, to copy the page would end the process.
    #[test]
    fn memory_with_a_guard_page_is_not_plain() {
        const BYTES: usize = 2 << 20;
        let whole = memory::map(2 * BYTES).unwrap();
        let block = AddressRange::new(whole.start().next_multiple_of(BYTES), BYTES).unwrap();
        let page = AddressRange::new(block.start() + BYTES / 2, 1 << 12).unwrap();
        // SAFETY: this test's own memory, which nothing reads.
        if unsafe { libc::madvise(pointer(page).cast(), page.len(), GUARD_INSTALL) } != 0 {
            eprintln!("skipped: no guard pages before Linux 6.13");
            return;
        }
        // No other thread knows of the block.
        let mut beside = Beside::new(block, BYTES, CopyWord(())).unwrap();
        beside.plain = vec![block];
        assert!(matches!(beside.prepare(block), Err(Obstacle::OtherKind)));
    }

    #[test]
    fn what_was_given_away_is_not_unmapped() {
        let range = AddressRange::new(1 << 30, 4 << 20).unwrap();
        let gone = AddressRange::new((1 << 30) + (1 << 20), 1 << 20).unwrap();
        let mut beside = Beside {
            ours: vec![range],
            distance: 0,
            bytes: 1 << 20,
            region: range,
            plain: vec![],
            prepared: vec![],
        };
        beside.give_away(gone);
        beside.give_away(gone);
        let left: Vec<_> = std::mem::take(&mut beside.ours);
        assert_eq!(left.iter().map(AddressRange::len).sum::<usize>(), 3 << 20);
        assert!(left.iter().all(|part| !part.overlaps(&gone)));
    }
}
