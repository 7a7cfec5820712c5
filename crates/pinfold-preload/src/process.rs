//! Everything of one process; a forked child begins anew, and knows what was its parent's.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to keep a process's state behind an atomic pointer: a lock could
//! be found taken for ever in a forked child.

#![allow(unsafe_code)]

use crate::domains::{Domains, Served};
use crate::handles::Handles;
use crate::real::{Real, real};
use crate::report::{self, Totals};
use crate::rights::Rights;
use crate::room::Room;
use crate::settings::{Destination, Settings};
use crate::sys;
use pinfold::allocator::{self, Policy};
use pinfold::budget::Amount;
use pinfold::limits::Limits;
use pinfold::monitor::{Best, Choice, best_without_loading};
use pinfold::registrar::verbs::Verbs;
use pinfold::registrar::verbs::ffi::ibv_pd;
use pinfold::{Cache, Config, Monitor};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The monitor that all caches of a process share.
pub(crate) type Monitored = Arc<Best>;

/// What Pinfold does in this process.
#[allow(clippy::large_enum_variant)] // one in a process
enum Standing {
    /// Nothing: everything passes through.
    Off,
    On(Process),
}

/// A process with caches.
pub(crate) struct Process {
    pub(crate) settings: Settings,
    pub(crate) handles: Handles,
    pub(crate) domains: Domains,
    pub(crate) room: Arc<Room>,
    monitor: Monitored,
    /// What the caches did that are gone. Guards nothing else, and no other lock is taken inside.
    ended: Mutex<Totals>,
    passed: AtomicU64,
    /// The process that this one was forked from, as it was then.
    parent: Option<&'static Process>,
}

/// Null, or from a leaked box: what is published here stays, because handles of it may be out.
static CURRENT: AtomicPtr<Standing> = AtomicPtr::new(ptr::null_mut());

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

    /// The latest state and those that it was forked from.
    pub(crate) fn generations() -> impl Iterator<Item = &'static Self> {
        std::iter::successors(Self::latest(), |process| process.parent)
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
        self.monitor.forked()
    }

    #[cold]
    fn start(current: *mut Standing, before: Option<&'static Standing>) -> Option<&'static Self> {
        let parent = before.and_then(|standing| match standing {
            Standing::On(process) => Some(process),
            Standing::Off => None,
        });
        let (standing, complaint) = Self::begin(parent);
        let fresh = Box::into_raw(Box::new(standing));
        // AcqRel: releases the state to whoever loads the pointer, acquires a winner's.
        match CURRENT.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Self::announce(complaint),
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
        let settings = Settings::from_environment().map_err(|error| error.to_string())?;
        if !settings.cache {
            return Ok(None);
        }
        if real().is_some_and(Real::keeps_from_children) {
            return Err(
                "libibverbs keeps registered memory from forked children here (RDMAV_FORK_SAFE, \
                        or ibv_fork_init on a kernel before 5.12), so what stays registered would be \
                        missing there"
                    .into(),
            );
        }
        let monitor = monitor()?;
        let room = Room::new(allowed(&settings)).map_err(|error| error.to_string())?;
        Ok(Some(Self {
            settings,
            room: Arc::new(room),
            handles: Handles::new(),
            domains: Domains::new(),
            monitor,
            ended: Mutex::default(),
            passed: AtomicU64::new(0),
            parent,
        }))
    }

    /// Says why there is no cache, or begins to listen for the signal.
    fn announce(complaint: Option<String>) {
        if let Some(complaint) = complaint {
            return sys::complain(&format!("pinfold: the program runs without it: {complaint}\n"));
        }
        if Self::running().is_some_and(|process| process.settings.keep_memory) {
            keep_memory();
        }
        let signal = Self::running().and_then(|process| process.settings.signal);
        if let Some(Err(error)) = signal.map(listen) {
            sys::complain(&format!("pinfold: no statistics by signal: {error}\n"));
        }
    }

    /// A cache for `pd`.
    ///
    /// # Safety
    ///
    /// `pd` is a live protection domain of the present ABI, and stays until the cache is emptied.
    pub(crate) unsafe fn cache(
        &self,
        pd: NonNull<ibv_pd>,
        rights: Rights,
    ) -> Option<Cache<Verbs, Monitored>> {
        let library = &real()?.library;
        let monitor = Arc::clone(&self.monitor);
        // SAFETY: the caller's promise.
        let made =
            unsafe { Served::cache(library, pd, rights, monitor, &self.room, self.config()) };
        made.map_err(|error| sys::complain(&format!("pinfold: no cache: {error}\n"))).ok()
    }

    fn config(&self) -> Config {
        let Amount { bytes, regions } = allowed(&self.settings);
        Config {
            max_bytes: bytes,
            max_regions: regions,
            // One `ibv_reg_mr` is one region, however long.
            piece_bytes: 1 << (usize::BITS - 2),
            cache_remote: self.settings.cache_remote,
            ..Config::default()
        }
    }

    /// Counts a registration that went to libibverbs as it was.
    pub(crate) fn count_passed(&self) {
        // Relaxed: a count.
        self.passed.fetch_add(1, Ordering::Relaxed);
    }

    /// Empties a cache that is not needed any more, and forgets it.
    pub(crate) fn retire(&self, served: &Arc<Served>) {
        let did = served.empty();
        self.domains.forget(served);
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).add(&did);
    }

    /// Gives back whatever is idle in all caches. Says how many registrations that were.
    pub(crate) fn make_room(&self) -> usize {
        self.domains.all().iter().map(|served| served.cache.evict_idle()).sum()
    }

    fn totals(&self) -> Totals {
        let mut totals = *self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        self.domains.all().iter().for_each(|served| totals.add(&served.cache.statistics()));
        // Relaxed: a count.
        totals.passed = self.passed.load(Ordering::Relaxed);
        totals
    }

    /// Writes the statistics to where they are wanted.
    fn report(&self) {
        if let Some(destination) = &self.settings.statistics {
            self.report_to(destination, &self.totals());
        }
    }

    fn report_to(&self, destination: &Destination, totals: &Totals) {
        if let Err(error) = report::write(destination, std::process::id(), totals) {
            sys::complain(&format!("pinfold: no statistics in {destination:?}: {error}\n"));
        }
    }

    /// The last word of a process.
    pub(crate) fn finish(&self) {
        self.report();
        if let Some(path) = &self.settings.summary {
            self.report_to(&Destination::File(path.clone()), &self.totals());
        }
    }
}

