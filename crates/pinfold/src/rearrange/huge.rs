//! A region in huge pages.

use super::beside::{Beside, HugePageWay, Kind};
use super::collapse::{Obstacle, collapse};
use super::pages::{Look, ResidentPages};
use super::{RearrangeError, accessible_parts, check};
use crate::huge_pages::huge_page_bytes;
use crate::{AddressRange, MappingKind, mappings};
use pinfold_core::{Monitor, Suspend, Suspended};
use pinfold_kernel::memory;
use std::time::{Duration, Instant};

/// What became of a region that was to be huge.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Defragmented {
    /// What the region was made of; `None` where the kernel does not tell.
    pub before: Option<ResidentPages>,
    /// What it is made of now.
    pub after: Option<ResidentPages>,
    /// Bytes that were put into huge pages.
    pub made: usize,
    /// Bytes that were in huge pages already.
    pub already: usize,
    /// What was left as it is, and why, in order of address.
    pub left: Vec<(AddressRange, Obstacle)>,
    /// How long it took, looking included.
    pub elapsed: Duration,
}

impl Defragmented {
    pub(super) fn note(&mut self, block: AddressRange, outcome: Result<(), Obstacle>) {
        match outcome {
            Ok(()) => self.made += block.len(),
            Err(why) => self.left.push((block, why)),
        }
    }
}

/// Puts a suspended region into huge pages, as far as it goes.
///
/// What does not fill a huge page, or cannot be made huge, stays as it is and is told
/// ([`Defragmented::left`]): that is no error. Each is told by itself, so a range of terabytes makes a long list.
///
/// A block without a page gets one where the kernel builds the huge page in place: in a large reservation that is
/// accessible and mostly untouched, name the parts that are in use, or it fills memory.
///
/// # Errors
///
/// [`RearrangeError`] if nothing could be tried, or the suspension has ended meanwhile.
pub fn defragment<R: Suspend, M: Monitor>(
    suspended: &Suspended<'_, R, M>,
    way: HugePageWay,
) -> Result<Defragmented, RearrangeError> {
    check(suspended)?;
    let begun = Instant::now();
    let (mut plan, mut report) = Plan::new(suspended.range(), way)?;
    for block in plan.take_blocks() {
        check(suspended)?;
        if plan.is_to_be_made(block, &mut report) {
            report.note(block, plan.tool.make_huge(block));
        }
    }
    report.left.sort_by_key(|(range, _)| range.start());
    report.after = ResidentPages::of(suspended.range());
    report.elapsed = begun.elapsed();
    Ok(report)
}

/// The size of a huge page that the kernel makes of small ones.
///
/// # Errors
///
/// [`RearrangeError::Unsupported`] where it makes none.
fn huge_bytes() -> Result<usize, RearrangeError> {
    let what = "transparent huge pages (or /sys is not mounted)";
    huge_page_bytes().ok_or(RearrangeError::Unsupported { what, errno: 0 })
}

/// What is to be done for a region, found out beforehand.
pub(super) struct Plan {
    /// What has something mapped, to the ends of its blocks.
    parts: Vec<AddressRange>,
    /// Of a block.
    bytes: usize,
    look: Option<Look>,
    pub(super) tool: Tool,
}

impl Plan {
    pub(super) fn new(
        range: AddressRange,
        way: HugePageWay,
    ) -> Result<(Self, Defragmented), RearrangeError> {
        let bytes = huge_bytes()?;
        let mut report =
            Defragmented { before: ResidentPages::of(range), ..Defragmented::default() };
        let (parts, gaps) = cut(range, bytes, &accessible_parts(range)?);
        report.left.extend(gaps.into_iter().map(|gap| (gap, Obstacle::Unmapped)));
        let first = parts.first().and_then(|part| part.pieces(bytes).next());
        let look = first.map(|first| Look::new(range, first));
        let tool = Tool::new(range, bytes, way)?;
        Ok((Self { parts, bytes, look, tool }, report))
    }

    /// All blocks, once: there may be more of them than there is memory for a list.
    pub(super) fn take_blocks(&mut self) -> impl Iterator<Item = AddressRange> + use<> {
        let (parts, bytes) = (std::mem::take(&mut self.parts), self.bytes);
        parts.into_iter().flat_map(move |part| part.pieces(bytes))
    }

