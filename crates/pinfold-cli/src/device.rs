//! The embedded DMA device: one io_uring whose registered buffers are the device's memory.
//!
//! A send is `WRITE_FIXED` from a registered buffer into a file in memory (the channel), a receive
//! is `READ_FIXED` the other way. The kernel resolves the address through the translation that was
//! pinned at registration, never through the page table of the moment: just as a network card
//! does, and with the same wrong data when the registration no longer matches the program's memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for three calls: the registration by hand, whose caller makes
//! the registrar's promise; the push of a submission entry; and the creation
//! of the channel. An entry names memory by a table index and an address; the kernel refuses every
//! address outside of the registration behind that index, and whoever registered the memory has
//! promised (`Registrar::register`) that the device may use all of it. So a wrong index or address
//! moves wrong data, or none, and breaks no rule of Rust's.

#![allow(unsafe_code)]

use crate::output::Failure;
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use pinfold::AddressRange;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many transfers may be under way at once; longer lists go in several rounds.
const DEPTH: u32 = 64;

/// What empties an entry of the table.
const EMPTY_BUFFER: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// One use of a registered buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transfer {
    /// The buffer's index in the ring's table: the registrar's handle.
    pub(crate) index: u16,
    /// Where the bytes are, inside of the registered range; from a pointer whose provenance the
    /// caller has exposed, so that the compiler keeps the bytes in step.
    pub(crate) address: usize,
    /// How many bytes; at most 1 GiB.
    pub(crate) length: usize,
    /// Where in the channel they go to or come from.
    pub(crate) offset: u64,
}

/// Whether data leaves the program's memory or arrives in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Send,
    Receive,
}

/// A device that sends registered memory into a channel and receives from it. Any thread may use
/// it; transfers of several threads take turns.
pub(crate) struct Device {
    /// Guards the submission and completion queues, which one thread at a time may use.
    ring: Mutex<IoUring>,
    ring_fd: RawFd,
    channel: File,
}

impl Device {
    /// A ring and a channel of `channel_bytes` bytes, all zero.
    pub(crate) fn open(channel_bytes: u64) -> Result<Self, Failure> {
        let channel = memory_file().map_err(|error| no_channel(&error))?;
        channel.set_len(channel_bytes).map_err(|error| no_channel(&error))?;
        Self::with(channel)
    }

    /// Another ring, with the channel of a device that is there.
    pub(crate) fn beside(channel: &File) -> Result<Self, Failure> {
        Self::with(channel.try_clone().map_err(|error| no_channel(&error))?)
    }

    fn with(channel: File) -> Result<Self, Failure> {
        let ring = IoUring::new(DEPTH).map_err(|error| no_ring(&error))?;
        Ok(Self { ring_fd: ring.as_raw_fd(), ring: Mutex::new(ring), channel })
    }

    /// The receiver's end: every byte sent can be read here at its offset.
    pub(crate) fn channel(&self) -> &File {
        &self.channel
    }

