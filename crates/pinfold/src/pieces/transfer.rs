//! A transfer of any size: pieces move while later ones are registered.
//!
//! The calling thread moves, helpers register. A helper is started at the first piece that is not
//! cached; a range that is cached is moved without any.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for a door that takes an address and a length; the contract is
//! the cache's own.

#![allow(unsafe_code)]

use super::line::{Front, Line};
use super::serve::{Parts, Server, is_about_room};
use super::{Options, Plan, Progress, prefault};
use crate::quiet_thread;
use crate::{Access, AddressRange, Cache, GetError, Lease, Monitor, RangeError, Registrar};
use std::fmt;
use std::thread::{self, Scope};

/// What moves registered memory: a ring, a queue pair, a socket.
pub trait Mover<H> {
    /// Why a request failed.
    type Error;

    /// Begins to move one part of the range, in order of address; it may go on in the background.
    /// The registration is kept until [`complete`](Self::complete) says that it is done.
    ///
    /// # Errors
    ///
    /// Whatever the device says; then nothing is under way for this request.
    fn begin(&mut self, request: Request<H>) -> Result<(), Self::Error>;

    /// Waits until one of the requests under way is done, in any order. Called only when there are
    /// some.
    ///
    /// # Errors
    ///
    /// The device is gone: no request is under way any more.
    fn complete(&mut self) -> Result<Completion<Self::Error>, Self::Error>;
}

/// One part of the range, to be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request<H> {
    /// Its number, counted from 0 without gaps.
    pub number: usize,
    /// The registration that holds it.
    pub handle: H,
    /// Its bytes.
    pub range: AddressRange,
}

/// A request that is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion<E> {
    /// Its number. One that is not under way is ignored.
    pub number: usize,
    /// How it ended.
    pub outcome: Result<(), E>,
}

/// What a transfer took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Moved {
    /// How many requests were made.
    pub requests: usize,
    /// How many pieces from the first on were found in the cache, before any helper was started.
    pub found_at_once: usize,
    /// How many helpers registered beside the moving thread; 0 where none was needed, or none could
    /// be started.
    pub helpers: usize,
    /// Whether the helpers were sent home because the budget, or the device, had no room for
    /// pieces in advance: then each was registered when its turn came.
    pub short_of_room: bool,
}

/// Why a transfer stopped. Nothing is under way any more and no lease is held; what was registered
/// stays cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TransferError<E> {
    /// What went wrong first.
    pub reason: Reason<E>,
    /// How many bytes from the start were all moved. Some behind them may have been, too.
    pub moved_bytes: usize,
}

/// What stopped a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason<E> {
    /// The arguments make no range; nothing was tried.
    Range(RangeError),
    /// A piece could not be registered.
    Register {
        /// Its bytes.
        range: AddressRange,
        /// Why.
        error: GetError,
    },
    /// A request failed.
    Move {
        /// Its bytes.
        range: AddressRange,
        /// What the mover said.
        error: E,
    },
    /// The device is gone.
    DeviceGone(E),
    /// [`Progress::cancel`] was called.
    Cancelled,
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

impl<E: fmt::Debug + fmt::Display> std::error::Error for TransferError<E> {}

/// Moves `length` bytes from `start`, of which nothing need be registered: the first pieces move
/// while later ones are being registered by helpers.
///
/// At most `options.ahead` pieces are registered in advance and `options.in_flight` requests under
/// way, so a range may be longer than the budget. Where there is no room for pieces in advance, each
/// is registered when it is its turn, as soon as requests under way have ended. Cached pieces move at
/// once, without any thread being started.
///
/// Blocks until everything is moved.
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
    let server = unsafe { Server::new(cache, access, options.prefault, progress) };
    let supply = Supply { plan, server, progress };
    let mut window = Window::new(mover, options.in_flight, progress);
    let moved = supply.move_all(options, &mut window);
    window.conclude(plan, moved)
}

/// Where pieces come from.
struct Supply<'c, 'p, R: Registrar, M: Monitor> {
    plan: Plan,
    server: Server<'c, 'p, R, M>,
    progress: &'p Progress,
}

