//! The functions that calls are handed on to: those that the program would call without this library.
//!
//! The dynamic linker is asked for the next function of each name behind this library, so a library that stands in
//! between gets its calls, and it does not matter what the file of libibverbs is called. A libibverbs that a module was
//! loaded with for itself alone (`RTLD_LOCAL`) is not in that order: it is looked for where the calling module would find it,
//! then by its usual name.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to ask the dynamic linker, and to take libibverbs' functions by name and version.

#![allow(unsafe_code)]

use crate::apart;
use crate::caller::{Caller, IN_BOTH};
use crate::found::Found;
use crate::heap::secure_room;
use crate::linked;
use crate::modules::{self, Module, among_loaded, is_foreign, keep_loaded, library_around, loaded};
use crate::sandbox;
use libc::{c_int, c_uint, c_void, size_t};
use pinfold::AddressRange;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr, ibv_pd};
use pinfold_kernel::mapping::WalledMapping;
use pinfold_kernel::process::page_bytes;
use pinfold_kernel::thread::find_least_stack;
use std::ffi::CStr;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

/// The functions that calls are handed on to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Real {
    pub(crate) library: Functions,
    /// Those of the ABI from before 2007, where the library still has them.
    pub(crate) old: Option<InBoth>,
    pub(crate) unimport_pd: Option<unsafe extern "C" fn(*mut ibv_pd)>,
    pub(crate) fork_init: Option<unsafe extern "C" fn() -> c_int>,
    /// What keeps registered pages from forked children, and what ends that; both do nothing
    /// unless the program called `ibv_fork_init`.
    fork_ranges: Option<[ForkRange; 2]>,
}

/// Those of the present ABI; what an older libibverbs lacks may be absent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Functions {
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub(crate) reg_mr_iova: Option<RegisterAt<c_int>>,
    pub(crate) reg_mr_iova2: Option<RegisterAt<c_uint>>,
    pub(crate) rereg_mr: Option<Change>,
    pub(crate) reg_mr_ex: Option<RegisterBy>,
    pub(crate) reg_buf_mr: Option<RegisterPart>,
    is_fork_initialized: Option<unsafe extern "C" fn() -> c_uint>,
}

pub(crate) type RegisterAt<Access> =
    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, u64, Access) -> *mut ibv_mr;
/// By a structure of attributes. A vendor's libibverbs has a function of this name that takes two words more (address, length and
/// access), which the other does not look at.
pub(crate) type RegisterBy =
    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, size_t) -> *mut ibv_mr;
/// Of a buffer that libibverbs has allocated.
pub(crate) type RegisterPart =
    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, size_t, c_int) -> *mut ibv_mr;
pub(crate) type Change =
    unsafe extern "C" fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, size_t, c_int) -> c_int;

/// What is taken over here and exists in both ABIs. Version `IBVERBS_1.0` of it has other structures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InBoth {
    pub(crate) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
    pub(crate) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(crate) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(crate) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
}

type ForkRange = unsafe extern "C" fn(base: *mut c_void, size: size_t) -> c_int;

static REAL: Found<Real> = Found::new();

/// What is handed on to besides those that exist in both ABIs. A library in between may have some of all.
const PRESENT_ONLY: [&CStr; 10] = [
    c"ibv_reg_mr_iova",
    c"ibv_reg_mr_iova2",
    c"ibv_reg_mr_ex",
    c"ibv_reg_buf_mr",
    c"ibv_rereg_mr",
    c"ibv_is_fork_initialized",
    c"ibv_unimport_pd",
    c"ibv_fork_init",
    c"ibv_dontfork_range",
    c"ibv_dofork_range",
];

/// What calls are handed on to, found at the first call. `None` if there is none, or one older than 2007.
pub(crate) fn real() -> Option<Real> {
    real_of(Caller::UNKNOWN)
}

/// The same, by a call of this caller's: the first caller's libibverbs serves all.
pub(crate) fn real_of(caller: Caller) -> Option<Real> {
    REAL.get().copied().or_else(|| find(caller))
}

