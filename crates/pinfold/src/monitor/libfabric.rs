//! Pinfold as the memory monitor of libfabric's registration cache.
//!
//! libfabric's cache believes its own monitor, which misses changes that are made by other means than the functions it
//! patches. A monitor that is imported is asked before each use of an entry, so its answers make that cache truthful:
//!
//! ```no_run
//! use pinfold::monitor::libfabric::{self, FiOpen, ImportError};
//!
//! /// After `fi_getinfo` and before the first `fi_domain`.
//! fn follow_mappings(fi_open: FiOpen) -> Result<(), ImportError> {
//!     // SAFETY: it is libfabric's own function, and the library is never unloaded.
//!     unsafe { libfabric::import(fi_open) }
//! }
//! ```
//!
//! A program has `FiOpen` from its bindings of `fi_open`, or declares it: `unsafe extern "C" { fn fi_open(...) }`.
//!
//! # What it costs
//!
//! - A hit in libfabric's cache costs the monitor's check more, under libfabric's lock.
//! - The first registration of a range is not kept, nor is one by a thread that has not registered anything since the
//!   range was watched; `subscriptions` has the proof why.
//! - From the first cache on that libfabric opens: the monitor, and a thread that tells libfabric what to drop.
//!
//! # What is not covered
//!
//! - Entries that a provider finds without libfabric's asking the monitor (`opx` in 1.17).
//! - Memory of GPUs, which has monitors of its own there.
//! - Where another monitor was imported before (Open MPI imports one that believes its hooks), that one stays, and the
//!   answer is [`ImportError::Busy`].
//! - What is imported stays until the process ends; libfabric says in debug builds that it was not closed.
//!
//! Structures and order of calls are those of libfabric 1.13 to 2.6.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to call libfabric with structures of its header, and to be called by it.

#![allow(unsafe_code)]

use super::best::{Choice, best};
use super::subscriptions::{Call, ChangedRange, Subscriptions};
use crate::{AddressRange, Monitor};
use pinfold_core::foreign;
use pinfold_kernel::errno::{last_errno, set_errno};
use pinfold_kernel::thread::{LeanThread, NotCancelled, leave_directory_and_semaphores, sleep};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// libfabric's `fi_open`.
pub type FiOpen = unsafe extern "C" fn(
    version: u32,
    name: *const c_char,
    attributes: *mut c_void,
    bytes: usize,
    flags: u64,
    fid: *mut *mut c_void,
    context: *mut c_void,
) -> c_int;

/// libfabric asks another monitor, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// This libfabric takes no monitor: it is older than 1.13.
    #[error("libfabric takes no memory monitor ({errno}): it is older than 1.13")]
    Unsupported {
        /// As `fi_open` gave it, below 0.
        errno: i32,
    },
    /// One was imported before, or a cache is open already.
    #[error(
        "libfabric has another imported memory monitor, or an open cache: import before the first fi_domain; \
         for Open MPI's monitor set OMPI_MCA_memory=^patcher"
    )]
    Busy,
    /// It was refused otherwise.
    #[error("libfabric refuses the memory monitor ({errno})")]
    Refused {
        /// As `fi_import_fid` gave it, below 0.
        errno: i32,
    },
}

/// Has libfabric ask [`best`]'s monitor from the next cache on, for as long as the process lives.
///
/// The monitor is started by the first cache that libfabric opens. Where this machine has none that watches anything,
/// that cache is not opened: libfabric registers for each use.
///
/// # Errors
///
/// [`ImportError`]: nothing has changed.
///
/// # Safety
///
/// `fi_open` is libfabric's, which stays loaded; `fi_getinfo` has returned before, and no thread calls libfabric
/// meanwhile.
pub unsafe fn import(fi_open: FiOpen) -> Result<(), ImportError> {
    let start = || {
        let monitor = best().ok().filter(|best| best.chosen() != Choice::NoMonitor);
        monitor.map(Arc::new)
    };
    // SAFETY: the caller's promises.
    unsafe { import_with(fi_open, start) }
}

