//! Memory that is never swapped out.
//!
//! # What it costs
//!
//! Lock and unlock together, pages that are there already, on a machine where an empty system call
//! takes 0.21 µs: 5 µs for 4 KiB, 13 µs for 64 KiB, 0.14 ms for 1 MiB. Pages that are not there yet
//! are brought in first. A use that writes costs 6 µs more, for a look into the table of mappings:
//! the kernel locks read-only memory silently.
//!
//! Locking part of a mapping splits it: each registration may add two mappings to the process's
//! table, of which it may have `vm.max_map_count`.
//!
//! # What a registration promises
//!
//! The pages that are mapped in the range when it is registered stay in memory until the last
//! registration that covers them is given back. The kernel's locks do not nest, so the registrar
//! counts. Six things it cannot know:
//!
//! - **Other registrars of this kind.** Each counts its own registrations. Where two have registered the same page,
//!   the first that gives it back unlocks it for both. Use one [`Mlock`] in a process, and share it: an
//!   `Arc<Mlock>` is a registrar, too.
//! - **Other lockers.** The program's own `munlock` undoes the registrar's locks, and the
//!   registrar's `munlock` undoes the program's own, `mlockall` included. Leave ranges that are
//!   registered to the registrar.
//! - **New mappings.** A lock belongs to a mapping, not to an address. What is mapped anew in a
//!   registered range is not locked, until the range is registered again: that locks all of it, also
//!   where an older registration counts still. A cache with a monitor does so on its next `get`.
//! - **Mappings that move or grow.** `mremap`, which `realloc` of a large block is, takes the lock along to
//!   the new address, and locks what the mapping grows by. A cache with a monitor hears of it and gives the
//!   old range back; at the new one the memory stays locked, and counts against the limit, until the
//!   program unlocks or unmaps it. No budget counts it. Buffers that are grown while a cache keeps them
//!   belong to a registrar that pins pages.
//! - **Exchanges.** A target that a landing zone over a cache of this registrar has exchanged is locked from then on,
//!   until the program unlocks or unmaps it, and no budget counts it. The kernel takes the lock from the slot and leaves
//!   it in the count: every exchange adds its bytes to what the process has locked (`VmLck`) for good, unmapped or not
//!   (seen with Linux 6.18). Have data land by copying there, as zones do that are given no crossover.
//! - **Moves.** Locked pages stay in memory, at the same physical address or not: the kernel may
//!   migrate them. `mlock` suits programs that want no page faults from disk, not devices.
//!
//! Locks are not inherited by a forked child; there the registrar refuses to register and unlocks
//! nothing.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare [`Registrar::register`]; its only unsafe block
//! passes that contract on.

#![allow(unsafe_code)]

use super::page_counts::PageCounts;
use crate::fork_mark::{FORKED, ForkMark};
use crate::limits::{Limits, max_map_count};
use crate::mappings;
use pinfold_core::{
    Access, AddressRange, BadAddress, DeregisterError, RegisterError, Registrar, RegistrarLimits,
    Renewed, Suspend, Unsupported,
};
use pinfold_kernel::{Errno, memory, process::page_bytes};
use std::convert::Infallible;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Locks memory by `mlock`, and counts, so that overlapping registrations do not unlock each other.
///
/// Those of another `Mlock` of the process it does not count: two of them unlock each other's pages. Make one, and give
/// every cache and pool an `Arc` of it.
#[derive(Debug)]
pub struct Mlock {
    /// Guards the counts and the list of ranges at work, for the time of a look-up. Never held
    /// across `mlock` or `munlock`.
    pages: Mutex<Pages>,
    /// Some range is no longer at work.
    finished: Condvar,
    fork_mark: ForkMark,
    limits: RegistrarLimits,
}

/// What a registration by [`Mlock`] is known by: the range says it all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct LockedPages;

#[derive(Default, Debug)]
struct Pages {
    counts: PageCounts,
    /// Ranges that a thread is locking or unlocking right now; no two overlap.
    ///
    /// What the kernel does to a page and what the counts say of it must change in the same order.
    /// Otherwise one thread that takes the last registration away (count 1 to 0, then `munlock`) and
    /// another that adds a new one (count 0 to 1, then `mlock`) could end with a count of one and
    /// an unlocked page. So a thread that works on a range waits for those that overlap it, and for none
    /// else; in the kernel, two such calls would wait for each other anyway.
    at_work: Vec<AddressRange>,
}

