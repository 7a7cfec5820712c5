//! The events that take several threads, a forked child, a stack or a lease that is held.

use super::trial::{first_wrong, warm};
use super::{Event, Finding, event, persistently};
use crate::change::{
    Backing, Call, FirstWrong, Mutation, Obstacle, Part, Route, Specimen, difference, in_child,
};
use crate::port::{MakeMonitor, Port, Refusal, Wiring};
use crate::races::{self, Pace, Race, RunRace, Stop, send_wrong};
use pinfold::{Access, AddressRange, Change, Config, GetError, Monitor};
use std::thread;

/// What the report says in place of a direction.
pub(super) const DIRECTION: &str = "both";

/// How many rows there are.
pub(super) const COUNT: usize = 10;

/// How often a race is run: a naive cache loses the first one, a cache with a gap one in five.
const ROUNDS: u64 = 100;

const UNMAP: Mutation = Mutation::Unmap(Part::Whole, Call::Library);
const RAW_UNMAP: Mutation = Mutation::Unmap(Part::Whole, Call::Raw);
const RAW_DISCARD: Mutation = Mutation::Discard(Part::Whole, Call::Raw);
const DISCARD: Mutation = Mutation::Discard(Part::Whole, Call::Library);
const DISCARD_TAIL: Mutation = Mutation::Discard(Part::Tail, Call::Library);
const UNMAP_TAIL: Mutation = Mutation::Unmap(Part::Tail, Call::Library);

/// One row.
pub(super) struct Special {
    name: &'static str,
    change: Change,
    attempt: Attempt,
}

/// How a row is tried.
enum Attempt {
    /// With a cache.
    Here(fn(&Port) -> Result<Finding, Stop>),
    /// In a forked child too, which needs a monitor of its own.
    Forked,
}

/// Every row.
pub(super) fn all() -> [Special; COUNT] {
    let row = |name, change, attempt| Special { name, change, attempt: Attempt::Here(attempt) };
    [
        row("address reused by another thread while munmap is under way", Change::Unmap, reused),
        row("unmapped while being registered", Change::Unmap, |port| registering(port, UNMAP)),
        row("mapped over while being registered", Change::Replace, |port| {
            registering(port, Mutation::MapOver(Part::Whole))
        }),
        row("discarded while being registered", Change::Discard, |port| registering(port, DISCARD)),
        row("half discarded while the other half is in use", Change::Discard, |port| {
            beside(port, DISCARD_TAIL)
        }),
        row("half unmapped while the other half is in use", Change::Unmap, |port| {
            beside(port, UNMAP_TAIL)
        }),
        row("raw munmap and madvise by another thread", Change::Unmap, elsewhere),
        row("unmapped while leased", Change::Unmap, leased),
        row("stack of an ended thread reused by the next", Change::Discard, stack),
        Special { name: "used in a forked child", change: Change::Fork, attempt: Attempt::Forked },
    ]
}

impl Special {
    pub(super) fn judge(
        &self,
        port: &Port,
        monitor: &dyn Monitor,
        make_monitor: MakeMonitor,
    ) -> Event {
        let cover = monitor.coverage(Backing::Anonymous.kind(), self.change);
        let found = persistently(|| match self.attempt {
            Attempt::Here(attempt) => attempt(port),
            Attempt::Forked => forked(port, make_monitor),
        });
        event(self.name, Backing::Anonymous.name(), DIRECTION, (cover, Route::Library), found)
    }
}

fn specimen() -> Result<Specimen, Obstacle> {
    Specimen::new(Backing::Anonymous, 16)
}

/// Runs a race over and over, each time on new memory, and tells how many rounds went wrong.
fn rounds(port: &Port, mutation: Mutation, run: RunRace) -> Result<Finding, Stop> {
    let cached = warm(port, &specimen()?)?;
    let (mut judged, mut wrong) = (0, 0);
    for round in 0..ROUNDS {
        let mut specimen = specimen()?;
        port.forget(specimen.body());
        let pace = if round.is_multiple_of(4) { Pace::Lagging } else { Pace::Free };
        let race = Race { mutation, pace, keys: [2 * round + 1, 2 * round + 2], lane: 0 };
        match run(port, &mut specimen, race) {
            Ok(found) => {
                judged += 1;
                wrong += u64::from(found.is_some());
            }
            // The address went to a third thread: this round tells nothing.
            Err(stop) if stop.is_passing() => {}
            Err(stop) => return Err(stop),
        }
    }
    let note = Some(format!("{wrong} of {judged} rounds wrong"));
    if judged == 0 {
        return Err(Obstacle::taken("mmap").into());
    }
    Ok(Finding { right: wrong == 0, cached, note })
}

fn reused(port: &Port) -> Result<Finding, Stop> {
    rounds(port, UNMAP, races::take_over)
}

fn registering(port: &Port, mutation: Mutation) -> Result<Finding, Stop> {
    rounds(port, mutation, races::change_while_registering)
}

fn beside(port: &Port, mutation: Mutation) -> Result<Finding, Stop> {
    rounds(port, mutation, races::change_beside)
}

/// What a send of the whole specimen says, after `warm` said `cached`.
fn finding(port: &Port, specimen: &Specimen, cached: bool) -> Result<Finding, Refusal> {
    let wrong = send_wrong(port, specimen, specimen.body(), 0)?;
    Ok(Finding { right: wrong.is_none(), cached, note: wrong.map(first_wrong) })
}

