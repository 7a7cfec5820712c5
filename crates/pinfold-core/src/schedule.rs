//! The primitives of random schedules: threads that one scheduler runs in turns, and memory whose
//! stores arrive late. Compiled with `--cfg shuttle` only, for tests.
//!
//! **The memory.** Each thread has a first-in-first-out buffer of its stores; its own loads look
//! there first, others see a store when it leaves the buffer. It leaves at a random later step, and
//! at once at whatever orders it on x86: a `SeqCst` store or fence, a read-modify-write, a lock taken
//! or released, a thread begun or joined, and [`heavy_barrier`], which empties all buffers, as
//! `membarrier(2)` does. That is total store order: a store may pass a later load, nothing else may pass
//! anything. So a schedule can find a hazard that is stored too late for the scan that had to see it,
//! a missing barrier on either side, and every bug of sequential interleavings. It cannot find what
//! needs two loads, or two stores, or a load and a later store to change places, which x86 does not do and
//! other processors do; loom's models, which know the orderings of the language, look for those.
//!
//! An atomic is not moved while stores to it are under way: here none is moved after its first store.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` because a buffer names atomics by address. An atomic takes its
//! stores out of all buffers when it is dropped, so what a buffer names is alive.

#![allow(unsafe_code)]

pub use shuttle::thread_local;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::LockResult;
pub use std::sync::atomic::{Ordering, compiler_fence};
use std::sync::{PoisonError, atomic as memory};

/// A store that has not arrived.
struct Store {
    word: *const memory::AtomicU64,
    value: u64,
    /// The step at which it arrives.
    due: u64,
}

/// The buffers of all threads of one schedule.
struct Buffers {
    of_threads: Vec<VecDeque<Store>>,
    /// How many stores are in them.
    pending: usize,
    step: u64,
    /// Longest stay, in steps.
    most_delay: u64,
    random: u64,
}

std::thread_local! {
    // A scheduler and all of its threads live on one thread of the system.
    static BUFFERS: RefCell<Buffers> = const { RefCell::new(Buffers::new()) };
    /// Loading it is how a thread offers its turn.
    static TURN: shuttle::sync::atomic::AtomicBool =
        const { shuttle::sync::atomic::AtomicBool::new(false) };
}

impl Buffers {
    const fn new() -> Self {
        Self { of_threads: Vec::new(), pending: 0, step: 0, most_delay: 0, random: 1 }
    }

    /// xorshift: which stores stay, and how long.
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn push(&mut self, word: &memory::AtomicU64, value: u64) {
        let thread = me();
        if self.of_threads.len() <= thread {
            self.of_threads.resize_with(thread + 1, VecDeque::new);
        }
        let random = self.next();
        let stays = if random & 1 == 0 { 0 } else { (random >> 1) % (self.most_delay + 1) };
        if stays == 0 && self.of_threads[thread].is_empty() {
            word.store(value, Ordering::Relaxed);
            return;
        }
        self.of_threads[thread].push_back(Store { word, value, due: self.step + stays });
        self.pending += 1;
    }

    /// The newest store of the calling thread to `word`.
    fn own(&self, word: &memory::AtomicU64) -> Option<u64> {
        let stores = self.of_threads.get(me())?;
        stores.iter().rev().find(|store| ptr::eq(store.word, word)).map(|store| store.value)
    }

    /// Has the stores of `thread` arrive, in order, as long as `ready`.
    fn deliver(&mut self, thread: usize, ready: impl Fn(&Store) -> bool) {
        let Some(stores) = self.of_threads.get_mut(thread) else { return };
        while stores.front().is_some_and(&ready) {
            let Some(store) = stores.pop_front() else { return };
            // SAFETY: an atomic that is gone has taken its stores out.
            unsafe { &*store.word }.store(store.value, Ordering::Relaxed);
            self.pending -= 1;
        }
    }

    fn deliver_due(&mut self) {
        self.step += 1;
        let step = self.step;
        (0..self.of_threads.len()).for_each(|thread| self.deliver(thread, |it| it.due <= step));
    }

    fn forget(&mut self, word: &memory::AtomicU64) {
        for stores in &mut self.of_threads {
            stores.retain(|store| !ptr::eq(store.word, word));
        }
        self.pending = self.of_threads.iter().map(VecDeque::len).sum();
    }
}

fn me() -> usize {
    shuttle::current::me().into()
}

