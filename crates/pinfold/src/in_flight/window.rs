//! Requests that a mover has begun, each with what keeps its memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to begin requests, by the word of the caller that hands them over, and to end the
//! use of what a completed one held.

#![allow(unsafe_code)]

use super::{InUse, Kept, Mover, Reason, Request};
use crate::{AddressRange, GetError};
use pinfold_core::foreign::{self, Foreign};
use std::process;

/// The requests under way. However it ends, it waits for all of them: what they move may be the
/// caller's memory, which is the caller's again when this is gone. But in a forked child they are the parent's, as is the
/// device: it is not asked, and what they hold is leaked.
pub(crate) struct Window<'m, V: Mover<H>, H, T: Kept> {
    mover: &'m mut V,
    under_way: Vec<UnderWay<T>>,
    most: usize,
    requests: usize,
    /// The lowest address that a failed request was to move.
    lowest_failed: usize,
    /// Where the next request begins, if all went well.
    begun_to: usize,
    is_forked: &'m dyn Fn() -> bool,
    /// What stopped it first. An error of a mover may panic as it is dropped: none is held by a function that
    /// another panic may leave.
    reason: Option<Foreign<Reason<V::Error>>>,
    handle: std::marker::PhantomData<fn(H)>,
}

struct UnderWay<T: Kept> {
    number: usize,
    range: AddressRange,
    kept: InUse<T>,
}

/// A request that has ended well; `None` for a completion that was not ours.
type Ended = Option<AddressRange>;

/// Nothing more is to be moved. The [`Window`] has the reason, and [`conclude`](Window::conclude) gives it out.
#[derive(Debug)]
pub(crate) struct Stopped(());

