//! One thing that a device may be using.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare how a use ends, which only the caller can know, and to
//! take the thing out of a guard that is not dropped.

#![allow(unsafe_code)]

use pinfold_core::{Lease, Monitor, Registrar};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

/// What can be handed to a device.
pub(crate) trait Kept: Sized {
    /// The guard ended and nothing said that the device is done: whatever the device may still touch
    /// stays as it is for good, and is given to no other use.
    fn abandon(self);

    /// The device is done; `moved` if it moved everything.
    ///
    /// # Safety
    ///
    /// No device uses it any more. If data was to be delivered from it, the target is the caller's to
    /// write.
    unsafe fn finish(self, moved: bool) {
        let _ = moved;
    }
}

/// A lease that is leaked keeps its registration until the cache is dropped.
impl<R: Registrar, M: Monitor> Kept for Lease<'_, R, M> {
    fn abandon(self) {
        std::mem::forget(self);
    }
}

/// Something that a device may be using. Dropped, it is [abandoned](Kept::abandon).
pub(crate) struct InUse<T: Kept>(ManuallyDrop<T>);

impl<T: Kept> InUse<T> {
    /// From now on a device may use it.
    pub(crate) const fn new(kept: T) -> Self {
        Self(ManuallyDrop::new(kept))
    }

    /// No device uses it any more.
    ///
    /// # Safety
    ///
    /// That is so: every request that names it has ended, or was never submitted.
    pub(crate) unsafe fn end(self) -> T {
        let mut guard = ManuallyDrop::new(self);
        // SAFETY: `guard` is not dropped, and not used again.
        unsafe { ManuallyDrop::take(&mut guard.0) }
    }
}

impl<T: Kept> Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Kept> DerefMut for InUse<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Kept> Drop for InUse<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, in the destructor.
        unsafe { ManuallyDrop::take(&mut self.0) }.abandon();
    }
}
