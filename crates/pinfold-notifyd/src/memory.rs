//! Whether the control group of this process has memory for one more view.
//!
//! The kernel charges a view's memory to the group of the process that makes it, and frees it when no process holds or
//! maps it any more, however long ago the view was given back. The helper has no way to count that; its group does. In a
//! group at its limit the kernel ends a process, which would be the helper. So from some way below the limit on, no
//! view is made. Of control groups of version 1 nothing is known here.

use pinfold_kernel::control_group::{ControlGroup, Version};
use std::path::Path;

/// What stays free, for the helper itself and for what the kernel charges in advance: this share of the limit...
const SHARE: u64 = 8;
/// ... and no more, where other programs use most of what a large group has.
const MOST_RESERVED: u64 = 64 << 20;

/// The control groups whose limits hold for this process.
#[derive(Debug)]
pub(crate) struct GroupMemory(Vec<ControlGroup>);

impl GroupMemory {
    /// The group of this process and those above it.
    pub(crate) fn own() -> Self {
        Self::below(Path::new("/"))
    }

    /// The same, with `/proc` and `/sys` below `root`.
    pub(crate) fn below(root: &Path) -> Self {
        let groups = ControlGroup::of_this_process(root, "memory").unwrap_or_default();
        Self(groups.into_iter().filter(|group| group.version() == Version::V2).collect())
    }

    /// Whether one of them is near its limit. Some system calls.
    pub(crate) fn is_scarce(&self) -> bool {
        self.0.iter().any(|group| is_near_limit(group).unwrap_or(false))
    }
}

/// `None` where there is no limit.
fn is_near_limit(group: &ControlGroup) -> Option<bool> {
    // At the first the kernel ends a process, at the second it slows all down.
    let limits = [group.memory_max(), group.memory_high()].into_iter();
    let limit = limits.filter_map(|limit| limit.value.ok().flatten()).min()?;
    let most = limit - (limit / SHARE).min(MOST_RESERVED);
    let used = group.memory_in_use().value.ok()?;
    Some(used > most && used.saturating_sub(group.memory_reclaimable()) > most)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    /// Files in the place of control groups, until this is dropped: a slice with 800 bytes and a service with 400 in it.
    pub(crate) struct Groups(PathBuf);

    impl Groups {
        pub(crate) fn new(name: &str) -> Self {
            let name = format!("pinfold-groups-{name}-{}", std::process::id());
            let groups = Self(std::env::temp_dir().join(name));
            groups.write_file("proc/self/mountinfo", "30 23 0:26 / /sys rw - cgroup2 cgroup2 rw\n");
            groups.write("slice", "memory.max", "800\n");
            groups.write("slice/service", "memory.max", "400\n");
            groups.write("slice/service", "memory.high", "max\n");
            groups.use_up("slice", 0);
            groups.use_up("slice/service", 0);
            groups
        }

        fn write(&self, group: &str, file: &str, text: &str) {
            self.write_file(&format!("sys/{group}/{file}"), text);
        }

        fn write_file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        pub(crate) fn use_up(&self, group: &str, bytes: u64) {
            self.write(group, "memory.current", &format!("{bytes}\n"));
        }

        pub(crate) fn of_service(&self) -> GroupMemory {
            self.of_member("1:name=systemd:/other\n0::/slice/service\n")
        }

        fn of_member(&self, membership: &str) -> GroupMemory {
            self.write_file("proc/self/cgroup", membership);
            GroupMemory::below(&self.0)
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn memory_is_scarce_near_the_limit_of_any_group() {
        let groups = Groups::new("any");
        let memory = groups.of_service();
        groups.use_up("slice/service", 350);
        assert!(!memory.is_scarce());
        groups.use_up("slice/service", 351);
        assert!(memory.is_scarce());
        groups.use_up("slice/service", 0);
        groups.use_up("slice", 701);
        assert!(memory.is_scarce());
    }

    #[test]
    fn of_a_large_group_other_programs_may_use_most() {
        const LIMIT: u64 = 1 << 40;
        let groups = Groups::new("large");
        groups.write("slice", "memory.max", &LIMIT.to_string());
        groups.use_up("slice", LIMIT - MOST_RESERVED);
        assert!(!groups.of_service().is_scarce());
        groups.use_up("slice", LIMIT - MOST_RESERVED + 1);
        assert!(groups.of_service().is_scarce());
    }

    #[test]
    fn what_slows_down_is_a_limit_too() {
        let groups = Groups::new("high");
        groups.write("slice/service", "memory.high", "80\n");
        groups.use_up("slice/service", 71);
        assert!(groups.of_service().is_scarce());
    }

    #[test]
    fn what_the_kernel_takes_back_does_not_count() {
        let groups = Groups::new("files");
        groups.use_up("slice/service", 400);
        groups.write(
            "slice/service",
            "memory.stat",
            "anon 400\ninactive_file 30\nactive_file 20\n",
        );
        assert!(!groups.of_service().is_scarce());
        groups.write("slice/service", "memory.stat", "anon 400\ninactive_file 49\n");
        assert!(groups.of_service().is_scarce());
    }

    #[test]
    fn where_there_is_no_limit_memory_is_not_scarce() {
        let groups = Groups::new("none");
        groups.use_up("slice", 800);
        for membership in ["", "0::/\n", "4:memory:/slice\n", "0::/../elsewhere\n"] {
            assert!(!groups.of_member(membership).is_scarce(), "{membership}");
        }
    }
}
