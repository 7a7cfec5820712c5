//! Data arrives in pages that are registered beforehand, and gets into the program's buffer by an
//! exchange of pages or by a copy: no registration before a message, none of the program's memory.
//!
//! # The price
//!
//! A copy costs its bytes. An exchange moves page-table entries: the target's old pages take the
//! places of those that leave the landing zone, so that no page is made, and what is left to pay is
//! registering the zone's slot anew. Where both addresses lie alike within 2 MiB the kernel moves whole
//! tables of 512 pages, small ones too, and 64 MiB take less than a tenth of a millisecond. (Landing
//! pages that leave and are made anew, as was proposed in 2009, lose to a copy at every size:
//! making a page costs more than copying one. [`Method::Replace`] is that proposal, for comparison.)
//! Each exchange splits a mapping in up to three, and a process may have
//! [`max_map_count`](crate::limits::Limits::max_map_count).
//!
//! From which size an exchange wins depends on the machine and the device: a [`Crossover`] is measured
//! by [`Crossover::measure`], kept in a file, and used by [`Arrived::land`].
//!
//! # The life of a message
//!
//! 1. [`Zone::ask`]: a [`Place`] in registered pages for a target, lying as the target lies within its
//!    pages. Announce its address and handle to the sender.
//! 2. The data flies. Meanwhile, if the message is one for an exchange, [`Place::remap`] gives the
//!    pages to the target already ([`Remapped`]): a registration holds on to pages, not to addresses,
//!    so the device goes on writing to them.
//! 3. The data is there: [`Place::arrived`] or [`Remapped::arrived`], the caller's word that the
//!    device is done. Then [`Arrived::land`] exchanges or copies; a place that was remapped has only the
//!    two ragged ends left to copy.
//! 4. [`Zone::refill`] registers the slots that were exchanged, off every hot path; else the next
//!    `ask` does.
//!
//! # A target that changes meanwhile
//!
//! If the target is unmapped, replaced or moved while the data flies, landing is refused with
//! [`LandError::TargetChanged`] and the data stays where it is ([`RemapRefused`]), to be landed elsewhere or
//! read in place; nothing is written to whatever stands at the address now. The zone's cache's monitor
//! tells of the change; what it cannot watch, or all with [`ZoneOptions::watch_targets`] off, is the
//! caller's promise. If the target was remapped already, the pages are the target's: they go where the
//! program moves them, and, if it unmaps them, the device writes to pages that have no other use. A place
//! that is dropped while data may still fly gives its pages up for the device to finish with; if it was
//! remapped, they are taken out of the target as well. A place that is forgotten keeps its target, its
//! slot and its zone's pages for good; nothing finds its registration when the zone is gone.
//!
//! # Layers
//!
//! `sys` (calls that move pages), `split` (which bytes are whole pages), `slab` (where landing pages
//! come from), `crossover` (which way), `zone` and `place` (the states above).

mod calibration;
mod crossover;
mod method;
mod place;
mod slab;
mod split;
mod zone;

pub use calibration::CrossoverError;
pub use crossover::{Crossover, Measured};
pub use method::{LandError, Landed, Method};
pub use place::{Arrived, Place, RemapRefused, Remapped};
pub use slab::{Slab, SlabError, SlabPages};
pub use split::Split;
pub use zone::{AskError, Zone, ZoneError, ZoneOptions};
