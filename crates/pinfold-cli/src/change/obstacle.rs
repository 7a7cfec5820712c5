//! Why a change could not be made.

use std::io;

/// What a change comes to.
pub(super) type Outcome<T = ()> = Result<T, Obstacle>;

/// Why a change could not be made on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {}", io::Error::from_raw_os_error(*.errno))]
pub(crate) struct Obstacle {
    pub(super) call: &'static str,
    pub(super) errno: i32,
}

impl Obstacle {
    pub(super) fn last(call: &'static str) -> Self {
        Self::from_error(call, &io::Error::last_os_error())
    }

    pub(super) fn from_error(call: &'static str, error: &io::Error) -> Self {
        Self { call, errno: error.raw_os_error().unwrap_or(0) }
    }

    pub(super) const fn of_call(call: &'static str, errno: pinfold_kernel::Errno) -> Self {
        Self { call, errno: errno.0 }
    }

    /// Made when the address is no longer free.
    pub(crate) const fn taken(call: &'static str) -> Self {
        Self { call, errno: libc::EEXIST }
    }

    /// Made when the memory is of a kind that cannot suffer the change.
    pub(super) const fn unsuitable(call: &'static str) -> Self {
        Self { call, errno: libc::EOPNOTSUPP }
    }

    /// Whether another thread was faster and has its own memory at the address now.
    pub(crate) const fn is_taken(&self) -> bool {
        self.errno == libc::EEXIST
    }
}