impl Mlock {
    /// A registrar for this process.
    ///
    /// # Errors
    ///
    /// The kernel is older than 4.14, or has no memory.
    pub fn new() -> io::Result<Self> {
        let fork_mark = ForkMark::new(1)?;
        let page_bytes = page_bytes();
        // Each registration splits a mapping into three at worst.
        let max_regions = max_map_count()
            .map_or(usize::MAX, |count| usize::try_from(count / 2).unwrap_or(usize::MAX));
        let max_region_bytes = usize::MAX / 2 + 1;
        let limits = RegistrarLimits { page_bytes, max_region_bytes, max_regions };
        Ok(Self { pages: Mutex::default(), finished: Condvar::new(), fork_mark, limits })
    }

    fn whole_pages(&self, range: AddressRange) -> AddressRange {
        range.page_aligned(self.limits.page_bytes)
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no thread works on any page of `range`, and begins to.
    fn begin(&self, range: AddressRange) -> AtWork<'_> {
        let mut pages = self.pages();
        while pages.at_work.iter().any(|busy| busy.overlaps(&range)) {
            pages = self.finished.wait(pages).unwrap_or_else(PoisonError::into_inner);
        }
        pages.at_work.push(range);
        AtWork { registrar: self, range }
    }

    fn lock(&self, range: AddressRange) -> Result<(), Errno> {
        let work = self.begin(range);
        let locked = memory::lock(range);
        if locked.is_ok() {
            self.pages().counts.add(range);
        } else {
            // The kernel may have locked a part of it before it failed.
            let not_ours = self.pages().counts.uncovered(range);
            let _ = work.unlock(&not_ours);
        }
        locked
    }

    fn unlock(&self, range: AddressRange) -> Result<(), Errno> {
        let work = self.begin(range);
        let last = self.pages().counts.remove(range);
        work.unlock(&last)
    }

    /// What the kernel's refusal to lock means.
    fn explain(range: AddressRange, access: Access, errno: Errno) -> RegisterError {
        match errno {
            Errno(libc::ENOMEM | libc::EINVAL) => match what_is_wrong(range, access) {
                Some(reason) => RegisterError::BadAddress { range, reason, errno: errno.0 },
                None => no_room(range, errno),
            },
            Errno(libc::EPERM) => {
                RegisterError::PinnedMemoryLimit { limit_bytes: Some(0), errno: errno.0 }
            }
            Errno(errno) => RegisterError::Os { operation: "mlock", errno },
        }
    }
}

/// What the table of mappings has against locking `range`.
fn what_is_wrong(range: AddressRange, access: Access) -> Option<BadAddress> {
    match mappings::diagnose(range, access) {
        // Devices may refuse a kind of mapping; any kind can be locked.
        BadAddress::Unknown | BadAddress::UnsupportedMapping { .. } => None,
        reason => Some(reason),
    }
}

/// The kernel says the same when the limit is reached, when it has no memory itself, when the
/// table of mappings is full, and when a page cannot be had, so ask whether there is a limit to reach. What is locked
/// now does not show that it was not reached: another thread may have unlocked since.
fn no_room(range: AddressRange, Errno(errno): Errno) -> RegisterError {
    let limits = Limits::read();
    let limit = limits.limit_in_force();
    let range = range.page_aligned(limits.page_bytes);
    let wanted = limits.locked_bytes.unwrap_or(0).saturating_add(range.len() as u64);
    if limit.is_none_or(|limit| wanted <= limit) && lacks_a_page(range) {
        return RegisterError::BadAddress { range, reason: BadAddress::Unknown, errno };
    }
    match limit {
        Some(limit) => RegisterError::PinnedMemoryLimit { limit_bytes: Some(limit), errno },
        None => RegisterError::Os { operation: "mlock", errno },
    }
}

/// Whether a touch of `range`, whole pages, raises a signal: behind the end of a file that was truncated, with no huge
/// page left, on memory that has failed; or the kernel makes none there on request (`memfd_secret`). Makes the pages, as locking
/// them would. No before Linux 5.14.
fn lacks_a_page(range: AddressRange) -> bool {
    match memory::populate(range, false) {
        Err(Errno(libc::EFAULT | libc::EHWPOISON)) => true,
        Err(Errno(libc::EINVAL)) => memory::can_populate(),
        _ => false,
    }
}

