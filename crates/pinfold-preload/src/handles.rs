//! The `ibv_mr` structures that programs get: each with the lease of a registration, told from
//! libibverbs' own by its address.
//!
//! They lie in chunks that are never given back, so an address can be judged at any time, on any
//! thread, without a lock, also when it was deregistered long ago. A free one is found through a
//! stack without a lock: a lock could be found taken for ever in a forked child.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to hand out pointers, and to reach what lies behind those that
//! come back. Who has moved a handle's state to `BUSY` has it to himself; while it is `LIVE` the
//! program reads the first part of it and nobody writes it.

#![allow(unsafe_code)]

use crate::domains::Served;
use crate::process::Monitored;
use libc::{c_int, c_uint};
use pinfold::Lease;
use pinfold::registrar::verbs::Verbs;
use pinfold::registrar::verbs::ffi::{ibv_context, ibv_mr};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// What keeps the memory registered behind a handle.
#[derive(Debug)]
pub(crate) enum Holding {
    /// A lease of the domain's cache.
    #[allow(dead_code)] // kept and dropped, never looked at
    Lease(Lease<'static, Verbs, Monitored>),
    /// A region of libibverbs that is this handle's alone, after `ibv_rereg_mr`.
    Own(NonNull<ibv_mr>),
}

/// What the program sees, in the layout that libibverbs' own functions expect behind an `ibv_mr`.
#[repr(C)]
pub(crate) struct Shown {
    pub(crate) mr: ibv_mr,
    /// `IBV_MR_TYPE_MR`.
    pub(crate) kind: c_uint,
    pub(crate) access: c_int,
}

/// One structure and what is behind it. The program's pointer is that of the first field.
#[repr(C)]
struct Handle {
    shown: UnsafeCell<Shown>,
    state: AtomicU32,
    /// The next free handle's place plus one, while this one is free.
    next: AtomicU32,
    /// Whose registration it is; null if it is libibverbs' own.
    served: AtomicPtr<Served>,
    /// The device that it goes with.
    context: AtomicPtr<ibv_context>,
    holding: UnsafeCell<MaybeUninit<Holding>>,
}

// Zero is what a new chunk is filled with.
const FREE: u32 = 0;
const LIVE: u32 = 1;
const BUSY: u32 = 2;

/// Handles in the first chunk; each chunk has twice as many as the one before.
const FIRST: usize = 64;
const CHUNKS: usize = 24;

/// All handles of one process.
pub(crate) struct Handles {
    chunks: [AtomicPtr<Handle>; CHUNKS],
    /// The top of the stack of free handles: its place plus one below, a count of changes above, so
    /// that a top which was taken and put back is not mistaken for one that never moved.
    free: AtomicU64,
}

// SAFETY: the fields that are no atomics are reached only by who has the handle to himself; leases
// and regions may end on any thread.
unsafe impl Send for Handles {}
// SAFETY: as above.
unsafe impl Sync for Handles {}

/// What a pointer stands for.
pub(crate) enum Claim<'h> {
    /// No handle of ours.
    Foreign,
    /// One that the program does not have, or that another thread is ending.
    Gone,
    /// The program's; this thread has it to itself now.
    Claimed(Claimed<'h>),
}

impl Handles {
    pub(crate) const fn new() -> Self {
        Self {
            chunks: [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS],
            free: AtomicU64::new(0),
        }
    }

    /// A handle of nobody's. `None` without memory for more.
    pub(crate) fn vacant(&self) -> Option<Vacant<'_>> {
        loop {
            // Acquire: pairs with the release of whoever put the top there; its `next` is seen.
            let top = self.free.load(Ordering::Acquire);
            let Some(place) = (low(top) as usize).checked_sub(1) else {
                self.grow()?;
                continue;
            };
            let handle = self.at(place)?;
            // Relaxed: if it changed since, so did the count above the top.
            let below = handle.next.load(Ordering::Relaxed);
            if self.replace_top(top, below) {
                // Relaxed: nobody else knows the handle now.
                handle.state.store(BUSY, Ordering::Relaxed);
                return Some(Vacant(Some(Claimed { handles: self, handle, place })));
            }
        }
    }

