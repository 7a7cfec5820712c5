//! The atomics of the parts that have loom models: the standard library's here, loom's where
//! `pinfold-models` compiles the same files.

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
