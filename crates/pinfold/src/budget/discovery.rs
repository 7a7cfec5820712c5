//! What this process may really pin: every limit in its way, each with its source.

use super::figure::{Figure, SharedWith, Unread};
use crate::machine::{self, Machine, Memlock};
use pinfold_kernel::control_group::{ControlGroup, GroupFile};
use std::fmt;
use std::path::Path;

pub use crate::machine::Privilege;

/// What kind of registrar is to pin. Three counters meet one limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Fixed buffers: counted for the user who made the ring, over all rings and processes of that user.
    /// The privilege that counts is the one that the ring was made with.
    IoUring,
    /// Memory regions of an RDMA device: counted for the process, together with what the process
    /// has pinned by io_uring (`VmPin`).
    Verbs,
    /// Locked memory: counted for the process (`VmLck`).
    Mlock,
}

/// `RLIMIT_MEMLOCK`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemlockLimit {
    /// What counts.
    pub soft: Memlock,
    /// Up to where a process may raise the soft limit by itself.
    pub hard: Memlock,
}

/// A control group with a limit on memory, the process's own or one above it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Its directory.
    pub directory: String,
    /// Beyond this, a process in the group is killed. `None` is no limit.
    pub max: Figure<Option<u64>>,
    /// Beyond this, every process in the group is slowed down: pinned memory cannot be taken away
    /// instead. `None` is no limit.
    pub high: Figure<Option<u64>>,
    /// What the group uses.
    pub current: Figure<u64>,
}

/// The pages of one huge size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HugePages {
    /// The size of one, in bytes.
    pub page_bytes: u64,
    /// How many there are.
    pub total: Figure<u64>,
    /// How many of them are free, those promised to others included.
    pub free: Figure<u64>,
    /// How many of the free ones are promised.
    pub reserved: Figure<u64>,
    /// How many more the kernel may make on demand.
    pub overcommit: Figure<u64>,
}

/// How many objects a control group grants on an RDMA device: regions, protection domains,
/// queues, all together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaObjects {
    /// The device's name.
    pub device: String,
    /// The group's directory.
    pub directory: String,
    /// How many.
    pub max: u64,
}

/// Everything that bounds what this process may pin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Discovery {
    /// `RLIMIT_MEMLOCK`.
    pub memlock: Figure<MemlockLimit>,
    /// `CAP_IPC_LOCK` of the calling thread: capabilities are each thread's own, and the kernel checks those of the
    /// thread that registers.
    pub privilege: Figure<Privilege>,
    /// What this process has locked (`VmLck`), in bytes.
    pub locked: Figure<u64>,
    /// What devices have pinned of this process (`VmPin`), in bytes: RDMA and io_uring.
    pub pinned: Figure<u64>,
    /// What the rings of io_uring take that this process has mapped, in bytes. Since Linux 6.14 that
    /// counts against `RLIMIT_MEMLOCK` for the user, as registered buffers do, and not in `VmPin`;
    /// before, it is nothing. Memory that a program gave for a ring itself
    /// (`IORING_SETUP_NO_MMAP`) cannot be told from other memory, and is missing here; so is what a ring has grown
    /// by (`IORING_REGISTER_RESIZE_RINGS`) until the program maps it.
    pub rings: Figure<u64>,
    /// What this user's other processes have pinned, in bytes, as far as they can be seen. The
    /// kernel does not tell the counter that io_uring compares; this sum has the pins of RDMA too,
    /// and lacks those of processes that are hidden, have ended or whose first thread has, and the memory of their rings.
    /// What processes with a `CAP_IPC_LOCK` that waives the limit have pinned does not count, and is left out. The
    /// capability is worth nothing in a user namespace of its own. Where this process may not see which one it is
    /// (`/proc/PID/ns/user`), a process whose map of users (`uid_map`) is the machine's is taken to be in that.
    pub pinned_by_others: Figure<u64>,
    /// The control groups that count memory: the process's own first.
    pub groups: Vec<Group>,
    /// Why `groups` may be incomplete.
    pub groups_unread: Option<Unread>,
    /// The machine's memory, in bytes.
    pub memory: Figure<u64>,
    /// What of it is to be had without swapping, in bytes.
    pub available: Figure<u64>,
    /// How many mappings this process has.
    pub mappings: Figure<u64>,
    /// How many it may have (`vm.max_map_count`).
    pub max_mappings: Figure<u64>,
    /// The pools of huge pages.
    pub huge_pages: Vec<HugePages>,
    /// Limits on RDMA objects.
    pub rdma_objects: Vec<RdmaObjects>,
}

