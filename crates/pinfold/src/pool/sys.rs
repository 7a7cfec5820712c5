//! The system calls of the pools' memory, one small function each.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. What is changed
//! here is memory that a [`Mapping`] owns; who hands out parts of it keeps the mapping.

#![allow(unsafe_code)]

pub(super) use crate::sys::Errno;
use crate::sys::last_errno;
use crate::{AddressRange, pagemap};
use std::ptr::{self, NonNull};

/// Memory that is mapped, readable and writable, until this is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; through `&Mapping` nothing of its contents is reached.
unsafe impl Sync for Mapping {}

const RIGHTS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const KIND: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

impl Mapping {
    /// Maps zeros at an address of the kernel's choice.
    fn new(bytes: usize, kind: libc::c_int) -> Result<Self, Errno> {
        // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, RIGHTS, KIND | kind, -1, 0) };
        match NonNull::new(start) {
            Some(mapped) if start != libc::MAP_FAILED => Ok(Self { start: mapped.cast(), bytes }),
            _ => Err(last_errno()),
        }
    }

    /// Maps zeros in huge pages of 2 MiB that the system has set aside. `bytes` is a multiple of
    /// that, and so is the address.
    pub(super) fn set_aside(bytes: usize) -> Result<Self, Errno> {
        Self::new(bytes, libc::MAP_HUGETLB | libc::MAP_HUGE_2MB)
    }

    /// Maps zeros at a multiple of `align`, a power of two of at least a page.
    pub(super) fn aligned(bytes: usize, align: usize) -> Result<Self, Errno> {
        let all = bytes.checked_add(align).ok_or(Errno(libc::ENOMEM))?;
        let whole = Self::new(all, 0)?;
        let before = whole.start.as_ptr().align_offset(align);
        let rest = whole.without_first(before)?;
        rest.cut_to(bytes)
    }

    /// Unmaps the beginning.
    fn without_first(self, bytes: usize) -> Result<Self, Errno> {
        let (first, rest) = self.split(bytes);
        drop(first);
        Ok(rest)
    }

    /// Unmaps the end.
    fn cut_to(self, bytes: usize) -> Result<Self, Errno> {
        let (first, rest) = self.split(bytes);
        drop(rest);
        Ok(first)
    }

    /// Two that own their parts; one of them may be of no bytes.
    fn split(self, at: usize) -> (Self, Self) {
        let whole = std::mem::ManuallyDrop::new(self);
        let at = at.min(whole.bytes);
        // SAFETY: within the mapping or at its end.
        let behind = unsafe { whole.start.add(at) };
        (Self { start: whole.start, bytes: at }, Self { start: behind, bytes: whole.bytes - at })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Asks for huge pages, or for none.
    pub(super) fn want_huge_pages(&self, wanted: bool) -> Result<(), Errno> {
        self.advise(if wanted { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
    }

    /// From now on a forked child finds zeros here.
    pub(super) fn wipe_on_fork(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_WIPEONFORK)
    }

    /// From now on a forked child finds nothing here.
    pub(super) fn leave_out_of_forks(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_DONTFORK)
    }

    /// Brings every page in, to be written; unlike a first touch it fails where there is none.
    ///
    /// `EINVAL` before Linux 5.14.
    pub(super) fn populate(&self) -> Result<(), Errno> {
        loop {
            match self.advise(libc::MADV_POPULATE_WRITE) {
                Err(Errno(libc::EINTR | libc::EAGAIN)) => {}
                done => return done,
            }
        }
    }

    /// Brings every page in by writing a zero into it, which must still be all that it holds.
    pub(super) fn touch(&mut self, page_bytes: usize) {
        for offset in (0..self.bytes).step_by(page_bytes.max(1)) {
            // SAFETY: within the mapping, of which nothing has been handed out (`&mut`).
            unsafe { self.start.add(offset).write_volatile(0) };
        }
    }

    fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the memory is ours, and none of these advices unmaps it here or changes what it
        // holds here.
        let done = unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, advice) };
        if done < 0 { Err(last_errno()) } else { Ok(()) }
    }

    /// How many of its bytes lie in huge pages. `ENOTTY` before Linux 6.7.
    pub(super) fn huge_bytes(&self) -> Result<usize, Errno> {
        let range = AddressRange::new(self.start.addr().get(), self.bytes);
        Ok(pagemap::present(range.map_err(|_| Errno(libc::EINVAL))?)?.huge)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping is ours, and whoever was given a part of it has given it back.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_where_and_as_long_as_asked() {
        const ALIGN: usize = 1 << 21;
        let mut mapping = Mapping::aligned(3 * 4096, ALIGN).unwrap();
        assert_eq!((mapping.start().addr().get() % ALIGN, mapping.bytes), (0, 3 * 4096));
        mapping.touch(4096);
        let behind = crate::mappings::mappings_in(
            pinfold_core::AddressRange::new(mapping.start().addr().get(), ALIGN).unwrap(),
        )
        .unwrap();
        let end = mapping.start().addr().get() + 3 * 4096;
        let covers =
            |at: usize| behind.iter().any(|m| (m.range.start()..m.range.end()).contains(&at));
        assert!(covers(end - 1), "mapped to its end");
    }
}