/// The same, by a call that only releases, which may be the first one: a destructor's. The dynamic linker has decided what
/// it unmaps before it runs destructors, and unmaps that also where it was opened meanwhile. So what such a call finds stays
/// loaded as well, but serves only calls of the same module that release, for as long as it can be told to be there.
pub(crate) fn real_to_release(caller: Caller) -> Option<Real> {
    REAL.get().copied().or_else(|| find_to_release(caller))
}

/// Finds the libibverbs that the program was started with; nothing where the program has its functions itself, and none
/// stands behind this library: to look further would load one that the program does not use. Later the dynamic linker's
/// lock may be held by a thread that waits for the one that registers: in a constructor of a library that is being loaded.
///
/// In memory that is there: a block of this library's heap would take a chunk of addresses in every program of verbs, and
/// another one in its children.
pub(crate) fn find_at_start() {
    if linked::libibverbs() {
        find_least_stack();
        modules::find_search();
        let found = apart::run(|| Source::next()?.functions()).flatten();
        found.into_iter().for_each(|found| _ = REAL.note(found));
        forget_linker_error();
    }
}

/// What this thread asked the dynamic linker for last may not have been there, which is no error of the program's. One that
/// was is lost with the first question, also if that was answered.
pub(crate) fn forget_linker_error() {
    // SAFETY: the linker's own text, which is not read.
    unsafe { libc::dlerror() };
}

/// What calls that only release have found, in as many modules.
static TO_RELEASE: [Found<ToRelease>; 16] = [const { Found::new() }; 16];

#[derive(Clone, Copy, Debug)]
struct ToRelease {
    /// `None` for code that is in no module.
    caller: Option<Module>,
    library: Module,
    real: Real,
}

impl ToRelease {
    /// `None` where it cannot be told later whether all of it is loaded still.
    fn new(caller: Caller, real: &Real) -> Option<Self> {
        let library = Module::around(real.library.dereg_mr as usize)?;
        let is_of_it = real.releasing().all(|address| library.contains(address));
        let caller = Module::around(caller.0);
        is_of_it.then_some(Self { caller, library, real: *real })
    }

    fn noted(caller: Caller) -> Option<Real> {
        let caller = Module::around(caller.0);
        let mut noted = TO_RELEASE.iter().filter_map(Found::get);
        let found = noted.find(|it| it.caller == caller && it.library.is_loaded())?;
        Some(found.real)
    }
}

#[cold]
fn find_to_release(caller: Caller) -> Option<Real> {
    ToRelease::noted(caller).or_else(|| find_and(caller, note_to_release))
}

fn note_to_release(caller: Caller, source: Source, real: &Real) {
    let Some(found) = ToRelease::new(caller, real) else { return source.close() };
    source.keep_loaded();
    // Another thread's may have been noted first.
    if ToRelease::noted(caller).is_none() {
        TO_RELEASE.iter().any(|place| place.note(found));
    }
}

#[cold]
fn find(caller: Caller) -> Option<Real> {
    let found = find_and(caller, |_, source, real| {
        source.keep_loaded();
        REAL.note(*real);
    });
    // Another caller's may have been noted first.
    REAL.get().copied().or(found)
}

/// `note` decides what becomes of where it was found, too.
#[cold]
fn find_and(caller: Caller, note: fn(Caller, Source, &Real)) -> Option<Real> {
    looked_up(|| {
        let source = Source::of(caller)?;
        let Some(real) = source.functions() else {
            source.close();
            return None;
        };
        note(caller, source, &real);
        Some(real)
    })
}

/// What the dynamic linker knows: asked on a stack of this library's. Without memory for one, and under a filter of the
/// program's own, which may forbid to map it, on the caller's: the program would have called the function at once.
pub(crate) fn looked_up<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    let look = || {
        modules::find_search();
        look()
    };
    let here = || catch_unwind(AssertUnwindSafe(&look)).ok().flatten();
    let found = if sandbox::is_the_program_s() { None } else { apart::run(look) };
    let found = found.unwrap_or_else(here);
    forget_linker_error();
    found
}

/// Whether there is memory for more, and to ask for some is not forbidden.
pub(crate) fn may_keep() -> bool {
    !sandbox::is_the_program_s() && secure_room()
}

