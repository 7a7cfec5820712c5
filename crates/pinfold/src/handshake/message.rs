//! The messages, byte by byte: everything little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 4 | `PFHS` |
//! | 1 | version, 1 |
//! | 1 | kind |
//! | 2 | how many keys follow; 0 but in `resumed` |
//! | 8 | the suspension's number |
//! | 24 | `request` alone: start and length of the range in bytes, time allowed in nanoseconds |
//! | 24 each | `resumed` alone: start and length in bytes, old and new remote key |
//! | 4 | checksum of all before (FNV-1a, 32 bits) |

use pinfold_core::AddressRange;
use std::time::Duration;

/// The most keys that one message tells.
pub const MAX_KEYS: usize = 1024;

const MAGIC: [u8; 4] = *b"PFHS";
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 16;
const ITEM_BYTES: usize = 24;
const CHECKSUM_BYTES: usize = 4;

/// A remote key that a renewed registration has instead of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyChange {
    /// What the registration covers, in the owner's addresses.
    pub range: AddressRange,
    /// What the peer knew it by; over, even if `new` is the same number.
    pub old: u32,
    /// What it is known by from now on.
    pub new: u32,
}

/// What one side says to the other about suspension `number`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Message {
    Request { number: u64, range: AddressRange, allowed: Duration },
    Agreed { number: u64 },
    Declined { number: u64 },
    Resumed { number: u64, keys: Vec<KeyChange> },
}

impl Message {
    pub(super) const fn number(&self) -> u64 {
        match *self {
            Self::Request { number, .. }
            | Self::Agreed { number }
            | Self::Declined { number }
            | Self::Resumed { number, .. } => number,
        }
    }

    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Request { .. } => "request",
            Self::Agreed { .. } => "agreed",
            Self::Declined { .. } => "declined",
            Self::Resumed { .. } => "resumed",
        }
    }

    /// At most [`MAX_KEYS`] keys, which the entry points see to.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, keys): (u8, &[KeyChange]) = match self {
            Self::Request { .. } => (0, &[]),
            Self::Agreed { .. } => (1, &[]),
            Self::Declined { .. } => (2, &[]),
            Self::Resumed { keys, .. } => (3, keys),
        };
        let mut bytes = MAGIC.to_vec();
        bytes.extend([VERSION, kind]);
        bytes.extend(u16::try_from(keys.len()).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend(self.number().to_le_bytes());
        if let Self::Request { range, allowed, .. } = self {
            put_range(&mut bytes, *range);
            bytes.extend(u64::try_from(allowed.as_nanos()).unwrap_or(u64::MAX).to_le_bytes());
        }
        for key in keys {
            put_range(&mut bytes, key.range);
            bytes.extend(key.old.to_le_bytes());
            bytes.extend(key.new.to_le_bytes());
        }
        let sum = checksum(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    /// Reads exactly one message; believes no length before it has compared it.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let garbled = HandshakeError::Garbled { length: bytes.len() };
        let (said, sum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(garbled)?;
        let (head, items) = said.split_first_chunk::<HEAD_BYTES>().ok_or(garbled)?;
        if head[..4] != MAGIC || checksum(said) != u32::from_le_bytes(*sum) {
            return Err(garbled);
        }
        if head[4] != VERSION {
            return Err(HandshakeError::Version { theirs: head[4] });
        }
        let (number, count) = (word(head, 8), usize::from(u16::from_le_bytes([head[6], head[7]])));
        match (head[5], count, items.len()) {
            (0, 0, ITEM_BYTES) => {
                let range = range_at(items).ok_or(garbled)?;
                Ok(Self::Request { number, range, allowed: Duration::from_nanos(word(items, 16)) })
            }
            (1, 0, 0) => Ok(Self::Agreed { number }),
            (2, 0, 0) => Ok(Self::Declined { number }),
            (3, 0..=MAX_KEYS, length) if length == count * ITEM_BYTES => {
                let keys = items.chunks_exact(ITEM_BYTES).map(key_of).collect::<Option<_>>();
                Ok(Self::Resumed { number, keys: keys.ok_or(garbled)? })
            }
            _ => Err(garbled),
        }
    }
}

fn put_range(bytes: &mut Vec<u8>, range: AddressRange) {
    bytes.extend((range.start() as u64).to_le_bytes());
    bytes.extend((range.len() as u64).to_le_bytes());
}

/// Eight bytes from `at`; zeros where there are none, which no caller asks for.
fn word(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..).and_then(|rest| rest.first_chunk());
    u64::from_le_bytes(eight.copied().unwrap_or_default())
}

