//! A transfer of any size: pieces move while later ones are registered.
//!
//! The calling thread moves, helpers register. A helper is started at the first piece that is not
//! cached; a range that is cached is moved without any.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for a method that takes an address and a length, and to have it moved; the contract
//! is the cache's own. However the call ends, by a panic too, it waits for what is under way
//! ([`Window`]): the memory is the caller's again then.

#![allow(unsafe_code)]

use super::line::{Front, Line};
use super::serve::{Parts, Server, is_about_room};
use super::{Options, Plan, Progress, prefault};
use crate::in_flight::{Mover, Reason, Stopped, Window};
use crate::{Access, AddressRange, Cache, GetError, Lease, Monitor, Registrar};
use pinfold_core::foreign::{self, Panicked};
use pinfold_kernel::thread::with_helpers;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// What a transfer took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Moved {
    /// How many requests were made.
    pub requests: usize,
    /// How many pieces from the first on were found in the cache, before any helper was started.
    pub found_at_once: usize,
    /// How many helpers registered besides the moving thread; 0 where none was needed, or none could
    /// be started.
    pub helpers: usize,
    /// Whether the helpers were sent home because the budget, or the device, had no room for
    /// pieces in advance: then each was registered when its turn came.
    pub short_of_room: bool,
}

/// Why a transfer stopped. Nothing is under way any more and no lease is held; what was registered
/// stays cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub struct TransferError<E> {
    /// What went wrong first.
    pub reason: Reason<E>,
    /// How many bytes from the start were all moved. Some behind them may have been, too.
    pub moved_bytes: usize,
}

impl<E: fmt::Display> fmt::Display for TransferError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let moved = self.moved_bytes;
        match &self.reason {
            Reason::Range(error) => error.fmt(f),
            Reason::Register { range, error } => {
                write!(f, "{range} was not registered, behind {moved} bytes moved: {error}")
            }
            Reason::Move { range, error } => {
                write!(f, "{range} was not moved, behind {moved} bytes that were: {error}")
            }
            Reason::DeviceGone(error) => write!(f, "the device is gone: {error}"),
            Reason::Cancelled => write!(f, "cancelled behind {moved} bytes"),
        }
    }
}

/// Moves `length` bytes from `start`, of which nothing need be registered: the first pieces move
/// while later ones are being registered by helpers.
///
/// At most `options.ahead` pieces are registered in advance and `options.in_flight` requests under
/// way, so a range may be longer than the budget. Where there is no room for pieces in advance, each
/// is registered when it is its turn, as soon as requests under way have ended. Cached pieces move at
/// once, without any thread being started.
///
/// A suspension that covers several pieces may keep the first from being registered while the leases of later ones keep
/// it from coming about: both wait until its deadline, and both may end in an error there.
///
/// Blocks until everything is moved. However it ends, no request is under way any more: a panic of
/// the registrar, of a helper's or of the mover goes on when every request has completed. A child that one of these has
/// forked waits for nothing, and gets [`GetError::Forked`]: the requests are its parent's.
///
/// # Errors
///
/// [`TransferError`], when every request under way has ended.
///
/// # Safety
///
/// As [`Cache::get`], for the whole range, until the call returns.
pub unsafe fn transfer<R: Registrar, M: Monitor, V: Mover<R::Handle>>(
    cache: &Cache<R, M>,
    start: *const u8,
    length: usize,
    access: Access,
    options: &Options,
    progress: &Progress,
    mover: &mut V,
) -> Result<Moved, TransferError<V::Error>> {
    let plan = Plan::new(cache, start, length)
        .map_err(|error| TransferError { reason: Reason::Range(error), moved_bytes: 0 })?;
    // The addresses are made pointers again by `Server`.
    start.expose_provenance();
    // SAFETY: the caller's promise.
    let server = unsafe { Server::new(cache, access, options) };
    let supply = Supply { plan, server };
    let is_forked = || supply.server.is_forked();
    // SAFETY: leases are all that is handed to it, and they have no target.
    let window = unsafe { Window::new(mover, options.in_flight, &is_forked) };
    let mut flow = Flow { window, progress };
    let moved = supply.move_all(options, &mut flow, &is_forked);
    flow.conclude(plan, moved)
}

