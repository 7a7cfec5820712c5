//! The atomics, locks and pauses of the parts that have models: the standard library's here, loom's where
//! `pinfold-models` compiles the same files.

pub(crate) use pinfold_kernel::priority::{HeldGate, PriorityGate};
pub(crate) use pinfold_kernel::thread::sleep;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
