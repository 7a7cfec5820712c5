//! One cache for each protection domain that the program registers with.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to find a domain's cache without a lock. Every entry lives
//! as long as the process; the cache in it lives until the program gives its domain back, or closes
//! the device, and the program does neither while another of its threads registers with that domain:
//! it would have libibverbs use freed memory.

#![allow(unsafe_code)]

use crate::process::Monitored;
use crate::rights::Rights;
use crate::room::Room;
use libc::c_uint;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_pd};
use pinfold::registrar::verbs::{Domain, Library, Verbs};
use pinfold::{Access, Cache, Config, Exhausted, GetError, Lease, Statistics};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A protection domain with its cache.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) cache: Cache<Verbs, Monitored>,
    context: *mut ibv_context,
    /// The kernel's number of the domain.
    number: u32,
    room: Arc<Room>,
}

// SAFETY: the pointer is only compared.
unsafe impl Send for Served {}
// SAFETY: as above.
unsafe impl Sync for Served {}

/// Where a domain's cache is found. One for each pair of address and hints ever used.
struct Entry {
    pd: usize,
    hints: c_uint,
    /// Null, or from `Arc::into_raw`, with one count.
    served: AtomicPtr<Served>,
    /// Set before the entry is seen, and never changed.
    next: *const Entry,
}

const BUCKETS: usize = 64;

/// All domains of one process.
pub(crate) struct Domains {
    buckets: [AtomicPtr<Entry>; BUCKETS],
    /// Guards which caches there are: held while one is made, put in or taken out. Rank: outside
    /// the caches' own. Never held while something is registered or deregistered.
    change: Mutex<()>,
}

impl Domains {
    pub(crate) const fn new() -> Self {
        Self {
            buckets: [const { AtomicPtr::new(ptr::null_mut()) }; BUCKETS],
            change: Mutex::new(()),
        }
    }

    /// The cache for `pd` and these hints, if there is one.
    ///
    /// # Safety
    ///
    /// `pd` is a live protection domain of the present ABI, and is not given back meanwhile.
    pub(crate) unsafe fn find(&self, pd: NonNull<ibv_pd>, hints: c_uint) -> Option<&Served> {
        let entry = self.entry(pd.addr().get(), hints)?;
        // Acquire: pairs with the store in `put`.
        // SAFETY: the file's header.
        let served = unsafe { entry.served.load(Ordering::Acquire).as_ref() }?;
        // SAFETY: the caller's promise.
        let (context, number) = unsafe { ((*pd.as_ptr()).context, (*pd.as_ptr()).handle) };
        (served.context == context && served.number == number).then_some(served)
    }

    /// As [`find`](Self::find), made if there is none; `None` if that cannot be.
    ///
    /// # Safety
    ///
    /// As for [`find`](Self::find).
    #[cold]
    pub(crate) unsafe fn make(
        &self,
        pd: NonNull<ibv_pd>,
        rights: Rights,
        room: &Arc<Room>,
        make: impl FnOnce() -> Option<Cache<Verbs, Monitored>>,
    ) -> Option<&Served> {
        let _change = self.change();
        // SAFETY: the caller's promise.
        if let Some(made) = unsafe { self.find(pd, rights.hints) } {
            return Some(made);
        }
        // SAFETY: the caller's promise.
        let (context, number) = unsafe { ((*pd.as_ptr()).context, (*pd.as_ptr()).handle) };
        let served = Arc::new(Served { cache: make()?, context, number, room: Arc::clone(room) });
        let entry = self.entry(pd.addr().get(), rights.hints);
        let entry = entry.unwrap_or_else(|| self.add_entry(pd.addr().get(), rights.hints));
        // Release: the cache comes with the pointer. What was there belonged to a domain that went
        // without a word, with its device perhaps: nothing of it can be given back any more, and
        // it stays.
        entry.served.store(Arc::into_raw(served).cast_mut(), Ordering::Release);
        // SAFETY: as in `find`.
        unsafe { entry.served.load(Ordering::Acquire).as_ref() }
    }

    /// The caches of `pd`, whatever their hints.
    pub(crate) fn of_domain(&self, pd: *const ibv_pd) -> Vec<Arc<Served>> {
        self.matching(|entry, _| entry.pd == pd.addr())
    }

    /// The caches of every domain of `context`.
    pub(crate) fn of_device(&self, context: *const ibv_context) -> Vec<Arc<Served>> {
        self.matching(|_, served| ptr::eq(served.context, context))
    }

    /// All caches.
    pub(crate) fn all(&self) -> Vec<Arc<Served>> {
        self.matching(|_, _| true)
    }