/// A range that this thread alone locks or unlocks until it drops this.
struct AtWork<'a> {
    registrar: &'a Mlock,
    range: AddressRange,
}

impl AtWork<'_> {
    /// Unlocks parts of the range; the first error, after all have been tried.
    fn unlock(&self, parts: &[AddressRange]) -> Result<(), Errno> {
        debug_assert!(parts.iter().all(|part| self.range.contains(part)));
        parts.iter().map(|&part| unlock_mapped(part)).fold(Ok(()), Result::and)
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.registrar.pages().at_work.retain(|range| *range != self.range);
        self.registrar.finished.notify_all();
    }
}

/// Unlocks what is still mapped of `range`; the rest lost its lock with its mapping.
fn unlock_mapped(range: AddressRange) -> Result<(), Errno> {
    match memory::unlock(range) {
        // Something is not mapped, and there the kernel stopped; or the lock ends in the middle of
        // a mapping, which cannot be split because the table is full.
        Err(Errno(libc::ENOMEM)) => unlock_each(range),
        done => done,
    }
}

fn unlock_each(range: AddressRange) -> Result<(), Errno> {
    let mappings = mappings::mappings_in(range).map_err(|_| Errno(libc::ENOMEM))?;
    let parts: Vec<_> = mappings.iter().filter_map(|m| m.range.intersection(&range)).collect();
    if parts == [range] {
        return Err(Errno(libc::ENOMEM));
    }
    // Each part is smaller than the range, so this ends.
    parts.into_iter().map(unlock_mapped).fold(Ok(()), Result::and)
}

// SAFETY: no device gets at the memory: a registration locks pages, and counts who else has locked them.
unsafe impl Registrar for Mlock {
    type Handle = LockedPages;

    fn limits(&self) -> RegistrarLimits {
        self.limits
    }

    /// `RLIMIT_MEMLOCK`, where the kernel applies it to this process.
    fn pinned_limit(&self) -> Option<usize> {
        crate::limits::pinned_limit()
    }

    unsafe fn register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<LockedPages, RegisterError> {
        if self.fork_mark.forked() {
            return Err(RegisterError::DeviceGone { errno: FORKED });
        }
        if access.is_remote() {
            return Err(RegisterError::UnsupportedAccess { access });
        }
        check_writable(range, access)?;
        match self.lock(self.whole_pages(range)) {
            Ok(()) => Ok(LockedPages),
            Err(errno) => Err(Self::explain(range, access, errno)),
        }
    }

    unsafe fn deregister(
        &self,
        _: LockedPages,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        if self.fork_mark.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        self.unlock(self.whole_pages(range))
            .map_err(|Errno(errno)| DeregisterError::Os { operation: "munlock", errno })
    }
}

/// Locked memory may be moved at any time, so there is nothing to take back: a lock keeps pages in
/// memory, not in their place.
// SAFETY: there is no connection, and no translation that could be used.
unsafe impl Suspend for Mlock {
    // No device uses what is locked.
    pinfold_core::no_connections!();

    fn can_suspend(&self, _range: AddressRange, _none: &[Infallible]) -> Result<(), Unsupported> {
        Ok(())
    }

    /// Locks what is mapped now, and lets the old lock go.
    unsafe fn renew(
        &self,
        handle: LockedPages,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<LockedPages>, RegisterError> {
        // SAFETY: the caller's promise.
        let locked = unsafe { self.register(range, access) };
        // The new lock, if there is one, counts on. What is not mapped any more has no lock.
        // SAFETY: the caller's registration, which this call replaces.
        let _ = unsafe { self.deregister(handle, range) };
        locked.map(|_| Renewed::Same)
    }
}

/// The kernel locks read-only memory as well, so a use that writes is checked here.
fn check_writable(range: AddressRange, access: Access) -> Result<(), RegisterError> {
    if !access.writes() {
        return Ok(());
    }
    match what_is_wrong(range, access) {
        None => Ok(()),
        Some(reason) => Err(RegisterError::BadAddress { range, reason, errno: libc::EACCES }),
    }
}

impl Drop for Mlock {
    /// Unlocks what is still registered, except in a forked child, which inherited no lock.
    fn drop(&mut self) {
        if !self.fork_mark.forked() {
            let pages = self.pages.get_mut().unwrap_or_else(PoisonError::into_inner);
            for range in pages.counts.drain() {
                // What cannot be unlocked any more is not mapped any more.
                let _ = unlock_mapped(range);
            }
        }
    }
}
