//! How messages travel: the protocol of a reliable connection.

use super::connection::{
    Body, Completed, ConnectionId, Data, Packet, PeerDone, Sending, Side, Target, WorkCompletion,
    WorkKind,
};
use super::nic::{Key, Trouble};
use super::world::{Event, World};
use super::{CELL_BYTES, Nanos};
use pinfold_core::Access;

/// How many packets may be under way unacknowledged.
const WINDOW: u32 = 8;
/// After how long without an acknowledgement everything is sent again.
const TIMEOUT: Nanos = 60_000;
/// How often that happens in a row before the connection is given up.
const TIMEOUTS: u8 = 7;
/// How long a sender waits whose receiver was not ready.
const PAUSE: Nanos = 15_000;

/// Why an end cannot use its own memory now.
enum Memory {
    Later,
    Never,
}

impl World {
    /// Sends what may be sent.
    pub(crate) fn pump(&mut self, connection: ConnectionId, side: Side) {
        while self.is_alive(connection) && self.may_send(connection.link, side) {
            match self.next_packet(connection.link, side) {
                Ok(data) => self.send_data(connection, side, data),
                // The event that a page fault ends with comes back to here.
                Err(Memory::Later) => return,
                Err(Memory::Never) => return self.die(connection.link),
            }
        }
    }

    fn may_send(&mut self, link: usize, side: Side) -> bool {
        let now = self.now();
        let stopped = self.links[link].stopped.filter(|_| side == Side::Local);
        let end = self.links[link].end(side);
        let limit = stopped.unwrap_or(u32::MAX).min(end.posted);
        end.sent < limit && end.sent - end.acknowledged < WINDOW && now >= end.pause_until
    }

    fn next_packet(&mut self, link: usize, side: Side) -> Result<Data, Memory> {
        let end = self.links[link].end(side);
        let number = end.sent;
        let Some((sending, cell)) = end.packet(number) else { return Err(Memory::Never) };
        let Sending { id, cells, target, source, meant, .. } = *sending;
        let meant = meant[cell];
        let content = match source {
            Some((key, at)) => self.fetch(link, key, at + cell * CELL_BYTES)?,
            None => meant,
        };
        let last = cell + 1 == cells;
        Ok(Data { number, message: id, cell, last, target, content, meant })
    }

    /// Reads a cell of the program's memory.
    fn fetch(&mut self, link: usize, key: Key, at: usize) -> Result<u64, Memory> {
        let domain = self.links[link].domain;
        match self.nic.translate(key, at, Access::READ, domain) {
            Ok(page) => Ok(*self.nic.memory.cell(page, at)),
            Err(Trouble::Forbidden) => Err(Memory::Never),
            Err(Trouble::Fault(key, page)) => {
                self.ask_for_page(key, page);
                let incarnation = self.links[link].incarnation;
                let again = Event::Pump(ConnectionId { link, incarnation }, Side::Local);
                self.agenda.add(self.weather.fault + 1, again);
                Err(Memory::Later)
            }
        }
    }

    fn ask_for_page(&mut self, key: Key, page: usize) {
        self.agenda.add(self.weather.fault, Event::Fault(key, page));
    }

    fn send_data(&mut self, connection: ConnectionId, side: Side, data: Data) {
        let end = self.links[connection.link].end(side);
        end.sent += 1;
        end.begun = end.begun.max(end.sent);
        self.run_timer(connection, side);
        self.send(connection, side.other(), Body::Data(data));
    }

    fn run_timer(&mut self, connection: ConnectionId, side: Side) {
        let end = self.links[connection.link].end(side);
        if !end.timer_runs {
            end.timer_runs = true;
            let epoch = end.epoch;
            self.agenda.add(TIMEOUT, Event::Timer(connection, side, epoch));
        }
    }

    fn send(&mut self, connection: ConnectionId, to: Side, body: Body) {
        let weather = self.weather;
        if weather.cut == Some(connection.link) || self.random.chance(weather.loss) {
            return;
        }
        let copies = if self.random.chance(weather.doubled) { 2 } else { 1 };
        for _ in 0..copies {
            let shortest = weather.latency / 5;
            let delay = shortest + self.random.next() % (weather.latency - shortest + 1);
            self.agenda.add(delay, Event::Arrive(Packet { connection, to, body }));
        }
    }

    pub(crate) fn time_out(&mut self, connection: ConnectionId, side: Side, epoch: u32) {
        if !self.is_alive(connection) || self.links[connection.link].end(side).epoch != epoch {
            return;
        }
        let end = self.links[connection.link].end(side);
        end.timer_runs = false;
        end.epoch += 1;
        if end.sent == end.acknowledged {
            return;
        }
        end.timeouts += 1;
        if end.timeouts > TIMEOUTS {
            return self.die(connection.link);
        }
        end.sent = end.acknowledged;
        self.pump(connection, side);
        self.run_timer_if_alive(connection, side);
    }

    /// Also if nothing could be sent: what was sent before is still unanswered.
    fn run_timer_if_alive(&mut self, connection: ConnectionId, side: Side) {
        if self.is_alive(connection) {
            let end = self.links[connection.link].end(side);
            if end.acknowledged < end.begun {
                self.run_timer(connection, side);
            }
        }
    }

    pub(crate) fn arrive(&mut self, packet: &Packet) {
        let Packet { connection, to, body } = *packet;
        if !self.is_alive(connection) {
            return;
        }
        match body {
            Body::Data(data) => self.take_data(connection, to, &data),
            Body::Acknowledge(number) => {
                self.acknowledge(connection, to, number);
                self.pump(connection, to);
            }
            Body::OutOfOrder(number) => {
                self.acknowledge(connection, to, number);
                self.go_back(connection, to, number);
                self.pump(connection, to);
            }
            Body::NotReady(number) => {
                self.acknowledge(connection, to, number);
                self.wait_and_repeat(connection, to, number);
            }
            Body::Forbidden => self.die(connection.link),
        }
    }