impl<'m, V: Mover<H>, H, T: Kept> Window<'m, V, H, T> {
    /// At most `most` requests under way at once, but one at least.
    ///
    /// # Safety
    ///
    /// What is going to be handed to [`begin`](Self::begin) may be [finished](Kept::finish) by the
    /// mover's completions: the promise about a target of data holds until the window is gone.
    pub(crate) unsafe fn new(
        mover: &'m mut V,
        most: usize,
        is_forked: &'m dyn Fn() -> bool,
    ) -> Self {
        Self {
            mover,
            // Grows with what is really under way: `most` may be as good as no bound.
            under_way: Vec::new(),
            most: most.max(1),
            requests: 0,
            lowest_failed: usize::MAX,
            begun_to: 0,
            is_forked,
            reason: None,
            handle: std::marker::PhantomData,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.under_way.len() >= self.most
    }

    /// How many requests were begun.
    pub(crate) fn requests(&self) -> usize {
        self.requests
    }

    /// Up to which address everything has been moved, if nothing is under way any more.
    pub(crate) fn moved_to(&self) -> usize {
        self.lowest_failed.min(self.begun_to)
    }

    /// Nothing more is to be moved, for this reason if it is the first.
    pub(crate) fn stop(&mut self, reason: Reason<V::Error>) -> Stopped {
        if self.reason.is_none() {
            self.reason = Some(Foreign::new(reason));
        } else {
            foreign::discard(reason);
        }
        Stopped(())
    }

    /// Begins to move `range`, which `kept` keeps.
    ///
    /// # Safety
    ///
    /// `handle` is of a live registration of the whole range, by the mover's device, that stays until `kept` is
    /// finished or dropped, or for good where it is abandoned. The mover may move the memory its way, which stays as
    /// long, or until the window is gone.
    pub(crate) unsafe fn begin(
        &mut self,
        handle: H,
        range: AddressRange,
        kept: T,
    ) -> Result<(), Stopped> {
        let number = self.requests;
        self.begun_to = range.start();
        if (self.is_forked)() {
            kept.abandon();
            return Err(self.leave(range));
        }
        // There is a place for it before the device has it: nothing between the two can fail.
        self.under_way.reserve(1);
        let request = Request { number, handle, range };
        // SAFETY: the caller's promise; numbers go up. `kept` is finished when the mover has reported the number, the
        // device's end or that nothing was begun, and the window is left only then.
        let begun = foreign::call(|| unsafe { self.mover.begin(request) });
        if let Ok(Ok(())) = begun {
            self.under_way.push(UnderWay { number, range, kept: InUse::new(kept) });
            self.requests += 1;
            self.begun_to = range.end();
            return Ok(());
        }
        let stopped =
            begun.map(|begun| begun.map_err(|error| self.stop(Reason::Move { range, error })));
        // SAFETY: the mover promises that the request is not under way; no data is delivered.
        unsafe { kept.finish(false) };
        stopped.unwrap_or_else(|panicked| panicked.resume())
    }

    /// Waits for one completion, and ends the use of what it was for.
    pub(crate) fn complete(&mut self) -> Result<Ended, Stopped> {
        if let Some(range) = self.under_way.first().map(|first| first.range)
            && (self.is_forked)()
        {
            return Err(self.leave(range));
        }
        let done = match self.mover.complete() {
            Ok(done) => done,
            Err(error) => return Err(self.lose_all(error)),
        };
        let place = self.under_way.iter().position(|each| each.number == done.number);
        let Some(ended) = place.map(|place| self.under_way.swap_remove(place)) else {
            foreign::discard(done.outcome);
            return Ok(None);
        };
        let range = ended.range;
        let outcome = done.outcome.map_err(|error| self.fail(range, error));
        // SAFETY: the mover promises that the device is done with it; the promise made to `new`.
        unsafe { ended.kept.end().finish(outcome.is_ok()) };
        outcome.map(|()| Some(range))
    }

    /// Leaves everything to the parent, of which nothing is known here.
    fn leave(&mut self, range: AddressRange) -> Stopped {
        let starts = self.under_way.drain(..).map(|left| left.range.start());
        self.lowest_failed = starts.fold(self.lowest_failed.min(range.start()), usize::min);
        self.stop(Reason::Register { range, error: GetError::Forked })
    }

    fn fail(&mut self, range: AddressRange, error: V::Error) -> Stopped {
        self.lowest_failed = self.lowest_failed.min(range.start());
        self.stop(Reason::Move { range, error })
    }

    /// Waits for everything under way.
    ///
    /// # Errors
    ///
    /// What stopped it first, be it before this; other errors are discarded.
    pub(crate) fn conclude(
        &mut self,
        mut moved: impl FnMut(AddressRange),
    ) -> Result<(), Reason<V::Error>> {
        while !self.is_empty() {
            // A failure is noted.
            if let Ok(Some(range)) = self.complete() {
                moved(range);
            }
        }
        self.reason.take().and_then(|mut reason| reason.take()).map_or(Ok(()), Err)
    }

    /// The device is gone, and every request with it.
    ///
    /// The end of a lease may call the registrar, which may panic: the others end all the same, because the
    /// mover must not be asked again.
    fn lose_all(&mut self, error: V::Error) -> Stopped {
        let stopped = self.stop(Reason::DeviceGone(error));
        let mut panicked = None;
        while let Some(lost) = self.under_way.pop() {
            self.lowest_failed = self.lowest_failed.min(lost.range.start());
            // SAFETY: the mover promises that nothing is under way any more.
            let ended = foreign::call(|| unsafe { lost.kept.end().finish(false) });
            panicked = panicked.or(ended.err());
        }
        if let Some(panicked) = panicked {
            panicked.resume_unless_unwinding();
        }
        stopped
    }
}

impl<V: Mover<H>, H, T: Kept> Drop for Window<'_, V, H, T> {
    /// Waits for what is still under way: a panic unwinds, or there was an error.
    fn drop(&mut self) {
        let mut panics = 0;
        while !self.is_empty() {
            let before = self.under_way.len();
            match foreign::call(|| self.complete().map(drop)) {
                // The destructor of what a completed request held may panic as well.
                Err(_) if self.under_way.len() < before => panics = 0,
                Err(_) if panics > 0 => process::abort(),
                Err(_) => panics += 1,
                Ok(_) => panics = 0,
            }
        }
    }
}
