//! Everything of one process; a forked child begins anew, and knows what was its parent's.
//!
//! The first registration that may be kept has the settings parsed. The first that is to be kept starts the
//! monitor and the thread that deregisters; whether to keep is `admission`'s to say.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to keep a process's state behind an atomic pointer: a lock could
//! be found taken for ever in a forked child. And to read the fields of a handle.

#![allow(unsafe_code)]

use crate::admission::Admission;
use crate::apart;
use crate::children::{Children, Name};
use crate::complaint::complain;
use crate::device::{Table, is_marked};
use crate::heap::secure_room;
use crate::holding::is_interrupted;
use crate::keeper::{Keeper, Monitored};
use crate::mapping_room::MappingRoom;
use crate::real::real;
use crate::reasons::{Reason, Reasons};
use crate::report::{Account, Report, Totals};
use crate::settings::{Destination, Settings};
use crate::store::{Key, Limit};
use crate::{environment, main_thread, sandbox, sanitizer, steps};
use pinfold::Config;
use pinfold::allocator::{self, Policy};
use pinfold::budget::Discovery;
use pinfold::limits::Limits;
use pinfold::monitor::{Choice, best_without_loading, notify};
use pinfold::registrar::verbs::ffi::ibv_mr;
use pinfold_kernel::Descriptor;
use pinfold_kernel::futex::{futex_wait, futex_wake};
use pinfold_kernel::mapping::AtomicPage;
use pinfold_kernel::signal::CountedSignal;
use pinfold_kernel::thread::{
    LeanThread, NotCancelled, leave_directory_and_semaphores, run_before_equals,
};
use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// What Pinfold does in this process.
#[allow(clippy::large_enum_variant)] // one in a process
enum Standing {
    /// Nothing: everything passes through.
    Off,
    On(Process),
}

/// A process in which registrations may be kept. Until one is to be, it has no monitor and no thread.
pub(crate) struct Process {
    pub(crate) settings: Settings,
    admission: Admission,
    children: Children,
    /// Why there can be none, if so. Filled by threads of its own process alone, as `reports`: a child has a state
    /// of its own and only reads its parent's, which waits for no thread.
    keeper: OnceLock<Result<Keeper, Reason>>,
    /// Held while the keeper is started; no thread waits for it.
    starting: Mutex<()>,
    /// For each reason, what went to libibverbs as it was.
    passed: [AtomicU64; Reason::ALL.len()],
    /// What [`steps::bypassed`] said when this process, a forked child, began; 0 in others.
    bypassed_before: u64,
    /// Not 0 in the process that made it.
    mark: &'static [AtomicU64; 4],
    /// It may have devices that an earlier process opened, whose registrations the kernel does not end with this one.
    is_child: bool,
    /// The process that this one was forked from, as it was then.
    parent: Option<&'static Process>,
    /// Made by the process whose state this is, and by no other thread that tried to make the state.
    reports: OnceLock<Reports>,
}

/// What reports its end, and its statistics at a signal.
struct Reports {
    statistics: Option<Report>,
    summary: Option<Report>,
}

/// Null, or from a leaked box: what is published here stays, because handles of it may be out.
static CURRENT: AtomicPtr<Standing> = AtomicPtr::new(ptr::null_mut());

/// The number of the process that the library was loaded in.
static LOADED_IN: AtomicU32 = AtomicU32::new(0);

/// The library is loaded.
pub(crate) fn note_start() {
    // Relaxed: a number; a forked child has it with all memory.
    LOADED_IN.store(std::process::id(), Ordering::Relaxed);
}

/// Whether this is a forked child. One that is the first process of a PID namespace, as its parent is of another, is not
/// told from it.
fn is_child() -> bool {
    // Relaxed: as above.
    LOADED_IN.load(Ordering::Relaxed) != std::process::id()
}

