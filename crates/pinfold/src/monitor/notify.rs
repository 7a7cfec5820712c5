//! Asking the helper, `pinfold notifyd`, for a view of this process's own changes.
//!
//! The helper loads the eBPF programs, for which it needs a privilege, and hands any process what it
//! needs to follow its own changes without one. [`connect`] asks for it.
//!
//! # The price
//!
//! Four packets, once, and as many descriptors as the view has, plus one for the [`HelperConnection`]. Where no
//! helper listens, that is known at once; a helper that says nothing is waited for [for five
//! seconds](PATIENCE), and one that has many others to serve first, six times as long.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to make a view of what the helper has sent.

#![allow(unsafe_code)]

use crate::descriptor::KnownDescriptor;
use pinfold_ebpf::View;
use pinfold_ebpf::protocol::{
    self, BYTES, Challenge, DecodeError, ToClient, ToHelper, ViewRefusal,
};
use pinfold_kernel::socket;
use pinfold_kernel::{
    descriptor::wait_readable,
    process::{effective_user, overflow_user},
    socket::{is_connected, send_by_number},
};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long [`connect`] waits for the helper's first word.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How many times as long a helper that has said something is waited for: some hundred processes of
/// one user may start at once, and the kernel takes its time, some milliseconds, for each.
const FOR_OUR_TURN: u32 = 6;
/// How long a busy helper is left alone.
const BUSY: Duration = Duration::from_millis(20);

/// Where the helper listens: what `PINFOLD_NOTIFYD` says, or else `/run/pinfold/notifyd.sock`.
pub fn path() -> PathBuf {
    path_named(std::env::var_os("PINFOLD_NOTIFYD"))
}

/// As [`path`], where `PINFOLD_NOTIFYD` is `named`: for a caller that read it when nothing else ran.
pub fn path_named(named: Option<OsString>) -> PathBuf {
    let named = named.filter(|name| !name.is_empty());
    PathBuf::from(named.unwrap_or_else(|| OsString::from(protocol::DEFAULT_PATH)))
}

/// Asks the helper that listens at `path` for a view of this process's changes.
///
/// What listens there is believed if it is root's or of this process's own effective user, by what the kernel noted as it
/// began to listen. Both may do anything to this process: root by its privilege, its own user by tracing it, by its
/// memory in `/proc`, by its files. So it is the caller's part of the contract that no process of its user but the helper
/// listens there; where the system keeps processes of one user apart, by a directory that only root may write to.
///
/// # Errors
///
/// [`ConnectError`].
pub fn connect(path: &Path) -> Result<(View, HelperConnection), ConnectError> {
    let (descriptors, connection) = request(path, PATIENCE)?;
    match view_of(descriptors) {
        Ok(view) => Ok((view, connection)),
        Err(error) => {
            connection.give_back();
            Err(error)
        }
    }
}

fn view_of(descriptors: Vec<OwnedFd>) -> Result<View, ConnectError> {
    for (descriptor, what) in descriptors.iter().zip(Kind::in_order()) {
        what.check(descriptor.as_fd())?;
    }
    // SAFETY: the helper makes a view for each that asks, and they came from it a moment ago. What listens at the path is
    // of this version, by its greeting and its kinds, and root's or of our own user: that it is the helper is our caller's
    // part (`connect`), and what else it could be may change this process's memory by itself.
    unsafe { View::from_descriptors(descriptors) }
        .map_err(|_| ConnectError::NotAView { part: "the number of descriptors" })
}

/// The conversation by itself: the descriptors that the helper gives this process, not looked at.
///
/// # Errors
///
/// [`ConnectError`], but for [`ConnectError::NotAView`].
#[doc(hidden)]
pub fn request(
    path: &Path,
    patience: Duration,
) -> Result<(Vec<OwnedFd>, HelperConnection), ConnectError> {
    let deadline = after(patience.saturating_mul(FOR_OUR_TURN));
    loop {
        match Conversation::begin(path, patience).and_then(Conversation::ask) {
            // Many programs of one user start at once. It is over soon.
            Err(ConnectError::Refused(ViewRefusal::Busy { .. })) if left(deadline) > BUSY => {
                thread::sleep(BUSY);
            }
            end => return end,
        }
    }
}

