//! Which open file a device's descriptor stands for: the one that registrations were made in, or another.
//!
//! A program may close all descriptors that it does not know (`closefrom`), a device's too. The kernel has ended its
//! registrations then, and the number may come to stand for the same device, opened anew: to end a registration by its
//! old number there ends one of the program's. So each open file gets a mark, which another one with its number does not
//! have: the number of the signal that would report that it is ready (`F_SETSIG`), which no device's descriptor ever sends.
//! It needs no descriptor, and forked children have it with the file.
//!
//! There are 64 marks. A file whose number stands for another one by now is gone, so its mark is free for that number, unless
//! the thread that deregisters may be looking for the file: with no lock held, by a copy of what was open ([`DeviceList`]).
//! So of two files with one number that this process has marked none is taken for the other, and there is always a free mark.
//! A forked child has its parents' books with their devices, and gives no file the mark that one of those had with its
//! number ([`OpenDevices::inherit`]).
//!
//! A device that is opened anew may have the address, the number and the mark of one before. So what is registered is noted
//! with an [`Opening`], which no later one is equal to, and not with the device's address.
//!
//! # The table of the thread that deregisters
//!
//! A program may give itself a table of descriptors of its own (`unshare(CLONE_FILES)`, `CLOSE_RANGE_UNSHARE`). A thread
//! that kept the one that it leaves would hold open what the program closes, and see other files under the program's
//! numbers. So the thread of ours has a table with nothing in it but what the monitor needs ([`Table`]), and the program's
//! open file of a device for the moments in which it ends registrations there (`pidfd_getfd`, Linux 5.6).
//!
//! That call looks at the table of the program's *first* thread. Another thread may have one of its own with other devices,
//! and the first one may have ended: then the number stands for nothing, or for a file without the mark, nothing is ended
//! here, and the program's next call of verbs ends it on a thread that has the number. A file with the mark is the right one,
//! through whichever table it was found. Where the call is refused (a container's filter, an older kernel) the thread
//! shares the program's table for as long as the program does.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to read the descriptor of a device that the program has open, to ask the kernel for
//! the mark, and to give a thread of ours its table.

#![allow(unsafe_code)]

use crate::sandbox;
use libc::c_int;
use pinfold::registrar::verbs::ffi::ibv_context;
use pinfold_kernel::descriptor::{self, Descriptor, keep_only};
use pinfold_kernel::errno::{last_errno, set_errno};
use pinfold_kernel::own_process::OwnProcess;
use std::os::fd::IntoRawFd;
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
        self.is_at(self.descriptor)
    }

    /// Whether it is what `number` stands for in the calling thread's table.
    fn is_at(self, number: Descriptor) -> bool {
        mark_of(number) == Some(self.mark)
    }
}

/// One opening of a device, told from every other of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Opening(u64);

impl Opening {
    #[cfg(test)]
    pub(crate) const ANY: Self = Self(0);
}

/// The table of descriptors of the thread that deregisters.
#[derive(Debug)]
pub(crate) enum Table {
    /// The program's.
    Shared,
    /// Its own, and the process whose files it borrows; `None` where that cannot be opened.
    Own(Option<OwnProcess>),
}

impl Table {
    /// Gives the calling thread a table with nothing in it but `kept`, where it may borrow the program's files.
    ///
    /// # Safety
    ///
    /// As for [`keep_only`].
    pub(crate) unsafe fn of_this_thread(kept: &[Descriptor]) -> Self {
        // SAFETY: the caller's promise.
        if OwnProcess::lends() && unsafe { keep_only(kept) }.is_ok() {
            Self::Own(OwnProcess::open().ok())
        } else {
            Self::Shared
        }
    }

    /// The file, for the calling thread, whose table this is: its number there, and whether that is to be closed.
    fn lend(&self, file: OpenFile) -> Option<(Descriptor, bool)> {
        match self {
            Self::Shared => Some((file.descriptor, false)),
            Self::Own(process) => {
                // A filter of the program's own may end it at a call that it does not expect.
                let process = process.as_ref().filter(|_| !sandbox::is_the_program_s())?;
                // SAFETY: a device's file, which libibverbs opened; nothing is read from it.
                let lent = unsafe { process.borrow(file.descriptor) };
                Some((lent.ok()?.into_raw_fd(), true))
            }
        }
    }
}

