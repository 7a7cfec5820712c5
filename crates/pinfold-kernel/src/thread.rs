//! Threads: those of the library's own, with all signals blocked from their first instruction, so that no
//! handler of the program ever runs on them; and what a thread asks for itself.
//!
//! # Safety
//!
//! The unsafe code of this file is there to start and join threads that are not the standard library's, to ask the C
//! library what their stacks need, and for calls that take numbers.

use crate::errno::{Errno, done};
use crate::process::{Resource, page_bytes};
use crate::process_page;
use crate::signal::SignalsBlocked;
use crate::symbols;
use pinfold_core::foreign::discard;
use rustix::fs::PROC_SUPER_MAGIC;
use rustix::thread::{CapabilitySet, ClockId, CpuSet, Timespec, UnshareFlags};
use std::ffi::CStr;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

/// As long as the standard library's. It looks into the environment for another length where none is asked for, which
/// the program may be changing.
const STACK: usize = 2 << 20;

/// Starts a thread named `name` (15 bytes at most are shown) that no signal interrupts.
///
/// # Errors
///
/// What the system says when it starts no more threads.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let _blocked = SignalsBlocked::new();
    let body = move || {
        let _counted = CountedOwn::this();
        body();
    };
    Builder::new().name(name.into()).stack_size(STACK).spawn(body)
}

/// As [`spawn`], for a thread that ends before `scope` does.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let _blocked = SignalsBlocked::new();
    Builder::new().name(name.into()).stack_size(STACK).spawn_scoped(scope, body)
}

/// Runs `own` with how many threads help, each with `work`: as many as the system starts, at most `most`. Waits for
/// them however `own` ends; but not in a child that `own` has forked, which has none of them and would wait for ever as in
/// [`std::thread::scope`]. `is_child` tells a child that has its parent's number, where each is the first process of a
/// container. If it says yes from the beginning, no thread is started.
///
/// No panic comes out of `work`, nor of `is_child`.
///
/// # Safety
///
/// What `is_child` says turns to yes in a forked child only.
pub unsafe fn with_helpers<T>(
    name: &str,
    most: usize,
    is_child: impl Fn() -> bool,
    work: impl Fn() + Sync,
    own: impl FnOnce(usize) -> T,
) -> T {
    let most = if is_child() { 0 } else { most };
    // Dropped before what `work` has borrowed, and before `work`.
    let mut helpers = Helpers { process: std::process::id(), is_child, threads: Vec::new() };
    let work = &work;
    // SAFETY: `work` is there as long as the thread: `helpers` waits for it.
    let start = || unsafe { spawn_unchecked(name, work) };
    helpers.threads.extend((0..most).map_while(|_| start().ok()));
    own(helpers.threads.len())
}

/// # Safety
///
/// What `body` borrows is there until the thread has ended.
unsafe fn spawn_unchecked(name: &str, body: impl FnOnce() + Send) -> io::Result<JoinHandle<()>> {
    let _blocked = SignalsBlocked::new();
    let builder = Builder::new().name(name.into()).stack_size(STACK);
    // SAFETY: the caller's promise.
    unsafe { builder.spawn_unchecked(body) }
}

struct Helpers<F: Fn() -> bool> {
    /// Whose threads they are.
    process: u32,
    is_child: F,
    threads: Vec<JoinHandle<()>>,
}

impl<F: Fn() -> bool> Drop for Helpers<F> {
    fn drop(&mut self) {
        let is_child = std::process::id() != self.process || (self.is_child)();
        for thread in self.threads.drain(..) {
            if is_child {
                std::mem::forget(thread);
            } else {
                thread.join().unwrap_or_else(discard);
            }
        }
    }
}

/// A thread for which nothing is allocated once it runs, with one stack of 256 KiB, besides what the variables of threads
/// take from it.
///
/// The standard library's threads allocate, and the C library sets 64 MiB of addresses aside for each
/// thread that does, which a program with a limit on its address space notices.
#[derive(Debug)]
pub struct LeanThread<T: Sync + 'static> {
    thread: libc::pthread_t,
    /// The process that has it.
    process: u32,
    /// What the thread works on; it has it until it is joined.
    shared: ManuallyDrop<Arc<Work<T>>>,
}