    /// What `mr` stands for; a live handle is the caller's until it is ended or given back.
    pub(crate) fn claim(&self, mr: *const ibv_mr) -> Claim<'_> {
        let Some(place) = self.place_of(mr.addr()) else { return Claim::Foreign };
        let Some(handle) = self.at(place) else { return Claim::Gone };
        // Acquire: what was written while it was somebody's is seen.
        match handle.state.compare_exchange(LIVE, BUSY, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Claim::Claimed(Claimed { handles: self, handle, place }),
            Err(_) => Claim::Gone,
        }
    }

    /// Whether any handle of `served` is out, or being made or ended.
    pub(crate) fn has_any_of(&self, served: *const Served) -> bool {
        self.all().any(|handle| {
            // Acquire: a handle that is free has ended its lease.
            handle.state.load(Ordering::Acquire) != FREE
                // Relaxed: written before the state was.
                && ptr::eq(handle.served.load(Ordering::Relaxed), served)
        })
    }

    /// Every live handle of a device, each the caller's when it comes up.
    pub(crate) fn claim_all_of(
        &self,
        context: *const ibv_context,
    ) -> impl Iterator<Item = Claimed<'_>> {
        let of_it = move |handle: &&Handle| {
            // Relaxed: the claim decides whether it is live, and its device does not change then.
            ptr::eq(handle.context.load(Ordering::Relaxed), context)
        };
        self.all().filter(of_it).filter_map(|handle| {
            match self.claim(handle.shown.get().cast_const().cast()) {
                Claim::Claimed(claimed) => Some(claimed),
                Claim::Foreign | Claim::Gone => None,
            }
        })
    }

    fn all(&self) -> impl Iterator<Item = &Handle> {
        (0..CHUNKS)
            .map_while(|chunk| self.chunk(chunk).map(|first| (first, FIRST << chunk)))
            // SAFETY: a chunk has that many handles and stays.
            .flat_map(|(first, count)| unsafe { std::slice::from_raw_parts(first.as_ptr(), count) })
    }

    fn chunk(&self, number: usize) -> Option<NonNull<Handle>> {
        // Acquire: pairs with the exchange in `grow`; the chunk was filled before.
        NonNull::new(self.chunks[number].load(Ordering::Acquire))
    }

    fn at(&self, place: usize) -> Option<&Handle> {
        let number = (place / FIRST + 1).ilog2() as usize;
        let first = self.chunk(number)?;
        // SAFETY: places are counted chunk after chunk, so this one is in that chunk.
        Some(unsafe { &*first.as_ptr().add(place - before(number)) })
    }

    /// The place of the handle at exactly this address.
    fn place_of(&self, address: usize) -> Option<usize> {
        (0..CHUNKS).map_while(|number| Some((number, self.chunk(number)?))).find_map(
            |(number, first)| {
                let offset = address.checked_sub(first.addr().get())?;
                let index = offset / size_of::<Handle>();
                let inside = index < FIRST << number && offset % size_of::<Handle>() == 0;
                inside.then_some(before(number) + index)
            },
        )
    }

    /// Adds a chunk, or finds that another thread did.
    #[cold]
    fn grow(&self) -> Option<()> {
        let number = (0..CHUNKS).find(|&number| self.chunk(number).is_none())?;
        let layout = Layout::array::<Handle>(FIRST << number).ok()?;
        // SAFETY: the layout is not empty. All zero is a free handle without anything behind it.
        let made = NonNull::new(unsafe { alloc_zeroed(layout) })?.cast::<Handle>();
        // AcqRel: releases the chunk to whoever loads the pointer.
        let published = self.chunks[number].compare_exchange(
            ptr::null_mut(),
            made.as_ptr(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match published {
            Ok(_) => (0..FIRST << number).rev().for_each(|index| self.push(before(number) + index)),
            // SAFETY: it was just allocated, and nobody has seen it.
            Err(_) => unsafe { dealloc(made.as_ptr().cast(), layout) },
        }
        Some(())
    }

    /// Puts a free handle on top of the stack.
    fn push(&self, place: usize) {
        let (Some(handle), Ok(entry)) = (self.at(place), u32::try_from(place + 1)) else { return };
        loop {
            // Relaxed: only the top itself is needed, and the exchange checks it.
            let top = self.free.load(Ordering::Relaxed);
            // Relaxed: released by the exchange.
            handle.next.store(low(top), Ordering::Relaxed);
            if self.replace_top(top, entry) {
                return;
            }
        }
    }

    fn replace_top(&self, top: u64, entry: u32) -> bool {
        let next = ((top >> 32).wrapping_add(1) << 32) | u64::from(entry);
        // AcqRel: releases the handle that is put there, acquires the one that is taken.
        self.free.compare_exchange_weak(top, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Handles in the chunks before this one.
const fn before(chunk: usize) -> usize {
    FIRST * ((1 << chunk) - 1)
}

#[allow(clippy::cast_possible_truncation)] // its purpose
const fn low(top: u64) -> u32 {
    top as u32
}

/// A handle that this thread has to itself. Dropped, it is the program's again.
pub(crate) struct Claimed<'h> {
    handles: &'h Handles,
    handle: &'h Handle,
    place: usize,
}

impl Claimed<'_> {
    /// What the program sees.
    pub(crate) fn shown(&mut self) -> &mut Shown {
        // SAFETY: the handle is this thread's, and was filled when it became live.
        unsafe { &mut *self.handle.shown.get() }
    }

    /// What keeps the memory registered.
    pub(crate) fn holding(&mut self) -> &mut Holding {
        // SAFETY: as above.
        unsafe { (*self.handle.holding.get()).assume_init_mut() }
    }

    /// Puts a region of libibverbs behind the handle; what was behind it.
    pub(crate) fn own(&mut self, region: NonNull<ibv_mr>) -> Holding {
        // Relaxed: released with the state.
        self.handle.served.store(ptr::null_mut(), Ordering::Relaxed);
        std::mem::replace(self.holding(), Holding::Own(region))
    }

    /// Ends the handle, and before it what is behind it.
    pub(crate) fn end(self) {
        drop(self.taken());
        // Relaxed: the handle is this thread's.
        let served = self.handle.served.load(Ordering::Relaxed);
        // SAFETY: null, or it stays until its last handle has ended (see `domains`), which is after
        // this.
        if let Some(served) = unsafe { served.as_ref() } {
            served.note_end();
        }
        self.free();
    }

    /// Ends the handle; what is behind it is another process's.
    pub(crate) fn forget(self) {
        std::mem::forget(self.taken());
        self.free();
    }

    /// What is behind the handle. Called once, before it is freed.
    fn taken(&self) -> Holding {
        // SAFETY: the handle is this thread's and filled; nobody reads this value again.
        unsafe { (*self.handle.holding.get()).assume_init_read() }
    }

    fn free(self) {
        // Release: everything about the handle has ended before it counts as free.
        self.handle.state.store(FREE, Ordering::Release);
        self.handles.push(self.place);
        std::mem::forget(self);
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        // Release: what was written to it is seen by who claims it next.
        self.handle.state.store(LIVE, Ordering::Release);
    }
}

/// A handle that is to be filled. Dropped unfilled, it is free again.
pub(crate) struct Vacant<'h>(Option<Claimed<'h>>);

impl Vacant<'_> {
    /// Makes the handle the program's; its pointer.
    pub(crate) fn fill(
        mut self,
        shown: Shown,
        served: *const Served,
        holding: Holding,
    ) -> *mut ibv_mr {
        let Some(claimed) = self.0.take() else { return ptr::null_mut() };
        let handle = claimed.handle;
        // Relaxed, both: released with the state, by the drop below.
        handle.context.store(shown.mr.context, Ordering::Relaxed);
        handle.served.store(served.cast_mut(), Ordering::Relaxed);
        // SAFETY: nobody else knows the handle, and nothing is behind it.
        unsafe {
            handle.shown.get().write(shown);
            (*handle.holding.get()).write(holding);
        }
        drop(claimed);
        handle.shown.get().cast()
    }
}

