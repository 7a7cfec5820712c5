//! From which length an exchange of pages beats a copy.

use super::method::Method;
use std::fmt;
use std::time::Duration;

/// From which length on pages are exchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Crossover {
    pub(super) exchange_from: Option<usize>,
}

/// What one length costs, with the registration that an exchange makes necessary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measured {
    /// The message's length in bytes.
    pub bytes: usize,
    /// Landing by copying.
    pub copy: Duration,
    /// Landing by an exchange, the critical path alone: registering anew comes later.
    pub exchange: Duration,
    /// Registering the exchanged pages.
    pub exchange_refill: Duration,
    /// Landing by giving the pages away.
    pub replace: Duration,
    /// Making and registering new ones.
    pub replace_refill: Duration,
}

impl Measured {
    /// Whether an exchange beats a copy, everything counted.
    pub fn exchange_wins(&self) -> bool {
        self.exchange + self.exchange_refill < self.copy
    }
}

impl Crossover {
    /// Everything is copied.
    pub const COPY_ALL: Self = Self { exchange_from: None };

    /// From `bytes` on pages are exchanged.
    pub const fn exchange_from(bytes: usize) -> Self {
        Self { exchange_from: Some(bytes) }
    }

    /// How a message of `bytes` bytes should land.
    pub const fn choose(&self, bytes: usize) -> Method {
        match self.exchange_from {
            Some(from) if bytes >= from => Method::Exchange,
            _ => Method::Copy,
        }
    }

    /// The length from which an exchange wins, if it ever does.
    pub const fn bytes(&self) -> Option<usize> {
        self.exchange_from
    }

    /// The crossover that follows from `measured`, which is in order of length: the shortest length
    /// from which on an exchange wins at every one.
    pub fn of(measured: &[Measured]) -> Self {
        let winning = measured.iter().rev().take_while(|each| each.exchange_wins());
        Self { exchange_from: winning.last().map(|each| each.bytes) }
    }
}

impl fmt::Display for Crossover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exchange_from {
            Some(bytes) => write!(
                f,
                "data that arrives is copied up to {bytes} bytes; from there its pages change \
                 places with the target's, which is faster here even with registering them anew"
            ),
            None => f.write_str("data that arrives is copied, whatever its length"),
        }
    }
}