/// A schedule begins, with empty buffers; a store stays in one for at most so many steps.
pub fn begin(seed: u64, most_delay: u64) {
    BUFFERS.with_borrow_mut(|buffers| {
        *buffers = Buffers { most_delay, random: seed | 1, ..Buffers::new() };
    });
}

/// Offers the turn to the other threads.
pub fn turn() {
    TURN.with(|turn| turn.load(Ordering::SeqCst));
    BUFFERS.with_borrow_mut(|buffers| {
        if buffers.pending > 0 {
            buffers.deliver_due();
        }
    });
}

/// All stores of the calling thread arrive.
fn deliver_own() {
    BUFFERS.with_borrow_mut(|buffers| {
        if buffers.pending > 0 {
            buffers.deliver(me(), |_| true);
        }
    });
}

/// All stores of all threads arrive: what `membarrier(2)` does.
pub fn heavy_barrier() -> bool {
    turn();
    BUFFERS.with_borrow_mut(|buffers| {
        (0..buffers.of_threads.len()).for_each(|thread| buffers.deliver(thread, |_| true));
    });
    true
}

/// As the standard library's.
pub fn fence(order: Ordering) {
    turn();
    if order == Ordering::SeqCst {
        deliver_own();
    }
}

/// One word of memory.
struct Word(memory::AtomicU64);

impl Word {
    fn load(&self) -> u64 {
        turn();
        BUFFERS
            .with_borrow(|buffers| if buffers.pending > 0 { buffers.own(&self.0) } else { None })
            .unwrap_or_else(|| self.0.load(Ordering::Relaxed))
    }

    fn store(&self, value: u64, order: Ordering) {
        turn();
        if order == Ordering::SeqCst {
            deliver_own();
            self.0.store(value, Ordering::Relaxed);
        } else {
            BUFFERS.with_borrow_mut(|buffers| buffers.push(&self.0, value));
        }
    }

    /// Changes the word, or leaves it; what it was.
    fn update(&self, change: impl FnOnce(u64) -> Option<u64>) -> u64 {
        turn();
        deliver_own();
        let old = self.0.load(Ordering::Relaxed);
        if let Some(new) = change(old) {
            self.0.store(new, Ordering::Relaxed);
        }
        old
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // Gone with its thread, the buffers hold nothing.
        let _gone = BUFFERS.try_with(|buffers| {
            let mut buffers = buffers.borrow_mut();
            if buffers.pending > 0 {
                buffers.forget(&self.0);
            }
        });
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty, $from:expr, $to:expr) => {
        /// As the standard library's.
        pub struct $name(Word);

        #[allow(dead_code, missing_docs, trivial_numeric_casts)]
        #[allow(clippy::missing_errors_doc, clippy::cast_possible_truncation)]
        impl $name {
            const TO: fn($value) -> u64 = $to;
            const FROM: fn(u64) -> $value = $from;

            #[allow(clippy::redundant_closure_call)]
            pub const fn new(value: $value) -> Self {
                Self(Word(memory::AtomicU64::new(value as u64)))
            }

            pub fn load(&self, _: Ordering) -> $value {
                Self::FROM(self.0.load())
            }

            pub fn store(&self, value: $value, order: Ordering) {
                self.0.store(Self::TO(value), order);
            }

            pub fn swap(&self, value: $value, _: Ordering) -> $value {
                Self::FROM(self.0.update(|_| Some(Self::TO(value))))
            }

            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                _: Ordering,
                _: Ordering,
            ) -> Result<$value, $value> {
                let (current, new) = (Self::TO(current), Self::TO(new));
                let old = self.0.update(|old| (old == current).then_some(new));
                if old == current { Ok(Self::FROM(old)) } else { Err(Self::FROM(old)) }
            }

            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }

            fn change(&self, change: impl FnOnce($value) -> $value) -> $value {
                Self::FROM(self.0.update(|old| Some(Self::TO(change(Self::FROM(old))))))
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(<$value>::default())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                Self::FROM(self.0.0.load(Ordering::Relaxed)).fmt(f)
            }
        }
    };
}

