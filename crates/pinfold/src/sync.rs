//! The atomics and locks of the parts that have models: the standard library's here, loom's or shuttle's where
//! `pinfold-models` compiles the same files.

pub(crate) use pinfold_kernel::FirstMade;
pub(crate) use std::sync::Mutex;
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
