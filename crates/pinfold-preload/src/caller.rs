//! The caller: what the calling module asked the dynamic linker for, told by the return address.
//!
//! Two questions cannot be answered by the arguments of a call:
//!
//! - **Was `ibv_reg_mr_iova2` meant?** libibverbs' own `ibv_reg_mr` jumps to that name through its
//!   table of procedures, and so into this library, also when the program took `ibv_reg_mr` from a
//!   handle of its own (`dlopen`, `dlsym`), past this library. Such a program will take
//!   `ibv_dereg_mr` by the same way, and it would get one of our regions there. So only modules that
//!   ask for `ibv_reg_mr_iova2` by name get one; the jump leaves the program's return address.
//! - **Which ABI?** Programs linked before 2007 ask for version `IBVERBS_1.0`, with other
//!   structures. A library without versions, as this one, serves every version asked for.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have the dynamic linker list what is loaded; it keeps the list
//! unchanged while it runs the callback.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // addresses have 64 bits here, see `lib.rs`

use crate::elf::{Dynamic, Tables, Wanted};
use libc::{Elf64_Phdr, PT_DYNAMIC, PT_LOAD, c_int, c_void, dl_phdr_info, size_t};
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
    /// Nothing: it is this library, whose calls of `ibv_reg_mr` come back by that jump.
    pub(crate) is_us: bool,
}

/// The names that exist in both ABIs and are taken over here.
const IN_BOTH: [&[u8]; 4] =
    [b"ibv_reg_mr", b"ibv_dereg_mr", b"ibv_dealloc_pd", b"ibv_close_device"];

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
        Asked { is_us: found == Some(Module::Ours), ..asked }
    }
}

/// Callers met, each with its answer in the lowest bits; user addresses have 57 at most.
///
/// An entry may be stale when a module was unloaded and another one has its place: then a program
/// that takes libibverbs' functions from a handle of its own would have to call from the very
/// address where the unloaded one called by name.
static MET: [AtomicU64; 256] = [const { AtomicU64::new(u64::MAX) }; 256];

impl Asked {
    const BITS: u32 = 3;

    fn bits(self) -> u64 {
        u64::from(self.iova2) | u64::from(self.old_abi) << 1 | u64::from(self.is_us) << 2
    }

    fn from_bits(bits: u64) -> Self {
        Self { iova2: bits & 1 != 0, old_abi: bits & 2 != 0, is_us: bits & 4 != 0 }
    }

    fn note(&mut self, wanted: Wanted<'_>) {
        let name = wanted.name.to_bytes();
        self.iova2 |= name == b"ibv_reg_mr_iova2";
        self.old_abi |= wanted.version == Some(c"IBVERBS_1.0") && IN_BOTH.contains(&name);
    }
}

/// The module whose code lies at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Module {
    Ours,
    Other,
}

/// Calls `note` with every symbol that the module around `address` wants from others. `None` if
/// there is no module.
fn look_around(address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Module> {
    let mut search = Search { address, note, found: None };
    // SAFETY: the callback gets `search` back as its argument, and only during this call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

struct Search<'s> {
    address: usize,
    note: &'s mut dyn FnMut(Wanted<'_>),
    found: Option<Module>,
}

/// Looks whether this is the module, and at what it wants.
///
/// # Safety
///
/// Called by `dl_iterate_phdr` with a [`Search`] as its argument.
unsafe extern "C" fn visit(info: *mut dl_phdr_info, _: size_t, search: *mut c_void) -> c_int {
    // SAFETY: the linker describes a loaded module, which it keeps loaded during the call; the
    // argument is the search.
    unsafe {
        let search = &mut *search.cast::<Search<'_>>();
        let info = &*info;
        let base = info.dlpi_addr as usize;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
        let is_around = |address| headers.iter().any(|header| holds(base, header, address));
        if !is_around(search.address) {
            return 0;
        }
        let ours = is_around(look_around as fn(_, _) -> _ as usize);
        search.found = Some(if ours { Module::Ours } else { Module::Other });
        if let Some(header) = headers.iter().find(|header| header.p_type == PT_DYNAMIC) {
            let dynamic = base.wrapping_add(header.p_vaddr as usize) as *const Dynamic;
            Tables::of(base, dynamic).wanted(&mut *search.note);
        }
        1
    }
}

fn holds(base: usize, header: &Elf64_Phdr, address: usize) -> bool {
    let start = base.wrapping_add(header.p_vaddr as usize);
    header.p_type == PT_LOAD && address.wrapping_sub(start) < header.p_memsz as usize
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
    fn a_module_s_relocations_name_what_it_wants_and_in_which_version() {
        let mut versions = Vec::new();
        let here = an_unknown_caller_asked_for_nothing as fn() as usize;
        let found = look_around(here, &mut |wanted| {
            // No sanitizer brings a function of this name along.
            if wanted.name == c"__errno_location" {
                versions.push(wanted.version.expect("a version").to_owned());
            }
        });
        let version = versions.first().expect("this program calls the C library");
        assert!(version.to_bytes().starts_with(b"GLIBC_"), "{version:?}");
        assert_eq!(found, Some(Module::Ours));
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
    }
}
