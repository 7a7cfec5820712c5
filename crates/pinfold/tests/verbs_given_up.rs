//! A region that a device does not let go of: asked for by two suspensions at once, and behind a suspension that did not
//! come about because of it. And what a dmabuf is registered with, which Soft-RoCE takes none of. The library is a stand-in: no
//! device is needed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to stand in for libibverbs: no memory is touched through what it registers.

#![allow(unsafe_code, missing_docs)]
#![allow(clippy::unwrap_used, clippy::panic)]

use pinfold::monitor::NoMonitor;
use pinfold::registrar::verbs::{DmabufPart, Domain, Library, Verbs, ffi::*};
use pinfold::suspend::{SuspendProgress, SuspensionTerms, Why};
use pinfold::{Access, AddressRange, Cache, Config, Lease, RegisterError, Registrar};
use pinfold_core::{DeregisterError, Suspend};
use pinfold_kernel::descriptor::memory_file;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

const PAGE: usize = 4096;

/// How often the device was asked to let go; how often it may answer.
static ASKED: AtomicUsize = AtomicUsize::new(0);
static ANSWERS: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Whether it was taken away.
static IS_TAKEN_AWAY: AtomicBool = AtomicBool::new(false);
/// Why it does not.
static REFUSAL: AtomicI32 = AtomicI32::new(libc::EBUSY);
/// How many regions were registered: each has a key of its own.
static REGISTERED: AtomicU32 = AtomicU32::new(0);
/// The test that has the stand-in.
static TURN: Mutex<()> = Mutex::new(());

extern "C" fn name(_: *mut ibv_device) -> *const c_char {
    c"stand-in".as_ptr()
}

unsafe extern "C" fn query(_: *mut ibv_context, attributes: *mut ibv_device_attr) -> c_int {
    // SAFETY: there is room for the answer, all zeros.
    unsafe {
        (*attributes).max_mr = 100;
        (*attributes).max_mr_size = 1 << 40;
    }
    0
}

/// The kernel's own, as long as there is a device.
extern "C" fn make_channel(_: *mut ibv_context) -> *mut ibv_comp_channel {
    if IS_TAKEN_AWAY.load(SeqCst) {
        // SAFETY: this thread's own.
        unsafe { *libc::__errno_location() = libc::EIO };
        return std::ptr::null_mut();
    }
    NonNull::dangling().as_ptr()
}

extern "C" fn end_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}

unsafe extern "C" fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut ibv_mr {
    // SAFETY: the test's own.
    let context = unsafe { (*pd).context };
    let key = REGISTERED.fetch_add(1, SeqCst) + 1;
    Box::leak(Box::new(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }))
}

/// A memory window is bound to it, unless told otherwise.
extern "C" fn deregister(_: *mut ibv_mr) -> c_int {
    let number = ASKED.fetch_add(1, SeqCst);
    while ANSWERS.load(SeqCst) <= number {
        thread::yield_now();
    }
    REFUSAL.load(SeqCst)
}

/// The flags of the latest.
static DMABUF_FLAGS: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" fn register_dmabuf(
    pd: *mut ibv_pd,
    _: u64,
    length: usize,
    _: u64,
    _: c_int,
    flags: c_int,
) -> *mut ibv_mr {
    DMABUF_FLAGS.store(flags, SeqCst);
    // SAFETY: the caller's domain.
    unsafe { register(pd, std::ptr::null_mut(), length, flags) }
}

extern "C" fn nothing() -> c_int {
    libc::ENOSYS
}

fn library() -> &'static Library {
    let find = |wanted: &CStr, _: &CStr| {
        let function = match wanted.to_str().unwrap() {
            "ibv_get_device_name" => name as *mut c_void,
            "ibv_query_device" => query as *mut c_void,
            "ibv_create_comp_channel" => make_channel as *mut c_void,
            "ibv_destroy_comp_channel" => end_channel as *mut c_void,
            "ibv_reg_mr" => register as *mut c_void,
            "ibv_reg_dmabuf_mr" => register_dmabuf as *mut c_void,
            "ibv_dereg_mr" => deregister as *mut c_void,
            _ => nothing as *mut c_void,
        };
        NonNull::new(function)
    };
    // SAFETY: those that are called here are of the right kind.
    Box::leak(Box::new(unsafe { Library::from_symbols(find) }.unwrap()))
}

/// Until the guard is dropped the stand-in answers so often.
fn answering(answers: usize) -> MutexGuard<'static, ()> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ASKED.store(0, SeqCst);
    ANSWERS.store(answers, SeqCst);
    REFUSAL.store(libc::EBUSY, SeqCst);
    IS_TAKEN_AWAY.store(false, SeqCst);
    turn
}

fn verbs() -> Verbs {
    verbs_behind(-1)
}

