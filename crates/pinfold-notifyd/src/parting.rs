//! Closing a connection, whatever its other side has put into it.
//!
//! Unread packets may carry descriptors, and with the connection the kernel closes
//! these too. Closing can wait: a TCP socket with `SO_LINGER` and unread bytes waits for
//! as long as its owner has set. The process that closes it last waits, and that would be the helper.
//!
//! So a connection is emptied before it is closed. Packets without descriptors are taken here. For others a thread gets
//! a table of descriptors of its own with nothing in it but the connection, takes the packets there and ends, which closes
//! what came with them. A TCP socket does not wait in a thread that is ending; a file of a FUSE server that never
//! answers waits there, too, for ever. Threads that are still at it are counted, by asking the kernel whether they exist:
//! at most [`MOST`], and [`MOST_OF_A_USER`] for the connections of one user. Where there is no thread for a connection, or
//! none can be had, it stays open until one has ended, and its user's account counts it so long (`server`).
//! Where the kernel refuses descriptors (Linux 6.16), no thread is needed.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give a thread that ends a table of descriptors of its own.

#![allow(unsafe_code)]

use pinfold_kernel::Descriptor;
use pinfold_kernel::descriptor::keep_only;
use pinfold_kernel::socket::{self, Received};
use pinfold_kernel::thread::{thread_exists, thread_id};
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::thread;

/// What a thread needs that does little.
const STACK_BYTES: usize = 64 << 10;
/// How many threads may be emptying something at a time.
const MOST: usize = 64;
/// How many of them one user's connections.
const MOST_OF_A_USER: usize = 16;

/// A connection that is to be closed. Its other side sees the end, and puts nothing more in.
#[derive(Debug)]
pub(crate) struct Parting {
    connection: OwnedFd,
    user: u32,
    content: Content,
}

/// What a connection's other side has put into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Nothing,
    /// The next packet brings descriptors.
    Descriptors,
    /// A thread of this number is taking it.
    LeftTo(u32),
}

impl Parting {
    pub(crate) fn new(connection: OwnedFd, user: u32) -> Self {
        // From here on nothing new gets in.
        socket::shutdown(connection.as_fd());
        // An empty packet has a sender now, the end has none. It fails for no socket of this kind.
        let _ = socket::pass_credentials(connection.as_fd());
        let content = take_plain(connection.as_fd());
        Self { connection, user, content }
    }

    /// Whether closing it waits for nothing any more. Otherwise what can be done about it is under way.
    pub(crate) fn is_empty(&mut self, emptying: &mut Emptying) -> bool {
        self.content = match self.content {
            Content::LeftTo(thread) if !emptying.has(thread) => take_plain(self.connection.as_fd()),
            content => content,
        };
        if self.content == Content::Descriptors {
            let thread = emptying.start(self.user, self.connection.as_fd());
            self.content = thread.map_or(Content::Descriptors, Content::LeftTo);
        }
        self.content == Content::Nothing
    }

    /// Whether what was sent to the other side is still on its way, descriptors and all.
    pub(crate) fn is_unread(&self) -> bool {
        socket::unread(self.connection.as_fd()).is_ok_and(|bytes| bytes > 0)
    }
}

/// Takes packets up to the first that brings descriptors. Ends, because nothing new gets in.
fn take_plain(connection: BorrowedFd<'_>) -> Content {
    loop {
        match socket::peek(connection, &mut [0; 1]) {
            Ok(packet) if packet.left_out => return Content::Descriptors,
            Ok(packet) if is_packet(&packet) => drop(socket::receive(connection, &mut [0; 1])),
            Err(error) if is_about_the_other_side(&error) => {}
            _ => return Content::Nothing,
        }
    }
}

/// The end of the conversation is none.
fn is_packet(received: &Received) -> bool {
    received.length > 0 || received.truncated || received.sender.is_some()
}

/// Told once, before what is in the queue: the other side has closed with something unread.
pub(crate) fn is_about_the_other_side(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionReset
}

