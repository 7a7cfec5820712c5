//! Numbers that threads leave behind as they end, until other threads take them.
//!
//! A stack without a lock on the side of those that end: one that ended in a forked child would wait for a lock whose
//! holder does not exist there, and nothing that it may ask tells it surely that it is in one.
//!
//! Any number of threads push at once, each a chain of its own numbers; one at a time pops (Treiber 1986). So the number that
//! is about to be popped cannot be popped by another meanwhile and pushed again, and what was read behind it is what is
//! behind it.

use crate::sync::{AtomicU32, Ordering};

/// Where a number has the one below it.
#[derive(Debug)]
pub(crate) struct Below(AtomicU32);

impl Below {
    pub(crate) fn nothing() -> Self {
        Self(AtomicU32::new(NOTHING))
    }
}

/// No number; the number `n` is written as `n + 1`.
const NOTHING: u32 = 0;

const fn written(number: u32) -> u32 {
    number + 1
}

/// Numbers below `u32::MAX`, each at most once.
#[derive(Debug)]
pub(crate) struct Abandoned(AtomicU32);

impl Abandoned {
    pub(crate) fn none() -> Self {
        Self(AtomicU32::new(NOTHING))
    }

    /// Adds `numbers`, which are the caller's until then. `below` says where each has the one below it.
    pub(crate) fn push<'b>(&self, numbers: &[u32], below: impl Fn(u32) -> Option<&'b Below>) {
        let set = |number: u32, under: u32| {
            // Relaxed: told by the exchange.
            below(number).into_iter().for_each(|it| it.0.store(under, Ordering::Relaxed));
        };
        let (Some(&first), Some(&last)) = (numbers.first(), numbers.last()) else { return };
        numbers.windows(2).for_each(|pair| set(pair[0], written(pair[1])));
        // Relaxed: only compared.
        let mut top = self.0.load(Ordering::Relaxed);
        loop {
            set(last, top);
            // Release: who pops these finds what is below them, and what their thread did before it ended.
            let pushed =
                self.0.compare_exchange(top, written(first), Ordering::Release, Ordering::Relaxed);
            match pushed {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// Takes one. One thread at a time calls this: it holds a lock. `below` as for [`push`](Self::push).
    pub(crate) fn pop<'b>(&self, below: impl Fn(u32) -> Option<&'b Below>) -> Option<u32> {
        // Acquire: pairs with each push of what stands here now, since exchanges alone came behind it.
        let mut top = self.0.load(Ordering::Acquire);
        loop {
            let number = top.checked_sub(written(0))?;
            // Relaxed: ordered by the load of `top`; no other thread pops it, so it stays.
            let under = below(number)?.0.load(Ordering::Relaxed);
            // Acquire where it fails: as above.
            match self.0.compare_exchange(top, under, Ordering::Relaxed, Ordering::Acquire) {
                Ok(_) => return Some(number),
                Err(now) => top = now,
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn each_number_comes_back_once() {
        let below: Vec<_> = (0..5).map(|_| Below::nothing()).collect();
        let below = |number: u32| below.get(number as usize);
        let abandoned = Abandoned::none();
        assert_eq!(abandoned.pop(below), None);
        abandoned.push(&[], below);
        abandoned.push(&[0, 3], below);
        abandoned.push(&[4, 1, 2], below);
        let popped: Vec<_> = std::iter::from_fn(|| abandoned.pop(below)).collect();
        assert_eq!(popped, [4, 1, 2, 0, 3]);
        abandoned.push(&[3], below);
        assert_eq!((abandoned.pop(below), abandoned.pop(below)), (Some(3), None));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod models {
    //! # Safety
    //!
    //! Reopens `unsafe_code` for cells that stand for what the owner of a number does.

    #![allow(unsafe_code)]

    use super::*;
    use crate::sync::UnsafeCell;
    use loom::thread;
    use std::sync::Arc;

    struct Pool {
        abandoned: Abandoned,
        below: [Below; 4],
        /// What each number's thread did last, which the next thread sees.
        done: [UnsafeCell<u32>; 4],
    }

    impl Pool {
        fn below(&self, number: u32) -> Option<&Below> {
            self.below.get(number as usize)
        }

        fn push(&self, numbers: &[u32]) {
            for &number in numbers {
                // SAFETY: the number is the caller's until it is pushed.
                self.done[number as usize].with_mut(|done| unsafe { *done += 1 });
            }
            self.abandoned.push(numbers, |number| self.below(number));
        }

        fn pop(&self) -> Option<u32> {
            let number = self.abandoned.pop(|number| self.below(number))?;
            // SAFETY: it is the caller's now.
            assert!(self.done[number as usize].with(|done| unsafe { *done }) > 0, "a push is seen");
            Some(number)
        }
    }

    /// Two threads end while a third takes numbers, and leaves one behind again.
    #[test]
    fn loom_what_is_abandoned_is_taken_once() {
        crate::exploring::explore(3, || {
            let pool = Arc::new(Pool {
                abandoned: Abandoned::none(),
                below: std::array::from_fn(|_| Below::nothing()),
                done: std::array::from_fn(|_| UnsafeCell::new(0)),
            });
            pool.push(&[0]);
            let threads = [vec![1, 2], vec![3]].map(|numbers| {
                let pool = Arc::clone(&pool);
                thread::spawn(move || pool.push(&numbers))
            });
            let mut taken: Vec<_> = (0..2).filter_map(|_| pool.pop()).collect();
            pool.push(&taken.pop().into_iter().collect::<Vec<_>>());
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            taken.extend(std::iter::from_fn(|| pool.pop()));
            taken.sort_unstable();
            assert_eq!(taken, [0, 1, 2, 3]);
        });
    }
}
