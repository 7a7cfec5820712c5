//! Requests that a mover has begun, each with what keeps its memory.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to begin requests, by the word of the caller that hands them over, and to end the
//! use of what a completed one held.

#![allow(unsafe_code)]

use super::{InUse, Kept, Mover, Reason, Request};
use crate::AddressRange;
use pinfold_core::foreign;
use std::process;

/// The requests under way. However it ends, it waits for all of them: what they move may be the
/// caller's memory, which is the caller's again when this is gone.
pub(crate) struct Window<'m, V: Mover<H>, H, T: Kept> {
    mover: &'m mut V,
    under_way: Vec<UnderWay<T>>,
    most: usize,
    requests: usize,
    /// The lowest address that a failed request was to move.
    lowest_failed: usize,
    /// Where the next request begins, if all went well.
    begun_to: usize,
    handle: std::marker::PhantomData<fn(H)>,
}

struct UnderWay<T: Kept> {
    number: usize,
    range: AddressRange,
    kept: InUse<T>,
}

/// A request that has ended well; `None` for a completion that was not ours.
type Ended = Option<AddressRange>;

impl<'m, V: Mover<H>, H, T: Kept> Window<'m, V, H, T> {
    /// At most `most` requests under way at once, but one at least.
    ///
    /// # Safety
    ///
    /// What is going to be handed to [`begin`](Self::begin) may be [finished](Kept::finish) by the
    /// mover's completions: the promise about a target of data holds until the window is gone.
    pub(crate) unsafe fn new(mover: &'m mut V, most: usize) -> Self {
        Self {
            mover,
            // Grows with what is really under way: `most` may be as good as no bound.
            under_way: Vec::new(),
            most: most.max(1),
            requests: 0,
            lowest_failed: usize::MAX,
            begun_to: 0,
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
    ) -> Result<(), Reason<V::Error>> {
        let number = self.requests;
        self.begun_to = range.start();
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
        // SAFETY: the mover promises that the request is not under way; no data is delivered.
        unsafe { kept.finish(false) };
        match begun {
            Ok(begun) => begun.map_err(|error| Reason::Move { range, error }),
            Err(panicked) => panicked.resume(),
        }
    }

    /// Waits for one completion, and ends the use of what it was for.
    pub(crate) fn complete(&mut self) -> Result<Ended, Reason<V::Error>> {
        let done = match self.mover.complete() {
            Ok(done) => done,
            Err(error) => return Err(self.lose_all(error)),
        };
        let place = self.under_way.iter().position(|each| each.number == done.number);
        let Some(ended) = place.map(|place| self.under_way.swap_remove(place)) else {
            return Ok(None);
        };
        let range = ended.range;
        if done.outcome.is_err() {
            self.lowest_failed = self.lowest_failed.min(range.start());
        }
        // SAFETY: the mover promises that the device is done with it; the promise made to `new`.
        unsafe { ended.kept.end().finish(done.outcome.is_ok()) };
        done.outcome.map(|()| Some(range)).map_err(|error| Reason::Move { range, error })
    }

    /// Waits for everything under way; the first failure, if there is one.
    pub(crate) fn complete_all(
        &mut self,
        mut moved: impl FnMut(AddressRange),
    ) -> Result<(), Reason<V::Error>> {
        let mut outcome = Ok(());
        while !self.is_empty() {
            let completed = self.complete().map(|ended| ended.map_or((), &mut moved));
            outcome = outcome.and(completed);
        }
        outcome
    }

    /// The device is gone, and every request with it.
    ///
    /// The end of a lease may call the registrar, which may panic: the others end all the same, because the
    /// mover must not be asked again.
    fn lose_all(&mut self, error: V::Error) -> Reason<V::Error> {
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
        Reason::DeviceGone(error)
    }
}

impl<V: Mover<H>, H, T: Kept> Drop for Window<'_, V, H, T> {
    /// Waits for what is still under way: a panic unwinds, or there was an error.
    fn drop(&mut self) {
        let mut panics = 0;
        while !self.is_empty() {
            let before = self.under_way.len();
            match foreign::call(|| drop(self.complete())) {
                // The destructor of what a completed request held may panic as well.
                Err(_) if self.under_way.len() < before => panics = 0,
                Err(_) if panics > 0 => process::abort(),
                Err(_) => panics += 1,
                Ok(()) => panics = 0,
            }
        }
    }
}
