//! The pool's registrars, their types forgotten: what grows and trims need not be made anew for
//! each of them.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to open a slab's memory to the devices, and to give handles
//! their type back.

#![allow(unsafe_code)]

use super::memory::Memory;
use pinfold_core::{Access, AddressRange, DeregisterError, RegisterError, Registrar};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// What the devices gave for a slab.
pub(super) struct Handles {
    /// A registrar's `Handle`. Shared, because a box is its content's only pointer, and moving it would
    /// end what `at` may do.
    value: Arc<dyn Any + Send + Sync>,
    /// Where it stands, for code that knows its type.
    at: NonNull<()>,
}

// SAFETY: `at` points into `value`, which may be sent.
unsafe impl Send for Handles {}
// SAFETY: `at` gives nothing but shared references to `value`, which may be shared.
unsafe impl Sync for Handles {}

impl Handles {
    fn new<H: Copy + Send + Sync + 'static>(handle: H) -> Self {
        let value = Arc::new(handle);
        let at = NonNull::from(&*value).cast();
        Self { value, at }
    }

    /// The handle.
    ///
    /// # Safety
    ///
    /// `H` is the handle of the registrar that these came from.
    #[inline(always)]
    pub(super) unsafe fn get<H: Copy + Send + Sync + 'static>(&self) -> &H {
        debug_assert!(self.value.is::<H>());
        // SAFETY: it points to an `H` (the caller's promise), which is never written, and lives as long
        // as `self`.
        unsafe { self.at.cast().as_ref() }
    }
}

impl fmt::Debug for Handles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handles")
    }
}

/// A registrar, one or several devices.
pub(super) trait Devices: Send + Sync {
    /// Registers memory that nothing has been handed out of.
    fn register(&self, memory: &Memory, access: Access) -> Result<Handles, RegisterError>;

    unsafe fn deregister(
        &self,
        handles: &Handles,
        range: AddressRange,
    ) -> Result<(), DeregisterError>;
}

impl<R: Registrar> Devices for R {
    fn register(&self, memory: &Memory, access: Access) -> Result<Handles, RegisterError> {
        let range = AddressRange::new(memory.start().addr().get(), memory.bytes())
            .map_err(|_| RegisterError::Os { operation: "mmap", errno: libc::EINVAL })?;
        // SAFETY: the memory is the pool's own: what a device may do to a buffer in it is up to
        // the buffer's owner, and nothing of the pool's stands there.
        unsafe { Registrar::register(self, range, self.granted(access)) }.map(Handles::new)
    }

    unsafe fn deregister(
        &self,
        handles: &Handles,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        match handles.value.downcast_ref() {
            // SAFETY: the caller's promise.
            Some(&handle) => unsafe { Registrar::deregister(self, handle, range) },
            None => Err(DeregisterError::Os { operation: "finding a handle", errno: libc::EINVAL }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For the interpreter, which notices a pointer that its owner's move has ended.
    #[test]
    fn handles_are_found_wherever_their_owner_is_moved() {
        let handles = Handles::new([7_u64, 8]);
        let moved = [Some(handles), None];
        let [Some(handles), None] = Box::new(moved).map(|it| it) else { panic!("one is there") };
        // SAFETY: made of such a handle.
        assert_eq!(unsafe { handles.get::<[u64; 2]>() }, &[7, 8]);
    }
}
