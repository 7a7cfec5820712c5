//! System calls by the instruction itself, which no function of that name replaces, and the C library's way to say that
//! one failed.
//!
//! What a call does to memory is its maker's responsibility; nothing here adds to it.

use crate::errno::{Errno, set_errno};
use libc::{c_int, c_long};

/// The kernel's answer, `-errno` where the call failed.
#[derive(Clone, Copy, Debug)]
pub struct RawAnswer(pub isize);

impl RawAnswer {
    /// The result as the C library gives it: -1 with the error number set, or else the error number
    /// left as it is.
    pub fn as_libc(self) -> isize {
        match self.errno() {
            None => self.0,
            Some(errno) => {
                set_errno(Errno(errno));
                -1
            }
        }
    }

    /// Whether the kernel refused with this error number.
    pub fn is(self, errno: c_int) -> bool {
        self.errno() == Some(errno)
    }

    /// Whether the kernel refused.
    pub fn has_failed(self) -> bool {
        self.errno().is_some()
    }

    /// The kernel's error number, if it refused.
    pub fn errno(self) -> Option<c_int> {
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
#[allow(clippy::cast_possible_truncation)] // registers have 64 bits
pub unsafe fn system_call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> RawAnswer {
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
    RawAnswer(answer)
}

/// As on x86-64.
///
/// # Safety
///
/// Whatever the call demands.
#[cfg(target_arch = "aarch64")]
#[inline]
#[allow(clippy::cast_possible_truncation)] // registers have 64 bits
pub unsafe fn system_call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> RawAnswer {
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
    RawAnswer(answer)
}

/// As on x86-64, but by the C library's function of that purpose.
///
/// # Safety
///
/// Whatever the call demands.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub unsafe fn system_call(number: c_long, [a, b, c, d, e]: [usize; 5]) -> RawAnswer {
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::syscall(number, a, b, c, d, e) };
    RawAnswer(if answer < 0 { -(crate::errno::last_errno().0 as isize) } else { answer as isize })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::last_errno;

    #[test]
    fn failures_are_told_in_the_c_library_s_way() {
        set_errno(Errno(libc::EXDEV));
        assert_eq!(RawAnswer(0).as_libc(), 0);
        assert_eq!(RawAnswer(-4096).as_libc(), -4096);
        assert_eq!(last_errno(), Errno(libc::EXDEV), "left as it was");
        assert_eq!(RawAnswer(-(libc::EINVAL as isize)).as_libc(), -1);
        assert_eq!(last_errno(), Errno(libc::EINVAL));
    }

    #[test]
    fn the_instruction_reaches_the_kernel() {
        // SAFETY: closing a number that is not open.
        let answer = unsafe { system_call(libc::SYS_close, [usize::MAX, 0, 0, 0, 0]) };
        assert_eq!(answer.errno(), Some(libc::EBADF));
    }
}