/// A device's open file, for the thread that deregisters.
#[derive(Debug)]
pub(crate) struct LentDevice {
    opening: Opening,
    /// The program's number of it.
    pub(crate) named: Descriptor,
    /// This thread's.
    pub(crate) number: Descriptor,
    /// Closed with this value.
    is_borrowed: bool,
}

impl Drop for LentDevice {
    /// Not by the C library's `close`: a program may have a function of that name.
    fn drop(&mut self) {
        if self.is_borrowed {
            // SAFETY: in a table of this thread's own, and owned by this value.
            unsafe { descriptor::close(self.number) };
        }
    }
}

impl LentDevice {
    /// Whether it is that of this opening.
    pub(crate) fn is_of(&self, opening: Opening) -> bool {
        self.opening == opening
    }
}

/// A device that was open when something was registered there.
#[derive(Clone, Copy, Debug)]
struct OpenDevice {
    /// The address of its `ibv_context`.
    address: usize,
    opening: Opening,
    file: OpenFile,
    /// It had no mark before: no other process had kept anything in it.
    is_marked_here: bool,
}

/// The devices in which registrations are kept: as many as the program has open, and for each number that it has closed one.
#[derive(Default, Debug)]
pub(crate) struct OpenDevices {
    open: DeviceList,
    /// What the thread that deregisters may be looking for.
    looked_for: DeviceList,
    /// What the thread that ends the process may be looking for.
    looked_for_last: DeviceList,
    /// In a forked child: what its parents had open, as far as it is known.
    inherited: DeviceList,
    /// How many openings were noted.
    openings: u64,
}

/// Devices that were open at a moment.
#[derive(Clone, Default, Debug)]
pub(crate) struct DeviceList(Vec<OpenDevice>);

/// A device in which something is about to be registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct KnownDevice {
    pub(crate) opening: Opening,
    /// The addresses of those whose open file this one has taken the place of: what was registered there is gone. Its own
    /// is one of them if it was opened anew.
    pub(crate) gone: Vec<usize>,
}

impl OpenDevices {
    /// Before something is kept that is registered in this device. `None` if its descriptor cannot be told from others.
    ///
    /// # Safety
    ///
    /// `device` is the address of an open `ibv_context`.
    pub(crate) unsafe fn note(&mut self, device: usize) -> Option<KnownDevice> {
        // SAFETY: the caller's promise.
        let descriptor = unsafe { (*ptr::with_exposed_provenance::<ibv_context>(device)).cmd_fd };
        self.note_descriptor(device, descriptor)
    }

    /// As [`note`](Self::note), of a device with this descriptor.
    pub(crate) fn note_descriptor(
        &mut self,
        device: usize,
        descriptor: c_int,
    ) -> Option<KnownDevice> {
        let known = self.open.0.iter().find(|known| known.address == device);
        if let Some(&OpenDevice { opening, file, .. }) = known
            && file.descriptor == descriptor
            && file.is_open()
        {
            return Some(KnownDevice { opening, gone: Vec::new() });
        }
        let is_marked_here = is_marked(descriptor) == Some(false) || self.has_marked(descriptor);
        let file = OpenFile { descriptor, mark: self.marked(descriptor)? };
        let gone = self.forget_gone(device, file);
        let opening = Opening(self.openings);
        self.openings += 1;
        self.open.0.push(OpenDevice { address: device, opening, file, is_marked_here });
        Some(KnownDevice { opening, gone })
    }

    /// `device` has this open file. Says which others, and which earlier one of its own, had their files before.
    fn forget_gone(&mut self, device: usize, file: OpenFile) -> Vec<usize> {
        let is_gone = |known: &OpenDevice| {
            known.address == device
                || known.file.descriptor == file.descriptor && known.file != file
        };
        self.open.0.extract_if(.., |known| is_gone(known)).map(|known| known.address).collect()
    }

