//! The device's side of the cache: what turns a range into a registration and back.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare what memory depends on, a function that opens memory to a
//! device and one that ends it, and to pass them on where a registrar has several owners.

#![allow(unsafe_code)]

use crate::{Access, AddressRange};
use std::fmt;
use std::sync::Arc;

/// How a registration leads to the pages of its range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Translation {
    /// It holds on to the pages that it was made for: all devices that pin memory.
    Pinned,
    /// The device looks them up in the process's page table at each transfer, and so moves the bytes that are
    /// there then. Pages that are exchanged under a transfer would be lost to it.
    OnDemand,
    /// Several devices, of either kind: what either asks for has to be done.
    Both,
}

impl Translation {
    /// That of a registration with two devices.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Pinned, Self::Pinned) => Self::Pinned,
            (Self::OnDemand, Self::OnDemand) => Self::OnDemand,
            _ => Self::Both,
        }
    }
}

/// Turns ranges into registrations with one device and back.
///
/// The cache calls a registrar from any thread, from several at once, and never under one of its
/// own locks. It gives every handle back exactly once.
///
/// # Safety
///
/// Safe code moves bytes by what a registrar answers: a pool's buffer, a landing zone, a planner. So
/// - a handle reaches the bytes of the range that it was made for, with at least the rights that were asked for, from
///   the return of [`register`](Self::register) until it is deregistered, whatever the program calls meanwhile;
/// - it reaches nothing else, and no other registration that is live has the same handle where a device would take
///   one for the other;
/// - what [`register`](Self::register) refuses, or panics in, is not registered; what was given to
///   [`deregister`](Self::deregister) is over when the call ends, however it ends;
/// - [`granted`](Self::granted) has the rights asked for, and [`widened`](Self::widened) the range asked for and, besides,
///   memory of the program's only;
/// - [`translation`](Self::translation) is what it says of every device that a registration is with;
/// - [`is_simulated`](Self::is_simulated) says yes only where no handle reaches memory of this process. Then the first two
///   are not asked for.
pub unsafe trait Registrar: Send + Sync + 'static {
    /// What the device gave for a range: a buffer's index, a pair of keys.
    type Handle: Copy + fmt::Debug + Send + Sync + 'static;

    /// What the device can take.
    fn limits(&self) -> RegistrarLimits;

    /// How many bytes the system lets this device pin in all, where it bounds that and the registrar
    /// knows. Looked up anew at each call.
    fn pinned_limit(&self) -> Option<usize> {
        None
    }

    /// The rights that a registration made for `wanted` really gives.
    ///
    /// At least `wanted`; more where the device knows no less (an io_uring buffer can always be
    /// written). Memory that cannot bear the granted rights fails to register.
    fn granted(&self, wanted: Access) -> Access {
        wanted
    }

    /// What is registered so that `range` can be used with local rights: at least that.
    ///
    /// More where the system counts more against its limit anyway, and the program has mapped all of it:
    /// io_uring pays for the whole of a huge page, however little of it is registered. A cache registers
    /// that once, and serves the rest from it; to register it may bring pages in that the program has not used yet.
    /// Where it registers less all the same (what a caller [vouches](crate::GetRequest::vouched) for, or because the
    /// rest cannot be registered), all of this counts against its budget. Where the monitor cannot watch all of this, a get keeps
    /// none of it.
    ///
    /// Asked before a registration and again behind it, of the same range: its memory may have become a huge page in between.
    fn widened(&self, range: AddressRange) -> AddressRange {
        range
    }

    /// How often the system counts a page that is registered once: by how many devices it is pinned. Asked
    /// once, when a cache, a pool or a reservation is made, whose books count each page so often.
    fn pins_per_page(&self) -> usize {
        1
    }

    /// How a registration leads to pages: pinned ones, as most devices have it.
    fn translation(&self) -> Translation {
        Translation::Pinned
    }

    /// Whether no memory of this process is reached by any handle, as where no device stands behind it. Several are simulated if
    /// all of them are. Always the same answer, in constant time: only with such a registrar does a cache take a monitor that
    /// [is simulated](crate::Monitor::is_simulated).
    fn is_simulated(&self) -> bool {
        false
    }

    /// Registers `range`, which for local rights is made of whole pages.
    ///
    /// Blocks as long as the device needs: half a microsecond to tens of milliseconds.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; nothing is left behind.
    ///
    /// # Safety
    ///
    /// The program may let the device use every byte of `range` with `access`: nothing else in it
    /// relies on those bytes staying untouched by the device.
    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError>;

    /// Deregisters; the device no longer touches the pages for new transfers. Transfers in flight, if
    /// the device keeps them safe, may still end.
    ///
    /// # Errors
    ///
    /// [`DeregisterError`] when the device is gone or refuses; the cache counts it and forgets
    /// the registration either way.
    ///
    /// # Safety
    ///
    /// `handle` came from [`register`](Self::register) of this registrar, with this `range`. It is
    /// deregistered once, and by the caller that owns it: what a lease or a buffer holds is the
    /// cache's or the pool's. No transfer begins with it any more.
    ///
    /// ```compile_fail,E0133
    /// # use pinfold_core::{Cache, Lease, Monitor, Registrar};
    /// # fn end<R: Registrar, M: Monitor>(cache: &Cache<R, M>, lease: &Lease<'_, R, M>) {
    /// let _ = cache.registrar().deregister(lease.handle(), lease.registered());
    /// # }
    /// ```
    unsafe fn deregister(
        &self,
        handle: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError>;
}

