//! The sender's memory: blocks whose pages are changed in every way that a program may change its
//! own, without the knowledge of the cache that registered them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls that allocate, move, replace, discard and register memory.
//! A [`Block`] owns its bytes, no reference into them exists, and they are only ever written
//! through [`Block::write`], which checks its bounds; so whatever a change does to the pages, no
//! Rust value is harmed. The device reads them by address, through registrations that mostly are made elsewhere.

#![allow(unsafe_code)]

use pinfold::{Access, AddressRange, Registrar};
use std::alloc::{Layout, alloc, dealloc, realloc};
use std::io;
use std::ptr::NonNull;

/// The smallest page of every machine this runs on; larger pages only make less discardable.
pub(crate) const PAGE: usize = 4096;
/// What `malloc` aligns to at least.
const ALIGNMENT: usize = 16;

/// Where a block comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// The program's allocator.
    Heap,
    /// A mapping of its own.
    Mapping,
}

/// Memory that the sender owns.
#[derive(Debug)]
pub(crate) struct Block {
    origin: Origin,
    start: NonNull<u8>,
    length: usize,
}

impl Block {
    /// A block of `length` bytes, which is not zero.
    pub(crate) fn new(origin: Origin, length: usize) -> io::Result<Self> {
        let start = match origin {
            Origin::Heap => heap(length)?,
            Origin::Mapping => map(std::ptr::null_mut(), length, 0)?,
        };
        Ok(Self { origin, start, length })
    }

    /// The address of the first byte, for a device that reads memory the compiler cannot see it
    /// reading.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let room = self.length.checked_sub(offset);
        assert!(room.is_some_and(|room| bytes.len() <= room), "a write inside of the block");
        // SAFETY: the range is inside of the block, which is writable and not borrowed.
        unsafe {
            let to = self.start.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies `length` bytes from `offset` of `from` to `at` of this block.
    pub(crate) fn copy_from(&mut self, at: usize, from: &Self, offset: usize, length: usize) {
        assert!(offset + length <= from.length && at + length <= self.length, "inside of both");
        // SAFETY: both ranges are inside of their blocks, which do not overlap; bytes that were
        // never written are copied as they are and read by no thread.
        unsafe {
            let from = from.start.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, self.start.as_ptr().add(at), length);
        }
    }

    /// Calls `use_it` while the block is registered.
    ///
    /// # Errors
    ///
    /// What the registrar or `use_it` says, in words.
    pub(crate) fn registered<R: Registrar>(
        &self,
        registrar: &R,
        access: Access,
        use_it: impl FnOnce(R::Handle) -> Result<(), String>,
    ) -> Result<(), String> {
        let range = AddressRange::new(self.address(), self.length).map_err(|e| e.to_string())?;
        if range != range.page_aligned(PAGE) {
            return Err("a part of a page is not the block's own".into());
        }
        // SAFETY: the block is borrowed until this function returns, and no reference into it exists.
        let handle = unsafe { registrar.register(range, access) }.map_err(|e| e.to_string())?;
        let used = use_it(handle);
        // SAFETY: registered above, and `use_it` waited for what it began.
        unsafe { registrar.deregister(handle, range) }.map_err(|e| e.to_string())?;
        used
    }

    /// Frees the block and allocates one of `length` bytes, usually at the same address.
    pub(crate) fn reallocate(&mut self, length: usize) -> io::Result<()> {
        let origin = self.origin;
        self.free();
        // The old start dangles until here; an error leaves an empty block, which frees nothing.
        *self = Self::new(origin, length)?;
        Ok(())
    }

    /// Grows or shrinks the block, which may move it and keeps what fits of its bytes.
    pub(crate) fn resize(&mut self, length: usize) -> io::Result<()> {
        self.start = match self.origin {
            Origin::Heap => self.heap_resize(length)?,
            Origin::Mapping => self.remap(length)?,
        };
        self.length = length;
        Ok(())
    }

    /// Maps new pages over the block; of a heap block, over the whole pages inside of it.
    pub(crate) fn map_over(&mut self) -> io::Result<()> {
        let Some((start, length)) = self.whole_pages() else { return Ok(()) };
        map(start, length, libc::MAP_FIXED).map(drop)
    }

