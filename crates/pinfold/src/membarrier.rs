//! A memory barrier on every thread of the process at once: `membarrier(2)`.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for one system call without pointers, and to vouch that it is
//! the barrier that core's [`Barriers::asymmetric`] asks for.

#![allow(unsafe_code)]

use pinfold_core::Barriers;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED` of `linux/membarrier.h` (Linux 4.14).
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`: announces the use of the former.
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// The cheapest pair of barriers that this kernel offers: asymmetric, or else two fences.
pub(crate) fn barriers() -> Barriers {
    if !membarrier(REGISTER_PRIVATE_EXPEDITED) || !barrier_everywhere() {
        return Barriers::SYMMETRIC;
    }
    // SAFETY: the kernel's manual: when the expedited private command returns success, all
    // running threads of the process have passed through a full barrier since it was called.
    unsafe { Barriers::asymmetric(barrier_everywhere) }
}

/// Some microseconds; false if the kernel refuses (a seccomp filter installed later).
fn barrier_everywhere() -> bool {
    membarrier(PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: no pointer is passed, and the call changes nothing but the order of memory accesses.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_command_is_refused() {
        assert!(!membarrier(1 << 30));
    }

    #[test]
    fn what_is_offered_works_again_and_again() {
        let offered = format!("{:?}", barriers());
        let works = (0..100).all(|_| barrier_everywhere());
        assert_eq!(works, offered == "asymmetric");
    }
}