/// As [`import`], with the monitor that `start` gives. It is called once, by the thread that opens libfabric's first
/// cache.
///
/// # Errors
///
/// As [`import`].
///
/// # Safety
///
/// As [`import`]; the monitor is not [simulated](Monitor::is_simulated).
pub unsafe fn import_with<M: Monitor>(
    fi_open: FiOpen,
    start: fn() -> Option<Arc<M>>,
) -> Result<(), ImportError> {
    let mut cache = ptr::null_mut();
    let (none, name) = (ptr::null_mut(), c"mr_cache".as_ptr());
    // SAFETY: the caller's promise; the arguments are those of the header's example.
    let errno = unsafe { fi_open(VERSION, name, none, 0, 0, &raw mut cache, none) };
    if errno != 0 {
        return Err(ImportError::Unsupported { errno });
    }
    let imported = Box::into_raw(Imported::new(start));
    let cache = cache.cast::<Fid>();
    // SAFETY: libfabric has just made it, with functions for these calls; it keeps what is imported if it says 0, and
    // the box is leaked then, and ours alone otherwise.
    let errno = unsafe {
        let operations = (*cache).operations;
        let errno = ((*operations).bind)(cache, imported.cast(), 0);
        ((*operations).close)(cache);
        if errno != 0 {
            drop(Box::from_raw(imported));
        }
        errno
    };
    match -errno {
        0 => Ok(()),
        libc::EBUSY => Err(ImportError::Busy),
        _ => Err(ImportError::Refused { errno }),
    }
}

/// `FI_VERSION(1, 13)`.
const VERSION: u32 = 1 << 16 | 13;
/// `FI_CLASS_MEM_MONITOR`.
const CLASS: usize = 23;

/// `struct fid`.
#[repr(C)]
struct Fid {
    class: usize,
    context: *mut c_void,
    operations: *const FidOperations,
}

/// The beginning of `struct fi_ops`.
#[repr(C)]
struct FidOperations {
    bytes: usize,
    close: unsafe extern "C" fn(*mut Fid) -> c_int,
    bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
}

/// `struct fid_mem_monitor`.
#[repr(C)]
struct FidMonitor {
    fid: Fid,
    exported: *const Exported,
    /// libfabric's, from the import on.
    imported: *const Notifying,
}

/// `struct fi_ops_mem_monitor`: what libfabric calls.
#[repr(C)]
struct Exported {
    bytes: usize,
    start: unsafe extern "C" fn(*mut FidMonitor) -> c_int,
    stop: unsafe extern "C" fn(*mut FidMonitor),
    subscribe: unsafe extern "C" fn(*mut FidMonitor, *const c_void, usize) -> c_int,
    unsubscribe: unsafe extern "C" fn(*mut FidMonitor, *const c_void, usize),
    valid: unsafe extern "C" fn(*mut FidMonitor, *const c_void, usize) -> bool,
}

/// `struct fi_ops_mem_notify`: what libfabric is told by.
#[repr(C)]
struct Notifying {
    bytes: usize,
    notify: unsafe extern "C" fn(*mut FidMonitor, *const c_void, usize),
}

/// What is imported, leaked: libfabric's functions get its address, and their structure is its first field.
#[repr(C)]
struct Imported<M: Monitor> {
    /// libfabric writes some of it as it imports, before any other thread has it.
    fid: UnsafeCell<FidMonitor>,
    exported: Exported,
    start: fn() -> Option<Arc<M>>,
    /// Made by the first cache; `None` if there can be none.
    subscriptions: OnceLock<Option<Arc<Subscriptions<M>>>>,
}

/// Refused: the entry is not kept, and the registration as good as any (`FI_EAGAIN`).
const NOT_KEPT: c_int = -libc::EAGAIN;
/// No cache (`FI_ENOSYS`).
const NO_MONITOR: c_int = -libc::ENOSYS;

impl<M: Monitor> Imported<M> {
    fn new(start: fn() -> Option<Arc<M>>) -> Box<Self> {
        let fid = Fid { class: CLASS, context: ptr::null_mut(), operations: ptr::null() };
        let fid = FidMonitor { fid, exported: ptr::null(), imported: ptr::null() };
        let exported = Exported {
            bytes: size_of::<Exported>(),
            start: Self::on_start,
            stop: Self::on_stop,
            subscribe: Self::on_subscribe,
            unsubscribe: on_unsubscribe,
            valid: Self::on_valid,
        };
        let fid = UnsafeCell::new(fid);
        let mut imported = Box::new(Self { fid, exported, start, subscriptions: OnceLock::new() });
        imported.fid.get_mut().exported = &raw const imported.exported;
        imported
    }

