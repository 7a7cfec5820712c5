//! What stands at an address: mapping, unmapping, moving, advice, on ranges of addresses.
//!
//! An owned [`OwnedMapping`](crate::mapping::OwnedMapping) is the better choice wherever one value has the memory.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. A function that can
//! change what stands at an address is unsafe to call and says what its caller is responsible for; the
//! others change which pages hold the memory's content, and no content.

use crate::errno::{Errno, done, last_errno};
use pinfold_core::AddressRange;
use std::ptr;

/// `MADV_POPULATE_READ` of `linux/mman.h` (Linux 5.14); newer than some C libraries.
const POPULATE_READ: libc::c_int = 22;
/// `MADV_POPULATE_WRITE` (Linux 5.14).
const POPULATE_WRITE: libc::c_int = 23;
/// `MADV_COLLAPSE` (Linux 6.1).
const COLLAPSE: libc::c_int = 25;

pub(crate) const RIGHTS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
pub(crate) const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

pub(crate) fn pointer(address: usize) -> *mut libc::c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// `mmap(2)` of anonymous memory, readable and writable, at `place`, or anywhere for null.
///
/// # Safety
///
/// With `MAP_FIXED`, what was at `place` is the caller's to lose.
unsafe fn map_at(
    place: *mut libc::c_void,
    bytes: usize,
    kind: libc::c_int,
) -> Result<*mut libc::c_void, Errno> {
    // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses; with it, the
    // caller's responsibility.
    let start = unsafe { libc::mmap(place, bytes, RIGHTS, PRIVATE | kind, -1, 0) };
    if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(start) }
}

/// Maps new private memory at an address of the kernel's choice, to stay until [`unmap`]; none of its
/// pages is there yet.
///
/// # Errors
///
/// `EINVAL` for no bytes, `ENOMEM` where addresses, memory or mappings are exhausted.
pub fn map(bytes: usize) -> Result<AddressRange, Errno> {
    // SAFETY: no fixed place.
    let start = unsafe { map_at(ptr::null_mut(), bytes, 0)? }.expose_provenance();
    AddressRange::new(start, bytes).map_err(|_| Errno(libc::EINVAL))
}

/// Maps new private memory over `range`: whatever it consisted of, it is one mapping without pages.
///
/// # Safety
///
/// The range is the caller's own, and its content is the caller's to lose.
pub unsafe fn renew(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's responsibility; the kernel swaps the mappings in one step.
    unsafe { map_at(pointer(range.start()), range.len(), libc::MAP_FIXED).map(drop) }
}

/// Maps new private memory at `range` if nothing is mapped there at all; leaves alone what is.
///
/// # Errors
///
/// `EEXIST` if a part of the range is mapped.
pub fn map_if_free(range: AddressRange) -> Result<(), Errno> {
    let place = pointer(range.start());
    // SAFETY: the kernel refuses addresses in use.
    let start = unsafe { map_at(place, range.len(), libc::MAP_FIXED_NOREPLACE)? };
    if start.addr() == range.start() {
        return Ok(());
    }
    // Before Linux 4.17 the flag is unknown, and the mapping goes elsewhere.
    // SAFETY: just made, and no other code knows of it.
    unsafe { libc::munmap(start, range.len()) };
    Err(Errno(libc::EEXIST))
}

/// Maps `bytes` at the address `start`, whole pages, with no rights and no memory, if nothing is mapped there at all.
///
/// For a handler of a fork: the kernel's own call, not a function that may wait for a lock of another library's.
pub(crate) fn forbid_if_free(start: usize, bytes: usize) -> Result<(), Errno> {
    let kind = PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    let (place, none) = (pointer(start), libc::PROT_NONE);
    // SAFETY: the kernel refuses addresses in use. Before Linux 4.17 it maps others instead, which nothing reaches.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, place, bytes, none, kind, -1, 0_usize) };
    if mapped == -1 { Err(last_errno()) } else { Ok(()) }
}

/// Whether all of `range`, whole pages, is mapped. Needs no memory and no descriptor.
///
/// `msync(2)` with `MS_ASYNC` alone, which does nothing since Linux 2.6.19 but look for unmapped addresses.
pub fn is_mapped(range: AddressRange) -> bool {
    // SAFETY: changes neither what is mapped nor what it holds.
    unsafe { libc::msync(pointer(range.start()), range.len(), libc::MS_ASYNC) == 0 }
}

