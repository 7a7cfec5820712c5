//! The data: pieces of a real file under a small header, so that every message differs from every
//! other even if the file holds nothing but zeros.

use super::program::Step;
use crate::block::Block;
use crate::output::Failure;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How much of the file is used, in bytes.
const MOST: u64 = 256 << 20;
/// The header: the message's number and its position in the file.
const HEADER: usize = 16;

/// The file's bytes; never empty.
#[derive(Debug)]
pub(crate) struct Data(Vec<u8>);

impl Data {
    /// Reads the first 256 MiB of `path`.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MOST).read_to_end(&mut bytes))
            .map_err(|error| Failure::usage(format_args!("cannot read {path:?}: {error}")))?;
        if bytes.is_empty() {
            return Err(Failure::usage(format_args!("{path:?} is empty: name a file with data")));
        }
        Ok(Self(bytes))
    }

    /// Builds the message of `step` at `offset` of `block`.
    pub(crate) fn fill(&self, step: &Step, block: &mut Block, offset: usize) {
        let mut to = offset;
        for part in self.message(step) {
            block.write(to, &part);
            to += part.len();
        }
    }

    /// Whether `received` is the message of `step`, byte for byte.
    pub(crate) fn matches(&self, step: &Step, received: &[u8]) -> bool {
        let mut rest = received;
        let same = self.message(step).all(|part| match rest.split_at_checked(part.len()) {
            Some((head, tail)) => {
                rest = tail;
                *head == *part
            }
            None => false,
        });
        same && rest.is_empty()
    }

    /// The parts of a message: its header, then the file from the message's position on, from its
    /// start again at its end.
    fn message(&self, step: &Step) -> impl Iterator<Item = Part<'_>> {
        let length = step.length - HEADER;
        let from = self.position(step);
        let mut left = length;
        let body = std::iter::once(&self.0[from..]).chain(std::iter::repeat(&self.0[..]));
        let body = body.map_while(move |bytes: &[u8]| {
            let part = &bytes[..bytes.len().min(left)];
            left -= part.len();
            (!part.is_empty()).then_some(Part::Body(part))
        });
        std::iter::once(Part::header(step)).chain(body)
    }

    fn position(&self, step: &Step) -> usize {
        // The remainder is below a length that is a usize.
        usize::try_from(step.position % self.0.len() as u64).unwrap_or(0)
    }
}

/// A run of bytes of a message.
enum Part<'a> {
    Header([u8; HEADER]),
    Body(&'a [u8]),
}

impl Part<'_> {
    fn header(step: &Step) -> Self {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&step.number.to_le_bytes());
        bytes[8..].copy_from_slice(&step.position.to_le_bytes());
        Self::Header(bytes)
    }
}

impl std::ops::Deref for Part<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Header(bytes) => bytes,
            Self::Body(bytes) => bytes,
        }
    }
}

/// The receiver: takes what arrived from the channel and checks it.
#[derive(Debug)]
pub(crate) struct Receiver {
    arrived: Vec<u8>,
}

impl Receiver {
    /// A receiver of messages of up to `largest` bytes.
    pub(crate) fn new(largest: usize) -> Self {
        Self { arrived: vec![0; largest] }
    }

    /// Takes the message of `step` from the start of `channel`; whether it is right.
    pub(crate) fn check(&mut self, data: &Data, step: &Step, channel: &File) -> io::Result<bool> {
        let arrived = &mut self.arrived[..step.length];
        channel.read_exact_at(arrived, 0)?;
        Ok(data.matches(step, arrived))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Origin;

    const STEP: Step = Step { number: 5, slot: 0, change: None, length: 4096, position: 4099 };

    fn bytes(data: &Data) -> Vec<u8> {
        data.message(&STEP).flat_map(|part| part.to_vec()).collect()
    }

    #[test]
    fn a_message_is_its_header_and_the_file_over_and_over() {
        let data = Data((0..100).collect());
        let message = bytes(&data);
        assert_eq!(message.len(), 4096);
        assert_eq!(message[..8], 5_u64.to_le_bytes());
        assert_eq!(message[16], 99);
        assert_eq!(message[17], 0);
        assert!(data.matches(&STEP, &message));
    }

    #[test]
    fn one_wrong_byte_is_noticed() {
        let data = Data(vec![0; 10]);
        for at in [0, 8, 16, 4095] {
            let mut message = bytes(&data);
            message[at] ^= 1;
            assert!(!data.matches(&STEP, &message), "byte {at}");
        }
        assert!(!data.matches(&STEP, &bytes(&data)[..4095]));
    }

    #[test]
    fn a_message_fits_its_block() {
        let mut block = Block::new(Origin::Heap, 4096).unwrap();
        Data(vec![1; 3000]).fill(&STEP, &mut block, 0);
    }
}
