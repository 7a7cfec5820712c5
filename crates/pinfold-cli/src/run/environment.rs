//! The environment that the program is started with: each entry of this process's own, as it is and in its order, and behind
//! them the variables that this command sets.
//!
//! Rust's library knows variables, in an order of its own: it loses one of two with the same name, and an entry without `=`.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the C library's `environ` and, in the child, to change it.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::AtomicPtr;
use std::{io, ptr};

unsafe extern "C" {
    static mut environ: *const *const c_char;
}

/// What `execve` is given.
pub(super) struct Environment {
    /// Into the entries, and a null pointer. Atomic only so that the whole may be sent.
    pointers: Vec<AtomicPtr<c_char>>,
    _entries: Vec<CString>,
}

impl Environment {
    /// # Errors
    ///
    /// A value has a zero byte in it.
    pub(super) fn with(variables: &[(&'static str, OsString)]) -> io::Result<Self> {
        let is_set = |entry: &CStr| variables.iter().any(|(name, _)| is_of(name, entry));
        let own = variables
            .iter()
            .map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()));
        let kept = of_this_process().filter(|entry| !is_set(entry)).map(|entry| Ok(entry.into()));
        let entries = kept.chain(own).collect::<Result<Vec<CString>, _>>()?;
        let pointers = entries.iter().map(|entry| entry.as_ptr().cast_mut());
        let pointers = pointers.chain([ptr::null_mut()]).map(AtomicPtr::new).collect();
        Ok(Self { pointers, _entries: entries })
    }

    /// Makes it this process's own.
    ///
    /// # Safety
    ///
    /// This process has one thread, and executes a program, or ends, before this value is gone.
    pub(super) unsafe fn install(&self) {
        // SAFETY: an atomic pointer is in memory as a pointer is; the rest is the caller's promise.
        unsafe { environ = self.pointers.as_ptr().cast() };
    }
}

fn is_of(name: &str, entry: &CStr) -> bool {
    let rest = entry.to_bytes().strip_prefix(name.as_bytes());
    rest.is_some_and(|rest| rest.starts_with(b"="))
}

fn of_this_process() -> impl Iterator<Item = &'static CStr> {
    // SAFETY: this command changes no variable of its own and has one thread, so that the array and its strings stay. A null
    // pointer ends it, and stands for it if it is empty.
    let entry = |at: usize| unsafe {
        let array = environ;
        let entry = if array.is_null() { ptr::null() } else { *array.add(at) };
        (!entry.is_null()).then(|| CStr::from_ptr(entry))
    };
    (0..).map_while(entry)
}
