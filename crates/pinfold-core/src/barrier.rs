//! The pair of barriers between a lease and a thread that takes its region away.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare one constructor whose caller vouches for a barrier
//! that this crate cannot check; it contains no unsafe block.

#![allow(unsafe_code)]

use crate::foreign;
use crate::sync::{Ordering, compiler_fence, fence};
use std::fmt;

/// How a store before a lease's barrier and the load behind it are kept in order.
///
/// A lease writes its hazard, then reads the region's state; the reclaimer writes the state, then
/// reads the hazards. One of the two must see the other (Dekker). Hits are many and reclamations
/// few, so where the system offers a barrier that acts on all threads of the process
/// (`membarrier(2)`), the lease's side costs no instruction.
#[derive(Clone, Copy)]
pub struct Barriers {
    heavy: Option<fn() -> bool>,
}

impl Barriers {
    /// A full fence on both sides: correct everywhere, some 5 ns on every get and release.
    pub const SYMMETRIC: Self = Self { heavy: None };

    /// No instruction on the lease's side, `heavy` on the reclaimer's.
    ///
    /// # Safety
    ///
    /// When `heavy` returns true, every thread of this process that was running has executed a
    /// full memory barrier since `heavy` was called. When it returns false (the system stopped
    /// offering it), nothing is taken away: registrations are kept rather than risked.
    pub const unsafe fn asymmetric(heavy: fn() -> bool) -> Self {
        Self { heavy: Some(heavy) }
    }

    /// The barrier of the many: between a hazard's store and a state's load.
    #[inline(always)]
    pub(crate) fn light(self) {
        if self.heavy.is_some() {
            // The processor is held in order by the other side's barrier; this holds the compiler.
            compiler_fence(Ordering::SeqCst);
        } else {
            full_fence();
        }
    }

    /// The barrier of the few: between a state's store and the hazards' loads. False if there
    /// was none.
    pub(crate) fn heavy(self) -> bool {
        if let Some(barrier) = self.heavy {
            // One that panicked was none.
            return foreign::call(barrier).unwrap_or(false);
        }
        // SeqCst: pairs with the fence in `light`.
        fence(Ordering::SeqCst);
        true
    }
}

/// Apart, so that the usual way runs straight on.
#[cold]
fn full_fence() {
    // SeqCst: the one fence that orders a store before a later load.
    fence(Ordering::SeqCst);
}

impl fmt::Debug for Barriers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.heavy.is_some() { "asymmetric" } else { "symmetric" })
    }
}
