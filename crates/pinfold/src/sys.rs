//! The seam to the kernel: every raw system call of the mapping table and of the monitors.
//!
//! Each function is one call, its error the kernel's number. Nothing here allocates, takes a lock
//! or touches `errno` beyond reading it, so the monitor's reader may use all of it.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a system call is a foreign function. Every function
//! here is safe to call with any argument: pointers come from references, lengths from slices,
//! and a descriptor that is not what it should be gives an error, not undefined behaviour.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem::size_of;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// The kernel's error number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        Self::from_raw_os_error(errno.0)
    }
}

/// A descriptor number. Not owned: the program may close any descriptor behind our back, and then
/// closing the number again would close somebody else's file.
pub(crate) type Descriptor = libc::c_int;

pub(crate) fn last_errno() -> Errno {
    // SAFETY: the C library gives every thread its own errno, alive as long as the thread.
    Errno(unsafe { *libc::__errno_location() })
}

/// A system call's result, where -1 means that `errno` tells why.
fn checked(result: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

/// Opens `path` for reading.
pub(crate) fn open(path: &CStr, flags: libc::c_int) -> Result<Descriptor, Errno> {
    // SAFETY: the path ends with a zero byte and outlives the call.
    let opened = unsafe { libc::open(path.as_ptr(), flags | libc::O_RDONLY | libc::O_CLOEXEC) };
    if opened < 0 { Err(last_errno()) } else { Ok(opened) }
}

/// Closes a descriptor that the caller opened.
pub(crate) fn close(descriptor: Descriptor) {
    // SAFETY: closing a number cannot break memory safety here: no file is memory of this crate.
    // A failure leaves nothing to do: Linux frees the number in any case.
    unsafe { libc::close(descriptor) };
}

/// Reads up to `buffer.len()` bytes; 0 at the end.
pub(crate) fn read(descriptor: Descriptor, buffer: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes at most the buffer's length into it.
    let got = unsafe { libc::read(descriptor, buffer.as_mut_ptr().cast(), buffer.len()) };
    checked(got as libc::c_long)
}

/// As [`read`], from the byte `offset` on.
pub(crate) fn read_at(
    descriptor: Descriptor,
    buffer: &mut [u8],
    offset: usize,
) -> Result<usize, Errno> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the kernel writes at most the buffer's length into it.
    let got = unsafe { libc::pread(descriptor, buffer.as_mut_ptr().cast(), buffer.len(), offset) };
    checked(got as libc::c_long)
}

// --- the table of mappings ---------------------------------------------------------------------

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11), our own declaration of its fields.
#[repr(C)]
#[derive(Default)]
pub(crate) struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    pub(crate) vma_start: u64,
    pub(crate) vma_end: u64,
    pub(crate) vma_flags: u64,
    pub(crate) vma_page_size: u64,
    vma_offset: u64,
    pub(crate) inode: u64,
    pub(crate) dev_major: u32,
    pub(crate) dev_minor: u32,
    /// In: the room for the name. Out: its length with the final zero byte, 0 if there is none.
    pub(crate) vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

impl ProcmapQuery {
    pub(crate) const READABLE: u64 = 0x01;
    pub(crate) const WRITABLE: u64 = 0x02;
    pub(crate) const SHARED: u64 = 0x08;
}

/// "The mapping that covers the address, or else the next one."
const PROCMAP_COVERING_OR_NEXT: u64 = 0x10;
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = request(b'f', 17, size_of::<ProcmapQuery>());

/// `_IOWR(kind, number, argument)` as every architecture we run on encodes it, except the MIPS,
/// PowerPC and SPARC families, which Pinfold does not build for.
pub(crate) const fn request(kind: u8, number: u8, argument_bytes: usize) -> libc::c_ulong {
    let both_ways = 3 << 30;
    both_ways
        | (argument_bytes as libc::c_ulong) << 16
        | (kind as libc::c_ulong) << 8
        | number as libc::c_ulong
}