/// Unmaps. A failure (too many mappings) leaves the memory mapped, which breaks nothing.
///
/// # Safety
///
/// The range is the caller's own, and no code uses it any more.
pub unsafe fn unmap(range: AddressRange) {
    // SAFETY: the caller's responsibility.
    unsafe { libc::munmap(pointer(range.start()), range.len()) };
}

/// Only for advices that never change what memory holds.
fn advise(range: AddressRange, advice: libc::c_int) -> Result<(), Errno> {
    // SAFETY: the advices in use change which pages hold the memory's content, and no content.
    done(unsafe { libc::madvise(pointer(range.start()), range.len(), advice) })
}

/// Asks for huge pages where pages are made later, or for none. `EINVAL` in a kernel without them.
pub fn advise_huge(range: AddressRange, huge: bool) -> Result<(), Errno> {
    advise(range, if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE })
}

/// Makes every page of `range`, which is made of whole pages, ready to be read, or written, as touching
/// each would.
///
/// # Errors
///
/// `EINVAL` before Linux 5.14 and for mappings that cannot be, `ENOMEM` for unmapped addresses, `EFAULT`
/// where a touch would raise a signal.
pub fn populate(range: AddressRange, to_write: bool) -> Result<(), Errno> {
    advise(range, if to_write { POPULATE_WRITE } else { POPULATE_READ })
}

/// Whether the kernel knows [`populate`] (Linux 5.14).
pub fn can_populate() -> bool {
    is_known(POPULATE_READ)
}

/// Whether the kernel knows how to make memory huge on request (Linux 6.1).
pub fn can_collapse() -> bool {
    is_known(COLLAPSE)
}

fn is_known(advice: libc::c_int) -> bool {
    // SAFETY: no byte is concerned; the kernel looks at the advice first.
    unsafe { libc::madvise(ptr::null_mut(), 0, advice) == 0 }
}

/// Puts the content of `range`, whole huge pages, into huge pages. The program may read and write
/// it meanwhile. Linux 6.1.
pub fn collapse(range: AddressRange) -> Result<(), Errno> {
    advise(range, COLLAPSE)
}

/// Drops the pages of `range`: it reads as zero from now on. Pages that a device has pinned stay
/// with the device.
///
/// # Safety
///
/// The range is private anonymous memory, and its content is the caller's to lose.
pub unsafe fn discard(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's responsibility; the mapping stays.
    done(unsafe { libc::madvise(pointer(range.start()), range.len(), libc::MADV_DONTNEED) })
}

/// From now on a forked child finds zeros in `range`. `EINVAL` before Linux 4.14.
///
/// # Safety
///
/// The range is private anonymous memory, and its content in a child is the caller's to lose.
pub(crate) unsafe fn wipe_on_fork(range: AddressRange) -> Result<(), Errno> {
    advise(range, libc::MADV_WIPEONFORK)
}

/// Keeps the pages of `range` in memory. `ENOMEM` for unmapped addresses and beyond `RLIMIT_MEMLOCK`, `EPERM`
/// if that is 0, `EAGAIN` where a page cannot be made.
pub fn lock(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: mlock changes where pages live, never what they hold.
    done(unsafe { libc::mlock(pointer(range.start()), range.len()) })
}

/// Ends [`lock`], however often it was called.
pub fn unlock(range: AddressRange) -> Result<(), Errno> {
    // SAFETY: munlock changes where pages may live, never what they hold.
    done(unsafe { libc::munlock(pointer(range.start()), range.len()) })
}

/// Puts the pages of `from` in the place of those of `to`, as long, in one step for all threads;
/// what was at `to` is gone, and `from` is unmapped.
///
/// # Safety
///
/// Both are the caller's own, no code needs the old pages of `to`, and none uses `from`.
pub unsafe fn move_over(from: AddressRange, to: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's responsibility.
    unsafe { remap(from, to, 0) }
}

/// Moves the pages of `from` to `to`, whose own pages are dropped; `from` stays mapped and reads as
/// zero. Linux 5.7.
///
/// # Errors
///
/// `EFAULT` if `from` is not part of one mapping, `EINVAL` if it is not private
/// anonymous memory, `ENOMEM` when the process has too many mappings. After an error both are as
/// they were, unless the kernel itself ran out of memory, when `to` may be unmapped.
///
/// # Safety
///
/// Both ranges are the caller's, are made of whole pages, are equally long and do not overlap; no code
/// borrows from either, and the content of `to` is the caller's to lose.
pub unsafe fn move_out(from: AddressRange, to: AddressRange) -> Result<(), Errno> {
    // SAFETY: the caller's responsibility.
    unsafe { remap(from, to, libc::MREMAP_DONTUNMAP) }
}

