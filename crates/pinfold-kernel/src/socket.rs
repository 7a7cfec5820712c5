//! Unix sockets: packets, with descriptors and the sender's name attached.
//!
//! The standard library has neither `SOCK_SEQPACKET` nor what travels with a packet. Nothing here
//! blocks, except [`connect`], for as long as it is told; nothing raises `SIGPIPE`.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. Every function is
//! safe to call with any argument: pointers come from references, lengths from slices, and a
//! descriptor that is no such socket gives an error.

use crate::descriptor::{self, Descriptor};
use crate::errno::{Errno, checked as counted, last_errno};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// `SO_PEERPIDFD` of Linux 6.5.
const PEER_PIDFD: libc::c_int = 77;
/// `SO_PASSRIGHTS` of Linux 6.16.
const PASS_RIGHTS: libc::c_int = 83;
/// Room for the headers of a packet's company: the sender's name, and 64 descriptors at most.
const COMPANY_WORDS: usize = 48;

/// A process as the kernel names it, in the caller's namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    /// 0 if the caller's pid namespace does not show it.
    pub pid: u32,
    /// Its user. 65534 if the caller's user namespace has no number for it.
    pub uid: u32,
}

/// A packet, or the beginning of one that was too long.
#[derive(Debug)]
pub struct Received {
    /// How many bytes were written to the buffer.
    pub length: usize,
    /// The packet was longer, or more came with it than there was room for.
    pub truncated: bool,
    /// More came with it than there was room for: descriptors.
    pub left_out: bool,
    /// The sender, where [`pass_credentials`] was called. The end of the stream has no sender.
    pub sender: Option<Process>,
    /// What came with it.
    pub descriptors: Vec<OwnedFd>,
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn new_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes and gives numbers.
    let number = checked(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: the kernel has just given us this number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// `path` as the kernel wants it, and how many bytes of that count.
fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zeros are a valid address.
    let mut address = unsafe { MaybeUninit::<libc::sockaddr_un>::zeroed().assume_init() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).unwrap_or_default();
    let bytes = path.as_os_str().as_bytes();
    // The last byte stays zero. An empty path would have the kernel choose a name.
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    address.sun_path.iter_mut().zip(bytes).for_each(|(to, from)| *to = from.cast_signed());
    let length = size_of::<libc::sockaddr_un>() - address.sun_path.len() + bytes.len() + 1;
    Ok((address, libc::socklen_t::try_from(length).unwrap_or(0)))
}

/// Connects to the socket at `path`; waits for room in its queue for `patience` at most, and then
/// fails with `EAGAIN`.
///
/// # Errors
///
/// The kernel's; `ENAMETOOLONG` from 108 bytes on.
pub fn connect(path: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    let (address, length) = address(path)?;
    set_patience(socket.as_fd(), patience)?;
    // SAFETY: the kernel reads `length` bytes of `address`, which is no shorter.
    checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// How long a call that sends or connects may wait. Zero would mean for ever.
fn set_patience(socket: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    let patience = patience.max(Duration::from_millis(1));
    let time = libc::timeval {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_usec: libc::suseconds_t::from(patience.subsec_micros().cast_signed()),
    };
    set_option(socket, libc::SO_SNDTIMEO, &time)
}

/// Binds a new socket to `path`, with the rights `mode`, and does not listen yet.
///
/// # Errors
///
/// The kernel's; `EADDRINUSE` if there is something at `path`.
pub fn bind(path: &Path, mode: u32) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    let (address, length) = address(path)?;
    // SAFETY: the call takes numbers. The rights of the socket become those of the file, without
    // those that the process's mask takes away.
    checked(unsafe { libc::fchmod(socket.as_raw_fd(), mode as libc::mode_t) })?;
    // SAFETY: the kernel reads `length` bytes of `address`, which is no shorter.
    checked(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// Lets as many as `waiting` connections wait to be accepted.
///
/// # Errors
///
/// The kernel's.
pub fn listen(socket: BorrowedFd<'_>, waiting: u16) -> io::Result<()> {
    // SAFETY: the call takes numbers.
    checked(unsafe { libc::listen(socket.as_raw_fd(), waiting.into()) }).map(drop)
}

/// A second descriptor of the Unix socket for packets that listens under this number; `None` where it stands for anything
/// else: that may be of other code, which only the kernel knows.
///
/// # Errors
///
/// `EBADF` where it stands for nothing.
pub fn listener_at(number: Descriptor) -> Result<Option<OwnedFd>, Errno> {
    // SAFETY: what is no such socket is not given out, and nothing is read here.
    let socket = unsafe { descriptor::duplicate(number) }?;
    Ok(is_listener(socket.as_fd()).then_some(socket))
}

/// Whether this is a Unix socket for packets that listens.
pub fn is_listener(socket: BorrowedFd<'_>) -> bool {
    let number = |option| option_number(socket, option).unwrap_or(-1);
    number(libc::SO_DOMAIN) == libc::AF_UNIX
        && number(libc::SO_TYPE) == libc::SOCK_SEQPACKET
        && number(libc::SO_ACCEPTCONN) == 1
}

/// Calls that would wait fail with `EAGAIN` from now on.
///
/// # Errors
///
/// The kernel's.
pub fn never_wait(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut on: libc::c_int = 1;
    // SAFETY: the kernel reads the number.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONBIO as _, &raw mut on) }).map(drop)
}

/// The next connection that waits at a listener that does not.
///
/// # Errors
///
/// The kernel's; `EAGAIN` if none waits.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let unasked = std::ptr::null_mut();
    // SAFETY: no address is asked for.
    let number = unsafe { libc::accept4(listener.as_raw_fd(), unasked, unasked.cast(), flags) };
    let number = checked(number)?;
    // SAFETY: the kernel has just given us this number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Two sockets that are connected to each other.
///
/// # Errors
///
/// The kernel's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    let mut numbers: [RawFd; 2] = [-1; 2];
    // SAFETY: the kernel writes two numbers.
    checked(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, numbers.as_mut_ptr()) })?;
    // SAFETY: the kernel has just given us these numbers.
    Ok(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }).into())
}

