//! How far a ring buffer of the programs' was written and read.

use pinfold_kernel::Errno;
use pinfold_kernel::mapping::SharedValue;
use pinfold_kernel::process::page_bytes;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;

/// The two words of a ring buffer that say how far it was written and read.
#[derive(Debug)]
pub(super) struct Positions {
    /// A page that we write, and one that the kernel does.
    read: SharedValue<AtomicU64>,
    written: SharedValue<AtomicU64>,
}

impl Positions {
    pub(super) fn new(ring: BorrowedFd<'_>) -> Result<Self, Errno> {
        let read = SharedValue::new(ring, 0, true)?;
        let written = SharedValue::new(ring, page_bytes(), false)?;
        Ok(Self { read, written })
    }

    /// How far it was read, for us to write.
    pub(super) fn read(&self) -> &AtomicU64 {
        self.read.get()
    }

    /// How far it was written.
    pub(super) fn written(&self) -> &AtomicU64 {
        self.written.get()
    }
}
