//! A device that counts whole blocks is asked for whole blocks, and for less where it, or the budget, has no
//! more.

#![allow(unsafe_code)] // a device that touches no memory
#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

use pinfold_core::{
    Access, AddressRange, BadAddress, Cache, Change, Config, Cover, DeregisterError, GetError,
    Lease, Lost, MappingKind, Monitor, Position, RegisterError, Registrar, RegistrarLimits, Replay,
    Sequence, Watch, WhenFull,
};
use std::sync::Mutex;

const PAGE: usize = 4096;
const BLOCK: usize = 512 * PAGE;
const START: usize = 0x7000_0000;

/// Counts whole blocks, and has as much room as it says.
struct Device {
    /// It pins no more than so much at once.
    room: usize,
    /// Nothing is mapped from here on.
    mapped_to: usize,
    held: Mutex<Vec<AddressRange>>,
}

impl Device {
    fn new() -> Self {
        Self { room: usize::MAX, mapped_to: usize::MAX, held: Mutex::default() }
    }
}

impl Registrar for Device {
    type Handle = u32;

    fn limits(&self) -> RegistrarLimits {
        RegistrarLimits { page_bytes: PAGE, max_region_bytes: 1 << 30, max_regions: 1 << 20 }
    }

    fn widened(&self, range: AddressRange) -> AddressRange {
        range.page_aligned(BLOCK)
    }

    unsafe fn register(&self, range: AddressRange, _: Access) -> Result<u32, RegisterError> {
        let mut held = self.held.lock().unwrap();
        if range.end() > self.mapped_to {
            let reason = BadAddress::Unmapped { at: self.mapped_to };
            return Err(RegisterError::BadAddress { range, reason, errno: 14 });
        }
        if held.iter().map(AddressRange::len).sum::<usize>() + range.len() > self.room {
            return Err(RegisterError::TableFull { capacity: 1 });
        }
        held.push(range);
        Ok(0)
    }

    unsafe fn deregister(&self, _: u32, range: AddressRange) -> Result<(), DeregisterError> {
        let mut held = self.held.lock().unwrap();
        let place = held.iter().position(|other| *other == range).unwrap();
        held.swap_remove(place);
        Ok(())
    }
}

/// Nothing ever changes.
struct Calm;

// SAFETY: the simulated memory does not change.
unsafe impl Monitor for Calm {
    fn name(&self) -> &'static str {
        "calm"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(2))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn in_flux(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(2), complete: true }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Seen
    }

    fn forked(&self) -> bool {
        false
    }

    fn bell(&self) -> u32 {
        0
    }

    fn ring(&self) {}

    fn wait(&self, _: u32) {}
}

type TheCache = Cache<Device, Calm>;

fn get(cache: &TheCache, page: usize) -> Result<Lease<'_, Device, Calm>, GetError> {
    let start = std::ptr::without_provenance(START + page * PAGE);
    // SAFETY: the device touches no memory.
    unsafe { cache.get(start, 100, Access::READ) }
}

/// How long the registration is that a get is served from.
fn registered(cache: &TheCache, page: usize) -> usize {
    get(cache, page).unwrap().registered().len()
}

#[test]
fn a_block_is_registered_once_for_all_of_it() {
    let cache = Cache::new(Device::new(), Calm, Config::default()).unwrap();
    assert_eq!((registered(&cache, 3), registered(&cache, 500)), (BLOCK, BLOCK));
    assert_eq!(
        (cache.statistics().registrations, cache.statistics().pinned_bytes),
        (1, BLOCK as u64)
    );
}

/// The rest of the block may have been unmapped since the registrar was asked.
#[test]
fn what_was_not_asked_for_fails_nobody() {
    let device = Device { mapped_to: START + 4 * PAGE, ..Device::new() };
    let cache = Cache::new(device, Calm, Config::default()).unwrap();
    assert_eq!(registered(&cache, 3), PAGE);
    let error = get(&cache, 4).map(|lease| lease.range()).unwrap_err();
    assert!(matches!(error, GetError::Register(RegisterError::BadAddress { .. })), "{error}");
}

#[test]
fn a_device_without_room_for_a_block_is_asked_for_less() {
    let cache = Cache::new(Device { room: BLOCK / 2, ..Device::new() }, Calm, Config::default());
    let cache = cache.unwrap();
    assert_eq!((registered(&cache, 3), registered(&cache, 5)), (PAGE, PAGE));
}

#[test]
fn a_budget_without_room_for_a_block_holds_less() {
    for when_full in [WhenFull::Refuse, WhenFull::RegisterPerUse] {
        let config = Config { max_bytes: 2 * PAGE, when_full, ..Config::default() };
        let cache = Cache::new(Device::new(), Calm, config).unwrap();
        let lease = get(&cache, 3).unwrap();
        assert!(lease.is_cached(), "within the budget");
        assert_eq!((lease.registered().len(), registered(&cache, 5)), (PAGE, PAGE));
    }
}

/// Room is made for a block before less is made do with.
#[test]
fn a_block_takes_the_place_of_what_is_idle() {
    let config = Config { max_bytes: BLOCK, ..Config::default() };
    let cache = Cache::new(Device::new(), Calm, config).unwrap();
    assert_eq!((registered(&cache, 3), registered(&cache, 512)), (BLOCK, BLOCK));
    let lease = get(&cache, 512).unwrap();
    let refused = get(&cache, 3).map(|lease| lease.range()).unwrap_err();
    assert!(matches!(refused, GetError::Exhausted(_)), "{refused}");
    drop(lease);
}
