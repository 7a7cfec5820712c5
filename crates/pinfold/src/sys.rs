//! The seam to the kernel: every raw system call of the mapping table and of the monitors.
//!
//! Each function is one call, its error the kernel's number. Nothing here allocates, takes a lock
//! or touches `errno` beyond reading it, so the monitor's reader may use all of it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Every function
//! here is safe to call with any argument: pointers come from references, lengths from slices,
//! and a descriptor that is not what it should be gives an error, not undefined behaviour.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem::size_of;

/// The kernel's error number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

/// A descriptor number. Not owned: the program may close any descriptor behind our back, and then
/// closing the number again would close somebody else's file.
pub(crate) type Descriptor = libc::c_int;

fn last_errno() -> Errno {
    // SAFETY: the C library gives every thread its own errno, alive as long as the thread.
    Errno(unsafe { *libc::__errno_location() })
}

/// A system call's result, where -1 means that `errno` tells why.
fn checked(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

/// Opens `path` for reading.
pub(crate) fn open(path: &CStr, flags: libc::c_int) -> Result<Descriptor, Errno> {
    // SAFETY: the path ends with a zero byte and outlives the call.
    let opened = unsafe { libc::open(path.as_ptr(), flags | libc::O_RDONLY | libc::O_CLOEXEC) };
    if opened < 0 { Err(last_errno()) } else { Ok(opened) }
}

/// Closes a descriptor that the caller opened.
pub(crate) fn close(descriptor: Descriptor) {
    // SAFETY: closing a number cannot break memory safety here: no file is memory of this crate.
    // A failure leaves nothing to do: Linux frees the number in any case.
    unsafe { libc::close(descriptor) };
}

/// Reads up to `buffer.len()` bytes; 0 at the end.
pub(crate) fn read(descriptor: Descriptor, buffer: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes at most the buffer's length into it.
    let got = unsafe { libc::read(descriptor, buffer.as_mut_ptr().cast(), buffer.len()) };
    checked(got as libc::c_long)
}

// --- the table of mappings ---------------------------------------------------------------------

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11), our own declaration of its fields.
#[repr(C)]
#[derive(Default)]
pub(crate) struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    pub(crate) vma_start: u64,
    pub(crate) vma_end: u64,
    pub(crate) vma_flags: u64,
    pub(crate) vma_page_size: u64,
    vma_offset: u64,
    pub(crate) inode: u64,
    pub(crate) dev_major: u32,
    pub(crate) dev_minor: u32,
    /// In: the room for the name. Out: its length with the final zero byte, 0 if there is none.
    pub(crate) vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

impl ProcmapQuery {
    pub(crate) const READABLE: u64 = 0x01;
    pub(crate) const WRITABLE: u64 = 0x02;
    pub(crate) const SHARED: u64 = 0x08;
}

/// "The mapping that covers the address, or else the next one."
const PROCMAP_COVERING_OR_NEXT: u64 = 0x10;
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = request(b'f', 17, size_of::<ProcmapQuery>());

/// `_IOWR(kind, number, argument)` as every architecture we run on encodes it, except the MIPS,
/// PowerPC and SPARC families, which Pinfold does not build for.
const fn request(kind: u8, number: u8, argument_bytes: usize) -> libc::c_ulong {
    let both_ways = 3 << 30;
    both_ways
        | (argument_bytes as libc::c_ulong) << 16
        | (kind as libc::c_ulong) << 8
        | number as libc::c_ulong
}

/// Asks an open `/proc/PID/maps` for the mapping that covers `address` or the next one above it;
/// its name, if any, goes to `name`. `ENOENT` when there is none, `ENOTTY` before Linux 6.11,
/// `ENAMETOOLONG` when `name` is too short.
pub(crate) fn procmap_query(
    maps: Descriptor,
    address: usize,
    name: &mut [u8],
) -> Result<ProcmapQuery, Errno> {
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: PROCMAP_COVERING_OR_NEXT,
        query_addr: address as u64,
        vma_name_size: u32::try_from(name.len()).unwrap_or(u32::MAX),
        vma_name_addr: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel writes into `query`, whose size it is told, and at most `vma_name_size`
    // bytes into `name`; both are borrowed exclusively for the call.
    let answer = unsafe { libc::ioctl(maps, PROCMAP_QUERY as _, &raw mut query) };
    if answer < 0 { Err(last_errno()) } else { Ok(query) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_has_the_size_and_number_the_kernel_knows() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(PROCMAP_QUERY, 0xc068_6611);
    }

    #[test]
    fn a_wrong_descriptor_is_an_error() {
        assert_eq!(read(-1, &mut [0; 4]), Err(Errno(libc::EBADF)));
        assert!(procmap_query(-1, 0, &mut []).is_err());
    }
}
