//! What is checked, while the program runs and at its end.

use super::Finding;
use super::notices;
use super::state::{Posted, Program};
use crate::fabric::{CELL_BYTES, Weather, WorkKind, World, stamp};
use pinfold_core::AddressRange;

/// How much simulated time the end may take before it counts as stuck.
const END: u64 = 1_000_000_000;

/// What the program reads where a message came is that message, unless it has given the
/// memory away before it looked at the completion.
pub(super) fn check_received(
    program: &mut Program<'_, '_>,
    work: &Posted<'_>,
    message: u64,
    cells: usize,
) {
    if program.buffers[work.buffer].broken {
        return;
    }
    let start = work.range.start();
    let Some(range) = AddressRange::between(start, start + cells * CELL_BYTES) else { return };
    let content = program.fabric.with(|world| world.read(range));
    let expected = (0..cells).map(|cell| stamp(message, cell));
    if !content.into_iter().eq(expected) {
        program.note(Finding::Wrong, format_args!("message {message} is not at {range}"));
    }
}

pub(super) fn check_exposures(program: &mut Program<'_, '_>) {
    program.hear_peers();
    (0..program.exposures.len()).for_each(|which| check_exposure(program, which));
}

/// What a peer knows to have written is there; what it is writing may be.
pub(super) fn check_exposure(program: &mut Program<'_, '_>, which: usize) {
    let exposure = &program.exposures[which];
    let (range, broken) = (exposure.range, program.buffers[exposure.buffer].broken);
    let content = program.fabric.with(|world| world.read(range));
    let right =
        |(cell, known): (u64, &(u64, Option<u64>))| cell == known.0 || known.1 == Some(cell);
    let all = content.into_iter().zip(&exposure.cells).all(right);
    if !all && !broken {
        program.note(Finding::Wrong, format_args!("what a peer wrote is not in {range}"));
    }
}

/// Every connection is one that the program asked for.
pub(super) fn check_connections(program: &mut Program<'_, '_>) {
    for link in 0..program.connections.len() {
        let Some(connected) = program.fabric.with(|world| world.connected(link)) else { continue };
        if program.connections[link] != Some(connected) {
            program.note(Finding::CovertReconnect, format_args!("{connected:?}"));
            program.connections[link] = Some(connected);
        }
    }
    let wrong = program.fabric.with(|world| std::mem::take(&mut world.wrong));
    for _ in 0..wrong {
        program.note(Finding::Wrong, "a peer got what was not sent");
    }
}

/// Heals everything and lets all come to its end.
pub(super) fn end(mut program: Program<'_, '_>) {
    program.fabric.with(|world| {
        world.weather = Weather::default();
        world.fail_next_registrations(0);
        world.panic_next(None);
    });
    program.end_suspensions();
    notices::hear_notices(&mut program);
    finish_sends(&mut program);
    check_exposures(&mut program);
    for connection in program.connections.into_iter().flatten() {
        program.fabric.with(|world| world.fail(connection));
    }
    program.take_completions();
    check_connections(&mut program);
    let lost: Vec<_> = program.works.iter().map(|work| (work.id, work.kind)).collect();
    for (id, kind) in lost {
        program.note(Finding::LostCompletion, format_args!("{kind:?} {id} never ended"));
    }
    check_books(&mut program);
}

/// Whatever was sent on a connection that lives arrives.
fn finish_sends(program: &mut Program<'_, '_>) {
    let until = program.fabric.with(|world| world.now()) + END;
    while program.fabric.with(|world| world.now()) < until {
        program.take_completions();
        for connection in program.connections.into_iter().flatten() {
            program.fabric.with(|world| world.peer_receive(connection, 1));
        }
        let sends = program.works.iter().any(|work| work.kind == WorkKind::Send);
        if !sends || !program.fabric.with(World::step) {
            break;
        }
    }
    program.take_completions();
    let left = program.works.iter().filter(|work| work.kind == WorkKind::Send).count();
    if left > 0 {
        program.note(Finding::Stuck, format_args!("{left} sends do not end"));
    }
}

/// The counters of what happened; those of suspensions must agree.
fn check_books(program: &mut Program<'_, '_>) {
    let (cache, happened) = (program.cache.statistics(), &mut program.outcome.happened);
    let counts = program.cache.suspension_statistics();
    happened.hits += cache.hits;
    happened.registrations += cache.registrations;
    happened.invalidations += cache.invalidations;
    happened.evictions += cache.evictions;
    happened.suspensions_begun += counts.begun;
    happened.suspensions_refused += counts.refused;
    happened.suspensions_resumed += counts.resumed;
    happened.suspensions_killed += counts.killed;
    happened.suspensions_expired += counts.expired;
    happened.simulated_nanoseconds += program.fabric.with(|world| world.now());
    let ended = counts.refused + counts.resumed + counts.killed + counts.expired;
    if ended != counts.begun {
        program.note(Finding::Stuck, format_args!("{counts:?}"));
    }
}
