//! What is checked, while the program runs and at its end.

use super::Finding;
use super::state::{Posted, Program};
use crate::fabric::{CELL_BYTES, Weather, WorkKind, World, stamp};
use pinfold_core::AddressRange;

/// How much simulated time the end may take before it counts as stuck.
const END: u64 = 1_000_000_000;

impl Program<'_, '_> {
    /// What the program reads where a message came is that message, unless it has given the
    /// memory away before it looked at the completion.
    pub(super) fn check_received(&mut self, work: &Posted<'_>, message: u64, cells: usize) {
        if self.buffers[work.buffer].broken {
            return;
        }
        let start = work.range.start();
        let Some(range) = AddressRange::between(start, start + cells * CELL_BYTES) else { return };
        let content = self.fabric.with(|world| world.read(range));
        let expected = (0..cells).map(|cell| stamp(message, cell));
        if !content.into_iter().eq(expected) {
            self.note(Finding::Wrong, format_args!("message {message} is not at {range}"));
        }
    }

    pub(super) fn check_exposures(&mut self) {
        self.hear_peers();
        (0..self.exposures.len()).for_each(|which| self.check_exposure(which));
    }

    /// What a peer knows to have written is there; what it is writing may be.
    pub(super) fn check_exposure(&mut self, which: usize) {
        let exposure = &self.exposures[which];
        let (range, broken) = (exposure.range, self.buffers[exposure.buffer].broken);
        let content = self.fabric.with(|world| world.read(range));
        let right =
            |(cell, known): (u64, &(u64, Option<u64>))| cell == known.0 || known.1 == Some(cell);
        let all = content.into_iter().zip(&exposure.cells).all(right);
        if !all && !broken {
            self.note(Finding::Wrong, format_args!("what a peer wrote is not in {range}"));
        }
    }

    /// Every connection is one that the program asked for.
    pub(super) fn check_connections(&mut self) {
        for link in 0..self.connections.len() {
            let Some(connected) = self.fabric.with(|world| world.connected(link)) else { continue };
            if self.connections[link] != Some(connected) {
                self.note(Finding::CovertReconnect, format_args!("{connected:?}"));
                self.connections[link] = Some(connected);
            }
        }
        let wrong = self.fabric.with(|world| std::mem::take(&mut world.wrong));
        for _ in 0..wrong {
            self.note(Finding::Wrong, "a peer got what was not sent");
        }
    }

    /// Heals everything and lets all come to its end.
    pub(super) fn end(mut self) {
        self.fabric.with(|world| {
            world.weather = Weather::default();
            world.fail_next_registrations(0);
            world.panic_next(None);
        });
        self.end_suspensions();
        self.hear_notices();
        self.finish_sends();
        self.check_exposures();
        for connection in self.connections.into_iter().flatten() {
            self.fabric.with(|world| world.fail(connection));
        }
        self.take_completions();
        self.check_connections();
        let lost: Vec<_> = self.works.iter().map(|work| (work.id, work.kind)).collect();
        for (id, kind) in lost {
            self.note(Finding::LostCompletion, format_args!("{kind:?} {id} never ended"));
        }
        self.check_books();
    }

    /// Whatever was sent on a connection that lives arrives.
    fn finish_sends(&mut self) {
        let until = self.fabric.with(|world| world.now()) + END;
        while self.fabric.with(|world| world.now()) < until {
            self.take_completions();
            for connection in self.connections.into_iter().flatten() {
                self.fabric.with(|world| world.peer_receive(connection, 1));
            }
            let sends = self.works.iter().any(|work| work.kind == WorkKind::Send);
            if !sends || !self.fabric.with(World::step) {
                break;
            }
        }
        self.take_completions();
        let left = self.works.iter().filter(|work| work.kind == WorkKind::Send).count();
        if left > 0 {
            self.note(Finding::Stuck, format_args!("{left} sends do not end"));
        }
    }

    /// The counters of what happened; those of suspensions must agree.
    fn check_books(&mut self) {
        let (cache, happened) = (self.cache.statistics(), &mut self.outcome.happened);
        let counts = self.cache.suspension_statistics();
        happened.hits += cache.hits;
        happened.registrations += cache.registrations;
        happened.invalidations += cache.invalidations;
        happened.evictions += cache.evictions;
        happened.suspensions_begun += counts.begun;
        happened.suspensions_refused += counts.refused;
        happened.suspensions_resumed += counts.resumed;
        happened.suspensions_killed += counts.killed;
        happened.suspensions_expired += counts.expired;
        happened.simulated_nanoseconds += self.fabric.with(|world| world.now());
        let ended = counts.refused + counts.resumed + counts.killed + counts.expired;
        if ended != counts.begun {
            self.note(Finding::Stuck, format_args!("{counts:?}"));
        }
    }
}
