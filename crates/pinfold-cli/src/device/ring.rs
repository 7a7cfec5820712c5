//! The embedded device: one io_uring whose registered buffers are the device's memory.
//!
//! A send is `WRITE_FIXED` from a registered buffer into a file in memory (the channel), a receive
//! is `READ_FIXED` the other way. The kernel resolves the address through the translation that was
//! pinned at registration, never through the page table of the moment: just as a network card
//! does, and with the same wrong data when the registration no longer matches the program's memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for three calls: the explicit registration, whose caller makes the
//! registrar's promise, a registrar over a ring of the command's own, and the push of a submission entry. An entry names memory by a table index and an address; the kernel refuses every
//! address outside of the registration behind that index, and the caller that registered the memory has
//! promised (`Registrar::register`) that the device may use all of it. So a wrong index or address
//! moves wrong data, or none, and breaks no rule of Rust's.

#![allow(unsafe_code)]

use super::{AnyRegistrar, Conveyor, Direction, Key, Table, Transfer};
use crate::output::Failure;
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use pinfold::AddressRange;
use pinfold::registrar::IoUringError;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many transfers may be under way at once; longer lists go in several rounds.
const DEPTH: u32 = 64;

/// What empties an entry of the table.
const EMPTY_BUFFER: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// A ring with its channel. Any thread may use it; transfers of several threads take turns.
pub(crate) struct Ring {
    /// Guards the submission and completion queues, which one thread at a time may use.
    ring: Mutex<IoUring>,
    ring_fd: RawFd,
    channel: File,
    /// Where receives come from, if not from the channel.
    back: Option<File>,
}

impl Ring {
    /// A ring for a channel that is there.
    pub(super) fn with(channel: File) -> Result<Self, Failure> {
        let ring = IoUring::new(DEPTH).map_err(|error| no_ring(&error))?;
        Ok(Self { ring_fd: ring.as_raw_fd(), ring: Mutex::new(ring), channel, back: None })
    }

    /// A ring that sends to one file and receives from another.
    pub(super) fn between(out: File, back: File) -> Result<Self, Failure> {
        Ok(Self { back: Some(back), ..Self::with(out)? })
    }

    fn lock(&self) -> MutexGuard<'_, IoUring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A registrar of a ring of the command's own.
fn registrar_of(
    ring: &impl AsRawFd,
    slots: u32,
) -> Result<pinfold::registrar::IoUring, IoUringError> {
    // SAFETY: the command leaves the tables of its rings to their registrars.
    unsafe { pinfold::registrar::IoUring::new(ring, slots) }
}

impl Table for Ring {
    fn registrar(&self, slots: u32) -> Result<AnyRegistrar, Failure> {
        registrar_of(self, slots).map(AnyRegistrar::IoUring).map_err(Failure::unavailable)
    }

    /// One system call and nothing else.
    unsafe fn set_buffer(&self, slot: u32, range: Option<AddressRange>) -> io::Result<Key> {
        let buffer = range.map_or(EMPTY_BUFFER, |range| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(range.start()),
            iov_len: range.len(),
        });
        // SAFETY: the caller's promise about the memory.
        unsafe { self.lock().submitter().register_buffers_update(slot, &[buffer], None) }?;
        Ok(Key(slot))
    }
}

impl Conveyor for Ring {
    fn channel(&self) -> &File {
        &self.channel
    }

    fn table(&self) -> &dyn Table {
        self
    }

    /// The kernel's error of the first transfer that failed (`EFAULT`: the index holds no
    /// registration, or another range), or `WriteZero` when fewer bytes moved than asked.
    fn run(&self, direction: Direction, transfers: &[Transfer]) -> io::Result<()> {
        let mut ring = self.lock();
        for batch in transfers.chunks(DEPTH as usize) {
            let back = self.back.as_ref().filter(|_| direction == Direction::Receive);
            let channel = types::Fd(back.unwrap_or(&self.channel).as_raw_fd());
            push(&mut ring, batch.iter().map(|transfer| entry(direction, channel, transfer)))?;
            wait(&mut ring, batch)?;
        }
        Ok(())
    }
}

impl AsRawFd for Ring {
    /// The ring's descriptor, for the registrar.
    fn as_raw_fd(&self) -> RawFd {
        self.ring_fd
    }
}

fn entry(direction: Direction, channel: types::Fd, transfer: &Transfer) -> Entry {
    let Transfer { key: Key(index), address, length, offset } = *transfer;
    // A key of a ring is an index into its table, which is shorter.
    let index = u16::try_from(index).unwrap_or(u16::MAX);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::memory_file;

    #[test]
    fn an_index_without_a_registration_moves_nothing() {
        let device = match Ring::with(memory_file().expect("a file in memory")) {
            Ok(device) => device,
            Err(failure) => {
                eprintln!("skipped: {failure}");
                return;
            }
        };
        let bytes = [7_u8; 64];
        let transfer = Transfer {
            key: Key(0),
            address: bytes.as_ptr().addr(),
            length: bytes.len(),
            offset: 0,
        };
        let error = device.run(Direction::Send, &[transfer]).expect_err("nothing is registered");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
