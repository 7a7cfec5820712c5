//! What a preloaded library exports: what the hooks of `libpinfold_preload.so` say of themselves, read where they run, and the
//! one feed of the process, whichever copy of this library asks.
//!
//! Hooks are the third source of a monitor without privilege: the preloaded library stands before
//! the C library's `madvise`, `process_madvise`, `shmat` and `syscall`, and tells the process's
//! [feed](super::Feed) of the two changes that the kernel reports to no userfaultfd
//! (`MADV_GUARD_INSTALL`, `shmat` with `SHM_REMAP`). They count for something only if calls
//! reach them, so they test that when the program starts, and withdraw otherwise.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to find the hooks' record and the feed by their names, and to believe that what they name
//! is one if it says so itself; to read the name of a file that the dynamic linker keeps; and to declare what a forked child
//! promises.

#![allow(unsafe_code)]

use super::feed::{Feed, Header};
use pinfold_kernel::{FirstMade, symbols};
use std::ffi::{CStr, c_char};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// The functions that hooks take over, in the order in which the record numbers them.
pub const HOOKED: [&str; 4] = ["madvise", "process_madvise", "shmat", "syscall"];

/// What hooks say of themselves: the data symbol `pinfold_process_hooks` of the library that has
/// them.
///
/// Its layout is fixed by its magic number, because the two sides may be of different builds.
#[repr(C)]
#[derive(Debug)]
pub struct HookRecord {
    magic: u64,
    /// [`UNTESTED`], [`ACTIVE`], or which of [`HOOKED`] is not reached, from [`FIRST_LOST`] on.
    standing: AtomicU32,
    unused: u32,
    /// How many changes the hooks told of.
    told: AtomicU64,
    /// The file in which the lost function is found; null, or the dynamic linker's own text.
    owner: AtomicPtr<c_char>,
}

const MAGIC: u64 = u64::from_be_bytes(*b"pinfoldH");
const UNTESTED: u32 = 0;
const ACTIVE: u32 = 1;
const FIRST_LOST: u32 = 2;

impl HookRecord {
    /// Of hooks that have not been tested yet.
    pub const fn new() -> Self {
        Self {
            magic: MAGIC,
            standing: AtomicU32::new(UNTESTED),
            unused: 0,
            told: AtomicU64::new(0),
            owner: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Calls reach the hooks.
    pub fn activate(&self) {
        // Release, as in `withdraw`; nothing else is read because of it.
        self.standing.store(ACTIVE, Ordering::Release);
    }

    /// Calls of `HOOKED[function]` do not reach the hooks.
    ///
    /// `owner` names the file whose function is called instead. The text is never freed.
    pub fn withdraw(&self, function: usize, owner: Option<&'static CStr>) {
        let owner = owner.map_or(ptr::null_mut(), |owner| owner.as_ptr().cast_mut());
        // Relaxed: released by the next store.
        self.owner.store(owner, Ordering::Relaxed);
        let function = u32::try_from(function).unwrap_or(u32::MAX);
        // Release: a thread that reads this finds the owner.
        self.standing.store(FIRST_LOST.saturating_add(function), Ordering::Release);
    }

    /// Counts a change that was told.
    pub fn count(&self) {
        // Relaxed: a count.
        self.told.fetch_add(1, Ordering::Relaxed);
    }

    /// What it says.
    pub fn standing(&self) -> Hooks {
        // Relaxed: a count.
        let told = self.told.load(Ordering::Relaxed);
        // Acquire: pairs with `withdraw`.
        match self.standing.load(Ordering::Acquire) {
            UNTESTED => Hooks::Untested,
            ACTIVE => Hooks::Active { told },
            lost => {
                let number = usize::try_from(lost - FIRST_LOST).unwrap_or(usize::MAX);
                let function = HOOKED.get(number).copied().unwrap_or("a function");
                Hooks::Withdrawn { function, owner: self.owner() }
            }
        }
    }

    fn owner(&self) -> Option<String> {
        // Relaxed: ordered by the standing, which was read before.
        let owner = self.owner.load(Ordering::Relaxed);
        // SAFETY: null or, by `withdraw`'s argument, a C string that is never freed.
        let text = (!owner.is_null()).then(|| unsafe { CStr::from_ptr(owner) });
        text.map(|text| text.to_string_lossy().into_owned())
    }
}

impl Default for HookRecord {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether this process's calls of memory functions are told by hooks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Hooks {
    /// `libpinfold_preload.so` is not preloaded.
    Absent,
    /// The library is there and its start is not over.
    Untested,
    /// Calls through the C library reach the hooks.
    Active {
        /// How many changes they told of.
        told: u64,
    },
    /// Another library stands before the hooks, so nothing is claimed.
    Withdrawn {
        /// The function whose calls do not reach them.
        function: &'static str,
        /// The file in which it is found instead, if that is known.
        owner: Option<String>,
    },
}

impl Hooks {
    /// Asks the hooks of this process. Costs a look-up of a symbol.
    pub fn of_process() -> Self {
        // SAFETY: the name is a C string. What has it is the record or, by the magic number, not
        // believed; a data symbol of this name is at least one word long.
        let record = unsafe {
            let found = symbols::address(c"pinfold_process_hooks");
            found.map(|found| found.cast::<HookRecord>().as_ref()).filter(|it| it.magic == MAGIC)
        };
        record.map_or(Self::Absent, HookRecord::standing)
    }

    /// In one word, for reports that programs read.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Untested => "untested",
            Self::Active { .. } => "active",
            Self::Withdrawn { .. } => "withdrawn",
        }
    }
}

