//! Mappings and processes for the monitor's tests, by raw system calls.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to change mappings without any notice, which is what the
//! tests are about. Every address handled here comes from [`map`] of the same test.

#![allow(unsafe_code, dead_code, missing_docs, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

use pinfold::{AddressRange, Monitor, Position, Replay};
use std::os::raw::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

pub const PAGE: usize = 4096;
pub const PRIVATE: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

pub fn range(start: usize, bytes: usize) -> AddressRange {
    AddressRange::new(start, bytes).unwrap()
}

fn mmap(at: usize, bytes: usize, rights: c_int, flags: c_int, file: c_int) -> Option<usize> {
    let at = at as *mut c_void;
    // SAFETY: see the file's header.
    let start = unsafe { libc::mmap(at, bytes, rights, flags, file, 0) };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

/// Private anonymous memory between two pages without rights, so that nothing of another test
/// merges with it: then that test's monitor would watch it too.
pub fn map(pages: usize) -> usize {
    let whole = mmap(0, (pages + 2) * PAGE, libc::PROT_NONE, PRIVATE, -1).unwrap();
    map_over(whole + PAGE, pages);
    whole + PAGE
}

pub fn map_over(at: usize, pages: usize) {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    mmap(at, pages * PAGE, rights, PRIVATE | libc::MAP_FIXED, -1).unwrap();
}

/// Maps only if nothing is there yet.
pub fn map_if_free(at: usize, pages: usize) -> bool {
    let flags = PRIVATE | libc::MAP_FIXED_NOREPLACE;
    mmap(at, pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1) == Some(at)
}

pub fn map_flags(pages: usize, flags: c_int, file: c_int) -> Option<usize> {
    mmap(0, pages * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, file)
}

pub fn munmap(at: usize, bytes: usize) -> bool {
    // SAFETY: see the file's header.
    unsafe { libc::munmap(at as *mut c_void, bytes) == 0 }
}

pub fn madvise(at: usize, bytes: usize, advice: c_int) -> bool {
    // SAFETY: see the file's header.
    unsafe { libc::madvise(at as *mut c_void, bytes, advice) == 0 }
}

pub fn mprotect(at: usize, bytes: usize, rights: c_int) -> bool {
    // SAFETY: see the file's header.
    unsafe { libc::mprotect(at as *mut c_void, bytes, rights) == 0 }
}

pub fn mremap(at: usize, old: usize, new: usize, flags: c_int, to: usize) -> Option<usize> {
    let (at, to) = (at as *mut c_void, to as *mut c_void);
    // SAFETY: see the file's header.
    let start = unsafe { libc::mremap(at, old, new, flags, to) };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

pub fn raw(number: c_long, arguments: [usize; 5]) -> c_long {
    let [a, b, c, d, e] = arguments;
    // SAFETY: see the file's header.
    unsafe { libc::syscall(number, a, b, c, d, e) }
}

/// `process_madvise` on ourselves.
pub fn process_madvise(at: usize, bytes: usize, advice: c_int) -> bool {
    let process = raw(libc::SYS_pidfd_open, [std::process::id() as usize, 0, 0, 0, 0]);
    let part = libc::iovec { iov_base: at as *mut c_void, iov_len: bytes };
    let arguments = [process as usize, &raw const part as usize, 1, advice as usize, 0];
    let done = raw(libc::SYS_process_madvise, arguments);
    close(process as c_int);
    done >= 0
}

/// Moves the end of the heap by the raw system call; gives the new end.
pub fn brk(to: usize) -> usize {
    raw(libc::SYS_brk, [to, 0, 0, 0, 0]) as usize
}

pub fn memfd() -> c_int {
    // SAFETY: a constant name.
    let file = unsafe { libc::memfd_create(c"pinfold-test".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: our own file.
    unsafe { libc::ftruncate(file, 16 * PAGE as libc::off_t) };
    file
}

/// A System V segment, attached and marked for removal.
pub fn system_v(pages: usize) -> usize {
    // SAFETY: a fresh segment at an address the kernel picks.
    unsafe {
        let segment = libc::shmget(libc::IPC_PRIVATE, pages * PAGE, 0o600);
        let at = libc::shmat(segment, std::ptr::null(), 0);
        libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut());
        at as usize
    }
}

pub fn byte(at: usize) -> &'static AtomicU8 {
    // SAFETY: the tests pass addresses that stay mapped while they use the reference.
    unsafe { &*(at as *const AtomicU8) }
}

pub fn fill(at: usize, pages: usize, value: u8) {
    (0..pages).for_each(|page| byte(at + page * PAGE).store(value, Ordering::Relaxed));
}

/// A second number for the same file, as a forked child has one.
pub fn duplicate(descriptor: c_int) -> c_int {
    // SAFETY: the call takes and gives numbers.
    unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) }
}

