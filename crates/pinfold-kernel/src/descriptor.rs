//! Descriptors by their numbers: files, their identity, the table that they are in.
//!
//! # Safety
//!
//! The unsafe code of this file is there to name descriptors by numbers that this process does not own: the
//! program may close any descriptor, and reuse its number. No memory depends on what a number stands for, and a
//! number of the wrong kind or of none gives an error. What is read is read from a descriptor that the caller owns or was
//! lent: a number could be a monitor's, which would miss what is read.

use crate::errno::{Errno, checked, done, last_errno};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, MemfdFlags, Mode, OFlags, PROC_SUPER_MAGIC,
};
use std::ffi::CStr;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

/// A descriptor number. Not owned: the program may close any descriptor behind our back, and then
/// closing the number again would close a file of another's.
pub type Descriptor = RawFd;

/// A number for one call. `EBADF` for a negative one.
pub(crate) fn named<'call>(descriptor: Descriptor) -> Result<BorrowedFd<'call>, Errno> {
    if descriptor < 0 {
        return Err(Errno(libc::EBADF));
    }
    // SAFETY: not -1. That it stays open is not promised; the kernel looks the number up for each call.
    Ok(unsafe { BorrowedFd::borrow_raw(descriptor) })
}

/// Opens `path` for reading. `flags` are of `fcntl.h`, `O_DIRECTORY` for instance.
pub fn open(path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    open_in(rustix::fs::CWD, path, flags)
}

/// As [`open`], of a path within `directory`.
pub fn open_in(
    directory: BorrowedFd<'_>,
    path: &CStr,
    flags: libc::c_int,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::from_bits_retain(flags.cast_unsigned()) | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(directory, path, flags, Mode::empty())?)
}

/// As [`open`], of what the kernel makes up. `ENOENT` where an ordinary file or directory has the name, as in a root that
/// was copied.
pub fn open_of_proc(path: &CStr, flags: libc::c_int) -> Result<OwnedFd, Errno> {
    let opened = open(path, flags)?;
    let is_of_proc = rustix::fs::fstatfs(&opened)?.f_type == PROC_SUPER_MAGIC;
    if is_of_proc { Ok(opened) } else { Err(Errno(libc::ENOENT)) }
}

/// Closes a number. A failure leaves nothing to do: Linux frees the number in any case.
///
/// # Safety
///
/// The caller opened what it stands for, and no value owns it.
pub unsafe fn close(descriptor: Descriptor) {
    if descriptor >= 0 {
        // SAFETY: not -1; the caller's responsibility.
        unsafe { rustix::io::close(descriptor) };
    }
}

/// Reads up to `buffer.len()` bytes; 0 at the end.
pub fn read(file: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    Ok(rustix::io::read(file, buffer)?)
}

/// As [`read`], from the byte `offset` on.
pub fn read_at(file: BorrowedFd<'_>, buffer: &mut [u8], offset: usize) -> Result<usize, Errno> {
    Ok(rustix::io::pread(file, buffer, offset as u64)?)
}

/// The text of a symbolic link, cut at the buffer's end.
pub fn read_link<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    read_link_in(rustix::fs::CWD, path, buffer)
}

/// As [`read_link`], of a path within `directory`.
pub fn read_link_in<'a>(
    directory: BorrowedFd<'_>,
    path: &CStr,
    buffer: &'a mut [u8],
) -> Result<&'a [u8], Errno> {
    let length = rustix::fs::readlinkat_raw(directory, path, &mut *buffer)?;
    Ok(buffer.get(..length).unwrap_or_default())
}

/// Reads entries of an open directory as `struct linux_dirent64` records; 0 at the end.
pub fn read_directory(directory: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes at most the buffer's length.
    checked(unsafe {
        libc::syscall(
            libc::SYS_getdents64,
            directory.as_raw_fd(),
            buffer.as_mut_ptr(),
            buffer.len(),
        )
    })
}

/// Calls `visit` with each name in `directory` that is a number: of threads, of descriptors. Allocates nothing.
///
/// # Errors
///
/// The kernel's; some may have been visited by then.
pub fn each_number(directory: BorrowedFd<'_>, visit: &mut dyn FnMut(u32)) -> Result<(), Errno> {
    let mut buffer = [0; 4096];
    loop {
        let got = read_directory(directory, &mut buffer)?;
        let mut records = buffer.get(..got).unwrap_or_default();
        if records.is_empty() {
            return Ok(());
        }
        while let Some((name, rest)) = first_record(records) {
            let number = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
            number.into_iter().for_each(&mut *visit);
            records = rest;
        }
    }
}

