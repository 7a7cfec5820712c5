//! What paging on demand costs and saves against pinned pages, registered each time or cached.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the caches' `get`, for registering explicitly and for posting
//! transfers: every block outlives its transfers, each of which is waited for. Soft-RoCE moves the
//! wrong bytes within pages of memory that is on demand; it is used all the same, in whole pages of
//! this file's own memory, and what arrived is compared.

#![allow(unsafe_code)]

use super::Bench;
use crate::block::{Block, Origin};
use crate::medians::{median, times_faster};
use crate::output::Failure;
use pinfold::monitor::Userfaultfd;
use pinfold::registrar::verbs::{
    Device, DeviceError, Domain, Loopback, LoopbackDirection, MemoryRegion, OnDemand, Operations,
    Transfer, Transport, Verbs,
};
use pinfold::tier::OnDemandOrPinned;
use pinfold::{Access, AddressRange, Config, Registrar};
use serde_json::json;
use std::sync::Arc;
use std::time::Instant;

type Tiers = OnDemandOrPinned<Arc<Userfaultfd>>;

/// How the memory of a transfer gets its registration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    EachTime,
    Cached,
    OnDemand,
    Prefetched,
}

impl Way {
    /// The first is what the others are compared with.
    const ALL: [Self; 4] = [Self::Cached, Self::EachTime, Self::OnDemand, Self::Prefetched];

    const fn name(self) -> &'static str {
        match self {
            Self::EachTime => "pinned, each time",
            Self::Cached => "pinned, cached",
            Self::OnDemand => "on demand",
            Self::Prefetched => "on demand, prefetched",
        }
    }
}

/// What the program does between two transfers.
#[derive(Clone, Copy)]
enum Between {
    Nothing,
    /// The pages are exchanged for others, written again.
    Exchange,
}

const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// How many transfers a turn has.
const TURN: u32 = 8;

/// Microseconds of a transfer, with the exchange before it if there is one, by [`Way`] and size; the ratios
/// are to what is pinned and cached.
pub(super) fn measure(rounds: u32) -> Result<Vec<Bench>, Failure> {
    let rig = Rig::new()?;
    let ways = rig.ways()?;
    let mut benches = Vec::new();
    for bytes in SIZES {
        for between in [Between::Nothing, Between::Exchange] {
            benches.extend(rig.compare(&ways, bytes, between, rounds)?);
        }
    }
    Ok(benches)
}

struct Rig {
    // In the order in which they must go.
    loopback: Loopback,
    tiers: Tiers,
    by_hand: Verbs,
    far: MemoryRegion,
    far_block: Block,
    /// Whether a device was taken that failed the test of its bytes.
    untested: bool,
}

impl Rig {
    fn new() -> Result<Self, Failure> {
        let device = Device::open(None).map_err(Failure::unavailable)?;
        let domain = Domain::new(device).map_err(Failure::unavailable)?;
        let (on_demand, untested) = on_demand(&domain)?;
        let verbs = || Verbs::new(Arc::clone(&domain)).map_err(Failure::unavailable);
        let (by_hand, pinned) = (verbs()?, verbs()?);
        let monitor = Userfaultfd::shared().map_err(Failure::unavailable)?;
        let tiers = Tiers::of(Ok(on_demand), pinned, monitor, Config::keeping_all());
        let far_block =
            Block::new(Origin::Mapping, SIZES[SIZES.len() - 1]).map_err(Failure::unavailable)?;
        // SAFETY: this rig's own memory, which outlives the registration.
        let far = unsafe { by_hand.register(range_of(&far_block)?, REMOTE) };
        Ok(Self {
            loopback: Loopback::new(domain).map_err(Failure::unavailable)?,
            tiers: tiers.map_err(Failure::unavailable)?,
            by_hand,
            far: far.map_err(Failure::unavailable)?,
            far_block,
            untested,
        })
    }

    /// Those that can be had: not every device and library prefetches.
    fn ways(&self) -> Result<Vec<Way>, Failure> {
        let block = Block::new(Origin::Mapping, SIZES[0]).map_err(Failure::unavailable)?;
        let prefetches = self.send(Way::Prefetched, &block).is_ok();
        Ok(Way::ALL.into_iter().filter(|way| prefetches || *way != Way::Prefetched).collect())
    }

    fn compare(
        &self,
        ways: &[Way],
        bytes: usize,
        between: Between,
        rounds: u32,
    ) -> Result<Vec<Bench>, Failure> {
        let mut block = Block::new(Origin::Mapping, bytes).map_err(Failure::unavailable)?;
        let mut times = vec![Vec::new(); ways.len()];
        let mut wrong = vec![0_u32; ways.len()];
        for round in 0..rounds as usize {
            // Each round begins with another one.
            for turn in 0..ways.len() {
                let which = (round + turn) % ways.len();
                let (microseconds, missed) = self.turn(ways[which], &mut block, between)?;
                times[which].push(microseconds);
                wrong[which] += missed;
            }
        }
        let bench = |which: usize| Bench {
            name: "on_demand",
            params: json!({
                "bytes": bytes,
                "way": ways[which].name(),
                "pages": match between {
                    Between::Nothing => "unchanged",
                    Between::Exchange => "exchanged",
                },
                "wrong": wrong[which],
                "tested": !self.untested,
            }),
            value: median(times[which].clone()),
            unit: "us",
            ratio: Some(times_faster(&times[which], &times[0])),
        };
        Ok((0..ways.len()).map(bench).collect())
    }

