//! A memory barrier on every thread of the process at once: `membarrier(2)`.
//!
//! # Safety
//!
//! The unsafe code of this file is there to vouch that the call is the barrier that
//! [`Barriers::asymmetric`] asks for.

use pinfold_core::Barriers;
use rustix::thread::{MembarrierCommand, membarrier};

/// The cheapest pair of barriers that this kernel offers: asymmetric (Linux 4.14), or else two fences.
pub fn barriers() -> Barriers {
    let announced = membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
    if !announced || !barrier_everywhere() {
        return Barriers::SYMMETRIC;
    }
    // SAFETY: the kernel's manual: when the expedited private command returns success, all
    // running threads of the process have passed through a full barrier since it was called.
    unsafe { Barriers::asymmetric(barrier_everywhere) }
}

/// Some microseconds; false if the kernel refuses (a seccomp filter installed later).
fn barrier_everywhere() -> bool {
    membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_offered_works_again_and_again() {
        let offered = format!("{:?}", barriers());
        let works = (0..100).all(|_| barrier_everywhere());
        assert_eq!(works, offered == "asymmetric");
    }
}