    /// Whether the block is whole and small; what is not is noted.
    pub(super) fn is_to_be_made(&self, block: AddressRange, report: &mut Defragmented) -> bool {
        if block.len() < self.bytes {
            report.left.push((block, Obstacle::Partial));
            return false;
        }
        let is_huge = self.look.as_ref().is_some_and(|look| look.is_huge(block));
        report.already += if is_huge { block.len() } else { 0 };
        !is_huge
    }
}

/// The parts of `range` that consist of blocks of which anything is mapped, and what is between them: a range may
/// be far longer than what there is of it.
fn cut(
    range: AddressRange,
    bytes: usize,
    mapped: &[AddressRange],
) -> (Vec<AddressRange>, Vec<AddressRange>) {
    let (mut parts, mut gaps, mut next) = (Vec::new(), Vec::new(), range.start());
    for part in mapped {
        let start = (part.start() / bytes * bytes).max(next);
        let end = part.end().checked_next_multiple_of(bytes).unwrap_or(usize::MAX).min(range.end());
        gaps.extend(AddressRange::between(next, start));
        if let Some(part) = AddressRange::between(start, end) {
            parts.push(part);
            next = end;
        }
    }
    gaps.extend(AddressRange::between(next, range.end()));
    (parts, gaps)
}

/// What makes blocks huge.
pub(super) enum Tool {
    InPlace {
        /// The mappings are plain private memory, whose missing pages may be made.
        private: bool,
    },
    ByCopy(Beside),
}

impl Tool {
    fn new(range: AddressRange, bytes: usize, way: HugePageWay) -> Result<Self, RearrangeError> {
        match way.0 {
            Kind::ByCopy(word) => Beside::new(range, bytes, word).map(Self::ByCopy),
            Kind::InPlace if memory::can_collapse() => {
                Ok(Self::InPlace { private: is_private(range) })
            }
            Kind::InPlace => Err(RearrangeError::Unsupported {
                what: "MADV_COLLAPSE (Linux 6.1; copying works without, see HugePageWay::by_copy)",
                errno: libc::EINVAL,
            }),
        }
    }

    fn make_huge(&mut self, block: AddressRange) -> Result<(), Obstacle> {
        self.prepare(block)?;
        self.switch(block)
    }

    /// What can be done before the block is suspended.
    pub(super) fn prepare(&mut self, block: AddressRange) -> Result<(), Obstacle> {
        match self {
            Self::InPlace { .. } => Ok(()),
            Self::ByCopy(beside) => beside.prepare(block),
        }
    }

    /// What has to wait until it is.
    pub(super) fn switch(&mut self, block: AddressRange) -> Result<(), Obstacle> {
        match self {
            Self::InPlace { private } => collapse(block, *private),
            Self::ByCopy(beside) => beside.switch(block),
        }
    }
}

fn is_private(range: AddressRange) -> bool {
    let plain = |mapping: &mappings::Mapping| mapping.kind == MappingKind::PrivateAnonymous;
    mappings::mappings_in(range).is_ok_and(|mappings| mappings.iter().all(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> AddressRange {
        AddressRange::between(start, end).unwrap()
    }

    #[test]
    fn blocks_are_those_with_something_mapped() {
        let mapped = [range(0x1800, 0x1a00), range(0x1a00, 0x3100), range(0x8000, 0x9000)];
        let (parts, gaps) = cut(range(0x1400, 0xc000), 0x1000, &mapped);
        let blocks = [(0x1400, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000), (0x8000, 0x9000)];
        let pieces: Vec<_> = parts.iter().flat_map(|part| part.pieces(0x1000)).collect();
        assert_eq!(pieces, blocks.map(|(start, end)| range(start, end)));
        assert_eq!(gaps, [range(0x4000, 0x8000), range(0x9000, 0xc000)]);
    }

    #[test]
    fn the_whole_address_space_is_as_long_as_what_is_mapped() {
        let everything = AddressRange::EVERYTHING;
        let (start, end) = (everything.start(), everything.end());
        let first = range(start.max(4096), 8192);
        let (parts, gaps) = cut(everything, 2 << 20, &[first, range(end - 10, end)]);
        assert_eq!((parts.len(), gaps.len()), (2, 1));
        let all: usize = parts.iter().chain(&gaps).map(AddressRange::len).sum();
        assert_eq!(all, everything.len());
    }
}
