//! Whether a leak sanitizer is in the process: then nothing is kept.
//!
//! At its check it stops all threads but one that it makes for that, which then unmaps memory of its own. Where that
//! lies in one mapping with memory of which something is kept, the kernel has the unmapping wait for the monitor's
//! thread, which is stopped: for ever. Nor does it find libibverbs' structures of idle registrations, which our memory
//! alone names.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read what the dynamic linker made of a symbol.

#![allow(unsafe_code)]

/// Asks no linker: its word for the sanitizer's function, a weak symbol here, is 0 if no library has it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_here() -> bool {
    let address: usize;
    // SAFETY: reads a word that the linker has set.
    unsafe {
        core::arch::asm!(
            ".weak __lsan_do_leak_check",
            "mov {}, qword ptr [rip + __lsan_do_leak_check@GOTPCREL]",
            out(reg) address,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    address != 0
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
pub(crate) fn is_here() -> bool {
    let address: usize;
    // SAFETY: as on x86-64.
    unsafe {
        core::arch::asm!(
            ".weak __lsan_do_leak_check",
            "adrp {0}, :got:__lsan_do_leak_check",
            "ldr {0}, [{0}, :got_lo12:__lsan_do_leak_check]",
            out(reg) address,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    address != 0
}

/// Where the instructions are not known, it is not noticed.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) const fn is_here() -> bool {
    false
}
