//! Hooks on the C library's memory functions, for what the kernel tells no userfaultfd.
//!
//! Symbol interposition only: a function of the same name that the dynamic linker finds first. No
//! instruction is changed. Each hook makes the system call itself, so it looks nothing
//! up, allocates nothing, takes no lock and works before `main`, in a signal handler, in a `vfork`
//! child, and under any allocator. What it hooks for, it marks in the process's feed, before the
//! call and after; everything else is one comparison dearer than it was. The last hooks below, from
//! `mprotect` on, are claimed to no process.
//!
//! # Which functions, and why no others
//!
//! | function | hooked | because |
//! |---|---|---|
//! | `madvise` | `MADV_GUARD_INSTALL` | takes pages away; no userfaultfd event |
//! | `process_madvise` | the same, on oneself | as above |
//! | `shmat` | `SHM_REMAP` | maps over watched memory; no userfaultfd event |
//! | `syscall` | those three by their numbers, `mprotect`, `pkey_mprotect`, `mremap`, `ioctl`, `prctl` and `seccomp` | allocators, runtimes, sandboxes and the hooks of UCX and Open MPI call them so |
//! | `mprotect`, `pkey_mprotect` | rights that are taken away from where registrations were kept, and a protection key given | the pages stay, but libibverbs would refuse to register them |
//! | `ioctl` | `UFFDIO_REGISTER` that the kernel refused (`EBUSY`) | the program's own userfaultfd goes first: ours releases the range |
//! | `ioctl` | `UFFDIO_UNREGISTER` | before 6.18 it ends our watch, too: reported as a change; later it is refused because of our watch, which ends |
//! | `ioctl` | `RDMA_VERBS_IOCTL` | a deregistration in two steps (`steps`) |
//! | `mremap` | ranges in which something may be kept | refused (`EFAULT`) because of our watch, which ends |
//! | `prctl`, `seccomp` | a filter of system calls that is set | nothing begins any more (`sandbox`) |
//! | `munmap`, `mmap`, `brk`, `sbrk`, `shmdt` | no | the kernel tells of each, exactly and before it returns, by whatever route |
//! | `madvise` with `MADV_DONTNEED` and its kin | no | the kernel tells before the pages go. A hook could mark the end, but an end is worth something only if no discard comes by another route; `free`, `malloc_trim` and ended threads discard inside the C library, so each range would have to be proved all the same (`monitor/pending_discards`), and the hook would log each discard twice more |
//! | `mlock`, `MADV_COLD`, `MADV_PAGEOUT`, `MADV_COLLAPSE`, `MADV_MERGEABLE`, `move_pages`, `mbind`, `UFFDIO_MOVE` | no | pinned pages stay, or the kernel refuses |
//! | `ftruncate`, `fallocate` | no | memory of files is not cached without eBPF: another process could do it |
//! | `malloc`, `free`, `dlopen`, `fork`, `pthread_create` | no | what they do to memory is in the table above |
//!
//! # What is not seen
//!
//! Hooks stand between modules. These calls do not pass them: the C library's own (`free`,
//! `malloc_trim` and thread stacks call `__madvise` inside it: discards, which userfaultfd reports;
//! from glibc 2.42 on also the guard of a new thread's stack, which no monitor reports: it lies where the
//! program may not touch it); a system call instruction in the program itself; io_uring's
//! `IORING_OP_MADVISE`; functions
//! taken from the C library's own handle (`dlsym` on `dlopen("libc.so.6")`); a library loaded with
//! `RTLD_DEEPBIND`; a second C library (`dlmopen`); a program linked statically, which has no
//! dynamic linker to preload anything.
//! Of all these userfaultfd goes on to tell what it tells; the two changes are blind there, which is
//! why a monitor with hooks calls them `told`, not `seen`.
//!
//! # With others
//!
//! jemalloc and mimalloc may be preloaded before or behind; neither has these functions. The address
//! sanitizer has none either, but its runtime refuses to be any but the first library:
//! `LD_PRELOAD=libasan.so:libpinfold_preload.so`, or a runtime linked statically. A library that does take
//! one of these functions over may stand first if it hands on to the next (`dlsym(RTLD_NEXT, ...)`);
//! if it makes the call itself, the hooks notice when the program starts, withdraw what they claim,
//! and name it ([`Hooks`](pinfold::monitor::hooks::Hooks)).
//!
//! A hook that is left by `longjmp` from a signal handler, or whose `vfork` child is killed in the
//! middle, never marks the end: its range is registered for each use from then on. Slower,
//! never wrong.
//!
//! There are hooks for x86-64 and arm64, whose system call instruction is written here.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to export two data symbols under names that are Pinfold's own.

#![allow(unsafe_code)]

mod aside;
mod entries;
mod self_test;
mod told;
mod userfaultfd;

use pinfold::monitor::Feed;
use pinfold::monitor::hooks::HookRecord;

/// What the hooks report, for code in this process that asks the dynamic linker for it.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)] // a name for C
pub(crate) static pinfold_process_feed: Feed = Feed::new();

/// Whether the hooks are reached.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)] // a name for C
pub(crate) static pinfold_process_hooks: HookRecord = HookRecord::new();

pub(crate) use aside::{StepAside, When, note_kept, step_aside_by};