    /// What was imported as `fid`.
    ///
    /// # Safety
    ///
    /// It is a leaked `Imported<M>`.
    unsafe fn of<'s>(fid: *mut FidMonitor) -> &'s Self {
        // SAFETY: the caller's promise; the structure is the first field.
        unsafe { &*fid.cast::<Self>() }
    }

    fn subscriptions(&self) -> Option<&Arc<Subscriptions<M>>> {
        self.subscriptions.get()?.as_ref()
    }

    /// Starts the monitor, and the thread that tells libfabric what to drop.
    fn begin(&self) -> Option<Arc<Subscriptions<M>>> {
        let subscriptions = Arc::new(Subscriptions::new((self.start)()?).ok()?);
        let feeder = Feeder { subscriptions: Arc::clone(&subscriptions), fid: self.fid.get() };
        LeanThread::spawn(c"pinfold-fabric", feeder, Feeder::run).ok()?;
        Some(subscriptions)
    }

    /// The first cache is opened. libfabric has one lock taken, which no other call here waits for.
    unsafe extern "C" fn on_start(fid: *mut FidMonitor) -> c_int {
        guarded(NO_MONITOR, || {
            // SAFETY: libfabric's promise, here and below: it calls with what was imported.
            let imported = unsafe { Self::of(fid) };
            let started = imported.subscriptions.get_or_init(|| imported.begin());
            let is_ours = started.as_ref().is_some_and(|it| !it.monitor().forked());
            if is_ours { 0 } else { NO_MONITOR }
        })
    }

    /// The last cache is closed.
    unsafe extern "C" fn on_stop(fid: *mut FidMonitor) {
        guarded((), || {
            // SAFETY: as above.
            let subscriptions = unsafe { Self::of(fid) }.subscriptions();
            subscriptions.into_iter().for_each(|it| it.clear());
        });
    }

    unsafe extern "C" fn on_subscribe(
        fid: *mut FidMonitor,
        start: *const c_void,
        bytes: usize,
    ) -> c_int {
        let here = 0_u8;
        let call = Call { thread: this_thread(), stack: (&raw const here).addr() };
        guarded(NOT_KEPT, || {
            // SAFETY: as above.
            let subscriptions = unsafe { Self::of(fid) }.subscriptions();
            let range = AddressRange::new(start.addr(), bytes).ok();
            let is_kept =
                subscriptions.zip(range).is_some_and(|(it, range)| it.subscribe(range, call));
            if is_kept { 0 } else { NOT_KEPT }
        })
    }

    unsafe extern "C" fn on_valid(
        fid: *mut FidMonitor,
        start: *const c_void,
        bytes: usize,
    ) -> bool {
        guarded(false, || {
            // SAFETY: as above.
            let subscriptions = unsafe { Self::of(fid) }.subscriptions();
            let range = AddressRange::new(start.addr(), bytes).ok();
            subscriptions.zip(range).is_some_and(|(it, range)| it.valid(range))
        })
    }
}

/// Another cache may keep the same range, and libfabric calls this also behind a subscription that was refused, so
/// nothing is forgotten by it.
unsafe extern "C" fn on_unsubscribe(_: *mut FidMonitor, _: *const c_void, _: usize) {}

/// Runs what is ours. No panic reaches libfabric, no cancellation ends the thread under libfabric's locks, and its
/// error number stays.
fn guarded<T>(otherwise: T, ours: impl FnOnce() -> T) -> T {
    let _not_cancelled = NotCancelled::new();
    let before = last_errno();
    let answer = foreign::call(ours).unwrap_or(otherwise);
    set_errno(before);
    answer
}

#[allow(clippy::cast_possible_truncation)] // an address, whatever type the C library gives it
fn this_thread() -> usize {
    // SAFETY: no argument; the C library reads a register.
    unsafe { libc::pthread_self() as usize }
}

