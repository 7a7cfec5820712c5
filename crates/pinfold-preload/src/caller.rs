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
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have the dynamic linker find a module, or list what is loaded; it keeps the list
//! unchanged while it runs the callback.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // addresses have 64 bits here, see `lib.rs`

use crate::elf::{Dynamic, Tables, Wanted};
use libc::{Elf64_Phdr, PT_DYNAMIC, PT_LOAD, c_char, c_int, c_void, dl_phdr_info, size_t};
use pinfold_kernel::symbols;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

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

/// The module whose code lies at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Module {
    Ours,
    Other,
}

/// Calls `note` with every symbol that the module around `address` wants from others. `None` if
/// there is no module.
fn look_around(address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Module> {
    let find = FIND_OBJECT.load(Ordering::Relaxed);
    if find.is_null() {
        return search_around(address, note);
    }
    // SAFETY: the C library's function of that name, which has this type, and is there as long as the process.
    let find = unsafe { std::mem::transmute::<*mut c_void, FindObject>(find) };
    look_up(find, address, note)
}

/// Of the GNU C library since 2.35: finds the module around an address, without a lock.
type FindObject = unsafe extern "C" fn(*mut c_void, *mut FoundObject) -> c_int;

/// Null where it was not found. Relaxed: code that was there before.
static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// `struct dl_find_object`, and room for what later versions may add.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: usize,
    end: usize,
    module: *const LoadedModule,
    rest: [u64; 28],
}

/// The beginning of `struct link_map`.
#[repr(C)]
struct LoadedModule {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

/// Looks for the function that finds modules without the dynamic linker's lock, which a forked child may find taken for
/// ever, and a thread held by another one that waits for it.
pub(crate) fn find_at_start() {
    let found = symbols::address(c"_dl_find_object");
    FIND_OBJECT.store(found.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Relaxed);
}

fn look_up(find: FindObject, address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Module> {
    let mut found = MaybeUninit::<FoundObject>::zeroed();
    // SAFETY: the structure has room for the answer, and zeros are a value of it. The module of the code that called this
    // library is loaded for as long as the call lasts; one without a table of the linker's has a null pointer.
    unsafe {
        if find(ptr::without_provenance_mut(address), found.as_mut_ptr()) != 0 {
            return None;
        }
        let FoundObject { start, end, module, .. } = found.assume_init();
        let module = module.as_ref()?;
        if !module.dynamic.is_null() {
            Tables::of(module.base, module.dynamic).wanted(note);
        }
        let is_ours = (start..end).contains(&(look_around as fn(_, _) -> _ as usize));
        Some(if is_ours { Module::Ours } else { Module::Other })
    }
}

/// The same by a walk through all modules, under the dynamic linker's lock.
fn search_around(address: usize, note: &mut dyn FnMut(Wanted<'_>)) -> Option<Module> {
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

    /// One without the linker's lock, and one with it.
    #[test]
    fn both_ways_find_the_same() {
        find_at_start();
        let is_there = symbols::address(c"_dl_find_object").is_some();
        assert_eq!(FIND_OBJECT.load(Ordering::Relaxed).is_null(), !is_there);
        type Look = fn(usize, &mut dyn FnMut(Wanted<'_>)) -> Option<Module>;
        let by = |look: Look, address| {
            let mut wanted = Vec::new();
            let found = look(address, &mut |Wanted { name, version }| {
                wanted.push((name.to_owned(), version.map(CStr::to_owned)));
            });
            (found, wanted)
        };
        let here = both_ways_find_the_same as fn() as usize;
        for address in [here, libc::getpid as *const () as usize, 1] {
            assert_eq!(by(look_around, address), by(search_around, address), "{address:#x}");
        }
        assert!(by(look_around, here).1.len() > 10 && by(look_around, 1).0.is_none());
    }

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
        assert!(note(c"fi_fabric", Some(c"FABRIC_1.0")).old_fabric);
        assert!(!note(c"fi_fabric", Some(c"FABRIC_1.1")).old_fabric);
        assert!(!note(c"fi_version", Some(c"FABRIC_1.0")).old_fabric);
    }
}
