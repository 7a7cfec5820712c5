//! The seam to the kernel: making pages, and asking which are there.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Neither call
//! changes what any byte of the program reads: populating is what touching the page would do.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::sys::{Errno, last_errno};
use std::ptr;

/// Linux 5.14; newer than some C libraries.
const MADV_POPULATE_READ: libc::c_int = 22;
const MADV_POPULATE_WRITE: libc::c_int = 23;

/// Makes every page of `range`, which is made of whole pages, ready to be read, or written.
/// `EINVAL` before Linux 5.14 and for mappings that cannot be, `ENOMEM` for unmapped addresses.
pub(super) fn populate(range: AddressRange, to_write: bool) -> Result<(), Errno> {
    let advice = if to_write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    let start = ptr::without_provenance_mut(range.start());
    // SAFETY: the kernel faults pages in, as a touch would, and refuses what cannot be touched.
    match unsafe { libc::madvise(start, range.len(), advice) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// How many pages one look tells about.
const LOOK: usize = 512;

/// Whether every page of `range` is there. `None` if the kernel does not tell.
///
/// One system call and half a kilobyte of stack for each 512 pages.
pub(super) fn is_there(range: AddressRange, page_bytes: usize) -> Option<bool> {
    let mut found = [0_u8; LOOK];
    let mut next = range.start();
    while next < range.end() {
        let length = (range.end() - next).min(LOOK * page_bytes);
        // SAFETY: the kernel writes one byte for each page of `length` bytes, which are at most as
        // many as `found` has.
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