/// One device for several owners: a cache and a pool, two pools.
// SAFETY: every call goes to the device itself, which keeps the promise.
unsafe impl<R: Registrar> Registrar for Arc<R> {
    type Handle = R::Handle;

    fn limits(&self) -> RegistrarLimits {
        R::limits(self)
    }

    fn pinned_limit(&self) -> Option<usize> {
        R::pinned_limit(self)
    }

    fn granted(&self, wanted: Access) -> Access {
        R::granted(self, wanted)
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        R::widened(self, range)
    }

    fn pins_per_page(&self) -> usize {
        R::pins_per_page(self)
    }

    fn translation(&self) -> Translation {
        R::translation(self)
    }

    fn is_simulated(&self) -> bool {
        R::is_simulated(self)
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Self::Handle, RegisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { R::register(self, range, access) }
    }

    unsafe fn deregister(
        &self,
        handle: Self::Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { R::deregister(self, handle, range) }
    }
}

/// What a device can take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegistrarLimits {
    /// The granule of translation, in bytes; a power of two, 4096 on most machines.
    pub page_bytes: usize,
    /// The longest range that one registration may cover, in bytes.
    pub max_region_bytes: usize,
    /// How many registrations there may be at once.
    pub max_regions: usize,
}

impl RegistrarLimits {
    /// A device with this granule of translation and longest range, both in bytes, and this many
    /// registrations at once.
    pub const fn new(page_bytes: usize, max_region_bytes: usize, max_regions: usize) -> Self {
        Self { page_bytes, max_region_bytes, max_regions }
    }
}

/// Why a range cannot be used by a device, as found in the table of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BadAddress {
    /// Nothing is mapped at this address of the range.
    Unmapped {
        /// The first such address.
        at: usize,
    },
    /// The mapping allows no access at all (`PROT_NONE`, a guard page).
    NoAccess {
        /// The first such address.
        at: usize,
    },
    /// The mapping is read-only and the device, or the use, needs to write.
    NotWritable {
        /// The first such address.
        at: usize,
    },
    /// This device cannot use such a mapping (a shared mapping of a file on disk, a device).
    UnsupportedMapping {
        /// The first such address.
        at: usize,
    },
    /// The address belongs to the kernel.
    Kernel {
        /// The first such address.
        at: usize,
    },
    /// The kernel refused and the table of mappings shows no reason (it may have changed since).
    Unknown,
}

