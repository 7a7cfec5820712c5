//! The system calls that change memory, as typed functions.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because every call in it changes or touches memory by address.
//! Each function that does so is unsafe with the same contract: **the range belongs to the caller
//! alone, and no reference of Rust's points into it.** The caller is [`super::Specimen`], whose
//! memory is only ever touched by address.

#![allow(unsafe_code)]

use io_uring::{IoUring, opcode};
use libc::{c_int, c_long, c_void};
use pinfold::AddressRange;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// By which route a program reaches the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Call {
    /// The libc function of that name, which hooks can replace.
    Library,
    /// `syscall(2)`.
    Raw,
    /// An instruction of the program's own, as in a second libc or the dynamic loader.
    Own,
    /// A request in a ring of io_uring, which a thread of the kernel's carries out.
    Ring,
}

/// Why a change could not be made on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {}", io::Error::from_raw_os_error(*.errno))]
pub(crate) struct Obstacle {
    call: &'static str,
    errno: i32,
}

impl Obstacle {
    fn last(call: &'static str) -> Self {
        Self::from_error(call, &io::Error::last_os_error())
    }

    pub(super) fn from_error(call: &'static str, error: &io::Error) -> Self {
        Self { call, errno: error.raw_os_error().unwrap_or(0) }
    }

    pub(super) const fn of_call(call: &'static str, errno: pinfold_kernel::Errno) -> Self {
        Self { call, errno: errno.0 }
    }

    /// Made when the address is no longer free.
    pub(crate) const fn taken(call: &'static str) -> Self {
        Self { call, errno: libc::EEXIST }
    }

    /// Made when the memory is of a kind that cannot suffer the change.
    pub(super) const fn unsuitable(call: &'static str) -> Self {
        Self { call, errno: libc::EOPNOTSUPP }
    }

    /// Whether another thread was faster and has its own memory at the address now.
    pub(crate) const fn is_taken(&self) -> bool {
        self.errno == libc::EEXIST
    }
}

type Outcome<T = ()> = Result<T, Obstacle>;

fn pointer(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

fn done(call: &'static str, result: c_long) -> Outcome {
    if result < 0 { Err(Obstacle::last(call)) } else { Ok(()) }
}

fn address(call: &'static str, result: *mut c_void) -> Outcome<usize> {
    if result == libc::MAP_FAILED {
        Err(Obstacle::last(call))
    } else {
        Ok(result.expose_provenance())
    }
}

/// A system call with three arguments by an instruction that no library can intercept.
#[cfg(target_arch = "x86_64")]
unsafe fn own_call(number: c_long, a: usize, b: usize, c: usize) -> c_long {
    let result: c_long;
    // SAFETY: this is the kernel's calling convention; what the call does is the caller's contract.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A system call with three arguments by an instruction that no library can intercept.
#[cfg(target_arch = "aarch64")]
unsafe fn own_call(number: c_long, a: usize, b: usize, c: usize) -> c_long {
    let result: c_long;
    // SAFETY: this is the kernel's calling convention; what the call does is the caller's contract.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            options(nostack),
        );
    }
    result
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn own_call(number: c_long, a: usize, b: usize, c: usize) -> c_long {
    // SAFETY: what the call does is the caller's contract.
    unsafe { libc::syscall(number, a, b, c) }
}

/// An own instruction's answer carries the error number in itself.
fn own_done(call: &'static str, result: c_long) -> Outcome {
    if result < 0 {
        return Err(Obstacle { call, errno: i32::try_from(-result).unwrap_or(0) });
    }
    Ok(())
}

/// `munmap`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn unmap(range: AddressRange, by: Call) -> Outcome {
    let (start, length) = (range.start(), range.len());
    // SAFETY: the range is the caller's alone.
    unsafe {
        match by {
            Call::Library => done("munmap", libc::munmap(pointer(start), length).into()),
            Call::Raw => done("munmap", libc::syscall(libc::SYS_munmap, start, length)),
            Call::Own | Call::Ring => {
                own_done("munmap", own_call(libc::SYS_munmap, start, length, 0))
            }
        }
    }
}

/// A `munmap` of an unaligned address, which the kernel refuses.
pub(super) fn unmap_wrongly(range: AddressRange) {
    // SAFETY: the kernel refuses an unaligned address before it does anything.
    let result = unsafe { libc::munmap(pointer(range.start() + 1), range.len()) };
    debug_assert_eq!(result, -1);
}

