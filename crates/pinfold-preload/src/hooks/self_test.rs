//! Whether calls reach the hooks: found out at start by calling each function as any library would.
//!
//! The dynamic linker is asked for each name in the order in which it binds every module's calls. Found
//! here, or in a library that hands on to the next, the call arrives in our hook, which knows it by
//! an address that no process has (and then makes no system call: a sandbox may kill for an unusual
//! one). It does not arrive if another library stands first and makes the call itself.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call functions of the C library's names and types with
//! arguments that no kernel accepts, and to run when the library is loaded.

#![allow(unsafe_code)]

use super::told::GUARD_INSTALL;
use super::{pinfold_process_feed, pinfold_process_hooks};
use libc::{c_int, c_long, c_uint, c_void, iovec, size_t, ssize_t};
use pinfold::Change;
use pinfold::monitor::Feed;
use pinfold::monitor::hooks::HOOKED;
use pinfold_kernel::errno::{last_errno, set_errno};
use std::ffi::CStr;
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// An address where nothing can be mapped, and which is no page's.
const NOWHERE: usize = 1;

/// A trial is under way; only then are trials known by their arguments.
static TRYING: AtomicBool = AtomicBool::new(false);
/// How many trials arrived.
static ARRIVED: AtomicU32 = AtomicU32::new(0);

/// The changes that hooks tell of.
const TOLD: [Change; 2] = [Change::Guard, Change::AttachOver];

/// One way for a call to come, and how often it must arrive.
struct Trial {
    name: &'static CStr,
    call: unsafe fn(NonNull<c_void>),
    arrivals: u32,
}

/// In the order of [`HOOKED`].
const TRIALS: [Trial; HOOKED.len()] = [
    Trial { name: c"madvise", call: try_madvise, arrivals: 1 },
    Trial { name: c"process_madvise", call: try_process_madvise, arrivals: 1 },
    Trial { name: c"shmat", call: try_shmat, arrivals: 1 },
    Trial { name: c"syscall", call: try_syscall, arrivals: 3 },
];

/// Runs when the library is loaded, before most of the program's initialisers and its `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = run;

extern "C" fn run() {
    let errno = last_errno();
    match TRIALS.iter().position(|trial| !trial.succeeds()) {
        None => claim(),
        Some(function) => withdraw(function),
    }
    // Looked up once for all: by the time of the first registration the linker's lock may be held by a thread that
    // waits for the registering one.
    let _found = Feed::of_process();
    set_errno(errno);
}

fn claim() {
    TOLD.iter().for_each(|change| pinfold_process_feed.claim(*change));
    pinfold_process_hooks.activate();
}

fn withdraw(function: usize) {
    TOLD.iter().for_each(|change| pinfold_process_feed.withdraw(*change));
    let owner = TRIALS.get(function).and_then(Trial::found).and_then(file_of);
    pinfold_process_hooks.withdraw(function, owner);
}

impl Trial {
    /// What the dynamic linker gives to a caller of the name.
    fn found(&self) -> Option<NonNull<c_void>> {
        // SAFETY: the name is a C string. A name that is found costs no allocation.
        NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, self.name.as_ptr()) })
    }

    fn succeeds(&self) -> bool {
        let Some(found) = self.found() else { return false };
        // Relaxed, here and below: the calls are this thread's own.
        ARRIVED.store(0, Ordering::Relaxed);
        TRYING.store(true, Ordering::Relaxed);
        // SAFETY: a function of this name has the C library's type.
        unsafe { (self.call)(found) };
        TRYING.store(false, Ordering::Relaxed);
        ARRIVED.load(Ordering::Relaxed) == self.arrivals
    }
}

/// Whether this call is one of the trials; then it is counted.
pub(super) fn is_a_trial(number: c_long, [a, b, ..]: [usize; 5]) -> bool {
    // Relaxed: see `succeeds`. Another thread's call may see it too, and is told from ours by its
    // arguments.
    if !TRYING.load(Ordering::Relaxed) {
        return false;
    }
    let is_ours = if number == libc::SYS_madvise { a == NOWHERE } else { b == NOWHERE };
    ARRIVED.fetch_add(u32::from(is_ours), Ordering::Relaxed);
    is_ours
}

fn file_of(function: NonNull<c_void>) -> Option<&'static CStr> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the linker fills the structure when it knows the address. What stands before us in
    // the order was loaded with the program and stays until its end, its name too.
    unsafe {
        let known = libc::dladdr(function.as_ptr(), found.as_mut_ptr()) != 0;
        let name = found.assume_init().dli_fname;
        (known && !name.is_null()).then(|| CStr::from_ptr(name))
    }
}

unsafe fn try_madvise(found: NonNull<c_void>) {
    type Madvise = unsafe extern "C" fn(*mut c_void, size_t, c_int) -> c_int;
    // SAFETY: the type is the C library's; no process has the address, so nothing changes.
    unsafe {
        let call = mem::transmute::<NonNull<c_void>, Madvise>(found);
        call(ptr::without_provenance_mut(NOWHERE), 1, GUARD_INSTALL);
    }
}

unsafe fn try_process_madvise(found: NonNull<c_void>) {
    type ProcessMadvise =
        unsafe extern "C" fn(c_int, *const iovec, size_t, c_int, c_uint) -> ssize_t;
    // SAFETY: as above; there is no process of this descriptor.
    unsafe {
        let call = mem::transmute::<NonNull<c_void>, ProcessMadvise>(found);
        call(-1, ptr::without_provenance(NOWHERE), 1, GUARD_INSTALL, 0);
    }
}

unsafe fn try_shmat(found: NonNull<c_void>) {
    type Shmat = unsafe extern "C" fn(c_int, *const c_void, c_int) -> *mut c_void;
    // SAFETY: as above; there is no segment of this number.
    unsafe {
        let call = mem::transmute::<NonNull<c_void>, Shmat>(found);
        call(-1, ptr::without_provenance(NOWHERE), libc::SHM_REMAP);
    }
}

unsafe fn try_syscall(found: NonNull<c_void>) {
    type Syscall = unsafe extern "C" fn(c_long, ...) -> c_long;
    let (flag, guard) = (libc::SHM_REMAP, GUARD_INSTALL);
    // SAFETY: as above.
    unsafe {
        let call = mem::transmute::<NonNull<c_void>, Syscall>(found);
        call(libc::SYS_madvise, NOWHERE, 1_usize, guard);
        call(libc::SYS_process_madvise, -1, NOWHERE, 1_usize, guard, 0);
        call(libc::SYS_shmat, -1, NOWHERE, flag);
    }
}
