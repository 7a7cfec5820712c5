//! A very large range, registered by several threads at once.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for a method that takes an address and a length; the contract is
//! the cache's own.

#![allow(unsafe_code)]

use super::serve::{Parts, Server};
use super::{DoesNotFit, Options, Plan, Progress};
use crate::{Access, AddressRange, Cache, GetError, Lease, Monitor, Registrar};
use pinfold_core::foreign::{self, Panicked};
use pinfold_kernel::thread::with_helpers;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The leases of every piece of a range, in order of address.
///
/// They do not outlive their cache:
///
/// ```compile_fail,E0505
/// # use pinfold::{Access, Cache, Monitor, Registrar, pieces::{Options, Progress, register_all}};
/// # fn after_its_parent<R: Registrar, M: Monitor>(cache: Cache<R, M>, start: *const u8) {
/// let (options, progress) = (Options::for_register_all(), Progress::new());
/// let all = unsafe { register_all(&cache, start, 1, Access::READ, &options, &progress) }.ok();
/// drop(cache);
/// drop(all);
/// # }
/// ```
#[must_use = "registrations may be given back as soon as their leases are dropped"]
pub struct Registered<'c, R: Registrar, M: Monitor> {
    leases: Vec<Lease<'c, R, M>>,
}

impl<'c, R: Registrar, M: Monitor> Registered<'c, R, M> {
    /// All leases. Each names its bytes ([`Lease::range`]); together they are the whole range.
    pub fn leases(&self) -> &[Lease<'c, R, M>] {
        &self.leases
    }

    /// The lease whose bytes contain `address`.
    pub fn find(&self, address: usize) -> Option<&Lease<'c, R, M>> {
        let above = self.leases.partition_point(|lease| lease.range().start() <= address);
        self.leases[..above].last().filter(|lease| address < lease.range().end())
    }

    /// The leases one by one, so that each may end by itself.
    pub fn into_leases(self) -> Vec<Lease<'c, R, M>> {
        self.leases
    }
}

/// One piece that could not be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("piece {piece} ({range}): {error}")]
pub struct PieceError {
    /// Which piece, counted from 0 as [`Plan::piece`] does.
    pub piece: usize,
    /// Its bytes.
    pub range: AddressRange,
    /// What was wrong.
    #[source]
    pub error: GetError,
}

/// Why a range is not registered as a whole.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RegisterAllError<'c, R: Registrar, M: Monitor> {
    /// The arguments make no sense; nothing was tried.
    #[error("{0}")]
    Arguments(GetError),
    /// The budget can never hold it; nothing was tried.
    #[error("{0}")]
    DoesNotFit(DoesNotFit),
    /// Some pieces are registered and some are not.
    #[error("{0}")]
    Incomplete(Incomplete<'c, R, M>),
}

/// What is there of a range that is not registered as a whole. Use the leases, or drop them: the
/// registrations then stay cached until room is needed.
#[must_use = "registrations may be given back as soon as their leases are dropped"]
pub struct Incomplete<'c, R: Registrar, M: Monitor> {
    /// The leases of the pieces that are registered, in order of address.
    pub leases: Vec<Lease<'c, R, M>>,
    /// The pieces that failed, in order; none if it was cancelled before any did.
    pub failed: Vec<PieceError>,
    /// How many pieces were not tried any more.
    pub not_tried: usize,
    /// Whether [`Progress::cancel`] was called.
    pub cancelled: bool,
}

impl<R: Registrar, M: Monitor> fmt::Display for Incomplete<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (done, left) = (self.leases.len(), self.not_tried);
        write!(f, "{done} registrations are there, {left} pieces were not tried")?;
        if self.cancelled {
            f.write_str(", because it was cancelled")?;
        }
        self.failed.first().map_or(Ok(()), |first| write!(f, "; {first}"))
    }
}

/// Leases of the whole range, registered by `options.threads` threads, this one among them.
///
/// Blocks until all is done, some piece has failed or `progress` was cancelled; then no thread
/// begins another piece. `progress` may be read meanwhile. What is cached is found, not registered
/// again.
///
/// Threads help where pages have to be made (`options.prefault`), and where the device takes several
/// registrations at once. A ring of io_uring takes one at a time.
///
/// # Errors
///
/// [`RegisterAllError`].
///
/// # Panics
///
/// If the registrar or the monitor does, on whichever thread; what is registered then stays cached.
///
/// # Safety
///
/// As [`Cache::get`], for the whole range, until the last lease ends.
pub unsafe fn register_all<'c, R: Registrar, M: Monitor>(
    cache: &'c Cache<R, M>,
    start: *const u8,
    length: usize,
    access: Access,
    options: &Options,
    progress: &Progress,
) -> Result<Registered<'c, R, M>, RegisterAllError<'c, R, M>> {
    let plan = Plan::new(cache, start, length)
        .map_err(|error| RegisterAllError::Arguments(GetError::Range(error)))?;
    plan.fits().map_err(RegisterAllError::DoesNotFit)?;
    // The addresses are made pointers again by `Server`.
    start.expose_provenance();
    // SAFETY: the caller's promise.
    let server = unsafe { Server::new(cache, access, options) };
    let work = Work { plan, server, progress, next: AtomicUsize::new(0) };
    let mut outcomes = work.share_out(options.bounded_threads());
    outcomes.sort_unstable_by_key(|&(piece, _)| piece);
    work.judge(outcomes)
}

