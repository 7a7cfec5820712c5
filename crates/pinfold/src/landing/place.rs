//! One message on its way: announced, remapped or not, arrived, landed. Each state is a type.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to write into targets and to take pages out of them, by the word that
//! came with [`Zone::ask`](super::Zone::ask), to let arrived bytes be read, and for the caller's word
//! that a device is done.

#![allow(unsafe_code)]
// A refusal gives the message back, which is as large as the message.
#![allow(clippy::result_large_err)]

use super::method::{LandError, Landed, Method};
use super::slab::SlabPages;
use super::split::{Split, same_part};
use super::zone::{AskError, Exchange, Held, TargetWatch, Zone, is_replaced};
use crate::in_flight::{InUse, Kept};
use crate::{AddressRange, GetError, Monitor, Registrar};
use pinfold_core::foreign;
use pinfold_kernel::{mapping::OwnedMapping, memory, process::page_bytes};
use std::{fmt, mem, process};

/// What did not land, as it was before.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct RemapRefused<S> {
    /// The message, to be landed elsewhere, read in place, or dropped.
    pub state: S,
    /// Why.
    pub error: LandError,
}

impl<S> fmt::Debug for RemapRefused<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

/// What all states have.
struct Message<'z, 'c, R: Registrar, M: Monitor, P: SlabPages> {
    held: Held<'z, 'c, R, M, P>,
    handle: R::Handle,
    place: AddressRange,
    target: AddressRange,
    watched: TargetWatch<'c, R, M>,
    /// Why nothing lands in the target any more, whatever is known of its changes: a part of it is unmapped, or its pages were
    /// taken out.
    refusal: Option<LandError>,
}

/// A place in registered pages, to be announced to the sender.
///
/// Dropped, it gives its pages up for the device to finish with: the next use of the slot makes new
/// ones. Their registration, which a request that still waits in a queue may name, is never used again, and
/// stays within the cache's budget until the cache goes: a caller that knows that no request names the place says
/// so ([`arrived`](Self::arrived)) and drops what that gives. Forgotten (`mem::forget`), it keeps its slot,
/// and the zone's pages are leaked.
#[must_use = "a place that is dropped gives its pages up"]
pub struct Place<'z, 'c, R: Registrar, M: Monitor, P: SlabPages>(InUse<Message<'z, 'c, R, M, P>>);

/// A place whose whole pages the target has already, while the device still writes to them.
///
/// Dropped, it takes those pages out of the target, which reads as zeros there from then on, and leaves
/// them to the device, with their registration, as [`Place`] does; the ragged ends are given up. A target of which a change
/// was reported meanwhile is left alone: the pages are where the program has moved them. A report of what has not happened
/// (a call between a [`Feed`](crate::monitor::Feed)'s two words that failed, a word to the feed that everything changes,
/// `MADV_FREE`, an `munmap` or `mmap` that fails) leaves
/// them in the target, and so the target to the device: prevent that, or say `arrived` before.
///
/// If it is unknown whether it has changed, or if the kernel takes pages out of it by no means, the process is
/// aborted: the target would be written without its owner's knowledge. ([`vouch`](Self::vouch) before, where you know.)
/// It is unknown when the monitor is lost. Userfaultfd and the feed mark the target when they log a change of it
/// ([`Monitor::mark_changes`]), for 64 targets of the process at a time (128 where they are whole pages). Beyond them it is
/// unknown, too, when the monitor has said meanwhile that everything may have changed, as userfaultfd does where changes of watched
/// memory follow one another without a pause; and beyond them, and by eBPF, when more than 4,096 changes of watched memory,
/// whichever, were reported meanwhile without the cache having read any. It reads them on the thread that [`cache`](crate::cache) starts, and with each call that
/// finds the monitor's log has grown: a `get`, [`Cache::check`](crate::Cache::check), an [`ask`](Zone::ask). While such a
/// `Remapped` lives, have such a call made in time: a thread that discards page after page makes so many changes in some
/// tens of milliseconds, for which a busy machine may not run the cache's thread.
///
/// Refused by [`arrived`](Self::arrived), it leaves the target alone, and its slot goes back to the zone: no device writes to it.
/// Forgotten, it leaves the target to the device for good.
#[must_use = "the ragged ends land when the data has arrived"]
pub struct Remapped<'z, 'c, R: Registrar, M: Monitor, P: SlabPages>(
    InUse<Exchanged<'z, 'c, R, M, P>>,
);

