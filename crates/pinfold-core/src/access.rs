//! What a device may do with a range.

use std::fmt;
use std::ops::BitOr;

/// Rights of a device over a range, as a set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u8);

impl Access {
    /// The device reads the memory: the source of a send or a write to a file.
    pub const READ: Self = Self(1);
    /// The device writes the memory: the target of a receive or a read from a file.
    pub const WRITE: Self = Self(1 << 1);
    /// A peer may read the memory by its remote key.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// A peer may write the memory by its remote key.
    pub const REMOTE_WRITE: Self = Self(1 << 3);
    /// A peer may run atomic operations on the memory by its remote key.
    pub const REMOTE_ATOMIC: Self = Self(1 << 4);
    /// The device reads and writes.
    pub const READ_WRITE: Self = Self(Self::READ.0 | Self::WRITE.0);

    /// Every right there is.
    pub(crate) const ALL: Self = Self(0x1f);

    const REMOTE: u8 = Self::REMOTE_READ.0 | Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0;

    /// Whether every right of `other` is in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether a peer may touch the memory. Such a registration is bounded to the byte and not
    /// cached unless the caller opts in.
    pub const fn is_remote(self) -> bool {
        self.0 & Self::REMOTE != 0
    }

    /// Whether the memory itself must be writable.
    pub const fn writes(self) -> bool {
        self.0 & (Self::WRITE.0 | Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0) != 0
    }

    /// The set as bits, for a compact index entry.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set made of `bits`; unknown bits are dropped.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(Access, &str); 5] = [
            (Access::READ, "read"),
            (Access::WRITE, "write"),
            (Access::REMOTE_READ, "remote-read"),
            (Access::REMOTE_WRITE, "remote-write"),
            (Access::REMOTE_ATOMIC, "remote-atomic"),
        ];
        let mut first = true;
        for (right, name) in NAMES {
            if self.contains(right) {
                f.write_str(if first { "" } else { "+" })?;
                f.write_str(name)?;
                first = false;
            }
        }
        if first { f.write_str("none") } else { Ok(()) }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_contain_their_parts_only() {
        assert!(Access::READ_WRITE.contains(Access::READ));
        assert!(!Access::READ.contains(Access::WRITE));
        assert!((Access::READ | Access::REMOTE_READ).is_remote());
        assert!(Access::REMOTE_ATOMIC.writes() && !Access::REMOTE_READ.writes());
        assert_eq!(format!("{}", Access::READ_WRITE), "read+write");
        assert_eq!(format!("{}", Access::default()), "none");
    }
}
