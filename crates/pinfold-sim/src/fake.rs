//! Devices and monitors that tests write in safe code, and the cache's entry points for them.
//!
//! A test implements [`FakeDevice`], [`FakeSuspend`] or [`FakeMonitor`], whose functions are safe, and hands the cache a
//! [`Fake`] of it. Each test has a device of its own with what it needs: room, faults, a log of calls. What none of them
//! says anything about is as simple as can be: no connections, no changes.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement the cache's unsafe traits for all of them, and to call the functions that
//! take an address. No memory is at stake where one of a test is wrong:
//!
//! - Behind a fake device there is none that could reach memory by the handles that it gives, whatever address they were made
//!   for. Next to a real device in a pair it may refuse, and has no say in what the other one may reach (`several` in the core).
//! - A fake monitor is believed of no memory that a device reaches. It says that it is simulated, as a fake device does, which
//!   what a test implements cannot change; and no cache takes a simulated monitor with a registrar that is not
//!   ([`ConfigError::SimulatedMonitor`](pinfold_core::ConfigError::SimulatedMonitor)). What asks monitors without a cache
//!   is unsafe to call, and excludes these.

#![allow(unsafe_code)]

use pinfold_core::first_made::FirstMade;
use pinfold_core::{
    Access, AddressRange, Cache, Change, ChangeMark, Checked, ConnectionLost, Cover,
    DeregisterError, GetError, GetRequest, Lease, Lost, MappingKind, Monitor, Pieces, Position,
    RegisterError, Registrar, RegistrarLimits, Renewed, Replay, Sequence, Suspend, Transfers,
    Translation, Unsupported, UseCosts, Watch,
};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A device or a monitor of a test, as the cache takes it. Either says that it is simulated: no cache takes a fake monitor with a
/// registrar that is not ([`ConfigError::SimulatedMonitor`](pinfold_core::ConfigError::SimulatedMonitor)).
#[derive(Clone, Copy, Default, Debug)]
pub struct Fake<T>(pub T);

impl<T> Deref for Fake<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A [`Registrar`] behind which no device stands. What is not said is as there.
pub trait FakeDevice: Send + Sync + 'static {
    /// What names a registration.
    type Handle: Copy + fmt::Debug + Send + Sync + 'static;

    /// See [`Registrar::limits`]: pages of 4 KiB, 1 GiB at once, 2^20 registrations.
    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits::new(4096, 1 << 30, 1 << 20)
    }

    /// See [`Registrar::pinned_limit`].
    fn pinned_limit(&self) -> Option<usize> {
        None
    }

    /// See [`Registrar::granted`].
    fn granted(&self, wanted: Access) -> Access {
        wanted
    }

    /// See [`Registrar::widened`].
    fn widened(&self, range: AddressRange) -> AddressRange {
        range
    }

    /// See [`Registrar::pins_per_page`].
    fn pins_per_page(&self) -> usize {
        1
    }

    /// See [`Registrar::translation`].
    fn translation(&self) -> Translation {
        Translation::Pinned
    }

    /// See [`Registrar::register`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn register(&self, range: AddressRange, access: Access) -> Result<Self::Handle, RegisterError>;

    /// See [`Registrar::deregister`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn deregister(&self, handle: Self::Handle, range: AddressRange) -> Result<(), DeregisterError>;
}

/// A [`Suspend`] behind which no device stands. What is not said succeeds at once, but that it cannot suspend.
pub trait FakeSuspend: FakeDevice {
    /// What stops and goes on.
    type Connection: Clone + PartialEq + fmt::Debug + Send + Sync + 'static;

    /// See [`Suspend::now`]: the machine's clock.
    fn now(&self) -> Duration {
        static ORIGIN: FirstMade<Instant> = FirstMade::new();
        ORIGIN.get_or_make(|| Box::new(Instant::now())).elapsed()
    }

    /// See [`Suspend::can_suspend`].
    ///
    /// # Errors
    ///
    /// That it cannot.
    fn can_suspend(
        &self,
        _range: AddressRange,
        _connections: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        Err(Unsupported::Device)
    }

    /// See [`Suspend::stop`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn stop(&self, _connection: &Self::Connection) -> Result<(), ConnectionLost> {
        Ok(())
    }

    /// See [`Suspend::in_flight`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn in_flight(
        &self,
        _connection: &Self::Connection,
        _range: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        Ok(Transfers::default())
    }

    /// See [`Suspend::withdraw`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn withdraw(&self, _handle: Self::Handle, _range: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }

    /// See [`Suspend::quiet`].
    fn quiet(&self, _range: AddressRange) -> bool {
        true
    }

    /// See [`Suspend::renew`]: deregistered and registered.
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn renew(
        &self,
        handle: Self::Handle,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<Self::Handle>, RegisterError> {
        // What the device cannot give back it has lost.
        let _gone = self.deregister(handle, range);
        self.register(range, access).map(Renewed::Changed)
    }

    /// See [`Suspend::restart`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn restart(&self, _connection: &Self::Connection) -> Result<(), ConnectionLost> {
        Ok(())
    }

    /// See [`Suspend::fail`].
    fn fail(&self, _connection: &Self::Connection) {}

    /// See [`Suspend::wait`].
    fn wait(&self, until: Duration) {
        const STEP: Duration = Duration::from_micros(50);
        thread::sleep(until.saturating_sub(self.now()).min(STEP));
    }
}