    /// The mark that the open file has, by a parent of this process or from here on: none that another file with this
    /// number had, of those that are looked for or inherited.
    fn marked(&self, descriptor: c_int) -> Option<c_int> {
        match mark_of(descriptor)? {
            0 => {
                let looked_for = || self.looked_for.0.iter().chain(&self.looked_for_last.0);
                let known = || self.open.0.iter().chain(looked_for()).chain(&self.inherited.0);
                let is_free = |mark: &c_int| {
                    !known().any(|known| known.file == OpenFile { descriptor, mark: *mark })
                };
                // Those of the openings before are the last to come again, under other numbers, too.
                let first =
                    c_int::try_from(self.openings % u64::from(MARKS.unsigned_abs())).ok()?;
                let mark = (0..MARKS).map(|next| 1 + (first + next) % MARKS).find(is_free)?;
                // The file reports nothing by a signal, so the number changes nothing.
                (fcntl(descriptor, F_SETSIG, mark) == Some(0)).then_some(mark)
            }
            mark => Some(mark),
        }
    }

    /// Whether what `descriptor` stands for has its mark from this process.
    pub(crate) fn has_marked(&self, descriptor: c_int) -> bool {
        let is_it = |known: &OpenDevice| {
            known.is_marked_here && known.file.descriptor == descriptor && known.file.is_open()
        };
        self.open.0.iter().any(is_it)
    }

    /// Whether registrations of this opening can be ended by their numbers.
    pub(crate) fn is_open(&self, opening: Opening) -> bool {
        self.open.file(opening).is_some_and(OpenFile::is_open)
    }

    /// What is open now, for the thread that deregisters, which looks for it until it calls this again or
    /// [`end_look`](Self::end_look).
    pub(crate) fn look(&mut self) -> DeviceList {
        self.looked_for = self.open.clone();
        self.open.clone()
    }

    /// As [`look`](Self::look), for the thread that ends the process: beside the other, and until the process ends.
    pub(crate) fn look_last(&mut self) -> DeviceList {
        self.looked_for_last = self.open.clone();
        self.open.clone()
    }

    /// The thread that deregisters looks for nothing.
    pub(crate) fn end_look(&mut self) {
        self.looked_for = DeviceList::default();
    }

    /// This process is a forked child of the one whose devices these are.
    pub(crate) fn inherit(&mut self, parent: &Self) {
        self.inherited.0.extend(&parent.open.0);
    }

    /// The program closes the device, or has.
    pub(crate) fn forget(&mut self, device: usize) {
        self.open.0.retain(|known| known.address != device);
    }
}

impl DeviceList {
    fn file(&self, opening: Opening) -> Option<OpenFile> {
        self.0.iter().find(|known| known.opening == opening).map(|known| known.file)
    }

    /// The open file of this opening, through the calling thread's table; `None` if it is not found there.
    pub(crate) fn lend(&self, opening: Opening, table: &Table) -> Option<LentDevice> {
        let file = self.file(opening)?;
        let (number, is_borrowed) = table.lend(file)?;
        let lent = LentDevice { opening, named: file.descriptor, number, is_borrowed };
        file.is_at(number).then_some(lent)
    }
}

/// Whether some process has kept anything in what `descriptor` stands for. `None` for a number that stands for nothing.
pub(crate) fn is_marked(descriptor: c_int) -> Option<bool> {
    mark_of(descriptor).map(|mark| mark != 0)
}

/// 0 for none; `None` for a number that stands for nothing. Leaves the error number as it was.
fn mark_of(descriptor: c_int) -> Option<c_int> {
    fcntl(descriptor, F_GETSIG, 0)
}

