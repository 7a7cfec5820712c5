//! Which addresses are asked for, and in which order.

use pinfold::AddressRange;

/// The length of a region: 64 KiB.
pub(crate) const LENGTH: usize = 64 << 10;

/// Where regions begin; nothing is mapped there and nothing looks.
const BASE: u64 = 0x1000_0000_0000;

/// `count` addresses, `stride` bytes apart.
pub(crate) fn addresses(count: usize, stride: u64) -> Vec<u64> {
    (BASE..).step_by(usize::try_from(stride).unwrap_or(usize::MAX)).take(count).collect()
}

/// `count` adjacent regions.
pub(crate) fn adjacent(count: usize) -> Vec<u64> {
    addresses(count, LENGTH as u64)
}

/// `count` regions with gaps of random width between them, none wider than two regions: what an
/// allocator leaves.
pub(crate) fn scattered(count: usize, random: &mut fastrand::Rng) -> Vec<u64> {
    const PAGE: u64 = 4096;
    let widest = 2 * LENGTH as u64 / PAGE;
    let mut end = BASE;
    let mut place = || {
        let start = end + random.u64(..=widest) * PAGE;
        end = start + LENGTH as u64;
        start
    };
    (0..count).map(|_| place()).collect()
}

/// `count` adjacent regions far from those of [`adjacent`].
pub(crate) fn elsewhere(count: usize) -> Vec<u64> {
    adjacent(count).iter().map(|address| address + (1 << 44)).collect()
}

/// `count` of `addresses` in random order.
pub(crate) fn random_order(
    addresses: &[u64],
    count: usize,
    random: &mut fastrand::Rng,
) -> Vec<u64> {
    (0..count).map(|_| addresses[random.usize(..addresses.len())]).collect()
}

/// The bytes of a region.
pub(crate) fn range(address: u64) -> Result<AddressRange, String> {
    let start = usize::try_from(address).map_err(|error| error.to_string())?;
    AddressRange::new(start, LENGTH).map_err(|error| error.to_string())
}