/// What happens to who goes beyond a bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beyond {
    /// The registration fails.
    Refused,
    /// The processes of the group are slowed down.
    Throttled,
    /// A process is killed.
    Killed,
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused => "refused",
            Self::Throttled => "slowed down",
            Self::Killed => "killed",
        })
    }
}

/// One thing that bounds what may be pinned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// How much there is, in bytes, used or not.
    pub bytes: u64,
    /// What it is, and where it stands.
    pub source: String,
    /// What happens beyond it.
    pub beyond: Beyond,
    /// What else uses it up.
    pub shared_with: SharedWith,
}

/// The first kernel that charges rings to the user.
const RINGS_CHARGED: (u32, u32) = (6, 14);

impl Discovery {
    /// Asks the kernel. Some hundred system calls and more with many processes on the machine:
    /// a millisecond.
    pub fn read() -> Self {
        Self::below(Path::new("/"))
    }

    /// The same, with `/proc` and `/sys` below `root`: of another process's view of them, or of one
    /// that a test has made up. `/proc/thread-self` is read there, and `/proc/self` for what it has not.
    pub fn below(root: &Path) -> Self {
        let machine = Machine::at(root);
        let status = machine.status();
        let (groups, groups_unread) = groups(&machine);
        Self {
            memlock: memlock(&machine),
            privilege: privilege(&machine, &status),
            locked: of_status(&status, "VmLck:", SharedWith::Process),
            pinned: of_status(&status, "VmPin:", SharedWith::Process),
            rings: rings(&machine),
            pinned_by_others: pinned_by_others(&machine, &status),
            groups,
            groups_unread,
            memory: of_meminfo(&machine, "MemTotal:"),
            available: of_meminfo(&machine, "MemAvailable:"),
            mappings: mappings(&machine),
            max_mappings: single(&machine, "/proc/sys/vm/max_map_count", SharedWith::Process),
            huge_pages: huge_pages(&machine),
            rdma_objects: rdma_objects(&machine),
        }
    }

    /// The least that a control group of this process lets its processes use, in bytes (`memory.max`, or
    /// `memory.limit_in_bytes`). `None` where none does. Some ten system calls.
    pub fn group_limit() -> Option<u64> {
        let (groups, _incomplete) = groups(&Machine::this());
        groups.into_iter().filter_map(|group| group.max.value.ok().flatten()).min()
    }

    /// Whether the kernel compares pinned memory with `RLIMIT_MEMLOCK` at all.
    pub fn memlock_enforced(&self) -> bool {
        self.privilege.get() != Some(Privilege::Effective)
    }

    /// Every bound on what a registrar of this kind may pin, the tightest first.
    pub fn bounds(&self, kind: Kind) -> Vec<Bound> {
        let mut bounds: Vec<Bound> = self.memlock_bound(kind).into_iter().collect();
        for group in &self.groups {
            bounds.extend(bound_of(&group.max, Beyond::Killed));
            bounds.extend(bound_of(&group.high, Beyond::Throttled));
        }
        bounds.extend(self.memory.get().map(|bytes| Bound {
            bytes,
            source: self.memory.source.clone(),
            beyond: Beyond::Killed,
            shared_with: SharedWith::Machine,
        }));
        bounds.sort_by_key(|bound| bound.bytes);
        bounds
    }

    /// `RLIMIT_MEMLOCK`, where it bounds.
    fn memlock_bound(&self, kind: Kind) -> Option<Bound> {
        let bytes = self.memlock.get().filter(|_| self.memlock_enforced())?.soft.bytes()?;
        let shared_with = match kind {
            Kind::IoUring => SharedWith::User,
            Kind::Verbs | Kind::Mlock => SharedWith::Process,
        };
        let source = self.memlock.source.clone();
        Some(Bound { bytes, source, beyond: Beyond::Refused, shared_with })
    }

    /// What already counts against `RLIMIT_MEMLOCK` for this kind, as far as it can be known, in
    /// bytes: the rings of io_uring included.
    pub fn counted(&self, kind: Kind) -> u64 {
        self.counted_in_process(kind).saturating_add(self.counted_for_rings(kind))
    }

