//! Typed calls of the Linux kernel. **Internal to Pinfold**: no stable interface, and other crates have no use for it.
//!
//! Every system call of the workspace stands here once, with what it needs of the kernel: the version that
//! brought it, the error numbers that callers tell apart, and whether it can change what memory holds. A
//! function that cannot break memory safety is safe to call with any argument; the others say in `# Safety`
//! what their callers are responsible for.
//!
//! | module | calls |
//! |---|---|
//! | [`errno`], [`raw`] | the kernel's error numbers, calls by the instruction itself |
//! | [`control_group`] | which control groups count this process, and their limits |
//! | [`process`], [`thread`], [`priority`], [`signal`], [`child`], [`poll`] | facts of the process, threads without signals, children, waiting |
//! | [`descriptor`], [`own_process`], [`socket`], [`futex`], [`membarrier`] | files, connections, wake-ups, barriers |
//! | [`memory`], [`mapping`], [`pages`], [`numa`], [`trial`] | mappings and their pages, on ranges and as owned values; changes to test monitors by |
//! | [`procmap`], [`userfaultfd`], [`io_uring`], [`soft_roce`], [`symbols`] | the table of mappings, its changes, fixed buffers, a device's doorbell, the dynamic linker |
//!
//! # Which way a call takes
//!
//! `rustix` makes its system calls itself: no cancellation point, no write to `errno`, and no function that
//! another library (UCX, `libpinfold_preload.so`) has replaced, or the program has under that name. Two kinds of calls go through the C library on
//! purpose:
//!
//! - `mmap`, `munmap` and `madvise`: other caches of registrations replace these functions to see memory go, and
//!   memory of ours may be in such a cache;
//! - calls that `rustix` takes for infallible (`gettid`, `getrlimit`, `sched_yield`) and that a filter of system
//!   calls may refuse; and `poll`, which it makes as `ppoll`. By their numbers (`syscall`).
//!
//! `mremap` is always the kernel's own call, because replacements of the C library's function may lose its last
//! argument. Nothing in [`descriptor`], [`futex`], [`procmap`] and [`userfaultfd`] allocates or takes a lock, so
//! that the reader of a monitor may use all of it.
//!
//! The order of layers, each using only what stands before it: `control_group`, `errno`, `raw`, `request`, `zeroed`, `symbols`, `futex`,
//! `membarrier`, `io_uring`, `soft_roce`, `memory`, `poll`, `process`, `process_page`, `signal`, `child`, `numa`, `thread`, `priority`, `descriptor`, `own_process`, `pages`, `procmap`, `socket`,
//! `userfaultfd`, `words`, `fork_holes`, `mapping`, `trial`.
//!
//! # Safety
//!
//! This crate reopens `unsafe_code` once, here: foreign calls are what it is for. Each module says which of its
//! functions can break memory safety, and why the others cannot.

#![allow(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("these are calls of the Linux kernel");

pub mod child;
pub mod control_group;
pub mod descriptor;
pub mod errno;
mod fork_holes;
pub mod futex;
pub mod io_uring;
pub mod mapping;
pub mod membarrier;
pub mod memory;
pub mod numa;
pub mod own_process;
pub mod pages;
pub mod poll;
pub mod priority;
pub mod process;
mod process_page;
pub mod procmap;
pub mod raw;
mod request;
pub mod signal;
pub mod socket;
pub mod soft_roce;
pub mod symbols;
pub mod thread;
pub mod trial;
pub mod userfaultfd;
pub mod words;
pub mod zeroed;

pub use descriptor::Descriptor;
pub use errno::Errno;
pub use pinfold_core::first_made::FirstMade;
