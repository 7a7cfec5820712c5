//! The embedded device with a wire that ends where it begins: a ring that writes to one pipe and
//! reads from another, and a program at the other ends of both.
//!
//! A write to a file in memory goes through a worker of the kernel's, which takes ten times as long as
//! a short transfer itself; a pipe with room takes it within the call. The bytes go the way that they
//! go with a file: copied out of, or into, the registered pages.

use super::{Conveyor, Direction, Ring, Table, Transfer, no_channel};
use crate::output::Failure;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// What a pipe is asked to hold, in bytes: what every user may ask for (`fs.pipe-max-size`). Longer
/// transfers go in parts, as they do on any wire.
const WANTED_ROOM: usize = 1 << 20;

pub(crate) struct Loopback {
    ring: Ring,
    /// Guards the pipes, which one transfer at a time may fill and empty.
    ends: Mutex<Ends>,
    room: usize,
    /// For those that want a channel's bytes; nothing goes through it.
    channel: File,
}

struct Ends {
    sent: PipeReader,
    to_receive: PipeWriter,
    /// The ring's end of the same pipe, to empty it after a transfer that failed.
    left: PipeReader,
}

impl Loopback {
    pub(super) fn new() -> Result<Self, Failure> {
        Self::open().map_err(|error| no_channel(&error))?
    }

    fn open() -> io::Result<Result<Self, Failure>> {
        let (sent, out) = io::pipe()?;
        let (back, to_receive) = io::pipe()?;
        let room = widen(&out)?.min(widen(&to_receive)?);
        for end in [sent.as_fd(), out.as_fd(), back.as_fd(), to_receive.as_fd()] {
            // A ring hands what may have to wait to a worker; and a pipe that should hold bytes and does not is
            // an error, not something to wait for.
            fcntl_setfl(end, OFlags::NONBLOCK)?;
        }
        let left = back.try_clone()?;
        let channel = super::memory_file()?;
        let (out, back) = (File::from(OwnedFd::from(out)), File::from(OwnedFd::from(back)));
        let ends = Mutex::new(Ends { sent, to_receive, left });
        Ok(Ring::between(out, back).map(|ring| Self { ring, ends, room, channel }))
    }

    /// One part at a time: `step` carries it, with where it lies in the whole.
    fn in_parts(
        &self,
        whole: &Transfer,
        mut step: impl FnMut(&mut Ends, Transfer, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        for begin in (0..whole.length).step_by(self.room) {
            let length = self.room.min(whole.length - begin);
            let part = Transfer { address: whole.address + begin, length, offset: 0, ..*whole };
            if let Err(error) = step(&mut ends, part, begin) {
                ends.empty();
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Ends {
    /// What a failed transfer left in the pipes is no other transfer's.
    fn empty(&mut self) {
        let mut bytes = [0; 4096];
        while matches!(self.sent.read(&mut bytes), Ok(1..)) {}
        while matches!(self.left.read(&mut bytes), Ok(1..)) {}
    }
}

impl Conveyor for Loopback {
    fn channel(&self) -> &File {
        &self.channel
    }

    fn table(&self) -> &dyn Table {
        &self.ring
    }

    /// There is nothing that could keep the bytes: [`deliver`](Conveyor::deliver) and
    /// [`accept`](Conveyor::accept) carry them to their end.
    fn run(&self, _: Direction, _: &[Transfer]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn deliver(&self, transfer: &Transfer, into: &mut [u8]) -> io::Result<()> {
        self.in_parts(transfer, |ends, part, begin| {
            self.ring.run(Direction::Send, &[part])?;
            ends.sent.read_exact(&mut into[begin..begin + part.length])
        })
    }

    fn accept(&self, transfer: &Transfer, from: &[u8]) -> io::Result<()> {
        self.in_parts(transfer, |ends, part, begin| {
            ends.to_receive.write_all(&from[begin..begin + part.length])?;
            self.ring.run(Direction::Receive, &[part])
        })
    }
}

/// How many bytes the pipe holds, after it was asked to hold more: users that have many pipes are
/// refused.
fn widen(end: &PipeWriter) -> io::Result<usize> {
    let _refused = fcntl_setpipe_size(end, WANTED_ROOM);
    Ok(fcntl_getpipe_size(end)?)
}

#[cfg(test)]
mod tests {
    use super::super::AnyRegistrar;
    use super::super::tests::with_registered;
    use super::*;

    #[test]
    fn long_transfers_go_both_ways_and_a_failed_one_leaves_nothing() {
        let device = match Loopback::new() {
            Ok(device) => device,
            Err(failure) => return eprintln!("skipped: {failure}"),
        };
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
        let Ok(AnyRegistrar::IoUring(_)) = device.table().registrar(4) else {
            return eprintln!("skipped: no registered buffers here");
        };
        with_registered(&device, bytes.clone(), |key, address| {
            let whole = Transfer { key, address, length: bytes.len(), offset: 7 };
            let mut got = vec![0; bytes.len()];
            device.deliver(&whole, &mut got).unwrap();
            assert!(got == bytes);
            let elsewhere = Transfer { address: address + (1 << 40), ..whole };
            let error = device.accept(&elsewhere, &got).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
            let turned: Vec<u8> = bytes.iter().rev().copied().collect();
            device.accept(&whole, &turned).unwrap();
            device.deliver(&whole, &mut got).unwrap();
            assert!(got == turned);
        });
    }
}
