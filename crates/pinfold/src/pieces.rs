//! Ranges of any length: registered piece by piece, in step with the transfer, or all at once by
//! several threads.
//!
//! # The price
//!
//! Registering memory that is there costs some 20 ms for each GiB, which a transfer hides
//! completely if it goes on meanwhile ([`transfer`]). Memory that was never touched costs 400 ms
//! for each GiB, because the kernel fills its pages with zeros first; that can be divided among
//! threads ([`register_all`], [`prefault`]), while a ring of io_uring takes one registration at a time
//! whichever thread asks. What is cached already is found without starting a thread.
//!
//! # What a piece is
//!
//! A range is cut at multiples of [`Config::piece_bytes`](crate::Config::piece_bytes), which the
//! cache has made to fit its device: nothing is ever cut behind the caller's back, and [`Plan`] tells
//! how a range will be cut, and whether the budget can hold it, before anything is registered. The
//! cuts depend on addresses alone, so the next use of the same memory finds the pieces of the last.
//! It also finds them if they were registered with other cuts, if those that lie side by side
//! cover a piece: then it is moved by several requests instead of being registered again.
//!
//! # Layers
//!
//! `sys` (two calls of the kernel), `plan`, `progress`, `prefault`, `serve` (one piece), `register`
//! (all at once), `line` (pieces on their way from helpers to the one who moves them), `transfer`.

mod line;
mod plan;
mod prefault;
mod progress;
mod register;
mod serve;
mod transfer;

pub use plan::{DoesNotFit, Plan};
pub use prefault::{PrefaultError, prefault};
pub use progress::Progress;
pub use register::{Incomplete, PieceError, RegisterAllError, Registered, register_all};
pub(crate) use serve::is_about_room;
pub use transfer::{Moved, TransferError, transfer};

pub use crate::in_flight::{Completion, Mover, Reason, Request};

use std::num::NonZeroUsize;
use std::thread;

/// No more threads make pages or registrations of one range, whatever is asked for: threads that the system cannot
/// start are no help, and the standard library ends the process where one has started that gets no stack.
pub const MOST_THREADS: usize = 64;

/// How a range is gone through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// How many threads register. In [`transfer`] they are helpers besides the calling thread, which
    /// moves: so many where pages have to be made, else one. In [`register_all`] it is one of them.
    ///
    /// At most [`MOST_THREADS`] are started.
    pub threads: NonZeroUsize,
    /// How many pieces [`transfer`]'s helpers may be ahead of the one that is moved next, at least
    /// 1. They are pinned, each leased. `usize::MAX` bounds nothing.
    pub ahead: usize,
    /// How many requests [`transfer`] keeps under way at once, at least 1. `usize::MAX` bounds
    /// nothing.
    pub in_flight: usize,
    /// Whether pages that are not there are made in advance, outside of the device's locks.
    pub prefault: bool,
    /// Whether what is registered is kept from this use on, as by
    /// [`GetRequest::to_keep`](crate::GetRequest::to_keep); otherwise the cache decides, piece by piece.
    pub to_keep: bool,
}

impl Options {
    /// As many helpers as there are processors, four at most, where pages have to be made; eight pieces ahead, four requests in flight, with
    /// prefaulting; the cache decides what it keeps.
    ///
    /// Asking how many processors there are reads the control group's files, some ten microseconds or
    /// more: make it once, not for each transfer.
    pub fn for_transfer() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::with_threads(processors.min(4))
    }

    /// As many threads as there are processors, sixteen at most.
    pub fn for_register_all() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::with_threads(processors.min(16))
    }

    /// How many threads may be started.
    fn bounded_threads(&self) -> usize {
        self.threads.get().min(MOST_THREADS)
    }

    fn with_threads(threads: usize) -> Self {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        Self { threads, ahead: 8, in_flight: 4, prefault: true, to_keep: false }
    }
}
