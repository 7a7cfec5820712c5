//! Calls to the C library: the error number, signals, cancellation, threads, memory of our own, a line
//! to standard error.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for calls that take no pointer but to static or local memory, to
//! change what a signal does, and for memory that is mapped here and used by nobody else.

#![allow(unsafe_code)]

use libc::{c_int, c_void};
use pinfold::AddressRange;
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The calling thread's error number.
pub(crate) fn errno() -> c_int {
    // SAFETY: the address is this thread's own.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's error number.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Writes to standard error in one system call; a closed one is no failure of the program.
pub(crate) fn complain(line: &str) {
    // SAFETY: the text is as long as is said. Not through the standard library's handle, whose lock
    // a forked child may find taken.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// How often the signal came that was not yet waited for.
struct Bell(UnsafeCell<MaybeUninit<libc::sem_t>>);

// SAFETY: a semaphore is made for many threads; it is initialised once, before any other use.
unsafe impl Sync for Bell {}

static BELL: Bell = Bell(UnsafeCell::new(MaybeUninit::uninit()));

/// Has `signal` counted from now on. Called once in a process.
///
/// # Errors
///
/// The program handles the signal itself (`EBUSY`), or the system refuses.
pub(crate) fn count_signal(signal: c_int) -> io::Result<()> {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zero is a valid action; the semaphore lives as long as the process, and posting is
    // what a handler may do.
    unsafe {
        check(libc::sigaction(signal, std::ptr::null(), before.as_mut_ptr()))?;
        if before.assume_init().sa_sigaction != libc::SIG_DFL {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        check(libc::sem_init(BELL.0.get().cast(), 0, 0))?;
        let action = action.assume_init_mut();
        action.sa_sigaction = ring as extern "C" fn(c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        check(libc::sigaction(signal, action, std::ptr::null_mut()))
    }
}

extern "C" fn ring(_: c_int) {
    let before = errno();
    // SAFETY: the handler is installed after the semaphore was made. The only failure is a count
    // of two billion.
    unsafe { libc::sem_post(BELL.0.get().cast()) };
    set_errno(before);
}

/// Waits for the signal. Called after [`count_signal`].
pub(crate) fn await_signal() {
    // SAFETY: the semaphore was made; an interrupted wait is begun again.
    while unsafe { libc::sem_wait(BELL.0.get().cast()) } != 0 {}
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Two pages of memory in a mapping of their own.
pub(crate) struct Pages(AddressRange);

impl Pages {
    /// `None` if there is no memory.
    pub(crate) fn new() -> Option<Self> {
        let bytes = 2 * page_bytes();
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, wherever the kernel likes. A page without access on each side keeps
        // neighbours from becoming one mapping with it.
        let start = unsafe {
            let around = libc::mmap(ptr::null_mut(), 2 * bytes, libc::PROT_NONE, flags, -1, 0);
            if around == libc::MAP_FAILED {
                return None;
            }
            let start = around.byte_add(bytes / 2);
            if libc::mprotect(start, bytes, protection) != 0 {
                libc::munmap(around, 2 * bytes);
                return None;
            }
            start
        };
        AddressRange::new(start.expose_provenance(), bytes).ok().map(Self)
    }

    pub(crate) fn start(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0.start())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Whether the kernel tells one page from the other.
    pub(crate) fn are_split(&self) -> bool {
        pinfold::mappings::mappings_in(self.0).is_ok_and(|mappings| mappings.len() > 1)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let half = self.bytes() / 2;
        // SAFETY: the mapping is ours, with a page on each side.
        unsafe { libc::munmap(self.start().byte_sub(half), 2 * self.bytes()) };
    }
}

fn page_bytes() -> usize {
    // SAFETY: takes no pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The stack of a thread of ours.
const THREAD_STACK: usize = 128 << 10;

/// Starts a thread that no signal interrupts and nobody waits for, which runs as long as the process.
///
/// Not through the standard library, whose threads have two stacks and allocate: the C library sets
/// 64 MiB of addresses aside for each thread that does.
///
/// # Errors
///
/// The system starts no more threads.
pub(crate) fn spawn_quiet(
    name: &'static CStr,
    body: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> io::Result<()> {
    let _blocked = AllSignalsBlocked::new();
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    let attributes = attributes.as_mut_ptr();
    // SAFETY: the attributes are made before they are used and ended once; the body gets the argument
    // that its caller meant for it.
    unsafe {
        from_number(libc::pthread_attr_init(attributes))?;
        let made = from_number(libc::pthread_attr_setstacksize(attributes, THREAD_STACK))
            .and_then(|()| {
                let state = libc::PTHREAD_CREATE_DETACHED;
                from_number(libc::pthread_attr_setdetachstate(attributes, state))
            })
            .and_then(|()| {
                from_number(libc::pthread_create(thread.as_mut_ptr(), attributes, body, argument))
            });
        libc::pthread_attr_destroy(attributes);
        made?;
        libc::pthread_setname_np(thread.assume_init(), name.as_ptr());
    }
    Ok(())
}

/// What functions of threads return.
fn from_number(errno: c_int) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}

/// All signals are blocked on this thread until it is dropped.
pub(crate) struct AllSignalsBlocked {
    before: libc::sigset_t,
}

impl AllSignalsBlocked {
    pub(crate) fn new() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: both sets are this function's own, and all zero is an empty one.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Self { before: before.assume_init() }
        }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set was filled above.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}

/// This thread is not cancelled until it is dropped: what libibverbs' functions do is no cancellation
/// point, and what ours do (files are opened, threads are waited for) must be none either.
pub(crate) struct NotCancelled {
    before: c_int,
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: c_int = 1;

impl NotCancelled {
    pub(crate) fn new() -> Self {
        let mut before = 0;
        // SAFETY: writes the state before, an integer.
        unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
        Self { before }
    }
}

impl Drop for NotCancelled {
    fn drop(&mut self) {
        // SAFETY: the state that was there.
        unsafe { pthread_setcancelstate(self.before, ptr::null_mut()) };
    }
}

/// Whether the program's address space is limited, so that what is set aside there is missing elsewhere.
pub(crate) fn addresses_are_limited() -> bool {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is this function's own.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    limit.rlim_cur != libc::RLIM_INFINITY
}

/// The filters of system calls (seccomp) that a process was started with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sandbox {
    mode: c_int,
    /// `None` without filters, or where the kernel does not say (before 5.9).
    filters: Option<u32>,
}

static SANDBOX_AT_START: OnceLock<Sandbox> = OnceLock::new();

impl Sandbox {
    /// Remembers it. One system call; where there are filters, three more.
    pub(crate) fn note_start() {
        SANDBOX_AT_START.get_or_init(|| {
            let mode = sandbox_mode();
            Self { mode, filters: if mode > 0 { filters() } else { None } }
        });
    }

    /// Whether the program has restricted its system calls since. Where it was started without filters this
    /// is one system call, because a filter of its own may forbid more.
    pub(crate) fn is_the_program_s() -> bool {
        SANDBOX_AT_START.get().is_some_and(|start| {
            let mode = sandbox_mode();
            mode != start.mode || mode > 0 && filters() != start.filters
        })
    }
}

fn sandbox_mode() -> c_int {
    // SAFETY: takes no pointer.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP) }
}

fn filters() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    line.trim().parse().ok()
}

const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Memory of our own, given back when it is dropped.
struct Mapped {
    start: NonNull<c_void>,
    bytes: usize,
}

impl Mapped {
    /// Anonymous memory; `None` if there is none.
    fn new(bytes: usize, protection: c_int, flags: c_int) -> Option<Self> {
        let flags = libc::MAP_ANONYMOUS | flags;
        // SAFETY: new memory, wherever the kernel likes.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        let start = (start != libc::MAP_FAILED).then_some(start).and_then(NonNull::new)?;
        Some(Self { start, bytes })
    }

    /// It stays as long as the process; its first words, all 0.
    fn leaked(self) -> &'static SharedWords {
        let words = self.start.cast::<SharedWords>();
        std::mem::forget(self);
        // SAFETY: a page at least, zeroed by the kernel, never unmapped, and atomics only.
        unsafe { words.as_ref() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's.
        unsafe { libc::munmap(self.start.as_ptr(), self.bytes) };
    }
}

/// A stack, with a page below that nobody may touch.
pub(crate) struct Stack(Mapped);

impl Stack {
    const BYTES: usize = 256 << 10;

    pub(crate) fn new() -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_STACK | libc::MAP_NORESERVE;
        let stack = Mapped::new(Self::BYTES, libc::PROT_NONE, flags)?;
        let guard = page_bytes();
        // SAFETY: all of the mapping but its lowest page. Rights are added, which no hook looks at.
        let refused = unsafe {
            libc::mprotect(stack.start.as_ptr().byte_add(guard), Self::BYTES - guard, READ_WRITE)
        };
        (refused == 0).then_some(Self(stack))
    }

    /// Its end, from which it grows down; aligned to a page.
    pub(crate) fn top(&self) -> *mut c_void {
        self.0.start.as_ptr().wrapping_byte_add(self.0.bytes)
    }
}

/// A page's first words.
pub(crate) type SharedWords = [AtomicU64; 4];

/// Words that forked children share with this process.
pub(crate) fn shared_words() -> Option<&'static SharedWords> {
    Mapped::new(page_bytes(), READ_WRITE, libc::MAP_SHARED).map(Mapped::leaked)
}

/// Words that forked children find to be 0. `None` without memory, or before Linux 4.14.
pub(crate) fn wiped_words() -> Option<&'static SharedWords> {
    let page = Mapped::new(page_bytes(), READ_WRITE, libc::MAP_PRIVATE)?;
    // SAFETY: the page is ours.
    let refused = unsafe { libc::madvise(page.start.as_ptr(), page.bytes, libc::MADV_WIPEONFORK) };
    (refused == 0).then(|| page.leaked())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_stays_what_it_is() {
        Sandbox::note_start();
        assert!(!Sandbox::is_the_program_s());
        assert_eq!(filters().is_some_and(|filters| filters > 0), sandbox_mode() > 0);
    }

    #[test]
    fn pages_are_split_by_what_holds_for_one_of_them() {
        let pages = Pages::new().unwrap();
        assert!(!pages.are_split());
        // SAFETY: the page is ours.
        unsafe { libc::madvise(pages.start(), pages.bytes() / 2, libc::MADV_DONTFORK) };
        assert!(pages.are_split());
        // SAFETY: as above.
        unsafe { libc::madvise(pages.start(), pages.bytes() / 2, libc::MADV_DOFORK) };
        assert!(!pages.are_split());
    }

    #[test]
    fn the_error_number_is_the_thread_s_own() {
        set_errno(libc::EXDEV);
        std::thread::spawn(|| set_errno(libc::EPERM)).join().unwrap();
        assert_eq!(errno(), libc::EXDEV);
    }
}
