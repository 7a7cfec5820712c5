//! Which functions the program was started with, asked of no linker: its word for a weak symbol here is 0 if no library
//! had it when this one was loaded.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read what the dynamic linker made of a symbol.

#![allow(unsafe_code)]

/// The word of the symbol `$name`.
#[cfg(target_arch = "x86_64")]
macro_rules! word_of {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: reads a word that the linker has set.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) address,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        address
    }};
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
macro_rules! word_of {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: as on x86-64.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("adrp {0}, :got:", $name),
                concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"),
                out(reg) address,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        address
    }};
}

/// Where the instructions are not known, nothing is noticed.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
macro_rules! word_of {
    ($name:literal) => {
        0_usize
    };
}

/// Whether the program has a leak sanitizer.
pub(crate) fn leak_sanitizer() -> bool {
    word_of!("__lsan_do_leak_check") != 0
}

/// Whether the program was started with libibverbs.
pub(crate) fn libibverbs() -> bool {
    word_of!("ibv_get_device_list") != 0
}
