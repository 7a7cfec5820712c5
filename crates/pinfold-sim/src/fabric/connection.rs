//! A reliable connection: what each end has posted, sent, acknowledged and received.

use super::Nanos;
use super::nic::Key;
use std::collections::VecDeque;

/// The longest message, in cells.
pub(crate) const MOST_CELLS: usize = 8;

/// A connection, as long as it lives: one that is made anew between the same ends is another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionId {
    /// The number of the pair of ends.
    pub link: usize,
    /// How often they have been connected.
    pub incarnation: u32,
}

/// What a program posts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// The program's name for it; comes back in the completion.
    pub id: u64,
    /// The registration through which the device touches the memory.
    pub key: Key,
    /// The first address, a multiple of a cell.
    pub at: usize,
    /// How many cells, 1 to 8.
    pub cells: usize,
}

/// What kind of work a completion is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WorkKind {
    /// A message to the peer.
    Send,
    /// A message from the peer.
    Receive,
}

/// How a work ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completed {
    /// It was done. For a receive, with the peer's message of this number and length in cells.
    Done {
        /// The peer's message.
        message: u64,
        /// Its length, in cells.
        cells: usize,
    },
    /// It was aborted, with its connection.
    Flushed,
}

/// An entry of the completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkCompletion {
    /// The connection.
    pub connection: ConnectionId,
    /// The program's name for the work.
    pub id: u64,
    /// What kind of work.
    pub kind: WorkKind,
    /// How it ended.
    pub completed: Completed,
}

/// A peer's write that was acknowledged to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerDone {
    /// The connection.
    pub connection: ConnectionId,
    /// The peer's name for the write.
    pub id: u64,
}

/// Why nothing was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// The connection is no more.
    NotConnected,
    /// The queue, or the completion queue, has no room.
    Full,
}

/// The two ends of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Local,
    Peer,
}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Local => Self::Peer,
            Self::Peer => Self::Local,
        }
    }
}

/// Where the data of a message lands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// In what the receiver has posted.
    Receive,
    /// Where the sender says.
    Write { key: Key, at: usize },
}

/// A message being sent.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) id: u64,
    /// The sequence number of its first packet.
    pub(crate) first: u32,
    pub(crate) cells: usize,
    pub(crate) target: Target,
    /// Where the local end reads it; a peer makes it up.
    pub(crate) source: Option<(Key, usize)>,
    /// What the program meant to send: for the check alone.
    pub(crate) meant: [u64; MOST_CELLS],
    pub(crate) posted: Nanos,
}

impl Sending {
    #[expect(clippy::cast_possible_truncation)] // at most MOST_CELLS
    pub(crate) fn end(&self) -> u32 {
        self.first + self.cells as u32
    }
}

/// What is posted for a message to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Receiving {
    pub(crate) id: u64,
    pub(crate) key: Key,
    pub(crate) at: usize,
    pub(crate) cells: usize,
}

/// One end of a connection.
#[derive(Debug, Default)]
pub(crate) struct End {
    // Sending: acknowledged <= sent <= posted, all sequence numbers.
    pub(crate) queue: VecDeque<Sending>,
    pub(crate) acknowledged: u32,
    pub(crate) sent: u32,
    /// The most that `sent` has been: it goes back when packets are lost.
    pub(crate) begun: u32,
    pub(crate) posted: u32,
    pub(crate) timeouts: u8,
    pub(crate) refusals: u8,
    /// The receiver was not ready: nothing before this moment.
    pub(crate) pause_until: Nanos,
    /// Timers of earlier epochs mean nothing.
    pub(crate) epoch: u32,
    pub(crate) timer_runs: bool,
    // Receiving.
    pub(crate) expected: u32,
    pub(crate) receives: VecDeque<Receiving>,
    pub(crate) complained: bool,
}

impl End {
    /// The message that packet `number` belongs to, and which of its cells that is.
    pub(crate) fn packet(&self, number: u32) -> Option<(&Sending, usize)> {
        let sending = self.queue.iter().find(|sending| number < sending.end())?;
        Some((sending, (number.checked_sub(sending.first)?) as usize))
    }
}

/// Two ends and what is between them.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) incarnation: u32,
    pub(crate) connected: bool,
    /// The local end begins nothing beyond this sequence number, and takes nothing from its peer.
    pub(crate) stopped: Option<u32>,
    /// A stopped end says nothing instead of asking its peer to wait.
    pub(crate) silent: bool,
    pub(crate) domain: u8,
    pub(crate) local: End,
    pub(crate) peer: End,
}

impl Link {
    pub(crate) fn new(domain: u8) -> Self {
        Self {
            incarnation: 0,
            connected: false,
            stopped: None,
            silent: false,
            domain,
            local: End::default(),
            peer: End::default(),
        }
    }

    pub(crate) fn end(&mut self, side: Side) -> &mut End {
        match side {
            Side::Local => &mut self.local,
            Side::Peer => &mut self.peer,
        }
    }

    /// Two fresh ends.
    pub(crate) fn connect(&mut self) {
        self.incarnation += 1;
        self.connected = true;
        self.stopped = None;
        self.local = End::default();
        self.peer = End::default();
    }
}

/// What travels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) connection: ConnectionId,
    pub(crate) to: Side,
    pub(crate) body: Body,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Body {
    Data(Data),
    /// Everything before this number has come.
    Acknowledge(u32),
    /// The same, and something after it is missing.
    OutOfOrder(u32),
    /// The same, and the next is not wanted yet.
    NotReady(u32),
    /// The access was refused: the end of the connection.
    Forbidden,
}

/// One cell of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Data {
    pub(crate) number: u32,
    pub(crate) message: u64,
    pub(crate) cell: usize,
    pub(crate) last: bool,
    pub(crate) target: Target,
    pub(crate) content: u64,
    /// What the sender meant to send: for the check alone.
    pub(crate) meant: u64,
}
