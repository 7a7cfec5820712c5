//! The loop: one thread, which waits for no client but in the one call that waits for everything.
//!
//! A client goes through stages, each a [`Stage`]: it is `Asking` from the moment it is accepted,
//! `Queued` once it has proved who it is, `Holding` its view until its process ends. The conversation
//! may end before that: a process whose connection is gone still believes its view, so only the
//! end of the process, or its own word, makes the helper forget one (`Leaving`).
//!
//! A client that is no more has left its connection, which is closed once that waits for nothing (`parting`). And a
//! process may end before what it was sent is read: then the connection stays until that is read or closed, because the
//! kernel limits how many descriptors of one user may be under way. So long it counts for its user ([`Ending`]).
//!
//! Making a view and forgetting one take the kernel some tens of milliseconds each, so users take turns
//! in both: one who ends hundreds of processes at once delays another by one of them.

use crate::accounts::{Accounts, Share};
use crate::limits::ClientLimits;
use crate::listen::{self, Listener};
use crate::log::Log;
use crate::memory::GroupMemory;
use crate::parting::{Emptying, Parting, is_about_the_other_side};
use crate::peer::{self, Peer};
use crate::table::{Key, Source, Table};
use crate::turns::Turns;
use crate::views::Views;
use pinfold_ebpf::protocol::{
    BYTES, Challenge, DecodeError, ToClient, ToHelper, VERSION, ViewRefusal,
};
use pinfold_kernel::poll::{Interest, Poll, Ready};
use pinfold_kernel::process::{Resource, random};
use pinfold_kernel::socket::{self, Process, Received};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Connections that are accepted before others are served again: all that wait, so that one user's many delay another's
/// by no turn. Of a user that has too many, each is turned away at once; a thousand take less than a turn.
const ACCEPTED_AT_ONCE: usize = listen::BACKLOG as usize;
/// A clock has room for this and not for all durations.
const LONGEST_PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);
/// The user of a connection that has none.
const UNKNOWN_USER: u32 = u32::MAX;
/// How long no client is accepted after the kernel had no room for one more.
const PAUSE: Duration = Duration::from_millis(100);

/// The helper's server.
#[derive(Debug)]
pub struct Server<V: Views> {
    listener: Listener,
    views: V,
    poll: Poll,
    clients: Table<Client<V::Id>>,
    endings: Vec<Ending>,
    emptying: Emptying,
    accounts: Accounts,
    memory: GroupMemory,
    turns: Turns<Key>,
    limits: ClientLimits,
    /// When clients and endings are looked through next; `None` if none of them waits.
    sweep_at: Option<Instant>,
    /// No client is accepted until the next sweep.
    paused: bool,
    log: Log,
}

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
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
}

/// A connection without a client, until it is closed.
#[derive(Debug)]
struct Ending {
    parting: Parting,
    user: u32,
    share: Share,
}

impl Ending {
    /// Whether it can be closed. Only a view's is waited for: nothing else was sent with descriptors.
    fn is_over(&mut self, emptying: &mut Emptying) -> bool {
        self.parting.is_empty(emptying) && (self.share != Share::View || !self.parting.is_unread())
    }
}

/// What a client's first packet was.
enum Asked {
    /// Nothing yet.
    Nothing,
    /// A request by the one who may make it.
    Properly,
    /// The connection's end.
    End,
    Wrongly(ViewRefusal),
}