/// Every packet that is sent from now on says who sent it.
///
/// # Errors
///
/// The kernel's.
pub fn pass_credentials(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SO_PASSCRED, &1_i32)
}

/// Has the kernel refuse packets that bring descriptors, here and on connections that are accepted
/// here.
///
/// # Errors
///
/// `ENOPROTOOPT` before Linux 6.16.
pub fn refuse_descriptors(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, PASS_RIGHTS, &0_i32)
}

/// The process that connected (or, for a connection's other side, that listened).
///
/// # Errors
///
/// The kernel's.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Process> {
    option::<libc::ucred>(socket, libc::SO_PEERCRED).map(Process::from)
}

impl From<libc::ucred> for Process {
    fn from(credentials: libc::ucred) -> Self {
        Self { pid: u32::try_from(credentials.pid).unwrap_or(0), uid: credentials.uid }
    }
}

/// A pidfd of the process that connected.
///
/// # Errors
///
/// `ENOPROTOOPT` before Linux 6.5; `ESRCH` or `ENODATA` if the process has ended.
pub fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let number = option_number(socket, PEER_PIDFD)?;
    // SAFETY: the kernel has just given us this number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// How much of what was sent here has not been received, in bytes of the kernel's accounts.
///
/// # Errors
///
/// The kernel's.
pub fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one number.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ as _, &raw mut bytes) })?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Ends the conversation: nothing can be sent any more by either side.
pub fn shutdown(socket: BorrowedFd<'_>) {
    // SAFETY: the call takes numbers. It fails only where there is no conversation.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

// --- packets --------------------------------------------------------------------------------------

/// Memory for a packet's company, aligned as its headers must be.
type Company = [u64; COMPANY_WORDS];

/// The bytes that `payload` takes among a packet's company.
fn company_bytes(payload: usize) -> usize {
    let payload = libc::c_uint::try_from(payload).unwrap_or(libc::c_uint::MAX / 2);
    // SAFETY: the function computes from its argument alone.
    unsafe { libc::CMSG_SPACE(payload) as usize }
}

/// Sends one packet with descriptors: all of it or nothing.
///
/// # Errors
///
/// `EAGAIN` if the other side's queue is full, `EPIPE` if the other side is gone, `EINVAL` for more than
/// 64 descriptors, `ETOOMANYREFS` if too many of this user's descriptors are under way.
pub fn send(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut company: Company = [0; COMPANY_WORDS];
    let mut part =
        libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    let mut message = envelope(&mut part);
    if !descriptors.is_empty() {
        enclose(&mut message, &mut company, descriptors)?;
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the message points to the packet and to the company, both alive and as long as it
    // says; the kernel only reads them.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn envelope(part: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: all zeros are a valid header: no address, no part, no company.
    let mut message = unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message
}

fn enclose(
    message: &mut libc::msghdr,
    company: &mut Company,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = size_of_val(descriptors);
    let payload = libc::c_uint::try_from(bytes).unwrap_or(libc::c_uint::MAX);
    if company_bytes(bytes) > size_of_val(company) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    message.msg_control = company.as_mut_ptr().cast();
    message.msg_controllen = company_bytes(bytes) as _;
    // SAFETY: the company is aligned and, as has just been checked, large enough for one header and
    // the descriptors behind it; a borrowed descriptor is its number.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(payload) as _;
        let data = libc::CMSG_DATA(header);
        std::ptr::copy_nonoverlapping(descriptors.as_ptr().cast::<u8>(), data, bytes);
    }
    Ok(())
}

/// Takes the next packet and its descriptors.
///
/// # Errors
///
/// `EAGAIN` if there is none.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    receive_with(socket, buffer, size_of::<Company>(), 0)
}

