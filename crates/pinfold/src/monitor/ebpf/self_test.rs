//! What a view must show before anything it says is believed: every route of change, on memory of our
//! own, with its exact range, when the changing call has returned.

use super::Ebpf;
use super::error::EbpfError;
use crate::{AddressRange, Monitor, Position, Watch};
use pinfold_kernel::Errno;
use pinfold_kernel::trial::{TrialArea, attach_and_detach, nameless_file, punch, truncate};

/// `MADV_GUARD_INSTALL`, since Linux 6.13.
const GUARD_INSTALL: libc::c_int = 102;

/// How often it is all done again because other threads' entries hid ours.
const TRIES: u32 = 8;

/// Why a change was not found.
enum Fault {
    /// It is not among what was told.
    Missed(EbpfError),
    /// It may be: not everything could be read. A thread that lost its processor in the middle of an
    /// entry does that, and so do thousands of changes at once. That proves nothing.
    Unreadable(EbpfError),
}

impl From<EbpfError> for Fault {
    fn from(error: EbpfError) -> Self {
        Self::Missed(error)
    }
}

/// Changes memory in every way that this machine has.
pub(super) fn of_every_route(monitor: &Ebpf) -> Result<(), EbpfError> {
    for _ in 1..TRIES {
        match every_route(monitor) {
            Ok(()) => return Ok(()),
            Err(Fault::Missed(error)) => return Err(error),
            Err(Fault::Unreadable(_)) => {}
        }
    }
    every_route(monitor).map_err(|fault| match fault {
        Fault::Missed(error) | Fault::Unreadable(error) => error,
    })
}

fn every_route(monitor: &Ebpf) -> Result<(), Fault> {
    unmapping(monitor)?;
    replacing(monitor)?;
    moving(monitor)?;
    advising(monitor)?;
    files(monitor)?;
    segments(monitor)
}

fn area(made: Result<TrialArea, Errno>) -> Result<TrialArea, EbpfError> {
    made.map_err(EbpfError::memory)
}

fn unmapping(monitor: &Ebpf) -> Result<(), Fault> {
    let private = area(TrialArea::private(2))?;
    sees(monitor, "munmap", &[private.range()], || {
        private.unmap();
        true
    })?;
    // Few machines have a huge page to spare.
    let Ok(huge) = TrialArea::huge() else { return Ok(()) };
    let range = [huge.range()];
    sees(monitor, "MADV_DONTNEED of a huge page", &range, || {
        huge.advise(libc::MADV_DONTNEED).is_ok()
    })?;
    sees(monitor, "munmap of a huge page", &range, || {
        huge.unmap();
        true
    })
}

fn replacing(monitor: &Ebpf) -> Result<(), Fault> {
    let old = area(TrialArea::private(2))?;
    let range = [old.range()];
    sees(monitor, "mmap over a mapping", &range, || old.replace().is_ok())
}

fn moving(monitor: &Ebpf) -> Result<(), Fault> {
    let (from, to) = (area(TrialArea::private(2))?, area(TrialArea::private(2))?);
    let both = [from.range(), to.range()];
    sees(monitor, "mremap", &both, || from.move_over(to).is_ok())
}

fn advising(monitor: &Ebpf) -> Result<(), Fault> {
    let mut private = area(TrialArea::private(2))?;
    let range = [private.range()];
    sees(monitor, "MADV_DONTNEED", &range, || private.advise(libc::MADV_DONTNEED).is_ok())?;
    private.touch();
    let before = monitor.place();
    match private.advise(GUARD_INSTALL) {
        Ok(()) => told(monitor, before, "MADV_GUARD_INSTALL", &range),
        // Earlier kernels have none.
        Err(_) => Ok(()),
    }
}

/// By the file, not by the mapping; and by a mapping of the file for all others.
fn files(monitor: &Ebpf) -> Result<(), Fault> {
    let file = nameless_file(4).map_err(EbpfError::memory)?;
    let mut mapped = area(TrialArea::of_file(&file, 4))?;
    let (hole, whole) = ([mapped.pages(1, 1)], [mapped.range()]);
    sees(monitor, "a hole punched into a file", &hole, || punch(&file, 1).is_ok())?;
    mapped.touch();
    sees(monitor, "MADV_REMOVE", &whole, || mapped.advise(libc::MADV_REMOVE).is_ok())?;
    mapped.touch();
    let end = [mapped.pages(2, 2)];
    sees(monitor, "the truncation of a file", &end, || truncate(&file, 2).is_ok())
}

fn segments(monitor: &Ebpf) -> Result<(), Fault> {
    let (mut range, mut before) = (None, monitor.place());
    let detached = attach_and_detach(|attached| {
        monitor.watch(attached);
        range = Some(attached);
        before = monitor.place();
    });
    match detached {
        Ok(()) => told(monitor, before, "shmdt", &[range]),
        // A kernel without System V's, or a machine with too many.
        Err(_) => Ok(()),
    }
}

/// Whether `change` is told, exactly, in each of `ranges`.
fn sees(
    monitor: &Ebpf,
    missed: &'static str,
    ranges: &[Option<AddressRange>],
    change: impl FnOnce() -> bool,
) -> Result<(), Fault> {
    let failed = || EbpfError::SelfTest { missed }.into();
    for range in ranges.iter().flatten() {
        if monitor.watch(*range) != Watch::Covered {
            return Err(failed());
        }
    }
    let before = monitor.place();
    if !change() {
        return Err(failed());
    }
    told(monitor, before, missed, ranges)
}

/// Whether each of `ranges` was logged since `before`.
fn told(
    monitor: &Ebpf,
    before: Position,
    missed: &'static str,
    ranges: &[Option<AddressRange>],
) -> Result<(), Fault> {
    let failed = EbpfError::SelfTest { missed };
    let after = monitor.check().map_err(|_| failed.clone())?;
    let mut told = vec![];
    let replay = monitor.replay(before, &mut |range| told.push(range));
    if !replay.complete {
        return Err(Fault::Unreadable(failed));
    }
    let all = ranges.iter().all(|range| range.is_some_and(|range| told.contains(&range)));
    let known = replay.sequence.0 >= after.0 && after.0 > before.0;
    if known && all { Ok(()) } else { Err(Fault::Missed(failed)) }
}
