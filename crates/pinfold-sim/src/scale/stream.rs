//! A stream of messages, under one policy.

use super::device::{Machine, TimedDevice, pages, to_nanos};
use super::{Row, ScalePolicy, Scenario};
use crate::fake::get_simulated;
use crate::monitor::SimMonitor;
use crate::random::Random;
use crate::space::{AddressSpace, PAGE_BYTES, Protection};
use pinfold_core::{Access, AddressRange, Cache, Config, Lease};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) type TimedCache = Cache<TimedDevice, SimMonitor>;
pub(super) type TimedLease<'c> = Lease<'c, TimedDevice, SimMonitor>;

/// Where the program's buffers begin.
const BASE: usize = 0x1_0000_0000;

/// What a message on its way gives back when it is done.
enum Held<'c> {
    Nothing,
    /// A registration for this one use.
    Registration(u32),
    /// Ends when it is dropped.
    Lease(TimedLease<'c>),
    /// A bounce buffer.
    Bounce(usize),
}

struct Message<'c> {
    peer: usize,
    buffer: usize,
    wanted: u64,
    held: Held<'c>,
}

/// The program.
pub(super) struct Stream<'c, 's> {
    scenario: &'s Scenario,
    policy: ScalePolicy,
    pub(super) device: &'c TimedDevice,
    cache: &'c TimedCache,
    pub(super) random: Random,
    /// By the moment when they will be done, and by the order in which they were sent.
    messages: BTreeMap<(u64, u64), Message<'c>>,
    sent: u64,
    /// Messages in flight from each buffer.
    users: Vec<u32>,
    bounces: Vec<Bounce>,
    /// Which buffers the device has pages of.
    present: Vec<bool>,
    latencies: Vec<u64>,
    faults: u64,
    hits: u64,
    stale: u64,
    refused: u64,
}

#[derive(Clone, Copy)]
struct Bounce {
    range: AddressRange,
    handle: u32,
    in_use: bool,
}

/// A range of `pages` pages; ranges of one scenario never touch the address space's end.
fn range(start: usize, pages: usize) -> AddressRange {
    AddressRange::between(start, start + pages * PAGE_BYTES).unwrap_or(AddressRange::EVERYTHING)
}

/// What a run takes place in.
pub(super) struct Stage {
    pub(super) device: TimedDevice,
    pub(super) cache: TimedCache,
}

impl Stage {
    /// Nothing if the cache refuses the settings.
    pub(super) fn new(scenario: &Scenario, policy: ScalePolicy) -> Option<Self> {
        let space = Arc::new(AddressSpace::new());
        let all = scenario.peers * scenario.buffers * scenario.pages;
        space.map(range(BASE, all), Protection::ReadWrite);
        let device = TimedDevice::new(&space, scenario.costs, scenario.peers);
        let monitor = SimMonitor::new(&space);
        let bounded = policy == ScalePolicy::CachedInBudget;
        let max_bytes = if bounded { scenario.budget } else { usize::MAX };
        let config = Config { max_bytes, max_regions: 1 << 22, ..Config::default() };
        let cache = Cache::new(device.clone(), monitor, config).ok()?;
        Some(Self { device, cache })
    }
}

pub(super) fn run(scenario: &Scenario, policy: ScalePolicy) -> Row {
    let stage = Stage::new(scenario, policy);
    stage.map_or_else(Row::default, |stage| {
        let mut stream = Stream::new(scenario, policy, &stage);
        stream.prepare();
        stream.run(scenario.transfers);
        stream.row()
    })
}

impl<'c, 's> Stream<'c, 's> {
    pub(super) fn new(scenario: &'s Scenario, policy: ScalePolicy, stage: &'c Stage) -> Self {
        let buffers = scenario.peers * scenario.buffers;
        Self {
            scenario,
            policy,
            device: &stage.device,
            cache: &stage.cache,
            random: Random::new(scenario.seed),
            messages: BTreeMap::new(),
            sent: 0,
            users: vec![0; buffers],
            bounces: Vec::new(),
            present: vec![false; buffers],
            latencies: Vec::with_capacity(scenario.transfers),
            faults: 0,
            hits: 0,
            stale: 0,
            refused: 0,
        }
    }

