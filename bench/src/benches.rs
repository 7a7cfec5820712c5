//! The benches, a file each.

pub(crate) mod allocator;
pub(crate) mod blocked;
pub(crate) mod churn;
pub(crate) mod ebpf;
pub(crate) mod events;
pub(crate) mod eviction;
pub(crate) mod hit;
#[cfg(feature = "holds")]
pub(crate) mod holds;
pub(crate) mod memory;
pub(crate) mod miss;
pub(crate) mod monitors;
pub(crate) mod munmap;
pub(crate) mod on_demand;
pub(crate) mod pieces;
pub(crate) mod pool;
pub(crate) mod scale;
pub(crate) mod scaling;
pub(crate) mod startup;
pub(crate) mod suspend;
pub(crate) mod transfer;
