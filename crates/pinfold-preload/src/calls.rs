//! What each function does that this library takes over.
//!
//! Whatever is not kept goes to libibverbs with the arguments that came, so its answer, its error
//! number and its demands on the arguments are libibverbs' own; what is kept was made by the same
//! call. A panic of ours, were there one, is caught here and has the call passed through. Nothing of
//! ours is a cancellation point (`NotCancelled`).
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to be called from C: pointers are what libibverbs' manual asks for,
//! or libibverbs would go wrong by them just the same. And to read the environment that the dynamic linker hands over.

#![allow(unsafe_code)]

use crate::apart;
use crate::caller::Caller;
use crate::complaint;
use crate::environment;
use crate::keeper::Keeper;
use crate::main_thread;
use crate::process::{self, Process};
use crate::real::{Real, find_at_start, may_keep, real_of, real_to_release};
use crate::reasons::Reason;
use crate::report;
use crate::rights;
use crate::sandbox;
use crate::settings::Settings;
use crate::steps::{forget_driver, is_registering, through_us};
use crate::store::{DomainName, End, Key, Scope};
use libc::{c_char, c_int, c_uint, c_void, size_t};
use pinfold::registrar::verbs::ffi::{IBV_ACCESS_OPTIONAL_RANGE, ibv_context, ibv_mr, ibv_pd};
use pinfold_kernel::Errno;
use pinfold_kernel::errno::{last_errno, set_errno};
use pinfold_kernel::process::process_id;
use pinfold_kernel::thread::{NotCancelled, thread_id};
use std::ffi::CStr;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};

/// Of `infiniband/verbs.h`: nothing was changed.
const IBV_REREG_MR_ERR_INPUT: c_int = -1;
/// The kernel or the driver refused: of all failures the one that a lack of room may be behind. -5 is a refusal, too, behind
/// which the marks for forks are wrong; after others the change was made, or never asked for.
const IBV_REREG_MR_ERR_CMD: c_int = -4;

/// What a program wants registered.
#[derive(Clone, Copy)]
struct Request {
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    flags: c_uint,
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    access: c_int,
    caller: usize,
) -> *mut ibv_mr {
    begin_early();
    let caller = Caller(caller);
    let request = Request { pd, address, length, flags: access.cast_unsigned() };
    // SAFETY: the caller's promises; the old ABI's structures go to the old ABI's function. The present
    // one comes back to `reg_mr_iova2`, with the caller's address or this library's.
    unsafe {
        if let Some(old) =
            guarded(|| real_of(caller)).and_then(|real| real.old).filter(|_| caller.asked().old_abi)
        {
            let register = |_: &Real| through_us(|| (old.reg_mr)(pd, address, length, access));
            return passed(caller, Reason::OldAbi, register);
        }
        let register =
            |real: &Real| through_us(|| (real.library.reg_mr)(pd, address, length, access));
        request.kept(&register).unwrap_or_else(|reason| passed(caller, reason, register))
    }
}

/// Called from a program, or by the jump at the end of libibverbs' own `ibv_reg_mr`; see `caller`.
pub(crate) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    iova: u64,
    access: c_uint,
    caller: usize,
) -> *mut ibv_mr {
    begin_early();
    let caller = Caller(caller);
    let request = Request { pd, address, length, flags: access };
    // SAFETY: the caller's promises.
    let register = |real: &Real| through_us(|| unsafe { request.at(iova, real) });
    _ = guarded(|| real_of(caller));
    let kept = if !caller.asked().iova2 {
        Err(Reason::OwnHandle)
    } else if iova != address.addr() as u64 {
        Err(Reason::ForeignAddress)
    } else {
        // SAFETY: the caller's promises.
        unsafe { request.kept(&register) }
    };
    kept.unwrap_or_else(|reason| passed(caller, reason, register))
}

pub(crate) unsafe extern "C" fn reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    iova: u64,
    access: c_int,
    caller: usize,
) -> *mut ibv_mr {
    begin_early();
    let caller = Caller(caller);
    _ = guarded(|| real_of(caller));
    let request = Request { pd, address, length, flags: access.cast_unsigned() };
    // SAFETY: the caller's promises.
    let register = |real: &Real| through_us(|| unsafe { request.demanded_at(iova, real) });
    let kept = if iova == address.addr() as u64 {
        // SAFETY: the caller's promises.
        unsafe { request.kept(&register) }
    } else {
        Err(Reason::ForeignAddress)
    };
    kept.unwrap_or_else(|reason| passed(caller, reason, register))
}