#[derive(Debug)]
struct Work<T> {
    name: &'static CStr,
    body: fn(&T),
    on: T,
}

impl<T: Send + Sync + 'static> LeanThread<T> {
    const STACK: usize = 256 << 10;

    /// Runs `body` on `on`; `body` does not panic. As [`spawn`] otherwise.
    ///
    /// # Errors
    ///
    /// As [`spawn`].
    pub fn spawn(name: &'static CStr, on: T, body: fn(&T)) -> io::Result<Self> {
        extern "C" fn start<T>(work: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: `spawn` passes this, and it lives until the thread is joined, or for ever.
            let work = unsafe { &*work.cast_const().cast::<Work<T>>() };
            // By itself: naming another thread opens a file. One too long is cut off.
            let _ = rustix::thread::set_name(work.name);
            let _noted = (NotedLean::this(), CountedOwn::this());
            (work.body)(&work.on);
            std::ptr::null_mut()
        }
        let shared = Arc::new(Work { name, body, on });
        let argument = Arc::as_ptr(&shared).cast_mut().cast();
        let _blocked = SignalsBlocked::new();
        let mut attributes = MaybeUninit::uninit();
        let mut thread = MaybeUninit::uninit();
        // SAFETY: the attributes are made before they are used, and ended once; the thread gets what
        // `start` expects, which stays as long as it runs.
        let made = unsafe {
            let attributes = attributes.as_mut_ptr();
            succeeded(libc::pthread_attr_init(attributes))?;
            let stack = stack_with_variables(attributes, Self::STACK);
            let made =
                succeeded(libc::pthread_attr_setstacksize(attributes, stack)).and_then(|()| {
                    let thread = thread.as_mut_ptr();
                    succeeded(libc::pthread_create(thread, attributes, start::<T>, argument))
                });
            libc::pthread_attr_destroy(attributes);
            made
        };
        made?;
        // SAFETY: the call above has filled it.
        let thread = unsafe { thread.assume_init() };
        Ok(Self { thread, process: std::process::id(), shared: ManuallyDrop::new(shared) })
    }

    /// What it works on.
    pub fn on(&self) -> &T {
        &self.shared.on
    }

    /// Waits for its end. Not in a forked child, which has no such thread: what that works on stays there.
    pub fn join(mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: joined once; behind it the thread uses nothing any more. A value that is dropped
        // without this goes on for ever, and what it works on with it.
        unsafe {
            if libc::pthread_join(self.thread, std::ptr::null_mut()) == 0 {
                ManuallyDrop::drop(&mut self.shared);
            }
        }
    }
}

/// What a thread with these attributes needs of its stack before it runs an instruction, as the GNU C library counts it.
type LeastStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;

/// The C library's function; null before it was looked for, and [`NO_FUNCTION`] where it has none.
static LEAST_STACK: AtomicPtr<libc::c_void> = AtomicPtr::new(ptr::null_mut());

const NO_FUNCTION: *mut libc::c_void = ptr::without_provenance_mut(1);

/// Looks for what [`stack_with_variables`] asks, so that it need not. Takes the dynamic linker's lock, which a forked child
/// may find taken for ever.
pub fn find_least_stack() {
    let found = symbols::address(c"__pthread_get_minstack");
    // Relaxed: code of the C library's, which was there before.
    LEAST_STACK.store(found.map_or(NO_FUNCTION, NonNull::as_ptr), Ordering::Relaxed);
}

fn least_stack() -> Option<LeastStack> {
    // Relaxed: as above.
    let mut found = LEAST_STACK.load(Ordering::Relaxed);
    if found.is_null() {
        find_least_stack();
        found = LEAST_STACK.load(Ordering::Relaxed);
    }
    // SAFETY: the function of that name has this type, and is there as long as the process.
    (found != NO_FUNCTION)
        .then(|| unsafe { std::mem::transmute::<*mut libc::c_void, LeastStack>(found) })
}

