//! Regions of a ring, suspended: the slot is emptied, and filled again under the same index.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare [`Suspend::renew`], which does nothing unsafe itself.

#![allow(unsafe_code)]

use super::{BufferIndex, IoUring, refused};
use crate::fork_mark::FORKED;
use pinfold_core::{
    Access, AddressRange, DeregisterError, RegisterError, Renewed, Suspend, Unsupported,
};

// SAFETY: there is no connection; with tags, a slot that is emptied is quiet when the kernel has posted its tag, behind
// the last request that named it. Without, requests on leases that were handed over are what the trait leaves to the
// program: every other lease has ended, and its requests with it.
unsafe impl Suspend for IoUring {
    // What uses a slot holds a lease.
    pinfold_core::no_connections!();

    fn can_suspend(
        &self,
        _range: AddressRange,
        _none: &[Self::Connection],
    ) -> Result<(), Unsupported> {
        Ok(())
    }

    /// Empties the slot and keeps it. Requests in flight go on with what they have.
    unsafe fn withdraw(
        &self,
        handle: BufferIndex,
        range: AddressRange,
    ) -> Result<(), DeregisterError> {
        if self.fork_mark.forked() {
            return Err(DeregisterError::DeviceGone { errno: FORKED });
        }
        self.clear(handle.0, range).map_err(refused)
    }

    /// With tags: no request in flight uses what the slots held. Without, no slot holds it, and the end of requests is the
    /// program's word. In a forked child, whose memory the parent's ring does not touch, always.
    fn quiet(&self, range: AddressRange) -> bool {
        let has_ended = || self.tags.as_ref().is_none_or(|tags| tags.quiet(range));
        self.fork_mark.forked() || self.slots.are_clear_of(range) && has_ended()
    }

    unsafe fn renew(
        &self,
        handle: BufferIndex,
        range: AddressRange,
        access: Access,
    ) -> Result<Renewed<BufferIndex>, RegisterError> {
        self.check_request(range, access)?;
        if let Some(tags) = &self.tags {
            // What was not withdrawn is replaced now, and ends.
            let _replaced = tags.begin_end(handle.0, range);
        }
        match self.fill(handle.0, range) {
            Ok(()) => Ok(Renewed::Same),
            Err(errno) => {
                self.slots.give_back(handle.0);
                Err(self.explain(range, errno))
            }
        }
    }
}