/// A message whose target has the pages that the device writes to.
struct Exchanged<'z, 'c, R: Registrar, M: Monitor, P: SlabPages> {
    message: Message<'z, 'c, R, M, P>,
    left: Left,
    /// The part of the target that may have them, as long as the device may write to them.
    given: Option<AddressRange>,
    /// No device writes to the slot any more, by the word given to `arrived`.
    has_arrived: bool,
}

impl<R: Registrar, M: Monitor, P: SlabPages> Kept for Message<'_, '_, R, M, P> {
    fn abandon(self) {
        self.held.abandon();
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Kept for Exchanged<'_, '_, R, M, P> {
    fn abandon(self) {
        let Self { message, given, has_arrived, .. } = self;
        if has_arrived && !message.held.zone.is_forked() {
            return message.end_exchanged();
        }
        // However this ends, the device has the slot.
        let message = InUse::new(message);
        if let Some(given) = given
            && message.still_has(given).unwrap_or_else(|Unknown| process::abort())
        {
            // SAFETY: the target is the message's, by the word that came with it, its content undefined
            // since it was remapped, and it has not changed, or the caller prevents that.
            if unsafe { message.held.zone.take_pages_out(given) }.is_err() {
                process::abort();
            }
        }
    }
}

/// The monitor is lost, has lost count or panics: the pages may be the target's, to which a device writes, or whatever
/// the program has there now.
struct Unknown;

/// What is left to copy of a target whose pages were exchanged.
#[derive(Clone, Copy, Debug)]
struct Left {
    parts: [Option<AddressRange>; 2],
    /// Whether any page has changed hands.
    has_moved: bool,
    /// Why that is more than the ragged ends.
    because: Option<LandError>,
}

impl Left {
    /// Why a part of the target is unmapped, if it is.
    fn unmapped(&self) -> Option<LandError> {
        self.because.filter(|error| matches!(error, LandError::TargetUnmapped { .. }))
    }
}

/// A place with its data, which no device writes any more.
#[must_use = "the data has not landed yet"]
pub struct Arrived<'z, 'c, R: Registrar, M: Monitor, P: SlabPages>(Message<'z, 'c, R, M, P>);

impl<'c, R: Registrar, M: Monitor, P: SlabPages> Zone<'c, R, M, P> {
    /// A registered place for `length` bytes that are to get to `target`.
    ///
    /// Costs a look at the list of slots and, with [`ZoneOptions::watch_targets`](super::ZoneOptions::watch_targets), at the monitor; a
    /// registration if the slot was exchanged and [`refill`](Self::refill) was not called since.
    ///
    /// # Errors
    ///
    /// [`AskError`]; in a forked child, [`GetError::Forked`] in it.
    ///
    /// # Safety
    ///
    /// The bytes of the target are the caller's, to be written and to be moved to other pages, until
    /// the place has landed or its destructor has returned: they are not borrowed, and no device is using
    /// them. So they are never the caller's again if the place is forgotten. A change of their mapping
    /// whose call begins after this one has returned, and returns before a method of the place is called, its destructor included,
    /// is found out if targets are watched and the monitor covers this one, which [`Place::is_watched`] tells; others the caller prevents. A
    /// monitor may cover no target for as long as changes of other watched memory follow one another without a pause: after
    /// some 250 ms of that the place is not watched; nor is it where a thread stands still as it reports a change to a `Feed`, after
    /// 20 ms at most; others that are under way while [`remap`](Place::remap) runs the caller prevents, too. Where a remapped target has changed, what was its pages is the device's until the transfer has ended.
    ///
    /// No change of the target is reported that does not happen, while it may have the place's pages (from
    /// [`Place::remap`] until the transfer has ended): not between a `Feed`'s two words for a call that fails, not by a feed's
    /// word that everything changes, not by [`Best::unwatch`](crate::monitor::Best::unwatch) of it, though these are safe calls; nor by
    /// the kernel's word of `MADV_FREE`, which leaves pinned pages where they are, or of a `munmap` or `mmap` that fails (6.12). A
    /// [`Remapped`] that is dropped takes its pages out of a target only if no change was reported: otherwise they stay
    /// there, and the device may go on writing to the target. A `Remapped` that was `arrived` before is not concerned.
    ///
    /// Attributes of the target's mapping (`MADV_DONTFORK`, a memory policy, a protection key, `mlock`) are
    /// none of the exchanged pages': a caller that relies on any has the data copied.
    pub unsafe fn ask(
        &self,
        target: *mut u8,
        length: usize,
    ) -> Result<Place<'_, 'c, R, M, P>, AskError> {
        let target =
            AddressRange::new(target.expose_provenance(), length).map_err(AskError::Range)?;
        if self.is_forked() {
            return Err(AskError::Register(GetError::Forked));
        }
        let (held, handle, place) = self.hold(target)?;
        Ok(Place::new(held, handle, place, target, self.watch(target, None).at_first()))
    }

    /// A message that no device sends, as if it had arrived: for `length` bytes from `offset` of memory of the library's own,
    /// private, readable and writable, as [`OwnedMapping::new`] maps it.
    pub(super) fn arrived_in<'z>(
        &'z self,
        target: &'z mut OwnedMapping,
        offset: usize,
        length: usize,
    ) -> Result<Arrived<'z, 'c, R, M, P>, AskError> {
        let start = target.start().as_ptr().wrapping_add(offset);
        let part = AddressRange::new(start.addr(), length).map_err(AskError::Range)?;
        if !target.range().is_some_and(|whole| whole.contains(&part)) {
            return Err(AskError::NoSlot { length, free: 0 });
        }
        // SAFETY: the target lies in the mapping, which nothing else touches while it is lent; where the message is forgotten,
        // nothing touches it behind that either. No device is told of the place.
        unsafe { self.ask(start, length).map(|place| place.arrived()) }
    }
}

impl<'z, 'c, R: Registrar, M: Monitor, P: SlabPages> Place<'z, 'c, R, M, P> {
    pub(super) fn new(
        held: Held<'z, 'c, R, M, P>,
        handle: R::Handle,
        place: AddressRange,
        target: AddressRange,
        watched: TargetWatch<'c, R, M>,
    ) -> Self {
        Self(InUse::new(Message { held, handle, place, target, watched, refusal: None }))
    }

