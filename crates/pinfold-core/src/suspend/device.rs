//! What a device must offer to have its regions suspended.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare the functions that open memory to a device, and to
//! hand its caller's word on to [`Registrar::register`].

#![allow(unsafe_code)]

use crate::first_made::FirstMade;
use crate::registrar::{DeregisterError, RegisterError, Registrar};
use crate::{Access, AddressRange};
use std::fmt;
use std::time::{Duration, Instant};

/// A device whose connections can be stopped and whose translations can be taken back for a while.
///
/// Everything here is called with no lock of the cache held. A device that cannot leaves
/// [`can_suspend`](Self::can_suspend) as it is and the rest is never called; one without
/// connections has [`no_connections`](crate::no_connections).
///
/// **A panic** ends the suspension in the open: before anything was handed over all goes on; in
/// [`renew`](Self::renew) and [`restart`](Self::restart) every connection that is still stopped is
/// [failed](Self::fail). A `renew` that panics has registered nothing and given the old
/// registration back. The panic goes on to the caller, except where the others of a list must
/// have their turn; then [`device_panics`](crate::SuspensionStatistics::device_panics) counts it.
///
/// How the kinds of device fit:
///
/// | | a ring with fixed buffers | verbs | a device that pages on demand |
/// |---|---|---|---|
/// | connection | none | a queue pair | a queue pair |
/// | `stop` | nothing: a use needs a lease, and gets are held back | to SQD; a peer that touches the range must agree | the same |
/// | `in_flight` | nothing beyond the leases | send queue not drained yet | the same |
/// | `withdraw` | the slot is emptied | deregistered, so that the pages may move | nothing: pages go as they are moved |
/// | `quiet` | no slot holds it, and the completion of its tag was seen, where registrations carry tags; else the program's word | nothing refused to go (a window bound to it), or was out of reach (the descriptor was closed) | true |
/// | `renew` | the same slot filled again: same key | registered anew: the keys change | nothing: same key |
///
/// # Safety
///
/// Memory is moved by what a device answers here. When it has said that it [can](Self::can_suspend), a connection that was
/// [stopped](Self::stop) begins nothing in the range before it is [restarted](Self::restart);
/// [`in_flight`](Self::in_flight) names what may still touch it; and once the registrations are withdrawn or deregistered
/// and the range is [quiet](Self::quiet), the device has no translation of it. A connection that is lost, or was
/// [failed](Self::fail), touches nothing any more.
///
/// One thing may be left to the program: a device without connections that cannot tell when requests on a lease that was
/// handed over have ended, as a ring without tags, calls a range quiet although they are under way. It says so
/// where it is made, and code that moves memory by a `Suspended` asks its caller for that in words: no request is
/// in flight on a lease that was handed over, unless the device sees to it.
pub unsafe trait Suspend: Registrar {
    /// What stops and goes on: a queue pair, a ring.
    type Connection: Clone + PartialEq + fmt::Debug + Send + Sync + 'static;

    /// The time on the clock by which deadlines are kept; it never goes back.
    fn now(&self) -> Duration {
        static ORIGIN: FirstMade<Instant> = FirstMade::new();
        ORIGIN.get_or_make(|| Box::new(Instant::now())).elapsed()
    }

    /// Whether the device can keep all of these connections, and through them their peers, from
    /// touching `range`. Asked before anything is touched.
    ///
    /// # Errors
    ///
    /// [`Unsupported`], which is what a device says that knows nothing better.
    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        let _ = (range, connections);
        Err(Unsupported::Device)
    }

    /// Tells the device to begin nothing new on `connection`, transfers of its peer included.
    /// Returns at once.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`] if there is none to stop any more.
    fn stop(&self, connection: &Self::Connection) -> Result<(), ConnectionLost>;

    /// What a stopped connection still has under way that may touch `range`; all it has under
    /// way, if the device cannot tell.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`] if the connection died: then nothing of it is under way. One that its program has made ready
    /// again meanwhile is not stopped: it is [failed](Self::fail) first, or has a transfer under way. So has one that the
    /// device cannot be asked about, as behind a closed descriptor.
    fn in_flight(
        &self,
        connection: &Self::Connection,
        range: AddressRange,
    ) -> Result<Transfers, ConnectionLost>;

    /// Takes the translation of a registration out of the device and leaves its handle valid for
    /// [`renew`](Self::renew). Where that cannot be told apart from deregistering, nothing.
    ///
    /// # Errors
    ///
    /// [`DeregisterError`] if the device is gone or refuses.
    ///
    /// # Safety
    ///
    /// `handle` is a live registration of `range` by this registrar, and the caller owns it: as for
    /// [`Registrar::deregister`].
    unsafe fn withdraw(
        &self,
        handle: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        let _ = (handle, range);
        Ok(())
    }

    /// Whether the device has dropped every translation of `range` that was withdrawn or given
    /// back: of copies in its own caches too.
    fn quiet(&self, range: AddressRange) -> bool {
        let _ = range;
        true
    }

    /// Gives a withdrawn registration the pages that are at `range` now, also where [`withdraw`](Self::withdraw) failed or was
    /// not called: what changed meanwhile counts as known to it. On an error nothing is registered any more.
    ///
    /// # Errors
    ///
    /// [`RegisterError`], as from registering.
    ///
    /// # Safety
    ///
    /// As for [`Registrar::register`], and `handle` is a registration of `range` that the caller owns
    /// and has withdrawn.
    unsafe fn renew(
        &self,
        handle: Self::Handle,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<Self::Handle>, RegisterError> {
        // What the device cannot give back it has lost: either way the old handle is over.
        // SAFETY: the caller's promise: the withdrawn registration is renewed or over.
        let _gone = unsafe { self.deregister(handle, range) };
        // SAFETY: the caller's promise.
        unsafe { self.register(range, access) }.map(Renewed::Changed)
    }

    /// Lets a stopped connection go on. Never re-establishes one.
    ///
    /// # Errors
    ///
    /// [`ConnectionLost`] if it died meanwhile.
    ///
    /// # Safety
    ///
    /// No memory is being re-arranged on the word that the connection stands still, on which the caller's `stop`
    /// stood. What others stopped for themselves, another cache of the device for one, is the device's to count: it
    /// goes on with the last.
    unsafe fn restart(&self, connection: &Self::Connection) -> Result<(), ConnectionLost>;

    /// Ends a connection in the open: its program and its peer hear of it, and what was posted
    /// is aborted.
    fn fail(&self, connection: &Self::Connection);

    /// Waits for progress, at most until `until` on the device's clock.
    fn wait(&self, until: Duration) {
        const STEP: Duration = Duration::from_micros(50);
        std::thread::sleep(until.saturating_sub(self.now()).min(STEP));
    }
}

