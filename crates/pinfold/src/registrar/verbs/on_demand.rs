//! Registrations whose pages are not pinned: the device shares the process's page table.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to register, suspend and prefetch, as the pinning registrar does, to test the device with memory of
//! its own, and to make the monitor that only such a registrar may have.

#![allow(unsafe_code)]

use super::attributes::{Operations, Transport};
use super::connection::Connection;
use super::device::{DeviceError, Domain, is_gone};
use super::ffi::*;
use super::loopback::{Loopback, LoopbackDirection, LoopbackError, Transfer};
use super::registrar::{MemoryRegion, Verbs, granted};
use crate::fork_mark::FORKED;
use crate::monitor::{NoMonitor, StartError};
use libc::c_uint;
use pinfold_core::{
    Access, AddressRange, ConnectionLost, DeregisterError, RegisterError, Registrar,
    RegistrarLimits, Renewed, Suspend, Transfers, Translation, Unsupported,
};
use pinfold_kernel::{Errno, mapping::OwnedMapping, memory, process::page_bytes};
use std::mem;
use std::sync::Arc;

/// Registers memory that stays unpinned: the device follows the process's page table.
///
/// What the program does to its mappings is what the device sees, so a registration never goes
/// stale and needs no monitor: [`on_demand_cache`](crate::on_demand_cache) makes a cache of it.
/// Nothing counts against `RLIMIT_MEMLOCK`. The price: the first touch of each page, and the first
/// one after every change of its mapping, is a page fault of the device, which stalls the transfer
/// (tens of microseconds to a millisecond); [`prefetch`](Self::prefetch) takes it beforehand, where
/// the device and the library can.
///
/// The device's word is not enough: Soft-RoCE of Linux 7.3 claims to page on demand, and takes the
/// bytes of every packet from the beginning of a page. [`new`](Self::new) refuses such a device.
#[derive(Debug)]
pub struct OnDemand {
    verbs: Verbs,
    operations: Operations,
}

impl OnDemand {
    /// What a cache of it needs.
    pub(crate) fn monitor(&self) -> Result<NoMonitor, StartError> {
        // SAFETY: what is registered here follows the page table.
        unsafe { NoMonitor::page_table_coherent() }
    }

    /// Registers with `domain`, for `operations` over `transport`, after a test: a few kilobytes go
    /// through a [`Loopback`] and are compared. Milliseconds.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OnDemand`] if the device needs pinned pages for one of the operations,
    /// [`DeviceError::WrongBytes`] if it failed the test, [`DeviceError::Untestable`] if there was none,
    /// for want of an active port, [`DeviceError::Gone`] if the device went during the test; others as [`Verbs::new`].
    pub fn new(
        domain: Arc<Domain>,
        transport: Transport,
        operations: Operations,
    ) -> Result<Self, DeviceError> {
        // SAFETY: the test takes the place of the caller's word.
        let registrar = unsafe { Self::untested(domain, transport, operations) }?;
        self_test(&registrar)?;
        Ok(registrar)
    }

    /// As [`new`](Self::new), without the test.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), except those of the test.
    ///
    /// # Safety
    ///
    /// The device reads and writes the bytes that it is told to, or those that it is told to are
    /// ones which it gets right (Soft-RoCE: messages that begin at a page, over a path whose packets
    /// hold exactly a page). Any other may write elsewhere in the pages of a region.
    pub unsafe fn untested(
        domain: Arc<Domain>,
        transport: Transport,
        operations: Operations,
    ) -> Result<Self, DeviceError> {
        let device = domain.device();
        let offered = device
            .attributes()
            .on_demand
            .map_or(Operations::default(), |paging| paging.operations(transport));
        let missing = operations.without(offered);
        if !missing.is_empty() || offered.is_empty() {
            let name = device.name().to_owned();
            return Err(DeviceError::OnDemand { name, transport, missing });
        }
        Ok(Self { verbs: Verbs::new(domain)?, operations: offered })
    }

    /// As [`Verbs::with_flags`].
    #[must_use]
    pub fn with_flags(self, flags: c_uint) -> Self {
        Self { verbs: self.verbs.with_flags(flags), ..self }
    }

