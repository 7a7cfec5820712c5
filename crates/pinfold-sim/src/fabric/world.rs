//! The simulated world: one device, its links, the clock, and what is told to go wrong.

use super::clock::Agenda;
use super::connection::{
    Completed, ConnectionId, End, Link, MOST_CELLS, Packet, PeerDone, PostError, Receiving,
    Sending, Side, Target, Work, WorkCompletion, WorkKind,
};
use super::memory::{CELL_BYTES, stamp};
use super::mutant::Mutant;
use super::nic::{Key, Nic, NicConfig};
use super::{CELLS_PER_PAGE, Nanos};
use crate::fault::Moment;
use crate::random::Random;
use crate::space::{AddressSpace, PAGE_BYTES, Protection};
use crate::sync::lock;
use pinfold_core::{AddressRange, RegisterError};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// What goes wrong, and how slow things are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weather {
    /// Of 100 packets, how many are lost.
    pub loss: usize,
    /// Of 100 packets, how many come twice.
    pub doubled: usize,
    /// The longest that a packet travels; the shortest is a fifth of it. Packets overtake each
    /// other.
    pub latency: Nanos,
    /// How long the translation cache may hold on to what was taken back.
    pub flush: Nanos,
    /// How long a registration takes.
    pub registration: Nanos,
    /// How long a page fault takes.
    pub fault: Nanos,
    /// What was posted on a connection that dies is not flushed: only the connection's end is
    /// told.
    pub loses_completions: bool,
    /// A stopped end keeps silent instead of asking its peer to wait.
    pub silent: bool,
    /// How often a sender is asked to wait before it gives up; nothing for as often as it takes.
    pub patience: Option<u8>,
    /// A link on which nothing arrives.
    pub cut: Option<usize>,
}

impl Default for Weather {
    /// Nothing goes wrong.
    fn default() -> Self {
        Self {
            loss: 0,
            doubled: 0,
            latency: 5_000,
            flush: 0,
            registration: 1_000,
            fault: 20_000,
            loses_completions: false,
            silent: false,
            patience: None,
            cut: None,
        }
    }
}

/// A call of the device by which a suspension goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the names are those of the functions
pub enum DeviceCall {
    Stop,
    InFlight,
    Withdraw,
    Quiet,
    Renew,
    Restart,
    Fail,
    /// To say what a registration would reach, which is asked before a registration is renewed, and by gets.
    Widen,
}

impl DeviceCall {
    /// Every one that only suspensions make.
    pub const ALL: [Self; 7] = [
        Self::Stop,
        Self::InFlight,
        Self::Withdraw,
        Self::Quiet,
        Self::Renew,
        Self::Restart,
        Self::Fail,
    ];
}

/// What a simulated panic of the device carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevicePanic(pub DeviceCall);

/// What became of a key that was renewed and is not the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rekeyed {
    /// The key that is dead.
    pub from: Key,
    /// The one in its place, if there is one.
    pub to: Option<Key>,
}

/// What is to happen at a moment.
#[derive(Debug)]
pub(crate) enum Event {
    Arrive(Packet),
    /// The retransmission timer of an end.
    Timer(ConnectionId, Side, u32),
    /// The end may have something to send.
    Pump(ConnectionId, Side),
    /// A page fault is served.
    Fault(Key, usize),
    /// The translation cache drops its entry.
    Flush,
}

/// How many entries the completion queue holds, outstanding work included.
const COMPLETIONS: usize = 256;

/// A device, its links, and everything that they do.
#[derive(Debug)]
pub struct World {
    pub(crate) agenda: Agenda<Event>,
    pub(crate) nic: Nic,
    pub(crate) links: Vec<Link>,
    pub(crate) random: Random,
    /// What goes wrong from now on.
    pub weather: Weather,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) failing: usize,
    pub(crate) panicking: Option<(DeviceCall, Moment)>,
    pub(crate) rekeyed: VecDeque<Rekeyed>,
    pub(crate) completions: VecDeque<WorkCompletion>,
    pub(crate) ended: VecDeque<ConnectionId>,
    pub(crate) peer_done: VecDeque<PeerDone>,
    pub(crate) wrong: u64,
}

