//! The kernel's error numbers.
//!
//! # Safety
//!
//! The unsafe code of this file is there to read the calling thread's `errno`.

/// The kernel's error number, as `errno.h` counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// What the calling thread's last failed call of the C library left.
pub fn last_errno() -> Errno {
    // SAFETY: the C library gives every thread its own errno, alive as long as the thread.
    Errno(unsafe { *libc::__errno_location() })
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno.0 };
}

/// A system call's result, where -1 means that `errno` tells why.
pub(crate) fn checked(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

/// As [`checked`], of a call that answers with nothing.
pub(crate) fn done(result: impl Into<libc::c_long>) -> Result<(), Errno> {
    checked(result.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_number_is_the_thread_s_own() {
        set_errno(Errno(libc::EXDEV));
        std::thread::spawn(|| set_errno(Errno(libc::EPERM))).join().unwrap();
        assert_eq!(last_errno(), Errno(libc::EXDEV));
    }
}
