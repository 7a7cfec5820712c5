//! The device that moves registered memory into a channel, and out of it: io_uring, which every
//! machine has, or RDMA.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to hand on the registrars' and the explicit registration's
//! promises, and for the creation of the channel.

#![allow(unsafe_code)]

mod loopback;
mod pipe;
mod rdma;
mod ring;

use loopback::Loopback;
use pipe::Pipe;
pub(crate) use rdma::Rdma;
use ring::Ring;

use crate::output::Failure;
use pinfold::registrar::verbs::{MemoryRegion, OnDemand, Verbs};
use pinfold::registrar::{BufferIndex, IoUring};
use pinfold::{
    Access, AddressRange, DeregisterError, RegisterError, Registrar, RegistrarLimits, Translation,
};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Which device, and how memory is registered with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub(crate) enum Kind {
    /// Registered buffers of an io_uring
    #[default]
    #[value(name = "io_uring")]
    IoUring,
    /// Memory regions of the first RDMA device
    Verbs,
    /// The same without pinned pages, where the device pages on demand
    VerbsOnDemand,
    /// The same, the device believed without a test: right for whole pages on Soft-RoCE
    #[value(hide = true)]
    VerbsOnDemandUntested,
}

impl Kind {
    /// Its name in a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Verbs => "verbs",
            Self::VerbsOnDemand | Self::VerbsOnDemandUntested => "verbs-on-demand",
        }
    }

    /// Whether the device follows the page table by itself.
    pub(crate) const fn is_on_demand(self) -> bool {
        matches!(self, Self::VerbsOnDemand | Self::VerbsOnDemandUntested)
    }

    /// How much the device pins for each byte of its channel.
    pub(crate) const fn pinned_channels(self) -> usize {
        match self {
            Self::IoUring => 0,
            _ => 1,
        }
    }
}

/// What the device knows a registration by: an index into a table, or a local key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key(u32);

impl Key {
    pub(crate) const fn number(self) -> u32 {
        self.0
    }
}

/// One use of a registered buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transfer {
    /// The registration.
    pub(crate) key: Key,
    /// Where the bytes are, inside of the registered range; from a pointer whose provenance the
    /// caller has exposed, so that the compiler keeps the bytes in step.
    pub(crate) address: usize,
    /// How many bytes; at most 1 GiB.
    pub(crate) length: usize,
    /// Where in the channel they go to or come from.
    pub(crate) offset: u64,
}

/// Whether data leaves the program's memory or arrives in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Send,
    Receive,
}

/// What memory is registered with.
trait Table {
    fn registrar(&self, slots: u32) -> Result<AnyRegistrar, Failure>;

    /// # Safety
    ///
    /// As for [`Device::set_buffer`].
    unsafe fn set_buffer(&self, slot: u32, range: Option<AddressRange>) -> io::Result<Key>;
}

/// What each device does in its own way.
trait Conveyor: Send + Sync {
    fn channel(&self) -> &File;

    /// What its memory is registered with.
    fn table(&self) -> &dyn Table;

    fn run(&self, direction: Direction, transfers: &[Transfer]) -> io::Result<()>;

    /// Sends, and takes what arrives; `into` is as long as the transfer.
    fn deliver(&self, transfer: &Transfer, into: &mut [u8]) -> io::Result<()> {
        self.run(Direction::Send, &[*transfer])?;
        self.channel().read_exact_at(into, transfer.offset)
    }

    /// Has `from`, which is as long as the transfer, arrive in registered memory.
    fn accept(&self, transfer: &Transfer, from: &[u8]) -> io::Result<()> {
        self.channel().write_all_at(from, transfer.offset)?;
        self.run(Direction::Receive, &[*transfer])
    }
}

/// A device that sends registered memory into a channel and receives from it. Any thread may use
/// it; transfers of several threads take turns.
pub(crate) struct Device {
    kind: Kind,
    conveyor: Box<dyn Conveyor>,
}