/// The best monitor of this machine, if it lets a cache keep anything. A parallel job has many of us, so
/// none loads programs of its own.
fn monitor() -> Result<Monitored, String> {
    let monitor = best_without_loading().map_err(|error| error.to_string())?;
    match monitor.chosen() {
        Choice::NoMonitor => {
            let reasons: Vec<_> = monitor.refused().iter().map(ToString::to_string).collect();
            Err(reasons.join("; "))
        }
        _ => Ok(Arc::new(monitor)),
    }
}

/// What the caches may keep together.
fn allowed(settings: &Settings) -> Amount {
    let default = Config::default();
    Amount {
        bytes: settings.max_bytes.unwrap_or_else(|| affordable(default.max_bytes)),
        regions: settings.max_regions.unwrap_or(default.max_regions),
    }
}

/// Bytes that the caches may keep unless told otherwise: half of what the kernel lets this process
/// pin, so that the program's own registrations have the other half.
fn affordable(at_most: usize) -> usize {
    let half = Limits::read().enforced().bytes().map(|bytes| bytes / 2);
    half.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(at_most).clamp(4096, at_most)
}

/// Has the program's allocator keep memory from now on; complains if it will not.
fn keep_memory() {
    let kept = allocator::keep_memory(Policy::default()).into_iter();
    for kept in kept.filter(|kept| kept.serves_malloc() && !kept.holds()) {
        sys::complain(&format!("pinfold: memory is not kept: {kept}\n"));
    }
}

/// Reports at every `signal` from now on, on a thread of its own.
fn listen(signal: libc::c_int) -> std::io::Result<()> {
    sys::count_signal(signal)?;
    let body = || loop {
        sys::await_signal();
        if let Some(process) = Process::running() {
            process.report();
        }
    };
    sys::spawn_quiet("pinfold-signal", body)
}
