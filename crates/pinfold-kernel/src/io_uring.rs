//! Rings of io_uring: fixed buffers (Linux 5.13 for tables that change, 5.19 for sparse ones).
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. A registration opens memory to
//! a device only by the requests that the program submits later, and that contract is
//! [`Registrar::register`](pinfold_core::Registrar::register)'s.

use crate::errno::{Errno, checked, last_errno};
use pinfold_core::AddressRange;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

const REGISTER_BUFFERS2: libc::c_uint = 15;
const REGISTER_BUFFERS_UPDATE: libc::c_uint = 16;
const SPARSE: u32 = 1;

/// `struct io_uring_rsrc_register` of the kernel.
#[repr(C)]
struct Table {
    nr: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

/// `struct io_uring_rsrc_update2` of the kernel.
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    nr: u32,
    reserved2: u32,
}

/// One `struct iovec`: a buffer, or nothing.
#[repr(C)]
#[derive(Clone, Copy)]
struct Slot {
    base: usize,
    length: usize,
}

const EMPTY: Slot = Slot { base: 0, length: 0 };

/// How many slots one call of [`clear_slots`] empties at most.
const CLEARED_AT_ONCE: u32 = 256;

static EMPTY_SLOTS: [Slot; CLEARED_AT_ONCE as usize] = [EMPTY; CLEARED_AT_ONCE as usize];

fn register<T>(ring: BorrowedFd<'_>, opcode: libc::c_uint, argument: &T) -> Result<usize, Errno> {
    // SAFETY: both opcodes used here read a `T` of the length given, and the slots and tags that
    // it points to, which outlive the call; they write nothing.
    let done = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            opcode,
            ptr::from_ref(argument),
            mem::size_of::<T>(),
        )
    };
    checked(done)
}

/// Gives the ring a table of `slots` empty slots.
pub fn make_table(ring: BorrowedFd<'_>, slots: u32) -> Result<(), Errno> {
    let table = Table { nr: slots, flags: SPARSE, reserved: 0, data: 0, tags: 0 };
    register(ring, REGISTER_BUFFERS2, &table).map(drop)
}

/// Changes all of the slots. The kernel says how many it has changed before it met an error, and names the error if it is
/// asked to go on from there.
fn update(ring: BorrowedFd<'_>, first: u32, slots: &[Slot], tags: &[u64]) -> Result<(), Errno> {
    debug_assert!(tags.is_empty() || tags.len() == slots.len());
    let (mut first, mut slots, mut tags) = (first, slots, tags);
    while !slots.is_empty() {
        let done = update_some(ring, first, slots, tags)?;
        if done == 0 {
            // Not the kernel's answer: a filter of system calls makes such.
            return Err(Errno(libc::EIO));
        }
        slots = slots.get(done..).unwrap_or_default();
        tags = tags.get(done..).unwrap_or_default();
        first = first.saturating_add(u32::try_from(done).unwrap_or(u32::MAX));
    }
    Ok(())
}

/// How many of the slots were changed, from the first on.
fn update_some(
    ring: BorrowedFd<'_>,
    first: u32,
    slots: &[Slot],
    tags: &[u64],
) -> Result<usize, Errno> {
    let nr = u32::try_from(slots.len()).map_err(|_| Errno(libc::EINVAL))?;
    let data = slots.as_ptr().addr() as u64;
    let tags = if tags.is_empty() { 0 } else { tags.as_ptr().addr() as u64 };
    let update = Update { offset: first, reserved: 0, data, tags, nr, reserved2: 0 };
    register(ring, REGISTER_BUFFERS_UPDATE, &update)
}

/// Pins the pages of `range` and puts them into a slot. A `tag` that is not zero comes back as a
/// completion when the slot has something else and the last request that uses the pages has ended.
///
/// # Safety
///
/// The slot is the caller's alone, and nothing relies on the bytes of `range` while the ring may write them:
/// a request that names the slot writes them.
pub unsafe fn fill_slot(
    ring: BorrowedFd<'_>,
    slot: u16,
    range: AddressRange,
    tag: u64,
) -> Result<(), Errno> {
    let slots = [Slot { base: range.start(), length: range.len() }];
    update(ring, slot.into(), &slots, &[tag])
}