pub fn close(descriptor: c_int) {
    // SAFETY: a number the test opened, or closes on purpose.
    unsafe { libc::close(descriptor) };
}

pub fn close_from(first: u32) {
    raw(libc::SYS_close_range, [first as usize, u32::MAX as usize, 0, 0, 0]);
}

/// Puts `/dev/null` in the place of `descriptor`.
pub fn replace_by_null(descriptor: c_int) {
    // SAFETY: constant path; the number is replaced on purpose.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        libc::dup2(null, descriptor);
        libc::close(null);
    }
}

pub fn is_open(descriptor: c_int) -> bool {
    // SAFETY: asks for flags only.
    unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
}

pub fn pipe() -> [c_int; 2] {
    let mut ends = [0; 2];
    // SAFETY: two numbers are written.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    ends
}

/// Waits until the other end is closed.
pub fn wait_for_end(descriptor: c_int) {
    // SAFETY: one byte of our own.
    unsafe { libc::read(descriptor, [0u8].as_mut_ptr().cast(), 1) };
}

/// Runs `work` in a forked child and gives its process number. The child exits with 0 if `work`
/// returns, with 101 if it panics, and is killed after five minutes: a fork may catch another
/// thread of the harness inside a lock of the standard library, which the child then waits for.
pub fn fork(work: impl FnOnce()) -> c_int {
    // SAFETY: the C library's fork leaves its allocator usable in the child, which never returns
    // into the test harness.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(300);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(if outcome.is_ok() { 0 } else { 101 });
        }
        child
    }
}

/// Ends this process after `seconds`.
pub fn alarm(seconds: u32) {
    // SAFETY: no pointer is passed.
    unsafe { libc::alarm(seconds) };
}

/// From now on this process starts no thread: the kernel says `EAGAIN`.
pub fn forbid_threads() {
    // Compares the system call's number with the two that start threads.
    install([
        load(NUMBER),
        is(libc::SYS_clone3, 1, 0),
        is(libc::SYS_clone, 0, 1),
        refuse(libc::EAGAIN),
        answer(libc::SECCOMP_RET_ALLOW),
    ]);
}

/// From now on this thread, and those that it starts, map nothing over another mapping: the kernel says `ENOMEM`.
pub fn forbid_mapping_over() {
    /// `args[3]` of `seccomp_data`, its low half.
    const FLAGS: u32 = 16 + 3 * 8;
    install([
        load(NUMBER),
        is(libc::SYS_mmap, 0, 3),
        load(FLAGS),
        statement(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, libc::MAP_FIXED as u32, 0, 1),
        refuse(libc::ENOMEM),
        answer(libc::SECCOMP_RET_ALLOW),
    ]);
}

/// `nr` of `seccomp_data`.
const NUMBER: u32 = 0;

fn statement(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k }
}

fn load(at: u32) -> libc::sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0)
}

fn is(number: c_long, jt: u8, jf: u8) -> libc::sock_filter {
    let number = u32::try_from(number).unwrap();
    statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, jt, jf)
}

fn answer(with: u32) -> libc::sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, with, 0, 0)
}

fn refuse(errno: c_int) -> libc::sock_filter {
    answer(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs())
}

