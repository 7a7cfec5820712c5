//! Single pages that a userfaultfd watches: the monitor's own, and those of its tests.

use super::start::StartError;
use crate::AddressRange;
use pinfold_kernel::{mapping::AtomicPage, userfaultfd};
use std::os::fd::BorrowedFd;

/// The watch of a page while no thread reads the events: a thread that unmapped the page would wait
/// for ever, so the watch ends first. The page is [walled](AtomicPage::walled).
pub(super) struct Unread<'p> {
    uffd: BorrowedFd<'p>,
    page: &'p AtomicPage,
}

impl<'p> Unread<'p> {
    pub(super) fn watch(uffd: BorrowedFd<'p>, page: &'p AtomicPage) -> Result<Self, StartError> {
        register(uffd, page)?;
        Ok(Self { uffd, page })
    }

    /// From now on there is a reader, and the watch stays.
    pub(super) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unread<'_> {
    fn drop(&mut self) {
        // An error means that the page has been replaced, and the new one is not watched: it is walled, so that nothing need
        // be split, which is refused where the process may have no more mappings.
        let _ = self.page.unregister(self.uffd);
    }
}

/// Has the changes of `page` reported.
pub(super) fn register(uffd: BorrowedFd<'_>, page: &AtomicPage) -> Result<(), StartError> {
    let (start, end) = bounds(page);
    userfaultfd::register(uffd, start, end).map_err(StartError::register)
}

pub(super) fn bounds(page: &AtomicPage) -> (usize, usize) {
    (page.address(), page.address() + page.bytes())
}

pub(super) fn range_of(page: &AtomicPage) -> Option<AddressRange> {
    AddressRange::new(page.address(), page.bytes()).ok()
}