    /// Tells the kernel that the bytes are not needed: the pages go, the addresses stay.
    pub(crate) fn discard(&mut self) -> io::Result<()> {
        let Some((start, length)) = self.whole_pages() else { return Ok(()) };
        // SAFETY: the pages are the block's own and not borrowed; they read as zero then.
        let outcome = unsafe { libc::madvise(start.cast(), length, libc::MADV_DONTNEED) };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The whole pages inside of the block, which hold nothing that is not the block's.
    fn whole_pages(&self) -> Option<(*mut u8, usize)> {
        let skip = self.start.as_ptr().align_offset(PAGE);
        let length = self.length.checked_sub(skip)? / PAGE * PAGE;
        // SAFETY: `skip` is at most the block's length.
        (length > 0).then(|| (unsafe { self.start.as_ptr().add(skip) }, length))
    }

    fn heap_resize(&mut self, length: usize) -> io::Result<NonNull<u8>> {
        let layout = layout(self.length)?;
        let wanted = self::layout(length)?;
        // SAFETY: the block came from this allocator with this layout, and the new size is neither
        // zero nor too large, as `layout` found.
        NonNull::new(unsafe { realloc(self.start.as_ptr(), layout, wanted.size()) })
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn remap(&mut self, length: usize) -> io::Result<NonNull<u8>> {
        let old = self.start.as_ptr().cast();
        // SAFETY: the mapping is the block's own and not borrowed.
        let new = unsafe { libc::mremap(old, self.length, length, libc::MREMAP_MAYMOVE) };
        mapped(new)
    }

    fn free(&mut self) {
        let length = std::mem::take(&mut self.length);
        match (self.origin, layout(length)) {
            // SAFETY: the block came from this allocator with this layout; its length is zero now,
            // so it is not freed again.
            (Origin::Heap, Ok(layout)) => unsafe { dealloc(self.start.as_ptr(), layout) },
            (Origin::Mapping, Ok(_)) => {
                // SAFETY: the mapping is the block's own, and forgotten with its length.
                let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), length) };
            }
            (_, Err(_)) => {}
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.free();
    }
}

/// The layout of a block that is neither empty nor too large.
fn layout(length: usize) -> io::Result<Layout> {
    match Layout::from_size_align(length, ALIGNMENT) {
        Ok(layout) if length > 0 => Ok(layout),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn heap(length: usize) -> io::Result<NonNull<u8>> {
    let layout = layout(length)?;
    // SAFETY: the layout is not empty.
    NonNull::new(unsafe { alloc(layout) }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Maps `length` bytes, anywhere or, with `MAP_FIXED`, over pages that the caller owns.
fn map(hint: *mut u8, length: usize, flags: i32) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: new pages, or pages of a block that is not borrowed.
    mapped(unsafe { libc::mmap(hint.cast(), length, protection, flags, -1, 0) })
}

fn mapped(start: *mut libc::c_void) -> io::Result<NonNull<u8>> {
    let failed = start == libc::MAP_FAILED;
    match NonNull::new(start.cast::<u8>()) {
        Some(start) if !failed => Ok(start),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_survives_every_change() {
        for origin in [Origin::Heap, Origin::Mapping] {
            let mut block = Block::new(origin, 5 * PAGE).unwrap();
            block.write(5 * PAGE - 3, b"end");
            block.resize(300 * PAGE).unwrap();
            block.discard().unwrap();
            block.map_over().unwrap();
            block.write(299 * PAGE, &[1; PAGE]);
            block.reallocate(PAGE).unwrap();
            assert_eq!(block.length(), PAGE);
            block.write(0, &[2; PAGE]);
        }
    }

    #[test]
    fn an_empty_block_is_refused() {
        assert!(Block::new(Origin::Heap, 0).is_err());
        assert!(Block::new(Origin::Mapping, 0).is_err());
    }

    #[test]
    #[should_panic(expected = "inside of the block")]
    fn a_write_past_the_end_is_refused() {
        Block::new(Origin::Heap, 16).unwrap().write(10, &[0; 7]);
    }
}
