//! The names that this library takes over: one-line jumps into [`calls`](crate::calls).
//!
//! Where a call's meaning depends on the caller, the return address is passed on as one argument
//! more, in the register that the C convention has for it. That is one instruction and a jump; where
//! the machine is not known the address is 0, and what depends on it passes through.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to export functions under names of libibverbs and libfabric, with their types,
//! and to write the jumps. A jump leaves the stack and every other register as the caller made
//! them.

#![allow(unsafe_code)]

use crate::{calls, libfabric};
use libc::{c_int, c_uint, c_void, size_t};
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr, ibv_pd};

/// Exports `$name` as a jump to `$inner` with the return address as the argument behind the last:
/// in `$x86` or `$arm`.
macro_rules! with_caller {
    ($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $x86:literal, $arm:literal, $inner:path) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            core::arch::naked_asm!(
                "endbr64",
                concat!("mov ", $x86, ", [rsp]"),
                "jmp {inner}",
                inner = sym $inner,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            core::arch::naked_asm!(
                "hint #34", // bti c
                concat!("mov ", $arm, ", x30"),
                "b {inner}",
                inner = sym $inner,
            )
        }

        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the caller's promises are handed on.
            #[allow(unused_unsafe)] // not each asks for some
            unsafe { $inner($($argument,)* 0) }
        }
    };
}

with_caller!(
    ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: size_t, access: c_int) -> *mut ibv_mr,
    "r8", "x4", calls::reg_mr
);
with_caller!(
    ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, length: size_t, iova: u64, access: c_uint)
        -> *mut ibv_mr,
    "r9", "x5", calls::reg_mr_iova2
);
with_caller!(
    ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, length: size_t, iova: u64, access: c_int)
        -> *mut ibv_mr,
    "r9", "x5", calls::reg_mr_iova
);
with_caller!(
    ibv_reg_mr_ex(pd: *mut ibv_pd, attributes: *mut c_void, third: size_t, fourth: size_t) -> *mut ibv_mr,
    "r8", "x4", calls::reg_mr_ex
);
with_caller!(
    ibv_reg_buf_mr(pd: *mut ibv_pd, buf: *mut c_void, addr: *mut c_void, length: size_t, access: c_int)
        -> *mut ibv_mr,
    "r9", "x5", calls::reg_buf_mr
);
with_caller!(ibv_dereg_mr(mr: *mut ibv_mr) -> c_int, "rsi", "x1", calls::dereg_mr);
with_caller!(ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int, "rsi", "x1", calls::dealloc_pd);
with_caller!(ibv_close_device(context: *mut ibv_context) -> c_int, "rsi", "x1", calls::close_device);
with_caller!(ibv_unimport_pd(pd: *mut ibv_pd) -> (), "rsi", "x1", calls::unimport_pd);
with_caller!(ibv_fork_init() -> c_int, "rdi", "x0", calls::fork_init);

with_caller!(
    fi_fabric(attributes: *mut c_void, fabric: *mut *mut c_void, context: *mut c_void) -> c_int,
    "rcx", "x3", libfabric::fabric
);

#[unsafe(no_mangle)]
unsafe extern "C" fn fi_fabric2(
    info: *mut c_void,
    fabric: *mut *mut c_void,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises are handed on.
    unsafe { libfabric::fabric2(info, fabric, flags, context) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: size_t,
    access: c_int,
) -> c_int {
    // SAFETY: the caller's promises are handed on.
    unsafe { calls::rereg_mr(mr, flags, pd, addr, length, access) }
}

/// Runs when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: calls::AtStart = calls::at_start;

/// Runs when the process exits in an orderly way, after the program's own `atexit` functions.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = calls::at_exit;
