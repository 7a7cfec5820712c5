//! The library as it is built: what it takes over, and what it leaves alone.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to load the library and ask where its names lead; nothing of it is
//! called.

#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)] // only tests use it

mod built;

use built::{NAME, library};
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

/// Everything that the library takes over.
const TAKEN: [&CStr; 24] = [
    c"ibv_reg_mr",
    c"ibv_reg_mr_iova",
    c"ibv_reg_mr_iova2",
    c"ibv_reg_mr_ex",
    c"ibv_reg_buf_mr",
    c"ibv_rereg_mr",
    c"ibv_dereg_mr",
    c"ibv_dealloc_pd",
    c"ibv_unimport_pd",
    c"ibv_close_device",
    c"ibv_fork_init",
    c"fi_fabric",
    c"fi_fabric2",
    // The hooks, and what they tell.
    c"madvise",
    c"process_madvise",
    c"shmat",
    c"syscall",
    c"mprotect",
    c"pkey_mprotect",
    c"mremap",
    c"ioctl",
    c"prctl",
    c"pinfold_process_feed",
    c"pinfold_process_hooks",
];

/// What changes mappings, allocates, forks or looks names up: the C library's, and left to it.
const LEFT: [&CStr; 14] = [
    c"mmap",
    c"munmap",
    c"posix_madvise",
    c"brk",
    c"sbrk",
    c"shmdt",
    c"malloc",
    c"free",
    c"realloc",
    c"fork",
    c"dlsym",
    c"dlopen",
    c"sigaction",
    c"pthread_create",
];

/// The file in which `name` is found, looked up in the library and what it needs.
fn home(name: &CStr) -> Option<String> {
    let path = CString::new(library().as_os_str().as_bytes()).unwrap();
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the library's initialisers are the C library's; the names are C strings; what is
    // found is only asked for its file's name, which lives as long as the library is loaded.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!handle.is_null(), "{path:?} is not loaded");
        let address = libc::dlsym(handle, name.as_ptr());
        if address.is_null() || libc::dladdr(address, found.as_mut_ptr()) == 0 {
            return None;
        }
        let file = CStr::from_ptr(found.assume_init().dli_fname);
        Some(file.to_string_lossy().into_owned())
    }
}

#[test]
fn it_takes_over_what_it_says() {
    for name in TAKEN {
        assert!(home(name).is_some_and(|file| file.ends_with(NAME)), "{name:?}");
    }
}

#[test]
fn it_leaves_the_c_library_alone() {
    for name in LEFT {
        let file = home(name).unwrap_or_default();
        assert!(!file.is_empty() && !file.ends_with(NAME), "{name:?} is in {file}");
    }
}

/// Nor does it say anything to a program that registers no memory, whatever its settings are.
#[test]
fn a_program_without_rdma_runs_as_it_is() {
    let output = Command::new("/bin/sh")
        .args(["-c", "echo fine; exit 5"])
        .env("LD_PRELOAD", library())
        .env("PINFOLD_MAX_BYTES", "nonsense")
        .env("PINFOLD_STATISTICS", "stderr")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"fine\n"[..], &b""[..]));
}