/// A [`Monitor`] of memory that is not there. What is not said: everything is watched and nothing ever changes.
pub trait FakeMonitor: Send + Sync + 'static {
    /// See [`Monitor::name`].
    fn name(&self) -> &'static str {
        "fake"
    }

    /// See [`Monitor::check`].
    ///
    /// # Errors
    ///
    /// What the test wants.
    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(2))
    }

    /// See [`Monitor::watch`].
    fn watch(&self, _range: AddressRange) -> Watch {
        Watch::Covered
    }

    /// See [`Monitor::change_pending`].
    fn change_pending(&self, _range: AddressRange) -> bool {
        false
    }

    /// See [`Monitor::replay`].
    fn replay(&self, _from: Position, _visit: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(2), complete: true, may_repeat: false }
    }

    /// See [`Monitor::replay_some`].
    fn replay_some(
        &self,
        from: Position,
        _most: usize,
        visit: &mut dyn FnMut(AddressRange),
    ) -> Replay {
        self.replay(from, visit)
    }

    /// See [`Monitor::mark_changes`].
    fn mark_changes(&self, _range: AddressRange) -> Option<Box<dyn ChangeMark + '_>> {
        None
    }

    /// See [`Monitor::coverage`].
    fn coverage(&self, _mapping: MappingKind, _change: Change) -> Cover {
        Cover::Detected
    }

    /// See [`Monitor::has_slow_check`].
    fn has_slow_check(&self) -> bool {
        false
    }

    /// See [`Monitor::change_surcharge`].
    fn change_surcharge(&self) -> u64 {
        0
    }

    /// See [`Monitor::forked`].
    fn forked(&self) -> bool {
        false
    }

    /// See [`Monitor::notified`].
    fn notified(&self) -> u32 {
        0
    }

    /// See [`Monitor::notify`].
    fn notify(&self) {}

    /// See [`Monitor::wait`].
    fn wait(&self, _seen: u32) {}
}

/// The monitor of memory that never changes.
#[derive(Clone, Copy, Default, Debug)]
pub struct Calm;

impl FakeMonitor for Calm {}

/// The device that registers whatever it is asked to.
#[derive(Clone, Copy, Default, Debug)]
pub struct Willing;

impl FakeDevice for Willing {
    type Handle = ();

    fn register(&self, _range: AddressRange, _access: Access) -> Result<(), RegisterError> {
        Ok(())
    }

    fn deregister(&self, (): (), _range: AddressRange) -> Result<(), DeregisterError> {
        Ok(())
    }
}

/// One device for several owners.
impl<D: FakeDevice> FakeDevice for Arc<D> {
    type Handle = D::Handle;

    fn limits(&self) -> RegistrarLimits {
        D::limits(self)
    }

    fn pinned_limit(&self) -> Option<usize> {
        D::pinned_limit(self)
    }

    fn granted(&self, wanted: Access) -> Access {
        D::granted(self, wanted)
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        D::widened(self, range)
    }

    fn pins_per_page(&self) -> usize {
        D::pins_per_page(self)
    }

    fn translation(&self) -> Translation {
        D::translation(self)
    }

    fn register(&self, range: AddressRange, access: Access) -> Result<D::Handle, RegisterError> {
        D::register(self, range, access)
    }

    fn deregister(&self, handle: D::Handle, range: AddressRange) -> Result<(), DeregisterError> {
        D::deregister(self, handle, range)
    }
}

// SAFETY: no device stands behind it, so no handle reaches any memory.
unsafe impl<D: FakeDevice> Registrar for Fake<D> {
    type Handle = D::Handle;

    fn limits(&self) -> RegistrarLimits {
        self.0.limits()
    }

    fn pinned_limit(&self) -> Option<usize> {
        self.0.pinned_limit()
    }

    fn granted(&self, wanted: Access) -> Access {
        self.0.granted(wanted)
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        self.0.widened(range)
    }

    fn pins_per_page(&self) -> usize {
        self.0.pins_per_page()
    }

    fn translation(&self) -> Translation {
        self.0.translation()
    }

    fn is_simulated(&self) -> bool {
        true
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<D::Handle, RegisterError> {
        self.0.register(range, access)
    }

    unsafe fn deregister(
        &self,
        handle: D::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.0.deregister(handle, range)
    }
}

// SAFETY: no device stands behind it, so nothing is moved under a transfer.
unsafe impl<D: FakeSuspend> Suspend for Fake<D> {
    type Connection = D::Connection;

