//! Discovery on made-up machines, whose files say what no single real one does, and on this one.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

use pinfold::RegistrarLimits;
use pinfold::budget::{
    Amount, Beyond, Budget, BudgetAdvice, BudgetError, Discovery, Kind, Privilege, SharedWith,
    Unread,
};
use pinfold::limits::Memlock;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A machine made of files, gone with the value.
struct Machine(PathBuf);

impl Machine {
    /// An unprivileged process with 8 MiB of `RLIMIT_MEMLOCK`, alone on a machine of 16 GiB.
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("pinfold-{}-{name}", std::process::id()));
        let _left_by_a_crash = fs::remove_dir_all(&root);
        let machine = Self(root);
        machine.memlock("8388608", "8388608");
        machine.status(0, 0, "VmLck:\t  4 kB\nVmPin:\t 1024 kB\nNoNewPrivs:\t0\n");
        machine.write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
        machine.write("/proc/self/maps", "a\nb\nc\n");
        machine.write("/proc/sys/vm/max_map_count", "65530\n");
        machine.write("/proc/self/cgroup", "0::/\n");
        machine
            .write("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        machine.write("/proc/sys/kernel/osrelease", "6.18.0\n");
        machine.namespace("user:[4026531837]");
        machine
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.0.join(path.trim_start_matches('/'))).unwrap();
    }

    fn memlock(&self, soft: &str, hard: &str) {
        let line = format!("Max locked memory         {soft:<20} {hard:<20} bytes     \n");
        self.write("/proc/self/limits", format!("Limit Soft Hard Units\n{line}"));
    }

    fn status(&self, effective: u64, permitted: u64, rest: &str) {
        let text = format!(
            "Tgid:\t100\nPid:\t107\nUid:\t1000\t1000\t1000\t1000\nCapPrm:\t{permitted:016x}\n\
             CapEff:\t{effective:016x}\n{rest}"
        );
        self.write("/proc/self/status", &text);
    }

    fn namespace(&self, target: &str) {
        self.namespace_of("self", target);
    }

    fn namespace_of(&self, process: &str, target: &str) {
        let path = self.0.join(format!("proc/{process}/ns/user"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _first = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    fn read(&self) -> Discovery {
        Discovery::below(&self.0)
    }

    fn texts(&self) -> String {
        self.read().advice().iter().map(|advice| format!("{advice}\n")).collect()
    }

    fn budget(&self, kind: Kind) -> Result<Amount, BudgetError> {
        Budget::discover_below(&self.0, kind, LIMITS).map(|budget| budget.total())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.0);
    }
}

const LIMITS: RegistrarLimits =
    RegistrarLimits { page_bytes: 4096, max_region_bytes: 1 << 30, max_regions: 1024 };
const IPC_LOCK: u64 = 1 << 14;

#[test]
fn three_counters_meet_one_limit() {
    let machine = Machine::new("counters");
    let found = machine.read();
    assert_eq!((found.locked.get(), found.pinned.get()), (Some(4096), Some(MIB)));
    let sharing = |kind| found.bounds(kind)[0].shared_with;
    assert_eq!(sharing(Kind::IoUring), SharedWith::User);
    assert_eq!(sharing(Kind::Verbs), SharedWith::Process);
    // What counts already is not there to be given.
    let bytes = |kind| machine.budget(kind).unwrap().bytes as u64;
    assert_eq!(bytes(Kind::IoUring), 7 * MIB);
    assert_eq!(bytes(Kind::Verbs), 7 * MIB);
    assert_eq!(bytes(Kind::Mlock), 8 * MIB - 4096);
}

#[test]
fn a_container_is_told_where_its_eight_mebibytes_come_from() {
    let machine = Machine::new("container");
    assert!(machine.texts().contains("inherits"), "{}", machine.texts());
    machine.status(IPC_LOCK, IPC_LOCK, "");
    machine.namespace("user:[4026532000]");
    assert_eq!(machine.read().privilege.get(), Some(Privilege::Inert));
    assert!(machine.texts().contains("does not waive"), "{}", machine.texts());
    assert_eq!(machine.budget(Kind::Verbs).unwrap().bytes as u64, 8 * MIB);
}

#[test]
fn a_privilege_counts_only_where_it_is_effective() {
    let machine = Machine::new("privilege");
    let privilege = || machine.read().privilege.get();
    assert_eq!(privilege(), Some(Privilege::Absent { no_new_privileges: false }));
    machine.status(0, 0, "NoNewPrivs:\t1\n");
    assert_eq!(privilege(), Some(Privilege::Absent { no_new_privileges: true }));
    assert!(machine.texts().contains("no_new_privs"));
    machine.status(0, IPC_LOCK, "");
    assert_eq!(privilege(), Some(Privilege::Lowered));
    assert!(machine.texts().contains("capset"));
    machine.status(IPC_LOCK, IPC_LOCK, "");
    assert_eq!(privilege(), Some(Privilege::Effective));
    assert_eq!(machine.texts(), "");
    // Then the machine's memory is what is left to bound it, half of it.
    assert_eq!(machine.budget(Kind::IoUring).unwrap().bytes as u64, 8 * GIB);
}

/// As where no descriptor is left for `/proc`, at a refusal of the device.
#[test]
fn what_cannot_be_read_again_stays_as_it_was() {
    let machine = Machine::new("reread");
    machine.status(IPC_LOCK, IPC_LOCK, "");
    let budget = Budget::discover_below(&machine.0, Kind::Verbs, LIMITS).unwrap();
    assert_eq!(budget.total().bytes as u64, 8 * GIB);
    machine.remove("/proc/self/status");
    assert_eq!(budget.refresh().bytes as u64, 8 * GIB);
    // Without a limit there is nothing to waive.
    machine.memlock("unlimited", "unlimited");
    assert_eq!(budget.refresh().bytes as u64, 8 * GIB);
    machine.memlock("8388608", "8388608");
    machine.status(0, 0, "");
    assert_eq!(budget.refresh().bytes as u64, 8 * MIB);
}

/// The kernel cuts the name of a program in the middle of a letter, and prints the names of files as they are.
#[test]
fn names_that_are_no_text_hide_nothing() {
    let machine = Machine::new("bytes");
    let status =
        b"Name:\tcaf\xff\nVmPin:\t8 kB\nCapPrm:\t0000000000004000\nCapEff:\t0000000000004000\n";
    machine.write("/proc/self/status", status);
    machine.write("/proc/self/maps", b"1000-2000 r-xp 00000000 fe:00 7 /home/\xff\n");
    let found = machine.read();
    assert_eq!((found.pinned.get(), found.mappings.get()), (Some(8 << 10), Some(1)));
    assert_eq!(found.privilege.get(), Some(Privilege::Effective));
}

#[test]
fn a_limit_that_may_be_raised_is_said() {
    let machine = Machine::new("raisable");
    machine.memlock("8388608", "unlimited");
    assert!(machine.texts().contains("no limit: the program may raise it"), "{}", machine.texts());
    machine.memlock("unlimited", "unlimited");
    assert_eq!(machine.texts(), "");
}

#[test]
fn pins_of_the_same_user_are_summed_and_others_are_not() {
    let machine = Machine::new("others");
    machine.write("/proc/100/status", "Uid:\t1000\nVmPin:\t999999 kB\n");
    machine.write("/proc/200/status", "Uid:\t1000\t0\t0\t0\nVmPin:\t3072 kB\n");
    machine.write("/proc/201/status", "Uid:\t1000\nVmPin:\t1024 kB\n");
    machine.write("/proc/300/status", "Uid:\t1001\nVmPin:\t8192 kB\n");
    machine.write("/proc/400/status", "nonsense");
    assert_eq!(machine.read().pinned_by_others.get(), Some(4 * MIB));
    // A capability waives the limit in the machine's own user namespace alone.
    let privileged = "Uid:\t1000\nVmPin:\t2048 kB\nCapEff:\t0000000000004000\n";
    for process in ["202", "203", "204"] {
        machine.write(&format!("/proc/{process}/status"), privileged);
    }
    machine.namespace_of("202", "user:[4026531837]");
    machine.namespace_of("203", "user:[4026532000]");
    assert_eq!(machine.read().pinned_by_others.get(), Some(8 * MIB), "one's is not visible");
    let pinned_with_users = |map: &str| {
        machine.write("/proc/204/uid_map", map);
        machine.read().pinned_by_others.get()
    };
    assert_eq!(pinned_with_users("         0          0 4294967295\n"), Some(6 * MIB));
    assert_eq!(pinned_with_users("         0     100000      65536\n"), Some(8 * MIB));
    assert!(machine.texts().contains("user of its own"));
}

#[test]
fn the_tightest_group_bounds_whichever_it_is() {
    let machine = Machine::new("groups");
    machine.memlock("unlimited", "unlimited");
    machine.write("/proc/self/cgroup", "0::/a/b\n");
    machine.write("/sys/fs/cgroup/a/b/memory.max", "max\n");
    machine.write("/sys/fs/cgroup/a/b/memory.high", "536870912\n");
    machine.write("/sys/fs/cgroup/a/b/memory.current", "1048576\n");
    machine.write("/sys/fs/cgroup/a/memory.max", "1073741824\n");
    machine.write("/sys/fs/cgroup/a/memory.high", "max\n");
    let bounds = machine.read().bounds(Kind::Verbs);
    let seen: Vec<_> = bounds.iter().map(|bound| (bound.bytes, bound.beyond)).collect();
    let expected =
        [(GIB / 2, Beyond::Throttled), (GIB, Beyond::Killed), (16 * GIB, Beyond::Killed)];
    assert_eq!(seen, expected);
    assert_eq!(bounds[0].source, "/sys/fs/cgroup/a/b/memory.high");
    assert!(machine.texts().contains("slowed down"), "{}", machine.texts());
    assert_eq!(machine.budget(Kind::Verbs).unwrap().bytes as u64, GIB / 4);
    // The topmost group has no such files, and no limit; a middle one that lost its file has none.
    assert_eq!(machine.read().groups.len(), 3);
    machine.remove("/sys/fs/cgroup/a/memory.max");
    assert_eq!(machine.read().bounds(Kind::Verbs).len(), 2);
}

/// Also where its name is how the name of its parent's file begins.
#[test]
fn the_use_that_is_said_is_that_of_the_tightest_group() {
    let machine = Machine::new("named-as-a-file");
    machine.memlock("unlimited", "unlimited");
    machine.write("/proc/self/cgroup", "0::/a/memory\n");
    machine.write("/sys/fs/cgroup/a/memory/memory.current", "4096\n");
    machine.write("/sys/fs/cgroup/a/memory.max", "1073741824\n");
    machine.write("/sys/fs/cgroup/a/memory.current", "8192\n");
    let advice = machine.read().advice();
    let current = advice.iter().find_map(|advice| match advice {
        BudgetAdvice::TightGroup { current, .. } => *current,
        _ => None,
    });
    assert_eq!(current, Some(8192));
}

#[test]
fn the_first_version_of_control_groups_is_read_where_it_has_memory() {
    let machine = Machine::new("legacy");
    machine.memlock("unlimited", "unlimited");
    machine.write("/proc/self/cgroup", "4:memory:/docker/x\n1:cpu:/\n0::/\n");
    machine.write(
        "/proc/self/mountinfo",
        "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
         41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    );
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n");
    machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4096\n");
    let found = machine.read();
    assert_eq!((found.groups.len(), found.groups_unread), (1, None));
    assert_eq!(found.bounds(Kind::Mlock)[0].bytes, 256 * MIB);
    assert!(machine.texts().contains("4 KiB are used"), "{}", machine.texts());
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_eq!(machine.read().bounds(Kind::Mlock)[0].bytes, 16 * GIB);
}

#[test]
fn what_cannot_be_read_is_said_and_not_guessed() {
    let machine = Machine::new("unread");
    machine.remove("/proc/self/mountinfo");
    assert!(machine.texts().contains("not visible"), "{}", machine.texts());
    machine.write("/proc/sys/vm/max_map_count", "many");
    assert_eq!(machine.read().max_mappings.value, Err(Unread::Garbled));
    machine.remove("/proc/self/maps");
    assert_eq!(machine.read().mappings.value, Err(Unread::Missing));
    assert_eq!(machine.read().free_mappings(), None);
    machine.remove("/proc/self/limits");
    assert_eq!(machine.budget(Kind::Mlock), Err(BudgetError::Unread));
    let nothing = Discovery::below(Path::new("/nonexistent"));
    assert_eq!(nothing.memlock.value, Err(Unread::Missing));
    assert!(nothing.memlock_enforced(), "an unknown privilege is none");
}

#[test]
fn nothing_left_is_refused_with_what_took_it() {
    let machine = Machine::new("nothing");
    machine.memlock("0", "0");
    let error = machine.budget(Kind::Mlock).unwrap_err();
    assert!(matches!(error, BudgetError::Nothing { .. }), "{error}");
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    machine.memlock("1048576", "1048576");
    assert!(machine.budget(Kind::IoUring).is_err(), "a mebibyte is pinned already");
    assert!(Budget::new(Amount { bytes: 0, regions: 1 }).is_err());
    assert!(Budget::new(Amount { bytes: 1, regions: 0 }).is_err());
}

#[test]
fn what_can_never_be_had_is_refused_at_the_start() {
    let machine = Machine::new("impossible");
    let within = |bytes: u64, regions| {
        let amount = Amount { bytes: usize::try_from(bytes).unwrap(), regions };
        Budget::within_below(&machine.0, amount, Kind::IoUring, LIMITS).map(|found| found.total())
    };
    let error = within(8 * MIB + 1, 10).unwrap_err();
    assert!(error.to_string().contains("ulimit -l"), "{error}");
    let registrations = BudgetError::Registrations { regions: 1025, max_regions: 1024 };
    assert_eq!(within(MIB, 1025), Err(registrations));
    assert_eq!(within(8 * MIB, 1024).unwrap().bytes as u64, 8 * MIB);
    assert!(within(u64::MAX, usize::MAX).is_err());
    assert!(matches!(within(0, 1), Err(BudgetError::Nothing { .. })));
    machine.memlock("unlimited", "unlimited");
    assert!(within(17 * GIB, 10).unwrap_err().to_string().contains("MemTotal"));
}

#[test]
fn the_table_of_mappings_bounds_locks() {
    let machine = Machine::new("mappings");
    machine.write("/proc/sys/vm/max_map_count", "103\n");
    assert_eq!(machine.budget(Kind::Mlock).unwrap().regions, 50);
    assert_eq!(machine.budget(Kind::IoUring).unwrap().regions, 1024);
    machine.write("/proc/sys/vm/max_map_count", "5\n");
    let many = |advice: &BudgetAdvice| {
        matches!(advice, BudgetAdvice::ManyMappings { mappings: 3, max: 5 })
    };
    assert!(machine.read().advice().iter().any(many));
}

#[test]
fn pools_of_huge_pages_and_rdma_objects_are_listed() {
    let machine = Machine::new("pools");
    for (size, total) in [("1048576", "1"), ("2048", "512")] {
        let pool = format!("/sys/kernel/mm/hugepages/hugepages-{size}kB");
        machine.write(&format!("{pool}/nr_hugepages"), total);
        machine.write(&format!("{pool}/free_hugepages"), "0");
    }
    machine.write("/sys/kernel/mm/hugepages/nonsense", "");
    machine.write("/sys/fs/cgroup/rdma.max", "rxe0 hca_handle=max hca_object=300\n");
    let found = machine.read();
    let pools: Vec<_> = found.huge_pages.iter().map(|pool| pool.page_bytes).collect();
    assert_eq!(pools, [2 * MIB, GIB]);
    assert_eq!(found.huge_pages[0].total.get(), Some(512));
    assert_eq!(found.huge_pages[0].reserved.value, Err(Unread::Missing));
    assert_eq!((found.rdma_objects[0].max, found.rdma_objects[0].device.as_str()), (300, "rxe0"));
    assert!(machine.texts().contains("hca_object"));
}

#[test]
fn this_machine_is_understood() {
    let found = Discovery::read();
    assert!(found.memlock.value.is_ok() && found.privilege.value.is_ok());
    assert!(found.locked.value.is_ok() && found.pinned.value.is_ok());
    assert!(found.memory.get() >= found.available.get());
    assert!(found.mappings.get().is_some_and(|count| count > 0));
    assert!(found.free_mappings().is_some());
    assert!(!found.bounds(Kind::Verbs).is_empty());
    if let (Some(soft), Some(hard)) =
        found.memlock.get().map_or((None, None), |limit| (limit.soft.bytes(), limit.hard.bytes()))
    {
        assert!(soft <= hard);
    }
    let same = pinfold::limits::Limits::read();
    assert_eq!(found.memlock.get().unwrap().soft, same.memlock_soft);
    assert_eq!(
        found.memlock_enforced(),
        same.enforced() != Memlock::Unlimited || {
            same.memlock_soft == Memlock::Unlimited && found.memlock_enforced()
        }
    );
    for advice in found.advice() {
        assert!(!advice.to_string().is_empty());
    }
}

/// The rings' own memory is paid out of the same limit, on the kernels that charge for it; and a
/// ring that grows is noticed.
#[test]
fn rings_are_not_part_of_a_budget_for_their_buffers() {
    let machine = Machine::new("rings");
    let ring = |bytes: u64| {
        format!("10000-{:x} rw-s 00000000 00:10 1 anon_inode:[io_uring]\n", 0x10000 + bytes)
    };
    machine.write("/proc/self/maps", ring(MIB));
    let budget = Budget::discover_below(&machine.0, Kind::IoUring, LIMITS).unwrap();
    assert_eq!(budget.total().bytes as u64, 8 * MIB - MIB - MIB);
    assert_eq!(machine.read().counted(Kind::IoUring), 2 * MIB);
    assert_eq!(machine.budget(Kind::Verbs).unwrap().bytes as u64, 7 * MIB);
    machine.write("/proc/self/maps", ring(3 * MIB));
    assert_eq!(budget.refresh().bytes as u64, 4 * MIB);
    machine.remove("/proc/self/maps");
    assert_eq!(budget.refresh().bytes as u64, 4 * MIB, "what cannot be read stays");
    machine.write("/proc/sys/kernel/osrelease", "6.12.1\n");
    assert_eq!(budget.refresh().bytes as u64, 7 * MIB);
}
