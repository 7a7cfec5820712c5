//! Memory to change, processes to watch, and programs that are loaded once.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for system calls, by which memory of its own is changed, to which no code has
//! references, and processes of its own are made.

#![allow(unsafe_code)]

use pinfold::AddressRange;
use pinfold::monitor::Ebpf;
use pinfold_ebpf::layout::{CLOSED, Changes, Record, WRITING, WatchFilter, blocks};
use pinfold_ebpf::{Programs, ViewId};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Child;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

pub(crate) fn page() -> usize {
    // SAFETY: no precondition.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

// --- what is loaded once -------------------------------------------------------------------------

static LOADED: OnceLock<Result<(Programs, Ebpf), String>> = OnceLock::new();
static TURN: Mutex<()> = Mutex::new(());

type Turn = MutexGuard<'static, ()>;

fn loaded() -> Option<(Turn, &'static (Programs, Ebpf))> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = LOADED.get_or_init(|| {
        let programs = Programs::load().map_err(|error| error.to_string())?;
        let this = pidfd(std::process::id());
        let view = programs.view(std::os::fd::AsFd::as_fd(&this)).unwrap();
        // From here on a failure is one: the kernel can do it.
        Ok((programs, Ebpf::from_view(view).unwrap()))
    });
    match loaded {
        Ok(both) => Some((turn, both)),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

/// The monitor of this process, with no other test running.
pub(crate) fn alone() -> Option<(Turn, &'static Ebpf)> {
    loaded().map(|(turn, (_, monitor))| (turn, monitor))
}

/// The programs, with no other test running.
pub(crate) fn programs() -> Option<(Turn, &'static Programs)> {
    loaded().map(|(turn, (programs, _))| (turn, programs))
}

pub(crate) fn misses() -> u64 {
    LOADED
        .get()
        .and_then(|loaded| loaded.as_ref().ok())
        .map_or(0, |(programs, _)| programs.misses())
}

// --- processes -----------------------------------------------------------------------------------

pub(crate) fn pidfd(process: u32) -> OwnedFd {
    // SAFETY: the call takes two numbers and gives a descriptor.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    assert!(opened >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: opened just now.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(opened).unwrap()) }
}

/// What the programs date records by, in nanoseconds.
#[allow(dead_code, reason = "not every test looks at records")]
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) }, 0);
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap()
}

/// Runs `change` in a child whose number is `number`: only system calls, because the child is a copy of one thread.
/// `None` where that may not be chosen.
#[allow(dead_code, reason = "not every test looks at records")]
pub(crate) fn as_process(number: i32, change: impl FnOnce()) -> Option<()> {
    let numbers = [number];
    let mut arguments = [0_u64; 10];
    arguments[4] = u64::try_from(libc::SIGCHLD).unwrap();
    arguments[8] = numbers.as_ptr().expose_provenance() as u64;
    arguments[9] = 1;
    // SAFETY: as `fork`: the child has a copy of the memory, and changes it and ends.
    let child =
        unsafe { libc::syscall(libc::SYS_clone3, arguments.as_mut_ptr(), size_of_val(&arguments)) };
    if child == 0 {
        change();
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    if child < 0 {
        eprintln!("skipped: process {number}: {}", std::io::Error::last_os_error());
        return None;
    }
    let mut status = -1;
    // SAFETY: a child of ours.
    assert_eq!(i64::from(unsafe { libc::waitpid(number, &raw mut status, 0) }), child);
    assert_eq!(status, 0);
    Some(())
}

/// The number of the running thread.
#[allow(dead_code, reason = "not every test looks at records")]
pub(crate) fn thread_number() -> i32 {
    // SAFETY: no precondition.
    unsafe { libc::gettid() }
}

/// Whether a thread of this process waits for a descriptor.
pub(crate) fn polls(thread: &std::ffi::OsStr) -> bool {
    let place = std::path::Path::new("/proc/self/task").join(thread).join("syscall");
    let call = std::fs::read_to_string(place).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse().ok());
    [libc::SYS_poll, libc::SYS_ppoll].map(Some).contains(&number)
}

