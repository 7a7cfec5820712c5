//! One thread of `pinfold torture`: carries out its program and judges every byte it moves.
//!
//! Data is judged where the program itself orders change and use: a thread's slots are its own, and
//! what takes two threads is a [race](crate::races) with its own rules.

use super::journal::{Row, Stage, Who};
use super::program::{Operation, PLACES, PORTS, Program, SLOTS, Window};
use super::stock::{Filled, range};
use super::tally::{Judged, Tally, WrongBytes};
use super::{Grounds, Owned, Shared, beside};
use crate::change::{
    Backing, Call, ChildEnd, DirectFile, FirstWrong, MappingFlood, Mutation, NoDescriptors,
    Obstacle, Part, Route, Specimen, difference, in_child_guarded,
};
use crate::output::Failure;
use crate::port::{Port, PortLease, Refusal};
use crate::races::{self, Pace, Race, RunRace, Stop, send_wrong};
use pinfold::pool::WhenExhausted;
use pinfold::{Access, AddressRange, Cover, GetError, Monitor};
use std::collections::VecDeque;
use std::fs;
use std::sync::PoisonError;
use std::time::Instant;

/// How many leases a thread keeps over whatever comes.
const HELD: usize = 4;

/// How many changes a thread makes while nothing can be opened, which hinders the others too.
const STARVED_CHANGES: usize = 8;

/// After so many operations of the first thread an audit sweeps; a forked child carries out a few more.
const SWEEP_EVERY: u64 = 32;

/// How many operations a forked child carries out.
const CHILD_OPERATIONS: usize = 40;

/// One thread.
pub(super) struct Worker<'g, 'p> {
    pub(super) grounds: &'g Grounds<'p>,
    thread: usize,
    /// What it writes into the journal, and where.
    place: (Who, Row),
    slots: [Option<Specimen>; SLOTS],
    held: VecDeque<PortLease<'p>>,
    pub(super) buffers: [Option<Filled<'p>>; PLACES],
    /// Fills no two pieces of memory with the same bytes.
    key: u64,
    pub(super) tally: Tally,
}

impl<'g, 'p> Worker<'g, 'p> {
    pub(super) fn new(grounds: &'g Grounds<'p>, thread: usize) -> Self {
        Self::at(grounds, thread, (Who::Thread(thread), Row::default()))
    }

    fn at(grounds: &'g Grounds<'p>, thread: usize, place: (Who, Row)) -> Self {
        Self {
            grounds,
            thread,
            place,
            slots: [const { None }; SLOTS],
            held: VecDeque::new(),
            buffers: [const { None }; PLACES],
            key: (thread as u64) << 48,
            tally: Tally::default(),
        }
    }

    /// Carries out one operation and counts it.
    pub(super) fn step(&mut self, step: u64, operation: &Operation) {
        self.enter(Stage::Running, step);
        let shared = self.grounds.shared;
        let changing = shared.trial.audit.then(|| beside(&shared.changes));
        self.carry_out_and_count(step, operation);
        drop(changing);
        if shared.trial.audit && self.thread == 0 && step % SWEEP_EVERY == SWEEP_EVERY - 1 {
            self.sweep();
        }
        self.count_parted(step, operation);
    }

    /// Looks at everything that is registered while no thread is within an operation: then all changes have
    /// returned.
    fn sweep(&self) {
        let changes = &self.grounds.shared.changes;
        let _still = changes.write().unwrap_or_else(PoisonError::into_inner);
        self.grounds.ports.iter().for_each(|port| port.sweep(self.lane()));
    }

    fn carry_out_and_count(&mut self, step: u64, operation: &Operation) {
        let births = &self.grounds.shared.births;
        let _births = operation.begins_threads().then(|| beside(births));
        let begun = Instant::now();
        let outcome = self.carry_out(operation);
        self.tally.took(operation, begun.elapsed());
        match outcome {
            Ok(wrong) => self.tally.done(self.thread, step, operation, wrong),
            Err(why) => self.tally.refused(operation, &why),
        }
    }

