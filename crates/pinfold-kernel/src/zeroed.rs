//! Tables that are all zeros at first, without a write to any of them: their pages come when they are used, and a
//! fork copies none before.
//!
//! # Safety
//!
//! The unsafe code of this file is there to take zeros for values whose types promise that they are some.

use pinfold_core::StampedSlot;
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// A type whose first value is all zeros.
///
/// # Safety
///
/// Zeros in every byte are the value that [`Default`] gives.
pub unsafe trait Zeroed: Default {}

// SAFETY: as `AtomicU64::new(0)`.
unsafe impl Zeroed for AtomicU64 {}
// SAFETY: as above.
unsafe impl Zeroed for AtomicUsize {}
// SAFETY: three atomics that begin with 0, and nothing else.
unsafe impl Zeroed for StampedSlot {}
// SAFETY: of zeros each.
unsafe impl<T: Zeroed> Zeroed for [T; 3] where Self: Default {}

/// `count` values, each as [`Default`] makes it.
pub fn zeros<T: Zeroed>(count: usize) -> Box<[T]> {
    let Ok(layout) = Layout::array::<T>(count) else { handle_alloc_error(Layout::new::<T>()) };
    if layout.size() == 0 {
        return std::iter::repeat_with(T::default).take(count).collect();
    }
    // SAFETY: it has a size.
    let start = unsafe { alloc_zeroed(layout) }.cast::<T>();
    if start.is_null() {
        handle_alloc_error(layout);
    }
    // SAFETY: allocated for that many, with the layout that a box of them has, and zeros are values of theirs.
    unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(start, count)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_table_of_zeros_is_one_of_defaults() {
        let words = zeros::<[AtomicU64; 3]>(1000);
        assert_eq!(words.len(), 1000);
        assert!(words.iter().flatten().all(|word| word.load(Ordering::Relaxed) == 0));
        assert_eq!(zeros::<AtomicUsize>(0).len(), 0);
        let slots = zeros::<StampedSlot>(2);
        assert_eq!(format!("{slots:?}"), format!("{:?}", [StampedSlot::new(), StampedSlot::new()]));
    }
}
