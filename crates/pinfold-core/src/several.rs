//! Several devices as one registrar: a pair, or an array of one kind. A pair may hold pairs.
//!
//! A registration is one with each of them, made in their order, or none: when one refuses, those
//! before it are given back. The handle holds each device's own. Each device pins the pages, and the
//! system counts them for each: so do budgets. One that [is simulated](Registrar::is_simulated) next to one that is not has no
//! say in what the other's device may reach: neither in the rights nor in the pages that are registered besides.
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

/// Whether one of several has a say in what all of them register: not where it is simulated and not `all` are.
fn has_say<R: Registrar>(one: &R, all: bool) -> bool {
    all || !one.is_simulated()
}

/// What one of several can take; its pages are no longer than the others' where it has no say.
fn limits_of<R: Registrar>(one: &R, all: bool) -> RegistrarLimits {
    let limits = one.limits();
    if has_say(one, all) { limits } else { RegistrarLimits { page_bytes: 1, ..limits } }
}

/// The rights that one of several gives.
fn granted_by<R: Registrar>(one: &R, wanted: Access, all: bool) -> Access {
    if has_say(one, all) { one.granted(wanted) } else { wanted }
}

/// What one of several registers for `range`.
fn widened_by<R: Registrar>(one: &R, range: AddressRange, all: bool) -> AddressRange {
    if has_say(one, all) { one.widened(range) } else { range }
}

// SAFETY: each device keeps the promise for its own half of the handle.
unsafe impl<A: Registrar, B: Registrar> Registrar for (A, B) {
    type Handle = (A::Handle, B::Handle);

    fn limits(&self) -> RegistrarLimits {
        let all = self.is_simulated();
        both(limits_of(&self.0, all), limits_of(&self.1, all))
    }

    fn pinned_limit(&self) -> Option<usize> {
        tighter(self.0.pinned_limit(), self.1.pinned_limit())
    }

    fn granted(&self, wanted: Access) -> Access {
        let all = self.is_simulated();
        granted_by(&self.0, wanted, all) | granted_by(&self.1, wanted, all)
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        let all = self.is_simulated();
        widened_by(&self.1, widened_by(&self.0, range, all), all)
    }

    fn pins_per_page(&self) -> usize {
        self.0.pins_per_page().saturating_add(self.1.pins_per_page())
    }

    fn translation(&self) -> Translation {
        self.0.translation().and(self.1.translation())
    }

    fn is_simulated(&self) -> bool {
        self.0.is_simulated() && self.1.is_simulated()
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
        let all = self.is_simulated();
        self.iter().map(|one| limits_of(one, all)).fold(none, both)
    }

    fn pinned_limit(&self) -> Option<usize> {
        self.iter().filter_map(R::pinned_limit).min()
    }

    fn granted(&self, wanted: Access) -> Access {
        let all = self.is_simulated();
        self.iter().fold(wanted, |granted, registrar| granted | granted_by(registrar, wanted, all))
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        let all = self.is_simulated();
        self.iter().fold(range, |range, registrar| widened_by(registrar, range, all))
    }

    fn pins_per_page(&self) -> usize {
        self.iter().fold(0, |pins, registrar| registrar.pins_per_page().saturating_add(pins))
    }

    fn translation(&self) -> Translation {
        self.iter().map(R::translation).reduce(Translation::and).unwrap_or(Translation::Pinned)
    }

    fn is_simulated(&self) -> bool {
        self.iter().all(R::is_simulated)
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
    use crate::fake::{Fake, FakeDevice};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A device that takes so many registrations.
    struct Table {
        room: usize,
        held: AtomicUsize,
    }

    /// What a test may have written in safe code: it names long pages, more rights and other memory.
    type Greedy = Fake<GreedyDevice>;

    #[derive(Clone, Copy)]
    struct GreedyDevice;

    const GREEDY: Greedy = Fake(GreedyDevice);

    impl FakeDevice for GreedyDevice {
        type Handle = ();

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits::new(1 << 16, 1 << 20, 2)
        }

        fn granted(&self, wanted: Access) -> Access {
            wanted | Access::REMOTE_WRITE
        }

        fn widened(&self, range: AddressRange) -> AddressRange {
            AddressRange::new(range.start(), range.len() + 4096).unwrap()
        }

        fn register(&self, _: AddressRange, _: Access) -> Result<(), RegisterError> {
            Ok(())
        }

        fn deregister(&self, (): (), _: AddressRange) -> Result<(), DeregisterError> {
            Ok(())
        }
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
        assert_eq!(Arc::new((table(7), table(2))).pinned_limit(), Some(2 * 4096));
        assert_eq!((table(6), (table(3), table(4))).pinned_limit(), Some(4 * 4096));
        assert_eq!([table(5), table(8), table(6)].pinned_limit(), Some(6 * 4096));
        assert_eq!([table(5), table(7)].pinned_limit(), None);
    }

    /// The page, the rights and the range that a registrar has for one page that is to be read.
    fn opened<R: Registrar>(registrar: &R) -> (usize, Access, usize) {
        let widened = registrar.widened(AddressRange::new(4096, 4096).unwrap());
        (registrar.limits().page_bytes, registrar.granted(Access::READ), widened.len())
    }

    #[test]
    fn one_that_is_simulated_opens_no_memory_to_the_others_device() {
        let table = || Table::new(3);
        let page = (4096, Access::READ, 4096);
        assert_eq!(opened(&(GREEDY, table())), page);
        assert_eq!(opened(&(table(), Arc::new(GREEDY))), page);
        assert_eq!(opened(&([GREEDY; 2], (table(), GREEDY))), page);
        assert_eq!((table(), GREEDY).limits().max_regions, 2, "it may refuse");
        let more = Access::READ | Access::REMOTE_WRITE;
        assert_eq!(opened(&(GREEDY, GREEDY)), (1 << 16, more, 3 * 4096));
        assert_eq!(opened(&[GREEDY; 3]), (1 << 16, more, 4 * 4096));
    }

    #[test]
    fn several_are_simulated_if_all_are() {
        assert!((GREEDY, [GREEDY; 2]).is_simulated() && Arc::new((GREEDY, GREEDY)).is_simulated());
        assert!(!(GREEDY, Table::new(1)).is_simulated() && !(Table::new(1), GREEDY).is_simulated());
        assert!(![Table::new(1)].is_simulated() && !Arc::new(Table::new(1)).is_simulated());
        assert!(!(GREEDY, (Table::new(1), GREEDY)).is_simulated());
    }
}