/// `madvise`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise(range: AddressRange, advice: Advice, by: Call) -> Outcome {
    let (start, length, number) = (range.start(), range.len(), advice.number());
    // SAFETY: the range is the caller's alone.
    unsafe {
        match by {
            Call::Library => {
                done(advice.name(), libc::madvise(pointer(start), length, number).into())
            }
            Call::Raw => {
                done(advice.name(), libc::syscall(libc::SYS_madvise, start, length, number))
            }
            Call::Own => {
                let number = usize::try_from(number).unwrap_or(0);
                own_done(advice.name(), own_call(libc::SYS_madvise, start, length, number))
            }
            Call::Ring => advise_by_ring(range, advice),
        }
    }
}

/// `IORING_OP_MADVISE`.
///
/// # Safety
///
/// See the file's header.
unsafe fn advise_by_ring(range: AddressRange, advice: Advice) -> Outcome {
    const NAME: &str = "IORING_OP_MADVISE";
    let failed = |error: io::Error| Obstacle::from_error(NAME, &error);
    let mut ring = IoUring::new(2).map_err(failed)?;
    let length = libc::off_t::try_from(range.len()).unwrap_or(0);
    let request = opcode::Madvise::new(pointer(range.start()), length, advice.number()).build();
    // SAFETY: the range is the caller's alone, and there is room for one request.
    unsafe { ring.submission().push(&request) }
        .map_err(|_| Obstacle { call: NAME, errno: libc::EBUSY })?;
    ring.submit_and_wait(1).map_err(failed)?;
    match ring.completion().next().map(|done| done.result()) {
        Some(0..) => Ok(()),
        Some(errno) => Err(Obstacle { call: NAME, errno: -errno }),
        None => Err(Obstacle { call: NAME, errno: libc::EIO }),
    }
}

/// The advices that take pages away, and those that prepare for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Advice {
    DontNeed,
    DontNeedLocked,
    Free,
    Remove,
    GuardInstall,
    GuardRemove,
    HugePage,
    PageOut,
    PopulateWrite,
    Collapse,
}

impl Advice {
    const fn number(self) -> c_int {
        match self {
            Self::DontNeed => libc::MADV_DONTNEED,
            Self::DontNeedLocked => 24,
            Self::Free => libc::MADV_FREE,
            Self::Remove => libc::MADV_REMOVE,
            Self::GuardInstall => 102,
            Self::GuardRemove => 103,
            Self::HugePage => libc::MADV_HUGEPAGE,
            Self::PageOut => libc::MADV_PAGEOUT,
            Self::PopulateWrite => libc::MADV_POPULATE_WRITE,
            Self::Collapse => 25,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::DontNeed => "MADV_DONTNEED",
            Self::DontNeedLocked => "MADV_DONTNEED_LOCKED",
            Self::Free => "MADV_FREE",
            Self::Remove => "MADV_REMOVE",
            Self::GuardInstall => "MADV_GUARD_INSTALL",
            Self::GuardRemove => "MADV_GUARD_REMOVE",
            Self::HugePage => "MADV_HUGEPAGE",
            Self::PageOut => "MADV_PAGEOUT",
            Self::PopulateWrite => "MADV_POPULATE_WRITE",
            Self::Collapse => "MADV_COLLAPSE",
        }
    }
}

/// `process_madvise` through a descriptor of this very process.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_by_descriptor(range: AddressRange, advice: Advice) -> Outcome {
    // SAFETY: asks only.
    let itself = unsafe { libc::getpid() };
    // SAFETY: the caller's promise.
    unsafe { advise_process(itself, range, advice) }
}

/// The same by a forked child, on its parent.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_parent(range: AddressRange, advice: Advice) -> Outcome {
    // SAFETY: asks only.
    let parent = unsafe { libc::getpid() };
    // SAFETY: the caller's promise; the child allocates nothing.
    let answer = in_child(|| match unsafe { advise_process(parent, range, advice) } {
        Ok(()) => 0,
        Err(obstacle) => u8::try_from(obstacle.errno).unwrap_or(u8::MAX),
    })?;
    match answer {
        Some(0) => Ok(()),
        other => Err(Obstacle { call: "process_madvise", errno: other.map_or(0, i32::from) }),
    }
}