    /// Has nobody find `served` any more; the last of those who hold it drops it.
    pub(crate) fn forget(&self, served: &Arc<Served>) {
        let _change = self.change();
        let kept = Arc::as_ptr(served).cast_mut();
        if let Some(entry) = self.entries().find(|entry| {
            // Relaxed: under the lock that guards it.
            entry.served.load(Ordering::Relaxed) == kept
        }) {
            // Relaxed: nobody looks for it any more, see the file's header.
            entry.served.store(ptr::null_mut(), Ordering::Relaxed);
            // SAFETY: the pointer came from `Arc::into_raw`, and its one count is taken back once,
            // under the lock.
            drop(unsafe { Arc::from_raw(kept) });
        }
    }

    fn matching(&self, wanted: impl Fn(&Entry, &Served) -> bool) -> Vec<Arc<Served>> {
        let _change = self.change();
        let found = self.entries().filter_map(|entry| {
            // Acquire: pairs with the store in `make`.
            let kept = entry.served.load(Ordering::Acquire);
            // SAFETY: under the lock, what is in an entry has a count of its own, which is not taken
            // back before the lock is released.
            unsafe {
                let served = kept.as_ref().filter(|served| wanted(entry, served))?;
                Arc::increment_strong_count(served);
                Some(Arc::from_raw(kept.cast_const()))
            }
        });
        found.collect()
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.change.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry(&self, pd: usize, hints: c_uint) -> Option<&Entry> {
        chain(&self.buckets[bucket(pd)]).find(|entry| entry.pd == pd && entry.hints == hints)
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.buckets.iter().flat_map(chain)
    }

    /// The lock is held.
    fn add_entry(&self, pd: usize, hints: c_uint) -> &Entry {
        let bucket = &self.buckets[bucket(pd)];
        // Relaxed: changed under the lock only.
        let next = bucket.load(Ordering::Relaxed);
        let served = AtomicPtr::new(ptr::null_mut());
        let entry = Box::leak(Box::new(Entry { pd, hints, served, next }));
        // Release: the entry comes with the pointer.
        bucket.store(entry, Ordering::Release);
        entry
    }
}

/// The entries of one bucket.
fn chain(bucket: &AtomicPtr<Entry>) -> impl Iterator<Item = &Entry> {
    // Acquire: pairs with the store in `add_entry`; what lies behind the first is older.
    // SAFETY: entries are never freed.
    let first = unsafe { bucket.load(Ordering::Acquire).as_ref() };
    // SAFETY: as above.
    std::iter::successors(first, |entry| unsafe { entry.next.as_ref() })
}

/// Domains come from an allocator, 16 bytes apart.
const fn bucket(pd: usize) -> usize {
    (pd >> 4) % BUCKETS
}

impl Served {
    /// A cache over the program's own domain.
    ///
    /// # Errors
    ///
    /// What stands in its way, in words.
    ///
    /// # Safety
    ///
    /// `pd` is a protection domain of `library`, and stays until nobody uses the cache any more.
    pub(crate) unsafe fn cache(
        library: &'static Library,
        pd: NonNull<ibv_pd>,
        rights: Rights,
        monitor: Monitored,
        room: &Room,
        config: Config,
    ) -> Result<Cache<Verbs, Monitored>, String> {
        // SAFETY: the caller's promise.
        let domain = unsafe { Domain::lent(library, pd) }.map_err(|error| error.to_string())?;
        let registrar = Verbs::new(domain).map_err(|error| error.to_string())?;
        let registrar = registrar.with_flags(rights.hints);
        let share = room.share().map_err(|error| error.to_string())?;
        pinfold::cache_within(share, registrar, monitor, config).map_err(|error| error.to_string())
    }

    /// A lease of `length` bytes from `start`. `None` if the cache gives none.
    ///
    /// # Safety
    ///
    /// As for [`Cache::get`].
    pub(crate) unsafe fn lease(
        &self,
        start: *const u8,
        length: usize,
        access: Access,
    ) -> Option<Lease<'_, Verbs, Monitored>> {
        if self.room.is_full() {
            return None;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.cache.get(start, length, access) } {
            Ok(lease) => Some(lease),
            Err(GetError::Exhausted(Exhausted { wanted, allowed, .. })) => {
                // What is longer than all the room leaves it to others.
                if wanted <= allowed {
                    self.room.note_full();
                }
                None
            }
            Err(_) => None,
        }
    }

    /// A lease has ended, and what it held may be given up for another.
    pub(crate) fn note_end(&self) {
        self.room.note_end();
    }

    /// Gives back everything that is idle; no lease is left, so this is everything. Says what the
    /// cache has done.
    pub(crate) fn empty(&self) -> Statistics {
        self.cache.evict_idle();
        self.cache.statistics()
    }
}