    /// What is registered before the first message.
    fn prepare(&mut self) {
        match self.policy {
            ScalePolicy::CopyPerPeer => self.make_bounces(self.scenario.peers),
            ScalePolicy::CopyShared => self.make_bounces(self.scenario.window),
            // The table's entry alone: no page is pinned.
            ScalePolicy::OnDemand => self.device.with(|machine| {
                machine.work(machine.costs.register * self.present.len() as u64);
                machine.registrations += self.present.len() as u64;
            }),
            ScalePolicy::PerUse | ScalePolicy::Cached | ScalePolicy::CachedInBudget => {}
        }
    }

    fn make_bounces(&mut self, count: usize) {
        let pages = self.scenario.pages;
        let first = BASE + 2 * self.users.len() * pages * PAGE_BYTES;
        for number in 0..count {
            let range = range(first + number * pages * PAGE_BYTES, pages);
            let registered = self.device.with(|machine| {
                machine.space.map(range, Protection::ReadWrite);
                machine.register(range)
            });
            match registered {
                Ok(handle) => self.bounces.push(Bounce { range, handle, in_use: false }),
                Err(_) => self.refused += 1,
            }
        }
    }

    pub(super) fn run(&mut self, transfers: usize) {
        for _ in 0..transfers {
            self.send_one();
        }
        while self.finish_one() {}
    }

    /// Sends `transfers` messages and leaves those in flight there.
    pub(super) fn go_on(&mut self, transfers: usize) {
        for _ in 0..transfers {
            self.send_one();
        }
    }

    pub(super) fn buffer_range(&self, buffer: usize) -> AddressRange {
        let pages = self.scenario.pages;
        range(BASE + buffer * pages * PAGE_BYTES, pages)
    }

