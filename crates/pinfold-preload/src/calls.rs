//! What each function does that this library takes over.
//!
//! Whatever is not served goes to libibverbs with the arguments that came, so its answer, its
//! error number and its demands on the arguments are libibverbs' own. A panic of ours, were there
//! one, is caught here and has the call passed through.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to be called from C: pointers are what libibverbs' manual
//! asks for, or libibverbs would go wrong by them just the same. A lease is kept for as long as the
//! program keeps its `ibv_mr`, which is longer than any scope here; the cache that it points
//! into is dropped only after all of its handles have ended (see `domains`).

#![allow(unsafe_code)]

use crate::caller::Caller;
use crate::domains::Served;
use crate::handles::{Claim, Claimed, Holding, Shown};
use crate::process::{Monitored, Process};
use crate::real::{Real, real};
use crate::rights::Rights;
use crate::settings::Settings;
use crate::sys::{errno, set_errno};
use libc::{c_int, c_uint, c_void, size_t};
use pinfold::Lease;
use pinfold::registrar::verbs::Verbs;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr, ibv_pd};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};

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
    let caller = Caller(caller);
    let request = Request { pd, address, length, flags: access.cast_unsigned() };
    // SAFETY: the caller's promises; the old ABI's structures go to the old ABI's function.
    unsafe {
        if let Some(mr) = request.served(|| !caller.asked().old_abi) {
            return mr;
        }
        // That function comes back to `reg_mr_iova2`, with libibverbs itself as the caller.
        if let Some(old) = real().and_then(|real| real.old).filter(|_| caller.asked().old_abi) {
            return (old.reg_mr)(pd, address, length, access);
        }
        passed(caller, |real| (real.library.reg_mr)(pd, address, length, access))
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
    let caller = Caller(caller);
    let request = Request { pd, address, length, flags: access };
    // SAFETY: the caller's promises.
    unsafe {
        if iova == address.addr() as u64
            && caller.asked().iova2
            && let Some(mr) = request.served(|| true)
        {
            return mr;
        }
        passed(caller, |real| match real.library.reg_mr_iova2 {
            Some(register) => register(pd, address, length, iova, access),
            None => refuse(),
        })
    }
}

pub(crate) unsafe fn reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    let request = Request { pd, address, length, flags: access.cast_unsigned() };
    // SAFETY: the caller's promises.
    unsafe {
        if iova == address.addr() as u64
            && let Some(mr) = request.served(|| true)
        {
            return mr;
        }
        passed(Caller::UNKNOWN, |real| match real.library.reg_mr_iova {
            Some(register) => register(pd, address, length, iova, access),
            None => refuse(),
        })
    }
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr, caller: usize) -> c_int {
    if let Some(status) = guarded(|| ended(mr)) {
        return status;
    }
    // SAFETY: the caller's promises.
    handed_on(|real| unsafe {
        match real.old.filter(|_| Caller(caller).asked().old_abi) {
            Some(old) => (old.dereg_mr)(mr),
            None => (real.library.dereg_mr)(mr),
        }
    })
}

/// A handle of ours gets a region of libibverbs' own behind it, which libibverbs then changes.
pub(crate) unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: size_t,
    access: c_int,
) -> c_int {
    let change = |real: &Real, mr| match real.library.rereg_mr {
        // SAFETY: the caller's promises, for `mr` or for what stands for it.
        Some(rereg) => unsafe { rereg(mr, flags, pd, address, length, access) },
        None => refused(),
    };
    let ours = guarded(|| match claim(mr) {
        Some(Ok((_, mut claimed))) => Some(reregister(&mut claimed, change)),
        Some(Err(status)) => Some(status),
        None => None,
    });
    ours.unwrap_or_else(|| handed_on(|real| change(real, mr)))
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd, caller: usize) -> c_int {
    forget_domain(pd);
    // SAFETY: the caller's promises.
    handed_on(|real| unsafe {
        match real.old.filter(|_| Caller(caller).asked().old_abi) {
            Some(old) => (old.dealloc_pd)(pd),
            None => (real.library.dealloc_pd)(pd),
        }
    })
}

/// The domain stays another process's; its structure here goes.
pub(crate) unsafe fn unimport_pd(pd: *mut ibv_pd) {
    forget_domain(pd);
    if let Some(unimport) = real().and_then(|real| real.unimport_pd) {
        // SAFETY: the caller's promises.
        unsafe { unimport(pd) };
    }
}