/// The stack to ask for, for a thread that is to have `bytes` of it: the C library takes the room for the variables of
/// threads from there (static TLS), refuses to start a thread where nothing is left (EINVAL), and starts one where a little
/// is. A moderate number of variables has its room in `bytes`.
///
/// # Safety
///
/// The attributes were made.
pub unsafe fn stack_with_variables(attributes: *const libc::pthread_attr_t, bytes: usize) -> usize {
    let moderate = page_bytes() + libc::PTHREAD_STACK_MIN + (12 << 10);
    // SAFETY: the caller's promise; the function takes no lock.
    let least = least_stack().map_or(0, |least| unsafe { least(attributes) });
    bytes + least.saturating_sub(moderate).next_multiple_of(1 << 16)
}

/// The calling thread stands among the lean ones of its process until it is dropped, by the C library's name for it. What
/// does not fit is taken for another thread.
struct NotedLean(Option<&'static AtomicUsize>);

impl NotedLean {
    fn this() -> Self {
        let this = own_name();
        // Relaxed, here and below: a thread looks for its own name, and no other thread changes that.
        let noted = |slot: &&AtomicUsize| {
            slot.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let page = process_page::get_or_make().ok();
        Self(page.and_then(|page| page.lean.iter().find(noted)))
    }
}

impl Drop for NotedLean {
    fn drop(&mut self) {
        self.0.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
}

/// The calling thread stands among those of [`spawn`] and of [`LeanThread::spawn`] that run, until it is dropped, by its
/// number. What does not fit is not counted.
struct CountedOwn(Option<&'static AtomicU32>);

impl CountedOwn {
    fn this() -> Self {
        let this = thread_id();
        // Relaxed, here and below: the whole entry is in the word.
        let counted = |slot: &&AtomicU32| {
            slot.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let page = process_page::get_or_make().ok();
        Self(page.and_then(|page| page.own.iter().find(counted)))
    }
}

impl Drop for CountedOwn {
    fn drop(&mut self) {
        self.0.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    }
}

/// Threads of this library's own. Where they are the same at two moments, they ran all the time in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnThreads([u32; process_page::OWN]);

impl OwnThreads {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.iter().filter(|&&thread| thread != 0).count()
    }
}

/// The threads of this library's own that run in this process: those of [`spawn`] and of [`LeanThread::spawn`]. Fewer
/// while one begins, and beyond 16. None of a forked child's parent. Not those that a seccomp filter
/// has killed.
pub fn own_threads() -> OwnThreads {
    // Relaxed: the whole entry is in the word.
    let running = |slot: &AtomicU32| match slot.load(Ordering::Relaxed) {
        thread if thread != 0 && thread_exists(thread) => thread,
        _ => 0,
    };
    let none = OwnThreads([0; process_page::OWN]);
    process_page::get().map_or(none, |page| OwnThreads(page.own.each_ref().map(running)))
}

/// How many threads this process has: the links of a directory, for which no descriptor is needed. `None` where the kernel
/// does not say.
pub fn threads_of_process() -> Option<usize> {
    const DIRECTORY: &CStr = c"/proc/self/task";
    // Not an ordinary directory of that name.
    if rustix::fs::statfs(DIRECTORY).ok()?.f_type != PROC_SUPER_MAGIC {
        return None;
    }
    let links = rustix::fs::stat(DIRECTORY).ok()?.st_nlink;
    // Of the directory itself.
    usize::try_from(links).ok()?.checked_sub(2)
}

/// The calling thread, as the C library names it; never 0. No system call, and no variable of threads. The thread that
/// forks has the same name in the child.
#[allow(clippy::cast_possible_truncation)] // an address, whatever type the C library gives it
pub fn own_name() -> usize {
    // SAFETY: no argument; the C library reads a register.
    unsafe { libc::pthread_self() as usize }
}

/// Whether the calling thread is a [`LeanThread`] of this process, which may use no variable of threads: the first use
/// after a program has loaded many libraries with such variables may allocate. No system call.
pub fn is_lean() -> bool {
    let this = own_name();
    // Relaxed: as in `NotedLean`.
    let is_this = |slot: &AtomicUsize| slot.load(Ordering::Relaxed) == this;
    process_page::get().is_some_and(|page| page.lean.iter().any(is_this))
}

/// What functions of threads return.
fn succeeded(errno: libc::c_int) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// The calling thread's number.
pub fn thread_id() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).unwrap_or(0)
}

/// Has the calling thread run before all threads that the process may start: in real time, with the
/// highest priority that it may ask for. False if it may ask for none.
///
/// Threads and processes that this one starts do not inherit it.
pub fn run_before_all() -> bool {
    // By number, as below: a program may have functions of its own under these names.
    // SAFETY: the call takes and gives numbers.
    let highest = unsafe { libc::syscall(libc::SYS_sched_get_priority_max, libc::SCHED_FIFO) };
    highest.try_into().is_ok_and(run_in_real_time)
        || most_real_time_priority().is_some_and(run_in_real_time)
}

/// Where the calling thread runs in real time, has it run before threads of its present priority: with one step more. False if it
/// does not, or the process may not ask for that.
///
/// Threads and processes that this one starts do not inherit it.
pub fn run_before_equals() -> bool {
    // SAFETY: the structure is plain numbers, and zeros are some.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the parameters.
    let asked = unsafe { libc::syscall(libc::SYS_sched_getparam, 0, &raw mut parameters) };
    // No other thread has a priority above zero.
    asked == 0 && parameters.sched_priority > 0 && run_in_real_time(parameters.sched_priority + 1)
}

fn run_in_real_time(priority: libc::c_int) -> bool {
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the parameters.
    let set =
        || unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const parameters) };
    priority > 0 && set() == 0
}

