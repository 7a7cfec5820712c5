//! Several devices suspended as one, as [`Registrar`](crate::Registrar) has them: a device that is
//! shared, and a pair.
//!
//! A pair keeps the time of its first device. It suspends a region when both can, and renews
//! with both or gives back with both.
//!
//! A device that forks inside a call and comes back in the child has the other one called there, as in
//! [`several`](crate::several): each must refuse in a forked child by itself. A pair has no mark that a child finds wiped.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass a withdrawal, a renewal and a restart on to each device.

#![allow(unsafe_code)]

use super::device::{ConnectionLost, Renewed, Suspend, Transfers, Unsupported};
use crate::foreign::{self, ForeignList};
use crate::registrar::{DeregisterError, RegisterError};
use crate::{Access, AddressRange};
use std::sync::Arc;
use std::time::Duration;

/// Renews with one device; if it fails or panics it has given its own back, and `others` end too.
fn or_give_back<T>(
    renew: impl FnOnce() -> Result<T, RegisterError>,
    others: impl FnOnce(),
) -> Result<T, RegisterError> {
    match foreign::call(renew) {
        Ok(renewed) => renewed.inspect_err(|_| others()),
        Err(panicked) => {
            others();
            panicked.resume()
        }
    }
}

/// The refusal of another device is what the caller must know; no code can act on a second error, or on a
/// panic, which would leave the others with what is theirs.
///
/// # Safety
///
/// As for [`Registrar::deregister`](crate::Registrar::deregister).
unsafe fn give_back<R: Suspend>(device: &R, handle: R::Handle, range: AddressRange) {
    // SAFETY: the caller's promise.
    let _gone = foreign::call(|| unsafe { device.deregister(handle, range) });
}

// SAFETY: every call goes to the device itself, which keeps the promise.
unsafe impl<R: Suspend> Suspend for Arc<R> {
    type Connection = R::Connection;

    fn now(&self) -> Duration {
        R::now(self)
    }

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        R::can_suspend(self, range, connections)
    }

    fn stop(&self, connection: &Self::Connection) -> Result<(), ConnectionLost> {
        R::stop(self, connection)
    }

    fn in_flight(
        &self,
        connection: &Self::Connection,
        range: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        R::in_flight(self, connection, range)
    }

    unsafe fn withdraw(
        &self,
        handle: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { R::withdraw(self, handle, range) }
    }

    fn quiet(&self, range: AddressRange) -> bool {
        R::quiet(self, range)
    }

    unsafe fn renew(
        &self,
        handle: Self::Handle,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<Self::Handle>, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { R::renew(self, handle, range, access) }
    }

    unsafe fn restart(&self, connection: &Self::Connection) -> Result<(), ConnectionLost> {
        // SAFETY: the caller's promise, passed on.
        unsafe { R::restart(self, connection) }
    }

    fn fail(&self, connection: &Self::Connection) {
        R::fail(self, connection);
    }

    fn wait(&self, until: Duration) {
        R::wait(self, until);
    }
}

/// A connection of one of two devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OfEither<A, B> {
    /// Of the first device of the pair.
    First(A),
    /// Of the second.
    Second(B),
}

/// Asks one device about those of the connections that are its own.
fn ask<R: Suspend, C>(
    device: &R,
    range: AddressRange,
    connections: &[C],
    own: impl Fn(&C) -> Option<&R::Connection>,
) -> Result<(), Unsupported> {
    let (mut places, mut its_own) = (Vec::new(), ForeignList::default());
    for (place, connection) in connections.iter().enumerate() {
        if let Some(connection) = own(connection) {
            its_own.push(connection.clone());
            places.push(place);
        }
    }
    // The device knows its own list only.
    device.can_suspend(range, &its_own).map_err(|why| match why {
        Unsupported::Connection { index } => {
            Unsupported::Connection { index: places.get(index).copied().unwrap_or(index) }
        }
        other => other,
    })
}

/// The handle behind a renewal, and whether it is another one.
fn after<H>(renewed: Renewed<H>, before: H) -> (H, bool) {
    match renewed {
        Renewed::Same => (before, false),
        Renewed::Changed(handle) => (handle, true),
    }
}

