//! `libpinfold_preload.so`: cached, never stale registrations for programs that know nothing of it.
//!
//!     LD_PRELOAD=/path/to/libpinfold_preload.so PROGRAM       # or: pinfold run -- PROGRAM
//!
//! # The price
//!
//! - A registration that is found costs one system call (the monitor's check) and a look-up. One that
//!   is not costs what it did; one that is to be kept, the monitor's share besides. What is kept stays
//!   pinned while it is idle, within a budget.
//! - Nothing is kept before the program registers the same bytes a second time (`admission`). Until
//!   then there is no monitor and no thread; from then on two threads, asleep, for all of the process.
//! - Remote rights are not kept unless asked for.
//! - The exceptions of the monitor: memory that it cannot see is registered for each use. Two changes
//!   that the kernel reports to no userfaultfd (`MADV_GUARD_INSTALL`, `shmat(SHM_REMAP)`) are told by
//!   hooks (below); a program that makes them by a system call instruction of its own needs the cache
//!   off.
//! - One comparison more in each call of `madvise`, `shmat` and `prctl`, two of `mprotect`, eight of `syscall`.
//!
//! # How it works
//!
//! The dynamic linker finds `ibv_reg_mr` here before it looks into libibverbs. The program gets
//! libibverbs' own handle, with a registration of its own, so every other function may have it, by
//! whatever route. `ibv_dereg_mr` keeps the registration, idle, and the same request gets it again,
//! unless its memory has changed. Whatever cannot or need not be kept goes to libibverbs with the
//! arguments that came: rights that are not asked to be kept, on-demand paging, memory windows,
//! foreign offsets (`iova`), everything in a process where the monitor cannot run. What the program
//! does to its memory, the kernel tells; of libc only `madvise`, `process_madvise`, `shmat` and
//! `syscall` are taken over, for the two changes that it does not (`hooks` says which, and why no
//! others). Those hooks also serve programs that use Pinfold as a library: they tell the process's
//! feed, `pinfold_process_feed`.
//!
//! A module that takes libibverbs' functions from a handle of its own (`dlopen`, then `dlsym` on it)
//! bypasses this library, rightly and wholly; `caller` says how that is detected.
//!
//! # Where to look next
//!
//! In the order of layers: `reasons` (why something is not kept), `heap` (memory of our own), `linked` (which functions the program has), `sanitizer` (of leaks), `sandbox` (the program's own
//! filters), `complaint` (standard error), `environment` (variables), `sync` (seams), `main_thread` (a `main` that leaves), `apart` (a stack of our own), `device` (which open file a descriptor stands for), `steps` (one deregistration on two threads), `hooks` (apart from all
//! others), `rank` (of a job), `settings`, `rights`, `modules` (what is loaded, and asks for what), `caller` (which module calls), `found` (what is looked for once), `real` (libibverbs itself), `holding` (a thread that waits for itself),
//! `store` (what is registered and watched), `admission` (what is worth keeping), `children` (what forked children do to
//! it), `report`, `mapping_room` (how many mappings may be watched), `keeper` (finds, registers, keeps), `process` (all of it, also after a fork), `calls`
//! (what each function does), `libfabric` (a monitor for its cache), `exports` (their names).

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the preload library reads 64-bit Linux modules");

mod admission;
mod apart;
mod caller;
mod calls;
mod children;
mod complaint;
mod device;
mod environment;
mod exports;
mod found;
mod heap;
mod holding;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod hooks;
mod keeper;
mod libfabric;
mod linked;
mod main_thread;
mod mapping_room;
mod modules;
mod process;
mod rank;
mod real;
mod reasons;
mod report;
mod rights;
mod sandbox;
mod sanitizer;
mod settings;
mod steps;
mod store;
mod sync;
