//! The ways to send memory through a device that wants it registered, side by side.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for [`Registrar::register`] and the cache's `get`, which open
//! memory to the device. Every strategy registers blocks of [`Block`] for sending; the device reads
//! them while `send` runs, when the message borrows its block, and at no other time. Where a
//! strategy keeps a registration for longer, no transfer uses it until the next `send`; that it may
//! then move the wrong pages is what the demo is here to show.

#![allow(unsafe_code)]

use crate::block::Block;
use crate::device::{Device, Handle, Key, Kind, Transfer};
use crate::output::Failure;
use crate::port::{self, AnyMonitor, PortRegistrar};
use pinfold::monitor::{Best, Choice, best};
use pinfold::pieces::{self, Mover, TransferError};
use pinfold::strategy::{self, Direction, Reuse, TransferPlanner};
use pinfold::{Access, AddressRange, Cache, Checked, Config, GetError, Lease, Monitor, Registrar};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Bytes to be sent, all of them inside of `block`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    /// The sender's memory.
    pub(crate) block: &'a Block,
    /// Where the message begins in it.
    pub(crate) offset: usize,
    /// How long the message is, in bytes.
    pub(crate) length: usize,
}

impl Message<'_> {
    /// The address of the first byte.
    fn address(&self) -> usize {
        self.block.address() + self.offset
    }

    fn start(&self) -> *const u8 {
        // Exposes it, as the device needs.
        std::ptr::with_exposed_provenance(self.address())
    }

    /// The message as a part of what the device knows by `key`.
    fn by(&self, key: Key) -> (Key, usize, usize) {
        (key, self.address(), self.length)
    }

    fn range(&self) -> Result<AddressRange, Failure> {
        AddressRange::new(self.address(), self.length).map_err(Failure::usage)
    }

    /// Sends it piece by piece while other pieces are registered.
    pub(crate) fn in_pieces<R: Registrar, M: Monitor, V: Mover<R::Handle>>(
        &self,
        cache: &Cache<R, M>,
        options: &pieces::Options,
        mover: &mut V,
    ) -> Result<(), TransferError<V::Error>> {
        let progress = pieces::Progress::new();
        let (start, length) = (self.start(), self.length);
        // SAFETY: the message borrows its block until the transfer is complete.
        unsafe { pieces::transfer(cache, start, length, Access::READ, options, &progress, mover) }
            .map(drop)
    }

    /// Sends it by the way that `planner` chooses, and says which.
    pub(crate) fn through<R: Registrar, M: Monitor, V: Mover<R::Handle>>(
        &self,
        planner: &TransferPlanner<'_, R, M>,
        reuse: Reuse,
        mover: &mut V,
    ) -> Result<strategy::Strategy, TransferError<V::Error>> {
        let (start, length) = (self.start(), self.length);
        // SAFETY: as above; no thread writes a block that is borrowed, and what was never written of it is read
        // by no thread.
        unsafe { planner.transfer(Direction::Leaving, start, length, reuse, mover) }
    }
}

/// What a strategy asked of its device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Counts {
    /// Registrations made.
    pub(crate) registrations: u64,
    /// Registrations found in a cache.
    pub(crate) hits: u64,
}

/// A way to get messages through a device.
pub(crate) trait Strategy {
    /// Sends messages, one behind the other from the start of the channel on, and waits until they
    /// are there.
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure>;

    /// What was asked of the device so far.
    fn counts(&self) -> Counts;

    /// Where the messages arrive.
    fn channel(&self) -> &File;
}

/// A device with the library's registrar for it.
pub(crate) struct Wire {
    device: Device,
    registrar: PortRegistrar,
    registrations: u64,
    /// Room for the transfers of one send.
    transfers: Vec<Transfer>,
}

/// How many registrations each wire's table holds.
const SLOTS: u32 = 4096;

/// A range in the device's table.
#[derive(Clone, Copy, Debug)]
struct Registration {
    handle: Handle,
    range: AddressRange,
}

