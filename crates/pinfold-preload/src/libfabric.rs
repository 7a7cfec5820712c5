//! libfabric's own cache made truthful: as a program opens its first fabric, Pinfold is imported as the memory monitor.
//!
//! libfabric starts what is imported with its first cache; that starts the process's monitor, if it does not run yet.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to take libfabric's functions by name and to hand calls on to them, to import a
//! monitor, and to implement `Monitor` by handing each call to the process's.

#![allow(unsafe_code)]

use crate::caller::Caller;
use crate::calls::begin_early;
use crate::complaint::complain;
use crate::found::Found;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::hooks::note_kept;
use crate::keeper::Monitored;
use crate::modules::{among_loaded, is_foreign, keep_loaded, loaded};
use crate::process::Process;
use crate::real::{looked_up, may_keep};
use crate::settings::Settings;
use crate::{apart, environment, sandbox};
use libc::{c_int, c_void};
use pinfold::monitor::libfabric::{FiOpen, import_with};
use pinfold::{AddressRange, Monitor, Uncovered, Watch};
use pinfold_kernel::errno::{last_errno, set_errno};
use pinfold_kernel::thread::NotCancelled;
use std::ffi::CStr;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// libfabric's; the arguments are structures and places that it alone looks at.
#[derive(Clone, Copy, Debug)]
struct Functions {
    fabric: Fabric,
    /// Of the version with another structure, before 1.1.
    old_fabric: Option<Fabric>,
    fabric2: Option<Fabric2>,
    open: Option<FiOpen>,
}

type Fabric = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut c_void) -> c_int;
type Fabric2 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, u64, *mut c_void) -> c_int;

/// There is no libfabric, or none with this function (`FI_ENOSYS`).
const ABSENT: c_int = -libc::ENOSYS;

static FOUND: Found<Functions> = Found::new();

pub(crate) unsafe extern "C" fn fabric(
    attributes: *mut c_void,
    fabric: *mut *mut c_void,
    context: *mut c_void,
    caller: usize,
) -> c_int {
    let Some(functions) = functions() else { return ABSENT };
    let is_old = functions.old_fabric.filter(|_| Caller(caller).asked().old_fabric);
    let open = is_old.unwrap_or(functions.fabric);
    // SAFETY: the caller's promises, to the version that it asked for.
    functions.opened(unsafe { open(attributes, fabric, context) })
}

pub(crate) unsafe extern "C" fn fabric2(
    info: *mut c_void,
    fabric: *mut *mut c_void,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    let Some(functions) = functions() else { return ABSENT };
    // SAFETY: the caller's promises.
    functions.opened(
        functions.fabric2.map_or(ABSENT, |open| unsafe { open(info, fabric, flags, context) }),
    )
}

impl Functions {
    /// libfabric has answered this, and is initialised. No cache is open before the first fabric is.
    fn opened(&self, answer: c_int) -> c_int {
        if answer == 0 {
            let before = last_errno();
            let _not_cancelled = NotCancelled::new();
            self.open.iter().for_each(|&open| import(open));
            set_errno(before);
        }
        answer
    }

    fn found_by(find: impl Fn(&CStr) -> Option<NonNull<c_void>>) -> Option<Self> {
        let fabric = find(c"fi_fabric")?;
        // SAFETY: the header's types for functions of these names, whose library stays loaded.
        unsafe {
            Some(Self {
                fabric: mem::transmute::<NonNull<c_void>, Fabric>(fabric),
                old_fabric: None,
                fabric2: find(c"fi_fabric2")
                    .map(|it| mem::transmute::<NonNull<c_void>, Fabric2>(it)),
                open: find(c"fi_open").map(|it| mem::transmute::<NonNull<c_void>, FiOpen>(it)),
            })
        }
    }
}

fn functions() -> Option<Functions> {
    begin_early();
    FOUND.get().copied().or_else(find)
}

#[cold]
fn find() -> Option<Functions> {
    let before = last_errno();
    let _not_cancelled = NotCancelled::new();
    let found = looked_up(look_up);
    // Once: later the linker's lock may be held by a thread that waits for this one, or be what a forked child has of it.
    found.into_iter().for_each(|found| _ = FOUND.note(found));
    set_errno(before);
    found
}

