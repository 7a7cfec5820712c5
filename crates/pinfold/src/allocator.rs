//! Have the allocator keep memory, so that its registrations live.
//!
//! A registration ends when the memory behind it is unmapped or discarded, and allocators do both
//! with what a program frees: the next buffer of that size is then registered anew. Told not to,
//! they hand the same pages out again, and the next `get` is a hit.
//!
//! ```
//! use pinfold::allocator::{self, Policy};
//!
//! for kept in allocator::keep_memory(Policy::default()) {
//!     println!("{kept}"); // which settings of which allocator, from what to what, or why not
//! }
//! ```
//!
//! # The price
//!
//! The process never gets smaller: what it needed at its peak it keeps, resident, and as far as it
//! was registered, pinned within the cache's budget. `pinfold-bench allocator` shows it for a program
//! whose demand goes up and down between 4 and 256 MiB and which rests in between (`--rest-ms
//! 1500`); here on Linux 6.18, in one run, 14,400 gets each, by a cache that may keep 1 GiB:
//!
//! | allocator | policy | resident, peak | at the end | registered, regions counted each, peak | at the end | registrations made | taken away by the allocator |
//! |---|---|---|---|---|---|---|---|
//! | glibc 2.36 | default | 298 MiB | 169 | 633 MiB | 585 | 797 | 201 |
//! | | kept | 304 | 304 | 869 | 865 | 731 | 0 |
//! | jemalloc 5.3.0 | default | 325 | 20 | 474 | 34 | 940 | 470 |
//! | | kept | 345 | 345 | 745 | 741 | 751 | 0 |
//! | mimalloc 2.0.9 | default | 325 | 212 | 568 | 260 | 1131 | 342 |
//! | | kept | 342 | 331 | 733 | 695 | 890 | 74 |
//!
//! So it saves 8 to 21 % of the registrations there, and costs the whole peak for ever, 2.1 to 2.8
//! times over in what counts against the limit: buffers of irregular lengths overlap those that
//! were there before them, and io_uring counts the pages of each registration. The other side of it: with a limit of 8 MiB the same program makes 10,500 to 10,700 registrations
//! whether or not memory is kept (0.3 to 1.4 % fewer), because what is freed is evicted long before
//! it comes back. Keep memory where the budget holds the peak demand; elsewhere it is all price.
//!
//! # What is set
//!
//! | allocator | setting | to | meaning |
//! |---|---|---|---|
//! | glibc | `M_MMAP_MAX` | 0 | large blocks come from the heap, not from mappings of their own |
//! | | `M_TRIM_THRESHOLD` | none | the heap's end is never given back |
//! | | `M_ARENA_MAX` | 1, if asked | no heaps of threads, which are unmapped when they are empty; read once, when a thread first needs one |
//! | jemalloc 5 | `dirty_decay_ms`, `muzzy_decay_ms`, of all arenas and of those to come | -1 | free pages are never purged |
//! | mimalloc | `purge_delay` (2.1 and later) | -1 | free pages are never purged |
//! | | `allow_decommit` (2.0.9) | 0 | the same; its segments beyond a cache are unmapped nevertheless |
//!
//! Programs that link their allocator statically do not show it to the dynamic linker; they pass
//! its functions to [`keep_memory_of`].

mod found;
mod functions;

pub use functions::{Functions, MallCtl, MiOptionGet, MiOptionSet};

use found::Found;
use std::fmt;

/// What to ask of an allocator.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Policy {
    /// glibc only: have all threads share one heap. Heaps of threads are unmapped as soon as they
    /// are empty, whatever else is set; with one heap, threads wait for each other when they
    /// allocate. Heaps that are there already stay.
    ///
    /// glibc reads the setting once, when a thread first needs a heap of its own. From then on nothing changes it:
    /// [`undo`](Kept::undo) reports [`NotSet::DecidedOnce`]. And it comes too late, silently, where threads have had eight
    /// heaps (two where pointers have 32 bits) and one has asked for a further one: ask for it before threads start.
    pub single_arena: bool,
}

/// An allocator that was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Allocator {
    /// The GNU C library's.
    Glibc,
    /// jemalloc.
    Jemalloc,
    /// mimalloc.
    Mimalloc,
    /// None of these: nothing is known of its settings.
    Unknown,
}

/// One setting of an allocator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The allocator's own name for it.
    pub name: String,
    /// What it was; `None` where the allocator does not tell.
    pub before: Option<i64>,
    /// What it is now, or why it is what it was.
    pub now: Result<i64, NotSet>,
}