/// # Safety
///
/// See the file's header.
unsafe fn advise_process(process: libc::pid_t, range: AddressRange, advice: Advice) -> Outcome {
    let pieces = [libc::iovec { iov_base: pointer(range.start()), iov_len: range.len() }];
    // SAFETY: opens a descriptor and touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let descriptor = new_descriptor("pidfd_open", c_int::try_from(opened).unwrap_or(-1))?;
    // SAFETY: the range is the caller's alone; the vector lives across the call.
    let result = unsafe {
        let number = libc::c_long::from(advice.number());
        let fd = descriptor.as_raw_fd();
        libc::syscall(libc::SYS_process_madvise, fd, pieces.as_ptr(), 1_usize, number, 0_usize)
    };
    done("process_madvise", result)
}

/// `madvise` by a forked child, which ends at once.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn advise_in_child(range: AddressRange, advice: Advice) -> Outcome {
    let (start, length, number) = (pointer(range.start()), range.len(), advice.number());
    // SAFETY: the child makes two system calls, both allowed after a fork, and ends.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(c_int::from(libc::madvise(start, length, number) != 0));
        }
        child
    };
    done("fork", child.into())?;
    match wait_for(child) {
        0 => Ok(()),
        _ => Err(Obstacle { call: advice.name(), errno: libc::EINVAL }),
    }
}

/// The exit status of a child of ours, -1 if a signal ended it.
pub(super) fn wait_for(child: libc::pid_t) -> c_int {
    match wait_status(child) {
        Some(status) if libc::WIFEXITED(status) => libc::WEXITSTATUS(status),
        _ => -1,
    }
}

fn wait_status(child: libc::pid_t) -> Option<c_int> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is writable.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if waited == child {
            return Some(status);
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Advices that change no byte and no address, whosever memory they are given for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HarmlessAdvice {
    Cold,
    PageOut,
    Mergeable,
    Unmergeable,
    Collapse,
    SoftOffline,
}

impl HarmlessAdvice {
    /// All of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::Cold,
        Self::PageOut,
        Self::Mergeable,
        Self::Unmergeable,
        Self::Collapse,
        Self::SoftOffline,
    ];

    const fn number(self) -> c_int {
        match self {
            Self::Cold => libc::MADV_COLD,
            Self::PageOut => libc::MADV_PAGEOUT,
            Self::Mergeable => libc::MADV_MERGEABLE,
            Self::Unmergeable => libc::MADV_UNMERGEABLE,
            Self::Collapse => 25,
            Self::SoftOffline => libc::MADV_SOFT_OFFLINE,
        }
    }

    /// Its name in a report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Cold => "MADV_COLD",
            Self::PageOut => "MADV_PAGEOUT",
            Self::Mergeable => "MADV_MERGEABLE",
            Self::Unmergeable => "MADV_UNMERGEABLE",
            Self::Collapse => "MADV_COLLAPSE",
            Self::SoftOffline => "MADV_SOFT_OFFLINE",
        }
    }

    /// The most bytes that it makes sense for, of one call.
    pub(crate) const fn longest(self) -> usize {
        match self {
            // Each page is taken out of use for good.
            Self::SoftOffline => 4096,
            _ => 4 << 20,
        }
    }
}

/// Gives the advice for `range`, which need not be mapped; whether the kernel took it.
pub(crate) fn advise_harmlessly(range: AddressRange, advice: HarmlessAdvice) -> bool {
    // SAFETY: the advice changes no byte and no address.
    unsafe { libc::madvise(pointer(range.start()), range.len(), advice.number()) == 0 }
}

/// Moves this process's pages from one node of the machine's memory to another; whether the kernel
/// did.
pub(crate) fn migrate(from: usize, to: usize) -> bool {
    let (from, to) = (1_u64 << from, 1_u64 << to);
    let bits = u64::from(u64::BITS);
    // SAFETY: both sets live across the call; where a page lies changes no byte and no address.
    unsafe { libc::syscall(libc::SYS_migrate_pages, 0, bits, &raw const from, &raw const to) >= 0 }
}

/// How a forked child ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ChildEnd {
    /// By itself, with this answer.
    Answered(u8),
    /// By a signal.
    Killed(i32),
    /// Not at all: it was killed for its time. Where its threads stood then.
    Hung(String),
}

/// How long a process may take before it is taken for hung. One that computes takes longer beside other load, and
/// still works; one that waits for what does not come uses no processor.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// With less of a processor's time than a thirtieth of this: a monitor's thread may look around meanwhile.
    resting: Duration,
    /// In all.
    working: Duration,
}