pub(crate) unsafe extern "C" fn reg_mr_ex(
    pd: *mut ibv_pd,
    attributes: *mut c_void,
    third: size_t,
    fourth: size_t,
    caller: usize,
) -> *mut ibv_mr {
    begin_early();
    passed(Caller(caller), Reason::ByAttributes, |real| match real.library.reg_mr_ex {
        // SAFETY: the caller's promises. libibverbs only reads the attributes, so that they serve a second attempt, too.
        Some(register) => through_us(|| unsafe { register(pd, attributes, third, fourth) }),
        None => unsupported_registration(),
    })
}

/// libibverbs' own comes back to `reg_mr_ex` where its functions call each other by the dynamic linker.
pub(crate) unsafe extern "C" fn reg_buf_mr(
    pd: *mut ibv_pd,
    buffer: *mut c_void,
    address: *mut c_void,
    length: size_t,
    access: c_int,
    caller: usize,
) -> *mut ibv_mr {
    begin_early();
    passed(Caller(caller), Reason::ByAttributes, |real| match real.library.reg_buf_mr {
        // SAFETY: the caller's promises.
        Some(register) => through_us(|| unsafe { register(pd, buffer, address, length, access) }),
        None => unsupported_registration(),
    })
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr, caller: usize) -> c_int {
    let caller = Caller(caller);
    // SAFETY: the caller's promises.
    match guarded(|| unsafe { ended(mr, caller) }) {
        Some(End::Kept) => return 0,
        Some(End::Twice) => return gone(),
        Some(End::Foreign) | None => {}
    }
    // SAFETY: as above.
    released(caller, |real| unsafe {
        match real.old.filter(|_| caller.asked().old_abi) {
            Some(old) => (old.dereg_mr)(mr),
            None => (real.library.dereg_mr)(mr),
        }
    })
}

/// What the program changes is libibverbs' alone from now on. If the change lacks room that idle registrations take, they
/// go and it is tried again: what stands behind a refused change is undefined, and a later one may make it defined.
pub(crate) unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    access: c_int,
) -> c_int {
    let keeper = guarded(|| Process::running()?.keeper());
    guarded(|| {
        if !keeper.is_some_and(|keeper| keeper.forget(mr)) {
            // SAFETY: the caller's promise.
            Process::inherited().for_each(|process| unsafe { process.note_end(mr) });
        }
        Some(())
    });
    // Mostly a libibverbs was found as what is changed was registered. There is no place to tell the caller by.
    handed_on(Caller::UNKNOWN, |real| {
        let Some(rereg) = real.library.rereg_mr else {
            unsupported();
            return IBV_REREG_MR_ERR_INPUT;
        };
        // SAFETY: the caller's promises.
        let change = || unsafe { rereg(mr, flags, pd, address, length, access) };
        let _not_cancelled = NotCancelled::new();
        let refused = |&status: &c_int| status == IBV_REREG_MR_ERR_CMD;
        keeper.map_or_else(change, |keeper| keeper.with_room(change, refused))
    })
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd, caller: usize) -> c_int {
    let caller = Caller(caller);
    // SAFETY: the caller's promises.
    let scope = unsafe { domain_of(pd) }.map(Scope::Domain);
    scope.into_iter().for_each(|scope| {
        empty(scope);
        with_inherited(|keeper| keeper.empty_inherited(scope));
    });
    // SAFETY: the caller's promises.
    let status = released(caller, |real| unsafe {
        match real.old.filter(|_| caller.asked().old_abi) {
            Some(old) => (old.dealloc_pd)(pd),
            None => (real.library.dealloc_pd)(pd),
        }
    });
    if status == 0 {
        // What was registered there and is known still was ended by another route.
        scope.into_iter().for_each(forget);
    }
    status
}

/// The domain stays another process's; its structure here goes.
pub(crate) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd, caller: usize) {
    // SAFETY: the caller's promises.
    unsafe { domain_of(pd) }.map(Scope::Domain).into_iter().for_each(empty);
    if let Some(unimport) =
        guarded(|| real_to_release(Caller(caller))).and_then(|real| real.unimport_pd)
    {
        // SAFETY: the caller's promises.
        unsafe { unimport(pd) };
    }
}

/// What is idle goes before the device, which takes everything else along.
pub(crate) unsafe extern "C" fn close_device(context: *mut ibv_context, caller: usize) -> c_int {
    let (caller, scope) = (Caller(caller), Scope::Device(context.addr()));
    empty(scope);
    forget(scope);
    with_inherited(|keeper| keeper.forget_inherited(context.addr()));
    // SAFETY: the caller's promises.
    released(caller, |real| unsafe {
        match real.old.filter(|_| caller.asked().old_abi) {
            Some(old) => (old.close_device)(context),
            None => {
                // Before the number may be another's.
                forget_driver((*context).cmd_fd);
                (real.library.close_device)(context)
            }
        }
    })
}

