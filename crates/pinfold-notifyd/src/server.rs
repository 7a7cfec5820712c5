//! The loop: one thread, which waits for no client but in the one call that waits for everything.
//!
//! A client goes through stages, each a [`Stage`]: it is `Asking` from the moment it is accepted,
//! `Queued` once it has proved who it is, `Holding` its view until its process ends. The conversation
//! may end before that: a process whose connection is gone still believes its view, so only the
//! end of the process, or its own word, makes the helper forget one (`Leaving`). And a process may end
//! before what it was sent is read: then its view counts until that is read or closed
//! (`Unread`), because the kernel limits how many descriptors of one user may be under way.
//!
//! Making a view and forgetting one take the kernel some tens of milliseconds each, so users take turns
//! in both: one who ends hundreds of processes at once delays another by one of them.

use crate::accounts::Accounts;
use crate::limits::Limits;
use crate::listen::Listener;
use crate::log::Log;
use crate::parting::part;
use crate::peer::{self, Peer};
use crate::table::{Key, Source, Table};
use crate::turns::Turns;
use crate::views::Views;
use pinfold_ebpf::protocol::{BYTES, Challenge, DecodeError, Refusal, ToClient, ToHelper, VERSION};
use pinfold_kernel::poll::{Interest, Poll, Ready};
use pinfold_kernel::process::random;
use pinfold_kernel::socket::{self, Received};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Connections that are accepted before others are served again.
const ACCEPTED_AT_ONCE: usize = 32;
/// A clock has room for this and not for all durations.
const LONGEST_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);
/// How long no client is accepted after the kernel had no room for one more.
const PAUSE: Duration = Duration::from_millis(100);

/// The helper's server.
#[derive(Debug)]
pub struct Server<V: Views> {
    listener: Listener,
    views: V,
    poll: Poll,
    clients: Table<Client<V::Id>>,
    accounts: Accounts,
    turns: Turns<Key>,
    limits: Limits,
    /// When the clients are looked through next; `None` if no client waits.
    sweep_at: Option<Instant>,
    /// No client is accepted until the next sweep.
    paused: bool,
    log: Log,
}

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// `/proc` is missing, or shows the processes of another pid namespace.
    #[error(
        "/proc does not show this process by its own number, so clients cannot be told apart: \
         mount the /proc of the helper's pid namespace there"
    )]
    Proc,
    /// A call failed.
    #[error("{0} failed: {1}")]
    Os(&'static str, io::Error),
}

#[derive(Debug)]
struct Client<Id> {
    peer: Peer,
    connection: OwnedFd,
    stage: Stage<Id>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage<Id> {
    /// Has been told the challenge, and has to repeat it before the deadline.
    Asking(Challenge, Instant),
    /// Has asked, and waits for its turn.
    Queued,
    /// Has its view.
    Holding(Id),
    /// Has ended, or given its view back, and waits for its turn to have it forgotten.
    Leaving(Id),
    /// Has ended, and what it was sent is still on its way.
    Unread,
}

/// What a client's first packet was.
enum Asked {
    /// Nothing yet.
    Nothing,
    /// A request by the one who may make it.
    Properly,
    /// The connection's end.
    End,
    Wrongly(Refusal),
}

impl<V: Views> Server<V> {
    /// A server that hands out `views` at `listener` and writes few lines for the operator to `log`.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    pub fn new(
        listener: Listener,
        views: V,
        limits: Limits,
        log: impl FnMut(fmt::Arguments<'_>) + Send + 'static,
    ) -> Result<Self, StartError> {
        if !peer::proc_is_ours() {
            return Err(StartError::Proc);
        }
        let poll = Poll::new().map_err(|errno| StartError::Os("epoll_create1", errno.into()))?;
        poll.add(listener.as_fd(), Source::Listener.number())
            .map_err(|errno| StartError::Os("epoll_ctl", errno.into()))?;
        Ok(Self {
            listener,
            views,
            poll,
            clients: Table::new(),
            accounts: Accounts::new(limits),
            turns: Turns::new(),
            limits,
            sweep_at: None,
            paused: false,
            log: Log::new(log),
        })
    }

    /// Serves until there is something to read at `stop`.
    ///
    /// # Errors
    ///
    /// The kernel's, if it cannot be waited any more.
    pub fn run(&mut self, stop: BorrowedFd<'_>) -> io::Result<()> {
        self.poll.add(stop, Source::Stop.number())?;
        loop {
            for ready in self.poll.wait(self.patience())? {
                if self.handle(ready) == Source::Stop {
                    return Ok(());
                }
            }
            self.sweep_if_due(Instant::now());
            if let Some(key) = self.turns.pop() {
                self.serve(key);
            }
        }
    }

