//! libibverbs itself, behind this library's back.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to take libibverbs' functions by name and version, and to keep
//! them behind an atomic pointer: a lock could be found taken for ever in a forked child.

#![allow(unsafe_code)]

use crate::apart;
use crate::linked;
use libc::{c_int, c_void, size_t};
use pinfold::AddressRange;
use pinfold::registrar::verbs::Library;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr, ibv_pd};
use pinfold_kernel::mapping::OwnedMapping;
use pinfold_kernel::process::page_bytes;
use std::ffi::CStr;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The functions that calls are handed on to.
#[derive(Debug)]
pub(crate) struct Real {
    pub(crate) library: Library,
    /// Those of the ABI from before 2007, where the library still has them.
    pub(crate) old: Option<OldAbi>,
    pub(crate) unimport_pd: Option<unsafe extern "C" fn(*mut ibv_pd)>,
    pub(crate) fork_init: Option<unsafe extern "C" fn() -> c_int>,
    /// What keeps registered pages from forked children, and what ends that; both do nothing
    /// unless the program called `ibv_fork_init`.
    fork_ranges: Option<[ForkRange; 2]>,
}

/// Version `IBVERBS_1.0` of what is taken over here; its structures are other ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldAbi {
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
}

type ForkRange = unsafe extern "C" fn(base: *mut c_void, size: size_t) -> c_int;

/// Null, or what is never released: from a leaked box, or static.
static REAL: AtomicPtr<Real> = AtomicPtr::new(ptr::null_mut());

/// libibverbs, found at the first call. `None` if there is none, or one older than 2007.
pub(crate) fn real() -> Option<&'static Real> {
    // Acquire: pairs with the exchange below; the functions come with the pointer.
    // SAFETY: null or leaked, see `REAL`.
    unsafe { REAL.load(Ordering::Acquire).as_ref() }.or_else(find)
}

/// Finds the libibverbs that the program was started with. Later the dynamic linker's lock may be held by a thread that
/// waits for the one that registers: in a constructor of a library that is being loaded.
///
/// In memory that is there: a block of this library's heap would take a chunk of addresses in every program of verbs, and
/// another one in its children.
pub(crate) fn find_at_start() {
    // No other thread asks, so no forked child finds the lock taken.
    static AT_START: OnceLock<Option<Real>> = OnceLock::new();
    if linked::libibverbs() {
        let found = || apart::run(|| Source::loaded()?.functions()).flatten();
        if let Some(found) = AT_START.get_or_init(found) {
            // Release: the functions come with the pointer.
            REAL.store(ptr::from_ref(found).cast_mut(), Ordering::Release);
        }
    }
}

#[cold]
fn find() -> Option<&'static Real> {
    let found = apart::run(|| Some(Box::into_raw(Box::new(Source::loaded()?.functions()?))))??;
    // AcqRel: releases the functions to a thread that loads the pointer, acquires the winner's.
    let exchanged =
        REAL.compare_exchange(ptr::null_mut(), found, Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: the box is either leaked now, or still ours alone; a winner's is leaked.
    unsafe {
        match exchanged {
            Ok(_) => found.as_ref(),
            Err(winner) => {
                drop(Box::from_raw(found));
                winner.as_ref()
            }
        }
    }
}

/// A handle of the dynamic linker, never closed.
struct Source(NonNull<c_void>);

impl Source {
    /// The libibverbs that the program has loaded, from wherever; else the system's.
    fn loaded() -> Option<Self> {
        let name = c"libibverbs.so.1".as_ptr();
        // SAFETY: the name is a C string, and the library's initialisers have run, or run as in
        // every program that loads it.
        let handle = unsafe {
            let loaded = libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if loaded.is_null() { libc::dlopen(name, libc::RTLD_LAZY) } else { loaded }
        };
        NonNull::new(handle).map(Self)
    }

