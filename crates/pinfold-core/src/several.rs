//! Several devices as one registrar: a tuple, or an array of one kind.
//!
//! A registration is one with each of them, made in their order, or none: when one refuses, those
//! before it are given back. The handle holds each device's own.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass a registration on to each device.

#![allow(unsafe_code)]

use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits};
use crate::{Access, AddressRange};

/// What both of two devices can take.
fn both(one: RegistrarLimits, other: RegistrarLimits) -> RegistrarLimits {
    RegistrarLimits {
        page_bytes: one.page_bytes.max(other.page_bytes),
        max_region_bytes: one.max_region_bytes.min(other.max_region_bytes),
        max_regions: one.max_regions.min(other.max_regions),
    }
}

/// The lower of two limits, of which either may be missing.
fn tighter(one: Option<usize>, other: Option<usize>) -> Option<usize> {
    one.into_iter().chain(other).min()
}

impl<A: Registrar, B: Registrar> Registrar for (A, B) {
    type Handle = (A::Handle, B::Handle);

    fn limits(&self) -> RegistrarLimits {
        both(self.0.limits(), self.1.limits())
    }

    fn pinned_limit(&self) -> Option<usize> {
        tighter(self.0.pinned_limit(), self.1.pinned_limit())
    }

    fn granted(&self, wanted: Access) -> Access {
        self.0.granted(wanted) | self.1.granted(wanted)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        // SAFETY: the caller's promise, for either device.
        let first = unsafe { self.0.register(range, access) }?;
        // SAFETY: as above.
        match unsafe { self.1.register(range, access) } {
            Ok(second) => Ok((first, second)),
            Err(error) => {
                // The refusal is what the caller must know; nobody can act on a second error.
                let _ = self.0.deregister(first, range);
                Err(error)
            }
        }
    }

    fn deregister(
        &self,
        (first, second): Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let results = [self.0.deregister(first, range), self.1.deregister(second, range)];
        results.into_iter().fold(Ok(()), Result::and)
    }
}

impl<A: Registrar, B: Registrar, C: Registrar> Registrar for (A, B, C) {
    type Handle = (A::Handle, B::Handle, C::Handle);

    fn limits(&self) -> RegistrarLimits {
        both(both(self.0.limits(), self.1.limits()), self.2.limits())
    }

    fn granted(&self, wanted: Access) -> Access {
        self.0.granted(wanted) | self.1.granted(wanted) | self.2.granted(wanted)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        // SAFETY: the caller's promise, for each device.
        let first = unsafe { self.0.register(range, access) }?;
        // SAFETY: as above.
        let second = unsafe { self.1.register(range, access) }.inspect_err(|_| {
            // As for two.
            let _ = self.0.deregister(first, range);
        })?;
        // SAFETY: as above.
        let third = unsafe { self.2.register(range, access) }.inspect_err(|_| {
            let _ = self.1.deregister(second, range);
            let _ = self.0.deregister(first, range);
        })?;
        Ok((first, second, third))
    }

    fn deregister(
        &self,
        (first, second, third): Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let results = [
            self.0.deregister(first, range),
            self.1.deregister(second, range),
            self.2.deregister(third, range),
        ];
        results.into_iter().fold(Ok(()), Result::and)
    }
}

impl<R: Registrar, const N: usize> Registrar for [R; N] {
    type Handle = [R::Handle; N];

    fn limits(&self) -> RegistrarLimits {
        let none = RegistrarLimits {
            page_bytes: 1,
            max_region_bytes: usize::MAX,
            max_regions: usize::MAX,
        };
        self.iter().map(R::limits).fold(none, both)
    }

    fn granted(&self, wanted: Access) -> Access {
        self.iter().fold(wanted, |granted, registrar| granted | registrar.granted(wanted))
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        let mut handles: [Option<R::Handle>; N] = [None; N];
        for (handle, registrar) in handles.iter_mut().zip(self) {
            // SAFETY: the caller's promise, for each device.
            match unsafe { registrar.register(range, access) } {
                Ok(registered) => *handle = Some(registered),
                Err(error) => {
                    give_back(self, &handles, range);
                    return Err(error);
                }
            }
        }
        all(handles).ok_or(RegisterError::Os { operation: "registering with each", errno: 0 })
    }

    fn deregister(
        &self,
        handles: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let pairs = self.iter().zip(handles);
        // Each is tried, whatever became of the others.
        pairs
            .map(|(registrar, handle)| registrar.deregister(handle, range))
            .fold(Ok(()), Result::and)
    }
}

/// Gives back those that were made before one failed.
fn give_back<R: Registrar>(registrars: &[R], handles: &[Option<R::Handle>], range: AddressRange) {
    let made = registrars.iter().zip(handles).filter_map(|(one, handle)| Some((one, (*handle)?)));
    made.for_each(|(registrar, handle)| {
        // As for two.
        let _ = registrar.deregister(handle, range);
    });
}

/// All of them, if all are there.
fn all<H: Copy, const N: usize>(handles: [Option<H>; N]) -> Option<[H; N]> {
    let present: Vec<H> = handles.into_iter().flatten().collect();
    present.try_into().ok()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A device that takes so many registrations.
    struct Table {
        room: usize,
        held: AtomicUsize,
    }

    impl Table {
        fn new(room: usize) -> Self {
            Self { room, held: AtomicUsize::new(0) }
        }

        fn held(&self) -> usize {
            self.held.load(Ordering::Relaxed) // one thread
        }
    }

    impl Registrar for Table {
        type Handle = usize;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 20, max_regions: self.room }
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<usize, RegisterError> {
            let held = self.held();
            if held == self.room {
                return Err(RegisterError::TableFull { capacity: self.room });
            }
            self.held.store(held + 1, Ordering::Relaxed); // one thread
            Ok(held)
        }

        fn deregister(&self, _: usize, _: AddressRange) -> Result<(), DeregisterError> {
            self.held.fetch_sub(1, Ordering::Relaxed); // one thread
            Ok(())
        }
    }

    /// Registers until it fails, then gives everything back; how many there were.
    fn fill<R: Registrar>(registrar: &R) -> usize {
        let range = AddressRange::new(4096, 4096).unwrap();
        // SAFETY: these devices touch no memory.
        let register = || unsafe { registrar.register(range, Access::READ) }.ok();
        let handles: Vec<R::Handle> = std::iter::from_fn(register).collect();
        handles.iter().for_each(|&handle| registrar.deregister(handle, range).unwrap());
        handles.len()
    }

    #[test]
    fn all_register_or_none() {
        let two = (Table::new(3), Table::new(2));
        assert_eq!((fill(&two), two.limits().max_regions), (2, 2));
        assert_eq!((two.0.held(), two.1.held()), (0, 0));
        let three = (Table::new(3), Table::new(4), Table::new(1));
        assert_eq!((fill(&three), three.limits().max_regions), (1, 1));
        assert_eq!((three.0.held(), three.1.held(), three.2.held()), (0, 0, 0));
        let rings = [Table::new(5), Table::new(4)];
        assert_eq!((fill(&rings), rings.limits().max_regions), (4, 4));
        assert_eq!((rings[0].held(), rings[1].held()), (0, 0));
    }
}
