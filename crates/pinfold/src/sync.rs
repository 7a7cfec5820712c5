//! The atomics and locks of the parts that have models: the standard library's here, loom's or shuttle's where
//! `pinfold-models` compiles the same files.

pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, OnceLock};
