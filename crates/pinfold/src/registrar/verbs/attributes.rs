//! What a device says that it can do.

use super::ffi::*;
use pinfold_core::Access;
use std::fmt;
use std::ops::BitOr;

/// A device's limits and abilities, as far as registering memory goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// How many memory regions the device holds, all processes together.
    pub max_regions: usize,
    /// The longest memory region, in bytes.
    pub max_region_bytes: u64,
    /// Whether peers can run atomic operations.
    pub atomics: bool,
    /// What the device does without pinned pages; `None` if nothing.
    pub on_demand: Option<OnDemandPaging>,
}

impl Attributes {
    pub(super) fn of(device: &ibv_device_attr_ex) -> Self {
        let plain = &device.orig_attr;
        Self {
            max_regions: usize::try_from(plain.max_mr).unwrap_or(0),
            max_region_bytes: plain.max_mr_size,
            atomics: plain.atomic_cap != 0,
            on_demand: OnDemandPaging::of(device),
        }
    }

    /// Whether the device can give these rights at all.
    pub(super) const fn can_give(&self, access: Access) -> bool {
        self.atomics || !access.contains(Access::REMOTE_ATOMIC)
    }
}

/// A kind of connection, as far as devices differ in on-demand paging.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection.
    Xrc,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::Xrc => "XRC",
        })
    }
}

/// Operations that may use a memory region, as a set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Operations(u32);

impl Operations {
    /// Sending from it.
    pub const SEND: Self = Self(IBV_ODP_SUPPORT_SEND);
    /// Receiving into it.
    pub const RECEIVE: Self = Self(IBV_ODP_SUPPORT_RECV);
    /// RDMA writes, from it and into it.
    pub const WRITE: Self = Self(IBV_ODP_SUPPORT_WRITE);
    /// RDMA reads, from it and into it.
    pub const READ: Self = Self(IBV_ODP_SUPPORT_READ);
    /// Atomic operations on it.
    pub const ATOMIC: Self = Self(IBV_ODP_SUPPORT_ATOMIC);
    /// Receiving into it through a shared receive queue.
    pub const SHARED_RECEIVE: Self = Self(IBV_ODP_SUPPORT_SRQ_RECV);

    const NAMES: [(Self, &str); 6] = [
        (Self::SEND, "send"),
        (Self::RECEIVE, "receive"),
        (Self::WRITE, "write"),
        (Self::READ, "read"),
        (Self::ATOMIC, "atomic"),
        (Self::SHARED_RECEIVE, "shared receive"),
    ];

    /// Whether every operation of `other` is in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The operations of `self` that `other` lacks.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether there is no operation in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for Operations {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names = Self::NAMES.iter().filter(|(operation, _)| self.contains(*operation));
        match names.next() {
            None => return f.write_str("nothing"),
            Some((_, first)) => f.write_str(first)?,
        }
        names.try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}

impl fmt::Debug for Operations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a device does with regions whose pages are not pinned: it asks for a page when it needs
/// it, and drops it when the process's mapping changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OnDemandPaging {
    /// Whether one region can stand for the whole address space.
    pub implicit: bool,
    rc: Operations,
    uc: Operations,
    ud: Operations,
    xrc: Operations,
}

impl OnDemandPaging {
    fn of(device: &ibv_device_attr_ex) -> Option<Self> {
        let caps = &device.odp_caps;
        (caps.general_caps & IBV_ODP_SUPPORT != 0).then_some(Self {
            implicit: caps.general_caps & IBV_ODP_SUPPORT_IMPLICIT != 0,
            rc: Operations(caps.rc_odp_caps),
            uc: Operations(caps.uc_odp_caps),
            ud: Operations(caps.ud_odp_caps),
            xrc: Operations(device.xrc_odp_caps),
        })
    }

    /// Which operations of a transport may use such a region.
    pub const fn operations(&self, transport: Transport) -> Operations {
        match transport {
            Transport::Rc => self.rc,
            Transport::Uc => self.uc,
            Transport::Ud => self.ud,
            Transport::Xrc => self.xrc,
        }
    }
}

impl fmt::Display for OnDemandPaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.implicit { "explicit and implicit" } else { "explicit" })?;
        [Transport::Rc, Transport::Uc, Transport::Ud, Transport::Xrc]
            .into_iter()
            .map(|transport| (transport, self.operations(transport)))
            .filter(|(_, operations)| !operations.is_empty())
            .try_for_each(|(transport, operations)| write!(f, "; {transport}: {operations}"))
    }
}

/// The library's flags for `access`: a peer may write only where the device may.
pub const fn access_flags(access: Access) -> libc::c_uint {
    let mut flags = 0;
    if access.writes() {
        flags |= IBV_ACCESS_LOCAL_WRITE;
    }
    if access.contains(Access::REMOTE_READ) {
        flags |= IBV_ACCESS_REMOTE_READ;
    }
    if access.contains(Access::REMOTE_WRITE) {
        flags |= IBV_ACCESS_REMOTE_WRITE;
    }
    if access.contains(Access::REMOTE_ATOMIC) {
        flags |= IBV_ACCESS_REMOTE_ATOMIC;
    }
    flags
}

/// The rights that the library's flags give, and the flags that no right stands for.
///
/// Every region may be read by its device.
pub fn access_of(flags: libc::c_uint) -> (Access, libc::c_uint) {
    let rights = [
        (IBV_ACCESS_LOCAL_WRITE, Access::WRITE),
        (IBV_ACCESS_REMOTE_READ, Access::REMOTE_READ),
        (IBV_ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE),
        (IBV_ACCESS_REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
    ];
    rights
        .into_iter()
        .filter(|(flag, _)| flags & flag != 0)
        .fold((Access::READ, flags), |(access, rest), (flag, right)| (access | right, rest & !flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_write_needs_the_devices() {
        assert_eq!(access_flags(Access::READ), 0);
        assert_eq!(access_flags(Access::READ_WRITE), IBV_ACCESS_LOCAL_WRITE);
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        assert_eq!(access_flags(remote), flags);
        assert_eq!(access_flags(Access::REMOTE_READ), IBV_ACCESS_REMOTE_READ);
    }

    #[test]
    fn flags_become_rights_and_a_rest() {
        let odd = IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_ON_DEMAND;
        let (access, rest) = access_of(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | odd);
        assert_eq!(access, Access::READ_WRITE | Access::REMOTE_READ);
        assert_eq!(rest, odd);
        for bits in 0..32 {
            let access = Access::from_bits(bits) | Access::READ;
            let (back, rest) = access_of(access_flags(access));
            assert!(back.contains(access) && rest == 0);
        }
    }

    #[test]
    fn operations_are_named() {
        let some = Operations::SEND | Operations::ATOMIC;
        assert_eq!(some.to_string(), "send, atomic");
        assert_eq!(some.without(Operations::SEND), Operations::ATOMIC);
        assert_eq!(Operations::default().to_string(), "nothing");
        assert!(!Operations::SEND.contains(some));
    }
}
