//! Data that arrives through the landing zone, and what becomes of its target meanwhile.
//!
//! The target is registered with a cache before, so that pages that change hands under that
//! registration would be noticed: what is sent afterwards must be what has arrived.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the word that a target is the caller's and that a device is
//! done. A target is a slot's memory, which belongs to one thread, is touched by address only and
//! is changed by no other thread; that the transfer has ended is known because it was waited for.

#![allow(unsafe_code)]
// What does not land is given back, as large as it is.
#![allow(clippy::result_large_err, clippy::large_enum_variant)]

use super::program::{Arrival, Way, Window};
use super::tally::{Judged, WrongBytes};
use super::worker::Worker;
use crate::change::{Mutation, Part, Specimen, difference};
use crate::port::{AnyMonitor, PortRegistrar, Refusal};
use crate::races::{Stop, joined, send_wrong, start};
use pinfold::AddressRange;
use pinfold::landing::{
    Arrived, Crossover, LandError, Landed, Method, Place, RemapRefused, Remapped, Slab, ZoneOptions,
};
use std::io;
use std::thread;

/// The longest message that arrives, in bytes; with its ragged ends no longer than a lease.
const MESSAGE_BYTES: usize = 256 << 10;

/// From which length on pages are exchanged where the zone may choose: so that it chooses both.
const CHOSEN_EXCHANGES_FROM: usize = 64 << 10;

/// Which cache the landing zone's slots are registered with.
const ZONE_PORT: usize = 0;

/// Landing pages for `threads` threads.
pub(super) fn pages(threads: usize) -> Option<Slab> {
    Slab::new(MESSAGE_BYTES, threads.min(16) + 1, false).ok()
}

/// What a zone of the torture is like.
pub(super) fn options() -> ZoneOptions {
    ZoneOptions {
        crossover: Crossover::exchange_from(CHOSEN_EXCHANGES_FROM),
        ..ZoneOptions::default()
    }
}

/// A message, its target's pages exchanged or not.
enum Message<'z, 'c, P> {
    Unmoved(P),
    Remapped(Remapped<'z, 'c, PortRegistrar, AnyMonitor, Slab>),
}

/// A message whose data may be on its way.
type Flying<'z, 'c> = Message<'z, 'c, Place<'z, 'c, PortRegistrar, AnyMonitor, Slab>>;

/// A message whose data is there.
type There<'z, 'c> = Message<'z, 'c, Arrived<'z, 'c, PortRegistrar, AnyMonitor, Slab>>;

impl<'z, 'c> Flying<'z, 'c> {
    fn new(place: Place<'z, 'c, PortRegistrar, AnyMonitor, Slab>, way: Way) -> Self {
        if way != Way::Early {
            return Self::Unmoved(place);
        }
        match place.remap() {
            Ok(remapped) => Self::Remapped(remapped),
            Err(RemapRefused { state, .. }) => Self::Unmoved(state),
        }
    }

    fn is_watched(&self) -> bool {
        match self {
            Self::Unmoved(place) => place.is_watched(),
            Self::Remapped(remapped) => remapped.is_watched(),
        }
    }

    /// # Safety
    ///
    /// The device is done.
    unsafe fn arrived(self) -> There<'z, 'c> {
        match self {
            // SAFETY: the caller's word.
            Self::Unmoved(place) => Message::Unmoved(unsafe { place.arrived() }),
            Self::Remapped(remapped) => Message::Remapped(remapped),
        }
    }
}

impl There<'_, '_> {
    /// Lands the data, or gives it back because the target has changed.
    fn land(self, way: Way) -> Result<Landed, Self> {
        match self {
            Self::Unmoved(arrived) => land_by(arrived, way).map_err(Self::Unmoved),
            Self::Remapped(remapped) => {
                // SAFETY: the device is done: this is made by `Flying::arrived` alone.
                let landed = unsafe { remapped.arrived() };
                landed.map_err(|refused| Self::Remapped(refused.state))
            }
        }
    }