/// A world that is shared: with the cache, which calls its device, and with the program.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<Mutex<World>>);

impl Fabric {
    /// A world over `space` with `links` pairs of ends, none connected.
    pub fn new(
        space: &Arc<AddressSpace>,
        links: usize,
        config: NicConfig,
        seed: u64,
        mutant: Option<Mutant>,
    ) -> Self {
        let mut nic = Nic::new(Arc::clone(space), config);
        nic.keeps_old_pages = mutant == Some(Mutant::OldTranslation);
        Self(Arc::new(Mutex::new(World {
            agenda: Agenda::new(),
            nic,
            links: (0..links).map(|_| Link::new(0)).collect(),
            random: Random::new(seed),
            weather: Weather::default(),
            mutant,
            failing: 0,
            panicking: None,
            rekeyed: VecDeque::new(),
            completions: VecDeque::new(),
            ended: VecDeque::new(),
            peer_done: VecDeque::new(),
            wrong: 0,
        })))
    }

    /// Does something with the world.
    pub fn with<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut lock(&self.0))
    }
}

impl World {
    /// The time.
    pub fn now(&self) -> Nanos {
        self.agenda.now()
    }

    /// Lets the program's own work take `time`.
    pub fn pass(&mut self, time: Nanos) {
        self.agenda.pass(time);
    }

    /// The next event happens; false if there is none.
    pub fn step(&mut self) -> bool {
        let Some(event) = self.agenda.next() else { return false };
        let now = self.now();
        match event {
            Event::Arrive(packet) => self.arrive(&packet),
            Event::Timer(connection, side, epoch) => self.time_out(connection, side, epoch),
            Event::Pump(connection, side) => self.pump(connection, side),
            Event::Fault(key, page) => self.nic.resolve(key, page),
            Event::Flush => self.nic.finish_flushes(now),
        }
        true
    }

    /// Everything happens that is due until `until`, and time goes on to then.
    pub fn run_until(&mut self, until: Nanos) {
        while self.agenda.next_at().is_some_and(|at| at <= until) {
            self.step();
        }
        self.pass(until.saturating_sub(self.now()));
    }

    /// Fails the next `count` registrations.
    pub fn fail_next_registrations(&mut self, count: usize) {
        self.failing = count;
    }

    /// Panics in the next call of this kind, before its work is done or after; in none, if nothing
    /// is said. What is renewed is lost in both cases.
    pub fn panic_next(&mut self, call: Option<(DeviceCall, Moment)>) {
        self.panicking = call;
    }

    /// The next key that a renewal changed or lost.
    pub fn poll_rekeyed(&mut self) -> Option<Rekeyed> {
        self.rekeyed.pop_front()
    }

    /// Whether `key` names a registration.
    pub fn is_registered(&self, key: Key) -> bool {
        self.nic.is_live(key)
    }

    pub(crate) fn order_failure(&mut self) -> Result<(), RegisterError> {
        if self.failing == 0 {
            return Ok(());
        }
        self.failing -= 1;
        Err(RegisterError::Os { operation: "register", errno: 5 })
    }

    /// The program's address space.
    pub fn space(&self) -> Arc<AddressSpace> {
        Arc::clone(&self.nic.space)
    }

    /// How many registrations live.
    pub fn registrations(&self) -> usize {
        self.nic.live()
    }

    /// How many cells a peer got, or the program was told it sent, with the wrong content.
    pub fn wrong(&self) -> u64 {
        self.wrong
    }

    // The program's memory.

    /// Changes the mappings of `range` by `change`; the pages that were there are another owner's
    /// afterwards, which writes to them.
    pub fn change(&mut self, range: AddressRange, change: impl FnOnce(&AddressSpace)) {
        let space = Arc::clone(&self.nic.space);
        let before = space.translate(range).unwrap_or_default();
        self.nic.invalidate(range);
        change(&space);
        before.into_iter().for_each(|page| self.nic.memory.give_away(page));
    }