/// Whatever the program left registered goes before the device, which takes it along anyway.
pub(crate) unsafe extern "C" fn close_device(context: *mut ibv_context, caller: usize) -> c_int {
    guarded(|| {
        let process = Process::running()?;
        process.handles.claim_all_of(context).for_each(|claimed| {
            end(claimed);
        });
        process.domains.of_device(context).iter().for_each(|served| process.retire(served));
        Some(())
    });
    // SAFETY: the caller's promises.
    handed_on(|real| unsafe {
        match real.old.filter(|_| Caller(caller).asked().old_abi) {
            Some(old) => (old.close_device)(context),
            None => (real.library.close_device)(context),
        }
    })
}

/// Where the kernel copies registered pages for children, this is to do nothing, as it is in later
/// versions of libibverbs: earlier ones keep the pages from children, those too that a cache still
/// has registered when the program has long given them back.
pub(crate) fn fork_init() -> c_int {
    let caches = Settings::from_environment().is_ok_and(|settings| settings.cache);
    handed_on(|real| match real.fork_init {
        Some(_) if caches && real.kernel_copies_on_fork() => 0,
        // SAFETY: the function takes nothing.
        Some(init) => unsafe { init() },
        None => refused(),
    })
}

/// The process exits in an orderly way.
pub(crate) extern "C" fn at_exit() {
    guarded(|| {
        Process::running()?.finish();
        Some(())
    });
}

impl Request {
    /// A handle with a lease of the domain's cache, made if there is none and `may_make` says so.
    /// `None` for what passes through.
    ///
    /// # Safety
    ///
    /// As for `ibv_reg_mr`; if there is a cache for the domain's address or one may be made, the
    /// domain is of the present ABI.
    unsafe fn served(&self, may_make: impl FnOnce() -> bool) -> Option<*mut ibv_mr> {
        let before = errno();
        let served = guarded(|| {
            // What is never cached starts nothing.
            Rights::of(self.flags, true)?;
            let process = Process::current()?;
            let rights = Rights::of(self.flags, process.settings.cache_remote)?;
            // SAFETY: the caller's promise.
            unsafe { self.served_by(process, rights, may_make) }
        });
        if served.is_some() {
            set_errno(before);
        }
        served
    }

    /// # Safety
    ///
    /// As for [`served`](Self::served).
    unsafe fn served_by(
        &self,
        process: &'static Process,
        rights: Rights,
        may_make: impl FnOnce() -> bool,
    ) -> Option<*mut ibv_mr> {
        let pd = NonNull::new(self.pd)?;
        // SAFETY: the caller's promise.
        let served = unsafe {
            match process.domains.find(pd, rights.hints) {
                Some(served) => served,
                None if may_make() => {
                    let make = || process.cache(pd, rights);
                    process.domains.make(pd, rights, &process.room, make)?
                }
                None => return None,
            }
        };
        let vacant = process.handles.vacant()?;
        // SAFETY: the program lets the device use the memory until it deregisters it.
        let lease = unsafe { served.lease(self.address.cast(), self.length, rights.access) }?;
        let shown = self.shown(&lease);
        // SAFETY: the cache outlives the handle that the lease is kept in; see the file's header.
        let lease = unsafe { mem::transmute::<Lease<'_, _, _>, Lease<'static, _, _>>(lease) };
        Some(vacant.fill(shown, served, Holding::Lease(lease)))
    }

    /// What the program sees: what it asked for, and the keys of the region that serves it.
    fn shown(&self, lease: &Lease<'_, Verbs, Monitored>) -> Shown {
        let region = lease.handle();
        // SAFETY: the domain is the program's live one, and the region lives as long as the lease.
        let (context, handle) = unsafe { ((*self.pd).context, (*region.as_ptr()).handle) };
        let mr = ibv_mr {
            context,
            pd: self.pd,
            addr: self.address,
            length: self.length,
            handle,
            lkey: region.lkey(),
            rkey: region.rkey(),
        };
        Shown { mr, kind: 0, access: self.flags.cast_signed() }
    }
}

/// A registration by libibverbs. If it lacks room that our idle registrations take, they go and it
/// tries again; the caches' own registrations see to that themselves.
fn passed(caller: Caller, register: impl Fn(&Real) -> *mut ibv_mr) -> *mut ibv_mr {
    let Some(real) = real() else { return refuse() };
    let mut made = register(real);
    let process = Process::running().filter(|_| !caller.asked().is_us);
    let Some(process) = process else { return made };
    let why = errno();
    if made.is_null() && matches!(why, libc::ENOMEM | libc::EAGAIN | libc::ENOSPC) {
        let freed = guarded(|| Some(process.make_room()));
        set_errno(why);
        if freed.is_some_and(|freed| freed > 0) {
            made = register(real);
        }
    }
    if !made.is_null() {
        process.count_passed();
    }
    made
}