/// What `RLIMIT_RTPRIO` leaves to a process without privilege.
fn most_real_time_priority() -> Option<libc::c_int> {
    Resource::RealTimePriority.limit().ok()?.soft?.try_into().ok()
}

/// The processors that this thread may run on.
pub fn processors() -> Result<Vec<usize>, Errno> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&processor| set.is_set(processor)).collect())
}

/// Keeps the calling thread on `processor`. `EINVAL` if it may not run there.
pub fn stay_on(processor: usize) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    if processor >= CpuSet::MAX_CPU {
        return Err(Errno(libc::EINVAL));
    }
    set.set(processor);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// How often the kernel took the processor from this thread to run another.
pub fn processor_lost() -> libc::c_long {
    // SAFETY: the structure is plain numbers, and zeros are some.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure. It knows the calling thread, so it cannot fail.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_nivcsw
}

/// `CAP_IPC_LOCK` of the calling thread, as `capget(2)` reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcLock {
    /// The kernel takes it into account.
    pub is_effective: bool,
    /// The thread may make it effective.
    pub is_permitted: bool,
}

/// Whether the calling thread has `CAP_IPC_LOCK`, in its own user namespace. Needs no file.
///
/// # Errors
///
/// Only where a filter of system calls refuses the question.
pub fn ipc_lock() -> Result<IpcLock, Errno> {
    let sets = rustix::thread::capabilities(None)?;
    Ok(IpcLock {
        is_effective: sets.effective.contains(CapabilitySet::IPC_LOCK),
        is_permitted: sets.permitted.contains(CapabilitySet::IPC_LOCK),
    })
}

/// Whether the calling thread gains no privilege by running a program (`no_new_privs`).
///
/// # Errors
///
/// Only where a filter of system calls refuses the question.
pub fn gains_no_privileges() -> Result<bool, Errno> {
    Ok(rustix::thread::no_new_privs()?)
}

