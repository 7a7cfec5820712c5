//! Several devices as one registrar: a pair, or an array of one kind. A pair may hold pairs.
//!
//! A registration is one with each of them, made in their order, or none: when one refuses, those
//! before it are given back. The handle holds each device's own. Each device pins the pages, and the
//! system counts them for each: so do budgets.
//!
//! A device that forks inside a call and comes back in the child has the next ones called there: each must
//! refuse in a forked child by itself, as those of `pinfold` do.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass a registration, and its end, on to each device.

#![allow(unsafe_code)]

use crate::foreign::{self, Panicked};
use crate::registrar::{DeregisterError, RegisterError, Registrar, RegistrarLimits, Translation};
use crate::{Access, AddressRange};
use std::mem::ManuallyDrop;

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

// SAFETY: each device keeps the promise for its own half of the handle.
unsafe impl<A: Registrar, B: Registrar> Registrar for (A, B) {
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

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.1.widened(self.0.widened(range))
    }

    fn pins_per_page(&self) -> usize {
        self.0.pins_per_page().saturating_add(self.1.pins_per_page())
    }

    fn translation(&self) -> Translation {
        self.0.translation().and(self.1.translation())
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        // SAFETY: the caller's promise, for either device.
        let first = Made::new(&self.0, unsafe { self.0.register(range, access) }?, range);
        // SAFETY: as above.
        let second = unsafe { self.1.register(range, access) }?;
        Ok((first.keep(), second))
    }

    unsafe fn deregister(
        &self,
        (first, second): Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let mut each = Each::default();
        // SAFETY: the caller's promise, for each device.
        each.call(|| unsafe { self.0.deregister(first, range) });
        // SAFETY: as above.
        each.call(|| unsafe { self.1.deregister(second, range) });
        each.outcome()
    }
}

// SAFETY: as for a pair.
unsafe impl<R: Registrar, const N: usize> Registrar for [R; N] {
    type Handle = [R::Handle; N];

    fn limits(&self) -> RegistrarLimits {
        let none = RegistrarLimits {
            page_bytes: 1,
            max_region_bytes: usize::MAX,
            max_regions: usize::MAX,
        };
        self.iter().map(R::limits).fold(none, both)
    }

    fn pinned_limit(&self) -> Option<usize> {
        self.iter().filter_map(R::pinned_limit).min()
    }

    fn granted(&self, wanted: Access) -> Access {
        self.iter().fold(wanted, |granted, registrar| granted | registrar.granted(wanted))
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.iter().fold(range, |range, registrar| registrar.widened(range))
    }

    fn pins_per_page(&self) -> usize {
        self.iter().fold(0, |pins, registrar| registrar.pins_per_page().saturating_add(pins))
    }

    fn translation(&self) -> Translation {
        self.iter().map(R::translation).reduce(Translation::and).unwrap_or(Translation::Pinned)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        let mut made = Vec::with_capacity(N);
        for registrar in self {
            // SAFETY: the caller's promise, for each device.
            made.push(Made::new(registrar, unsafe { registrar.register(range, access) }?, range));
        }
        let handles: Vec<R::Handle> = made.into_iter().map(Made::keep).collect();
        let some = RegisterError::Os { operation: "registering with each", errno: 0 };
        handles.try_into().map_err(|_| some)
    }

    unsafe fn deregister(
        &self,
        handles: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let mut each = Each::default();
        for (registrar, handle) in self.iter().zip(handles) {
            // SAFETY: the caller's promise, for each device.
            each.call(|| unsafe { registrar.deregister(handle, range) });
        }
        each.outcome()
    }
}

/// A registration with one device, deregistered if it is dropped: what came next refused, or panicked.
pub(crate) struct Made<'r, R: Registrar> {
    registrar: &'r R,
    handle: R::Handle,
    range: AddressRange,
}

impl<'r, R: Registrar> Made<'r, R> {
    pub(crate) fn new(registrar: &'r R, handle: R::Handle, range: AddressRange) -> Self {
        Self { registrar, handle, range }
    }

    /// All devices have it.
    pub(crate) fn keep(self) -> R::Handle {
        ManuallyDrop::new(self).handle
    }
}

impl<R: Registrar> Drop for Made<'_, R> {
    fn drop(&mut self) {
        // The first refusal, or panic, is what the caller must know; no code can act on a second one.
        // SAFETY: it was made for this operation, which failed, and no other device or caller has it.
        let deregister = || unsafe { self.registrar.deregister(self.handle, self.range) };
        let _ = foreign::call(deregister);
    }
}

/// Calls to each device: whatever becomes of one, the others are called. The first panic goes on then.
#[derive(Default)]
struct Each {
    failed: Option<DeregisterError>,
    panicked: Option<Panicked>,
}

impl Each {
    fn call(&mut self, call: impl FnOnce() -> Result<(), DeregisterError>) {
        match foreign::call(call) {
            Ok(outcome) => self.failed = self.failed.or(outcome.err()),
            // Of several, the first.
            Err(panicked) => self.panicked = self.panicked.take().or(Some(panicked)),
        }
    }

    fn outcome(self) -> Result<(), DeregisterError> {
        if let Some(panicked) = self.panicked {
            panicked.resume();
        }
        self.failed.map_or(Ok(()), Err)
    }
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

    // SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
    unsafe impl Registrar for Table {
        type Handle = usize;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 20, max_regions: self.room }
        }

        /// None for an odd number of registrations, so that the tests have both.
        fn pinned_limit(&self) -> Option<usize> {
            self.room.is_multiple_of(2).then_some(self.room * 4096)
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<usize, RegisterError> {
            let held = self.held();
            if held == self.room {
                return Err(RegisterError::TableFull { capacity: self.room });
            }
            self.held.store(held + 1, Ordering::Relaxed); // one thread
            Ok(held)
        }

        unsafe fn deregister(&self, _: usize, _: AddressRange) -> Result<(), DeregisterError> {
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
        // SAFETY: registered above, each once.
        let end = |&handle: &R::Handle| unsafe { registrar.deregister(handle, range) }.unwrap();
        handles.iter().for_each(end);
        handles.len()
    }

    #[test]
    fn all_register_or_none() {
        let two = (Table::new(3), Table::new(2));
        assert_eq!((fill(&two), two.limits().max_regions), (2, 2));
        assert_eq!((two.0.held(), two.1.held()), (0, 0));
        let three = (Table::new(3), (Table::new(4), Table::new(1)));
        assert_eq!((fill(&three), three.limits().max_regions), (1, 1));
        assert_eq!((three.0.held(), three.1.0.held(), three.1.1.held()), (0, 0, 0));
        let rings = [Table::new(5), Table::new(4)];
        assert_eq!((fill(&rings), rings.limits().max_regions), (4, 4));
        assert_eq!((rings[0].held(), rings[1].held()), (0, 0));
    }

    #[test]
    fn the_tightest_limit_of_pinned_memory_holds() {
        let table = Table::new;
        assert_eq!((table(3), table(2)).pinned_limit(), Some(2 * 4096));
        assert_eq!(std::sync::Arc::new((table(7), table(2))).pinned_limit(), Some(2 * 4096));
        assert_eq!((table(6), (table(3), table(4))).pinned_limit(), Some(4 * 4096));
        assert_eq!([table(5), table(8), table(6)].pinned_limit(), Some(6 * 4096));
        assert_eq!([table(5), table(7)].pinned_limit(), None);
    }
}
