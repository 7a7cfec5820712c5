//! `libpinfold_preload.so`: cached, never stale registrations for programs that know nothing of it.
//!
//!     LD_PRELOAD=/path/to/libpinfold_preload.so PROGRAM       # or: pinfold run -- PROGRAM
//!
//! # The price
//!
//! - A registration that is found costs one system call (the monitor's check) and a look-up; one that
//!   is not costs what it did, and the monitor's share. What is cached stays pinned while it is
//!   idle, within a budget.
//! - Local rights are given for whole pages: a device that the program itself drives may touch the
//!   rest of a buffer's first and last page, and write what another registration of the same bytes
//!   lets it write. Remote rights are never widened, and not cached unless asked for.
//! - Two threads for each protection domain that is registered with (one for all, one for each),
//!   asleep.
//! - The exceptions of the monitor: memory that it cannot see is registered for each use. Two changes
//!   that the kernel reports to no userfaultfd (`MADV_GUARD_INSTALL`, `shmat(SHM_REMAP)`) are told by
//!   hooks (below); a program that makes them by a system call instruction of its own needs the cache
//!   off.
//! - One comparison more in each call of `madvise` and `shmat`, three in each of `syscall`.
//!
//! # How it works
//!
//! The dynamic linker finds `ibv_reg_mr` here before it looks into libibverbs. Each protection
//! domain of the program gets a cache; `ibv_reg_mr` is a `get` whose lease is kept in an `ibv_mr` of
//! ours, `ibv_dereg_mr` ends it. Whatever cannot or need not be cached goes to libibverbs with
//! the arguments that came: rights that are not asked to be cached, on-demand paging, memory
//! windows, foreign offsets (`iova`), everything in a process where the monitor cannot run. What the
//! program does to its memory, the kernel tells; of libc only `madvise`, `process_madvise`, `shmat`
//! and `syscall` are taken over, for the two changes that it does not (`hooks` says which, and why no
//! others). Those hooks also serve programs that use Pinfold as a library: they tell the process's
//! feed, `pinfold_process_feed`.
//!
//! Who takes libibverbs' functions from a handle of its own (`dlopen`, then `dlsym` on it)
//! passes this library by, rightly and wholly; `caller` says how that is told.
//!
//! # Where to look next
//!
//! In the order of layers: `sys`, `elf` (seams), `hooks` (apart from all others), `settings`,
//! `rights`, `real` (libibverbs itself), `caller` (who calls), `handles` (what the program gets),
//! `room` (what the caches share), `domains` (the caches), `report`, `process` (all of it, also after
//! a fork), `calls` (what each function does), `exports` (their names).

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the preload library reads 64-bit Linux modules");

mod caller;
mod calls;
mod domains;
mod elf;
mod exports;
mod handles;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod hooks;
mod process;
mod real;
mod report;
mod rights;
mod room;
mod settings;
mod sys;