impl Wire {
    /// A new device with a channel for `bytes` bytes.
    pub(crate) fn open(kind: Kind, bytes: usize) -> Result<Self, Failure> {
        Self::with(Device::open(kind, bytes as u64)?)
    }

    /// A new device with the channel of `other`.
    pub(crate) fn beside(kind: Kind, other: &File) -> Result<Self, Failure> {
        Self::with(Device::beside(kind, other)?)
    }

    /// A new device whose channel keeps nothing.
    pub(crate) fn discarding() -> Result<Self, Failure> {
        Self::with(Device::discarding()?)
    }

    fn with(device: Device) -> Result<Self, Failure> {
        let registrar = port::unaudited(device.registrar(SLOTS)?);
        Ok(Self { device, registrar, registrations: 0, transfers: Vec::new() })
    }

    /// The device and the registrar, for one who brings them together otherwise.
    pub(crate) fn into_parts(self) -> (Device, PortRegistrar) {
        (self.device, self.registrar)
    }

    fn register(&mut self, range: AddressRange) -> Result<Registration, Failure> {
        // SAFETY: the range is (part of) a live block, see the file's header.
        let handle = unsafe { self.registrar.register(range, Access::READ) }
            .map_err(Failure::unavailable)?;
        self.registrations += 1;
        Ok(Registration { handle, range })
    }

    fn register_block(&mut self, block: &Block) -> Result<Registration, Failure> {
        let whole = Message { block, offset: 0, length: block.length() };
        self.register(whole_pages(whole.range()?))
    }

    fn deregister(&self, registration: Registration) -> Result<(), Failure> {
        let Registration { handle, range } = registration;
        // SAFETY: registered above, by a strategy that forgets it here; what it sends is waited for.
        unsafe { self.registrar.deregister(handle, range) }.map_err(Failure::unavailable)
    }

    /// Sends (buffer, address, length) one behind the other.
    fn send(
        &mut self,
        parts: impl IntoIterator<Item = (Key, usize, usize)>,
    ) -> Result<(), Failure> {
        self.transfers.clear();
        line_up(&mut self.transfers, parts);
        self.device.send(&self.transfers).map_err(|error| not_sent(&error))
    }

    fn counts(&self, hits: u64) -> Counts {
        Counts { registrations: self.registrations, hits }
    }
}

/// Appends one transfer for each part, each to where the last one ends in the channel.
fn line_up(transfers: &mut Vec<Transfer>, parts: impl IntoIterator<Item = (Key, usize, usize)>) {
    let mut offset = 0;
    transfers.extend(parts.into_iter().map(|(key, address, length)| {
        let transfer = Transfer { key, address, length, offset };
        offset += length as u64;
        transfer
    }));
}

/// Registers each message for its one send: explicitly, with nothing but the kernel's two calls, so
/// that no other strategy looks good compared with a slow registrar.
pub(crate) struct Uncached {
    wire: Wire,
    /// What the messages of one send were registered as.
    keys: Vec<Key>,
}

impl Uncached {
    /// Registers with `wire`'s device.
    pub(crate) fn new(wire: Wire) -> Self {
        Self { wire, keys: Vec::new() }
    }

    fn register(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        self.keys.clear();
        for (slot, message) in (0..).zip(messages) {
            let range = whole_pages(message.range()?);
            // SAFETY: the range is part of a live block, see the file's header, and this wire's
            // registrar is not used.
            let key = unsafe { self.wire.device.set_buffer(slot, Some(range)) }
                .map_err(|error| not_registered(range, &error))?;
            self.keys.push(key);
            self.wire.registrations += 1;
        }
        Ok(())
    }

    fn deregister(&mut self, count: usize) -> Result<(), Failure> {
        (0..).take(count).try_for_each(|slot| {
            // SAFETY: an entry is emptied, and no transfer is under way.
            unsafe { self.wire.device.set_buffer(slot, None) }
                .map(drop)
                .map_err(|error| not_sent(&error))
        })
    }
}