/// Where pieces come from.
struct Supply<'c, 'p, R: Registrar, M: Monitor> {
    plan: Plan,
    server: Server<'c, 'p, R, M>,
}

type Served<'c, R, M> = Result<Parts<'c, R, M>, GetError>;

impl<'c, R: Registrar, M: Monitor> Supply<'c, '_, R, M> {
    fn move_all<V: Mover<R::Handle>>(
        &self,
        options: &Options,
        flow: &mut Flow<'_, 'c, R, M, V>,
        is_forked: &(dyn Fn() -> bool + Sync),
    ) -> Result<Moved, Stopped> {
        let found = self.move_cached(flow)?;
        let mut moved = Moved { found_at_once: found, ..Moved::default() };
        flow.stop_if_cancelled()?;
        if found < self.plan.pieces() {
            let line = Line::new(found, self.plan.pieces(), options.ahead, is_forked);
            let panicked = Mutex::new(None);
            let help = || self.help(&line, &panicked);
            let most = self.useful_helpers(found, options);
            let own = |helpers| {
                // However this ends, the helpers go home.
                let _homeward = Homeward(&line);
                moved.helpers = helpers;
                moved.short_of_room = self.move_line(&line, found, flow)?;
                Ok(())
            };
            // SAFETY: the monitor's answer, of which it promises that.
            let ended = unsafe { with_helpers("pinfold-pieces", most, is_forked, help, own) };
            if is_forked() {
                // A helper that is not there may be in the midst of it.
                std::mem::forget(panicked);
                return ended.map(|()| moved);
            }
            let panicked = panicked.into_inner().unwrap_or_else(PoisonError::into_inner);
            panicked.map_or(ended, |panicked| panicked.resume())?;
        }
        Ok(moved)
    }

    /// Moves the pieces from the first on that are cached; how many those were.
    fn move_cached<V: Mover<R::Handle>>(
        &self,
        flow: &mut Flow<'_, 'c, R, M, V>,
    ) -> Result<usize, Stopped> {
        let pieces = (0..).map_while(|number| self.plan.piece(number));
        let mut found = 0;
        for parts in pieces.map_while(|piece| self.server.find(piece)) {
            flow.stop_if_cancelled()?;
            flow.move_parts(parts)?;
            found += 1;
        }
        Ok(found)
    }

    /// One whose registrar panics leaves its piece to the moving thread, and the first panic goes on there. None
    /// leaves a helper.
    fn help(&self, line: &Line<'_, Served<'c, R, M>>, panicked: &Mutex<Option<Panicked>>) {
        if let Err(another) = foreign::call(|| self.register(line))
            && !self.server.is_forked()
        {
            let mut first = panicked.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(another);
        }
    }

    fn useful_helpers(&self, first: usize, options: &Options) -> usize {
        // One keeps up with any transfer where pages are there; more would wait for each other.
        let bare = self.plan.piece(first).is_some_and(prefault::lacks_pages);
        let useful = (self.plan.pieces() - first).min(options.ahead.max(1));
        if bare { options.bounded_threads().min(useful) } else { 1 }
    }

    fn register(&self, line: &Line<'_, Served<'c, R, M>>) {
        while let Some(claim) = line.claim() {
            if let Some(piece) = self.plan.piece(claim.number()) {
                claim.fill(self.server.serve(piece));
            }
        }
    }

    /// Moves what comes out of the line; whether there was no room for pieces in advance.
    fn move_line<V: Mover<R::Handle>>(
        &self,
        line: &Line<'_, Served<'c, R, M>>,
        first: usize,
        flow: &mut Flow<'_, 'c, R, M, V>,
    ) -> Result<bool, Stopped> {
        let mut short_of_room = false;
        for number in first.. {
            let Some(piece) = self.plan.piece(number) else { break };
            flow.stop_if_cancelled()?;
            let served = match flow.next_of(line)? {
                Front::Ready(served) => served,
                Front::Yours | Front::NotYet => self.server.serve(piece),
            };
            let parts = match served {
                Err(error) if is_about_room(&error) => {
                    short_of_room = true;
                    self.make_room(line, piece, flow)?
                }
                served => served.map_err(|error| flow.not_registered(piece, error))?,
            };
            flow.move_parts(parts)?;
        }
        Ok(short_of_room)
    }

    /// Registers a piece for which there was no room: what stands in the line is given up, then
    /// requests under way are waited for, one after the other.
    fn make_room<V: Mover<R::Handle>>(
        &self,
        line: &Line<'_, Served<'c, R, M>>,
        piece: AddressRange,
        flow: &mut Flow<'_, 'c, R, M, V>,
    ) -> Result<Parts<'c, R, M>, Stopped> {
        drop(line.close_and_empty());
        loop {
            match self.server.serve(piece) {
                Ok(parts) => return Ok(parts),
                Err(error) if is_about_room(&error) && !flow.window.is_empty() => {
                    flow.complete()?;
                }
                Err(error) => return Err(flow.not_registered(piece, error)),
            }
        }
    }
}

