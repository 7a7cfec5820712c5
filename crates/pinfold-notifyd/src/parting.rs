//! Letting a connection go, whatever its other side has put into it.
//!
//! Packets that nobody has read may carry descriptors, and with the connection the kernel closes
//! these too. Closing can wait: a TCP socket with `SO_LINGER` and bytes that nobody takes waits for
//! as long as its owner has set. The last one who closes it waits, and that would be us.
//!
//! Only a thread that is ending never waits for that. So where something is left unread, a thread
//! gets a table of descriptors of its own with nothing in it but the connection; we close ours, which
//! is not the last, and the thread ends, which closes the last. Where the kernel refuses descriptors
//! (Linux 6.16), nothing can be in there, and what is left unread is closed at once.

use crate::sys;
use pinfold_ebpf::socket;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc;
use std::thread;

/// What a thread needs that does nothing.
const STACK_BYTES: usize = 64 << 10;

/// Closes a connection, without waiting for anything that is in it.
pub(crate) fn part(connection: OwnedFd) {
    // From here on nothing new gets in.
    socket::shutdown(connection.as_fd());
    if may_bring_descriptors(&connection) {
        // If the thread cannot be started, the connection is closed here all the same.
        let _ = part_by_thread(connection);
    }
}

/// Whether the first unread packet brings some, or there is more behind it that does perhaps.
fn may_bring_descriptors(connection: &OwnedFd) -> bool {
    let is_packet = |looked: io::Result<socket::Received>| {
        looked.is_ok_and(|packet| packet.length > 0 || packet.truncated || packet.sender.is_some())
    };
    is_packet(socket::peek(connection.as_fd(), &mut [0; 1]))
}

fn part_by_thread(connection: OwnedFd) -> io::Result<()> {
    let (taken, is_taken) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let number = connection.as_raw_fd();
    thread::Builder::new().name("parting".into()).stack_size(STACK_BYTES).spawn(move || {
        // If that fails, ours is the last after all.
        let _ = sys::keep_only_for_this_thread(number);
        let _ = taken.send(());
        // Ends when the sender is dropped: ours is closed by then.
        let _ = may_go.recv();
    })?;
    let _ = is_taken.recv();
    drop(connection);
    drop(go);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// A connection that waits for ten minutes when it is closed, because nobody reads what was
    /// written to it; and the reader.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        crate::sys::linger_for_test(writer.as_fd(), 600);
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        (writer, reader)
    }

    #[test]
    fn a_lingering_descriptor_in_the_queue_holds_nobody_up() {
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

    #[test]
    fn the_other_side_sees_the_end() {
        for word in [None, Some(b"unread")] {
            let (here, there) = socket::pair().unwrap();
            if let Some(word) = word {
                socket::send(there.as_fd(), word, &[]).unwrap();
            }
            part(here);
            crate::sys::await_for_test(there.as_fd());
            let end = socket::receive(there.as_fd(), &mut [0; 4]);
            let end = end.or_else(|_| socket::receive(there.as_fd(), &mut [0; 4])).unwrap();
            assert_eq!(end.length, 0);
        }
    }
}