/// By its number: a program may have a function of its own under this name. `None` if it is refused; leaves the error number
/// as it was.
#[allow(clippy::cast_possible_truncation)] // what the kernel has as an `int`
fn fcntl(descriptor: c_int, command: c_int, argument: c_int) -> Option<c_int> {
    let before = last_errno();
    // SAFETY: the two commands that are used take numbers, and change no memory.
    let answer = unsafe { libc::syscall(libc::SYS_fcntl, descriptor, command, argument) };
    set_errno(before);
    (answer >= 0).then_some(answer as c_int)
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

    /// The opening, by which those with the addresses `gone` have lost their files.
    fn noted_with(
        devices: &mut OpenDevices,
        device: usize,
        descriptor: c_int,
        gone: &[usize],
    ) -> Opening {
        let noted = devices.note_descriptor(device, descriptor).unwrap();
        assert_eq!(noted.gone, gone);
        noted.opening
    }

    /// The opening, of a device that is the one that it was, or a new one.
    fn noted(devices: &mut OpenDevices, device: usize, descriptor: c_int) -> Opening {
        noted_with(devices, device, descriptor, &[])
    }

    /// Of a device that was known with another file.
    fn noted_anew(devices: &mut OpenDevices, device: usize, descriptor: c_int) -> Opening {
        noted_with(devices, device, descriptor, &[device])
    }

    #[test]
    fn a_file_that_is_opened_anew_is_another() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let first = noted(&mut devices, 7, number);
        assert!(devices.is_open(first));
        assert_eq!(noted(&mut devices, 7, number), first);
        opened_anew(&file);
        assert!(!devices.is_open(first));
        let other = noted_with(&mut devices, 8, number, &[7]);
        assert!(devices.is_open(other) && !devices.is_open(first), "it has another mark");
        let second = noted(&mut devices, 7, number);
        devices.forget(8);
        assert!(devices.is_open(second) && !devices.is_open(other) && !devices.is_open(first));
    }

    /// As one that is imported (`ibv_import_device`).
    #[test]
    fn two_devices_may_have_one_open_file() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let (one, two) = (noted(&mut devices, 7, number), noted(&mut devices, 8, number));
        assert!(one != two && devices.is_open(one) && devices.is_open(two));
        opened_anew(&file);
        let three = noted_with(&mut devices, 9, number, &[7, 8]);
        assert!(devices.is_open(three) && !devices.is_open(one) && !devices.is_open(two));
    }

    /// Each with its own address, because the one before was not closed.
    #[test]
    fn a_number_is_told_from_all_that_it_stood_for() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let mut last = noted(&mut devices, 0, number);
        for device in 1..=4 * MARKS as usize {
            opened_anew(&file);
            assert!(!devices.is_open(last));
            last = noted_with(&mut devices, device, number, &[device - 1]);
            assert!(devices.is_open(last) && devices.open.0.len() == 1);
        }
    }

    /// As long as it looks, however often the device is opened anew meanwhile.
    #[test]
    fn no_file_is_taken_for_one_that_a_thread_looks_for() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let first = noted(&mut devices, 7, number);
        let looked = devices.look();
        assert!(looked.lend(first, &Table::Shared).is_some());
        for _ in 0..4 * MARKS {
            opened_anew(&file);
            noted_anew(&mut devices, 7, number);
            assert!(looked.lend(first, &Table::Shared).is_none());
        }
        devices.end_look();
        let marks = (0..MARKS).map(|_| {
            opened_anew(&file);
            noted_anew(&mut devices, 7, number);
            mark_of(number)
        });
        assert_eq!(marks.filter(|mark| *mark == Some(1)).count(), 1, "it is free again");
    }

    #[test]
    fn the_end_of_the_process_and_the_thread_that_deregisters_look_beside_each_other() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let first = noted(&mut devices, 7, number);
        let looked = devices.look();
        opened_anew(&file);
        let second = noted_anew(&mut devices, 7, number);
        let looked_last = devices.look_last();
        let mut never_finds = |looked: &DeviceList, opening| {
            for _ in 0..2 * MARKS {
                opened_anew(&file);
                noted_anew(&mut devices, 7, number);
                assert!(looked.lend(opening, &Table::Shared).is_none());
            }
            devices.end_look();
        };
        never_finds(&looked, first);
        never_finds(&looked_last, second);
    }

    /// The marks of a number are few, and come again in turns.
    #[test]
    fn no_opening_is_taken_for_an_earlier_one_with_its_number_and_its_mark() {
        let (mut devices, file) = (OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        let mut openings = vec![noted(&mut devices, 7, number)];
        let mut marks = vec![mark_of(number)];
        for _ in 0..MARKS {
            opened_anew(&file);
            let opening = noted_anew(&mut devices, 7, number);
            assert!(devices.is_open(opening));
            for &earlier in &openings {
                assert!(!devices.is_open(earlier));
            }
            openings.push(opening);
            marks.push(mark_of(number));
        }
        let last = marks.pop();
        assert_eq!(last, Some(marks[0]));
        assert!(marks[1..].iter().all(|mark| *mark != marks[0]), "{marks:?}");
    }

    #[test]
    fn what_another_process_has_marked_keeps_its_mark() {
        let (mut parent, mut child, file) =
            (OpenDevices::default(), OpenDevices::default(), opened());
        let number = file.as_raw_fd();
        assert_eq!(is_marked(number), Some(false));
        let (ours, again) = (noted(&mut parent, 7, number), noted(&mut parent, 8, number));
        let theirs = noted(&mut child, 9, number);
        assert!(parent.is_open(ours) && parent.is_open(again) && child.is_open(theirs));
        assert!(parent.has_marked(number) && !child.has_marked(number));
        parent.forget(7);
        assert!(parent.has_marked(number), "by another device with this file");
        opened_anew(&file);
        assert!(is_marked(number) == Some(false) && !parent.has_marked(number));
    }

    /// Closed without `ibv_close_device`, and opened anew with its number.
    #[test]
    fn what_a_child_opens_is_not_taken_for_what_its_parent_had() {
        let (mut parent, mut child, file) =
            (OpenDevices::default(), OpenDevices::default(), opened());
        let ours = noted(&mut parent, 7, file.as_raw_fd());
        child.inherit(&parent);
        for _ in 0..2 * MARKS {
            opened_anew(&file);
            let theirs = child.note_descriptor(7, file.as_raw_fd()).unwrap().opening;
            assert!(child.is_open(theirs) && !parent.is_open(ours));
        }
    }

    /// A thread with a table of its own: it has the device for as long as it is lent, and no other file under its number.
    #[test]
    fn a_thread_with_another_table_borrows_the_file_that_was_noted() {
        let (mut devices, file, other) = (OpenDevices::default(), opened(), opened());
        let stays = noted(&mut devices, 7, file.as_raw_fd());
        let goes = noted(&mut devices, 8, other.as_raw_fd());
        opened_anew(&other);
        // In this process, whose first thread has the table of this one.
        let (number, looked) = (file.as_raw_fd(), devices.look());
        let seen = std::thread::spawn(move || {
            // SAFETY: this thread has no descriptor's value.
            let table = unsafe { Table::of_this_thread(&[]) };
            if matches!(table, Table::Shared) {
                return None;
            }
            let lent = looked.lend(stays, &table).map(|lent| (lent.named, mark_of(lent.number)));
            Some((mark_of(number), lent, looked.lend(goes, &table).is_some()))
        });
        match seen.join().unwrap() {
            None => eprintln!("skipped: pidfd_getfd is refused"),
            Some(seen) => assert_eq!(seen, (None, Some((number, Some(1))), false)),
        }
    }

    #[test]
    fn what_is_not_open_cannot_be_told() {
        let mut devices = OpenDevices::default();
        // SAFETY: a descriptor of this test's, of a number that no other thread gets.
        let high =
            unsafe { OwnedFd::from_raw_fd(libc::fcntl(opened().as_raw_fd(), libc::F_DUPFD, 900)) };
        let opening = noted(&mut devices, 7, high.as_raw_fd());
        drop(high);
        assert!(!devices.is_open(opening));
        assert_eq!(devices.note_descriptor(7, -1), None);
    }
}
