//! Questions of scale on paper: one node, up to ten thousand peers, what each policy costs.
//!
//! What is real: the cache, with its index, its order of eviction, its suspensions and its books;
//! an address space whose pages change under it, and a monitor that tells. What is simulated: the
//! device and the clock. Every call costs what [`CallCosts`] says, on one processor that does one
//! thing after another; the wire carries one message after another. So the answers are arithmetic
//! over a real course of events, the same for the same seed on every machine.
//!
//! **What is modelled.** A program has some buffers for each peer and sends from one of them at a
//! time, a bounded number in flight; some peers are hot; now and then a buffer is freed and
//! allocated anew before it is used. Each [`ScalePolicy`] makes its buffers usable in its way. A
//! suspension stops connections one after the other, waits until they have drained, moves the
//! memory, registers again, and lets them go on.
//!
//! **What is not.** Several processors or devices; congestion, losses, retries (`fabric` has
//! them); the peers' processors; the device's own cache of translations, so registering millions
//! of pages costs nothing on the way of a transfer; eviction and barriers count as part of a miss.
//! A page fault of a device that pages on demand delays its own message and no other. During a
//! suspension the program does nothing else, and connections that are not stopped are taken not to
//! notice.
//!
//! The device of `fabric` carries packets of 512 bytes, which is too fine for this.

mod device;
mod stream;
mod suspension;

pub use suspension::{SuspensionStopped, Suspensions};

use crate::fabric::Nanos;
use pinfold_core::listed;

/// What each thing costs, in picoseconds, so that all arithmetic is exact.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallCosts {
    /// A registration, besides its pages.
    pub register: u64,
    /// Each page of a registration.
    pub register_page: u64,
    /// Giving a registration back, besides its pages.
    pub deregister: u64,
    /// Each page of a registration that is given back.
    pub deregister_page: u64,
    /// A look-up in the cache, the monitor's check included.
    pub hit: u64,
    /// Copying a page; moving one, too.
    pub copy_page: u64,
    /// A page fault of a device that pages on demand, for all of a message's pages together.
    pub fault: u64,
    /// The wire's time for a page.
    pub wire_page: u64,
    /// From the last byte on the wire to the completion.
    pub latency: u64,
    /// Stopping a connection.
    pub stop: u64,
    /// Letting a connection go on.
    pub restart: u64,
}

/// A cost by its name on a command line, and where its default comes from.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The name.
    pub name: &'static str,
    /// The source.
    pub source: &'static str,
    /// Where it stands.
    pub place: fn(&mut CallCosts) -> &mut u64,
}

/// Every cost.
pub const COSTS: [Cost; 11] = [
    Cost {
        name: "register",
        source: "io_uring, Linux 6.18: 4 KiB take 0.5 us, given back included",
        place: |costs| &mut costs.register,
    },
    Cost {
        name: "register-page",
        source: "io_uring, Linux 6.18: 16 MiB in 195 us, less the giving back; verbs: some 0.4",
        place: |costs| &mut costs.register_page,
    },
    Cost {
        name: "deregister",
        source: "io_uring, Linux 6.18: a tenth of 0.5 us",
        place: |costs| &mut costs.deregister,
    },
    Cost {
        name: "deregister-page",
        source: "io_uring, Linux 6.18: 16 MiB of small pages in 44 us",
        place: |costs| &mut costs.deregister_page,
    },
    Cost {
        name: "hit",
        source: "userfaultfd's check, 0.3 us, and the look-up; 0.01 with eBPF",
        place: |costs| &mut costs.hit,
    },
    Cost {
        name: "copy-page",
        source: "memory that is in no cache, at 8 GiB/s: assumed",
        place: |costs| &mut costs.copy_page,
    },
    Cost {
        name: "fault",
        source: "ODP, reported as 500 times 3.5 us (NP-RDMA, arXiv 2310.11062)",
        place: |costs| &mut costs.fault,
    },
    Cost { name: "wire-page", source: "100 Gbit/s", place: |costs| &mut costs.wire_page },
    Cost { name: "latency", source: "assumed", place: |costs| &mut costs.latency },
    Cost {
        name: "stop",
        source: "a system call that modifies a queue pair: assumed",
        place: |costs| &mut costs.stop,
    },
    Cost { name: "restart", source: "as stop: assumed", place: |costs| &mut costs.restart },
];

impl Default for CallCosts {
    fn default() -> Self {
        Self {
            register: 450_000,
            register_page: 37_000,
            deregister: 50_000,
            deregister_page: 10_700,
            hit: 310_000,
            copy_page: 477_000,
            fault: 1_750_000_000,
            wire_page: 327_680,
            latency: 5_000_000,
            stop: 10_000_000,
            restart: 10_000_000,
        }
    }
}

listed! {
    /// How a program makes buffers usable for its device.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum ScalePolicy {
        /// Registered for each use.
        PerUse => "per use",
        /// Copied into a registered buffer that each peer has for itself.
        CopyPerPeer => "copy, per peer",
        /// Copied into one of as many registered buffers as may be in flight, shared by all peers.
        CopyShared => "copy, shared",
        /// Kept registered, without a bound.
        Cached => "cached",
        /// Kept registered within the budget, by eviction.
        CachedInBudget => "cached in budget",
        /// Registered once and paged on demand.
        OnDemand => "on demand",
    }
}

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scenario {
    /// How many peers, each with one connection.
    pub peers: usize,
    /// Of how many pages a message is, 1 to 512.
    pub pages: usize,
    /// How many buffers the program has for each peer.
    pub buffers: usize,
    /// The bytes that may be pinned.
    pub budget: usize,
    /// How many messages may be in flight.
    pub window: usize,
    /// Of 100 peers, how many are hot.
    pub hot: usize,
    /// Of 100 messages, how many go to hot peers.
    pub hot_share: usize,
    /// Of 1000 uses of a buffer, before how many it is freed and allocated anew.
    pub churn: usize,
    /// How many messages.
    pub transfers: usize,
    /// What everything costs.
    pub costs: CallCosts,
    /// From which chance follows.
    pub seed: u64,
}

/// What a policy costs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Row {
    /// The most bytes that were pinned at once.
    pub pinned_bytes: usize,
    /// Registrations made, those before the first message included.
    pub registrations: u64,
    /// Of messages, how many found a registration.
    pub hits: u64,
    /// Registrations given up for room.
    pub evictions: u64,
    /// Page faults of the device.
    pub faults: u64,
    /// Messages that left from pages that were not the program's any more.
    pub stale: u64,
    /// Messages that nothing could be registered for.
    pub refused: u64,
    /// The simulated time of all messages together.
    pub total: Nanos,
    /// The processor's part of it.
    pub busy: Nanos,
    /// From when the program wanted to send until it knew that it had, for the slowest of a
    /// hundred.
    pub slowest_of_hundred: Nanos,
    /// The same on average.
    pub mean: Nanos,
}

/// Runs one policy.
pub fn run(scenario: &Scenario, policy: ScalePolicy) -> Row {
    stream::run(scenario, policy)
}

/// Has the cache suspend one peer's memory `times` times, in the middle of the stream.
pub fn suspend(scenario: &Scenario, stopped: SuspensionStopped, times: usize) -> Suspensions {
    suspension::run(scenario, stopped, times)
}
