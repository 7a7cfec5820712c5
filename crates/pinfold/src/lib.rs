//! Memory registration for DMA devices.

#[cfg(not(target_os = "linux"))]
compile_error!("Pinfold watches Linux mappings and registers with Linux devices");

pub mod mappings;
pub mod monitor;
pub mod registrar;
mod sys;

pub use pinfold_core::*;