pub(crate) fn write_line(child: &mut Child) {
    child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
}

pub(crate) fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// How many threads of this process are a monitor's.
pub(crate) fn keepers() -> usize {
    keeper_names().len()
}

/// Their names below `/proc/self/task`.
pub(crate) fn keeper_names() -> HashSet<OsString> {
    let named = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.unwrap();
        // It may have ended since it was listed.
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| name.starts_with("pinfold-keeper")).then(|| task.file_name())
    };
    std::fs::read_dir("/proc/self/task").unwrap().filter_map(named).collect()
}

/// From now on a thread of this process that sleeps by the clock is killed.
pub(crate) fn kill_threads_that_sleep() {
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt,
        jf,
        k,
    };
    let sleep = u32::try_from(libc::SYS_clock_nanosleep).unwrap();
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, sleep, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_THREAD, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    let (set, all) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the program and its statements are read during the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::syscall(libc::SYS_seccomp, set, all, &raw const program), 0);
    }
}

pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A view of some process, looked at from here.
pub(crate) struct Watched<'p> {
    programs: &'p Programs,
    id: ViewId,
    changes: &'static Changes,
    wishes: &'static WatchFilter,
}

impl<'p> Watched<'p> {
    pub(crate) fn of(programs: &'p Programs, process: BorrowedFd<'_>) -> Self {
        let view = programs.view(process).unwrap();
        let (id, view) = (view.id(), view.into_parts());
        // SAFETY: both have every content, and are never unmapped.
        let (changes, wishes) = unsafe {
            (
                &*map(&view.changes, size_of::<Changes>(), libc::PROT_READ).unwrap().cast(),
                &*map(&view.wishes, size_of::<WatchFilter>(), libc::PROT_READ | libc::PROT_WRITE)
                    .unwrap()
                    .cast(),
            )
        };
        Self { programs, id, changes, wishes }
    }

    pub(crate) fn with_id(programs: &'p Programs, process: BorrowedFd<'_>) -> (Self, ViewId) {
        let watched = Self::of(programs, process);
        let id = watched.id;
        (watched, id)
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.changes.sequence.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.sequence() & CLOSED != 0
    }

    /// Who made, by thread and depth, the records that say that exactly this range is changing, since some moment of this minute.
    #[allow(dead_code, reason = "not every test looks at records")]
    pub(crate) fn owners(&self, range: AddressRange) -> Vec<u64> {
        let now = now();
        let of_range = |record: &&Record| {
            let [start, end, since] =
                [&record.start, &record.end, &record.since].map(|word| word.load(Ordering::SeqCst));
            let recent = since <= now && now - since < 60 * 1_000_000_000;
            (start, end) == (range.start() as u64, range.end() as u64) && recent
        };
        let owners = self.changes.records.iter().filter(of_range);
        owners
            .map(|record| record.owner.load(Ordering::SeqCst))
            .filter(|&owner| owner != 0)
            .map(|owner| self.programs.caller_of(owner).unwrap() | owner & WRITING)
            .collect()
    }

    /// The owners of all records, as they stand there.
    #[allow(dead_code, reason = "not every test looks at records")]
    pub(crate) fn veiled_owners(&self) -> Vec<u64> {
        let owners = self.changes.records.iter().map(|record| record.owner.load(Ordering::SeqCst));
        owners.filter(|&owner| owner != 0).collect()
    }