/// `CLOCK_MONOTONIC` in nanoseconds, as eBPF programs read it.
pub fn monotonic_time() -> u64 {
    nanoseconds_of(libc::CLOCK_MONOTONIC)
}

/// How long the calling thread has had a processor, in nanoseconds.
pub fn processor_time() -> u64 {
    nanoseconds_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn nanoseconds_of(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    let (seconds, rest) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds * 1_000_000_000 + rest
}

/// Whether this process has a thread of that number, be it one that is ending.
pub fn thread_exists(thread: u32) -> bool {
    // SAFETY: signal 0 is none.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, 0) == 0 }
}

/// Gives the calling thread directories of its own (`CLONE_FS`), and puts it into the root: no file system stays in use
/// because it works in there, and another thread may enter a mount namespace. And it has no part in what is undone
/// of semaphores (`CLONE_SYSVSEM`) when the last thread ends that has. Nothing where that is refused.
pub fn leave_directory_and_semaphores() {
    // SAFETY: no value of this process depends on which directories its threads share.
    if unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS | UnshareFlags::SYSVSEM) }.is_ok() {
        let _ = rustix::process::chdir(c"/");
    }
}

/// What the kernel sets in the word of a thread that has ended (`FUTEX_OWNER_DIED`). No thread has such a number.
pub const ENDED: u64 = 1 << 30;

/// The kernel's `robust_list_head`. Its list is empty: only `pending` counts.
#[repr(C)]
struct RobustList {
    next: *const Self,
    offset: libc::c_long,
    pending: *const u32,
}

/// Runs `body` with the calling thread's number in `word`. If the thread ends meanwhile, killed by a seccomp filter, the
/// kernel writes [`ENDED`] there: before it closes the thread's descriptors. What else is written there must
/// not be that number. `body` has no robust mutex.
///
/// # Errors
///
/// `ENOSYS`, where the kernel has no futexes; what a seccomp filter says.
pub fn marked_when_it_ends<T>(word: &AtomicU64, body: impl FnOnce() -> T) -> Result<T, Errno> {
    let mut before = TakesBack { list: ptr::null(), length: 0 };
    let (list, length) = (&raw mut before.list, &raw mut before.length);
    // SAFETY: the kernel writes both. What they say before is what a thread without a list has.
    done(unsafe { libc::syscall(libc::SYS_get_robust_list, 0, list, length) })?;
    // The kernel's word is half as long.
    let half = ptr::from_ref(word).cast::<u32>().wrapping_add(cfg!(target_endian = "big").into());
    let mut ours = RobustList { next: ptr::null(), offset: 0, pending: half };
    ours.next = &raw const ours;
    // Relaxed: only the kernel compares it, for this thread.
    word.store(thread_id().into(), Ordering::Relaxed);
    // SAFETY: `before` takes the list back before it or the word goes. Where the thread ends without that, both stay:
    // nothing behind `body` runs.
    done(unsafe { libc::syscall(libc::SYS_set_robust_list, &raw const ours, size_of_val(&ours)) })?;
    let result = body();
    drop(before);
    Ok(result)
}

/// The list that the C library gave the kernel, which has it again from then on.
struct TakesBack {
    list: *const RobustList,
    length: usize,
}

impl Drop for TakesBack {
    fn drop(&mut self) {
        // SAFETY: what the kernel had before.
        unsafe { libc::syscall(libc::SYS_set_robust_list, self.list, self.length) };
    }
}

