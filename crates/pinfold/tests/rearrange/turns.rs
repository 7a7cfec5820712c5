//! What happens in the middle of a renewal, inside the device: forks, and gets that wait for it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to pass a registration on, and to fork.

#![allow(unsafe_code)]

use super::registrar_support::alone;
use super::rig::*;
use pinfold::registrar::{LockedPages, Mlock};
use pinfold::suspend::{Ended, Expired, Renewed, Suspend, Unsupported};
use pinfold::{Access, AddressRange, DeregisterError, RegisterError, Registrar, RegistrarLimits};
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Forks when it renews, and goes on in the child as if nothing had been.
struct Forks(Mlock);

/// The child's number, zero in the child, less before there is one.
static CHILD: AtomicI32 = AtomicI32::new(-1);

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Forks {
    type Handle = LockedPages;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<LockedPages, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(range, access) }
    }

    unsafe fn deregister(
        &self,
        handle: LockedPages,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.deregister(handle, range) }
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Suspend for Forks {
    pinfold::no_connections!();

    fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }

    unsafe fn renew(
        &self,
        _: LockedPages,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<LockedPages>, RegisterError> {
        // SAFETY: the child runs the rest of its test's thread and leaves by `_exit`.
        CHILD.store(unsafe { libc::fork() }, Ordering::Relaxed); // one thread
        Ok(Renewed::Same)
    }
}

#[test]
fn a_child_that_comes_back_from_a_renewal_is_told() {
    alone("turns::a_child_that_comes_back_from_a_renewal_is_told", || {
        let (_memory, range) = memory(4096);
        let Some(cache) = cache(Forks(Mlock::new().unwrap())) else { return };
        let suspended = suspend(&cache, range, vec![get(&cache, range)]);
        let resumed = suspended.resume();
        let child = CHILD.load(Ordering::Relaxed); // one thread
        if child == 0 {
            let told = matches!(resumed, Err(Expired { reason: Ended::Forked, .. }));
            // SAFETY: ends this child.
            unsafe { libc::_exit(i32::from(!told)) };
        }
        assert!(child > 0);
        let mut status = 0;
        // SAFETY: `status` has room for the answer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
        assert!(resumed.unwrap().leases[0].is_ok());
    });
}

/// Renews when it is told to.
struct Waits {
    inner: Mlock,
    /// One word when it begins to renew, one for it to go on.
    began: SyncSender<()>,
    go_on: Mutex<Receiver<()>>,
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Registrar for Waits {
    type Handle = LockedPages;

    fn limits(&self) -> RegistrarLimits {
        self.inner.limits()
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<LockedPages, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.register(range, access) }
    }

    unsafe fn deregister(
        &self,
        handle: LockedPages,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.deregister(handle, range) }
    }
}

// SAFETY: as declared: no device stands behind it, and no memory is touched through its handles.
unsafe impl Suspend for Waits {
    pinfold::no_connections!();

    fn can_suspend(&self, _: AddressRange, _: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }

    unsafe fn renew(
        &self,
        _: LockedPages,
        range: AddressRange,
        _: Access,
    ) -> Result<Renewed<LockedPages>, RegisterError> {
        self.began.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        if range.len() == PAGES_THAT_FAIL * 4096 {
            return Err(RegisterError::TableFull { capacity: 0 });
        }
        Ok(Renewed::Same)
    }
}

const PAGES_THAT_FAIL: usize = 3;

/// A registration that reaches beyond what is suspended would serve gets of the rest, which wait for
/// its renewal. They once waited for ever, because its end did not wake them.
#[test]
fn a_get_that_waits_for_a_renewal_goes_on_whatever_becomes_of_it() {
    for pages in [2, PAGES_THAT_FAIL] {
        let (_memory, range) = memory(pages * 4096);
        let page = |n: usize| AddressRange::new(range.start() + n * 4096, 4096).unwrap();
        let ((began, beginning), (go_on, going)) = (sync_channel(1), sync_channel(1));
        let inner = Mlock::new().unwrap();
        let Some(cache) = cache(Waits { inner, began, go_on: Mutex::new(going) }) else { return };
        let suspended = suspend(&cache, page(0), vec![get(&cache, range)]);
        std::thread::scope(|scope| {
            let resuming = scope.spawn(|| suspended.resume().unwrap());
            beginning.recv().unwrap();
            let getting = scope.spawn(|| drop(get(&cache, page(1))));
            while cache.statistics().waits == 0 {
                std::thread::yield_now();
            }
            go_on.send(()).unwrap();
            assert_eq!(resuming.join().unwrap().leases[0].is_ok(), pages != PAGES_THAT_FAIL);
            getting.join().unwrap();
        });
    }
}
