//! What is true of this process alone: a page that a forked child finds to be zeros, however it was forked, before its
//! first instruction.
//!
//! # Safety
//!
//! The unsafe code of this file is there to map the page and to read it. It stays mapped, and is read and written as atomic words only.

use crate::errno::Errno;
use crate::memory;
use crate::process::page_bytes;
use pinfold_core::first_made::FirstMade;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

/// How many lean threads are noted: a few more than a process has.
const LEAN: usize = 8;

/// How many threads of the library's own are counted.
pub(crate) const OWN: usize = 16;

/// All zeros at first, and in each forked child.
#[repr(C)]
pub(crate) struct ProcessPage {
    /// The lean threads that run, as the C library names them, 0 where there is none. First, in one line of the cache:
    /// each call of the library looks here.
    pub(crate) lean: [AtomicUsize; LEAN],
    /// The numbers of the library's own threads that run, 0 where there is none.
    pub(crate) own: [AtomicU32; OWN],
    /// Which process this is, 0 until that is asked: see `mapping`.
    pub(crate) number: AtomicU64,
}

static PAGE: FirstMade<ProcessPage> = FirstMade::new();

/// The page, if it was made, in this process or in one that it was forked from.
pub(crate) fn get() -> Option<&'static ProcessPage> {
    PAGE.get()
}

/// The page, made by the first call. One that another thread makes at the same moment stays mapped, for nothing.
///
/// # Errors
///
/// `EINVAL` before Linux 4.14, `ENOMEM` where addresses, memory or mappings are exhausted.
pub(crate) fn get_or_make() -> Result<&'static ProcessPage, Errno> {
    PAGE.get().map_or_else(|| make().map(|page| PAGE.get_or_set(page)), Ok)
}

fn make() -> Result<&'static ProcessPage, Errno> {
    // Miri knows no such advice.
    if cfg!(miri) {
        return Err(Errno(libc::EINVAL));
    }
    let range = memory::map(page_bytes())?;
    // SAFETY: the mapping above, which no other code knows.
    if let Err(errno) = unsafe { memory::wipe_on_fork(range) } {
        // SAFETY: as above.
        unsafe { memory::unmap(range) };
        return Err(errno);
    }
    let page = ptr::with_exposed_provenance::<ProcessPage>(range.start());
    // SAFETY: a page of zeros, which are a value, readable and writable for as long as the process lives, and aligned. The
    // kernel sets it to zero in a forked child, before it runs.
    Ok(unsafe { &*page })
}