type Served<'c, R, M> = Result<Parts<'c, R, M>, GetError>;

impl<'c, R: Registrar, M: Monitor> Supply<'c, '_, R, M> {
    fn move_all<V: Mover<R::Handle>>(
        &self,
        options: &Options,
        window: &mut Window<'_, 'c, R, M, V>,
    ) -> Result<Moved, Reason<V::Error>> {
        let found = self.move_cached(window)?;
        let mut moved = Moved { found_at_once: found, ..Moved::default() };
        self.stop_if_cancelled()?;
        if found < self.plan.pieces() {
            let line = Line::new(found, self.plan.pieces(), options.ahead);
            thread::scope(|scope| {
                // However this ends, the helpers go home.
                let _homeward = Homeward(&line);
                moved.helpers = self.start_helpers(scope, &line, found, options);
                moved.short_of_room = self.move_line(&line, found, window)?;
                Ok(())
            })?;
        }
        Ok(moved)
    }

    /// Moves the pieces from the first on that are cached; how many those were.
    fn move_cached<V: Mover<R::Handle>>(
        &self,
        window: &mut Window<'_, 'c, R, M, V>,
    ) -> Result<usize, Reason<V::Error>> {
        let pieces = (0..).map_while(|number| self.plan.piece(number));
        let mut found = 0;
        for parts in pieces.map_while(|piece| self.server.find(piece)) {
            self.stop_if_cancelled()?;
            window.move_parts(parts)?;
            found += 1;
        }
        Ok(found)
    }

    fn stop_if_cancelled<E>(&self) -> Result<(), Reason<E>> {
        if self.progress.is_cancelled() { Err(Reason::Cancelled) } else { Ok(()) }
    }

    /// How many were started. They are joined by the scope; one whose registrar panics leaves its
    /// piece to the moving thread, and lets the panic be seen there.
    fn start_helpers<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        line: &'scope Line<Served<'c, R, M>>,
        first: usize,
        options: &Options,
    ) -> usize {
        // One keeps up with any transfer where pages are there; more would wait for each other.
        let bare = self.plan.piece(first).is_some_and(prefault::lacks_pages);
        let helpers = if bare { options.threads.get() } else { 1 };
        (0..helpers)
            .map_while(|_| {
                quiet_thread::spawn_scoped(scope, "pinfold-pieces", || self.register(line)).ok()
            })
            .count()
    }

    fn register(&self, line: &Line<Served<'c, R, M>>) {
        while let Some(claim) = line.claim() {
            if let Some(piece) = self.plan.piece(claim.number()) {
                claim.fill(self.server.serve(piece));
            }
        }
    }

    /// Moves what comes out of the line; whether there was no room for pieces in advance.
    fn move_line<V: Mover<R::Handle>>(
        &self,
        line: &Line<Served<'c, R, M>>,
        first: usize,
        window: &mut Window<'_, 'c, R, M, V>,
    ) -> Result<bool, Reason<V::Error>> {
        let mut short_of_room = false;
        for number in first.. {
            let Some(piece) = self.plan.piece(number) else { break };
            self.stop_if_cancelled()?;
            let served = match window.next_of(line)? {
                Front::Ready(served) => served,
                Front::Yours | Front::NotYet => self.server.serve(piece),
            };
            let parts = match served {
                Err(error) if is_about_room(&error) => {
                    short_of_room = true;
                    self.make_room(line, piece, window)?
                }
                served => served.map_err(|error| Reason::Register { range: piece, error })?,
            };
            window.move_parts(parts)?;
        }
        Ok(short_of_room)
    }

    /// Registers a piece for which there was no room: what stands in the line is given up, then
    /// requests under way are waited for, one after the other.
    fn make_room<V: Mover<R::Handle>>(
        &self,
        line: &Line<Served<'c, R, M>>,
        piece: AddressRange,
        window: &mut Window<'_, 'c, R, M, V>,
    ) -> Result<Parts<'c, R, M>, Reason<V::Error>> {
        drop(line.close_and_empty());
        loop {
            match self.server.serve(piece) {
                Ok(parts) => return Ok(parts),
                Err(error) if is_about_room(&error) && !window.is_empty() => window.complete()?,
                Err(error) => return Err(Reason::Register { range: piece, error }),
            }
        }
    }
}

