//! A channel that keeps nothing: a ring that writes to a pipe, which is emptied behind it.
//!
//! A write to a file in memory goes through a worker of the kernel's, which takes ten times as long as a short
//! transfer itself; a write to a pipe with room is done when the call returns. The bytes really move: each
//! page is copied out of the registered one into a page of the pipe's.

use super::{Conveyor, Direction, Ring, Table, Transfer, no_channel};
use crate::output::Failure;
use rustix::pipe::{SpliceFlags, fcntl_setpipe_size, splice};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;

/// What the pipe holds, in bytes: what any process may ask for (`fs.pipe-max-size`). Longer transfers go in
/// parts, as they do on any wire.
const ROOM: usize = 1 << 20;

pub(crate) struct Pipe {
    /// Writes into the pipe.
    ring: Ring,
    end: File,
    nowhere: File,
}

impl Pipe {
    pub(super) fn new() -> Result<Self, Failure> {
        let (end, channel) = io::pipe().map_err(|error| no_channel(&error))?;
        let nowhere = OpenOptions::new().write(true).open("/dev/null");
        let pipe = Self {
            ring: Ring::with(File::from(OwnedFd::from(channel)))?,
            end: File::from(OwnedFd::from(end)),
            nowhere: nowhere.map_err(|error| no_channel(&error))?,
        };
        fcntl_setpipe_size(&pipe.end, ROOM).map_err(|error| no_channel(&error.into()))?;
        Ok(pipe)
    }

    /// Takes `bytes` bytes out: pages change hands, nothing is copied.
    fn empty(&self, mut bytes: usize) -> io::Result<()> {
        while bytes > 0 {
            let gone = splice(&self.end, None, &self.nowhere, None, bytes, SpliceFlags::empty())?;
            match gone {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                gone => bytes -= gone.min(bytes),
            }
        }
        Ok(())
    }
}

impl Conveyor for Pipe {
    fn channel(&self) -> &File {
        &self.end
    }

    fn table(&self) -> &dyn Table {
        &self.ring
    }

    fn run(&self, direction: Direction, transfers: &[Transfer]) -> io::Result<()> {
        if direction == Direction::Receive {
            return Err(io::ErrorKind::Unsupported.into());
        }
        for transfer in transfers.iter().flat_map(parts) {
            self.ring.run(direction, &[transfer])?;
            self.empty(transfer.length)?;
        }
        Ok(())
    }
}

/// As much as the pipe has room for at a time.
fn parts(whole: &Transfer) -> impl Iterator<Item = Transfer> + use<> {
    let Transfer { key, address, length, .. } = *whole;
    (0..length).step_by(ROOM).map(move |begin| Transfer {
        key,
        address: address + begin,
        length: ROOM.min(length - begin),
        offset: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_registered;
    use super::super::{AnyRegistrar, Key};
    use super::*;
    use rustix::io::ioctl_fionread;

    #[test]
    fn parts_are_the_whole() {
        let whole = Transfer { key: Key(3), address: 4096, length: 2 * ROOM + 5, offset: 9 };
        let parts: Vec<_> = parts(&whole).map(|part| (part.address, part.length)).collect();
        assert_eq!(parts, [(4096, ROOM), (4096 + ROOM, ROOM), (4096 + 2 * ROOM, 5)]);
    }

    #[test]
    fn long_transfers_go_through_and_nothing_stays() {
        let pipe = match Pipe::new() {
            Ok(pipe) => pipe,
            Err(failure) => {
                eprintln!("skipped: {failure}");
                return;
            }
        };
        let Ok(AnyRegistrar::IoUring(_)) = pipe.table().registrar(4) else {
            eprintln!("skipped: no registered buffers here");
            return;
        };
        let bytes = vec![7_u8; 3 * ROOM];
        let mut whole = Transfer { key: Key(0), address: 0, length: bytes.len(), offset: 0 };
        with_registered(&pipe, bytes, |key, address| {
            whole = Transfer { key, address, ..whole };
            pipe.run(Direction::Send, &[whole]).expect("a transfer");
            assert_eq!(ioctl_fionread(&pipe.end), Ok(0));
        });
        let gone = pipe.run(Direction::Send, &[whole]).expect_err("nothing is registered");
        assert_eq!(gone.raw_os_error(), Some(libc::EFAULT));
    }
}