/// Where the kernel copies registered pages for children, this is to do nothing, as it is in later
/// versions of libibverbs: earlier ones keep the pages from children, those too that a cache still
/// has registered when the program has long given them back.
pub(crate) extern "C" fn fork_init(caller: usize) -> c_int {
    begin_early();
    // To parse what is set takes memory. Where that is missing, and under a filter, nothing is kept.
    let may_parse = || !sandbox::is_the_program_s() && (!environment::is_any_set() || may_keep());
    let may_cache = || may_parse() && Settings::of_process().is_ok_and(|settings| settings.cache);
    let caches = || Process::running().is_some() || may_cache();
    let is_needless =
        |real: &Real| guarded(|| (caches() && real.kernel_copies_on_fork()).then_some(()));
    handed_on(Caller(caller), |real| match real.fork_init {
        Some(_) if is_needless(real).is_some() => 0,
        // SAFETY: the function takes nothing.
        Some(init) => unsafe { init() },
        None => refused(),
    })
}

/// What the GNU C library calls as it loads a library: with the arguments of `main`.
pub(crate) type AtStart =
    unsafe extern "C" fn(c_int, *const *const c_char, environment: *const *const c_char);

/// The library is loaded.
///
/// # Safety
///
/// The arguments are those of `main`.
pub(crate) unsafe extern "C" fn at_start(
    _: c_int,
    _: *const *const c_char,
    environment: *const *const c_char,
) {
    // SAFETY: the linker's own array. The program does not run yet, and loading a library later takes what it says of the
    // environment at that moment.
    guarded(|| unsafe { begin(environment) });
}

/// Whether what follows from the start is noted, or is being noted by the first thread.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// Once in the life of a process and its forked children.
///
/// # Safety
///
/// As for [`strings`], while this call lasts.
unsafe fn begin(environment: *const *const c_char) -> Option<()> {
    // Relaxed: on the first thread alone, if not as the library is loaded.
    if HAS_BEGUN.swap(true, Ordering::Relaxed) {
        return None;
    }
    // SAFETY: the caller's promise.
    environment::note_start(unsafe { strings(environment) });
    sandbox::note_start();
    complaint::note_start();
    main_thread::note_start();
    process::note_start();
    find_at_start();
    report::note_start();
    Some(())
}

/// The strings of an environment.
///
/// # Safety
///
/// `array` is null, or an array of C strings that ends with null. No other thread changes it for as long as the strings are
/// used.
unsafe fn strings<'s>(array: *const *const c_char) -> impl Iterator<Item = &'s [u8]> {
    let mut next = array;
    iter::from_fn(move || {
        // SAFETY: the caller's promise: null, or within the array, whose end is null.
        unsafe {
            let string = next.as_ref().copied().filter(|string| !string.is_null())?;
            next = next.add(1);
            Some(CStr::from_ptr(string).to_bytes())
        }
    })
}

/// Before a call that asks for settings: a constructor of a library that the program was started with may make it before
/// this library's own has run. On the first thread alone, which is the one that starts the program; and not once the
/// program has restricted itself, which may forbid to ask what is noted.
pub(crate) fn begin_early() {
    // Relaxed: as in `begin`.
    if !HAS_BEGUN.load(Ordering::Relaxed) {
        begin_before_the_start();
    }
}

#[cold]
fn begin_before_the_start() {
    // By the name that is the C library's own: `environ` may be a variable of the program's.
    unsafe extern "C" {
        static __environ: *const *const c_char;
    }
    guarded(|| {
        let may_begin = !sandbox::is_seen() && thread_id() == process_id();
        // SAFETY: the C library has set it before any constructor but its own. A thread that a constructor has started must
        // not change it now, as with every constructor that looks up a variable.
        may_begin.then(|| unsafe { begin((&raw const __environ).read()) }).flatten()
    });
}

/// The process exits in an orderly way.
pub(crate) extern "C" fn at_exit() {
    guarded(|| Process::running()?.leftovers().map(|keeper| keeper.empty_at_the_end()));
    guarded(|| {
        let process = Process::running().or_else(Process::silent);
        let process = process.filter(|process| process.has_last_word())?;
        apart::run(|| process.finish())
    });
}

