//! The safe methods: buffers that own their memory go in, and come back out, whole.

#![cfg(not(shuttle))]
#![allow(clippy::unwrap_used)] // a test speaks

mod common;

use common::{Rig, Setup};
use pinfold_core::{AddressRange, GetError, RangeError, StableBuffer};
use pinfold_sim::{DeviceConfig, PAGE_BYTES, Protection};
use std::sync::Arc;

/// Tells the simulated space of a real buffer's pages.
fn map(rig: &Rig, bytes: &[u8], protection: Protection) -> AddressRange {
    let range = AddressRange::new(bytes.as_ptr().addr(), bytes.len()).unwrap();
    rig.space.map(range.page_aligned(PAGE_BYTES), protection);
    range
}

#[test]
fn a_buffer_comes_back_as_it_went_in() {
    let rig = Rig::new();
    let buffer = vec![7_u8; 3 * PAGE_BYTES].into_boxed_slice();
    let range = map(&rig, &buffer, Protection::ReadWrite);
    let lease = rig.cache().lease_buffer(buffer).unwrap();
    assert_eq!(lease.range(), Some(range));
    assert!(lease.leases().iter().all(|lease| rig.is_registered(lease.handle())));
    let buffer = lease.into_inner();
    assert_eq!((buffer.as_ptr().addr(), buffer.len()), (range.start(), range.len()));
    assert!(buffer.iter().all(|&byte| byte == 7));
    drop(rig.cache().lease_buffer(buffer).unwrap());
    assert_eq!(rig.statistics().registrations, 1);
}

#[test]
fn a_long_buffer_is_leased_in_pieces() {
    let device = DeviceConfig { max_region_bytes: 2 << 20, ..DeviceConfig::default() };
    let rig = Setup { device, ..Setup::default() }.rig();
    let piece = rig.cache().config().piece_bytes;
    let buffer = vec![0_u8; 2 * piece + 1];
    let range = map(&rig, &buffer, Protection::ReadWrite);
    let lease = rig.cache().lease_buffer(buffer).unwrap();
    assert_eq!(lease.range(), Some(range));
    assert_eq!(lease.leases().len(), range.pieces(piece).count());
    assert!(lease.leases().windows(2).all(|two| two[0].range().end() == two[1].range().start()));
}

#[test]
fn what_is_refused_is_given_back() {
    let rig = Rig::new();
    let buffer = vec![1_u8; PAGE_BYTES];
    let address = buffer.as_ptr();
    let refused = rig.cache().lease_buffer(buffer).unwrap_err();
    assert!(matches!(refused.error, GetError::Register(_)), "nothing is mapped there");
    assert_eq!(refused.buffer.as_ptr(), address);
    let empty = rig.cache().lease_buffer(Vec::new()).unwrap_err();
    assert!(matches!(empty.error, GetError::Range(RangeError::Empty { .. })));
}

#[test]
fn a_shared_buffer_may_be_read_and_not_written() {
    let rig = Rig::new();
    let shared: Arc<[u8]> = vec![3_u8; PAGE_BYTES].into();
    // Read-only memory: a registration that let the device write would fail.
    map(&rig, &shared, Protection::ReadOnly);
    let leases = [(); 2].map(|()| rig.cache().lease_buffer(Arc::clone(&shared)).unwrap());
    assert_eq!(rig.statistics().registrations, 1);
    assert!(!<Arc<[u8]> as StableBuffer>::ACCESS.writes());
    drop(leases);
}