fn verbs_behind(number: RawFd) -> Verbs {
    // SAFETY: zeros are a context without operations; the domain lives as long as the process.
    let domain = unsafe {
        let context = Box::leak(Box::new(std::mem::zeroed::<ibv_context>()));
        context.cmd_fd = number;
        let pd = NonNull::from(Box::leak(Box::new(ibv_pd { context, handle: 1 })));
        Domain::lent(library(), pd).unwrap()
    };
    Verbs::new(domain).unwrap()
}

/// A cache that keeps what it registers and changes only by the program's word.
fn told() -> Cache<Verbs, NoMonitor> {
    // SAFETY: no device uses memory here.
    let monitor = unsafe { NoMonitor::page_table_coherent() }.unwrap();
    Cache::new(verbs(), monitor, Config::keeping_all()).unwrap()
}

/// So many pages, and where they are.
fn pages(count: usize) -> (Vec<u8>, AddressRange) {
    let memory = vec![0_u8; (count + 1) * PAGE];
    let start = memory.as_ptr().expose_provenance().next_multiple_of(PAGE);
    (memory, AddressRange::new(start, count * PAGE).unwrap())
}

fn part(whole: AddressRange, first: usize, pages: usize) -> AddressRange {
    AddressRange::new(whole.start() + first * PAGE, pages * PAGE).unwrap()
}

fn get(cache: &Cache<Verbs, NoMonitor>, range: AddressRange) -> Lease<'_, Verbs, NoMonitor> {
    let start = std::ptr::with_exposed_provenance(range.start());
    // SAFETY: no device uses it.
    unsafe { cache.get(start, range.len(), Access::READ_WRITE) }.unwrap()
}

fn soon() -> SuspensionTerms {
    SuspensionTerms { deadline: Duration::from_millis(300), ..SuspensionTerms::default() }
}

/// What the suspension had is what it was before the change: it is not what is given out afterwards.
#[test]
fn what_changed_while_a_suspension_was_pending_is_registered_anew() {
    let _turn = answering(usize::MAX);
    let ((_memory, whole), cache) = (pages(8), told());
    let first = get(&cache, whole).handle().lkey();
    let lease = get(&cache, part(whole, 0, 1));
    assert_eq!((lease.is_cached(), lease.handle().lkey()), (true, first));
    let begun = cache.begin_suspension(part(whole, 0, 1), vec![], vec![lease], soon());
    let mut suspending = begun.ok().unwrap();
    let mut polls = 0;
    while let Ok(progress) = suspending.poll() {
        let SuspendProgress::Pending(pending, _) = progress else { panic!("suspended") };
        if polls == 0 {
            cache.invalidate(part(whole, 4, 4));
        }
        (suspending, polls) = (pending, polls + 1);
        thread::yield_now();
    }
    assert!(polls > 0, "nothing changed while it was pending");
    assert_ne!(get(&cache, part(whole, 5, 1)).handle().lkey(), first);
}

#[test]
fn what_was_invalidated_before_a_refused_suspension_is_registered_anew() {
    let _turn = answering(usize::MAX);
    let ((_memory, whole), cache) = (pages(2), told());
    let lease = get(&cache, whole);
    let first = lease.handle().lkey();
    cache.invalidate(whole);
    assert!(lease.is_invalidated());
    let refused = cache.suspend(whole, vec![], vec![lease], soon()).err().unwrap();
    let back: Vec<_> = refused.leases.iter().filter_map(|lease| lease.as_ref().ok()).collect();
    assert!(back.iter().all(|lease| lease.is_invalidated() || lease.handle().lkey() != first));
    assert_ne!(get(&cache, whole).handle().lkey(), first);
}

#[test]
fn no_suspension_comes_about_while_a_device_has_not_let_go() {
    let _turn = answering(1);
    let cache = Cache::new(verbs(), NoMonitor::new().unwrap(), Config::default()).unwrap();
    let (_memory, whole) = pages(8);
    // Its end is refused: the region stays registered.
    drop(get(&cache, whole));
    assert_eq!(ASKED.load(SeqCst), 1);
    let suspend = |range| {
        let suspended = cache.suspend(range, Vec::new(), Vec::new(), soon());
        let came_about = suspended.is_ok();
        if let Ok(suspended) = suspended {
            drop(suspended.resume());
        }
        came_about
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| suspend(part(whole, 0, 2)));
        while ASKED.load(SeqCst) < 2 {
            thread::yield_now();
        }
        // The device is being asked once more, on that thread, and has the region still.
        let came_about = suspend(part(whole, 4, 2));
        ANSWERS.store(usize::MAX, SeqCst);
        assert!(!other.join().unwrap(), "it has not let go");
        assert!(!came_about, "suspended, and the region is registered");
    });
}