/// Why something was not set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotSet {
    /// The allocator refused.
    #[error(fmt = refused)]
    Refused {
        /// Its error number, 0 if it gave none.
        errno: i32,
    },
    /// This version has no such setting that can be set while the program runs.
    #[error("this version cannot while the program runs: start it with {instead}")]
    Version {
        /// The variable of the environment that does it when the program starts.
        instead: &'static str,
    },
    /// It can only be decided when the program starts, and was decided otherwise.
    #[error("decided when the program started: start it with {instead}")]
    AtStartOnly {
        /// The variable of the environment that decides it.
        instead: &'static str,
    },
    /// The allocator decides it once, when it first needs it, which may have been meanwhile: it stays as it was decided.
    #[error(
        "decided once, when a thread first needs a heap: it may stay as it is (leave out `single_arena`)"
    )]
    DecidedOnce,
    /// Nothing is known of this allocator.
    #[error("nothing is known of this allocator's settings")]
    Unknown,
}

/// What was set of one allocator; dropping it leaves everything as it is.
#[derive(Debug)]
pub struct Kept {
    allocator: Allocator,
    serves_malloc: bool,
    settings: Vec<Setting>,
    found: Found,
}

impl Kept {
    /// Which allocator it is.
    pub fn allocator(&self) -> Allocator {
        self.allocator
    }

    /// Whether it is the one behind `malloc`.
    pub fn serves_malloc(&self) -> bool {
        self.serves_malloc
    }

    /// What was set, and what was not.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// Whether everything that was asked for is set.
    pub fn holds(&self) -> bool {
        !self.settings.is_empty() && self.settings.iter().all(|setting| setting.now.is_ok())
    }

    /// Sets everything back to what it was, and has the allocator give back what is free, as far as
    /// it can: what came of it.
    ///
    /// glibc does not tell what its settings were, so they become its defaults; it adapted its
    /// thresholds to the program until the first one was set, and never does again. A
    /// [single arena](Policy::single_arena) stays one as soon as a thread has needed a heap.
    pub fn undo(self) -> Vec<Setting> {
        self.found.undo(&self.settings)
    }
}

/// Which allocator is behind `malloc`; nothing is set.
pub fn serving_malloc() -> Allocator {
    let found = Found::all().into_iter().find(Found::serves_malloc);
    found.map_or(Allocator::Unknown, |found| found.allocator())
}

/// Has every allocator that the dynamic linker knows keep its memory, from now on.
///
/// Costs some microseconds. Affects the whole process; call it early, because what is given back
/// before is gone.
pub fn keep_memory(policy: Policy) -> Vec<Kept> {
    let found = Found::all();
    let mut kept: Vec<Kept> = found.into_iter().map(|found| Kept::of(found, policy)).collect();
    if !kept.iter().any(|kept| kept.serves_malloc) {
        kept.push(Kept::unknown());
    }
    kept
}

/// As [`keep_memory`], for an allocator that the dynamic linker does not know, such as a Rust
/// program's own.
pub fn keep_memory_of(functions: Functions, policy: Policy) -> Kept {
    Kept::of(Found::linked(functions), policy)
}

impl Kept {
    fn of(found: Found, policy: Policy) -> Self {
        let settings = found.keep(policy);
        let (allocator, serves_malloc) = (found.allocator(), found.serves_malloc());
        Self { allocator, serves_malloc, settings, found }
    }

    fn unknown() -> Self {
        let setting = Setting { name: "malloc".into(), before: None, now: Err(NotSet::Unknown) };
        Self {
            allocator: Allocator::Unknown,
            serves_malloc: true,
            settings: vec![setting],
            found: Found::nothing(),
        }
    }
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Glibc => "glibc",
            Self::Jemalloc => "jemalloc",
            Self::Mimalloc => "mimalloc",
            Self::Unknown => "unknown",
        })
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.allocator)?;
        if !self.serves_malloc {
            f.write_str(" (not behind malloc)")?;
        }
        let mut separator = " ";
        for setting in &self.settings {
            write!(f, "{separator}{setting}")?;
            separator = ", ";
        }
        Ok(())
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, before, now } = self;
        match (before, now) {
            (Some(before), Ok(now)) => write!(f, "{name} {before} -> {now}"),
            (None, Ok(now)) => write!(f, "{name} = {now}"),
            (_, Err(why)) => write!(f, "{name} not set: {why}"),
        }
    }
}

fn refused(errno: &i32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("the allocator refused")?;
    match *errno {
        0 => Ok(()),
        errno => write!(f, " ({})", std::io::Error::from_raw_os_error(errno)),
    }
}