/// `None` if no range of this machine's addresses is like that.
fn range_at(item: &[u8]) -> Option<AddressRange> {
    let start = usize::try_from(word(item, 0)).ok()?;
    AddressRange::new(start, usize::try_from(word(item, 8)).ok()?).ok()
}

fn key_of(item: &[u8]) -> Option<KeyChange> {
    let keys = word(item, 16).to_le_bytes();
    let [a, b, c, d, e, f, g, h] = keys;
    let (old, new) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    Some(KeyChange { range: range_at(item)?, old, new })
}

/// FNV-1a: for accidents.
fn checksum(bytes: &[u8]) -> u32 {
    const OFFSET: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    bytes.iter().fold(OFFSET, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(PRIME))
}

/// Why a message was not taken. The state stays what it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// It is no message of this protocol, or was damaged on its way.
    #[error(
        "{length} bytes are no whole message of this protocol: carry each message whole, and \
         nothing else"
    )]
    Garbled {
        /// Its length in bytes.
        length: usize,
    },
    /// It is of another version.
    #[error("the peer speaks version {theirs}, this side {VERSION}: use the same")]
    Version {
        /// Which.
        theirs: u8,
    },
    /// No side may say this now.
    #[error("'{kind}' was not to be said now: end the connection if it goes on")]
    OutOfTurn {
        /// What was said.
        kind: &'static str,
    },
    /// It is about another suspension than the one under way.
    #[error("the message is about suspension {theirs}, and {ours} is under way")]
    ForeignSuspension {
        /// Its number.
        theirs: u64,
        /// Of the one under way.
        ours: u64,
    },
    /// A request has a number that was used before: it is a repetition.
    #[error("suspension {number} was asked for before: carry each message once")]
    Repeated {
        /// Its number.
        number: u64,
    },
}

/// More keys than a message holds ([`MAX_KEYS`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{count} keys are more than {MAX_KEYS}: suspend fewer regions at once")]
pub struct TooManyKeys {
    /// How many.
    pub count: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize) -> AddressRange {
        AddressRange::new(start, 4096).unwrap()
    }

    fn some() -> [Message; 5] {
        let key = |n: u32| KeyChange { range: range(4096), old: n, new: n + 1 };
        [
            Message::Request { number: 7, range: range(8192), allowed: Duration::from_millis(3) },
            Message::Agreed { number: u64::MAX },
            Message::Declined { number: 0 },
            Message::Resumed { number: 1, keys: Vec::new() },
            Message::Resumed { number: 2, keys: (0..3).map(key).collect() },
        ]
    }

    #[test]
    fn what_is_said_is_heard() {
        for message in some() {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn every_part_and_every_flipped_bit_is_an_error() {
        for bytes in some().map(|message| message.encode()) {
            for length in 0..bytes.len() {
                assert!(Message::decode(&bytes[..length]).is_err());
            }
            for bit in (0..bytes.len() * 8).step_by(if cfg!(miri) { 31 } else { 1 }) {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(Message::decode(&flipped).is_err(), "bit {bit}");
            }
            let twice = [bytes.as_slice(), bytes.as_slice()].concat();
            assert!(Message::decode(&twice).is_err());
        }
    }

    /// What accident does not produce: a right checksum over nonsense.
    fn sealed(mut said: Vec<u8>) -> Result<Message, HandshakeError> {
        let sum = checksum(&said);
        said.extend(sum.to_le_bytes());
        Message::decode(&said)
    }

    fn unsealed(message: &Message) -> Vec<u8> {
        let mut bytes = message.encode();
        bytes.truncate(bytes.len() - CHECKSUM_BYTES);
        bytes
    }

    #[test]
    fn malice_finds_nothing_either() {
        let [request, agreed, .., resumed] = some();
        let changed = |message: &Message, at: usize, byte| {
            let mut said = unsealed(message);
            said[at] = byte;
            sealed(said)
        };
        assert_eq!(changed(&agreed, 4, 9), Err(HandshakeError::Version { theirs: 9 }));
        for kind in 4..=u8::MAX {
            assert!(matches!(changed(&agreed, 5, kind), Err(HandshakeError::Garbled { .. })));
        }
        for count in [0, 2, 4, u8::MAX] {
            assert!(changed(&resumed, 6, count).is_err(), "other keys than there are");
        }
        assert!(changed(&resumed, 7, u8::MAX).is_err());
        // A range that wraps round, and an empty one.
        let mut wraps = unsealed(&request);
        wraps[16..32].fill(0xff);
        assert!(sealed(wraps).is_err());
        let mut empty = unsealed(&request);
        empty[24..32].fill(0);
        assert!(sealed(empty).is_err());
    }
}
