//! `mremap`: a move of several mappings at once, or of one that is two because a part of it is watched.
//!
//! The kernel refuses (`EFAULT`) to move a range that is more than one mapping, until Linux 6.17 always, since then where
//! a userfaultfd watches one of them. So our watch ends: after the refusal, because the mappings become one then, unless
//! a part was first used beside a watched one; or before the call where the kernel moves several, because it moves those
//! before the watched one and refuses then. No thread has the range watched again before the program's call has returned.
//! What was registered in the range is told to change in any case.
//!
//! The program's allocator may make this call with its lock held: nothing here asks it for memory ([`is_ours`]).
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to make the program's call.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // where the kernel truncates

use super::aside::{self, When};
use super::told::guarded;
use crate::apart::is_ours;
use libc::c_int;
use pinfold::AddressRange;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::raw::{RawAnswer, system_call};

/// Makes the program's `mremap`.
///
/// # Safety
///
/// As `mremap` demands.
pub(super) unsafe fn mremap(arguments: [usize; 5]) -> RawAnswer {
    // SAFETY: the caller's promise.
    let call = || unsafe { system_call(libc::SYS_mremap, arguments) };
    let Some(range) = moved(arguments) else { return call() };
    if is_ours() {
        return call();
    }
    // Once: as the call is made, no other thread has the range watched again.
    let call_aside = |when| aside::step_aside_for(range, when, call);
    if is_of_several(arguments) {
        return call_aside(When::Ahead).unwrap_or_else(call);
    }
    let answer = call();
    let is_refused = answer.is(libc::EFAULT);
    is_refused.then(|| call_aside(When::Refused)).flatten().unwrap_or(answer)
}

/// What leaves its place, if something may be watched there.
fn moved([start, length, ..]: [usize; 5]) -> Option<AddressRange> {
    guarded(start, length).filter(|_| aside::is_anything_kept())
}

/// Whether the kernel may move several mappings by such a call, whose lengths it rounds to whole pages.
fn is_of_several([_, from, to, flags, _]: [usize; 5]) -> bool {
    let pages = |bytes: usize| bytes.div_ceil(page_bytes());
    pages(from) == pages(to) && flags as c_int & libc::MREMAP_FIXED != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_of_nothing_is_the_kernel_s_alone() {
        assert_eq!(moved([0x1000, 0, 0x1000, 0, 0]), None, "no bytes");
        // SAFETY: nothing is mapped there.
        let answer = unsafe { mremap([0x1000, 0x1000, 0x1000, libc::MREMAP_MAYMOVE as usize, 0]) };
        assert!(answer.is(libc::EFAULT));
    }

    #[test]
    fn several_are_moved_by_a_call_that_names_the_place_and_keeps_the_length() {
        let fixed = (libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE) as usize;
        assert!(is_of_several([0, 8, 8, fixed, 0]));
        assert!(is_of_several([0, 8, 9, fixed, 0]));
        assert!(!is_of_several([0, 8, page_bytes() + 1, fixed, 0]));
        assert!(!is_of_several([0, 8, 8, libc::MREMAP_MAYMOVE as usize, 0]));
    }
}