impl Process {
    /// This process's state, made by the first call. `None` where everything passes through.
    pub(crate) fn current() -> Option<&'static Self> {
        let current = CURRENT.load(Ordering::Acquire);
        // SAFETY: null or leaked, see `CURRENT`.
        match unsafe { current.as_ref() } {
            Some(Standing::On(process)) if !process.is_forked() => Some(process),
            Some(Standing::Off) => None,
            before => Self::start(current, before),
        }
    }

    /// The state that this process has already, not a forked parent's.
    pub(crate) fn running() -> Option<&'static Self> {
        Self::latest().filter(|process| !process.is_forked())
    }

    /// The state of a process that has registered nothing here, whose end is reported all the same: the rank of a job,
    /// and one whose registrations all went another way.
    pub(crate) fn silent() -> Option<&'static Self> {
        // First: whether there is anything to report is asked on another stack, and with memory of the allocator's, by
        // system calls.
        if !environment::is_set("PINFOLD_SUMMARY") || sandbox::is_the_program_s() {
            return None;
        }
        let is_new = Self::latest().is_none();
        let is_to_report = || {
            let settings = Settings::of_process().ok();
            settings.is_some_and(|settings| settings.rank.is_some()) || steps::bypassed() > 0
        };
        if is_new && secure_room() && apart::run(is_to_report)? { Self::current() } else { None }
    }

    fn latest() -> Option<&'static Self> {
        // SAFETY: null or leaked, see `CURRENT`.
        match unsafe { CURRENT.load(Ordering::Acquire).as_ref() } {
            Some(Standing::On(process)) => Some(process),
            Some(Standing::Off) | None => None,
        }
    }

    /// Whether this is the state of the process that this one was forked from.
    pub(crate) fn is_forked(&self) -> bool {
        // Relaxed: in a child the page was wiped before its first instruction.
        self.mark[0].load(Ordering::Relaxed) == 0
    }

    /// The states that this process was forked from.
    pub(crate) fn inherited() -> impl Iterator<Item = &'static Self> {
        std::iter::successors(Self::latest(), |process| process.parent)
            .filter(|process| process.is_forked())
    }

    #[cold]
    fn start(current: *mut Standing, before: Option<&'static Standing>) -> Option<&'static Self> {
        // Without memory it begins with a later call.
        if sandbox::is_the_program_s() || !secure_room() {
            return None;
        }
        sandbox::note_process();
        let parent = before.and_then(|standing| match standing {
            Standing::On(process) => Some(process),
            Standing::Off => None,
        });
        let begin = || {
            let (standing, complaint) = Self::begin(parent);
            (Box::into_raw(Box::new(standing)), complaint)
        };
        let (fresh, complaint) = apart::run(begin)?;
        // AcqRel: releases the state to a thread that loads the pointer, acquires a winner's.
        match CURRENT.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => _ = apart::run(|| Self::announce(complaint)),
            // SAFETY: the box is still ours alone.
            Err(_) => drop(unsafe { Box::from_raw(fresh) }),
        }
        Self::running()
    }

    /// The state to begin with, and what is to be said about it.
    fn begin(parent: Option<&'static Self>) -> (Standing, Option<String>) {
        match Self::new(parent) {
            Ok(Some(process)) => (Standing::On(process), None),
            Ok(None) => (Standing::Off, None),
            Err(complaint) => (Standing::Off, Some(complaint)),
        }
    }

    /// `None` if it is switched off.
    fn new(parent: Option<&'static Self>) -> Result<Option<Self>, String> {
        let settings = Settings::of_process().map_err(|error| error.to_string())?;
        if !settings.cache {
            return Ok(None);
        }
        let (children, mark) = (Children::new(), wiped_words());
        let (Some(children), Some(mark)) = (children, mark) else {
            return Err("no memory, or a kernel before 4.14".into());
        };
        // Relaxed: this thread's own until the state is published.
        mark[0].store(1, Ordering::Relaxed);
        Ok(Some(Self {
            settings,
            reports: OnceLock::new(),
            admission: Admission::new(),
            children,
            keeper: OnceLock::new(),
            starting: Mutex::new(()),
            passed: [const { AtomicU64::new(0) }; Reason::ALL.len()],
            bypassed_before: if parent.is_some() { steps::bypassed() } else { 0 },
            mark,
            is_child: is_child(),
            parent,
        }))
    }

    /// Says why there is no cache, or begins to listen for the signal.
    fn announce(complaint: Option<String>) {
        if let Some(complaint) = complaint {
            return refuse(&complaint);
        }
        let _opened = Self::running().map(Self::reports);
        if Self::running().is_some_and(|process| process.settings.keep_memory) {
            keep_memory();
        }
        let signal = Self::running().and_then(|process| process.settings.signal);
        if let Some(Err(error)) = signal.map(listen) {
            complain(&format!("pinfold: no statistics by signal: {error}\n"));
        }
    }

    /// What keeps registrations, if it was started.
    pub(crate) fn keeper(&self) -> Option<&Keeper> {
        self.started()?.ok()
    }

    /// The same, or why there is none.
    fn started(&self) -> Option<Result<&Keeper, Reason>> {
        Some(self.keeper.get()?.as_ref().map_err(|&reason| reason))
    }

    /// What is to keep a registration of this, started by the first.
    ///
    /// # Errors
    ///
    /// It is not to be kept, or at this moment cannot be.
    pub(crate) fn keeper_for(&'static self, key: &Key) -> Result<&'static Keeper, Reason> {
        if !self.admission.admits(key, self.settings.keep_from) {
            return Err(Reason::EarlyUse);
        }
        // Under a filter of the program's own nothing begins, and nothing is said: the filter may end the process at a
        // system call that keeping needs, and cannot be asked at which.
        if sandbox::is_the_program_s() {
            return Err(Reason::Restricted);
        }
        if sanitizer::is_here() {
            return Err(Reason::Sanitizer);
        }
        self.started().unwrap_or_else(|| self.start_keeper())
    }

    /// What libfabric's cache is to ask, started with it.
    pub(crate) fn monitor_for_libfabric(&'static self) -> Option<Monitored> {
        if sandbox::is_the_program_s() || sanitizer::is_here() {
            return None;
        }
        let keeper = self.started().unwrap_or_else(|| self.start_keeper()).ok()?;
        Some(Arc::clone(keeper.monitor()))
    }

    #[cold]
    fn start_keeper(&'static self) -> Result<&'static Keeper, Reason> {
        let _starting = self.starting.try_lock().map_err(|_| Reason::MonitorStarting)?;
        if !secure_room() {
            return Err(Reason::NoRoom);
        }
        if self.keeper.get().is_none() {
            apart::run(main_thread::threads_begin);
            let panicked = || Err((Reason::NoMonitor, "a panic".into()));
            let started = apart::run(|| self.new_keeper()).unwrap_or_else(panicked);
            let complaint = started.as_ref().err().map(|(_, complaint)| complaint.clone());
            // Before another thread has memory watched by it: the hooks would leave the program with the refusal.
            step_aside_when_asked();
            if let Ok(keeper) = self.keeper.get_or_init(|| started.map_err(|(reason, _)| reason)) {
                apart::run(|| start_reclaiming(keeper));
            }
            complaint.iter().for_each(|complaint| refuse(complaint));
        }
        self.started().unwrap_or(Err(Reason::NoMonitor))
    }

    fn new_keeper(&'static self) -> Result<Keeper, (Reason, String)> {
        if real().is_some_and(|real| real.keeps_from_children()) {
            let complaint = "libibverbs keeps registered memory from forked children (RDMAV_FORK_SAFE, \
                             IBV_FORK_SAFE, or ibv_fork_init before Linux 5.12: UCX_IB_FORK_INIT=n), where what stays \
                             registered would be missing";
            return Err((Reason::KeptFromChildren, complaint.into()));
        }
        let limits = Limits::read();
        let limit = limit(&self.settings, &limits);
        let monitor = monitor().map_err(|complaint| (Reason::NoMonitor, complaint))?;
        let room = MappingRoom::of(limits.max_map_count);
        let mut keeper = Keeper::new(monitor, limit, &self.admission, self.children, room);
        Self::inherited().filter_map(Self::keeper).for_each(|parent| keeper.inherit(parent));
        Ok(keeper)
    }

    /// Counts a registration that went to libibverbs as it was.
    pub(crate) fn count_passed(&self, reason: Reason) {
        // Relaxed: a count.
        self.passed[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Before this process, a forked child, has libibverbs end `mr`: its parents' may be gone then.
    ///
    /// # Safety
    ///
    /// `mr` is a handle that the program has.
    pub(crate) unsafe fn note_end(&self, mr: *mut ibv_mr) {
        let own = || Self::running().and_then(Self::keeper);
        // SAFETY: the caller's promise.
        if self.keeper().is_some_and(|keeper| unsafe { may_end_of(keeper, own(), mr) }) {
            // SAFETY: as above.
            let (device, number) = unsafe { ((*mr).context.addr(), (*mr).handle) };
            self.children.note_ended(Name::of(device, number));
        }
    }

    fn account(&self) -> Account {
        let kept = self.keeper().map(Keeper::totals).unwrap_or_default();
        // Relaxed: a count.
        let passed =
            Reasons::counted(|reason| self.passed[reason as usize].load(Ordering::Relaxed));
        let totals = Totals { passed, ..kept };
        let (monitor, rank) = (self.monitor(), self.settings.rank);
        // A forked child begins with its parent's count.
        let bypassed = steps::bypassed().saturating_sub(self.bypassed_before);
        Account { totals, monitor, rank, bypassed }
    }

    /// In one word, for reports.
    fn monitor(&self) -> &'static str {
        match self.started() {
            None => "not started",
            Some(Err(_)) => "refused",
            Some(Ok(keeper)) => keeper.monitor().chosen().name(),
        }
    }

    fn reports(&self) -> &Reports {
        self.reports.get_or_init(|| {
            let had = self.parent.and_then(|parent| parent.reports.get());
            let statistics = self.settings.statistics.clone();
            let had_statistics = had.and_then(|had| had.statistics.as_ref());
            let summary = self.settings.summary.clone().map(Destination::Summary);
            let had_summary = had.and_then(|had| had.summary.as_ref());
            Reports {
                statistics: statistics.map(|to| Report::new(to, had_statistics)),
                summary: summary.map(|to| Report::new(to, had_summary)),
            }
        })
    }

    /// Writes the statistics to where they are wanted.
    fn report(&self) {
        let written = self.reports().statistics.as_ref().map(|to| to.write(&self.account()));
        if let Some(Err(error)) = written {
            complain(&format!("pinfold: no statistics: {error}\n"));
        }
    }

    /// What would be left idle in a device, where the process may still deregister it: not in a handler that has interrupted
    /// a call of verbs of this thread, which may have libibverbs' locks.
    pub(crate) fn leftovers(&self) -> Option<&Keeper> {
        let may_deregister = || !steps::is_under_way() && !is_interrupted();
        let keeper = self.keeper().filter(|_| self.is_child && may_deregister())?;
        (!sandbox::is_the_program_s()).then_some(keeper)
    }

    /// Whether the end of the process is to be reported, and may be: a filter of the program's own may forbid the calls
    /// that it takes, and a handler may have ended the process where this thread has the counts.
    pub(crate) fn has_last_word(&self) -> bool {
        let wanted = self.settings.statistics.is_some() || self.settings.summary.is_some();
        wanted && !is_interrupted() && !sandbox::is_the_program_s()
    }

    /// The last word of a process.
    pub(crate) fn finish(&self) {
        self.report();
        let written = self.reports().summary.as_ref().map(|to| to.write(&self.account()));
        // Otherwise the program's starter finds that a process is missing, and the summary says why that may be.
        if let Some(Err(error)) = written
            && matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
        {
            complain(&format!("pinfold: this process is missing in the summary: {error}\n"));
        }
    }
}

/// Whether a child with the keeper `own` may end by `mr` what `parent` has. Not if it is the child's own: made where no
/// process had kept anything before the child did. That is asked of the kernel, because the parent's books may be locked for
/// ever.
///
/// # Safety
///
/// `mr` is a handle that the program has.
pub(crate) unsafe fn may_end_of(parent: &Keeper, own: Option<&Keeper>, mr: *mut ibv_mr) -> bool {
    if !parent.may_have(mr) {
        return false;
    }
    // SAFETY: the caller's promise.
    let context = unsafe { (*mr).context };
    // A filter of the program's own may forbid to ask.
    if context.is_null() || sandbox::is_the_program_s() {
        return true;
    }
    // SAFETY: a handle's device is open.
    let device = unsafe { (*context).cmd_fd };
    let has_marked = || own.is_some_and(|own| own.has_marked(device));
    is_marked(device).is_none_or(|is_marked| is_marked && !has_marked())
}

/// The best monitor of this machine, if it lets a cache keep anything. A parallel job has many of us, so
/// none loads programs of its own.
fn monitor() -> Result<Monitored, String> {
    let helper = notify::path_named(environment::at_start("PINFOLD_NOTIFYD"));
    let monitor = best_without_loading(&helper).map_err(|error| error.to_string())?;
    match monitor.chosen() {
        Choice::NoMonitor => {
            let reasons: Vec<_> = monitor.refused().iter().map(ToString::to_string).collect();
            Err(reasons.join("; "))
        }
        _ => Ok(Arc::new(monitor)),
    }
}

/// What may be kept while it is idle.
fn limit(settings: &Settings, limits: &Limits) -> Limit {
    let default = Config::keeping_all();
    Limit {
        bytes: settings.max_bytes.unwrap_or_else(|| affordable(limits, default.max_bytes)),
        regions: settings.max_regions.unwrap_or(default.max_regions),
    }
}

/// Bytes to keep unless told otherwise: half of what the kernel lets this process pin, so that the
/// program's own registrations have the other half; and a quarter of what its control groups let it use, because the kernel
/// copies pages that are pinned for a forked child.
fn affordable(limits: &Limits, at_most: usize) -> usize {
    let half = limits.enforced().bytes().map(|bytes| bytes / 2);
    let quarter = Discovery::group_limit().map(|bytes| bytes / 4);
    let least = half.into_iter().chain(quarter).min();
    least.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(at_most).clamp(4096, at_most)
}

fn refuse(why: &str) {
    complain(&format!("pinfold: the program runs without it: {why}\n"));
}

/// The program's own userfaultfd goes first.
fn step_aside_when_asked() {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        use crate::hooks::When;
        static STEP_ASIDE: crate::hooks::StepAside = |range, when, call| {
            let _not_cancelled = NotCancelled::new();
            let Some(keeper) = Process::running().and_then(Process::keeper) else { return };
            // Again: a stack that is mapped now may lie where the program moves something to.
            let pause = || keeper.step_aside(range, when == When::Ahead);
            if sandbox::is_the_program_s() {
                // Its filter may answer the call by a signal, which ends the process where signals are blocked.
                apart::run_again(pause).iter().for_each(|_| call());
            } else {
                apart::run_again(|| {
                    let _pause = pause();
                    call();
                });
            }
        };
        crate::hooks::step_aside_by(&STEP_ASIDE);
    }
}

/// Whether a thread of ours holds no directory, and no file that it does not need, of the program's any more.
struct Parted(AtomicU32);

impl Parted {
    const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// By the thread of ours.
    fn note(&self) {
        // Release: carries nothing; the waiting thread has what it needs.
        self.0.store(1, Ordering::Release);
        futex_wake(&self.0);
    }

    /// What the program closes or leaves behind this is held by that thread no more.
    fn wait(&self) {
        // Acquire: as above.
        while self.0.load(Ordering::Acquire) == 0 {
            futex_wait(&self.0, 0);
        }
    }
}

/// What the thread that deregisters works on.
struct Reclaimer {
    keeper: &'static Keeper,
    /// Numbers in the table that the thread begins with.
    descriptors: Vec<Descriptor>,
    parted: Parted,
}

impl Reclaimer {
    fn run(&self) {
        // SAFETY: this thread is the library's own, and has numbers only: the values are the monitor's, which lives as long
        // as the process.
        let table = unsafe { Table::of_this_thread(&self.descriptors) };
        leave_directory_and_semaphores();
        // A thread of the program's that computes in real time would keep what was unmapped pinned for as long.
        run_before_equals();
        self.parted.note();
        self.keeper.reclaim(&table);
    }
}

/// Starts the thread that deregisters what has changed; without it, that waits for room to be needed.
fn start_reclaiming(keeper: &'static Keeper) {
    let descriptors = keeper.monitor().descriptors();
    let reclaimer = Reclaimer { keeper, descriptors, parted: Parted::new() };
    match LeanThread::spawn(c"pinfold-reclaim", reclaimer, Reclaimer::run) {
        Ok(thread) => thread.on().parted.wait(),
        Err(error) => complain(&format!("pinfold: changed memory stays registered: {error}\n")),
    }
}

/// Words that forked children find to be 0, for as long as the process lives. `None` without memory, or before
/// Linux 4.14.
fn wiped_words() -> Option<&'static [AtomicU64; 4]> {
    let page = AtomicPage::new().ok()?;
    page.wipe_on_fork().ok()?;
    Some(page.leak())
}

/// Has the program's allocator keep memory from now on; complains if it will not.
fn keep_memory() {
    let kept = allocator::keep_memory(Policy::default()).into_iter();
    for kept in kept.filter(|kept| kept.serves_malloc() && !kept.holds()) {
        complain(&format!("pinfold: memory is not kept: {kept}\n"));
    }
}

/// What the thread that reports works on.
struct Reporter {
    signal: CountedSignal,
    parted: Parted,
}

impl Reporter {
    /// It has the program's table of descriptors, in which its files are.
    fn run(&self) {
        leave_directory_and_semaphores();
        self.parted.note();
        loop {
            self.signal.wait();
            if let Some(process) = Process::running() {
                process.report();
            }
        }
    }
}

/// Reports at every `signal` from now on, on a thread of its own.
fn listen(signal: libc::c_int) -> std::io::Result<()> {
    main_thread::threads_begin();
    let reporter = Reporter { signal: CountedSignal::new(signal)?, parted: Parted::new() };
    let thread = LeanThread::spawn(c"pinfold-signal", reporter, Reporter::run)?;
    thread.on().parted.wait();
    Ok(())
}
