//! The program: random, but legal. It keeps memory that is in use where it is, unless it has
//! suspended it, and tells its peers what they must know.

use super::buffers::{BUFFERS, Buffer, ELSEWHERE};
use super::checks;
use super::state::{Exposure, Listener, Posted, Program, SimCache, SimLease};
use super::{FaultKind, Finding, LINKS, Outcome, SimulationPlan, weather};
use crate::fabric::{
    Completed, ConnectionId, DeviceCall, DevicePanic, Fabric, NicConfig, Work, WorkCompletion,
    WorkKind, World, stamp,
};
use crate::fake::get_simulated;
use crate::fault::Moment;
use crate::random::Random;
use crate::space::Protection;
use pinfold_core::{Access, AddressRange};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The longest message, in cells.
const MOST_CELLS: usize = 8;
/// How many works may be outstanding.
const MOST_WORKS: usize = 48;

impl<'c, 'o> Program<'c, 'o> {
    pub(super) fn new(
        cache: &'c SimCache,
        fabric: &'c Fabric,
        plan: &'o SimulationPlan,
        nic: NicConfig,
        random: Random,
        seed: u64,
        outcome: &'o mut Outcome,
    ) -> Self {
        let buffers: Vec<_> = (0..BUFFERS).map(Buffer::new).collect();
        let connections = std::array::from_fn(|link| {
            Some(fabric.with(|world| {
                let connection = world.connect(link);
                world.peer_receive(connection, 8);
                connection
            }))
        });
        for buffer in &buffers {
            fabric.with(|world| {
                world.change(buffer.range, |space| space.map(buffer.range, Protection::ReadWrite));
            });
        }
        Self {
            cache,
            fabric,
            nic,
            mutant: plan.mutant,
            faults: &plan.faults,
            random,
            seed,
            step: 0,
            buffers,
            connections,
            works: Vec::new(),
            exposures: Vec::new(),
            suspensions: Vec::new(),
            // Sometimes too few to hear everything.
            listener: Listener::new(cache, if seed.is_multiple_of(8) { 2 } else { 64 }),
            hushed_panics: 0,
            last_id: 0,
            outcome,
        }
    }

    pub(super) fn has(&self, fault: FaultKind) -> bool {
        self.faults.contains(&fault)
    }

    pub(super) fn note(&mut self, finding: Finding, note: impl fmt::Display) {
        self.outcome.note(self.seed, self.step, finding, note);
    }

    pub(super) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn run(&mut self, steps: u64) {
        for step in 0..steps {
            self.step = step;
            self.take_step();
        }
    }

    fn take_step(&mut self) {
        match self.random.below(1000) {
            0..480 => self.let_something_happen(),
            480..560 => self.send(),
            560..620 => self.receive(),
            620..690 => self.peer_sends(),
            690..760 => self.peer_writes(),
            760..860 => self.take_completions(),
            860..880 => self.expose(),
            880..890 => self.unexpose(),
            890..915 => self.change_mappings(),
            915..920 => self.change_weather(),
            920..930 => self.begin_suspension(),
            930..975 => self.go_on_with_suspensions(),
            975..980 => self.reconnect(),
            980..982 => self.disconnect(),
            982..984 => self.maintain_cache(),
            984..988 => checks::check_exposures(self),
            988..992 => checks::check_connections(self),
            _ => self.let_peers_receive(),
        }
    }

    fn let_something_happen(&mut self) {
        let idle = self.fabric.with(|world| {
            world.pass(100);
            !world.step()
        });
        if idle {
            self.let_peers_receive();
        }
    }

    fn let_peers_receive(&mut self) {
        for connection in self.connections.into_iter().flatten() {
            self.fabric.with(|world| {
                if world.peer_receives(connection.link) < 4 {
                    world.peer_receive(connection, 8);
                }
            });
        }
    }