impl Request {
    /// What `ibv_reg_mr_iova2` does, with whatever libibverbs has. An older one, from before there were flags that a device
    /// may ignore, gets none of those, as the present one does with an older kernel.
    ///
    /// # Safety
    ///
    /// As for `ibv_reg_mr_iova2`.
    unsafe fn at(&self, iova: u64, real: &Real) -> *mut ibv_mr {
        let &Self { pd, address, length, flags } = self;
        match real.library.reg_mr_iova2 {
            // SAFETY: the caller's promise.
            Some(register) => unsafe { register(pd, address, length, iova, flags) },
            None => {
                let demanded = Self { flags: flags & !IBV_ACCESS_OPTIONAL_RANGE, ..*self };
                // SAFETY: as above.
                unsafe { demanded.demanded_at(iova, real) }
            }
        }
    }

    /// What `ibv_reg_mr_iova` does, with whatever libibverbs has: an older one registers at the address of the memory only.
    ///
    /// # Safety
    ///
    /// As for `ibv_reg_mr_iova`.
    unsafe fn demanded_at(&self, iova: u64, real: &Real) -> *mut ibv_mr {
        let &Self { pd, address, length, flags } = self;
        let access = flags.cast_signed();
        match real.library.reg_mr_iova {
            // SAFETY: the caller's promise.
            Some(register) => unsafe { register(pd, address, length, iova, access) },
            None if iova == address.addr() as u64 => {
                // SAFETY: as above.
                unsafe { (real.library.reg_mr)(pd, address, length, access) }
            }
            None => unsupported_registration(),
        }
    }

    /// A registration that is idle, or one made by `register` and to be kept; or why it passes through.
    ///
    /// # Safety
    ///
    /// As for `ibv_reg_mr`, of the present ABI.
    unsafe fn kept(&self, register: &dyn Fn(&Real) -> *mut ibv_mr) -> Result<*mut ibv_mr, Reason> {
        let before = last_errno();
        // SAFETY: the caller's promise.
        let kept = caught(|| Some(unsafe { self.kept_by_process(register) }));
        let kept = kept.unwrap_or(Err(Reason::Fault));
        if kept.is_ok_and(|mr| !mr.is_null()) || kept.is_err() {
            set_errno(before);
        }
        kept
    }

    /// # Safety
    ///
    /// As for `kept`.
    unsafe fn kept_by_process(
        &self,
        register: &dyn Fn(&Real) -> *mut ibv_mr,
    ) -> Result<*mut ibv_mr, Reason> {
        // The call that this one is part of is looked at.
        if is_registering() {
            return Err(Reason::OwnHandle);
        }
        // What is never kept starts nothing.
        rights::obstacle(self.flags, true).map_or(Ok(()), Err)?;
        // Without one, nothing is counted.
        let process = Process::current().ok_or(Reason::Restricted)?;
        rights::obstacle(self.flags, process.settings.cache_remote).map_or(Ok(()), Err)?;
        // SAFETY: the caller's promise.
        let key = unsafe { self.key() }.ok_or(Reason::NoMemory)?;
        if let Some(found) = process.keeper().and_then(|keeper| keeper.find(&key)) {
            return Ok(found.as_ptr());
        }
        process.keeper_for(&key)?.register(key, register)
    }

    /// # Safety
    ///
    /// The domain is a live one of the present ABI, or null.
    unsafe fn key(&self) -> Option<Key> {
        // SAFETY: the caller's promise.
        let domain = unsafe { domain_of(self.pd) }?;
        let (start, length) = (self.address.addr(), self.length);
        let key = Key { start, length, domain, flags: self.flags };
        key.range().map(|_| key)
    }
}

/// A registration by libibverbs, for this `reason`. If it lacks room that idle ones take, they go and it tries again.
fn passed(caller: Caller, reason: Reason, register: impl Fn(&Real) -> *mut ibv_mr) -> *mut ibv_mr {
    let _not_cancelled = NotCancelled::new();
    let Some(real) = guarded(|| real_of(caller)) else { return refuse() };
    let is_own_call = is_registering() || caller.asked().is_us;
    let process = if is_own_call { None } else { guarded(Process::current) };
    let Some(process) = process else { return register(&real) };
    let made = match process.keeper() {
        Some(keeper) => keeper.with_room(|| register(&real), |made| made.is_null()),
        None => register(&real),
    };
    if !made.is_null() {
        process.count_passed(reason);
        guarded(|| process.keeper().map(|keeper| keeper.note_passed(made)));
    }
    made
}

