//! A region that keeps only what it needs.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to discard memory on its owner's word.

#![allow(unsafe_code)]

use super::collapse::Obstacle;
use super::pages::ResidentPages;
use super::{RearrangeError, check};
use crate::{AddressRange, MappingKind, mappings};
use pinfold_core::{Monitor, Suspend, Suspended};
use pinfold_kernel::{Errno, memory, process::page_bytes};
use std::time::{Duration, Instant};

/// What became of memory that is not needed any more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trimmed {
    /// What the suspended region was made of; `None` where the kernel does not tell.
    pub before: Option<ResidentPages>,
    /// What it is made of now.
    pub after: Option<ResidentPages>,
    /// Bytes whose pages were given up. They stay mapped and read as zero. Pages that are pinned
    /// elsewhere are freed when that pin ends.
    pub given_up: usize,
    /// What stays because a lease that was handed over has it registered: to resume is to bring
    /// the pages back. End that lease, and have one of what is needed.
    pub held: Vec<AddressRange>,
    /// What was left for another reason.
    pub left: Vec<(AddressRange, Obstacle)>,
    /// How long it took, looking included.
    pub elapsed: Duration,
}

/// Gives up the pages of `unneeded`, a part of a suspended region, in so far as it is whole pages of
/// private memory. The rest of the region keeps its pages and its registrations.
///
/// What leases that were handed over have registered keeps its pages
/// ([`Trimmed::held`]), because a handle that others know has one length. Huge pages that are given
/// up in part are split.
///
/// # Errors
///
/// [`RearrangeError`]; nothing was given up.
///
/// # Safety
///
/// No code needs the content of `unneeded` any more, nor relies on it.
pub unsafe fn trim<R: Suspend, M: Monitor>(
    suspended: &Suspended<'_, R, M>,
    unneeded: AddressRange,
) -> Result<Trimmed, RearrangeError> {
    check(suspended)?;
    let (begun, range) = (Instant::now(), suspended.range());
    if !range.contains(&unneeded) {
        return Err(RearrangeError::Outside { range: unneeded, suspended: range });
    }
    let registered: Vec<_> = suspended.registered().collect();
    let held = registered.iter().filter_map(|it| it.intersection(&unneeded)).collect();
    let mut report = Trimmed {
        before: ResidentPages::of(range),
        after: None,
        given_up: 0,
        held,
        left: Vec::new(),
        elapsed: Duration::ZERO,
    };
    for part in free_parts(unneeded, &registered) {
        // SAFETY: the caller's word.
        unsafe { report.give_up(part) };
    }
    report.after = ResidentPages::of(range);
    report.elapsed = begun.elapsed();
    Ok(report)
}

/// The whole pages of `unneeded` that nothing in `registered` touches.
fn free_parts(unneeded: AddressRange, registered: &[AddressRange]) -> Vec<AddressRange> {
    let page = page_bytes();
    let start = unneeded.start().next_multiple_of(page);
    let whole = AddressRange::between(start, unneeded.end() / page * page);
    let mut parts: Vec<AddressRange> = whole.into_iter().collect();
    for taken in registered.iter().map(|range| range.page_aligned(page)) {
        let without = |part: AddressRange| {
            let before = AddressRange::between(part.start(), part.end().min(taken.start()));
            let behind = AddressRange::between(part.start().max(taken.end()), part.end());
            before.into_iter().chain(behind)
        };
        parts = parts.into_iter().flat_map(without).collect();
    }
    parts
}

impl Trimmed {
    /// # Safety
    ///
    /// As for [`trim`].
    unsafe fn give_up(&mut self, part: AddressRange) {
        let mappings = mappings::mappings_in(part).unwrap_or_default();
        let mapped: usize = mappings
            .iter()
            .filter_map(|it| it.range.intersection(&part))
            .map(|inside| inside.len())
            .sum();
        if mapped < part.len() {
            return self.left.push((part, Obstacle::Unmapped));
        }
        for mapping in mappings {
            let Some(inside) = mapping.range.intersection(&part) else { continue };
            if mapping.kind != MappingKind::PrivateAnonymous {
                self.left.push((inside, Obstacle::OtherKind));
                continue;
            }
            // SAFETY: the caller's word; the mapping is private and anonymous.
            match unsafe { memory::discard(inside) } {
                Ok(()) => self.given_up += inside.len(),
                // Locked by the program, or by the mlock registrar.
                Err(Errno(libc::EINVAL)) => self.left.push((inside, Obstacle::Pinned)),
                Err(Errno(errno)) => {
                    self.left.push((inside, Obstacle::Os { operation: "madvise", errno }));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_registered_is_kept_and_so_are_pages_in_part() {
        let page = page_bytes();
        let range =
            |first: usize, end: usize| AddressRange::between(first * page, end * page).unwrap();
        let unneeded = AddressRange::between(16 * page + 1, 32 * page - 1).unwrap();
        assert_eq!(free_parts(unneeded, &[]), [range(17, 31)]);
        let parts = free_parts(unneeded, &[range(1, 18), range(20, 21), range(30, 40)]);
        assert_eq!(parts, [range(18, 20), range(21, 30)]);
        assert_eq!(free_parts(range(1, 2), &[range(1, 2)]), []);
    }
}
