//! Letting a connection go, whatever its other side has put into it.
//!
//! Unread packets may carry descriptors, and with the connection the kernel closes
//! these too. Closing can wait: a TCP socket with `SO_LINGER` and unread bytes waits for
//! as long as its owner has set. The process that closes it last waits, and that would be the helper.
//!
//! A TCP socket does not wait in a thread that is ending; a file of a FUSE server that never answers waits
//! there, too, for ever. So where something is left unread, a thread
//! gets a table of descriptors of its own with nothing in it but the connection; we close ours, which
//! is not the last, and the thread ends, which closes the last. Threads that are still at it are counted, by asking
//! the kernel whether they exist. Beyond [`MOST`] of them, or where no thread can be had, the connection stays open
//! for good: a descriptor is lost, and the main thread goes on. Where the kernel refuses descriptors
//! (Linux 6.16), nothing can be in there, and what is left unread is closed at once.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to give a thread that ends a table of descriptors of its own.

#![allow(unsafe_code)]

use pinfold_kernel::descriptor::keep_only;
use pinfold_kernel::socket;
use pinfold_kernel::thread::{thread_exists, thread_id};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

/// What a thread needs that does nothing.
const STACK_BYTES: usize = 64 << 10;
/// How many threads may be closing something at a time.
const MOST: usize = 64;

/// The threads that were closing something when last looked at, by number. Nothing else is locked under it.
static CLOSING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Closes a connection, without waiting for anything that is in it.
pub(crate) fn part(connection: OwnedFd) {
    // From here on nothing new gets in.
    socket::shutdown(connection.as_fd());
    if may_bring_descriptors(&connection) {
        part_by_thread(connection);
    }
}

/// Whether the first unread packet brings some, or there is more behind it that does perhaps.
fn may_bring_descriptors(connection: &OwnedFd) -> bool {
    let is_packet = |looked: io::Result<socket::Received>| {
        looked.is_ok_and(|packet| packet.length > 0 || packet.truncated || packet.sender.is_some())
    };
    is_packet(socket::peek(connection.as_fd(), &mut [0; 1]))
}

/// Has a thread close the last descriptor of `connection`, or leaves it open.
fn part_by_thread(connection: OwnedFd) {
    // Dropped only once another table has it.
    let connection = ManuallyDrop::new(connection);
    let mut closing = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
    closing.retain(|&thread| thread_exists(thread));
    if closing.len() >= MOST {
        return;
    }
    let (taken, is_taken) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let number = connection.as_raw_fd();
    let started =
        thread::Builder::new().name("parting".into()).stack_size(STACK_BYTES).spawn(move || {
            // SAFETY: this thread has no value of a descriptor: it sends a number, waits and ends.
            let table = unsafe { keep_only(&[number]) };
            let _ = taken.send(table.map(|()| thread_id()));
            // Ends when the sender is dropped: ours is closed by then.
            let _ = may_go.recv();
        });
    // The thread that ends closes the last one; without it, ours stays.
    if let (Ok(_), Ok(Ok(thread))) = (started, is_taken.recv()) {
        closing.push(thread);
        drop(ManuallyDrop::into_inner(connection));
    }
    drop(go);
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_kernel::descriptor::identity;
    use pinfold_kernel::poll::Poll;
    use pinfold_kernel::socket::set_linger;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

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

    #[test]
    fn a_lingering_descriptor_in_the_queue_delays_no_thread() {
        let (here, there) = socket::pair().unwrap();
        socket::pass_credentials(here.as_fd()).unwrap();
        let (writer, reader) = lingering();
        socket::send(there.as_fd(), b"", &[writer.as_fd()]).unwrap();
        drop(writer);
        // The one in the queue is the last.
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            part(here);
            done.send(()).unwrap();
        });
        // Not how long it takes, but whether it ends before the lingering does.
        is_done.recv_timeout(Duration::from_secs(300)).expect("held up by the lingering socket");
        drop(reader);
    }

    /// As many as may be are stuck for as long as the test runs; the next is not closed, and no thread waits.
    #[test]
    fn beyond_the_limit_a_connection_stays_open() {
        let mut stuck = vec![];
        for _ in 0..MOST {
            let (tell, number) = mpsc::channel();
            let (end, may_end) = mpsc::channel::<()>();
            let thread = thread::spawn(move || {
                tell.send(thread_id()).unwrap();
                let _ = may_end.recv();
            });
            CLOSING.lock().unwrap().push(number.recv().unwrap());
            stuck.push((end, thread));
        }
        let (here, there) = socket::pair().unwrap();
        socket::pass_credentials(here.as_fd()).unwrap();
        socket::send(there.as_fd(), b"unread", &[]).unwrap();
        let number = here.as_raw_fd();
        part(here);
        assert!(identity(number).is_ok(), "closed in this thread");
        for (end, thread) in stuck {
            drop(end);
            thread.join().unwrap();
        }
    }

    #[test]
    fn the_other_side_sees_the_end() {
        for word in [None, Some(b"unread")] {
            let (here, there) = socket::pair().unwrap();
            if let Some(word) = word {
                socket::send(there.as_fd(), word, &[]).unwrap();
            }
            part(here);
            let poll = Poll::new().unwrap();
            poll.add(there.as_fd(), 0).unwrap();
            while poll.wait(None).unwrap().is_empty() {}
            let end = socket::receive(there.as_fd(), &mut [0; 4]);
            let end = end.or_else(|_| socket::receive(there.as_fd(), &mut [0; 4])).unwrap();
            assert_eq!(end.length, 0);
        }
    }
}
