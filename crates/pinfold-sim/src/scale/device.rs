//! A device whose every call takes time, as the cache sees it.

use super::CallCosts;
use crate::fabric::Nanos;
use crate::fake::{Fake, FakeDevice, FakeSuspend};
use crate::space::{AddressSpace, PAGE_BYTES, PhysicalPage};
use crate::sync::lock;
use pinfold_core::{
    Access, AddressRange, ConnectionLost, DeregisterError, RegisterError, RegistrarLimits, Renewed,
    Transfers, Unsupported,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const EINVAL: i32 = 22;

/// The device, its clock, and what is on its way.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) space: Arc<AddressSpace>,
    pub(super) costs: CallCosts,
    /// In picoseconds.
    now: u64,
    pub(super) busy: u64,
    entries: Vec<Option<(AddressRange, Vec<PhysicalPage>)>>,
    free: Vec<u32>,
    pub(super) pinned: usize,
    pub(super) most_pinned: usize,
    pub(super) registrations: u64,
    /// For each connection, when what is in flight is done.
    in_flight: Vec<Vec<u64>>,
    wire_free: u64,
    stopped: Vec<Option<u64>>,
    /// How long each stop lasted.
    pub(super) pauses: Vec<u64>,
}

/// A machine that is shared with the cache.
#[derive(Clone, Debug)]
pub(super) struct SharedMachine(Arc<Mutex<Machine>>);

/// The same, as the cache takes it.
pub(super) type TimedDevice = Fake<SharedMachine>;

pub(super) fn pages(range: AddressRange) -> u64 {
    range.len().div_ceil(PAGE_BYTES) as u64
}

impl Machine {
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// The processor works.
    pub(super) fn work(&mut self, time: u64) {
        self.now += time;
        self.busy += time;
    }

    /// The processor waits.
    pub(super) fn wait_until(&mut self, moment: u64) {
        self.now = self.now.max(moment);
    }

    /// Sends a message of `range` to `peer`, not before `ready`. Says when it is done.
    pub(super) fn send(&mut self, peer: usize, range: AddressRange, ready: u64) -> u64 {
        let begin = self.now.max(self.wire_free);
        self.wire_free = begin + pages(range) * self.costs.wire_page;
        // A message that waits for its pages does not hold up the others.
        let done = self.wire_free.max(ready) + self.costs.latency;
        self.in_flight[peer].push(done);
        done
    }

    pub(super) fn sent(&mut self, peer: usize, done: u64) {
        self.in_flight[peer].retain(|&other| other != done);
    }

    /// Whether the device would send the pages that are there now.
    pub(super) fn is_fresh(&self, handle: u32, range: AddressRange) -> bool {
        let Some((registered, pinned)) = &self.entries[handle as usize] else { return false };
        let Some(there) = self.space.translate(range) else { return false };
        let first = (range.start() - registered.start()) / PAGE_BYTES;
        pinned.get(first..first + there.len()) == Some(&there)
    }

    pub(super) fn register(&mut self, range: AddressRange) -> Result<u32, RegisterError> {
        let bad = |reason| RegisterError::BadAddress { range, reason, errno: EINVAL };
        let pinned = self.space.pin(range, Access::READ_WRITE).map_err(bad)?;
        self.work(self.costs.register + pages(range) * self.costs.register_page);
        self.registrations += 1;
        self.pinned += pinned.len() * PAGE_BYTES;
        self.most_pinned = self.most_pinned.max(self.pinned);
        let handle = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        });
        self.entries[handle as usize] = Some((range, pinned));
        Ok(handle)
    }

    pub(super) fn deregister(&mut self, handle: u32) -> Result<(), DeregisterError> {
        let gone = DeregisterError::Os { operation: "deregister", errno: EINVAL };
        let (range, pinned) = self.entries[handle as usize].take().ok_or(gone)?;
        self.work(self.costs.deregister + pages(range) * self.costs.deregister_page);
        self.pinned -= pinned.len() * PAGE_BYTES;
        self.free.push(handle);
        Ok(())
    }

    fn unfinished(&self, peer: usize) -> impl Iterator<Item = u64> + '_ {
        self.in_flight[peer].iter().copied().filter(|&done| done > self.now)
    }
}

impl TimedDevice {
    pub(super) fn new(space: &Arc<AddressSpace>, costs: CallCosts, peers: usize) -> Self {
        Self(SharedMachine(Arc::new(Mutex::new(Machine {
            space: Arc::clone(space),
            costs,
            now: 0,
            busy: 0,
            entries: Vec::new(),
            free: Vec::new(),
            pinned: 0,
            most_pinned: 0,
            registrations: 0,
            in_flight: vec![Vec::new(); peers],
            wire_free: 0,
            stopped: vec![None; peers],
            pauses: Vec::new(),
        }))))
    }
}

impl SharedMachine {
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Machine) -> T) -> T {
        f(&mut lock(&self.0))
    }
}

impl FakeDevice for SharedMachine {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE_BYTES, max_region_bytes: 1 << 30, max_regions: 1 << 22 }
    }

    fn register(&self, range: AddressRange, _access: Access) -> Result<u32, RegisterError> {
        self.with(|machine| machine.register(range))
    }

    fn deregister(&self, handle: u32, _range: AddressRange) -> Result<(), DeregisterError> {
        self.with(|machine| machine.deregister(handle))
    }
}

/// A connection is the number of its peer.
impl FakeSuspend for SharedMachine {
    type Connection = usize;

    fn now(&self) -> Duration {
        Duration::from_nanos(self.with(|machine| to_nanos(machine.now)))
    }

    fn can_suspend(&self, _range: AddressRange, peers: &[usize]) -> Result<(), Unsupported> {
        let connections = self.with(|machine| machine.stopped.len());
        let stranger = peers.iter().position(|&peer| peer >= connections);
        stranger.map_or(Ok(()), |index| Err(Unsupported::Connection { index }))
    }

    fn stop(&self, &peer: &usize) -> Result<(), ConnectionLost> {
        self.with(|machine| {
            machine.stopped[peer] = Some(machine.now);
            machine.work(machine.costs.stop);
        });
        Ok(())
    }

    fn in_flight(&self, &peer: &usize, _range: AddressRange) -> Result<Transfers, ConnectionLost> {
        let count = self.with(|machine| machine.unfinished(peer).count());
        Ok(Transfers { count, oldest: Duration::ZERO })
    }

    fn renew(
        &self,
        handle: u32,
        range: AddressRange,
        _access: Access,
    ) -> Result<Renewed<u32>, RegisterError> {
        self.with(|machine| {
            // What it cannot give back it has lost.
            let _gone = machine.deregister(handle);
            machine.register(range).map(|fresh| match fresh == handle {
                true => Renewed::Same,
                false => Renewed::Changed(fresh),
            })
        })
    }

    fn restart(&self, &peer: &usize) -> Result<(), ConnectionLost> {
        self.with(|machine| {
            machine.work(machine.costs.restart);
            if let Some(since) = machine.stopped[peer].take() {
                machine.pauses.push(machine.now - since);
            }
        });
        Ok(())
    }

    fn fail(&self, &peer: &usize) {
        self.with(|machine| machine.stopped[peer] = None);
    }

    /// Until the next message is done.
    fn wait(&self, until: Duration) {
        self.with(|machine| {
            let peers = 0..machine.in_flight.len();
            let next = peers.flat_map(|peer| machine.unfinished(peer)).min();
            let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000);
            machine.wait_until(next.unwrap_or(until).min(until));
        });
    }
}

pub(super) const fn to_nanos(picoseconds: u64) -> Nanos {
    picoseconds / 1000
}