/// Cuts one `struct linux_dirent64` off: inode 8 bytes, offset 8, length 2, type 1, then the name.
fn first_record(records: &[u8]) -> Option<(&[u8], &[u8])> {
    const NAME: usize = 19;
    let length = u16::from_ne_bytes([*records.get(16)?, *records.get(17)?]).into();
    let (record, rest) = (records.get(NAME..length)?, records.get(length..)?);
    Some((record.split(|&byte| byte == 0).next()?, rest))
}

/// What tells one open file from another: device and inode. Linux gives every userfaultfd an
/// inode of its own (since 5.12), and every ring of io_uring (since 5.16).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// The file system that the file is in: the number of its device.
    #[must_use]
    pub fn file_system(self) -> u64 {
        self.device
    }
}

/// The identity of what the number stands for now.
pub fn identity(descriptor: Descriptor) -> Result<Identity, Errno> {
    Ok(identity_of(&rustix::fs::fstat(named(descriptor)?)?))
}

/// The identity of the file at `path` within `directory`, behind all links.
pub fn identity_in(directory: BorrowedFd<'_>, path: &CStr) -> Result<Identity, Errno> {
    Ok(identity_of(&rustix::fs::statat(directory, path, AtFlags::empty())?))
}

fn identity_of(status: &rustix::fs::Stat) -> Identity {
    #[allow(clippy::useless_conversion)] // the fields' types differ between architectures
    Identity { device: status.st_dev.into(), inode: status.st_ino.into() }
}

/// What a regular file is besides its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegularFile {
    /// The user that has it.
    pub owner: u32,
    /// How many names it has in directories.
    pub names: u64,
}

/// `None` if `file` is something else.
pub fn regular_file(file: BorrowedFd<'_>) -> Result<Option<RegularFile>, Errno> {
    let status = rustix::fs::fstat(file)?;
    let is_regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    #[allow(clippy::useless_conversion)] // the fields' types differ between architectures
    let found = RegularFile { owner: status.st_uid, names: status.st_nlink.into() };
    Ok(is_regular.then_some(found))
}

/// A second number for `file`, at least `lowest`, closed on `exec`.
pub fn duplicate_above(file: BorrowedFd<'_>, lowest: Descriptor) -> Result<OwnedFd, Errno> {
    Ok(rustix::io::fcntl_dupfd_cloexec(file, lowest)?)
}

/// A second descriptor of the same open file, above the standard ones and closed on `exec`.
///
/// A number that stands for no open file is refused by the kernel (`EBADF`).
///
/// # Safety
///
/// What the number stands for is the caller's, or was lent to it: the result can be read from, and a monitor misses
/// what another reads from its userfaultfd.
pub unsafe fn duplicate(descriptor: Descriptor) -> Result<OwnedFd, Errno> {
    const ABOVE_STANDARD: Descriptor = 3;
    Ok(rustix::io::fcntl_dupfd_cloexec(named(descriptor)?, ABOVE_STANDARD)?)
}

/// A file in memory without a name in any directory; `name` is for `/proc` only.
pub fn memory_file(name: &CStr) -> Result<OwnedFd, Errno> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?)
}

/// Makes a file `bytes` long, with room for all of them.
pub fn allocate(file: BorrowedFd<'_>, bytes: usize) -> Result<(), Errno> {
    Ok(rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes as u64)?)
}

/// Fills the first `bytes` bytes of a file with zeros, and leaves it as long as it is. Not every file system can.
pub fn zero(file: BorrowedFd<'_>, bytes: usize) -> Result<(), Errno> {
    let how = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, how, 0, bytes as u64)?)
}