    /// Moves the content of `range` to new pages, as migration does: the addresses stay.
    pub fn migrate(&mut self, range: AddressRange) {
        let content = self.read(range);
        self.change(range, |space| space.map(range, Protection::ReadWrite));
        self.write(range, &content);
    }

    /// What the program reads in `range`, which is mapped and made of whole cells; nothing if it
    /// is not mapped.
    pub fn read(&mut self, range: AddressRange) -> Vec<u64> {
        let pages = self.nic.space.translate(range).unwrap_or_default();
        let memory = &mut self.nic.memory;
        let base = range.start() / PAGE_BYTES;
        let cells = (range.start()..range.end()).step_by(CELL_BYTES);
        cells
            .filter_map(|at| pages.get(at / PAGE_BYTES - base).map(|&page| *memory.cell(page, at)))
            .collect()
    }

    /// The program writes `content` to `range`, as far as that is mapped.
    pub fn write(&mut self, range: AddressRange, content: &[u64]) {
        let Some(pages) = self.nic.space.translate(range) else { return };
        let base = range.start() / PAGE_BYTES;
        for (at, &cell) in (range.start()..range.end()).step_by(CELL_BYTES).zip(content) {
            *self.nic.memory.cell(pages[at / PAGE_BYTES - base], at) = cell;
        }
    }

    // The program's connections.

    /// Connects a link, with the leave of both programs: they alone call this.
    pub fn connect(&mut self, link: usize) -> ConnectionId {
        self.links[link].connect();
        ConnectionId { link, incarnation: self.links[link].incarnation }
    }

    /// Which connection a link has, whichever side made it.
    pub fn connected(&self, link: usize) -> Option<ConnectionId> {
        let it = &self.links[link];
        it.connected.then_some(ConnectionId { link, incarnation: it.incarnation })
    }

    /// Whether the local end of a link is stopped.
    pub fn is_stopped(&self, link: usize) -> bool {
        self.links[link].connected && self.links[link].stopped.is_some()
    }

    /// Whether this connection lives.
    pub(crate) fn is_alive(&self, connection: ConnectionId) -> bool {
        self.connected(connection.link) == Some(connection)
    }

    /// Sends `work.cells` cells. `meant` is what they contain now.
    ///
    /// # Errors
    ///
    /// [`PostError`].
    pub fn post_send(
        &mut self,
        connection: ConnectionId,
        work: Work,
        meant: &[u64],
    ) -> Result<(), PostError> {
        self.check_room(connection, work.cells)?;
        let source = Some((work.key, work.at));
        self.enqueue(connection, Side::Local, work.id, work.cells, Target::Receive, source, meant);
        self.pump(connection, Side::Local);
        Ok(())
    }

    /// Posts memory for a message of the peer.
    ///
    /// # Errors
    ///
    /// [`PostError`].
    pub fn post_receive(&mut self, connection: ConnectionId, work: Work) -> Result<(), PostError> {
        self.check_room(connection, work.cells)?;
        let Work { id, key, at, cells } = work;
        let receives = &mut self.links[connection.link].local.receives;
        receives.push_back(Receiving { id, key, at, cells });
        Ok(())
    }

    fn check_room(&self, connection: ConnectionId, cells: usize) -> Result<(), PostError> {
        if !self.is_alive(connection) {
            return Err(PostError::NotConnected);
        }
        let queued = |end: &End| end.queue.len() + end.receives.len();
        let outstanding: usize = self.links.iter().map(|link| queued(&link.local)).sum();
        let room = outstanding + self.completions.len() < COMPLETIONS;
        let fits = (1..=MOST_CELLS).contains(&cells);
        if room && fits { Ok(()) } else { Err(PostError::Full) }
    }

    /// The peer sends a message of `cells` cells, whose content follows from `id`.
    ///
    /// # Errors
    ///
    /// [`PostError`].
    pub fn peer_send(
        &mut self,
        connection: ConnectionId,
        id: u64,
        cells: usize,
    ) -> Result<(), PostError> {
        self.peer_post(connection, id, cells, Target::Receive)
    }

