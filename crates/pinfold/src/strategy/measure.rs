//! What each way costs here, found out by going it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to have memory of its own transferred.

#![allow(unsafe_code)]

use super::Strategy;
use super::costs::{Costs, Way};
use super::curve::{Curve, LENGTHS};
use super::planner::TransferPlanner;
use crate::pieces::{Completion, Mover, Reason, Request, TransferError};
use crate::pool::Pool;
use crate::{AddressRange, Cache, GetError, Monitor, Registrar};
use pinfold_kernel::{Errno, mapping::OwnedMapping, process::page_bytes};
use std::convert::Infallible;
use std::time::Instant;

/// Why nothing was measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError<E> {
    /// No memory to measure with.
    #[error("no memory to measure with: {}", std::io::Error::from_raw_os_error(*.errno))]
    Memory {
        /// The kernel's error number.
        errno: i32,
    },
    /// A transfer failed.
    #[error("{0}")]
    Transfer(TransferError<E>),
}

/// Moves nothing: what is measured then is what comes on top of a transfer. Pieces, whose point is to hide
/// that behind one, do not look good.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Unmoved {
    under_way: Vec<usize>,
}

// SAFETY: no device touches anything for its sake, so whatever it reports has ended.
unsafe impl<H> Mover<H> for Unmoved {
    type Error = Infallible;

    unsafe fn begin(&mut self, request: Request<H>) -> Result<(), Infallible> {
        self.under_way.push(request.number);
        Ok(())
    }

    fn complete(&mut self) -> Result<Completion<Infallible>, Infallible> {
        // Never called without a request under way.
        let number = self.under_way.pop().unwrap_or_default();
        Ok(Completion { number, outcome: Ok(()) })
    }
}

/// The ways that are timed, in the order of [`Costs`]'s fields.
const WAYS: [Strategy; 4] = [Strategy::Cached, Strategy::Copy, Strategy::PerUse, Strategy::Pieces];

/// How often each length is gone through; what counts is the fastest round, because what others do on the
/// machine only adds.
const ROUNDS: usize = 7;

/// The same for lengths of which a round has one message.
const LONG_ROUNDS: usize = 4;

/// How much one turn moves, unless a single transfer is longer.
const TURN: usize = 4 << 20;

/// Times each way of sending memory with `mover`, at 256 bytes and at four times as much over and over up to
/// `longest` bytes, as far as the limits on pinned memory allow: the first use of memory whose pages are
/// there, and further uses. Costs about a second for 64 MiB.
///
/// `cache` and `pool` should be as those that will be used, and are best not used meanwhile: what
/// is idle in the cache is given up over and over.
///
/// # Errors
///
/// [`MeasureError`].
///
/// # Safety
///
/// The pool is one for the cache's device, as for [`TransferPlanner::with_pool`].
pub unsafe fn measure<R: Registrar, M: Monitor, V: Mover<R::Handle>>(
    cache: &Cache<R, M>,
    pool: Option<&Pool<R>>,
    mover: &mut V,
    longest: usize,
) -> Result<Costs, MeasureError<V::Error>> {
    let mut planner = TransferPlanner::new(cache, Costs::UNMEASURED);
    if let Some(pool) = pool {
        // SAFETY: the caller's promise.
        planner = unsafe { planner.with_pool(pool) };
    }
    let mut meter = Meter { cache, planner, mover };
    let mut times = WAYS.map(|_| Times::default());
    for &bytes in LENGTHS.iter().take_while(|&&bytes| bytes <= longest) {
        meter.measure(bytes, &mut times)?;
    }
    let [cached, copy, per_use, pieces] = times.map(|times| times.way());
    Ok(Costs { cached, copy, per_use, pieces, exchange: None })
}

impl<E> MeasureError<E> {
    /// Whether longer transfers cannot be had this way: the pool, the budget or the limit is too small.
    fn ends_a_curve(&self) -> bool {
        let Self::Transfer(TransferError { reason: Reason::Register { error, .. }, .. }) = self
        else {
            return false;
        };
        match error {
            GetError::Exhausted(_) | GetError::TooLong { .. } => true,
            GetError::Register(error) => error.is_about_room(),
            _ => false,
        }
    }
}

/// One way's times by length, in nanoseconds.
#[derive(Default)]
struct Times {
    first: Vec<f64>,
    again: Vec<f64>,
    /// The least of the length that is being measured.
    least: Option<(f64, f64)>,
    ended: bool,
}

impl Times {
    fn note(&mut self, (first, again): (f64, f64)) {
        let least = self.least.unwrap_or((f64::INFINITY, f64::INFINITY));
        self.least = Some((least.0.min(first), least.1.min(again)));
    }