/// This thread is not cancelled (`pthread_cancel`) until it is dropped.
#[derive(Debug)]
pub struct NotCancelled {
    before: libc::c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: libc::c_int = 1;

impl NotCancelled {
    /// No system call.
    #[allow(clippy::new_without_default)] // it does something
    pub fn new() -> Self {
        let mut before = 0;
        // SAFETY: writes the state before, an integer.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for NotCancelled {
    fn drop(&mut self) {
        // SAFETY: the state that was there.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Lets another thread run.
pub fn yield_now() {
    // SAFETY: the call has no argument.
    unsafe { libc::syscall(libc::SYS_sched_yield) };
}

/// Sleeps without touching anything but the clock.
pub fn sleep(duration: Duration) {
    let most = Timespec { tv_sec: i64::MAX, tv_nsec: 0 };
    let time = Timespec::try_from(duration).unwrap_or(most);
    // The call, and the clock, of the C library's `nanosleep`.
    let _ = rustix::thread::clock_nanosleep_relative(ClockId::Realtime, &time);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::status_of_child;
    use std::cell::Cell;

    #[test]
    fn a_thread_stays_where_it_is_told_to() {
        let all = processors().unwrap();
        let last = *all.last().unwrap();
        std::thread::spawn(move || {
            stay_on(last).unwrap();
            assert_eq!(processors().unwrap(), [last]);
        })
        .join()
        .unwrap();
        assert_eq!(processors().unwrap(), all, "other threads stay free");
        assert_eq!(stay_on(usize::MAX), Err(Errno(libc::EINVAL)));
    }
    use crate::priority::priority_of;
    use std::sync::atomic::AtomicBool;
    use std::sync::{Mutex, mpsc};

    #[test]
    fn a_thread_in_real_time_runs_before_its_equals() {
        let thread = std::thread::spawn(|| {
            let before = priority_of(thread_id());
            if before >= Some(0) {
                assert!(!run_before_equals() && priority_of(thread_id()) == before);
            }
            if !run_in_real_time(2) {
                return eprintln!("skipped: no real-time priority may be had");
            }
            assert!(run_in_real_time(1));
            assert!(run_before_equals());
            assert_eq!(priority_of(thread_id()), Some(-3), "-1 and one less for each step");
        });
        thread.join().unwrap();
    }

    fn is_blocked(signal: libc::c_int) -> bool {
        let mut now = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: with no new set the call only fills the old one.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn a_lean_thread_works_on_what_it_got_with_signals_blocked() {
        let (answer, inside) = mpsc::channel();
        let body = |answer: &mpsc::Sender<bool>| {
            answer.send(is_blocked(libc::SIGUSR1)).unwrap();
            answer.send(is_lean()).unwrap();
        };
        let thread = LeanThread::spawn(c"pinfold-test", answer, body).unwrap();
        thread.join();
        assert_eq!((inside.try_recv(), inside.try_recv()), (Ok(true), Ok(true)));
        assert!(!is_lean());
        assert_eq!(inside.try_recv(), Err(mpsc::TryRecvError::Disconnected), "dropped by `join`");
    }

    /// It could not be told from one in which they run.
    #[test]
    fn no_thread_helps_in_what_is_a_child_from_the_beginning() {
        // SAFETY: the answer stays.
        let helpers = unsafe { with_helpers("pinfold-test", 2, || true, || (), |helpers| helpers) };
        assert_eq!(helpers, 0);
    }

    static DROPPED: AtomicBool = AtomicBool::new(false);

    /// Waits until its other end goes, and says when it is dropped.
    struct Waits(Mutex<mpsc::Receiver<()>>);

    impl Drop for Waits {
        fn drop(&mut self) {
            DROPPED.store(true, Ordering::SeqCst);
        }
    }

    /// The child has a copy of the value, and not the thread, which may be in the midst of what it works on.
    #[test]
    fn a_forked_child_neither_waits_for_a_thread_of_its_parent_nor_drops_what_it_works_on() {
        let (go_on, wait) = mpsc::channel::<()>();
        let body = |waits: &Waits| _ = waits.0.lock().unwrap().recv();
        let thread = LeanThread::spawn(c"pinfold-test", Waits(Mutex::new(wait)), body).unwrap();
        let thread = Cell::new(Some(thread));
        let join = || thread.take().into_iter().for_each(LeanThread::join);
        let status = status_of_child(|| {
            join();
            DROPPED.load(Ordering::SeqCst).into()
        });
        assert_eq!(status, 0, "it came back, and has dropped nothing");
        drop(go_on);
        join();
        assert!(DROPPED.load(Ordering::SeqCst));
    }

    /// Other tests of this process have some, too.
    #[test]
    fn threads_are_counted_while_they_run_and_not_in_a_child() {
        let (go_on, wait) = mpsc::channel::<()>();
        let (begun, begin) = mpsc::channel();
        let body = |(begun, wait): &(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>)| {
            begun.send(()).unwrap();
            _ = wait.lock().unwrap().recv();
        };
        let thread = LeanThread::spawn(c"pinfold-test", (begun, Mutex::new(wait)), body).unwrap();
        begin.recv().unwrap();
        assert!(own_threads().count() >= 1);
        let count = || own_threads().count().try_into().unwrap_or(99);
        assert_eq!(status_of_child(count), 0, "none");
        drop(go_on);
        thread.join();
    }

    /// The C library gives a child's thread the stack of one that its parent had, and with it the name.
    #[test]
    fn a_child_s_thread_with_the_name_of_a_lean_one_of_its_parent_is_none() {
        let (answer, inside) = mpsc::channel();
        let body = |answer: &mpsc::Sender<_>| {
            answer.send((is_lean(), status_of_child(|| is_lean().into()))).unwrap();
        };
        LeanThread::spawn(c"pinfold-test", answer, body).unwrap().join();
        assert_eq!(inside.recv(), Ok((true, 0)));
    }

    /// Each generation has two threads of its own, and its ancestors' are not there.
    #[test]
    fn threads_are_counted_after_many_forks() {
        fn wrong_from(generation: usize) -> libc::c_int {
            let (begun, begin) = mpsc::channel();
            let body = |begun: &mpsc::Sender<bool>| {
                begun.send(is_lean()).unwrap();
                loop {
                    sleep(Duration::from_secs(1));
                }
            };
            let started =
                [(); 2].map(|()| LeanThread::spawn(c"pinfold-test", begun.clone(), body).is_ok());
            let are_lean = started.map(|started| started && begin.recv().unwrap());
            let is_right = are_lean == [true; 2] && own_threads().count() == 2;
            match (is_right, generation) {
                (true, 0) => 0,
                (true, _) => (status_of_child(|| wrong_from(generation - 1)) != 0).into(),
                (false, _) => 1,
            }
        }
        assert_eq!(status_of_child(|| wrong_from(12)), 0);
    }

    #[test]
    fn the_thread_blocks_signals_and_its_parent_does_not() {
        let (answer, inside) = mpsc::channel();
        let body = move || answer.send(is_blocked(libc::SIGUSR1)).unwrap();
        spawn("pinfold-test", body).unwrap().join().unwrap();
        assert!(inside.recv().unwrap());
        assert!(!is_blocked(libc::SIGUSR1));
    }

    /// In a child, because a thread that ends like this leaves behind what it has.
    #[test]
    fn the_end_of_a_thread_is_marked_however_it_ends_while_it_says_so() {
        static WORDS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
        let body = || {
            let [ended, left] = &WORDS;
            marked_when_it_ends(left, || ()).unwrap();
            marked_when_it_ends(ended, || {
                // SAFETY: nothing of this thread's is used any more.
                unsafe { libc::syscall(libc::SYS_exit, 0) };
            })
            .unwrap();
        };
        let status = status_of_child(|| {
            let [ended, left] = &WORDS;
            std::mem::forget(std::thread::spawn(body));
            while ended.load(Ordering::Relaxed) != ENDED {
                yield_now();
            }
            let number = left.load(Ordering::Relaxed);
            let thread = u32::try_from(number).unwrap();
            while thread_exists(thread) {
                yield_now();
            }
            // Not touched: the thread had left it when it ended.
            let right = number != 0 && left.load(Ordering::Relaxed) == number;
            (!right).into()
        });
        assert_eq!(status, 0);
    }
}
