//! A number with where it came from and what else uses it up.

pub use crate::machine::Unread;
use std::fmt;

/// A number that was read, or why it was not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Figure<T> {
    /// The number.
    pub value: Result<T, Unread>,
    /// The file, and the line in it.
    pub source: String,
    /// What else counts against it.
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

/// What else counts against a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedWith {
    /// This process alone.
    Process,
    /// Every process and every ring of the same user, in all containers that share the user's
    /// number.
    User,
    /// Every process of the control group.
    Group,
    /// All processes on this machine.
    Machine,
}

impl fmt::Display for SharedWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Process => "this process alone",
            Self::User => "all processes and rings of this user",
            Self::Group => "all processes of the control group",
            Self::Machine => "all processes on this machine",
        })
    }
}