/// How long a child may take: to load the eBPF programs takes an emulated processor beside others half a minute.
const CHILD_PATIENCE: Patience =
    Patience { resting: Duration::from_secs(30), working: Duration::from_secs(120) };

/// Runs `work` in a forked child and returns its answer; `None` if the child did not end by itself
/// within the patience for children.
///
/// The child is a copy of the calling thread alone. It may allocate (libc mends its allocator
/// after a fork), and must not wait for a lock that another thread may have held.
pub(crate) fn in_child(work: impl FnOnce() -> u8) -> Outcome<Option<u8>> {
    match in_child_guarded((), work)? {
        ChildEnd::Answered(answer) => Ok(Some(answer)),
        ChildEnd::Killed(_) | ChildEnd::Hung(_) => Ok(None),
    }
}

/// The same; `guard` is held until the fork has been made, and released on both sides.
pub(crate) fn in_child_guarded<T>(guard: T, work: impl FnOnce() -> u8) -> Outcome<ChildEnd> {
    // SAFETY: see above; the child ends without running anything of the parent's.
    let child = unsafe {
        let child = libc::fork();
        drop(guard);
        if child == 0 {
            // In case no process is left to end it.
            libc::alarm(2 * u32::try_from(CHILD_PATIENCE.working.as_secs()).unwrap_or(0));
            let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(answer.map_or(PANICKED, c_int::from));
        }
        child
    };
    done("fork", child.into())?;
    Ok(end_of(child, CHILD_PATIENCE))
}

fn end_of(child: libc::pid_t, patience: Patience) -> ChildEnd {
    let hung = (!comes_to_its_end(child, patience)).then(|| {
        let where_it_stood = tasks(child);
        // SAFETY: a child of ours that was not waited for: the number is no other process's.
        unsafe { libc::kill(child, libc::SIGKILL) };
        where_it_stood
    });
    let status = wait_status(child);
    match (hung, status) {
        (Some(tasks), _) => ChildEnd::Hung(tasks),
        (None, Some(status)) if libc::WIFEXITED(status) => {
            ChildEnd::Answered(u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX))
        }
        (None, Some(status)) => ChildEnd::Killed(libc::WTERMSIG(status)),
        (None, None) => ChildEnd::Hung("it is no child of this process".into()),
    }
}

/// Waits until the process ends; false if it hangs.
fn comes_to_its_end(child: libc::pid_t, patience: Patience) -> bool {
    let begun = Instant::now();
    let mut worked = processor_time(child);
    while !ends_within(child, patience.resting) {
        let before = std::mem::replace(&mut worked, processor_time(child));
        let rests = worked.saturating_sub(before) < patience.resting / 30;
        if rests || begun.elapsed() >= patience.working {
            return false;
        }
    }
    true
}

/// What all threads of a child that was not waited for have had of the processors.
fn processor_time(child: libc::pid_t) -> Duration {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: both calls write the value that they are given, and touch no other memory.
    let known = unsafe {
        libc::clock_getcpuclockid(child, &raw mut clock) == 0
            && libc::clock_gettime(clock, &raw mut time) == 0
    };
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    if known { Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0)) } else { Duration::ZERO }
}

/// Waits until the process ends; false if it did not for so long. True where no descriptor can be
/// opened to find out: the alarm of the child ends it then.
fn ends_within(child: libc::pid_t, patience: Duration) -> bool {
    // SAFETY: opens a descriptor and touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
    let descriptor = new_descriptor("pidfd_open", c_int::try_from(opened).unwrap_or(-1));
    let Ok(descriptor) = descriptor else { return true };
    let mut ended = libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = c_int::try_from(patience.as_millis()).unwrap_or(c_int::MAX);
    loop {
        // SAFETY: one descriptor's entry, writable.
        let ready = unsafe { libc::poll(&raw mut ended, 1, millis) };
        let interrupted = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if ready >= 0 || !interrupted {
            return ready != 0;
        }
    }
}

/// Where each thread of a process stands: its name, what it waits for, its system call and, for
/// root, the kernel's stack.
pub(crate) fn tasks(process: libc::pid_t) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return String::new();
    };
    let told = tasks.flatten().map(|task| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let words = ["comm", "wchan", "syscall", "stack"].map(read);
        words.map(|text| text.lines().collect::<Vec<_>>().join(" < ")).join(" | ")
    });
    told.collect::<Vec<_>>().join("\n")
}

