//! Memory that another driver shares (dmabuf), registered by its descriptor.
//!
//! Such memory has no address in the process, so no cache finds it and no mapping change makes it
//! stale: its exporter tells the device itself when it moves.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the one call that registers; its result is looked after as
//! any other registration.

#![allow(unsafe_code)]

use super::attributes::access_flags;
use super::device::is_gone;
use super::ffi::IBV_ACCESS_RELAXED_ORDERING;
use super::registrar::{MemoryRegion, Verbs};
use crate::fork_mark::FORKED;
use pinfold_core::Access;
use pinfold_kernel::{Errno, errno::last_errno};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A registration of a dmabuf, given back when dropped.
///
/// It does not outlive its registrar:
///
/// ```compile_fail,E0505
/// # use pinfold::{Access, registrar::verbs::{DmabufPart, Verbs}};
/// # use std::os::fd::BorrowedFd;
/// # fn after_its_parent(registrar: Verbs, descriptor: BorrowedFd<'_>, part: DmabufPart) {
/// let dmabuf = unsafe { registrar.register_dmabuf(descriptor, part, Access::READ) }.unwrap();
/// drop(registrar);
/// drop(dmabuf);
/// # }
/// ```
#[derive(Debug)]
pub struct Dmabuf<'v> {
    registrar: &'v Verbs,
    region: MemoryRegion,
}

impl Dmabuf<'_> {
    /// The keys of the registration.
    pub const fn region(&self) -> MemoryRegion {
        self.region
    }
}

impl Drop for Dmabuf<'_> {
    fn drop(&mut self) {
        // What cannot be given back is tried again by the registrar, or went with its device.
        let _ = self.registrar.give_back(self.region);
    }
}

/// A part of a dmabuf, and the address under which work requests shall name it.
#[derive(Clone, Copy, Debug)]
pub struct DmabufPart {
    /// Where it begins in the dmabuf, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: usize,
    /// The address of its first byte in work requests. Its place within a page is that of `offset`.
    pub address: u64,
}

impl Verbs {
    /// Registers a part of the dmabuf `descriptor`, which may be closed afterwards. Of the library's own
    /// [flags](Self::with_flags) it gets `IBV_ACCESS_RELAXED_ORDERING` alone, because the kernel refuses others here.
    ///
    /// # Errors
    ///
    /// [`DmabufError`] says whether the library, the kernel or the device lacks it.
    ///
    /// # Safety
    ///
    /// The device may use the memory as `access` says for as long as the registration lives.
    pub unsafe fn register_dmabuf(
        &self,
        descriptor: BorrowedFd<'_>,
        part: DmabufPart,
        access: Access,
    ) -> Result<Dmabuf<'_>, DmabufError> {
        if self.forked() {
            return Err(DmabufError::Gone { errno: FORKED });
        }
        let register =
            self.domain().device().library().reg_dmabuf_mr.ok_or(DmabufError::OldLibrary)?;
        let DmabufPart { offset, length, address } = part;
        if !self.domain().device().is_there() {
            return Err(DmabufError::Gone { errno: libc::EBADF });
        }
        let flags = access_flags(access) | self.flags() & IBV_ACCESS_RELAXED_ORDERING;
        // SAFETY: the domain is live, and the memory is as the caller promises.
        let made = unsafe {
            let (pd, fd) = (self.domain().as_ptr(), descriptor.as_raw_fd());
            register(pd, offset, length, address, fd, flags.cast_signed())
        };
        let refusal = || DmabufError::of(self.domain().device().meaning(last_errno()));
        let made = NonNull::new(made).ok_or_else(refusal)?;
        // SAFETY: the library just made it in this domain.
        Ok(Dmabuf { registrar: self, region: unsafe { self.adopt(made, access) } })
    }
}

/// Why a dmabuf was not registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmabufError {
    /// The library is older than rdma-core 34.
    #[error("libibverbs knows no dmabuf: install rdma-core 34 or later")]
    OldLibrary,
    /// The device or its driver takes no dmabuf.
    #[error("this RDMA device takes no dmabuf (errno {errno}): map the memory, or copy the data")]
    Unsupported {
        /// The library's error number.
        errno: i32,
    },
    /// The descriptor is no dmabuf's, or the part reaches beyond it.
    #[error("the descriptor is no dmabuf's, or the part reaches beyond its end (errno {errno})")]
    BadDescriptor {
        /// The kernel's error number.
        errno: i32,
    },
    /// The device was taken away, or this is a forked child.
    #[error("the RDMA device is gone (errno {errno}): open it again")]
    Gone {
        /// The kernel's error number.
        errno: i32,
    },
    /// Something else went wrong.
    #[error("ibv_reg_dmabuf_mr failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The kernel's error number.
        errno: i32,
    },
}

impl DmabufError {
    const fn of(Errno(errno): Errno) -> Self {
        match errno {
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => Self::Unsupported { errno },
            // Also a closed device; of the two descriptors, the caller's is the likelier.
            libc::EINVAL | libc::EBADF => Self::BadDescriptor { errno },
            _ if is_gone(errno) => Self::Gone { errno },
            _ => Self::Os { errno },
        }
    }
}