    fn go_back(&mut self, connection: ConnectionId, side: Side, number: u32) {
        let end = self.links[connection.link].end(side);
        // An old answer, of which the rest has come meanwhile.
        if number == end.acknowledged {
            end.sent = number;
        }
    }

    fn wait_and_repeat(&mut self, connection: ConnectionId, side: Side, number: u32) {
        let (now, patience) = (self.now(), self.weather.patience);
        let end = self.links[connection.link].end(side);
        if number != end.acknowledged || now < end.pause_until {
            return;
        }
        end.refusals = end.refusals.saturating_add(1);
        if patience.is_some_and(|patience| end.refusals > patience) {
            return self.die(connection.link);
        }
        // The peer is there: the retries are for when it is not.
        (end.sent, end.timeouts) = (number, 0);
        end.pause_until = now + PAUSE;
        self.agenda.add(PAUSE, Event::Pump(connection, side));
    }

    /// Everything before `number` has arrived.
    fn acknowledge(&mut self, connection: ConnectionId, side: Side, number: u32) {
        let end = self.links[connection.link].end(side);
        if number <= end.acknowledged {
            return;
        }
        end.acknowledged = number;
        end.sent = end.sent.max(number);
        (end.timeouts, end.refusals, end.timer_runs) = (0, 0, false);
        end.epoch += 1;
        while let Some(sending) = self.take_sent(connection.link, side, number) {
            self.complete_send(connection, side, &sending);
        }
        self.run_timer_if_alive(connection, side);
    }

    /// The oldest message, if all of it came before packet `number`.
    fn take_sent(&mut self, link: usize, side: Side, number: u32) -> Option<Sending> {
        let queue = &mut self.links[link].end(side).queue;
        if queue.front()?.end() <= number { queue.pop_front() } else { None }
    }

    fn complete_send(&mut self, connection: ConnectionId, side: Side, sending: &Sending) {
        let (id, cells) = (sending.id, sending.cells);
        match side {
            Side::Local => self.completions.push_back(WorkCompletion {
                connection,
                id,
                kind: WorkKind::Send,
                completed: Completed::Done { message: id, cells },
            }),
            Side::Peer => self.peer_done.push_back(PeerDone { connection, id }),
        }
    }

    fn take_data(&mut self, connection: ConnectionId, side: Side, data: &Data) {
        let from = side.other();
        let (stopped, silent) = {
            let link = &self.links[connection.link];
            (side == Side::Local && link.stopped.is_some(), link.silent)
        };
        let end = self.links[connection.link].end(side);
        let expected = end.expected;
        if stopped {
            if !silent {
                self.send(connection, from, Body::NotReady(expected));
            }
        } else if data.number < expected {
            self.send(connection, from, Body::Acknowledge(expected));
        } else if data.number > expected {
            if !std::mem::replace(&mut end.complained, true) {
                self.send(connection, from, Body::OutOfOrder(expected));
            }
        } else {
            self.take_expected(connection, side, data);
        }
    }

    fn take_expected(&mut self, connection: ConnectionId, side: Side, data: &Data) {
        let from = side.other();
        let stored = match side {
            Side::Local => self.store(connection.link, data),
            Side::Peer => self.judge(connection.link, data),
        };
        let expected = self.links[connection.link].end(side).expected;
        match stored {
            Ok(()) => {
                let end = self.links[connection.link].end(side);
                end.expected += 1;
                end.complained = false;
                self.finish_message(connection, side, data);
                self.send(connection, from, Body::Acknowledge(expected + 1));
            }
            Err(Memory::Later) => self.send(connection, from, Body::NotReady(expected)),
            Err(Memory::Never) => {
                self.send(connection, from, Body::Forbidden);
                self.die(connection.link);
            }
        }
    }

    /// Writes a cell of a peer's message to the program's memory.
    fn store(&mut self, link: usize, data: &Data) -> Result<(), Memory> {
        let (key, at, needs) = match data.target {
            Target::Write { key, at } => (key, at, Access::REMOTE_WRITE),
            Target::Receive => {
                let front = self.links[link].local.receives.front();
                let receive = front.copied().ok_or(Memory::Later)?;
                if data.cell >= receive.cells {
                    return Err(Memory::Never);
                }
                (receive.key, receive.at, Access::WRITE)
            }
        };
        let at = at + data.cell * CELL_BYTES;
        match self.nic.translate(key, at, needs, self.links[link].domain) {
            Ok(page) => {
                *self.nic.memory.cell(page, at) = data.content;
                Ok(())
            }
            Err(Trouble::Forbidden) => Err(Memory::Never),
            Err(Trouble::Fault(key, page)) => {
                self.ask_for_page(key, page);
                Err(Memory::Later)
            }
        }
    }

    /// A peer compares what came with what was meant.
    fn judge(&mut self, link: usize, data: &Data) -> Result<(), Memory> {
        if self.links[link].peer.receives.is_empty() {
            return Err(Memory::Later);
        }
        self.wrong += u64::from(data.content != data.meant);
        Ok(())
    }

    fn finish_message(&mut self, connection: ConnectionId, side: Side, data: &Data) {
        let end = self.links[connection.link].end(side);
        if !data.last || data.target != Target::Receive {
            return;
        }
        let Some(receive) = end.receives.pop_front() else { return };
        if side == Side::Local {
            let completed = Completed::Done { message: data.message, cells: data.cell + 1 };
            let kind = WorkKind::Receive;
            self.completions.push_back(WorkCompletion {
                connection,
                id: receive.id,
                kind,
                completed,
            });
        }
    }
}
