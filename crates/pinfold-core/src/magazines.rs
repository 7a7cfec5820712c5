//! A thread's cache of a pool: free blocks, taken and put back without a lock.
//!
//! The price first: a thread that has used a pool owns 512 bytes for each size class there, and
//! the blocks in its magazines serve no other thread until they are raided or the thread ends. For
//! that, taking a block and putting it back are some twenty instructions and write to memory of
//! this thread alone.
//!
//! A magazine is a stack of addresses outside the blocks, never in them: memory that a device may
//! write holds nothing that the pool relies on.
//!
//! Blocks in the magazines of other threads can be had back (a *raid*), so that a pool is
//! exhausted only when everything is in use. A raid closes the gate first. [`Gate`] has the
//! argument why no thread is in a magazine then.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to declare functions that only a magazine's owner may call: if
//! two threads did, both could be given the same block. It contains no unsafe block.

#![allow(unsafe_code)]

use crate::barrier::Barriers;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::fmt;
use std::ptr::NonNull;

/// How many blocks a magazine can hold.
pub const MAGAZINE_BLOCKS: u32 = if cfg!(loom) { 2 } else { 63 };

const ENTRIES: usize = MAGAZINE_BLOCKS as usize;

/// A pool's word that says whether magazines may be used as their owners please.
///
/// Open, it holds the pool's key, which is odd, hence never zero. The word may lie in memory that
/// the kernel sets to zero in a forked child: then the gate is closed there for ever.
///
/// # No thread is in a magazine that is raided
///
/// The owner says that it is busy, passes [`Barriers`]' light side, and looks at the gate. A thread that
/// raids closes the gate, passes the heavy side, and looks whether the owner is busy. Of two
/// threads that each write and then read what the other writes, with these barriers in between, at
/// least one sees the other's:
///
/// - the owner sees the closed gate: it says that it is not busy and touches nothing;
/// - or the raid sees a busy owner, and waits until it is not;
/// - or both: the owner withdraws and the raid waits for that.
///
/// Raids, and owners who act while the gate is closed, hold the pool's lock.
///
/// # No block stays behind
///
/// An owner that has lost its processor in the middle stays busy for long, and a raid does not wait for that: it goes
/// on without those magazines. Before it closes the gate it has [recalled](Magazines::recall) the blocks, and the owner
/// looks for that after it has said that it is not busy. Two such threads again: the raid finds the owner not busy, or
/// the owner finds the recall, and hands its blocks over with the lock held.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'p> {
    word: &'p AtomicU64,
    key: u64,
    barriers: Barriers,
}

/// What a closed gate adds to its key, which is odd.
const CLOSED: u64 = 1 << 63;

impl<'p> Gate<'p> {
    /// The gate whose word is `word`: open when that is `key`, which is odd and below 2^63.
    #[inline(always)]
    pub const fn new(word: &'p AtomicU64, key: u64, barriers: Barriers) -> Self {
        Self { word, key, barriers }
    }

    /// Whether this process is a forked child of the one that made the gate, if the word lies in
    /// memory that the kernel wipes there.
    #[inline]
    pub fn is_wiped(self) -> bool {
        // Relaxed: in a child the word was wiped before its first instruction.
        self.word.load(Ordering::Relaxed) == 0
    }

    /// Lets owners go their own way again. The caller holds the pool's lock.
    pub fn open(self) {
        if !self.is_wiped() {
            // Release: what was done to magazines is done before their owners come back.
            self.word.store(self.key, Ordering::Release);
        }
    }

    /// Sends every thread to the pool's lock. The caller holds it.
    ///
    /// False if the system had no barrier to offer: then no magazine may be raided.
    pub fn close(self) -> bool {
        if self.is_wiped() {
            return false;
        }
        // Relaxed: the heavy barrier stands between this store and the look at the owners.
        self.word.store(self.key | CLOSED, Ordering::Relaxed);
        self.barriers.heavy()
    }

    #[inline(always)]
    fn is_open(self) -> bool {
        // Acquire: pairs with `open`.
        self.word.load(Ordering::Acquire) == self.key
    }
}

/// One size's blocks in one thread's cache.
#[repr(align(64))]
struct Magazine {
    /// How many blocks it holds.
    count: AtomicU32,
    /// How many it may hold, at most [`MAGAZINE_BLOCKS`].
    allowed: AtomicU32,
    blocks: [AtomicPtr<u8>; ENTRIES],
}

// Everything in a magazine is read and written relaxed: it belongs to one thread at a time, and
// the gate and the pool's lock hand it over. The fields are atomic so that figures can be read
// from outside, and so that nothing here needs an unsafe block.
impl Magazine {
    fn new() -> Self {
        Self {
            count: AtomicU32::new(0),
            allowed: AtomicU32::new(0),
            blocks: std::array::from_fn(|_| AtomicPtr::new(std::ptr::null_mut())),
        }
    }