    /// The protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        self.verbs.domain()
    }

    /// Everything that the device does on demand over the transport, asked for or not.
    pub fn operations(&self) -> Operations {
        self.operations
    }

    pub(super) fn verbs(&self) -> &Verbs {
        &self.verbs
    }

    /// Has the device take its page faults on `part` of a region now; returns when it has.
    ///
    /// `access` says whether the pages shall be writable. Pages may go again at any time.
    ///
    /// # Errors
    ///
    /// [`PrefetchError`]; transfers work all the same, but slower. In a forked child, whose parent's the region is,
    /// [`PrefetchError::Os`] with `ESRCH`.
    pub fn prefetch(
        &self,
        region: MemoryRegion,
        part: AddressRange,
        access: Access,
    ) -> Result<(), PrefetchError> {
        if self.verbs.forked() {
            return Err(PrefetchError::Os { errno: FORKED });
        }
        let advice = match access.writes() {
            true => IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
            false => IBV_ADVISE_MR_ADVICE_PREFETCH,
        };
        part.pieces(PREFETCH_BYTES).try_for_each(|piece| self.prefetch_piece(region, piece, advice))
    }

    fn prefetch_piece(
        &self,
        region: MemoryRegion,
        piece: AddressRange,
        advice: c_uint,
    ) -> Result<(), PrefetchError> {
        let length = u32::try_from(piece.len()).unwrap_or(u32::MAX);
        let mut pieces = [ibv_sge { addr: piece.start() as u64, length, lkey: region.lkey() }];
        let (domain, device) = (self.domain(), self.domain().device());
        // SAFETY: the domain is live.
        let status = device.ask(|| unsafe {
            let flags = IBV_ADVISE_MR_FLAG_FLUSH;
            device.library().advise_mr(domain.as_ptr(), advice, flags, &mut pieces)
        });
        match status {
            0 => Ok(()),
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => {
                Err(PrefetchError::Unsupported { errno: status })
            }
            libc::EFAULT | libc::ENOENT | libc::EINVAL => {
                Err(PrefetchError::BadAddress { range: piece, errno: status })
            }
            errno => Err(PrefetchError::Os { errno }),
        }
    }
}

/// How much one call of `ibv_advise_mr` is asked for, in bytes: its lengths have 32 bits.
const PREFETCH_BYTES: usize = 1 << 30;

// SAFETY: as for [`Verbs`]; such a region follows the page table, which `translation` says.
unsafe impl Registrar for OnDemand {
    type Handle = MemoryRegion;

    fn limits(&self) -> RegistrarLimits {
        self.verbs.limits()
    }

    fn translation(&self) -> Translation {
        Translation::OnDemand
    }

    fn granted(&self, wanted: Access) -> Access {
        granted(wanted)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.verbs.register_with(range, access, IBV_ACCESS_ON_DEMAND) }
    }

    unsafe fn deregister(
        &self,
        handle: MemoryRegion,
        _: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.verbs.give_back(handle)
    }
}

/// Queue pairs are stopped as with [`Verbs`]; registrations stay, because the device follows the page
/// table, and so do the keys.
// SAFETY: queue pairs as with [`Verbs`]; the device follows the page table, so that nothing has to be withdrawn.
unsafe impl Suspend for OnDemand {
    type Connection = Connection;

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Connection],
    ) -> Result<(), Unsupported> {
        if self.verbs().forked() {
            return Err(Unsupported::Device);
        }
        // The keys stay, so what lies around the range may be touched.
        let exposed = self.verbs().exposed_around(range).map(|_| range);
        self.verbs().can_stop(exposed, connections)
    }

    fn stop(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        connection.stop()
    }

    fn in_flight(
        &self,
        connection: &Connection,
        _: AddressRange,
    ) -> Result<Transfers, ConnectionLost> {
        connection.in_flight_or_failed()
    }

    unsafe fn renew(
        &self,
        _: MemoryRegion,
        _: AddressRange,
        _: Access,
    ) -> Result<Renewed<MemoryRegion>, RegisterError> {
        Ok(Renewed::Same)
    }

    unsafe fn restart(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        // SAFETY: the caller's promise, passed on.
        unsafe { connection.restart() }
    }

    fn fail(&self, connection: &Connection) {
        connection.fail();
    }
}