/// From now on this process ends when its parent does.
pub(crate) fn end_with_parent() {
    // SAFETY: concerns this process only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Reads a byte of every page of `range`, which faults in what is missing; memory that is not there
/// is no harm.
pub(crate) fn touch(range: AddressRange) {
    const PAGE: usize = 4096;
    let mut byte = 0_u8;
    let first = range.start() - range.start() % PAGE;
    for page in (first..range.end()).step_by(PAGE) {
        let to = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let from = libc::iovec { iov_base: pointer(page), iov_len: 1 };
        // SAFETY: one byte is written, into `byte`; what is read need not be mapped.
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    }
}

/// The processor that this thread runs on.
pub(crate) fn this_processor() -> usize {
    // SAFETY: asks only.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Keeps this thread on `processor`, if that is allowed.
pub(crate) fn stay_on(processor: usize) {
    if processor >= 8 * size_of::<libc::cpu_set_t>() {
        return;
    }
    // SAFETY: a set of zeros is an empty set; the processor's number lies in it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

/// From now on this thread, when it is woken, waits until others have had their time.
pub(crate) fn lag_behind() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameters live across the call, which concerns this thread only.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
}

/// Has the allocator keep what is freed for what is allocated next, large blocks too: the kernel does
/// not clear the same pages over and over.
pub(crate) fn keep_freed_memory() {
    allocate_without_mapping();
    #[cfg(target_env = "gnu")]
    {
        const KEPT: c_int = 64 << 20;
        // SAFETY: a setting of the allocator, which locks itself.
        let _ = unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT) };
    }
}

/// Has the allocator take large blocks from its heaps too, which grow without new mappings: a
/// process that can map nothing any more still allocates.
pub(super) fn allocate_without_mapping() {
    #[cfg(target_env = "gnu")]
    {
        const LARGEST: c_int = 32 << 20;
        // SAFETY: a setting of the allocator, which locks itself.
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST) };
    }
}

/// What a panicking child answers.
const PANICKED: c_int = 255;

/// Lowers the limit on descriptors so that no more can be opened, until it is dropped.
#[derive(Debug)]
pub(crate) struct NoDescriptors(libc::rlimit);

impl NoDescriptors {
    /// Concerns every thread; what is open stays open.
    pub(crate) fn new() -> Outcome<Self> {
        let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `old` is writable; a soft limit can be lowered and raised again freely.
        unsafe {
            done("getrlimit", libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old).into())?;
            let none = libc::rlimit { rlim_cur: 0, ..old };
            done("setrlimit", libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none).into())?;
        }
        Ok(Self(old))
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        // SAFETY: these limits were in force before.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const self.0) };
    }
}

/// Where a new mapping goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Anywhere.
    Anywhere,
    /// At the range, over what is there.
    Over,
    /// At the range, which must be free.
    Free,
}

impl Place {
    const fn flags(self) -> c_int {
        match self {
            Self::Anywhere => 0,
            Self::Over => libc::MAP_FIXED,
            Self::Free => libc::MAP_FIXED_NOREPLACE,
        }
    }
}

/// `mmap` of `length` bytes at `start`; the address it got.
///
/// # Safety
///
/// See the file's header; with [`Place::Over`] the range is what must be the caller's.
pub(super) unsafe fn map(
    start: usize,
    length: usize,
    place: Place,
    protection: c_int,
    flags: c_int,
    file: Option<&OwnedFd>,
) -> Outcome<usize> {
    let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
    let flags = flags | place.flags();
    // SAFETY: what is replaced is the caller's alone.
    let result = unsafe { libc::mmap(pointer(start), length, protection, flags, descriptor, 0) };
    let got = address("mmap", result)?;
    if place == Place::Free && got != start {
        // A kernel before 4.17 takes the address as a hint.
        // SAFETY: the mapping was just made and nothing refers to it.
        unsafe { libc::munmap(pointer(got), length) };
        return Err(Obstacle::taken("mmap"));
    }
    Ok(got)
}

/// `mremap` of `range` to `length` bytes; the address it got.
///
/// # Safety
///
/// See the file's header; `to`, where the flags use it, is the caller's too.
pub(super) unsafe fn remap(
    range: AddressRange,
    length: usize,
    flags: c_int,
    to: usize,
) -> Outcome<usize> {
    // SAFETY: both ranges are the caller's alone.
    let result =
        unsafe { libc::mremap(pointer(range.start()), range.len(), length, flags, pointer(to)) };
    address("mremap", result)
}

