//! Which pages are huge: some devices pay for the whole of one, however little of it is registered.

use crate::AddressRange;
use crate::descriptor::KnownDescriptor;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::{Errno, FirstMade, memory, pages};

/// Says it again and again, through a descriptor of its own.
#[derive(Debug)]
pub(crate) struct HugePages(KnownDescriptor);

impl HugePages {
    /// `None` where the kernel does not say: no `/proc`, or before Linux 6.7.
    pub(crate) fn open() -> Option<Self> {
        let pages = Self(pages::open_pagemap().and_then(KnownDescriptor::new).ok()?);
        let page = page_of(std::ptr::from_ref(&pages).addr())?;
        pages.are_huge(page).ok().map(|_| pages)
    }

    /// `range`, which is to be registered, and the rest of the huge pages in which it begins and ends. Where no page is
    /// there yet, one is made, as registering would: it may be a huge one.
    ///
    /// Two system calls, or three: some 0.3 µs each. A page that is split at the same moment is taken
    /// for huge or not. Of pages larger than transparent huge pages are, as much is taken as one of
    /// those has.
    pub(crate) fn around(&self, range: AddressRange) -> AddressRange {
        let Some(huge) = huge_page_bytes() else { return range };
        let (first, last) = (range.start() & !(huge - 1), (range.end() - 1) & !(huge - 1));
        let is_whole = range.start() == first && range.end() - last == huge;
        // A number that stands for another file by now is not asked.
        if is_whole || !self.0.is_ours() {
            return range;
        }
        let begins_huge = self.is_huge(range.start());
        let ends_huge = if first == last { begins_huge } else { self.is_huge(range.end() - 1) };
        let start = if begins_huge { first } else { range.start() };
        let end = if ends_huge { last + huge } else { range.end() };
        AddressRange::between(start, end).unwrap_or(range)
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
        pages::is_huge(self.0.number(), page)
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
