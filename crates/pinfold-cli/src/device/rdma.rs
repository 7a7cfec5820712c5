//! An RDMA device, connected to itself: what is sent is written into the channel by RDMA, what is
//! received is read from it.
//!
//! The channel is a file in memory, mapped and registered for the far end of the connection, so what
//! arrives can be read like any file. The near end is the program's memory, by its local key.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to map and register the channel, to register explicitly, and to
//! post transfers. A transfer names memory by a key and an address; the device refuses every address
//! outside of the registration behind the key, and the caller that registered the memory has promised
//! (`Registrar::register`) that the device may use all of it.

#![allow(unsafe_code)]

use super::{AnyRegistrar, Conveyor, Direction, Key, Kind, Table, Transfer, no_channel};
use crate::output::Failure;
use pinfold::registrar::verbs::{
    self, Device, DeviceError, Domain, Loopback, MemoryRegion, OnDemand, Operations, Transport,
    Verbs, ffi,
};
use pinfold::{Access, AddressRange, Registrar};
use pinfold_kernel::mapping::OwnedMapping;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is done with the program's memory.
const OPERATIONS: Operations = Operations::WRITE;

/// A connection and its channel. Any thread may use it; transfers of several threads take turns.
pub(crate) struct Rdma {
    kind: Kind,
    // In the order in which they must go: the connection, the registrations, the mapping.
    loopback: Loopback,
    by_hand: ByHand,
    far: MemoryRegion,
    _far_registrar: Verbs,
    channel: Mapped,
    domain: Arc<Domain>,
}

impl Rdma {
    /// The first RDMA device, for a channel that is there.
    pub(super) fn with(kind: Kind, file: File) -> Result<Self, Failure> {
        let channel = Mapped::new(file).map_err(|error| no_channel(&error))?;
        let device = Device::open(None).map_err(Failure::unavailable)?;
        let domain = Domain::new(device).map_err(Failure::unavailable)?;
        let registrar = Verbs::new(Arc::clone(&domain)).map_err(Failure::unavailable)?;
        let remote = registrar.granted(Access::REMOTE_READ | Access::REMOTE_WRITE);
        // SAFETY: the channel is the device's to read and write; it is touched through its file.
        let far = unsafe { registrar.register(channel.range, remote) };
        let far = far.map_err(Failure::unavailable)?;
        let loopback = Loopback::new(Arc::clone(&domain)).map_err(Failure::unavailable)?;
        let by_hand = ByHand { domain: Arc::clone(&domain), regions: Mutex::default() };
        Ok(Self { kind, loopback, by_hand, far, _far_registrar: registrar, channel, domain })
    }

    fn on_demand(&self) -> Result<OnDemand, DeviceError> {
        let domain = Arc::clone(&self.domain);
        match self.kind {
            // SAFETY: a caller that asks for this kind looks for wrong bytes.
            Kind::VerbsOnDemandUntested => unsafe {
                OnDemand::untested(domain, Transport::Rc, OPERATIONS)
            },
            _ => OnDemand::new(domain, Transport::Rc, OPERATIONS),
        }
    }
}

impl Table for Rdma {
    fn registrar(&self, _slots: u32) -> Result<AnyRegistrar, Failure> {
        match self.kind.is_on_demand() {
            true => self.on_demand().map(AnyRegistrar::OnDemand),
            false => Verbs::new(Arc::clone(&self.domain)).map(AnyRegistrar::Verbs),
        }
        .map_err(Failure::unavailable)
    }

    unsafe fn set_buffer(&self, slot: u32, range: Option<AddressRange>) -> io::Result<Key> {
        // SAFETY: the caller's promise about the memory.
        range.map_or_else(
            || self.by_hand.end(slot),
            |range| unsafe { self.by_hand.begin(slot, range) },
        )
    }
}

impl Conveyor for Rdma {
    fn channel(&self) -> &File {
        &self.channel.file
    }

    fn table(&self) -> &dyn Table {
        self
    }

    fn run(&self, direction: Direction, transfers: &[Transfer]) -> io::Result<()> {
        let direction = match direction {
            Direction::Send => verbs::LoopbackDirection::Write,
            Direction::Receive => verbs::LoopbackDirection::Read,
        };
        let far = self.channel.range;
        let moves: Vec<verbs::Transfer> = transfers
            .iter()
            .map(|transfer| verbs::Transfer {
                lkey: transfer.key.0,
                address: transfer.address,
                length: transfer.length,
                rkey: self.far.rkey(),
                // What lies beyond the channel lies beyond its registration.
                remote_address: far
                    .start()
                    .saturating_add(usize::try_from(transfer.offset).unwrap_or(usize::MAX)),
            })
            .collect();
        // SAFETY: see the file's header.
        unsafe { self.loopback.transfer(direction, &moves) }.map_err(io::Error::other)
    }
}

/// Registrations made with nothing but the library's two calls.
struct ByHand {
    domain: Arc<Domain>,
    /// Guards which region stands under which number, for a look-up.
    regions: Mutex<HashMap<u32, Region>>,
}

struct Region(NonNull<ffi::ibv_mr>);

// SAFETY: the pointer is followed by libibverbs alone, which any thread may call.
unsafe impl Send for Region {}

impl ByHand {
    fn regions(&self) -> MutexGuard<'_, HashMap<u32, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Safety
    ///
    /// As for `Registrar::register`.
    unsafe fn begin(&self, slot: u32, range: AddressRange) -> io::Result<Key> {
        let start = ptr::with_exposed_provenance_mut(range.start());
        let library = self.domain.device().library();
        // SAFETY: the domain is live, and the memory is as the caller promises.
        let made = unsafe { library.register(self.domain.as_ptr(), start, range.len(), 0) };
        let region = NonNull::new(made).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the library just made it.
        let lkey = unsafe { (*region.as_ptr()).lkey };
        self.regions().insert(slot, Region(region));
        Ok(Key(lkey))
    }

    fn end(&self, slot: u32) -> io::Result<Key> {
        let region = self.regions().remove(&slot);
        match region.map(|region| self.give_back(&region)) {
            None | Some(0) => Ok(Key(0)),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn give_back(&self, region: &Region) -> i32 {
        // SAFETY: taken out of the list, so no other call deregisters it.
        unsafe { (self.domain.device().library().dereg_mr)(region.0.as_ptr()) }
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let left: Vec<Region> = self.regions().drain().map(|(_, region)| region).collect();
        for region in left {
            // A device that is gone has released everything already.
            let _ = self.give_back(&region);
        }
    }
}

/// A file in memory, mapped.
struct Mapped {
    file: File,
    range: AddressRange,
    _mapping: OwnedMapping,
}

impl Mapped {
    fn new(file: File) -> io::Result<Self> {
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mapping = OwnedMapping::of_file(file.as_fd(), length, true, 0)?;
        let range = mapping.range().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { file, range, _mapping: mapping })
    }
}