    /// # Safety
    ///
    /// The target has not changed.
    unsafe fn vouch(self) -> Self {
        match self {
            // SAFETY: the caller's word.
            Self::Unmoved(arrived) => Self::Unmoved(unsafe { arrived.vouch() }),
            // SAFETY: as above.
            Self::Remapped(remapped) => Self::Remapped(unsafe { remapped.vouch() }),
        }
    }
}

type AnyArrived<'z, 'c> = Arrived<'z, 'c, PortRegistrar, AnyMonitor, Slab>;

/// What can be exchanged is exchanged where the way says so; all else is copied.
fn land_by<'z, 'c>(arrived: AnyArrived<'z, 'c>, way: Way) -> Result<Landed, AnyArrived<'z, 'c>> {
    let landed = match way {
        Way::Chosen => arrived.land(),
        Way::Exchange => arrived.land_by(Method::Exchange).or_else(|refused| match refused.error {
            LandError::TargetChanged => Err(refused),
            because => {
                let copied = refused.state.land_by(Method::Copy)?;
                Ok(Landed { copied_because: Some(because), ..copied })
            }
        }),
        Way::Copy | Way::Early => arrived.land_by(Method::Copy),
    };
    landed.map_err(|refused| refused.state)
}

/// What the program did while a message was on its way.
struct Meanwhile {
    /// What the slot's memory held afterwards, the message left out.
    old: Vec<u8>,
    /// Where it changed the target, which the zone must have found out.
    changed: Option<AddressRange>,
    /// Whether the target had the place's pages by then: those that the program did not take away
    /// go on being written by the device.
    remapped: bool,
}

impl Meanwhile {
    /// Whether the byte at this address may be the program's or the device's.
    fn is_open(&self, address: usize, target: AddressRange) -> bool {
        let within = |range: AddressRange| (range.start()..range.end()).contains(&address);
        self.remapped && within(target) && !self.changed.is_some_and(within)
    }
}

impl Worker<'_, '_> {
    pub(super) fn arrive(
        &mut self,
        slot: usize,
        window: Window,
        port: usize,
        arrival: Arrival,
    ) -> Judged {
        let mut specimen = self.take(slot)?;
        let target = window.of(&specimen);
        let judged = self.arrive_in(&mut specimen, target, port, arrival);
        // What could not be mapped anew is another thread's by now.
        if specimen.mend().is_ok() {
            self.put(slot, specimen);
        }
        judged
    }

    fn arrive_in(
        &mut self,
        specimen: &mut Specimen,
        target: AddressRange,
        port: usize,
        arrival: Arrival,
    ) -> Judged {
        let grounds = self.grounds;
        let zone = grounds.zone.as_ref().ok_or(Stop::NoZone)?;
        if arrival.refill {
            // What fails here is told by the question for a place.
            let _ = zone.refill();
        }
        let target = AddressRange::new(target.start(), target.len().min(MESSAGE_BYTES));
        let target = target.map_err(|_| Stop::Gone)?;
        self.port(port).send(target, self.lane())?;
        let start = std::ptr::with_exposed_provenance_mut(target.start());
        // SAFETY: see the file's header.
        let place = unsafe { zone.ask(start, target.len()) }?;
        let incoming = Specimen::pattern(target, self.next_key());
        let (flying, meanwhile) = self.fly(specimen, target, place, &incoming, arrival)?;
        // SAFETY: the transfer was waited for.
        let there = unsafe { flying.arrived() };
        let landed = self.land(there, arrival.way, &meanwhile);
        self.judge(specimen, target, port, &incoming, landed, &meanwhile)
    }