/// The threads that were emptying a connection when last looked at.
#[derive(Debug)]
pub(crate) struct Emptying(Vec<Emptier>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Emptier {
    user: u32,
    thread: u32,
}

impl Emptying {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Forgets the threads that have ended. A system call for each.
    pub(crate) fn look(&mut self) {
        self.0.retain(|emptier| thread_exists(emptier.thread));
    }

    fn has(&self, thread: u32) -> bool {
        self.0.iter().any(|emptier| emptier.thread == thread)
    }

    fn has_room(&self, user: u32) -> bool {
        let of_user = self.0.iter().filter(|emptier| emptier.user == user).count();
        self.0.len() < MOST && of_user < MOST_OF_A_USER
    }

    /// Has a thread take what is in `connection`, if there may be one more.
    fn start(&mut self, user: u32, connection: BorrowedFd<'_>) -> Option<u32> {
        let thread = if self.has_room(user) { empty_apart(connection.as_raw_fd()) } else { None };
        self.0.extend(thread.map(|thread| Emptier { user, thread }));
        thread
    }
}

/// Has a thread with a table of its own take what is in the connection of this number, which stays open meanwhile; the
/// thread, unless there is none.
fn empty_apart(number: Descriptor) -> Option<u32> {
    let (taken, is_taken) = mpsc::channel();
    let empty = move || {
        // SAFETY: this thread has no value of a descriptor; those that it makes are of its own table.
        let table = unsafe { keep_only(&[number]) };
        let is_own = table.is_ok();
        let _ = taken.send(table.map(|()| thread_id()));
        if is_own {
            take_all(number);
        }
    };
    let thread = thread::Builder::new().name("parting".into()).stack_size(STACK_BYTES);
    thread.spawn(empty).ok()?;
    is_taken.recv().ok()?.ok()
}

/// Takes all packets of the connection of this number, and leaves what they bring open.
fn take_all(number: Descriptor) {
    // SAFETY: it stays open in this thread's own table.
    let connection = unsafe { BorrowedFd::borrow_raw(number) };
    loop {
        match socket::receive(connection, &mut [0; 1]) {
            // Closed as the thread ends: nothing lingers then. Their list is freed: a client could have the helper keep
            // as many as it sends.
            Ok(packet) if is_packet(&packet) => {
                packet.descriptors.into_iter().for_each(mem::forget);
            }
            Err(error) if is_about_the_other_side(&error) => {}
            _ => return,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use pinfold_kernel::descriptor::identity;
    use pinfold_kernel::poll::Poll;
    use pinfold_kernel::socket::set_linger;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    const USER: u32 = 1000;

    /// A connection that waits for ten minutes when it is closed, because the reader leaves what was
    /// written to it; and that reader.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        set_linger(writer.as_fd(), Duration::from_secs(600)).unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        (writer, reader)
    }

    /// Closes it as the server does: now, or as soon as it may.
    fn part(connection: OwnedFd, emptying: &mut Emptying) {
        let mut parting = Parting::new(connection, USER);
        while !parting.is_empty(emptying) {
            thread::yield_now();
            emptying.look();
        }
    }

    /// Threads that are stuck as at a file of a FUSE server, until this is dropped.
    pub(crate) struct Stuck(Vec<(mpsc::Sender<()>, thread::JoinHandle<()>)>);

    impl Stuck {
        pub(crate) fn new(emptying: &mut Emptying, user: u32, count: usize) -> Self {
            let stuck = || {
                let (tell, number) = mpsc::channel();
                let (end, may_end) = mpsc::channel::<()>();
                let thread = thread::spawn(move || {
                    tell.send(thread_id()).unwrap();
                    let _ = may_end.recv();
                });
                emptying.0.push(Emptier { user, thread: number.recv().unwrap() });
                (end, thread)
            };
            Self(std::iter::repeat_with(stuck).take(count).collect())
        }
    }

    impl Drop for Stuck {
        fn drop(&mut self) {
            for (end, thread) in self.0.drain(..) {
                drop(end);
                thread.join().unwrap();
            }
        }
    }

    /// As many as may be for one user, or for all.
    pub(crate) fn fill(emptying: &mut Emptying, user: u32) -> Stuck {
        Stuck::new(emptying, user, MOST_OF_A_USER)
    }

    /// A connection whose other side has put a packet with a descriptor into it; and that side.
    pub(crate) fn with_descriptor() -> (OwnedFd, OwnedFd) {
        let (here, there) = socket::pair().unwrap();
        socket::send(there.as_fd(), b"unread", &[there.as_fd()]).unwrap();
        (here, there)
    }

    /// What is in the queue of what this is done with is not what delays the thread that does it.
    fn nothing_lingers(prepare: impl FnOnce(&OwnedFd, OwnedFd)) {
        let (here, there) = socket::pair().unwrap();
        socket::pass_credentials(here.as_fd()).unwrap();
        let (writer, reader) = lingering();
        socket::send(there.as_fd(), b"", &[]).unwrap();
        socket::send(there.as_fd(), b"", &[writer.as_fd()]).unwrap();
        prepare(&here, there);
        drop(writer);
        // The one in the queue is the last.
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            part(here, &mut Emptying::new());
            done.send(()).unwrap();
        });
        // Not how long it takes, but whether it ends before the lingering does.
        is_done.recv_timeout(Duration::from_secs(300)).expect("held up by the lingering socket");
        drop(reader);
    }

    #[test]
    fn a_lingering_descriptor_in_the_queue_delays_no_thread() {
        nothing_lingers(|_, there| mem::forget(there));
    }

    /// The kernel tells of that before it gives what is in the queue.
    #[test]
    fn nor_where_the_other_side_closed_with_something_unread() {
        nothing_lingers(|here, there| {
            socket::send(here.as_fd(), b"never read", &[]).unwrap();
            drop(there);
        });
    }

    /// As many as may be are stuck; the next is not closed, and closed once one of them has ended.
    #[test]
    fn beyond_the_limit_a_connection_stays_open_until_a_thread_has_ended() {
        let mut emptying = Emptying::new();
        let of_user = fill(&mut emptying, USER);
        let (here, _there) = with_descriptor();
        let number = here.as_raw_fd();
        let mut parting = Parting::new(here, USER);
        emptying.look();
        assert!(!parting.is_empty(&mut emptying), "emptied in this thread");
        assert_eq!(parting.content, Content::Descriptors, "one user has all threads");
        drop(of_user);
        emptying.look();
        while !parting.is_empty(&mut emptying) {
            thread::yield_now();
            emptying.look();
        }
        drop(parting);
        assert!(identity(number).is_err());
    }

    #[test]
    fn one_user_s_stuck_connections_leave_threads_for_others_and_all_have_no_more() {
        let mut emptying = Emptying::new();
        let of_one = fill(&mut emptying, USER);
        let (here, _there) = with_descriptor();
        let mut parting = Parting::new(here, USER + 1);
        parting.is_empty(&mut emptying);
        assert!(matches!(parting.content, Content::LeftTo(_)), "{parting:?}");
        let of_others: Vec<_> = (2..5).map(|user| fill(&mut emptying, USER + user)).collect();
        assert!(!emptying.has_room(USER + 9));
        drop((of_one, of_others));
    }

    #[test]
    fn what_brings_no_descriptor_needs_no_thread() {
        let (here, there) = socket::pair().unwrap();
        for packet in [b"".as_slice(), b"x", &[7; 4000], b""] {
            socket::send(there.as_fd(), packet, &[]).unwrap();
        }
        let mut emptying = Emptying::new();
        assert!(Parting::new(here, USER).is_empty(&mut emptying));
        assert!(emptying.0.is_empty());
    }

    #[test]
    fn the_other_side_sees_the_end() {
        for word in [None, Some(b"unread")] {
            let (here, there) = socket::pair().unwrap();
            if let Some(word) = word {
                socket::send(there.as_fd(), word, &[]).unwrap();
            }
            part(here, &mut Emptying::new());
            let poll = Poll::new().unwrap();
            poll.add(there.as_fd(), 0).unwrap();
            while poll.wait(None).unwrap().is_empty() {}
            let end = socket::receive(there.as_fd(), &mut [0; 4]);
            let end = end.or_else(|_| socket::receive(there.as_fd(), &mut [0; 4])).unwrap();
            assert_eq!(end.length, 0);
        }
    }
}