    /// Whether some change found no record.
    #[allow(dead_code, reason = "not every test looks at records")]
    pub(crate) fn is_crowded(&self) -> bool {
        self.changes.crowded.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn wish(&self, range: AddressRange) {
        for (word, bit) in blocks(range.start() as u64, range.end() as u64) {
            let word: &AtomicU32 = &self.wishes.blocks[word];
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.programs.forget(self.id);
    }
}

fn map(file: &OwnedFd, bytes: usize, rights: i32) -> Option<*mut u8> {
    let none = std::ptr::null_mut();
    // SAFETY: the kernel picks the address.
    let start = unsafe { libc::mmap(none, bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    (start != libc::MAP_FAILED).then_some(start.cast())
}

/// Whether a page of `file` can be mapped with these rights.
pub(crate) fn maps(file: &OwnedFd, rights: i32) -> bool {
    map(file, page(), rights).is_some()
}

/// Whether what is mapped for reading can be made writable.
pub(crate) fn becomes_writable(file: &OwnedFd) -> bool {
    let start = map(file, page(), libc::PROT_READ).unwrap();
    // SAFETY: mapped just now, and not read.
    unsafe { libc::mprotect(start.cast(), page(), libc::PROT_READ | libc::PROT_WRITE) == 0 }
}

// --- memory --------------------------------------------------------------------------------------

/// One whole GiB of a shared file of huge pages, without a page in it: a table of entries that processes share.
pub(crate) struct Gigantic {
    range: AddressRange,
    file: OwnedFd,
}

impl Gigantic {
    const BYTES: usize = 1 << 30;

    /// `None` where there is no such file system.
    pub(crate) fn new() -> Option<Self> {
        Self::amid(0)
    }

    /// With so many bytes more on either side, in the same mapping.
    pub(crate) fn amid(around: usize) -> Option<Self> {
        let (file, bytes) = (memfd(libc::MFD_HUGETLB), Self::BYTES + 2 * around);
        let (none, rights) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
        let reserved = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let shared = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: a fresh mapping, and a part of it replaced. It stays: a few tables.
        let mapped = unsafe {
            libc::ftruncate(file.as_raw_fd(), bytes.try_into().unwrap());
            let room = libc::mmap(std::ptr::null_mut(), 3 * Self::BYTES, none, reserved, -1, 0);
            let aligned = room.map_addr(|at| (at + around).next_multiple_of(Self::BYTES) - around);
            libc::mmap(aligned, bytes, rights, shared, file.as_raw_fd(), 0)
        };
        (mapped != libc::MAP_FAILED).then_some(())?;
        let range = AddressRange::new(mapped.expose_provenance(), bytes).unwrap();
        Some(Self { range, file })
    }

    pub(crate) const fn range(&self) -> AddressRange {
        self.range
    }

    fn first(&self) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.range.start())
    }

    /// Discards its second huge page.
    pub(crate) fn discard_second(&self) {
        let second = self.first().wrapping_byte_add(2 << 20);
        // SAFETY: the mapping is this value's.
        assert_eq!(unsafe { libc::madvise(second, 2 << 20, libc::MADV_DONTNEED) }, 0);
    }

    /// Discards all of it.
    pub(crate) fn discard_all(&self) {
        // SAFETY: the mapping is this value's.
        let done = unsafe { libc::madvise(self.first(), self.range.len(), libc::MADV_DONTNEED) };
        assert_eq!(done, 0);
    }

    /// Takes the right to write to all of it away, and gives it back: no mapping is split.
    pub(crate) fn protect_all(&self) {
        for rights in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: the mapping is this value's.
            assert_eq!(unsafe { libc::mprotect(self.first(), Self::BYTES, rights) }, 0);
        }
    }

    /// Has faults on pages that the file has reported to a userfaultfd, for a moment.
    pub(crate) fn report_faults(&self) {
        const API: u64 = 0xaa;
        const MINOR_HUGETLBFS: u64 = 1 << 9;
        const MODE_MINOR: u64 = 1 << 2;
        let (mut api, at) = ([API, MINOR_HUGETLBFS, 0], self.range.start() as u64);
        let mut register = [at, Self::BYTES as u64, MODE_MINOR, 0];
        // SAFETY: three words and four words, as the requests' numbers say.
        unsafe {
            let opened = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            assert!(opened >= 0, "{}", std::io::Error::last_os_error());
            let faults = OwnedFd::from_raw_fd(i32::try_from(opened).unwrap());
            assert_eq!(libc::ioctl(faults.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()), 0);
            assert_eq!(libc::ioctl(faults.as_raw_fd(), 0xc020_aa00, register.as_mut_ptr()), 0);
        }
    }

    /// Punches a hole of one huge page into the file.
    pub(crate) fn punch_first(&self) {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain numbers.
        assert_eq!(unsafe { libc::fallocate(self.file.as_raw_fd(), hole, 0, 2 << 20) }, 0);
    }

    /// Has the memory of its second huge page fail. Whether it did: root may, where there is a page and the
    /// kernel knows of such failures.
    pub(crate) fn poison_second(&self) -> bool {
        let second = self.first().wrapping_byte_add(2 << 20);
        // SAFETY: the mapping is this value's; what is lost is a page of its own.
        let advise = |advice| unsafe { libc::madvise(second, 2 << 20, advice) == 0 };
        advise(libc::MADV_POPULATE_WRITE) && advise(libc::MADV_HWPOISON)
    }

    /// Takes rights to its first huge page away, which splits the mapping.
    pub(crate) fn protect_first(&self) {
        // SAFETY: the mapping is this value's.
        assert_eq!(unsafe { libc::mprotect(self.first(), 2 << 20, libc::PROT_READ) }, 0);
    }
}

/// Calls `act` on each processor that this thread may run on, and leaves it free to run on all of these. A processor has a
/// batch of pages that reclaim does not find yet, which `madvise` empties only where it runs.
fn on_each_processor(act: impl Fn()) {
    // SAFETY: a set of processors is plain bits, and none is a set.
    let (mut free, none) = unsafe { std::mem::zeroed::<(libc::cpu_set_t, libc::cpu_set_t)>() };
    let bytes = size_of_val(&free);
    let stay = |on: &libc::cpu_set_t| {
        // SAFETY: reads a set of this length.
        assert_eq!(unsafe { libc::sched_setaffinity(0, bytes, std::ptr::from_ref(on)) }, 0);
    };
    // SAFETY: writes at most a set of this length.
    assert_eq!(unsafe { libc::sched_getaffinity(0, bytes, &raw mut free) }, 0);
    // SAFETY: a number below the set's length.
    let may_run = |processor: &usize| unsafe { libc::CPU_ISSET(*processor, &free) };
    for processor in (0..8 * bytes).filter(may_run) {
        let mut one = none;
        // SAFETY: a number below the set's length.
        unsafe { libc::CPU_SET(processor, &mut one) };
        stay(&one);
        act();
    }
    stay(&free);
}

/// Pins pages as long as the ring lives.
#[allow(dead_code, reason = "not every test pins")]
pub(crate) fn pin(ring: &io_uring::IoUring, range: AddressRange) {
    let start = std::ptr::with_exposed_provenance_mut(range.start());
    let buffer = libc::iovec { iov_base: start, iov_len: range.len() };
    // SAFETY: only a request touches the memory, which its maker answers for (`SubmissionQueue::push`).
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
}

/// Memory to change; there are no references into it. It is unmapped by the test, or never.
pub(crate) struct Memory {
    start: usize,
    bytes: usize,
}

impl Memory {
    const RIGHTS: i32 = libc::PROT_READ | libc::PROT_WRITE;