/// What the program's handle stands for, claimed, with the process that it is of.
///
/// `None` if it is none of ours, an error number if the program does not have it any more.
fn claim(mr: *mut ibv_mr) -> Option<Result<(&'static Process, Claimed<'static>), c_int>> {
    Process::generations().find_map(|process| match process.handles.claim(mr) {
        Claim::Foreign => None,
        Claim::Gone => Some(Err(gone())),
        Claim::Claimed(claimed) => Some(Ok((process, claimed))),
    })
}

/// Ends a handle of ours. `None` if it is none.
fn ended(mr: *mut ibv_mr) -> Option<c_int> {
    let before = errno();
    let (process, claimed) = match claim(mr)? {
        Ok(found) => found,
        Err(status) => return Some(status),
    };
    if process.is_forked() {
        // The registration is the parent's, and goes on.
        claimed.forget();
        return Some(0);
    }
    let status = end(claimed);
    if status == 0 {
        set_errno(before);
    }
    Some(status)
}

/// Ends the registration behind a handle of this process, then the handle.
fn end(mut claimed: Claimed<'_>) -> c_int {
    if let Holding::Own(region) = *claimed.holding() {
        // SAFETY: the region is the handle's own, and ends once.
        let status = handed_on(|real| unsafe { (real.library.dereg_mr)(region.as_ptr()) });
        if status != 0 {
            return status;
        }
    }
    claimed.end();
    0
}

/// Has libibverbs change a region in the place of the handle's lease, which ends if it could.
fn reregister(claimed: &mut Claimed<'_>, change: impl Fn(&Real, *mut ibv_mr) -> c_int) -> c_int {
    let Some(real) = real() else { return refused() };
    if let Holding::Own(region) = *claimed.holding() {
        let status = change(real, region.as_ptr());
        show(claimed, region);
        return status;
    }
    let Shown { mr, access, .. } = claimed.shown();
    // SAFETY: the program had the same registered with these rights.
    let own = unsafe { real.library.register(mr.pd, mr.addr, mr.length, access.cast_unsigned()) };
    let Some(own) = NonNull::new(own) else { return REREG_COMMAND_FAILED };
    let status = change(real, own.as_ptr());
    // Minus 3: the region is the new one, and something else went wrong.
    if status == 0 || status == REREG_NEW_IS_VALID {
        let lease = claimed.own(own);
        show(claimed, own);
        drop(lease);
    } else {
        let why = errno();
        // SAFETY: nobody else knows it.
        unsafe { (real.library.dereg_mr)(own.as_ptr()) };
        set_errno(why);
    }
    status
}

/// `IBV_REREG_MR_ERR_DO_FORK_OLD`.
const REREG_NEW_IS_VALID: c_int = -3;
/// `IBV_REREG_MR_ERR_CMD`.
const REREG_COMMAND_FAILED: c_int = -4;

/// Has the program see what libibverbs made of its region.
fn show(claimed: &mut Claimed<'_>, region: NonNull<ibv_mr>) {
    // SAFETY: the region is the handle's own; its fields are read one by one.
    unsafe {
        let region = region.as_ptr();
        claimed.shown().mr = ibv_mr {
            context: (*region).context,
            pd: (*region).pd,
            addr: (*region).addr,
            length: (*region).length,
            handle: (*region).handle,
            lkey: (*region).lkey,
            rkey: (*region).rkey,
        };
    }
}

/// Empties the caches of a domain, unless the program still has regions there: then libibverbs will
/// say `EBUSY` because of those.
fn forget_domain(pd: *mut ibv_pd) {
    guarded(|| {
        let process = Process::running()?;
        let idle = |served: &&std::sync::Arc<Served>| {
            !process.handles.has_any_of(std::sync::Arc::as_ptr(served))
        };
        let all = process.domains.of_domain(pd);
        all.iter().filter(idle).for_each(|served| process.retire(served));
        Some(())
    });
}

fn handed_on(call: impl FnOnce(&Real) -> c_int) -> c_int {
    real().map_or_else(refused, call)
}

/// What the kernel says of a region that is not there.
fn gone() -> c_int {
    set_errno(libc::ENOENT);
    libc::ENOENT
}

/// There is no such function, or no libibverbs.
fn refused() -> c_int {
    set_errno(libc::ENOSYS);
    libc::ENOSYS
}

fn refuse() -> *mut ibv_mr {
    refused();
    ptr::null_mut()
}

/// Runs what is ours. No panic reaches the program: it is as if nothing had been found.
fn guarded<T>(ours: impl FnOnce() -> Option<T>) -> Option<T> {
    catch_unwind(AssertUnwindSafe(ours)).ok().flatten()
}