    /// The same without the rings, which may grow.
    pub(super) fn counted_in_process(&self, kind: Kind) -> u64 {
        let figure = if kind == Kind::Mlock { &self.locked } else { &self.pinned };
        figure.get().unwrap_or(0)
    }

    /// What the rings themselves take of what a registrar of this kind may pin, in bytes.
    pub(super) fn counted_for_rings(&self, kind: Kind) -> u64 {
        if kind == Kind::IoUring { self.rings.get().unwrap_or(0) } else { 0 }
    }

    /// How many more mappings this process may have; `None` where the kernel does not tell.
    pub fn free_mappings(&self) -> Option<u64> {
        Some(self.max_mappings.get()?.saturating_sub(self.mappings.get()?))
    }
}

/// The limits that change while a process runs. `None` for what could not be read, or was not wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct CurrentLimits {
    /// The soft `RLIMIT_MEMLOCK`, in bytes; all that there are without one.
    pub(super) memlock: Option<u64>,
    /// Whether a privilege waives it.
    pub(super) is_waived: Option<bool>,
    /// What the rings of io_uring take of it, in bytes.
    pub(super) rings: Option<u64>,
}

impl CurrentLimits {
    /// With `/proc` below `root`. The rings are read for io_uring alone.
    pub(super) fn below(root: &Path, kind: Kind, reads_rings: bool) -> Self {
        let machine = Machine::at(root);
        let privilege = machine.privilege(&machine.status());
        let reads_rings = reads_rings && kind == Kind::IoUring;
        Self {
            memlock: machine.memlock().ok().map(|(soft, _)| in_bytes(soft)),
            is_waived: privilege.ok().map(|it| it == Privilege::Effective),
            rings: reads_rings.then(|| rings(&machine).get()).flatten(),
        }
    }

    /// Those found first, for a registrar of this kind: a privilege that is unknown is none.
    pub(super) fn of(discovery: &Discovery, kind: Kind) -> Self {
        Self {
            memlock: discovery.memlock.get().map(|limit| in_bytes(limit.soft)),
            is_waived: Some(!discovery.memlock_enforced()),
            rings: Some(discovery.counted_for_rings(kind)),
        }
    }
}

fn in_bytes(limit: Memlock) -> u64 {
    limit.bytes().unwrap_or(u64::MAX)
}

fn bound_of(figure: &Figure<Option<u64>>, beyond: Beyond) -> Option<Bound> {
    let bytes = figure.get()??;
    let (source, shared_with) = (figure.source.clone(), figure.shared_with);
    Some(Bound { bytes, source, beyond, shared_with })
}

fn memlock(machine: &Machine) -> Figure<MemlockLimit> {
    let value = machine.memlock().map(|(soft, hard)| MemlockLimit { soft, hard });
    Figure::new(value, "RLIMIT_MEMLOCK", SharedWith::Process)
}

fn privilege(machine: &Machine, status: &Result<String, Unread>) -> Figure<Privilege> {
    Figure::new(machine.privilege(status), "capget(2), /proc/self/ns/user", SharedWith::Process)
}

fn of_status(status: &Result<String, Unread>, key: &str, shared_with: SharedWith) -> Figure<u64> {
    let text = status.as_ref().map_err(|&why| why);
    let value = text.and_then(|text| machine::kilobytes(text, key).ok_or(Unread::Missing));
    Figure::new(value, format!("/proc/self/status: {}", key.trim_end_matches(':')), shared_with)
}

/// What the other processes of the same real user have pinned, as far as `/proc` shows them.
fn pinned_by_others(machine: &Machine, status: &Result<String, Unread>) -> Figure<u64> {
    let own = status.as_ref().ok().and_then(|text| {
        Some((machine::word(text, "Uid:")?.to_owned(), machine::word(text, "Tgid:")?.to_owned()))
    });
    let value = own.ok_or(Unread::Missing).map(|(user, process)| {
        let others = machine.names("/proc").into_iter();
        let others = others.filter(|name| *name != process && name.parse::<u32>().is_ok());
        let pinned = |name: String| {
            let status = machine.text(&format!("/proc/{name}/status")).ok()?;
            let counts = machine::word(&status, "Uid:") == Some(&user)
                && !waives_limit(machine, &name, &status);
            machine::kilobytes(&status, "VmPin:").filter(|_| counts)
        };
        others.filter_map(pinned).fold(0, u64::saturating_add)
    });
    Figure::new(value, "/proc/PID/status of the same user: VmPin", SharedWith::User)
}