/// Locks an open file for this process (`flock`), unless another one has: `EWOULDBLOCK`.
pub fn lock(file: BorrowedFd<'_>) -> Result<(), Errno> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Gives the calling thread a table of descriptors of its own with nothing in it but `kept`, under their numbers, and
/// what the program would notice the closing of.
///
/// # Errors
///
/// `ENOSYS` before Linux 5.9, `EPERM` and the like by filters of system calls: the table is shared as before.
///
/// # Safety
///
/// From now on this thread, and those that it starts, use and drop no value that owns or borrows another descriptor
/// than these, and no value of what is kept is dropped by another thread as well as here: the numbers mean
/// nothing in the new table, or something else.
pub unsafe fn keep_only(kept: &[Descriptor]) -> Result<(), Errno> {
    // The kernel copies the table up to a multiple of this, and closes at once what lies between.
    const COPIED: Descriptor = 64;
    let highest = kept.iter().copied().max().unwrap_or(0).max(0);
    let end = (highest / COPIED + 1).saturating_mul(COPIED);
    // Makes the table; what lies above is not even copied.
    close_range(end.cast_unsigned(), u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    // SAFETY: copies in this thread's table, which no value owns.
    if unsafe { close_listed(kept) }.is_err() {
        for number in (0..end).filter(|number| is_open(*number)) {
            // SAFETY: as above.
            unsafe { close_unless_kept(number, kept) };
        }
    }
    Ok(())
}

/// Closes what the kernel lists of the calling thread's table, where that can be read: a few calls instead of one for each
/// number that there may be.
///
/// # Safety
///
/// As for [`close_unless_kept`], of each number of this thread's.
unsafe fn close_listed(kept: &[Descriptor]) -> Result<(), Errno> {
    let directory = open_of_proc(c"/proc/thread-self/fd", libc::O_DIRECTORY)?;
    let listed = each_number(directory.as_fd(), &mut |number| {
        let number = number.cast_signed();
        if number != directory.as_raw_fd() {
            // SAFETY: the caller's promise.
            unsafe { close_unless_kept(number, kept) };
        }
    });
    // SAFETY: this function's own. Not by the C library's `close`: a program may have a function of that name.
    unsafe { close(directory.into_raw_fd()) };
    listed
}

/// # Safety
///
/// As for [`close`].
unsafe fn close_unless_kept(number: Descriptor, kept: &[Descriptor]) {
    if !kept.contains(&number) && !has_flush_by_process(number) {
        // SAFETY: the caller's promise.
        unsafe { close(number) };
    }
}

/// Whether the number stands for something.
pub fn is_open(number: Descriptor) -> bool {
    named(number).is_ok_and(|number| rustix::io::fcntl_getfd(number).is_ok())
}

/// Whether the file ends something of the whole process whenever a thread of the process closes a number of it, though
/// others stay open: a message queue its notification (`mq_notify`), XPMEM what the process shares. Files of other
/// kinds end what belongs to the table (locks), wait for what was written, or do nothing.
fn has_flush_by_process(number: Descriptor) -> bool {
    is_message_queue(number) || is_xpmem(number)
}

/// Asked of the file's kind itself: a question to its file system may wait for a server.
fn is_message_queue(number: Descriptor) -> bool {
    let mut attributes = MaybeUninit::<libc::mq_attr>::uninit();
    let none = ptr::null::<libc::mq_attr>();
    // SAFETY: the kernel changes nothing, and writes one `mq_attr` if it is a queue.
    unsafe { libc::syscall(libc::SYS_mq_getsetattr, number, none, attributes.as_mut_ptr()) == 0 }
}

fn is_xpmem(number: Descriptor) -> bool {
    let (mut path, mut link) = ([0; 48], [0; 16]);
    let _ = write!(path.as_mut_slice(), "/proc/thread-self/fd/{number}");
    let path = CStr::from_bytes_until_nul(&path).unwrap_or_default();
    read_link(path, &mut link).is_ok_and(|link| link == b"/dev/xpmem")
}

fn close_range(first: u32, last: u32, flags: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: closing numbers cannot break memory safety; see `close`.
    done(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) })
}

/// Whether two processes have one table of descriptors; false where the kernel does not tell.
pub fn share_descriptors(one: u32, other: u32) -> bool {
    const FILES: libc::c_int = 2; // `KCMP_FILES` of `linux/kcmp.h`
    // SAFETY: the call takes numbers and changes nothing.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, FILES, 0, 0) == 0 }
}

/// Waits until `descriptor` has something to read, or for `timeout_ms` (-1: for ever). False if
/// the number is not open any more.
pub fn wait_readable(descriptor: Descriptor, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    let answered = poll_one(&mut poll, timeout_ms);
    if !answered && last_errno() != Errno(libc::EINTR) {
        // RLIMIT_NOFILE is zero now, and poll refuses to look at any descriptor; or a filter of
        // system calls refuses poll. The caller looks again in a millisecond instead of at once for
        // ever.
        crate::thread::sleep(Duration::from_millis(1));
    }
    poll.revents & libc::POLLNVAL == 0
}

/// As `poll`, by its number: a program may have a function of its own under that name, which the dynamic linker would
/// find. `ppoll` would be one call more for filters of system calls to allow.
#[cfg(target_arch = "x86_64")]
pub(crate) fn poll_one(poll: &mut libc::pollfd, timeout_ms: i32) -> bool {
    // SAFETY: the kernel reads and writes one `pollfd`.
    unsafe { libc::syscall(libc::SYS_poll, ptr::from_mut(poll), 1, timeout_ms) >= 0 }
}