/// Why a registration failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RegisterError {
    /// The memory is not what the use needs.
    BadAddress {
        /// What was to be registered.
        range: AddressRange,
        /// What is wrong with it.
        reason: BadAddress,
        /// The kernel's error number (`EFAULT`, `ENOMEM` for mlock, ...).
        errno: i32,
    },
    /// The range is longer than one registration can be.
    TooLarge {
        /// What was to be registered.
        range: AddressRange,
        /// The longest possible, in bytes.
        max_bytes: usize,
    },
    /// The kernel's limit on pinned or locked memory is reached.
    PinnedMemoryLimit {
        /// The soft limit `RLIMIT_MEMLOCK` in bytes, if it is finite.
        limit_bytes: Option<u64>,
        /// The kernel's error number (`ENOMEM`, `EAGAIN` for mlock).
        errno: i32,
    },
    /// The device's table of registrations is full.
    TableFull {
        /// How many it holds.
        capacity: usize,
    },
    /// The device has no registration left, or the control group allows none: both may be shared
    /// with other processes.
    RegionLimit {
        /// How many this registrar holds.
        held: usize,
        /// How many the device has, for all processes.
        device_max: usize,
        /// The kernel's error number (`EAGAIN` from a control group, `ENOMEM`, ...).
        errno: i32,
    },
    /// The device, or the descriptor that leads to it, is gone.
    DeviceGone {
        /// The kernel's error number (`EBADF`, `ENODEV`, ...).
        errno: i32,
    },
    /// The device cannot give such rights.
    UnsupportedAccess {
        /// The rights asked for.
        access: Access,
    },
    /// The kernel had no memory of its own, or something else went wrong.
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl RegisterError {
    /// Whether giving back other registrations may help.
    pub const fn is_about_room(&self) -> bool {
        matches!(
            self,
            Self::PinnedMemoryLimit { .. } | Self::TableFull { .. } | Self::RegionLimit { .. }
        )
    }
}

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmapped { at } => {
                write!(f, "nothing is mapped at {at:#x}: map it first, or ask for less")
            }
            Self::NoAccess { at } => {
                write!(f, "the mapping at {at:#x} allows no access: mprotect it, or ask for less")
            }
            Self::NotWritable { at } => write!(
                f,
                "the mapping at {at:#x} is read-only, and the device pins it to be written (as \
                 io_uring always does): copy the data"
            ),
            Self::UnsupportedMapping { at } => {
                write!(f, "the device cannot use the kind of mapping at {at:#x}: copy the data")
            }
            Self::Kernel { at } => {
                write!(f, "{at:#x} is the kernel's: ask for the program's own memory")
            }
            Self::Unknown => f.write_str("the kernel refused it: ask again, or copy the data"),
        }
    }
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadAddress { range, reason, errno } => {
                write!(f, "cannot register {range}: {reason} (errno {errno})")
            }
            Self::TooLarge { range, max_bytes } => write!(
                f,
                "cannot register {} bytes at {:#x} at once: the device takes at most {max_bytes}; \
                 ask for pieces",
                range.len(),
                range.start()
            ),
            Self::PinnedMemoryLimit { limit_bytes: Some(limit), errno } => write!(
                f,
                "the limit of {limit} bytes of pinned memory is reached (errno {errno}): raise \
                 RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK=, `--ulimit memlock=-1`), or pin \
                 less (max_bytes)"
            ),
            Self::PinnedMemoryLimit { limit_bytes: None, errno } => write!(
                f,
                "the kernel will pin no more memory (errno {errno}) though RLIMIT_MEMLOCK is \
                 unlimited: look at the machine's free memory and the control group's limit"
            ),
            Self::TableFull { capacity } => write!(
                f,
                "all {capacity} entries of the device's table are in use: end leases, or make \
                 the table larger"
            ),
            Self::RegionLimit { held, device_max, errno } => write!(
                f,
                "no registration is left (errno {errno}): {held} are this cache's, of {device_max} of the \
                 device: end leases, lower Config::max_regions, or raise rdma.max (hca_object)"
            ),
            Self::DeviceGone { errno } => {
                write!(f, "the device is gone (errno {errno}): open it again and make a new cache")
            }
            Self::UnsupportedAccess { access } => {
                write!(f, "the device cannot give the rights {access}: ask for fewer")
            }
            Self::Os { operation, errno } => {
                write!(f, "{operation} failed: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for RegisterError {}

/// Why a registration could not be given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeregisterError {
    /// The device is gone, and the registration with it; or the descriptor that leads to it was closed (`EBADF`), and no call
    /// reaches the registration, which lasts for as long as the kernel keeps the device open.
    DeviceGone {
        /// The kernel's error number.
        errno: i32,
    },
    /// The device refused.
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl fmt::Display for DeregisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeviceGone { errno } => {
                write!(
                    f,
                    "the device is gone (errno {errno}): the registration ends when the kernel closes the device"
                )
            }
            Self::Os { operation, errno } => {
                write!(f, "{operation} failed: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for DeregisterError {}