    #[inline(always)]
    fn pop(&self) -> Option<NonNull<u8>> {
        let last = self.count.load(Ordering::Relaxed).checked_sub(1)?;
        let block = self.blocks.get(last as usize)?.load(Ordering::Relaxed);
        self.count.store(last, Ordering::Relaxed);
        NonNull::new(block)
    }

    #[inline(always)]
    fn push(&self, block: NonNull<u8>) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        if count >= self.allowed.load(Ordering::Relaxed) {
            return false;
        }
        let Some(place) = self.blocks.get(count as usize) else { return false };
        place.store(block.as_ptr(), Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Relaxed);
        true
    }
}

/// The magazines of one thread, one for each of the pool's sizes.
///
/// 128 bytes apart, so that neither a cache line nor the pair that the prefetcher fetches is
/// shared between threads.
#[repr(align(128))]
pub struct Magazines<const SIZES: usize> {
    /// Whether the owner is between its look at the gate and the end of what it does.
    busy: AtomicBool,
    /// Whether a raid wants the blocks.
    recalled: AtomicBool,
    sizes: [Magazine; SIZES],
}

impl<const SIZES: usize> Magazines<SIZES> {
    /// Empty magazines, which may hold nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            busy: AtomicBool::new(false),
            recalled: AtomicBool::new(false),
            sizes: std::array::from_fn(|_| Magazine::new()),
        }
    }

    /// A block of this size, if one is cached and the gate is open.
    ///
    /// # Safety
    ///
    /// The calling thread owns these magazines: no other calls this or [`put`](Self::put) until
    /// their next owner has taken over, and `gate` is always the same pool's.
    #[inline(always)]
    pub unsafe fn take(&self, size: usize, gate: Gate<'_>) -> Option<NonNull<u8>> {
        let magazine = self.sizes.get(size)?;
        self.enter(gate).then(|| {
            let block = magazine.pop();
            self.leave(gate.barriers);
            block
        })?
    }

    /// Keeps a block of this size in the cache. False if there is no room, or the gate is closed.
    ///
    /// # Safety
    ///
    /// As for [`take`](Self::take). The block has no other user.
    #[inline(always)]
    #[must_use = "a block that was not kept is still the caller's"]
    pub unsafe fn put(&self, size: usize, block: NonNull<u8>, gate: Gate<'_>) -> bool {
        let Some(magazine) = self.sizes.get(size) else { return false };
        self.enter(gate) && {
            let kept = magazine.push(block);
            self.leave(gate.barriers);
            kept
        }
    }

    /// Begins what only the owner does; the proof is above [`Gate`].
    #[inline(always)]
    fn enter(&self, gate: Gate<'_>) -> bool {
        // Relaxed: the light barrier stands between this store and the look at the gate.
        self.busy.store(true, Ordering::Relaxed);
        gate.barriers.light();
        let open = gate.is_open();
        if !open {
            self.leave(gate.barriers);
        }
        open
    }

    #[inline(always)]
    fn leave(&self, barriers: Barriers) {
        // Release: what was done here is done before a raid finds no thread busy.
        self.busy.store(false, Ordering::Release);
        // Between this store and the look for a recall.
        barriers.light();
    }

    /// Asks the owner to hand over what is cached as soon as it is out of its magazines. The caller holds the pool's
    /// lock and closes the gate next.
    pub fn recall(&self) {
        // Relaxed: the heavy barrier of the gate's closing stands between this store and the look at the owner.
        self.recalled.store(true, Ordering::Relaxed);
    }

    /// The caller, who holds the pool's lock, has the blocks, or they are not wanted any more.
    pub fn end_recall(&self) {
        // Relaxed: an owner that still finds the recall takes the lock, and finds nothing to do.
        self.recalled.store(false, Ordering::Relaxed);
    }

    /// Whether the blocks are recalled: asked by the owner, after what it did here. Reads nothing of the pool, which may
    /// be gone.
    #[inline(always)]
    pub fn is_recalled(&self) -> bool {
        // Relaxed: the light barrier of `leave` stands between the store there and this look.
        self.recalled.load(Ordering::Relaxed)
    }

    /// Whether the owner is out of its magazines. Once it is, behind a closed gate, it stays out
    /// until the gate opens.
    pub fn are_quiet(&self) -> bool {
        // Acquire: pairs with `leave`.
        !self.busy.load(Ordering::Acquire)
    }

    /// How many blocks of this size are cached; of another thread's, how many there were.
    pub fn count(&self, size: usize) -> usize {
        self.sizes.get(size).map_or(0, |size| size.count.load(Ordering::Relaxed) as usize)
    }

    /// How many blocks of this size may be cached.
    pub fn allowed(&self, size: usize) -> u32 {
        self.sizes.get(size).map_or(0, |size| size.allowed.load(Ordering::Relaxed))
    }

    /// Sets how many blocks of this size may be cached, at most [`MAGAZINE_BLOCKS`]; those
    /// cached already may be more. The caller holds the pool's lock.
    pub fn allow(&self, size: usize, blocks: u32) {
        if let Some(size) = self.sizes.get(size) {
            size.allowed.store(blocks.min(MAGAZINE_BLOCKS), Ordering::Relaxed);
        }
    }

    /// Takes a block out by the lock's leave, not the owner's.
    ///
    /// # Safety
    ///
    /// The caller holds the pool's lock, and is the owner, or has closed the gate and found the
    /// magazines quiet since, or knows that they have no owner.
    pub unsafe fn take_locked(&self, size: usize) -> Option<NonNull<u8>> {
        self.sizes.get(size)?.pop()
    }

    /// Puts a block in by the lock's leave; false if there is no room.
    ///
    /// # Safety
    ///
    /// As for [`take_locked`](Self::take_locked). The block has no other user.
    #[must_use = "a block that was not kept is still the caller's"]
    pub unsafe fn put_locked(&self, size: usize, block: NonNull<u8>) -> bool {
        self.sizes.get(size).is_some_and(|size| size.push(block))
    }
}