    /// A lease of `range`; nothing if there is none to be had, which is no fault here.
    fn lease(&mut self, range: AddressRange, access: Access) -> Option<SimLease<'c>> {
        get_simulated(self.cache, range, access).ok()
    }

    fn some_connection(&mut self) -> Option<ConnectionId> {
        self.connections[self.random.below(LINKS)]
    }

    /// Some cells of a buffer that no other thread writes, for `cells` cells.
    fn some_range(&mut self, cells: usize, alone: bool) -> Option<(usize, AddressRange)> {
        let number = self.random.below(BUFFERS);
        let buffer = &self.buffers[number];
        let range = buffer.some_cells(cells, &mut self.random);
        let taken =
            |other: &AddressRange, writes: bool| other.overlaps(&range) && (alone || writes);
        let by_works = self.works.iter().any(|it| taken(&it.range, it.kind == WorkKind::Receive));
        let by_peers = self.exposures.iter().any(|it| taken(&it.range, true));
        (buffer.is_usable(range) && !by_works && !by_peers).then_some((number, range))
    }

    fn send(&mut self) {
        let cells = 1 + self.random.below(MOST_CELLS);
        let Some(connection) = self.some_connection() else { return };
        let Some((buffer, range)) = self.some_range(cells, false) else { return };
        let sent_already = self.works.iter().any(|work| work.range.overlaps(&range));
        let Some(lease) = self.lease(range, Access::READ) else { return };
        let id = self.new_id();
        let work = Work { id, key: lease.handle(), at: range.start(), cells };
        let posted = self.fabric.with(|world| {
            if !sent_already {
                let content: Vec<_> = (0..cells).map(|cell| stamp(id, cell)).collect();
                world.write(range, &content);
            }
            let meant = world.read(range);
            world.post_send(connection, work, &meant).is_ok()
        });
        if posted {
            self.outcome.happened.sends += 1;
            self.posted(id, connection, WorkKind::Send, (buffer, range), lease);
        }
    }

    fn receive(&mut self) {
        let Some(connection) = self.some_connection() else { return };
        let Some((buffer, range)) = self.some_range(MOST_CELLS, true) else { return };
        let Some(lease) = self.lease(range, Access::WRITE) else { return };
        let id = self.new_id();
        let work = Work { id, key: lease.handle(), at: range.start(), cells: MOST_CELLS };
        if self.fabric.with(|world| world.post_receive(connection, work).is_ok()) {
            self.posted(id, connection, WorkKind::Receive, (buffer, range), lease);
        }
    }

    fn posted(
        &mut self,
        id: u64,
        connection: ConnectionId,
        kind: WorkKind,
        (buffer, range): (usize, AddressRange),
        lease: SimLease<'c>,
    ) {
        self.buffers[buffer].users += 1;
        self.works.push(Posted { id, connection, kind, buffer, range, lease: Some(lease) });
        if self.works.len() > MOST_WORKS {
            self.take_completions();
        }
    }

    fn peer_sends(&mut self) {
        let (id, cells) = (self.new_id(), 1 + self.random.below(MOST_CELLS));
        let Some(connection) = self.some_connection() else { return };
        // A peer that sends is a peer that knows of memory posted for it, most of the time.
        let waiting =
            |work: &&Posted| work.connection == connection && work.kind == WorkKind::Receive;
        if self.works.iter().any(|work| waiting(&work)) || self.random.chance(10) {
            let _full = self.fabric.with(|world| world.peer_send(connection, id, cells));
        }
    }

    fn peer_writes(&mut self) {
        if self.exposures.is_empty() {
            return;
        }
        let which = self.random.below(self.exposures.len());
        let id = self.new_id();
        let exposure = &mut self.exposures[which];
        let first = self.random.below(exposure.cells.len());
        let cells = (1 + self.random.below(4)).min(exposure.cells.len() - first);
        let taken = exposure.cells[first..first + cells].iter().any(|(_, new)| new.is_some());
        let at = exposure.range.start() + first * crate::fabric::CELL_BYTES;
        let place = (exposure.key, at);
        let (connection, fabric) = (exposure.connection, self.fabric);
        if taken || fabric.with(|world| world.peer_write(connection, id, place, cells).is_err()) {
            return;
        }
        for (number, cell) in exposure.cells[first..first + cells].iter_mut().enumerate() {
            cell.1 = Some(stamp(id, number));
        }
        exposure.writes.push((id, first, cells));
        self.outcome.happened.peer_writes += 1;
    }

    fn expose(&mut self) {
        let Some(connection) = self.some_connection() else { return };
        let number = self.random.below(BUFFERS);
        let range = self.buffers[number].range;
        let exposed = self.exposures.iter().any(|it| it.connection == connection);
        let idle = self.buffers[number].users == 0 && self.buffers[number].is_usable(range);
        if exposed || !idle {
            return;
        }
        let rights = Access::READ_WRITE | Access::REMOTE_WRITE;
        let Some(lease) = self.lease(range, rights) else { return };
        let content = self.fabric.with(|world| world.read(range));
        let id = self.new_id();
        self.buffers[number].users += 1;
        self.exposures.push(Exposure {
            id,
            connection,
            buffer: number,
            range,
            key: lease.handle(),
            cells: content.into_iter().map(|cell| (cell, None)).collect(),
            writes: Vec::new(),
            lease: Some(lease),
        });
    }

    fn unexpose(&mut self) {
        self.hear_peers();
        let done = |it: &Exposure| it.writes.is_empty() && it.lease.is_some();
        if let Some(which) = self.exposures.iter().position(done) {
            self.end_exposure(which);
        }
    }

    pub(super) fn end_exposure(&mut self, which: usize) {
        checks::check_exposure(self, which);
        let exposure = self.exposures.swap_remove(which);
        self.buffers[exposure.buffer].users -= 1;
    }

    /// Takes what the peers know to be written.
    pub(super) fn hear_peers(&mut self) {
        while let Some(done) = self.fabric.with(World::poll_peer) {
            for exposure in &mut self.exposures {
                let Some(which) = exposure.writes.iter().position(|it| it.0 == done.id) else {
                    continue;
                };
                let (_, first, cells) = exposure.writes.swap_remove(which);
                for cell in &mut exposure.cells[first..first + cells] {
                    cell.0 = cell.1.take().unwrap_or(cell.0);
                }
            }
        }
    }

    pub(super) fn take_completions(&mut self) {
        while let Some(completion) = self.fabric.with(World::poll) {
            self.complete(&completion);
        }
        while let Some(connection) = self.fabric.with(World::poll_ended) {
            self.connection_ended(connection);
        }
    }

    fn complete(&mut self, completion: &WorkCompletion) {
        let known = self
            .works
            .iter()
            .position(|work| (work.id, work.connection) == (completion.id, completion.connection));
        let Some(which) = known else {
            return self.note(Finding::Wrong, format_args!("{completion:?} of no work"));
        };
        let work = self.works.swap_remove(which);
        self.buffers[work.buffer].users -= 1;
        match completion.completed {
            Completed::Flushed => self.outcome.happened.flushed += 1,
            Completed::Done { message, cells } if work.kind == WorkKind::Receive => {
                self.outcome.happened.receives += 1;
                checks::check_received(self, &work, message, cells);
            }
            Completed::Done { .. } => {}
        }
    }

    /// What was outstanding is aborted, and the program knows.
    fn connection_ended(&mut self, connection: ConnectionId) {
        self.outcome.happened.connections_ended += 1;
        self.hear_peers();
        if self.connections[connection.link] == Some(connection) {
            self.connections[connection.link] = None;
        }
        while let Some(which) = self.works.iter().position(|it| it.connection == connection) {
            let work = self.works.swap_remove(which);
            self.buffers[work.buffer].users -= 1;
        }
        while let Some(which) = self.exposures.iter().position(|it| it.connection == connection) {
            self.end_exposure(which);
        }
    }

    fn change_mappings(&mut self) {
        let number = self.random.below(BUFFERS);
        if let Some((range, discard)) = self.buffers[number].discard.take() {
            return self.fabric.with(|world| world.change(range, |_| discard.finish()));
        }
        let range = self.buffers[number].some_pages(&mut self.random);
        let whole = self.buffers[number].range;
        if self.buffers[number].users > 0 || self.is_suspended(whole) {
            return;
        }
        self.outcome.happened.mapping_changes += 1;
        let fresh = Protection::ReadWrite;
        let kind = if self.buffers[number].broken { 0 } else { self.random.below(5) };
        self.fabric.with(|world| match kind {
            0 => world.change(whole, |space| {
                space.unmap(whole);
                space.map(whole, fresh);
            }),
            1 => world.change(range, |space| space.map(range, fresh)),
            2 => world.change(range, |space| space.discard(range)),
            3 => world.change(range, |space| {
                let _moved = space.remap(range, ELSEWHERE);
                space.map(range, fresh);
            }),
            _ => {}
        });
        self.buffers[number].broken = false;
        if kind == 4 {
            let space = self.fabric.with(|world| world.space());
            self.buffers[number].discard = Some((range, space.begin_discard(range)));
        }
    }

    pub(super) fn is_suspended(&self, range: AddressRange) -> bool {
        self.suspensions.iter().any(|it| it.range.overlaps(&range))
    }

    fn change_weather(&mut self) {
        let weather = weather(&mut self.random, self.faults);
        let failing = if self.has(FaultKind::Registration) { self.random.below(3) } else { 0 };
        self.fabric.with(|world| {
            world.weather = weather;
            world.fail_next_registrations(failing);
        });
        if self.has(FaultKind::Panic) {
            let call = DeviceCall::ALL[self.random.below(DeviceCall::ALL.len())];
            let moment = [Moment::Before, Moment::After][self.random.below(2)];
            let ordered = self.random.chance(70).then_some((call, moment));
            self.fabric.with(|world| world.panic_next(ordered));
        }
    }

    /// Runs what the device may panic in; nothing if it did.
    pub(super) fn guarded<T>(&mut self, f: impl FnOnce() -> T) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(f)) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        if !panic.is::<DevicePanic>() {
            resume_unwind(panic);
        }
        self.outcome.happened.device_panics += 1;
        None
    }

    pub(super) fn expire_suspensions(&mut self) {
        let cache = self.cache;
        self.guarded(|| cache.expire_suspensions());
        self.heed_hushed_panics();
    }

    /// Where a panic was not passed on, which connection was not failed is unknown, so all are.
    pub(super) fn heed_hushed_panics(&mut self) {
        let panics = self.cache.suspension_statistics().device_panics;
        if panics == self.hushed_panics {
            return;
        }
        self.outcome.happened.device_panics += panics - self.hushed_panics;
        self.hushed_panics = panics;
        for connection in self.connections.into_iter().flatten() {
            self.fabric.with(|world| world.fail(connection));
        }
    }

    /// Connects again what it knows to have ended.
    pub(super) fn reconnect(&mut self) {
        let ended = self.connections.iter().position(Option::is_none);
        if let Some(link) = ended {
            self.connections[link] = Some(self.fabric.with(|world| {
                let connection = world.connect(link);
                world.peer_receive(connection, 8);
                connection
            }));
        }
    }

    fn disconnect(&mut self) {
        if !self.has(FaultKind::Disconnection) {
            return;
        }
        if let Some(connection) = self.some_connection() {
            self.fabric.with(|world| world.fail(connection));
        }
    }

    fn maintain_cache(&mut self) {
        match self.random.below(10) {
            0 | 1 => {
                self.cache.evict_idle();
            }
            2 => {
                let buffer = self.random.below(BUFFERS);
                let range = self.buffers[buffer].some_pages(&mut self.random);
                self.cache.evict_idle_in(range);
            }
            _ => {
                self.cache.reclaim();
            }
        }
        if self.has(FaultKind::Carelessness) && self.random.chance(50) {
            self.expire_suspensions();
        }
    }
}