    /// The peer writes `cells` cells, whose content follows from `id`, to where it was told.
    ///
    /// # Errors
    ///
    /// [`PostError`].
    pub fn peer_write(
        &mut self,
        connection: ConnectionId,
        id: u64,
        (key, at): (Key, usize),
        cells: usize,
    ) -> Result<(), PostError> {
        self.peer_post(connection, id, cells, Target::Write { key, at })
    }

    fn peer_post(
        &mut self,
        connection: ConnectionId,
        id: u64,
        cells: usize,
        target: Target,
    ) -> Result<(), PostError> {
        if !self.is_alive(connection) {
            return Err(PostError::NotConnected);
        }
        if self.links[connection.link].peer.queue.len() >= 16 {
            return Err(PostError::Full);
        }
        let content: [u64; MOST_CELLS] = std::array::from_fn(|cell| stamp(id, cell));
        self.enqueue(connection, Side::Peer, id, cells, target, None, &content[..cells]);
        self.pump(connection, Side::Peer);
        Ok(())
    }

    /// The peer posts memory for `count` messages.
    pub fn peer_receive(&mut self, connection: ConnectionId, count: usize) {
        if self.is_alive(connection) {
            let receive = Receiving { id: 0, key: Key(0), at: 0, cells: MOST_CELLS };
            let receives = &mut self.links[connection.link].peer.receives;
            receives.extend(std::iter::repeat_n(receive, count));
        }
    }

    /// How many messages the peer has memory for.
    pub fn peer_receives(&self, link: usize) -> usize {
        self.links[link].peer.receives.len()
    }

    #[expect(clippy::too_many_arguments)] // a message has that many parts
    fn enqueue(
        &mut self,
        connection: ConnectionId,
        side: Side,
        id: u64,
        cells: usize,
        target: Target,
        source: Option<(Key, usize)>,
        content: &[u64],
    ) {
        let posted = self.now();
        let end = self.links[connection.link].end(side);
        let mut meant = [0; MOST_CELLS];
        meant[..content.len()].copy_from_slice(content);
        let sending = Sending { id, first: end.posted, cells, target, source, meant, posted };
        end.posted = sending.end();
        end.queue.push_back(sending);
    }

    /// The next completion, if there is one.
    pub fn poll(&mut self) -> Option<WorkCompletion> {
        self.completions.pop_front()
    }

    /// The next connection of whose end the program has not heard.
    pub fn poll_ended(&mut self) -> Option<ConnectionId> {
        self.ended.pop_front()
    }

    /// The next write that a peer knows to be done.
    pub fn poll_peer(&mut self) -> Option<PeerDone> {
        self.peer_done.pop_front()
    }

    /// Ends a connection in the open.
    pub fn fail(&mut self, connection: ConnectionId) {
        if self.is_alive(connection) {
            self.die(connection.link);
        }
    }

    /// The end of a connection: what was posted is flushed, and the program hears of it.
    pub(crate) fn die(&mut self, link: usize) {
        let it = &mut self.links[link];
        let connection = ConnectionId { link, incarnation: it.incarnation };
        (it.connected, it.stopped) = (false, None);
        let local = std::mem::take(&mut it.local);
        it.peer = End::default();
        if self.mutant == Some(Mutant::SwallowedCompletions) {
            return;
        }
        self.ended.push_back(connection);
        if self.weather.loses_completions {
            self.completions.retain(|completion| completion.connection != connection);
            return;
        }
        let sends = local.queue.iter().map(|sending| (sending.id, WorkKind::Send));
        let receives = local.receives.iter().map(|receive| (receive.id, WorkKind::Receive));
        let flushed =
            |(id, kind)| WorkCompletion { connection, id, kind, completed: Completed::Flushed };
        self.completions.extend(sends.chain(receives).map(flushed));
    }
}

const _: () = assert!(CELLS_PER_PAGE * CELL_BYTES == PAGE_BYTES);