    /// Where the device is to write: as long as the target.
    pub fn range(&self) -> AddressRange {
        self.0.place
    }

    /// The registration that holds [`range`](Self::range).
    pub fn handle(&self) -> R::Handle {
        self.0.handle
    }

    /// Where the data is to get.
    pub fn target(&self) -> AddressRange {
        self.0.target
    }

    /// Whether a change of the target from now on will be found out; if not, it is the caller's to
    /// prevent.
    pub fn is_watched(&self) -> bool {
        self.0.watched.is_watched()
    }

    /// What [`Arrived::land`] would do, and [`remap`](Self::remap) could do now.
    pub fn method(&self) -> Method {
        self.0.method()
    }

    /// Gives the place's whole pages to the target, now, while the data flies; the device goes on
    /// writing to them by [`range`](Self::range) and [`handle`](Self::handle). The target's content is
    /// lost, and undefined until the data has arrived.
    ///
    /// A target that is watched is watched anew, which takes up to some seconds where changes of other watched memory follow one
    /// another without a pause, and is refused where [`ask`](Zone::ask) finds a target not watched. A change of the target while
    /// this runs is not found out: the caller prevents it. A monitor that panics then ends the place here: the pages are taken out of the target,
    /// which reads as zeros there.
    ///
    /// # Errors
    ///
    /// [`RemapRefused`] with the place: what has arrived can still be copied. Nothing has changed; with
    /// [`LandError::TargetUnwatched`] the target reads as zeros where it had the pages meanwhile.
    pub fn remap(self) -> Result<Remapped<'z, 'c, R, M, P>, RemapRefused<Self>> {
        // SAFETY: it goes into another guard at once, which stands for more: a panic on the way finds
        // pages in the target that the device writes to.
        let message = unsafe { self.0.end() };
        let left = Left { parts: [None; 2], has_moved: false, because: None };
        let mut exchanged =
            InUse::new(Exchanged { message, left, given: None, has_arrived: false });
        match exchanged.remap() {
            Ok(()) => Ok(Remapped(exchanged)),
            Err(error) => {
                // SAFETY: it goes back into its guard at once.
                let message = unsafe { exchanged.end() }.message;
                Err(RemapRefused { state: Self(InUse::new(message)), error })
            }
        }
    }