impl<const SIZES: usize> Default for Magazines<SIZES> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const SIZES: usize> fmt::Debug for Magazines<SIZES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = (0..SIZES).map(|size| self.count(size)).enumerate();
        f.debug_map().entries(counts.filter(|&(_, count)| count > 0)).finish()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const KEY: u64 = 7;

    fn block(number: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut(64 * (number + 1))).unwrap()
    }

    fn with_gate(test: impl FnOnce(Gate<'_>, &Magazines<2>)) {
        let word = AtomicU64::new(KEY);
        test(Gate::new(&word, KEY, Barriers::SYMMETRIC), &Magazines::new());
    }

    #[test]
    fn what_is_put_is_taken_the_latest_first() {
        with_gate(|gate, magazines| {
            magazines.allow(1, 2);
            // SAFETY: one thread, and made-up blocks.
            unsafe {
                assert!(magazines.put(1, block(1), gate) && magazines.put(1, block(2), gate));
                assert!(!magazines.put(1, block(3), gate), "full");
                assert!(!magazines.put(0, block(3), gate), "nothing is allowed there");
                assert!(!magazines.put(2, block(3), gate), "no such size");
                assert_eq!(magazines.count(1), 2);
                assert_eq!(magazines.take(0, gate), None);
                assert_eq!(magazines.take(1, gate), Some(block(2)));
                assert_eq!(magazines.take(1, gate), Some(block(1)));
                assert_eq!(magazines.take(1, gate), None);
            }
        });
    }

    #[test]
    fn a_magazine_holds_as_many_as_there_are_places() {
        with_gate(|gate, magazines| {
            magazines.allow(0, u32::MAX);
            // SAFETY: one thread, and made-up blocks.
            let kept = (0..100).filter(|&n| unsafe { magazines.put(0, block(n), gate) }).count();
            assert_eq!((kept, magazines.allowed(0)), (ENTRIES, MAGAZINE_BLOCKS));
        });
    }

    #[test]
    fn behind_a_closed_gate_only_the_lock_counts() {
        with_gate(|gate, magazines| {
            magazines.allow(0, 4);
            // SAFETY: one thread, and made-up blocks.
            unsafe {
                assert!(magazines.put(0, block(1), gate));
                assert!(gate.close() && magazines.are_quiet());
                assert_eq!(magazines.take(0, gate), None);
                assert!(!magazines.put(0, block(2), gate));
                assert_eq!(magazines.take_locked(0), Some(block(1)));
                assert!(magazines.put_locked(0, block(2)));
                gate.open();
                assert_eq!(magazines.take(0, gate), Some(block(2)));
            }
        });
    }

    #[test]
    fn a_wiped_gate_stays_closed() {
        let word = AtomicU64::new(0);
        let gate = Gate::new(&word, KEY, Barriers::SYMMETRIC);
        gate.open();
        assert!(gate.is_wiped() && !gate.close() && !gate.is_open());
    }
}

/// Every interleaving of an owner and a raid.
#[cfg(test)]
#[cfg(loom)]
mod models {
    use super::*;
    use crate::sync::{Condvar, Mutex, lock, wait};
    use loom::thread;
    use std::num::NonZero;
    use std::sync::Arc;

    const KEY: u64 = 7;

    /// A pool of as many blocks as there are flags: the thread that has a block has raised its flag.
    struct Pool {
        word: AtomicU64,
        central: Mutex<Vec<NonNull<u8>>>,
        magazines: Magazines<1>,
        held: Vec<AtomicBool>,
    }

