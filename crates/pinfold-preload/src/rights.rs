//! Which registrations can be shared between uses, and with which rights.

use libc::c_uint;
use pinfold::Access;
use pinfold::registrar::verbs::ffi::*;

/// What a program asked for, where the cache can serve it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rights {
    pub(crate) access: Access,
    /// Flags that are no rights and that a device may ignore (relaxed ordering): registrations with
    /// and without them do not serve each other.
    pub(crate) hints: c_uint,
}

const REMOTE: [(c_uint, Access); 3] = [
    (IBV_ACCESS_REMOTE_READ, Access::REMOTE_READ),
    (IBV_ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE),
    (IBV_ACCESS_REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
];

impl Rights {
    /// The rights that libibverbs' `flags` stand for. `None` for what passes through: remote
    /// rights, unless `remote` says to cache them; memory windows, on-demand paging and everything
    /// unknown; and what the kernel refuses, so that it can say so itself.
    pub(crate) fn of(flags: c_uint, remote: bool) -> Option<Self> {
        let hints = flags & IBV_ACCESS_OPTIONAL_RANGE;
        let mut left = flags & !IBV_ACCESS_OPTIONAL_RANGE;
        let mut access = Access::READ;
        if left & IBV_ACCESS_LOCAL_WRITE != 0 {
            access = Access::READ_WRITE;
            left &= !IBV_ACCESS_LOCAL_WRITE;
        }
        for (flag, right) in REMOTE.into_iter().filter(|&(flag, _)| flags & flag != 0) {
            let local = access;
            if !remote || (right.writes() && !local.contains(Access::WRITE)) {
                return None;
            }
            access = access | right;
            left &= !flag;
        }
        (left == 0).then_some(Self { access, hints })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(flags: c_uint, remote: bool) -> Option<Access> {
        Rights::of(flags, remote).map(|rights| rights.access)
    }

    #[test]
    fn local_rights_are_cached() {
        assert_eq!(access(0, false), Some(Access::READ));
        assert_eq!(access(IBV_ACCESS_LOCAL_WRITE, false), Some(Access::READ_WRITE));
    }

    #[test]
    fn remote_rights_are_cached_where_that_is_asked_for() {
        let flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        assert_eq!(access(flags, false), None);
        let wanted = Access::READ_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        assert_eq!(access(flags, true), Some(wanted));
        assert_eq!(access(IBV_ACCESS_REMOTE_READ, true), Some(Access::READ | Access::REMOTE_READ));
    }

    #[test]
    fn what_the_kernel_refuses_is_left_to_it() {
        assert_eq!(access(IBV_ACCESS_REMOTE_WRITE, true), None);
        assert_eq!(access(IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ, true), None);
    }

    #[test]
    fn what_is_no_right_passes_through() {
        for flag in [
            IBV_ACCESS_MW_BIND,
            IBV_ACCESS_ZERO_BASED,
            IBV_ACCESS_ON_DEMAND,
            IBV_ACCESS_HUGETLB,
            1 << 8,
            1 << 31,
        ] {
            assert_eq!(access(IBV_ACCESS_LOCAL_WRITE | flag, true), None, "{flag:#x}");
        }
    }

    #[test]
    fn hints_are_kept_apart() {
        let rights = Rights::of(IBV_ACCESS_RELAXED_ORDERING, false).unwrap();
        assert_eq!(rights.hints, IBV_ACCESS_RELAXED_ORDERING);
        assert_eq!(rights.access, Access::READ);
    }
}