    fn count_parted(&mut self, step: u64, operation: &Operation) {
        let lanes = self.lane()..self.lane() + 2;
        for ledger in self.grounds.ports.iter().filter_map(Port::ledger) {
            for parted in ledger.take_parted(lanes.clone()) {
                self.tally.parted(self.thread, step, operation, parted);
            }
        }
    }

    /// Writes into the journal where this thread is.
    pub(super) fn enter(&mut self, stage: Stage, step: u64) {
        let (who, row) = &mut self.place;
        let (transfers, wrong) = (self.tally.transfers, self.tally.wrong);
        *row = Row { stage, step, transfers, wrong, ..*row };
        self.grounds.shared.journal.write(*who, *row);
    }

    fn carry_out(&mut self, operation: &Operation) -> Judged {
        match *operation {
            Operation::Allocate { slot, backing, grains } => self.allocate(slot, backing, grains),
            Operation::Change { slot, mutation } => self.change(slot, mutation),
            Operation::Send { slot, window, refill, port } => self.send(slot, window, refill, port),
            Operation::Receive { slot, window, port } => self.receive(slot, window, port),
            Operation::Hold { slot, window, port } => self.hold(slot, window, port),
            Operation::Release => {
                self.held.pop_front();
                Ok(None)
            }
            Operation::Vouch { slot, mutation, port } => self.vouch(slot, mutation, port),
            Operation::TakeOver { grains, port } => self.take_over(grains, port),
            Operation::Register { backing, grains, mutation, pace, port } => {
                let run = races::change_while_registering;
                self.race(backing, grains, mutation, pace, port, run)
            }
            Operation::Beside { backing, grains, mutation, pace, port } => {
                self.race(backing, grains, mutation, pace, port, races::change_beside)
            }
            Operation::Starve { slot, port } => self.starve(slot, port),
            Operation::Arrive { slot, window, port, arrival } => {
                self.arrive(slot, window, port, arrival)
            }
            Operation::Take { place, length, when, zeroed } => {
                self.take_buffer(place, length, when, zeroed)
            }
            Operation::SendBuffer { place, refill, port } => self.send_buffer(place, refill, port),
            Operation::ReceiveBuffer { place, as_word } => self.receive_buffer(place, as_word),
            Operation::PutBack { place } => self.put_back(place),
            Operation::PassOn { place } => self.pass_on(place),
            Operation::Trim { down_to } => self.trim(down_to),
            Operation::Fork { flood } => self.fork(flood),
            Operation::Replace { paged_out, zeros } => self.replace(paged_out, zeros),
        }
    }

    pub(super) fn next_key(&mut self) -> u64 {
        self.key += 1;
        self.key
    }

    /// The thread's first lane; the second one is for the other thread of a race.
    pub(super) fn lane(&self) -> usize {
        2 * self.thread
    }

    pub(super) fn port(&self, port: usize) -> &'p Port {
        &self.grounds.ports[port % PORTS]
    }

    fn slot(&self, slot: usize) -> Result<&Specimen, Stop> {
        self.slots.get(slot).and_then(Option::as_ref).ok_or(Stop::Gone)
    }

    /// Takes the memory out of its slot, so that it is gone if something stops half-way.
    pub(super) fn take(&mut self, slot: usize) -> Result<Specimen, Stop> {
        self.slots.get_mut(slot).and_then(Option::take).ok_or(Stop::Gone)
    }