    /// Goes on to the next length. A curve without holes: it ends at the first length that was not had.
    fn next(&mut self) {
        match self.least.take() {
            Some((first, again)) if !self.ended => {
                self.first.push(first);
                self.again.push(again);
            }
            _ => self.ended = true,
        }
    }

    fn way(self) -> Option<Way> {
        Some(Way { first: Curve::through(&self.first)?, again: Curve::through(&self.again)? })
    }
}

struct Meter<'d, 'v, R: Registrar, M: Monitor, V> {
    cache: &'d Cache<R, M>,
    planner: TransferPlanner<'d, R, M>,
    mover: &'v mut V,
}

impl<R: Registrar, M: Monitor, V: Mover<R::Handle>> Meter<'_, '_, R, M, V> {
    /// One length, by all ways in turns: a machine that slows down for a while slows all of them.
    fn measure(
        &mut self,
        bytes: usize,
        times: &mut [Times; WAYS.len()],
    ) -> Result<(), MeasureError<V::Error>> {
        let rounds = if bytes < TURN { ROUNDS } else { LONG_ROUNDS };
        for _ in 0..rounds {
            for (way, times) in WAYS.into_iter().zip(&mut *times).filter(|(_, it)| !it.ended) {
                match self.turn(self.really(way, bytes), bytes) {
                    Ok(pair) => times.note(pair),
                    Err(error) if error.ends_a_curve() => times.ended = true,
                    Err(error) => return Err(error),
                }
            }
        }
        times.iter_mut().for_each(Times::next);
        Ok(())
    }

    /// One piece alone has nothing to move meanwhile, so it costs what a lease costs.
    fn really(&self, way: Strategy, bytes: usize) -> Strategy {
        match way {
            Strategy::Pieces if bytes <= self.cache.config().piece_bytes => Strategy::Cached,
            way => way,
        }
    }

    /// The first use of `bytes` bytes, and each further one, in nanoseconds.
    fn turn(&mut self, way: Strategy, bytes: usize) -> Result<(f64, f64), MeasureError<V::Error>> {
        let count = (TURN / bytes).clamp(1, 64);
        let memory = Memory::new(bytes.next_multiple_of(page_bytes()) * count)
            .map_err(|Errno(errno)| MeasureError::Memory { errno })?;
        let first = self.times(way, (0..count).map(|number| memory.message(number, bytes)))?;
        let given_back = Instant::now();
        self.cache.evict_idle();
        let given_back = nanoseconds(given_back, count);
        self.transfer(way, memory.message(0, bytes))?;
        let again = self.times(way, (0..count).map(|_| memory.message(0, bytes)))?;
        self.cache.evict_idle();
        Ok((first + given_back, again))
    }

    /// The middle of the times of several transfers: one that was interrupted says nothing of its way.
    fn times(
        &mut self,
        way: Strategy,
        messages: impl Iterator<Item = Option<AddressRange>>,
    ) -> Result<f64, MeasureError<V::Error>> {
        let mut times = Vec::new();
        for message in messages {
            let began = Instant::now();
            self.transfer(way, message)?;
            times.push(nanoseconds(began, 1));
        }
        times.sort_by(f64::total_cmp);
        Ok(times.get(times.len() / 2).copied().unwrap_or_default())
    }

    fn transfer(
        &mut self,
        way: Strategy,
        message: Option<AddressRange>,
    ) -> Result<(), MeasureError<V::Error>> {
        // Every message is inside of its memory.
        let Some(range) = message else { return Ok(()) };
        // SAFETY: the memory is this module's own, written before, and no thread writes it meanwhile.
        unsafe { self.planner.transfer_only(way, range, self.mover) }
            .map_err(MeasureError::Transfer)
    }
}

/// What each of `count` has taken since `began`.
#[allow(clippy::cast_precision_loss)] // counts below 65
fn nanoseconds(began: Instant, count: usize) -> f64 {
    began.elapsed().as_secs_f64() * 1e9 / count as f64
}

/// Memory to send from, whose pages are there.
struct Memory {
    _pages: OwnedMapping,
    range: AddressRange,
}

impl Memory {
    fn new(bytes: usize) -> Result<Self, Errno> {
        let mut pages = OwnedMapping::new(bytes)?;
        pages.fill(0x5a);
        let range = pages.range().ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { _pages: pages, range })
    }

    /// The bytes of message `number`; each begins on a page of its own.
    fn message(&self, number: usize, bytes: usize) -> Option<AddressRange> {
        let start = self.range.start() + number * bytes.next_multiple_of(page_bytes());
        AddressRange::new(start, bytes).ok().filter(|range| self.range.contains(range))
    }
}