/// Looks at the next packet and leaves it where it is; `left_out` tells of descriptors. Where
/// [`pass_credentials`] was called there is room for the sender and no more, so none is taken.
///
/// # Errors
///
/// `EAGAIN` if there is none.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let room = company_bytes(size_of::<libc::ucred>());
    let mut looked = receive_with(socket, buffer, room, libc::MSG_PEEK)?;
    looked.left_out |= !looked.descriptors.is_empty();
    looked.truncated |= looked.left_out;
    looked.descriptors.clear();
    Ok(looked)
}

fn receive_with(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    room: usize,
    flags: libc::c_int,
) -> io::Result<Received> {
    let mut company: Company = [0; COMPANY_WORDS];
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut message = envelope(&mut part);
    message.msg_control = company.as_mut_ptr().cast();
    message.msg_controllen = room.min(size_of::<Company>()) as _;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message points to the buffer and to the company, both alive, exclusively ours and
    // as long as it says.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let length = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let left_out = message.msg_flags & libc::MSG_CTRUNC != 0;
    let truncated = left_out || message.msg_flags & libc::MSG_TRUNC != 0;
    let mut received =
        Received { length, truncated, left_out, sender: None, descriptors: Vec::new() };
    // SAFETY: the kernel has filled the message's company.
    unsafe { received.unpack(&message) };
    Ok(received)
}

impl Received {
    /// # Safety
    ///
    /// The company of `message` is alive and was filled by `recvmsg`, and no other call takes the
    /// descriptors in it.
    unsafe fn unpack(&mut self, message: &libc::msghdr) {
        // SAFETY: the kernel wrote whole headers, which these functions walk along; what each of
        // the two kinds carries is behind its header, as long as the header says.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(message);
            while !header.is_null() {
                let data = libc::CMSG_DATA(header);
                let bytes = (*header).cmsg_len as usize - (data.addr() - header.addr());
                match ((*header).cmsg_level, (*header).cmsg_type) {
                    (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                        self.sender = Some(data.cast::<libc::ucred>().read_unaligned().into());
                    }
                    (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                        let numbers = data.cast::<RawFd>();
                        let take = |at| OwnedFd::from_raw_fd(numbers.add(at).read_unaligned());
                        self.descriptors.extend((0..bytes / size_of::<RawFd>()).map(take));
                    }
                    _ => {}
                }
                header = libc::CMSG_NXTHDR(message, header);
            }
        }
    }
}

// --- options --------------------------------------------------------------------------------------

fn set_option<T>(socket: BorrowedFd<'_>, name: libc::c_int, value: &T) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the kernel reads as many bytes as the value has.
    checked(unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value, length) })
        .map(drop)
}

fn option_number(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<libc::c_int> {
    option(socket, name)
}

/// `T` is one of the kernel's plain structures of numbers.
fn option<T: Copy>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes. Both types in use, a number and `ucred`, are
    // valid when all of their bytes are zero, and for all that it may write.
    unsafe {
        let place = value.as_mut_ptr().cast();
        let number = socket.as_raw_fd();
        checked(libc::getsockopt(number, libc::SOL_SOCKET, name, place, &raw mut length))?;
        Ok(value.assume_init())
    }
}

// --- by number ------------------------------------------------------------------------------------

/// Whether the other side of a connection is still there.
pub fn is_connected(connection: Descriptor) -> bool {
    let mut poll = libc::pollfd { fd: connection, events: libc::POLLRDHUP, revents: 0 };
    // A signal that has just arrived says nothing of the other side. Not by the C library's `poll`, where a thread may be
    // cancelled.
    while !descriptor::poll_one(&mut poll, 0) {
        if last_errno() != Errno(libc::EINTR) {
            return false;
        }
    }
    poll.revents == 0
}

/// Sends one packet, or nothing, without waiting. The number may be another file's by now.
pub fn send_by_number(connection: Descriptor, packet: &[u8]) -> Result<usize, Errno> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the kernel reads the packet.
    let sent = unsafe { libc::send(connection, packet.as_ptr().cast(), packet.len(), flags) };
    counted(sent as libc::c_long)
}

