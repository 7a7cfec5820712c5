//! System calls by the instruction itself, and the C library's way to say that one failed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the instruction. What a call does to memory is its maker's
//! responsibility; nothing here adds to it.

#![allow(unsafe_code)]
#![allow(clippy::cast_possible_truncation)] // registers have 64 bits, see `lib.rs`

use libc::{c_int, c_long};
use pinfold_kernel::Errno;
use pinfold_kernel::errno::set_errno;

/// The kernel's answer, `-errno` where the call failed.
#[derive(Clone, Copy)]
pub(crate) struct Answer(pub(crate) isize);

impl Answer {
    /// The result as the C library gives it: -1 with the error number set, or else the error number
    /// left as it is.
    pub(crate) fn as_libc(self) -> isize {
        match self.errno() {
            None => self.0,
            Some(errno) => {
                set_errno(Errno(errno));
                -1
            }
        }
    }

    /// Whether the kernel refused with this error number.
    pub(crate) fn is(self, errno: c_int) -> bool {
        self.errno() == Some(errno)
    }

    /// Whether the kernel refused.
    pub(crate) fn has_failed(self) -> bool {
        self.errno().is_some()
    }

    fn errno(self) -> Option<c_int> {
        // The kernel's convention: error numbers are below 4096, and no call has such results.
        let failed = (-4095..0).contains(&self.0);
        failed.then(|| c_int::try_from(-self.0).unwrap_or(libc::EINVAL))
    }
}

/// Makes a system call with five arguments; those that it does not have are not looked at.
///
/// # Safety
///
/// Whatever the call demands.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) unsafe fn system_call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> Answer {
    let answer;
    // SAFETY: the instruction changes these registers and, by the caller's promise, memory.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    Answer(answer)
}

/// As on x86-64.
///
/// # Safety
///
/// Whatever the call demands.
#[cfg(target_arch = "aarch64")]
#[inline]
pub(crate) unsafe fn system_call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> Answer {
    let answer;
    // SAFETY: as on x86-64.
    unsafe {
        core::arch::asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e,
            options(nostack),
        );
    }
    Answer(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_kernel::errno::last_errno;

    #[test]
    fn failures_are_told_in_the_c_library_s_way() {
        set_errno(Errno(libc::EXDEV));
        assert_eq!(Answer(0).as_libc(), 0);
        assert_eq!(Answer(-4096).as_libc(), -4096);
        assert_eq!(last_errno(), Errno(libc::EXDEV), "left as it was");
        assert_eq!(Answer(-(libc::EINVAL as isize)).as_libc(), -1);
        assert_eq!(last_errno(), Errno(libc::EINVAL));
    }

    #[test]
    fn the_instruction_reaches_the_kernel() {
        // SAFETY: closing a number that is not open.
        let answer = unsafe { system_call(libc::SYS_close, [usize::MAX, 0, 0, 0, 0]) };
        assert_eq!(answer.errno(), Some(libc::EBADF));
    }
}