impl fmt::Display for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str(
                "no hooks: preload libpinfold_preload.so (`pinfold run`) to have MADV_GUARD_INSTALL \
                 and shmat(SHM_REMAP) told",
            ),
            Self::Untested => f.write_str("the hooks are not tested yet: the program is starting"),
            Self::Active { told } => {
                write!(f, "hooks on {} are reached ({told} changes told)", HOOKED.join(", "))
            }
            Self::Withdrawn { function, owner } => write!(
                f,
                "the hooks withdrew: calls of {function} go to {}; preload \
                 libpinfold_preload.so before it",
                owner.as_deref().unwrap_or("another library")
            ),
        }
    }
}

// --- the feed ---------------------------------------------------------------------------------

/// This copy's own, where no library exports one.
static OWN: Feed = Feed::new();

/// Empty until the first question.
static FOUND: FirstMade<Feed> = FirstMade::new();

impl Feed {
    /// The data symbol that a library with hooks exports.
    pub const SYMBOL: &std::ffi::CStr = c"pinfold_process_feed";

    /// The process's: the one that a library exports by the name [`SYMBOL`](Self::SYMBOL), if it is of
    /// this make, else this copy's own. The same for ever after the first call.
    ///
    /// The first call looks a symbol up, which takes the dynamic linker's lock: hooks, and code that
    /// may run before `main`, use the feed of their own library by its name.
    pub fn of_process() -> &'static Self {
        FOUND.get().unwrap_or_else(|| FOUND.get_or_set(exported().unwrap_or(&OWN)))
    }

    /// In a forked child: forgets the changes that other threads of the parent were making, which do
    /// not exist here and would keep their ranges uncached for good. Without this call the child is
    /// slower, never wrong.
    ///
    /// # Safety
    ///
    /// This is a forked child, no other thread has been started in it, and the calling thread is not
    /// in the middle of a change. A handler of `pthread_atfork` is such a place.
    pub unsafe fn forget_parents_changes(&self) {
        self.forget_under_way();
    }
}

/// The feed that another library exports, if it is one.
fn exported() -> Option<&'static Feed> {
    let feed = symbols::address(Feed::SYMBOL)?.cast::<Feed>();
    // SAFETY: a module that exports this name exports a feed of some version, in a library that is never
    // unloaded.
    unsafe { of_this_make(feed) }
}

/// # Safety
///
/// `feed` is a feed of any version, which may be shorter than ours, and stays.
unsafe fn of_this_make(feed: NonNull<Feed>) -> Option<&'static Feed> {
    if !feed.is_aligned() {
        return None;
    }
    // SAFETY: every version begins with a header that never changes. One that is ours says that
    // the whole is: a `Feed`, atomic behind the header.
    unsafe { if feed.cast::<Header>().read() == Feed::OURS { Some(feed.as_ref()) } else { None } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_what_it_was_told() {
        let record = HookRecord::new();
        assert_eq!(record.standing(), Hooks::Untested);
        record.activate();
        record.count();
        assert_eq!(record.standing(), Hooks::Active { told: 1 });
        record.withdraw(2, Some(c"/lib/other.so"));
        let standing = record.standing();
        let owner = Some("/lib/other.so".to_owned());
        assert_eq!(standing, Hooks::Withdrawn { function: "shmat", owner });
        assert!(standing.to_string().contains("shmat go to /lib/other.so"));
        for function in [9, u32::MAX as usize, usize::MAX] {
            record.withdraw(function, None);
            assert!(record.standing().to_string().contains("go to another library"));
        }
    }

    #[test]
    fn without_the_library_there_are_no_hooks() {
        assert_eq!(Hooks::of_process(), Hooks::Absent);
    }

    /// Nothing is read, or taken for readable, behind another version's header.
    #[test]
    fn another_make_is_not_believed() {
        #[repr(C, align(8))]
        struct Shorter(Header);
        static OTHER: Shorter = Shorter(Header { version: Feed::VERSION + 1, ..Feed::OURS });
        // SAFETY: a header, and nothing behind it.
        assert!(unsafe { of_this_make(NonNull::from(&OTHER).cast()) }.is_none());
        // SAFETY: a feed.
        let ours = unsafe { of_this_make(NonNull::from(&OWN)) };
        assert!(ours.is_some_and(|feed| ptr::eq(feed, &raw const OWN)));
    }

    #[test]
    fn without_an_exporting_library_it_is_our_own() {
        assert!(ptr::eq(Feed::of_process(), &raw const OWN));
        assert!(ptr::eq(Feed::of_process(), Feed::of_process()));
    }
}
