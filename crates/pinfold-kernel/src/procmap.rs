//! The table of mappings, asked for one entry: `PROCMAP_QUERY` of `/proc/PID/maps` (Linux 6.11).
//!
//! # Safety
//!
//! The unsafe code of this file is there for one request, which writes into what it is passed and nothing else.

use crate::descriptor::Descriptor;
use crate::errno::{Errno, last_errno};
use crate::request::request;
use std::mem::size_of;

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11), our own declaration of its fields.
#[repr(C)]
#[derive(Default, Debug)]
pub struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    /// Where the mapping begins.
    pub vma_start: u64,
    /// Behind its last byte.
    pub vma_end: u64,
    /// [`READABLE`](Self::READABLE) and the like.
    pub vma_flags: u64,
    /// The size of its pages.
    pub vma_page_size: u64,
    vma_offset: u64,
    /// Its file's inode; 0 without a file.
    pub inode: u64,
    /// The device that the file is on.
    pub dev_major: u32,
    /// As `dev_major`.
    pub dev_minor: u32,
    /// In: the room for the name. Out: its length with the final zero byte, 0 if there is none.
    pub vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

impl ProcmapQuery {
    /// In the flags: it can be read.
    pub const READABLE: u64 = 0x01;
    /// It can be written.
    pub const WRITABLE: u64 = 0x02;
    /// It is shared.
    pub const SHARED: u64 = 0x08;
}

/// "The mapping that covers the address, or else the next one."
const PROCMAP_COVERING_OR_NEXT: u64 = 0x10;
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = request(b'f', 17, size_of::<ProcmapQuery>());

/// Asks an open `/proc/PID/maps` for the mapping that covers `address` or the next one above it;
/// its name, if any, goes to `name`. `ENOENT` when there is none, `ENOTTY` before Linux 6.11,
/// `ENAMETOOLONG` when `name` is too short.
pub fn procmap_query(
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
    fn the_request_has_the_size_and_the_number_that_the_kernel_knows() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(PROCMAP_QUERY, 0xc068_6611);
    }

    #[test]
    fn a_wrong_descriptor_is_an_error() {
        assert!(procmap_query(-1, 0, &mut []).is_err());
    }
}