    pub(super) fn put(&mut self, slot: usize, specimen: Specimen) {
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some(specimen);
        }
    }

    fn allocate(&mut self, slot: usize, backing: Backing, grains: usize) -> Judged {
        // The old memory goes first, so that the new one may get its address.
        drop(self.take(slot));
        let specimen = new_specimen(backing, grains)?;
        specimen.fill(specimen.body(), self.next_key());
        self.put(slot, specimen);
        Ok(None)
    }

    fn change(&mut self, slot: usize, mutation: Mutation) -> Judged {
        let specimen = self.take(slot)?;
        self.change_into(slot, specimen, mutation)?;
        Ok(None)
    }

    /// Changes what was in a slot and puts it back; what became useless half-way is replaced.
    fn change_into(
        &mut self,
        slot: usize,
        mut specimen: Specimen,
        mutation: Mutation,
    ) -> Result<(), Stop> {
        let key = self.next_key();
        let changed = self.mutate(&mut specimen, mutation, key);
        if changed.is_err() {
            let (backing, length) = (specimen.backing(), specimen.body().len());
            drop(specimen);
            specimen = new_specimen(backing, length / backing.grain())?;
            specimen.fill(specimen.body(), key);
        }
        self.put(slot, specimen);
        changed
    }

    /// Changes `specimen` and fills it anew. Where the monitor says that it cannot see the change,
    /// the program says it instead, as the monitor's users must.
    pub(super) fn mutate(
        &self,
        specimen: &mut Specimen,
        mutation: Mutation,
        key: u64,
    ) -> Result<(), Stop> {
        specimen.apply(mutation)?;
        if self.is_blind_to(specimen.backing(), mutation) {
            self.grounds.ports.iter().for_each(|port| port.forget(specimen.body()));
        }
        specimen.populate()?;
        specimen.fill(specimen.body(), key);
        Ok(())
    }

    pub(super) fn is_blind_to(&self, backing: Backing, mutation: Mutation) -> bool {
        let cover = |change| self.grounds.shared.monitor.coverage(backing.kind(), change);
        match mutation.change().map(cover) {
            Some(Cover::Undetected) => true,
            Some(Cover::Reported) => mutation.route() == Route::Other,
            _ => false,
        }
    }

    fn send(&mut self, slot: usize, window: Window, refill: bool, port: usize) -> Judged {
        let key = self.next_key();
        let specimen = self.slot(slot)?;
        let range = window.of(specimen);
        if refill {
            specimen.fill(range, key);
        }
        let wrong = send_wrong(self.port(port), specimen, range, self.lane())?;
        self.moved(range, wrong)
    }

    /// The bytes around what was received must stay as they were.
    fn receive(&mut self, slot: usize, window: Window, port: usize) -> Judged {
        let key = self.next_key();
        let specimen = self.slot(slot)?;
        let (range, body) = (window.of(specimen), specimen.body());
        let incoming = Specimen::pattern(range, key);
        let mut wanted = specimen.bytes(body);
        let offset = range.start() - body.start();
        wanted[offset..offset + range.len()].copy_from_slice(&incoming);
        self.port(port).receive(range, self.lane(), &incoming)?;
        let wrong = specimen.difference(body, &wanted);
        self.moved(body, wrong)
    }

    pub(super) fn moved(&mut self, range: AddressRange, wrong: Option<FirstWrong>) -> Judged {
        self.tally.transfers += 1;
        let note = "not what the memory held";
        Ok(wrong.map(|first| WrongBytes { range, first, note: note.into() }))
    }

    fn hold(&mut self, slot: usize, window: Window, port: usize) -> Judged {
        let range = window.of(self.slot(slot)?);
        let piece = range.pieces(Port::piece_bytes()).next().unwrap_or(range);
        if self.held.len() == HELD {
            self.held.pop_front();
        }
        let port = self.port(port);
        let lease = port.lease(piece, Access::READ_WRITE)?;
        port.audit(&lease, piece, self.lane());
        self.held.push_back(lease);
        Ok(None)
    }

    /// Memory that no monitor covers is cached on the program's word, which it keeps.
    fn vouch(&mut self, slot: usize, mutation: Mutation, port: usize) -> Judged {
        let (port, body) = (self.port(port), self.slot(slot)?.body());
        let before = self.send_vouched(port, slot)?;
        let specimen = self.take(slot)?;
        port.forget(body);
        self.change_into(slot, specimen, mutation)?;
        let after = self.send_vouched(port, slot)?;
        port.forget(body);
        Ok(before.or(after))
    }

    fn send_vouched(&mut self, port: &Port, slot: usize) -> Judged {
        let specimen = self.slot(slot)?;
        let body = specimen.body();
        let piece = body.pieces(Port::piece_bytes()).next().unwrap_or(body);
        let lease = port.lease_vouched(piece, Access::READ)?;
        let sent = port.send_leased(&lease, piece, self.lane())?;
        let wrong = specimen.difference(piece, &sent);
        self.moved(piece, wrong)
    }

    fn take_over(&mut self, grains: usize, port: usize) -> Judged {
        let unmap = Mutation::Unmap(Part::Whole, Call::Library);
        self.race(Backing::Anonymous, grains, unmap, Pace::Free, port, races::take_over)
    }

    /// One round of a race on new memory.
    fn race(
        &mut self,
        backing: Backing,
        grains: usize,
        mutation: Mutation,
        pace: Pace,
        port: usize,
        run: RunRace,
    ) -> Judged {
        let mut specimen = new_specimen(backing, grains)?;
        // Not of the wanted kind, perhaps.
        if self.is_blind_to(specimen.backing(), mutation) {
            return Ok(None);
        }
        let keys = [self.next_key(), self.next_key()];
        let race = Race { mutation, pace, keys, lane: self.lane() };
        let wrong = run(self.port(port), &mut specimen, race)?;
        self.moved(specimen.body(), wrong)
    }

    /// Nothing can be opened: the monitor and the device do with what they have.
    fn starve(&mut self, slot: usize, port: usize) -> Judged {
        const WHOLE: Window = Window { start: 0, length: u16::MAX };
        let backing = self.slot(slot)?.backing();
        let _alone = self.grounds.shared.starving.lock().unwrap_or_else(PoisonError::into_inner);
        let _starving = NoDescriptors::new()?;
        let mut wrong = None;
        let fitting = Mutation::ALL.into_iter().filter(|mutation| mutation.fits(backing));
        for mutation in fitting.take(STARVED_CHANGES) {
            // Changes that need a descriptor are refused, and so may be the sends: nothing is
            // wrong with that.
            let _ = self.change(slot, mutation);
            wrong = wrong.or(self.send(slot, WHOLE, false, port).unwrap_or(None));
        }
        Ok(wrong)
    }

    fn replace(&mut self, paged_out: bool, zeros: bool) -> Judged {
        let grounds = self.grounds;
        let file = grounds.direct.as_ref().ok_or(Stop::Gone)?;
        file.write(self.next_key())?;
        let before = self.send_file(file)?;
        if paged_out {
            file.page_out()?;
        }
        if zeros { file.zero() } else { file.write(self.next_key()) }?;
        Ok(before.or(self.send_file(file)?))
    }

    fn send_file(&mut self, file: &DirectFile) -> Judged {
        let range = file.mapping();
        let sent = self.port(0).send_with(range, self.lane(), Access::READ)?;
        self.moved(range, file.difference(&sent.bytes))
    }

    fn fork(&mut self, flood: bool) -> Judged {
        let key = self.next_key();
        let specimen = Specimen::new(Backing::Anonymous, 4)?;
        let body = specimen.body();
        specimen.fill(body, key);
        send_wrong(self.port(0), &specimen, body, self.lane())?;
        let births = self.grounds.shared.births.write().unwrap_or_else(PoisonError::into_inner);
        let end = in_child_guarded(births, || self.in_the_child(&specimen, key, flood))?;
        let row = self.grounds.shared.journal.read(Who::Child(self.thread));
        self.grounds.shared.journal.write(Who::Child(self.thread), Row::default());
        match end {
            ChildEnd::Answered(child::RIGHT) => self.tally.children.add(row),
            ChildEnd::Answered(child::REFUSED) => return Err(Stop::Child),
            end => {
                return Ok(Some(WrongBytes {
                    range: body,
                    first: 0,
                    note: child::meaning(&end, row),
                }));
            }
        }
        let key = self.next_key();
        specimen.fill(body, key);
        let after = send_wrong(self.port(0), &specimen, body, self.lane())?;
        self.moved(body, after)
    }

    /// The child is told that it is one, and then lives by caches of its own.
    fn in_the_child(&self, specimen: &Specimen, seed: u64, flood: bool) -> u8 {
        for port in self.grounds.ports {
            match port.lease(specimen.body(), Access::READ) {
                Err(Refusal::Get(GetError::Forked)) => {}
                _ => return child::NOT_TOLD,
            }
        }
        if !self.grounds.stock.is_forked() {
            return child::NOT_TOLD;
        }
        let make_monitor = self.grounds.shared.make_monitor;
        let opened = make_monitor().and_then(|monitor| {
            let shared = self.grounds.shared;
            let owned = Owned::open(shared.trial, &monitor, 1)?;
            let journal = shared.journal.try_clone().map_err(Failure::unavailable)?;
            Ok((owned, Shared::new(monitor, make_monitor, journal, shared.trial)))
        });
        let Ok((owned, shared)) = opened else { return child::REFUSED };
        let grounds = owned.grounds(&shared, 1, None);
        let _flood = flood.then(|| MappingFlood::new(FLOOD_SPARE));
        let process = std::process::id().into();
        let row = Row { process, seed, flood, ..Row::default() };
        let mut worker = Worker::at(&grounds, 0, (Who::Child(self.thread), row));
        let program = Program::new(seed, 0).filter(|operation| is_for_a_child(operation, flood));
        for (operation, step) in program.zip(0..).take(CHILD_OPERATIONS) {
            worker.step(step, &operation);
        }
        let heap = worker.heap();
        worker.enter(Stage::Over, CHILD_OPERATIONS as u64);
        let right = worker.tally.wrong == 0 && !matches!(heap, Ok(Some(_)));
        drop(worker);
        drop(grounds);
        let right = right && owned.stock.report().is_clean();
        if right { child::RIGHT } else { child::WRONG }
    }

    /// The heap shrinks and grows; only a process of few threads can do that to itself.
    fn heap(&mut self) -> Judged {
        let mut specimen = Specimen::new(Backing::Heap, 4)?;
        let body = specimen.body();
        specimen.fill(body, self.next_key());
        self.port(0).send(body, self.lane())?;
        let key = self.next_key();
        self.mutate(&mut specimen, Mutation::ShrinkBreak, key)?;
        let wrong = send_wrong(self.port(0), &specimen, body, self.lane())?;
        self.moved(body, wrong)
    }
}