/// For this thread, and those that it starts.
fn install<const LENGTH: usize>(mut filter: [libc::sock_filter; LENGTH]) {
    let len = u16::try_from(LENGTH).unwrap();
    let program = libc::sock_fprog { len, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its statements are read during the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}

/// The child's exit status.
pub fn wait_for(child: c_int) -> c_int {
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

/// Whether `what` comes true within half a minute: what another thread is in the middle of takes as long
/// as a busy machine lets it.
#[allow(dead_code)] // not every test file waits
pub fn comes_true(mut what: impl FnMut() -> bool) -> bool {
    let began = std::time::Instant::now();
    while !what() {
        if began.elapsed().as_secs() >= 30 {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// A userfaultfd that is read only when a test says so.
pub struct DeafUserfaultfd(c_int);

impl DeafUserfaultfd {
    pub fn new() -> Self {
        let uffd = raw(libc::SYS_userfaultfd, [1 | libc::O_NONBLOCK as usize, 0, 0, 0, 0]) as c_int;
        let mut api = [0xaa_u64, 1 << 6, 0];
        // SAFETY: three words, as the request's number says.
        assert_eq!(unsafe { libc::ioctl(uffd, 0xc018_aa3f, api.as_mut_ptr()) }, 0);
        Self(uffd)
    }

    pub fn watch(&self, at: usize, bytes: usize) {
        let mut register = [at as u64, bytes as u64, 2, 0];
        // SAFETY: four words, as the request's number says.
        assert_eq!(unsafe { libc::ioctl(self.0, 0xc020_aa00, register.as_mut_ptr()) }, 0);
    }

    /// Puts itself in the place of `descriptor` as well.
    pub fn replace(&self, descriptor: c_int) {
        // SAFETY: the number is replaced on purpose.
        assert_eq!(unsafe { libc::dup2(self.0, descriptor) }, descriptor);
    }

    /// Reads what there is, after waiting for something.
    pub fn read_all(&self) {
        let mut messages = [0u8; 128];
        // SAFETY: at most the array's length is written.
        while unsafe { libc::read(self.0, messages.as_mut_ptr().cast(), messages.len()) } <= 0 {
            std::thread::yield_now();
        }
    }
}

impl Drop for DeafUserfaultfd {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// Where the log stands, up to a `check` made now.
pub fn mark(monitor: &impl Monitor) -> Replay {
    monitor.check().unwrap();
    monitor.replay(Position::NOWHERE, &mut |_| {})
}

/// Everything logged since `from`, up to a `check` made now.
pub fn changes_since(monitor: &impl Monitor, from: Replay) -> Vec<AddressRange> {
    let now = monitor.check().unwrap();
    let mut ranges = Vec::new();
    let replay = monitor.replay(from.up_to, &mut |range| ranges.push(range));
    assert!(replay.complete && replay.sequence.0 >= now.0, "{replay:?} {now:?}");
    ranges
}

pub fn touch(ranges: &[AddressRange], range: AddressRange) -> bool {
    ranges.iter().any(|entry| entry.overlaps(&range))
}

/// Waits until `range` is not pending. Sleeps in between, because a thread that never sleeps is
/// what keeps other monitors of this process, in concurrent tests, from settling.
pub fn until_settled(monitor: &impl Monitor, range: AddressRange) {
    while monitor.change_pending(range) {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
}

/// The highest real-time priority that this process may give a thread; 0 if none.
pub fn highest_real_time_priority() -> i32 {
    std::thread::spawn(|| {
        // SAFETY: numbers.
        let most = unsafe { libc::sched_get_priority_max(libc::SCHED_FIFO) };
        (1..=most).rev().find(|&priority| {
            let parameters = libc::sched_param { sched_priority: priority };
            // SAFETY: of this thread, which ends at once.
            unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) == 0 }
        })
    })
    .join()
    .unwrap()
    .unwrap_or(0)
}

/// The real-time priority of a thread; 0 if it has none, or is gone.
pub fn real_time_priority(thread: i32) -> i32 {
    let mut parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::sched_getparam(thread, &raw mut parameters) };
    parameters.sched_priority
}