/// `mprotect`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn protect(range: AddressRange, protection: c_int) -> Outcome {
    // SAFETY: the range is the caller's alone.
    done("mprotect", unsafe {
        libc::mprotect(pointer(range.start()), range.len(), protection).into()
    })
}

/// `mlock`, as far as the limit allows.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn lock(range: AddressRange) {
    // SAFETY: locking changes no byte. Where it is refused, the advice still has something to do.
    let _ = unsafe { libc::mlock(pointer(range.start()), range.len()) };
}

/// `munlock`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn unlock(range: AddressRange) {
    // SAFETY: unlocking changes no byte, and of memory that is not locked changes nothing.
    let _ = unsafe { libc::munlock(pointer(range.start()), range.len()) };
}

/// A new System V segment attached at `range`.
///
/// # Safety
///
/// See the file's header; with [`Place::Over`] the range is what must be the caller's.
pub(super) unsafe fn attach(range: AddressRange, place: Place, by: Call) -> Outcome {
    let flags = if place == Place::Over { libc::SHM_REMAP } else { 0 };
    // SAFETY: the segment is new, and marked to go with its last attachment; what is replaced at
    // the address is the caller's alone.
    unsafe {
        let segment = libc::shmget(libc::IPC_PRIVATE, range.len(), libc::IPC_CREAT | 0o600);
        done("shmget", segment.into())?;
        let result = attach_by(segment, range.start(), flags, by);
        libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut());
        match result {
            Err(Obstacle { errno: libc::EINVAL, .. }) if place == Place::Free => {
                Err(Obstacle::taken("shmat"))
            }
            other => other,
        }
    }
}

/// # Safety
///
/// See [`attach`].
unsafe fn attach_by(segment: c_int, start: usize, flags: c_int, by: Call) -> Outcome {
    // SAFETY: the caller's promise.
    unsafe {
        match by {
            Call::Library => {
                address("shmat", libc::shmat(segment, pointer(start), flags)).map(drop)
            }
            Call::Raw => done("shmat", libc::syscall(libc::SYS_shmat, segment, start, flags)),
            Call::Own | Call::Ring => {
                let word = |number: c_int| usize::try_from(number).unwrap_or(0);
                let result = own_call(libc::SYS_shmat, word(segment), start, word(flags));
                own_done("shmat", result)
            }
        }
    }
}

/// `remap_file_pages`: from now on `range`, a part of one shared mapping, shows the file's pages from
/// `page` on.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn remap_pages(range: AddressRange, page: usize) -> Outcome {
    // SAFETY: the range is the caller's alone.
    done("remap_file_pages", unsafe {
        libc::syscall(libc::SYS_remap_file_pages, range.start(), range.len(), 0, page, 0)
    })
}

/// `shmdt`.
///
/// # Safety
///
/// See the file's header.
pub(super) unsafe fn detach(range: AddressRange) -> Outcome {
    // SAFETY: the segment is the caller's alone.
    done("shmdt", unsafe { libc::shmdt(pointer(range.start())).into() })
}

/// Where the heap ends.
pub(super) fn program_break() -> usize {
    // SAFETY: an increment of zero changes nothing.
    unsafe { libc::sbrk(0) }.expose_provenance()
}

/// `sbrk(increment)`; the old end of the heap.
///
/// # Safety
///
/// With a negative increment: the end of the heap is the caller's alone.
pub(super) unsafe fn move_break(increment: isize) -> Outcome<usize> {
    // SAFETY: what goes is the caller's.
    address("sbrk", unsafe { libc::sbrk(increment) })
}

fn new_descriptor(call: &'static str, descriptor: c_int) -> Outcome<OwnedFd> {
    if descriptor < 0 {
        return Err(Obstacle::last(call));
    }
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// A new memfd of `length` bytes.
pub(super) fn memory_file(length: usize) -> Outcome<OwnedFd> {
    // SAFETY: the name is a C string; no other memory is touched.
    let raw = unsafe { libc::memfd_create(c"pinfold-specimen".as_ptr(), libc::MFD_CLOEXEC) };
    let file = new_descriptor("memfd_create", raw)?;
    resize(&file, length)?;
    Ok(file)
}

/// A new file without a name in the directory for temporary files.
pub(super) fn disk_file(length: usize) -> Outcome<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE);
    let file: OwnedFd = options
        .open(std::env::temp_dir())
        .map_err(|error| Obstacle::from_error("open(O_TMPFILE)", &error))?
        .into();
    resize(&file, length)?;
    Ok(file)
}

