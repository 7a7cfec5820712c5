//! What moves registered memory: a ring, a queue pair, a socket.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare the mover, on whose promise memory depends, and which depends on its
//! caller's.

#![allow(unsafe_code)]

use crate::{AddressRange, GetError, RangeError};

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