impl Strategy for Uncached {
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        self.register(messages)?;
        let parts = self.keys.iter().zip(messages).map(|(key, message)| message.by(*key));
        let sent = self.wire.send(parts);
        self.deregister(messages.len())?;
        sent
    }

    fn counts(&self) -> Counts {
        self.wire.counts(0)
    }

    fn channel(&self) -> &File {
        self.wire.device.channel()
    }
}

/// Registers each address and length once, and believes for ever that it is the same memory.
pub(crate) struct Naive {
    wire: Wire,
    known: HashMap<AddressRange, Registration>,
    pinned: usize,
    budget: usize,
    hits: u64,
}

impl Naive {
    /// A cache that empties itself when it has pinned `budget` bytes.
    pub(crate) fn new(wire: Wire, budget: usize) -> Self {
        Self { wire, known: HashMap::new(), pinned: 0, budget, hits: 0 }
    }

    fn get(&mut self, range: AddressRange) -> Result<Handle, Failure> {
        if let Some(known) = self.known.get(&range) {
            self.hits += 1;
            return Ok(known.handle);
        }
        let pages = whole_pages(range);
        self.make_room(pages.len())?;
        let registration = self.wire.register(pages)?;
        self.pinned += pages.len();
        self.known.insert(range, registration);
        Ok(registration.handle)
    }

    fn make_room(&mut self, wanted: usize) -> Result<(), Failure> {
        let full = self.pinned + wanted > self.budget || self.known.len() >= SLOTS as usize;
        if !full {
            return Ok(());
        }
        self.pinned = 0;
        self.known.drain().try_for_each(|(_, registration)| self.wire.deregister(registration))
    }
}

impl Strategy for Naive {
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        // One by one: making room for a message may give up the registration of the last.
        let mut offset = 0;
        for message in messages {
            let (key, address, length) = message.by(self.get(message.range()?)?.key());
            let transfer = Transfer { key, address, length, offset };
            self.wire.device.send(&[transfer]).map_err(|error| not_sent(&error))?;
            offset += length as u64;
        }
        Ok(())
    }

    fn counts(&self) -> Counts {
        self.wire.counts(self.hits)
    }

    fn channel(&self) -> &File {
        self.wire.device.channel()
    }
}

/// Copies each message into memory that was registered beforehand.
pub(crate) struct Copying {
    wire: Wire,
    bounce: Block,
    registration: Registration,
}

impl Copying {
    /// Registers `bounce`, through which all messages go; it has room for all of one send.
    pub(crate) fn new(mut wire: Wire, bounce: Block) -> Result<Self, Failure> {
        let registration = wire.register_block(&bounce)?;
        Ok(Self { wire, bounce, registration })
    }
}

impl Strategy for Copying {
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        let mut end = 0;
        for Message { block, offset, length } in messages {
            self.bounce.copy_from(end, block, *offset, *length);
            end += length;
        }
        let (key, start) = (self.registration.handle.key(), self.bounce.address());
        let mut copied = 0;
        self.wire.send(messages.iter().map(|message| {
            copied += message.length;
            (key, start + copied - message.length, message.length)
        }))
    }

    fn counts(&self) -> Counts {
        self.wire.counts(0)
    }

    fn channel(&self) -> &File {
        self.wire.device.channel()
    }
}

/// Sends from memory that was registered beforehand, in which the program builds its messages.
pub(crate) struct Preregistered {
    wire: Wire,
    registration: Registration,
}

impl Preregistered {
    /// Registers `pool`, in which every message lies.
    pub(crate) fn new(mut wire: Wire, pool: &Block) -> Result<Self, Failure> {
        let registration = wire.register_block(pool)?;
        Ok(Self { wire, registration })
    }
}

impl Strategy for Preregistered {
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        let key = self.registration.handle.key();
        self.wire.send(messages.iter().map(|message| message.by(key)))
    }

    fn counts(&self) -> Counts {
        self.wire.counts(0)
    }

    fn channel(&self) -> &File {
        self.wire.device.channel()
    }
}