    /// Puts `range` into entry `slot` of the ring's table, or empties it: one system call and
    /// nothing else, as a program would that registers by hand.
    ///
    /// # Safety
    ///
    /// As for `Registrar::register`; nobody else uses the entry.
    ///
    /// # Errors
    ///
    /// The kernel's error number.
    pub(crate) unsafe fn set_buffer(
        &self,
        slot: u32,
        range: Option<AddressRange>,
    ) -> io::Result<()> {
        let buffer = range.map_or(EMPTY_BUFFER, |range| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(range.start()),
            iov_len: range.len(),
        });
        // SAFETY: the caller's promise about the memory.
        unsafe { self.lock().submitter().register_buffers_update(slot, &[buffer], None) }
    }

    /// Moves registered memory into the channel and waits until it is there.
    ///
    /// # Errors
    ///
    /// The kernel's error of the first transfer that failed (`EFAULT`: the index holds no
    /// registration, or another range), or `WriteZero` when fewer bytes moved than asked.
    pub(crate) fn send(&self, transfers: &[Transfer]) -> io::Result<()> {
        self.run(Direction::Send, transfers)
    }

    /// Moves bytes of the channel into registered memory and waits until they are there.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub(crate) fn receive(&self, transfers: &[Transfer]) -> io::Result<()> {
        self.run(Direction::Receive, transfers)
    }

    fn run(&self, direction: Direction, transfers: &[Transfer]) -> io::Result<()> {
        let mut ring = self.lock();
        for batch in transfers.chunks(DEPTH as usize) {
            let channel = types::Fd(self.channel.as_raw_fd());
            push(&mut ring, batch.iter().map(|transfer| entry(direction, channel, transfer)))?;
            wait(&mut ring, batch)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, IoUring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRawFd for Device {
    /// The ring's descriptor, for the registrar.
    fn as_raw_fd(&self) -> RawFd {
        self.ring_fd
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring lives as long as `self` and closes its descriptor only when dropped.
        unsafe { BorrowedFd::borrow_raw(self.ring_fd) }
    }
}

fn entry(direction: Direction, channel: types::Fd, transfer: &Transfer) -> Entry {
    let Transfer { index, address, length, offset } = *transfer;
    // Longer than u32 is longer than any registration: the kernel answers EFAULT.
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    match direction {
        Direction::Send => {
            let from = std::ptr::with_exposed_provenance(address);
            opcode::WriteFixed::new(channel, from, length, index).offset(offset).build()
        }
        Direction::Receive => {
            let to = std::ptr::with_exposed_provenance_mut(address);
            opcode::ReadFixed::new(channel, to, length, index).offset(offset).build()
        }
    }
}

fn push(ring: &mut IoUring, entries: impl Iterator<Item = Entry>) -> io::Result<()> {
    let mut queue = ring.submission();
    for (entry, number) in entries.zip(0..) {
        let entry = entry.user_data(number);
        // SAFETY: the channel outlives the transfer because `wait` follows under the same lock;
        // the memory is behind a registration, see the file's header.
        unsafe { queue.push(&entry) }.map_err(io::Error::other)?;
    }
    Ok(())
}

/// Waits for every transfer of `batch`, then tells the first error, so that none is in flight
/// when the caller ends its leases.
fn wait(ring: &mut IoUring, batch: &[Transfer]) -> io::Result<()> {
    let mut outcome = Ok(());
    let mut missing = batch.len();
    while missing > 0 {
        match ring.submit_and_wait(missing) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        for completion in ring.completion() {
            missing -= 1;
            let wanted = usize::try_from(completion.user_data()).ok().and_then(|n| batch.get(n));
            outcome = outcome.and(moved(completion.result(), wanted));
        }
    }
    outcome
}

fn moved(result: i32, transfer: Option<&Transfer>) -> io::Result<()> {
    match usize::try_from(result) {
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
        Ok(bytes) if transfer.is_some_and(|transfer| transfer.length == bytes) => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn memory_file() -> io::Result<File> {
    // SAFETY: the name is a C string; the call touches no other memory.
    let fd = unsafe { libc::memfd_create(c"pinfold-channel".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn no_ring(error: &io::Error) -> Failure {
    let advice = match error.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring, or the container's seccomp hides it",
        Some(libc::EPERM) => {
            "io_uring is forbidden here: see kernel.io_uring_disabled, or the container's seccomp \
             profile"
        }
        Some(libc::ENOMEM) => "raise RLIMIT_MEMLOCK (`ulimit -l`)",
        _ => "run `pinfold probe` to see what this machine offers",
    };
    Failure::unavailable(format_args!("no io_uring ({error}): {advice}"))
}

fn no_channel(error: &io::Error) -> Failure {
    Failure::unavailable(format_args!("no file in memory for the channel (memfd): {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_without_a_registration_moves_nothing() {
        let device = match Device::open(4096) {
            Ok(device) => device,
            Err(failure) => {
                eprintln!("skipped: {failure}");
                return;
            }
        };
        let bytes = [7_u8; 64];
        let transfer =
            Transfer { index: 0, address: bytes.as_ptr().addr(), length: bytes.len(), offset: 0 };
        let error = device.send(&[transfer]).expect_err("nothing is registered");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