/// No suspension comes about where the device refuses so: it has the region.
fn region_stays(refusal: c_int) {
    let _turn = answering(usize::MAX);
    let ((_memory, whole), cache) = (pages(4), told());
    let lease = get(&cache, whole);
    REFUSAL.store(refusal, SeqCst);
    let not = cache.suspend(whole, vec![], vec![lease], soon()).err().unwrap();
    let Why::Refused(refused) = &not.why else { panic!("{:?}", not.why) };
    assert!(refused.outstanding.translations, "{refused:?}");
}

/// The device behind a closed descriptor is alive while something of it is mapped, and so are its regions.
#[test]
fn no_suspension_comes_about_behind_a_closed_descriptor() {
    region_stays(libc::EBADF);
}

/// Firmware that fails says the same as a device that was taken away (mlx5).
#[test]
fn a_device_that_answers_another_call_has_its_regions() {
    region_stays(libc::EIO);
}

/// Taken away, it has none.
#[test]
fn a_suspension_comes_about_where_the_device_was_taken_away() {
    let _turn = answering(usize::MAX);
    let ((_memory, whole), cache) = (pages(4), told());
    let lease = get(&cache, whole);
    REFUSAL.store(libc::EIO, SeqCst);
    IS_TAKEN_AWAY.store(true, SeqCst);
    drop(cache.suspend(whole, vec![], vec![lease], soon()).unwrap().resume());
}

/// The library writes its commands to the number, whatever file has that.
#[test]
fn a_file_that_has_the_number_of_a_closed_descriptor_is_not_written_to() {
    let _turn = answering(usize::MAX);
    let (_memory, whole) = pages(1);
    let own = File::from(memory_file(c"a device's file").unwrap());
    let verbs = verbs_behind(own.as_raw_fd());
    // SAFETY: no device uses it.
    let region = unsafe { verbs.register(whole, Access::READ) }.unwrap();
    let another = File::from(memory_file(c"a log").unwrap());
    // SAFETY: the test's own numbers.
    assert_eq!(unsafe { libc::dup2(another.as_raw_fd(), own.as_raw_fd()) }, own.as_raw_fd());
    let (asked, registered) = (ASKED.load(SeqCst), REGISTERED.load(SeqCst));
    REFUSAL.store(0, SeqCst);
    // SAFETY: as above.
    let given_back = unsafe { verbs.deregister(region, whole) };
    assert_eq!(given_back, Err(DeregisterError::DeviceGone { errno: libc::EBADF }));
    assert!(!verbs.quiet(whole), "the old region is registered");
    // SAFETY: as above.
    let again = unsafe { verbs.register(whole, Access::READ) };
    assert_eq!(again, Err(RegisterError::DeviceGone { errno: libc::EBADF }));
    drop(verbs);
    assert_eq!((ASKED.load(SeqCst), REGISTERED.load(SeqCst)), (asked, registered));
}

/// A device that is opened again under the same number has the same handles: they are its new regions'.
#[test]
fn what_is_behind_the_number_of_a_closed_descriptor_is_left_alone() {
    let _turn = answering(usize::MAX);
    let ((_memory, whole), verbs) = (pages(1), verbs());
    // SAFETY: no device uses it.
    let register = || unsafe { verbs.register(whole, Access::READ) };
    let (first, second) = (register().unwrap(), register().unwrap());
    let gone = Err(DeregisterError::DeviceGone { errno: libc::EBADF });
    REFUSAL.store(libc::EBADF, SeqCst);
    // SAFETY: as above.
    assert_eq!(unsafe { verbs.deregister(first, whole) }, gone);
    REFUSAL.store(0, SeqCst);
    let (asked, registered) = (ASKED.load(SeqCst), REGISTERED.load(SeqCst));
    assert!(!verbs.quiet(whole), "the old regions are registered");
    for region in [first, second] {
        // SAFETY: as above.
        assert_eq!(unsafe { verbs.deregister(region, whole) }, gone);
    }
    assert_eq!(register(), Err(RegisterError::DeviceGone { errno: libc::EBADF }));
    drop(verbs);
    assert_eq!((ASKED.load(SeqCst), REGISTERED.load(SeqCst)), (asked, registered));
}

/// The kernel refuses a dmabuf with flags beside the rights and this one.
#[test]
fn a_dmabuf_gets_relaxed_ordering_and_no_other_flag() {
    let _turn = answering(usize::MAX);
    let all = IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_HUGETLB | IBV_ACCESS_MW_BIND;
    for (flags, expected) in [(0, 0), (all, IBV_ACCESS_RELAXED_ORDERING)] {
        let verbs = verbs().with_flags(flags);
        let part = DmabufPart { offset: 0, length: PAGE, address: 0 };
        // SAFETY: nothing is registered by the stand-in.
        let made = unsafe { verbs.register_dmabuf(std::io::stdin().as_fd(), part, Access::READ) };
        drop(made.unwrap());
        assert_eq!(DMABUF_FLAGS.load(SeqCst).cast_unsigned(), expected);
    }
}