/// Where the kernel has no `poll`, this is what the C library calls.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn poll_one(poll: &mut libc::pollfd, timeout_ms: i32) -> bool {
    let time = u64::try_from(timeout_ms).ok().map(|milliseconds| libc::timespec {
        tv_sec: (milliseconds / 1000).cast_signed(),
        tv_nsec: (milliseconds % 1000 * 1_000_000).cast_signed(),
    });
    let (time, no_mask) = (time.as_ref().map_or(ptr::null(), ptr::from_ref), ptr::null::<u8>());
    // SAFETY: the kernel reads and writes one `pollfd`, and reads one `timespec`.
    unsafe { libc::syscall(libc::SYS_ppoll, ptr::from_mut(poll), 1, time, no_mask, 8) >= 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_descriptor_is_an_error() {
        assert_eq!(identity(-1), Err(Errno(libc::EBADF)));
        assert_eq!(identity(1 << 20), Err(Errno(libc::EBADF)));
        // SAFETY: it stands for nothing.
        assert!(unsafe { duplicate(1 << 20) }.is_err() && !wait_readable(1 << 20, 0));
    }

    /// Also where it has no size, or as many links.
    #[test]
    fn what_has_the_name_of_procs_is_not_procs() {
        assert!(open_of_proc(c"/proc/self/task", libc::O_DIRECTORY).is_ok());
        assert!(open_of_proc(c"/proc/self/maps", 0).is_ok());
        let refused = [c"/", c"/dev/null", c"/sys"].map(|path| open_of_proc(path, 0).err());
        assert!(refused.iter().all(|errno| *errno == Some(Errno(libc::ENOENT))), "{refused:?}");
    }

    #[test]
    fn a_second_number_stands_for_the_same_file() {
        let null = open(c"/dev/null", 0).unwrap();
        // SAFETY: it is owned here.
        let second = unsafe { duplicate(null.as_raw_fd()) }.unwrap();
        assert!(second.as_raw_fd() > 2);
        assert_eq!(identity(second.as_raw_fd()), identity(null.as_raw_fd()));
        drop(null);
        assert_eq!(read(second.as_fd(), &mut [0; 4]), Ok(0));
    }

    #[test]
    fn the_numbers_of_a_directory_are_the_names_that_are_numbers() {
        let directory = open(c"/proc/self/fd", libc::O_DIRECTORY).unwrap();
        let mut numbers = Vec::new();
        each_number(directory.as_fd(), &mut |number| numbers.push(number)).unwrap();
        assert!(numbers.contains(&directory.as_raw_fd().cast_unsigned()), "{numbers:?}");
        let null = open(c"/dev/null", 0).unwrap();
        assert!(each_number(null.as_fd(), &mut |_| ()).is_err());
    }

    /// Which of three files are open in a table that keeps the last and the first; `prepare` runs on its thread before.
    fn kept_of_three(prepare: impl FnOnce() + Send + 'static) -> Option<[bool; 3]> {
        let files = [(); 3].map(|()| open(c"/dev/zero", 0).unwrap());
        let is_open = |number| identity(number).is_ok();
        let within = files.each_ref().map(AsRawFd::as_raw_fd);
        let seen = std::thread::spawn(move || {
            prepare();
            // SAFETY: this thread has no descriptor's value, and looks numbers up only.
            unsafe { keep_only(&[within[2], within[0]]) }.map(|()| within.map(is_open))
        });
        let seen = seen.join().unwrap();
        assert!(files.iter().map(AsRawFd::as_raw_fd).all(is_open));
        seen.inspect_err(|Errno(errno)| eprintln!("skipped: close_range is refused ({errno})")).ok()
    }

    #[test]
    fn a_thread_keeps_what_it_names_and_others_keep_all() {
        if let Some(open) = kept_of_three(|| ()) {
            assert_eq!(open, [true, false, true]);
        }
    }

    /// In a root that was copied, `/proc` too.
    #[test]
    fn a_thread_keeps_no_more_where_a_directory_lists_none() {
        let root = std::env::temp_dir().join(format!("pinfold-root-{}", std::process::id()));
        std::fs::create_dir_all(root.join("proc/thread-self/fd")).unwrap();
        let copied = root.clone();
        let (tell, may) = std::sync::mpsc::channel();
        let seen = kept_of_three(move || {
            // SAFETY: no pointer; from here on the thread's directories are its own.
            let is_own = unsafe { libc::unshare(libc::CLONE_FS) } == 0;
            tell.send(is_own && std::os::unix::fs::chroot(copied).is_ok()).unwrap();
        });
        std::fs::remove_dir_all(root).unwrap();
        if !may.recv().unwrap() {
            return eprintln!("skipped: only root can have another root directory");
        }
        if let Some(open) = seen {
            assert_eq!(open, [true, false, true]);
        }
    }
}
