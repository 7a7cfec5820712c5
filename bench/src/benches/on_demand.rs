//! What paging on demand costs and saves against pinned pages, registered each time or cached.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the caches' `get`, for registering explicitly, for posting
//! transfers and for exchanging pages: all memory is this file's own and outlives its transfers, each of
//! which is waited for. Soft-RoCE moves the wrong bytes within pages of memory that is on demand; it is used
//! all the same, in whole pages, and what arrived is compared.

#![allow(unsafe_code)]

use crate::Options;
use crate::machine::failed;
use crate::report::Report;
use crate::ring::{AnyMonitor, Memory, Pages, userfaultfd};
use crate::rounds::Comparison;
use pinfold::listed;
use pinfold::registrar::verbs::{
    Device, DeviceError, Domain, Loopback, LoopbackDirection, MemoryRegion, OnDemand, Operations,
    Transfer, Transport, Verbs,
};
use pinfold::tier::OnDemandOrPinned;
use pinfold::{Access, AddressRange, Config, Registrar};
use pinfold_kernel::memory::renew;
use serde_json::json;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

type Tiers = OnDemandOrPinned<AnyMonitor>;

listed! {
    /// How the memory of a transfer gets its registration. The first is what the others are compared with.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Way {
        Cached => "pinned, cached",
        EachTime => "pinned, each time",
        OnDemand => "on demand",
        Prefetched => "on demand, prefetched",
    }
}

/// What the program does between two transfers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Between {
    Nothing,
    /// The pages are exchanged for others, written again.
    Exchange,
}

impl Between {
    /// What is said of the pages in a report.
    const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "unchanged",
            Self::Exchange => "exchanged",
        }
    }
}

const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// How many transfers a turn has.
const TURN: u32 = 8;

/// Microseconds of a transfer, with the exchange before it if there is one, by way and size, compared with what is
/// pinned and cached.
pub(crate) fn run(options: Options, report: &mut Report) -> Result<(), String> {
    let rig = match Rig::new() {
        Ok(rig) => rig,
        Err(why) => {
            report.remark(&format!("skipped: on-demand: {why}"));
            return Ok(());
        }
    };
    let ways = rig.ways()?;
    for bytes in SIZES {
        for between in [Between::Nothing, Between::Exchange] {
            rig.compare(&ways, bytes, between, (options, report))?;
        }
    }
    Ok(())
}

struct Rig {
    // In the order in which they must go.
    loopback: Loopback,
    tiers: Tiers,
    explicit: Verbs,
    far: MemoryRegion,
    far_memory: Memory,
    /// Whether a device was taken that failed the test of its bytes.
    untested: bool,
}

impl Rig {
    fn new() -> Result<Self, String> {
        let device = Device::open(None).map_err(text)?;
        let domain = Domain::new(device).map_err(text)?;
        let (on_demand, untested) = on_demand(&domain)?;
        let verbs = || Verbs::new(Arc::clone(&domain)).map_err(text);
        let (explicit, pinned) = (verbs()?, verbs()?);
        let tiers = Tiers::of(Ok(on_demand), pinned, userfaultfd()?, Config::keeping_all());
        let far_memory = memory(SIZES[SIZES.len() - 1])?;
        // SAFETY: this rig's own memory, which outlives the registration.
        let far = unsafe { explicit.register(far_memory.range(), REMOTE) };
        Ok(Self {
            loopback: Loopback::new(domain).map_err(text)?,
            tiers: tiers.map_err(text)?,
            explicit,
            far: far.map_err(text)?,
            far_memory,
            untested,
        })
    }

    /// Those that can be had: not every device and library prefetches.
    fn ways(&self) -> Result<Vec<Way>, String> {
        let prefetches = self.send(Way::Prefetched, &memory(SIZES[0])?).is_ok();
        Ok(Way::ALL.into_iter().filter(|way| prefetches || *way != Way::Prefetched).collect())
    }

    fn compare(
        &self,
        ways: &[Way],
        bytes: usize,
        between: Between,
        (options, report): (Options, &mut Report),
    ) -> Result<(), String> {
        let mut memory = memory(bytes)?;
        let mut times = vec![Vec::new(); ways.len()];
        let mut wrong = vec![0_u32; ways.len()];
        for round in 0..options.rounds {
            // Each round begins with another one.
            for turn in 0..ways.len() {
                let which = (round + turn) % ways.len();
                let (microseconds, missed) = self.turn(ways[which], &mut memory, between)?;
                times[which].push(microseconds);
                wrong[which] += missed;
            }
        }
        for (which, way) in ways.iter().enumerate() {
            let params = json!({
                "bytes": bytes,
                "way": way.name(),
                "pages": between.name(),
                "wrong": wrong[which],
                "tested": !self.untested,
            });
            // The first is what the others are compared with.
            let peers = if which == 0 { Vec::new() } else { times[0].clone() };
            let comparison = Comparison::of_rounds(times[which].clone(), peers);
            report.add_against(ways[0].name(), "on demand", params, "us", comparison);
        }
        Ok(())
    }

