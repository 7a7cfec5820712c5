//! `ioctl`: the program's own userfaultfd, and our watch of the same memory; and deregistrations in two steps
//! ([`steps`]).
//!
//! A mapping has one watch. If the program asks for one where we have ours (`EBUSY`), ours ends. If the
//! program ends a watch where we have ours, the kernel refuses since 6.18 (`EINVAL`): ours ends and the
//! program's call is made again, as if ours had never been there. Older kernels do not compare whose
//! watch it is and end ours (`userfaultfd_unregister`), so the range is reported as changing while the
//! call runs. It is reported once more when the call has returned: a registration that was watched before the
//! watch ended asks after that whether a change is pending, and by then this one may be over.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the request that the program's pointer names, and to make the
//! program's call with a copy of it.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // registers have 64 bits, see `lib.rs`

use super::aside::{self, When};
use super::pinfold_process_feed;
use super::told::{guarded, told};
use crate::apart::is_ours;
use crate::steps;
use libc::c_int;
use pinfold::AddressRange;
use pinfold_kernel::raw::{RawAnswer, system_call};

/// Of `linux/userfaultfd.h`; the kernel takes a request as 32 bits.
const REGISTER: u32 = 0xc020_aa00;
const UNREGISTER: u32 = 0x8010_aa01;

/// What both requests begin with: `struct uffdio_range`.
type Request = [u64; 2];

/// Makes the program's `ioctl`.
///
/// # Safety
///
/// As `ioctl` demands.
pub(super) unsafe fn ioctl(arguments: [usize; 5]) -> RawAnswer {
    match arguments[1] as u32 {
        // SAFETY: the caller's promise.
        REGISTER if !is_ours() => unsafe { register(arguments) },
        // SAFETY: the caller's promise.
        UNREGISTER if !is_ours() => unsafe { unregister(arguments) },
        // SAFETY: the caller's promise.
        steps::VERBS => unsafe { verbs(arguments) },
        // SAFETY: the caller's promise.
        _ => unsafe { system_call(libc::SYS_ioctl, arguments) },
    }
}

unsafe fn verbs(arguments: [usize; 5]) -> RawAnswer {
    let request = std::ptr::with_exposed_provenance(arguments[2]);
    // SAFETY: the caller's promise.
    let call = || unsafe { system_call(libc::SYS_ioctl, arguments) }.0;
    // SAFETY: the caller's promise.
    RawAnswer(unsafe { steps::answer(arguments[0] as c_int, request, call) })
}

unsafe fn register(arguments: [usize; 5]) -> RawAnswer {
    // SAFETY: the caller's promise.
    unsafe { made_aside(libc::EBUSY, arguments, || range_named_by(arguments)) }
}

unsafe fn unregister(arguments: [usize; 5]) -> RawAnswer {
    // Where nothing was kept nothing is looked at: a filter of the program's own may end it at the question whether the
    // request can be read.
    let request = if aside::is_anything_kept() { copy_of(arguments[2]) } else { None };
    // SAFETY: the caller's promise.
    unsafe { unregister_as(request, arguments) }
}

/// Makes the call with what was read of the request; where nothing was, it may name any range.
unsafe fn unregister_as(request: Option<Request>, arguments: [usize; 5]) -> RawAnswer {
    let [descriptor, number, named, d, e] = arguments;
    // What is reported is what the kernel reads, whatever another thread does to the program's.
    let read = request.as_ref().map_or(named, |copy| copy.as_ptr().expose_provenance());
    let arguments = [descriptor, number, read, d, e];
    // SAFETY: the caller's promise; of the copy the kernel reads two words, which it has.
    let call = || unsafe { made_aside(libc::EINVAL, arguments, || range_named_by(arguments)) };
    let range = request.map_or(Some(AddressRange::EVERYTHING), range_of);
    // What is no range is refused.
    range.map_or_else(call, |range| unwatched(range, call))
}