/// So long from now: a century is as good as any longer time.
fn after(patience: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(patience.min(CENTURY)).unwrap_or(now)
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Stays open as long as the helper lives, and closes with it. Nothing depends on it but whether the
/// helper is there: the view stays true without.
#[derive(Debug)]
pub struct HelperConnection {
    socket: KnownDescriptor,
    /// A forked child has a copy, and must not speak for its parent.
    process: u32,
}

impl HelperConnection {
    fn new(socket: OwnedFd) -> Result<Self, ConnectError> {
        let socket = KnownDescriptor::new(socket)
            .map_err(|errno| ConnectError::Os { operation: "fstat", errno: errno.0 })?;
        Ok(Self { socket, process: std::process::id() })
    }

    /// Whether the helper that gave the view is still there. One that is gone has left the view
    /// working; a new one can be [asked](connect) for another. One system call or two.
    pub fn helper_is_there(&self) -> bool {
        self.socket.is_ours() && is_connected(self.socket.number())
    }

    /// Tells the helper that the view is not used any more in this process. The helper
    /// then closes it, and counts it no more, before the process ends.
    pub fn give_back(self) {
        self.say_that_it_is_given_back();
    }

    fn say_that_it_is_given_back(&self) {
        if self.process == std::process::id() && self.socket.is_ours() {
            // A helper that is gone, or does not listen, has nothing to give back.
            let _ = send_by_number(self.socket.number(), &ToHelper::GiveBack.encode());
        }
    }
}

/// [Gives the view back](HelperConnection::give_back) when it is dropped.
#[derive(Debug)]
pub struct GivesBack(HelperConnection);

impl GivesBack {
    /// Gives it back now. A second time nothing listens.
    pub(super) fn now(&self) {
        self.0.say_that_it_is_given_back();
    }
}

impl Drop for GivesBack {
    fn drop(&mut self) {
        self.now();
    }
}

impl From<HelperConnection> for GivesBack {
    fn from(connection: HelperConnection) -> Self {
        Self(connection)
    }
}

/// Why the helper gave no view.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No helper listens there.
    #[error(
        "no helper listens (errno {errno}): have root start `pinfold notifyd`, or say by \
         PINFOLD_NOTIFYD where its socket is"
    )]
    Absent {
        /// The kernel's error number.
        errno: i32,
    },
    /// This process may not connect.
    #[error(
        "this process may not connect to the helper (errno {errno}): the rights of its socket or a \
         security policy forbid it"
    )]
    Forbidden {
        /// The kernel's error number.
        errno: i32,
    },
    /// The helper did not answer in time.
    #[error("the helper does not answer: it is stopped or overloaded; its log may say more")]
    Silent,
    /// What listens there is neither root's nor this process's own user's, so it is not believed.
    #[error(
        "what listens at the helper's socket belongs to user {uid}, neither root nor this \
         process's own, and is not believed (in a user namespace without the machine's root, root \
         shows as 65534)"
    )]
    Stranger {
        /// Its user.
        uid: u32,
    },
    /// The helper ended while it was asked.
    #[error("the helper ended while it was asked: try again")]
    Gone,
    /// What listens there speaks no protocol of ours.
    #[error("what listens at the helper's socket is no helper: it sent {0}")]
    Nonsense(DecodeError),
    /// The helper gives this process none, and says why.
    #[error("{0}")]
    Refused(ViewRefusal),
    /// What the helper gave is no view.
    #[error("what the helper gave is no view ({part}): bring both to one release")]
    NotAView {
        /// What is wrong with it.
        part: &'static str,
    },
    /// Something else went wrong.
    #[error("{operation} failed: {}", io::Error::from_raw_os_error(*.errno))]
    Os {
        /// The call that failed.
        operation: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

/// A connection to a helper that is who it should be.
struct Conversation {
    socket: OwnedFd,
    patience: Duration,
    /// By when it has to say something.
    deadline: Instant,
}

impl Conversation {
    fn begin(path: &Path, patience: Duration) -> Result<Self, ConnectError> {
        let deadline = after(patience);
        let socket = loop {
            match socket::connect(path, left(deadline)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    // Signals that come faster than the helper must not keep us here.
                    if left(deadline).is_zero() {
                        return Err(ConnectError::Silent);
                    }
                }
                connected => break connected.map_err(|error| not_connected(&error))?,
            }
        };
        let conversation = Self { socket, patience, deadline };
        conversation.check_helper()?;
        Ok(conversation)
    }

    /// Root may do anything to this process, and so may its own user (`connect`).
    fn check_helper(&self) -> Result<(), ConnectError> {
        let uid = socket::peer(self.socket.as_fd()).map_err(|error| os("getsockopt", &error))?.uid;
        // The owner of what this process makes: its effective user.
        if is_believed(uid, effective_user(), overflow_user) {
            Ok(())
        } else {
            Err(ConnectError::Stranger { uid })
        }
    }

    fn ask(mut self) -> Result<(Vec<OwnedFd>, HelperConnection), ConnectError> {
        let challenge = self.challenge()?;
        self.deadline = after(self.patience.saturating_mul(FOR_OUR_TURN));
        match socket::send(self.socket.as_fd(), &ToHelper::Ask(challenge).encode(), &[]) {
            // It has closed, and may have said why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            sent => sent.map_err(|error| os("sendmsg", &error))?,
        }
        let descriptors = self.descriptors().inspect_err(|_| {
            // It may have given one that cannot be used here, for which there was no room for instance,
            // and would count it until this process ends.
            let _ = socket::send(self.socket.as_fd(), &ToHelper::GiveBack.encode(), &[]);
        })?;
        Ok((descriptors, HelperConnection::new(self.socket)?))
    }

    fn challenge(&self) -> Result<Challenge, ConnectError> {
        match self.next()? {
            (ToClient::Hello(challenge), _) => Ok(challenge),
            (message, _) => Err(unexpected(message)),
        }
    }

    fn descriptors(&self) -> Result<Vec<OwnedFd>, ConnectError> {
        match self.next()? {
            (ToClient::Granted { descriptors }, beside) if beside.len() == descriptors as usize => {
                Ok(beside)
            }
            (ToClient::Granted { .. }, _) => {
                Err(ConnectError::NotAView { part: "the number of descriptors" })
            }
            (message, _) => Err(unexpected(message)),
        }
    }

    /// What the helper says next, and what came with it.
    fn next(&self) -> Result<(ToClient, Vec<OwnedFd>), ConnectError> {
        let mut packet = [0; BYTES];
        let received = self.receive(&mut packet)?;
        if received.length == 0 {
            return Err(ConnectError::Gone);
        }
        // With a long message nothing can be missing that would not be missed here; descriptors
        // for which this process has no room left are lost, and that is told as truncation too.
        if received.truncated {
            return Err(ConnectError::NotAView {
                part: "its length: no descriptor may be left here",
            });
        }
        let packet = packet.get(..received.length).unwrap_or_default();
        match ToClient::decode(packet) {
            Ok(message) => Ok((message, received.descriptors)),
            Err(DecodeError::Version(helper)) => {
                Err(ConnectError::Refused(ViewRefusal::Version { helper }))
            }
            Err(error) => Err(ConnectError::Nonsense(error)),
        }
    }

    fn receive(&self, packet: &mut [u8]) -> Result<socket::Received, ConnectError> {
        loop {
            match socket::receive(self.socket.as_fd(), packet) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait()?,
                // It has closed without reading what we said. What it said is still there.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                received => return received.map_err(|error| os("recvmsg", &error)),
            }
        }
    }

    /// Until there is something to read; signals may end it early.
    fn wait(&self) -> Result<(), ConnectError> {
        let left = left(self.deadline);
        if left.is_zero() {
            return Err(ConnectError::Silent);
        }
        let milliseconds = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
        wait_readable(self.socket.as_raw_fd(), milliseconds);
        Ok(())
    }
}

