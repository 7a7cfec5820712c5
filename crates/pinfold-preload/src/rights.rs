//! Which registrations can be kept, by the rights that they give.

use crate::reasons::Reason;
use libc::c_uint;
use pinfold::registrar::verbs::ffi::*;

const REMOTE: c_uint = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Why a registration with libibverbs' `flags` is not kept, if it is not: remote rights, unless `remote` says to keep
/// them; memory windows, on-demand paging and everything unknown.
pub(crate) const fn obstacle(flags: c_uint, remote: bool) -> Option<Reason> {
    let others = flags & !(IBV_ACCESS_OPTIONAL_RANGE | IBV_ACCESS_LOCAL_WRITE | REMOTE);
    if others & IBV_ACCESS_ON_DEMAND != 0 {
        Some(Reason::OnDemand)
    } else if others != 0 {
        Some(Reason::OtherFlags)
    } else if flags & REMOTE != 0 && !remote {
        Some(Reason::RemoteRights)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_rights_are_kept_with_any_hint() {
        for flags in [0, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING] {
            assert_eq!(obstacle(flags, false), None, "{flags:#x}");
        }
    }

    #[test]
    fn remote_rights_are_kept_where_that_is_asked_for() {
        let flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        assert_eq!(obstacle(flags, false), Some(Reason::RemoteRights));
        assert_eq!(obstacle(flags, true), None);
        assert_eq!(obstacle(IBV_ACCESS_REMOTE_ATOMIC, false), Some(Reason::RemoteRights));
    }

    #[test]
    fn what_is_no_right_passes_through() {
        let others =
            [IBV_ACCESS_MW_BIND, IBV_ACCESS_ZERO_BASED, IBV_ACCESS_HUGETLB, 1 << 8, 1 << 31];
        for flag in others {
            let flags = IBV_ACCESS_LOCAL_WRITE | REMOTE | flag;
            assert_eq!(obstacle(flags, true), Some(Reason::OtherFlags), "{flag:#x}");
            let on_demand = obstacle(flags | IBV_ACCESS_ON_DEMAND, true);
            assert_eq!(on_demand, Some(Reason::OnDemand), "{flag:#x}");
        }
    }
}
