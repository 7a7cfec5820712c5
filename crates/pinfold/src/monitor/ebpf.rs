//! PLACEHOLDER of this branch: the eBPF monitor's file belongs to another one.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to implement a trait for a type without values.

#![allow(unsafe_code)]

use super::bell::Bell;
use super::with_feed::Combinable;
use crate::{
    AddressRange, Change, Cover, Lost, MappingKind, Monitor, Position, Replay, Sequence, Watch,
};
use std::fmt;
use std::sync::Arc;

/// Not in this build.
#[derive(Debug)]
pub(super) enum Ebpf {}

/// Why there is none.
#[derive(Debug)]
pub(super) struct NotBuilt;

impl fmt::Display for NotBuilt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this build has no eBPF monitor")
    }
}

impl std::error::Error for NotBuilt {}

impl Ebpf {
    /// Never.
    pub(super) fn shared() -> Result<Arc<Self>, NotBuilt> {
        Err(NotBuilt)
    }
}

// SAFETY: there is no value of this type.
unsafe impl Combinable for Ebpf {
    fn own_bell(&self) -> &Bell {
        match *self {}
    }
}

// SAFETY: there is no value of this type.
unsafe impl Monitor for Ebpf {
    fn name(&self) -> &'static str {
        match *self {}
    }

    fn check(&self) -> Result<Sequence, Lost> {
        match *self {}
    }

    fn watch(&self, _: AddressRange) -> Watch {
        match *self {}
    }

    fn in_flux(&self, _: AddressRange) -> bool {
        match *self {}
    }

    fn replay(&self, _: Position, _: &mut dyn FnMut(AddressRange)) -> Replay {
        match *self {}
    }

    fn coverage(&self, _: MappingKind, _: Change) -> Cover {
        match *self {}
    }

    fn forked(&self) -> bool {
        match *self {}
    }

    fn bell(&self) -> u32 {
        match *self {}
    }

    fn ring(&self) {
        match *self {}
    }

    fn wait(&self, _: u32) {
        match *self {}
    }
}