/// Where the dynamic linker looks.
#[derive(Clone, Copy)]
enum Source {
    /// Behind this library.
    Next,
    /// In a module, and what it was loaded with.
    Module(NonNull<c_void>),
    /// In a libibverbs that was loaded here. The handle is never closed.
    System(NonNull<c_void>),
}

impl InBoth {
    fn found_by(find: impl Fn(&CStr) -> Option<NonNull<c_void>>) -> Option<Self> {
        let [reg_mr, dereg_mr, dealloc_pd, close_device] = IN_BOTH.map(find);
        // SAFETY: the header's types for functions of these names, whose library stays loaded; the structures are only
        // ever pointed to, and the old ABI's functions have the same types.
        unsafe {
            Some(Self {
                reg_mr: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
                >(reg_mr?),
                dereg_mr: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_mr) -> c_int,
                >(dereg_mr?),
                dealloc_pd: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_pd) -> c_int,
                >(dealloc_pd?),
                close_device: mem::transmute::<
                    NonNull<c_void>,
                    unsafe extern "C" fn(*mut ibv_context) -> c_int,
                >(close_device?),
            })
        }
    }
}

impl Source {
    /// Behind this library in the order of the program; else where the caller's module has it from; else in whatever
    /// module there is; else the system's. That one is opened, which takes memory and system calls: where these are missing or
    /// forbidden, a program cannot have it yet.
    fn of(caller: Caller) -> Option<Self> {
        Self::next()
            .or_else(|| library_around(caller.0, Self::of_module))
            .or_else(|| among_loaded(Self::of_module))
            .or_else(|| may_keep().then(Self::system_s).flatten())
    }

    fn next() -> Option<Self> {
        Some(Self::Next).filter(|next| next.has_verbs())
    }

    /// What the module of this file was loaded with, if it has libibverbs. Not asked of the program itself: what that was
    /// started with comes behind this library.
    fn of_module(file: &CStr) -> Option<Self> {
        let module = loaded(file).map(Self::Module)?;
        if module.has_verbs() {
            return Some(module);
        }
        module.close();
        None
    }