/// Whether another process, with that status, is known to have a `CAP_IPC_LOCK` that the kernel honours.
fn waives_limit(machine: &Machine, process: &str, status: &str) -> bool {
    machine::has_ipc_lock(status, "CapEff:")
        && machine
            .is_in_initial_namespace(process)
            .unwrap_or_else(|_| has_initial_users(machine, process))
}

/// Whether every user has its own number in that process's user namespace, as in the machine's. Reading the map needs no
/// right to trace the process, as reading the link to the namespace does.
fn has_initial_users(machine: &Machine, process: &str) -> bool {
    let map = machine.text(&format!("/proc/{process}/uid_map"));
    map.is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

fn of_meminfo(machine: &Machine, key: &str) -> Figure<u64> {
    let value = machine.parsed("/proc/meminfo", |text| machine::kilobytes(text, key));
    let source = format!("/proc/meminfo: {}", key.trim_end_matches(':'));
    Figure::new(value, source, SharedWith::Machine)
}

fn single(machine: &Machine, path: &str, shared_with: SharedWith) -> Figure<u64> {
    Figure::new(machine.parsed(path, machine::number), path, shared_with)
}

/// What the kernel charges for rings, where it does.
fn rings(machine: &Machine) -> Figure<u64> {
    let release = machine.parsed("/proc/sys/kernel/osrelease", machine::release);
    // A kernel that does not say which it is is taken for a new one.
    let free = release.is_ok_and(|release| release < RINGS_CHARGED);
    let value =
        if free { Ok(0) } else { machine.own_text("maps").map(|maps| machine::ring_bytes(&maps)) };
    Figure::new(value, "/proc/self/maps: io_uring", SharedWith::User)
}

fn mappings(machine: &Machine) -> Figure<u64> {
    let value = machine.own_text("maps").map(|maps| maps.lines().count() as u64);
    Figure::new(value, "/proc/self/maps: its lines", SharedWith::Process)
}

/// The groups that count the process's memory, and why there may be more.
fn groups(machine: &Machine) -> (Vec<Group>, Option<Unread>) {
    match machine.control_groups("memory") {
        Some(groups) => (groups.iter().map(group).collect(), None),
        None => (Vec::new(), Some(Unread::Missing)),
    }
}

fn group(group: &ControlGroup) -> Group {
    Group {
        directory: group.directory().to_owned(),
        max: of_group(group.memory_max()),
        high: of_group(group.memory_high()),
        current: of_group(group.memory_in_use()),
    }
}

fn of_group<T: Copy>(file: GroupFile<T>) -> Figure<T> {
    let value = file.value.map_err(|error| machine::unread(&error));
    Figure::new(value, file.path, SharedWith::Group)
}

const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

fn huge_pages(machine: &Machine) -> Vec<HugePages> {
    let names = machine.names(HUGE_PAGES).into_iter();
    let mut pools: Vec<HugePages> = names
        .filter_map(|name| {
            let kilobytes = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            let page_bytes = kilobytes.parse::<u64>().ok()?.checked_mul(1024)?;
            let read =
                |file| single(machine, &format!("{HUGE_PAGES}/{name}/{file}"), SharedWith::Machine);
            Some(HugePages {
                page_bytes,
                total: read("nr_hugepages"),
                free: read("free_hugepages"),
                reserved: read("resv_hugepages"),
                overcommit: read("nr_overcommit_hugepages"),
            })
        })
        .collect();
    pools.sort_by_key(|pool| pool.page_bytes);
    pools
}

fn rdma_objects(machine: &Machine) -> Vec<RdmaObjects> {
    let of_group = |group: ControlGroup| {
        let limit = |(device, max)| {
            let directory = group.directory().to_owned();
            RdmaObjects { device, directory, max }
        };
        group.rdma_objects().into_iter().map(limit).collect::<Vec<_>>()
    };
    machine.control_groups("rdma").unwrap_or_default().into_iter().flat_map(of_group).collect()
}