    /// Microseconds of a transfer, and how many arrived wrong.
    fn turn(&self, way: Way, memory: &mut Memory, between: Between) -> Result<(f64, u32), String> {
        let (mut seconds, mut wrong) = (0.0, 0);
        // The first is not counted: it registers, and faults, whatever the way.
        for (count, content) in (0..=TURN).zip(1..) {
            let begun = Instant::now();
            if between == Between::Exchange {
                exchange(memory)?;
            }
            let exchanged = begun.elapsed();
            memory.fill(content);
            let begun = Instant::now();
            self.send(way, memory)?;
            let took = exchanged + begun.elapsed();
            seconds += if count == 0 { 0.0 } else { took.as_secs_f64() };
            wrong += u32::from(!self.has_arrived(memory.range().len(), content));
        }
        Ok((seconds * 1e6 / f64::from(TURN), wrong))
    }

    fn send(&self, way: Way, memory: &Memory) -> Result<(), String> {
        let range = memory.range();
        let (start, length) = (std::ptr::with_exposed_provenance(range.start()), range.len());
        match way {
            Way::EachTime => {
                // SAFETY: the memory outlives the transfer, which is waited for.
                let region = unsafe { self.explicit.register(range, Access::READ) };
                let region = region.map_err(text)?;
                self.write(range, region)?;
                // SAFETY: registered above, and the transfer has ended.
                unsafe { self.explicit.deregister(region, range) }.map_err(text)
            }
            Way::Cached => {
                // SAFETY: as above.
                let lease = unsafe { self.tiers.pinned().get(start, length, Access::READ) };
                self.write(range, lease.map_err(text)?.handle())
            }
            Way::OnDemand | Way::Prefetched => {
                // SAFETY: as above.
                let lease = unsafe { self.tiers.get(start, length, Access::READ, OPERATIONS) };
                let lease = lease.map_err(text)?;
                if way == Way::Prefetched {
                    self.tiers.prefetch(&lease, Access::READ).map_err(text)?;
                }
                self.write(range, lease.handle())
            }
        }
    }

    fn write(&self, range: AddressRange, region: MemoryRegion) -> Result<(), String> {
        let transfer = Transfer {
            lkey: region.lkey(),
            address: range.start(),
            length: range.len(),
            rkey: self.far.rkey(),
            remote_address: self.far_memory.range().start(),
        };
        // SAFETY: both ends are this file's own memory.
        unsafe { self.loopback.transfer(LoopbackDirection::Write, &[transfer]) }.map_err(text)
    }

    fn has_arrived(&self, bytes: usize, content: u8) -> bool {
        self.far_memory.contents().iter().take(bytes).all(|&byte| byte == content)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // What is left the registrar deregisters.
        // SAFETY: this registered it, and its transfers have ended.
        let _left = unsafe { self.explicit.deregister(self.far, self.far_memory.range()) };
    }
}

const OPERATIONS: Operations = Operations::WRITE;
const REMOTE: Access = Access::from_bits(Access::REMOTE_WRITE.bits() | Access::READ_WRITE.bits());

/// New memory whose pages are there.
fn memory(bytes: usize) -> Result<Memory, String> {
    Memory::new(bytes, Pages::Written)
}

/// Exchanges the pages for others, which are not there yet.
fn exchange(memory: &mut Memory) -> Result<(), String> {
    // SAFETY: this file's own memory, from which no code borrows.
    unsafe { renew(memory.range()) }.map_err(|errno| failed("mmap", errno))
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// A registrar on demand, and whether it failed the test of its bytes.
fn on_demand(domain: &Arc<Domain>) -> Result<(OnDemand, bool), String> {
    match OnDemand::new(Arc::clone(domain), Transport::Rc, OPERATIONS) {
        Ok(registrar) => Ok((registrar, false)),
        Err(DeviceError::WrongBytes { .. }) => {
            // SAFETY: only whole pages of this file's own memory are moved out of it.
            let forced =
                unsafe { OnDemand::untested(Arc::clone(domain), Transport::Rc, OPERATIONS) };
            Ok((forced.map_err(text)?, true))
        }
        Err(error) => Err(error.to_string()),
    }
}