/// What becomes of a handle that the program gives back.
///
/// # Safety
///
/// As for `ibv_dereg_mr`.
unsafe fn ended(mr: *mut ibv_mr, caller: Caller) -> Option<End> {
    let handle = NonNull::new(mr)?;
    if caller.asked().old_abi {
        return None;
    }
    let keeper = Process::running().and_then(Process::keeper);
    // SAFETY: the caller's promise.
    let end = keeper.map_or(End::Foreign, |keeper| unsafe { keeper.end(handle) });
    if end == End::Foreign {
        // SAFETY: as above.
        Process::inherited().for_each(|process| unsafe { process.note_end(mr) });
    }
    Some(end)
}

/// `None` without one.
///
/// # Safety
///
/// The domain is a live one, or null. One of the old ABI begins with the same fields, and is no domain of what is kept.
unsafe fn domain_of(pd: *mut ibv_pd) -> Option<DomainName> {
    let pd = NonNull::new(pd)?.as_ptr();
    // SAFETY: the caller's promise.
    let (device, number) = unsafe { ((*pd).context.expose_provenance(), (*pd).handle) };
    Some(DomainName { address: pd.addr(), device, number })
}

/// Deregisters what is idle in `scope`.
fn empty(scope: Scope) {
    guarded(|| Process::running()?.keeper().map(|keeper| keeper.empty(scope)));
}

/// Calls `heed` with each keeper that this process, a forked child, has from its parents.
fn with_inherited(heed: impl Fn(&Keeper)) {
    guarded(|| {
        Process::inherited().filter_map(Process::keeper).for_each(heed);
        Some(())
    });
}

/// Forgets what the program has in `scope`.
fn forget(scope: Scope) {
    guarded(|| Process::running()?.keeper().map(|keeper| keeper.forget_live(scope)));
}

/// By this caller's libibverbs, if it is the first to call.
fn handed_on(caller: Caller, call: impl FnOnce(&Real) -> c_int) -> c_int {
    // The search for libibverbs opens files.
    guarded(|| real_of(caller)).map_or_else(refused, |real| call(&real))
}

/// The same, of a call that only releases.
fn released(caller: Caller, call: impl FnOnce(&Real) -> c_int) -> c_int {
    guarded(|| real_to_release(caller)).map_or_else(refused, |real| call(&real))
}

/// What the kernel says of a region that is not there.
fn gone() -> c_int {
    set_errno(Errno(libc::ENOENT));
    libc::ENOENT
}

/// An older libibverbs lacks the function, which a program cannot tell by a weak reference: what the present one says
/// where a device's driver lacks it.
fn unsupported() {
    set_errno(Errno(libc::EOPNOTSUPP));
}

fn unsupported_registration() -> *mut ibv_mr {
    unsupported();
    ptr::null_mut()
}

/// There is no libibverbs.
fn refused() -> c_int {
    set_errno(Errno(libc::ENOSYS));
    libc::ENOSYS
}

fn refuse() -> *mut ibv_mr {
    refused();
    ptr::null_mut()
}

/// Runs what is ours. No panic reaches the program: it is as if nothing had been found. Nor does an error number.
fn guarded<T>(ours: impl FnOnce() -> Option<T>) -> Option<T> {
    let before = last_errno();
    let result = caught(ours);
    set_errno(before);
    result
}

/// As [`guarded`], where the error number may be libibverbs' own.
fn caught<T>(ours: impl FnOnce() -> Option<T>) -> Option<T> {
    let _not_cancelled = NotCancelled::new();
    catch_unwind(AssertUnwindSafe(ours)).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_number_of_ours_reaches_no_program() {
        set_errno(Errno(libc::EXDEV));
        let ours = || {
            set_errno(Errno(libc::EAGAIN));
            Some(1)
        };
        assert_eq!((guarded(ours), last_errno()), (Some(1), Errno(libc::EXDEV)));
        let panics = || -> Option<u8> {
            set_errno(Errno(libc::EAGAIN));
            panic!("of ours");
        };
        assert_eq!((guarded(panics), last_errno()), (None, Errno(libc::EXDEV)));
    }

    #[test]
    fn an_environment_ends_with_null_and_may_be_none() {
        let strings_of = |array: *const *const c_char| -> Vec<Vec<u8>> {
            // SAFETY: null, or the array below.
            unsafe { strings(array) }.map(<[u8]>::to_vec).collect()
        };
        let array = [c"A=1".as_ptr(), c"".as_ptr(), std::ptr::null(), c"B=2".as_ptr()];
        assert_eq!(strings_of(array.as_ptr()), [&b"A=1"[..], b""]);
        assert!(strings_of(std::ptr::null()).is_empty());
    }
}