/// Makes the call; if it is refused for this reason, again without our watch of the range.
unsafe fn made_aside(
    refused: c_int,
    arguments: [usize; 5],
    range: impl Fn() -> Option<AddressRange>,
) -> RawAnswer {
    // SAFETY: the caller's promise.
    let call = || unsafe { system_call(libc::SYS_ioctl, arguments) };
    let answer = call();
    if !answer.is(refused) || !aside::is_anything_kept() {
        return answer;
    }
    let again = |range| aside::step_aside_for(range, When::Refused, call);
    range().and_then(again).unwrap_or(answer)
}

/// Runs `end`, which may end our watch of `range`.
fn unwatched<T>(range: AddressRange, end: impl FnOnce() -> T) -> T {
    told(Some(range), || {
        let answer = end();
        pinfold_process_feed.changed(range);
        answer
    })
}

/// The pages that the request of these arguments names, as it stands now.
fn range_named_by(arguments: [usize; 5]) -> Option<AddressRange> {
    copy_of(arguments[2]).and_then(range_of)
}

/// The pages that a request names.
fn range_of([start, length]: Request) -> Option<AddressRange> {
    guarded(start as usize, length as usize)
}

/// What stands at `address`; `None` if the kernel could not read it.
fn copy_of(address: usize) -> Option<Request> {
    let last = address.checked_add(size_of::<u64>())?;
    if !(is_readable(address) && is_readable(last)) {
        return None;
    }
    // SAFETY: the program hands the address to the kernel to be read, and both words were readable
    // just now. Without alignment, because the kernel asks for none.
    Some(unsafe { std::ptr::with_exposed_provenance::<Request>(address).read_unaligned() })
}

/// Whether a word can be read there. Asks the kernel to read a set of signals, for a request that there is
/// not: it reads first, and changes nothing.
fn is_readable(address: usize) -> bool {
    const NO_REQUEST: usize = usize::MAX;
    let arguments = [NO_REQUEST, address, 0, size_of::<u64>(), 0];
    // SAFETY: nothing is written.
    unsafe { system_call(libc::SYS_rt_sigprocmask, arguments) }.is(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::monitor::{NoMonitor, WithFeed};
    use pinfold::{Monitor, Position};
    use std::ptr;

    const PAGE: usize = 65536;

    fn arguments(argument: *const Request) -> [usize; 5] {
        let no_descriptor = usize::MAX;
        [no_descriptor, UNREGISTER as usize, argument.expose_provenance(), 0, 0]
    }

    #[test]
    fn the_end_of_a_watch_is_reported_before_the_call_and_after() {
        let monitor = WithFeed::new(NoMonitor::new().unwrap(), &pinfold_process_feed);
        let range = AddressRange::new(0x7100_0000, PAGE).unwrap();
        let request = [range.start() as u64, range.len() as u64];
        let before = monitor.replay(Position::NOWHERE, &mut |_| ()).up_to;
        // SAFETY: without a descriptor nothing changes.
        let answer = unsafe { unregister_as(Some(request), arguments(&raw const request)) };
        assert!(answer.is(libc::EBADF));
        let mut reported = 0;
        let replay = monitor.replay(before, &mut |changed| reported += u32::from(changed == range));
        assert!(replay.complete && reported == 2, "{reported}");
        assert!(!monitor.change_pending(range), "it is over");
        let is_pending = unwatched(range, || monitor.change_pending(range));
        assert!(is_pending);
    }

    #[test]
    fn a_request_that_cannot_be_read_is_the_kernel_s_to_refuse() {
        let request = [0_u64; 2];
        assert_eq!(copy_of((&raw const request).addr()), Some(request));
        assert_eq!(copy_of(8), None);
        assert_eq!(copy_of(usize::MAX - 4), None);
        // SAFETY: as above.
        assert!(unsafe { ioctl(arguments(ptr::null())) }.is(libc::EBADF));
    }
}