impl Drop for Vacant<'_> {
    fn drop(&mut self) {
        if let Some(claimed) = self.0.take() {
            claimed.free();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Mutex;

    fn shown(lkey: u32) -> Shown {
        let mr = ibv_mr {
            context: ptr::null_mut(),
            pd: ptr::null_mut(),
            addr: ptr::null_mut(),
            length: 0,
            handle: 0,
            lkey,
            rkey: 0,
        };
        Shown { mr, kind: 0, access: 0 }
    }

    /// Behind a handle of a test stands no registration.
    fn nothing_behind() -> Holding {
        Holding::Own(NonNull::dangling())
    }

    fn made(handles: &Handles, lkey: u32, served: *const Served) -> *mut ibv_mr {
        handles.vacant().unwrap().fill(shown(lkey), served, nothing_behind())
    }

    fn end(handles: &Handles, mr: *const ibv_mr) -> bool {
        match handles.claim(mr) {
            Claim::Claimed(claimed) => {
                claimed.forget();
                true
            }
            Claim::Foreign | Claim::Gone => false,
        }
    }

    #[test]
    fn a_handle_is_told_from_everything_else() {
        let handles = Handles::new();
        let mr = made(&handles, 7, ptr::null());
        assert!(matches!(handles.claim(mr.wrapping_byte_add(8)), Claim::Foreign));
        assert!(matches!(handles.claim(ptr::null()), Claim::Foreign));
        let elsewhere = shown(0);
        assert!(matches!(handles.claim(&raw const elsewhere.mr), Claim::Foreign));
        let Claim::Claimed(mut claimed) = handles.claim(mr) else { panic!("it is ours") };
        assert_eq!(claimed.shown().mr.lkey, 7);
        assert!(matches!(handles.claim(mr), Claim::Gone), "it is in other hands");
        drop(claimed);
        assert!(end(&handles, mr));
        assert!(!end(&handles, mr), "it has ended");
    }

    #[test]
    fn an_unfilled_handle_is_free_again() {
        let handles = Handles::new();
        let first = made(&handles, 0, ptr::null());
        end(&handles, first);
        drop(handles.vacant());
        assert_eq!(made(&handles, 0, ptr::null()), first);
    }

    #[test]
    fn handles_grow_and_stay_where_they_are() {
        let handles = Handles::new();
        let all: Vec<_> = (0..1000).map(|lkey| made(&handles, lkey, ptr::null())).collect();
        let distinct: HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        for (lkey, &mr) in all.iter().enumerate() {
            // SAFETY: the program reads its handle.
            assert_eq!(unsafe { (*mr).lkey } as usize, lkey);
        }
        assert!(all.into_iter().all(|mr| end(&handles, mr)));
    }

    #[test]
    fn those_of_one_domain_are_found() {
        let handles = Handles::new();
        let (one, other) = (ptr::dangling::<Served>(), ptr::without_provenance(4096));
        let mr = made(&handles, 1, one);
        made(&handles, 2, other);
        assert!(handles.has_any_of(one) && handles.has_any_of(other));
        end(&handles, mr);
        assert!(!handles.has_any_of(one) && handles.has_any_of(other));
    }

    #[test]
    fn those_of_one_device_are_ended_with_it() {
        let handles = Handles::new();
        let device = ptr::without_provenance_mut(4096);
        let mut on_device = shown(1);
        on_device.mr.context = device;
        let gone = handles.vacant().unwrap().fill(on_device, ptr::null(), nothing_behind());
        let other = made(&handles, 2, ptr::null());
        handles.claim_all_of(device).for_each(|claimed| claimed.forget());
        assert!(!end(&handles, gone));
        assert!(end(&handles, other));
    }

    /// Each handle is with one thread at a time, though all of them take and give back at once, and
    /// each is ended by exactly one of those who try.
    #[test]
    fn threads_do_not_share_a_handle() {
        let handles = Handles::new();
        let out = Mutex::new(HashSet::new());
        let worker = |lkey| {
            for _ in 0..2000 {
                let mr = made(&handles, lkey, ptr::null());
                assert!(out.lock().unwrap().insert(mr.addr()), "handed out twice");
                // SAFETY: the handle is this thread's.
                assert_eq!(unsafe { (*mr).lkey }, lkey);
                assert!(out.lock().unwrap().remove(&mr.addr()));
                assert!(end(&handles, mr));
            }
        };
        std::thread::scope(|scope| {
            for lkey in 0..4 {
                scope.spawn(move || worker(lkey));
            }
        });
        let mr = made(&handles, 0, ptr::null()).expose_provenance();
        let ended: usize = std::thread::scope(|scope| {
            let try_to = || end(&handles, ptr::with_exposed_provenance(mr));
            let all: Vec<_> = (0..4).map(|_| scope.spawn(try_to)).collect();
            all.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        });
        assert_eq!(ended, 1);
    }
}
