//! A steady stream through io_uring, over a region that is suspended meanwhile: every byte is looked
//! at, and the longest pause is noted.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to lease memory and to submit requests for it. The region
//! outlives the stream, and each request is waited for before its lease ends.

#![allow(unsafe_code)]

use crate::ring::RingCache;
use io_uring::{IoUring, opcode, squeue, types};
use pinfold::{Access, AddressRange};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a transfer.
pub(crate) const MESSAGE: usize = 64 << 10;

/// What is happening to the region, as the stream's thread sees it.
#[derive(Default)]
pub(crate) struct Signals {
    /// How often a re-arrangement of the region has begun or ended: odd while it is under way.
    pub(crate) turns: AtomicU32,
    pub(crate) stop: AtomicBool,
}

/// What became of a stream.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Outcome {
    /// Transfers that moved what they should.
    pub(crate) transfers: u64,
    /// Transfers that failed.
    pub(crate) failed: u64,
    /// Messages with a wrong byte.
    pub(crate) wrong: u64,
    /// The longest time from one transfer's end to the next one's, while nothing happened.
    pub(crate) calm: Duration,
    /// The same for pairs between whose ends the region was being re-arranged.
    pub(crate) pause: Duration,
}

/// When the last transfer ended, and how many [turns](Signals::turns) there had been then.
pub(crate) type Last = Option<(Instant, u32)>;

/// Sends what a piece of the region holds, then receives something new into it; piece after piece,
/// round and round.
pub(crate) struct Stream<'a> {
    pub(crate) ring: IoUring,
    pub(crate) cache: &'a RingCache,
    pub(crate) range: AddressRange,
    /// Both ways, one message at a time: what goes into a pipe with room, or comes out of one that holds
    /// it, is moved by the call that asks for it, and not by some thread of the kernel's, whose turns
    /// would be counted as pauses.
    pub(crate) channel: (PipeReader, PipeWriter),
    /// What the region should hold.
    pub(crate) expected: Vec<u8>,
    pub(crate) signals: &'a Signals,
    pub(crate) outcome: Outcome,
    pub(crate) last: Last,
}

impl Stream<'_> {
    /// Goes on until it is asked to stop, or a transfer has failed: then what the channel holds is unknown.
    pub(crate) fn run(&mut self) {
        let mut buffer = vec![0; MESSAGE];
        for offset in (0..self.range.len()).step_by(MESSAGE).cycle() {
            // Relaxed: a flag that publishes nothing; a transfer more or less is all the same.
            if self.signals.stop.load(Ordering::Relaxed) || self.outcome.failed > 0 {
                return;
            }
            self.visit(offset, &mut buffer);
        }
    }

    /// A transfer has ended.
    fn note_gap(&mut self) {
        // Relaxed: as above.
        let (now, turns) = (Instant::now(), self.signals.turns.load(Ordering::Relaxed));
        if let Some((last, before)) = self.last.replace((now, turns)) {
            let outcome = &mut self.outcome;
            // Also if it began and ended in between.
            let is_pause = turns != before || !turns.is_multiple_of(2);
            let kind = if is_pause { &mut outcome.pause } else { &mut outcome.calm };
            *kind = (now - last).max(*kind);
        }
    }

    fn visit(&mut self, offset: usize, buffer: &mut [u8]) {
        if self.exchange(offset, buffer).is_err() {
            self.outcome.failed += 1;
        }
    }

    fn exchange(&mut self, offset: usize, buffer: &mut [u8]) -> io::Result<()> {
        let (cache, address) = (self.cache, self.range.start() + offset);
        let at = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: see the file's header.
        let lease = unsafe { cache.get(at, MESSAGE, Access::READ_WRITE) };
        let lease = lease.map_err(io::Error::other)?;
        let index = lease.handle().get();
        let (out, into) = &self.channel;
        let (out, into) = (types::Fd(out.as_raw_fd()), types::Fd(into.as_raw_fd()));
        let length = 64 << 10;
        self.transfer(&opcode::WriteFixed::new(into, at, length, index).build())?;
        self.channel.0.read_exact(buffer)?;
        let message = &mut self.expected[offset..offset + MESSAGE];
        if *message != *buffer {
            self.outcome.wrong += 1;
        }
        // Another message for each visit, no byte of which is as before.
        message.iter_mut().for_each(|byte| *byte = byte.wrapping_add(0x3d));
        self.channel.1.write_all(message)?;
        self.transfer(&opcode::ReadFixed::new(out, at, length, index).build())
    }

    fn transfer(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: see the file's header.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)?;
        while self.ring.completion().is_empty() {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        self.note_gap();
        let result = self.ring.completion().next().map(|it| it.result()).unwrap_or_default();
        match usize::try_from(result) {
            Ok(MESSAGE) => {
                self.outcome.transfers += 1;
                Ok(())
            }
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        }
    }
}
