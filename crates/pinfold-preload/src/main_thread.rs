//! The end of a program whose `main` leaves by `pthread_exit`, or is cancelled.
//!
//! The C library ends such a process when its last thread ends, as by `exit(0)`, and counts this library's threads
//! among them. So the first thread notes that it leaves, by a key of thread-specific data that is destroyed then, and one
//! more thread, `pinfold-end`, looks until the program's threads have ended, and has `exit(0)` called then.
//!
//! Either the thread that leaves or the one for which threads of the library's begin starts it: the one that comes second,
//! as one word says ([`Progress`]). Where it cannot be started (`RLIMIT_NPROC`, `RLIMIT_AS`), the first thread looks itself,
//! behind the destructors of the program's keys, and ends with the process; it does so as well while another thread's start
//! of it is under way, because that may fail. Once the first thread has ended, the process goes on. No thread that has begun can do it: those of the library's have tables of descriptors of their own, and the
//! program's functions at the exit use its files.
//!
//! The program's functions that run at the exit do so on one more thread, whose stack is as long as those of the
//! program's threads; on the thread that looked, which has 256 KiB, if that one cannot be started. The C library runs them
//! on the program's last thread. The signals that are blocked there are those that the first thread had blocked when it
//! left: what other threads have blocked the kernel says in `/proc` alone, and each thread begins with what the thread that
//! started it has blocked. So signals that a program leaves to one thread, and blocks before it starts any, are blocked
//! at the exit as well, and handlers for others can run there as on its own threads.
//!
//! The kernel says how many threads there are (the links of `/proc/self/task`), and that the first one has ended (it
//! has no executable any more). Where `/proc` is not mounted, or the program has set a filter of system calls, the process goes on.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` for the key, for threads that are none of the library's lean ones, and to call `exit`.

#![allow(unsafe_code)]

use crate::sandbox;
use libc::{c_int, c_void};
use pinfold_kernel::Errno;
use pinfold_kernel::descriptor::read_link;
use pinfold_kernel::signal::SignalsBlocked;
use pinfold_kernel::thread::{
    own_threads, sleep, stack_with_variables, thread_id, threads_of_process,
};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How often a thread looks at most, and at first.
const PACE: Duration = Duration::from_millis(50);
const FIRST_PACE: Duration = Duration::from_millis(1);

/// The stack of the thread that looks, besides what the variables of threads take.
const STACK: usize = 256 << 10;

/// How often the C library calls the functions of a thread's keys at most (`PTHREAD_DESTRUCTOR_ITERATIONS`).
const ROUNDS: usize = 4;

/// glibc has memory for as many keys in each thread (`PTHREAD_KEY_2NDLEVEL_SIZE`), and allocates it for others.
const KEYS_WITHOUT_MEMORY: libc::pthread_key_t = 32;

/// Made as the library is loaded, by one thread; `None` without a free one.
static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

/// How far a process has come: its number in the upper half, and flags. Of another process, none of them.
///
/// One word, so that of two threads one comes second, and sees what the other has noted.
struct Progress(AtomicU64);

/// Threads of this library's begin.
const BEGUN: u64 = 1;
/// The first thread leaves, or has ended.
const LEFT: u64 = 1 << 1;
/// A thread starts the one that looks.
const STARTING: u64 = 1 << 2;
/// That one was started.
const LOOKS: u64 = 1 << 3;

impl Progress {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Before threads of the library's begin. `start` starts the thread that looks; false if it cannot be started.
    fn begin(&self, process: u32, start: impl FnOnce() -> bool) {
        if self.add(process, BEGUN) & LEFT != 0 {
            self.start(process, start);
        }
    }

    /// The first thread leaves.
    fn leave(&self, process: u32, start: impl FnOnce() -> bool) {
        if self.add(process, LEFT) & BEGUN != 0 {
            self.start(process, start);
        }
    }

    /// By one thread at a time, and once in a process unless it fails.
    fn start(&self, process: u32, start: impl FnOnce() -> bool) {
        if self.add(process, STARTING) & STARTING != 0 {
            return;
        }
        if start() {
            self.add(process, LOOKS);
        } else {
            self.remove(process, STARTING);
        }
    }

    /// Whether a thread has to look, and none was started for it so far.
    fn is_unwatched(&self, process: u32) -> bool {
        // Acquire: pairs with `add`.
        flags_of(self.0.load(Ordering::Acquire), process) & (BEGUN | LOOKS) == BEGUN
    }

    /// The flags before.
    fn add(&self, process: u32, flag: u64) -> u64 {
        self.change(process, |flags| flags | flag)
    }

    fn remove(&self, process: u32, flag: u64) {
        self.change(process, |flags| flags & !flag);
    }