/// Asks an open `/proc/PID/maps` for the mapping that covers `address` or the next one above it;
/// its name, if any, goes to `name`. `ENOENT` when there is none, `ENOTTY` before Linux 6.11,
/// `ENAMETOOLONG` when `name` is too short.
pub(crate) fn procmap_query(
    maps: Descriptor,
    address: usize,
    name: &mut [u8],
) -> Result<ProcmapQuery, Errno> {
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_flags: PROCMAP_COVERING_OR_NEXT,
        query_addr: address as u64,
        vma_name_size: u32::try_from(name.len()).unwrap_or(u32::MAX),
        vma_name_addr: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel writes into `query`, whose size it is told, and at most `vma_name_size`
    // bytes into `name`; both are borrowed exclusively for the call.
    let answer = unsafe { libc::ioctl(maps, PROCMAP_QUERY as _, &raw mut query) };
    if answer < 0 { Err(last_errno()) } else { Ok(query) }
}

// --- pages of our own --------------------------------------------------------------------------

/// The bytes of a page, a power of two.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf has no precondition.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// One private anonymous page that belongs to us alone and is only ever read as atomic words.
///
/// Several of its methods change the mapping on purpose: they are how a monitor tests itself.
#[derive(Debug)]
pub(crate) struct Page {
    start: *mut AtomicU64,
    bytes: usize,
}

// SAFETY: a page is a number of atomic words; nothing about it belongs to one thread.
unsafe impl Send for Page {}
// SAFETY: as above; `&Page` gives out nothing but `&AtomicU64` and changes that keep it mapped.
unsafe impl Sync for Page {}

impl Page {
    const RIGHTS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
    const KIND: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

    /// Maps a page of zeros.
    pub(crate) fn new() -> Result<Self, Errno> {
        let bytes = page_bytes();
        // SAFETY: without MAP_FIXED the kernel picks addresses that nothing else uses.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, Self::RIGHTS, Self::KIND, -1, 0) };
        Self::mapped(start, bytes)
    }

    fn mapped(start: *mut libc::c_void, bytes: usize) -> Result<Self, Errno> {
        if start == libc::MAP_FAILED {
            Err(last_errno())
        } else {
            Ok(Self { start: start.cast(), bytes })
        }
    }

    pub(crate) fn address(&self) -> usize {
        self.start.addr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The page's first word.
    pub(crate) fn word(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped readable and writable, aligned and zero-filled for as long as
        // `self` lives, and is accessed through this reference alone. The kernel may set it to
        // zero behind our back (in a forked child, on `discard`); an atomic read bears that.
        unsafe { &*self.start }
    }

    /// From now on a forked child finds zeros here.
    pub(crate) fn wipe_on_fork(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_WIPEONFORK)
    }

    /// Drops the contents: they read as zero again.
    pub(crate) fn discard(&self) -> Result<(), Errno> {
        self.advise(libc::MADV_DONTNEED)
    }

    fn advise(&self, advice: libc::c_int) -> Result<(), Errno> {
        // SAFETY: the page is ours; both advices in use keep it mapped and at most zero it.
        let done = unsafe { libc::madvise(self.start.cast(), self.bytes, advice) };
        checked(done.into()).map(drop)
    }

    /// Maps a fresh page over this one.
    pub(crate) fn replace(&self) -> Result<(), Errno> {
        let kind = Self::KIND | libc::MAP_FIXED;
        // SAFETY: the page is ours and stays mapped: the kernel swaps it in one step.
        let start = unsafe { libc::mmap(self.start.cast(), self.bytes, Self::RIGHTS, kind, -1, 0) };
        if start == libc::MAP_FAILED { Err(last_errno()) } else { Ok(()) }
    }