fn before<H>((handle, changed): (H, bool)) -> Renewed<H> {
    if changed { Renewed::Changed(handle) } else { Renewed::Same }
}

// SAFETY: each device keeps the promise for itself; a pair stops, withdraws and renews with both.
unsafe impl<A: Suspend, B: Suspend> Suspend for (A, B) {
    type Connection = OfEither<A::Connection, B::Connection>;

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        ask(&self.0, range, connections, |connection| match connection {
            OfEither::First(own) => Some(own),
            OfEither::Second(_) => None,
        })?;
        ask(&self.1, range, connections, |connection| match connection {
            OfEither::Second(own) => Some(own),
            OfEither::First(_) => None,
        })
    }

    fn stop(&self, connection: &Self::Connection) -> Result<(), ConnectionLost> {
        match connection {
            OfEither::First(own) => self.0.stop(own),
            OfEither::Second(own) => self.1.stop(own),
        }
    }

    fn in_flight(
        &self,
        connection: &Self::Connection,
        range: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        match connection {
            OfEither::First(own) => self.0.in_flight(own, range),
            OfEither::Second(own) => self.1.in_flight(own, range),
        }
    }

    unsafe fn withdraw(
        &self,
        (first, second): Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // Each is tried, whatever became of the other.
        // SAFETY: the caller's promise, for either device.
        let withdrawn = unsafe { self.0.withdraw(first, range) };
        // SAFETY: as above.
        withdrawn.and(unsafe { self.1.withdraw(second, range) })
    }

    fn quiet(&self, range: AddressRange) -> bool {
        self.0.quiet(range) && self.1.quiet(range)
    }

    unsafe fn renew(
        &self,
        (first, second): Self::Handle,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<Self::Handle>, RegisterError> {
        let one = or_give_back(
            // SAFETY: the caller's promise, for either device.
            || unsafe { self.0.renew(first, range, access) },
            // SAFETY: the renewal ends all of the old registration, and it failed.
            || unsafe { give_back(&self.1, second, range) },
        )?;
        let (first, first_changed) = after(one, first);
        let other = or_give_back(
            // SAFETY: as above.
            || unsafe { self.1.renew(second, range, access) },
            // SAFETY: as above, and the first device's was renewed by this call.
            || unsafe { give_back(&self.0, first, range) },
        )?;
        let (second, second_changed) = after(other, second);
        Ok(before(((first, second), first_changed || second_changed)))
    }

    unsafe fn restart(&self, connection: &Self::Connection) -> Result<(), ConnectionLost> {
        match connection {
            // SAFETY: the caller's promise, passed on.
            OfEither::First(own) => unsafe { self.0.restart(own) },
            // SAFETY: as above.
            OfEither::Second(own) => unsafe { self.1.restart(own) },
        }
    }

    fn fail(&self, connection: &Self::Connection) {
        match connection {
            OfEither::First(own) => self.0.fail(own),
            OfEither::Second(own) => self.1.fail(own),
        }
    }

    fn wait(&self, until: Duration) {
        self.0.wait(until);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::registrar::{Registrar, RegistrarLimits};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

    /// A device that renews as often as it is told, then fails; it may change handles.
    #[derive(Default)]
    struct Slots {
        held: AtomicIsize,
        renewals: AtomicUsize,
        changes: bool,
        panics: bool,
        panics_at_end: bool,
        connections: usize,
    }

    // SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
    unsafe impl Registrar for Slots {
        type Handle = usize;

        fn limits(&self) -> RegistrarLimits {
            RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 20, max_regions: 8 }
        }

        unsafe fn register(&self, _: AddressRange, _: Access) -> Result<usize, RegisterError> {
            self.held.fetch_add(1, Ordering::Relaxed); // one thread
            Ok(1)
        }

        unsafe fn deregister(&self, _: usize, _: AddressRange) -> Result<(), DeregisterError> {
            self.held.fetch_sub(1, Ordering::Relaxed); // one thread
            assert!(!self.panics_at_end, "as told");
            Ok(())
        }
    }

    // SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
    unsafe impl Suspend for Slots {
        type Connection = usize;

        fn can_suspend(&self, _: AddressRange, own: &[usize]) -> Result<(), Unsupported> {
            let stranger = own.iter().position(|&connection| connection >= self.connections);
            stranger.map_or(Ok(()), |index| Err(Unsupported::Connection { index }))
        }

        fn stop(&self, _: &usize) -> Result<(), ConnectionLost> {
            Ok(())
        }

        fn in_flight(&self, _: &usize, _: AddressRange) -> Result<Transfers, ConnectionLost> {
            Ok(Transfers::default())
        }

        unsafe fn renew(
            &self,
            handle: usize,
            range: AddressRange,
            _: Access,
        ) -> Result<Renewed<usize>, RegisterError> {
            let left = self.renewals.load(Ordering::Relaxed); // one thread
            if left == 0 {
                // SAFETY: the caller's promise: a renewal ends the old one.
                let _ = unsafe { self.deregister(handle, range) };
                assert!(!self.panics, "as told");
                return Err(RegisterError::TableFull { capacity: 0 });
            }
            self.renewals.store(left - 1, Ordering::Relaxed); // one thread
            Ok(if self.changes { Renewed::Changed(handle + 1) } else { Renewed::Same })
        }

        unsafe fn restart(&self, _: &usize) -> Result<(), ConnectionLost> {
            Ok(())
        }

        fn fail(&self, _: &usize) {}
    }

    fn slots(renewals: usize, changes: bool) -> Slots {
        Slots { renewals: renewals.into(), changes, connections: 1, ..Slots::default() }
    }

    fn range() -> AddressRange {
        AddressRange::new(4096, 4096).unwrap()
    }

    fn registered<R: Suspend>(device: &R) -> R::Handle {
        // SAFETY: these devices touch no memory.
        unsafe { device.register(range(), Access::READ) }.unwrap()
    }

    fn renew<R: Suspend>(
        device: &R,
        handle: R::Handle,
    ) -> Result<Renewed<R::Handle>, RegisterError> {
        // SAFETY: as above.
        unsafe { device.renew(handle, range(), Access::READ) }
    }

    #[test]
    fn all_are_renewed_or_given_back() {
        let pair = (slots(1, false), Arc::new(slots(1, true)));
        let handle = registered(&pair);
        assert_eq!(renew(&pair, handle), Ok(Renewed::Changed((1, 2))));
        for (first, second) in [(0, 1), (1, 0)] {
            let pair = (slots(first, true), slots(second, false));
            assert!(renew(&pair, registered(&pair)).is_err());
            let held = [&pair.0, &pair.1].map(|it| it.held.load(Ordering::Relaxed)); // one thread
            assert_eq!(held, [0, 0]);
        }
    }

    #[test]
    fn what_panics_leaves_nothing_with_the_others() {
        let panicking = || Slots { panics: true, ..slots(0, false) };
        let left = |device: &Slots| device.held.load(Ordering::Relaxed); // one thread
        let panics = |renew: &dyn Fn()| catch_unwind(AssertUnwindSafe(renew)).is_err();
        for pair in [(panicking(), slots(1, true)), (slots(1, true), panicking())] {
            assert!(panics(&|| {
                let _ = renew(&pair, registered(&pair));
            }));
            assert_eq!((left(&pair.0), left(&pair.1)), (0, 0));
        }
    }

    #[test]
    fn what_is_given_back_leaves_nothing_although_one_panics_over_it() {
        let panicking = || Slots { panics_at_end: true, ..slots(1, true) };
        let pair = (panicking(), slots(0, true));
        let handle = registered(&pair);
        let renewed = catch_unwind(AssertUnwindSafe(|| renew(&pair, handle)));
        let left = [&pair.0, &pair.1].map(|it| it.held.load(Ordering::Relaxed)); // one thread
        assert_eq!(left, [0; 2]);
        assert_eq!(renewed.unwrap(), Err(RegisterError::TableFull { capacity: 0 }));
    }

    #[test]
    fn a_strange_connection_is_named_by_its_place_in_the_whole_list() {
        let pair = (slots(0, false), slots(0, false));
        let list = [OfEither::First(0), OfEither::Second(0), OfEither::Second(1)];
        let refused = pair.can_suspend(range(), &list);
        assert_eq!(refused, Err(Unsupported::Connection { index: 2 }));
        assert_eq!(pair.can_suspend(range(), &list[..2]), Ok(()));
    }
}
