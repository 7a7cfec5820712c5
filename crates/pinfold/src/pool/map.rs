//! Which slab an address lies in: one table for the process, read without a lock.
//!
//! A word for each 2 MiB of the address space, where slabs begin; two levels, so that the table
//! has 32 KiB of its own and takes 128 KiB for each 32 GiB of addresses that a slab was ever in.
//! Those are kept for good.
//!
//! What an address finds is followed, so it must not go meanwhile. It does not: the addresses of a slab's blocks
//! are mapped by the slab alone, to the end of the last one (`Memory`), from before it is found until after it is
//! not found any more. So memory of other code finds nothing, and a buffer that is out keeps its slab.

use super::memory::HUGE;
use crate::sync::{AtomicPtr, FirstMade, Ordering};
#[cfg(not(loom))]
use pinfold_core::AddressRange;
use std::ptr::NonNull;

/// Blocks of a leaf; few in a model, which follows an atomic for each.
pub(crate) const LEAF: usize = if cfg!(loom) { 2 } else { 1 << 14 };

/// A slab, whose type the table need not know.
pub(crate) enum Found {}

type Leaf = [AtomicPtr<Found>; LEAF];

fn leaf() -> Box<Leaf> {
    let blocks: Box<[_]> = (0..LEAF).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect();
    blocks.try_into().unwrap_or_else(|_| unreachable!("as many as were made"))
}

/// The table of the first `LEAVES` times [`LEAF`] blocks of addresses.
pub(crate) struct Table<const LEAVES: usize>([FirstMade<Leaf>; LEAVES]);

impl<const LEAVES: usize> Table<LEAVES> {
    const ADDRESSES: usize = LEAVES * LEAF * HUGE;

    #[cfg(loom)]
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| FirstMade::new()))
    }

    #[inline(always)]
    pub(crate) fn find(&self, address: usize) -> Option<NonNull<Found>> {
        let block = address / HUGE;
        let leaf = self.0.get(block / LEAF)?.get()?;
        // Acquire: pairs with `set`; a thread that finds a slab finds what it consists of.
        NonNull::new(leaf.get(block % LEAF)?.load(Ordering::Acquire))
    }

    #[must_use]
    pub(crate) fn set(&self, start: usize, bytes: usize, slab: Option<NonNull<Found>>) -> bool {
        let pointer = slab.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        let end = start.checked_add(bytes).filter(|&end| end <= Self::ADDRESSES);
        let Some(end) = end else { return false };
        for block in start / HUGE..end.div_ceil(HUGE) {
            let leaf = self.0[block / LEAF].get_or_make(leaf);
            // Release: pairs with `find`.
            leaf[block % LEAF].store(pointer, Ordering::Release);
        }
        true
    }
}

/// What the kernel gives a program that does not ask for more: 47 bits.
#[cfg(not(loom))]
const ADDRESSES: usize = 1 << 47;
#[cfg(not(loom))]
const ROOT: usize = ADDRESSES / HUGE / LEAF;

#[cfg(not(loom))]
static TABLE: Table<ROOT> = Table([const { FirstMade::new() }; ROOT]);

/// The slab that the address lies in, if it is one's; dangling if the slab has gone since.
#[cfg(not(loom))]
#[inline(always)]
pub(super) fn find(address: usize) -> Option<NonNull<Found>> {
    TABLE.find(address)
}

/// Whether a slab has any of the 2 MiB blocks in which the range lies.
#[cfg(not(loom))]
pub(crate) fn is_in_a_slab(range: AddressRange) -> bool {
    let blocks = range.start() / HUGE..range.end().div_ceil(HUGE);
    blocks.into_iter().any(|block| find(block * HUGE).is_some())
}

/// Says that the `bytes` from `start`, a multiple of [`HUGE`], belong to `slab`, or to none. False
/// if the table does not reach that far.
#[cfg(not(loom))]
#[must_use]
pub(super) fn set(start: usize, bytes: usize, slab: Option<NonNull<Found>>) -> bool {
    TABLE.set(start, bytes, slab)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_its_slab_only() {
        // Addresses that no program has: the last ones below the table's end.
        let (start, slab) = (ADDRESSES - 4 * HUGE, NonNull::<Found>::dangling());
        assert!(set(start, 2 * HUGE + 4096, Some(slab)));
        assert_eq!(find(start), Some(slab));
        assert_eq!(find(start + 2 * HUGE), Some(slab), "the last block is the slab's, whole");
        assert_eq!(find(start - 1), None);
        assert_eq!(find(start + 3 * HUGE), None);
        let near = |start, bytes| is_in_a_slab(AddressRange::new(start, bytes).unwrap());
        assert!(near(start, 1) && near(start - 1, 2) && near(start + 3 * HUGE - 1, 1));
        assert!(!near(start - 1, 1) && !near(start + 3 * HUGE, 1));
        assert!(set(start, 2 * HUGE + 4096, None));
        assert_eq!(find(start), None);
        assert_eq!(find(usize::MAX), None);
        assert!(!set(ADDRESSES, HUGE, Some(slab)));
    }
}