    /// Moves the contents to a new page and leaves this one empty.
    pub(crate) fn move_contents(&self) -> Result<Self, Errno> {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        let bytes = self.bytes;
        // The kernel's own call: libraries that patch the C library's (UCX) lose its last argument.
        // SAFETY: the page is ours and MREMAP_DONTUNMAP keeps it mapped; the kernel picks unused
        // addresses for the new one.
        let start = unsafe { libc::syscall(libc::SYS_mremap, self.start, bytes, bytes, how, 0) };
        Self::mapped(
            std::ptr::with_exposed_provenance_mut(
                isize::try_from(start).unwrap_or(-1).cast_unsigned(),
            ),
            bytes,
        )
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the page is ours and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

// --- userfaultfd -------------------------------------------------------------------------------

/// The features of `linux/userfaultfd.h` that the monitor asks for.
pub(crate) mod feature {
    pub(crate) const WRITE_PROTECT: u64 = 1 << 0;
    pub(crate) const EVENT_REMAP: u64 = 1 << 2;
    pub(crate) const EVENT_REMOVE: u64 = 1 << 3;
    pub(crate) const EVENT_UNMAP: u64 = 1 << 6;
}

/// `struct uffd_msg`: what one read of a userfaultfd gives.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Message {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

/// A [`Message`] of a kind that the monitor asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Unmap {
        start: usize,
        end: usize,
    },
    Remap {
        from: usize,
        to: usize,
        length: usize,
    },
    Remove {
        start: usize,
        end: usize,
    },
    /// Of a kind that was not asked for.
    Other,
}

impl Message {
    pub(crate) fn event(&self) -> Event {
        let [first, second, third] =
            self.arguments.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
        match self.event {
            0x14 => Event::Remap { from: first, to: second, length: third },
            0x15 => Event::Remove { start: first, end: second },
            0x16 => Event::Unmap { start: first, end: second },
            _ => Event::Other,
        }
    }
}

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    start: u64,
    len: u64,
    mode: u64,
}

const UFFDIO_API: libc::c_ulong = request(0xaa, 0x3f, size_of::<UffdioApi>());
const UFFDIO_REGISTER: libc::c_ulong = request(0xaa, 0x00, size_of::<UffdioRegister>());
/// `_IOR`, unlike the others.
const UFFDIO_UNREGISTER: libc::c_ulong = request(0xaa, 0x01, size_of::<UffdioRange>()) & !(1 << 30);
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(0xaa, 0x06, size_of::<UffdioWriteprotect>());

/// Opens a userfaultfd that handles no fault of the kernel, which needs no privilege.
pub(crate) fn userfaultfd() -> Result<Descriptor, Errno> {
    const USER_MODE_ONLY: libc::c_int = 1;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call takes flags and gives a descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if opened < 0 { Err(last_errno()) } else { Ok(Descriptor::try_from(opened).unwrap_or(-1)) }
}

/// Agrees on `features` and gives those that the kernel has. Can be done once per descriptor.
pub(crate) fn uffd_api(uffd: Descriptor, features: u64) -> Result<u64, Errno> {
    let mut api = UffdioApi { api: 0xaa, features, ioctls: 0 };
    // SAFETY: the kernel reads and writes `api`, whose size is in the request's number.
    let done = unsafe { libc::ioctl(uffd, UFFDIO_API as _, &raw mut api) };
    checked(done.into()).map(|_| api.features)
}

/// Has the changes of every mapping between `start` and `end` (whole pages) reported.
pub(crate) fn uffd_register(uffd: Descriptor, start: usize, end: usize) -> Result<(), Errno> {
    const WRITE_PROTECT: u64 = 1 << 1;
    let len = end.saturating_sub(start) as u64;
    let mut register = UffdioRegister { start: start as u64, len, mode: WRITE_PROTECT, ioctls: 0 };
    // SAFETY: the kernel reads and writes `register`. Nothing is ever write-protected, so the
    // registered memory itself behaves as before.
    let done = unsafe { libc::ioctl(uffd, UFFDIO_REGISTER as _, &raw mut register) };
    checked(done.into()).map(drop)
}