    impl Pool {
        fn new(blocks: usize) -> Arc<Self> {
            let magazines = Magazines::new();
            magazines.allow(0, 2);
            let address = |number| NonNull::without_provenance(NonZero::new(number + 1).unwrap());
            Arc::new(Self {
                word: AtomicU64::new(KEY),
                central: Mutex::new((0..blocks).map(address).collect()),
                magazines,
                held: (0..blocks).map(|_| AtomicBool::new(false)).collect(),
            })
        }

        fn gate(&self) -> Gate<'_> {
            Gate::new(&self.word, KEY, Barriers::SYMMETRIC)
        }

        /// Uses a block, which no other thread may have.
        fn hold(&self, block: NonNull<u8>) {
            let flag = &self.held[block.addr().get() - 1];
            assert!(!flag.swap(true, Ordering::Relaxed), "two have the same block");
            thread::yield_now();
            flag.store(false, Ordering::Relaxed);
        }

        fn owner_takes(&self) -> Option<NonNull<u8>> {
            // SAFETY: called by one thread of each model.
            let at_hand = unsafe { self.magazines.take(0, self.gate()) };
            at_hand.or_else(|| lock(&self.central).pop())
        }

        fn owner_puts(&self, block: NonNull<u8>) {
            // SAFETY: as in `owner_takes`; the block is the owner's.
            if !unsafe { self.magazines.put(0, block, self.gate()) } {
                lock(&self.central).push(block);
            }
        }

        fn raid(&self) {
            let mut central = lock(&self.central);
            assert!(self.gate().close());
            while !self.magazines.are_quiet() {
                thread::yield_now();
            }
            // SAFETY: the gate is closed and the magazines are quiet.
            central.extend(std::iter::from_fn(|| unsafe { self.magazines.take_locked(0) }));
            self.gate().open();
        }
    }

    fn explore(model: impl Fn() + Sync + Send + 'static) {
        crate::exploring::try_orders(&loom::model::Builder::new(), model);
    }

    /// A raid looks once whether the owner is busy, and then sleeps until there is a block: without the owner's look
    /// for a recall it would for ever.
    #[test]
    fn loom_what_a_raid_passes_over_is_handed_over() {
        explore(|| {
            let (pool, back) = (Pool::new(1), Arc::new(Condvar::new()));
            let block = lock(&pool.central).pop().unwrap();
            let owner = {
                let (pool, back) = (Arc::clone(&pool), Arc::clone(&back));
                thread::spawn(move || {
                    pool.owner_puts(block);
                    if pool.magazines.is_recalled() {
                        let mut central = lock(&pool.central);
                        // SAFETY: the owner calls, with the lock held.
                        let taken = || unsafe { pool.magazines.take_locked(0) };
                        central.extend(std::iter::from_fn(taken));
                        back.notify_one();
                    }
                })
            };
            let mut central = lock(&pool.central);
            pool.magazines.recall();
            assert!(pool.gate().close());
            if pool.magazines.are_quiet() {
                // SAFETY: the gate is closed and the magazines are quiet.
                central.extend(std::iter::from_fn(|| unsafe { pool.magazines.take_locked(0) }));
            }
            while central.is_empty() {
                central = wait(&back, central);
            }
            drop(central);
            owner.join().unwrap();
        });
    }

    #[test]
    fn loom_a_raid_and_an_owner_never_get_the_same_block() {
        explore(|| {
            let pool = Pool::new(1);
            let owner = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    for _ in 0..2 {
                        if let Some(block) = pool.owner_takes() {
                            pool.hold(block);
                            pool.owner_puts(block);
                        }
                    }
                })
            };
            pool.raid();
            let stolen = lock(&pool.central).pop();
            if let Some(block) = stolen {
                pool.hold(block);
                lock(&pool.central).push(block);
            }
            owner.join().unwrap();
            pool.raid();
            assert_eq!(lock(&pool.central).len(), 1, "none is lost");
        });
    }

    /// What a raid leaves behind and what it takes is what the owner finds and misses.
    #[test]
    fn loom_an_owner_finds_its_magazines_as_a_raid_left_them() {
        explore(|| {
            let pool = Pool::new(2);
            let owner = {
                let pool = Arc::clone(&pool);
                thread::spawn(move || {
                    let (one, two) = (pool.owner_takes(), pool.owner_takes());
                    [one, two].into_iter().flatten().for_each(|block| pool.owner_puts(block));
                    let again = pool.owner_takes();
                    again.inspect(|&block| pool.hold(block));
                    again.into_iter().for_each(|block| pool.owner_puts(block));
                })
            };
            pool.raid();
            owner.join().unwrap();
            pool.raid();
            let mut blocks = std::mem::take(&mut *lock(&pool.central));
            blocks.sort_unstable();
            blocks.dedup();
            assert_eq!(blocks.len(), 2, "none is lost, none is there twice");
        });
    }
}
