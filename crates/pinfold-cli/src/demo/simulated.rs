//! The demo where this machine has no device or no monitor: the same program, the same strategies, the real cache, on
//! the simulated device.
//!
//! A simulated page is a number, so no bytes move and no time is worth telling. A message is wrong where the device
//! would touch other pages than the program's.

use super::Tally;
use super::program::{Change, Program, SLOTS, Step};
use super::report::Row;
use crate::output::Failure;
use crate::strategy::Counts;
use pinfold::{Access, AddressRange, Cache, Config};
use pinfold_sim::{
    AddressSpace, DeviceConfig, Handle, Protection, SimDevice, SimMonitor, SimRegistrar,
    get_simulated,
};
use std::collections::HashMap;
use std::sync::Arc;

/// Where the first buffer lies, and how far apart they are: more than the longest message.
const FIRST: usize = 1 << 32;
const APART: usize = 1 << 30;

/// What every strategy sends from: one program's memory, and a device of its own.
struct World {
    space: Arc<AddressSpace>,
    device: Arc<SimDevice>,
    lengths: [usize; SLOTS],
}

impl World {
    fn new(lengths: [usize; SLOTS]) -> Result<Self, Failure> {
        let space = Arc::new(AddressSpace::new());
        let device = Arc::new(SimDevice::new(Arc::clone(&space), DeviceConfig::default()));
        let world = Self { space, device, lengths };
        for (slot, length) in lengths.into_iter().enumerate() {
            world.space.map(range(slot, length)?, Protection::ReadWrite);
        }
        Ok(world)
    }

    /// Does to a buffer what the step says, as an allocator that gives out an address again does.
    fn change(&mut self, step: &Step) -> Result<(), Failure> {
        let before = range(step.slot, self.lengths[step.slot])?;
        let after = range(step.slot, step.length)?;
        match step.change {
            None => return Ok(()),
            Some(Change::Reallocate | Change::Resize) => {
                self.space.unmap(before);
                self.space.map(after, Protection::ReadWrite);
            }
            Some(Change::MapOver) => self.space.map(after, Protection::ReadWrite),
            Some(Change::Discard) => self.space.discard(after),
        }
        self.lengths[step.slot] = step.length;
        Ok(())
    }

    fn register(&self, range: AddressRange) -> Result<Handle, Failure> {
        self.device.register(range, Access::READ).map_err(Failure::unavailable)
    }

    fn deregister(&self, handle: Handle, range: AddressRange) -> Result<(), Failure> {
        self.device.deregister(handle, range).map_err(Failure::unavailable)
    }
}

fn range(slot: usize, length: usize) -> Result<AddressRange, Failure> {
    AddressRange::new(FIRST + slot * APART, length).map_err(Failure::usage)
}

/// One way to register, over its own world.
enum Way {
    Uncached,
    /// The last registration of each address.
    Naive(HashMap<usize, (Handle, AddressRange)>),
    /// A buffer or a pool that was registered once.
    Beforehand(Handle, AddressRange),
    Pinfold(Cache<SimRegistrar, SimMonitor>),
}

/// One strategy at work.
struct Sender {
    name: &'static str,
    world: World,
    way: Way,
    counts: Counts,
    tally: Tally,
}

impl Sender {
    fn new(name: &'static str, lengths: [usize; SLOTS], largest: usize) -> Result<Self, Failure> {
        let world = World::new(lengths)?;
        let mut counts = Counts::default();
        let way = match name {
            "uncached" => Way::Uncached,
            "naive" => Way::Naive(HashMap::new()),
            "pinfold" => Way::Pinfold(cache(&world, largest)?),
            // A slot that the program does not change.
            _ => {
                let buffer = range(SLOTS, largest)?;
                world.space.map(buffer, Protection::ReadWrite);
                counts.registrations = 1;
                Way::Beforehand(world.register(buffer)?, buffer)
            }
        };
        Ok(Self { name, world, way, counts, tally: Tally::default() })
    }

    fn step(&mut self, step: &Step) -> Result<(), Failure> {
        self.world.change(step)?;
        let right = self.send(range(step.slot, step.length)?)?;
        self.tally.wrong += u64::from(!right);
        Ok(())
    }

    /// Whether the device touched the program's own pages.
    fn send(&mut self, message: AddressRange) -> Result<bool, Failure> {
        let World { device, .. } = &self.world;
        match &mut self.way {
            Way::Uncached => {
                self.counts.registrations += 1;
                let handle = self.world.register(message)?;
                let right = device.is_fresh(handle, message);
                self.world.deregister(handle, message).map(|()| right)
            }
            Way::Naive(known) => {
                let found =
                    known.get(&message.start()).filter(|(_, range)| range.contains(&message));
                let handle = match found {
                    Some(&(handle, _)) => {
                        self.counts.hits += 1;
                        handle
                    }
                    None => {
                        self.counts.registrations += 1;
                        let handle = self.world.register(message)?;
                        known.insert(message.start(), (handle, message));
                        handle
                    }
                };
                Ok(device.is_fresh(handle, message))
            }
            Way::Beforehand(handle, buffer) => Ok(device.is_fresh(*handle, *buffer)),
            Way::Pinfold(cache) => {
                let lease = get_simulated(cache, message, Access::READ);
                let lease = lease.map_err(Failure::unavailable)?;
                Ok(device.is_fresh(lease.handle(), message))
            }
        }
    }

    fn row(&self) -> Row {
        let counts = match &self.way {
            Way::Pinfold(cache) => {
                let statistics = cache.statistics();
                Counts { registrations: statistics.registrations, hits: statistics.hits }
            }
            _ => self.counts,
        };
        Row::new(self.name, &self.tally, counts, 0.0)
    }
}

/// A cache whose leases may be as long as a message.
fn cache(world: &World, largest: usize) -> Result<Cache<SimRegistrar, SimMonitor>, Failure> {
    let piece_bytes = largest.next_power_of_two();
    let max_bytes = (SLOTS + 1) * largest;
    let config = Config { piece_bytes, max_bytes, ..Config::keeping_all() };
    let (registrar, monitor) = (SimRegistrar::new(&world.device), SimMonitor::new(&world.space));
    pinfold::cache(registrar, monitor, config).map_err(Failure::unavailable)
}

/// The strategies of the demo, each over the first `messages` steps of the program.
pub(super) fn rows(
    names: &[&'static str],
    seed: u64,
    messages: u64,
    largest: usize,
) -> Result<Vec<Row>, Failure> {
    let row = |&name: &&'static str| {
        let mut program = Program::new(seed, largest);
        let mut sender = Sender::new(name, program.lengths(), largest)?;
        for _ in 0..messages {
            program.next().map_or(Ok(()), |step| sender.step(&step))?;
        }
        Ok(sender.row())
    };
    names.iter().map(row).collect()
}