    fn system_s() -> Option<Self> {
        // SAFETY: the name is a C string, and the library's initialisers run as in every program that loads it.
        let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY) };
        NonNull::new(handle).map(Self::System)
    }

    /// Whether libibverbs itself is there, and not only a library that stands between.
    fn has_verbs(self) -> bool {
        [IN_BOTH[0], c"ibv_get_device_list"]
            .iter()
            .all(|name| self.named(name).is_some_and(is_foreign))
    }

    fn handle(self) -> *mut c_void {
        match self {
            Self::Next => libc::RTLD_NEXT,
            Self::Module(handle) | Self::System(handle) => handle.as_ptr(),
        }
    }

    /// Has what was found stay loaded: the program may unload what brought it. That may go.
    fn keep_loaded(self) {
        let (Self::Next | Self::Module(_)) = self else { return };
        let names = IN_BOTH.iter().chain(&PRESENT_ONLY);
        names.filter_map(|name| self.named(name)).for_each(keep_loaded);
        self.close();
    }

    /// Nothing of it is looked up any more.
    fn close(self) {
        if let Self::Module(handle) = self {
            // SAFETY: opened by `of_module`; the module stays for the program's part that had loaded it.
            unsafe { libc::dlclose(handle.as_ptr()) };
        }
    }

    fn functions(self) -> Option<Real> {
        let [dont, redo] =
            [c"ibv_dontfork_range", c"ibv_dofork_range"].map(|name| self.named(name));
        // SAFETY: the header's types for functions of these names, whose library stays loaded.
        unsafe {
            Some(Real {
                library: self.present()?,
                old: self.old(),
                unimport_pd: self.named(c"ibv_unimport_pd").map(|it| {
                    mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(*mut ibv_pd)>(it)
                }),
                fork_init: self.named(c"ibv_fork_init").map(|it| {
                    mem::transmute::<NonNull<c_void>, unsafe extern "C" fn() -> c_int>(it)
                }),
                fork_ranges: dont.zip(redo).map(|(dont, redo)| {
                    [dont, redo].map(|it| mem::transmute::<NonNull<c_void>, ForkRange>(it))
                }),
            })
        }
    }

    fn present(self) -> Option<Functions> {
        let InBoth { reg_mr, dereg_mr, dealloc_pd, close_device } =
            InBoth::found_by(|name| self.named(name))?;
        let reg_mr_iova = self.named(c"ibv_reg_mr_iova");
        let reg_mr_iova2 = self.named(c"ibv_reg_mr_iova2");
        let is_fork_initialized = self.named(c"ibv_is_fork_initialized");
        // SAFETY: the header's types for functions of these names, whose library stays loaded.
        unsafe {
            Some(Functions {
                reg_mr,
                dereg_mr,
                dealloc_pd,
                close_device,
                reg_mr_iova: reg_mr_iova
                    .map(|it| mem::transmute::<NonNull<c_void>, RegisterAt<c_int>>(it)),
                reg_mr_iova2: reg_mr_iova2
                    .map(|it| mem::transmute::<NonNull<c_void>, RegisterAt<c_uint>>(it)),
                rereg_mr: self
                    .named(c"ibv_rereg_mr")
                    .map(|it| mem::transmute::<NonNull<c_void>, Change>(it)),
                reg_mr_ex: self
                    .named(c"ibv_reg_mr_ex")
                    .map(|it| mem::transmute::<NonNull<c_void>, RegisterBy>(it)),
                reg_buf_mr: self
                    .named(c"ibv_reg_buf_mr")
                    .map(|it| mem::transmute::<NonNull<c_void>, RegisterPart>(it)),
                is_fork_initialized: is_fork_initialized.map(|it| {
                    mem::transmute::<NonNull<c_void>, unsafe extern "C" fn() -> c_uint>(it)
                }),
            })
        }
    }

    fn old(self) -> Option<InBoth> {
        InBoth::found_by(|name| self.of_old_abi(name))
    }

    /// The first function of this name. By name alone: a library that stands in between has no versions mostly, and is
    /// passed over by a caller that asks for one. Of libibverbs it is the default version, of the present ABI in each that has it.
    fn named(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open, or `RTLD_NEXT`; the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.handle(), name.as_ptr()) })
    }

    /// The old ABI's function of this name. One that has no versions serves every version that a program was linked with.
    fn of_old_abi(self, name: &CStr) -> Option<NonNull<c_void>> {
        let first = self.named(name);
        let is_present = first == self.versioned(name, c"IBVERBS_1.1");
        if is_present { self.versioned(name, c"IBVERBS_1.0") } else { first }
    }

    fn versioned(self, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: as above.
        NonNull::new(unsafe { libc::dlvsym(self.handle(), name.as_ptr(), version.as_ptr()) })
    }
}

/// Two pages of memory in a mapping of their own.
struct Pages(WalledMapping);

impl Pages {
    /// `None` if there is no memory.
    fn new() -> Option<Self> {
        WalledMapping::new(2 * page_bytes()).ok().map(Self)
    }

    fn start(&self) -> *mut c_void {
        self.0.start().as_ptr().cast()
    }

    /// Whether the kernel tells one page from the other.
    fn are_split(&self) -> bool {
        let range = AddressRange::new(self.start().addr(), 2 * page_bytes());
        let mappings = range.map(pinfold::mappings::mappings_in);
        matches!(mappings, Ok(Ok(mappings)) if mappings.len() > 1)
    }
}

impl Real {
    /// Where the functions of calls that only release are.
    fn releasing(&self) -> impl Iterator<Item = usize> {
        let Functions { dereg_mr, dealloc_pd, close_device, .. } = self.library;
        let present = [dereg_mr as usize, dealloc_pd as usize, close_device as usize];
        let old = self.old.map(|InBoth { dereg_mr, dealloc_pd, close_device, .. }| {
            [dereg_mr as usize, dealloc_pd as usize, close_device as usize]
        });
        let unimport_pd = self.unimport_pd.map(|it| it as usize);
        present.into_iter().chain(old.into_iter().flatten()).chain(unimport_pd)
    }

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