/// Sends the helpers home when it is dropped.
struct Homeward<'l, T>(&'l Line<T>);

impl<T> Drop for Homeward<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The requests under way.
struct Window<'m, 'c, R: Registrar, M: Monitor, V> {
    mover: &'m mut V,
    under_way: Vec<(usize, Lease<'c, R, M>)>,
    most: usize,
    requests: usize,
    /// The lowest address that a failed request was to move.
    lowest_failed: usize,
    /// Where the next request begins, if all went well.
    begun_to: usize,
    progress: &'m Progress,
}

impl<'m, 'c, R: Registrar, M: Monitor, V: Mover<R::Handle>> Window<'m, 'c, R, M, V> {
    fn new(mover: &'m mut V, most: usize, progress: &'m Progress) -> Self {
        let most = most.max(1);
        let under_way = Vec::with_capacity(most);
        let (lowest_failed, begun_to) = (usize::MAX, 0);
        Self { mover, under_way, most, requests: 0, lowest_failed, begun_to, progress }
    }

    fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// What stands at the front of the line. Waits for requests as long as there are some, for the
    /// helpers only when there is nothing else to wait for.
    fn next_of<T>(&mut self, line: &Line<T>) -> Result<Front<T>, Reason<V::Error>> {
        while !self.is_empty() {
            match line.try_take() {
                Front::NotYet => self.complete()?,
                front => return Ok(front),
            }
        }
        Ok(line.take())
    }

    fn move_parts(&mut self, parts: Parts<'c, R, M>) -> Result<(), Reason<V::Error>> {
        parts.into_iter().try_for_each(|lease| {
            while self.under_way.len() >= self.most {
                self.complete()?;
            }
            self.begin(lease)
        })
    }

    fn begin(&mut self, lease: Lease<'c, R, M>) -> Result<(), Reason<V::Error>> {
        let (number, range) = (self.requests, lease.range());
        self.begun_to = range.start();
        let request = Request { number, handle: lease.handle(), range };
        self.mover.begin(request).map_err(|error| Reason::Move { range, error })?;
        self.requests += 1;
        self.begun_to = range.end();
        self.under_way.push((number, lease));
        Ok(())
    }

    /// Waits for one request and ends its lease.
    fn complete(&mut self) -> Result<(), Reason<V::Error>> {
        let done = self.mover.complete().map_err(|error| self.lose_all(error))?;
        let Some(place) = self.under_way.iter().position(|(number, _)| *number == done.number)
        else {
            return Ok(());
        };
        let (_, lease) = self.under_way.swap_remove(place);
        let range = lease.range();
        done.outcome.map_err(|error| {
            self.lowest_failed = self.lowest_failed.min(range.start());
            Reason::Move { range, error }
        })?;
        self.progress.add_moved(range.len());
        Ok(())
    }

    /// The device is gone, and every request with it.
    fn lose_all(&mut self, error: V::Error) -> Reason<V::Error> {
        let lost = self.under_way.drain(..).map(|(_, lease)| lease.range().start());
        self.lowest_failed = lost.fold(self.lowest_failed, usize::min);
        Reason::DeviceGone(error)
    }

    /// Waits for everything under way and judges.
    fn conclude(
        mut self,
        plan: Plan,
        moved: Result<Moved, Reason<V::Error>>,
    ) -> Result<Moved, TransferError<V::Error>> {
        let mut outcome = moved;
        while !self.is_empty() {
            let completed = self.complete();
            // The first error is the one that is told.
            outcome = outcome.and_then(|moved| completed.map(|()| moved));
        }
        let up_to = self.lowest_failed.min(self.begun_to);
        let moved_bytes = up_to.saturating_sub(plan.range().start());
        outcome
            .map(|moved| Moved { requests: self.requests, ..moved })
            .map_err(|reason| TransferError { reason, moved_bytes })
    }
}
