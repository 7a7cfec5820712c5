//! Facts of this process and its machine.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for calls of the C library that take numbers, or fill what is local.

#![allow(unsafe_code)]

/// The bytes of a page, a power of two. The C library has the number; no system call.
pub fn page_bytes() -> usize {
    // SAFETY: sysconf takes no pointer.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The calling process's effective user.
pub fn effective_user() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// A limit of `getrlimit(2)`, soft and hard; `None` is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ResourceLimit {
    /// What counts.
    pub soft: Option<u64>,
    /// Up to where the process may raise it by itself.
    pub hard: Option<u64>,
}

/// The resources whose limits matter here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resource {
    /// `RLIMIT_MEMLOCK`: bytes locked or pinned.
    LockedMemory,
    /// `RLIMIT_NOFILE`: descriptors.
    Descriptors,
    /// `RLIMIT_AS`: bytes of addresses.
    Addresses,
    /// `RLIMIT_RTPRIO`: the highest priority of real time.
    RealTimePriority,
}

/// A number of `getrlimit`, whose type differs between C libraries.
#[cfg(target_env = "gnu")]
type Number = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Number = libc::c_int;

impl Resource {
    fn number(self) -> Number {
        match self {
            Self::LockedMemory => libc::RLIMIT_MEMLOCK,
            Self::Descriptors => libc::RLIMIT_NOFILE,
            Self::Addresses => libc::RLIMIT_AS,
            Self::RealTimePriority => libc::RLIMIT_RTPRIO,
        }
    }

    /// The limit; 0, soft and hard, where a filter refuses the question.
    pub fn limit(self) -> ResourceLimit {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel fills the structure, or leaves it.
        unsafe { libc::getrlimit(self.number(), &raw mut limit) };
        let bounded = |value| (value != libc::RLIM_INFINITY).then_some(value);
        ResourceLimit { soft: bounded(limit.rlim_cur), hard: bounded(limit.rlim_max) }
    }

    /// Sets the soft limit to the hard one, which needs no privilege, and says what it is.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn raise(self) -> Result<ResourceLimit, crate::Errno> {
        let ResourceLimit { hard, .. } = self.limit();
        let value = hard.unwrap_or(libc::RLIM_INFINITY);
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: the kernel reads the structure.
        crate::errno::done(unsafe { libc::setrlimit(self.number(), &raw const limit) })?;
        Ok(ResourceLimit { soft: hard, hard })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers() {
        assert!(page_bytes().is_power_of_two());
        let limit = Resource::Descriptors.limit();
        assert!(limit.soft.is_some_and(|soft| soft > 0));
        assert!(limit.hard.is_none_or(|hard| limit.soft.is_some_and(|soft| soft <= hard)));
    }
}
