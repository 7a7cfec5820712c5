//! Connections.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Every function is safe to call
//! with any argument: a descriptor that is no socket gives an error.

#![allow(unsafe_code)]

use crate::descriptor::Descriptor;
use crate::errno::{Errno, checked};

/// Whether the other side of a connection is still there.
pub fn is_connected(connection: Descriptor) -> bool {
    let mut poll = libc::pollfd { fd: connection, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`.
    let answered = unsafe { libc::poll(&raw mut poll, 1, 0) } >= 0;
    answered && poll.revents == 0
}

/// Sends one packet, or nothing; waits for nobody.
pub fn send(connection: Descriptor, packet: &[u8]) -> Result<usize, Errno> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the kernel reads the packet.
    let sent = unsafe { libc::send(connection, packet.as_ptr().cast(), packet.len(), flags) };
    checked(sent as libc::c_long)
}
