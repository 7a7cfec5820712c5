//! What a device may be using, and what keeps it: one owner for pieces, landing, pools and the
//! planner.
//!
//! Two types, and every way to end them keeps memory that a device may still touch:
//!
//! | | it is | what ends it | dropped, by a panic too | forgotten |
//! |---|---|---|---|---|
//! | [`InUse`] | one thing handed to a device | the caller's word that the device is done | **leaks**: [`Kept::abandon`] leaves it to the device for good | leaks |
//! | [`Window`] | requests that a [`Mover`] has begun | their completions | **waits** for every completion | cannot be: it never leaves the function that made it |
//!
//! A window waits, because the memory may be its caller's, which frees it as soon as the function is
//! left, however it is left: such memory cannot be leaked. A guard that the program holds cannot wait,
//! because nothing tells it of the end: so it leaks.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare how a use ends, which only the caller can know, and to take the thing out of a
//! guard that is not dropped; to declare the mover, on whose promise memory depends, and which depends on its caller's; and
//! to begin requests, by the word of the caller that hands them over, and end the use of what a completed one held.

#![allow(unsafe_code)]

use crate::{AddressRange, GetError, RangeError};
use pinfold_core::foreign::{self, Foreign};
use pinfold_core::{Lease, Monitor, Registrar};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::process;

/// What can be handed to a device.
pub(crate) trait Kept: Sized {
    /// The guard ended and nothing said that the device is done: whatever the device may still touch
    /// stays as it is for good, and is given to no other use.
    fn abandon(self);

    /// The device is done; `moved` if it moved everything.
    ///
    /// # Safety
    ///
    /// No device uses it any more. If data was to be delivered from it, the target is the caller's to
    /// write.
    unsafe fn finish(self, moved: bool) {
        let _ = moved;
    }
}

/// A lease that is leaked keeps its registration until the cache is dropped.
impl<R: Registrar, M: Monitor> Kept for Lease<'_, R, M> {
    fn abandon(self) {
        std::mem::forget(self);
    }
}

/// Something that a device may be using. Dropped, it is [abandoned](Kept::abandon).
pub(crate) struct InUse<T: Kept>(ManuallyDrop<T>);

impl<T: Kept> InUse<T> {
    /// From now on a device may use it.
    pub(crate) const fn new(kept: T) -> Self {
        Self(ManuallyDrop::new(kept))
    }

    /// No device uses it any more.
    ///
    /// # Safety
    ///
    /// That is so: every request that names it has ended, or was never submitted.
    pub(crate) unsafe fn end(self) -> T {
        let mut guard = ManuallyDrop::new(self);
        // SAFETY: `guard` is not dropped, and not used again.
        unsafe { ManuallyDrop::take(&mut guard.0) }
    }
}

impl<T: Kept> Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Kept> DerefMut for InUse<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Kept> Drop for InUse<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, in the destructor.
        unsafe { ManuallyDrop::take(&mut self.0) }.abandon();
    }
}

// --- movers --------------------------------------------------------------------------------------

/// What moves registered memory: a ring, a queue pair, a socket.
///
/// # Safety
///
/// Memory is released when a mover reports that requests have ended. So:
///
/// - [`complete`](Self::complete) reports a request's number only when the device no longer touches
///   that request's bytes. A completion of another user of the same device has a number that is not
///   under way.
/// - When `complete` returns an error, no request is under way any more.
/// - When [`begin`](Self::begin) returns an error or panics, its request is not under way.
/// - When `complete` panics, what is under way is what it was before: it is called again. If it panics
///   twice in a row, nothing can tell any more when the device is done, and the process is aborted.
pub unsafe trait Mover<H> {
    /// Why a request failed.
    type Error;

    /// Begins to move one part of the range, in order of address; it may go on in the background.
    ///
    /// Only an unsafe block may call it:
    ///
    /// ```compile_fail,E0133
    /// # use pinfold::pieces::{Mover, Request};
    /// # fn promises_nothing<V: Mover<u32>>(mover: &mut V, request: Request<u32>) {
    /// let _begun = mover.begin(request);
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Whatever the device says; then nothing is under way for this request.
    ///
    /// # Safety
    ///
    /// - The handle is of a live registration, by this mover's device, of the whole range, and its number is of no
    ///   request under way.
    /// - The mover may move the bytes its way: whatever it does with them, reading or writing, is the caller's to allow.
    /// - The registration and the memory stay until `complete` has reported the number or returned an error, or this
    ///   call has returned an error or panicked.
    unsafe fn begin(&mut self, request: Request<H>) -> Result<(), Self::Error>;

    /// Waits until one of the requests under way is done, in any order. Called only when there are
    /// some, also while a panic unwinds.
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
    /// [`Progress::cancel`](crate::pieces::Progress::cancel) was called.
    Cancelled,
}

// --- windows -------------------------------------------------------------------------------------

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