    fn now(&self) -> Duration {
        self.0.now()
    }

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[D::Connection],
    ) -> Result<(), Unsupported> {
        self.0.can_suspend(range, connections)
    }

    fn stop(&self, connection: &D::Connection) -> Result<(), ConnectionLost> {
        self.0.stop(connection)
    }

    fn in_flight(
        &self,
        connection: &D::Connection,
        range: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        self.0.in_flight(connection, range)
    }

    unsafe fn withdraw(
        &self,
        handle: D::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.0.withdraw(handle, range)
    }

    fn quiet(&self, range: AddressRange) -> bool {
        self.0.quiet(range)
    }

    unsafe fn renew(
        &self,
        handle: D::Handle,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<D::Handle>, RegisterError> {
        self.0.renew(handle, range, access)
    }

    unsafe fn restart(&self, connection: &D::Connection) -> Result<(), ConnectionLost> {
        self.0.restart(connection)
    }

    fn fail(&self, connection: &D::Connection) {
        self.0.fail(connection);
    }

    fn wait(&self, until: Duration) {
        self.0.wait(until);
    }
}

// SAFETY: it says that it is simulated, so it is believed of no memory that a device could reach: see the header.
unsafe impl<M: FakeMonitor> Monitor for Fake<M> {
    pinfold_core::forward_monitor!(self, self.0, is_simulated: true);

    fn watch(&self, range: AddressRange) -> Watch {
        self.0.watch(range)
    }
}

/// A registrar of fake devices only.
///
/// # Safety
///
/// No memory of this process is read or written by a handle of it.
pub unsafe trait Simulated: Registrar {}

// SAFETY: no device stands behind it.
unsafe impl<D: FakeDevice> Simulated for Fake<D> {}

// SAFETY: nor behind several of them.
unsafe impl<A: Simulated, B: Simulated> Simulated for (A, B) {}

// SAFETY: as above.
unsafe impl<R: Simulated> Simulated for Arc<R> {}

// SAFETY: as above.
unsafe impl<R: Simulated, const N: usize> Simulated for [R; N] {}

/// A request of any address: with fake devices there is nothing to answer for.
#[derive(Debug)]
#[must_use = "nothing is leased before `get`, `get_if_cached`, `get_if_worth` or `pieces`"]
pub struct SimulatedRequest<'c, R: Simulated, M: Monitor>(pub GetRequest<'c, R, M>);

impl<'c, R: Simulated, M: Monitor> SimulatedRequest<'c, R, M> {
    /// See [`Cache::request`].
    pub fn new(cache: &'c Cache<R, M>, range: AddressRange, access: Access) -> Self {
        Self(cache.request(start_of(range), range.len(), access))
    }

    /// See [`GetRequest::once`].
    pub fn once(self) -> Self {
        Self(self.0.once())
    }

    /// See [`GetRequest::to_keep`].
    pub fn to_keep(self) -> Self {
        Self(self.0.to_keep())
    }

    /// See [`GetRequest::vouched`].
    pub fn vouched(self) -> Self {
        Self(self.0.vouched())
    }

    /// See [`GetRequest::wait_until`].
    pub fn wait_until(self, deadline: Instant) -> Self {
        Self(self.0.wait_until(deadline))
    }

    /// See [`GetRequest::get`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn get(self) -> Result<Lease<'c, R, M>, GetError> {
        // SAFETY: no device stands behind a fake one.
        unsafe { self.0.get() }
    }

    /// See [`GetRequest::get_if_cached`].
    pub fn get_if_cached(self) -> Option<Lease<'c, R, M>> {
        // SAFETY: as in `get`.
        unsafe { self.0.get_if_cached() }
    }

    /// See [`GetRequest::get_if_worth`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn get_if_worth(self, costs: UseCosts) -> Result<Option<Lease<'c, R, M>>, GetError> {
        // SAFETY: as in `get`.
        unsafe { self.0.get_if_worth(costs) }
    }

    /// See [`GetRequest::pieces`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn pieces(self) -> Result<Pieces<'c, R, M>, GetError> {
        // SAFETY: as in `get`.
        unsafe { self.0.pieces() }
    }
}

/// See [`Cache::get`].
///
/// # Errors
///
/// As there.
pub fn get_simulated<R: Simulated, M: Monitor>(
    cache: &Cache<R, M>,
    range: AddressRange,
    access: Access,
) -> Result<Lease<'_, R, M>, GetError> {
    // SAFETY: no device stands behind a fake one.
    unsafe { cache.get(start_of(range), range.len(), access) }
}

/// See [`Checked::get`].
///
/// # Errors
///
/// As there.
pub fn get_checked<'c, R: Simulated, M: Monitor>(
    checked: &Checked<'c, R, M>,
    range: AddressRange,
    access: Access,
) -> Result<Lease<'c, R, M>, GetError> {
    // SAFETY: no device stands behind a fake one.
    unsafe { checked.get(start_of(range), range.len(), access) }
}

fn start_of(range: AddressRange) -> *const u8 {
    std::ptr::without_provenance(range.start())
}