    fn map(bytes: usize, kind: i32, file: i32) -> Option<Self> {
        let none = std::ptr::null_mut();
        // SAFETY: the kernel picks the address.
        let start = unsafe { libc::mmap(none, bytes, Self::RIGHTS, kind, file, 0) };
        let memory = Self { start: start.expose_provenance(), bytes };
        (start != libc::MAP_FAILED).then_some(memory)
    }

    fn touched(mapped: Option<Self>) -> Self {
        let memory = mapped.unwrap();
        memory.touch();
        memory
    }

    pub(crate) fn private(pages: usize) -> Self {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::touched(Self::map(pages * page(), kind, -1))
    }

    /// Address space without a page.
    pub(crate) fn reserved(pages: usize) -> Self {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let memory = Self::map(pages * page(), kind, -1).unwrap();
        // Huge pages would be had by a touch of one.
        memory.advise(libc::MADV_NOHUGEPAGE);
        memory
    }

    pub(crate) fn of_memfd(pages: usize) -> (Self, OwnedFd) {
        let file = memfd(0);
        truncate(&file, pages);
        let mapped = Self::map(pages * page(), libc::MAP_SHARED, file.as_raw_fd());
        (Self::touched(mapped), file)
    }

    pub(crate) fn of_file_privately(pages: usize) -> (Self, OwnedFd) {
        let file = memfd(0);
        truncate(&file, pages);
        let mapped = Self::map(pages * page(), libc::MAP_PRIVATE, file.as_raw_fd());
        (Self::touched(mapped), file)
    }