impl Device {
    /// A device and a channel of `channel_bytes` bytes, all zero.
    pub(crate) fn open(kind: Kind, channel_bytes: u64) -> Result<Self, Failure> {
        let channel = memory_file().map_err(|error| no_channel(&error))?;
        channel.set_len(channel_bytes).map_err(|error| no_channel(&error))?;
        Self::with(kind, channel)
    }

    /// Another device, with the channel of one that is there.
    pub(crate) fn beside(kind: Kind, channel: &File) -> Result<Self, Failure> {
        Self::with(kind, channel.try_clone().map_err(|error| no_channel(&error))?)
    }

    /// A ring with a channel that keeps nothing, and from which nothing is received: short transfers end in
    /// the call that begins them.
    pub(crate) fn discarding() -> Result<Self, Failure> {
        Ok(Self { kind: Kind::IoUring, conveyor: Box::new(Pipe::new()?) })
    }

    /// A device for [`deliver`](Self::deliver) and [`accept`](Self::accept), which end within a call; the
    /// channel of one that is not embedded has `channel_bytes` bytes.
    pub(crate) fn looped(kind: Kind, channel_bytes: u64) -> Result<Self, Failure> {
        match kind {
            Kind::IoUring => Ok(Self { kind, conveyor: Box::new(Loopback::new()?) }),
            _ => Self::open(kind, channel_bytes),
        }
    }

    fn with(kind: Kind, channel: File) -> Result<Self, Failure> {
        let conveyor: Box<dyn Conveyor> = match kind {
            Kind::IoUring => Box::new(Ring::with(channel)?),
            _ => Box::new(Rdma::with(kind, channel)?),
        };
        Ok(Self { kind, conveyor })
    }

    /// Which device it is.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The library's registrar for it, with a table of `slots` slots where it has a table.
    pub(crate) fn registrar(&self, slots: u32) -> Result<AnyRegistrar, Failure> {
        self.conveyor.table().registrar(slots)
    }

    /// The receiver's end: every byte sent can be read here at its offset.
    pub(crate) fn channel(&self) -> &File {
        self.conveyor.channel()
    }

    /// Registers `range` under the number `slot`, or ends that registration, as a program would that
    /// registers explicitly.
    ///
    /// # Safety
    ///
    /// As for `Registrar::register`; the slot has no other user.
    ///
    /// # Errors
    ///
    /// The kernel's error number.
    pub(crate) unsafe fn set_buffer(
        &self,
        slot: u32,
        range: Option<AddressRange>,
    ) -> io::Result<Key> {
        // SAFETY: the caller's promise.
        unsafe { self.conveyor.table().set_buffer(slot, range) }
    }

    /// Moves registered memory into the channel and waits until it is there.
    ///
    /// # Errors
    ///
    /// The error of the first transfer that failed.
    pub(crate) fn send(&self, transfers: &[Transfer]) -> io::Result<()> {
        self.conveyor.run(Direction::Send, transfers)
    }

    /// Moves registered memory through the channel and takes what arrives: as many bytes as `into` has.
    ///
    /// # Errors
    ///
    /// The transfer's or the channel's error.
    pub(crate) fn deliver(&self, transfer: &Transfer, into: &mut [u8]) -> io::Result<()> {
        self.conveyor.deliver(transfer, into)
    }

    /// Moves `from` through the channel into registered memory.
    ///
    /// # Errors
    ///
    /// As [`deliver`](Self::deliver).
    pub(crate) fn accept(&self, transfer: &Transfer, from: &[u8]) -> io::Result<()> {
        self.conveyor.accept(transfer, from)
    }
}

/// The registrar of whichever device it is.
#[derive(Debug)]
pub(crate) enum AnyRegistrar {
    IoUring(IoUring),
    Verbs(Verbs),
    OnDemand(OnDemand),
}

