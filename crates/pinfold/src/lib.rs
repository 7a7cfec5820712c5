//! Memory registration for DMA devices.

#[cfg(not(target_os = "linux"))]
compile_error!("Pinfold watches Linux mappings and registers with Linux devices");

mod descriptor;
pub mod limits;
pub mod mappings;
mod membarrier;
pub mod monitor;
mod quiet_thread;
pub mod registrar;
mod start;
mod sys;

pub use pinfold_core::{
    Access, AddressRange, BadAddress, Barriers, BufferError, BufferLease, Cache, Change, Checked,
    Config, ConfigError, Cover, DeregisterError, Exhausted, GetError, Lease, Limit, Lost,
    MappingKind, Monitor, PerUse, Pieces, RangeError, Reclaimer, RegisterError, Registrar,
    RegistrarLimits, Replay, Sequence, StableBuffer, Statistics, Uncovered, Watch, WhenFull,
};
pub use start::{CacheError, cache};