    fn change(&self, process: u32, flags: impl Fn(u64) -> u64) -> u64 {
        let change = |word| Some(u64::from(process) << 32 | flags(flags_of(word, process)));
        // AcqRel: a thread that sees a flag sees what was done before it was set, `MASK` for one.
        let before = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        flags_of(before.unwrap_or_else(|word| word), process)
    }
}

fn flags_of(word: u64, process: u32) -> u64 {
    if word >> 32 == u64::from(process) { word & u64::from(u32::MAX) } else { 0 }
}

static PROGRESS: Progress = Progress::new();

/// The signals that the first thread had blocked when it left, as the kernel has them.
static MASK: AtomicU64 = AtomicU64::new(0);

/// The library is loaded: on the first thread. No system call.
pub(crate) fn note_start() {
    let mut key = MaybeUninit::uninit();
    // SAFETY: the call fills the key if it returns 0.
    let make = || unsafe {
        let made = libc::pthread_key_create(key.as_mut_ptr(), Some(leaving)) == 0;
        made.then(|| key.assume_init())
    };
    KEY.get_or_init(make);
    await_end();
    // SAFETY: the function stays, as this library does. Without it a child is as one of `_Fork`.
    unsafe { libc::pthread_atfork(None, None, Some(child_begins)) };
}

/// In a forked child: its first thread may have been any of its parent's.
unsafe extern "C" fn child_begins() {
    sandbox::forget_process();
    // The program's allocator may be locked here.
    if KEY.get().copied().flatten().is_some_and(|key| key < KEYS_WITHOUT_MEMORY) {
        await_end();
    }
}

/// Before threads of this library's begin in this process.
pub(crate) fn threads_begin() {
    let process = std::process::id();
    // A forked child's that the C library did not fork, or with a high key.
    if thread_id() == process {
        await_end();
    }
    // Where the thread cannot be started the process goes on, unless the first thread is still there.
    PROGRESS.begin(process, start_looking);
}

/// Has [`leaving`] called when the calling thread ends, if there is a key and memory for its value. One that ends already,
/// and registers in a destructor of the program's, goes on with its rounds: it would have no last one.
fn await_end() {
    if round() == 0 {
        set_round(1);
    }
}

/// What the calling thread has from [`set_round`].
fn round() -> usize {
    // SAFETY: the key was made; a thread without a value has null.
    let round = |key| unsafe { libc::pthread_getspecific(key) }.addr();
    KEY.get().copied().flatten().map_or(0, round)
}

/// What [`leaving`] is called with next; nothing without a key.
fn set_round(round: usize) {
    let value = ptr::without_provenance::<c_void>(round);
    if let Some(key) = KEY.get().copied().flatten() {
        // SAFETY: the value is a number, which no function takes for an address.
        unsafe { libc::pthread_setspecific(key, value) };
    }
}

/// The first thread ends. Functions of the program may still run on it, for keys of its own.
unsafe extern "C" fn leaving(round: *mut c_void) {
    match round.addr() {
        1 => left(),
        // The program's keys have their turn first.
        round if round < ROUNDS => set_round(round + 1),
        _ => stay(),
    }
}

fn left() {
    // Under a filter of the program's own no thread will ever look, and the filter may end the process at any of this.
    if sandbox::is_seen() {
        return;
    }
    // Relaxed: published by the flag.
    MASK.store(blocked_signals(), Ordering::Relaxed);
    PROGRESS.leave(std::process::id(), start_looking);
    // It may have to look itself, now or by the last round.
    set_round(2);
}

/// Looks itself for as long as no other thread does, and does not come back but then, or where the program has forbidden to
/// ask.
fn stay() {
    let process = std::process::id();
    if !PROGRESS.is_unwatched(process) {
        return;
    }
    // The program's handlers run on its other threads: this one's data is destroyed.
    let _blocked = SignalsBlocked::new();
    let mut pace = FIRST_PACE;
    while !sandbox::is_the_program_s() && PROGRESS.is_unwatched(process) {
        // This one.
        if program_has(1) {
            exit();
        }
        pace = paced(pace);
    }
}

/// Waits for as long, and says how long to wait next.
fn paced(pace: Duration) -> Duration {
    sleep(pace);
    PACE.min(pace * 2)
}

/// Starts the thread that looks. False if it cannot be started, or may not ask.
fn start_looking() -> bool {
    extern "C" fn body(_: *mut c_void) -> *mut c_void {
        // By its number: a program may have a function of its own under this name.
        // SAFETY: a C string.
        unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_NAME, c"pinfold-end".as_ptr()) };
        let mut pace = FIRST_PACE;
        // This thread, and the first one.
        while !(program_has(2) && first_has_ended()) {
            pace = paced(pace);
        }
        end_process();
        ptr::null_mut()
    }
    !sandbox::is_the_program_s() && start(body, Some(STACK))
}

