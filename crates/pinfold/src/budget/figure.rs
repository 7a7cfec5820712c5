//! A number with where it came from and who else uses it up.

use std::fmt;

/// A number that was read, or why it was not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Figure<T> {
    /// The number.
    pub value: Result<T, Unread>,
    /// The file, and the line in it.
    pub source: String,
    /// Whose it is.
    pub shared_with: SharedWith,
}

impl<T: Copy> Figure<T> {
    pub(super) fn new(
        value: Result<T, Unread>,
        source: impl Into<String>,
        shared_with: SharedWith,
    ) -> Self {
        Self { value, source: source.into(), shared_with }
    }

    /// The number, where there is one.
    pub fn get(&self) -> Option<T> {
        self.value.as_ref().ok().copied()
    }
}

/// Why a number is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unread {
    /// There is no such file, or no such line in it: an older kernel, or another set-up.
    Missing,
    /// This process may not read it.
    Forbidden,
    /// It is there and makes no sense.
    Garbled,
    /// The kernel keeps it and tells nobody.
    Untold,
    /// Reading failed in another way.
    Failed {
        /// The kernel's error number.
        errno: i32,
    },
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("not there"),
            Self::Forbidden => f.write_str("not readable by this process"),
            Self::Garbled => f.write_str("not understood"),
            Self::Untold => f.write_str("known to the kernel alone"),
            Self::Failed { errno } => {
                write!(f, "not read: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

/// Who else counts against a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedWith {
    /// This process alone.
    Nobody,
    /// Every process and every ring of the same user, in all containers that share the user's
    /// number.
    User,
    /// Every process of the control group.
    Group,
    /// Everybody on this machine.
    Machine,
}

impl fmt::Display for SharedWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nobody => "this process alone",
            Self::User => "all processes and rings of this user",
            Self::Group => "all processes of the control group",
            Self::Machine => "everybody on this machine",
        })
    }
}