    /// Microseconds of a transfer, and how many arrived wrong.
    fn turn(&self, way: Way, block: &mut Block, between: Between) -> Result<(f64, u32), Failure> {
        let (mut seconds, mut wrong) = (0.0, 0);
        // The first is not counted: it registers, and faults, whatever the way.
        for count in 0..=TURN {
            let begun = Instant::now();
            if matches!(between, Between::Exchange) {
                block.map_over().map_err(Failure::unavailable)?;
            }
            let exchanged = begun.elapsed();
            let content = vec![count.to_le_bytes()[0] + 1; block.length()];
            block.write(0, &content);
            let begun = Instant::now();
            self.send(way, block)?;
            let took = exchanged + begun.elapsed();
            seconds += if count == 0 { 0.0 } else { took.as_secs_f64() };
            wrong += u32::from(self.arrived(block.length()) != content);
        }
        Ok((seconds * 1e6 / f64::from(TURN), wrong))
    }

    fn send(&self, way: Way, block: &Block) -> Result<(), Failure> {
        let range = range_of(block)?;
        let (start, length) = (std::ptr::with_exposed_provenance(range.start()), range.len());
        match way {
            Way::EachTime => {
                // SAFETY: the block outlives the transfer, which is waited for.
                let region = unsafe { self.by_hand.register(range, Access::READ) };
                let region = region.map_err(Failure::unavailable)?;
                self.write(range, region)?;
                // SAFETY: registered above, and the transfer has ended.
                unsafe { self.by_hand.deregister(region, range) }.map_err(Failure::unavailable)
            }
            Way::Cached => {
                // SAFETY: as above.
                let lease = unsafe { self.tiers.pinned().get(start, length, Access::READ) };
                self.write(range, lease.map_err(Failure::unavailable)?.handle())
            }
            Way::OnDemand | Way::Prefetched => {
                // SAFETY: as above.
                let lease = unsafe { self.tiers.get(start, length, Access::READ, OPERATIONS) };
                let lease = lease.map_err(Failure::unavailable)?;
                if way == Way::Prefetched {
                    self.tiers.prefetch(&lease, Access::READ).map_err(Failure::unavailable)?;
                }
                self.write(range, lease.handle())
            }
        }
    }

    fn write(&self, range: AddressRange, region: MemoryRegion) -> Result<(), Failure> {
        let transfer = Transfer {
            lkey: region.lkey(),
            address: range.start(),
            length: range.len(),
            rkey: self.far.rkey(),
            remote_address: self.far_block.address(),
        };
        // SAFETY: both ends are this file's own memory.
        unsafe { self.loopback.transfer(LoopbackDirection::Write, &[transfer]) }
            .map_err(Failure::unavailable)
    }

    fn arrived(&self, bytes: usize) -> Vec<u8> {
        let start = std::ptr::with_exposed_provenance::<u8>(self.far_block.address());
        // SAFETY: the far block is mapped and longer; nothing is transferred now, and it is copied at
        // once.
        unsafe { std::slice::from_raw_parts(start, bytes) }.to_vec()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Ok(range) = range_of(&self.far_block) {
            // What is left the registrar gives back.
            // SAFETY: this registered it, and its transfers have ended.
            let _left = unsafe { self.by_hand.deregister(self.far, range) };
        }
    }
}

const OPERATIONS: Operations = Operations::WRITE;
const REMOTE: Access = Access::from_bits(Access::REMOTE_WRITE.bits() | Access::READ_WRITE.bits());

fn range_of(block: &Block) -> Result<AddressRange, Failure> {
    AddressRange::new(block.address(), block.length()).map_err(Failure::unavailable)
}

/// A registrar on demand, and whether it failed the test of its bytes.
fn on_demand(domain: &Arc<Domain>) -> Result<(OnDemand, bool), Failure> {
    match OnDemand::new(Arc::clone(domain), Transport::Rc, OPERATIONS) {
        Ok(registrar) => Ok((registrar, false)),
        Err(DeviceError::WrongBytes { .. }) => {
            // SAFETY: only whole pages of this file's own memory are moved out of it.
            let forced =
                unsafe { OnDemand::untested(Arc::clone(domain), Transport::Rc, OPERATIONS) };
            Ok((forced.map_err(Failure::unavailable)?, true))
        }
        Err(error) => Err(Failure::unavailable(error)),
    }
}
