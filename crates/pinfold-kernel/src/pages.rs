//! Which pages of a range are there, and which of them are huge: `mincore(2)`, and `/proc/self/pagemap` as
//! Linux 6.7 lets one ask it.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a request to the kernel is a foreign function. It changes
//! nothing but what it passes to the kernel to be filled.

use crate::descriptor::{Descriptor, open};
use crate::errno::{Errno, checked};
use crate::process::page_bytes;
use crate::request::request;
use pinfold_core::AddressRange;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

/// How many pages one look tells about.
const LOOK: usize = 512;

/// Whether every page of `range` is there. `None` if the kernel does not tell: a part is unmapped, or the
/// range does not begin at a page.
///
/// One system call and half a kilobyte of stack for each 512 pages.
pub fn is_there(range: AddressRange) -> Option<bool> {
    // Miri knows no such call.
    if cfg!(miri) {
        return None;
    }
    let page_bytes = page_bytes();
    let mut found = [0_u8; LOOK];
    let mut next = range.start();
    while next < range.end() {
        let length = (range.end() - next).min(LOOK * page_bytes);
        // SAFETY: the kernel writes one byte for each page of `length` bytes, which are at most as
        // many as `found` has: the size of a page is the kernel's own.
        let told =
            unsafe { libc::mincore(ptr::without_provenance_mut(next), length, found.as_mut_ptr()) };
        if told != 0 {
            return None;
        }
        let pages = length.div_ceil(page_bytes);
        if found.iter().take(pages).any(|page| page & 1 == 0) {
            return Some(false);
        }
        next += length;
    }
    Some(true)
}

/// Bytes of a range.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Present {
    /// In pages that are there.
    pub bytes: usize,
    /// In huge ones of them.
    pub huge: usize,
}

/// What is there of `range`. `ENOTTY` before Linux 6.7.
pub fn present(range: AddressRange) -> Result<Present, Errno> {
    count(open_pagemap()?.as_raw_fd(), range)
}

/// The table that [`is_huge`] asks: this process's, also in a forked child that has the descriptor. The file is the calling
/// thread's, and stays good when that ends; the first one's cannot be opened once that has ended.
pub fn open_pagemap() -> Result<OwnedFd, Errno> {
    open(c"/proc/thread-self/pagemap", 0).or_else(|_| open(c"/proc/self/pagemap", 0))
}

/// Whether `page` is part of a huge page that is mapped as one; `None` if no page is there. `ENOTTY` before Linux 6.7.
pub fn is_huge(pagemap: Descriptor, page: AddressRange) -> Result<Option<bool>, Errno> {
    let mut stretch = [Stretch::default()];
    let (found, _) = scan(pagemap, page.start(), page.end(), &mut stretch)?;
    Ok((found > 0).then(|| stretch[0].is_huge()))
}

fn count(pagemap: Descriptor, range: AddressRange) -> Result<Present, Errno> {
    let mut stretches = [Stretch::default(); 64];
    let (mut present, mut next) = (Present::default(), range.start());
    while next < range.end() {
        let (found, seen_up_to) = scan(pagemap, next, range.end(), &mut stretches)?;
        for stretch in stretches.iter().take(found) {
            present.bytes += stretch.bytes();
            present.huge += if stretch.is_huge() { stretch.bytes() } else { 0 };
        }
        if seen_up_to <= next {
            return Err(Errno(libc::EINVAL));
        }
        next = seen_up_to;
    }
    Ok(present)
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`: neighbours of one kind.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Stretch {
    start: u64,
    end: u64,
    categories: u64,
}

impl Stretch {
    fn bytes(&self) -> usize {
        usize::try_from(self.end.saturating_sub(self.start)).unwrap_or(usize::MAX)
    }

    fn is_huge(&self) -> bool {
        self.categories & HUGE != 0
    }
}

const PRESENT: u64 = 1 << 3;
const HUGE: u64 = 1 << 6;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = request(b'f', 16, size_of::<Scan>());

/// Asks for the pages that are there from `start` up to `end`; says how many stretches it found, and how
/// far it looked.
fn scan(
    pagemap: Descriptor,
    start: usize,
    end: usize,
    stretches: &mut [Stretch],
) -> Result<(usize, usize), Errno> {
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        start: start as u64,
        end: end as u64,
        regions: stretches.as_mut_ptr().expose_provenance() as u64,
        regions_len: stretches.len() as u64,
        category_mask: PRESENT,
        return_mask: PRESENT | HUGE,
        ..Scan::default()
    };
    // SAFETY: the kernel reads and writes `scan`, whose size it is told, and writes at most `regions_len`
    // stretches.
    let found = unsafe { libc::ioctl(pagemap, PAGEMAP_SCAN as _, &raw mut scan) };
    match checked(found.into()) {
        Ok(found) => Ok((found, usize::try_from(scan.walk_end).unwrap_or(usize::MAX))),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_sizes_and_numbers_that_the_kernel_knows() {
        assert_eq!((size_of::<Scan>(), size_of::<Stretch>()), (96, 24));
        assert_eq!(PAGEMAP_SCAN, 0xc060_6610);
    }

    #[test]
    fn what_was_written_is_there() {
        let memory = vec![7_u8; 40 * 4096];
        let start = memory.as_ptr().addr().next_multiple_of(4096);
        let range = AddressRange::new(start, 32 * 4096).unwrap();
        match present(range) {
            Ok(present) => assert_eq!((present.bytes, present.huge % 4096), (range.len(), 0)),
            Err(Errno(libc::ENOTTY)) => {
                eprintln!("skipped: before Linux 6.7 there is no such request");
            }
            Err(Errno(errno)) => panic!("errno {errno}"),
        }
    }
}
