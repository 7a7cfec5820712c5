//! One change of the catalogue on one kind of memory, in one direction.

use super::{Event, Finding, event, persistently};
use crate::change::{Backing, Mutation, Specimen};
use crate::port::Port;
use crate::races::{Stop, receive_wrong, send_wrong};
use pinfold::{Access, AddressRange, Cover, Monitor};

/// Which way the device moves the bytes after the change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    /// Out of the memory: old bytes would arrive.
    Send,
    /// Into the memory: the program would not see them.
    Receive,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }

    /// The rights that the device needs, and so those of the registration that may go stale.
    fn access(self) -> Access {
        match self {
            Self::Send => Access::READ,
            Self::Receive => Access::READ_WRITE,
        }
    }
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    mutation: Mutation,
    backing: Backing,
    direction: Direction,
}

/// Every change on every kind of memory that can suffer it, both ways.
pub(super) fn all() -> Vec<Trial> {
    let mut trials = Vec::new();
    for mutation in Mutation::ALL {
        for backing in Backing::ALL.into_iter().filter(|&backing| mutation.fits(backing)) {
            for direction in [Direction::Send, Direction::Receive] {
                trials.push(Trial { mutation, backing, direction });
            }
        }
    }
    trials
}

/// What `monitor` claims about `mutation` of `backing`.
pub(super) fn cover(monitor: &dyn Monitor, backing: Backing, mutation: Mutation) -> Cover {
    match mutation.change() {
        Some(change) => monitor.coverage(backing.kind(), change),
        None => Cover::Harmless,
    }
}

/// Enough for three parts, and for a huge page.
fn grains(backing: Backing) -> usize {
    match backing {
        Backing::TransparentHuge => 512,
        Backing::Hugetlb => 4,
        _ => 16,
    }
}

impl Trial {
    pub(super) fn judge(self, port: &Port, monitor: &dyn Monitor) -> Event {
        let found = persistently(|| self.attempt(port));
        let cover = (cover(monitor, self.backing, self.mutation), self.mutation.route());
        event(self.mutation.name(), self.backing.name(), self.direction.name(), cover, found)
    }

    fn attempt(self, port: &Port) -> Result<Finding, Stop> {
        let mut specimen = Specimen::new(self.backing, grains(self.backing))?;
        let cached = warm_with(port, &specimen, self.direction.access())?;
        specimen.apply(self.mutation)?;
        let body = specimen.body();
        specimen.populate()?;
        specimen.fill(body, 2);
        let wrong = match self.direction {
            Direction::Send => send_wrong(port, &specimen, body, 0),
            Direction::Receive => receive_wrong(port, &specimen, body, 0, 3),
        }?;
        Ok(Finding { right: wrong.is_none(), cached, note: wrong.map(first_wrong) })
    }
}

/// Sends the specimen's old bytes a few times, so that it is cached if it ever will be. What an earlier
/// row left behind at the same address is forgotten before.
pub(super) fn warm(port: &Port, specimen: &Specimen) -> Result<bool, Stop> {
    warm_with(port, specimen, Access::READ)
}

/// As [`warm`], cached with the rights `access`.
fn warm_with(port: &Port, specimen: &Specimen, access: Access) -> Result<bool, Stop> {
    port.forget(specimen.body());
    specimen.populate()?;
    specimen.fill(specimen.body(), 1);
    send_until_cached(port, specimen.body(), access)
}

/// Whether a send of `range` comes from the cache, now or after a few more.
pub(super) fn send_until_cached(
    port: &Port,
    range: AddressRange,
    access: Access,
) -> Result<bool, Stop> {
    // A discard elsewhere that has not settled keeps the first uses from being cached.
    const USES: usize = 16;
    for _ in 0..USES {
        if port.send_with(range, 0, access)?.cached {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where the wrong data begins, in words.
pub(super) fn first_wrong(offset: usize) -> String {
    format!("wrong from byte {offset}")
}
