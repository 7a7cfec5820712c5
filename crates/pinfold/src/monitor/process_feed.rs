//! The one feed of the process, whichever copy of this library asks.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to look a symbol up among the process's libraries and to believe
//! that what it names is a feed if it says so itself, and to declare what a forked child promises.

#![allow(unsafe_code)]

use super::feed::{Feed, Header};
use pinfold_kernel::symbols;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// This copy's own, where no library exports one.
static OWN: Feed = Feed::new();

/// Null until the first question.
static FOUND: AtomicPtr<Feed> = AtomicPtr::new(ptr::null_mut());

impl Feed {
    /// The data symbol that a library with hooks exports.
    pub const SYMBOL: &std::ffi::CStr = c"pinfold_process_feed";

    /// The process's: the one that a library exports by the name [`SYMBOL`](Self::SYMBOL), if it is of
    /// this make, else this copy's own. The same for ever after the first call.
    ///
    /// The first call looks a symbol up, which takes the dynamic linker's lock: hooks, and code that
    /// may run before `main`, use the feed of their own library by its name.
    pub fn of_process() -> &'static Self {
        // Acquire: pairs with the store below, for the sake of the feed's own beginnings.
        let found = FOUND.load(Ordering::Acquire);
        // SAFETY: null, or one of the two that are stored below, which live for ever.
        if let Some(feed) = unsafe { found.as_ref() } {
            return feed;
        }
        let feed = exported().unwrap_or(&OWN);
        // Release: as above. Two threads store the same.
        FOUND.store(ptr::from_ref(feed).cast_mut(), Ordering::Release);
        feed
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
