//! A value of the whole process that is made when it is first needed, and that no thread waits for.
//!
//! A thread that fills `std`'s `OnceLock` makes the others wait. A child that is forked in that moment has the cell as
//! it is then, and not the thread: it would wait for ever. Here threads that need the value at once make one each, and the
//! first that is published counts. The price: what is made besides is made in vain.
//!
//! # Safety
//!
//! This file reopens `unsafe_code` to follow a pointer to a value that is kept for good.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Empty, or a value that is kept as long as the process lives, also when this goes.
pub struct FirstMade<T: 'static> {
    /// Null, or from a reference that never ends.
    value: AtomicPtr<T>,
}

// SAFETY: what threads do with this is to send each other a `&'static T`, for which `T: Sync` is asked; a value that comes
// too late is dropped by the thread that made it.
unsafe impl<T: Sync> Sync for FirstMade<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Send for FirstMade<T> {}

impl<T> FirstMade<T> {
    /// Nothing is made yet.
    pub const fn new() -> Self {
        Self { value: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The value, if one was made.
    #[inline(always)]
    pub fn get(&self) -> Option<&'static T> {
        // Acquire: pairs with `publish`; a thread that finds the value finds what it consists of.
        let value = self.value.load(Ordering::Acquire);
        // SAFETY: null, or from a `&'static T`.
        unsafe { value.as_ref() }
    }

    /// The value, made by `make` unless one was made. One that comes too late is dropped.
    pub fn get_or_make(&self, make: impl FnOnce() -> Box<T>) -> &'static T {
        self.get().unwrap_or_else(|| {
            let made = Box::into_raw(make());
            // SAFETY: the box is never freed where it is published.
            self.publish(unsafe { &*made }).unwrap_or_else(|first| {
                // SAFETY: it was not published, so the box is still ours alone.
                drop(unsafe { Box::from_raw(made) });
                first
            })
        })
    }

    /// The value: this one, unless one was made.
    pub fn get_or_set(&self, value: &'static T) -> &'static T {
        self.publish(value).unwrap_or_else(|first| first)
    }

    /// The error is the value that was first.
    fn publish(&self, value: &'static T) -> Result<&'static T, &'static T> {
        let pointer = ptr::from_ref(value).cast_mut();
        // Release: pairs with `get`. Acquire: the value of another thread is found whole.
        let (success, failure) = (Ordering::Release, Ordering::Acquire);
        let was = self.value.compare_exchange(ptr::null_mut(), pointer, success, failure);
        // SAFETY: not null, so from a `&'static T`.
        was.map(|_| value).map_err(|first| unsafe { &*first })
    }
}

impl<T> Default for FirstMade<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for FirstMade<T> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_tuple("FirstMade").field(&self.get()).finish()
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    #[test]
    fn threads_that_race_get_one_value_and_drop_the_others() {
        static MADE: AtomicU32 = AtomicU32::new(0);

        struct Made(u32);
        impl Drop for Made {
            fn drop(&mut self) {
                // Relaxed, as below: the threads are joined before it is looked at.
                MADE.fetch_sub(1, Ordering::Relaxed);
            }
        }

        static CELL: FirstMade<Made> = FirstMade::new();
        let together = Barrier::new(3);
        let make = || {
            together.wait();
            let made = CELL.get_or_make(|| {
                // Every thread has begun to make one before the first is published.
                together.wait();
                Box::new(Made(MADE.fetch_add(1, Ordering::Relaxed)))
            });
            ptr::from_ref(made).addr()
        };
        assert!(CELL.get().is_none());
        let found: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let first = CELL.get().unwrap();
        assert!(found.iter().all(|&value| value == ptr::from_ref(first).addr()));
        assert!(first.0 < 3);
        assert_eq!(MADE.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_first_that_is_set_stays() {
        static VALUES: [u32; 2] = [1, 2];
        let cell = FirstMade::new();
        assert_eq!(cell.get_or_set(&VALUES[0]), &1);
        assert_eq!(cell.get_or_set(&VALUES[1]), &1);
        assert_eq!(
            (cell.get_or_make(|| Box::new(3)), format!("{cell:?}")),
            (&1, "FirstMade(Some(1))".into())
        );
    }
}
