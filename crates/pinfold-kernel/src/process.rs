//! Facts of this process and its machine.
//!
//! # Safety
//!
//! The unsafe code of this file is there for calls of the C library that take numbers, or fill what is local.

use crate::errno::{Errno, checked, done};
use rustix::process::{Pid, PidfdFlags};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes of a page, a power of two. The C library has the number; no system call, and from the second time on one load.
#[inline]
pub fn page_bytes() -> usize {
    static BYTES: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: one word, which is the same for all.
    match BYTES.load(Ordering::Relaxed) {
        0 => {
            let bytes = asked_page_bytes();
            BYTES.store(bytes, Ordering::Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

#[cold]
fn asked_page_bytes() -> usize {
    // SAFETY: sysconf takes no pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The calling process's effective user.
pub fn effective_user() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// As whom all those show that have no number in this user namespace. Opens a file.
pub fn overflow_user() -> u32 {
    let told = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    told.and_then(|text| text.trim().parse().ok()).unwrap_or(65_534)
}

/// The calling process's number, also in a child of `vfork`.
pub fn process_id() -> u32 {
    // By its number: a program may have a function of its own under this name.
    // SAFETY: the call has no argument and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_getpid) };
    u32::try_from(id).unwrap_or(0)
}

/// A limit of `getrlimit(2)`, soft and hard; `None` is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ResourceLimit {
    /// What counts.
    pub soft: Option<u64>,
    /// Up to where the process may raise it by itself.
    pub hard: Option<u64>,
}

/// The resources whose limits matter here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    /// `RLIMIT_MEMLOCK`: bytes locked or pinned.
    LockedMemory,
    /// `RLIMIT_NOFILE`: descriptors.
    Descriptors,
    /// `RLIMIT_RTPRIO`: the highest priority of real time.
    RealTimePriority,
}

/// A number of `getrlimit`, whose type differs between C libraries.
#[cfg(target_env = "gnu")]
type Number = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Number = libc::c_int;

impl Resource {
    fn number(self) -> Number {
        match self {
            Self::LockedMemory => libc::RLIMIT_MEMLOCK,
            Self::Descriptors => libc::RLIMIT_NOFILE,
            Self::RealTimePriority => libc::RLIMIT_RTPRIO,
        }
    }

    /// The limit.
    ///
    /// # Errors
    ///
    /// Only where a filter of system calls refuses the question.
    pub fn limit(self) -> Result<ResourceLimit, Errno> {
        let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
        let unchanged = std::ptr::null::<libc::rlimit64>();
        // By its number: a program may have a function of its own called `getrlimit`.
        // SAFETY: the kernel fills the structure.
        checked(unsafe {
            libc::syscall(libc::SYS_prlimit64, 0, self.number(), unchanged, &raw mut limit)
        })?;
        let bounded = |value| (value != libc::RLIM64_INFINITY).then_some(value);
        Ok(ResourceLimit { soft: bounded(limit.rlim_cur), hard: bounded(limit.rlim_max) })
    }

    /// Sets the soft limit to the hard one, which needs no privilege, and says what it is.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn raise(self) -> Result<ResourceLimit, Errno> {
        let ResourceLimit { hard, .. } = self.limit()?;
        let value = hard.unwrap_or(libc::RLIM_INFINITY);
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: the kernel reads the structure.
        done(unsafe { libc::setrlimit(self.number(), &raw const limit) })?;
        Ok(ResourceLimit { soft: hard, hard })
    }
}

/// A descriptor of the process that has this number now. Linux 5.3.
pub fn pidfd_open(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno(libc::EINVAL))?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// A number that cannot be guessed.
pub fn random() -> Result<u64, Errno> {
    let mut bytes = [0_u8; 8];
    // SAFETY: the kernel writes at most the array's length. So few bytes come at once or not at all.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    checked(got as libc::c_long)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Enters the kernel and leaves it: what a system call costs at least.
pub fn empty_call() {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

/// The C library's heap, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeapUse {
    /// In use by the program, the heap's own words included.
    pub used: usize,
    /// Taken from the kernel.
    pub taken: usize,
}

/// How large the heap is. Only the GNU C library tells.
#[cfg(target_env = "gnu")]
pub fn heap() -> Option<HeapUse> {
    // SAFETY: the call looks at the heap and touches nothing else.
    let heap = unsafe { libc::mallinfo2() };
    Some(HeapUse { used: heap.uordblks + heap.hblkhd, taken: heap.arena + heap.hblkhd })
}

/// How large the heap is. Only the GNU C library tells.
#[cfg(not(target_env = "gnu"))]
pub fn heap() -> Option<HeapUse> {
    None
}

/// The kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> Result<String, Errno> {
    Ok(text_of(&kernel_names()?.release))
}

/// How the kernel was built, as `uname -v` prints it.
pub fn kernel_version() -> Result<String, Errno> {
    Ok(text_of(&kernel_names()?.version))
}

fn kernel_names() -> Result<libc::utsname, Errno> {
    let mut names = MaybeUninit::<libc::utsname>::zeroed();
    // By its number: a program may have a function of its own under this name.
    // SAFETY: the kernel writes one `utsname` at most.
    done(unsafe { libc::syscall(libc::SYS_uname, names.as_mut_ptr()) })?;
    // SAFETY: zeros are one, and so is what the kernel has written.
    Ok(unsafe { names.assume_init() })
}

fn text_of(name: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = name.iter().map(|&byte| byte.to_ne_bytes()[0]).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}

/// How the process's system calls are restricted: 0 not at all, 1 strictly, 2 by filters (seccomp). The error
/// number, negative, where that is refused.
pub fn sandbox_mode() -> i32 {
    // By its number: a program may have a function of its own under this name.
    // SAFETY: takes no pointer.
    let mode = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_GET_SECCOMP) };
    i32::try_from(mode).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }

    #[test]
    fn the_kernel_answers() {
        assert!(page_bytes().is_power_of_two());
        let limit = Resource::Descriptors.limit().unwrap();
        assert!(limit.soft.is_some_and(|soft| soft > 0));
        let release = kernel_release().unwrap();
        assert!(release.starts_with(|first: char| first.is_ascii_digit()), "{release}");
        assert!(kernel_version().unwrap().starts_with('#'));
        assert!(limit.hard.is_none_or(|hard| limit.soft.is_some_and(|soft| soft <= hard)));
    }
}
