//! The caller: what the calling module asked the dynamic linker for, told by the return address.
//!
//! Three questions cannot be answered by the arguments of a call:
//!
//! - **Was `ibv_reg_mr_iova2` meant?** libibverbs' own `ibv_reg_mr` jumps to that name through its
//!   table of procedures, and so into this library, also when the program took `ibv_reg_mr` from a
//!   handle of its own (`dlopen`, `dlsym`), past this library. Such a program will take
//!   `ibv_dereg_mr` by the same way, and it would get one of our regions there. So only modules that
//!   ask for `ibv_reg_mr_iova2` by name get one; the jump leaves the program's return address.
//! - **Which ABI?** Programs linked before 2007 ask for version `IBVERBS_1.0`, with other
//!   structures. A library without versions, as this one, serves every version asked for.
//! - **Which `fi_fabric`?** The same for programs that were linked with libfabric 1.0.

use crate::modules::{Wanted, Whose, look_around};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

/// An address behind a call of one of the exported functions; 0 where it is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Caller(pub(crate) usize);

/// What the calling module asked for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Asked {
    /// `ibv_reg_mr_iova2`, by that name.
    pub(crate) iova2: bool,
    /// Functions of the ABI from before 2007.
    pub(crate) old_abi: bool,
    /// `fi_fabric` of libfabric 1.0, with another structure.
    pub(crate) old_fabric: bool,
    /// Nothing: it is this library, whose calls of `ibv_reg_mr` come back by that jump.
    pub(crate) is_us: bool,
}

/// The names that exist in both ABIs and are taken over here.
pub(crate) const IN_BOTH: [&CStr; 4] =
    [c"ibv_reg_mr", c"ibv_dereg_mr", c"ibv_dealloc_pd", c"ibv_close_device"];

impl Caller {
    /// A caller of whom nothing is asked.
    pub(crate) const UNKNOWN: Self = Self(0);

    /// What the caller's module asked for; nothing if the caller is not known.
    ///
    /// Costs a load, and for a caller not met before (or forgotten) a walk through its module's
    /// relocations.
    pub(crate) fn asked(self) -> Asked {
        let entry = &MET[self.0 / 4 % MET.len()];
        // Relaxed: the whole answer is in the word.
        let met = entry.load(Ordering::Relaxed);
        if met >> Asked::BITS == self.0 as u64 {
            return Asked::from_bits(met);
        }
        let asked = self.examine();
        // Relaxed: as above.
        entry.store((self.0 as u64) << Asked::BITS | asked.bits(), Ordering::Relaxed);
        asked
    }

    fn examine(self) -> Asked {
        let mut asked = Asked::default();
        let found = look_around(self.0, &mut |wanted| asked.note(wanted));
        Asked { is_us: found == Some(Whose::Ours), ..asked }
    }
}

/// Callers met, each with its answer in the lowest bits; user addresses have 57 at most.
///
/// An entry may be stale when a module was unloaded and another one has its place, and calls from the very address where
/// that one did: by a handle of its own where that called by name, or with another ABI.
static MET: [AtomicU64; 256] = [const { AtomicU64::new(u64::MAX) }; 256];

impl Asked {
    const BITS: u32 = 4;

    fn bits(self) -> u64 {
        u64::from(self.iova2)
            | u64::from(self.old_abi) << 1
            | u64::from(self.is_us) << 2
            | u64::from(self.old_fabric) << 3
    }

    fn from_bits(bits: u64) -> Self {
        Self {
            iova2: bits & 1 != 0,
            old_abi: bits & 2 != 0,
            is_us: bits & 4 != 0,
            old_fabric: bits & 8 != 0,
        }
    }

    fn note(&mut self, wanted: Wanted<'_>) {
        self.iova2 |= wanted.name == c"ibv_reg_mr_iova2";
        self.old_fabric |= wanted.version == Some(c"FABRIC_1.0") && wanted.name == c"fi_fabric";
        self.old_abi |= wanted.version == Some(c"IBVERBS_1.0") && IN_BOTH.contains(&wanted.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_caller_asked_for_nothing() {
        assert_eq!(Caller(0).asked(), Asked::default());
        assert_eq!(Caller(1).asked(), Asked::default());
    }

    #[test]
    fn what_calls_from_here_is_this_library() {
        let here = what_calls_from_here_is_this_library as fn() as usize;
        assert_eq!(Caller(here).asked(), Asked { is_us: true, ..Asked::default() });
    }

    #[test]
    fn an_answer_survives_its_word() {
        for bits in 0..1 << Asked::BITS {
            let asked = Asked::from_bits(0x7fff_1234_5678 << Asked::BITS | bits);
            assert_eq!(asked.bits(), bits);
        }
    }

    #[test]
    fn the_old_abi_is_told_by_the_version_of_a_name_that_both_have() {
        let note = |name, version| {
            let mut asked = Asked::default();
            asked.note(Wanted { name, version });
            asked
        };
        assert!(note(c"ibv_reg_mr", Some(c"IBVERBS_1.0")).old_abi);
        assert!(!note(c"ibv_reg_mr", Some(c"IBVERBS_1.1")).old_abi);
        assert!(!note(c"ibv_query_device", Some(c"IBVERBS_1.0")).old_abi);
        assert!(note(c"ibv_reg_mr_iova2", Some(c"IBVERBS_1.8")).iova2);
        assert!(!note(c"ibv_reg_mr", None).iova2);
        assert!(note(c"fi_fabric", Some(c"FABRIC_1.0")).old_fabric);
        assert!(!note(c"fi_fabric", Some(c"FABRIC_1.1")).old_fabric);
        assert!(!note(c"fi_version", Some(c"FABRIC_1.0")).old_fabric);
    }
}