    pub(super) fn lease(&self, range: AddressRange) -> Option<TimedLease<'c>> {
        get_simulated(self.cache, range, Access::READ).ok()
    }

    /// Hot peers come first in the order of peers.
    fn some_peer(&mut self) -> usize {
        let Scenario { peers, hot, hot_share, .. } = *self.scenario;
        let hot_peers = (peers * hot / 100).clamp(1, peers);
        if hot_peers == peers || self.random.chance(hot_share) {
            self.random.below(hot_peers)
        } else {
            hot_peers + self.random.below(peers - hot_peers)
        }
    }

    fn send_one(&mut self) {
        let peer = self.some_peer();
        let buffer = peer * self.scenario.buffers + self.random.below(self.scenario.buffers);
        self.churn(buffer);
        while self.messages.len() >= self.scenario.window {
            self.finish_one();
        }
        let wanted = self.device.with(|machine| machine.now());
        let range = self.buffer_range(buffer);
        let (held, ready) = loop {
            if let Some(acquired) = self.acquire(peer, buffer, range) {
                break acquired;
            }
            // What is in use is all there is: a use has to end first.
            if !self.finish_one() {
                self.refused += 1;
                return;
            }
        };
        self.check(&held, range);
        let done = self.device.with(|machine| machine.send(peer, range, ready));
        self.users[buffer] += 1;
        self.sent += 1;
        self.messages.insert((done, self.sent), Message { peer, buffer, wanted, held });
    }

    /// Frees an unused buffer and allocates it anew.
    fn churn(&mut self, buffer: usize) {
        if self.random.below(1000) >= self.scenario.churn || self.users[buffer] > 0 {
            return;
        }
        let range = self.buffer_range(buffer);
        self.present[buffer] = false;
        self.device.with(|machine| {
            machine.space.unmap(range);
            machine.space.map(range, Protection::ReadWrite);
        });
        // What the reclaimer does a fifth of a millisecond later.
        self.cache.reclaim();
    }

    /// Makes a buffer usable; nothing if that has to wait. Also says from when on.
    fn acquire(
        &mut self,
        peer: usize,
        buffer: usize,
        range: AddressRange,
    ) -> Option<(Held<'c>, u64)> {
        match self.policy {
            ScalePolicy::PerUse => {
                let handle = self.device.with(|machine| machine.register(range)).ok()?;
                Some((Held::Registration(handle), 0))
            }
            ScalePolicy::CopyPerPeer => self.copy(peer),
            ScalePolicy::CopyShared => {
                let free = self.bounces.iter().position(|bounce| !bounce.in_use)?;
                self.copy(free)
            }
            ScalePolicy::Cached | ScalePolicy::CachedInBudget => self.acquire_cached(range),
            ScalePolicy::OnDemand => Some((Held::Nothing, self.touch(buffer))),
        }
    }

    fn acquire_cached(&mut self, range: AddressRange) -> Option<(Held<'c>, u64)> {
        self.device.with(|machine| machine.work(machine.costs.hit));
        let before = self.device.with(|machine| machine.registrations);
        let lease = self.lease(range)?;
        let registered = self.device.with(|machine| machine.registrations) - before;
        self.hits += u64::from(registered == 0);
        Some((Held::Lease(lease), 0))
    }

    fn copy(&mut self, which: usize) -> Option<(Held<'c>, u64)> {
        let bounce = self.bounces.get_mut(which).filter(|bounce| !bounce.in_use)?;
        bounce.in_use = true;
        let pages = pages(bounce.range);
        self.device.with(|machine| machine.work(pages * machine.costs.copy_page));
        Some((Held::Bounce(which), 0))
    }

    /// The device asks for what it has no pages of.
    fn touch(&mut self, buffer: usize) -> u64 {
        if std::mem::replace(&mut self.present[buffer], true) {
            return 0;
        }
        self.faults += 1;
        self.device.with(|machine| machine.now() + machine.costs.fault)
    }

    /// The pages that will leave are those that the program means.
    fn check(&mut self, held: &Held<'c>, range: AddressRange) {
        let (handle, range) = match held {
            Held::Nothing => return,
            Held::Registration(handle) => (*handle, range),
            Held::Lease(lease) => (lease.handle(), range),
            Held::Bounce(which) => (self.bounces[*which].handle, self.bounces[*which].range),
        };
        let fresh = self.device.with(|machine| machine.is_fresh(handle, range));
        if !fresh {
            self.stale += 1;
        }
    }

    /// Waits for the message that is done first. False if there is none.
    fn finish_one(&mut self) -> bool {
        let Some(((done, _), message)) = self.messages.pop_first() else { return false };
        self.device.with(|machine| machine.wait_until(done));
        self.finish(message, done);
        true
    }

    /// Takes what is done by now. False if nothing is.
    pub(super) fn finish_due(&mut self) -> bool {
        let now = self.device.with(|machine| machine.now());
        let before = self.messages.len();
        while self.messages.first_key_value().is_some_and(|(&(done, _), _)| done <= now) {
            self.finish_one();
        }
        self.messages.len() < before
    }

    fn finish(&mut self, message: Message<'c>, done: u64) {
        let Message { peer, buffer, wanted, held } = message;
        self.users[buffer] -= 1;
        self.latencies.push(done - wanted);
        self.device.with(|machine| machine.sent(peer, done));
        match held {
            Held::Nothing | Held::Lease(_) => {}
            Held::Registration(handle) => {
                let gone = self.device.with(|machine| machine.deregister(handle)).is_err();
                self.refused += u64::from(gone);
            }
            Held::Bounce(which) => self.bounces[which].in_use = false,
        }
    }

    fn row(mut self) -> Row {
        let statistics = self.cache.statistics();
        self.latencies.sort_unstable();
        let count = self.latencies.len() as u64;
        let sum: u64 = self.latencies.iter().sum();
        let at = self.latencies.len() * 99 / 100;
        self.device.with(|machine: &mut Machine| Row {
            pinned_bytes: machine.most_pinned,
            registrations: machine.registrations,
            hits: self.hits,
            evictions: statistics.evictions,
            faults: self.faults,
            stale: self.stale,
            refused: self.refused,
            total: to_nanos(machine.now()),
            busy: to_nanos(machine.busy),
            slowest_of_hundred: to_nanos(self.latencies.get(at).copied().unwrap_or(0)),
            mean: to_nanos(sum.checked_div(count).unwrap_or(0)),
        })
    }
}