impl<V: Views> Server<V> {
    /// A server that hands out `views` at `listener` and writes few lines for the operator to `log`.
    ///
    /// # Errors
    ///
    /// [`ServerError`].
    pub fn new(
        listener: Listener,
        views: V,
        limits: ClientLimits,
        log: impl FnMut(fmt::Arguments<'_>) + Send + 'static,
    ) -> Result<Self, ServerError> {
        if !peer::proc_is_ours() {
            return Err(ServerError::Proc);
        }
        let poll = Poll::new().map_err(|errno| ServerError::Os("epoll_create1", errno.into()))?;
        poll.add(listener.as_fd(), Source::Listener.number())
            .map_err(|errno| ServerError::Os("epoll_ctl", errno.into()))?;
        Ok(Self {
            listener,
            views,
            poll,
            clients: Table::new(),
            endings: Vec::new(),
            emptying: Emptying::new(),
            accounts: Accounts::new(limits, limits.spare(descriptors())),
            memory: GroupMemory::own(),
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
            if !self.accounts.may_turn_away() {
                return self.pause(&"too many that were turned away cannot be closed");
            }
            match socket::accept(self.listener.as_fd()) {
                Ok(connection) => self.welcome(connection),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_full(&error) => return self.pause(&error),
                // This one connection did not come about.
                Err(_) => {}
            }
        }
    }

    /// There is no room for one more connection: asking again at once would not change that.
    fn pause(&mut self, why: &dyn fmt::Display) {
        self.log.say(format_args!("no connection can be accepted for a moment: {why}"));
        let source = Source::Listener.number();
        if self.poll.change(self.listener.as_fd(), source, Interest::Closing).is_ok() {
            self.paused = true;
            self.sweep_within(PAUSE);
        }
    }

    fn welcome(&mut self, connection: OwnedFd) {
        // One that waited before the listener was prepared has not inherited it (Linux 6.16).
        let _ = listen::prepare_connection(connection.as_fd());
        match socket::peer(connection.as_fd()) {
            Ok(credentials) => self.meet(connection, credentials),
            // No connection of this kind is without.
            Err(error) => self.turn_away(connection, UNKNOWN_USER, kernel(&error)),
        }
    }

    fn meet(&mut self, connection: OwnedFd, credentials: Process) {
        match self.identify(connection.as_fd(), credentials) {
            Ok((peer, challenge)) => self.admit(connection, peer, challenge),
            Err(refusal) => self.turn_away(connection, credentials.uid, refusal),
        }
    }

    /// Says why there is no view, if the client listens, and closes what counts in no account.
    fn turn_away(&mut self, connection: OwnedFd, user: u32, refusal: ViewRefusal) {
        decline(connection.as_fd(), refusal);
        self.accounts.turn_away();
        self.part(connection, user, Share::Spare);
    }

    /// The peer, counted among those that wait, and what it will have to repeat.
    fn identify(
        &mut self,
        connection: BorrowedFd<'_>,
        credentials: Process,
    ) -> Result<(Peer, Challenge), ViewRefusal> {
        let challenge = random().map(Challenge).map_err(|errno| kernel(&errno.into()))?;
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
            Stage::Queued | Stage::Leaving(_) => {}
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
    fn give(&mut self, key: Key, user: u32) -> Result<(), ViewRefusal> {
        let given = self.make_and_send(key);
        match (&given, self.clients.get(key)) {
            (Ok(view), Some(client)) => client.stage = Stage::Holding(*view),
            _ => self.accounts.take_back(user),
        }
        given.map(drop)
    }

    fn make_and_send(&mut self, key: Key) -> Result<V::Id, ViewRefusal> {
        let Some(Client { peer, connection, .. }) = self.clients.get(key) else {
            return Err(ViewRefusal::Gone);
        };
        peer.check_open_to_its_user()?;
        if self.memory.is_scarce() {
            return Err(ViewRefusal::NoMemory);
        }
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
            Some(Stage::Leaving(_)) => {}
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
        self.dismiss(key, None);
    }

    fn hung_up(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        match client.stage {
            // Its last word may have been that it needs the view no more.
            Stage::Holding(view) if client.gives_back() => self.leave(key, view),
            Stage::Holding(_) => self.hang_up(key),
            // Told together with what made it leave.
            Stage::Leaving(_) => {}
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

    /// The client is no more; whatever it had is free once its connection is closed.
    fn dismiss(&mut self, key: Key, refusal: Option<ViewRefusal>) {
        let Some(Client { peer, connection, stage }) = self.clients.remove(key) else { return };
        self.poll.remove(peer.process());
        self.poll.remove(connection.as_fd());
        let (pid, user) = (peer.pid(), peer.user());
        let share = match stage {
            Stage::Asking(..) | Stage::Queued => Share::Waiting,
            // Those who hold one leave first.
            Stage::Holding(_) | Stage::Leaving(_) => Share::View,
        };
        self.turns.remove(user, &key);
        if let Some(refusal) = refusal {
            self.log.say(format_args!("refused process {pid} of user {user}: {refusal}"));
            decline(connection.as_fd(), refusal);
        }
        self.part(connection, user, share);
    }

    /// Closes a connection that has `share`, now or as soon as that waits for nothing.
    fn part(&mut self, connection: OwnedFd, user: u32, share: Share) {
        self.emptying.look();
        self.end(Ending { parting: Parting::new(connection, user), user, share });
    }

    fn end(&mut self, mut ending: Ending) {
        if ending.is_over(&mut self.emptying) {
            self.accounts.release(ending.user, ending.share);
        } else {
            self.endings.push(ending);
            self.sweep_within(self.sweep_interval());
        }
    }

    fn end_others(&mut self) {
        self.emptying.look();
        for ending in std::mem::take(&mut self.endings) {
            self.end(ending);
        }
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
            self.end_others();
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
            self.dismiss(key, Some(ViewRefusal::TooSlow));
        }
    }

    fn look_after(&mut self, key: Key, now: Instant) {
        let Some(client) = self.clients.get(key) else { return };
        match client.stage {
            Stage::Asking(_, deadline) if deadline <= now => self.give_up(key),
            Stage::Asking(..) => self.sweep_within(self.sweep_interval()),
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
    ) -> Result<(), ViewRefusal> {
        match self.word(received, packet)? {
            ToHelper::Ask(repeated) if repeated == challenge => Ok(()),
            _ => Err(ViewRefusal::Malformed),
        }
    }

    /// What the client, and no other process, said.
    fn word(&self, received: &Received, packet: &[u8]) -> Result<ToHelper, ViewRefusal> {
        if received.truncated {
            return Err(ViewRefusal::Malformed);
        }
        if !received.sender.is_some_and(|sender| self.peer.sent(sender)) {
            return Err(ViewRefusal::NotTheConnector);
        }
        let packet = packet.get(..received.length).unwrap_or_default();
        ToHelper::decode(packet).map_err(|error| match error {
            DecodeError::Version(_) => ViewRefusal::Version { helper: VERSION },
            _ => ViewRefusal::Malformed,
        })
    }

    /// Whether the client's next packet, which is taken then, gives the view back.
    fn gives_back(&self) -> bool {
        let mut packet = [0; BYTES];
        self.peek_past_reset(&mut packet)
            .is_ok_and(|received| self.word(&received, &packet) == Ok(ToHelper::GiveBack))
            && socket::receive(self.connection.as_fd(), &mut packet).is_ok()
    }

    /// Looks at the client's next packet. Before it, and once, the kernel reports a client that closed with something
    /// unread, as its view; what the client sent before that is still there.
    fn peek_past_reset(&self, packet: &mut [u8]) -> io::Result<Received> {
        match socket::peek(self.connection.as_fd(), packet) {
            Err(error) if is_about_the_other_side(&error) => {
                socket::peek(self.connection.as_fd(), packet)
            }
            looked => looked,
        }
    }
}

/// Says why there is no view, if the client listens.
fn decline(connection: BorrowedFd<'_>, refusal: ViewRefusal) {
    let _ = socket::send(connection, &ToClient::Refused(refusal).encode(), &[]);
}

/// As many as this process may have.
fn descriptors() -> u64 {
    // Unknown is as good as few.
    Resource::Descriptors.limit().map_or(0, |limit| limit.soft.unwrap_or(u64::MAX))
}

fn hand_over(connection: BorrowedFd<'_>, descriptors: &[OwnedFd]) -> Result<(), ViewRefusal> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let count = u32::try_from(borrowed.len()).unwrap_or(u32::MAX);
    let message = ToClient::Granted { descriptors: count };
    socket::send(connection, &message.encode(), &borrowed).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => ViewRefusal::Gone,
        _ => kernel(&error),
    })
}

fn kernel(error: &io::Error) -> ViewRefusal {
    ViewRefusal::Kernel { errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

fn is_full(error: &io::Error) -> bool {
    let full = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|errno| full.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::Groups;
    use crate::parting::tests::{fill, with_descriptor};
    use crate::views::NoView;
    use pinfold_kernel::process::effective_user;

    /// Views without descriptors.
    struct Empty;

    impl Views for Empty {
        type Id = ();

        fn open(&mut self, _process: BorrowedFd<'_>) -> Result<((), Vec<OwnedFd>), NoView> {
            Ok(((), Vec::new()))
        }

        fn forget(&mut self, _view: ()) {}
    }

    fn server(limits: ClientLimits) -> Server<Empty> {
        server_to_connect(limits, 0).0
    }

    /// A server, and so many connections that wait to be accepted.
    fn server_to_connect(limits: ClientLimits, count: usize) -> (Server<Empty>, Vec<OwnedFd>) {
        // Relaxed: only that the numbers differ matters.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("pinfold-server-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let listener = Listener::at(&directory.join("socket")).unwrap();
        let server = Server::new(listener, Empty, limits, |_| {}).unwrap();
        let connect =
            || socket::connect(&directory.join("socket"), Duration::from_secs(60)).unwrap();
        let connections = std::iter::repeat_with(connect).take(count).collect();
        std::fs::remove_dir_all(&directory).unwrap();
        (server, connections)
    }

    /// What the helper has said to the other side.
    fn heard(there: &OwnedFd) -> Option<ToClient> {
        let mut packet = [0; BYTES];
        let received = socket::receive(there.as_fd(), &mut packet).unwrap();
        (received.length > 0).then(|| ToClient::decode(&packet).unwrap())
    }

    fn serve_all(server: &mut Server<Empty>) {
        for key in server.clients.keys() {
            server.listen_to(key);
        }
        while let Some(key) = server.turns.pop() {
            server.serve(key);
        }
    }

    /// A client that has asked, and has been served.
    fn asks_for_a_view(server: &mut Server<Empty>) -> OwnedFd {
        let (here, there) = socket::pair().unwrap();
        server.welcome(here);
        let Some(ToClient::Hello(challenge)) = heard(&there) else { panic!("no hello") };
        socket::send(there.as_fd(), &ToHelper::Ask(challenge).encode(), &[]).unwrap();
        serve_all(server);
        there
    }

    /// It has another's place in the queue of a socket that the service manager listened at.
    #[test]
    fn a_client_that_connected_before_the_helper_was_there_is_served() {
        let mut server = server(ClientLimits::default());
        let there = asks_for_a_view(&mut server);
        assert_eq!(heard(&there), Some(ToClient::Granted { descriptors: 0 }));
    }

    /// Between two goes a view is made, which takes longer than to turn a thousand connections away.
    #[test]
    fn no_connection_waits_for_a_turn_because_others_came_before_it() {
        let (mut server, connections) = server_to_connect(ClientLimits::default(), 100);
        server.accept_some();
        let is_answered =
            |there: &&OwnedFd| socket::receive(there.as_fd(), &mut [0; BYTES]).is_ok();
        assert_eq!(connections.iter().filter(is_answered).count(), 100);
    }

    /// Its users may keep the memory of views that they have given back.
    #[test]
    fn near_its_limit_on_memory_the_helper_refuses_and_later_gives_again() {
        let groups = Groups::new("server");
        let mut server = server(ClientLimits::default());
        server.memory = groups.of_service();
        let mut answer = || heard(&asks_for_a_view(&mut server));
        groups.use_up("slice", 701);
        assert_eq!(answer(), Some(ToClient::Refused(ViewRefusal::NoMemory)));
        groups.use_up("slice", 700);
        assert_eq!(answer(), Some(ToClient::Granted { descriptors: 0 }));
    }

    /// A client whose patience ends as its view comes: the kernel reports first that it closed with something unread.
    #[test]
    fn a_client_that_has_not_read_its_view_gives_it_back() {
        let mut server = server(ClientLimits::default());
        let there = asks_for_a_view(&mut server);
        socket::send(there.as_fd(), &ToHelper::GiveBack.encode(), &[]).unwrap();
        drop(there);
        let keys = server.clients.keys();
        assert_eq!(keys.len(), 1);
        server.hung_up(keys[0]);
        while let Some(key) = server.turns.pop() {
            server.serve(key);
        }
        assert!(server.clients.keys().is_empty(), "its view counts until its process ends");
    }

    #[test]
    fn what_cannot_be_closed_yet_counts_for_its_user_until_it_is() {
        let limits = ClientLimits { waiting: 2, waiting_per_user: 2, ..ClientLimits::default() };
        let mut server = server(limits);
        server.accounts = Accounts::new(limits, 1);
        let stuck = fill(&mut server.emptying, effective_user());
        let wrong = |server: &mut Server<Empty>| {
            let (here, there) = with_descriptor();
            server.welcome(here);
            serve_all(server);
            there
        };
        let _two = [(); 2].map(|()| wrong(&mut server));
        assert_eq!((server.clients.keys().len(), server.endings.len()), (0, 2));
        assert!(!server.paused && server.sweep_at.is_some());
        let third = wrong(&mut server);
        assert_eq!(heard(&third), Some(ToClient::Refused(ViewRefusal::Busy { limit: 2 })));
        assert_eq!(server.endings.len(), 3);
        server.accept_some();
        assert!(server.paused, "beyond the spare descriptors no connection is accepted");
        drop(stuck);
        while !server.endings.is_empty() {
            server.end_others();
        }
        let fourth = wrong(&mut server);
        assert!(matches!(heard(&fourth), Some(ToClient::Hello(_))));
    }
}
