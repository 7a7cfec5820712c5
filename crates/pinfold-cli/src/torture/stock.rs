//! Buffers of a pool that all threads share: taken, filled, sent, received into, passed on, put back.
//!
//! A buffer holds its owner's bytes for as long as it is out, over whatever others do with the
//! pool: so two owners of one buffer, and a slab that is given back too early, show as wrong bytes.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the word that a device is done with a buffer: each transfer
//! is waited for.

#![allow(unsafe_code)]

use super::tally::{Judged, WrongBytes};
use crate::change::{Specimen, difference};
use crate::device::{Device, Kind, Transfer};
use crate::output::Failure;
use crate::port::{self, LANE_BYTES, PortRegistrar, Refusal, at};
use crate::races::Stop;
use pinfold::AddressRange;
use pinfold::budget::Share;
use pinfold::pool::{Pool, PoolBuffer, PoolConfig, WhenExhausted};
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// How many bytes the pool, and the caches that share its budget, may have registered.
pub(super) const BUDGET_BYTES: usize = 8 << 20;

/// How many buffers are on their way between threads.
const PASSED_ON: usize = 8;

/// A pool with its device.
pub(super) struct Stock {
    pub(super) pool: Pool<PortRegistrar>,
    device: Device,
}

/// A buffer with its owner's bytes.
pub(super) struct Filled<'p> {
    pub(super) buffer: PoolBuffer<'p, PortRegistrar>,
    /// The number whose pattern it holds.
    pub(super) key: u64,
}

/// Buffers on their way between threads, the oldest first.
#[derive(Default)]
pub(super) struct Passed<'p>(Mutex<VecDeque<Filled<'p>>>);

/// How the pool stood at the end.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct StockReport {
    slabs_made: u64,
    slabs_given_back: u64,
    slabs_refused: u64,
    visits: u64,
    raids: u64,
    /// Left when all buffers were put back and the pool was told to give everything back.
    left_in_use_bytes: usize,
    left_registered_bytes: usize,
    lost_bytes: usize,
    /// Buffers put back that were not out.
    refused_puts: u64,
    failed_deregistrations: u64,
}

impl StockReport {
    /// Whether everything came back, once.
    pub(super) const fn is_clean(&self) -> bool {
        let left = self.left_in_use_bytes + self.left_registered_bytes + self.lost_bytes;
        left == 0 && self.refused_puts == 0 && self.failed_deregistrations == 0
    }
}

impl fmt::Display for StockReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "pool: {} slabs made, {} given back, {} refused; {} bytes in use and {} registered at \
             the end, {} lost; {} buffers put back twice",
            self.slabs_made,
            self.slabs_given_back,
            self.slabs_refused,
            self.left_in_use_bytes,
            self.left_registered_bytes,
            self.lost_bytes,
            self.refused_puts
        )
    }
}

impl Stock {
    /// A pool that a few threads soon exhaust, in a table of its own, with room for `lanes` threads.
    pub(super) fn open(kind: Kind, share: Arc<Share>, lanes: usize) -> Result<Self, Failure> {
        let config = PoolConfig {
            max_bytes: BUDGET_BYTES,
            first_slab_bytes: 128 << 10,
            max_slab_bytes: 4 << 20,
            idle_bytes: 1 << 20,
            thread_cache_bytes: 256 << 10,
            ..PoolConfig::default()
        };
        let device = Device::looped(kind, (lanes * LANE_BYTES) as u64)?;
        let pool = Pool::within(share, port::unaudited(device.registrar(128)?), config);
        Ok(Self { pool: pool.map_err(Failure::unavailable)?, device })
    }