/// What a message means that is not the one waited for.
fn unexpected(message: ToClient) -> ConnectError {
    match message {
        ToClient::Refused(refusal) => ConnectError::Refused(refusal),
        _ => ConnectError::Nonsense(DecodeError::Content),
    }
}

fn not_connected(error: &io::Error) -> ConnectError {
    let errno = error.raw_os_error().unwrap_or(0);
    match errno {
        libc::ENOENT | libc::ENOTDIR | libc::ECONNREFUSED => ConnectError::Absent { errno },
        libc::EACCES | libc::EPERM => ConnectError::Forbidden { errno },
        libc::EAGAIN => ConnectError::Silent,
        // A socket of another type.
        libc::EPROTOTYPE => ConnectError::Nonsense(DecodeError::Magic),
        errno => ConnectError::Os { operation: "connect", errno },
    }
}

fn os(operation: &'static str, error: &io::Error) -> ConnectError {
    ConnectError::Os { operation, errno: error.raw_os_error().unwrap_or(0) }
}

// --- what came ------------------------------------------------------------------------------------

/// What a descriptor of a view is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Changes,
    WatchFilter,
    Wakeups,
    Link,
}

impl Kind {
    /// As [`View::into_descriptors`] puts them.
    fn in_order() -> impl Iterator<Item = Self> {
        [Self::Changes, Self::WatchFilter, Self::Wakeups]
            .into_iter()
            .chain(std::iter::repeat(Self::Link))
    }