/// Has the last close of a stream wait for its reader.
///
/// # Errors
///
/// The kernel's.
pub fn set_linger(stream: BorrowedFd<'_>, patience: Duration) -> Result<(), Errno> {
    Ok(rustix::net::sockopt::set_socket_linger(stream, Some(patience))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::status_of_child;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    fn is_same_file(one: &OwnedFd, other: &OwnedFd) -> bool {
        let identity = |file: &OwnedFd| {
            let status = File::from(file.try_clone().unwrap()).metadata().unwrap();
            (status.dev(), status.ino())
        };
        identity(one) == identity(other)
    }

    #[test]
    fn descriptors_and_the_sender_arrive() {
        let (here, there) = pair().unwrap();
        pass_credentials(there.as_fd()).unwrap();
        let sent = OwnedFd::from(File::open("/proc/self/exe").unwrap());
        send(here.as_fd(), b"word", &[sent.as_fd(), here.as_fd()]).unwrap();
        let mut buffer = [0; 8];
        let peeked = peek(there.as_fd(), &mut buffer).unwrap();
        assert!(peeked.truncated && peeked.left_out && peeked.descriptors.is_empty());
        let received = receive(there.as_fd(), &mut buffer).unwrap();
        assert_eq!((received.length, &buffer[..4]), (4, b"word".as_slice()));
        assert!(!received.truncated && is_same_file(&received.descriptors[0], &sent));
        assert_eq!(received.sender.map(|sender| sender.pid), Some(std::process::id()));
        let peer = peer(there.as_fd()).unwrap();
        assert_eq!(Some(peer), received.sender);
    }

    /// What else a number stands for is not given out.
    #[test]
    fn only_a_listener_is_had_by_its_number() {
        let name = format!("{}/listener-{}", std::env::temp_dir().display(), std::process::id());
        let listener = bind(Path::new(&name), 0o600).unwrap();
        std::fs::remove_file(name).unwrap();
        let taken = |socket: &OwnedFd| listener_at(socket.as_raw_fd());
        assert!(taken(&listener).unwrap().is_none());
        listen(listener.as_fd(), 1).unwrap();
        assert!(is_same_file(&taken(&listener).unwrap().unwrap(), &listener));
        let (here, _there) = pair().unwrap();
        assert!(taken(&here).unwrap().is_none());
        assert_eq!(listener_at(1 << 20).err(), Some(Errno(libc::EBADF)));
    }

    #[test]
    fn what_is_too_long_says_so() {
        let (here, there) = pair().unwrap();
        send(here.as_fd(), &[1; 40], &[]).unwrap();
        let received = receive(there.as_fd(), &mut [0; 32]).unwrap();
        assert!(received.truncated && received.length == 32 && received.sender.is_none());
        assert!(!received.left_out);
        let many = vec![here.as_fd(); 100];
        let refused = send(here.as_fd(), b"", &many).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn an_empty_packet_is_told_from_the_end() {
        let (here, there) = pair().unwrap();
        pass_credentials(there.as_fd()).unwrap();
        send(here.as_fd(), b"", &[]).unwrap();
        assert!(unread(here.as_fd()).unwrap() > 0);
        assert!(receive(there.as_fd(), &mut [0; 4]).unwrap().sender.is_some());
        assert_eq!(unread(here.as_fd()).unwrap(), 0);
        shutdown(here.as_fd());
        assert!(receive(there.as_fd(), &mut [0; 4]).unwrap().sender.is_none());
        assert_eq!(send(there.as_fd(), b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    /// In a child, whose timer and handler are its own.
    #[test]
    fn a_signal_disconnects_nothing() {
        extern "C" fn arrived(_: libc::c_int) {}
        let (here, there) = pair().unwrap();
        let status = status_of_child(|| {
            // SAFETY: the handler does nothing, and the timer is the child's.
            unsafe {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                action.sa_sigaction = arrived as extern "C" fn(_) as usize;
                libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
                let often = libc::timeval { tv_sec: 0, tv_usec: 50 };
                let timer = libc::itimerval { it_interval: often, it_value: often };
                libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
            }
            let begin = std::time::Instant::now();
            let mut is_there = true;
            while is_there && begin.elapsed() < Duration::from_millis(200) {
                is_there = is_connected(here.as_raw_fd());
            }
            i32::from(!is_there)
        });
        assert_eq!(status, 0);
        shutdown(there.as_fd());
        assert!(!is_connected(here.as_raw_fd()));
    }

    #[test]
    fn a_path_that_does_not_fit_is_an_error() {
        for path in ["", &"x".repeat(108)] {
            let error = connect(Path::new(path), Duration::ZERO).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
        }
    }
}