    /// Changes of the target are not looked for any more.
    ///
    /// # Safety
    ///
    /// The target is still mapped where it was asked for, and still the caller's.
    pub unsafe fn vouch(mut self) -> Self {
        self.0.watched = TargetWatch::Unwatched;
        self
    }

    /// The data is there.
    ///
    /// # Safety
    ///
    /// No device writes to the place any more: the transfer is complete, or was never begun.
    pub unsafe fn arrived(self) -> Arrived<'z, 'c, R, M, P> {
        // SAFETY: the caller's promise.
        Arrived(unsafe { self.0.end() })
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Remapped<'_, '_, R, M, P> {
    /// Where the device is to write, still.
    pub fn range(&self) -> AddressRange {
        self.0.message.place
    }

    /// The registration that holds [`range`](Self::range), still.
    pub fn handle(&self) -> R::Handle {
        self.0.message.handle
    }

    /// Whether a change of the target from now on will be found out; if not, it is the caller's to
    /// prevent. Where it was watched before it was remapped, and the kernel moves its pages neither under a watch nor back to the
    /// place, it has them no more, and `arrived` is refused ([`LandError::TargetUnwatched`]).
    pub fn is_watched(&self) -> bool {
        self.0.message.watched.is_watched()
    }

    /// Changes of the target are not looked for any more.
    ///
    /// # Safety
    ///
    /// The target is still mapped where it was asked for, and still the caller's.
    pub unsafe fn vouch(mut self) -> Self {
        self.0.message.watched = TargetWatch::Unwatched;
        self
    }

    /// The data is there: what is left to do is to copy the ragged ends.
    ///
    /// # Errors
    ///
    /// [`RemapRefused`] in a forked child, and if the target has changed since it was remapped: the ends were not copied, and can
    /// be [read](Self::left); the pages are where the program has moved them, or gone with their mapping.
    ///
    /// # Safety
    ///
    /// No device writes to the place any more: the transfer is complete, or was never begun.
    pub unsafe fn arrived(mut self) -> Result<Landed, RemapRefused<Self>> {
        // The device is done: its pages may stay wherever they are.
        (self.0.given, self.0.has_arrived) = (None, true);
        if let Err(error) = self.0.message.has_same_target() {
            return Err(RemapRefused { state: self, error });
        }
        // SAFETY: the caller's promise.
        let Exchanged { message, left, .. } = unsafe { self.0.end() };
        let landed = message.copy_left(left);
        message.end_exchanged();
        Ok(landed)
    }

    /// Behind a refused [`arrived`](Self::arrived): each part of the target that the data has not got to, with that data, which
    /// is in the place. Nothing before, because a device may write it. Behind [`LandError::TargetUnwatched`] the whole pages are
    /// lost, and none of these.
    pub fn left(&self) -> impl Iterator<Item = (AddressRange, &[u8])> {
        let Exchanged { message, left, has_arrived, .. } = &*self.0;
        let parts = left.parts.into_iter().flatten().filter(|_| *has_arrived);
        parts.map(|part| {
            let from = same_part(part, message.target, message.place);
            // SAFETY: the place is held, this part of it has its pages, and by the word given to `arrived` they are not
            // written.
            (part, unsafe { memory::bytes(from) })
        })
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Arrived<'_, '_, R, M, P> {
    /// The data, in place: that of [`target`](Self::target).
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the place is held, mapped, and by the word given to `arrived` not written.
        unsafe { memory::bytes(self.0.place) }
    }

    /// Where the data is to get. Behind [`LandError::TargetUnmapped`], what has not got there.
    pub fn target(&self) -> AddressRange {
        self.0.target
    }

    /// Changes of the target are not looked for any more.
    ///
    /// # Safety
    ///
    /// The target is still mapped where it was asked for, and still the caller's.
    pub unsafe fn vouch(self) -> Self {
        Self(Message { watched: TargetWatch::Unwatched, ..self.0 })
    }

    /// Lands the data by the method that the zone's crossover names for its length, and by copying
    /// where that cannot be: [`Landed`] tells.
    ///
    /// # Errors
    ///
    /// [`RemapRefused`] with the data if the target has changed, and in a forked child.
    pub fn land(self) -> Result<Landed, RemapRefused<Self>> {
        let method = self.0.method();
        match self.land_by(method) {
            Err(RemapRefused { state, error })
                if !matches!(
                    error,
                    LandError::TargetChanged | LandError::TargetUnmapped { .. } | LandError::Forked
                ) =>
            {
                let copied = state.land_by(Method::Copy)?;
                Ok(Landed { copied_because: Some(error), ..copied })
            }
            outcome => outcome,
        }
    }

    /// Lands the data by `method` or not at all.
    ///
    /// # Errors
    ///
    /// [`RemapRefused`] with the data.
    pub fn land_by(self, method: Method) -> Result<Landed, RemapRefused<Self>> {
        // After a panic on the way it is unknown which pages the slot has.
        let message = InUse::new(self.0);
        let left = message.give_to_target(method);
        // SAFETY: no device uses the place since it arrived.
        let mut message = unsafe { message.end() };
        match left {
            Ok(left) => {
                if let Some(error) = left.unmapped() {
                    message.refusal = Some(error);
                    message.keep_rest(left);
                    message.held.unregister();
                    return Err(RemapRefused { state: Self(message), error });
                }
                let landed = message.copy_left(left);
                if method != Method::Copy {
                    message.end_exchanged();
                }
                Ok(landed)
            }
            Err(error) => Err(RemapRefused { state: Self(message), error }),
        }
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Message<'_, '_, R, M, P> {
    fn method(&self) -> Method {
        self.held.zone.options().crossover.choose(self.target.len())
    }

    /// Whether the target is what it was when its place was asked for, as far as that is looked for.
    fn has_same_target(&self) -> Result<(), LandError> {
        let zone = self.held.zone;
        if zone.is_forked() {
            return Err(LandError::Forked);
        }
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        match self.watched.has_changed(self.target) {
            Some(false) => Ok(()),
            Some(true) | None => Err(LandError::TargetChanged),
        }
    }

    /// Whether the pages that were given to the target stand there still. Not in a forked child, which has
    /// copies. Asked by a destructor, which may run because of a panic.
    ///
    /// They are private memory: where the target is anything else they have gone, whatever the monitor knows.
    fn still_has(&self, given: AddressRange) -> Result<bool, Unknown> {
        let has_gone = || Some(self.held.zone.is_forked() || self.watched.has_changed(given)?);
        match foreign::call(has_gone).ok().flatten() {
            Some(has_gone) => Ok(!has_gone),
            None if is_replaced(given) => Ok(false),
            None => Err(Unknown),
        }
    }

    /// Moves the whole pages by `method`, and names the parts of the target that are left to copy.
    fn give_to_target(&self, method: Method) -> Result<Left, LandError> {
        if method == Method::Copy {
            self.has_same_target()?;
            let parts = [Some(self.target), None];
            return Ok(Left { parts, has_moved: false, because: None });
        }
        let exchange = self.exchange()?;
        Ok(self.give(&exchange, method == Method::Exchange))
    }

    /// What is to be moved, while nothing has changed yet.
    fn exchange(&self) -> Result<Exchange, LandError> {
        self.has_same_target()?;
        let split = Split::new(self.target, page_bytes());
        let to = split.pages.ok_or(LandError::NoWholePage)?;
        let from = same_part(to, self.target, self.place);
        if !from.start().is_multiple_of(page_bytes()) {
            return Err(LandError::NoWholePage);
        }
        self.held.zone.exchange(from, to)
    }

    /// Moves the whole pages, and names the parts of the target that are left to copy.
    fn give(&self, exchange: &Exchange, kept: bool) -> Left {
        // SAFETY: the place is held; the target came with the word that it may be given pages.
        let given = unsafe { self.held.zone.give_pages(exchange, kept) };
        let head = Split::new(self.target, page_bytes()).head;
        let rest = AddressRange::between(exchange.to.start() + given.bytes, self.target.end());
        Left { parts: [head, rest], has_moved: given.bytes > 0, because: given.error }
    }

    /// Copies what is `left` of the target from its place.
    fn copy_left(&self, left: Left) -> Landed {
        let copied = left.parts.into_iter().flatten().map(|part| {
            let from = same_part(part, self.target, self.place);
            // SAFETY: the place is held and not written; the target came with the word that
            // its bytes are the caller's to be written, and has just been seen not to have changed,
            // or the caller prevents that.
            unsafe { memory::copy(from, part) };
            part.len()
        });
        let copied_bytes = copied.sum();
        let moved_bytes = self.target.len() - copied_bytes;
        Landed { moved_bytes, copied_bytes, copied_because: left.because }
    }

    /// Of a message that cannot land as a whole the rest is kept, where pages of it have come into the target: what they have left
    /// of the place may be unmapped, and another mapping's by now.
    fn keep_rest(&mut self, left: Left) {
        if let [head, Some(rest)] = left.parts
            && left.has_moved
        {
            self.copy_left(Left { parts: [head, None], ..left });
            self.place = same_part(rest, self.target, self.place);
            self.target = rest;
        }
    }

    /// The slot has other pages now.
    fn end_exchanged(mut self) {
        self.held.unregister();
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> Exchanged<'_, '_, R, M, P> {
    /// Exchanges while data flies. From then on changes of the target are told, our own left out.
    ///
    /// Until they are told again the target is taken for unchanged, which its caller sees to while this runs: a panic
    /// on the way takes the pages out, and does not take our own change, which the monitor reports, for the program's.
    fn remap(&mut self) -> Result<(), LandError> {
        let exchange = self.message.exchange()?;
        let watched_before = mem::replace(&mut self.message.watched, TargetWatch::Unwatched);
        // From here on pages of the slot may be in the target.
        self.given = Some(exchange.to);
        let left = self.message.give(&exchange, true);
        let end = left.parts[1].map_or(self.message.target.end(), |rest| rest.start());
        self.given =
            self.given.and_then(|whole| AddressRange::between(whole.start(), end.min(whole.end())));
        self.left = left;
        self.message.refusal = left.unmapped();
        let Message { held, target, watched, .. } = &mut self.message;
        let given = self.given;
        *watched = watched_before.renewed(|| held.zone.watch(*target, given));
        match given {
            Some(given) if self.message.watched.is_lost() => self.undo(&exchange, given),
            _ => Ok(()),
        }
    }

    /// Of a target that cannot be watched any more the pages go back to their slot, while it is known that they are there. Where
    /// they cannot, they are taken out, and nothing lands any more.
    fn undo(&mut self, exchange: &Exchange, given: AddressRange) -> Result<(), LandError> {
        let zone = self.message.held.zone;
        if zone.is_forked() {
            return Err(LandError::Forked);
        }
        // For a panic on the way, as in `remap`.
        let lost = mem::replace(&mut self.message.watched, TargetWatch::Unwatched);
        // SAFETY: nothing has changed since the exchange, which its caller sees to while this runs. The slot has what was the
        // target's, whose content is lost.
        let is_back = unsafe { zone.move_back(exchange, given) };
        // SAFETY: the target came with the promise, its content is lost, and nothing has changed, as above.
        if is_back || unsafe { zone.take_pages_out(given) }.is_ok() {
            self.given = None;
        }
        self.message.watched = lost;
        if is_back {
            return Err(LandError::TargetUnwatched);
        }
        self.message.refusal.get_or_insert(LandError::TargetUnwatched);
        Ok(())
    }
}

/// Says what all states have.
fn describe<R: Registrar, M: Monitor, P: SlabPages>(
    f: &mut fmt::Formatter<'_>,
    state: &str,
    message: &Message<'_, '_, R, M, P>,
) -> fmt::Result {
    let mut all = f.debug_struct(state);
    all.field("place", &message.place).field("target", &message.target);
    all.field("handle", &message.handle).field("watched", &message.watched.is_watched()).finish()
}

impl<R: Registrar, M: Monitor, P: SlabPages> fmt::Debug for Place<'_, '_, R, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe(f, "Place", &self.0)
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> fmt::Debug for Remapped<'_, '_, R, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe(f, "Remapped", &self.0.message)
    }
}

impl<R: Registrar, M: Monitor, P: SlabPages> fmt::Debug for Arrived<'_, '_, R, M, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe(f, "Arrived", &self.0)
    }
}