/// What a thread does with buffers of the pool that all threads share.
impl<'p> Worker<'_, 'p> {
    pub(super) fn take_buffer(
        &mut self,
        place: usize,
        length: usize,
        when: WhenExhausted,
        zeroed: bool,
    ) -> Judged {
        let before = self.put_back(place);
        let key = self.next_key();
        let buffer = self.grounds.stock.take(length, when, zeroed)?;
        let dirty = buffer.iter().position(|&byte| zeroed && byte != 0);
        let note = "a buffer of zeros was none";
        let range = range(&buffer)?;
        self.set_buffer(place, Filled::new(buffer, key)?);
        let dirty = dirty.map(|first| WrongBytes { range, first, note: note.into() });
        Ok(before.unwrap_or(None).or(dirty))
    }

    /// The buffer's own registration and the cache's, of which the cache does not know that the
    /// pool gives memory back, move the same bytes.
    pub(super) fn send_buffer(&mut self, place: usize, refill: bool, port: usize) -> Judged {
        let key = self.next_key();
        let mut filled = self.buffer(place)?;
        let wrong = filled.wrong()?;
        if refill {
            filled = Filled::new(filled.buffer, key)?;
        }
        let (range, pattern) = (range(&filled.buffer)?, filled.pattern()?);
        let sent = self.grounds.stock.send(&filled, self.lane());
        let sent_by_cache = self.port(port).send(range, self.lane());
        self.set_buffer(place, filled);
        let wrong = wrong.or(self.moved(range, difference(&sent?, &pattern))?);
        Ok(wrong.or(self.moved(range, difference(&sent_by_cache?.bytes, &pattern))?))
    }

    pub(super) fn receive_buffer(&mut self, place: usize, as_word: bool) -> Judged {
        let key = self.next_key();
        let filled = self.buffer(place)?;
        let (before, range) = (filled.wrong()?, range(&filled.buffer)?);
        let incoming = Specimen::pattern(range, key);
        let lane = self.lane();
        let buffer = self.grounds.stock.receive(filled.buffer, lane, &incoming, as_word)?;
        let wrong = difference(&buffer, &incoming);
        self.set_buffer(place, Filled { buffer, key });
        Ok(before.or(self.moved(range, wrong)?))
    }

    pub(super) fn put_back(&mut self, place: usize) -> Judged {
        self.buffer(place)?.wrong()
    }

    pub(super) fn pass_on(&mut self, place: usize) -> Judged {
        let filled = self.buffer(place)?;
        let other = self.grounds.passed.pass_on(filled);
        other.map_or(Ok(None), |other| other.wrong())
    }

    pub(super) fn trim(&mut self, down_to: usize) -> Judged {
        self.grounds.stock.pool.trim(down_to);
        Ok(None)
    }

    /// Takes a buffer out of its place.
    fn buffer(&mut self, place: usize) -> Result<Filled<'p>, Stop> {
        self.buffers.get_mut(place).and_then(Option::take).ok_or(Stop::Gone)
    }

    fn set_buffer(&mut self, place: usize, filled: Filled<'p>) {
        if let Some(place) = self.buffers.get_mut(place) {
            *place = Some(filled);
        }
    }
}

