//! The doorbell of Soft-RoCE (`rdma_rxe`), whose driver looks at a queue of requests when the kernel's command to post is
//! written to the device, whatever that posts.
//!
//! Other drivers take the same command and expect a request in it: the kernel's rdmavt (hfi1, qib) reads the first one
//! without looking whether there is one, in the kernel and with a spin lock held. So the device is asked for its driver
//! first, each time and by the descriptor that is written to: a number that leads to another file by now is left alone.
//!
//! # Safety
//!
//! The unsafe code of this file is there because a system call is a foreign function. The command that is written has an
//! effect on the device that it is written to, so its caller promises whose that is.

use crate::errno::{Errno, last_errno};
use crate::request::request;
use std::os::fd::RawFd;
use std::ptr;

/// `struct ib_uverbs_ioctl_hdr` of the kernel, without attributes.
#[repr(C)]
struct Method {
    bytes: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved: u64,
    driver: u32,
    reserved2: u32,
}

/// `RDMA_VERBS_IOCTL`.
const VERBS: libc::c_ulong = request(0x1b, 1, size_of::<Method>());

/// `RDMA_DRIVER_RXE`.
const SOFT_ROCE: u32 = 14;

/// No driver has this number.
const NO_DRIVER: u32 = u32::MAX;

/// How the device answers to a method that no kernel has, asked for in the name of a driver: `EPROTONOSUPPORT` if that is its
/// own, and `EINVAL` if it is not, which the kernel looks at first (Linux 4.17). Does nothing else.
fn ask(device: RawFd, driver: u32) -> Errno {
    /// Beyond all objects and methods of the kernel, and not in the drivers' own range, which begins at the next bit.
    const NONE: u16 = 0xfff;
    const BYTES: u16 = 24;
    const { assert!(size_of::<Method>() == BYTES as usize) };
    let mut method = Method {
        bytes: BYTES,
        object: NONE,
        method: NONE,
        attributes: 0,
        reserved: 0,
        driver,
        reserved2: 0,
    };
    // SAFETY: the kernel reads what it is given, whose size is in the request and in the structure.
    let answer = unsafe { libc::ioctl(device, VERBS as _, &raw mut method) };
    if answer < 0 { last_errno() } else { Errno(0) }
}

/// Whether the answers are those of a device whose driver is Soft-RoCE. What says the same of a driver that does not exist
/// has not looked.
fn is_soft_roce(ask: impl Fn(u32) -> Errno) -> bool {
    ask(SOFT_ROCE) == Errno(libc::EPROTONOSUPPORT) && ask(NO_DRIVER) == Errno(libc::EINVAL)
}

/// `struct ib_uverbs_post_send` behind its header, of the kernel's interface: requests to post, none.
#[repr(C)]
struct Doorbell {
    command: u32,
    in_words: u16,
    out_words: u16,
    response: u64,
    queue_pair: u32,
    requests: u32,
    pieces: u32,
    request_bytes: u32,
}

impl Doorbell {
    fn new(queue_pair: u32, answer: &mut u32) -> Self {
        /// `IB_USER_VERBS_CMD_POST_SEND`.
        const POST_SEND: u32 = 28;
        /// Of four bytes; the size is asserted below.
        const WORDS: u16 = 8;
        const { assert!(size_of::<Doorbell>() == 32) };
        Self {
            command: POST_SEND,
            in_words: WORDS,
            out_words: 1,
            response: ptr::from_mut(answer).expose_provenance() as u64,
            queue_pair,
            requests: 0,
            pieces: 0,
            // More than the kernel's own structure has, which is all that it asks.
            request_bytes: 128,
        }
    }
}

/// Has Soft-RoCE look at what stands in the send queue of the queue pair that the kernel knows by this handle; true if it was
/// asked to. Nothing happens to a device of another driver, or one whose driver is not known: before Linux 4.17, or where a
/// filter of system calls refuses to ask.
///
/// # Safety
///
/// `device` is the number of an RDMA device's descriptor, or of one that was closed since, and the queue pair the caller's.
pub unsafe fn ring(device: RawFd, queue_pair: u32) -> bool {
    if !is_soft_roce(|driver| ask(device, driver)) {
        return false;
    }
    let mut answer = 0_u32;
    let command = Doorbell::new(queue_pair, &mut answer);
    // SAFETY: the command names an empty list, which this driver takes, and the answer has the room that it says.
    let written =
        unsafe { libc::write(device, (&raw const command).cast(), size_of_val(&command)) };
    written >= 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::fd::AsRawFd;

    /// What a device of this driver answers.
    fn of(own: u32) -> impl Fn(u32) -> Errno {
        move |asked| Errno(if asked == own { libc::EPROTONOSUPPORT } else { libc::EINVAL })
    }

    #[test]
    fn no_device_but_soft_roce_is_taken_for_it() {
        assert!(is_soft_roce(of(SOFT_ROCE)));
        for other in (0..64).filter(|&it| it != SOFT_ROCE) {
            assert!(!is_soft_roce(of(other)), "{other}");
        }
    }

    #[test]
    fn a_device_that_does_not_say_its_driver_is_left_alone() {
        for errno in [0, libc::EINVAL, libc::EPROTONOSUPPORT, libc::ENOTTY, libc::EBADF, libc::EIO]
        {
            assert!(!is_soft_roce(|_| Errno(errno)), "{errno}");
        }
    }

    /// The number was closed, and is another file's by now.
    #[test]
    fn nothing_is_written_to_a_file() {
        let path = std::env::temp_dir().join(format!("pinfold-soft-roce-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let mut file = file.unwrap();
        std::fs::remove_file(&path).unwrap();
        // SAFETY: the test's own file, and there is no queue pair.
        assert!(!unsafe { ring(file.as_raw_fd(), 1) });
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        assert_eq!(file.read_to_end(&mut bytes).unwrap(), 0);
        // SAFETY: no descriptor, and no queue pair.
        assert!(!unsafe { ring(-1, 1) });
    }
}
