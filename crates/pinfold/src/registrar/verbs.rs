//! RDMA devices, through libibverbs.

pub mod ffi;
mod library;

pub use library::{Library, LoadError};
