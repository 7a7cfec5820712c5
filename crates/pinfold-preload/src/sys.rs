//! Calls to the C library: the error number, a signal's handler, a line to standard error.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for calls that take no pointer but to static or local memory, and
//! to change what a signal does.

#![allow(unsafe_code)]

use libc::{c_int, c_void};
use pinfold::AddressRange;
use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

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

/// Starts a thread that no signal interrupts, and lets it go.
///
/// # Errors
///
/// The system starts no more threads.
pub(crate) fn spawn_quiet(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both sets are this function's own; a thread inherits its maker's mask, which is put
    // back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        spawned.map(drop)
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