/// Tells libfabric what changed, on a thread of its own: libfabric takes locks that its threads have while they call
/// this module, and no thread that a change of memory waits for may wait for them.
struct Feeder<M: Monitor> {
    subscriptions: Arc<Subscriptions<M>>,
    fid: *mut FidMonitor,
}

// SAFETY: the pointer is to what is leaked, and libfabric's functions may be called by any thread.
unsafe impl<M: Monitor> Send for Feeder<M> {}
// SAFETY: as above.
unsafe impl<M: Monitor> Sync for Feeder<M> {}

/// How long changes are gathered.
const GATHER: Duration = Duration::from_millis(10);

impl<M: Monitor> Feeder<M> {
    fn run(&self) {
        leave_directory_and_semaphores();
        loop {
            // A monitor that panics is asked anew, a moment later.
            let _ran_through = foreign::runs_through(|| self.round());
            sleep(GATHER);
        }
    }

    fn round(&self) {
        let monitor = self.subscriptions.monitor();
        let seen = monitor.notified();
        self.feed();
        monitor.wait(seen);
    }

    /// Once. The table's lock is not taken while libfabric is called, whose own locks come first.
    fn feed(&self) {
        let changed = self.subscriptions.changed();
        changed.iter().for_each(|ChangedRange { range, .. }| {
            let start = ptr::without_provenance(range.start());
            // SAFETY: imported, and so filled by libfabric, which is never unloaded.
            unsafe { ((*(*self.fid).imported).notify)(self.fid, start, range.len()) }
        });
        self.subscriptions.notified(&changed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::subscriptions::tests::ScriptedMonitor;
    use super::*;
    use std::ffi::CStr;
    use std::mem::offset_of;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

    /// What a libfabric has of its own.
    static IMPORTED: AtomicPtr<FidMonitor> = AtomicPtr::new(ptr::null_mut());
    static OPEN_FIDS: AtomicUsize = AtomicUsize::new(0);
    static DROPPED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());
    static OPERATIONS: FidOperations = FidOperations { bytes: 24, close, bind };
    static NOTIFYING: Notifying = Notifying { bytes: 16, notify };

    unsafe extern "C" fn open(
        version: u32,
        name: *const c_char,
        _: *mut c_void,
        bytes: usize,
        flags: u64,
        fid: *mut *mut c_void,
        _: *mut c_void,
    ) -> c_int {
        // SAFETY: `import_with` gives these.
        unsafe {
            if version < 0x1000d || CStr::from_ptr(name) != c"mr_cache" || bytes != 0 || flags != 0
            {
                return -libc::ENOSYS;
            }
            let made =
                Fid { class: 22, context: ptr::null_mut(), operations: &raw const OPERATIONS };
            *fid = Box::into_raw(Box::new(made)).cast();
        }
        OPEN_FIDS.fetch_add(1, SeqCst);
        0
    }

    unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
        // SAFETY: from the box of `open`.
        drop(unsafe { Box::from_raw(fid) });
        OPEN_FIDS.fetch_sub(1, SeqCst);
        0
    }

    unsafe extern "C" fn bind(_: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
        let other = other.cast::<FidMonitor>();
        // SAFETY: a monitor is what `import_with` binds.
        unsafe {
            let monitor = &mut *other;
            if flags != 0 || monitor.fid.class != CLASS || (*monitor.exported).bytes < 48 {
                return -libc::EINVAL;
            }
            if !IMPORTED.load(SeqCst).is_null() {
                return -libc::EBUSY;
            }
            monitor.imported = &raw const NOTIFYING;
        }
        IMPORTED.store(other, SeqCst);
        0
    }

    unsafe extern "C" fn notify(_: *mut FidMonitor, start: *const c_void, bytes: usize) {
        DROPPED.lock().unwrap().push((start.addr(), bytes));
    }

    unsafe extern "C" fn too_old(
        _: u32,
        _: *const c_char,
        _: *mut c_void,
        _: usize,
        _: u64,
        _: *mut *mut c_void,
        _: *mut c_void,
    ) -> c_int {
        -libc::ENOSYS
    }

