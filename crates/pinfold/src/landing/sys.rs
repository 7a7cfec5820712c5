//! The seam to the kernel: making landing pages, moving pages from one address to another, copying.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because these calls change what stands at an address. They are
//! unsafe to call; each says what its caller answers for.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::sys::{Errno, last_errno};
use std::ptr;

const RIGHTS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const KIND: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Maps new private memory of `bytes` bytes; none of its pages is there yet.
pub(super) fn map(bytes: usize) -> Result<usize, Errno> {
    // SAFETY: at an address of the kernel's choice, where nothing is.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, RIGHTS, KIND, -1, 0) };
    if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(start.expose_provenance()) }
}

/// Maps new memory over `range`: whatever it consisted of, it is one mapping without pages.
///
/// # Safety
///
/// The range is the caller's own, and its content is the caller's to lose.
pub(super) unsafe fn renew(range: AddressRange) -> Result<(), Errno> {
    let kind = KIND | libc::MAP_FIXED;
    // SAFETY: the caller's word; the kernel swaps the mappings in one step.
    let start = unsafe { libc::mmap(pointer(range.start()), range.len(), RIGHTS, kind, -1, 0) };
    if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(()) }
}

/// Maps new memory where nothing is mapped at all; leaves alone what is.
pub(super) fn map_if_free(range: AddressRange) {
    let kind = KIND | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the kernel refuses addresses in use.
    unsafe { libc::mmap(pointer(range.start()), range.len(), RIGHTS, kind, -1, 0) };
}

/// Unmaps.
///
/// # Safety
///
/// The range is the caller's own, and nobody uses it any more.
pub(super) unsafe fn unmap(range: AddressRange) {
    // SAFETY: the caller's word. A failure leaves the memory mapped, which harms nobody.
    unsafe { libc::munmap(pointer(range.start()), range.len()) };
}

/// Asks for huge pages, or for none. Only advice: a refusal changes nothing.
pub(super) fn advise_huge(range: AddressRange, huge: bool) {
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: changes how pages are made, never what they hold.
    unsafe { libc::madvise(pointer(range.start()), range.len(), advice) };
}

/// Gives the pages of `range` up: it reads as zero from now on. Pages that a device has pinned stay
/// with the device.
///
/// # Safety
///
/// The content is the caller's to lose.
pub(super) unsafe fn discard(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's word; the mapping stays.
    let done = unsafe { libc::madvise(pointer(range.start()), range.len(), libc::MADV_DONTNEED) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Moves the pages of `from` to `to`, whose own pages are given up; `from` stays mapped and reads as
/// zero. Linux 5.7. `EFAULT` if `from` is not part of one mapping, `EINVAL` if it is not private
/// anonymous memory, `ENOMEM` when the process has too many mappings. After an error both are as
/// they were, unless the kernel itself ran out of memory, when `to` may be unmapped.
///
/// # Safety
///
/// Both ranges are the caller's, are made of whole pages, are equally long and do not overlap; nobody
/// borrows from either, and the content of `to` is the caller's to lose.
pub(super) unsafe fn move_pages(from: AddressRange, to: AddressRange) -> Result<(), Errno> {
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let (length, target) = (from.len(), pointer(to.start()));
    // SAFETY: the caller's word.
    let moved = unsafe { libc::mremap(pointer(from.start()), length, length, how, target) };
    if moved == libc::MAP_FAILED { Err(last_errno()) } else { Ok(()) }
}

/// Copies `from` to the beginning of `to`.
///
/// # Safety
///
/// `from` can be read and `to`, which is as long, written; they do not overlap, and nobody else uses
/// the bytes meanwhile.
pub(super) unsafe fn copy(from: AddressRange, to: AddressRange) {
    let source = ptr::with_exposed_provenance::<u8>(from.start());
    let target = ptr::with_exposed_provenance_mut::<u8>(to.start());
    // SAFETY: the caller's word.
    unsafe { ptr::copy_nonoverlapping(source, target, from.len().min(to.len())) };
}

/// The bytes of `range`.
///
/// # Safety
///
/// They are mapped, readable and unchanged for as long as `'a`.
pub(super) unsafe fn bytes<'a>(range: AddressRange) -> &'a [u8] {
    // SAFETY: the caller's word; private memory of the kernel's making is never uninitialised.
    unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(range.start()), range.len()) }
}

fn pointer(address: usize) -> *mut libc::c_void {
    ptr::with_exposed_provenance_mut(address)
}