/// # Safety
///
/// As for [`move_over`], or with `MREMAP_DONTUNMAP` for [`move_out`].
unsafe fn remap(from: AddressRange, to: AddressRange, how: libc::c_int) -> Result<(), Errno> {
    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | how;
    let (start, target) = (pointer(from.start()), pointer(to.start()));
    // The kernel's own call: see the crate's documentation.
    // SAFETY: the caller's responsibility.
    done(unsafe { libc::syscall(libc::SYS_mremap, start, from.len(), to.len(), how, target) })
}

/// Copies the bytes of `from` to the beginning of `to`, which is as long.
///
/// # Safety
///
/// `from` can be read and `to` written; they do not overlap, and no other thread uses the bytes meanwhile.
pub unsafe fn copy(from: AddressRange, to: AddressRange) {
    let source = ptr::with_exposed_provenance::<u8>(from.start());
    let target = ptr::with_exposed_provenance_mut::<u8>(to.start());
    // SAFETY: the caller's responsibility.
    unsafe { ptr::copy_nonoverlapping(source, target, from.len().min(to.len())) };
}

/// Whether both hold the same bytes.
///
/// # Safety
///
/// Both can be read, and no thread writes to them meanwhile.
pub unsafe fn is_same(one: AddressRange, other: AddressRange) -> bool {
    // SAFETY: the caller's responsibility.
    unsafe { bytes(one) == bytes(other) }
}

/// The bytes of `range`.
///
/// # Safety
///
/// They are mapped, readable and unchanged for as long as `'a`.
pub unsafe fn bytes<'a>(range: AddressRange) -> &'a [u8] {
    // SAFETY: the caller's responsibility; memory of the kernel's making is never uninitialised.
    unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(range.start()), range.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::page_bytes;

    fn part(range: AddressRange, page: usize) -> AddressRange {
        AddressRange::new(range.start() + page * page_bytes(), page_bytes()).unwrap()
    }

    fn fill(range: AddressRange, byte: u8) {
        // SAFETY: memory of the test's own.
        unsafe { pointer(range.start()).cast::<u8>().write_bytes(byte, range.len()) };
    }

    fn first(range: AddressRange) -> u8 {
        // SAFETY: as above; no thread writes.
        unsafe { bytes(range)[0] }
    }

    #[test]
    fn pages_move_and_leave_zeros_or_nothing() {
        let all = map(3 * page_bytes()).unwrap();
        let [one, two, three] = [0, 1, 2].map(|page| part(all, page));
        assert!(is_mapped(all));
        fill(one, 1);
        fill(two, 2);
        // SAFETY: pages of the test's own, and nothing borrows from them.
        unsafe { move_out(one, two).unwrap() };
        assert_eq!((first(one), first(two)), (0, 1));
        // SAFETY: as above.
        unsafe { move_over(two, three).unwrap() };
        assert_eq!(first(three), 1);
        assert!(is_mapped(one) && !is_mapped(two) && !is_mapped(all));
        assert_eq!(map_if_free(three), Err(Errno(libc::EEXIST)));
        map_if_free(two).unwrap();
        assert!(is_mapped(all));
        // SAFETY: as above.
        unsafe {
            assert!(is_same(one, two) && !is_same(two, three));
            copy(three, one);
            assert!(is_same(one, three));
            discard(three).unwrap();
            renew(one).unwrap();
            assert!(is_same(one, three));
            unmap(all);
        }
    }

    #[test]
    fn what_is_not_mapped_is_an_error() {
        let range = map(page_bytes()).unwrap();
        match populate(range, true) {
            Ok(()) => assert_eq!(crate::pages::is_there(range), Some(true)),
            Err(errno) => assert_eq!(errno, Errno(libc::EINVAL), "before Linux 5.14"),
        }
        // SAFETY: the test's own.
        unsafe { unmap(range) };
        assert!(collapse(range).is_err() && lock(range).is_err());
        assert!(map(0).is_err());
    }
}