/// What is shown is what caching does, so a machine must have a monitor that lets a cache keep something.
fn caching(monitor: Best) -> Result<AnyMonitor, Failure> {
    match monitor.chosen() {
        Choice::NoMonitor => {
            let reasons: Vec<_> = monitor.refused().iter().map(ToString::to_string).collect();
            Err(Failure::unavailable(reasons.join("; ")))
        }
        _ => Ok(Arc::new(monitor)),
    }
}

/// The one monitor for all caches over this kind of device: two cannot watch the same memory.
pub(crate) fn monitor(kind: Kind) -> Result<AnyMonitor, Failure> {
    if kind.is_on_demand() {
        return port::unneeded();
    }
    caching(best().map_err(Failure::unavailable)?)
}

/// The library's cache: registers once, until the kernel says that the memory changed.
pub(crate) struct Cached {
    device: Device,
    cache: Cache<PortRegistrar, AnyMonitor>,
    /// Room for the transfers of one send.
    transfers: Vec<Transfer>,
}

type Leases<'c> = Vec<Lease<'c, PortRegistrar, AnyMonitor>>;

impl Cached {
    /// A cache that pins at most `budget` bytes.
    pub(crate) fn new(wire: Wire, budget: usize) -> Result<Self, Failure> {
        Self::in_pieces(wire, budget, Config::default().piece_bytes)
    }

    /// The same with leases of up to `piece_bytes`.
    pub(crate) fn in_pieces(
        wire: Wire,
        budget: usize,
        piece_bytes: usize,
    ) -> Result<Self, Failure> {
        let monitor = monitor(wire.device.kind())?;
        let config = Config { max_bytes: budget, piece_bytes, ..Config::default() };
        let cache =
            pinfold::cache(wire.registrar, monitor, config).map_err(Failure::unavailable)?;
        Ok(Self { device: wire.device, cache, transfers: wire.transfers })
    }

    /// Gives up what is idle.
    pub(crate) fn evict(&self) {
        self.cache.evict_idle();
    }

    /// The registrations of a message that is one piece.
    fn lease<'c>(
        &'c self,
        checked: &Checked<'c, PortRegistrar, AnyMonitor>,
        message: &Message<'_>,
        leases: &mut Leases<'c>,
    ) -> Result<(), GetError> {
        let (start, length) = (message.start(), message.length);
        if length <= self.cache.config().piece_bytes {
            // SAFETY: the message borrows its block until the transfer is complete and the leases
            // have ended.
            leases.push(unsafe { checked.get(start, length, Access::READ) }?);
            return Ok(());
        }
        // SAFETY: as above.
        let pieces = unsafe { checked.request(start, length, Access::READ).pieces() }?;
        for piece in pieces {
            leases.push(piece?);
        }
        Ok(())
    }

    /// The registrations of all messages, for which the monitor is asked once.
    fn leases(&self, messages: &[Message<'_>]) -> Result<Leases<'_>, GetError> {
        let checked = self.cache.check()?;
        let mut leases = Vec::with_capacity(messages.len());
        messages.iter().try_for_each(|message| self.lease(&checked, message, &mut leases))?;
        Ok(leases)
    }
}

impl Strategy for Cached {
    fn send(&mut self, messages: &[Message<'_>]) -> Result<(), Failure> {
        let mut transfers = std::mem::take(&mut self.transfers);
        transfers.clear();
        let leases = self.leases(messages).map_err(Failure::unavailable)?;
        let part = |lease: &Lease<'_, PortRegistrar, AnyMonitor>| {
            (lease.handle().key(), lease.range().start(), lease.range().len())
        };
        line_up(&mut transfers, leases.iter().map(part));
        let sent = self.device.send(&transfers).map_err(|error| not_sent(&error));
        drop(leases);
        self.transfers = transfers;
        sent
    }

    fn counts(&self) -> Counts {
        let statistics = self.cache.statistics();
        Counts { registrations: statistics.registrations, hits: statistics.hits }
    }

    fn channel(&self) -> &File {
        self.device.channel()
    }
}

fn whole_pages(range: AddressRange) -> AddressRange {
    range.page_aligned(4096)
}

fn not_registered(range: AddressRange, error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("{range} was not registered: {error}"))
}

fn not_sent(error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("a send failed: {error}"))
}