/// How many mappings a child that runs out of them may still make.
const FLOOD_SPARE: usize = 24;

/// A child neither forks again nor lowers limits, and starts no thread where it can map nothing:
/// the standard library ends the process if a new thread gets no stack for signals.
pub(super) fn is_for_a_child(operation: &Operation, flood: bool) -> bool {
    match operation {
        Operation::Fork { .. } | Operation::Starve { .. } | Operation::Replace { .. } => false,
        Operation::TakeOver { .. } | Operation::Register { .. } | Operation::Beside { .. } => {
            !flood
        }
        Operation::Arrive { arrival, .. } => !(flood && arrival.beside),
        _ => true,
    }
}

/// What a child found out; its exit status.
mod child {
    use super::{ChildEnd, Row};
    use std::borrow::Cow;

    pub(super) const RIGHT: u8 = 0;
    pub(super) const NOT_TOLD: u8 = 1;
    pub(super) const WRONG: u8 = 2;
    pub(super) const REFUSED: u8 = 3;

    /// What a bad answer means.
    pub(super) fn meaning(end: &ChildEnd, row: Row) -> Cow<'static, str> {
        let Row { seed, step, .. } = row;
        match end {
            ChildEnd::Answered(NOT_TOLD) => {
                "the child was let into its parent's cache or pool".into()
            }
            ChildEnd::Answered(WRONG) => {
                format!("the caches or the pool of the child with seed {seed} moved wrong data")
                    .into()
            }
            end => format!("the child with seed {seed}, at step {step}: {end:?}").into(),
        }
    }
}

/// How many huge pages are free besides those that are promised, before a program takes some: as many as all
/// threads' races may have discarded while the device had them pinned.
const SPARE_HUGE_PAGES: u64 = 16;

/// New memory; small pages, where there are none of the wanted kind, or too few: a program that writes to a
/// huge page which it discarded, and which cannot be had again, is ended.
fn new_specimen(backing: Backing, grains: usize) -> Result<Specimen, Obstacle> {
    let backing = match backing {
        Backing::Hugetlb if free_huge_pages() < SPARE_HUGE_PAGES => Backing::Anonymous,
        backing => backing,
    };
    Specimen::new(backing, grains).or_else(|_| Specimen::new(Backing::Anonymous, grains))
}

/// Of those of 2 MiB that are set aside, those that are neither used nor reserved.
fn free_huge_pages() -> u64 {
    // Two files: the whole of `Discovery` takes as long as many operations.
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let count = |name| {
        let text = fs::read_to_string(format!("{POOL}/{name}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let free = count("free_hugepages").and_then(|free| free.checked_sub(count("resv_hugepages")?));
    free.unwrap_or(0)
}
