//! Which pages are huge: some devices pay for the whole of one, however little of it is registered.

use crate::AddressRange;
use crate::descriptor::KnownDescriptor;
use crate::mappings::OpenMaps;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::{Errno, FirstMade, memory, pages};

/// Says it again and again, through descriptors of its own.
#[derive(Debug)]
pub(crate) struct HugePages {
    pages: KnownDescriptor,
    /// Says how long the pages of a mapping of hugetlbfs are: of 1 GiB, for example. Absent before Linux 6.11, and where
    /// it does not matter.
    maps: Option<OpenMaps>,
}

impl HugePages {
    /// `None` where the kernel does not say: no `/proc`, or before Linux 6.7. With `all_sizes`, also of pages that are larger
    /// than those that the kernel makes of small ones.
    pub(crate) fn open(all_sizes: bool) -> Option<Self> {
        let pages = pages::open_pagemap().and_then(KnownDescriptor::new).ok()?;
        let maps = all_sizes.then(OpenMaps::new).and_then(Result::ok);
        let pages = Self { pages, maps };
        let page = page_of(std::ptr::from_ref(&pages).addr())?;
        pages.are_huge(page).ok().map(|_| pages)
    }

    /// `range`, which is to be registered, and the rest of the huge pages in which it begins and ends. Where no page is
    /// there yet, one is made, as registering would: it may be a huge one.
    ///
    /// A system call for each end, or one for both of a range in one small page: some 0.3 µs each. Two more where no page is
    /// there yet, and of huge pages one, or two where all sizes are wanted. A page that is split at the same moment is taken
    /// for huge or not.
    pub(crate) fn around(&self, range: AddressRange) -> AddressRange {
        let first = self.page_at(range.start());
        let start = first.map_or(range.start(), |page| page.start());
        let last = range.end() - 1;
        let last = match first {
            Some(page) if last < page.end() => first,
            None if page_of(last) == page_of(range.start()) => None,
            _ => self.page_at(last),
        };
        let end = last.map_or(range.end(), |page| page.end());
        let widened = AddressRange::between(start, end).unwrap_or(range);
        // A number that stands for another file by now is not believed. To ask that costs as much as the question itself, and
        // most pages are small, so only of an answer that makes a difference.
        if widened == range || self.pages.is_ours() { widened } else { range }
    }

    /// The huge page that `address` is in.
    fn page_at(&self, address: usize) -> Option<AddressRange> {
        if !self.is_huge(address) {
            return None;
        }
        // What the kernel makes of small pages is in a mapping of small ones.
        let own = self.maps.as_ref().and_then(|maps| maps.page_bytes(address));
        let bytes = own.filter(|&own| own > page_bytes()).or_else(huge_page_bytes)?;
        AddressRange::new(address & !(bytes - 1), bytes).ok()
    }

    fn is_huge(&self, address: usize) -> bool {
        let Some(page) = page_of(address) else { return false };
        let known = self.are_huge(page).unwrap_or(Some(false));
        known.unwrap_or_else(|| {
            // Where none can be made, registering fails as well, and names the reason.
            let _ = memory::populate(page, true);
            self.are_huge(page).ok().flatten().unwrap_or(false)
        })
    }

    /// `None` of a page that is not there.
    fn are_huge(&self, page: AddressRange) -> Result<Option<bool>, Errno> {
        pages::is_huge(self.pages.number(), page)
    }
}

fn page_of(address: usize) -> Option<AddressRange> {
    let bytes = page_bytes();
    AddressRange::new(address & !(bytes - 1), bytes).ok()
}

/// The size of a huge page that the kernel makes of small ones, a power of two. `None` where it makes
/// none.
pub(crate) fn huge_page_bytes() -> Option<usize> {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
    static BYTES: FirstMade<Option<usize>> = FirstMade::new();
    let read = || {
        let text = std::fs::read_to_string(FILE).ok()?;
        text.trim().parse().ok().filter(|bytes: &usize| bytes.is_power_of_two())
    };
    *BYTES.get_or_make(|| Box::new(read()))
}