/// Ends [`uffd_register`].
pub(crate) fn uffd_unregister(uffd: Descriptor, start: usize, end: usize) -> Result<(), Errno> {
    let range = UffdioRange { start: start as u64, len: end.saturating_sub(start) as u64 };
    // SAFETY: the kernel reads `range`.
    let done = unsafe { libc::ioctl(uffd, UFFDIO_UNREGISTER as _, &raw const range) };
    checked(done.into()).map(drop)
}

/// Whether some change that `uffd` reports is under way: its event not yet read, or its system
/// call not yet on its way back from the wait for that.
///
/// The write-protect request begins with this question in every kernel that has it, before it
/// looks at its argument; an empty range then ends it with `EINVAL` before any lock is taken. An
/// argument at a bad address would do as well, but a fault costs a microsecond; a real range
/// takes the lock of all mappings.
///
/// # Errors
///
/// The kernel's error when `uffd` is not a userfaultfd (any more).
pub(crate) fn uffd_changing(uffd: Descriptor) -> Result<bool, Errno> {
    static NOTHING: UffdioWriteprotect = UffdioWriteprotect { start: 0, len: 0, mode: 0 };
    // SAFETY: the kernel reads `NOTHING`.
    let done = unsafe { libc::ioctl(uffd, UFFDIO_WRITEPROTECT as _, &raw const NOTHING) };
    match last_errno() {
        Errno(libc::EINVAL) if done < 0 => Ok(false),
        Errno(libc::EAGAIN) if done < 0 => Ok(true),
        errno if done < 0 => Err(errno),
        _ => Err(Errno(libc::EBADF)),
    }
}