fn elsewhere(port: &Port) -> Result<Finding, Stop> {
    let first = changed_elsewhere(port, RAW_UNMAP)?;
    let second = changed_elsewhere(port, RAW_DISCARD)?;
    Ok(Finding {
        right: first.right && second.right,
        cached: first.cached && second.cached,
        note: first.note.or(second.note),
    })
}

fn changed_elsewhere(port: &Port, mutation: Mutation) -> Result<Finding, Stop> {
    let mut specimen = specimen()?;
    let cached = warm(port, &specimen)?;
    thread::scope(|scope| ended(races::start(scope, || Ok(specimen.apply(mutation)?))?))?;
    specimen.fill(specimen.body(), 2);
    Ok(finding(port, &specimen, cached)?)
}

/// What a thread that does not panic answers.
fn ended<T>(thread: thread::ScopedJoinHandle<'_, Result<T, Stop>>) -> Result<T, Stop> {
    thread.join().unwrap_or(Err(Stop::Gone))
}

/// A lease of the old pages is held across the change and the next use.
fn leased(port: &Port) -> Result<Finding, Stop> {
    let mut specimen = specimen()?;
    let cached = warm(port, &specimen)?;
    let lease = port.lease(specimen.body(), Access::READ)?;
    specimen.apply(UNMAP)?;
    specimen.fill(specimen.body(), 2);
    let mut finding = finding(port, &specimen, cached)?;
    // A device that follows the page table has nothing to invalidate.
    if cached && !port.kind().is_on_demand() && !lease.is_invalidated() {
        finding.right = false;
        finding.note = Some("the old lease does not know that it is invalidated".to_owned());
    }
    Ok(finding)
}

/// Two threads one after the other: the second one's stack is where the first one's was.
fn stack(port: &Port) -> Result<Finding, Stop> {
    let first = on_a_stack(port, FIRST)?;
    let second = on_a_stack(port, FIRST + 1)?;
    if first.at != second.at {
        return Err(Obstacle::taken("the second thread's stack").into());
    }
    let wrong = first.wrong.or(second.wrong);
    let note = wrong.map(first_wrong);
    Ok(Finding { right: wrong.is_none(), cached: first.cached, note })
}

/// The key of the first thread's bytes.
const FIRST: u64 = 1;

struct OnStack {
    at: AddressRange,
    cached: bool,
    wrong: Option<FirstWrong>,
}

fn on_a_stack(port: &Port, key: u64) -> Result<OnStack, Stop> {
    thread::scope(|scope| ended(races::start(scope, || use_the_stack(port, key))?))
}

fn use_the_stack(port: &Port, key: u64) -> Result<OnStack, Stop> {
    const LENGTH: usize = 64 << 10;
    /// Of whole pages, as everything that is judged here.
    #[repr(align(4096))]
    struct Pages([u8; LENGTH]);
    let Pages(buffer) = &mut Pages([0; LENGTH]);
    let start = buffer.as_mut_ptr().expose_provenance();
    let at = AddressRange::new(start, LENGTH)
        .map_err(|error| Stop::Refusal(Refusal::Get(GetError::Range(error))))?;
    if key == FIRST {
        port.forget(at);
    }
    buffer.copy_from_slice(&Specimen::pattern(at, key));
    port.send(std::hint::black_box(at), 0)?;
    let sent = port.send(at, 0)?;
    Ok(OnStack { at, cached: sent.cached, wrong: difference(&sent.bytes, buffer) })
}

/// What a child finds out; its exit status.
mod child {
    pub(super) const RIGHT: u8 = 0;
    pub(super) const NOT_TOLD: u8 = 1;
    pub(super) const WRONG: u8 = 2;
    pub(super) const REFUSED: u8 = 3;
}

/// The child's first `get` says that it is one, its own cache works, and the parent goes on.
fn forked(port: &Port, make_monitor: MakeMonitor) -> Result<Finding, Stop> {
    let specimen = specimen()?;
    let cached = warm(port, &specimen)?;
    let answer = in_child(|| in_the_child(port, &specimen, make_monitor))?;
    specimen.fill(specimen.body(), 3);
    let parent = finding(port, &specimen, cached)?;
    let note = match answer {
        Some(child::RIGHT) => parent.note,
        Some(child::NOT_TOLD) => Some("the child used its parent's registrations".to_owned()),
        Some(child::WRONG) => Some("the child's own cache moved wrong data".to_owned()),
        Some(child::REFUSED) => Some("the child could not make a cache of its own".to_owned()),
        other => Some(format!("the child ended badly ({other:?})")),
    };
    Ok(Finding { right: parent.right && answer == Some(child::RIGHT), cached, note })
}

fn in_the_child(port: &Port, specimen: &Specimen, make_monitor: MakeMonitor) -> u8 {
    let body = specimen.body();
    specimen.fill(body, 2);
    match port.lease(body, Access::READ) {
        Err(Refusal::Get(GetError::Forked)) => {}
        _ => return child::NOT_TOLD,
    }
    let wiring = Wiring { kind: port.kind(), slots: 16, lanes: 1, audit: false };
    let own = make_monitor().and_then(|monitor| Port::open(wiring, monitor, Config::keeping_all()));
    match own.map(|own| send_wrong(&own, specimen, body, 0)) {
        Ok(Ok(None)) => child::RIGHT,
        Ok(Ok(Some(_))) => child::WRONG,
        _ => child::REFUSED,
    }
}
