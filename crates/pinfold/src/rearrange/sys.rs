//! The seam to the kernel: other pages for a range, and where they are.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. A function that can
//! change what stands at an address is unsafe to call and says what its caller answers for; the
//! others write to what they are passed as `&mut` only.

#![allow(unsafe_code)]

use crate::AddressRange;
use crate::sys::{Errno, last_errno};
use std::ptr;

/// `MADV_COLLAPSE` of `linux/mman.h` (Linux 6.1).
const COLLAPSE: libc::c_int = 25;
/// `MADV_POPULATE_WRITE` (Linux 5.14).
const POPULATE_WRITE: libc::c_int = 23;

fn pointer(address: usize) -> *mut libc::c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Only for advices that never change what memory holds.
fn advise(range: AddressRange, advice: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the advices in use change which pages hold the memory's content, and no content.
    let done = unsafe { libc::madvise(pointer(range.start()), range.len(), advice) };
    if done < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Whether the kernel knows how to make memory huge on request.
pub(super) fn can_collapse() -> bool {
    // SAFETY: no byte is concerned; the kernel looks at the advice first.
    unsafe { libc::madvise(ptr::null_mut(), 0, COLLAPSE) == 0 }
}

/// Puts the content of `range`, whole huge pages, into huge pages. The program may read and write
/// it meanwhile.
pub(super) fn collapse(range: AddressRange) -> Result<(), Errno> {
    advise(range, COLLAPSE)
}

/// Makes the pages of `range`, as writing to each would, without writing.
pub(super) fn populate(range: AddressRange) -> Result<(), Errno> {
    advise(range, POPULATE_WRITE)
}

/// Asks for huge pages where there are none yet.
pub(super) fn advise_huge(range: AddressRange) -> Result<(), Errno> {
    advise(range, libc::MADV_HUGEPAGE)
}

/// Gives the pages of `range` up; they read as zero then.
///
/// # Safety
///
/// The range is private anonymous memory whose content nobody needs any more.
pub(super) unsafe fn discard(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's word.
    let done = unsafe { libc::madvise(pointer(range.start()), range.len(), libc::MADV_DONTNEED) };
    if done < 0 { Err(last_errno()) } else { Ok(()) }
}

const RIGHTS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const KIND: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Maps new private memory; none of its pages is there yet.
pub(super) fn map(bytes: usize) -> Result<usize, Errno> {
    // SAFETY: at an address of the kernel's choice, where nothing is.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, RIGHTS, KIND, -1, 0) };
    if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(start.expose_provenance()) }
}

/// Maps new private memory where nothing is mapped.
pub(super) fn map_if_free(range: AddressRange) -> Result<(), Errno> {
    let kind = KIND | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the kernel refuses addresses in use.
    let start = unsafe { libc::mmap(pointer(range.start()), range.len(), RIGHTS, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(last_errno());
    }
    if start.addr() == range.start() {
        return Ok(());
    }
    // Before Linux 4.17 the flag is unknown, and the mapping goes elsewhere.
    // SAFETY: just made, and nobody knows of it.
    unsafe { libc::munmap(start, range.len()) };
    Err(Errno(libc::EEXIST))
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

/// Copies the bytes of `from` to `to`, as long and elsewhere.
///
/// # Safety
///
/// Both are mapped, `to` is the caller's own, and nobody writes to `from` meanwhile.
pub(super) unsafe fn copy(from: AddressRange, to: AddressRange) {
    let source = ptr::with_exposed_provenance::<u8>(from.start());
    let target = ptr::with_exposed_provenance_mut::<u8>(to.start());
    // SAFETY: the caller's word.
    unsafe { ptr::copy_nonoverlapping(source, target, from.len().min(to.len())) };
}

/// Whether both hold the same bytes.
///
/// # Safety
///
/// Both are mapped and readable, and nobody writes to them meanwhile.
pub(super) unsafe fn is_same(one: AddressRange, other: AddressRange) -> bool {
    let start = |range: AddressRange| ptr::with_exposed_provenance(range.start());
    let length = one.len().min(other.len());
    // SAFETY: the caller's word.
    unsafe { libc::memcmp(start(one), start(other), length) == 0 }
}

/// Puts the pages of `from` in the place of those of `to`, as long, in one step for everybody who
/// looks; what was at `to` is gone.
///
/// # Safety
///
/// Both are the caller's own, nobody needs the old pages of `to`, and nobody uses `from`.
pub(super) unsafe fn exchange(from: AddressRange, to: AddressRange) -> Result<(), Errno> {
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // The kernel's own call: libraries that patch the C library's may lose its last argument.
    // SAFETY: the caller's word.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_mremap,
            pointer(from.start()),
            from.len(),
            to.len(),
            how,
            pointer(to.start()),
        )
    };
    if moved == -1 { Err(last_errno()) } else { Ok(()) }
}