type Outcome<'c, R, M> = (usize, Result<Parts<'c, R, M>, GetError>);

/// What the threads that help have registered, and the first panic of theirs.
type Helped<'c, R, M> = (Vec<Outcome<'c, R, M>>, Option<Panicked>);

/// The pieces that threads take turns to register.
struct Work<'c, 'p, R: Registrar, M: Monitor> {
    plan: Plan,
    server: Server<'c, 'p, R, M>,
    progress: &'p Progress,
    /// The piece to be taken next; all of them when a piece has failed.
    next: AtomicUsize,
}

impl<'c, R: Registrar, M: Monitor> Work<'c, '_, R, M> {
    fn share_out(&self, threads: usize) -> Vec<Outcome<'c, R, M>> {
        // What is cached needs no thread.
        let mut outcomes = self.find_cached();
        let left = self.plan.pieces().saturating_sub(outcomes.len());
        let helped = Mutex::new((Vec::new(), None));
        let help = || self.help(&helped);
        let helpers = threads.min(left).saturating_sub(1);
        let is_child = || self.server.is_forked();
        let own = |_| self.register_until_panic();
        // SAFETY: the monitor's answer, of which it promises that.
        let own = unsafe { with_helpers("pinfold-register", helpers, is_child, help, own) };
        let panicked = if self.server.is_forked() {
            // A thread that is not there may be in the midst of it.
            std::mem::forget(helped);
            None
        } else {
            let (theirs, panicked) = helped.into_inner().unwrap_or_else(PoisonError::into_inner);
            outcomes.extend(theirs);
            panicked
        };
        outcomes.extend(own.unwrap_or_else(|panicked| panicked.resume()));
        panicked.map_or(outcomes, |panicked| panicked.resume())
    }

    fn help(&self, helped: &Mutex<Helped<'c, R, M>>) {
        let theirs = self.register_until_panic();
        if self.server.is_forked() {
            return;
        }
        let mut helped = helped.lock().unwrap_or_else(PoisonError::into_inner);
        match theirs {
            Ok(theirs) => helped.0.extend(theirs),
            Err(panicked) => {
                helped.1.get_or_insert(panicked);
            }
        }
    }

    fn register_until_panic(&self) -> Result<Vec<Outcome<'c, R, M>>, Panicked> {
        // Relaxed: as in `register`.
        let stop = |_: &_| self.next.store(self.plan.pieces(), Ordering::Relaxed);
        foreign::call(|| self.register()).inspect_err(stop)
    }

    /// The pieces from the first on that are cached.
    fn find_cached(&self) -> Vec<Outcome<'c, R, M>> {
        let cached: Vec<_> = (0..)
            .map_while(|number| self.plan.piece(number))
            .map_while(|piece| self.server.find(piece))
            .zip(0..)
            .inspect(|(parts, _)| self.count(parts))
            .map(|(parts, number)| (number, Ok(parts)))
            .collect();
        // Relaxed: no thread has been started yet.
        self.next.store(cached.len(), Ordering::Relaxed);
        cached
    }

    fn register(&self) -> Vec<Outcome<'c, R, M>> {
        let mut outcomes = Vec::new();
        while !self.progress.is_cancelled() {
            // Relaxed: the number alone matters.
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.plan.piece(number) else { break };
            let outcome = self.server.serve(piece);
            match &outcome {
                Ok(parts) => self.count(parts),
                // Relaxed: a thread that sees it late registers one piece more.
                Err(_) => self.next.store(self.plan.pieces(), Ordering::Relaxed),
            }
            outcomes.push((number, outcome));
        }
        outcomes
    }

    fn count(&self, parts: &Parts<'c, R, M>) {
        self.progress.add_registered(parts.iter().map(|lease| lease.range().len()).sum());
    }

    fn judge(
        &self,
        outcomes: Vec<Outcome<'c, R, M>>,
    ) -> Result<Registered<'c, R, M>, RegisterAllError<'c, R, M>> {
        let tried = outcomes.len();
        let (mut leases, mut failed) = (Vec::new(), Vec::new());
        for (piece, outcome) in outcomes {
            match (outcome, self.plan.piece(piece)) {
                (Ok(parts), _) => leases.extend(parts),
                (Err(error), Some(range)) => failed.push(PieceError { piece, range, error }),
                (Err(_), None) => {}
            }
        }
        let not_tried = self.plan.pieces() - tried;
        if failed.is_empty() && not_tried == 0 {
            return Ok(Registered { leases });
        }
        let cancelled = self.progress.is_cancelled();
        let incomplete = Incomplete { leases, failed, not_tried, cancelled };
        Err(RegisterAllError::Incomplete(incomplete))
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Registered<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.leases).finish()
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for RegisterAllError<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arguments(error) => error.fmt(f),
            Self::DoesNotFit(error) => error.fmt(f),
            Self::Incomplete(incomplete) => incomplete.fmt(f),
        }
    }
}

impl<R: Registrar, M: Monitor> fmt::Debug for Incomplete<'_, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incomplete")
            .field("leases", &self.leases.len())
            .field("failed", &self.failed)
            .field("not_tried", &self.not_tried)
            .field("cancelled", &self.cancelled)
            .finish()
    }
}