/// Whether the page at `start` belongs to a mapping that some userfaultfd watches for
/// write-protection. `EAGAIN` while a change that `uffd` reports is under way.
///
/// Takes write-protection from a page that never had any.
pub(crate) fn uffd_watches(uffd: Descriptor, start: usize) -> Result<bool, Errno> {
    let request = UffdioWriteprotect { start: start as u64, len: page_bytes() as u64, mode: 0 };
    // SAFETY: the kernel reads `request`. Nothing is ever write-protected, so nothing changes.
    let done = unsafe { libc::ioctl(uffd, UFFDIO_WRITEPROTECT as _, &raw const request) };
    match checked(done.into()) {
        Ok(_) => Ok(true),
        Err(Errno(libc::ENOENT)) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Reads as many events as there are and fit; the threads that caused them go on.
pub(crate) fn uffd_read(uffd: Descriptor, messages: &mut [Message]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes whole messages, at most the slice's length in bytes, and every
    // bit pattern is a `Message`.
    let got =
        unsafe { libc::read(uffd, messages.as_mut_ptr().cast(), std::mem::size_of_val(messages)) };
    checked(got as libc::c_long).map(|bytes| bytes / size_of::<Message>())
}

/// Waits until `descriptor` has something to read, or for `timeout_ms` (-1: for ever). False if
/// the number is not open any more.
pub(crate) fn wait_readable(descriptor: Descriptor, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`.
    let answered = unsafe { libc::poll(&raw mut poll, 1, timeout_ms) } >= 0;
    if !answered && last_errno() != Errno(libc::EINTR) {
        // RLIMIT_NOFILE is zero now, and poll refuses to look at any descriptor; or a filter of
        // system calls refuses poll. The caller looks again in a millisecond instead of at once for
        // ever.
        sleep(Duration::from_millis(1));
    }
    poll.revents & libc::POLLNVAL == 0
}

// --- sockets -----------------------------------------------------------------------------------

/// The calling process's effective user.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether the other side of a connection is still there.
pub(crate) fn is_connected(connection: Descriptor) -> bool {
    let mut poll = libc::pollfd { fd: connection, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the kernel reads and writes one `pollfd`.
    let answered = unsafe { libc::poll(&raw mut poll, 1, 0) } >= 0;
    answered && poll.revents == 0
}

/// Sends one packet, or nothing; waits for nobody.
pub(crate) fn send(connection: Descriptor, packet: &[u8]) -> Result<usize, Errno> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the kernel reads the packet.
    let sent = unsafe { libc::send(connection, packet.as_ptr().cast(), packet.len(), flags) };
    checked(sent as libc::c_long)
}

// --- descriptors -------------------------------------------------------------------------------

/// What tells one open file from another: device and inode. Linux gives every userfaultfd an
/// inode of its own (since 5.12).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

pub(crate) fn identity(descriptor: Descriptor) -> Result<Identity, Errno> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills the structure when it returns 0, and only then is it read.
    unsafe {
        if libc::fstat(descriptor, status.as_mut_ptr()) < 0 {
            return Err(last_errno());
        }
        let status = status.assume_init();
        #[allow(clippy::useless_conversion)] // the fields' types differ between architectures
        Ok(Identity { device: status.st_dev.into(), inode: status.st_ino.into() })
    }
}

/// A second number for `descriptor`, at least `lowest`.
pub(crate) fn duplicate_above(
    descriptor: Descriptor,
    lowest: libc::c_int,
) -> Result<Descriptor, Errno> {
    // SAFETY: the call takes and gives numbers.
    let number = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, lowest) };
    if number < 0 { Err(last_errno()) } else { Ok(number) }
}

/// Gives the calling thread a table of descriptors of its own with nothing in it but `kept`.
///
/// # Errors
///
/// `ENOSYS` before Linux 5.9; the table is shared as before.
pub(crate) fn keep_only_for_this_thread(kept: Descriptor) -> Result<(), Errno> {
    let kept = kept.unsigned_abs();
    // What lies above is not even copied, what lies below is.
    close_range(kept.saturating_add(1), u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
    if kept == 0 { Ok(()) } else { close_range(0, kept - 1, 0) }
}

fn close_range(first: u32, last: u32, flags: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: closing numbers cannot break memory safety; see `close`.
    checked(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) }).map(drop)
}

/// Whether two processes have one table of descriptors; false where the kernel does not tell.
pub(crate) fn share_descriptors(one: u32, other: u32) -> bool {
    const FILES: libc::c_int = 2; // `KCMP_FILES` of `linux/kcmp.h`
    // SAFETY: the call takes numbers and changes nothing.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, FILES, 0, 0) == 0 }
}

// --- threads -----------------------------------------------------------------------------------

/// The calling thread's number.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: the call has no argument and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(id).unwrap_or(0)
}

/// The text of a symbolic link, cut at the buffer's end.
pub(crate) fn read_link<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    // SAFETY: the path ends with a zero byte; the kernel writes at most the buffer's length.
    let got = unsafe { libc::readlink(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let length = checked(got as libc::c_long)?;
    Ok(buffer.get(..length).unwrap_or_default())
}

/// Reads entries of an open directory as `struct linux_dirent64` records; 0 at the end.
pub(crate) fn read_directory(directory: Descriptor, buffer: &mut [u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel writes at most the buffer's length.
    checked(unsafe {
        libc::syscall(libc::SYS_getdents64, directory, buffer.as_mut_ptr(), buffer.len())
    })
}

/// Has the calling thread run before all threads that the process may start: in real time, with the
/// highest priority that it may ask for. False if it may ask for none.
///
/// Threads and processes that this one starts do not inherit it.
pub(crate) fn run_before_all() -> bool {
    // SAFETY: the call takes and gives numbers.
    let highest = unsafe { libc::sched_get_priority_max(libc::SCHED_FIFO) };
    run_in_real_time(highest) || most_real_time_priority().is_some_and(run_in_real_time)
}

fn run_in_real_time(priority: libc::c_int) -> bool {
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the parameters.
    priority > 0 && unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// What `RLIMIT_RTPRIO` leaves to a process without privilege.
fn most_real_time_priority() -> Option<libc::c_int> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the structure.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_RTPRIO, &raw mut limit) } == 0;
    libc::c_int::try_from(limit.rlim_cur).ok().filter(|_| asked)
}

/// Lets another thread run.
pub(crate) fn yield_now() {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::sched_yield() };
}

/// Sleeps without touching anything but the clock.
pub(crate) fn sleep(duration: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    };
    // SAFETY: the kernel reads `time`.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}

/// Sleeps until [`futex_wake`], unless `word` is no longer `expected`. May wake without reason.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads the word, which outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, forever) };
}

/// As [`futex_wait`], for two words: until one of the two is woken, unless one is no longer what is
/// expected. A kernel that cannot wait for two (before 5.16) or must not (seccomp) sleeps on the
/// first for 10 ms at most.
pub(crate) fn futex_wait_either(words: [&AtomicU32; 2], expected: [u32; 2]) {
    const SIZE_U32: u32 = 2;
    let waiter = |place: usize| FutexWaiter {
        expected: u64::from(expected[place]),
        address: words[place].as_ptr().expose_provenance() as u64,
        flags: SIZE_U32 | libc::FUTEX_PRIVATE_FLAG.cast_unsigned(),
        reserved: 0,
    };
    let waiters = [waiter(0), waiter(1)];
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads the two waiters and their words, which outlive the call.
    let woken =
        unsafe { libc::syscall(libc::SYS_futex_waitv, waiters.as_ptr(), 2_u32, 0_u32, forever, 0) };
    let passing = [Errno(libc::EAGAIN), Errno(libc::EINTR)];
    if woken < 0 && !passing.contains(&last_errno()) {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        let a_while = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let (word, expected) = (words[0].as_ptr(), expected[0]);
        // SAFETY: the kernel reads the word and the time, which outlive the call.
        unsafe { libc::syscall(libc::SYS_futex, word, operation, expected, &raw const a_while) };
    }
}

/// `struct futex_waitv` of `linux/futex.h`.
#[repr(C)]
struct FutexWaiter {
    expected: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// Wakes everybody who sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel uses the word's address as a key only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_sizes_and_numbers_that_the_kernel_knows() {
        assert_eq!(size_of::<ProcmapQuery>(), 104);
        assert_eq!(PROCMAP_QUERY, 0xc068_6611);
        assert_eq!(UFFDIO_API, 0xc018_aa3f);
        assert_eq!(UFFDIO_REGISTER, 0xc020_aa00);
        assert_eq!(UFFDIO_UNREGISTER, 0x8010_aa01);
        assert_eq!(UFFDIO_WRITEPROTECT, 0xc018_aa06);
        assert_eq!(size_of::<Message>(), 32);
    }

    #[test]
    fn a_wrong_descriptor_is_an_error() {
        assert_eq!(read(-1, &mut [0; 4]), Err(Errno(libc::EBADF)));
        assert!(procmap_query(-1, 0, &mut []).is_err());
        assert_eq!(uffd_changing(-1), Err(Errno(libc::EBADF)));
        assert!(!wait_readable(1 << 20, 0));
    }

    #[test]
    fn a_page_changes_and_stays_ours() {
        use std::sync::atomic::Ordering::Relaxed; // one thread
        let page = Page::new().unwrap();
        page.word().store(7, Relaxed);
        let moved = page.move_contents().unwrap();
        assert_eq!((page.word().load(Relaxed), moved.word().load(Relaxed)), (0, 7));
        moved.replace().unwrap();
        assert_eq!(moved.word().load(Relaxed), 0);
        page.word().store(8, Relaxed);
        page.discard().unwrap();
        assert_eq!(page.word().load(Relaxed), 0);
    }
}