fn offset(bytes: usize) -> libc::off_t {
    libc::off_t::try_from(bytes).unwrap_or(libc::off_t::MAX)
}

/// `ftruncate`.
pub(super) fn resize(file: &OwnedFd, length: usize) -> Outcome {
    // SAFETY: mapped memory behind the new end faults when it is touched, as the file's owner knows.
    done("ftruncate", unsafe { libc::ftruncate(file.as_raw_fd(), offset(length)).into() })
}

/// `fallocate(FALLOC_FL_PUNCH_HOLE)`.
pub(super) fn punch(file: &OwnedFd, at: usize, length: usize) -> Outcome {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: mapped memory in the hole reads as zero, as the file's owner knows.
    done("fallocate", unsafe {
        libc::fallocate(file.as_raw_fd(), mode, offset(at), offset(length)).into()
    })
}

/// The same by a forked child.
pub(super) fn punch_in_child(file: &OwnedFd, at: usize, length: usize) -> Outcome {
    match in_child(|| u8::from(punch(file, at, length).is_err()))? {
        Some(0) => Ok(()),
        _ => Err(Obstacle { call: "fallocate", errno: libc::EINVAL }),
    }
}

/// Writes `words` over `range`, of the last one as many bytes as there is room for.
///
/// # Safety
///
/// See the file's header; the memory is mapped and writable.
pub(super) unsafe fn store(range: AddressRange, mut words: impl Iterator<Item = u64>) {
    const WORD: usize = size_of::<u64>();
    let start = pointer(range.start()).cast::<u8>();
    let whole = range.len() / WORD * WORD;
    for (offset, word) in (0..whole).step_by(WORD).zip(words.by_ref()) {
        // SAFETY: the target is mapped and the caller's alone, and a word of it begins at `offset`.
        unsafe { start.add(offset).cast::<u64>().write_unaligned(word.to_le()) };
    }
    let last = words.next().unwrap_or(0).to_le_bytes();
    // SAFETY: so many bytes, fewer than a word, are left.
    unsafe { std::ptr::copy_nonoverlapping(last.as_ptr(), start.add(whole), range.len() - whole) };
}

/// Whether the memory at `range` holds `bytes`, which are as many.
///
/// # Safety
///
/// See the file's header; the memory is mapped and readable.
pub(super) unsafe fn holds(range: AddressRange, bytes: &[u8]) -> bool {
    let length = range.len().min(bytes.len());
    // SAFETY: both are readable for so many bytes; nothing but this call reads the mapped memory.
    let compared = unsafe { libc::memcmp(pointer(range.start()), bytes.as_ptr().cast(), length) };
    compared == 0 && range.len() == bytes.len()
}

/// The bytes at `range`.
///
/// # Safety
///
/// See the file's header; the memory is mapped and readable.
pub(super) unsafe fn load(range: AddressRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    // SAFETY: the source is mapped, and `bytes` was just allocated elsewhere.
    unsafe {
        let source = pointer(range.start()).cast();
        std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), range.len());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn end_of_a(program: &str, patience: Patience) -> ChildEnd {
        let mut child = Command::new("sh").args(["-c", program]).spawn().unwrap();
        let end = end_of(libc::pid_t::try_from(child.id()).unwrap(), patience);
        assert!(child.wait().is_err(), "there is a child left to wait for");
        end
    }

    #[test]
    fn a_child_hangs_that_rests_or_does_not_come_to_its_end() {
        let (soon, never) = (Duration::from_secs(1), Duration::from_secs(3600));
        assert_eq!(
            end_of_a("exit 3", Patience { resting: never, working: never }),
            ChildEnd::Answered(3)
        );
        let resting = Patience { resting: soon, working: never };
        assert!(matches!(end_of_a("exec sleep 3600", resting), ChildEnd::Hung(_)));
        let begun = Instant::now();
        let working = Patience { resting: soon, working: 3 * soon };
        assert!(matches!(end_of_a("while :; do :; done", working), ChildEnd::Hung(_)));
        assert!(begun.elapsed() >= 3 * soon, "it worked, and was killed before its time");
    }
}