    /// Gives everything back and tells how that went.
    pub(super) fn report(&self) -> StockReport {
        self.pool.trim(0);
        let end = self.pool.statistics();
        StockReport {
            slabs_made: end.grown,
            slabs_given_back: end.trimmed,
            slabs_refused: end.refused,
            visits: end.visits,
            raids: end.raids,
            left_in_use_bytes: end.in_use_bytes,
            left_registered_bytes: end.registered_bytes,
            lost_bytes: end.lost_bytes,
            refused_puts: end.refused_puts,
            failed_deregistrations: end.failed_deregistrations,
        }
    }

    /// Whether the pool tells a forked child that it is one.
    pub(super) fn is_forked(&self) -> bool {
        self.pool.get(64).is_err_and(|error| error == pinfold::pool::AllocateError::Forked)
    }

    pub(super) fn take(
        &self,
        length: usize,
        when: WhenExhausted,
        zeroed: bool,
    ) -> Result<Taken<'_>, Stop> {
        let request = self.pool.request(length).when_exhausted(when);
        let request = if zeroed { request.zeroed() } else { request };
        Ok(request.get()?)
    }

    /// What arrives of a buffer.
    pub(super) fn send(&self, filled: &Filled<'_>, lane: usize) -> Result<Vec<u8>, Refusal> {
        let mut arrived = vec![0; filled.buffer.len()];
        let delivered = self.device.deliver(&transfer(&filled.buffer, lane), &mut arrived);
        delivered.map(|()| arrived).map_err(Refusal::Device)
    }

    /// Has the device write `bytes` into a buffer, which comes back by itself or by one word.
    pub(super) fn receive<'p>(
        &'p self,
        buffer: Taken<'p>,
        lane: usize,
        bytes: &[u8],
        as_word: bool,
    ) -> Result<Taken<'p>, Stop> {
        let (transfer, length) = (transfer(&buffer, lane), buffer.len());
        let flight = buffer.in_flight();
        let received = self.device.accept(&transfer, bytes).map_err(Refusal::Device);
        let buffer = if as_word {
            let word = flight.into_user_data();
            // SAFETY: the transfer was waited for; the word is used once.
            unsafe { self.pool.completed(word) }.map(|mut buffer| {
                buffer.set_len(length);
                buffer
            })
        } else {
            // SAFETY: the transfer was waited for.
            Some(unsafe { flight.complete() })
        };
        received?;
        buffer.ok_or(Stop::Gone)
    }
}

pub(super) type Taken<'p> = PoolBuffer<'p, PortRegistrar>;

fn transfer(buffer: &Taken<'_>, lane: usize) -> Transfer {
    let address = buffer.as_ptr().expose_provenance();
    Transfer { key: buffer.handle().key(), address, length: buffer.len(), offset: at(lane, 0) }
}

/// A buffer of the pool has at least a byte here.
pub(super) fn range(buffer: &Taken<'_>) -> Result<AddressRange, Stop> {
    buffer.range().ok_or(Stop::Gone)
}

impl<'p> Filled<'p> {
    pub(super) fn new(mut buffer: Taken<'p>, key: u64) -> Result<Self, Stop> {
        let pattern = Specimen::pattern(range(&buffer)?, key);
        buffer.copy_from_slice(&pattern);
        Ok(Self { buffer, key })
    }

    pub(super) fn pattern(&self) -> Result<Vec<u8>, Stop> {
        Ok(Specimen::pattern(range(&self.buffer)?, self.key))
    }

    /// Whether the owner's bytes are still there.
    pub(super) fn wrong(&self) -> Judged {
        let first = difference(&self.buffer, &self.pattern()?);
        let range = range(&self.buffer)?;
        let note = "a buffer that was out has changed";
        Ok(first.map(|first| WrongBytes { range, first, note: note.into() }))
    }
}

impl<'p> Passed<'p> {
    /// Leaves a buffer here and takes the oldest, once there are many.
    pub(super) fn pass_on(&self, filled: Filled<'p>) -> Option<Filled<'p>> {
        let mut passed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        passed.push_back(filled);
        if passed.len() > PASSED_ON { passed.pop_front() } else { None }
    }
}
