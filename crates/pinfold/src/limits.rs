//! What this process may pin, and what stands in its way.
//!
//! Three counters meet one limit: io_uring counts the pages it pins per user, verbs per process
//! (`VmPin`), `mlock` per process (`VmLck`), and each is compared with `RLIMIT_MEMLOCK` on its own.

use crate::machine::{self, Machine, Privilege};
use pinfold_kernel::process::page_bytes;

pub use crate::machine::Memlock;

/// What this process may pin. A field is `None` where the kernel does not tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The soft limit on locked and pinned memory; what counts.
    pub memlock_soft: Memlock,
    /// The hard limit, up to which a program may raise its soft limit by itself.
    pub memlock_hard: Memlock,
    /// Whether the kernel waives the limit for the calling thread. Read without `/proc`, but for a capability that is
    /// effective, whose user namespace is seen there alone.
    pub ipc_lock: Option<Privilege>,
    /// Memory locked by `mlock`, in bytes (`VmLck`).
    pub locked_bytes: Option<u64>,
    /// Memory pinned by devices, in bytes (`VmPin`).
    pub pinned_bytes: Option<u64>,
    /// How many mappings a process may have (`vm.max_map_count`).
    pub max_map_count: Option<u64>,
    /// The size of a page, in bytes.
    pub page_bytes: usize,
    /// Which processes may make rings (`kernel.io_uring_disabled`): 0 all, 1 the privileged and members
    /// of `kernel.io_uring_group`, 2 none. Absent before Linux 6.6.
    pub io_uring_disabled: Option<u8>,
    /// Whether the unprivileged may have the kernel's own faults handled
    /// (`vm.unprivileged_userfaultfd`); faults of user mode need no leave.
    pub unprivileged_userfaultfd: Option<bool>,
}

impl Limits {
    /// Asks the kernel: some ten system calls, a fraction of a millisecond.
    pub fn read() -> Self {
        let machine = Machine::this();
        // Where the question is refused, nothing is promised.
        let none = Memlock::Bytes(0);
        let (memlock_soft, memlock_hard) = machine.memlock().unwrap_or((none, none));
        let status = machine.status();
        let amount = |key| machine::kilobytes(status.as_deref().ok()?, key);
        let number = |path| machine.parsed(path, machine::number).ok();
        Self {
            memlock_soft,
            memlock_hard,
            ipc_lock: machine.privilege(&status).ok(),
            locked_bytes: amount("VmLck:"),
            pinned_bytes: amount("VmPin:"),
            max_map_count: number(MAX_MAP_COUNT),
            page_bytes: page_bytes(),
            io_uring_disabled: number("/proc/sys/kernel/io_uring_disabled")
                .and_then(|value| value.try_into().ok()),
            unprivileged_userfaultfd: number("/proc/sys/vm/unprivileged_userfaultfd")
                .map(|value| value != 0),
        }
    }

    /// The limit that the kernel really applies to this process's pinned memory; an unknown privilege is none.
    ///
    /// What other processes of the same user have pinned by io_uring counts against it too.
    pub const fn enforced(&self) -> Memlock {
        match self.ipc_lock {
            Some(Privilege::Effective) => Memlock::Unlimited,
            _ => self.memlock_soft,
        }
    }

    /// The same in bytes, where it is known to hold, and so may be the reason of a refusal.
    pub(crate) fn limit_in_force(&self) -> Option<u64> {
        self.ipc_lock.and(self.enforced().bytes())
    }
}

/// What a registrar whose pages count against `RLIMIT_MEMLOCK` may pin.
pub(crate) fn pinned_limit() -> Option<usize> {
    Limits::read().enforced().bytes().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

/// How many mappings a process may have.
pub(crate) fn max_map_count() -> Option<u64> {
    Machine::this().parsed(MAX_MAP_COUNT, machine::number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers() {
        let limits = Limits::read();
        assert!(limits.page_bytes.is_power_of_two());
        assert!(limits.locked_bytes.is_some() && limits.pinned_bytes.is_some());
        assert!(limits.max_map_count.is_some_and(|count| count > 0));
        if let (Some(soft), Some(hard)) = (limits.memlock_soft.bytes(), limits.memlock_hard.bytes())
        {
            assert!(soft <= hard);
        }
    }

    #[test]
    fn a_waived_limit_is_no_limit() {
        let mut limits = Limits::read();
        limits.memlock_soft = Memlock::Bytes(4096);
        limits.ipc_lock = Some(Privilege::Inert);
        assert_eq!(
            (limits.enforced(), limits.limit_in_force()),
            (Memlock::Bytes(4096), Some(4096))
        );
        limits.ipc_lock = Some(Privilege::Effective);
        assert_eq!((limits.enforced(), limits.limit_in_force()), (Memlock::Unlimited, None));
    }

    /// As with a capability where no descriptor is left for `/proc`.
    #[test]
    fn an_unknown_privilege_is_none_and_is_no_reason_of_a_refusal() {
        let mut limits = Limits::read();
        (limits.memlock_soft, limits.ipc_lock) = (Memlock::Bytes(4096), None);
        assert_eq!((limits.enforced(), limits.limit_in_force()), (Memlock::Bytes(4096), None));
    }
}
