//! One system call: a descriptor of this process.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

pub(crate) fn this_process() -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    match i32::try_from(opened) {
        // SAFETY: the kernel has just opened it for us.
        Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}
