//! What a discovery means for the one who runs the program, in sentences.

use super::discovery::{Bound, Discovery, Kind, Privilege};
use super::figure::SharedWith;
use crate::limits::Memlock;
use std::fmt;

/// Something worth doing, or worth knowing.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BudgetAdvice {
    /// `RLIMIT_MEMLOCK` is too low for a cache of a useful size.
    SmallMemlock {
        /// The limit in force, in bytes.
        soft: u64,
        /// Up to where the program may raise it by itself.
        hard: Memlock,
        /// Why the limit is in force.
        privilege: Option<Privilege>,
    },
    /// The program may raise its own limit.
    RaisableMemlock {
        /// The limit in force, in bytes.
        soft: u64,
        /// Up to where.
        hard: Memlock,
    },
    /// This user's other processes have pinned part of what io_uring may pin.
    PinnedByOthers {
        /// How much, as far as it can be seen, in bytes.
        bytes: u64,
        /// The limit, in bytes.
        soft: u64,
    },
    /// A control group has less memory than the limit would let one pin.
    TightGroup {
        /// The bound.
        bound: Bound,
        /// What the group uses, in bytes.
        current: Option<u64>,
    },
    /// Most of the mappings that a process may have are there already.
    ManyMappings {
        /// How many there are.
        mappings: u64,
        /// How many there may be.
        max: u64,
    },
    /// A control group bounds the registrations on an RDMA device.
    RdmaObjects {
        /// The device.
        device: String,
        /// How many objects.
        max: u64,
        /// The group's directory.
        directory: String,
    },
    /// The control groups could not be read.
    GroupsUnread,
}

/// Below this, caches of a useful size do not fit, in bytes.
const SMALL: u64 = 64 << 20;

/// What systemd and the kernel give by default.
const INHERITED: u64 = 8 << 20;

impl Discovery {
    /// What to do about what stands in the way; empty where nothing does.
    pub fn advice(&self) -> Vec<BudgetAdvice> {
        let mut advice = self.about_memlock();
        advice.extend(self.about_groups());
        advice.extend(self.about_mappings());
        advice.extend(self.rdma_objects.iter().map(|limit| BudgetAdvice::RdmaObjects {
            device: limit.device.clone(),
            max: limit.max,
            directory: limit.directory.clone(),
        }));
        advice
    }

    fn about_memlock(&self) -> Vec<BudgetAdvice> {
        let Some(limit) = self.memlock.get().filter(|_| self.memlock_enforced()) else {
            return Vec::new();
        };
        let Some(soft) = limit.soft.bytes() else { return Vec::new() };
        let hard = limit.hard;
        let mut advice = Vec::new();
        if soft < SMALL {
            let privilege = self.privilege.get();
            advice.push(BudgetAdvice::SmallMemlock { soft, hard, privilege });
        }
        if hard.bytes().is_none_or(|hard| hard > soft) {
            advice.push(BudgetAdvice::RaisableMemlock { soft, hard });
        }
        if let Some(bytes) = self.pinned_by_others.get().filter(|&bytes| bytes > soft / 4) {
            advice.push(BudgetAdvice::PinnedByOthers { bytes, soft });
        }
        advice
    }

    /// The tightest group that would kill or slow down before the limit refuses.
    fn about_groups(&self) -> Option<BudgetAdvice> {
        if self.groups_unread.is_some() {
            return Some(BudgetAdvice::GroupsUnread);
        }
        let tightest = self.bounds(Kind::Verbs).into_iter().next()?;
        if tightest.shared_with != SharedWith::Group {
            return None;
        }
        let own = |group: &&super::Group| {
            [&group.max.source, &group.high.source].contains(&&tightest.source)
        };
        let current = self.groups.iter().find(own).and_then(|group| group.current.get());
        Some(BudgetAdvice::TightGroup { bound: tightest, current })
    }

    fn about_mappings(&self) -> Option<BudgetAdvice> {
        let (mappings, max) = (self.mappings.get()?, self.max_mappings.get()?);
        (mappings > max / 2).then_some(BudgetAdvice::ManyMappings { mappings, max })
    }
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", bytes / 1024)
}

fn limit(limit: Memlock) -> String {
    limit.bytes().map_or_else(|| "no limit".into(), kib)
}

/// Why the limit holds, as far as there is something to say.
fn why_enforced(privilege: Option<Privilege>) -> &'static str {
    match privilege {
        Some(Privilege::Inert) => {
            " (CAP_IPC_LOCK is there and does not waive it: it counts in the machine's own user \
             namespace only, and this is another, as in a rootless container)"
        }
        Some(Privilege::Lowered) => {
            " (CAP_IPC_LOCK is permitted but not effective: raise it with capset before the ring \
             is made or the memory registered)"
        }
        Some(Privilege::Absent { no_new_privileges: true }) => {
            " (no_new_privs is set, so file capabilities will not give the program CAP_IPC_LOCK)"
        }
        Some(Privilege::Absent { .. } | Privilege::Effective) | None => "",
    }
}

/// Where a small limit usually comes from.
fn origin(soft: u64) -> &'static str {
    if soft == INHERITED {
        "; 8 MiB is what the kernel and systemd give by default, and what a container inherits \
         from its runtime, whatever the host's users have"
    } else {
        ""
    }
}

impl fmt::Display for BudgetAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SmallMemlock { soft, hard: _, privilege } => write!(
                f,
                "RLIMIT_MEMLOCK is {}{}{}: keep the cache's budget below it, or raise it (`ulimit \
                 -l`, limits.conf, LimitMEMLOCK= of the unit, `--ulimit memlock=-1` of the container \
                 runtime)",
                kib(*soft),
                why_enforced(*privilege),
                origin(*soft)
            ),
            Self::RaisableMemlock { soft, hard } => write!(
                f,
                "RLIMIT_MEMLOCK is {} and the hard limit is {}: the program may raise it by itself \
                 (setrlimit, `ulimit -S -l`)",
                kib(*soft),
                limit(*hard)
            ),
            Self::PinnedByOthers { bytes, soft } => write!(
                f,
                "this user's other processes have pinned {} of the {} that all of its rings may pin \
                 together: give this program a user of its own, or raise RLIMIT_MEMLOCK",
                kib(*bytes),
                kib(*soft)
            ),
            Self::TightGroup { bound, current } => {
                let what = bound.beyond;
                let used = current
                    .map_or_else(String::new, |used| format!(", of which {} are used", kib(used)));
                write!(
                    f,
                    "{} is {}{used}: a process that pins near it is {what}, not refused, because pinned \
                     memory cannot be reclaimed; keep the budget well below it",
                    bound.source,
                    kib(bound.bytes)
                )
            }
            Self::ManyMappings { mappings, max } => write!(
                f,
                "{mappings} of {max} mappings are there: locking and watching parts of mappings \
                 splits them; raise vm.max_map_count, or use fewer, larger allocations"
            ),
            Self::RdmaObjects { device, max, directory } => write!(
                f,
                "{directory}/rdma.max grants {max} objects of {device}, each registration being \
                 one: keep the budget below, or raise hca_object"
            ),
            Self::GroupsUnread => f.write_str(
                "the control groups that count this process's memory are not visible here: a limit \
                 of theirs may kill what pins too much, and nothing here will foresee it",
            ),
        }
    }
}