/// Sends the helpers home when it is dropped.
struct Homeward<'l, T>(&'l Line<'l, T>);

impl<T> Drop for Homeward<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The requests under way, and what is said of them.
struct Flow<'m, 'c, R: Registrar, M: Monitor, V: Mover<R::Handle>> {
    window: Window<'m, V, R::Handle, Lease<'c, R, M>>,
    progress: &'m Progress,
}

impl<'c, R: Registrar, M: Monitor, V: Mover<R::Handle>> Flow<'_, 'c, R, M, V> {
    /// What stands at the front of the line. Waits for requests as long as there are some, for the
    /// helpers only when there is nothing else to wait for.
    fn next_of<T>(&mut self, line: &Line<'_, T>) -> Result<Front<T>, Stopped> {
        while !self.window.is_empty() {
            match line.try_take() {
                Front::NotYet => self.complete()?,
                front => return Ok(front),
            }
        }
        Ok(line.take())
    }

    fn move_parts(&mut self, parts: Parts<'c, R, M>) -> Result<(), Stopped> {
        parts.into_iter().try_for_each(|lease| {
            self.progress.add_registered(lease.range().len());
            while self.window.is_full() {
                self.complete()?;
            }
            // SAFETY: a lease keeps its registration, of its range, of memory that is the mover's to move until the
            // call returns, by the word that came with `transfer`, which alone makes one of these.
            unsafe { self.window.begin(lease.handle(), lease.range(), lease) }
        })
    }

    fn stop_if_cancelled(&mut self) -> Result<(), Stopped> {
        if self.progress.is_cancelled() { Err(self.window.stop(Reason::Cancelled)) } else { Ok(()) }
    }

    fn not_registered(&mut self, range: AddressRange, error: GetError) -> Stopped {
        self.window.stop(Reason::Register { range, error })
    }

    /// Waits for one request and ends its lease.
    fn complete(&mut self) -> Result<(), Stopped> {
        if let Some(range) = self.window.complete()? {
            self.progress.add_moved(range.len());
        }
        Ok(())
    }

    /// Waits for everything under way and judges.
    fn conclude(
        mut self,
        plan: Plan,
        moved: Result<Moved, Stopped>,
    ) -> Result<Moved, TransferError<V::Error>> {
        let progress = self.progress;
        let outcome = self.window.conclude(|range| progress.add_moved(range.len()));
        let moved_bytes = self.window.moved_to().saturating_sub(plan.range().start());
        // Whatever has stopped it is in `outcome`.
        let moved = moved.unwrap_or_default();
        outcome
            .map(|()| Moved { requests: self.window.requests(), ..moved })
            .map_err(|reason| TransferError { reason, moved_bytes })
    }
}
