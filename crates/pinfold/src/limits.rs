//! What this process may pin, and what stands in its way.
//!
//! Three counters meet one limit: io_uring counts the pages it pins per user, verbs per process
//! (`VmPin`), `mlock` per process (`VmLck`), and each is compared with `RLIMIT_MEMLOCK` on its own.

use pinfold_kernel::process::{Resource, page_bytes};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;

/// What this process may pin. A field is `None` where the kernel does not tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The soft limit on locked and pinned memory; what counts.
    pub memlock_soft: Memlock,
    /// The hard limit, up to which a program may raise its soft limit by itself.
    pub memlock_hard: Memlock,
    /// Whether the kernel waives the limit.
    pub ipc_lock: IpcLock,
    /// Memory locked by `mlock`, in bytes (`VmLck`).
    pub locked_bytes: Option<u64>,
    /// Memory pinned by devices, in bytes (`VmPin`).
    pub pinned_bytes: Option<u64>,
    /// How many mappings a process may have (`vm.max_map_count`).
    pub max_map_count: Option<u64>,
    /// The size of a page, in bytes.
    pub page_bytes: usize,
    /// Who may make rings (`kernel.io_uring_disabled`): 0 everybody, 1 the privileged and members
    /// of `kernel.io_uring_group`, 2 nobody. Absent before Linux 6.6.
    pub io_uring_disabled: Option<u8>,
    /// Whether the unprivileged may have the kernel's own faults handled
    /// (`vm.unprivileged_userfaultfd`); faults of user mode need no leave.
    pub unprivileged_userfaultfd: Option<bool>,
}

/// A limit on locked memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memlock {
    /// There is none.
    Unlimited,
    /// This many bytes.
    Bytes(u64),
}

impl Memlock {
    /// The limit in bytes, if there is one.
    pub const fn bytes(self) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Bytes(bytes) => Some(bytes),
        }
    }

    fn of(value: Option<u64>) -> Self {
        value.map_or(Self::Unlimited, Self::Bytes)
    }
}

/// Whether the process has the capability that waives `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IpcLock {
    /// It has: the kernel counts, and refuses nothing.
    Effective,
    /// It has, but in a user namespace of its own (a rootless container), where the kernel does
    /// not honour it: the limit holds.
    Inert,
    /// It has not: the limit holds.
    Absent,
}

/// `CAP_IPC_LOCK`.
const CAP_IPC_LOCK: u32 = 14;

/// The inode of `/proc/self/ns/user` in the machine's own user namespace; part of the kernel's
/// interface.
const INITIAL_USER_NAMESPACE: u64 = 0xeffffffd;

impl Limits {
    /// Asks the kernel: some ten system calls, a fraction of a millisecond.
    pub fn read() -> Self {
        let (memlock_soft, memlock_hard) = memlock();
        let status = Status::read();
        Self {
            memlock_soft,
            memlock_hard,
            ipc_lock: status.ipc_lock(),
            locked_bytes: status.bytes("VmLck:"),
            pinned_bytes: status.bytes("VmPin:"),
            max_map_count: max_map_count(),
            page_bytes: page_bytes(),
            io_uring_disabled: setting("/proc/sys/kernel/io_uring_disabled"),
            unprivileged_userfaultfd: setting::<u8>("/proc/sys/vm/unprivileged_userfaultfd")
                .map(|value| value != 0),
        }
    }

    /// The limit that the kernel really applies to this process's pinned memory.
    ///
    /// What other processes of the same user have pinned by io_uring counts against it too.
    pub const fn enforced(&self) -> Memlock {
        match self.ipc_lock {
            IpcLock::Effective => Memlock::Unlimited,
            IpcLock::Inert | IpcLock::Absent => self.memlock_soft,
        }
    }
}

/// What a registrar whose pages count against `RLIMIT_MEMLOCK` may pin.
pub(crate) fn pinned_limit() -> Option<usize> {
    Limits::read().enforced().bytes().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// How many mappings a process may have.
pub(crate) fn max_map_count() -> Option<u64> {
    setting("/proc/sys/vm/max_map_count")
}

/// `RLIMIT_MEMLOCK`, soft and hard.
fn memlock() -> (Memlock, Memlock) {
    let limit = Resource::LockedMemory.limit();
    (Memlock::of(limit.soft), Memlock::of(limit.hard))
}

fn setting<T: FromStr>(path: &str) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// `/proc/self/status`, empty where it cannot be read.
struct Status(String);

impl Status {
    fn read() -> Self {
        Self(fs::read_to_string("/proc/self/status").unwrap_or_default())
    }

    /// The first word behind `key`, which ends with a colon.
    fn word(&self, key: &str) -> Option<&str> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()
    }

    fn bytes(&self, key: &str) -> Option<u64> {
        self.word(key)?.parse::<u64>().ok()?.checked_mul(1024)
    }

    fn ipc_lock(&self) -> IpcLock {
        let effective = self.word("CapEff:").and_then(|word| u64::from_str_radix(word, 16).ok());
        match effective {
            Some(set) if set >> CAP_IPC_LOCK & 1 == 1 => where_it_counts(),
            _ => IpcLock::Absent,
        }
    }
}

/// A capability counts against the machine's limits in the machine's own namespace only.
fn where_it_counts() -> IpcLock {
    match fs::metadata("/proc/self/ns/user") {
        Ok(namespace) if namespace.ino() == INITIAL_USER_NAMESPACE => IpcLock::Effective,
        _ => IpcLock::Inert,
    }
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
    fn status_is_read_by_its_keys() {
        let status =
            Status("VmPeak:\t  10 kB\nVmLck:\t  12 kB\nCapEff:\t0000000000000000\n".into());
        assert_eq!(status.bytes("VmLck:"), Some(12 * 1024));
        assert_eq!(status.bytes("VmPin:"), None);
        assert_eq!(status.ipc_lock(), IpcLock::Absent);
        assert_eq!(Status(String::new()).ipc_lock(), IpcLock::Absent);
    }

    #[test]
    fn a_waived_limit_is_no_limit() {
        let mut limits = Limits::read();
        limits.memlock_soft = Memlock::Bytes(4096);
        limits.ipc_lock = IpcLock::Inert;
        assert_eq!(limits.enforced(), Memlock::Bytes(4096));
        limits.ipc_lock = IpcLock::Effective;
        assert_eq!(limits.enforced(), Memlock::Unlimited);
    }
}
