//! Memory regions of a protection domain, as a registrar.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the calls that register, suspend and give back, whose arguments live
//! as long as the [`Domain`] does, and for [`MemoryRegion`], a pointer that threads hand to each
//! other.

#![allow(unsafe_code)]

use super::attributes::access_flags;
use super::connection::{self, Connection, Verdict};
use super::device::{Device, DeviceError, Domain, has_ended, is_gone};
use super::ffi::*;
use crate::fork_mark::{FORKED, ForkMark};
use crate::limits::Limits;
use crate::mappings;
use libc::c_uint;
use pinfold_core::{
    Access, AddressRange, BadAddress, ConnectionLost, DeregisterError, RegisterError, Registrar,
    RegistrarLimits, Renewed, Suspend, Transfers, Unsupported,
};
use pinfold_kernel::{Errno, process::page_bytes};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A registration: the keys that work requests name it by.
///
/// They mean something in the protection domain that the registrar was made with, until the
/// registration is given back.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryRegion {
    pointer: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    /// Which of this process it is: address and keys come again when a region is gone, and what was
    /// withdrawn must not be taken for what came after it.
    serial: u64,
}

// SAFETY: the pointer is followed by libibverbs alone, which any thread may call.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// # Safety
    ///
    /// `pointer` is a memory region that the library just made.
    unsafe fn new(pointer: NonNull<ibv_mr>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // SAFETY: the caller's promise.
        let (lkey, rkey) = unsafe { ((*pointer.as_ptr()).lkey, (*pointer.as_ptr()).rkey) };
        // Relaxed: each number is given once, which is all that is wanted of them.
        Self { pointer, lkey, rkey, serial: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// The local key: what an `ibv_sge` takes.
    pub const fn lkey(self) -> u32 {
        self.lkey
    }

    /// The remote key, which a peer needs; it opens nothing unless the registration has remote
    /// rights.
    pub const fn rkey(self) -> u32 {
        self.rkey
    }

    /// The library's own structure, alive until the registration is given back.
    pub const fn as_ptr(self) -> *mut ibv_mr {
        self.pointer.as_ptr()
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion {{ lkey: {:#x}, rkey: {:#x} }}", self.lkey, self.rkey)
    }
}

/// Registers memory as regions of a protection domain, pages pinned.
///
/// ```
/// use pinfold::registrar::verbs::{Device, Domain, Verbs};
/// use pinfold::{Access, AddressRange, Registrar};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let Ok(_) = Device::open(None) else { return Ok(()) };
/// let domain = Domain::new(Device::open(None)?)?;
/// let registrar = Verbs::new(domain)?;
/// # let buffer = vec![0_u8; 4096];
/// let range = AddressRange::new(buffer.as_ptr().addr(), buffer.len())?;
/// // SAFETY: nothing else relies on the buffer while the device may write to it.
/// let region = unsafe { registrar.register(range, Access::READ_WRITE) }?;
/// // ... post work requests with lkey = region.lkey() ...
/// // SAFETY: registered above, and every work request with it has ended.
/// unsafe { registrar.deregister(region, range) }?;
/// # Ok(())
/// # }
/// ```
pub struct Verbs {
    domain: Arc<Domain>,
    limits: RegistrarLimits,
    /// The library's flags that every registration gets on top of its rights.
    flags: c_uint,
    /// A lent domain's device has the mark of another time, so the registrar has its own.
    fork_mark: ForkMark,
    /// Guards what is registered, for one insertion, removal or look at all; never held across a call
    /// of the library.
    held: Mutex<Held>,
    /// Whether the device stops queue pairs, once it has said so itself. A forked child is refused before it asks.
    pub(super) stops: OnceLock<Result<(), Unsupported>>,
}

/// The regions of a registrar.
#[derive(Default)]
struct Held {
    live: HashMap<MemoryRegion, Use>,
    /// Those that a suspension has deregistered, and whose handles are still known.
    withdrawn: HashSet<MemoryRegion>,
}

/// What a region is for.
struct Use {
    /// `None` for memory without addresses.
    range: Option<AddressRange>,
    /// Whether a peer may touch it.
    exposed: bool,
    standing: Standing,
}

/// Whether the device was asked to deregister a region.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Registered,
    /// A suspension was to withdraw it, and the device refused: the suspension has the handle still, and gives it back.
    Kept,
    /// Its holder deregistered it, and the device refused: no holder has the handle any more.
    GivenUp,
    /// A thread has the device deregister it just now, which may refuse still.
    Leaving,
}

/// Whether a peer may touch a region with these rights and the library's flags: through a memory window too, which
/// may be bound to it, and has a key and rights of its own.
const fn is_open_to_peers(access: Access, flags: c_uint) -> bool {
    access.is_remote() || flags & IBV_ACCESS_MW_BIND != 0
}

impl Use {
    fn touches(&self, range: AddressRange) -> bool {
        self.range.is_some_and(|own| own.overlaps(&range))
    }
}

impl Verbs {
    /// Registers with `domain`.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Os`] if the kernel has no memory, or is older than 4.14; [`DeviceError::Gone`] in a forked child,
    /// whose parent's the domain is.
    pub fn new(domain: Arc<Domain>) -> Result<Self, DeviceError> {
        if domain.device().forked() {
            return Err(DeviceError::Gone { errno: FORKED });
        }
        let fork_mark = ForkMark::new(1).map_err(|errno| DeviceError::os("madvise", errno))?;
        let limits = limits_of(domain.device());
        let (held, stops) = (Mutex::default(), OnceLock::new());
        Ok(Self { domain, limits, flags: 0, fork_mark, held, stops })
    }

    /// Adds the library's own flags to every registration from now on:
    /// `IBV_ACCESS_RELAXED_ORDERING`, `IBV_ACCESS_HUGETLB`, `IBV_ACCESS_MW_BIND`; to one of a
    /// [dmabuf](Self::register_dmabuf) the first alone.
    ///
    /// `IBV_ACCESS_ON_DEMAND` belongs to [`OnDemand`](super::OnDemand), and `IBV_ACCESS_ZERO_BASED` to registrations
    /// that are made explicitly, because a cache shares them between ranges; they and the flags that
    /// rights stand for are left out.
    #[must_use]
    pub fn with_flags(mut self, flags: c_uint) -> Self {
        const MAY_BE_ADDED: c_uint =
            IBV_ACCESS_OPTIONAL_RANGE | IBV_ACCESS_HUGETLB | IBV_ACCESS_MW_BIND;
        self.flags |= flags & MAY_BE_ADDED;
        self
    }

    pub(super) const fn flags(&self) -> c_uint {
        self.flags
    }

    /// The protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(super) fn forked(&self) -> bool {
        self.fork_mark.forked()
    }

    /// Not in a forked child, where another thread of the parent's may have held the lock.
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The regions that have something of `range` and that a peer may touch which knows a key, theirs or a memory
    /// window's, and `range`, as one; `None` if there are none. Looks at every region. Not in a forked child, where
    /// another thread of the parent's may have held the lock.
    pub(super) fn exposed_around(&self, range: AddressRange) -> Option<AddressRange> {
        let held = self.held();
        let exposed = held.live.values().filter(|it| it.exposed).filter_map(|it| it.range);
        exposed.filter(|it| it.overlaps(&range)).fold(None, |all: Option<AddressRange>, it| {
            let all = all.unwrap_or(range);
            AddressRange::between(all.start().min(it.start()), all.end().max(it.end()))
        })
    }

    /// Whether something of `range` was to be deregistered, and is still registered. What has no holder
    /// is deregistered once more before.
    pub(super) fn is_stuck(&self, range: AddressRange) -> bool {
        if self.forked() {
            // The parent's device translates nothing of this process.
            return false;
        }
        for region in self.given_up(range) {
            // Whether that was in vain shows below.
            let _ = self.give_back(region);
        }
        let stuck = |it: &Use| it.standing != Standing::Registered && it.touches(range);
        self.held().live.values().any(stuck)
    }

    fn given_up(&self, range: AddressRange) -> Vec<MemoryRegion> {
        let wanted = |it: &Use| it.standing == Standing::GivenUp && it.touches(range);
        let held = self.held();
        held.live.iter().filter(|(_, it)| wanted(it)).map(|(region, _)| *region).collect()
    }

    /// Gives a region back and remembers its handle, until it is [given back](Self::give_back).
    pub(super) fn take_out(&self, region: MemoryRegion) -> Result<(), DeregisterError> {
        if self.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        let given_back = self.give_back_or_note(region, Standing::Kept);
        // Gone by itself, or with its device: nothing of it is left to be given back.
        let is_over = match given_back {
            Ok(()) => true,
            Err(DeregisterError::DeviceGone { errno }) => has_ended(errno),
            Err(_) => false,
        };
        if is_over {
            self.held().withdrawn.insert(region);
        }
        given_back
    }

    fn check_request(&self, range: AddressRange, access: Access) -> Result<(), RegisterError> {
        if self.forked() {
            return Err(RegisterError::DeviceGone { errno: FORKED });
        }
        if !self.domain.device().attributes().can_give(access) {
            return Err(RegisterError::UnsupportedAccess { access });
        }
        let max_bytes = self.limits.max_region_bytes;
        if range.len() > max_bytes {
            return Err(RegisterError::TooLarge { range, max_bytes });
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Registrar::register`].
    pub(super) unsafe fn register_with(
        &self,
        range: AddressRange,
        access: Access,
        flags: c_uint,
    ) -> Result<MemoryRegion, RegisterError> {
        self.check_request(range, access)?;
        let device = self.domain.device();
        let flags = access_flags(access) | self.flags | flags;
        let start = ptr::with_exposed_provenance_mut(range.start());
        let made = device.ask_for(|| {
            // SAFETY: the domain is live, and the memory is as the caller promises.
            unsafe { device.library().register(self.domain.as_ptr(), start, range.len(), flags) }
        });
        let made = made.map_err(|errno| {
            self.explain(range, access, flags & IBV_ACCESS_ON_DEMAND != 0, errno)
        })?;
        // SAFETY: the library just made it.
        let region = unsafe { MemoryRegion::new(made) };
        let exposed = is_open_to_peers(access, flags);
        Ok(self.note(region, Use { range: Some(range), exposed, standing: Standing::Registered }))
    }

    fn note(&self, region: MemoryRegion, use_: Use) -> MemoryRegion {
        self.held().live.insert(region, use_);
        region
    }

    /// # Safety
    ///
    /// `pointer` is a memory region that the library just made in this domain, of memory without an address, and with the flags
    /// of these rights, so that no window can be bound to it.
    pub(super) unsafe fn adopt(&self, pointer: NonNull<ibv_mr>, access: Access) -> MemoryRegion {
        // SAFETY: the caller's promise.
        let region = unsafe { MemoryRegion::new(pointer) };
        let exposed = access.is_remote();
        self.note(region, Use { range: None, exposed, standing: Standing::Registered })
    }

    pub(super) fn give_back(&self, region: MemoryRegion) -> Result<(), DeregisterError> {
        self.give_back_or_note(region, Standing::GivenUp)
    }

    /// What the device refuses to deregister is noted as `refused`, in the same step in which it is
    /// among the live ones again: a thread that sees it there knows whose it is.
    fn give_back_or_note(
        &self,
        region: MemoryRegion,
        refused: Standing,
    ) -> Result<(), DeregisterError> {
        if self.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        {
            let mut held = self.held();
            if held.withdrawn.remove(&region) {
                return Ok(());
            }
            // It stays among the live ones until the device has let go.
            match held.live.get_mut(&region) {
                Some(it) if it.standing != Standing::Leaving => it.standing = Standing::Leaving,
                _ => return Err(DeregisterError::Os { operation: DEREG, errno: libc::EINVAL }),
            }
        }
        let device = self.domain.device();
        // SAFETY: the library made it in this domain, and it was not deregistered before: the thread that
        // has it leave is the only one.
        let status = device.ask(|| unsafe { (device.library().dereg_mr)(region.as_ptr()) });
        let is_refused = status != 0 && !has_ended(status);
        let mut held = self.held();
        if is_refused && let Some(it) = held.live.get_mut(&region) {
            // Still registered (a memory window is bound to it, or the device's descriptor was closed): tried again when a
            // suspension asks for its range, and when this is dropped.
            it.standing = refused;
        } else {
            held.live.remove(&region);
        }
        match status {
            0 => Ok(()),
            errno if is_gone(errno) => Err(DeregisterError::DeviceGone { errno }),
            errno => Err(DeregisterError::Os { operation: DEREG, errno }),
        }
    }

    /// What the library's refusal to register means.
    fn explain(
        &self,
        range: AddressRange,
        access: Access,
        on_demand: bool,
        Errno(errno): Errno,
    ) -> RegisterError {
        match errno {
            errno if is_gone(errno) => RegisterError::DeviceGone { errno },
            // RLIMIT_MEMLOCK is 0, and nothing waives it.
            libc::EPERM => RegisterError::PinnedMemoryLimit { limit_bytes: Some(0), errno },
            libc::EAGAIN | libc::EBUSY | libc::ENOSPC => self.full(errno),
            libc::ENOMEM => self.no_room(range, on_demand, errno),
            libc::EINVAL if self.is_full() => self.full(errno),
            libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP => {
                bad_address(range, access, on_demand, errno)
            }
            errno => RegisterError::Os { operation: REG, errno },
        }
    }

    /// The kernel says the same when the limit on pinned memory is reached, when the device is
    /// full, and when it has no memory itself. That what is pinned now leaves room below the limit
    /// says nothing: another thread may have deregistered since.
    fn no_room(&self, range: AddressRange, on_demand: bool, errno: i32) -> RegisterError {
        let limits = Limits::read();
        let bytes = range.page_aligned(limits.page_bytes).len() as u64;
        let wanted = limits.pinned_bytes.unwrap_or(0).saturating_add(bytes);
        let is_full = self.is_full();
        match limits.limit_in_force().filter(|_| !on_demand) {
            Some(limit) if wanted > limit || !is_full => {
                RegisterError::PinnedMemoryLimit { limit_bytes: Some(limit), errno }
            }
            _ if is_full => self.full(errno),
            _ => RegisterError::Os { operation: REG, errno },
        }
    }

    fn is_full(&self) -> bool {
        self.held().live.len() >= self.limits.max_regions
    }

    fn full(&self, errno: i32) -> RegisterError {
        let held = self.held().live.len();
        RegisterError::RegionLimit { held, device_max: self.limits.max_regions, errno }
    }
}

fn limits_of(device: &Device) -> RegistrarLimits {
    let attributes = device.attributes();
    // Half of the address space, as a power of two, is more than any process can map.
    let most = usize::MAX / 2 + 1;
    RegistrarLimits {
        page_bytes: page_bytes(),
        max_region_bytes: usize::try_from(attributes.max_region_bytes)
            .map_or(most, |n| n.min(most)),
        max_regions: attributes.max_regions,
    }
}

/// What is wrong with the memory, or with the rights asked for, if the memory is as it should be.
fn bad_address(range: AddressRange, access: Access, on_demand: bool, errno: i32) -> RegisterError {
    match mappings::diagnose(range, access) {
        BadAddress::Unknown if errno == libc::EFAULT => {
            RegisterError::BadAddress { range, reason: BadAddress::Unknown, errno }
        }
        BadAddress::Unknown if errno == libc::EOPNOTSUPP && !on_demand => {
            let reason = BadAddress::UnsupportedMapping { at: range.start() };
            RegisterError::BadAddress { range, reason, errno }
        }
        BadAddress::Unknown if errno == libc::EOPNOTSUPP => {
            RegisterError::UnsupportedAccess { access }
        }
        BadAddress::Unknown => RegisterError::Os { operation: REG, errno },
        reason => RegisterError::BadAddress { range, reason, errno },
    }
}

const REG: &str = "ibv_reg_mr";
const DEREG: &str = "ibv_dereg_mr";

/// The device may read whatever is registered with it, and must be able to write where a peer may.
pub(super) fn granted(wanted: Access) -> Access {
    if wanted.writes() { wanted | Access::READ_WRITE } else { wanted | Access::READ }
}

// SAFETY: a memory region reaches what `ibv_reg_mr` was given, with the rights that it was given; its handle is the
// region's own, and `ibv_dereg_mr` returns when the device has let go of it.
unsafe impl Registrar for Verbs {
    type Handle = MemoryRegion;

    fn limits(&self) -> RegistrarLimits {
        self.limits
    }

    /// `RLIMIT_MEMLOCK`, where the kernel applies it to this process.
    fn pinned_limit(&self) -> Option<usize> {
        crate::limits::pinned_limit()
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
        unsafe { self.register_with(range, access, 0) }
    }

    unsafe fn deregister(
        &self,
        handle: MemoryRegion,
        _: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.give_back(handle)
    }
}

impl Verbs {
    /// Whether the connections can be stopped, and their peers keep off what they may touch: what is `exposed`, if anything
    /// is.
    pub(super) fn can_stop(
        &self,
        exposed: Option<AddressRange>,
        connections: &[Connection],
    ) -> Result<(), Unsupported> {
        if let Some(range) = exposed.filter(|_| connections.is_empty()) {
            return Err(Unsupported::PeerMayWrite { range });
        }
        let now = self.now();
        for (index, connection) in connections.iter().enumerate() {
            connection.can_stop(index, self.domain(), exposed, now)?;
        }
        if connections.is_empty() { Ok(()) } else { self.stops_queue_pairs() }
    }

    /// Whether the device can: tried until it has said so itself, either way.
    fn stops_queue_pairs(&self) -> Result<(), Unsupported> {
        if let Some(&said) = self.stops.get() {
            return said;
        }
        match connection::test(self.domain()) {
            Verdict::Said(said) => *self.stops.get_or_init(|| said),
            Verdict::Untested(why) => Err(why),
        }
    }
}

/// Queue pairs are stopped in `SQD`, tried beforehand with one of our own; regions are deregistered,
/// because their pages could not be moved otherwise, and registered anew: the keys change.
///
/// That a queue pair has drained is the driver's word, which the trial cannot test: drivers that never set `sq_draining`
/// (`bnxt_re`, `irdma`) say so of a busy one. Where the word is untrue a transfer in flight meets a region that was
/// deregistered, because those go before memory is moved: it fails, and the connection breaks. It moves no wrong bytes.
///
/// Without any connection named a suspension works on every device: it waits for the leases, which
/// are all that local transfers of a program have that takes one for each.
///
/// A region to which a memory window is bound cannot be withdrawn; the suspension then says that
/// translations are in flight, until its deadline. Behind that its range is registered anew, with other keys. The same holds
/// where the device's descriptor was closed (`close_range`): what the library has mapped keeps the device open, and no call
/// reaches what is registered with it. Queue pairs then have a transfer under way, because they may run on.
// SAFETY: a queue pair is stopped in SQD, or in ERR, and its work is under way until the device says that it is drained;
// a region that is withdrawn is deregistered.
unsafe impl Suspend for Verbs {
    type Connection = Connection;

    fn can_suspend(
        &self,
        range: AddressRange,
        connections: &[Connection],
    ) -> Result<(), Unsupported> {
        if self.forked() {
            return Err(Unsupported::Device);
        }
        // Whole registrations lose their keys, so a peer that keeps off no more than the range would break its
        // connection.
        self.can_stop(self.exposed_around(range), connections)
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

    unsafe fn withdraw(
        &self,
        handle: MemoryRegion,
        _: AddressRange,
    ) -> Result<(), DeregisterError> {
        self.take_out(handle)
    }

    fn quiet(&self, range: AddressRange) -> bool {
        !self.is_stuck(range)
    }

    unsafe fn renew(
        &self,
        handle: MemoryRegion,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<MemoryRegion>, RegisterError> {
        // What the device did not let go of (see `quiet`) may have other pages by now, so it is not used again.
        let _given_up = self.give_back(handle);
        // SAFETY: the caller's promise.
        unsafe { self.register_with(range, access, 0) }.map(Renewed::Changed)
    }

    unsafe fn restart(&self, connection: &Connection) -> Result<(), ConnectionLost> {
        // SAFETY: the caller's promise, passed on.
        unsafe { connection.restart() }
    }

    fn fail(&self, connection: &Connection) {
        connection.fail();
    }
}

impl Drop for Verbs {
    /// Gives back what is still registered, except in a forked child, whose parent's it is.
    fn drop(&mut self) {
        if !self.forked() {
            let left: Vec<_> = self.held().live.keys().copied().collect();
            for region in left {
                // A device that is gone has released everything already.
                let _ = self.give_back(region);
            }
        }
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let live = if self.forked() { 0 } else { self.held().live.len() };
        f.debug_struct("Verbs")
            .field("device", &self.domain.device().name())
            .field("flags", &self.flags)
            .field("live", &live)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_that_a_window_may_be_bound_to_is_open_to_peers() {
        assert!(is_open_to_peers(Access::READ, IBV_ACCESS_MW_BIND));
        assert!(is_open_to_peers(Access::REMOTE_READ, 0));
        assert!(!is_open_to_peers(Access::READ_WRITE, IBV_ACCESS_HUGETLB));
    }
}
