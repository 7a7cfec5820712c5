//! A channel that keeps nothing: a ring that writes to a pipe, which is emptied behind it.
//!
//! A write to a file in memory goes through a worker of the kernel's, which takes ten times as long as a short
//! transfer itself; a write to a pipe with room is done when the call returns. The bytes really move: each
//! page is copied out of the registered one into a page of the pipe's.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for two calls on descriptors, and to hand on the promise of one who
//! registers explicitly.

#![allow(unsafe_code)]

use super::{AnyRegistrar, Conveyor, Direction, Key, Ring, Transfer, no_channel};
use crate::output::Failure;
use pinfold::AddressRange;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

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
        pipe.widen().map_err(|error| no_channel(&error))?;
        Ok(pipe)
    }

    fn widen(&self) -> io::Result<()> {
        // SAFETY: a request to the pipe, without memory.
        let room = unsafe { libc::fcntl(self.end.as_raw_fd(), libc::F_SETPIPE_SZ, ROOM) };
        if room < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Takes `bytes` bytes out: pages change hands, nothing is copied.
    fn empty(&self, mut bytes: usize) -> io::Result<()> {
        while bytes > 0 {
            let (from, to) = (self.end.as_raw_fd(), self.nowhere.as_raw_fd());
            // SAFETY: two descriptors of this value's own, and no memory.
            let gone =
                unsafe { libc::splice(from, ptr::null_mut(), to, ptr::null_mut(), bytes, 0) };
            match usize::try_from(gone) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(gone) => bytes -= gone.min(bytes),
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

impl Conveyor for Pipe {
    fn channel(&self) -> &File {
        &self.end
    }

    fn registrar(&self, slots: u32) -> Result<AnyRegistrar, Failure> {
        self.ring.registrar(slots)
    }

    unsafe fn set_buffer(&self, slot: u32, range: Option<AddressRange>) -> io::Result<Key> {
        // SAFETY: the caller's promise.
        unsafe { self.ring.set_buffer(slot, range) }
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
    use super::*;

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
        let (Ok(AnyRegistrar::IoUring(_)), bytes) = (pipe.registrar(4), vec![7_u8; 3 * ROOM])
        else {
            eprintln!("skipped: no registered buffers here");
            return;
        };
        let address = bytes.as_ptr().expose_provenance();
        let range = AddressRange::new(address, bytes.len()).expect("a range");
        // SAFETY: `bytes` lives until the registration has ended.
        let key = unsafe { pipe.set_buffer(0, Some(range)) }.expect("a registration");
        let whole = Transfer { key, address, length: bytes.len(), offset: 0 };
        pipe.run(Direction::Send, &[whole]).expect("a transfer");
        // SAFETY: a request to the pipe that fills one number.
        let left = unsafe {
            let mut left: libc::c_int = -1;
            libc::ioctl(pipe.end.as_raw_fd(), libc::FIONREAD, &raw mut left);
            left
        };
        assert_eq!(left, 0);
        // SAFETY: no transfer is under way.
        unsafe { pipe.set_buffer(0, None) }.expect("the end of the registration");
        let gone = pipe.run(Direction::Send, &[whole]).expect_err("nothing is registered");
        assert_eq!(gone.raw_os_error(), Some(libc::EFAULT));
    }
}