/// Behind this library in the order of the program, else in the libfabric that a library has brought along for itself,
/// which stays loaded from now on: what is imported refers to it.
fn look_up() -> Option<Functions> {
    // SAFETY: a C string.
    let behind = unsafe { libc::dlsym(libc::RTLD_NEXT, c"fi_fabric".as_ptr()) };
    if NonNull::new(behind).is_some_and(is_foreign) {
        return functions_of(libc::RTLD_NEXT);
    }
    let opened = |file: &CStr| if is_libfabric(file) { loaded(file) } else { None };
    // The walk takes a lock that a child finds taken for ever, forked beside a thread that loads: where it can, the linker
    // searches.
    let handle =
        if sandbox::is_the_program_s() { among_loaded(opened) } else { loaded(c"libfabric.so.1") };
    functions_of(handle?.as_ptr())
}

/// Whether a loaded module is libfabric, told by its file: asked for a name without a path that no module has, the linker
/// would look for such a file, and a filter of the program's own may end it there.
fn is_libfabric(file: &CStr) -> bool {
    let name = file.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    matches!(name, b"libfabric.so" | b"libfabric.so.1") || name.starts_with(b"libfabric.so.1.")
}

fn functions_of(handle: *mut c_void) -> Option<Functions> {
    // A library in between may have one of them only.
    let kept = |function: *mut c_void| NonNull::new(function).inspect(|it| keep_loaded(*it));
    // SAFETY: the handle is open and never closed, or `RTLD_NEXT`; the names are C strings.
    let named = |name: &CStr| kept(unsafe { libc::dlsym(handle, name.as_ptr()) });
    // SAFETY: as above.
    let old = kept(unsafe { libc::dlvsym(handle, c"fi_fabric".as_ptr(), c"FABRIC_1.0".as_ptr()) });
    // SAFETY: that version of the function, with the same number of pointers.
    let old_fabric = old.map(|it| unsafe { mem::transmute::<NonNull<c_void>, Fabric>(it) });
    Functions::found_by(named).map(|found| Functions { old_fabric, ..found })
}

/// Once in the life of a process and its forked children, which have what their parent imported.
fn import(open: FiOpen) {
    static IMPORTED: AtomicU32 = AtomicU32::new(0);
    // Relaxed: the word carries nothing. Read first: a provider opens fabrics of its own. Without memory, and under a
    // filter of the program's own, not at all.
    if IMPORTED.load(Ordering::Relaxed) != 0
        || !may_keep()
        || IMPORTED.swap(1, Ordering::Relaxed) != 0
    {
        return;
    }
    let imported = apart::run(|| {
        // SAFETY: libfabric's own function, by its name; it has just opened a fabric, so it is initialised, and stays
        // loaded. Another thread may open a cache at this moment: libfabric then refuses, or has that one go on
        // with the monitor that it has.
        is_wanted().then(|| unsafe { import_with(open, monitor) })
    });
    if let Some(Some(Err(error))) = imported {
        complain(&format!("pinfold: libfabric's cache may be stale: {error}\n"));
    }
}

/// Whether it is asked for, and libfabric is to have a cache at all: an imported monitor is used whatever
/// `FI_MR_CACHE_MONITOR` says.
fn is_wanted() -> bool {
    let is = |name, value: &str| environment::at_start(name).is_some_and(|it| it == value);
    Settings::of_process().is_ok_and(|settings| settings.cache && settings.libfabric)
        && !is("FI_MR_CACHE_MONITOR", "disabled")
        && !is("FI_MR_CACHE_MAX_COUNT", "0")
}

fn monitor() -> Option<Arc<OfProcess>> {
    Process::current()?.monitor_for_libfabric().map(|monitor| Arc::new(OfProcess(monitor)))
}

/// The process's monitor, asked by threads with any stack.
#[derive(Debug)]
struct OfProcess(Monitored);

// SAFETY: every call goes to the monitor inside, whose promise it is.
unsafe impl Monitor for OfProcess {
    pinfold::forward_monitor!(self, self.0);

    fn watch(&self, range: AddressRange) -> Watch {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        note_kept(range);
        let refused = Watch::Uncovered(Uncovered::Refused { errno: libc::ENOMEM });
        apart::run_again(|| self.0.watch(range)).unwrap_or(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libfabric_is_told_by_the_last_part_of_its_path() {
        for file in [c"libfabric.so.1", c"/opt/lib/libfabric.so.1", c"./libfabric.so.1.30.0"] {
            assert!(is_libfabric(file), "{file:?}");
        }
        for file in [c"", c"/opt/libfabric.so.1/libother.so", c"libfabric.so.10", c"mylibfabric.so"]
        {
            assert!(!is_libfabric(file), "{file:?}");
        }
    }
}