    /// What the kernel says of such a descriptor: lines and, where one is expected, their value. The
    /// kinds of maps are numbered in `linux/bpf.h`; a frozen one can be mapped for reading only.
    fn lines(self) -> &'static [(&'static str, Option<&'static str>)] {
        match self {
            Self::Changes => &[("map_type", Some("2")), ("frozen", Some("1"))],
            Self::WatchFilter => &[("map_type", Some("2")), ("frozen", Some("0"))],
            Self::Wakeups => &[("map_type", Some("27"))],
            Self::Link => &[("link_id", None)],
        }
    }

    fn part(self) -> &'static str {
        match self {
            Self::Changes => "the map of changes",
            Self::WatchFilter => "the map of wishes",
            Self::Wakeups => "the wake-ups",
            Self::Link => "a link",
        }
    }

    fn check(self, descriptor: BorrowedFd<'_>) -> Result<(), ConnectError> {
        let number = descriptor.as_raw_fd();
        // This thread's: it may have a table of descriptors of its own.
        let told = fs::read_to_string(format!("/proc/thread-self/fdinfo/{number}"))
            .map_err(|error| os("read of /proc/thread-self/fdinfo", &error))?;
        let is_so = self.lines().iter().all(|&(name, expected)| {
            field(&told, name)
                .is_some_and(|value| expected.is_none_or(|expected| expected == value))
        });
        if is_so { Ok(()) } else { Err(ConnectError::NotAView { part: self.part() }) }
    }
}

/// The value of a line `name:\tvalue`.
fn field<'a>(told: &'a str, name: &str) -> Option<&'a str> {
    told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether a process of user `own` believes what listens as `uid`. `unknown` gives the number of all users that have none in this