macro_rules! counter {
    ($name:ident, $value:ty) => {
        atomic!($name, $value, |word| word as $value, |value| value as u64);

        #[allow(dead_code, missing_docs)]
        impl $name {
            pub fn fetch_add(&self, value: $value, _: Ordering) -> $value {
                self.change(|old| old.wrapping_add(value))
            }

            pub fn fetch_sub(&self, value: $value, _: Ordering) -> $value {
                self.change(|old| old.wrapping_sub(value))
            }

            pub fn fetch_max(&self, value: $value, _: Ordering) -> $value {
                self.change(|old| old.max(value))
            }

            pub fn fetch_or(&self, value: $value, _: Ordering) -> $value {
                self.change(|old| old | value)
            }

            pub fn fetch_and(&self, value: $value, _: Ordering) -> $value {
                self.change(|old| old & value)
            }
        }
    };
}

atomic!(AtomicBool, bool, |word| word != 0, u64::from);
counter!(AtomicU32, u32);
counter!(AtomicU64, u64);
counter!(AtomicUsize, usize);

/// As the standard library's; its stores arrive at once.
#[derive(Debug)]
pub struct AtomicPtr<T>(memory::AtomicPtr<T>);

#[allow(missing_docs)]
impl<T> AtomicPtr<T> {
    pub const fn new(pointer: *mut T) -> Self {
        Self(memory::AtomicPtr::new(pointer))
    }

    pub fn load(&self, order: Ordering) -> *mut T {
        turn();
        self.0.load(order)
    }

    pub fn store(&self, pointer: *mut T, order: Ordering) {
        turn();
        deliver_own();
        self.0.store(pointer, order);
    }
}

/// `std`'s cell behind closures, as in loom. No turn is offered inside of one.
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[allow(missing_docs)]
impl<T> UnsafeCell<T> {
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub fn with<A>(&self, f: impl FnOnce(*const T) -> A) -> A {
        f(self.0.get())
    }

    pub fn with_mut<A>(&self, f: impl FnOnce(*mut T) -> A) -> A {
        f(self.0.get())
    }
}

/// As the standard library's, where callers that initialise hold a lock.
#[derive(Debug)]
pub struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    ready: AtomicBool,
}

#[allow(missing_docs)]
impl<T> OnceLock<T> {
    pub const fn new() -> Self {
        Self { value: std::sync::OnceLock::new(), ready: AtomicBool::new(false) }
    }

    pub fn get(&self) -> Option<&T> {
        if self.ready.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let value = self.value.get_or_init(make);
        self.ready.store(true, Ordering::Release);
        value
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// As the standard library's.
#[derive(Debug, Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

/// As the standard library's.
#[derive(Debug)]
pub struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

#[allow(missing_docs, clippy::missing_errors_doc)]
impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        deliver_own();
        guarded(self.0.lock())
    }
}

fn guarded<T>(
    locked: LockResult<shuttle::sync::MutexGuard<'_, T>>,
) -> LockResult<MutexGuard<'_, T>> {
    match locked {
        Ok(guard) => Ok(MutexGuard(Some(guard))),
        Err(poisoned) => Err(PoisonError::new(MutexGuard(Some(poisoned.into_inner())))),
    }
}

#[allow(clippy::unwrap_used)] // taken only when the guard is used up
impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

#[allow(clippy::unwrap_used)] // as above
impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.0.is_some() {
            deliver_own();
        }
    }
}

/// As the standard library's; no wait times out.
#[derive(Debug, Default)]
pub struct Condvar(shuttle::sync::Condvar);

#[allow(missing_docs, clippy::missing_errors_doc, clippy::unwrap_used)]
impl Condvar {
    pub const fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        deliver_own();
        guarded(self.0.wait(guard.0.take().unwrap()))
    }

    /// The second of the pair says that it did not time out.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        _: std::time::Duration,
    ) -> LockResult<(MutexGuard<'a, T>, bool)> {
        match self.wait(guard) {
            Ok(guard) => Ok((guard, false)),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), false))),
        }
    }

    pub fn notify_all(&self) {
        deliver_own();
        self.0.notify_all();
    }

    pub fn notify_one(&self) {
        deliver_own();
        self.0.notify_one();
    }
}

pub use thread::JoinHandle;

/// Threads of the scheduler.
pub mod thread {
    pub use shuttle::thread::{JoinHandle, current, yield_now};

    /// As the standard library's.
    pub fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        super::deliver_own();
        shuttle::thread::spawn(|| {
            let result = f();
            super::deliver_own();
            result
        })
    }

    /// Lets the others go on; there is no clock.
    pub fn sleep(_: std::time::Duration) {
        yield_now();
    }
}