/// What [`AnyRegistrar`] gives for a range.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Handle {
    Index(BufferIndex),
    Region(MemoryRegion),
}

impl Handle {
    /// What its device knows it by.
    pub(crate) fn key(self) -> Key {
        match self {
            Self::Index(index) => Key(index.get().into()),
            Self::Region(region) => Key(region.lkey()),
        }
    }
}

// SAFETY: every call goes to the one inside, whose promise it is.
unsafe impl Registrar for AnyRegistrar {
    type Handle = Handle;

    fn limits(&self) -> RegistrarLimits {
        match self {
            Self::IoUring(ring) => ring.limits(),
            Self::Verbs(verbs) => verbs.limits(),
            Self::OnDemand(verbs) => verbs.limits(),
        }
    }

    fn pinned_limit(&self) -> Option<usize> {
        match self {
            Self::IoUring(ring) => ring.pinned_limit(),
            Self::Verbs(verbs) => verbs.pinned_limit(),
            Self::OnDemand(verbs) => verbs.pinned_limit(),
        }
    }

    fn granted(&self, wanted: Access) -> Access {
        match self {
            Self::IoUring(ring) => ring.granted(wanted),
            Self::Verbs(verbs) => verbs.granted(wanted),
            Self::OnDemand(verbs) => verbs.granted(wanted),
        }
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        match self {
            Self::IoUring(ring) => ring.widened(range),
            Self::Verbs(verbs) => verbs.widened(range),
            Self::OnDemand(verbs) => verbs.widened(range),
        }
    }

    fn translation(&self) -> Translation {
        match self {
            Self::IoUring(ring) => ring.translation(),
            Self::Verbs(verbs) => verbs.translation(),
            Self::OnDemand(verbs) => verbs.translation(),
        }
    }

    fn is_simulated(&self) -> bool {
        match self {
            Self::IoUring(ring) => ring.is_simulated(),
            Self::Verbs(verbs) => verbs.is_simulated(),
            Self::OnDemand(verbs) => verbs.is_simulated(),
        }
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Handle, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::IoUring(ring) => ring.register(range, access).map(Handle::Index),
                Self::Verbs(verbs) => verbs.register(range, access).map(Handle::Region),
                Self::OnDemand(verbs) => verbs.register(range, access).map(Handle::Region),
            }
        }
    }

    unsafe fn deregister(
        &self,
        handle: Handle,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, handle) {
                (Self::IoUring(ring), Handle::Index(index)) => ring.deregister(index, range),
                (Self::Verbs(verbs), Handle::Region(region)) => verbs.deregister(region, range),
                (Self::OnDemand(verbs), Handle::Region(region)) => verbs.deregister(region, range),
                _ => Err(DeregisterError::Os { operation: "deregister", errno: libc::EINVAL }),
            }
        }
    }
}

pub(crate) fn memory_file() -> io::Result<File> {
    Ok(File::from(pinfold_kernel::descriptor::memory_file(c"pinfold-channel")?))
}

fn no_channel(error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("no file in memory for the channel (memfd): {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::ManuallyDrop;

    /// Calls `use_it` with the key of `memory`, and its address, while it is registered.
    pub(super) fn with_registered(
        conveyor: &dyn Conveyor,
        memory: Vec<u8>,
        use_it: impl FnOnce(Key, usize),
    ) {
        // Not freed where `use_it` panics: it is still registered then.
        let mut memory = ManuallyDrop::new(memory);
        let address = memory.as_mut_ptr().expose_provenance();
        let range = AddressRange::new(address, memory.len()).unwrap();
        // SAFETY: the memory lives until the registration has ended, and has no other user.
        let key = unsafe { conveyor.table().set_buffer(0, Some(range)) }.unwrap();
        use_it(key, address);
        // SAFETY: no transfer is pending.
        unsafe { conveyor.table().set_buffer(0, None) }.unwrap();
        drop(ManuallyDrop::into_inner(memory));
    }
}
