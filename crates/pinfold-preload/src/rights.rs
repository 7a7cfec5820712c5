//! Which registrations can be kept, by the rights that they give.

use libc::c_uint;
use pinfold::registrar::verbs::ffi::*;

const REMOTE: c_uint = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Whether a registration with libibverbs' `flags` can be kept. What cannot passes through: remote
/// rights, unless `remote` says to keep them; memory windows, on-demand paging and everything
/// unknown.
pub(crate) const fn can_be_kept(flags: c_uint, remote: bool) -> bool {
    let kept = IBV_ACCESS_OPTIONAL_RANGE | IBV_ACCESS_LOCAL_WRITE | if remote { REMOTE } else { 0 };
    flags & !kept == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_rights_are_kept_with_any_hint() {
        for flags in [0, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING] {
            assert!(can_be_kept(flags, false), "{flags:#x}");
        }
    }

    #[test]
    fn remote_rights_are_kept_where_that_is_asked_for() {
        let flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        assert!(!can_be_kept(flags, false) && can_be_kept(flags, true));
        assert!(!can_be_kept(IBV_ACCESS_REMOTE_ATOMIC, false));
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
            assert!(!can_be_kept(IBV_ACCESS_LOCAL_WRITE | flag, true), "{flag:#x}");
        }
    }
}