    /// Has the device write into the place, and the program do what it does meanwhile.
    fn fly<'z, 'c>(
        &mut self,
        specimen: &mut Specimen,
        target: AddressRange,
        place: Place<'z, 'c, PortRegistrar, AnyMonitor, Slab>,
        incoming: &[u8],
        arrival: Arrival,
    ) -> Result<(Flying<'z, 'c>, Meanwhile), Stop> {
        let (port, handle, range, lane) =
            (self.port(ZONE_PORT), place.handle(), place.range(), self.lane());
        let receive = move || port.receive_registered(handle, range, lane, incoming);
        let (flying, meanwhile, flown) = thread::scope(|scope| {
            let beside = arrival.beside.then(|| start(scope, receive)).transpose()?;
            let flying = Flying::new(place, arrival.way);
            let meanwhile = self.change_target(specimen, target, &flying, arrival.change);
            let panicked = || Refusal::Device(io::ErrorKind::Other.into());
            let flown = beside.map_or_else(receive, |thread| joined(thread, Err(panicked())));
            Ok::<_, Stop>((flying, meanwhile, flown))
        })?;
        flown?;
        Ok((flying, meanwhile?))
    }

    /// Makes the change, if the zone will find it out.
    fn change_target(
        &mut self,
        specimen: &mut Specimen,
        target: AddressRange,
        flying: &Flying<'_, '_>,
        change: Option<Mutation>,
    ) -> Result<Meanwhile, Stop> {
        let remapped = matches!(flying, Message::Remapped(_));
        let hits = |change: Mutation| changed_part(specimen, change).overlaps(&target);
        let seen = |change: &Mutation| {
            // A target that was remapped is not the program's to fill, unless it is replaced.
            let may_fill = !remapped || hits(*change);
            may_fill && flying.is_watched() && !self.is_blind_to(specimen.backing(), *change)
        };
        let Some(change) = change.filter(seen) else {
            let old = specimen.bytes(specimen.body());
            return Ok(Meanwhile { old, changed: None, remapped });
        };
        let key = self.next_key();
        let changed = hits(change).then(|| changed_part(specimen, change));
        self.mutate(specimen, change, key)?;
        Ok(Meanwhile { old: Specimen::pattern(specimen.body(), key), changed, remapped })
    }

    /// `None` if the zone found that the target has changed. Where it only cannot tell, the program
    /// does.
    fn land(&mut self, there: There<'_, '_>, way: Way, meanwhile: &Meanwhile) -> Option<Landed> {
        self.tally.landing.early += u64::from(matches!(there, Message::Remapped(_)));
        let landed = match there.land(way) {
            Err(there) if meanwhile.changed.is_none() => {
                self.tally.landing.vouched += 1;
                // SAFETY: the slot is this thread's, which has not changed the target.
                unsafe { there.vouch() }.land(way)
            }
            landed => landed,
        };
        match &landed {
            Ok(landed) => self.tally.landing.count(*landed),
            Err(_) => self.tally.landing.target_changed += 1,
        }
        landed.ok()
    }

    fn judge(
        &mut self,
        specimen: &Specimen,
        target: AddressRange,
        port: usize,
        incoming: &[u8],
        landed: Option<Landed>,
        meanwhile: &Meanwhile,
    ) -> Judged {
        self.tally.transfers += 1;
        let body = specimen.body();
        let wrong = |range, first, note: &'static str| {
            Ok(Some(WrongBytes { range, first, note: note.into() }))
        };
        if meanwhile.changed.is_some() && landed.is_some() {
            return wrong(target, 0, "landed in memory that had changed");
        }
        let got = specimen.bytes(body);
        let mut wanted = meanwhile.old.clone();
        if landed.is_some() {
            let offset = target.start() - body.start();
            wanted[offset..offset + target.len()].copy_from_slice(incoming);
        } else {
            let bytes = wanted.iter_mut().zip(&got).zip(body.start()..);
            let open = bytes.filter(|(_, address)| meanwhile.is_open(*address, target));
            open.for_each(|((wanted, got), _)| *wanted = *got);
        }
        if let Some(first) = difference(&got, &wanted) {
            return wrong(body, first, "not what has landed, or not only that");
        }
        let sent = send_wrong(self.port(port), specimen, target, self.lane())?;
        self.moved(target, sent)
    }
}

/// Which part of the memory a change of a target takes pages from.
fn changed_part(specimen: &Specimen, change: Mutation) -> AddressRange {
    match change {
        Mutation::Unmap(part, _) | Mutation::MapOver(part) | Mutation::Discard(part, _) => {
            specimen.part(part)
        }
        _ => specimen.part(Part::Whole),
    }
}
