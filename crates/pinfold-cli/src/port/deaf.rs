//! A monitor that claims to see everything and sees nothing: the cache of old, keyed by address.
//!
//! It proves that the checks of this program can fail.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement `Monitor`, and breaks its promise on purpose. What
//! follows is a device that reads and writes pages which are no longer the program's. These pages
//! stay pinned by the registration, so they belong to no other process either, and the program touches its
//! memory by address only: the harm is wrong bytes, which are counted.

#![allow(unsafe_code)]

use pinfold::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Watch,
};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// See the file's header.
#[derive(Debug, Default)]
pub(crate) struct Deaf {
    /// Guards how often it was notified.
    event_count: Mutex<u32>,
    changed: Condvar,
}

impl Deaf {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.event_count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: the promise is broken on purpose, see the file's header.
unsafe impl Monitor for Deaf {
    fn name(&self) -> &'static str {
        "deaf"
    }

    fn check(&self) -> Result<Sequence, Lost> {
        Ok(Sequence(1))
    }

    fn watch(&self, _: AddressRange) -> Watch {
        Watch::Covered
    }

    fn change_pending(&self, _: AddressRange) -> bool {
        false
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        Replay { up_to: Position(0, 0), sequence: Sequence(1), complete: true, may_repeat: false }
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        Cover::Detected
    }

    fn forked(&self) -> bool {
        false
    }

    fn notified(&self) -> u32 {
        *self.lock()
    }

    fn notify(&self) {
        let mut count = self.lock();
        *count = count.wrapping_add(1);
        self.changed.notify_all();
    }

    fn wait(&self, seen: u32) {
        let mut count = self.lock();
        while *count == seen {
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