    /// How long there is nothing to do, unless something happens.
    fn patience(&self) -> Option<Duration> {
        if self.turns.is_empty() {
            self.sweep_at.map(|at| at.saturating_duration_since(Instant::now()))
        } else {
            Some(Duration::ZERO)
        }
    }

    fn handle(&mut self, ready: Ready) -> Source {
        let source = Source::from_number(ready.key);
        match source {
            Source::Stop => {}
            Source::Listener => self.accept_some(),
            Source::Process(key) => self.process_ended(key),
            Source::Connection(key) if ready.hung_up => self.hung_up(key),
            Source::Connection(key) => self.listen_to(key),
        }
        source
    }

    // --- arriving ---------------------------------------------------------------------------------

    fn accept_some(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match socket::accept(self.listener.as_fd()) {
                Ok(connection) => self.welcome(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_full(&error) => return self.pause(&error),
                // This one connection did not come about.
                Err(_) => {}
            }
        }
    }

    /// The kernel has no room for one more connection: asking again at once would not change that.
    fn pause(&mut self, error: &io::Error) {
        self.log.say(format_args!("no connection can be accepted for a moment: {error}"));
        let source = Source::Listener.number();
        if self.poll.change(self.listener.as_fd(), source, Interest::Closing).is_ok() {
            self.paused = true;
            self.sweep_within(PAUSE);
        }
    }

    fn welcome(&mut self, connection: OwnedFd) {
        match self.identify(connection.as_fd()) {
            Ok((peer, challenge)) => self.admit(connection, peer, challenge),
            Err(refusal) => decline(connection, refusal),
        }
    }

    /// The peer, counted among those that wait, and what it will have to repeat.
    fn identify(&mut self, connection: BorrowedFd<'_>) -> Result<(Peer, Challenge), Refusal> {
        let challenge = random().map(Challenge).map_err(|errno| kernel(&errno.into()))?;
        let credentials = socket::peer(connection).map_err(|error| kernel(&error))?;
        self.accounts.arrive(credentials.uid)?;
        Peer::new(connection, credentials)
            .map(|peer| (peer, challenge))
            .inspect_err(|_| self.accounts.depart(credentials.uid))
    }

    fn admit(&mut self, connection: OwnedFd, peer: Peer, challenge: Challenge) {
        let patience = self.limits.patience.min(LONGEST_PATIENCE);
        let stage = Stage::Asking(challenge, Instant::now() + patience);
        let key = self.clients.insert(Client { peer, connection, stage });
        match self.greet(key, challenge) {
            Ok(()) => self.sweep_within(self.sweep_interval()),
            Err(error) => self.dismiss(key, Some(kernel(&error))),
        }
    }

    /// Waits for the client's words and its end, and tells it the challenge.
    fn greet(&mut self, key: Key, challenge: Challenge) -> io::Result<()> {
        let Some(Client { peer, connection, .. }) = self.clients.get(key) else { return Ok(()) };
        self.poll.add(connection.as_fd(), Source::Connection(key).number())?;
        self.poll.add(peer.process(), Source::Process(key).number())?;
        socket::send(connection.as_fd(), &ToClient::Hello(challenge).encode(), &[])
    }

    // --- asking -----------------------------------------------------------------------------------

    fn listen_to(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        match client.stage {
            Stage::Asking(challenge, _) => match client.asked(challenge) {
                Asked::Nothing => {}
                Asked::Properly => self.enqueue(key),
                Asked::End => self.dismiss(key, None),
                Asked::Wrongly(refusal) => self.dismiss(key, Some(refusal)),
            },
            Stage::Holding(view) if client.gives_back() => self.leave(key, view),
            // There is nothing more to say.
            Stage::Holding(_) => self.hang_up(key),
            Stage::Queued | Stage::Leaving(_) | Stage::Unread => {}
        }
    }

    /// The client waits for its turn, and is not listened to meanwhile.
    fn enqueue(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        client.stage = Stage::Queued;
        let user = client.peer.user();
        self.turns.push(user, key);
        self.set_interest(key, Interest::Closing);
    }

    fn set_interest(&mut self, key: Key, interest: Interest) {
        let source = Source::Connection(key).number();
        if let Some(Client { connection, .. }) = self.clients.get(key) {
            // It fails only for what is not waited for.
            let _ = self.poll.change(connection.as_fd(), source, interest);
        }
    }

    // --- serving ----------------------------------------------------------------------------------

    /// It is this client's turn.
    fn serve(&mut self, key: Key) {
        match self.clients.get(key) {
            Some(Client { stage: Stage::Queued, peer, .. }) => {
                let user = peer.user();
                self.answer(key, user);
            }
            Some(Client { stage: Stage::Leaving(view), .. }) => {
                let view = *view;
                self.forget(key, view);
            }
            _ => {}
        }
    }