/// Why pages were not fetched beforehand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrefetchError {
    /// The device, the kernel or the library has no such advice.
    #[error(
        "nothing here prefetches for this device (errno {errno}): go on without, or use a newer \
         rdma-core and kernel"
    )]
    Unsupported {
        /// The library's error number.
        errno: i32,
    },
    /// Part of the range is not in the region, not mapped, or not writable.
    #[error("{range} cannot be prefetched (errno {errno}): register and map all of it")]
    BadAddress {
        /// What was to be fetched.
        range: AddressRange,
        /// The kernel's error number.
        errno: i32,
    },
    /// Something else went wrong.
    #[error("ibv_advise_mr failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The kernel's error number.
        errno: i32,
    },
}

// --- the test ----------------------------------------------------------------------------------

/// Moves bytes that begin and end within pages out of unpinned memory and into it, before and after
/// its pages were exchanged.
fn self_test(registrar: &OnDemand) -> Result<(), DeviceError> {
    let name = || registrar.domain().device().name().to_owned();
    let test = Test::new(registrar).map_err(|why| why.of(name()))?;
    let end = test.run();
    if matches!(end, Err(Unproven::Loopback(LoopbackError::Stuck { .. }))) {
        // Leaked: the device may go on with the test's memory, which must not become other code's.
        mem::forget(test);
    }
    end.map_err(|why| why.of(name()))
}

/// Why a test did not succeed.
enum Unproven {
    /// The device did something else than it was told.
    Wrong(&'static str),
    Loopback(LoopbackError),
    Open(DeviceError),
}

impl Unproven {
    fn of(self, name: String) -> DeviceError {
        match self {
            Self::Wrong(what) => DeviceError::WrongBytes { name, what },
            Self::Loopback(LoopbackError::Os { errno, .. }) if is_gone(errno) => {
                DeviceError::Gone { errno }
            }
            Self::Loopback(error) => DeviceError::Untestable { name, why: error.to_string() },
            Self::Open(error) => error,
        }
    }
}

impl From<LoopbackError> for Unproven {
    fn from(error: LoopbackError) -> Self {
        Self::Loopback(error)
    }
}

impl From<DeviceError> for Unproven {
    fn from(error: DeviceError) -> Self {
        Self::Open(error)
    }
}

impl From<RegisterError> for Unproven {
    fn from(error: RegisterError) -> Self {
        let errno = match error {
            RegisterError::DeviceGone { errno } => return Self::Open(DeviceError::Gone { errno }),
            RegisterError::Os { errno, .. } | RegisterError::PinnedMemoryLimit { errno, .. } => {
                errno
            }
            _ => libc::EIO,
        };
        Self::Open(DeviceError::Os { operation: "registering for the self-test", errno })
    }
}

/// How many pages each end has.
const PAGES: usize = 3;

struct Test<'r> {
    // The connection goes before what it moves.
    loopback: Loopback,
    /// The end that is on demand.
    near: End<'r, OnDemand>,
    /// The end whose pages are pinned.
    far: End<'r, Verbs>,
}