// --- memory nodes ------------------------------------------------------------------------------

/// Whether the mapping at `address` has a memory policy of its own (`mbind`), or may have.
pub(super) fn has_policy(address: usize) -> bool {
    const OF_ADDRESS: libc::c_ulong = 2; // MPOL_F_ADDR
    const DEFAULT: libc::c_int = 0; // MPOL_DEFAULT
    let mut mode = DEFAULT;
    // SAFETY: the kernel writes to `mode`, and to no set of nodes.
    let asked = unsafe {
        let (mode, no_nodes) = (&raw mut mode, ptr::null_mut::<libc::c_ulong>());
        libc::syscall(libc::SYS_get_mempolicy, mode, no_nodes, 0_usize, address, OF_ADDRESS)
    };
    match asked {
        0 => mode != DEFAULT,
        // Without NUMA there are no policies, and a sandbox that keeps one from asking keeps one from
        // setting any.
        _ => !matches!(last_errno(), Errno(libc::ENOSYS | libc::EPERM)),
    }
}

/// Gives the mapping a policy of its own.
#[cfg(test)]
pub(super) fn prefer_local(range: AddressRange) -> Result<(), Errno> {
    const PREFERRED: usize = 1; // MPOL_PREFERRED: of no nodes, the local one
    let (start, no_nodes) = (pointer(range.start()), ptr::null::<libc::c_ulong>());
    // SAFETY: no content is changed, and the kernel reads no set of nodes.
    let done = unsafe {
        let length = range.len();
        libc::syscall(libc::SYS_mbind, start, length, PREFERRED, no_nodes, 0_usize, 0_usize)
    };
    if done < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Where the pages at `addresses` are: a node, or the kernel's error number, negative.
pub(super) fn nodes_of(addresses: &[usize], answers: &mut [i32]) -> Result<(), Errno> {
    ask_about_pages(addresses, ptr::null(), answers).map(drop)
}

/// Moves the pages at `addresses` to `node`. `answers` as by [`nodes_of`], for those that it tells
/// about.
pub(super) fn move_pages(addresses: &[usize], node: i32, answers: &mut [i32]) -> Result<(), Errno> {
    let nodes = vec![node; addresses.len()];
    ask_about_pages(addresses, nodes.as_ptr(), answers).map(drop)
}

fn ask_about_pages(
    addresses: &[usize],
    nodes: *const i32,
    answers: &mut [i32],
) -> Result<libc::c_long, Errno> {
    const MOVE: libc::c_int = 2; // MPOL_MF_MOVE: pages that this process alone has
    let count = addresses.len().min(answers.len());
    // SAFETY: the kernel reads `count` addresses and as many nodes, if any, and writes as many
    // answers; a page that is moved keeps its content and its address.
    let left = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            count,
            addresses.as_ptr(),
            nodes,
            answers.as_mut_ptr(),
            MOVE,
        )
    };
    if left < 0 { Err(last_errno()) } else { Ok(left) }
}