    fn answer(&mut self, key: Key, user: u32) {
        match self.accounts.grant(user).and_then(|()| self.give(key, user)) {
            Ok(()) => {
                self.accounts.depart(user);
                self.set_interest(key, Interest::Reading);
            }
            Err(refusal) => self.dismiss(key, Some(refusal)),
        }
    }

    /// Makes the view and sends it. The view has been granted to `user`.
    fn give(&mut self, key: Key, user: u32) -> Result<(), Refusal> {
        let given = self.make_and_send(key);
        match (&given, self.clients.get(key)) {
            (Ok(view), Some(client)) => client.stage = Stage::Holding(*view),
            _ => self.accounts.take_back(user),
        }
        given.map(drop)
    }

    fn make_and_send(&mut self, key: Key) -> Result<V::Id, Refusal> {
        let Some(Client { peer, connection, .. }) = self.clients.get(key) else {
            return Err(Refusal::Gone);
        };
        peer.check_open_to_its_user()?;
        let (view, descriptors) = self.views.open(peer.process()).map_err(|error| {
            self.log.say(format_args!("no view for process {}: {}", peer.pid(), error.what));
            error.refusal
        })?;
        let sent = peer
            .check_open_to_its_user()
            .and_then(|()| hand_over(connection.as_fd(), &descriptors));
        if sent.is_err() {
            self.views.forget(view);
        }
        sent.map(|()| view)
    }

    // --- leaving ----------------------------------------------------------------------------------

    fn process_ended(&mut self, key: Key) {
        match self.clients.get(key).map(|client| client.stage) {
            Some(Stage::Holding(view)) => self.leave(key, view),
            // Told together with what made it leave.
            Some(Stage::Leaving(_) | Stage::Unread) => {}
            _ => self.dismiss(key, None),
        }
    }

    /// The view is forgotten when it is this user's turn; nothing is waited for meanwhile.
    fn leave(&mut self, key: Key, view: V::Id) {
        let Some(client) = self.clients.get(key) else { return };
        client.stage = Stage::Leaving(view);
        self.poll.remove(client.peer.process());
        self.poll.remove(client.connection.as_fd());
        self.turns.push(client.peer.user(), key);
    }

    fn forget(&mut self, key: Key, view: V::Id) {
        self.views.forget(view);
        let Some(client) = self.clients.get(key) else { return };
        client.stage = Stage::Unread;
        if client.has_unread_descriptors() {
            self.sweep_within(self.sweep_interval());
        } else {
            self.dismiss(key, None);
        }
    }

    fn hung_up(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        match client.stage {
            // Its last word may have been that it needs the view no more.
            Stage::Holding(view) if client.gives_back() => self.leave(key, view),
            Stage::Holding(_) => self.hang_up(key),
            // Told together with what made it leave.
            Stage::Leaving(_) | Stage::Unread => {}
            Stage::Asking(..) | Stage::Queued => self.dismiss(key, None),
        }
    }

    /// Ends the conversation with a client that keeps its view. What it was sent may be unread, be it by another
    /// process, and is counted: so the connection, which tells, is closed with the view.
    fn hang_up(&mut self, key: Key) {
        let Some(Client { connection, .. }) = self.clients.get(key) else { return };
        self.poll.remove(connection.as_fd());
        socket::shutdown(connection.as_fd());
    }

    /// The client is no more; whatever it had is free.
    fn dismiss(&mut self, key: Key, refusal: Option<Refusal>) {
        let Some(Client { peer, connection, stage }) = self.clients.remove(key) else { return };
        let user = peer.user();
        match stage {
            Stage::Asking(..) => self.accounts.depart(user),
            Stage::Queued => {
                self.turns.remove(user, &key);
                self.accounts.depart(user);
            }
            // Those who hold one leave first.
            Stage::Holding(_) | Stage::Leaving(_) | Stage::Unread => self.accounts.take_back(user),
        }
        self.poll.remove(peer.process());
        self.poll.remove(connection.as_fd());
        self.conclude(connection, &peer, refusal);
    }

    fn conclude(&mut self, connection: OwnedFd, peer: &Peer, refusal: Option<Refusal>) {
        let Some(refusal) = refusal else { return part(connection) };
        let (pid, user) = (peer.pid(), peer.user());
        self.log.say(format_args!("refused process {pid} of user {user}: {refusal}"));
        decline(connection, refusal);
    }

    // --- looking after those who do nothing -------------------------------------------------------