/// What an implementation of [`Suspend`] has for a device without connections, where everything that uses a registration
/// holds a lease: the type of a connection that there is none of, and the four methods that would be called with one.
///
/// ```
/// use pinfold_core::{AddressRange, Suspend, Unsupported};
/// # use pinfold_core::{Access, DeregisterError, RegisterError, Registrar, RegistrarLimits};
/// # struct Table;
/// # unsafe impl Registrar for Table {
/// #     type Handle = u32;
/// #     fn limits(&self) -> RegistrarLimits { unimplemented!() }
/// #     unsafe fn register(&self, _: AddressRange, _: Access) -> Result<u32, RegisterError> { Ok(0) }
/// #     unsafe fn deregister(&self, _: u32, _: AddressRange) -> Result<(), DeregisterError> { Ok(()) }
/// # }
///
/// // SAFETY: whatever uses a registration of this table holds a lease, and what is deregistered it does not translate.
/// unsafe impl Suspend for Table {
///     pinfold_core::no_connections!();
///
///     fn can_suspend(&self, _: AddressRange, _: &[Self::Connection]) -> Result<(), Unsupported> {
///         Ok(())
///     }
/// }
/// ```
#[macro_export]
macro_rules! no_connections {
    () => {
        type Connection = ::core::convert::Infallible;

        fn stop(
            &self,
            none: &Self::Connection,
        ) -> ::core::result::Result<(), $crate::ConnectionLost> {
            match *none {}
        }

        fn in_flight(
            &self,
            none: &Self::Connection,
            _: $crate::AddressRange,
        ) -> ::core::result::Result<$crate::Transfers, $crate::ConnectionLost> {
            match *none {}
        }

        unsafe fn restart(
            &self,
            none: &Self::Connection,
        ) -> ::core::result::Result<(), $crate::ConnectionLost> {
            match *none {}
        }

        fn fail(&self, none: &Self::Connection) {
            match *none {}
        }
    };
}

/// What a renewed registration is known by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Renewed<H> {
    /// By the same handle as before.
    Same,
    /// By another.
    Changed(H),
}

/// Transfers under way on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Transfers {
    /// How many; 0 is none.
    pub count: usize,
    /// How long the oldest has been under way.
    pub oldest: Duration,
}

/// Why a device cannot suspend a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unsupported {
    /// It has no way to stop anything.
    Device,
    /// The peer of a connection may write at any time, and has not agreed to keep off.
    PeerMayWrite {
        /// What it must keep off: what is to be suspended, and all of each registration whose key is over with that.
        range: AddressRange,
    },
    /// The connection is of a kind, or in a state, that cannot be stopped.
    Connection {
        /// Which, by its place in the list.
        index: usize,
    },
    /// The kernel or driver refuses the request that stops a connection.
    Refused {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("the device does not know how to stop: end the leases"),
            Self::PeerMayWrite { range } => {
                write!(f, "a peer may write at any time: have it agree to keep off {range} first")
            }
            Self::Connection { index } => {
                write!(f, "connection {index} of the list cannot be stopped as it is: end it first")
            }
            Self::Refused { operation, errno } => {
                write!(f, "{operation} failed: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for Unsupported {}

/// Why a connection is no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConnectionLost {
    /// It ended before it was asked for.
    Gone,
    /// Its retries ran out: with a stopped end, because the peer did not wait as long.
    TimedOut,
    /// The peer ended it.
    ByPeer,
    /// It broke for another reason.
    Broken {
        /// The device's error number.
        errno: i32,
    },
}

impl fmt::Display for ConnectionLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("there is no such connection any more: connect again"),
            Self::TimedOut => f.write_str("the retries ran out: suspend for a shorter time"),
            Self::ByPeer => f.write_str("the peer ended it: connect again"),
            Self::Broken { errno } => {
                write!(f, "the connection broke (error {errno}): connect again")
            }
        }
    }
}

impl std::error::Error for ConnectionLost {}
