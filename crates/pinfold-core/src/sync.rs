//! The one switch between the real primitives, loom's, which try every interleaving, and those of
//! `schedule`, which try random ones of the whole cache.

#[cfg(loom)]
pub(crate) use self::model::*;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use self::real::*;
#[cfg(shuttle)]
pub(crate) use crate::schedule::*;

/// Whether this build explores interleavings: tables are small then, so that their ends are reached.
pub(crate) const EXPLORED: bool = cfg!(any(loom, shuttle));

/// The lock and the condition of a wait that ends at a deadline. Not loom's, which knows no time; no
/// model of loom's waits here.
pub(crate) mod timed {
    #[cfg(shuttle)]
    pub(crate) use crate::schedule::{Condvar, Mutex};
    #[cfg(not(shuttle))]
    pub(crate) use std::sync::{Condvar, Mutex};
}

/// So many words of zero, made all at once where that can be: a list of the index is long.
#[cfg(not(any(loom, shuttle)))]
pub(crate) const fn zeros<const N: usize>() -> [AtomicU64; N] {
    [const { AtomicU64::new(0) }; N]
}

#[cfg(any(loom, shuttle))]
pub(crate) fn zeros<const N: usize>() -> [AtomicU64; N] {
    std::array::from_fn(|_| AtomicU64::new(0))
}

/// So many that are not made yet, as [`zeros`].
#[cfg(not(any(loom, shuttle)))]
pub(crate) const fn unmade<T, const N: usize>() -> [OnceLock<T>; N] {
    [const { OnceLock::new() }; N]
}

#[cfg(any(loom, shuttle))]
pub(crate) fn unmade<T, const N: usize>() -> [OnceLock<T>; N] {
    std::array::from_fn(|_| OnceLock::new())
}

#[cfg(not(any(loom, shuttle)))]
mod real {
    // `OnceLock`: in the arenas and the index of a cache, of which a forked child is refused before it fills one. What the
    // whole process has is a `FirstMade`.
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
    };
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
    pub(crate) use std::thread::{self, JoinHandle};
    pub(crate) use std::thread_local;

    /// `std`'s cell behind the closures that loom's cell asks for.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(crate) fn with<A>(&self, f: impl FnOnce(*const T) -> A) -> A {
            f(self.0.get())
        }

        pub(crate) fn with_mut<A>(&self, f: impl FnOnce(*mut T) -> A) -> A {
            f(self.0.get())
        }
    }
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread_local;
    // No model of loom's has a reclaimer's thread.
    pub(crate) use std::thread::{self, JoinHandle};

    /// loom has no `OnceLock`, and does not know what `std`'s orders. This one says so in loom's
    /// terms; no thread of a model is interrupted while it initialises.
    #[derive(Debug)]
    pub(crate) struct OnceLock<T> {
        value: std::sync::OnceLock<T>,
        ready: AtomicBool,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self { value: std::sync::OnceLock::new(), ready: AtomicBool::new(false) }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            // Acquire: pairs with the store in `get_or_init`.
            if self.ready.load(Ordering::Acquire) { self.value.get() } else { None }
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            if let Some(value) = self.get() {
                return value;
            }
            let value = self.value.get_or_init(make);
            // Release: the value is there before it is said to be.
            self.ready.store(true, Ordering::Release);
            value
        }
    }

    /// loom knows no compiler fence; a model never takes the asymmetric path.
    pub(crate) fn compiler_fence(order: Ordering) {
        fence(order);
    }
}

/// Which thread it was. In an explored build, whose threads share one of the system's, it tells nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadMark(usize);

impl ThreadMark {
    /// Of the calling thread.
    pub(crate) fn of_this() -> Self {
        std::thread_local! {
            /// Has no destructor, so it can be asked for as long as the thread lives.
            static MARK: std::cell::Cell<u8> = const { std::cell::Cell::new(0) };
        }
        Self(MARK.with(|mark| std::ptr::from_ref(mark).addr()))
    }

    /// Whether it was the calling thread, which lives as long as what it marks.
    pub(crate) fn is_this(self) -> bool {
        !EXPLORED && self.0 == Self::of_this().0
    }
}

/// A moment for other threads.
pub(crate) fn pause() {
    #[cfg(not(any(loom, shuttle)))]
    std::hint::spin_loop();
    #[cfg(shuttle)]
    thread::yield_now();
}

/// Locks `mutex`, also after a panic of another holder: every critical section here leaves its
/// data whole before it calls anything that may panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits on `condition`, with the same stance on poisoning as [`lock`].
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}