    static MONITOR: OnceLock<Arc<ScriptedMonitor>> = OnceLock::new();

    fn started() -> Option<Arc<ScriptedMonitor>> {
        Some(Arc::clone(MONITOR.get_or_init(Arc::default)))
    }

    /// As `rdma/fabric.h` and `rdma/fi_ext.h` have them on 64 bits.
    #[test]
    fn structures_are_libfabric_s() {
        assert_eq!((size_of::<Fid>(), offset_of!(Fid, operations)), (24, 16));
        assert_eq!((offset_of!(FidOperations, close), offset_of!(FidOperations, bind)), (8, 16));
        assert_eq!((offset_of!(FidMonitor, exported), offset_of!(FidMonitor, imported)), (24, 32));
        assert_eq!((size_of::<FidMonitor>(), size_of::<Exported>()), (40, 48));
        assert_eq!((offset_of!(Exported, start), offset_of!(Exported, stop)), (8, 16));
        assert_eq!((offset_of!(Exported, subscribe), offset_of!(Exported, valid)), (24, 40));
        assert_eq!(offset_of!(Notifying, notify), 8);
        assert_eq!(offset_of!(Imported<ScriptedMonitor>, fid), 0);
    }

    #[test]
    fn what_libfabric_asks_is_answered_and_what_changed_is_dropped() {
        // SAFETY: the functions above; what they are given is leaked.
        let fid = unsafe {
            assert_eq!(import_with(too_old, started), Err(ImportError::Unsupported { errno: -38 }));
            assert_eq!(import_with(open, started), Ok(()));
            assert_eq!(import_with(open, started), Err(ImportError::Busy));
            IMPORTED.load(SeqCst)
        };
        assert_eq!(OPEN_FIDS.load(SeqCst), 0);
        let (start, bytes) = (ptr::without_provenance(0x10_000), 0x2000);
        // SAFETY: as libfabric calls it, with what was imported.
        unsafe {
            let exported = &*(*fid).exported;
            let subscribe = || (exported.subscribe)(fid, start, bytes);
            let valid = || (exported.valid)(fid, start, bytes);
            assert_eq!((subscribe(), valid()), (NOT_KEPT, false), "not started");
            assert_eq!((exported.start)(fid), 0);
            set_errno(pinfold_kernel::Errno(77));
            assert_eq!(subscribe(), NOT_KEPT);
            // A sanitizer may have the frames of equal calls at other places, which are taken for deeper ones.
            while subscribe() != 0 {}
            (exported.unsubscribe)(fid, start, bytes);
            assert!(valid());
            assert_eq!(last_errno(), pinfold_kernel::Errno(77));
            MONITOR.get().unwrap().change(0x11_000, 1);
            assert!(!valid());
            while subscribe() != 0 {}
            assert_eq!(*DROPPED.lock().unwrap(), [(0x10_000, 0x2000)], "before it was kept anew");
            assert!(valid() && !(exported.valid)(fid, ptr::null(), 0));
            for question in ["check", "replay", "forked", "notified", "wait"] {
                let monitor = MONITOR.get().unwrap();
                monitor.panics_at(question);
                // Asked by one of these, or by the thread that notifies.
                while !monitor.has_panicked() {
                    monitor.change(0x11_000, 1);
                    assert!(!valid(), "{question}");
                    subscribe();
                }
                monitor.change(0x11_000, 1);
                assert!(!valid(), "{question}");
                while subscribe() != 0 {}
                assert!(valid(), "{question}");
            }
            (exported.stop)(fid);
            assert!(!valid());
        }
    }

    #[test]
    fn without_a_monitor_libfabric_opens_no_cache() {
        let none: fn() -> Option<Arc<ScriptedMonitor>> = || None;
        let fid = Box::into_raw(Imported::new(none)).cast::<FidMonitor>();
        // SAFETY: as what is imported, until it is dropped.
        unsafe {
            let exported = &*(*fid).exported;
            assert_eq!((exported.start)(fid), NO_MONITOR);
            assert_eq!((exported.start)(fid), NO_MONITOR);
            (exported.stop)(fid);
            drop(Box::from_raw(fid.cast::<Imported<ScriptedMonitor>>()));
        }
    }
}
