//! Why registrations are not kept, and what changes that.

use pinfold::listed;

listed! {
    /// Why a registration is not kept.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Reason {
        EarlyUse,
        RemoteRights,
        OnDemand,
        OtherFlags,
        ForeignAddress,
        OldAbi,
        ByAttributes,
        OwnHandle,
        NoMemory,
        OverBudget,
        NoRoom,
        KindOfMemory,
        HugePagePool,
        WatchRefused,
        ManyMappings,
        ManyChanges,
        Changing,
        NoMonitor,
        KeptFromChildren,
        MonitorStarting,
        MonitorLost,
        Restricted,
        Sanitizer,
        Fault,
    }
}

use Reason::*;

impl Reason {
    /// For reports: what these registrations have in common.
    pub(crate) const fn why(self) -> &'static str {
        match self {
            EarlyUse => "too few uses of the same bytes so far",
            RemoteRights => "rights for peers",
            OnDemand => "on-demand paging, which pins nothing",
            OtherFlags => "memory windows, huge-page hints or unknown flags",
            ForeignAddress => "an address of the device's own (iova)",
            OldAbi => "the libibverbs ABI of before 2007",
            ByAttributes => {
                "functions whose arguments are not looked at (ibv_reg_mr_ex, ibv_reg_buf_mr)"
            }
            OwnHandle => "libibverbs' functions from a private handle (dlsym)",
            NoMemory => "no bytes, or no memory",
            OverBudget => "more bytes than may be kept",
            NoRoom => "no memory for the library itself (RLIMIT_AS, RLIMIT_DATA)",
            KindOfMemory => "a kind of memory that the monitor does not watch",
            HugePagePool => "huge pages of a pool (hugetlbfs), which would lack them",
            WatchRefused => "memory that the kernel does not let the monitor watch",
            ManyMappings => "half as many mappings as the process may have (vm.max_map_count)",
            ManyChanges => "changes of watched memory that followed each other",
            Changing => "memory that was changing",
            NoMonitor => "no monitor could start",
            KeptFromChildren => "memory that libibverbs keeps from forked children (ibv_fork_init)",
            MonitorStarting => "a monitor that was starting",
            MonitorLost => "a monitor that has ended",
            Restricted => "the program's own seccomp filter",
            Sanitizer => "a leak sanitizer",
            Fault => "a fault of the library",
        }
    }

    /// What has such registrations kept, if anything does.
    pub(crate) const fn change(self) -> Option<&'static str> {
        match self {
            EarlyUse => Some("PINFOLD_KEEP_FROM=1"),
            RemoteRights => Some("PINFOLD_CACHE_REMOTE=on"),
            OverBudget => Some("PINFOLD_MAX_BYTES=BYTES"),
            KindOfMemory | NoMonitor => Some("pinfold-notifyd"),
            KeptFromChildren => Some("UCX_IB_FORK_INIT=n, RDMAV_FORK_SAFE and IBV_FORK_SAFE unset"),
            _ => None,
        }
    }
}

/// How many registrations were not kept for each reason.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Reasons([u64; Reason::ALL.len()]);

impl Reasons {
    pub(crate) const fn note(&mut self, reason: Reason) {
        self.0[reason as usize] += 1;
    }

    /// As `count` says for each.
    pub(crate) fn counted(count: impl Fn(Reason) -> u64) -> Self {
        Self(Reason::ALL.map(count))
    }

    pub(crate) fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// A JSON list of both together, those that occurred.
    pub(crate) fn json(&self, others: &Self) -> String {
        let object = |reason: Reason| {
            let change = reason.change().map_or("null".into(), |change| format!("\"{change}\""));
            let (why, count) = (reason.why(), self.of(reason) + others.of(reason));
            let written =
                || format!("{{\"why\":\"{why}\",\"change\":{change},\"registrations\":{count}}}");
            (count > 0).then(written)
        };
        let objects: Vec<_> = Reason::ALL.into_iter().filter_map(object).collect();
        format!("[{}]", objects.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_place_and_words_of_its_own() {
        for (place, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place, "{reason:?}");
            let same = Reason::ALL.iter().filter(|other| other.why() == reason.why()).count();
            assert_eq!(same, 1, "{reason:?}");
            let is_plain = |text: &str| !text.contains(['"', '\\', '\n']);
            assert!(is_plain(reason.why()) && reason.change().is_none_or(is_plain));
        }
    }

    #[test]
    fn what_occurred_is_listed_with_what_changes_it() {
        let (mut passed, mut per_use) = (Reasons::default(), Reasons::default());
        passed.note(RemoteRights);
        passed.note(RemoteRights);
        per_use.note(Changing);
        assert_eq!((passed.total(), per_use.total(), passed.of(Changing)), (2, 1, 0));
        assert_eq!(
            passed.json(&per_use),
            "[{\"why\":\"rights for peers\",\"change\":\"PINFOLD_CACHE_REMOTE=on\",\"registrations\":2},\
             {\"why\":\"memory that was changing\",\"change\":null,\"registrations\":1}]"
        );
        assert_eq!(Reasons::default().json(&Reasons::default()), "[]");
    }
}
