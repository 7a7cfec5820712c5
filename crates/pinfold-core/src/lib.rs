//! The registration cache of Pinfold, without a system call in it.

pub mod access;
pub mod coverage;
pub mod monitor;
pub mod range;
pub mod registrar;

pub use access::Access;
pub use coverage::{Change, Cover, MappingKind};
pub use monitor::{Lost, Monitor, Replay, Sequence, Uncovered, Watch};
pub use range::{AddressRange, RangeError};
pub use registrar::{BadAddress, DeregisterError, RegisterError, Registrar, RegistrarLimits};
