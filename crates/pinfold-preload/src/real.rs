//! libibverbs itself, behind this library's back.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to take libibverbs' functions by name and version, and to keep
//! them behind an atomic pointer: a lock could be found taken for ever in a forked child.

#![allow(unsafe_code)]

use libc::{c_int, c_void, size_t};
use pinfold::registrar::verbs::Library;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr, ibv_pd};
use std::ffi::CStr;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The functions that calls are handed on to.
#[derive(Debug)]
pub(crate) struct Real {
    pub(crate) library: Library,
    /// Those of the ABI from before 2007, where the library still has them.
    pub(crate) old: Option<OldAbi>,
    pub(crate) unimport_pd: Option<unsafe extern "C" fn(*mut ibv_pd)>,
    pub(crate) fork_init: Option<unsafe extern "C" fn() -> c_int>,
}

/// Version `IBVERBS_1.0` of what is taken over here; its structures are other ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldAbi {
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
}

/// Null, or from a leaked box.
static REAL: AtomicPtr<Real> = AtomicPtr::new(ptr::null_mut());

/// libibverbs, found at the first call. `None` if there is none, or one older than 2007.
pub(crate) fn real() -> Option<&'static Real> {
    // Acquire: pairs with the exchange below; the functions come with the pointer.
    // SAFETY: null or leaked, see `REAL`.
    unsafe { REAL.load(Ordering::Acquire).as_ref() }.or_else(find)
}

#[cold]
fn find() -> Option<&'static Real> {
    let found = Box::into_raw(Box::new(Source::loaded()?.functions()?));
    // AcqRel: releases the functions to whoever loads the pointer, acquires the winner's.
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
        NonNull::new(unsafe {
            libc::dlvsym(self.0.as_ptr(), name.as_ptr(), version.as_ptr())
        })
    }

    fn default(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: as above.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

impl Real {
    /// Whether libibverbs keeps forked children away from registered pages itself
    /// (`MADV_DONTFORK`), as it does on kernels before 5.12 for programs that called
    /// `ibv_fork_init`. `None` if this version cannot tell.
    pub(crate) fn fork_tracking(&self) -> Option<bool> {
        const IBV_FORK_ENABLED: libc::c_uint = 1;
        // SAFETY: the function takes nothing and changes nothing.
        self.library.is_fork_initialized.map(|ask| unsafe { ask() } == IBV_FORK_ENABLED)
    }
}
