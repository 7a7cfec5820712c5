//! Which open file a device's descriptor stands for: the one that registrations were made in, or another.
//!
//! A program may close all descriptors that it does not know (`closefrom`), a device's too. The kernel has ended its
//! registrations then, and the number may come to stand for the same device, opened anew: to end a registration by its
//! old number there ends one of the program's. So each open file gets a mark, which another one with its number does not
//! have: the number of the signal that would report that it is ready (`F_SETSIG`), which no device's descriptor ever sends.
//! It needs no descriptor, and forked children have it with the file.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the descriptor of a device that the program has open, and to ask the kernel for
//! the mark.

#![allow(unsafe_code)]

use libc::c_int;
use pinfold::registrar::verbs::ffi::ibv_context;
use pinfold_kernel::errno::{last_errno, set_errno};
use std::ptr;

/// Of `linux/fcntl.h`.
const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
/// The highest number of a signal.
const MARKS: c_int = 64;

/// An open file of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct OpenFile {
    descriptor: c_int,
    mark: c_int,
}

impl OpenFile {
    fn is_open(self) -> bool {
        mark_of(self.descriptor) == Some(self.mark)
    }
}

/// The devices in which registrations are kept, by the addresses of their `ibv_context`. A few.
#[derive(Default, Debug)]
pub(crate) struct OpenDevices(Vec<(usize, OpenFile)>);

/// What is known of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// It is the one that it was, or a new one.
    Open,
    /// What was registered there before ended with another open file.
    OpenedAnew,
    /// Its descriptor cannot be told from others.
    Unknown,
}

impl OpenDevices {
    /// Before something is kept that is registered in this device.
    ///
    /// # Safety
    ///
    /// `device` is the address of an open `ibv_context`.
    pub(crate) unsafe fn note(&mut self, device: usize) -> Standing {
        // SAFETY: the caller's promise.
        let descriptor = unsafe { (*ptr::with_exposed_provenance::<ibv_context>(device)).cmd_fd };
        self.note_descriptor(device, descriptor)
    }

    fn note_descriptor(&mut self, device: usize, descriptor: c_int) -> Standing {
        let known = self.0.iter().position(|&(known, _)| known == device);
        if known.is_some_and(|at| self.0[at].1.descriptor == descriptor && self.0[at].1.is_open()) {
            return Standing::Open;
        }
        let Some(mark) = self.marked(descriptor) else { return Standing::Unknown };
        let fresh = (device, OpenFile { descriptor, mark });
        match known {
            Some(at) => {
                self.0[at] = fresh;
                Standing::OpenedAnew
            }
            None => {
                self.0.push(fresh);
                Standing::Open
            }
        }
    }

    /// The mark that the open file has, by a parent of this process or from here on: none that another file with this
    /// number had.
    fn marked(&self, descriptor: c_int) -> Option<c_int> {
        match mark_of(descriptor)? {
            0 => {
                let is_free = |mark: &c_int| {
                    !self.0.iter().any(|(_, file)| *file == OpenFile { descriptor, mark: *mark })
                };
                let mark = (1..=MARKS).find(is_free)?;
                let before = last_errno();
                // SAFETY: the file reports nothing by a signal, so the number changes nothing.
                let marked = unsafe { libc::fcntl(descriptor, F_SETSIG, mark) } == 0;
                set_errno(before);
                marked.then_some(mark)
            }
            mark => Some(mark),
        }
    }

    /// Whether registrations of this device can be ended by their numbers.
    pub(crate) fn is_open(&self, device: usize) -> bool {
        self.0.iter().any(|(known, file)| *known == device && file.is_open())
    }

    /// The program closes the device, or has.
    pub(crate) fn forget(&mut self, device: usize) {
        self.0.retain(|(known, _)| *known != device);
    }
}

/// 0 for none; `None` for a number that stands for nothing. Leaves the error number as it was.
fn mark_of(descriptor: c_int) -> Option<c_int> {
    let before = last_errno();
    // SAFETY: the call changes nothing.
    let mark = unsafe { libc::fcntl(descriptor, F_GETSIG) };
    set_errno(before);
    (mark >= 0).then_some(mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn opened() -> File {
        File::open("/dev/null").unwrap()
    }

    /// Gives `file`'s number another open file.
    fn opened_anew(file: &File) {
        // SAFETY: two descriptors of this test's.
        assert!(unsafe { libc::dup2(opened().as_raw_fd(), file.as_raw_fd()) } >= 0);
    }

    #[test]
    fn a_file_that_is_opened_anew_is_another() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        assert!(!devices.is_open(7));
        for _ in 0..2 {
            assert_eq!(devices.note_descriptor(7, file.as_raw_fd()), Standing::Open);
            assert!(devices.is_open(7));
        }
        opened_anew(&file);
        assert!(!devices.is_open(7));
        assert_eq!(devices.note_descriptor(8, file.as_raw_fd()), Standing::Open);
        assert!(devices.is_open(8) && !devices.is_open(7), "it has another mark");
        assert_eq!(devices.note_descriptor(7, file.as_raw_fd()), Standing::OpenedAnew);
        devices.forget(8);
        assert!(devices.is_open(7) && !devices.is_open(8));
    }

    #[test]
    fn what_another_process_has_marked_keeps_its_mark() {
        let (mut parent, mut child, file) =
            (OpenDevices::default(), OpenDevices::default(), opened());
        assert_eq!(parent.note_descriptor(7, file.as_raw_fd()), Standing::Open);
        assert_eq!(child.note_descriptor(9, file.as_raw_fd()), Standing::Open);
        assert!(parent.is_open(7) && child.is_open(9));
    }

    #[test]
    fn what_is_not_open_cannot_be_told() {
        let mut devices = OpenDevices::default();
        // SAFETY: a descriptor of this test's, of a number that no other thread gets.
        let high =
            unsafe { OwnedFd::from_raw_fd(libc::fcntl(opened().as_raw_fd(), libc::F_DUPFD, 900)) };
        assert_eq!(devices.note_descriptor(7, high.as_raw_fd()), Standing::Open);
        drop(high);
        assert!(!devices.is_open(7));
        assert_eq!(devices.note_descriptor(7, -1), Standing::Unknown);
    }
}