    fn sweep_interval(&self) -> Duration {
        (self.limits.patience / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }

    fn sweep_within(&mut self, patience: Duration) {
        let at = Instant::now() + patience;
        self.sweep_at = Some(self.sweep_at.map_or(at, |before| before.min(at)));
    }

    fn sweep_if_due(&mut self, now: Instant) {
        if self.sweep_at.is_some_and(|at| at <= now) {
            self.sweep_at = None;
            self.accept_again();
            for key in self.clients.keys() {
                self.look_after(key, now);
            }
        }
    }

    fn accept_again(&mut self) {
        if self.paused {
            let source = Source::Listener.number();
            self.paused =
                self.poll.change(self.listener.as_fd(), source, Interest::Reading).is_err();
        }
    }

    /// The client's time is up, unless its request is here and we are late.
    fn give_up(&mut self, key: Key) {
        self.listen_to(key);
        if self.clients.get(key).is_some_and(|client| matches!(client.stage, Stage::Asking(..))) {
            self.dismiss(key, Some(Refusal::TooSlow));
        }
    }

    fn look_after(&mut self, key: Key, now: Instant) {
        let Some(client) = self.clients.get(key) else { return };
        match client.stage {
            Stage::Asking(_, deadline) if deadline <= now => self.give_up(key),
            Stage::Unread if !client.has_unread_descriptors() => self.dismiss(key, None),
            Stage::Asking(..) | Stage::Unread => self.sweep_within(self.sweep_interval()),
            Stage::Queued | Stage::Holding(_) | Stage::Leaving(_) => {}
        }
    }
}

impl<Id> Client<Id> {
    /// Looks at the client's first packet, and takes it if it is a proper request. What is not stays
    /// where it is, with whatever it brought (see `parting`).
    fn asked(&self, challenge: Challenge) -> Asked {
        let mut packet = [0; BYTES];
        let judged = match socket::peek(self.connection.as_fd(), &mut packet) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Asked::Nothing,
            Err(_) | Ok(Received { sender: None, .. }) => return Asked::End,
            Ok(received) => self.judge(&received, &packet, challenge),
        };
        match judged.map(|()| socket::receive(self.connection.as_fd(), &mut packet)) {
            Ok(Ok(_)) => Asked::Properly,
            Ok(Err(_)) => Asked::End,
            Err(refusal) => Asked::Wrongly(refusal),
        }
    }

    fn judge(
        &self,
        received: &Received,
        packet: &[u8],
        challenge: Challenge,
    ) -> Result<(), Refusal> {
        match self.word(received, packet)? {
            ToHelper::Ask(repeated) if repeated == challenge => Ok(()),
            _ => Err(Refusal::Malformed),
        }
    }

    /// What the client, and no other process, said.
    fn word(&self, received: &Received, packet: &[u8]) -> Result<ToHelper, Refusal> {
        if received.truncated {
            return Err(Refusal::Malformed);
        }
        if !received.sender.is_some_and(|sender| self.peer.sent(sender)) {
            return Err(Refusal::NotTheConnector);
        }
        let packet = packet.get(..received.length).unwrap_or_default();
        ToHelper::decode(packet).map_err(|error| match error {
            DecodeError::Version(_) => Refusal::Version { helper: VERSION },
            _ => Refusal::Malformed,
        })
    }

    /// Whether the client's next packet, which is taken then, gives the view back.
    fn gives_back(&self) -> bool {
        let mut packet = [0; BYTES];
        socket::peek(self.connection.as_fd(), &mut packet)
            .is_ok_and(|received| self.word(&received, &packet) == Ok(ToHelper::GiveBack))
            && socket::receive(self.connection.as_fd(), &mut packet).is_ok()
    }

    /// Whether what was sent is still on its way, descriptors and all.
    fn has_unread_descriptors(&self) -> bool {
        socket::unread(self.connection.as_fd()).is_ok_and(|bytes| bytes > 0)
    }
}

/// Says why there is no view, if the client listens, and closes.
fn decline(connection: OwnedFd, refusal: Refusal) {
    let _ = socket::send(connection.as_fd(), &ToClient::Refused(refusal).encode(), &[]);
    part(connection);
}

fn hand_over(connection: BorrowedFd<'_>, descriptors: &[OwnedFd]) -> Result<(), Refusal> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let count = u32::try_from(borrowed.len()).unwrap_or(u32::MAX);
    let message = ToClient::Granted { descriptors: count };
    socket::send(connection, &message.encode(), &borrowed).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Refusal::Gone,
        _ => kernel(&error),
    })
}

fn kernel(error: &io::Error) -> Refusal {
    Refusal::Kernel { errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

fn is_full(error: &io::Error) -> bool {
    let full = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|errno| full.contains(&errno))
}