impl<'r> Test<'r> {
    fn new(registrar: &'r OnDemand) -> Result<Self, Unproven> {
        let near = End::new(registrar, Access::READ_WRITE)?;
        let far = End::new(&registrar.verbs, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let loopback = Loopback::new(Arc::clone(registrar.domain()))?;
        Ok(Self { loopback, near, far })
    }

    fn run(&self) -> Result<(), Unproven> {
        self.near.fill(1);
        self.goes_out("from within a page")?;
        self.comes_in("into the middle of a page")?;
        self.near.exchange().map_err(|errno| DeviceError::os("mmap", errno))?;
        self.near.fill(3);
        self.goes_out("after its pages were exchanged")
    }

    /// From the near end to the far one.
    fn goes_out(&self, what: &'static str) -> Result<(), Unproven> {
        let part = self.part();
        self.far.fill(0);
        self.transfer(LoopbackDirection::Write)?;
        let right = self.far.bytes().get(part.clone()) == self.near.bytes().get(part);
        if right { Ok(()) } else { Err(Unproven::Wrong(what)) }
    }

    /// From the far end to the near one, and nothing around it.
    fn comes_in(&self, what: &'static str) -> Result<(), Unproven> {
        self.far.fill(2);
        let mut expected = self.near.bytes();
        let part = self.part();
        expected[part.clone()].copy_from_slice(&self.far.bytes()[part]);
        self.transfer(LoopbackDirection::Read)?;
        if self.near.bytes() == expected { Ok(()) } else { Err(Unproven::Wrong(what)) }
    }

    /// Begins and ends within a page, and crosses two borders.
    fn part(&self) -> std::ops::Range<usize> {
        const BESIDE: usize = 100;
        BESIDE..self.near.range.len() - 2 * BESIDE
    }

    fn transfer(&self, direction: LoopbackDirection) -> Result<(), LoopbackError> {
        let part = self.part();
        let transfer = Transfer {
            lkey: self.near.region.lkey(),
            address: self.near.range.start() + part.start,
            length: part.len(),
            rkey: self.far.region.rkey(),
            remote_address: self.far.range.start() + part.start,
        };
        // SAFETY: both ends are this test's own memory, not borrowed while it waits here, and leaked by `self_test` where the
        // device may go on with it.
        unsafe { self.loopback.transfer(direction, &[transfer]) }
    }
}

/// Pages of the test's own, registered.
struct End<'r, R: Registrar<Handle = MemoryRegion>> {
    registrar: &'r R,
    region: MemoryRegion,
    /// Unmapped after the registration has ended.
    pages: OwnedMapping,
    range: AddressRange,
}

impl<'r, R: Registrar<Handle = MemoryRegion>> End<'r, R> {
    fn new(registrar: &'r R, access: Access) -> Result<Self, Unproven> {
        let length = PAGES * page_bytes();
        let pages = OwnedMapping::new(length).map_err(|errno| DeviceError::os("mmap", errno))?;
        let range = pages.range().ok_or(DeviceError::os("mmap", Errno(libc::EINVAL)))?;
        // SAFETY: the pages are this test's own.
        let region = unsafe { registrar.register(range, registrar.granted(access)) }?;
        Ok(Self { registrar, region, pages, range })
    }

    /// Puts a pattern into every page that differs from byte to byte, page to page, and seed to seed.
    fn fill(&self, seed: usize) {
        for at in 0..self.range.len() {
            let byte = (at.wrapping_mul(31) + at / 251 + seed * 89).to_le_bytes()[0];
            // SAFETY: within the test's own pages, which no device touches now.
            unsafe { self.pages.start().add(at).write(byte) };
        }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the test's own pages, which no device touches now; copied at once.
        unsafe { std::slice::from_raw_parts(self.pages.start().as_ptr(), self.range.len()) }
            .to_vec()
    }

    /// Maps new pages at the same addresses.
    fn exchange(&self) -> Result<(), Errno> {
        // SAFETY: the test's own pages; what they hold is not needed any more.
        unsafe { memory::renew(self.range) }
    }
}

impl<R: Registrar<Handle = MemoryRegion>> Drop for End<'_, R> {
    fn drop(&mut self) {
        // What cannot be deregistered is tried again when the registrar is dropped.
        // SAFETY: this test registered it, and ends it here.
        let _ = unsafe { self.registrar.deregister(self.region, self.range) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_gone_is_not_one_that_cannot_be_tested() {
        let of = |errno| {
            let error = LoopbackError::Os { operation: "ibv_create_qp", errno };
            Unproven::from(error).of(String::from("rxe0"))
        };
        for errno in [libc::ENODEV, libc::EBADF] {
            assert_eq!(of(errno), DeviceError::Gone { errno });
        }
        assert!(matches!(of(libc::ENOMEM), DeviceError::Untestable { .. }));
    }
}