    /// One huge page, if there is one.
    pub(crate) fn huge() -> Option<(Self, OwnedFd)> {
        let file = memfd(libc::MFD_HUGETLB);
        let bytes = 2 << 20;
        // SAFETY: plain numbers.
        (unsafe { libc::ftruncate(file.as_raw_fd(), bytes) } == 0).then_some(())?;
        let memory =
            Self::map(usize::try_from(bytes).unwrap(), libc::MAP_SHARED, file.as_raw_fd())?;
        memory.touch();
        Some((memory, file))
    }

    pub(crate) fn of_named_file(pages: usize) -> (Self, PathBuf) {
        let path = std::env::temp_dir().join(format!("pinfold-ebpf-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = OwnedFd::from(file.unwrap());
        truncate(&file, pages);
        let mapped = Self::map(pages * page(), libc::MAP_SHARED, file.as_raw_fd());
        (Self::touched(mapped), path)
    }

    /// Two pages of instructions that do nothing, as a program's text.
    pub(crate) fn of_text() -> (Self, PathBuf) {
        let path = std::env::temp_dir().join(format!("pinfold-text-{}", std::process::id()));
        std::fs::write(&path, vec![0x90; 2 * page()]).unwrap();
        let file = File::open(&path).unwrap();
        let rights = libc::PROT_READ | libc::PROT_EXEC;
        let none = std::ptr::null_mut();
        // SAFETY: the kernel picks the address.
        let start =
            unsafe { libc::mmap(none, 2 * page(), rights, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let memory = Self { start: start.expose_provenance(), bytes: 2 * page() };
        memory.read();
        (memory, path)
    }

    /// Has a page under every address, by reading.
    pub(crate) fn read(&self) {
        for offset in (0..self.bytes).step_by(page()) {
            // SAFETY: mapped for reading.
            unsafe { self.at(offset).cast::<u8>().read_volatile() };
        }
    }

    pub(crate) fn protect_page(&self, index: usize) {
        // SAFETY: ours; no thread touches it meanwhile.
        let done = unsafe { libc::mprotect(self.at(index * page()), page(), libc::PROT_READ) };
        assert_eq!(done, 0);
    }

    /// Has the kernel reclaim it. What a device has pinned would stay.
    pub(crate) fn reclaim(&self) {
        // Both calls on one processor: the first leaves the page to that one's batch, and the second empties no other.
        let free = || {
            self.touch();
            self.advise(libc::MADV_FREE);
            self.advise(libc::MADV_PAGEOUT);
        };
        let reclaimed = (0..100).any(|_| {
            on_each_processor(free);
            !self.is_touched()
        });
        assert!(reclaimed);
    }

    /// Has the kernel take a file's pages from their addresses, which this thread may have touched on another processor.
    pub(crate) fn page_out(&self) {
        on_each_processor(|| self.advise(libc::MADV_PAGEOUT));
    }

    /// Whether its first byte is still that of [`touch`](Self::touch).
    pub(crate) fn is_touched(&self) -> bool {
        // SAFETY: mapped for reading.
        unsafe { self.at(0).cast::<u8>().read_volatile() == 1 }
    }

    pub(crate) fn range(&self) -> AddressRange {
        AddressRange::new(self.start, self.bytes).unwrap()
    }

    pub(crate) fn pages(&self, first: usize, count: usize) -> AddressRange {
        AddressRange::new(self.start + first * page(), count * page()).unwrap()
    }

    /// Some of its pages as memory of their own.
    pub(crate) fn part(&self, first: usize, count: usize) -> Self {
        Self { start: self.pages(first, count).start(), bytes: count * page() }
    }

    fn at(&self, offset: usize) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    pub(crate) fn touch(&self) {
        self.touch_each(1);
    }

    /// Touches one page of so many.
    pub(crate) fn touch_each(&self, pages: usize) {
        for offset in (0..self.bytes).step_by(pages * page()) {
            // SAFETY: mapped for writing, and without references into it.
            unsafe { self.at(offset).cast::<u8>().write_volatile(1) };
        }
    }

    pub(crate) fn unmap(&self, first: usize, count: usize) {
        // SAFETY: ours; there are no references into it.
        assert_eq!(unsafe { libc::munmap(self.at(first * page()), count * page()) }, 0);
    }

    pub(crate) fn raw_unmap(&self) {
        // SAFETY: ours; there are no references into it.
        assert_eq!(unsafe { libc::syscall(libc::SYS_munmap, self.at(0), self.bytes) }, 0);
    }

    pub(crate) fn map_over(&self) {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: ours; there are no references into it.
        let start = unsafe { libc::mmap(self.at(0), self.bytes, Self::RIGHTS, kind, -1, 0) };
        assert_eq!(start.addr(), self.start);
        self.touch();
    }

    pub(crate) fn advise(&self, advice: i32) {
        // SAFETY: ours; there are no references into it.
        let done = unsafe { libc::madvise(self.at(0), self.bytes, advice) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    pub(crate) fn can_guard(&self) -> bool {
        const GUARD_INSTALL: i32 = 102;
        // SAFETY: ours; there are no references into it, and no thread touches it again.
        unsafe { libc::madvise(self.at(0), self.bytes, GUARD_INSTALL) == 0 }
    }

    pub(crate) fn protect(&self) {
        // SAFETY: ours; no thread touches it meanwhile.
        unsafe {
            assert_eq!(libc::mprotect(self.at(0), self.bytes, libc::PROT_READ), 0);
            assert_eq!(libc::mprotect(self.at(0), self.bytes, Self::RIGHTS), 0);
        }
    }

    fn remap(&self, to_bytes: usize, how: i32, over: *mut libc::c_void) {
        // SAFETY: ours, as is what it is moved over; there are no references into either.
        let moved =
            unsafe { libc::syscall(libc::SYS_mremap, self.at(0), self.bytes, to_bytes, how, over) };
        assert!(moved > 0, "{}", std::io::Error::last_os_error());
    }

    pub(crate) fn move_away(&self) {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP;
        self.remap(self.bytes, how, std::ptr::null_mut());
    }

    pub(crate) fn move_over(&self, over: &Self) {
        self.remap(self.bytes, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, over.at(0));
    }

    /// Moves the pages only: both stay mapped.
    pub(crate) fn move_pages_over(&self, over: &Self) {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP | libc::MREMAP_FIXED;
        self.remap(self.bytes, how, over.at(0));
    }

    pub(crate) fn shrink(&self, pages: usize) {
        self.remap(pages * page(), 0, std::ptr::null_mut());
    }

    pub(crate) fn attach_over(&self) {
        // SAFETY: ours; there are no references into it. The segment goes with its last attachment.
        unsafe {
            let segment = libc::shmget(libc::IPC_PRIVATE, self.bytes, 0o600);
            let start = libc::shmat(segment, self.at(0), libc::SHM_REMAP);
            assert_eq!(start.addr(), self.start, "{}", std::io::Error::last_os_error());
            libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut());
        }
        self.touch();
    }

    pub(crate) fn detach(&self) {
        // SAFETY: attached by `attach_over`; there are no references into it.
        assert_eq!(unsafe { libc::shmdt(self.at(0)) }, 0);
    }
}

/// Pages of a block device in memory, if there is one.
pub(crate) fn of_block_device(pages: usize) -> Option<(Memory, OwnedFd)> {
    // Where there is no such device, opening it fails.
    let _ = std::process::Command::new("modprobe").args(["brd", "rd_nr=2"]).status();
    let file = File::options().read(true).write(true).open("/dev/ram0");
    let Ok(file) = file.inspect_err(|error| eprintln!("skipped: /dev/ram0: {error}")) else {
        return None;
    };
    let file = OwnedFd::from(file);
    let mapped = Memory::map(pages * page(), libc::MAP_SHARED, file.as_raw_fd());
    Some((Memory::touched(mapped), file))
}

fn done(command: &[&str]) -> bool {
    let status = std::process::Command::new(command[0]).args(&command[1..]).status();
    status.is_ok_and(|status| status.success())
}

/// Pages of a file on an xfs that are as on the disk; the kernel keeps several of them as one folio.
pub(crate) fn of_xfs(pages: usize) -> Option<Memory> {
    let named =
        |end: &str| std::env::temp_dir().join(format!("pinfold-{}.{end}", std::process::id()));
    let (image, place) = (named("image"), named("xfs"));
    let [image_name, place_name] = [&image, &place].map(|path| path.to_str().unwrap());
    std::fs::create_dir_all(&place).unwrap();
    File::create(&image).unwrap().set_len(512 << 20).unwrap();
    // Where there are no loop devices, mounting fails.
    let made = done(&["modprobe", "loop"])
        && done(&["mkfs.xfs", "-q", "-f", image_name])
        && done(&["mount", "-o", "loop", image_name, place_name]);
    std::fs::remove_file(&image).unwrap();
    if !made {
        eprintln!("skipped: no xfs can be made and mounted here");
        return None;
    }
    let path = place.join("file");
    std::fs::write(&path, vec![1; pages * page()]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    assert!(done(&["umount", "--lazy", place_name]));
    let memory = Memory::map(pages * page(), libc::MAP_SHARED, file.as_raw_fd()).unwrap();
    memory.read();
    Some(memory)
}

/// So many times 2 MiB of a file in a tmpfs with huge pages, each behind one entry.
pub(crate) fn of_huge_tmpfs(count: usize) -> Option<Memory> {
    const HUGE: usize = 2 << 20;
    let bytes = count * HUGE;
    let place = std::env::temp_dir().join(format!("pinfold-huge-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let path = place.to_str().unwrap();
    if !done(&["mount", "-t", "tmpfs", "-o", "huge=always,size=8m", "tmpfs", path]) {
        eprintln!("skipped: no tmpfs can be mounted here");
        return None;
    }
    let file = File::options().read(true).write(true).create_new(true).open(place.join("file"));
    let file = OwnedFd::from(file.unwrap());
    assert!(done(&["umount", "--lazy", path]));
    truncate(&file, bytes / page());
    // One huge page more of address space than needed has an aligned place in it.
    let around = Memory::private((bytes + HUGE) / page());
    let start = around.start.next_multiple_of(HUGE);
    let (kind, at) =
        (libc::MAP_SHARED | libc::MAP_FIXED, std::ptr::with_exposed_provenance_mut(start));
    // SAFETY: over private memory of ours, into which there are no references.
    let mapped = unsafe { libc::mmap(at, bytes, Memory::RIGHTS, kind, file.as_raw_fd(), 0) };
    assert_eq!(mapped.addr(), start);
    let memory = Memory { start, bytes };
    memory.touch();
    let table = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = table.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
    let huge = lines.find(|line| line.starts_with("ShmemPmdMapped:"));
    if huge.is_none_or(|line| !line.ends_with(&format!(" {} kB", bytes >> 10))) {
        eprintln!("skipped: the kernel has no huge page to spare for a file");
        return None;
    }
    Some(memory)
}

fn memfd(flags: u32) -> OwnedFd {
    // SAFETY: the name ends with a zero byte.
    let opened = unsafe { libc::memfd_create(c"pinfold-test".as_ptr(), flags) };
    assert!(opened >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: opened just now.
    unsafe { OwnedFd::from_raw_fd(opened) }
}

pub(crate) fn truncate(file: &OwnedFd, pages: usize) {
    let length = i64::try_from(pages * page()).unwrap();
    // SAFETY: plain numbers; the pages are not read.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), length) }, 0);
}

pub(crate) fn punch(file: &OwnedFd, first: usize, count: usize) {
    let at = |pages: usize| i64::try_from(pages * page()).unwrap();
    let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: plain numbers; the pages are not read.
    assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), how, at(first), at(count)) }, 0);
}