    fn functions(&self) -> Option<Real> {
        // SAFETY: the symbols are libibverbs' own, and it stays loaded.
        let library = unsafe {
            Library::from_symbols(|name, version| {
                self.versioned(name, version).or_else(|| self.default(name))
            })
        };
        let unimport_pd = self.versioned(c"ibv_unimport_pd", c"IBVERBS_1.10");
        let fork_init = self.versioned(c"ibv_fork_init", c"IBVERBS_1.1");
        let range = |name| self.versioned(name, c"IBVERBS_1.1");
        let ranges = range(c"ibv_dontfork_range").zip(range(c"ibv_dofork_range"));
        // SAFETY: the header's types for functions of these names.
        unsafe {
            Some(Real {
                library: library.ok()?,
                old: self.old(),
                unimport_pd: mem::transmute::<
                    Option<NonNull<c_void>>,
                    Option<unsafe extern "C" fn(*mut ibv_pd)>,
                >(unimport_pd),
                fork_init: mem::transmute::<
                    Option<NonNull<c_void>>,
                    Option<unsafe extern "C" fn() -> c_int>,
                >(fork_init),
                fork_ranges: ranges.map(|(dont, redo)| {
                    [dont, redo].map(|f| mem::transmute::<NonNull<c_void>, ForkRange>(f))
                }),
            })
        }
    }

    fn old(&self) -> Option<OldAbi> {
        let old = |name| self.versioned(name, c"IBVERBS_1.0");
        // SAFETY: the types of the old ABI's functions; its structures are only ever pointed to.
        unsafe {
            Some(OldAbi {
                reg_mr: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
                >(old(c"ibv_reg_mr")?),
                dereg_mr: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_mr) -> c_int,
                >(old(c"ibv_dereg_mr")?),
                dealloc_pd: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_pd) -> c_int,
                >(old(c"ibv_dealloc_pd")?),
                close_device: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_context) -> c_int,
                >(old(c"ibv_close_device")?),
            })
        }
    }

    fn versioned(&self, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open; the names are C strings.
        NonNull::new(unsafe { libc::dlvsym(self.0.as_ptr(), name.as_ptr(), version.as_ptr()) })
    }

    fn default(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: as above.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

/// Two pages of memory in a mapping of their own.
struct Pages(OwnedMapping);

impl Pages {
    /// `None` if there is no memory.
    fn new() -> Option<Self> {
        // A page without access on each side keeps neighbours from becoming one mapping with it.
        let pages = OwnedMapping::inaccessible(4 * page_bytes()).ok()?;
        pages.allow(page_bytes(), 2 * page_bytes()).ok()?;
        Some(Self(pages))
    }

    fn start(&self) -> *mut c_void {
        self.0.start().as_ptr().wrapping_add(page_bytes()).cast()
    }

    /// Whether the kernel tells one page from the other.
    fn are_split(&self) -> bool {
        let range = AddressRange::new(self.start().addr(), 2 * page_bytes());
        let mappings = range.map(pinfold::mappings::mappings_in);
        matches!(mappings, Ok(Ok(mappings)) if mappings.len() > 1)
    }
}

impl Real {
    /// Whether the kernel gives forked children copies of registered pages (since 5.12), so that
    /// nothing needs to be kept from them.
    pub(crate) fn kernel_copies_on_fork(&self) -> bool {
        const IBV_FORK_UNNEEDED: libc::c_uint = 2;
        // SAFETY: the function takes nothing and asks the kernel.
        self.library.is_fork_initialized.is_some_and(|ask| unsafe { ask() } == IBV_FORK_UNNEEDED)
    }

    /// Whether libibverbs keeps forked children away from registered pages (`MADV_DONTFORK`), as it
    /// does for programs that called `ibv_fork_init`.
    ///
    /// `ibv_is_fork_initialized` does not tell: it says that a kernel of today needs no such thing,
    /// and libibverbs does it all the same. So one page is tried: a mapping of which a part is kept
    /// from children is two mappings. Costs some system calls; afterwards `ibv_fork_init` is refused,
    /// as after any registration.
    pub(crate) fn keeps_from_children(&self) -> bool {
        let Some([dont, redo]) = self.fork_ranges else { return false };
        let Some(pages) = Pages::new() else { return false };
        // SAFETY: the page is ours.
        unsafe { dont(pages.start(), page_bytes()) };
        let kept = pages.are_split();
        // SAFETY: as above.
        unsafe { redo(pages.start(), page_bytes()) };
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_split_by_what_holds_for_one_of_them() {
        let pages = Pages::new().unwrap();
        assert!(!pages.are_split());
        // SAFETY: the page is ours.
        unsafe { libc::madvise(pages.start(), page_bytes(), libc::MADV_DONTFORK) };
        assert!(pages.are_split());
        // SAFETY: as above.
        unsafe { libc::madvise(pages.start(), page_bytes(), libc::MADV_DOFORK) };
        assert!(!pages.are_split());
    }
}