/// Empties a slot.
///
/// # Safety
///
/// The slot is the caller's alone: what it holds is no other owner's registration.
pub unsafe fn clear_slot(ring: BorrowedFd<'_>, slot: u16) -> Result<(), Errno> {
    update(ring, slot.into(), &[EMPTY], &[])
}

/// Empties every slot from `first` up to, not including, `end`.
///
/// # Safety
///
/// As for [`clear_slot`], of each.
pub unsafe fn clear_slots(ring: BorrowedFd<'_>, first: u32, end: u32) -> Result<(), Errno> {
    let mut next = first;
    while next < end {
        let count = (end - next).min(CLEARED_AT_ONCE);
        update(ring, next, &EMPTY_SLOTS[..count as usize], &[])?;
        next += count;
    }
    Ok(())
}

/// Whether the ring was made to be enabled later (`IORING_SETUP_R_DISABLED`), and has not been. One that is enabled stays so.
///
/// Asks for nothing to be submitted and for no completion to be waited for. The kernel says `EBADFD` as soon as it has found
/// the ring, whichever thread asks and whether or not a thread of its own submits (`IORING_SETUP_SQPOLL`). False where this
/// call is refused to the process.
pub fn is_disabled(ring: BorrowedFd<'_>) -> bool {
    let (none, no_mask) = (0_u32, ptr::null::<u8>());
    // SAFETY: with no flags and no mask of signals the kernel reads no memory of ours, and with nothing to submit it takes
    // no request from the ring.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_io_uring_enter,
            ring.as_raw_fd(),
            none,
            none,
            none,
            no_mask,
            0_usize,
        )
    };
    checked(answer) == Err(Errno(libc::EBADFD))
}

/// The error that an impossible `io_uring_setup` meets: `EFAULT` where io_uring may be used.
pub fn setup_refusal() -> Errno {
    // SAFETY: the parameters are null, so the kernel makes no ring and touches no memory.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, ptr::null_mut::<u8>()) };
    if made < 0 { last_errno() } else { Errno(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    /// A ring with a table of two slots.
    fn ring() -> Option<OwnedFd> {
        let mut parameters = [0_u64; 15];
        // SAFETY: `struct io_uring_params` has 120 bytes, and the descriptor is new.
        let ring = unsafe {
            let ring = libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr());
            let ring = i32::try_from(ring).ok().filter(|&ring| ring >= 0)?;
            OwnedFd::from_raw_fd(ring)
        };
        make_table(ring.as_fd(), 2).ok()?;
        Some(ring)
    }

    /// The kernel answers "one" where the second cannot be changed.
    #[test]
    fn what_was_done_in_part_is_no_success() {
        let Some(ring) = ring() else { return println!("skipped: no ring is to be had here") };
        let page = [0_u8; 64];
        let good = Slot { base: page.as_ptr().expose_provenance(), length: page.len() };
        let bad = Slot { base: 4096, length: 64 };
        assert_eq!(update_some(ring.as_fd(), 0, &[good, bad], &[7, 8]), Ok(1));
        assert_eq!(update(ring.as_fd(), 0, &[good, bad], &[7, 8]), Err(Errno(libc::EFAULT)));
        assert_eq!(update(ring.as_fd(), 0, &[good, good], &[7, 8]), Ok(()));
        // SAFETY: the slots are the test's own.
        assert_eq!(unsafe { clear_slots(ring.as_fd(), 0, 2) }, Ok(()));
        assert!(update(ring.as_fd(), 1, &[EMPTY, EMPTY], &[]).is_err(), "beyond the table");
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(mem::size_of::<Table>(), 32);
        assert_eq!(mem::size_of::<Update>(), 32);
        assert_eq!(mem::size_of::<Slot>(), mem::size_of::<libc::iovec>());
    }
}