/// Starts a thread with all signals blocked and a stack of `stack` bytes, or one as long as the program's threads have.
/// False if it cannot be started.
fn start(body: extern "C" fn(*mut c_void) -> *mut c_void, stack: Option<usize>) -> bool {
    let _blocked = SignalsBlocked::new();
    let mut attributes = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the attributes are made before they are used, and ended once; the C library fills the thread's name, and
    // `body` takes nothing.
    unsafe {
        let attributes = attributes.as_mut_ptr();
        if libc::pthread_attr_init(attributes) != 0 {
            return false;
        }
        let is_set = stack.is_none_or(|stack| {
            let stack = stack_with_variables(attributes, stack);
            libc::pthread_attr_setstacksize(attributes, stack) == 0
        });
        let thread = thread.as_mut_ptr();
        let is_started =
            is_set && libc::pthread_create(thread, attributes, body, ptr::null_mut()) == 0;
        libc::pthread_attr_destroy(attributes);
        is_started
    }
}

/// Whether there are `others` threads besides this library's own, and the program has not forbidden to ask. False if the
/// kernel does not say.
fn program_has(others: usize) -> bool {
    let ours = own_threads();
    let is_asked = !sandbox::is_the_program_s();
    let has = is_asked && threads_of_process() == Some(ours.count() + others);
    // One of them that ended before the question would have been taken for one of the program's that had.
    has && own_threads() == ours
}

/// Whether the first thread has no memory any more, and runs no more instructions.
fn first_has_ended() -> bool {
    read_link(c"/proc/self/exe", &mut [0]) == Err(Errno(libc::ENOENT))
}

/// Behind the program's last thread: its functions run on a thread that has a stack as its own ones, or on this one.
fn end_process() {
    extern "C" fn body(_: *mut c_void) -> *mut c_void {
        exit()
    }
    if !start(body, None) {
        exit();
    }
}

fn exit() -> ! {
    // Relaxed: published by the start of the thread.
    block_signals(MASK.load(Ordering::Relaxed));
    // SAFETY: what the C library does after its last thread: the program's functions run, and the process ends.
    unsafe { libc::exit(0) }
}

fn blocked_signals() -> u64 {
    let mut mask = 0;
    signal_mask(ptr::null(), &raw mut mask);
    mask
}

fn block_signals(mask: u64) {
    signal_mask(&raw const mask, ptr::null_mut());
}

fn signal_mask(set: *const u64, before: *mut u64) {
    let how: c_int = libc::SIG_SETMASK;
    // SAFETY: the kernel reads the one and writes the other, if they are there; each has as many bytes as is said.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, set, before, size_of::<u64>()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: u32 = 7;

    fn too_many() -> bool {
        panic!("a start too many")
    }

    #[test]
    fn the_second_of_the_two_threads_starts_the_one_that_looks() {
        let progress = Progress::new();
        progress.begin(PROCESS, too_many);
        assert!(progress.is_unwatched(PROCESS));
        progress.leave(PROCESS, || true);
        assert!(!progress.is_unwatched(PROCESS));
        progress.begin(PROCESS, too_many);
        let progress = Progress::new();
        progress.leave(PROCESS, too_many);
        assert!(!progress.is_unwatched(PROCESS), "nothing of the library's keeps the process");
        progress.begin(PROCESS, || true);
        assert!(!progress.is_unwatched(PROCESS));
    }

    /// The first thread is in the destructors of its keys, and asks again behind them.
    #[test]
    fn a_first_thread_whose_successor_is_started_in_vain_is_the_one_that_looks() {
        let progress = Progress::new();
        progress.leave(PROCESS, too_many);
        progress.begin(PROCESS, || {
            assert!(progress.is_unwatched(PROCESS), "while the start is under way");
            false
        });
        assert!(progress.is_unwatched(PROCESS));
        // A later one succeeds.
        progress.begin(PROCESS, || true);
        assert!(!progress.is_unwatched(PROCESS));
    }

    #[test]
    fn a_thread_that_ends_goes_on_with_its_rounds() {
        note_start();
        await_end();
        assert_eq!(round(), 1);
        set_round(ROUNDS);
        await_end();
        assert_eq!(round(), ROUNDS);
        // Nothing ends with this thread.
        set_round(0);
    }

    #[test]
    fn a_start_is_under_way_once() {
        let progress = Progress::new();
        progress.begin(PROCESS, too_many);
        progress.leave(PROCESS, || {
            progress.begin(PROCESS, too_many);
            assert!(progress.is_unwatched(PROCESS));
            true
        });
        assert!(!progress.is_unwatched(PROCESS));
    }

    #[test]
    fn what_another_process_has_noted_is_nothing() {
        let progress = Progress::new();
        progress.begin(PROCESS, too_many);
        progress.leave(PROCESS, || true);
        assert!(!progress.is_unwatched(8));
        progress.begin(8, too_many);
        assert!(progress.is_unwatched(8));
    }
}