/// user namespace: of two that show as it, each may be another.
fn is_believed(uid: u32, own: u32, unknown: impl FnOnce() -> u32) -> bool {
    uid == 0 || (uid == own && uid != unknown())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn root_and_the_own_user_are_believed_if_each_has_a_number() {
        let believed = |uid, own| is_believed(uid, own, || 65_534);
        assert!(believed(0, 1000) && believed(0, 65_534) && believed(1000, 1000));
        assert!(!believed(1000, 1001) && !believed(65_534, 1000));
        assert!(!believed(65_534, 65_534), "two users without a number may be different ones");
    }

    #[test]
    fn the_kernel_says_who_has_no_number() {
        let told = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap();
        assert_eq!(overflow_user().to_string(), told.trim());
    }

    /// A name that no other test has.
    fn place() -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only that the numbers differ matters.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pinfold-notify-{}-{number}", std::process::id());
        std::env::temp_dir().join(name)
    }

    #[test]
    fn there_is_no_patience_too_long() {
        for patience in [Duration::MAX, Duration::MAX / 2, Duration::from_secs(u64::from(u32::MAX))]
        {
            let refused = request(&place(), patience).unwrap_err();
            assert!(matches!(refused, ConnectError::Absent { .. }), "{refused}");
        }
        let within = after(Duration::MAX) - Instant::now();
        assert!(within > Duration::from_secs(1 << 30), "{within:?}");
    }

    /// What a client gets from a helper that does this with its connection.
    fn ask(serve: impl FnOnce(OwnedFd) + Send) -> Result<usize, ConnectError> {
        let path = place();
        let listener = socket::bind(&path, 0o600).unwrap();
        socket::listen(listener.as_fd(), 1).unwrap();
        let asked = thread::scope(|scope| {
            scope.spawn(|| serve(socket::accept(listener.as_fd()).unwrap()));
            request(&path, PATIENCE).map(|(descriptors, _)| descriptors.len())
        });
        fs::remove_file(&path).unwrap();
        asked
    }

    fn hello(connection: &OwnedFd) {
        let hello = ToClient::Hello(Challenge(7)).encode();
        socket::send(connection.as_fd(), &hello, &[]).unwrap();
        while socket::receive(connection.as_fd(), &mut [0; BYTES]).is_err() {
            wait_readable(connection.as_raw_fd(), 100);
        }
    }

    #[test]
    fn without_a_helper_it_is_told_at_once() {
        let path = place();
        assert_eq!(connect(&path).unwrap_err(), ConnectError::Absent { errno: libc::ENOENT });
        let listener = socket::bind(&path, 0o600).unwrap();
        assert_eq!(connect(&path).unwrap_err(), ConnectError::Absent { errno: libc::ECONNREFUSED });
        drop(listener);
        fs::remove_file(&path).unwrap();
        let _stream = UnixListener::bind(&path).unwrap();
        assert_eq!(connect(&path).unwrap_err(), ConnectError::Nonsense(DecodeError::Magic));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_helper_that_does_not_answer_is_not_waited_for_for_ever() {
        let path = place();
        let listener = socket::bind(&path, 0o600).unwrap();
        socket::listen(listener.as_fd(), 0).unwrap();
        let brief = Duration::from_millis(20);
        // The first waits for the hello, the later ones for room in the queue.
        for _ in 0..3 {
            assert_eq!(request(&path, brief).unwrap_err(), ConnectError::Silent);
        }
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_helper_that_ends_or_raves_is_an_error() {
        assert_eq!(ask(drop), Err(ConnectError::Gone));
        let raving = |connection: OwnedFd| {
            socket::send(connection.as_fd(), &[1; 33], &[]).unwrap();
        };
        assert!(matches!(ask(raving), Err(ConnectError::NotAView { .. })));
        let short = |connection: OwnedFd| {
            socket::send(connection.as_fd(), &[1; 5], &[]).unwrap();
        };
        assert_eq!(ask(short), Err(ConnectError::Nonsense(DecodeError::Length)));
        assert_eq!(ask(|connection| hello(&connection)), Err(ConnectError::Gone));
    }

    #[test]
    fn another_version_is_told_and_so_is_a_refusal() {
        let later = |connection: OwnedFd| {
            let mut hello = ToClient::Hello(Challenge(1)).encode();
            hello[8] = 2;
            socket::send(connection.as_fd(), &hello, &[]).unwrap();
        };
        let version = ConnectError::Refused(ViewRefusal::Version { helper: 2 });
        assert_eq!(ask(later), Err(version));
        // It closes without reading the request.
        let refusing = |connection: OwnedFd| {
            let refusal = ToClient::Refused(ViewRefusal::Full { limit: 3 }).encode();
            socket::send(connection.as_fd(), &refusal, &[]).unwrap();
        };
        assert_eq!(ask(refusing), Err(ConnectError::Refused(ViewRefusal::Full { limit: 3 })));
    }

    #[test]
    fn the_descriptors_are_as_many_as_was_said() {
        let granting = |said: u32, sent: usize| {
            move |connection: OwnedFd| {
                hello(&connection);
                let granted = ToClient::Granted { descriptors: said }.encode();
                let descriptors = vec![connection.as_fd(); sent];
                socket::send(connection.as_fd(), &granted, &descriptors).unwrap();
            }
        };
        assert_eq!(ask(granting(4, 4)), Ok(4));
        assert!(matches!(ask(granting(4, 3)), Err(ConnectError::NotAView { .. })));
        assert!(matches!(ask(granting(3, 4)), Err(ConnectError::NotAView { .. })));
    }

    #[test]
    fn what_is_no_map_is_not_taken_for_one() {
        let file = fs::File::open("/proc/self/exe").unwrap();
        for kind in Kind::in_order().take(4) {
            let part = kind.part();
            assert_eq!(kind.check(file.as_fd()), Err(ConnectError::NotAView { part }));
        }
        assert_eq!(field("pos:\t0\nmap_type:\t27\n", "map_type"), Some("27"));
    }

    #[test]
    fn the_connection_tells_when_the_helper_ends() {
        let (here, there) = socket::pair().unwrap();
        let connection = HelperConnection::new(here).unwrap();
        assert!(connection.helper_is_there());
        drop(there);
        assert!(!connection.helper_is_there());
        connection.give_back();
    }

    #[test]
    fn what_is_dropped_is_given_back() {
        let (here, there) = socket::pair().unwrap();
        let holder = GivesBack::from(HelperConnection::new(here).unwrap());
        let is_told = || {
            let mut packet = [0; BYTES];
            socket::receive(there.as_fd(), &mut packet).unwrap();
            assert_eq!(ToHelper::decode(&packet), Ok(ToHelper::GiveBack));
        };
        holder.now();
        is_told();
        drop(holder);
        is_told();
    }
}
